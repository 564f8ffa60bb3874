# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of a decoding step in a few lines of torch: exact, and many times faster than the interpreter.

SGLang's Triton backend stays what it is and calls these with its own metadata, so the index pointers, the mask's layout
and its offsets are still those of SGLang. Differences on purpose: a mask is honoured over the prefix as well (the
kernel may skip it), and what DDTREE refuses (windows, sinks, soft caps, scales) is an error.
"""

import itertools

import torch


def extend_attention_fwd(
    q_extend,
    k_extend,
    v_extend,
    o_extend,
    k_buffer,
    v_buffer,
    qo_indptr,
    kv_indptr,
    kv_indices,
    custom_mask,
    is_causal,
    mask_indptr,
    max_len_extend,
    k_scale,
    v_scale,
    sm_scale=None,
    logit_cap=0.0,
    skip_prefix_custom_mask=True,
    sliding_window_size=-1,
    sinks=None,
    **others,
):
    """Attention of every request's new tokens to its prefix and to each other, written to `o_extend`."""
    assert k_scale == v_scale == 1.0 and logit_cap == 0.0 and sliding_window_size == -1 and sinks is None, others
    starts, prefixes = qo_indptr.tolist(), kv_indptr.tolist()
    masks = mask_indptr.tolist() if custom_mask is not None else None
    for b, (first, last) in enumerate(itertools.pairwise(starts)):
        slots = kv_indices[prefixes[b] : prefixes[b + 1]]
        count, prefix = last - first, len(slots)
        if masks is not None:
            allowed = custom_mask[masks[b] : masks[b] + count * (prefix + count)].view(count, prefix + count).bool()
        else:
            allowed = torch.ones(count, prefix + count, dtype=torch.bool)
            if is_causal:
                allowed = allowed.tril(diagonal=prefix)
        keys = torch.cat([k_buffer[slots].to(k_extend.dtype), k_extend[first:last]])
        values = torch.cat([v_buffer[slots].to(v_extend.dtype), v_extend[first:last]])
        o_extend[first:last] = _attend(q_extend[first:last], keys, values, allowed, sm_scale)


def decode_attention_fwd(
    q,
    k_buffer,
    v_buffer,
    o,
    kv_indptr,
    kv_indices,
    attn_logits,
    attn_lse,
    num_kv_splits,
    max_kv_splits,
    sm_scale,
    k_scale,
    v_scale,
    logit_cap=0.0,
    sinks=None,
    **others,
):
    """Attention of one token a request to everything before it, itself included, written to `o`."""
    assert k_scale == v_scale == 1.0 and logit_cap == 0.0 and sinks is None, others
    bounds = kv_indptr.tolist()
    for b in range(q.shape[0]):
        slots = kv_indices[bounds[b] : bounds[b + 1]]
        allowed = torch.ones(1, len(slots), dtype=torch.bool)
        o[b : b + 1] = _attend(
            q[b : b + 1], k_buffer[slots].to(q.dtype), v_buffer[slots].to(q.dtype), allowed, sm_scale
        )


def extend_attention_fwd_unified(
    q,
    o,
    k_buffer,
    v_buffer,
    k_scale,
    v_scale,
    qo_indptr,
    kv_indptr,
    kv_indices,
    prefix_lens,
    max_len_extend,
    custom_mask=None,
    mask_indptr=None,
    sm_scale=None,
    logit_cap=0.0,
    is_causal=True,
    sliding_window_size=-1,
    sinks=None,
    **others,
):
    """What `--enable-deterministic-inference` uses for new tokens: the same, but their keys lie in the pool already."""
    assert k_scale == v_scale == 1.0 and logit_cap == 0.0 and sliding_window_size == -1 and sinks is None, others
    starts, bounds = qo_indptr.tolist(), kv_indptr.tolist()
    for b, (first, last) in enumerate(itertools.pairwise(starts)):
        slots = kv_indices[bounds[b] : bounds[b + 1]]
        count, total = last - first, len(slots)
        if custom_mask is not None:
            at = int(mask_indptr[b])
            allowed = custom_mask[at : at + count * total].view(count, total).bool()
        else:
            allowed = torch.ones(count, total, dtype=torch.bool)
            if is_causal:
                allowed = allowed.tril(diagonal=total - count)
        o[first:last] = _attend(
            q[first:last], k_buffer[slots].to(q.dtype), v_buffer[slots].to(q.dtype), allowed, sm_scale
        )


