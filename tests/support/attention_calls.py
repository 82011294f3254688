"""Calls of attention on random tensors: masks, biases, grouped heads, caches."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnlens.records import Call

HEADS, DIM = 4, 8


def call(
    queries: int = 150,
    keys: int | None = None,
    *,
    batch: int = 2,
    kv_heads: int = HEADS,
    value_dim: int = DIM,
    dtype: torch.dtype = torch.float64,
    **more: Any,
) -> Call:
    """Random tensors whose scores have a standard deviation of about 3, so that attention is far from uniform."""
    draw = torch.Generator().manual_seed(queries + 7 * (keys or 0) + 31 * value_dim)

    def tensor(heads: int, tokens: int, dim: int) -> Tensor:
        return torch.randn(batch, heads, tokens, dim, generator=draw, dtype=torch.float64)

    keys = queries if keys is None else keys
    q, k, v = tensor(HEADS, queries, DIM), tensor(kv_heads, keys, DIM), tensor(kv_heads, keys, value_dim)
    return Call((1.7 * q).to(dtype), (1.7 * k).to(dtype), v.to(dtype), DIM**-0.5, **more)


def tril(queries: int, keys: int) -> Tensor:
    """A chunk at the end of a cache: the last query sees all."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)[None, None]


def left_padded(tokens: int) -> Tensor:
    mask = tril(tokens, tokens).repeat(2, 1, 1, 1)
    mask[1, ..., :70] = False
    return mask


def right_padded(tokens: int) -> Tensor:
    mask = torch.ones(2, 1, tokens, tokens, dtype=torch.bool)
    mask[1, ..., 90:] = False
    return mask


def sliding(tokens: int) -> Tensor:
    return tril(tokens, tokens) & torch.ones(tokens, tokens, dtype=torch.bool).triu(-20)


def bias(tokens: int) -> Tensor:
    place = torch.arange(tokens, dtype=torch.float64)
    return (-(place[:, None] - place).abs() / 5 * torch.linspace(0, 1, HEADS).double()[:, None, None])[None]


CASES: dict[str, Callable[..., Call]] = {
    "all": lambda **more: call(**more),
    "causal": lambda **more: call(causal=True, **more),
    "left padding, causal": lambda **more: call(allowed=left_padded(150), **more),
    "right padding": lambda **more: call(allowed=right_padded(150), **more),
    "sliding window": lambda **more: call(allowed=sliding(150), **more),
    "bias": lambda **more: call(bias=bias(150), causal=True, **more),
    "grouped heads": lambda **more: call(kv_heads=2, causal=True, **more),
    "wider values": lambda **more: call(value_dim=20, causal=True, **more),
    "narrower values": lambda **more: call(value_dim=3, causal=True, **more),
    "cross": lambda **more: call(30, 150, cross=True, **more),
    "cross, more queries": lambda **more: call(150, 30, cross=True, **more),
    "decoding": lambda **more: call(1, 150, **more),
    "chunk of a cache": lambda **more: call(40, 150, allowed=tril(40, 150), **more),
    "empty static cache": lambda **more: call(40, 150, causal=True, **more),
}


def apart(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖ over the rows that see something; those that don't must be finite."""
    assert bool(torch.isfinite(found).all())
    seen = torch.isfinite(expected)
    return float((found.double() - expected)[seen].norm() / expected[seen].norm())
