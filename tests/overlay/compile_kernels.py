# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels of a round for sm_90, as their own callers launch them; no GPU is needed.

Run by `test_round_kernels`, in a process of its own: there Triton compiles, and does not interpret.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction


sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from overlay_modules import overlay_importable


TYPES = {
    torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8", torch.bool: "i1", torch.float32: "fp32",
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint64: "u64",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages")


def type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


def compile_instead(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:  # noqa: ARG001
    """In place of a launch."""
    given = dict(zip(kernel.arg_names, args, strict=False))
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    given |= kwargs
    constants = {p.name for p in kernel.params if p.is_constexpr or given[p.name] is None}
    signature = {name: "constexpr" if name in constants else type_of(given[name]) for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): given[name] for name in constants}
    triton.compile(ASTSource(kernel, signature, values), target=GPUTarget("cuda", 90, 32), options=options)
    sys.stdout.write(kernel.__name__ + "\n")


def main() -> None:
    JITFunction.run = compile_instead
    with overlay_importable():
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
        from sglang.srt.speculative.ddtree.tree import root_tree
        from sglang.srt.speculative.ddtree.tree_kernel import grow_trees

        log_probs, ids = torch.zeros(2, 3, 5), torch.zeros(2, 3, 5, dtype=torch.int64)
        lens, roots = torch.tensor([3, 4]), torch.tensor([1, 2])
        for links in (False, True):
            tree = grow_trees(
                roots, log_probs, ids, 6, prefix_lens=lens if links else None, chain_seed=links, links=links
            )
            write_masks(torch.zeros(200, dtype=torch.uint8), tree, lens, whole=links)
            only = torch.tensor([True, False]) if links else None
            walked = accept_by_walk(tree, tree.tokens, prefix_lens=lens, block_size=4, root_only=only)
        slots = read_slots(torch.zeros(4, 40, dtype=torch.int32), roots, lens, 7)
        counts = torch.tensor([1, 2], dtype=torch.int32)
        table = torch.zeros(4, 40, dtype=torch.int32)
        place_slots(slots, walked, table, roots, lens)
        widths = torch.tensor([3, 7], dtype=torch.int32)
        tally_by_kernel(torch.zeros(2, 5), widths, tree, walked, (log_probs, ids))
        # A step that drafts nothing, of one request.
        root = root_tree(roots[:1], lens[:1])
        walked = accept_by_walk(root, root.tokens, prefix_lens=lens[:1], block_size=4)
        place_slots(root.tokens, walked, table, roots[:1], lens[:1])
        for moved in (False, True):
            read_draft_slots(slots, tree.tokens, counts, 4, moved)
        buffers, strides = torch.zeros(2, dtype=torch.uint64), torch.full((2,), 64)
        move_rows(buffers, strides, slots, tree.tokens, counts, 64)
        for dtype in (torch.bfloat16, torch.float16):
            stage(torch.zeros(14, 40, dtype=dtype), slots, counts, torch.zeros(16, 40, dtype=dtype), counts)
        fit_cases = ((5, None), (20, torch.tensor([True, False])))
        for k, only in fit_cases:
            rows = torch.zeros(6)
            found = torch.zeros(6, k)
            fitted = Choices(found, found.long(), found, rows, rows)
            update(torch.zeros(7, 3), fitted, torch.zeros(2, 4, dtype=torch.int64), lens, only)
        for dtype, size, width, splits in ((torch.bfloat16, 128, 5, 1), (torch.float16, 64, 40, 8)):
            q, kv = torch.zeros(2 * width, 8, size, dtype=dtype), torch.zeros(2 * width, 2, size, dtype=dtype)
            bounds, mask = torch.tensor([0, 3, 7], dtype=torch.int32), torch.zeros(width * 90, dtype=torch.bool)
            for told in ((mask, lens), (None, None)):
                attend_by_kernel(q, kv, kv, q, kv, kv, bounds, ids, *told, width=width, scale=0.1, splits=splits)
        columns = Columns(org=90, first_org_id=0, added_start=96, added=3, first_added_id=90)
        cases = (
            (torch.bfloat16, 1, None, None, True),
            (torch.bfloat16, 2, None, None, True),
            (torch.float32, 2, torch.ones(3), 30.0, True),
            (torch.bfloat16, 1, torch.ones(3), None, False),
            (torch.bfloat16, 2, torch.ones(3), None, False),
        )
        for dtype, ranks, exponents, cap, moments in cases:
            group = SimpleNamespace(world_size=ranks, all_gather=lambda part, dim: torch.cat([part] * 2, dim=dim))
            head_kernel.choose(
                torch.zeros(6, 128, dtype=dtype),
                5,
                columns,
                scale=cap,
                cap=cap,
                exponents=exponents,
                moments=moments,
                group=group,
            )


if __name__ == "__main__":
    main()
