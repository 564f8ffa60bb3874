# SPDX-License-Identifier: Apache-2.0
"""srt/server_args.py: the DDTREE fields, flags, defaults and start-up checks."""

from __future__ import annotations

import re
from dataclasses import replace

from ddtree_overlay.edits.anchors import After, AtStart, Before
from ddtree_overlay.edits.base import Edit, Example, add_field, insert_statements


EXAMPLE = Example(
    before="""\
class ServerArgs:
    speculative_algorithm: Optional[str] = None
    speculative_dflash_block_size: Optional[int] = None
    speculative_accept_threshold_single: float = 1.0

    def __post_init__(self):
        'Complete the arguments.'

        self._handle_speculative_decoding()

    def _handle_attention_backend_compatibility(self):
        model_config = self.get_model_config()

    def _handle_speculative_decoding(self):
        if self.speculative_algorithm == "NEXTN":
            self.speculative_algorithm = "EAGLE"

        if self.speculative_algorithm == "DFLASH":
            self.speculative_eagle_topk = 1

        if self.speculative_algorithm == "NGRAM":
            pass

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--speculative-algorithm", choices=["DFLASH"])
        parser.add_argument(
            "--speculative-dflash-block-size",
            type=int,
        )
        parser.add_argument("--speculative-token-map")
""",
    after="""\
class ServerArgs:
    speculative_algorithm: Optional[str] = None
    speculative_dflash_block_size: Optional[int] = None
    speculative_ddtree_budget: int = 64
    speculative_ddtree_topk_cap: Optional[int] = None
    speculative_ddtree_chain_seed: bool = False
    speculative_ddtree_allow_hybrid_unsafe: bool = False
    speculative_ddtree_overlay_id: Optional[str] = None
    speculative_accept_threshold_single: float = 1.0

    def __post_init__(self):
        'Complete the arguments.'

        from sglang.srt.speculative.ddtree.args import report_overlay

        report_overlay(self)

        self._handle_speculative_decoding()

    def _handle_attention_backend_compatibility(self):
        if str(self.speculative_algorithm).upper() == "DDTREE":
            from sglang.srt.speculative.ddtree.args import choose_attention_backend

            choose_attention_backend(self)

        model_config = self.get_model_config()

    def _handle_speculative_decoding(self):
        if self.speculative_algorithm == "NEXTN":
            self.speculative_algorithm = "EAGLE"

        is_ddtree = self.speculative_algorithm == "DDTREE"
        if is_ddtree:
            from sglang.srt.speculative.ddtree.args import enter_dflash_handling

            enter_dflash_handling(self)

        if self.speculative_algorithm == "DFLASH":
            self.speculative_eagle_topk = 1

        if is_ddtree:
            from sglang.srt.speculative.ddtree.args import finish_dflash_handling

            finish_dflash_handling(self)

        if self.speculative_algorithm == "NGRAM":
            pass

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--speculative-algorithm", choices=["DFLASH"])
        parser.add_argument(
            "--speculative-dflash-block-size",
            type=int,
        )
        from sglang.srt.speculative.ddtree.args import add_ddtree_cli_args

        add_ddtree_cli_args(parser)
        parser.add_argument("--speculative-token-map")
""",
)

#: The fields and flags; the same place in every release of the first worker.
FIELDS = add_field(
    "ServerArgs",
    (
        "speculative_ddtree_budget: int = 64",
        "speculative_ddtree_topk_cap: Optional[int] = None",
        "speculative_ddtree_chain_seed: bool = False",
        "speculative_ddtree_allow_hybrid_unsafe: bool = False",
        "speculative_ddtree_overlay_id: Optional[str] = None",
    ),
    after="speculative_dflash_block_size",
    reason="`ServerArgs.from_cli_args` copies every dataclass field from the flag of the same name, and "
    "`/server_info` answers with every field.",
)

REPORT_OVERLAY = insert_statements(
    "ServerArgs.__post_init__",
    AtStart(),
    """\
from sglang.srt.speculative.ddtree.args import report_overlay

report_overlay(self)
""",
    reason="Whatever the arguments hold, the server reports the overlay whose code it has loaded.",
    blank_before=1,
)

