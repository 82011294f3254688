"""Inspect both models of a comparison, find the correspondence of their heads, and run both over the same windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from attnlens.analyzers.registry import FORMS, KEY_ANGLE, QUERY_ANGLE, measure_sources
from attnlens.errors import UnreadableError
from attnlens.kernels import OWN, attention
from attnlens.maths import linalg
from attnlens.maths.statistics import Design
from attnlens.models import hooks, texts, weights
from attnlens.models.hooks.survey import hide_padding, real_parts
from attnlens.models.trace import call_arguments, remove_hooks
from attnlens.records import Call, Measure, QueryKey, Site, Windows
from attnlens.report.report import Report
from attnlens.runs.feeding import evaluation_mode
from attnlens.runs.inspect import sequences
from attnlens.runs.inspect.inspection import Inspection, PreparedRun, SiteFactors
from attnlens.runs.inspect.pipeline import compute, survey
from attnlens.runs.inspect.sequences import SequenceValues

if TYPE_CHECKING:
    from jaxtyping import Float

ALIKE = 0.5
"""Heads count as reordered if each moved head is nearer to its partner than ALIKE, and than ALIKE times its distance to
the head with its own index. The distance between unrelated heads is about 1; that between a head and its fine-tuned
version is small. Heads that merely resemble several others stay in place."""


def match_heads(first: QueryKey, second: QueryKey) -> tuple[int, ...]:
    """Pair heads with similar M = W_Q W_Kᵀ; return the second model's head for each head of the first.

    The heads keep their order if any pair is unclear.
    """
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
    # < instead of ≤: equal heads have distance 0 in any order, and must stay in place
    reordered = bool((after < ALIKE * before).all()) and bool((after < ALIKE).all())
    return tuple((partners if reordered else numbers).tolist())


def _inner_products(first: QueryKey, second: QueryKey) -> Float[Tensor, "heads others"]:
    """Compute ⟨M_h, M'_g⟩_F = s s' tr(W_Qᵀ W_Q' · W_K'ᵀ W_K) for all pairs of heads; s and s' are the scales."""
    queries, keys = second.query.double(), second.paired_key.double()
    pairs = zip(first.query.double(), first.paired_key.double(), strict=True)
    rows = [((query.mT @ queries) * (key.mT @ keys)).sum((-2, -1)) for query, key in pairs]
    return first.scale * second.scale * torch.stack(rows)


def form_distances(first: QueryKey, second: QueryKey) -> dict[str, Float[Tensor, " heads"]]:
    """Compute each head's ‖M' − M‖/‖M‖ (1 if only M is 0) and largest principal angles of W_Q and of W_K in degrees.

    All are NaN if a form is not finite. The change is NaN if both forms are 0; an angle is NaN if both factors are 0.
    """
    finite = sorted(set(sequences.finite_heads(first)) & set(sequences.finite_heads(second)))
    table = torch.full((3, len(first.heads)), torch.nan, dtype=torch.float64)
    if finite:
        first, second = first.select(finite), second.select(finite)
        rescaled = replace(second, query=second.query * (second.scale / first.scale), scale=first.scale)
        change = linalg.relative_change(rescaled, first)
        query_angles = linalg.largest_angle(first.query, second.query)
        pairs = list(zip(first.key_of, second.key_of, strict=True))
        distinct = list(dict.fromkeys(pairs))  # heads of one group share their keys
        key_heads, others = (list(side) for side in zip(*distinct, strict=True))
        key_angles = linalg.largest_angle(first.key[key_heads], second.key[others])
        key_angles = key_angles[[distinct.index(pair) for pair in pairs]]
        rows = change.masked_fill(change.isinf(), 1.0), query_angles, key_angles
        table[:, finite] = torch.stack([values.double().cpu() for values in rows])
    return dict(zip((FORMS, QUERY_ANGLE, KEY_ANGLE), table, strict=True))


Block = tuple[str, nn.Module]  # the path of a block of the model, and the block


