"""Test whether sampling and rounding explain changes (p, q, the smallest detectable change), and simulate rounding."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import digamma, ndtri, polygamma, stdtr, stdtrit  # importing scipy.stats takes a third of a second
from torch import Tensor

from attnlens.analyzers.registry import FORMS, KEY_ANGLE, OWN_ROWS, QUERY_ANGLE, ROWS, Analyzer
from attnlens.maths.statistics import Design, adjust_p_values, false_discovery, p_values, standard_error
from attnlens.models import texts, weights
from attnlens.models.hooks.survey import hide_padding
from attnlens.records import Head, MeasureChange, QueryKey, Site
from attnlens.records.comparison import SMALLEST_SHARE
from attnlens.runs.compare.sides import Blocks, ComparedModel, Pairing, Pass, compare_blocks, form_distances, run_pass
from attnlens.runs.inspect import sequences
from attnlens.runs.progress import AddSteps

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from transformers import PreTrainedModel

SMALLEST = {OWN_ROWS: 1e-4, ROWS: 1e-4, FORMS: 1e-3, QUERY_ANGLE: 0.06, KEY_ANGLE: 0.06}
"""Smallest changes that matter: in nats, as a share of ‖M‖, and in degrees (0.001 radian). Rounding errors of a change
of basis within a head change M by about eps · cond, which is too little to matter."""
SMALLEST_BLOCK = 1e-3  # smallest change in a block's output that matters, as a share of the output's norm
ENOUGH_HEADS = 4  # least number of heads for which an interquartile range is computed
CHANGED_P = 1e-3  # p below which a change counts as more than rounding; rounding alone gives 1 such p in 1000 heads
POWER = 0.8  # probability with which a test detects the smallest detectable change


@dataclass(frozen=True)
class Rounding:
    """Effect of rounding the weights on a measure, estimated from random draws."""

    size: Float[Tensor, " heads"]  # root mean square of the changes; for a divergence, their mean
    freedom: Float[Tensor, " heads"]  # degrees of freedom of the size
    squared: bool = False  # True for a divergence, which grows with the square of a change


@dataclass(frozen=True)
class ChangeTest:
    """Changes in one measure, with p-values, for all heads."""

    delta: Float[Tensor, " heads"]
    p: Float[Tensor, " heads"]
    se: Float[Tensor, " heads"] | None = None  # standard error over windows
    freedom: int = 0  # degrees of freedom of the standard error; 0 if unknown
    rounding: Rounding | None = None

    def negligible(self, smallest: float | None) -> Bool[Tensor, " heads"]:
        """Return True for changes whose 90 % confidence interval is within ± `smallest` (two one-sided tests at 5 %).

        Return False for all changes if `smallest` is None.
        """
        if smallest is None:
            return torch.zeros_like(self.delta, dtype=torch.bool)
        error = torch.zeros_like(self.delta) if self.se is None or self.freedom < 1 else self.se
        return self.delta.abs() + float(stdtrit(max(self.freedom, 1), 0.95)) * error <= smallest

    @property
    def beyond_rounding(self) -> list[bool | None]:
        """True for heads whose change exceeds the effect of rounding (p < CHANGED_P); None if unknown."""
        if self.rounding is None:
            return [None] * len(self.delta)
        size, p = self.rounding.size, rounding_p_values(self.delta, self.rounding)
        beyond = torch.where(size > 0, p < CHANGED_P, self.delta != 0)
        known = self.delta.isfinite() & size.isfinite()
        return [bool(value) if is_known else None for value, is_known in zip(beyond, known, strict=True)]

    def least_change(self, level: float) -> Float[Tensor, " heads"]:
        """Compute the smallest change that a test at `level` detects with probability POWER.

        The change is NaN unless the standard error or the effect of rounding is known and above 0.
        """
        least = torch.zeros_like(self.delta)
        if self.se is not None and self.freedom > 0:
            least = torch.fmax(least, self.se * _detectable_errors(level, torch.tensor(self.freedom)))
        if self.rounding is not None:
            errors = _detectable_errors(level, self.rounding.freedom)
            least = torch.fmax(least, self.rounding.size * (errors**2 if self.rounding.squared else errors))
        return torch.where(least > 0, least, torch.nan)


def _detectable_errors(level: float, freedom: Tensor) -> Tensor:
    """Return the number of standard errors by which a change must exceed 0 to be detected with probability POWER."""
    return torch.as_tensor(stdtrit(freedom.numpy(), POWER) - stdtrit(freedom.numpy(), level / 2))


def test_windows(
    differences: Float[Tensor, "windows heads"], design: Design, rounding: Rounding | None, seed: int
) -> ChangeTest:
    """Test changes paired by window: p is the larger of the p-values for sampling and rounding; 1 without a change."""
    values = differences.double()
    p = torch.full(values.shape[1:], torch.nan, dtype=torch.float64)
    missing = values.isnan().mT
    for pattern in set(map(tuple, missing.tolist())):
        heads = (missing == torch.tensor(pattern)).all(1)
        present = [window for window, absent in enumerate(pattern) if not absent]
        if present:
            p[heads] = p_values(values[present][:, heads].mT, design.select(present), torch.ones(len(present)), seed)
    delta = values.nanmean(0)
    p[(values.nan_to_num() == 0).all(0) & ~delta.isnan()] = 1.0
    # the same change in all windows cannot be due to sampling
    error = standard_error(values, design)
    p[(error == 0) & (delta != 0)] = 0.0
    # if rounding never changed a measure, p depends on windows alone
    beyond = rounding_p_values(delta, rounding) if rounding is not None else p
    p = torch.maximum(p, beyond.nan_to_num(nan=0.0))
    return ChangeTest(delta, p, error, design.freedom, rounding)


def test_rounding(delta: Float[Tensor, " heads"], rounding: Rounding) -> ChangeTest:
    """Test changes in a measure of weights: p is the p-value for rounding, or 1 without a change."""
    p = torch.where(delta == 0, 1.0, rounding_p_values(delta, rounding)).masked_fill(~delta.isfinite(), torch.nan)
    return ChangeTest(delta, p, rounding=rounding)


def test_unpaired(delta: Float[Tensor, " heads"], se: Float[Tensor, " heads"], freedom: int) -> ChangeTest:
    """Test unpaired changes with Student's t; if both sides read the same windows, `se` and p are too large."""
    p = torch.from_numpy(2 * stdtr(max(freedom, 1), -(delta.abs() / se).numpy()))
    p = torch.where(se > 0, p, torch.nan) if freedom > 0 else torch.full_like(delta, torch.nan)
    return ChangeTest(delta, torch.where(delta == 0, 1.0, p), se, freedom)


