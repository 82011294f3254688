"""How the work of a run is cut into units, where they are computed, and where what is finished is kept."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal, TypedDict

from attnlens.arguments import path, shown
from attnlens.choices import Engine
from attnlens.errors import UsageError
from attnlens.requests.fields import Option

WORK = "Work"
"""The panel of these options."""
MOST_JOBS = 4096
FROM_ENVIRONMENT = "auto"
SAY_SHARD = f"Write it as I/N with 1 ≤ I ≤ N ≤ {MOST_JOBS}, as in 1/3."
SIZE = re.compile(r"[1-9][0-9]{0,8}[KMG]i?B")
ARRAY = "SLURM_ARRAY_TASK_"
"""How the variables begin by which Slurm tells a job of an array which of its tasks it is."""


def shard(name: str, given: Any) -> str:
    """`I/N`; of `auto` the number and count that Slurm or torchrun gave this process. Raises UsageError for others."""
    if given == FROM_ENVIRONMENT:
        return _of_environment()
    index, slash, count = given.partition("/") if isinstance(given, str) else ("", "", "")
    known = slash and index.isdecimal() and count.isdecimal() and max(len(index), len(count)) <= len(str(MOST_JOBS))
    if not (known and 1 <= int(index) <= int(count) <= MOST_JOBS):
        raise UsageError(f"{name}={shown(given)} is no shard.", SAY_SHARD)
    return f"{int(index)}/{int(count)}"


def _of_environment() -> str:
    slurm = {name: os.environ.get(ARRAY + name, "") for name in ("ID", "COUNT", "MIN", "MAX", "STEP")}
    if slurm["ID"].isdecimal() and slurm["COUNT"].isdecimal():
        return _of_array({name: int(value) for name, value in slurm.items() if value.isdecimal()})
    rank, count = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    if rank.isdecimal() and count.isdecimal():
        return shard("shard", f"{int(rank) + 1}/{count}")
    raise UsageError(
        "shard=auto finds neither SLURM_ARRAY_TASK_ID and SLURM_ARRAY_TASK_COUNT nor RANK and WORLD_SIZE.", SAY_SHARD
    )


def _of_array(said: dict[str, int]) -> str:
    """The shard of a task of Slurm's array. Raises UsageError where its tasks are not evenly spaced."""
    step, first = said.get("STEP", 1) or 1, said.get("MIN", 0)
    place, rest = divmod(said["ID"] - first, step)
    if rest or said.get("MAX", first + step * (said["COUNT"] - 1)) != first + step * (said["COUNT"] - 1):
        raise UsageError("shard=auto takes arrays of evenly spaced tasks, as 0-9 or 0-8:2.", SAY_SHARD)
    return shard("shard", f"{place + 1}/{said['COUNT']}")


def memory_size(name: str, given: Any) -> str:
    """A size with its unit. Raises UsageError for others."""
    if not (isinstance(given, str) and SIZE.fullmatch(given)):
        raise UsageError(
            f"{name}={shown(given)} is no size of memory.", "Write a number and its unit, from KB to GiB: 8GB."
        )
    return given


class KeptRequest(TypedDict, total=False):
    """Where a run keeps what is finished, and whether it goes on from it."""

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
    """How a model is loaded that is larger than the memory at hand."""

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
    """Where the units of a run are computed."""

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
    """What a run whose units may be read elsewhere can be asked for, too."""

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
    """The same of one model, which need not be loaded as a whole."""
