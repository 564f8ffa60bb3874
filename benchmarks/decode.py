#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How fast plain decoding, DFLASH and DDTREE decode at several concurrencies, and what a step is made of.

    benchmarks/decode.py --site DIR --pair DIR --out FILE [--padded-like 8b] [--limit 560] [--plan] [--cpu]

DIR of --site holds an installed or unpacked `sglang`, importable together with its dependencies; DIR of --pair holds
`target/`, `draft/` and `prompts.json` (lists of token ids). Needs one NVIDIA GPU, no network. With --padded-like the
pair gets the cost of a large model first (`pad_pair.py`), and its outputs are compared with the pair's own.

The package is patched with the product's own verbs and rolled back at the end. One engine each decodes plainly, with
DFLASH and with DDTREE; they start together on one GPU, have CUDA graphs and the same scheduler, and are measured one at
a time, on the same cores (`decode_pinning.py`). Budgets are asked for by request (`custom_params["ddtree_budget"]`)
from one engine that captured them all. What is measured and how: `decode_figures.DEFINITIONS`, which every result
holds. Which arms a round holds when --limit does not allow all: `decode_plan.py`; --plan prints it and starts nothing.
What time is left behind the rounds of all arms goes to those that may be the best (`decode_contenders.py`).

FILE is written as the run goes on: a run that is cut keeps what it has. Engines' logs lie beside it, in FILE's name
with -logs. An engine that fails or hangs is given up; the others are measured. Plots: `plots.py`; the tables again:
`decode_report.py`. Exit status: 0, or 1 when an engine failed or the run broke, 3 when the time was too short for all
rounds of the main arms.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


sys.path.insert(0, str(Path(__file__).resolve().parent))

import decode_pinning
import decode_report
from decode_arms import ARM_NAMES, Bench, engine_arguments, too_large, words
from decode_contenders import contend
from decode_engines import EngineEndedError, Started
from decode_padding import compare_texts
from decode_plan import sketch
from decode_rounds import alive, cells_of, rounds, settle, warm_up
from decode_run import Run
from decode_site import Padding, compile_site, machine, patched
from decode_verdicts import of_all


def main() -> int:
    """Patch, start, compare, measure, report."""
    options = parse()
    run, failure = Run(options, time.monotonic()), ""
    if options.plan:
        print(planned(run))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        workdir = (options.keep or Path(scratch)).absolute()
        workdir.mkdir(parents=True, exist_ok=True)
        try:
            whole(run, workdir)
        except (Exception, SystemExit, KeyboardInterrupt):
            failure = traceback.format_exc()
            run.drop(f"the rest: {failure.strip().splitlines()[-1][:300]}")
        finally:
            run.save()
    print(failure + decode_report.report(run.result), flush=True)
    return status(run, failure)


