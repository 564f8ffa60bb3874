# SPDX-License-Identifier: Apache-2.0
"""What penalties, biases and custom processors do to the nodes of a tree, against the same on single rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.sampling import sampling_batch_info
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedPenalizerOrchestrator,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)
from sglang.srt.speculative.ddtree.targets import adjust_logits, adjust_without_penalties, count_roots, roots_only


VOCABULARY, WIDTH = 11, 4
PENALIZERS = (BatchedFrequencyPenalizer, BatchedPresencePenalizer, BatchedRepetitionPenalizer)


def params(**changed: float) -> SimpleNamespace:
    """Sampling parameters of a request."""
    base = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
    return SimpleNamespace(**(base | changed))


class Batch(SimpleNamespace):
    """What a penalizer looks at."""


def orchestrator(*every: SimpleNamespace, order: tuple[type, ...] = PENALIZERS) -> tuple[Any, Batch]:
    """SGLang's own, over a batch that has emitted nothing yet, and the batch, which has to live as long."""
    reqs = [SimpleNamespace(sampling_params=p, origin_input_ids=[1, 2]) for p in every]
    batch = Batch(reqs=reqs, device="cpu")
    return BatchedPenalizerOrchestrator(vocab_size=VOCABULARY, batch=batch, penalizers=order), batch


def info(penalties: BatchedPenalizerOrchestrator, bias: torch.Tensor | None = None) -> SimpleNamespace:
    """The batch's sampling info."""
    return SimpleNamespace(penalizer_orchestrator=penalties, logit_bias=bias, has_custom_logit_processor=False)


PENALISED = (
    params(frequency_penalty=1.5, presence_penalty=0.25),
    params(),
    params(repetition_penalty=2.0, frequency_penalty=0.5),
)


@pytest.mark.parametrize("order", [PENALIZERS, PENALIZERS[::-1]])
def test_root_rows_get_the_penalties_of_a_plain_step(order: tuple[type, ...]) -> None:
    """The last token is counted before the step, and the root's row is what plain decoding would sample from.

    SGLang keeps its penalizers in a set: to scale and then to add, or to add and then to scale, is not one thing.
    """
    torch.manual_seed(0)
    logits = torch.randn(3 * WIDTH, VOCABULARY)
    plain = logits.view(3, WIDTH, VOCABULARY)[:, 0].clone()
    roots = torch.tensor([5, 6, 7])
    ours, keep_ours = orchestrator(*PENALISED, order=order)
    reference, keep_reference = orchestrator(*PENALISED, order=order)

    penalised = count_roots(info(ours), roots, list(PENALISED))
    adjust_logits(logits, info(ours), WIDTH)
    reference.cumulate_output_tokens(roots)
    reference.apply(plain)

    assert penalised is not None
    assert penalised.tolist() == [True, False, True]
    torch.testing.assert_close(logits.view(3, WIDTH, VOCABULARY)[:, 0], plain)
    assert keep_ours is not keep_reference


def test_batch_without_penalties_is_left_alone() -> None:
    """Nothing is counted and no request is held to one token a step."""
    penalties, keep = orchestrator(params(), params())
    assert count_roots(info(penalties), torch.tensor([1, 2]), [params(), params()]) is None
    assert count_roots(None, torch.tensor([1]), [params()]) is None
    assert keep.reqs


def test_logit_bias_reaches_every_node_of_its_request() -> None:
    """Request by request, node by node: a bias does not depend on the path, so the whole tree may be accepted."""
    penalties, keep = orchestrator(params(), params())
    bias = torch.zeros(2, VOCABULARY)
    bias[0, 3], bias[1, 4] = 9.0, -9.0
    logits = torch.zeros(2 * WIDTH, VOCABULARY)
    adjust_logits(logits, info(penalties, bias), WIDTH)
    assert torch.equal(logits.view(2, WIDTH, VOCABULARY), bias.unsqueeze(1).expand(2, WIDTH, VOCABULARY))
    assert keep.reqs


