# SPDX-License-Identifier: Apache-2.0
"""New weights while serving (sglang#35403): they are the target's, and the drafter drafts as well as before."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine import harness
from tests.engine.serving import Serving, text_arguments
from tests.support.waiting import until


#: The last hands an update on in another way than those before it.
RELEASES = (harness.RELEASE, harness.SECOND_RELEASE, harness.SECOND_WORKER[-1])


@pytest.fixture(scope="module", params=RELEASES)
def serving(
    request: pytest.FixtureRequest, sites: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Serving, Path]]:
    """A server, and the folder of its target."""
    folder = tmp_path_factory.mktemp("weights")
    arguments = text_arguments(
        "DDTREE",
        folder,
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
    # SGLang refuses an update while the step behind the last one of a request is under way.
    until(server.is_idle)

    updated = server.post("/update_weights_from_disk", {"model_path": str(target)})
    after = server.post("/generate", body)

    assert updated["success"]
    assert after["text"] == before["text"]
    assert after["meta_info"]["spec_verify_ct"] == before["meta_info"]["spec_verify_ct"] < 40


@pytest.mark.parametrize("serving", [harness.SECOND_WORKER[-1]], indirect=True)
def test_an_update_that_names_the_drafter_is_refused(serving: tuple[Serving, Path]):
    """It would report success with nothing loaded; a check of the drafter looks at the drafter."""
    server, _ = serving
    until(server.is_idle)
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.post("/begin_weight_update", {"selector": "draft"})
    target, drafter = (server.post("/weights_checker", {"selector": name})["ranks"] for name in ("target", "draft"))
    before = log_of(server).count("the drafter keeps those of its start")
    session = [
        server.post(f"/{step}_weight_update", body) for step, body in (("begin", {"selector": "all"}), ("end", {}))
    ]

    assert "does not load weights into the drafter" in json.loads(refused.value.read())["message"]
    assert target[0]["checksums"]
    assert drafter[0]["checksums"]
    assert target[0]["checksums"] != drafter[0]["checksums"]
    assert all(step["success"] for step in session)
    assert log_of(server).count("the drafter keeps those of its start") == before + 1


def log_of(server: Serving) -> str:
    """What it has printed."""
    return (server.folder / "log.txt").read_text(errors="replace")
