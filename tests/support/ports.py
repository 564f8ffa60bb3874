# SPDX-License-Identifier: Apache-2.0
"""Ports that stay free until they are bound: below those that the kernel gives to connections, and nobody else's."""

from __future__ import annotations

import contextlib
import random
import socket


#: Below the kernel's own ports (32768 and up) with the 10,000 more at which SGLang has gRPC, and below those of
#: `scripts/gpu_proofs`.
_PORTS = range(10000, 20000)
#: A name of an abstract socket for each port; the kernel drops it with this process.
_claims: list[socket.socket] = []


def free_port() -> int:
    """A port of the loopback device where nothing listens, and which no other call gives while this process lives."""
    for port in random.sample(_PORTS, 200):
        claim = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError), socket.socket() as sock:
            claim.bind(f"\0ddtree-overlay-test-port-{port}")
            # As servers bind it: a connection of an earlier one may linger.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", port))
            _claims.append(claim)
            return port
        claim.close()
    raise OSError(f"no free port in {_PORTS}")
