"""Find which measures of `inspect` predict the harm of a kernel in single heads, on the windows of the sweep."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlens import hooks, models, registry
from attnlens.records import Prediction, Predictor, Settings, Site, Swap, Task
from attnlens.requests.swap import SwapOptions
from attnlens.run import checks
from attnlens.run.inspect.collector import Collector
from attnlens.run.inspect.pipeline import Inspection
from attnlens.run.swap.sweep import Alone, Unit, sweep, units
from attnlens.runs.progress import Tell, silent, timed
from attnlens.runs.work import Keep, keep_nothing
from attnlens.statistics import Design, Interval, rank_correlation
from attnlens.statistics.associations import PERMUTATIONS, over_windows, permutation_tests, split_half
from attnlens.texts import Batches
from attnlens.texts.targets import Fed

if TYPE_CHECKING:
    from jaxtyping import Float

LEVEL = 0.05
"""p below which a measure is named."""
FEWEST_HEADS = 8
"""Heads from which measures are set against their harm."""
ONE_LAYER, ONE_WINDOW = "all heads are of one layer", "one window, or one text, has no spread"
TOO_FEW = "fewer than four heads have both, or the harm is the same in all of them"
PARTIAL = "some heads have no value in each window"
CONSTANT = "the same in every head"


@dataclass(frozen=True)
class SweptMeasures:
    """The scalar measures of some heads."""

    values: dict[str, Float[Tensor, " units"]]
    """By name; NaN in heads without a value."""
    windows: dict[str, Float[Tensor, "windows units"]]
    """The same sequence by sequence, of those that are means over them."""
    reasons: dict[str, str]
    """Why a measure is in neither: no head has a value, or all have the same."""


@dataclass
class Sweeping:
    """All sweeps of one run."""

    loaded: models.Loaded
    options: SwapOptions
    settings: Settings
    task: Task
    evaluated: Batches
    """What is evaluated on, as it was cut."""
    fed: list[Fed]
    """The same with what is to be predicted."""
    design: Design
    """How its sequences were sampled."""
    sites: tuple[Site, ...]
    """All sites of the model."""
    heads_of: Mapping[Site, int]
    measures: SweptMeasures | None = None
    """Read for the first kernel whose heads are swept, and the same for all."""

    def swept(
        self,
        swap: Swap,
        swaps: hooks.Swaps,
        teller: Callable[[str, int], Tell],
        timings: dict[str, float],
        keep: Keep = keep_nothing,
    ) -> Swap:
        """Return the record with the effect of each head or layer alone, and what predicts that of heads."""
        what, seed = str(self.options.sweep), self.settings.seed
        chosen = units(swaps, what, self.heads_of)
        compared = what == "heads" and self.options.predictors and len(chosen) >= FEWEST_HEADS
        if compared and self.measures is None:
            tell = teller("predictors", 1)
            with timed(timings, "predictors"):
                self.measures = head_measures(self.loaded, self.evaluated, chosen, self.settings, self.design)
            tell(1)
        tell = teller("sweep", len(chosen) * len(self.fed))
        work = (self.loaded, self.sites, swaps, chosen, self.fed, self.task, self.design, self.options.path)
        alone = sweep(*work, tell, keep)
        effects = alone.effects(seed)
        if not compared or self.measures is None:
            return swap.model_copy(update={"sweep": effects})
        predictors, prediction = predicted_by(alone, self.measures, seed)
        at = {(site.layer, head): place for place, (site, head) in enumerate(chosen)}
        order = [at[effect.layer, effect.head] for effect in effects]
        columns = {name: value[order].tolist() for name, value in self.measures.values.items()}
        filled = [
            one.model_copy(update={"values": [None if math.isnan(x) else x for x in columns[one.measure]]})
            for one in predictors
        ]
        return swap.model_copy(update={"sweep": effects, "predictors": filled, "prediction": prediction})


def head_measures(
    loaded: models.Loaded, batches: Batches, units: Sequence[Unit], settings: Settings, design: Design
) -> SweptMeasures:
    """Read what `inspect` reads of these heads: one forward pass over the batches, and the weights of their sites."""
    wanted = registry.beside_sweeps()
    collector = Collector(settings.heads, design=design)
    inspection = Inspection(loaded, settings, wanted, collector, silent, {})
    inspection.read(checks.sites(loaded, batches.batches[0].inputs), {site for site, _ in units}, batches)
    values: dict[str, Tensor] = {}
    windows: dict[str, Tensor] = {}
    reasons: dict[str, str] = {}
    infos = [info for found in wanted for info in found.measures]
    for name in [info.name for info in infos if not info.curve and not info.labels]:
        read = [collector.drafts[site, head or 0].measures.get(name) for site, head in units]
        numbers = [torch.nan if one is None or one.value is None else one.value for one in read]
        values[name] = torch.tensor(numbers, dtype=torch.float64)
        if bool(values[name].isnan().all()):
            told = [one.reason for one in read if one is not None and one.reason]
            reasons[name] = told[0] if told else "no head has a value"
        elif all((site, name) in collector.windows for site, _ in units):
            rows = [collector.windows[site, name][:, head or 0] for site, head in units]
            windows[name] = torch.stack(rows, 1)
    values = {name: value for name, value in values.items() if name not in reasons}
    alike = {name for name, value in values.items() if not bool((value[~value.isnan()].diff() != 0).any())}
    return SweptMeasures(
        {name: value for name, value in values.items() if name not in alike},
        {name: value for name, value in windows.items() if name not in alike},
        reasons | dict.fromkeys(sorted(alike), CONSTANT),
    )


def predicted_by(alone: Alone, measures: SweptMeasures, seed: int) -> tuple[list[Predictor], Prediction]:
    """Return each measure's rank correlation with the harm of these heads, the surest first, and what was looked at.

    Heads that diverged have no harm, and are left out.
    """
    harm, rises = alone.harms, alone.changed - alone.own
    names, left_out = list(measures.values), dict(measures.reasons)
    table = torch.stack(list(measures.values.values())) if names else torch.zeros(0, len(harm), dtype=torch.float64)
    tests = permutation_tests(table, harm, seed=seed)
    found = []
    for name, p_value, corrected in zip(names, tests.p_value.tolist(), tests.corrected.tolist(), strict=True):
        if math.isnan(p_value):
            left_out[name] = TOO_FEW
        else:
            found.append(_predictor(name, alone, measures, (p_value, corrected), seed))
    found.sort(key=lambda one: (one.p_corrected, -abs(one.rho)))
    finite = ~harm.isnan()
    stable = split_half(rises[finite].mT, alone.sizes, alone.design, seed)
    known = not math.isnan(stable)
    why = "fewer than two windows, or four heads with a harm, or it is the same in all"
    return found, Prediction(
        heads=len(harm),
        diverged=int((~finite).sum()),
        measures=len(found),
        permutations=PERMUTATIONS,
        reliability=stable if known else None,
        ceiling=math.sqrt(stable) if known else None,
        left_out=left_out,
        reasons={} if known else dict.fromkeys(("reliability", "ceiling"), why),
    )


def _predictor(name: str, alone: Alone, measures: SweptMeasures, p_values: tuple[float, float], seed: int) -> Predictor:
    """Correlate one measure with the harm, with intervals over heads, layers and windows."""
    value, harm, layer_numbers = measures.values[name], alone.harms, [site.layer for site, _ in alone.units]
    own = [(site.path, head) for site, head in alone.units]  # ALBERT's layers share heads
    over_heads = rank_correlation(value, harm, own, seed=seed)
    layers = _ends(rank_correlation(value, harm, layer_numbers, seed=seed))
    there = ~(value + harm).isnan()
    measure = measures.windows[name][alone.kept][:, there] if name in measures.windows else value[there]
    rises = (alone.changed - alone.own)[there].mT
    windows = _ends(over_windows(measure, rises, alone.sizes, alone.design, over_heads.value, seed=seed))
    missing = {
        "sequences_ci95": "" if windows else ONE_WINDOW if alone.design.freedom < 1 else PARTIAL,
        "layers_ci95": "" if layers else ONE_LAYER,
    }
    return Predictor(
        measure=name,
        rho=over_heads.value,
        heads=int(there.sum()),
        left_out=int((~there).sum()),
        heads_ci95=_ends(over_heads),
        layers_ci95=layers,
        sequences_ci95=windows,
        p_value=p_values[0],
        p_corrected=p_values[1],
        holds=p_values[1] < LEVEL and layers is not None and layers[0] * layers[1] > 0,
        reasons={field: why for field, why in missing.items() if why},
    )


def _ends(found: Interval) -> tuple[float, float] | None:
    return None if math.isnan(found.low) else (found.low, found.high)
