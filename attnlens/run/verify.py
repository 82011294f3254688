"""Runs the papers' small experiments, synthetic or on one trained head, beside what was published."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Unpack

from attnlens import models, requests, texts
from attnlens.analyzers.selection.gatherer import Selector
from attnlens.arguments import public, switch
from attnlens.attsvm.head import Nearness
from attnlens.choices import SHOWN, WHERE_POSED, Space
from attnlens.errors import UsageError
from attnlens.experiments import EXPERIMENTS, golden, one_thread, run_experiments
from attnlens.experiments.binary_kernel import binary_kernel
from attnlens.experiments.one_head import hardening, trained
from attnlens.experiments.primal_decay import primal_decay
from attnlens.experiments.settings import ExperimentSettings
from attnlens.experiments.trained import depth_decay, ksvd_identities
from attnlens.records import Coverage, Experiment, ModelInfo, Report, Settings, Skipped
from attnlens.registry import Gatherer, Gathering, GatheringPlace, analyzers, checked_name
from attnlens.requests import reading
from attnlens.requests.training import DescentRequest, SizesRequest, checked_synthetic
from attnlens.run import feeding
from attnlens.run.inspect.collector import Collector
from attnlens.run.inspect.pipeline import Inspection
from attnlens.run.provenance import report_of
from attnlens.runs.progress import Interrupted, Progress, silent

if TYPE_CHECKING:
    from collections.abc import Sequence


WIDTH = 10
"""d of the paper's experiments."""


@public
def converge_synthetic(
    experiments: requests.Words = (),
    *,
    quick: bool = False,
    progress: Progress = silent,
    **more: Unpack[SizesRequest],
) -> Report:
    """The experiments of Tarzanagh et al. 2023 on f(X, z) = h(Xᵀ softmax(XWz)), with what was published beside them.

    `experiments` are their names (none: all), `more` the other options of `attnlens.requests.training`. An experiment
    has no verdict where one of them changes what is asked. Another seed does not, and neither do other trials, as long
    as there are at least as many as `verify --quick` takes. Raises UsageError for values that make no sense,
    Interrupted with the experiments that are finished.
    """
    asked = checked_synthetic({**more, "experiments": experiments})
    chosen = asked.pop("experiments")

    def row(name: str) -> Callable[[], list[Experiment]]:
        return lambda: run_experiments([name], quick=quick, overrides=asked, progress=progress)

    return finished("converge", [row(name) for name in chosen], asked["seed"], asked.get("d") or WIDTH)


def finished(command: str, rows: Sequence[Callable[[], list[Experiment]]], seed: int, width: int) -> Report:
    """The report of experiments that are run one by one and timed; raises Interrupted with those that are done."""
    done: list[Experiment] = []
    timings: dict[str, float] = {}
    interrupted = False
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
        interrupted = True
    report = report_of(
        command,
        model=one_layer(width),
        settings=Settings(seed=seed, dtype="float64"),
        coverage=Coverage(sites=0, heads=0, analysed=0),
        experiments=done,
        timings=timings,
    )
    if interrupted:
        raise Interrupted(report)
    return report


def one_layer(width: int) -> ModelInfo:
    """What stands for a model where none was pretrained: one attention layer of d² numbers."""
    return ModelInfo(
        id="one-layer attention (synthetic)", architecture="f(X, z) = h(Xᵀ softmax(XWz))", parameters=width**2
    )


@public
def converge_head(
    model: str | PathLike[str] | models.Loaded = "demo",
    *,
    head: tuple[int, int] | str,
    lr: float = 0.1,
    loss: str = "logistic",
    iterations: int = 2000,
    parameterisation: str = "W",
    progress: Progress = silent,
    **more: Unpack[requests.Feeding],
) -> Report:
    """Normalised gradient descent on one head's own selection problem, its chosen tokens optimal (score 1, others 0).

    `head` is (layer, head), or `3.7`. Two experiments: training from zero and from the head's own M (correlation to the
    SVM that selects the same tokens, selections kept, ‖W‖ in units of ‖W_mm‖; a step has the length lr · ‖W_mm‖), and
    how the softmax hardens when the logits are multiplied by c. Raises ModelError, TextError, and UsageError for words
    that make no sense and for a head whose problem has no solution.
    """
    checked_name("parameterisation", parameterisation, ("W", "KQ"))
    asked_for = {"lr": lr, "loss": loss, "iterations": iterations, "parameterisation": parameterisation}
    descent = requests.checked(DescentRequest, asked_for)
    layer, number = one = requests.head(head)
    fed = requests.checked(requests.Feeding, more)
    given = requests.checked(requests.InspectRequest, {**fed, "source": "tokens", "layers": [layer], "heads": [number]})
    loading, asked = feeding.loading_of(more, model), reading.settings(given)
    wanted = ExperimentSettings(trials=1, seed=asked.seed, **descent)
    named = texts.read_each(reading.files(given), offline=given["offline"])
    loaded = model if isinstance(model, models.Loaded) else models.load(model, **loading)
    feeding.refuse_text(loaded, reading.files(given), asked.tokens)
    contents, settings = feeding.contents(named, loaded), feeding.of_model(asked, loaded)
    cut = feeding.cut_of(settings, given)
    report, selector, found = posed(loaded, settings, contents, cut, progress)
    start = time.perf_counter()
    meant = hardening(found, selector.scenes(number), selector.softmax[number], one)
    experiments = [_placed(made, selector.spaces[0]) for made in (trained(found, one, wanted, progress), meant)]
    timings = {**report.timings, "converge": time.perf_counter() - start}
    return report.model_copy(update={"command": "converge", "experiments": experiments, "timings": timings})


