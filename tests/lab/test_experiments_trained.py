"""Tests that `verify` measures what it says of the kernel SVD, and fails where an identity breaks."""

import copy
import importlib
from dataclasses import replace
from functools import partial

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
    attention_curve,
    calls,
    compare_training,
    cosine_curve,
    demo,
    fit,
    measure_decay,
    nats,
    pair,
    sample,
)
from attnlens.lab.reproduce import ROWS
from attnlens.maths import ksvd
from attnlens.runs.progress import silent

verifying = importlib.import_module("attnlens.lab.reproduce")  # `run.verify` is the function of that name

TINY = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_inner": 48, "n_positions": 16}
FEW = Training(steps=6, batch=4, scores=5)


@pytest.fixture(scope="module")
def loaded():
    return demo()


@pytest.fixture(scope="module")
def tiny(loaded):
    config = copy.deepcopy(loaded.model.config)
    config.update(TINY)
    return config


@pytest.fixture(scope="module")
def ids(loaded):
    return sample(loaded, 16, 24)


def first_share(matrix):
    values = torch.linalg.svdvals(matrix.double())
    return values[..., 0] / values.sum(-1)


# --- the identities --------------------------------------------------------------------------------------------------


def test_the_identities_hold_on_every_kernel_and_the_control_does_not():
    progress = []
    found = trained.ksvd_identities(progress=lambda *words: progress.append(words))
    assert found.passed is True
    assert_in_words(found)
    assert [case.projection is None for case in trained.build_cases(0)] == [True, False] * 3
    assert progress[-1][1:] == (6, 6)
    errors = {name: value for name, value in found.final.items() if name != "J_perturbed"}
    assert set(errors) == {"eigen_residual", "primal_minus_dual", "Λe − h", "J", "Σe² − σ²", "rank_s_error"}
    assert all(0 <= value <= 1e-10 for value in errors.values())
    assert {found.bounds[name] for name in errors} == {"at most"}
    assert {found.published[name] + found.tolerance[name] for name in errors} == {1e-10}
    assert (found.bounds["J_perturbed"], found.published["J_perturbed"]) == ("at least", 0.1)
    assert found.final["J_perturbed"] >= 0.1


def test_seeds_reproduce_and_change_what_is_drawn():
    first, again, other = (trained.ksvd_identities(seed) for seed in (3, 3, 4))
    assert first.final == again.final
    assert first.final["J_perturbed"] != other.final["J_perturbed"]
    assert other.passed is True


def uncrossed(solution, queries, keys, projection=None):
    found = ksvd.primal(solution, queries, keys, projection)
    return replace(found, query_weight=found.key_weight, key_weight=found.query_weight)


def not_inverted(solution, queries, keys, projection=None):
    return replace(ksvd.primal(solution, queries, keys, projection), multipliers=solution.values)


def turned(*words):
    solution = ksvd.dual(*words)
    return replace(solution, right=solution.right.flip(0))


def scaled(*words):
    solution = ksvd.dual(*words)
    return replace(solution, values=solution.values * (1 + 1e-6))


