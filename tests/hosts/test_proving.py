# SPDX-License-Identifier: Apache-2.0
"""Proofs without a push: of a rollback, by the operator's word, and step by step as a fleet takes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.servers import Server
from tests.support.trials import (
    push,
    states,
)
from tests.support.waiting import until

from ddtree_overlay import deploy, proving
from ddtree_overlay.config import Host
from ddtree_overlay.errors import (
    ConflictError,
    OverlayError,
    RollbackIncompleteError,
)
from ddtree_overlay.hosts.transport import open_transport
from ddtree_overlay.remote import lock


def test_a_rollback_with_a_restart_is_proven_too(host: Host, server: Server):
    """Back to the one before, restarted, and the live server says so; a hook that does nothing is exit 7."""
    first, _ = push(host, server)
    push(host, server, mark="2")

    with open_transport(host) as transport:
        plan = deploy.plan_rollback(transport)
        done, proof = proving.rollback(transport, plan, operator="bob", progress=print)
    assert (done.to, proof.ok) == ("d-0001", True)
    assert server.info()["speculative_ddtree_overlay_id"] == first.overlay_id

    idle = replace(host, restart=("true",), health=server.health(1.0))
    with open_transport(idle) as transport, pytest.raises(RollbackIncompleteError, match="nothing was restarted"):
        proving.rollback(transport, deploy.plan_rollback(transport), operator="bob", progress=print)
    assert [s[2] for s in states(host)] == [False, False]


def test_rollback_skips_deployments_that_are_bad(host: Host, server: Server):
    """One step back is the last one that is not known to fail (capistrano#1885, #2120)."""
    first, _ = push(host, server)
    with open_transport(host) as transport:
        for mark in ("2", "3"):
            bundle, files = server.overlay(mark=mark)
            done = deploy.push(transport, deploy.plan_push(transport, bundle, files), files, operator="alice")
            if mark == "2":
                proof = proving.Proof(False, "unhealthy", "it broke", 1.0, (), True)
                assert proving.settle(transport, done, proof, operator="alice").state == "bad"

        plan = deploy.plan_rollback(transport)
        assert (plan.to, plan.undoes) == (first.id, ("d-0003", "d-0002"))
        assert deploy.plan_rollback(transport, to="d-0002").to == "d-0002"


def test_confirm_takes_the_operators_word_unless_the_server_denies_it(host: Host, server: Server):
    """For a restart by other means; what the live server contradicts is not confirmed."""
    with open_transport(host) as transport:
        with pytest.raises(OverlayError, match="gpu: no overlay is deployed here"):
            proving.confirm(transport, operator="carol")
        bundle, files = server.overlay()
        done = deploy.push(transport, deploy.plan_push(transport, bundle, files), files, operator="alice")
        assert done.state == "pending"

        with pytest.raises(OverlayError, match="d-0001 was not confirmed: the live server runs no overlay"):
            proving.confirm(transport, operator="carol")
        until(lambda: [p.stale for p in deploy.status(transport).processes] == [True])
        server.start()
        server.runs(bundle.overlay_id)

        assert [proving.confirm(transport, operator="carol", note="seen")[1] for _ in "ab"] == [False, True]
        found = deploy.history(transport)[0]
        assert (found.state, found.note) == ("good", "seen")
        (server.install.root / "srt/a.py").write_bytes(b"EDITED = 1\n")
        with pytest.raises(ConflictError, match="d-0001 is not in place any more"):
            proving.confirm(transport, operator="carol")


def test_prove_and_settle_are_the_steps_of_a_fleet(host: Host, server: Server):
    """Swap first, restart and prove later; what is not live on the host is not proven. The lock names who proves."""
    bundle, files = server.overlay()
    holders = set()

    def tell(_: str) -> None:
        if found := lock.holder(server.install.state):
            holders.add(found["operator"])

    with open_transport(host) as transport:
        done = deploy.push(transport, deploy.plan_push(transport, bundle, files), files, operator="alice")
        with pytest.raises(ConflictError, match="d-0001 is live here, not base"):
            proving.prove(transport, None, restart=True, progress=print)

        proof = proving.prove(transport, done, restart=True, progress=tell, operator="alice")
        assert holders == {"alice"}
        assert (proof.ok, deploy.history(transport)[0].state) == (True, "pending")
        assert proving.settle(transport, done, proof, operator="alice").state == "good"

        deploy.rollback(transport, operator="alice")
        assert proving.prove(transport, None, restart=True, progress=print).ok
    assert server.info()["speculative_algorithm"] is None
