# SPDX-License-Identifier: Apache-2.0
"""How the live deployment stands: by the digests of its files, and by what an installer has done since the push."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from . import planning
from .common import Refusal, inside
from .installed import Installed, installed, not_whole, of_another_size, remedy
from .locate import Site
from .store import Store
from .undo import state_of


Record = dict[str, Any]
#: The way to an overlay for what is installed.
ANOTHER = "ddtree-overlay snapshot {target} && ddtree-overlay patch {target} && ddtree-overlay push {target}"


@dataclass(frozen=True)
class Standing:
    """State of the host, why, the state of each file of `record`, and what the installer wrote down."""

    state: str
    reason: str
    files: list[dict[str, str]]
    record: Record | None
    installed: Installed

    @property
    def base_gone(self) -> bool:
        """Whether another release is where the deployment was, or none."""
        return self.state in planning.BASE_GONE

    @property
    def left(self) -> list[str]:
        """The modules of the deployment that an installer did not know and left behind."""
        return [f["path"] for f in self.files if f["state"] == "left"]

    @property
    def listed(self) -> Collection[str] | None:
        """The modules of the installed release, or None when that is not known."""
        return self.installed.sizes


def standing(site: Site, store: Store, record: Record | None) -> Standing:
    """Look at the host; `record` is the deployment that is live, or None."""
    found = installed(site, record)
    live = {p: state_of(inside(site.root, p)) for p in (record["files"] if record else ())}
    state, reason, files = planning.classify(
        record,
        live,
        site.version,
        importable=site.importable,
        fault=found.fault,
        reinstalled=record is not None and found.since is not None and found.since > _pushed(store, record),
    )
    return Standing(state, reason, files, record, found)


def _pushed(store: Store, record: Record) -> float:
    moments = [e["time"] for e in store.events() if e["id"] == record["id"] and e["event"] == "push"]
    # A record without a line in a damaged history: then nothing is known, and nothing is said.
    return float(moments[-1]) if moments else float("inf")


def refuse_half(site: Site, found: Standing) -> None:
    """Refuse to build on half of an installation.

    Raises:
        Refusal: `conflict`.
    """
    if found.installed.fault and site.importable:
        raise _not_whole(site, found)


def _not_whole(site: Site, found: Standing) -> Refusal:
    """The refusal of half of an installation, with the command that makes it a whole one."""
    return not_whole(found.installed.fault, remedy(site, found.record["version"] if found.record else None))


def refuse_mixed(site: Site, found: Standing, release: str, paths: Collection[str]) -> None:
    """Refuse an overlay for another release than the metadata names, when the metadata does not tell the truth.

    Files may have been copied from elsewhere and the copy been cut off: then some are of the one release and some of
    the other. Releases that share all the files that an overlay touches may share the overlay.

    Args:
        site: The installed package.
        found: How things stand there.
        release: What the overlay was built for.
        paths: The files that the overlay touches, which are compared by digest.

    Raises:
        Refusal: `conflict`.
    """
    if site.version in (None, release) or found.listed is None:
        return
    owned = set(found.record["files"]) if found.record else set()
    unlike = of_another_size(site, found.installed.sizes or {}, {*paths, *owned})
    if unlike:
        fault = (
            f"its metadata says {site.version}, the files that the overlay touches are those of {release}, and "
            f"{unlike[0]}{f' and {len(unlike) - 1} more' if len(unlike) > 1 else ''} are not as the metadata lists them"
        )
        raise not_whole(fault, remedy(site, None))


def unfit(site: Site, found: Standing, actions: list[planning.Action], release: str) -> list[Refusal]:
    """What the installation itself has against this overlay: it comes before what its files have."""
    try:
        refuse_half(site, found)
        refuse_mixed(site, found, release, [a["path"] for a in actions])
    except Refusal as refusal:
        return [refusal]
    if not any(a["action"] == "conflict" for a in actions):
        return []
    if found.base_gone:
        return [_no_overlay_for(f"no overlay that was offered is for what is installed now: {found.reason}")]
    if site.version in (None, release):
        return []
    return [_no_overlay_for(f"the bundle is for SGLang {release}, the host has {site.version}")]


def groundless(site: Site, found: Standing, *, purge: bool) -> list[Refusal]:
    """What forbids to go back: the release that the files belong to is not there, or not all of it."""
    if found.state == "half-installed" and any(f["state"] != "ours" for f in found.files):
        return [_not_whole(site, found)]
    return [_no_way_back(found)] if found.base_gone and not purge else []


def below(overlay_id: str, files: Record, found: Standing, site: Site) -> str | None:
    """The deployment that a rollback goes back to: none when the package was upgraded in between.

    The same overlay once more mends what was taken away from it: then it is the one below that.
    """
    record = found.record
    if record is None or found.base_gone or site.version != record["version"]:
        return None
    common = files.keys() & record["files"].keys()
    if any(files[p]["base"] != record["files"][p]["base"] for p in common):
        return None
    name: str | None = record["previous"] if record["overlay_id"] == overlay_id else record["id"]
    return name


def _no_way_back(found: Standing) -> Refusal:
    """The refusal to go back to files of a release that is not there any more."""
    assert found.record is not None
    name, was = found.record["id"], found.record["version"]
    push = "" if found.state == "orphaned" else "ddtree-overlay push {target}  # an overlay for what is there now\n"
    return Refusal(
        "conflict",
        f"there is no base to go back to: {found.reason}",
        why=f"the files from before {name} are those of SGLang {was}; nothing was changed",
        next_step=f"{push}ddtree-overlay rollback {{target}} --purge  # takes away what is left of {name}, and backups",
    )


def _no_overlay_for(what: str) -> Refusal:
    """The refusal of an overlay that was made for another release."""
    return Refusal(
        "conflict",
        what,
        why="nothing was written",
        next_step=ANOTHER,
    )
