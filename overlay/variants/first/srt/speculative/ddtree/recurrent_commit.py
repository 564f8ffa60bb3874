# SPDX-License-Identifier: Apache-2.0
"""How the first worker commits recurrent states."""

from __future__ import annotations

from typing import Any


def commit_recurrent_state(
    attn_backend: Any, *, last_nodes: Any, track_indices: Any, tracked_nodes: Any, model: Any
) -> None:
    """Keep the recurrent state of the last accepted node, and the one that the prefix cache tracks."""
    attn_backend.update_mamba_state_after_mtp_verify(
        accepted_steps=last_nodes,
        mamba_track_indices=track_indices,
        mamba_steps_to_track=tracked_nodes,
        model=model,
    )
