# SPDX-License-Identifier: Apache-2.0
"""What several verbs do with a target: connect to it, and find the bundle that belongs to it."""

from __future__ import annotations

import contextlib
import getpass
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ddtree_overlay.cli.options import App
from ddtree_overlay.cli.selecting import Fleet, Target
from ddtree_overlay.errors import ConflictError, OverlayError
from ddtree_overlay.reports import counted, listed
from ddtree_overlay.workspace import StoredBundle


if TYPE_CHECKING:
    from ddtree_overlay.hosts.transport import Transport
    from ddtree_overlay.plans import Status


@contextlib.contextmanager
def opened(app: App, target: Target) -> Iterator[Transport]:
    """A connection to the target; what it noticed on the way is said on stderr at the end."""
    from ddtree_overlay.hosts.transport import open_transport

    with open_transport(target.place, accept_new=app.accept_new) as transport:
        # As it was typed, so that an advised command is the one that a user would type.
        transport.target = target.flag
        try:
            yield transport
        finally:
            for text in transport.warnings:
                app.screen.warn(f"{target.name}: {text}")


def bundles(app: App, target: Target | Fleet) -> list[StoredBundle]:
    """Every bundle that was built in this workspace, the newest first.

    Raises:
        OverlayError: There is none.
    """
    stored = app.workspace.load_bundles()
    if not stored:
        raise OverlayError(
            "there is no bundle to push: nothing was patched in this workspace", next_step=_build(target)
        )
    return stored


def deployed_bundle(
    target: Target, stored: Sequence[StoredBundle], live: Status, digests: Mapping[str, str | None]
) -> StoredBundle:
    """The bundle of the deployment that is live, for a target whose files (`digests`) fit no bundle.

    Raises:
        ConflictError: There is no deployment, its bundle was not built in this workspace, or SGLang was replaced under
            it: what differs then is another release, and no edit to take back.
    """
    if live.state in {"upgraded", "unrecorded", "half-installed"}:
        raise ConflictError(f"no bundle fits the SGLang on {target.name}", why=live.reason, next_step=live.next_step)
    found = next((s for s in stored if s.bundle.overlay_id == live.overlay_id), None)
    if found is not None:
        return found
    wrong = listed((f"{f.path} ({f.reason})" for f in live.files if f.state != "ours"), 3)
    if live.deployment is not None:
        raise ConflictError(
            f"no bundle fits the SGLang on {target.name}, and that of {live.deployment.id} was not built here",
            why=f"{live.reason}{f': {wrong}' if wrong else ''}",
            next_step="run this where it was built; or reinstall SGLang on the host (pip install --force-reinstall "
            f"--no-deps sglang=={live.version}), then {target.command('rollback')} --to base",
        )
    newest = stored[0].bundle
    wrong = listed((c.path for c in newest.changes if digests.get(c.path) not in (c.base_sha256, c.sha256)), 3)
    which = f"the newest of {counted(len(stored), 'bundle')}"
    why = f"of {which}, {newest.overlay_id}, neither base nor result: {wrong}"
    if all(s.bundle.release != live.version for s in stored):
        why = f"{which} is for SGLang {newest.release}, the host has {live.version}"
    raise ConflictError(
        f"no bundle fits the SGLang on {target.name}",
        why=why,
        next_step=_build(target),
    )


def _build(target: Target | Fleet) -> str:
    return f"{target.command('snapshot')} && {target.command('patch')}"


def operator() -> str:
    """Who is named in the history of a host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no passwd entry, as in many containers
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
