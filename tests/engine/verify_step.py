# SPDX-License-Identifier: Apache-2.0
"""A verify step through SGLang's attention backends: verify_step.py RESULTS.json, with a patched SGLang on the path.

The backends are SGLang's own, built and driven as its model runner and graph runner do it; only their kernels are
written in torch (`standins/paged_kernels`). Each case compares one layer's output with attention over the mask itself.
A "replay" reads the buffers that were bound at capture, in a graph that is wider than the batch.
"""

import json
import sys
from types import SimpleNamespace

import torch
from paged_kernels import attend, on_this_device, put_kernels_in
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.attention import flashattention_backend, flashinfer_backend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.server_args import set_global_server_args_for_scheduler
from sglang.srt.speculative.ddtree.tree import build_tree, ordered_topk
from sglang.srt.speculative.ddtree.tree_mask import verify_mask
from sglang.srt.speculative.dflash_info import DFlashVerifyInput


HEADS, KV_HEADS, DIM, SCALE = 4, 2, 8, 0.3
BLOCK, BUDGET, CONTEXT, GRAPH_BATCH, ROWS, SLOTS = 4, 10, 40, 3, 4, 320
#: The second one ends at the end of the context.
PREFIXES = [7, CONTEXT - BUDGET - 1]


# What the model runner has.


class Pool:
    """KV of one layer."""

    def __init__(self, k, v):
        self.kv = k, v

    def set_kv_buffer(self, _layer, slots, k, v, *_scales):
        self.kv[0][slots.long()], self.kv[1][slots.long()] = k, v

    def get_kv_buffer(self, _layer_id):
        return self.kv


def arguments(draft):
    width = BLOCK if draft else BUDGET + 1
    args = {
        "speculative_algorithm": "DDTREE",
        "speculative_ddtree_budget": BUDGET,
        "speculative_ddtree_budgets": None,
        "speculative_dflash_block_size": BLOCK,
        "speculative_num_draft_tokens": width,
        "speculative_eagle_topk": 1,
        "kv_cache_dtype": "auto",
        "disable_piecewise_cuda_graph": True,
        "chunked_prefill_size": 64,
    }
    off = ("enable_deterministic_inference", "disable_cuda_graph", "is_embedding", "disable_radix_cache", "enable_mis")
    args |= dict.fromkeys((*off, "enable_dp_attention"), False) | dict.fromkeys(("dllm_algorithm",), None)
    return SimpleNamespace(**args, get_model_config=lambda: SimpleNamespace(vocab_size=50))


def runner(rows, page, pool, draft):
    config = SimpleNamespace(
        is_encoder_decoder=False,
        is_local_attention_model=False,
        is_multimodal=False,
        context_len=CONTEXT,
        attention_arch=AttentionArch.MHA,
        head_dim=DIM,
        num_attention_heads=HEADS,
        get_num_kv_heads=lambda _tp: KV_HEADS,
        hf_text_config=SimpleNamespace(num_attention_heads=HEADS),
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
    )
    return SimpleNamespace(
        model_config=config,
        server_args=arguments(draft),
        sliding_window_size=None,
        req_to_token_pool=SimpleNamespace(req_to_token=rows, size=ROWS),
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=None,
        kv_cache_dtype=torch.float32,
        dtype=torch.float32,
        page_size=page,
        attn_cp_size=1,
        tp_size=1,
        device="cpu",
        is_draft_worker=draft,
        spec_algorithm=SimpleNamespace(
            is_eagle=lambda: False, is_standalone=lambda: False, is_dflash=lambda: True, is_ngram=lambda: False
        ),
    )


# A step.


