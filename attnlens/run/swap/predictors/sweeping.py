"""Sweeps the heads or layers of one kernel after another, and sets their harm against measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from attnlens import hooks, models, texts
from attnlens.records import Settings, Site, Swap, Task
from attnlens.requests.swap import SwapOptions
from attnlens.run.progress import Tell, timed
from attnlens.run.swap.predictors.joined import FEWEST_HEADS
from attnlens.run.swap.predictors.readings import SweptMeasures, head_measures
from attnlens.run.swap.predictors.swept import all_swept, swept_in_order
from attnlens.run.swap.sweep import Alone, Unit, sweep, units
from attnlens.runs.work import Keep, keep_nothing
from attnlens.statistics import Design
from attnlens.texts.targets import Fed


@dataclass(frozen=True)
class Windowed:
    """What is evaluated on."""

    batches: texts.Batches
    """As it was cut."""
    fed: list[Fed]
    """The same with what is to be predicted."""
    design: Design
    """How its sequences were sampled."""


@dataclass
class Sweeping:
    """All sweeps of one run."""

    loaded: models.Loaded
    options: SwapOptions
    settings: Settings
    task: Task
    over: Windowed
    sites: tuple[Site, ...]
    """All sites of the model."""
    heads_of: Mapping[Site, int]
    measures: SweptMeasures | None = None
    """What predicts harm is sought among; read for the first kernel whose heads are swept, and the same for all."""

    def swept(
        self,
        swap: Swap,
        swaps: hooks.Swaps,
        teller: Callable[[str, int], Tell],
        timings: dict[str, float],
        keep: Keep = keep_nothing,
    ) -> Swap:
        """The same record with the effect of each head or layer alone, and what predicted that of heads."""
        what, seed, over = str(self.options.sweep), self.settings.seed, self.over
        chosen = units(swaps, what, self.heads_of)
        if what == "layers" or not self.options.predictors or (what == "heads" and len(chosen) < FEWEST_HEADS):
            measures = None
        else:
            measures = self._measures(chosen, teller, timings)
        tell = teller("sweep", len(chosen) * len(over.fed))

        def alone(some: Sequence[Unit]) -> Alone:
            work = (self.loaded, self.sites, swaps, some, over.fed, self.task, over.design, self.options.path)
            return sweep(*work, tell, keep)

        if measures is None:
            return swap.model_copy(update={"sweep": alone(chosen).effects(seed)})
        run = swept_in_order if what == "predicted" else all_swept
        return swap.model_copy(update=run(chosen, alone, measures, seed))

    def _measures(
        self, chosen: Sequence[Unit], teller: Callable[[str, int], Tell], timings: dict[str, float]
    ) -> SweptMeasures:
        if self.measures is None:
            tell = teller("predictors", 1)
            with timed(timings, "predictors"):
                more = self.settings, self.over.design
                self.measures = head_measures(self.loaded, self.over.batches, chosen, *more)
            tell(1)
        return self.measures
