# SPDX-License-Identifier: Apache-2.0
"""Whether the server runs what is on the disk: watched until it does, or until the time is up."""

from __future__ import annotations

import subprocess
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from .asking import Heard, ask
from .processes import running
from .restarting import Restarted
from .telling import Waiting


Trial = dict[str, Any]
#: pid -> start time, in seconds since the machine was started: that clock is never set.
Processes = dict[int, float]
_PAUSE_SECONDS = 0.5
_UNIT_SECONDS = 2.0


@dataclass(frozen=True)
class Want:
    """What the server shall report: an overlay (None: none), and one of `algorithms` (empty: any)."""

    overlay_id: str | None
    algorithms: tuple[str | None, ...] = ()

    def met_by(self, heard: Heard) -> bool:
        """Whether `heard` reports it, well or not."""
        known = not self.algorithms or heard.algorithm in self.algorithms
        return heard.told and heard.overlay_id == self.overlay_id and known

    def named(self) -> str:
        """The wanted overlay in words."""
        return f"overlay {self.overlay_id}" if self.overlay_id else "the base without an overlay"


@dataclass(frozen=True)
class Before:
    """What was there before the restart."""

    heard: Heard
    processes: Processes


@dataclass(frozen=True)
class Proof:
    """See `ddtree_overlay.proving.Proof`, which it becomes on the other side."""

    ok: bool
    verdict: str
    why: str
    waited: float
    answers: tuple[str, ...]
    restarted: bool

    def as_dict(self) -> dict[str, Any]:
        """The proof as it travels."""
        return {**asdict(self), "answers": list(self.answers)}


def seen() -> Processes:
    """The servers' processes; workers that a server has started come and go without a restart."""
    every = running()
    pids = {p["pid"] for p in every}
    return {p["pid"]: p["up"] for p in every if p["parent"] not in pids}


def replaced(before: Processes, after: Processes) -> bool | None:
    """Whether any process was stopped or started in between; None when none can be seen, before or after."""
    if not before and not after:
        return None
    return before != after


def watch(trial: Trial, key: str, want: Want) -> tuple[Heard, tuple[str, ...], float]:
    """Ask until the server reports `want` and generates, its unit has failed, or the time is up.

    Returns:
        The last answer, every different answer in order, and the seconds it took.
    """
    waiting = Waiting(time.monotonic())
    answers: list[str] = []
    unit_check = 0.0
    while True:
        left = trial["timeout"] - waiting.seconds
        heard = ask(trial["url"], key, max(1.0, left))
        if heard.text not in answers[-1:]:
            answers.append(heard.text)
        if heard.kind == "up" and want.met_by(heard):
            break
        if trial["unit"] and waiting.seconds >= unit_check:
            unit_check = waiting.seconds + _UNIT_SECONDS
            if not heard.told and _unit_failed(trial["unit"]):
                heard = replace(heard, text=f"systemd has given {trial['unit']} up ({heard.text})")
                answers.append(heard.text)
                break
        if waiting.seconds >= trial["timeout"]:
            break
        waiting.tell(f"waiting for {want.named()}: {heard.text}")
        time.sleep(min(_PAUSE_SECONDS, max(0.05, trial["timeout"] - waiting.seconds)))
    return heard, tuple(answers[-8:]), waiting.seconds


def _unit_failed(unit: str) -> bool:
    words = ["systemctl", "is-failed", "--quiet", unit]
    try:
        return (
            subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False).returncode
            == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


def judge(
    heard: Heard, want: Want, before: Before, done: Restarted | None, *, changed: bool | None
) -> tuple[str, str, bool]:
    """The verdict, a sentence about it, and whether a server may run the new code or none runs at all.

    Args:
        heard: The last answer.
        want: What should be reported.
        before: What was there before.
        done: How the restart went; None when there was none.
        changed: Whether processes were stopped or started since `before`; None when they cannot be seen.
    """
    same = heard.told and before.heard.told and _identity(heard) == _identity(before.heard)
    loaded = heard.told and heard.overlay_id == want.overlay_id
    touched = not same or bool(changed) or loaded
    if done is not None and not done.ok:
        return "restart-failed", done.why, touched
    if not heard.told:
        return "unhealthy", f"no server came up: {heard.text}", touched
    if want.met_by(heard):
        if heard.kind == "up":
            return "live", f"the server runs {heard.named()} and generates", touched
        return "unhealthy", f"the server does not generate: {heard.text}", touched
    if touched:
        return "other", _mismatch(heard, want, loaded=loaded), True
    pids = ", ".join(f"pid {pid}" for pid in sorted(before.processes)[:4])
    since = f" ({pids} from before)" if pids else ""
    why = "nothing was restarted" if done else "it was not restarted"
    return "unrestarted", f"still running the old code{since}: the server reports {heard.named()}; {why}", False


def _mismatch(heard: Heard, want: Want, *, loaded: bool) -> str:
    if loaded:
        flag = "; start it with --speculative-algorithm DDTREE" if "DDTREE" in want.algorithms else ""
        return f"the server has loaded {want.named()}, but runs algorithm {heard.algorithm or 'none'}{flag}"
    return f"the restarted server reports {heard.named()} instead of {want.named()}: does it import this installation?"


def _identity(heard: Heard) -> tuple[str | None, str | None]:
    return heard.overlay_id, heard.algorithm
