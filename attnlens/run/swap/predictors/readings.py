"""Reads inspect's measures of the heads that are swept, on the windows on which they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlens import models, registry
from attnlens.records import Settings
from attnlens.run import checks
from attnlens.run.inspect.collector import Collector
from attnlens.run.inspect.survey import Inspection
from attnlens.run.progress import silent
from attnlens.statistics import Design
from attnlens.texts import Batches

if TYPE_CHECKING:
    from jaxtyping import Float

    from attnlens.run.swap.sweep import Unit

CONSTANT = "the same in every head"


@dataclass(frozen=True)
class SweptMeasures:
    """The scalar measures of some heads."""

    values: dict[str, Float[Tensor, " units"]]
    """By name; NaN in heads without a value."""
    windows: dict[str, Float[Tensor, "windows units"]]
    """The same sequence by sequence, of those that are means over them."""
    reasons: dict[str, str]
    """Why a measure is in neither: no head has a value, or all have the same."""

    def of(self, places: Sequence[int]) -> SweptMeasures:
        """Those of some of the heads, by their places; without what is the same in all of these."""
        some = {name: value[list(places)] for name, value in self.values.items() if name not in self.reasons}
        alike = {name for name, value in some.items() if not bool((value[~value.isnan()].diff() != 0).any())}
        return SweptMeasures(
            {name: value for name, value in some.items() if name not in alike},
            {name: value[:, list(places)] for name, value in self.windows.items() if name in some.keys() - alike},
            self.reasons | dict.fromkeys(sorted(alike), CONSTANT),
        )


def head_measures(
    loaded: models.Loaded,
    batches: Batches,
    units: Sequence[Unit],
    settings: Settings,
    design: Design,
) -> SweptMeasures:
    """What `inspect` reads of these heads: one forward pass over the batches, and the weights of their sites."""
    wanted = registry.beside_sweeps()
    collector = Collector(settings.heads, design=design)
    inspection = Inspection(loaded, settings, wanted, collector, silent, {})
    inspection.read(checks.sites(loaded, batches.batches[0].inputs), {site for site, _ in units}, batches)
    values: dict[str, Tensor] = {}
    windows: dict[str, Tensor] = {}
    reasons: dict[str, str] = {}
    infos = [info for found in wanted for info in found.measures]
    for name in [info.name for info in infos if not info.curve and not info.labels]:
        read = [collector.drafts[site, head or 0].measures.get(name) for site, head in units]
        numbers = [torch.nan if one is None or one.value is None else one.value for one in read]
        values[name] = torch.tensor(numbers, dtype=torch.float64)
        if bool(values[name].isnan().all()):
            told = [one.reason for one in read if one is not None and one.reason]
            reasons[name] = told[0] if told else "no head has a value"
        elif all((site, name) in collector.windows for site, _ in units):
            rows = [collector.windows[site, name][:, head or 0] for site, head in units]
            windows[name] = torch.stack(rows, 1)
    return SweptMeasures(values, windows, reasons).of(range(len(units)))
