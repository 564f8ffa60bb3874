# SPDX-License-Identifier: Apache-2.0
"""What the overlay has its own version of is compared with what somebody read."""

from __future__ import annotations

import pytest
from tests.support import wheels

from ddtree_overlay.edits.anchors import AtStart
from ddtree_overlay.edits.base import Edit, insert_statements
from ddtree_overlay.patching import modules_of, wanted_paths
from ddtree_overlay.releases import KNOWN, known
from ddtree_overlay.verify.mentions import Place
from ddtree_overlay.verify.mirrors import check_mirrors, digest_of
from ddtree_overlay.verify.read import check_read, overridden
from ddtree_overlay.verify.symbols import Symbols
from ddtree_overlay.verify.tables import load_mirrors


SOURCE = b'''\
class Worker:
    def step(self, batch, on_publish=None):
        """Decode."""
        # The target.
        out = self.target.forward(batch, is_verify=True)
        return out.tokens


def refuse(request):
    return None
'''
STEP = Place("srt/worker.py", "Worker.step")


def _errors(source: bytes) -> list[str]:
    mirrors = {STEP: digest_of(SOURCE, "Worker.step") or ""}
    return [f.message for f in check_mirrors(mirrors, {"srt/worker.py": source}) if f.severity == "error"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"""Decode."""', b'"""Decode a batch,\n\n        in one step."""'),
        (b"# The target.", b"# The target verifies.\n"),
        (b"forward(batch, is_verify=True)", b"forward(\n            batch,\n            is_verify=True,\n        )"),
        (b"class Worker", b"import os\n\n\nclass Worker"),
        (b"return None", b"return 1"),
    ],
)
def test_layout_comments_and_other_functions_change_nothing(old, new):
    """A reformatted release needs no second reading."""
    assert old in SOURCE
    assert _errors(SOURCE.replace(old, new)) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"return out.tokens", b"self.gather(out)\n        return out.tokens"),
        (b"on_publish=None", b"on_publish=None, barrier=None"),
        (b"is_verify=True", b"is_verify=False"),
    ],
)
def test_another_step_is_found_with_its_digest(old, new):
    """DFLASH's step has learnt something that the tree's may have to learn."""
    changed = SOURCE.replace(old, new)

    (message,) = _errors(changed)

    assert "read it again" in message
    assert str(digest_of(changed, "Worker.step")) in message


@pytest.mark.parametrize("source", [b"", SOURCE.replace(b"def step", b"def run")])
def test_a_function_that_is_gone_is_found(source):
    """With its file or without it."""
    (message,) = _errors(source)

    assert "is gone" in message


OURS = "srt/speculative/ddtree/worker.py"
BASES = {
    "srt/base.py": """\
class Base:
    def flush(self):
        pass

    def load(self):
        return 1
""",
    "srt/worker.py": """\
from sglang.srt.base import Base


class Worker(Base):
    def step(self, batch):
        batch = self.drafted(batch)
        return self.target(batch)

    def flush(self):
        self.cache.clear()
""",
}


def _unread(ours: str, edits: tuple[Edit, ...] = (), mirrors: tuple[Place, ...] = ()) -> list[tuple[str, str]]:
    """What nobody has read, when these are our module and our edits."""
    sources = {path: text.encode() for path, text in BASES.items()} | {OURS: ours.encode()}
    for edit in edits:
        sources[edit.path] = edit.apply(sources[edit.path])
    base = {path: text.encode() for path, text in BASES.items()}
    findings = check_read(mirrors, Symbols(sources, frozenset()), edits, [OURS], base)
    for finding in findings:
        scope = finding.message.split()[3].rstrip(",")
        assert finding.severity == "error"
        assert str(digest_of(base[finding.path], scope)) in finding.message
    return [(f.path, f.message.split()[3].rstrip(",")) for f in findings]


