"""The query and key maps of a site: its factors, found among the rows of weights or as products of two matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from attnlens.models.trace import remove_hooks
from attnlens.models.weights.probe import Probe
from attnlens.records import QueryKey, Rotation, Site

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


@dataclass(frozen=True)
class LatentMap:
    """W_h = D U_h, the form in which latent attention computes its keys."""

    up: Float[Tensor, "heads rank head_dim"]  # U_h; NaN in coordinates that are computed in another way
    down: Float[Tensor, "d_model rank"]  # D, shared by all heads


@dataclass(frozen=True)
class Maps:
    """The maps q = x W_Q + b_Q and k = y W_K + b_K, before any rotation, in float64."""

    query: Float[Tensor, "heads d_model head_dim"]
    key: Float[Tensor, "kv_heads d_other head_dim"]
    query_bias: Float[Tensor, "heads queries head_dim"]
    """One bias for all positions, or one per position if the module adds positions to its inputs (DETR)."""
    key_bias: Float[Tensor, "kv_heads keys head_dim"]
    key_latent: LatentMap | None = field(default=None, kw_only=True)  # W_K as a product, if it was found as one

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries (batch, heads, tokens, head_dim) and keys (batch, kv_heads, tokens, head_dim) of x and y."""
        vectors = []
        for inputs, factor, bias in ((x, self.query, self.query_bias), (y, self.key, self.key_bias)):
            tokens = inputs.double().flatten(1, -2)
            products = nn.functional.linear(tokens, factor.mT.flatten(0, 1))  # rows of weights in their memory order
            by_head = products.reshape(*tokens.shape[:-1], len(factor), -1).transpose(1, 2)
            vectors.append(by_head + bias[:, : tokens.shape[1]])
        return vectors[0], vectors[1]


@dataclass(frozen=True)
class Traits:
    """Properties of a site's weights that reports need, without the weights themselves."""

    rotary: bool  # whether queries and keys are rotated by their position
    qk_norm: bool  # whether they are normalised per token
    latent: bool  # whether one part of the keys is normalised and the other is not
    biased: bool  # whether a bias, which the form omits, is added to queries or keys


