# SPDX-License-Identifier: Apache-2.0
"""Which models have recurrent layers."""

from __future__ import annotations

from typing import Any

from sglang.srt.configs.hybrid_arch import mambaish_config


def is_recurrent(model_runner: Any) -> bool:
    """Whether the model has layers that keep a recurrent state."""
    return mambaish_config(model_runner.model_config) is not None
