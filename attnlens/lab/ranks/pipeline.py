"""Run a model with the ranks found by a search or given by a plan, and compute the savings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from attnlens.arguments import public
from attnlens.choices import Intervals
from attnlens.errors import UsageError
from attnlens.lab.ranks import search
from attnlens.lab.ranks.bases import form_name, mean_rank
from attnlens.lab.ranks.search import Budgeting, Choice, Sample, by_text, rise_in
from attnlens.models import hooks, loading, texts, weights
from attnlens.models.hooks import SiteCall
from attnlens.models.texts.targets import HEADLESS, check_input, feed
from attnlens.models.weights import Factors
from attnlens.records import Call, KeyRank, ModelInfo, Pair, Plan, Site
from attnlens.report.report import Report
from attnlens.requests import RanksRequest, takes
from attnlens.requests.swap import RankOptions, rank_options
from attnlens.runs.differences import DIVERGED
from attnlens.runs.progress import Progress, silent, telling_at_most
from attnlens.runs.provenance import tool
from attnlens.runs.swap.kernel_run import KernelRun
from attnlens.runs.swap.pipeline import Model, SwapWork, check_work, prepare
from attnlens.runs.swap.session import SwapSession


@public
@takes(RanksRequest)
def find_ranks(model: Model = "demo", *, progress: Progress = silent, request: RanksRequest) -> Report:
    """Find the smallest rank of each key head within a budget of loss, and measure the model with these ranks.

    The report's `plan` has the ranks, what they save, and the estimated rise. If `model` is a name, finished work is
    stored, and the same call resumes from it. Raises UsageError, ModelError, TextError, OutputError, IdentityError, and
    Interrupted, which holds the finished results.
    """
    return rank_work(model, request, progress).finish()


def rank_work(model: Model, request: RanksRequest, progress: Progress = silent) -> SwapWork:
    """Prepare the work of `find_ranks`."""
    check_work(model, request)
    options, ranks = rank_options(request)
    step = RankSearch(ranks, request.intervals)
    return prepare("ranks", model, options, request.with_options(**ranks.selection), progress, ranks=step)


@dataclass
class RankSearch:
    """The step of a run that chooses the ranks, by a search or from a plan."""

    options: RankOptions
    intervals: Intervals | None
    samples: tuple[Sample, ...] = ()
    """Parts of the calibration text to fit on, choose ranks by and estimate the rise on; only the first for a plan."""
    choice: Choice | None = None

    def cut(self, session: SwapSession, contents: Sequence[texts.Content], cut: texts.Cut) -> Sequence[texts.Batches]:
        """Cut the calibration text, and return its parts. Raise UsageError if the model has no loss on it."""
        if session.task not in ("causal", "masked", "seq2seq"):
            what = (
                f"has {HEADLESS}" if session.task == "hidden" else "is compared only with its own previous predictions"
            )
            raise UsageError(
                f"A loss budget cannot be applied: this model {what}.",
                "Use the same rank for all heads, e.g. --kernel rank:16.",
            )
        check_input(session.evaluated)
        cut = replace(cut, sequences=search.count_windows(contents))
        count = search.PARTS if self.options.plan is None else 1
        self.samples = search.cut_samples(session.loaded, contents, cut, session.evaluated, self.intervals, count)
        return [sample.batches for sample in self.samples]

    def check_model(self, reached: Sequence[SiteCall]) -> None:
        """Raise UsageError if plan and model differ in a site, key head, query head or head_dim; report the first."""
        plan = self.options.plan
        if plan is None:
            return
        by_key = {(each.site.name, head): each for each in reached for head in range(each.call.key.shape[1])}
        problem = next(filter(None, (_mismatch(key, by_key.get((key.site, key.kv_head))) for key in plan.ranks)), None)
        planned = {(key.site, head) for key in plan.ranks for head in key.kv_heads or [key.kv_head]}
        missing = [key for key, each in by_key.items() if key not in planned and _covers(plan, each, key[1])]
        if problem is None and missing:
            problem = f"it has no rank for key head {missing[0][1]} of {missing[0][0]}"
        if problem is not None:
            raise UsageError(
                f"The plan does not fit this model: {problem}.",
                "Give a plan of a model of the same shape, or find one: attnlens ranks --budget loss:1%.",
            )

    def choose(self, run: KernelRun) -> hooks.Swaps:
        """Search the ranks, or fit the maps for those of a plan; return the swap with them."""
        session, form_named = run.session, self.options.latents is not None
        how = session.task, session.options.path, session.seed
        start = partial(Budgeting, session.loaded, session.sites, run.last, *how, form_named=form_named, keep=run.keep)
        if self.options.plan is not None:
            (fitting,) = self.samples
            budgeting = start(run.teller("fit rank", fitting.batches.sequences))
            # on the same part of the text as a search, so a plan reproduces its swap on the same model and texts
            fed = feed(session.loaded, fitting.batches, session.task, session.seed)
            form = next(iter(run.last.values())).kernel
            budgeting.use_form(budgeting.fit([form], by_text(fed, fitting)), form)
            by_key = {(key.site, key.kv_head): key.rank for key in self.options.plan.ranks}
            bases = budgeting.bases
            ranks = {site: [by_key[site.name, group[0]] for group in basis.groups] for site, basis in bases.items()}
            self.choice = Choice(bases, ranks, budgeting.build_swaps(ranks), None, None, [], None)
        else:
            fitting, choosing, promising = self.samples
            fits, trials = (2, search.TRIES) if form_named else (3, search.FORMS + search.TRIES)
            sizes = [sample.batches.sequences for sample in self.samples]
            work = fits * sizes[0] + trials * sizes[1] + sizes[2]
            with telling_at_most(session.progress, "budget", work) as tell:
                self.choice = start(tell).choose(fitting, choosing, promising, self.options.budget)
        return self.choice.swaps

    def plan(self, run: KernelRun) -> Plan:
        """Return the record of the choice, with the rises that the stages of the run have on the evaluated text."""
        choice, session, budget = self.choice, run.session, self.options.budget
        assert choice is not None  # noqa: S101  # `choose` ran before
        settings = session.settings.model_copy(update={"notes": [*session.settings.notes, *run.notes]})
        names = [text.name for text in settings.texts]
        by_site = sizes(session.loaded, list(choice.bases), session.fed[0].inputs)
        measured = {stage: rise_in(each, names, session.seed, budget.unit) for stage, each in run.measured.items()}
        saved = saving(choice, by_site)
        reasons = {**saved.pop("reasons"), **({} if choice.reason is None else {"mean_rank": choice.reason})}
        if choice.estimated is None:
            reasons |= dict.fromkeys(("estimated", "promised"), "the ranks were given, so none was chosen")
        elif choice.promised is None:
            reasons["promised"] = DIVERGED
        (keys, never), form = keys_to_gain(choice, by_site), next(iter(choice.swaps.values())).kernel
        reasons |= {} if never is None else {"keys_to_gain": never}
        reasons |= {f"measured.{stage}": DIVERGED for stage, rise in measured.items() if rise is None}
        return Plan(
            tool=tool(),
            model=session.loaded.info,
            settings=settings,
            budget=budget.share,
            unit=budget.unit,
            estimated=choice.estimated,
            promised=choice.promised,
            measured=measured.get("swapped"),
            healed=measured.get("healed"),
            steps=choice.steps,
            keys_to_gain=keys,
            reasons=reasons,
            kernel=form.info.name,
            form=form_name(form),
            forms=choice.forms,
            held_out=choice.held_out,
            ranks=_list_ranks(choice),
            mean_rank=mean_rank(choice.bases, choice.ranks),
            head_dim=mean_rank(choice.bases, {site: basis.sizes for site, basis in choice.bases.items()}),
            **saved,
            **{field: list(part.batches.texts) for field, part in zip(PARTS_OF, self.samples, strict=False)},
        )

    def notes(self, model: ModelInfo) -> list[str]:
        """Return a note if a plan was made for another model or other weights."""
        plan = self.options.plan
        if plan is None or all(
            getattr(plan.model, name) == getattr(model, name) for name in ("id", "revision", "files")
        ):
            return []
        same = bool(model.files) and [f.sha256 for f in plan.model.files] == [f.sha256 for f in model.files]
        weights = "the same weights" if same else "other weights"
        at = f"@{plan.model.revision}" if plan.model.revision else ""
        return [f"The ranks are those of a plan for {plan.model.id}{at}, which has {weights}."]

    @property
    def facts(self) -> dict[str, object]:
        """The plan, and whether the form of the latents was named, so that the search does not choose it."""
        plan = self.options.plan
        return {"plan": None if plan is None else plan.model_dump_json(), "named": self.options.latents is not None}


@dataclass(frozen=True)
class SiteSizes:
    """Sizes of one site's queries and keys."""

    query_width: int  # d_model: size of the inputs of the queries
    key_width: int  # size of the inputs of the keys
    head_dim: int  # size of a key
    value_dim: int  # size of a value
    query_bias: bool  # True if W_Q has a bias
    key_bias: bool  # True if W_K has a bias
    folds: bool  # True if maps can be multiplied into W_Q and W_K: there is no rotation or norm between them
    folds_before: bool  # True if maps of keys before the rotation can be multiplied into W_K: there is no norm between
    keys_seen: float  # keys that a query sees, mean over the sequence
    keys_a_query: float  # keys computed per computed query: 1 except in cross-attention
    number_bytes: int  # bytes of a cached number
    cached: bool  # True if a key-value cache stores a key per token: in a decoder's self-attention


