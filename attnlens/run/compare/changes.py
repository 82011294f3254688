"""Makes the rows of a comparison: each measure of each head, with the distances between corresponding heads."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from attnlens import hooks, texts
from attnlens.errors import AttnlensError
from attnlens.records import BlockChange, Comparison, Head, ModelInfo, Outcome
from attnlens.registry.measure_info import FORMS, KEY_ANGLE, OWN_ROWS, QUERY_ANGLE, ROWS
from attnlens.run import checks
from attnlens.run.compare import draws, significance
from attnlens.run.compare.draws import BLOCKS, enter_distances, entered, of_blocks
from attnlens.run.compare.passes import beside, record
from attnlens.run.compare.relations import relations, told
from attnlens.run.compare.sides import Block, Pairing, distances
from attnlens.run.compare.significance import Judged, Rounding, change, is_category, named_rows, number_of
from attnlens.run.differences import Differences
from attnlens.run.initialised import predictions, refuse_initialised
from attnlens.run.inspect.summary import by_measure
from attnlens.run.outputs import run, tokens_in
from attnlens.runs.progress import Progress, Tell
from attnlens.statistics import Design, adjusted
from attnlens.texts.targets import feed

OTHER_PREDICTIONS = "Predictions are not compared: the models predict other things"


def outcome(pairing: Pairing, design: Design) -> tuple[Outcome | None, list[str]]:
    """Loss, KL, agreement and hidden states of both models; or None, and why."""
    sides = pairing.first, pairing.second
    fed = pairing.first.inspection.fed
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
            with hooks.replace(model, side.inspection.sites, side.swaps) if side.swaps else nullcontext():
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
    """What changed between two models whose heads correspond."""

    pairing: Pairing
    fdr: float
    progress: Progress

    def found(self, base: ModelInfo) -> Comparison:
        """Every row, and what is said of heads and models as wholes."""
        rounding, apart = self._rounding(), self._distances()
        judged = self._judged(rounding, apart)
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
            blocks=self._blocks(apart, rounding),
            outcome=predicted,
            notes=[*told(self.pairing, heads, rows), *why],
        )

    @property
    def design(self) -> Design:
        """How the windows were sampled."""
        return self.pairing.first.inspection.collector.design

    @cached_property
    def heads(self) -> tuple[list[Head], list[Head]]:
        """The heads of the first report, and the partner of each in the second one."""
        first, second = self.pairing.first.report.heads, self.pairing.second.report.heads
        return first, [second[place] for place in self.pairing.partners.tolist()]

    @cached_property
    def blocks(self) -> tuple[list[Block], list[Block]]:
        """The blocks of both models, where they are called the same."""
        found = self.pairing.first.blocks(), self.pairing.second.blocks()
        paths = [[path for path, _ in each] for each in found]
        return found if paths[0] == paths[1] else ([], [])

    def _blocks(self, apart: Mapping[str, Tensor], rounding: Mapping[str, Rounding]) -> list[BlockChange]:
        """How far what each block gives of the first model's states moved."""
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

    def _judged(self, rounding: Mapping[str, Rounding], apart: Mapping[str, Tensor]) -> dict[str, Judged | None]:
        """The changes of every measure; None for categories."""
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
            else:  # of the weights: rounding alone decides
                before, after = change(self.heads, name)
                found[name] = significance.measured(after - before, rounding[name])
        return found

    @property
    def seed(self) -> int:
        """Seed of everything random."""
        return self.pairing.first.inspection.settings.seed

    def _distances(self) -> dict[str, Tensor]:
        """Distances between forms, (heads,), and between rows of attention, (windows, heads)."""
        return self._of_forms() | (self._of_rows() if self.pairing.first.batches else {})

    def _of_forms(self) -> dict[str, Tensor]:
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
        first, second = self.pairing.first, self.pairing.second
        collector, start = entered(first, self.design), 0
        sites = {other: site for site, other in self.pairing.sites.items()}
        order = {site: placed.order for site, placed in self.pairing.placed.items()}
        total, moved = self.design.count, list[Tensor]()
        for batch in first.batches:
            self.progress("attention rows", start, total)
            recorded = record(first, batch.inputs, self.blocks[0])
            passed = {ROWS: beside(recorded, second, sites, batch.inputs, order)}
            if self.blocks[1]:
                passed[OWN_ROWS] = beside(recorded, second, sites, batch.inputs, order, self.blocks[1])
                moved.append(of_blocks(passed[OWN_ROWS].blocks, self.blocks[0], batch))
            for name, found in passed.items():
                for site, values in found.rows.items():
                    enter_distances(collector, site, {name: values}, batch, start)
            start += batch.size
        self.progress("attention rows", total, total)
        return by_measure(collector) | ({BLOCKS: torch.cat(moved)} if moved else {})

    def _rounding(self) -> dict[str, Rounding]:
        """What rounding of both models does to every measure, by draws."""
        drawn: list[dict[str, list[Tensor]]] = []
        for number, side in enumerate((self.pairing.first, self.pairing.second)):
            generator = torch.Generator().manual_seed(self.seed + number)
            found = dict(draws.of_weights(side, generator))
            if side.batches:
                cut = replace(side.cut, sequences=min(draws.FEW, self.design.count))
                blocks = self.blocks[number]
                found |= draws.of_tokens(side, side.contents, cut, blocks, generator, self._tell(number))
            drawn.append(found)
        partners = self.pairing.partners
        combined = {}
        for name in drawn[0].keys() & drawn[1].keys():
            first, second = (torch.stack(each[name]) for each in drawn)
            second = second if name == BLOCKS else second[:, partners]
            combined[name] = significance.combined(first, second, squared=name in (ROWS, OWN_ROWS))
        return combined

    def _tell(self, number: int) -> Tell:
        done = number * draws.DRAWS

        def tell(steps: int) -> None:
            nonlocal done
            done += steps
            self.progress("rounding", done, 2 * draws.DRAWS)

        return tell
