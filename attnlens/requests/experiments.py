"""Options of `reproduce`, and of `converge` on synthetic data, with checks for contradictions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal, Self

from pydantic import model_validator

from attnlens.arguments import LARGEST, checked_name, format_argument, path
from attnlens.choices import CLAIMS, STUDIES
from attnlens.errors import UsageError
from attnlens.requests.fields import FilePlace, FolderPlace, Rate, Request, Whole, Words, checks, keyword, option, words
from attnlens.requests.run_options import INPUT, EngineRequest, new_folder, one_file, several_files

ALL = "all"


def checked_table(name: str) -> str:
    """Return the name if it is a table, `claims` or `all`. Raise UsageError otherwise."""
    return checked_name("table", name, (CLAIMS, *STUDIES, ALL))


def _series(_name: str, value: object) -> tuple[str, str]:
    two = [value] if isinstance(value, str | bytes) or not isinstance(value, Sequence) else list(value)
    if len(two) != 2:
        raise UsageError(f"series={format_argument(value)} is not a pair of files.", "Give a training and a test file.")
    return path("series", two[0]), path("series", two[1])


class StudyRequest(EngineRequest):
    """Options of a study: models, training and data."""

    scale: Literal["tiny", "small", "paper"] = option(
        "Size of models and data: `tiny` (minutes on two cores), `small` (an hour on a GPU) or `paper` (as published).",
        "tiny",
        metavar="SCALE",
    )
    text: Words = several_files(
        "Text file for language modelling; repeatable. Default: built-in text (with `--scale paper`: WikiText-103)."
    )
    pairs: FilePlace = one_file(
        "Sentence pairs for translation, one per line: `source TAB target` or `id TAB source TAB target`. Default: "
        "a built-in reversal task, which cannot be solved without positional information (`--scale paper`: IWSLT'14)."
    )
    series: Annotated[tuple[str, str], checks(_series)] | None = option(
        "A training file and a test file of time series to classify, in the UEA archive's `.ts` format.",
        panel=INPUT,
        metavar="TRAIN TEST",
        typed=tuple[str, str] | None,
        call_only="read",
    )
    labelled: FilePlace = one_file("File of texts to classify, one per line: `text TAB label`.")
    cells: Words = option(
        "Train only the cells that match ROW or TASK/ROW, where `*` matches any characters. Repeatable.",
        (),
        metavar="PATTERN",
        shown="all",
    )
    seeds: Whole | None = option(
        "Number of runs (seeds) per cell of the table.", least=1, most=100, shown="3 with tiny, else 5"
    )
    seed: Whole = option("Seed of the first run.", 0, least=0, most=LARGEST - 100)
    jobs: Whole | None = option(
        "Number of models to train in parallel.", least=1, most=256, shown="one per core; 1 on a GPU"
    )
    save: FolderPlace = new_folder(
        "Save the model of each cell's first run, at each evaluation, to this new or empty folder."
    )
    work: FolderPlace = new_folder(
        "Folder that stores finished runs. Repeat the command to resume.", shown="in the user's cache"
    )


MOST = 4096  # Largest size of an instance: a larger size would fill the memory or take forever
DRAWN = frozenset({"trials", "seed", "n", "t", "d"})
TRAINED = DRAWN | {"lr", "loss", "iterations", "attention", "start"}
USES = {  # Synthetic experiments, with the options that each one uses
    "local-convergence": TRAINED | {"m", "head_function", "parameterisation"},
    "global-selection": TRAINED,
    "feasibility": DRAWN | {"attention"},
    "rank": DRAWN | {"attention"},
    "multi-token": TRAINED | {"head_function"},
    "next-token": DRAWN | {"lr", "iterations"},
}
ExperimentNames = Annotated[
    tuple[str, ...],
    checks(lambda name, value: tuple(checked_name("experiment", each, USES) for each in words(name, value))),
]
synthetic_option = partial(option, panel="Synthetic experiments")


class DescentRequest(Request):
    """Options of gradient descent on a selection problem."""

    lr: Rate | None = keyword("Step size of normalised gradient descent.")
    loss: Literal["logistic", "exponential"] | None = keyword("Loss function: `logistic` or `exponential`.")
    parameterisation: Literal["both", "W", "KQ"] | None = keyword("Parameterisation to train: `W`, `KQ` or `both`.")
    iterations: Whole | None = synthetic_option(
        "Number of gradient-descent steps, also with --head.", least=1, most=10_000_000
    )


class SizesRequest(DescentRequest):
    """Sizes and settings of the synthetic experiments; None stands for the paper's value."""

    n: Whole | None = keyword("Number of inputs per instance.", least=1, most=MOST)
    t: Whole | None = keyword("Number of tokens per input (T).", least=2, most=MOST)
    d: Whole | None = keyword("Number of dimensions of a token.", least=1, most=MOST)
    m: Whole | None = keyword("Number of columns of K and Q (default: d).", least=1, most=MOST)
    head_function: Literal["linear", "relu"] | None = keyword("Head function h: `linear` or `relu`.")
    attention: Literal["cross", "self"] | None = keyword(
        "Query z: independent of the tokens (`cross`), or one of the tokens (`self`)."
    )
    start: Literal["random", "zero"] | None = keyword("Initial W: `random` or `zero`.")
    trials: Whole | None = synthetic_option("Number of random instances per experiment.", least=1, most=10_000)
    # trial i uses the seed `seed + i`
    seed: Whole = option("Random seed.", 0, least=0, most=LARGEST - 10_000)


class SyntheticRequest(SizesRequest):
    """Options of the synthetic experiments."""

    experiments: ExperimentNames = synthetic_option(
        "Run only this experiment; repeatable.", (), metavar="NAME", flag="--experiment", shown="all"
    )

    @property
    def chosen(self) -> list[str]:
        """Names of the experiments to run, without duplicates; all experiments if none is named."""
        return list(dict.fromkeys(self.experiments or USES))

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self.m is not None and self.parameterisation == "W":
            raise UsageError("`m` is the number of columns of K and Q, but W is trained directly.", "Leave out `m`.")
        if self.start == "zero" and self.parameterisation == "KQ":
            raise UsageError("K = Q = 0 is a stationary point: training never leaves it.", "Choose start=random.")
        for name in self.overrides():
            if not any(name in USES[experiment] for experiment in self.chosen):
                raise UsageError(f"{name} would be ignored by {', '.join(self.chosen)}.", f"Leave out {name}.")
        return self

    def overrides(self) -> dict[str, object]:
        """Return the settings that replace the paper's values, including the seed."""
        return self.model_dump(exclude={"experiments"}, exclude_none=True)
