# SPDX-License-Identifier: Apache-2.0
"""Which CUDA runtime the installed kernels link to, read from the ELF files themselves."""

from __future__ import annotations

import importlib.util
import os
import re
import struct
from pathlib import Path
from typing import Any, BinaryIO


#: Import names under which the kernel packages install their shared objects.
KERNEL_PACKAGES = ("sgl_kernel", "sglang_kernel")
_DYNAMIC, _NEEDED, _STRTAB = 2, 1, 5


def cuda_links() -> list[dict[str, Any]]:
    """For each shared object of the kernel packages that links to a CUDA runtime: its path and that runtime's major.

    A package for several architectures may hold several objects; each says for itself what it needs.
    """
    found = []
    for package in KERNEL_PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(Path(folder).rglob("*.so")):
                for name in needed(path):
                    match = re.match(r"libcudart\.so\.(\d+)", name)
                    if match:
                        found.append({"package": package, "path": str(path), "library": name, "major": int(match[1])})
    return found


def needed(path: Path) -> list[str]:
    """The libraries that a 64-bit little-endian ELF file asks for (DT_NEEDED); empty for any other file."""
    try:
        with path.open("rb") as stream:
            return _needed(stream)
    except (OSError, struct.error, ValueError, IndexError, StopIteration):
        return []


def _needed(stream: BinaryIO) -> list[str]:
    head = stream.read(64)
    if head[:6] != b"\x7fELF\x02\x01":
        return []
    table, size, count = struct.unpack_from("<Q", head, 32)[0], *struct.unpack_from("<HH", head, 54)
    segments = [struct.unpack("<IIQQQQQQ", _at(stream, table + i * size, 56)) for i in range(count)]
    dynamic = next((s for s in segments if s[0] == _DYNAMIC), None)
    if dynamic is None:
        return []
    raw = _at(stream, dynamic[2], dynamic[5])
    entries = [struct.unpack_from("<qQ", raw, i) for i in range(0, len(raw) - 15, 16)]
    strings = next(value for tag, value in entries if tag == _STRTAB)
    # The string table is named by its address in memory; the segment that holds it says where that is in the file.
    load = next(s for s in segments if s[0] == 1 and s[3] <= strings < s[3] + s[5])
    offset = strings - load[3] + load[2]
    return [_string(stream, offset + value) for tag, value in entries if tag == _NEEDED]


def _at(stream: BinaryIO, offset: int, size: int) -> bytes:
    stream.seek(offset, os.SEEK_SET)
    data = stream.read(size)
    if len(data) != size:
        raise ValueError("truncated ELF file")
    return data


def _string(stream: BinaryIO, offset: int) -> str:
    stream.seek(offset, os.SEEK_SET)
    return stream.read(256).split(b"\0", 1)[0].decode("ascii", "replace")
