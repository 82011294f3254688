"""Tests that the nearest forms keep the parts they name, lose the others, and stay Mercer kernels when healed."""

from dataclasses import replace

import families
import pytest
import torch
from attention_calls import CASES, HEADS, apart, call, fitted
from heads import random
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded import BARE, family, sites_of
from safetensors.torch import load_file

import attnlens
from attnlens.errors import UsageError
from attnlens.kernels import OWN, TIES, parsed
from attnlens.kernels.attention import attend, weights
from attnlens.kernels.lowrank import NearestFit, factorise, nearest_positive, nearest_symmetric, score_form
from attnlens.models import hooks, texts
from attnlens.runs.swap.fit import fit
from attnlens.runs.swap.pipeline import swap_kernel
from attnlens.runs.swap.sites import SwapSetup

TIE_OF = {"symmetric": "skewless", "no-skew": "skewless", "positive": "mercer", "no-key": "keyless"}
QUICK = {"windows": 2, "length": 24} | BARE


def nearest(part, seen):
    return fitted(f"nearest:{part}", seen)


def planted(change, **more):
    """A call whose keys are `change` of its queries, which have different means in each head."""
    query = call(**more).query + torch.linspace(-1, 1, HEADS).double()[:, None, None]
    return replace(call(**more), query=query, key=change(query))


def signed(x):
    return x * torch.tensor([1.0, -1.0]).to(x).repeat(x.shape[-1])[: x.shape[-1]]


def scores_of(case, kernel):
    """log k of all pairs: the product of the prepared call, in float64."""
    ready, _ = kernel.prepare_call(replace(case, query=case.query.double(), key=case.key.double()))
    return ready.query @ ready.key.mT * ready.scale


def interaction(log_k):
    """JLJ: without query-only and key-only terms."""
    seen = log_k - log_k.mean(-1, keepdim=True)
    return seen - seen.mean(-2, keepdim=True)


@pytest.mark.parametrize("causal", [False, True])
def test_symmetric_heads_lose_nothing_and_indefinite_ones_lose_under_positive_alone(causal):
    for change, parts in (
        (torch.clone, {"symmetric": True, "no-skew": True, "positive": True, "no-key": False}),
        (signed, {"symmetric": True, "positive": False}),
    ):
        seen, unseen = (planted(change, queries=n, causal=causal) for n in (150, 151))
        for part, kept in parts.items():
            error = apart(attend(unseen, nearest(part, seen)), attend(unseen, OWN))
            assert error <= 1e-6 if kept else error > (0.05 if part == "no-key" else 0.2), part


def test_a_skew_head_loses_its_whole_interaction_and_no_key_leaves_no_key_that_all_queries_prefer():
    """If attention is nearly even, queries and keys have one covariance; only the key gate is left."""
    draw = random(8, 8, seed=1)
    skew = replace(planted(lambda q: q @ (draw - draw.mT)), scale=1e-3)
    own = interaction(scores_of(skew, OWN))
    for part in ("symmetric", "positive"):
        assert interaction(scores_of(skew, nearest(part, skew))).norm() < 0.01 * own.norm(), part
    lost = interaction(scores_of(skew, nearest("no-key", skew))) - own
    assert lost.norm() < 1e-9 * own.norm(), "the control: all is kept"
    case = planted(lambda q: q.roll(1, -1))
    kernel = nearest("no-key", case)
    gone, before = (float(scores_of(case, each).mean((0, 2)).std(-1).max()) for each in (kernel, OWN))
    assert gone < 0.2 * before, "over each sequence; over both it is 0, below"
    assert float((case.query.mean((0, 2)) - kernel.fitted["centre"][:, :8]).abs().max()) < 1e-12


