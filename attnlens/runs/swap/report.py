"""The result of one kernel as a unit of work, and the report of a run from the results of its kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from attnlens.maths.statistics import Design
from attnlens.records import Control, Coverage, Plan, Report, Skipped, Stage, Summary, Swap, SwapBody
from attnlens.runs.differences import placed_windows
from attnlens.runs.outputs import FEWEST, TokenLosses
from attnlens.runs.progress import INTERRUPTED
from attnlens.runs.provenance import report_of
from attnlens.runs.swap.session import SwapSession


@dataclass(frozen=True)
class KernelResult:
    """The result of one kernel."""

    swap: Swap
    plan: Plan | None
    window: int | str
    """Window in keys beyond which losses are reported for this kernel, or why there is none."""
    notes: list[str]
    """Notes for the settings of the report."""
    losses: dict[str, TokenLosses]  # losses per predicted token, by stage or by the number of a control
    windows: dict[str, Tensor]  # values per window, by measure; one column per stage

    @property
    def value(self) -> dict[str, Any]:
        """The result as a unit's value, which can be stored."""
        return {
            "swap": self.swap.model_dump(),
            "plan": None if self.plan is None else self.plan.model_dump(),
            "window": self.window,
            "notes": self.notes,
            "losses": {owner: [each.before[0], each.after[0], each.back[0]] for owner, each in self.losses.items()},
            "windows": self.windows,
        }

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> KernelResult:
        """Build a result from a unit's value."""
        plan = None if value["plan"] is None else Plan.model_validate(value["plan"])
        losses = {owner: TokenLosses(*([part] for part in parts)) for owner, parts in value["losses"].items()}
        swap = Swap.model_validate(value["swap"])
        return cls(swap, plan, value["window"], value["notes"], losses, value["windows"])

    def with_window(self, window: int | str, design: Design, seed: int) -> Swap:
        """Return the kernel's record with the losses beyond `window` instead of those beyond its own window."""
        swap = self.swap
        if window == self.window or not isinstance(window, int):
            return swap

        def update(outcome: Stage | Control, owner: str) -> Stage | Control:
            if owner not in self.losses or outcome.loss is None:
                return outcome
            beyond = self.losses[owner].beyond(window, design, seed)
            reasons = {name: reason for name, reason in outcome.reasons.items() if name != "beyond_window"}
            if isinstance(beyond, str):
                reasons["beyond_window"] = beyond
            losses = None if isinstance(beyond, str) else beyond
            return outcome.model_copy(update={"beyond_window": losses, "reasons": reasons})

        stages = [update(stage, stage.name) for stage in swap.stages]
        controls = [update(control, str(number)) for number, control in enumerate(swap.controls)]
        last = stages[-1]
        reasons = {name: reason for name, reason in swap.reasons.items() if name != "beyond_window"}
        if "beyond_window" in last.reasons:
            reasons["beyond_window"] = last.reasons["beyond_window"]
        changes = {"stages": stages, "controls": controls, "beyond_window": last.beyond_window, "reasons": reasons}
        return swap.model_copy(update=changes)


def build_report(
    session: SwapSession, values: Mapping[str, Any], missing: Mapping[str, str], timings: Mapping[str, float]
) -> Report:
    """Build the report from the values of finished kernels; `missing` explains why others lack one."""
    by_name = {name: KernelResult.of(value) for name, value in values.items()}
    results = list(by_name.values())
    unfinished = [
        Skipped(site=f"kernel {kernel.spelling}", reason=missing.get(kernel.spelling, INTERRUPTED))
        for kernel in session.options.kernels
        if kernel.spelling not in by_name
    ]
    settings = session.settings
    design = Design.of(session.evaluated.parts or ("",) * session.evaluated.sequences, settings.intervals)
    # use the widest window with enough tokens for all kernels, so that their losses are over the same tokens
    first = next((losses for result in results for losses in result.losses.values()), TokenLosses())
    windows = [each.window for each in results if isinstance(each.window, int) and first.count(each.window) >= FEWEST]
    swaps = [each.with_window(max(windows, default=each.window), design, settings.seed) for each in results]
    columns = [{"kernel": name, "stage": stage.name} for name, each in by_name.items() for stage in each.swap.stages]
    by_measure = {name: torch.cat([each.windows[name] for each in results], 1) for name in results[0].windows}
    notes = dict.fromkeys(chain.from_iterable(each.notes for each in results))
    settings = settings.model_copy(update={"notes": [*settings.notes, *notes]})
    heads = sum(session.heads_of[site] if chosen is None else len(chosen) for site, chosen in session.chosen.items())
    skipped = [*session.idle, *unfinished]
    return report_of(
        session.command,
        "swap",
        model=session.loaded.info,
        settings=settings,
        coverage=Coverage(sites=len(session.chosen), heads=heads, analysed=heads, skipped=skipped),
        summary=Summary(identity_error=session.identity_error),
        swap=SwapBody(**dict(swaps[0]), others=swaps[1:], plan=results[0].plan),
        timings=dict(timings),
    ).with_windows(placed_windows(by_measure, columns, settings))
