# SPDX-License-Identifier: Apache-2.0
"""srt/server_args.py: the DDTREE fields, flags, defaults and start-up checks."""

from __future__ import annotations

from ddtree_overlay.edits.algorithm import (
    borrow_handler,
    register_fields,
    register_flags,
    register_gate,
    register_start,
)
from ddtree_overlay.edits.anchors import After, AtStart, Before
from ddtree_overlay.edits.base import Edit, Example
from ddtree_overlay.edits.ddtree import DDTREE


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
    speculative_ddtree_budget: int | str | None = None
    speculative_ddtree_budgets: str | list[int] | None = None
    speculative_ddtree_topk_cap: Optional[int] = None
    speculative_ddtree_chain_seed: bool = False
    speculative_ddtree_calibration: str = "auto"
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
        from sglang.srt.speculative.ddtree.flags import add_ddtree_cli_args

        add_ddtree_cli_args(parser)
        parser.add_argument("--speculative-token-map")
""",
)

#: The fields; the same place in every release of the first worker.
FIELDS = register_fields(
    DDTREE,
    {
        "budget": ("int | str | None", "None"),
        "budgets": ("str | list[int] | None", "None"),
        "topk_cap": ("Optional[int]", "None"),
        "chain_seed": ("bool", "False"),
        "calibration": ("str", '"auto"'),
        "allow_hybrid_unsafe": ("bool", "False"),
        "overlay_id": ("Optional[str]", "None"),
    },
    after="speculative_dflash_block_size",
    reason="`ServerArgs.from_cli_args` copies every dataclass field from the flag of the same name, and "
    "`/server_info` answers with every field.",
)

REPORT_OVERLAY = register_start(
    DDTREE,
    "args:report_overlay",
    scope="ServerArgs.__post_init__",
    anchor=AtStart(),
    reason="Whatever the arguments hold, the server reports the overlay whose code it has loaded.",
)

CHOOSE_BACKEND = register_gate(
    DDTREE,
    "args:choose_attention_backend",
    scope="ServerArgs._handle_attention_backend_compatibility",
    anchor=AtStart(),
    # The name is as the user wrote it: it has not been brought into one form yet.
    condition='str(self.speculative_algorithm).upper() == "DDTREE"',
    reason="The default backend of a GPU may be one that cannot verify a tree, so DDTREE chooses first.",
    blank_after=1,
)

ENTER_DFLASH, FINISH_DFLASH = borrow_handler(
    DDTREE,
    "args:enter_dflash_handling",
    "args:finish_dflash_handling",
    scope="ServerArgs._handle_speculative_decoding",
    before=Before('if self.speculative_algorithm == "DFLASH": ...'),
    after=After('if self.speculative_algorithm == "DFLASH": ...'),
    reasons=(
        "The draft model is a DFlash model: its settings are resolved by the DFLASH branch below.",
        "Behind the DFLASH branch the block size is known, and tree width and limits follow from it.",
    ),
)

FLAGS = register_flags(
    DDTREE,
    "flags:add_ddtree_cli_args",
    anchor=After('parser.add_argument("--speculative-dflash-block-size", ...)'),
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
    speculative_ddtree_budget: int | str | None = None
    speculative_ddtree_budgets: str | list[int] | None = None
    speculative_ddtree_topk_cap: Optional[int] = None
    speculative_ddtree_chain_seed: bool = False
    speculative_ddtree_calibration: str = "auto"
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
        from sglang.srt.speculative.ddtree.flags import add_ddtree_cli_args

        add_ddtree_cli_args(parser)
""",
        ),
    ),
)
