"""Settings of the experiments, and the figures and curves they report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from attnlens.maths.attsvm.descent import Loss
from attnlens.maths.linalg.spectra import one_thread
from attnlens.records.studies import Bound, Curve, Experiment
from attnlens.requests.experiments import USES
from attnlens.runs.progress import Progress, silent

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

NAMES = {"t": "T", "head_function": "head"}  # option name → name of the experiment setting, if they differ


@dataclass(frozen=True)
class ExperimentSettings:
    """Settings of the experiments; each uses some of them. The defaults are those of Tarzanagh et al. 2023."""

    trials: int  # random instances per size
    seed: int = 0  # trial i draws from seed + i
    n: int = 6  # inputs (sequences) per instance
    T: int = 8  # tokens per input
    d: tuple[int, ...] = (10,)  # dimension of a token; several values give one point of the curve each
    m: int | None = None  # columns of K and Q; None: d
    lr: float = 0.1  # length of a step
    loss: Loss = "logistic"  # loss as a function of Y·f
    head: Literal["linear", "relu"] = "linear"  # vᵀa, or 1ᵀrelu(Va)
    parameterisation: Literal["both", "W", "KQ"] = "both"  # parameterisation that is trained
    iterations: int = 1000  # steps of gradient descent
    attention: Literal["cross", "self"] = "cross"  # z is drawn (cross) or is the input's first token (self)
    start: Literal["random", "zero"] = "random"  # initial W; K and Q always start at random
    published: bool = True  # False if another setting changes the question, so that no published value applies


@dataclass(frozen=True)
class Study:
    """One experiment: its function and its sizes."""

    name: str  # name on the command line
    function: Callable[[ExperimentSettings, Progress], Experiment]
    full: ExperimentSettings  # published sizes
    quick: Mapping[str, Any]  # settings of the quick run that differ: fewer trials, or some of the sizes
    source: str | None = None  # source of the published values

    @one_thread()
    def run(self, overrides: Mapping[str, Any], quick: bool, progress: Progress = silent) -> Experiment:
        """Run with the overrides this experiment uses; compare with published values if none changes the question.

        `overrides` are options of requests.SyntheticRequest. Trials and seed affect the precision of the answer, not
        the question: with any seed, and at least as many trials as the quick run has, the result is compared with the
        published values.
        """
        standard = replace(self.full, **self.quick) if quick else self.full
        used = {NAMES.get(name, name) for name in USES[self.name]}
        named = {NAMES.get(option, option): value for option, value in overrides.items()}
        applied = {name: value for name, value in named.items() if name in used}
        settings = replace(standard, **applied | ({"d": (applied["d"],)} if "d" in applied else {}))
        same = replace(settings, seed=standard.seed, trials=standard.trials) == standard
        settings = replace(settings, published=same and settings.trials >= self.quick["trials"])
        experiment = self.function(settings, progress)
        values = asdict(settings) | {"d": list(settings.d) if len(settings.d) > 1 else settings.d[0]}
        recorded = {name: value for name, value in values.items() if name in used and value is not None}
        comparison: dict[str, Any] = {"published": None, "tolerance": None, "bounds": {}}
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
    tolerance: float | None = None  # allowed distance from the published value; None: exact match
    bound: Bound = "within"


UNPUBLISHED = Figure()


def columns(rows: Mapping[str, Figure], missing: str = "", labels: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Convert rows to fields of an Experiment; `missing`: reason for missing values, `labels`: names of settings."""
    return {
        "final": {name: row.value for name, row in rows.items()},
        "errors": {name: row.error for name, row in rows.items() if row.error is not None},
        "reasons": {name: missing for name, row in rows.items() if row.value is None},
        "published": {name: row.published for name, row in rows.items() if row.published is not None} or None,
        "tolerance": {name: row.tolerance for name, row in rows.items() if row.tolerance is not None} or None,
        "bounds": {name: row.bound for name, row in rows.items() if row.bound != "within"},
        "labels": {name: row.label for name, row in rows.items() if row.label is not None} | dict(labels or {}),
    }


def average_trials(values: Float[Tensor, " trials"], label: str | None = None, known: Figure = UNPUBLISHED) -> Figure:
    """Return the mean over trials with a value (None without), its error (two or more), and the published value."""
    present = values[~values.isnan()]
    mean = float(present.mean()) if len(present) else None
    error = float(present.std() / len(present) ** 0.5) if len(present) > 1 else None
    return replace(known, value=mean, error=error, label=label)


def share_of(share: float, trials: int, label: str, published: float | None, theirs: int) -> Figure:
    """Return our share; its tolerance is 3 √(p(1 − p)(1/n + 1/n')), p the published share within [1/n, 1 − 1/n]."""
    error = math.sqrt(share * (1 - share) / trials)
    if published is None:
        return Figure(share, error, label)
    p = min(max(published, 1 / trials), 1 - 1 / trials)
    return Figure(share, error, label, published, 3 * math.sqrt(p * (1 - p) * (1 / trials + 1 / theirs)))


def curve(steps: Sequence[float], values: Float[Tensor, "steps trials"], quantity: str, **fields: str | bool) -> Curve:
    """Compute median and quartiles over the trials that have a value; `fields` are further fields of Curve."""
    low, median, high = (
        [None if row.isnan().all() else row.nanquantile(share).item() for row in values] for share in (0.25, 0.5, 0.75)
    )
    known = {"steps": list(steps), "median": median, "low": low, "high": high, "quantity": quantity}
    return Curve.model_validate(known | fields)


def share_curve(shares: Mapping[int, float], quantity: str) -> Curve:
    """Build the curve of a share by dimension."""
    return Curve(steps=list(shares), median=list(shares.values()), quantity=quantity, bounded=True)
