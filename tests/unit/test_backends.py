# SPDX-License-Identifier: Apache-2.0
"""docs/backends.md, the list in the overlay, and the backends that each release knows: one statement."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.support import wheels

from ddtree_overlay.patching import modules_of
from ddtree_overlay.releases import KNOWN, Release


PROJECT = Path(__file__).parents[2]


def _order(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


VERSIONS = sorted((row.version for row in KNOWN), key=_order)
FOLDER = "srt/speculative/ddtree/"


@cache
def constants(row: Release, module: str) -> dict[str, Any]:
    """The constants of an overlay module as a release gets it; modules import SGLang, so they are read, not run."""
    scope: dict[str, Any] = {}
    for node in ast.parse(modules_of(row)[f"{FOLDER}{module}.py"]).body:
        if isinstance(node, ast.Assign):
            exec(compile(ast.Module([node], []), module, "exec"), scope)
    return scope


def documented() -> dict[str, tuple[str, str, str]]:
    """Backend -> releases, verdict, reason, from the first table."""
    text = (PROJECT / "docs/backends.md").read_text("utf-8").split("\n## ")[1]
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("| `")
    ]
    return {name.strip("`"): (releases, verdict, reason) for name, releases, verdict, reason in rows}


def choices(version: str) -> set[str]:
    """What `--attention-backend` admits in a release."""
    files = wheels.package(version)
    for path in ("srt/server_args.py", "srt/arg_groups/choices.py"):
        for node in ast.parse(files.get(path, b"")).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "ATTENTION_BACKEND_CHOICES":
                return set(ast.literal_eval(node.value))
    raise AssertionError(f"{version} has no list of attention backends")


@pytest.mark.parametrize("row", KNOWN, ids=lambda row: row.version)
def test_the_table_says_what_the_overlay_does(row: Release):
    """The same backends, the same verdicts, and for a refused one the reason that the refusal gives."""
    why_not = constants(row, "backends")["WHY_NOT"]
    supported = set()
    for name, (_, verdict, reason) in documented().items():
        last = verdict.removeprefix("supported until ")
        if verdict == "supported" or (last != verdict and _order(row.version) <= _order(last)):
            supported.add(name)
        elif verdict == "refused":
            assert reason == why_not[name]
        else:
            assert why_not[name] in reason

    assert supported == set(constants(row, "proven")["TREE_ATTENTION_BACKENDS"])
    assert supported | set(why_not) == set(documented())


def test_the_table_holds_every_backend_of_every_release():
    """A backend that a release adds has to be decided about."""
    known = {version: choices(version) for version in VERSIONS}
    for name, (releases, _, _) in documented().items():
        assert releases == spelled([version for version in VERSIONS if name in known[version]]), name
    assert set().union(*known.values()) == set(documented())


def spelled(versions: list[str]) -> str:
    """`all`, or the first release that knows a backend and the last."""
    if versions == VERSIONS:
        return "all"
    assert versions == VERSIONS[VERSIONS.index(versions[0]) :][: len(versions)], "not a span of releases"
    return f"from {versions[0]}" if versions[-1] == VERSIONS[-1] else f"until {versions[-1]}"


@pytest.mark.parametrize("row", KNOWN, ids=lambda row: row.version)
def test_what_was_proven_with_8_bits_is_supported_at_all(row: Release):
    """And every reason can be read behind a backend's name."""
    backends = constants(row, "backends")

    assert set(backends["FLOAT8_KV_BACKENDS"]) <= set(constants(row, "proven")["TREE_ATTENTION_BACKENDS"])
    assert all(re.match(r"(its?|no) \S", reason) for reason in backends["WHY_NOT"].values())
