"""Convergence under next-token prediction: the SVM of the token-priority graph plus a finite part."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from attnlens import attsvm
from attnlens.attsvm.descent import gradient, unit
from attnlens.attsvm.instances import Instances, Scores
from attnlens.errors import UnposedError, UsageError
from attnlens.experiments.figures import CORRELATION, Published, averaged, columns, curve
from attnlens.experiments.settings import ExperimentSettings, Progress, Study, uses
from attnlens.experiments.synthetic.data import grid
from attnlens.records.experiments import Experiment

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Bool, Float
    from torch import Tensor

TRIES = 200
"""Random corpora drawn for one that poses a problem, before the sizes are refused."""
SAME = 1e-9
"""Tokens nearer than this off the cyclic subspace are of one component; others are ≥ 1/√d apart."""


class Corpus(NamedTuple):
    """Sequences as features φ_t = vec(x_t zᵀ), each split into its part off and in the cyclic subspace."""

    features: Float[Tensor, "n T twice"]
    """[off, in]."""
    reads: Float[Tensor, "n T"]
    """c_yᵀ x_t: 1 at the label's copies, 0 elsewhere."""
    component: Bool[Tensor, "n T"]
    """Whether a token is in the label's strongly connected component."""
    W: Float[Tensor, " square"]
    """The graph's SVM."""


TO_SVM: Published = {"published": 1.0, "tolerance": 1e-3}
FINITE: Published = {"published": 0.0, "tolerance": 1e-9}
"""The theorems' limits, and how near them the last iteration must be."""


def next_token(settings: ExperimentSettings, published: bool, progress: Progress) -> Experiment:
    """Correlation of W's part off the cyclic subspace to the graph SVM, and ‖W_cyc − W_fin‖ (Li et al. 2024).

    d tokens with orthonormal embeddings E; n sequences of T tokens that hold their label y; f = e_yᵀ Xᵀ softmax(X W z),
    z the last token, loss −log f: convex, so that descent is global. Off the cyclic subspace a step has length lr, in
    it descent is plain with rate 1: there W stays finite, where steps of one length would never come to rest. W_fin is
    what the loss alone makes of each label's own component. Acyclic: the label is the first of the sequence's tokens in
    an order of its last token's own. No number was published, but a limit: correlation 1, distance 0.
    """
    acyclic, _, steps, at_end = _kind(settings, False, progress)
    cyclic, off, _, cyclic_end = _kind(settings, True, progress)
    to_svm, finite = (TO_SVM, FINITE) if published else (Published(), Published())
    rows = {
        "acyclic_to_svm": averaged(acyclic[-1], "acyclic to SVM", **to_svm),
        "cyclic_to_svm": averaged(cyclic[-1], "cyclic to SVM", **to_svm),
        "cyclic_finite_distance": averaged(off[-1], **finite),
        "acyclic_label_weight": averaged(at_end),
        "cyclic_component_weight": averaged(cyclic_end),
    }
    return Experiment(
        name="next-token",
        question="Trained to predict the next token, does attention end at the SVM of the token-priority graph?",
        settings={"vocabulary": settings.d[0], "loss": "log", "embeddings": "orthonormal, tied", "start": "zero"},
        source="Li et al. 2024, Mechanics of next token prediction with self-attention: the limits of Theorems 1 and 2",
        curves={
            "acyclic, to the graph SVM": curve(steps, acyclic, CORRELATION, bounded=True),
            "cyclic, to the graph SVM": curve(steps, cyclic, CORRELATION, bounded=True),
            "cyclic, finite part": curve(steps, off, "distance", picture="cyclic, finite part"),
        },
        **columns(rows),
    )


