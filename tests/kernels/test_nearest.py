"""Tests that the nearest forms keep the parts they name, lose the others, and stay Mercer kernels when healed."""

import copy
from dataclasses import replace

import families
import pytest
import torch
from attention_calls import CASES, HEADS, apart, call
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded import BARE, family, sites_of
from program import SMALL as WORDS
from program import attnlens as program
from safetensors.torch import load_file

import attnlens
from attnlens.errors import UsageError
from attnlens.kernels import TIES as EVERY_TIE
from attnlens.kernels import Kernel, parsed
from attnlens.kernels.attention import attend, weights
from attnlens.kernels.lowrank import NearestFit, factorise, nearest_positive, nearest_symmetric, own_form
from attnlens.models import hooks, texts
from attnlens.runs.swap.fit import fit
from attnlens.runs.swap.pipeline import swap_kernel
from attnlens.runs.swap.sites import SwapSetup

FITTED = ["symmetric", "positive", "no-key", "no-skew"]
TIES = {"symmetric": "skewless", "no-skew": "skewless", "positive": "mercer", "no-key": "keyless"}
QUICK = {"windows": 4, "length": 32} | BARE
SEEDS = st.integers(0, 2**31)


def fitted_to(found, part):
    """The kernel of that part, fitted to these calls."""
    kernel = parsed(f"nearest:{part}")
    fitting = NearestFit(**kernel.parameters)
    for one in found if isinstance(found, list) else [found]:
        fitting.update(one)
    return kernel.with_fitted(fitting.solve())


def planted(change, **more):
    """A call whose keys are `change` of its queries, which have a mean of their own."""
    found = call(**more)
    query = found.query + torch.linspace(-1, 1, HEADS).double()[:, None, None]
    return replace(found, query=query, key=change(query))


def scores_of(found, kernel):
    """log k of all pairs: the product of the prepared call, in float64."""
    ready, _ = kernel.prepare_call(replace(found, query=found.query.double(), key=found.key.double()))
    return ready.query @ ready.key.mT * ready.scale


def interaction(log_k):
    """JLJ: without query-only and key-only terms."""
    seen = log_k - log_k.mean(-1, keepdim=True)
    return seen - seen.mean(-2, keepdim=True)


# --- planted heads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_a_head_of_equal_queries_and_keys_loses_nothing_of_its_symmetric_or_positive_part(causal):
    seen, unseen = (planted(lambda q: q.clone(), queries=n, causal=causal) for n in (150, 151))
    for part in ("symmetric", "no-skew", "positive"):
        assert apart(attend(unseen, fitted_to(seen, part)), attend(unseen, parsed("exponential"))) <= 1e-6, part
    assert apart(attend(unseen, fitted_to(seen, "no-key")), attend(unseen, parsed("exponential"))) > 0.05, "the control"


@pytest.mark.parametrize("causal", [False, True])
def test_an_indefinite_symmetric_head_loses_under_positive_alone(causal):
    signs = torch.tensor([1.0, -1.0] * 50).double()
    seen, unseen = (planted(lambda q: q * signs[: q.shape[-1]], queries=n, causal=causal) for n in (150, 151))
    own = attend(unseen, parsed("exponential"))
    assert apart(attend(unseen, fitted_to(seen, "symmetric")), own) <= 1e-6
    assert apart(attend(unseen, fitted_to(seen, "positive")), own) > 0.2


def test_a_skew_head_loses_its_whole_interaction():
    """Where attention is nearly even, so that queries and keys have one covariance; only the key gate is left."""
    size = call().query.shape[-1]
    draw = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    skew = planted(lambda q: q @ (draw - draw.mT))
    skew = replace(skew, scale=1e-3)
    for part in ("symmetric", "positive"):
        left = interaction(scores_of(skew, fitted_to(skew, part))).norm()
        assert left < 0.01 * interaction(scores_of(skew, parsed("exponential"))).norm(), part
    lost = interaction(scores_of(skew, fitted_to(skew, "no-key"))) - interaction(scores_of(skew, parsed("exponential")))
    assert lost.norm() < 1e-9 * interaction(scores_of(skew, parsed("exponential"))).norm(), "the control: all is kept"


