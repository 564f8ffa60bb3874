# SPDX-License-Identifier: Apache-2.0
"""The arms of `decode.py`: which engine serves which, with which arguments, and whether the GPU holds all of them."""

from __future__ import annotations

import argparse
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any


#: Rendezvous ports lie below the range from which a kernel gives ports away; two runs begin at ports of their own.
FIRST_PORT = 20500 + os.getpid() % 110 * 100
#: A request gets so many times the tokens that it has to get at most, while others wait for theirs.
FURTHER = 4
#: Of the budgets of --more those above the first are measured up to the second, a concurrency.
WIDE, FEW = 64, 8
#: KV slots that a request holds beside its prompt and output: two steps of a wide tree.
STEPS_TOKENS = 300
#: What --arms may name beside budgets; `block` is the budget with as many nodes as DFLASH's chain has.
ARM_NAMES = ("plain", "DFLASH", "auto", "chain", "block")
#: The end of the names of arms in the engine without calibration.
UNCALIBRATED = ", uncalibrated"
#: Left out in this order when the GPU does not hold all engines.
DISPENSABLE = ("ddtree-more", "unpadded", "uncalibrated")
#: Bytes beside weights and KV: context, graphs, logits; as an H200 showed with a vocabulary of 152 k.
BESIDE = {"plain": 3 << 30, "unpadded": 3 << 30, "dflash": 4 << 30, "ddtree-more": 20 << 30}
BESIDE_OF_LANES = 8 << 30


@dataclass(frozen=True)
class Arm:
    """One way to decode: an engine, and the budget that its requests ask for."""

    name: str
    engine: str
    budget: int | str | None = None

    @property
    def is_auto(self) -> bool:
        """Whether its server chooses, with calibration or without."""
        return self.name.startswith("DDTREE auto")

    def rows(self, block: int) -> int:
        """Rows that the target verifies per request and step, as far as the arm decides it."""
        return self.budget + 1 if isinstance(self.budget, int) else block

    def served(self, size: int, block: int, rows: float) -> bool:
        """Whether the arm has a graph for so many requests, when steps of up to `rows` nodes have one."""
        if self.engine == "ddtree-more" and self.rows(block) > WIDE + 1 and size > FEW:
            return False
        return self.budget in (None, "chain") or size * self.rows(block) <= rows


class Bench:
    """What a run starts: engine arguments by name, and the arms that they serve.

    Lanes of a default `auto` are not captured for every batch size. The budgets of --more come from an engine of their
    own, so that `auto` chooses among its own lanes only, and wide trees do not size everything beside it.
    """

    def __init__(self, options: argparse.Namespace, pair: Path) -> None:
        self.options, self.pair = options, pair
        draft = json.loads((pair / "draft/config.json").read_text())
        self.block = int(draft.get("block_size") or draft["dflash_config"]["block_size"])
        self.engines: dict[str, dict[str, Any]] = {}
        self.arms: list[Arm] = []
        self._add("plain", "plain")
        self._add("DFLASH", "dflash", self._drafting("DFLASH"))
        trees = self._drafting("DDTREE")
        budgets = numbers(options.budgets)
        if not self.has_lanes():
            for budget in budgets or [16, 64]:
                self._add(f"DDTREE {budget}", f"ddtree-{budget}", trees | {"speculative_ddtree_budget": budget})
            return
        lanes: dict[str, Any] = trees | {"speculative_ddtree_budget": "auto"}
        if budgets:
            lanes["speculative_ddtree_budgets"] = sorted({*budgets, self.block - 1})
        self._add("DDTREE auto", "ddtree", lanes)
        if options.without_calibration:
            self._add(f"DDTREE auto{UNCALIBRATED}", "uncalibrated", lanes | {"speculative_ddtree_calibration": "off"})
        main = lanes.get("speculative_ddtree_budgets") or default_lanes(self.block)
        more = [number for number in numbers(options.more) if number not in main and self.wanted(Arm("", "", number))]
        narrow = [budget for budget in more if budget <= WIDE]
        sizes = [size for size in concurrencies(options) if narrow or size <= FEW]
        if more and sizes:
            # The configured one has graphs for every batch, the others as far as memory goes.
            widths = {"speculative_ddtree_budget": max(narrow or more), "speculative_ddtree_budgets": more}
            given = engine_arguments(options, pair, sizes, beside=max(STEPS_TOKENS, 3 * max(more)))
            self.engines["ddtree-more"] = given | trees | widths

    def _add(self, name: str, engine: str, extra: dict[str, Any] | None = None) -> None:
        arm, trees = Arm(name, engine), bool(extra) and extra["speculative_algorithm"] == "DDTREE"
        if trees or self.wanted(arm):
            given = engine_arguments(self.options, self.pair, concurrencies(self.options))
            self.engines[engine] = given | (extra or {})
        self.arms += [arm] if self.wanted(arm) else []

    def wanted(self, arm: Arm) -> bool:
        """Whether --arms names it; an engine of trees has arms of its own beside the one that it is added with."""
        named = words(self.options.arms)
        kind = arm.name.removeprefix("DDTREE ").removesuffix(UNCALIBRATED) if arm.budget is None else arm.budget
        return not named or str(kind) in named or (kind == self.block - 1 and "block" in named)

    def add_budgets(self, listed: dict[str, Any]) -> None:
        """An arm for every budget that an engine says it has captured (`listed`, by engine), and the chain."""
        kinds = {"ddtree": ("chain",), "uncalibrated": ("chain",), "ddtree-more": ()}
        for name, others in kinds.items():
            if name not in listed:
                continue
            found = numbers(listed[name]) if isinstance(listed[name], str) else listed[name]
            if name == "uncalibrated":
                found = [budget for budget in found if budget in (self.block - 1, max(found))]
            end = UNCALIBRATED if name == "uncalibrated" else ""
            arms = [Arm(f"DDTREE {budget}{end}", name, budget) for budget in (*others, *found)]
            named = {arm.name for arm in self.arms}  # what the main engine serves needs no other
            self.arms += [arm for arm in arms if self.wanted(arm) and arm.name not in named]

    def expected(self) -> dict[str, Any]:
        """The budgets that the engines will have captured, for a plan before any of them runs."""
        own = {name: args.get("speculative_ddtree_budgets") for name, args in self.engines.items() if "ddtree" in name}
        own |= {"uncalibrated": None} if "uncalibrated" in self.engines else {}
        return {name: given or default_lanes(self.block) for name, given in own.items() if name in self.engines}

    def _drafting(self, algorithm: str) -> dict[str, Any]:
        return {
            "speculative_algorithm": algorithm,
            "speculative_draft_model_path": str(self.pair / "draft"),
            "attention_backend": "triton",
        }

    def has_lanes(self) -> bool:
        """Whether the patched site serves several budgets from one engine."""
        return (
            self.options.plan
            or "speculative_ddtree_budgets" in (self.options.site / "sglang/srt/server_args.py").read_text()
        )


