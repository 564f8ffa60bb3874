# SPDX-License-Identifier: Apache-2.0
"""Which code a running process has: what was in place when it started, read from the history.

Its age alone does not tell: after a rollback a server from before the push is right again, and one that was started in
between is not.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any


#: In place of an overlay: files of two states, which an interrupted run has left.
_MIXED = "mixed"


def now() -> dict[str, Any]:
    """This moment on the clock that start times of processes are counted on; nobody can set it, as NTP sets the other.

    It counts from the start of the machine, so it goes with the id of that start. Empty where there is none.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return {"boot": boot, "up": time.clock_gettime(time.CLOCK_BOOTTIME)}
    except (OSError, AttributeError, ValueError):
        return {}


def start_of(process: dict[str, Any], at: dict[str, Any], wall: float) -> float:
    """When a process of `processes.running` started, in seconds since 1970, worked out as the moments of the history.

    The kernel tells the start of the machine in whole seconds only: by that a server that was started right after a
    push seems to be older than it.
    """
    return wall - (float(at["up"]) - float(process["up"])) if at else float(process["started"])


def outdated(events: list[dict[str, Any]], started: float, at: dict[str, Any], wall: float) -> bool:
    """Whether a process that started at `started` (as `start_of`) has other code than the files that are there.

    Args:
        events: The history.
        started: Seconds since 1970.
        at: `now()`.
        wall: Seconds since 1970, at the same moment.
    """
    overlays: dict[Any, Any] = {None: None}
    states: list[tuple[float, Any]] = []
    for event in events:
        kind = event["event"]
        if kind == "push":
            overlays[event["id"]] = event["overlay_id"]
        if kind == "recovered":
            states.append((_moment(event.get("begun", event), at, wall), _MIXED))
        if kind in ("push", "rollback", "recovered"):
            states.append((_moment(event, at, wall), overlays.get(event["current"], event["current"])))
    then = [overlay for moment, overlay in states if moment <= started]
    return bool(states) and (then[-1] if then else None) != states[-1][1]


def _moment(stamp: dict[str, Any], at: dict[str, Any], wall: float) -> float:
    """When `stamp` was taken, by the clock of today if the machine has not been started anew since."""
    up = stamp.get("up")
    if at and stamp.get("boot") == at["boot"] and isinstance(up, (int, float)):
        return wall - (float(at["up"]) - float(up))
    return float(stamp["time"])
