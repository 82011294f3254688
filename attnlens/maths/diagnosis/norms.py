"""Structural hypothesis on norms: gain and bias are folded into the matrices that read the norm's output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlens.maths.diagnosis.layer import (
    BETTER,
    PERMUTED,
    SINGLE,
    Layer,
    Parts,
    Step,
    has_heads,
    name_parts,
    name_unchanged,
    residuals,
)

if TYPE_CHECKING:
    from jaxtyping import Float


FOLDED = "norm folded"


def propose_folded_norm(first: Layer, second: Layer) -> Iterator[Step]:
    """Propose that a norm's gain g moved into the matrices that read its output, and its bias b into their biases.

    For normalised inputs n and a matrix W with bias c, W (g n + b) + c then equals W' (g' n + b') + c' of the second
    layer, where W' = W diag(g/g') and c' = c + W (b − b' g/g'). If the norm is unchanged (g' = g) although W' = W
    diag(g), the gain is applied twice.
    """
    norms = [name for name in first.gains if name not in {f"{role}.gain" for role in PERMUTED}]
    for norm in sorted(norms):
        before, after = first.parts[norm].double(), second.parts.get(norm)
        if before.dim() != 1 or after is None or after.shape != before.shape:
            continue
        twice = torch.equal(before, after.double())
        ratio = before if twice else torch.where(before == after, 1.0, before / after.double())
        readers = _find_readers(first, second, ratio)
        if readers and twice:
            yield _fold_twice(first, second, norm, readers)
        elif readers:
            alone = not any(other != norm and first.parts[other].shape == before.shape for other in norms)
            yield _fold(first, second, norm, ratio, readers, alone)


def _find_readers(first: Layer, second: Layer, ratio: Float[Tensor, " width"]) -> dict[str, Tensor]:
    """Return the first layer's matrices into which the gain moved, keyed by name, with inputs scaled by `ratio`."""
    readers = {}
    for name, axis in _list_matrices(first, len(ratio)).items():
        before, after = first.parts[name], second.parts.get(name)
        if after is None or after.shape != before.shape:
            continue
        scaled = before.double() * (ratio if axis == -1 else ratio[:, None])
        if bool((residuals(scaled, after, name) < BETTER * residuals(before, after, name)).all()):
            readers[name] = scaled
    return readers


def _list_matrices(layer: Layer, width: int) -> dict[str, int]:
    """Return the input axis, keyed by name, of each matrix whose input can be the output of a norm of this width.

    W_O is left out because it reads values. W_K and W_V of cross-attention are left out because they read a
    different sequence.
    """
    input_axes = {}
    others = {"output.weight", *(["key.weight", "value.weight"] if layer.is_cross else [])}
    for name, part in layer.parts.items():
        if part.dim() < 2 or name in others:
            continue
        stacked = part.dim() > 2 and not has_heads(name)  # experts: one matrix each, in either order of axes
        axes = (-1, -2) if stacked else (-2,) if name in layer.inputs_first else (-1,)
        axis = next((axis for axis in axes if part.shape[axis] == width), None)
        if axis is not None:
            input_axes[name] = axis
    return input_axes


def _fold(first: Layer, second: Layer, norm: str, ratio: Float[Tensor, " width"], readers: Parts, alone: bool) -> Step:
    """Build the step that folds a norm into the matrices `readers`.

    The step is harmless in a pre-norm layer if all matrices known to read the norm's output, and their biases, changed
    too. If `alone`, the layer has no other norm that the remaining matrices could read.
    """
    sides = {name in first.headless for name in readers}  # True: outside the attention module
    left = [
        name
        for name in _list_matrices(first, len(ratio))
        if name not in readers and (alone or (name in first.headless) in sides) and _has_certain_input(first, name)
    ]
    biases = _fold_bias(first, second, norm, ratio, readers)
    left += [name for name, part in biases.items() if not _is_nearer(part, first, second, name)]
    parts = {norm: second.parts[norm], **readers, **{name: biases[name] for name in biases if name not in left}}
    names, taken = name_parts([norm]), name_parts([*readers])
    text = f"{names} is folded into {taken}"
    if not bool((second.parts[norm] == 1).all()):
        text = f"{names} is divided, and the columns of {taken} are multiplied, by the same numbers"
    if not left and not first.is_post_norm:
        return Step(FOLDED, f"{text}: the layer's output is the same", None, parts, harmless=True)
    repair = f"copy {names} and {taken} from the first model"
    if first.is_post_norm:
        return Step(FOLDED, f"{text}, but the norm's output is also added to the next residual sum", repair, parts)
    repair += f", or fold the norm into {name_parts(left)} too"
    return Step(FOLDED, text + name_unchanged(left), repair, parts)


def _fold_twice(first: Layer, second: Layer, norm: str, readers: Parts) -> Step:
    """Build the step that folds a norm into the matrices `readers` although the norm is still applied."""
    names, bias = name_parts([norm]), norm.removesuffix("weight") + "bias"
    unit = {norm: torch.ones_like(first.parts[norm])}
    unit |= {bias: torch.zeros_like(first.parts[bias])} if bias in second.parts else {}
    step = _fold(first, second.with_parts(unit), norm, first.parts[norm].double(), readers, alone=False)
    parts = {name: part for name, part in step.parts.items() if name not in unit}
    text = f"{names} is folded into {name_parts([*readers])}, but not set to 1: the gain is applied twice"
    return Step(FOLDED, text, f"set {names} to 1, or copy {name_parts([*readers])} from the first model", parts)


def _has_certain_input(layer: Layer, name: str) -> bool:
    """Return True if the input axis of a matrix is certain: the matrix has heads, or is neither square nor stacked."""
    part = layer.parts[name]
    return has_heads(name) or (part.dim() == 2 and part.shape[0] != part.shape[1])


def _fold_bias(
    first: Layer, second: Layer, norm: str, ratio: Float[Tensor, " width"], readers: Parts
) -> dict[str, Tensor]:
    """Return the norm's new bias, and the biases with which the readers' outputs are unchanged, keyed by name.

    Return {} if the norm lacks a bias in one of the layers.
    """
    name = norm.removesuffix("weight") + "bias"
    before, after = first.parts.get(name), second.parts.get(name)
    if before is None or after is None or before.shape != ratio.shape or after.shape != ratio.shape:
        return {}
    shift = before.double() - ratio * after.double()
    biases, axes = {name: after}, _list_matrices(first, len(ratio))
    for reader in readers:
        weight, bias = first.parts[reader].double(), reader.removesuffix("weight") + "bias"
        inputs_last = axes[reader] == -1
        moved = weight @ shift if inputs_last else shift @ weight
        sums = first.parts[bias].double() + moved if bias in first.parts else moved
        # if terms cancel, the rounding error of a sum in float32 can exceed the sum
        terms = weight.abs() @ shift.abs() if inputs_last else shift.abs() @ weight.abs()
        second_bias = second.parts.get(bias, sums)
        close = (second_bias - sums).abs() <= SINGLE * len(ratio) ** 0.5 * terms
        biases[bias] = torch.where(close, second_bias.double(), sums)
    return biases


def _is_nearer(part: Tensor, first: Layer, second: Layer, name: str) -> bool:
    """Return True if `part` is clearly nearer to the second layer's tensor `name` than the first layer's tensor is.

    In each head, the residual of `part` must be at most BETTER times the residual of the first layer's tensor. Missing
    tensors count as 0.
    """
    before, after = first.parts.get(name, torch.zeros_like(part)), second.parts.get(name, torch.zeros_like(part))
    old, new = (residuals(each, after, name) for each in (before, part))
    return bool((new <= BETTER * old).all())
