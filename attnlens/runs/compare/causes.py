"""Find the causes of differences between two layers by comparing attention calls, rotations and tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnlens.maths.diagnosis import Cause, Layer, diagnose
from attnlens.maths.diagnosis.layer import SINGLE, name_parts, residuals
from attnlens.maths.diagnosis.rotations import name_rotation
from attnlens.models import weights
from attnlens.models.hooks import SiteCall
from attnlens.models.loading.deferred import is_announced
from attnlens.records.comparison import UNEXPLAINED
from attnlens.runs.compare.significance import stored_type
from attnlens.runs.inspect.inspection import SiteFactors
from attnlens.wording import join_items, short


def are_equal(first: Tensor, second: Tensor) -> bool:
    """Return True if two tensors have the same shape and, in the first tensor's dtype, the same values."""
    return first.shape == second.shape and torch.equal(first, second.to(first.device, first.dtype))


def have_same_heads(first: SiteCall, second: SiteCall) -> bool:
    """Return True if both calls have the same number and size of query heads."""
    return first.call.query.shape[1::2] == second.call.query.shape[1::2]


def compare_calls(first: SiteCall, second: SiteCall) -> Iterator[Cause]:
    """Yield a cause for each difference in scale, softcap or mask between two attention calls."""
    before, after = first.call, second.call
    # heads of a different size have a different scale
    if have_same_heads(first, second) and abs(after.scale - before.scale) > 1e-6 * abs(before.scale):
        ratio = after.scale / before.scale
        text = f"scores are scaled by {after.scale:.4g} instead of {before.scale:.4g} (× {ratio:.4g})"
        yield Cause("different scale", text, "copy the first model's scale (query_pre_attn_scalar, head_dim)")
    if before.softcap != after.softcap:
        caps = ["none" if call.softcap is None else f"{call.softcap:g}" for call in (before, after)]
        text = f"the softcap of scores is {caps[1]} instead of {caps[0]}"
        yield Cause("different softcap", text, "copy the first model's softcap")
    if before.query.shape[2:3] + before.key.shape[2:3] == after.query.shape[2:3] + after.key.shape[2:3]:
        everything = torch.ones(before.query.shape[2], before.key.shape[2], dtype=torch.bool)
        masks = [everything if mask is None else mask.cpu() for mask in (before.visible(), after.visible())]
        if bool((masks[0] != masks[1]).any()):
            seen = [float(mask.sum(-1).double().mean()) for mask in masks]
            text = f"a query sees {seen[1]:.3g} keys on average instead of {seen[0]:.3g} (of {everything.shape[1]})"
            text = "queries see different keys, though equally many on average" if seen[0] == seen[1] else text
            yield Cause("different mask", text, "copy the first model's window and mask settings")


def compare_rotations(first: SiteFactors | None, second: SiteFactors | None) -> Iterator[Cause]:
    """Yield a cause if only one layer rotates queries and keys (RoPE), or if the layers' frequencies differ.

    Yield nothing if factors are unknown. Frequencies are compared only if both rotations depend on distances alone.
    """
    if not isinstance(first, weights.Factors) or not isinstance(second, weights.Factors):
        return
    before, after = first.rotation, second.rotation
    if before is None or after is None:
        if before is not after:
            with_rope = "second" if before is None else "first"
            text = f"only the {with_rope} model rotates queries and keys (RoPE)"
            yield Cause("different rotation", text, "copy the first model's position settings")
    elif before.by_distance and after.by_distance:
        change = name_rotation(weights.frequencies(before), weights.frequencies(after))
        if change is not None:
            yield Cause("different rotation", change, "copy the first model's RoPE settings")


