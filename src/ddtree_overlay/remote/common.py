# SPDX-License-Identifier: Apache-2.0
"""Refusals, digests, and paths that cannot leave the package."""

from __future__ import annotations

import hashlib
import os
import shlex
import stat
from pathlib import Path, PurePosixPath
from typing import Any


#: The import name of the package that is worked on.
PACKAGE = "sglang"


class Refusal(Exception):  # noqa: N818 - an answer, not an error
    """An answer of "no" that the operator reads. `{target}` in `next_step` becomes `--host NAME` or `--root PATH`.

    `kind` picks the error class on the operator's side: `failed`, `conflict`, `locked`, `rolled-back`, `incomplete`,
    `interpreter`, `connection`.
    """

    def __init__(self, kind: str, what: str, why: str = "", next_step: str = "") -> None:
        super().__init__(what)
        self.kind = kind
        self.what = what
        self.why = why
        self.next_step = next_step

    def as_dict(self) -> dict[str, str]:
        """The refusal as it travels."""
        return {"kind": self.kind, "what": self.what, "why": self.why, "next": self.next_step}


def digest(data: bytes) -> str:
    """Hex sha256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def read_file(path: Path) -> bytes:
    """The contents of a regular file; refuses a pipe, a device or a folder in its place by name, without waiting."""
    # Opening a pipe would wait for a writer that may never come.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise Refusal(
                "failed",
                f"{path} is not a regular file",
                why="a pipe, a device or a folder stands where a module belongs",
                next_step=f"ls -ld {shlex.quote(str(path))}  # on the host; then put the module back",
            )
        with os.fdopen(fd, "rb", closefd=False) as stream:
            return stream.read()
    finally:
        os.close(fd)


def digest_of_file(path: Path) -> str | None:
    """Hex sha256 of a file, or None when there is none."""
    try:
        return digest(read_file(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def inside(root: Path, path: str) -> Path:
    """`root / path`; refuses a path that would leave `root` by name."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or not pure.parts or ".." in pure.parts or "\0" in path:
        raise Refusal("failed", f"refusing the path {path!r}: it leaves the package folder")
    return root.joinpath(*pure.parts)


def entry(root: Path, path: str) -> dict[str, Any] | None:
    """Digest and attributes of one file of the package, or None when it is absent."""
    full = inside(root, path)
    sha = digest_of_file(full)
    if sha is None:
        return None
    st = full.stat()
    return {
        "path": path,
        "sha256": sha,
        "size": st.st_size,
        "mode": stat.S_IMODE(st.st_mode),
        "uid": st.st_uid,
        "gid": st.st_gid,
        "nlink": st.st_nlink,
        "owner": owner_of(st),
    }


def owner_of(st: os.stat_result) -> str:
    """`user:group` of a stat result, by number where there is no name."""
    import grp
    import pwd

    try:
        user = pwd.getpwuid(st.st_uid).pw_name
    except KeyError:
        user = str(st.st_uid)
    try:
        group = grp.getgrgid(st.st_gid).gr_name
    except KeyError:
        group = str(st.st_gid)
    return f"{user}:{group}"


def split(payload: bytes, sizes: list[int]) -> list[bytes]:
    """Cut `payload` into consecutive pieces of `sizes`."""
    if sum(sizes) != len(payload):
        raise Refusal("connection", f"the payload has {len(payload)} bytes, {sum(sizes)} were announced")
    pieces, at = [], 0
    for size in sizes:
        pieces.append(payload[at : at + size])
        at += size
    return pieces
