# SPDX-License-Identifier: Apache-2.0
"""The help: quick, complete, and with an example everywhere."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddtree_overlay import __version__
from ddtree_overlay.cli import cli
from ddtree_overlay.errors import EXIT_CODES


PROJECT = Path(__file__).parents[2]
VERBS = [
    "snapshot",
    "patch",
    "verify",
    "diff",
    "push",
    "rollback",
    "confirm",
    "status",
    "history",
    "doctor",
    "export",
    "tune",
]
HEAVY = {"libcst", "paramiko", "rich", "packaging", "cryptography", "ddtree_overlay.deploy", "ddtree_overlay.patching"}


def test_import_of_the_command_line_loads_nothing_heavy():
    """Libraries that only some verbs need are imported by those."""
    code = "import sys, ddtree_overlay.cli; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert not HEAVY & set(out.split())


def test_help_takes_less_than_a_third_of_a_second():
    """`--help` takes less than 0.3 s of a processor; the best of five runs counts, because the machine may be busy."""
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "ddtree_overlay", "--help"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

    assert min(times) < 0.3, times


def test_verbs_are_listed_in_the_order_of_work():
    """The overview reads like the work itself."""
    out = CliRunner().invoke(cli, ["--help"]).stdout
    positions = [out.index(f"\n  {verb} ") for verb in VERBS]

    assert list(cli.commands) == VERBS
    assert positions == sorted(positions)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_shows_an_example_and_the_common_options(verb):
    """`--help` of each verb ends with a command line that can be typed."""
    done = CliRunner().invoke(cli, [verb, "--help"])

    assert done.exit_code == 0
    assert f"Example:\n    ddtree-overlay {verb} --" in done.stdout
    for option in ("--json", "--config", "--workdir", "--timeout", "--color", "--quiet", "--verbose"):
        assert option in done.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_examples_in_the_help_can_be_parsed(verb):
    """An example names only options that exist: it fails for its unknown host, not for its arguments."""
    command = cli.commands[verb]
    lines = [line.strip() for line in (command.epilog or "").splitlines() if "ddtree-overlay" in line]

    assert lines
    for line in lines:
        words = line.split("|")[0].split()[1:]
        with command.make_context(verb, words[1:]):
            pass


def test_overview_documents_every_exit_code():
    """The exit codes of the help are those of the code."""
    out = CliRunner().invoke(cli, ["--help"]).stdout

    for code, meaning in EXIT_CODES.items():
        assert f"{code:>3}  {meaning}" in out


def test_readme_documents_the_same_exit_codes():
    """The table of the README is that of the code, word for word."""
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", (PROJECT / "README.md").read_text("utf-8"), re.MULTILINE)

    assert {int(code): meaning.replace("`", "") for code, meaning in rows} == EXIT_CODES


def test_version_is_the_package_version():
    """`--version` names the program and its version."""
    assert CliRunner().invoke(cli, ["--version"]).stdout == f"ddtree-overlay, version {__version__}\n"


def test_no_arguments_print_the_help_and_exit_with_usage():
    """Without a verb there is help, and exit 2 as for any incomplete command."""
    done = CliRunner().invoke(cli, [])

    assert done.exit_code == 2
    assert "Usage: ddtree-overlay" in done.output
