"""Hypotheses on single tensors: rounding, lost or shifted values, factors, quantisation, updates of low rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlens.maths.diagnosis.layer import ROUNDING, SINGLE, Fit, Pair, show_factor
from attnlens.wording import format_count, format_spans

if TYPE_CHECKING:
    from jaxtyping import Float

FLOAT8 = {"float8_e5m2": torch.float8_e5m2, "float8_e4m3fn": torch.float8_e4m3fn}
TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, **FLOAT8}
PRECISION = frozenset({"rounding", *(f"{side}rounded to {kind}" for side in ("", "first ") for kind in TYPES)})
"""Names of the hypotheses under which only the number type of tensors changed."""


def propose_rounding(pair: Pair) -> Iterator[Fit]:
    """Propose that B is A rounded to a coarser type, that A is B rounded, or that they are equal up to rounding."""
    first, second = pair.first.double() - pair.offset, pair.second.double() - pair.offset
    if torch.equal(first, second):
        return
    for name, kind in TYPES.items():
        if is_rounded(first, second, kind):
            yield Fit(f"rounded to {name}", f"{{parts}} rounded to {name}", None, pair.second)
            return
        if is_rounded(second, first, kind) and _is_rounding_error(second - first, first, kind):
            text = f"{{parts}} more precise: the first model's numbers are rounded to {name}"
            yield Fit(f"first rounded to {name}", text, None, pair.second, harmless=True)
            return
    if bool(((second - first).abs() <= pair.finer * torch.maximum(first.abs(), second.abs())).all()):
        yield Fit("rounding", "{parts} the same up to rounding", None, pair.second, harmless=True)


UNIFORM = 0.15, 1.95
"""Limits on the Kolmogorov–Smirnov statistic of n rounding errors: the first number or, if larger, the second divided
by √n (the 0.1 % level)."""


def _is_rounding_error(errors: Tensor, rounded: Tensor, kind: torch.dtype) -> bool:
    """Return True if |errors| are uniformly distributed up to half a unit in the last place, as rounding errors are.

    If training started from weights of this type, its small steps also vanish in rounding, but |errors| are not
    uniform. For float16, return False if bfloat16 also represents the numbers: bfloat16 is tested separately.
    """
    used = rounded != 0
    if kind == torch.float16 and is_exact(rounded, torch.bfloat16):
        return False
    shares = (2 * errors[used].abs() / _unit_spacing(rounded[used], kind)).sort().values
    expected = torch.linspace(0, 1, len(shares), dtype=shares.dtype, device=shares.device)
    largest, level = UNIFORM
    return float((shares - expected).abs().max()) <= max(largest, level / math.sqrt(len(shares)))


def _unit_spacing(numbers: Tensor, kind: torch.dtype) -> Tensor:
    """Return the spacing of a type's numbers at these values; it is constant near 0 (subnormal numbers)."""
    info = torch.finfo(kind)
    spacing = torch.ldexp(torch.full_like(numbers, info.eps / 2), torch.frexp(numbers)[1])
    return spacing.clamp(min=info.smallest_normal * info.eps)


def is_rounded(first: Tensor, second: Tensor, kind: torch.dtype) -> bool:
    """Return True if `second` is `first` rounded to a type; False if `second` is all 0 (values lost, not rounded)."""
    return bool((second != 0).any()) and torch.equal(first.to(kind).double(), second.double())


def is_exact(part: Tensor, dtype: torch.dtype) -> bool:
    """Return True if `dtype` represents all values of `part` exactly."""
    return torch.equal(part.to(dtype).to(part.dtype), part)


def propose_lost_values(pair: Pair) -> Iterator[Fit]:
    """Propose that a tensor is missing in B, or that a bias or gain is missing in A.

    A missing tensor is all 0, or all 1 if it is a gain. A gain of 0 in B is also reported.
    """
    neutral = 1.0 if pair.is_gain else 0.0
    bias = pair.name.endswith("bias")
    gone, new = (bool((part == neutral).all()) for part in (pair.second, pair.first))
    kind = "gain" if pair.is_gain else "bias" if bias else "weight"
    if pair.is_gain and bool((pair.second == 0).all()):
        yield Fit("zeros", "{parts} all 0", "copy the gain from the first model", pair.second)
    elif gone:
        text = (
            "{parts} lost: all gains are 1" if pair.is_gain else "{parts} dropped: all 0" if bias else "{parts} all 0"
        )
        repair = f"copy the {kind} from the first model"
        yield Fit(f"{kind} dropped" if pair.is_gain or bias else "zeros", text, repair, pair.second)
    elif new and (bias or pair.is_gain):
        text = f"{{parts}} added: the first model's {kind} is {neutral:g}"
        yield Fit(f"{kind} added", text, f"remove the {kind}", pair.second)


