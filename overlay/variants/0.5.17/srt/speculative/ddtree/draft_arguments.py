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
    view.override("ddtree.draft", speculative_num_draft_tokens=draft_width(), speculative_eagle_topk=1)
    vars(view).pop("max_speculative_num_draft_tokens", None)  # the largest width, if it has been asked for
    return view