def build_unified_kv_indices(kv_indptr, kv_indices, starts, lengths, new_slots, batch_size):
    """Each request's slots, those of its new tokens behind those of its prefix: bounds, slots, prefix lengths."""
    bounds, parts = kv_indptr.tolist(), []
    for b, (start, length) in enumerate(zip(starts.tolist()[:batch_size], lengths.tolist())):
        parts += [kv_indices[bounds[b] : bounds[b + 1]], new_slots[start : start + length]]
    prefixes = kv_indptr[1 : batch_size + 1] - kv_indptr[:batch_size]
    totals = torch.cumsum(prefixes + lengths[:batch_size], dim=0)
    return torch.cat([totals.new_zeros(1), totals]).int(), torch.cat([p.long() for p in parts]), prefixes


def _attend(queries, keys, values, allowed, scale):
    """[rows, heads, dim] x [columns, kv heads, dim] -> [rows, heads, dim]; a head shares the keys of its group."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (part.float().repeat_interleave(group, dim=1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.float(), keys) * (scale or queries.shape[-1] ** -0.5)
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(queries.dtype)


class _Launch:
    """A function in place of a kernel: `kernel[grid](...)` calls it once."""

    def __init__(self, function):
        self._function = function

    def __getitem__(self, grid):
        return self._function


@_Launch
def create_flashinfer_kv_indices_triton(
    req_to_token,
    rows,
    lengths,
    kv_indptr,
    starts,
    kv_indices,
    stride,
    **others,
):
    """Each request's slots, one request behind the other."""
    assert others.get("ENTRY_PAGE_SIZE", 1) == 1 and others.get("token_mapping") is None, others
    begins = [0] * len(rows) if starts is None else starts.tolist()
    for row, length, at, begin in zip(rows.tolist(), lengths.tolist(), kv_indptr.tolist(), begins):
        kv_indices[at : at + length] = req_to_token[row, begin : begin + length]


def assign_req_to_token_pool_func(rows, req_to_token, starts, ends, slots, batch_size):
    """Write each request's share of `slots` into its row."""
    at = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist()):
        req_to_token[row, start:end] = slots[at : at + end - start].to(req_to_token.dtype)
        at += end - start


def assign_extend_cache_locs_func(
    req_pool_indices, req_to_token, start_offset, end_offset, batch_size, draft_token_num, device
):
    """Read each request's span of its row, one request behind the other."""
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist())
    return torch.cat([req_to_token[row, start:end] for row, start, end in spans]).to(torch.int64)


def murmur_hash32(seeds, positions, columns):
    """The hash that seeded sampling draws from: MurmurHash3 of a 64-bit seed, a position and a column, uint32."""
    seeds, state = seeds.to(torch.int64), torch.zeros(len(seeds), len(columns), dtype=torch.int64)
    for word in (seeds[:, None], seeds[:, None] >> 32, positions.to(torch.int64)[:, None], columns.to(torch.int64)):
        key = _low(_rotated(_low((word & _LOW) * 0xCC9E2D51), 15) * 0x1B873593)
        state = _low(_rotated(state ^ key, 13) * 5 + 0xE6546B64)
    state ^= 16
    state = _low((state ^ (state >> 16)) * 0x85EBCA6B)
    state = _low((state ^ (state >> 13)) * 0xC2B2AE35)
    return (state ^ (state >> 16)).to(torch.uint32)


_LOW = 0xFFFFFFFF


def _low(word):
    """The lower 32 bits; the product of two such words keeps them in int64, whatever is above."""
    return word & _LOW


def _rotated(word, bits):
    return _low((word << bits) | (word >> (32 - bits)))


#: Module of SGLang, below `sglang.`, -> the names that are replaced there. A release has at least one of the places
#: of each name.
PLACES = {
    "srt.layers.attention.triton_ops.extend_attention": [
        "extend_attention_fwd",
        "extend_attention_fwd_unified",
        "build_unified_kv_indices",
    ],
    "srt.layers.attention.triton_ops.decode_attention": ["decode_attention_fwd"],
    "srt.layers.attention.utils": ["create_flashinfer_kv_indices_triton"],
    "srt.layers.utils.hash": ["murmur_hash32"],
    "srt.speculative.spec_utils": ["assign_req_to_token_pool_func"],
    # 0.5.14 and 0.5.15
    "srt.speculative.triton_ops.cache_locs": ["assign_req_to_token_pool_func", "assign_extend_cache_locs_func"],
    "srt.layers.attention.triton_ops.kv_indices": ["create_flashinfer_kv_indices_triton"],
    # 0.5.16 and later
    "kernels.ops.speculative.cache_locs": ["assign_extend_cache_locs_func"],
    "kernels.ops.attention.extend_attention": ["extend_attention_fwd"],
    "kernels.ops.attention.decode_attention": ["decode_attention_fwd"],
    "kernels.ops.kvcache.kv_indices": ["create_flashinfer_kv_indices_triton"],
    # 0.5.20 and later
    "kernels.ops.attention.kv_indices": ["create_flashinfer_kv_indices_triton"],
}
