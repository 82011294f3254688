"""Tests that a budget finds the ranks that it promises: nested, cheapest of their size, valid on other text."""

import copy
import itertools
import math
from dataclasses import replace
from functools import partial

import families
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded import BARE, apart, family, grouped, loaded, outputs, sites_of
from swap_reports import with_plan

import attnlens
from attnlens import arguments
from attnlens.arguments import Budget
from attnlens.errors import TextError, UsageError
from attnlens.kernels import parsed
from attnlens.lab.ranks import pipeline, search
from attnlens.lab.ranks.bases import _interpolate, fit_forms, levels, sensitivities
from attnlens.lab.ranks.pipeline import LatentSizes, SiteSizes, compute_saving, costs, sizes
from attnlens.lab.ranks.search import BudgetSearch, Losses, Sample, measure_losses, rise_of, split_by_text
from attnlens.maths.linalg.spectra import nested_steps
from attnlens.maths.statistics import Design
from attnlens.models import hooks, texts
from attnlens.models.texts import Cut
from attnlens.models.texts.targets import feed
from attnlens.records import Pair, Rise
from attnlens.report import export
from attnlens.report.pictures.swaps import budget_note
from attnlens.report.sections.plans import plan_lines, plan_rows
from attnlens.runs.swap import fit as fit_module
from attnlens.runs.swap.pipeline import swap_kernel
from attnlens.runs.swap.sites import SwapSetup

RANK, BOOK = parsed("rank:65536"), texts.sample("demo")
SMALL = {"windows": 16, "length": 32} | BARE
TINY = {"latents": "group=1", "windows": 8, "length": 16, "batch_size": 4} | BARE


def quiet(_amount):
    pass


def bases(setup, fed):
    """The directions of every swapped site, in the form that its kernel names."""
    form, batches = next(iter(setup.swaps.values())).kernel, [("", each) for each in fed]
    return fit_forms(SwapSetup(setup.loaded, setup.sites, setup.swaps), [form], batches, quiet)[form.spelling][None]


@pytest.fixture(scope="module")
def progress_and_report(demo):
    """The plan of 3 % for `demo`, on other windows of its own text, and the (done, total) of its search."""
    progress = []
    note = lambda stage, *counts: progress.append(counts) if stage == "budget" else None  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "SEQUENCES", 96)
        patch.setattr(search, "DEFAULT_WINDOWS", 1)
        return progress, attnlens.find_ranks(demo, budget="loss:3%", progress=note, **SMALL)


@pytest.fixture(scope="module")
def report(progress_and_report):
    return progress_and_report[1]


@pytest.fixture
def few(monkeypatch):
    """Fit and choose on little text."""
    monkeypatch.setattr(search, "SEQUENCES", 48)
    monkeypatch.setattr(search, "DEFAULT_WINDOWS", 1)


def batches_of(model, sequences=8, tokens=32, **more):
    return texts.batches(model, BOOK, Cut(tokens=tokens, sequences=sequences, batch_size=4, **more))


def cut_parts(model, sequences=48, tokens=32):
    """The three parts of so many windows, none of which is evaluated."""
    evaluated = batches_of(model, tokens=tokens)
    return search.cut_samples(model, BOOK, Cut(tokens=tokens, sequences=sequences, batch_size=8), evaluated, None)


def budgeting(model, *, layers=None):
    """A search over all sites, or those of some layers."""
    sites = sites_of(model.model, batches_of(model).batches[0].inputs)
    swaps = {site: hooks.Replacement(RANK) for site in sites if layers is None or site.layer in layers}
    return BudgetSearch(model, sites, swaps, "causal", progress=quiet, form_named=True)


# --- exact ranks, and sensitivities -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["demo", "gemma2", "gpt_oss"])
def test_full_rank_is_the_model_itself(name, demo):
    """With a softcap (Gemma 2), sinks (gpt-oss) and groups too."""
    model = demo if name == "demo" else grouped(name)
    setup, (fed, *_) = budgeting(model), feed(model, batches_of(model), "causal", 0)
    setup.bases = bases(setup, [fed])
    changes = []
    for full in (True, False):
        heads = {site: (len(basis.kv_heads), basis.latents.head_dim) for site, basis in setup.bases.items()}
        ranks = {site: [head_dim if full else 1] * count for site, (count, head_dim) in heads.items()}
        with hooks.replace(model.model, setup.sites, setup.build_swaps(ranks)):
            changes.append(outputs(model.model, fed.inputs))
    own = outputs(model.model, fed.inputs)
    assert apart(own, changes[0]) <= 1e-5
    assert apart(own, changes[1]) > 1e-3, "the control"


