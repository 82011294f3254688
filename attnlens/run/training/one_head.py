"""Gradient descent on one head's own selection problem, from zero and from its weights."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Unpack

import torch
from pydantic import JsonValue

from attnlens import attsvm, models, requests, texts
from attnlens.analyzers.selection import Selector
from attnlens.arguments import public
from attnlens.attsvm.head import Softmax, log_odds
from attnlens.attsvm.instances import Instances, Scores
from attnlens.attsvm.nearness import Nearness, span
from attnlens.choices import SHOWN, WHERE_POSED, Space
from attnlens.errors import UsageError
from attnlens.experiments.figures import CORRELATION
from attnlens.experiments.settings import ExperimentSettings
from attnlens.records import Curve, Experiment, Report, Settings
from attnlens.registry import Gatherer, Gathering, GatheringPlace, analyzers, checked_name
from attnlens.requests import reading
from attnlens.requests.training import DescentRequest
from attnlens.run import feeding
from attnlens.run.inspect.collector import Collector
from attnlens.run.inspect.survey import Inspection
from attnlens.run.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float
    from torch import Tensor

    from attnlens.attsvm.descent import BilinearForm, Descent, KeyQueryPair
    from attnlens.attsvm.head import Scene
    from attnlens.attsvm.problem import Problem

FACTORS = tuple(2.0**power for power in range(-4, 7))
"""c, by which the head's logits are multiplied."""
SMALL = 0.01
"""‖K‖_F and ‖Q‖_F of the small random start, against the square root of ‖W_mm‖: at zero, K and Q have no gradient."""
ITERATIONS = 2000
PARAMETERISATIONS = ("W", "KQ")
NORM = "‖W‖ / ‖W_mm‖"
"""How the norm is written."""
SETTINGS = ("parameterisation", "loss", "lr", "iterations", "seed")


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
    named = texts.read_each(reading.files(given))
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


def trained(found: Nearness, head: tuple[int, int], s: ExperimentSettings, progress: Progress = silent) -> Experiment:
    """Descent from zero (K, Q: from small random factors) and from the head's own M, against the SVM of its selection.

    `correlation` is ⟨W, W_mm⟩/(‖W‖‖W_mm‖), with the Frobenius SVM for W and the nuclear one for (K, Q).
    """
    problem = found.posed.problem
    goal = found.solution if s.parameterisation == "W" else attsvm.solve_nuclear(problem)
    end = problem.form(goal.multipliers) if goal.W is None else goal.W
    unit = float(end.norm())
    lr = s.lr * (unit if s.parameterisation == "W" else unit**0.5)
    final: dict[str, float | None] = {"efficiency": float(found.shares.min()), "gap": goal.gap}
    curves: dict[str, Curve] = {}
    begun = starts(found, s.parameterisation == "W", unit, s.seed)
    for number, (name, start) in enumerate(begun.items()):
        told = partial(_told, progress, number, len(begun))
        descent = attsvm.descend(
            as_instances(problem),
            start,
            s.iterations,
            lr=lr,
            loss=s.loss,
            record=read_at(s.iterations),
            progress=told,
        )
        read = _read(descent, end, unit, f"from {name}")
        curves |= read
        final |= {what: curve.median[-1] for what, curve in read.items()}
    final["correlation of the head"] = curves["correlation, from the head"].median[0]
    return Experiment(
        name=f"head {head[0]}.{head[1]}",
        question="Does gradient descent on the head's own selection problem end at its SVM, and keep its selection?",
        settings=size_of(found) | {name: getattr(s, name) for name in SETTINGS},
        labels={f"norm, from {name}": f"{NORM}, from {name}" for name in begun},
        final=final,
        curves=curves,
    )


def size_of(found: Nearness) -> dict[str, JsonValue]:
    """How large a head's problem is, and how decided its least decided query."""
    return {
        "queries": len(found.posed.problem.queries),
        "constraints": len(found.posed.problem.margins),
        "least_decided": float(found.chosen.log_odds.min().sigmoid()),
    }


def read_at(iterations: int) -> list[int]:
    """The start, and eight iterations a decade."""
    return [0, *sorted({round(10 ** (eighth / 8)) for eighth in range(64) if 10 ** (eighth / 8) < iterations})]


def hardening(found: Nearness, scenes: Sequence[Scene], softmax: Softmax, head: tuple[int, int]) -> Experiment:
    """KL(one-hot of the largest ‖ softmax(c · logits)) = −log p_max of the posed queries, against c.

    Logits are what the softmax sees, so that c multiplies the scores behind the softcap, and the sink's logit too;
    copies of a token are one outcome. At c = 1 it is the head's own p_max. Beside the head stands the SVM that selects
    the same tokens, at the head's own norm ‖ΠM‖, with the same copies, and without softcap and sink: it knows
    differences of scores alone, and those two need the scores themselves.
    """
    odds = {
        "the head": _own_odds(found, scenes, softmax),
        "its SVM at the same norm": _svm_odds(found, scenes),
    }
    curves = {f"KL, {name}": _hardened(each) for name, each in odds.items()}
    return Experiment(
        name=f"head {head[0]}.{head[1]}, hardening",
        question="How fast does the head's softmax become a selection when its logits are multiplied by c?",
        settings=size_of(found),
        final={f"{name}, c = 1": curve.median[FACTORS.index(1.0)] for name, curve in curves.items()},
        axis="factor c",
        curves=curves,
    )