@dataclass(frozen=True, kw_only=True)
class ComparedModel(Inspection):
    """One model of a comparison: its inspection and the resulting report."""

    report: Report
    design: Design  # sampling design of the windows
    swaps: hooks.Swaps  # kernels of a model saved with --save, by site

    @classmethod
    def of(cls, run: PreparedRun, swaps: hooks.Swaps) -> ComparedModel:
        """Inspect a model and keep the factors of its weights; with `swaps`, tokens.* have no value."""
        with evaluation_mode(run.loaded.model):
            inspection = survey(run, factors={})
            report, results = compute(inspection)
        report = _remove_token_measures(report) if swaps else report
        parts = {each.name: getattr(inspection, each.name) for each in fields(inspection)}
        return cls(**parts, report=report, design=results.design, swaps=swaps)

    @property
    def heads(self) -> list[tuple[str, int]]:
        """Site name and head index of each head in the report."""
        return [(head.site, head.head) for head in self.report.heads]

    def without_text(self) -> ComparedModel:
        """Return a copy without batches and windows, so that a comparison covers the weights only."""
        report = self.report.model_copy().with_windows(Windows([], [], {}))
        return replace(self, inputs=None, report=report)

    def get_factors(self, site: Site) -> SiteFactors | None:
        """Return the factors of a site's weights, or the error if unreadable; None if the run did not read weights."""
        return (self.factors or {}).get(site)


def _remove_token_measures(report: Report) -> Report:
    missing = Measure(value=None, reason="the measure requires the exponential kernel, which this model does not use")
    tokens = {name for name, source in measure_sources().items() if source == "tokens"}
    heads = []
    for head in report.heads:
        measures = head.measures | dict.fromkeys(head.measures.keys() & tokens, missing)
        heads.append(head.model_copy(update={"measures": measures}))
    return report.model_copy(update={"heads": heads}).with_windows(Windows([], [], {}))


