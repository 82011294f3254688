"""Sizes and settings of the synthetic experiments, and when published values still compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from pydantic import JsonValue

from attnlens.attsvm.descent import Loss
from attnlens.records.experiments import Experiment
from attnlens.requests.training import USES

Progress = Callable[[str, int, int], None]
"""(stage, steps done, steps in all)."""

NAMES = {"t": "T", "head_function": "head"}
"""What the experiments call an option that has another name for a user."""


@dataclass(frozen=True)
class ExperimentSettings:
    """The settings of the experiments; each uses some of them. The defaults are those of Tarzanagh et al. 2023."""

    trials: int
    """Random instances; of each size, where there are several."""
    seed: int = 0
    """Trial i draws from seed + i."""
    n: int = 6
    """Inputs (sequences) of an instance."""
    T: int = 8
    """Tokens of an input."""
    d: tuple[int, ...] = (10,)
    """Dimension of a token; several: one point of the curve each."""
    m: int | None = None
    """Columns of K and Q; None: d."""
    lr: float = 0.1
    """Length of a step."""
    loss: Loss = "logistic"
    """Of Y·f."""
    head: Literal["linear", "relu"] = "linear"
    """vᵀa, or 1ᵀrelu(Va)."""
    parameterisation: Literal["both", "W", "KQ"] = "both"
    """What is trained."""
    iterations: int = 1000
    """Steps of gradient descent."""
    attention: Literal["cross", "self"] = "cross"
    """Whether z is drawn, or is the input's own first token."""
    start: Literal["random", "zero"] = "random"
    """Where W begins; K and Q always begin at random."""

    def same_but_for_trials(self, other: ExperimentSettings) -> bool:
        """Whether it asks the same, but for the seed and for at least as many trials."""
        return replace(self, seed=other.seed, trials=other.trials) == other and self.trials >= other.trials


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
        published = settings.same_but_for_trials(replace(standard, trials=self.quick.trials))
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
