#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long the kernels of one DDTREE round take on this GPU, and that they give what their references give.

    python benchmarks/kernels.py [--out FILE.json] [--quick]

Every kernel is first compared with its PyTorch reference (float64 where scores are summed) over odd shapes: exit 1 at
the first difference. Then `triton.testing.do_bench` times them at block size 16, each as a captured CUDA graph: tree,
mask and accept, apart and together, beside the paper's heap (Algorithm 1 of arXiv 2604.12989) in Python on host copies;
and the head over 151936 tokens beside `torch.topk` + `torch.logsumexp`. "host" is what the host needs to launch them.

Needs torch, Triton and a CUDA GPU; SGLang need not be installed. `TRITON_INTERPRET=1` compares on the CPU and times
nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton


PROJECT = Path(__file__).resolve().parent.parent
BLOCK, VOCABULARY = 16, 151936
BATCHES, BUDGETS = (1, 8, 32, 48), (16, 64, 256)
#: What issue and README promise: microseconds for tree, mask and accept together at budget 64.
BOUNDS, BOUNDED = {1: 60.0, 32: 120.0}, 64
ALONE = SimpleNamespace(world_size=1)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@contextlib.contextmanager
def overlay_importable() -> Any:
    """Make the overlay's own modules importable as they are inside SGLang, whether or not there is one."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "sglang/srt/speculative"
        package.mkdir(parents=True)
        for parent in (package, package.parent, package.parent.parent):
            (parent / "__init__.py").touch()
        (package / "ddtree").symlink_to(PROJECT / "overlay/srt/speculative/ddtree")
        sys.path.insert(0, folder)
        yield


# Inputs.


def choices(batch: int, k: int, seed: int, horizon: int = BLOCK - 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and ids as a drafter gives them: confident at first, flatter with depth."""
    generator = torch.Generator().manual_seed(seed)
    sharpness = torch.linspace(4.0, 1.5, horizon).view(1, horizon, 1)
    logits = torch.randn((batch, horizon, max(2 * k, 64)), generator=generator) * sharpness
    log_probs, ids = torch.log_softmax(logits, dim=-1).sort(dim=-1, descending=True)
    return log_probs[..., :k].contiguous().to(DEVICE), ids[..., :k].contiguous().to(DEVICE)


