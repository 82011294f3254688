"""Tests that the synthetic experiments say what was published, and nothing where something else was asked."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from experiment_words import assert_in_words

from attnlens.errors import UsageError
from attnlens.lab.experiments import EXPERIMENTS, golden
from attnlens.lab.experiments.tokens import NAMES, draw, draw_starts, grid, instances
from attnlens.lab.experiments.weights import _compare_directions, corpus
from attnlens.maths import attsvm
from attnlens.records.studies import Experiment
from attnlens.report.sections.experiments import format_label, setting
from attnlens.requests.experiments import USES, SyntheticRequest

SMALL = {"trials": 3, "iterations": 30}


def small(name, progress=lambda *_: None, **overrides):
    options = {option: value for option, value in SMALL.items() if option in USES[name]}
    return EXPERIMENTS[name].run(options | overrides, True, progress)


def test_the_data_are_drawn_in_the_published_order():
    generator = torch.Generator().manual_seed(7)
    v = torch.randn(10, generator=generator)
    labels = torch.randn(6, generator=generator).sign()
    tokens = torch.randn(6, 8, 10, generator=generator)
    queries = torch.randn(6, 10, generator=generator)
    drawn = draw(6, 8, 10, 3, 5)
    assert torch.equal(drawn.instances.labels[2], labels.double())
    assert torch.equal(drawn.instances.tokens[2], (tokens / tokens.norm(dim=-1, keepdim=True)).double())
    assert torch.equal(drawn.instances.queries[2], (queries / queries.norm(dim=-1, keepdim=True)).double())
    assert torch.equal(drawn.best[2], (labels[:, None] * (drawn.instances.tokens[2].float() @ v)).argmax(-1))
    assert torch.equal(draw(6, 8, 10, 1, 7, "self").instances.queries[0], drawn.instances.tokens[2][:, 0])


def test_starts_are_those_of_a_linear_layer_and_never_all_zero():
    W, (K, Q) = draw_starts(draw(2, 3, 16, 200, 0), 5, "random")
    assert W.abs().max() <= 0.25
    assert W.std().item() == pytest.approx(0.25 / math.sqrt(3), rel=0.02)
    assert K.shape == Q.shape == (200, 16, 5)
    W, (K, _) = draw_starts(draw(2, 3, 16, 2, 0), 5, "zero")
    assert W.norm() == 0 < K.norm()


def test_the_goldens_are_met_at_the_sizes_that_were_solved_and_a_wrong_one_is_not():
    result = golden()
    assert result.passed is True
    assert_in_words(result)
    assert len(result.published) == 4 + 3 + 2 + 4
    assert max(result.tolerance.values()) == 1e-6
    assert result.final["prompt_c_half_square"] == pytest.approx(17 / 18, abs=1e-9)
    wrong = result.model_copy(update={"published": result.published | {"vis1_frobenius": 8.685745}})
    assert wrong.judge().passed is False
    sizes = {name: len(problem.margins) for name, (problem, _) in instances().items()}
    assert sizes.items() >= {"vis1": 4, "vis2": 8, "local_0": 42, "local_1": 42, "prompt_d": 18}.items()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_runs_small_and_is_compared_with_nothing(name):
    counts = []
    result = small(name, lambda *at: counts.append(at))
    first, again = (Experiment.model_validate_json(each.model_dump_json()) for each in (result, small(name)))
    assert first == again
    assert result.settings["trials"] == 3
    assert result.published is result.tolerance is result.passed is None
    assert result.bounds == {}
    assert result.curves
    assert result.question.endswith("?")
    assert all(figure in result.reasons for figure, value in result.final.items() if value is None)
    assert all(len(curve.steps) == len(curve.median) for curve in result.curves.values())
    assert_in_words(result)
    assert all(0 <= done <= total for _, done, total in counts), "progress"
    assert counts[-1][1] == counts[-1][2]


CHANGES = [
    ("local-convergence", {"lr": 0.2}),
    ("local-convergence", {"m": 3}),
    ("local-convergence", {"loss": "exponential"}),
    ("local-convergence", {"attention": "self"}),
    ("local-convergence", {"parameterisation": "KQ"}),
    ("local-convergence", {"head_function": "relu"}),
    ("global-selection", {"start": "random"}),
    ("feasibility", {"n": 3}),
    ("rank", {"t": 4}),
    ("multi-token", {"head_function": "linear"}),
]


def probed(name, quick, *overrides):
    """The settings with which the experiment's function is called for each of these options."""
    calls = []

    def function(settings, progress):
        calls.append(settings)
        return Experiment(name=name, question="?", final={})

    for options in overrides:
        replace(EXPERIMENTS[name], function=function).run(options, quick, lambda *_: None)
    return calls


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_a_changed_setting_is_used_and_compared_with_nothing(name, change):
    calls = probed(name, True, {"seed": 4}, {"seed": 4, "trials": 10_000}, {"seed": 4, "trials": 1}, change)
    assert [settings.published for settings in calls] == [True, True, False, False]
    ((option, value),) = change.items()
    assert getattr(calls[-1], NAMES.get(option, option)) == value
    assert small(name, **change).settings[NAMES.get(option, option)] == value


