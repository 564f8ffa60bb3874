# SPDX-License-Identifier: Apache-2.0
"""srt/speculative/dflash_worker_v2.py: the draft block becomes a tree instead of a chain (the second worker)."""

from __future__ import annotations

from dataclasses import replace

from ddtree_overlay.edits.anchors import After, Before
from ddtree_overlay.edits.base import Edit, Example, insert_statements


EXAMPLE = Example(
    before="""\
class DFlashWorkerV2:
    def forward_batch_generation(self, batch, on_publish=None, grammar_barrier=None):
        draft_out = self.draft_model_runner.forward(forward_batch)
        draft_logits_output = draft_out.logits_output

        if self._draft_sampler is not None and draft_out.can_run_graph:
            draft_next = self._draft_sampler.out[: bs * (int(self.block_size) - 1)]
""",
    after="""\
class DFlashWorkerV2:
    def forward_batch_generation(self, batch, on_publish=None, grammar_barrier=None):
        draft_out = self.draft_model_runner.forward(forward_batch)
        draft_logits_output = draft_out.logits_output
        if batch.spec_algorithm.is_ddtree():
            return self._verify_tree(
                batch,
                draft_input=draft_input,
                draft_hidden=draft_logits_output.hidden_states,
                block_ids=block_ids,
                block_positions=positions,
                block_slots=verify_out_cache_loc_2d,
                on_publish=on_publish,
                grammar_barrier=grammar_barrier,
            )

        if self._draft_sampler is not None and draft_out.can_run_graph:
            draft_next = self._draft_sampler.out[: bs * (int(self.block_size) - 1)]
""",
)

VERIFY_TREE = insert_statements(
    "DFlashWorkerV2.forward_batch_generation",
    After("draft_logits_output = draft_out.logits_output"),
    """\
if batch.spec_algorithm.is_ddtree():
    return self._verify_tree(
        batch,
        draft_input=draft_input,
        draft_hidden=draft_logits_output.hidden_states,
        block_ids=block_ids,
        block_positions=positions,
        block_slots=verify_out_cache_loc_2d,
        on_publish=on_publish,
        grammar_barrier=grammar_barrier,
    )
""",
    reason="Here the drafter's hidden states of all positions are known and nothing is sampled yet.",
)

DFLASH_WORKER_V2 = Edit(
    path="srt/speculative/dflash_worker_v2.py",
    summary="Hand the draft block to the tree worker before it is flattened into one greedy chain.",
    insertions=(VERIFY_TREE,),
    examples=(EXAMPLE,),
)

_WITHOUT_GRAMMAR = replace(VERIFY_TREE, code=VERIFY_TREE.code.replace("        grammar_barrier=grammar_barrier,\n", ""))


def _without_grammar(text: str) -> str:
    return text.replace(", grammar_barrier=None", "").replace("                grammar_barrier=grammar_barrier,\n", "")


#: For the releases in which DFLASH serves no grammars.
DFLASH_WORKER_V2_PLAIN = Edit(
    path=DFLASH_WORKER_V2.path,
    summary=DFLASH_WORKER_V2.summary,
    insertions=(_WITHOUT_GRAMMAR,),
    examples=(Example(before=_without_grammar(EXAMPLE.before), after=_without_grammar(EXAMPLE.after)),),
)

#: For the release whose draft has no sampler of its own.
DFLASH_WORKER_V2_FIRST = Edit(
    path=DFLASH_WORKER_V2.path,
    summary=DFLASH_WORKER_V2.summary,
    insertions=(
        replace(_WITHOUT_GRAMMAR, blank_before=1).moved(
            Before("draft_hidden = draft_logits_output.hidden_states"), renamed={"batch": "model_worker_batch"}
        ),
    ),
    examples=(
        Example(
            before="""\
class DFlashWorkerV2:
    def forward_batch_generation(self, model_worker_batch, on_publish=None):
        draft_logits_output = self.draft_model_runner.forward(
            forward_batch
        ).logits_output

        draft_hidden = draft_logits_output.hidden_states
""",
            after="""\
class DFlashWorkerV2:
    def forward_batch_generation(self, model_worker_batch, on_publish=None):
        draft_logits_output = self.draft_model_runner.forward(
            forward_batch
        ).logits_output

        if model_worker_batch.spec_algorithm.is_ddtree():
            return self._verify_tree(
                model_worker_batch,
                draft_input=draft_input,
                draft_hidden=draft_logits_output.hidden_states,
                block_ids=block_ids,
                block_positions=positions,
                block_slots=verify_out_cache_loc_2d,
                on_publish=on_publish,
            )

        draft_hidden = draft_logits_output.hidden_states
""",
        ),
    ),
)
