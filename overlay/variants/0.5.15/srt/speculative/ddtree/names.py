# SPDX-License-Identifier: Apache-2.0
"""What this SGLang release calls the things that every release of the second worker has. One variant a release."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.environ import envs
from sglang.srt.speculative.ddtree.args import draft_view
from sglang.srt.speculative.ddtree.tree_mask import mask_columns


if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2


def replaces_nan(sampler: Any) -> bool:  # noqa: ARG001
    """Whether plain decoding replaces NaN logits before it chooses a token."""
    return bool(envs.SGLANG_SANITIZE_NAN_LOGITS.get())


def draw(sampler: Any, probs: Any, sampling_info: Any, positions: Any, simple: bool) -> Any:
    """One token per row of probabilities, as plain decoding draws it."""
    return sampler._sample_from_probs(probs, sampling_info, positions, simple)


def is_recurrent(model_runner: Any) -> bool:
    """Whether the model has layers that keep a recurrent state."""
    return model_runner.mambaish_config is not None


def draft_arguments(server_args: ServerArgs) -> ServerArgs:
    """The arguments that the draft worker is built from."""
    return draft_view(server_args)


def draft_scope() -> AbstractContextManager[Any]:
    """Where the draft is built, with its backends and graphs: they read its own arguments."""
    return nullcontext()


def next_draft_input(
    worker: DFlashWorkerV2,
    draft_input: DFlashDraftInputV2,  # noqa: ARG001
    bonus: torch.Tensor,
    new_seq_lens: torch.Tensor,
) -> DFlashDraftInputV2:
    """The batch's draft state after a step."""
    return worker._make_next_draft_input_decode(bonus_tokens=bonus, new_seq_lens=new_seq_lens)


def reserved_lens(draft_input: DFlashDraftInputV2) -> tuple[torch.Tensor, int]:
    """The positions that the scheduler has reserved of each request, on the host, and their sum."""
    return draft_input.reserved_seq_lens_cpu, int(draft_input.reserved_seq_lens_sum)


def mask_buffer(attn_backend: Any, batch_size: int) -> torch.Tensor | None:
    """The backend's own mask buffer, which CUDA graphs read, or None when it has none for that many requests."""
    backend = getattr(attn_backend, "full_attn_backend", attn_backend)
    mask = getattr(backend, "cuda_graph_custom_mask", None)
    if mask is None:
        return None
    fits = mask.numel() // (backend.num_draft_tokens * mask_columns(backend))
    return mask if batch_size <= fits else None


def plan_fields(target_worker: Any, batch: Any, lens: Any, slots: Any) -> dict[str, Any]:  # noqa: ARG001
    """Further fields of a verify input; this release has none."""
    return {}


def add_logprobs(batch: Any, logits_output: Any, tokens: Any, rows: Any, block_size: int) -> None:
    """Log-probabilities of the emitted tokens; this release refuses to report them for DFLASH."""
