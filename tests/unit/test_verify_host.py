# SPDX-License-Identifier: Apache-2.0
"""What the host's answers to `compile` and `probe` mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from tests.support import small

from ddtree_overlay.hosts.transport import Reply
from ddtree_overlay.modules import module_of
from ddtree_overlay.patching import Patched, build_release
from ddtree_overlay.verify import Finding, verify_on_host
from ddtree_overlay.verify.host import FLAGS


HELP = {"code": 0, "output": " ".join(FLAGS), "error": ""}
TORCH = "ModuleNotFoundError: No module named 'torch'"


class Host:
    """Answers as an agent would, and remembers what it was asked."""

    name = "fake"

    def __init__(self, *, errors: list[dict[str, Any]], base: dict[str, Any] | None, patched: dict[str, Any]) -> None:
        self.replies = {
            "compile": {"python": "3.12.1", "errors": errors, "unlike": [], "sglang": "0.5.11"},
            "probe": {"base": base, "patched": patched},
        }
        self.asked: dict[str, tuple[Mapping[str, Any], bytes]] = {}

    def call(self, op: str, args: Mapping[str, Any], payload: bytes = b"", *, timeout: float | None = None) -> Reply:
        """The prepared answer."""
        assert timeout is None or timeout > 0
        self.asked[op] = (args, payload)
        return Reply(self.replies[op], b"")

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def patched() -> Patched:
    return build_release(small.RELEASE, small.base(), small.overlay())


def answers(patched: Patched, error: str | None = None, **over: Any) -> dict[str, Any]:
    return {"imports": {module_of(p): error for p in patched.files}, "help": HELP, "outside": False, **over}


def verify(patched: Patched, errors=(), base=None, ours=None) -> tuple[list[Finding], Host]:
    host = Host(errors=list(errors), base=base or answers(patched), patched=ours or answers(patched))
    return verify_on_host(host, small.manifest(small.base()), patched), host


def test_base_that_was_not_asked_is_no_trouble(patched: Patched):
    """A sound patched tree comes without answers about the base."""
    host = Host(errors=[], base=None, patched=answers(patched))
    findings = verify_on_host(host, small.manifest(small.base()), patched)
    assert {f.severity for f in findings} == {"info"}


def test_sound_host_gives_only_information(patched: Patched):
    """Compiled, imported, and the flags are there."""
    findings, host = verify(patched)

    assert [f.severity for f in findings] == ["info"] * 3
    args, payload = host.asked["probe"]
    assert payload == b"".join(patched.files[f["path"]] for f in args["files"])
    assert args["modules"][0] == "sglang.srt.speculative.spec_info"
    assert args["help"] is True


def test_another_release_on_the_host_stops_the_probe(patched: Patched):
    """Ours over the files of another release would prove nothing; modules that were left behind alone say nothing."""
    host = Host(errors=[], base=None, patched=answers(patched))
    added = next(c.path for c in patched.bundle.changes if c.adds)
    host.replies["compile"] |= {"unlike": ["srt/server_args.py", added], "sglang": "0.5.12"}
    findings = verify_on_host(host, small.manifest(small.base()), patched)

    errors = [f for f in findings if f.severity == "error"]
    assert [f.path for f in errors] == ["srt/server_args.py"]
    assert "the host has 0.5.12 now: take the snapshot again" in errors[0].message
    assert "probe" not in host.asked
    host.replies["compile"]["unlike"] = [added]
    assert {f.severity for f in verify_on_host(host, small.manifest(small.base()), patched)} == {"info"}


def test_syntax_error_under_the_target_stops_the_probe(patched: Patched):
    """Nothing is imported that does not compile."""
    findings, host = verify(patched, errors=[{"path": "srt/server_args.py", "line": 7, "message": "invalid syntax"}])

    assert [(f.severity, f.path, f.line) for f in findings] == [("error", "srt/server_args.py", 7)]
    assert "Python 3.12.1" in findings[0].message
    assert "probe" not in host.asked


def test_module_that_stopped_importing_is_an_error(patched: Patched):
    """The pristine package imports, so the patch is to blame."""
    ours = answers(patched)
    ours["imports"]["sglang.srt.speculative.ddtree.gates"] = "ImportError: cannot import name 'x'"

    findings, _ = verify(patched, ours=ours)

    assert [(f.severity, f.path) for f in findings if f.severity != "info"] == [
        ("error", "srt/speculative/ddtree/gates.py")
    ]


def test_host_without_torch_proves_nothing_and_says_so(patched: Patched):
    """Neither tree imports, for one reason: a warning, not an accusation."""
    failed = {"code": 1, "output": "", "error": TORCH}
    findings, _ = verify(patched, base=answers(patched, TORCH, help=failed), ours=answers(patched, TORCH, help=failed))

    assert [f.severity for f in findings] == ["info", "warning", "warning"]
    assert "neither patched nor pristine" in findings[1].message
    assert "patched and pristine alike" in findings[2].message


def test_new_trouble_is_told_apart_from_old(patched: Patched):
    """An edited module that imports pristine but not patched is an error even on a host with other troubles."""
    base = answers(patched, TORCH)
    base["imports"]["sglang.srt.server_args"] = None
    findings, _ = verify(patched, base=base, ours=answers(patched, TORCH))

    assert [f.path for f in findings if f.severity == "error"] == ["srt/server_args.py"]


def test_probe_that_imported_another_tree_is_an_error(patched: Patched):
    """If the scratch tree was not the one imported, its success means nothing."""
    findings, _ = verify(patched, ours=answers(patched, outside=True))

    assert any(f.severity == "error" and "not what Python imported" in f.message for f in findings)


def test_missing_flag_is_an_error(patched: Patched):
    """`--help` is what the server really parses."""
    findings, _ = verify(patched, ours=answers(patched, help={**HELP, "output": "DDTREE"}))

    (found,) = [f for f in findings if f.severity == "error"]
    assert all(flag in found.message for flag in FLAGS if flag != "DDTREE")


def test_help_that_fails_only_patched_is_an_error(patched: Patched):
    """A traceback at start-up is worse than a missing flag."""
    failed = {"code": 1, "output": "", "error": "Traceback\nTypeError: boom"}
    findings, _ = verify(patched, ours=answers(patched, help=failed))

    (found,) = [f for f in findings if f.severity == "error"]
    assert "TypeError: boom" in found.message
