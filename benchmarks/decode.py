#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How fast plain decoding, DFLASH and DDTREE decode at several concurrencies, and what a step is made of.

    benchmarks/decode.py --site DIR --pair DIR --out FILE [--padded-like 8b] [--limit 450] [--cpu]

DIR of --site holds an installed or unpacked `sglang`, importable together with its dependencies; DIR of --pair holds
`target/`, `draft/` and `prompts.json` (lists of token ids). Needs one NVIDIA GPU, no network. With --padded-like the
pair gets the cost of a large model first (`pad_pair.py`), and its outputs are compared with the pair's own.

The package is patched with the product's own verbs and rolled back at the end. One engine each decodes plainly, with
DFLASH and with DDTREE; they start together on one GPU, have CUDA graphs and the same scheduler, and are measured one at
a time. Budgets are asked for by request (`custom_params["ddtree_budget"]`) from one engine that captured them all. What
is measured and how: `decode_figures.DEFINITIONS`, which every result holds. --limit drops the last rounds first, then
stages; from the second round on an arm that is slower than --hopeless of the best tree at its concurrency is left out.
FILE is written as the run goes on: a run that is cut keeps what it has. Plots: `plots.py`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parent))

import decode_figures
from decode_engines import Arm, Bench, Started, concurrencies, engine_arguments, environment, gpu_check
from decode_padding import compare_texts


#: Seconds that the stages of a step are measured for, per arm and concurrency.
STAGE_SECONDS = 0.2
ALWAYS = ("plain", "DFLASH", "DDTREE auto")


class Run:
    """A run of all arms: what it has found, and the time that is left."""

    def __init__(self, options: argparse.Namespace, start: float) -> None:
        self.options, self.end = options, start + options.limit
        self.start = start
        self.prompts = [p[: options.prompt_tokens] for p in json.loads((options.pair / "prompts.json").read_text())]
        self.count = 0
        self.prefill: dict[int, float] = {}
        self.result: dict[str, Any] = {
            "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "definitions": decode_figures.DEFINITIONS,
            "block": 0,
            "arms": [],
            "engines": {},
            "measurements": [],
            "stages": [],
            "dropped": [],
            "phases": {},
        }

    def left(self) -> float:
        """Seconds before the run has to end."""
        return self.end - time.monotonic()

    def phase(self, name: str) -> None:
        """Note how many seconds the run has taken up to here."""
        self.result["phases"][name] = round(time.monotonic() - self.start, 1)
        print(f"[{time.monotonic() - self.start:4.0f} s] {name}", flush=True)
        self.save()

    def save(self) -> None:
        """Write all that is known; all of it or nothing."""
        self.result["figures"] = decode_figures.figures(self.result)
        draft = self.options.out.with_suffix(".draft")
        draft.write_text(json.dumps(self.result, default=str))
        draft.rename(self.options.out)

    def measure(
        self, started: Started, arm: Arm, size: int, number: int, groups: int = 1, **changes: Any
    ) -> dict[str, Any] | None:
        """One measurement with the prompts of a round: the figures of its steps, None when no step held all requests.

        In so many `groups` of prompts, one after another, which share the time. `changes` go into the engine's request.
        """
        parts = []
        # Plain decoding is as fast on one prompt as on another.
        most = self.options.seconds * (0.4 if arm.name == "plain" else 1)
        for group in range(groups):
            self.count += 1
            first = (number * groups + group) * size
            asked = {
                "measure": f"m{self.count}",
                "prompts": [self.prompts[(first + i) % len(self.prompts)] for i in range(size)],
                "tokens": self.options.tokens,
                "seconds": most / groups + self.prefill.get(size, 0.0),
                "budget": arm.budget,
            }
            answer = started.engines[arm.engine].ask(asked | changes)
            self.result.setdefault("memory", {})[arm.engine] = answer["memory"]
            parts.append(decode_figures.window(answer["steps"], size, self.options.tokens))
            if parts[-1] is None:
                errors = "".join(f", {error}" for error in answer["errors"])
                self.drop(f"{arm.name} at concurrency {size}: no whole step{errors}")
        return decode_figures.together([part for part in parts if part], size)

    def drop(self, note: str) -> None:
        """Say once what is missing."""
        if note not in self.result["dropped"]:
            self.result["dropped"].append(note)