def moments(seed):
    """N₀, two covariances with unlike spectra, and the noise that they come from."""
    draw = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    queries, keys = (x.mT @ x / 20 for x in (noise(2, 20, 6), 0.3 * noise(2, 20, 6) @ noise(6, 6)))
    return score_form(torch.zeros(2, 6, dtype=torch.float64)), queries, keys, noise


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31))
def test_no_symmetric_or_positive_form_close_by_is_nearer(seed):
    own, queries, keys, noise = moments(seed)

    def error(form):
        """tr (N−N₀)ᵀC_q(N−N₀)C_k, dense."""
        return torch.einsum("hba,hbc,hcd,hda->h", form - own, queries, form - own, keys)

    basis, form, spread = nearest_symmetric(own, queries, keys)
    (root, signs), (factor, kept) = factorise(basis, form), factorise(basis, nearest_positive(form, spread))
    symmetric = (root * signs[:, None]) @ root.mT
    least, positive = error(symmetric), error(factor @ factor.mT)
    assert bool((kept >= 0).all())
    assert bool((positive >= least * (1 - 1e-9)).all())
    for size in (1e-3, 1e-1, 1.0):
        change, moved = size * noise(*symmetric.shape), factor + size * noise(*factor.shape)
        assert bool((error(symmetric + change + change.mT) >= least).all())
        assert bool((error(moved @ moved.mT) >= positive * (1 - 1e-8)).all())
    assert bool((error((own + own.mT) / 2) > least).all()), "the control: without the metric it is not nearest"


def test_under_one_covariance_it_is_the_projection_in_its_coordinates():
    """N = C^{−½} sym(C^½N₀C^½) C^{−½}, and [·]₊ of the same for positive."""
    own, _, keys, _ = moments(3)
    basis, form, spread = nearest_symmetric(own, keys, keys)
    values, vectors = torch.linalg.eigh(keys)
    root = (vectors * values.sqrt()[:, None]) @ vectors.mT
    core, inverse = root @ (own + own.mT) / 2 @ root, torch.linalg.inv(root)
    mu, u = torch.linalg.eigh(core)
    torch.testing.assert_close(basis @ form @ basis.mT, inverse @ core @ inverse)
    clipped = inverse @ (u * mu.clamp_min(0)[:, None]) @ u.mT @ inverse
    torch.testing.assert_close(basis @ nearest_positive(form, spread) @ basis.mT, clipped)


def naive_form(case, head, part):
    """ū, N and N₀ of one head query by query, N from its normal equations, positive by plain projected gradients."""
    size = case.query.shape[-1]
    own, choosing, keys = torch.zeros(2 * size, 2 * size, dtype=torch.float64), [], 0
    own[:size, size:] = torch.eye(size)
    for u in torch.cat((case.query[:, head], case.paired_key[:, head]), -1):
        for i in range(1, len(u)):  # the first token of a causal head sees itself alone
            p = (u[i, :size] @ u[: i + 1, size:].mT * case.scale).softmax(-1)
            away = u[: i + 1] - p @ u[: i + 1]
            keys = keys + (away * p[:, None]).mT @ away
            choosing.append(u[i])
    rows = torch.stack(choosing)
    centre = rows.mean(0)
    queries, keys = (rows - centre).mT @ (rows - centre) / len(rows), keys / len(rows)
    target = (queries @ own @ keys + keys @ own.mT @ queries).flatten()
    form = torch.linalg.solve(torch.kron(queries, keys) + torch.kron(keys, queries), target).view_as(own)
    if part == "positive":
        pace = 0.5 / float(torch.linalg.eigvalsh(queries)[-1] * torch.linalg.eigvalsh(keys)[-1])
        goal, form = form, form * 0
        for _ in range(12_000):
            slope = queries @ (form - goal) @ keys + keys @ (form - goal) @ queries
            mu, u = torch.linalg.eigh(form - pace * slope)
            form = (u * mu.clamp_min(0)) @ u.mT
    return centre, form, own


@pytest.mark.parametrize("part", TIE_OF)
def test_a_grouped_rotated_model_is_fitted_and_run_as_a_dense_computation_does(part):
    model, head = families.build("llama").double(), 2
    inputs = (families.inputs("llama", model, batch=8, tokens=24, seed=seed) for seed in (1, 2))
    seen, unseen = (hooks.survey(model, words)[0].call for words in inputs)
    assert seen.group > 1, "heads share keys"
    centre, form, own = naive_form(seen, head, part)
    u = torch.cat((unseen.query[:, head], unseen.paired_key[:, head]), -1)
    log_k = (u - centre) @ form @ (u - centre).mT + (u @ own.mT @ centre)[:, None]
    log_k = (u - centre) @ own @ u.mT if part == "no-key" else log_k
    naive = (unseen.scale * log_k).masked_fill(torch.ones(24, 24).triu(1).bool(), -torch.inf).softmax(-1)
    border = 1e-3 if part == "positive" else 1e-8  # plain gradients end earlier
    assert float((weights(unseen, nearest(part, seen))[:, head] - naive).abs().max()) < border
    assert float((weights(unseen, OWN)[:, head] - naive).abs().max()) > 0.01, "the control"


