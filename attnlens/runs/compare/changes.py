"""Build the record of a comparison: its rows, the relations between heads, and notes."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from attnlens import records
from attnlens.analyzers.registry import FORMS, KEY_ANGLE, OWN_ROWS, QUERY_ANGLE, ROWS
from attnlens.errors import AttnlensError
from attnlens.maths.statistics import adjust_p_values
from attnlens.models import hooks, texts
from attnlens.models.texts.targets import feed
from attnlens.runs import checks
from attnlens.runs.compare import diagnosis, significance
from attnlens.runs.compare.causes import are_equal
from attnlens.runs.compare.sides import Blocks, Pairing, compare_blocks, form_distances, run_pass
from attnlens.runs.compare.significance import BLOCKS, CHANGED_P, SMALLEST, ChangeTest, Rounding, finite_or_none
from attnlens.runs.differences import Differences
from attnlens.runs.inspect.sequences import Place, SequenceValues, arrange_by_measure
from attnlens.runs.outputs import run, tokens_in
from attnlens.runs.progress import Progress, start_stage
from attnlens.wording import format_count, join_items

Tensors = Mapping[str, Tensor]
ROUNDING_SPACINGS = 4.0
"""Largest relative change in W_Q or W_K, in machine epsilons of the stored type, that rounding explains: a number is
rounded when it is stored, loaded and multiplied."""
ROTATION_CHANGE = 1e-3  # ‖ΔM‖/‖M‖ at different positions above which rotations count as acting on different coordinates
GAUGE_FACTOR = 100
"""Ratio of the relative change in W_Q or W_K to that in M above which a small change in M counts as rounding after a
change of basis. Training steps change M about as much as W_Q and W_K."""
NEAR_FACTOR = 10  # ‖ΔM‖ at different positions must also exceed this multiple of ‖ΔM‖ at equal positions (rounding)
OTHER_PREDICTIONS = "Predictions are not compared: the models have different outputs"
NOTES_ON_FORMS = {
    "turned": "W_Q and W_K of {heads} have the same product M but different attention: the rotation acts on permuted "
    "rows (was a RoPE permutation lost?): {names}.",
    "other attention": "W_Q and W_K of {heads} have the same product M but different attention: biases, norms or the "
    "mask act differently: {names}.",
    "gauge": "W_Q and W_K of {heads} changed only in gauge: their product M and attention changed only by rounding.",
    "gauge of weights": "W_Q and W_K of {heads} changed, but their product M changed only by rounding; attention was "
    "not compared.",
    "imprecise gauge": "W_Q and W_K of {heads} changed far more than their product M, as in a change of gauge: the "
    "changes in M and in attention are too small to matter.",
    "imprecise gauge of weights": "W_Q and W_K of {heads} changed far more than their product M, as in a change of "
    "gauge: the change in M is too small to matter; attention was not compared.",
    "small change": "W_Q and W_K of {heads} have a product M that changed by more than rounding explains, but by less "
    f"than {SMALLEST[FORMS]:g} of its norm (too small to matter).",
    "small change, other attention": "W_Q and W_K of {heads} have a product M that changed by less than "
    f"{SMALLEST[FORMS]:g} of its norm, but attention changed enough to matter: {{names}}.",
}
"""Notes on heads whose W_Q and W_K differ, but whose M changed too little to matter."""


def relate_heads(pairing: Pairing, forms: ChangeTest | None) -> list[records.HeadChange]:
    """Return each head's partner in the second report, and the relation between both heads' forms M."""
    sites, changes = {site.name: site for site in pairing.sites}, []
    for name, heads in groupby(enumerate(pairing.first.report.heads), lambda pair: pair[1].site):
        site, pair = sites[name], pairing.ordered_forms(sites[name])
        for place, head in heads:
            relation, reason = None, None
            if isinstance(pair, str):
                reason = pair
            elif forms is not None:
                change = float(forms.p[place]), float(forms.delta[place])
                relation = _relation(pairing, pair, head.head, *change)
                reason = "a form is 0 or not finite" if relation is None else None
            fields = {field: getattr(head, field) for field in records.HeadId.model_fields}
            partner = pairing.order[site][head.head]
            changes.append(records.HeadChange(**fields, partner=partner, relation=relation, reason=reason))
    return changes


def _relation(
    pairing: Pairing, pair: tuple[records.QueryKey, records.QueryKey], head: int, p: float, change: float
) -> records.Relation | None:
    first, second = pair
    sides = [(first.query[head], second.query[head]), (first.paired_key[head], second.paired_key[head])]
    same_scale = first.scale == second.scale
    if same_scale and all(torch.equal(*side) for side in sides):
        return "identical"
    if p < CHANGED_P and change > SMALLEST[FORMS]:
        return "changed"
    in_order = pairing.order[first.site] == tuple(range(len(first.heads)))
    # factors computed from equal weights can differ by rounding
    if same_scale and in_order and _have_equal_weights(pairing, first.site):
        return "identical"
    if math.isnan(p):
        return None
    sites = (pairing.first, first.site), (pairing.second, pairing.sites[first.site])
    spacing = max(torch.finfo(significance.site_type(side.loaded.model, site)).eps for side, site in sites)

    def are_within(limit: float) -> bool:
        """Return True if W_Q and W_K each changed by at most `limit` times their norms."""
        # without division, so that factors can be zero
        return all(float((after - before).norm()) <= limit * float(before.norm()) for before, after in sides)

    if are_within(ROUNDING_SPACINGS * spacing) and same_scale:
        return "rounding"
    return "changed" if p < CHANGED_P and are_within(GAUGE_FACTOR * change) else "same form"


def _have_equal_weights(pairing: Pairing, site: records.Site) -> bool:
    """Return True if the site's module has equal parameters in both models; False if it has no parameters."""
    tensors, others = (
        dict(side.loaded.model.get_submodule(site.path).named_parameters()) for side in (pairing.first, pairing.second)
    )
    if not tensors or tensors.keys() != others.keys():
        return False
    return all(are_equal(tensors[name], others[name]) for name in tensors)


