"""Collects all that is compared with the original: each kernel at each stage, and each control once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from attnlens import hooks
from attnlens.choices import Route
from attnlens.kernels.state import HeadShape
from attnlens.models import Loaded
from attnlens.records import Site
from attnlens.run.outcomes.differences import Differences, Variant
from attnlens.run.swap.candidate import Candidate
from attnlens.run.swap.controls.alternatives import healed_far_part, one_window

EXACT: Route = "auto"
"""How controls are computed, whatever is asked for: a path that is asked for is the kernel's, and all are exact."""


Weights = Mapping[str, Tensor] | None
"""Healed weights by name, where there are any."""


class Changing(Protocol):
    """Makes a variant of swaps, and of weights beside them."""

    def __call__(self, swaps: hooks.Swaps, weights: Weights = None, path: Route | None = None) -> Variant:
        """The model with these kernels in place, and with these weights; by that path, or the one asked for."""


def prepare(
    candidates: Sequence[Candidate],
    shapes: Mapping[Site, HeadShape],
    loaded: Loaded,
    inputs: Mapping[str, Tensor],
    changing: Changing,
    *,
    controls: bool,
) -> None:
    """Find each candidate's state and controls, and leave those out that a site refuses on these inputs."""
    for candidate in candidates:
        candidate.weigh(shapes)
        candidate.controls = candidate.controls if controls else []
        for control in candidate.controls:
            control.refuse(loaded, inputs, partial(changing, path=EXACT))


def variants(candidates: Sequence[Candidate], changing: Changing) -> dict[object, Variant]:
    """Every candidate at every stage, by its number and stage, and every control that is not another's too."""
    found: dict[object, Variant] = {}
    for index, candidate in enumerate(candidates):
        for stage, swaps in candidate.stages.items():
            found[index, stage] = changing(swaps, candidate.weights if stage == "healed" else None)
    for candidate in candidates:
        found |= {one.key: changing(one.swaps, one.weights, path=EXACT) for one in candidate.controls if one.swaps}
    return found


def healed(candidate: Candidate, changing: Changing, shapes: Mapping[Site, HeadShape]) -> dict[object, Variant]:
    """The candidate as it was healed and, as one more control, a hybrid's far part; without `shapes` no control."""
    far = healed_far_part(candidate.last, candidate.weights, shapes) if shapes else None
    candidate.controls += [] if far is None else [far]
    found: dict[object, Variant] = {"healed": changing(candidate.last, candidate.weights)}
    return found if far is None else found | {far.key: changing(far.swaps, far.weights, path=EXACT)}


def keep_healed(candidate: Candidate, found: Mapping[object, Differences]) -> None:
    """Give the candidate what was measured of it, and of its far part, after healing."""
    candidate.found["healed"] = found["healed"]
    candidate.measured |= {one.key: found[one.key] for one in candidate.controls if one.weights}


def keep_differences(candidates: Sequence[Candidate], found: Mapping[object, Differences]) -> None:
    """Give each candidate what was measured of its stages and controls, and all the same window."""
    for index, candidate in enumerate(candidates):
        candidate.found |= {stage: found[index, stage] for stage in candidate.stages}
        candidate.measured = {one.key: found[one.key] for one in candidate.controls if one.swaps}
    windows = one_window([candidate.window for candidate in candidates], next(iter(found.values())).by_token)
    for candidate, window in zip(candidates, windows, strict=True):
        candidate.window = window


def keep_agreements(candidates: Sequence[Candidate], found: Mapping[object, dict[str, Any]]) -> None:
    """Give each candidate the agreements of its stages and controls."""
    for index, candidate in enumerate(candidates):
        candidate.agreements = {stage: found[index, stage] for stage in candidate.stages}
        for control in candidate.controls:
            control.agreement = found[control.key] if control.swaps else {}
