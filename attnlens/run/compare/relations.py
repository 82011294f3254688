"""How each head's form stands to its partner's, and what the models as wholes have to do with each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attnlens.errors import UnreadableError
from attnlens.records import HeadChange, MeasureChange, QueryKey, Relation, Site
from attnlens.registry.measure_info import FORMS, OWN_ROWS
from attnlens.run.compare.draws import site_type, stored_type
from attnlens.run.compare.sides import Pairing, distances
from attnlens.run.compare.significance import Judged
from attnlens.wording import counted, listed

SURE = 1e-3
"""p below which a form is another one: rounding alone gives a larger change once in a thousand heads."""
ROUNDED = 4.0
"""Spacings, relative to the factors' size, by which they may differ and be the same but for rounding."""

LOST = 1e-3
"""‖ΔM‖/‖M‖ between rotated positions from which on the rotation acts on other coordinates."""


def relations(pairing: Pairing, forms: Judged | None) -> list[HeadChange]:
    """Of every head of the first report its partner, and how the forms stand to each other."""
    places = {(head.layer, head.head): place for place, head in enumerate(pairing.first.report.heads)}
    found = []
    for site, other in pairing.sites.items():
        pair = pairing.ordered_forms(site)
        for head, key_head in enumerate(pairing.key_of(site)):
            if (site.layer, head) not in places:
                continue
            told: dict[str, str] = {}
            if pair is None or forms is None:
                told["reason"] = _unread(pairing, site, other)
            else:
                relation = _relation(pairing, pair, head, float(forms.p[places[site.layer, head]]))
                told |= {"reason": "a form is 0 or not finite"} if relation is None else {"relation": relation}
            found.append(
                HeadChange(
                    site=site.name,
                    layer=site.layer,
                    head=head,
                    kv_head=key_head,
                    part=site.part,
                    partner=pairing.placed[site].order[head],
                    **told,
                )
            )
    return found


def _unread(pairing: Pairing, site: Site, other: Site) -> str:
    """Why the forms of a site can't be compared."""
    for which, side, own in (("first", pairing.first, site), ("second", pairing.second, other)):
        read = side.factors(own)
        if isinstance(read, UnreadableError):
            return f"the {which} model's form can't be read: {read.problem}"
    return "the forms have other sizes"


def _relation(pairing: Pairing, pair: tuple[QueryKey, QueryKey], head: int, p: float) -> Relation | None:
    first, second = pair
    sides = [(first.query[head], second.query[head]), (first.paired_key[head], second.paired_key[head])]
    if first.scale == second.scale and all(torch.equal(*side) for side in sides):
        return "identical"
    if p < SURE:
        return "changed"
    if first.scale == second.scale and not pairing.placed[first.site].moved:
        # what is read of equal weights may differ by rounding
        modules = [side.loaded.model.get_submodule(first.site.path) for side in (pairing.first, pairing.second)]
        own, others = (dict(module.named_parameters()) for module in modules)
        if own and own.keys() == others.keys() and all(_equal(own[name], others[name]) for name in own):
            return "identical"
    if p != p:
        return None
    sites = (pairing.first, first.site), (pairing.second, pairing.sites[first.site])
    spacing = max(torch.finfo(site_type(side.loaded.model, site)).eps for side, site in sites)
    close = all(_apart(*side) <= ROUNDED * spacing for side in sides)
    return "rounding" if close and first.scale == second.scale else "same form"


def _apart(one: Tensor, other: Tensor) -> float:
    """‖W' − W‖_F/‖W‖_F; 0 between zeros."""
    size = float(one.norm())
    return float((other - one).norm()) / size if size else float(other.norm() > 0)


def told(pairing: Pairing, heads: Sequence[HeadChange], rows: Sequence[MeasureChange]) -> list[str]:
    """What there is to say of the models as wholes, one sentence each."""
    own = {(row.layer, row.head): row.beyond_rounding for row in rows if row.measure == OWN_ROWS}
    sight = [
        f"Layer {first.layer} sees otherwise: {first.part} in the first model, {second.part} in the second."
        for first, second in pairing.sites.items()
        if first.part != second.part
    ]
    return [*_of_weights(pairing), *sight, *_of_order(pairing, heads), *_of_forms(pairing, heads, own)]