def main() -> None:
    """Patch, start, compare, measure, report."""
    options = parse()
    run = Run(options, time.monotonic())
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        workdir = (options.keep or Path(scratch)).absolute()
        workdir.mkdir(parents=True, exist_ok=True)
        padding = threading.Thread(target=pad, args=(run, workdir))
        padding.start()
        if not options.patched:
            for verb, *flags in (["snapshot"], ["patch"], ["verify"], ["push", "--yes"]):
                gpu_check.product(options, workdir, verb, *flags)
        try:
            if not options.cpu:
                compile_site(options)
            padding.join()
            run.phase("patched and padded")
            whole(run, workdir)
        finally:
            run.save()
            if not options.patched:
                gpu_check.product(options, workdir, "rollback", "--yes")
    print(decode_figures.report(run.result))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, required=True)
    parser.add_argument("--pair", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the result, JSON")
    parser.add_argument("--padded-like", help="pad the pair first: `pad_pair.py --like`")
    parser.add_argument("--concurrency", default="1,2,4,8,16,32,48")
    parser.add_argument("--budgets", default="", help="of the engine that chooses; default: its own")
    parser.add_argument("--more", default="16,256", help="budgets of a further engine, measured up to concurrency 8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48, help="that a request has to get")
    parser.add_argument("--prompt-tokens", type=int, default=192)
    parser.add_argument("--singles", type=int, default=4, help="prompts one after the other at concurrency 1")
    parser.add_argument("--seconds", type=float, default=0.8, help="of decoding per measurement at most")
    parser.add_argument("--rows", type=int, default=2080, help="most rows of a step for which trees have graphs")
    parser.add_argument("--hopeless", type=float, default=0.85)
    parser.add_argument(
        "--settle", type=float, default=2.0, help="seconds that auto decodes before a first measurement"
    )
    parser.add_argument("--stages", help="concurrencies at which stages are timed; default: smallest, middle, largest")
    parser.add_argument("--no-texts", action="store_true", help="do not compare the padded pair's texts again")
    parser.add_argument("--without-calibration", action="store_true", help="a second DDTREE engine as a control")
    parser.add_argument("--limit", type=float, default=450, help="seconds for everything")
    parser.add_argument("--start-limit", type=float, default=300, help="seconds for the engines to start")
    parser.add_argument("--scratch", type=Path, help="folder for the padded pair (20 GB) and logs")
    parser.add_argument("--keep", type=Path, help="keep them in this folder")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that imports SGLang")
    parser.add_argument("--patched", action="store_true", help="the site is patched already; leave it so")
    parser.add_argument("--cpu", action="store_true", help="try the script out on the CPU engine of the tests")
    return parser.parse_args()


def pad(run: Run, workdir: Path) -> None:
    """Make the padded pair, if one is wanted, and note how long that took."""
    if run.options.padded_like:
        start = time.monotonic()
        script = Path(__file__).resolve().parent / "pad_pair.py"
        target = workdir / "padded"
        command = [
            run.options.python,
            str(script),
            str(run.options.pair),
            str(target),
            "--like",
            run.options.padded_like,
        ]
        subprocess.run(command, env=environment(run.options), check=True)
        run.result["padding"] = {"like": run.options.padded_like, "seconds": time.monotonic() - start}


def compile_site(options: argparse.Namespace) -> None:
    """Byte-compile the site on all cores: several engines would each do it on one."""
    command = [options.python, "-m", "compileall", "-q", "-j", str(os.cpu_count()), str(options.site)]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def whole(run: Run, workdir: Path) -> None:
    """Everything that needs the patched site."""
    options = run.options
    bench = Bench(options, workdir / "padded" if options.padded_like else options.pair)
    run.result |= {"block": bench.block, "machine": machine(options)}
    jobs = dict(bench.engines)
    if options.padded_like and not options.no_texts:
        jobs["unpadded"] = engine_arguments(options, options.pair, [1, 4, 16])
    with Started(options, workdir, jobs) as started:
        started.wait(min(options.start_limit, run.left()))
        run.result["engines"] = {
            name: {"arguments": engine.arguments, **engine.ready} for name, engine in started.engines.items()
        }
        run.result["dropped"] += [f"engine {name}: {text[-600:]}" for name, text in started.failed.items()]
        bench.add_budgets(started.engines)
        run.result["arms"] = [vars(arm) for arm in bench.arms]
        run.phase("engines ready")
        arms = [arm for arm in bench.arms if arm.engine in started.engines]
        try:
            if "unpadded" in started.engines:
                run.result["padding"]["texts"] = compare_texts(
                    started,
                    ("plain", "dflash", "ddtree"),
                    run.prompts[: 4 if options.cpu else 8],
                    8 if options.cpu else 48,
                )
                started.engines.pop("unpadded").close()
                run.phase("padded texts compared")
            warm_up(run, started, arms)
            run.phase("warmed up")
            reserve = STAGE_SECONDS * 2 * len(arms) * len(staged_sizes(options))
            rounds(run, started, arms, bench.block, reserve)
            run.phase("rounds measured")
            stages(run, started, arms, bench.block)
            run.phase("stages measured")
        finally:
            for name, engine in started.engines.items():
                if engine.process.poll() is None:
                    run.result["engines"][name]["info at the end"] = engine.ask({"info": True}, 20)


def warm_up(run: Run, started: Started, arms: list[Arm]) -> None:
    """Compile what is compiled at first use, and learn how long the prefill of each concurrency takes."""
    sizes = concurrencies(run.options)
    plain = next((arm for arm in arms if arm.name == "plain"), arms[0])
    known = list(run.result["dropped"])
    for size in (sizes[-1], *reversed(sizes)):
        begin = time.monotonic()
        run.measure(started, plain, size, 0, tokens=2, seconds=60)
        run.prefill[size] = time.monotonic() - begin
    run.result["dropped"] = known  # two tokens hold no whole step
    for arm in arms:
        run.measure(started, arm, 1, 0, seconds=30)


def rounds(run: Run, started: Started, arms: list[Arm], block: int, reserve: float) -> None:
    """All rounds, as far as the time goes; `reserve` seconds are left over."""
    options = run.options
    for number in range(options.rounds):
        for size in concurrencies(options):
            if number == 0:
                for arm in (arm for arm in arms if arm.name.startswith("DDTREE auto") and options.settle):
                    settled = time.monotonic() + options.settle
                    while time.monotonic() < settled:
                        run.measure(started, arm, size, 0)
            chosen = [arm for arm in arms if wanted(run, arm, size, number, block)]
            turn = number % len(chosen)
            for arm in chosen[turn:] + chosen[:turn]:
                if run.left() < reserve + 5:
                    run.drop(f"from {arm.name} at concurrency {size} in round {number + 1} on: no time left")
                    return
                found = observed(run, started, arm, size, number)
                if found:
                    run.result["measurements"].append({"round": number, "concurrency": size, "arm": arm.name, **found})
            run.save()
        run.phase(f"round {number + 1}")


def observed(run: Run, started: Started, arm: Arm, size: int, number: int) -> dict[str, Any] | None:
    """A measurement of a round; of `auto` also how often it took which choice, where the server counts its steps."""
    # One prompt says little about acceptance.
    groups = max(1, run.options.singles // size)
    if not arm.name.startswith("DDTREE auto"):
        return run.measure(started, arm, size, number, groups)
    engine = started.engines[arm.engine]
    before = engine.ask({"info": True}).get("ddtree_steps") or {}
    found = run.measure(started, arm, size, number, groups)
    after = engine.ask({"info": True}).get("ddtree_steps") or {}
    chosen = {choice: count - before.get(choice, 0) for choice, count in after.items()}
    return found and found | {"chosen": {choice: count for choice, count in chosen.items() if count}}


def wanted(run: Run, arm: Arm, size: int, number: int, block: int) -> bool:
    """Whether an arm is measured: trees need a graph, and from the second round on a chance to be the best."""
    options = run.options
    if not served(run, arm, size, block):
        run.drop(f"{arm.name} at concurrency {size}: no graph of {size * arm.rows(block)} rows")
        return False
    if arm.name in ALWAYS or number == 0:
        return True
    rows = decode_figures.cells([m for m in run.result["measurements"] if m["concurrency"] == size])
    speeds = {row["arm"]: row["to_dflash"]["pooled"] for row in rows if "to_dflash" in row}
    best = max((speed for name, speed in speeds.items() if name.startswith("DDTREE")), default=0.0)
    if arm.name in speeds and speeds[arm.name] < options.hopeless * best:
        run.drop(f"{arm.name} at concurrency {size} after round {number}: below {options.hopeless} of the best tree")
        return False
    return True


def served(run: Run, arm: Arm, size: int, block: int) -> bool:
    """Whether the arm has a graph for so many requests."""
    if arm.engine == "ddtree-more":
        return size <= 8
    return arm.budget in (None, "chain") or size * arm.rows(block) <= run.options.rows


def stages(run: Run, started: Started, arms: list[Arm], block: int) -> None:
    """Time the stages of each speculative arm's steps; a run of its own, so that events disturb no round."""
    staged = [arm for arm in arms if arm.name != "plain" and "uncalibrated" not in arm.name]
    for size in staged_sizes(run.options):
        for arm in staged:
            if not served(run, arm, size, block):
                continue
            if run.left() < 5:
                run.drop(f"stages from {arm.name} at concurrency {size} on: no time left")
                return
            engine = started.engines[arm.engine]
            switch = engine.stages.with_name(engine.stages.name + ".on")
            done = len(read_lines(engine.stages))
            switch.touch()
            known = list(run.result["dropped"])
            run.measure(started, arm, size, 0, seconds=STAGE_SECONDS + run.prefill[size])
            run.result["dropped"] = known  # its figures are nobody's
            switch.unlink()
            steps = [step for step in read_lines(engine.stages)[done:] if step.get("batch") == size]
            run.result["stages"].append({"concurrency": size, "arm": arm.name, "steps": steps[1:]})
    if not any(entry["steps"] for entry in run.result["stages"]):
        run.drop("stages: the engines wrote none")


def staged_sizes(options: argparse.Namespace) -> list[int]:
    """Concurrencies at which stages are timed; each is one of the run's."""
    sizes = concurrencies(options)
    if options.stages is None:
        return sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})
    return [size for size in sizes if str(size) in options.stages.split(",")]


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file that may not be there."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """What the figures were measured on."""
    code = (
        "import json, torch; "
        "name = torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'; "
        "print(json.dumps({'device': name, 'torch': torch.__version__}))"
    )
    done = subprocess.run([options.python, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout) | {"cores": os.cpu_count()}


if __name__ == "__main__":
    main()
