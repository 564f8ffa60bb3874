# SPDX-License-Identifier: Apache-2.0
"""Several hosts, each a tiny SGLang behind an sshd of its own, and faults that are planted into their interpreters."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.installs import Install, bundle_for, new_venv, tiny_package
from tests.support.trees import Listing, differences, listing
from tests.support.waiting import HANG, hold, until

from ddtree_overlay.remote import lock
from ddtree_overlay.workspace import Workspace


if TYPE_CHECKING:
    from tests.support.sshd import SshServer


RESULTS = {"srt/a.py": b"VALUE = 5\n", "srt/b.py": b"VALUE = 6\n", "srt/new/c.py": b"C = 1\n"}

#: Python's own hook at start-up: the agent runs under an interpreter that does `action` in place of a rename.
_HOOK = """
import os, pathlib
_real = os.replace
def replace(source, target, **k):
    if str(target).endswith({at!r}) and pathlib.Path({arm!r}).exists():
        {action}
    return _real(source, target, **k)
os.replace = replace
"""
FULL = "raise OSError(28, 'No space left on device')"
KILLED = "os.kill(os.getpid(), 9)"


@dataclass(frozen=True)
class Machine:
    """One host of a fleet."""

    name: str
    install: Install
    server: SshServer | None
    before: Listing

    def toml(self) -> str:
        """The host as a table of deploy.toml."""
        python = str(self.install.python)
        local = f'[hosts.{self.name}]\ntransport = "local"\npython = "{python}"\n'
        return f"{self.server.toml(self.name, python) if self.server else local}timeout = {HANG}\n"

    def sabotage(self, action: str, at: str = "/sglang/srt/b.py") -> Path:
        """From now on, `action` happens when a file is renamed to `at`; removing the file that is given ends it."""
        arm = self.install.site.parent / "armed"
        arm.touch()
        text = _HOOK.format(at=at, arm=str(arm), action=action.replace("{arm!r}", repr(str(arm))))
        (self.install.site / "sitecustomize.py").write_text(text)
        return arm

    def stop_in_the_middle(self) -> None:
        """From now on a swap stands still until `go_on`."""
        folder = self.install.site.parent
        self.sabotage(f"exec({hold(folder / 'busy', folder / 'go')!r})")

    def wait_until_busy(self) -> None:
        """Wait until a swap stands still."""
        until((self.install.site.parent / "busy").exists)

    def go_on(self) -> None:
        """Let it go on, and all that follow."""
        (self.install.site.parent / "go").touch()

    def wait_until_idle(self) -> None:
        """Wait until nobody holds the lock."""
        until(lambda: lock.holder(self.install.state) is None)

    def changed(self) -> list[str]:
        """What is not as it was in the package; compiled files that Python made do not count."""
        return differences(self.before, listing(self.install.root))

    def left(self) -> list[str]:
        """What lies in the state folder besides the history and the backups."""
        kept = {"lock", "history.jsonl", "deployments", "restart.log"}
        return sorted(p.name for p in self.install.state.glob("*") if p.name not in kept)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the host's lock as another deployment does."""
        self.install.state.mkdir(exist_ok=True)
        with (self.install.state / "lock").open("w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            stream.write('{"pid": 4711, "operator": "ann@desk", "doing": "push", "since": 0}')
            stream.flush()
            yield


def machines(
    folder: Path, servers: Sequence[SshServer | None], bases: Mapping[str, Mapping[str, bytes] | None]
) -> dict[str, Machine]:
    """A tiny SGLang for each name in `bases`, with the files given there or the usual ones; local without a server."""
    found = {}
    for number, (name, files) in enumerate(bases.items()):
        python, site = new_venv(folder / name)
        tiny_package(site, "0.5.11", files)
        install = Install(python, site)
        found[name] = Machine(name, install, servers[number % len(servers)], listing(install.root))
    return found


def write_workspace(workspace: Path, fleet: Mapping[str, Machine], results: Mapping[str, bytes] = RESULTS) -> str:
    """A deploy.toml with these hosts as the group gpu, and the bundle for the first; gives its overlay id."""
    tables = [machine.toml() for machine in fleet.values()]
    names = ", ".join(f'"{name}"' for name in fleet)
    (workspace / "deploy.toml").write_text("\n".join([*tables, "[groups]", f"gpu = [{names}]", ""]))
    return save_bundle(workspace, next(iter(fleet.values())), results)


def save_bundle(workspace: Path, machine: Machine, results: Mapping[str, bytes] = RESULTS) -> str:
    """Build the bundle for what is on `machine` now; gives its overlay id."""
    bundle, files = bundle_for(machine.install.root, results)
    Workspace(workspace).save_bundle(bundle, files)
    return bundle.overlay_id


def trees(fleet: Mapping[str, Machine]) -> dict[str, Listing]:
    """Everything in the site-packages of each machine."""
    return {name: listing(m.install.site) for name, m in fleet.items()}


def lines(text: str) -> dict[str, list[str]]:
    """Each line as its columns, by the name of the host that it begins with."""
    return {line.split()[0]: line.split() for line in text.splitlines() if line.startswith("  ") and line.strip()}
