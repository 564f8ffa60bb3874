# SPDX-License-Identifier: Apache-2.0
"""What an engine gets that was given no budget, and what refusals of too wide a tree name as ways out."""

from __future__ import annotations

import argparse
import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.speculative.ddtree import args, default_budget, gates
from sglang.srt.speculative.ddtree.flags import add_ddtree_cli_args


class Recurrent:
    """The config of a model with recurrent layers."""

    architectures = None
    mamba2_cache_params = None


@pytest.fixture(autouse=True)
def _plain_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later releases declare what they settle, and read it from a view."""
    for module in (args, default_budget, gates):
        monkeypatch.setattr(module, "reading", lambda found: found)
    for module in (args, default_budget):
        monkeypatch.setattr(module, "settle", lambda found, **values: vars(found).update(values))
        monkeypatch.setattr(module, "model_config", lambda found: found.model)


def given(**changed: Any) -> SimpleNamespace:
    """Arguments before their budget is settled: block 16, a context of 4096, Triton."""
    base = {
        "speculative_ddtree_budget": None,
        "speculative_ddtree_budgets": None,
        "speculative_dflash_block_size": 16,
        "attention_backend": "triton",
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "max_total_tokens": None,
        "model": SimpleNamespace(hf_config=object(), context_len=4096),
    }
    return SimpleNamespace(**(base | changed))


def model(**changed: Any) -> SimpleNamespace:
    return SimpleNamespace(**({"hf_config": object(), "context_len": 4096} | changed))


def check(found: SimpleNamespace) -> None:
    """The checks of what `auto` needs beside a fixed budget."""
    args._check_lanes(found)
    args._check_capacity(found)


#: What stands in the way of `auto`: arguments, what the log says, and the ways to `auto`.
OBSTACLES = {
    "a backend": ({"decode_attention_backend": "fa3"}, "attention backend fa3", "--attention-backend triton"),
    "recurrent layers": ({"model": model(hf_config=Recurrent())}, "recurrent layers", "auto is refused"),
}


def test_auto_is_what_nothing_means(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is said of it: the start names its lanes."""
    found = given(max_total_tokens=64)
    with caplog.at_level(logging.INFO):
        default_budget.settle_budget(found)

    assert found.speculative_ddtree_budget == "auto" and caplog.text == ""


@pytest.mark.parametrize("name", OBSTACLES)
def test_a_fixed_budget_takes_its_place_where_it_cannot_be_served(caplog: pytest.LogCaptureFixture, name: str) -> None:
    """With one line that says why, and how to ask for either."""
    changed, reason, way = OBSTACLES[name]
    found = given(**changed)
    with caplog.at_level(logging.WARNING):
        default_budget.settle_budget(found)

    assert found.speculative_ddtree_budget == 64
    (record,) = caplog.records
    for part in ("using 64 instead of auto", reason, "--speculative-ddtree-budget N", way):
        assert part in record.getMessage()


@pytest.mark.parametrize("name", OBSTACLES)
@pytest.mark.parametrize("chosen", [16, "auto"])
def test_a_budget_that_was_given_stays(caplog: pytest.LogCaptureFixture, name: str, chosen: object) -> None:
    """An `auto` that cannot be served is refused by the checks, not replaced."""
    found = given(speculative_ddtree_budget=chosen, **OBSTACLES[name][0])
    default_budget.settle_budget(found)

    assert found.speculative_ddtree_budget == chosen and caplog.text == ""


@pytest.mark.parametrize("name", OBSTACLES)
def test_what_auto_is_not_chosen_for_is_what_it_is_refused_for(name: str) -> None:
    """The same reason, word for word; and a fixed budget passes the same checks."""
    found = given(speculative_ddtree_budget="auto", **OBSTACLES[name][0])
    obstacle = default_budget.why_one_lane(found)
    assert obstacle is not None
    with pytest.raises(ValueError, match=re.escape(f"DDTREE: {obstacle.reason}. ")):
        check(found)

    found.speculative_ddtree_budget = 64
    check(found)


@pytest.mark.parametrize("name", OBSTACLES)
def test_a_list_alone_is_a_wish_for_lanes(name: str) -> None:
    """`auto` chooses among it; where it cannot be served no fixed budget could be beside it."""
    found = given(speculative_ddtree_budgets="4,200", **OBSTACLES[name][0])
    default_budget.settle_budget(found)

    assert found.speculative_ddtree_budget == "auto"
    with pytest.raises(ValueError, match="DDTREE: "):
        check(found)


def test_a_pool_too_small_for_auto_names_the_fixed_budget_that_fits() -> None:
    """64 where that is less, whatever the pool holds otherwise; none beside a number."""
    for limit, fits in ((63, 62), (33, 32)):
        with pytest.raises(
            ValueError, match=f"to {limit - 1} or less, or use --speculative-ddtree-budget {fits} alone"
        ):
            args._check_capacity(given(speculative_ddtree_budget="auto", max_total_tokens=limit))
    with pytest.raises(ValueError, match=r"Set --speculative-ddtree-budget to 99 or less.$"):
        args._check_capacity(given(speculative_ddtree_budget=128, max_total_tokens=100))


def test_ways_out_of_too_wide_a_tree_are_those_of_its_budget() -> None:
    """A number is lowered; `auto` gets another list, or a number."""
    auto = given(speculative_ddtree_budget="auto")

    assert default_budget.narrower(given(speculative_ddtree_budget=99), 7) == (
        "Lower --speculative-ddtree-budget (at most 7 fits)"
    )
    assert default_budget.narrower(auto, 100).endswith("(at most 100 fits), use --speculative-ddtree-budget 64 alone")
    assert default_budget.narrower(auto, 7).endswith("(at most 7 fits), use --speculative-ddtree-budget 7 alone")
    assert "alone" not in default_budget.narrower(auto, 0)


def test_recurrent_layers_that_no_config_told_of_are_found_in_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their states are kept for one width: a default `auto` must not get as far as its first step."""
    monkeypatch.setattr(gates, "check_attention", lambda _: None)
    monkeypatch.setattr(gates, "check_hybrid", lambda *_: None)
    monkeypatch.setattr(gates, "is_recurrent", lambda _: True)

    def runner(budget: object) -> SimpleNamespace:
        return SimpleNamespace(
            server_args=given(speculative_ddtree_budget=budget), model=object(), model_config=model()
        )

    gates.check_model_runner(runner(16))
    with pytest.raises(ValueError, match=r"recurrent layers.*--speculative-ddtree-budget 64 alone"):
        gates.check_model_runner(runner("auto"))


def test_a_command_line_without_a_budget_gives_none() -> None:
    """What was given and what nothing means are told apart where the arguments are completed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--speculative-algorithm", choices=["DFLASH"])
    add_ddtree_cli_args(parser)

    assert parser.parse_args([]).speculative_ddtree_budget is None
    assert parser.parse_args(["--speculative-ddtree-budget", "auto"]).speculative_ddtree_budget == "auto"
