"""QueryKeys built from plain tensors, and the dense matrices that they represent."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlens.choices import Part
from attnlens.records import QueryKey, Rotation, Site, Source


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-10) -> None:
    """Check that both are equal within this tolerance, relative and absolute."""
    torch.testing.assert_close(ours, theirs.to(ours), rtol=tolerance, atol=tolerance)


def query_key(
    query: Tensor, key: Tensor, source: Source = "weights", part: Part = "encoder", scale: float = 0.3, **rest: object
) -> QueryKey:
    """Build a QueryKey; groups of query heads share key heads, as in GQA."""
    heads, kv_heads = query.shape[-3], key.shape[-3]
    rest.setdefault("key_of", tuple(head * kv_heads // heads for head in range(heads)))
    return QueryKey(query, key, scale, source, Site("attention", 0, 0, part), tuple(range(heads)), **rest)


def rotary(positions: int, head_dim: int, rotated: int | None = None) -> Rotation:
    """Build RoPE in the half-split layout on the first `rotated` dimensions."""
    half = (head_dim if rotated is None else rotated) // 2
    pairs = torch.stack((torch.arange(half), torch.arange(half, 2 * half)), -1)
    angles = torch.arange(positions).double()[:, None] * 50.0 ** (-torch.arange(half).double() / half)
    return Rotation(pairs, angles, head_dim)


def turns(rotation: Rotation) -> Tensor:
    """Form its matrices: row vector x → x R(i)."""
    matrices = torch.eye(rotation.size, dtype=torch.float64).repeat(len(rotation.angles), 1, 1)
    for (first, second), angles in zip(rotation.pairs.tolist(), rotation.angles.T, strict=True):
        matrices[:, first, first] = matrices[:, second, second] = angles.cos()
        matrices[:, first, second] = angles.sin()
        matrices[:, second, first] = -angles.sin()
    return matrices


def dense(heads: QueryKey) -> Tensor:
    """Form M of every head."""
    key = heads.key.double()[..., list(heads.key_of), :, :]
    return heads.scale * heads.query.double() @ key.mT


def at_distance(heads: QueryKey, distance: int) -> Tensor:
    """Form M(Δ) = W_Q R(−Δ) W_Kᵀ of every head."""
    assert heads.rotation is not None
    turn = turns(heads.rotation)[abs(distance)]
    key = heads.key.double()[..., list(heads.key_of), :, :]
    return heads.scale * heads.query.double() @ (turn.mT if distance > 0 else turn) @ key.mT


def stacked(heads: QueryKey) -> Tensor:
    """Form the joint kernel on (content, position) of every head, divided by the number of positions."""
    assert heads.rotation is not None
    key = heads.key.double()[..., list(heads.key_of), :, :]
    queries = torch.cat([heads.query.double() @ turn for turn in turns(heads.rotation)], -2)
    keys = torch.cat([key @ turn for turn in turns(heads.rotation)], -2)
    return heads.scale * queries @ keys.mT / len(heads.rotation.angles)