def step(make, page, draft, graph):
    """The largest difference of a node's output to attention over its mask, and how it was made."""
    torch.manual_seed(page + 10 * draft)
    width = BLOCK if draft else BUDGET + 1
    values, ids = ordered_topk(torch.log_softmax(torch.randn(2, 3, 12), -1), BUDGET)
    values[1, :, 1:] = float("-inf")  # the second tree ends in padding
    tree = build_tree(torch.tensor([9, 8]), values, ids, BUDGET)
    if draft:
        tails = torch.ones(2, width, width, dtype=torch.bool)
    else:
        tails = tree.ancestors
        assert (tree.parents[1] == -1).sum() > 1 and (tree.parents[0] == -1).sum() == 1

    pages = torch.randperm(SLOTS // page)
    held = -(-(CONTEXT + width) // page)
    rows = torch.zeros(ROWS, CONTEXT + width + page, dtype=torch.int32)
    for row in range(1, ROWS):
        slots = (pages[(row - 1) * held : row * held].unsqueeze(1) * page + torch.arange(page)).flatten()
        rows[row, : min(len(slots), rows.shape[1])] = slots[: rows.shape[1]]
    pool = Pool(*torch.randn(2, SLOTS, KV_HEADS, DIM))
    model_runner = runner(rows, page, pool, draft)
    set_global_server_args_for_scheduler(arguments(draft=False))
    backend = model_runner.attn_backend = make(model_runner)

    lengths, indices = torch.tensor(PREFIXES), torch.tensor([2, 1])
    slots = torch.cat([rows[i, n : n + width] for i, n in zip((2, 1), PREFIXES, strict=True)]).long()
    q, k, v = (torch.randn(2 * width, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    spec_info = DFlashVerifyInput(
        draft_token=torch.zeros(2 * width, dtype=torch.int64),
        positions=torch.arange(2 * width),
        draft_token_num=width,
        custom_mask=None if draft else verify_mask(tree, PREFIXES),
    )
    batch = SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=2,
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        seq_lens_sum=sum(PREFIXES),
        req_pool_indices=indices,
        req_to_token_pool=model_runner.req_to_token_pool,
        token_to_kv_pool=pool,
        positions=spec_info.positions,
        spec_info=spec_info,
        encoder_lens=None,
        out_cache_loc=slots,
        attn_attend_prefix_cache=None,
        attn_cp_metadata=None,
    )
    if graph:
        q, k, v = replayed(backend, model_runner, batch, width, (q, k, v))
    else:
        backend.init_forward_metadata(batch)
    layer = SimpleNamespace(
        layer_id=0,
        tp_q_head_num=HEADS,
        tp_k_head_num=KV_HEADS,
        tp_v_head_num=KV_HEADS,
        head_dim=DIM,
        v_head_dim=DIM,
        scaling=SCALE,
        logit_cap=0.0,
        sliding_window_size=-1,
        is_cross_attention=False,
        attn_type=AttentionType.ENCODER_ONLY if draft else AttentionType.DECODER,
        **dict.fromkeys(("k_scale", "v_scale", "k_scale_float", "v_scale_float")),
    )
    out = backend.forward_extend(q, k, v, layer, batch).view(-1, HEADS, DIM)
    assert out.isfinite().all(), "a row is not finite"

    worst = 0.0
    for b, prefix in enumerate(PREFIXES):
        seen = rows[indices[b], : prefix + width].long()
        allowed = torch.cat([torch.ones(width, prefix, dtype=torch.bool), tails[b]], dim=1)
        part = slice(b * width, (b + 1) * width)
        expected, _ = attend(q[part], pool.kv[0][seen], pool.kv[1][seen], allowed, SCALE)
        worst = max(worst, float((out[part] - expected).abs().max()))
    return worst


def replayed(backend, model_runner, batch, width, rows):
    """Capture a graph of three requests, then plan its replay for two; the inputs padded to three requests."""
    with on_this_device():
        backend.init_cuda_graph_state(GRAPH_BATCH, GRAPH_BATCH * width)
    mask = torch.ones((GRAPH_BATCH + GRAPH_BATCH * width) * width, dtype=torch.bool)
    graph_runner = SimpleNamespace(model_runner=model_runner, buffers=SimpleNamespace(custom_mask=mask))
    dummy = CudaGraphRunner.get_spec_info(graph_runner, GRAPH_BATCH * width)
    lengths, indices = torch.ones(GRAPH_BATCH, dtype=torch.int64), torch.zeros(GRAPH_BATCH, dtype=torch.int64)
    real = batch.spec_info
    batch.batch_size, batch.seq_lens, batch.seq_lens_cpu, batch.req_pool_indices = 3, lengths, lengths, indices
    batch.seq_lens_sum, batch.spec_info, batch.positions = 3, dummy, torch.zeros(GRAPH_BATCH * width)
    mode, old = ForwardMode.TARGET_VERIFY, hasattr(backend, "init_forward_metadata_replay_cuda_graph")
    if old:
        args = (3, GRAPH_BATCH * width, indices, lengths, None, mode, dummy)
        backend.init_forward_metadata_capture_cuda_graph(*args)
    else:
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
    bound = backend.forward_metadata, getattr(backend, "forward_metadata_spec_decode_expand", None)

    lengths[:2], indices[:2] = torch.tensor(PREFIXES), torch.tensor([2, 1])
    batch.seq_lens_sum, batch.spec_info = int(lengths.sum()), real
    if old:
        args = (3, indices, lengths, batch.seq_lens_sum, None, mode, real, lengths.clone())
        backend.init_forward_metadata_replay_cuda_graph(*args)
    else:
        backend.init_forward_metadata_out_graph(batch)
    backend.forward_metadata, backend.forward_metadata_spec_decode_expand = bound
    batch.out_cache_loc = torch.cat([batch.out_cache_loc, torch.zeros(width, dtype=torch.int64)])
    return [torch.cat([part, torch.randn(width, *part.shape[1:])]) for part in rows]


BACKENDS = {
    "fa3": flashattention_backend.FlashAttentionBackend,
    "flashinfer": flashinfer_backend.FlashInferAttnBackend,
}

if __name__ == "__main__":
    put_kernels_in(flashattention_backend, flashinfer_backend)
    results = {}
    for name, make in BACKENDS.items():
        for page in (1, 16):
            for draft in (False, True):
                for graph in (False, True):
                    results[f"{name} {page} {'draft' if draft else 'target'} {'replay' if graph else 'eager'}"] = step(
                        make, page, draft, graph
                    )
    with open(sys.argv[1], "w") as target:
        json.dump(results, target)
