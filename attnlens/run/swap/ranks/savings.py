"""Parameters, operations and cached bytes that a plan of ranks saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor

from attnlens import hooks, texts, weights
from attnlens.arguments import Budget
from attnlens.attention.costs import LatentSizes, SiteSizes, costs
from attnlens.models import Loaded
from attnlens.records import Call, KeyRank, Pair, Plan, Rise, Settings, Site
from attnlens.run.outcomes.differences import DIVERGED, Differences
from attnlens.run.provenance import tool
from attnlens.run.swap.ranks.calibration import Sample
from attnlens.run.swap.ranks.forms import form_name
from attnlens.run.swap.ranks.rises import rise_in
from attnlens.run.swap.ranks.search import Choice
from attnlens.weights import Factors

NO_CACHE = "no decoder's self-attention is swapped; what a cache keeps of another sequence's tokens is not counted"
GIVEN = "the ranks were given, and none was chosen"
NEVER = "operations do not fall, however many keys a query sees"
PARTS_OF = ("fitted_on", "chosen_on", "promised_on")
"""The fields of a Plan that name the parts of the calibration text."""
SHARED = "one module computes several sites, whose ranks differ"


def sizes(loaded: Loaded, sites: Sequence[Site], inputs: Mapping[str, Tensor]) -> dict[Site, SiteSizes | str]:
    """The sizes of each of these sites at the length of `inputs`, or the reason why they are not known."""
    reached = {found.site: found.call for found in hooks.survey(loaded.model, inputs)}
    layers = {site.layer for site in sites}
    first, window = (
        [found for found in hooks.survey(loaded.model, short) if found.site.layer in layers]
        for short in (texts.placeholder(loaded, length, 0).batches[0].inputs for length in (1, 2))
    )
    factors = weights.factors(loaded.model, first, window)
    return {
        site: _sizes(site, reached[site], made) if isinstance(made, Factors) else made.problem
        for site, made in zip(sites, factors, strict=True)
    }


def _sizes(site: Site, call: Call, made: Factors) -> SiteSizes:
    seen, keys = call.visible(), call.key.shape[2]
    return SiteSizes(
        query_width=made.maps.query.shape[1],
        key_width=made.maps.key.shape[1],
        head_dim=call.key.shape[-1],
        value_dim=call.value.shape[-1],
        query_bias=bool(made.maps.query_bias.any()),
        key_bias=bool(made.maps.key_bias.any()),
        folds=made.rotation is None and not made.qk_norm and not site.repeated,
        folds_before=not made.qk_norm and not site.repeated,
        keys_seen=float(keys if seen is None else seen.double().sum(-1).mean()),
        keys_a_query=keys / call.query.shape[2],
        number_bytes=call.key.element_size(),
        cached=site.part == "decoder",
    )


def saving(choice: Choice, found: Mapping[Site, SiteSizes | str]) -> dict[str, Any]:
    """The fields of a Plan that say what is saved, and why one of them is not known."""
    unknown = _unknown_size(found)
    names = {"parameters": "parameters", "flops": "flops_per_token", "cache": "cache_bytes_per_token"}
    if unknown is not None:
        return dict.fromkeys(names.values(), Pair(before=None, after=None)) | {
            "reasons": dict.fromkeys(names.values(), unknown)
        }
    both = [Counter[str](), Counter[str]()]
    known = {site: size for site, size in found.items() if isinstance(size, SiteSizes)}
    for site, size in known.items():
        for latent in _latents(choice, site):
            whole = replace(latent, rank=size.head_dim * latent.keys)
            for total, kept in zip(both, (whole, latent), strict=True):
                total.update(asdict(costs(size, kept)))
    pairs = {field: Pair(before=both[0][name], after=both[1][name]) for name, field in names.items()}
    reasons = {}
    if any(site.repeated for site in known):
        reasons["parameters"] = SHARED
    if not any(size.cached for size in known.values()):
        reasons["cache_bytes_per_token"] = NO_CACHE
    more = {"rebuilding_flops": both[1]["rebuilding"] or None}
    return pairs | more | {name: Pair(before=None, after=None) for name in reasons} | {"reasons": reasons}


def _latents(choice: Choice, site: Site) -> list[LatentSizes]:
    basis = choice.bases[site]
    before = basis.latents.turn is not None
    return [
        LatentSizes(len(basis.heads_of(at)), len(group), rank, before)
        for at, (group, rank) in enumerate(zip(basis.groups, choice.ranks[site], strict=True))
    ]


def break_even(choice: Choice, found: Mapping[Site, SiteSizes | str]) -> float | None:
    """How many keys a query must see before the maps cost fewer operations than they save.

    None where operations fall from the first key on, where nothing is cut, and where `no_break_even` has a reason.
    """
    added, saved = _operations(choice, found)
    return added / saved if added > 0 and saved > 0 and _unknown_size(found) is None else None


def no_break_even(choice: Choice, found: Mapping[Site, SiteSizes | str]) -> str | None:
    """Why operations don't fall from some number of keys on; None where they do, or where nothing is cut."""
    unknown = _unknown_size(found)
    if unknown is not None:
        return unknown
    added, saved = _operations(choice, found)
    if added < 0 and saved < 0:
        return f"operations fall only while a query sees fewer than {added / saved:,.0f} keys: scores cost more beyond"
    return NEVER if added >= 0 >= saved and added > saved else None


