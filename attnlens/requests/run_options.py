"""Options of runs, each defined once with its help, bounds and default.

The fields of these typed dictionaries are the keywords of the Python functions and the options of the commands.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from attnlens.arguments import LARGEST, path, shown, word
from attnlens.choices import FDR, RELATIVE, Convention, Engine, Intervals, Part, Placement, Route, Sources, Sweep
from attnlens.errors import UsageError
from attnlens.requests import fields
from attnlens.requests.fields import Numbers, Option, Words
from attnlens.requests.healing import HealingRequest

WORK = "Work"
"""Help panel of these options."""
MOST_JOBS = 4096
SAY_SHARD = f"Write it as I/N with 1 ≤ I ≤ N ≤ {MOST_JOBS}, as in 1/3."
SIZE = re.compile(r"[1-9][0-9]{0,8}[KMG]i?B")
ARRAY = "SLURM_ARRAY_TASK_"
"""Prefix of the variables in which Slurm describes a job's task in an array."""


def shard(name: str, given: Any) -> str:
    """Return `I/N`; for `auto`, as Slurm or torchrun numbers this process. Raise UsageError for others."""
    if given == "auto":
        return _of_environment()
    index, slash, count = given.partition("/") if isinstance(given, str) else ("", "", "")
    known = slash and index.isdecimal() and count.isdecimal() and max(len(index), len(count)) <= len(str(MOST_JOBS))
    if not (known and 1 <= int(index) <= int(count) <= MOST_JOBS):
        raise UsageError(f"{name}={shown(given)} is no shard.", SAY_SHARD)
    return f"{int(index)}/{int(count)}"


def _of_environment() -> str:
    """Return the shard of a task in an even Slurm array, or of a torchrun process. Raise UsageError if there's none."""
    slurm = {name: os.environ.get(ARRAY + name, "") for name in ("ID", "COUNT", "MIN", "MAX", "STEP")}
    numbers = {name: int(value) for name, value in slurm.items() if value.isdecimal()}
    if "ID" in numbers and "COUNT" in numbers:
        step, first = numbers.get("STEP", 1) or 1, numbers.get("MIN", 0)
        place, remainder = divmod(numbers["ID"] - first, step)
        last = first + step * (numbers["COUNT"] - 1)
        if remainder or numbers.get("MAX", last) != last:
            raise UsageError("shard=auto takes arrays of evenly spaced tasks, as 0-9 or 0-8:2.", SAY_SHARD)
        return shard("shard", f"{place + 1}/{numbers['COUNT']}")
    rank, count = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    if rank.isdecimal() and count.isdecimal():
        return shard("shard", f"{int(rank) + 1}/{count}")
    raise UsageError(
        "shard=auto finds neither SLURM_ARRAY_TASK_ID and SLURM_ARRAY_TASK_COUNT nor RANK and WORLD_SIZE.", SAY_SHARD
    )


def memory_size(name: str, given: Any) -> str:
    """Return a size with its unit. Raise UsageError for others."""
    if not (isinstance(given, str) and SIZE.fullmatch(given)):
        raise UsageError(
            f"{name}={shown(given)} is no size of memory.", "Write a number and its unit, from KB to GiB: 8GB."
        )
    return given


class KeptRequest(TypedDict, total=False):
    """Options on keeping finished units, and on resuming from them."""

    work: Annotated[
        str | os.PathLike[str] | None,
        Option(
            "Keep finished units in this folder, or at an address such as `s3://bucket/folder`, until the report is "
            "written; the same command resumes from there.",
            panel=WORK,
            metavar="DIR",
            typed=str | None,
            check=path,
            call_only="written",
            shown="in the user's cache",
        ),
    ]
    resume: Annotated[
        bool, Option("Resume from units that are finished.", True, panel=WORK, flag="--resume/--no-resume")
    ]


class SpreadRequest(TypedDict, total=False):
    """Options for loading a model larger than the available memory."""

    from_files: Annotated[
        bool,
        Option(
            "With --source weights: read the weights of queries and keys from their files, layer by layer, without "
            "loading the model; done anyway where it does not fit into memory.",
            False,
            panel=WORK,
        ),
    ]
    device_map: Annotated[
        Literal["auto"] | None,
        Option(
            "`auto`: spread the model over all GPUs, the CPU's memory and the disk (accelerate), in its own type; "
            "weights are measured from their files.",
            panel=WORK,
            metavar="auto",
        ),
    ]
    max_cpu_memory: Annotated[
        str | None,
        Option(
            "With --device-map: what the weights may take of the CPU's memory, as in `8GB`; the rest is read from disk "
            "in every pass.",
            panel=WORK,
            metavar="SIZE",
            check=memory_size,
            shown="3/4 of what is free",
        ),
    ]


class EngineRequest(TypedDict, total=False):
    """Options on where the units of a run are computed."""

    engine: Annotated[
        Engine,
        Option(
            "Where units are computed: in processes here (`local`), or as tasks of a Ray cluster (`ray`).",
            "local",
            panel=WORK,
            metavar="NAME",
        ),
    ]
    address: Annotated[
        str | None,
        Option("Address of the Ray cluster, or `auto`.", panel=WORK, metavar="ADDRESS", check=path, call_only="read"),
    ]


