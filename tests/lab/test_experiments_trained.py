"""Tests that `verify` measures what it says of the kernel SVD, and fails where an identity breaks."""

import copy
import importlib
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import views
from experiment_words import assert_in_words

import attnlens
from attnlens.lab import primal
from attnlens.lab.experiments import trained
from attnlens.lab.experiments.trained import (
    CANONICAL,
    MATRICES,
    PRIMAL,
    Training,
    build_pair,
    compare_training,
    fit,
    measure_loss,
)
from attnlens.lab.reproduce import ROWS
from attnlens.maths import ksvd
from attnlens.runs.progress import silent

verifying = importlib.import_module("attnlens.lab.reproduce")  # `run.verify` is the function of that name

TINY = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_inner": 48, "n_positions": 16}
FEW = Training(steps=6, batch=4, scores=5)


@pytest.fixture(scope="module")
def loaded():
    return trained.demo()


@pytest.fixture(scope="module")
def decay():
    """The quick row of the decay by depth."""
    return trained.depth_decay(quick=True)


@pytest.fixture(scope="module")
def tiny(loaded):
    config = copy.deepcopy(loaded.model.config)
    config.update(TINY)
    return config


@pytest.fixture(scope="module")
def ids(loaded):
    return trained.sample(loaded, 16, 24)


def first_share(matrix):
    values = torch.linalg.svdvals(matrix.double())
    return values[..., 0] / values.sum(-1)


# --- the identities --------------------------------------------------------------------------------------------------
def test_the_identities_hold_on_every_kernel_and_the_control_does_not():
    progress = []
    result = trained.ksvd_identities(progress=lambda *words: progress.append(words))
    assert result.passed is True
    assert_in_words(result)
    assert [case.projection is None for case in trained.build_cases(0)] == [True, False] * 3
    assert progress[-1][1:] == (6, 6)
    errors = {name: value for name, value in result.final.items() if name != "J_perturbed"}
    assert set(errors) == {"eigen_residual", "primal_minus_dual", "Λe − h", "J", "Σe² − σ²", "rank_s_error"}
    assert all(0 <= value <= 1e-10 for value in errors.values())
    assert {result.bounds[name] for name in errors} == {"at most"}
    assert {result.published[name] + result.tolerance[name] for name in errors} == {1e-10}
    assert (result.bounds["J_perturbed"], result.published["J_perturbed"]) == ("at least", 0.1)
    assert result.final["J_perturbed"] >= 0.1


def test_seeds_reproduce_and_change_what_is_drawn():
    first, again, other = (trained.ksvd_identities(seed) for seed in (3, 3, 4))
    assert first.final == again.final
    assert first.final["J_perturbed"] != other.final["J_perturbed"]
    assert other.passed is True


BREAKS = {  # what is broken: part of ksvd, change of its result, figures that miss
    "uncrossed W": (
        "primal",
        lambda weights: replace(weights, query_weight=weights.key_weight, key_weight=weights.query_weight),
        {"primal_minus_dual", "Λe − h", "Σe² − σ²", "rank_s_error"},
    ),
    "uncrossed Λ": ("primal", lambda w: replace(w, multipliers=1 / w.multipliers), {"Λe − h", "J"}),
    "other vectors": (
        "dual",
        lambda solution: replace(solution, right=solution.right.flip(0)),
        {"eigen_residual", "primal_minus_dual", "rank_s_error", "Σe² − σ²", "Λe − h"},
    ),
    "other values": (
        "dual",
        lambda solution: replace(solution, values=solution.values * (1 + 1e-6)),
        {"eigen_residual", "primal_minus_dual", "Λe − h", "Σe² − σ²"},
    ),
}


def missed(result):
    assert result.passed is False
    return {figure for figure in result.final if not result.meets(figure)}


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_broken_fails_and_is_named(name, monkeypatch):
    part, change, expected = BREAKS[name]
    broken = {part: lambda *words: change(getattr(ksvd, part)(*words))}
    monkeypatch.setattr(trained, "ksvd", SimpleNamespace(**vars(ksvd) | broken))
    assert missed(trained.ksvd_identities()) >= expected


