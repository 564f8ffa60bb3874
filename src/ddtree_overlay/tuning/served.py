# SPDX-License-Identifier: Apache-2.0
"""What a server says of itself, read without trust: whether it runs DDTREE, and which budgets a request can ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_overlay.errors import OverlayError, UsageError


CHAIN, AUTO = "chain", "auto"
#: Steps that draft nothing; a request asks for them with a budget of 0.
NONE = "none"


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of drafting that is measured.

    Args:
        name: `chain`, `auto`, `none`, or the budget: what the server counts its steps by.
        override: What each request asks for, `custom_params["ddtree_budget"]`; None asks for nothing, so that the
            server does what it does for everybody.
    """

    name: str
    override: int | str | None

    @property
    def custom_params(self) -> dict[str, Any]:
        """The field of the request's sampling parameters."""
        return {} if self.override is None else {"custom_params": {"ddtree_budget": self.override}}


@dataclass(frozen=True, slots=True)
class Served:
    """A server that runs DDTREE.

    Args:
        version: Its SGLang.
        overlay_id: The overlay that it has loaded.
        setting: Its own budget, or `auto`.
        budgets: The budgets that it has captured, ascending; empty when it does not say.
        overrides: What a request may ask for; empty when there is nothing to choose.
        block_size: Tokens that the drafter drafts at once and the one before them; 0 when unknown.
        most: Requests that it runs at once; 0 when unknown.
        text: Whether it takes text, and not token ids only.
        model: The name under which it serves.
    """

    version: str
    overlay_id: str
    setting: int | str
    budgets: tuple[int, ...]
    overrides: tuple[int | str, ...]
    block_size: int
    most: int
    text: bool
    model: str

    @property
    def arms(self) -> tuple[Arm, ...]:
        """What can be compared on this server, the chain first and `auto` last."""
        if len(self.overrides) < 2:
            return (Arm(str(self.setting), None),)
        found = [Arm(str(o or NONE), o) for o in self.overrides]
        return (*found, Arm(AUTO, None)) if self.setting == AUTO else tuple(found)

    def as_dict(self) -> dict[str, Any]:
        """The server as `--json` prints it."""
        return {
            "version": self.version,
            "overlay_id": self.overlay_id,
            "model": self.model,
            "budget": self.setting,
            "budgets": list(self.budgets),
            "overrides": list(self.overrides),
            "block_size": self.block_size,
            "max_running_requests": self.most,
        }


def several(block_size: int = 0) -> str:
    """The flags of a server that has several budgets to compare; the chain needs a tree of its own width."""
    budgets = sorted({4, 8, block_size - 1 if block_size > 1 else 15, 32, 64})
    return f"--speculative-ddtree-budget auto --speculative-ddtree-budgets {','.join(map(str, budgets))}"


def read_server(info: Mapping[str, Any], url: str) -> Served:
    """Read the answer of `/server_info`.

    Raises:
        OverlayError: The server does not run DDTREE, or not with this overlay, or does not say with which budget.
    """
    algorithm = _text(info.get("speculative_algorithm"))
    if (algorithm or "").upper() != "DDTREE":
        raise OverlayError(
            f"the server at {url} does not run DDTREE, but {algorithm or 'no speculative decoding'}",
            why="only DDTREE has budgets to compare",
            next_step="start it with --speculative-algorithm DDTREE --speculative-draft-model-path DRAFTER "
            f"{several()}; where the overlay is missing, first: ddtree-overlay push --host NAME",
        )
    overlay_id = _text(info.get("speculative_ddtree_overlay_id"))
    setting = _setting(info.get("speculative_ddtree_budget"))
    if overlay_id is None or setting is None:
        missing = "no overlay id" if overlay_id is None else "no budget"
        raise OverlayError(
            f"the server at {url} reports DDTREE, but {missing}",
            why="this DDTREE does not come from this overlay, so that nothing is known of its requests",
            next_step="ddtree-overlay push --host NAME --restart  # then run it again",
        )
    block_size = number(info.get("speculative_dflash_block_size")) or 0
    budgets = _numbers(info.get("speculative_ddtree_budgets"))
    states = info.get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    per_rank = number(state.get("effective_max_running_requests_per_dp")) or number(info.get("max_running_requests"))
    return Served(
        version=_text(info.get("version")) or "unknown",
        overlay_id=overlay_id,
        setting=setting,
        budgets=budgets or ((setting,) if isinstance(setting, int) else ()),
        overrides=_overrides(budgets, block_size),
        block_size=block_size,
        most=(per_rank or 0) * (number(info.get("dp_size")) or 1),
        text=info.get("skip_tokenizer_init") is not True,
        model=_text(info.get("served_model_name")) or _text(info.get("model_path")) or "unknown",
    )


def choose_arms(served: Served, names: Sequence[str]) -> tuple[Arm, ...]:
    """The arms called `names`, in the server's order; all of them without a name.

    Raises:
        UsageError: The server has no such arm.
    """
    known = {arm.name: arm for arm in served.arms}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(
            f"--arms: the server has no {unknown[0]!r}",
            why=f"it has {', '.join(known)}",
            next_step=f"name some of these, or restart the server with other budgets: {several(served.block_size)}",
        )
    return tuple(arm for arm in known.values() if not names or arm.name in names)


def running_requests(answer: Any) -> int | None:
    """How many requests run or wait, by the answer of `/v1/loads` or `/get_load`; None when it does not say."""
    rows = answer.get("loads") if isinstance(answer, dict) else answer
    if not isinstance(rows, list) or not rows:
        return None
    total = 0
    for row in rows:
        if not isinstance(row, dict):
            return None
        whole = number(row.get("num_reqs"))
        if whole is None:
            running, waiting = (number(row.get(f"num_{kind}_reqs")) for kind in ("running", "waiting"))
            if running is None or waiting is None:
                return None
            whole = running + waiting
        total += whole
    return total


def steps_by_choice(info: Mapping[str, Any]) -> dict[str, int] | None:
    """Verify steps since the start by what they were drafted with (`chain`, or a budget), all ranks; None: not said."""
    states = info.get("internal_states")
    found: dict[str, int] = {}
    told = False
    for state in states if isinstance(states, list) else ():
        counts = state.get("ddtree_steps") if isinstance(state, dict) else None
        if isinstance(counts, dict):
            told = True
            for name, count in counts.items():
                if _text(name) and (number(count, 10**15) or 0):
                    found[name] = found.get(name, 0) + count
    return found if told else None


def _overrides(budgets: Sequence[int], block_size: int) -> tuple[int | str, ...]:
    """What requests may ask for: each captured budget, and the chain where one is as wide."""
    if len(budgets) < 2:
        return ()
    return ((CHAIN,) if block_size - 1 in budgets else ()) + tuple(budgets)


def _setting(value: Any) -> int | str | None:
    if isinstance(value, str) and value.lower() == AUTO:
        return AUTO
    return number(int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 7 else value) or None


def _numbers(value: Any) -> tuple[int, ...]:
    if isinstance(value, str):
        value = [int(part) for part in value.split(",") if part.strip().isdecimal() and len(part) < 7]
    found = {n for n in map(number, value) if n is not None} if isinstance(value, list) else set()
    return tuple(sorted(found))


def number(value: Any, limit: int = 10**7) -> int | None:
    """A whole number below `limit` that is no nonsense; True is none."""
    known = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit
    return value if known else None


def _text(value: Any) -> str | None:
    return value[:200] if isinstance(value, str) and value and value.isprintable() else None
