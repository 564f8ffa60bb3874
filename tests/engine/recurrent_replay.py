# SPDX-License-Identifier: Apache-2.0
"""Plan a replayed verify of a recurrent model: recurrent_replay.py RESULTS.json, with a patched SGLang on the path.

The backend is SGLang's own, with its buffers; no kernel runs. A graph of four rows verifies `LENGTHS`, one of them a
prompt of one token, for DFLASH and for DDTREE.
"""

import json
import sys
from types import SimpleNamespace

import torch
from sglang.srt.layers.attention.hybrid_linear_attn_backend import MambaAttnBackendBase
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.ddtree.tree_reference import tree_links
from sglang.srt.speculative.ddtree.verify_input import DDTreeVerifyInput
from sglang.srt.speculative.dflash_info import DFlashVerifyInput


ROWS, WIDTH, LENGTHS = 4, 3, [1, 9, 6]
MODE = ForwardMode.TARGET_VERIFY


def plan(topk, verify_input, dummy):
    """State index and query range of each row of the replayed graph."""
    arguments = SimpleNamespace(speculative_eagle_topk=topk)
    pool = SimpleNamespace(get_mamba_indices=lambda requests: requests.to(torch.int32) + 10)
    runner = {
        "device": "cpu",
        "server_args": arguments,
        "req_to_token_pool": pool,
        "is_draft_worker": False,
        "token_to_kv_pool": None,
    }
    backend = MambaAttnBackendBase(SimpleNamespace(**runner))
    backend.init_cuda_graph_state(ROWS, ROWS * WIDTH)
    requests, lengths = torch.zeros(ROWS, dtype=torch.int64), torch.ones(ROWS, dtype=torch.int64)
    batch = SimpleNamespace(
        batch_size=ROWS,
        req_pool_indices=requests,
        seq_lens=lengths,
        seq_lens_cpu=lengths.clone(),
        forward_mode=MODE,
        spec_info=dummy,
    )
    old = hasattr(backend, "init_forward_metadata_replay_cuda_graph")
    if old:
        backend.init_forward_metadata_capture_cuda_graph(ROWS, ROWS * WIDTH, requests, lengths, None, MODE, dummy)
    else:
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
    requests[: len(LENGTHS)] = torch.tensor([3, 1, 2])
    batch.seq_lens_cpu[: len(LENGTHS)] = torch.tensor(LENGTHS)
    batch.spec_info = verify_input
    if old:
        backend.init_forward_metadata_replay_cuda_graph(
            ROWS, requests, lengths, sum(LENGTHS), None, MODE, verify_input, batch.seq_lens_cpu
        )
    else:
        backend.init_forward_metadata_out_graph(batch)
    planned = backend.forward_metadata
    return {"states": planned.mamba_cache_indices.tolist(), "starts": planned.query_start_loc.tolist()}


def main(target):
    tokens = torch.zeros(len(LENGTHS) * WIDTH, dtype=torch.int64)
    dummy = DFlashVerifyInput(draft_token=None, positions=None, draft_token_num=WIDTH)
    child, sibling = tree_links(torch.tensor([[-1, 0, 0]] * len(LENGTHS)))
    tree = DDTreeVerifyInput(tokens, tokens, WIDTH, retrieve_next_token=child, retrieve_next_sibling=sibling)
    results = {"DFLASH": plan(1, DFlashVerifyInput(tokens, tokens, WIDTH), dummy), "DDTREE": plan(2, tree, dummy)}
    with open(target, "w") as out:
        json.dump(results, out)


if __name__ == "__main__":
    main(sys.argv[1])