CHOOSE_BACKEND = insert_statements(
    "ServerArgs._handle_attention_backend_compatibility",
    AtStart(),
    """\
if str(self.speculative_algorithm).upper() == "DDTREE":
    from sglang.srt.speculative.ddtree.args import choose_attention_backend

    choose_attention_backend(self)
""",
    reason="The default backend of a GPU may be one that cannot verify a tree, so DDTREE chooses first.",
    blank_after=1,
)

ENTER_DFLASH = insert_statements(
    "ServerArgs._handle_speculative_decoding",
    Before('if self.speculative_algorithm == "DFLASH": ...'),
    """\
is_ddtree = self.speculative_algorithm == "DDTREE"
if is_ddtree:
    from sglang.srt.speculative.ddtree.args import enter_dflash_handling

    enter_dflash_handling(self)
""",
    reason="The draft model is a DFlash model: its settings are resolved by the DFLASH branch below.",
    blank_before=1,
)

FINISH_DFLASH = insert_statements(
    "ServerArgs._handle_speculative_decoding",
    After('if self.speculative_algorithm == "DFLASH": ...'),
    """\
if is_ddtree:
    from sglang.srt.speculative.ddtree.args import finish_dflash_handling

    finish_dflash_handling(self)
""",
    reason="Behind the DFLASH branch the block size is known, and tree width and limits follow from it.",
    blank_before=1,
)

FLAGS = insert_statements(
    "ServerArgs.add_cli_args",
    After('parser.add_argument("--speculative-dflash-block-size", ...)'),
    """\
from sglang.srt.speculative.ddtree.args import add_ddtree_cli_args

add_ddtree_cli_args(parser)
""",
    reason="Adds the flags, and admits DDTREE to --speculative-algorithm without rewriting its `choices` line.",
)

SERVER_ARGS = Edit(
    path="srt/server_args.py",
    summary="Add the DDTREE fields and flags, choose a backend that can verify a tree, and check the settings.",
    insertions=(FIELDS, REPORT_OVERLAY, CHOOSE_BACKEND, ENTER_DFLASH, FINISH_DFLASH, FLAGS),
    examples=(EXAMPLE,),
)

#: For releases that handle the speculative arguments in a module of their own: see `speculative_hook`.
SERVER_ARGS_WITHOUT_HANDLING = Edit(
    path="srt/server_args.py",
    summary="Add the DDTREE fields and flags, and choose a backend that can verify a tree.",
    insertions=(FIELDS, REPORT_OVERLAY, CHOOSE_BACKEND, FLAGS),
    examples=(
        Example(
            before="""\
class ServerArgs:
    speculative_dflash_block_size: Optional[int] = None

    def __post_init__(self):
        'Complete the arguments.'

        self._handle_speculative_decoding()

    def _handle_attention_backend_compatibility(self):
        model_config = self.get_model_config()

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--speculative-dflash-block-size", type=int)
""",
            after="""\
class ServerArgs:
    speculative_dflash_block_size: Optional[int] = None
    speculative_ddtree_budget: int = 64
    speculative_ddtree_topk_cap: Optional[int] = None
    speculative_ddtree_chain_seed: bool = False
    speculative_ddtree_allow_hybrid_unsafe: bool = False
    speculative_ddtree_overlay_id: Optional[str] = None

    def __post_init__(self):
        'Complete the arguments.'

        from sglang.srt.speculative.ddtree.args import report_overlay

        report_overlay(self)

        self._handle_speculative_decoding()

    def _handle_attention_backend_compatibility(self):
        if str(self.speculative_algorithm).upper() == "DDTREE":
            from sglang.srt.speculative.ddtree.args import choose_attention_backend

            choose_attention_backend(self)

        model_config = self.get_model_config()

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--speculative-dflash-block-size", type=int)
        from sglang.srt.speculative.ddtree.args import add_ddtree_cli_args

        add_ddtree_cli_args(parser)
""",
        ),
    ),
)

#: The fields of the second worker's releases; `NS` says under which name the resolved values are published.
FIELDS_PUBLISHED = replace(
    FIELDS,
    code=re.sub(r": (.+) = ", r': A[\1, NS("spec")] = ', FIELDS.code),
    reason="`ServerArgs.from_cli_args` copies every field from the flag of the same name, `get_spec()` shows those of "
    "its namespace, and `/server_info` answers with every field.",
)