@dataclass(frozen=True)
class LatentSizes:
    """Rank of one latent, and the number of heads that use it."""

    heads: int  # query heads that read it
    keys: int  # key heads that share it
    rank: int  # numbers kept per token
    before: bool = False  # True if it compresses keys before the rotation, which are rebuilt from it


@dataclass(frozen=True)
class Costs:
    """Costs of a latent's key heads and their query heads."""

    parameters: float
    flops: float  # per query token
    cache: float  # bytes per token
    rebuilding: float = 0.0  # operations to rebuild the keys of one cached token from the latent


def costs(size: SiteSizes, latent: LatentSizes) -> Costs:
    """Compute the costs of one latent's key heads and their query heads; at full rank, those of the original model.

    An m × n matrix takes 2mn operations, a score 2 per entry of its key. A cached token stores the latent and its
    values. If maps fold, keys need one W_K B (d_model × r) per latent, and queries the cheaper of W_Q A (d_model × r)
    and W_Q followed by A (head_dim × r per key head), which is better if a shared latent is wider than a head. Else A
    and B are added to W_Q and W_K, and only scores and cache shrink. Rank 0 needs none of these matrices. For latents
    of keys before the rotation, queries are unchanged, and keys are rebuilt from the latent.
    """
    rank, whole = latent.rank, latent.keys * size.head_dim
    count = partial(_count_costs, size, latent)
    if rank == whole or (rank == 0 and not latent.before):
        width = size.head_dim if rank else 0
        return count(query=width, key=latent.keys * width, score=width)
    if latent.before:
        key, maps = (0, size.key_width * rank + whole * rank) if size.folds_before else (whole, 2 * whole * rank)
        lifting = 2.0 * whole * rank
        return count(query=size.head_dim, key=key, key_map=maps, offset=whole, score=size.head_dim, rebuilding=lifting)
    key, key_map = (rank, 0) if size.folds else (whole, whole * rank)
    ways = [count(query=rank, key=key, score=rank)] if size.folds else []
    ways.append(count(query=size.head_dim, query_map=size.head_dim * rank, key=key, key_map=key_map, score=rank))
    return min(ways, key=lambda cost: (cost.flops, cost.parameters))


