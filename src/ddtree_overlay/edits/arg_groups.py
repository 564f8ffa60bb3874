# SPDX-License-Identifier: Apache-2.0
"""Where releases from 0.5.19 on have what server_args.py had before: fields, completion and the published arguments."""

from __future__ import annotations

from dataclasses import replace

from ddtree_overlay.edits.anchors import After, Before
from ddtree_overlay.edits.base import Edit, Example
from ddtree_overlay.edits.server_args import FIELDS
from ddtree_overlay.edits.server_args_second import BEGIN, LARGEST_WIDTH


FIELDS_SPEC = Edit(
    path="srt/arg_groups/fields/spec.py",
    summary="Add the DDTREE fields.",
    insertions=(replace(FIELDS, scope="Spec"),),
    examples=(
        Example(
            before="""\
class Spec(msgspec.Struct):
    _NS_PATH = "spec"
    speculative_dflash_block_size: A[
        Optional[int],
        "DFLASH only. Block size.",
    ] = None
    speculative_adaptive: A[bool, "Adaptive."] = False
""",
            after="""\
class Spec(msgspec.Struct):
    _NS_PATH = "spec"
    speculative_dflash_block_size: A[
        Optional[int],
        "DFLASH only. Block size.",
    ] = None
    speculative_ddtree_budget: int | str | None = None
    speculative_ddtree_budgets: str | list[int] | None = None
    speculative_ddtree_topk_cap: Optional[int] = None
    speculative_ddtree_chain_seed: bool = False
    speculative_ddtree_calibration: str = "auto"
    speculative_ddtree_allow_hybrid_unsafe: bool = False
    speculative_ddtree_overlay_id: Optional[str] = None
    speculative_adaptive: A[bool, "Adaptive."] = False
""",
        ),
    ),
)

PIPELINE = Edit(
    path="srt/arg_groups/pipeline.py",
    summary="Report the overlay, and choose a backend that can verify a tree, before any argument is completed.",
    insertions=(
        BEGIN.moved(
            After("cfg = resolving_view(server_args)"),
            scope="run_resolution_pipeline",
            renamed={"self": "server_args"},
        ),
    ),
    examples=(
        Example(
            before="""\
def run_resolution_pipeline(server_args):
    server_args._resolved_overrides = list(getattr(server_args, "_resolved_overrides", ()))

    cfg = resolving_view(server_args)

    handle_mega_moe(server_args)
""",
            after="""\
def run_resolution_pipeline(server_args):
    server_args._resolved_overrides = list(getattr(server_args, "_resolved_overrides", ()))

    cfg = resolving_view(server_args)

    from sglang.srt.speculative.ddtree.args import begin_arguments

    begin_arguments(server_args)

    handle_mega_moe(server_args)
""",
        ),
    ),
)

RUNTIME_CONTEXT = Edit(
    path="srt/runtime_context.py",
    summary="Size memory for the wider of draft block and tree, where the published arguments are asked.",
    insertions=(
        LARGEST_WIDTH.moved(
            Before("if not spec.speculative_adaptive: ..."),
            scope="max_speculative_num_draft_tokens",
            renamed={"self": "spec"},
        ),
    ),
    examples=(
        Example(
            before="""\
def max_speculative_num_draft_tokens():
    spec = get_spec()
    if not spec.speculative_adaptive:
        return spec.speculative_num_draft_tokens
    return 8
""",
            after="""\
def max_speculative_num_draft_tokens():
    spec = get_spec()
    if spec.speculative_algorithm == "DDTREE":
        from sglang.srt.speculative.ddtree.args import largest_width

        return largest_width(spec)
    if not spec.speculative_adaptive:
        return spec.speculative_num_draft_tokens
    return 8
""",
        ),
    ),
)
