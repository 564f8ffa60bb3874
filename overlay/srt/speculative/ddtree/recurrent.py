# SPDX-License-Identifier: Apache-2.0
"""Which models have recurrent layers."""

from __future__ import annotations

from typing import Any


def is_recurrent(model_runner: Any) -> bool:
    """Whether the model has layers that keep a recurrent state."""
    return model_runner.mambaish_config is not None
