"""Finds the sites of a model whose weights stay in their files, and says what reading them will cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from attnlens import hooks, models
from attnlens.errors import FAILURES, ModelError
from attnlens.hooks import Reached

BY_HAND = "the module computes its attention by hand, which is traced on numbers: the model has to be loaded"
"""Why a site is not read of a model of shapes."""


def of_shapes(loaded: models.Loaded, inputs: Mapping[str, Tensor]) -> hooks.Surveyed:
    """What these inputs show of a model of shapes, whose attention is all behind transformers' interface.

    Raises ModelError where a forward pass takes numbers (attention written by hand, masks made of hidden states).
    """
    try:
        found = hooks.surveyed(loaded.model, inputs)
    except (ModelError, *FAILURES) as error:
        first = error.problem if isinstance(error, ModelError) else models.first_line(error)
        raise ModelError(
            f"{loaded.info.id} can't be read from its files alone, as a pass through it takes numbers ({first})",
            "Leave out --from-files or --device-map: this architecture has to be loaded.",
        ) from error
    if any(one.site.traced for one in found.reached):
        raise ModelError(
            f"{loaded.info.id} can't be read from its files alone: {BY_HAND}.",
            "Leave out --from-files or --device-map: this architecture has to be loaded.",
        )
    return found


def like(reached: Sequence[Reached], shapes: Sequence[Reached], loaded: models.Loaded) -> list[Reached]:
    """The sites of a model of shapes as those that were `reached` in the same model where it runs.

    Raises ModelError where they are not the same.
    """
    known = {(one.site.path, one.site.ordinal): one for one in shapes}
    wanted = [(one.site.path, one.site.ordinal) for one in reached]
    if list(known) != wanted:
        raise ModelError(
            f"{loaded.info.id} runs other attention than its shapes alone show.", "Leave out --device-map."
        )
    return [replace(known[place], site=one.site) for place, one in zip(wanted, reached, strict=True)]
