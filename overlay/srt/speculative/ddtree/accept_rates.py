# SPDX-License-Identifier: Apache-2.0
"""How many tokens a verified step is expected to emit, for every width, learned from the steps of whichever ran.

Trees are nested: the first w nodes of a wider tree are the tree of width w. So a step of width W tells exactly what
each narrower width would have accepted, on the same text. What a wider one would have accepted is the drafter's own
estimate of it, the sum of the nodes' probabilities, times how true such estimates have proved.
"""

from __future__ import annotations

from collections.abc import Sequence


#: Steps that an average looks back on at least, and tokens of requests that it looks back on in large batches.
_LEAST_STEPS, _REQUEST_STEPS = 16, 192
#: Estimated tokens that weigh as much as "wider estimates are as true as narrower ones".
_BORROWED = 2.0


class AcceptRates:
    """Running averages of accepted draft tokens, a request and step, by width and for the chain.

    Widths cut the trees into rings: ring i holds the nodes from width i - 1 to width i. A ring has two averages: what
    the drafter expects of it (fresh with every tree that was grown so far, verified or not), and the ratio of accepted
    to expected tokens (from the steps that verified it; while none does, it moves as that of the last verified ring).
    Forgetting is by steps, so a workload that changes is noticed within a few dozen.

    Args:
        widths: Widths of verified trees, ascending, root included.
        chain_width: Width of the chain, the draft block.
    """

    def __init__(self, widths: Sequence[int], chain_width: int) -> None:
        self.widths = tuple(widths)
        self.chain_width = chain_width
        count = len(self.widths)
        self._expected, self._seen = [0.0] * count, [0.0] * count
        self._accepted, self._believed = [0.0] * count, [0.0] * count
        # Accepted tokens of the chain, and of the tree of its width on the same text.
        self._chain, self._beside = 0.0, 0.0
        self._gains: list[float] | None = None  # of rings, until something is observed

    @property
    def is_blank(self) -> bool:
        """Whether nothing has been observed yet."""
        return not any(self._seen) and self._chain == 0.0

    def observe_tree(
        self,
        requests: int,
        width: int,
        accepted: Sequence[float],
        expected: Sequence[float],
        chain_accepted: float,
    ) -> None:
        """Take in a step that verified trees.

        Args:
            requests: Requests of the step, at least 1.
            width: The verified width.
            accepted: Draft tokens that each width of `widths` would have accepted, summed over requests; read up to
                `width`.
            expected: Sum of the probabilities of each width's nodes, summed over requests; as many entries as widths
                were grown. Read up to there.
            chain_accepted: Draft tokens that the chain would have accepted, as far as the step tells, summed. Read
                where the tree was no narrower than the chain.
        """
        self._gains = None
        keep = self._keep(requests)
        verified = sum(ring_width <= width for ring_width in self.widths)
        before = self._truths()
        for ring, ring_width in enumerate(self.widths[: len(expected)]):
            believed = max(0.0, expected[ring] - (expected[ring - 1] if ring else 0.0))
            self._expected[ring] = keep * self._expected[ring] + believed
            self._seen[ring] = keep * self._seen[ring] + requests
            if ring_width <= width:
                gained = max(0.0, accepted[ring] - (accepted[ring - 1] if ring else 0.0))
                self._accepted[ring] = keep * self._accepted[ring] + gained
                self._believed[ring] = keep * self._believed[ring] + believed
        # What was not verified is as true as it was beside what was: a text that got harder, or easier, is so for all.
        for ring in range(verified, len(self.widths)) if verified else ():
            self._accepted[ring] *= self._truths()[verified - 1] / before[verified - 1]
        if width >= self.chain_width and self.chain_width in self.widths:
            beside = accepted[self.widths.index(self.chain_width)]
            self._chain, self._beside = keep * self._chain + chain_accepted, keep * self._beside + beside

    def observe_chain(self, requests: int, accepted: float) -> None:
        """Take in a step that verified chains.

        Of trees it says nothing, but that no chain accepts more than the tree of its width. If the text gets harder,
        trees keep looking as good as they were, are tried, and are known again.

        Args:
            requests: Requests of the step, at least 1.
            accepted: Draft tokens that it accepted, summed over requests.
        """
        keep = self._keep(requests)
        self._beside = keep * self._beside + requests * self._tree(self.chain_width)
        self._chain = keep * self._chain + accepted

    def emitted(self, width: int, shape: str = "tree") -> float:
        """Tokens that a request is expected to get of a step, the target's own one included.

        Args:
            width: One of `widths` for a tree; read for a tree only.
            shape: "tree", "chain" or "none", which is plain decoding.
        """
        if shape == "none":
            return 1.0
        if shape == "chain":
            return 1.0 + self._chain_share() * self._tree(self.chain_width)
        return 1.0 + max(1.0, self._chain_share()) * self._tree(width)

    def _keep(self, requests: int) -> float:
        return 1.0 - 1.0 / max(_LEAST_STEPS, _REQUEST_STEPS / requests)

    def _chain_share(self) -> float:
        """Accepted tokens of the chain, as a part of those of a tree as wide."""
        borrowed = 4.0 * _BORROWED
        return (self._chain + 0.9 * borrowed) / (self._beside + borrowed)

    def _truths(self) -> list[float]:
        """Accepted tokens over expected ones, ring by ring."""
        truth, found = 1.0, []
        for accepted, believed in zip(self._accepted, self._believed, strict=True):
            truth = (accepted + _BORROWED * truth) / (believed + _BORROWED)
            found.append(truth)
        return found

    def _tree(self, width: int) -> float:
        """Draft tokens that a tree of a width is expected to accept; between two widths, in proportion."""
        if self._gains is None:
            rings = zip(self._truths(), self._expected, self._seen, strict=True)
            self._gains = [truth * expected / seen if seen else 0.0 for truth, expected, seen in rings]
        total, below = 0.0, 1
        for ring_width, gain in zip(self.widths, self._gains, strict=True):
            if ring_width > width:
                return total + gain * (width - below) / (ring_width - below)
            total, below = total + gain, ring_width
            if ring_width == width:
                break
        return total
