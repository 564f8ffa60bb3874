# SPDX-License-Identifier: Apache-2.0
"""What `--speculative-ddtree-calibration` may say. No torch: arguments are parsed where there is none."""

from __future__ import annotations


#: Exponents that are fitted or taken: beyond them a tree is next to a chain, or next to all siblings of one depth.
LOWEST, HIGHEST = 0.5, 3.0

#: Fit the exponents while serving.
AUTO = "auto"

_FLAG = "--speculative-ddtree-calibration"


def calibration_values(text: str, positions: int) -> tuple[float, ...] | str | None:
    """What the flag asks for.

    Args:
        text: `auto`, `off`, one exponent, or one a draft position, between commas.
        positions: Draft positions: the block size - 1.

    Returns:
        `AUTO`, None for off, or an exponent for each position.

    Raises:
        ValueError: The text is none of these; it says what would be.
    """
    word = text.strip().lower()
    if word == AUTO:
        return AUTO
    if word in {"off", "false"}:  # which YAML makes of it
        return None
    parts = word.split(",")
    try:
        values = tuple(float(part) for part in parts)
    except ValueError:
        raise ValueError(
            f"DDTREE: {_FLAG} {text!r} is neither auto, off, nor numbers between commas. Say auto to fit an exponent "
            "a draft position while serving, off to draft by the drafter's own probabilities."
        ) from None
    if len(values) not in (1, positions):
        raise ValueError(
            f"DDTREE: {_FLAG} has {len(values)} exponents; this drafter has {positions} draft positions (the block "
            f"size - 1). Give one for all, or {positions}."
        )
    outside = [part.strip() for part, value in zip(parts, values, strict=True) if not LOWEST <= value <= HIGHEST]
    if outside:
        raise ValueError(
            f"DDTREE: {_FLAG} takes exponents from {LOWEST} to {HIGHEST}, got {', '.join(outside)}. 1 leaves the "
            "drafter's probabilities as they are, above 1 trusts its first choices more."
        )
    return values if len(values) == positions else values * positions


def check_calibration(text: str, block_size: int) -> None:
    """Refuse a value that `calibration_values` does not take.

    Raises:
        ValueError: As there.
    """
    calibration_values(text, block_size - 1)