def rounding_p_values(delta: Float[Tensor, " heads"], rounding: Rounding) -> Float[Tensor, " heads"]:
    """Compute Student's P(|t| ≥ r), r = |delta|/size or, for divergences, its root; NaN if rounding had no effect."""
    ratios = delta.abs() / rounding.size
    scores = (ratios.sqrt() if rounding.squared else ratios).numpy()
    p = torch.from_numpy(2 * stdtr(rounding.freedom.numpy(), -scores))
    return torch.where(rounding.size > 0, p, torch.nan)


def finite_or_none(value: float | Tensor) -> float | None:
    """Convert a value to float; return None if it is NaN or infinite."""
    return float(value) if math.isfinite(value) else None


def combine_rounding(
    first: Float[Tensor, "draws heads"], second: Float[Tensor, "draws heads"], *, squared: bool
) -> Rounding:
    """Combine the rounding of both models: add the mean squares of their draws, or the means if draws are `squared`.

    The degrees of freedom of the sum follow Welch and Satterthwaite. `_moderate` then averages the sums over heads.

    An integer measure (a count of columns, a rank) does not change in most draws. Each head's size is therefore at
    least the standard deviation of a Gaussian whose typical maximum over all draws and heads is the largest change.
    """
    # a form of zeros is not rounded (NaN); then only the other model's draws count
    squares = [part.double() if squared else part.double().square() for part in (first, second)]
    means = torch.stack([part.mean(0) for part in squares])
    draws = torch.cat(squares)
    draws = draws[~draws.isnan()]
    # of n squared standard normal numbers, one exceeds Φ⁻¹(0.5/n)² on average
    least = float(draws.max()) / float(ndtri(0.5 / len(draws))) ** 2 if len(draws) else 0.0
    total = means.nansum(0)
    counts = torch.tensor([[len(first)], [len(second)]])
    freedom = total.square() / (means.square() / counts).nansum(0)
    total, freedom = _moderate(total, freedom.nan_to_num(nan=float(counts.min())))
    total = total.clamp(min=least).masked_fill(means.isnan().all(0), torch.nan)
    return Rounding(total if squared else total.sqrt(), freedom, squared)


