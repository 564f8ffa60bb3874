# SPDX-License-Identifier: Apache-2.0
"""The release table: which edits make DDTREE out of which SGLang. A new release is a new row."""

from __future__ import annotations

from dataclasses import dataclass

from ddtree_overlay.edits.allocation import ALLOCATION
from ddtree_overlay.edits.allocation_sizing import (
    ALLOCATION_SIZING,
    ALLOCATION_SIZING_COMMON,
    ALLOCATION_SIZING_PUBLISHED,
)
from ddtree_overlay.edits.arg_groups import FIELDS_SPEC, PIPELINE, RUNTIME_CONTEXT
from ddtree_overlay.edits.base import Edit
from ddtree_overlay.edits.dflash_info import DFLASH_INFO, DFLASH_INFO_PER_REQUEST
from ddtree_overlay.edits.dflash_info_v2 import DFLASH_INFO_V2
from ddtree_overlay.edits.dflash_model import DFLASH_MODEL
from ddtree_overlay.edits.dflash_utils import DFLASH_UTILS, DFLASH_UTILS_SECOND
from ddtree_overlay.edits.dflash_worker import DFLASH_WORKER
from ddtree_overlay.edits.dflash_worker_v2 import DFLASH_WORKER_V2, DFLASH_WORKER_V2_FIRST, DFLASH_WORKER_V2_PLAIN
from ddtree_overlay.edits.flashattention_backend import FLASHATTENTION_BACKEND
from ddtree_overlay.edits.flashinfer_backend import FLASHINFER_BACKEND
from ddtree_overlay.edits.graph_sizes import (
    BASE_CUDA_GRAPH_RUNNER,
    BASE_CUDA_GRAPH_RUNNER_PER_BS,
    CUDA_GRAPH_RUNNER,
)
from ddtree_overlay.edits.hybrid_linear_attn_backend import HYBRID_LINEAR_ATTN_BACKEND
from ddtree_overlay.edits.internal_state import INTERNAL_STATE, INTERNAL_STATE_APART
from ddtree_overlay.edits.kv_cache_configurator import KV_CACHE_CONFIGURATOR
from ddtree_overlay.edits.kv_cache_mixin import KV_CACHE_MIXIN, KV_CACHE_MIXIN_COUNTED, KV_CACHE_MIXIN_STATES
from ddtree_overlay.edits.model_runner import MODEL_RUNNER, MODEL_RUNNER_SECOND, MODEL_RUNNER_SHARED
from ddtree_overlay.edits.schedule_batch import FINISH_STATE, SCHEDULE_BATCH
from ddtree_overlay.edits.scheduler import SCHEDULER
from ddtree_overlay.edits.server_args import SERVER_ARGS, SERVER_ARGS_WITHOUT_HANDLING
from ddtree_overlay.edits.server_args_second import (
    SERVER_ARGS_DERIVED,
    SERVER_ARGS_FLAGS,
    SERVER_ARGS_PUBLISHED,
    SERVER_ARGS_RAW,
)
from ddtree_overlay.edits.spec_info import SPEC_INFO
from ddtree_overlay.edits.spec_info_second import SPEC_INFO_PER_BS, SPEC_INFO_PER_REQUEST, SPEC_INFO_SIZED
from ddtree_overlay.edits.spec_utils import SPEC_UTILS, SPEC_UTILS_PUBLISHED
from ddtree_overlay.edits.speculative_hook import SPECULATIVE_HOOK, SPECULATIVE_HOOK_DECLARED, SPECULATIVE_HOOK_SECOND
from ddtree_overlay.edits.tokenizer_manager import TOKENIZER_MANAGER, TOKENIZER_MANAGER_PUBLISHED
from ddtree_overlay.edits.tp_worker import TP_WORKER
from ddtree_overlay.edits.triton_backend import TRITON_BACKEND, TRITON_BACKEND_ROOMY
from ddtree_overlay.edits.weight_updater import WEIGHT_UPDATER
from ddtree_overlay.errors import OverlayError


@dataclass(frozen=True, slots=True)
class Release:
    """One supported SGLang.

    Args:
        version: As pip spells it.
        edits: In the order of the review patches.
        sites: Name of the table in `sites/` that classifies every DFLASH site of the release.
        variants: Folders below `overlay/variants/` with the modules that not every release has; of two modules at one
            path, that of the later folder counts. The worker's generation comes first, then every release of it, up to
            this one, that does something differently.
    """

    version: str
    edits: tuple[Edit, ...]
    sites: str
    variants: tuple[str, ...]

    def edit(self, path: str) -> Edit | None:
        """The edit of the file at `path`, or None."""
        return next((e for e in self.edits if e.path == path), None)


