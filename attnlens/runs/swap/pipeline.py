"""Compare a model under other kernels with the original model on the same text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from typing import Any

from attnlens.analyzers import registry
from attnlens.arguments import public
from attnlens.choices import KERNEL
from attnlens.errors import OutputError, TextError, UsageError
from attnlens.models import loading, texts
from attnlens.models.hooks import Replacement
from attnlens.models.texts.targets import check_input, feed
from attnlens.records import Report, Settings, Text
from attnlens.requests import SwapRequest, reading, takes, words
from attnlens.requests.run_options import SharedRequest
from attnlens.requests.swap import SwapOptions
from attnlens.runs import checks, feeding
from attnlens.runs.differences import of_file, prompts_of
from attnlens.runs.in_memory import refuse_work
from attnlens.runs.progress import Interrupted, Progress, silent, telling
from attnlens.runs.provenance import code_of, content_of
from attnlens.runs.store import Store, key_of, versions
from attnlens.runs.swap.candidate import Candidate
from attnlens.runs.swap.one_kernel import KernelInterrupted, KernelRun, Swapping, swap_report
from attnlens.runs.swap.ranks import search
from attnlens.runs.swap.saved import UnsavedError
from attnlens.runs.work import Compute, Stopped, WorkPlan, run_units

APART = ("text", "pairs", "image", "audio", "adapter", "calibration", "prompts", "ranks", "save")
"""Options that name files: input files, whose content is hashed instead, and the output folder."""
CallWords = tuple[str | None, tuple[str, ...], SwapRequest]
"""Model, kernels and options, for worker processes. The model is None for one in memory (nothing is stored)."""


@dataclass
class SwapWork:
    """The work of one run, with one unit per kernel."""

    session: Swapping
    words: CallWords  # the requested model, kernels and options
    start: float  # start of the run, `time.perf_counter`
    unsaved: OutputError | None = None  # why the changed model could not be saved

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Everything that determines the results of the units."""
        session, options = self.session, self.session.options
        left_out = {*SharedRequest.model_fields, *APART}
        read = [session.evaluated, session.calibrated, *(sample.batches for sample in session.samples)]
        own = registry.select_sweep_analyzers()
        prompts = session.prompts
        if not isinstance(prompts, str):
            prompts = f"{prompts.source} {prompts.ids.tolist()} {prompts.mask.tolist()}"
        content = {
            "fed": [content_of(session.loaded, (), one, own) for one in read],
            "prompts": prompts,
            "form": options.form_named,
            "code": [code_of(kernel.info).hex() for kernel in options.kernels],
            "generation": str(getattr(session.loaded.model, "generation_config", None)),
            "plan": None if options.ranks is None else options.ranks.model_dump_json(),
            "sites": [[site.name, chosen] for site, chosen in session.chosen.items()],
        }
        return {
            "command": "swap-kernel",
            "versions": versions(),
            "model": session.loaded.info.model_dump(mode="json", exclude={"id"}),
            "settings": session.settings.model_dump(mode="json", exclude={"notes"}),
            "options": {name: str(value) for name, value in sorted(self.request) if name not in left_out},
            "kernels": self.names,
            "parts": list(session.evaluated.parts or ()),
            "content": key_of(content),
        }

    @property
    def request(self) -> SwapRequest:
        """The checked options."""
        return self.words[2]

    @property
    def names(self) -> list[str]:
        """Spellings of the kernels, which name the units."""
        return [kernel.spelling for kernel in self.session.options.kernels]

    @cached_property
    def store(self) -> Store | None:
        """Store of the finished units; None for a model in memory."""
        return None if self.words[0] is None else WorkPlan.of(self.request).store(self.facts)

    def run(self) -> tuple[Report, Callable[[], None]]:
        """Return the report and a function that removes stored units; Interrupted, UnsavedError hold a report too."""
        plan, count = WorkPlan.of(self.request), len(self.names)
        more = telling(self.session.progress, "kernels", count) if count > 1 and plan.shard is None else None
        # recompute the kernel for --save: its unit does not contain the swapped model
        store = None if self.session.options.save is not None else self.store
        outcome = run_units(
            self.names,
            self.read_unit,
            plan,
            store,
            elsewhere=(opened, self.words),
            tell=lambda _name: more(1) if more is not None else None,
        )
        if not outcome.values:
            raise KeyboardInterrupt
        timings = self.session.timings | {"all": time.perf_counter() - self.start}
        report = swap_report(self.session, outcome.values, outcome.missing, timings)
        if outcome.stopped:
            raise Interrupted(report)
        if self.unsaved is not None:
            raise UnsavedError(self.unsaved, report)
        return report, self.store.clear if self.store is not None and not outcome.missing else lambda: None

    def read_unit(self, name: str) -> dict[str, Any]:
        """Run one kernel; finished parts of its fit, sweep and healing are stored until the unit is finished."""
        kernel = next(one for one in self.session.options.kernels if one.spelling == name)
        parts = None if self.store is None else self.store.inside(name)
        swaps = {site: Replacement(kernel, heads) for site, heads in self.session.chosen.items()}
        run = KernelRun(self.session, Candidate(kernel, {"swapped": swaps}), parts)
        try:
            return run.read().value
        except KernelInterrupted as stop:
            raise Stopped(name, stop.reading.value) from None
        finally:
            self.unsaved = run.unsaved


