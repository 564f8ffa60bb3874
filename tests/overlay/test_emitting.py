# SPDX-License-Identifier: Apache-2.0
"""What a step emits, against SGLang's own requests that look at every token: the same text, ended in the same way."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.ddtree import emitting
from sglang.srt.speculative.ddtree.emitting import emit
from sglang.srt.speculative.ddtree.finishing import finish_if_due


VOCABULARY = 40


class Tokenizer:
    """Letters for tokens; it counts how often it is asked for its EOS."""

    def __init__(self, eos: int | None, additional: set[int] | None) -> None:
        self.additional_stop_token_ids, self._eos, self.asked = additional, eos, 0

    @property
    def eos_token_id(self) -> int | None:
        self.asked += 1
        return self._eos

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(ord("A") + token) for token in tokens)


class Grammar:
    """Over when the request has so many tokens."""

    def __init__(self, length: int) -> None:
        self.length, self.req = length, None

    def is_terminated(self) -> bool:
        return len(self.req.output_ids) >= self.length  # type: ignore[attr-defined]


def request(dice: random.Random) -> Any:
    """A request that may end for any reason that SGLang knows of."""
    sampling = SamplingParams(
        max_new_tokens=dice.choice([3, 9, 1000]),
        stop_token_ids=dice.choice([None, [dice.randrange(VOCABULARY)]]),
        stop=dice.choice([None, None, chr(ord("A") + dice.randrange(VOCABULARY))]),
        ignore_eos=dice.random() < 0.3,
    )
    tokenizer = Tokenizer(dice.choice([None, dice.randrange(VOCABULARY)]), dice.choice([None, {1, 2}]))
    sampling.normalize(None)
    req = Req("r", "", [1, 2, 3], sampling, eos_token_ids=dice.choice([None, {5}]), vocab_size=VOCABULARY)
    req.tokenizer = tokenizer
    if dice.random() < 0.1:
        req.to_finish = FINISH_ABORT()
    if dice.random() < 0.1:
        req.grammar = Grammar(dice.randrange(1, 12))
        req.grammar.req = req
    return req


def one_by_one(req: Any, new: list[int]) -> int:
    """How many tokens a request takes that looks at each."""
    for count, token in enumerate(new, 1):
        req.output_ids.append(token)
        finish_if_due(req)
        if req.finished():
            return count
    return len(new)


def batch_of(*reqs: Any) -> Any:
    """The batch as far as it is read."""
    return SimpleNamespace(reqs=list(reqs), model_config=SimpleNamespace(think_end_id=None))


def end_of(req: Any) -> Any:
    """How a request has ended."""
    reason = req.finished_reason
    return list(req.output_ids), reason and reason.to_json(), req.finished_len


@pytest.mark.parametrize("seed", range(300))
def test_a_request_ends_where_sglang_ends_it(seed: int) -> None:
    """Stop tokens of four origins, stop strings, lengths, grammars, aborts and tokens that are none, wherever."""
    mine, its = request(random.Random(seed)), request(random.Random(seed))
    dice = random.Random(1000 + seed)
    while not its.finished() and len(its.output_ids) < 60:
        tokens = [dice.randrange(VOCABULARY) for _ in range(8)]
        if dice.random() < 0.02:
            tokens[dice.randrange(8)] = dice.choice([-1, VOCABULARY + 1])
        accepted = dice.randrange(8)
        assert emit(batch_of(mine), [tokens], [accepted]) == [one_by_one(its, tokens[: accepted + 1])]
        assert end_of(mine) == end_of(its)


def test_a_step_that_ends_nothing_asks_neither_sglang_nor_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer takes microseconds to tell its EOS; SGLang asks it for every token of every request."""
    monkeypatch.setattr(emitting, "finish_if_due", lambda _req: pytest.fail("SGLang was asked"))
    sampling = SamplingParams(max_new_tokens=1000)
    sampling.normalize(None)
    req = Req("r", "", [1], sampling, eos_token_ids={5}, vocab_size=VOCABULARY)
    req.tokenizer = Tokenizer(7, None)
    for _ in range(5):
        assert emit(batch_of(req), [[8, 9, 10, 11, 0]], [3]) == [4]
    assert list(req.output_ids) == [8, 9, 10, 11] * 5
    assert req.tokenizer.asked == 1
