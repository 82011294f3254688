"""Build the rows of a comparison, and describe the relation of forms and of whole models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from attnlens.errors import AttnlensError, UnreadableError
from attnlens.maths.statistics import Design, adjusted
from attnlens.models import hooks, texts
from attnlens.models.texts.targets import feed
from attnlens.records import (
    BlockChange,
    Comparison,
    Head,
    HeadChange,
    MeasureChange,
    ModelInfo,
    Outcome,
    QueryKey,
    Relation,
    Site,
)
from attnlens.registry import FORMS, KEY_ANGLE, OWN_ROWS, QUERY_ANGLE, ROWS
from attnlens.runs import checks
from attnlens.runs.checks import predictions, refuse_initialised
from attnlens.runs.compare import draws, significance
from attnlens.runs.compare.draws import (
    BLOCKS,
    add_distances,
    arrange,
    beside,
    of_blocks,
    record,
    site_type,
    stored_type,
)
from attnlens.runs.compare.sides import Block, Pairing, distances
from attnlens.runs.compare.significance import Judged, Rounding, change, is_category, named_rows, number_of
from attnlens.runs.differences import Differences
from attnlens.runs.inspect.sequences import SequenceValues
from attnlens.runs.outputs import run, tokens_in
from attnlens.runs.progress import Progress, Tell
from attnlens.wording import counted, listed

SURE = 1e-3
"""p below which a form counts as changed: rounding alone gives such a change in one of a thousand heads."""
ROUNDED = 4.0
"""Maximum relative difference of factors, in spacings of their type, that counts as rounding."""

LOST = 1e-3
"""‖ΔM‖/‖M‖ at different positions above which the rotation counts as acting on other coordinates."""


def relations(pairing: Pairing, forms: Judged | None) -> list[HeadChange]:
    """Return for each head of the first report its partner, and the relation of their forms."""
    places = {(head.layer, head.head): place for place, head in enumerate(pairing.first.report.heads)}
    found = []
    for site, other in pairing.sites.items():
        pair = pairing.ordered_forms(site)
        for head, key_head in enumerate(pairing.key_of(site)):
            if (site.layer, head) not in places:
                continue
            fields: dict[str, str] = {}
            if pair is None or forms is None:
                fields["reason"] = _explain_unread(pairing, site, other)
            else:
                relation = _relation(pairing, pair, head, float(forms.p[places[site.layer, head]]))
                fields |= {"reason": "a form is 0 or not finite"} if relation is None else {"relation": relation}
            found.append(
                HeadChange(
                    site=site.name,
                    layer=site.layer,
                    head=head,
                    kv_head=key_head,
                    part=site.part,
                    partner=pairing.order[site][head],
                    **fields,
                )
            )
    return found


def _explain_unread(pairing: Pairing, site: Site, other: Site) -> str:
    """Explain why the forms of a site cannot be compared."""
    for which, side, own in (("first", pairing.first, site), ("second", pairing.second, other)):
        read = side.factors(own)
        if isinstance(read, UnreadableError):
            return f"the {which} model's form can't be read: {read.problem}"
    return "the forms have other sizes"


def _relation(pairing: Pairing, pair: tuple[QueryKey, QueryKey], head: int, p: float) -> Relation | None:
    first, second = pair
    sides = [(first.query[head], second.query[head]), (first.paired_key[head], second.paired_key[head])]
    if first.scale == second.scale and all(torch.equal(*side) for side in sides):
        return "identical"
    if p < SURE:
        return "changed"
    if first.scale == second.scale and pairing.order[first.site] == tuple(range(len(first.heads))):
        # factors computed from equal weights can differ by rounding
        modules = [side.loaded.model.get_submodule(first.site.path) for side in (pairing.first, pairing.second)]
        own, others = (dict(module.named_parameters()) for module in modules)
        if own and own.keys() == others.keys() and all(_equal(own[name], others[name]) for name in own):
            return "identical"
    if p != p:
        return None
    sites = (pairing.first, first.site), (pairing.second, pairing.sites[first.site])
    spacing = max(torch.finfo(site_type(side.loaded.model, site)).eps for side, site in sites)
    close = all(_apart(*side) <= ROUNDED * spacing for side in sides)
    return "rounding" if close and first.scale == second.scale else "same form"


def _apart(one: Tensor, other: Tensor) -> float:
    """Compute ‖W' − W‖_F/‖W‖_F; 0 if both are 0, and 1 if only W is."""
    size = float(one.norm())
    return float((other - one).norm()) / size if size else float(other.norm() > 0)