def _of_weights(pairing: Pairing) -> Iterator[str]:
    """Which tensors differ, and whether the second model's are the first one's rounded."""
    first, second = (dict(side.loaded.model.named_parameters()) for side in (pairing.first, pairing.second))
    alone = sorted(first.keys() ^ second.keys())
    if alone:
        yield f"{counted(len(alone), 'tensor')} of one model alone: {listed(alone)}."
    both = [name for name in first if name in second]
    different = [name for name in both if not _equal(first[name], second[name])]
    if not different:
        yield "All weights that both models have are the same numbers."
        return
    kinds = {name: stored_type(second[name]) for name in different}
    if not alone and all(
        _equal(first[name].to(kind).to(second[name].dtype), second[name]) for name, kind in kinds.items()
    ):
        said = listed(sorted({str(kind).removeprefix("torch.") for kind in kinds.values()}))
        yield f"The second model's weights are the first one's rounded to {said}; nothing else differs."
        return
    yield f"{len(different)} of {counted(len(both), 'tensor')} differ: {listed(different)}."


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other.to(one.device, one.dtype))


def _of_order(pairing: Pairing, heads: Sequence[HeadChange]) -> Iterator[str]:
    for site in pairing.unmoved:
        yield (
            f"Layer {site.layer}: the second model has its heads in another order, and --heads compares them by their "
            "numbers; without it each is compared with its partner."
        )
    moved = Counter(head.layer for head in heads if head.partner != head.head)
    for layer, count in moved.items():
        yield (
            f"Layer {layer}: the second model has {counted(count, 'head')} in another order; each is compared with its "
            "partner."
        )


def _of_forms(
    pairing: Pairing, heads: Sequence[HeadChange], own: Mapping[tuple[int, int], bool | None]
) -> Iterator[str]:
    """Say what other factors of the same product M do to attention; `own`: whether a head's own KL exceeds rounding."""
    same = {(head.layer, head.head) for head in heads if head.relation == "same form"}
    different = {place for place in same if own.get(place)}
    turned = {place for place in _turned(pairing, same) if own.get(place) is not False}
    gauge = {place for place in same - turned if own.get(place) is False}
    product = "have the same product M but different attention"
    if turned:
        yield (
            f"W_Q and W_K of {counted(len(turned), 'head')} {product}: the rotation acts on permuted rows (a lost RoPE "
            f"permutation?): {_places(turned)}."
        )
    if different - turned:
        yield (
            f"W_Q and W_K of {counted(len(different - turned), 'head')} {product}: biases, norms or the mask act "
            f"differently: {_places(different - turned)}."
        )
    if gauge:
        yield (
            f"Of {counted(len(gauge), 'head')} W_Q and W_K are others with the same product M within rounding (another "
            "gauge): attention is the same."
        )
    unknown = same - turned - different - gauge
    if unknown:
        yield (
            f"Of {counted(len(unknown), 'head')} W_Q and W_K are others with the same product M within rounding; "
            "attention was not compared."
        )


def _places(heads: Iterable[tuple[int, int]]) -> str:
    return listed([f"{layer}.{head}" for layer, head in sorted(heads)])


def _turned(pairing: Pairing, heads: Collection[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Find the heads whose M is the same at equal positions alone, because the rotation acts on other coordinates."""
    for site in pairing.sites:
        pair = pairing.ordered_forms(site) if any(layer == site.layer for layer, _ in heads) else None
        rotation = None if pair is None else pair[0].rotation
        if pair is None or rotation is None or len(rotation.angles) < 2:
            continue
        far = replace(rotation, angles=rotation.angles[-1:].expand(pair[0].query.shape[-2], -1))
        first, second = (replace(form, query=far.turned(form.query.double())) for form in pair)
        near, apart = (distances(*forms)[FORMS] for forms in (pair, (first, second)))
        for head in range(len(apart)):
            if (site.layer, head) in heads and apart[head] > max(10 * float(near[head]), LOST):
                yield site.layer, head
