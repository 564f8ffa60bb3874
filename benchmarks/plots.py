#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draw the results of `decode.py`: budget curve, concurrency curve, stages of a step.

    benchmarks/plots.py RESULT.json [OUT_FOLDER]

Writes RESULT-budgets.png, RESULT-concurrency.png and RESULT-stages.png. Needs matplotlib (dev group), no GPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl


mpl.use("Agg")
from matplotlib import pyplot as plt

from decode_arms import UNCALIBRATED


if TYPE_CHECKING:
    from matplotlib.axes import Axes


#: Colours of the arms that are in every plot.
AUTO = "DDTREE auto"
COLOURS = {"plain": "0.55", "DFLASH": "tab:orange", AUTO: "tab:blue"}
STAGES = ("draft", "head", "tree", "mask", "verify", "accept", "commit", "rest")


def main(arguments: list[str] | None = None) -> None:
    """Draw what the result holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("out", type=Path, nargs="?", help="default: the result's folder")
    options = parser.parse_args(arguments)
    result = json.loads(options.result.read_text())
    folder = options.out or options.result.parent
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in (("budgets", budgets), ("concurrency", concurrency), ("stages", stages)):
        height = max(4.8, 1.2 + 0.15 * len(result["figures"]["stages"])) if name == "stages" else 4.8
        figure, axes = plt.subplots(figsize=(8, height), layout="constrained")
        draw(axes, result)
        figure.text(0.995, 0.008, caption(result), ha="right", va="bottom", fontsize=6, color="0.4")
        file = folder / f"{options.result.stem}-{name}.png"
        figure.savefig(file, dpi=150)
        plt.close(figure)
        print(file)


def caption(result: dict[str, Any]) -> str:
    """What was measured where and when."""
    machine = result.get("machine", {})
    engines = result.get("engines", {})
    version = next((engine["info"].get("version") for engine in engines.values()), "?")
    padding = result.get("padding")
    pair = f"padded like {padding['like']}" if padding else "as it is"
    return f"{machine.get('device', '?')}, SGLang {version}, pair {pair}, {result['date'][:10]}"


def cells(result: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """The figures by arm and concurrency."""
    return {(row["arm"], row["concurrency"]): row for row in result["figures"]["cells"]}


def fixed(result: dict[str, Any]) -> list[tuple[int, str]]:
    """Trees of a fixed budget, ascending."""
    return sorted(
        (arm["budget"], arm["name"])
        for arm in result["arms"]
        if isinstance(arm["budget"], int) and not arm["name"].endswith(UNCALIBRATED)
    )


def budgets(axes: Axes, result: dict[str, Any]) -> None:
    """Tokens per second beside DFLASH's over the budget, a line for each concurrency; dashed: what is accepted."""
    by_cell = cells(result)
    sizes = sorted({size for _, size in by_cell})
    # A place each: what lies beside each other, as 15 and 16, is to be told apart.
    places = {budget: place for place, (budget, _) in enumerate(fixed(result))}
    shades = mpl.colormaps["viridis"]
    for number, size in enumerate(sizes):
        rows = [(budget, by_cell[name, size]) for budget, name in fixed(result) if (name, size) in by_cell]
        rows = [(budget, row) for budget, row in rows if "to_dflash" in row]
        if not rows:
            continue
        colour = shades(0.9 * number / max(len(sizes) - 1, 1))
        x = [places[budget] for budget, _ in rows]
        y = [row["to_dflash"]["pooled"] for _, row in rows]
        low = [max(row["to_dflash"]["pooled"] - row["to_dflash"]["min"], 0) for _, row in rows]
        high = [max(row["to_dflash"]["max"] - row["to_dflash"]["pooled"], 0) for _, row in rows]
        axes.errorbar(x, y, yerr=[low, high], color=colour, marker="o", ms=3, lw=1.2, capsize=2, label=f"{size}")
        if size == sizes[0]:
            accepted = [row["accept_ratio"] for _, row in rows]
            axes.plot(x, accepted, color=colour, ls="--", lw=1, label=f"{size}, accept length")
    axes.axhline(1, color=COLOURS["DFLASH"], lw=1)
    axes.set_xticks(list(places.values()), [str(budget) for budget in places])
    axes.set_xlabel("budget (draft nodes a tree)", loc="left")
    axes.set_ylabel("x DFLASH at the same concurrency")
    axes.set_title("Decoding speed by budget; all rounds, and their range", loc="left", fontsize=10)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(title="concurrency", fontsize=7, title_fontsize=7, ncols=2)


def concurrency(axes: Axes, result: dict[str, Any]) -> None:
    """Tokens per second over the concurrency: every arm, those that decide in colour."""
    by_cell = cells(result)
    names = list(dict.fromkeys(name for name, _ in by_cell))
    some = [name for name in ("DDTREE chain", *(name for _, name in fixed(result))) if name in names]
    greys = mpl.colormaps["Greens"]
    # The control without calibration has `auto`'s colour, and is dashed.
    some_last = [name for name in names if name == f"{AUTO}{UNCALIBRATED}"]
    for name in [*some, *(name for name in COLOURS if name in names), *some_last]:
        rows = sorted((size, row["tok_s"]) for (arm, size), row in by_cell.items() if arm == name)
        colour = COLOURS.get(name.removesuffix(UNCALIBRATED))
        colour = colour or greys(0.3 + 0.6 * some.index(name) / max(len(some), 1))
        axes.errorbar(
            [size for size, _ in rows],
            [found["pooled"] for _, found in rows],
            yerr=[
                [max(found["pooled"] - found["min"], 0) for _, found in rows],
                [max(found["max"] - found["pooled"], 0) for _, found in rows],
            ],
            color=colour,
            marker="o",
            ms=3,
            capsize=2,
            lw=2 if name in COLOURS else 0.9,
            ls="--" if name in some_last else "-",
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({size for _, size in by_cell})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("concurrency", loc="left")
    axes.set_ylabel("output tokens per second, decoding")
    axes.set_title("Decoding speed by concurrency; all rounds, and their range", loc="left", fontsize=10)
    if names:
        axes.legend(fontsize=6, ncols=2)


def stages(axes: Axes, result: dict[str, Any]) -> None:
    """Where a step's time goes, a bar for each arm and concurrency."""
    order = ["DFLASH", AUTO, "DDTREE chain", *(name for _, name in fixed(result))]
    rows = [row for row in result["figures"]["stages"] if row["arm"] in order]
    rows.sort(key=lambda row: (row["concurrency"], order.index(row["arm"])))
    labels = [f"{row['arm'].removeprefix('DDTREE ')}, c={row['concurrency']}" for row in rows]
    left = [0.0] * len(rows)
    for number, stage in enumerate(STAGES):
        ms = [row["ms"].get(stage, 0.0) for row in rows]
        axes.barh(labels, ms, left=left, label=stage, color=mpl.colormaps["tab10"](number), height=0.7)
        left = [a + b for a, b in zip(left, ms, strict=True)]
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=6)
    axes.margins(y=0.01)
    clock = "the host's clock" if result.get("machine", {}).get("device") == "CPU" else "CUDA events"
    axes.set_xlabel(f"ms a step (medians by {clock})", loc="left")
    axes.set_title("What a step is made of; the budget of a tree, and the concurrency", loc="left", fontsize=10)
    if rows:
        axes.legend(fontsize=7, ncols=2)


if __name__ == "__main__":
    main()
