# SPDX-License-Identifier: Apache-2.0
"""What the overlay imports from SGLang and calls of it is looked up, by the checks `imports` and `calls`."""

from __future__ import annotations

import pytest
from tests.support.planted import ARGS, TREE_WORKER, WORKER, Tree


def test_name_that_is_imported_for_annotations_alone_is_looked_up():
    """It is read by type checkers only, but says which class of SGLang something is."""
    tree = Tree().change(ARGS, "server_args import ServerArgs", "server_args import Arguments")

    assert ("imports", ARGS) in {(f.check, f.path) for f in tree.errors()}


def test_renamed_import_is_found():
    """Each place that imports the name is listed."""
    tree = Tree().change("srt/utils/common.py", "def wrap(", "def unwrap(")
    tree.change("srt/utils/__init__.py", "wrap as wrapped", "unwrap as wrapped")

    found = tree.errors()

    assert {f.check for f in found} == {"imports"}
    assert TREE_WORKER in {f.path for f in found}
    assert "wrap in sglang.srt.utils" in found[0].message


def test_import_of_a_missing_module_is_found():
    """A module that moved away."""
    tree = Tree().change(TREE_WORKER, "from sglang.srt.utils import", "from sglang.srt.helpers import")

    (first, second) = tree.errors()

    assert (first.check, first.line) == ("imports", 2)
    assert "module sglang.srt.helpers" in second.message


def test_hook_that_calls_a_missing_overlay_function_is_found():
    """An insertion and the overlay must agree."""
    tree = Tree().change("srt/speculative/ddtree/gates.py", "def grow_graph_mask", "def grow_mask")

    (found,) = tree.errors()

    assert (found.check, found.path) == ("imports", "srt/layers/attention/triton_backend.py")


@pytest.mark.parametrize(
    ("path", "old", "new", "problem"),
    [
        ("srt/utils/common.py", "model, depth=0, *, strict", "model, *, strict", "2 positional arguments, 1 are taken"),
        ("srt/utils/common.py", "strict=False", "exact=False", "no argument 'strict'"),
        ("srt/utils/common.py", "strict=False", "strict=False, device", "'device' is missing"),
        (WORKER, "*, nccl_port=None", "ps, *, nccl_port=None", "'ps' is missing"),
        (WORKER, "*, nccl_port=None", "*, port=None", "no argument 'nccl_port'"),
        (TREE_WORKER, "*, draft_hidden, block_ids", "*, hidden, block_ids", "no argument 'draft_hidden'"),
        (TREE_WORKER, "def _prepare_tree_verify", "def _prepare_tree", "no _prepare_tree_verify in class DFlashWorker"),
        (ARGS, "def request_meta_info(server_args", "def request_meta_info(i, server_args", "is missing"),
        (ARGS, "server_args._handle_attention_backend", "server_args._handle_backend", "_handle_backend_compatibility"),
    ],
)
def test_call_that_no_longer_fits_is_found(path: str, old: str, new: str, problem: str):
    """Functions, constructors, methods of bases, of subclasses and of annotated arguments."""
    found = Tree().change(path, old, new).errors()

    assert {f.check for f in found} == {"calls"}
    assert any(problem.removeprefix("no ") in f.message for f in found)


def test_getattr_upstream_does_not_excuse_a_missing_method():
    """DFlashWorker passes unknown names on to its target: a hook must not rely on that."""
    tree = Tree().change(
        WORKER, "    def _greedy", "    def __getattr__(self, name):\n        return name\n\n    def _greedy"
    )
    assert tree.errors() == []

    tree.change(TREE_WORKER, "def _prepare_tree_verify", "def _prepare_tree")

    assert [(f.check, f.path) for f in tree.errors()] == [("calls", WORKER)]


def test_undecidable_call_is_counted_not_reported():
    """What cannot be known from source is no finding."""
    tree = Tree().change("srt/utils/common.py", "def wrap(model, depth=0, *, strict=False):", "@magic\ndef wrap(x):")

    calls = [f for f in tree.findings() if f.check == "calls"]

    assert [f.severity for f in calls] == ["info"]
    assert "2 undecidable" in calls[0].message
