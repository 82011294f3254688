"""The two models of a comparison: the inspection of each, and the correspondence of their heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from scipy.optimize import linear_sum_assignment
from torch import nn

from attnlens.maths import linalg
from attnlens.maths.statistics import Design
from attnlens.models import hooks, texts, weights
from attnlens.models.loading import Loaded
from attnlens.records import Head, Measure, QueryKey, Report, Site, Windows
from attnlens.registry import FORMS, KEY_ANGLE, QUERY_ANGLE, measure_sources
from attnlens.runs.in_memory import at_rest
from attnlens.runs.inspect.assembly import compute
from attnlens.runs.inspect.inspection import Inspection
from attnlens.runs.inspect.pipeline import PreparedRun
from attnlens.runs.inspect.sequences import finite_heads
from attnlens.runs.inspect.units import SiteFactors

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

FORM_DISTANCES = (FORMS, QUERY_ANGLE, KEY_ANGLE)
"""Measures of the distance between two forms."""
ALIKE = 0.5
"""Heads count as reordered if each moved head's distance to its partner is below this, and below this share of its
distance to the head in its own place."""


def place(first: QueryKey, second: QueryKey) -> tuple[int, ...]:
    """Match the heads of the second model to those of the first at one site, by the distances between forms.

    Heads are reordered only if every moved head is much more similar to its partner than to the head in its own place.
    """
    distances = distances_between(first, second)
    if not bool(distances.isfinite().all()):
        return tuple(range(len(distances)))
    _, order = linear_sum_assignment(distances.numpy())
    own = distances.diagonal()
    best = distances[torch.arange(len(order)), torch.from_numpy(order)]
    moved = torch.from_numpy(order) != torch.arange(len(order))
    if bool((best[moved] < ALIKE * own[moved]).all()) and bool((best[moved] < ALIKE).all()):
        return tuple(order.tolist())
    return tuple(range(len(order)))


def distances_between(first: QueryKey, second: QueryKey) -> Float[Tensor, "heads others"]:
    """Compute ‖M'_g − M_h‖_F/max(‖M_h‖_F, ‖M'_g‖_F) at equal positions from the factors; 0 if both are 0."""
    squares = torch.stack([_inner_products(one, one).diagonal() for one in (first, second)])
    cross = _inner_products(first, second)
    size = torch.maximum(squares[0][:, None], squares[1])
    apart = (squares[0][:, None] + squares[1] - 2 * cross).clamp(min=0)
    return torch.where(size == 0, 0.0, apart / size).sqrt().cpu()


def _inner_products(one: QueryKey, other: QueryKey) -> Float[Tensor, "heads others"]:
    """Compute ⟨M_h, M'_g⟩_F = s s' tr(W_Qᵀ W_Q' · W_K'ᵀ W_K)."""
    mine, others = ((each.query.double(), each.paired_key.double()) for each in (one, other))
    rows = [((query.mT @ others[0]) * (key.mT @ others[1])).sum((-2, -1)) for query, key in zip(*mine, strict=True)]
    return one.scale * other.scale * torch.stack(rows)


def distances(first: QueryKey, second: QueryKey) -> dict[str, Float[Tensor, " heads"]]:
    """Compute the distances between corresponding heads' forms; NaN if both M are 0 or a factor is not finite.

    If only M is 0, all of M' is new and the change is 1.
    """
    fine = sorted(set(finite_heads(first)) & set(finite_heads(second)))
    found = {name: torch.full((len(first.heads),), torch.nan, dtype=torch.float64) for name in FORM_DISTANCES}
    if not fine:
        return found
    first, second = first.select(fine), second.select(fine)
    moved = replace(second, query=second.query * (second.scale / first.scale), scale=first.scale)
    change, _ = linalg.change(moved, first)
    if first.key_of == second.key_of:  # computed once per key head
        read = sorted(set(first.key_of))
        each = linalg.largest_angle(first.key[read], second.key[read])
        keys = each[[read.index(number) for number in first.key_of]]
    else:
        keys = linalg.largest_angle(first.paired_key, second.paired_key)
    angles = linalg.largest_angle(first.query, second.query), keys
    for name, values in zip(FORM_DISTANCES, (change.masked_fill(change.isinf(), 1.0), *angles), strict=True):
        found[name][fine] = values.double().cpu()
    return found


def in_order(second: QueryKey, order: Sequence[int]) -> QueryKey:
    """Reorder the second model's heads like the first model's, each with its own copy of its key head."""
    return replace(second.select(order), heads=tuple(range(len(order))))


OTHER_KERNEL = "its attention is of another kernel, and the measure is of the exponential one"
Block = tuple[str, nn.Module]
"""The path of a block of the model, and the block."""


@dataclass(frozen=True)
class ComparedModel:
    """One model of a comparison with its inspection."""

    run: PreparedRun
    inspection: Inspection
    report: Report
    design: Design
    """Sampling design of the windows."""
    swaps: hooks.Swaps
    """Kernels of a model saved with --save, by site."""

    @classmethod
    def of(cls, run: PreparedRun, swaps: hooks.Swaps | None = None) -> ComparedModel:
        """Inspect a model and keep the factors of its weights; with `swaps`, measures of the text get no value."""
        with at_rest(run.loaded.model):
            inspection = run.survey(factors={})
            outcome = compute(inspection)
        report = _remove_token_measures(outcome.report) if swaps else outcome.report
        return cls(run, inspection, report, outcome.results.design, swaps or {})

    @property
    def loaded(self) -> Loaded:
        """The loaded model."""
        return self.run.loaded

    @property
    def sites(self) -> tuple[Site, ...]:
        """Inspected sites, in the order of layers."""
        return tuple(self.inspection.key_heads)

    @property
    def batches(self) -> tuple[texts.Batch, ...]:
        """Batches that the model reads; empty if only weights were inspected."""
        return self.inspection.batches

    def without_text(self) -> ComparedModel:
        """Return a copy without batches and windows, of which only the weights are compared."""
        report = self.report.model_copy().with_windows(Windows([], [], {}))
        return replace(self, inspection=replace(self.inspection, inputs=None), report=report)

    def factors(self, site: Site) -> SiteFactors | None:
        """Return the factors of a site's weights, or why there are none; None if the run did not read weights."""
        return (self.inspection.reader.factors or {}).get(site)

    def blocks(self) -> list[Block]:
        """Return the model's blocks that run once per forward pass; none without a text."""
        return hooks.blocks(self.loaded.model, self.batches[0].inputs) if self.batches else []