def _operations(choice: Choice, found: Mapping[Site, SiteSizes | str]) -> tuple[float, float]:
    """Operations that making queries and keys takes more, and those that scores take less for each key seen."""
    added = saved = 0.0
    for site, size in found.items():
        for latent in _latents(choice, site):
            if isinstance(size, SiteSizes):
                bare, whole = replace(size, keys_seen=0.0), replace(latent, rank=size.head_dim * latent.keys)
                change = [costs(sized, latent).flops - costs(sized, whole).flops for sized in (bare, _with_a_key(bare))]
                added, saved = added + change[0], saved + change[0] - change[1]
    return added, saved


def _with_a_key(bare: SiteSizes) -> SiteSizes:
    return replace(bare, keys_seen=1.0)


def _unknown_size(found: Mapping[Site, SiteSizes | str]) -> str | None:
    """Why the sizes of a site are not known."""
    return next((f"{site.name}: {size}" for site, size in found.items() if isinstance(size, str)), None)


def planned(
    loaded: Loaded,
    choice: Choice,
    budget: Budget,
    settings: Settings,
    inputs: dict[str, Tensor],
    compared: Mapping[str, Differences],
    samples: Sequence[Sample],
) -> Plan:
    """The record of a choice; `compared` is what was measured on the evaluation text, by stage, and `samples` are the
    parts of the calibration text.
    """
    found = sizes(loaded, list(choice.bases), inputs)
    measured = _measured(compared, settings, budget)
    saved = saving(choice, found)
    reasons = {**saved.pop("reasons"), **_unknown(choice)}
    never = no_break_even(choice, found)
    reasons |= {} if never is None else {"keys_to_gain": never}
    reasons |= {f"measured.{stage}": DIVERGED for stage, rise in measured.items() if rise is None}
    return Plan(
        tool=tool(),
        model=loaded.info,
        settings=settings,
        budget=budget.share,
        unit=budget.unit,
        estimated=choice.estimated,
        promised=choice.promised,
        measured=measured.get("swapped"),
        healed=measured.get("healed"),
        steps=choice.steps,
        keys_to_gain=break_even(choice, found),
        reasons=reasons,
        **_form(choice),
        **_ranked(choice),
        **saved,
        **{field: list(part.batches.texts) for field, part in zip(PARTS_OF, samples, strict=False)},
    )


def _measured(compared: Mapping[str, Differences], settings: Settings, budget: Budget) -> dict[str, Rise | None]:
    """The rise on the evaluation text, by stage."""
    names = [text.name for text in settings.texts]
    return {stage: rise_in(found, names, settings.seed, budget.unit) for stage, found in compared.items()}


def _unknown(choice: Choice) -> dict[str, str]:
    """Why a choice has no estimate, no promise, or no smaller ranks."""
    reasons = {} if choice.reason is None else {"mean_rank": choice.reason}
    if choice.estimated is None:
        return reasons | dict.fromkeys(("estimated", "promised"), GIVEN)
    return reasons if choice.promised else reasons | {"promised": DIVERGED}


def _form(choice: Choice) -> dict[str, Any]:
    """The fields of a Plan that say what its latents are."""
    form = next(iter(choice.swaps.values())).kernel
    return {
        "kernel": form.info.name,
        "form": form_name(form),
        "forms": choice.forms,
        "held_out": choice.held_out,
    }


def _ranked(choice: Choice) -> dict[str, Any]:
    """The ranks latent by latent, and their means over query heads."""
    ranks = [
        KeyRank(
            site=site.name,
            layer=site.layer,
            part=site.part,
            kv_head=group[0],
            kv_heads=list(group) if len(group) > 1 else [],
            heads=basis.heads_of(latent),
            rank=choice.ranks[site][latent],
            head_dim=basis.sizes[latent],
        )
        for site, basis in choice.bases.items()
        for latent, group in enumerate(basis.groups)
    ]
    heads = sum(len(key.heads) for key in ranks)
    mean = sum(key.rank / key.keys * len(key.heads) for key in ranks) / heads
    whole = sum(key.head_dim / key.keys * len(key.heads) for key in ranks) / heads
    return {"ranks": ranks, "mean_rank": mean, "head_dim": whole}
