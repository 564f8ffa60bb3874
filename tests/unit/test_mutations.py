# SPDX-License-Identifier: Apache-2.0
"""What scripts/mutate breaks, and the suites that have to notice, are there; a run of all of it is long."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("mutate", str(PROJECT / "scripts/mutate"))
    spec = importlib.util.spec_from_loader("mutate", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mutate", module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    loader.exec_module(module)
    return module


def test_every_mutation_finds_its_piece_once(mutate: ModuleType) -> None:
    """In the first folder that has its file, as the script looks for it."""
    found = {}
    for name, mutation in mutate.MUTATIONS.items():
        paths = [PROJECT / modules / mutation.file for modules in mutate.OVERLAYS]
        text = next((path.read_text() for path in paths if path.exists()), "")
        found[name] = text.count(mutation.before)

    assert {name: count for name, count in found.items() if count != 1} == {}


def test_every_mutation_names_suites_that_are_there(mutate: ModuleType) -> None:
    """Files of tests/overlay, or the engine's own two."""
    named = {suite for mutation in mutate.MUTATIONS.values() for suite in mutation.suites}

    assert [s for s in sorted(named - set(mutate.ENGINES)) if not (PROJECT / "tests/overlay" / s).exists()] == []
