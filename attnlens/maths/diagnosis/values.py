"""Hypotheses on single tensors: rounding, lost or shifted values, one factor, a grid of levels, low rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlens.maths.diagnosis.layer import ROUNDING
from attnlens.maths.diagnosis.steps import Fit, Pair, show_factor
from attnlens.wording import format_spans

if TYPE_CHECKING:
    from jaxtyping import Float

TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
PRECISION = frozenset({"rounding", *(f"{side}rounded to {kind}" for side in ("", "first ") for kind in TYPES)})
"""Names of the hypotheses that only the number type of tensors changed."""


def propose_rounding(pair: Pair) -> Iterator[Fit]:
    """Propose that B is A rounded to a coarser type, or differs from A by at most one spacing of its type."""
    first, second = pair.first.double(), pair.second.double()
    if torch.equal(first, second):
        return
    for name, kind in TYPES.items():
        if torch.equal(pair.first.to(kind).double(), second):
            yield Fit(f"rounded to {name}", f"{{parts}} rounded to {name}", None, pair.second)
            return
        if torch.equal(pair.second.to(kind).double(), first):
            text = f"{{parts}} more precise: the first model's numbers are rounded to {name}"
            yield Fit(f"first rounded to {name}", text, None, pair.second, harmless=True)
            return
    if bool(((second - first).abs() <= pair.finer * torch.maximum(first.abs(), second.abs())).all()):
        yield Fit("rounding", "{parts} the same up to rounding", None, pair.second, harmless=True)


def propose_lost_values(pair: Pair) -> Iterator[Fit]:
    """Propose a dropped or added bias or gain: B is 0 (or, for a gain, 1) where A is not, or the reverse."""
    neutral = 1.0 if pair.is_gain else 0.0
    bias = pair.name.endswith("bias")
    gone, new = (bool((part == neutral).all()) for part in (pair.second, pair.first))
    kind = "gain" if pair.is_gain else "bias" if bias else "weight"
    if gone:
        text = (
            "{parts} lost: all gains are 1" if pair.is_gain else "{parts} dropped: all 0" if bias else "{parts} all 0"
        )
        repair = f"copy the {kind} from the first model"
        yield Fit(f"{kind} dropped" if pair.is_gain or bias else "zeros", text, repair, pair.second)
    elif new and (bias or pair.is_gain):
        text = f"{{parts}} added: the first model's {kind} is {neutral:g}"
        yield Fit(f"{kind} added", text, f"remove the {kind}", pair.second)


def propose_offset(pair: Pair) -> Iterator[Fit]:
    """Propose that B is the gain A + 1 or A − 1: one program stores a norm's gain g, the other 1 + g."""
    if not pair.is_gain:
        return
    step = float((pair.second.double() - pair.first.double()).mean().round())
    if abs(step) == 1:
        size, verb = ("large", "subtract 1 from") if step > 0 else ("small", "add 1 to")
        text = f"{{parts}} 1 too {size}: a gain stored as 1 + g was read as g, or the reverse"
        yield Fit("gain offset", text, f"{verb} the gain", pair.first.double() + step)


def propose_factor(pair: Pair) -> Iterator[Fit]:
    """Propose that B is c · A for one number c, by least squares."""
    first, second = pair.first.double(), pair.second.double()
    size = float(first.square().sum())
    factor = float((first * second).sum()) / size if size > 0 else 1.0
    if not abs(factor - 1) > max(1e-6, ROUNDING * pair.spacing):
        return
    known = _name_factor(factor, pair.head_dim) if pair.name.startswith(("query", "key")) else ""
    # least squares determine the factor up to the mean of the values' rounding
    error = 2 * ROUNDING * pair.spacing / first.numel() ** 0.5
    short = (float(f"{factor:.{digits}g}") for digits in range(1, 4))
    number = show_factor(next((each for each in short if math.isclose(each, factor, rel_tol=error)), factor))
    yield Fit("scaled", f"{{parts}} multiplied by {number}{known}", f"divide by {number}", factor * first)


def _name_factor(factor: float, head_dim: int) -> str:
    known = {"√head_dim": head_dim**0.5, "head_dim": float(head_dim)}
    for name, value in known.items():
        for label, number in ((name, value), (f"1/{name}", 1 / value)):
            if math.isclose(factor, number, rel_tol=1e-3):
                return f" ({label})"
    return ""


BITS = 8  # most bits of a grid that is looked for
GROUPS = (0, 128, 64, 32, 16)  # values that share a grid: a row (0), or so many consecutive values of a row
SAMPLE = 64  # groups of values that are tested first
GAPS = (1, 2, 3)  # steps between the two nearest levels that a group uses
OFF = 0.2  # largest distance from a level, in steps: dequantised values can be rounded to bfloat16


