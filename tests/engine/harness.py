# SPDX-License-Identifier: Apache-2.0
"""Patched copies of real SGLangs, and engines that decode with them on a CPU.

`patched_site` runs the product's own `snapshot`, `patch` and `push` on an unpacked wheel; `decode` starts one engine
in a process of its own. Engines decode in float32. Speculative ones use SGLang's Triton backend, with a step's kernels
written in torch (`standins/reference_kernels`) or, fifty times slower, the real ones in Triton's interpreter
(`TRITON`); plain decoding needs no tree mask and uses torch's attention.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.engine import warm
from tests.support.ports import free_port

from ddtree_overlay.releases import RELEASES


PROJECT = Path(__file__).resolve().parents[2]
PAIR = PROJECT / "tests/data/tiny_pair"
ENGINE_PYTHON = PROJECT / ".cache/engine/bin/python"
#: The same with what the releases of the second worker have newer.
SECOND_PYTHON = PROJECT / ".cache/engine-second/bin/python"
#: Supported releases by the generation of their DFLASH worker.
FIRST_WORKER = tuple(row.version for row in RELEASES if "first" in row.variants)
SECOND_WORKER = tuple(row.version for row in RELEASES if "second" in row.variants)
#: The releases on which the whole matrix runs.
RELEASE, SECOND_RELEASE = "0.5.11", "0.5.17"
BLOCK_SIZE = 8
#: Tells a job that hangs from one of a busy machine.
DECODE_TIMEOUT = 1500
#: Environment of an engine that runs SGLang's own Triton kernels.
TRITON = {"DDTREE_TEST_REFERENCE_KERNELS": ""}
#: Variables that are read when they matter, not at import.
LATE = {
    "SGLANG_DDTREE_TRACE",
    "DDTREE_TEST_CHAIN_TRACE",
    "DDTREE_TEST_KEEP_DTYPE",
    "DDTREE_TEST_KV_TRACE",
    "DDTREE_TEST_RANK_TRACE",
}


def prompts(*indices: int) -> list[list[int]]:
    """Prompts of the tiny pair as token ids."""
    every = json.loads((PAIR / "prompts.json").read_text())
    return [every[i] for i in indices]


def overlay_cli(*args: str, cwd: Path) -> str:
    """Run the product and return its standard output."""
    command = [sys.executable, "-m", "ddtree_overlay", *args]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=1500, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(args)} failed with {done.returncode}:\n{done.stderr}")
    return done.stdout


def unpack_wheel(wheel: Path, site: Path) -> Path:
    """Unpack a published SGLang wheel into `site`."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def patched_site(wheel: Path, site: Path) -> Path:
    """An unpacked SGLang that the product has patched in place, as a user would patch a host."""
    unpack_wheel(wheel, site)
    with tempfile.TemporaryDirectory() as workdir:
        target = ("--root", str(site / "sglang"), "--workdir", workdir)
        overlay_cli("snapshot", *target, cwd=Path(workdir))
        overlay_cli("patch", *target, cwd=Path(workdir))
        overlay_cli("push", *target, "--yes", cwd=Path(workdir))
    return site


