# SPDX-License-Identifier: Apache-2.0
"""Every launch of the overlay's kernels, by the functions that launch them, with tensors of the types that a step has.

Of each kernel the shapes that decide how it is compiled: narrow trees and wide ones, batches of the smallest class and
of a larger one, what may be None and what may be of several types.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.speculative.ddtree import head_kernel
from sglang.srt.speculative.ddtree.accept_kernel import accept_by_walk
from sglang.srt.speculative.ddtree.attention_kernel import attend_by_kernel
from sglang.srt.speculative.ddtree.calibration_kernel import update
from sglang.srt.speculative.ddtree.draft_head import Choices, Columns
from sglang.srt.speculative.ddtree.mask_kernel import write_masks
from sglang.srt.speculative.ddtree.move_kernel import move_rows
from sglang.srt.speculative.ddtree.placing_kernel import place_slots
from sglang.srt.speculative.ddtree.slots_kernel import read_draft_slots, read_slots
from sglang.srt.speculative.ddtree.staging_kernel import stage
from sglang.srt.speculative.ddtree.tally_kernel import tally_by_kernel
from sglang.srt.speculative.ddtree.tree import Tree, root_tree
from sglang.srt.speculative.ddtree.tree_kernel import grow_trees


BLOCK, VOCABULARY = 16, 151936
BF16, FP16, FP32, I32, I64 = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64


def launch_all() -> None:
    """Every kernel; nothing is read or written where launches are noted."""
    launch_step(2, 16, 4, lens=I64, seed=False, links=False)
    launch_step(100, 64, 255, lens=I64, seed=True, links=True)
    launch_step(2, 16, 64, lens=I32, seed=True, links=False)
    launch_head()
    launch_attention()
    # A mask of more bytes than 32 bits count: too large for a test, but for one that has no memory.
    lens = torch.empty(100, dtype=I64)
    write_masks(torch.empty(1 << 31, dtype=torch.uint8, device="meta"), root_tree(lens, lens), lens, whole=True)
    for features, dtype in ((5 * 4096, BF16), (40, FP16)):
        hidden, counts = torch.empty(100 * BLOCK, features, dtype=dtype), torch.empty(100, dtype=I32)
        stage(hidden, torch.empty(100, BLOCK, dtype=I64), counts, hidden, counts)
    for row_bytes in (2048, 64):
        slots, addresses = torch.empty(2, 5, dtype=I64), torch.empty(72, dtype=torch.uint64)
        move_rows(addresses, torch.empty(72, dtype=I64), slots, slots, torch.empty(2, dtype=I32), row_bytes)


def launch_step(batch: int, k: int, budget: int, *, lens: torch.dtype, seed: bool, links: bool) -> None:
    """A step from the drafter's choices to what it commits; and one that drafts nothing."""
    prefix_lens, roots = torch.empty(batch, dtype=lens), torch.empty(batch, BLOCK, dtype=I64)[:, 0]
    log_probs, ids = torch.empty(batch, BLOCK - 1, k), torch.empty(batch, BLOCK - 1, k, dtype=I64)
    grow_trees(roots, log_probs, ids, budget, chain_seed=seed, links=links)
    masks = torch.empty(batch * 300 * 300, dtype=torch.bool)
    # Grown wider than it is verified, as by `auto`; and not.
    for width in (1 + budget // 2, budget + 1):
        tree = grow_trees(
            roots,
            log_probs,
            ids,
            budget,
            width=width,
            prefix_lens=prefix_lens,
            chain_seed=seed,
            links=links,
            mask=masks,
        )
        accept_and_commit(tree, prefix_lens)
    for whole in (False, True):
        write_masks(masks, tree, prefix_lens, whole=whole)
    acceptance = accept_by_walk(tree, tree.tokens, prefix_lens=prefix_lens, block_size=BLOCK)
    tally_by_kernel(torch.empty(64, 11), torch.empty(5, dtype=I32), tree, acceptance, (log_probs, ids))
    rows = torch.empty(batch * (BLOCK - 1))
    choices = Choices(log_probs.view(-1, k), ids.view(-1, k), log_probs.view(-1, k), rows, rows)
    for root_only in (None, torch.empty(batch, dtype=torch.bool)):
        update(torch.empty(7, BLOCK - 1), choices, acceptance.tokens, acceptance.accept_lens, root_only)
    accept_and_commit(root_tree(roots, prefix_lens), prefix_lens)


def accept_and_commit(tree: Tree, prefix_lens: torch.Tensor) -> None:
    """From the target's tokens on."""
    batch, width = tree.tokens.shape
    root_only = torch.empty(batch, dtype=torch.bool)
    accept_by_walk(tree, tree.tokens, prefix_lens=prefix_lens, block_size=BLOCK, root_only=root_only)
    accepted = accept_by_walk(tree, tree.tokens, prefix_lens=prefix_lens, block_size=BLOCK)
    table, pool_indices = torch.empty(batch + 1, 4096, dtype=I32), torch.empty(batch, dtype=I64)
    slots = read_slots(table, pool_indices, prefix_lens, width)
    place_slots(slots, accepted, table, pool_indices, prefix_lens)
    for moved in (False, True):
        read_draft_slots(slots, accepted.path, accepted.commit_lens, BLOCK, moved)


def launch_head() -> None:
    """The drafter's head: alone and on a rank of several, with and without exponents, for few choices and many."""
    exponents = torch.empty(BLOCK - 1)
    cases: tuple[tuple[torch.dtype, int, int, torch.Tensor | None, bool, float | None], ...] = (
        (BF16, 1, 16, None, True, None),
        (BF16, 1, 255, exponents, False, None),
        (FP32, 1, 5, exponents, True, 30.0),
        (BF16, 8, 64, None, True, None),
        (FP16, 2, 16, exponents, False, 30.0),
        (BF16, 2, 64, exponents, True, None),
    )
    for dtype, ranks, k, given, moments, cap in cases:
        size = VOCABULARY // ranks
        columns = Columns(org=size, first_org_id=0, added_start=size, added=0, first_added_id=VOCABULARY)
        head_kernel.choose(
            torch.empty(BLOCK - 1, size, dtype=dtype),
            k,
            columns,
            scale=cap,
            cap=cap,
            exponents=given,
            moments=moments,
            group=SimpleNamespace(world_size=ranks, all_gather=lambda part, dim, n=ranks: torch.cat([part] * n, dim)),
        )


def launch_attention() -> None:
    """Heads of three sizes, in groups of one, four and six: masks or none, one tile or several, one part to many."""
    for dtype, size in ((FP16, 64), (BF16, 128), (BF16, 256)):
        attend(dtype, size, 1, 5, masked=True, splits=1)
        attend(dtype, size, 4, 5, masked=False, splits=3)
        attend(dtype, size, 6, 33, masked=True, splits=8)
        attend(dtype, size, 1, 3, masked=True, splits=8)


def attend(dtype: torch.dtype, size: int, heads_a_group: int, width: int, *, masked: bool, splits: int) -> None:
    """One step of two requests; queries, keys and values are parts of one tensor, as they come from a layer."""
    batch, groups = 2, 8
    heads, rows = groups * heads_a_group, batch * width
    parts: Any = torch.empty(rows, (heads + 2 * groups) * size, dtype=dtype).split(
        [heads * size, groups * size, groups * size], dim=1
    )
    q, k, v = (part.view(rows, -1, size) for part in parts)
    buffer = torch.empty(4096, groups, size, dtype=dtype)
    mask = torch.empty(rows * (1024 + width), dtype=torch.bool) if masked else None
    attend_by_kernel(
        q, k, v, torch.empty(rows, heads, size, dtype=dtype), buffer, buffer, torch.empty(batch + 1, dtype=I32),
        torch.empty(2048, dtype=I64), mask, torch.empty(batch + 1, dtype=I64) if masked else None,
        width=width, scale=size**-0.5, splits=splits,
    )  # fmt: skip
