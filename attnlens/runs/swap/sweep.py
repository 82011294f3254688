"""Swap heads or layers one at a time, and rank them by effect on the loss."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnlens.analyzers import registry
from attnlens.maths.statistics import Design, Interval, false_discovery, p_values, paired_difference, rank_correlation
from attnlens.maths.statistics.associations import PERMUTATIONS, permutation_tests, split_half, windows_interval
from attnlens.models import hooks, texts
from attnlens.models.loading import Loaded
from attnlens.models.texts.targets import NOTHING, Fed, output_options, states_of
from attnlens.records import Effect, Prediction, Predictor, Settings, Site, Task
from attnlens.runs import checks
from attnlens.runs.inspect.inspection import PreparedRun
from attnlens.runs.inspect.pipeline import inspect_sites
from attnlens.runs.inspect.results import Results
from attnlens.runs.outputs import divergence, predictions, sequence_losses, sequence_means
from attnlens.runs.progress import AddSteps
from attnlens.runs.store import Keep, keep_nothing
from attnlens.runs.swap.sites import SwapSetup

if TYPE_CHECKING:
    from jaxtyping import Float


LEVEL = 0.05  # corrected p below which a measure counts as a predictor
FEWEST_HEADS = 8  # minimum number of swept heads for predictors
CONSTANT = "the same in every head"


@dataclass(frozen=True)
class SweptMeasures:
    """Scalar measures of the heads that a sweep swaps."""

    values: dict[str, Float[Tensor, " units"]]  # by name; NaN for heads without a value
    windows: dict[str, Float[Tensor, "windows units"]]  # values per sequence, for measures averaged over sequences
    reasons: dict[str, str]  # why a measure is missing: no head has a value, or all values are equal


def measure_heads(loaded: Loaded, batches: texts.Batches, settings: Settings, units: Sequence[Unit]) -> SweptMeasures:
    """Compute the scalar measures of `inspect` for the heads in `units`, from weights and one pass over the batches."""
    analyzers = registry.select_sweep_analyzers()
    sites = checks.survey_model(loaded, batches.batches[0].inputs).sites
    chosen = {site for site, _ in units}
    site_calls = [each for each in sites if each.site in chosen]
    inspection = inspect_sites(PreparedRun(loaded, settings, analyzers), sites, site_calls, batches)
    results = Results(inspection, {name: inspection.read_unit(name) for name in inspection.units})
    measures = {(record.site, record.head): record.measures for record in results.heads}
    values, windows = dict[str, Tensor](), dict[str, Tensor]()
    reasons, constant = dict[str, str](), list[str]()
    infos = [info for analyzer in analyzers for info in analyzer.measures]
    for name in [info.name for info in infos if not info.curve and not info.labels]:
        by_unit = [measures[site.name, head or 0].get(name) for site, head in units]
        numbers = [torch.nan if measure is None or measure.value is None else measure.value for measure in by_unit]
        column = torch.tensor(numbers, dtype=torch.float64)
        if bool(column.isnan().all()):
            explanations = [measure.reason for measure in by_unit if measure is not None and measure.reason]
            reasons[name] = next(iter(explanations), "no head has a value")
        elif not bool((column[~column.isnan()].diff() != 0).any()):
            constant.append(name)
        else:
            values[name] = column
            if all((site.name, name) in results.windows for site, _ in units):
                windows[name] = torch.stack([results.windows[site.name, name][:, head or 0] for site, head in units], 1)
    return SweptMeasures(values, windows, reasons | dict.fromkeys(sorted(constant), CONSTANT))


def find_predictors(alone: UnitEffects, measures: SweptMeasures, seed: int) -> tuple[list[Predictor], Prediction]:
    """Correlate each measure with the heads' harm (rise in loss or distance); omit heads without a finite harm.

    Return the predictors, sorted by corrected p, and a summary of the tests.
    """
    harm, rises = alone.harms, alone.changed - alone.original
    names, left_out = list(measures.values), dict(measures.reasons)
    table = torch.stack(list(measures.values.values())) if names else torch.zeros(0, len(harm), dtype=torch.float64)
    tests = permutation_tests(table, harm, seed=seed)
    predictors = []
    for name, p_value, corrected in zip(names, tests.p_value.tolist(), tests.corrected.tolist(), strict=True):
        if math.isnan(p_value):
            left_out[name] = "fewer than four heads have both a value and a harm, or their harms are all equal"
        else:
            predictors.append(_predictor(name, alone, measures, (p_value, corrected), seed))
    predictors.sort(key=lambda predictor: (predictor.p_corrected, -abs(predictor.rho)))
    finite = ~harm.isnan()
    reliability = split_half(rises[finite].mT, alone.sizes, alone.design, seed)
    known = not math.isnan(reliability)
    why = "there are fewer than two windows or four heads with a value, or all heads have equal harms"
    return predictors, Prediction(
        heads=len(harm),
        diverged=int((~finite).sum()),
        measures=len(predictors),
        permutations=PERMUTATIONS,
        reliability=reliability if known else None,
        ceiling=math.sqrt(reliability) if known else None,
        left_out=left_out,
        reasons={} if known else dict.fromkeys(("reliability", "ceiling"), why),
    )


def _predictor(name: str, alone: UnitEffects, measures: SweptMeasures, p: tuple[float, float], seed: int) -> Predictor:
    """Correlate one measure with the harm, with intervals over heads, layers and windows."""

    def ends(interval: Interval) -> tuple[float, float] | None:
        return None if math.isnan(interval.low) else (interval.low, interval.high)

    value, harm = measures.values[name], alone.harms
    heads = [(site.path, head) for site, head in alone.units]  # ALBERT's layers share heads
    over_heads = rank_correlation(value, harm, heads, seed=seed)
    layers = ends(rank_correlation(value, harm, [site.layer for site, _ in alone.units], seed=seed))
    present = ~(value + harm).isnan()
    measure = measures.windows[name][alone.rows][:, present] if name in measures.windows else value[present]
    rises = (alone.changed - alone.original)[present].mT
    windows = ends(windows_interval(measure, rises, alone.sizes, alone.design, over_heads.value, seed=seed))
    one_window, partial = "a single window or text has no spread", "some heads lack a value in some windows"
    reasons = {} if windows else {"sequences_ci95": one_window if alone.design.freedom < 1 else partial}
    return Predictor(
        measure=name,
        rho=over_heads.value,
        heads=int(present.sum()),
        left_out=int((~present).sum()),
        heads_ci95=ends(over_heads),
        layers_ci95=layers,
        sequences_ci95=windows,
        p_value=p[0],
        p_corrected=p[1],
        holds=p[1] < LEVEL and layers is not None and layers[0] * layers[1] > 0,
        reasons=reasons if layers else reasons | {"layers_ci95": "all heads belong to one layer"},
        values=[None if math.isnan(number) else number for number in value[alone.order].tolist()],
    )


Unit = tuple[Site, int | None]  # a site, and the number of a head or None for all heads


def list_units(swaps: hooks.Swaps, what: str, heads_of: Mapping[Site, int]) -> list[Unit]:
    """List the units to swap individually: whole layers if `what` is `layers`, otherwise each swapped head."""
    if what == "layers":
        return [(site, None) for site in swaps]
    return [(site, head) for site, swap in swaps.items() for head in swap.heads or range(heads_of[site])]


@dataclass(frozen=True)
class UnitEffects:
    """Effects of individually swapped units on each sequence with predictions."""

    units: list[Unit]  # individually swapped units
    original: Float[Tensor, " windows"]  # loss of the original model; 0 if distances are compared
    changed: Float[Tensor, "units windows"]  # loss, or distance from the original, with each unit swapped
    sizes: Float[Tensor, " windows"]  # weight of each sequence in the mean
    rows: list[int]  # indices of these sequences among all evaluated sequences
    design: Design  # how the sequences were sampled
    tested: bool  # True if differences are tested: losses are, distances (never negative) are not

    @property
    def harms(self) -> Float[Tensor, " units"]:
        """Mean increase in loss or distance that swapping each unit causes; NaN if the model diverged."""
        means = (self.changed - self.original).double() @ self.sizes / self.sizes.sum()
        return torch.where(self.changed.isfinite().all(1), means, torch.nan)

    @property
    def order(self) -> list[int]:
        """Indices of the units by decreasing harm; units that made the model diverge come first."""
        return self.harms.nan_to_num(math.inf).argsort(descending=True, stable=True).tolist()

    def effects(self, seed: int) -> list[Effect]:
        """Return the units' effects by decreasing harm, with 95 % intervals and tests at a 5 % false discovery rate."""
        finite = self.changed.isfinite().all(1)
        p = torch.full((len(self.units),), torch.nan, dtype=torch.float64)  # a diverged unit has no p-value
        if self.tested:
            p[finite] = p_values((self.changed - self.original)[finite], self.design, self.sizes, seed)
        significant = false_discovery(p).tolist()
        effects = []
        for number in self.order:
            site, head = self.units[number]
            measured: dict[str, Any] = {"delta": None}
            if finite[number]:
                pair = self.original, self.changed[number]
                delta, low, high = paired_difference(*pair, self.design, weights=self.sizes, seed=seed)
                measured = {"delta": delta, "ci95": None if math.isnan(low) else (low, high)}
                measured["p_value"] = None if p[number].isnan() else float(p[number])  # also if all differences are 0
                measured["significant"] = significant[number]
            effects.append(Effect(layer=site.layer, head=head, part=site.part, **measured))
        return effects


