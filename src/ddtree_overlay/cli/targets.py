# SPDX-License-Identifier: Apache-2.0
"""What several verbs do with a target: connect to it, and find the bundle that belongs to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ddtree_overlay.cli.options import App, Target
from ddtree_overlay.errors import ConflictError, OverlayError
from ddtree_overlay.workspace import StoredBundle


if TYPE_CHECKING:
    from ddtree_overlay.hosts.transport import Transport


@contextlib.contextmanager
def opened(app: App, target: Target) -> Iterator[Transport]:
    """A connection to the target; what it noticed on the way is said on stderr at the end."""
    from ddtree_overlay.hosts.transport import open_transport

    with open_transport(target.place, accept_new=app.accept_new) as transport:
        try:
            yield transport
        finally:
            for text in transport.warnings:
                app.screen.warn(f"{target.name}: {text}")


def bundles(app: App, target: Target) -> list[StoredBundle]:
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


def live_bundle(app: App, target: Target, live: Mapping[str, str | None]) -> StoredBundle:
    """The bundle for the files that are on the target now, chosen by their digests `live` (None = absent).

    Raises:
        OverlayError: No bundle was built in this workspace.
        ConflictError: Bundles were built, but none for these files.
    """
    stored = bundles(app, target)
    found = app.workspace.bundle_for(live)
    if found is not None:
        return found
    wrong = [c.path for c in stored[0].bundle.changes if live.get(c.path) not in (c.base_sha256, c.sha256)]
    raise ConflictError(
        f"no bundle fits the SGLang on {target.name}",
        why=f"for the newest bundle {stored[0].bundle.overlay_id}, {', '.join(wrong[:3])}"
        f"{f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''} differ from base and overlay",
        next_step=f"{_build(target)}; if files were edited by hand there, see {target.command('status')} first",
    )


def _build(target: Target) -> str:
    return f"run {target.command('snapshot')} && {target.command('patch')}"
