# SPDX-License-Identifier: Apache-2.0
"""Running processes that serve from this interpreter: they keep the code they have imported until restarted."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any


#: Names of options whose value nobody else may read; `--tokenizer-path` is none of them.
_SECRET = re.compile(rb"key|token(?!iz)|password|secret", re.IGNORECASE)
_HIDDEN = b"***"
#: The last word of an agent's command line: an interpreter in a folder named after sglang would make it a server.
_AGENT = re.compile(rb"ddtree-[0-9a-f]{32}\Z")


def running() -> list[dict[str, Any]]:
    """Processes of this interpreter whose command line names sglang.

    Each has pid, parent, command, and its start in seconds since 1970 and since the machine was started.
    Processes of other users whose executable may not be read are left out, as are those in other pid namespaces.
    Secrets on a command line (`--api-key`) are blotted out here, so that they do not leave the host.
    """
    boot = _boot_time()
    asking = _ancestors()
    found = []
    for name in os.listdir("/proc") if boot else []:
        if not name.isdigit() or int(name) in asking:
            continue
        folder = Path("/proc") / name
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if not any(b"sglang" in w for w in words) or any(map(_AGENT.match, words)) or not _ours(folder, words):
                continue
            # The command name in field 2 may hold blanks and parentheses; count fields from its end.
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        up = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        command = b" ".join(without_secrets(words)).decode("utf-8", "replace").strip()
        times = {"started": boot + up, "up": up}
        found.append({"pid": int(name), "parent": int(fields[1]), "command": command[:200], **times})
    return sorted(found, key=lambda p: int(p["pid"]))


def without_secrets(words: list[bytes]) -> list[bytes]:
    """`words` of a command line with the values of secret options replaced, for `--key value` and `--key=value`."""
    shown, hide_next = [], False
    for word in words:
        name, equals, _ = word.partition(b"=")
        if hide_next and not word.startswith(b"-"):
            shown.append(_HIDDEN)
        else:
            shown.append(name + equals + _HIDDEN if equals and _SECRET.search(name) else word)
        hide_next = word.startswith(b"-") and not equals and bool(_SECRET.search(word))
    return shown


def _ancestors() -> set[int]:
    """This process and those that started it: whoever asks may have sglang in its own command line."""
    found: set[int] = set()
    pid = os.getpid()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
    return found


def _ours(folder: Path, words: list[bytes]) -> bool:
    if os.path.realpath(folder / "exe") != os.path.realpath(sys.executable):
        return False
    # Virtual environments share one real executable; the path it was started by tells them apart. A server that renamed
    # its processes (`sglang::scheduler`) has no such path, but it has extension modules of its packages mapped.
    first = os.fsdecode(words[0])
    if os.path.isabs(first) and os.path.exists(first):
        return os.path.dirname(os.path.dirname(os.path.abspath(first))) == os.path.abspath(sys.prefix)
    libraries = os.fsencode(os.path.realpath(sysconfig.get_path("platlib"))) + b"/"
    return libraries in (folder / "maps").read_bytes()


def _boot_time() -> float:
    """Seconds since 1970 at which the clock of start times began; /proc/stat knows it in whole seconds only."""
    try:
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    except (AttributeError, OSError):
        return 0.0
