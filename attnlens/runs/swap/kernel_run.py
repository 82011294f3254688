"""Run one kernel: fit it, compare it and simple controls with the original, train it, and sweep heads or layers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from statistics import fmean
from typing import Protocol, TypedDict, TypeVar

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel

from attnlens.choices import ControlRole, Route
from attnlens.errors import UsageError
from attnlens.kernels import OWN, Kernel, parsed
from attnlens.kernels.registry import NEAR_WEIGHT
from attnlens.kernels.spelling import (
    FLOOR,
    ONE_KEY,
    WIDTH,
    HeadShape,
    branches,
    cached_numbers,
    sink_window,
    state_numbers,
)
from attnlens.maths.statistics import Design
from attnlens.models import hooks, loading, texts
from attnlens.models.texts.sequences import position_limit
from attnlens.models.texts.targets import Fed, meanings
from attnlens.records import (
    Agreement,
    Call,
    Control,
    Healing,
    ModelInfo,
    Outcome,
    Pair,
    Plan,
    Settings,
    Site,
    Stage,
    Swap,
    Task,
)
from attnlens.requests import SwapRequest
from attnlens.runs import checks
from attnlens.runs.differences import (
    Continuations,
    Differences,
    Prompts,
    compare,
    continue_prompts,
    measure_agreement,
    tabulate_windows,
)
from attnlens.runs.feeding import describe_guessing
from attnlens.runs.outputs import Variant, enough_memory, measure_peak, run, speed, tokens_in
from attnlens.runs.progress import AddSteps, Progress, start_stage, time_stage
from attnlens.runs.store import Keep, Store, hash_json, keep_nothing
from attnlens.runs.swap.fit import MOST_FITTED, fit
from attnlens.runs.swap.sites import LeakTest, SwapSetup, choose_sites, head_shapes, measure_sites, refuse_random
from attnlens.runs.swap.sweep import FEWEST_HEADS, SweptMeasures, find_predictors, list_units, measure_heads, sweep
from attnlens.runs.work import Stopped


@dataclass
class SwapSession:
    """State of a run, shared by all of its kernels."""

    command: str  # name of the command, for the report
    loaded: loading.Loaded
    kernels: Mapping[str, Kernel]  # by spelling
    options: SwapRequest  # for `ranks` and `heal`, only the options that swap-kernel also has
    settings: Settings
    task: Task
    evaluated: texts.Batches  # the evaluated sequences
    fed: list[Fed]  # the evaluated sequences with their targets
    design: Design  # how the evaluated sequences were sampled
    progress: Progress
    ranks: RankStep | None = None  # chooses the ranks; None: no ranks are chosen
    train: Callable[[KernelRun, texts.Batches], None] | None = None  # adds a stage `healed`; None: no training
    calibrated: texts.Batches | None = None  # the text for fitting and healing
    rank_parts: Sequence[texts.Batches] = ()  # parts of the calibration text used to choose ranks
    prompts: Prompts | str = "nothing is generated"  # prompts to continue greedily, or the reason if there are none
    shared: float = 0.0  # share of the evaluated tokens that the calibration text also contains
    sites: tuple[Site, ...] = ()
    chosen: dict[Site, tuple[int, ...] | None] = field(default_factory=dict)  # swapped sites and heads (None: all)
    shapes: dict[Site, HeadShape] = field(default_factory=dict)  # shapes of the chosen heads
    missed: dict[str, str | None] = field(default_factory=dict)  # attention that is not a site, see `hooks.Survey`
    caches: dict[Site, CacheShape | None] = field(default_factory=dict)  # None: other heads read the same keys
    model_heads: int = 0  # number of heads of all sites
    identity_error: float = 0.0  # relative change in the outputs when attention is recomputed
    controls: dict[object, ChangedModel] = field(default_factory=dict)  # unfitted controls, by `kernels_by_site`
    timings: dict[str, float] = field(default_factory=dict)
    measures: SweptMeasures | None = None  # computed at the first sweep of heads

    def survey(self) -> None:
        """Find and verify all sites, and select those requested. Raise UsageError if a kernel is undefined for them."""
        with time_stage(self.timings, "survey"), enough_memory(self.probe):
            survey = checks.survey_model(self.loaded, self.probe)
            self.identity_error = checks.require_identity(self.loaded, self.probe)
            checks.refuse_initialised(self.loaded, self.probe, checks.measure_predictions(self.task))
            self.sites = tuple(each.site for each in survey.sites)
            self.model_heads = sum(each.call.query.shape[1] for each in survey.sites)
            selection = self.settings.layers, self.settings.heads, self.options.part
            self.chosen = choose_sites(survey, list(self.kernels.values()), *selection)
            self.shapes = head_shapes(survey.sites, self.chosen)
            calls = {each.site: each.call for each in survey.sites if each.site in self.chosen}
            self.caches = {site: CacheShape.of(call, self.chosen[site]) for site, call in calls.items()}
            self.missed = survey.missed

    def setup(self, swaps: hooks.Swaps) -> SwapSetup:
        """Build a SwapSetup of the session's model with `swaps`."""
        return SwapSetup(self.loaded, self.sites, swaps, self.task, self.seed, self.options.path)

    def variant(self, changed: ChangedModel, path: Route | None = None) -> Variant:
        """Return a function that opens a context with changed kernels and weights; `path` overrides `changed.path`."""

        @contextmanager
        def replace_attention() -> Iterator[None]:
            route = path or changed.path or self.options.path
            replaced = hooks.replace(self.loaded.model, self.sites, changed.swaps, route)
            with changed_weights(self.loaded.model, changed.weights), replaced:
                yield

        return replace_attention

    @property
    def model_info(self) -> ModelInfo:
        """The model, with the names of its layers."""
        return self.loaded.info.model_copy(update={"layer_names": checks.layer_names(self.sites)})

    @property
    def seed(self) -> int:
        """Random seed."""
        return self.settings.seed

    @property
    def probe(self) -> dict[str, Tensor]:
        """Inputs of the first two evaluated sequences (or of the only sequence), used for the checks."""
        return texts.first(self.fed[0].inputs, 2)

    @property
    def peak(self) -> int | None:
        """Peak memory in bytes of a pass over the first batch with the attention now in place; None if unknown."""
        return measure_peak(self.loaded.model, lambda: run(self.loaded.model, self.fed[0], self.task))

    @cached_property
    def original_peak(self) -> int | None:
        """Peak memory in bytes of the original model's pass over the first batch; None if unknown."""
        return self.peak

    @cached_property
    def continuation(self) -> tuple[Continuations | str, list[str]]:
        """The original model's continuations of the prompts (or the reason if missing), and notes for the report."""
        if isinstance(self.prompts, str):
            return self.prompts, []
        requested, limit = self.options.generate, position_limit(self.loaded.model)  # the limit includes prompts
        tokens = requested if limit is None else max(0, min(requested, limit - self.prompts.ids.shape[1]))
        notes = [f"Greedy continuations have {tokens} tokens instead of {requested}: the model's context is full."]
        continued = continue_prompts(self.loaded.model, self.prompts, tokens)
        return continued, notes if 0 < tokens < requested else []


