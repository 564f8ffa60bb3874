# SPDX-License-Identifier: Apache-2.0
"""What SGLang's DFlash drafter needs set right before a tree can be drafted with it."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.server_args import get_global_server_args
from sglang.srt.speculative.ddtree.args import DDTREE
from sglang.srt.utils.hf_transformers_utils import get_rope_config


logger = logging.getLogger(__name__)


def draft_rope(config: Any, theta: float, scaling: Any) -> tuple[float, Any]:
    """The rotary base and scaling of the drafter's config.

    transformers 5 keeps them in `rope_parameters`, where this release's drafter does not look: it takes its default
    base for any checkpoint, drafts at wrong positions, and acceptance falls without a word. For DFLASH nothing changes.

    Args:
        config: The drafter's Hugging Face config.
        theta: The base that SGLang would take.
        scaling: The scaling that SGLang would take.
    """
    if get_global_server_args().speculative_algorithm != DDTREE:
        return theta, scaling
    if getattr(config, "rope_parameters", None) is None:
        return theta, scaling
    own_theta, own_scaling = get_rope_config(config)
    if float(own_theta) != theta:
        logger.info("DDTREE: the drafter's rotary base is %s; without DDTREE it would be %s.", own_theta, theta)
    return float(own_theta), own_scaling
