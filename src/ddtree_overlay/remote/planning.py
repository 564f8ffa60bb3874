# SPDX-License-Identifier: Apache-2.0
"""What a push or a rollback has to do, decided from digests alone. Pure functions, no I/O.

A *record* is what a deployment wrote down: `files` maps each path of its overlay to `base` (digest before any overlay,
None = absent) and `after` (digest of the overlay's file). An *action* is one file's line of a plan: `path`, `action`,
`from`, `to`, `reason`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any


Live = Mapping[str, "str | None"]
Action = dict[str, Any]
#: States in which the files that a rollback would have to give back belong to a release that is not there any more.
BASE_GONE = ("upgraded", "orphaned")
#: How the reason of a conflict ends that a rollback resolves.
OTHER_BASE = "patched it from another base; roll back first"


def choose(candidates: list[list[dict[str, Any]]], live: Live, record: dict[str, Any] | None = None) -> int | None:
    """Index of the candidate (a list of changes) that is meant for the base that `live` shows, or None.

    A candidate speaks for its base when every file it touches is, in `live`, that base or the patched result; a file
    that the live deployment, `record`, has left there counts as what was there before. When several were built for one
    base, the first is meant, even if another one is on the host.
    """
    owned = record["files"] if record else {}
    bare = {p: owned[p]["base"] if p in owned and owned[p]["after"] == now else now for p, now in live.items()}
    bases = [sorted((c["path"], c["base"]) for c in changes if c["base"]) for changes in candidates]
    fitting = [
        base
        for base, changes in zip(bases, candidates)  # noqa: B905  Python 3.9; made from each other just above
        if all(live.get(c["path"]) in (c["base"], c["after"]) or bare.get(c["path"]) == c["base"] for c in changes)
    ]
    return next((i for i, base in enumerate(bases) if base in fitting), None)


def plan_push(
    changes: list[dict[str, Any]],
    live: Live,
    record: dict[str, Any] | None,
    *,
    replaced: bool = False,
    listed: Collection[str] | None = None,
) -> list[Action]:
    """The actions that bring `live` to the result of `changes` (each with `path`, `base`, `after`).

    Args:
        changes: The overlay that is pushed.
        live: Digests now.
        record: The deployment that is live now. Its files that `changes` does not name go back to their base.
        replaced: Another release was installed since: what is left of the deployment is then removed, for its base is
            a file of a release that is not there any more.
        listed: The files of the installed release, if that is known.
    """
    owned = record["files"] if record else {}
    actions = [{**_push_one(c, live[c["path"]], owned.get(c["path"]), record), "base": c["base"]} for c in changes]
    named = {c["path"] for c in changes}
    for path, own in owned.items():
        # A file that is no longer ours (reinstalled, edited) is not part of the overlay any more: leave it alone.
        if path not in named and live[path] == own["after"] and own["base"] != own["after"]:
            name = record["id"] if record else ""
            if not replaced or own["base"] is None:
                actions.append(_action(path, live[path], own["base"], f"only {name} has it"))
            elif listed is not None and path not in listed:
                actions.append(_action(path, live[path], None, f"left over from {name}, and no file of this release"))
            else:
                what = f"still as {name} left it, although SGLang was replaced"
                actions.append(_conflict(path, live[path], own["base"], what))
    return sorted(actions, key=lambda a: str(a["path"]))


def _push_one(change: dict[str, Any], now: str | None, own: dict[str, Any] | None, record: Any) -> Action:
    path, base, after = change["path"], change["base"], change["after"]
    if now in (base, after):
        return _action(path, now, after)
    if own and now == own["after"]:
        if own["base"] == base:
            return _action(path, now, after, f"replaces the one of {record['id']}")
        return _conflict(path, now, after, f"{record['id']} {OTHER_BASE}")
    if now is None:
        return _conflict(path, now, after, "missing on the host; the bundle was built for a base that has it")
    if base is None:
        return _conflict(path, now, after, "a file of this name is already there, and no deployment put it there")
    return _conflict(
        path, now, after, f"live {now[:12]} is neither the base {base[:12]} nor the overlay's {after[:12]}"
    )


def conflict_text(conflicts: Sequence[tuple[str, str]]) -> str:
    """What forbids a plan with these conflicts (path and reason), or ""."""
    if not conflicts:
        return ""
    path, reason = conflicts[0]
    others = len(conflicts) - 1
    more = f" (and {others} more file{'s' if others > 1 else ''})" if others else ""
    return f"{path} is not as expected: {reason}{more}"


def unknown_base(actions: list[Action], changes: list[dict[str, Any]], record: dict[str, Any] | None) -> list[str]:
    """Changed files that are patched already although no deployment recorded what they were before."""
    owned = record["files"] if record else {}
    bases = {c["path"]: c["base"] for c in changes}
    return [a["path"] for a in actions if a["action"] == "same" and bases.get(a["path"]) and a["path"] not in owned]


def plan_rollback(
    record: dict[str, Any],
    target: dict[str, Any] | None,
    live: Live,
    *,
    replaced: bool,
    listed: Collection[str] | None = None,
) -> tuple[list[Action], list[str]]:
    """The actions that take `live` from deployment `record` back to deployment `target` (None = the base).

    Args:
        record: The deployment that is live.
        target: The earlier deployment to go back to.
        live: Digests now.
        replaced: The package was upgraded or uninstalled since: files that are not ours are then left alone, and no
            file of the release that is gone comes back.
        listed: The files of the installed release, if that is known.

    Returns:
        The actions, and the paths that were left alone.
    """
    owned, wanted = record["files"], target["files"] if target else {}
    actions, left = [], []
    for path in sorted({*owned, *wanted}):
        goal = wanted[path]["after"] if path in wanted else owned[path]["base"]
        expected = owned[path]["after"] if path in owned else wanted[path]["base"]
        now = live[path]
        if replaced and now == expected != goal and goal is not None and listed is not None:
            # A file of the installed release that was not replaced: the installation is to be finished, not this.
            if path in listed:
                left.append(path)
            else:
                actions.append(_action(path, now, None))
        elif now in (goal, expected):
            actions.append(_action(path, now, goal))
        elif replaced:
            left.append(path)
        else:
            what = "missing" if now is None else f"changed to {now[:12]}"
            if path in owned and now == owned[path]["base"]:
                what = "installed again"
            actions.append(
                _conflict(path, now, goal, f"{what} since {record['id']} was pushed; going back would lose that")
            )
    return actions, left


def classify(
    record: dict[str, Any] | None,
    live: Live,
    version: str | None,
    *,
    importable: bool,
    fault: str = "",
    reinstalled: bool = False,
) -> tuple[str, str, list[dict[str, str]]]:
    """State of the host, why, and the state of each file of the overlay.

    Args:
        record: The deployment that is live.
        live: Digests now.
        version: The SGLang that is installed now.
        importable: Whether there is one at all.
        fault: Why it cannot be a whole one, or "".
        reinstalled: Whether an installer was at work since the push.
    """
    if record is None:
        return ("half-installed", _half(fault), []) if fault else ("pristine", "no overlay is deployed", [])
    files = [{"path": p, **_file_state(own, live[p])} for p, own in sorted(record["files"].items())]
    state, reason = _state(record, files, version, importable=importable, fault=fault, reinstalled=reinstalled)
    if state in BASE_GONE or (state == "partial" and not _edited(record, files, "ours")):
        for file in files:
            if file["state"] == "ours" and record["files"][file["path"]]["base"] is None:
                file.update(state="left", reason=f"left over from {record['id']}")
    return state, reason, files


def _state(
    record: dict[str, Any],
    files: list[dict[str, str]],
    version: str | None,
    *,
    importable: bool,
    fault: str,
    reinstalled: bool,
) -> tuple[str, str]:
    counts = {s: sum(f["state"] == s for f in files) for s in ("ours", "base", "missing", "foreign")}
    name, total, was = record["id"], len(files), record["version"]
    left = f"{_are(counts['ours'], f' of {name}')} left over" if counts["ours"] else ""
    kept = left or f"nothing of {name} is left"
    gone = counts["base"] + counts["missing"]
    # pip and uv replace every file that they know; whoever edits by hand leaves some of ours as it was.
    again = reinstalled and not _edited(record, files, "ours")
    taken = f"SGLang was uninstalled{f' ({fault})' if fault else ''}; {left or 'backups and history are left'}"
    replaced = f"SGLang {was} was replaced by {version or 'an unknown version'} under {name}; {kept}"
    other = f"SGLang {was} was replaced by another build of {version} under {name}; {kept}"
    edited = f"{_are(counts['foreign'], f' out of {total}')} neither the base nor as {name} left it"
    partly = f"{_are(gone, f' of {name}, out of {total},')} not in place (reinstalled underneath?)"
    cases = (
        (not importable, "orphaned", taken),
        (fault, "half-installed", f"{_half(fault)}; {name} was pushed to SGLang {was}"),
        (counts["ours"] == total, "applied", f"{'all ' if total > 1 else ''}{_are(total, f' of {name}')} in place"),
        (version != was, "upgraded", replaced),
        (again and _edited(record, files, "foreign"), "upgraded", other),
        (counts["foreign"], "drifted", edited),
        (again, "partial", f"SGLang {version} was installed again under {name}; {kept}"),
        (True, "partial", partly),
    )
    return next((state, reason) for holds, state, reason in cases if holds)


def _half(fault: str) -> str:
    return f"SGLang is not whole: {fault}"


def _edited(record: dict[str, Any], files: list[dict[str, str]], state: str) -> list[str]:
    """The files that the overlay changes, rather than adds, and that are in this state."""
    return [f["path"] for f in files if f["state"] == state and record["files"][f["path"]]["base"] is not None]


def _are(number: int, which: str) -> str:
    return f"{number} file{which} is" if number == 1 else f"{number} files{which} are"


def _file_state(own: dict[str, Any], now: str | None) -> dict[str, str]:
    if now == own["after"]:
        return {"state": "ours", "reason": ""}
    if now == own["base"]:
        return {"state": "base" if now else "missing", "reason": "as before the overlay"}
    if now is None:
        return {"state": "missing", "reason": "deleted since the push"}
    what = now if " " in now else f"changed to {now[:12]}"
    return {"state": "foreign", "reason": f"{what} since the push"}


def _action(path: str, now: str | None, goal: str | None, reason: str = "") -> Action:
    if now == goal:
        kind = "same"
    elif goal is None:
        kind = "remove"
    elif now is None:
        kind = "add"
    else:
        kind = "change"
    return {"path": path, "action": kind, "from": now, "to": goal, "reason": reason}


def _conflict(path: str, now: str | None, goal: str | None, reason: str) -> Action:
    return {"path": path, "action": "conflict", "from": now, "to": goal, "reason": reason}
