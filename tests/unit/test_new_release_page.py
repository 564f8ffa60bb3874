# SPDX-License-Identifier: Apache-2.0
"""`docs/new_release.md` speaks of tools and files that exist, and of what they print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from ddtree_overlay.cli import cli
from ddtree_overlay.releases import KNOWN


PROJECT = Path(__file__).parents[2]
PAGE = (PROJECT / "docs/new_release.md").read_text("utf-8")
CODE = [line.strip() for line in PAGE.splitlines() if line.startswith("    ")]
INLINE = [re.sub(r"\s+", " ", text) for text in re.findall(r"`([^`]+)`", PAGE)]
COMMANDS = [text for text in (*CODE, *INLINE) if text.startswith(("ddtree-overlay", "scripts/", ".venv/bin/python"))]
#: Files of the release that the page takes for its example, which does not exist.
EXAMPLE = "0.5.24"


def test_the_example_is_the_release_after_the_newest():
    """A page about a release that is supported by now helps nobody."""
    newest = KNOWN[-1].version.split(".")

    assert EXAMPLE.split(".")[:2] == newest[:2]
    assert int(EXAMPLE.split(".")[2]) == int(newest[2]) + 1
    assert f"after {KNOWN[-1].version}" in PAGE


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_every_command_can_be_run(command: str):
    """Verbs, options, scripts and folders of tests are there."""
    words = shlex.split(command)
    if words[0] == "ddtree-overlay":
        verb = cli.commands[words[1]]
        known = {option for parameter in verb.params for option in parameter.opts}
        assert {word for word in words[2:] if word.startswith("-")} <= known
    else:
        files = [word for word in words if word.startswith(("scripts/", "tests/", "benchmarks/"))]
        assert [name for name in files if not (PROJECT / name).exists()] == []


@pytest.mark.parametrize(
    "name", sorted({text for text in INLINE if re.fullmatch(r"[\w./]+\.(py|md|toml)|\w+(/\w+)+", text)})
)
def test_every_file_is_there(name: str):
    """By its path, or by its name in the overlay, the edits or SGLang."""
    if EXAMPLE in name or name.startswith(("patches/", "dflash_")):
        return
    places = [PROJECT / name, PROJECT / "src/ddtree_overlay" / name, *PROJECT.glob(f"overlay/**/{name}")]

    assert any(place.exists() for place in places)


def test_every_line_of_the_report_is_explained():
    """The words at the head of a line, and the checks whose findings are errors of a release that does not fit."""
    source = (PROJECT / "src/ddtree_overlay/fit_reports.py").read_text("utf-8")
    heads = {head.strip() for head in re.findall(r'row\(\("([a-z]+) +", "(?:ok|bad)"\)', source)}
    table = PAGE.split("| line | means | done in |")[1].split("\n\n")[0]

    assert heads == {"fits", "differs", "missing"}
    assert all(f"`{head}`" in table for head in heads)
    assert all(f"error {check}" in table for check in ("imports", "calls", "sites", "mirrors", "hooks", "grounds"))