def find_grid(values: Float[Tensor, "groups size"], spacing: float) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return each group's lowest level, step and number of levels if its values lie on equally spaced levels."""
    ordered = values.double().sort(dim=-1).values
    low, span = ordered[:, 0], ordered[:, -1] - ordered[:, 0]
    gaps = ordered.diff(dim=-1)
    noise = 2 * spacing * ordered.abs().amax(-1, keepdim=True)
    step = gaps.masked_fill(gaps <= noise, torch.inf).amin(-1)
    if not bool(step.isfinite().any()):
        return None
    found = torch.full_like(low, torch.nan)  # number of steps between the lowest and the highest value
    for share in GAPS:  # few values may leave every second level empty
        intervals = torch.where(step.isfinite(), (share * span / step).round(), 0.0)
        places = (ordered - low[:, None]) * (intervals / span.clamp(min=torch.finfo(span.dtype).tiny))[:, None]
        fits = ((places - places.round()).abs() <= OFF).all(1) & (intervals <= 2**BITS)
        found = torch.where(found.isnan() & fits, intervals, found)
    if bool(found.isnan().any()):
        return None
    return low, torch.where(found > 0, span / found.clamp(min=1), 1.0), found + 1


def propose_grid(pair: Pair) -> Iterator[Fit]:
    """Propose a grid: each row (or group of values) of B has at most 2^b levels, and B is the level nearest to A."""
    if pair.first.dim() < 2:
        return
    first, second = (_as_rows(part, pair.name) for part in (pair.first, pair.second))
    for size in GROUPS:
        if size and (second.shape[1] % size or second.shape[1] == size):
            continue
        grouped = second.reshape(-1, size or second.shape[1])
        if find_grid(grouped[:SAMPLE], pair.spacing) is None:
            continue
        grid = find_grid(grouped, pair.spacing)
        if grid is None:
            continue
        low, step, levels = (part[:, None] for part in grid)
        original, stored = first.double().reshape(grouped.shape), grouped.double()
        nearest = low + step * ((original - low) / step).round().clamp(min=torch.zeros(()), max=levels - 1)
        # ties, the ends of the grid, and rounding of the levels
        is_end = (original < low) | (original > low + step * (levels - 1))
        near = ((original - stored).abs() <= (0.5 + OFF / 2) * step) | (is_end & ((nearest - stored).abs() < step / 2))
        bits = max(1, math.ceil(math.log2(float(levels.max()))))
        where = f"in groups of {size} values" if size else "row by row"
        text = f"{{parts}} quantised to {{number}} bit{{s}} {where}"
        predicted = _like(torch.where(near, stored, nearest).reshape(second.shape), pair)
        yield Fit("quantised to {number} bit{s}", text, None, predicted, number=bits)
        return


def _as_rows(part: Tensor, name: str) -> Tensor:
    """Return a matrix as it is multiplied: one row per output."""
    return part.permute(2, 0, 1).flatten(1) if name == "output.weight" else part.flatten(0, -2)


def _like(rows: Tensor, pair: Pair) -> Tensor:
    """Return rows in the shape of the part."""
    if pair.name != "output.weight":
        return rows.reshape(pair.second.shape)
    heads, size, width = pair.second.shape
    return rows.reshape(width, heads, size).permute(1, 2, 0)


def propose_changed_rows(pair: Pair) -> Iterator[Fit]:
    """Propose that at most half of the rows, or of the columns, of a matrix changed, and no other value."""
    if pair.first.dim() < 2 or pair.name.endswith("bias"):
        return
    first, second = (_as_rows(part, pair.name) for part in (pair.first, pair.second))
    changed = first != second
    for axis, kind in enumerate(("row", "column")):
        count, places = changed.shape[axis], changed.any(1 - axis).nonzero().flatten()
        if 2 * len(places) > count:
            continue
        is_inside = kind == ("column" if pair.name == "output.weight" else "row")
        if pair.heads and is_inside:  # numbers in the whole matrix, not among the heads that differ
            size = count // len(pair.heads)
            places = torch.tensor(pair.heads)[places.cpu() // size] * size + places.cpu() % size
        several = "s" if len(places) > 1 else ""
        text = f"{{parts}} changed in {len(places)} {kind}{several} only: {format_spans(places.tolist())}"
        yield Fit(f"{kind}s replaced", text, f"copy the {kind}{several} from the first model", pair.second)
        return


RANKS = 64  # most ranks of an update that is looked for
LOW_RANK = " update"  # end of this hypothesis's name
ORIGIN = "(as by LoRA, or by a few training steps on little text)"


def propose_low_rank(pair: Pair) -> Iterator[Fit]:
    """Propose an update of low rank (LoRA): the singular values of B − A fall to rounding after the first r."""
    if pair.first.dim() < 2:
        return
    first, second = (part.double().flatten(0, -2) for part in (pair.first, pair.second))
    change, least = second - first, min(first.shape)
    most = min(RANKS, least // 4)
    if most < 1:
        return
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(change.shape[1], min(least, most + 8), generator=generator, dtype=torch.float64)
    basis = torch.linalg.qr(change @ directions.to(change.device)).Q
    left, values, right = torch.linalg.svd(basis.mT @ change, full_matrices=False)
    rounding = ROUNDING * pair.spacing * float(second.norm()) * sum(side**-0.5 for side in change.shape)
    rank = int((values > 2 * rounding).sum())
    if not 1 <= rank <= most:
        return
    update = (basis @ left[:, :rank]) * values[:rank] @ right[:rank]
    text = f"{{parts}} changed by an update of rank {{number}} {ORIGIN}"
    predicted = (first + update).reshape(pair.second.shape)
    yield Fit("rank {number} update", text, None, predicted, number=rank)