def _moderate(
    squares: Float[Tensor, " heads"], freedom: Float[Tensor, " heads"]
) -> tuple[Float[Tensor, " heads"], Float[Tensor, " heads"]]:
    """Average heads' mean squares with the typical one, weighted by degrees of freedom (Smyth 2004, eq. 6.2).

    Return the averages and their degrees of freedom. The more alike the heads are, the more degrees of freedom the
    typical mean square has, up to PRIOR. A mean square of 0 is not averaged. If fewer than ENOUGH_HEADS are above 0,
    no mean square is averaged.
    """
    known = (squares > 0) & squares.isfinite()
    if int(known.sum()) < ENOUGH_HEADS:
        return squares, freedom
    half = freedom[known].numpy() / 2
    logarithms = squares[known].log().numpy() - digamma(half) + np.log(half)
    # the variance of these logarithms in excess of that by chance is ψ'(d/2), where d are the degrees of freedom
    excess = max(logarithms.var(ddof=1) - polygamma(1, half).mean(), polygamma(1, MOST))
    half_prior = brentq(lambda x: polygamma(1, x) - excess, 1 / MOST, MOST)
    typical = math.exp(logarithms.mean() + digamma(half_prior) - math.log(half_prior))
    prior = min(2 * half_prior, PRIOR)
    averages = (prior * typical + freedom * squares) / (prior + freedom)
    return torch.where(known, averages, squares), torch.where(known, freedom + prior, freedom)


Heads = tuple[Sequence[Head], Sequence[Head]]  # heads of the first model, and their partners in the second


def build_rows(heads: Heads, tests: Mapping[str, ChangeTest | None], fdr: float, untested: str) -> list[MeasureChange]:
    """Build one row per measure and head; a row is `named` if q ≤ `fdr` and the change is not negligible.

    `untested` is the reason for measures whose test is None.
    """
    keys = [(name, test, place) for name, test in tests.items() for place in range(len(heads[0]))]
    numbers = [math.nan if test is None else float(test.p[place]) for _, test, place in keys]
    p = torch.tensor(numbers, dtype=torch.float64)
    q, named = adjust_p_values(p), false_discovery(p, fdr)
    count = int((~p.isnan()).sum())
    # the largest p that is named; at least the Bonferroni level, which the first named change would have to reach
    level = float(p[named].max().clamp(min=fdr / count)) if bool(named.any()) else fdr / max(count, 1)
    least = {name: test.least_change(level) for name, test in tests.items() if test is not None}
    categories = {name for name in tests if is_category(heads, name)}  # computed once, because all heads are read
    smallest = {name: None if name in categories else _smallest_change(heads, name) for name in tests}
    negligible = {name: test.negligible(smallest[name]) for name, test in tests.items() if test is not None}
    beyond = {name: test.beyond_rounding for name, test in tests.items() if test is not None}
    rows = []
    for (name, test, place), row_p, row_q, significant in zip(
        keys, p.tolist(), q.tolist(), named.tolist(), strict=True
    ):
        head = heads[0][place]
        measures = {"first": head.measures.get(name), "second": heads[1][place].measures.get(name)}
        before, after = (None if measure is None else measure.value for measure in measures.values())
        gaps = [f"in the {which} model {part.reason}" for which, part in measures.items() if part and part.reason]
        reason = "categories have no differences" if name in categories else next(iter(gaps), None)
        fields: dict[str, float | None] = {}
        if test is not None:
            fields = {"delta": finite_or_none(test.delta[place]), "p": finite_or_none(row_p)}
            fields["se"] = None if test.se is None else finite_or_none(test.se[place])
            fields["rounding"] = None if test.rounding is None else finite_or_none(test.rounding.size[place])
            if not math.isnan(row_p):
                fields["least"] = finite_or_none(least[name][place])
            elif fields["delta"] is not None and reason is None:
                unmoved = "rounding never changed the measure, so the effect of rounding is unknown"
                reason = unmoved if test.se is None else "one window, or one text, has no spread"
        elif reason is None and before is not None and after is not None:
            fields, reason = {"delta": after - before}, untested
        small = test is not None and bool(negligible[name][place])
        rows.append(
            MeasureChange(
                layer=head.layer,
                head=head.head,
                measure=name,
                before=before,
                after=after,
                q=finite_or_none(row_q),
                smallest=smallest[name],
                negligible=small,
                beyond_rounding=beyond[name][place] if test is not None else None,
                named=significant and not small,
                reason=reason,
                **fields,
            )
        )
    return rows


