# SPDX-License-Identifier: Apache-2.0
"""Results as lines of styled text. Pure: nothing here prints, `render` does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NamedTuple

from ddtree_overlay.manifest import Bundle, Manifest


if TYPE_CHECKING:
    from ddtree_overlay.doctor import Check, Difference, Doctor
    from ddtree_overlay.plans import Deployment, FileAction, Process, PushPlan, RollbackPlan, RollbackResult, Status
    from ddtree_overlay.verify import Finding


#: A piece of text and what it means: a key of `render.STYLES`.
Part = tuple[str, str]
Line = tuple[Part, ...]

_SIGNS = {
    "add": ("+", "add"),
    "change": ("~", "change"),
    "remove": ("-", "remove"),
    "same": ("=", "dim"),
    "conflict": ("!", "bad"),
}
_STATES = {"pristine": "ok", "applied": "ok"}
_LEVELS = {"ok": "ok", "info": "dim", "warning": "warn", "error": "bad"}


def row(*parts: str | Part) -> Line:
    """One line of `parts`; a bare string has no style."""
    return tuple((p, "") if isinstance(p, str) else p for p in parts)


def plain(line: Line) -> str:
    """The line without its styles."""
    return "".join(text for text, _ in line)


def counted(number: int, thing: str, things: str = "") -> str:
    """`1 file`, `2 files`."""
    return f"{number} {thing if number == 1 else things or thing + 's'}"


def listed(names: Iterable[object], limit: int = 5) -> str:
    """`a, b, c` with the rest counted."""
    every = [str(n) for n in names]
    rest = f" and {len(every) - limit} more" if len(every) > limit else ""
    return ", ".join(every[:limit]) + rest


def moment(seconds: float) -> str:
    """A time as it is printed: to the minute, UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def snapshot_lines(manifest: Manifest, facts: Mapping[str, Any], folder: str) -> list[Line]:
    """What a snapshot found."""
    versions = [f"{name} {version}" for name, version in manifest.versions.items() if version and name != "sglang"]
    lines = [row((manifest.name, "head"), f"  sglang {manifest.release}  {manifest.root} ({manifest.install})")]
    if versions:
        lines.append(row(("  with  ", "dim"), listed(versions, 12)))
    moved = ""
    if "transferred" in facts:
        moved = f" ({facts['transferred']} transferred, {facts.get('unchanged', 0)} unchanged)"
    lines.append(
        row(
            ("  files ", "dim"),
            f"{len(manifest.files)}{moved}; {counted(len(manifest.mentions), 'file')} with DFlash in it",
        )
    )
    shared = sum(entry.nlink > 1 for entry in manifest.files)
    if shared:
        lines.append(
            row(
                ("  links ", "dim"),
                f"{counted(shared, 'file')} shared with a package cache; push keeps the cache intact",
            )
        )
    return [*lines, row(("  in    ", "dim"), folder)]


def unlike_line(version: str, unlike: Mapping[str, str]) -> str:
    """That a base is not what was published, by file."""
    be = "is" if len(unlike) == 1 else "are"
    names = listed(f"{path} ({how})" for path, how in unlike.items())
    return f"{counted(len(unlike), 'file')} {be} not as SGLang {version} was published, and taken as the base: {names}"


def bundle_lines(name: str, bundle: Bundle, folder: str) -> list[Line]:
    """What `patch` built."""
    files = [_File("add" if c.adds else "change", c.path, c.added, c.removed, "") for c in bundle.changes]
    lines = [row((name, "head"), f"  sglang {bundle.release}  overlay {bundle.overlay_id}  base {bundle.base_id}")]
    lines += _file_lines(files)
    added = sum(change.adds for change in bundle.changes)
    lines.append(row(f"{added} added, {counted(len(bundle.changes) - added, 'file')} changed, in {folder}"))
    return lines


def finding_lines(findings: Sequence[Finding]) -> list[Line]:
    """What `verify` found, the worst first, and a closing count."""
    order = ("error", "warning", "info")
    lines = []
    for finding in sorted(findings, key=lambda f: (order.index(f.severity), f.check, f.path or "", f.line or 0)):
        where = "".join(f"{part}:" for part in (finding.path, finding.line) if part)
        text = f"{finding.check}: {where}{' ' if where else ''}{finding.message}"
        lines.append(row((f"{finding.severity:<8}", _LEVELS[finding.severity]), text))
    errors, warnings, infos = (sum(f.severity == s for f in findings) for s in order)
    style = "bad" if errors else "warn" if warnings else "ok"
    text = f"{counted(errors, 'error')}, {counted(warnings, 'warning')}, {counted(infos, 'note')}"
    return [*lines, row(("verify: ", "head"), (text, style))]


