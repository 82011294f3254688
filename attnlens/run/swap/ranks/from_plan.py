"""Takes the ranks of a plan, checked head by head against the model, with maps fitted anew."""

from __future__ import annotations

from collections.abc import Sequence

from attnlens.errors import UsageError
from attnlens.hooks import Reached
from attnlens.records import KeyRank, ModelInfo, Plan
from attnlens.run.swap.ranks.calibration import Sample, by_text
from attnlens.run.swap.ranks.search import Budgeting, Choice
from attnlens.texts.targets import feed


def check_fits(plan: Plan, reached: Sequence[Reached]) -> None:
    """Raise UsageError where the sites, key heads, query heads or head_dim of a plan are not this model's.

    The first one that differs is named; so is the first key head of this model that the plan should have and has not.
    """
    here = {(found.site.name, head): found for found in reached for head in range(found.call.key.shape[1])}
    problem = next(filter(None, (_mismatch(key, here.get((key.site, key.kv_head))) for key in plan.ranks)), None)
    named = {(key.site, head) for key in plan.ranks for head in key.kv_heads or [key.kv_head]}
    missed = [where for where, found in here.items() if where not in named and _covered(plan, found, where[1])]
    if problem is None and missed:
        problem = f"it has no rank for key head {missed[0][1]} of {missed[0][0]}"
    if problem is not None:
        raise UsageError(
            f"The plan does not fit this model: {problem}.",
            "Give a plan of a model of the same shape, or find one with --budget.",
        )


def _mismatch(key: KeyRank, found: Reached | None) -> str | None:
    """In what one key head of the plan is not this model's."""
    if found is None:
        return f"it has a rank for key head {key.kv_head} of {key.site}, which is not here"
    where, head_dim = f"at {key.site} key head {key.kv_head}", found.call.query.shape[-1]
    heads = [head for kv_head in key.kv_heads or [key.kv_head] for head in _heads(found, kv_head)]
    if key.heads != heads:
        return f"{where} serves query heads {_listed(key.heads)} in the plan, and {_listed(heads)} here"
    if key.head_dim != head_dim * key.keys:
        return f"{where} has {key.head_dim} directions in the plan, and {head_dim * key.keys} here"
    if (key.layer, key.part) != (found.site.layer, found.site.part):
        return (
            f"{key.site} is layer {key.layer} ({key.part}) in the plan, and {found.site.layer} ({found.site.part}) here"
        )
    return None


def _covered(plan: Plan, found: Reached, kv_head: int) -> bool:
    """Whether the plan was made for such a key head, by the layers, heads and the part that it was asked for."""
    layers, heads = plan.settings.layers, plan.settings.heads
    chosen = plan.part in (None, found.site.part) and (layers is None or found.site.layer in layers)
    return chosen and (heads is None or bool(set(heads) & set(_heads(found, kv_head))))


def _heads(found: Reached, kv_head: int) -> list[int]:
    """The query heads that read that key head."""
    group = found.call.group
    return list(range(kv_head * group, (kv_head + 1) * group))


def _listed(heads: Sequence[int]) -> str:
    return ", ".join(map(str, heads))


def given(search: Budgeting, fitting: Sample, plan: Plan) -> Choice:
    """The plan's ranks, which fit the model, with their maps fitted; nothing is searched, and nothing promised.

    The fit reads that part of the text which a search would fit on, so that a plan gives the same swap again on the
    model and the texts that it was found on.
    """
    fitted = feed(search.loaded, fitting.batches, search.task, search.seed)
    form = next(iter(search.swaps.values())).kernel
    search.take(search.gather(by_text(fitted, fitting), [form]), form)
    of = {(key.site, key.kv_head): key.rank for key in plan.ranks}
    ranks = {site: [of[site.name, group[0]] for group in basis.groups] for site, basis in search.found.items()}
    return Choice(search.found, ranks, search.swapped(ranks), None, None, [], None)


def origin(plan: Plan, model: ModelInfo) -> list[str]:
    """A note where the plan was made on another model or other weights."""
    if (plan.model.id, plan.model.revision, plan.model.files) == (model.id, model.revision, model.files):
        return []
    same = bool(model.files) and [f.sha256 for f in plan.model.files] == [f.sha256 for f in model.files]
    weights = "the same weights" if same else "other weights"
    at = f"@{plan.model.revision}" if plan.model.revision else ""
    return [f"The ranks are those of a plan for {plan.model.id}{at}, which has {weights}."]
