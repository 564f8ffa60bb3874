# SPDX-License-Identifier: Apache-2.0
"""docs/backends.md, the list in the overlay, and the backends that each release knows: one statement."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from tests.support import wheels

from ddtree_overlay.releases import RELEASES


PROJECT = Path(__file__).parents[2]
VERSIONS = [row.version for row in RELEASES]


@pytest.fixture(scope="module")
def backends() -> ModuleType:
    """The overlay's module, which imports nothing of SGLang."""
    path = PROJECT / "overlay/srt/speculative/ddtree/backends.py"
    spec = importlib.util.spec_from_file_location("ddtree_backends", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def documented() -> dict[str, tuple[str, str, str]]:
    """Backend -> releases, verdict, reason, from the first table."""
    text = (PROJECT / "docs/backends.md").read_text("utf-8").split("\n## ")[1]
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("| `")
    ]
    return {name.strip("`"): (releases, verdict, reason) for name, releases, verdict, reason in rows}


def choices(version: str) -> set[str]:
    """What `--attention-backend` admits in a release."""
    tree = ast.parse(wheels.package(version)["srt/server_args.py"])
    lists = (n for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == "ATTENTION_BACKEND_CHOICES")
    return set(ast.literal_eval(next(lists).value))


def test_the_table_says_what_the_overlay_does(backends: ModuleType):
    """The same backends, the same verdicts, and for a refused one the reason that the refusal gives."""
    table = documented()
    supported = {name for name, (_, verdict, _) in table.items() if verdict == "supported"}
    refused = {name: reason for name, (_, verdict, reason) in table.items() if verdict == "refused"}

    assert supported == set(backends.TREE_ATTENTION_BACKENDS)
    assert refused == backends.WHY_NOT
    assert len(table) == len(supported) + len(refused)


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


def test_what_was_proven_with_8_bits_is_supported_at_all(backends: ModuleType):
    """And the default is among them."""
    assert set(backends.FLOAT8_KV_BACKENDS) <= set(backends.TREE_ATTENTION_BACKENDS)
    assert not set(backends.TREE_ATTENTION_BACKENDS) & set(backends.WHY_NOT)
    assert all(re.match(r"its? \S", reason) for reason in backends.WHY_NOT.values())
