# SPDX-License-Identifier: Apache-2.0
"""What was measured, as lines for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ddtree_overlay.reports import Line, counted, listed, row
from ddtree_overlay.tuning.advice import Advice, Best
from ddtree_overlay.tuning.cells import Cell, Difference, against_chain
from ddtree_overlay.tuning.plan import Settings
from ddtree_overlay.tuning.served import AUTO, Served


#: An arm whose steps were drafted otherwise more often than this is not what its name says.
ASKED = 0.9
_STYLES = {"faster": "ok", "slower": "bad"}
_BEST = " *"
#: The median of ratios is not the ratio of medians.
_PAIRED = "; against chain compares round by round, so that another arm may gain more there"
_HEAD = ("at a time", "arm", "tokens/s", "[min, max]", "accept", "p50 s", "p95 s", "against chain")


def head_lines(name: str, served: Served, settings: Settings, prompts: int) -> list[Line]:
    """Which server it is, and how it is measured."""
    several = f" of {', '.join(map(str, served.budgets))}" if len(served.budgets) > 1 else ""
    how = "greedy" if settings.temperature == 0 else f"temperature {settings.temperature:g}"
    return [
        row((name, "head"), f"  sglang {served.version}  overlay {served.overlay_id}  {served.model}"),
        row(("  budget  ", "dim"), f"{served.setting}{several}"),
        row(
            ("  measure ", "dim"),
            f"{counted(prompts, 'prompt')}, at most {settings.max_new_tokens} new tokens, {how}; "
            f"{counted(settings.rounds, 'round')}",
        ),
    ]


def table_lines(found: Sequence[Cell]) -> list[Line]:
    """The table: a row for each arm at each concurrency, the best one marked."""
    rows: list[tuple[tuple[str, ...], str]] = [(_HEAD, "head")]
    for level in dict.fromkeys(cell.concurrency for cell in found):
        part = [cell for cell in found if cell.concurrency == level]
        best = max(part, key=lambda cell: cell.tokens_per_s.median)
        for cell in part:
            against = against_chain(cell, part)
            mark = _BEST if cell is best and len(part) > 1 else ""
            words = _words(cell, against, first=cell is part[0], mark=mark)
            rows.append((words, _STYLES.get(against.verdict, "") if against else ""))
    widths = [max(len(words[i]) for words, _ in rows) for i in range(len(_HEAD))]
    lines = []
    for words, style in rows:
        # Numbers end at one column, words begin at one.
        cells = [
            w.ljust(n) if i in {1, 3, 7} else w.rjust(n) for i, (w, n) in enumerate(zip(words, widths, strict=True))
        ]
        text = "  ".join(cells[:-1])
        lines.append(
            row((f"  {text}", "head" if style == "head" else ""), (f"  {words[-1]}" if words[-1] else "", style))
        )
    if any(words[1].endswith(_BEST) for words, _ in rows):
        paired = _PAIRED if any(words[-1] for words, _ in rows[1:]) else ""
        lines.append(row((f"  * the highest median{paired}", "dim")))
    return lines


def _words(cell: Cell, against: Difference | None, *, first: bool, mark: str) -> tuple[str, ...]:
    rate = cell.tokens_per_s
    return (
        str(cell.concurrency) if first else "",
        cell.arm + mark,
        _rate(rate.median),
        f"[{_rate(rate.least)}, {_rate(rate.most)}]",
        "-" if cell.accept_length is None else f"{cell.accept_length:.2f}",
        f"{cell.p50:.3g}",
        f"{cell.p95:.3g}",
        said(against) if against else "",
    )


def said(found: Difference) -> str:
    """A difference in words: `+12 % [+9, +14]`, with what the spread makes of it."""
    numbers = f"{_percent(found.ratio.median)} % [{_percent(found.ratio.least)}, {_percent(found.ratio.most)}]"
    notes = {"none": ", no difference", "unknown": f", {counted(found.rounds, 'round')} only"}
    return numbers + notes.get(found.verdict, "")


def trouble_lines(found: Sequence[Cell], failed: dict[str, int], missing: Sequence[str], disturbed: int) -> list[Line]:
    """What a reader has to know before believing the table."""
    lines = []
    for error, count in sorted(failed.items(), key=lambda item: -item[1])[:5]:
        lines.append(row((f"{counted(count, 'request')} failed: ", "bad"), error))
    if disturbed:
        lines.append(row((f"{counted(disturbed, 'run')} left out: ", "warn"), "requests of others ran beside it"))
    lines += [row(("not measured: ", "warn"), text) for text in missing]
    uneven = {cell.arm for cell in found if cell.errors}
    if uneven:
        lines.append(row(("runs with failed requests are not in the table: ", "warn"), listed(sorted(uneven))))
    return lines


def choice_lines(found: Sequence[Cell]) -> list[Line]:
    """What `auto` chose, and which arms did not get what they asked for, where the server counts its steps."""
    lines = []
    for cell in found:
        total = sum(cell.chosen.values())
        shares = sorted(cell.chosen.items(), key=lambda item: -item[1])
        words = listed((f"{name} {count / total:.0%}" for name, count in shares if count * 100 >= total), 6)
        where = f"{cell.concurrency} at a time"
        if cell.arm == AUTO and total:
            lines.append(row((f"auto at {where}: ", "dim"), words))
        elif cell.asked is not None and cell.asked < ASKED:
            lines.append(row((f"{cell.arm} at {where} is something else: ", "warn"), f"its steps were {words}"))
    return lines


def advice_lines(advice: Advice) -> list[Line]:
    """The best arm at each concurrency, and the flags."""
    lines = [_best_line(best) for best in advice.best] if advice.flags is not None else []
    if advice.flags is None:
        return [*lines, row(("no recommendation: ", "warn"), advice.why)]
    return [*lines, row(("recommended: ", "head"), (advice.flags, "ok")), row(f"  {advice.why}")]


def _best_line(best: Best) -> Line:
    text = f"{best.arm} has the highest median"
    if best.against_chain is not None:
        text += f"; against the chain {said(best.against_chain)}"
    if best.as_good:
        text += f"; not to be told from it: {listed(best.as_good, 12)}"
    return row((f"{best.concurrency} at a time: ", "head"), text)


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}"


def _percent(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.0f}"
