# SPDX-License-Identifier: Apache-2.0
"""Versions, interpreter, disk, container: what `doctor` and the snapshot say about the host."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

from .common import Refusal, entry, owner_of
from .kernels import cuda_links
from .locate import Site, installed_version, locate
from .processes import running


#: Distribution in the answer -> names that its releases were published under, the current one first.
DISTRIBUTIONS = {
    "torch": ("torch",),
    "sglang-kernel": ("sglang-kernel", "sgl-kernel"),
    "flashinfer-python": ("flashinfer-python",),
    "triton": ("triton",),
    "transformers": ("transformers",),
}


def versions(site: Site, *, from_folder: bool) -> dict[str, str | None]:
    """The versions of everything that decides whether SGLang runs; None where it is not installed or not known.

    Nothing is imported: torch alone would take seconds, and a broken install must be describable too.
    """
    found: dict[str, str | None] = {"sglang": site.version, "python": None, "cuda": None}
    found.update(dict.fromkeys(DISTRIBUTIONS))
    if from_folder:
        return found
    found["python"] = platform.python_version()
    for name, published in DISTRIBUTIONS.items():
        found[name] = next((v for v in map(installed_version, published) if v), None)
    torch = _torch_version_file()
    found["cuda"] = torch.get("cuda")
    # The metadata may lack the local tag (`+cu128`) that says which CUDA torch was built for.
    found["torch"] = torch.get("torch") or found["torch"]
    return found


def _torch_version_file() -> dict[str, str]:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return {}
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    found = {}
    for key, name in (("torch", "__version__"), ("cuda", "cuda")):
        match = re.search(rf"^{name}(?:\s*:[^=\n]*)?\s*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        if match:
            found[key] = match[1]
    return found


def python_facts() -> dict[str, Any]:
    """The interpreter that runs this."""
    return {
        "executable": sys.executable,
        "version": platform.python_version(),
        "prefix": sys.prefix,
        "venv": sys.prefix != sys.base_prefix,
        "pycache_prefix": sys.pycache_prefix,
    }


def facts(args: dict[str, Any], _: bytes) -> tuple[dict[str, Any], bytes]:
    """Everything `doctor` wants to know in one answer; a missing SGLang is part of the answer, not a refusal."""
    from .reading import describe

    result: dict[str, Any] = {"host": platform.node(), "platform": platform.platform(), "interpreter": python_facts()}
    result["user"] = {"uid": os.geteuid(), "home": os.path.expanduser("~")}
    result["selinux"] = _read("/sys/fs/selinux/enforce").strip()
    try:
        site = locate(args)
    except Refusal as refusal:
        return {**result, "sglang": None, "refusal": refusal.as_dict()}, b""
    result["sglang"] = {k: v for k, v in describe(site, args).items() if k != "interpreter"}
    result["requires"] = _requirements()
    result["cuda_links"] = [] if args.get("root") else cuda_links()
    result["disk"] = disk(site.root.parent)
    result["access"] = access(site)
    result["container"] = container(site.root)
    result["processes"] = running()
    result["standing"] = _standing(site)
    result["digests"] = {p: (entry(site.root, p) or {}).get("sha256") for p in args.get("paths", [])}
    return result, b""


def _standing(site: Site) -> dict[str, Any]:
    """How the live deployment stands; damaged state is for `status` to tell."""
    from .installed import remedy
    from .standing import standing
    from .store import Store

    store = Store(site.state, site.root)
    try:
        found = standing(site, store, store.current())
    except Refusal as refusal:
        return {"state": "damaged", "reason": refusal.what, "fault": "", "remedy": ""}
    fault = found.installed.fault
    step = remedy(site, found.record["version"] if found.record else None) if fault else ""
    return {"state": found.state, "reason": found.reason, "fault": fault, "remedy": step}


def _requirements() -> list[str]:
    import importlib.metadata

    try:
        return importlib.metadata.requires("sglang") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def disk(folder: Path) -> dict[str, Any]:
    """Free blocks and inodes of the file system that holds `folder`; `inodes` is None where it counts none."""
    st = os.statvfs(folder)
    return {
        "free": st.f_bavail * st.f_frsize,
        "inodes": st.f_favail if st.f_files else None,
        "read_only": bool(st.f_flag & os.ST_RDONLY),
    }


def access(site: Site) -> dict[str, Any]:
    """Whether this user may write where a push writes."""
    parent = site.root.parent
    return {
        "root": os.access(site.root, os.W_OK | os.X_OK),
        "parent": os.access(parent, os.W_OK | os.X_OK),
        "owner": owner_of(site.root.stat()),
    }


def container(root: Path) -> dict[str, Any]:
    """Whether this is a container, and whether the package lies in its throw-away layer."""
    kind = ""
    if os.path.exists("/.dockerenv"):
        kind = "docker"
    elif os.path.exists("/run/.containerenv"):
        kind = "podman"
    elif re.search(r"kubepods|docker|containerd|lxc", _read("/proc/1/cgroup")):
        kind = "container"
    filesystem = filesystem_of(root)
    return {"kind": kind, "filesystem": filesystem, "ephemeral": bool(kind) and filesystem == "overlay"}


def filesystem_of(path: Path) -> str:
    """The type of the file system that `path` lies on, as the mount table names it."""
    best, kind = "", ""
    for point, filesystem in mounts():
        if (path == Path(point) or Path(point) in path.parents) and len(point) >= len(best):
            best, kind = point, filesystem
    return kind


def mounts() -> list[tuple[str, str]]:
    """Every mount point with the type of its file system."""
    found = []
    for line in _read("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        # The table writes blanks and backslashes in names as octal escapes.
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), left.split()[4])
        found.append((point, right.split()[0]))
    return found


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as stream:
            return stream.read()
    except OSError:
        return ""
