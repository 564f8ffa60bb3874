# SPDX-License-Identifier: Apache-2.0
"""Each fault is planted in a tree that is fine, and must be found by the check it belongs to and by no other."""

from __future__ import annotations

import ast
import dataclasses
import platform

import pytest
from tests.support import small, wheels

from ddtree_overlay.manifest import Bundle
from ddtree_overlay.patching import SUPPORTED_RELEASES, Patched, build, build_release, load_overlay, wanted_paths
from ddtree_overlay.verify import Finding, verify_bundle, verify_release
from ddtree_overlay.verify.hooks import check_hooks


SERVER_ARGS = "srt/server_args.py"
WORKER = "srt/speculative/dflash_worker.py"
ARGS = "srt/speculative/ddtree/args.py"
TREE_WORKER = "srt/speculative/ddtree/worker.py"


class Tree:
    """A base and its bundle, both open to sabotage."""

    def __init__(self) -> None:
        self.base = small.base()
        self.overlay = small.overlay()

    def change(self, path: str, old: str, new: str) -> Tree:
        """Sabotage SGLang or the overlay before patching."""
        files = self.overlay if path in self.overlay else self.base
        assert old.encode() in files[path]
        files[path] = files[path].replace(old.encode(), new.encode())
        return self

    def patched(self) -> Patched:
        """What patching makes of it."""
        return build_release(small.RELEASE, self.base, self.overlay)

    def findings(self, patched: Patched | None = None, **manifest: object) -> list[Finding]:
        """Everything `verify` says, the manifest changed as given."""
        seen = dataclasses.replace(small.manifest(self.base), **manifest)
        return verify_release(small.RELEASE, small.sites(), seen, self.base, patched or self.patched())

    def errors(self, patched: Patched | None = None, **manifest: object) -> list[Finding]:
        """What blocks a push."""
        return [f for f in self.findings(patched, **manifest) if f.severity == "error"]


def edited(patched: Patched, path: str, old: str, new: str) -> Patched:
    """Sabotage the result of patching."""
    assert old.encode() in patched.files[path]
    return Patched(patched.bundle, {**patched.files, path: patched.files[path].replace(old.encode(), new.encode())})


HOOK = """\
        if str(self.speculative_algorithm).upper() == "DDTREE":
            from sglang.srt.speculative.ddtree.args import choose_attention_backend

            choose_attention_backend(self)

"""


def test_sound_tree_has_no_errors_and_says_what_was_checked():
    """The counts tell a thorough run from an empty one."""
    findings = Tree().findings()

    assert {f.severity for f in findings} == {"info"}
    assert {f.check for f in findings} == {"syntax", "hooks", "imports", "calls", "attributes", "sites", "grounds"}
    count = sum(len(edit.insertions) for edit in small.RELEASE.edits)
    assert any(f"{count} insertions in {len(small.RELEASE.edits)} files" in f.message for f in findings)
    assert not any(f.message.startswith("0 ") for f in findings)


# syntax


def test_syntax_error_is_found_with_its_line():
    """A module that does not compile stops the checks that would read it, and no other is blamed."""
    tree = Tree()
    patched = edited(tree.patched(), ARGS, "-> int:", "-> int")

    (found,) = tree.errors(patched)

    assert (found.check, found.path) == ("syntax", ARGS)
    assert found.line is not None


def test_other_python_is_left_to_the_host():
    """What this Python accepts says nothing about the target's."""
    tree = Tree()
    patched = edited(tree.patched(), ARGS, "-> int:", "-> int")
    versions = {"sglang": "0.5.11", "python": "3.9.1"}

    found = [f for f in tree.findings(versions=versions) if f.check == "syntax"]

    assert [f.severity for f in found] == ["info"]
    assert "3.9.1" in found[0].message
    same = {"sglang": "0.5.11", "python": platform.python_version()}
    assert [f.check for f in tree.errors(patched, versions=same)] == ["syntax"]


# structure


def test_dropped_upstream_line_is_found():
    """Insertion-only is checked on the result, not believed."""
    tree = Tree()
    patched = edited(tree.patched(), SERVER_ARGS, '        parser.add_argument("--other")\n', "")

    found = tree.errors(patched)

    assert {f.check for f in found} == {"structure"}
    assert any("did not survive" in f.message and "--other" in f.message and f.line for f in found)


