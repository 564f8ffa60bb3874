# SPDX-License-Identifier: Apache-2.0
"""DDTREE, as the pieces of `algorithm` register it."""

from __future__ import annotations

from ddtree_overlay.edits.algorithm import Algorithm


DDTREE = Algorithm("DDTREE", like="DFLASH", package="sglang.srt.speculative.ddtree")
