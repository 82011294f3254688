"""Does training converge to the max-margin solution? The paper's synthetic experiments, a head, or checkpoints."""

from __future__ import annotations

import inspect as signatures
import time
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, TypedDict, Unpack

from attnlens import requests
from attnlens.calls import public
from attnlens.errors import UnaskedError, UsageError
from attnlens.experiments import names, refuse_ignored, run_experiments
from attnlens.experiments.options import checked
from attnlens.records import Coverage, Experiment, ModelInfo, Report, Settings
from attnlens.registry import checked_name
from attnlens.run.inspect.collector import environment, peak_memory, tool
from attnlens.run.progress import Interrupted, Progress, silent
from attnlens.run.training.series import series

WIDTH = 10
"""d of the paper's experiments."""


@public
def converge(
    model: str | PathLike[str] | None = None,
    *,
    head: tuple[int, int] | str | None = None,
    checkpoints: requests.Words | bool = False,
    revisions: requests.Words = (),
    progress: Progress = silent,
    **options: Any,
) -> Report:
    """Token selection under training, against the max-margin solution of Att-SVM (Tarzanagh et al. 2023).

    Alone: the paper's synthetic experiments (`synthetic` names the options). With `model` and `head` = (layer, head)
    or `3.7`: that head's own selection problem. With `checkpoints` (several names; True means those of `demo`), or
    `model` and `revisions`: every head's measures against the training step (`series` names the options). Raises
    UsageError for what does not belong together and for options of another kind of run, ModelError, TextError,
    Interrupted.
    """
    one = None if head is None else requests.head(head)
    if checkpoints is not False or revisions:
        names = [] if isinstance(checkpoints, bool) else requests.words("checkpoints", checkpoints)
        if not names and not isinstance(checkpoints, bool):
            raise UsageError("checkpoints=[] names none.", "Name two or more, or give True for those of demo.")
        named = (*names, *([] if model is None else [str(model)]))
        return _called(series, options, named, head=one, revisions=revisions, progress=progress)
    if one is not None:
        from attnlens.run.training.one_head import head_experiments

        return _called(head_experiments, options, "demo" if model is None else model, head=one, progress=progress)
    if model is not None:
        raise UnaskedError(str(model))
    return _called(synthetic, options, progress=progress)


class Sizes(TypedDict, total=False):
    """What of the synthetic experiments can be changed; None leaves each at the paper's value."""

    n: int | None
    """Inputs of an instance."""
    t: int | None
    """T, the tokens of an input."""
    d: int | None
    """Dimensions of a token."""
    m: int | None
    """Columns of K and Q."""
    lr: float | None
    """Length of a normalised gradient step."""
    loss: str | None
    """logistic or exponential."""
    head_function: str | None
    """h: linear or relu."""
    parameterisation: str | None
    """W, KQ or both."""
    attention: str | None
    """self (z is a token of X) or cross (z is drawn)."""
    start: str | None
    """random or zero."""
    trials: int | None
    """Random instances."""
    iterations: int | None
    """Steps of gradient descent."""


NAMES = {"t": "T", "head_function": "head"}
"""What the experiments call a setting that has another name here."""


def synthetic(
    experiments: requests.Words = (),
    *,
    quick: bool = False,
    seed: int = 0,
    progress: Progress = silent,
    **sizes: Unpack[Sizes],
) -> Report:
    """The experiments of Tarzanagh et al. 2023 on f(X, z) = h(Xᵀ softmax(XWz)), with what was published beside them.

    `experiments` are their names (none: all), `sizes` the fields of `Sizes`. An experiment has no verdict where one of
    them changes what is asked. Another seed does not, and neither do other trials, as long as there are at least as
    many as `verify --quick` takes. Raises UsageError for values that make no sense, Interrupted with the experiments
    that are finished.
    """
    overrides = checked({NAMES.get(name, name): value for name, value in sizes.items()})
    requests.whole("seed", seed, 0)
    wanted = requests.words("experiments", experiments) or list(names())
    chosen = [checked_name("experiment", name, names()) for name in dict.fromkeys(wanted)]
    refuse_ignored(chosen, overrides)

    def row(name: str) -> Callable[[], list[Experiment]]:
        return lambda: run_experiments([name], quick=quick, seed=seed, overrides=overrides, progress=progress)

    return finished("converge", [row(name) for name in chosen], seed, sizes.get("d") or WIDTH)


def finished(command: str, rows: Sequence[Callable[[], list[Experiment]]], seed: int, width: int) -> Report:
    """The report of experiments that are run one by one and timed; raises Interrupted with those that are done."""
    done: list[Experiment] = []
    timings: dict[str, float] = {}
    try:
        for row in rows:
            start = time.perf_counter()
            found = row()
            done += found
            share = (time.perf_counter() - start) / max(1, len(found))
            timings |= {experiment.name: share for experiment in found}
    except KeyboardInterrupt:
        if not done:
            raise KeyboardInterrupt from None
        raise Interrupted(_report(command, done, timings, seed, width)) from None
    return _report(command, done, timings, seed, width)


def _report(command: str, done: list[Experiment], timings: dict[str, float], seed: int, width: int) -> Report:
    return Report(
        tool=tool(),
        command=command,
        model=one_layer(width),
        settings=Settings(seed=seed, dtype="float64"),
        environment=environment(),
        coverage=Coverage(sites=0, heads=0, analysed=0),
        experiments=done,
        timings=timings,
        peak_memory_bytes=peak_memory(),
    )


def one_layer(width: int) -> ModelInfo:
    """What stands for a model where none was pretrained: one attention layer of d² numbers."""
    return ModelInfo(
        id="one-layer attention (synthetic)", architecture="f(X, z) = h(Xᵀ softmax(XWz))", parameters=width**2
    )


def _called(run: Callable[..., Report], options: dict[str, Any], *args: object, **fixed: Any) -> Report:
    """`run` with the options that it knows. Raises UsageError for any other (did you mean)."""
    known = [name for name in signatures.signature(run).parameters if name not in (*fixed, "more", "sizes")]
    more = Sizes.__annotations__ if run is synthetic else requests.Feeding.__annotations__
    for option in options:
        checked_name("option", option, [*known, *more])
    return run(*args, **options, **fixed)
