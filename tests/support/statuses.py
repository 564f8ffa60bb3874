# SPDX-License-Identifier: Apache-2.0
"""The status of a host, made up."""

from __future__ import annotations

from ddtree_overlay.plans import Status


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