def sweep(
    setup: SwapSetup,
    chosen: list[Unit],
    batches: Sequence[Fed],
    design: Design,
    progress: AddSteps,
    keep: Keep = keep_nothing,
) -> UnitEffects:
    """Measure the loss (or distance) with each unit swapped alone; blocks before the unit are not recomputed.

    `keep` stores and reuses results.
    """
    blocks, task = hooks.blocks(setup.loaded.model, batches[0].inputs), setup.task
    before: list[Tensor] = []
    after: dict[Unit, list[Tensor]] = defaultdict(list)
    for number, fed in enumerate(batches):
        batch = SweptBatch(setup, fed, blocks)
        for unit in chosen:
            site, head = unit
            name = f"batch {number}, {site.name}, " + ("all heads" if head is None else f"head {head}")
            losses = keep(name, partial(batch.losses, site, head))
            after[unit].append(losses["changed"])
            progress(1)
        before.append(losses["original"])
    weights = torch.cat([_sequence_weights(fed, task) for fed in batches])
    rows = (weights > 0).nonzero()[:, 0].tolist()
    changed = torch.stack([torch.cat(after[unit]) for unit in chosen])
    tested = task != "hidden" and not batches[0].noise
    return UnitEffects(chosen, torch.cat(before), changed, weights[rows], rows, design.select(rows), tested)


