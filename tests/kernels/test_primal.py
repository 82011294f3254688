"""Tests that `primal:s` is the kernel SVD of a head's own tokens, with an output by least squares."""

import math
from dataclasses import replace

import pytest
import torch
from heads import random
from loaded import BARE, SMALL, apart, family, outputs, sites_of, swap_or_heal

import attnlens
from attnlens.errors import TextError, UsageError
from attnlens.kernels import OWN, parsed
from attnlens.kernels.attention import attend, route, weights
from attnlens.kernels.attention.sums import features
from attnlens.kernels.primal import STRENGTHS, Moments, PrimalFit, regression, squared_loss
from attnlens.kernels.registry import Fit
from attnlens.lab.heal.healer import Healer
from attnlens.models import hooks, texts
from attnlens.records import Call
from attnlens.requests.swap import Amount, HealRequest
from attnlens.runs.swap.fit import fit
from attnlens.runs.swap.pipeline import swap_kernel
from attnlens.runs.swap.saved import load_swapped
from attnlens.runs.swap.sites import SwapSetup

READ = {"windows": 4, "length": 24, "batch_size": 4} | BARE
HEADS, DIM, TOKENS = 2, 6, 20


def call(sequences=8, tokens=TOKENS, seed=0, **more):
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(sequences, HEADS, tokens, DIM, generator=draw, dtype=torch.float64) + 0.4 for _ in range(3))
    return Call(q, k, v, DIM**-0.5, **more)


def own_output(case):
    return attend(case, OWN).transpose(1, 2)


def observed(case, scores, samples=0, output=None):
    fitting = PrimalFit(scores, samples)
    fitting.observe(*features(case, samples), own_output(case) if output is None else output)
    return fitting


def scored(case, maps):
    """e and r of every token."""
    query, key, _ = features(case)
    return torch.cat([query @ maps["query_map"], key @ maps["key_map"]], -1)


@pytest.mark.parametrize(("causal", "samples"), [(False, 0), (True, 0), (False, 5)])
def test_scores_are_singular_vectors_of_all_calibration_tokens(causal, samples):
    case = call(causal=causal)
    solved, seen = observed(case, 4, samples).solve(), features(case, samples)
    phi_q, phi_k = (x.transpose(0, 1).flatten(1, 2) for x in seen[:2])  # (heads, all tokens, features)
    kernel = torch.einsum("hif,hjf->hij", phi_q, phi_k)
    e, r = phi_q @ solved["query_map"], phi_k @ solved["key_map"]
    values = torch.linalg.svdvals(kernel)[:, :4]
    h_e, h_r = e / e.norm(dim=1, keepdim=True), r / r.norm(dim=1, keepdim=True)
    assert (kernel @ h_r - h_e * values[:, None]).norm() < 1e-10 * kernel.norm()
    assert (kernel.mT @ h_e - h_r * values[:, None]).norm() < 1e-10 * kernel.norm()
    count = kernel.shape[-1]
    torch.testing.assert_close(e.norm(dim=1) * count**0.5, values, rtol=1e-9, atol=0)
    torch.testing.assert_close(solved["log_multipliers"].exp(), count / values / TOKENS, rtol=1e-9, atol=0)
    torch.testing.assert_close(solved["tokens"], torch.full((HEADS,), TOKENS).double())
    shuffled = kernel[:, torch.randperm(count)]
    assert (shuffled @ h_r - h_e * values[:, None]).norm() > 1e-2 * kernel.norm(), "the control"


def test_the_mean_objective_of_the_calibration_sequences_is_zero():
    solved, (query, key, _) = observed(call(), 4).solve(), features(call())

    def mean_j(query_map):
        squares = (query @ query_map).square() + (key @ solved["key_map"]).square()
        halves = (squares * solved["log_multipliers"].exp()[:, None]).sum((-2, -1)) / 2
        return (halves - (query_map * solved["key_map"]).sum((-2, -1))).mean(0)

    assert mean_j(solved["query_map"]).abs().max() < 1e-12
    assert mean_j(solved["query_map"] + 0.1).abs().max() > 1e-2


def test_an_output_that_is_linear_in_the_scores_is_recovered():
    case = call(causal=True)
    z = scored(case, observed(case, 4).solve())
    output = z @ random(HEADS, 8, DIM, seed=1) + random(HEADS, 1, DIM, seed=2)
    for scores, limits in ((4, (0, 1e-5)), (2, (1e-2, 9))):
        kernel = parsed(f"primal:{scores}").with_fitted(observed(case, scores, output=output).solve())
        error = (attend(case, kernel).transpose(1, 2) - output).norm() / output.norm()
        assert limits[0] <= error < limits[1]


