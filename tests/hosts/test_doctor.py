# SPDX-License-Identifier: Apache-2.0
"""`doctor`: what it finds on a real interpreter with packages made to be wrong."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest
from tests.support.installs import Install, new_venv, tiny_package

from ddtree_overlay import doctor
from ddtree_overlay.config import Host
from ddtree_overlay.hosts.transport import open_transport
from ddtree_overlay.reports import plain, unusable_lines


def elf(needed: list[str]) -> bytes:
    """A 64-bit ELF shared object that holds nothing but the list of libraries it needs."""
    strings = b"\0" + b"".join(n.encode() + b"\0" for n in needed)
    offsets, at = [], 1
    for name in needed:
        offsets.append(at)
        at += len(name) + 1
    table = 64 + 2 * 56
    dynamic = b"".join(struct.pack("<qQ", 1, o) for o in offsets)
    start = table + len(dynamic) + 32
    # The file is mapped at 0x1000, so that addresses and offsets differ as in real files.
    dynamic += struct.pack("<qQ", 5, 0x1000 + start) + struct.pack("<qQ", 0, 0)
    size = start + len(strings)
    head = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 4, 0, 0x1000, 0x1000, size, size, 4096)
    dyn = struct.pack("<IIQQQQQQ", 2, 4, table, 0x1000 + table, 0x1000 + table, len(dynamic), len(dynamic), 8)
    return head + load + dyn + dynamic + strings


def with_torch(site: Path, version: str, cuda: str | None) -> None:
    text = f"__version__ = '{version}'\ncuda: Optional[str] = {cuda!r}\n".encode()
    tiny_package(site, version.partition("+")[0], {"__init__.py": b"raise RuntimeError\n", "version.py": text}, "torch")


def with_kernels(site: Path, major: int) -> None:
    objects = {
        "__init__.py": b"raise RuntimeError\n",
        "sm100/common_ops.abi3.so": elf(["libc.so.6", f"libcudart.so.{major}"]),
    }
    tiny_package(site, "0.4.2", objects, "sgl_kernel")
    shutil.rmtree(site / "sgl_kernel-0.4.2.dist-info")
    tiny_package(site, "0.4.2", {}, "sglang_kernel")


def checks(transport, paths=()):
    found = doctor.diagnose(transport, paths)
    return found, {c.name: c for c in found.checks}


@pytest.mark.parametrize(
    ("torch", "cuda", "level"),
    [
        ("2.11.0+cu128", "12.8", "error"),
        ("2.11.0+cu130", "13.0", "ok"),
        ("2.11.0+cu128", None, "error"),
        ("2.11.0+cpu", None, "info"),
    ],
)
def test_torch_and_kernels_of_different_cuda(tiny, near, torch, cuda, level):
    """The classic: a +cu128 torch under kernels that link to libcudart.so.13; nothing is imported to find out."""
    with_torch(tiny.site, torch, cuda)
    with_kernels(tiny.site, 13)
    found, by_name = checks(near)
    assert by_name["cuda"].level == level
    if level == "error":
        assert "libcudart.so.13" in by_name["cuda"].message
        assert "CUDA 12" in by_name["cuda"].message
        assert by_name["cuda"].next_step
    assert found.facts["sglang"]["versions"]["sglang-kernel"] == "0.4.2"


def test_a_truncated_or_foreign_shared_object_is_passed_over(tiny, near):
    """Any bytes may be called `.so`; none of them stops the doctor."""
    whole = elf(["libcudart.so.13"])
    objects = {f"x{n}.so": whole[:n] for n in range(0, len(whole), 7)}
    tiny_package(tiny.site, "0.4.2", {**objects, "text.so": b"/* linker script */", "__init__.py": b""}, "sgl_kernel")
    found, _ = checks(near)
    assert all(link["major"] == 13 for link in found.facts["cuda_links"])


def test_versions_are_compared_with_what_sglang_asks_for(sglang, here):
    """The pins of the installed SGLang's own metadata are the versions that are known to work with it."""
    with_torch(sglang.site, "2.9.1+cu130", "13.0")
    tiny_package(sglang.site, "5.6.0", {"__init__.py": b""}, "transformers")
    _, by_name = checks(here)
    assert by_name["sglang"].level == "ok"
    assert (by_name["torch"].level, by_name["transformers"].level) == ("warning", "ok")
    assert "2.9.1+cu130; this SGLang was made for 2.11.0" in by_name["torch"].message
    assert by_name["flashinfer-python"].level == "warning"


def test_a_healthy_host_is_said_to_be_healthy(here):
    """Interpreter, access and disk are reported when they are fine, too."""
    _, by_name = checks(here)
    assert {by_name[n].level for n in ("connection", "interpreter", "access", "disk")} == {"ok"}


def test_what_is_missing_is_a_finding_not_a_crash(tmp_path):
    """No SGLang, no interpreter, no connection: each one is an error with a next step."""
    python, site = new_venv(tmp_path / "venv")
    with open_transport(Install(python, site).host()) as transport:
        found, by_name = checks(transport)
    assert (found.worst, by_name["sglang"].level) == ("error", "error")
    with open_transport(Install(tmp_path / "nope", site).host()) as transport:
        assert checks(transport)[1]["interpreter"].level == "error"
    dead = Host(name="x", address="127.0.0.1", port=1, known_hosts="/dev/null", ssh_config="/dev/null", timeout=5.0)
    with open_transport(dead) as transport:
        found, by_name = checks(transport)
    assert (by_name["connection"].level, bool(by_name["connection"].next_step)) == ("error", True)


def test_compare_shows_where_two_hosts_differ(tiny, near, tmp_path):
    """Versions, kernels and the digests of modules; what is equal is left out."""
    python, site = new_venv(tmp_path / "other")
    tiny_package(site, "0.5.11")
    (site / "sglang/srt/b.py").write_bytes(b"VALUE = 3\n")
    with_torch(site, "2.11.0+cu130", "13.0")
    with_torch(tiny.site, "2.11.0+cu128", "12.8")
    paths = ["srt/a.py", "srt/b.py", "srt/none.py"]
    with open_transport(Install(python, site).host("there")) as transport:
        there = doctor.diagnose(transport, paths)
    here = doctor.diagnose(near, paths)
    assert doctor.compare(here, here) == ()
    found = {d.item: (d.here, d.there) for d in doctor.compare(here, there)}
    assert found["torch"] == ("2.11.0+cu128", "2.11.0+cu130")
    assert found["cuda"] == ("12.8", "13.0")
    assert set(found) == {"torch", "cuda", "file srt/b.py"}


def test_a_host_without_sglang_differs_in_one_line_that_says_why(near, tmp_path):
    """Every version and digest of the other host would say nothing; two unusable hosts are not called equal."""
    here = doctor.diagnose(near, ["srt/a.py"])
    python, site = new_venv(tmp_path / "bare")
    with open_transport(Install(python, site).host("bare")) as transport:
        bare = doctor.diagnose(transport, ["srt/a.py"])
    assert doctor.compare(here, bare) == (doctor.Difference("sglang", "0.5.11", "not usable"),)
    assert doctor.compare(bare, bare) == (doctor.Difference("sglang", "not usable", "not usable"),)
    shown = [plain(line) for line in unusable_lines(bare)]
    assert "there is no SGLang" in shown[1]
    assert "next: " in shown[2]
    assert len(shown) == 3