def likely_targets(tree: Any, seed: int) -> torch.Tensor:
    """Target tokens that follow the tree for some steps: at each node one of its children, or a token of no child."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.full(tree.tokens.shape, -1, dtype=torch.int64)
    tokens, parents = tree.tokens.cpu(), tree.parents.cpu()
    for request in range(tokens.shape[0]):
        for node in range(tokens.shape[1] - 1, 0, -1):
            if parents[request, node] >= 0 and torch.rand(1, generator=generator) < 0.8:
                targets[request, parents[request, node]] = tokens[request, node]
    return targets.to(DEVICE)


# Comparing.


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


def labels(batch: int, k: int, seed: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """What a step tells the fit of the exponents: choices, emitted tokens, accept lengths."""
    from sglang.srt.speculative.ddtree.draft_head import Choices

    log_probs, ids = choices(batch, max(k, 64), seed)
    logits = log_probs.flatten(0, 1) + 3.0
    scaled = torch.log_softmax(1.3 * logits, dim=-1)
    mean = (scaled.exp() * logits).sum(dim=-1)
    kept = [part[:, :k].contiguous() for part in (scaled, ids.flatten(0, 1), logits)]
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.randint(0, k, (batch, BLOCK - 1, 1), generator=generator).to(DEVICE)
    tokens = torch.nn.functional.pad(kept[1].view(batch, BLOCK - 1, k).gather(2, ranks).squeeze(2), (0, 1))
    accept_lens = torch.randint(0, BLOCK, (batch,), generator=generator).to(DEVICE)
    return Choices(*kept, mean, mean, torch.logsumexp(logits, dim=-1)), tokens, accept_lens


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


class Ranks:
    """Tensor-parallel ranks one after the other: a first pass records what each gathers, a second answers."""

    def __init__(self, size: int) -> None:
        self.world_size = size
        self.parts: list[torch.Tensor] = []

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """What all ranks gathered."""
        self.parts.append(tensor)
        parts = self.parts[: self.world_size] if len(self.parts) > self.world_size else [tensor] * self.world_size
        return torch.cat(parts, dim=dim)


def shards_of(
    rows: int, org: int, added: int, dtype: torch.dtype, *, ranks: int, seed: int
) -> list[tuple[torch.Tensor, Any]]:
    """Every rank's logits, padded with columns that would win if they were read, and which of them are tokens."""
    from sglang.srt.speculative.ddtree.draft_head import Columns

    torch.manual_seed(seed)
    org_size, added_size = (-(-max(size, 1) // (64 * ranks)) * 64 for size in (org, added))
    logits = torch.randn(rows, org + added, device=DEVICE) * 4
    if seed % 2:
        logits = logits.round()
    if rows > 2:
        logits[1, org // 2] = float("nan")
        logits[2, 3:] = float("-inf")
    shards = []
    for rank in range(ranks):
        parts = (
            (logits[:, :org][:, rank * org_size : (rank + 1) * org_size], org_size),
            (logits[:, org:][:, rank * added_size : (rank + 1) * added_size], added_size),
        )
        padded = [torch.nn.functional.pad(part, (0, size - part.shape[1]), value=99.0) for part, size in parts]
        columns = Columns(
            org=parts[0][0].shape[1],
            first_org_id=rank * org_size,
            added_start=org_size,
            added=parts[1][0].shape[1],
            first_added_id=org + rank * added_size,
        )
        shards.append((torch.cat(padded, dim=1).to(dtype), columns))
    return shards


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
    for exponents in (None, torch.tensor([1.4, 0.6, 1.0], device=DEVICE)):
        options = {"scale": 0.5 if cap else None, "cap": cap, "exponents": exponents}
        results = []
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
        shape = f"{rows} rows, {org}+{added} tokens, k {k}, {dtype}, {ranks} ranks, soft cap {cap}"
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


# Timing.


def gpu_us(function: Callable[[], Any]) -> float:
    """Median microseconds on the GPU of a function captured into a CUDA graph, the cache flushed before each run.

    Eager launches would be timed by how fast the host is.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        function()
    return 1000 * float(triton.testing.do_bench(graph.replay, warmup=25, rep=100, return_mode="median"))


def host_us(function: Callable[[], Any]) -> float:
    """Median microseconds that the host needs to launch it, while the GPU has time."""
    times = []
    for _ in range(30):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


def heap_trees(log_probs: torch.Tensor, token_ids: torch.Tensor, budget: int) -> list[list[tuple[int, int, int]]]:
    """Algorithm 1 as the paper has it: copies to the host, one heap a request. (token, parent, depth) of each node."""
    trees = []
    for lp, ids in zip(log_probs.tolist(), token_ids.tolist(), strict=True):
        nodes: list[tuple[int, int, int]] = []
        heap = [(-lp[0][0], 0, 0, 0, 0.0)]  # negative score, parent, depth, rank, parent's score
        while heap and len(nodes) < budget:
            negative, parent, depth, rank, base = heapq.heappop(heap)
            nodes.append((ids[depth][rank], parent, depth + 1))
            if rank + 1 < len(lp[depth]):
                heapq.heappush(heap, (-(base + lp[depth][rank + 1]), parent, depth, rank + 1, base))
            if depth + 1 < len(lp):
                heapq.heappush(heap, (negative - lp[depth + 1][0], len(nodes), depth + 1, 0, -negative))
        trees.append(nodes)
    return trees


def time_round(batch: int, budget: int) -> dict[str, Any]:
    """Tree, mask and accept of one step, apart and together."""
    from sglang.srt.speculative.ddtree.accept import accept
    from sglang.srt.speculative.ddtree.calibration import Calibration
    from sglang.srt.speculative.ddtree.calibration_kernel import update
    from sglang.srt.speculative.ddtree.tree import build_tree
    from sglang.srt.speculative.ddtree.tree_mask import write_tree_mask

    log_probs, ids = choices(batch, budget, seed=1)
    roots = torch.arange(batch, device=DEVICE)
    prefix_lens = torch.full((batch,), 1000, device=DEVICE)
    width = budget + 1
    out = torch.empty(batch * width * (1000 + width), dtype=torch.uint8, device=DEVICE)

    def grow() -> Any:
        return build_tree(roots, log_probs, ids, budget, prefix_lens=prefix_lens)

    tree = grow()
    targets = likely_targets(tree, seed=1)

    def mask(whole: bool = False) -> None:
        write_tree_mask(out, tree, prefix_lens, whole=whole)

    def walk() -> Any:
        return accept(tree, targets, prefix_lens=prefix_lens, block_size=BLOCK)

    def together() -> None:
        mine = build_tree(roots, log_probs, ids, budget, prefix_lens=prefix_lens, mask=out)
        accept(mine, targets, prefix_lens=prefix_lens, block_size=BLOCK)

    def seeded() -> Any:
        return build_tree(roots, log_probs, ids, budget, prefix_lens=prefix_lens, chain_seed=True)

    def linked() -> Any:
        return build_tree(roots, log_probs, ids, budget, prefix_lens=prefix_lens, links=True)

    calibration, told = Calibration("auto", BLOCK - 1, DEVICE), labels(batch, budget, seed=1)

    def fit() -> None:
        update(calibration.state, *told)

    start = time.perf_counter()
    heap_trees(log_probs, ids, budget)
    heap = 1e6 * (time.perf_counter() - start)
    parts = {"tree": grow, "mask": mask, "accept": walk, "fit": fit, "together": together}
    on_gpu = {**parts, "seeded": seeded, "with links": linked, "whole mask": lambda: mask(True)}
    return {
        "batch": batch,
        "budget": budget,
        **{name: gpu_us(part) for name, part in on_gpu.items()},
        **{f"host {name}": host_us(part) for name, part in parts.items()},
        "paper's heap": heap,
    }


def time_head(batch: int, k: int) -> dict[str, Any]:
    """The head's kernels behind its matrix product."""
    from sglang.srt.speculative.ddtree import head_kernel
    from sglang.srt.speculative.ddtree.draft_head import Columns

    logits = torch.randn(batch * (BLOCK - 1), VOCABULARY, device=DEVICE).mul_(3).bfloat16()
    columns = Columns(VOCABULARY, 0, VOCABULARY, 0, VOCABULARY)
    exponents = torch.full((BLOCK - 1,), 1.2, device=DEVICE)

    def run(exponents: torch.Tensor | None = None) -> Any:
        return head_kernel.choose(logits, k, columns, scale=None, cap=None, exponents=exponents, group=ALONE)

    def torchs() -> Any:
        wide = logits.float()
        return torch.topk(wide, k, dim=-1), torch.logsumexp(wide, dim=-1)

    return {
        "batch": batch,
        "k": k,
        "head": gpu_us(run),
        "with exponents": gpu_us(lambda: run(exponents)),
        "host head": host_us(run),
        "torch": 1000 * float(triton.testing.do_bench(torchs, return_mode="median")),
    }


def table(title: str, lines: list[dict[str, Any]]) -> None:
    """Print figures in columns."""
    print(f"\n{title}")
    names = list(lines[0])
    print("  ".join(f"{name:>{max(len(name), 7)}}" for name in names))
    for line in lines:
        cells = (f"{line[n]:.1f}" if isinstance(line[n], float) else str(line[n]) for n in names)
        print("  ".join(f"{cell:>{max(len(name), 7)}}" for name, cell in zip(names, cells, strict=True)))


def name_of_machine() -> str:
    """What was measured on."""
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}"


def time_all(
    batches: tuple[int, ...], budgets: tuple[int, ...], out: Path | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rounds and heads, ascending; what has a bound is timed first, and `out` is written after every figure."""
    rounds: list[dict[str, Any]] = []
    heads: list[dict[str, Any]] = []
    for budget in sorted(budgets, key=lambda budget: (budget != BOUNDED, budget)):
        for function, found in ((time_round, rounds), (time_head, heads)):
            for batch in batches:
                found.append(function(batch, budget))
                if out:
                    facts = {"machine": name_of_machine(), "date": time.strftime("%Y-%m-%d")}
                    draft = out.with_name(out.name + ".draft")
                    draft.write_text(json.dumps(facts | {"rounds": rounds, "heads": heads}, indent=1) + "\n")
                    draft.rename(out)
    rounds.sort(key=lambda line: (line["budget"], line["batch"]))
    heads.sort(key=lambda line: (line["k"], line["batch"]))
    return rounds, heads


def main() -> int:
    """Compare, time, print; exit 1 on a difference, 3 when a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures here as JSON")
    parser.add_argument("--quick", action="store_true", help="batches 1 and 32 at budget 64 alone")
    parser.add_argument("--compare", action="store_true", help="compare only")
    parser.add_argument("--no-compare", action="store_true", help="do not compare: for sizing alone")
    options = parser.parse_args()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if DEVICE == "cpu" and not interpreted:
        parser.error("this needs a GPU, or TRITON_INTERPRET=1 to compare on the CPU")
    with overlay_importable():
        start = time.monotonic()
        if not options.no_compare:
            compare_all(small=interpreted)
            print(f"kernels equal their references on {DEVICE} ({time.monotonic() - start:.0f} s)", flush=True)
        if interpreted or options.compare:
            return 0
        batches, budgets = ((1, 32), (64,)) if options.quick else (BATCHES, BUDGETS)
        rounds, heads = time_all(batches, budgets, options.out)
    machine = name_of_machine()
    print(f"{machine}; microseconds, block size {BLOCK}")
    table("tree, mask, accept", rounds)
    table(f"head over {VOCABULARY} tokens, bfloat16, without its matrix product", heads)
    missed = [r for r in rounds if r["budget"] == BOUNDED and r["together"] > BOUNDS.get(r["batch"], float("inf"))]
    print(f"\ntogether at budget {BOUNDED}: bounds {BOUNDS} us {'MISSED' if missed else 'kept'}")
    return 3 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