def test_changed_upstream_line_is_found():
    """So is a line that only looks the same."""
    tree = Tree()
    patched = edited(tree.patched(), SERVER_ARGS, 'or "fa3"', "or 'fa3'")

    assert {f.check for f in tree.errors(patched)} == {"structure"}


def test_added_line_that_no_edit_declares_is_found():
    """All upstream lines survive, yet the file no longer comes apart."""
    tree = Tree()
    patched = edited(tree.patched(), SERVER_ARGS, "class ServerArgs:\n", "class ServerArgs:\n    more: int = 0\n")

    (found,) = tree.errors(patched)

    assert (found.check, found.message) == ("structure", "unpatching does not give the base bytes")


# hooks


def test_deleted_hook_is_found():
    """By the check that looks for it, and because the file no longer comes apart."""
    tree = Tree()
    patched = edited(tree.patched(), SERVER_ARGS, HOOK, "")

    found = tree.errors(patched)

    assert {f.check for f in found} == {"hooks", "structure"}
    assert any("is there 0 times" in f.message for f in found)


def test_doubled_hook_is_found():
    """Twice is not once."""
    tree = Tree()
    patched = edited(tree.patched(), SERVER_ARGS, HOOK, HOOK + HOOK)

    found = tree.errors(patched)

    assert {f.check for f in found} == {"hooks", "structure"}
    assert any("is there 2 times" in f.message and f.line for f in found)


def test_hook_in_another_scope_is_found():
    """A hook that wandered is not in place (landley/toybox#533)."""
    tree = Tree()
    patched = edited(tree.patched(), SERVER_ARGS, HOOK, "")
    head = "    @staticmethod\n    def add_cli_args"
    patched = edited(patched, SERVER_ARGS, head, f"    def other(self):\n{HOOK}{head}")

    assert any("stands in ServerArgs.other instead" in f.message for f in tree.errors(patched))


@pytest.mark.parametrize(
    "dead",
    [
        "        return self\n",
        "        raise ValueError\n",
        "        if self:\n            return 1\n        else:\n            return 2\n",
    ],
)
def test_unreachable_hook_is_found(dead: str):
    """A release that returns early in front of the anchor leaves the hook in place and dead."""
    anchor = '        if self.speculative_algorithm == "DFLASH":\n            self.speculative_num_draft_tokens = 16\n'
    tree = Tree().change(SERVER_ARGS, anchor, dead + anchor)

    found = tree.errors()

    assert {f.check for f in found} == {"hooks"}
    assert sum("is never reached" in f.message for f in found) == 2


def test_hook_whose_names_are_gone_is_found():
    """A local variable that was renamed upstream breaks the hook at run time only."""
    tree = Tree().change(WORKER, "block_ids", "ids")

    (found,) = tree.errors()

    assert found.check == "hooks"
    assert "uses block_ids, which nothing before it defines" in found.message


def test_hook_in_front_of_its_names_is_found():
    """Defined later is not defined."""
    line = "        lm_head = wrap(batch)\n"
    tree = (
        Tree().change(WORKER, line, "").change(WORKER, "        return draft_next", f"{line}        return draft_next")
    )

    assert [f.check for f in tree.errors()] == ["hooks"]


def test_names_of_an_inserted_method_are_looked_for():
    """An annotation that the file does not import (`NoReturn`) would be noticed when it is imported."""
    edit = next(edit for edit in small.RELEASE.edits if edit.path == "srt/speculative/spec_info.py")
    methods = [i for i in edit.insertions if "def is_ddtree" in i.code]
    (method,) = methods
    blind = dataclasses.replace(method, code=method.code.replace("-> bool:", "-> NoReturn:"))
    changed = dataclasses.replace(edit, insertions=tuple(blind if i is method else i for i in edit.insertions))
    text = (
        Tree()
        .patched()
        .files[edit.path]
        .decode()
        .replace("def is_ddtree(self) -> bool", "def is_ddtree(self) -> NoReturn")
    )

    (found,) = check_hooks(changed, ast.parse(text))

    assert "uses NoReturn, which nothing before it defines" in found.message


