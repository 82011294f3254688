"""Run two models over the same windows, and simulate the effect of rounding on each measure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from attnlens.analyzers.registry import OWN_ROWS, ROWS, Analyzer
from attnlens.kernels import OWN, attention
from attnlens.models import hooks, texts, weights
from attnlens.models.hooks.survey import hiding_padding, real_parts
from attnlens.models.trace import call_arguments, remove_hooks
from attnlens.records import Call, QueryKey, Site
from attnlens.runs.compare.sides import Block, ComparedModel, Pairing, form_distances
from attnlens.runs.inspect import sequences
from attnlens.runs.inspect.sequences import SequenceValues
from attnlens.runs.progress import Tell

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FLOOR = 1e-12  # lower bound on attention weights in KL, so that a key hidden in only one model costs at most 27.6 nats
STATES = ("hidden_states", "encoder_hidden_states")
"""Names of block inputs that are states, besides the first input, which is one whatever its name."""


@dataclass
class Pass:
    """Record of a model's forward pass on one batch."""

    calls: dict[Site, Call] = field(default_factory=dict)  # attention call of each inspected site
    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Input states of each block, by the block's path and the input's name."""
    outputs: dict[str, Tensor] = field(default_factory=dict)  # output states of each block, by its path


def run_pass(
    side: ComparedModel, inputs: Mapping[str, Tensor], blocks: Sequence[Block] = (), original: Pass | None = None
) -> Pass:
    """Run one side's model, and record its attention calls and the input and output states of `blocks`.

    With `original`, each block runs on the input states recorded there. The output states of a block are its output or
    the first element of its output; blocks without a tensor there are left out.
    """
    recorded, model, sites = Pass(), side.loaded.model, side.all_sites

    def visit(site: Site, call: Call) -> None:
        if site in side.key_heads:
            recorded.calls[site] = call

    def enter(
        path: str, block: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        names = list(signature(block.forward).parameters)
        if original is None:
            arguments = call_arguments(block, args, kwargs)
            states = {name: arguments.get(name) for name in {*names[:1], *STATES}}
            recorded.states[path] = {name: state.clone() for name, state in states.items() if isinstance(state, Tensor)}
            return None
        known = original.states[path]
        changed = [_convert_state(known.get(name), value) for name, value in zip(names, args, strict=False)]
        named = {name: _convert_state(known.get(name), value) for name, value in kwargs.items()}
        return (*changed, *args[len(names) :]), named

    watching = hooks.replace(model, sites, side.swaps, visit=visit) if side.swaps else hooks.watch(model, sites, visit)
    handles = [block.register_forward_pre_hook(partial(enter, path), with_kwargs=True) for path, block in blocks]
    with remove_hooks(handles), hooks.record_outputs(blocks) as outputs, torch.no_grad(), watching:
        hooks.forward(model, inputs)
    for path, output in outputs.items():
        state = output[0] if isinstance(output, tuple | list) and output else output
        if isinstance(state, Tensor):
            recorded.outputs[path] = state.clone()
    return recorded


def compare_blocks(passes: tuple[Pass, Pass], blocks: Sequence[Block], batch: texts.Batch) -> Tensor:
    """Compute ‖o' − o‖/‖o‖ of each block's outputs o and o' without padding: (sequences, blocks); NaN if missing."""
    masks = [batch.inputs[name] for name in ("decoder_attention_mask", "attention_mask") if name in batch.inputs]
    changes = torch.full((batch.size, len(blocks)), torch.nan, dtype=torch.float64)
    for place, (path, _) in enumerate(blocks):
        output, other = (each.outputs.get(path) for each in passes)
        if output is None or other is None or other.shape != output.shape:
            continue
        output, other = output.double(), other.to(output.device).double()
        mask = next((mask[..., None] for mask in masks if mask.shape == output.shape[:2]), None)
        if mask is not None:
            output, other = output * mask, other * mask
        moved = (other - output).flatten(1).norm(dim=1) / output.flatten(1).norm(dim=1)
        # more rows than sequences if a model cuts each into windows
        changes[:, place] = moved.cpu().view(batch.size, -1).mean(1)
    return changes