class SharedRequest(KeptRequest, EngineRequest, total=False):
    """Additional options of runs whose units can be computed elsewhere."""

    shard: Annotated[
        str | None,
        Option(
            "Compute only the units of part I of N, counted from 1, as in `2/8`; `auto`: as Slurm's array or torchrun "
            "says. The same command without --shard computes what is missing and writes the report.",
            panel=WORK,
            metavar="I/N",
            check=shard,
        ),
    ]
    jobs: Annotated[
        int,
        Option(
            "How many units are computed at once, each by a process that opens the model itself.",
            1,
            panel=WORK,
            least=1,
            most=MOST_JOBS,
        ),
    ]


class WorkRequest(SharedRequest, SpreadRequest, total=False):
    """Work options of a run over one model, which need not be loaded as a whole."""


BASELINE = "Baseline"


class JudgingRequest(TypedDict, total=False):
    """Options on the strictness of a check."""

    allow_partial: Annotated[bool, Option("Check a report of which a part could not be analysed.", False)]
    relative: Annotated[
        float, Option("How far a head may be from the baseline, as a share of it.", RELATIVE, BASELINE, "NUMBER")
    ]
    absolute: Annotated[
        float | None,
        Option(
            "The same in the measure's own unit; the larger of both counts.",
            panel=BASELINE,
            metavar="NUMBER",
            shown="that share of the measure's range",
        ),
    ]
    fdr: Annotated[
        float, Option("Of the heads named by p-values, the share that may be named by chance.", FDR, BASELINE, "SHARE")
    ]


INPUT, OUTPUT, DANGEROUS = "Input", "Output", "Dangerous options"
"""Panels of the help, besides the default one."""
Place = str | os.PathLike[str] | None
"""Path, or another name of a location."""
DTYPES = ("auto", "float32", "float64", "bfloat16", "float16")


def one_file(said: str) -> Option:
    """Create an option that names a file."""
    return Option(said, panel=INPUT, metavar="FILE", typed=str | None, check=fields.file, call_only="read")


def several_files(said: str) -> Option:
    """Create an option that names one file each time and can be repeated."""
    # as paths, because typer then splits ATTNLENS_TEXT at os.pathsep instead of at spaces
    return Option(said, (), panel=INPUT, metavar="FILE", typed=list[Path] | None, call_only="read")


def new_folder(said: str, shown: str | None = None) -> Option:
    """Create an option that names a folder to write."""
    typed, check = str | None, fields.folder
    return Option(said, None, OUTPUT, "DIR", shown=shown, typed=typed, check=check, call_only="written")


class Loading(TypedDict, total=False):
    """Options for loading a model."""

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
    """Options on the input of a model, and for loading it."""

    text: Annotated[
        Words,
        several_files(
            "Text file, `-` for stdin, or `datasets:NAME[,config=C][,split=S][,column=T]`; repeatable (ATTNLENS_TEXT "
            f"joins files with `{os.pathsep}`). Default: built-in texts of three kinds; for `demo` King James."
        ),
    ]
    pairs: Annotated[
        Place,
        one_file(
            "File of text pairs, in the place of --text: one a line, a tab between both, joined by the tokenizer."
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
        int | None, Option("Window length in tokens.", panel=INPUT, least=2, shown="128, or the model's limit")
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
    """Additional options that select layers and heads."""

    layers: Annotated[Numbers | None, Option("Only these layers, as in `0-3,7`.", metavar="NUMBERS")]
    heads: Annotated[Numbers | None, Option("Only these heads, as in `0,5`.", metavar="NUMBERS")]


class SeriesRequest(ModelRequest, total=False):
    """Options on what is read of every checkpoint of a series."""

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
    """Options of a series of checkpoints."""


class InspectRequest(SeriesRequest, WorkRequest, total=False):
    """Options of `inspect`."""

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
    """Options of `compare`."""

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
    """Options of `swap_kernel`, without the kernels."""

    part: Annotated[
        Part | None,
        Option(
            "Only this part: `encoder`, `decoder`, `cross`; where there are several towers, `vision`, `audio`, `text`.",
            metavar="PART",
        ),
    ]
    sweep: Annotated[
        Sweep | None, Option("Swap each of the `heads` or `layers` alone too, and rank them.", metavar="WHAT")
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
        Any, one_file("With `--kernel rank`: take each key head's rank from a plan of --plan, and search for none.")
    ]
    eta: Annotated[
        float | None, Option("Weight of the KSVD regulariser when `primal` is healed.", metavar="NUMBER", shown="0.1")
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
        Place, one_file("File of prompts to continue, one a line. Default: the first halves of 16 evaluated windows.")
    ]
    path: Annotated[
        Route, Option("How attention is computed: `auto` (the fastest), `eager` or `fused`.", "auto", metavar="PATH")
    ]
    allow_signed: Annotated[bool, Option("Allow odd powers, under which attention can be negative.", False)]
    calibration: Annotated[
        Words,
        several_files(
            "Text file for --fit, --heal, --budget and --ranks; repeatable: each gives its share. Default: windows of "
            "the evaluated text that are not evaluated."
        ),
    ]
    save: Annotated[Place, new_folder("Write the changed model to this folder.")]
