# SPDX-License-Identifier: Apache-2.0
"""srt/server_args.py in the releases of the second worker, which derive flags from annotated fields."""

from __future__ import annotations

import re
from dataclasses import replace

from ddtree_overlay.edits.algorithm import register_gate, register_start
from ddtree_overlay.edits.anchors import After, Before
from ddtree_overlay.edits.base import Edit, Example
from ddtree_overlay.edits.ddtree import DDTREE
from ddtree_overlay.edits.server_args import FIELDS, FLAGS, REPORT_OVERLAY, SERVER_ARGS


#: What a field needs to be shown by `get_spec()`.
FIELDS_PUBLISHED = replace(
    FIELDS,
    code=re.sub(r": (.+) = ", r': A[\1, NS("spec")] = ', FIELDS.code),
    reason="`ServerArgs.from_cli_args` copies every field from the flag of the same name, `get_spec()` shows those of "
    "its namespace, and `/server_info` answers with every field.",
)

#: Before anything else, so that no default of a model or a GPU is taken for the user's choice.
BEGIN = register_start(
    DDTREE,
    "args:begin_arguments",
    scope=REPORT_OVERLAY.scope,
    anchor=REPORT_OVERLAY.anchor,
    reason="The server reports the overlay it has loaded, and DDTREE chooses its backend before the model's default.",
)

#: Ours are registered by hand: one text of help for every release.
FLAGS_DERIVED = FLAGS.moved(After("add_cli_args_from_dataclass(parser, ServerArgs)"))

LARGEST_WIDTH = register_gate(
    DDTREE,
    "args:largest_width",
    scope="ServerArgs.max_speculative_num_draft_tokens",
    anchor=Before("if not self.speculative_adaptive: ..."),
    statement="return {function}(self)",
    reason="Rows, reserves and buffers are sized by this; a step writes a draft block or a tree, whichever is wider.",
)

_BEFORE = """\
class ServerArgs:
    speculative_dflash_block_size: A[
        Optional[int],
        "DFLASH only. Block size.",
    ] = None
    speculative_accept_threshold_single: A[float, "Accept."] = 1.0

    def __post_init__(self):
        'Complete the arguments.'

        self._resolved_overrides = []

    @staticmethod
    def add_cli_args(parser):

        # Auto-derived.
        add_cli_args_from_dataclass(parser, ServerArgs)

        parser.add_argument("--reasoning-parser")

    @cached_property
    def max_speculative_num_draft_tokens(self):
        if self.speculative_num_draft_tokens is None:
            return None
        if not self.speculative_adaptive:
            return self.speculative_num_draft_tokens
        return 8
"""

_AFTER = """\
class ServerArgs:
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
    speculative_accept_threshold_single: A[float, "Accept."] = 1.0

    def __post_init__(self):
        'Complete the arguments.'

        from sglang.srt.speculative.ddtree.args import begin_arguments

        begin_arguments(self)

        self._resolved_overrides = []

    @staticmethod
    def add_cli_args(parser):

        # Auto-derived.
        add_cli_args_from_dataclass(parser, ServerArgs)
        from sglang.srt.speculative.ddtree.flags import add_ddtree_cli_args

        add_ddtree_cli_args(parser)

        parser.add_argument("--reasoning-parser")

    @cached_property
    def max_speculative_num_draft_tokens(self):
        if self.speculative_num_draft_tokens is None:
            return None
        if self.speculative_algorithm == "DDTREE":
            from sglang.srt.speculative.ddtree.args import largest_width

            return largest_width(self)
        if not self.speculative_adaptive:
            return self.speculative_num_draft_tokens
        return 8
"""

_SUMMARY = "Add the DDTREE fields and flags, choose a backend that can verify a tree, and size memory for both widths."

#: 0.5.14 to 0.5.16.
SERVER_ARGS_DERIVED = Edit(
    path=SERVER_ARGS.path,
    summary=_SUMMARY,
    insertions=(FIELDS, BEGIN, FLAGS_DERIVED, LARGEST_WIDTH),
    examples=(Example(_BEFORE, _AFTER),),
)

#: 0.5.17 and 0.5.18.
SERVER_ARGS_PUBLISHED = Edit(
    path=SERVER_ARGS.path,
    summary=_SUMMARY,
    insertions=(FIELDS_PUBLISHED, BEGIN, FLAGS_DERIVED, LARGEST_WIDTH),
    examples=(
        Example(
            _BEFORE, _AFTER.replace(FIELDS.code.replace("\n", "\n    "), FIELDS_PUBLISHED.code.replace("\n", "\n    "))
        ),
    ),
)

#: 0.5.19: arguments are completed by `arg_groups/pipeline.py`, and widths are sized by the algorithm.
SERVER_ARGS_RAW = Edit(
    path=SERVER_ARGS.path,
    summary="Add the DDTREE fields and flags.",
    insertions=(FIELDS_PUBLISHED, FLAGS_DERIVED),
    examples=(
        Example(
            before="""\
class ServerArgs:
    speculative_dflash_block_size: A[Optional[int], "Block size.", NS("spec")] = None

    @staticmethod
    def add_cli_args(parser):
        add_cli_args_from_dataclass(parser, ServerArgs)
""",
            after="""\
class ServerArgs:
    speculative_dflash_block_size: A[Optional[int], "Block size.", NS("spec")] = None
    speculative_ddtree_budget: A[int | str | None, NS("spec")] = None
    speculative_ddtree_budgets: A[str | list[int] | None, NS("spec")] = None
    speculative_ddtree_topk_cap: A[Optional[int], NS("spec")] = None
    speculative_ddtree_chain_seed: A[bool, NS("spec")] = False
    speculative_ddtree_calibration: A[str, NS("spec")] = "auto"
    speculative_ddtree_allow_hybrid_unsafe: A[bool, NS("spec")] = False
    speculative_ddtree_overlay_id: A[Optional[str], NS("spec")] = None

    @staticmethod
    def add_cli_args(parser):
        add_cli_args_from_dataclass(parser, ServerArgs)
        from sglang.srt.speculative.ddtree.flags import add_ddtree_cli_args

        add_ddtree_cli_args(parser)
""",
        ),
    ),
)

#: 0.5.20 and later: the fields stand in `arg_groups/fields/spec.py`.
SERVER_ARGS_FLAGS = Edit(
    path=SERVER_ARGS.path,
    summary="Add the DDTREE flags.",
    insertions=(FLAGS_DERIVED,),
    examples=(
        Example(
            before="""\
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):

        # Auto-derived.
        add_cli_args_from_dataclass(parser, ServerArgs)

        parser.add_argument("--reasoning-parser")
""",
            after="""\
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):

        # Auto-derived.
        add_cli_args_from_dataclass(parser, ServerArgs)
        from sglang.srt.speculative.ddtree.flags import add_ddtree_cli_args

        add_ddtree_cli_args(parser)

        parser.add_argument("--reasoning-parser")
""",
        ),
    ),
)
