# SPDX-License-Identifier: Apache-2.0
"""Every kernel of a round against its reference, over odd shapes; ends the process at the first difference.

Import it where the overlay can be imported. Scores are summed in float64 by the references.
"""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any

import torch

from kernel_inputs import BLOCK, DEVICE, Ranks, choices, labels, likely_targets, shards_of


def compare(what: str, mine: Any, other: Any, tolerance: float | None = None) -> None:
    """Every field of two dataclasses; floats of choices within a tolerance."""
    for field in fields(mine):
        a, b = getattr(mine, field.name), getattr(other, field.name)
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            same = a == b
        elif tolerance is not None and a.is_floating_point():
            same = torch.allclose(a.double(), b.double(), atol=tolerance, rtol=tolerance, equal_nan=True)
        else:
            same = a.dtype == b.dtype and torch.equal(a, b)
        if not same:
            sys.exit(f"{what}: {field.name} differs from the reference\n{a}\n{b}")


def compare_round(batch: int, horizon: int, k: int, budget: int, seed: int) -> None:
    """Tree, mask and acceptance of one step, with ties, NaN rows, a narrower verify, both shapes, links."""
    from sglang.srt.speculative.ddtree.accept import accept_by_closure
    from sglang.srt.speculative.ddtree.accept_kernel import accept_by_walk
    from sglang.srt.speculative.ddtree.mask_kernel import write_masks
    from sglang.srt.speculative.ddtree.tree_kernel import grow_trees
    from sglang.srt.speculative.ddtree.tree_mask import write_by_rows
    from sglang.srt.speculative.ddtree.tree_reference import grow_by_beam

    log_probs, ids = choices(batch, k, seed, horizon)
    if seed % 2:
        log_probs = log_probs.mul(2).round().div(2)  # ties
    if horizon > 2:
        log_probs[-1, -1] = float("nan")
    roots = torch.arange(5, 5 + 2 * batch, device=DEVICE).view(batch, 2)[:, 0]
    prefix_lens = torch.arange(batch, device=DEVICE) * 37 % 101
    for chain_seed, links, width in ((False, False, None), (True, True, None), (seed % 2 == 0, True, 1 + budget // 2)):
        options = {"prefix_lens": prefix_lens, "chain_seed": chain_seed, "links": links, "width": width}
        nodes = budget + 1 if width is None else width
        masks = torch.randint(0, 2, (int((prefix_lens + nodes).sum()) * nodes + 5,), dtype=torch.uint8, device=DEVICE)
        masks = [masks, masks.clone()]
        tree, expected = (
            grow(roots, log_probs, ids, budget, mask=mask, **options)
            for grow, mask in zip((grow_trees, grow_by_beam), masks, strict=True)
        )
        shape = f"batch {batch}, {horizon} positions, {k} choices, budget {budget}, {options}"
        compare(f"tree ({shape})", tree, expected)
        if not torch.equal(*masks):
            sys.exit(f"mask of the tree's launch ({shape}) differs from the reference")
        cells = int((prefix_lens + tree.width).sum()) * tree.width
        for whole in (False, True):
            mask = torch.randint(0, 2, (cells + 5000,), dtype=torch.uint8, device=DEVICE)
            other = mask.clone()
            write_masks(mask, tree, prefix_lens, whole=whole)
            write_by_rows(other, tree, prefix_lens, whole=whole)
            if not torch.equal(mask, other):
                sys.exit(f"mask ({shape}, whole {whole}) differs from the reference")
        targets = likely_targets(tree, seed)
        root_only = torch.arange(batch, device=DEVICE) % 3 == 1
        for only in (None, root_only):
            kept = {"prefix_lens": prefix_lens, "block_size": horizon + 1, "root_only": only}
            compare(f"accept ({shape})", *(walk(tree, targets, **kept) for walk in (accept_by_walk, accept_by_closure)))


def compare_fit(batch: int, k: int, seed: int) -> None:
    """Some steps of the fit of the exponents, in float32 and in float64."""
    from sglang.srt.speculative.ddtree.calibration import Calibration, update_by_tensors
    from sglang.srt.speculative.ddtree.calibration_kernel import update

    mine, again, other = (Calibration("auto", BLOCK - 1, DEVICE).state for _ in range(3))
    for step in range(3):
        told = labels(batch, k, seed + step)
        only = torch.arange(batch, device=DEVICE) % 3 == 1 if step else None
        for state, by in ((mine, update), (again, update), (other, update_by_tensors)):
            by(state, *told, only)
    if not torch.equal(mine, again):
        sys.exit(f"fit (batch {batch}, {k} choices): two runs differ\n{mine}\n{again}")
    if not torch.allclose(mine[:2], other[:2], atol=2e-3) or not torch.allclose(mine, other, atol=0.1, rtol=2e-2):
        sys.exit(f"fit (batch {batch}, {k} choices) differs from the reference\n{mine}\n{other}")


def compare_head(
    rows: int,
    org: int,
    added: int,
    k: int,
    dtype: torch.dtype,
    *,
    ranks: int = 1,
    cap: float | None = None,
    seed: int = 0,
) -> None:
    """Choices over a padded, possibly sharded vocabulary; sums against float64."""
    from sglang.srt.speculative.ddtree import head_kernel, head_reference

    shards = shards_of(rows, org, added, dtype, ranks=ranks, seed=seed)
    given = torch.tensor([1.4, 0.6, 1.0], device=DEVICE)
    for exponents, moments in ((None, True), (given, True), (given, False)):
        options = {"scale": 0.5 if cap else None, "cap": cap, "exponents": exponents, "moments": moments}
        results, gathered = [], []
        for choose, wide in ((head_kernel.choose, False), (head_reference.choose, True)):
            group = Ranks(ranks)
            if wide and exponents is not None:
                options["exponents"] = exponents.double()
            for _ in range(2 if ranks > 1 else 1):
                last = [
                    choose(part.double() if wide else part, k, columns, group=group, **options)
                    for part, columns in shards
                ]
            results.append(last)
            gathered.append({part.shape for part in group.parts})
        shape = f"{rows} rows, {org}+{added} tokens, k {k}, {dtype}, {ranks} ranks, soft cap {cap}"
        if gathered[0] != gathered[1]:
            sys.exit(f"head ({shape}): the kernels gather {gathered[0]}, the reference {gathered[1]}")
        for mine in results[0]:
            compare(f"head ({shape})", mine, results[1][0], tolerance=1e-4)
            for field in fields(mine):
                one, other = getattr(mine, field.name), getattr(results[0][0], field.name)
                if one is not None and not torch.equal(one.nan_to_num(), other.nan_to_num()):
                    sys.exit(f"head ({shape}): ranks differ in {field.name}")


def compare_all(small: bool) -> None:
    """Every kernel against its reference; on a GPU at larger shapes too."""
    rounds = [(1, 1, 1, 1), (3, 15, 16, 16), (2, 3, 2, 33), (2, 5, 40, 65)]
    rounds += (
        [] if small else [(5, 15, 64, 64), (32, 15, 64, 64), (48, 7, 16, 15), (3, 15, 256, 256), (2, 15, 255, 255)]
    )
    for seed, shape in enumerate(rounds):
        compare_round(*shape, seed=seed)
    for seed, shape in enumerate([(1, 1), (3, 16)] + ([] if small else [(32, 64), (48, 8), (33, 255)])):
        compare_fit(*shape, seed=seed)
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    compare_head(3, 97, 2, 16, bf16, seed=1)
    compare_head(4, 5003, 3, 7, fp16, cap=3.0)
    compare_head(3, 1003, 3, 16, fp32, ranks=2, seed=3)
    if not small:
        for seed, k in enumerate((1, 8, 15, 64, 65, 256)):
            compare_head(45, 151643, 26, k, bf16, seed=seed)
            compare_head(9, 32007, 0, k, fp32, ranks=4, cap=30.0, seed=seed)
        compare_head(5, 151643, 26, 64, fp16, ranks=2, seed=5)
        compare_head(3, 200, 0, 256, bf16, ranks=2, seed=7)