def _changed(edits: tuple[Edit, ...], others: dict[Edit, Edit]) -> tuple[Edit, ...]:
    """The same edits in the same order, with others in the place of some."""
    missing = [edit.path for edit in others if edit not in edits]
    assert not missing, missing
    return tuple(others.get(edit, edit) for edit in edits)


#: The first generation of DFLASH workers, without overlap scheduling: 0.5.11 to 0.5.13.
_FIRST = (
    SPEC_INFO,
    SERVER_ARGS,
    DFLASH_WORKER,
    TRITON_BACKEND,
    FLASHINFER_BACKEND,
    FLASHATTENTION_BACKEND,
    HYBRID_LINEAR_ATTN_BACKEND,
    DFLASH_UTILS,
    KV_CACHE_MIXIN,
    SCHEDULE_BATCH,
    TOKENIZER_MANAGER,
    MODEL_RUNNER,
    CUDA_GRAPH_RUNNER,
    DFLASH_MODEL,
    DFLASH_INFO,
)
_FIRST_13 = (
    SPEC_INFO,
    SERVER_ARGS_WITHOUT_HANDLING,
    SPECULATIVE_HOOK,
    DFLASH_WORKER,
    TRITON_BACKEND,
    FLASHINFER_BACKEND,
    FLASHATTENTION_BACKEND,
    HYBRID_LINEAR_ATTN_BACKEND,
    DFLASH_UTILS,
    KV_CACHE_MIXIN_COUNTED,
    SCHEDULE_BATCH,
    TOKENIZER_MANAGER,
    MODEL_RUNNER,
    CUDA_GRAPH_RUNNER,
    DFLASH_INFO,
)

#: The second generation, with overlap scheduling: how arguments are registered and sized, from 0.5.14 on.
_SECOND_14 = (
    SPEC_INFO_PER_BS,
    SERVER_ARGS_DERIVED,
    SPECULATIVE_HOOK_SECOND,
    SPEC_UTILS,
    MODEL_RUNNER_SECOND,
    KV_CACHE_MIXIN_STATES,
    TOKENIZER_MANAGER,
)
_SECOND_15 = _changed(_SECOND_14, {MODEL_RUNNER_SECOND: MODEL_RUNNER_SHARED})
_SECOND_16 = (
    SPEC_INFO_PER_REQUEST,
    SERVER_ARGS_DERIVED,
    SPECULATIVE_HOOK_SECOND,
    SPEC_UTILS,
    MODEL_RUNNER_SHARED,
    KV_CACHE_CONFIGURATOR,
    TOKENIZER_MANAGER,
)
_SECOND_17 = _changed(_SECOND_16, {SERVER_ARGS_DERIVED: SERVER_ARGS_PUBLISHED})
_SECOND_18 = (
    SPEC_INFO_PER_REQUEST,
    SERVER_ARGS_PUBLISHED,
    RUNTIME_CONTEXT,
    SPECULATIVE_HOOK_SECOND,
    SPEC_UTILS_PUBLISHED,
    MODEL_RUNNER_SHARED,
    KV_CACHE_CONFIGURATOR,
    TOKENIZER_MANAGER_PUBLISHED,
)
_SECOND_19 = (
    SPEC_INFO_SIZED,
    SERVER_ARGS_RAW,
    PIPELINE,
    SPECULATIVE_HOOK_DECLARED,
    SPEC_UTILS_PUBLISHED,
    MODEL_RUNNER_SHARED,
    KV_CACHE_CONFIGURATOR,
    TOKENIZER_MANAGER_PUBLISHED,
)
_SECOND_20 = (
    SPEC_INFO_SIZED,
    SERVER_ARGS_FLAGS,
    FIELDS_SPEC,
    PIPELINE,
    SPECULATIVE_HOOK_DECLARED,
    SPEC_UTILS_PUBLISHED,
    MODEL_RUNNER_SHARED,
    KV_CACHE_CONFIGURATOR,
    TOKENIZER_MANAGER_PUBLISHED,
)

#: How its worker runs.
_RUNTIME_14 = (
    DFLASH_WORKER_V2_FIRST,
    DFLASH_INFO_V2,
    DFLASH_INFO,
    DFLASH_UTILS_SECOND,
    TRITON_BACKEND,
    ALLOCATION_SIZING_COMMON,
    TP_WORKER,
    BASE_CUDA_GRAPH_RUNNER_PER_BS,
    FINISH_STATE,
)
_RUNTIME_15 = _changed(_RUNTIME_14, {DFLASH_WORKER_V2_FIRST: DFLASH_WORKER_V2_PLAIN})
_RUNTIME_16 = _changed(
    _RUNTIME_15,
    {
        DFLASH_INFO: DFLASH_INFO_PER_REQUEST,
        ALLOCATION_SIZING_COMMON: ALLOCATION_SIZING,
        BASE_CUDA_GRAPH_RUNNER_PER_BS: BASE_CUDA_GRAPH_RUNNER,
    },
)
_RUNTIME_17 = _changed(_RUNTIME_16, {DFLASH_WORKER_V2_PLAIN: DFLASH_WORKER_V2, TRITON_BACKEND: TRITON_BACKEND_ROOMY})
_RUNTIME_18 = _changed(_RUNTIME_17, {ALLOCATION_SIZING: ALLOCATION_SIZING_PUBLISHED})
_RUNTIME_21 = (*_RUNTIME_18, WEIGHT_UPDATER)

