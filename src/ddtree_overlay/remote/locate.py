# SPDX-License-Identifier: Apache-2.0
"""Which SGLang this interpreter imports, and how it is installed. Nothing is inferred from folder names."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import site
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .common import PACKAGE, Refusal


STATE_FOLDER = ".ddtree-overlay"


@dataclass(frozen=True)
class Site:
    """The installed package. `seen` is the folder as the interpreter names it, `root` the same with links resolved."""

    root: Path
    seen: Path
    install: str
    version: str | None
    #: False when the package was uninstalled and only files of the overlay keep its folder alive.
    importable: bool = True

    @property
    def state(self) -> Path:
        """The folder for everything that must survive a call; beside the package, never inside it."""
        return self.root.parent / STATE_FOLDER


def locate(args: dict[str, Any], *, orphans: bool = False) -> Site:
    """The package in `args["root"]` when given, else the one that this interpreter imports.

    Args:
        args: The request's arguments.
        orphans: Accept an uninstalled package of which only a state folder and overlay files are left.

    Raises:
        Refusal: There is no SGLang, or an empty folder shadows it.
    """
    if args.get("root"):
        return _from_folder(Path(args["root"]))
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        return _orphaned_on_path(orphans)
    if spec.origin is None or not os.path.isfile(spec.origin):
        places = [Path(p) for p in spec.submodule_search_locations or ()]
        left = next((p for p in places if (p.resolve().parent / STATE_FOLDER).is_dir()), None)
        if orphans and left:
            return Site(left.resolve(), left, "none", None, importable=False)
        raise _shadowed(places, left)
    seen = Path(spec.origin).parent
    root = seen.resolve()
    if not (root / "srt").is_dir():
        raise Refusal(
            "failed",
            f"the {PACKAGE!r} that {sys.executable} imports is not SGLang: {root} has no srt folder",
            next_step="set `python` in deploy.toml to the interpreter that starts the server",
        )
    return Site(root, seen, _install_kind(seen), installed_version(PACKAGE))


def _orphaned_on_path(orphans: bool) -> Site:
    for folder in sys.path:
        state = Path(folder) / STATE_FOLDER
        if orphans and state.is_dir():
            seen = Path(folder) / PACKAGE
            return Site(seen.resolve(), seen, "none", None, importable=False)
    raise Refusal(
        "failed",
        f"there is no SGLang: {sys.executable} cannot import {PACKAGE!r}",
        why=f"No module named {PACKAGE!r}: another interpreter of the host has it, or nothing is installed yet",
        next_step="set `python` in deploy.toml to the interpreter that starts the server, or install SGLang for it",
    )


def _shadowed(places: list[Path], left: Path | None) -> Refusal:
    names = ", ".join(str(p) for p in places) or "a namespace package"
    if left:
        return Refusal(
            "failed",
            f"SGLang was uninstalled under the overlay: only overlay files are left in {left}",
            next_step="ddtree-overlay rollback {target} --purge",
        )
    return Refusal(
        "failed",
        f"SGLang is shadowed by {names}: a folder without __init__.py is found before the installed package",
        why="Python takes such a folder as an empty namespace package",
        next_step=f"look into {places[0] if places else names}, and remove it if it is a left-over",
    )


def _install_kind(seen: Path) -> str:
    if seen.is_symlink() or seen.parent.is_symlink():
        return "symlinked"
    if _under(seen, [site.getusersitepackages()]):
        return "user-site"
    if _is_editable() or not _under(seen, [*site.getsitepackages(), *_purelib()]):
        return "editable"
    return "wheel"


def _under(path: Path, folders: list[str]) -> bool:
    real = path.resolve()
    return any(Path(f).resolve() in real.parents for f in folders)


def _purelib() -> list[str]:
    import sysconfig

    return [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]


def _is_editable() -> bool:
    try:
        text = importlib.metadata.distribution(PACKAGE).read_text("direct_url.json")
        return bool(text and json.loads(text).get("dir_info", {}).get("editable"))
    except (importlib.metadata.PackageNotFoundError, ValueError, AttributeError):
        return False


def installed_version(distribution: str, folders: list[str] | None = None) -> str | None:
    """The version in the metadata of `distribution`, or None; `folders` limits where metadata is looked for."""
    path: dict[str, Any] = {"path": folders} if folders is not None else {}
    found = next(iter(importlib.metadata.distributions(name=distribution, **path)), None)
    try:
        return found.version if found else None
    except KeyError:
        return None


def _from_folder(folder: Path) -> Site:
    for seen in (folder, folder / PACKAGE, folder / "python" / PACKAGE):
        if (seen / "__init__.py").is_file() and (seen / "srt").is_dir():
            root = seen.resolve()
            version = installed_version(PACKAGE, [str(root.parent)]) or _version_file(root)
            return Site(root, seen, "unpacked", version)
    left = (folder / PACKAGE) if (folder / STATE_FOLDER).is_dir() else folder
    if (left.resolve().parent / STATE_FOLDER).is_dir():
        return Site(left.resolve(), left, "none", None, importable=False)
    raise Refusal(
        "failed",
        f"there is no SGLang in {folder}",
        why=f"neither it nor {PACKAGE}/ nor python/{PACKAGE}/ below it holds __init__.py and srt/",
        next_step="name the package folder, a site-packages folder or a checkout with --root PATH",
    )


def _version_file(root: Path) -> str | None:
    for name in ("_version.py", "version.py"):
        try:
            text = (root / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        found = re.search(r"^(?:__version__ = |version = )(?:version = )?['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        if found:
            return found[1]
    return None
