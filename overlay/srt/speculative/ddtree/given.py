# SPDX-License-Identifier: Apache-2.0
"""What DDTREE's arguments are given as: on a command line, in Python, or out of JSON, where a number may be text."""

from __future__ import annotations

import re
from typing import Any


def whole_number(value: Any) -> int | None:
    """A whole number, or its text; None for anything else, `True` and 4.0 included."""
    if isinstance(value, str):
        return int(value) if re.fullmatch(r"\s*[+-]?[0-9]{1,9}\s*", value, re.ASCII) else None
    return value if type(value) is int else None


def checked_cap(value: Any) -> int | None:
    """Most tokens that are considered per draft position, or None.

    Raises:
        ValueError: Neither a whole number of at least 1 nor None.
    """
    cap = whole_number(value)
    if value is not None and (cap is None or cap < 1):
        raise ValueError(
            f"DDTREE requires --speculative-ddtree-topk-cap to be a whole number of at least 1, got {shown(value)}. "
            "1 drafts DFLASH's chain; leave it out to consider as many tokens a position as the budget."
        )
    return cap


def checked_switch(field: str, value: Any) -> bool:
    """A field that is on or off. Text is neither: "false" would switch it on.

    Raises:
        ValueError: It is something else.
    """
    if type(value) is not bool:
        raise ValueError(
            f"DDTREE requires --{field.replace('_', '-')} to be on or off, got {shown(value)}. Give the flag alone, or "
            f"in Python and JSON {field} as true or false, without quotation marks."
        )
    return value


def checked_calibration(value: Any) -> str:
    """The text that `calibration_values` reads: as it is, of a number, a list of numbers, or False for off."""
    if isinstance(value, (list, tuple)):
        return ",".join(str(part) for part in value)
    return str(value)


def shown(value: Any) -> str:
    """What was given, with its type where that is not plain to see."""
    return f"{value!r} ({type(value).__name__})" if isinstance(value, (str, bool, float)) else repr(value)