def propose_offset(pair: Pair) -> Iterator[Fit]:
    """Propose that the gain B is A ± 1, because 1 was added to a norm's stored weight once too often, or not at all.

    A norm such as Gemma's stores w and multiplies by the gain 1 + w.
    """
    if not pair.is_gain:
        return
    step = float((pair.second.double() - pair.first.double()).mean().round())
    if abs(step) == 1:
        size, how, verb = (
            ("large", "added once too often", "subtract 1 from") if step > 0 else ("small", "not added", "add 1 to")
        )
        text = f"{{parts}} 1 too {size}: 1 was {how} to the norm's stored weight"
        yield Fit("gain offset", text, f"{verb} the gain", pair.first.double() + step)


def propose_factor(pair: Pair) -> Iterator[Fit]:
    """Propose that B is c · A for a single number c, which is fitted by least squares."""
    first, second = pair.first.double(), pair.second.double()
    size = float(first.square().sum())
    factor = float((first * second).sum()) / size if size > 0 else 1.0
    if not abs(factor - 1) > max(1e-6, ROUNDING * pair.spacing):
        return
    known = _name_factor(factor, pair.head_dim) if pair.name.startswith(("query", "key")) else ""
    # least squares determines the factor up to the mean rounding error of the values
    error = 2 * ROUNDING * pair.spacing / first.numel() ** 0.5
    short = (float(f"{factor:.{digits}g}") for digits in range(1, 4))
    number = show_factor(next((each for each in short if math.isclose(each, factor, rel_tol=error)), factor))
    yield Fit("scaled", f"{{parts}} multiplied by {number}{known}", f"divide by {number}", factor * first)


def _name_factor(factor: float, head_dim: int) -> str:
    """Return the formula of a familiar factor, such as ` (√head_dim)`; '' for other factors."""
    known = {"√head_dim": head_dim**0.5, "head_dim": float(head_dim)}
    for name, value in known.items():
        for label, number in ((name, value), (f"1/{name}", 1 / value)):
            if math.isclose(factor, number, rel_tol=1e-3):
                return f" ({label})"
    return ""


BITS = 8  # largest number of bits of a grid
GROUPS = (0, 128, 64, 32, 16)  # numbers of consecutive values of a row that share a grid; 0: a whole row
SAMPLE = 64  # number of groups of values that are tested before all groups are
GAPS = (1, 2, 3)  # possible distances, in steps, between the two nearest levels that a group uses
OFF = 0.1  # largest distance from a level, in steps, beyond the rounding of dequantised values
RADII = (4, 8, 16, 32, 64, 128, 256)  # numbers of levels around 0 from which the step is fitted, in this order
LEAST_VALUES = 8  # fewest values of a row, column or head to which a grid or a factor is fitted


@dataclass(frozen=True)
class Grid:
    """Equally spaced levels of each group of values; all fields have the shape (groups, 1)."""

    low: Tensor  # lowest level
    step: Tensor  # distance between levels
    levels: Tensor  # number of levels

    @property
    def bits(self) -> int:
        """Number of bits that the group with the most levels needs."""
        return max(1, math.ceil(math.log2(float(self.levels.max()))))

    def nearest(self, values: Float[Tensor, "groups size"]) -> Tensor:
        """Round values to the nearest level."""
        places = ((values - self.low) / self.step).round()
        return self.low + self.step * places.clamp(min=torch.zeros(()), max=self.levels - 1)