@contextmanager
def changed_weights(model: PreTrainedModel, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Context manager: set the weights in `values`, and restore the original weights afterwards."""
    parameters = dict(model.named_parameters())
    before = {name: parameters[name].detach().clone() for name in values}

    def assign(tensors: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in tensors.items():
                parameters[name].copy_(value)

    try:
        assign(values)
        yield
    finally:
        assign(before)


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of the names, types, shapes and values of tensors: 16 hex digits of SHA-256."""
    content = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})
    return sha256(content).hexdigest()[:16]


def hash_parameters(swaps: hooks.Swaps) -> dict[str, str]:
    """Return a hash of each site's fitted parameters, keyed by site name."""
    return {site.name: hash_tensors(dict(swap.kernel.fitted)) for site, swap in swaps.items()}


EXACT: Route = "auto"  # path of the controls; the `path` option applies only to the kernel
CROSSING = "queries and keys of cross-attention belong to different sequences, so distances between them are undefined"


@dataclass(eq=False)
class ChangedModel:
    """A model with swapped kernels and possibly healed weights, and its differences from the original."""

    swaps: hooks.Swaps
    weights: Mapping[str, Tensor] = field(default_factory=dict)  # healed weights by name
    path: Route | None = None  # None: the requested path
    differences: Differences | None = None
    agreement: Agreement | str | None = None  # of greedy continuations, or the reason if unknown; None: not measured

    def outcome(self, seed: int, texts: Sequence[str], window: int | str) -> Outcome:
        """Return the differences, and the agreement of continuations, as a record.

        `window` is the number of keys beyond which losses are reported, or the reason if there is none.
        """
        assert self.differences is not None  # noqa: S101  # measured before anything is recorded
        outcome = self.differences.outcome(seed, texts, window)
        if isinstance(self.agreement, str):
            return outcome.model_copy(update={"reasons": outcome.reasons | {"agreement": self.agreement}})
        return outcome.model_copy(update={"agreement": self.agreement})


