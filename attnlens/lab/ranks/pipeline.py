"""Run a model with the ranks found by a search or given by a plan, and compute the savings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from shlex import quote

import torch
from torch import Tensor

from attnlens import arguments
from attnlens.arguments import Budget, public
from attnlens.choices import Intervals
from attnlens.errors import UsageError
from attnlens.lab.ranks import search
from attnlens.lab.ranks.bases import Basis, fit_forms, form_name, mean_rank
from attnlens.lab.ranks.search import BudgetSearch, Choice, Losses, Sample, rise_of, split_by_text
from attnlens.models import hooks, loading, texts, weights
from attnlens.models.texts.targets import HEADLESS, check_input, feed
from attnlens.models.weights import Factors
from attnlens.records import Call, KeyRank, ModelInfo, Pair, Plan, Site
from attnlens.report.report import Report
from attnlens.requests import RanksRequest, takes
from attnlens.requests.swap import rank_kernels
from attnlens.runs.differences import DIVERGED
from attnlens.runs.progress import Progress, bounded_stage, silent
from attnlens.runs.provenance import tool
from attnlens.runs.swap.kernel_run import KernelRun, SwapSession
from attnlens.runs.swap.pipeline import Model, SwapWork, check_work, prepare


@public
@takes(RanksRequest)
def find_ranks(model: Model = "demo", *, progress: Progress = silent, request: RanksRequest) -> Report:
    """Find the smallest rank of each key head within a loss budget, or use a plan's ranks; measure the resulting model.

    The report's `plan` contains the ranks, the savings and the estimated rise in the loss. If `model` is a name,
    finished work is stored, and a repeated call resumes from this work. Raises UsageError, ModelError, TextError,
    OutputError, IdentityError, and Interrupted, which contains the finished results.
    """
    return rank_work(model, request, progress).finish()


def rank_work(
    model: Model, request: RanksRequest, progress: Progress = silent, chosen: Callable[[Plan], None] | None = None
) -> SwapWork:
    """Check the options, load the model, and prepare the work of `find_ranks` without starting it.

    `chosen` is called with the plan as soon as a search has chosen the ranks.
    """
    check_work(model, request)
    kernels, plan, request = rank_kernels(request)
    budget = Budget(plan.unit, plan.budget) if plan else arguments.budget(request.budget or "loss:1%")
    step = RankSearch(budget, plan, request.intervals, form_named=request.latents is not None, chosen=chosen)
    return prepare("ranks", model, kernels, request, progress, ranks=step)


@dataclass
class RankSearch:
    """The step of a run that chooses the ranks, by a search or from a plan."""

    budget: Budget
    plan: Plan | None  # plan whose ranks are used instead of a search
    intervals: Intervals | None
    form_named: bool = False  # True if a search uses the given form of the latents instead of choosing one
    samples: tuple[Sample, ...] = ()  # parts of the calibration text; for a plan, only the part for fitting
    choice: Choice | None = None
    chosen: Callable[[Plan], None] | None = None  # called with the plan before the model is evaluated

    def cut(self, session: SwapSession, contents: Sequence[texts.Content], cut: texts.Cut) -> Sequence[texts.Batches]:
        """Cut the calibration text, and return its parts.

        Raises UsageError if the model has no loss, and the errors of `cut_samples`.
        """
        if session.task not in ("causal", "masked", "seq2seq"):
            reason = f"has {HEADLESS}" if session.task == "hidden" else "can only be compared with its own predictions"
            problem = f"A loss budget cannot be applied: this model {reason}."
            command = f"attnlens swap-kernel {quote(session.loaded.info.id)} --kernel rank:16"
            raise UsageError(problem, f"Use the same rank for all heads: {command}")
        check_input(session.evaluated)
        cut = replace(cut, sequences=search.count_windows(contents, session.evaluated.sequences))
        count = search.PARTS if self.plan is None else 1
        self.samples = search.cut_samples(session.loaded, contents, cut, session.evaluated, self.intervals, count)
        return [sample.batches for sample in self.samples]

    def choose(self, run: KernelRun) -> hooks.Swaps:
        """Search for ranks, or fit the maps for the ranks of a plan; return the swaps with these ranks."""
        session, swaps = run.session, run.last.swaps
        start = partial(BudgetSearch, **vars(session.setup(swaps)), form_named=self.form_named, keep=run.keep)
        if self.plan is not None:
            run.rank_notes += _compare_models(self.plan.model, session.loaded.info)
            (fitting,) = self.samples
            budget_search = start(progress=run.start_stage("fit rank", fitting.batches.sequences))
            # fit to the same part of the text as a search does: on the same model and texts, a plan reproduces its swap
            fed = feed(session.loaded, fitting.batches, session.task, session.seed)
            form = next(iter(swaps.values())).kernel
            fits = fit_forms(budget_search, [form], split_by_text(fed, fitting), budget_search.progress)
            budget_search.use_form(fits, form)
            bases = budget_search.bases
            _check_plan(self.plan, _list_ranks(bases, {site: basis.sizes for site, basis in bases.items()}))
            by_key = {(key.site, key.kv_head): key.rank for key in self.plan.ranks}
            ranks = {site: [by_key[site.name, group[0]] for group in basis.groups] for site, basis in bases.items()}
            self.choice = Choice(bases, ranks, budget_search.build_swaps(ranks))
        else:
            fitting, choosing, promising = self.samples
            passes, trials = (2, search.TRIES) if self.form_named else (3, search.FORMS + search.TRIES)
            fitted, tried, promised = (sample.batches.sequences for sample in self.samples)
            with bounded_stage(session.progress, "budget", passes * fitted + trials * tried + promised) as add_steps:
                for stage in ("compare", *["generate"] * bool(session.options.generate)):
                    session.progress(stage, 0, 1)  # announce the later stages
                self.choice = start(progress=add_steps).choose(fitting, choosing, promising, self.budget)
            if self.chosen is not None:
                self.chosen(self.record(run))
        return self.choice.swaps

    def record(self, run: KernelRun) -> Plan:
        """Build the plan: the chosen ranks, the savings, and each stage's rise in the loss on the evaluated text."""
        choice, session, budget = self.choice, run.session, self.budget
        assert choice is not None  # noqa: S101  # `choose` ran before
        settings = session.settings.model_copy(update={"notes": [*session.settings.notes, *run.notes]})
        names, measured = [text.name for text in settings.texts], {}
        for stage, each in run.measured.items():
            before = Losses(torch.cat(each.before), torch.cat(each.counts), each.sampled)
            measured[stage] = rise_of(before, torch.cat(each.after), names, session.seed, budget.unit)
        saved, reasons = compute_saving(choice, sizes(session.loaded, list(choice.bases), session.fed[0].inputs))
        cache = saved["cache_bytes_per_token"]
        if isinstance(cache, Pair) and cache.before is not None and cache.after is not None:
            whole = cache_of_model(session.loaded, session.fed[0].inputs)
            saved["model_cache_bytes_per_token"] = Pair(before=whole, after=whole + cache.after - cache.before)
        if choice.reason is not None:
            reasons["mean_rank"] = choice.reason
        if choice.estimated is None:
            reasons |= dict.fromkeys(("estimated", "promised"), "the ranks were given, not chosen")
        elif choice.promised is None:
            reasons["promised"] = DIVERGED
        form = next(iter(choice.swaps.values())).kernel
        reasons |= {f"measured.{stage}": DIVERGED for stage, rise in measured.items() if rise is None}
        reasons |= {} if measured else {"measured": UNMEASURED}
        return Plan(
            tool=tool(),
            model=session.model_info,
            settings=settings,
            budget=budget.share,
            unit=budget.unit,
            estimated=choice.estimated,
            promised=choice.promised,
            measured=measured.get("swapped"),
            healed=measured.get("healed"),
            steps=choice.steps,
            reasons=reasons,
            kernel=form.info.name,
            form=form_name(form),
            forms=choice.forms,
            held_out=choice.held_out,
            ranks=_list_ranks(choice.bases, choice.ranks),
            mean_rank=mean_rank(choice.bases, choice.ranks),
            head_dim=mean_rank(choice.bases, {site: basis.sizes for site, basis in choice.bases.items()}),
            **saved,
            **{field: list(part.batches.texts) for field, part in zip(PARTS_OF, self.samples, strict=False)},
        )


