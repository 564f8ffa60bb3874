# SPDX-License-Identifier: Apache-2.0
"""Where a request ends within a step, and how much of it was reasoning; whole engines are in tests/engine/test_ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.variants import variant


if TYPE_CHECKING:
    from types import ModuleType

STOP = 9


class Request:
    """One of the second worker's, which ends at a token; SGLang has counted its step's reasoning already."""

    def __init__(self, emitted: list[int], step: list[int], reasoning_tokens: int) -> None:
        self.output_ids, self.reasoning_tokens = emitted + step, reasoning_tokens
        self.sampling_params = SimpleNamespace(stop_strs=[], stop_regex_strs=[], max_new_tokens=20)
        self.grammar = self.to_finish = self.finished_len = None
        self.looked: list[int] = []

    def finished(self) -> bool:
        return self.finished_len is not None

    def update_finish_state(self) -> None:
        self.looked.append(len(self.output_ids))
        if self.output_ids[-1] == STOP:
            self.finished_len = len(self.output_ids)


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = variant("second", "ending")
    monkeypatch.setattr(found, "is_ddtree_on", lambda: True)
    return found


@pytest.mark.parametrize(
    ("step", "counted", "reasoning"),
    [
        ([1, STOP, 2, 3], 8, 6),  # nothing but reasoning, to the stop
        ([1, STOP, 2, 3], 7, 6),  # its end was seen behind the stop
        ([1, 2, STOP, 3], 6, 6),  # and before it
    ],
)
def test_reasoning_behind_the_end_of_a_request_is_not_counted(
    ending: Any, step: list[int], counted: int, reasoning: int
) -> None:
    """sglang#39826: the usage would name more tokens of reasoning than tokens."""
    request = Request([1, 1, 1, 1], step, counted)

    assert ending.look_at_each_token(request, len(step))
    assert request.finished_len == 4 + step.index(STOP) + 1
    assert request.reasoning_tokens == reasoning
    assert request.output_ids == [1, 1, 1, 1, *step]


@pytest.mark.parametrize(("reasoning", "looks"), [(0, []), (4, []), (5, [5, 6, 7])])
def test_a_request_whose_reasoning_is_over_is_left_to_sglang(ending: Any, reasoning: int, looks: list[int]) -> None:
    """Its look at all tokens of a step costs less, and counts nothing."""
    request = Request([1, 1, 1, 1], [1, 2, 3], reasoning)

    assert ending.look_at_each_token(request, 3) is bool(looks)
    assert request.looked == looks
    assert request.reasoning_tokens == reasoning
