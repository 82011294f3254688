"""The papers' small experiments on synthetic data, on a head or on small models, compared with published values."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING

import torch
from pydantic import JsonValue
from torch.nn.functional import logsigmoid, pad
from torch.nn.utils.rnn import pad_sequence

from attnlens import requests
from attnlens.analyzers.registry import Gatherer, Gathering, GatheringPlace, select_analyzers
from attnlens.analyzers.selection import Selector
from attnlens.arguments import checked_name, public, switch
from attnlens.choices import CLAIMS, SHOWN, WHERE_POSED
from attnlens.errors import UsageError
from attnlens.lab.experiments import EXPERIMENTS, golden
from attnlens.lab.experiments.binary_kernel import binary_kernel
from attnlens.lab.experiments.tokens import CORRELATION, ExperimentSettings, curve
from attnlens.lab.experiments.trained import depth_decay, ksvd_identities, primal_decay
from attnlens.lab.study.cells import train_table
from attnlens.maths import attsvm
from attnlens.maths.attsvm.descent import Instances, Scores
from attnlens.maths.attsvm.head import Nearness, Softmax, log_odds, row_span
from attnlens.models import loading
from attnlens.records import Coverage, Experiment, InspectionBody, ModelInfo, Settings, Skipped
from attnlens.records.studies import Curve
from attnlens.report.report import Report
from attnlens.requests import Feeding, InspectRequest, takes
from attnlens.requests.experiments import DescentRequest, SizesRequest, StudyRequest, SyntheticRequest, checked_table
from attnlens.runs.inspect.inspection import PreparedRun
from attnlens.runs.inspect.pipeline import compute, prepare, survey
from attnlens.runs.progress import Interrupted, Progress, silent, start_stage
from attnlens.runs.provenance import assemble_report
from attnlens.wording import join_items

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from attnlens.maths.attsvm.descent import BilinearForm, KeyQueryPair
    from attnlens.maths.attsvm.head import Scene
    from attnlens.maths.attsvm.problem import Problem


@public
@takes(StudyRequest)
def reproduce(
    table: str = CLAIMS, *, quick: bool = False, progress: Progress = silent, request: StudyRequest
) -> Report:
    """Rerun the papers' small experiments (`claims`), or retrain the models of one of their tables or of `all` tables.

    `claims` compares experiments with reference values, if there are any; the field `passed` of an experiment is the
    verdict. With `quick`, which applies only to `claims`, fewer trials are run with wider tolerances, and no
    transformer is trained. Of the other options, `claims` accepts only the seed.

    All cells of a task have the same sizes, steps and data. Each cell's learning rate is the one with the smallest
    validation loss in shorter runs. The test set is read once, at the end of each run. Cells are compared over the same
    seeds (moderated paired t, Holm), and their order is compared with the published order (Kendall's τ). A repeated
    call resumes from the runs stored in the folder `work`.

    Language models are trained on the `text` files (default: the King James text), translators on `pairs` (default: a
    built-in reversal task), classifiers on `series` and `labelled`. At scale `paper`, the defaults are WikiText-103 and
    IWSLT'14. Raises UsageError, TextError for data that cannot be used or fetched, ModelError if a model cannot be
    trained, OutputError if `work` or `save` cannot be written and, if `claims` is interrupted, Interrupted with the
    finished experiments.
    """
    switch("quick", quick)
    if checked_table(table) != CLAIMS:
        if quick:
            raise UsageError(
                "`quick` applies only to `claims`.", "Omit `quick`: the default scale, `tiny`, is the fastest."
            )
        return train_table(table, request, progress)
    if unused := request.explicit().keys() - {"seed"}:
        problem = f"`claims` accepts only the option `seed`, not {', '.join(sorted(unused))}."
        raise UsageError(problem, "Omit these options, or name a table of models.")
    return rerun_claims(request.seed, quick=quick, progress=progress)


@public
@takes(SizesRequest)
def converge_synthetic(
    experiments: str | Sequence[str] = (), *, quick: bool = False, progress: Progress = silent, request: SizesRequest
) -> Report:
    """Run experiments of Tarzanagh et al. 2023 and Li et al. 2024 on one-layer attention f(X, z) = h(Xᵀ softmax(XWz)).

    `experiments` are names (default: all). An experiment is compared with published values if no option but the seed
    and the number of trials differs from its default, and there are at least as many trials as in `reproduce claims
    --quick`. Raises UsageError for invalid values and, if interrupted, Interrupted with the finished experiments.
    """
    full = SyntheticRequest(**{"experiments": experiments} | request.explicit())
    rows = [lambda name=name: [EXPERIMENTS[name].run(full.overrides(), quick, progress)] for name in full.chosen]
    return run_rows("converge", rows, full.seed, full.d or WIDTH, progress)


def run_rows(
    command: str, rows: Sequence[Callable[[], list[Experiment]]], seed: int, width: int, progress: Progress = silent
) -> Report:
    """Run and time experiments one by one, and report the results.

    On Ctrl-C, raise Interrupted with the report so far, or KeyboardInterrupt if no experiment is finished.
    """
    completed: list[Experiment] = []
    timings: dict[str, float] = {}
    interrupted = False
    add_steps = start_stage(progress, "experiments", len(rows)) if len(rows) > 1 else lambda _: None
    try:
        for row in rows:
            start = time.perf_counter()
            experiments = row()
            completed += experiments
            share = (time.perf_counter() - start) / max(1, len(experiments))
            timings |= {experiment.name: share for experiment in experiments}
            add_steps(1)
    except KeyboardInterrupt:
        if not completed:
            raise KeyboardInterrupt from None
        interrupted = True
    model = {"id": "one-layer attention (synthetic)", "architecture": "f(X, z) = h(Xᵀ softmax(XWz))"}
    report = assemble_report(
        command,
        "experiments",
        model=ModelInfo(**model, parameters=width**2),
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
    """Train attention by normalised gradient descent to select the tokens that one head of a model selects.

    `head` is (layer, head), or `3.7`. The first experiment trains from zero (K and Q: from small random factors) and
    from the head's own bilinear form M, with steps of length lr · ‖W_mm‖ (K and Q: lr · √‖W_mm‖), where W_mm is the SVM
    that selects the same tokens. The report contains the correlation of W with W_mm, the share of queries that keep
    their selection, and ‖W‖/‖W_mm‖. The second experiment multiplies the head's logits by c, and measures how fast the
    softmax approaches hard selection. Raises ModelError, TextError, and UsageError for invalid options and for a head
    whose problem has no solution.
    """
    checked_name("parameterisation", parameterisation, ("W", "KQ"))
    options = {"lr": lr, "loss": loss, "iterations": iterations, "parameterisation": parameterisation}
    descent = DescentRequest.model_validate(options).explicit()
    layer, number = requests.head(head)
    query = InspectRequest(**request.explicit(), source="tokens", analyzers=(SHOWN,), layers=[layer], heads=[number])
    run = prepare(model, query, progress=progress)
    report, selector, nearness = pose_selection(run)
    location = report.heads[0].layer, number
    start = time.perf_counter()
    hardened = measure_hardening(nearness, selector.scenes(number), selector.softmax[number], location)
    settings = ExperimentSettings(trials=1, seed=run.settings.seed, **descent)
    problem: dict[str, JsonValue] = {
        "posed": WHERE_POSED[selector.spaces[0]],  # on the module's inputs if M is defined on them
        "queries": len(nearness.posed.problem.queries),
        "constraints": len(nearness.posed.problem.margins),
        "least_decided": float(nearness.chosen.log_odds.min().sigmoid()),  # least p_max of a query
    }
    experiments = [
        experiment.model_copy(update={"settings": problem | experiment.settings})
        for experiment in (train_head(nearness, location, settings, progress), hardened)
    ]
    timings = {**report.timings, "converge": time.perf_counter() - start}
    body = {"kind": "experiments", "experiments": experiments, "inspection": InspectionBody()}
    return report.model_copy(update={"command": "converge", **body, "timings": timings})


def pose_selection(run: PreparedRun) -> tuple[Report, Selector, Nearness]:
    """Inspect the head that the run's settings select; return the report, the site's selector and the solved problem.

    Raises UsageError if the head exists in several layers or has no selection problem.
    """
    selectors: list[Selector] = []

    def begin(place: GatheringPlace) -> Gatherer:
        selectors.append(Selector(place))
        return selectors[-1]

    (selection,) = (analyzer for analyzer in select_analyzers([SHOWN]) if isinstance(analyzer, Gathering))
    # reports of experiments list no analyzers in their settings
    settings = run.settings.model_copy(update={"analyzers": [], "select": None})
    inspection = survey(replace(run, settings=settings, analyzers=[replace(selection, begin=begin)]))
    if len(inspection.site_calls) > 1:
        names = join_items(each.site.layer_name for each in inspection.site_calls)
        raise UsageError(f"The head exists in several layers: {names}.", "Write PART.LAYER.HEAD, e.g. decoder.3.7.")
    report, _ = compute(inspection)
    (head,) = settings.heads or (0,)
    nearness = selectors[0].nearness(head) if selectors else "the model does not use this head on this text"
    if isinstance(nearness, str):
        raise UsageError(f"Head {head} has no selection problem: {nearness}.", "Choose another head or text.")
    return report, selectors[0], nearness


FACTORS = tuple(2.0**power for power in range(-4, 7))  # factors c by which the head's logits are multiplied
SMALL = 0.01  # ‖K‖_F/√‖W_mm‖ and ‖Q‖_F/√‖W_mm‖ of the small random initial K and Q; at 0, they have no gradient
NORM = "‖W‖ / ‖W of the SVM‖"  # display name of the norm


def train_head(
    nearness: Nearness, head: tuple[int, int], s: ExperimentSettings, progress: Progress = silent
) -> Experiment:
    """Run gradient descent from zero (K, Q: small random factors) and from the head's M; compare with the SVM W_mm.

    W_mm minimises the Frobenius norm if W is trained, and the nuclear norm if K and Q are trained.
    """
    problem = nearness.posed.problem
    goal = nearness.solution if s.parameterisation == "W" else attsvm.solve_nuclear(problem)
    end = problem.form(goal.multipliers) if goal.W is None else goal.W
    unit = float(end.norm())
    lr = s.lr * (unit if s.parameterisation == "W" else unit**0.5)
    final: dict[str, float | None] = {"efficiency": float(nearness.shares.min()), "gap": goal.gap}
    curves: dict[str, Curve] = {}
    initial = build_starts(nearness, s.parameterisation == "W", unit, s.seed)
    for number, (name, start) in enumerate(initial.items()):

        def tick(done: int, total: int, number: int = number) -> None:
            progress("converge", number * total + done, len(initial) * total)

        steps = [0, *(round(10 ** (eighth / 8)) for eighth in range(64))]  # 0 and eight iterations per decade
        descent = attsvm.descend(
            as_instances(problem), start, s.iterations, lr=lr, loss=s.loss, record=steps, progress=tick
        )
        selected = (descent.chosen == 0).double().mean(-1)[:, 0]
        measured = {
            "correlation": (CORRELATION, descent.correlation(end[None])[:, 0]),
            # W = 0 selects nothing
            "selection kept": ("share of queries", selected.where(descent.norm[:, 0] > 0, torch.nan)),
            "norm": (NORM, descent.norm[:, 0] / unit),
        }
        for picture, (quantity, values) in measured.items():
            curves[f"{picture}, from {name}"] = Curve(
                steps=list(map(float, descent.steps)),
                median=[None if math.isnan(value) else value for value in values.tolist()],
                quantity=quantity,
                bounded=picture != "norm",
                picture=picture,
                label=f"from {name}",
            )
    final |= {name: curve.median[-1] for name, curve in curves.items()}
    final["correlation of the head"] = curves["correlation, from the head"].median[0]
    return Experiment(
        name=f"head {head[0]}.{head[1]}",
        question="Does gradient descent on the head's selection problem converge to the SVM and keep the selection?",
        settings={name: getattr(s, name) for name in ("parameterisation", "loss", "lr", "iterations", "seed")},
        labels={f"norm, from {name}": f"{NORM}, from {name}" for name in initial},
        final=final,
        curves=curves,
    )


def measure_hardening(
    nearness: Nearness, scenes: Sequence[Scene], softmax: Softmax, head: tuple[int, int]
) -> Experiment:
    """Compute KL(hard selection ‖ softmax(c · logits)) = −log p_max over the queries, as a function of c.

    c multiplies the scores after the softcap, and the sink's logit. Copies of a token count as one outcome. In the
    second curve, the head's M is replaced with the SVM that selects the same tokens, scaled to the norm of M on the
    span of the problem. Softcap and sink do not apply to the SVM, which defines only differences between scores.
    """
    odds = {"the head": _head_odds(nearness, scenes, softmax), "its SVM at the same norm": _svm_odds(nearness, scenes)}
    curves = {
        f"KL, {name}": curve(FACTORS, -logsigmoid(each), "KL of hard selection, nats") for name, each in odds.items()
    }
    return Experiment(
        name=f"head {head[0]}.{head[1]}, hardening",
        question="How fast does the head's softmax approach hard selection as its logits are multiplied by c?",
        final={f"{name}, c = 1": curve.median[FACTORS.index(1.0)] for name, curve in curves.items()},
        axis="factor c of the logits",
        curves=curves,
    )


def as_instances(problem: Problem) -> Instances:
    """Convert the problem to one trial of gradient descent: the selected token α comes first; x becomes x − α."""
    n = len(problem.queries)
    counts = torch.bincount(problem.query_of, minlength=n)
    by_query = torch.split(-problem.differences[problem.query_of.argsort(stable=True)], counts.tolist())
    tokens = pad_sequence([pad(each, (0, 0, 1, 0)) for each in by_query], batch_first=True)
    allowed = torch.arange(tokens.shape[1]) <= counts[:, None]
    scores = torch.zeros(1, *allowed.shape, dtype=torch.float64)
    scores[..., 0] = 1
    return Instances(tokens[None], problem.queries[None], torch.ones(1, n).double(), Scores(scores), allowed[None])


def build_starts(nearness: Nearness, as_form: bool, unit: float, seed: int) -> dict[str, BilinearForm | KeyQueryPair]:
    """Return initial W or (K, Q) by name: zero (K, Q: small and random), and the head's M on the problem's span."""
    basis = row_span(nearness.posed.problem.differences)
    left, right = basis @ (basis.mT @ nearness.posed.form.left), nearness.posed.form.right
    if as_form:
        head_form = (left @ right.mT)[None]
        return {"zero": torch.zeros_like(head_form), "the head": head_form}
    generator = torch.Generator().manual_seed(seed)

    def draw(like: Float[Tensor, "d m"]) -> Float[Tensor, "1 d m"]:
        factor = torch.randn(1, *like.shape, generator=generator, dtype=torch.float64)
        small: Tensor = factor * (SMALL * unit**0.5 / float(factor.norm()))
        return small

    return {"small random factors": (draw(left), draw(right)), "the head": (left[None], right[None])}


def _head_odds(nearness: Nearness, scenes: Sequence[Scene], softmax: Softmax) -> Float[Tensor, "factors queries"]:
    """Compute log(p_max/(1 − p_max)) of every query of the problem under softmax(c · logits), for each c in FACTORS."""
    columns = []
    for query, (number, position, _) in zip(nearness.posed.problem.queries, nearness.chosen.rows, strict=True):
        scene, odds = scenes[number], []
        scores, copies = nearness.posed.form.scores(scene.tokens, query[None]), scene.log_copies[[position]]
        masked, logits = scores.masked_fill(copies == -torch.inf, -torch.inf), softmax.cap_scores(scores)
        for factor in FACTORS:
            sink = None if softmax.sink is None else factor * softmax.sink
            odds.append(log_odds(masked, factor * logits + copies, Softmax(sink=sink)))
        columns.append(torch.cat(odds))
    return torch.stack(columns, -1)


def _svm_odds(nearness: Nearness, scenes: Sequence[Scene]) -> Float[Tensor, "factors queries"]:
    """Compute log(p_max/(1 − p_max)) of every query under the SVM's scores times c, for each c in FACTORS."""
    problem = nearness.posed.problem
    best = problem.form(nearness.solution.multipliers)
    gaps = problem.scores(best) * (nearness.norm / float(best.norm()))
    columns = []
    for row, (number, position, selected) in enumerate(nearness.chosen.rows):
        of_query, copies = problem.query_of == row, scenes[number].log_copies[position]
        more = copies[nearness.posed.token_of[of_query]] - copies[int(selected.int().argmax())]
        columns.append(-torch.stack([(more - factor * gaps[of_query]).logsumexp(0) for factor in FACTORS]))
    return torch.stack(columns, -1)


WIDTH = 10  # dimension d of the tokens in the paper's experiments
Row = Callable[[bool, int, Progress], list[Experiment]]  # (quick, seed, progress) → finished experiments
ROWS: list[Row] = [  # Functions that `reproduce claims` runs, in this order; to check another claim, add a function
    lambda _quick, _seed, _progress: [golden()],  # fast, so quick changes nothing
    *(
        lambda quick, seed, progress, study=study: [study.run({"seed": seed}, quick, progress)]
        for study in EXPERIMENTS.values()
    ),
    binary_kernel,
    lambda _quick, seed, progress: [ksvd_identities(seed, progress)],  # fast, too
    lambda quick, _seed, progress: [depth_decay(quick, progress)],  # no verdict: Figure 1 shows another model
    lambda quick, seed, progress: [] if quick else [primal_decay(seed, progress)],  # no verdict; takes over a minute
]


def rerun_claims(seed: int, *, quick: bool, progress: Progress = silent) -> Report:
    """Run the papers' small experiments (if `quick`, all but the longest), and return the report of `run_rows`."""
    report = run_rows("reproduce", [partial(row, quick, seed, progress) for row in ROWS], seed, WIDTH, progress)
    left_out = [Skipped(site="decay by training", reason="training takes too long for a quick run")] if quick else []
    return report.model_copy(update={"coverage": report.coverage.model_copy(update={"skipped": left_out})})