def describe(
    pairing: Pairing, heads: Sequence[records.HeadChange], rows: Sequence[records.MeasureChange]
) -> Iterator[str]:
    """Yield notes on differences in masks, order of heads and forms."""
    for site, other in pairing.sites.items():
        if site.part != other.part:
            masks = f"{site.part} in the first model, {other.part} in the second"
            yield f"Layer {site.layer_name} has a different mask: {masks}."
    for site in pairing.unmoved:
        yield (
            f"Layer {site.layer_name}: the heads of the second model are in a different order, but --heads compares "
            "heads with equal numbers; without --heads, each head is compared with its partner."
        )
    name = pairing.first.report.model.layer_name
    for layer, count in Counter(head.layer for head in heads if head.partner != head.head).items():
        yield (
            f"Layer {name(layer)}: the second model has {format_count(count, 'head')} in a different order; each head "
            "is compared with its partner."
        )
    same = {(head.layer, head.head) for head in heads if head.relation == "same form"}
    turned = set(_turned_heads(pairing, same))
    forms, own = ({(row.layer, row.head): row for row in rows if row.measure == each} for each in (FORMS, OWN_ROWS))
    groups: dict[str | bool | None, list[str]] = defaultdict(list)
    for head in sorted(heads, key=lambda head: (head.layer, head.head)):
        place = head.layer, head.head
        if head.relation == "same form" or (head.relation == "changed" and forms[place].negligible):
            group = _classify_form(head, forms[place], own.get(place), is_turned=place in turned)
            groups[group].append(f"{name(head.layer)}.{head.head}")
    for group, note in NOTES_ON_FORMS.items():
        if names := groups[group]:
            yield note.format(heads=format_count(len(names), "head"), names=join_items(names))


def _classify_form(
    head: records.HeadChange, form: records.MeasureChange, own: records.MeasureChange | None, *, is_turned: bool
) -> str:
    """Return the key in NOTES_ON_FORMS for a head whose M changed too little to matter.

    `form` is the change in M, and `own` the change in attention given equal inputs (None if no text was read).
    """
    beyond_rounding = None if own is None else own.beyond_rounding
    attends_differently = own is not None and beyond_rounding and not own.negligible
    if head.relation == "changed":
        return "small change, other attention" if attends_differently else "small change"
    if is_turned and (attends_differently or beyond_rounding is None):
        return "turned"
    if attends_differently:
        return "other attention"
    known = beyond_rounding is not None
    if beyond_rounding or (form.p is not None and form.p < CHANGED_P):
        return "imprecise gauge" if known else "imprecise gauge of weights"
    return "gauge" if known else "gauge of weights"


