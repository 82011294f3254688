"""The two models of a comparison: the inspection of each, and the correspondence of their heads."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
from scipy.optimize import linear_sum_assignment
from torch import nn

from attnlens.analyzers.registry import FORMS, KEY_ANGLE, QUERY_ANGLE, measure_sources
from attnlens.maths import linalg
from attnlens.maths.statistics import Design
from attnlens.models import hooks, weights
from attnlens.records import Measure, QueryKey, Site, Windows
from attnlens.report.report import Report
from attnlens.runs.feeding import at_rest
from attnlens.runs.inspect.inspection import Inspection, PreparedRun, SiteFactors
from attnlens.runs.inspect.pipeline import compute, survey
from attnlens.runs.inspect.sequences import finite_heads

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

ALIKE = 0.5
"""Heads count as reordered if each moved head's distance to its partner is below this, and below this share of its
distance to the head in its own place. The distance of unrelated heads is about 1, and that of fine-tuned ones is small:
heads that are merely similar to several others must stay in place."""


def match_heads(first: QueryKey, second: QueryKey) -> tuple[int, ...]:
    """Match the second model's heads to the first's by the distances of their forms; they stay in place if in doubt."""
    # ‖M'_g − M_h‖_F/max(‖M_h‖_F, ‖M'_g‖_F) at equal positions from the factors; 0 if both are 0
    squares, others = (_inner_products(form, form).diagonal() for form in (first, second))
    size = torch.maximum(squares[:, None], others)
    # rounding can make the square of a difference of equal forms negative
    difference = (squares[:, None] + others - 2 * _inner_products(first, second)).clamp(min=0)
    distances = torch.where(size == 0, 0.0, difference / size).sqrt().cpu()
    numbers = torch.arange(len(distances))
    if not bool(distances.isfinite().all()):
        return tuple(range(len(distances)))
    partners = torch.from_numpy(linear_sum_assignment(distances.numpy())[1])
    moved = partners != numbers
    before, after = distances.diagonal()[moved], distances[numbers, partners][moved]
    # strict: equal heads in any order have distance 0 and stay in place
    reordered = bool((after < ALIKE * before).all()) and bool((after < ALIKE).all())
    return tuple((partners if reordered else numbers).tolist())


def _inner_products(first: QueryKey, second: QueryKey) -> Float[Tensor, "heads others"]:
    """Compute ⟨M_h, M'_g⟩_F = s s' tr(W_Qᵀ W_Q' · W_K'ᵀ W_K)."""
    queries, keys = second.query.double(), second.paired_key.double()
    pairs = zip(first.query.double(), first.paired_key.double(), strict=True)
    rows = [((query.mT @ queries) * (key.mT @ keys)).sum((-2, -1)) for query, key in pairs]
    return first.scale * second.scale * torch.stack(rows)


def form_distances(first: QueryKey, second: QueryKey) -> dict[str, Float[Tensor, " heads"]]:
    """Compute the distances of heads' forms; NaN if both M are 0 or a factor is not finite, and 1 if only M is 0."""
    finite = sorted(set(finite_heads(first)) & set(finite_heads(second)))
    table = torch.full((3, len(first.heads)), torch.nan, dtype=torch.float64)
    if finite:
        first, second = first.select(finite), second.select(finite)
        rescaled = replace(second, query=second.query * (second.scale / first.scale), scale=first.scale)
        change, _ = linalg.change(rescaled, first)
        query_angles = linalg.largest_angle(first.query, second.query)
        key_angles = linalg.largest_angle(first.paired_key, second.paired_key)
        rows = change.masked_fill(change.isinf(), 1.0), query_angles, key_angles
        table[:, finite] = torch.stack([values.double().cpu() for values in rows])
    return dict(zip((FORMS, QUERY_ANGLE, KEY_ANGLE), table, strict=True))


Block = tuple[str, nn.Module]  # the path of a block of the model, and the block


