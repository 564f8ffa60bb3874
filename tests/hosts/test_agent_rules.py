# SPDX-License-Identifier: Apache-2.0
"""What must hold for every module that runs on the host."""

from __future__ import annotations

import ast
import logging
import re
import subprocess
import sys
from importlib import resources

import pytest

from ddtree_overlay.errors import OverlayError
from ddtree_overlay.hosts import protocol


FOLDER = resources.files("ddtree_overlay") / "remote"
MODULES = sorted(f.name for f in FOLDER.iterdir() if f.name.endswith(".py"))


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_python_3_9_and_standard_library_only(name):
    """The host's interpreter may be as old as 3.9 and has nothing of ours installed."""
    tree = ast.parse((FOLDER / name).read_text("utf-8"), feature_version=(3, 9))
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        assert all(n.partition(".")[0] in sys.stdlib_module_names for n in names), names


def test_unions_are_only_written_where_they_are_not_evaluated():
    """`X | None` outside an annotation fails under Python 3.9 although it parses."""
    for name in MODULES:
        tree = ast.parse((FOLDER / name).read_text("utf-8"))
        assigned = [n.value for n in tree.body if isinstance(n, ast.Assign)]
        unions = [n for v in assigned for n in ast.walk(v) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.BitOr)]
        assert unions == [], name


def test_the_bootstrap_survives_any_login_shell():
    """One line without anything that a POSIX, C or fish shell changes inside single quotes."""
    assert not set(protocol.BOOTSTRAP) & set("'!$`\\\n")


def test_an_old_interpreter_is_told_so():
    """The first thing the bootstrap does is to look at the version."""
    code = f"import sys; sys.version_info = (2, 7); sys.version = '2.7.18 x'; exec({protocol.BOOTSTRAP!r})"
    done = subprocess.run([sys.executable, "-c", code, "mark"], input=b"", capture_output=True, check=False)
    output = protocol.Output(done.stdout, done.stderr, done.returncode)
    error = protocol.missing_answer(output, "mark", "/usr/bin/python", "ct200", "--host ct200")
    assert "Python 3.9 or newer is needed" in error.what
    assert "2.7.18" in error.why


def test_what_was_told_meanwhile_is_no_part_of_the_reason():
    """An agent that is killed in the middle of a trial has told how far it is; its marks are nothing to be read."""
    output = protocol.Output(b"Welcome\n\nmark~restarting the server\n\n", b"", None)
    error = protocol.missing_answer(output, "mark", "/usr/bin/python", "ct200", "--host ct200")
    assert error.why == "Welcome"


def test_a_fault_of_the_agent_is_told_in_lines_and_its_traceback_goes_to_the_log(near, caplog):
    """`why` names the place and the next step the way on; the traceback is for -vv, which shows the debug log."""
    with caplog.at_level(logging.DEBUG), pytest.raises(OverlayError, match="fault in the agent: KeyError") as caught:
        near.call("fetch", {})
    assert re.fullmatch(r"in fetch, <[\w.]+reading> line \d+", caught.value.why)
    assert caught.value.next_step.startswith("ddtree-overlay status --host here; run the command again with -vv")
    assert "Traceback (most recent call last)" in caplog.text