def find_grid(values: Float[Tensor, "groups size"], spacing: float) -> Grid | None:
    """Find the equally spaced levels of each group of values, at most 2^BITS.

    Return None if the values of any group do not lie on such levels, or if every group is constant. The values are
    rounded to a type with the relative spacing `spacing`, so values near 0 determine the step best.
    """
    ordered = values.double().sort(dim=-1).values
    noise = spacing * ordered.abs() / 2 + SINGLE * ordered.abs().amax(-1, keepdim=True)
    doubt = noise[:, 1:] + noise[:, :-1]
    gaps = ordered.diff(dim=-1)
    # a gap of one level is longer or shorter by the rounding of its ends; the least rounded gap is the most precise
    is_gap = gaps > 2 * doubt
    longest = (gaps + doubt).masked_fill(~is_gap, torch.inf).amin(-1, keepdim=True)
    if not bool(longest.isfinite().any()):
        return None
    places = doubt.masked_fill(~is_gap | (gaps - doubt > longest), torch.inf).argmin(-1, keepdim=True)
    smallest = torch.where(longest.isfinite(), gaps.gather(1, places), 1.0)
    anchor = ordered.gather(1, ordered.abs().argmin(-1, keepdim=True))
    step, low, levels = (torch.full_like(longest, torch.nan) for _ in range(3))
    for share in GAPS:  # groups of few values can leave every second level empty
        tried = _fit_step(ordered - anchor, smallest / share, noise)
        places = ((ordered - anchor) / tried).round()
        near = (ordered - anchor - places * tried).abs() <= OFF * tried + noise
        intervals = places[:, -1:] - places[:, :1]
        fits = step.isnan() & near.all(1, keepdim=True) & (intervals < 2**BITS)
        step, levels = torch.where(fits, tried, step), torch.where(fits, intervals + 1, levels)
        low = torch.where(fits, anchor + places[:, :1] * tried, low)
    return None if bool(step.isnan().any()) else Grid(low, step, levels)


def _fit_step(
    offsets: Float[Tensor, "groups size"], step: Float[Tensor, "groups 1"], noise: Float[Tensor, "groups size"]
) -> Tensor:
    """Fit the step of a grid to the values' offsets from the level nearest to 0.

    `step` is a first estimate. The result is the midpoint of the interval of steps for which all values used lie on
    levels, up to rounding. A least-squares fit would be biased, because all values of a level have the same error.
    """
    for radius in RADII:
        places = (offsets / step).round()
        used = (places != 0) & (places.abs() <= radius)
        ratio, doubt = offsets / places, noise / places.abs()
        low = (ratio - doubt).masked_fill(~used, -torch.inf).amax(-1, keepdim=True)
        high = (ratio + doubt).masked_fill(~used, torch.inf).amin(-1, keepdim=True)
        step = torch.where(low.isfinite(), (low + high) / 2, step)
    return step


def propose_grid(pair: Pair) -> Iterator[Fit]:
    """Propose that each value of A was moved to the nearest level of a grid with at most 2^BITS levels.

    Each row, group of values or column has its own grid. Also propose that A was changed by an update of low rank
    before it was quantised.
    """
    for where, first, second, grid in _find_grids(pair):
        nearest, step, top = grid.nearest(first), grid.step, grid.low + grid.step * (grid.levels - 1)
        # B agrees if it is a nearest level, up to ties and rounding of the levels, or the level at the grid's end
        is_end = (first < grid.low) | (first > top)
        margin = (0.5 + OFF) * step + pair.spacing * second.abs() / 2
        near = ((first - second).abs() <= margin) | (is_end & ((nearest - second).abs() <= margin))
        text = f"{{parts}} quantised to {{number}} bit{{s}} {where}"
        predicted = _ungroup(torch.where(near, second, nearest), where, pair)
        yield Fit("quantised to {number} bit{s}", text, None, predicted, number=grid.bits)
        if not bool(near.all()):
            yield from _adapted_grid(second, grid, where, pair)


MOST_MOVED = 1.0, 0.75
"""Largest root-mean-square distance of a row of B from A: in grid steps, and relative to that of unrelated rows."""


def propose_compensated_grid(pair: Pair) -> Iterator[Fit]:
    """Propose a grid whose errors are compensated: B is near A, but not always at the nearest level.

    In methods such as GPTQ, the later values of a row compensate the errors of the earlier ones.
    """
    for where, first, second, grid in _find_grids(pair):
        moved, unrelated = ((first - second).square(), first.square() + second.square())
        by_row = [
            (part.T if where == COLUMNS else part.reshape(_as_rows(pair.second, pair).shape)).mean(1)
            for part in (moved / grid.step.square(), moved, unrelated)
        ]
        steps, share = by_row[0].sqrt(), (by_row[1] / by_row[2].clamp(min=TINY)).sqrt()
        if bool(((steps <= MOST_MOVED[0]) & (share <= MOST_MOVED[1])).all()):
            text = f"{{parts}} quantised to {{number}} bit{{s}} {where}, not always to the nearest level"
            text += " (as GPTQ does, or after a small change)"
            yield Fit("quantised to {number} bit{s}", text, None, pair.second, number=grid.bits)


