# SPDX-License-Identifier: Apache-2.0
"""The drafter's rotary base in the real engine, where SGLang's own default is not the checkpoint's.

The pair's drafter was trained with the base that these releases fall back to. Here the fallback is moved in a copy of
SGLang, so that the checkpoint is one of another base than the default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engine import harness
from tests.engine.engines import Engines, Release, Sites


DRAFTER = "sglang/srt/models/dflash.py"
FALLBACK, MOVED = 'getattr(config, "rope_theta", 1000000)', 'getattr(config, "rope_theta", 10000)'
#: The overlay's edit with nothing behind it.
HANDLED, IGNORED = 'if getattr(config, "rope_parameters", None) is None:', "if True:"


def moved(site: Path, copy: Path) -> Path:
    """A patched SGLang whose drafter takes another base where it finds none."""
    harness.copied_site(site, copy)
    text = (copy / DRAFTER).read_text()
    assert text.count(FALLBACK) == 1
    (copy / DRAFTER).write_text(text.replace(FALLBACK, MOVED))
    return copy


def queue(engines: Engines, sites: Sites) -> None:
    """With the overlay's handling, and without it."""
    here = Release(engines, sites, harness.RELEASE, ahead=False)

    def handled() -> Path:
        return moved(here.site(), engines.folder / "handled-site")

    def ignored() -> Path:
        copy = moved(here.site(), engines.folder / "moved-site")
        return harness.broken_site(copy, engines.folder / "ignored-site", "draft_model.py", HANDLED, IGNORED)

    arguments = harness.engine_args("DDTREE", speculative_ddtree_budget=16)
    for name, site in (("handled", handled), ("ignored", ignored)):
        here.start(name, arguments, [harness.greedy(harness.prompts(*range(8)), 40)], site=site)


def accept_length(result: dict[str, Any]) -> float:
    """Tokens a verify step."""
    (call,) = result["calls"]
    return sum(map(len, call["output_ids"])) / sum(spec["spec_verify_ct"] for spec in call["spec"])


def test_drafter_turns_by_the_base_of_its_checkpoint(engines: Engines) -> None:
    """It accepts what the pair accepts, and says what it set right; ignored, acceptance falls and the text stays."""
    handled, ignored = engines["handled"], engines["ignored"]
    assert "DDTREE: the drafter's rotary base is 1000000.0; without DDTREE it would be 10000.0" in handled["log"]
    assert accept_length(handled) > 4
    assert accept_length(ignored) < 0.7 * accept_length(handled)
    assert handled["calls"][0]["output_ids"] == ignored["calls"][0]["output_ids"]
