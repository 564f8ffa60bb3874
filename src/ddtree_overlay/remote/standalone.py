# SPDX-License-Identifier: Apache-2.0
"""The agent without SSH: what `apply.py` of an export runs on the machine where it lies.

It only asks the operations of `agent` in the order in which the command line asks them, and says what came of it: one
JSON object on stdout, a sentence on stderr, and the exit code that the command line has.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import platform
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

from . import agent, planning, remarks
from .common import Refusal, inside


#: Exit code of each kind of refusal: those of the command line.
EXIT_CODES = {"conflict": 4, "locked": 5, "rolled-back": 6, "incomplete": 7, "connection": 8}
FAILED = 1
SCHEMA = 1
#: What this script can be asked for; next steps that name another verb are for the command line.
_FATE = "the overlay stays only if that layer becomes an image"
_OURS = re.compile(r"ddtree-overlay (push|rollback|status|history) \{target\}")
#: Advice for who came over SSH, and the same for who is here.
_HERE = (
    ("set `python` in deploy.toml to the interpreter", "run apply.py with the interpreter"),
    ("set `user` in deploy.toml to the owner", "run apply.py as the owner"),
)
_OTHER_BASE = "ddtree-overlay snapshot {target} && ddtree-overlay patch {target}, then export it for the SGLang here"
_EDITED = "ddtree-overlay diff {target}, which shows the change and how to take it back"

Value = dict[str, Any]


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
    options = _parser().parse_args(words)
    root = os.path.abspath(options.root) if options.root else None
    export = Export(Path(folder), manifest, root)
    out = agent.shield(changes=options.verb in agent.MUTATING and not options.dry_run)
    try:
        verb: Callable[[argparse.Namespace, Export], tuple[Value, str]] = _VERBS[options.verb]
        value, said = verb(options, export)
        code = 0
    except Refusal as refusal:
        code = EXIT_CODES.get(refusal.kind, FAILED)
        told = {**refusal.as_dict(), "next": export.local(refusal.next_step)}
        value = {"changed": refusal.kind == "incomplete", "error": told.pop("kind"), **told}
        said = f"error: {told['what']}\n  why:  {told['why']}\n  next: {told['next']}"
    whole = {"schema": SCHEMA, "command": options.verb, "ok": code == 0, "exit_code": code, **value}
    with os.fdopen(out, "w", encoding="ascii") as stream:
        json.dump(whole, stream, indent=2)
        stream.write("\n")
    for text in [said, *(f"warning: {w}" for w in whole.get("warnings", []))]:
        print(text, file=sys.stderr)  # noqa: T201
    return code


def _refusal(error: dict[str, str]) -> Refusal:
    return Refusal(error["kind"], error["what"], error["why"], error["next"])


def push(options: argparse.Namespace, export: Export) -> tuple[Value, str]:
    """Plan and push the overlay of the export."""
    ids = {k: export.manifest[k] for k in ("overlay_id", "base_id", "release")}
    changes = export.changes()
    plan = export.call("plan_push", {"candidates": [changes]})
    warnings = remarks.on_push(plan, ids["release"], _FATE)
    value = {**ids, **_about(plan), "warnings": warnings, "deployment": None, "previous": plan["deployment"]}
    _check(plan, _EDITED if plan["deployment"] else _OTHER_BASE)
    if all(a["action"] == "same" for a in plan["actions"]) and not plan["unfinished"]:
        return value, f"up to date, overlay {ids['overlay_id']} is already there; nothing was written"
    if options.dry_run:
        return {**value, "would_change": True}, _dry(value)
    args = {**ids, "changes": changes, "expect": _expected(plan), **_asked(options)}
    done = export.call("push", args, export.payload())["deployment"]
    if done is None:
        # An interrupted run was put back, and the overlay was there before it, as nobody's deployment.
        return {**value, "changed": True}, f"overlay {ids['overlay_id']} is there; an interrupted run was put back"
    text = f"pushed as {done['id']} ({done['state']}), overlay {done['overlay_id']}, {done['files']} files verified"
    return {**value, "changed": done["id"] != plan["deployment"], "deployment": done}, text


def rollback(options: argparse.Namespace, export: Export) -> tuple[Value, str]:
    """Plan and carry out a rollback."""
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
        return {**value, "would_change": True}, _dry(value)
    done = export.call("rollback", {"to": plan["to"], "purge": purge, "expect": _expected(plan), **_asked(options)})
    live = export.call("status", {})["deployment"]
    place = "the base" if done["to"] == "base" else done["to"]
    text = f"back to {place}: {done['restored']} restored, {done['removed']} removed, {done['verified']} verified"
    return {**value, "changed": True, "result": done, "overlay_id": live["overlay_id"] if live else None}, text


def status(_: argparse.Namespace, export: Export) -> tuple[Value, str]:
    """What is deployed here."""
    found = export.call("status", {})
    return {**found, "warnings": remarks.on_host(found, _FATE)}, f"{found['state']}: {found['reason']}"


def history(_: argparse.Namespace, export: Export) -> tuple[Value, str]:
    """Every deployment here."""
    found = export.call("history", {})
    return found, f"{len(found['deployments'])} deployment(s)"


_VERBS: dict[str, Callable[[argparse.Namespace, Export], tuple[Value, str]]] = {
    "push": push,
    "rollback": rollback,
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
    text = planning.conflict_text([(a["path"], a["reason"]) for a in plan["actions"] if a["action"] == "conflict"])
    if text:
        raise Refusal("conflict", text, why="nothing was written", next_step=step)
    if plan["blockers"]:
        raise _refusal(plan["blockers"][0])


def _expected(plan: Value) -> list[list[Any]]:
    return [[a["path"], a["from"], a["to"]] for a in plan["actions"]]


def _asked(options: argparse.Namespace) -> Value:
    return {"operator": options.operator or _operator(), "lock_wait": options.lock_wait}


def _dry(value: Value) -> str:
    add, change, remove = (value["counts"][k] for k in ("add", "change", "remove"))
    return f"dry run: {add} to add, {change} to change, {remove} to remove; nothing was written"


def _operator() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no passwd entry, as in many containers
        user = "unknown"
    return f"{user}@{platform.node()}"


def _parser() -> argparse.ArgumentParser:
    about = "Put the overlay of this folder into the SGLang that this interpreter imports, or take it away again."
    parser = argparse.ArgumentParser(prog="apply.py", description=about)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="push|rollback|status|history")
    for name, function in _VERBS.items():
        verb = verbs.add_parser(name, help=function.__doc__, description=function.__doc__)
        verb.add_argument("--root", metavar="PATH", help="work on this package folder, whatever Python imports")
        if name in agent.MUTATING:
            verb.add_argument("--dry-run", action="store_true", help="plan only")
            verb.add_argument("--operator", metavar="NAME", default="", help="who does this, for the history")
            verb.add_argument("--lock-wait", type=float, default=0.0, metavar="SECONDS", help="wait for another run")
        if name == "rollback":
            where = verb.add_mutually_exclusive_group()
            where.add_argument("--to", metavar="ID", help="go back to this deployment, or to `base`; default: one back")
            where.add_argument("--purge", action="store_true", help="go back to the base; remove backups and history")
            verb.add_argument("--undo", metavar="ID", help="refuse if another deployment is live by now")
    return parser
