"""What all kernels of one run of swap-kernel share: the model, proven, its sites, and what it is evaluated on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from attnlens import hooks, models, texts
from attnlens.choices import Route
from attnlens.kernels import Kernel
from attnlens.kernels.spelling import HeadShape
from attnlens.records import Settings, Site, Skipped, Task
from attnlens.requests.swap import SwapOptions
from attnlens.run import checks
from attnlens.run.checks import predictions, refuse_initialised
from attnlens.run.outcomes.agreement import Continued, Prompts, own_continuation
from attnlens.run.outcomes.differences import Differences, Variant
from attnlens.run.outcomes.outputs import run
from attnlens.run.swap.controls import shapes_of
from attnlens.run.swap.healing import changed_weights
from attnlens.run.swap.predictors import Sweeping
from attnlens.run.swap.ranks.calibration import Sample
from attnlens.run.swap.ranks.plans import check_fits
from attnlens.run.swap.resources import enough_memory, peak_of
from attnlens.run.swap.sites import chosen_sites, idle_sites, refuse_crossing
from attnlens.runs.progress import Progress, Tell, telling, timed
from attnlens.statistics import Design
from attnlens.texts.targets import Fed


@dataclass
class Swapping:
    """One run of `swap_kernel`, before its kernels."""

    loaded: models.Loaded
    options: SwapOptions
    settings: Settings
    task: Task
    evaluated: texts.Batches
    """What is evaluated on, as it was cut."""
    fed: list[Fed]
    """The same with what is to be predicted."""
    design: Design
    """How the evaluated sequences were sampled."""
    calibrated: texts.Batches | None
    """What kernels are fitted on, and weights healed."""
    samples: tuple[Sample, ...]
    """What a budget fits on, chooses by and promises from; the first of them where its ranks are given."""
    progress: Progress
    prompts: Prompts | str = "nothing is generated"
    """What is continued greedily, or why nothing is."""
    shared: float = 0.0
    """Share of the evaluated tokens that stand in the calibration text too."""
    sites: tuple[Site, ...] = ()
    heads_of: dict[Site, int] = field(default_factory=dict)
    chosen: dict[Site, tuple[int, ...] | None] = field(default_factory=dict)
    """Where the kernel is swapped, and in which heads; None means all."""
    shapes: dict[Site, HeadShape] = field(default_factory=dict)
    """What the state of the chosen heads depends on."""
    idle: list[Skipped] = field(default_factory=list)
    """Attention that the evaluated input does not run."""
    identity_error: float = 0.0
    controls: dict[object, Differences] = field(default_factory=dict)
    """What was measured of controls, by their keys: several kernels may have one in common."""
    agreements: dict[object, dict[str, Any]] = field(default_factory=dict)
    """For how long their greedy continuations are the original's."""
    timings: dict[str, float] = field(default_factory=dict)

    def survey(self) -> None:
        """Find the sites, prove that recomputing attention changes nothing, choose the sites.

        Raises UsageError for a kernel that has no meaning in a chosen cross-attention.
        """
        with timed(self.timings, "survey"), enough_memory(self.loaded.model, self.probe, nullcontext):
            self._survey()
        for kernel in self.options.kernels:
            refuse_crossing(kernel, list(self.chosen))

    def _survey(self) -> None:
        survey = checks.surveyed(self.loaded, self.probe)
        reached = survey.reached
        self.identity_error = checks.proven_whole(self.loaded, self.probe)
        refuse_initialised(self.loaded, self.probe, predictions(self.task))
        self.sites = tuple(found.site for found in reached)
        self.heads_of = {found.site: found.call.query.shape[1] for found in reached}
        if self.options.ranks is not None:
            check_fits(self.options.ranks, reached)
        self.chosen = chosen_sites(reached, self.settings.layers, self.settings.heads, self.options.part)
        self.shapes = shapes_of(reached, self.chosen)
        self.idle = idle_sites(survey, self.settings.layers)

    def swaps(self, kernel: Kernel) -> hooks.Swaps:
        """That kernel at the chosen sites."""
        return {site: hooks.Replacement(kernel, heads) for site, heads in self.chosen.items()}

    def variant(
        self, swaps: hooks.Swaps, weights: Mapping[str, Tensor] | None = None, path: Route | None = None
    ) -> Variant:
        """The model with these kernels in place, and with these weights; by that path, or the one asked for."""

        @contextmanager
        def changed() -> Iterator[None]:
            replaced = hooks.replace(self.loaded.model, self.sites, swaps, path or self.options.path)
            with changed_weights(self.loaded.model, weights or {}), replaced:
                yield

        return changed

    @property
    def probe(self) -> dict[str, Tensor]:
        """Two of the sequences, by which the model is proven."""
        return texts.first(self.fed[0].inputs, 2)

    @property
    def peak(self) -> int | None:
        """The largest memory of a pass over one batch, as the model is now."""
        return peak_of(self.loaded.model, lambda: run(self.loaded.model, self.fed[0], self.task))

    @cached_property
    def own_peak(self) -> int | None:
        """The same of the original model."""
        return self.peak

    @cached_property
    def continuation(self) -> tuple[Continued | str, list[str]]:
        """How the original model continues the prompts, and what a reader must know of it."""
        return own_continuation(self.loaded.model, self.prompts, self.options.generate)

    @cached_property
    def sweeping(self) -> Sweeping:
        """Sweeps the heads or layers of each kernel."""
        over = self.evaluated, self.fed, self.design
        return Sweeping(self.loaded, self.options, self.settings, self.task, *over, self.sites, self.heads_of)

    def teller(self, stage: str, total: int, kernel: Kernel) -> Tell:
        """Tells the progress of a stage of one kernel, which is named where there are several."""
        named = f"{kernel.spelling}, {stage}" if len(self.options.kernels) > 1 else stage
        return telling(self.progress, named, total)
