"""What a kernel's unit of work holds, and the report of a run put together from them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from attnlens.engines.readers import OTHERS
from attnlens.errors import FAILURES, ModelError
from attnlens.records import (
    Control,
    Coverage,
    ModelInfo,
    Plan,
    Report,
    Settings,
    ShardPart,
    Skipped,
    Stage,
    Summary,
    Swap,
)
from attnlens.records.windows import Windows
from attnlens.run.outcomes.differences import PREDICTED, STATES, placed_windows
from attnlens.run.outcomes.outputs import TokenLosses
from attnlens.run.progress import INTERRUPTED
from attnlens.run.provenance import report_of
from attnlens.run.swap.candidate import Candidate
from attnlens.run.swap.controls import one_window
from attnlens.statistics import Design
from attnlens.unit_files import key_of, refused

SUFFIX = ".kernel"
FORM = "attnlens kernel 1"
"""The name in a file's metadata of what is no tensor."""
SIDES = ("before", "after", "back")
"""What is kept of each token: its loss under the original and the changed model, and how far back its evidence is."""


@dataclass(frozen=True)
class KernelUnit:
    """A kernel as a unit of work."""

    name: str
    """Its spelling."""


class KernelFacts(BaseModel):
    """What is told of one kernel."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    swap: Swap
    plan: Plan | None
    window: int | str
    """Beyond how many keys evidence may lie, or why there is no such number, of this kernel alone."""
    notes: list[str]
    """On the run."""


@dataclass(frozen=True)
class KernelReading:
    """What was found of one kernel."""

    facts: KernelFacts
    losses: dict[str, TokenLosses]
    """The losses of each predicted token, by stage, and by the number of a control."""
    windows: dict[str, Tensor]
    """What each window read, a column a stage."""

    @property
    def sound(self) -> bool:
        """Whether its parts fit to each other: one that is read from a file may lie."""
        shapes = {tuple(part.shape) for one in self.losses.values() for part in (*one.before, *one.after, *one.back)}
        stages = len(self.facts.swap.stages)
        return (
            len(shapes) <= 1
            and all(part.dim() == 2 and part.shape[1] == stages for part in self.windows.values())
            and all(len({*names} & self.windows.keys()) in (0, len(names)) for names in (PREDICTED, STATES))
        )


class SwapFrame(BaseModel):
    """What is known of a run before its kernels are read: all that a report needs beside them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    versions: dict[str, str]
    """Of the program, torch and transformers."""
    options: dict[str, str]
    """What was asked for."""
    content: str
    """A hash of the configs, of all that is fed, of the plan given, and of the kernels' and analyzers' own code."""
    kernels: list[str]
    """Their spellings, in the order asked for."""
    model: ModelInfo
    settings: Settings
    parts: list[str]
    """The text of every sequence."""
    sites: int
    heads: int
    """How many are swapped."""
    idle: list[Skipped]
    """Attention that the evaluated input does not run."""
    identity_error: float

    @property
    def facts(self) -> dict[str, Any]:
        """All that determines what its units find."""
        facts = self.model_dump(mode="json", exclude={"idle", "identity_error"})
        facts["model"].pop("id")  # a folder that was moved holds the same model
        facts["settings"].pop("notes")  # they say how the run came about
        return facts

    @property
    def key(self) -> str:
        """What names the run: a hash of these."""
        return key_of(self.facts)

    @property
    def sound(self) -> bool:
        """Whether it has kernels, each once: one that is read from a file may lie."""
        return 0 < len(self.kernels) == len(set(self.kernels))

    @property
    def units(self) -> list[KernelUnit]:
        """The kernels, in their order."""
        return [KernelUnit(kernel) for kernel in self.kernels]


def losses_of(candidate: Candidate) -> dict[str, TokenLosses]:
    """The token losses of a candidate's stages and controls, of causal models."""
    controls = {str(n): candidate.measured[one.key] for n, one in enumerate(candidate.controls) if one.swaps}
    found = {**candidate.found, **controls}
    return {name: one.by_token.joined() for name, one in found.items() if one.by_token.before}


def packed(reading: KernelReading) -> bytes:
    """A reading as a safetensors file: its tensors, and the rest as JSON among its metadata, with all digits."""
    tensors = {f"windows {name}": part for name, part in reading.windows.items()}
    for owner, losses in reading.losses.items():
        tensors |= {f"{side} {owner}": getattr(losses, side)[0] for side in SIDES}
    told = json.dumps(reading.facts.model_dump())
    return save({name: part.contiguous() for name, part in tensors.items()}, {FORM: told})