@dataclass
class ControlSwap:
    """A simple alternative to one kernel, measured for comparison."""

    role: ControlRole
    model: ChangedModel | None  # None if the control does not exist
    state: float | None = None  # how many numbers a head stores, mean over sites; None if unknown
    reason: str = ""  # why the control does not exist

    def record(self, swapped: Differences, seed: int, texts: Sequence[str], window: int | str) -> Control:
        """Build the control's record from its measurements, or from the reason why there are none.

        The control is compared with `swapped`, the measurements of the kernel's last stage.
        """
        if self.model is None:
            return Control(role=self.role, kernel=None, state=self.state, reasons={"kernel": self.reason})
        assert self.model.differences is not None  # noqa: S101  # measured before anything is recorded
        kernel = format_kernels(swap.kernel for swap in self.model.swaps.values())
        fields = dict(self.model.outcome(seed, texts, window))
        difference = swapped.compare_loss(self.model.differences, seed)
        return Control(role=self.role, kernel=kernel, state=self.state, difference=difference, **fields)


def kernels_by_site(swaps: hooks.Swaps) -> tuple[tuple[Site, str], ...]:
    """Return (site, spelling of its kernel) pairs, which identify swaps without fitted parameters."""
    return tuple((site, swap.kernel.spelling) for site, swap in swaps.items())


def format_kernels(kernels: Iterable[Kernel]) -> str:
    """Format the kernels of all sites as one spelling: `sink-window:4,68`.

    If sites differ, numbers become ranges, `sink-window:4,68–80 by layer`, or `4,68–all` if some sites keep all keys.
    """
    spellings = list(dict.fromkeys(kernel.spelling for kernel in kernels))
    if len(spellings) < 2:
        return "".join(spellings)
    by_name, names = defaultdict[str, list[list[int]]](list), []
    for name, _, numbers in (spelling.partition(":") for spelling in spellings if spelling != OWN.spelling):
        by_name[name].append([int(number) for number in numbers.split(",")])
    for name, rows in by_name.items():
        ranges = [(min(numbers), max(numbers)) for numbers in zip(*rows, strict=True)]
        words = [f"{low}" if low == high else f"{low}–{high}" for low, high in ranges]
        if OWN.spelling in spellings:  # the last number is the width of the window
            words[-1] = f"{ranges[-1][0]}–all"
        names.append(f"{name}:{','.join(words)}")
    return "/".join(names) + " by layer"


def mean_state(swaps: hooks.Swaps, shapes: Mapping[Site, HeadShape]) -> float | None:
    """Compute how many numbers a swapped head stores, averaged over sites; None if there is no attention matrix."""
    if any(swap.kernel.info.form == "output" for swap in swaps.values()):
        return None
    states = [(state_numbers(swap.kernel, shapes[site]), shapes[site]) for site, swap in swaps.items()]
    return fmean(shape.tokens * shape.token if state is None else state for state, shape in states)


@dataclass(frozen=True)
class CacheShape:
    """Sizes of a site's key-value cache."""

    heads: int  # number of key heads
    head_dim: int
    value_dim: int
    number_bytes: int

    @classmethod
    def of(cls, call: Call, chosen: Collection[int] | None) -> CacheShape | None:
        """Return the sizes of the cache that the chosen query heads read; None if other heads share this cache."""
        owners = {head: chosen is None or head in chosen for head in range(call.query.shape[1])}
        read, shared = ({call.key_heads[head] for head in owners if owners[head] is own} for own in (True, False))
        sizes = call.key.shape[-1], call.value.shape[-1], call.key.element_size()
        return None if read & shared else cls(len(read), *sizes)

    def count_bytes(self, key_numbers: float) -> float:
        """Return the bytes per token if each key is stored as `key_numbers` numbers."""
        return self.heads * (key_numbers + self.value_dim) * self.number_bytes


