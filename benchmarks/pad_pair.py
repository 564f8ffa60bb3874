#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Give a small target and its DFlash drafter the cost of a large model, and keep what they say.

    benchmarks/pad_pair.py PAIR OUT [--like 8b] [--dtype bfloat16]

PAIR holds `target/`, `draft/` and `prompts.json`; OUT gets the same with the shapes of a Qwen3 of that size. What is
added is zero (`padding.py` says where the numbers go), so the files are full of holes and take seconds and megabytes to
write, though they read as the gigabytes that they stand for. Only Qwen3 targets in bfloat16 or float32 are known. With
--dtype the pair's numbers are rounded first, as an engine of that type does when it loads them.

Zeros cost a GPU what other numbers cost where memory decides the time. Large matrix products of zeros draw less power,
so that the clock may stay higher: at large batches all arms of a comparison are somewhat faster than on real weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parent))


def read_options() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--like", default="8b", help="8b, 4b, 1b, or the numbers of `padding.Shape` with commas")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="of the padded pair; default: as it is")
    return parser.parse_args()


#: Read before torch is imported, which takes seconds and may be missing: `--help` does without.
OPTIONS = read_options() if __name__ == "__main__" else argparse.Namespace()

import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402

from padding import LIKE, Entry, Shape, pad_draft, pad_target  # noqa: E402


#: Bytes of a shard.
SHARD = 4 << 30
DTYPES = {"bfloat16": (torch.bfloat16, "BF16"), "float32": (torch.float32, "F32")}


def main(options: argparse.Namespace) -> None:
    """Pad and say how long it took."""
    start = time.monotonic()
    size = pad_pair(options.pair, options.out, shape_of(options.like), options.dtype)
    print(f"{options.out}: {size / 1e9:.2f} GB like {options.like} in {time.monotonic() - start:.1f} s")


def shape_of(text: str) -> Shape:
    """A shape by its name or by its numbers."""
    return LIKE.get(text) or Shape(*map(int, text.split(",")))


def pad_pair(pair: Path, out: Path, shape: Shape, wanted: str | None = None) -> int:
    """Write the padded pair of `pair` to `out`, in the type that is wanted or its own: its bytes.

    Raises:
        ValueError: The pair is of a kind that cannot be padded.
    """
    total = 0
    for part, pad in (("target", pad_target), ("draft", pad_draft)):
        config = json.loads((pair / part / "config.json").read_text())
        dtype = config.get("dtype") or config.get("torch_dtype")
        if dtype not in DTYPES:
            raise ValueError(f"{pair / part} is in {dtype}; only {' and '.join(DTYPES)} can be padded")
        weights = read_weights(pair / part)
        if wanted and wanted != dtype:
            dtype, config = wanted, config | {key: wanted for key in ("dtype", "torch_dtype") if key in config}
            weights = {name: weight.to(DTYPES[dtype][0]) for name, weight in weights.items()}
        padded, entries = pad(config, weights, shape)
        (out / part).mkdir(parents=True, exist_ok=True)
        (out / part / "config.json").write_text(json.dumps(padded, indent=1))
        total += write_weights(out / part, entries, *DTYPES[dtype])
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            if (pair / part / name).exists():
                shutil.copyfile(pair / part / name, out / part / name)
    shutil.copyfile(pair / "prompts.json", out / "prompts.json")
    return total


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as source:
            weights |= {name: source.get_tensor(name) for name in source.keys()}  # noqa: SIM118  (no mapping)
    return weights


def write_weights(folder: Path, entries: list[Entry], dtype: torch.dtype, code: str) -> int:
    """Write the tensors in shards, zeros as holes: the bytes that the shards stand for."""
    shards: list[list[tuple[Entry, int]]] = [[]]
    room = SHARD
    for entry in entries:
        size = torch.Size(entry.shape).numel() * dtype.itemsize
        if size > room and shards[-1]:
            shards.append([])
            room = SHARD
        shards[-1].append((entry, size))
        room -= size
    total, places = 0, {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        total += write_shard(folder / name, shard, dtype, code)
        places |= {entry.name: name for entry, _ in shard}
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def write_shard(file: Path, shard: list[tuple[Entry, int]], dtype: torch.dtype, code: str) -> int:
    """One safetensors file: the header's length in 8 bytes, the header, and the tensors one behind the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry, size in shard:
        header[entry.name] = {"dtype": code, "shape": entry.shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + offset)
    data = torch.from_file(str(file), shared=True, size=8 + len(text) + offset, dtype=torch.uint8)
    start = 8 + len(text)
    for entry, size in shard:
        entry.fill(data[start : start + size].view(dtype).view(entry.shape))
        start += size
    return offset


if __name__ == "__main__":
    main(OPTIONS)
