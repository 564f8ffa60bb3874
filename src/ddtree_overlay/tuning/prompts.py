# SPDX-License-Identifier: Apache-2.0
"""The prompts that are measured with: a few of our own, or those of a file. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ddtree_overlay.errors import UsageError
from ddtree_overlay.tuning.served import Served


#: A file with more is no set of prompts any more.
MOST_BYTES = 64 * 1024 * 1024
_FORMATS = (
    'a JSON list of strings or of lists of token ids, or lines of JSON objects with "text", "prompt" or "input_ids"'
)

#: Text, code, lists, arithmetic, dialogue: what a drafter finds easy and hard.
BUILT_IN = (
    "Explain in a few paragraphs why the sky is blue during the day and red at sunset.",
    "Write a Python function that merges two sorted lists into one sorted list, with a docstring and three examples.",
    "List ten practical ways to reduce the energy that a small office uses, each with one sentence of explanation.",
    "A train leaves at 9:40 and arrives at 13:05, with a stop of 25 minutes. How long does it move? Show each step.",
    "Write a short letter to a landlord about a broken heating, polite but firm, with a date by which it must work.",
    "Translate into French, then into German: The meeting was moved to Thursday because the hall is being painted.",
    "Summarise the causes of the French Revolution for a student of fourteen years, in plain words.",
    'Write a JSON document that describes a library with three books, each with "title", "author", "year" and "tags".',
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: text, or token ids. `name` says where it comes from, for messages."""

    name: str
    value: str | tuple[int, ...]

    @property
    def body(self) -> dict[str, Any]:
        """The field of the request."""
        return {"text": self.value} if isinstance(self.value, str) else {"input_ids": list(self.value)}

    @property
    def is_text(self) -> bool:
        """Whether the server has to tokenize it."""
        return isinstance(self.value, str)


def built_in() -> tuple[Prompt, ...]:
    """The prompts that are used when no file is named."""
    return tuple(Prompt(f"built-in prompt {i}", text) for i, text in enumerate(BUILT_IN, 1))


def parse(data: bytes, name: str) -> tuple[Prompt, ...]:
    """The prompts of a file called `name`.

    Raises:
        UsageError: It holds none, or something else.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise UsageError(f"--prompts {name} is not UTF-8 text", why=str(e), next_step=f"write {_FORMATS}") from e
    found = _of_list(text, name) if text.lstrip().startswith("[") else _of_lines(text, name)
    if not found:
        raise UsageError(f"--prompts {name} holds no prompt", next_step=f"write {_FORMATS}")
    return found


def check(prompts: tuple[Prompt, ...], served: Served, next_step: str) -> None:
    """Refuse text for a server without a tokenizer.

    Raises:
        UsageError: There is a prompt that the server cannot take.
    """
    wrong = next((p for p in prompts if p.is_text), None)
    if wrong and not served.text:
        raise UsageError(
            f"the server takes token ids only, and {wrong.name} is text",
            why="it was started with --skip-tokenizer-init",
            next_step=next_step,
        )


def _of_list(text: str, name: str) -> tuple[Prompt, ...]:
    return tuple(_prompt(value, f"{name}, item {i}") for i, value in enumerate(_load(text, name), 1))


def _of_lines(text: str, name: str) -> tuple[Prompt, ...]:
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        value = _load(line, where)
        given = [key for key in ("text", "prompt", "input_ids") if isinstance(value, dict) and key in value]
        if len(given) != 1:
            raise _refused(where, "it is no object with exactly one of these fields")
        found.append(_prompt(value[given[0]], where, ids=given[0] == "input_ids"))
    return tuple(found)


def _prompt(value: Any, where: str, *, ids: bool | None = None) -> Prompt:
    if isinstance(value, str) and not ids:
        if not value.strip() or any("\ud800" <= c <= "\udfff" for c in value):
            raise _refused(where, "it is empty, or no text")
        return Prompt(where, value)
    if isinstance(value, list) and value and ids is not False:
        if all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 2**31 for i in value):
            return Prompt(where, tuple(value))
        raise _refused(where, "a token id is a whole number from 0")
    raise _refused(where, f"it is neither text nor a list of token ids, but {type(value).__name__}")


def _load(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise _refused(where, f"it is no JSON: {e}" if isinstance(e, ValueError) else "nested too deeply") from e


def _refused(where: str, why: str) -> UsageError:
    return UsageError(f"--prompts {where} cannot be used", why=why, next_step=f"write {_FORMATS}")
