"""Tests that `primal:s` is the kernel SVD of a head's own tokens, its output the least squares."""

import math

import pytest
import torch
from loaded import BARE, SMALL, apart, family, outputs, swap_or_heal

import attnlens
from attnlens.errors import TextError, UsageError
from attnlens.kernels import parsed
from attnlens.kernels.attention import attend, route, weights
from attnlens.kernels.attention.sums import features
from attnlens.kernels.primal import (
    STRENGTHS,
    Moments,
    PrimalFit,
    _assemble_map,
    regression,
    singular_maps,
    squared_loss,
)
from attnlens.kernels.registry import Fit
from attnlens.lab.heal.healer import Healer
from attnlens.models import hooks, texts
from attnlens.records import Call
from attnlens.requests.swap import Amount, HealRequest
from attnlens.runs.swap.fit import fit
from attnlens.runs.swap.pipeline import swap_kernel
from attnlens.runs.swap.saved import load_swapped
from attnlens.runs.swap.sites import SwapSetup

STEPS = Amount(1, "steps")

READ = {"windows": 4, "length": 24, "batch_size": 4} | BARE
HEADS, DIM, TOKENS = 2, 6, 20


def distance_of(healer, inputs, penalties=None):
    """The mean distance to the original model, each primal layer's regulariser added to the list."""
    with healer.run_student(inputs, None, [] if penalties is None else penalties) as (losses, _):
        return losses.mean()


def loss_of(healer, inputs):
    """What training minimises: the distance and the weighted regularisers."""
    penalties = []
    distance = distance_of(healer, inputs, penalties)
    return distance + healer.penalty(penalties)


def call(sequences=8, tokens=TOKENS, seed=0, **more):
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(sequences, HEADS, tokens, DIM, generator=draw, dtype=torch.float64) + 0.4 for _ in range(3))
    return Call(q, k, v, DIM**-0.5, **more)


def observed(asked, scores, samples=0, output=None):
    found, seen = PrimalFit(scores, samples), features(asked, samples)
    output = attend(asked, hooks.OWN).transpose(1, 2) if output is None else output
    found.observe(*seen, output)
    return found


def pooled(x):
    """(sequences, heads, tokens, features) → (heads, all tokens, features)."""
    return x.transpose(0, 1).flatten(1, 2)


# --- the closed form -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("causal", "samples"), [(False, 0), (True, 0), (False, 5)])
def test_scores_are_singular_vectors_of_all_calibration_tokens(causal, samples):
    asked = call(causal=causal)
    solved, seen = observed(asked, 4, samples).solve(), features(asked, samples)
    phi_q, phi_k = pooled(seen[0]), pooled(seen[1])
    kernel = torch.stack(
        [torch.stack([torch.stack([q @ k for k in ks]) for q in qs]) for qs, ks in zip(phi_q, phi_k, strict=True)]
    )
    e, r = phi_q @ solved["query_map"], phi_k @ solved["key_map"]
    values = torch.linalg.svdvals(kernel)[:, :4]
    h_e, h_r = e / e.norm(dim=1, keepdim=True), r / r.norm(dim=1, keepdim=True)
    assert (kernel @ h_r - h_e * values[:, None]).norm() < 1e-10 * kernel.norm()
    assert (kernel.mT @ h_e - h_r * values[:, None]).norm() < 1e-10 * kernel.norm()
    count = kernel.shape[-1]
    torch.testing.assert_close(e.norm(dim=1) * count**0.5, values, rtol=1e-9, atol=0)
    torch.testing.assert_close(solved["log_multipliers"].exp(), count / values / TOKENS, rtol=1e-9, atol=0)
    shuffled = kernel[:, torch.randperm(count)]
    assert (shuffled @ h_r - h_e * values[:, None]).norm() > 1e-2 * kernel.norm(), "the control"


