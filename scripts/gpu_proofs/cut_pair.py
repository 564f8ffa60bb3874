# SPDX-License-Identifier: Apache-2.0
"""A pair without the last N tokens of its vocabulary: cut_pair.py PAIR OUT N. Needs torch and safetensors."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file, save_file


if TYPE_CHECKING:
    import torch


def main(pair: Path, out: Path, count: int) -> None:
    """Copy the pair and cut every tensor that has a row a token; a mask token that goes with them becomes the last."""
    for source in filter(Path.is_file, pair.rglob("*")):
        copy = out / source.relative_to(pair)
        # Not `copytree`: its folders get the modes of the pair's, and nobody may write into those of a shared one.
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    size = int(json.loads((pair / "target/config.json").read_text())["vocab_size"])
    draft = json.loads((pair / "draft/config.json").read_text())
    left, mask = size - count, int(draft["dflash_config"]["mask_token_id"])
    for config in out.glob("*/config.json"):
        given = json.loads(config.read_text()) | {"vocab_size": left}
        if "dflash_config" in given:
            given["dflash_config"]["mask_token_id"] = min(mask, left - 1)
        config.write_text(json.dumps(given))
    for file in out.glob("*/*.safetensors"):
        kept = {
            name: cut(value, left, mask) if len(value) == size else value for name, value in load_file(file).items()
        }
        save_file(kept, file, metadata={"format": "pt"})


def cut(rows: torch.Tensor, left: int, mask: int) -> torch.Tensor:
    """The first rows of a tensor, the mask token's among them."""
    kept = rows[:left].clone()
    if mask >= left:
        kept[-1] = rows[mask]
    return kept


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