def processors(process: Any, rows: list[int], batch: int) -> dict[int, Any]:
    """A custom logit processor for some requests of a batch, as this release keeps it."""
    kept = getattr(sampling_batch_info, "ProcessorEntry", None)
    if kept is not None:
        return {1: kept(process, rows, torch.tensor(rows))}
    return {1: (process, torch.tensor([row in rows for row in range(batch)]))}


class SamplingInfo(SimpleNamespace):
    """Sampling info that knows how many requests it is about."""

    def __len__(self) -> int:
        return len(self.custom_params)


def test_custom_processor_sees_the_root_of_each_request_and_holds_it_to_one_token() -> None:
    """One row a request, as in plain decoding: row i belongs to parameter i, and no deeper node is followed.

    A processor that takes `logits[i]` for `custom_params[i]`, as SGLang's own do, would leave all other nodes as they
    are, and their tokens would be accepted.
    """

    def allow(logits: torch.Tensor, every: list[dict[str, int]]) -> torch.Tensor:
        assert len(logits) == len(every) == 2
        for row, asked in enumerate(every):
            logits[row] = float("-inf")
            logits[row, asked["token"]] = 0.0
        return logits

    penalties, keep = orchestrator(params(), params(), params())
    sampling = SamplingInfo(
        penalizer_orchestrator=penalties,
        logit_bias=None,
        has_custom_logit_processor=True,
        custom_logit_processor=processors(allow, [0, 2], 3),
        custom_params=[{"token": 2}, None, {"token": 4}],
        temperatures=torch.ones(3, 1),
    )
    logits = torch.zeros(3 * WIDTH, VOCABULARY)
    logits[:, 7] = 1.0

    adjust_logits(logits, sampling, WIDTH)

    assert logits.argmax(-1).view(3, WIDTH)[:, 0].tolist() == [2, 7, 4]
    assert (logits.argmax(-1).view(3, WIDTH)[:, 1:] == 7).all()
    assert roots_only(sampling, None).tolist() == [True, False, True]
    assert roots_only(sampling, torch.tensor([False, True, False])).tolist() == [True, True, True]
    assert keep.reqs


def test_custom_processor_comes_behind_the_grammar() -> None:
    """One that forces a token which the grammar forbids gets it, as in plain decoding; bias changes nothing of that."""

    def force(logits: torch.Tensor, every: list[dict[str, int]]) -> torch.Tensor:
        assert torch.isinf(logits[:, 2]).all(), "a processor sees what the grammar has left"
        for row, asked in enumerate(every):
            logits[row] = float("-inf")
            logits[row, asked["token"]] = 0.0
        return logits

    def constrain(logits: torch.Tensor) -> None:
        logits[:, 2] = float("-inf")

    sampling = SamplingInfo(
        logit_bias=torch.full((2, VOCABULARY), 0.5),
        has_custom_logit_processor=True,
        custom_logit_processor=processors(force, [0], 2),
        custom_params=[{"token": 2}, None],
    )
    logits = torch.zeros(2 * WIDTH, VOCABULARY)
    logits[:, 2] = 1.0
    logits[:, 7] = 0.5

    adjust_without_penalties(logits, sampling, WIDTH, constrain)

    assert logits.argmax(-1).tolist() == [2, *[7] * (2 * WIDTH - 1)]
    alone = torch.zeros(WIDTH, VOCABULARY)
    adjust_without_penalties(alone, None, WIDTH, constrain)
    assert torch.isinf(alone).sum() == WIDTH


def test_batch_without_processors_is_held_to_one_token_by_penalties_alone() -> None:
    """Without a processor the penalised requests are the only ones."""
    penalties, keep = orchestrator(params())
    penalised = torch.tensor([True])
    assert roots_only(info(penalties), penalised) is penalised
    assert roots_only(None, None) is None
    assert keep.reqs