def test_the_mean_objective_of_the_calibration_sequences_is_zero():
    asked = call()
    solved, seen = observed(asked, 4).solve(), features(asked)

    def mean_j(query_map):
        e, r = seen[0] @ query_map, seen[1] @ solved["key_map"]
        lam = solved["log_multipliers"].exp()[:, None]
        halves = ((e.square() + r.square()) * lam).sum((-2, -1)) / 2
        return (halves - (query_map * solved["key_map"]).sum((-2, -1))).mean(0)

    assert mean_j(solved["query_map"]).abs().max() < 1e-12
    assert mean_j(solved["query_map"] + 0.1).abs().max() > 1e-2


def test_an_output_that_is_linear_in_the_scores_is_found_again():
    asked = call(causal=True)
    solved, seen = observed(asked, 4).solve(), features(asked)
    z = torch.cat([seen[0] @ solved["query_map"], seen[1] @ solved["key_map"]], -1)
    truth, offset = torch.randn(HEADS, 8, DIM).double(), torch.randn(HEADS, DIM).double()
    output = z @ truth + offset[:, None]
    again = observed(asked, 4, output=output).solve()
    kernel = parsed("primal:4").with_fitted(again)
    assert (attend(asked, kernel).transpose(1, 2) - output).norm() < 1e-5 * output.norm()
    fewer = parsed("primal:2").with_fitted(observed(asked, 2, output=output).solve())
    assert (attend(asked, fewer).transpose(1, 2) - output).norm() > 1e-2 * output.norm(), "the control"


def test_the_regression_is_ridge_and_its_loss_the_naive_one():
    z, y = torch.randn(1, HEADS, 50, 3).double(), torch.randn(1, HEADS, 50, 2).double()
    moments = Moments.of(torch.cat([z, torch.ones(1, HEADS, 50, 1)], -1), y)
    for strength in (1e-8, 0.3):
        found, offset = regression(moments, torch.full((HEADS,), strength, dtype=torch.float64))
        for head in range(HEADS):
            a = torch.cat(
                [z[0, head] - z[0, head].mean(0), (50 * strength) ** 0.5 * torch.diag(z[0, head].std(0, correction=0))]
            )
            b = torch.cat([y[0, head] - y[0, head].mean(0), torch.zeros(3, 2)])
            expected = torch.linalg.lstsq(a, b).solution
            torch.testing.assert_close(found[head], expected, rtol=1e-9, atol=1e-10)
        naive = (y[0] - z[0] @ found - offset[:, None]).square().sum((-2, -1))
        torch.testing.assert_close(squared_loss(moments, found, offset), naive, rtol=1e-10, atol=1e-10)


def test_ridge_is_strong_where_there_is_only_noise_and_weak_where_there_is_none():
    asked = call(sequences=4, tokens=8)
    seen = features(asked)
    z = torch.cat([seen[0], seen[1]], -1)
    clean = z @ torch.randn(HEADS, 2 * DIM, DIM).double()
    sizes = [observed(asked, DIM, output=y).solve()["output_map"].norm() for y in (clean, torch.randn_like(clean))]
    fits = [observed(asked, DIM, output=y) for y in (clean, torch.randn_like(clean))]
    maps = _assemble_map(*singular_maps(fits[1].parts[0] + fits[1].parts[1], DIM)[:2])
    train, held = (part.of_scores(maps) for part in fits[1].parts)
    errors = [squared_loss(held, *regression(train, train.tokens * 0 + s)).sum() for s in STRENGTHS]
    assert errors[-1] < errors[0], "the noise is better not fitted"
    assert sizes[1] < sizes[0]


def test_more_scores_are_never_worse_on_the_calibration_text():
    asked, errors = call(causal=True), []
    for scores in range(1, DIM + 3):
        found = observed(asked, scores)
        every = found.parts[0] + found.parts[1]
        moments = every.of_scores(_assemble_map(*singular_maps(every, scores)[:2]))
        errors.append(squared_loss(moments, *regression(moments, moments.tokens * 0 + STRENGTHS[0])))
    errors = torch.stack(errors)
    assert (errors[1:] <= errors[:-1] * (1 + 1e-6)).all()
    assert (errors[DIM - 1] < 0.99 * errors[0]).all()
    torch.testing.assert_close(errors[DIM:], errors[DIM - 1].expand(2, -1)), "head_dim bounds the rank"


