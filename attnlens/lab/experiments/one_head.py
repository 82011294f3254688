"""Gradient descent on the selection problem of one head, and hardening of its softmax, compared with the SVM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from pydantic import JsonValue
from torch.nn.utils.rnn import pad_sequence

from attnlens.lab.experiments.settings import CORRELATION, ExperimentSettings, curve
from attnlens.maths import attsvm
from attnlens.maths.attsvm.descent import Instances, Scores
from attnlens.maths.attsvm.head import Nearness, Softmax, log_odds, row_span
from attnlens.records.studies import Curve, Experiment
from attnlens.runs.progress import Progress, silent

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from attnlens.maths.attsvm.descent import BilinearForm, Descent, KeyQueryPair
    from attnlens.maths.attsvm.head import Scene
    from attnlens.maths.attsvm.problem import Problem

FACTORS = tuple(2.0**power for power in range(-4, 7))  # factors c by which the head's logits are multiplied
SMALL = 0.01  # ‖K‖_F and ‖Q‖_F of the small random start over √‖W_mm‖; at exactly zero, K and Q have no gradient
NORM = "‖W‖ / ‖W_mm‖"  # display name of the norm
SHOWN = ("parameterisation", "loss", "lr", "iterations", "seed")  # settings in the record


def train_head(
    nearness: Nearness, head: tuple[int, int], s: ExperimentSettings, progress: Progress = silent
) -> Experiment:
    """Descend from zero (K, Q: small random factors) and from the head's M; compare with the SVM of its selection.

    `correlation` is ⟨W, W_mm⟩/(‖W‖‖W_mm‖), with the Frobenius SVM for W and the nuclear one for (K, Q).
    """
    problem = nearness.posed.problem
    goal = nearness.solution if s.parameterisation == "W" else attsvm.solve_nuclear(problem)
    end = problem.form(goal.multipliers) if goal.W is None else goal.W
    unit = float(end.norm())
    lr = s.lr * (unit if s.parameterisation == "W" else unit**0.5)
    final: dict[str, float | None] = {"efficiency": float(nearness.shares.min()), "gap": goal.gap}
    curves: dict[str, Curve] = {}
    initial = starts(nearness, s.parameterisation == "W", unit, s.seed)
    for number, (name, start) in enumerate(initial.items()):

        def tick(done: int, total: int, number: int = number) -> None:
            progress("converge", number * total + done, len(initial) * total)

        steps = [0, *(round(10 ** (eighth / 8)) for eighth in range(64))]  # 0 and eight iterations per decade
        descent = attsvm.descend(
            as_instances(problem), start, s.iterations, lr=lr, loss=s.loss, record=steps, progress=tick
        )
        measured = _measure_descent(descent, end, unit, f"from {name}")
        curves |= measured
        final |= {what: curve.median[-1] for what, curve in measured.items()}
    final["correlation of the head"] = curves["correlation, from the head"].median[0]
    return Experiment(
        name=f"head {head[0]}.{head[1]}",
        question="Does gradient descent on the head's selection problem converge to its SVM, and keep its selection?",
        settings=size_of(nearness) | {name: getattr(s, name) for name in SHOWN},
        labels={f"norm, from {name}": f"{NORM}, from {name}" for name in initial},
        final=final,
        curves=curves,
    )


def size_of(nearness: Nearness) -> dict[str, JsonValue]:
    """Return the size of a head's problem and the softmax weight of its least decided query."""
    return {
        "queries": len(nearness.posed.problem.queries),
        "constraints": len(nearness.posed.problem.margins),
        "least_decided": float(nearness.chosen.log_odds.min().sigmoid()),
    }


def hardening(nearness: Nearness, scenes: Sequence[Scene], softmax: Softmax, head: tuple[int, int]) -> Experiment:
    """Compute KL(one-hot of the largest ‖ softmax(c · logits)) = −log p_max of the posed queries as a function of c.

    c multiplies the scores after the softcap and also the sink's logit. Copies of a token count as one outcome. The SVM
    that selects the same tokens is shown too, at the head's own norm ‖ΠM‖ and with the same copies; it has no softcap
    and no sink, which need the scores themselves, while the SVM defines only their differences.
    """
    odds = {"the head": _head_odds(nearness, scenes, softmax), "its SVM at the same norm": _svm_odds(nearness, scenes)}
    log_p = torch.nn.functional.logsigmoid
    curves = {f"KL, {name}": curve(FACTORS, -log_p(each), "KL, nats") for name, each in odds.items()}
    return Experiment(
        name=f"head {head[0]}.{head[1]}, hardening",
        question="How fast does the head's softmax approach hard selection as its logits are multiplied by c?",
        settings=size_of(nearness),
        final={f"{name}, c = 1": curve.median[FACTORS.index(1.0)] for name, curve in curves.items()},
        axis="factor c",
        curves=curves,
    )