@dataclass(frozen=True)
class SiteSizes:
    """Sizes of one site's queries and keys. A map folds into a weight if the product of both can replace the weight."""

    query_width: int  # d_model: size of the vectors from which W_Q computes queries
    key_width: int  # size of the vectors from which W_K computes keys
    head_dim: int  # size of a key
    value_dim: int  # size of a value
    query_bias: bool  # True if W_Q has a bias
    key_bias: bool  # True if W_K has a bias
    folds: bool  # True if maps fold into W_Q and W_K: only this site uses W_Q and W_K, and no rotation or norm follows
    folds_before: bool  # True if maps of unrotated keys fold into W_K: only this site uses W_K, and no norm follows
    keys_seen: float  # number of keys that a query sees, averaged over the queries
    keys_per_query: float  # number of keys divided by the number of queries: 1 except in cross-attention
    number_bytes: int  # bytes of a cached number
    cached: bool  # True if keys are cached, as in a decoder's self-attention


@dataclass(frozen=True)
class LatentSizes:
    """Rank of one latent, and the number of heads that use it."""

    heads: int  # number of query heads that read the latent
    keys: int  # number of key heads that share the latent
    rank: int  # numbers stored per token
    before: bool = False  # True for latents of keys before the rotation; full keys are rebuilt from the latent


