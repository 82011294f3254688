"""Tests descent on a head's own selection problem against its SVM, from zero and from the head."""

import math
from dataclasses import replace

import pytest
import torch
from experiment_words import assert_in_words
from loaded import family

import attnlens
from attnlens.analyzers.selection import Selector
from attnlens.errors import UsageError
from attnlens.lab.experiments.tokens import ExperimentSettings
from attnlens.lab.reproduce import (
    FACTORS,
    as_instances,
    build_starts,
    converge_head,
    measure_hardening,
    pose_selection,
    train_head,
)
from attnlens.maths import attsvm
from attnlens.maths.attsvm.head import FactoredForm, Nearness, Scene, Softmax, choose, compare_with_svm, count_copies
from attnlens.requests import InspectRequest
from attnlens.runs.inspect.pipeline import prepare

HEAD = (3, 2)


@pytest.fixture(scope="module")
def gathered() -> tuple[Selector, Nearness]:
    """What a head of the demo sees of a little text, and the problem that it poses there."""
    sampling = {"length": 64, "windows": 4, "batch_size": 4, "placement": "first"}
    request = InspectRequest(**sampling, source="tokens", analyzers=["selection"], layers=[HEAD[0]], heads=[HEAD[1]])
    return pose_selection(prepare("demo", request))[1:]


@pytest.fixture(scope="module")
def near(gathered: tuple[Selector, Nearness]) -> Nearness:
    return gathered[1]


def test_the_instances_score_the_tokens_as_the_head_does(near: Nearness) -> None:
    problem, form = near.posed.problem, near.posed.form
    instances = as_instances(problem)
    W = form.left @ form.right.mT
    scores = torch.einsum("ntd,de,ne->nt", instances.tokens[0], W, instances.queries[0])
    assert instances.allowed is not None
    below = scores[:, :1] - scores
    own = below[instances.allowed[0] & (torch.arange(below.shape[1]) > 0)]
    order = problem.query_of.argsort(stable=True)
    assert torch.allclose(own, problem.components(problem.queries @ W.mT)[order], rtol=1e-9)
    assert bool((own > 0).all()), "M itself separates what it selects"


def test_descent_leaves_the_head_for_its_svm_and_keeps_its_selection(near: Nearness) -> None:
    result = train_head(near, HEAD, ExperimentSettings(trials=1, lr=0.1, iterations=1050, parameterisation="W"))
    assert result.final["correlation of the head"] == pytest.approx(near.svm_cosine, abs=1e-8)
    for name in ("zero", "the head"):
        assert (result.final[f"correlation, from {name}"] or 0) > 0.99
        assert result.final[f"selection kept, from {name}"] == 1
    assert near.svm_cosine < 0.9, "there was a way to go"
    norms = result.curves["norm, from zero"].median
    assert norms[0] == 0
    assert (norms[-1] or 0) > 100


def test_queries_that_changed_places_have_another_svm(near: Nearness) -> None:
    """The control: descent does not end at the SVM in which every query selects the next query's token."""
    problem = near.posed.problem
    other = attsvm.solve(replace(problem, queries=problem.queries.roll(1, 0)), tolerance=1e-6)
    assert near.solution.W is not None
    assert other.W is not None
    unit = float(near.solution.W.norm())
    descent = attsvm.descend(as_instances(problem), build_starts(near, True, unit, 0)["zero"], 500, lr=0.1 * unit)
    assert float(descent.correlation(near.solution.W[None])[-1, 0]) > 0.98
    assert abs(float(descent.correlation(other.W[None])[-1, 0])) < 0.3


def divergences(scene: Scene, softmax: Softmax, factor: float) -> list[float]:
    """−log of the largest kind's weight by an independent softmax over every copy of every token, for x = z."""
    result = []
    for query, log_copies in zip(scene.queries, scene.log_copies, strict=True):
        kinds, logits = [], []
        for place, count in enumerate(log_copies.exp().round().int().tolist()):
            score = float(query @ scene.tokens[place])
            capped = score if softmax.softcap is None else softmax.softcap * math.tanh(score / softmax.softcap)
            kinds += [place] * count
            logits += [factor * capped] * count
        best = kinds[logits.index(max(logits))]
        sink = [] if softmax.sink is None else [factor * softmax.sink]
        weights = torch.tensor([*logits, *sink], dtype=torch.float64).softmax(0).tolist()
        result.append(-math.log(sum(w for w, kind in zip(weights, kinds, strict=False) if kind == best)))
    return result