def compute_cache(swaps: hooks.Swaps, caches: Mapping[Site, CacheShape | None]) -> Pair | str:
    """Compute the bytes per token in the caches of the swapped sites, before and after, or the reason if undefined."""
    before = after = 0.0
    for site, swap in swaps.items():
        cache, numbers = caches.get(site), cached_numbers(swap.kernel)
        if site.part != "decoder":
            return "only the decoder's self-attention has a key-value cache"
        if numbers is None or swap.kernel.filter is not None:
            return "the kernel does not store each key as fewer numbers"
        if cache is None:
            return "other heads read the same keys"
        before, after = before + cache.count_bytes(cache.head_dim), after + cache.count_bytes(numbers)
    return Pair(before=before, after=after)


def build_controls(swaps: hooks.Swaps, shapes: Mapping[Site, HeadShape]) -> list[ControlSwap]:
    """Build the controls of an unhealed kernel, leaving out any that equal the kernel itself or the model's own."""
    controls = [
        _same_size(swaps, shapes),
        map_kernels("one key", swaps, shapes, lambda _: parsed(ONE_KEY)),
        map_kernels("floor", swaps, shapes, lambda _: parsed(FLOOR)),
    ]
    if all(swap.kernel.filter or swap.kernel.near for swap in swaps.values()):
        controls.append(map_kernels("filter alone", swaps, shapes, lambda kernel: branches(kernel)[0]))
        controls.append(map_kernels("without filter", swaps, shapes, lambda kernel: branches(kernel)[1]))
    original = {site: hooks.Replacement(OWN) for site in swaps}
    equal = [kernels_by_site(each) for each in (swaps, original)]
    return [each for each in controls if each.model is None or kernels_by_site(each.model.swaps) not in equal]


def choose_window(swaps: hooks.Swaps, controls: Sequence[ControlSwap], shapes: Mapping[Site, HeadShape]) -> int | str:
    """Return the widest window of the kernel, else of the same-size control, else WIDTH; or why none applies."""
    windows = [each.model.swaps for each in controls if each.role == "same size" and each.model is not None]
    for kernels in (swaps, *windows):
        filters = [swap.kernel.filter or swap.kernel.near for swap in kernels.values()]
        widths = [each.parameters["width"] for each in filters if each and "width" in each.parameters]
        if widths:
            return max(widths)
    if any(site.part == "cross" for site in swaps):
        return CROSSING
    tokens = max(shapes[site].tokens for site in swaps)
    return WIDTH if tokens > WIDTH else f"the sequences have {tokens} tokens, so no key lies beyond a window of {WIDTH}"


def _same_size(swaps: hooks.Swaps, shapes: Mapping[Site, HeadShape]) -> ControlSwap:
    """Build the sink-window control that stores as many numbers as the kernel, or record why there is none."""
    if any(site.part == "cross" for site in swaps):
        return ControlSwap("same size", None, reason=CROSSING)
    windows: dict[Site, hooks.Replacement] = {}
    for site, swap in swaps.items():
        state, token = state_numbers(swap.kernel, shapes[site]), shapes[site].token
        if state is not None and state < token:
            why = f"a state of {state:,.0f} numbers is too small for a key and its value ({token} numbers)"
            return ControlSwap("same size", None, mean_state(swaps, shapes), why)
        windows[site] = hooks.Replacement(sink_window(state, shapes[site]) or OWN, swap.heads)
    if all(swap.kernel.filter is None for swap in windows.values()):
        site = next(iter(swaps))
        state = state_numbers(swaps[site].kernel, shapes[site])
        what = "a window of 64 keys plus the first 4 keys" if state is None else f"a state of {state:,.0f} numbers"
        why = f"{what} can store all {shapes[site].tokens} keys, so the control would be the model itself"
        return ControlSwap("same size", None, mean_state(swaps, shapes), why)
    return ControlSwap("same size", ChangedModel(windows, path=EXACT), mean_state(windows, shapes))


def map_kernels(
    role: ControlRole,
    swaps: hooks.Swaps,
    shapes: Mapping[Site, HeadShape],
    change: Callable[[Kernel], Kernel],
    weights: Mapping[str, Tensor] | None = None,
) -> ControlSwap:
    """Build a control by applying `change` to the swapped kernel of each site."""
    changed = {site: hooks.Replacement(change(swap.kernel), swap.heads) for site, swap in swaps.items()}
    return ControlSwap(role, ChangedModel(changed, weights or {}, EXACT), mean_state(changed, shapes))


NO_PEAK = "this platform does not report peak memory"
Result = TypeVar("Result")