def _turned_heads(pairing: Pairing, heads: Collection[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield those of `heads` whose M agrees at equal positions but not at distant positions: their RoPE differs."""
    for site in pairing.sites:
        pair = pairing.ordered_forms(site) if any(layer == site.layer for layer, _ in heads) else ""
        rotation = None if isinstance(pair, str) else pair[0].rotation
        if isinstance(pair, str) or rotation is None or len(rotation.angles) < 2:
            continue
        far = replace(rotation, angles=rotation.angles[-1:].expand(pair[0].query.shape[-2], -1))
        first, second = (replace(form, query=far.rotate(form.query.double())) for form in pair)
        near, far_apart = (form_distances(*forms)[FORMS] for forms in (pair, (first, second)))
        for head in range(len(far_apart)):
            if (site.layer, head) in heads and far_apart[head] > max(NEAR_FACTOR * float(near[head]), ROTATION_CHANGE):
                yield site.layer, head


def compare_predictions(pairing: Pairing) -> tuple[records.Outcome | None, list[str]]:
    """Compare both models' losses, predictions and hidden states; return the outcome and notes.

    If predictions can't be compared, return None and notes with the reason. Return (None, []) if no text is read.
    """
    sides = pairing.first, pairing.second
    batches, seed = pairing.first.inputs, pairing.first.settings.seed
    if batches is None:
        return None, []
    inputs = batches.batches[0].inputs
    try:
        tasks = [checks.find_task(side.loaded, inputs) for side in sides]
        for side, task in zip(sides, tasks, strict=True):
            checks.refuse_initialised(side.loaded, texts.first(inputs, 2), checks.measure_predictions(task))
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
            with hooks.replace(model, side.all_sites, side.swaps) if side.swaps else nullcontext():
                passes.append(run(model, batch, tasks[0]))
        before, after = passes
        if before.logits is not None and not bool(before.logits.isfinite().all()):
            return None, ["Predictions are not compared: the first model's predictions are not finite."]
        for states, others in ((before.logits, after.logits), (before.hidden, after.hidden)):
            if (None if states is None else states.shape[-1]) != (None if others is None else others.shape[-1]):
                return None, [f"{OTHER_PREDICTIONS}, or hidden states of different sizes."]
        differences.add(before, after, batch.targets, tokens_in(batch))
    return differences.outcome(seed, list(dict.fromkeys(batches.parts))), []


@dataclass
class Changes:
    """Comparison of two models whose heads are paired."""

    pairing: Pairing
    fdr: float
    progress: Progress

    def compare(self) -> records.Comparison:
        """Build the record: rows, relations between heads, blocks, predictions, causes and notes."""
        rounding, tables = self._draw_rounding(), dict[Place, Tensor]()
        for site in self.pairing.sites:
            if not isinstance(forms := self.pairing.ordered_forms(site), str):
                tables |= {(site.name, name): values[None] for name, values in form_distances(*forms).items()}
        arranged = arrange_by_measure(tables, self.pairing.first.heads, 1)
        distances = {name: table[0] for name, table in arranged.items()}
        if self.pairing.first.batches:
            distances |= self._row_distances()
        tests = self._test_measures(distances, rounding)
        rows = significance.build_rows(self.heads, tests, self.fdr, "rounding is not simulated for this measure")
        heads = relate_heads(self.pairing, tests.get(FORMS))
        outcome, why = compare_predictions(self.pairing)
        sides = self.pairing.first, self.pairing.second
        return records.Comparison(
            base=self.pairing.first.report.model,
            paired=True,
            fdr=self.fdr,
            tests=sum(row.p is not None for row in rows),
            named=sum(row.named for row in rows),
            heads=heads,
            rows=rows,
            blocks=self._test_blocks(distances, rounding),
            outcome=outcome,
            notes=[*describe(self.pairing, heads, rows), *why],
            **diagnosis.describe_models(sides, self.pairing.sites, self.pairing.order),
        )

    @cached_property
    def heads(self) -> tuple[list[records.Head], list[records.Head]]:
        """Heads of the first report, and their partners in the second."""
        first, second = self.pairing.first.report.heads, self.pairing.second.report.heads
        return first, [second[place] for place in self.pairing.partners.tolist()]

    @cached_property
    def blocks(self) -> tuple[Blocks, Blocks]:
        """Blocks of both models; empty if no text is read, or if the models' blocks have different paths."""
        first, second = (Blocks.of(side) for side in (self.pairing.first, self.pairing.second))
        return (first, second) if first.paths == second.paths else (Blocks(), Blocks())

    def _test_windows(self, changes: Tensor, rounding: Rounding | None) -> ChangeTest:
        first = self.pairing.first
        return significance.test_windows(changes, first.design, rounding, first.settings.seed)

    def _test_blocks(self, distances: Tensors, rounding: Mapping[str, Rounding]) -> list[records.BlockChange]:
        if BLOCKS not in distances:
            return []
        test = self._test_windows(distances[BLOCKS], rounding.get(BLOCKS))
        q = adjust_p_values(test.p).tolist()
        negligible = test.negligible(significance.SMALLEST_BLOCK).tolist()
        return [
            records.BlockChange(
                path=path,
                layers=[site.layer for site in self.pairing.sites if site.path.startswith(f"{path}.")],
                change=finite_or_none(test.delta[place]),
                rounding=None if test.rounding is None else finite_or_none(test.rounding.size[place]),
                p=finite_or_none(test.p[place]),
                q=finite_or_none(q[place]),
                smallest=significance.SMALLEST_BLOCK,
                negligible=negligible[place],
                named=q[place] <= self.fdr and not negligible[place],
            )
            for place, (path, _) in enumerate(self.blocks[0].compared)
        ]

    def _test_measures(self, distances: Tensors, rounding: Mapping[str, Rounding]) -> dict[str, ChangeTest | None]:
        """Test the changes in each measure; return the tests keyed by measure name.

        The test is None for categories, and for measures with neither values per window nor simulated rounding.
        """
        tests: dict[str, ChangeTest | None] = {
            name: significance.test_rounding(distances[name], rounding[name])
            for name in (FORMS, QUERY_ANGLE, KEY_ANGLE)
            if name in distances
        }
        changes = {name: distances[name] for name in (OWN_ROWS, ROWS) if name in distances}
        first, second = self.pairing.first.report, self.pairing.second.report
        for name in (*changes, *first.measure_names()):
            before, after = (side.windows.values.get(name) if side.windows else None for side in (first, second))
            if before is not None and after is not None:
                changes[name] = after[:, self.pairing.partners] - before
            if name in changes:
                tests[name] = self._test_windows(changes[name], rounding.get(name))
            elif name not in rounding or significance.is_category(self.heads, name):
                tests[name] = None
            else:  # measures of weights: only rounding can explain a change
                before, after = significance.field_values(self.heads, name)
                tests[name] = significance.test_rounding(after - before, rounding[name])
        return tests

    def _row_distances(self) -> dict[str, Tensor]:
        """Return, keyed by measure name, KL of attention rows (windows, heads) and block changes (windows, blocks)."""
        first, second = self.pairing.first, self.pairing.second
        total, start = first.design.count, 0
        blocks, other_blocks = self.blocks
        values, block_changes = SequenceValues(total), list[Tensor]()
        for batch in first.batches:
            self.progress("attention rows", start, total)
            original = run_pass(first, batch.inputs, blocks)
            passes = {ROWS: run_pass(second, batch.inputs, other_blocks, original)}
            if blocks.compared:
                passes[OWN_ROWS] = run_pass(second, batch.inputs, other_blocks, original, own_states=False)
                block_changes.append(compare_blocks((original, passes[OWN_ROWS]), blocks.compared, batch))
            self.pairing.add_divergences(values, original, passes, batch, start)
            start += batch.size
        self.progress("attention rows", total, total)
        rows = arrange_by_measure(values.means, first.heads, total)
        return rows | ({BLOCKS: torch.cat(block_changes)} if block_changes else {})

    def _draw_rounding(self) -> dict[str, Rounding]:
        """Estimate from random draws how much rounding both models' weights changes each measure, keyed by name."""
        add_steps = (
            start_stage(self.progress, "rounding", 2 * significance.DRAWS) if self.pairing.first.batches else None
        )
        drawn: list[dict[str, Tensor]] = []
        for number, side in enumerate((self.pairing.first, self.pairing.second)):
            generator = torch.Generator().manual_seed(self.pairing.first.settings.seed + number)
            drawn.append(significance.draw_weights(side, significance.DRAWS, generator))
            if add_steps is not None:
                cut = replace(side.cut, sequences=min(significance.FEW, self.pairing.first.design.count))
                blocks = self.blocks[number]
                drawn[-1] |= significance.draw_tokens(side, cut, blocks, significance.DRAWS, generator, add_steps)
        combined = {}
        for name in drawn[0].keys() & drawn[1].keys():
            first, second = drawn[0][name], drawn[1][name]
            second = second if name == BLOCKS else second[:, self.pairing.partners]
            combined[name] = significance.combine_rounding(first, second, squared=name in (ROWS, OWN_ROWS))
        return combined
