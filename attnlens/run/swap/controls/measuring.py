"""Collects all that is compared with the original: a kernel at each stage, and its controls."""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

from torch import Tensor

from attnlens import hooks
from attnlens.choices import Route
from attnlens.kernels.state import HeadShape
from attnlens.models import Loaded
from attnlens.records import Site
from attnlens.run.outcomes.differences import Differences, Variant
from attnlens.run.swap.candidate import Candidate
from attnlens.run.swap.controls.alternatives import healed_far_part

EXACT: Route = "auto"
"""How controls are computed, whatever is asked for: a path that is asked for is the kernel's, and all are exact."""

Value = TypeVar("Value")
Weights = Mapping[str, Tensor] | None
"""Healed weights by name, where there are any."""


class Changing(Protocol):
    """Makes a variant of swaps, and of weights beside them."""

    def __call__(self, swaps: hooks.Swaps, weights: Weights = None, path: Route | None = None) -> Variant:
        """The model with these kernels in place, and with these weights; by that path, or the one asked for."""


def prepare(
    candidate: Candidate,
    shapes: Mapping[Site, HeadShape],
    loaded: Loaded,
    inputs: Mapping[str, Tensor],
    changing: Changing,
    *,
    controls: bool,
) -> None:
    """Find a candidate's state and controls, and leave those out that a site refuses on these inputs."""
    candidate.weigh(shapes)
    candidate.controls = candidate.controls if controls else []
    for control in candidate.controls:
        control.refuse(loaded, inputs, partial(changing, path=EXACT))


def variants(candidate: Candidate, changing: Changing, known: Container[object]) -> dict[object, Variant]:
    """The candidate at every stage, and every control by its key, without those that are `known`."""
    found: dict[object, Variant] = {
        stage: changing(swaps, candidate.weights if stage == "healed" else None)
        for stage, swaps in candidate.stages.items()
    }
    controls = [one for one in candidate.controls if one.swaps and one.key not in known]
    return found | {one.key: changing(one.swaps, one.weights, path=EXACT) for one in controls}


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


def keep_differences(candidate: Candidate, found: Mapping[object, Differences]) -> None:
    """Give the candidate what was measured of its stages and controls."""
    candidate.found |= {stage: found[stage] for stage in candidate.stages}
    candidate.measured = {one.key: found[one.key] for one in candidate.controls if one.swaps}


def keep_agreements(candidate: Candidate, found: Mapping[object, dict[str, Any]]) -> None:
    """Give the candidate the agreements of its stages and controls."""
    candidate.agreements = {stage: found[stage] for stage in candidate.stages}
    for control in candidate.controls:
        control.agreement = found[control.key] if control.swaps else {}


def common(candidate: Candidate, found: Mapping[object, Value]) -> dict[object, Value]:
    """What was found of the controls that another kernel may have, too: not of those with parameters of their own."""
    own = [one for one in candidate.controls if one.weights or any(swap.kernel.fitted for swap in one.swaps.values())]
    return {one.key: found[one.key] for one in candidate.controls if one not in own and one.key in found}