def test_the_regression_is_ridge_and_its_loss_the_naive_one():
    z, y = random(1, HEADS, 50, 3, seed=1), random(1, HEADS, 50, 2, seed=2)
    moments = Moments.of(torch.cat([z, torch.ones(1, HEADS, 50, 1)], -1), y)
    for strength in (1e-8, 0.3):
        output_map, offset = regression(moments, torch.full((HEADS,), strength, dtype=torch.float64))
        for head in range(HEADS):
            x, target = z[0, head], y[0, head]
            a = torch.cat([x - x.mean(0), (50 * strength) ** 0.5 * torch.diag(x.std(0, correction=0))])
            b = torch.cat([target - target.mean(0), torch.zeros(3, 2)])
            expected = torch.linalg.lstsq(a, b).solution
            torch.testing.assert_close(output_map[head], expected, rtol=1e-9, atol=1e-10)
        residual = (y[0] - z[0] @ output_map - offset[:, None]).square().sum((-2, -1))
        torch.testing.assert_close(squared_loss(moments, output_map, offset), residual, rtol=1e-10, atol=1e-10)


def test_the_strength_of_the_ridge_is_the_best_on_the_sequences_held_out():
    case = call(sequences=4, tokens=8)
    clean = torch.cat(features(case)[:2], -1) @ random(HEADS, 2 * DIM, DIM, seed=1)
    draw, strengths = random(*clean.shape, seed=3), [torch.full((HEADS,), s).double() for s in STRENGTHS]
    norms, chosen = [], []
    for output in (clean, clean + 0.3 * draw, draw):
        solved = observed(case, DIM, output=output).solve()
        z = torch.cat([scored(case, solved), torch.ones(4, HEADS, 8, 1)], -1)
        best = []
        for at in (1, 0):
            others = [other for other in range(4) if other != at]
            train, held_out = (Moments.of(z[rows], output[rows]) for rows in (others, [at]))
            losses = [squared_loss(held_out, *regression(train, strength)) for strength in strengths]
            best.append(torch.stack(losses).argmin(0))
        output_map, offset = regression(train + held_out, torch.tensor(STRENGTHS).double()[best[0]])
        torch.testing.assert_close(solved["output_map"], output_map)
        torch.testing.assert_close(solved["offset"], offset)
        norms.append(solved["output_map"].norm())
        chosen.append(best)
    assert (chosen[2][0] > chosen[0][0]).all(), "the noise is better not fitted"
    assert (chosen[1][0] != chosen[1][1]).any(), "the control: another sequence chooses otherwise"
    assert norms[2] < norms[0]


def test_padding_and_batches_do_not_matter_to_the_fit():
    case, extra = call(), call(seed=9)
    whole = observed(case, 4).solve()
    real = (torch.arange(TOKENS + 5) < TOKENS).expand(8, 1, TOKENS + 5, -1)
    pairs = ((case.query, extra.query), (case.key, extra.key), (case.value, extra.value))
    query, key, value = (torch.cat([own, other[:, :, :5]], 2) for own, other in pairs)
    split = PrimalFit(4, 0)
    for at in (slice(0, 3), slice(3, 8)):
        split.update(Call(query[at], key[at], value[at], case.scale, allowed=real[at]))
    solved = split.solve()
    for name in ("log_multipliers", "tokens"):
        torch.testing.assert_close(solved[name], whole[name], rtol=1e-9, atol=1e-12)
    new = [attend(case, parsed("primal:4").with_fitted(maps)) for maps in (whole, solved)]
    torch.testing.assert_close(*new, rtol=1e-6, atol=1e-8)


def test_calls_without_scores_are_refused():
    case, eye = call(), torch.eye(TOKENS).bool()[None, None]
    kernel = parsed("primal:4").with_fitted(observed(case, 4).solve())
    assert route(case, kernel, "eager") == route(case, kernel, "fused") == "primal scores"
    for refused, problem in (
        (lambda: attend(replace(case, cross=True), kernel), "another sequence"),
        (lambda: attend(replace(case, query=case.query[:, :, -1:]), kernel), "same tokens"),
        (lambda: attend(replace(case, allowed=eye), kernel), "neither causal"),
        (lambda: features(call(causal=True), 3), "future tokens would leak"),
        (lambda: weights(case, kernel), "not a function of a query and a key"),
    ):
        with pytest.raises(UsageError, match=problem):
            refused()


