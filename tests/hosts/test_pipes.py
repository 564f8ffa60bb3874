# SPDX-License-Identifier: Apache-2.0
"""Things that are no files, where modules belong; and agents that nobody listens to any more."""

from __future__ import annotations

import os
import subprocess

import pytest
from tests.support.installs import bundle_for

from ddtree_overlay import deploy
from ddtree_overlay.errors import OverlayError
from ddtree_overlay.hosts import protocol
from ddtree_overlay.hosts.transport import open_transport
from ddtree_overlay.snapshots import snapshot_host


@pytest.mark.parametrize("path", ["srt/a.py", "srt/other.py"], ids=["touched", "elsewhere"])
def test_a_pipe_in_place_of_a_module_is_refused_by_name(tiny, path):
    """Opening a FIFO waits for a writer for ever; snapshot and push say which module it is instead."""
    bundle, files = bundle_for(tiny.root, {"srt/a.py": b"VALUE = 5\n"})
    (tiny.root / path).unlink(missing_ok=True)
    os.mkfifo(tiny.root / path)
    with open_transport(tiny.host(timeout=10.0)) as transport:
        with pytest.raises(OverlayError, match=rf"{path} is not a regular file"):
            snapshot_host(transport, "x", ["srt/a.py"])
        if path == "srt/a.py":
            with pytest.raises(OverlayError, match=rf"{path} is not a regular file"):
                deploy.plan_push(transport, bundle, files)


def test_an_agent_that_only_reads_ends_when_nobody_listens(tiny):
    """A probe whose client has gone is interrupted and takes its scratch folder with it."""
    (tiny.root / "srt/slow.py").write_text("import time\ntime.sleep(4)\n")
    files, payload = protocol.pack({"srt/a.py": b"VALUE = 5\n"})
    args = {"files": files, "modules": ["sglang.srt.slow"], "timeout": 60}
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
        assert child.wait(timeout=20) != 0
    finally:
        child.kill()
    assert list(scratch.iterdir()) == []
