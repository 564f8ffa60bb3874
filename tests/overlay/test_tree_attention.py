# SPDX-License-Identifier: Apache-2.0
"""The attention kernel of verify and draft steps against float64, and which steps are its."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang.srt.speculative.ddtree import attention_kernel, tree_attention
from sglang.srt.speculative.ddtree.attention_kernel import attend_by_kernel, block_rows, least_tokens, splits_of
from sglang.srt.speculative.ddtree.tree_attention import (
    Call,
    TreeAttention,
    serves,
    unknown_arguments,
    use_tree_attention,
)


def sglangs() -> Callable[..., Any]:
    """SGLang's function of this release."""
    try:
        module = importlib.import_module("sglang.kernels.ops.attention.extend_attention")
    except ModuleNotFoundError:  # before 0.5.16
        module = importlib.import_module("sglang.srt.layers.attention.triton_ops.extend_attention")
    extend: Callable[..., Any] = module.extend_attention_fwd
    return extend


def step(lens: list[int], width: int, heads: int, groups: int, size: int, *, masked: bool) -> dict[str, Any]:
    """A step's arguments by the names of `attend_by_kernel`, of requests with so many committed tokens."""
    torch.manual_seed(sum(lens) + width)
    batch, slots = len(lens), sum(lens) + 7
    q, out = (torch.randn(batch * width, heads, size) for _ in range(2))
    k, v = (torch.randn(batch * width, groups, size) for _ in range(2))
    k_buffer, v_buffer = (torch.randn(slots, groups, size) for _ in range(2))
    indptr = torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
    mask, starts = None, None
    if masked:
        parts = []
        for length in lens:
            tail = torch.rand(width, width).tril(-1) > 0.5
            tail.fill_diagonal_(True)
            # What is said of committed tokens is not read: they are all seen.
            parts.append(torch.cat([torch.rand(width, length) > 0.5, tail], dim=1).flatten())
        mask = torch.cat(parts)
        starts = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)
    return {
        "q": q, "k": k, "v": v, "out": out, "k_buffer": k_buffer, "v_buffer": v_buffer, "kv_indptr": indptr,
        "kv_indices": torch.randperm(slots)[: sum(lens)], "mask": mask, "mask_indptr": starts,
    }  # fmt: skip


def reference(given: dict[str, Any], width: int, scale: float) -> torch.Tensor:
    """The same in float64, request by request."""
    found = torch.zeros_like(given["out"], dtype=torch.float64)
    heads, groups = given["q"].shape[1], given["k"].shape[1]
    for request in range(len(given["kv_indptr"]) - 1):
        rows = slice(request * width, (request + 1) * width)
        first, end = given["kv_indptr"][request : request + 2].tolist()
        slots = given["kv_indices"][first:end]
        keys, values = (
            torch.cat([given[f"{name}_buffer"][slots], given[name][rows]]).double().repeat_interleave(
                heads // groups, dim=1
            )
            for name in "kv"
        )  # fmt: skip
        visible = torch.ones(width, len(keys), dtype=torch.bool)
        if given["mask"] is not None:
            start = int(given["mask_indptr"][request])
            told = given["mask"][start : start + width * len(keys)].view(width, -1)
            visible[:, end - first :] = told[:, end - first :]
        scores = torch.einsum("whd,nhd->hwn", given["q"][rows].double(), keys) * scale
        shares = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        found[rows] = torch.einsum("hwn,nhd->whd", shares, values)
    return found