def test_padding_and_batches_do_not_matter_to_the_fit():
    asked, extra = call(), call(seed=9)
    whole = observed(asked, 4).solve()
    kept = torch.ones(8, 1, 1, TOKENS + 5, dtype=torch.bool)
    kept[..., TOKENS:] = False
    longer = [
        torch.cat([own, other[:, :, :5]], 2)
        for own, other in zip((asked.query, asked.key, asked.value), (extra.query, extra.key, extra.value), strict=True)
    ]
    padded = Call(*longer, asked.scale, allowed=kept.expand(-1, -1, TOKENS + 5, -1))
    split = PrimalFit(4, 0)
    for rows in (slice(0, 3), slice(3, 8)):
        seen = features(
            Call(padded.query[rows], padded.key[rows], padded.value[rows], asked.scale, padded.allowed[rows])
        )
        split.observe(*seen, attend(padded, hooks.OWN).transpose(1, 2)[rows])
    solved = split.solve()
    for name in ("log_multipliers", "tokens"):
        torch.testing.assert_close(solved[name], whole[name], rtol=1e-9, atol=1e-12)
    new = [attend(asked, parsed("primal:4").with_fitted(maps)) for maps in (whole, solved)]
    torch.testing.assert_close(*new, rtol=1e-6, atol=1e-8)


def test_a_head_without_rank_keeps_finite_maps():
    asked = call()
    flat = Call(asked.query[..., :1].expand_as(asked.query), asked.key * 0, asked.value, asked.scale)
    solved = observed(flat, 4).solve()
    assert all(part.isfinite().all() for part in solved.values())
    assert solved["query_map"].abs().max() == 0
    torch.testing.assert_close(solved["offset"], pooled(attend(flat, hooks.OWN).transpose(1, 2)).mean(1))


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("primal", "needs the parameter scores"),
        ("primal:0", "at least 1"),
        ("primal:-3", "at least 1"),
        ("primal:4,-1", "at least 0"),
        ("primal:4+window:3", "tied or filtered"),
        ("primal:4+symmetric", "tied or filtered"),
    ],
)
def test_spellings_that_make_no_sense_are_refused(words, says):
    with pytest.raises(UsageError, match=says):
        parsed(words)


def test_calls_without_such_scores_are_refused():
    kernel, asked = parsed("primal:4").with_fitted(observed(call(), 4).solve()), call()
    assert route(asked, kernel, "eager") == route(asked, kernel, "fused") == "primal scores"
    refused = [
        (Call(asked.query, asked.key, asked.value, 1.0, cross=True), "another sequence"),
        (Call(asked.query[:, :, -1:], asked.key, asked.value, 1.0), "same tokens"),
        (
            Call(asked.query, asked.key, asked.value, 1.0, allowed=torch.eye(TOKENS).bool()[None, None]),
            "neither causal",
        ),
    ]
    for wrong, says in refused:
        with pytest.raises(UsageError, match=says):
            attend(wrong, kernel)
    with pytest.raises(UsageError, match="future tokens would leak"):
        features(call(causal=True), 3)
    with pytest.raises(UsageError, match="not a function of a query and a key"):
        weights(asked, kernel)


def test_too_little_calibration_text_is_refused():
    with pytest.raises(TextError, match="two calibration sequences"):
        observed(call(sequences=1), 4).solve()
    with pytest.raises(TextError, match="161 scores needs at least 161 calibration tokens, but got 160"):
        observed(call(), 161).solve()
    assert observed(call(), 160).solve()["query_map"].shape == (HEADS, DIM, DIM)
    assert isinstance(PrimalFit(1, 0), Fit)


@pytest.mark.parametrize(
    ("words", "more", "says"),
    [
        ("primal:4", {"train": 1, "eta": -0.1}, "eta=-0.1 is not a number, at least 0"),
        ("primal:4", {"train": 1, "eta": math.nan}, "eta=nan is not a number, at least 0"),
        ("primal:4", {"train": 1, "eta": "x"}, "eta='x' is not a number"),
        ("primal:4", {"train": 1, "ksvd_convention": "cod"}, "'cod'"),
        ("rbf", {"train": 1, "eta": 0.1}, "eta applies only to the kernel primal"),
        ("rbf", {"train": 1, "ksvd_convention": "code"}, "ksvd_convention applies only to the kernel primal"),
        ("primal:4,samples=3", {}, "future tokens would leak"),
        ("primal:9999", {}, "needs at least 9999 calibration tokens"),
    ],
)
def test_runs_that_make_no_sense_are_refused(demo, words, more, says):
    with pytest.raises((UsageError, TextError), match=says) as refusal:
        swap_or_heal(demo, words, **READ, **more)
    assert refusal.value.remedy