def status(run: Run, failure: str) -> int:
    """The exit status of a run."""
    if failure or run.result["failed"]:
        return 1
    main = [row for row in run.result["figures"]["cells"] if run.plan.is_main(row["arm"])]
    return 3 if not main or any(of_all(row, run.options.rounds) < run.options.rounds for row in main) else 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, required=True)
    parser.add_argument("--pair", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the result, JSON")
    parser.add_argument("--padded-like", help="pad the pair first: `pad_pair.py --like`")
    parser.add_argument("--concurrency", default="1,2,4,8,16,32,48")
    parser.add_argument("--budgets", default="", help="of the engine that chooses; default: its own")
    parser.add_argument(
        "--more", default="8,16,32,64,128,256", help="budgets of a further engine; above 64 up to concurrency 8"
    )
    parser.add_argument("--arms", default="", help="only these: plain, DFLASH, auto, chain, block, or budgets")
    parser.add_argument("--rounds", type=int, default=5, help="of all arms")
    parser.add_argument(
        "--contenders", type=int, default=20, help="rounds a concurrency behind them at most, of what may be the best"
    )
    parser.add_argument("--tokens", type=int, default=48, help="that a request has to get")
    parser.add_argument("--prompt-tokens", type=int, default=192)
    parser.add_argument("--singles", type=int, default=4, help="prompts one after the other at concurrency 1")
    parser.add_argument("--seconds", type=float, default=0.8, help="of decoding per measurement at most")
    parser.add_argument(
        "--rows", type=int, default=2080, help="most rows of a step for which default lanes have graphs"
    )
    parser.add_argument(
        "--settle", type=float, default=6.0, help="seconds that auto decodes at each concurrency before the rounds"
    )
    parser.add_argument("--stages", help="concurrencies at which stages are timed; default: smallest, middle, largest")
    parser.add_argument(
        "--stage-seconds", type=float, default=0.25, help="of decoding per measurement of stages at most"
    )
    parser.add_argument("--no-texts", action="store_true", help="do not compare the padded pair's texts again")
    parser.add_argument(
        "--without-calibration",
        action="store_true",
        help="DDTREE, which calibrates, and a second engine with --speculative-ddtree-calibration off as its control",
    )
    parser.add_argument("--limit", type=float, default=560, help="seconds for everything")
    parser.add_argument("--start-limit", type=float, default=260, help="seconds for the engines to start")
    parser.add_argument("--turn", type=Path, help="a file that runs beside each other share: one measures at a time")
    parser.add_argument(
        "--measuring", type=float, help="seconds for everything behind the start and the wait for a turn"
    )
    parser.add_argument("--plan", action="store_true", help="print what fits into --limit, and start nothing")
    parser.add_argument("--no-pinning", action="store_true", help="leave it to the kernel where engines run")
    parser.add_argument("--scratch", type=Path, help="folder for the padded pair (20 GB) and other files")
    parser.add_argument("--keep", type=Path, help="keep them in this folder")
    parser.add_argument("--logs", type=Path, help="folder for the engines' logs; default: beside the result")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that imports SGLang")
    parser.add_argument("--patched", action="store_true", help="the site is patched already; leave it so")
    parser.add_argument("--cpu", action="store_true", help="try the script out on the CPU engine of the tests")
    options = parser.parse_args()
    for name in words(options.arms):
        if name not in ARM_NAMES and not name.isdecimal():
            parser.error(f"--arms: {name} is neither a number nor one of {', '.join(ARM_NAMES)}")
    options.logs = options.logs or options.out.with_name(f"{options.out.stem}-logs")
    return options


def planned(run: Run) -> str:
    """What --plan prints."""
    bench = Bench(run.options, run.options.pair)
    bench.add_budgets(bench.expected())
    return sketch(run.options, bench.arms, cells_of(run, bench.arms, bench.block))


def whole(run: Run, workdir: Path) -> None:
    """Everything, with the site patched meanwhile."""
    options, padding = run.options, Padding(run.options, workdir)
    padding.start()
    with patched(options, workdir):
        if not options.cpu:
            compile_site(options)
        padding.join()
        if padding.failure:
            raise RuntimeError(f"pad_pair.py failed:\n{padding.failure}")
        run.result |= {"machine": machine(options)} | ({"padding": padding.facts} if padding.facts else {})
        run.phase("patched and padded")
        measured(run, workdir)


def measured(run: Run, workdir: Path) -> None:
    """Start the engines on the patched site and measure them."""
    options = run.options
    bench = Bench(options, workdir / "padded" if options.padded_like else options.pair)
    run.result["block"] = bench.block
    jobs = dict(bench.engines)
    if options.padded_like and not options.no_texts:
        jobs["unpadded"] = engine_arguments(options, options.pair, [1, 4, 16])
    for name in too_large(jobs, run.result["machine"]["free"]) if not options.cpu else ():
        del jobs[name]
        run.drop(f"engine {name}: the GPU has no room for it beside the others")
    with Started(options, workdir, jobs, run.end) as started:
        for failure in started.wait(min(options.start_limit, run.left())):
            run.lost(started, failure)
        run.result["engines"] = {
            name: {"arguments": engine.arguments, **engine.ready} for name, engine in started.engines.items()
        }
        listed = {
            name: engine.ready["info"].get("speculative_ddtree_budgets") for name, engine in started.engines.items()
        }
        bench.add_budgets({name: budgets for name, budgets in listed.items() if budgets})
        run.result["arms"] = [vars(arm) for arm in bench.arms]
        run.phase("engines ready")
        with turn(run):
            pin(run, started)
            try:
                measure(run, started, alive(started, bench.arms), bench.block)
            finally:
                for name, engine in started.engines.items():
                    with contextlib.suppress(EngineEndedError):
                        run.result["engines"][name]["info at the end"] = engine.ask({"info": True}, 5)


@contextlib.contextmanager
def turn(run: Run) -> Iterator[None]:
    """Wait for other runs on the same GPU that share the file of --turn; then the time of --measuring begins.

    Raises:
        TimeoutError: Another run had it until this one's time was over.
    """
    with contextlib.ExitStack() as stack:
        if run.options.turn:
            lock = stack.enter_context(run.options.turn.open("a"))
            while not locked(lock):
                if run.left() < 10:
                    raise TimeoutError(f"another run has held {run.options.turn} until the time was over")
                time.sleep(0.5)
            run.phase("its turn")
        if run.options.measuring:
            run.end = min(run.end, time.monotonic() + run.options.measuring)
        yield


def locked(file: IO[str]) -> bool:
    """Whether this process has got the file for itself."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def pin(run: Run, started: Started) -> None:
    """Give every role its cores, and note what the kernel says of it; loudly nothing where there are too few."""
    if run.options.no_pinning:
        return
    cores = decode_pinning.physical_cores()
    plan, why = decode_pinning.layout(cores), f"{len(cores)} cores, {decode_pinning.LEAST} are needed"
    if plan:
        roots = {name: engine.process.pid for name, engine in started.engines.items()}
        try:
            run.result["pinning"] = {"plan": plan, "found": decode_pinning.pin_engines(roots, plan)}
            run.say(f"pinned: {', '.join(f'{role} {cpus}' for role, cpus in plan.items())}")
            return
        except OSError as error:
            why = str(error)
    note = f"NOT PINNED: {why}; arms differ by where they run, too"
    run.drop(note)
    run.say(note)


def measure(run: Run, started: Started, arms: list[Any], block: int) -> None:
    """Texts of the padded pair, warm-up, rounds of all arms with stages, rounds of contenders."""
    if "unpadded" in started.engines:
        try:
            run.result["padding"]["texts"] = compare_texts(started, run.prompts, small=run.options.cpu)
        except EngineEndedError as failure:
            run.lost(started, failure)
        except Exception:
            run.drop(f"texts of the padded pair: {traceback.format_exc().strip().splitlines()[-1]}")
        if "unpadded" in started.engines:
            started.engines.pop("unpadded").close()
        run.phase("padded texts compared")
    warm_up(run, started, arms)
    settle(run, started, arms)
    run.phase("warmed up")
    rounds(run, started, arms, block)
    contend(run, started, arms, block)
    run.phase("rounds measured")


if __name__ == "__main__":
    sys.exit(main())
