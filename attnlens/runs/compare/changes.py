"""Build the rows of a comparison, and describe the relation of forms and of whole models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from attnlens.analyzers.registry import FORMS, KEY_ANGLE, OWN_ROWS, QUERY_ANGLE, ROWS
from attnlens.errors import AttnlensError, UnreadableError
from attnlens.maths.statistics import Design, adjust_p_values
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
from attnlens.runs import checks
from attnlens.runs.checks import predictions, refuse_initialised
from attnlens.runs.compare import draws, significance
from attnlens.runs.compare.draws import BLOCKS, add_distances, arrange_blocks, compare_pass, record_pass
from attnlens.runs.compare.sides import Block, Pairing, form_distances
from attnlens.runs.compare.significance import ChangeTest, Rounding, build_rows, field_values, is_category, number_of
from attnlens.runs.differences import Differences
from attnlens.runs.inspect.sequences import SequenceValues, arrange_by_measure
from attnlens.runs.outputs import run, tokens_in
from attnlens.runs.progress import Progress, telling
from attnlens.wording import format_count, join_items

CHANGED_P = 1e-3
"""p below which a form counts as changed: rounding alone gives such a change in one of a thousand heads."""
ROUNDING_SPACINGS = 4.0
"""Maximum relative difference of factors, in spacings of their type, that counts as rounding: a number is rounded a few
times, when it is stored, loaded and multiplied."""
ROTATION_CHANGE = 1e-3  # ‖ΔM‖/‖M‖ at different positions above which the rotation counts as acting on other coordinates
NEAR_FACTOR = 10  # that change must also be this many times the one at equal positions, which rounding explains


def relate_heads(pairing: Pairing, forms: ChangeTest | None) -> list[HeadChange]:
    """For each head of the first report, return its counterpart and the relation between their forms."""
    places = {name: place for place, name in enumerate(pairing.first.heads)}
    changes = []
    for site, other in pairing.sites.items():
        pair = pairing.ordered_forms(site)
        for head, key_head in enumerate(pairing.first.inspection.key_heads[site]):
            if (site.name, head) not in places:
                continue
            relation, reason = None, None
            if pair is None or forms is None:
                reason = _explain_unread(pairing, site, other)
            elif (relation := _relation(pairing, pair, head, float(forms.p[places[site.name, head]]))) is None:
                reason = "a form is 0 or not finite"
            place = {"site": site.name, "layer": site.layer, "head": head, "kv_head": key_head, "part": site.part}
            partner = pairing.order[site][head]
            changes.append(
                HeadChange.model_validate(place | {"partner": partner, "relation": relation, "reason": reason})
            )
    return changes


def _explain_unread(pairing: Pairing, site: Site, other: Site) -> str:
    """Explain why the forms of a site cannot be compared."""
    for which, side, place in (("first", pairing.first, site), ("second", pairing.second, other)):
        read = side.factors(place)
        if isinstance(read, UnreadableError):
            return f"the form M of the {which} model can't be computed: {read.problem}"
    return "the forms have different sizes"


def _relation(pairing: Pairing, pair: tuple[QueryKey, QueryKey], head: int, p: float) -> Relation | None:
    first, second = pair
    sides = [(first.query[head], second.query[head]), (first.paired_key[head], second.paired_key[head])]
    if first.scale == second.scale and all(torch.equal(*side) for side in sides):
        return "identical"
    if p < CHANGED_P:
        return "changed"
    if first.scale == second.scale and pairing.order[first.site] == tuple(range(len(first.heads))):
        # factors computed from equal weights can differ by rounding
        modules = [side.loaded.model.get_submodule(first.site.path) for side in (pairing.first, pairing.second)]
        tensors, other_tensors = (dict(module.named_parameters()) for module in modules)
        if (
            tensors
            and tensors.keys() == other_tensors.keys()
            and all(_equal(tensors[name], other_tensors[name]) for name in tensors)
        ):
            return "identical"
    if p != p:
        return None
    sites = (pairing.first, first.site), (pairing.second, pairing.sites[first.site])
    spacing = max(torch.finfo(draws.site_type(side.loaded.model, site)).eps for side, site in sites)
    close = all(_relative_change(*side) <= ROUNDING_SPACINGS * spacing for side in sides)
    return "rounding" if close and first.scale == second.scale else "same form"


def _relative_change(first: Tensor, second: Tensor) -> float:
    """Compute ‖W' − W‖_F/‖W‖_F; 0 if both are 0, and 1 if only W is."""
    size = float(first.norm())
    return float((second - first).norm()) / size if size else float(second.norm() > 0)


