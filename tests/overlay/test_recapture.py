# SPDX-License-Identifier: Apache-2.0
"""A weight update that asks for new CUDA graphs is refused before it loads anything; any other goes its way."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.speculative.ddtree import lanes as lanes_module
from sglang.srt.speculative.ddtree.lane_parts import RUNNER
from sglang.srt.speculative.ddtree.lanes import Lane, Lanes
from sglang.srt.speculative.ddtree.recapture import MESSAGE


def a_runner() -> Any:
    """As up to 0.5.15: the model runner loads the weights itself."""

    class ModelRunner:
        def __init__(self) -> None:
            self.loaded: list[Any] = []

        def update_weights_from_disk(
            self, path: str, load_format: str, weights: Any = None, recapture_cuda_graph: bool = False
        ) -> tuple[bool, str]:
            assert not recapture_cuda_graph
            self.loaded.append((path, load_format, weights))
            return True, "loaded"

    return ModelRunner()


def with_an_updater() -> Any:
    """As from 0.5.16 on: a frozen part of the model runner does."""

    @dataclass(frozen=True, slots=True)
    class WeightUpdater:
        loaded: list[Any] = field(default_factory=list)
        update_weights_from_disk = type(a_runner()).update_weights_from_disk

    updater = WeightUpdater()
    return SimpleNamespace(weight_updater=updater, loaded=updater.loaded)


@pytest.mark.parametrize("make", [a_runner, with_an_updater])
@pytest.mark.parametrize("sizes", [(1, 2), ()])
def test_new_graphs_are_refused_where_there_are_any(
    make: Any, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang would capture one width's, and the next step of a tree would not use them."""
    runner = make()
    runner.attn_backend, graphs = None, SimpleNamespace(capture_bs=sizes)
    setattr(runner, RUNNER, graphs)
    monkeypatch.setattr(lanes_module, "get_tp_group", lambda: SimpleNamespace(rank_in_group=1))
    lanes = Lanes.__new__(Lanes)
    lanes._model_runner, lanes.widths, lanes._lanes = runner, (9,), {}
    lanes._widest = Lane(9, None, graphs)
    lanes.capture()
    update = getattr(runner, "weight_updater", runner).update_weights_from_disk

    assert update("there", "auto", recapture_cuda_graph=False) == (True, "loaded")
    if sizes:
        assert update("there", "auto", recapture_cuda_graph=True) == (False, MESSAGE)
    assert runner.loaded == [("there", "auto", None)]
