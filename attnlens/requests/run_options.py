"""What runs can be asked for: each option once, with its help, its bounds and its default.

The fields of these typed dictionaries are the keywords of the Python functions and the options of the commands.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from attnlens.arguments import LARGEST, path, word
from attnlens.choices import Convention, Intervals, Part, Placement, Route, Sources, Sweep
from attnlens.requests import fields
from attnlens.requests.fields import Numbers, Option, Words
from attnlens.requests.healing import HealingRequest
from attnlens.requests.work_options import SharedRequest, WorkRequest

INPUT, OUTPUT, DANGEROUS = "Input", "Output", "Dangerous options"
"""Panels of the help, beside that without a name."""
Place = str | os.PathLike[str] | None
"""A path, or what else names where something lies."""
DTYPES = ("auto", "float32", "float64", "bfloat16", "float16")


def one_file(said: str) -> Option:
    """An option that names a file."""
    return Option(said, panel=INPUT, metavar="FILE", typed=str | None, check=fields.file, call_only="read")


def several_files(said: str) -> Option:
    """An option that names a file each time, as often as it is given."""
    # as paths, so that typer cuts ATTNLENS_TEXT as PATH is cut, and not at blanks
    return Option(said, (), panel=INPUT, metavar="FILE", typed=list[Path] | None, call_only="read")


class Loading(TypedDict, total=False):
    """How a model is loaded."""

    device: Annotated[
        str, Option("`auto`, `cpu`, `cuda`, `cuda:1`, `mps`.", "auto", metavar="DEVICE", check=fields.device)
    ]
    dtype: Annotated[
        str,
        Option(
            "Type of the model's weights: `auto`, `float32`, `bfloat16`, …; measures are float64.",
            "auto",
            metavar="TYPE",
            names=DTYPES,
        ),
    ]
    offline: Annotated[bool, Option("Use local files only.", False, panel=INPUT)]
    revision: Annotated[
        str | None,
        Option("Commit, tag or branch of a hub model.", panel=INPUT, metavar="REVISION", check=word, call_only="read"),
    ]
    adapter: Annotated[
        Place,
        Option(
            "LoRA, rsLoRA or DoRA adapter (peft) to merge into the model: a folder or a hub id.",
            panel=INPUT,
            metavar="DIR|ID",
            check=path,
            call_only="read",
        ),
    ]
    trust_remote_code: Annotated[
        bool, Option("Run Python code that comes with the model.", False, panel=DANGEROUS, call_only="dangerous")
    ]
    allow_pickle: Annotated[
        bool, Option("Load `.bin` weights (pickles, tensors only).", False, panel=DANGEROUS, call_only="dangerous")
    ]


class Feeding(Loading, total=False):
    """What a model is fed with, and how it is loaded."""

    text: Annotated[
        Words,
        several_files(
            "Text file, `-` for stdin, or `datasets:NAME[,config=C][,split=S][,column=T]`; repeatable (ATTNLENS_TEXT "
            f"joins files with `{os.pathsep}`). Default: built-in texts of three kinds; for `demo` King James.",
        ),
    ]
    pairs: Annotated[
        Place,
        one_file(
            "File of text pairs, in the place of --text: one a line, a tab between both, joined by the tokenizer.",
        ),
    ]
    image: Annotated[
        Words,
        several_files("Image file for a model that sees; repeatable, one for each sequence. Default: random images."),
    ]
    audio: Annotated[
        Words,
        several_files(
            "Sound file (`.wav`) for a model that hears; repeatable, one for each sequence. Default: random sounds."
        ),
    ]
    tokens: Annotated[
        int | None,
        Option("Window length in tokens.", panel=INPUT, least=2, shown="128, or the model's limit"),
    ]
    sequences: Annotated[int, Option("How many windows or lines to feed, over all texts.", 32, panel=INPUT, least=1)]
    batch_size: Annotated[int, Option("How many sequences go through the model at once.", 8, panel=INPUT, least=1)]
    pack: Annotated[
        bool,
        Option("Cut running text into windows, or feed it line by line.", True, panel=INPUT, flag="--pack/--no-pack"),
    ]
    windows: Annotated[
        Placement,
        Option(
            "Where windows lie in each text: `spread` evenly over it, the `first` ones, or `random`.",
            "spread",
            panel=INPUT,
            metavar="PLACE",
            noun="placement of windows",
        ),
    ]
    intervals: Annotated[
        Intervals | None,
        Option(
            "Errors and intervals over `windows` of these texts, or over `texts` like them.",
            panel=INPUT,
            metavar="UNITS",
            shown="texts from five on, else windows",
            noun="unit of intervals",
        ),
    ]
    allow_foreign_text: Annotated[
        bool, Option("Go on where the tokenizer does not know half of the text.", False, panel=INPUT)
    ]
    seed: Annotated[int, Option("Seed of everything random.", 0, least=0, most=LARGEST)]


class ModelRequest(Feeding, total=False):
    """Which part of a model is looked at, too."""

    layers: Annotated[Numbers | None, Option("Only these layers, as in `0-3,7`.", metavar="NUMBERS")]
    heads: Annotated[Numbers | None, Option("Only these heads, as in `0,5`.", metavar="NUMBERS")]


class SeriesRequest(ModelRequest, total=False):
    """What is read of every checkpoint of a series."""

    source: Annotated[Sources, Option("What to read: `weights`, `tokens` or `both`.", "both", metavar="SOURCE")]
    analyzers: Annotated[
        Words,
        Option(
            "Only this analyzer; repeatable. `attnlens list` names them, and says which run without being named.",
            (),
            flag="--analyzer",
            metavar="NAME",
            check=fields.analyzers,
        ),
    ]
    select: Annotated[
        str,
        Option(
            "What a query selects, for the analyzer `selection`: its largest score (`argmax`), or the fewest tokens "
            "that hold a share of the weight (`top-p:0.9`).",
            "argmax",
            metavar="RULE",
            check=fields.rule,
        ),
    ]


class CheckpointsRequest(SeriesRequest, SharedRequest, total=False):
    """What a series of checkpoints can be asked for."""


class InspectRequest(SeriesRequest, WorkRequest, total=False):
    """What `inspect` can be asked for."""

    show: Annotated[
        Literal["selection", "attention"] | None,
        Option(
            "With --head: the tokens that the head selects and those that hold its SVM up (`selection`), posed on the "
            "module's inputs where M lives on them, else on queries and keys. Of all heads: what each token of the "
            "first window attends to (`attention`), which the page draws.",
            metavar="WHAT",
        ),
    ]


class CompareRequest(SeriesRequest, total=False):
    """What `compare` can be asked for."""

    fdr: Annotated[
        float,
        Option(
            "Of the changes that are named at most this share is none (Benjamini–Hochberg over heads × measures).",
            0.05,
            metavar="RATE",
            check=fields.rate,
        ),
    ]


class SwapRequest(ModelRequest, HealingRequest, SharedRequest, total=False):
    """What `swap_kernel` can be asked for, beside the kernels."""

    part: Annotated[
        Part | None,
        Option(
            "Only this part: `encoder`, `decoder`, `cross`; where there are several towers, `vision`, `audio`, `text`.",
            metavar="PART",
        ),
    ]
    sweep: Annotated[
        Sweep | None,
        Option("Swap each of the `heads` or `layers` alone too, and rank them.", metavar="WHAT"),
    ]
    predictors: Annotated[
        bool,
        Option(
            "Tell which measures of `inspect` go with the harm of single heads, from eight heads on.",
            True,
            flag="--predictors/--no-predictors",
        ),
    ]
    fit: Annotated[
        bool, Option("Choose each head's free kernel parameters from calibration text, in closed form.", False)
    ]
    budget: Annotated[
        str | None,
        Option(
            "With `--kernel rank`: choose each key head's rank, the smallest within this rise, as in `loss:1%`, and "
            "promise what they cost from windows that chose nothing.",
            metavar="BUDGET",
            check=fields.budget,
        ),
    ]
    ranks: Annotated[
        Any,
        one_file(
            "With `--kernel rank`: take each key head's rank from a plan of --plan, and search for none.",
        ),
    ]
    eta: Annotated[
        float | None,
        Option("Weight of the KSVD regulariser when `primal` is healed.", metavar="NUMBER", shown="0.1"),
    ]
    ksvd_convention: Annotated[
        Convention,
        Option(
            "How its objective is counted: as in the `paper` or in its `code`.",
            "paper",
            metavar="NAME",
            noun="--ksvd-convention",
        ),
    ]
    controls: Annotated[
        bool,
        Option(
            "Measure simple alternatives beside each kernel: a sink-window that keeps as much, `hard`, `uniform`, and "
            "each branch of a kernel with a filter and of a hybrid.",
            True,
            flag="--controls/--no-controls",
        ),
    ]
    generate: Annotated[
        int,
        Option(
            "Continue prompts greedily by at most so many tokens, and count those until the swapped model differs.",
            64,
            least=0,
            most=65536,
        ),
    ]
    prompts: Annotated[
        Place,
        one_file("File of prompts to continue, one a line. Default: the first halves of 16 evaluated windows."),
    ]
    path: Annotated[
        Route, Option("How attention is computed: `auto` (the fastest), `eager` or `fused`.", "auto", metavar="PATH")
    ]
    allow_signed: Annotated[bool, Option("Allow odd powers, under which attention can be negative.", False)]
    calibration: Annotated[
        Words,
        several_files(
            "Text file for --fit, --heal, --budget and --ranks; repeatable: each gives its share. Default: windows of "
            "the evaluated text that are not evaluated.",
        ),
    ]
    save: Annotated[
        Place,
        Option(
            "Write the changed model to this folder.",
            panel=OUTPUT,
            metavar="DIR",
            check=fields.folder,
            call_only="written",
        ),
    ]