def copied_site(site: Path, copy: Path) -> Path:
    """A copy of a site without its bytecode: what is changed next must not be taken for what was compiled before."""
    shutil.copytree(site, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def broken_site(site: Path, copy: Path, path: str, before: str, after: str) -> Path:
    """A copy of a patched site with one piece of the overlay broken on purpose."""
    copied_site(site, copy)
    file = copy / "sglang/srt/speculative/ddtree" / path
    text = file.read_text()
    assert text.count(before) == 1, f"{path} holds the piece to break {text.count(before)} times"
    file.write_text(text.replace(before, after))
    return copy


def engine_args(algorithm: str | None, **extra: Any) -> dict[str, Any]:
    """Arguments of a small engine; `algorithm` None decodes plainly."""
    args: dict[str, Any] = {
        "model_path": str(PAIR / "target"),
        "device": "cpu",
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "attention_backend": "torch_native" if algorithm is None else "triton",
        "max_running_requests": 4,
        "max_total_tokens": 1024,
        # The pool is sized by max_total_tokens; SGLang's estimate from free memory can come out negative on a small
        # machine.
        "mem_fraction_static": 0.5,
        "context_length": 256,
        "log_level": "info",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "random_seed": 0,
    }
    if algorithm is not None:
        args |= {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(PAIR / "draft")}
    return args | extra


def engine_environment(site: Path, **extra: str) -> dict[str, str]:
    """Environment variables for an engine that imports SGLang from `site`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SGLANG", "TRITON", "DDTREE"))}
    return kept | {
        "PYTHONPATH": f"{PROJECT / 'tests/engine/standins'}:{site}",
        "SGLANG_USE_CPU_ENGINE": "1",
        "DDTREE_TEST_REFERENCE_KERNELS": "1",
        # The second worker's releases refuse DFLASH on a CPU; the first worker's have nothing that this changes.
        "DDTREE_TEST_ANY_DEVICE": "1",
        # Small operations on a few cores: threads that wait for each other take longer than the work.
        "OMP_NUM_THREADS": "1",
        # Compiling the penalties for the CPU takes longer than all requests together.
        "TORCHDYNAMO_DISABLE": "1",
        # The scheduler counts its KV slots after every step and ends the engine when one is lost.
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
        **extra,
    }


def python_of(site: Path) -> Path:
    """The interpreter that has what a site's SGLang imports."""
    return SECOND_PYTHON if (site / "sglang/srt/speculative/dflash_worker_v2.py").exists() else ENGINE_PYTHON


def decode(
    site: Path,
    args: Mapping[str, Any],
    calls: list[dict[str, Any]],
    folder: Path,
    *,
    cold: bool = False,
    **environment: str,
) -> dict[str, Any]:
    """Start an engine, run `calls`, and return what `scripts/engine_job` reports, with its log under `log`.

    Args:
        site: A patched SGLang.
        args: Of the engine.
        calls: See `scripts/engine_job`.
        folder: Gets the job's files.
        cold: Start the engine's processes as SGLang does, by spawning them; those with a variable that is read at
            import always start so. All others are forked from a process that has imported SGLang already.
        environment: More variables.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job, result, log = folder / "job.json", folder / "result.json", folder / "log.txt"
    job.write_text(json.dumps({"engine": {"nccl_port": free_port(), **args}, "calls": calls}))
    if args.get("speculative_algorithm") == "DFLASH":
        environment |= {"DDTREE_TEST_KEEP_DTYPE": "1"}
    command = [str(PROJECT / "scripts/engine_job"), str(job), str(result)]
    if cold or not environment.keys() <= LATE:
        if args.get("attention_backend") == "triton":
            environment |= {"TRITON_INTERPRET": "1"}
        with log.open("w") as out:
            process = subprocess.Popen(
                [python_of(site), *command],
                env=engine_environment(site, **environment),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            process.wait(DECODE_TIMEOUT)
        finally:  # with the processes that it started: they would go on, and take time from all others
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    else:
        warm_run(site, command, log, DECODE_TIMEOUT, **environment)
    text = log.read_text()
    if not result.exists():
        raise EngineError("\n".join(text.splitlines()[-40:]))
    return {**json.loads(result.read_text()), "log": text}


def warm_run(site: Path, words: list[str], log: Path, timeout: float, **environment: str) -> int:
    """Run a script in a fork of a process that has imported the site's SGLang, and return its exit status.

    Raises:
        EngineError: That process did not start.
    """
    base = engine_environment(site, TRITON_INTERPRET="1")
    try:
        return warm.run(python_of(site), base, words, environment=environment, log=log, timeout=timeout)
    except warm.WarmError as error:
        raise EngineError(str(error)) from error


def run_script(site: Path, words: list[str], log: Path, timeout: float) -> None:
    """`warm_run` for a script that has to succeed.

    Raises:
        EngineError: It failed, or that process did not start.
    """
    if warm_run(site, words, log, timeout) != 0:
        raise EngineError("\n".join(log.read_text().splitlines()[-40:]))


class EngineError(Exception):
    """The engine did not finish; the exception's text is the end of its log."""


def greedy(input_ids: list[list[int]], max_new_tokens: int = 40, **sampling_params: Any) -> dict[str, Any]:
    """A call that decodes greedily, to the token limit unless told otherwise."""
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True} | sampling_params
    return {"input_ids": input_ids, "sampling_params": sampling}


def request(input_ids: list[int], max_new_tokens: int = 40, **sampling_params: Any) -> dict[str, Any]:
    """One request of a flow, greedy unless told otherwise; SGLang looks at stop tokens where it does not ignore EOS."""
    ignore_eos = "stop_token_ids" not in sampling_params
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos} | sampling_params
    return {"input_ids": input_ids, "sampling_params": sampling}


def alone(flow: list[dict[str, Any]]) -> dict[str, Any]:
    """The requests of a flow as one call: all start at once, and none is aborted."""
    return {
        "input_ids": [request["input_ids"] for request in flow],
        "sampling_params": [request["sampling_params"] for request in flow],
    }


def text_target(folder: Path) -> Path:
    """The tiny target with a tokenizer of its 256 bytes, made in `folder`: stop strings need text."""
    folder.mkdir(parents=True)
    for file in (PAIR / "target").iterdir():
        (folder / file.name).symlink_to(file)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    vocabulary = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    # `min_new_tokens` needs an EOS; byte 0 is in no prompt.
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _byte_symbols()[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _byte_symbols() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: itself where it can be printed."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def read_lines(file: Path) -> list[dict[str, Any]]:
    """A JSONL file."""
    return [json.loads(line) for line in file.read_text().splitlines()]
