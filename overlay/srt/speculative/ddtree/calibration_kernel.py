# SPDX-License-Identifier: Apache-2.0
"""One step of `calibration.update_by_tensors` in one kernel launch, in float32.

One program takes all requests, a fixed number at a time and in their order, so the sums are the same on every
tensor-parallel rank and in every run.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from sglang.srt.speculative.ddtree.calibration import (
    EVENTS,
    LEAST_REST,
    MEMORY,
    MOST_AHEAD,
    PRIOR,
    SHORT_MEMORY,
)
from sglang.srt.speculative.ddtree.calibration_args import HIGHEST, LOWEST
from sglang.srt.speculative.ddtree.draft_head import Choices
from sglang.srt.speculative.ddtree.launching import launch


_CONSTANTS = {
    "REQUESTS": 16,  # taken in at once
    "LEAST_REST": LEAST_REST,
    "LOG_MEMORY": math.log(MEMORY),
    "LOG_SHORT_MEMORY": math.log(SHORT_MEMORY),
    "PRIOR": PRIOR,
    "MOST_AHEAD": MOST_AHEAD,
    "LOWEST": LOWEST,
    "HIGHEST": HIGHEST,
}


#: One compiled kernel serves every batch: a step must not wait for a compiler.
_SIZES = ("batch", "positions", "logit_stride", "log_prob_stride", "id_stride", "token_stride")
_TENSORS = (
    "state", "logits", "log_probs", "token_ids", "means", "plain_log_z", "tokens", "accept_lens", "root_only",
)  # fmt: skip


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_TENSORS)
def _update_kernel(
    state,  # float32 [7, L], rows as in `calibration`
    logits,  # float32 [bs * L, choices], each choice beside the next, like the next two
    log_probs,  # float32
    token_ids,  # int64
    means,  # float32 [bs * L]
    plain_log_z,  # float32 [bs * L]
    tokens,  # int64 [bs, S]
    accept_lens,  # int64 [bs]
    root_only,  # bool [bs], or None
    batch,
    positions,
    logit_stride,
    log_prob_stride,
    id_stride,
    token_stride,
    KEPT: tl.constexpr,
    POSITIONS: tl.constexpr,  # a power of two, at least `positions`
    REQUESTS: tl.constexpr,
    LEAST_REST: tl.constexpr,
    LOG_MEMORY: tl.constexpr,
    LOG_SHORT_MEMORY: tl.constexpr,
    PRIOR: tl.constexpr,
    MOST_AHEAD: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
):
    place = tl.arange(0, POSITIONS)
    is_place = place < positions
    labels = tl.zeros([POSITIONS], tl.float32)
    gradient = tl.zeros([POSITIONS], tl.float32)
    curvature = tl.zeros([POSITIONS], tl.float32)
    gain = tl.zeros([POSITIONS], tl.float32)

    for first in range(0, batch, REQUESTS):
        request = first + tl.arange(0, REQUESTS)
        is_request = request < batch
        accepted = tl.load(accept_lens + request, mask=is_request, other=-1)
        if root_only is not None:
            judged = tl.load(root_only + request, mask=is_request, other=1).to(tl.int32) == 0
            accepted = tl.where(judged, accepted, -1)
        known = (place[None, :] <= accepted[:, None]) & is_place[None, :]
        row = request[:, None].to(tl.int64) * positions + place[None, :]
        mean = tl.load(means + row, mask=known, other=0.0)
        log_z = tl.load(plain_log_z + row, mask=known, other=0.0)
        known &= tl.abs(mean) + tl.abs(log_z) < float("inf")  # false for NaN as well
        label = tl.load(tokens + request[:, None].to(tl.int64) * token_stride + place[None, :], mask=known, other=-1)

        covered = tl.zeros([REQUESTS, POSITIONS], tl.float32)  # probability of the kept choices
        plain_covered = tl.zeros([REQUESTS, POSITIONS], tl.float32)  # the same at exponent 1
        pull = tl.zeros([REQUESTS, POSITIONS], tl.float32)
        spread = tl.zeros([REQUESTS, POSITIONS], tl.float32)
        is_kept = tl.zeros([REQUESTS, POSITIONS], tl.int32)
        label_away = tl.zeros([REQUESTS, POSITIONS], tl.float32)
        label_gain = tl.zeros([REQUESTS, POSITIONS], tl.float32)
        away = tl.zeros([REQUESTS, POSITIONS], tl.float32)
        for choice in tl.static_range(KEPT):
            logit = tl.load(logits + row * logit_stride + choice, mask=known, other=0.0)
            log_prob = tl.load(log_probs + row * log_prob_stride + choice, mask=known, other=0.0)
            token = tl.load(token_ids + row * id_stride + choice, mask=known, other=-2)
            prob = tl.exp(log_prob)
            plain = logit - log_z
            away = tl.where(prob > 0.0, logit - mean, 0.0)
            covered += prob
            plain_covered += tl.exp(plain)
            pull += prob * away
            spread += prob * away * away
            hit = (token == label) & (prob > 0.0)  # what fills up a short vocabulary is no token
            is_kept = tl.where(hit, 1, is_kept)
            label_away = tl.where(hit, away, label_away)
            label_gain = tl.where(hit, log_prob - plain, label_gain)

        rest = tl.maximum(1.0 - covered, LEAST_REST)
        rest_away = tl.minimum(-pull / rest, away)
        rest_gain = tl.log(rest) - tl.log(tl.maximum(1.0 - plain_covered, LEAST_REST))
        labels += tl.sum(tl.where(known, 1.0, 0.0), axis=0)
        gradient += tl.sum(tl.where(known, tl.where(is_kept > 0, label_away, rest_away), 0.0), axis=0)
        curvature += tl.sum(tl.where(known, spread + rest * rest_away * rest_away, 0.0), axis=0)
        gain += tl.sum(tl.where(known, tl.where(is_kept > 0, label_gain, rest_gain), 0.0), axis=0)

    exponent = tl.load(state + place, mask=is_place, other=1.0)
    total = tl.load(state + 2 * positions + place, mask=is_place, other=0.0)
    moment = tl.load(state + 3 * positions + place, mask=is_place, other=0.0)
    ahead = tl.load(state + 4 * positions + place, mask=is_place, other=0.0)
    all_labels = tl.load(state + 5 * positions + place, mask=is_place, other=0.0)
    all_gain = tl.load(state + 6 * positions + place, mask=is_place, other=0.0)

    fast = tl.exp(labels * LOG_SHORT_MEMORY)
    forget = tl.where(ahead < 0, fast, tl.exp(labels * LOG_MEMORY))
    total = total * forget + curvature
    moment = moment * forget + gradient + curvature * (exponent - 1.0)
    common = tl.sum(moment, axis=0) / (tl.sum(total, axis=0) + PRIOR)
    fitted = 1.0 + (moment + PRIOR * common) / (total + PRIOR)
    fitted = tl.minimum(tl.maximum(fitted, LOWEST), HIGHEST)
    moment = (fitted - 1.0) * (total + PRIOR) - PRIOR * common
    ahead = tl.minimum(tl.maximum(ahead * fast + gain, -MOST_AHEAD), MOST_AHEAD)
    trust = tl.minimum(1.0 + ahead / MOST_AHEAD, 1.0)

    tl.store(state + place, 1.0 + trust * (fitted - 1.0), mask=is_place)
    tl.store(state + positions + place, fitted, mask=is_place)
    tl.store(state + 2 * positions + place, total, mask=is_place)
    tl.store(state + 3 * positions + place, moment, mask=is_place)
    tl.store(state + 4 * positions + place, ahead, mask=is_place)
    tl.store(state + 5 * positions + place, all_labels + labels, mask=is_place)
    tl.store(state + 6 * positions + place, all_gain + gain, mask=is_place)


def update(
    state: torch.Tensor,
    choices: Choices,
    tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    root_only: torch.Tensor | None = None,
) -> None:
    """One step of the fit; arguments as in `calibration.update_by_tensors`."""
    assert choices.logits is not None
    positions, kept = state.shape[1], choices.logits.shape[1]
    launch(
        _update_kernel,
        (1, 1, 1),
        (
            state,
            choices.logits,
            choices.log_probs,
            choices.token_ids,
            choices.mean,
            choices.plain_log_z,
            tokens,
            accept_lens,
            root_only,
            tokens.shape[0],
            positions,
            choices.logits.stride(0),
            choices.log_probs.stride(0),
            choices.token_ids.stride(0),
            tokens.stride(0),
        ),
        {"KEPT": min(EVENTS, kept), "POSITIONS": triton.next_power_of_2(positions), **_CONSTANTS},
        num_warps=4,
        key=root_only is None,
    )
