"""Draws of what rounding alone does to each measure of a model, on a few windows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attnlens import texts, weights
from attnlens.hooks.survey import hiding_padding
from attnlens.records import Call, QueryKey, Site
from attnlens.registry import Analyzer
from attnlens.registry.distances import OWN_ROWS, ROWS
from attnlens.run import feeding
from attnlens.run.compare.forms import distances
from attnlens.run.compare.passes import Recorded, beside, record
from attnlens.run.compare.rounding import rounded, rounded_factors, site_type, stored_types
from attnlens.run.compare.sides import Block, ComparedModel
from attnlens.run.inspect.collector import Collector
from attnlens.run.inspect.sink import finite_heads
from attnlens.run.inspect.summary import by_measure
from attnlens.runs.progress import Tell
from attnlens.statistics import Design

DRAWS = 5
"""Times that the weights of each model are nudged."""
UNDRAWN = "what rounding does to it is not drawn"
"""Why a measure that an analyzer gathers from many windows has no p."""
FEW = 2
"""Windows on which it is seen what that does to tokens.*."""
BLOCKS = "compare.block_change"
"""‖o' − o‖/‖o‖ of what each block gives of the first model's states, block by block and not head by head."""
DrawnChanges = dict[str, list[Tensor]]
"""Each draw's change at each head, by measure."""


def of_weights(side: ComparedModel, generator: torch.Generator) -> DrawnChanges:
    """What rounding does to the measures of the forms; of those that have none a NaN."""
    places = {(head.layer, head.head): place for place, head in enumerate(side.report.heads)}
    found: dict[str, Tensor] = {}
    for site in side.sites:
        factors = side.factors(site)
        if not isinstance(factors, weights.Factors):
            continue
        kind = site_type(side.loaded.model, site)
        for name, changes in _of_site(factors, side.analyzers("weights"), kind, generator).items():
            nothing = torch.full((DRAWS, len(places)), torch.nan, dtype=torch.float64)
            every = found.setdefault(name, nothing)
            for head in range(changes.shape[1]):
                if (site.layer, head) in places:
                    every[:, places[site.layer, head]] = changes[:, head]
    return {name: list(changes) for name, changes in found.items()}


def _of_site(
    factors: weights.Factors, analyzers: Sequence[Analyzer], kind: torch.dtype, generator: torch.Generator
) -> dict[str, Tensor]:
    """Each draw's changes of one site's scalars, and the distances of its heads from themselves; (draws, heads)."""
    own = factors.query_key
    fine = finite_heads(own)
    read = [analyzer for analyzer in analyzers if not analyzer.needs_base] if fine else []
    before = _scalars(read, own.select(fine)) if read else {}
    drawn: dict[str, list[Tensor]] = defaultdict(list)
    for _ in range(DRAWS):
        other = rounded_factors(factors, kind, generator).query_key
        for name, values in distances(own, other).items():
            drawn[name].append(values)
        for name, values in (_scalars(read, other.select(fine)) if read else {}).items():
            every = torch.full((len(own.heads),), torch.nan, dtype=torch.float64)
            every[fine] = values - before[name]
            drawn[name].append(every)
    return {name: torch.stack(changes) for name, changes in drawn.items()}


def _scalars(analyzers: Sequence[Analyzer], query_key: QueryKey) -> dict[str, Tensor]:
    """What analyzers read of a form, but for curves."""
    found: dict[str, Tensor] = {}
    for analyzer in analyzers:
        readings = analyzer.function(query_key)
        scalars = [info.name for info in analyzer.measures if not info.curve and info.name in readings]
        found |= {name: readings[name].double().cpu() for name in scalars}
    return found


def of_tokens(
    side: ComparedModel,
    contents: Sequence[texts.Content],
    cut: texts.Cut,
    blocks: Sequence[Block],
    generator: torch.Generator,
    tell: Tell,
) -> DrawnChanges:
    """What rounding does to the means of tokens.* over a few windows, and the KL between rows that it makes."""
    few = texts.batches(side.loaded, contents, cut)
    design = feeding.design_of(side.inspection.settings.model_copy(update={"intervals": "windows"}), few)
    reader = _FewWindows(side, design)
    own = [record(side, batch.inputs, blocks) for batch in few]
    before = reader.read(few, [one.calls for one in own])
    found: DrawnChanges = defaultdict(list)
    types = stored_types(side.loaded.model)
    for _ in range(DRAWS):
        with rounded(types, generator):
            after = _nudged(reader, few, own, blocks)
        for name, values in after.items():
            change = values - before[name] if name in before else values
            found[name].append(change.nanmean(0))
        tell(1)
    return found


