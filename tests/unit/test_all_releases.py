# SPDX-License-Identifier: Apache-2.0
"""Every release of the table in one go, as `benchmarks/releases.py` times it."""

from __future__ import annotations

import pytest
from tests.support.releases import Done, every_release

from ddtree_overlay.releases import KNOWN, RELEASES


#: Minutes of work, which whoever comes first waits for.
pytestmark = pytest.mark.timeout(3000)


@pytest.fixture(scope="module")
def done() -> list[Done]:
    return every_release()


def test_every_release_is_patched_and_comes_apart_byte_for_byte(done: list[Done]):
    """One codemod for all releases is worth nothing if one of them loses a byte."""
    assert [d.version for d in done] == [row.version for row in KNOWN]
    assert {d.version: d.lost for d in done if d.lost} == {}
    assert all(d.diffed > d.edited for d in done)


def test_no_supported_release_has_a_finding(done: list[Done]):
    """Names, calls, hooks and sites of each."""
    supported = {row.version for row in RELEASES}

    assert {d.version: d.errors for d in done if d.errors and d.version in supported} == {}


def test_all_of_them_take_less_than_two_cores_in_two_minutes(done: list[Done]):
    """Processor time, some three times what an idle machine takes: shared caches make a busy one slower even by that.

    Beside engines and two busy loops it was 119 s; README.md has what it takes with nothing else running.
    """
    assert sum(d.seconds for d in done) < 240
