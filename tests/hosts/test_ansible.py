# SPDX-License-Identifier: Apache-2.0
"""`examples/ansible` with real ansible-core, two sshds, and a real server on each host."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.installs import Install, new_venv, tiny_package
from tests.support.servers import Server
from tests.support.sshd import SshServer
from tests.support.sshd_binary import SshdUnavailable
from tests.support.trees import listing
from tests.support.waiting import HANG
from tests.support.wheels import CACHE

from ddtree_overlay import export


PROJECT = Path(__file__).parents[2]
EXAMPLE = PROJECT / "examples/ansible"
PLAYBOOK = Path(sys.executable).with_name("ansible-playbook")
NAMES = ("first", "second")
PUSH = "Push the overlay, restart, and wait for the server"
#: Without asking every host first, which takes seconds.
AT_ONCE = ("--skip-tags", "plan")
#: The same, with both hosts in one batch.
BOTH = (*AT_ONCE, "-e", json.dumps({"ddtree_batches": [2]}))


@dataclass(frozen=True)
class Played:
    """What one run of ansible-playbook did: exit code, output, and the recap of each host."""

    code: int
    out: str

    def of(self, host: str) -> dict[str, int]:
        """The counts of `host` in the recap."""
        line = next(line for line in self.out.splitlines() if re.match(rf"{host} +: ok=", line))
        return {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", line)}

    def changed(self, host: str) -> list[str]:
        """The tasks that changed `host`."""
        return self._tasks(f"changed: [{host}]")

    @property
    def failed_task(self) -> str:
        """The first task that failed."""
        return self._tasks("fatal: ")[0]

    def _tasks(self, start: str) -> list[str]:
        task, found = "", []
        for line in self.out.splitlines():
            heading = re.match(r"TASK \[(?:ddtree_overlay : )?(.*)\] \*", line)
            task = heading[1] if heading else task
            if line.startswith(start):
                found.append(task)
        return found


@dataclass(frozen=True)
class Fleet:
    """Two hosts, each with an sshd, an SGLang and a server of its own."""

    folder: Path
    #: Sockets of shared connections, whose path must be short.
    controls: Path
    servers: dict[str, Server]
    sshds: dict[str, SshServer]

    def play(self, playbook: str, tar: Path, *words: str, lost: bool = False) -> Played:
        """Run a playbook of the example; with `lost`, for a third host between the two that cannot be reached."""
        hosts = {name: self._variables(name) for name in NAMES}
        if lost:
            closed = {**hosts["first"], "ansible_port": 1}
            hosts = {"first": hosts["first"], "lost": closed, "second": hosts["second"]}
        (self.folder / "inventory.json").write_text(json.dumps({"sglang": {"hosts": hosts}}))
        done = subprocess.run(
            [
                PLAYBOOK,
                *("-i", self.folder / "inventory.json", EXAMPLE / playbook, "-e", f"ddtree_export={tar}", *words),
            ],
            env={
                **{k: v for k, v in os.environ.items() if not k.startswith(("ANSIBLE_", "PYTHON"))},
                "ANSIBLE_HOME": str(self.folder / "ansible"),
                "ANSIBLE_PIPELINING": "1",
                "ANSIBLE_TIMEOUT": str(int(HANG)),
                "ANSIBLE_SSH_TRANSFER_METHOD": "piped",
                "ANSIBLE_NOCOLOR": "1",
                "ANSIBLE_SSH_CONTROL_PATH_DIR": str(self.controls),
                "ANSIBLE_SSH_ARGS": "-F /dev/null -o ControlMaster=auto -o ControlPersist=10s",
                "LC_ALL": "C.UTF-8",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=4 * HANG,
            check=False,
        )
        return Played(done.returncode, done.stdout)

    def _variables(self, name: str) -> dict[str, object]:
        server, sshd = self.servers[name], self.sshds[name]
        return {
            "ansible_host": "127.0.0.1",
            "ansible_port": sshd.port,
            "ansible_user": sshd.user,
            "ansible_ssh_private_key_file": str(sshd.identity),
            "ansible_ssh_common_args": f"-o UserKnownHostsFile={sshd.known_hosts} -o StrictHostKeyChecking=yes",
            "ansible_python_interpreter": sys.executable,
            "ddtree_python": str(server.install.python),
            "ddtree_restart": str(server.folder / "restart-checked"),
            "ddtree_url": server.url,
            "ddtree_health_seconds": int(server.health(8.0).timeout),
        }

    def trees(self) -> dict[str, dict[str, str]]:
        """Everything that is installed on each host, without what the servers themselves compile."""
        everything = {name: listing(server.install.root) for name, server in self.servers.items()}
        return {n: {p: what for p, what in t.items() if "__pycache__" not in p} for n, t in everything.items()}

    def live(self) -> dict[str, object]:
        """The overlay that each server reports."""
        return {name: s.info().get("speculative_ddtree_overlay_id") for name, s in self.servers.items()}


@pytest.fixture
def fleet(tmp_path):
    """Two hosts with running servers; in CI a missing sshd or ansible-core is an error."""
    if not PLAYBOOK.exists() and not os.environ.get("CI"):
        pytest.skip("ansible-core is not installed: it is one of the dev dependencies, see scripts/setup")
    servers, sshds = {}, {}
    try:
        for name in NAMES:
            python, site = new_venv(tmp_path / name)
            tiny_package(site, "0.5.11")
            servers[name] = server = Server.create(Install(python, site), tmp_path / f"{name}-server")
            # A host with a fault that only shows with one overlay.
            tree = server.install.root / "srt/speculative/ddtree/tree.py"
            script = f"if grep -qsf {tmp_path}/fault-of-{name} {tree}; then touch {server.folder}/broken; "
            script += f"else rm -f {server.folder}/broken; fi\nexec {server.folder}/restart"
            (server.folder / "restart-checked").write_text(f"#!/bin/sh\n{script}\n")
            (server.folder / "restart-checked").chmod(0o755)
            server.start()
            # Where nobody else's temporary folders are.
            (tmp_path / f"{name}-tmp").mkdir()
            sshds[name] = SshServer.start(
                tmp_path / f"{name}-sshd", CACHE, options=f"SetEnv TMPDIR={tmp_path}/{name}-tmp"
            )
        with tempfile.TemporaryDirectory(prefix="cp-") as controls:
            yield Fleet(tmp_path, Path(controls), servers, sshds)
    except SshdUnavailable as e:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no sshd: {e}")
    finally:
        for server in servers.values():
            server.stop()
        for sshd in sshds.values():
            sshd.stop()


@pytest.fixture
def overlays(fleet):
    """Two overlays of the same base as exported tar files: path and overlay id."""

    def made(mark):
        bundle, files = fleet.servers["first"].overlay(mark=mark)
        path = fleet.folder / f"{mark}.tar"
        path.write_bytes(export.to_tar(export.export_files(bundle, files)))
        return path, bundle.overlay_id

    return made("one"), made("two")


def test_each_condition_is_one_that_every_supported_ansible_reads():
    """Before ansible-core 2.19 a condition is put between `{% if` and `%}`, where `a if b else c` needs brackets."""
    jinja2 = pytest.importorskip("jinja2")  # as ansible-core brings it
    found = []
    for path in EXAMPLE.rglob("*.yml"):
        for line in path.read_text().splitlines():
            key, _, condition = line.strip().lstrip("- ").partition(": ")
            if key in ("when", "changed_when", "failed_when", "until", "check_mode"):
                jinja2.Environment(autoescape=True).parse(f"{{% if {condition} %}}{{% endif %}}")
                found.append(condition)
    assert len(found) > 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_rollout_goes_batch_by_batch_and_puts_a_failed_host_back(fleet, overlays):
    """The whole life of a rollout: refused by drift, done, done already, undone where it fails, and taken off again.

    One test, because every run of Ansible takes seconds. What a run says it changed is what it changed.
    """
    (one, one_id), (two, two_id) = overlays
    first, second = (fleet.servers[name] for name in NAMES)
    pristine = fleet.trees()

    # A host that was edited by hand stops a rollout before anything is written anywhere; --check says what would be.
    drifted = second.install.root / "srt/a.py"
    original = drifted.read_bytes()
    drifted.write_bytes(original + b"# mine\n")
    before = {name: listing(fleet.folder / name) for name in NAMES}
    done = fleet.play("roll-out.yml", one, "--check")
    assert done.code == 2, done.out
    assert (done.changed("first"), done.failed_task) == (["Plan the push"], "Plan the push")
    assert "srt/a.py is not as expected" in done.out
    done = fleet.play("roll-out.yml", one)
    assert (done.code, done.changed("first"), done.changed("second")) == (2, [], []), done.out
    assert {name: listing(fleet.folder / name) for name in NAMES} == before
    drifted.write_bytes(original)

    # One host, then the rest.
    done = fleet.play("roll-out.yml", one)
    assert done.code == 0, done.out
    assert fleet.live() == {"first": one_id, "second": one_id}
    for name in NAMES:
        assert done.changed(name) == [PUSH]
    assert done.out.index("changed: [first]") < done.out.index("changed: [second]")
    pushed, restarts = fleet.trees(), [len(s.restarts()) for s in (first, second)]

    # Again: nothing changes, and no server is restarted.
    done = fleet.play("roll-out.yml", one, *BOTH)
    assert (done.code, done.of("first")["changed"], done.of("second")["changed"]) == (0, 0, 0), done.out
    assert (fleet.trees(), [len(s.restarts()) for s in (first, second)]) == (pushed, restarts)

    # Both in one batch, and the second does not come up: it is put back, and the first is not left half-way.
    (fleet.folder / "fault-of-second").write_text("MARK = 'two'\n")
    done = fleet.play("roll-out.yml", two, *BOTH)
    assert done.code == 2, done.out
    assert fleet.live() == {"first": two_id, "second": one_id}
    assert fleet.trees()["second"] == pushed["second"]
    assert (done.changed("first"), done.changed("second")) == ([PUSH], [])
    assert "d-0002 was rolled back" in done.out

    # Back to the base, everywhere.
    done = fleet.play("roll-back.yml", one, "-e", "ddtree_to=base")
    assert done.code == 0, done.out
    assert fleet.live() == {"first": None, "second": None}
    assert fleet.trees() == pristine

    # The first one of all does not come up: the next batch is not touched.
    (fleet.folder / "fault-of-first").write_text("MARK = 'two'\n")
    done = fleet.play("roll-out.yml", two, *AT_ONCE)
    assert done.code == 2, done.out
    assert (done.changed("first"), done.changed("second")) == ([], [])
    assert (len(first.restarts()), len(second.restarts())) == (6, 5)
    assert fleet.live() == {"first": None, "second": None}
    assert fleet.trees() == pristine

    # A host that cannot be reached stops it as well, after the others of its batch.
    done = fleet.play("roll-out.yml", one, lost=True)
    assert (done.code, done.changed("first"), done.changed("second")) == (4, [], []), done.out
    done = fleet.play("roll-out.yml", one, *BOTH, lost=True)
    assert (done.code, done.changed("first"), done.changed("second")) == (4, [PUSH], []), done.out
    assert fleet.live() == {"first": one_id, "second": None}
    assert [list((fleet.folder / f"{name}-tmp").glob("ddtree-*")) for name in NAMES] == [[], []]