def opened(*words: Any) -> tuple[Mapping[str, Any], Compute]:
    """Prepare the same run in a worker process; return its facts and the function that computes a unit."""
    work = prepared(*words)
    return work.facts, work.read_unit


FITTING, HEALING, MOST_HEALING = 32, 512, 16384
"""Calibration sequences for a fit, and minimum and maximum for healing."""


@public
@takes(SwapRequest)
def swap_kernel(
    model: str | PathLike[str] | loading.Loaded = "demo",
    kernels: str | Sequence[str] = KERNEL,
    *,
    progress: Progress = silent,
    request: SwapRequest,
) -> Report:
    """Compare loss, predictions and hidden states of a model under other kernels with those of the original model.

    `kernels` are spelled as on the command line (`rbf:gamma=1+window:64`); several are compared. If
    `model` is a name, finished work is stored, and the same call resumes from it. Raises UsageError,
    ModelError, TextError, OutputError, IdentityError, and Interrupted, which holds the finished results.
    """
    report, clear_work = run_swap(model, words("kernels", kernels), request, progress)
    clear_work()
    return report


def run_swap(
    model: str | PathLike[str] | loading.Loaded,
    kernels: tuple[str, ...],
    request: SwapRequest,
    progress: Progress = silent,
) -> tuple[Report, Callable[[], None]]:
    """Return the report, and a function to call once it is written, which removes the stored units."""
    if isinstance(model, loading.Loaded):
        refuse_work(request)
    else:
        WorkPlan.of(request).check([*request.text, *request.calibration, request.prompts])
    return prepared(model, kernels, request, progress).run()


def prepared(
    model: str | PathLike[str] | loading.Loaded,
    kernels: tuple[str, ...],
    request: SwapRequest,
    progress: Progress = silent,
) -> SwapWork:
    """Load the model, cut the texts, find and check the sites, and return the work of the run."""
    start = time.perf_counter()
    options = SwapOptions.of(kernels, request)
    arguments = (None if isinstance(model, loading.Loaded) else str(model), kernels, request)
    layers, heads = options.reach(request.layers, request.heads)
    given = request.changed(layers=layers, heads=heads)
    load_options, asked = feeding.load_options(request, model), reading.settings(given)
    named = texts.read_each(reading.files(given), offline=given.offline)
    others = texts.read_each(options.calibration, offline=given.offline)
    lines = None if options.prompts is None else texts.read(options.prompts, offline=given.offline)
    loaded = model if isinstance(model, loading.Loaded) else loading.load(model, **load_options)
    feeding.refuse_text(loaded, [*reading.files(given), *options.calibration], asked.length)
    asked = feeding.of_model(asked, loaded).model_copy(update={"source": "tokens"})
    contents = feeding.contents(named, loaded)
    repeated = next((other for other in others if other.text in {content.text for content in contents}), None)
    if repeated is not None:
        raise TextError(
            f"The calibration text ({repeated.name}) is the evaluation text.",
            "Leave --calibration out, then windows that are not evaluated are used, or name another text.",
        )
    prompts = None if lines is None else of_file(loaded, lines)
    cut = feeding.cut_of(asked, given)
    session = _prepared(loaded, options, asked, contents, others, cut, progress)
    if options.generate:
        session.prompts = prompts_of(loaded.model, session.fed, session.task, prompts)
    session.survey()
    return SwapWork(session, arguments, start)


