"""Find layers of the second model that contain tensors of a different layer of the first, such as exchanged layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from attnlens.maths.diagnosis import Cause
from attnlens.maths.diagnosis.layer import name_parts
from attnlens.models import weights
from attnlens.records import Site

Samples = dict[str, dict[str, Tensor]]
"""Sampled values of each matrix, keyed by the path of the first model's block and the name of the matrix."""
SAMPLE = 256  # maximum number of values sampled from each matrix
CLOSE = 0.01  # largest relative difference of values that are equal up to rounding
PART = 0.1  # smallest share of a matrix's values that must come from another layer
NEARER = 0.5  # largest ratio of the distance to another layer's matrix to the distance to the same layer's matrix


def sample_matrices(block: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sample up to SAMPLE values of each matrix of a block, to compare layers that are in memory at different times."""
    sampled = {}
    for name, part in block.items():
        if part.dim() > 1 and part.is_floating_point():
            places = torch.linspace(0, part.numel() - 1, min(SAMPLE, part.numel()), dtype=torch.float64).long()
            rows, columns = (each.to(part.device) for each in (places // part[0].numel(), places % part[0].numel()))
            sampled[name] = part.flatten(1)[rows, columns].double().cpu()
    return sampled


def find_source(site: Site, sites: Sequence[Site], samples: tuple[Samples, Samples]) -> Site | None:
    """Return the first model's site from which the second model's tensors at `site` were likely copied.

    This site is in the block with the most matrices that `_is_nearer` accepts. Return None if it accepts none.
    """
    path = weights.block_path(site.path)
    within = site.path.removeprefix(path)
    before, after = (each.get(path, {}) for each in samples)
    best, most = None, 0
    for other in sites:
        block = weights.block_path(other.path)
        candidate = samples[0].get(block, {})
        if block == path or other.path != f"{block}{within}":
            continue
        names = [
            name
            for name, sample in after.items()
            if name in before and name in candidate and candidate[name].shape == sample.shape == before[name].shape
        ]
        nearer = sum(_is_nearer(after[name], candidate[name], before[name]) for name in names)
        if nearer > most:
            best, most = other, nearer
    return best


def _is_nearer(values: Tensor, candidate: Tensor, own: Tensor) -> bool:
    """Return True if `values` are much nearer to `candidate` than to `own`, or partly match `candidate`.

    In a partial match, at least a share PART of the values agrees with `candidate` but not with `own`: W_K can be
    copied into a fused matrix.
    """
    change = (values - candidate).abs()
    equal = (values != own) & (change <= CLOSE * values.abs())
    nearer = float(change.norm()) < NEARER * float((values - own).norm())
    return nearer or float(equal.double().mean()) >= PART


def describe_moves(moves: Mapping[Site, tuple[Site, list[str]]], sites: Sequence[Site]) -> Iterator[tuple[Site, Cause]]:
    """Yield (site, cause) for each layer with another layer's tensors; causes of one exchange or shift share a text.

    `moves` maps each such site to the site that tensors come from, and the names of these tensors.
    """
    places = {site: place for place, site in enumerate(sites)}
    steps = {site: places[source] - places[site] for site, (source, _) in moves.items()}
    counts = Counter(steps.values())
    for site, (source, names) in moves.items():
        parts, hypothesis = name_parts(names), "tensors of a different layer"
        verb, pronoun = ("is", "that") if len(names) == 1 else ("are", "those")
        repair = f"copy {parts} from the first model"
        where = f"layer {source.layer_name}"
        if counts[steps[site]] > 1:
            where = _describe_step(steps[site])
        text = f"{parts} {verb} {pronoun} of {where}"
        if source in moves and moves[source][0] == site:
            first, second = sorted((site, source), key=lambda each: places[each])
            of_both = f"{parts} of layers {first.layer_name} and {second.layer_name}"
            hypothesis, text, repair = "exchanged layers", f"{of_both} are exchanged", f"exchange {of_both}"
        yield site, Cause(hypothesis, text, repair, parts=tuple(names))


def _describe_step(step: int) -> str:
    if abs(step) == 1:
        return "the next layer" if step > 0 else "the previous layer"
    return f"the layer {abs(step)} places {'later' if step > 0 else 'earlier'}"