@dataclass(frozen=True)
class Costs:
    """Costs of a latent's key heads and their query heads."""

    parameters: float
    flops: float  # operations per query token: projecting + scoring · number of visible keys
    projecting: float  # operations per query token to compute queries and keys
    scoring: float  # operations per query token and visible key
    cache: float  # bytes per token
    rebuilding: float = 0.0  # operations to rebuild the keys of one cached token from the latent


def costs(size: SiteSizes, latent: LatentSizes) -> Costs:
    """Compute the costs of one latent's key heads and their query heads; at full rank, those of the original.

    An m × n matrix takes 2mn operations, and a score takes 2 per entry of the key. A cached token stores the latent and
    its values. If the maps A of queries and B of keys fold into W_Q and W_K, keys need W_K B (d_model × r) per latent
    of rank r; queries need W_Q A (d_model × r) or, if cheaper, W_Q followed by A (head_dim × r per key head). If the
    maps do not fold, W_Q, W_K, A and B are applied, and only scores and cache become cheaper. If latents compress keys
    before the rotation, queries are unchanged, and keys are rebuilt from the latent; otherwise, rank 0 costs nothing
    except the cached values.
    """
    rank, whole, head_dim, heads = latent.rank, latent.keys * size.head_dim, size.head_dim, latent.heads

    def count(query: int, key: int, score: int, query_map: int = 0, key_map: int = 0, offset: int = 0) -> Costs:
        """Compute costs from columns of W_Q (per head) and W_K, products per score, and entries of maps and offset."""
        made = heads * (size.query_width * query + query_map) + size.keys_per_query * (size.key_width * key + key_map)
        parameters = heads * (size.query_width + size.query_bias) * query + latent.keys * query_map
        return Costs(
            parameters=parameters + (size.key_width + size.key_bias) * key + key_map + offset,
            flops=2 * made + 2 * score * heads * size.keys_seen,
            projecting=2 * made,
            scoring=2 * score * heads,
            cache=(rank + latent.keys * size.value_dim) * size.number_bytes if size.cached else 0.0,
        )

    if rank == whole or (rank == 0 and not latent.before):
        width = head_dim if rank else 0
        return count(width, latent.keys * width, width)
    if latent.before:
        key, maps = (0, size.key_width * rank + whole * rank) if size.folds_before else (whole, 2 * whole * rank)
        cost = count(head_dim, key, head_dim, key_map=maps, offset=whole)
        return replace(cost, rebuilding=2 * whole * rank)
    key, key_map = (rank, 0) if size.folds else (whole, whole * rank)
    options = [count(rank, key, rank)] if size.folds else []
    options.append(count(head_dim, key, rank, head_dim * rank, key_map))
    return min(options, key=lambda cost: (cost.flops, cost.parameters))


