"""Choose the device of a model, spread a model over devices, and measure free memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from attnlens.errors import ModelError, TooLargeError, UsageError
from attnlens.models.loading.locate import Location
from attnlens.models.loading.stored import Stored, count_numbers
from attnlens.requests import SpreadRequest
from attnlens.wording import format_count

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


MEMINFO = Path("/proc/meminfo")
OWN_GROUPS, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
CONTROLLERS = {
    "": ("", ("memory.max", "memory.current", "inactive_file")),
    "memory": ("memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
}
"""Folder under GROUPS, and names of the limit, usage and file-page count in it, keyed by Linux's controller name."""
GIB = 2**30


def free_memory() -> int | None:
    """Return how many bytes this process can still allocate or, if unknown, the size of RAM; None if also unknown."""
    limits = [1024 * size for size in _read_counts(MEMINFO, "MemAvailable:")]
    for line in OWN_GROUPS.read_text().splitlines() if OWN_GROUPS.is_file() else ():
        _, controllers, path = line.split(":", 2)
        for controller in {*controllers.split(",")} & CONTROLLERS.keys():
            folder, (limit, usage, file_pages) = CONTROLLERS[controller]
            group = GROUPS / folder / path.lstrip("/")
            # the limits of parent groups, such as a batch job's, apply too; a container sees its own group as the root
            for each in (each for each in (group, *group.parents) if each.is_relative_to(GROUPS / folder)):
                with suppress(OSError, ValueError):  # no such file, or the limit is "max"
                    available = int((each / limit).read_text()) - int((each / usage).read_text())
                    # usage includes cached file pages, which the kernel frees on demand
                    limits.append(available + sum(_read_counts(each / "memory.stat", file_pages)))
    if not limits and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(limits, default=None)


def _read_counts(file: Path, name: str) -> list[int]:
    """Return the number in each line that starts with `name` in a file of /proc or a cgroup; [] if there is no file."""
    lines = file.read_text().splitlines() if file.is_file() else ()
    return [int(words[1]) for words in map(str.split, lines) if words[:1] == [name]]


def refuse_too_large(place: Location, stored: Mapping[str, Stored], dtype: torch.dtype) -> None:
    """Raise TooLargeError if the tensors, converted to `dtype`, do not fit into free memory."""
    needed, free = count_numbers(stored) * dtype.itemsize, free_memory()
    if free is not None and needed > free:
        size = f"{needed / GIB:.1f} GiB of memory as {str(dtype).removeprefix('torch.')}"
        raise TooLargeError(
            f"{place.id} needs {size}, but only {free / GIB:.1f} GiB is free.",
            "Choose a smaller model, or free memory. `attnlens inspect` can also read the weights from their files "
            "(--source weights --device files) or run the model from disk (--device spread).",
        )


def choose_device(name: str) -> torch.device:
    """Return the device `name`; `auto` is the first available of cuda, mps, cpu. Raises ModelError if none exists."""
    import torch

    counts = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    device = torch.device(next((kind for kind in counts if counts[kind]), "cpu") if name == "auto" else name)
    if device.type in counts and (device.index or 0) >= counts[device.type]:
        present = format_count(counts[device.type], f"{device.type.upper()} device")
        problem = f"This machine has no {name}: it has {present}."
        raise ModelError(problem, "Choose --device auto or --device cpu.")
    return device


def check_device_map(options: Mapping[str, object]) -> None:
    """Raise UsageError if options of `load` contradict device_map, or if max_cpu_memory is set without device_map."""
    SpreadRequest.model_validate({name: options[name] for name in SpreadRequest.model_fields})
    if options["device_map"] is None and options["max_cpu_memory"] is not None:
        raise UsageError("max_cpu_memory requires device_map.", "Add device_map='auto' (--device spread).")
    defaults = {"device": "auto", "from_files": False, "adapter": None}
    others = [name for name, default in defaults.items() if options[name] != default]
    if options["device_map"] is not None and others:
        problem = f"{others[0]} can't be combined with device_map (--device spread)."
        raise UsageError(problem, f"Omit {others[0]} or device_map.")


def device_of_inputs(model: PreTrainedModel) -> torch.device:
    """Return the device of the model's first parameter that is not on `meta`; the CPU if there is none."""
    import torch

    return next((part.device for part in model.parameters() if not part.is_meta), torch.device("cpu"))


def spread_over_devices(max_cpu_memory: str | None) -> dict[str, object]:
    """Return `from_pretrained` options that use GPUs, memory and disk. Raises UsageError if accelerate is missing."""
    try:
        from accelerate.utils import convert_file_size_to_int, get_max_memory
    except ImportError:
        problem = "--device spread needs accelerate, which is not installed."
        raise UsageError(problem, 'Run: pip install "attnlens[big]"') from None
    limits = get_max_memory()
    free = free_memory() or limits["cpu"]
    # a quarter of the free memory is left for forward passes and measures
    limits["cpu"] = int(0.75 * free) if max_cpu_memory is None else convert_file_size_to_int(max_cpu_memory)
    return {"device_map": "auto", "max_memory": limits}


def format_devices(model: PreTrainedModel) -> str:
    """Return the model's device, or the devices over which it is spread, as text for a report."""
    spread = getattr(model, "hf_device_map", None)
    return str(device_of_inputs(model)) if spread is None else ", ".join(sorted(set(map(str, spread.values()))))
