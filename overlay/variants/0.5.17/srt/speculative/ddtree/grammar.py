# SPDX-License-Identifier: Apache-2.0
"""Constrained decoding: what each node's next token may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.speculative.ddtree.tree import Tree
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask


if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


@dataclass(frozen=True)
class NodeGrammar:
    """A batch's trees on their way to the host, where SGLang walks its grammars along them."""

    tree: GrammarTree

    def apply(self, logits: torch.Tensor, batch: ScheduleBatch, barrier: Callable[[], None] | None) -> None:
        """Forbid what the grammars do not allow, in place. The host waits for the tree here, the device does not.

        Args:
            logits: [bs * W, vocabulary].
            batch: Its requests hold the grammars.
            barrier: Brings the grammars up to date with the step before this one.
        """
        mask = build_grammar_vocab_mask(
            reqs=batch.reqs,
            tree=self.tree,
            sampling_info=batch.sampling_info,
            device=logits.device,
            barrier=barrier,
        )
        if mask is not None:
            mask.apply(logits)


def node_grammar(batch: ScheduleBatch, tree: Tree) -> NodeGrammar | None:
    """Send the trees to the host, if a request of the batch has a grammar; call it before the verify is launched."""
    if not batch.has_grammar:
        return None
    assert tree.first_child is not None
    assert tree.next_sibling is not None
    first_child, next_sibling = (links.to(torch.int64) for links in (tree.first_child, tree.next_sibling))
    return NodeGrammar(GrammarTree.from_device(first_child, next_sibling, tree.tokens))
