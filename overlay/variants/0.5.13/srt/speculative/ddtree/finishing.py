# SPDX-License-Identifier: Apache-2.0
"""When a request is finished."""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def finish_if_due(req: Req) -> None:
    """Let the request look at its newest token: stop, length, end."""
    req.update_finish_state()
