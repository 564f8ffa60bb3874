# SPDX-License-Identifier: Apache-2.0
"""srt/speculative/spec_utils.py: what is relayed from step to step."""

from __future__ import annotations

from ddtree_overlay.edits.algorithm import register_answer
from ddtree_overlay.edits.anchors import Before
from ddtree_overlay.edits.base import Edit, Example
from ddtree_overlay.edits.ddtree import DDTREE


EXAMPLE = Example(
    before="""\
def spec_need_hidden_states(server_args=None):
    if server_args is None:
        server_args = get_server_args()

    if server_args.speculative_algorithm in ("STANDALONE", "DFLASH"):
        return False
    return not server_args.enable_multi_layer_eagle
""",
    after="""\
def spec_need_hidden_states(server_args=None):
    if server_args is None:
        server_args = get_server_args()

    if server_args.speculative_algorithm in ("STANDALONE", "DFLASH"):
        return False
    if server_args.speculative_algorithm == "DDTREE":
        return False
    return not server_args.enable_multi_layer_eagle
""",
)

NO_HIDDEN_STATES = register_answer(
    DDTREE,
    "False",
    scope="spec_need_hidden_states",
    anchor=Before("return not server_args.enable_multi_layer_eagle"),
    owner="server_args",
    reason="Like DFLASH, DDTREE writes what it needs of the hidden states into the draft's KV within the step.",
)

SPEC_UTILS = Edit(
    path="srt/speculative/spec_utils.py",
    summary="Relay no hidden states from step to step, as for DFLASH.",
    insertions=(NO_HIDDEN_STATES,),
    examples=(EXAMPLE,),
)

#: For releases that ask the published arguments.
SPEC_UTILS_PUBLISHED = Edit(
    path=SPEC_UTILS.path,
    summary=SPEC_UTILS.summary,
    insertions=(
        NO_HIDDEN_STATES.moved(Before("return not spec.enable_multi_layer_eagle"), renamed={"server_args": "spec"}),
    ),
    examples=(
        Example(
            before="""\
def spec_need_hidden_states():
    spec = get_spec()
    if spec.speculative_algorithm in ("STANDALONE", "DFLASH", "DSPARK"):
        return False
    return not spec.enable_multi_layer_eagle
""",
            after="""\
def spec_need_hidden_states():
    spec = get_spec()
    if spec.speculative_algorithm in ("STANDALONE", "DFLASH", "DSPARK"):
        return False
    if spec.speculative_algorithm == "DDTREE":
        return False
    return not spec.enable_multi_layer_eagle
""",
        ),
    ),
)
