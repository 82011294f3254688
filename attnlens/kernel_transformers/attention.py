"""Attention of any kernel, with positions, as a module that is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnlens.attention import attend
from attnlens.attention.primal_heads import PrimalHeads
from attnlens.attention.products import as_exponential
from attnlens.kernel_transformers.forms import AttentionForm, Place
from attnlens.kernel_transformers.positions import (
    AsymmetricProduct,
    PositionTable,
    SymmetricProduct,
    distances,
    sinusoids,
)
from attnlens.kernels import parsed
from attnlens.records import Call

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    States = Float[Tensor, "batch tokens d_model"]
    Split = Float[Tensor, "batch heads tokens head_dim"]

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
