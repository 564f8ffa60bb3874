# SPDX-License-Identifier: Apache-2.0
"""Exponents that make the drafter's probabilities those of a tree: one a draft position, fitted while serving.

A drafter's distribution at position d says how likely a token is there. A tree asks how likely it is there after all
tokens before it were accepted, which is more (or, for a bad drafter, less). Trees are therefore scored by
log-softmax(exponent[d] * logits). What is verified does not depend on the scores, so the output stays the target's own
whatever the exponents are; only how much of a tree is accepted changes.

The fit maximises the likelihood of the target's tokens along accepted paths. With n drafts accepted, the target's
tokens at the depths 1 .. n + 1 (the last of them is the bonus token) are the *labels* of these positions: deeper, and
along other paths, nothing is known. The likelihood of one exponent is that of an exponential family, concave, with the
gradient z_label - E[z] and the curvature Var[z] for logits z. A label that is not among the first `EVENTS` choices
counts as the event "none of these", so one wild token says no more than that.

Each step is one of Newton's on the sum of all labels, older ones weighing less, from which a prior holds back to 1:
a position's to the common exponent of all, and that to 1. Where the exponents in use explain recent labels worse than
1 does (the workload has changed), they go back to 1 and old labels are forgotten faster, until they are ahead again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.speculative.ddtree.accept import Acceptance
from sglang.srt.speculative.ddtree.calibration_args import AUTO, HIGHEST, LOWEST, calibration_values
from sglang.srt.speculative.ddtree.draft_head import Choices


#: Choices of a position that are told apart, or as many as a narrow tree needs; all others are one event.
EVENTS = 16

#: How hard the common exponent is held at 1, and a position's at the common one: curvature of that many nats.
PRIOR = 30.0

#: Weight of a label for each later label of its position: half after 1400, while the exponents are ahead of 1.
MEMORY = 0.9995
#: And while they are behind: half after 34.
SHORT_MEMORY = 0.98

#: Most nats that the exponents' lead over 1 is remembered to be, either way: a change shows after so many are lost.
MOST_AHEAD = 4.0

#: Least probability of "none of these": below it float32 can hardly tell the sum of the others from 1.
LEAST_REST = 1e-4

#: Rows of `Calibration.state`, float32 [rows, L]:
#: the exponents in use; those that fit best; curvature and first moment of the log-likelihood, prior left out; nats by
#: which recent labels speak for the exponents in use; labels, and nats of all of them for those exponents against 1.
EXPONENTS, FITTED, CURVATURE, MOMENT, AHEAD, LABELS, GAIN = range(7)
STATE_ROWS = 7


class Calibration:
    """The exponents of one server, and their fit.

    Args:
        wanted: What `calibration_values` returns: `AUTO`, None for off, or fixed exponents.
        positions: Draft positions L: the block size - 1.
        device: Where the choices are.
    """

    def __init__(self, wanted: tuple[float, ...] | str | None, positions: int, device: torch.device | str) -> None:
        self._wanted = wanted
        #: Called behind every observed step.
        self.told: Callable[[], None] | None = None
        #: Float32 [STATE_ROWS, L]; changed in place, so a captured graph reads it as it is at each replay.
        self.state = torch.zeros((STATE_ROWS, positions), dtype=torch.float32, device=device)
        self.reset()

    @classmethod
    def of(cls, text: str, positions: int, device: torch.device | str, *, topk_cap: int | None = None) -> Calibration:
        """What the flag's `text` asks for; arguments as in `calibration_values` and above.

        Args:
            topk_cap: Most choices a position. One makes a chain, whatever the exponents: then they are off.
        """
        return cls(None if topk_cap == 1 else calibration_values(text, positions), positions, device)

    @property
    def is_fitted(self) -> bool:
        """Whether labels change the exponents."""
        return self._wanted == AUTO

    @property
    def exponents(self) -> torch.Tensor | None:
        """What `DraftHead.top_log_probs` takes: float32 [L] on the device, or None when calibration is off."""
        return None if self._wanted is None else self.state[EXPONENTS]

    def reset(self) -> None:
        """Forget all labels: the weights are new. Fixed exponents stay."""
        self.state.zero_()
        self.state[: FITTED + 1] = 1.0
        if isinstance(self._wanted, tuple):
            self.state[: FITTED + 1] = torch.tensor(self._wanted, device=self.state.device)

    def observe(self, choices: Choices, acceptance: Acceptance, root_only: torch.Tensor | None = None) -> None:
        """Take in the labels of a step: on a GPU one launch, nothing waits for it.

        Args:
            choices: Of bs * L rows, made with `exponents`, and with moments where `is_fitted`.
            root_only: Requests whose drafts were not judged, bool [bs].
        """
        if not self.is_fitted:
            return
        self._update(self.state, choices, acceptance, root_only)
        if self.told is not None:
            self.told()

    def warm_up(self, choices: Choices, acceptance: Acceptance, root_only: torch.Tensor | None) -> None:
        """Launch what `observe` would; nothing is learned."""
        if self.is_fitted:
            self._update(self.state.clone(), choices, acceptance, root_only)

    def _update(
        self, state: torch.Tensor, choices: Choices, acceptance: Acceptance, root_only: torch.Tensor | None
    ) -> None:
        if state.is_cuda:
            from sglang.srt.speculative.ddtree.calibration_kernel import update
        else:
            update = update_by_tensors
        update(state, choices, acceptance.tokens, acceptance.accept_lens, root_only)

    def report(self) -> dict[str, Any]:
        """`describe` of the state as it is now. Waits for the device: not for a step."""
        return self.describe(self.state.cpu())

    def describe(self, state: torch.Tensor) -> dict[str, Any]:
        """What a host copy of `state` says: lists over the draft positions.

        Returns:
            `exponents` in use, `fitted` ones, `labels` seen since the last reset, and `gain`: nats a label by which the
            exponents in use were ahead of 1.
        """
        rows = state.tolist()
        gains = [gain / labels if labels else 0.0 for gain, labels in zip(rows[GAIN], rows[LABELS], strict=True)]
        return {"exponents": rows[EXPONENTS], "fitted": rows[FITTED], "labels": rows[LABELS], "gain": gains}


def update_by_tensors(
    state: torch.Tensor,
    choices: Choices,
    tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    root_only: torch.Tensor | None = None,
) -> None:
    """One step of the fit by tensor operations, in float64: the reference. `state` is changed in place.

    Args:
        state: `Calibration.state`.
        choices: Made with the exponents in `state`, of bs * L rows.
        tokens: Emitted tokens, integers [bs, S].
        accept_lens: Accepted drafts, integers [bs].
        root_only: Requests whose drafts were not judged, bool [bs].
    """
    assert choices.logits is not None
    assert choices.mean is not None
    assert choices.plain_log_z is not None
    positions, batch = state.shape[1], tokens.shape[0]
    kept = min(EVENTS, choices.logits.shape[1])
    shape = (batch, positions, -1)

    def table(values: torch.Tensor) -> torch.Tensor:
        return values.view(shape)[..., :kept].double()

    mean = choices.mean.view(batch, positions).double()
    log_z = choices.plain_log_z.view(batch, positions).double()
    known = mean.isfinite() & log_z.isfinite()
    known &= torch.arange(positions, device=state.device) <= accept_lens.unsqueeze(1)
    if root_only is not None:
        known &= ~root_only.unsqueeze(1)
    logits, log_probs = table(choices.logits), table(choices.log_probs)
    plain = logits - log_z.unsqueeze(2)
    probs = log_probs.exp()
    away = torch.where(probs > 0, logits - mean.unsqueeze(2), 0.0)

    rest = (1.0 - probs.sum(dim=2)).clamp(min=LEAST_REST)
    # The distances of all tokens from the mean weigh out; no other token's logit is above the last one kept.
    rest_away = torch.minimum(-(probs * away).sum(dim=2) / rest, away[..., -1])
    curvature = (probs * away**2).sum(dim=2) + rest * rest_away**2
    rest_gain = rest.log() - (1.0 - plain.exp().sum(dim=2)).clamp(min=LEAST_REST).log()

    is_label = choices.token_ids.view(shape)[..., :kept] == tokens[:, :positions].unsqueeze(2)
    is_label &= probs > 0  # what fills up a short vocabulary is no token
    is_kept = is_label.any(dim=2)
    gradient = torch.where(is_kept, torch.where(is_label, away, 0.0).sum(dim=2), rest_away)
    gain = torch.where(is_kept, torch.where(is_label, log_probs - plain, 0.0).sum(dim=2), rest_gain)

    def over_batch(values: torch.Tensor) -> torch.Tensor:
        return torch.where(known, values, 0.0).sum(dim=0)

    _advance(state, over_batch(torch.ones_like(mean)), *map(over_batch, (gradient, curvature, gain)))


def _advance(
    state: torch.Tensor, labels: torch.Tensor, gradient: torch.Tensor, curvature: torch.Tensor, gain: torch.Tensor
) -> None:
    """Newton's step from a batch's sums, float64 [L] each."""
    old = state.double()
    ahead = old[AHEAD]
    slow, fast = labels * math.log(MEMORY), labels * math.log(SHORT_MEMORY)
    forget = torch.where(ahead < 0, fast, slow).exp()
    total = old[CURVATURE] * forget + curvature
    moment = old[MOMENT] * forget + gradient + curvature * (old[EXPONENTS] - 1.0)

    common = moment.sum() / (total.sum() + PRIOR)
    fitted = (1.0 + (moment + PRIOR * common) / (total + PRIOR)).clamp(LOWEST, HIGHEST)
    # Labels that would go beyond a bound are not saved up.
    moment = (fitted - 1.0) * (total + PRIOR) - PRIOR * common
    ahead = (ahead * fast.exp() + gain).clamp(-MOST_AHEAD, MOST_AHEAD)
    trust = (1.0 + ahead / MOST_AHEAD).clamp(max=1.0)
    rows = [1.0 + trust * (fitted - 1.0), fitted, total, moment, ahead, old[LABELS] + labels, old[GAIN] + gain]
    state.copy_(torch.stack(rows).to(state.dtype))
