# SPDX-License-Identifier: Apache-2.0
"""What SGLang made of the attention backend that was asked for decides whether a tree is verified."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.speculative.ddtree import target_backend
from sglang.srt.speculative.ddtree.proven import TREE_ATTENTION_BACKENDS


class SubclassOfTriton(TritonAttnBackend):
    """A model's own."""


def instance(cls: type, **fields: object) -> object:
    """An object of a real class, without what building it would need."""
    made = object.__new__(cls)
    vars(made).update(fields)
    return made


def runner(backend: object, **changed: object) -> SimpleNamespace:
    """A loaded target."""
    base: dict[str, object] = {"attn_backend": backend, "use_mla_backend": False, "req_to_token_pool": object()}
    return SimpleNamespace(**(base | changed))


TRITON = instance(TritonAttnBackend)


def test_every_supported_backend_has_a_class():
    """A backend that the arguments admit and this check does not know would refuse every model."""
    assert set(TREE_ATTENTION_BACKENDS) <= set(target_backend._CLASSES)


BOTH = instance(HybridAttnBackend, prefill_backend=TRITON, decode_backend=TRITON)


@pytest.mark.parametrize(
    "backend",
    [
        TRITON,
        instance(HybridLinearAttnBackend, full_attn_backend=TRITON),
        BOTH,
        instance(HybridLinearAttnBackend, full_attn_backend=BOTH),
    ],
)
def test_a_proven_backend_is_admitted(backend):
    """Alone, beside recurrent layers, and one for each role."""
    target_backend.check_target(runner(backend))


@pytest.mark.parametrize(
    "backend",
    [
        instance(SubclassOfTriton),
        instance(type("MiniMaxHybridAttnBackend", (), {})),
        instance(HybridLinearAttnBackend, full_attn_backend=instance(SubclassOfTriton)),
        instance(HybridAttnBackend, prefill_backend=instance(SubclassOfTriton), decode_backend=TRITON),
    ],
)
def test_a_backend_that_the_model_put_in_its_place_is_refused(backend):
    """By its class, also below a wrapper."""
    with pytest.raises(ValueError, match="which SGLang chose for this model"):
        target_backend.check_target(runner(backend))


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"use_mla_backend": True}, "MLA"),
        ({"use_ngram_embedding": True}, "n-gram embeddings"),
        ({"ngram_embedding_manager": SimpleNamespace(enabled=True)}, "n-gram embeddings"),
        ({"req_to_token_pool": SimpleNamespace(ngram_pool=SimpleNamespace(enabled=True))}, "an n-gram context"),
        ({"req_to_token_pool": SimpleNamespace(short_conv_pool=SimpleNamespace(enabled=True))}, "short convolutions"),
    ],
)
def test_state_that_follows_rows_is_refused(changed, what):
    """Row i is node i, and the row before it is not its parent."""
    with pytest.raises(ValueError, match=what):
        target_backend.check_target(runner(TRITON, **changed))


def test_state_that_is_switched_off_is_none():
    """Every pool of these releases has the fields."""
    off = SimpleNamespace(enabled=False)
    target_backend.check_target(
        runner(
            TRITON,
            use_ngram_embedding=False,
            ngram_embedding_manager=off,
            req_to_token_pool=SimpleNamespace(ngram_pool=off, short_conv_pool=off),
        )
    )


def test_rocm_is_refused(monkeypatch):
    """MI350 verifies chains by a kernel that does not read the mask, on by default."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(ValueError, match="ROCm"):
        target_backend.check_target(runner(TRITON))
