# SPDX-License-Identifier: Apache-2.0
"""Weight updates while serving: the target's alone, and refused where they name the drafter."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.variants import variant


drafter_weights = variant("second", "drafter_weights")


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What SGLang's manager of updates has at hand."""
    monkeypatch.setattr(drafter_weights, "get_tp_group", lambda: SimpleNamespace(rank_in_group=0))
    drafter = SimpleNamespace(check_weights=lambda **given: given)
    return SimpleNamespace(
        _session=None,
        tp_worker=SimpleNamespace(weight_update_runners=lambda: [("target", "the target's runner")]),
        draft_worker=SimpleNamespace(draft_model_runner=drafter),
    )


def test_an_update_that_names_the_drafter_loads_nothing_and_says_so(manager: Any) -> None:
    """Also in a session that was opened for all; a check is the drafter's own."""
    manager._session = SimpleNamespace(selector="all")
    ((role, runner),) = drafter_weights.runners_of(manager, "draft")

    assert role == "draft"
    for load in (
        lambda: runner.weight_updater.update_weights_from_tensor(named_tensors=[], load_format=None),
        lambda: runner.weight_updater.load_weights_from_distributed([]),
    ):
        assert load() == (False, drafter_weights.refusal())
    assert runner.check_weights(action="checksum", role="draft") == {"action": "checksum", "role": "draft"}


@pytest.mark.parametrize("rank", [0, 1])
def test_an_update_is_of_the_target_and_said_so_once(
    manager: Any, rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """When its session is opened, on one rank; not for each of its parts."""
    monkeypatch.setattr(drafter_weights, "get_tp_group", lambda: SimpleNamespace(rank_in_group=rank))
    with caplog.at_level(logging.INFO):
        opened = drafter_weights.runners_of(manager, "all")
        manager._session = SimpleNamespace(selector="all")
        parts = [drafter_weights.runners_of(manager, name) for name in ("all", "target", "all")]

    assert [opened, *parts] == [[("target", "the target's runner")]] * 4
    assert len(caplog.records) == 1 - rank