def as_instances(problem: Problem) -> Instances:
    """The problem as one trial of gradient descent: softmax sees differences alone, so that α is 0 and t is −u.

    α has score 1 and the others 0: f = s_α, which training raises.
    """
    counts = torch.bincount(problem.query_of, minlength=len(problem.queries))
    width = 1 + int(counts.max())
    n, d = len(problem.queries), problem.differences.shape[1]
    tokens = torch.zeros(n, width, d, dtype=torch.float64)
    allowed = torch.zeros(n, width, dtype=torch.bool)
    allowed[:, 0] = True
    order = problem.query_of.argsort(stable=True)
    place = torch.cat([torch.arange(1, int(count) + 1) for count in counts])
    tokens[problem.query_of[order], place] = -problem.differences[order]
    allowed[problem.query_of[order], place] = True
    scores = torch.zeros(1, n, width, dtype=torch.float64)
    scores[..., 0] = 1
    return Instances(tokens[None], problem.queries[None], torch.ones(1, n).double(), Scores(scores), allowed[None])


def starts(found: Nearness, as_form: bool, unit: float, seed: int) -> dict[str, BilinearForm | KeyQueryPair]:
    """Where training begins: nowhere, and at the head, ΠM: what lies outside the problem's span never moves."""
    basis = span(found.posed.problem.differences)
    left, right = basis @ (basis.mT @ found.posed.form.left), found.posed.form.right
    if as_form:
        own = (left @ right.mT)[None]
        return {"zero": torch.zeros_like(own), "the head": own}
    generator = torch.Generator().manual_seed(seed)

    def drawn(like: Float[Tensor, "d m"]) -> Float[Tensor, "1 d m"]:
        factor = torch.randn(like.shape, generator=generator, dtype=torch.float64)
        small: Tensor = SMALL * unit**0.5 * factor / factor.norm()
        return small[None]

    return {"small random factors": (drawn(left), drawn(right)), "the head": (left[None], right[None])}


def _told(progress: Progress, number: int, several: int, done: int, total: int) -> None:
    progress("converge", number * total + done, several * total)


def _read(descent: Descent, goal: Tensor, unit: float, start: str) -> dict[str, Curve]:
    """Correlation, selections kept and norm along one descent."""
    steps = [float(step) for step in descent.steps]

    def curve(picture: str, quantity: str, values: Tensor, bounded: bool = True) -> Curve:
        median = [None if value != value else value for value in values.tolist()]
        return Curve(steps=steps, median=median, quantity=quantity, bounded=bounded, picture=picture, label=start)

    kept = (descent.chosen == 0).double().mean(-1)[:, 0]
    kept = kept.where(descent.norm[:, 0] > 0, torch.nan)  # W = 0 selects nothing
    read = (
        curve("correlation", CORRELATION, descent.correlation(goal[None])[:, 0]),
        curve("selection kept", "share of queries", kept),
        curve("norm", NORM, descent.norm[:, 0] / unit, bounded=False),
    )
    return {f"{found.picture}, {start}": found for found in read}


def _own_odds(found: Nearness, scenes: Sequence[Scene], softmax: Softmax) -> Float[Tensor, "factors queries"]:
    """log p_max/(1 − p_max) of every posed query under softmax(c · logits)."""
    columns = []
    for query, (number, position, _) in zip(found.posed.problem.queries, found.chosen.rows, strict=True):
        scene = scenes[number]
        scores, copies = found.posed.form.scores(scene.tokens, query[None]), scene.log_copies[[position]]
        masked, logits = scores.masked_fill(copies == -torch.inf, -torch.inf), softmax.capped(scores)
        sinks = [None if softmax.sink is None else factor * softmax.sink for factor in FACTORS]
        odds = [
            log_odds(masked, factor * logits + copies, Softmax(sink=sink))
            for factor, sink in zip(FACTORS, sinks, strict=True)
        ]
        columns.append(torch.cat(odds))
    return torch.stack(columns, -1)


def _svm_odds(found: Nearness, scenes: Sequence[Scene]) -> Float[Tensor, "factors queries"]:
    """The same of the SVM's scores, which are differences to the selected token's."""
    problem = found.posed.problem
    best = problem.form(found.solution.multipliers)
    gaps = problem.scores(best) * (found.norm / float(best.norm()))
    columns = []
    for row, (number, position, kept) in enumerate(found.chosen.rows):
        own, copies = problem.query_of == row, scenes[number].log_copies[position]
        more = copies[found.posed.token_of[own]] - copies[int(kept.int().argmax())]
        columns.append(-torch.stack([(more - factor * gaps[own]).logsumexp(0) for factor in FACTORS]))
    return torch.stack(columns, -1)


def _hardened(odds: Float[Tensor, "factors queries"]) -> Curve:
    """−log p of the selected token, over queries, for every c."""
    divergence = -torch.nn.functional.logsigmoid(odds)
    thirds = divergence.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64), dim=-1)
    low, median, high = (column.tolist() for column in thirds)
    return Curve(steps=list(FACTORS), median=median, low=low, high=high, quantity="KL, nats")
