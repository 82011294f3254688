"""Attention with any kernel, positions and value function."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnlens.attention import attend
from attnlens.attention.primal_heads import PrimalHeads
from attnlens.attention.products import as_exponential
from attnlens.kernels import parsed
from attnlens.records import Call

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    Added = Float[Tensor, "#batch heads queries keys"]
    States = Float[Tensor, "batch tokens d_model"]
    Split = Float[Tensor, "batch heads tokens head_dim"]

Placing = Literal["none", "sum", "table", "product", "symmetric product"]
"""How attention reads positions t beside features f: not at all; k(f + t, f' + t') (Eq. 4); L(t − t', f)·k(f, f') with
a learned table (Eq. 6); k(f, f')·k_f(t, t') with an asymmetric kernel (Eq. 5); or k_F(f, f')·k_T(t, t') with symmetric
ones (Eq. 9)."""
Place = Literal["encoder", "decoder", "cross"]
"""Which attention of a model: the self-attention of its encoder, that of its decoder, or that between them."""
EVERYWHERE: tuple[Place, ...] = ("encoder", "decoder", "cross")


@dataclass(frozen=True)
class AttentionForm:
    """Attention by Definition 1 of Tsai et al.: Σ_j k(x_i, x_j)/Σ k · v(x_j) over the keys that the filter allows."""

    kernel: str = "exponential"
    """As it can be typed: `rbf:gamma=1`; of features, or of features and positions under "sum"."""
    symmetric: bool = False
    """Whether queries and keys are one projection, W_Q = W_K."""
    positions: Placing = "none"
    """How positions enter."""
    places: tuple[Place, ...] = EVERYWHERE
    """Which attentions read positions."""
    in_value: bool = False
    """Whether values hold positions, v(x) = (f + t)W_V (Eq. 7), or not, v(x) = f W_V (Eq. 8)."""
    primal: Literal["none", "last", "all"] = "none"
    """Which layers attend by Primal-Attention (Chen et al. 2023) in the place of a kernel."""
    scores: int = 0
    """s, the scores of each primal head."""
    eta: float = 0.0
    """Weight η of the primal layers' regulariser ΣJ² in the loss."""

    @property
    def shares_projection(self) -> bool:
        """Whether queries and keys are one projection: where asked for, and in Eq. 9, whose kernels are symmetric."""
        return self.symmetric or self.positions == "symmetric product"


FURTHEST = 16
"""The distance from which on a table knows no difference (Shaw et al. 2018)."""
WAVELENGTH = 10_000.0


