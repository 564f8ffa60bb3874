# SPDX-License-Identifier: Apache-2.0
"""The result of a measurement: what is printed, what `--json` holds, and the exit code. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_overlay.errors import OverlayError
from ddtree_overlay.reports import Line, row
from ddtree_overlay.tuning import lines
from ddtree_overlay.tuning.advice import Advice, advise
from ddtree_overlay.tuning.cells import Cell, Measured, against_chain, cells, errors
from ddtree_overlay.tuning.plan import Run, Settings, dropped
from ddtree_overlay.tuning.served import Served


_INTERRUPTED, _FINDINGS = 130, 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a measurement.

    Args:
        name: What the target is called.
        served: The server.
        settings: How it was measured.
        prompts: With how many prompts.
        found: The runs.
        cells: The table.
        failed: Each error of a request and how often it came.
        missing: What was planned and not measured.
        advice: What it speaks for.
    """

    name: str
    served: Served
    settings: Settings
    prompts: int
    found: Measured
    cells: tuple[Cell, ...]
    failed: dict[str, int]
    missing: tuple[str, ...]
    advice: Advice

    @classmethod
    def of(
        cls, name: str, served: Served, settings: Settings, *, prompts: int, runs: Sequence[Run], found: Measured
    ) -> Outcome:
        """The outcome of `found`, where `runs` were planned."""
        table = tuple(cells(found.samples))
        missing = tuple(dropped(runs, [s.run for s in found.samples]))
        advice = advise(table, served)
        return cls(name, served, settings, prompts, found, table, errors(found.samples), missing, advice)

    @property
    def code(self) -> int:
        """The exit code: 3 when requests failed or others disturbed, for then the table is not all of it."""
        if self.found.interrupted:
            return _INTERRUPTED
        if self.found.error is not None:
            return self.found.error.exit_code
        return _FINDINGS if self.failed or self.found.disturbed else 0

    @property
    def title(self) -> str:
        """The heading of the plot."""
        return f"{self.name}: {self.served.model}, sglang {self.served.version}, overlay {self.served.overlay_id}"

    def require_something(self) -> None:
        """Refuse an empty table, unless the user asked for it with Ctrl-C.

        Raises:
            OverlayError: Nothing was measured; the fault behind it, where there was one.
        """
        if self.cells or self.found.interrupted:
            return
        if self.found.error is not None:
            raise self.found.error
        if self.failed:
            raise OverlayError(
                "no run was answered well",
                why=max(self.failed, key=lambda error: self.failed[error]),
                next_step="look into the server's log, then run it again",
            )
        raise OverlayError(
            f"nothing was measured: {self.found.stopped or 'requests of others ran beside every run'}",
            next_step="give it more --seconds, or fewer --arms and a shorter --concurrency",
        )

    def as_dict(self) -> dict[str, Any]:
        """The outcome as `--json` prints it."""
        error = self.found.error
        return {
            "target": self.name,
            "server": self.served.as_dict(),
            "settings": {**self.settings.as_dict(), "prompts": self.prompts},
            "cells": [self._cell(cell) for cell in self.cells],
            "errors": self.failed,
            "disturbed": self.found.disturbed,
            "not_measured": list(self.missing),
            "stopped": self.found.stopped or None,
            "fault": error.as_dict() if error else None,
            "recommendation": self.advice.as_dict(),
        }

    def _cell(self, cell: Cell) -> dict[str, Any]:
        against = against_chain(cell, self.cells)
        return {**cell.as_dict(), "against_chain": against.as_dict() if against else None}

    def lines(self) -> list[Line]:
        """The outcome for a terminal."""
        found = lines.head_lines(self.name, self.served, self.settings, self.prompts)
        found += [*lines.table_lines(self.cells), *lines.choice_lines(self.cells)] if self.cells else []
        if self.found.stopped and self.found.error is None:
            found.append(row(("ended early: ", "warn"), self.found.stopped))
        found += lines.trouble_lines(self.cells, self.failed, self.missing, self.found.disturbed)
        return [*found, *lines.advice_lines(self.advice)]
