"""Experiments in which several tokens can keep attention weight: ReLU heads, and next-token prediction."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from pydantic import JsonValue

from attnlens.errors import UnposedError, UsageError
from attnlens.lab.experiments.tokens import (
    CORRELATION,
    ExperimentSettings,
    Figure,
    Study,
    average_trials,
    columns,
    curve,
    descend_trials,
    grid,
)
from attnlens.maths import attsvm
from attnlens.maths.attsvm.descent import Descent, Instances, Scores, gradient, unit
from attnlens.records.studies import Experiment
from attnlens.runs.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Bool, Float
    from torch import Tensor

GONE, KEPT = 1e-6, 1e-3  # as in the paper, a token is dropped if its weight is ≤ GONE, kept if it is > KEPT
DIRECTIONS: dict[str, tuple[str, dict[int, float]]] = {
    "svm_equivalent": ("SVM equivalent", {4: 0.034, 6: 0.017, 8: 0.011, 10: 0.0056}),
    "W_mm": ("W_mm", {4: 0.07, 6: 0.043, 8: 0.015, 10: 0.0087}),
    "single_token": ("single token", {}),
}
"""Display name of each direction and, for each d, the published mean of 1 − (correlation of W with the direction)."""
FLOOR = 2.2e-16  # added to ‖∇‖ as in the published code: training then stops once the gradient vanishes
READING = 0.3  # relative error of values read off a logarithmic axis; the tolerance adds three standard errors


@partial(
    Study,
    "multi-token",
    full=ExperimentSettings(trials=1000, n=3, T=4, d=(4, 6, 8, 10), head="relu", iterations=2001),
    quick={"trials": 150, "d": (4, 6)},
    source="Tarzanagh et al. 2023, section 5, read off a logarithmic figure: means over 500 accepted runs",
)
def multi_token(s: ExperimentSettings, progress: Progress) -> Experiment:
    """Compare the trained W with three directions: W_fin + R·W_mm, W_mm, and the single-token SVM.

    The figures are the means of 1 − correlation over accepted instances, for each d. W_mm is the SVM that separates
    kept from dropped tokens, W_fin fits the ratios of the kept tokens' weights, and R is fitted by least squares. An
    instance is accepted if it has a label −1, no weight in (GONE, KEPT], a weight ≤ GONE, and solvable SVMs.
    """
    rows, shares = dict[str, Figure](), dict[str, JsonValue]()
    measured = torch.full((len(s.d), s.trials, len(DIRECTIONS)), torch.nan, dtype=torch.float64)  # 1 − correlation
    for row, d in enumerate(s.d):
        draws, descent = descend_trials(s, d, "multi-token", progress, FLOOR)
        weights = descent.log_weights.exp().flatten(1)
        between, dropped = ((weights > GONE) & (weights <= KEPT)).any(-1), (weights <= GONE).any(-1)
        trials = ((draws.instances.labels < 0).any(-1) & ~between & dropped).nonzero().flatten().tolist()
        compared = (_compare_directions(draws.instances, descent, trial) for trial in trials)
        accepted = [each for each in compared if each is not None]
        shares[f"accepted_d{d}"] = len(accepted) / s.trials
        if accepted:
            measured[row, : len(accepted)] = torch.tensor(accepted, dtype=torch.float64)
        for column, (name, (label, published)) in enumerate(DIRECTIONS.items()):
            figure = average_trials(measured[row, :, column], f"{label}, d = {d}")
            if d in published:
                tolerance = READING * published[d] + 3 * (figure.error or 0.0)
                figure = replace(figure, published=published[d], tolerance=tolerance)
            rows[f"{name}_d{d}"] = figure
    curves = {
        name.replace("_", " "): curve(s.d, measured[..., column], "1 − correlation", label=label)
        for column, (name, (label, _)) in enumerate(DIRECTIONS.items())
    }
    return Experiment(
        name="multi-token",
        question="If several tokens keep attention weight, does descent converge to the direction of W_fin + R·W_mm?",
        settings={"gone": GONE, "kept": KEPT, "floor": FLOOR, "hidden_units": "d", **shares},
        axis="d",
        curves=curves,
        **columns(rows, "no instance passed the filter", {f"accepted_d{d}": f"accepted, d = {d}" for d in s.d}),
    )


def _compare_directions(instances: Instances, descent: Descent, trial: int) -> list[float] | None:
    """Compute 1 − (correlation of the trained W with each of DIRECTIONS); None if an SVM or W_fin has no solution."""
    tokens, queries, W = instances.tokens[trial], instances.queries[trial], descent.W[-1, trial]
    weights = descent.log_weights[trial].exp()
    several = attsvm.solve(attsvm.selection_sets(tokens, queries, weights > KEPT)).W
    single = attsvm.solve(attsvm.selection(tokens, queries, descent.chosen[-1, trial])).W
    try:
        # None if the log-ratios contradict each other
        finite = attsvm.solve(attsvm.finite_part(tokens, queries, weights, weights > KEPT)).W
    except UnposedError:  # every input keeps one token
        finite = torch.zeros_like(W)
    if several is None or single is None or finite is None:
        return None
    R = float(((W - finite) * several).sum() / several.square().sum())
    return [
        1 - float((W * direction).sum() / (W.norm() * direction.norm()))
        for direction in (finite + R * several, several, single)
    ]


TRIES = 200  # random corpora drawn per trial before giving up
SAME = 1e-9  # tokens closer than this outside the cyclic subspace share a graph component; smaller σ/σ₁ count as 0


class Corpus(NamedTuple):
    """Sequences as features φ_t = vec(x_t zᵀ), z the last token, with parts outside and inside the cyclic subspace."""

    features: Float[Tensor, "n T twice"]  # both parts, concatenated: outside, inside
    reads: Float[Tensor, "n T"]  # e_yᵀ x_t: 1 for tokens equal to the label, 0 for others
    component: Bool[Tensor, "n T"]  # True if the token is in the label's strongly connected component of the graph
    W: Float[Tensor, " square"]  # SVM solution of the graph


@partial(
    Study,
    "next-token",
    full=ExperimentSettings(trials=50, n=6, T=4, d=(8,), lr=0.1, iterations=3000),
    quick={"trials": 10},
)
def next_token(s: ExperimentSettings, progress: Progress) -> Experiment:
    """Compare W with the graph SVM outside the cyclic subspace, and with W_fin inside (Li et al. 2024).

    There are d tokens with orthonormal embeddings and n sequences of T tokens that contain their label y. The output is
    f = e_yᵀ Xᵀ softmax(X W z), where z is the last token, and the loss −log f is convex. The cyclic subspace is spanned
    by (x_s − x_t) zᵀ, for tokens s and t in a common cycle of the graph. Steps have length lr outside this subspace;
    inside, where W stays finite, a step is minus the gradient. W_fin is the limit of descent if attention is restricted
    to the label's component of the graph.
    """
    acyclic, _, steps, at_end = _run_trials(s, False, progress)
    cyclic, off, _, cyclic_end = _run_trials(s, True, progress)
    # limits of the theorems, with the tolerance allowed at the last iteration
    to_svm, finite = Figure(published=1.0, tolerance=1e-3), Figure(published=0.0, tolerance=1e-9)
    rows = {
        "acyclic_to_svm": average_trials(acyclic[-1], "acyclic to SVM", to_svm),
        "cyclic_to_svm": average_trials(cyclic[-1], "cyclic to SVM", to_svm),
        "cyclic_finite_distance": average_trials(off[-1], known=finite),
        "acyclic_label_weight": average_trials(at_end),
        "cyclic_component_weight": average_trials(cyclic_end),
    }
    return Experiment(
        name="next-token",
        question="Does attention trained on next-token prediction converge to the SVM of the token-priority graph?",
        settings={"vocabulary": s.d[0], "loss": "log", "embeddings": "orthonormal, tied", "start": "zero"},
        source="Li et al. 2024, Mechanics of next token prediction with self-attention: the limits of Theorems 1 and 2",
        curves={
            "acyclic, to the graph SVM": curve(steps, acyclic, CORRELATION, bounded=True),
            "cyclic, to the graph SVM": curve(steps, cyclic, CORRELATION, bounded=True),
            "cyclic, finite part": curve(steps, off, "distance", picture="cyclic, finite part"),
        },
        **columns(rows),
    )


def _run_trials(s: ExperimentSettings, cyclic: bool, progress: Progress) -> tuple[Tensor, Tensor, list[int], Tensor]:
    """Run all trials of `next_token`, with cyclic or acyclic graphs.

    Return the correlation of W outside the cyclic subspace with the graph SVM, and the distance of W inside the
    subspace from its limit, both (steps, trials); the steps; and each trial's smallest final sum of attention weights
    on the graph component of a label.
    """
    corpora = [corpus(s.n, s.T, s.d[0], s.seed + trial, cyclic) for trial in range(s.trials)]
    features, reads, inside, W = (torch.stack(column) for column in zip(*corpora, strict=True))
    trials, n = features.shape[:2]
    ones = torch.ones(trials, n, 1, dtype=torch.float64)
    instances = Instances(features, ones, ones.squeeze(-1), Scores(reads))
    stage = f"next-token, {'cyclic' if cyclic else 'acyclic'}"
    steps = grid(s.iterations)
    path, log_weights = _descend_both(instances, s, steps, partial(progress, stage))
    off, within = path.chunk(2, dim=-1)
    restricted = replace(instances, allowed=inside)
    limits, _ = _descend_both(restricted, s, [s.iterations], partial(progress, f"{stage}, finite part"))
    distances = (within - limits[-1].chunk(2, -1)[1]).norm(dim=-1)
    weight = (log_weights.exp() * inside).sum(-1).amin(-1)
    return (off * W).sum(-1) / (off.norm(dim=-1) * W.norm(dim=-1)), distances, steps, weight


def _descend_both(
    instances: Instances, s: ExperimentSettings, steps: list[int], tick: Callable[[int, int], None]
) -> tuple[Float[Tensor, "steps trials twice"], Float[Tensor, "trials n T"]]:
    """Run descent, normalised only outside the cyclic subspace; return W at `steps`, and the final log-weights."""
    W = torch.zeros(len(instances.tokens), instances.tokens.shape[-1], 1, dtype=torch.float64)
    best, path = instances.anchor_first(), []
    for step in range(1, s.iterations + 1):
        best, gaps = instances.gaps(W, best)
        direction, scale = gradient(instances, best, gaps.log_softmax(-1), "log")
        off, within = direction.chunk(2, dim=1)
        W = W - torch.cat([s.lr * unit(off, torch.zeros_like(scale)), within * scale.exp()[:, None, None]], dim=1)
        if step in steps:
            path.append(W.squeeze(-1))
        tick(step, s.iterations)
    return torch.stack(path), instances.gaps(W, best)[1].log_softmax(-1)


def corpus(n: int, T: int, d: int, seed: int, cyclic: bool) -> Corpus:
    """Sample sequences whose token-priority graph has a strict priority, an SVM solution and, if `cyclic`, a cycle.

    Without `cyclic`, the graph has no cycle. Raises UsageError if none of TRIES samples has such a graph.
    """
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64)).Q
    for _ in range(TRIES):
        inputs = torch.randint(d, (n, T), generator=generator)
        order = torch.rand(d, d, generator=generator)
        first = order[inputs[:, -1:], inputs].argmax(-1)
        place = torch.randint(T, (n,), generator=generator) if cyclic else first
        labels = inputs.gather(-1, place[:, None])
        try:
            problem = attsvm.next_token(torch.cat([inputs, labels], 1).tolist(), embeddings)
        except UnposedError:
            continue
        W = attsvm.solve(problem).W
        if W is not None and not problem.equal.all() and bool(problem.equal.any()) == cyclic:
            break
    else:
        wanted = f"{'a cyclic' if cyclic else 'an acyclic'} token-priority graph with an SVM solution"
        remedy = "Choose a larger d, or more or longer sequences."
        raise UsageError(f"None of {TRIES} random corpora has {wanted}.", remedy)
    tokens, hits = embeddings[inputs], inputs == labels
    features = (tokens[..., :, None] * tokens[:, -1:, None, :]).flatten(2)
    ties = torch.einsum("ka,kb->kab", problem.differences, problem.paired_queries)[problem.equal].flatten(1)
    _, values, basis = torch.linalg.svd(ties, full_matrices=False)
    basis = basis[values > SAME * values.amax()] if len(values) else basis
    within = features @ basis.mT @ basis
    off = features - within
    # Make tokens of a component equal outside the cyclic subspace, where they differ only by rounding. Otherwise the
    # rounding would outweigh attention weights below 1e-16.
    same = torch.cdist(off, off) < SAME
    off = off.gather(1, same.int().argmax(-1)[..., None].expand_as(off))
    component = same[torch.arange(len(hits)), hits.int().argmax(-1)]
    return Corpus(torch.cat([off, within], -1), hits.double(), component, W.flatten())
