# SPDX-License-Identifier: Apache-2.0
"""Tree verify through SGLang's Triton kernels, interpreted: who sees whom, and the reference of the engine tests."""

from __future__ import annotations

import pytest
import reference_kernels
import torch
from sglang.srt.layers.attention.triton_ops.decode_attention import decode_attention_fwd
from sglang.srt.layers.attention.triton_ops.extend_attention import (
    build_unified_kv_indices,
    extend_attention_fwd,
    extend_attention_fwd_unified,
)
from sglang.srt.layers.utils.hash import murmur_hash32
from sglang.srt.speculative.ddtree.tree import Tree, build_tree, ordered_topk
from sglang.srt.speculative.ddtree.tree_mask import verify_mask


HEADS, KV_HEADS, DIM = 4, 2, 32
PREFIXES = [7, 3]


def tree_of_two(budget: int = 6) -> Tree:
    """Two bushy trees."""
    torch.manual_seed(3)
    values, ids = ordered_topk(torch.log_softmax(torch.randn(2, 3, 9), -1), budget)
    return build_tree(torch.tensor([9, 10]), values, ids, budget)


class Verify:
    """One tree verify of two requests with different prefixes."""

    def __init__(self, tree: Tree) -> None:
        torch.manual_seed(4)
        self.width = tree.tokens.shape[1]
        rows = 2 * self.width
        self.queries = torch.randn(rows, HEADS, DIM)
        self.keys, self.values = torch.randn(2, rows, KV_HEADS, DIM)
        self.key_pool, self.value_pool = torch.randn(2, 32, KV_HEADS, DIM)
        self.mask = verify_mask(tree, PREFIXES).to(torch.uint8)

    def run(self, kernel: object) -> torch.Tensor:
        """Output of every node, [2 * W, heads, dim]."""
        width, out = self.width, torch.zeros_like(self.queries)
        sizes = [width * (prefix + width) for prefix in PREFIXES]
        kernel(
            self.queries,
            self.keys,
            self.values,
            out,
            self.key_pool,
            self.value_pool,
            torch.tensor([0, width, 2 * width], dtype=torch.int32),
            torch.tensor([0, *torch.tensor(PREFIXES).cumsum(0).tolist()], dtype=torch.int32),
            torch.randperm(32, generator=torch.Generator().manual_seed(5))[: sum(PREFIXES)],
            self.mask,
            True,
            torch.tensor([0, sizes[0], sum(sizes)], dtype=torch.int64),
            width,
            1.0,
            1.0,
            DIM**-0.5,
        )
        return out

    def run_unified(self, kernel: object, join: object) -> torch.Tensor:
        """The same through the kernel of `--enable-deterministic-inference`, for which new keys lie in the pool."""
        width, out = self.width, torch.zeros_like(self.queries)
        sizes = [width * (prefix + width) for prefix in PREFIXES]
        keys, values = torch.cat([self.key_pool, self.keys]), torch.cat([self.value_pool, self.values])
        bounds, slots, prefixes = join(
            torch.tensor([0, *torch.tensor(PREFIXES).cumsum(0).tolist()], dtype=torch.int32),
            torch.randperm(32, generator=torch.Generator().manual_seed(5))[: sum(PREFIXES)],
            torch.tensor([0, width], dtype=torch.int32),
            torch.full((2,), width, dtype=torch.int32),
            torch.arange(32, 32 + 2 * width),
            2,
        )
        kernel(
            self.queries, out, keys, values, 1.0, 1.0,
            torch.tensor([0, width, 2 * width], dtype=torch.int32), bounds, slots, prefixes.int(), width,
            custom_mask=self.mask, mask_indptr=torch.tensor([0, sizes[0], sum(sizes)], dtype=torch.int64),
            sm_scale=DIM**-0.5, is_causal=True,
        )  # fmt: skip
        return out


def test_reference_is_what_the_triton_kernel_computes() -> None:
    """The engine tests run on the reference: both give the same outputs under a tree mask."""
    verify = Verify(tree_of_two())
    expected = verify.run(extend_attention_fwd)
    torch.testing.assert_close(verify.run(reference_kernels.extend_attention_fwd), expected, atol=1e-5, rtol=1e-5)


def test_deterministic_kernel_honours_the_mask() -> None:
    """`--enable-deterministic-inference` verifies with another kernel: it and its reference give the same outputs."""
    verify = Verify(tree_of_two())
    expected = verify.run(reference_kernels.extend_attention_fwd)
    for kernel, join in (
        (extend_attention_fwd_unified, build_unified_kv_indices),
        (reference_kernels.extend_attention_fwd_unified, reference_kernels.build_unified_kv_indices),
    ):
        torch.testing.assert_close(verify.run_unified(kernel, join), expected, atol=1e-5, rtol=1e-5)


def test_reference_hashes_as_the_triton_kernel() -> None:
    """Seeded draws of the engine tests are those of SGLang: seeds of more than 32 bits, negative ones too."""
    seeds, positions = torch.tensor([0, 42, 2**40 + 7, -1]), torch.tensor([0, 1, 4095, 2**20])
    columns = torch.arange(300)
    expected = murmur_hash32(seeds.to(torch.uint64), positions, columns)
    assert torch.equal(reference_kernels.murmur_hash32(seeds.to(torch.uint64), positions, columns), expected)


@pytest.mark.parametrize("kernel", [extend_attention_fwd, reference_kernels.extend_attention_fwd])
def test_a_node_sees_its_ancestors_and_nobody_else(kernel: object) -> None:
    """Another key and value at one node change exactly the nodes below it, and itself (SubSir ddtree_fix.py 2)."""
    tree = tree_of_two()
    before = Verify(tree).run(kernel)
    for changed in range(tree.tokens.shape[1]):
        verify = Verify(tree)
        verify.keys[changed] += 3.0
        verify.values[changed] -= 3.0
        rows = (verify.run(kernel) != before).flatten(1).any(dim=1)
        assert rows.tolist() == [*tree.ancestors[0, :, changed].tolist(), *[False] * verify.width]


def test_padding_gives_finite_numbers() -> None:
    """A row that sees nobody would be NaN, and NaN spreads through a mixture of experts (sglang#29907)."""
    tree = build_tree(torch.tensor([9, 10]), torch.zeros(2, 2, 1), torch.tensor([[[1], [2]]] * 2), 6)
    assert (tree.parents[:, 3:] == -1).all()
    assert Verify(tree).run(extend_attention_fwd).isfinite().all()


def test_reference_decodes_as_the_triton_kernel() -> None:
    """Plain steps of the draft and of other algorithms: the same for one token a request."""
    verify = Verify(tree_of_two())
    outs = []
    for kernel in (decode_attention_fwd, reference_kernels.decode_attention_fwd):
        out = torch.zeros(2, HEADS, DIM)
        splits = torch.ones(2, dtype=torch.int32)
        logits, lse = torch.zeros(2, HEADS, 8, DIM), torch.zeros(2, HEADS, 8)
        bounds = torch.tensor([0, 7, 10], dtype=torch.int32)
        slots = torch.arange(10)
        kernel(
            verify.queries[:2], verify.key_pool, verify.value_pool, out, bounds, slots,
            logits, lse, splits, 8, DIM**-0.5, 1.0, 1.0,
        )  # fmt: skip
        outs.append(out)
    torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=1e-5)
