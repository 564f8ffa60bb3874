# SPDX-License-Identifier: Apache-2.0
"""The first half of a push to several hosts: everything that can refuse it is found before any host is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import planning, pushing, reporting, stages, transaction
from .common import Refusal, digest_of_file, inside
from .damage import unrecorded
from .grounds import check_plan, raise_first, refuse_unrecorded
from .locate import Site, locate
from .preflight import blockers
from .standing import refuse_half, standing
from .store import Store


Answer = tuple[dict[str, Any], bytes]
Record = dict[str, Any]


def survey(args: dict[str, Any], _: bytes) -> Answer:
    """The status, and `place`, which is equal for two names that lead to the same package on the same machine."""
    result, _ = reporting.status(args, b"")
    return {**result, "place": _place(Path(result["root"]))}, b""


def _place(root: Path) -> list[str]:
    """The running kernel and the folder on it: cloned machines share their ids, containers have none of their own."""
    try:
        st = root.stat()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return []
    return [boot, str(st.st_dev), str(st.st_ino)]


def stage(args: dict[str, Any], payload: bytes) -> Answer:
    """Keep the bytes of a push here as stage `stage`; `push` with the same arguments then needs no bytes any more.

    What an interrupted run has left is put back first. The lock is held only while this runs.
    """
    site = locate(args)
    store = Store(site.state, site.root)
    files = pushing.arrived(args["changes"], payload)
    pushing.refuse_early(site, store, args)
    pushing.refuse_uncompilable(files)
    with transaction.session(store, args["operator"], "stage", args["lock_wait"], version=site.version) as note:
        stages.sweep(store)
        _stage_locked(site, store, args, files)
    return {"recovered": note}, b""


def _stage_locked(site: Site, store: Store, args: dict[str, Any], files: dict[str, bytes]) -> None:
    refuse_unrecorded(unrecorded(store), store)
    changes = args["changes"]
    found = standing(site, store, store.current())
    refuse_half(site, found)
    actions, record = pushing.push_actions(changes, store, found), found.record
    check_plan(actions, args["expect"])
    _refuse_inexact(site, store, record)
    todo = [a["path"] for a in actions if a["action"] != "same"]
    raise_first(blockers(site, todo, pushing.bytes_needed(store, changes) + sum(c["size"] for c in changes)))
    unknown = planning.unknown_base(actions, changes, record)
    if unknown:
        raise pushing.no_base(unknown)
    stages.keep(store, args["stage"], files)


def _refuse_inexact(site: Site, store: Store, record: Record | None) -> None:
    """Refuse a host from which there would be no way back to exactly this state.

    A deployment whose files were replaced underneath, or whose package was upgraded, can be gone back to only in part.
    """
    if record is None:
        return
    moved = [p for p, own in record["files"].items() if digest_of_file(inside(store.root, p)) != own["after"]]
    if not moved and site.version == record["version"]:
        return
    upgraded = site.version != record["version"]
    what = f"SGLang {record['version']} was replaced by {site.version}" if upgraded else f"{moved[0]} was changed"
    purge = " --purge" if upgraded else ""
    raise Refusal(
        "conflict",
        f"this host is not as {record['id']} left it: {what}",
        why="if another host failed, this one could not be put back to exactly what it is now",
        next_step=f"ddtree-overlay push {{target}}  # alone; or first: ddtree-overlay rollback {{target}}{purge}",
    )


def unstage(args: dict[str, Any], _: bytes) -> Answer:
    """Remove the stage `stage`, and the state folder if nothing else is in it."""
    site = locate(args, orphans=True)
    store = Store(site.state, site.root)
    if stages.folder_of(store, args["stage"]).is_dir():
        with transaction.session(store, args["operator"], "stage", args["lock_wait"], version=site.version):
            stages.drop(store, args["stage"])
    return {}, b""