NO_CACHE = "the self-attention of the decoder is not swapped; caches of other attention are not counted"
UNMEASURED = "the ranks were chosen, but not yet measured on the evaluation text"
NEVER = "the number of operations does not fall, however many keys a query sees"
PARTS_OF = ("fitted_on", "chosen_on", "promised_on")  # fields of a Plan that list the parts of the calibration text
SHARED = "one module computes several sites, whose ranks differ"
COSTS = {"parameters": "parameters", "flops_per_token": "flops", "cache_bytes_per_token": "cache"}
"""Maps fields of a Plan to fields of Costs."""


def sizes(loaded: loading.Loaded, sites: Sequence[Site], inputs: Mapping[str, Tensor]) -> dict[Site, SiteSizes | str]:
    """Return the sizes of each site for sequences as long as `inputs`, or the reason why they are unknown."""
    calls = {each.site: each.call for each in hooks.survey(loaded.model, inputs)}
    layers, surveyed = {site.layer for site in sites}, []
    for length in (1, 2):
        short = texts.placeholder(loaded, length, 0).batches[0].inputs
        surveyed.append([each for each in hooks.survey(loaded.model, short) if each.site.layer in layers])
    factors = weights.factors(loaded.model, *surveyed)
    return {
        site: _sizes(site, calls[site], each) if isinstance(each, Factors) else each.problem
        for site, each in zip(sites, factors, strict=True)
    }


def cache_of_model(loaded: loading.Loaded, inputs: Mapping[str, Tensor]) -> float:
    """Compute the bytes per token of the keys and values that the decoder's self-attention caches."""
    calls = [each.call for each in hooks.survey(loaded.model, inputs) if each.site.part == "decoder"]
    keys = [call.key.shape[1] * (call.key.shape[-1] + call.value.shape[-1]) * call.key.element_size() for call in calls]
    return float(sum(keys))


def _sizes(site: Site, call: Call, factors: Factors) -> SiteSizes:
    visible, keys, alone = call.visible(), call.key.shape[2], not factors.qk_norm and not site.repeated
    return SiteSizes(
        query_width=factors.maps.query.shape[1],
        key_width=factors.maps.key.shape[1],
        head_dim=call.key.shape[-1],
        value_dim=call.value.shape[-1],
        query_bias=bool(factors.maps.query_bias.any()),
        key_bias=bool(factors.maps.key_bias.any()),
        folds=alone and factors.rotation is None,
        folds_before=alone,
        keys_seen=float(keys if visible is None else visible.double().sum(-1).mean()),
        keys_per_query=keys / call.query.shape[2],
        number_bytes=call.key.element_size(),
        cached=site.part == "decoder",
    )


