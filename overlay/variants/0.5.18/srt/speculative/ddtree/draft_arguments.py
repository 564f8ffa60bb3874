# SPDX-License-Identifier: Apache-2.0
"""The arguments that the draft worker is built from."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from sglang.srt.speculative.ddtree.args import draft_width


if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def draft_arguments(server_args: ServerArgs) -> ServerArgs:
    """The arguments that the draft worker is built from."""
    view = copy.deepcopy(server_args)
    # Completed arguments refuse to be set; what is published of them is set by `draft_scope`.
    object.__setattr__(view, "speculative_num_draft_tokens", draft_width())
    object.__setattr__(view, "speculative_eagle_topk", 1)
    return view
