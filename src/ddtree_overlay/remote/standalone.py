# SPDX-License-Identifier: Apache-2.0
"""The agent without SSH: what `apply.py` of an export runs on the machine where it lies.

It only asks the operations of `agent` in the order in which the command line asks them, and says what came of it: one
JSON object on stdout, a sentence on stderr, and the exit code that the command line has.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import platform
import re
import shlex
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

from . import agent, planning, remarks
from .common import Refusal, inside
from .options import read_options, trial_of
from .standing import ANOTHER
from .telling import open_line


#: Exit code of each kind of refusal: those of the command line.
EXIT_CODES = {"conflict": 4, "locked": 5, "rolled-back": 6, "incomplete": 7, "connection": 8}
#: What `error` says of each kind: the command line's names.
NAMES = {
    "conflict": "ConflictError",
    "locked": "LockedError",
    "rolled-back": "RolledBackError",
    "incomplete": "RollbackIncompleteError",
    "connection": "ConnectionFailedError",
}
FAILED = 1
SCHEMA = 1
#: What this script can be asked for; next steps that name another verb are for the command line.
_FATE = "the overlay stays only if that layer becomes an image"
_OURS = re.compile(r"ddtree-overlay (push|rollback|confirm|status|history) \{target\}")
#: Advice for who came over SSH, and the same for who is here.
_HERE = (
    ("set `python` in deploy.toml to the interpreter", "run apply.py with the interpreter"),
    ("set `user` in deploy.toml to the owner", "run apply.py as the owner"),
    ("`restart` in deploy.toml", "--command"),
    ("set api_key_file in [hosts.NAME.health] in deploy.toml", "give --api-key-file"),
    ("api_key_file in deploy.toml", "--api-key-file"),
    ("the url of `health` in deploy.toml", "--url"),
)
_OTHER_BASE = "ddtree-overlay snapshot {target} && ddtree-overlay patch {target}, then export it for the SGLang here"
_EDITED = "ddtree-overlay diff {target}  # shows the change and how to take it back"

Value = dict[str, Any]
#: What a verb found or did, and the same in a sentence.
Answer = tuple[Value, str]


@dataclass(frozen=True)
class Export:
    """The folder that `apply.py` lies in, with its manifest, and the package it is asked to work on."""

    folder: Path
    manifest: Value
    #: None is the package that this interpreter imports.
    root: str | None = None

    def changes(self) -> list[Value]:
        """The overlay's files as a push takes them."""
        return [
            {"path": f["path"], "base": f["base_sha256"], "after": f["sha256"], "size": f["size"]}
            for f in self.manifest["files"]
        ]

    def payload(self) -> bytes:
        """The overlay's bytes, in the order of `changes`."""
        return b"".join(inside(self.folder / "layer", c["path"]).read_bytes() for c in self.changes())

    def call(self, op: str, args: Value, payload: bytes = b"") -> Value:
        """The result of one operation of the agent.

        Raises:
            Refusal: The agent's.
        """
        full = {**args, "root": self.root} if self.root else args
        answer, _ = agent.answer({"op": op, "args": full}, payload)
        if answer["ok"]:
            result: Value = answer["result"]
            return result
        raise _refusal(answer["error"])

    def local(self, step: str) -> str:
        """A next step as it can be typed on this machine, where the verb is one of ours."""
        script = f"{shlex.quote(sys.executable)} {shlex.quote(str(self.folder / 'apply.py'))}"
        root = f" --root {shlex.quote(self.root)}" if self.root else ""
        for remote, here in _HERE:
            step = step.replace(remote, here)
        return _OURS.sub(lambda m: f"{script} {m[1]}{root}", step).replace("{target}", "--host NAME")


