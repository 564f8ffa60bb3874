# SPDX-License-Identifier: Apache-2.0
"""New weights while serving are the target's: the drafter keeps the checkpoint that it was loaded from.

SGLang hands a weight update on to the draft of every algorithm. For EAGLE that is a head of the target's checkpoint. A
DFlash drafter has layers of the same names and often the same shapes as the target's first ones: they would be
overwritten, and nothing would be accepted any more, without a word. Up to 0.5.20 the hand-over ends the server instead.
"""

from __future__ import annotations

import logging
from typing import Any


logger = logging.getLogger(__name__)

_KEPT = "DDTREE: the target has new weights; the drafter keeps its own. Restart the server to change them."


class DrafterWeights:
    """What SGLang asks a speculative worker for behind the target's own update."""

    def update_weights_from_disk(self, recv_req: Any) -> tuple[bool, str]:
        """Nothing of a target's checkpoint is the drafter's."""
        logger.info(_KEPT)
        return True, "Succeeded to update model weights."

    def update_weights_from_ipc(self, recv_req: Any) -> tuple[bool, str]:
        """As from the disk."""
        return self.update_weights_from_disk(recv_req)

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        """The runners that an update is loaded into beside the target's (0.5.21 and later)."""
        logger.info(_KEPT)
        return []