def describe(pairing: Pairing, heads: Sequence[HeadChange], rows: Sequence[MeasureChange]) -> list[str]:
    """Return notes about the models as a whole, one sentence each."""
    beyond_rounding = {(row.layer, row.head): row.beyond_rounding for row in rows if row.measure == OWN_ROWS}
    masks = [
        f"Layer {first.layer} has a different mask: {first.part} in the first model, {second.part} in the second."
        for first, second in pairing.sites.items()
        if first.part != second.part
    ]
    orders, forms = _order_notes(pairing, heads), _form_notes(pairing, heads, beyond_rounding)
    return [*_weight_notes(pairing), *masks, *orders, *forms]


def _weight_notes(pairing: Pairing) -> Iterator[str]:
    """Report which tensors differ, and whether the second model's are the first model's after rounding."""
    first, second = (dict(side.loaded.model.named_parameters()) for side in (pairing.first, pairing.second))
    alone = sorted(first.keys() ^ second.keys())
    if alone:
        yield f"{format_count(len(alone), 'tensor')} in only one of the models: {join_items(alone)}."
    common = [name for name in first if name in second]
    different = [name for name in common if not _equal(first[name], second[name])]
    if not different:
        yield "All weights that both models have are identical."
        return
    kinds = {name: draws.stored_type(second[name]) for name in different}
    if not alone and all(
        _equal(first[name].to(kind).to(second[name].dtype), second[name]) for name, kind in kinds.items()
    ):
        types = join_items(sorted({str(kind).removeprefix("torch.") for kind in kinds.values()}))
        yield f"The second model's weights are those of the first rounded to {types}; nothing else differs."
        return
    yield f"{len(different)} of {format_count(len(common), 'tensor')} differ: {join_items(different)}."


def _equal(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first, second.to(first.device, first.dtype))


def _order_notes(pairing: Pairing, heads: Sequence[HeadChange]) -> Iterator[str]:
    for site in pairing.unmoved:
        yield (
            f"Layer {site.layer}: the second model has its heads in another order, and --heads compares them by their "
            "numbers; without it each is compared with its partner."
        )
    moved = Counter(head.layer for head in heads if head.partner != head.head)
    for layer, count in moved.items():
        yield (
            f"Layer {layer}: the second model has {format_count(count, 'head')} in another order; each is compared "
            "with its partner."
        )


def _form_notes(
    pairing: Pairing, heads: Sequence[HeadChange], beyond_rounding: Mapping[tuple[int, int], bool | None]
) -> Iterator[str]:
    """Describe the effect of other factors of the same M; `beyond_rounding`: whether a head's own KL exceeds it."""
    same = {(head.layer, head.head) for head in heads if head.relation == "same form"}
    turned = {head for head in _turned_heads(pairing, same) if beyond_rounding.get(head) is not False}
    different = {head for head in same - turned if beyond_rounding.get(head)}
    gauge = {head for head in same - turned if beyond_rounding.get(head) is False}
    unknown = same - turned - different - gauge
    effects = (
        (turned, "the rotation acts on permuted rows (a lost RoPE permutation?)"),
        (different, "biases, norms or the mask act differently"),
    )
    for group, effect in effects:
        if group:
            numbers = join_items([f"{layer}.{head}" for layer, head in sorted(group)])
            yield (
                f"W_Q and W_K of {format_count(len(group), 'head')} have the same product M but different attention: "
                f"{effect}: {numbers}."
            )
    for group, effect in (
        (gauge, " (another gauge): attention is the same"),
        (unknown, "; attention was not compared"),
    ):
        if group:
            yield (
                f"Of {format_count(len(group), 'head')} W_Q and W_K are others with the same product M within rounding"
                f"{effect}."
            )


