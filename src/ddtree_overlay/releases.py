# SPDX-License-Identifier: Apache-2.0
"""The release table: which edits make DDTREE out of which SGLang. A new release is a new row."""

from __future__ import annotations

from dataclasses import dataclass

from ddtree_overlay.edits.base import Edit
from ddtree_overlay.edits.dflash_info import DFLASH_INFO
from ddtree_overlay.edits.dflash_model import DFLASH_MODEL
from ddtree_overlay.edits.dflash_utils import DFLASH_UTILS
from ddtree_overlay.edits.dflash_worker import DFLASH_WORKER
from ddtree_overlay.edits.flashattention_backend import FLASHATTENTION_BACKEND
from ddtree_overlay.edits.flashinfer_backend import FLASHINFER_BACKEND
from ddtree_overlay.edits.hybrid_linear_attn_backend import HYBRID_LINEAR_ATTN_BACKEND
from ddtree_overlay.edits.kv_cache_mixin import KV_CACHE_MIXIN, KV_CACHE_MIXIN_COUNTED
from ddtree_overlay.edits.model_runner import MODEL_RUNNER
from ddtree_overlay.edits.schedule_batch import SCHEDULE_BATCH
from ddtree_overlay.edits.server_args import SERVER_ARGS, SERVER_ARGS_WITHOUT_HANDLING
from ddtree_overlay.edits.spec_info import SPEC_INFO
from ddtree_overlay.edits.speculative_hook import SPECULATIVE_HOOK
from ddtree_overlay.edits.tokenizer_manager import TOKENIZER_MANAGER
from ddtree_overlay.edits.triton_backend import TRITON_BACKEND
from ddtree_overlay.errors import OverlayError


@dataclass(frozen=True, slots=True)
class Release:
    """One supported SGLang.

    Args:
        version: As pip spells it.
        edits: In the order of the review patches.
        sites: Name of the table in `sites/` that classifies every DFLASH site of the release.
        variant: Folder below `overlay/variants/` with the modules that know this release's own names.
    """

    version: str
    edits: tuple[Edit, ...]
    sites: str
    variant: str

    def edit(self, path: str) -> Edit | None:
        """The edit of the file at `path`, or None."""
        return next((e for e in self.edits if e.path == path), None)


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
    DFLASH_INFO,
)

RELEASES = (
    Release("0.5.11", _FIRST, sites="0.5.11", variant="0.5.11"),
    Release("0.5.12", _FIRST, sites="0.5.12", variant="0.5.12"),
    Release("0.5.12.post1", _FIRST, sites="0.5.12", variant="0.5.12"),
    Release("0.5.13", _FIRST_13, sites="0.5.13", variant="0.5.13"),
)


def release(version: str) -> Release:
    """The row of an SGLang version.

    Raises:
        OverlayError: The version is not supported.
    """
    for row in RELEASES:
        if row.version == version:
            return row
    supported = ", ".join(r.version for r in RELEASES)
    raise OverlayError(
        f"SGLang {version} is not supported",
        why=f"supported: {supported}",
        next_step=f"on the host: pip install sglang=={RELEASES[-1].version}; or here --release {RELEASES[-1].version}",
    )