def planted_demo(change):
    """The trained demo model with W_K = change(W_Q), biases as well."""
    model = attnlens.load("demo")
    model = replace(model, model=copy.deepcopy(model.model))
    for name, parameter in model.model.named_parameters():
        if "c_attn" in name:
            width = parameter.shape[-1] // 3
            with torch.no_grad():
                parameter[..., width : 2 * width] = change(parameter[..., :width])
    return model


def test_trained_weights_with_equal_maps_lose_nothing_and_with_signs_lose_under_positive():
    signs = torch.tensor([1.0, -1.0]).repeat(64)
    twins = swap_kernel(planted_demo(lambda w: w.clone()), ["nearest:symmetric", "nearest:positive"], **QUICK)
    assert [swap.kl for swap in twins.swaps] == pytest.approx([0, 0], abs=1e-6)
    mixed = planted_demo(lambda w: w * signs[: w.shape[-1]])
    symmetric, positive = swap_kernel(mixed, ["nearest:symmetric", "nearest:positive"], **QUICK).swaps
    assert symmetric.kl == pytest.approx(0, abs=1e-6)
    assert positive.kl > 0.05


# --- the closed form --------------------------------------------------------------------------------------------------


def moments(seed, size=6, heads=2):
    """N₀ and two covariances with unlike spectra, and where they come from."""
    draw = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    queries, keys = (x.mT @ x / 20 for x in (noise(heads, 20, size), 0.3 * noise(heads, 20, size) @ noise(size, size)))
    return own_form(torch.zeros(heads, size, dtype=torch.float64)), queries, keys, noise


def error(own, form, queries, keys):
    """tr (N−N₀)ᵀC_q(N−N₀)C_k, dense."""
    left = form - own
    return torch.einsum("hba,hbc,hcd,hda->h", left, queries, left, keys)


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_no_symmetric_or_positive_form_close_by_is_nearer(seed):
    own, queries, keys, noise = moments(seed)
    basis, form, spread = nearest_symmetric(own, queries, keys)
    positive = nearest_positive(form, spread)
    (root, signs), (factor, kept) = factorise(basis, form), factorise(basis, positive)
    symmetric = (root * signs[:, None]) @ root.mT
    least = error(own, symmetric, queries, keys), error(own, factor @ factor.mT, queries, keys)
    assert bool((kept >= 0).all())
    assert bool((least[1] >= least[0] * (1 - 1e-9)).all())
    for size in (1e-3, 1e-1, 1.0):
        change, moved = size * noise(*symmetric.shape), factor + size * noise(*factor.shape)
        assert bool((error(own, symmetric + change + change.mT, queries, keys) >= least[0]).all())
        assert bool((error(own, moved @ moved.mT, queries, keys) >= least[1] * (1 - 1e-8)).all())
    plain = (own + own.mT) / 2
    assert bool((error(own, plain, queries, keys) > least[0]).all()), (
        "the control: without the metric it is not nearest"
    )


def test_under_one_covariance_it_is_the_projection_in_its_coordinates():
    """N = C^{−½} sym(C^½N₀C^½) C^{−½}, and [·]₊ of the same for positive."""
    own, _, keys, _ = moments(3)
    basis, form, spread = nearest_symmetric(own, keys, keys)
    values, vectors = torch.linalg.eigh(keys)
    root = (vectors * values.sqrt()[:, None]) @ vectors.mT
    core = root @ (own + own.mT) / 2 @ root
    mu, u = torch.linalg.eigh(core)
    inverse = torch.linalg.inv(root)
    torch.testing.assert_close(basis @ form @ basis.mT, inverse @ core @ inverse)
    clipped = inverse @ (u * mu.clamp_min(0)[:, None]) @ u.mT @ inverse
    torch.testing.assert_close(basis @ nearest_positive(form, spread) @ basis.mT, clipped)


