# SPDX-License-Identifier: Apache-2.0
"""Which lane a step takes, and what a request may ask for: `custom_params={"ddtree_budget": 8}`, or "chain".

A budget of a request's own is for measuring: it holds while every request that runs asks for the same one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.speculative.ddtree.budgets import budgets, is_auto


if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang.srt.speculative.ddtree.lanes import Lanes

#: The name of the parameter, and its value for DFLASH's own draft in the place of a tree.
PARAMETER = "ddtree_budget"
CHAIN = "chain"
#: The other shape that a step can have.
TREE = "tree"

#: Nodes of a batch up to which `auto` takes the wider lane as long as nothing is measured.
_UNMEASURED_NODES = 256


class Choosing:
    """Chooses a step's lane: what all requests ask for, else the configured budget.

    Args:
        lanes: The engine's.
        arguments: The speculative arguments (`published.spec`).
    """

    def __init__(self, lanes: Lanes, arguments: Any) -> None:
        self._lanes = lanes
        self._block_size = int(arguments.speculative_dflash_block_size)
        self._configured = None if is_auto(arguments) else int(arguments.speculative_ddtree_budget) + 1

    def choose(self, requests: list[Any]) -> tuple[int, str]:
        """Width and shape of the next step of these requests."""
        asked = override_of(requests)
        if asked == CHAIN and self._block_size in self._lanes.widths:
            return self._block_size, CHAIN
        if isinstance(asked, int) and asked + 1 in self._lanes.widths:
            return asked + 1, TREE
        if self._configured is not None:
            return self._configured, TREE
        narrow = [width for width in self._lanes.widths if width * len(requests) <= _UNMEASURED_NODES]
        return max(narrow, default=self._lanes.widths[0]), TREE


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
    params = getattr(request, "sampling_params", None)
    wish = wished(params.get("custom_params")) if isinstance(params, dict) else None
    known = budgets(server_args)
    chain = int(server_args.speculative_dflash_block_size) - 1
    if wish is None or (type(wish) is int and wish in known) or (wish == CHAIN and chain in known):
        return
    also = f', or "{CHAIN}"' if chain in known else f' ("{CHAIN}" needs {chain} among them)'
    raise ValueError(
        f"DDTREE cannot verify with {PARAMETER} {wish!r}: this server has lanes for "
        f"{', '.join(map(str, known))}{also}. Start it with --speculative-ddtree-budgets to have others."
    )