@dataclass(frozen=True)
class Pairing:
    """The correspondence of sites and heads between two models."""

    first: ComparedModel
    second: ComparedModel
    sites: dict[Site, Site]  # second model's site for each site of the first model
    order: dict[Site, tuple[int, ...]]  # second model's head for each head of the first, by the first model's sites
    unmoved: list[Site]  # sites with reordered heads that are nevertheless paired by number because of --heads

    @classmethod
    def of(cls, first: ComparedModel, second: ComparedModel) -> Pairing:
        """Pair sites in order, and heads by similarity of their forms M.

        Heads are paired by index if --heads is given, or if their order is unknown, unclear or refuted by W_V or W_O.
        """
        sites = dict(zip(first.key_heads, second.key_heads, strict=True))
        numbers = {site: tuple(range(len(key_heads))) for site, key_heads in first.key_heads.items()}
        by_number = cls(first, second, sites, numbers, [])
        forms = ((site, by_number.ordered_forms(site)) for site in sites)  # one site at a time
        order = {site: numbers[site] if isinstance(pair, str) else match_heads(*pair) for site, pair in forms}
        order = {
            site: heads if by_number.move_together(site, heads) else numbers[site] for site, heads in order.items()
        }
        if first.settings.heads is None:
            return replace(by_number, order=order)
        return replace(by_number, unmoved=[site for site in sites if order[site] != numbers[site]])

    def ordered_forms(self, site: Site) -> tuple[QueryKey, QueryKey] | str:
        """Return both models' forms, with heads in the first model's order, or why they can't be compared."""
        forms = []
        for which, side, place in (("first", self.first, site), ("second", self.second, self.sites[site])):
            factors = side.get_factors(place)
            if isinstance(factors, UnreadableError):
                return f"the form M of the {which} model can't be computed: {factors.problem}"
            if factors is None:
                return "the weights were not read"
            forms.append(factors.query_key)
        first, second = forms
        if first.query.shape != second.query.shape or first.paired_key.shape != second.paired_key.shape:
            return "the forms have different sizes"
        return first, replace(second.select(self.order[site]), heads=first.heads)

    def move_together(self, site: Site, order: Sequence[int]) -> bool:
        """Return False if reordering the heads by `order` increases the difference between the models' W_V or W_O."""
        if list(order) == sorted(order):
            return True
        layers = []
        for side, place in ((self.first, site), (self.second, self.sites[site])):
            call = next(each for each in side.one_token if each.site == place)
            roles = weights.locate_roles(side.weights_model.model, call)
            layers.append(weights.read_layer(side.weights_model.model, call, roles, None).parts)
        for name in ("value.weight", "output.weight"):
            if not all(name in layer for layer in layers):
                continue
            first, second = (layer[name].double() for layer in layers)
            moved = [order[head * len(order) // len(first)] * len(first) // len(order) for head in range(len(first))]
            if float((second[moved] - first).norm()) > float((second - first).norm()):
                return False
        return True

    @property
    def partners(self) -> torch.Tensor:
        """Index of each head's partner in the second report, in the order of the first report."""
        places = {name: place for place, name in enumerate(self.second.heads)}
        pairs = {site.name: (other.name, self.order[site]) for site, other in self.sites.items()}
        partners = [(pairs[site][0], pairs[site][1][head]) for site, head in self.first.heads]
        return torch.tensor([places[partner] for partner in partners])

    def add_divergences(
        self, values: SequenceValues, original: Pass, others: Mapping[str, Pass], batch: texts.Batch, start: int
    ) -> None:
        """Add to `values` KL(`original` ‖ other) of attention rows for each of `others`, from sequence `start` on."""
        for first, second in self.sites.items():
            before = original.calls.get(first)
            # sites of a saved swap that keep their own kernel are not visited
            after = {name: other.calls[second] for name, other in others.items() if second in other.calls}
            if before is not None and after:
                rows = self.divergences(first, before, list(after.values()), batch.inputs)
                numbers = sequences.sequence_numbers(len(before.query), batch, start)
                shape = rows[0].shape[1]
                values.add(first, dict(zip(after, rows, strict=True)), numbers, range(shape), shape)

    def divergences(
        self, first: Site, call: Call, others: Sequence[Call], inputs: Mapping[str, Tensor]
    ) -> list[Tensor]:
        """Return KL(p ‖ p') of the attention rows p of `call` and p' of each call in `others`, as (sequences, heads).

        The divergence is averaged over the queries that see a key; it is NaN if no query sees a key.
        """
        original, *calls = (
            hide_padding(replace(each, **hooks.as_float64({name: getattr(each, name) for name in WIDE})), inputs)
            for each in (call, *others)
        )
        swap, other_swap = self.first.swaps.get(first), self.second.swaps.get(self.sites[first])
        means = original.query.new_full((len(calls), *original.query.shape[:2]), torch.nan)
        for batch, queries, keys in real_parts(original.allowed, len(original.query), first.part):
            real, *real_others = (each.sequences(batch, queries, keys) for each in (original, *calls))
            step = max(1, sequences.PIECE_BYTES // (8 * means.shape[2] * real.query.shape[2] * real.key.shape[2]))
            for start in range(0, len(batch), step):
                part = range(start, min(start + step, len(batch)))
                p = _attention_rows(real.sequences(part, slice(None), slice(None)), swap)
                logarithm = p.clamp(min=FLOOR).log()
                for row, other in zip(means, real_others, strict=True):
                    q = _attention_rows(other.sequences(part, slice(None), slice(None)), other_swap)
                    terms = p * (logarithm - q[:, list(self.order[first])].clamp(min=FLOOR).log())
                    # rounding can make the divergence of equal rows negative
                    row[[batch[place] for place in part]] = terms.sum(-1).mean(-1).clamp(min=0)
        return list(means.cpu())


WIDE = ("query", "key", "value", "bias")  # parts of a call that are converted to float64
FLOOR = 1e-12  # lower bound on attention weights in KL, so that a key hidden in only one model costs at most 27.6 nats
STATES = ("hidden_states", "encoder_hidden_states")
"""Names of block inputs that are hidden states; a block's first input always counts as such."""


@dataclass(frozen=True)
class Blocks:
    """The blocks of a model that run once per forward pass, in execution order."""

    compared: Sequence[Block] = ()  # blocks up to the last one that contains an inspected site
    later: Sequence[Block] = ()  # blocks that no result of a comparison depends on

    @classmethod
    def of(cls, side: ComparedModel) -> Blocks:
        """Find the blocks of one model; return no blocks if no text is read."""
        blocks = hooks.blocks(side.loaded.model, texts.first(side.batches[0].inputs, 1)) if side.batches else []
        places = [hooks.place_of(site, blocks) for site in side.key_heads]
        # a site outside all blocks can run after the last block
        end = len(blocks) if None in places else 1 + max(place for place in places if place is not None)
        return cls(blocks[:end], blocks[end:])

    @property
    def paths(self) -> list[str]:
        """Paths of all blocks."""
        return [path for path, _ in (*self.compared, *self.later)]


@dataclass
class Pass:
    """Record of a model's forward pass on one batch."""

    calls: dict[Site, Call] = field(default_factory=dict)  # attention call of each inspected site
    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Hidden states that each compared block received, keyed by block path and input name."""
    outputs: dict[str, Tensor] = field(default_factory=dict)
    """Hidden states that each compared block returned, keyed by block path."""
    later: dict[str, object] = field(default_factory=dict)  # output of each later block, by its path


def run_pass(
    side: ComparedModel,
    inputs: Mapping[str, Tensor],
    blocks: Blocks,
    original: Pass | None = None,
    *,
    own_states: bool = True,
) -> Pass:
    """Run one side's model, and record its attention calls and the input and output states of the compared blocks.

    If `original` is given, input states are not recorded, and later blocks return their outputs in `original`; with
    `own_states`, output states are not recorded either; without, each compared block runs on its input states in
    `original`. The output states of a block are its output, or the first element of a tuple; blocks whose output states
    are not a tensor are left out.
    """
    recorded, model, sites = Pass(), side.loaded.model, side.all_sites

    def visit(site: Site, call: Call) -> None:
        if site in side.key_heads:
            # sinks are the parameter itself, which drawing the rounding of weights changes in place
            recorded.calls[site] = replace(call, sinks=None if call.sinks is None else call.sinks.clone())

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
    # a pass on the model's own states after the original records only its attention calls
    compared = blocks.compared if original is None or not own_states else ()
    handles = [block.register_forward_pre_hook(partial(enter, path), with_kwargs=True) for path, block in compared]
    replaying = nullcontext() if original is None else hooks.replay_outputs(blocks.later, original.later)
    recording = hooks.record_outputs((*compared, *(blocks.later if original is None else ())))
    with remove_hooks(handles), recording as outputs, replaying, torch.no_grad(), watching:
        hooks.forward(model, inputs, **hooks.without_logits(model))
    recorded.later = {path: outputs[path] for path, _ in blocks.later} if original is None else {}
    for path, _ in compared:
        output = outputs.get(path)
        state = output[0] if isinstance(output, tuple | list) and output else output
        if isinstance(state, Tensor):
            recorded.outputs[path] = state.clone()
    return recorded


def compare_blocks(passes: tuple[Pass, Pass], blocks: Sequence[Block], batch: texts.Batch) -> Tensor:
    """Compute ‖o' − o‖/‖o‖ of block outputs without padding, as (sequences, blocks); NaN if o or o' is missing."""
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
    """Return `state` with the dtype and device of `value`, or `value` if shapes differ or either is not a tensor."""
    if state is None or not isinstance(value, Tensor) or value.shape != state.shape:
        return value
    always = torch.ones((), dtype=torch.bool, device=value.device)  # tracers must see `value` as a source
    return torch.where(always, state.to(value.device, value.dtype), value)


def _attention_rows(call: Call, swap: hooks.Replacement | None) -> Tensor:
    """Compute attention rows, with the sink's share of each row appended.

    Rows are NaN in heads whose kernel has no attention weights, or can have negative ones.
    """
    rows = attention.weights(call, OWN)
    if swap is not None:
        heads = list(range(call.query.shape[1]) if swap.heads is None else swap.heads)
        is_matrix = swap.kernel.info.form != "output" and swap.kernel.info.positive
        rows[:, heads] = attention.weights(call.select(heads), swap.kernel).to(rows.dtype) if is_matrix else torch.nan
    return torch.cat((rows, (1 - rows.sum(-1, keepdim=True)).clamp(min=0)), -1)
