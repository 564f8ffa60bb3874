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
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parent))

import decode_figures
from decode_engines import Bench, EngineEndedError, Started, engine_arguments, environment, gpu_check
from decode_padding import compare_texts
from decode_rounds import STAGE_SECONDS, Run, rounds, staged_sizes, stages, warm_up


def main() -> None:
    """Patch, start, compare, measure, report."""
    options = parse()
    run, failure = Run(options, time.monotonic()), ""
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
        except Exception:
            failure = traceback.format_exc()
            run.drop(f"the rest: {failure.strip().splitlines()[-1]}")
        finally:
            run.save()
            if not options.patched:
                gpu_check.product(options, workdir, "rollback", "--yes")
    print(decode_figures.report(run.result))
    if failure:
        sys.exit(failure)


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
                with contextlib.suppress(EngineEndedError):
                    run.result["engines"][name]["info at the end"] = engine.ask({"info": True}, 20)


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