def unpacked(content: bytes, where: str) -> KernelReading:
    """The reading that a file holds. Raises OutputError where it holds none."""
    try:
        tensors = load(content)
        length = int.from_bytes(content[:8], "little")
        told = json.loads(content[8 : 8 + length])["__metadata__"][FORM]
        facts = KernelFacts.model_validate_json(told)
        named = {tuple(name.split(" ", 1)): part for name, part in tensors.items()}
        owners = [owner for side, owner in named if side == "before"]
        losses = {owner: TokenLosses(*([named[side, owner]] for side in SIDES)) for owner in owners}
        windows = {name: part for (side, name), part in named.items() if side == "windows"}
    except (SafetensorError, ValidationError, *FAILURES):
        raise refused(where) from None
    reading = KernelReading(facts, losses, windows)
    if not reading.sound:
        raise refused(where)
    return reading


def swap_report(
    frame: SwapFrame,
    found: Mapping[KernelUnit, KernelReading],
    timings: Mapping[str, float],
    missing: Mapping[KernelUnit, str] | None = None,
    part: ShardPart | None = None,
) -> Report:
    """The report of a run whose kernels were read so; those without a reading have a reason.

    Raises ModelError where none could be read.
    """
    reasons = missing or {}
    done = {unit: found[unit] for unit in frame.units if unit in found}
    if not done:
        reason = next(reason for reason in reasons.values() if reason != OTHERS)
        raise ModelError(f"No kernel could be measured: {reason}.", "Run it again; what is finished is kept.")
    late = [
        Skipped(site=f"kernel {unit.name}", reason=reasons.get(unit, INTERRUPTED))
        for unit in frame.units
        if unit not in found
    ]
    for unit, reading in done.items():
        if any(len(part) != len(frame.parts) for part in reading.windows.values()):
            raise refused(f"The unit of {unit.name}")
    swaps = _of_one_window(list(done.values()), Design.of(frame.parts, frame.settings.intervals), frame.settings.seed)
    notes = dict.fromkeys(chain.from_iterable(reading.facts.notes for reading in done.values()))
    settings = frame.settings.model_copy(update={"notes": [*frame.settings.notes, *notes]})
    return report_of(
        "swap-kernel",
        model=frame.model,
        settings=settings,
        coverage=Coverage(sites=frame.sites, heads=frame.heads, analysed=frame.heads, skipped=[*frame.idle, *late]),
        summary=Summary(identity_error=frame.identity_error),
        swap=swaps[0],
        more_swaps=swaps[1:],
        plan=next(iter(done.values())).facts.plan,
        timings=dict(timings),
        part=part,
    ).with_windows(_windows(done, settings))


def _windows(done: Mapping[KernelUnit, KernelReading], settings: Settings) -> Windows:
    """What each window read, by kernel and stage."""
    units = [
        {"kernel": unit.name, "stage": stage.name} for unit, one in done.items() for stage in one.facts.swap.stages
    ]
    parts = [one.windows for one in done.values()]
    columns = {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}
    return placed_windows(columns, units, settings)


def _of_one_window(readings: Sequence[KernelReading], design: Design, seed: int) -> list[Swap]:
    """The records, whose losses beyond a window are all beyond the same, so that they are of the same tokens."""
    first = next((losses for reading in readings for losses in reading.losses.values()), TokenLosses())
    windows = one_window([reading.facts.window for reading in readings], first)
    return [_with_window(*of, design, seed) for of in zip(readings, windows, strict=True)]


def _with_window(reading: KernelReading, window: int | str, design: Design, seed: int) -> Swap:
    """A record with its losses beyond that window, in the place of the kernel's own."""
    swap = reading.facts.swap
    if window == reading.facts.window or not isinstance(window, int):
        return swap

    def placed(outcome: Stage | Control, owner: str) -> Stage | Control:
        if owner not in reading.losses or outcome.loss is None:
            return outcome
        found = reading.losses[owner].beyond(window, design, seed)
        reasons = {name: reason for name, reason in outcome.reasons.items() if name != "beyond_window"}
        if isinstance(found, str):
            return outcome.model_copy(update={"beyond_window": None, "reasons": reasons | {"beyond_window": found}})
        return outcome.model_copy(update={"beyond_window": found, "reasons": reasons})

    stages = [placed(stage, stage.name) for stage in swap.stages]
    controls = [placed(one, str(number)) for number, one in enumerate(swap.controls)]
    last = stages[-1]
    why = {name: reason for name, reason in last.reasons.items() if name == "beyond_window"}
    reasons = {name: reason for name, reason in swap.reasons.items() if name != "beyond_window"} | why
    update = {"stages": stages, "controls": controls, "beyond_window": last.beyond_window, "reasons": reasons}
    return swap.model_copy(update=update)
