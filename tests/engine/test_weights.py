# SPDX-License-Identifier: Apache-2.0
"""New weights while serving (sglang#35403): they are the target's, and the drafter drafts as well as before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine import harness
from tests.engine.serving import Serving


#: The last hands an update on in another way than those before it.
RELEASES = (harness.RELEASE, harness.SECOND_RELEASE, harness.SECOND_WORKER[-1])


@pytest.fixture(scope="module", params=RELEASES)
def serving(
    request: pytest.FixtureRequest, sites: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Serving, Path]]:
    """A server, and the folder of its target."""
    folder = tmp_path_factory.mktemp("weights")
    arguments = harness.engine_args(
        "DDTREE",
        model_path=str(harness.text_target(folder / "target")),
        skip_tokenizer_init=False,
        speculative_ddtree_budget=16,
        disable_overlap_schedule=request.param == harness.RELEASE,
    )
    with Serving.start(sites[request.param], arguments, folder / "server") as server:
        yield server.wait(), folder / "target"


def test_an_update_of_the_target_leaves_the_drafter_alone(serving: tuple[Serving, Path]):
    """The weights are those that it has, so that text and steps have to be the same; the server lives on."""
    server, target = serving
    body = {"text": "def main(self):", "sampling_params": {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}}
    before = server.post("/generate", body)

    updated = server.post("/update_weights_from_disk", {"model_path": str(target)})
    after = server.post("/generate", body)

    assert updated["success"]
    assert after["text"] == before["text"]
    assert after["meta_info"]["spec_verify_ct"] == before["meta_info"]["spec_verify_ct"] < 40