def _nudged(
    reader: _FewWindows, few: texts.Batches, own: Sequence[Recorded], blocks: Sequence[Block]
) -> dict[str, Tensor]:
    """Every measure of every window and head of the model as it is now, and KL from what it was."""
    side, same = reader.side, {site: site for site in reader.side.sites}
    order = {found.site: range(found.call.query.shape[1]) for found in side.inspection.reached}
    calls: list[dict[Site, Call]] = []
    apart: dict[str, list[Mapping[Site, Tensor]]] = {ROWS: [], OWN_ROWS: []}
    moved: list[Tensor] = []
    for batch, recorded in zip(few, own, strict=True):
        passed = beside(recorded, side, same, batch.inputs, order)
        calls.append(passed.calls)
        apart[ROWS].append(passed.rows)
        if blocks:
            fed = beside(recorded, side, same, batch.inputs, order, blocks)
            apart[OWN_ROWS].append(fed.rows)
            moved.append(of_blocks(fed.blocks, blocks, batch))
    found = reader.read(few, calls, {name: found for name, found in apart.items() if found})
    return found | ({BLOCKS: torch.cat(moved)} if moved else {})


def of_blocks(found: Mapping[str, Tensor], blocks: Sequence[Block], batch: texts.Batch) -> Tensor:
    """How far each block's output moved, (sequences, blocks); NaN where it gives no states."""
    nothing = torch.full((batch.size,), torch.nan, dtype=torch.float64)
    # more rows than sequences where a model cuts each into windows
    each = [found[path].view(batch.size, -1).mean(1) if path in found else nothing for path, _ in blocks]
    return torch.stack(each, 1)


class _FewWindows:
    """Reads tokens.* of a few windows, in the order of the report's heads."""

    def __init__(self, side: ComparedModel, design: Design) -> None:
        self.side = side
        self.design = design

    def read(
        self,
        few: texts.Batches,
        calls: Sequence[Mapping[Site, Call]],
        apart: Mapping[str, Sequence[Mapping[Site, Tensor]]] | None = None,
    ) -> dict[str, Tensor]:
        """Each measure as (windows, heads), with the distances of each batch."""
        collector = entered(self.side, self.design)
        start = 0
        for number, (batch, asked) in enumerate(zip(few, calls, strict=True)):
            for site, call in asked.items():
                enter_call(collector, site, call, batch, start, self.side.analyzers("tokens"))
            for name, found in (apart or {}).items():
                for site, values in found[number].items():
                    enter_distances(collector, site, {name: values}, batch, start)
            start += batch.size
        return by_measure(collector)


def entered(side: ComparedModel, design: Design) -> Collector:
    """A collector of all the heads that the side's report has."""
    collector = Collector(side.inspection.collector.chosen_heads, design=design)
    for found in side.inspection.reached:
        collector.enter(found.site, [head // found.call.group for head in range(found.call.query.shape[1])])
    return collector


def enter_call(
    collector: Collector, site: Site, call: Call, batch: texts.Batch, start: int, analyzers: Sequence[Analyzer]
) -> None:
    """Enter what analyzers read of a site's call, whose first sequence has the number `start`."""
    query_key = hiding_padding(call, batch.inputs).query_key(site)
    finite = finite_heads(query_key)
    if finite:
        numbers = sequence_numbers(len(call.query), batch, start)
        collector.read_tokens(site, query_key.select(finite), analyzers, numbers, len(query_key.heads))


def enter_distances(
    collector: Collector, site: Site, values: Mapping[str, Tensor], batch: texts.Batch, start: int
) -> None:
    """Enter distances of each sequence and head."""
    for found in values.values():
        numbers = sequence_numbers(len(found), batch, start)
        collector.add_tokens(site, numbers, range(found.shape[1]), found.shape[1], dict(values))


def sequence_numbers(rows: int, batch: texts.Batch, start: int) -> list[int]:
    """The sequence of each row; there are more rows where a module cuts a sequence into windows (Swin)."""
    return [start + row * batch.size // rows for row in range(rows)]
