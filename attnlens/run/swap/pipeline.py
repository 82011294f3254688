"""Measures what another kernel does to a model, against the model itself on the same text; proven first."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, Unpack

from attnlens import models, texts
from attnlens.arguments import public
from attnlens.choices import KERNEL
from attnlens.errors import TextError, UsageError
from attnlens.records import Report, Settings, Text
from attnlens.requests import SwapRequest, Words, checked, reading
from attnlens.requests.healing import Amount
from attnlens.requests.swap import SwapOptions
from attnlens.run import checks, feeding
from attnlens.run.in_memory import refuse_work
from attnlens.run.outcomes.agreement import of_file, prompts_of
from attnlens.run.swap.ranks import calibration, search
from attnlens.run.swap.session import Swapping
from attnlens.run.swap.work import SwapWork
from attnlens.runs.progress import Progress, silent
from attnlens.runs.work import WorkPlan
from attnlens.texts.targets import check_input, feed

FITTING, HEALING, MOST_HEALING = 32, 512, 16384
"""Sequences of calibration text for a fit, and at most for a healing: more where more tokens are to be trained on."""


@public
def swap_kernel(
    model: str | PathLike[str] | models.Loaded = "demo",
    kernels: Words = KERNEL,
    *,
    progress: Progress = silent,
    **more: Unpack[SwapRequest],
) -> Report:
    """The loss, predictions and hidden states of a model under other kernels, against the model itself.

    `kernels` are spelled as on the command line (`rbf:gamma=1+window:64`); several are compared. `more` are the
    options of `SwapRequest`. What is finished of a model that is named is kept, and the same call goes on from there.
    Raises UsageError, ModelError, TextError, OutputError, IdentityError, and Interrupted, which carries what was
    finished.
    """
    report, written = swapped(model, kernels, progress=progress, **more)
    written()
    return report


def swapped(
    model: str | PathLike[str] | models.Loaded = "demo",
    kernels: Words = KERNEL,
    *,
    progress: Progress = silent,
    **more: Unpack[SwapRequest],
) -> tuple[Report, Callable[[], None]]:
    """The report, and what is to be called when it is written: finished units are not needed any longer then."""
    given = checked(SwapRequest, more)
    if isinstance(model, models.Loaded):
        refuse_work(given, SwapRequest)
    else:
        WorkPlan.of(given).check([*given["text"], *given["calibration"], given["prompts"]])
    return prepared(model, kernels, more, progress).run()


def prepared(
    model: str | PathLike[str] | models.Loaded,
    kernels: Words,
    more: Mapping[str, Any],
    progress: Progress = silent,
) -> SwapWork:
    """The run that was asked for: its model loaded and proven, its texts cut."""
    start = time.perf_counter()
    given = checked(SwapRequest, more)
    options = SwapOptions.of(kernels, given)
    words = (None if isinstance(model, models.Loaded) else str(model), kernels, dict(given))
    given["layers"], given["heads"] = options.reach(given["layers"], given["heads"])
    loading, asked = feeding.loading_of(more, model), reading.settings(given)
    named = texts.read_each(reading.files(given), offline=given["offline"])
    others = texts.read_each(options.calibration, offline=given["offline"])
    lines = None if options.prompts is None else texts.read(options.prompts, offline=given["offline"])
    loaded = model if isinstance(model, models.Loaded) else models.load(model, **loading)
    feeding.refuse_text(loaded, [*reading.files(given), *options.calibration], asked.tokens)
    asked = feeding.of_model(asked, loaded).model_copy(update={"source": "tokens"})
    contents = feeding.contents(named, loaded)
    _refuse_same(contents, others)
    prompts = None if lines is None else of_file(loaded, lines)
    cut = feeding.cut_of(asked, given)
    session = _prepared(loaded, options, asked, contents, others, cut, progress)
    if options.generate:
        session.prompts = prompts_of(loaded.model, session.fed, session.task, prompts)
    session.survey()
    return SwapWork(session, words, start)


def _refuse_same(contents: Sequence[texts.Content], others: Sequence[texts.Content]) -> None:
    """Raise TextError where a calibration text is an evaluated one, under whatever name."""
    evaluated = {content.text for content in contents}
    for other in others:
        if other.text in evaluated:
            raise TextError(
                f"The calibration text ({other.name}) is the evaluation text.",
                "Leave --calibration out, then windows that are not evaluated are used, or name another text.",
            )


def _prepared(
    loaded: models.Loaded,
    options: SwapOptions,
    asked: Settings,
    contents: Sequence[texts.Content],
    others: Sequence[texts.Content],
    cut: texts.Cut,
    progress: Progress,
) -> Swapping:
    """The run with its texts cut: what is evaluated, and other windows of it, or other texts, to calibrate on."""
    evaluated = texts.batches(loaded, contents, cut)
    task = checks.task_on(loaded, evaluated.batches[0].inputs)
    calibrated: texts.Batches | None = None
    samples: tuple[calibration.Sample, ...] = ()
    shared = 0.0
    if options.limit is not None:
        search.check_task(task)
        check_input(evaluated)
    if options.calibrates and (cut.image or cut.audio):
        raise UsageError(
            "Fits, ranks and healing would read the images or sounds that are evaluated.",
            "Leave out --image and --audio, then random ones are fed; or --fit, --heal and ranks.",
        )
    if options.calibrates:
        more = replace(cut, pack=cut.pack or bool(others))
        calibrated, samples = _calibrated(loaded, options, asked, others or contents, more, evaluated)
        read = [sample.batches for sample in samples] + ([calibrated] if calibrated else [])
        shared = texts.shared_share(loaded.tokenizer, evaluated.passages, texts.passages(read))
        named = calibration.joined(read)
        _refuse_shared(shared, named, same=not others)
        unknown = {name: share for part in read for name, share in part.unknown.items()} if others else {}
        notes = texts.foreign_notes(unknown)
        asked = asked.model_copy(update={"calibration": Text.of(named), "calibrations": named, "notes": notes})
    fed = feed(loaded, evaluated, task, asked.seed)
    design = feeding.design_of(asked, evaluated)
    settings = feeding.fed(asked, evaluated, loaded)
    return Swapping(
        loaded, options, settings, task, evaluated, fed, design, calibrated, samples, progress, shared=shared
    )


def _calibrated(
    loaded: models.Loaded,
    options: SwapOptions,
    asked: Settings,
    contents: Sequence[texts.Content],
    cut: texts.Cut,
    evaluated: texts.Batches,
) -> tuple[texts.Batches | None, tuple[calibration.Sample, ...]]:
    """What kernels are fitted on or weights healed, if any are; and the parts that a budget, or ranks given, read."""
    found: texts.Batches | None = None
    samples: tuple[calibration.Sample, ...] = ()
    if options.heal is not None or options.limit is None:
        some = replace(
            cut, sequences=FITTING if options.heal is None else _healing(options.heal.amount, cut.tokens or 128)
        )
        found = texts.batches(loaded, contents, some, apart_from=evaluated, skip_noise=evaluated.sequences)
    if options.limit is not None:
        some = replace(cut, sequences=calibration.wanted(contents))
        count = calibration.PARTS if options.ranks is None else 1
        samples = calibration.samples(loaded, contents, some, evaluated, asked.intervals, count)
    return found, samples


def _healing(amount: Amount, tokens: int) -> int:
    """Sequences of calibration text: as many as are trained on, within bounds; the most where a time is given."""
    wanted = {"steps": 0.0, "tokens": amount.number / max(1, tokens), "seconds": math.inf}[amount.unit]
    return int(min(MOST_HEALING, max(HEALING, wanted)))


def _refuse_shared(share: float, calibrated: Sequence[Text], *, same: bool) -> None:
    """Raise TextError where too much of what is evaluated would be calibrated on."""
    if share <= texts.MOST_SHARED:
        return
    if same:
        raise TextError(
            f"The text repeats itself: {100 * share:.0f} % of the evaluated tokens stand in its other windows too.",
            "Give a --calibration text of its own, or a --text that repeats itself less.",
        )
    raise TextError(
        f"The calibration text ({Text.of(calibrated).name}) holds {100 * share:.0f} % of the evaluated tokens.",
        "Give a --calibration text of its own, or leave it out: then windows that are not evaluated are used.",
    )
