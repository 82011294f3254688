"""What experiments are asked with, and the figures that they report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from pydantic import JsonValue

from attnlens.maths.attsvm.descent import Loss
from attnlens.records.studies import Bound, Curve, Experiment
from attnlens.requests.experiments import USES

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

Progress = Callable[[str, int, int], None]
"""(stage, steps done, steps in all)."""

NAMES = {"t": "T", "head_function": "head"}
"""What the experiments call an option that has another name for a user."""


@dataclass(frozen=True)
class ExperimentSettings:
    """The settings of the experiments; each uses some of them. The defaults are those of Tarzanagh et al. 2023."""

    trials: int  # random instances; of each size, where there are several
    seed: int = 0  # trial i draws from seed + i
    n: int = 6  # inputs (sequences) of an instance
    T: int = 8  # tokens of an input
    d: tuple[int, ...] = (10,)  # dimension of a token; several: one point of the curve each
    m: int | None = None  # columns of K and Q; None: d
    lr: float = 0.1  # length of a step
    loss: Loss = "logistic"  # of Y·f
    head: Literal["linear", "relu"] = "linear"  # vᵀa, or 1ᵀrelu(Va)
    parameterisation: Literal["both", "W", "KQ"] = "both"  # what is trained
    iterations: int = 1000  # steps of gradient descent
    attention: Literal["cross", "self"] = "cross"  # whether z is drawn, or is the input's own first token
    start: Literal["random", "zero"] = "random"  # where W begins; K and Q always begin at random


@dataclass(frozen=True)
class Study:
    """One experiment: its function, and the settings that it uses."""

    function: Callable[[ExperimentSettings, bool, Progress], Experiment]
    """(settings, whether they are the published ones, progress) → what was found."""
    full: ExperimentSettings
    """The published sizes."""
    quick: ExperimentSettings
    """The same sizes with fewer trials, or fewer of the sizes."""
    uses: frozenset[str]
    """Names of the settings that it uses."""

    def run(self, overrides: Mapping[str, Any], quick: bool, progress: Progress) -> Experiment:
        """With those overrides that it uses; compared with what was published where none changes what is asked.

        Trials and seed say how surely it is answered and not what is asked: the published are compared from as many
        trials as the quick run takes, for all sizes.
        """
        standard = self.quick if quick else self.full
        used: dict[str, Any] = {
            name: (value,) if name == "d" else value for name, value in overrides.items() if name in self.uses
        }
        settings = replace(standard, **used)
        asked = replace(standard, trials=self.quick.trials)
        same = replace(settings, seed=asked.seed, trials=asked.trials) == asked
        published = same and settings.trials >= asked.trials
        found = self.function(settings, published, progress)
        shown = {name: value for name, value in asdict(settings).items() if name in self.uses and value is not None}
        wide = {name: _plain(value) for name, value in shown.items()}
        return found.model_copy(update={"settings": wide | found.settings}).judged()


def _plain(value: Any) -> JsonValue:
    if isinstance(value, tuple):
        return list(value) if len(value) > 1 else value[0]
    return value  # type: ignore[no-any-return]


def uses(experiment: str) -> frozenset[str]:
    """Names of the settings that an experiment uses."""
    return frozenset(map(setting_of, USES[experiment]))


def setting_of(option: str) -> str:
    """The name of an option's setting."""
    return NAMES.get(option, option)


def silent(_stage: str, _done: int, _total: int) -> None:
    """Show no progress."""


CORRELATION = "correlation"
NORMS = {"frobenius": "Frobenius", "nuclear": "nuclear"}
"""How the norms are written."""


class Published(TypedDict, total=False):
    """What a figure is judged by; empty where nothing was published."""

    published: float | None
    tolerance: float | None  # how far the figure may be from it; None: not at all
    bound: Bound


@dataclass(frozen=True)
class Figure:
    """A row of an experiment's table."""

    value: float | None
    error: float | None = None
    """The standard error, where the value is a mean over trials."""
    label: str | None = None
    """How the figure is written, where that is not its name with blanks for underscores."""
    published: float | None = None
    tolerance: float | None = None
    bound: Bound = "within"


def columns(rows: Mapping[str, Figure], missing: str = "", labels: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The rows as fields of an Experiment; `missing`: why rows have no value; `labels`: how settings are written."""
    return {
        "final": {name: row.value for name, row in rows.items()},
        "errors": {name: row.error for name, row in rows.items() if row.error is not None},
        "reasons": {name: missing for name, row in rows.items() if row.value is None},
        "published": {name: row.published for name, row in rows.items() if row.published is not None} or None,
        "tolerance": {name: row.tolerance for name, row in rows.items() if row.tolerance is not None} or None,
        "bounds": {name: row.bound for name, row in rows.items() if row.bound != "within"},
        "labels": {name: row.label for name, row in rows.items() if row.label is not None} | dict(labels or {}),
    }


def averaged(values: Float[Tensor, " trials"], label: str | None = None, **known: Unpack[Published]) -> Figure:
    """The mean over the trials that have a value, None where none has, ± its standard error from two values on."""
    there = values[~values.isnan()]
    mean = float(there.mean()) if len(there) else None
    error = float(there.std() / len(there) ** 0.5) if len(there) > 1 else None
    return Figure(mean, error, label, **known)


def share_of(share: float, trials: int, label: str, published: float | None, theirs: int) -> Figure:
    """A share of our trials. May be 3 √(p(1 − p)(1/n + 1/n')) from the published p, at least one trial from 0 and 1."""
    error = math.sqrt(share * (1 - share) / trials)
    if published is None:
        return Figure(share, error, label)
    p = min(max(published, 1 / trials), 1 - 1 / trials)
    return Figure(share, error, label, published, 3 * math.sqrt(p * (1 - p) * (1 / trials + 1 / theirs)))


def curve(steps: Sequence[float], values: Float[Tensor, "steps trials"], quantity: str, **shown: Any) -> Curve:
    """Median and quartiles over the trials that have a value; `shown` are fields of Curve."""
    low, median, high = (
        [None if row.isnan().all() else row.nanquantile(share).item() for row in values] for share in (0.25, 0.5, 0.75)
    )
    return Curve(steps=list(steps), median=median, low=low, high=high, quantity=quantity, **shown)