def naive_form(found, head, part):
    """ū and N of one head pair by pair, N from its normal equations, positive by plain projected gradients."""
    size = found.query.shape[-1]
    own = torch.zeros(2 * size, 2 * size, dtype=torch.float64)
    own[:size, size:] = torch.eye(size)
    choosing, queries, keys, count = [], 0, 0, 0
    for batch in range(found.query.shape[0]):
        u = torch.cat((found.query[batch, head], found.paired_key[batch, head]), -1)
        for i in range(1, len(u)):  # the first token of a causal head sees itself alone
            past = u[: i + 1]
            p = (u[i, :size] @ past[:, size:].mT * found.scale).softmax(-1)
            away = past - p @ past
            keys, count = keys + (away * p[:, None]).mT @ away, count + 1
            choosing.append(u[i])
    rows = torch.stack(choosing)
    centre = rows.mean(0)
    queries, keys = (rows - centre).mT @ (rows - centre) / count, keys / count
    form = torch.linalg.solve(
        torch.kron(queries, keys) + torch.kron(keys, queries),
        (queries @ own @ keys + keys @ own.mT @ queries).flatten(),
    ).view_as(own)
    if part == "positive":
        pace = 0.5 / float(torch.linalg.eigvalsh(queries)[-1] * torch.linalg.eigvalsh(keys)[-1])
        goal, form = form, form * 0
        for _ in range(20000):
            slope = queries @ (form - goal) @ keys + keys @ (form - goal) @ queries
            mu, u = torch.linalg.eigh(form - pace * slope)
            form = (u * mu.clamp_min(0)) @ u.mT
    return centre, form, own


@pytest.mark.parametrize("part", FITTED)
def test_a_grouped_rotated_model_is_fitted_and_run_as_a_dense_computation_does(part):
    model = families.build("llama").double()
    sites = sites_of(model, families.inputs("llama", model))
    seen, unseen = (
        hooks.survey(model, families.inputs("llama", model, batch=8, tokens=24, seed=n))[0].call for n in (1, 2)
    )
    assert sites
    assert seen.group > 1, "heads share keys"
    new = weights(unseen, fitted_to(seen, part))
    head = 2
    centre, form, own = naive_form(seen, head, part if part == "positive" else "symmetric")
    u = torch.cat((unseen.query[:, head], unseen.paired_key[:, head]), -1)
    if part == "no-key":
        log_k = (u - centre) @ own @ u.mT
    else:
        log_k = (u - centre) @ form @ (u - centre).mT + (u @ own.mT @ centre)[:, None]
    future = torch.ones(u.shape[1], u.shape[1]).triu(1).bool()
    naive = (unseen.scale * log_k).masked_fill(future, -torch.inf).softmax(-1)
    border = 1e-3 if part == "positive" else 1e-8  # plain gradients end earlier
    assert float((new[:, head] - naive).abs().max()) < border
    assert float((weights(unseen, parsed("exponential"))[:, head] - naive).abs().max()) > 0.01, "the control"


# --- what it is -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo_calls():
    """What the demo model asks of its attention on other text than it is fitted on: fitting and evaluated calls."""
    model = attnlens.load("demo")
    cut = {"tokens": 64, "batch_size": 16}
    evaluated = texts.batches(model, texts.sample("demo"), texts.Cut(sequences=2, **cut))
    calibrated = texts.batches(model, texts.sample("demo"), texts.Cut(sequences=16, **cut), apart_from=evaluated)
    return [
        [found.call for found in hooks.survey(model.model, batches.batches[0].inputs)]
        for batches in (calibrated, evaluated)
    ]


def least_eigenvalue(log_k):
    """The least eigenvalue of exp((log k + its transpose)/2) over its largest, rows and columns divided by gates."""
    diagonal = log_k.diagonal(dim1=-2, dim2=-1) / 2
    scaled = (log_k + log_k.mT) / 2 - diagonal[..., None] - diagonal[..., None, :]
    found = torch.linalg.eigvalsh((scaled - scaled.amax((-2, -1), keepdim=True)).exp())
    return found[..., 0] / found[..., -1]


def test_a_positive_kernels_matrix_on_real_text_is_positive_semidefinite(demo_calls):
    others = []
    for seen, unseen in zip(*demo_calls, strict=True):
        positive = scores_of(unseen, fitted_to(seen, "positive"))
        torch.testing.assert_close(positive, positive.mT, rtol=1e-9, atol=1e-9)
        assert bool((least_eigenvalue(positive) > -1e-12).all())
        others += [scores_of(unseen, parsed("exponential")), scores_of(unseen, fitted_to(seen, "symmetric"))]
    assert all(bool((least_eigenvalue(log_k) < -1e-6).any()) for log_k in others), "the control: the model's own is not"
    own = others[0]
    assert float((own - own.mT).norm() / own.norm()) > 0.1, "nor is it symmetric"


