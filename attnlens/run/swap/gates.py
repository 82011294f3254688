"""Checks a swapped model for leaks from the future and from padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers.utils.generic import ModelOutput

from attnlens import hooks, texts
from attnlens.errors import IdentityError
from attnlens.models import Loaded
from attnlens.records import Site
from attnlens.run.outcomes.differences import Variant

TOLERANCE = hooks.IDENTITY_TOLERANCE
PADDING = 4
"""Tokens of padding that are changed."""
IDS = ("decoder_input_ids", "input_ids")
NO_ROWS = "the model hands out nothing token by token"
EVERY = "every token of this model may see every other"
MASKS = {"decoder_input_ids": "decoder_attention_mask", "input_ids": "attention_mask"}


def leaks(
    loaded: Loaded, sites: Sequence[Site], inputs: Mapping[str, Tensor], variant: Variant, seed: int
) -> dict[str, Any]:
    """The causality and mask errors of a swapped model, with the `reasons` why one does not apply.

    Raises IdentityError where one exceeds 1e-5 that does not in the model itself.
    """
    decodes = any(site.part == "decoder" for site in sites)
    found: dict[str, float | str] = {"causality_error": EVERY}
    if decodes and any(name in inputs for name in IDS):
        found["causality_error"] = causality_error(loaded, inputs, variant, seed)
    # Padding on the right of a causal sequence is hidden by causality alone.
    left = decodes and "decoder_input_ids" not in inputs
    found["mask_error"] = mask_error(loaded, inputs, variant, seed, left=left)
    reasons = {name: error for name, error in found.items() if isinstance(error, str)}
    return found | dict.fromkeys(reasons) | {"reasons": reasons}


def causality_error(loaded: Loaded, inputs: Mapping[str, Tensor], variant: Variant, seed: int) -> float | str:
    """‖changed − own‖ / ‖own‖ of the outputs in the first half of each sequence when the ids of the second half change.

    For a model whose self-attention (or whose decoder's) is causal; the reason why there is none where no output has a
    row a token, or the model itself shows it. Raises IdentityError above 1e-5.
    """
    name = next(name for name in IDS if name in inputs)
    ids = inputs[name]
    half = ids.shape[1] // 2
    other = torch.cat([ids[:, :half], _random_ids(loaded, ids[:, half:], seed)], 1)
    pair = {**inputs, name: ids}, {**inputs, name: other}
    return _judged(
        lambda kernel: _difference(loaded, *pair, kernel, slice(0, half)),
        variant,
        "later tokens change",
        "The kernel lets the future leak; attnlens gives no numbers for it. Please report it.",
    )


def mask_error(loaded: Loaded, inputs: Mapping[str, Tensor], variant: Variant, seed: int, *, left: bool) -> float | str:
    """The same at real tokens, when a few tokens of padding before (`left`) or behind each sequence change.

    There is none where the model takes no mask that says what is padding.

    Raises IdentityError above 1e-5.
    """
    name = "input_ids"
    if name not in inputs or MASKS[name] not in inputs or inputs[name].shape[1] < 2:
        return NO_ROWS if MASKS[name] in inputs else "the model takes no padding"
    pair = _padded(loaded, inputs, seed + 1, left=left), _padded(loaded, inputs, seed + 2, left=left)
    return _judged(
        lambda kernel: _difference(loaded, *pair, kernel),
        variant,
        "the padding's content changes",
        "The kernel looks at padding; attnlens gives no numbers for it. Please report it.",
    )


def _judged(measure: Callable[[Variant], float | None], variant: Variant, when: str, remedy: str) -> float | str:
    """The error under the new kernel, or why there is none; it is no fault of a kernel's that the model has by itself.

    Raises IdentityError where it is.
    """
    error = measure(variant)
    if error is None:
        return NO_ROWS
    if error <= TOLERANCE:
        return error
    own = measure(nullcontext)
    if own is not None and own > TOLERANCE:
        return f"under its own kernel too, the model's outputs change by {own:.1e} when {when}"
    raise IdentityError(f"Under the new kernel outputs change by {error:.1e} when {when}.", remedy)


def _padded(loaded: Loaded, inputs: Mapping[str, Tensor], seed: int, *, left: bool) -> dict[str, Tensor]:
    """The beginning of each sequence with random padding at one side; real tokens keep their positions."""
    name = "input_ids"
    padding = min(PADDING, inputs[name].shape[1] // 2)
    ids, mask = inputs[name][:, :-padding], inputs[MASKS[name]][:, :-padding]
    fill = _random_ids(loaded, ids.new_full((len(ids), padding), -1), seed)
    nothing = torch.zeros_like(fill).to(mask)
    parts = ([fill, ids], [nothing, mask]) if left else ([ids, fill], [mask, nothing])
    # what goes with each token (its type, its place on a page) moves with it
    beside = {key: value for key, value in inputs.items() if value.shape[:2] == inputs[name].shape}
    found = {**inputs, **{key: value.roll(padding * left, 1) for key, value in beside.items()}}
    found |= {name: torch.cat(parts[0], 1), MASKS[name]: torch.cat(parts[1], 1)}
    if left and "position_ids" in signature(loaded.model.forward).parameters:
        found["position_ids"] = (found[MASKS[name]].cumsum(1) - 1).clamp_min(0)
    return found


def _difference(
    loaded: Loaded,
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    variant: Variant,
    positions: slice = slice(None),
) -> float | None:
    """The relative difference of the two inputs' outputs at these positions; padding is left out."""
    with torch.no_grad(), variant():
        results = [hooks.forward(loaded.model, inputs, output_hidden_states=True) for inputs in (first, second)]
    shape = next(first[name].shape for name in IDS if name in first)
    own, new = (
        next((value for value in _tensors(result) if value.dim() > 2 and value.shape[:2] == shape), None)
        for result in results
    )
    if own is None or new is None:
        return None
    a, b = (_kept(part, first, positions).double() for part in (own, new))
    # Equal where both diverged alike: a kernel that gives NaN leaks nothing, and its loss will say so.
    same = torch.equal(a.nan_to_num(), b.nan_to_num())
    return 0.0 if same else float((a - b).norm() / a.norm().clamp_min(1e-30))


def _tensors(result: ModelOutput) -> Iterator[Tensor]:
    """The tensors of numbers in an output, those of its parts (CLIP's text side), and the last hidden states.

    The first with one row a token is the logits, or the last hidden states; a seq2seq model's decoder's.
    """
    for name, value in result.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            yield value
        elif isinstance(value, ModelOutput):
            yield from _tensors(value)
        elif name in ("decoder_hidden_states", "hidden_states"):
            yield value[-1]


def _kept(tensor: Tensor, inputs: Mapping[str, Tensor], positions: slice) -> Tensor:
    name = next(name for name in IDS if name in inputs)
    mask = inputs.get(MASKS[name])
    part = tensor[:, positions]
    return part if mask is None else part[mask[:, positions].bool()]


def _random_ids(loaded: Loaded, like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    known = texts.vocabulary(loaded.model) or texts.CHARACTERS
    standing = texts.standing_ids(loaded.model)
    plain = torch.tensor([number for number in range(known) if number not in standing])
    drawn = plain[torch.randint(len(plain), like.shape, generator=generator)].to(like)
    return drawn.where(~torch.isin(like, like.new_tensor(sorted(standing))), like)