@dataclass(frozen=True, kw_only=True)
class ComparedModel(Inspection):
    """One model of a comparison: its inspection, and the results of that."""

    report: Report
    design: Design  # sampling design of the windows
    swaps: hooks.Swaps  # kernels of a model saved with --save, by site

    @classmethod
    def of(cls, run: PreparedRun, swaps: hooks.Swaps) -> ComparedModel:
        """Inspect a model and keep the factors of its weights; with `swaps`, measures of the text get no value."""
        with at_rest(run.loaded.model):
            inspection = survey(run, factors={})
            report, results = compute(inspection)
        report = _remove_token_measures(report) if swaps else report
        parts = {each.name: getattr(inspection, each.name) for each in fields(inspection)}
        return cls(**parts, report=report, design=results.design, swaps=swaps)

    @property
    def heads(self) -> list[tuple[str, int]]:
        """Site and number of each head of the report."""
        return [(head.site, head.head) for head in self.report.heads]

    def without_text(self) -> ComparedModel:
        """Return a copy without batches and windows, so that only its weights are compared."""
        report = self.report.model_copy().with_windows(Windows([], [], {}))
        return replace(self, inputs=None, report=report)

    def factors_of(self, site: Site) -> SiteFactors | None:
        """Return the factors of a site's weights, or why there are none; None if the run did not read weights."""
        return (self.factors or {}).get(site)

    def blocks(self) -> list[Block]:
        """Return the model's blocks that run once per forward pass; none without a text."""
        return hooks.blocks(self.loaded.model, self.batches[0].inputs) if self.batches else []


def _remove_token_measures(report: Report) -> Report:
    reason = "the measure requires the exponential kernel, but this model uses another one"
    missing = Measure(value=None, reason=reason)
    tokens = {name for name, source in measure_sources().items() if source == "tokens"}
    heads = [
        head.model_copy(update={"measures": head.measures | dict.fromkeys(head.measures.keys() & tokens, missing)})
        for head in report.heads
    ]
    return report.model_copy(update={"heads": heads}).with_windows(Windows([], [], {}))


@dataclass(frozen=True)
class Pairing:
    """The correspondence of sites and heads between two models."""

    first: ComparedModel
    second: ComparedModel
    sites: dict[Site, Site]  # second model's site for each site of the first model
    order: dict[Site, tuple[int, ...]]  # second model's head for each head of the first, by the first model's sites
    unmoved: list[Site]  # sites with reordered heads that --heads compares by number all the same

    @classmethod
    def of(cls, first: ComparedModel, second: ComparedModel) -> Pairing:
        """Pair sites in order, and heads by form if forms can be read and all heads are inspected, else by number."""
        sites = dict(zip(first.key_heads, second.key_heads, strict=True))
        order, unmoved = dict[Site, tuple[int, ...]](), list[Site]()
        for site, other in sites.items():
            forms = _forms(first, second, site, other)
            by_number = tuple(range(len(first.key_heads[site])))
            best = match_heads(*forms) if forms else by_number
            all_heads = first.settings.heads is None
            order[site] = best if all_heads else by_number
            unmoved += [site] if best != order[site] else []
        return cls(first, second, sites, order, unmoved)

    def ordered_forms(self, site: Site) -> tuple[QueryKey, QueryKey] | None:
        """Return the forms of both models, with the second's heads in the order of their partners."""
        forms = _forms(self.first, self.second, site, self.sites[site])
        if forms is None:
            return None
        return forms[0], replace(forms[1].select(self.order[site]), heads=forms[0].heads)

    @property
    def partners(self) -> torch.Tensor:
        """Index of each head's partner in the second report, in the order of the first report."""
        places = {name: place for place, name in enumerate(self.second.heads)}
        pairs = {site.name: (other.name, self.order[site]) for site, other in self.sites.items()}
        partners = [(pairs[site][0], pairs[site][1][head]) for site, head in self.first.heads]
        return torch.tensor([places[partner] for partner in partners])


def _forms(first: ComparedModel, second: ComparedModel, site: Site, other: Site) -> tuple[QueryKey, QueryKey] | None:
    """Return the forms of both models, heads in their own order; None if one cannot be read or shapes differ."""
    factors, other_factors = first.factors_of(site), second.factors_of(other)
    if not isinstance(factors, weights.Factors) or not isinstance(other_factors, weights.Factors):
        return None
    pair = factors.query_key, other_factors.query_key
    same = pair[0].query.shape == pair[1].query.shape and pair[0].paired_key.shape == pair[1].paired_key.shape
    return pair if same else None


def correspond(first: ComparedModel, second: ComparedModel) -> bool:
    """Return True if the models have the same sites with equal numbers of heads and key heads; masks may differ."""
    shapes, other_shapes = (
        [(each.site.path, each.site.ordinal, each.call.query.shape[1], each.call.group) for each in side.reached]
        for side in (first, second)
    )
    return shapes == other_shapes


def same_input(first: ComparedModel, second: ComparedModel) -> bool:
    """Return True if both models read the same inputs, window by window."""
    if len(first.batches) != len(second.batches):
        return False
    pairs = [(batch.inputs, other.inputs) for batch, other in zip(first.batches, second.batches, strict=True)]
    return all(
        inputs.keys() == others.keys() and all(torch.equal(inputs[name], others[name]) for name in inputs)
        for inputs, others in pairs
    )