def test_softmax_cannot_tell_a_symmetric_kernel_from_one_without_its_gate_on_queries(demo_calls):
    seen, unseen = demo_calls[0][1], demo_calls[1][1]
    symmetric, no_skew = (fitted_to(seen, part) for part in ("symmetric", "no-skew"))
    first, second = (scores_of(unseen, kernel) for kernel in (symmetric, no_skew))
    torch.testing.assert_close(first, first.mT, rtol=1e-9, atol=1e-9)
    assert float((second - second.mT).norm() / second.norm()) > 0.01
    assert apart(attend(unseen, symmetric), attend(unseen, no_skew).double()) < 1e-4
    assert apart(attend(unseen, symmetric), attend(unseen, parsed("exponential")).double()) > 0.05, "the control"


def test_no_key_leaves_no_key_that_all_queries_like():
    found = planted(lambda q: q.roll(1, -1))
    gates = [scores_of(found, kernel).mean((0, 2)) for kernel in (fitted_to(found, "no-key"), parsed("exponential"))]
    gone, kept = (gate.std(-1).max() for gate in gates)
    keys = found.key.double().mean(0)
    assert float(gone) < 0.2 * float(kept), "over each sequence; over both it is 0, below"
    mean = found.query.mean((0, 2)) - fitted_to(found, "no-key").fitted["centre"][:, : keys.shape[-1]]
    assert float(mean.abs().max()) < 1e-12


@pytest.mark.parametrize("part", FITTED)
def test_the_oracle_is_the_tie_of_the_evaluated_texts_own_logits(part):
    found = CASES["right padding"]()
    oracle, tie = parsed(f"nearest:{part},oracle"), parsed(TIES[part])
    assert isinstance(oracle, Kernel)
    assert oracle.spelling == f"nearest:part={part},how=oracle"
    assert parsed(oracle.spelling) == oracle
    assert torch.equal(attend(found, oracle), attend(found, tie))
    assert torch.equal(weights(found, oracle), weights(found, tie))
    assert apart(attend(found, oracle), attend(found, parsed("exponential"))) > 0.05, "the control"
    for causal in (CASES["causal"](), CASES["cross"]()):
        with pytest.raises(UsageError):
            attend(causal, oracle)


def test_a_report_names_the_oracle_an_analysis_and_the_fitted_form_a_model():
    report = swap_kernel(family("bert"), ["nearest:positive", "nearest:positive,oracle", "mercer"], **QUICK)
    model, analysis, tie = report.swaps
    assert analysis.kernel == "nearest:part=positive,how=oracle"
    assert any(note.startswith("For analysis only: ") for note in analysis.notes)
    assert not any("nearest" in note for note in analysis.notes), "a kernel's name stands before its notes"
    assert not any("analysis" in note for note in model.notes)
    assert "N nearest to N₀" in model.formula
    assert "N₀" not in analysis.formula, "no form is fitted"
    assert analysis.formula.startswith(EVERY_TIE["mercer"].formula)
    assert (analysis.kl, analysis.hidden_cosine) == (tie.kl, tie.hidden_cosine)
    assert model.fitted == ["centre", "factor", "gate", "signs"]
    assert analysis.fitted == []
    assert model.hidden_cosine != pytest.approx(analysis.hidden_cosine, abs=1e-5)


def test_healing_trains_the_factor_and_the_kernel_stays_positive(tmp_path, demo_calls):
    place = tmp_path / "healed"
    report = attnlens.heal("demo", "nearest:positive", train=4, save=str(place), layers=[1], **QUICK)
    stages = [stage.name for stage in report.swap.stages]
    assert stages == ["swapped", "healed"]
    stored = load_file(place / "attnlens.safetensors")
    fitted = {name.removeprefix("1."): part for name, part in stored.items()}
    assert bool((fitted["signs"] >= 0).all())
    kernel = parsed("nearest:positive").with_fitted(fitted)
    assert bool((least_eigenvalue(scores_of(demo_calls[1][1], kernel)) > -1e-12).all())
    shortened = swap_kernel("demo", "nearest:positive", save=str(tmp_path / "fitted"), layers=[1], **QUICK)
    before = load_file(tmp_path / "fitted" / "attnlens.safetensors")
    assert shortened.swap.fitted == report.swap.fitted
    assert not torch.equal(before["1.factor"], stored["1.factor"]), "the control: it was trained"
    assert report.swap.stages[-1].kl < report.swap.stages[0].kl


