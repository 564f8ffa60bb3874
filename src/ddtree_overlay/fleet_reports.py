# SPDX-License-Identifier: Apache-2.0
"""What is said about several hosts at once, as tables of styled text. Pure, like `reports`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddtree_overlay.reports import Line, Part, counted, listed, row


if TYPE_CHECKING:
    from ddtree_overlay.errors import OverlayError
    from ddtree_overlay.fleet import Outcome
    from ddtree_overlay.plans import PushPlan, RollbackPlan, Status


#: States in which nobody needs to act.
SETTLED = ("pristine", "applied")
#: Exit code of an error -> what is said in place of a host's state.
_STATES_OF_ERRORS = {4: "conflict", 5: "locked", 8: "unreachable"}


def table(head: Sequence[str], rows: Iterable[Sequence[Part]]) -> list[Line]:
    """Lines in columns as wide as their widest cell; the last cell of a line is not padded."""
    every = [tuple((cell, "head") for cell in head), *(tuple(r) for r in rows)]
    widths = [max(len(r[i][0]) for r in every) for i in range(len(head))]
    return [_table_line(cells, widths) for cells in every]


def _table_line(cells: Sequence[Part], widths: Sequence[int]) -> Line:
    parts: list[Part] = [("  ", "")]
    for (text, style), width in zip(cells, widths, strict=True):
        parts += [(text, style), (" " * (width - len(text) + 2), "")]
    while parts and not parts[-1][0].strip():
        parts.pop()
    return tuple(parts)


def is_skewed(statuses: Iterable[Status]) -> bool:
    """Whether hosts would serve different code: another overlay, or another SGLang below it (gpustack#2691)."""
    return len({(s.overlay_id, s.version) for s in statuses}) > 1


def is_settled(status: Status) -> bool:
    """Whether nobody needs to act on this host."""
    return status.state in SETTLED and not status.unfinished


def fleet_status_lines(
    label: str, names: Sequence[str], statuses: Mapping[str, Status], errors: Mapping[str, OverlayError]
) -> list[Line]:
    """One overlay id for the fleet, or SKEW; then who has what."""
    rows = [_status_row(n, statuses[n]) if n in statuses else _error_row(n, errors[n], 5) for n in names]
    remarks = {
        name: dict.fromkeys(filter(None, (status.unfinished, *status.warnings))) for name, status in statuses.items()
    }
    return [
        _verdict(label, statuses, errors),
        *table(("host", "state", "sglang", "overlay", "deployment", "servers"), rows),
        *_grouped(remarks),
    ]


def _verdict(label: str, statuses: Mapping[str, Status], errors: Mapping[str, OverlayError]) -> Line:
    holders: dict[tuple[str, str | None], list[str]] = {}
    for name, status in statuses.items():
        holders.setdefault((status.version, status.overlay_id), []).append(name)
    silent = f"; nothing is known of {listed(errors)}" if errors else ""
    if len(holders) > 1:
        parts = [f"{_code(*code)} on {listed(names)}" for code, names in holders.items()]
        return row((f"{label}: ", "head"), ("SKEW", "bad"), f": {'; '.join(parts)}{silent}")
    if not holders:
        return row((f"{label}: ", "head"), (f"no answer from {counted(len(errors), 'host')}", "bad"))
    (code,) = holders
    settled = not errors and all(is_settled(s) for s in statuses.values())
    where = f"{len(statuses)} of {len(statuses) + len(errors)} hosts" if errors else counted(len(statuses), "host")
    return row((f"{label}: ", "head"), (f"{_code(*code)} on {where}", "ok" if settled else "warn"), silent)


def _code(version: str, overlay_id: str | None) -> str:
    return f"overlay {overlay_id} (sglang {version})" if overlay_id else f"no overlay (sglang {version})"


def _status_row(name: str, status: Status) -> list[Part]:
    done = status.deployment
    stale = sum(p.stale for p in status.processes)
    servers = f"{stale} with older code" if stale else str(len(status.processes)) if status.processes else "none"
    return [
        (name, ""),
        (status.state, "ok" if is_settled(status) else "bad"),
        (status.version, ""),
        (status.overlay_id or "none", ""),
        (f"{done.id} ({done.state})" if done else "none", "dim"),
        (servers, "warn" if stale else "dim"),
    ]


def _error_row(name: str, error: OverlayError, others: int) -> list[Part]:
    state = _STATES_OF_ERRORS.get(error.exit_code, "failed")
    return [(name, ""), (state, "bad"), *[("?", "dim")] * (others - 1)]


@dataclass(frozen=True, slots=True)
class Row:
    """One host in the table of a plan: overlay now and afterwards (None: none), and what becomes of its files."""

    host: str
    version: str
    install: str
    before: str | None
    after: str | None
    files: str


def push_row(status: Status, plan: PushPlan) -> Row:
    """What a push will do on one host."""
    return Row(plan.host, plan.version, plan.install, status.overlay_id, plan.overlay_id, _files(plan))


def rollback_row(status: Status, plan: RollbackPlan, overlay_of_goal: str | None) -> Row:
    """What a rollback will do on one host."""
    after = overlay_of_goal if plan.undoes else status.overlay_id
    return Row(plan.host, status.version, status.install, status.overlay_id, after, _files(plan))


def _files(plan: PushPlan | RollbackPlan) -> str:
    counts = plan.counts()
    return f"+{counts['add']} ~{counts['change']} -{counts['remove']}"


def fleet_plan_lines(
    command: str,
    title: str,
    found: Mapping[str, Row | OverlayError],
    current: Collection[str],
    remarks: Mapping[str, Iterable[str]],
) -> list[Line]:
    """What is about to happen on each host, those that refuse included; `remarks` are warnings by host."""
    idle = _NOTHING[command]
    rows = [_plan_row(name, value, idle if name in current else "") for name, value in found.items()]
    return [
        row((title, "head")),
        *table(("host", "sglang", "install", "overlay", "files"), rows),
        *_grouped(remarks),
    ]


def _plan_row(name: str, found: Row | OverlayError, idle: str) -> list[Part]:
    if not isinstance(found, Row):
        return _error_row(name, found, 4)
    before, after = found.before or "none", found.after or "none"
    change = (before, "dim") if idle else (f"{before} -> {after}", "change")
    files = (idle, "dim") if idle else (found.files, "")
    return [(name, ""), (found.version, ""), (found.install, ""), change, files]


def _grouped(remarks: Mapping[str, Iterable[str]]) -> list[Line]:
    """Each warning once, with the hosts that it is about."""
    hosts: dict[str, list[str]] = {}
    for name, texts in remarks.items():
        for text in texts:
            hosts.setdefault(text, []).append(name)
    return [row(("warning: ", "warn"), f"{listed(names, 8)}: {text}") for text, names in hosts.items()]


#: Verb -> what a host is called that has nothing to change, and one that was changed.
_NOTHING = {"push": "up to date", "rollback": "nothing to undo"}
_DONE = {"push": "pushed", "rollback": "rolled back"}
#: Fate -> what the closing table calls it, and its style.
_FATES = {
    "untouched": ("not changed", "dim"),
    "refused": ("refused", "bad"),
    "current": ("", "ok"),
    "changed": ("", "ok"),
    "undone": ("put back", "warn"),
    "incomplete": ("NOT PUT BACK", "bad"),
    "unknown": ("NOT KNOWN", "bad"),
}


def outcome_lines(
    command: str, title: Part, outcomes: Sequence[Outcome], rows: Mapping[str, Row], deployments: Mapping[str, str]
) -> list[Line]:
    """What is true of each host now."""
    words = {"current": _NOTHING[command], "changed": _DONE[command]}
    cells = [_outcome_row(o, words, rows.get(o.host), deployments.get(o.host, "")) for o in outcomes]
    return [row(title), *table(("host", "result", "overlay now", ""), cells)]


def _outcome_row(outcome: Outcome, words: Mapping[str, str], planned: Row | None, deployment: str) -> list[Part]:
    text, style = _FATES[outcome.fate]
    text = words.get(outcome.fate, text)
    now = "?"
    if planned and outcome.fate not in {"incomplete", "unknown"}:
        now = (planned.after if outcome.fate == "changed" else planned.before) or "none"
    why = outcome.error.what.removeprefix(f"{outcome.host}: ") if outcome.error else deployment
    return [(outcome.host, ""), (text, style), (now, ""), (why, "bad" if outcome.error else "dim")]


def closing(label: str, outcomes: Sequence[Outcome], code: int, done: str) -> Part:
    """The title of the closing table: what is true of the fleet now."""
    changed = sum(o.fate == "changed" for o in outcomes)
    touched = [o.host for o in outcomes if o.fate in {"incomplete", "unknown"}]
    undone = any(o.fate == "undone" for o in outcomes)
    if touched:
        return f"{label}: FAILED, and not as before on {listed(touched)}", "bad"
    if not code:
        return f"{label}: {done} {counted(changed, 'host')}" if changed else f"{label}: nothing to do", "ok"
    if changed:
        return f"{label}: FAILED on some hosts, {done} {counted(changed, 'host')}", "bad"
    how = "interrupted" if code == 130 else "failed" if undone else "refused"
    return f"{label}: {how}; every host is as it was before", "warn" if code == 130 else "bad"


def remarks_on(plan: PushPlan | RollbackPlan, *, restart: bool) -> list[str]:
    """What the operator should know about one host before it is changed, and its server is restarted or not."""
    running = counted(len(plan.processes), "running process keeps", "running processes keep")
    return [*plan.warnings, *([f"{running} the old code until restarted"] if plan.processes and not restart else [])]