def test_the_quick_trials_are_enough_for_a_verdict_of_the_whole_sweep():
    calls = probed("rank", False, *({"trials": trials, "seed": 7} for trials in (9, 10)))
    full = EXPERIMENTS["rank"].full.d
    assert [(each.d, each.trials, each.published) for each in calls] == [(full, 9, False), (full, 10, True)]


def test_in_one_dimension_nothing_is_sure():
    result = small("feasibility", n=1, t=2, d=1, trials=20)
    assert 0 < result.final["n1_T2_d1"] < 1
    assert result.final["sure_n1_T2"] is None
    assert "±1" in result.reasons["sure_n1_T2"]
    assert small("feasibility", n=2, t=2, d=1).final["sure_n2_T2"] == 1


def test_one_d_is_the_whole_sweep_and_ranks_are_within_the_bound_and_below_the_frobenius_ones():
    assert small("feasibility", d=3, n=4, t=3).curves["n=4, T=3"].steps == [3, 4]
    assert small("rank", d=5).curves["nuclear"].steps == [5]
    ranks = small("rank", trials=5, d=10).final
    assert ranks["beyond_bound"] <= 0
    assert ranks["nuclear_d10"] < ranks["frobenius_d10"]


def test_a_filter_that_nothing_passes_leaves_figures_out_with_a_reason():
    result = small("multi-token", trials=1, iterations=1)
    assert result.final["svm_equivalent_d4"] is None
    assert "filter" in result.reasons["svm_equivalent_d4"]
    assert result.settings["accepted_d4"] == 0
    assert setting(result, "accepted_d4") == "accepted, d = 4: 0"


def test_a_sum_of_the_finite_part_and_a_multiple_of_the_svm_has_that_direction():
    drawn = draw(3, 4, 6, 1, 0)
    tokens, queries = drawn.instances.tokens[0], drawn.instances.queries[0]
    kept = torch.tensor([[0.7, 0.3, 1e-9, 1e-9], [0.4, 0.6, 1e-9, 1e-9], [0.2, 0.8, 1e-9, 1e-9]], dtype=torch.float64)
    several = attsvm.solve(attsvm.selection_sets(tokens, queries, kept > 0.1)).W
    W = attsvm.solve(attsvm.finite_part(tokens, queries, kept, kept > 0.1)).W + 2 * several
    descent = SimpleNamespace(W=W[None, None], log_weights=kept.log()[None], chosen=kept.argmax(-1)[None, None])
    both, several_alone, _ = _compare_directions(drawn.instances, descent, 0)
    assert both == pytest.approx(0, abs=1e-9)
    assert several_alone > 1e-3


@pytest.mark.parametrize("iterations", [400, pytest.param(2000, marks=pytest.mark.full)])
def test_next_token_ends_at_the_graphs_svm_and_at_its_finite_part(iterations):
    late, early = (small("next-token", iterations=count).final for count in (iterations, 3))
    assert min(late["acyclic_to_svm"], late["cyclic_to_svm"]) > (0.999 if iterations == 2000 else 0.99)
    assert late["cyclic_finite_distance"] < (1e-6 if iterations == 2000 else 1e-4)
    assert early["cyclic_to_svm"] < 0.95
    assert early["cyclic_finite_distance"] > 1e-3


