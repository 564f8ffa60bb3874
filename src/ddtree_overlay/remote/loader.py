# SPDX-License-Identifier: Apache-2.0
"""Second stage of the bootstrap: reads the agent's modules and one request from stdin, then runs it.

`-c BOOTSTRAP SENTINEL` reads this file's source as the first part of stdin and executes it. The following parts are the
modules (JSON, name to source), the request (JSON) and the payload (bytes), each after a line with its length. Nothing
happens before the last byte has arrived and its digest is right, so a cut connection changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import sys
from importlib.machinery import ModuleSpec
from typing import Any, BinaryIO


PACKAGE = "ddtree_agent"


class Memory:
    """Finds and loads the modules that came over stdin."""

    def __init__(self, sources: dict[str, str]) -> None:
        self.sources = {f"{PACKAGE}.{name}".removesuffix(".__init__"): text for name, text in sources.items()}

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """The module's spec, or None for a module that is not ours."""
        if name not in self.sources:
            return None
        loader: Any = self
        return ModuleSpec(name, loader, origin=f"<{name}>", is_package=name == PACKAGE)

    def create_module(self, _: ModuleSpec) -> None:
        """Leave that to the import system."""

    def exec_module(self, module: Any) -> None:
        """Run the module's source."""
        exec(compile(self.sources[module.__name__], f"<{module.__name__}>", "exec"), module.__dict__)  # noqa: S102

    def get_source(self, name: str) -> str:
        """The source, for tracebacks."""
        return self.sources[name]


def read_part(stream: BinaryIO) -> bytes:
    """The next part of the request.

    Raises:
        EOFError: The stream ended before it did.
    """
    line = stream.readline()
    data = stream.read(int(line)) if line.strip().isdigit() else b""
    if not line.endswith(b"\n") or len(data) != int(line):
        raise EOFError("the request was cut short; nothing was changed")
    return data


def main() -> None:
    """Read everything, check it, run it."""
    stream = sys.stdin.buffer
    modules, request, payload = read_part(stream), read_part(stream), read_part(stream)
    call = json.loads(request)
    if hashlib.sha256(payload).hexdigest() != call["payload_sha256"]:
        raise EOFError("the request was damaged on its way; nothing was changed")
    sys.dont_write_bytecode = True
    # `-c` puts the current folder first on the path; the serving interpreter would not import SGLang from there.
    if "" in sys.path:
        sys.path.remove("")
    finder: Any = Memory(json.loads(modules))
    sys.meta_path.insert(0, finder)
    __import__(f"{PACKAGE}.agent")
    sys.modules[f"{PACKAGE}.agent"].serve(call, payload, sys.argv[1])


if __name__ == "__main__":
    main()
