# SPDX-License-Identifier: Apache-2.0
"""Restarts that could not be tried or proven are refused before anything is written."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.installs import bundle_for
from tests.support.servers import Server
from tests.support.trees import differences, listing
from tests.support.trials import (
    failed,
    history,
)

from ddtree_overlay import deploy, proving
from ddtree_overlay.config import Health, Host
from ddtree_overlay.errors import (
    ConfigError,
    OverlayError,
    UsageError,
)
from ddtree_overlay.hosts.transport import open_transport
from ddtree_overlay.manifest import OVERLAY_ID_PATH


@pytest.mark.parametrize(
    ("over", "kind", "says"),
    [
        ({"restart": ()}, ConfigError, "deploy.toml does not say how"),
        ({"health": None}, ConfigError, "does not say where its server listens"),
        ({"restart": ("/no/such/program",)}, OverlayError, "there is no program '/no/such/program'"),
        ({"health": Health("http://127.0.0.1:1", 2.0, "/no/such/key")}, OverlayError, "the API key in /no/such/key"),
        ({"health": Health("http://no-such-name.invalid:30000", 2.0)}, OverlayError, "no-such-name.invalid:30000: "),
        ({"root": "/tmp", "transport": "local"}, UsageError, "--root has nothing to restart"),
    ],
)
def test_what_cannot_be_restarted_or_asked_is_refused_before_anything_is_written(
    host: Host, server: Server, over: dict[str, Any], kind: type[OverlayError], says: str
):
    """A deploy that could not be undone does not begin."""
    before = listing(server.install.site)
    bundle, files = server.overlay()
    with open_transport(host) as transport:
        plan = deploy.plan_push(transport, bundle, files)

    with open_transport(replace(host, **over)) as transport, pytest.raises(kind, match=re.escape(says)) as caught:
        proving.push(transport, plan, files, operator="alice", progress=print)

    assert caught.value.next_step
    assert differences(before, listing(server.install.site)) == []


def test_a_url_that_is_not_a_server_of_sglang_is_refused_before_anything_is_written(
    host: Host, server: Server, tmp_path: Path
):
    """A health check that asks the wrong door would roll back every deploy."""
    (tmp_path / "web").mkdir()
    words = [
        sys.executable,
        "-u",
        "-m",
        "http.server",
        "0",
        "--bind",
        "127.0.0.1",
        "--directory",
        str(tmp_path / "web"),
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL) as other:
        try:
            port = re.search(r"port (\d+)", other.stdout.readline())[1]
            wrong = replace(host, health=Health(f"http://127.0.0.1:{port}", 2.0))
            error = failed(wrong, server, OverlayError)
        finally:
            other.kill()

    assert error.exit_code == 1 and "does not answer like SGLang (404)" in error.what
    assert history(host) == []


def test_a_bundle_that_no_server_could_report_is_refused(host: Host, server: Server):
    """A bundle of an earlier version has no module that names it; its proof would never come."""
    bundle, files = overlay_without_id(server)
    with open_transport(host) as transport:
        plan = deploy.plan_push(transport, bundle, files)
        with pytest.raises(OverlayError, match="could not report it") as caught:
            proving.push(transport, plan, files, operator="alice", progress=print)

    assert "ddtree-overlay patch --host gpu" in caught.value.next_step
    assert history(host) == []


def overlay_without_id(server: Server) -> Any:
    _, files = server.overlay()
    return bundle_for(server.folder / "pristine", {p: d for p, d in files.items() if p != OVERLAY_ID_PATH})