def _turned_heads(pairing: Pairing, heads: Collection[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield heads whose M agrees only at equal positions, because the rotation acts on other coordinates.

    All queries are turned to the last position, where forms under different rotations differ.
    """
    for site in pairing.sites:
        pair = pairing.ordered_forms(site) if any(layer == site.layer for layer, _ in heads) else None
        rotation = None if pair is None else pair[0].rotation
        if pair is None or rotation is None or len(rotation.angles) < 2:
            continue
        far = replace(rotation, angles=rotation.angles[-1:].expand(pair[0].query.shape[-2], -1))
        first, second = (replace(form, query=far.rotate(form.query.double())) for form in pair)
        near, far_apart = (form_distances(*forms)[FORMS] for forms in (pair, (first, second)))
        for head in range(len(far_apart)):
            if (site.layer, head) in heads and far_apart[head] > max(NEAR_FACTOR * float(near[head]), ROTATION_CHANGE):
                yield site.layer, head


OTHER_PREDICTIONS = "Predictions are not compared: the models have different outputs"


def compare_predictions(pairing: Pairing) -> tuple[Outcome | None, list[str]]:
    """Compare loss, KL, agreement and hidden states of both models; return the outcome or None, and the reasons."""
    sides = pairing.first, pairing.second
    batches, seed = pairing.first.inspection.inputs, pairing.first.inspection.settings.seed
    if batches is None:
        return None, []
    inputs = batches.batches[0].inputs
    try:
        tasks = [checks.task_on(side.loaded, inputs) for side in sides]
        for side, task in zip(sides, tasks, strict=True):
            refuse_initialised(side.loaded, texts.first(inputs, 2), predictions(task))
        fed = feed(sides[0].loaded, batches, tasks[0], seed)
    except AttnlensError as error:
        return None, [f"Predictions are not compared: {error.problem}"]
    if tasks[0] != tasks[1]:
        return None, [f"{OTHER_PREDICTIONS} ({tasks[0]}, {tasks[1]})."]
    differences = Differences(tasks[0], batches.made_up, pairing.first.design)
    for batch in fed:
        passes = []
        for side in sides:
            model = side.loaded.model
            with hooks.replace(model, side.inspection.all_sites, side.swaps) if side.swaps else nullcontext():
                passes.append(run(model, batch, tasks[0]))
        classes = {None if each.logits is None else each.logits.shape[-1] for each in passes}
        states = {None if each.hidden is None else each.hidden.shape[-1] for each in passes}
        if len(classes) > 1 or len(states) > 1:
            return None, [f"{OTHER_PREDICTIONS}, or hidden states of different sizes."]
        before, after = passes
        differences.add(before, after, batch.targets, tokens_in(batch))
    return differences.outcome(seed, list(dict.fromkeys(batches.parts))), []


@dataclass
class Changes:
    """The changes between two models with corresponding heads."""

    pairing: Pairing
    fdr: float
    progress: Progress

    def compare(self, base: ModelInfo) -> Comparison:
        """Build the comparison: all rows, relations of heads, blocks, predictions and notes."""
        rounding, distances = self._draw_rounding(), self._form_distances()
        if self.pairing.first.batches:
            distances |= self._row_distances()
        tests = self._test_measures(rounding, distances)
        rows = build_rows(self.heads, tests, self.fdr, "the effect of rounding on it is not simulated")
        heads = relate_heads(self.pairing, tests.get(FORMS))
        outcome, why = compare_predictions(self.pairing)
        return Comparison(
            base=base,
            paired=True,
            fdr=self.fdr,
            tests=sum(row.p is not None for row in rows),
            named=sum(row.named for row in rows),
            heads=heads,
            rows=rows,
            blocks=self._test_blocks(distances, rounding),
            outcome=outcome,
            notes=[*describe(self.pairing, heads, rows), *why],
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
        """Blocks of both models that run once per forward pass; empty without a text, or if their paths differ."""
        first, second = (
            hooks.blocks(side.loaded.model, side.batches[0].inputs) if side.batches else []
            for side in (self.pairing.first, self.pairing.second)
        )
        same = [path for path, _ in first] == [path for path, _ in second]
        return (first, second) if same else ([], [])

    @property
    def seed(self) -> int:
        """Random seed."""
        return self.pairing.first.inspection.settings.seed

    def _test_blocks(self, distances: Mapping[str, Tensor], rounding: Mapping[str, Rounding]) -> list[BlockChange]:
        """Test the change of each block's output for the first model's input states."""
        if BLOCKS not in distances:
            return []
        test = significance.test_windows(distances[BLOCKS], self.design, rounding.get(BLOCKS), self.seed)
        q = adjust_p_values(test.p).tolist()
        return [
            BlockChange(
                path=path,
                layers=[site.layer for site in self.pairing.sites if site.path.startswith(f"{path}.")],
                change=number_of(test.delta[place]),
                rounding=None if test.rounding is None else number_of(test.rounding.size[place]),
                p=number_of(test.p[place]),
                q=number_of(q[place]),
                named=q[place] <= self.fdr,
            )
            for place, (path, _) in enumerate(self.blocks[0])
        ]

    def _test_measures(
        self, rounding: Mapping[str, Rounding], distances: Mapping[str, Tensor]
    ) -> dict[str, ChangeTest | None]:
        """Test the changes of each measure; None for categories and measures without drawn rounding."""
        tests: dict[str, ChangeTest | None] = {
            name: significance.test_rounding(distances[name], rounding[name])
            for name in (FORMS, QUERY_ANGLE, KEY_ANGLE)
            if name in distances
        }
        changes = {name: distances[name] for name in (OWN_ROWS, ROWS) if name in distances}
        first, second = self.pairing.first.report, self.pairing.second.report
        for name in (*changes, *first.measure_names()):
            before, after = (
                None if side.windows is None else side.windows.values.get(name) for side in (first, second)
            )
            if before is not None and after is not None:
                changes[name] = after[:, self.pairing.partners] - before
            if name in changes:
                tests[name] = significance.test_windows(changes[name], self.design, rounding.get(name), self.seed)
            elif name not in rounding or is_category(self.heads, name):
                tests[name] = None
            else:  # measures of weights: p is that of rounding
                first_values, second_values = field_values(self.heads, name)
                tests[name] = significance.test_rounding(second_values - first_values, rounding[name])
        return tests

    def _form_distances(self) -> dict[str, Tensor]:
        """Compute the distances between forms, (heads,), by measure."""
        tables: dict[tuple[str, str], Tensor] = {}
        for site in self.pairing.sites:
            if (forms := self.pairing.ordered_forms(site)) is not None:
                tables |= {(site.name, name): values[None] for name, values in form_distances(*forms).items()}
        return {name: table[0] for name, table in arrange_by_measure(tables, self.pairing.first.heads, 1).items()}

    def _row_distances(self) -> dict[str, Tensor]:
        """Compute the distances between attention rows, (windows, heads), and block outputs, (windows, blocks)."""
        (first, second), order = (self.pairing.first, self.pairing.second), self.pairing.order
        total, start = self.design.count, 0
        values, block_changes = SequenceValues(total), list[Tensor]()
        sites = {other: site for site, other in self.pairing.sites.items()}
        for batch in first.batches:
            self.progress("attention rows", start, total)
            recorded = record_pass(first, batch.inputs, self.blocks[0])
            passes = {ROWS: compare_pass(recorded, second, sites, batch.inputs, order)}
            if self.blocks[1]:
                passes[OWN_ROWS] = compare_pass(recorded, second, sites, batch.inputs, order, self.blocks[1])
                block_changes.append(arrange_blocks(passes[OWN_ROWS].blocks, self.blocks[0], batch))
            for name, compared in passes.items():
                add_distances(values, name, compared.rows, batch, start)
            start += batch.size
        self.progress("attention rows", total, total)
        rows = arrange_by_measure(values.means, first.heads, total)
        return rows | ({BLOCKS: torch.cat(block_changes)} if block_changes else {})

    def _draw_rounding(self) -> dict[str, Rounding]:
        """Estimate the effect of rounding both models on each measure, from draws."""
        tell = telling(self.progress, "rounding", 2 * draws.DRAWS) if self.pairing.first.batches else None
        drawn: list[dict[str, Tensor]] = []
        for number, side in enumerate((self.pairing.first, self.pairing.second)):
            generator = torch.Generator().manual_seed(self.seed + number)
            drawn.append(draws.draw_weights(side, generator))
            if tell is not None:
                cut = replace(side.run.cut, sequences=min(draws.FEW, self.design.count))
                drawn[-1] |= draws.draw_tokens(side, cut, self.blocks[number], generator, tell)
        combined = {}
        for name in drawn[0].keys() & drawn[1].keys():
            first, second = drawn[0][name], drawn[1][name]
            second = second if name == BLOCKS else second[:, self.pairing.partners]
            combined[name] = significance.combine_rounding(first, second, squared=name in (ROWS, OWN_ROWS))
        return combined
