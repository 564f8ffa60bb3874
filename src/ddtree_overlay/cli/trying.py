# SPDX-License-Identifier: Apache-2.0
"""`patch --try` and `verify --try`: what of the overlay would fit an SGLang that is not supported."""

from __future__ import annotations

import click

from ddtree_overlay.cli.options import App
from ddtree_overlay.cli.selecting import Target


TRY = click.option(
    "--try",
    "attempt",
    is_flag=True,
    help="Only report what would fit, also of a release that is not supported; exit 3 unless all of it does.",
)


def try_out(app: App, target: Target, command: str, *, names_and_sites: bool) -> int:
    """Report how well the overlay fits. Nothing is built, so there is nothing that push could take.

    A release is fetched for it; of a host, the last snapshot is looked at.
    """
    from ddtree_overlay import fit_reports, fitting, patching, snapshots

    if target.release is not None:
        app.screen.note(f"{target.name}: reading the published SGLang {target.release}")
        manifest, base = snapshots.snapshot_release(target.release, app.workspace.cache, patching.wanted_paths())
    else:
        manifest, base = app.workspace.load_snapshot(target.name)
    found = fitting.fit(manifest, base, names_and_sites=names_and_sites)
    return app.finish(command, found.as_dict(), fit_reports.fit_lines(found), 0 if found.complete else 3)
