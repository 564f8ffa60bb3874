# SPDX-License-Identifier: Apache-2.0
"""Which rows of a replayed verify keep their recurrent state, in every release that counts padding by lengths."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.engine import harness

from ddtree_overlay.releases import RELEASES


#: From 0.5.14 on SGLang brings the number of padding rows along instead of counting.
COUNTING = [row.version for row in RELEASES if row.edit("srt/layers/attention/hybrid_linear_attn_backend.py")]


@pytest.mark.parametrize("release", COUNTING)
def test_a_request_of_one_token_costs_nobody_their_state(release: str, sites: dict[str, Path], tmp_path: Path) -> None:
    """Three requests in a graph of four rows, the first of one token: the last row alone is padding.

    SGLang counts rows of length 1 as padding, and takes the state from the last request instead; DFLASH is mended too.
    """
    results = tmp_path / "results.json"
    command = [harness.ENGINE_PYTHON, harness.PROJECT / "tests/engine/recurrent_replay.py", results]
    environment = harness.engine_environment(sites[release])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    planned = {"states": [13, 11, 12, -1], "starts": [0, 3, 6, 9, 9]}
    assert json.loads(results.read_text()) == {"DFLASH": planned, "DDTREE": planned}