def test_all_directions_of_a_basis_are_the_identity_and_each_key_head_has_its_own_rank():
    model = grouped()
    for basis in bases(budgeting(model), feed(model, batches_of(model), "causal", 0)).values():
        product = basis.latents.query_map @ basis.latents.key_map.mT
        assert basis.latents.query_map.shape == (2, 10, 10)
        assert apart([torch.eye(10).expand(2, 10, 10)], [product]) < 1e-6
        shared = basis.latents.maps([3, 10])["key_map"]
        assert torch.equal(shared[0], shared[2]), "query heads of one key head share its map"
        assert not shared[0][..., 3:].any()
        assert bool(shared[3].flatten(0, 1).any(0).all())


def sampled(model, sites, fed, seed):
    """Calls, their outputs, the loss of targets drawn from the model, and their number, for one batch."""
    calls, answers, generator = {}, {}, torch.Generator().manual_seed(seed)
    model.model.requires_grad_(True)
    with hooks.watch(model.model, sites, calls.__setitem__, answers.__setitem__):
        logits = hooks.forward(model.model, fed.inputs).logits[fed.targets != -100]
    drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
    return calls, answers, -logits.log_softmax(-1).gather(1, drawn[:, None]).sum(), len(drawn)


def test_sensitivities_are_the_second_moments_of_a_naive_softmax_over_queries():
    """½ Σ_i ⟨g_i, Σ_j p_ij v_j − o_i⟩², query by query; the model stays as it was."""
    model = grouped()
    model.model.requires_grad_(False)
    setup, fed = budgeting(model), feed(model, batches_of(model, sequences=2, tokens=9), "causal", 0)
    fitted = bases(setup, fed)
    ours = sensitivities(replace(setup, seed=3), fitted, fed, quiet)
    assert not any(weight.requires_grad or weight.grad is not None for weight in model.model.parameters())
    calls, answers, loss, drawn = sampled(model, setup.sites, fed[0], 3)
    gradients = dict(zip(answers, torch.autograd.grad(loss, list(answers.values())), strict=True))
    for site, basis in fitted.items():
        expected = torch.zeros(2, 11, dtype=torch.float64)
        call, output, gradient = calls[site], answers[site].detach().double(), gradients[site].double()
        for sequence, head, i in itertools.product(range(2), range(6), range(9)):
            a, b = basis.latents.query_map[head // 3], basis.latents.key_map[head // 3]
            query = call.query[sequence, head, i].detach().double()
            seen = (slice(sequence, sequence + 1), head // 3, slice(i + 1))
            key, value = (tensor[seen][0].detach().double() for tensor in (call.key, call.value))
            for rank in range(10):
                weights = (key @ b[:, :rank] @ a[:, :rank].mT @ query * call.scale).softmax(0)
                change = gradient[sequence, i, head] @ (weights @ value - output[sequence, i, head])
                expected[head // 3, rank] += change**2 / 2
        assert apart([expected / drawn], [ours[site]]) < 1e-5
        assert bool((ours[site][:, 10] == 0).all())


def test_ranks_between_levels_are_interpolated():
    assert levels(10) == list(range(11))
    assert levels(64) == list(range(0, 65, 4))
    assert levels(17) == [*range(0, 17, 2), 17]
    table = torch.full((1, 65), torch.nan)
    table[0, levels(64)] = torch.arange(16.0, -1, -1).square()
    between = _interpolate(table, [64])
    assert bool(between.isfinite().all())
    assert between[0, 6] == (between[0, 4] + between[0, 8]) / 2
    assert len(nested_steps(between.double())) == 16, "no step ends between two levels"


def of_logits(setup, fitted, batches, progress):
    """Sensitivity by the logits' gradient: ½ Σ_i (Σ_{l>r} ⟨q_i, a_l⟩⟨b_l, g_i⟩)², g_i = ∂loss/∂q_i."""
    totals = {site: torch.zeros(len(basis.kv_heads), basis.latents.head_dim + 1) for site, basis in fitted.items()}
    count = 0
    for fed in batches:
        calls, _, loss, drawn = sampled(setup.loaded, setup.sites, fed, setup.seed)
        count += drawn
        for site, slope in zip(fitted, torch.autograd.grad(loss, [calls[site].query for site in fitted]), strict=True):
            query = calls[site].query.detach().double()
            lost = (query @ fitted[site].latents.query_map) * (slope.double() @ fitted[site].latents.key_map)
            totals[site][:, :-1] += lost.flip(-1).cumsum(-1).flip(-1).square().sum((0, 2))
    return {site: total / (2 * count) for site, total in totals.items()}


@pytest.mark.parametrize("naive", [False, True], ids=["softmax", "control"])
def test_a_saturated_head_that_is_needed_keeps_its_directions(demo, monkeypatch, naive):
    """A head whose logits are × 100: their gradient vanishes, but without them the loss is a tenth higher."""
    planted = replace(demo, model=copy.deepcopy(demo.model))
    part, columns = planted.model.transformer.h[0].attn.c_attn, slice(4 * 16, 5 * 16)
    with torch.no_grad():
        part.weight[:, columns] *= 100
        part.bias[columns] *= 100
    if naive:
        monkeypatch.setattr(search, "sensitivities", of_logits)
    setup = budgeting(planted, layers=[0])
    choice = setup.choose(*cut_parts(planted, sequences=72, tokens=64), Budget("loss", 0.01))
    ranks = next(iter(choice.ranks.values()))
    cliffs = [step.rise.share for step in choice.steps if step.rise.share > 0.05]
    of_nothing, mean = float(setup.table[4, 0]) / 2.6, setup.mean_rank(ranks)
    if naive:
        assert (of_nothing < 0.01, bool(cliffs), mean > 6) == (True, True, True)
    else:
        assert (of_nothing > 0.1, bool(cliffs), ranks[4] > 8, mean < 5) == (True, False, True, True)


# --- nested plans -----------------------------------------------------------------------------------------------------
any_costs = st.lists(st.floats(0, 10), min_size=5, max_size=5).map(lambda costs: [*costs, 0.0])
"""Costs need not fall with more directions: one wrong direction can be worse than none."""


@settings(max_examples=40, deadline=None)
@given(st.lists(any_costs, min_size=1, max_size=3))
def test_nested_plans_grow_dearer_and_each_is_the_cheapest_of_its_size(table):
    ranks, sums, all_ranks = [5] * len(table), [0.0], list(itertools.product(range(6), repeat=len(table)))
    for head, rank in nested_steps(torch.tensor(table, dtype=torch.float64)):
        assert rank < ranks[head], "a step only ever removes directions"
        ranks[head] = rank
        sums.append(sum(row[r] for row, r in zip(table, ranks, strict=True)))
        cheapest = min(sum(row[r] for row, r in zip(table, p, strict=True)) for p in all_ranks if sum(p) <= sum(ranks))
        assert sums[-1] == pytest.approx(cheapest, abs=1e-9)
    assert sums == sorted(sums)
    assert ranks == [0] * len(table)


def test_heads_of_fewer_directions_have_no_further_steps():
    table = torch.tensor([[3.0, 1.0, 0.0, torch.inf, torch.inf], [8.0, 4.0, 2.0, 1.0, 0.0]])
    assert sorted(rank for head, rank in nested_steps(table) if head == 0) == [0, 1]


def test_a_head_of_rank_four_gets_no_more_than_four(demo):
    """Its W_Q is projected onto four dimensions; the control is the same head of the untouched model."""
    planted, (layer, head) = copy.deepcopy(demo.model), (3, 2)
    basis = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))[0][:, :4]
    part, columns = planted.transformer.h[layer].attn.c_attn, slice(head * 16, (head + 1) * 16)
    with torch.no_grad():
        part.weight[:, columns] = part.weight[:, columns] @ basis @ basis.mT * 4
        part.bias[columns] = part.bias[columns] @ basis @ basis.mT * 4

    def rank_within(model, share):
        choice = budgeting(model, layers=[layer]).choose(*cut_parts(model, sequences=36), Budget("loss", share))
        return next(iter(choice.ranks.values()))[head]

    # with so small a budget, every direction that matters is left
    assert rank_within(replace(demo, model=planted), 1e-5) <= 4 < rank_within(demo, 1e-5)


# --- the promise ------------------------------------------------------------------------------------------------------
def check_promise(report, budget, *counts):
    """The plan keeps its promise, and no window is used twice of those that fit, choose, promise and are evaluated."""
    plan = report.plan
    assert plan.mean_rank < 0.6 * plan.head_dim, "a plan that cuts nothing promises nothing"
    assert plan.estimated.bound(search.MARGIN) <= plan.budget == budget
    assert plan.promised.high <= budget
    assert plan.measured.ci95[0] <= plan.promised.share <= plan.measured.ci95[1]
    assert plan.within_budget
    smaller = [step.rise.bound(search.MARGIN) for step in plan.steps if step.mean_rank < plan.mean_rank]
    assert smaller
    assert min(smaller) > budget, "every smaller plan tried is too dear"
    assert plan.estimated in [step.rise for step in plan.steps]
    assert plan.measured.share == pytest.approx(report.swap.loss.after / report.swap.loss.before - 1)
    parts = [part[0].windows for part in (plan.fitted_on, plan.chosen_on, plan.promised_on, plan.settings.texts)]
    assert tuple(map(len, parts)) == counts
    assert len(set().union(*parts)) == sum(counts)
    return parts


def test_a_plan_is_within_its_budget_on_each_part_of_the_text_and_no_window_is_used_twice(report):
    plan, parts = report.plan, check_promise(report, 0.03, 32, 32, 32, 16)
    (calibration,) = plan.settings.calibrations
    assert calibration.windows == sorted(itertools.chain(*parts[:3]))
    assert (plan.estimated.sequences, plan.promised.sequences) == (32, 32)
    assert all(max(part) - min(part) > 0.75 * calibration.available for part in parts), "spread over the whole text"


@pytest.mark.full
def test_a_plan_of_one_per_cent_on_the_whole_text(demo):
    """All windows are read once: 34 fit, 33 choose, 33 promise, 32 are evaluated."""
    report = attnlens.find_ranks(demo, budget="loss:1%", **BARE)
    check_promise(report, 0.01, 34, 33, 33, 32)
    assert report.plan.promised_on[0].available == 132


@pytest.mark.parametrize(("placement", "pack"), [("spread", True), ("first", False), ("random", True)])
def test_parts_of_several_texts_are_disjoint(demo, pack, placement):
    contents = [replace(text, text=text.text[:12000]) for text in texts.sample("another")[:2]]
    cut = Cut(tokens=32, sequences=60, pack=pack, placement=placement, batch_size=8)
    evaluated = texts.batches(demo, contents, replace(cut, sequences=16))
    parts = search.cut_samples(demo, contents, cut, evaluated, None)
    for text in contents:
        digest = next(read.sha256 for read in evaluated.texts if read.name == text.name)
        taken = [*(part.batches.taken[digest] for part in parts), evaluated.taken[digest]]
        assert len(frozenset().union(*taken)) == sum(map(len, taken))
        assert [len(part) for part in taken] == [10, 10, 10, 8]
    assert [part.design.count for part in parts] == [20, 20, 20]
    assert list(dict.fromkeys(parts[2].batches.parts)) == [text.name for text in contents]


def test_rises_are_those_of_a_loop_over_windows(demo, report):
    """Estimated, promised and measured: losses of `demo` with and without the plan's ranks, window by window."""
    plan, cut = report.plan, Cut(tokens=32, batch_size=32, placement="first")
    read = texts.batches(demo, BOOK, replace(cut, sequences=10**6))
    fed, design = feed(demo, read, "causal", 0), Design.plain(read.sequences)
    own = measure_losses(demo, fed, "causal", design).means
    setup, evaluated = budgeting(demo), texts.batches(demo, BOOK, Cut(tokens=32, sequences=16))
    fitting = search.cut_samples(demo, BOOK, Cut(tokens=32, sequences=96), evaluated, None)[0]
    assert list(fitting.batches.texts) == plan.fitted_on
    form = parsed(f"rank:65536,{plan.form}")
    fed_parts = [("", part) for part in feed(demo, fitting.batches, "causal", 0)]
    setup.use_form(fit_forms(setup, [form], fed_parts, quiet), form)
    ranks = {site: [key.rank for key in plan.ranks if key.layer == site.layer] for site in setup.sites}
    with hooks.replace(demo.model, setup.sites, setup.build_swaps(ranks)):
        after = measure_losses(demo, fed, "causal", design).means
    stages = (plan.chosen_on, plan.estimated), (plan.promised_on, plan.promised), (plan.settings.texts, plan.measured)
    for (text,), rise in stages:
        assert float(after[text.windows].mean() / own[text.windows].mean()) - 1 == pytest.approx(rise.share, abs=1e-6)


def test_the_promising_part_chooses_nothing_and_a_larger_budget_buys_smaller_ranks(demo):
    fitting, choosing, promising = cut_parts(demo)
    first, other, swapped, of_less = (
        budgeting(demo, layers=[2]).choose(fitting, *parts, Budget("loss", share))
        for *parts, share in (
            (choosing, promising, 0.02),
            (choosing, fitting, 0.02),
            (promising, choosing, 0.02),
            (choosing, promising, 0.005),
        )
    )
    assert (first.ranks, first.estimated, first.steps) == (other.ranks, other.estimated, other.steps)
    assert first.promised != other.promised
    assert swapped.steps != first.steps, "the control"
    large, small = (torch.tensor(list(choice.ranks.values())) for choice in (of_less, first))
    assert bool((small <= large).all()), "nested"
    assert small.sum() < large.sum()


def test_a_budget_of_perplexity_is_spent_in_perplexity(demo, few):
    """Its rises are those of exp(loss), which spends as much as a budget of loss of log(1 + share) nats."""
    report = attnlens.find_ranks(demo, latents="group=1", budget="ppl:6%", **SMALL)
    plan, loss = report.plan, report.swap.loss
    assert (plan.unit, plan.budget) == ("ppl", 0.06)
    assert plan.measured.share == pytest.approx(math.expm1(loss.after - loss.before), abs=1e-6)
    assert plan.measured.share != pytest.approx(loss.after / loss.before - 1, rel=0.2), "the control"
    assert plan.estimated.bound(search.MARGIN) <= 0.06
    assert "a perplexity 6 % higher" in plan_lines(plan)[0]
    assert plan.mean_rank < 16


def test_progress_reaches_its_end(progress_and_report):
    """`demo` has three forms of at most five; see test_ranks_plans for a search of one form."""
    progress, report = progress_and_report
    assert report.plan.forms
    assert progress[0][0] == 0
    assert progress[-1][0] == progress[-1][1]
    assert progress == sorted(progress)
    assert len({total for _, total in progress}) == 1


def test_a_budget_that_no_cut_meets_keeps_everything(demo, few):
    plan = attnlens.find_ranks(demo, budget="loss:1e-9%", **TINY).plan
    assert plan.mean_rank == 16
    assert "within the budget" in plan.reasons["mean_rank"]
    assert abs(plan.measured.share) < 1e-5
    assert plan.parameters.before == plan.parameters.after


def test_a_rise_over_several_texts():
    """Means over tokens, of all sequences and of each text's own; one text has no rises of its own."""
    before, after, counts = (torch.tensor(x).double() for x in ([2.0, 4, 3, 1], [3.0, 4, 3, 2], [10.0, 10, 10, 20]))
    rise = rise_of(Losses(before, counts, Design.of("abab")), after, ["a", "b"], 0)
    assert rise.by_text == pytest.approx({"a": 60 / 50 - 1, "b": 80 / 60 - 1})
    assert rise.share == pytest.approx(140 / 110 - 1)
    assert rise.over == "windows"
    assert rise.bound(1) == pytest.approx(rise.high) == pytest.approx(rise.ci95[1])
    assert rise.bound(2) == pytest.approx(2 * rise.high - rise.share)
    assert rise.bound(0) == pytest.approx(80 / 60 - 1), "each text alone counts too"
    assert all(low < rise.by_text[text] < high for text, (low, high) in rise.ci95_by_text.items())
    assert rise_of(Losses(before, counts, Design.plain(4)), after, ["a"], 0).by_text == {}
    assert rise_of(Losses(before, counts, Design.plain(4)), after * math.nan, ["a"], 0) is None


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


@pytest.fixture
def two_texts(tmp_path):
    """An evaluated text, and two to calibrate on: `demo` predicts capitals badly, and loses nothing there."""
    book = BOOK[0].text[20000:]
    for name, text in {"begin": BOOK[0].text[:20000], "capitals": book.upper(), "book": book}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    calibration = [str(tmp_path / f"{name}.txt") for name in ("book", "capitals")]
    return {"text": str(tmp_path / "begin.txt"), "calibration": calibration}


def test_several_texts_keep_the_budget_each_by_itself(demo, few, two_texts):
    """On the mean alone, the capitals would hide what the book loses."""
    options = {"latents": "group=all", "budget": "loss:2%", "windows": 8, "length": 64}
    plan = attnlens.find_ranks(demo, **options, **two_texts, **BARE).plan
    assert set(plan.estimated.by_text) == set(plan.promised.by_text) == {"book.txt", "capitals.txt"}
    assert plan.held_out
    assert plan.estimated.bound(search.MARGIN) <= 0.02
    assert plan.mean_rank < 16
    too_dear = [step.rise for step in plan.steps if step.mean_rank < plan.mean_rank]
    assert any(rise.high <= 0.02 < max(rise.by_text.values()) for rise in too_dear), "the rule has to bind"


def rows_of(batches):
    return [row for fed in batches for row in fed.inputs["input_ids"].tolist()]


def test_all_calibration_texts_are_read_equally(demo, few, monkeypatch, two_texts):
    rows = []

    def stop(_setup, _forms, batches, _progress):
        rows[:] = rows_of(fed for _, fed in batches)
        raise ZeroDivisionError

    monkeypatch.setattr(search, "fit_forms", stop)
    with pytest.raises(ZeroDivisionError):
        attnlens.find_ranks(demo, budget="loss:1%", **two_texts, **SMALL)
    assert [demo.tokenizer.decode(row).isupper() for row in rows] == [False] * 8 + [True] * 8


def test_maps_fitted_without_a_text_do_not_depend_on_it(demo, monkeypatch):
    """Gradients for the output metric of each text are of that text alone, and a text is measured by other maps."""
    read, output_metrics = [], fit_module.output_metrics

    def recorded(setup, fed):
        fed = list(fed)
        read.append(rows_of(fed))
        return output_metrics(setup, fed)

    monkeypatch.setattr(fit_module, "output_metrics", recorded)
    form, text = parsed("rank:2,metric=output"), BOOK[0].text
    contents = [texts.Content(text[:9000], "first"), texts.Content(text[9000:], "second")]
    batches = texts.batches(demo, contents, Cut(tokens=16, sequences=9, batch_size=4))
    part = Sample(batches, Design.of(batches.parts))
    fed = split_by_text(feed(demo, batches, "causal", 0), part)
    setup = replace(budgeting(demo), form_named=False)
    setup.swaps = dict.fromkeys(setup.sites, hooks.Replacement(form))
    fits = fit_forms(setup, [form], fed, quiet)
    fed_of = {name: [one for text, one in fed if text == name] for name in dict.fromkeys(batches.parts)}
    assert len(fed_of) == 2
    assert read == [rows_of(own) for own in fed_of.values()]
    without, whole = (fits[form.spelling][name][setup.sites[0]].latents.key_map for name in ("first", None))
    assert not torch.equal(without, whole), "the control"
    setup.use_form(fits, form)
    ranks = [2] * len(setup.full_ranks)
    stored: dict[str, torch.Tensor] = {}
    kept = replace(setup, keep=lambda name, make: stored.setdefault(name, make()))
    risen = [search.Trial.of(each, part).rise([size] * len(ranks)) for each in (setup, kept) for size in (1, 2)]
    assert risen[:2] == risen[2:], "losses are stored under the ranks and maps they belong to"
    rise, ranks = search.Trial.of(setup, part).rise(ranks), setup.split_by_site(ranks)
    for name, own in fed_of.items():
        plain = Design.plain(batches.parts.count(name))
        before = measure_losses(demo, own, "causal", plain).mean
        with hooks.replace(demo.model, setup.sites, setup.build_swaps(ranks, setup.bases_without[name])):
            assert measure_losses(demo, own, "causal", plain).mean / before - 1 == pytest.approx(rise.by_text[name])


# --- savings ----------------------------------------------------------------------------------------------------------
def tiny_sizes(**changed):
    """d_model 12, two query heads per key head, head_dim 4, values of 5, 6.5 keys seen, float16."""
    plain = {"query_width": 12, "key_width": 12, "head_dim": 4, "value_dim": 5, "query_bias": True, "key_bias": False}
    plain |= {"folds": True, "folds_before": True, "keys_seen": 6.5, "keys_per_query": 1.0, "number_bytes": 2}
    return SiteSizes(**plain | {"cached": True} | changed)


def test_savings_counted_by_hand():
    def cost(rank, **changed):
        return costs(tiny_sizes(**changed), LatentSizes(heads=2, keys=1, rank=rank))

    own, folded, rotated = cost(4), cost(3), cost(3, folds=False)
    # W_Q: 2 heads × (12 × 4 + 4), W_K: 12 × 4; 3 × 48 products; 2 heads × 4 × 6.5 of scores; a key of 4, a value of 5
    assert (own.parameters, own.flops, own.cache) == (152, 288 + 104, 18)
    assert (folded.parameters, folded.flops, folded.cache) == (2 * 39 + 36, 2 * 108 + 78, 16)
    # W_Q and W_K stay, A and B of 4 × 3 are added, and act on two queries and a key
    assert (rotated.parameters, rotated.flops, rotated.cache) == (152 + 24, 288 + 2 * 3 * 12 + 78, 16)
    assert cost(4, folds=False) == own, "a head of full rank needs no maps"
    assert cost(0).parameters == cost(0, folds=False).parameters == cost(3, cached=False).cache == 0


def test_savings_of_a_shared_latent_counted_by_hand():
    """Three key heads with two query heads each, a latent of 7 numbers instead of 12."""
    latent = LatentSizes(heads=6, keys=3, rank=7)
    folded, rotated, before = (
        costs(tiny_sizes(folds=folds), replace(latent, before=before))
        for folds, before in ((True, False), (False, False), (False, True))
    )
    # W_Q of six heads with its bias, A of 4 × 7 for each key head, and one W_K B; each head's query meets the latent
    assert folded.parameters == 6 * (12 * 4 + 4) + 3 * 4 * 7 + 12 * 7
    assert folded.flops == 2 * (6 * (12 * 4 + 4 * 7) + 12 * 7) + 2 * 7 * 6 * 6.5
    # A and B of 4 × 7 for each key head besides W_Q and W_K
    assert rotated.parameters == 6 * (12 * 4 + 4) + 3 * 12 * 4 + 2 * 3 * 4 * 7
    assert rotated.flops == 2 * (6 * (12 * 4 + 4 * 7) + 3 * (12 * 4 + 4 * 7)) + 2 * 7 * 6 * 6.5
    # W_Q unchanged; W_K B of 12 × 7, back to 12 coordinates by 7 × 12, and the mean key
    assert before.parameters == 6 * (12 * 4 + 4) + 12 * 7 + 7 * 12 + 12
    assert before.flops == 2 * (6 * 12 * 4 + 12 * 7 + 7 * 12) + 2 * 4 * 6 * 6.5
    assert before.rebuilding == 2 * 7 * 12
    assert {cost.cache for cost in (folded, rotated, before)} == {(7 + 3 * 5) * 2}


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_sizes_are_those_of_the_weights(name):
    model = family(name)
    inputs = batches_of(model, sequences=2, tokens=7).batches[0].inputs
    of_sites = sizes(model, list(sites_of(model.model, inputs)), inputs).values()
    # a causal query of seven tokens sees four keys on average
    facts = {(size.folds, size.folds_before, size.keys_seen, size.cached, size.number_bytes) for size in of_sites}
    assert facts == {(name == "gpt2", name != "qwen3", 4.0, True, 4)}
    if name != "gpt2":
        config = model.model.config
        kv, group = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
        counted = sum(kv * costs(size, LatentSizes(group, 1, size.head_dim)).parameters for size in of_sites)
        named = [p for key, p in model.model.named_parameters() if "q_proj" in key or "k_proj" in key]
        assert counted == sum(p.numel() for p in named)


@pytest.mark.parametrize(
    ("name", "unknown", "reason"),
    [("bert", "cache_bytes_per_token", "cache"), ("albert", "parameters", "several sites")],
)
def test_savings_that_do_not_exist_have_a_reason(few, name, unknown, reason):
    plan = attnlens.find_ranks(family(name), budget="loss:50%", **TINY | {"batch_size": 2}).plan
    assert getattr(plan, unknown).after is None
    assert reason in plan.reasons[unknown]
    assert plan.flops_per_token.after is not None
    assert name == "albert" or plan.parameters.after <= plan.parameters.before


def test_with_a_rotation_parameters_grow_and_the_cache_shrinks():
    """Ranks 3 and 7 of 10 in the first layer of a grouped model with rotation, 0 and 10 in the second."""
    model = grouped()
    setup, batches = budgeting(model), batches_of(model, sequences=4, tokens=16)
    setup.bases = bases(setup, feed(model, batches, "causal", 0))
    ranks, of_sites = setup.split_by_site([3, 7, 0, 10]), sizes(model, list(setup.sites), batches.batches[0].inputs)
    choice = search.Choice(setup.bases, ranks, setup.build_swaps(ranks))
    fields, _ = compute_saving(choice, of_sites)
    # a key head and its three query heads: 4 × (48 × 10 + 10) numbers; two maps of 10 × 3 and of 10 × 7
    assert fields["parameters"] == Pair(before=4 * 1960, after=3 * 1960 + 2 * 30 + 2 * 70)
    assert fields["cache_bytes_per_token"] == Pair(before=4 * 20 * 4, after=(13 + 17 + 10 + 20) * 4)
    assert fields["flops_per_token"].before == 4 * (4 * 2 * 480 + 3 * 2 * 10 * 8.5)
    # at `keys_to_gain` the maps cost as much as they save; without the head of rank 0, which only saves
    choice = replace(choice, ranks={site: [rank or 10 for rank in some] for site, some in choice.ranks.items()})
    length = compute_saving(choice, of_sites)[0]["keys_to_gain"]

    def added(keys):
        sized = {site: replace(size, keys_seen=keys) for site, size in of_sites.items()}
        pair = compute_saving(choice, sized)[0]["flops_per_token"]
        return pair.after - pair.before

    assert length == pytest.approx((4 * 2 * 30 + 4 * 2 * 70) / (3 * 2 * (7 + 3)))
    assert added(length) == pytest.approx(0)
    assert added(length / 2) > 0 > added(2 * length)


@pytest.mark.parametrize(
    ("form", "rank", "says"),
    [
        ("group=1", 5, None),
        ("group=all", 4, None),
        ("group=all", 24, "fewer operations only below"),
        ("group=all", 120, "the number of operations does not fall"),
        ("group=all,rotation=before", 24, None),
    ],
)
def test_the_number_of_keys_at_which_operations_fall(monkeypatch, form, rank, says):
    keys, (site, *_) = 1 if form == "group=1" else 8, sites_of(grouped().model, {"input_ids": torch.ones(1, 2).long()})
    size = replace(tiny_sizes(), query_width=128, key_width=128, head_dim=16)
    latent = LatentSizes(heads=keys, keys=keys, rank=rank, before="before" in form)

    def falls(seen):
        sized = replace(size, keys_seen=seen)
        return costs(sized, latent).flops < costs(sized, replace(latent, rank=16 * keys)).flops

    monkeypatch.setattr(pipeline, "_latents", lambda _choice, _site: [latent])
    fields, reasons = compute_saving(None, {site: size})
    reason = reasons.get("keys_to_gain")
    assert fields.get("keys_to_gain") is None
    assert (reason is None) == (says is None)
    assert falls(1e9) == (says is None and not latent.before) or latent.before
    if says is not None:
        assert reason.startswith(says)
        assert falls(0) == ("only below" in says)
        if "only below" in says:
            edge = float(reason.split("only below ")[1].split(" keys")[0].replace(",", ""))
            assert (falls(edge - 1), falls(edge + 1)) == (True, False)


# --- files, tables, pictures ------------------------------------------------------------------------------------------


def test_tables_and_pictures_show_every_rank(report, tmp_path):
    cells = next(column.cells for column in plan_rows(report.plan).columns if column.title == "numbers kept")
    assert list(cells) == [f"{key.rank} of 128" for key in report.plan.ranks], "eight key heads of 16 each"
    lines = " ".join(plan_lines(report.plan))
    words = ("Mean rank", "Estimated", "Predicted", "Measured", "within the budget", "cache", "operations")
    assert all(word in lines for word in (*words, "half of the full rank"))
    assert export.drawings(report, tmp_path)[tmp_path / "ranks.png"]()[0].startswith(b"\x89PNG")
    assert tmp_path / "ranks.png" not in export.drawings(with_plan(report, None), tmp_path)
    for unit in ("loss", "ppl"):
        note = budget_note(report.plan.model_copy(update={"unit": unit}))
        assert note.startswith(f"{unit} ≤ +3 %: predicted ")
    one = report.plan.ranks[0]
    latents = [one.model_copy(update={"rank": rank, "head_dim": size}) for rank, size in ((20, 48), (7, 48), (12, 32))]
    kept = plan_rows(report.plan.model_copy(update={"ranks": latents})).columns[-1]
    assert (kept.title, list(kept.cells)) == ("numbers kept", ["20 of 48, 7 of 48, 12 of 32"])


def test_broken_promises_are_named(report):
    rise = Rise(share=0.007, ci95=(0.005, 0.009), sequences=32, by_text={"verse": 0.046, "code": 0.001})
    plan = report.plan.model_copy(update={"promised": rise})
    assert not plan.within_budget
    assert any("above it on verse: the budget is not guaranteed" in line for line in plan_lines(plan))
    even = plan.model_copy(update={"promised": rise.model_copy(update={"by_text": {"verse": 0.008, "code": 0.001}})})
    assert even.within_budget, "the control"
    worse = even.model_copy(update={"measured": Rise(share=0.031, sequences=16)})
    assert not worse.within_budget
    broken = "the prediction fails on this text"
    assert [any(broken in line for line in plan_lines(each)) for each in (even, worse)] == [False, True]


# --- refusals ---------------------------------------------------------------------------------------------------------
def find(model, budget="loss:1%", **options):
    return attnlens.find_ranks(model(), budget=budget, **options)


BUDGETS = dict.fromkeys(
    ("1%", "loss:1", "loss:%", "loss:1.2.3%", "kl:1%", "", "loss:nan%", 0.01), "Cannot parse the budget"
)
BUDGETS |= dict.fromkeys(("loss:0%", "loss:-1%", "loss:1e999%"), "is not positive and finite")
LATENTS = ("rank=8", "8", "group=1,8", "group", "", "group=1+window:8", "group=1 ")
REFUSED = [  # call, problem, remedy
    *((partial(arguments.budget, words), says, "") for words, says in BUDGETS.items()),
    *(
        (partial(attnlens.find_ranks, "x/y", latents=words), "--latents: cannot parse", "group=all,rotation=before")
        for words in LATENTS
    ),
    (partial(attnlens.find_ranks, "x/y", latents="grop=1"), "grop", ""),
    (partial(attnlens.find_ranks, "x/y", latents="metric=inputs"), "inputs", ""),
    (partial(swap_kernel, "x/y", "rank"), "`rank` needs a rank", "attnlens ranks --budget loss:1%"),
    (partial(attnlens.heal, "x/y", "rank:group=all"), "`rank` needs a rank", "attnlens ranks --budget loss:1%"),
    (partial(find, grouped, heads=[0, 1], **SMALL), "share key heads", "all or none"),
    (partial(find, partial(family, "vit"), windows=2, **BARE), "budget cannot be applied", "rank:16"),
    (
        partial(find, lambda: loaded(families.build("bert").bert), windows=2, length=16, **BARE),
        "cannot be applied: this model has no head",
        "rank:16",
    ),
]


@pytest.mark.parametrize(("call", "says", "remedy"), REFUSED)
def test_refusals(call, says, remedy):
    with pytest.raises(UsageError, match=says) as refusal:
        call()
    assert remedy in refusal.value.remedy
    assert [arguments.budget(words) for words in ("loss:1%", "ppl: 0.5 %")] == [("loss", 0.01), ("ppl", 0.005)]


def test_calibration_needs_twelve_windows(demo, tmp_path):
    """11 windows of 32 tokens besides eight that are evaluated are too few; twelve are enough."""
    ids, options = demo.tokenizer(BOOK[0].text)["input_ids"], {"budget": "loss:50%"} | TINY | {"length": 32}
    for count in (19, 20):
        (tmp_path / f"{count}.txt").write_text(demo.tokenizer.decode(ids[: 32 * count]))
    problem = r"19\.txt has 11 windows not used for evaluation; a budget needs 12"
    with pytest.raises(TextError, match=problem) as refusal:
        attnlens.find_ranks(demo, text=str(tmp_path / "19.txt"), **options)
    assert "--length" in refusal.value.remedy
    plan = attnlens.find_ranks(demo, text=str(tmp_path / "20.txt"), **options).plan
    assert (plan.estimated.sequences, plan.promised.sequences) == (4, 4)


def test_the_number_of_calibration_windows_and_texts(demo):
    with pytest.raises(UsageError, match="need at least 5 texts, but the ranks are chosen on only 1"):
        search.cut_samples(demo, BOOK, Cut(tokens=32, sequences=48), batches_of(demo), "texts")
    assert search.count_windows(BOOK, 32) == search.count_windows(BOOK, 64) == search.SEQUENCES
    assert search.count_windows(BOOK, 8) == search.SEQUENCES / 4, "--windows makes a search shorter"
    assert search.count_windows(BOOK, 1) == 12
    assert search.count_windows(list(BOOK) * 50, 8) == 12 * 50
