# SPDX-License-Identifier: Apache-2.0
"""Which core runs which process of an engine, so that arms of different engines differ by what they do alone.

Engines are measured in turns and sleep otherwise. So all schedulers get the same cores, one after the other: whatever
a core is good for, every arm gets it. Clients (with SGLang's tokenizer manager), detokenizers and the benchmark itself
have cores of their own beside them. Linux only.
"""

from __future__ import annotations

import os
from pathlib import Path


#: What runs in an engine's processes, by the titles that SGLang gives them; anything else is the client's.
TITLES = {"sglang::scheduler": "scheduler", "sglang::detokenizer": "detokenizer"}
#: In this order roles get cores; the scheduler, whose threads of PyTorch work beside the one that launches, up to MOST.
ROLES = ("scheduler", "client", "detokenizer", "benchmark")
LEAST, MOST = 2, 4


def layout(cores: list[list[int]]) -> dict[str, list[int]]:
    """Which CPUs each role gets; none at all when the cores do not suffice to keep the scheduler apart.

    Args:
        cores: The CPUs of each physical core that may be used.
    """
    if len(cores) < LEAST:
        return {}
    # The first core has a kernel's own work on many machines.
    free = cores[1:] if len(cores) > len(ROLES) + 1 else list(cores)
    count = min(max(len(free) - len(ROLES) + 1, 1), MOST)
    found = {ROLES[0]: [cpu for core in free[:count] for cpu in core]}
    rest = free[count:]
    for number, role in enumerate(ROLES[1:]):
        found[role] = list(rest[min(number, len(rest) - 1)])
    return found


def physical_cores() -> list[list[int]]:
    """The CPUs that this process may use, those of one physical core together."""
    found: dict[str, list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        found.setdefault(siblings.read_text().strip() if siblings.exists() else str(cpu), []).append(cpu)
    return list(found.values())


def processes(root: int) -> dict[int, str]:
    """A process and all that it has started, with their roles."""
    parents: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in brackets may hold anything; the parent is the second word behind it.
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
    found = {root: role_of(root)}
    while more := {pid: role_of(pid) for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= more
    return found


def role_of(pid: int) -> str:
    """What a process does in an engine, by its title."""
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        title = ""
    return next((role for start, role in TITLES.items() if title.startswith(start)), "client")


def pin(pid: int, cpus: list[int]) -> None:
    """Every thread of a process; those that it starts later inherit it."""
    for thread in Path(f"/proc/{pid}/task").glob("[0-9]*"):
        try:
            os.sched_setaffinity(int(thread.name), cpus)
        except ProcessLookupError:
            continue


def pinned(pid: int) -> list[list[int]]:
    """The CPUs of a process's threads as the kernel has them, each set once."""
    found = set()
    for thread in Path(f"/proc/{pid}/task").glob("[0-9]*"):
        try:
            found.add(tuple(sorted(os.sched_getaffinity(int(thread.name)))))
        except ProcessLookupError:
            continue
    return [list(cpus) for cpus in sorted(found)]


def pin_engines(roots: dict[str, int], plan: dict[str, list[int]]) -> dict[str, dict[str, list[list[int]]]]:
    """Pin the processes of engines, by their first process, and this one: what the kernel says of each afterwards."""
    found: dict[str, dict[str, list[list[int]]]] = {}
    for name, root in roots.items():
        roles = processes(root)
        for pid, role in roles.items():
            pin(pid, plan[role])
        found[name] = {}
        for pid, role in roles.items():
            held = found[name].setdefault(role, [])
            held += [cpus for cpus in pinned(pid) if cpus not in held]
    pin(os.getpid(), plan["benchmark"])
    found["benchmark"] = {"benchmark": pinned(os.getpid())}
    return found