def _kind(s: ExperimentSettings, cyclic: bool, progress: Progress) -> tuple[Tensor, Tensor, list[int], Tensor]:
    """(correlation, distance of the finite part, both (steps, trials); the steps; the least weight that is to be 1)."""
    corpora = [corpus(s.n, s.T, s.d[0], s.seed + trial, cyclic) for trial in range(s.trials)]
    features, reads, inside, W = (
        torch.stack(column)
        for column in zip(*((one.features, one.reads, one.component, one.W) for one in corpora), strict=True)
    )
    trials, n = features.shape[:2]
    ones = torch.ones(trials, n, 1, dtype=torch.float64)
    instances = Instances(features, ones, ones.squeeze(-1), Scores(reads))
    stage = f"next-token, {'cyclic' if cyclic else 'acyclic'}"
    steps = grid(s.iterations)
    path, log_weights = descended(instances, s, steps, partial(progress, stage))
    off, within = path.chunk(2, dim=-1)
    restricted = replace(instances, allowed=inside)
    limit = descended(restricted, s, [s.iterations], partial(progress, f"{stage}, finite part"))[0][-1].chunk(2, -1)[1]
    apart = (within - limit).norm(dim=-1)
    weight = (log_weights.exp() * inside).sum(-1).amin(-1)
    return (off * W).sum(-1) / (off.norm(dim=-1) * W.norm(dim=-1)), apart, steps, weight


def descended(
    instances: Instances, s: ExperimentSettings, steps: list[int], tick: Callable[[int, int], None]
) -> tuple[Float[Tensor, "steps trials twice"], Float[Tensor, "trials n T"]]:
    """W at those steps, and the log-weights at the end: normalised off the cyclic subspace, plain in it."""
    W = torch.zeros(len(instances.tokens), instances.tokens.shape[-1], 1, dtype=torch.float64)
    seen, read = instances.first(), []
    for step in range(1, s.iterations + 1):
        seen, gaps = instances.gaps(W, seen)
        direction, scale = gradient(instances, seen, gaps.log_softmax(-1), "log")
        off, within = direction.chunk(2, dim=1)
        W = W - torch.cat([s.lr * unit(off, torch.zeros_like(scale)), within * scale.exp()[:, None, None]], dim=1)
        if step in steps:
            read.append(W.squeeze(-1))
        tick(step, s.iterations)
    return torch.stack(read), instances.gaps(W, seen)[1].log_softmax(-1)


def corpus(n: int, T: int, d: int, seed: int, cyclic: bool) -> Corpus:
    """Random sequences whose graph poses a problem: some order to learn, and some cycle where cycles are asked for.

    Raises UsageError where TRIES random corpora of that size pose none.
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
            return _featured(problem, embeddings[inputs], inputs == labels, W)
    raise UsageError(
        f"{TRIES} random corpora of {n} sequences of {T} among {d} tokens pose no such problem.",
        "Choose a larger d, or more or longer sequences.",
    )


def _featured(
    problem: attsvm.Problem, tokens: Float[Tensor, "n T d"], hits: Bool[Tensor, "n T"], W: Float[Tensor, "d d"]
) -> Corpus:
    whole = (tokens[..., :, None] * tokens[:, -1:, None, :]).flatten(2)
    equal = problem.equal
    ties = (problem.differences[equal][:, :, None] * problem.paired_queries[equal][:, None, :]).flatten(1)
    _, values, basis = torch.linalg.svd(ties, full_matrices=False)
    basis = basis[values > SAME * values.amax()] if len(values) else basis
    within = whole @ basis.mT @ basis
    off = whole - within
    # One component's tokens differ by rounding off the cyclic subspace, which would outlive weights below 1e-16.
    same = torch.cdist(off, off) < SAME
    off = off.gather(1, same.int().argmax(-1)[..., None].expand_as(off))
    component = same[torch.arange(len(hits)), hits.int().argmax(-1)]
    return Corpus(torch.cat([off, within], -1), hits.double(), component, W.flatten())


FULL = ExperimentSettings(trials=50, n=6, T=4, d=(8,), lr=0.1, iterations=3000)
STUDY = Study(next_token, FULL, replace(FULL, trials=10), uses("next-token"))
