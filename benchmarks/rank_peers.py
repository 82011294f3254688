"""Published methods that cache fewer numbers of each key, each implemented from its paper in a few lines.

All of them are linear maps of keys, k̂ = k B Aᵀ (plus the bias). Each is therefore represented by `Latents`, and
measured like ours. In a truncated SVD of a matrix of keys, K ≈ K V_r V_rᵀ, V are the leading eigenvectors of KᵀK.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnlens.kernels.lowrank import Latents, Turn, directions, token_positions
from attnlens.lab.ranks.bases import Basis
from attnlens.models import hooks, texts, weights
from attnlens.models.loading import Loaded
from attnlens.models.texts.targets import Fed
from attnlens.models.weights.probe import Maps
from attnlens.records import Call, Site
from attnlens.runs.swap.fit import find_turns

Sides = tuple[Tensor, Tensor]
"""A and B, each (latents, size, size), the leading directions first."""


@dataclass
class Moments:
    """Σ q qᵀ of each key head's query heads, (kv_heads, d, d), and Σ k kᵀ of the stacked keys, (kv_heads·d, …)."""

    queries: Tensor
    keys: Tensor

    def blocks(self) -> Tensor:
        """Return Σ k kᵀ of each key head."""
        size = self.queries.shape[-1]
        return torch.stack(
            [self.keys[at : at + size, at : at + size] for at in range(0, len(self.queries) * size, size)]
        )

    def add(self, query: Tensor, key: Tensor, kv_heads: int) -> None:
        """Add queries and keys of shape (batch, heads, tokens, d)."""
        products = (query.mT @ query).sum(0)
        self.queries += products.unflatten(0, (kv_heads, -1)).sum(1)
        stacked = key.transpose(1, 2).flatten(2).flatten(0, 1)
        self.keys += stacked.T @ stacked


@dataclass
class Read:
    """The inputs of the peers at one site."""

    maps: Maps
    """W_Q and W_K without rotation."""
    turn: Turn | None
    """The rotation of keys, if any."""
    before: Moments = field(init=False)
    """Moments of queries and keys before the rotation, without biases."""
    after: Moments = field(init=False)
    """Moments of rotated queries and keys."""
    weights: Moments = field(init=False)
    """Moments of the columns of W_Q and W_K, independent of texts."""

    def __post_init__(self) -> None:
        kv_heads, _, size = self.maps.key.shape
        nothing = torch.zeros(kv_heads, size, size).double(), torch.zeros(kv_heads * size, kv_heads * size).double()
        self.before, self.after, self.weights = (Moments(*(part.clone() for part in nothing)) for _ in range(3))
        self.weights.add(self.maps.query[None].double(), self.maps.key[None].double(), kv_heads)

    def update(self, call: Call) -> None:
        """Add a batch."""
        query, key, kv_heads = call.query.double(), call.key.double(), len(self.maps.key)
        self.after.add(query, key, kv_heads)
        if self.turn is not None:
            positions = token_positions(call)
            query, key = (self.turn.rotate(x, at, back=True) for x, at in zip((query, key), positions, strict=True))
        self.before.add(query - self.maps.query_bias, key - self.maps.key_bias, kv_heads)


def find_principal(gram: Tensor) -> Sides:
    """Return V twice, the eigenvectors of KᵀK: K̂ = K V_r V_rᵀ has the least ‖K − K̂‖ (Eckart & Young 1936)."""
    vectors = torch.linalg.eigh(gram).eigenvectors.flip(-1)
    return vectors, vectors


def decompose_keys(read: Read) -> Sides:
    """Truncate the SVD of each head's W_K."""
    return find_principal(read.weights.blocks())


def decompose_all_keys(read: Read) -> Sides:
    """Truncate the SVD of the whole W_K, of all key heads."""
    return find_principal(read.weights.keys[None])


def decompose_product(read: Read) -> Sides:
    """Truncate the SVD of W_Q W_Kᵀ without rotation; the W_Q of all query heads of a key head are stacked."""
    return directions(read.weights.queries, read.weights.blocks())


def fit_palu_heads(read: Read) -> Sides:
    """Fit Palu, M-LRD (Chang et al. 2024, section 3): truncated SVD of S W_K, SᵀS = XᵀX; keys before the rotation.

    ‖S(W_K − Ŵ)‖ = ‖X(W_K − Ŵ)‖ = ‖K − K̂‖: the principal directions of the keys.
    """
    return find_principal(read.before.blocks())


def fit_palu_jointly(read: Read) -> Sides:
    """Fit Palu, J-LRD: as M-LRD, for all key heads together (G-LRD with one group)."""
    return find_principal(read.before.keys[None])


def fit_kq_svd(read: Read) -> Sides:
    """Fit KQ-SVD (Lesens et al. 2025): the best logits QKᵀ of rank r of rotated, uncentred queries and keys."""
    return directions(read.after.queries, read.after.blocks())


def fit_eigen_attention(read: Read) -> Sides:
    """Fit Eigen Attention (Saxena et al. 2024): SVD of stacked keys and queries, before RoPE (their Figure 6)."""
    return find_principal(read.before.blocks() + read.before.queries)


@dataclass(frozen=True)
class Peer:
    """One method, and which keys it compresses."""

    sides: Callable[[Read], Sides]
    """A and B of a site."""
    before: bool = True
    """True for keys before their rotation, if any."""


PEERS = {
    "SVD of W_K, per head": Peer(decompose_keys),
    "SVD of W_K, all heads": Peer(decompose_all_keys),
    "SVD of W_Q W_Kᵀ": Peer(decompose_product),
    "Palu M-LRD": Peer(fit_palu_heads),
    "Palu J-LRD": Peer(fit_palu_jointly),
    "KQ-SVD": Peer(fit_kq_svd, before=False),
    "Eigen Attention": Peer(fit_eigen_attention),
}


def read_sites(loaded: Loaded, sites: Sequence[Site], fed: Sequence[Fed]) -> dict[Site, Read]:
    """Collect the inputs of the peers in one pass of the unchanged model."""
    first, window = (
        list(hooks.survey(loaded.model, texts.placeholder(loaded, length, 0).batches[0].inputs)) for length in (1, 2)
    )
    rotations = find_turns(loaded, list(sites))
    rotated: Mapping[Site, Turn | None] = {
        site: None if isinstance(turn, str) else turn for site, turn in rotations.items()
    }
    site_factors = weights.factors(loaded.model, first, window)
    reads = {}
    for site, factors in zip(sites, site_factors, strict=True):
        assert isinstance(factors, weights.Factors)
        reads[site] = Read(factors.maps, rotated[site])

    def visit(site: Site, call: Call) -> None:
        reads[site].update(call)

    with torch.no_grad(), hooks.watch(loaded.model, tuple(sites), visit):
        for batch in fed:
            hooks.forward(loaded.model, batch.inputs)
    return reads


def build_basis(peer: Peer, read: Read) -> Basis:
    """Build the peer's directions as the basis of a search."""
    heads, kv_heads = len(read.maps.query), len(read.maps.key)
    query_map, key_map = peer.sides(read)
    groups = (tuple(range(kv_heads)),) if len(query_map) == 1 else tuple((head,) for head in range(kv_heads))
    key_of = tuple(head * kv_heads // heads for head in range(heads))
    turn = read.turn if peer.before else None
    mean = None if turn is None else read.maps.key_bias[:, 0].double()
    latents = Latents(groups, key_of, query_map, key_map, mean, turn)
    return Basis(tuple(range(heads)), tuple(range(kv_heads)), latents)