def _placed(experiment: Experiment, space: Space) -> Experiment:
    """With the space of its problem: the module's inputs where M lives on them, else queries and keys."""
    return experiment.model_copy(update={"settings": {"posed": WHERE_POSED[space]} | experiment.settings})


def posed(
    loaded: models.Loaded,
    settings: Settings,
    contents: Sequence[texts.Content],
    cut: texts.Cut,
    progress: Progress = silent,
) -> tuple[Report, Selector, Nearness]:
    """What `inspect` says of the one head that `settings` ask for, what it gathered, and the head's problem, solved.

    Raises UsageError where there is none.
    """
    selectors: list[Selector] = []

    def begin(place: GatheringPlace) -> Gatherer:
        selectors.append(Selector(place))
        return selectors[-1]

    (selection,) = (found for found in analyzers([SHOWN]) if isinstance(found, Gathering))
    keeping = replace(selection, begin=begin)
    inspection = Inspection(loaded, settings, [keeping], Collector(settings.heads), progress, timings={})
    report = inspection.run(contents, cut)
    (head,) = settings.heads or (0,)
    found = selectors[0].nearness(head) if selectors else "no token reached it"
    if isinstance(found, str):
        raise UsageError(f"Head {head} poses no problem: {found}.", "Choose another head or text.")
    return report, selectors[0], found


Row = Callable[[bool, int, Progress], list[Experiment]]
"""(quick, seed, progress) → what was found."""


def synthetic_row(name: str, quick: bool, seed: int, progress: Progress) -> list[Experiment]:
    """One synthetic experiment of Att-SVM at the published sizes."""
    return run_experiments([name], quick=quick, overrides={"seed": seed}, progress=progress)


def binary_row(quick: bool, seed: int, progress: Progress) -> list[Experiment]:
    """Two networks that learn a planted indefinite kernel; quick takes fewer points and steps."""
    with one_thread():
        return binary_kernel(quick, seed, progress)


def training_row(quick: bool, seed: int, progress: Progress) -> list[Experiment]:
    """Training with and without Primal-Attention, over a minute, which quick leaves out; without a verdict."""
    if quick:
        return []
    with one_thread():
        return [primal_decay(seed, progress)]


ROWS: list[Row] = [
    lambda _quick, _seed, _progress: [golden()],  # takes no time, so that quick changes nothing
    *(partial(synthetic_row, name) for name in EXPERIMENTS),
    binary_row,
    lambda _quick, seed, progress: [ksvd_identities(seed, progress)],  # nor does it here
    lambda quick, _seed, progress: [depth_decay(quick, progress)],  # no verdict: Figure 1 is about another model
    training_row,
]
"""What is verified, in this order; a further claim is a further function."""

LEFT_OUT = Skipped(site="decay by training", reason="training takes longer than quick may")
"""What a quick report says is missing."""


@public
def verify(*, quick: bool = False, seed: int = 0, progress: Progress = silent) -> Report:
    """Every row of the papers' small experiments, judged; `passed` of each experiment says how it went.

    `quick` takes fewer trials, and tolerances that are as much wider, and trains no model. Raises UsageError for a seed
    that is none, and Interrupted with the rows that are finished.
    """
    requests.whole("seed", seed, 0)
    switch("quick", quick)
    report = finished("verify", [partial(row, quick, seed, progress) for row in ROWS], seed, WIDTH)
    left_out = report.coverage.model_copy(update={"skipped": [LEFT_OUT] if quick else []})
    return report.model_copy(update={"coverage": left_out})