def default_lanes(block: int) -> list[int]:
    """What `auto` chooses among when no list is given: the overlay's `default_budgets`, where there is no overlay."""
    return sorted({0, 2, 4, 7, 15, 24, 31, 63, block - 1} - {block} | {63})


def most_rows(options: argparse.Namespace) -> float:
    """Nodes of a step up to which trees have graphs: default lanes stop there, listed ones are captured for all."""
    return float("inf") if numbers(options.budgets) else float(options.rows)


def too_large(jobs: dict[str, dict[str, Any]], free: int) -> list[str]:
    """Engines to leave out so that the others fit into `free` bytes of the GPU; an estimate on the safe side."""
    sizes = {name: BESIDE.get(name, BESIDE_OF_LANES) + model_bytes(arguments) for name, arguments in jobs.items()}
    out: list[str] = []
    for name in DISPENSABLE:
        if name in sizes and sum(sizes.values()) > free:
            out.append(name)
            del sizes[name]
    return out


def model_bytes(arguments: dict[str, Any]) -> int:
    """Weights and KV of an engine's models."""
    folders = [arguments["model_path"], arguments.get("speculative_draft_model_path")]
    total = 0
    for folder in (Path(given) for given in folders if given):
        config = json.loads((folder / "config.json").read_text())
        heads = config["num_key_value_heads"] * config["head_dim"]
        total += sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        total += 2 * 2 * heads * config["num_hidden_layers"] * arguments["max_total_tokens"]
    return total


def engine_arguments(
    options: argparse.Namespace, pair: Path, sizes: list[int], beside: int = STEPS_TOKENS
) -> dict[str, Any]:
    """Arguments that all engines share; `sizes` are the batch sizes that get graphs.

    A request has room for its prompt, the most output and `beside` more tokens.

    SGLang sizes its pool by what is free before and after the model is loaded, while other engines take memory as well.
    With a fraction near 1 that estimate stays large, and `max_total_tokens` decides.
    """
    second = (options.site / "sglang/srt/speculative/dflash_worker_v2.py").exists()
    shared: dict[str, Any] = {
        "model_path": str(pair / "target"),
        "skip_tokenizer_init": True,
        "attention_backend": "torch_native" if options.cpu else "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_overlap_schedule": not second,
        "disable_radix_cache": True,
        "sleep_on_idle": True,  # an engine that waits leaves its core to the others
        "max_running_requests": sizes[-1],
        # A prompt that is cut into chunks counts twice among those that run, and one of the others would wait.
        "chunked_prefill_size": max(8192, sizes[-1] * options.prompt_tokens),
        "random_seed": 0,
        "nccl_port": free_port(),
        "log_level": "info",
    }
    if options.cpu:
        small = {"max_total_tokens": 4096, "context_length": 256, "mem_fraction_static": 0.5}
        return shared | small | {"device": "cpu", "dtype": "float32", "disable_cuda_graph": True}
    graphs: dict[str, Any] = {"disable_piecewise_cuda_graph": True, "cuda_graph_bs": sizes}
    if second:
        graphs = {"disable_prefill_cuda_graph": True, "cuda_graph_bs_decode": sizes}
    room = {
        "dtype": "bfloat16",
        "mem_fraction_static": 0.95,
        "context_length": 2048,
        "max_total_tokens": max(sizes[-1], 16) * (options.prompt_tokens + FURTHER * options.tokens + beside),
    }
    return shared | graphs | room


def words(text: str) -> list[str]:
    """What stands between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(text: str) -> list[int]:
    """Numbers with commas between them."""
    return [int(word) for word in words(text)]


def concurrencies(options: argparse.Namespace) -> list[int]:
    """Of the run, ascending."""
    return sorted(set(numbers(options.concurrency)))


_ports = iter(range(FIRST_PORT, FIRST_PORT + 500))


def free_port() -> int:
    """A port of its own for an engine."""
    for port in _ports:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise OSError(f"no free port among {FIRST_PORT} to {FIRST_PORT + 499}")
