"""Sweeps heads, all of them or in the order of a measure, and tells what predicted their harm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attnlens.records import Effect, Prediction, Predictor, SweepOrder, Unswept
from attnlens.run.swap.predictors.joined import listed, predicted_by
from attnlens.run.swap.predictors.ordered import LEVEL, MISSED, SweepSearch, ordered
from attnlens.run.swap.predictors.readings import SweptMeasures
from attnlens.run.swap.sweep import Alone, Unit
from attnlens.statistics.remaining import FREEDOM
from attnlens.wording import counted

SweepSome = Callable[[Sequence[Unit]], Alone]
"""Swaps each of some heads alone."""


def all_swept(units: Sequence[Unit], alone: SweepSome, measures: SweptMeasures, seed: int) -> dict[str, Any]:
    """The fields of a Swap whose heads were all swept."""
    found = alone(units)
    return _fields(found.effects(seed), predicted_by(found, measures, seed), units, measures)


def swept_in_order(units: Sequence[Unit], alone: SweepSome, measures: SweptMeasures, seed: int) -> dict[str, Any]:
    """The fields of a Swap whose heads were swept in the order of a measure, as far as was needed.

    Where some were not swept, measures are compared over the heads drawn at random alone: the others were chosen by
    one of the measures, which would bias its correlation.
    """
    parts: list[Alone] = []

    def harm_of(places: list[int]) -> Tensor:
        parts.append(alone([units[place] for place in places]))
        return parts[-1].harms

    names = list(measures.values)
    empty = torch.zeros(0, len(units), dtype=torch.float64)
    search = ordered(torch.stack(list(measures.values.values())) if names else empty, harm_of, seed)
    found = parts[0]
    for part in parts[1:]:
        found = found.with_more(part)
    looked = parts[0] if search.left else found
    some = measures.of(search.swept[: search.drawn] if search.left else search.swept)
    predictors, prediction = predicted_by(looked, some, seed)
    prediction = prediction.model_copy(update={"order": _order(search, names, units)})
    return _fields(found.effects(seed), (predictors, prediction), units, measures)


def _order(search: SweepSearch, names: list[str], units: Sequence[Unit]) -> SweepOrder:
    """How the sweep went, as a record."""
    named = None if search.chosen is None else names[search.chosen]
    left = []
    for rank, place in enumerate(search.left):
        site, head = units[place]
        reason = f"{named} puts it at place {len(search.swept) + rank + 1} of {len(units)} by predicted harm"
        left.append(Unswept(layer=site.layer, head=head or 0, part=site.part, reason=reason))
    known = search.p_corrected == search.p_corrected
    return SweepOrder(
        drawn=search.drawn,
        measure=named,
        rho=None if named is None else search.rho,
        p_corrected=search.p_corrected if known else None,
        most=search.most,
        expected=search.expected if search.left else None,
        rule=_rule(search, named, len(units)),
        not_swept=left,
    )


def _rule(search: SweepSearch, named: str | None, heads: int) -> str:
    """By which rule it stopped, or why it did not."""
    most = f"the {search.most} most harmful" if search.most > 1 else "the most harmful head"
    if search.left:
        return (
            f"The sweep stopped where at most {MISSED} of {most} were expected among the heads left: Σ P(t > "
            f"(g(τ) − f(x))/s − 1/√m), τ the harm that is the last of {most} so far, g the harm's asinh in units of "
            f"its spread, f its monotone regression on {named}, m the heads that f pools at x, s the residuals' size, "
            f"t Student's with {FREEDOM} degrees of freedom."
        )
    if search.drawn == heads:
        return f"All heads were swept: {search.drawn} at least are drawn at random before any measure can order them."
    if named is None and search.p_corrected == search.p_corrected:
        return (
            f"All heads were swept: over the {search.drawn} drawn at random no measure predicts the harm (least p "
            f"{search.p_corrected:.2g} after correction; {LEVEL} is asked for)."
        )
    if named is None:
        return f"All heads were swept: the {search.drawn} drawn at random have no harm that differs between them."
    return _whole(search, named, most)


def _whole(search: SweepSearch, named: str, most: str) -> str:
    """Why a sweep in the order of a measure went on to the end."""
    if search.lacking:
        heads_lack = f"{counted(search.lacking, 'head')} {'lacks' if search.lacking == 1 else 'lack'}"
        return f"All heads were swept: {heads_lack} {named}, the measure that would order them."
    if search.diverged:
        lost = counted(search.diverged, "head")
        return f"All heads were swept: {lost} diverged, so that it can't be told how harmful those left are."
    if math.isinf(search.expected):
        return "All heads were swept: the harms so far do not say how harmful those left are."
    return (
        f"All heads were swept: in the order of {named} {search.expected:.2g} of {most} were expected among the last "
        f"ones left, more than {MISSED}."
    )


def _fields(
    sweep: list[Effect], found: tuple[list[Predictor], Prediction], units: Sequence[Unit], measures: SweptMeasures
) -> dict[str, Any]:
    """The effects; the predictors with each measure's values in the order of these; what was looked at."""
    at = {(site.layer, head): place for place, (site, head) in enumerate(units)}
    places = [at[effect.layer, effect.head] for effect in sweep]
    values = {name: listed(value[places]) for name, value in measures.values.items()}
    predictors, prediction = found
    filled = [one.model_copy(update={"values": values[one.measure]}) for one in predictors]
    return {"sweep": sweep, "predictors": filled, "prediction": prediction}
