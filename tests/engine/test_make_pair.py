# SPDX-License-Identifier: Apache-2.0
"""benchmarks/make_pair.py: what it trains in a few steps is poor, but learns, and is a pair that an engine takes."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from tests.engine import harness


def test_a_pair_learns_and_drafts_in_the_engine(site: Path, tmp_path: Path) -> None:
    """The loss falls, DFLASH runs with the checkpoints, and the text is plain decoding's."""
    script, out = harness.PROJECT / "benchmarks/make_pair.py", tmp_path / "pair"
    source = harness.PROJECT / "src"
    command = [harness.ENGINE_PYTHON, script, out, "--source", source, "--steps", "120", "--size", "tiny"]
    done = subprocess.run([*command, "--batch", "2"], check=True, timeout=1500, capture_output=True, text=True)
    for name in ("target", "drafter"):
        losses = [float(text) for text in re.findall(rf"{name} .*loss ([0-9.]+)", done.stdout)]
        assert losses[-1] < losses[0], done.stdout
    prompts = json.loads((out / "prompts.json").read_text())
    assert [len(prompt) for prompt in prompts] == [320] * 64
    calls = [harness.greedy([prompts[0][:40], prompts[1][:7]], 12)]
    texts = []
    for algorithm in (None, "DFLASH"):
        drafting = {"speculative_draft_model_path": str(out / "draft")} if algorithm else {}
        args = harness.engine_args(algorithm, model_path=str(out / "target"), **drafting)
        result = harness.decode(site, args, calls, tmp_path / str(algorithm))
        texts.append(result["calls"][0]["output_ids"])
    assert texts[0] == texts[1]