def test_too_little_calibration_text_is_refused_and_a_head_without_rank_keeps_finite_maps():
    with pytest.raises(TextError, match="two calibration sequences"):
        observed(call(sequences=1), 4).solve()
    with pytest.raises(TextError, match="161 scores needs at least 161 calibration tokens, but got 160"):
        observed(call(), 161).solve()
    assert observed(call(), 160).solve()["query_map"].shape == (HEADS, DIM, DIM)
    assert isinstance(PrimalFit(1, 0), Fit)
    flat = replace(call(), query=call().query[..., :1].expand_as(call().query), key=call().key * 0)
    solved = observed(flat, 4).solve()
    assert all(part.isfinite().all() for part in solved.values())
    assert solved["query_map"].abs().max() == 0
    torch.testing.assert_close(solved["offset"], own_output(flat).mean((0, 2)))


def test_runs_without_a_meaning_are_refused(demo, tmp_path):
    (tmp_path / "own.txt").write_text(texts.sample("demo")[0].text + "\nAmen.")
    same_text = {"calibration": str(tmp_path / "own.txt"), "placement": "first"}
    for model, words, options, problem in (
        (demo, "primal:4", {"train": 1, "eta": -0.1}, "eta=-0.1 is not a number of at least 0"),
        (demo, "primal:4", {"train": 1, "eta": math.nan}, "eta=nan is not a number of at least 0"),
        (demo, "primal:4", {"train": 1, "eta": "x"}, "eta='x' is not a number"),
        (demo, "primal:4", {"train": 1, "ksvd_convention": "cod"}, "'cod'"),
        (demo, "rbf", {"train": 1, "eta": 0.1}, "`eta` applies only to the kernel `primal`"),
        (demo, "rbf", {"train": 1, "ksvd_convention": "code"}, "`ksvd_convention` applies only to the kernel `primal`"),
        (demo, "primal:4,samples=3", {}, "future tokens would leak"),
        (demo, "primal:9999", {}, "needs at least 9999 calibration tokens"),
        (demo, "primal:4", same_text, "of the evaluated tokens"),
        (family("bart"), "primal:4", {}, "different sequences"),
    ):
        with pytest.raises((UsageError, TextError), match=problem) as refusal:
            swap_or_heal(model, words, **READ, **options)
        assert refusal.value.remedy
    assert swap_kernel(family("bart"), "primal:4", part="encoder", **SMALL).swap.sites


@pytest.mark.full
def test_healing_takes_some_of_the_loss_back(demo):
    options = {"windows": 8, "length": 64, "train": 60, "eta": 0.2, "ksvd_convention": "code"}
    swap = attnlens.heal(demo, "primal:16", **options, **BARE).swap
    stages = {stage.name: stage.loss.after for stage in swap.stages}
    assert swap.loss.before < stages["healed"] < stages["swapped"] - 0.05
    assert (swap.healing.eta, swap.healing.ksvd_convention) == (0.2, "code")


def test_demo_loses_and_the_report_says_why_measures_are_missing(demo):
    report = swap_kernel(demo, "primal:32", windows=4, length=32, **BARE)
    swap = report.swap
    assert swap.loss.before < swap.loss.after < math.log(1024)
    assert swap.mask_error < 1e-5
    assert (swap.causality_error, swap.off_simplex, swap.formula_of, swap.healing) == (0, None, "output", None)
    assert "no attention matrix" in swap.reasons["off_simplex"]
    assert any("bounds their rank" in note for note in swap.notes)
    assert {site.path for site in swap.sites} == {"primal scores"}
    assert report.settings.calibration is not None
    exact = swap_kernel(demo, "primal:16", windows=4, length=32, **BARE).swap
    assert exact.loss.after == swap.loss.after
    assert not any("head_dim bounds" in note for note in exact.notes)
    for words in ("primal:4", "primal:4,samples=6"):
        encoder = swap_kernel(family("bert"), words, **SMALL).swap
        assert encoder.mask_error < 1e-5
        assert encoder.loss is not None


def fitted_sites(demo, kernels, **cut):
    """Text, sites, and a fitted swap of each site's kernel (one for all, or heads and kernels by site)."""
    batch = texts.batches(demo, texts.sample("demo"), texts.Cut(**cut))
    sites = sites_of(demo.model, batch.batches[0].inputs)
    chosen = dict.fromkeys(range(len(sites)), (kernels, None)) if isinstance(kernels, str) else kernels
    swaps = {sites[at]: hooks.Replacement(parsed(words), heads) for at, (words, heads) in chosen.items()}
    return batch, sites, fit(SwapSetup(demo, sites, swaps), batch, lambda _: None)


def loss_of(healer, inputs):
    """The distance to the original model with the weighted regularisers, which training minimises, and without."""
    penalties = []
    with healer.run_student(inputs, None, penalties) as (losses, _):
        distance = losses.mean()
    return distance + healer.penalty(penalties), distance, penalties


