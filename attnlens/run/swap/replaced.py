"""Replaces the kernel of a model in memory around the user's own code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnlens import hooks, requests, texts
from attnlens.arguments import public, switch, word
from attnlens.choices import Part
from attnlens.errors import TextError, UsageError
from attnlens.kernels import parsed
from attnlens.records import PARTS
from attnlens.registry import checked_name
from attnlens.run import checks
from attnlens.run.in_memory import at_rest, held_model, tensors
from attnlens.run.swap.sites import chosen_sites, idle_sites, refuse_crossing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from attnlens.models import Loaded


@public
def replaced(
    model: PreTrainedModel | Loaded,
    kernel: str,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    part: Part | None = None,
    batch: Mapping[str, Any] | None = None,
    allow_signed: bool = False,
) -> AbstractContextManager[hooks.CallCounter]:
    """Attention is softmax(log k + mask) v, with k of that spelling, in every forward pass inside the `with` block.

        with attnlens.replaced(model, "rbf:gamma=1", layers=[2, 3]):
            loss = model(**batch, labels=batch["input_ids"]).loss

    `layers`, `heads` and `part` (encoder, decoder, cross, or a tower) name the attention that is replaced, None all of
    it; the rest keeps the model's own kernel. The sites are found on made-up inputs, or on a `batch` of its own,
    which some models need. Before the block, the model must give the same outputs when its own attention is recomputed,
    and run with the new kernel. The block's value counts, in `calls`, how often each module was reached. At the end the
    model's own attention is back, after an exception too.

    Raises UsageError for a kernel that makes no sense, needs calibration text or has no meaning at a site, ModelError
    for attention out of reach, IdentityError; and at the end of the block ModelError where a site was never reached.
    """
    new = parsed(word("kernel", kernel), allow_signed=switch("allow_signed", allow_signed))
    if new.needs_fit:
        raise UsageError(
            f"{new.info.name} is fitted to calibration text, of which there is none here.",
            "Fit and save it with attnlens.swap_kernel(…, save=folder); attnlens.load_swapped(folder) runs it.",
        )
    layers, heads = requests.numbers("layers", layers), requests.numbers("heads", heads)
    if part is not None:
        checked_name("part", part, PARTS)
    loaded = held_model(model)
    with at_rest(loaded.model), torch.no_grad():
        if batch is None:
            try:
                inputs: Mapping[str, Tensor] = texts.placeholder(loaded, 2, seed=0).batches[0].inputs
            except TextError as error:
                raise UsageError(error.problem, "Give batch=, inputs of the model's own by name.") from None
        else:
            inputs = tensors(loaded.model, batch)
        survey = checks.surveyed(loaded, inputs, made_up=batch is None)
        checks.proven_whole(loaded, inputs)
        chosen = chosen_sites(survey.reached, layers, heads, part)
        idle_sites(survey, layers)  # refuses attention out of reach
        refuse_crossing(new, list(chosen))
        sites = tuple(found.site for found in survey.reached)
        swaps = {site: hooks.Replacement(new, its) for site, its in chosen.items()}
        with hooks.replace(loaded.model, sites, swaps):
            hooks.forward(loaded.model, inputs)
    return hooks.replace(loaded.model, sites, swaps)