def _find_grids(pair: Pair) -> Iterator[tuple[str, Tensor, Tensor, Grid]]:
    """Yield the first grouping, if any, whose groups of B all lie on grids: its name, groups of A and B, and grids."""
    if pair.first.dim() < 2:
        return
    for where, first, second in _list_groups(*_both_as_rows(pair)):
        if find_grid(second[:SAMPLE], pair.second_spacing) is None:
            continue
        grid = find_grid(second, pair.second_spacing)
        if grid is not None:
            yield where, first, second, grid
            return


LARGEST = 32  # number of float8 values, the largest first, that are tried as the code of a group's largest value
AT_ONCE = 1 << 16  # most numbers in a tensor with which several of these codes are tried at once


def propose_float8(pair: Pair) -> Iterator[Fit]:
    """Propose that B is A divided by a factor, rounded to float8, and multiplied by this factor.

    The factor is that of the whole matrix, or of each row, group of values or column. Each value of B is then the
    representable number nearest to the value of A.
    """
    if pair.first.dim() < 2:
        return
    rows = _both_as_rows(pair)
    whole = "with one factor", rows[0].reshape(1, -1), rows[1].reshape(1, -1)
    for where, first, second in (whole, *_list_groups(*rows)):
        for name, kind in FLOAT8.items():
            if _fit_factors(second[:SAMPLE, : SAMPLE**2], kind, pair.second_spacing) is None:
                continue
            factors = _fit_factors(second, kind, pair.second_spacing)
            if factors is None:
                continue
            half_units = _unit_spacing((second / factors).to(kind).double(), kind) * factors / 2
            near = (first - second).abs() <= (1 + OFF) * half_units + pair.spacing * second.abs() / 2
            text = f"{{parts}} quantised to {name} {where}"
            yield Fit(f"quantised to {name}", text, None, _ungroup(torch.where(near, second, first), where, pair))
            return


