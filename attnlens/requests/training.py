"""What `converge` can be asked for, beside what is asked of a model: each option once, and what contradicts what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypedDict

from attnlens.arguments import LARGEST, shown
from attnlens.errors import UsageError
from attnlens.registry import checked_name
from attnlens.requests.fields import Option, Words, checked, words

PANEL = "Synthetic experiments"
MOST = 4096
"""Largest size of an instance: more is a slip, and would fill the memory or never end."""
DRAWN = frozenset({"trials", "seed", "n", "t", "d"})
TRAINED = DRAWN | {"lr", "loss", "iterations", "attention", "start"}
USES = {
    "local-convergence": TRAINED | {"m", "head_function", "parameterisation"},
    "global-selection": TRAINED,
    "feasibility": DRAWN | {"attention"},
    "rank": DRAWN | {"attention"},
    "multi-token": TRAINED | {"head_function"},
    "next-token": DRAWN | {"lr", "iterations"},
}
"""The synthetic experiments, and which options each uses."""


def _rate(_name: str, lr: Any) -> float:
    """The length of a step; UsageError where it leads nowhere."""
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not 0 < lr <= LARGEST:
        raise UsageError(f"lr={shown(lr)} is no step downhill.", "Give a number above 0, such as 0.1.")
    return lr


def _experiments(name: str, given: Any) -> list[str]:
    """The names of experiments, each once; none means all."""
    return list(dict.fromkeys(checked_name("experiment", one, USES) for one in words(name, given))) or list(USES)


class DescentRequest(TypedDict, total=False):
    """How a selection problem is descended."""

    lr: Annotated[float | None, Option("Length of a normalised gradient step.", panel=PANEL, check=_rate)]
    loss: Annotated[
        Literal["logistic", "exponential"] | None,
        Option("`logistic` or `exponential`.", panel=PANEL, metavar="LOSS"),
    ]
    parameterisation: Annotated[
        Literal["both", "W", "KQ"] | None,
        Option("What is trained: `W`, `KQ` or `both`.", panel=PANEL, metavar="NAME"),
    ]
    iterations: Annotated[int | None, Option("Steps of gradient descent.", panel=PANEL, least=1, most=10_000_000)]


class SizesRequest(DescentRequest, total=False):
    """Sizes and settings of the synthetic experiments; None leaves each at the paper's value."""

    n: Annotated[int | None, Option("Inputs of an instance.", panel=PANEL, least=1, most=MOST)]
    t: Annotated[int | None, Option("Tokens of an input (T).", panel=PANEL, least=2, most=MOST)]
    d: Annotated[int | None, Option("Dimensions of a token.", panel=PANEL, least=1, most=MOST)]
    m: Annotated[int | None, Option("Columns of K and Q.", panel=PANEL, least=1, most=MOST, shown="d")]
    head_function: Annotated[
        Literal["linear", "relu"] | None, Option("h: `linear` or `relu`.", panel=PANEL, metavar="FUNCTION")
    ]
    attention: Annotated[
        Literal["cross", "self"] | None,
        Option("z is drawn (`cross`) or a token (`self`).", panel=PANEL, metavar="KIND"),
    ]
    start: Annotated[
        Literal["random", "zero"] | None, Option("Where W begins: `random` or `zero`.", panel=PANEL, metavar="PLACE")
    ]
    trials: Annotated[int | None, Option("Random instances.", panel=PANEL, least=1, most=100_000)]
    # trial i draws from seed + i
    seed: Annotated[int, Option("Seed of everything random.", 0, least=0, most=LARGEST - 100_000)]


class SyntheticRequest(SizesRequest, total=False):
    """What the synthetic experiments can be asked for."""

    experiments: Annotated[
        Words,
        Option("Only this experiment; repeatable.", (), PANEL, "NAME", "--experiment", shown="all", check=_experiments),
    ]


def checked_synthetic(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of SyntheticRequest that are given, if they make sense together; `experiments` and `seed` always.

    Raises UsageError for an unknown option, a value that makes no sense, m beside parameterisation W, K = Q = 0, and an
    option that none of the experiments uses.
    """
    found = checked(SyntheticRequest, given)
    asked = {name: value for name, value in found.items() if value is not None}
    if "m" in asked and asked.get("parameterisation") == "W":
        raise UsageError("m is the number of columns of K and Q, which W alone does not have.", "Leave out m.")
    if asked.get("start") == "zero" and asked.get("parameterisation") == "KQ":
        raise UsageError("K = Q = 0 is a stationary point: training never leaves it.", "Choose start=random.")
    for name in asked.keys() - {"experiments"}:
        if not any(name in USES[experiment] for experiment in asked["experiments"]):
            raise UsageError(f"{name} would be ignored by {', '.join(asked['experiments'])}.", f"Leave out {name}.")
    return asked
