# SPDX-License-Identifier: Apache-2.0
"""Which requests of a batch have a custom logit processor. These releases keep their rows beside each."""

from __future__ import annotations

from typing import Any

import torch


def processed(sampling_info: Any) -> torch.Tensor:
    """They, bool [bs].

    Args:
        sampling_info: Of a batch that has such a processor.
    """
    found = torch.zeros(len(sampling_info), dtype=torch.bool, device=sampling_info.temperatures.device)
    for entry in sampling_info.custom_logit_processor.values():
        found.index_fill_(0, entry.indices, True)  # they lie on the device: nobody waits
    return found
