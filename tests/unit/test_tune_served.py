# SPDX-License-Identifier: Apache-2.0
"""What `tune` reads from a server's own words, and the prompts that it is given."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ddtree_overlay.errors import OverlayError, UsageError
from ddtree_overlay.tuning import prompts
from ddtree_overlay.tuning.served import choose_arms, read_server, running_requests, steps_by_choice


URL = "http://127.0.0.1:30000"
#: The fields of a real answer of SGLang 0.5.17 that are read.
INFO: dict[str, Any] = {
    "version": "0.5.17",
    "served_model_name": "qwen",
    "speculative_algorithm": "DDTREE",
    "speculative_dflash_block_size": 16,
    "speculative_num_draft_tokens": 65,
    "speculative_ddtree_budget": "auto",
    "speculative_ddtree_budgets": [4, 8, 15, 64],
    "speculative_ddtree_overlay_id": "d61ee96d3814",
    "skip_tokenizer_init": False,
    "max_running_requests": 96,
    "dp_size": 2,
    "internal_states": [{"effective_max_running_requests_per_dp": 48}],
}


def arms(**changes: Any) -> list[tuple[str, Any]]:
    return [(arm.name, arm.override) for arm in read_server(INFO | changes, URL).arms]


def test_arms_are_the_chain_each_captured_budget_and_the_servers_own_choice():
    """The chain comes first, and `auto` asks for nothing: that is what makes the server choose."""
    assert arms() == [("chain", "chain"), ("4", 4), ("8", 8), ("15", 15), ("64", 64), ("auto", None)]


def test_a_fixed_budget_is_no_arm_of_its_own_beside_the_override_that_is_the_same():
    """A server with the budget 8 and lanes for 4, 8 and 15 has three trees."""
    assert arms(speculative_ddtree_budget=8, speculative_ddtree_budgets=[15, 4, 8]) == [
        ("chain", "chain"),
        ("4", 4),
        ("8", 8),
        ("15", 15),
    ]


def test_the_chain_needs_a_lane_of_its_own_width():
    """Without a budget of block size - 1 no request can ask for the chain."""
    assert "chain" not in dict(arms(speculative_ddtree_budgets=[4, 64]))


@pytest.mark.parametrize("budgets", [None, [], [16], "16", "nonsense", {"4": 1}, [True, -3, "8"]])
def test_a_server_with_one_budget_has_one_arm_that_asks_for_nothing(budgets):
    """Whatever else the field holds: what is no list of budgets offers none."""
    assert arms(speculative_ddtree_budget=16, speculative_ddtree_budgets=budgets) == [("16", None)]


def test_steps_that_draft_nothing_are_an_arm_under_the_name_that_the_server_counts_them_by():
    """Where 0 is among the budgets (`Choice` calls it "none")."""
    assert arms(speculative_ddtree_budgets=[0, 8]) == [("none", 0), ("8", 8), ("auto", None)]


def test_running_requests_of_all_ranks_are_added():
    """`max_running_requests` of the server is what fits on all data-parallel ranks."""
    assert read_server(INFO, URL).most == 96
    assert read_server(INFO | {"internal_states": [], "dp_size": None}, URL).most == 96
    assert read_server(INFO | {"internal_states": None, "max_running_requests": None}, URL).most == 0


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"speculative_algorithm": "DFLASH"}, "does not run DDTREE, but DFLASH"),
        ({"speculative_algorithm": None}, "does not run DDTREE, but no speculative decoding"),
        ({"speculative_algorithm": 7}, "does not run DDTREE"),
        ({"speculative_ddtree_overlay_id": None}, "no overlay id"),
        ({"speculative_ddtree_budget": None}, "no budget"),
        ({"speculative_ddtree_budget": True}, "no budget"),
        ({"speculative_ddtree_budget": "many"}, "no budget"),
    ],
)
def test_a_server_that_cannot_be_tuned_is_refused_with_a_next_step(changes, what):
    """Another algorithm, or a DDTREE that is not ours: nothing is sent to it."""
    with pytest.raises(OverlayError) as caught:
        read_server(INFO | changes, URL)

    assert what in caught.value.what and caught.value.why and caught.value.next_step
    assert caught.value.exit_code == 1


def test_arms_can_be_chosen_by_name_and_unknown_ones_are_refused():
    """The message names those that there are."""
    served = read_server(INFO, URL)

    assert [arm.name for arm in choose_arms(served, ("auto", "chain"))] == ["chain", "auto"]
    with pytest.raises(UsageError) as caught:
        choose_arms(served, ("chain", "32"))
    assert "'32'" in caught.value.what and "chain, 4, 8, 15, 64, auto" in caught.value.why


@pytest.mark.parametrize(
    ("answer", "running"),
    [
        (
            {"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1}, {"num_running_reqs": 0, "num_waiting_reqs": 0}]},
            3,
        ),
        ([{"num_reqs": 4, "num_waiting_reqs": 1}], 4),
        ({"loads": []}, None),
        ({"loads": [{"num_running_reqs": "2"}]}, None),
        ([7], None),
        (None, None),
        ("busy", None),
    ],
)
def test_load_is_read_from_both_answers_and_unknown_is_not_idle(answer, running):
    """`/v1/loads` and `/get_load`; what does not say is not taken for zero."""
    assert running_requests(answer) == running


@pytest.mark.parametrize(
    ("states", "steps"),
    [
        ([{"ddtree_steps": {"8": 3, "chain": 1}}, {"ddtree_steps": {"8": 2}}], {"8": 5, "chain": 1}),
        ([{"ddtree_steps": {"8": -1, "4": True, "7": "x", "\x1b": 3}}], {}),
        ([{"ddtree_steps": None}], None),
        ([7], None),
        ("x", None),
        (None, None),
    ],
)
def test_counted_steps_of_all_ranks_are_added_and_nonsense_is_none(states, steps):
    """None says that the server counts nothing, which is not the same as no steps."""
    assert steps_by_choice({"internal_states": states}) == steps


def test_prompts_are_text_or_token_ids_in_a_list_or_in_lines():
    """The three documented formats; empty lines and a byte order mark are nothing."""
    listed = prompts.parse(b'\xef\xbb\xbf ["one", [1, 2]]', "p.json")
    lines = prompts.parse(b'{"text": "one"}\n\n{"prompt": "two"}\r\n{"input_ids": [3]}\n', "p.jsonl")

    assert [p.body for p in listed] == [{"text": "one"}, {"input_ids": [1, 2]}]
    assert [p.body for p in lines] == [{"text": "one"}, {"text": "two"}, {"input_ids": [3]}]
    assert lines[2].name == "p.jsonl, line 4"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "holds no prompt"),
        (b"[]", "holds no prompt"),
        (b"\xff\xfe", "not UTF-8"),
        (b'["one", ""]', "item 2"),
        (b'["\\ud800"]', "item 1"),
        (b"[[1, -1]]", "whole number"),
        (b"[[1, true]]", "whole number"),
        (b"[[1.5]]", "whole number"),
        (b"[[]]", "neither text nor a list"),
        (b"[null]", "neither text nor a list"),
        (b"[{}]", "neither text nor a list"),
        (b"hello\n", "line 1"),
        (b'{"text": "a"}\n{"text": "a", "prompt": "b"}', "line 2"),
        (b'{"text": [1, 2]}', "neither text nor a list"),
        (b'{"input_ids": "text"}', "neither text nor a list"),
        (b'{"messages": []}', "line 1"),
        (b"[" * 100000, "cannot be used"),
        (b"[" + b"9" * 5000 + b"]", "cannot be used"),
    ],
)
def test_what_is_no_prompt_is_refused_with_its_place(data, why):
    """No traceback and no guess, whatever a file holds."""
    with pytest.raises(UsageError) as caught:
        prompts.parse(data, "p.json")

    assert why in f"{caught.value.what} {caught.value.why}" and "JSON" in caught.value.next_step


def test_text_is_refused_for_a_server_without_a_tokenizer():
    """The built-in prompts are text."""
    served = read_server(INFO | {"skip_tokenizer_init": True}, URL)
    ids = prompts.parse(json.dumps([[1, 2]]).encode(), "ids.json")

    prompts.check(ids, served, "next")
    with pytest.raises(UsageError, match="token ids only"):
        prompts.check(prompts.built_in(), served, "next")
