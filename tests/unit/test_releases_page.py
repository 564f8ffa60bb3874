# SPDX-License-Identifier: Apache-2.0
"""docs/releases.md, the overlay's gates and the published wheels: one statement of what a tree does not serve."""

from __future__ import annotations

import ast
import re
import zipfile
from functools import cache
from pathlib import Path

import pytest
from tests.support import wheels

from ddtree_overlay.patching import every_module
from ddtree_overlay.releases import KNOWN


PROJECT = Path(__file__).parents[2]
PAGE = (PROJECT / "docs/releases.md").read_text("utf-8")
VERSIONS = sorted((row.version for row in KNOWN), key=lambda version: [int(n) for n in re.findall(r"\d+", version)])
_FOLDER = "srt/speculative/ddtree/"
#: What they refuse is no feature: an argument that contradicts another, or says nothing.
_OWN_ARGUMENTS = {
    "enter_dflash_handling",
    "finish_dflash_handling",
    "_settle_own_fields",
    "budget_list",
    "parsed_budget",
    "checked_cap",
    "checked_switch",
    "calibration_values",
    "check_wish",
}
#: Said elsewhere: on the page of backends, by SGLang itself in the first generation, and as a limit in another module.
_ELSEWHERE = {"check_backends", "create_ddtree_worker"}


def _rows(title: str) -> list[list[str]]:
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def _constant(module: str, name: str) -> ast.expr:
    tree = ast.parse(_modules()[module])
    values = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name
    ]
    return values[0]


@cache
def _modules() -> dict[str, bytes]:
    """The overlay's modules by file name; of those that releases have of their own, one each."""
    paths = sorted((PROJECT / "overlay").rglob("*.py"))
    return {path.name: path.read_bytes() for path in paths}


@cache
def _fields(version: str) -> frozenset[str]:
    """The server arguments of a release."""
    with zipfile.ZipFile(wheels.wheel(version)) as archive:
        names = [
            name
            for name in archive.namelist()
            if name == "sglang/srt/server_args.py" or re.fullmatch(r"sglang/srt/arg_groups/fields/\w+\.py", name)
        ]
        return frozenset(re.findall(r"^    (\w+): ", "".join(archive.read(n).decode() for n in names), re.MULTILINE))


def _releases_with(field: str) -> str:
    having = [version for version in VERSIONS if field in _fields(version)]
    first = VERSIONS.index(having[0])
    if having != VERSIONS[first : first + len(having)]:
        return f"not one range: {having}"
    if len(having) == len(VERSIONS):
        return "all"
    if having[-1] == VERSIONS[-1]:
        return f"from {having[0]}"
    return f"{having[0]} only" if len(having) == 1 else f"{having[0]} to {having[-1]}"


def test_every_refused_flag_is_on_the_page():
    """A gate for a feature that nobody tells a user of is found by a crash at start-up."""
    refused = {flag for _, _, flag in ast.literal_eval(_constant("features.py", "_UNPROVEN_FEATURES"))}
    listed = {row[0].strip("`") for row in _rows("Flags")}

    assert refused - listed == set()


def test_releases_of_a_flag_are_those_that_have_it():
    """Read in the wheels: a flag that a release adds or drops changes its row."""
    fields = {flag: field for field, _, flag in ast.literal_eval(_constant("features.py", "_UNPROVEN_FEATURES"))}

    said = {row[0].strip("`"): row[1] for row in _rows("Flags")}

    assert {flag: said[flag] for flag in fields} == {flag: _releases_with(field) for flag, field in fields.items()}


def test_every_refused_request_is_on_the_page():
    """And nothing else is: a request that is served by now leaves the list."""
    refused = set(ast.literal_eval(_constant("requests.py", "_REFUSED")))

    assert {row[0].strip("`") for row in _rows("Requests")} == refused


def test_every_gate_is_on_the_page():
    """Each function of the overlay that refuses a configuration."""
    refusing = set()
    for data in every_module().values():
        for node in ast.walk(ast.parse(data)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and _refuses(node):
                refusing.add(node.name)

    # A constructor refuses in the name of its class.
    named = set(re.findall(r"`\w+\.(\w+)`", PAGE))

    assert refusing - _OWN_ARGUMENTS - _ELSEWHERE - {"__init__"} - named == set()


@pytest.mark.parametrize("gate", sorted(set(re.findall(r"`(\w+\.(?!md`)\w+)`", PAGE))))
def test_a_gate_on_the_page_exists(gate):
    """A row outlives its gate otherwise, and says that something is refused that is served, perhaps wrongly."""
    module, _, name = gate.partition(".")
    defined = {
        node.name
        for node in ast.parse(_modules()[f"{module}.py"]).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }

    assert name in defined


def _refuses(node: ast.AST) -> bool:
    raised = [n.exc for n in ast.walk(node) if isinstance(n, ast.Raise) and isinstance(n.exc, ast.Call)]
    return any(isinstance(call.func, ast.Name) and call.func.id == "ValueError" for call in raised)