def _count_costs(
    size: SiteSizes,
    latent: LatentSizes,
    *,
    query: int,
    key: int,
    score: int,
    query_map: int = 0,
    key_map: int = 0,
    offset: int = 0,
    rebuilding: float = 0.0,
) -> Costs:
    """Compute the costs if W_Q has `query` columns per query head, W_K `key` columns, and a score `score` products.

    `query_map` is the number of entries of A per key head, `key_map` that of the other matrices applied to keys, and
    `offset` that of added vectors.
    """
    heads = latent.heads
    made = heads * (size.query_width * query + query_map) + size.keys_a_query * (size.key_width * key + key_map)
    parameters = heads * (size.query_width + size.query_bias) * query + latent.keys * query_map
    return Costs(
        parameters=parameters + (size.key_width + size.key_bias) * key + key_map + offset,
        flops=2 * made + 2 * score * heads * size.keys_seen,
        cache=(latent.rank + latent.keys * size.value_dim) * size.number_bytes if size.cached else 0.0,
        rebuilding=rebuilding,
    )


NO_CACHE = "no decoder's self-attention is swapped; a cache of another sequence's tokens is not counted"
NEVER = "operations do not fall, regardless of the number of keys per query"
PARTS_OF = ("fitted_on", "chosen_on", "promised_on")
"""Fields of a Plan that list the parts of the calibration text."""
SHARED = "one module computes several sites, whose ranks differ"