@pytest.fixture(scope="module")
def demo_texts(demo):
    """Calibration text and other text, which is evaluated."""
    cut = {"tokens": 64, "batch_size": 16}
    evaluated = texts.batches(demo, texts.sample("demo"), texts.Cut(sequences=2, **cut))
    return texts.batches(demo, texts.sample("demo"), texts.Cut(sequences=16, **cut), apart_from=evaluated), evaluated


@pytest.fixture(scope="module")
def demo_calls(demo, demo_texts):
    return [[reached.call for reached in hooks.survey(demo.model, text.batches[0].inputs)] for text in demo_texts]


def least_eigenvalue(log_k):
    """The least eigenvalue of exp((log k + its transpose)/2) over its largest, rows and columns divided by gates."""
    diagonal = log_k.diagonal(dim1=-2, dim2=-1) / 2
    scaled = (log_k + log_k.mT) / 2 - diagonal[..., None] - diagonal[..., None, :]
    values = torch.linalg.eigvalsh((scaled - scaled.amax((-2, -1), keepdim=True)).exp())
    return values[..., 0] / values[..., -1]


def test_a_positive_kernel_has_positive_semidefinite_matrices_on_real_text(demo_calls):
    others = []
    for seen, unseen in zip(*demo_calls, strict=True):
        positive = scores_of(unseen, nearest("positive", seen))
        torch.testing.assert_close(positive, positive.mT, rtol=1e-9, atol=1e-9)
        assert bool((least_eigenvalue(positive) > -1e-12).all())
        others += [scores_of(unseen, OWN), scores_of(unseen, nearest("symmetric", seen))]
    assert all(bool((least_eigenvalue(log_k) < -1e-6).any()) for log_k in others), "the control: the model's own is not"
    assert float((others[0] - others[0].mT).norm() / others[0].norm()) > 0.1, "nor is it symmetric"


def test_symmetric_and_no_skew_differ_in_a_gate_that_softmax_cancels_and_heads_are_fitted_alone(demo_calls):
    seen, unseen = demo_calls[0][1], demo_calls[1][1]
    symmetric, no_skew = nearest("symmetric", seen), nearest("no-skew", seen)
    first, second = (scores_of(unseen, kernel) for kernel in (symmetric, no_skew))
    torch.testing.assert_close(first, first.mT, rtol=1e-9, atol=1e-9)
    assert float((second - second.mT).norm() / second.norm()) > 0.01
    new = attend(unseen, symmetric)
    assert apart(new, attend(unseen, no_skew).double()) < 1e-4
    assert apart(new, attend(unseen, OWN).double()) > 0.05, "the control"
    few = attend(unseen.select([1, 5]), nearest("symmetric", seen.select([1, 5])))
    assert apart(new[:, :, [1, 5]], few.double()) < 1e-5


@pytest.mark.parametrize("part", TIE_OF)
def test_the_oracle_is_the_tie_of_the_evaluated_text(part):
    case, oracle, tie = CASES["right padding"](), parsed(f"nearest:{part},oracle"), parsed(TIE_OF[part])
    assert (oracle.spelling, parsed(oracle.spelling)) == (f"nearest:part={part},how=oracle", oracle)
    assert torch.equal(attend(case, oracle), attend(case, tie))
    assert torch.equal(weights(case, oracle), weights(case, tie))
    assert apart(attend(case, oracle), attend(case, OWN)) > 0.05, "the control"
    for name in ("causal", "cross"):
        with pytest.raises(UsageError):
            attend(CASES[name](), oracle)