#: Whose modules lie over each other: a generation's first form, then each release that does something differently.
_LAID_11 = ("first",)
_LAID_12 = (*_LAID_11, "0.5.12")
_LAID_13 = (*_LAID_12, "0.5.13")
_LAID_14 = ("second",)
_LAID_15 = (*_LAID_14, "0.5.15")
_LAID_16 = (*_LAID_15, "0.5.16")
_LAID_17 = (*_LAID_16, "0.5.17")
_LAID_18 = (*_LAID_17, "0.5.18")
_LAID_19 = (*_LAID_18, "0.5.19")
_LAID_20 = (*_LAID_19, "0.5.20")
_LAID_21 = (*_LAID_20, "0.5.21")
_LAID_22 = (*_LAID_21, "0.5.22")

RELEASES = (
    Release("0.5.11", (*_FIRST, INTERNAL_STATE), sites="0.5.11", variants=_LAID_11),
    Release("0.5.12", (*_FIRST, INTERNAL_STATE), sites="0.5.12", variants=_LAID_12),
    Release("0.5.12.post1", (*_FIRST, INTERNAL_STATE), sites="0.5.12", variants=_LAID_12),
    Release("0.5.13", (*_FIRST_13, INTERNAL_STATE), sites="0.5.13", variants=_LAID_13),
    Release("0.5.14", (*_SECOND_14, *_RUNTIME_14, SCHEDULER), sites="0.5.14", variants=_LAID_14),
    Release("0.5.15", (*_SECOND_15, *_RUNTIME_15, INTERNAL_STATE), sites="0.5.15", variants=_LAID_15),
    Release("0.5.16", (*_SECOND_16, *_RUNTIME_16, ALLOCATION, INTERNAL_STATE), sites="0.5.16", variants=_LAID_16),
    Release("0.5.17", (*_SECOND_17, *_RUNTIME_17, ALLOCATION, INTERNAL_STATE), sites="0.5.17", variants=_LAID_17),
    Release("0.5.18", (*_SECOND_18, *_RUNTIME_18, ALLOCATION, INTERNAL_STATE), sites="0.5.18", variants=_LAID_18),
    Release("0.5.19", (*_SECOND_19, *_RUNTIME_18, INTERNAL_STATE), sites="0.5.19", variants=_LAID_19),
    Release("0.5.20", (*_SECOND_20, *_RUNTIME_18, INTERNAL_STATE), sites="0.5.20", variants=_LAID_20),
    Release("0.5.21", (*_SECOND_20, *_RUNTIME_21, INTERNAL_STATE), sites="0.5.21", variants=_LAID_21),
    Release("0.5.22", (*_SECOND_20, *_RUNTIME_21, INTERNAL_STATE_APART), sites="0.5.22", variants=_LAID_22),
    Release("0.5.23", (*_SECOND_20, *_RUNTIME_21, INTERNAL_STATE_APART), sites="0.5.23", variants=_LAID_22),
)

#: Releases whose edits fit, but whose runtime or sites are not complete: nothing is built for them.
PENDING: tuple[Release, ...] = ()

KNOWN = (*RELEASES, *PENDING)


def known(version: str) -> Release | None:
    """The row of an SGLang version, supported or pending."""
    return next((row for row in KNOWN if row.version == version), None)


def is_supported(version: str | None) -> bool:
    """Whether the table has a row for this version."""
    return any(row.version == version for row in RELEASES)


def release(version: str) -> Release:
    """The row of an SGLang version.

    Raises:
        OverlayError: The version is not supported.
    """
    for row in RELEASES:
        if row.version == version:
            return row
    refusal = unsupported(version)
    refusal.next_step += "\nddtree-overlay verify {target} --try  # shows what would fit"
    raise refusal


def unsupported(version: str) -> OverlayError:
    """The refusal of a version, with the one that was probably meant."""
    newest, meant = RELEASES[-1].version, version.strip().lstrip("vV=")
    asked = is_supported(meant) and meant != version
    return OverlayError(
        f"SGLang {version} is not supported{f' (did you mean {meant}?)' if asked else ''}",
        why=f"supported: {', '.join(r.version for r in RELEASES)}",
        next_step=f"--release {meant}"
        if asked
        else f"pip install sglang=={newest}  # on the host; or here: --release {newest}",
    )