def diagnose_layers(first: Layer, second: Layer, order: Sequence[int] = ()) -> Iterator[Cause]:
    """Yield the causes of the differences between two layers; the cause of unexplained parts comes last.

    For quantised weights, the error of a query head is the larger of the relative errors of W_Q and W_K. `order`
    contains the second layer's head for each head of the first; empty if heads keep their order.
    """
    first, second = add_missing_parts(first, second)
    diagnosis = diagnose(first, second, order)
    for cause in diagnosis.causes:
        if cause.hypothesis.startswith("quantised") and "query.weight" in cause.parts:
            names = "query.weight", "key.weight"
            queries, keys = (residuals(first.parts[name], second.parts[name], name) for name in names)
            errors = torch.maximum(queries, keys.repeat_interleave(len(queries) // len(keys)))
            yield replace(cause, head_errors=tuple(errors.tolist()))
        else:
            yield cause
    if diagnosis.unexplained:
        left = tuple(diagnosis.unexplained)
        reshaped = tuple(name for name in left if first.parts[name].shape != second.parts[name].shape)
        yield build_unexplained(left, diagnosis.change, diagnosis.closest, diagnosis.unexplained_heads, reshaped)


def build_unexplained(
    names: tuple[str, ...],
    change: float,
    closest: tuple[str, float] | None = None,
    heads: tuple[int, ...] = (),
    reshaped: tuple[str, ...] = (),
) -> Unexplained:
    """Build the cause for parts that no hypothesis explains; `change` is the largest relative change in a part."""
    near = f"closest: {closest[0]}, residual {short(closest[1])}" if closest else "no known cause fits"
    words = describe_unexplained(names, change, near, reshaped)
    residual = closest[1] if closest else change
    return Unexplained(UNEXPLAINED, words, None, heads, residual, names, change=change, near=near, reshaped=reshaped)


@dataclass(frozen=True)
class Unexplained(Cause):
    """Cause for the parts whose change no hypothesis explains."""

    change: float = 0.0  # largest ‖B − A‖/max(‖A‖, ‖B‖) of a part (first model: A, second: B)
    near: str = ""  # the closest hypothesis, as text
    reshaped: tuple[str, ...] = ()  # parts whose shapes differ


def describe_unexplained(names: Sequence[str], change: float, near: str, reshaped: Sequence[str]) -> str:
    """Format the text of an Unexplained cause."""
    norm = "their norms" if len(names) > 1 else "its norm"
    words = f"{name_parts(names)} changed by up to {short(100 * change)} % of {norm}, not explained ({near})"
    return words + (f"; different shapes: {join_items(reshaped, 3)}" if reshaped else "")


def add_spacing(layer: Layer) -> Layer:
    """Return the layer with the machine epsilon of each part's stored type (at least SINGLE) as `spacing`."""
    spacing = {name: torch.finfo(stored_type(part)).eps for name, part in layer.parts.items()}
    return replace(layer, spacing={name: max(value, SINGLE) for name, value in spacing.items()})


def add_call_properties(layers: tuple[Layer, Layer], site_calls: tuple[SiteCall, SiteCall]) -> tuple[Layer, Layer]:
    """Add to both layers the properties that only calls show: shift invariance, post-norms, cross-attention and biases.

    Position biases are added as one number per head if they differ between heads and both models have the same biases,
    in any order: reordering heads without their biases changes attention.
    """
    biases = [each.call.bias for each in site_calls]
    by_head: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
    if biases[0] is not None and biases[1] is not None and not site_calls[0].call.relative:
        summaries = _match_biases(biases[0], biases[1])
        if summaries is not None:
            by_head = {"position bias": summaries[0]}, {"position bias": summaries[1]}
    first, second = (
        replace(
            layer.with_parts(parts),
            shift_invariant=each.call.softcap is None and each.call.sinks is None,
            is_post_norm=not _is_announced(each) and find_norm(layer, each) is None,
            is_cross=each.other is not None,
        )
        for layer, parts, each in zip(layers, by_head, site_calls, strict=True)
    )
    return first, second


UNIT, CENTRE = 0.1, 1e-3  # largest difference of a normalised token's root mean square from 1, and of its mean from 0


def _is_announced(site_call: SiteCall) -> bool:
    """Return True if the input of attention is unknown, because the weights are in files."""
    hidden = site_call.arguments[site_call.input_name]
    return hidden.is_meta or is_announced(hidden)


def find_norm(layer: Layer, site_call: SiteCall) -> str | None:
    """Return the name of the gain of the norm whose output attention reads; None if no norm is found."""
    if _is_announced(site_call):
        return None
    hidden, errors = site_call.sequences(site_call.arguments[site_call.input_name]), dict[str, float]()
    for name in layer.gains:
        gain, bias = layer.parts[name].double(), layer.parts.get(name.removesuffix("weight") + "bias")
        if gain.shape != hidden.shape[-1:]:
            continue
        used = gain != 0
        unit = ((hidden.double() - (0 if bias is None else bias)) / gain)[..., used]
        is_centred = bias is None or bool((unit.mean(-1).abs() <= CENTRE).all()) or not bool(used.all())
        if is_centred:
            errors[name] = float((unit.square().mean(-1).sqrt() - 1).abs().max())
    nearest = min(errors, key=lambda name: errors[name], default=None)
    return nearest if nearest is not None and errors[nearest] <= UNIT else None


ALIKE = 0.05  # largest relative difference between biases that count as equal, because tables can be rounded


def _match_biases(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor] | None:
    """Reduce both models' position biases to one number per head; heads with equal biases have equal numbers.

    Return None if heads can't be matched by their biases, if all heads have the same bias, or if a bias has no values.
    """
    if first.is_meta or second.is_meta or first.shape != second.shape:
        return None
    # the bias of a hidden key is −∞ or the smallest number of its type
    heads, others = (
        bias.double().transpose(0, 1).flatten(1).nan_to_num(0, 0, 0).clamp(min=-1e4) for bias in (first, second)
    )
    if not bool((heads != heads[:1]).any()):
        return None
    distances = torch.cdist(others.to(heads.device), heads) / heads.norm(dim=1).clamp(min=SINGLE)
    nearest = distances.argmin(1)
    nearest = torch.where(distances.diagonal() <= ALIKE, torch.arange(len(heads), device=heads.device), nearest)
    matched = distances.gather(1, nearest[:, None]) <= ALIKE
    if not bool(matched.all()) or len(set(nearest.tolist())) < len(heads):
        return None
    entries = torch.linspace(1, 2, heads.shape[1], dtype=torch.float64, device=heads.device)
    summaries = heads @ entries
    return summaries, summaries[nearest]


def add_missing_parts(first: Layer, second: Layer) -> tuple[Layer, Layer]:
    """Return both layers, with the biases (as zeros) and gains (as ones) that only the other layer had."""
    sides = []
    for side, other in ((first, second), (second, first)):
        gains = side.gains | other.gains
        absent = {
            name: torch.ones_like(part) if name in gains else torch.zeros_like(part)
            for name, part in other.parts.items()
            if name not in side.parts and (name in gains or name.endswith("bias"))
        }
        sides.append(replace(side.with_parts(absent), gains=gains))
    return sides[0], sides[1]
