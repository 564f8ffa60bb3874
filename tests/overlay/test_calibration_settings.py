# SPDX-License-Identifier: Apache-2.0
"""What an operator says of the exponents, and what is seen of them."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from prometheus_client import REGISTRY
from sglang.srt.speculative.ddtree import calibration_report
from sglang.srt.speculative.ddtree.calibration import EXPONENTS, LABELS, STATE_ROWS, Calibration
from sglang.srt.speculative.ddtree.calibration_args import AUTO, calibration_values, check_calibration
from sglang.srt.speculative.ddtree.calibration_report import tell_of
from sglang.srt.speculative.ddtree.report import server_state
from tests.overlay.calibration_steps import POSITIONS, Workload, fitted, random_step
from tests.overlay.publishing import publish


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("auto", AUTO),
        (" AUTO ", AUTO),
        ("off", None),
        ("false", None),
        ("1.3", (1.3,) * 3),
        ("1,2, 0.5", (1.0, 2.0, 0.5)),
    ],
)
def test_flag_takes(text: str, wanted: object) -> None:
    """A word, one exponent for all positions, or one for each."""
    assert calibration_values(text, 3) == wanted


@pytest.mark.parametrize(
    ("text", "said"),
    [("on", "auto"), ("1,2", "3 draft positions"), ("0.1", "from 0.5 to 3"), ("nan", "from 0.5 to 3"), ("", "auto")],
)
def test_flag_refuses(text: str, said: str) -> None:
    """The refusal says what would be taken."""
    with pytest.raises(ValueError, match="speculative-ddtree-calibration") as refused:
        check_calibration(text, 4)
    assert said in str(refused.value)


def test_off_and_fixed_exponents_ignore_labels() -> None:
    """`off` gives the head none; values stay as they are."""
    off, given = Calibration.of("off", POSITIONS, "cpu"), Calibration.of("1.2,1,1,1,0.9", POSITIONS, "cpu")
    for _ in range(20):
        Workload().step(given, 3.0)
    choices, _, _, _ = random_step(1, POSITIONS, 4)

    off.observe(replace(choices, logits=None, mean=None, plain_log_z=None), None)

    assert off.exponents is None
    assert given.exponents.tolist() == pytest.approx([1.2, 1, 1, 1, 0.9])
    assert off.state.shape == (STATE_ROWS, POSITIONS)


def test_a_chain_takes_no_exponents() -> None:
    """Of one choice a position it is the same with all; they would cost a launch a step."""
    assert Calibration.of("auto", POSITIONS, "cpu", topk_cap=1).exponents is None
    assert Calibration.of("auto", POSITIONS, "cpu", topk_cap=2).is_fitted


def test_reset_forgets_labels_and_keeps_what_was_given() -> None:
    """New weights, new fit; fixed exponents are the user's."""
    calibration, given = fitted(), Calibration.of("1.5", POSITIONS, "cpu")
    for _ in range(20):
        Workload().step(calibration, 3.0)
    assert calibration.report()["exponents"][0] > 1.1
    exponents = calibration.exponents

    calibration.reset()
    given.reset()

    assert calibration.report() == fitted().report()
    assert calibration.exponents is not None
    assert calibration.exponents.data_ptr() == exponents.data_ptr(), "a captured graph reads the old tensor"
    assert given.report()["exponents"] == [1.5] * POSITIONS


class Records(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_operators_see_the_exponents() -> None:
    """A log line once they have moved, a gauge for each depth, and what `/server_info` says."""
    calibration, seen = fitted(), Records()
    arguments = SimpleNamespace(enable_metrics=True, served_model_name="tiny", extra_metric_labels=None)
    publish(arguments)
    tell_of(calibration, 0)
    calibration.state[EXPONENTS] = torch.tensor([1.5, 1.25, 1, 1, 1])
    calibration.state[LABELS] = 300.0
    logging.getLogger(calibration_report.__name__).addHandler(seen)
    logging.getLogger(calibration_report.__name__).setLevel(logging.INFO)

    for _ in range(1200):
        calibration.told()

    assert len(seen.lines) == 1, "the second look finds nothing new"
    assert "exponents 1.50 1.25 1.00 1.00 1.00 after 300 labels" in seen.lines[0]
    labels = {"model_name": "tiny", "engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}
    values = [REGISTRY.get_sample_value("sglang:ddtree_exponent", {**labels, "depth": str(d)}) for d in (1, 2, 5)]
    assert values == [1.5, 1.25, 1.0]
    assert server_state()["ddtree_calibration"]["exponents"] == [1.5, 1.25, 1.0, 1.0, 1.0]
