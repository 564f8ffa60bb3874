#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What calibrated trees accept more, offline and exactly: no engine, no GPU, minutes on two cores.

    python benchmarks/calibration.py --pair DIR [--tokens 96] [--prompts 48] [--budgets 7,15,64] [--out FILE.json]

Greedy decoding emits the target's own continuation whatever is drafted, so it is decoded once, and the drafter is run
at every position of it. Then each arm decodes in turn: the overlay's head, trees, accept walk and fit, on these hidden
states. The first half of the prompts is for fitting, the second for judging:

    off      exponents 1
    auto     fitted from the start of the first half to the end of the second, as a server does
    values   what was fitted on the first half, kept
    one      one exponent for all depths, the best of a grid on the first half

and `--shuffle` shows the fit a target that has nothing to do with the drafter for the whole first half, before judging.
Needs torch, Triton and Transformers; the engine environment (`scripts/engine_env`) has them. DIR holds `target/`,
`draft/` (a DFlash drafter like that of `make_pair.py`) and `prompts.json` (lists of token ids).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parent))


def read_options() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=96, help="to decode of each prompt (default %(default)s)")
    parser.add_argument("--prompts", type=int, default=48, help="at most (default %(default)s)")
    parser.add_argument("--budgets", default="7,15,64")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--shuffle", action="store_true", help="also show the fit an unrelated target first")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures here as JSON")
    return parser.parse_args()


#: Read before torch is imported, which takes seconds and may be missing: `--help` does without.
OPTIONS = read_options() if __name__ == "__main__" else argparse.Namespace()

import torch  # noqa: E402

from overlay_modules import overlay_importable  # noqa: E402
from small_models import Drafter, Sizes  # noqa: E402


GRID = (1.1, 1.2, 1.3, 1.4, 1.5, 1.7, 2.0)


@dataclass
class Recorded:
    """The greedy continuations of prompts, and what the drafter makes of each of their positions."""

    #: int64 [prompts, tokens + block].
    tokens: torch.Tensor
    #: Hidden states of a draft block that starts at each position, float32 [prompts, tokens, block - 1, hidden].
    hidden: torch.Tensor
    #: The target's head, float32 [vocabulary, hidden].
    weight: torch.Tensor


def drafter_of(folder: Path) -> tuple[Drafter, dict[str, Any]]:
    """The drafter of a checkpoint, and its config."""
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    sizes = Sizes(
        vocabulary=config["vocab_size"], hidden=config["hidden_size"], draft_layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"], kv_heads=config["num_key_value_heads"], head_dim=config["head_dim"],
        mlp=config["intermediate_size"], block=config["block_size"], theta=config["rope_theta"],
        features=tuple(config["dflash_config"]["target_layer_ids"]),
    )  # fmt: skip
    drafter = Drafter(sizes)
    drafter.load_state_dict(load_file(folder / "model.safetensors"))
    return drafter.float().eval(), config


