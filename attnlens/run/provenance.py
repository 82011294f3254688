"""What a report says of the program that made it: versions, platform, memory."""

from __future__ import annotations

import platform
import resource
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import attnlens
from attnlens.records import Environment, Report, Tool

STATUS = Path("/proc/self/status")


def report_of(command: str, **found: Any) -> Report:
    """The report of a command; `found` are the fields that say what was found."""
    here = Environment(
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        platform=platform.platform(),
    )
    return Report(tool=tool(), command=command, environment=here, peak_memory_bytes=peak_memory(), **found)


def tool() -> Tool:
    """What writes the report."""
    return Tool(version=attnlens.__version__)


def peak_memory() -> int:
    """Largest resident memory of this process so far, in bytes.

    Linux's own high-water mark where there is one: getrusage's also counts the process that started this one.
    """
    for line in STATUS.read_text().splitlines() if STATUS.is_file() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