def test_a_report_names_the_oracle_an_analysis_and_the_fitted_form_a_model():
    report = swap_kernel(family("bert"), ["nearest:positive", "nearest:positive,oracle", "mercer"], **QUICK)
    model, analysis, tie = report.swaps
    assert analysis.kernel == "nearest:part=positive,how=oracle"
    assert any(note.startswith("For analysis only: ") for note in analysis.notes)
    assert not any("nearest" in note for note in analysis.notes), "a kernel's name precedes its notes"
    assert not any("analysis" in note for note in model.notes)
    assert any("the parts `symmetric` and `no-skew` give the same attention" in note for note in model.notes)
    assert "N nearest to N₀" in model.formula
    assert "N₀" not in analysis.formula, "no form is fitted"
    assert analysis.formula.startswith(TIES["mercer"].formula)
    assert (analysis.kl, analysis.hidden_cosine) == (tie.kl, tie.hidden_cosine)
    assert (model.fitted, analysis.fitted) == (["centre", "factor", "gate", "signs"], [])
    assert model.hidden_cosine != pytest.approx(analysis.hidden_cosine, abs=1e-5)


def test_healing_trains_the_factor_and_the_kernel_stays_positive(demo, tmp_path, demo_calls):
    options = {"layers": [1]} | QUICK
    healed = attnlens.heal(demo, "nearest:positive", train=4, save=tmp_path / "healed", **options).swap
    before = swap_kernel(demo, "nearest:positive", save=tmp_path / "fitted", **options).swap
    stored, untrained = (load_file(tmp_path / name / "attnlens.safetensors") for name in ("healed", "fitted"))
    assert [stage.name for stage in healed.stages] == ["swapped", "healed"]
    kernel = parsed("nearest:positive").with_fitted({name.removeprefix("1."): part for name, part in stored.items()})
    assert bool((kernel.fitted["signs"] >= 0).all())
    assert bool((least_eigenvalue(scores_of(demo_calls[1][1], kernel)) > -1e-12).all())
    assert before.fitted == healed.fitted
    assert not torch.equal(untrained["1.factor"], stored["1.factor"]), "the control: it was trained"
    assert healed.stages[-1].kl < healed.stages[0].kl


def test_a_fit_through_the_pipeline_is_the_same_fit(demo, demo_texts, demo_calls):
    sites = sites_of(demo.model, demo_texts[1].batches[0].inputs)
    plain = dict.fromkeys(sites, hooks.Replacement(parsed("nearest:positive")))
    swaps = fit(SwapSetup(demo, sites, plain), demo_texts[0], lambda _: None)
    for site, seen in zip(sites, demo_calls[0], strict=True):
        gate = nearest("positive", seen).fitted["gate"]
        torch.testing.assert_close(swaps[site].kernel.fitted["gate"], gate, rtol=1e-4, atol=1e-5)


def test_calls_and_runs_without_a_meaning_are_refused(demo):
    for case, problem in (
        (CASES["cross"](), "another sequence"),
        (CASES["decoding"](), "a key-value cache"),
        (CASES["chunk of a cache"](), "a key-value cache"),
        (call(softcap=5.0), "softcap"),
        (call(causal=True, sinks=torch.zeros(HEADS).double()), "attention sinks"),
    ):
        for part in ("positive", "no-key"):
            with pytest.raises(UsageError, match=problem):
                attend(case, nearest(part, call()))
        with pytest.raises(UsageError, match=problem):
            NearestFit(0).update(case)
    oracle = "nearest:positive,oracle"
    for refused, problem in (
        (lambda: attend(call(), parsed("nearest:positive")), "must be fitted"),
        (lambda: nearest("positive", call()).log(call().query, call().key, 1.0), "query and key of both tokens"),
        (lambda: attnlens.heal(demo, oracle, train=2, **QUICK), "can't be healed"),
        (lambda: swap_kernel(demo, oracle, fit=True, **QUICK), "can't be fitted"),
        (lambda: swap_kernel(family("t5"), "nearest:positive", **QUICK), "is undefined in cross-attention"),
    ):
        with pytest.raises(UsageError, match=problem):
            refused()
    with pytest.raises(UsageError, match=r"^`nearest:positive,oracle` needs every pair of tokens") as refusal:
        swap_kernel(demo, oracle, **QUICK)
    assert "leave out `oracle`" in refusal.value.remedy
    assert "mercer" not in str(refusal.value)
