# SPDX-License-Identifier: Apache-2.0
"""Weight updates that ask SGLang to capture its CUDA graphs anew, which a tree's engine refuses.

SGLang would capture the target's graphs of one width, and the next step would put those of its lane in their place:
none of the new ones would ever be replayed, and nobody would be told.
"""

from __future__ import annotations

import functools
from typing import Any


MESSAGE = (
    "DDTREE cannot capture CUDA graphs anew while it serves, so that no weight was changed: SGLang captures those of "
    "one verify width alone. Weights are loaded into the tensors that the graphs read: update without "
    "recapture_cuda_graph, or restart the server."
)


def refuse_recapture(model_runner: Any) -> None:
    """Let updates from disk answer a wish for new graphs with a refusal, before they load anything.

    Args:
        model_runner: The target's; the drafter's is of the same class.
    """
    owner = type(getattr(model_runner, "weight_updater", model_runner))
    update = owner.update_weights_from_disk

    @functools.wraps(update)
    def without_recapture(self: Any, *args: Any, recapture_cuda_graph: bool = False, **given: Any) -> Any:
        return (False, MESSAGE) if recapture_cuda_graph else update(self, *args, **given)

    owner.update_weights_from_disk = without_recapture
