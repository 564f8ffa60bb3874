# SPDX-License-Identifier: Apache-2.0
"""Status and history: what is deployed here, and how it came to be."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from . import ages
from .common import Refusal
from .damage import marked
from .facts import container
from .grounds import lost_record, unfinished
from .installed import Installed, remedy
from .locate import Site, locate
from .processes import running
from .reading import describe
from .standing import Standing, standing
from .states import cut_off, said_of
from .store import Store


Answer = tuple[dict[str, Any], bytes]
#: Seconds: the kernel counts start times in hundredths, and file systems have a coarse clock as well.
_TICKS = 0.1


def status(args: dict[str, Any], _: bytes) -> Answer:
    """State of the host and of every file of the live deployment; reads only, also without any deployment."""
    site = locate(args, orphans=True)
    store = Store(site.state, site.root)
    found = _seen(site, store)
    record = found.record
    result = {**describe(site, args), "state": found.state, "reason": found.reason, "files": found.files}
    # Whoever follows a remedy would otherwise install a healthy SGLang again.
    step = remedy(site, record["version"] if record else None) if found.state == "half-installed" else ""
    result.update(unfinished=unfinished(store), remedy=step)
    result["deployment"] = _summaries(store).get(record["id"]) if record else None
    result["processes"] = [{**p, "stale": s} for p, s in _aged(store, found.installed.since)]
    result["container"] = container(site.root)
    return result, b""


def _aged(store: Store, installed: float | None) -> Iterator[tuple[dict[str, Any], bool]]:
    """The running processes, each with whether it has other code than is there now.

    That is also what an installer has replaced since the process was started, at `installed`.
    """
    found, at, wall = running(), ages.now(), time.time()
    events = store.events() if found else []
    for process in found:
        started = ages.start_of(process, at, wall)
        replaced = installed is not None and started < installed - _TICKS
        yield process, replaced or ages.outdated(events, started, at, wall)


def _seen(site: Site, store: Store) -> Standing:
    try:
        return _state(site, store)
    except Refusal:
        # Whoever is changing the host right now may have taken away what was about to be read.
        holder = store.holder()
        if holder is None:
            return _state(site, store)
        busy = f"{holder['operator'] or 'somebody'} is running a {holder['doing']} here"
        return Standing("partial", busy, [], None, Installed("", None, None))


def _state(site: Site, store: Store) -> Standing:
    lost = lost_record(store)
    record = lost or store.current()
    found = standing(site, store, record)
    state, reason = found.state, found.reason
    middle = store.interrupted()
    if middle:
        state, reason = "partial", unfinished(store) or "a run has just ended; ask again"
    elif lost:
        state, reason = "unrecorded", f"{reason}; its line in {store.folder}/history.jsonl is lost"
    elif record is None and state == "pristine" and site.importable and not store.holder() and marked(store):
        state, reason = "unrecorded", f"an overlay is in place, and no deployment in {store.folder} put it there"
    return replace(found, state=state, reason="; ".join(filter(None, [reason, cut_off(store)])))


def history(args: dict[str, Any], _: bytes) -> Answer:
    """Every deployment, the oldest first."""
    site = locate(args, orphans=True)
    return {"deployments": list(_summaries(Store(site.state, site.root)).values())}, b""


def one(store: Store, name: str) -> dict[str, Any]:
    """The summary of one deployment."""
    return _summaries(store)[name]


def _summaries(store: Store) -> dict[str, dict[str, Any]]:
    """Fold the events into one summary for each deployment."""
    found: dict[str, dict[str, Any]] = {}
    current = None
    pushed: dict[str, str] = {}
    never = set()
    for event in store.events():
        current = event["current"]
        said = said_of(event)
        if event["event"] in ("good", "bad") and event["id"] in found:
            # What the deployment was pushed over stays worth knowing.
            notes = filter(None, [pushed.get(event["id"], ""), event["note"]])
            found[event["id"]].update(state=event["event"], note="; ".join(notes))
        elif said:
            found[event["id"]] = _summary(store, event, said[1])
            pushed[event["id"]] = event["note"] if event["event"] == "push" else ""
            never |= {event["id"]} if said[1] == "bad" else set()
        if event["event"] == "rollback":
            for summary in found.values():
                above = _number(summary["id"]) > _number(current)
                if above and summary["undone"] is None and summary["id"] not in never:
                    summary["undone"] = event["time"]
                    # Why the host went back by itself.
                    summary["note"] = summary["note"] or event["note"]
    for summary in found.values():
        summary["current"] = summary["id"] == current
    return found


def _number(name: str | None) -> int:
    return int(name[2:]) if name else 0


def _summary(store: Store, event: dict[str, Any], state: str) -> dict[str, Any]:
    try:
        record = store.record(event["id"])
    except Refusal as refusal:
        # The live deployment's record is read elsewhere and refused there; an old one must not hide the others.
        record = {**dict.fromkeys(("base_id", "release", "version"), "unknown"), **event}
        record["files"] = range(event.get("files", 0))
        pruned = not store.deployment(event["id"]).exists()
        event = {**event, "note": (event["note"] or "its backups were pruned") if pruned else refusal.what}
    return {
        "id": event["id"],
        "state": state,
        **{k: record[k] for k in ("overlay_id", "base_id", "release", "version", "operator")},
        "time": event["time"],
        "files": len(record["files"]),
        "current": False,
        "undone": None,
        "note": event["note"],
    }