BREAKS = {
    "uncrossed W": ("primal", uncrossed, {"primal_minus_dual", "Λe − h", "Σe² − σ²", "rank_s_error"}),
    "uncrossed Λ": ("primal", not_inverted, {"Λe − h", "J"}),
    "other vectors": ("dual", turned, {"eigen_residual", "primal_minus_dual", "rank_s_error", "Σe² − σ²", "Λe − h"}),
    "other values": ("dual", scaled, {"eigen_residual", "primal_minus_dual", "Λe − h", "Σe² − σ²"}),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_broken_fails_and_is_named(name, monkeypatch):
    part, broken, expected = BREAKS[name]

    class Broken:
        def __getattr__(self, called):
            return broken if called == part else getattr(ksvd, called)

    monkeypatch.setattr(trained, "ksvd", Broken())
    found = trained.ksvd_identities()
    assert found.passed is False
    assert {figure for figure in found.final if not found.meets(figure)} >= expected


def test_a_control_that_changes_nothing_fails(monkeypatch):
    monkeypatch.setattr(trained, "NOISE", 0.0)
    found = trained.ksvd_identities()
    assert found.passed is False
    assert [figure for figure in found.final if not found.meets(figure)] == ["J_perturbed"]


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


def test_the_thirds_are_what_the_analyzer_reads_and_nothing_is_judged():
    found = trained.depth_decay(quick=True)
    assert_in_words(found)
    assert found.passed is found.published is None
    assert "0.16, 0.39 and 0.62" in found.source
    report = attnlens.inspect(
        "demo", source="tokens", analyzers=["ksvd"], windows=trained.FEW, length=trained.DEPTH_TOKENS
    )
    layers = [[h.measures["ksvd.first_share"].value for h in report.heads if h.layer == layer] for layer in range(4)]
    means = [sum(layer) / len(layer) for layer in layers]
    expected = [(means[0] + means[1]) / 2, means[2], means[3]]
    for third, value in zip(trained.THIRDS, expected, strict=True):
        assert found.final[f"attention_{third}"] == pytest.approx(value, abs=1e-5)
        assert 0 < found.errors[f"attention_{third}"] < 0.05
    assert found.final["attention_holds"] == float(expected[0] < expected[1] < expected[2])


def written_out(model, windows):
    """σ₁/Σσ of every attention matrix that the model itself gives out: (layers, windows, heads)."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    eager = type(model)(config)
    eager.load_state_dict(model.state_dict())
    with torch.no_grad():
        return torch.stack([first_share(one) for one in eager(windows, output_attentions=True).attentions])


def test_the_difference_of_last_and_first_has_its_error_over_windows(loaded):
    found = trained.depth_decay(quick=True)
    shares = written_out(loaded.model, sample(loaded, trained.DEPTH_TOKENS, trained.FEW)).mean(-1)
    apart = shares[3] - shares[:2].mean(0)
    assert found.final["attention_last_minus_first"] == pytest.approx(float(apart.mean()), abs=1e-5)
    assert found.errors["attention_last_minus_first"] == pytest.approx(float(apart.std() / len(apart) ** 0.5), rel=1e-3)
    unpaired = (shares[3].var() + shares[:2].mean(0).var()).div(len(apart)).sqrt()
    assert found.errors["attention_last_minus_first"] != pytest.approx(float(unpaired), rel=1e-2), "the control"


def test_neither_outcome_is_a_verdict(monkeypatch):
    original = trained.by_third
    found = [trained.depth_decay(quick=True)]
    monkeypatch.setattr(
        trained, "by_third", lambda *words: {name: thirds[::-1] for name, thirds in original(*words).items()}
    )
    found.append(trained.depth_decay(quick=True))
    assert [one.final["attention_holds"] for one in found] == [0.0, 1.0]
    assert found[0].final["attention_last_minus_first"] == pytest.approx(-found[1].final["attention_last_minus_first"])
    assert [one.judge().passed for one in found] == [None, None]
    missing = found[0].model_copy(update={"final": dict.fromkeys(found[0].final)})
    assert missing.judge().passed is None


def test_curves_are_those_of_the_matrices_written_out(loaded, ids):
    call, query_key = calls(loaded.model, ids[:2])[2]
    q, k = query_key.query[1, 5].double(), query_key.key[1, 5].double()
    scores = (q @ k.mT * query_key.scale).masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf)
    means = [torch.stack([x[: i + 1].mean(0) for i in range(16)]) for x in (q, k)]
    unit = [[row / row.norm() for row in x] for x in (q, k, *means)]
    K, K_means = (torch.tensor([[float(x @ y) for y in b] for x in a]) for a, b in (unit[:2], unit[2:]))
    found = attention_curve(query_key), cosine_curve(call), cosine_curve(call, averaged=True)
    for values, matrix in zip(found, (scores.softmax(-1), K, K_means), strict=True):
        assert float(values[1, 5, 0]) == pytest.approx(float(first_share(matrix)), abs=1e-5)
        assert values[..., -1].sub(1).abs().max() < 1e-9
    assert abs(first_share(K) - first_share(K_means)) > 0.01, "the control: averaging changes the kernel"


# --- decay after training --------------------------------------------------------------------------------------------


def test_what_verify_trains_has_demos_size_and_is_read_on_windows_that_it_never_saw(loaded, monkeypatch):
    asked = []
    monkeypatch.setattr(
        trained, "compare_training", lambda *words: asked.append(words) or compare_training(*brief(words))
    )

    def brief(words):
        config, windows, held = copy.deepcopy(words[0]), words[1][:8, :16], words[2][:4, :16]
        config.update(TINY)
        return config, windows, held, FEW, words[4][:1]

    found = trained.primal_decay(7)
    (config, windows, held, asked_training, seeds, _) = asked[0]
    changed = {name for name, value in config.to_dict().items() if value != loaded.model.config.to_dict()[name]}
    assert changed == {"n_positions"}
    assert config.n_positions == windows.shape[-1] == held.shape[-1] == trained.TOKENS
    assert asked_training == Training()
    assert list(seeds) == [7, 8, 9]
    rows = {tuple(row.tolist()) for row in windows}
    assert not any(tuple(row.tolist()) in rows for row in held)
    assert len(held) >= 30
    assert (found.model, found.passed) == (trained.MODEL, None)
    assert found.settings["text"].startswith("King James passages")


def test_both_models_begin_alike_and_only_the_last_layer_is_primal(tiny):
    models = pair(tiny, 5, 1)
    canonical, changed = (dict(models[way].named_parameters()) for way in (CANONICAL, PRIMAL))
    assert all(torch.equal(changed[name], value) for name, value in canonical.items())
    assert {name.split(".primal")[0] for name in set(changed) - set(canonical)} == {"transformer.h.1.attn"}
    again, other = (dict(pair(tiny, 5, seed)[PRIMAL].named_parameters()) for seed in (1, 2))
    assert all(torch.equal(again[name], value) for name, value in changed.items())
    assert not torch.equal(other["transformer.wte.weight"], changed["transformer.wte.weight"])


def test_drawing_models_leaves_the_callers_random_numbers_alone(tiny):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    pair(tiny, 5, 1)
    assert torch.equal(torch.rand(3), expected)


def test_both_see_the_same_batches_and_the_regulariser_is_in_one_loss_alone(tiny, ids, monkeypatch):
    seen = {CANONICAL: [], PRIMAL: []}
    penalties = []
    original = primal.regulariser
    monkeypatch.setattr(primal, "regulariser", lambda *words: penalties.append(way) or original(*words))
    for way, model in pair(tiny, 5, 1).items():
        model.register_forward_pre_hook(lambda _, args, way=way: seen[way].append(args[0].clone()))
        before = nats(model, ids[:8]).item()
        fit(model, ids, replace(FEW, steps=40), 1, lambda: None)
        assert nats(model, ids[:8]).item() < before - 0.5, "it learns"
        assert not model.training
    assert len(seen[PRIMAL]) == 42
    assert all(torch.equal(*both) for both in zip(*seen.values(), strict=True))
    assert not torch.equal(seen[PRIMAL][1], seen[PRIMAL][2])
    assert penalties == [PRIMAL] * 40


def test_training_is_reproduced_by_its_seeds_and_its_figures_are_means_over_them(tiny, ids):
    train = partial(compare_training, tiny, ids[:16], ids[16:])
    progress = []
    found, again = train(FEW, [0, 1], lambda *words: progress.append(words)), train(FEW, [0, 1])
    assert found == again
    assert_in_words(found)
    assert progress[-1][1:] == (24, 24)
    alone = [train(FEW, [seed]) for seed in (0, 1)]
    for name, value in found.final.items():
        assert value == pytest.approx(sum(one.final[name] for one in alone) / 2, abs=1e-9)
    for name in ("loss", *MATRICES):
        apart = torch.tensor([one.final[f"{name}_primal"] - one.final[f"{name}_canonical"] for one in alone])
        assert found.final[f"{name}_difference"] == pytest.approx(float(apart.mean()), abs=1e-6)
        assert found.errors[f"{name}_difference"] == pytest.approx(float(apart.std() / 2**0.5), rel=1e-3)
    assert alone[0].final["loss_primal"] != alone[1].final["loss_primal"]
    assert alone[0].errors == {}
    assert set(found.errors) == {name for name in found.final if "holds" not in name}


def test_the_regulariser_moves_primal_alone_and_a_verdict_is_never_given(tiny, ids):
    found, stronger = (compare_training(tiny, ids[:16], ids[16:], replace(FEW, eta=eta), [0]) for eta in (0.1, 10.0))
    for name, value in found.final.items():
        if "canonical" in name:
            assert stronger.final[name] == value
    assert stronger.final["attention_primal"] != found.final["attention_primal"]
    assert found.passed is found.published is None
    assert "0.77" in found.source
    assert "0.93" in found.source
    for matrix in MATRICES:
        more = found.final[f"{matrix}_primal"] > found.final[f"{matrix}_canonical"]
        assert found.final[f"{matrix}_holds"] == float(more)


def test_what_stands_for_attention_in_the_primal_layer_is_its_scores_kernel(tiny, ids):
    model = pair(tiny, 5, 0)[PRIMAL]
    fit(model, ids[:16], FEW, 0, lambda: None)
    held = ids[16:19]
    curves = measure_decay(model, held)
    with torch.no_grad():
        assert float(curves["loss"]) == pytest.approx(float(model(held, labels=held).loss), rel=1e-5)
        heads = model.transformer.h[-1].attn.primal
        e, r, _ = heads.last
        kernel = e.double() @ heads.log_multipliers.exp().diag_embed().double() @ r.double().mT
    shares = first_share(kernel).mean(0)
    torch.testing.assert_close(curves["attention"][:, 0], shares, rtol=1e-4, atol=1e-4)
    plain = first_share(e @ r.mT).mean(0)
    assert (plain - shares).abs().max() > 1e-3, "the control: without Λ it is another kernel"
    canonical = measure_decay(pair(tiny, 5, 0)[CANONICAL], held)
    assert canonical["attention"].shape == (2, 16)


# --- the rows --------------------------------------------------------------------------------------------------------


def test_they_are_the_last_rows_and_quick_leaves_training_out():
    found = [row(True, 0, silent) for row in ROWS[-3:]]
    assert [[one.name for one in row] for row in found] == [["KSVD identities"], ["decay by depth"], []]
    assert found[0][0].passed is True
    assert found[1][0].settings["windows"] == trained.FEW
    assert [row[0].model for row in found[:2]] == ["demo", "demo"]


@pytest.mark.parametrize("quick", [True, False])
def test_a_row_that_quick_leaves_out_is_named_and_its_figures_never_decide(quick, monkeypatch):
    row = trained.depth_decay(quick=True)
    monkeypatch.setattr(verifying, "ROWS", [lambda *_: [row], verifying.ROWS[-1]])
    monkeypatch.setattr(verifying, "primal_decay", lambda *_: row.model_copy(update={"name": "decay by training"}))
    report = verifying.rerun_claims(0, quick=quick)
    names = ["decay by depth"] if quick else ["decay by depth", "decay by training"]
    assert [found.name for found in report.experiments] == names
    assert [skipped.site for skipped in report.coverage.skipped] == ["decay by training"] * quick
    text = views.markdown(report)
    assert ("Skipped" in text) == quick
    assert "nothing published to compare with" in text
    assert "FAIL" not in text
