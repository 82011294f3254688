"""Finds the sites of a model whose weights stay in their files, and says what reading them will cost."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from attnlens import hooks, models
from attnlens.errors import FAILURES, ModelError
from attnlens.hooks import Reached

BY_HAND = "the module computes its attention by hand, which is traced on numbers: the model has to be loaded"
"""Why a site is not read of a model of shapes."""


def of_shapes(loaded: models.Loaded, inputs: Mapping[str, Tensor]) -> list[Reached]:
    """The sites that these inputs reach in a model of shapes, all of them behind transformers' interface.

    Raises ModelError where a forward pass takes numbers (attention written by hand, masks made of hidden states).
    """
    try:
        found = hooks.survey(loaded.model, inputs)
    except (ModelError, *FAILURES) as error:
        first = error.problem if isinstance(error, ModelError) else models.first_line(error)
        raise ModelError(
            f"{loaded.info.id} can't be read from its files alone, as a pass through it takes numbers ({first})",
            "Leave out --from-files: this architecture has to be loaded.",
        ) from error
    if any(one.site.traced for one in found):
        raise ModelError(
            f"{loaded.info.id} can't be read from its files alone: {BY_HAND}.",
            "Leave out --from-files: this architecture has to be loaded.",
        )
    return found
