# SPDX-License-Identifier: Apache-2.0
"""State that is not as this tool wrote it: what is wrong with it, and which deployment is in place all the same."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from .common import digest, digest_of_file, inside


if TYPE_CHECKING:
    from .store import Store


#: The names that are ours below deployments/; whatever else lies there was put there by somebody.
NAME = re.compile(r"d-[0-9]{1,9}\Z")
#: The end of the year 9999: beyond it no clock can be shown.
_LAST_SECOND = 253_402_300_799
#: The folder that every overlay adds; SGLang has none of this name.
MARK = "srt/speculative/ddtree"


def event_fault(value: Any) -> str:
    """What is wrong with a line of the history, or ""."""
    texts = ("event", "id", "overlay_id", "operator", "note")
    if not isinstance(value, dict) or not all(isinstance(value.get(k), str) for k in texts):
        return "it is not an event"
    if not all(_name_or_none(value.get(k)) for k in ("id", "current", "before")) or not _whole(value.get("txn")):
        return "it names no deployment"
    moment = value.get("time")
    if isinstance(moment, bool) or not isinstance(moment, (int, float)) or not 0 <= moment <= _LAST_SECOND:
        return f"its time is {moment!r}"
    return ""


def journal_fault(value: Any) -> str:
    """What is wrong with a journal, or ""."""
    if not isinstance(value, dict) or not _whole(value.get("txn")) or event_fault(value.get("event")):
        return "it is not a journal"
    if not all(_paths(value.get(k)) for k in ("make", "drop")) or not isinstance(value.get("moves"), list):
        return "it does not say what was moved"
    fields = ("path", "from", "to", "source", "exact", "bytecode", "undo_bytecode")
    whole = all(isinstance(m, dict) and all(f in m for f in fields) for m in value["moves"])
    whole = whole and all(isinstance(m["path"], str) and isinstance(m["undo_bytecode"], dict) for m in value["moves"])
    if not whole:
        return "it does not say what was moved"
    return "" if value.get("checksum") == checksum(value) else "it was altered: its checksum does not fit"


def checksum(journal: dict[str, Any]) -> str:
    """The digest of everything else in `journal`: files are put back by it, so not a letter of it may be wrong."""
    rest = {k: v for k, v in journal.items() if k != "checksum"}
    return digest(json.dumps(rest, sort_keys=True).encode())


def record_fault(value: Any, name: str) -> str:
    """What is wrong with the record of the deployment `name`, or ""."""
    texts = ("overlay_id", "base_id", "release", "operator")
    if not isinstance(value, dict) or not all(isinstance(value.get(k), str) for k in texts):
        return "it is not the record of a deployment"
    if value.get("id") != name or not _name_or_none(value.get("previous")) or "version" not in value:
        return f"it is not the record of {name}"
    files = value.get("files")
    fields = ("base", "after", "source", "bytecode")
    if not isinstance(files, dict) or not _paths(value.get("absent_folders")):
        return "it does not say which files it has"
    whole = all(isinstance(f, dict) and all(k in f for k in fields) for f in files.values())
    return "" if whole else "it does not say what each file was before"


def unrecorded(store: Store) -> dict[str, Any] | None:
    """The newest deployment whose files are in the tree although the history does not say so, or None.

    That is a history that was cut, emptied or removed, or a journal that was taken away after a crash. The caller has
    made sure that nobody is swapping files.
    """
    events = store.events()
    current = events[-1]["current"] if events else None
    owned = store.record(current)["files"] if current else {}
    for name in sorted(store.deployments(), key=lambda n: int(n[2:]), reverse=True):
        if name != current and (store.deployment(name) / "manifest.json").exists():
            record = store.record(name)
            if _in_place(store, record, owned):
                return record
    return None


def _in_place(store: Store, record: dict[str, Any], owned: dict[str, Any]) -> bool:
    for path, own in record["files"].items():
        known = path in owned and own["after"] in (owned[path]["after"], owned[path]["base"])
        if own["after"] != own["base"] and not known and digest_of_file(inside(store.root, path)) == own["after"]:
            return True
    return False


def marked(store: Store) -> bool:
    """Whether modules of an overlay lie in the tree, whoever put them there."""
    return any((store.root / MARK).glob("*.py"))


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _name_or_none(value: Any) -> bool:
    return value is None or (isinstance(value, str) and bool(NAME.match(value)))


def _paths(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in value)
