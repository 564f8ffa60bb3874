# SPDX-License-Identifier: Apache-2.0
"""Compile and import patched files under this interpreter, without touching the installed package."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from .common import PACKAGE, digest_of_file, inside, split
from .locate import Site, locate


Answer = tuple[dict[str, Any], bytes]

#: Imports each module named on the command line; answers on the last line of stdout.
_IMPORTER = """
import importlib, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        found[name] = None
    except BaseException as e:
        found[name] = "%s: %s" % (type(e).__name__, e)
package = sys.modules.get("sglang")
print("\\n" + json.dumps({"imports": found, "file": getattr(package, "__file__", None)}))
"""


def compile_files(args: dict[str, Any], payload: bytes) -> Answer:
    """Syntax errors of `files` (path, size; bytes in `payload`) under this Python.

    `unlike` are the files that are here neither as `base` nor as `after` says, for those that come with the two.
    """
    site = locate(args)
    known = {f["path"]: (f["base"], f["after"]) for f in args["files"] if "base" in f}
    unlike = sorted(p for p, either in known.items() if digest_of_file(inside(site.root, p)) not in either)
    errors = syntax_errors(_unpack(args, payload))
    return {"python": platform.python_version(), "errors": errors, "unlike": unlike, "sglang": site.version}, b""


def _unpack(args: dict[str, Any], payload: bytes) -> dict[str, bytes]:
    # Python 3.9 has no strict=; `split` has checked the sizes.
    return dict(zip((f["path"] for f in args["files"]), split(payload, [f["size"] for f in args["files"]])))  # noqa: B905


def syntax_errors(files: dict[str, bytes]) -> list[dict[str, Any]]:
    """Path, line and message of each file that does not compile."""
    found = []
    for path, data in files.items():
        if not path.endswith(".py"):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compile(data, path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as e:
            found.append({"path": path, "line": getattr(e, "lineno", None) or 1, "message": str(getattr(e, "msg", e))})
    return found


def probe(args: dict[str, Any], payload: bytes) -> Answer:
    """Import `modules`, and run the server's --help if `help`, with the patched tree.

    The patched tree is a scratch folder of links to the installed package with the files laid over it, first on the
    path. When anything fails there the base is asked the same, so that "SGLang itself does not import here" is told
    apart from "the overlay breaks it"; otherwise `base` is None, for imports of SGLang take half a minute.
    """
    site = locate(args)
    scratch = Path(tempfile.mkdtemp(prefix="ddtree-probe-"))
    try:
        _lay_over(site, scratch / "tree" / PACKAGE, _unpack(args, payload))
        patched = _probe_one(scratch, scratch / "tree", args)
        clean = not patched["outside"] and not any(patched["imports"].values())
        if not clean or (patched["help"] and patched["help"]["code"] != 0):
            base = _probe_one(scratch, None if not args.get("root") else site.root.parent, args)
        else:
            base = None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return {"base": base, "patched": patched}, b""


def _lay_over(site: Site, tree: Path, files: dict[str, bytes]) -> None:
    """Build `tree`: real folders where a file is laid over, links to the installed package everywhere else."""
    real = {PurePosixPath(".")}
    for path in files:
        real |= set(PurePosixPath(path).parents)
    for folder in sorted(real, key=lambda p: len(p.parts)):
        (tree / folder).mkdir(parents=True, exist_ok=True)
        installed = site.root / folder
        for name in os.listdir(installed) if installed.is_dir() else ():
            child = folder / name
            if name != "__pycache__" and child not in real and str(child) not in files:
                (tree / child).symlink_to(installed / name)
    for path, data in files.items():
        inside(tree, path).write_bytes(data)


def _probe_one(scratch: Path, first: Path | None, args: dict[str, Any]) -> dict[str, Any]:
    neutral = scratch / "cwd"
    neutral.mkdir(exist_ok=True)
    # Folders of patched files are the scratch tree's own and hold no bytecode; none may be written anywhere.
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    env.pop("PYTHONSAFEPATH", None)
    if first is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(first), *filter(None, [env.get("PYTHONPATH")])])
    timeout = float(args.get("timeout", 300))
    runs = [["-c", _IMPORTER, *args["modules"]]]
    if args.get("help"):
        runs.append(["-m", f"{PACKAGE}.launch_server", "--help"])
    with ThreadPoolExecutor() as pool:
        ends = list(pool.map(lambda words: _python(words, neutral, env, timeout), runs))
    code, out, error = ends[0]
    answer = _last_json(out)
    fault = f"the interpreter ended with {code}: {error[-500:].strip()}"
    imports = answer["imports"] if answer else dict.fromkeys(args["modules"], fault)
    result: dict[str, Any] = {"imports": imports, "help": None, "outside": False}
    if first is not None and answer and answer["file"]:
        result["outside"] = first not in Path(answer["file"]).parents
    for code, out, error in ends[1:]:
        result["help"] = {"code": code, "output": out, "error": error[-2000:]}
    return result


def _last_json(text: str) -> dict[str, Any] | None:
    lines = text.strip().splitlines()
    with contextlib.suppress(ValueError):
        answer = json.loads(lines[-1]) if lines else None
        return answer if isinstance(answer, dict) else None
    return None


def _python(words: list[str], cwd: Path, env: dict[str, str], timeout: float) -> tuple[int, str, str]:
    """Run this interpreter in a session of its own; after `timeout` the whole session is killed."""
    child = subprocess.Popen(
        [sys.executable, *words],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, error = child.communicate(timeout=timeout)
        code = child.returncode
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        out, error = child.communicate()
        code, error = -1, error + f"\nno end after {timeout:.0f} s".encode()
    return code, out.decode("utf-8", "replace"), error.decode("utf-8", "replace")
