"""Options of `converge` and `study` besides those of models, and checks for contradictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict

from attnlens.arguments import LARGEST, checked_name, path, shown
from attnlens.choices import STUDIES
from attnlens.errors import UsageError
from attnlens.requests.fields import Option, Words, checked, words
from attnlens.requests.run_options import INPUT, EngineRequest, Place, new_folder, one_file, several_files

ALL = "all"


def table(name: str) -> str:
    """Return the name of a table, or `all`. Raise UsageError for an unknown one."""
    return checked_name("table", name, (*STUDIES, ALL))


def _series(_name: str, given: Any) -> tuple[str, str]:
    """Return two files, for training and test. Raise UsageError for any other number."""
    two = [given] if isinstance(given, str | bytes) or not isinstance(given, Sequence) else list(given)
    if len(two) != 2:
        raise UsageError(f"series={shown(given)} is no pair of files.", "Give one to train on and one to test on.")
    return path("series", two[0]), path("series", two[1])


class StudyRequest(EngineRequest, total=False):
    """Options of a study: how its models are built and trained, and on what data."""

    scale: Annotated[
        Literal["tiny", "small", "paper"],
        Option(
            "Sizes: `tiny` (minutes on two cores), `small` (an hour on a GPU) or `paper` (the papers' own).",
            "tiny",
            metavar="SCALE",
        ),
    ]
    text: Annotated[
        Words,
        several_files(
            "Text file for language modelling; repeatable. Default: the King James text; `paper`: WikiText-103."
        ),
    ]
    pairs: Annotated[
        Place,
        one_file(
            "Sentence pairs for translation: a line each, `source TAB target` or `id TAB source TAB target`. Default: "
            "a built-in task of reversal, where order and positions provably matter; `paper`: IWSLT'14."
        ),
    ]
    series: Annotated[
        tuple[str, str] | None,
        Option(
            "Time series to classify, in the UEA archive's `.ts` format: one file to train on, one to test on.",
            panel=INPUT,
            metavar="TRAIN TEST",
            typed=tuple[str, str] | None,
            check=_series,
            call_only="read",
        ),
    ]
    labelled: Annotated[Place, one_file("Texts to classify: a line each, `text TAB label`.")]
    cells: Annotated[
        Words,
        Option(
            "Only these cells, by row or by `task/row`, with `*` for any letters; repeatable.",
            (),
            flag="--cells",
            metavar="PATTERN",
            shown="all",
            check=words,
        ),
    ]
    seeds: Annotated[
        int | None, Option("Training runs of each cell.", least=1, most=100, shown="3; small and paper: 5")
    ]
    seed: Annotated[int, Option("The first of them.", 0, least=0, most=LARGEST - 100)]
    jobs: Annotated[
        int | None, Option("Models that are trained at once.", least=1, most=256, shown="one a core; on a GPU 1")
    ]
    save: Annotated[
        Place, new_folder("Write each cell's model, of the first seed, at every look, into this new folder.")
    ]
    work: Annotated[
        Place, new_folder("Keep what is finished here; the same command goes on from there.", "in the user's cache")
    ]


SYNTHETIC = "Synthetic experiments"
MOST = 4096
"""Largest size of an instance: a larger one is a typo, and would fill the memory or never end."""
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
"""Synthetic experiments, with the options that each one uses."""


def _rate(_name: str, lr: Any) -> float:
    """Return the step length. Raise UsageError if it is not a positive finite number."""
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not 0 < lr <= LARGEST:
        raise UsageError(f"lr={shown(lr)} is no step downhill.", "Give a number above 0, such as 0.1.")
    return lr


def _experiments(name: str, given: Any) -> list[str]:
    """Return the names of experiments, each once; all of them if none is named."""
    return list(dict.fromkeys(checked_name("experiment", each, USES) for each in words(name, given))) or list(USES)


class DescentRequest(TypedDict, total=False):
    """Options of gradient descent on a selection problem."""

    lr: Annotated[float | None, Option("Length of a normalised gradient step.", panel=SYNTHETIC, check=_rate)]
    loss: Annotated[
        Literal["logistic", "exponential"] | None,
        Option("`logistic` or `exponential`.", panel=SYNTHETIC, metavar="LOSS"),
    ]
    parameterisation: Annotated[
        Literal["both", "W", "KQ"] | None,
        Option("What is trained: `W`, `KQ` or `both`.", panel=SYNTHETIC, metavar="NAME"),
    ]
    iterations: Annotated[int | None, Option("Steps of gradient descent.", panel=SYNTHETIC, least=1, most=10_000_000)]


class SizesRequest(DescentRequest, total=False):
    """Sizes and settings of the synthetic experiments; None: the paper's value."""

    n: Annotated[int | None, Option("Inputs of an instance.", panel=SYNTHETIC, least=1, most=MOST)]
    t: Annotated[int | None, Option("Tokens of an input (T).", panel=SYNTHETIC, least=2, most=MOST)]
    d: Annotated[int | None, Option("Dimensions of a token.", panel=SYNTHETIC, least=1, most=MOST)]
    m: Annotated[int | None, Option("Columns of K and Q.", panel=SYNTHETIC, least=1, most=MOST, shown="d")]
    head_function: Annotated[
        Literal["linear", "relu"] | None, Option("h: `linear` or `relu`.", panel=SYNTHETIC, metavar="FUNCTION")
    ]
    attention: Annotated[
        Literal["cross", "self"] | None,
        Option("z is drawn (`cross`) or a token (`self`).", panel=SYNTHETIC, metavar="KIND"),
    ]
    start: Annotated[
        Literal["random", "zero"] | None,
        Option("Where W begins: `random` or `zero`.", panel=SYNTHETIC, metavar="PLACE"),
    ]
    trials: Annotated[int | None, Option("Random instances.", panel=SYNTHETIC, least=1, most=100_000)]
    # trial i draws from seed + i
    seed: Annotated[int, Option("Seed of everything random.", 0, least=0, most=LARGEST - 100_000)]


class SyntheticRequest(SizesRequest, total=False):
    """Options of the synthetic experiments."""

    experiments: Annotated[
        Words,
        Option(
            "Only this experiment; repeatable.", (), SYNTHETIC, "NAME", "--experiment", shown="all", check=_experiments
        ),
    ]


def checked_synthetic(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are set, checked against each other; `experiments` and `seed` are always included.

    Raise UsageError for an unknown option, an invalid value, m with parameterisation W, K = Q = 0, and an
    option that none of the experiments uses.
    """
    values = checked(SyntheticRequest, given)
    chosen = {name: value for name, value in values.items() if value is not None}
    if "m" in chosen and chosen.get("parameterisation") == "W":
        raise UsageError("m is the number of columns of K and Q, which W alone does not have.", "Leave out m.")
    if chosen.get("start") == "zero" and chosen.get("parameterisation") == "KQ":
        raise UsageError("K = Q = 0 is a stationary point: training never leaves it.", "Choose start=random.")
    for name in chosen.keys() - {"experiments"}:
        if not any(name in USES[experiment] for experiment in chosen["experiments"]):
            raise UsageError(f"{name} would be ignored by {', '.join(chosen['experiments'])}.", f"Leave out {name}.")
    return chosen
