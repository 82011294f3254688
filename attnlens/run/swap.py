"""What does another kernel do to a model? Proven first, then measured against the model itself on the same text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from os import PathLike
from typing import Unpack, cast

from attnlens import models, texts
from attnlens.errors import TextError
from attnlens.records import Report, Settings
from attnlens.run import arguments, budget
from attnlens.run.inspect import Interrupted, Progress, silent
from attnlens.run.swapping import Swapping
from attnlens.run.tasks import check_input, feed, task_of
from attnlens.run.wishes import Wish, Wishes

FITTING, HEALING = 32, 512
"""Sequences of calibration text for a fit, and at most for a healing."""


def swap_kernel(
    model: str | PathLike[str] | models.Loaded = "demo",
    kernels: arguments.Words = "rbf",
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    text: arguments.Words = (),
    tokens: int | None = None,
    sequences: int = 32,
    batch_size: int = 8,
    pack: bool = True,
    seed: int = 0,
    progress: Progress = silent,
    **more: Unpack[Wishes],
) -> Report:
    """The loss, predictions and hidden states of a model under other kernels, against the model itself.

    `kernels` are spelled as on the command line (`rbf:gamma=1+window:64`); several are compared. `more` are the
    options of `Wishes` (part, path, sweep, fit, heal, eta, ksvd_convention, budget, ranks, calibration, save,
    allow_signed) and of `load`. Raises UsageError, ModelError, TextError, OutputError, IdentityError, Interrupted.
    """
    start = time.perf_counter()
    loading = cast("models.Loading", {name: more.get(name) for name in models.Loading.__annotations__ if name in more})
    wish = Wish.of(kernels, more)
    layers, heads = wish.reach(layers, heads)
    asked = arguments.settings(layers=layers, heads=heads, tokens=tokens, sequences=sequences, pack=pack, seed=seed)
    arguments.whole("batch_size", batch_size, 1)
    arguments.refuse_ignored(model, loading)
    files = arguments.words("text", text)
    content = texts.read_text(files)
    others = _others(wish, content)
    loaded = model if isinstance(model, models.Loaded) else models.load(model, **loading)
    arguments.refuse_text(loaded, files, tokens)
    asked = arguments.of_model(asked, loaded).model_copy(update={"source": "tokens"})
    work = _prepared(loaded, wish, asked, content, others, batch_size, progress)
    return _reported(work, start)


def _reported(work: Swapping, start: float) -> Report:
    """The run's report; raises Interrupted, which holds it, where the user ended the run early."""
    swaps = work.run()
    work.timings["all"] = time.perf_counter() - start
    report = work.report(swaps)
    if work.interrupted:
        raise Interrupted(report)
    return report


def _others(wish: Wish, content: texts.Content) -> tuple[texts.Content, ...]:
    """The texts named for calibration; raises TextError where they are the evaluated text, under whatever name, or one
    of them is named twice.
    """
    if not wish.calibration:
        return ()
    others = texts.read_each(wish.calibration)
    first: dict[str, str] = {}
    for other in others:
        if other.text in first:
            raise TextError(f"{first[other.text]} and {other.name} are the same text.", "Name each text once.")
        first[other.text] = other.name
    if texts.joined(others).text == content.text:
        raise TextError(
            f"The calibration text ({texts.joined(others).name}) is the evaluation text.",
            "Leave --calibration out, then what follows the evaluated windows is used, or name another text.",
        )
    return others


def _prepared(
    loaded: models.Loaded,
    wish: Wish,
    asked: Settings,
    content: texts.Content,
    others: Sequence[texts.Content],
    batch_size: int,
    progress: Progress,
) -> Swapping:
    """The run with its texts cut: what is evaluated, and behind it, or elsewhere, what is calibrated on."""
    cut = partial(texts.batches, loaded, tokens=asked.tokens, batch_size=batch_size, seed=asked.seed)
    evaluated = cut(content, sequences=asked.sequences or 1, pack=asked.pack is not False)
    task = task_of(loaded.model)
    calibrated, shared = None, 0.0
    if wish.limit is not None:
        budget.check_task(task)
        check_input(loaded)
    if wish.calibrates:
        same, packed = not others, asked.pack is not False
        calibrated = cut(
            content if same else texts.joined(others),
            sequences=HEALING if wish.heal else FITTING if wish.limit is None else budget.SEQUENCES,
            skip=evaluated.sequences if same and packed else 0,
            start=evaluated.end if same else 0,
            skip_noise=evaluated.sequences,
            parts=others,
        )
        shared = texts.shared_share(
            loaded.tokenizer, evaluated.ids, calibrated.ids, packed=packed, parts=max(1, len(others))
        )
        _refuse_shared(shared, calibrated.text.name, same=same)
        asked = asked.model_copy(update={"calibration": calibrated.text})
    fed = feed(loaded, evaluated, task, asked.seed)
    return Swapping(loaded, wish, arguments.fed(asked, evaluated), task, fed, calibrated, progress, shared)


def _refuse_shared(share: float, name: str, *, same: bool) -> None:
    """Raise TextError where too much of what is evaluated would be calibrated on."""
    if share <= texts.MOST_SHARED:
        return
    if same:
        raise TextError(
            f"The text repeats itself: {100 * share:.0f} % of the evaluated tokens stand in what follows them too.",
            "Give a --calibration text of its own, or a --text that repeats itself less.",
        )
    raise TextError(
        f"The calibration text ({name}) holds {100 * share:.0f} % of the evaluated tokens.",
        "Give a --calibration text of its own, or leave it out: then what follows the evaluated text is used.",
    )