@torch.inference_mode()
def record(pair: Path, tokens: int, prompts: int) -> Recorded:
    """Decode the prompts of the commonest length greedily, and draft at every position."""
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(pair / "target", dtype=torch.float32).eval()
    drafter, config = drafter_of(pair / "draft")
    block, details = config["block_size"], config["dflash_config"]
    every = json.loads((pair / "prompts.json").read_text())
    lengths = sorted(Counter(map(len, every)))
    embed, texts, hidden = target.get_input_embeddings().weight, [], []
    for length in lengths:
        given = torch.tensor([prompt for prompt in every if len(prompt) == length][: prompts - len(texts)])
        if not len(given):
            continue
        steps, cache = [given], None
        for _ in range(tokens + block):
            out = target(input_ids=steps[-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            steps.append(out.logits[:, -1:].argmax(-1))
        for text in torch.cat(steps, 1):
            states = target(input_ids=text[None], use_cache=False, output_hidden_states=True, logits_to_keep=1)
            features = torch.cat([states.hidden_states[layer + 1] for layer in details["target_layer_ids"]], -1)
            starts = torch.arange(length, length + tokens)
            inputs = torch.full((tokens, block), details["mask_token_id"])
            inputs[:, 0] = text[starts]
            before = torch.arange(len(text)).expand(tokens, -1)
            seen = torch.cat([before < starts[:, None], torch.ones(tokens, block, dtype=torch.bool)], 1)
            drafted = drafter(
                embed[inputs],
                starts[:, None] + torch.arange(block),
                features.expand(tokens, -1, -1),
                before,
                seen[:, None, None].expand(-1, 1, block, -1),
            )
            texts.append(text[length:])
            hidden.append(drafted[:, 1:])
    return Recorded(torch.stack(texts), torch.stack(hidden), target.lm_head.weight.detach().clone())


class Decoder:
    """Decodes recorded texts with trees."""

    def __init__(self, recorded: Recorded, concurrency: int) -> None:
        from sglang.srt.speculative.ddtree.draft_head import DraftHead

        self.recorded, self.concurrency = recorded, concurrency
        rows = recorded.weight.shape[0]
        shard = SimpleNamespace(
            num_org_elements=rows, num_org_elements_padded=rows, num_added_elements=0,
            org_vocab_start_index=0, added_vocab_start_index=rows,
        )  # fmt: skip
        self._head = DraftHead(
            SimpleNamespace(weight=recorded.weight, shard_indices=shard), None, SimpleNamespace(world_size=1)
        )

    @property
    def positions(self) -> int:
        """Draft positions."""
        return self.recorded.hidden.shape[2]

    @torch.inference_mode()
    def accept_length(
        self, texts: list[int], budget: int, calibration: Any, *, chain: bool = False, shuffle: int | None = None
    ) -> float:
        """Tokens a step and request; the calibration learns meanwhile.

        Args:
            texts: Which of the recorded ones.
            budget: Draft nodes of a tree.
            calibration: A `Calibration` for the decoder's positions.
            chain: Verify the chain of the same width instead.
            shuffle: Seed of a random order of the target's tokens, which are then no continuation of anything.
        """
        from sglang.srt.speculative.ddtree.accept import accept
        from sglang.srt.speculative.ddtree.tree import build_tree

        order = torch.arange(self.recorded.weight.shape[0])
        if shuffle is not None:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(shuffle))
        waiting, running, steps, emitted = list(texts), [], 0, 0
        while waiting or running:
            while waiting and len(running) < self.concurrency:
                running.append((waiting.pop(0), 0))
            which, places = (torch.tensor(part) for part in zip(*running, strict=True))
            rows = self.recorded.hidden[which, places].flatten(0, 1)
            ahead = self.recorded.tokens[which[:, None], places[:, None] + 1 + torch.arange(self.positions)]
            choices = self._head.top_log_probs(
                rows, 1 if chain else budget, calibration.exponents, moments=calibration.is_fitted
            )
            shape = (len(running), self.positions, -1)
            tree = build_tree(
                self.recorded.tokens[which, places], choices.log_probs.view(shape), choices.token_ids.view(shape),
                budget, chain_seed=chain,
            )  # fmt: skip
            # Only nodes on the text's own path are ever reached, so a token by depth is enough.
            wanted = torch.nn.functional.pad(order[ahead], (0, 1)).gather(1, tree.depths)
            acceptance = accept(tree, wanted, prefix_lens=places, block_size=self.positions + 1)
            calibration.observe(choices, acceptance)
            moved = [
                (text, place + n) for (text, place), n in zip(running, acceptance.commit_lens.tolist(), strict=True)
            ]
            steps, emitted = steps + len(running), emitted + int(acceptance.commit_lens.sum())
            running = [(text, place) for text, place in moved if place < self.recorded.hidden.shape[1]]
        return emitted / steps


def judge(decoder: Decoder, budget: int, fit: list[int], held: list[int], *, shuffle: bool) -> dict[str, Any]:
    """Accept lengths of all arms on the second half, with one budget."""
    from sglang.srt.speculative.ddtree.calibration import Calibration

    def calibration(text: str) -> Calibration:
        return Calibration.of(text, decoder.positions, "cpu")

    found: dict[str, Any] = {"budget": budget}
    found["chain"] = decoder.accept_length(held, decoder.positions, calibration("off"), chain=True)
    found["off"] = decoder.accept_length(held, budget, calibration("off"))
    found["off, first half"] = decoder.accept_length(fit, budget, calibration("off"))
    auto = calibration("auto")
    found["auto, first half"] = decoder.accept_length(fit, budget, auto)
    found["fitted"] = auto.report()["exponents"]
    values = ",".join(map(str, found["fitted"]))
    found["auto"] = decoder.accept_length(held, budget, auto)
    found["values"] = decoder.accept_length(held, budget, calibration(values))
    on_fit = {one: decoder.accept_length(fit, budget, calibration(str(one))) for one in GRID}
    found["best one"] = max(on_fit, key=lambda one: on_fit[one])
    found["one"] = decoder.accept_length(held, budget, calibration(str(found["best one"])))
    if shuffle:
        misled = calibration("auto")
        decoder.accept_length(fit, budget, misled, shuffle=0)
        found["misled to"] = misled.report()["exponents"]
        found["auto, misled before"] = decoder.accept_length(held, budget, misled)
    return found


def main(options: argparse.Namespace) -> None:
    """Record, judge, print."""
    torch.set_num_threads(options.threads)
    with overlay_importable():
        decoder = Decoder(record(options.pair, options.tokens, options.prompts), options.concurrency)
        count = len(decoder.recorded.tokens)
        fit, held = list(range(0, count, 2)), list(range(1, count, 2))
        results = []
        for budget in map(int, options.budgets.split(",")):
            found = judge(decoder, budget, fit, held, shuffle=options.shuffle)
            results.append(found)
            gains = {name: f"{found[name] / found['off'] - 1:+.1%}" for name in ("auto", "values", "one")}
            if options.shuffle:
                gains["misled before"] = f"{found['auto, misled before'] / found['off'] - 1:+.1%}"
            first = found["auto, first half"] / found["off, first half"] - 1
            print(
                f"budget {budget}: chain {found['chain']:.3f}, off {found['off']:.3f}, auto {found['auto']:.3f}; "
                f"{gains}, auto on the first half {first:+.1%}; "
                f"exponents {' '.join(f'{x:.2f}' for x in found['fitted'])}",
                flush=True,
            )
    if options.out:
        figures = {
            "command": f"benchmarks/calibration.py --pair {options.pair.name} --tokens {options.tokens} "
            f"--prompts {options.prompts} --concurrency {options.concurrency}{' --shuffle' * options.shuffle}",
            "machine": f"{platform.machine()} CPU, torch {torch.__version__}",
            "date": time.strftime("%Y-%m-%d"),
            "prompts": count,
            "results": results,
        }
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main(OPTIONS)