def _prepared(
    loaded: loading.Loaded,
    options: SwapOptions,
    asked: Settings,
    contents: Sequence[texts.Content],
    others: Sequence[texts.Content],
    cut: texts.Cut,
    progress: Progress,
) -> Swapping:
    """Cut the evaluated text and the calibration text (other windows of it, or other texts); return the session."""
    evaluated = texts.batches(loaded, contents, cut)
    task = checks.task_on(loaded, evaluated.batches[0].inputs)
    calibrated: texts.Batches | None = None
    samples: tuple[search.Sample, ...] = ()
    shared = 0.0
    if options.limit is not None:
        search.check_task(task)
        check_input(evaluated)
    if options.calibrates and (cut.image or cut.audio):
        raise UsageError(
            "Fits, ranks and healing would read the images or sounds that are evaluated.",
            "Leave out image and audio, then random ones are fed; or --fit, --heal and ranks.",
        )
    if options.calibrates:
        more = replace(cut, pack=cut.pack or bool(others))
        calibrated, samples = _cut_calibration(loaded, options, asked, others or contents, more, evaluated)
        read = [sample.batches for sample in samples] + ([calibrated] if calibrated else [])
        shared = texts.shared_share(loaded.tokenizer, evaluated.passages, texts.passages(read))
        named = search.joined(read)
        if shared > texts.MOST_SHARED and not others:
            raise TextError(
                f"The text repeats itself: {100 * shared:.0f} % of the evaluated tokens stand in its other windows "
                "too.",
                "Give a --calibration text of its own, or a --text that repeats itself less.",
            )
        if shared > texts.MOST_SHARED:
            raise TextError(
                f"The calibration text ({Text.of(named).name}) holds {100 * shared:.0f} % of the evaluated tokens.",
                "Give a --calibration text of its own, or leave it out: then windows that are not evaluated are used.",
            )
        unknown = {name: share for part in read for name, share in part.unknown.items()} if others else {}
        notes = texts.foreign_notes(unknown)
        asked = asked.model_copy(update={"calibration": Text.of(named), "calibrations": named, "notes": notes})
    fed = feed(loaded, evaluated, task, asked.seed)
    design = feeding.design_of(asked, evaluated)
    settings = feeding.fed(asked, evaluated, loaded)
    return Swapping(
        loaded, options, settings, task, evaluated, fed, design, calibrated, samples, progress, shared=shared
    )


def _cut_calibration(
    loaded: loading.Loaded,
    options: SwapOptions,
    asked: Settings,
    contents: Sequence[texts.Content],
    cut: texts.Cut,
    evaluated: texts.Batches,
) -> tuple[texts.Batches | None, tuple[search.Sample, ...]]:
    """Return the text for fits and healing (None if unused), and the parts that a budget or a plan reads."""
    found: texts.Batches | None = None
    samples: tuple[search.Sample, ...] = ()
    if options.heal is not None or options.limit is None:
        count = FITTING
        if options.heal is not None:  # as many as training uses, within bounds; the maximum if a time is given
            amount, tokens = options.heal.amount, cut.tokens or 128
            trained = {"steps": 0.0, "tokens": amount.number / max(1, tokens), "seconds": math.inf}[amount.unit]
            count = int(min(MOST_HEALING, max(HEALING, trained)))
        some = replace(cut, sequences=count)
        found = texts.batches(loaded, contents, some, apart_from=evaluated, skip_noise=evaluated.sequences)
    if options.limit is not None:
        some = replace(cut, sequences=search.wanted(contents))
        count = search.PARTS if options.ranks is None else 1
        samples = search.samples(loaded, contents, some, evaluated, asked.intervals, count)
    return found, samples
