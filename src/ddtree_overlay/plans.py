# SPDX-License-Identifier: Apache-2.0
"""What is known about a deployment before, during and after: plans, results, status. Pure data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ddtree_overlay.errors import ConflictError, OverlayError
from ddtree_overlay.remote.planning import OTHER_BASE, conflict_text


Kind = Literal["add", "change", "remove", "same", "conflict"]
State = Literal["pristine", "applied", "partial", "drifted", "upgraded", "orphaned", "half-installed", "unrecorded"]


class _Data:
    """Adds `as_dict` to a dataclass."""

    __slots__ = ()

    def as_dict(self) -> dict[str, Any]:
        """The value as `--json` prints it."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]


@dataclass(frozen=True, slots=True)
class FileAction(_Data):
    """One line of a plan. `sha256` is the digest afterwards, None for a file that will be absent."""

    path: str
    action: Kind
    live_sha256: str | None
    sha256: str | None
    base_sha256: str | None
    added: int
    removed: int
    mode: int | None
    owner: str
    nlink: int
    reason: str


@dataclass(frozen=True, slots=True)
class Process(_Data):
    """A running process of the host's interpreter that names sglang; a stale one has other code than is there now."""

    pid: int
    command: str
    started: float
    stale: bool


@dataclass(frozen=True, slots=True)
class Problem(_Data):
    """Something that forbids a plan to be carried out; `kind` is "failed" or "conflict"."""

    kind: str
    what: str
    why: str
    next_step: str

    def error(self) -> OverlayError:
        """The problem as the error that it is."""
        cls = ConflictError if self.kind == "conflict" else OverlayError
        return cls(self.what, why=self.why, next_step=self.next_step)


@dataclass(frozen=True, slots=True)
class _Plan(_Data):
    host: str
    target: str
    root: str
    actions: tuple[FileAction, ...]
    blockers: tuple[Problem, ...]
    warnings: tuple[str, ...]
    processes: tuple[Process, ...]
    unfinished: str

    @property
    def conflicts(self) -> tuple[FileAction, ...]:
        """The files that are not what the plan needs them to be."""
        return tuple(a for a in self.actions if a.action == "conflict")

    def counts(self) -> dict[str, int]:
        """Number of files by action."""
        found = Counter(a.action for a in self.actions)
        return {k: found[k] for k in ("add", "change", "remove", "same", "conflict")}

    def check(self) -> None:
        """Raise what forbids this plan.

        Raises:
            ConflictError: A file is neither what the overlay was built for nor what it makes of it.
            OverlayError: The host cannot be written to.
        """
        if self.blockers and self.blockers[0].kind == "conflict":
            # What the installation as a whole has against it explains what its files have.
            raise self.blockers[0].error()
        text = conflict_text([(a.path, a.reason) for a in self.conflicts])
        if text:
            raise ConflictError(f"{self.host}: {text}", why="nothing was written", next_step=self._conflict_step())
        if self.blockers:
            raise self.blockers[0].error()

    def _conflict_step(self) -> str:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class PushPlan(_Plan):
    """Exactly what a push will do."""

    install: str
    version: str
    python: str
    executable: str
    overlay_id: str
    base_id: str
    release: str
    deployment: str | None

    @property
    def is_noop(self) -> bool:
        """Whether everything is in place already."""
        return all(a.action == "same" for a in self.actions)

    def _conflict_step(self) -> str:
        build = f"ddtree-overlay snapshot {self.target} && ddtree-overlay patch {self.target}"
        if self.deployment is None:
            return build
        if self.conflicts[0].reason.endswith(OTHER_BASE):
            return f"ddtree-overlay rollback {self.target} --to base && {build}"
        return f"ddtree-overlay diff {self.target}  # shows the change and how to take it back"


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackPlan(_Plan):
    """Exactly what a rollback will do. `to` is a deployment's id or "base"."""

    current: str | None
    to: str
    undoes: tuple[str, ...]
    purge: bool

    @property
    def is_noop(self) -> bool:
        """Whether there is nothing to undo and nothing to purge."""
        return not self.undoes and not self.purge

    def _conflict_step(self) -> str:
        return f"ddtree-overlay diff {self.target}  # shows the change and how to take it back"