def _remove_token_measures(report: Report) -> Report:
    """Return the report with the values of token measures removed."""
    nothing = Measure(value=None, reason=OTHER_KERNEL)
    known = measure_sources()

    def bare(head: Head) -> Head:
        read = {name: nothing if known.get(name) == "tokens" else one for name, one in head.measures.items()}
        return head.model_copy(update={"measures": read})

    heads = list(map(bare, report.heads))
    return report.model_copy(update={"heads": heads}).with_windows(Windows([], [], {}))


@dataclass(frozen=True)
class Pairing:
    """The correspondence of sites and heads between two models."""

    first: ComparedModel
    second: ComparedModel
    sites: dict[Site, Site]  # second model's site for each site of the first model
    order: dict[Site, tuple[int, ...]] = field(default_factory=dict)
    """Second model's head for each head of the first model, by the first model's sites."""
    unmoved: list[Site] = field(default_factory=list)
    """Sites with reordered heads that are compared by number all the same, because only some heads were requested."""

    @classmethod
    def of(cls, first: ComparedModel, second: ComparedModel) -> Pairing:
        """Pair sites in order, and heads by form if forms can be read and all heads are inspected, else by number."""
        sites = dict(zip(first.sites, second.sites, strict=True))
        found = cls(first, second, sites)
        for site in sites:
            forms = found.forms(site)
            own = tuple(range(len(found.key_of(site))))
            best = place(*forms) if forms else own
            whole = first.inspection.settings.heads is None
            found.order[site] = best if whole else own
            if best != own and not whole:
                found.unmoved.append(site)
        return found

    def forms(self, site: Site) -> tuple[QueryKey, QueryKey] | None:
        """Return the forms of both models, heads in their own order; None if one cannot be read or shapes differ."""
        one, other = self.first.factors(site), self.second.factors(self.sites[site])
        if not isinstance(one, weights.Factors) or not isinstance(other, weights.Factors):
            return None
        pair = one.query_key, other.query_key
        same = pair[0].query.shape == pair[1].query.shape and pair[0].paired_key.shape == pair[1].paired_key.shape
        return pair if same else None

    def ordered_forms(self, site: Site) -> tuple[QueryKey, QueryKey] | None:
        """Return the forms of both models, with the second's heads in the order of their partners."""
        forms = self.forms(site)
        return None if forms is None else (forms[0], in_order(forms[1], self.order[site]))

    def key_of(self, site: Site) -> list[int]:
        """Return the key head of each query head of the first model."""
        return self.first.inspection.key_heads[site]

    @property
    def partners(self) -> torch.Tensor:
        """Index of each head's partner in the second report, in the order of the first report."""
        places = {(head.layer, head.head): place for place, head in enumerate(self.second.report.heads)}
        layers = {site.layer: self.order[site] for site in self.sites}
        return torch.tensor([places[head.layer, layers[head.layer][head.head]] for head in self.first.report.heads])


def correspond(first: ComparedModel, second: ComparedModel) -> bool:
    """Return True if the models have the same sites with equal numbers of heads and key heads; masks may differ."""
    shapes = [
        [(one.site.path, one.site.ordinal, one.call.query.shape[1], one.call.group) for one in side.inspection.reached]
        for side in (first, second)
    ]
    return shapes[0] == shapes[1]


def same_input(first: ComparedModel, second: ComparedModel) -> bool:
    """Return True if both models were fed the same inputs, window by window."""
    pairs = zip(first.batches, second.batches, strict=False)
    return len(first.batches) == len(second.batches) and all(
        one.inputs.keys() == other.inputs.keys()
        and all(torch.equal(one.inputs[name], other.inputs[name]) for name in one.inputs)
        for one, other in pairs
    )