def compute_saving(
    choice: Choice, by_site: Mapping[Site, SiteSizes | str]
) -> tuple[dict[str, Pair | float | None], dict[str, str]]:
    """Return the savings as fields of a Plan, and the reasons for unknown values."""
    unmeasured = Pair(before=None, after=None)
    before, after = Counter[str](), Counter[str]()
    for site, size in by_site.items():
        if isinstance(size, str):
            reason = f"{site.name}: {size}"
            return dict.fromkeys(COSTS, unmeasured), dict.fromkeys((*COSTS, "keys_to_gain"), reason)
        for latent in _latents(choice, site):
            for total, rank in ((before, size.head_dim * latent.keys), (after, latent.rank)):
                total.update(asdict(costs(size, replace(latent, rank=rank))))
    fields: dict[str, Pair | float | None] = {
        field: Pair(before=before[name], after=after[name]) for field, name in COSTS.items()
    }
    reasons = {}
    if any(site.repeated for site in by_site):
        reasons["parameters"] = SHARED
    if not before["cache"]:
        reasons["cache_bytes_per_token"] = NO_CACHE
    fields |= dict.fromkeys(reasons, unmeasured)
    fields["rebuilding_flops"] = after["rebuilding"] or None
    added, saved = after["projecting"] - before["projecting"], before["scoring"] - after["scoring"]
    if added > 0 and saved > 0:
        fields["keys_to_gain"] = added / saved
    elif added < 0 and saved < 0:
        keys = f"{added / saved:,.0f}"
        reasons["keys_to_gain"] = f"fewer operations only below {keys} keys per query: beyond that, scores cost more"
    elif added >= 0 >= saved and added > saved:
        reasons["keys_to_gain"] = NEVER
    return fields, reasons


def _latents(choice: Choice, site: Site) -> list[LatentSizes]:
    basis = choice.bases[site]
    before = basis.latents.turn is not None
    return [
        LatentSizes(len(basis.heads_of(at)), len(group), rank, before)
        for at, (group, rank) in enumerate(zip(basis.groups, choice.ranks[site], strict=True))
    ]


def _list_ranks(bases: Mapping[Site, Basis], ranks: Mapping[Site, Sequence[int]]) -> list[KeyRank]:
    return [
        KeyRank(
            site=site.name,
            layer=site.layer,
            part=site.part,
            kv_head=group[0],
            kv_heads=list(group) if len(group) > 1 else [],
            heads=basis.heads_of(latent),
            rank=ranks[site][latent],
            head_dim=basis.sizes[latent],
        )
        for site, basis in bases.items()
        for latent, group in enumerate(basis.groups)
    ]


def _check_plan(plan: Plan, full: Sequence[KeyRank]) -> None:
    """Raise UsageError unless the plan lists the same latents as `full`, the model's latents at full rank."""
    remaining, problems = {(key.site, key.kv_head): key for key in full}, list[str]()
    for key in plan.ranks:
        model, name = remaining.pop((key.site, key.kv_head), None), f"key head {key.kv_head} of {key.site}"
        if model is None:
            problems.append(f"the plan contains a rank for {name}, which the model lacks")
            continue
        for field in ("kv_heads", "heads", "head_dim", "layer", "part"):
            theirs, ours = getattr(key, field), getattr(model, field)
            if theirs != ours:
                problems.append(f"{name} has {field} {theirs} in the plan, but {ours} in the model")
    problems += [f"the plan lacks a rank for key head {kv_head} of {site}" for site, kv_head in remaining]
    if problems:
        raise UsageError(
            f"The plan does not fit this model: {problems[0]}.",
            "Give a plan made for a model of the same shape, or create one: attnlens ranks --budget loss:1%.",
        )


def _compare_models(planned: ModelInfo, model: ModelInfo) -> list[str]:
    """Return a note if the plan was made for a model other than `model`, else an empty list."""
    if all(getattr(planned, name) == getattr(model, name) for name in ("id", "revision", "files")):
        return []
    same = bool(model.files) and [f.sha256 for f in planned.files] == [f.sha256 for f in model.files]
    at = f"@{planned.revision}" if planned.revision else ""
    return [f"The ranks are those of a plan for {planned.id}{at}, with {'the same' if same else 'different'} weights."]