def _fit_factors(values: Float[Tensor, "groups size"], kind: torch.dtype, spacing: float) -> Tensor | None:
    """Return a factor for each group such that all values of the group are products of this factor and float8 numbers.

    Return None if any group lacks such a factor.
    """
    numbers = torch.arange(256, dtype=torch.uint8).view(kind).double()
    numbers = numbers[numbers.isfinite() & (numbers > 0)].sort(descending=True).values[:LARGEST]
    most = values.abs().amax(1, keepdim=True).clamp(min=TINY)
    factors = torch.full_like(most, torch.nan)
    for tried in torch.split(numbers, max(1, AT_ONCE // max(1, values.numel()))):
        codes = (values * (tried[:, None, None] / most)).to(kind).double()
        fitted = (codes * values).sum(2, keepdim=True) / codes.square().sum(2, keepdim=True).clamp(min=TINY)
        exact = ((values - codes * fitted).abs() <= spacing * values.abs()).all(2, keepdim=True)
        first = fitted.gather(0, exact.int().argmax(0, keepdim=True))[0]
        factors = torch.where(factors.isnan() & exact.any(0), first, factors)
    return None if bool(factors.isnan().any()) else factors


COLUMNS = "column by column"


def _list_groups(first: Tensor, second: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each grouping (by row, in groups within rows, by column): its name and both matrices, one group per row."""
    for size in GROUPS:
        if not size:
            if second.shape[1] >= LEAST_VALUES:
                yield "row by row", first, second
        elif second.shape[1] % size == 0 and second.shape[1] > size:
            yield f"in groups of {size} values", first.reshape(-1, size), second.reshape(-1, size)
    if len(second) >= LEAST_VALUES:
        yield COLUMNS, first.T, second.T


def _ungroup(groups: Tensor, where: str, pair: Pair) -> Tensor:
    rows = groups.T if where == COLUMNS else groups.reshape(-1, _as_rows(pair.second, pair).shape[1])
    return _from_rows(rows, pair)


def _as_rows(part: Tensor, pair: Pair) -> Tensor:
    """Return a part as a matrix with one row per output."""
    if pair.name == "output.weight":
        return part.permute(2, 0, 1).flatten(1)
    return part.T if pair.inputs_first else part.flatten(0, -2)


def _both_as_rows(pair: Pair) -> tuple[Tensor, Tensor]:
    return _as_rows(pair.first, pair).double(), _as_rows(pair.second, pair).double()


def _from_rows(rows: Tensor, pair: Pair) -> Tensor:
    """Return a matrix with one row per output in the shape of the part (inverse of `_as_rows`)."""
    if pair.inputs_first:
        return rows.T
    if pair.name != "output.weight":
        return rows.reshape(pair.second.shape)
    heads, size, width = pair.second.shape
    return rows.reshape(width, heads, size).permute(1, 2, 0)


TRAINED = 0.1  # largest ‖b − a‖/‖a‖ of a row or column that counts as trained; replaced rows differ by more


def propose_changed_rows(pair: Pair) -> Iterator[Fit]:
    """Propose that at most half of the rows, or at most half of the columns, of a matrix changed.

    Most values of a changed row or column must differ; pruning, by contrast, changes few values of each.
    """
    if pair.first.dim() < 2 or pair.name.endswith("bias"):
        return
    first, second = (_as_rows(part, pair) for part in (pair.first, pair.second))
    changed = first != second
    for axis, kind in enumerate(("row", "column")):
        count, places = changed.shape[axis], changed.any(1 - axis).nonzero().flatten()
        few = changed.index_select(axis, places).double().mean() <= 0.5
        if few or 2 * len(places) > count or changed.shape[1 - axis] < LEAST_VALUES:
            continue
        is_inside = kind == ("column" if pair.name == "output.weight" else "row")
        if pair.heads and is_inside:  # number rows in the whole matrix, not among the heads that differ
            size = count // len(pair.heads)
            places = torch.tensor(pair.heads)[places.cpu() // size] * size + places.cpu() % size
        several = "s" if len(places) > 1 else ""
        text = f"{{parts}} changed in {len(places)} {kind}{several} only: {format_spans(places.tolist())}"
        before, after = (part.double().movedim(axis, 0)[changed.any(1 - axis)] for part in (first, second))
        if bool(((after - before).norm(dim=1) <= TRAINED * before.norm(dim=1)).all()):
            text += " (by at most a tenth of their norm, as in training)"
            yield Fit(f"{kind}s trained", text, None, pair.second)
        else:
            yield Fit(f"{kind}s replaced", text, f"copy the {kind}{several} from the first model", pair.second)
        return


def propose_factors(pair: Pair) -> Iterator[Fit]:
    """Propose that each head, row or column was multiplied by a separate factor, fitted by least squares.

    For a bias, also propose the factors of the rows of its matrix.
    """
    for kind, first, second in _list_scaled(pair):
        factors = _fit_row_factors(first, second)
        predicted = factors * first
        rows = predicted.T if kind == "column" else predicted
        shaped = rows.reshape(pair.second.shape) if kind == "head" else _from_rows(rows, pair)
        yield _scale_each(kind, factors, shaped)
    matrix = pair.weight
    if matrix is None or matrix.first.dim() < 2 or matrix.first.shape != matrix.second.shape:
        return
    first, second = _both_as_rows(matrix)
    if len(first) == pair.first.numel():
        factors = _fit_row_factors(first, second)
        yield _scale_each("row", factors, factors.view_as(pair.first) * pair.first.double())


def _fit_row_factors(first: Float[Tensor, "rows width"], second: Float[Tensor, "rows width"]) -> Tensor:
    """Return for each row the factor c that minimises ‖second − c · first‖; 1 for a row of zeros."""
    size = first.square().sum(1, keepdim=True)
    return torch.where(size > 0, (first * second).sum(1, keepdim=True) / size.clamp(min=TINY), 1.0)


def _scale_each(kind: str, factors: Tensor, predicted: Tensor) -> Fit:
    """Build the fit of separate factors; the text is the same for a bias and its matrix, so they become one cause."""
    span = f"{float(factors.min()):.3g} to {float(factors.max()):.3g}"
    return Fit(f"{kind}s scaled", f"{{parts}} multiplied by a factor for each {kind} ({span})", None, predicted)


TINY = torch.finfo(torch.float64).tiny


def _list_scaled(pair: Pair) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield "head", "row" or "column", and both parts as matrices with one row per head, row or column."""
    if len(pair.heads) > 1 and pair.first[0].numel() >= LEAST_VALUES:
        yield "head", pair.first.double().flatten(1), pair.second.double().flatten(1)
    if pair.first.dim() < 2 or pair.name.endswith("bias"):
        return
    first, second = _both_as_rows(pair)
    if min(first.shape) >= LEAST_VALUES:
        yield "row", first, second
        yield "column", first.T, second.T


RANKS = 64  # largest rank of an update
LOW_RANK = " update"  # end of the name of the hypothesis of a low-rank update
ORIGIN = "(as after LoRA, or a few training steps on little text)"


def propose_low_rank(pair: Pair) -> Iterator[Fit]:
    """Propose an update of low rank (LoRA): only the first r singular values of B − A exceed the rounding of B.

    The rounding of A does not count, even if its type is coarser, because B was computed from the rounded A.
    """
    if pair.first.dim() < 2:
        return
    first, second = (part.double().flatten(0, -2) for part in (pair.first, pair.second))
    change = second - first
    rounding = ROUNDING * pair.second_spacing * float(second.norm()) * sum(side**-0.5 for side in change.shape)
    fitted = _fit_low_rank(change, 2 * rounding)
    if fitted is None:
        return
    update, rank = fitted[0], len(fitted[1])
    if int((change != 0).sum()) <= rank * (sum(change.shape) - rank):
        return  # a few changed values are always of low rank
    text = f"{{parts}} changed by an update of rank {{number}} {ORIGIN}"
    predicted = (first + update).reshape(pair.second.shape)
    yield Fit("rank {number} update", text, None, predicted, number=rank)


def _fit_low_rank(change: Float[Tensor, "rows width"], noise: float) -> tuple[Tensor, Tensor] | None:
    """Return a matrix's part with singular values above `noise`, and these values; None if there are 0 or too many."""
    most = min(RANKS, min(change.shape) // 4)
    if most < 1:
        return None
    left, values, right = _leading_directions(change, most + 8)
    rank = int((values > noise).sum())
    return (left[:, :rank] * values[:rank] @ right[:rank], values[:rank]) if 1 <= rank <= most else None


def _leading_directions(matrix: Float[Tensor, "rows width"], count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first `count` singular triplets of a matrix, by randomised SVD."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(matrix.shape[1], min(*matrix.shape, count), generator=generator, dtype=torch.float64)
    basis = torch.linalg.qr(matrix @ directions.to(matrix.device)).Q
    # a second product with the matrix makes directions just above the noise precise
    basis = torch.linalg.qr(matrix @ (matrix.mT @ basis)).Q
    left, values, right = torch.linalg.svd(basis.mT @ matrix, full_matrices=False)
    return basis @ left, values, right


CLEAR = 1.2  # least singular value of an update, relative to the largest singular value of the rounding errors
AGREEMENT = 0.05  # largest relative difference between the errors' root mean square and that of uniform rounding


def _adapted_grid(levels: Tensor, grid: Grid, where: str, pair: Pair) -> Iterator[Fit]:
    """Propose that A was changed by an update of low rank, and then rounded to the grid.

    Rounding errors are uniform up to half a step, and independent. In units of the step, B − A is then a matrix of rank
    r plus noise of variance 1/12; the singular values of the noise are at most about (√rows + √columns)/√12.
    """
    first, second = _both_as_rows(pair)
    steps = grid.step.expand(levels.shape)
    by_row = (steps.T if where == COLUMNS else steps.reshape(first.shape)).square().mean(1, keepdim=True).sqrt()
    change = (second - first) / by_row
    noise = sum(side**0.5 for side in change.shape) / 12**0.5
    fitted = _fit_low_rank(change, noise)
    if fitted is None or float(fitted[1][-1]) < CLEAR * noise:
        return
    update, rank = fitted[0], len(fitted[1])
    errors = float((change - update).square().mean().sqrt())
    expected = math.prod(1 - rank / side for side in change.shape) ** 0.5 / 12**0.5
    if abs(errors / expected - 1) > AGREEMENT:
        return
    # the estimated update can be wrong by almost a step, so values can lie on the neighbouring level
    updated = first + update * by_row
    grouped = updated.T if where == COLUMNS else updated.reshape(levels.shape)
    near = (grouped - levels).abs() <= 1.5 * grid.step
    bits = format_count(grid.bits, "bit")
    text = f"{{parts}} changed by an update of rank {{number}}, then quantised to {bits} {where}"
    predicted = _ungroup(torch.where(near, levels, grid.nearest(grouped)), where, pair)
    yield Fit(f"rank {{number}} update, quantised to {bits}", text, None, predicted, number=rank)
