# SPDX-License-Identifier: Apache-2.0
"""What a start says of features that DFLASH serves and that cost a tree more than they seem to."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from sglang.srt.speculative.ddtree.features import warn_of_released_weights


@pytest.mark.parametrize(
    ("saver", "backup", "warned"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_drafter_that_loses_its_weights_is_told_of(
    caplog: pytest.LogCaptureFixture, saver: bool, backup: bool, warned: bool
) -> None:
    """sglang#31674: the text stays right, so that nobody would notice; a copy on the host keeps both models."""
    with caplog.at_level(logging.WARNING):
        warn_of_released_weights(SimpleNamespace(enable_memory_saver=saver, enable_weights_cpu_backup=backup))

    assert [word in caplog.text for word in ("drafter", "--enable-weights-cpu-backup")] == [warned, warned]
