# SPDX-License-Identifier: Apache-2.0
"""Whether a host can serve SGLang with the overlay, and where two hosts differ."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ddtree_overlay.errors import OverlayError
from ddtree_overlay.hosts.transport import Transport
from ddtree_overlay.releases import RELEASES


Level = Literal["ok", "info", "warning", "error"]
_LEVELS: tuple[Level, ...] = ("ok", "info", "warning", "error")
#: Distributions whose version SGLang's own metadata fixes; another one is the usual reason for a broken server.
_PINNED = ("torch", "sglang-kernel", "flashinfer-python", "transformers", "triton")
_OLDEST_PYTHON = (3, 10)
#: A push needs little; a server that has less than this left has other troubles.
_LOW_DISK = 200 * 1024 * 1024
_LOW_INODES = 1000


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    level: Level
    message: str
    next_step: str = ""


@dataclass(frozen=True, slots=True)
class Doctor:
    """Everything that was looked at on one host; `facts` is what the agent answered."""

    host: str
    target: str
    facts: Mapping[str, Any]
    checks: tuple[Check, ...]

    @property
    def worst(self) -> Level:
        """The most serious level of all checks."""
        return max((c.level for c in self.checks), key=_LEVELS.index, default="ok")

    @property
    def usable(self) -> bool:
        """Whether an SGLang was found there, so that there is something to compare."""
        return bool(self.facts) and self.facts["sglang"] is not None

    def as_dict(self) -> dict[str, Any]:
        """The value as `--json` prints it."""
        return {**asdict(self), "facts": dict(self.facts), "worst": self.worst}


@dataclass(frozen=True, slots=True)
class Difference:
    """One item in which two hosts differ."""

    item: str
    here: str
    there: str

    def as_dict(self) -> dict[str, Any]:
        """The value as `--json` prints it."""
        return asdict(self)


def diagnose(transport: Transport, paths: Collection[str] = ()) -> Doctor:
    """Look at a host. What can be said about is said in the result, a dead connection included.

    Args:
        transport: The host.
        paths: Package-relative files whose digests `compare` shall compare.
    """
    try:
        facts = transport.call("facts", {"paths": sorted(paths)}).result
    except OverlayError as e:
        name = "connection" if e.exit_code == 8 else "interpreter"
        return Doctor(transport.name, transport.target, {}, (Check(name, "error", _sentence(e), e.next_step),))
    checks = [Check("connection", "ok", f"{facts['platform']} answers as uid {facts['user']['uid']}")]
    checks += [Check("connection", "warning", w) for w in transport.warnings]
    return Doctor(transport.name, transport.target, facts, (*checks, *judge(facts, transport.target)))


def _sentence(e: OverlayError) -> str:
    return f"{e.what}: {e.why}" if e.why else e.what


def judge(facts: Mapping[str, Any], target: str) -> list[Check]:
    """The checks that follow from what the agent found. Pure."""
    checks = list(_interpreter(facts))
    if facts["sglang"] is None:
        refusal = facts["refusal"]
        step = refusal["next"].replace("{target}", target)
        return [*checks, Check("sglang", "error", refusal["what"], step)]
    rules: tuple[Callable[[Mapping[str, Any]], Iterator[Check]], ...] = (
        _release,
        _pins,
        _cuda,
        _access,
        _disk,
        _container,
        _processes,
        _selinux,
    )
    return [*checks, *(check for rule in rules for check in rule({**facts, "target": target}))]


def _interpreter(facts: Mapping[str, Any]) -> Iterator[Check]:
    found = facts["interpreter"]
    said = f"Python {found['version']} at {found['executable']}"
    if _numbers(found["version"])[:2] < _OLDEST_PYTHON:
        yield Check("interpreter", "error", f"{said}: SGLang needs 3.10", "set `python` in deploy.toml to a newer one")
        return
    yield Check("interpreter", "ok", said + ("" if found["venv"] else " (not a virtual environment)"))
    if found["pycache_prefix"]:
        yield Check("interpreter", "info", f"compiled files go to {found['pycache_prefix']}; a push cleans there too")


def _release(facts: Mapping[str, Any]) -> Iterator[Check]:
    sglang = facts["sglang"]
    version = sglang["versions"]["sglang"]
    said = f"SGLang {version} in {sglang['root']} ({sglang['install']})"
    supported = [r.version for r in RELEASES]
    if not sglang["dflash"]:
        step = _pip(facts, f"sglang=={supported[-1]}")
        yield Check("sglang", "error", f"{said} has no DFlash, which DDTREE builds on", step)
    elif version not in supported:
        step = _pip(facts, f"sglang=={supported[-1]}")
        yield Check("sglang", "warning", f"{said} is not one of the supported releases: {', '.join(supported)}", step)
    else:
        yield Check("sglang", "ok", said)
    found = facts["standing"]
    if found["fault"]:
        step = found["remedy"].replace("{target}", facts["target"])
        yield Check("sglang", "error", f"SGLang is not whole: {found['fault']}", step)
    elif found["state"] not in ("pristine", "applied"):
        yield Check("overlay", "warning", found["reason"], f"ddtree-overlay status {facts['target']}")


def _pip(facts: Mapping[str, Any], what: str) -> str:
    return f"{shlex.quote(facts['interpreter']['executable'])} -m pip install {what}  # on the host"


def _pins(facts: Mapping[str, Any]) -> Iterator[Check]:
    """What this SGLang says about itself in its metadata is what it is known to work with."""
    versions = facts["sglang"]["versions"]
    pins = pinned(facts["requires"])
    for name in _PINNED:
        have, want = versions.get(name), pins.get(name)
        if want is None:
            continue
        if have is None:
            yield Check(
                name,
                "warning",
                f"{name} is not installed; this SGLang needs {want}",
                _pip(facts, f"{name}=={want}"),
            )
        elif have.partition("+")[0] != want:
            yield Check(
                name,
                "warning",
                f"{name} {have}; this SGLang was made for {want}",
                _pip(facts, f"{name}=={want}"),
            )
        else:
            yield Check(name, "ok", f"{name} {have}")


def pinned(requires: Collection[str]) -> dict[str, str]:
    """Distribution (normalised name) -> version, for every unconditional `name==version` of `requires`."""
    found = {}
    for line in requires:
        match = re.match(r"([A-Za-z0-9._-]+)\s*==\s*([^\s;,]+)\s*$", line)
        if match:
            found[re.sub(r"[-_.]+", "-", match[1]).lower()] = match[2]
    return found


def _cuda(facts: Mapping[str, Any]) -> Iterator[Check]:
    """The classic: a torch built for one CUDA under kernels that link to the runtime of another."""
    versions = facts["sglang"]["versions"]
    torch = versions.get("torch")
    built_for = cuda_major(torch, versions.get("cuda"))
    majors = sorted({link["major"] for link in facts["cuda_links"]})
    if not torch:
        yield Check("cuda", "info", "torch is not installed; nothing to compare the kernels with")
    elif built_for is None:
        yield Check("cuda", "info", f"torch {torch} is a build without CUDA")
    elif not majors:
        yield Check("cuda", "info", f"torch {torch} is built for CUDA {built_for}; no kernel links to a CUDA runtime")
    elif majors != [built_for] and built_for not in majors:
        link = facts["cuda_links"][0]
        yield Check(
            "cuda",
            "error",
            f"torch {torch} is built for CUDA {built_for}, but the kernels link to {link['library']} ({link['path']})",
            f"install a torch and a {link['package'].replace('_', '-')} that are built for the same CUDA",
        )
    else:
        yield Check("cuda", "ok", f"torch {torch} and the kernels are both built for CUDA {built_for}")


def cuda_major(torch: str | None, cuda: str | None) -> int | None:
    """The CUDA major that torch is built for: from its version file, else from its local tag (`+cu128` is 12.8)."""
    if cuda:
        return int(cuda.split(".")[0])
    tag = re.search(r"\+cu(\d+)\d$", torch or "")
    return int(tag[1]) if tag else None


def _access(facts: Mapping[str, Any]) -> Iterator[Check]:
    access, root = facts["access"], facts["sglang"]["root"]
    if facts["disk"]["read_only"]:
        yield Check("access", "error", f"{root} is on a read-only file system", "remount it read-write")
    elif not (access["root"] and access["parent"]):
        step = "set `user` in deploy.toml to the owner of the install"
        yield Check(
            "access", "error", f"uid {facts['user']['uid']} may not write {root} (owner {access['owner']})", step
        )
    else:
        yield Check("access", "ok", f"{root} can be written (owner {access['owner']})")


def _disk(facts: Mapping[str, Any]) -> Iterator[Check]:
    free, inodes = facts["disk"]["free"], facts["disk"]["inodes"]
    said = f"{free // 2**20} MiB free" + (f", {inodes} inodes free" if inodes is not None else "")
    low = free < _LOW_DISK or (inodes is not None and inodes < _LOW_INODES)
    yield Check("disk", "warning" if low else "ok", said, "free some space on the host" if low else "")


def _container(facts: Mapping[str, Any]) -> Iterator[Check]:
    found = facts["container"]
    if found["ephemeral"]:
        said = f"a {found['kind']} container's throw-away layer holds SGLang: a push is lost when it is recreated"
        yield Check("container", "warning", said, "build the overlay into the image, or mount the package from outside")
    elif found["kind"]:
        yield Check("container", "info", f"this is a {found['kind']} container; SGLang lies on {found['filesystem']}")


def _processes(facts: Mapping[str, Any]) -> Iterator[Check]:
    for process in facts["processes"]:
        yield Check("processes", "info", f"pid {process['pid']} is running: {process['command'][:100]}")


def _selinux(facts: Mapping[str, Any]) -> Iterator[Check]:
    if facts["selinux"] == "1":
        root = facts["sglang"]["root"]
        yield Check(
            "selinux", "info", "SELinux is enforcing; labels of replaced files are kept", f"restorecon -Rv {root}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version))


def compare(a: Doctor, b: Doctor) -> tuple[Difference, ...]:
    """Where two hosts differ in what decides how SGLang behaves, in a fixed order.

    A host without a usable SGLang is one difference: nothing else of it can be compared.
    """
    if not (a.usable and b.usable):
        return (Difference("sglang", _version(a), _version(b)),)
    here, there = _items(a.facts), _items(b.facts)
    keys = [*here, *(k for k in there if k not in here)]
    return tuple(
        Difference(k, here.get(k, "-"), there.get(k, "-")) for k in keys if here.get(k, "-") != there.get(k, "-")
    )


def _version(found: Doctor) -> str:
    return (found.facts["sglang"]["versions"]["sglang"] or "unknown") if found.usable else "not usable"


def _items(facts: Mapping[str, Any]) -> dict[str, str]:
    sglang = facts["sglang"]
    items = {name: value or "-" for name, value in sglang["versions"].items()}
    items["install"] = sglang["install"]
    items["kernels link to"] = ", ".join(sorted({link["library"] for link in facts["cuda_links"]})) or "-"
    items.update({f"file {p}": (d or "absent")[:12] for p, d in facts["digests"].items()})
    return items
