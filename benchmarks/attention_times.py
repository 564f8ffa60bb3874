#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The attention kernel of verify steps beside SGLang's.

    benchmarks/attention_times.py [--out FILE] [--heads 32] [--groups 8] [--size 128]

Both are compared with float64 over the shapes that are timed, trees with masks and draft blocks without; a shape at
which ours is further from it than SGLang's, by more than a rounding of bfloat16, ends the run with status 1. Times are
medians of `triton.testing.do_bench_cudagraph`, as steps run them. Needs one GPU and a patched SGLang on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    import torch

#: Requests, nodes of each, committed tokens.
BATCHES, WIDTHS, CONTEXTS = (1, 4, 16, 48), (3, 5, 9, 16, 33, 65), (256, 2048, 8192)
#: Nodes of a step up to which lanes have graphs.
MOST_NODES = 2080
#: Larger errors than SGLang's by so much are none of rounding.
ROUNDING = 2.0**-8


def main() -> int:
    """Compare, time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--batches", type=numbers, default=BATCHES)
    parser.add_argument("--widths", type=numbers, default=WIDTHS)
    parser.add_argument("--contexts", type=numbers, default=CONTEXTS)
    options = parser.parse_args()

    # Behind the arguments: imports take seconds, and `--help` does without.
    import torch
    import triton

    rows = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {options.heads} heads, {options.groups} groups")
    print("requests  nodes  context  masked   SGLang us    ours us   times   error SGLang   error ours", flush=True)
    for batch, width, context in itertools.product(options.batches, options.widths, options.contexts):
        if batch * width > MOST_NODES:
            continue
        for masked in (True, False) if width == 16 else (True,):
            row = measure(options, batch, width, context, masked=masked)
            rows.append(row)
            print(
                f"{batch:>8} {width:>6} {context:>8} {masked!s:>7} {row['sglang us']:>11.1f} {row['ours us']:>10.1f} "
                f"{row['sglang us'] / row['ours us']:>7.2f} {row['sglang error']:>14.5f} {row['error']:>12.5f}",
                flush=True,
            )
    if options.out:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
        options.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    wrong = [row for row in rows if row["error"] > row["sglang error"] + ROUNDING]
    print(f"{len(rows)} shapes, {len(wrong)} further from float64 than SGLang's kernel by more than {ROUNDING}")
    return 1 if wrong else 0


def numbers(text: str) -> tuple[int, ...]:
    """Numbers with commas between them."""
    return tuple(int(part) for part in text.split(","))


def measure(options: argparse.Namespace, batch: int, width: int, context: int, *, masked: bool) -> dict[str, Any]:
    """One shape: both kernels' times and errors."""
    import torch
    from sglang.srt.speculative.ddtree.attention_kernel import attend_by_kernel

    given = inputs(options, batch, width, context, masked=masked)
    scale = options.size**-0.5
    out = {"sglang": torch.empty_like(given["q"]), "ours": torch.empty_like(given["q"])}

    def ours() -> None:
        attend_by_kernel(
            given["q"], given["k"], given["v"], out["ours"], given["k_buffer"], given["v_buffer"], given["kv_indptr"],
            given["kv_indices"], given["mask"], given["mask_indptr"], width=width, scale=scale,
        )  # fmt: skip

    def sglang() -> None:
        extend_attention()(
            given["q"], given["k"], given["v"], out["sglang"], given["k_buffer"], given["v_buffer"],
            given["qo_indptr"], given["kv_indptr"], given["kv_indices"], given["mask"], masked,
            given["mask_indptr"], width, 1.0, 1.0, scale,
        )  # fmt: skip

    ours()
    sglang()
    wanted = reference(given, width, scale)
    errors = {name: (found.double() - wanted).abs().max().item() for name, found in out.items()}
    return {
        "requests": batch, "nodes": width, "context": context, "masked": masked,
        "sglang us": time_of(sglang), "ours us": time_of(ours),
        "sglang error": errors["sglang"], "error": errors["ours"],
    }  # fmt: skip


def time_of(function: Any) -> float:
    """Microseconds of one call in a CUDA graph, the median."""
    import triton

    return triton.testing.do_bench_cudagraph(function, rep=10, return_mode="median") * 1e3


def extend_attention() -> Any:
    """SGLang's function; where it lies depends on the release."""
    try:
        from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
    except ImportError:
        from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd
    return extend_attention_fwd


def inputs(options: argparse.Namespace, batch: int, width: int, context: int, *, masked: bool) -> dict[str, Any]:
    """A step of requests whose contexts differ by up to a quarter, their slots scattered."""
    import torch

    torch.manual_seed(batch * width + context)
    dice = torch.Generator().manual_seed(context)
    lens = (context * (0.875 + 0.25 * torch.rand(batch, generator=dice))).int()
    total = int(lens.sum())

    def filled(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    parents = [torch.randint(0, max(1, node), (1,), generator=dice).item() for node in range(width)]
    tail = torch.eye(width, dtype=torch.bool)
    for node in range(1, width):
        tail[node] |= tail[int(parents[node])]
    parts = [torch.cat([torch.ones(width, int(n), dtype=torch.bool), tail], dim=1).flatten() for n in lens]
    starts = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)
    return {
        "q": filled(batch * width, options.heads, options.size),
        "k": filled(batch * width, options.groups, options.size),
        "v": filled(batch * width, options.groups, options.size),
        "k_buffer": filled(total + 1, options.groups, options.size),
        "v_buffer": filled(total + 1, options.groups, options.size),
        "qo_indptr": torch.arange(0, batch * width + 1, width, device="cuda", dtype=torch.int32),
        "kv_indptr": torch.cat([torch.zeros(1), lens.cumsum(0)]).int().cuda(),
        "kv_indices": (torch.randperm(total, generator=dice) + 1).cuda(),
        "mask": torch.cat(parts).cuda() if masked else None,
        "mask_indptr": starts.cuda() if masked else None,
        "tail": tail.cuda() if masked else torch.ones(width, width, dtype=torch.bool, device="cuda"),
    }


def reference(given: dict[str, Any], width: int, scale: float) -> torch.Tensor:
    """The attention in float64, request by request."""
    import torch

    found, heads, groups = [], given["q"].shape[1], given["k"].shape[1]
    ends = given["kv_indptr"].tolist()
    for request, (first, end) in enumerate(itertools.pairwise(ends)):
        rows, slots = slice(request * width, (request + 1) * width), given["kv_indices"][first:end]
        keys, values = (
            torch.cat([given[f"{name}_buffer"][slots], given[name][rows]]).double().transpose(0, 1) for name in "kv"
        )
        queries = given["q"][rows].double().view(width, groups, heads // groups, -1)
        scores = torch.einsum("wgrd,gnd->gwrn", queries, keys) * scale
        scores[..., end - first :].masked_fill_(~given["tail"][None, :, None], float("-inf"))
        found.append(torch.einsum("gwrn,gnd->wgrd", scores.softmax(dim=-1), values).reshape(width, heads, -1))
    return torch.cat(found)


if __name__ == "__main__":
    sys.exit(main())