def sizes(loaded: loading.Loaded, sites: Sequence[Site], inputs: Mapping[str, Tensor]) -> dict[Site, SiteSizes | str]:
    """Return the sizes of each site at the length of `inputs`, or the reason if they are unknown."""
    calls = {each.site: each.call for each in hooks.survey(loaded.model, inputs)}
    layers = {site.layer for site in sites}
    first, window = (
        [each for each in hooks.survey(loaded.model, short) if each.site.layer in layers]
        for short in (texts.placeholder(loaded, length, 0).batches[0].inputs for length in (1, 2))
    )
    factors = weights.factors(loaded.model, first, window)
    return {
        site: _sizes(site, calls[site], each) if isinstance(each, Factors) else each.problem
        for site, each in zip(sites, factors, strict=True)
    }


def _sizes(site: Site, call: Call, factors: Factors) -> SiteSizes:
    visible, keys = call.visible(), call.key.shape[2]
    return SiteSizes(
        query_width=factors.maps.query.shape[1],
        key_width=factors.maps.key.shape[1],
        head_dim=call.key.shape[-1],
        value_dim=call.value.shape[-1],
        query_bias=bool(factors.maps.query_bias.any()),
        key_bias=bool(factors.maps.key_bias.any()),
        folds=factors.rotation is None and not factors.qk_norm and not site.repeated,
        folds_before=not factors.qk_norm and not site.repeated,
        keys_seen=float(keys if visible is None else visible.double().sum(-1).mean()),
        keys_a_query=keys / call.query.shape[2],
        number_bytes=call.key.element_size(),
        cached=site.part == "decoder",
    )


def saving(choice: Choice, by_site: Mapping[Site, SiteSizes | str]) -> dict[str, Any]:
    """Return the fields of a Plan about savings, with `reasons` for unknown ones."""
    unknown = _explain_unknown(by_site)
    names = {"parameters": "parameters", "flops": "flops_per_token", "cache": "cache_bytes_per_token"}
    if unknown is not None:
        return dict.fromkeys(names.values(), Pair(before=None, after=None)) | {
            "reasons": dict.fromkeys(names.values(), unknown)
        }
    before, after = Counter[str](), Counter[str]()
    known = {site: size for site, size in by_site.items() if isinstance(size, SiteSizes)}
    for site, size in known.items():
        for latent in _latents(choice, site):
            before.update(asdict(costs(size, replace(latent, rank=size.head_dim * latent.keys))))
            after.update(asdict(costs(size, latent)))
    pairs = {field: Pair(before=before[name], after=after[name]) for name, field in names.items()}
    reasons = {}
    if any(site.repeated for site in known):
        reasons["parameters"] = SHARED
    if not any(size.cached for size in known.values()):
        reasons["cache_bytes_per_token"] = NO_CACHE
    more = {"rebuilding_flops": after["rebuilding"] or None}
    return pairs | more | {name: Pair(before=None, after=None) for name in reasons} | {"reasons": reasons}


