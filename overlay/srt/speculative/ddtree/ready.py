# SPDX-License-Identifier: Apache-2.0
"""What the log says once a worker is set up."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.distributed import get_tp_group
from sglang.srt.speculative.ddtree.published import spec


if TYPE_CHECKING:
    from sglang.srt.speculative.ddtree.lanes import Lanes

logger = logging.getLogger(__name__)


def log_ready(worker: Any, lanes: Lanes) -> None:
    """One line of the first tensor-parallel rank: how trees are drafted and verified here."""
    if get_tp_group().rank_in_group == 0:
        logger.info(
            "DDTREE ready. block size %d (%d draft positions), budget %s of %s, top-k cap %s, "
            "chain seed %s, attention backend %s",
            worker.block_size,
            worker.block_size - 1,
            spec().speculative_ddtree_budget,
            ", ".join(str(width - 1) for width in lanes.widths),
            worker.topk_cap,
            "on" if worker.chain_seed else "off",
            type(worker.model_runner.attn_backend).__name__,
        )
