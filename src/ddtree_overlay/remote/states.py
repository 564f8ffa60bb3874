# SPDX-License-Identifier: Apache-2.0
"""What is known of a deployment: `pending` until it is proven, then `good` or `bad`. The history keeps it, a line each.

While a proof runs, `trial.json` in the state folder says so. It is left behind when the agent is killed: then whoever
comes next can tell a deployment that nobody has tried from one whose trial was cut off.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

from . import transaction
from .common import Refusal
from .damage import unrecorded
from .grounds import history_event, refuse_unrecorded
from .locate import locate
from .standing import standing
from .store import Store


Answer = tuple[dict[str, Any], bytes]
Record = dict[str, Any]


def said_of(event: Record) -> tuple[str, str] | None:
    """The deployment that `event` says something about is now in this state; None when it says nothing of the kind."""
    kind = event["event"]
    if kind in ("good", "bad"):
        return event["id"], kind
    if kind == "push":
        return event["id"], "pending"
    return (event["id"], "bad") if event.get("of") == "push" else None


def states(events: list[Record]) -> dict[str, str]:
    """The state of every deployment."""
    return dict(found for found in map(said_of, events) if found)


def mark(store: Store, kind: str, record: Record, *, operator: str, note: str) -> None:
    """Add to the history that `record` is `good` or `bad`; the caller holds the lock."""
    events = store.events()
    live = events[-1]["current"] if events else None
    event = history_event(record, kind, live, live, operator)
    store.append({**event, "note": note, "txn": store.next_txn(), "time": time.time()})


def begin(store: Store, name: str, operator: str, phase: str) -> None:
    """Note that the trial of the deployment `name` (or "base") has reached `phase`; a full disk does not stop it."""
    value = {"id": name, "operator": operator, "phase": phase, "since": time.time()}
    with contextlib.suppress(OSError):
        store.write(store.folder / "trial.json", value)


def end(store: Store) -> None:
    """Note that no trial is running any more."""
    with contextlib.suppress(OSError):
        (store.folder / "trial.json").unlink()


def cut_off(store: Store) -> str:
    """A sentence about a trial that was cut off, or "" when there is none; whoever holds the lock may be that trial."""
    try:
        value = json.loads((store.folder / "trial.json").read_bytes())
        name, phase = str(value["id"]), str(value["phase"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    text = f"the trial of {name} was cut off while {phase}, and nobody waits for it any more: see that the server is up"
    return "" if store.holder() else text


def confirm(args: dict[str, Any], _: bytes) -> Answer:
    """Take the operator's word that the live deployment serves well: it is good from now on."""
    site = locate(args)
    store = Store(site.state, site.root)
    if not store.folder.is_dir():
        raise _nothing()
    with transaction.session(store, args["operator"], "confirm", args["lock_wait"], version=site.version):
        refuse_unrecorded(unrecorded(store), store)
        record = store.current()
        if record is None:
            raise _nothing()
        found = standing(site, store, record)
        if found.state != "applied":
            what = f"{record['id']} is not in place any more: {found.reason}"
            step = "diff" if found.state == "drifted" else "status"
            raise Refusal("conflict", what, why="nothing was changed", next_step=f"ddtree-overlay {step} {{target}}")
        said, checked = _contradiction(args.get("trial"), record)
        known = states(store.events())[record["id"]]
        if known != "good":
            mark(store, "good", record, operator=args["operator"], note=args["note"])
        end(store)
    return {"id": record["id"], "before": known, "said": said, "checked": checked}, b""


def _nothing() -> Refusal:
    return Refusal("failed", "no overlay is deployed here", next_step="ddtree-overlay push {target}")


def _contradiction(trial: Record | None, record: Record) -> tuple[str, bool]:
    """What the live server says, and whether it said what it runs; refuses when that is something else."""
    if trial is None:
        return "", False
    from .asking import ask, read_key

    heard = ask(trial["url"], read_key(trial["api_key_file"]))
    if heard.told and (heard.overlay_id, heard.algorithm) != (record["overlay_id"], "DDTREE"):
        raise Refusal(
            "failed",
            f"{record['id']} was not confirmed: the live server runs {heard.named()}",
            why=f"{record['id']} is overlay {record['overlay_id']}; nothing was changed",
            next_step="ddtree-overlay confirm {target}  # once the server was restarted; push --restart does both",
        )
    return heard.text, heard.told


def settle(args: dict[str, Any], _: bytes) -> Answer:
    """Record what a proof said of the deployment `id`: `state` good or bad, with a `note`."""
    site = locate(args, orphans=True)
    store = Store(site.state, site.root)
    with transaction.session(store, args["operator"], "settling", args["lock_wait"], version=site.version):
        record = store.record(args["id"])
        if states(store.events()).get(args["id"]) != args["state"]:
            mark(store, args["state"], record, operator=args["operator"], note=args["note"])
        end(store)
    return {}, b""