def _smallest_change(heads: Heads, name: str) -> float | None:
    """Return the smallest change that matters; None if too few heads have values, or their spread is 0."""
    if name in SMALLEST:
        return SMALLEST[name]
    values = field_values(heads, name)[0]
    values = values[values.isfinite()]
    if len(values) < ENOUGH_HEADS:
        return None
    low, high = values.quantile(values.new_tensor([0.25, 0.75])).tolist()
    return SMALLEST_SHARE * (high - low) or None


def is_category(heads: Heads, name: str) -> bool:
    """Return True if a measure has labels instead of numbers."""
    return any(name in head.measures and head.measures[name].label is not None for each in heads for head in each)


def field_values(heads: Heads, name: str, field: str = "value") -> tuple[Tensor, Tensor]:
    """Return a measure's `field` (`value` or `se`) in the heads of both models; NaN where it is missing."""
    columns = ([getattr(head.measures.get(name), field, None) for head in side] for side in heads)
    first, second = ([math.nan if number is None else number for number in column] for column in columns)
    return torch.tensor(first, dtype=torch.float64), torch.tensor(second, dtype=torch.float64)


DRAWS = 2
"""Number of random roundings of each model's weights. Fewer draws need fewer forward passes and reduce the power, but
the tests stay valid, because Student's t then has fewer degrees of freedom (benchmarks/rounding.py)."""
PRIOR = 4.0
"""Maximum degrees of freedom of the typical mean square over heads. A small number keeps the tails of Student's t
heavy, because rounding can change a single head far more than the others."""
MOST = 1e6  # degrees of freedom that count as infinite
FEW = 1
"""Number of windows on which the effect of rounding on tokens.* is measured. The effect on one window has at least the
mean square of the effect on the mean over windows, and each window costs 2 × DRAWS passes per model."""
BLOCKS = "compare.block_change"
"""Name of the change ‖o' − o‖/‖o‖ in a block's output o if both models receive the first model's input states; one
value per block, not per head."""
BITS = {
    torch.bfloat16: (torch.int16, 7),
    torch.float16: (torch.int16, 10),
    torch.float32: (torch.int32, 23),
    torch.float64: (torch.int64, 52),
}
"""Integer dtype of equal width, and number of mantissa bits, for each dtype of stored weights, from coarse to fine."""
DIFFERENT, MANY = 16, 4096
"""DIFFERENT distinct values among the first MANY of a tensor are needed to identify its stored type, because a few
small integers or powers of 2 are exact in every type."""
MOVED = 12  # one number in MOVED moves by one spacing: this gives the variance of rounding, 1/12 of a squared spacing


