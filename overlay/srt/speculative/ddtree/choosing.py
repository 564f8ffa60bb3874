# SPDX-License-Identifier: Apache-2.0
"""Which lane a step takes, and what a request may ask for: `custom_params={"ddtree_budget": 8}`, or "chain".

A budget of a request's own is for measuring: it holds while every request that runs asks for the same one.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from sglang.srt.speculative.ddtree.budgets import budgets, is_auto
from sglang.srt.speculative.ddtree.report import publish
from sglang.srt.speculative.ddtree.round_times import Choice


if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from sglang.srt.speculative.ddtree.accept import Acceptance
    from sglang.srt.speculative.ddtree.auto import Auto
    from sglang.srt.speculative.ddtree.lanes import Lanes
    from sglang.srt.speculative.ddtree.tree import Tree

#: The name of the parameter, and its value for DFLASH's own draft in the place of a tree.
PARAMETER = "ddtree_budget"
CHAIN = "chain"
#: The other shapes that a step can have: a tree, and the root alone, for which nothing is drafted.
TREE = "tree"
NONE = "none"


class Choosing:
    """Chooses a step's lane: what all requests ask for, else the configured budget, else what `auto` has learned.

    Args:
        lanes: The engine's.
        arguments: The speculative arguments (`published.spec`).
    """

    def __init__(self, lanes: Lanes, arguments: Any) -> None:
        self._lanes = lanes
        self._block_size = int(arguments.speculative_dflash_block_size)
        self._configured = None if is_auto(arguments) else Choice(int(arguments.speculative_ddtree_budget) + 1, TREE)
        self._auto: Auto | None = None
        self._choice: Choice | None = None
        #: Steps of each choice so far, whoever made it.
        self.ran: Counter[Choice] = Counter()
        publish("ddtree_steps", lambda: {str(choice): count for choice, count in self.ran.items()})

    def ready(self, *, model_runner: Any, draft_runner: Any, group: Any) -> None:
        """The lanes are captured: set `auto` up, if it is on (`auto_setup.auto_of`)."""
        if self._configured is None:
            # Here, since the HTTP server imports this module for its check of requests.
            from sglang.srt.speculative.ddtree.auto_setup import auto_of

            self._auto = auto_of(
                self._lanes,
                block_size=self._block_size,
                model_runner=model_runner,
                draft_runner=draft_runner,
                group=group,
                ran=self.ran,
            )

    def begin(self, batch: Any) -> bool:
        """The worker is about to run a batch; if it decodes, which is returned, the step's choice is made here."""
        self._choice = None
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle():
            if self._auto is not None:
                self._auto.interrupt()
            return False
        wished = self._wished(batch.reqs)
        if self._auto is not None:
            if wished is None:
                wished = self._learned(self._auto, len(batch.reqs))
            else:
                self._auto.interrupt()  # for measuring: `auto` is not to learn from what others chose
        self._choice = wished or self._configured
        assert self._choice is not None
        self.ran[self._choice] += 1
        return True

    def choose(self) -> Choice:
        """Width and shape of what the step that runs is verified with."""
        assert self._choice is not None
        return self._choice

    def grown_width(self) -> int:
        """How wide the trees of the step that runs are to be grown, at least as wide as they are verified."""
        choice = self.choose()
        return choice.width if self._auto is None else self._auto.grown_width(choice)

    def count(self, tree: Tree, acceptance: Acceptance, choices: tuple[torch.Tensor, torch.Tensor]) -> None:
        """The step's acceptance is known; arguments as in `tally.tally_step`."""
        if self._auto is not None:
            self._auto.count(tree, acceptance, choices)

    def warm_up(self, tree: Tree, acceptance: Acceptance, choices: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Launch what `count` would; nothing is learned."""
        if self._auto is not None:
            self._auto.warm_up(tree, acceptance, choices)

    def meanwhile(self) -> None:
        """The host is about to wait for the step: what comes behind it can be planned."""
        if self._auto is not None:
            self._auto.meanwhile()

    def end(self) -> None:
        """The worker has launched the batch to its end."""
        if self._auto is not None:
            self._auto.end()

    def _learned(self, auto: Auto, batch_size: int) -> Choice:
        """What `auto` chooses; with more requests than any graph serves, nothing wider than the chain.

        No time of such a step was ever measured, and it stands for no batch size that `auto` keeps times of.
        """
        planned = auto.chooser.choose(batch_size)
        if self._lanes.fits(planned.width, batch_size):
            return auto.begin(batch_size)
        auto.interrupt()
        if planned.width <= self._block_size:
            return planned
        narrow = [width for width in self._lanes.widths if width <= self._block_size]
        width = narrow[-1] if narrow else self._lanes.widths[0]
        return Choice(width, TREE if width > 1 else NONE)

    def _wished(self, requests: list[Any]) -> Choice | None:
        """What all requests ask for, unless no graph serves so many of them: a step of any size would be theirs."""
        asked = override_of(requests)
        if asked == CHAIN:
            wished = Choice(self._block_size, CHAIN)
        elif isinstance(asked, int):
            wished = Choice(asked + 1, TREE if asked else NONE)
        else:
            return None
        served = wished.width in self._lanes.widths and self._lanes.fits(wished.width, len(requests))
        return wished if served else None


def tree_shape(width: int, shape: str, cap: int | None, *, chain_seed: bool) -> tuple[int, int, bool]:
    """What a step's tree is built with: its budget, the choices of each position, and whether the chain comes first.

    Args:
        width: Nodes per request.
        shape: `TREE`, or `CHAIN`: then the tree is DFLASH's chain.
        cap: Most choices of a position, or None.
        chain_seed: Whether trees get the chain first.
    """
    budget = width - 1
    if shape == CHAIN:
        return budget, 1, True
    # A path of ranks r1..rd is among the best B only if r1 * .. * rd <= B, so B choices a position are exact.
    return budget, budget if cap is None else min(budget, cap), chain_seed


def override_of(requests: Iterable[Any]) -> int | str | None:
    """The budget that every one of these requests asks for, or None."""
    found: int | str | None = None
    for request in requests:
        wish = wished(request.sampling_params.custom_params)
        if wish is None or (found is not None and wish != found):
            return None
        found = wish
    return found


def wished(custom_params: Any) -> Any:
    """What a request asks for, as it was written, or None."""
    return custom_params.get(PARAMETER) if isinstance(custom_params, dict) else None


def check_wish(server_args: Any, request: Any) -> None:
    """Refuse a request that asks for a budget which no lane was built for.

    Args:
        server_args: The arguments, or whatever shows the speculative ones.
        request: As the HTTP server or the engine got it, with `sampling_params` as a dictionary.

    Raises:
        ValueError: The text names the budgets that can be asked for.
    """
    given = getattr(request, "sampling_params", None)
    wish = wished(given.get("custom_params")) if isinstance(given, dict) else None
    known = budgets(server_args)
    chain = int(server_args.speculative_dflash_block_size) - 1
    if wish is None or (type(wish) is int and wish in known) or (wish == CHAIN and chain in known):
        return
    also = f', or "{CHAIN}"' if chain in known else f' ("{CHAIN}" needs {chain} among them)'
    raise ValueError(
        f"DDTREE cannot verify with {PARAMETER} {wish!r}: this server has lanes for "
        f"{', '.join(map(str, known))}{also}. Start it with --speculative-ddtree-budgets to have others."
    )
