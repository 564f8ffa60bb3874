# SPDX-License-Identifier: Apache-2.0
"""A few arguments as those of this process, in releases that keep all in one place and in those that do not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from sglang.srt import server_args


#: Of namespaces, as far as these tests come to them.
_GROUPS = ("comm", "graph", "kernel")


class _Bags:
    """Every namespace of the arguments holds all of them; a group in a namespace is the namespace itself."""

    def __init__(self, args: SimpleNamespace) -> None:
        self._args = args

    def __contains__(self, name: str) -> bool:
        return True

    def __getitem__(self, name: str) -> _Bags:
        return self

    @contextmanager
    def override(self, **values: Any) -> Iterator[None]:
        """Other values for a while."""
        kept = {name: getattr(self._args, name) for name in values if hasattr(self._args, name)}
        vars(self._args).update(values)
        try:
            yield
        finally:
            for name in values:
                delattr(self._args, name)
            vars(self._args).update(kept)

    def __getattr__(self, name: str) -> Any:
        return self if name in _GROUPS else getattr(self._args, name)


def publish(args: SimpleNamespace) -> SimpleNamespace:
    """Make these the arguments that SGLang's scheduler has; they may be changed later."""
    try:
        from sglang.srt import runtime_context
    except ImportError:
        server_args.set_global_server_args_for_scheduler(args)
        return args
    context: Any = runtime_context.get_context()
    if hasattr(context, "config_bag"):  # SGLang itself would publish nothing but complete arguments
        context._config_bags = _Bags(args)
    else:
        server_args.set_global_server_args_for_scheduler(args)
    return args
