# SPDX-License-Identifier: Apache-2.0
"""New weights while serving are the target's: the drafter keeps the checkpoint that it was loaded from.

SGLang hands a weight update on to the draft of every algorithm. For EAGLE that is a head of the target's checkpoint. A
DFlash drafter has layers of the same names and often the same shapes as the target's first ones: from 0.5.21 on they
would be overwritten, and nothing would be accepted any more, without a word. In 0.5.16 to 0.5.20 the hand-over ends the
server, and in 0.5.14 and 0.5.15 the target is loaded a second time.

From 0.5.21 on an update may name the drafter. That is refused: draft KV is made with a copy of the drafter's weights
that SGLang stacks at a start and does not renew, and would fit the new layers no more.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.distributed import get_tp_group


logger = logging.getLogger(__name__)

_KEPT = "DDTREE: weights that are updated or checked are the target's alone; the drafter keeps those of its start."
_REFUSED = (
    "DDTREE does not load weights into the drafter while it serves, so that no weight was changed: its KV is made with "
    'copies of them. Update the target (selector "target" or "all"), or restart the server to change the drafter.'
)


class DrafterWeights:
    """What SGLang asks a speculative worker for behind the target's own update, up to 0.5.20."""

    def update_weights_from_disk(self, recv_req: Any) -> tuple[bool, str]:
        """Nothing of a target's checkpoint is the drafter's."""
        _tell()
        return True, "Succeeded to update model weights."

    def update_weights_from_ipc(self, recv_req: Any) -> tuple[bool, str]:
        """As from the disk."""
        return self.update_weights_from_disk(recv_req)


class KeptDrafter:
    """The drafter in a runner's place: it can be checked, and refuses to be loaded.

    Args:
        runner: The drafter's own.
    """

    def __init__(self, runner: Any) -> None:
        self._model_runner, self.weight_updater = runner, self

    def check_weights(self, **given: Any) -> Any:
        """The drafter's own answer."""
        return self._model_runner.check_weights(**given)

    def update_weights_from_tensor(self, **_: Any) -> tuple[bool, str]:
        """Load nothing."""
        return False, refusal()

    def load_weights_from_distributed(self, _: Any) -> tuple[bool, str]:
        """Load nothing of what every rank has received by now."""
        return False, refusal()


def runners_of(manager: Any, selector: str) -> list[tuple[str, Any]]:
    """The runners that a weight update or check is of, by role (0.5.21 and later).

    Args:
        manager: SGLang's, which asks once for a check, once to open a session of updates, and once for each part.
        selector: `target`, `draft`, or `all`, which is the target alone here.
    """
    if selector == "draft":
        return [("draft", KeptDrafter(manager.draft_worker.draft_model_runner))]
    if selector == "all" and manager._session is None:
        _tell()
    runners: list[tuple[str, Any]] = manager.tp_worker.weight_update_runners()
    return runners


def refusal() -> str:
    """What an update that names the drafter is answered."""
    return _REFUSED


def _tell() -> None:
    if get_tp_group().rank_in_group == 0:
        logger.info(_KEPT)
