"""The query and key maps of a site: its factors, found among the rows of weights or as products of two matrices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from attnlens.models.trace import hooked
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
    key_latent: LatentMap | None = field(default=None, kw_only=True)
    """W_K as a product, if it was found as one."""

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries (batch, heads, tokens, head_dim) and keys (batch, kv_heads, tokens, head_dim) of x and y."""
        query, key = (
            _heads(part.double().flatten(1, -2), factor) + bias[:, : part[0, ..., 0].numel()]
            for part, factor, bias in ((x, self.query, self.query_bias), (y, self.key, self.key_bias))
        )
        return query, key


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
    """The site."""
    maps: Maps
    """W_Q, W_K and the biases."""
    scale: float
    """Factor of the product of queries and keys."""
    rotation: Rotation | None
    """R(i), or None if queries and keys are not rotated by their position."""
    groups: tuple[Int[Tensor, " some"], ...] = ()
    """Groups of a head's coordinates, each normalised per token by one scalar; W_Q and W_K contain only the gains. All
    coordinates under QK-norm; the nope part and the other part under latent attention; none without normalisation."""

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per token."""
        return bool(self.groups)

    @property
    def latent(self) -> bool:
        """Whether one part of the keys is normalised and the other is not, so that each is a form of its own."""
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
        heads = tuple(range(self.maps.query.shape[0]))
        group = len(heads) // self.maps.key.shape[0]
        whole = QueryKey(
            query=self.maps.query,
            key=self.maps.key,
            scale=self.scale,
            source="weights",
            site=self.site,
            heads=heads,
            key_of=tuple(head // group for head in heads),
            rotation=self.rotation,
        )
        if not self.latent:
            return (whole,)
        return tuple(
            replace(
                whole,
                query=_coordinates(whole.query, part),
                key=_coordinates(whole.key, part),
                rotation=None if whole.rotation is None else whole.rotation.of_coordinates(part),
            )
            for part in self.groups
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
        for head, place in enumerate(form.key_of):
            query.addmm_(form.query[head], up[place].mT)
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

    def rebuilt(self, x: Tensor, y: Tensor, seen: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute queries and keys of these inputs; under QK-norm take lengths from `seen`, which W does not have."""
        found = []
        for given, own in zip(self.maps(x, y), seen, strict=True):
            part = given if self.rotation is None else self.rotation.turned(given)
            found.append(part.clone())
            for group in self.groups:
                lengths = own[..., group].double().norm(dim=-1, keepdim=True)
                found[-1][..., group] = unit(part[..., group]) * lengths
        return found[0], found[1]


def _heads(x: Tensor, factor: Tensor) -> Tensor:
    """Compute x W of each head, (batch, heads, tokens, head_dim)."""
    found = nn.functional.linear(x, factor.mT.flatten(0, 1))  # rows of weights in their memory order
    return found.reshape(*x.shape[:-1], len(factor), -1).transpose(1, 2)


def unit(rows: Tensor) -> Tensor:
    """Scale each row to length 1."""
    return nn.functional.normalize(rows, dim=-1)


def _coordinates(factor: Tensor, kept: Int[Tensor, " some"]) -> Tensor:
    """Return some coordinates of each head; consecutive ones as a view, which needs no memory."""
    first, count = int(kept[0]), len(kept)
    if torch.equal(kept, torch.arange(first, first + count, device=kept.device)):
        return factor[..., first : first + count]
    return factor[..., kept]


DRAWS = 8
"""Random inputs; a coordinate that is not a multiple of a row passes as one with probability about SAME ** DRAWS."""
SAME = 1e-10
"""Largest relative difference between a coordinate and the row it is matched with, both in float64."""
ONE = 1e-13  # relative rounding of a coordinate's factor: a factor this close to 1 is set to 1
AT_ONCE = 512  # coordinates that are compared with all rows, or multiplied out, at once


class Given(NamedTuple):
    """A vector that a matrix may multiply: the inputs x, or the vector between two linear layers, z = x Dᵀ."""

    seen: Float[Tensor, "draws rank"]  # its values at the random inputs
    down: Float[Tensor, "rank d_model"] | None = None  # D; None for x itself


class FoundColumns(NamedTuple):
    """Columns of W found in one matrix: w = uᵀD, or u if D is None."""

    columns: Int[Tensor, " some"]
    up: Float[Tensor, "some rank"]
    down: Float[Tensor, "rank d_model"] | None


Known = dict[tuple[int, int], Tensor]
"""Cached products of the matrices tried, keyed by (index of the multiplied vector, index of the matrix)."""