@pytest.mark.parametrize("cyclic", [False, True])
def test_a_corpus_has_cycles_if_it_is_cyclic(cyclic):
    one = corpus(6, 4, 8, 3, cyclic)
    features, other = one.features[..., :64], one.features[..., 64:]
    assert bool((other.abs() > 1e-9).any()) == cyclic
    assert ((one.reads > 0) <= one.component).all()
    assert (one.reads.sum(-1) > 0).all()
    assert torch.allclose((features + other).norm(dim=-1), torch.ones(6, 4).double())
    scores = features @ one.W
    label = scores.masked_fill(~one.component, -math.inf).amax(-1, keepdim=True)
    gaps = (label - scores)[~one.component]
    assert gaps.numel() > 0
    assert gaps.min() >= 1 - 1e-7


def test_a_vocabulary_that_poses_no_problem_is_refused():
    with pytest.raises(UsageError, match="an acyclic token-priority graph"):
        corpus(2, 3, 1, 0, False)


WRONG = {"lr": (-1.0, 0.0, math.inf, math.nan, "fast"), "d": (0,), "t": (1,), "n": (0,), "m": (0,), "iterations": (0,)}
WRONG |= {"trials": (0, 2.5), "seed": (-1,), "loss": ("hinge",), "head_function": ("gelu",), "attention": ("sefl",)}
WRONG |= {"parameterisation": ("QK",), "start": ("ones",), "momentum": (0.9,)}


def test_settings_that_make_no_sense_are_refused():
    wrong = [{name: value} for name, values in WRONG.items() for value in values]
    for settings in (*wrong, {"m": 3, "parameterisation": "W"}, {"start": "zero", "parameterisation": "KQ"}):
        with pytest.raises(UsageError, match=next(iter(settings))) as refusal:
            SyntheticRequest(experiments="local-convergence", **settings)
        assert refusal.value.remedy


def test_names_are_checked_and_ignored_settings_are_refused():
    used = SyntheticRequest(experiments=["rank", "local-convergence", "rank"], lr=0.2, d=4, m=None)
    assert used.chosen == ["rank", "local-convergence"]
    assert used.overrides() == {"lr": 0.2, "d": 4, "seed": 0}
    with pytest.raises(UsageError, match=r"lr would be ignored by rank, feasibility\."):
        SyntheticRequest(experiments=["rank", "feasibility"], lr=0.2)


def test_threads_are_restored():
    before = torch.get_num_threads()
    small("rank")
    assert torch.get_num_threads() == before


def test_the_grid_is_logarithmic_and_ends_at_the_last_iteration():
    assert (grid(1), grid(60)) == ([1], [1, 2, 3, 5, 10, 20, 30, 50, 60])


@pytest.mark.full
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_published_figures_are_met(name):
    result = EXPERIMENTS[name].run({}, True)
    if name == "local-convergence":
        label = format_label(result, "W_to_frobenius_longer")
        assert label == result.curves["W to frobenius, longer"].label == "W to Frobenius, longer"
    missed = {figure: result.final[figure] for figure in result.published or {} if result.meets(figure) is False}
    assert missed == {}
    assert result.passed is (None if len(result.untested) == len(result.published) else True)


def test_where_the_inputs_are_dead_no_gradient_is_left():
    """f_i = 0 behind ReLUs that are all off pulls on nothing, which is why the multi-token figures need a floor."""
    drawn = draw(1, 4, 5, 1, 0, "cross", "relu")
    tokens, off = drawn.instances.tokens.abs(), attsvm.Relu(-drawn.instances.head.V.abs())
    positive = attsvm.Instances(tokens, drawn.instances.queries, -torch.ones(1, 1).double(), off)
    assert attsvm.descend(positive, draw_starts(drawn, 5, "random")[0], 3).stationary.all()
