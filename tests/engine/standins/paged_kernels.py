# SPDX-License-Identifier: Apache-2.0
"""The kernels of SGLang's FlashAttention and FlashInfer backends in torch, for `tests/engine/verify_step.py`.

They read what the real ones are documented to read, to the letter: page tables, lengths, index pointers, packed masks.
"""

from contextlib import contextmanager

import torch


def attend(queries, keys, values, allowed, scale):
    """[rows, heads, dim] over [columns, kv heads, dim]: output and lse [rows, heads]; 0 where nothing is seen."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (part.repeat_interleave(group, dim=1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->qhk", queries, keys) * scale
    scores = scores.masked_fill(~allowed.unsqueeze(1), float("-inf"))
    lse = scores.logsumexp(dim=-1)
    weights = torch.where(lse.isinf().unsqueeze(-1), 0.0, (scores - lse.unsqueeze(-1)).exp())
    return torch.einsum("qhk,khd->qhd", weights, values), lse


def flash_attn_with_kvcache(
    q, k_cache, v_cache, *, page_table, cache_seqlens, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, **given
):
    """FlashAttention over paged KV, a query segment per row of the page table; lse comes as [heads, rows]."""
    assert page_table.dtype == cache_seqlens.dtype == cu_seqlens_q.dtype == torch.int32
    assert given["window_size"] == (-1, -1) and not given["softcap"]
    starts, page = cu_seqlens_q.tolist(), k_cache.shape[1]
    assert len(starts) == len(page_table) + 1 == len(cache_seqlens) + 1 and starts[-1] == len(q)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
    for b, length in enumerate(cache_seqlens.tolist()):
        first, last = starts[b : b + 2]
        assert last - first <= max_seqlen_q and length <= page_table.shape[1] * page
        pages = page_table[b, : -(-length // page)].long()
        keys, values = (cache[pages].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        allowed = torch.ones(last - first, length, dtype=torch.bool)
        if causal:
            allowed = allowed.tril(diagonal=length - (last - first))
        out[first:last], lse[first:last] = attend(q[first:last], keys, values, allowed, softmax_scale)
    return (out, lse.T) if given.get("return_softmax_lse") else out


def merge_state_v2(out, lse, other, other_lse):
    """Two attentions over disjoint keys made one."""
    weight = torch.sigmoid(lse - other_lse).unsqueeze(-1)
    return torch.where(weight.isnan(), 0.0, weight * out + (1 - weight) * other), torch.logaddexp(lse, other_lse)


class Paged:
    """FlashInfer's prefill wrapper: where there is a buffer for a mask it is used, and then instead of `causal`."""

    def __init__(self, workspace, layout, *, backend, use_cuda_graph=False, **buffers):
        assert layout == "NHD" and backend == "fa2"
        self.fixed, self.buffers = use_cuda_graph, buffers
        self.mask, self.mask_at = buffers.get("custom_mask_buf"), buffers.get("mask_indptr_buf")

    def keep(self, name, value):
        """In a graph what is planned goes into the buffer that was bound."""
        if not self.fixed:
            return value
        buffer = self.buffers[name]
        assert len(value) <= len(buffer), f"{name} of {len(value)} for {len(buffer)}"
        buffer[: len(value)] = value
        return buffer

    def begin_forward(self, qo, kv, indices, last, heads, kv_heads, dim, page, *, custom_mask, **given):
        assert page == 1 and (last == 1).all()
        self.qo = self.keep("qo_indptr_buf", qo)
        self.kv = self.keep("paged_kv_indptr_buf", kv)
        self.indices = self.keep("paged_kv_indices_buf", indices)
        if custom_mask is None:
            if not self.fixed:
                self.mask = None
            return
        assert not self.fixed or self.mask is not None, "the graph was captured without a mask"
        packed, at = [], [0]
        for rows, columns, start in self.spans(qo, kv):
            bits = custom_mask[start : start + rows * columns].bool()
            bits = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
            packed.append((bits * 2 ** torch.arange(8)).sum(dim=1).to(torch.uint8))
            at.append(at[-1] + len(packed[-1]))
        self.mask = self.keep("custom_mask_buf", torch.cat(packed))
        self.mask_at = self.keep("mask_indptr_buf", torch.tensor(at, dtype=torch.int32))

    @staticmethod
    def spans(qo, kv):
        start = 0
        for rows, columns in zip(qo.diff().tolist(), kv.diff().tolist()):
            yield rows, columns, start
            start += rows * columns

    def forward(self, q, cache, *, causal, sm_scale, window_left, logits_soft_cap, **given):
        assert window_left == -1 and not logits_soft_cap
        out = torch.empty_like(q)
        for b, (rows, columns, _) in enumerate(self.spans(self.qo, self.kv)):
            if self.mask is not None:
                start = int(self.mask_at[b])
                packed = self.mask[start : start - (-rows * columns // 8)]
                allowed = (packed.unsqueeze(1) >> torch.arange(8) & 1).flatten()[: rows * columns].view(rows, columns)
            else:
                allowed = torch.ones(rows, columns).tril(diagonal=columns - rows if causal else columns)
            slots = self.indices[int(self.kv[b]) : int(self.kv[b + 1])].long()
            part = slice(int(self.qo[b]), int(self.qo[b + 1]))
            out[part] = attend(q[part], cache[0][slots], cache[1][slots], allowed.bool(), sm_scale)[0]
        return out


class Unused:
    """A wrapper that a verify step does not run."""

    def __init__(self, *args, **kwargs):
        pass


def put_kernels_in(flashattention_backend, flashinfer_backend):
    """In place of those that the two modules of SGLang import."""
    flashattention_backend.flash_attn_with_kvcache = flash_attn_with_kvcache
    flashattention_backend.merge_state_v2 = merge_state_v2
    flashattention_backend.merge_state_v2_wrapper = merge_state_v2
    flashinfer_backend.BatchPrefillWithPagedKVCacheWrapper = Paged
    flashinfer_backend.BatchPrefillWithRaggedKVCacheWrapper = Unused
    flashinfer_backend.BatchDecodeWithPagedKVCacheWrapper = Unused
    flashinfer_backend.get_attention_tp_size = lambda: 1


@contextmanager
def on_this_device():
    """FlashInfer's buffers are made for "cuda" by name."""
    zeros = torch.zeros

    def here(*args, device=None, **kwargs):
        return zeros(*args, **kwargs)

    torch.zeros = here
    try:
        yield
    finally:
        torch.zeros = zeros
