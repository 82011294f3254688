"""Shared settings, figures and random instances, and the experiments in which each input selects one token."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from attnlens.maths import attsvm
from attnlens.maths.attsvm.descent import Descent, Instances, Loss, PredictionHead, descend, most_iterations
from attnlens.maths.linalg.spectra import one_thread
from attnlens.records.studies import Bound, Curve, Experiment, Origin
from attnlens.requests.experiments import USES
from attnlens.runs.progress import Progress, silent

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

NAMES = {"t": "T", "head_function": "head"}  # option name → name of the experiment setting, if they differ


@dataclass(frozen=True)
class ExperimentSettings:
    """Settings of the experiments; each experiment uses some of them. Defaults are from Tarzanagh et al. 2023."""

    trials: int  # random instances per size
    seed: int = 0  # trial i draws from seed + i
    n: int = 6  # inputs (sequences) per instance
    T: int = 8  # tokens per input
    d: tuple[int, ...] = (10,)  # dimension of a token; if there are several, the curve has one point for each
    m: int | None = None  # columns of K and Q; None: d
    lr: float = 0.1  # length of a step
    loss: Loss = "logistic"  # loss as a function of Y·f
    head: Literal["linear", "relu"] = "linear"  # h(a): vᵀa, or 1ᵀrelu(Va)
    parameterisation: Literal["both", "W", "KQ"] = "both"  # train W, train K and Q (KQ), or both in separate runs
    iterations: int = 1000  # steps of gradient descent
    attention: Literal["cross", "self"] = "cross"  # query z: drawn (cross), or the input's first token (self)
    start: Literal["random", "zero"] = "random"  # initial W; K and Q always start at random
    published: bool = True  # False if a changed setting alters the question, so that no published value applies


@dataclass(frozen=True)
class Study:
    """An experiment: its function, its settings, and the source of the published values."""

    name: str  # name on the command line
    function: Callable[[ExperimentSettings, Progress], Experiment]
    full: ExperimentSettings  # published sizes
    quick: Mapping[str, Any]  # settings that differ in the quick run: fewer trials, fewer sizes
    source: str | None = None  # source of the published values

    @one_thread()
    def run(self, overrides: Mapping[str, Any], quick: bool, progress: Progress = silent) -> Experiment:
        """Run and judge the experiment with the options of SyntheticRequest in `overrides`, ignoring unused options.

        The result is compared with published values only if no setting except the seed and the number of trials is
        changed, and there are at least as many trials as in the quick run.
        """
        standard = replace(self.full, **self.quick) if quick else self.full
        used = {NAMES.get(option, option): option for option in USES[self.name]}  # setting → option
        applied = {name: overrides[option] for name, option in used.items() if option in overrides}
        if "d" in applied:
            applied["d"] = (applied["d"],)
        settings = replace(standard, **applied)
        same = replace(settings, seed=standard.seed, trials=standard.trials) == standard
        settings = replace(settings, published=same and settings.trials >= self.quick["trials"])
        experiment = self.function(settings, progress)
        values = asdict(settings) | {"d": list(settings.d) if len(settings.d) > 1 else settings.d[0]}
        recorded = {name: value for name, value in values.items() if name in used and value is not None}
        comparison: dict[str, Any] = {"published": None, "origins": {}, "tolerance": None, "bounds": {}}
        if settings.published:
            comparison = {"source": self.source} if self.source else {}
        update = {"settings": recorded | experiment.settings, **comparison}
        return experiment.model_copy(update=update).judge()


CORRELATION = "correlation"
NORMS = {"frobenius": "Frobenius", "nuclear": "nuclear"}  # display names of the norms


@dataclass(frozen=True)
class Figure:
    """One row of an experiment's table."""

    value: float | None = None
    error: float | None = None  # standard error, if the value is a mean over trials
    label: str | None = None  # display name; None: the figure's name with blanks for underscores
    published: float | None = None
    tolerance: float | None = None  # maximum distance from the published value; None: 0
    bound: Bound = "within"
    origin: Origin = "published"  # origin of `published`


UNPUBLISHED = Figure()
REIMPLEMENTED = partial(Figure, origin="reimplementation")


