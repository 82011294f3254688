"""Compare two models whose weights are left in files, layer by layer: forms, measures of weights, and causes."""

from __future__ import annotations

import torch

from attnlens.analyzers.registry import FORMS, KEY_ANGLE, QUERY_ANGLE
from attnlens.models.weights import Factors
from attnlens.records import Comparison, HeadChange, HeadId, MeasureChange, Relation, Site
from attnlens.report.report import Report
from attnlens.runs.compare.diagnosis import Sides, describe_models
from attnlens.runs.compare.sides import form_distances
from attnlens.runs.compare.significance import build_rows, finite_or_none
from attnlens.runs.inspect.inspection import SiteFactors

UNTESTED = "the effect of rounding is not simulated for weights that are read from files"
NOTE = (
    "The weights were read from files, one layer at a time: attention on text is not compared, each head is compared "
    "with the head of the same number, and changes have no p-value."
)


def compare_stored(sides: Sides, reports: tuple[Report, Report], fdr: float) -> Comparison:
    """Compare two inspected models site by site, while at most one layer of each model is in memory."""
    sites = {first.site: second.site for first, second in zip(sides[0].site_calls, sides[1].site_calls, strict=True)}
    distances: dict[tuple[str, int, str], float | None] = {}
    relations: dict[tuple[str, int], Relation | None] = {}

    def visit(site: Site, factors: tuple[SiteFactors, SiteFactors]) -> None:
        """Record the distances between both models' forms at one site, and which heads are identical."""
        if not isinstance(factors[0], Factors) or not isinstance(factors[1], Factors):
            return
        first, second = factors[0].query_key, factors[1].query_key
        if first.query.shape != second.query.shape or first.paired_key.shape != second.paired_key.shape:
            return
        for name, values in form_distances(first, second).items():
            for head, value in enumerate(values):
                distances[site.name, head, name] = finite_or_none(value)
        pairs = (first.query, second.query), (first.paired_key, second.paired_key)
        for head in range(len(first.heads)):
            same = first.scale == second.scale and all(torch.equal(one[head], other[head]) for one, other in pairs)
            relations[site.name, head] = "identical" if same else None

    described = describe_models(sides, sites, {}, visit)
    heads, others = reports[0].heads, reports[1].heads
    names = [name for name in reports[0].measure_names() if name in reports[1].measure_names()]
    rows = [
        MeasureChange(layer=head.layer, head=head.head, measure=name, delta=delta, reason=UNTESTED)
        for name in (FORMS, QUERY_ANGLE, KEY_ANGLE)
        for head in heads
        if (delta := distances.get((head.site, head.head, name))) is not None
    ]
    rows += build_rows((heads, others), dict.fromkeys(names), fdr, UNTESTED)
    ids = [head.model_dump(include=set(HeadId.model_fields)) for head in heads]
    changes = [(fields, relations.get((fields["site"], fields["head"]))) for fields in ids]
    return Comparison(
        base=reports[0].model,
        paired=True,
        fdr=fdr,
        heads=[
            HeadChange(**fields, partner=fields["head"], relation=relation, reason=None if relation else UNTESTED)
            for fields, relation in changes
        ],
        rows=rows,
        notes=[NOTE],
        **described,
    )
