"""Record how a report was created: versions, platform, peak memory, and a hash of inputs and code."""

from __future__ import annotations

import inspect
import json
import platform
import resource
import sys
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers

import attnlens
from attnlens.analyzers.registry import Analyzer, Gathering
from attnlens.kernels.registry import KernelInfo
from attnlens.models import texts
from attnlens.models.hooks import SiteCall
from attnlens.models.loading import Loaded
from attnlens.records import Environment, Kind, Tool
from attnlens.report import findings
from attnlens.report.report import Report
from attnlens.report.shapes import Shapes


def hash_content(
    loaded: Loaded, site_calls: Iterable[SiteCall], fed: texts.Batches | None, analyzers: Iterable[Analyzer | Gathering]
) -> str:
    """Hash the model's config, code and adapter, a sample of weights left in files, the inputs and the analyzers."""
    config = {name: value for name, value in loaded.model.config.to_dict().items() if name != "_name_or_path"}
    digest = sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for file in sorted(loaded.folder.glob("*.py")) if loaded.folder is not None else ():
        digest.update(file.read_bytes())
    if loaded.info.adapter is not None:
        digest.update(loaded.info.adapter.model_dump_json().encode())
    if loaded.deferred is not None:
        digest.update(loaded.deferred.sample(each.module for each in site_calls))
    for batch in fed.batches if fed is not None else ():
        for name, part in sorted(batch.inputs.items()):
            digest.update(f"{name} {part.dtype} {tuple(part.shape)}".encode())
            digest.update(part.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    for analyzer in analyzers:
        digest.update(read_code(analyzer))
    return digest.hexdigest()


def read_code(plugin: Analyzer | Gathering | KernelInfo) -> bytes:
    """Return the source file of an analyzer or kernel as bytes, or its bytecode if there is no file."""
    function: Any = inspect.unwrap(plugin.begin if isinstance(plugin, Gathering) else plugin.function)
    source = inspect.getsourcefile(function) if inspect.isfunction(function) or inspect.isclass(function) else None
    if source is not None and Path(source).is_file():
        return Path(source).read_bytes()
    code = getattr(function, "__code__", None)  # for a function defined in a notebook
    return repr(code and (code.co_code, code.co_consts, code.co_names)).encode()


STATUS = Path("/proc/self/status")  # on Linux, contains this process's peak memory; getrusage includes the parent's


def assemble_report(command: str, kind: Kind, **results: Any) -> Report:
    """Build the report of a command from its results; add versions, platform, peak memory and findings."""
    libraries = {"torch": torch.__version__, "transformers": transformers.__version__}
    environment = Environment(python=platform.python_version(), platform=platform.platform(), **libraries)
    run = {"command": command, "kind": kind, "environment": environment, "peak_memory_bytes": peak_memory()}
    report = Report(tool=tool(), **run, **results)
    return report.model_copy(update={"findings": findings.find(Shapes(report))})


def tool() -> Tool:
    """Return the name and version of the program that writes the report."""
    return Tool(version=attnlens.__version__)


def peak_memory() -> int:
    """Return this process's peak resident memory in bytes."""
    for line in STATUS.read_text().splitlines() if STATUS.is_file() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