def test_cross_attention_is_refused_with_its_reason():
    with pytest.raises(UsageError, match="different sequences"):
        swap_kernel(family("bart"), "primal:4", **SMALL)
    assert swap_kernel(family("bart"), "primal:4", part="encoder", **SMALL).swap.sites


def test_the_evaluated_text_is_no_calibration_text(demo, tmp_path):
    (tmp_path / "own.txt").write_text(texts.sample("demo")[0].text + "\nAmen.")
    with pytest.raises(TextError, match="of the evaluated tokens"):
        swap_kernel(demo, "primal:4", calibration=str(tmp_path / "own.txt"), placement="first", **READ)


# --- whole models ----------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_healing_takes_some_of_the_loss_back(demo):
    swap = attnlens.heal(
        demo, "primal:16", windows=8, length=64, train=60, eta=0.2, ksvd_convention="code", **BARE
    ).swap
    stages = {stage.name: stage.loss.after for stage in swap.stages}
    assert swap.loss.before < stages["healed"] < stages["swapped"] - 0.05
    assert (swap.healing.eta, swap.healing.ksvd_convention) == (0.2, "code")


def test_demo_loses_and_the_report_says_what_there_is(demo):
    report = swap_kernel(demo, "primal:32", windows=8, length=32, **BARE)
    swap = report.swap
    assert swap.loss.before < swap.loss.after < math.log(1024)
    assert swap.causality_error == 0
    assert swap.mask_error < 1e-5
    assert swap.off_simplex is None
    assert "no attention matrix" in swap.reasons["off_simplex"]
    assert swap.formula_of == "output"
    assert any("bounds their rank" in note for note in swap.notes)
    assert {site.path for site in swap.sites} == {"primal scores"}
    assert report.settings.calibration is not None
    assert swap.healing is None
    exact = swap_kernel(demo, "primal:16", windows=8, length=32, **BARE).swap
    assert exact.loss.after == swap.loss.after
    assert not any("head_dim bounds" in note for note in exact.notes)


def test_scores_do_better_than_no_scores(demo):
    """The control: with W_c = 0 each head gives its mean output."""
    batch = texts.batches(demo, texts.sample("demo"), texts.Cut(tokens=32, sequences=8))
    sites = tuple(found.site for found in hooks.survey(demo.model, batch.batches[0].inputs))
    swaps = fit(
        SwapSetup(demo, sites, dict.fromkeys(sites, hooks.Replacement(parsed("primal:16")))), batch, lambda _: None
    )
    silent = {
        site: hooks.Replacement(
            swap.kernel.with_fitted({**swap.kernel.fitted, "output_map": swap.kernel.fitted["output_map"] * 0})
        )
        for site, swap in swaps.items()
    }
    found = []
    for chosen in (swaps, silent):
        with hooks.replace(demo.model, sites, chosen), torch.no_grad():
            found.append(sum(float(demo.model(**b.inputs, labels=b.inputs["input_ids"]).loss) for b in batch))
    assert found[0] < found[1] - 0.05 * len(batch.batches)


