# SPDX-License-Identifier: Apache-2.0
"""The plot: tokens/s and accept length of each arm over the concurrency, by matplotlib where that is installed."""

from __future__ import annotations

import errno
import importlib.util
import os
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ddtree_overlay.errors import UsageError
from ddtree_overlay.tuning.cells import Cell


FORMATS = (".png", ".svg", ".pdf")
INSTALL = "pip install 'ddtree-overlay[plot]'"


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def check(path: Path) -> None:
    """Refuse, before minutes are spent, a plot that could not be written.

    Raises:
        UsageError: matplotlib is missing, the suffix is none of ours, or the folder is not there.
    """
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"--plot {path}: a plot is {' or '.join(FORMATS)}", next_step=f"name {path}.png, for example")
    if not path.absolute().parent.is_dir():
        raise UsageError(
            f"--plot {path}: there is no such folder", next_step=f"mkdir -p {shlex.quote(str(path.absolute().parent))}"
        )
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        # Rights do not tell: root has them all, and a file system may still say no.
        tempfile.NamedTemporaryFile(dir=path.absolute().parent, prefix=".tune-").close()
    except OSError as e:
        raise UsageError(
            f"--plot {path}: it cannot be written there: {e.strerror or e}", next_step="name another file"
        ) from e
    if not available():
        raise UsageError(
            f"--plot {path}: matplotlib is not installed",
            next_step=f"{INSTALL}, or leave --plot out: the table needs nothing",
        )


def write(path: Path, title: str, found: Sequence[Cell]) -> None:
    """Draw the cells into `path`; an older file is replaced at once or stays.

    Raises:
        OSError: It cannot be written.
    """
    # No pyplot: that keeps figures of its own and asks for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    rates, lengths = figure.subplots(1, 2)
    levels = sorted({cell.concurrency for cell in found})
    for arm in dict.fromkeys(cell.arm for cell in found):
        part = [cell for cell in found if cell.arm == arm]
        x = [cell.concurrency for cell in part]
        y = [cell.tokens_per_s.median for cell in part]
        low = [cell.tokens_per_s.median - cell.tokens_per_s.least for cell in part]
        high = [cell.tokens_per_s.most - cell.tokens_per_s.median for cell in part]
        style = "--" if arm == "chain" else "-"
        rates.errorbar(x, y, yerr=[low, high], label=arm, marker="o", markersize=4, capsize=3, linestyle=style)
        accepted = [(c.concurrency, c.accept_length) for c in part if c.accept_length is not None]
        lengths.plot(*zip(*accepted, strict=True), marker="o", markersize=4, linestyle=style) if accepted else None
    for axes, label in ((rates, "tokens/s, median [min, max]"), (lengths, "tokens a verify step")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(levels, [str(level) for level in levels])
        axes.minorticks_off()
        axes.set_xlabel("requests at a time")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
    rates.legend(title="arm", fontsize=8)
    # A model's name is no formula, whatever signs it has.
    figure.suptitle(title, fontsize=10, parse_math=False)
    handle, draft = tempfile.mkstemp(dir=path.absolute().parent, prefix=".tune-", suffix=path.suffix)
    os.close(handle)
    try:
        figure.savefig(draft, dpi=150)
        # mkstemp lets nobody else read it; a plot is for everybody whom the umask lets.
        mask = os.umask(0)
        os.umask(mask)
        Path(draft).chmod(0o666 & ~mask)
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
