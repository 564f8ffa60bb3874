# SPDX-License-Identifier: Apache-2.0
"""How lanes are built, and which one a step takes: by the plan, or by what its requests ask for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.speculative.ddtree.choosing import Choosing, check_wish, override_of, tree_shape
from sglang.srt.speculative.ddtree.lane_parts import RUNNER, replay_of
from sglang.srt.speculative.ddtree.lanes import Lanes
from sglang.srt.speculative.ddtree.round_times import Choice
from tests.overlay.lane_standins import arguments
from tests.overlay.publishing import publish


@pytest.fixture(autouse=True)
def published() -> SimpleNamespace:
    return publish(arguments())


class FakeRunner:
    """A model runner whose lanes are names."""

    def __init__(self, published: SimpleNamespace) -> None:
        self.server_args = published
        published.speculative_num_draft_tokens = 41
        self.attn_backend = "backend of 41"
        setattr(self, RUNNER, None)
        self.init_new_workspace = False

    def _get_attention_backend(self, init_new_workspace: bool = False) -> str:
        assert init_new_workspace
        return f"backend of {self.server_args.speculative_num_draft_tokens}"


@pytest.fixture
def lanes(published: SimpleNamespace) -> Lanes:
    """Three, of an engine without graphs."""
    published.speculative_ddtree_budget, published.speculative_ddtree_budgets = 40, "8,15"
    return Lanes(FakeRunner(published), None)


def test_each_lane_is_built_where_its_width_is_the_only_one(lanes: Lanes):
    """And the model runner has its own backend again after `rest`."""
    runner, seen = lanes._model_runner, []
    for width in lanes.widths:
        lanes.use(width)
        seen.append(runner.attn_backend)
    lanes.rest()

    assert seen == ["backend of 9", "backend of 16", "backend of 41"]
    assert runner.attn_backend == "backend of 41"
    assert runner.server_args.speculative_num_draft_tokens == 41


@pytest.mark.skipif(
    RUNNER != "graph_runner", reason="the second worker finds a graph by its key, not by its batch size"
)
def test_a_graph_is_found_by_its_batch_size():
    """A runner of 0.5.13 has no name for the keys of its graphs; `auto` times graphs at start-up in every release."""
    replayed: list[int] = []
    graphs = {size: SimpleNamespace(replay=lambda size=size: replayed.append(size)) for size in (1, 4)}

    replay_of(SimpleNamespace(graphs=graphs), 4)()

    assert replayed == [4]


def asks(*wishes: object) -> list[SimpleNamespace]:
    """Requests that ask for a budget each, or for nothing."""
    params = [None if wish is None else {"ddtree_budget": wish, "__req__": object()} for wish in wishes]
    return [SimpleNamespace(sampling_params=SimpleNamespace(custom_params=param)) for param in params]


@pytest.mark.parametrize(
    ("wishes", "found"),
    [((8, 8), 8), ((8, 15), None), ((8, None), None), ((None, None), None), (("chain",), "chain"), ((), None)],
)
def test_a_wish_holds_while_every_request_has_it(wishes: tuple[object, ...], found: object):
    """One that joins without it ends it."""
    assert override_of(asks(*wishes)) == found


def test_a_step_takes_what_is_asked_for_or_what_is_configured(lanes: Lanes, published: SimpleNamespace):
    """The chain is the lane of the block's own width."""
    choosing = Choosing(lanes, published)

    def chosen(*wishes: object) -> tuple[int, str]:
        mode = SimpleNamespace(is_extend=lambda: False, is_idle=lambda: False)
        choosing.begin(SimpleNamespace(forward_mode=mode, is_extend_in_batch=False, reqs=asks(*wishes)))
        return choosing.choose()

    assert chosen(8, 8) == (9, "tree")
    assert chosen("chain") == (16, "chain")
    assert chosen(8, 15) == (41, "tree")
    assert chosen(77) == (41, "tree")
    # Engines with graphs: a client does not choose a step of any size.
    choosing._lanes = SimpleNamespace(widths=lanes.widths, fits=lambda width, count: width * count <= 20)
    assert chosen(8, 8) == (9, "tree")
    assert chosen(8, 8, 8) == (41, "tree")
    assert chosen("chain", "chain") == (41, "tree")


@pytest.mark.parametrize(
    ("widths", "planned", "taken"),
    [
        ((9, 16, 41), Choice(41), Choice(16)),
        ((9, 16, 41), Choice(9), Choice(9)),
        ((9, 16, 41), Choice(16, "chain"), Choice(16, "chain")),
        ((1, 41), Choice(41), Choice(1, "none")),
        ((33, 41), Choice(41), Choice(33)),
    ],
)
def test_a_batch_that_no_graph_serves_takes_nothing_wider_than_the_chain(
    published: SimpleNamespace, widths: tuple[int, ...], planned: Choice, taken: Choice
):
    """The plan is one for fewer requests, whose wide trees come out of a graph; nothing is learned of the others."""
    began: list[int] = []
    interrupted: list[bool] = []
    published.speculative_ddtree_budget = "auto"
    choosing = Choosing(SimpleNamespace(widths=widths, fits=lambda _, count: count <= 4), published)
    choosing._auto = SimpleNamespace(
        chooser=SimpleNamespace(choose=lambda _: planned),
        begin=lambda count: began.append(count) or planned,
        interrupt=lambda: interrupted.append(True),
    )
    mode = SimpleNamespace(is_extend=lambda: False, is_idle=lambda: False)
    for count in (4, 5):
        reqs = asks(*[None] * count)
        choosing.begin(SimpleNamespace(forward_mode=mode, is_extend_in_batch=False, reqs=reqs))
        assert choosing.choose() == (planned if count == 4 else taken)
    assert (began, interrupted) == ([4], [True])


def test_the_chain_is_a_tree_of_first_choices():
    """Whatever caps and seeds the trees have."""
    assert tree_shape(16, "chain", 4, chain_seed=False) == (15, 1, True)
    assert tree_shape(9, "tree", 4, chain_seed=False) == (8, 4, False)
    assert tree_shape(9, "tree", None, chain_seed=True) == (8, 8, True)


@pytest.mark.parametrize("wish", [8, 15, 40, "chain", None])
def test_a_request_may_ask_for_what_is_there(wish: object):
    """A budget of a lane, the chain, or nothing."""
    request = SimpleNamespace(sampling_params={"custom_params": {"ddtree_budget": wish}})

    check_wish(arguments(40, "8,15"), request)


@pytest.mark.parametrize("wish", [9, "8", 8.0, True, "tree", [8]])
def test_a_request_that_asks_for_something_else_is_refused(wish: object):
    """With what it may ask for."""
    request = SimpleNamespace(sampling_params={"custom_params": {"ddtree_budget": wish}})

    with pytest.raises(ValueError, match='lanes for 8, 15, 40, or "chain"'):
        check_wish(arguments(40, "8,15"), request)


def test_the_chain_cannot_be_asked_for_without_its_lane():
    """And the text says which budget it needs."""
    request = SimpleNamespace(sampling_params={"custom_params": {"ddtree_budget": "chain"}})

    with pytest.raises(ValueError, match='"chain" needs 15 among them'):
        check_wish(arguments(40, "8"), request)
