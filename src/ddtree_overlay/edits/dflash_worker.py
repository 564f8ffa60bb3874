# SPDX-License-Identifier: Apache-2.0
"""srt/speculative/dflash_worker.py: the draft block becomes a tree instead of a chain."""

from __future__ import annotations

from ddtree_overlay.edits.anchors import Before
from ddtree_overlay.edits.base import Edit, Example, insert_statements


EXAMPLE = Example(
    before="""\
class DFlashWorker:
    def _prepare_for_speculative_decoding(self, batch, draft_input):
        draft_hidden = draft_hidden.view(bs, self.block_size, -1)
        draft_next = self._greedy_sample_from_vocab_parallel_head(
            hidden_states=draft_hidden[:, 1:, :],
            lm_head=lm_head,
        ).view(bs, self.block_size - 1)
""",
    after="""\
class DFlashWorker:
    def _prepare_for_speculative_decoding(self, batch, draft_input):
        draft_hidden = draft_hidden.view(bs, self.block_size, -1)
        if self.server_args.speculative_algorithm == "DDTREE":
            self._prepare_tree_verify(
                batch, draft_hidden=draft_hidden, block_ids=block_ids, lm_head=lm_head
            )
            return
        draft_next = self._greedy_sample_from_vocab_parallel_head(
            hidden_states=draft_hidden[:, 1:, :],
            lm_head=lm_head,
        ).view(bs, self.block_size - 1)
""",
)

DFLASH_WORKER = Edit(
    path="srt/speculative/dflash_worker.py",
    summary="Hand the draft block to the tree worker before it is flattened into one greedy chain.",
    insertions=(
        insert_statements(
            "DFlashWorker._prepare_for_speculative_decoding",
            Before("draft_next = self._greedy_sample_from_vocab_parallel_head(...).view(...)"),
            """\
if self.server_args.speculative_algorithm == "DDTREE":
    self._prepare_tree_verify(
        batch, draft_hidden=draft_hidden, block_ids=block_ids, lm_head=lm_head
    )
    return
""",
            reason="Here the drafter's hidden states of all positions are known and nothing is sampled yet.",
        ),
    ),
    examples=(EXAMPLE,),
)
