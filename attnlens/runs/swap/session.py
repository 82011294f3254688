"""The state of a run that its kernels share, and the steps that `ranks` and `heal` add to it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnlens.choices import Route
from attnlens.kernels import Kernel
from attnlens.kernels.spelling import HeadShape
from attnlens.maths.statistics import Design
from attnlens.models import hooks, loading, texts
from attnlens.models.hooks import SiteCall
from attnlens.models.texts.sequences import position_limit
from attnlens.models.texts.targets import Fed
from attnlens.records import Agreement, ModelInfo, Plan, Settings, Site, Skipped, Task
from attnlens.requests.swap import SwapOptions
from attnlens.runs import checks
from attnlens.runs.checks import predictions, refuse_initialised
from attnlens.runs.differences import Continued, Differences, Prompts, continue_prompts
from attnlens.runs.outputs import Variant, enough_memory, peak_of, run
from attnlens.runs.progress import Progress, Tell, telling, time_stage
from attnlens.runs.swap.sites import chosen_sites, head_shapes, idle_sites, refuse_crossing

if TYPE_CHECKING:
    from jaxtyping import Float

Run = TypeVar("Run", contravariant=True)
"""A kernel's run (`KernelRun`, which is defined above this module because it uses the session)."""


class RankStep(Protocol[Run]):
    """Chooses the ranks of the kernel `rank` instead of a fit (`attnlens.lab.ranks`)."""

    def cut(self, session: SwapSession, contents: Sequence[texts.Content], cut: texts.Cut) -> Sequence[texts.Batches]:
        """Cut the calibration text, and return its parts. Raise UsageError if the model has no loss on it."""

    def check_model(self, reached: Sequence[SiteCall]) -> None:
        """Raise UsageError if the ranks do not fit the model's sites."""

    def choose(self, run: Run) -> hooks.Swaps:
        """Return the swap with the chosen ranks."""

    def plan(self, run: Run) -> Plan:
        """Return the record of the chosen ranks, with the costs of the measured stages."""

    def notes(self, model: ModelInfo) -> list[str]:
        """Return notes for the report."""

    @property
    def facts(self) -> dict[str, object]:
        """Facts that determine the choice besides the options, as JSON."""


class TrainingStep(Protocol[Run]):
    """Trains the swapped model after it has been measured (`attnlens.lab.heal`)."""

    def sequences(self, tokens: int) -> int:
        """Return how many calibration sequences of this length to read."""

    def train(self, run: Run, calibrated: texts.Batches) -> None:
        """Train the last stage of the run, and add the result as stage `healed`, with its measurements."""


@dataclass(frozen=True)
class SweptMeasures:
    """The scalar measures of the swept heads."""

    values: dict[str, Float[Tensor, " units"]]  # by name; NaN for heads without a value
    windows: dict[str, Float[Tensor, "windows units"]]  # values per sequence, of means over sequences
    reasons: dict[str, str]  # why a measure is missing: no head has a value, or all values are equal