def sinusoids(places: Float[Tensor, " places"], d_model: int) -> Float[Tensor, "places d_model"]:
    """sin(t/10000^{2p/d}) for p < d/2, then the cosines (Vaswani et al. 2017, halves in the place of pairs)."""
    half = torch.arange((d_model + 1) // 2, device=places.device, dtype=places.dtype)
    angles = places[:, None] * torch.exp(-math.log(WAVELENGTH) * 2 * half / d_model)
    return torch.cat((angles.sin(), angles.cos()), 1)[:, :d_model]


def distances(queries: int, keys: int, device: torch.device) -> Tensor:
    """t_i − t_j of every query and key, (queries, keys)."""
    return torch.arange(queries, device=device)[:, None] - torch.arange(keys, device=device)


class PositionTable(nn.Module):
    """log L(t_i − t_j, f_i) = s⟨f_i W_Q, a_{t_i − t_j}⟩ with a learned vector for each distance (Eq. 6)."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(2 * FURTHEST + 1, d_model // heads) * (d_model // heads) ** -0.5)

    def forward(self, query: Float[Tensor, "batch heads queries head_dim"], keys: int, scale: float) -> Added:
        """Distances beyond FURTHEST are as FURTHEST."""
        index = distances(query.shape[2], keys, query.device).clamp(-FURTHEST, FURTHEST) + FURTHEST
        every = query @ self.vectors.mT * scale
        return every.gather(-1, index.expand(*every.shape[:2], -1, -1))


class AsymmetricProduct(nn.Module):
    """log k_f(t_i, t_j) = s⟨f_i W_Q, r_{t_i − t_j} W_R⟩ with the sinusoids r of a distance (Eq. 5).

    A sum of cos((t_i − t_j)/λ_p) and sin((t_i − t_j)/λ_p) whose coefficients the query's features say, as in
    Transformer-XL, without its two learned offsets.
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.relative = nn.Linear(d_model, d_model, bias=False)

    def forward(self, query: Float[Tensor, "batch heads queries head_dim"], keys: int, scale: float) -> Added:
        """One product a distance, read out by pair."""
        queries = query.shape[2]
        places = torch.arange(1 - keys, queries, device=query.device, dtype=query.dtype)
        projected = self.relative(sinusoids(places, self.relative.in_features))
        every: Tensor = query @ projected.unflatten(1, (self.heads, -1)).permute(1, 2, 0) * scale
        index = distances(queries, keys, query.device) + keys - 1
        return every.gather(-1, index.expand(*every.shape[:2], -1, -1))


class SymmetricProduct(nn.Module):
    """log k_T(t_i, t_j) = s⟨t_i W_T, t_j W_T⟩, the exponential kernel of the sinusoids of both places (Eq. 9)."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.place = nn.Linear(d_model, d_model, bias=False)

    def forward(self, query: Float[Tensor, "batch heads queries head_dim"], keys: int, scale: float) -> Added:
        """The same for every sequence."""
        places = torch.arange(max(query.shape[2], keys), device=query.device, dtype=query.dtype)
        projected: Tensor = self.place(sinusoids(places, self.place.in_features))
        split: Tensor = projected.unflatten(1, (self.heads, -1)).transpose(0, 1)  # type: ignore[no-untyped-call]
        return (split[:, : query.shape[2]] @ split[:, :keys].mT * scale)[None]


OWN = "eager"
"""What transformers calls the implementation under which a module answers itself, by its kernel."""
ADDED = {"table": PositionTable, "product": AsymmetricProduct, "symmetric product": SymmetricProduct}


class KernelAttention(nn.Module):
    """Σ_j k(x_i, x_j)/Σ_j k(x_i, x_j) · v(x_j) W_O over the allowed j (Tsai et al. 2019, Definition 1), of all heads.

    x = (f, t): features and positions; `form` says how they meet. Where a configuration names another implementation of
    attention than its own, as while attnlens watches or replaces it, that one answers: softmax of the kernel's
    logarithm, handed over as products of other queries and keys.
    """

    def __init__(self, config: Any, form: AttentionForm, place: Place, *, primal: bool = False) -> None:
        super().__init__()
        d_model, heads = config.hidden_size, config.num_attention_heads
        self.config, self.form, self.part, self.heads = config, form, place, heads
        self.causal = place == "decoder"
        self.positions = form.positions if place in form.places else "none"
        self.kernel = parsed(form.kernel)
        self.query = _projection(d_model)
        self.key = None if form.shares_projection else _projection(d_model)
        self.primal = PrimalHeads(heads, d_model // heads, form.scores) if primal else None
        self.value = None if primal else _projection(d_model)
        self.output = _projection(d_model)
        added = ADDED.get(self.positions)
        self.added = None if added is None else added(d_model, heads)
        if isinstance(self.added, (AsymmetricProduct, SymmetricProduct)):
            nn.init.xavier_uniform_(next(self.added.parameters()))

    def forward(
        self, features: States, key_value_states: States | None = None, kept: Bool[Tensor, "batch keys"] | None = None
    ) -> States:
        """What `features` read of `key_value_states` (None: of themselves); `kept` says which keys are no padding."""
        read = features if key_value_states is None else key_value_states
        query, key, value = features, read, read
        if self.positions == "sum":  # Eq. 4
            query, key = features + _places(features), read + _places(read)
        if self.form.in_value and self.positions != "none":  # Eq. 7
            value = read + _places(read)
        queries, keys = self._split(self.query(query)), self._split((self.key or self.query)(key))
        if self.primal is not None:
            found = self.primal(queries, keys, causal=self.causal, kept=None if kept is None else kept[:, None])
        else:
            assert self.value is not None  # noqa: S101
            found = self._attended(
                queries, keys, self._split(self.value(value)), kept, cross=key_value_states is not None
            )
        output: Tensor = self.output(found.transpose(1, 2).flatten(2))
        return output

    @property
    def kernel_parameters(self) -> int:
        """How many numbers its kernel has: projections of queries, keys and positions, without values and output."""
        parts = [part for part in (self.query, self.key, self.added) if part is not None]
        return sum(one.numel() for part in parts for one in part.parameters())

    def _attended(self, query: Split, key: Split, value: Split, kept: Tensor | None, *, cross: bool) -> Split:
        scale = query.shape[-1] ** -0.5
        bias = None if self.added is None else self.added(query, key.shape[2], scale)
        allowed = self._allowed(query, key, kept)
        named = self.config._attn_implementation
        if named not in (OWN, None):
            query, key, scale = as_exponential(query, key, scale, self.kernel)
            own = named == "sdpa" and self.causal and allowed is None  # torch is fastest where it makes the mask
            more = {"scaling": scale, "position_bias": bias, "is_causal": own}
            if self.causal and allowed is None and not own:
                allowed = (distances(query.shape[2], key.shape[2], query.device) >= 0)[None, None]
            answered: Tensor = ALL_ATTENTION_FUNCTIONS[named](self, query, key, value, allowed, **more)[0]
            return answered.transpose(1, 2)
        call = Call(
            *(query, key, value, scale),
            allowed=allowed,
            causal=self.causal and allowed is None,
            bias=bias,
            cross=cross,
            module=self,
        )
        return attend(call, self.kernel).transpose(1, 2)

    def _allowed(self, query: Split, key: Split, kept: Tensor | None) -> Tensor | None:
        """The filter: keys that are no padding, and under causality none that come later; None: as `causal` says."""
        if kept is None:
            return None
        seen = kept[:, None, None, :].expand(-1, 1, query.shape[2], -1)
        return seen.tril() if self.causal else seen

    def _split(self, projected: States) -> Split:
        split: Tensor = projected.unflatten(2, (self.heads, -1))  # type: ignore[no-untyped-call]
        return split.transpose(1, 2)


def _projection(d_model: int) -> nn.Linear:
    found = nn.Linear(d_model, d_model, bias=False)
    nn.init.xavier_uniform_(found.weight)
    return found


def _places(features: States) -> Float[Tensor, "tokens d_model"]:
    """t of each token, as large as the features that a layer norm leaves."""
    places = torch.arange(features.shape[1], device=features.device, dtype=features.dtype)
    return sinusoids(places, features.shape[2])
