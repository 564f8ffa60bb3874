# SPDX-License-Identifier: Apache-2.0
"""srt/arg_groups/speculative_hook.py: where SGLang 0.5.13 and later handle the speculative arguments."""

from __future__ import annotations

from ddtree_overlay.edits.anchors import After, Before
from ddtree_overlay.edits.base import Edit, Example
from ddtree_overlay.edits.server_args import ENTER_DFLASH, FINISH_DFLASH


EXAMPLE = Example(
    before="""\
def handle_speculative_decoding(server_args):
    server_args.speculative_algorithm = resolve(server_args.speculative_algorithm)

    # The window of DFLASH and EAGLE-3.
    if server_args.speculative_draft_window_size is not None:
        warn_unless_dflash(server_args)

    if server_args.speculative_algorithm == "DFLASH":
        _handle_dflash(server_args)
    elif server_args.speculative_algorithm == "NGRAM":
        _handle_ngram(server_args)

    if server_args.speculative_adaptive:
        pass
""",
    after="""\
def handle_speculative_decoding(server_args):
    server_args.speculative_algorithm = resolve(server_args.speculative_algorithm)

    is_ddtree = server_args.speculative_algorithm == "DDTREE"
    if is_ddtree:
        from sglang.srt.speculative.ddtree.args import enter_dflash_handling

        enter_dflash_handling(server_args)

    # The window of DFLASH and EAGLE-3.
    if server_args.speculative_draft_window_size is not None:
        warn_unless_dflash(server_args)

    if server_args.speculative_algorithm == "DFLASH":
        _handle_dflash(server_args)
    elif server_args.speculative_algorithm == "NGRAM":
        _handle_ngram(server_args)

    if is_ddtree:
        from sglang.srt.speculative.ddtree.args import finish_dflash_handling

        finish_dflash_handling(server_args)

    if server_args.speculative_adaptive:
        pass
""",
)

_NAMES = {"self": "server_args"}
_SCOPE = "handle_speculative_decoding"

_SUMMARY = "Let the DFLASH branch check and complete the arguments, then set both widths and refuse what cannot be."

#: Above the check of the draft window, which warns whoever is not called DFLASH.
ENTER = ENTER_DFLASH.moved(
    Before("if server_args.speculative_draft_window_size is not None: ..."), scope=_SCOPE, renamed=_NAMES
)

SPECULATIVE_HOOK = Edit(
    path="srt/arg_groups/speculative_hook.py",
    summary=_SUMMARY,
    insertions=(
        ENTER,
        FINISH_DFLASH.moved(
            After('if server_args.speculative_algorithm == "DFLASH": ...'), scope=_SCOPE, renamed=_NAMES
        ),
    ),
    examples=(EXAMPLE,),
)

EXAMPLE_SECOND = Example(
    before="""\
def handle_speculative_decoding(server_args):
    server_args.speculative_algorithm = resolve(server_args.speculative_algorithm)

    # Validate once.
    if server_args.speculative_draft_window_size is not None:
        warn_unless_dflash(server_args)

    algo = None
    if server_args.speculative_algorithm is not None:
        algo = SpeculativeAlgorithm.from_string(server_args.speculative_algorithm)

    if algo is not None:
        algo.handle_server_args(server_args)
""",
    after="""\
def handle_speculative_decoding(server_args):
    server_args.speculative_algorithm = resolve(server_args.speculative_algorithm)

    is_ddtree = server_args.speculative_algorithm == "DDTREE"
    if is_ddtree:
        from sglang.srt.speculative.ddtree.args import enter_dflash_handling

        enter_dflash_handling(server_args)

    # Validate once.
    if server_args.speculative_draft_window_size is not None:
        warn_unless_dflash(server_args)

    algo = None
    if server_args.speculative_algorithm is not None:
        algo = SpeculativeAlgorithm.from_string(server_args.speculative_algorithm)

    if algo is not None:
        algo.handle_server_args(server_args)

    if is_ddtree:
        from sglang.srt.speculative.ddtree.args import finish_dflash_handling

        finish_dflash_handling(server_args)
""",
)

#: For releases in which the algorithm calls its handler itself.
SPECULATIVE_HOOK_SECOND = Edit(
    path=SPECULATIVE_HOOK.path,
    summary=_SUMMARY,
    insertions=(ENTER, FINISH_DFLASH.moved(After("if algo is not None: ..."), scope=_SCOPE, renamed=_NAMES)),
    examples=(EXAMPLE_SECOND,),
)

_PUBLISHED = {"server_args.speculative_algorithm": "cfg.speculative_algorithm"}

#: For releases that declare what they decide; the handler reads and declares as SGLang's own does.
SPECULATIVE_HOOK_DECLARED = Edit(
    path=SPECULATIVE_HOOK.path,
    summary=_SUMMARY,
    insertions=(
        ENTER.moved(Before("if cfg.speculative_draft_window_size is not None: ..."), renamed=_PUBLISHED),
        SPECULATIVE_HOOK_SECOND.insertions[1],
    ),
    examples=(
        Example(
            before="""\
def handle_speculative_decoding(server_args):
    cfg = resolving_view(server_args)

    if cfg.speculative_draft_window_size is not None:
        warn_unless_dflash(server_args)

    algo = None
    if cfg.speculative_algorithm is not None:
        algo = SpeculativeAlgorithm.from_string(cfg.speculative_algorithm)

    if algo is not None:
        algo.handle_server_args(server_args)


def _handle_dflash(server_args):
    if cfg.speculative_draft_window_size is not None:
        pass
""",
            after="""\
def handle_speculative_decoding(server_args):
    cfg = resolving_view(server_args)

    is_ddtree = cfg.speculative_algorithm == "DDTREE"
    if is_ddtree:
        from sglang.srt.speculative.ddtree.args import enter_dflash_handling

        enter_dflash_handling(server_args)

    if cfg.speculative_draft_window_size is not None:
        warn_unless_dflash(server_args)

    algo = None
    if cfg.speculative_algorithm is not None:
        algo = SpeculativeAlgorithm.from_string(cfg.speculative_algorithm)

    if algo is not None:
        algo.handle_server_args(server_args)

    if is_ddtree:
        from sglang.srt.speculative.ddtree.args import finish_dflash_handling

        finish_dflash_handling(server_args)


def _handle_dflash(server_args):
    if cfg.speculative_draft_window_size is not None:
        pass
""",
        ),
    ),
)