def as_instances(problem: Problem) -> Instances:
    """Convert the problem to one trial of gradient descent. Softmax depends on differences only: α is 0 and t is −u.

    α has score 1 and the others 0, so f = s_α, which training increases.
    """
    n = len(problem.queries)
    counts = torch.bincount(problem.query_of, minlength=n)
    by_query = torch.split(-problem.differences[problem.query_of.argsort(stable=True)], counts.tolist())
    tokens = pad_sequence([torch.nn.functional.pad(each, (0, 0, 1, 0)) for each in by_query], batch_first=True)
    allowed = torch.arange(tokens.shape[1]) <= counts[:, None]
    scores = torch.zeros(1, *allowed.shape, dtype=torch.float64)
    scores[..., 0] = 1
    return Instances(tokens[None], problem.queries[None], torch.ones(1, n).double(), Scores(scores), allowed[None])


def starts(nearness: Nearness, as_form: bool, unit: float, seed: int) -> dict[str, BilinearForm | KeyQueryPair]:
    """Return the initial W or (K, Q): zero or small, and the head's ΠM: parts outside the problem's span never move."""
    basis = row_span(nearness.posed.problem.differences)
    left, right = basis @ (basis.mT @ nearness.posed.form.left), nearness.posed.form.right
    if as_form:
        head_form = (left @ right.mT)[None]
        return {"zero": torch.zeros_like(head_form), "the head": head_form}
    generator = torch.Generator().manual_seed(seed)

    def draw(like: Float[Tensor, "d m"]) -> Float[Tensor, "1 d m"]:
        factor = torch.randn(like.shape, generator=generator, dtype=torch.float64)
        small: Tensor = SMALL * unit**0.5 * factor / factor.norm()
        return small[None]

    return {"small random factors": (draw(left), draw(right)), "the head": (left[None], right[None])}


def _measure_descent(descent: Descent, goal: Tensor, unit: float, start: str) -> dict[str, Curve]:
    """Compute correlation, selections kept and norm along one descent."""
    steps = [float(step) for step in descent.steps]

    def along(picture: str, quantity: str, values: Tensor, bounded: bool = True) -> Curve:
        median = [None if value != value else value for value in values.tolist()]
        return Curve(steps=steps, median=median, quantity=quantity, bounded=bounded, picture=picture, label=start)

    share_kept = (descent.chosen == 0).double().mean(-1)[:, 0]
    share_kept = share_kept.where(descent.norm[:, 0] > 0, torch.nan)  # W = 0 selects nothing
    curves = (
        along("correlation", CORRELATION, descent.correlation(goal[None])[:, 0]),
        along("selection kept", "share of queries", share_kept),
        along("norm", NORM, descent.norm[:, 0] / unit, bounded=False),
    )
    return {f"{curve.picture}, {start}": curve for curve in curves}


def _head_odds(nearness: Nearness, scenes: Sequence[Scene], softmax: Softmax) -> Float[Tensor, "factors queries"]:
    """Compute log p_max/(1 − p_max) of every posed query under softmax(c · logits)."""
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
    """Compute log p_max/(1 − p_max) for the SVM, whose scores are differences to the selected token's score."""
    problem = nearness.posed.problem
    best = problem.form(nearness.solution.multipliers)
    gaps = problem.scores(best) * (nearness.norm / float(best.norm()))
    columns = []
    for row, (number, position, selected) in enumerate(nearness.chosen.rows):
        of_query, copies = problem.query_of == row, scenes[number].log_copies[position]
        more = copies[nearness.posed.token_of[of_query]] - copies[int(selected.int().argmax())]
        columns.append(-torch.stack([(more - factor * gaps[of_query]).logsumexp(0) for factor in FACTORS]))
    return torch.stack(columns, -1)