def told(pairing: Pairing, heads: Sequence[HeadChange], rows: Sequence[MeasureChange]) -> list[str]:
    """Return notes about the models as a whole, one sentence each."""
    own = {(row.layer, row.head): row.beyond_rounding for row in rows if row.measure == OWN_ROWS}
    sight = [
        f"Layer {first.layer} sees otherwise: {first.part} in the first model, {second.part} in the second."
        for first, second in pairing.sites.items()
        if first.part != second.part
    ]
    return [*_of_weights(pairing), *sight, *_order_notes(pairing, heads), *_of_forms(pairing, heads, own)]


def _of_weights(pairing: Pairing) -> Iterator[str]:
    """Report which tensors differ, and whether the second model's are the first model's after rounding."""
    first, second = (dict(side.loaded.model.named_parameters()) for side in (pairing.first, pairing.second))
    alone = sorted(first.keys() ^ second.keys())
    if alone:
        yield f"{counted(len(alone), 'tensor')} of one model alone: {listed(alone)}."
    both = [name for name in first if name in second]
    different = [name for name in both if not _equal(first[name], second[name])]
    if not different:
        yield "All weights that both models have are the same numbers."
        return
    kinds = {name: stored_type(second[name]) for name in different}
    if not alone and all(
        _equal(first[name].to(kind).to(second[name].dtype), second[name]) for name, kind in kinds.items()
    ):
        said = listed(sorted({str(kind).removeprefix("torch.") for kind in kinds.values()}))
        yield f"The second model's weights are the first one's rounded to {said}; nothing else differs."
        return
    yield f"{len(different)} of {counted(len(both), 'tensor')} differ: {listed(different)}."


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other.to(one.device, one.dtype))


def _order_notes(pairing: Pairing, heads: Sequence[HeadChange]) -> Iterator[str]:
    for site in pairing.unmoved:
        yield (
            f"Layer {site.layer}: the second model has its heads in another order, and --heads compares them by their "
            "numbers; without it each is compared with its partner."
        )
    moved = Counter(head.layer for head in heads if head.partner != head.head)
    for layer, count in moved.items():
        yield (
            f"Layer {layer}: the second model has {counted(count, 'head')} in another order; each is compared with its "
            "partner."
        )


def _of_forms(
    pairing: Pairing, heads: Sequence[HeadChange], own: Mapping[tuple[int, int], bool | None]
) -> Iterator[str]:
    """Describe the effect of other factors of the same M; `own`: whether the KL of a head alone exceeds rounding."""
    same = {(head.layer, head.head) for head in heads if head.relation == "same form"}
    different = {place for place in same if own.get(place)}
    turned = {place for place in _turned_heads(pairing, same) if own.get(place) is not False}
    gauge = {place for place in same - turned if own.get(place) is False}
    product = "have the same product M but different attention"
    if turned:
        yield (
            f"W_Q and W_K of {counted(len(turned), 'head')} {product}: the rotation acts on permuted rows (a lost RoPE "
            f"permutation?): {_format_heads(turned)}."
        )
    if different - turned:
        yield (
            f"W_Q and W_K of {counted(len(different - turned), 'head')} {product}: biases, norms or the mask act "
            f"differently: {_format_heads(different - turned)}."
        )
    if gauge:
        yield (
            f"Of {counted(len(gauge), 'head')} W_Q and W_K are others with the same product M within rounding (another "
            "gauge): attention is the same."
        )
    unknown = same - turned - different - gauge
    if unknown:
        yield (
            f"Of {counted(len(unknown), 'head')} W_Q and W_K are others with the same product M within rounding; "
            "attention was not compared."
        )


def _format_heads(heads: Iterable[tuple[int, int]]) -> str:
    return listed([f"{layer}.{head}" for layer, head in sorted(heads)])


