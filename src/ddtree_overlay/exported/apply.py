#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Puts the overlay that lies beside this file into the SGLang that this interpreter imports, and takes it away again.

    PYTHON apply.py push | rollback | confirm | status | history [--help]

Run it with the interpreter that starts the server. It does what `ddtree-overlay` does over SSH, with the same agent:
the same plan, lock, backups, journal and history.
"""

import sys


# An older Python gets this far, and is told so.
if sys.version_info < (3, 9):
    sys.exit("apply.py: Python 3.9 or newer is needed, and this is " + sys.version.split()[0])
if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
    # The server does not import from this folder. With it on the path, another SGLang could be found than the server's.
    del sys.path[0]
sys.dont_write_bytecode = True

import hashlib  # noqa: E402
import importlib.util  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
from typing import Any, Dict  # noqa: E402


HERE = os.path.dirname(os.path.abspath(__file__))
AGENT = "ddtree_agent"


def read_manifest() -> Dict[str, Any]:
    """The manifest, once every file that is run or pushed is known to be as it was exported."""
    with open(os.path.join(HERE, "manifest.json"), "rb") as stream:
        manifest: Dict[str, Any] = json.loads(stream.read())
    for name, digest in sorted(manifest["contents"].items()):
        if name.startswith(("layer/", AGENT + "/")):
            with open(os.path.join(HERE, *name.split("/")), "rb") as stream:
                if hashlib.sha256(stream.read()).hexdigest() != digest:
                    raise ValueError(f"{name} was changed or cut short since it was exported")
    return manifest


def load_agent() -> Any:
    """The agent's modules as a package, from this folder and nowhere else."""
    folder = os.path.join(HERE, AGENT)
    spec = importlib.util.spec_from_file_location(
        AGENT, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec
    assert spec.loader
    sys.modules[AGENT] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[AGENT])
    return importlib.import_module(f"{AGENT}.standalone")


def main() -> int:
    """Check the export, then let its agent do the work."""
    try:
        manifest = read_manifest()
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as e:
        what, why, step = f"this export is damaged: {HERE}", str(e), "copy it here again; nothing was changed"
        command = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
        whole = {"schema": 1, "command": command, "ok": False, "exit_code": 1, "changed": False}
        told = {"error": "OverlayError", "what": what, "why": why, "next": step}
        print(json.dumps({**whole, **told}, indent=2))  # noqa: T201
        print(f"error: {what}\n  why:  {why}\n  next: {step}", file=sys.stderr)  # noqa: T201
        return 1
    code: int = load_agent().main(sys.argv[1:], HERE, manifest)
    return code


if __name__ == "__main__":
    sys.exit(main())
