# SPDX-License-Identifier: Apache-2.0
"""What the second worker puts into a verify step and takes out of it, in DFLASH's shapes: mask, rows, tokens."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import msgspec
import pytest
import torch
from sglang.srt.speculative.ddtree.accept import accept
from sglang.srt.speculative.ddtree.commit import committed_rows, rows_of_batch
from sglang.srt.speculative.ddtree.tree import Tree, build_tree, ordered_topk
from sglang.srt.speculative.ddtree.tree_mask import verify_mask, write_tree_mask
from tests.overlay.publishing import publish
from tests.support.variants import variant


PREFIXES = [0, 7, 1, 300]


def trees(budget: int, positions: int = 5) -> Tree:
    """Trees of four requests; small budgets cut them, large ones are padded."""
    torch.manual_seed(budget)
    log_probs, ids = ordered_topk(torch.log_softmax(torch.randn(len(PREFIXES), positions, 4), -1), min(budget, 4))
    return build_tree(torch.full((len(PREFIXES),), 7), log_probs, ids, budget)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
@pytest.mark.parametrize("budget", [1, 3, 16, 63])
def test_mask_is_that_of_known_lengths(budget: int, dtype: torch.dtype) -> None:
    """Bit for bit what the first worker builds from host lengths; what was in the buffer before is gone."""
    tree = trees(budget)
    expected = verify_mask(tree, PREFIXES)
    out = torch.zeros(expected.numel() + 50, dtype=dtype)
    write_tree_mask(out, tree, torch.tensor(PREFIXES), whole=True)
    assert torch.equal(out[: expected.numel()].bool(), expected)
    assert out[expected.numel() :].all()


@pytest.mark.parametrize("whole", [False, True])
def test_mask_writes_the_cells_that_it_is_asked_for(whole: bool) -> None:
    """Tails alone leave all else as it was; a whole mask sets what is behind, the unused rows of a graph, to 1."""
    tree, lens = trees(3), torch.tensor(PREFIXES)
    end = verify_mask(tree, PREFIXES).numel()
    for before in (0, 1):
        out = torch.full((end + 50,), before, dtype=torch.uint8)
        write_tree_mask(out, tree, lens, whole=whole)
        start = 0
        for prefix_len, ancestors in zip(PREFIXES, tree.ancestors, strict=True):
            rows = out[start : start + tree.width * (prefix_len + tree.width)].view(tree.width, -1)
            assert (rows[:, :prefix_len] == (1 if whole else before)).all()
            assert torch.equal(rows[:, prefix_len:].bool(), ancestors)
            start += rows.numel()
        assert start == end
        assert (out[end:] == (1 if whole else before)).all()


@pytest.mark.parametrize("budget", [2, 16, 63])
def test_tokens_and_rows_follow_the_path(budget: int) -> None:
    """Accepted tokens, then the bonus; the values of the path's own nodes in front of each block."""
    tree, block_size = trees(budget), 6
    targets = torch.randint(0, 4, tree.tokens.shape)
    targets[0] = 99  # nothing accepted
    targets[1, 0] = tree.tokens[1, 1]  # something
    acceptance = accept(tree, targets, prefix_lens=torch.tensor(PREFIXES), block_size=block_size)
    assert acceptance.accept_lens.unique().numel() > 1
    width = tree.tokens.shape[1]
    rows = rows_of_batch(acceptance.path, width)
    values = torch.arange(len(PREFIXES) * width).unsqueeze(1).expand(-1, 3)
    gathered = committed_rows(values, acceptance).view(len(PREFIXES), block_size, 3)
    tokens = acceptance.tokens
    assert tokens.shape == (len(PREFIXES), block_size)
    for request, accepted in enumerate(acceptance.accept_lens.tolist()):
        path = acceptance.path[request, : accepted + 1].tolist()
        wanted = [*tree.tokens[request, path[1:]].tolist(), int(acceptance.bonus[request])]
        assert tokens[request].tolist() == wanted + [0] * (block_size - len(wanted))
        assert gathered[request, : accepted + 1, 0].tolist() == [request * width + node for node in path]
        assert rows[request].tolist() == [request * width + n for n in path] + [-1] * (rows.shape[1] - len(path))


class VerifyMask(msgspec.Struct, frozen=True):
    """As SGLang 0.5.17 and later have it, but for fields that do not matter here."""

    buffer: torch.Tensor
    max_bs: int


def test_mask_of_a_step_past_the_context_fits_its_buffer() -> None:
    """A step launched before the last one is counted has a prefix up to a block past the context."""
    room = variant("second", "room")
    context, block, budget = 32, 6, 16
    publish(SimpleNamespace(speculative_algorithm="DDTREE", speculative_dflash_block_size=block))
    tree = trees(budget)
    width = tree.tokens.shape[1]
    made = VerifyMask(torch.zeros(len(PREFIXES) * width * (context + width), dtype=torch.uint8), len(PREFIXES))
    grown = room.verify_mask_with_room(made, width)
    prefixes = [context + block] * len(PREFIXES)
    write_tree_mask(grown.buffer, tree, torch.tensor(prefixes), whole=True)
    expected = verify_mask(tree, prefixes)
    assert torch.equal(grown.buffer[: expected.numel()].bool(), expected)
    assert expected.numel() > made.buffer.numel()
    assert room.verify_mask_with_room(None, width) is None


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_one_rank_tells_of_the_graphs_of_the_draft_kv(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: int, lines: int
) -> None:
    """As of those of the lanes."""
    draft_kv_graphs = variant("second", "draft_kv_graphs")
    publish(SimpleNamespace(speculative_algorithm="DDTREE", forward_hooks=None))
    monkeypatch.setattr(draft_kv_graphs, "get_tp_group", lambda: SimpleNamespace(rank_in_group=rank), raising=False)
    for name in ("graph_pool_handle", "synchronize", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    worker = SimpleNamespace(
        draft_model=SimpleNamespace(fc=SimpleNamespace(in_features=4)),
        model_runner=SimpleNamespace(dtype=torch.float32),
        _ensure_draft_block_buffers=lambda _: None,
        _append_target_hidden_to_draft_kv_by_loc=lambda **_: None,
        _use_fused_kv_materialize=False,
        _fused_kv_helper=None,
        _draft_verify_out_cache_loc_buf=torch.zeros((2, 3), dtype=torch.int64),
        _draft_block_positions_buf=torch.zeros((2, 3), dtype=torch.int64),
    )
    with caplog.at_level("INFO"):
        assert draft_kv_graphs.capture_draft_kv(worker, [1, 2]) is not None
    assert sum("captured the draft KV of 2 batch sizes" in line for line in caplog.messages) == lines
