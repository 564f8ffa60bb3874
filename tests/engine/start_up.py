# SPDX-License-Identifier: Apache-2.0
"""Resolve server arguments as a starting server does: start_up.py CASES.json RESULTS.json, with the engine's Python."""

import contextlib
import dataclasses
import json
import logging
import sys


SHOWN = (
    "speculative_algorithm",
    "speculative_num_draft_tokens",
    "speculative_dflash_block_size",
    "attention_backend",
    "speculative_ddtree_budget",
    "speculative_ddtree_budgets",
)


def complete(server_args):
    """The arguments by name, completed as at a start: by making the object, or, in later releases, by asking for it."""
    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()
        return server_args.resolved_dict()
    return dataclasses.asdict(server_args)


def resolve(arguments, again):
    from sglang.srt.server_args import ServerArgs

    try:
        found = complete(ServerArgs(**arguments))
        if again is not None:  # the handlers run on their own results
            found = complete(ServerArgs(**arguments | {name: found[name] for name in SHOWN} | again))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {name: found[name] for name in SHOWN}


def command_line():
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    words = (
        "--model-path m --speculative-algorithm DDTREE --speculative-ddtree-budget 9 --speculative-ddtree-topk-cap 4"
    )
    parsed = parser.parse_args(
        [
            *words.split(),
            *("--speculative-ddtree-budgets", "4,9", "--speculative-ddtree-calibration", "1.3"),
            *("--speculative-ddtree-chain-seed", "--speculative-ddtree-allow-hybrid-unsafe"),
        ]
    )
    shown = {k: v for k, v in vars(parsed).items() if "ddtree" in k or k == "speculative_algorithm"}
    return {k: v for k, v in shown.items() if k != "speculative_ddtree_overlay_id"}


def reported(arguments):
    """What `/server_info` says of the overlay, whatever was given: directly, from flags, and in a sub-process."""
    import argparse
    import pickle

    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.ddtree.overlay_id import OVERLAY_ID

    field = "speculative_ddtree_overlay_id"
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    flagged = ServerArgs.from_cli_args(parser.parse_args(["--model-path", "dummy"]))
    given = ServerArgs(**arguments, **{field: "mine"})
    answers = [complete(a)[field] for a in (flagged, given)]
    answers.append(complete(pickle.loads(pickle.dumps(given)))[field])
    return {"answers": answers, "id": OVERLAY_ID, "flag": f"--{field.replace('_', '-')}" in parser.format_help()}


def told(arguments):
    """The error, if any, and what DDTREE says in the log while arguments are completed."""
    with listening() as said:
        found = resolve(arguments, None)
    return [found.get("error"), *said]


@contextlib.contextmanager
def listening():
    """The lines of DDTREE's log."""
    handler, said = logging.Handler(), []
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("sglang.srt.speculative.ddtree")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def registry():
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm as Algorithm

    member = Algorithm.from_string("ddtree")
    return {
        "name": member.name,
        "is_ddtree": member.is_ddtree(),
        "is_dflash": member.is_dflash(),
        "dflash_is_ddtree": Algorithm.DFLASH.is_ddtree(),
        "is_eagle": member.is_eagle(),
        "others": [a.name for a in Algorithm if a.is_ddtree()],
    }


def rehearsal():
    """What the second worker does when the scheduler lets it rehearse a sampled step before the first request."""
    from types import SimpleNamespace

    from sglang.srt.speculative.ddtree.worker import DDTreeWorker

    if not hasattr(DDTreeWorker, "prewarm_sampling"):
        return None
    (module,) = (sys.modules[base.__module__] for base in DDTreeWorker.__mro__ if base.__name__ == "DFlashWorkerV2")
    module.is_cuda = module.is_dflash_sampling_verify_available = lambda: True
    try:
        return DDTreeWorker.prewarm_sampling(SimpleNamespace(model_runner=SimpleNamespace(prewarm_sampling=list)))
    except AttributeError as error:
        return str(error)


if __name__ == "__main__":
    with open(sys.argv[1]) as source:
        cases = json.load(source)
    results = {}
    for name, case in cases.items():
        with listening() as said:
            found = resolve(case["arguments"], case.get("again"))
        results[name] = {**found, "budget told of": [line for line in said if "budget was given" in line]}
    with open(sys.argv[2], "w") as target:
        whole = {"cases": results, "command_line": command_line(), "registry": registry(), "rehearsal": rehearsal()}
        plain = cases["nothing"]["arguments"]
        whole["told"] = {
            "nothing": told(plain),
            "of released weights": told(plain | {"enable_memory_saver": True}),
        }
        json.dump({**whole, "reported": reported(plain)}, target)
