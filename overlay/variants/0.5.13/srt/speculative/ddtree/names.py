# SPDX-License-Identifier: Apache-2.0
"""What this SGLang release calls the things that every release of the first worker has. One variant a release."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def finish_if_due(req: Req) -> None:
    """Let the request look at its newest token: stop, length, end."""
    req.update_finish_state()


def count_step(req: Req, accepted: int) -> None:
    """Count one verify step, and the draft tokens of it that the request kept."""
    req.spec_verify_ct += 1
    req.spec_num_correct_drafts += accepted
    req.update_spec_correct_drafts_histogram(accepted)


def replaces_nan(sampler: Any) -> bool:  # noqa: ARG001
    """Whether plain decoding replaces NaN logits before it chooses a token; this release never does."""
    return False


def draw(sampler: Any, probs: Any, sampling_info: Any, positions: Any, simple: bool) -> Any:
    """One token per row of probabilities, as plain decoding draws it."""
    return sampler._sample_from_probs(probs, sampling_info, positions, simple)


def is_recurrent(model_runner: Any) -> bool:
    """Whether the model has layers that keep a recurrent state."""
    return model_runner.mambaish_config is not None


def commit_recurrent_state(
    attn_backend: Any, *, last_nodes: Any, track_indices: Any, tracked_nodes: Any, model: Any
) -> None:
    """Keep the recurrent state of the last accepted node, and the one that the prefix cache tracks."""
    attn_backend.update_mamba_state_after_mtp_verify(
        last_correct_step_indices=last_nodes,
        mamba_track_indices=track_indices,
        mamba_steps_to_track=tracked_nodes,
        model=model,
    )