def test_heads_are_fitted_each_by_itself(demo_calls):
    seen, unseen = demo_calls[0][0], demo_calls[1][0]
    whole, few = fitted_to(seen, "symmetric"), fitted_to(seen.select([1, 5]), "symmetric")
    some = attend(unseen.select([1, 5]), few).double()
    assert apart(attend(unseen, whole)[:, :, [1, 5]], some) < 1e-5


def test_a_fit_through_the_pipeline_is_the_same_fit(demo_calls):
    model = attnlens.load("demo")
    cut = {"tokens": 64, "batch_size": 16}
    evaluated = texts.batches(model, texts.sample("demo"), texts.Cut(sequences=2, **cut))
    calibrated = texts.batches(model, texts.sample("demo"), texts.Cut(sequences=16, **cut), apart_from=evaluated)
    sites = sites_of(model.model, evaluated.batches[0].inputs)
    plain = dict.fromkeys(sites, hooks.Replacement(parsed("nearest:positive")))
    swaps = fit(SwapSetup(model, sites, plain), calibrated, lambda _: None)
    for site, seen in zip(sites, demo_calls[0], strict=True):
        own = fitted_to(seen, "positive").fitted
        torch.testing.assert_close(swaps[site].kernel.fitted["gate"], own["gate"], rtol=1e-4, atol=1e-5)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (lambda: CASES["cross"](), "another sequence"),
        (lambda: CASES["decoding"](), "a key-value cache"),
        (lambda: CASES["chunk of a cache"](), "a key-value cache"),
        (lambda: call(softcap=5.0), "softcap"),
        (lambda: call(causal=True, sinks=torch.zeros(HEADS).double()), "attention sinks"),
    ],
)
@pytest.mark.parametrize("part", ["positive", "no-key"])
def test_what_has_no_query_and_key_of_each_token_is_refused(case, words, part):
    kernel = fitted_to(call(), part)
    with pytest.raises(UsageError, match=words):
        attend(case(), kernel)
    with pytest.raises(UsageError, match=words):
        NearestFit(0).update(case())


@pytest.mark.parametrize(
    ("spelling", "words"),
    [
        ("nearest", "needs the parameter part"),
        ("nearest:skew", "symmetric or positive or no-key or no-skew"),
        ("nearest:positive,guess", "fitted or oracle"),
        ("nearest:positive+symmetric", "already determines"),
        ("nearest:positive,oracle+tied-key", "already determines"),
        ("nearest:positive,oracle+window:8", "needs every pair"),
    ],
)
def test_spellings_without_a_meaning_are_refused(spelling, words):
    with pytest.raises(UsageError, match=words):
        parsed(spelling)


def test_what_is_not_fitted_or_cannot_be_is_refused():
    with pytest.raises(UsageError, match="must be fitted"):
        attend(call(), parsed("nearest:positive"))
    with pytest.raises(UsageError, match="needs query and key of both tokens"):
        fitted_to(call(), "positive").log(call().query, call().key, 1.0)
    with pytest.raises(UsageError, match="can't be healed"):
        attnlens.heal("demo", "nearest:positive,oracle", train=2, **QUICK)
    with pytest.raises(UsageError, match="can't be fitted"):
        swap_kernel("demo", "nearest:positive,oracle", fit=True, **QUICK)
    with pytest.raises(UsageError, match="is undefined in cross-attention"):
        swap_kernel(family("t5"), "nearest:positive", **QUICK)


def test_the_program_runs_it_and_explains_it():
    done = program("swap-kernel", "demo", "--kernel", "nearest:positive", *WORDS, "--generate", "4")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "nearest:part=positive" in said
    assert "symmetric and no-skew give the same attention" in said
    assert "does not run with a key-value cache" in said
    page = " ".join(program("explain", "nearest").stdout.split())
    assert "(symmetric or positive or no-key or no-skew)" in page
    assert "(fitted or oracle)" in page
    with pytest.raises(UsageError, match=r"^nearest:positive,oracle needs every pair of tokens") as refusal:
        swap_kernel("demo", "nearest:positive,oracle", **QUICK)
    assert "leave out oracle" in refusal.value.remedy
    assert "mercer" not in str(refusal.value)
