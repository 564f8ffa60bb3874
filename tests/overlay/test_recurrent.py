# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers over a tree: SGLang's own convolution and GDN kernels, given the overlay's links.

The kernels are the real ones, in Triton's interpreter. A node's output and state have to be what its own path from the
root gives as a plain sequence, whatever other branches hold.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.fla.fused_sigmoid_gating_recurrent import fused_sigmoid_gating_delta_rule_update
from sglang.srt.layers.attention.mamba.causal_conv1d_triton import causal_conv1d_update
from sglang.srt.speculative.ddtree.topology import padding_rows
from sglang.srt.speculative.ddtree.tree import Tree, build_tree
from sglang.srt.speculative.ddtree.tree_reference import tree_links
from sglang.srt.speculative.ddtree.verify_input import DDTreeVerifyInput, recurrent_steps
from sglang.srt.speculative.dflash_info import DFlashVerifyInput


BUDGET, HEADS, KEY, VALUE, CHANNELS, WINDOW = 9, 2, 8, 8, 16, 4


def trees(seed: int, batch: int = 3, choices: int = 3) -> Tree:
    """Trees of different shapes; the last one is too small for the budget and ends in padding."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand((batch, 4, choices), generator=generator).log().sort(dim=-1, descending=True).values
    scores[-1, 1:] = float("-inf")
    tokens = torch.rand((batch, 4, 50), generator=generator).argsort(dim=-1)[..., :choices]
    return build_tree(torch.zeros(batch, dtype=torch.int64), scores, tokens, BUDGET)


def path_to(tree: Tree, row: int, node: int) -> list[int]:
    """Nodes from the root to a node."""
    path = [node]
    while (parent := int(tree.parents[row, path[0]])) >= 0:
        path.insert(0, parent)
    return path


@pytest.mark.parametrize("seed", range(20))
def test_links_reach_every_node_once_and_padding_never(seed: int) -> None:
    """Depth-first over first children and next siblings gives each node under its parent, in rising order."""
    tree = trees(seed)
    first_child, next_sibling = (links.tolist() for links in tree_links(tree.parents))
    for row in range(3):
        reached = {0: -1}
        waiting = [0]
        while waiting:
            node = waiting.pop()
            child, before = first_child[row][node], node
            while child != -1:
                assert child > before
                assert child not in reached
                reached[child] = node
                waiting.append(child)
                child, before = next_sibling[row][child], child
        parents = tree.parents[row].tolist()
        assert reached == {0: -1} | {node: parent for node, parent in enumerate(parents) if parent >= 0}
        assert next_sibling[row][0] == -1


class Layer:
    """The inputs of one GDN layer: a convolution window, a state and one verify step's projections."""

    def __init__(self, batch: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        width = BUDGET + 1
        self.mixed = noise(batch, CHANNELS, width)
        self.weight, self.windows = noise(CHANNELS, WINDOW), noise(batch + 2, CHANNELS, WINDOW - 1)
        self.q, self.k = noise(batch, width, HEADS, KEY), noise(batch, width, HEADS, KEY)
        self.v = noise(batch, width, HEADS, VALUE)
        self.a, self.b = noise(batch, width, HEADS), noise(batch, width, HEADS)
        self.decay, self.bias = noise(HEADS), noise(HEADS)
        self.states = noise(batch + 2, HEADS, VALUE, KEY)
        self.slots = torch.arange(batch, dtype=torch.int32) + 1

    def convolve(self, rows: slice, nodes: list[int], **topology: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and window of each node, [bs, CHANNELS, nodes] and [bs, nodes, CHANNELS, WINDOW - 1]."""
        mixed = self.mixed[rows][:, :, nodes].contiguous()
        batch = mixed.shape[0]
        windows = torch.zeros((batch, len(nodes), CHANNELS, WINDOW - 1))
        out = causal_conv1d_update(
            mixed,
            self.windows.clone(),
            self.weight,
            None,
            "silu",
            conv_state_indices=self.slots[rows],
            intermediate_conv_window=windows,
            intermediate_state_indices=torch.arange(batch, dtype=torch.int32),
            **topology,
        )
        return out, windows

    def recur(self, rows: slice, nodes: list[int], parents: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and state of each node, [bs, nodes, HEADS, VALUE] and [bs, nodes, HEADS, VALUE, KEY]."""

        def flat(projection: torch.Tensor) -> torch.Tensor:
            return projection[rows][:, nodes].flatten(0, 1).contiguous()

        q, k, v = (flat(projection).unsqueeze(0) for projection in (self.q, self.k, self.v))
        batch = self.slots[rows].shape[0]
        states = torch.zeros((batch, len(nodes), HEADS, VALUE, KEY))
        out = fused_sigmoid_gating_delta_rule_update(
            A_log=self.decay,
            dt_bias=self.bias,
            q=q,
            k=k,
            v=v,
            a=flat(self.a),
            b=flat(self.b),
            initial_state_source=self.states.clone(),
            initial_state_indices=self.slots[rows],
            cu_seqlens=torch.arange(0, batch * len(nodes) + 1, len(nodes), dtype=torch.int32),
            use_qk_l2norm_in_kernel=True,
            softplus_beta=1.0,
            softplus_threshold=20.0,
            disable_state_update=True,
            intermediate_states_buffer=states,
            intermediate_state_indices=torch.arange(batch, dtype=torch.int32),
            cache_steps=len(nodes),
            retrieve_parent_token=parents,
        )
        return out.view(batch, len(nodes), HEADS, VALUE), states


@pytest.mark.parametrize("seed", [1, 2])
def test_a_nodes_state_is_that_of_its_path(seed: int) -> None:
    """Convolution and GDN state of every node equal those of the path alone, as a chain (sglang#29907, #27463)."""
    tree, batch = trees(seed), 3
    layer, everyone, nodes = Layer(batch, seed), slice(0, batch), list(range(BUDGET + 1))
    first_child, next_sibling = tree_links(tree.parents)
    parents = torch.full_like(first_child, 77)  # as a replayed graph finds it: with what was there before
    mixed, windows = layer.convolve(
        everyone,
        nodes,
        retrieve_next_token=first_child,
        retrieve_next_sibling=next_sibling,
        retrieve_parent_token=parents,
    )
    out, states = layer.recur(everyone, nodes, parents)
    assert bool(out.isfinite().all())  # padding included
    for row in range(batch):
        for node in nodes[1:]:
            if tree.parents[row, node] < 0:
                continue
            path = path_to(tree, row, node)
            alone = slice(row, row + 1)
            chain_mixed, chain_windows = layer.convolve(alone, path)
            chain_out, chain_states = layer.recur(alone, path, None)
            torch.testing.assert_close(mixed[row, :, node], chain_mixed[0, :, -1])
            torch.testing.assert_close(windows[row, node], chain_windows[0, -1])
            torch.testing.assert_close(out[row, node], chain_out[0, -1])
            torch.testing.assert_close(states[row, node], chain_states[0, -1])


def test_the_last_accepted_nodes_state_is_committed() -> None:
    """By node, not by count: DFLASH's `commit_len - 1` would take a rejected branch (sglang#27463, #26351)."""
    step: Any = SimpleNamespace(last_nodes=torch.tensor([7, 0]), path=torch.tensor([[0, 3, 7, -1], [0, -1, -1, -1]]))
    untracked = SimpleNamespace(mamba_track_indices=None, seq_lens=torch.tensor([13, 21]))
    nodes, tracked = recurrent_steps(step, untracked, torch.tensor([10, 20]), 4)
    assert nodes.tolist() == [7, 0]
    assert tracked is None


def test_the_prefix_cache_keeps_the_node_at_the_boundary() -> None:
    """Lengths 10 to 13 cross 12, whose last token is the second of the path: node 3 (sglang#31850)."""
    step: Any = SimpleNamespace(last_nodes=torch.tensor([7, 0]), path=torch.tensor([[0, 3, 7, -1], [0, -1, -1, -1]]))
    tracking = SimpleNamespace(mamba_track_indices=torch.tensor([5, 6]), seq_lens=torch.tensor([13, 21]))
    _, tracked = recurrent_steps(step, tracking, torch.tensor([10, 20]), 4)
    assert tracked is not None
    assert tracked.tolist() == [3, -1]


@pytest.mark.parametrize("kind", [DFlashVerifyInput, DDTreeVerifyInput])
@pytest.mark.parametrize("requests", [1, 3, 4])
def test_a_request_of_one_token_is_no_padding(kind: type[DFlashVerifyInput], requests: int) -> None:
    """A graph of four rows holds as many requests as the verify input, however short their prefixes are."""
    width = 5
    tokens = torch.zeros(requests * width, dtype=torch.int64)
    verify_input = kind(draft_token=tokens, positions=tokens, draft_token_num=width)
    counted = torch.count_nonzero(torch.ones(4, dtype=torch.int32) == 1)  # SGLang: rows as long as the filling
    assert padding_rows(counted, 4, verify_input) == 4 - requests


def test_padding_of_what_verifies_no_dflash_tokens_stays_sglangs_count() -> None:
    """Plain decoding and other algorithms, a graph's capture (0.5.13 goes the same way there), the drafter's block."""
    counted = torch.tensor(2)
    for tokens in (None, torch.zeros(0, dtype=torch.int64)):
        assert padding_rows(counted, 4, DFlashVerifyInput(tokens, tokens, draft_token_num=5)) is counted
    assert padding_rows(counted, 4, None) is counted
    assert padding_rows(counted, 4, SimpleNamespace(draft_token=torch.zeros(5), draft_token_num=5)) is counted