def main(words: list[str], folder: str, manifest: Value) -> int:
    """Run one command line of `apply.py`; gives its exit code."""
    options = read_options(words)
    root = os.path.abspath(options.root) if options.root else None
    export = Export(Path(folder), manifest, root)
    out = agent.shield(changes=options.verb in agent.MUTATING and not options.dry_run)
    open_line(2, "  ")
    try:
        value, said = _VERBS[options.verb](options, export)
        code = 0
    except Refusal as refusal:
        code = EXIT_CODES.get(refusal.kind, FAILED)
        told = {**refusal.as_dict(), "next": export.local(refusal.next_step)}
        value = {"changed": refusal.kind == "incomplete", "error": NAMES.get(told.pop("kind"), "OverlayError"), **told}
        rows = (("error: ", told["what"]), ("  why:  ", told["why"]), ("  next: ", told["next"]))
        said = "\n".join(f"{head}{text}" for head, text in rows if text)
    whole = {"schema": SCHEMA, "command": options.verb, "ok": code == 0, "exit_code": code, **value}
    # Nobody may be there any more to read it; what was done is done, and the code speaks of that.
    with contextlib.suppress(OSError):
        with os.fdopen(out, "w", encoding="ascii") as stream:
            stream.write(json.dumps(whole, indent=2) + "\n")
        for text in [said, *(f"warning: {w}" for w in whole.get("warnings", []))]:
            print(text, file=sys.stderr)  # noqa: T201
    return code


def _refusal(error: dict[str, str]) -> Refusal:
    return Refusal(error["kind"], error["what"], error["why"], error["next"])


def push(options: Namespace, export: Export) -> Answer:
    """Put the overlay in place."""
    ids = {k: export.manifest[k] for k in ("overlay_id", "base_id", "release")}
    changes = export.changes()
    plan = export.call("plan_push", {"candidates": [changes], "releases": [ids["release"]]})
    warnings = remarks.on_push(plan, ids["release"], _FATE)
    value = {**ids, **_about(plan), "warnings": warnings, "deployment": None, "previous": plan["deployment"]}
    # This export is for one base; what was installed over it needs another one.
    other = plan["state"] == "upgraded" or not plan["deployment"]
    _check(plan, _OTHER_BASE if other else _EDITED)
    trial = trial_of(options)
    there = f"overlay {ids['overlay_id']} is already there"
    if not _todo(plan) and not plan["unfinished"] and not trial:
        return value, f"up to date, {there}; nothing was written"
    if options.dry_run:
        return _rehearsed({**value, "would_change": bool(_todo(plan))}, trial, export)
    args = {**ids, "changes": changes, "expect": _expected(plan), "trial": trial, **_asked(options)}
    done = export.call("push", args, export.payload())
    live, proof = done["deployment"], done.get("proof")
    new = live is not None and live["id"] != plan["deployment"]
    changed = new or bool(done["recovered"]) or bool(proof and proof["restarted"])
    text = f"pushed as {live['id']} ({live['state']}), {live['files']} files verified" if new else there
    value.update(changed=changed, deployment=live, recovered=done["recovered"], proof=proof)
    return value, "; ".join(filter(None, [done["recovered"], text, proof and proof["why"]]))


def rollback(options: Namespace, export: Export) -> Answer:
    """Take the overlay off again, or go back to an earlier one."""
    plan = export.call("plan_rollback", {"to": options.to, "purge": options.purge})
    if options.undo and plan["current"] != options.undo:
        raise Refusal(
            "conflict",
            f"{plan['current'] or 'no deployment'} is live, not {options.undo}",
            why="nothing was changed",
            next_step="ddtree-overlay history {target}",
        )
    purge = bool(options.purge and plan["to"] == "base" and plan["state_folder"])
    names = {k: plan[k] for k in ("current", "to", "undoes")}
    value = {**_about(plan), "warnings": remarks.on_host(plan, _FATE), **names, "purge": purge}
    _check(plan, _EDITED)
    if not plan["undoes"] and not purge and not plan["unfinished"]:
        return value, "nothing to roll back"
    if options.dry_run:
        return _rehearsed({**value, "would_change": True}, trial_of(options), export)
    args = {"to": plan["to"], "purge": purge, "expect": _expected(plan), "trial": trial_of(options), **_asked(options)}
    done = export.call("rollback", args)
    live, proof = export.call("status", {})["deployment"], done.get("proof")
    place = "the base" if done["to"] == "base" else done["to"]
    text = f"back to {place}: {done['restored']} restored, {done['removed']} removed, {done['verified']} verified"
    value.update(changed=True, result=done, overlay_id=live["overlay_id"] if live else None, proof=proof)
    return value, "; ".join(filter(None, [done["recovered"], text, proof and proof["why"]]))