def _latents(choice: Choice, site: Site) -> list[LatentSizes]:
    basis = choice.bases[site]
    before = basis.latents.turn is not None
    return [
        LatentSizes(len(basis.heads_of(at)), len(group), rank, before)
        for at, (group, rank) in enumerate(zip(basis.groups, choice.ranks[site], strict=True))
    ]


def keys_to_gain(choice: Choice, by_site: Mapping[Site, SiteSizes | str]) -> tuple[float | None, str | None]:
    """Return the number of keys per query above which operations fall, or why it is unknown.

    Both are None if operations always fall or nothing is cut.
    """
    unknown = _explain_unknown(by_site)
    if unknown is not None:
        return None, unknown
    added = saved = 0.0  # operations added for queries and keys, and saved in scores per key seen
    for site, size in by_site.items():
        for latent in _latents(choice, site):
            if isinstance(size, SiteSizes):
                full = replace(latent, rank=size.head_dim * latent.keys)
                unseen, seen = (replace(size, keys_seen=keys) for keys in (0.0, 1.0))
                change = costs(unseen, latent).flops - costs(unseen, full).flops
                added += change
                saved += change - (costs(seen, latent).flops - costs(seen, full).flops)
    if added > 0 and saved > 0:
        return added / saved, None
    if added < 0 and saved < 0:
        keys = f"{added / saved:,.0f}"
        return None, f"fewer operations only below {keys} keys per query: beyond that, scores cost more"
    return None, NEVER if added >= 0 >= saved and added > saved else None


def _explain_unknown(by_site: Mapping[Site, SiteSizes | str]) -> str | None:
    """Return the reason why the sizes of a site are unknown; None if all are known."""
    return next((f"{site.name}: {size}" for site, size in by_site.items() if isinstance(size, str)), None)


def _list_ranks(choice: Choice) -> list[KeyRank]:
    return [
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


def _mismatch(key: KeyRank, reached: SiteCall | None) -> str | None:
    """Describe how a key head of the plan differs from the model's; None if it does not."""
    if reached is None:
        return f"it has a rank for key head {key.kv_head} of {key.site}, which the model lacks"
    site, head_dim = reached.site, reached.call.query.shape[-1]
    where = f"at {key.site} key head {key.kv_head}"
    heads = [head for kv_head in key.kv_heads or [key.kv_head] for head in _query_heads(reached, kv_head)]
    if key.heads != heads:
        theirs, ours = (", ".join(map(str, each)) for each in (key.heads, heads))
        return f"{where} serves query heads {theirs} in the plan, but {ours} in the model"
    if key.head_dim != head_dim * key.keys:
        return f"{where} has {key.head_dim} dimensions in the plan, but {head_dim * key.keys} in the model"
    if (key.layer, key.part) != (site.layer, site.part):
        return f"{key.site} is layer {key.layer} ({key.part}) in the plan, but {site.layer} ({site.part}) in the model"
    return None


def _covers(plan: Plan, reached: SiteCall, kv_head: int) -> bool:
    """Return True if the layers, heads and part that the plan was made for include this key head."""
    layers, heads = plan.settings.layers, plan.settings.heads
    chosen = plan.part in (None, reached.site.part) and (layers is None or reached.site.layer in layers)
    return chosen and (heads is None or bool(set(heads) & set(_query_heads(reached, kv_head))))


def _query_heads(reached: SiteCall, kv_head: int) -> list[int]:
    group = reached.call.group
    return list(range(kv_head * group, (kv_head + 1) * group))
