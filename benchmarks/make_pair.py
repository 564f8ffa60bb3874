#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train a small target and its DFlash drafter on Python source: a pair that drafts like a real one, for `decode.py`.

    benchmarks/make_pair.py OUT [--source DIR] [--minutes 8 | --steps N] [--size bench|tiny]

Reads every .py file below DIR (default: this Python's library with what is installed in it; some 100 MB make a good
pair) and keeps every twentieth file out, for the prompts. A token is one of the most frequent words, numbers, signs and
indentations, or a byte. Half of the time trains the target, half the drafter against the frozen target. Writes target/,
draft/, prompts.json (64 prompts of 320 token ids) and vocabulary.json. Needs torch and safetensors; one GPU, or a CPU
and `--size tiny` for a try.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import random
import re
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parent))


def read_options() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--source", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--steps", type=int, help="of training each of the two, in the place of --minutes")
    parser.add_argument("--size", choices=("bench", "tiny"), default="bench")
    parser.add_argument("--batch", type=int, help="sequences a step (default: 96 on a GPU, 8 on a CPU)")
    parser.add_argument("--no-compile", action="store_true", help="train without torch.compile")
    return parser.parse_args()


#: Read before torch is imported, which takes seconds and may be missing: `--help` does without.
OPTIONS = read_options() if __name__ == "__main__" else argparse.Namespace()

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from small_models import Drafter, Sizes, Target  # noqa: E402


TINY = {"vocabulary": 512, "hidden": 64, "layers": 4, "draft_layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32}
SIZES = {"bench": Sizes(), "tiny": Sizes(**TINY, mlp=192, block=8, features=(1, 2))}
PIECES = re.compile(r"[A-Za-z_]+|[0-9]|\n *| +|[^A-Za-z0-9_ \n]")
#: The first ids: the end of a file, the mask, 256 bytes.
END, MASK, BYTES = 0, 1, 2
PROMPTS, PROMPT_TOKENS = 64, 320


class Vocabulary:
    """The most frequent pieces of the source, and bytes for all others."""

    def __init__(self, texts: Iterable[str], size: int) -> None:
        counts = collections.Counter(piece for text in texts for piece in PIECES.findall(text))
        frequent = [piece for piece, _ in counts.most_common(size - BYTES - 256)]
        self.ids = {piece: BYTES + 256 + number for number, piece in enumerate(frequent)}

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        found: list[int] = []
        for piece in PIECES.findall(text):
            known = self.ids.get(piece)
            found += [known] if known is not None else [BYTES + byte for byte in piece.encode()]
        return found


class Data:
    """Tokens in one long row, from which pieces are drawn."""

    def __init__(self, texts: list[str], vocabulary: Vocabulary, device: str) -> None:
        ids = [token for text in texts for token in [*vocabulary.encode(text), END]]
        self.tokens = torch.tensor(ids, dtype=torch.int32, device=device)

    def batch(self, rows: int, length: int) -> torch.Tensor:
        """Pieces from anywhere, int64 [rows, length]."""
        device = self.tokens.device
        starts = torch.randint(0, len(self.tokens) - length, (rows, 1), device=device)
        return self.tokens[starts + torch.arange(length, device=device)].long()


def main(options: argparse.Namespace) -> None:
    """Read, train both, write."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = options.batch or (96 if device == "cuda" else 8)
    sizes = SIZES[options.size]
    texts, kept_out = read_source(options.source)
    vocabulary = Vocabulary(texts, sizes.vocabulary)
    data, unseen = (Data(part, vocabulary, device) for part in (texts, kept_out))
    print(f"{len(texts)} files, {len(data.tokens)} tokens; {len(kept_out)} files for the prompts", flush=True)
    limits = {"seconds": options.minutes * 30, "most": options.steps}
    target = Target(sizes).to(device)
    compiled = target if options.no_compile or device == "cpu" else torch.compile(target)
    train("target", target, lambda: target_loss(compiled, target, data, batch), rate=2e-3, **limits)
    print(f"target on files it has not seen: loss {target_loss(target, target, unseen, batch)[0].item():.3f}")
    target.requires_grad_(False)
    drafter = Drafter(sizes).to(device)
    begin_like(drafter, target)
    drafting = drafter if options.no_compile or device == "cpu" else torch.compile(drafter)
    train("drafter", drafter, lambda: draft_loss(drafting, target, data, batch), rate=1e-3, **limits)
    print(f"drafter on unseen files: {draft_loss(drafter, target, unseen, batch)[1].item():.2f} drafts accepted a step")
    write(options.out, sizes, target, drafter)
    (options.out / "prompts.json").write_text(json.dumps(unseen.batch(PROMPTS, PROMPT_TOKENS).tolist()))
    (options.out / "vocabulary.json").write_text(json.dumps(vocabulary.ids))


def read_source(folder: Path) -> tuple[list[str], list[str]]:
    """Texts to train on, and every twentieth for prompts, in a random but fixed order."""
    files = [file for file in sorted(folder.rglob("*.py")) if "test" not in str(file.relative_to(folder))]
    random.Random(0).shuffle(files)  # noqa: S311  (an order, not secrets)
    texts = [text for file in files if 400 < len(text := file.read_text(errors="ignore")) < 200_000]
    if len(texts) < 40:
        sys.exit(f"{folder} holds {len(texts)} Python files to learn from; name a larger folder with --source")
    return [text for i, text in enumerate(texts) if i % 20], texts[::20]


def train(
    name: str,
    model: nn.Module,
    loss_of: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    *,
    rate: float,
    seconds: float,
    most: int | None,
) -> None:
    """Steps of AdamW with a warm-up and a cosine until the time is over, or all `most` steps are made."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.05)
    start, steps, told = time.monotonic(), 0, 0.0
    while (share := steps / most if most else (time.monotonic() - start) / seconds) < 1:
        spent = time.monotonic() - start
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, share / 0.03) * (0.04 + 0.96 * (0.5 + 0.5 * math.cos(math.pi * share)))
        loss, accepted = loss_of()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
        if share - told >= 1 / 20 or steps == 1:
            told = share
            print(f"{name} {spent:4.0f} s, step {steps}: loss {loss.item():.3f}, {accepted.item():.2f}", flush=True)
    print(f"{name}: {steps} steps, loss {loss.item():.3f}", flush=True)


