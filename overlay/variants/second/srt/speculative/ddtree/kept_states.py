# SPDX-License-Identifier: Apache-2.0
"""How graphs of plain decoding come to keep the hidden states that the drafter reads, by the release."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def with_hidden_states(model_runner: Any) -> Iterator[None]:
    """Where such graphs are captured."""
    server_args = model_runner.server_args
    kept, server_args.enable_return_hidden_states = server_args.enable_return_hidden_states, True
    try:
        yield
    finally:
        server_args.enable_return_hidden_states = kept
