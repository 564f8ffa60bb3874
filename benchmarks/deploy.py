#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long a push and a snapshot take beside OpenSSH copying the same files, on a private sshd on loopback.

    .venv/bin/python benchmarks/deploy.py [--rounds N] [--json FILE]

Both arms run in turn in each round, against the same sshd and the same installed SGLang 0.5.11 (unpacked from the
published wheel into a virtual environment):

    push      `ddtree-overlay push --yes`: plan, backup, replace, verify, history
    copy      `scp -r` of the same 18 files, and one `ssh` command that does nothing
    snapshot  `ddtree-overlay snapshot` into an empty workspace, then into one that has it already
    stream    `ssh HOST tar -c` of the same files, unpacked here

Printed are the median with the least and the greatest time, and the ratio of the medians. Needs ssh, scp and an sshd.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from tests.support.installs import Install, new_venv  # noqa: E402
from tests.support.sshd import SshServer  # noqa: E402

from ddtree_overlay.manifest import Manifest  # noqa: E402
from ddtree_overlay.wheels import fetch_release  # noqa: E402


RELEASE = "0.5.11"
#: What the issue of this project allows: the whole push against copying, a snapshot against a stream.
LIMIT = 2.0


@dataclass(frozen=True)
class Bench:
    """One host, one workspace, and the command lines of both arms."""

    place: Path
    server: SshServer
    sglang: Install

    @property
    def workspace(self) -> Path:
        """Where ddtree-overlay keeps snapshots and bundles."""
        return self.place / "workspace"

    def ours(self, verb: str, *words: str, workspace: Path | None = None) -> None:
        """Run ddtree-overlay as a user would."""
        self._run(
            sys.executable, "-m", "ddtree_overlay", verb, "--host", "ct200", *words, cwd=workspace or self.workspace
        )

    def openssh(self, program: str, *words: str, **more: object) -> subprocess.CompletedProcess[bytes]:
        """Run ssh or scp with the key and the host key of the server."""
        options = [
            *("-F", "/dev/null", "-i", str(self.server.identity), "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes"),
            *("-o", f"UserKnownHostsFile={self.server.known_hosts}", "-o", "StrictHostKeyChecking=yes"),
            *("-P" if program == "scp" else "-p", str(self.server.port)),
        ]
        return self._run(program, *options, *words, **more)

    def _run(self, *words: str, cwd: Path | None = None, **more: object) -> subprocess.CompletedProcess[bytes]:
        done = subprocess.run(words, cwd=cwd, env=_environment(), capture_output=True, check=False, timeout=300, **more)  # type: ignore[call-overload]
        if done.returncode:
            raise SystemExit(
                f"{shlex.join(words)} ended with {done.returncode}:\n{done.stderr.decode(errors='replace')}"
            )
        return done

    @property
    def login(self) -> str:
        """User and address."""
        return f"{self.server.user}@127.0.0.1"

    def make_workspace(self, folder: Path) -> Path:
        """A workspace that knows the host and nothing else."""
        folder.mkdir()
        (folder / "deploy.toml").write_text(self.server.toml("ct200", str(self.sglang.python)))
        return folder

    def push(self) -> float:
        """One push, taken back afterwards."""
        spent = timed(lambda: self.ours("push", "--yes"))
        self.ours("rollback", "--yes", "--purge")
        return spent

    def copy(self) -> float:
        """The same files by scp into an empty folder, and one command over ssh."""
        goal = self.place / "copied"
        goal.mkdir()
        (layer,) = (self.workspace / "build").glob("*/files")

        def by_hand() -> None:
            self.openssh("scp", "-q", "-r", str(layer), f"{self.login}:{goal}")
            self.openssh("ssh", self.login, "true")

        spent = timed(by_hand)
        shutil.rmtree(goal)
        return spent

    def snapshot(self) -> float:
        """Everything transferred."""
        folder = self.make_workspace(self.place / "fresh")
        spent = timed(lambda: self.ours("snapshot", workspace=folder))
        shutil.rmtree(folder)
        return spent

    def snapshot_again(self) -> float:
        """Nothing has changed since the last one."""
        return timed(lambda: self.ours("snapshot"))

    def stream(self) -> float:
        """The snapshot's files as one tar stream, unpacked here."""
        manifest = Manifest.from_json((self.workspace / "snapshots/ct200/manifest.json").read_bytes())
        names = "\n".join(f.path for f in manifest.files)
        goal = self.place / "streamed"
        goal.mkdir()

        def by_hand() -> None:
            packed = self.openssh(
                "ssh", self.login, f"tar -C {shlex.quote(str(self.sglang.root))} -c -T -", input=names.encode()
            )
            self._run("tar", "-x", "-C", str(goal), input=packed.stdout)

        spent = timed(by_hand)
        shutil.rmtree(goal)
        return spent


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SSH_"))}


def install_sglang(place: Path) -> Install:
    """The published wheel in a virtual environment, with files of its own."""
    python, site = new_venv(place / "venv")
    shutil.copytree(fetch_release(RELEASE, PROJECT / ".cache"), site, dirs_exist_ok=True)
    return Install(python, site)


def measure(bench: Bench, rounds: int) -> dict[str, list[float]]:
    """The times of each arm, one after the other in every round; the first round warms up and is not counted."""
    arms = {
        "push": bench.push,
        "copy": bench.copy,
        "snapshot": bench.snapshot,
        "snapshot again": bench.snapshot_again,
        "stream": bench.stream,
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name, run in arms.items():
            spent = run()
            if number:
                times[name].append(spent)
    return times


def report(times: dict[str, list[float]]) -> bool:
    """Print the table; True when both ratios are within the limit."""
    for name, spent in times.items():
        print(f"{name:<15} {statistics.median(spent):6.3f} s  [{min(spent):.3f}, {max(spent):.3f}]")
    within = True
    for ours, theirs in (("push", "copy"), ("snapshot", "stream"), ("snapshot again", "stream")):
        ratio = statistics.median(times[ours]) / statistics.median(times[theirs])
        within = within and ratio <= LIMIT
        print(f"{ours} / {theirs}: {ratio:.2f} (limit {LIMIT:.0f})")
    return within


def main() -> int:
    """Run it; exit 1 when a ratio is above the limit."""
    parser = argparse.ArgumentParser(description="push and snapshot beside scp, ssh and tar")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the single times there")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ddtree-bench-") as name:
        place = Path(name)
        with SshServer.start(place / "sshd", PROJECT / ".cache", options="Subsystem sftp internal-sftp") as server:
            bench = Bench(place, server, install_sglang(place))
            bench.make_workspace(bench.workspace)
            bench.ours("snapshot")
            bench.ours("patch")
            times = measure(bench, asked.rounds)
    if asked.json:
        asked.json.write_text(json.dumps(times, indent=1) + "\n")
    return 0 if report(times) else 1


if __name__ == "__main__":
    sys.exit(main())
