# SPDX-License-Identifier: Apache-2.0
"""What the overlay has its own version of is compared with what somebody read."""

from __future__ import annotations

import pytest

from ddtree_overlay.verify.mentions import Place
from ddtree_overlay.verify.mirrors import check_mirrors, digest_of


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