def mixed(device: torch.device) -> torch.autocast:
    """bfloat16 products on a GPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def target_loss(model: nn.Module, target: Target, data: Data, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of the next token, and how often the first choice is right."""
    tokens = data.batch(rows, 385)
    with mixed(tokens.device):
        logits = functional.linear(model(tokens[:, :-1])[0], target.embed_tokens.weight)
    loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    return loss, (logits.argmax(-1) == tokens[:, 1:]).float().mean()


def draft_loss(model: nn.Module, target: Target, data: Data, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy over blocks at random places, early positions first; and the drafts accepted of real text.

    A block begins at an anchor, whose token it knows; it sees the target's features of all that lies before the anchor.
    """
    sizes, length, blocks = target.sizes, 384, 16
    tokens = data.batch(rows, length)
    device = tokens.device
    anchors = torch.randint(8, length - sizes.block, (rows, blocks), device=device)
    positions = (anchors[:, :, None] + torch.arange(sizes.block, device=device)).flatten(1)
    wanted = tokens.gather(1, positions).view(rows, blocks, sizes.block)
    inputs = torch.full_like(wanted, MASK)
    inputs[:, :, 0] = wanted[:, :, 0]
    before = torch.arange(length, device=device).expand(rows, length)
    sees_text = before[:, None] < anchors.repeat_interleave(sizes.block, 1)[:, :, None]
    of_block = torch.arange(blocks, device=device).repeat_interleave(sizes.block)
    sees_block = (of_block[:, None] == of_block).expand(rows, -1, -1)
    mask = torch.cat([sees_text, sees_block], -1)[:, None]
    with torch.no_grad(), mixed(device):
        features = target(tokens)[1]
    with mixed(device):
        hidden = model(target.embed_tokens(inputs.flatten(1)), positions, features, before, mask)
        hidden = hidden.view(rows, blocks, sizes.block, -1)[:, :, 1:]
        logits = functional.linear(hidden, target.embed_tokens.weight)
    drafts = wanted[:, :, 1:]
    losses = functional.cross_entropy(logits.float().flatten(0, 2), drafts.flatten(), reduction="none")
    weights = torch.exp(-torch.arange(sizes.block - 1, device=device) / (sizes.block / 2))
    loss = (losses.view(-1, sizes.block - 1) * weights).mean() / weights.mean()
    return loss, (logits.argmax(-1) == drafts).float().cumprod(-1).sum(-1).mean()


def begin_like(drafter: Drafter, target: Target) -> None:
    """Start the drafter as the target's last layers, which read the mean of the features."""
    for mine, theirs in zip(reversed(drafter.layers), reversed(target.layers), strict=False):
        mine.load_state_dict(theirs.state_dict())
    drafter.norm.load_state_dict(target.norm.state_dict())
    count, width = len(target.sizes.features), target.sizes.hidden
    with torch.no_grad():
        drafter.fc.weight.copy_(torch.eye(width, device=drafter.fc.weight.device).repeat(1, count) / count)


def write(out: Path, sizes: Sizes, target: Target, drafter: Drafter) -> None:
    """Both checkpoints in bfloat16."""
    for name, model, prefix in (("target", target, "model."), ("draft", drafter, "")):
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        weights = {
            prefix + key: value.to("cpu", torch.bfloat16).contiguous() for key, value in model.state_dict().items()
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        config = sizes.config(MASK, draft=name == "draft")
        (folder / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    main(OPTIONS)