def test_name_that_is_imported_for_annotations_alone_is_looked_up():
    """It is read by type checkers only, but says which class of SGLang something is."""
    tree = Tree().change(ARGS, "server_args import ServerArgs", "server_args import Arguments")

    assert ("imports", ARGS) in {(f.check, f.path) for f in tree.errors()}


# imports and calls


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


# sites


@pytest.mark.parametrize(
    ("path", "old", "new", "message"),
    [
        (WORKER, "        return draft_next", "        is_dflash()\n        return draft_next", "`is_dflash()`"),
        (SERVER_ARGS, "= 16\n", '= 16\n        x = "DFLASH"\n', '`"DFLASH"`'),
        ("srt/utils/common.py", "    return model", "    return model.speculative_eagle_topk", "in wrap"),
    ],
)
def test_unknown_site_is_found(path: str, old: str, new: str, message: str):
    """A new mention, also of a known kind in a known scope, with its line."""
    (found,) = Tree().change(path, old, new).errors()

    assert (found.check, found.path) == ("sites", path)
    assert "nobody has classified" in found.message
    assert message in found.message
    assert found.line


def test_vanished_site_is_found():
    """A table that speaks of code that is gone is out of date."""
    tree = Tree().change(
        "srt/speculative/spec_info.py", "            return DFlashWorker\n", "            return None\n"
    )

    (found,) = tree.errors()

    assert found.check == "sites"
    assert "but gone: `DFlashWorker`" in found.message


def test_mention_outside_the_snapshot_is_found():
    """A file that the snapshot knows of and does not hold was not checked."""
    (found,) = Tree().errors(mentions=("srt/unseen.py",))

    assert (found.check, found.path) == ("sites", "srt/unseen.py")


def test_comments_docstrings_messages_and_layout_are_no_sites():
    """Only code decides anything."""
    tree = Tree()
    tree.change("srt/utils/common.py", "    return model", '    """About DFLASH."""\n    # DFLASH\n    return model')
    tree.change(
        "srt/server_args.py",
        '        if self.speculative_algorithm == "DFLASH"',
        '\n\n        if self.speculative_algorithm == "DFLASH"',
    )
    tree.change(
        WORKER,
        "        return draft_next",
        '        print(f"DFLASH {batch}", "no DFLASH here")\n        return draft_next',
    )

    assert tree.errors() == []


# everything, on the published wheel


@pytest.fixture(scope="module")
def published():
    return wheels.snapshot(wanted_paths(load_overlay()))


@pytest.mark.parametrize("version", SUPPORTED_RELEASES)
def test_real_overlay_holds_on_the_published_wheel(version: str):
    """Not one error, for any release."""
    manifest, base = wheels.snapshot(wanted_paths(load_overlay(version)), version)

    findings = verify_bundle(manifest, base, build(base, version))

    assert [f for f in findings if f.severity != "info"] == []


def test_renames_in_the_published_wheel_are_found(published):
    """The real overlay depends on real names, and says so when they go."""
    manifest, base = published
    patched = build(base, "0.5.11")
    changed = dict(base)
    for path, old, new in (
        ("srt/speculative/spec_utils.py", b"def assign_req_to_token_pool_func", b"def assign_rows_func"),
        ("srt/speculative/dflash_utils.py", b"resolve_dflash_verify_mask_policy", b"resolve_dflash_mask_policy"),
    ):
        assert old in changed[path]
        changed[path] = changed[path].replace(old, new)

    found = [f for f in verify_bundle(manifest, changed, patched) if f.severity == "error"]

    assert {"imports", "sites"} <= {f.check for f in found}
    assert any("assign_req_to_token_pool_func" in f.message for f in found if f.check == "imports")


def test_bundle_of_an_unknown_release_is_refused(published):
    """There is no table to verify it by."""
    manifest, base = published

    with pytest.raises(Exception, match=r"SGLang 9\.9 is not supported"):
        verify_bundle(manifest, base, Patched(Bundle("9.9", ()), {}))
