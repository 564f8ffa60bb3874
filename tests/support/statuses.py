# SPDX-License-Identifier: Apache-2.0
"""The status of a host: of a real one, and one that is made up."""

from __future__ import annotations

from typing import Any

from ddtree_overlay import deploy
from ddtree_overlay.config import Host
from ddtree_overlay.hosts.transport import open_transport
from ddtree_overlay.plans import Status


def status_of(host: Host, **options: Any) -> Status:
    """What `status` says of a host; `options` are those of its connection."""
    with open_transport(host, **options) as transport:
        return deploy.status(transport)


def host_status(state: str, **over: object) -> Status:
    """Of a wheel of 0.5.11 without a deployment, but for what is given."""
    values = {
        "host": "ct200",
        "target": "--host ct200",
        "root": "/opt/sglang",
        "install": "wheel",
        "version": "0.5.11",
        "state": state,
        "reason": "1 file was edited",
        "deployment": None,
        "overlay_id": None,
        "files": (),
        "processes": (),
        "unfinished": "",
        "ephemeral": False,
        "warnings": (),
    }
    return Status(**(values | over))