@pytest.mark.parametrize("convention", ["paper", "code"])
def test_healing_minimises_the_distance_and_eta_times_the_squares(demo, convention):
    batch = texts.batches(demo, texts.sample("demo"), texts.Cut(tokens=16, sequences=8))
    sites = tuple(found.site for found in hooks.survey(demo.model, batch.batches[0].inputs))
    chosen = {sites[1]: hooks.Replacement(parsed("primal:4"), (1, 5)), sites[3]: hooks.Replacement(parsed("primal:4"))}
    swaps = fit(SwapSetup(demo, sites, chosen), batch, lambda _: None)
    healer = Healer(demo, sites, swaps, "causal", options=HealRequest(train=STEPS, eta=0.5, ksvd_convention=convention))
    inputs = batch.batches[0].inputs
    healer.prepare(batch.batches[0])
    seen = {}
    healed = healer.healed_swaps()
    with torch.no_grad(), hooks.replace(demo.model, sites, healed, visit=lambda s, c: seen.__setitem__(s, c)):
        hooks.forward(demo.model, inputs)
    layers = []
    for site, asked in seen.items():
        part, of = (
            (asked if healed[site].heads is None else asked.select(healed[site].heads)),
            healed[site].kernel.fitted,
        )
        both = features(part)
        e, r = both[0].double() @ of["query_map"].double(), both[1].double() @ of["key_map"].double()
        lam = of["log_multipliers"].double().exp()[:, None] ** (1 if convention == "paper" else 2)
        halves = ((e.square() + r.square()) * lam).sum(-1) / 2
        halves = halves.sum(-1) if convention == "paper" else halves.mean(-1)
        j = halves - (of["query_map"].double() * of["key_map"].double()).sum((-2, -1))
        layers.append((j**2).sum(1).mean() if convention == "paper" else (j.mean(1) ** 2).mean())
    expected = sum(layers) if convention == "paper" else sum(layers) / 2
    with torch.no_grad():
        added = loss_of(healer, inputs) - distance_of(healer, inputs)
    assert len(layers) == 2
    assert float(added) == pytest.approx(0.5 * float(expected.detach()), rel=1e-3)
    assert expected > 1e-4
    with torch.no_grad():
        healer.options = HealRequest(train=STEPS, eta=0.0, ksvd_convention=convention)
        assert loss_of(healer, inputs) == distance_of(healer, inputs)


def test_eta_keeps_the_objective_small(demo):
    found = []
    batch = texts.batches(demo, texts.sample("demo"), texts.Cut(tokens=32, sequences=16, batch_size=8))
    sites = tuple(found.site for found in hooks.survey(demo.model, batch.batches[0].inputs))
    swaps = fit(
        SwapSetup(demo, sites, dict.fromkeys(sites, hooks.Replacement(parsed("primal:8")))), batch, lambda _: None
    )
    for eta in (0.0, 3.0):
        healer = Healer(demo, sites, dict(swaps), "causal", options=HealRequest(train=STEPS, eta=eta))
        healer.prepare(batch.batches[0])
        optimiser = torch.optim.AdamW(healer.leaves, lr=1e-3, weight_decay=0.0)
        for _ in range(25):
            optimiser.zero_grad()
            loss_of(healer, batch.batches[0].inputs).backward()
            optimiser.step()
        healer.options, penalties = HealRequest(train=STEPS, eta=1.0), []
        with torch.no_grad():
            distance_of(healer, batch.batches[0].inputs, penalties)
        found.append(float(sum(penalties)))
    assert found[1] < 0.5 * found[0]


def test_a_saved_swap_comes_back(demo, tmp_path):
    report = swap_kernel(demo, "primal:8", save=tmp_path / "primal", heads=[0, 3], **READ)
    back = load_swapped(tmp_path / "primal")
    assert back.kernel == "primal:scores=8,samples=0"
    batch = texts.batches(demo, texts.sample("demo"), texts.Cut(tokens=24, sequences=4))
    ids = torch.cat([b.inputs["input_ids"] for b in batch])
    assert float(back.model(input_ids=ids, labels=ids).loss) == pytest.approx(report.swap.loss.after, rel=1e-5)
    swapped = outputs(back.model, {"input_ids": ids})
    back.close()
    assert apart(swapped, outputs(back.model, {"input_ids": ids})) > 1e-3, "the control: closed, its own is back"


@pytest.mark.parametrize("words", ["primal:4", "primal:4,samples=6"])
def test_encoders_are_swapped_with_padding(words):
    swap = swap_kernel(family("bert"), words, **SMALL).swap
    assert swap.mask_error < 1e-5
    assert swap.loss is not None
