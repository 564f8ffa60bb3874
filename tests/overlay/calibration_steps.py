# SPDX-License-Identifier: Apache-2.0
"""Steps whose labels are known, for the tests of the fit of the exponents."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from sglang.srt.speculative.ddtree.accept import accept
from sglang.srt.speculative.ddtree.calibration import Calibration
from sglang.srt.speculative.ddtree.calibration_args import AUTO
from sglang.srt.speculative.ddtree.draft_head import Choices, DraftHead
from sglang.srt.speculative.ddtree.tree import build_tree


VOCABULARY, POSITIONS = 40, 5

torch.set_num_threads(1)  # small tensors: threads would wait for each other


def head_of(weight: torch.Tensor) -> DraftHead:
    """A head over logits that are the hidden states."""
    rows = len(weight)
    shard = SimpleNamespace(
        num_org_elements=rows, num_org_elements_padded=rows, num_added_elements=0,
        org_vocab_start_index=0, added_vocab_start_index=rows,
    )  # fmt: skip
    return DraftHead(SimpleNamespace(weight=weight, shard_indices=shard), None, SimpleNamespace(world_size=1))


HEAD = head_of(torch.eye(VOCABULARY))


class Workload:
    """Drafters whose logits are known, and targets that draw from softmax(truth * logits)."""

    def __init__(self, seed: int = 0, scale: float = 3.0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.scale = scale

    def step(
        self, calibration: Calibration, truth: list[float] | float, batch: int = 8, budget: int = 8
    ) -> tuple[int, int]:
        """Serve a step of `batch` requests: tokens accepted with the exponents in use, and with exponents 1."""
        logits = self.scale * torch.randn((batch, POSITIONS, VOCABULARY), generator=self.generator)
        exponents = torch.as_tensor(truth, dtype=torch.float32).expand(POSITIONS)
        shares = torch.softmax(exponents[:, None] * logits, dim=-1).view(-1, VOCABULARY)
        labels = torch.multinomial(shares, 1, generator=self.generator).view(batch, POSITIONS)
        rows, ones = logits.view(-1, VOCABULARY), torch.ones(POSITIONS)
        choices = HEAD.top_log_probs(rows, budget, calibration.exponents)
        mine = self._accept(choices, labels, budget)
        calibration.observe(choices, mine)
        other = self._accept(HEAD.top_log_probs(rows, budget, ones), labels, budget)
        return int(mine.accept_lens.sum()), int(other.accept_lens.sum())

    def _accept(self, choices: Choices, labels: torch.Tensor, budget: int):
        batch = len(labels)
        shape = (batch, POSITIONS, -1)
        tree = build_tree(
            torch.zeros(batch, dtype=torch.int64), choices.log_probs.view(shape), choices.token_ids.view(shape), budget
        )
        after = torch.nn.functional.pad(labels, (0, 1)).gather(1, tree.depths)
        return accept(tree, after, prefix_lens=torch.zeros(batch, dtype=torch.int64), block_size=POSITIONS + 1)


def fitted(positions: int = POSITIONS) -> Calibration:
    return Calibration(AUTO, positions, "cpu")


def random_step(
    batch: int, positions: int, k: int, *, seed: int = 0, vocabulary: int = VOCABULARY
) -> tuple[Choices, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choices at exponents that are not 1, emitted tokens, accept lengths and judged requests."""
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn((batch * positions, vocabulary), generator=generator)
    exponents = 0.6 + torch.rand(positions, generator=generator)
    choices = head_of(torch.eye(vocabulary)).top_log_probs(logits, k, exponents)
    ranks = torch.randint(0, k, (batch, positions, 1), generator=generator)
    tokens = choices.token_ids.view(batch, positions, k).gather(2, ranks).squeeze(2)
    wild = torch.rand((batch, positions), generator=generator) < 0.2
    tokens = torch.where(wild, torch.randint(0, vocabulary, tokens.shape, generator=generator), tokens)
    tokens = torch.nn.functional.pad(tokens, (0, 1))
    accept_lens = torch.randint(0, positions + 1, (batch,), generator=generator)
    return choices, tokens, accept_lens, torch.rand(batch, generator=generator) < 0.3
