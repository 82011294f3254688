"""Poses the selection problem of one trained head, and trains on it from zero and from its weights."""

from __future__ import annotations

import time
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Unpack

from attnlens import models, requests, texts
from attnlens.analyzers.selection.gatherer import Selector
from attnlens.arguments import public
from attnlens.attsvm.head import Nearness
from attnlens.choices import SHOWN, WHERE_POSED, Space
from attnlens.errors import UsageError
from attnlens.experiments.one_head import hardening, trained
from attnlens.experiments.settings import ExperimentSettings
from attnlens.records import Experiment, Report, Settings
from attnlens.registry import Gatherer, Gathering, GatheringPlace, analyzers, checked_name
from attnlens.requests import reading
from attnlens.requests.experiments import DescentRequest
from attnlens.run import feeding
from attnlens.run.inspect.collector import Collector
from attnlens.run.inspect.survey import Inspection
from attnlens.runs.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Sequence


ITERATIONS = 2000
PARAMETERISATIONS = ("W", "KQ")


@public
def converge_head(
    model: str | PathLike[str] | models.Loaded = "demo",
    *,
    head: tuple[int, int] | str,
    lr: float = 0.1,
    loss: str = "logistic",
    iterations: int = ITERATIONS,
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
    checked_name("parameterisation", parameterisation, PARAMETERISATIONS)
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
