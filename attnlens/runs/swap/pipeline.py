"""Compare a model under other kernels with the original model on the same text."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import TypeVar

import torch

from attnlens.analyzers import registry
from attnlens.arguments import public
from attnlens.choices import KERNEL
from attnlens.errors import OutputError, TextError, UsageError
from attnlens.kernels import Kernel
from attnlens.models import loading, texts
from attnlens.models.hooks import Replacement
from attnlens.models.texts.targets import feed
from attnlens.records import Coverage, Outcome, Skipped, Summary, Swap, SwapBody, Text, Windows
from attnlens.report.report import Report
from attnlens.requests import SwapRequest, reading, takes, words
from attnlens.requests.run_options import SharedRequest
from attnlens.requests.swap import KernelRequest, reads_calibration, swap_kernels
from attnlens.runs import checks, feeding
from attnlens.runs.differences import COLUMNS, choose_prompts, tokenize_prompts
from attnlens.runs.outputs import FEWEST, TokenLosses
from attnlens.runs.progress import INTERRUPTED, Interrupted, Progress, silent, start_stage
from attnlens.runs.provenance import assemble_report, hash_content, read_code
from attnlens.runs.store import Store, hash_json, versions
from attnlens.runs.swap.kernel_run import ChangedModel, KernelResult, KernelRun, RankStep, SwapSession, changed_weights
from attnlens.runs.swap.saved import UnsavedError, save_swapped
from attnlens.runs.work import Compute, WorkPlan, run_units

FILES = ("text", "pairs", "image", "audio", "adapter", "calibration", "prompts", "ranks", "save")
"""Options that name files. The facts of a run contain the contents of input files instead of their names."""
FITTING = 32  # number of calibration sequences to cut for a fit
Model = str | PathLike[str] | loading.Loaded  # name or path of a model, or a model in memory


@dataclass(kw_only=True)
class SwapWork(SwapSession):
    """A run of one or more kernels, with one unit of work per kernel."""

    request: KernelRequest
    start: float  # start of the run, `time.perf_counter`
    stored: bool  # True if finished units are stored
    call: tuple[object, ...] = ()  # arguments of `open_run`, for worker processes; empty without workers
    last: ChangedModel | None = None  # the last model that this process measured

    @cached_property
    def facts(self) -> dict[str, object]:
        """Facts that determine the results of the units."""
        prompts, left_out = self.prompts, {*SharedRequest.model_fields, *FILES}
        batches = [self.evaluated, self.calibrated, *self.rank_parts]
        analyzers = registry.select_sweep_analyzers()
        if not isinstance(prompts, str):
            prompts = f"{prompts.source} {prompts.ids.tolist()} {prompts.mask.tolist()}"
        content = {
            "fed": [hash_content(self.loaded, (), part, analyzers) for part in batches],
            "prompts": prompts,
            "code": [read_code(kernel.info).hex() for kernel in self.kernels.values()],
            "generation": str(getattr(self.loaded.model, "generation_config", None)),
            "plan": str(getattr(self.request, "ranks", None)),
            "sites": [[site.name, heads] for site, heads in self.chosen.items()],
        }
        return {
            "command": self.command,
            "versions": versions(),
            "model": self.loaded.info.model_dump(mode="json", exclude={"id"}),
            "settings": self.settings.model_dump(mode="json", exclude={"notes"}),
            "options": {name: str(value) for name, value in sorted(self.request) if name not in left_out},
            "kernels": list(self.kernels),
            "parts": list(self.evaluated.parts or ()),
            "content": hash_json(content),
        }

    @cached_property
    def store(self) -> Store | None:
        """Store of the finished units; None if the model is in memory or the cache folder can't be written."""
        return WorkPlan.of(self.request).store(self.facts) if self.stored else None

    def run(self) -> tuple[Report, Callable[[], None]]:
        """Run the kernels; return the report, and a function that removes the stored units unless a kernel failed.

        If interrupted, raise Interrupted with a report of the results so far, or KeyboardInterrupt if there are none.
        Raise UnsavedError if the changed model can't be saved.
        """
        plan, kernels, progress = WorkPlan.of(self.request), list(self.kernels), self.progress
        several = len(kernels) > 1 and plan.shard is None
        add_steps = start_stage(progress, "kernels", len(kernels)) if several else lambda _: None
        # recompute the kernel for --save: its unit does not contain the swapped model
        store = None if self.options.save is not None else self.store
        worker_setup = open_run, self.call
        outcome = run_units(
            kernels, self.read_unit, plan, store, worker_setup=worker_setup, report_unit=lambda _name: add_steps(1)
        )
        if not outcome.values:
            raise KeyboardInterrupt
        timings = self.timings | {"all": time.perf_counter() - self.start}
        report = build_report(self, outcome.values, outcome.missing, timings)
        with suppress(UnsavedError) if outcome.stopped else nullcontext():  # an interruption is reported instead
            self._save(report)
        if outcome.stopped:
            raise Interrupted(report)
        return report, self.store.clear if self.store is not None and not outcome.missing else lambda: None

    def _save(self, report: Report) -> None:
        """Save the changed model if requested; raise UnsavedError with the report if that fails."""
        if self.options.save is None or self.last is None:
            return
        try:
            with changed_weights(self.loaded.model, self.last.weights):
                save_swapped(Path(self.options.save), self.loaded, self.sites, self.last.swaps)
        except OutputError as error:
            raise UnsavedError(error, report) from error

    def finish(self) -> Report:
        """Run the work, remove the stored units unless a kernel failed, and return the report."""
        report, clear = self.run()
        clear()
        return report

    def read_unit(self, name: str) -> KernelResult:
        """Run one kernel; partial results of fits, sweeps and healing are stored until the kernel is finished."""
        kernel = self.kernels[name]
        store = None if self.store is None else self.store.inside(name)
        swaps = {site: Replacement(kernel, heads) for site, heads in self.chosen.items()}
        run = KernelRun(self, kernel, {"swapped": ChangedModel(swaps)}, store)
        try:
            return run.run()
        finally:
            self.last = run.last


