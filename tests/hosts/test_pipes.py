# SPDX-License-Identifier: Apache-2.0
"""Things that are no files, where modules belong; and agents that nobody listens to any more."""

from __future__ import annotations

import os
import subprocess

import pytest
from tests.support.installs import bundle_for
from tests.support.waiting import HANG

from ddtree_overlay import deploy
from ddtree_overlay.errors import OverlayError
from ddtree_overlay.hosts import protocol
from ddtree_overlay.hosts.transport import open_transport
from ddtree_overlay.snapshots import snapshot_host


def test_a_pipe_in_place_of_a_module_is_refused_by_name(tiny):
    """Opening a FIFO waits for a writer for ever; snapshot and push say which module it is instead."""
    bundle, files = bundle_for(tiny.root, {"srt/a.py": b"VALUE = 5\n"})
    (tiny.root / "srt/a.py").unlink()
    os.mkfifo(tiny.root / "srt/a.py")
    with open_transport(tiny.host(timeout=HANG)) as transport:
        with pytest.raises(OverlayError, match=r"srt/a\.py is not a regular file"):
            snapshot_host(transport, "x", ["srt/a.py"])
        with pytest.raises(OverlayError, match=r"srt/a\.py is not a regular file"):
            deploy.plan_push(transport, bundle, files)


def test_what_python_would_not_import_does_not_keep_a_snapshot_from_being_taken(tiny, near):
    """A pipe, an editor's lock (a dangling link `.#a.py`) and a name in bytes lie among the modules: they are none."""
    (tiny.root / "srt" / os.fsdecode(b"b\xff.py")).write_bytes(b"DFLASH = 1\n")
    os.mkfifo(tiny.root / "srt/pipe.py")
    (tiny.root / "srt/.#a.py").symlink_to("ann@desk.4711")
    (tiny.root / "srt/speculative").mkdir()
    (tiny.root / "srt/speculative/dflash_worker.py").write_bytes(b"DFLASH = 1\n")
    manifest, files = snapshot_host(near, "x", ["srt/a.py"])
    assert set(files) == {"srt/a.py", "srt/speculative/dflash_worker.py"}
    assert manifest.mentions == ("srt/speculative/dflash_worker.py",)


def test_an_agent_that_only_reads_ends_when_nobody_listens(tiny):
    """A probe whose client has gone is interrupted and takes its scratch folder with it."""
    # The agent waits for what it has started; only then it shows whether it has noticed that nobody listens.
    (tiny.root / "srt/slow.py").write_text("import time\ntime.sleep(6)\n")
    files, payload = protocol.pack({"srt/a.py": b"VALUE = 5\n"})
    args = {"files": files, "modules": ["sglang.srt.slow"], "timeout": HANG}
    words = [tiny.python, "-c", protocol.BOOTSTRAP, "mark"]
    scratch = tiny.site.parent / "scratch"
    scratch.mkdir()
    child = subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    assert child.stdin
    assert child.stdout
    child.stdin.write(protocol.encode("probe", args, payload, timeout=1.0))
    child.stdin.close()
    child.stdout.read(1)
    child.stdout.close()
    try:
        assert child.wait(timeout=HANG) != 0
    finally:
        child.kill()
    assert list(scratch.iterdir()) == []
