# SPDX-License-Identifier: Apache-2.0
"""A Qwen3 and a DFlash drafter in plain torch, small enough to be trained in minutes; `make_pair.py` trains them.

Names of modules are those of the checkpoints that SGLang reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional


EPS = 1e-6


@dataclass(frozen=True)
class Sizes:
    """Of a pair: the drafter shares widths and heads with its target."""

    vocabulary: int = 8192
    hidden: int = 384
    layers: int = 8
    draft_layers: int = 3
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    mlp: int = 1024
    block: int = 16
    theta: float = 10000.0
    features: tuple[int, ...] = field(default=(1, 3, 5))  # target layers that the drafter reads

    def config(self, mask_token: int, *, draft: bool) -> dict[str, Any]:
        """The checkpoint's config.json."""
        shared = {
            "architectures": ["DFlashDraftModel" if draft else "Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.draft_layers if draft else self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 8192,
            "rms_norm_eps": EPS,
            "rope_theta": self.theta,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "attention_bias": False,
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
        }
        if not draft:
            # Transformers reads the angles here, older releases above.
            return shared | {"rope_parameters": {"rope_theta": self.theta, "rope_type": "default"}}
        ids = {"target_layer_ids": list(self.features), "mask_token_id": mask_token}
        return shared | {"block_size": self.block, "num_target_layers": self.layers, "dflash_config": ids}


class Norm(nn.Module):
    """Root mean square norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the last dimension, in float32."""
        return functional.rms_norm(x.float(), self.weight.shape, self.weight.float(), EPS).to(x.dtype)


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding of x [batch, length, heads, dim] at positions [batch, length]."""
    half = x.shape[-1] // 2
    speeds = theta ** (-torch.arange(half, device=x.device) / half)
    angles = (positions.float()[..., None] * speeds)[:, :, None]
    first, second = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class Attention(nn.Module):
    """Grouped attention with normed queries and keys, over the sequence itself and, for a drafter, over a context."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.q_proj = nn.Linear(sizes.hidden, queries, bias=False)
        self.k_proj = nn.Linear(sizes.hidden, keys, bias=False)
        self.v_proj = nn.Linear(sizes.hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, sizes.hidden, bias=False)
        self.q_norm, self.k_norm = Norm(sizes.head_dim), Norm(sizes.head_dim)

    def keys_and_values(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[batch, heads, length, dim] each."""
        shape = (*x.shape[:2], self.sizes.kv_heads, self.sizes.head_dim)
        keys = rotate(self.k_norm(self.k_proj(x).view(shape)), positions, self.sizes.theta)
        groups = self.sizes.heads // self.sizes.kv_heads
        pair = keys, self.v_proj(x).view(shape)
        keys, values = (part.transpose(1, 2).repeat_interleave(groups, 1) for part in pair)
        return keys, values

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        context: tuple[torch.Tensor, torch.Tensor] | None,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """`context`: hidden states and positions of what lies before; without a mask attention is causal."""
        shape = (*x.shape[:2], self.sizes.heads, self.sizes.head_dim)
        queries = rotate(self.q_norm(self.q_proj(x).view(shape)), positions, self.sizes.theta).transpose(1, 2)
        keys, values = self.keys_and_values(x, positions)
        if context is not None:
            before = self.keys_and_values(*context)
            keys, values = torch.cat([before[0], keys], 2), torch.cat([before[1], values], 2)
        found = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(found.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden, sizes.mlp, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, sizes.mlp, bias=False)
        self.down_proj = nn.Linear(sizes.mlp, sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape with the hidden state last."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A decoder layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(sizes), Mlp(sizes)
        self.input_layernorm, self.post_attention_layernorm = Norm(sizes.hidden), Norm(sizes.hidden)

    def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        """`rest` as of `Attention.forward`."""
        x = x + self.self_attn(self.input_layernorm(x), *rest)
        return x + self.mlp(self.post_attention_layernorm(x))


class Target(nn.Module):
    """Qwen3 with tied embeddings."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed_tokens = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = Norm(sizes.hidden)
        start_small(self)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Final hidden states, and those that a drafter reads beside each other, for tokens [batch, length]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x, features = self.embed_tokens(tokens), []
        for number, layer in enumerate(self.layers):
            x = layer(x, positions, None, None)
            if number in self.sizes.features:
                features.append(x)
        return self.norm(x), torch.cat(features, -1)


class Drafter(nn.Module):
    """DFlash: a block of masks, drafted at once in sight of the target's hidden states before it."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.draft_layers))
        self.norm, self.hidden_norm = Norm(sizes.hidden), Norm(sizes.hidden)
        self.fc = nn.Linear(sizes.hidden * len(sizes.features), sizes.hidden, bias=False)
        start_small(self)

    def forward(
        self,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        features: torch.Tensor,
        before: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Hidden states of the block's tokens, each of which is about the token at its own place.

        Args:
            embedded: Input embeddings of the blocks, [batch, blocks * block, hidden].
            positions: Of each, [batch, blocks * block].
            features: Of the target at the positions `before`, [batch, length, features * hidden].
            before: [batch, length].
            mask: Who sees whom, bool [batch, 1, blocks * block, length + blocks * block].
        """
        context = self.hidden_norm(self.fc(features)), before
        for layer in self.layers:
            embedded = layer(embedded, positions, context, mask)
        return self.norm(embedded)


def start_small(model: nn.Module) -> None:
    """Normal matrices with a deviation of 0.02."""
    for weight in model.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=0.02)
