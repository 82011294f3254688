"""Draws of what rounding alone does to each measure of a model, on a few windows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlens import texts, weights
from attnlens.hooks.survey import hiding_padding
from attnlens.records import Call, QueryKey, Site
from attnlens.registry import Analyzer
from attnlens.registry.measure_info import OWN_ROWS, ROWS
from attnlens.run import feeding
from attnlens.run.compare.passes import beside, record
from attnlens.run.compare.sides import Block, ComparedModel, distances
from attnlens.run.inspect.collector import Collector
from attnlens.run.inspect.sink import finite_heads
from attnlens.run.inspect.summary import by_measure
from attnlens.runs.progress import Tell
from attnlens.statistics import Design
from attnlens.weights import Factors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
TYPES = (torch.bfloat16, torch.float16, torch.float32)
"""From the widest spacing to the finest."""
BITS = {
    torch.bfloat16: (torch.int16, 7),
    torch.float16: (torch.int16, 10),
    torch.float32: (torch.int32, 23),
    torch.float64: (torch.int64, 52),
}
"""The whole number that has a number's bits, and how many of them are behind the binary point."""
DIFFERENT, MANY = 16, 4096
"""So many different numbers, among the first so many, say of which type a weight is."""
MOVED = 12
"""One number of so many moves by a whole spacing: the variance is that of rounding, 1/12 of a spacing squared."""


def stored_type(weight: Tensor) -> torch.dtype:
    """The coarsest number type that holds every number of a weight exactly, whatever the model was loaded as.

    A weight of few different numbers (gains of 1, zeros) tells nothing, and counts as float32.
    """
    first = weight.flatten()[:MANY]
    if len(first.unique()) < min(DIFFERENT, weight.numel()):  # type: ignore[no-untyped-call]
        return torch.float32
    return next((kind for kind in TYPES if _holds(kind, first) and _holds(kind, weight)), torch.float64)


def _holds(kind: torch.dtype, weight: Tensor) -> bool:
    return torch.equal(weight.to(kind).to(weight.dtype), weight)


def site_type(model: PreTrainedModel, site: Site) -> torch.dtype:
    """The coarsest type among the matrices of a site's module: that of its queries and keys."""
    kinds = [stored_type(weight) for weight in model.get_submodule(site.path).parameters() if weight.dim() > 1]
    return max(kinds, key=lambda kind: torch.finfo(kind).eps, default=torch.float32)


def stored_types(model: PreTrainedModel) -> list[tuple[Tensor, torch.dtype]]:
    """Every weight of the model with the type that it was stored in."""
    return [(weight.data, stored_type(weight.data)) for weight in model.parameters() if weight.is_floating_point()]


@contextmanager
def rounded(types: Sequence[tuple[Tensor, torch.dtype]], generator: torch.Generator) -> Iterator[None]:
    """Inside, one number of twelve is a spacing of its weight's type larger or smaller; afterwards none is."""
    own: list[tuple[Tensor, Tensor, Tensor]] = []
    try:
        for data, kind in types:
            places = _places(data, generator)
            own.append((data, places, data.take(places)))
            data.put_(places, _moved(own[-1][2], kind, generator))
        yield
    finally:
        for data, places, before in own:
            data.put_(places, before)


def rounded_factors(factors: Factors, kind: torch.dtype, generator: torch.Generator) -> Factors:
    """The same maps with their numbers moved in the same way."""
    maps = factors.maps
    query, key = (nudged(part, kind, generator) for part in (maps.query, maps.key))
    return replace(factors, maps=replace(maps, query=query, key=key))


def nudged(tensor: Tensor, kind: torch.dtype, generator: torch.Generator) -> Tensor:
    """The same numbers, one of twelve a spacing of `kind` up or down: mean 0, the variance of rounding."""
    places = _places(tensor, generator)
    return tensor.clone().put_(places, _moved(tensor.take(places), kind, generator))


def _places(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Which numbers move, by their flat index."""
    part, rest = divmod(tensor.numel(), MOVED)
    count = part + int(torch.randint(MOVED, (1,), generator=generator)) // (MOVED - rest)
    return torch.randint(max(tensor.numel(), 1), (count,), generator=generator).to(tensor.device)


def _moved(values: Tensor, kind: torch.dtype, generator: torch.Generator) -> Tensor:
    """Each number's neighbour in `kind`, away from 0 or towards it; 0 stays 0."""
    whole, behind = BITS[values.dtype]
    step = 1 << max(behind - BITS[kind][1], 0)
    steps = (2 * torch.randint(2, values.shape, generator=generator) - 1).to(values.device, whole) * step
    # numbers of one sign are in the order of their bits
    return torch.where(values == 0, values, (values.view(whole) + steps).view(values.dtype))


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
    own = [record(side, batch.inputs, blocks) for batch in few]
    before = _read(side, design, few, [one.calls for one in own], {})
    same = {site: site for site in side.sites}
    order = {one.site: range(one.call.query.shape[1]) for one in side.inspection.reached}
    types, found = stored_types(side.loaded.model), defaultdict[str, list[Tensor]](list)
    for _ in range(DRAWS):
        with rounded(types, generator):
            run = [beside(one, side, same, batch.inputs, order) for batch, one in zip(few, own, strict=True)]
            # each block on the states that it took before rounding
            fed = [
                beside(one, side, same, batch.inputs, order, blocks)
                for batch, one in zip(few, own, strict=True)
                if blocks
            ]
        apart = {ROWS: [one.rows for one in run]} | ({OWN_ROWS: [one.rows for one in fed]} if fed else {})
        after = _read(side, design, few, [one.calls for one in run], apart)
        if fed:
            moved = [of_blocks(one.blocks, blocks, batch) for batch, one in zip(few, fed, strict=True)]
            after[BLOCKS] = torch.cat(moved)
        for name, values in after.items():
            change = values - before[name] if name in before else values
            found[name].append(change.nanmean(0))
        tell(1)
    return found


def of_blocks(found: Mapping[str, Tensor], blocks: Sequence[Block], batch: texts.Batch) -> Tensor:
    """How far each block's output moved, (sequences, blocks); NaN where it gives no states."""
    nothing = torch.full((batch.size,), torch.nan, dtype=torch.float64)
    # more rows than sequences where a model cuts each into windows
    each = [found[path].view(batch.size, -1).mean(1) if path in found else nothing for path, _ in blocks]
    return torch.stack(each, 1)


def _read(
    side: ComparedModel,
    design: Design,
    few: texts.Batches,
    calls: Sequence[Mapping[Site, Call]],
    apart: Mapping[str, Sequence[Mapping[Site, Tensor]]],
) -> dict[str, Tensor]:
    """Read tokens.* of a few windows: each measure as (windows, heads), with the distances of each batch."""
    collector, analyzers, start = entered(side, design), side.analyzers("tokens"), 0
    for number, (batch, asked) in enumerate(zip(few, calls, strict=True)):
        for site, call in asked.items():
            query_key = hiding_padding(call, batch.inputs).query_key(site)
            if finite := finite_heads(query_key):
                numbers = sequence_numbers(len(call.query), batch, start)
                collector.read_tokens(site, query_key.select(finite), analyzers, numbers, len(query_key.heads))
        for name, found in apart.items():
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
