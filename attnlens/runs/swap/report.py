"""Build the report of a run from the results of its kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from attnlens.maths.statistics import Design
from attnlens.records import Control, Coverage, Plan, Report, Skipped, Stage, Summary, Swap, SwapBody, Windows
from attnlens.runs.differences import COLUMNS
from attnlens.runs.outputs import FEWEST, TokenLosses
from attnlens.runs.progress import INTERRUPTED
from attnlens.runs.provenance import report_of
from attnlens.runs.swap.session import SwapSession

Part = TypeVar("Part", Stage, Control)


@dataclass(frozen=True)
class KernelResult:
    """The result of one kernel, as `KernelRun.run` returns it."""

    swap: Swap
    plan: Plan | None
    window: int | str  # keys beyond which losses are reported for this kernel, or why there is no number
    notes: list[str]  # notes for the settings of the report
    losses: dict[str, TokenLosses]  # losses per predicted token, by stage or by the number of a control
    windows: dict[str, Tensor]  # values per window, by measure; one column per stage

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> KernelResult:
        """Build a result from a unit's value."""
        records = {
            "swap": Swap.model_validate(value["swap"]),
            "plan": None if value["plan"] is None else Plan.model_validate(value["plan"]),
            "losses": {name: TokenLosses(*([part] for part in parts)) for name, parts in value["losses"].items()},
        }
        return cls(**{**value, **records})

    def with_window(self, window: int, design: Design, seed: int) -> Swap:
        """Return the kernel's record with the losses beyond `window` instead of those beyond its own window."""
        swap = self.swap

        def update(outcome: Part, owner: str) -> Part:
            if owner not in self.losses or outcome.loss is None:
                return outcome
            beyond = self.losses[owner].beyond(window, design, seed)
            reasons = {name: reason for name, reason in outcome.reasons.items() if name != "beyond_window"}
            if isinstance(beyond, str):
                return outcome.model_copy(
                    update={"beyond_window": None, "reasons": reasons | {"beyond_window": beyond}}
                )
            return outcome.model_copy(update={"beyond_window": beyond, "reasons": reasons})

        stages = [update(stage, stage.name) for stage in swap.stages]
        last = stages[-1]
        changes = {
            "stages": stages,
            "controls": [update(control, str(number)) for number, control in enumerate(swap.controls)],
            "beyond_window": last.beyond_window,
            "reasons": {name: reason for name, reason in swap.reasons.items() if name != "beyond_window"}
            | {name: reason for name, reason in last.reasons.items() if name == "beyond_window"},
        }
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
    window = max(windows, default=None)
    swaps = [
        each.swap if window in (None, each.window) else each.with_window(window, design, settings.seed)
        for each in results
    ]
    columns = [{"kernel": name, "stage": stage.name} for name, each in by_name.items() for stage in each.swap.stages]
    places = [(text.name, number) for text in settings.texts for number in text.windows]
    measures = [name for name in COLUMNS if name in results[0].windows and places]  # none if windows are not numbered
    by_measure = {name: torch.cat([each.windows[name] for each in results], 1) for name in measures}
    notes = dict.fromkeys(chain.from_iterable(each.notes for each in results))
    heads = sum(session.heads_of[site] if chosen is None else len(chosen) for site, chosen in session.chosen.items())
    return report_of(
        session.command,
        "swap",
        model=session.loaded.info,
        settings=settings.model_copy(update={"notes": [*settings.notes, *notes]}),
        coverage=Coverage(sites=len(session.chosen), heads=heads, analysed=heads, skipped=[*session.idle, *unfinished]),
        summary=Summary(identity_error=session.identity_error),
        swap=SwapBody(**dict(swaps[0]), others=swaps[1:], plan=results[0].plan),
        timings=dict(timings),
    ).with_windows(Windows(places if measures else [], columns, by_measure))