def plan_lines(plan: PushPlan) -> list[Line]:
    """What a push would do, file by file."""
    head = f"  sglang {plan.version}  {plan.root} ({plan.install})"
    counts = plan.counts()
    total = f"Plan: {counts['add']} to add, {counts['change']} to change, {counts['remove']} to remove"
    same = f", {counts['same']} already there" if counts["same"] else ""
    conflict = f", {counts['conflict']} in conflict" if counts["conflict"] else ""
    return [
        row((plan.host, "head"), head),
        *_action_lines(plan.actions),
        row(
            (f"{total}{same}", "head"), (conflict, "bad"), (f".  base {plan.base_id}  overlay {plan.overlay_id}", "dim")
        ),
        *_remarks(plan.warnings, plan.processes),
    ]


def rollback_plan_lines(plan: RollbackPlan) -> list[Line]:
    """What a rollback would do, file by file."""
    goal = "the base, and remove backups and history" if plan.purge else "the base" if plan.to == "base" else plan.to
    undone = f", undoing {listed(reversed(plan.undoes))}" if plan.undoes else ""
    counts = plan.counts()
    back = counts["change"] + counts["add"]
    conflict = f", {counts['conflict']} in conflict" if counts["conflict"] else ""
    total = [row((f"Plan: {back} to restore, {counts['remove']} to remove", "head"), (conflict, "bad"))]
    return [
        row((plan.host, "head"), f"  {plan.root}: back to {goal}{undone}"),
        *_action_lines(plan.actions),
        *(total if plan.actions else []),
        *_remarks(plan.warnings, plan.processes),
    ]


def deployed_line(plan: PushPlan, done: Deployment | None) -> Line:
    """The closing line of a push."""
    if done is None:
        return row((f"{plan.host}: overlay {plan.overlay_id} is there", "ok"))
    text = f"overlay {done.overlay_id}, {counted(done.files, 'file')} verified"
    return row((f"{plan.host}: pushed as {done.id}", "ok"), f" ({done.state}), {text}")


def rolled_back_line(done: RollbackResult) -> Line:
    """The closing line of a rollback."""
    goal = "the base" if done.to == "base" else done.to
    purged = ", backups and history removed" if done.purged else ""
    if done.purged and not done.undone:
        return row((f"{done.host}: at the base", "ok"), purged)
    text = f"{done.restored} restored, {done.removed} removed, {done.verified} verified{purged}"
    return row((f"{done.host}: back to {goal}", "ok"), f": {text}")


def status_lines(found: Status) -> list[Line]:
    """What is on a host, and what leads out of a state in which somebody has to act."""
    version = "not installed" if found.state == "orphaned" else found.version
    state = (found.state, _STATES.get(found.state, "bad"))
    lines = [row((found.host, "head"), "  ", state, f"  sglang {version}  {found.root}")]
    if found.reason:
        lines.append(row(f"  {found.reason}"))
    if found.deployment is not None:
        done = found.deployment
        when = f"{moment(done.time)} by {done.operator or 'unknown'}"
        lines.append(row(f"  {done.id} ({done.state})  overlay {done.overlay_id}  {when}"))
        if done.note and done.state != "good":
            lines.append(row("  ", (done.note, "warn")))
    # Where a release was replaced or removed as a whole, only what was left behind is worth a line.
    whole = found.state in {"pristine", "orphaned", "upgraded"}
    odd = [f for f in found.files if f.state == "left" or (f.state != "ours" and not whole)]
    wide = max((len(f.path) for f in odd), default=0)
    lines += [row("  ", ("! ", "bad"), f"{file.path:<{wide}}  {file.state:<7}  {file.reason}".rstrip()) for file in odd]
    if found.next_step:
        lines.append(row(("  next: ", "head"), found.next_step.replace("\n", "\n        ")))
    warnings = [text for text in found.warnings if text != found.reason]
    return [*lines, *_remarks(warnings, [p for p in found.processes if p.stale])]


