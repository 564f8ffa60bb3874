# SPDX-License-Identifier: Apache-2.0
"""Status and history: what is deployed here, and how it came to be."""

from __future__ import annotations

from typing import Any

from . import planning
from .common import Refusal, digest_of_file, inside
from .damage import marked
from .facts import container
from .grounds import lost_record, unfinished
from .locate import locate
from .processes import running
from .reading import describe
from .store import Store


Answer = tuple[dict[str, Any], bytes]


def status(args: dict[str, Any], _: bytes) -> Answer:
    """State of the host and of every file of the live deployment; reads only, also without any deployment."""
    site = locate(args, orphans=True)
    store = Store(site.state, site.root)
    lost = lost_record(store)
    record = lost or store.current()
    live = {p: digest_of_file(inside(site.root, p)) for p in (record["files"] if record else ())}
    state, reason, files = planning.classify(record, live, site.version, importable=site.importable)
    pending = unfinished(store)
    if store.journal():
        state, reason = "partial", pending
    elif lost:
        state, reason = "unrecorded", f"{reason}; its line in {store.folder}/history.jsonl is lost"
    elif record is None and site.importable and not pending and marked(store):
        state, reason = "unrecorded", f"an overlay is in place, and no deployment in {store.folder} put it there"
    result = {**describe(site, args), "state": state, "reason": reason, "files": files, "unfinished": pending}
    result["deployment"] = _summaries(store).get(record["id"]) if record else None
    result["processes"] = running()
    result["container"] = container(site.root)
    return result, b""


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
    for event in store.events():
        current = event["current"]
        if event["event"] == "push" or event.get("of") == "push":
            found[event["id"]] = _summary(store, event)
        if event["event"] == "rollback":
            for summary in found.values():
                if (
                    _number(summary["id"]) > _number(current)
                    and summary["undone"] is None
                    and summary["state"] != "bad"
                ):
                    summary["undone"] = event["time"]
    for summary in found.values():
        summary["current"] = summary["id"] == current
    return found


def _number(name: str | None) -> int:
    return int(name[2:]) if name else 0


def _summary(store: Store, event: dict[str, Any]) -> dict[str, Any]:
    try:
        record = store.record(event["id"])
    except Refusal as refusal:
        # The live deployment's record is read elsewhere and refused there; an old one must not hide the others.
        record = {**dict.fromkeys(("base_id", "release", "version"), "unknown"), **event, "files": {}}
        event = {**event, "note": refusal.what}
    return {
        "id": event["id"],
        "state": "pending" if event["event"] == "push" else "bad",
        **{k: record[k] for k in ("overlay_id", "base_id", "release", "version", "operator")},
        "time": event["time"],
        "files": len(record["files"]),
        "current": False,
        "undone": None,
        "note": event["note"],
    }
