# SPDX-License-Identifier: Apache-2.0
"""Compile and import probes: the patched tree under the host's Python, with the installed one left alone."""

from __future__ import annotations

import pytest
from tests.support.installs import tiny_package
from tests.support.trees import differences, listing

from ddtree_overlay.hosts.protocol import pack


def probed(transport, files, modules, **more):
    described, payload = pack(files)
    return transport.call("probe", {"files": described, "modules": modules, **more}, payload).result


def test_syntax_errors_have_path_line_and_message(near):
    """Compiled, not run, under the host's Python; what libcst lets through is found (return outside a function)."""
    files = {"srt/ok.py": b"X = 1\n", "srt/bad.py": b"X = 1\nreturn X\n", "srt/odd.py": b"def f(a, a):\n    pass\n"}
    described, payload = pack(files)
    result = near.call("compile", {"files": described}, payload).result
    assert [(e["path"], e["line"]) for e in result["errors"]] == [("srt/bad.py", 2), ("srt/odd.py", 1)]
    assert result["python"].startswith("3.")


def test_patched_files_are_imported_over_the_installed_ones(tiny, near, tmp_path, monkeypatch):
    """Unpatched modules come from the install, nothing is left behind, and a sound tree needs no look at the base."""
    before = listing(tiny.site)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    files = {
        "srt/a.py": b"from sglang.srt import b\nfrom sglang.srt.new.c import C\nassert b.VALUE == 2 and C == 3\n",
        "srt/new/__init__.py": b"",
        "srt/new/c.py": b"C = 3\n",
    }
    result = probed(near, files, ["sglang.srt.a", "sglang.srt.new.c", "sglang.srt.b"])
    assert result["patched"]["imports"] == dict.fromkeys(["sglang.srt.a", "sglang.srt.new.c", "sglang.srt.b"])
    assert result["patched"]["outside"] is False
    assert result["base"] is None
    assert differences(before, listing(tiny.site)) == []
    assert list((tmp_path / "scratch").iterdir()) == []


def test_an_import_that_fails_in_the_base_too_is_told_apart(tiny, near):
    """`No module named torch` on both sides is the host's fault, not the overlay's."""
    (tiny.root / "srt/b.py").write_bytes(b"import torch_is_not_here\n")
    result = probed(near, {"srt/a.py": b"import sglang.srt.b\n"}, ["sglang.srt.a", "sglang.srt.b"])
    assert "torch_is_not_here" in result["base"]["imports"]["sglang.srt.b"]
    assert "torch_is_not_here" in result["patched"]["imports"]["sglang.srt.a"]
    assert result["base"]["imports"]["sglang.srt.a"] is None


def test_a_module_that_ends_the_interpreter_is_reported(near):
    """A crash while importing is the answer for every module, with the exit status."""
    result = probed(near, {"srt/a.py": b"import os\nos._exit(7)\n"}, ["sglang.srt.a"])
    assert "ended with 7" in result["patched"]["imports"]["sglang.srt.a"]


def test_help_of_the_patched_server(tiny, near):
    """`python -m sglang.launch_server --help` runs with the patched tree first on the path."""
    server = b"import argparse\nfrom sglang.srt import a\n"
    server += b"p = argparse.ArgumentParser()\np.add_argument(a.FLAG)\np.parse_args()\n"
    (tiny.root / "launch_server.py").write_bytes(server)
    result = probed(near, {"srt/a.py": b"FLAG = '--ddtree-budget'\n"}, ["sglang.srt.a"], help=True)
    assert result["patched"]["help"]["code"] == 0
    assert "--ddtree-budget" in result["patched"]["help"]["output"]
    assert result["base"] is None


def test_help_that_fails_is_tried_with_the_base_too(tiny, near):
    """A server that does not even show its help says whether that is the overlay's doing."""
    server = b"from sglang.srt import a\nprint(a.FLAG)\n"
    (tiny.root / "launch_server.py").write_bytes(server)
    (tiny.root / "srt/a.py").write_bytes(b"FLAG = '--base'\n")
    result = probed(near, {"srt/a.py": b"NONE = 1\n"}, ["sglang.srt.a"], help=True)
    assert result["patched"]["help"]["code"] != 0
    assert "FLAG" in result["patched"]["help"]["error"]
    assert result["base"]["help"] == {"code": 0, "output": "--base\n", "error": ""}


def test_a_probe_that_hangs_is_ended(near):
    """An import that never returns is killed with everything it started, and said to have been."""
    result = probed(near, {"srt/a.py": b"import time\ntime.sleep(60)\n"}, ["sglang.srt.a"], timeout=2)
    assert "no end after 2 s" in result["patched"]["imports"]["sglang.srt.a"]


@pytest.mark.parametrize(
    "noise", [b"print('hello')", b"import os; os.write(1, b'raw')", b"import sys; sys.stderr.write('x' * 300000)"]
)
def test_what_modules_print_does_not_get_into_the_answer(tiny, near, noise):
    """Answers are framed; printing modules are normal."""
    del tiny
    result = probed(near, {"srt/a.py": noise + b"\n"}, ["sglang.srt.a"])
    assert result["patched"]["imports"] == {"sglang.srt.a": None}


def test_metadata_of_other_packages_is_not_lost(tiny, near):
    """The scratch tree shadows one package only; its neighbours stay importable."""
    tiny_package(tiny.site, "1.0", {"__init__.py": b"N = 1\n"}, "neighbour")
    code = b"import neighbour, importlib.metadata as m\nassert m.version('sglang') == '0.5.11' and neighbour.N\n"
    assert probed(near, {"srt/a.py": code}, ["sglang.srt.a"])["patched"]["imports"] == {"sglang.srt.a": None}
