"""What `study` can be asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from attnlens.arguments import LARGEST, path, shown
from attnlens.choices import STUDIES
from attnlens.errors import UsageError
from attnlens.registry import checked_name
from attnlens.requests.fields import Option, Words, folder, words
from attnlens.requests.run_options import INPUT, OUTPUT, Place, one_file, several_files
from attnlens.requests.work_options import EngineRequest

ALL = "all"
MOST_JOBS = 256


def table(name: str) -> str:
    """The name of a table, or `all`; UsageError where there is none of that name."""
    return checked_name("table", name, (*STUDIES, ALL))


def _series(_name: str, given: Any) -> tuple[str, str]:
    """Two files, for training and for test; UsageError for any other number."""
    two = [given] if isinstance(given, str | bytes) or not isinstance(given, Sequence) else list(given)
    if len(two) != 2:
        raise UsageError(f"series={shown(given)} is no pair of files.", "Give one to train on and one to test on.")
    return path("series", two[0]), path("series", two[1])


class StudyRequest(EngineRequest, total=False):
    """How a study's models are made and trained, and on what."""

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
            "a built-in task of reversal, where order and positions provably matter; `paper`: IWSLT'14.",
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
    labelled: Annotated[
        Place,
        one_file("Texts to classify: a line each, `text TAB label`."),
    ]
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
        int | None, Option("Models that are trained at once.", least=1, most=MOST_JOBS, shown="one a core; on a GPU 1")
    ]
    save: Annotated[
        Place,
        Option(
            "Write each cell's model, of the first seed, at every look, into this new folder.",
            panel=OUTPUT,
            metavar="DIR",
            typed=str | None,
            check=folder,
            call_only="written",
        ),
    ]
    work: Annotated[
        Place,
        Option(
            "Keep what is finished here; the same command goes on from there.",
            panel=OUTPUT,
            metavar="DIR",
            typed=str | None,
            check=folder,
            call_only="written",
            shown="in the user's cache",
        ),
    ]
