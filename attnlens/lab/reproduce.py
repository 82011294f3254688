"""The papers' small experiments: synthetic, on one trained head or on small models, compared with published values."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any

from attnlens import requests
from attnlens.analyzers.registry import Gatherer, Gathering, GatheringPlace, select_analyzers
from attnlens.analyzers.selection import Selector
from attnlens.arguments import checked_name, public, switch
from attnlens.choices import CLAIMS, SHOWN, WHERE_POSED
from attnlens.errors import UsageError
from attnlens.lab.experiments import EXPERIMENTS, golden
from attnlens.lab.experiments.binary_kernel import binary_kernel
from attnlens.lab.experiments.one_head import hardening, train_head
from attnlens.lab.experiments.settings import ExperimentSettings
from attnlens.lab.experiments.trained import depth_decay, ksvd_identities, primal_decay
from attnlens.lab.study.cells import train_table
from attnlens.maths.attsvm.head import Nearness
from attnlens.models import loading
from attnlens.records import Coverage, Experiment, InspectionBody, ModelInfo, Settings, Skipped
from attnlens.report.report import Report
from attnlens.requests import Feeding, InspectRequest, takes
from attnlens.requests.experiments import DescentRequest, SizesRequest, StudyRequest, SyntheticRequest, checked_table
from attnlens.runs.inspect.inspection import PreparedRun
from attnlens.runs.inspect.pipeline import compute, prepare, survey
from attnlens.runs.progress import Interrupted, Progress, silent
from attnlens.runs.provenance import report_of


@public
@takes(StudyRequest)
def reproduce(
    table: str = CLAIMS, *, quick: bool = False, progress: Progress = silent, request: StudyRequest
) -> Report:
    """Rerun the papers' small experiments (`claims`), or train the models of one of their tables, or of `all`, again.

    `claims` compares each experiment with its published value; `passed` of an experiment is the verdict. `quick` runs
    fewer trials with correspondingly wider tolerances and trains no model; of the options, `claims` uses the seed.

    All cells of a table have the same sizes, steps and data. The learning rate of a cell is the one with the smallest
    validation loss in a shorter run. The test set is read once, at the end of each run. Cells are compared over the
    same seeds (moderated paired t, Holm over a task's pairs), and their order with the published one (Kendall's τ).
    Finished runs are stored in the folder `work`; the same call resumes from it.

    `text` files train language models (default: the King James text), `pairs` translators (default: a built-in task);
    `series` and `labelled` are classified. At scale `paper`, WikiText-103 and IWSLT'14 replace missing files.
    Raises UsageError for invalid options and for a table without data for any of its tasks, TextError for data that
    cannot be used or fetched, OutputError if `work` cannot be written, Interrupted with the finished experiments.
    """
    switch("quick", quick)
    if checked_table(table) != CLAIMS and quick:
        raise UsageError("quick applies only to the table claims.", "Omit quick; for small models, use scale='tiny'.")
    if table != CLAIMS:
        return train_table(table, request, progress)
    if unused := request.explicit().keys() - {"seed"}:
        raise UsageError(
            f"The table claims does not use {', '.join(sorted(unused))}.", "Omit it, or choose another table."
        )
    return rerun_claims(request.seed, quick=quick, progress=progress)


WIDTH = 10  # dimension d of the tokens in the paper's experiments


@public
@takes(SizesRequest)
def converge_synthetic(
    experiments: str | Sequence[str] = (), *, quick: bool = False, progress: Progress = silent, request: SizesRequest
) -> Report:
    """Run the experiments of Tarzanagh et al. 2023 on f(X, z) = h(Xᵀ softmax(XWz)); compare with published values.

    `experiments` are names (default: all). An experiment gets no verdict if an option changes its question. A different
    seed does not change it, nor do different trials as long as there are at least as many as
    `reproduce claims --quick` runs. Raises UsageError for invalid values, Interrupted with the finished experiments.
    """
    full = SyntheticRequest(**{"experiments": experiments} | request.explicit())
    rows = [partial(_run_synthetic, name, quick, full.overrides(), progress) for name in full.chosen]
    return run_rows("converge", rows, full.seed, full.d or WIDTH)


def _run_synthetic(name: str, quick: bool, overrides: Mapping[str, object], progress: Progress) -> list[Experiment]:
    return [EXPERIMENTS[name].run(overrides, quick, progress)]


def run_rows(command: str, rows: Sequence[Callable[[], list[Experiment]]], seed: int, width: int) -> Report:
    """Run and time experiments one by one and return their report; raises Interrupted with the finished ones."""
    completed: list[Experiment] = []
    timings: dict[str, float] = {}
    interrupted = False
    try:
        for row in rows:
            start = time.perf_counter()
            experiments = row()
            completed += experiments
            share = (time.perf_counter() - start) / max(1, len(experiments))
            timings |= {experiment.name: share for experiment in experiments}
    except KeyboardInterrupt:
        if not completed:
            raise KeyboardInterrupt from None
        interrupted = True
    report = report_of(
        command,
        "experiments",
        model=ModelInfo(
            id="one-layer attention (synthetic)", architecture="f(X, z) = h(Xᵀ softmax(XWz))", parameters=width**2
        ),
        settings=Settings(seed=seed, dtype="float64"),
        coverage=Coverage(sites=0, heads=0, analysed=0),
        experiments=completed,
        timings=timings,
    )
    if interrupted:
        raise Interrupted(report)
    return report


@public
@takes(Feeding)
def converge_head(
    model: str | PathLike[str] | loading.Loaded = "demo",
    *,
    head: tuple[int, int] | str,
    lr: float = 0.1,
    loss: str = "logistic",
    iterations: int = 2000,
    parameterisation: str = "W",
    progress: Progress = silent,
    request: Feeding,
) -> Report:
    """Run normalised gradient descent on the selection problem of one head; its chosen tokens score 1, all others 0.

    `head` is (layer, head), or `3.7`. There are two experiments. The first trains from zero and from the head's own M;
    it reports the correlation to the SVM that selects the same tokens, the selections kept, and ‖W‖ in units of
    ‖W_mm‖. A step has length lr · ‖W_mm‖. The second multiplies the logits by c and measures how the softmax hardens.
    Raises ModelError, TextError, and UsageError for invalid options and for a head whose problem has no solution.
    """
    checked_name("parameterisation", parameterisation, ("W", "KQ"))
    options: dict[str, Any] = {"lr": lr, "loss": loss, "iterations": iterations, "parameterisation": parameterisation}
    descent = DescentRequest(**options).explicit()
    layer, number = location = requests.head(head)
    query = InspectRequest(**request.explicit(), source="tokens", analyzers=(SHOWN,), layers=[layer], heads=[number])
    run = prepare(model, query, progress=progress)
    report, selector, nearness = pose_selection(run)
    start = time.perf_counter()
    hardened = hardening(nearness, selector.scenes(number), selector.softmax[number], location)
    settings = ExperimentSettings(trials=1, seed=run.settings.seed, **descent)
    where = {"posed": WHERE_POSED[selector.spaces[0]]}  # on the module's inputs if M is defined on them
    experiments = [
        made.model_copy(update={"settings": where | made.settings})
        for made in (train_head(nearness, location, settings, progress), hardened)
    ]
    timings = {**report.timings, "converge": time.perf_counter() - start}
    body = {"kind": "experiments", "experiments": experiments, "inspection": InspectionBody()}
    return report.model_copy(update={"command": "converge", **body, "timings": timings})


def pose_selection(run: PreparedRun) -> tuple[Report, Selector, Nearness]:
    """Inspect the one head in the settings; return the report, its selector and its solved selection problem."""
    selectors: list[Selector] = []

    def begin(place: GatheringPlace) -> Gatherer:
        selectors.append(Selector(place))
        return selectors[-1]

    (selection,) = (analyzer for analyzer in select_analyzers([SHOWN]) if isinstance(analyzer, Gathering))
    # the report is one of experiments, whose settings name no analyzer
    settings = run.settings.model_copy(update={"analyzers": [], "select": None})
    report, _ = compute(survey(replace(run, settings=settings, analyzers=[replace(selection, begin=begin)])))
    (head,) = settings.heads or (0,)
    nearness = selectors[0].nearness(head) if selectors else "no tokens reached this head"
    if isinstance(nearness, str):
        raise UsageError(
            f"No selection problem can be posed for head {head}: {nearness}.", "Choose another head or text."
        )
    return report, selectors[0], nearness


Row = Callable[[bool, int, Progress], list[Experiment]]  # (quick, seed, progress) → finished experiments
ROWS: list[Row] = [  # Functions that `reproduce claims` runs, in this order; to check another claim, add a function
    lambda _quick, _seed, _progress: [golden()],  # fast, so quick changes nothing
    *(
        lambda quick, seed, progress, name=name: _run_synthetic(name, quick, {"seed": seed}, progress)
        for name in EXPERIMENTS
    ),
    binary_kernel,
    lambda _quick, seed, progress: [ksvd_identities(seed, progress)],  # fast as well
    lambda quick, _seed, progress: [depth_decay(quick, progress)],  # no verdict: Figure 1 shows another model
    lambda quick, seed, progress: [] if quick else [primal_decay(seed, progress)],  # no verdict; takes over a minute
]


def rerun_claims(seed: int, *, quick: bool, progress: Progress = silent) -> Report:
    """Run and judge all small experiments of the papers; raise Interrupted with the finished experiments."""
    report = run_rows("reproduce", [partial(row, quick, seed, progress) for row in ROWS], seed, WIDTH)
    left_out = [Skipped(site="decay by training", reason="training takes longer than quick allows")] if quick else []
    return report.model_copy(update={"coverage": report.coverage.model_copy(update={"skipped": left_out})})