def columns(rows: Mapping[str, Figure], missing: str = "", labels: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Convert rows to fields of an Experiment; `missing` explains missing values; `labels` adds display names."""

    def present(field: str, default: object = None) -> dict[str, Any]:
        return {name: getattr(row, field) for name, row in rows.items() if getattr(row, field) != default}

    published = present("published")
    return {
        "final": {name: row.value for name, row in rows.items()},
        "errors": present("error"),
        "reasons": {name: missing for name, row in rows.items() if row.value is None},
        "published": published or None,
        "tolerance": present("tolerance") or None,
        "bounds": present("bound", "within"),
        "origins": {name: origin for name, origin in present("origin", "published").items() if name in published},
        "labels": present("label") | dict(labels or {}),
    }


def average_trials(values: Float[Tensor, " trials"], label: str | None = None, known: Figure = UNPUBLISHED) -> Figure:
    """Build a row with the mean and standard error over trials with a value; other fields are those of `known`."""
    present = values[~values.isnan()]
    mean = float(present.mean()) if len(present) else None
    error = float(present.std() / len(present) ** 0.5) if len(present) > 1 else None
    return replace(known, value=mean, error=error, label=label)


def share_figure(share: float, trials: int, label: str, published: float | None, published_trials: int) -> Figure:
    """Build the row of a share observed in n = `trials` trials; the published share p is from n' = `published_trials`.

    The tolerance is 3 √(p(1 − p)(1/n + 1/n')), with p clamped to [1/n, 1 − 1/n].
    """
    error = math.sqrt(share * (1 - share) / trials)
    if published is None:
        return Figure(share, error, label)
    p = min(max(published, 1 / trials), 1 - 1 / trials)
    tolerance = 3 * math.sqrt(p * (1 - p) * (1 / trials + 1 / published_trials))
    return REIMPLEMENTED(share, error, label, published, tolerance)


def curve(steps: Sequence[float], values: Float[Tensor, "steps trials"], quantity: str, **fields: str | bool) -> Curve:
    """Build a curve of the median and quartiles over trials with a value; `fields` are other fields of Curve."""
    quartiles = values.nanquantile(torch.tensor([0.25, 0.5, 0.75], dtype=values.dtype), dim=1)  # NaN: no trial
    low, median, high = ([None if math.isnan(each) else each for each in row] for row in quartiles.tolist())
    known = {"steps": list(steps), "median": median, "low": low, "high": high, "quantity": quantity}
    return Curve.model_validate(known | fields)


Solver = Callable[[attsvm.Problem], attsvm.Solution]


@dataclass(frozen=True)
class Draws:
    """Random instances of one size, and the generators for further draws."""

    instances: Instances
    generators: list[torch.Generator]  # one per trial, advanced past the trial's data

    @property
    def best(self) -> Int[Tensor, "trials n"]:
        """Index of each input's best token under a linear head v: argmax_t Y·vᵀx_t."""
        instances = self.instances
        _, rises = instances.head.evaluate(torch.ones(instances.tokens.shape[:3]).double(), instances.anchor_first())
        return (instances.labels[..., None] * rises).argmax(-1)


def draw(n: int, T: int, d: int, trials: int, seed: int, attention: str = "cross", head: str = "linear") -> Draws:
    """Sample instances with unit rows of X and Z, a head of norm 1, and Y = ±1.

    Trial i draws the head, Y, X and Z, in this order and in float32, from the seed `seed` + i. In self-attention, z_i =
    x_i1. The ReLU head has d hidden units and ‖V‖_F = 1.
    """
    generators = [torch.Generator().manual_seed(seed + trial) for trial in range(trials)]
    shapes = ((d,) if head == "linear" else (d, d)), (n,), (n, T, d), (n, d)
    parts_by_trial = []
    for generator in generators:
        weights, labels, tokens, queries = (torch.randn(shape, generator=generator) for shape in shapes)
        unit = (part / part.norm(dim=-1, keepdim=True) for part in (tokens, queries))
        parts_by_trial.append((weights / weights.norm(), labels.sign(), *unit))
    weights, labels, tokens, queries = (torch.stack(parts).double() for parts in zip(*parts_by_trial, strict=True))
    prediction: PredictionHead = attsvm.Linear(weights) if head == "linear" else attsvm.Relu(weights)
    z = queries if attention == "cross" else tokens[:, :, 0]
    return Draws(Instances(tokens, z, labels, prediction), generators)


def draw_starts(
    draws: Draws, m: int, start: str
) -> tuple[Float[Tensor, "trials d d"], tuple[Float[Tensor, "trials d m"], Float[Tensor, "trials d m"]]]:
    """Draw the initial (W, (K, Q)) with entries uniform in [−1/√d, 1/√d]; W is 0 if `start` is `zero`."""
    d = draws.instances.tokens.shape[-1]

    def uniform(columns: int) -> Tensor:
        rows = [torch.rand(d, columns, generator=generator) for generator in draws.generators]
        return (2 * torch.stack(rows).double() - 1) / math.sqrt(d)

    W, K, Q = uniform(d), uniform(m), uniform(m)
    return (torch.zeros_like(W) if start == "zero" else W), (K, Q)


def descend_trials(
    s: ExperimentSettings, d: int, stage: str, progress: Progress, floor: float = 0.0
) -> tuple[Draws, Descent]:
    """Run gradient descent on random instances of dimension d, all at once; return the instances and the descent."""
    draws = draw(s.n, s.T, d, s.trials, s.seed, s.attention, s.head)

    def tick(step: int, steps: int) -> None:
        progress(stage, s.d.index(d) * steps + step, len(s.d) * steps)

    W, _ = draw_starts(draws, 1, s.start)
    return draws, descend(draws.instances, W, s.iterations, lr=s.lr, loss=s.loss, floor=floor, progress=tick)


def directions(
    solve: Solver, instances: Instances, chosen: Int[Tensor, "trials n"], tick: Callable[[int, int], None]
) -> Float[Tensor, "trials d d_query"]:
    """Return the W of the SVM that selects each trial's chosen tokens; NaN if these tokens are not separable."""
    d, d_query = instances.tokens.shape[-1], instances.queries.shape[-1]
    solutions = torch.full((len(chosen), d, d_query), torch.nan, dtype=torch.float64)
    for trial, tokens in enumerate(instances.tokens):
        W = solve(attsvm.selection(tokens, instances.queries[trial], chosen[trial])).W
        if W is not None:
            solutions[trial] = W
        tick(trial + 1, len(chosen))
    return solutions


def grid(iterations: int) -> list[int]:
    """Return the steps 1, 2, 3, 5, 10, 20, 30, 50, … below `iterations`, followed by `iterations` itself."""
    steps = {factor * 10**power for power in range(len(str(iterations))) for factor in (1, 2, 3, 5)}
    return sorted({step for step in steps if step < iterations} | {iterations})


GOLDEN_GAP = 1e-9  # relative duality gap at which both solvers stop, well below the tolerance
LOCAL = {0: (2.9073738904096262, 4.348790123214846), 1: (2.6601569143692747, 4.6354791607992585)}
"""Seed of a random instance → least Frobenius and nuclear norm of W."""


def golden() -> Experiment:
    """Compare the SVM solutions of reference instances with the known ½‖p‖², ‖W‖_F, ‖W‖_* and rank, to within 1e-6."""
    problems, rows, labels = instances(), dict[str, Figure](), {**NORMS, "half_square": "½‖p‖²", "rank": "rank"}
    for name, (problem, known) in problems.items():
        norm = attsvm.solve(problem).norm
        figures: dict[str, float | None] = {"frobenius": norm, "half_square": None if norm is None else norm**2 / 2}
        if "nuclear" in known:
            nuclear = attsvm.solve_nuclear(problem, tolerance=GOLDEN_GAP)
            figures |= {"nuclear": nuclear.norm, "rank": None if nuclear.W is None else attsvm.nuclear_rank(nuclear.W)}
        for what, value in known.items():
            label = f"{name.replace('_', ' ')} {labels[what]}"
            rows[f"{name}_{what}"] = REIMPLEMENTED(figures[what], label=label, published=value, tolerance=1e-6)
    return Experiment(
        name="golden instances",
        question="Do the solutions of the reference instances agree with those of a general convex solver?",
        settings={"instances": len(problems), "solver_gap": GOLDEN_GAP},
        source="Tarzanagh et al. 2023 and Max-margin token selection; solved with cvxpy and Clarabel",
        **columns(rows, "the solver found no solution"),
    ).judge()


def instances() -> dict[str, tuple[attsvm.Problem, dict[str, float]]]:
    """Return, by name, each reference instance's problem and known figures (half_square, frobenius, nuclear, rank)."""
    problems = {}
    # prompt d: 3 inputs of 7 tokens near (1, 0), (−1, 1) and (−½, −½), with score 1 or ½; the first token is chosen
    for name, instance in json.loads(Path(__file__).with_name("golden.json").read_text(encoding="utf-8")).items():
        tokens, chosen = torch.tensor(instance["X"], dtype=torch.float64), torch.tensor(instance["chosen"])
        if "Z" in instance:  # queries; without them, the instance is a prompt
            problem = attsvm.selection(tokens, torch.tensor(instance["Z"], dtype=torch.float64), chosen)
        else:
            problem = attsvm.prompt(tokens, chosen)
        problems[name] = problem, instance["known"]
    for seed, (frobenius, nuclear) in LOCAL.items():
        draws = draw(6, 8, 10, 1, seed)
        problem = attsvm.selection(draws.instances.tokens[0], draws.instances.queries[0], draws.best[0])
        problems[f"local_{seed}"] = (problem, {"frobenius": frobenius, "nuclear": nuclear})
    return problems


SELECTED_SHARES = {2: 0.12, 4: 0.35, 10: 0.67, 30: 0.91, 50: 0.96}  # d → published share of trials
FEASIBLE_SHARES = {  # (n, T) → d → published share of draws
    (5, 5): {1: 0.0, 2: 0.15, 3: 0.97, 4: 1.0},
    (10, 5): {3: 0.12, 4: 0.92, 5: 1.0},
    (5, 10): {2: 0.0, 3: 0.63, 4: 1.0},
}


@partial(
    Study,
    "feasibility",
    full=ExperimentSettings(trials=60, n=5, T=5, d=(1, 2, 3, 4, 5)),
    quick={"trials": 30},
    source="Tarzanagh et al. 2023, section 3.1, by a reimplementation (60 draws)",
)
def feasibility(s: ExperimentSettings, progress: Progress) -> Experiment:
    """Compute for each d the share of draws in which the SVM that selects each input's first token exists.

    The figures `sure_…` are the shares at d = max(T−1, n), where theory predicts 1 for almost all data; at d = 1 they
    are not judged, since tokens of unit length are ±1 and often equal. If n or T differs from the default, only this
    size is run.
    """
    sizes = list(FEASIBLE_SHARES) if (s.n, s.T) == (5, 5) else [(s.n, s.T)]
    rows, sure, curves = dict[str, Figure](), dict[str, Figure](), dict[str, Curve]()
    for n, T in sizes:
        certain = max(T - 1, n)
        shares: dict[int, float] = {}
        for d in sorted({*s.d, certain}):
            instances = draw(n, T, d, s.trials, s.seed, s.attention).instances
            separable = 0
            for trial, (tokens, queries) in enumerate(zip(instances.tokens, instances.queries, strict=True)):
                # If the solver cannot decide (None), separability is unproven and counts as not separable.
                problem = attsvm.selection(tokens, queries, torch.zeros(n, dtype=torch.long))
                separable += attsvm.separable(problem).verdict is True
                progress(f"feasibility, n={n} T={T} d={d}", trial + 1, s.trials)
            shares[d] = separable / s.trials
            reference, label = FEASIBLE_SHARES.get((n, T), {}).get(d), f"n = {n}, T = {T}, d = {d}"
            rows[f"n{n}_T{T}_d{d}"] = share_figure(shares[d], s.trials, label, reference, published_trials=60)
        share = shares[certain] if certain > 1 else None
        sure[f"sure_n{n}_T{T}"] = Figure(share, label=f"d = max(n, T − 1), n = {n}, T = {T}", published=1.0)
        median = list(shares.values())
        curves[f"n={n}, T={T}"] = Curve(steps=list(shares), median=median, quantity="share separable", bounded=True)
    return Experiment(
        name="feasibility",
        question="For which sizes does some W separate arbitrarily chosen tokens of random data?",
        settings={"sizes": [f"n={n} T={T}" for n, T in sizes]},
        axis="d",
        curves=curves,
        **columns(rows | sure, "in one dimension, tokens of unit length are ±1, and equal tokens can't be separated"),
    )


@partial(
    Study,
    "global-selection",
    full=ExperimentSettings(trials=200, d=(2, 4, 10, 30, 50), start="zero"),
    quick={"trials": 50, "d": (2, 4, 10)},
    source="Tarzanagh et al. 2023, section 3, by a reimplementation (200 runs)",
)
def global_selection(s: ExperimentSettings, progress: Progress) -> Experiment:
    """Compute for each d the share of trials in which descent selects each input's best token, argmax_t Y_i vᵀx_it."""
    shares, rows = list[float](), dict[str, Figure]()
    for d in s.d:
        draws, descent = descend_trials(s, d, "global selection", progress)
        shares.append(int((descent.chosen[-1] == draws.best).all(-1).sum()) / s.trials)
        rows[f"d{d}"] = share_figure(shares[-1], s.trials, f"d = {d}", SELECTED_SHARES.get(d), published_trials=200)
    selected = Curve(steps=list(s.d), median=shares, quantity="share of trials", bounded=True)
    return Experiment(
        name="global selection",
        question="How often does descent from zero select the best token of every input?",
        axis="d",
        curves={"all best tokens selected": selected},
        **columns(rows),
    )


TIGHT = 1e-8  # relative duality gap of the nuclear solver: singular values that should be 0 are then below 1e-5·σ₁
LONGER = 5  # ratio of the iterations of the longer training of W to the published number
CORRELATIONS = {
    "W_to_frobenius": REIMPLEMENTED(published=0.991, tolerance=0.01),
    "W_to_nuclear": REIMPLEMENTED(published=0.858, tolerance=0.03),
    "KQ_to_nuclear": REIMPLEMENTED(published=0.996, tolerance=0.01),
    "KQ_to_frobenius": REIMPLEMENTED(published=0.851, tolerance=0.03),
    "W_to_frobenius_longer": REIMPLEMENTED(published=0.9998, tolerance=0.0001, bound="at least"),
}
SVMS: dict[str, Solver] = {
    "frobenius": attsvm.solve,
    "nuclear": partial(attsvm.solve_nuclear, tolerance=1e-6),  # the correlations are published to three digits
}


@partial(
    Study,
    "local-convergence",
    full=ExperimentSettings(trials=100),
    quick={"trials": 20},
    source="Tarzanagh et al. 2023, Fig. 4 (0.99 and 0.86); to three digits by a reimplementation on 100 seeds",
)
def local_convergence(s: ExperimentSettings, progress: Progress) -> Experiment:
    """Average ⟨W, W_svm⟩/(‖W‖‖W_svm‖) over trials; W_svm is the SVM that selects the same tokens as the trained W."""
    draws = draw(s.n, s.T, s.d[0], s.trials, s.seed, s.attention, s.head)
    instances = draws.instances
    W, factors = draw_starts(draws, s.m or s.d[0], s.start)
    initial: dict[str, Tensor | tuple[Tensor, Tensor]] = {"W": W, "KQ": factors}
    # normalise both factors by ‖∇_W‖, as published, or each by the norm of its own gradient if ‖∇_W‖ would overflow
    normaliser: attsvm.Normaliser = "form" if s.iterations <= most_iterations(s.lr) else "own"
    rows, last_rows, curves = dict[str, Figure](), dict[str, Figure](), dict[str, Curve]()

    def correlate(descent: Descent, end: int, name: str, svm: str, suffix: str = "") -> Float[Tensor, " trials"]:
        """Add the curve of W's correlation with the SVM of the tokens chosen at record `end`; return its last row."""
        tick = partial(progress, f"local convergence, {name}, {svm} SVM")
        solutions = directions(SVMS[svm], instances, descent.chosen[end], tick)
        steps, correlations = descent.steps[: end + 1], descent.correlation(solutions)[: end + 1]
        label = f"{name} to {NORMS[svm]}{suffix}"
        curves[f"{name} to {svm}{suffix}"] = curve(steps, correlations, CORRELATION, bounded=True, label=label)
        return correlations[end]

    for name, start in initial.items():
        if s.parameterisation not in ("both", name):
            continue
        longer = f"{name}_to_frobenius_longer"
        train_longer = s.published and longer in CORRELATIONS
        last = LONGER * s.iterations if train_longer else s.iterations
        record, tick = {*grid(s.iterations), *grid(last)}, partial(progress, f"local convergence, {name}")
        descent = descend(
            instances, start, last, lr=s.lr, loss=s.loss, normaliser=normaliser, record=record, progress=tick
        )
        end = descent.steps.index(s.iterations)
        for svm, norm in NORMS.items():
            figure, correlations = f"{name}_to_{svm}", correlate(descent, end, name, svm)
            rows[figure] = average_trials(
                correlations, f"cosine of {name} and the {norm} SVM", CORRELATIONS.get(figure, UNPUBLISHED)
            )
        rows[f"{name}_largest_weight"] = average_trials(descent.largest[end].mean(-1))
        if train_longer:
            last_step = len(descent.steps) - 1
            value = correlate(descent, last_step, name, "frobenius", ", longer").nanmedian().item()
            last_rows[longer] = replace(CORRELATIONS[longer], value=value, label=f"{name} to Frobenius, longer")
    return Experiment(
        name="local convergence",
        question="Does descent end at the max-margin solution for the tokens that it selects?",
        settings={"m": s.m or s.d[0], "normaliser": normaliser},
        curves=curves,
        **columns(rows | last_rows, "no trial's selection is separable"),
    )


@partial(
    Study,
    "rank",
    full=ExperimentSettings(trials=50, d=(4, 6, 8, 10, 15, 20)),
    quick={"trials": 10, "d": (6, 10)},
    source="Tarzanagh et al. 2023, Lemma 1: rank ≤ min(n, d); 2 to 4 with a tight solver "
    "(the published solver gives 5 to 8)",
)
def rank(s: ExperimentSettings, progress: Progress) -> Experiment:
    """Compute the rank (singular values above 1e-5·σ₁) of two SVM solutions that select the best tokens, for each d.

    One minimises the nuclear norm, the other the Frobenius norm.
    """
    svms: dict[str, Solver] = {"nuclear": partial(attsvm.solve_nuclear, tolerance=TIGHT), "frobenius": attsvm.solve}
    ranks: dict[tuple[int, str], Float[Tensor, " trials"]] = {}  # NaN in a trial without a solution
    for d, (svm, solve) in product(s.d, svms.items()):
        draws = draw(s.n, s.T, d, s.trials, s.seed, s.attention)
        solutions = directions(solve, draws.instances, draws.best, partial(progress, f"rank, {svm}, d={d}"))
        trial_ranks = [torch.nan if W.isnan().any() else float(attsvm.nuclear_rank(W)) for W in solutions]
        ranks[d, svm] = torch.tensor(trial_ranks, dtype=torch.float64)
    rows = {f"{svm}_d{d}": average_trials(values, f"{NORMS[svm]}, d = {d}") for (d, svm), values in ranks.items()}
    means = [value for d in s.d if (value := rows[f"nuclear_d{d}"].value) is not None]
    beyond = torch.cat([ranks[d, "nuclear"] - min(s.n, d) for d in s.d])
    most = None if beyond.isnan().all() else float(beyond[~beyond.isnan()].max())
    least, largest = min(means, default=None), max(means, default=None)
    rows |= {
        "nuclear_least": REIMPLEMENTED(least, label="nuclear, smallest mean", published=2.0, bound="at least"),
        "nuclear_most": REIMPLEMENTED(largest, label="nuclear, largest mean", published=4.0, bound="at most"),
        "beyond_bound": Figure(most, label="largest rank − min(n, d)", published=0.0, bound="at most"),
    }
    return Experiment(
        name="rank",
        question="What is the rank of the nuclear-norm solution, and is it at most min(n, d)?",
        settings={"threshold": 1e-5, "solver_gap": TIGHT},
        axis="d",
        curves={svm: curve(s.d, torch.stack([ranks[d, svm] for d in s.d]), "rank", label=NORMS[svm]) for svm in svms},
        **columns(rows, "the best tokens are not separable"),
    )