def _convert_state(state: Tensor | None, value: object) -> object:
    """Convert `state` to the type and device of `value`; `torch.where` lets tracers see `value` as a source too."""
    if state is None or not isinstance(value, Tensor) or value.shape != state.shape:
        return value
    always = torch.ones((), dtype=torch.bool, device=value.device)
    return torch.where(always, state.to(value.device, value.dtype), value)


def _attention_rows(call: Call, swap: hooks.Replacement | None) -> Tensor:
    """Compute attention weights, with a sink's share appended; NaN for swapped heads with negative weights."""
    rows = attention.weights(call, OWN)
    if swap is not None:
        heads = list(range(call.query.shape[1]) if swap.heads is None else swap.heads)
        is_matrix = swap.kernel.info.form != "output" and swap.kernel.info.positive
        rows[:, heads] = attention.weights(call.select(heads), swap.kernel).to(rows.dtype) if is_matrix else torch.nan
    return torch.cat((rows, (1 - rows.sum(-1, keepdim=True)).clamp(min=0)), -1)


def add_divergences(
    values: SequenceValues, name: str, pairing: Pairing, passes: tuple[Pass, Pass], batch: texts.Batch, start: int
) -> None:
    """Add the divergence of both passes' attention rows to `values` as measure `name`; `start`: first sequence."""
    for first, second in pairing.sites.items():
        before, after = passes[0].calls.get(first), passes[1].calls.get(second)
        if before is not None and after is not None:  # own-kernel sites of a saved swap are not visited
            rows = divergence(pairing, first, (before, after), batch.inputs)
            numbers = sequences.sequence_numbers(len(rows), batch, start)
            values.add(first, {name: rows}, numbers, range(rows.shape[1]), rows.shape[1])


