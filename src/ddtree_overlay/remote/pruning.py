# SPDX-License-Identifier: Apache-2.0
"""Which deployments lose their backups: the decision from the history alone, and carrying it out."""

from __future__ import annotations

import contextlib
import shutil
import time
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .store import Store

#: As many steps back stay possible, and as many deployments that were undone stay to be looked at.
KEEP = 10
#: The event of a deployment whose backups were removed.
PRUNED = "pruned"


def states(events: list[dict[str, Any]]) -> dict[str, str]:
    """What became of each deployment, by its id: `pending`, `good`, `bad`, `undone` or `pruned`."""
    found: dict[str, str] = {}
    for event in events:
        kind, name = event["event"], event["id"]
        if kind in ("good", "bad", PRUNED):
            found[name] = kind
        elif kind == "push":
            found[name] = "pending"
        elif event.get("of") == "push":
            found[name] = "bad"
        elif kind == "rollback":
            # Everything from the one that was live down to the one that is live now.
            low = _number(event["current"])
            undone = (n for n in found if low < _number(n) <= _number(event["before"]))
            found.update({n: "undone" for n in undone if found[n] == "pending"})
    return found


def prunable(
    events: list[dict[str, Any]], previous: dict[str, str | None], current: str | None, keep: int = KEEP
) -> list[str]:
    """The deployments in `previous` whose backups are not needed any more, the oldest first.

    Kept are the live one, `keep` steps of its way back, and `keep` others: first those that were good, then the newest.
    However far back a way was cut, it ends at the base: every deployment keeps that itself.

    Args:
        events: The history.
        previous: Each deployment that has backups, with the one it can go back to.
        current: The live one.
        keep: How many of each kind.
    """
    way: list[str] = []
    step = current
    while step is not None and step in previous and len(way) <= keep:
        way.append(step)
        step = previous[step]
    state = states(events)
    others = [name for name in previous if name not in way]
    others.sort(key=lambda n: (state.get(n) == "good", _number(n)), reverse=True)
    return sorted(others[keep:], key=_number)


def prune(store: Store, keep: int = KEEP) -> list[str]:
    """Remove the backups that are not needed any more; the caller holds the lock. Gives the ids.

    The line in the history comes first: a folder without its contents is then never taken for damage.
    """
    events = store.events()
    current = events[-1]["current"] if events else None
    known = {e["id"] for e in events}
    previous = {}
    for name in store.deployments():
        if name in known:
            previous[name] = store.previous(name)
    gone = prunable(events, previous, current, keep)
    for name in gone:
        last = next(e for e in reversed(events) if e["id"] == name)
        fields = {k: last[k] for k in ("id", "overlay_id", "operator")}
        event = {**fields, "event": PRUNED, "current": current, "before": current, "note": ""}
        store.append({**event, "txn": store.next_txn(), "time": time.time()})
        # What cannot be removed now is removed at the next contact: its line says that it may go.
        with contextlib.suppress(OSError):
            shutil.rmtree(store.deployment(name))
    return gone


def _number(name: str | None) -> int:
    return int(name[2:]) if name else 0