@dataclass
class SwapSession:
    """The state of a run that its kernels share."""

    command: str  # name of the command, for the report
    loaded: loading.Loaded
    options: SwapOptions
    settings: Settings
    task: Task
    evaluated: texts.Batches  # the evaluated sequences, as cut
    fed: list[Fed]  # the evaluated sequences with their targets
    design: Design  # how the evaluated sequences were sampled
    progress: Progress
    ranks: RankStep[Any] | None = None
    training: TrainingStep[Any] | None = None
    calibrated: texts.Batches | None = None  # the text for fitting and healing
    rank_parts: Sequence[texts.Batches] = ()  # the parts of the calibration text that `ranks` reads
    prompts: Prompts | str = "nothing is generated"  # prompts to continue greedily, or why there are none
    shared: float = 0.0  # share of the evaluated tokens that the calibration text contains too
    sites: tuple[Site, ...] = ()
    heads_of: dict[Site, int] = field(default_factory=dict)
    chosen: dict[Site, tuple[int, ...] | None] = field(default_factory=dict)
    """Swapped sites with their heads; None means all heads."""
    shapes: dict[Site, HeadShape] = field(default_factory=dict)  # determines the state size of the chosen heads
    idle: list[Skipped] = field(default_factory=list)  # attention modules that the evaluated input does not run
    identity_error: float = 0.0
    controls: dict[object, Differences] = field(default_factory=dict)
    """Measurements of the controls that several kernels can share, by `ControlSwap.key`."""
    agreements: dict[object, Agreement | str] = field(default_factory=dict)
    """Agreement of these controls' greedy continuations with the original's (or why it is unknown), by the same key."""
    timings: dict[str, float] = field(default_factory=dict)
    measures: SweptMeasures | None = None  # computed at the first sweep of heads, reused by the others

    def survey(self) -> None:
        """Find and verify the sites and select the chosen ones; raise UsageError for a kernel undefined at one."""
        with time_stage(self.timings, "survey"), enough_memory(self.probe):
            survey = checks.survey_model(self.loaded, self.probe)
            reached = survey.sites
            self.identity_error = checks.proven_whole(self.loaded, self.probe)
            refuse_initialised(self.loaded, self.probe, predictions(self.task))
            self.sites = tuple(site.site for site in reached)
            self.heads_of = {site.site: site.call.query.shape[1] for site in reached}
            if self.ranks is not None:
                self.ranks.check_model(reached)
            self.chosen = chosen_sites(reached, self.settings.layers, self.settings.heads, self.options.part)
            self.shapes = head_shapes(reached, self.chosen)
            self.idle = idle_sites(survey, self.settings.layers)
        for kernel in self.options.kernels:
            refuse_crossing(kernel, list(self.chosen))

    def variant(
        self, swaps: hooks.Swaps, weights: Mapping[str, Tensor] | None = None, path: Route | None = None
    ) -> Variant:
        """Return a context manager that swaps kernels and weights in; `path` defaults to the requested one."""

        @contextmanager
        def replace_attention() -> Iterator[None]:
            replaced = hooks.replace(self.loaded.model, self.sites, swaps, path or self.options.path)
            with changed_weights(self.loaded.model, weights or {}), replaced:
                yield

        return replace_attention

    @property
    def seed(self) -> int:
        """Random seed."""
        return self.settings.seed

    @property
    def probe(self) -> dict[str, Tensor]:
        """The first two evaluated sequences, used for the checks."""
        return texts.first(self.fed[0].inputs, 2)

    @property
    def peak(self) -> int | None:
        """Peak memory in bytes of a pass over the first batch with the model in its current state; None if unknown."""
        return peak_of(self.loaded.model, lambda: run(self.loaded.model, self.fed[0], self.task))

    @cached_property
    def own_peak(self) -> int | None:
        """Peak memory in bytes of the original model; None if unknown."""
        return self.peak

    @cached_property
    def continuation(self) -> tuple[Continued | str, list[str]]:
        """The original model's continuation of the prompts (or why there is none), and notes about it."""
        if isinstance(self.prompts, str):
            return self.prompts, []
        requested, limit = self.options.generate, position_limit(self.loaded.model)  # which includes the longest prompt
        tokens = requested if limit is None else max(0, min(requested, limit - self.prompts.ids.shape[1]))
        notes = [f"Greedy continuations have {tokens} tokens instead of {requested}: the model's context is full."]
        continued = continue_prompts(self.loaded.model, self.prompts, tokens)
        return continued, notes if 0 < tokens < requested else []

    def teller(self, stage: str, total: int, kernel: Kernel) -> Tell:
        """Return a progress callback for a stage of a kernel; its label includes the kernel if there are several."""
        label = f"{kernel.spelling}, {stage}" if len(self.options.kernels) > 1 else stage
        return telling(self.progress, label, total)


@contextmanager
def changed_weights(model: PreTrainedModel, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Set these weights of the model inside the block, and restore the original ones at exit."""
    parameters = dict(model.named_parameters())
    before = {name: parameters[name].detach().clone() for name in values}
    try:
        with torch.no_grad():
            for name, value in values.items():
                parameters[name].copy_(value)
        yield
    finally:
        with torch.no_grad():
            for name, original in before.items():
                parameters[name].copy_(original)


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of the names, types, shapes and values of tensors: 16 hex digits of SHA-256."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