def confirm(options: Namespace, export: Export) -> Answer:
    """Say that the live deployment serves well: it is good from now on."""
    args = {"trial": trial_of(options), "note": options.note or "confirmed by hand", **_asked(options)}
    done = export.call("confirm", args)
    changed = done["before"] != "good"
    said = done["said"] and (done["said"] if done["checked"] else f"the live server could not be asked: {done['said']}")
    text = f"{done['id']} is good" if changed else f"{done['id']} was good already"
    return {**done, "changed": changed}, "; ".join(filter(None, [text, said]))


def status(_: Namespace, export: Export) -> Answer:
    """Say what is deployed here."""
    found = export.call("status", {})
    return {**found, "warnings": remarks.on_host(found, _FATE)}, f"{found['state']}: {found['reason']}"


def history(_: Namespace, export: Export) -> Answer:
    """List every deployment here."""
    found = export.call("history", {})
    return found, f"{len(found['deployments'])} deployment(s)"


_VERBS: dict[str, Callable[[Namespace, Export], Answer]] = {
    "push": push,
    "rollback": rollback,
    "confirm": confirm,
    "status": status,
    "history": history,
}


def _about(plan: Value) -> Value:
    kinds = [a["action"] for a in plan["actions"]]
    counts = {k: kinds.count(k) for k in ("add", "change", "remove", "same", "conflict")}
    kept = ("root", "install", "versions", "interpreter", "actions", "processes", "container", "unfinished")
    known = {"host": platform.node(), **{k: plan[k] for k in kept}}
    return {**known, "counts": counts, "changed": False, "would_change": False}


def _check(plan: Value, step: str) -> None:
    """Raise what forbids `plan`."""
    if plan["blockers"] and plan["blockers"][0]["kind"] == "conflict":
        first = plan["blockers"][0]
        raise _refusal({**first, "next": _OTHER_BASE} if first["next"] == ANOTHER else first)
    text = planning.conflict_text([(a["path"], a["reason"]) for a in plan["actions"] if a["action"] == "conflict"])
    if text:
        raise Refusal("conflict", text, why="nothing was written", next_step=step)
    if plan["blockers"]:
        raise _refusal(plan["blockers"][0])


def _todo(plan: Value) -> list[Value]:
    return [a for a in plan["actions"] if a["action"] != "same"]


def _expected(plan: Value) -> list[list[Any]]:
    return [[a["path"], a["from"], a["to"]] for a in plan["actions"]]


def _asked(options: Namespace) -> Value:
    return {"operator": options.operator or _operator(), "lock_wait": options.lock_wait}


def _rehearsed(value: Value, trial: Value | None, export: Export) -> Answer:
    """The outcome of a dry run, once it is known that the restart could be run and checked, if one is asked for."""
    heard = export.call("rehearse", {"trial": trial})["heard"] if trial else None
    add, change, remove = (value["counts"][k] for k in ("add", "change", "remove"))
    text = f"dry run: {add} to add, {change} to change, {remove} to remove; nothing was written"
    return {**value, "server": heard}, f"{text}; the server now: {heard}" if heard else text


def _operator() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no passwd entry, as in many containers
        user = "unknown"
    return f"{user}@{platform.node()}"