def _turned_heads(pairing: Pairing, heads: Collection[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield heads whose M agrees only at equal positions, because the rotation acts on other coordinates."""
    for site in pairing.sites:
        pair = pairing.ordered_forms(site) if any(layer == site.layer for layer, _ in heads) else None
        rotation = None if pair is None else pair[0].rotation
        if pair is None or rotation is None or len(rotation.angles) < 2:
            continue
        far = replace(rotation, angles=rotation.angles[-1:].expand(pair[0].query.shape[-2], -1))
        first, second = (replace(form, query=far.turned(form.query.double())) for form in pair)
        near, apart = (distances(*forms)[FORMS] for forms in (pair, (first, second)))
        for head in range(len(apart)):
            if (site.layer, head) in heads and apart[head] > max(10 * float(near[head]), LOST):
                yield site.layer, head


OTHER_PREDICTIONS = "Predictions are not compared: the models predict other things"


def outcome(pairing: Pairing, design: Design) -> tuple[Outcome | None, list[str]]:
    """Compare loss, KL, agreement and hidden states of both models; return the outcome or None, and the reasons."""
    sides = pairing.first, pairing.second
    fed = pairing.first.inspection.inputs
    if fed is None:
        return None, []
    inputs = fed.batches[0].inputs
    try:
        tasks = [checks.task_on(side.loaded, inputs) for side in sides]
        for side, task in zip(sides, tasks, strict=True):
            refuse_initialised(side.loaded, texts.first(inputs, 2), predictions(task))
        batches = feed(sides[0].loaded, fed, tasks[0], pairing.first.inspection.settings.seed)
    except AttnlensError as error:
        return None, [f"Predictions are not compared: {error.problem}"]
    if tasks[0] != tasks[1]:
        return None, [f"{OTHER_PREDICTIONS} ({tasks[0]}, {tasks[1]})."]
    found = Differences(tasks[0], fed.made_up, design)
    for one in batches:
        passes = []
        for side in sides:
            model = side.loaded.model
            with hooks.replace(model, side.inspection.all_sites, side.swaps) if side.swaps else nullcontext():
                passes.append(run(model, one, tasks[0]))
        own, new = passes
        classes = {None if made.logits is None else made.logits.shape[-1] for made in passes}
        states = {None if made.hidden is None else made.hidden.shape[-1] for made in passes}
        if len(classes) > 1 or len(states) > 1:
            return None, [f"{OTHER_PREDICTIONS}, or their states have other sizes."]
        found.add(own, new, one.targets, tokens_in(one))
    names = list(dict.fromkeys(fed.parts))
    return Outcome(**found.outcome(pairing.first.inspection.settings.seed, names)), []


@dataclass
class Changes:
    """The changes between two models with corresponding heads."""

    pairing: Pairing
    fdr: float
    progress: Progress

    def found(self, base: ModelInfo) -> Comparison:
        """Build the comparison: all rows, relations of heads, blocks, predictions and notes."""
        rounding, apart = self._rounding(), self._of_forms() | (self._of_rows() if self.pairing.first.batches else {})
        judged = self._test_measures(rounding, apart)
        rows = named_rows(self.heads, judged, self.fdr, draws.UNDRAWN)
        heads = relations(self.pairing, judged.get(FORMS))
        predicted, why = outcome(self.pairing, self.design)
        return Comparison(
            base=base,
            paired=True,
            fdr=self.fdr,
            tests=sum(row.p is not None for row in rows),
            named=sum(row.named for row in rows),
            heads=heads,
            rows=rows,
            blocks=self._test_blocks(apart, rounding),
            outcome=predicted,
            notes=[*told(self.pairing, heads, rows), *why],
        )

    @property
    def design(self) -> Design:
        """Sampling design of the windows."""
        return self.pairing.first.design

    @cached_property
    def heads(self) -> tuple[list[Head], list[Head]]:
        """Heads of the first report, and their partners in the second."""
        first, second = self.pairing.first.report.heads, self.pairing.second.report.heads
        return first, [second[place] for place in self.pairing.partners.tolist()]

    @cached_property
    def blocks(self) -> tuple[list[Block], list[Block]]:
        """Blocks of both models; empty if their paths differ."""
        found = self.pairing.first.blocks(), self.pairing.second.blocks()
        paths = [[path for path, _ in each] for each in found]
        return found if paths[0] == paths[1] else ([], [])

    def _test_blocks(self, apart: Mapping[str, Tensor], rounding: Mapping[str, Rounding]) -> list[BlockChange]:
        """Test the change of each block's output for the first model's input states."""
        if BLOCKS not in apart:
            return []
        judged = significance.sampled(apart[BLOCKS], self.design, rounding.get(BLOCKS), self.seed)
        q = adjusted(judged.p).tolist()
        sites = self.pairing.sites
        return [
            BlockChange(
                path=path,
                layers=[site.layer for site in sites if site.path.startswith(f"{path}.")],
                change=number_of(judged.delta[place]),
                rounding=None if judged.rounding is None else number_of(judged.rounding.size[place]),
                p=number_of(judged.p[place]),
                q=number_of(q[place]),
                named=q[place] <= self.fdr,
            )
            for place, (path, _) in enumerate(self.blocks[0])
        ]

    def _test_measures(self, rounding: Mapping[str, Rounding], apart: Mapping[str, Tensor]) -> dict[str, Judged | None]:
        """Test the changes of each measure; None for categories and measures without drawn rounding."""
        found: dict[str, Judged | None] = {}
        for name in (FORMS, QUERY_ANGLE, KEY_ANGLE):
            if name in apart:
                found[name] = significance.measured(apart[name], rounding[name])
        windows = [side.report.windows for side in (self.pairing.first, self.pairing.second)]
        partners = self.pairing.partners
        for name in (OWN_ROWS, ROWS):
            if name in apart:
                found[name] = significance.sampled(apart[name], self.design, rounding.get(name), self.seed)
        for name in self.pairing.first.report.measure_names():
            read = [None if side is None else side.values.get(name) for side in windows]
            if read[0] is not None and read[1] is not None:
                difference = read[1][:, partners] - read[0]
                found[name] = significance.sampled(difference, self.design, rounding.get(name), self.seed)
            elif name not in rounding or is_category(self.heads, name):
                found[name] = None
            else:  # measures of weights: p is that of rounding
                before, after = change(self.heads, name)
                found[name] = significance.measured(after - before, rounding[name])
        return found

    @property
    def seed(self) -> int:
        """Seed of everything random."""
        return self.pairing.first.inspection.settings.seed

    def _of_forms(self) -> dict[str, Tensor]:
        """Compute the distances between forms, (heads,), by measure."""
        places = {(head.layer, head.head): place for place, head in enumerate(self.heads[0])}
        found: dict[str, Tensor] = {}
        for site in self.pairing.sites:
            forms = self.pairing.ordered_forms(site)
            for name, values in distances(*forms).items() if forms is not None else ():
                every = found.setdefault(name, torch.full((len(places),), torch.nan, dtype=torch.float64))
                for head, value in enumerate(values.tolist()):
                    if (site.layer, head) in places:
                        every[places[site.layer, head]] = value
        return found

    def _of_rows(self) -> dict[str, Tensor]:
        """Compute the distances between attention rows, (windows, heads), and block outputs, (windows, blocks)."""
        first, second = self.pairing.first, self.pairing.second
        values, start = SequenceValues(self.design.count), 0
        sites = {other: site for site, other in self.pairing.sites.items()}
        total, moved = self.design.count, list[Tensor]()
        for batch in first.batches:
            self.progress("attention rows", start, total)
            recorded = record(first, batch.inputs, self.blocks[0])
            passed = {ROWS: beside(recorded, second, sites, batch.inputs, self.pairing.order)}
            if self.blocks[1]:
                passed[OWN_ROWS] = beside(recorded, second, sites, batch.inputs, self.pairing.order, self.blocks[1])
                moved.append(of_blocks(passed[OWN_ROWS].blocks, self.blocks[0], batch))
            for name, found in passed.items():
                for site, distances_ in found.rows.items():
                    add_distances(values, site, name, distances_, batch, start)
            start += batch.size
        self.progress("attention rows", total, total)
        return arrange(values, first) | ({BLOCKS: torch.cat(moved)} if moved else {})

    def _rounding(self) -> dict[str, Rounding]:
        """Estimate the effect of rounding both models on each measure, from draws."""
        drawn: list[dict[str, list[Tensor]]] = []
        for number, side in enumerate((self.pairing.first, self.pairing.second)):
            generator = torch.Generator().manual_seed(self.seed + number)
            found = dict(draws.of_weights(side, generator))
            if side.batches:
                cut = replace(side.run.cut, sequences=min(draws.FEW, self.design.count))
                blocks = self.blocks[number]
                found |= draws.of_tokens(side, cut, blocks, generator, self._rounding_progress(number))
            drawn.append(found)
        partners = self.pairing.partners
        combined = {}
        for name in drawn[0].keys() & drawn[1].keys():
            first, second = (torch.stack(each[name]) for each in drawn)
            second = second if name == BLOCKS else second[:, partners]
            combined[name] = significance.combined(first, second, squared=name in (ROWS, OWN_ROWS))
        return combined

    def _rounding_progress(self, number: int) -> Tell:
        done = number * draws.DRAWS

        def tell(steps: int) -> None:
            nonlocal done
            done += steps
            self.progress("rounding", done, 2 * draws.DRAWS)

        return tell