@dataclass(frozen=True)
class Factors:
    """The effective query and key maps of one site: q_i = (x W_Q + b_Q) R(i), under QK-norm up to a positive scalar.

    Latent attention (MLA, DeepSeek V2) has two such scalars: with c = y W_DKV and rms its root mean square, a head's
    score is a(x) · [x M_n yᵀ / rms(c) + x M_r(j − i) yᵀ], M_n = s W_DQ g_Q W_UQ W_UKᵀ g_K W_DKVᵀ of the part without
    positions (nope) and M_r(Δ) = s W_DQ g_Q W_QR R(−Δ) W_KRᵀ of the rotated part (rope). a(x) is one factor for all
    scores of a query and drops out; rms(c) weights one part against the other, key by key: the sum is not one bilinear
    form, but each part is, up to positive factors. weights.* are those of M_n; `parts` has both.
    """

    site: Site
    maps: Maps  # W_Q, W_K and the biases
    scale: float  # factor of the product of queries and keys
    rotation: Rotation | None  # R(i), or None if queries and keys are not rotated by their position
    groups: tuple[Int[Tensor, " some"], ...] = ()
    """Groups of a head's coordinates, each normalised per token by one scalar; W_Q and W_K contain only the gains. All
    coordinates under QK-norm; the nope part and the other part under latent attention; none without normalisation."""

    @property
    def qk_norm(self) -> bool:
        """True if queries and keys are normalised per token."""
        return bool(self.groups)

    @property
    def latent(self) -> bool:
        """True if one part of the keys is normalised and the other is not, so that the parts are separate forms."""
        return len(self.groups) > 1

    @property
    def traits(self) -> Traits:
        """The properties of the factors that are kept without their numbers."""
        biased = bool(self.maps.query_bias.any() or self.maps.key_bias.any())
        return Traits(self.rotation is not None, self.qk_norm, self.latent, biased)

    @property
    def route(self) -> str:
        """How the factors were read, in words."""
        kind = ", nope part of latent attention" if self.latent else ", QK-norm gains" * self.qk_norm
        return "jacobian" + kind + ", rotation" * (self.rotation is not None and not self.latent)

    @property
    def query_key(self) -> QueryKey:
        """The bilinear form M = s · W_Q W_Kᵀ of every head; biases stay out (x W_Q b_K is invisible to softmax)."""
        return self.parts[0]

    @property
    def parts(self) -> tuple[QueryKey, ...]:
        """The bilinear form; for latent attention the form of the nope part and that of the rope part."""
        query, key, heads = self.maps.query, self.maps.key, tuple(range(len(self.maps.query)))
        key_of = tuple(head * len(key) // len(query) for head in heads)
        whole = QueryKey(query, key, self.scale, "weights", self.site, heads, key_of, rotation=self.rotation)
        if not self.latent:
            return (whole,)
        return tuple(
            replace(
                whole,
                query=_coordinates(query, coordinates),
                key=_coordinates(key, coordinates),
                rotation=None if self.rotation is None else self.rotation.of_coordinates(coordinates),
            )
            for coordinates in self.groups
        )

    @property
    def summed(self) -> QueryKey:
        """A form whose M is the sum over heads of `query_key`, as one head (Σ_h W_Q,h U_hᵀ) Dᵀ, if W_K,h = D U_h."""
        form, product = self.query_key, self.maps.key_latent
        if product is None or form.rotation is not None:
            return form
        up = product.up if not self.latent else _coordinates(product.up, self.groups[0])
        if not bool(up.isfinite().all()):
            return form
        query = torch.zeros_like(product.down)
        for head, key_head in enumerate(form.key_of):
            query.addmm_(form.query[head], up[key_head].mT)
        return replace(form, query=query[None], key=product.down[None], heads=(0,), key_of=(0,))

    @property
    def on_inputs(self) -> QueryKey | None:
        """M on (x, 1), biases as last row of the factors; None if the logits are not bilinear in one input x."""
        positional = self.rotation is not None or self.maps.query_bias.shape[1] > 1
        if positional or self.qk_norm or self.site.part == "cross":
            return None
        sides = ((self.maps.query, self.maps.query_bias), (self.maps.key, self.maps.key_bias))
        query, key = (torch.cat(side, 1) for side in sides)
        return replace(self.query_key, query=query, key=key)

    def rebuild(self, x: Tensor, y: Tensor, originals: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute queries and keys of these inputs; under QK-norm with the lengths of the originals, which W lacks."""
        rebuilt = []
        for part, original in zip(self.maps(x, y), originals, strict=True):
            turned = part.clone() if self.rotation is None else self.rotation.rotate(part)
            for group in self.groups:
                lengths = original[..., group].double().norm(dim=-1, keepdim=True)
                turned[..., group] = unit(turned[..., group]) * lengths
            rebuilt.append(turned)
        return rebuilt[0], rebuilt[1]


def unit(rows: Tensor) -> Tensor:
    """Scale each row to length 1."""
    return nn.functional.normalize(rows, dim=-1)


def _coordinates(factor: Tensor, chosen: Int[Tensor, " some"]) -> Tensor:
    """Return some coordinates of each head; consecutive ones as a view, which needs no memory."""
    first, count = int(chosen[0]), len(chosen)
    if torch.equal(chosen, torch.arange(first, first + count, device=chosen.device)):
        return factor[..., first : first + count]
    return factor[..., chosen]


DRAWS = 8
"""Random inputs; a coordinate that is not a multiple of a row passes as one with probability about SAME ** DRAWS."""
SAME = 1e-10
"""Largest relative difference between a coordinate and the row it is matched with, both in float64: far above the
rounding of a sum over d_model, and far below the difference of two unrelated rows."""
ONE = 1e-13  # relative rounding of a coordinate's factor: a factor this close to 1 is set to 1
AT_ONCE = 512  # coordinates that are compared with all rows, or multiplied out, at once


class Multiplicand(NamedTuple):
    """A vector that a matrix may multiply: the inputs x, or the vector between two linear layers, z = x Dᵀ."""

    values: Float[Tensor, "draws rank"]  # its values at the random inputs
    down: Float[Tensor, "rank d_model"] | None = None  # D; None for x itself


class MatchedColumns(NamedTuple):
    """Columns of W found in one matrix: w = uᵀD, or u if D is None."""

    columns: Int[Tensor, " some"]
    up: Float[Tensor, "some rank"]
    down: Float[Tensor, "rank d_model"] | None


@dataclass(frozen=True)
class Matrices:
    """The matrices among a module's weights, and their products with the multiplicands of one input."""

    weights: Sequence[Float[Tensor, "rows columns"]]
    _products: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def candidates(self, multiplicands: Sequence[Multiplicand]) -> Iterator[tuple[Tensor | None, Tensor, Tensor]]:
        """Yield the matrices that may contain a column of W: the map below them, their rows, and their products."""
        for number, (values, down) in enumerate(multiplicands):
            size = values.shape[1]
            linear = [weight for weight in self.weights if weight.shape[1] == size]  # (outputs, inputs)
            conv1d = [weight.mT for weight in self.weights if weight.shape[0] == size]  # stored transposed
            for index, rows in enumerate(linear + conv1d):
                if (number, index) not in self._products:
                    self._products[number, index] = values @ rows.mT
                yield down, rows, self._products[number, index]

    def match(self, vectors: Tensor, multiplicands: Sequence[Multiplicand]) -> list[MatchedColumns] | None:
        """Match all columns of `vectors`, (draws, columns), to multiples of rows; return None if any has no match."""
        if not bool(vectors.isfinite().all()):
            return None
        pieces, remaining = [], torch.arange(vectors.shape[1], device=vectors.device)
        while len(remaining):
            candidates = self.candidates(multiplicands)
            matches = (_match_rows(vectors[:, remaining], remaining, *candidate) for candidate in candidates)
            piece = next((match for match in matches if match is not None), None)
            if piece is None:
                return None
            pieces.append(piece)
            remaining = remaining[~torch.isin(remaining, piece.columns)]
        return pieces


def match_weights(probe: Probe) -> Maps | None:
    """Find W_Q and W_K if each of their columns is a multiple of a row of a weight matrix, or of a product of two.

    The first holds for linear layers, fused or not, of any layout, with gains and scales after them: q_hk(x) = c θ_r ·
    x + b. The second holds for a linear layer, a norm without its lengths and a second linear layer in sequence:
    q_hk(x) = c υ · z + b with z_r = c_r θ_r · x + a_r. Both are tested on DRAWS random inputs; z is what the module
    passes to its second layer, so that c_r includes the gains. The columns are read from the weights: the Jacobian
    would cost d_model times as much. Returns None if neither holds, if the module accepts no single token, or if there
    is NaN.
    """
    if probe.whole or probe.batch is not None:
        return None
    inputs = probe.random(DRAWS, seed=7)
    with _record_inner_inputs(probe.target.module) as inner:
        call = probe(*(torch.cat((torch.zeros_like(x[:1]), x)) for x in inputs))
    # not tensor subclasses, whose rows may be quantised
    plain = [weight for weight in probe.weights.values() if type(weight) in (Tensor, nn.Parameter)]
    weights = [weight for weight in plain if weight.dim() == 2 and weight.is_floating_point()]
    maps, biases, latent, matrices = [], [], None, Matrices(weights)
    for x, part in zip(inputs, (call.query, call.key), strict=True):
        if x is not inputs[0]:  # in self-attention, keys have the same inputs as queries
            matrices = Matrices(weights)
        values = part[:, :, 0].double()
        vectors, outer = values[1:] - values[:1], Multiplicand(x.double().flatten(0, -2))
        pieces = matrices.match(vectors.flatten(1), [outer])
        if pieces is None:
            pieces = matrices.match(vectors.flatten(1), [outer, *_find_latents(outer, inner, matrices)])
        if pieces is None:
            return None
        maps.append(compose_map(pieces, vectors.shape[1:]))
        biases.append(values[0, :, None])
        latent = _largest_product(pieces, vectors.shape[1:])
    return Maps(*maps, *biases, key_latent=latent)


@contextmanager
def _record_inner_inputs(module: nn.Module) -> Iterator[list[Tensor]]:
    """Record the inputs of those parts of the module that have a matrix, in the yielded list, inside the `with`."""
    inputs: list[Tensor] = []

    def record(_part: nn.Module, args: tuple[object, ...]) -> None:
        inputs.extend(part for part in args[:1] if isinstance(part, Tensor))

    parts = (part for part in module.modules() if any(weight.dim() == 2 for weight in part.parameters(recurse=False)))
    with remove_hooks([part.register_forward_pre_hook(record) for part in parts]):
        yield inputs


def _find_latents(outer: Multiplicand, inner: Sequence[Tensor], matrices: Matrices) -> Iterator[Multiplicand]:
    """Yield those inner inputs, minus their values at zero, that are multiples of rows of weights times x."""
    for inputs in inner:
        z = inputs.double().flatten(1)
        if len(z) == len(outer.values) + 1 and z.shape[1] == inputs.shape[-1]:  # one per token
            values = z[1:] - z[:1]
            pieces = matrices.match(values, [outer])
            if pieces is not None:
                yield Multiplicand(values, compose_map(pieces, torch.Size((1, z.shape[1])))[0].mT)


def compose_map(pieces: Sequence[MatchedColumns], shape: torch.Size) -> Float[Tensor, "heads d_model head_dim"]:
    """Return W of each head; a view, if its columns are rows of a single matrix."""
    first = pieces[0]
    if len(pieces) == 1 and first.down is None:
        whole = first.up
    else:
        whole = first.up.new_empty(shape.numel(), (first.up if first.down is None else first.down).shape[1])
        for piece in pieces:
            for columns, up in zip(*(torch.split(part, AT_ONCE) for part in piece[:2]), strict=True):
                whole[columns] = up if piece.down is None else up @ piece.down
    return whole.reshape(*shape, -1).transpose(1, 2)


def _largest_product(pieces: Sequence[MatchedColumns], shape: torch.Size) -> LatentMap | None:
    """Return the largest piece that is a product of two matrices, or None."""
    products = [piece for piece in pieces if piece.down is not None]
    columns, up, down = max(products, key=lambda piece: len(piece.columns), default=(None, None, None))
    if columns is None or up is None or down is None:
        return None
    whole = up.new_full((shape.numel(), up.shape[1]), torch.nan)
    whole[columns] = up
    return LatentMap(whole.reshape(*shape, -1).mT, down.mT)


def _match_rows(
    vectors: Tensor, columns: Tensor, down: Tensor | None, rows: Tensor, products: Tensor
) -> MatchedColumns | None:
    """Return the columns that are multiples of consecutive (else the most similar) rows; None if the first is not."""
    start, count = int(_most_similar_rows(vectors[:, :1], products)), vectors.shape[1]
    if not bool(_fit_factors(vectors[:, :1], products[:, [start]])[1]):
        return None
    indices = torch.arange(start, start + count, device=products.device)
    if start + count > products.shape[1] or not bool(_fit_factors(vectors, products[:, indices])[1].all()):
        indices = _most_similar_rows(vectors, products)
    factors, fits = _fit_factors(vectors, products[:, indices])
    if not bool(fits[0]):
        return None
    up, factors = _coordinates(rows.mT, indices[fits]).mT, factors[fits]
    return MatchedColumns(columns[fits], up if bool((factors == 1).all()) else up * factors[:, None], down)


def _most_similar_rows(vectors: Tensor, products: Tensor) -> Int[Tensor, " columns"]:
    """Return the row whose products have the direction most similar to each column, up to sign and length."""
    directions = nn.functional.normalize(products, dim=0)
    return torch.cat([(part.mT @ directions).abs_().argmax(1) for part in torch.split(vectors, AT_ONCE, dim=1)])


def _fit_factors(vectors: Tensor, products: Tensor) -> tuple[Float[Tensor, " columns"], Bool[Tensor, " columns"]]:
    """Fit the factor c of each column by least squares; return it, and which columns are c times their product."""
    # clamped so that a row of zeros gives 0, not NaN
    factors = (vectors * products).sum(0) / products.square().sum(0).clamp(min=torch.finfo(products.dtype).tiny)
    factors = torch.where((factors - 1).abs() < ONE, 1.0, factors)
    # the second term is the rounding of subtracting the bias, which scales with all columns
    border = SAME * vectors.norm(dim=0) + torch.finfo(vectors.dtype).eps * vectors.norm()
    return factors, (vectors - factors * products).norm(dim=0) <= border
