# SPDX-License-Identifier: Apache-2.0
"""srt/models/dflash.py: the drafter's rotary base, which transformers 5 keeps elsewhere. Mended upstream in 0.5.13."""

from __future__ import annotations

from ddtree_overlay.edits.anchors import After
from ddtree_overlay.edits.base import Edit, Example, insert_statements


EXAMPLE = Example(
    before="""\
class DFlashAttention(nn.Module):
    def __init__(self, config, layer_id):
        rope_theta = float(getattr(config, "rope_theta", 1000000))
        rope_scaling = getattr(config, "rope_scaling", None)
        self.rotary_emb = get_rope(base=rope_theta, rope_scaling=rope_scaling)
""",
    after="""\
class DFlashAttention(nn.Module):
    def __init__(self, config, layer_id):
        rope_theta = float(getattr(config, "rope_theta", 1000000))
        rope_scaling = getattr(config, "rope_scaling", None)
        from sglang.srt.speculative.ddtree.draft_model import draft_rope

        rope_theta, rope_scaling = draft_rope(config, rope_theta, rope_scaling)
        self.rotary_emb = get_rope(base=rope_theta, rope_scaling=rope_scaling)
""",
)

DFLASH_MODEL = Edit(
    path="srt/models/dflash.py",
    summary="Read the drafter's rotary base where transformers 5 keeps it.",
    insertions=(
        insert_statements(
            "DFlashAttention.__init__",
            After('rope_scaling = getattr(config, "rope_scaling", None)'),
            """\
from sglang.srt.speculative.ddtree.draft_model import draft_rope

rope_theta, rope_scaling = draft_rope(config, rope_theta, rope_scaling)
""",
            reason="With another base than the trained one the drafter guesses wrong, and nothing says so.",
        ),
    ),
    examples=(EXAMPLE,),
)
