# SPDX-License-Identifier: Apache-2.0
"""Which requests of a batch have a custom logit processor. Most releases keep a mask of them beside each."""

from __future__ import annotations

from typing import Any

import torch


def processed(sampling_info: Any) -> torch.Tensor:
    """They, bool [bs].

    Args:
        sampling_info: Of a batch that has such a processor.
    """
    masks = [mask for _, mask in sampling_info.custom_logit_processor.values()]
    return torch.stack(masks).any(dim=0)
