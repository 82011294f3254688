"""Options of runs, each defined once with its help, bounds and default.

The fields of these classes are the keywords of the Python functions and the options of the commands.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import model_validator
from pydantic.fields import FieldInfo

from attnlens.arguments import LARGEST, checked_name, format_argument
from attnlens.choices import BACKENDS, FDR, LENGTH, MASKS, RELATIVE, WINDOWS, Engine, Intervals, Placement, Sources
from attnlens.errors import UsageError
from attnlens.requests import fields
from attnlens.requests.fields import Request, Whole, Words, checks, details, keyword, option, spelled, switch

INPUT, OUTPUT, WORK, BASELINE, DANGEROUS = "Input", "Output", "Work", "Baseline", "Dangerous options"  # Help panels
input_option, work_option, baseline_option = (partial(option, panel=panel) for panel in (INPUT, WORK, BASELINE))
dangerous_switch = partial(switch, panel=DANGEROUS, call_only="dangerous")
one_file = partial(option, panel=INPUT, metavar="FILE", call_only="read")  # Create an option that names a file
# as paths, because typer then splits ATTNLENS_TEXT at os.pathsep instead of at spaces
several_files = partial(one_file, default=(), typed=list[Path] | None)  # Create a repeatable option that names a file
new_folder = partial(option, panel=OUTPUT, metavar="DIR", call_only="written")  # Create an option for a folder to write


def is_recorded(field: FieldInfo) -> bool:
    """Return True if reports record the option, which excludes dangerous options, files, outputs and parallel work."""
    about = details(field)
    return not about.get("call_only") and about.get("panel") not in (OUTPUT, WORK)


MOST_JOBS = 4096
SAY_SHARD = f"Give the shard as I/N with 1 ≤ I ≤ N ≤ {MOST_JOBS}, e.g. 1/3."
ARRAY = "SLURM_ARRAY_TASK_"  # Prefix of the variables that identify a task of a Slurm job array


def _shard(name: str, value: object) -> str:
    """Return the shard `I/N`; for `auto`, take I and N from Slurm or torchrun. Raise UsageError for other values."""
    if value == "auto":
        return _shard_of_job()
    match = re.fullmatch("([0-9]{1,4})/([0-9]{1,4})", value) if isinstance(value, str) else None
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= MOST_JOBS:
        raise UsageError(f"{name}={format_argument(value)} is not a valid shard.", SAY_SHARD)
    return f"{int(match[1])}/{int(match[2])}"


def _shard_of_job() -> str:
    """Return the shard `I/N` of this Slurm array task or torchrun process. Raise UsageError if it is neither."""
    slurm = {name: os.environ.get(ARRAY + name, "") for name in ("ID", "COUNT", "MIN", "MAX", "STEP")}
    numbers = {name: int(value) for name, value in slurm.items() if value.isdecimal()}
    if "ID" in numbers and "COUNT" in numbers:
        step, first = numbers.get("STEP", 1) or 1, numbers.get("MIN", 0)
        place, remainder = divmod(numbers["ID"] - first, step)
        last = first + step * (numbers["COUNT"] - 1)
        if remainder or numbers.get("MAX", last) != last:
            raise UsageError(
                "shard=auto requires a Slurm job array with evenly spaced task ids, e.g. 0-9 or 0-8:2.", SAY_SHARD
            )
        return _shard("shard", f"{place + 1}/{numbers['COUNT']}")
    rank, count = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    if rank.isdecimal() and count.isdecimal():
        return _shard("shard", f"{int(rank) + 1}/{count}")
    raise UsageError(f"shard=auto requires {ARRAY}ID and {ARRAY}COUNT, or RANK and WORLD_SIZE, to be set.", SAY_SHARD)


Shard = Annotated[str, checks(_shard)]
MemorySize = Annotated[
    str, spelled("[1-9][0-9]{0,8}[KMG]i?B", "{} is not a memory size.", "Give a number and a unit, e.g. 8GB.")
]


class KeptRequest(Request):
    """Options for storing finished units of work and resuming from them."""

    work: fields.Place = work_option(
        "Folder, or address such as `s3://bucket/folder`, that stores finished units of work until the report is "
        "written. Repeat the command to resume.",
        metavar="DIR",
        call_only="written",
        shown="in the user's cache",
    )
    resume: bool = keyword("Resume from finished units.", True, panel=WORK)


class SpreadRequest(Request):
    """Options for loading a model larger than the available memory."""

    from_files: bool = keyword(
        "With source='weights': read the query and key weights from the model's files, one layer at a time. "
        "Automatic if the model does not fit into free memory, unless an adapter is given.",
        False,
    )
    device_map: Literal["auto"] | None = keyword(
        "`auto`: distribute the model over GPUs, CPU memory and disk (accelerate), and compute weights.* from files."
    )
    max_cpu_memory: MemorySize | None = keyword(
        "Maximum CPU memory for the weights with device_map, e.g. `8GB` (default: 3/4 of the free memory); the "
        "remaining weights are read from disk in each forward pass."
    )


class EngineRequest(Request):
    """Options that select where units of work are computed."""

    engine: Engine = work_option(
        "Run units of work in processes on this machine (`local`) or as tasks of a Ray cluster (`ray`).",
        "local",
        metavar="NAME",
    )
    address: fields.Place = keyword("Address of the Ray cluster, HOST:PORT.", panel=WORK)


class SharedRequest(KeptRequest, EngineRequest):
    """Additional options of runs whose units of work can be computed in other processes."""

    shard: Shard | None = work_option(
        "Compute only part I of N, e.g. `2/8`; `auto` takes I and N from Slurm or torchrun. The same command "
        "without --shard computes the remaining units and writes the report.",
        metavar="I/N",
    )
    jobs: Whole = work_option(
        "Number of units of work to compute in parallel, each in its own process.", 1, least=1, most=MOST_JOBS
    )


class WorkRequest(SharedRequest, SpreadRequest):
    """Options of a run that analyses one model, which may be loaded in parts."""


class CheckRequest(Request):
    """Options of `check`, except those for reading a model."""

    rules: fields.FilePlace = option(
        'TOML file with rules in a table `[check]`, e.g. `"tokens.entropy" = ["min > 0.05"]`.',
        metavar="FILE",
        shown="attnlens.toml, or [tool.attnlens.check] in pyproject.toml",
        call_only="read",
    )
    rule: Words = option(
        "Check this rule, e.g. `tokens.entropy: min > 0.05`; repeatable. If given, default rule files are ignored.",
        (),
        metavar="RULE",
        call_only="read",
    )
    baseline: fields.FilePlace = baseline_option(
        "Baseline file with the expected values of the heads.", metavar="FILE", call_only="read"
    )
    update_baseline: bool = switch(
        "Write the report's values to --baseline, as the new baseline.", panel=BASELINE, call_only="written"
    )
    recompute: Whole | None = option(
        "Verify this many heads by recomputing them from MODEL.", metavar="NUMBER", least=1
    )
    annotations: bool = switch(
        "Print at most ten GitHub annotations (failed rules and the worst heads), and write the step summary. Enabled "
        "by default in GitHub Actions.",
        panel=OUTPUT,
    )
    allow_partial: bool = switch("Accept a report that covers only part of the model.")
    relative: float = baseline_option(
        "Largest allowed relative deviation of a head's value from the baseline.", RELATIVE, metavar="NUMBER"
    )
    absolute: float | None = baseline_option(
        "Largest allowed absolute deviation of a head's value from the baseline. A head fails only if its deviation "
        "exceeds both --absolute and --relative.",
        metavar="NUMBER",
        shown="--relative times the measure's range; 0 if the range is unbounded",
    )
    fdr: float = baseline_option(
        "Maximum expected share of false alarms among the heads that fail (Benjamini–Hochberg). A head with standard "
        "errors fails only if its deviation is also significant at this rate.",
        FDR,
        metavar="RATE",
    )


DType = Literal["auto", "float32", "float64", "bfloat16", "float16"]
dtype_option = partial(
    option,
    "Data type of the weights: `auto`, `float32`, `float64`, `bfloat16` or `float16`. Measures of heads are "
    "always computed in float64.",
    metavar="TYPE",
)
device_option = partial(option, default="auto", metavar="DEVICE")
WINDOWS_HELP = "Number of windows (or lines) to read, in total over all texts."


class Loading(Request):
    """Options for loading a model."""

    device: fields.Device = device_option("Device for the model: `auto`, `cpu`, `cuda`, `cuda:1` or `mps`.")
    dtype: DType = dtype_option("auto")
    offline: bool = switch("Use local files only.", panel=INPUT)
    revision: fields.Word | None = keyword("Commit, tag or branch of a hub model.")
    adapter: fields.Place = input_option(
        "Merge this LoRA, rsLoRA or DoRA adapter (peft) into the model: a folder or a hub id.",
        metavar="DIR|ID",
        call_only="read",
    )
    trust_remote_code: bool = dangerous_switch("Run Python code from the model's repository.")
    allow_pickle: bool = dangerous_switch("Load `.bin` weights, which are pickles; only tensors are unpickled.")


PAIRS = ".tsv"  # File extension of a text with one pair of texts per line


class Feeding(Loading):
    """Options for loading a model and for choosing its input."""

    text: Words = several_files(
        "Text file to read; `-` for stdin; `FILE.tsv` with one pair of texts per line; or "
        "`datasets:NAME` for a dataset (optional suffixes: `,config=C` `,split=S` `,column=T`). Repeatable "
        f"(in ATTNLENS_TEXT, separate files with `{os.pathsep}`). Default: built-in texts."
    )
    pairs: fields.FilePlace = one_file(
        "File with one pair of texts per line, separated by a tab; replaces `text`.", python_only=True
    )
    image: Words = several_files(
        "Image file for a vision model; repeatable, one per sequence. Default: random images.", python_only=True
    )
    audio: Words = several_files(
        "Sound file (`.wav`) for an audio model; repeatable, one per sequence. Default: random sounds.",
        python_only=True,
    )
    length: Whole | None = input_option("Tokens per window.", least=2, shown=f"{LENGTH}, or the model's limit if lower")
    windows: Whole = input_option(
        f"{WINDOWS_HELP} Reading four times as many halves the standard errors.", WINDOWS, least=1
    )
    batch_size: Whole = work_option("Number of sequences per forward pass.", 8, least=1)
    pack: bool = input_option(
        "--pack: cut text into windows. --no-pack: read each line as one sequence.", True, flag="--pack/--no-pack"
    )
    placement: Placement = input_option(
        "Position of the windows in a text: evenly spaced (`spread`), at the start (`first`) or at random (`random`).",
        "spread",
        metavar="PLACE",
    )
    intervals: Intervals | None = keyword(
        "Population that errors and intervals describe: other `windows` of these texts, or other `texts` of the same "
        "kind (default: texts if there are at least five, else windows).",
        noun="unit of intervals",
    )
    allow_foreign_text: bool = switch(
        "Continue even if at least half of the text's tokens are unknown to the tokenizer.", panel=INPUT
    )
    seed: Whole = option("Random seed.", 0, least=0, most=LARGEST)

    @model_validator(mode="before")
    @classmethod
    def _separate_pairs(cls, options: dict[str, object]) -> dict[str, object]:
        texts = options.get("text", ())
        names = texts if isinstance(texts, list | tuple) else [texts]
        if not any(isinstance(name, str | os.PathLike) and str(name).endswith(PAIRS) for name in names):
            return options
        if len(names) > 1 or options.get("pairs") is not None:
            raise UsageError("A file of text pairs cannot be combined with other texts.", "Give only this file.")
        return {name: value for name, value in options.items() if name != "text"} | {"pairs": names[0]}


class ModelRequest(Feeding):
    """Additional options that select layers and heads."""

    layers: fields.Layers | None = option(
        "Analyse only these layers, e.g. `0-3,7`; `decoder.0-3` in models with several parts.", metavar="NUMBERS"
    )
    heads: fields.Numbers | None = option(
        "Analyse only heads with these numbers in each layer, e.g. `0,5`.", metavar="NUMBERS"
    )


class SeriesRequest(ModelRequest):
    """Options that select the analyses of a model, or of each checkpoint in a series."""

    source: Sources = option("Analyse `weights` (reads no text), `tokens` or `both`.", "both", metavar="SOURCE")
    analyzers: fields.AnalyzerNames = option(
        "Run only this analyzer; repeatable. `attnlens list analyzers` shows all.",
        (),
        flag="--analyzer",
        metavar="NAME",
    )
    select: fields.SelectionRule = keyword(
        "Tokens that a query selects (analyzer `selection`): the one with the largest score (`argmax`), or the fewest "
        "tokens whose attention weights sum to at least this value (`top-p:0.9`).",
        "argmax",
    )


class CheckpointsRequest(SharedRequest, SeriesRequest):
    """Options of a series of checkpoints."""


PLACES: dict[object, dict[str, object]] = {"spread": {"device_map": "auto"}, "files": {"from_files": True}}
"""Value of `device` that is not a single device → options that it stands for."""


class InspectRequest(WorkRequest, SeriesRequest):
    """Options of `inspect`."""

    device: fields.Device = device_option(
        "Device for the model: `auto`, `cpu`, `cuda`, `cuda:1` or `mps`; `spread`: distribute the model over all GPUs, "
        "CPU memory and disk; `files`: read the weights one layer at a time (with --source weights)."
    )
    show: Literal["selection", "attention"] | None = option(
        "`selection`: print selected tokens and support vectors (with --head). `attention`: draw the first "
        "window's attention in the HTML page (with --html).",
        metavar="WHAT",
    )

    @model_validator(mode="before")
    @classmethod
    def _place_weights(cls, options: dict[str, object]) -> dict[str, object]:
        return place_weights(options, PLACES)


def place_weights(options: dict[str, object], places: Mapping[object, dict[str, object]]) -> dict[str, object]:
    """Return the options; if the value of `device` is in `places`, replace `device` with the options it stands for."""
    place = options.get("device")
    if not isinstance(place, str) or place not in places:
        return options
    return {name: value for name, value in options.items() if name != "device"} | places[place]


class CompareRequest(SeriesRequest):
    """Options of `compare`."""

    device: fields.Device = device_option(
        "Device for the models: `auto`, `cpu`, `cuda`, `cuda:1` or `mps`; `files`: read both models' weights from "
        "their files, one layer at a time (with --source weights)."
    )
    from_files: bool = keyword(
        "With source='weights': read both models' weights from their files, with at most one layer of each in memory. "
        "Automatic for a model that does not fit into free memory and has no adapter.",
        False,
    )
    dtype: DType = dtype_option("float32")
    fdr: fields.Share = option(
        "Maximum expected share of false discoveries among the reported changes (Benjamini–Hochberg over heads × "
        "measures).",
        FDR,
        metavar="RATE",
    )

    @model_validator(mode="before")
    @classmethod
    def _place_weights(cls, options: dict[str, object]) -> dict[str, object]:
        return place_weights(options, {"files": PLACES["files"]})


def _listed(known: tuple[str, ...], noun: str, name: str, value: object) -> str:
    """Return the distinct names in `value`, separated by commas. Raise UsageError for an unknown name or no names."""
    names = value.replace(" ", "").split(",") if isinstance(value, str) else fields.words(name, value)
    for each in names:
        checked_name(noun, each, known)
    if not names:
        raise UsageError(f"--{name} is empty.", f"Choose from {', '.join(known)}, or leave out --{name}.")
    return ",".join(dict.fromkeys(names))


Backends = Annotated[str, checks(partial(_listed, BACKENDS, "attention backend"))]
Masks = Annotated[str, checks(partial(_listed, MASKS, "mask"))]


class DoctorRequest(ModelRequest):
    """Options of `doctor`, which by default reads little text and computes in double precision."""

    windows: Whole = input_option(WINDOWS_HELP, 2, least=1)
    backends: Backends | None = option(
        f"Compare these attention implementations, e.g. `eager,sdpa`. Choose from {', '.join(BACKENDS)}.",
        metavar="NAMES",
        shown="eager and sdpa; on a CUDA GPU, all that run there",
    )
    masks: Masks | None = option(
        f"Test these properties of the masks, e.g. `causal,cache`. Choose from {', '.join(MASKS)}.",
        metavar="NAMES",
        shown="those that the model declares",
    )
    dtype: DType = dtype_option("float64")