@dataclass(frozen=True, slots=True)
class Deployment(_Data):
    """One push as the host remembers it. `undone` is when it was rolled back, None while it was not."""

    id: str
    state: Literal["pending", "good", "bad"]
    overlay_id: str
    base_id: str
    release: str
    version: str
    operator: str
    time: float
    files: int
    current: bool
    undone: float | None
    note: str

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Deployment:
        """The deployment as the agent describes it."""
        return cls(**raw)


@dataclass(frozen=True, slots=True)
class RollbackResult(_Data):
    """What a rollback did; `verified` files were hashed afterwards and are as they should be.

    `recovered` says what an earlier run had left unfinished and was put right first, or is empty.
    """

    host: str
    undone: tuple[str, ...]
    to: str
    restored: int
    removed: int
    directories: int
    purged: bool
    verified: int
    recovered: str = ""


@dataclass(frozen=True, slots=True)
class FileStatus(_Data):
    """One file of the live deployment: as pushed (`ours`), as before it (`base`), or something else.

    `left` is a new module whose deployment an installer has replaced: it did not know it and left it behind.
    """

    path: str
    state: Literal["ours", "base", "missing", "foreign", "left"]
    reason: str


@dataclass(frozen=True, slots=True)
class Status(_Data):
    """What is deployed on a host."""

    host: str
    target: str
    root: str
    install: str
    version: str
    state: State
    reason: str
    deployment: Deployment | None
    overlay_id: str | None
    files: tuple[FileStatus, ...]
    processes: tuple[Process, ...]
    unfinished: str
    ephemeral: bool
    warnings: tuple[str, ...]
    #: What makes a half-installed package whole again; empty in every other state.
    remedy: str = ""
    #: Whether the overlay supports the SGLang that is there now.
    supported: bool = True
    #: Whether `--restart` can be asked for, as `Host.restartable`.
    restartable: bool = True

    @property
    def leftovers(self) -> tuple[str, ...]:
        """The modules of the deployment that an installer has left behind."""
        return tuple(f.path for f in self.files if f.state == "left")

    @property
    def next_step(self) -> str:
        """The command that leads out of a state in which somebody has to act, else ""."""
        if self.state == "half-installed":
            return self.remedy
        if self.unfinished:
            return ""  # the reason says that the next push or rollback puts it right, or who is at work
        restart = "push {t} --restart\nddtree-overlay " if self.restartable else ""
        verb = {
            "partial": "push {t}  # puts them in place\nddtree-overlay rollback {t} --to base  # takes the rest away",
            "drifted": "diff {t}  # shows the change and how to take it back",
            "upgraded": _AFTER_UPGRADE if self.supported else _AFTER_WRONG_UPGRADE,
            "orphaned": "rollback {t} --purge  # or install SGLang again, and push",
            "unrecorded": "rollback {t}",
            "applied": {
                "pending": f"{restart}confirm {{t}}  # once it was restarted by other means",
                "bad": "rollback {t} --restart" if self.restartable else "rollback {t}  # then restart the server",
            }.get(self.deployment.state if self.deployment else ""),
        }.get(self.state)
        return f"ddtree-overlay {verb}".replace("{t}", self.target) if verb else ""

    def as_dict(self) -> dict[str, Any]:
        """The value as `--json` prints it."""
        return {**asdict(self), "leftovers": list(self.leftovers), "next": self.next_step}


#: The way on, and the way out, when another release was installed over a deployment.
_AFTER_WRONG_UPGRADE = (
    "rollback {t} --purge  # takes away what was left behind; or install a supported release, and push"
)
_AFTER_UPGRADE = (
    "snapshot {t} && ddtree-overlay patch {t} && ddtree-overlay push {t}\n"
    "ddtree-overlay rollback {t} --purge  # only takes away what was left behind"
)