def test_scores_do_better_than_no_scores(demo):
    """The control: with W_c = 0 each head gives its mean output."""
    batch, sites, swaps = fitted_sites(demo, "primal:16", tokens=32, sequences=8)
    silent, losses = {}, []
    for site, kernel in ((site, swap.kernel) for site, swap in swaps.items()):
        maps = kernel.fitted | {"output_map": 0 * kernel.fitted["output_map"]}
        silent[site] = hooks.Replacement(kernel.with_fitted(maps))
    for chosen in (swaps, silent):
        with hooks.replace(demo.model, sites, chosen), torch.no_grad():
            losses.append(sum(float(demo.model(**b.inputs, labels=b.inputs["input_ids"]).loss) for b in batch))
    assert losses[0] < losses[1] - 0.05 * len(batch.batches)


@pytest.mark.parametrize("convention", ["paper", "code"])
def test_healing_minimises_the_distance_and_eta_times_the_squares(demo, convention):
    chosen = {1: ("primal:4", (1, 5)), 3: ("primal:4", None)}
    batch, sites, swaps = fitted_sites(demo, chosen, tokens=16, sequences=8)
    request = HealRequest(train=Amount(1, "steps"), eta=0.5, ksvd_convention=convention)
    healer = Healer(demo, sites, swaps, "causal", options=request)
    inputs, seen, layers, paper = batch.batches[0].inputs, {}, [], convention == "paper"
    healer.prepare(batch.batches[0])
    healed = healer.healed_swaps()
    with torch.no_grad(), hooks.replace(demo.model, sites, healed, visit=seen.__setitem__):
        hooks.forward(demo.model, inputs)
    for site, case in seen.items():
        case = case if healed[site].heads is None else case.select(healed[site].heads)
        maps = {name: part.double().detach() for name, part in healed[site].kernel.fitted.items()}
        query, key, _ = features(case)
        e, r = query.double() @ maps["query_map"], key.double() @ maps["key_map"]
        lam = maps["log_multipliers"].exp()[:, None] ** (1 if paper else 2)
        halves = ((e.square() + r.square()) * lam).sum(-1) / 2
        j = (halves.sum(-1) if paper else halves.mean(-1)) - (maps["query_map"] * maps["key_map"]).sum((-2, -1))
        layers.append(float((j**2).sum(1).mean() if paper else (j.mean(1) ** 2).mean()))
    assert len(layers) == 2
    expected = sum(layers) / (1 if paper else 2)
    assert expected > 1e-4
    with torch.no_grad():
        total, distance, _ = loss_of(healer, inputs)
        assert float(total - distance) == pytest.approx(0.5 * expected, rel=1e-3)
        healer.options = request.model_copy(update={"eta": 0.0})
        total, distance, _ = loss_of(healer, inputs)
        assert total == distance


def test_eta_keeps_the_objective_small(demo):
    objectives = []
    batch, sites, swaps = fitted_sites(demo, "primal:8", tokens=16, sequences=4, batch_size=4)
    for eta in (0.0, 3.0):
        request = HealRequest(train=Amount(1, "steps"), eta=eta)
        healer = Healer(demo, sites, dict(swaps), "causal", options=request)
        healer.prepare(batch.batches[0])
        optimiser = torch.optim.AdamW(healer.leaves, lr=1e-3, weight_decay=0.0)
        for _ in range(8):
            optimiser.zero_grad()
            loss_of(healer, batch.batches[0].inputs)[0].backward()
            optimiser.step()
        healer.options = request.model_copy(update={"eta": 1.0})
        with torch.no_grad():
            objectives.append(float(sum(loss_of(healer, batch.batches[0].inputs)[2])))
    assert objectives[1] < 0.5 * objectives[0]


def test_a_saved_swap_comes_back(demo, tmp_path):
    swap = swap_kernel(demo, "primal:8", save=tmp_path / "primal", heads=[0, 3], **READ).swap
    back = load_swapped(tmp_path / "primal")
    assert back.kernel == "primal:scores=8,samples=0"
    batch = texts.batches(demo, texts.sample("demo"), texts.Cut(tokens=24, sequences=4))
    ids = torch.cat([b.inputs["input_ids"] for b in batch])
    assert float(back.model(input_ids=ids, labels=ids).loss) == pytest.approx(swap.loss.after, rel=1e-5)
    swapped = outputs(back.model, {"input_ids": ids})
    back.close()
    assert apart(swapped, outputs(back.model, {"input_ids": ids})) > 1e-3, "the control: closed, its own is back"