@pytest.mark.parametrize("splits", [1, 2, 3, 8, 16, 32])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        ([1], 1, 2, 2, 16),
        ([70, 0, 131], 5, 6, 2, 32),
        ([300, 128, 1025], 3, 4, 2, 16),
        ([64, 200], 16, 8, 2, 16),
        ([3], 33, 4, 1, 16),
        ([129, 1], 40, 4, 1, 16),
        ([5, 66], 3, 14, 2, 16),
        ([9], 7, 12, 1, 16),
    ],
)
def test_the_kernel_gives_what_float64_gives(shape: tuple[Any, ...], masked: bool, splits: int) -> None:
    """Odd lengths, none, and exact blocks; more rows than a program has; programs that get nothing.

    A shape is the lengths, nodes, heads, groups, and the size of a head.
    """
    given, width = step(*shape, masked=masked), shape[1]
    attend_by_kernel(**given, width=width, scale=0.3, splits=splits)
    torch.testing.assert_close(given["out"].double(), reference(given, width, 0.3), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("masked", [True, False])
def test_the_kernel_gives_what_sglangs_gives(masked: bool) -> None:
    """Of this release, with the same arguments: queries in one tensor with keys and values, pools with gaps, pages."""
    width, lens = 5, [33, 0, 18]
    given = step(lens, width, 6, 2, 32, masked=masked)
    given["q"] = torch.cat([given["q"], given["k"], given["v"]], dim=1)[:, :6]
    for name in ("k_buffer", "v_buffer"):
        given[name] = torch.stack([torch.full_like(given[name], torch.nan), given[name]], dim=1)[:, 1]
    assert not given["q"].is_contiguous() and not given["k_buffer"].is_contiguous()
    given |= {"kv_indptr": given["kv_indptr"].long(), "kv_indices": given["kv_indices"].int()}
    attend_by_kernel(**given, width=width, scale=0.3, splits=2)

    found = torch.full_like(given["out"], torch.nan)
    named = {"q": given["q"], "k": given["k"], "v": given["v"], "out": found, **given, "width": width}
    mask = None if given["mask"] is None else given["mask"].to(torch.uint8)
    named |= {"out": found, "qo_indptr": torch.arange(len(lens) + 1) * width, "k_scale": 1.0, "v_scale": 1.0}
    named |= {"mask": mask, "is_causal": masked}
    sglangs()(*(named[name] for name in Call._fields[:-1]), 0.3)
    torch.testing.assert_close(given["out"], found, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("splits", [1, 2, 8])
def test_a_row_that_sees_nothing_is_zero(splits: int) -> None:
    """Of a request without tokens and with an empty mask: a number minus itself would spoil what all rows scale."""
    given = step([0, 70], 3, 4, 2, 16, masked=True)
    given["mask"][:9] = False
    attend_by_kernel(**given, width=3, scale=0.3, splits=splits)
    assert given["out"][:3].eq(0).all()
    torch.testing.assert_close(given["out"][3:].double(), reference(given, 3, 0.3)[3:], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("splits", [1, 2, 8])
def test_what_is_no_number_stays_none(splits: int) -> None:
    """Whoever looks for broken numbers finds them, however a request is shared; other rows are what they were."""
    given = step([700], 3, 4, 2, 16, masked=True)
    given["q"][1, 2] = torch.nan
    attend_by_kernel(**given, width=3, scale=0.3, splits=splits)
    wanted = reference(given, 3, 0.3)
    assert wanted[1, 2].isnan().all()
    torch.testing.assert_close(given["out"].double(), wanted, atol=2e-5, rtol=1e-4, equal_nan=True)


def test_rows_of_a_program_hold_a_request_with_little_padding() -> None:
    """Powers of two that Triton can multiply; more rows than a program has go to several."""
    assert [block_rows(rows) for rows in (1, 16, 17, 64, 65, 260)] == [16, 16, 32, 64, 64, 64]


def test_few_requests_share_their_tokens_among_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the device takes at two programs a processor; with many requests none are shared."""
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: type("Device", (), {"multi_processor_count": 132})
    )
    device = torch.device("cuda")
    assert [splits_of(programs, device) for programs in (1, 8, 32, 40, 88, 132, 133, 1000)] == [
        *(32, 32, 8, 6, 3, 2, 1, 1)
    ]


def test_few_programs_share_long_contexts_only() -> None:
    """With few of them the device is full without, and what they find has to be merged."""
    assert [least_tokens(splits) for splits in (2, 3, 4, 6, 8, 32)] == [512, 341, 256, 170, 64, 64]


@pytest.fixture
def merges(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and splits of every second launch, none of which is loaded yet."""
    found: list[tuple[int, int]] = []

    class Merge:
        def __getitem__(self, _: tuple[int, ...]) -> Callable[..., None]:
            return lambda *_, **named: found.append((named["ROWS"], named["SPLITS"]))

    monkeypatch.setattr(attention_kernel, "_merge_kernel", Merge())
    monkeypatch.setattr(attention_kernel, "_loaded", set())
    return found


def test_every_variant_of_the_second_launch_is_loaded_with_the_first(merges: list[tuple[int, int]]) -> None:
    """Before requests wait; a batch of another size brings none."""
    for lens in ([700], [70, 0, 131]):
        given = step(lens, 3, 4, 2, 16, masked=True)
        attend_by_kernel(**given, width=3, scale=0.3, splits=1)
    assert merges == [(8, 4), (4, 8), (2, 16), (1, 32)]
    for splits in (2, 5, 8, 16, 17, 32):
        attend_by_kernel(**given, width=3, scale=0.3, splits=splits)
    assert [most for _, most in merges[4:]] == [4, 8, 8, 16, 32, 32]


def test_pointers_that_are_compiled_for_otherwise_have_variants_of_their_own(merges: list[tuple[int, int]]) -> None:
    """Triton compiles for pointers to 16 bytes, and once more for others."""
    given = step([70, 0, 131], 3, 4, 2, 16, masked=True)
    room = torch.zeros(9, dtype=torch.int32)
    for offset in (0, 1, 4):
        room[offset : offset + 4] = given["kv_indptr"]
        attend_by_kernel(**given | {"kv_indptr": room[offset : offset + 4]}, width=3, scale=0.3, splits=1)
    assert [most for _, most in merges] == [4, 8, 16, 32] * 2


class Recorded:
    """SGLang's function, called or not."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_: Any, **__: Any) -> None:
        self.calls += 1


class OnDevice(torch.Tensor):
    """A tensor of the CPU that says it lies on a GPU."""

    is_cuda = True


def arguments(**changed: Any) -> tuple[list[Any], dict[str, Any]]:
    """What SGLang's backend passes for a verify step of two requests and three nodes, positional and by name."""
    given = step([4, 9], 3, 4, 2, 16, masked=True)
    tensors = {name: given[name].to(torch.bfloat16) for name in ("q", "k", "v", "out", "k_buffer", "v_buffer")}
    named = tensors | {
        "qo_indptr": torch.tensor([0, 3, 6]), "kv_indptr": given["kv_indptr"], "kv_indices": given["kv_indices"],
        "mask": given["mask"], "is_causal": True, "mask_indptr": given["mask_indptr"], "width": 3,
        "k_scale": 1.0, "v_scale": None, "sm_scale": 0.25,
    }  # fmt: skip
    further = {"logit_cap": 0.0, "sliding_window_size": -1, "sinks": None, "window_kv_offsets": None}
    further |= {"xai_temperature_len": -1, "page_size": 16, "score_mod": None}
    for name, value in changed.items():
        (named if name in named else further)[name] = value
    named["q"] = named["q"].as_subclass(OnDevice)
    return list(named.values()), further


def is_served(**changed: Any) -> bool:
    """Whether the kernel takes a step with something changed."""
    args, further = arguments(**changed)
    call = Call.of(tuple(args), further)
    assert call is not None
    return serves(call)


def test_a_verify_step_and_a_draft_block_are_served() -> None:
    """Pages do not matter: slots are of tokens."""
    assert is_served()
    assert is_served(mask=None, mask_indptr=None, is_causal=False)


@pytest.mark.parametrize(
    "changed",
    [
        {"mask": None, "mask_indptr": None},
        {"width": 2},
        {"qo_indptr": torch.tensor([0, 3, 5, 6])},
        {"logit_cap": 30.0},
        {"sliding_window_size": 128},
        {"sinks": torch.zeros(4)},
        {"xai_temperature_len": 64},
        {"score_mod": abs},
        {"skip_prefix_custom_mask": False},
        {"something_new": 1},
        {"k_scale": 0.5},
        {"v_scale": torch.ones(1)},
        {"lse_extend": torch.zeros(6, 4)},
        {"identity_kv_indices": True},
        {"extend_seq_lens_cpu": [3, 3]},
        {"width": torch.tensor(3)},
        {"kv_indptr": torch.tensor([0, 4, 13, 13], dtype=torch.int32)},
        {"out": torch.zeros(6, 4, 16)},
        {"mask_indptr": None},
        {"k_buffer": torch.zeros(20, 2, 16, dtype=torch.float8_e5m2)},
        {"q": torch.zeros(6, 4, 24, dtype=torch.bfloat16)},
        {"v": torch.zeros(6, 2, 32, dtype=torch.bfloat16)},
    ],
    ids=str,
)
def test_what_the_kernel_does_not_know_is_left_to_sglang(changed: dict[str, Any]) -> None:
    """A prompt, a batch of several lengths, windows, sinks, caps, float8, other shapes, arguments to come.

    Nothing is asked of a tensor, for which a step would wait.
    """
    assert not is_served(**changed)
    args, further = arguments(**changed)
    extend = Recorded()
    TreeAttention(extend)(*args, **further)
    assert extend.calls == 1


def test_a_call_of_other_places_is_left_to_sglang() -> None:
    """By name what SGLang's backend passes by place, or more by place than that."""
    args, further = arguments()
    scale = {"sm_scale": args[-1]}
    assert Call.of(tuple(args[:-1]), further | scale) == Call.of(tuple(args), further)
    assert Call.of(tuple(args[:-2]), further | scale | {"v_scale": None}) is None
    assert Call.of((*args, 0.0), further) is None


def test_the_log_says_whose_kernel_attends(caplog: pytest.LogCaptureFixture) -> None:
    """Once a backend for each, where layers differ."""
    attention = TreeAttention(Recorded())
    args, further = arguments(logit_cap=30.0)
    with caplog.at_level(logging.INFO, tree_attention.logger.name):
        attention(*args, **further)
        attention(*args, **further)
    assert [record.getMessage() for record in caplog.records] == [
        "DDTREE: steps of 3 tokens a request attend by SGLang's kernel."
    ]


def test_nothing_of_sglangs_function_is_unknown() -> None:
    """Of this release: a release that gives it another argument is one that somebody has to read."""
    assert unknown_arguments(torch.compiler.disable(sglangs())) == []


def moved(q_extend: Any, v_extend: Any, k_extend: Any) -> None: ...


def wrapped(*_: Any, **__: Any) -> None: ...


class Backend:
    """What has SGLang's function."""

    def __init__(self, extend: Callable[..., Any] | None = None) -> None:
        self.extend_attention_fwd = extend or sglangs()


def on_device(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    monkeypatch.setattr(tree_attention, "is_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


@pytest.mark.parametrize(("extend", "said"), [(moved, "v_extend, k_extend"), (wrapped, "_, __")])
def test_a_function_that_nobody_has_read_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, extend: Callable[..., Any], said: str
) -> None:
    """Arguments elsewhere or without names: the log names them."""
    on_device(monkeypatch)
    backend = Backend(extend)
    with caplog.at_level(logging.INFO, tree_attention.logger.name):
        use_tree_attention(backend)
    assert backend.extend_attention_fwd is extend
    assert f"SGLang's kernel: it takes arguments that the overlay does not know ({said})." in caplog.text


def test_a_backend_without_the_function_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that calls it otherwise: `verify` says so before (check `attributes`)."""
    on_device(monkeypatch)
    with pytest.raises(AttributeError, match="extend_attention_fwd"):
        use_tree_attention(object())


def test_a_backend_is_changed_once_and_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU of NVIDIA's, or with an old one, nothing is changed either: MUSA's say that they are CUDA's."""
    backend = Backend()
    extend = backend.extend_attention_fwd
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    use_tree_attention(backend)
    on_device(monkeypatch, (7, 5))
    use_tree_attention(backend)
    on_device(monkeypatch)
    monkeypatch.setenv(tree_attention.VARIABLE, "0")
    use_tree_attention(backend)
    assert backend.extend_attention_fwd is extend

    monkeypatch.delenv(tree_attention.VARIABLE)
    use_tree_attention(backend)
    use_tree_attention(backend)
    assert isinstance(backend.extend_attention_fwd, TreeAttention)
    assert backend.extend_attention_fwd._extend is extend
