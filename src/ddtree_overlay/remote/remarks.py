# SPDX-License-Identifier: Apache-2.0
"""What whoever pushes should hear about a host, worked out from the agent's answers. Pure functions, no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any


def on_push(plan: Mapping[str, Any], release: str, fate: str) -> list[str]:
    """Remarks on the answer of `plan_push` for a bundle of `release`; `fate` as in `on_host`."""
    remarks = on_host(plan, fate)
    version = plan["versions"]["sglang"]
    conflicts = any(a["action"] == "conflict" for a in plan["actions"])
    if version and version != release and not conflicts:
        remarks.append(f"the host has SGLang {version}, the bundle was built for {release}; the files are the same")
    if plan["state"] == "upgraded" and not conflicts:
        remarks.append(f"{plan['reason']}; a rollback of this push goes back to the files of {version}")
    shared = [a for a in plan["actions"] if a["action"] == "change" and (a["nlink"] or 0) > 1]
    if shared:
        links = max(a["nlink"] for a in shared) - 1
        remarks.append(
            f"hard links (package cache?): {_files(shared)} with up to {links} more elsewhere; those stay untouched"
        )
    if plan["unrecorded"]:
        remarks.append("modules of an overlay are in place, but no deployment recorded on the host put them there")
    if plan["unknown_base"]:
        remarks.append(
            f"{_files(plan['unknown_base'])} patched already, by no deployment recorded here: no way to roll back"
        )
    return remarks


def on_host(answer: Mapping[str, Any], fate: str) -> list[str]:
    """Remarks on any answer that describes a host; `fate` says what becomes of an overlay in a container's layer."""
    remarks = [answer["unfinished"]] if answer["unfinished"] else []
    if answer["container"]["ephemeral"]:
        kind = answer["container"]["kind"]
        remarks.append(f"{answer['root']} lies in the throw-away layer of a {kind} container: {fate}")
    return remarks


def _files(some: Sized) -> str:
    return "1 file" if len(some) == 1 else f"{len(some)} files"
