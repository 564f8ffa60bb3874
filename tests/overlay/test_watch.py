# SPDX-License-Identifier: Apache-2.0
"""The check of `scripts/gpu_watch` that nodes see their ancestors and nobody else has to notice when they do not."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from sglang.srt.speculative.ddtree.tree import Tree, build_tree, ordered_topk


BATCH, BUDGET, VOCABULARY = 3, 11, 50


@pytest.fixture(scope="module")
def watch() -> ModuleType:
    """The module, which hooks into nothing as long as no file is named for it."""
    path = Path(__file__).parents[2] / "scripts/gpu_watch/sitecustomize.py"
    spec = importlib.util.spec_from_file_location("gpu_watch", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trees() -> Tree:
    """Three trees; the last one is a chain of three nodes, and padding."""
    torch.manual_seed(0)
    values, ids = ordered_topk(torch.log_softmax(torch.randn(BATCH, 3, VOCABULARY), -1), BUDGET)
    values[2, :, 1:] = float("-inf")
    return build_tree(torch.arange(BATCH), values, ids, BUDGET)


def totals(watch: ModuleType, visible: torch.Tensor, *, recurrent: bool = False) -> dict[str, int]:
    """What 60 changes give in a model whose rows read the tokens that `visible`, [bs, W, W], lets them see."""
    tree = trees()
    weights = torch.randn(VOCABULARY, VOCABULARY)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        return (visible.float() @ weights[ids.view(BATCH, -1)]).flatten(0, 1)

    batch = SimpleNamespace(spec_info=SimpleNamespace(tree=tree), input_ids=tree.tokens.flatten())
    given, dice = batch.input_ids.clone(), random.Random(1)
    found: dict[str, int] = {}
    for _ in range(60):

        def again() -> SimpleNamespace:
            out = forward(batch.input_ids)
            return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=out, hidden_states=out[:, :4]))

        out = forward(given)
        line = watch.hide(batch, again, dice, out, out[:, :4], recurrent=recurrent)
        for key in ("leaks", "blind", "hidden rows", "seeing rows", "changed padding"):
            found[key] = found.get(key, 0) + line[key]
        assert (batch.input_ids == given).all()
    return found


def test_ancestors_alone_pass(watch: ModuleType) -> None:
    """Nodes, leaves and padding are all drawn; nothing leaks, and every row that sees the node moves."""
    found = totals(watch, trees().ancestors)
    assert found["leaks"] == found["blind"] == 0
    assert found["hidden rows"] > found["seeing rows"] > found["changed padding"] > 0


def test_a_causal_verify_is_noticed(watch: ModuleType) -> None:
    """A row that sees all rows before it gives other numbers for a node that is no ancestor."""
    width = BUDGET + 1
    found = totals(watch, torch.ones(BATCH, width, width).tril().bool())
    assert found["leaks"] > 0
    assert found["blind"] == 0


def test_one_node_too_many_is_noticed(watch: ModuleType) -> None:
    """A single wrong pair of the mask is enough."""
    visible = trees().ancestors.clone()
    wrong = (~visible[0]).nonzero()[7]
    visible[0, wrong[0], wrong[1]] = True
    assert totals(watch, visible)["leaks"] > 0


def test_a_row_that_sees_too_little_is_noticed(watch: ModuleType) -> None:
    """A check that only asks for equal numbers would pass a model that reads nothing."""
    width = BUDGET + 1
    found = totals(watch, torch.eye(width).bool().expand(BATCH, width, width))
    assert found["leaks"] == 0
    assert found["blind"] > 0


def test_padding_of_recurrent_layers_may_follow_the_root(watch: ModuleType) -> None:
    """Their kernels take the root for its parent; any other node that reads too much is still noticed."""
    tree = trees()
    padding = (tree.parents < 0).clone()
    padding[:, 0] = False
    visible = tree.ancestors.clone()
    visible[:, :, 0] |= padding
    assert totals(watch, visible)["leaks"] > 0
    assert totals(watch, visible, recurrent=True)["leaks"] == 0
    visible[0, 2, 1] = ~visible[0, 2, 1]
    found = totals(watch, visible, recurrent=True)
    assert found["leaks"] + found["blind"] > 0
