"""What is found of one kernel, the value of its unit of work, and the report of a run put together from the units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from attnlens.records import Control, Coverage, Plan, Report, Settings, Skipped, Stage, Summary, Swap
from attnlens.records.report import Windows
from attnlens.run.outcomes.differences import placed_windows
from attnlens.run.outcomes.outputs import TokenLosses
from attnlens.run.provenance import report_of
from attnlens.run.swap.candidate import Candidate
from attnlens.run.swap.controls import one_window
from attnlens.runs.progress import INTERRUPTED
from attnlens.statistics import Design

if TYPE_CHECKING:
    from attnlens.run.swap.session import Swapping


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
    def value(self) -> dict[str, Any]:
        """The same as the value of a unit of work."""
        losses = {owner: [losses.before[0], losses.after[0], losses.back[0]] for owner, losses in self.losses.items()}
        return {"facts": self.facts.model_dump(), "losses": losses, "windows": self.windows}

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> KernelReading:
        """Return the reading that is the value of a unit of work."""
        losses = {owner: TokenLosses(*([part] for part in parts)) for owner, parts in value["losses"].items()}
        return cls(KernelFacts.model_validate(value["facts"]), losses, value["windows"])


def losses_of(candidate: Candidate) -> dict[str, TokenLosses]:
    """The token losses of a candidate's stages and controls, of causal models."""
    controls = {str(n): candidate.measured[one.key] for n, one in enumerate(candidate.controls) if one.swaps}
    found = {**candidate.found, **controls}
    return {name: one.by_token.joined() for name, one in found.items() if one.by_token.before}


def swap_report(
    session: Swapping, values: Mapping[str, Any], missing: Mapping[str, str], timings: Mapping[str, float]
) -> Report:
    """Return the report of a run whose kernels' units have these values; the others have a reason, or none yet."""
    done = {name: KernelReading.of(value) for name, value in values.items()}
    spellings = [kernel.spelling for kernel in session.options.kernels]
    late = [
        Skipped(site=f"kernel {name}", reason=missing.get(name, INTERRUPTED)) for name in spellings if name not in done
    ]
    parts = session.evaluated.parts or ("",) * session.evaluated.sequences
    swaps = _of_one_window(list(done.values()), Design.of(parts, session.settings.intervals), session.settings.seed)
    notes = dict.fromkeys(chain.from_iterable(reading.facts.notes for reading in done.values()))
    settings = session.settings.model_copy(update={"notes": [*session.settings.notes, *notes]})
    heads = sum(session.heads_of[site] if chosen is None else len(chosen) for site, chosen in session.chosen.items())
    return report_of(
        "swap-kernel",
        model=session.loaded.info,
        settings=settings,
        coverage=Coverage(sites=len(session.chosen), heads=heads, analysed=heads, skipped=[*session.idle, *late]),
        summary=Summary(identity_error=session.identity_error),
        swap=swaps[0],
        more_swaps=swaps[1:],
        plan=next(iter(done.values())).facts.plan,
        timings=dict(timings),
    ).with_windows(_windows(done, settings))


def _windows(done: Mapping[str, KernelReading], settings: Settings) -> Windows:
    """What each window read, by kernel and stage."""
    units = [{"kernel": name, "stage": stage.name} for name, one in done.items() for stage in one.facts.swap.stages]
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
