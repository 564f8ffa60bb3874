# SPDX-License-Identifier: Apache-2.0
"""Workers that never were set up, with all that a step asks of them, and launches that are noted instead."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.speculative.ddtree import warming
from sglang.srt.speculative.ddtree.calibration import Calibration
from sglang.srt.speculative.ddtree.draft_head import DraftHead
from sglang.srt.speculative.ddtree.lanes import Lane
from sglang.srt.speculative.ddtree.observing import Observer
from sglang.srt.speculative.ddtree.targets import TargetChooser


PACKAGE = "sglang.srt.speculative.ddtree"
KERNELS = ("head", "tree", "mask", "accept", "calibration", "tally", "placing", "slots", "move")
BLOCK, HIDDEN, VOCABULARY, WIDTHS, MOST = 16, 8, 64, (1, 3, 5, 16, 65, 129), 200

#: The name of a kernel, and what its compiled variant is found by.
Variant = tuple[Any, ...]


def note_launches(monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    """What would be launched on a GPU, in place of launches; tensors say that they are there."""
    found: list[Variant] = []

    def launch(kernel: Any, grid: Any, args: Any, constants: Any, *, num_warps: int, key: Any = (), **_: Any) -> None:  # noqa: ARG001
        found.append((kernel.__name__, num_warps, key, *constants.values()))

    for name in KERNELS:
        monkeypatch.setattr(importlib.import_module(f"{PACKAGE}.{name}_kernel"), "launch", launch)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    group = SimpleNamespace(world_size=1, rank_in_group=0)
    monkeypatch.setattr(warming, "get_tp_group", lambda: group)
    return found


class TritonAttnBackend:
    """By its name it needs tails of a mask alone; without graphs, or with the whole mask."""

    cuda_graph_custom_mask = verify_mask = None

    def __init__(self, *, enable_deterministic: bool) -> None:
        self.enable_deterministic = enable_deterministic


class UnsetWorker:
    """What the workers of both generations have alike."""

    def __init__(self, page_size: int, deterministic: bool, calibration: str, widths: tuple[int, ...] = WIDTHS) -> None:
        backend = TritonAttnBackend(enable_deterministic=deterministic)
        shard = SimpleNamespace(
            num_org_elements=VOCABULARY,
            org_vocab_start_index=0,
            num_org_elements_padded=VOCABULARY,
            num_added_elements=0,
            added_vocab_start_index=0,
        )
        head = SimpleNamespace(weight=torch.zeros(VOCABULARY, HIDDEN), shard_indices=shard)
        group = SimpleNamespace(world_size=1, rank_in_group=0)
        self.model_runner = SimpleNamespace(
            dtype=torch.float32, device="cpu", max_running_requests=MOST, attn_backend=backend
        )
        self.block_size, self.page_size, self.tp_rank = BLOCK, page_size, 0
        self.topk_cap, self.chain_seed, self._is_recurrent = None, False, False
        self._draft_head = DraftHead(head, None, group)
        self._calibration = Calibration.of(calibration, BLOCK - 1, "cpu")
        self._targets = TargetChooser(SimpleNamespace(use_nan_detection=False), group)
        kv = [torch.zeros(9, 2, 4)]
        self.kv_pool = SimpleNamespace(k_buffer=kv, v_buffer=kv, data_ptrs=torch.zeros(2), data_strides=torch.zeros(2))
        self._lanes = SimpleNamespace(
            widths=widths,
            all=lambda: [Lane(width, backend, None) for width in widths],
            use=lambda _: None,
            rest=lambda: None,
        )
        self._choosing: Any = SimpleNamespace()

    def choosing(self, width: int, shape: str, grown: int) -> None:
        """Let the next step be of a kind; it is observed, as by `auto`."""
        observer = Observer([3, 5, 16, 65, 129], "cpu")
        self._choosing = SimpleNamespace(
            choose=lambda: (width, shape),
            grown_width=lambda: grown,
            count=observer.count,
            warm_up=observer.warm_up,
            meanwhile=lambda: None,
        )
