# SPDX-License-Identifier: Apache-2.0
"""Where the numbers of a small model lie in a large one that computes the same.

A padded target and its DFlash drafter have layers, widths, heads and a vocabulary of a large model and the behaviour of
the small ones: what is added is zero, or is multiplied by zero. Every factor is a power of two, or is folded into norm
weights, so that in bfloat16 nothing is rounded again:

* An RMSNorm divides by the padded width. Scaled copies of the hidden state in the spare dimensions bring its mean
  square to a power of four of the real one; the copies are multiplied by norm weights of zero and read by nobody.
* The heads' dimensions are spread, so that rotary embeddings turn each pair by its real frequency. Keys get copies for
  their norm as above; queries get none, which makes up for the attention's scale of head_dim ** -0.5.
* Query heads keep their key and value head: the groups become larger, at their ends.
* The logit of a padded token must lose against any real one. One spare hidden dimension holds a small constant from
  the embedding on, which only the rows of padded tokens in the head read, with a large negative weight.
* An added layer adds zero to the hidden state; the layers whose states the drafter reads keep their numbers.

float16 has no room for that large negative logit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Shape:
    """What decides the cost of a model."""

    layers: int
    draft_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int


#: Shapes of Qwen3 models by their names; published DFlash drafters for them have five layers.
LIKE = {
    "8b": Shape(36, 5, 4096, 32, 8, 128, 12288, 151936),
    "4b": Shape(36, 5, 2560, 32, 8, 128, 9728, 151936),
    "1b": Shape(28, 5, 2048, 16, 8, 128, 6144, 151936),
}


@dataclass(frozen=True)
class Entry:
    """A tensor of the padded checkpoint: zero but for `writes`, (rows or entries, columns or None, values)."""

    name: str
    shape: tuple[int, ...]
    writes: tuple[tuple[Any, Any, torch.Tensor], ...] = ()

    def fill(self, view: torch.Tensor) -> None:
        """Write the values into a view of zeros."""
        for rows, columns, values in self.writes:
            if columns is None:
                view[rows] = values.to(view.dtype)
            elif isinstance(rows, torch.Tensor) and isinstance(columns, torch.Tensor):
                view[rows.unsqueeze(1), columns] = values.to(view.dtype)
            else:
                view[rows, columns] = values.to(view.dtype)


def copies(real: int, padded: int, spare: int) -> tuple[list[tuple[int, float]], float]:
    """Copies of `real` values in `padded` places that make up for a norm over all of them.

    The mean square over the padded places has to be a power of four of that over the real ones; copies of scale 2 ** -j
    are the digits of the number that is wanted, to the base of four.

    Args:
        real: How many values there are.
        padded: How many places.
        spare: Places that have to stay free.

    Returns:
        Start and scale of each copy, the values themselves first, and the factor for norm weights.
    """
    room = (padded - spare) // real
    best: tuple[float, list[float]] | None = None
    wanted = padded / real
    while wanted >= 1:
        scales, left = [], wanted
        for digit in range(8):
            count = min(int(left * 4**digit + 1e-9), room - len(scales))
            scales += [2.0**-digit] * count
            left -= count * 4.0**-digit
        if best is None or left / wanted < best[0] - 1e-12:
            best = left / wanted, scales
        wanted /= 4
    if best is None:
        raise ValueError(f"{real} values do not fit into {padded} places")
    scales = best[1]
    factor = math.sqrt(sum(scale**2 for scale in scales) * real / padded)
    return [(number * real, scale) for number, scale in enumerate(scales)], factor


class Padding:
    """The places of one small model's dimensions in a larger `shape`.

    Args:
        config: Of the target or the drafter; both have the same widths.
        shape: The shape to take.

    Raises:
        ValueError: The small model does not fit, or is not of a kind that this knows.
    """

    def __init__(self, config: dict[str, Any], shape: Shape) -> None:
        self.shape = shape
        self.hidden, self.mlp = config["hidden_size"], config["intermediate_size"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config["head_dim"]
        self._check(config)
        self.places, self.factor = copies(self.hidden, shape.hidden, spare=1)
        self.ratio = shape.head_dim // self.head_dim
        self.eps = config["rms_norm_eps"] * self.factor**2
        group, padded_group = self.heads // self.kv_heads, shape.heads // shape.kv_heads
        self.query_heads = [head // group * padded_group + head % group for head in range(self.heads)]

    def _check(self, config: dict[str, Any]) -> None:
        shape = self.shape
        if config.get("attention_bias"):
            raise ValueError("attention biases are not padded: only Qwen3's layers are known here")
        if shape.head_dim % self.head_dim:
            raise ValueError(f"head_dim {shape.head_dim} is no multiple of {self.head_dim}: rotary angles would differ")
        real, padded = self.heads // self.kv_heads, shape.heads // shape.kv_heads
        if padded < real or shape.kv_heads < self.kv_heads:
            raise ValueError(
                f"{self.heads} heads in groups of {real} do not fit into {shape.heads} in groups of {padded}"
            )
        if shape.mlp < self.mlp or shape.hidden <= self.hidden:
            raise ValueError(f"{self.hidden} x {self.mlp} does not fit into {shape.hidden} x {shape.mlp}")

    def head_places(self, heads: list[int], copy: int | None) -> torch.Tensor:
        """The places of the heads' dimensions among those of all padded heads; None: at the front, without rotation."""
        half = self.head_dim // 2
        if copy is None:
            dims = list(range(self.head_dim))
        else:
            pairs = [self.ratio * pair + copy for pair in range(half)]
            dims = pairs + [self.shape.head_dim // 2 + place for place in pairs]
        return torch.tensor([head * self.shape.head_dim + dim for head in heads for dim in dims])

    def residual(self, weight: torch.Tensor, columns: Any) -> tuple[tuple[Any, Any, torch.Tensor], ...]:
        """Writes of a matrix whose rows are the hidden state: once for every copy."""
        return tuple(
            (slice(start, start + self.hidden), columns, weight.float() * scale) for start, scale in self.places
        )

    def norm(self, name: str, weight: torch.Tensor, spare: float = 0.0) -> Entry:
        """A norm over the hidden state; `spare`: the weight of the last dimension."""
        values = weight.float() * self.factor
        writes = [(slice(0, self.hidden), None, values)]
        if spare:
            writes.append((slice(-1, None), None, torch.tensor([spare])))
        return Entry(name, (self.shape.hidden,), tuple(writes))

    def layer(self, prefix: str, weights: dict[str, torch.Tensor] | None) -> Iterator[Entry]:
        """The tensors of a decoder layer; `weights` by their names in it, None for an added layer."""
        shape, front = self.shape, slice(0, self.hidden)
        kv_heads = list(range(self.kv_heads))
        queries, outputs = shape.heads * shape.head_dim, self.head_places(self.query_heads, None)
        keys = shape.kv_heads * shape.head_dim
        given = weights or {}

        def matrix(name: str, size: tuple[int, int], *places: tuple[Any, Any]) -> Entry:
            values = given.get(name)
            writes = () if values is None else tuple((rows, columns, values) for rows, columns in places)
            return Entry(prefix + name, size, writes)

        yield matrix("self_attn.q_proj.weight", (queries, shape.hidden), (self.head_places(self.query_heads, 0), front))
        places = [(self.head_places(kv_heads, copy), front) for copy in range(self.ratio)]
        yield matrix("self_attn.k_proj.weight", (keys, shape.hidden), *places)
        yield matrix("self_attn.v_proj.weight", (keys, shape.hidden), (self.head_places(kv_heads, None), front))
        out = given.get("self_attn.o_proj.weight")
        yield Entry(
            prefix + "self_attn.o_proj.weight",
            (shape.hidden, queries),
            () if out is None else self.residual(out, outputs),
        )
        for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
            writes = () if not given else ((self.head_places([0], 0), None, given[name]),)
            yield Entry(prefix + name, (shape.head_dim,), writes)
        rows = slice(0, self.mlp)
        yield matrix("mlp.gate_proj.weight", (shape.mlp, shape.hidden), (rows, front))
        yield matrix("mlp.up_proj.weight", (shape.mlp, shape.hidden), (rows, front))
        down = given.get("mlp.down_proj.weight")
        yield Entry(
            prefix + "mlp.down_proj.weight",
            (shape.hidden, shape.mlp),
            () if down is None else self.residual(down, rows),
        )
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            yield self.norm(prefix + name, given[name]) if given else Entry(prefix + name, (shape.hidden,))

    def layers(self, prefix: str, weights: dict[str, torch.Tensor], real: int, padded: int) -> Iterator[Entry]:
        """All layers: the real ones first."""
        for number in range(padded):
            start = f"{prefix}layers.{number}."
            own = {name.removeprefix(start): weight for name, weight in weights.items() if name.startswith(start)}
            yield from self.layer(start, own if number < real else None)


#: The weight of the last dimension in the final norms, and how far below the real tokens' logits the padded ones' are
#: when the hidden state has a root mean square of 1.
MARK_WEIGHT, DEPTH = 2.0**10, 2.0**20


def pad_target(config: dict[str, Any], weights: dict[str, torch.Tensor], shape: Shape) -> tuple[dict, list[Entry]]:
    """Config and tensors of the padded target.

    Raises:
        ValueError: As of `Padding`, or the vocabulary is larger than the shape's.
    """
    padding, vocabulary = Padding(config, shape), config["vocab_size"]
    if shape.vocabulary < vocabulary:
        raise ValueError(f"a vocabulary of {vocabulary} does not fit into {shape.vocabulary}")
    embedding = weights["model.embed_tokens.weight"]
    tied = config["tie_word_embeddings"] and shape.vocabulary == vocabulary
    writes = [
        (slice(0, vocabulary), slice(start, start + padding.hidden), embedding.float() * scale)
        for start, scale in padding.places
    ]
    head = embedding if config["tie_word_embeddings"] else weights["lm_head.weight"]
    spare = 0.0
    head_writes = [(slice(0, vocabulary), slice(0, padding.hidden), head)]
    if shape.vocabulary > vocabulary:
        spare = MARK_WEIGHT
        mark = mark_of(embedding)
        writes.append((slice(0, vocabulary), slice(-1, None), torch.full((vocabulary, 1), mark)))
        value = torch.full((shape.vocabulary - vocabulary, 1), -DEPTH / MARK_WEIGHT / mark)
        head_writes.append((slice(vocabulary, None), slice(-1, None), value))
    size = (shape.vocabulary, shape.hidden)
    entries = [
        Entry("model.embed_tokens.weight", size, tuple(writes)),
        *padding.layers("model.", weights, config["num_hidden_layers"], shape.layers),
        padding.norm("model.norm.weight", weights["model.norm.weight"], spare),
        *([] if tied else [Entry("lm_head.weight", size, tuple(head_writes))]),
    ]
    return padded_config(config, padding, shape.layers) | {"tie_word_embeddings": tied}, entries


def mark_of(embedding: torch.Tensor) -> float:
    """The constant in the spare dimension: a power of two that no norm notices beside the smallest embedding."""
    smallest = float(embedding.float().norm(dim=1).clamp(min=2.0**-10).min())
    return 2.0 ** (math.floor(math.log2(smallest)) - 8)


def pad_draft(config: dict[str, Any], weights: dict[str, torch.Tensor], shape: Shape) -> tuple[dict, list[Entry]]:
    """Config and tensors of the padded drafter."""
    padding, hidden = Padding(config, shape), config["hidden_size"]
    features = weights["fc.weight"].shape[1] // hidden
    reads = torch.cat([torch.arange(hidden) + at * shape.hidden for at in range(features)])
    # Its final norm feeds the target's head: padded tokens have to lose there as well.
    spare = MARK_WEIGHT if shape.vocabulary > config["vocab_size"] else 0.0
    entries = [
        *padding.layers("", weights, config["num_hidden_layers"], shape.draft_layers),
        padding.norm("norm.weight", weights["norm.weight"], spare),
        padding.norm("hidden_norm.weight", weights["hidden_norm.weight"]),
        Entry("fc.weight", (shape.hidden, features * shape.hidden), padding.residual(weights["fc.weight"], reads)),
    ]
    return padded_config(config, padding, shape.draft_layers) | {"num_target_layers": shape.layers}, entries


def padded_config(config: dict[str, Any], padding: Padding, layers: int) -> dict[str, Any]:
    """The small model's config with the sizes of the large one."""
    shape = padding.shape
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "rms_norm_eps": padding.eps,
        "max_window_layers": layers,
    }
    if "layer_types" in config:
        sizes["layer_types"] = ["full_attention"] * layers
    return config | sizes