def history_lines(host: str, deployments: Sequence[Deployment]) -> list[Line]:
    """Every deployment, one a line, in columns."""
    if not deployments:
        return [row((host, "head"), "  no deployments")]
    lines = [row((host, "head"), f"  {counted(len(deployments), 'deployment')}")]
    wide = [max(len(getattr(d, name)) for d in deployments) for name in ("overlay_id", "release", "operator")]
    for done in deployments:
        state: Part = (done.state, {"good": "ok", "bad": "bad"}.get(done.state, "warn"))
        if done.undone and done.state != "bad":
            state = ("rolled back", "dim")
        mark = "*" if done.current else " "
        text = (
            f"  overlay {done.overlay_id:<{wide[0]}}  sglang {done.release:<{wide[1]}}  {moment(done.time)}"
            f"  {done.operator:<{wide[2]}}  {done.note}"
        )
        lines.append(row(f" {mark}{done.id}  ", (f"{state[0]:<11}", state[1]), text.rstrip()))
    return lines


def doctor_lines(found: Doctor) -> list[Line]:
    """Every check of `doctor`, with the next step where one is needed."""
    lines = [row((found.host, "head"), f"  {found.target}")]
    lines += _check_lines(found.checks)
    problems = sum(check.level == "error" for check in found.checks)
    warnings = sum(check.level == "warning" for check in found.checks)
    text = f"{counted(problems, 'error')}, {counted(warnings, 'warning')}"
    return [*lines, row(("doctor: ", "head"), (text, _LEVELS[found.worst] if problems or warnings else "ok"))]


def unusable_lines(found: Doctor) -> list[Line]:
    """Why a host cannot be compared with another."""
    errors = [check for check in found.checks if check.level == "error"]
    return [row((found.host, "head"), f"  {found.target}"), *_check_lines(errors)]


def _check_lines(checks: Iterable[Check]) -> list[Line]:
    lines = []
    for check in checks:
        lines.append(row("  ", (f"{check.level:<8}", _LEVELS[check.level]), f"{check.name}: {check.message}"))
        if check.next_step:
            lines.append(row(("           next: ", "dim"), check.next_step.replace("\n", "\n                 ")))
    return lines


def comparison_lines(here: str, there: str, differences: Sequence[Difference]) -> list[Line]:
    """Where two hosts differ."""
    if not differences:
        return [row((f"{here} and {there} do not differ", "ok"))]
    items = max(len(d.item) for d in differences)
    left = max(len(here), *(len(d.here) for d in differences))
    head = row(("  " + " " * items + f"  {here:<{left}}  {there}", "head"))
    body = [row(f"  {d.item:<{items}}  ", (f"{d.here:<{left}}", "warn"), "  ", (d.there, "warn")) for d in differences]
    return [head, *body, row(f"{counted(len(differences), 'difference')} between {here} and {there}")]


class _File(NamedTuple):
    kind: str
    path: str
    added: int
    removed: int
    about: str


def _action_lines(actions: Sequence[FileAction]) -> list[Line]:
    return _file_lines([_described(a) for a in actions if a.action != "same"])


def _described(action: FileAction) -> _File:
    known = f"{action.mode:04o} {action.owner}" if action.mode is not None else ""
    about = "new" if action.action == "add" else known
    text = f"{about}  {action.reason}" if action.reason else about
    return _File(action.action, action.path, action.added, action.removed, text)


def _file_lines(files: Iterable[_File]) -> list[Line]:
    """One line a file in columns: changed ones first, then those that come or go."""
    ordered = sorted(files, key=lambda f: (f.kind in {"add", "remove"}, f.path))
    wide = max((len(f.path) for f in ordered), default=0)
    plus = max((len(f"+{f.added}") for f in ordered if f.added), default=0)
    minus = max((len(f" -{f.removed}") for f in ordered if f.removed), default=0)
    lines = []
    for file in ordered:
        sign, style = _SIGNS[file.kind]
        added = f"{f'+{file.added}' if file.added else '':>{plus}}"
        removed = f"{f' -{file.removed}' if file.removed else '':<{minus}}"
        gap = "  " if plus + minus else ""
        parts = [
            (f" {file.path:<{wide}}", "path"),
            (gap + added, "add"),
            (removed, "remove"),
            (f"  {file.about}", "dim"),
        ]
        while not parts[-1][0].strip():
            parts.pop()
        lines.append(row("  ", (sign, style), *parts))
    return lines


def _remarks(warnings: Iterable[str], processes: Sequence[Process]) -> list[Line]:
    lines = [row(("warning: ", "warn"), text) for text in warnings]
    if processes:
        pids = listed((f"pid {p.pid}" for p in processes), 4)
        verb = "keeps" if len(processes) == 1 else "keep"
        running = counted(len(processes), "running process", "running processes")
        text = f"{running} ({pids}) {verb} the old code until restarted"
        lines.append(row(("restart: ", "warn"), text))
    return lines