#: Behind the flags that are derived from annotations; ours are registered by hand, as in every release.
FLAGS_DERIVED = FLAGS.moved(After("add_cli_args_from_dataclass(parser, ServerArgs)"))

LARGEST_WIDTH = insert_statements(
    "ServerArgs.max_speculative_num_draft_tokens",
    Before("if not self.speculative_adaptive: ..."),
    """\
if self.speculative_algorithm == "DDTREE":
    from sglang.srt.speculative.ddtree.args import largest_width

    return largest_width(self)
""",
    reason="Rows, reserves and buffers are sized by this; a step writes a draft block or a tree, whichever is wider.",
)

NO_EXTRA_BUFFER = insert_statements(
    "ServerArgs._validate_mamba_extra_buffer",
    After('assert algo != "DFLASH", ...'),
    """\
assert algo != "DDTREE", "extra_buffer_lazy unsupported with DDTREE, as with DFLASH."
""",
    reason="The check names DFLASH; DDTREE leaves out the same hook.",
)

EXAMPLE_SECOND = Example(
    before="""\
class ServerArgs:
    speculative_dflash_block_size: A[
        Optional[int],
        "DFLASH only. Block size.",
        NS("spec"),
    ] = None
    speculative_dspark_block_size: A[Optional[int], "DSPARK only.", NS("spec")] = None

    def __post_init__(self):
        '''Complete the arguments.'''

        self._resolved_overrides = []

    def _validate_mamba_extra_buffer(self, view, model_arch: str):
        if view.mamba_radix_cache_strategy == "extra_buffer_lazy":
            algo = (view.speculative_algorithm or "").upper()
            assert algo != "DFLASH", "extra_buffer_lazy unsupported"

    def _handle_attention_backend_compatibility(self):
        model_config = self.get_model_config()

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
""",
    after="""\
class ServerArgs:
    speculative_dflash_block_size: A[
        Optional[int],
        "DFLASH only. Block size.",
        NS("spec"),
    ] = None
    speculative_ddtree_budget: A[int, NS("spec")] = 64
    speculative_ddtree_topk_cap: A[Optional[int], NS("spec")] = None
    speculative_ddtree_chain_seed: A[bool, NS("spec")] = False
    speculative_ddtree_allow_hybrid_unsafe: A[bool, NS("spec")] = False
    speculative_ddtree_overlay_id: A[Optional[str], NS("spec")] = None
    speculative_dspark_block_size: A[Optional[int], "DSPARK only.", NS("spec")] = None

    def __post_init__(self):
        '''Complete the arguments.'''

        from sglang.srt.speculative.ddtree.args import report_overlay

        report_overlay(self)

        self._resolved_overrides = []

    def _validate_mamba_extra_buffer(self, view, model_arch: str):
        if view.mamba_radix_cache_strategy == "extra_buffer_lazy":
            algo = (view.speculative_algorithm or "").upper()
            assert algo != "DFLASH", "extra_buffer_lazy unsupported"
            assert algo != "DDTREE", "extra_buffer_lazy unsupported with DDTREE, as with DFLASH."

    def _handle_attention_backend_compatibility(self):
        if str(self.speculative_algorithm).upper() == "DDTREE":
            from sglang.srt.speculative.ddtree.args import choose_attention_backend

            choose_attention_backend(self)

        model_config = self.get_model_config()

    @staticmethod
    def add_cli_args(parser):

        # Auto-derived.
        add_cli_args_from_dataclass(parser, ServerArgs)
        from sglang.srt.speculative.ddtree.args import add_ddtree_cli_args

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
""",
)

#: For the second worker's releases, which derive flags from annotations.
SERVER_ARGS_SECOND = Edit(
    path=SERVER_ARGS.path,
    summary="Add the DDTREE fields and flags, choose a backend that can verify a tree, and size memory for two widths.",
    insertions=(FIELDS_PUBLISHED, REPORT_OVERLAY, CHOOSE_BACKEND, FLAGS_DERIVED, LARGEST_WIDTH, NO_EXTRA_BUFFER),
    examples=(EXAMPLE_SECOND,),
)