def planted(softmax: Softmax) -> tuple[list[Scene], Nearness]:
    """One sequence of three equal tokens and four others, seen by queries that are tokens themselves."""
    tokens = torch.randn(7, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    tokens[1] = tokens[2] = tokens[0]
    copies = count_copies(tokens, torch.ones(7, 7, dtype=torch.bool)).double().log()
    scenes, unit = [Scene(tokens, tokens, copies)], torch.eye(5, dtype=torch.float64)
    form = FactoredForm(unit, unit)
    chosen = choose(scenes, form, softmax)
    near = compare_with_svm(scenes, form, chosen)
    assert isinstance(near, Nearness)
    assert len(chosen.sets) == 7
    return scenes, near


SOFTMAXES = [Softmax(), Softmax(softcap=2.0), Softmax(sink=3.0), Softmax(softcap=2.0, sink=1.0)]


@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_logits_times_c_harden_as_the_heads_own_softmax_says(softmax: Softmax) -> None:
    scenes, near = planted(softmax)
    result = measure_hardening(near, scenes, softmax, HEAD)
    curve = result.curves["KL, the head"]
    assert curve.low
    assert curve.high
    for place, factor in enumerate(FACTORS):
        every = torch.tensor(divergences(scenes[0], softmax, factor), dtype=torch.float64)
        read = [curve.low[place], curve.median[place], curve.high[place]]
        assert read == pytest.approx([float(every.quantile(share)) for share in (0.25, 0.5, 0.75)], rel=1e-9, abs=1e-14)
    own = float((-near.chosen.log_odds.sigmoid().log()).quantile(0.5))
    assert result.final["KL, the head, c = 1"] == pytest.approx(own, rel=1e-12)


def test_what_the_softmax_knows_changes_how_the_head_hardens_and_not_its_svm() -> None:
    scenes, near = planted(Softmax())
    single = [replace(scenes[0], log_copies=scenes[0].log_copies.clamp(max=0.0))]
    finals = [measure_hardening(near, scenes, softmax, HEAD).final for softmax in SOFTMAXES]
    finals.append(measure_hardening(near, single, Softmax(), HEAD).final)
    of_head, of_svm = (
        [final[name] for final in finals] for name in ("KL, the head, c = 1", "KL, its SVM at the same norm, c = 1")
    )
    assert len(set(of_head[:4])) == 4
    assert len(set(of_svm[:4])) == 1
    assert of_svm[4] != of_svm[0]
    assert of_head[4] != of_head[0]


def test_a_real_head_hardens_from_its_own_weights_to_a_selection(gathered: tuple[Selector, Nearness]) -> None:
    selector, near = gathered
    result = measure_hardening(near, selector.scenes(HEAD[1]), selector.softmax[HEAD[1]], HEAD)
    own = float((-near.chosen.log_odds.sigmoid().log()).quantile(0.5))
    assert result.final["KL, the head, c = 1"] == pytest.approx(own, rel=1e-9)
    falling = [value or 0 for value in result.curves["KL, the head"].median]
    assert falling == sorted(falling, reverse=True)
    assert falling[0] > 1 > 0.01 > falling[-1]


def test_factors_start_small_and_end_near_the_nuclear_svm(near: Nearness) -> None:
    result = train_head(near, HEAD, ExperimentSettings(trials=1, lr=0.1, iterations=200, parameterisation="KQ"))
    before = result.curves["correlation, from small random factors"].median[0]
    after = result.final["correlation, from small random factors"]
    assert abs(before or 0) < 0.2
    assert (after or 0) > 0.6


def test_refusals() -> None:
    for says, options in {
        "lacks head 99": {"head": (0, 99), "windows": 1, "length": 8},
        "parameterisation": {"head": (0, 0), "parameterisation": "both"},
        "lr": {"head": (0, 0), "lr": -1.0},
        "Unknown option 'layers'": {"head": "1.3", "layers": [99]},
        "Unknown option 'source'": {"head": "1.3", "source": "weights"},
        "Unknown option 'show'": {"head": "1.3", "show": "selection"},
        "Unknown option 'select'": {"head": "1.3", "select": "top-p:0.5"},
    }.items():
        with pytest.raises(UsageError, match=says):
            converge_head("demo", **options)


def test_a_head_without_a_form_on_inputs_is_trained_on_its_queries_and_keys() -> None:
    report = converge_head(family("llama"), head=(0, 1), text=__file__, windows=2, length=12, iterations=20)
    assert {experiment.settings["posed"] for experiment in report.experiments} == {"on queries and keys"}
    (head,) = report.heads
    cosine = head.measures["selection.projected_svm_cosine"].value
    assert cosine == pytest.approx(report.experiments[0].final["correlation of the head"], abs=1e-8)
    assert head.measures["selection.svm_cosine"].value is None


def test_the_report_carries_the_head_and_both_experiments() -> None:
    report = converge_head("demo", head=HEAD, windows=2, length=16, iterations=50)
    assert report.command == "converge"
    assert [experiment.name for experiment in report.experiments] == ["head 3.2", "head 3.2, hardening"]
    for experiment in report.experiments:
        assert_in_words(experiment)
    assert {experiment.settings["posed"] for experiment in report.experiments} == {"on the module's inputs"}
    (head,) = report.heads
    cosine = head.measures["selection.svm_cosine"]
    assert cosine.value == pytest.approx(report.experiments[0].final["correlation of the head"], abs=1e-8)
    assert cosine.null is not None


def test_a_head_whose_scores_contain_a_position_bias_is_refused_with_this_reason():
    with pytest.raises(UsageError, match="a position bias is added to the scores"):
        attnlens.converge_head(family("t5"), head="encoder.0.1", windows=4, length=16)
