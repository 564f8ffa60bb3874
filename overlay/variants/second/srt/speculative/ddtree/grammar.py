# SPDX-License-Identifier: Apache-2.0
"""Constrained decoding: SGLang refuses it for DFLASH, and so for DDTREE, in these releases."""

from __future__ import annotations

from typing import Any


def node_grammar(batch: Any, tree: Any) -> None:
    """No request of the batch has a grammar."""
