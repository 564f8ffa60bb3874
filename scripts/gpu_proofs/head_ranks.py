# SPDX-License-Identifier: Apache-2.0
"""The draft head over two ranks' shards, padding and added tokens among them: head_ranks.py OUT.json.

Two processes, one GPU each and NCCL (without NVLink multicast), or the CPU and gloo. Every rank's best tokens have to
be those of the whole head; what is gathered, and how long it takes, is measured beside gathering all logits.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


RANKS, PADDING = 2, 64
#: Vocabulary, added tokens, hidden size, rows, k: a padded small one, then an 8B model's at one and 32 requests.
CASES = ((8155, 3, 384, 15, 64), (151936, 0, 4096, 15, 64), (151936, 0, 4096, 480, 64), (151899, 29, 4096, 480, 64))
SMALL = ((1003, 3, 16, 15, 8), (1024, 0, 16, 30, 16))


class Group:
    """A tensor-parallel group that counts what its rank sends."""

    def __init__(self) -> None:
        self.world_size, self.rank_in_group = RANKS, dist.get_rank()
        self.sent, self.calls = 0, 0

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """All ranks' tensors, one behind the other along `dim`."""
        self.sent, self.calls = self.sent + tensor.nbytes, self.calls + 1
        parts = [torch.empty_like(tensor) for _ in range(RANKS)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts, dim=dim)


def padded(size: int) -> int:
    """`size` as SGLang pads a vocabulary."""
    return -(-size // PADDING) * PADDING


def shard(weight: torch.Tensor, vocabulary: int, added: int, rank: int) -> Any:
    """A rank's part of a head [vocabulary + added, hidden]; rows of padding would win if they were read."""
    org, more = padded(vocabulary) // RANKS, padded(added) // RANKS
    rows = weight.new_full((org + more, weight.shape[1]), 9.0)
    first = weight[:vocabulary][rank * org : (rank + 1) * org]
    second = weight[vocabulary:][rank * more : (rank + 1) * more] if more else weight[:0]
    rows[: len(first)], rows[org : org + len(second)] = first, second
    indices = SimpleNamespace(
        num_org_elements=len(first), num_org_elements_padded=org, num_added_elements=len(second),
        org_vocab_start_index=rank * org, added_vocab_start_index=vocabulary + rank * more,
    )  # fmt: skip
    return SimpleNamespace(weight=rows, shard_indices=indices)


def microseconds(function: Any, device: torch.device) -> float:
    """Median of 20 calls, every rank at once."""
    found = []
    for _ in range(25):
        dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        found.append((time.perf_counter() - start) * 1e6)
    return sorted(found[5:])[10]


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(case: tuple[int, int, int, int, int], device: torch.device) -> dict[str, Any]:
    """One case: is the answer that of the whole head, and what does it cost?"""
    from sglang.srt.speculative.ddtree.draft_head import DraftHead

    vocabulary, added, hidden_size, rows, k = case
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    weight = torch.randn(vocabulary + added, hidden_size).to(device, dtype)
    hidden = (torch.randn(rows, hidden_size) / hidden_size**0.5 * 3).to(device, dtype)
    group = Group()
    rank = group.rank_in_group
    part = shard(weight, vocabulary, added, rank)
    head = DraftHead(part, None, group)
    found = head.top_log_probs(hidden, k)
    sent, calls = group.sent, group.calls
    log_probs, ids = found.log_probs, found.token_ids

    alone = SimpleNamespace(world_size=1, rank_in_group=0)
    whole = SimpleNamespace(
        weight=weight,
        shard_indices=SimpleNamespace(
            num_org_elements=vocabulary + added, num_org_elements_padded=vocabulary + added, num_added_elements=0,
            org_vocab_start_index=0, added_vocab_start_index=vocabulary + added,
        ),
    )  # fmt: skip
    wanted = DraftHead(whole, None, alone).top_log_probs(hidden, k)
    mine = torch.stack([ids.double(), log_probs.double()])
    every = [torch.empty_like(mine) for _ in range(RANKS)]
    dist.all_gather(every, mine)
    # The shards' matrix products may round otherwise than the whole one: the same tokens but for near-ties.
    near = (log_probs - wanted.log_probs).abs().max().item() < 0.02
    equal = near and bool((ids == wanted.token_ids).float().mean() > 0.98) and torch.equal(every[0], every[1])
    local = torch.matmul(hidden, part.weight.T).float()
    return {
        "vocabulary": vocabulary, "added": added, "rows": rows, "k": k, "equal": equal,
        "bytes": sent, "gathers": calls, "all bytes": local.nbytes,
        "us": microseconds(lambda: gather(group, sent, device), device),
        "all us": microseconds(lambda: group.all_gather(local), device),
        "head us": microseconds(lambda: head.top_log_probs(hidden, k), device),
    }  # fmt: skip


def gather(group: Group, sent: int, device: torch.device) -> None:
    """One gather of so many bytes a rank."""
    group.all_gather(torch.empty(sent // 4, dtype=torch.float32, device=device))


def rank_process(rank: int, cuda: bool, port: int, out: str) -> None:
    """One rank: all cases, written down by the first."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NCCL_NVLS_ENABLE": "0"}
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=RANKS)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    rows = [measure(case, device) for case in (CASES if cuda else SMALL)]
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    dist.barrier()  # a rank that leaves while another still gathers aborts now and then, in gloo's threads
    dist.destroy_process_group()


if __name__ == "__main__":
    PORT = 18000 + os.getpid() % 1000
    mp.spawn(rank_process, args=(torch.cuda.device_count() >= RANKS, PORT, sys.argv[1]), nprocs=RANKS)