def stored_type(weight: Tensor) -> torch.dtype:
    """Return the coarsest dtype that holds all values exactly; float32 if few are distinct, as in gains of 1."""
    sample = weight.flatten()[:MANY]
    if len(sample.unique()) < min(DIFFERENT, weight.numel()):  # type: ignore[no-untyped-call]
        return torch.float32
    # most weights are ruled out by the sample
    exact = (kind for kind in BITS if all(torch.equal(part.to(kind).to(part.dtype), part) for part in (sample, weight)))
    return next(exact, torch.float64)


def site_type(model: PreTrainedModel, site: Site) -> torch.dtype:
    """Return the coarsest stored type of matrices in a site's module, which limits the precision of queries."""
    kinds = [stored_type(weight) for weight in model.get_submodule(site.path).parameters() if weight.dim() > 1]
    return max(kinds, key=lambda kind: torch.finfo(kind).eps, default=torch.float32)


def stored_types(model: PreTrainedModel, unused: Collection[str] = ()) -> list[tuple[Tensor, torch.dtype]]:
    """Return a model's floating-point weights with their stored types.

    Weights used only by modules at the paths `unused` are omitted.
    """
    prefixes = tuple(f"{path}." for path in unused)
    # duplicates, because a weight outside these modules can be shared with one of them
    named = model.named_parameters(remove_duplicate=False)
    used = dict.fromkeys(weight for name, weight in named if not name.startswith(prefixes))
    return [(weight.data, stored_type(weight.data)) for weight in used if weight.is_floating_point()]


@contextmanager
def move_weights(types: Sequence[tuple[Tensor, torch.dtype]], generator: torch.Generator) -> Iterator[None]:
    """Context manager: move one value in twelve of each weight by ± one spacing of its type; restore all at the end."""
    replaced_values: list[tuple[Tensor, Tensor, Tensor]] = []
    try:
        for data, kind in types:
            places, values = _draw_moves(data, kind, generator)
            replaced_values.append((data, places, data.take(places)))
            data.put_(places, values)
        yield
    finally:
        for data, places, before in replaced_values:
            data.put_(places, before)


