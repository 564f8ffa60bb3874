# SPDX-License-Identifier: Apache-2.0
"""Start-up: what DDTREE makes of its arguments, and what it refuses, in every patched SGLang."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.engine import harness
from tests.engine.engines import Engines, Release, Sites

from ddtree_overlay.patching import SUPPORTED_RELEASES


HYBRID_CONFIG = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
}

#: Arguments beside a plain DDTREE start -> what the refusal must say.
REFUSALS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "negative budget": ({"speculative_ddtree_budget": -3}, ["--speculative-ddtree-budget", "at least 1", "-3"]),
    "zero budget": ({"speculative_ddtree_budget": 0}, ["--speculative-ddtree-budget", "at least 1"]),
    "half a budget": ({"speculative_ddtree_budget": 8.5}, ["--speculative-ddtree-budget", "8.5 (float)", "like 64"]),
    "a budget that is true": ({"speculative_ddtree_budget": True}, ["--speculative-ddtree-budget", "True (bool)"]),
    "budgets that are a number": ({"speculative_ddtree_budgets": 8}, ["--speculative-ddtree-budgets", "got 8"]),
    "fractional budgets": ({"speculative_ddtree_budgets": [4.5]}, ["--speculative-ddtree-budgets", "[4.5]"]),
    "a top-k cap in words": ({"speculative_ddtree_topk_cap": "all"}, ["--speculative-ddtree-topk-cap", "'all' (str)"]),
    "a switch in words": (
        {"speculative_ddtree_allow_hybrid_unsafe": "false"},
        ["--speculative-ddtree-allow-hybrid-unsafe", "'false' (str)", "without quotation marks"],
    ),
    "a number for a switch": ({"speculative_ddtree_chain_seed": 1}, ["--speculative-ddtree-chain-seed", "got 1"]),
    "no calibration": ({"speculative_ddtree_calibration": None}, ["--speculative-ddtree-calibration", "'None'"]),
    "budget in words": ({"speculative_ddtree_budget": "many"}, ["--speculative-ddtree-budget", "or auto", "many"]),
    "budgets in words": ({"speculative_ddtree_budgets": "4,some"}, ["--speculative-ddtree-budgets", "'4,some'"]),
    "budgets of nothing": ({"speculative_ddtree_budgets": [0]}, ["--speculative-ddtree-budgets", "[0]"]),
    "one of the budgets beyond the pool": (
        {"speculative_ddtree_budgets": "8,1500"},
        ["--max-total-tokens (1024)", "--speculative-ddtree-budgets to 1023 or less"],
    ),
    "auto beyond the pool": (
        {"speculative_ddtree_budget": "auto", "max_total_tokens": 60},
        [
            "--max-total-tokens (60)",
            "--speculative-ddtree-budgets to 59 or less",
            "--speculative-ddtree-budget 59 alone",
        ],
    ),
    "nothing given, a short context": (
        {"context_length": 60},
        ["budget of 63", "context length (60)", "--speculative-ddtree-budget 59 alone"],
    ),
    "auto for a hybrid model": (
        {
            "model_path": "HYBRID",
            "disable_radix_cache": True,
            "speculative_ddtree_allow_hybrid_unsafe": True,
            "speculative_ddtree_budget": "auto",
        },
        ["recurrent layers", "one budget only"],
    ),
    "several budgets with flashinfer": (
        {"attention_backend": "flashinfer", "device": "cuda", "speculative_ddtree_budgets": "4,8"},
        ["flashinfer", "triton"],
    ),
    "auto with flashinfer": (
        {"attention_backend": "flashinfer", "device": "cuda", "speculative_ddtree_budget": "auto"},
        ["flashinfer", "triton"],
    ),
    "budget beyond the pool": ({"speculative_ddtree_budget": 1024}, ["--max-total-tokens (1024)", "1023 or less"]),
    "budget beyond the context": (
        {"speculative_ddtree_budget": 300, "max_total_tokens": None},
        ["context length (256)", "255 or less"],
    ),
    "zero top-k cap": ({"speculative_ddtree_topk_cap": 0}, ["--speculative-ddtree-topk-cap", "at least 1"]),
    "torch_native backend": (
        {"attention_backend": "torch_native"},
        ["'torch_native'", "Supported: triton"],
    ),
    "fa4 backend": ({"attention_backend": "fa4", "device": "cuda"}, ["'fa4'", "no tree was ever run"]),
    "other decode backend": ({"decode_attention_backend": "torch_native"}, ["decode", "'torch_native'"]),
    "other prefill backend": ({"prefill_attention_backend": "torch_native"}, ["prefill", "'torch_native'"]),
    "relaxed acceptance": ({"speculative_accept_threshold_single": 0.5}, ["must stay 1.0", "0.5"]),
    "disaggregation": ({"disaggregation_mode": "decode"}, ["--disaggregation-mode"]),
    "hierarchical cache": ({"enable_hierarchical_cache": True}, ["--enable-hierarchical-cache"]),
    "fractional top-k cap": ({"speculative_ddtree_topk_cap": 2.5}, ["--speculative-ddtree-topk-cap", "2.5"]),
    "verify width instead of block": (
        {"speculative_num_draft_tokens": 65},
        ["65", "--speculative-dflash-block-size", "--speculative-ddtree-budget"],
    ),
    "no draft model": ({"speculative_draft_model_path": None}, ["--speculative-draft-model-path"]),
    "block of one": ({"speculative_dflash_block_size": 1}, ["at least 2 tokens"]),
    "hybrid model with pages": (
        {"model_path": "HYBRID", "disable_radix_cache": True, "page_size": 16},
        ["Qwen3NextForCausalLM", "--speculative-ddtree-allow-hybrid-unsafe"],
    ),
}

ACCEPTED: dict[str, dict[str, Any]] = {
    "pages": {"page_size": 64, "speculative_ddtree_budget": 64},
    "small budget": {"speculative_ddtree_budget": 3},
    "numbers as text": {"speculative_ddtree_budget": " 16 ", "speculative_ddtree_topk_cap": "4"},
    "block size given": {"speculative_dflash_block_size": 8, "speculative_ddtree_budget": 16},
    "both widths given": {
        "speculative_dflash_block_size": 8,
        "speculative_num_draft_tokens": 65,
        "speculative_ddtree_budget": 64,
    },
    "fa3 and flashinfer, a budget given": {
        "prefill_attention_backend": "fa3",
        "decode_attention_backend": "flashinfer",
        "device": "cuda",
        "speculative_ddtree_budget": 64,
    },
}

#: Arguments beside a plain DDTREE start, without a budget, with which `auto` cannot be served -> why, in the log.
FIXED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "fa3 and flashinfer": (
        {"prefill_attention_backend": "fa3", "decode_attention_backend": "flashinfer", "device": "cuda"},
        ["one budget only", "attention backend fa3", "auto use --attention-backend triton"],
    ),
    "hybrid model": (
        {"model_path": "HYBRID", "disable_radix_cache": True},
        ["one budget only", "recurrent layers", "auto is refused"],
    ),
    "hybrid model, accepted": (
        {
            "model_path": "HYBRID",
            "disable_radix_cache": True,
            "page_size": 16,
            "speculative_ddtree_allow_hybrid_unsafe": True,
        },
        ["one budget only", "recurrent layers", "auto is refused"],
    ),
}

DEFAULT = [0, 2, 4, 7, 15, 24, 31, 63]

#: Arguments beside a plain DDTREE start -> the budgets that the server reports.
LANES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "nothing": ({}, DEFAULT),
    "no budget": ({"speculative_ddtree_budget": None}, DEFAULT),
    "no backend given": ({"attention_backend": None, "device": "cuda"}, DEFAULT),
    "lower case": ({"speculative_algorithm": "ddtree"}, DEFAULT),
    "a list of exponents": ({"speculative_ddtree_calibration": [1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7]}, DEFAULT),
    "off, as YAML reads it": ({"speculative_ddtree_calibration": False}, DEFAULT),
    "one exponent": ({"speculative_ddtree_calibration": 1.3}, DEFAULT),
    "just room": ({"max_total_tokens": 64}, DEFAULT),
    "a list alone": ({"speculative_ddtree_budgets": "4,40"}, [4, 40]),
    "a list alone, of little": ({"speculative_ddtree_budgets": "4,40", "max_total_tokens": 41}, [4, 40]),
    "auto": ({"speculative_ddtree_budget": "auto"}, DEFAULT),
    "auto among some": ({"speculative_ddtree_budget": "auto", "speculative_ddtree_budgets": "16, 4,4"}, [4, 16]),
    "auto as it is written": ({"speculative_ddtree_budget": "Auto", "speculative_ddtree_budgets": ["4", 9]}, [4, 9]),
    "one that drafts nothing": ({"speculative_ddtree_budget": "auto", "speculative_ddtree_budgets": "8,0"}, [0, 8]),
    "one and others": ({"speculative_ddtree_budget": 16, "speculative_ddtree_budgets": [7, 40]}, [7, 16, 40]),
}

#: What is proven on the first worker only -> what the others say.
FIRST_WORKER_ONLY = {
    "fa3 and flashinfer": "'fa3'",
    "fa3 and flashinfer, a budget given": "'fa3'",
    "hybrid model": "in this release not in a whole engine",
}


def queue(engines: Engines, sites: Sites) -> None:
    """All cases, resolved in one process of each patched SGLang."""
    folder = engines.folder
    hybrid = folder / "hybrid"
    hybrid.mkdir()
    (hybrid / "config.json").write_text(json.dumps(HYBRID_CONFIG))

    def arguments(extra: dict[str, Any]) -> dict[str, Any]:
        merged = harness.engine_args("DDTREE") | extra
        return merged | ({"model_path": str(hybrid)} if merged["model_path"] == "HYBRID" else {})

    cases = {name: {"arguments": arguments(extra)} for name, (extra, _) in REFUSALS.items()}
    cases |= {name: {"arguments": arguments(extra)} for name, extra in ACCEPTED.items()}
    # Twice: the first results are no wish for a budget that the second has to keep to, but they stay what they are.
    cases |= {name: {"arguments": arguments(extra), "again": {}} for name, (extra, _) in (LANES | FIXED).items()}
    cases["resolved twice"] = {"arguments": arguments({"speculative_ddtree_budget": 16}), "again": {}}
    cases["resolved with another budget"] = {
        "arguments": arguments({"speculative_ddtree_budget": 16}),
        "again": {"speculative_ddtree_budget": 30},
    }
    (folder / "cases.json").write_text(json.dumps(cases))
    for version in SUPPORTED_RELEASES:
        Release(engines, sites, version, ahead=False).script(version, "start_up.py", str(folder / "cases.json"))


@pytest.fixture(scope="module", params=SUPPORTED_RELEASES)
def resolved(request: pytest.FixtureRequest, engines: Engines) -> dict[str, Any]:
    """What a release makes of all cases."""
    return engines[request.param] | {"version": request.param}


@pytest.mark.parametrize("name", REFUSALS)
def test_start_up_refuses(resolved: dict[str, Any], name: str) -> None:
    """Each bad argument ends the start with an error that names the flag, the reason and the limit."""
    error = resolved["cases"][name].get("error", "no error")
    assert error.startswith("ValueError: ")
    for part in REFUSALS[name][1]:
        assert part in error


def test_hybrid_model_with_pages_is_refused_for_its_pages(resolved: dict[str, Any]) -> None:
    """Where a hybrid model is served, the refusal says what of this one is not."""
    said = "--page-size 16" if resolved["version"] in harness.FIRST_WORKER else FIRST_WORKER_ONLY["hybrid model"]
    assert said in resolved["cases"]["hybrid model with pages"]["error"]


@pytest.mark.parametrize("name", ACCEPTED)
def test_start_up_sets_both_widths(resolved: dict[str, Any], name: str) -> None:
    """The verify width is budget + 1, the draft width stays the block, and a backend that verifies trees is used."""
    if name in FIRST_WORKER_ONLY and resolved["version"] not in harness.FIRST_WORKER:
        assert FIRST_WORKER_ONLY[name] in resolved["cases"][name]["error"]
        return
    assert resolved["cases"][name] == of_one_budget(int(ACCEPTED[name]["speculative_ddtree_budget"]))


def of_one_budget(budget: int) -> dict[str, Any]:
    """What a start makes of a fixed budget."""
    return {
        "speculative_algorithm": "DDTREE",
        "speculative_num_draft_tokens": budget + 1,
        "speculative_dflash_block_size": 8,
        "attention_backend": "triton",
        "speculative_ddtree_budget": budget,
        "speculative_ddtree_budgets": None,
        "budget told of": [],
    }


@pytest.mark.parametrize("name", FIXED)
def test_where_auto_cannot_be_served_a_fixed_budget_is_and_the_log_says_why(
    resolved: dict[str, Any], name: str
) -> None:
    """Once, with the way to either; the second time the budget is there."""
    found = resolved["cases"][name]
    if name in FIRST_WORKER_ONLY and resolved["version"] not in harness.FIRST_WORKER:
        assert FIRST_WORKER_ONLY[name] in found["error"]
        return
    (line,) = found.pop("budget told of")
    assert found | {"budget told of": []} == of_one_budget(64)
    for part in ["using 64 instead of auto", "--speculative-ddtree-budget N", *FIXED[name][1]]:
        assert part in line


@pytest.mark.parametrize("name", LANES)
def test_start_up_reports_every_budget_that_it_can_verify(resolved: dict[str, Any], name: str) -> None:
    """The largest is the width that everything is sized by; resolving again changes nothing."""
    case, budgets = resolved["cases"][name], LANES[name][1]
    assert case["speculative_ddtree_budgets"] == budgets
    assert case["speculative_num_draft_tokens"] == budgets[-1] + 1
    fixed = LANES[name][0].get("speculative_ddtree_budget")
    assert case["speculative_ddtree_budget"] == (fixed if isinstance(fixed, int) else "auto")
    assert case["attention_backend"] == "triton" and case["budget told of"] == []


@pytest.mark.parametrize(("name", "width"), [("resolved twice", 17), ("resolved with another budget", 31)])
def test_resolved_arguments_can_be_resolved_again(resolved: dict[str, Any], name: str, width: int) -> None:
    """`dataclasses.replace` runs the handlers on their own results, with a changed budget or without."""
    assert resolved["cases"][name]["speculative_num_draft_tokens"] == width
    assert resolved["cases"][name]["speculative_dflash_block_size"] == 8


def test_command_line_has_the_flags(resolved: dict[str, Any]) -> None:
    """The spellings parse into the fields."""
    assert resolved["command_line"] == {
        "speculative_algorithm": "DDTREE",
        "speculative_ddtree_budget": 9,
        "speculative_ddtree_budgets": "4,9",
        "speculative_ddtree_calibration": "1.3",
        "speculative_ddtree_topk_cap": 4,
        "speculative_ddtree_chain_seed": True,
        "speculative_ddtree_allow_hybrid_unsafe": True,
    }


def test_a_server_reports_the_overlay_that_it_has_loaded(resolved: dict[str, Any]) -> None:
    """The id is in the fields that `/server_info` answers with, survives pickling, has no flag, and cannot be set."""
    reported = resolved["reported"]
    assert reported["answers"] == [reported["id"]] * 3
    assert not reported["flag"]


def test_a_drafter_that_may_lose_its_weights_is_told_of(resolved: dict[str, Any]) -> None:
    """sglang#31674: no request fails and no text is wrong, so that nobody would notice."""
    told = resolved["told"]

    assert told["nothing"] == [None]
    assert len(told["of released weights"]) == 2
    assert "--enable-weights-cpu-backup" in told["of released weights"][1]


def test_ddtree_is_a_member_of_its_own(resolved: dict[str, Any]) -> None:
    """DDTREE is a DFLASH to every predicate that asks, and no other algorithm is DDTREE."""
    assert resolved["registry"] == {
        "name": "DDTREE",
        "is_ddtree": True,
        "is_dflash": True,
        "dflash_is_ddtree": False,
        "is_eagle": False,
        "others": ["DDTREE"],
    }


def test_the_worker_rehearses_no_step_of_dflash(resolved: dict[str, Any]) -> None:
    """The sampled verify of SGLang 0.5.20 and later needs gigabytes for a batch, at a start that never runs it."""
    assert resolved["rehearsal"] == (None if resolved["version"] in harness.FIRST_WORKER else [])