class KernelResult(TypedDict):
    """Result of one kernel, as stored in the kernel's unit."""

    swap: Swap
    plan: Plan | None
    window: int | str  # number of keys beyond which losses are reported, or the reason if there is none
    notes: list[str]  # notes for the settings of the report
    losses: dict[str, list[Tensor]]  # results of TokenLosses.join, by stage or by number of the control
    windows: dict[str, Tensor]  # values per window, by measure; one column per stage


class RankStep(Protocol):
    """Step that chooses the ranks of the kernel `rank`, instead of a fit (`attnlens.lab.ranks`)."""

    def cut(self, session: SwapSession, contents: Sequence[texts.Content], cut: texts.Cut) -> Sequence[texts.Batches]:
        """Cut the calibration text, and return its parts. Raise UsageError if the model has no loss on text."""

    def choose(self, run: KernelRun) -> hooks.Swaps:
        """Return the kernels with the chosen ranks, and add notes to the run."""

    def record(self, run: KernelRun) -> Plan:
        """Return the record of the chosen ranks, with the savings and the rise in the loss at each measured stage."""


@dataclass
class KernelRun:
    """The run of one kernel: its stages and measurements so far."""

    session: SwapSession
    kernel: Kernel
    stages: dict[str, ChangedModel]  # the model at each stage: swapped, fitted, healed
    store: Store | None = None  # stores partial results of long computations
    controls: list[ControlSwap] = field(default_factory=list)
    window: int | str = ""  # number of keys beyond which losses are reported, or the reason if there is none
    state: float | None = None  # how many numbers a swapped head stores; None if there is no attention matrix
    healing: Healing | None = None
    notes: list[str] = field(default_factory=list)  # for the settings of the report
    rank_notes: list[str] = field(default_factory=list)  # for the record of the kernel
    interrupted: bool = False

    def run(self) -> KernelResult:
        """Run and measure all stages; raise Stopped with the result if the user interrupted healing or the sweep."""
        session = self.session
        with enough_memory(session.fed[0].inputs):
            _ = session.original_peak  # measured first, before anything keeps memory allocated
            swap, plan = self._run_stages()
        controls = {str(number): control.model for number, control in enumerate(self.controls)}
        measured = {name: model and model.differences for name, model in (self.stages | controls).items()}
        value: KernelResult = {
            "swap": swap,
            "plan": plan,
            "window": self.window,
            "notes": self.notes,
            "losses": {name: each.by_token.join() for name, each in measured.items() if each and each.by_token.before},
            "windows": tabulate_windows(list(self.measured.values())),  # one column per stage
        }
        if self.interrupted:
            raise Stopped(self.kernel.spelling, value)
        return value

    def _run_stages(self) -> tuple[Swap, Plan | None]:
        session, timings, plan = self.session, self.session.timings, None
        with time_stage(timings, "fit"):
            self._fit()
        user = "" if self.kernel.info.built_in else self.kernel.info.name
        refuse_random(session.setup(self.last.swaps), session.probe)
        leaks = LeakTest(session.loaded, session.probe, session.variant(self.last), session.seed, user)
        errors = leaks.measure(session.sites)
        with time_stage(timings, "compare"):
            self._compare()
        if session.train is not None and session.calibrated is not None:
            with time_stage(timings, "heal"):
                session.train(self, session.calibrated)
        if session.options.generate:
            with time_stage(timings, "generate"):
                self._generate()
        if session.ranks is not None:
            with time_stage(timings, "plan"):
                plan = session.ranks.record(self)
        with time_stage(timings, "sites"):
            swap = self._record(errors)
        if session.options.sweep:
            with time_stage(timings, "sweep"):
                swap = self._sweep(swap)
        return swap, plan

    @property
    def last(self) -> ChangedModel:
        """Model at the last stage."""
        return list(self.stages.values())[-1]

    @property
    def measured(self) -> dict[str, Differences]:
        """Differences from the original model, keyed by measured stage."""
        return {name: stage.differences for name, stage in self.stages.items() if stage.differences is not None}

    @property
    def keep(self) -> Keep:
        """Function that stores and reuses partial results; without a store, it only computes them."""
        return keep_nothing if self.store is None else self.store.compute

    def start_stage(self, stage: str, total: int) -> AddSteps:
        """Announce a stage of `total` steps, naming the kernel if several run; return a function to add steps."""
        label = f"{self.kernel.spelling}, {stage}" if len(self.session.kernels) > 1 else stage
        return start_stage(self.session.progress, label, total)

    def _fit(self) -> None:
        """Choose ranks, or fit the kernel if required (stage `swapped`) or requested by an option (stage `fitted`)."""
        session, kernel, swaps = self.session, self.kernel, self.last.swaps
        if session.ranks is not None:
            self.stages["swapped"] = ChangedModel(session.ranks.choose(self))
            return
        source = session.calibrated if kernel.fit_reads else session.evaluated.some(1)  # else only shapes are read
        if source is None or not kernel.fits or not (kernel.needs_fit or session.options.fit):
            return
        text, passes = source.some(MOST_FITTED), 1 if kernel.needs_fit or kernel.near is not None else 2
        fitted = fit(session.setup(swaps), text, self.start_stage("fit", text.sequences * passes))
        self.stages["swapped" if kernel.needs_fit else "fitted"] = ChangedModel(fitted)

    def _compare(self) -> None:
        """Build the controls; measure the stages so far and, if requested, the controls."""
        session, swaps = self.session, self.last.swaps
        controls, self.state = build_controls(swaps, session.shapes), mean_state(swaps, session.shapes)
        self.window = choose_window(swaps, controls, session.shapes)
        self.controls = controls if session.options.controls else []
        for control in self.controls:
            self._prepare_control(control)
        self.measure([*self.stages.values(), *self.control_models])
        if session.task in ("causal", "masked"):
            first = next(iter(self.measured.values()))
            names = [session.settings.texts[number].name for number in first.sampled.texts]
            vocabulary = texts.vocabulary(session.loaded.model) or math.inf
            self.notes += describe_guessing(torch.cat(first.before), torch.cat(first.counts), names, vocabulary)

    def _prepare_control(self, control: ControlSwap) -> None:
        """Share the model with an equal control of another kernel; run one pass, and store the reason if it fails."""
        if control.model is None:
            return
        if not any(swap.kernel.fitted for swap in control.model.swaps.values()):
            control.model = self.session.controls.setdefault(kernels_by_site(control.model.swaps), control.model)
        try:
            with torch.no_grad(), self.session.variant(control.model)():
                hooks.forward(self.session.loaded.model, self.session.probe)
        except UsageError as error:
            control.model, control.reason = None, error.problem.rstrip(".")

    @property
    def control_models(self) -> list[ChangedModel]:
        """Models of all controls that exist and can run."""
        return [control.model for control in self.controls if control.model is not None]

    def measure(self, models: Iterable[ChangedModel]) -> None:
        """Measure how those models that have no `differences` yet differ from the original on the evaluated text."""
        session = self.session
        variants = {model: session.variant(model) for model in models if model.differences is None}
        add_steps = self.start_stage("compare", len(variants) * sum(map(tokens_in, session.fed)))
        measured = compare(session.loaded.model, session.fed, variants, session.task, add_steps, session.design)
        for model, differences in measured.items():
            model.differences = differences

    def _generate(self) -> None:
        """Count the tokens that stages and controls generate before they first differ from the original model's."""
        models = [model for model in (*self.stages.values(), *self.control_models) if model.agreement is None]
        add_steps = self.start_stage("generate", len(models) + 1)
        original, notes = self.session.continuation
        add_steps(1)
        for model in models:
            variant = self.session.variant(model, EXACT)
            model.agreement = measure_agreement(self.session.loaded.model, original, variant)
            add_steps(1)
        self.notes += notes

    def _record(self, errors: Mapping[str, float | str]) -> Swap:
        session, kernel = self.session, self.kernel
        inputs = texts.first(session.probe, 1)  # one sequence, so that the result does not depend on the batch size
        sites, site_notes = measure_sites(session.setup(self.last.swaps), inputs)
        names, noise = [text.name for text in session.settings.texts], session.fed[0].noise
        measuring = session.seed, names, self.window
        with session.variant(self.last)():
            peak = session.peak
        outcomes = {name: dict(stage.outcome(*measuring)) for name, stage in self.stages.items()}
        last, of_output = list(self.measured.values())[-1], kernel.info.form == "output"
        fields = list(outcomes.values())[-1] | {name: None if isinstance(e, str) else e for name, e in errors.items()}
        reasons = {name: error for name, error in errors.items() if isinstance(error, str)}
        shares = [site.off_simplex for site in sites if site.off_simplex is not None]
        if of_output:
            reasons |= {"off_simplex": "there is no attention matrix", "state": "the kernel caches no keys or values"}
        if peak is None:
            reasons["peak_memory_bytes"] = NO_PEAK
        cache = compute_cache(self.last.swaps, session.caches)
        if isinstance(cache, str):
            reasons["cache_bytes_per_token"] = cache
        notes = [*meanings(session.task, noise=noise), *site_notes, *self.rank_notes, *self._option_notes()]
        return Swap(
            kernel=kernel.spelling if session.ranks is None else kernel.info.name,
            formula=kernel.formula,
            formula_of="output" if of_output else "log k",
            parameters=dict(kernel.parameters) if session.ranks is None else {},
            fitted=self.fitted,
            sites=sites,
            **fields | {"reasons": reasons | fields["reasons"]},
            off_simplex=sum(shares) / len(shares) if shares else None,
            tokens_per_second=Pair(
                before=speed(last.sizes, last.original_seconds), after=speed(last.sizes, last.seconds)
            ),
            peak_memory_bytes=Pair(before=session.original_peak, after=peak),
            stages=[Stage(name=stage, **fields) for stage, fields in outcomes.items()],
            healing=self.healing,
            state=self.state,
            cache_bytes_per_token=None if isinstance(cache, str) else cache,
            task=session.task,
            noise=noise,
            identity_error=session.identity_error,
            controls=[control.record(last, *measuring) for control in self.controls],
            notes=notes,
        )

    @property
    def fitted(self) -> list[str]:
        """Names of the parameters chosen per head from text, except parameters that are still random."""
        kernel = next(iter(self.last.swaps.values())).kernel
        start = set() if kernel.info.fit_reads or "healed" in self.stages else set(kernel.own_fitted)
        return sorted(set(kernel.chosen) - start)

    def _option_notes(self) -> Iterator[str]:
        """Yield notes on the calibration text, the fit and the controls."""
        healed, kernel, info = "healed" in self.stages, self.kernel, self.kernel.info
        if self.session.shared:
            share = f"{100 * self.session.shared:.2g} % of the evaluated tokens"
            yield f"{share} also occur in the calibration text, in runs of {texts.RUN} tokens or as whole lines."
        if self.session.options.fit and kernel.needs_fit and info.fit_reads:
            yield f"--fit has no effect: {info.name} is always fitted."
        if not healed and kernel.needs_fit and not info.fit_reads:
            yield f"The maps of {info.name} are random until `attnlens heal` trains them."
        if not healed and kernel.near is not None and NEAR_WEIGHT not in self.fitted:
            yield "γ, the weight of near keys, is 1 in every head; --fit estimates it."
        if healed and self.control_models:
            healed_part = any(model.weights for model in self.control_models)
            exception = ", except for the healed far part" if healed_part else ""
            yield f"Controls are measured on the model before healing{exception}."
        for control in self.controls:
            if control.model is None:
                yield f"No {control.role} control: {control.reason}."

    def _sweep(self, swap: Swap) -> Swap:
        """Return `swap` with the effect of swapping each head or layer alone and, for heads, predictors of the effects.

        If the sweep is interrupted, add only a note.
        """
        session, options, swaps, seed = self.session, self.session.options, self.last.swaps, self.session.seed
        fitted = hash_json(hash_parameters(swaps))

        def keep(name: str, make: Callable[[], Result]) -> Result:
            return self.keep(f"{name}, parameters {fitted}", make)  # a fit can differ on another machine

        chosen = list_units(swaps, str(options.sweep), {site: shape.heads for site, shape in session.shapes.items()})
        correlated = options.sweep == "heads" and options.predictors and len(chosen) >= FEWEST_HEADS
        try:
            if correlated and session.measures is None:
                add_steps = self.start_stage("predictors", 1)
                with time_stage(session.timings, "predictors"):
                    session.measures = measure_heads(session.loaded, session.evaluated, session.settings, chosen)
                add_steps(1)
            add_steps = self.start_stage("sweep", len(chosen) * len(session.fed))
            alone = sweep(session.setup(swaps), chosen, session.fed, session.design, add_steps, keep)
        except KeyboardInterrupt:
            self.interrupted = True
            return swap.model_copy(update={"notes": [*swap.notes, "The sweep was interrupted."]})
        update: dict[str, object] = {"sweep": alone.effects(seed)}
        if correlated and session.measures is not None:
            update["predictors"], update["prediction"] = find_predictors(alone, session.measures, seed)
        return swap.model_copy(update=update)
