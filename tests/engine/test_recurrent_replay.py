# SPDX-License-Identifier: Apache-2.0
"""Which rows of a replayed verify keep their recurrent state, in every release that counts padding by lengths."""

from __future__ import annotations

import pytest
from tests.engine.engines import Engines, Release, Sites

from ddtree_overlay.releases import RELEASES


#: From 0.5.14 on SGLang brings the number of padding rows along instead of counting.
COUNTING = [row.version for row in RELEASES if row.edit("srt/layers/attention/hybrid_linear_attn_backend.py")]


def queue(engines: Engines, sites: Sites) -> None:
    """What each of them plans."""
    for version in COUNTING:
        Release(engines, sites, version, ahead=False).script(version, "recurrent_replay.py")


@pytest.mark.parametrize("release", COUNTING)
def test_a_request_of_one_token_costs_nobody_their_state(engines: Engines, release: str) -> None:
    """Three requests in a graph of four rows, the first of one token: the last row alone is padding.

    SGLang counts rows of length 1 as padding, and takes the state from the last request instead; DFLASH is mended too.
    """
    planned = {"states": [13, 11, 12, -1], "starts": [0, 3, 6, 9, 9]}
    assert engines[release] == {"DFLASH": planned, "DDTREE": planned}
