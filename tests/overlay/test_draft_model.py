# SPDX-License-Identifier: Apache-2.0
"""The drafter's rotary base under transformers 5."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.speculative.ddtree.draft_model import draft_rope
from tests.overlay.publishing import publish
from transformers import Qwen3Config


#: What SGLang 0.5.11 and 0.5.12 take where `config.rope_theta` is missing.
DEFAULT = 1_000_000.0


def rope_of(config: object, algorithm: str = "DDTREE") -> tuple[float, object]:
    """What the drafter gets when SGLang read its config as those releases do."""
    publish(SimpleNamespace(speculative_algorithm=algorithm))
    return draft_rope(config, float(getattr(config, "rope_theta", DEFAULT)), getattr(config, "rope_scaling", None))


def test_base_of_the_checkpoint_is_used() -> None:
    """`rope_parameters.rope_theta` counts, whatever attribute is missing (Rapid-MLX#1007: both shapes are read)."""
    config = Qwen3Config(rope_theta=10_000_000.0)
    theta, scaling = rope_of(config)
    assert theta == 10_000_000.0
    assert scaling is None or scaling["rope_type"] == "default"


def test_scaling_of_the_checkpoint_is_used() -> None:
    """A drafter for long contexts keeps its scaling."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 5e5}
    theta, scaling = rope_of(Qwen3Config(rope_parameters=yarn))
    assert theta == 5e5
    assert scaling["rope_type"] == "yarn"
    assert scaling["factor"] == 4.0


@pytest.mark.parametrize("config", [SimpleNamespace(rope_theta=5e5, rope_scaling=None), SimpleNamespace()])
def test_config_without_rope_parameters_is_read_as_before(config: object) -> None:
    """Older configs, and those that bring code of their own."""
    assert rope_of(config) == (getattr(config, "rope_theta", DEFAULT), None)


def test_other_algorithms_draft_as_before() -> None:
    """Without DDTREE nothing changes, right or wrong."""
    config = SimpleNamespace(rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    assert rope_of(config, "DFLASH") == (DEFAULT, None)