def open_run(model: str, kernels: tuple[str, ...], request: SwapRequest) -> tuple[Mapping[str, object], Compute]:
    """Prepare a run in a worker process; return the facts and the function that computes a unit."""
    work = prepare("swap-kernel", model, swap_kernels(kernels, request), request)
    return work.facts, work.read_unit


@public
@takes(SwapRequest)
def swap_kernel(
    model: Model = "demo", kernels: str | Sequence[str] = KERNEL, *, progress: Progress = silent, request: SwapRequest
) -> Report:
    """Compare loss, predictions and hidden states of a model under other kernels with those of the original model.

    `kernels` is one kernel, or several, spelled as on the command line (`rbf:gamma=1+window:64`). If `model` is a name,
    finished work is stored, and a repeated call reuses the stored work. Raise UsageError, ModelError, TextError,
    OutputError, IdentityError, and Interrupted, which contains the finished results.
    """
    return swap_work(model, words("kernels", kernels), request, progress).finish()


def swap_work(model: Model, kernels: tuple[str, ...], request: SwapRequest, progress: Progress = silent) -> SwapWork:
    """Check the options and load the model; return the run of `swap_kernel` without starting it."""
    check_work(model, request)
    work = prepare("swap-kernel", model, swap_kernels(kernels, request), request, progress)
    work.call = (str(model), kernels, request)
    return work


def check_work(model: Model, request: KernelRequest) -> None:
    """Raise UsageError or OutputError if units can't be stored or distributed as the options require."""
    if isinstance(model, loading.Loaded):
        feeding.refuse_work(request)
    else:
        WorkPlan.of(request).check([*request.text, *request.calibration, request.prompts])