def move_values(tensor: Tensor, kind: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return a copy with one value in twelve moved by ± one spacing of `kind`: this has the variance of rounding."""
    return tensor.clone().put_(*_draw_moves(tensor, kind, generator))


def _draw_moves(tensor: Tensor, kind: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw one value in twelve; return flat indices, and the values moved by ± one spacing of `kind` (0 stays 0)."""
    part, remainder = divmod(tensor.numel(), MOVED)
    count = part + int(torch.randint(MOVED, (1,), generator=generator)) // (MOVED - remainder)
    places = torch.randint(max(tensor.numel(), 1), (count,), generator=generator).to(tensor.device)
    values = tensor.take(places)
    whole, behind = BITS[values.dtype]
    step = 1 << max(behind - BITS[kind][1], 0)
    steps = (2 * torch.randint(2, values.shape, generator=generator) - 1).to(values.device, whole) * step
    # floats of one sign are ordered like their bits read as integers
    return places, torch.where(values == 0, values, (values.view(whole) + steps).view(values.dtype))


def draw_weights(side: ComparedModel, draws: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Simulate how rounding changes weights.* and the heads' forms M.

    Return tables (draws, heads) keyed by measure name, with NaN for heads whose form can't be read.
    """
    analyzers = side.select_analyzers("weights")
    tables: dict[sequences.Place, Tensor] = {}
    for site in side.key_heads:
        factors = side.get_factors(site)
        if isinstance(factors, weights.Factors):
            changes = _draw_site_changes(factors, analyzers, site_type(side.loaded.model, site), draws, generator)
            tables |= {(site.name, name): values for name, values in changes.items()}
    return sequences.arrange_by_measure(tables, side.heads, draws)


def _draw_site_changes(
    factors: weights.Factors, analyzers: Sequence[Analyzer], kind: torch.dtype, draws: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Simulate how rounding changes one site's forms and scalar measures; return tables (draws, heads) keyed by name.

    If no head is finite, only forms are included. Measures that compare a model with its base are left out.
    """
    form = factors.query_key
    finite = sequences.finite_heads(form)
    analyzers = [analyzer for analyzer in analyzers if not analyzer.needs_base] if finite else []

    def scalars(form: QueryKey) -> dict[str, Tensor]:
        """Compute scalar measures (no curves), keyed by name; NaN for heads that are not finite."""
        by_name: dict[str, Tensor] = {}
        for analyzer in analyzers:
            readings = analyzer.read(form.select(finite))
            for name in (info.name for info in analyzer.measures if not info.curve and info.name in readings):
                by_name[name] = torch.full((len(form.heads),), torch.nan, dtype=torch.float64)
                by_name[name][finite] = readings[name].double().cpu()
        return by_name

    before, drawn = scalars(form), list[dict[str, Tensor]]()
    for _ in range(draws):
        query, key = (move_values(part, kind, generator) for part in (factors.maps.query, factors.maps.key))
        rounded = replace(factors, maps=replace(factors.maps, query=query, key=key)).query_key
        changes = {name: values - before[name] for name, values in scalars(rounded).items()}
        drawn.append(form_distances(form, rounded) | changes)
    return {name: torch.stack([changes[name] for changes in drawn]) for name in drawn[0]}


def draw_tokens(
    side: ComparedModel, cut: texts.Cut, blocks: Blocks, draws: int, generator: torch.Generator, add_steps: AddSteps
) -> dict[str, Tensor]:
    """Simulate how rounding changes tokens.*, attention rows (KL) and block outputs, as means over windows.

    Return tables (draws, heads) keyed by measure name; the table of block outputs has the shape (draws, blocks).
    """
    batches = texts.batches(side.loaded, side.contents, cut)
    recorded = [run_pass(side, batch.inputs, blocks) for batch in batches]
    order = {site: tuple(range(len(key_heads))) for site, key_heads in side.key_heads.items()}
    identity = Pairing(side, side, {site: site for site in order}, order, [])
    analyzers = side.select_analyzers("tokens")

    def measure(passes: Sequence[Pass], compared: Mapping[str, Sequence[Pass]]) -> dict[str, Tensor]:
        """Compute tables (windows, heads) of tokens.* in `passes`, and of KL of each of `compared` from `recorded`."""
        values, start = sequences.SequenceValues(batches.sequences), 0
        for number, batch in enumerate(batches):
            for site, call in passes[number].calls.items():
                query_key = hide_padding(call, batch.inputs).query_key(site)
                if finite := sequences.finite_heads(query_key):
                    numbers = sequences.sequence_numbers(len(call.query), batch, start)
                    values.measure(query_key.select(finite), analyzers, numbers, len(query_key.heads))
            others = {name: passes[number] for name, passes in compared.items()}
            identity.add_divergences(values, recorded[number], others, batch, start)
            start += batch.size
        return sequences.arrange_by_measure(values.means, side.heads, batches.sequences)

    before = measure(recorded, {})
    types = stored_types(side.loaded.model, [path for path, _ in blocks.later])
    changes = defaultdict[str, list[Tensor]](list)
    for _ in range(draws):
        with move_weights(types, generator):
            originals = list(zip(batches, recorded, strict=True))
            passes = [run_pass(side, batch.inputs, blocks, original) for batch, original in originals]
            block_passes = []
            if blocks.compared:  # each block runs on its input states from before rounding
                block_passes = [
                    run_pass(side, batch.inputs, blocks, original, own_states=False) for batch, original in originals
                ]
        after = measure(passes, {ROWS: passes} | ({OWN_ROWS: block_passes} if blocks.compared else {}))
        if blocks.compared:
            pairs = zip(zip(recorded, block_passes, strict=True), batches, strict=True)
            after[BLOCKS] = torch.cat([compare_blocks(pair, blocks.compared, batch) for pair, batch in pairs])
        for name, values in after.items():
            change = values - before[name] if name in before else values
            changes[name].append(change.nanmean(0))
        add_steps(1)
    return {name: torch.stack(drawn) for name, drawn in changes.items()}
