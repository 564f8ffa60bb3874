# SPDX-License-Identifier: Apache-2.0
"""A pair without the last N tokens of its vocabulary: cut_pair.py PAIR OUT N. Needs torch and safetensors."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file


def main(pair: Path, out: Path, count: int) -> None:
    """Copy the pair and cut every tensor that has a row a token."""
    for source in filter(Path.is_file, pair.rglob("*")):
        copy = out / source.relative_to(pair)
        # Not `copytree`: its folders get the modes of the pair's, and nobody may write into those of a shared one.
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    size = int(json.loads((pair / "target/config.json").read_text())["vocab_size"])
    for config in out.glob("*/config.json"):
        config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": size - count}))
    for file in out.glob("*/*.safetensors"):
        tensors = load_file(file)
        kept = {name: value[: size - count].clone() if len(value) == size else value for name, value in tensors.items()}
        save_file(kept, file, metadata={"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