def prepare(
    command: str,
    model: Model,
    kernels: Sequence[Kernel],
    request: KernelRequest,
    progress: Progress = silent,
    *,
    ranks: RankStep | None = None,
    train: Callable[[KernelRun, texts.Batches], None] | None = None,
    sequences: Callable[[int], int] = lambda _tokens: FITTING,
) -> SwapWork:
    """Load the model, cut the texts, find and check the sites, and return the prepared run.

    `sequences` returns the required number of calibration sequences, given their length in tokens.
    """
    start = time.perf_counter()
    load_options, settings = feeding.load_options(request, model), reading.settings(request)
    files = reading.files(request)
    named, others = (texts.read_each(paths, offline=request.offline) for paths in (files, request.calibration))
    lines = None if request.prompts is None else texts.read(request.prompts, offline=request.offline)
    loaded = model if isinstance(model, loading.Loaded) else loading.load(model, **load_options)
    feeding.refuse_text(loaded, [*files, *request.calibration], settings.length)
    settings = feeding.add_model_settings(settings, loaded).model_copy(update={"source": "tokens"})
    contents = named or texts.sample(loaded.info.id)
    repeated = next((other for other in others if other.text in {content.text for content in contents}), None)
    if repeated is not None:
        problem = f"The calibration text ({repeated.name}) is the same as the evaluation text."
        raise TextError(problem, "Omit --calibration to use windows that are not evaluated, or choose another text.")
    prompts = None if lines is None else tokenize_prompts(loaded, lines)
    cut = feeding.build_cut(settings, request)
    evaluated = texts.batches(loaded, contents, cut)
    task = checks.find_task(loaded, evaluated.batches[0].inputs)
    options = SwapRequest(**{name: v for name, v in request.explicit().items() if name in SwapRequest.model_fields})
    work = SwapWork(
        command=command,
        loaded=loaded,
        kernels={kernel.spelling: kernel for kernel in kernels},
        options=options,
        settings=settings,
        task=task,
        evaluated=evaluated,
        fed=feed(loaded, evaluated, task, settings.seed),
        design=feeding.build_design(settings, evaluated),
        progress=progress,
        ranks=ranks,
        train=train,
        request=request,
        start=start,
        stored=not isinstance(model, loading.Loaded),
    )
    if reads_calibration(kernels, options.fit) or train is not None:
        cut = replace(cut, pack=cut.pack or bool(others), sequences=sequences(cut.tokens or 128))
        _cut_calibration(work, others or contents, cut, named=bool(others))
    work.settings = feeding.describe_input(work.settings, evaluated, loaded)
    if request.generate:
        work.prompts = choose_prompts(loaded.model, work.fed, task, prompts)
    work.survey()
    return work


def _cut_calibration(session: SwapSession, contents: Sequence[texts.Content], cut: texts.Cut, *, named: bool) -> None:
    """Cut the calibration text for fits, ranks and training, and record the text in the settings.

    `named` is False if the calibration windows come from the evaluated text.
    """
    if cut.image or cut.audio:
        problem = "Fitting, choosing ranks and healing would use the same images or sounds as the evaluation."
        raise UsageError(problem, "Omit --image and --audio to use random inputs or, for a fit, omit --fit.")
    loaded, evaluated = session.loaded, session.evaluated
    if session.train is not None or session.ranks is None:
        skip = evaluated.sequences
        session.calibrated = texts.batches(loaded, contents, cut, apart_from=evaluated, skip_noise=skip)
    if session.ranks is not None:
        session.rank_parts = session.ranks.cut(session, contents, cut)
    batches = [*session.rank_parts, *([session.calibrated] if session.calibrated else [])]
    session.shared = texts.shared_share(loaded.tokenizer, texts.passages([evaluated]), texts.passages(batches))
    by_hash: dict[str, Text] = {}  # each text with the windows of all parts
    for text in chain.from_iterable(part.texts for part in batches):
        windows = {*text.windows, *(by_hash[text.sha256].windows if text.sha256 in by_hash else ())}
        by_hash[text.sha256] = text.model_copy(update={"windows": sorted(windows)})
    merged = list(by_hash.values())
    if session.shared > texts.MOST_SHARED:
        share = f"{100 * session.shared:.0f} % of the evaluated tokens"
        if named:
            problem = f"The calibration text ({Text.of(merged).name}) contains {share}."
            remedy = "Choose another text, or omit --calibration to use windows that are not evaluated."
            raise TextError(problem, remedy)
        problem = f"The text is repetitive: {share} are in passages that the calibration windows also contain."
        raise TextError(problem, "Give a separate --calibration text, or a less repetitive --text.")
    unknown = {name: share for part in batches for name, share in part.unknown.items()} if named else {}
    update = {"calibration": Text.of(merged), "calibrations": merged, "notes": texts.foreign_notes(unknown)}
    session.settings = session.settings.model_copy(update=update)