@pytest.mark.parametrize(
    ("method", "found"),
    [
        ("def step(self, batch):\n        return 1", ("srt/worker.py", "Worker.step")),
        (
            "def step(self, batch):\n        self.n = 1\n        return super().step(batch)",
            ("srt/worker.py", "Worker.step"),
        ),
        ("def load(self):\n        return 2", ("srt/base.py", "Base.load")),
        ("def flush(self):\n        pass", ("srt/worker.py", "Worker.flush")),
        ("def flush(self):\n        'Ours.'\n        super().flush()", None),
        ("def step(self, batch):\n        return super().step(batch)", None),
        ("def _ours(self):\n        return super().flush()", None),
    ],
)
@pytest.mark.parametrize("mixed_in", [False, True])
def test_a_method_that_we_override_has_to_have_been_read(method: str, found: tuple[str, str] | None, mixed_in: bool):
    """In the nearest base that has it, whether our class or a mixin of ours does; passing the call on is nothing."""
    ours = "from sglang.srt.worker import Worker\n\nclass Ours(Worker):\n    " + method
    if mixed_in:
        ours = (
            f"from sglang.srt.worker import Worker\n\nclass Part:\n    {method}\n\nclass Ours(Part, Worker):\n    pass"
        )

    assert _unread(ours) == ([] if found is None else [found])
    assert found is None or _unread(ours, mirrors=(Place(*found),)) == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("if self.ours:\n    return self.tree(batch)\n", True),
        ("batch = self.wider(batch)\n", True),
        ("def later():\n    return 1\n", False),
        ("self.seen = batch\n", False),
        ("ours = batch\n", False),
    ],
)
def test_a_function_that_an_insertion_cuts_short_has_to_have_been_read(code: str, found: bool):
    """Or one whose own names it sets: what follows works on something else."""
    inserted = insert_statements("Worker.step", AtStart(), code, reason="A test.")
    edit = Edit(path="srt/worker.py", summary="A test.", insertions=(inserted,), examples=())

    assert _unread("", (edit,)) == ([("srt/worker.py", "Worker.step")] if found else [])
    assert _unread("", (edit,), (Place("srt/worker.py", "Worker.step"),)) == []


@pytest.mark.parametrize("version", [KNOWN[0].version, "0.5.14", KNOWN[-1].version])
def test_every_override_of_a_published_release_is_in_its_table(version: str):
    """The worker's, and the verify input's: take one out of the table, and it is found."""
    row = known(version)
    assert row is not None
    modules = modules_of(row)
    base = wheels.snapshot(wanted_paths(), version)[1]
    symbols = Symbols({**base, **modules}, wanted_paths())
    mirrors = load_mirrors(row.sites)

    found = overridden(symbols, modules)

    assert {place.scope.partition(".")[0] for place in found} >= {
        "DFlashWorker" if version == KNOWN[0].version else "DFlashWorkerV2"
    }
    assert found <= mirrors.keys()
    assert len(check_read([], symbols, (), modules, base)) == len(found) > 3


@pytest.mark.parametrize("version", [row.version for row in KNOWN])
def test_what_the_attention_kernel_stands_in_for_has_been_read(version: str):
    """It is replaced on the object, where no edit tells of an argument that moved to another place."""
    row = known(version)
    assert row is not None
    base = wheels.package(version)
    backend = "srt/layers/attention/triton_backend.py"
    kernels = next(
        path for path in base if path.endswith(("ops/attention/extend_attention.py", "triton_ops/extend_attention.py"))
    )
    wanted = {Place(backend, "TritonAttnBackend.forward_extend")}
    wanted |= {Place(kernels, name) for name in ("_fwd_kernel", "extend_attention_fwd")}
    if b"def _forward_extend_kernel(" in base[backend]:
        wanted.add(Place(backend, "TritonAttnBackend._forward_extend_kernel"))

    assert wanted <= load_mirrors(row.sites).keys()
    assert {kernels, backend} <= wanted_paths()
