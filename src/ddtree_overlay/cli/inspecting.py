# SPDX-License-Identifier: Apache-2.0
"""`status`, `history` and `doctor`: verbs that only look."""

from __future__ import annotations

from collections.abc import Collection

import click

from ddtree_overlay.cli.fleets import PARALLEL, status_of_fleet
from ddtree_overlay.cli.options import INSTALLED, App, verb
from ddtree_overlay.cli.selecting import Target, find_target
from ddtree_overlay.cli.targets import opened
from ddtree_overlay.errors import ConflictError
from ddtree_overlay.fleet_reports import is_settled
from ddtree_overlay.reports import comparison_lines, doctor_lines, history_lines, status_lines, unusable_lines


@verb(
    targets=INSTALLED,
    example="ddtree-overlay status --host ct200\n  ddtree-overlay status --group gpu",
    fleet=status_of_fleet,
    fleet_options=(PARALLEL,),
)
@click.option(
    "--exit-code",
    is_flag=True,
    help="Exit 3 unless every host is pristine, or the overlay fully applied, and all alike.",
)
def status(app: App, target: Target, *, exit_code: bool) -> int:
    """Say what is on a host.

    Pristine, applied, partly applied, drifted, upgraded underneath, half-installed, orphaned or unrecorded. Names
    each file not as it should be and each server that still runs older code. Of several hosts: the one overlay that
    all of them have, or SKEW and who has what.
    """
    from ddtree_overlay import deploy

    with opened(app, target) as transport:
        found = deploy.status(transport)
    code = 3 if exit_code and not is_settled(found) else 0
    return app.finish("status", found.as_dict(), status_lines(found), code)


@verb(targets=INSTALLED, example="ddtree-overlay history --host ct200")
def history(app: App, target: Target) -> int:
    """List the deployments of a host."""
    from ddtree_overlay import deploy

    with opened(app, target) as transport:
        found = deploy.history(transport)
    return app.finish("history", {"deployments": [d.as_dict() for d in found]}, history_lines(target.name, found))


@verb(
    targets=INSTALLED,
    example="ddtree-overlay doctor --host ct200\n  ddtree-overlay doctor --host ct200 --against ct201",
)
@click.option("--against", metavar="OTHER", help="Show where another host of deploy.toml differs.")
def doctor(app: App, target: Target, *, against: str | None) -> int:
    """Examine a host, or compare two.

    Connection, interpreter, versions, kernels, disk, permissions, containers, running servers. Exit 3 when
    something will not work, or when the hosts of --against differ.
    """
    from ddtree_overlay import doctor as core

    other = find_target(app, host=against) if against is not None else None
    paths = _known_paths(app, *filter(None, (target, other)))
    with opened(app, target) as transport:
        here = core.diagnose(transport, paths)
    if other is None:
        return app.finish("doctor", here.as_dict(), doctor_lines(here), 3 if here.worst == "error" else 0)
    with opened(app, other) as transport:
        there = core.diagnose(transport, paths)
    found = core.compare(here, there)
    value = {"here": here.as_dict(), "there": there.as_dict(), "differences": [d.as_dict() for d in found]}
    lines = [line for one in (here, there) if not one.usable for line in unusable_lines(one)]
    lines += comparison_lines(target.name, other.name, found)
    return app.finish("doctor", value, lines, 3 if found else 0)


def _known_paths(app: App, *targets: Target) -> Collection[str]:
    """The modules whose digests are worth comparing: those of the snapshots of both hosts and of every bundle.

    What is damaged here is said, and keeps nobody from examining a host.
    """
    paths: set[str] = set()
    try:
        paths |= {change.path for stored in app.workspace.load_bundles() for change in stored.bundle.changes}
    except ConflictError as e:
        app.screen.warn(f"{e.what}; its files are left out")
    for target in targets:
        try:
            manifest = app.workspace.load_manifest(target.name)
        except ConflictError as e:
            app.screen.warn(f"{e.what}; its files are left out")
            continue
        paths |= {entry.path for entry in manifest.files} if manifest else set()
    return sorted(paths)
