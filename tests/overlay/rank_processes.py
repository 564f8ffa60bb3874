# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel ranks as processes that talk over gloo."""

from __future__ import annotations

import inspect
import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from tests.overlay.publishing import publish


#: What newer releases take from the published arguments.
WIDTHS = dict.fromkeys(
    ("moe_ep_size", "pp_size", "attn_dp_size", "attn_cp_size", "moe_dp_size", "attn_dcp_size"), 1
) | {"shared_experts_tp_size": None}


def answers_of(work: Callable[[int, int], Any], ranks: int, *, seconds: float) -> list[Any]:
    """What `work(rank, ranks)` returns in a process of each rank, with SGLang's own group; fails where one raises.

    They meet at a file: a port that is free now may be somebody else's when the first rank gets so far.
    """
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "meeting").as_uri()
        words = [(work, rank, ranks, meeting, results) for rank in range(ranks)]
        processes = [context.Process(target=_process, args=one) for one in words]
        for process in processes:
            process.start()
        try:
            every = dict(results.get(timeout=seconds) for _ in processes)
        finally:
            for process in processes:
                process.join(20)
                process.kill()
    for answer in every.values():
        assert not isinstance(answer, Exception), answer
    return [every[rank] for rank in range(ranks)]


def _process(work: Callable[[int, int], Any], rank: int, ranks: int, meeting: str, results: Any) -> None:
    torch.set_num_threads(1)  # a forked process has no pool of threads
    publish(SimpleNamespace(enable_symm_mem=False))
    try:
        init_distributed_environment(
            world_size=ranks, rank=rank, local_rank=rank, backend="gloo",
            distributed_init_method=meeting,
        )  # fmt: skip
        if "tensor_model_parallel_size" in inspect.signature(initialize_model_parallel).parameters:
            initialize_model_parallel(tensor_model_parallel_size=ranks, backend="gloo")
        else:
            from sglang.srt.runtime_context import get_parallel

            get_parallel().override_permanently(**WIDTHS, tp_size=ranks, attn_tp_size=ranks, tp_rank=rank)
            initialize_model_parallel(backend="gloo")
        results.put((rank, work(rank, ranks)))
    except Exception as error:
        results.put((rank, error))
        raise