@dataclass
class SweptBatch:
    """One batch, on which units are swapped individually."""

    setup: SwapSetup
    fed: Fed
    blocks: list[tuple[str, nn.Module]]  # the model's blocks in execution order

    @cached_property
    def original(self) -> tuple[dict[str, object], Tensor, Tensor]:
        """The original model's block outputs, its predictions (or hidden states), and its loss on each sequence."""
        with hooks.record_outputs(self.blocks) as outputs:
            original = self._run()
        return outputs, original, _losses(original, original, self.fed, self.setup.task)

    def losses(self, site: Site, head: int | None) -> dict[str, Tensor]:
        """Compute each sequence's loss in the original model, and with one head (None: all) of a site swapped."""
        outputs, original, own_losses = self.original
        setup, swap = self.setup, self.setup.swaps[site]
        if head is not None:  # select the head's fitted parameters
            index = head if swap.heads is None else swap.heads.index(head)
            swap = hooks.Replacement(swap.kernel.select_head(index), (head,))
        with (
            hooks.replace(setup.loaded.model, setup.sites, {site: swap}, setup.path),
            # exact, because no earlier block changes
            hooks.replay_outputs(self.blocks[: hooks.place_of(site, self.blocks) or 0], outputs),
        ):
            new = self._run()
        return {"original": own_losses, "changed": _losses(original, new, self.fed, setup.task)}

    def _run(self) -> Tensor:
        """Return the logits at predicted positions, or the states (batch, tokens, d_model) for the task `hidden`."""
        with torch.no_grad():
            result = hooks.forward(self.setup.loaded.model, self.fed.inputs, **output_options(self.setup.task))
        logits = predictions(result, self.fed, self.setup.task)
        return states_of(result) if logits is None else logits


def _losses(original: Tensor, new: Tensor, fed: Fed, task: Task) -> Tensor:
    """Return each sequence's mean loss; for noise, KL(original ‖ new); for the task `hidden`, 1 − cosine of states."""
    if task == "hidden":
        distance = 1 - torch.nn.functional.cosine_similarity(original.double(), new.double(), dim=-1)
        # rows can be windows of an image, or contain all images
        distance = distance.reshape(texts.sequences_in(fed.inputs), -1)
        mask = fed.inputs.get("attention_mask", torch.ones_like(distance))
        mask = mask if mask.shape == distance.shape else torch.ones_like(distance)
        return ((distance * mask).sum(1) / mask.sum(1)).clamp_min(0).cpu()  # negative values are rounding errors
    # without targets, the original's most likely prediction is the target
    targets = original.argmax(-1, keepdim=True) if fed.targets is None else fed.targets
    if fed.noise:
        return sequence_means(divergence(original, new), targets != NOTHING)[0].clamp_min(0)
    return sequence_losses(new, targets)[0]


def _sequence_weights(fed: Fed, task: Task) -> Tensor:
    """Return each sequence's weight in means: the number of predicted (`hidden`: real) tokens, or 1 if unknown."""
    if task == "hidden" and "attention_mask" in fed.inputs:
        return fed.inputs["attention_mask"].sum(1).double().cpu()
    if fed.targets is None:
        return torch.ones(texts.sequences_in(fed.inputs), dtype=torch.float64)
    return (fed.targets != NOTHING).sum(1).double().cpu()
