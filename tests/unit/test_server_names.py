# SPDX-License-Identifier: Apache-2.0
"""What a server is called that was named by its URL, on the screen and in the name of its plot."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ddtree_overlay.cli.selecting import find_target
from ddtree_overlay.cli.tuning import _stem


@pytest.mark.parametrize(
    ("url", "name", "stem"),
    [
        ("http://10.0.0.7:30000", "10.0.0.7:30000", "10.0.0.7-30000"),
        ("https://gpu-1.lan/sglang/", "gpu-1.lan", "gpu-1.lan"),
        ("http://[::1]:30000", "[::1]:30000", "ipv6-1-30000"),
    ],
)
def test_a_server_is_called_by_its_address_and_port(url: str, name: str, stem: str) -> None:
    """A file's name has nothing in it that a shell, or a file system of another kind, takes for something else."""
    target = find_target(SimpleNamespace(flags=()), url=url)

    assert (target.name, _stem(target.name)) == (name, stem)


def test_the_name_of_a_host_is_that_of_its_plot() -> None:
    """`tune-ct200.png`."""
    assert _stem("ct200_a") == "ct200_a"