def test_a_control_that_changes_nothing_fails(monkeypatch):
    monkeypatch.setattr(trained, "NOISE", 0.0)
    assert missed(trained.ksvd_identities()) == {"J_perturbed"}


@pytest.mark.parametrize("number", [0, 3, 5])
def test_the_controls_objective_is_its_written_out_sum(number):
    case = list(trained.build_cases(0))[number]
    solution = ksvd.dual(case.queries, case.keys, 4, case.projection)
    noise = torch.randn(solution.left.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moved = replace(solution, left=solution.left + 0.1 * noise)
    projection = torch.eye(case.queries.shape[1]).double() if case.projection is None else case.projection
    kernel = torch.stack([torch.stack([(projection @ q) @ (projection @ k) for k in case.keys]) for q in case.queries])
    assert ksvd.matrix_residual(solution, kernel) < 1e-10
    total = 0.0
    for component in range(4):
        h_e, h_r, sigma = moved.left[:, component], moved.right[:, component], moved.values[component]
        total += ((kernel @ h_r).square().sum() + (kernel.mT @ h_e).square().sum()) / (2 * sigma) - h_e @ kernel @ h_r
    assert trained._objective(case, moved) == pytest.approx(abs(float(total)), rel=1e-10)


# --- decay by depth --------------------------------------------------------------------------------------------------
def test_the_thirds_are_what_the_analyzer_reads_and_nothing_is_judged(decay, monkeypatch):
    assert_in_words(decay)
    assert (decay.model, decay.settings["windows"]) == ("demo", trained.FEW)
    assert decay.passed is decay.published is None
    assert "0.16, 0.39 and 0.62" in decay.source
    read = {"source": "tokens", "windows": trained.FEW, "length": trained.DEPTH_TOKENS}
    heads = attnlens.inspect("demo", analyzers=["ksvd"], **read).heads
    layers = [[h.measures["ksvd.first_share"].value for h in heads if h.layer == layer] for layer in range(4)]
    means = [sum(layer) / len(layer) for layer in layers]
    expected = [(means[0] + means[1]) / 2, means[2], means[3]]
    for third, value in zip(trained.THIRDS, expected, strict=True):
        assert decay.final[f"attention_{third}"] == pytest.approx(value, abs=1e-5)
        assert 0 < decay.errors[f"attention_{third}"] < 0.05
    assert decay.final["attention_holds"] == float(expected[0] < expected[1] < expected[2]) == 0
    monkeypatch.setattr(
        trained, "by_third", lambda *_: {"attention": [torch.full((2, 2, 3), x) for x in (0.1, 0.2, 0.3)]}
    )
    rising = trained.depth_decay(quick=True)
    assert rising.final["attention_holds"] == 1, "the control"
    assert rising.passed is rising.judge().passed is None, "neither outcome is a verdict"


def written_out(model, windows):
    """σ₁/Σσ of every attention matrix that the model itself gives out: (layers, windows, heads)."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    eager = type(model)(config)
    eager.load_state_dict(model.state_dict())
    with torch.no_grad():
        return torch.stack([first_share(one) for one in eager(windows, output_attentions=True).attentions])


def test_the_difference_of_last_and_first_has_its_error_over_windows(loaded, decay):
    shares = written_out(loaded.model, trained.sample(loaded, trained.DEPTH_TOKENS, trained.FEW)).mean(-1)
    apart = shares[3] - shares[:2].mean(0)
    assert decay.final["attention_last_minus_first"] == pytest.approx(float(apart.mean()), abs=1e-5)
    assert decay.errors["attention_last_minus_first"] == pytest.approx(float(apart.std() / len(apart) ** 0.5), rel=1e-3)
    unpaired = (shares[3].var() + shares[:2].mean(0).var()).div(len(apart)).sqrt()
    assert decay.errors["attention_last_minus_first"] != pytest.approx(float(unpaired), rel=1e-2), "the control"


def test_curves_are_those_of_the_matrices_written_out(loaded, ids):
    call, query_key = trained.record_calls(loaded.model, ids[:2])[2]
    q, k = query_key.query[1, 5].double(), query_key.key[1, 5].double()
    scores = (q @ k.mT * query_key.scale).masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf)
    means = [torch.stack([x[: i + 1].mean(0) for i in range(16)]) for x in (q, k)]
    unit = [[row / row.norm() for row in x] for x in (q, k, *means)]
    K, K_means = (torch.tensor([[float(x @ y) for y in b] for x in a]) for a, b in (unit[:2], unit[2:]))
    cosine = [trained.cosine_curve(call, averaged=averaged) for averaged in (False, True)]
    curves = trained.attention_curve(query_key), *cosine
    for values, matrix in zip(curves, (scores.softmax(-1), K, K_means), strict=True):
        assert float(values[1, 5, 0]) == pytest.approx(float(first_share(matrix)), abs=1e-5)
        assert values[..., -1].sub(1).abs().max() < 1e-9
    assert abs(first_share(K) - first_share(K_means)) > 0.01, "the control: averaging changes the kernel"


# --- decay after training --------------------------------------------------------------------------------------------
def test_what_verify_trains_has_demos_size_and_is_read_on_windows_that_it_never_saw(loaded, monkeypatch):
    calls = []

    def brief(*words):
        calls.append(words)
        config = copy.deepcopy(words[0])
        config.update(TINY)
        return compare_training(config, words[1][:8, :16], words[2][:4, :16], FEW, words[4][:1])

    monkeypatch.setattr(trained, "compare_training", brief)
    result = trained.primal_decay(7)
    (config, windows, held_out, training, seeds, _) = calls[0]
    changed = {name for name, value in config.to_dict().items() if value != loaded.model.config.to_dict()[name]}
    assert changed == {"n_positions"}
    assert config.n_positions == windows.shape[-1] == held_out.shape[-1] == trained.TOKENS
    assert (training, list(seeds)) == (Training(), [7, 8, 9])
    assert not {tuple(row.tolist()) for row in windows} & {tuple(row.tolist()) for row in held_out}
    assert len(held_out) >= 30
    assert (result.model, result.passed) == (trained.MODEL, None)
    assert result.settings["text"].startswith("King James passages")


def test_both_models_begin_alike_and_only_the_last_layer_is_primal(tiny):
    before = torch.get_rng_state()
    models = build_pair(tiny, 5, 1)
    assert torch.equal(torch.get_rng_state(), before), "the caller's random numbers are left alone"
    canonical, changed = (dict(models[way].named_parameters()) for way in (CANONICAL, PRIMAL))
    assert all(torch.equal(changed[name], value) for name, value in canonical.items())
    assert {name.split(".primal")[0] for name in set(changed) - set(canonical)} == {"transformer.h.1.attn"}
    again, other = (dict(build_pair(tiny, 5, seed)[PRIMAL].named_parameters()) for seed in (1, 2))
    assert all(torch.equal(again[name], value) for name, value in changed.items())
    assert not torch.equal(other["transformer.wte.weight"], changed["transformer.wte.weight"])


def test_both_see_the_same_batches_and_the_regulariser_is_in_one_loss_alone(tiny, ids, monkeypatch):
    seen = {CANONICAL: [], PRIMAL: []}
    penalties = []
    original = primal.regulariser
    monkeypatch.setattr(primal, "regulariser", lambda *words: penalties.append(way) or original(*words))
    for way, model in build_pair(tiny, 5, 1).items():
        model.register_forward_pre_hook(lambda _, args, way=way: seen[way].append(args[0].clone()))
        before = measure_loss(model, ids[:8]).item()
        fit(model, ids, replace(FEW, steps=40), 1, lambda: None)
        assert measure_loss(model, ids[:8]).item() < before - 0.5, "it learns"
        assert not model.training
    assert len(seen[PRIMAL]) == 42
    assert all(torch.equal(*both) for both in zip(*seen.values(), strict=True))
    assert not torch.equal(seen[PRIMAL][1], seen[PRIMAL][2])
    assert penalties == [PRIMAL] * 40


def test_training_is_reproduced_by_its_seeds_and_its_figures_are_means_over_them(tiny, ids):
    train = partial(compare_training, tiny, ids[:16], ids[16:])
    progress = []
    result, again = train(FEW, [0, 1], lambda *words: progress.append(words)), train(FEW, [0, 1])
    assert result == again
    assert_in_words(result)
    assert progress[-1][1:] == (24, 24)
    alone = [train(FEW, [seed]) for seed in (0, 1)]
    for name, value in result.final.items():
        assert value == pytest.approx(sum(one.final[name] for one in alone) / 2, abs=1e-9)
    for name in ("loss", *MATRICES):
        apart = torch.tensor([one.final[f"{name}_primal"] - one.final[f"{name}_canonical"] for one in alone])
        assert result.final[f"{name}_difference"] == pytest.approx(float(apart.mean()), abs=1e-6)
        assert result.errors[f"{name}_difference"] == pytest.approx(float(apart.std() / 2**0.5), rel=1e-3)
    assert alone[0].final["loss_primal"] != alone[1].final["loss_primal"]
    assert alone[0].errors == {}
    assert set(result.errors) == {name for name in result.final if "holds" not in name}


def test_the_regulariser_moves_primal_alone_and_a_verdict_is_never_given(tiny, ids):
    weak, strong = (compare_training(tiny, ids[:16], ids[16:], replace(FEW, eta=eta), [0]) for eta in (0.1, 10.0))
    assert all(strong.final[name] == value for name, value in weak.final.items() if "canonical" in name)
    assert strong.final["attention_primal"] != weak.final["attention_primal"]
    assert weak.passed is weak.published is None
    assert "0.77" in weak.source
    assert "0.93" in weak.source
    for matrix in MATRICES:
        more = weak.final[f"{matrix}_primal"] > weak.final[f"{matrix}_canonical"]
        assert weak.final[f"{matrix}_holds"] == float(more)


def test_what_stands_for_attention_in_the_primal_layer_is_its_scores_kernel(tiny, ids):
    model = build_pair(tiny, 5, 0)[PRIMAL]
    fit(model, ids[:16], FEW, 0, lambda: None)
    held_out = ids[16:19]
    curves = trained.measure_decay(model, held_out)
    with torch.no_grad():
        assert float(curves["loss"]) == pytest.approx(float(model(held_out, labels=held_out).loss), rel=1e-5)
        heads = model.transformer.h[-1].attn.primal
        e, r, _ = heads.last
        kernel = e.double() @ heads.log_multipliers.exp().diag_embed().double() @ r.double().mT
    shares = first_share(kernel).mean(0)
    torch.testing.assert_close(curves["attention"][:, 0], shares, rtol=1e-4, atol=1e-4)
    plain = first_share(e @ r.mT).mean(0)
    assert (plain - shares).abs().max() > 1e-3, "the control: without Λ it is another kernel"
    canonical = trained.measure_decay(build_pair(tiny, 5, 0)[CANONICAL], held_out)
    assert canonical["attention"].shape == (2, 16)


# --- the rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [True, False])
def test_a_row_that_quick_leaves_out_is_named_and_its_figures_never_decide(quick, decay, monkeypatch):
    (identities,) = ROWS[-3](quick, 0, silent)
    assert (identities.name, identities.model, identities.passed) == ("KSVD identities", "demo", True)
    asked = []
    monkeypatch.setattr(verifying, "depth_decay", lambda *words: asked.append(words) or decay)
    monkeypatch.setattr(verifying, "ROWS", ROWS[-2:])
    monkeypatch.setattr(verifying, "primal_decay", lambda *_: decay.model_copy(update={"name": "decay by training"}))
    report = verifying.rerun_claims(0, quick=quick)
    assert [each.name for each in report.experiments] == ["decay by depth", "decay by training"][: 2 - quick]
    assert asked[0][0] is quick
    assert [skipped.site for skipped in report.coverage.skipped] == ["decay by training"] * quick
    text = views.markdown(report)
    assert ("Skipped" in text) == quick
    assert "no published values to compare with" in text
    assert "FAIL" not in text