def rows_of_weights(probe: Probe) -> Maps | None:
    """Find W_Q and W_K if each of their columns is a multiple of one row of a weight matrix: q_hk(x) = c θ_r · x + b.

    This holds for linear layers, fused or not, of any layout, with gains and scales after them (c). It is tested on
    DRAWS random inputs. The columns are read from the weights: the Jacobian would cost d_model times as much. Returns
    None if it does not hold (latent attention), if the module accepts no single token, or if there is NaN.
    """
    if probe.whole or probe.batch is not None:
        return None
    sides, known, inputs = [], Known(), probe.random(DRAWS, seed=7)
    for x, (seen, bias) in zip(inputs, asked(probe, inputs), strict=True):
        known = known if x is inputs[0] else {}
        pieces = pieces_of(seen.flatten(1), [Given(x.double().flatten(0, -2))], list(probe.weights.values()), known)
        if pieces is None:
            return None
        sides.append((composed(pieces, seen.shape[1:]), bias))
    (query, query_bias), (key, key_bias) = sides
    return Maps(query, key, query_bias, key_bias)


def asked(probe: Probe, inputs: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return queries and keys of these inputs without biases, (draws, heads, head_dim), and the biases."""
    with torch.no_grad():
        call = probe(*(torch.cat((torch.zeros_like(x[:1]), x)) for x in inputs))
    biases = [part[0, :, :1].double() for part in (call.query, call.key)]
    return [
        (part[1:, :, 0].double() - bias[None, :, 0], bias)
        for part, bias in zip((call.query, call.key), biases, strict=True)
    ]


def pieces_of(
    seen: Float[Tensor, "draws columns"], given: Sequence[Given], weights: Sequence[Tensor], known: Known
) -> list[FoundColumns] | None:
    """Match all columns to multiples of rows of the first matrix that has them; return None if any has no match."""
    if not bool(seen.isfinite().all()):
        return None
    pieces, left = [], torch.arange(seen.shape[1], device=seen.device)
    while len(left):
        tried = (_piece(seen[:, left], left, *candidate) for candidate in _candidates(given, weights, known))
        piece = next((found for found in tried if found is not None), None)
        if piece is None:
            return None
        pieces.append(piece)
        left = left[~torch.isin(left, piece.columns)]
    return pieces


def composed(pieces: Sequence[FoundColumns], shape: torch.Size) -> Float[Tensor, "heads d_model head_dim"]:
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


def _candidates(
    given: Sequence[Given], weights: Sequence[Tensor], known: Known
) -> Iterator[tuple[Tensor | None, Tensor, Tensor]]:
    """Yield the matrices that may contain a column: the map below them, their rows, and their products."""
    for number, one in enumerate(given):
        for place, rows in enumerate(_oriented_matrices(weights, one.seen.shape[1])):
            if (number, place) not in known:
                known[number, place] = one.seen @ rows.mT
            yield one.down, rows, known[number, place]


def _oriented_matrices(weights: Iterable[Tensor], size: int) -> Iterator[Float[Tensor, "rows d_model"]]:
    """Yield the matrices that can multiply a vector of this size, outputs first: linear layers', then Conv1D's."""
    known = [weight for weight in weights if type(weight) in (Tensor, torch.nn.Parameter)]
    matrices = [weight for weight in known if weight.dim() == 2 and weight.is_floating_point()]
    yield from (weight for weight in matrices if weight.shape[1] == size)
    yield from (weight.mT for weight in matrices if weight.shape[0] == size)


def _piece(seen: Tensor, columns: Tensor, below: Tensor | None, rows: Tensor, answers: Tensor) -> FoundColumns | None:
    """Return those columns that are multiples of these rows; None if the first column is not among them."""
    places = _matching_rows(seen, answers)
    if places is None:
        return None
    factors = _factors(seen, answers[:, places])
    fits = _equal_columns(seen, factors * answers[:, places])
    return FoundColumns(columns[fits], _scaled(rows, places[fits], factors[fits]), below) if bool(fits[0]) else None


def _matching_rows(seen: Tensor, answers: Tensor) -> Int[Tensor, " columns"] | None:
    """Return the index of each column's row; None if the first column has no row.

    Tries consecutive rows from the first column's on; if they are too few or do not fit, returns the most similar rows.
    """
    start, count = _most_similar_rows(seen[:, :1], answers), seen.shape[1]
    if not _all_match(seen[:, :1], answers[:, start]):
        return None
    places = torch.arange(int(start), int(start) + count, device=answers.device)
    if int(start) + count <= answers.shape[1] and _all_match(seen, answers[:, places]):
        return places
    return _most_similar_rows(seen, answers)


def _all_match(seen: Tensor, found: Tensor) -> bool:
    """Return whether every column is a multiple of the matched vector."""
    return bool(_equal_columns(seen, _factors(seen, found) * found).all())


def _equal_columns(seen: Tensor, found: Tensor) -> Bool[Tensor, " columns"]:
    """Return which columns equal the matched vectors; the rounding of subtracting the bias scales with all columns."""
    border = SAME * seen.norm(dim=0) + torch.finfo(seen.dtype).eps * seen.norm()
    fits: Tensor = (seen - found).norm(dim=0) <= border
    return fits


def _most_similar_rows(seen: Tensor, answers: Tensor) -> Int[Tensor, " columns"]:
    """Return the row whose products have the direction most similar to each column, up to sign and length."""
    unit = torch.nn.functional.normalize(answers, dim=0)
    return torch.cat([(part.mT @ unit).abs_().argmax(1) for part in torch.split(seen, AT_ONCE, dim=1)])


def _factors(seen: Tensor, found: Tensor) -> Float[Tensor, " columns"]:
    """Fit c of each column by least squares."""
    factors = (seen * found).sum(0) / found.square().sum(0).clamp(min=torch.finfo(found.dtype).tiny)
    return torch.where((factors - 1).abs() < ONE, 1.0, factors)


def _scaled(rows: Tensor, places: Tensor, factors: Tensor) -> Float[Tensor, "columns d_model"]:
    """Return the rows times their factors; consecutive rows with factor 1 as a view, which needs no memory."""
    start, count = int(places[0]), len(places)
    ordered = torch.equal(places, torch.arange(start, start + count, device=places.device))
    taken = rows[start : start + count] if ordered else rows[places]
    return taken if bool((factors == 1).all()) else taken * factors[:, None]


def products_of_weights(probe: Probe) -> Maps | None:
    """Find W_Q and W_K if q_hk(x) = c υ · z + b, υ a row of a matrix, and z_r = c_r θ_r · x + a_r, θ_r rows of another.

    This holds for a linear layer, a norm without its lengths and a second linear layer in sequence; some columns may be
    rows of one matrix alone. Both steps are tested as in `rows_of_weights`, on the same random inputs: z is what the
    module passes to its second layer, so that c_r includes the gains. Returns None if z is not linear in x, or queries
    and keys are not linear in z.
    """
    if probe.whole or probe.batch is not None:
        return None
    inputs = probe.random(DRAWS, seed=7)
    with _inner_inputs(probe.reached.module) as inner:
        found = asked(probe, inputs)
    sides, weights = [], list(probe.weights.values())
    for x, (seen, _) in zip(inputs, found, strict=True):
        outer = Given(x.double().flatten(0, -2))
        pieces = pieces_of(seen.flatten(1), [outer, *_latents(outer, inner, weights)], weights, {})
        if pieces is None:
            return None
        sides.append((pieces, seen.shape[1:]))
    query, key = (composed(*side) for side in sides)
    return Maps(query, key, *(bias for _, bias in found), key_latent=_product(*sides[1]))


@contextmanager
def _inner_inputs(module: nn.Module) -> Iterator[list[Tensor]]:
    """Record the inputs of those parts of the module that have a matrix, in the yielded list, inside the `with`."""
    noted: list[Tensor] = []

    def note(_part: nn.Module, given: tuple[object, ...]) -> None:
        noted.extend(part for part in given[:1] if isinstance(part, Tensor))

    parts = (part for part in module.modules() if any(one.dim() == 2 for one in part.parameters(recurse=False)))
    hooks = [part.register_forward_pre_hook(note) for part in parts]
    with hooked(hooks):
        yield noted


def _latents(outer: Given, inner: Sequence[Tensor], weights: Sequence[Tensor]) -> Iterator[Given]:
    """Yield those inner inputs, minus their values at zero, that are multiples of rows of weights times x."""
    for given in inner:
        z = given.double().flatten(1)
        if len(z) == len(outer.seen) + 1 and z.shape[1] == given.shape[-1]:  # one per token
            seen = z[1:] - z[:1]
            pieces = pieces_of(seen, [outer], weights, {})
            if pieces is not None:
                yield Given(seen, composed(pieces, torch.Size((1, z.shape[1])))[0].mT)


def _product(pieces: Sequence[FoundColumns], shape: torch.Size) -> LatentMap | None:
    """Return the largest piece that is a product of two matrices, or None."""
    products = [(piece, piece.down) for piece in pieces if piece.down is not None]
    if not products:
        return None
    piece, down = max(products, key=lambda product: len(product[0].columns))
    up = piece.up.new_full((shape.numel(), piece.up.shape[1]), torch.nan)
    up[piece.columns] = piece.up
    return LatentMap(up.reshape(*shape, -1).mT, down.mT)