Part = TypeVar("Part", bound=Outcome)


def _set_window(result: KernelResult, window: int, session: SwapSession) -> Swap:
    """Return a kernel's record, in which losses beyond `window` keys replace those beyond the kernel's own window."""

    def replace_losses(outcome: Part, name: str) -> Part:
        if name not in result["losses"] or outcome.loss is None:
            return outcome
        beyond = TokenLosses(*map(list, result["losses"][name])).beyond(window, session.design, session.seed)
        reasons = {key: reason for key, reason in outcome.reasons.items() if key != "beyond_window"}
        if isinstance(beyond, str):
            return outcome.model_copy(update={"beyond_window": None, "reasons": reasons | {"beyond_window": beyond}})
        return outcome.model_copy(update={"beyond_window": beyond, "reasons": reasons})

    swap = result["swap"]
    stages = [replace_losses(stage, stage.name) for stage in swap.stages]
    controls = [replace_losses(control, str(number)) for number, control in enumerate(swap.controls)]
    return replace_losses(swap.model_copy(update={"stages": stages, "controls": controls}), stages[-1].name)


def build_report(
    session: SwapSession, by_name: Mapping[str, KernelResult], missing: Mapping[str, str], timings: Mapping[str, float]
) -> Report:
    """Build the report from the results of finished kernels; `missing` gives the reasons for failed kernels."""
    results = list(by_name.values())
    idle = [Skipped(site=path, reason=checks.NOT_RUN) for path, why in session.missed.items() if why is None]
    unfinished = [
        Skipped(site=f"kernel {name}", reason=missing.get(name, INTERRUPTED))
        for name in session.kernels
        if name not in by_name
    ]
    settings = session.settings
    # use the widest window with enough tokens for all kernels, so that their losses are over the same tokens
    losses = next((losses for result in results for losses in result["losses"].values()), [])
    first = TokenLosses(*map(list, losses))
    widths = [result["window"] for result in results]
    window = max((each for each in widths if isinstance(each, int) and first.count(each) >= FEWEST), default=None)
    swaps = [
        result["swap"] if window in (None, result["window"]) else _set_window(result, window, session)
        for result in results
    ]
    columns = [{"kernel": name, "stage": stage.name} for name, each in by_name.items() for stage in each["swap"].stages]
    places = [(text.name, number) for text in settings.texts for number in text.windows]
    measures = [name for name in COLUMNS if name in results[0]["windows"] and places]  # none without numbered windows
    by_measure = {name: torch.cat([each["windows"][name] for each in results], 1) for name in measures}
    notes = dict.fromkeys(chain.from_iterable(each["notes"] for each in results))
    heads = sum(shape.heads for shape in session.shapes.values())
    return assemble_report(
        session.command,
        "swap",
        model=session.model_info,
        settings=settings.model_copy(update={"notes": [*settings.notes, *notes]}),
        coverage=Coverage(
            sites=len(session.chosen),
            heads=heads,
            analysed=heads,
            model_sites=len(session.sites),
            model_heads=session.model_heads,
            skipped=[*idle, *unfinished],
        ),
        summary=Summary(identity_error=session.identity_error),
        swap=SwapBody(**dict(swaps[0]), others=swaps[1:], plan=results[0]["plan"]),
        timings=dict(timings),
    ).with_windows(Windows(places if measures else [], columns, by_measure))