def divergence(pairing: Pairing, first: Site, calls: Sequence[Call], inputs: Mapping[str, Tensor]) -> Tensor:
    """Compute KL(P ‖ P') = Σ_j p log(p/p') of a site's two calls, mean over real queries: (sequences, heads).

    The mean is NaN if no query sees a key.
    """
    parts = [{name: getattr(call, name) for name in ("query", "key", "value", "bias")} for call in calls]
    wide = [replace(call, **hooks.as_float64(part)) for call, part in zip(calls, parts, strict=True)]
    calls = [hiding_padding(call, inputs) for call in wide]
    swaps = pairing.first.swaps.get(first), pairing.second.swaps.get(pairing.sites[first])
    means = calls[0].query.new_full(calls[0].query.shape[:2], torch.nan)
    for batch, queries, keys in real_parts(calls[0].allowed, len(means), first.part):
        real = [call.sequences(batch, queries, keys) for call in calls]
        step = max(1, sequences.PIECE_BYTES // (8 * means.shape[1] * real[0].query.shape[2] * real[0].key.shape[2]))
        for start in range(0, len(batch), step):
            part = range(start, min(start + step, len(batch)))
            pieces = (call.sequences(part, slice(None), slice(None)) for call in real)
            p, q = (_attention_rows(piece, swap) for piece, swap in zip(pieces, swaps, strict=True))
            terms = p * (p.clamp(min=FLOOR).log() - q[:, list(pairing.order[first])].clamp(min=FLOOR).log())
            # rounding can make the divergence of equal rows negative
            means[[batch[row] for row in part]] = terms.sum(-1).mean(-1).clamp(min=0)
    return means.cpu()


DRAWS = 5
"""Number of random roundings of each model's weights: each draw costs passes, and p of rounding uses Student's t with
as many degrees of freedom."""
FEW = 2
"""Number of windows on which the effect of rounding on tokens.* is measured: it varies little between windows, and each
costs 2 × DRAWS passes per model."""
BLOCKS = "compare.block_change"
"""Name of ‖o' − o‖/‖o‖ of block outputs for the first model's input states; one value per block, not per head."""
BITS = {
    torch.bfloat16: (torch.int16, 7),
    torch.float16: (torch.int16, 10),
    torch.float32: (torch.int32, 23),
    torch.float64: (torch.int64, 52),
}
"""Integer type with the same number of bits, and number of mantissa bits, of each number type that weights can be
stored in, from the widest spacing to the finest."""
DIFFERENT, MANY = 16, 4096
"""Distinct values, among the first MANY of a weight, needed to identify its stored type: a few small integers or powers
of 2 are exact in every type."""
MOVED = 12  # one number in MOVED moves by one spacing: this gives the variance of rounding, 1/12 of a squared spacing


def stored_type(weight: Tensor) -> torch.dtype:
    """Return the coarsest number type that holds all values exactly; float32 for few distinct values (gains of 1)."""
    sample = weight.flatten()[:MANY]
    if len(sample.unique()) < min(DIFFERENT, weight.numel()):  # type: ignore[no-untyped-call]
        return torch.float32
    # most weights are ruled out by the sample
    exact = (kind for kind in BITS if all(torch.equal(part.to(kind).to(part.dtype), part) for part in (sample, weight)))
    return next(exact, torch.float64)


def site_type(model: PreTrainedModel, site: Site) -> torch.dtype:
    """Return the coarsest stored type of the matrices in a site's module, taken as that of its queries and keys."""
    kinds = [stored_type(weight) for weight in model.get_submodule(site.path).parameters() if weight.dim() > 1]
    return max(kinds, key=lambda kind: torch.finfo(kind).eps, default=torch.float32)


def stored_types(model: PreTrainedModel) -> list[tuple[Tensor, torch.dtype]]:
    """Return the floating-point weights of a model with their stored types."""
    return [(weight.data, stored_type(weight.data)) for weight in model.parameters() if weight.is_floating_point()]


@contextmanager
def move_weights(types: Sequence[tuple[Tensor, torch.dtype]], generator: torch.Generator) -> Iterator[None]:
    """Move one value in twelve of each weight by ± one spacing of its stored type inside the block; restore at exit."""
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
    """Copy a tensor and move one value in twelve by ± one spacing of `kind`: mean 0, the variance of rounding."""
    return tensor.clone().put_(*_draw_moves(tensor, kind, generator))


def _draw_moves(tensor: Tensor, kind: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw flat indices, one in twelve on average, and a random neighbour in `kind` of each value there; 0 stays 0."""
    part, remainder = divmod(tensor.numel(), MOVED)
    count = part + int(torch.randint(MOVED, (1,), generator=generator)) // (MOVED - remainder)
    places = torch.randint(max(tensor.numel(), 1), (count,), generator=generator).to(tensor.device)
    values = tensor.take(places)
    whole, behind = BITS[values.dtype]
    step = 1 << max(behind - BITS[kind][1], 0)
    steps = (2 * torch.randint(2, values.shape, generator=generator) - 1).to(values.device, whole) * step
    # floats of one sign are ordered like their bits read as integers
    return places, torch.where(values == 0, values, (values.view(whole) + steps).view(values.dtype))


def draw_weights(side: ComparedModel, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw the effect of rounding on the measures of forms: (draws, heads), NaN for heads without a form."""
    analyzers = side.analyzers_of("weights")
    tables: dict[tuple[str, str], Tensor] = {}
    for site in side.key_heads:
        factors = side.factors_of(site)
        if isinstance(factors, weights.Factors):
            changes = _draw_site_changes(factors, analyzers, site_type(side.loaded.model, site), generator)
            tables |= {(site.name, name): values for name, values in changes.items()}
    return sequences.arrange_by_measure(tables, side.heads, DRAWS)


def _draw_site_changes(
    factors: weights.Factors, analyzers: Sequence[Analyzer], kind: torch.dtype, generator: torch.Generator
) -> dict[str, Tensor]:
    """Draw the changes of one site's scalars, and the distances of its forms from unrounded ones; (draws, heads)."""
    form = factors.query_key
    finite = sequences.finite_heads(form)
    analyzers = [analyzer for analyzer in analyzers if not analyzer.needs_base] if finite else []

    def scalars(form: QueryKey) -> dict[str, Tensor]:
        """Compute the scalar measures (no curves) by name."""
        by_name: dict[str, Tensor] = {}
        for analyzer in analyzers:
            readings = analyzer.function(form.select(finite))
            names = [info.name for info in analyzer.measures if not info.curve and info.name in readings]
            by_name |= {name: readings[name].double().cpu() for name in names}
        return by_name

    before = scalars(form)
    drawn: dict[str, list[Tensor]] = defaultdict(list)
    for _ in range(DRAWS):
        query, key = (move_values(part, kind, generator) for part in (factors.maps.query, factors.maps.key))
        rounded_form = replace(factors, maps=replace(factors.maps, query=query, key=key)).query_key
        for name, values in form_distances(form, rounded_form).items():
            drawn[name].append(values)
        for name, values in scalars(rounded_form).items():
            change = torch.full((len(form.heads),), torch.nan, dtype=torch.float64)
            change[finite] = values - before[name]
            drawn[name].append(change)
    return {name: torch.stack(changes) for name, changes in drawn.items()}


def draw_tokens(
    side: ComparedModel, cut: texts.Cut, blocks: Sequence[Block], generator: torch.Generator, tell: Tell
) -> dict[str, Tensor]:
    """Draw the effect of rounding on the means of tokens.* over a few windows, on attention rows (KL) and on blocks."""
    batches = texts.batches(side.loaded, side.contents, cut)
    recorded = [run_pass(side, batch.inputs, blocks) for batch in batches]
    order = {site: tuple(range(len(key_heads))) for site, key_heads in side.key_heads.items()}
    identity, analyzers = Pairing(side, side, {site: site for site in order}, order, []), side.analyzers_of("tokens")

    def measure(passes: Sequence[Pass], compared: Mapping[str, Sequence[Pass]]) -> dict[str, Tensor]:
        """Compute tokens.* in `passes`, and the divergence of rows in `compared` by measure, as (windows, heads)."""
        values, start = SequenceValues(batches.sequences), 0
        for number, batch in enumerate(batches):
            for site, call in passes[number].calls.items():
                query_key = hiding_padding(call, batch.inputs).query_key(site)
                if finite := sequences.finite_heads(query_key):
                    numbers = sequences.sequence_numbers(len(call.query), batch, start)
                    values.measure(query_key.select(finite), analyzers, numbers, len(query_key.heads))
            for name, others in compared.items():
                add_divergences(values, name, identity, (recorded[number], others[number]), batch, start)
            start += batch.size
        return sequences.arrange_by_measure(values.means, side.heads, batches.sequences)

    before = measure(recorded, {})
    types, changes = stored_types(side.loaded.model), defaultdict[str, list[Tensor]](list)
    for _ in range(DRAWS):
        with move_weights(types, generator):
            passes = [run_pass(side, batch.inputs) for batch in batches]
            block_passes = []
            if blocks:  # each with its input states before rounding
                originals = zip(batches, recorded, strict=True)
                block_passes = [run_pass(side, batch.inputs, blocks, original) for batch, original in originals]
        after = measure(passes, {ROWS: passes} | ({OWN_ROWS: block_passes} if blocks else {}))
        if blocks:
            pairs = zip(zip(recorded, block_passes, strict=True), batches, strict=True)
            after[BLOCKS] = torch.cat([compare_blocks(pair, blocks, batch) for pair, batch in pairs])
        for name, values in after.items():
            change = values - before[name] if name in before else values
            changes[name].append(change.nanmean(0))
        tell(1)
    return {name: torch.stack(drawn) for name, drawn in changes.items()}
