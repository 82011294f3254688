"""Tests the selection.* measures against naive dense computations, planted heads and nulls."""

import math
import re
import statistics
from dataclasses import replace

import cvxpy
import families
import pytest
import torch
from heads import query_key, random
from loaded import loaded

import attnlens
from attnlens.analyzers import registry
from attnlens.analyzers.selection import BIASED, MEASURES, NULL_DRAWS, SPACES, Selector, qualify_name
from attnlens.errors import UsageError
from attnlens.maths.attsvm import head as svm
from attnlens.models import hooks, texts, weights
from attnlens.records import Site
from attnlens.report.pictures.maps import page_rows
from attnlens.report.sections.facts import without_value
from attnlens.report.sections.layers import measure_columns, reading_help
from attnlens.report.shapes import Shapes
from attnlens.runs.progress import Interrupted

few_draws = pytest.mark.usefixtures("_few_draws")
SITE = Site("attention", 0, 0, "encoder")
CAUSAL = torch.ones(7, 7, dtype=torch.bool).tril()
KINDS = ("svm_cosine", "efficiency", "efficiency_q05", "margin", "support")
VALUES = ("efficiency", "svm_cosine", "efficiency_q05")


@pytest.fixture
def _few_draws(monkeypatch):
    """Few draws of the null, which take most of the time, for tests that do not check the null."""
    monkeypatch.setattr("attnlens.analyzers.selection.NULL_DRAWS", {"rotations": 2})


def scene(tokens, queries=None, allowed=None):
    queries = tokens if queries is None else queries
    allowed = torch.ones(len(queries), len(tokens), dtype=torch.bool) if allowed is None else allowed
    return svm.Scene(tokens, queries, svm.count_copies(tokens, allowed).double().log())


def scenes(count, n, d, allowed=None):
    return [scene(random(n, d, seed=number), allowed=allowed) for number in range(count)]


def dense(form):
    return svm.FactoredForm(form, torch.eye(form.shape[1], dtype=torch.float64))


def solved(seen, form, **options):
    """The selections, and the comparison with the SVM or the reason why there is none."""
    chosen = svm.choose(seen, form, svm.Softmax(), **options)
    return chosen, svm.compare_with_svm(seen, form, chosen)


def values_of(near):
    """Efficiency, cosine and the efficiency's 5 % quantile."""
    return [float(near.shares.min()), near.svm_cosine, float(near.shares.quantile(0.05))]


def whole_solution(near, seen, chosen):
    """W_mm between tokens and queries, out of the problem's coordinates."""
    queries = torch.stack([seen[number].queries[position] for number, position, _ in chosen.rows])
    return near.solution.W @ torch.linalg.lstsq(near.posed.problem.queries, queries).solution, queries


def gather(keys, form=None, **options):
    """The answers of a Selector to these one-sequence QueryKeys."""
    options |= {} if form is None else {"form": form}
    selector = Selector(registry.GatheringPlace(SITE, **options))
    for number, one in enumerate(keys):
        selector.update(one, number)
    return selector.solve()


def tokens_key(query, key, **rest):
    return query_key(query[None], key[None], source="tokens", **rest)


def several(count=3, heads=2, kv_heads=2, n=9, **rest):
    draws = [[random(h, n, 5, seed=2 * at + side) for side, h in enumerate((heads, kv_heads))] for at in range(count)]
    return [tokens_key(query, key, **rest) for query, key in draws]


def with_one(x):
    return torch.nn.functional.pad(x, (0, 1), value=1.0)


def affine(inputs, query, key, **rest):
    """Sequences whose queries and keys have these factors on (x, 1), x the inputs, and the form of these factors."""
    keys = [replace(tokens_key(with_one(x) @ query, with_one(x) @ key, **rest), inputs=x[None]) for x in inputs]
    return keys, query_key(query, key)


def bilinear(count=3, heads=2, n=9, d=6, size=4, seed=0, **rest):
    factors = [random(heads, d + 1, size, seed=100 * seed + 90 + side) for side in range(2)]
    return affine([random(n, d, seed=100 * seed + number) for number in range(count)], *factors, **rest)


def test_the_cosine_of_a_head_and_its_svm_is_that_of_their_angle():
    for allowed, posed in ((None, 7), (CAUSAL, 4)):
        seen = scenes(4, 7, 12, allowed=allowed)
        chosen, near = solved(seen, dense(random(12, 12, seed=7)))
        assert len(chosen.sets) == 4 * posed, "every query with a choice is posed"
        assert float(near.shares.min()) < 0.9, "the control: a random head is not its SVM"
        _, itself = solved(seen, dense(whole_solution(near, seen, chosen)[0]))
        assert values_of(itself)[:2] == pytest.approx([1, 1], abs=1e-6)
    seen = scenes(3, 7, 8)
    chosen, near = solved(seen, dense(random(8, 8, seed=5)), most=8)
    W, queries = whole_solution(near, seen, chosen)
    away = random(8, 8, seed=6) @ torch.linalg.pinv(queries) @ queries  # within span(U) ⊗ span(Z); U spans everything
    away = away - (away * W).sum() / W.square().sum() * W
    for angle in (0.3, 1.4):
        form = dense(math.cos(angle) * W / W.norm() + math.sin(angle) * away / away.norm())
        turned = svm.compare_with_svm(seen, form, chosen)
        assert turned.svm_cosine == pytest.approx(math.cos(angle), abs=1e-6)
        assert float(turned.shares.min()) < math.cos(angle) + 1e-6


def test_a_head_is_feasible_whatever_its_scale_and_the_order_of_sequences():
    seen, M = scenes(5, 7, 10), random(10, 10, seed=3)
    chosen, near = solved(seen, dense(M), most=20)
    assert bool((near.margins > 0).all())
    assert len(near.margins) == 20
    assert 0 < values_of(near)[0] < 1
    reverse = solved(seen[::-1], dense(M), most=20)[1]
    for other in (svm.compare_with_svm(seen, dense(1000 * M), chosen), reverse):
        assert values_of(other) == pytest.approx(values_of(near), abs=1e-6)
    sums = [float(each.posed.problem.differences.sum()) for each in (near, reverse)]
    assert sums[0] == pytest.approx(sums[1])
    negated = svm.compare_with_svm(seen, dense(-M), chosen)
    assert float(negated.shares.min()) < 0, "the control: another form does not select the same"


def dense_readings(rows, M):
    """Measures of (tokens, query) rows, every constraint written out, ΠM by pseudo-inverses and W_mm by cvxpy."""
    constraints = []
    for number, (tokens, query) in enumerate(rows):
        best = int((tokens @ M @ query).argmax())
        constraints += [(tokens[best] - other, query, number) for at, other in enumerate(tokens) if at != best]
    u, z, query_of = zip(*constraints, strict=True)
    u, z, query_of = torch.stack(u), torch.stack(z), torch.tensor(query_of)
    W = cvxpy.Variable(M.shape)
    margins = cvxpy.sum(cvxpy.multiply(u.numpy() @ W, z.numpy()), axis=1)
    norm = cvxpy.Problem(cvxpy.Minimize(cvxpy.norm(W, "fro")), [margins >= 1]).solve(solver=cvxpy.CLARABEL)
    projected = torch.linalg.pinv(u) @ u @ M @ torch.linalg.pinv(z) @ z
    own = ((u @ M) * z).sum(-1) / projected.norm()
    least = torch.stack([own[query_of == query].min() for query in range(len(rows))])
    cosine = float((M * torch.tensor(W.value)).sum() / (projected.norm() * norm))
    read = {"margin": least.min(), "efficiency": least.min() * norm, "efficiency_q05": least.quantile(0.05) * norm}
    return {what: float(value) for what, value in read.items()} | {"svm_cosine": cosine}


def test_causal_selections_equal_a_dense_computation_and_early_tokens_are_not_posed():
    seen, M = scenes(3, 5, 6, allowed=CAUSAL[:5, :5]), random(6, 6, seed=2)
    chosen, near = solved(seen, dense(M), most=6)
    rows = [(seen[number].tokens[: at + 1], seen[number].queries[at]) for number, at, _ in chosen.rows]
    read = dense_readings(rows, M)
    assert float(near.margins.min()) == pytest.approx(read["margin"], rel=1e-6)
    assert values_of(near) == pytest.approx([read[name] for name in VALUES], rel=1e-6, abs=1e-6)
    assert float(chosen.log_odds.min().sigmoid()) > 0.5
    # with two keys p_max is at least ½ for lack of choice; the head that decides nothing shows it
    chosen = svm.choose(scenes(8, 7, 10, allowed=CAUSAL), dense(1e-3 * random(10, 10)), svm.Softmax(), most=64)
    assert set(chosen.position.tolist()) == {3, 4, 5, 6}, "a query that sees fewer than half of 7 poses nothing"
    keys, form = bilinear(count=3, heads=1, n=7, allowed=CAUSAL[None, None])
    queries = [gather(keys, which)[0].measures["selection.queries"].value for which in (form, None)]
    assert queries == [3 * 4, 3 * 4]


def test_larger_sets_are_the_fewest_tokens_of_the_share_and_pose_equalities_beside_a_finite_part():
    seen, form = scenes(3, 6, 30), dense(random(30, 30, seed=8) / 100)
    chosen, near = solved(seen, form, most=8, top_p=0.6)
    sizes = [int(members.sum()) for members in chosen.sets]
    assert max(sizes) > 1
    assert int(near.posed.problem.equal.sum()) == sum(size - 1 for size in sizes)
    assert values_of(near)[0] <= 1 + 1e-6
    for number, position, members in chosen.rows:
        p = (seen[number].tokens @ form.left @ seen[number].queries[position]).softmax(-1)
        assert float(p[members].sum()) >= 0.6 - 1e-12
        assert float(p[members].sum() - p[members].min()) < 0.6, "the fewest with that share"
    alone, plain = (solved(scenes(1, 2, 30), dense(500 * form.left), **rest)[1] for rest in ({"top_p": 0.5}, {}))
    assert values_of(alone) == pytest.approx(values_of(plain)), "sets of one token are the argmax"
    seen, form = scenes(2, 5, 24), dense(random(24, 24, seed=9) / 60)
    chosen, near = solved(seen, form, most=5, top_p=0.7)
    problem = near.posed.problem
    assert bool(problem.equal.any())
    sides = problem.differences[problem.equal], problem.paired_queries[problem.equal]
    inside = torch.einsum("ci,cj->cij", *sides).flatten(1)
    finite = (torch.linalg.pinv(inside) @ random(len(inside), seed=1)).reshape(24, -1)
    back = torch.linalg.lstsq(problem.queries, whole_solution(near, seen, chosen)[1]).solution
    again = svm.compare_with_svm(seen, dense((finite + 30 * near.solution.W) @ back), chosen)
    assert values_of(again)[0] == pytest.approx(1, abs=1e-5), "W_fin + R · W_mm"
    assert again.svm_cosine == pytest.approx(1, abs=1e-6), "the generalised cosine"


def test_margins_in_sets_are_those_without_the_finite_part_and_may_be_negative():
    """M scores selected tokens above the others, but M − W_fin need not: margins have no lower limit."""
    seen, form = scenes(2, 6, 16), dense(random(16, 16, seed=3) / 160)
    chosen, near = solved(seen, form, most=4, top_p=0.6)
    M = form.left @ form.right.mT
    posed = [(seen[number].tokens, seen[number].queries[at], members) for number, at, members in chosen.rows]
    rows = [torch.outer(one - x[members][0], z).flatten() for x, z, members in posed for one in x[members][1:]]
    finite = torch.linalg.pinv(torch.stack(rows)) @ torch.stack(rows) @ M.flatten()
    margins, least = (
        [float((x[members] @ form @ z).min() - (x[~members] @ form @ z).max()) for x, z, members in posed]
        for form in (M - finite.reshape(16, 16), M)
    )
    assert min(margins) < 0 < min(least)
    assert (near.margins * near.norm).tolist() == pytest.approx(margins, abs=1e-6)
    named = {info.name.removeprefix("selection."): info for info in MEASURES}
    for name in ("margin", "efficiency", "efficiency_q05", "margins"):
        for info in (named[name], named[f"projected_{name}"]):
            assert info.low is None
            assert name == "efficiency_q05" or "W_fin" in info.formula
    # one dimension for queries and tokens: three tokens can't have two equal scores and one less
    one, tokens = torch.ones(1, 1).double(), torch.tensor([[0.0], [1.0], [1.2]], dtype=torch.float64)
    reason = solved([scene(tokens, one)], dense(one), top_p=0.7)[1]
    assert "no form gives the selected tokens equal scores" in reason


def test_duplicate_tokens_are_one_and_their_weights_add():
    tokens = random(5, 6, seed=1)
    twice = torch.cat([tokens, tokens[2:3], tokens[:1]])
    queries, form = random(4, 6, seed=2), dense(random(6, 6, seed=3))
    single, double = (svm.choose([scene(x, queries)], form, svm.Softmax()) for x in (tokens, twice))
    assert single.position.sort().values.tolist() == double.position.sort().values.tolist() == [0, 1, 2, 3]
    p = (queries @ form.left.mT @ twice.mT).softmax(-1)
    for position, members, odds in zip(double.position.tolist(), double.sets, double.log_odds.sigmoid(), strict=True):
        assert int(members.nonzero()) < 5
        same = (twice == twice[int(members.nonzero())]).all(-1)
        assert float(odds) == pytest.approx(float(p[position][same].sum()))
    assert len(solved([scene(tokens, queries)], form, most=2)[1].posed.problem.margins) == 2 * 4
    copies = torch.cat([random(3, 4), random(3, 4)[:1]])
    counts = svm.count_copies(copies, CAUSAL[:4, :4]).tolist()
    assert counts == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [2, 1, 1, 0]], "hidden copies do not count"
    later = svm.count_copies(copies, torch.tensor([[False, True, True, True]])).tolist()
    assert later == [[0, 1, 1, 1]], "the first that is seen, where the first of all is not"


def test_ties_are_counted_saturated_heads_are_ranked_and_softcap_and_sink_change_the_weight_alone():
    eye = torch.eye(4, dtype=torch.float64)
    queries = torch.tensor([[1.0, 1, 0, 0], [2, 1, 0, 0], [1, 1 + 1e-9, 0, 0]], dtype=torch.float64)
    chosen = svm.choose([scene(eye[:3], queries)], dense(eye), svm.Softmax())
    assert (chosen.position.tolist(), chosen.tied) == ([1], 2)
    reason = solved([scene(eye[:3], queries[:1])], dense(eye))[1]
    assert reason == "the largest scores are tied in all 1 queries that see different tokens"
    saturated = torch.tensor([[500.0], [900.0], [700.0]]).double() * eye[:3]
    chosen = svm.choose([scene(eye, saturated)], dense(eye), svm.Softmax(), most=2)
    assert chosen.log_odds.sigmoid().tolist() == [1, 1]
    assert (chosen.position.tolist(), chosen.decided) == ([1, 2], 1), "ranked beyond a weight of 1"
    seen, form = scenes(2, 6, 8), dense(random(8, 8, seed=1))
    plain = svm.choose(seen, form, svm.Softmax(), most=64)
    order = {(number, position): members.tolist() for number, position, members in plain.rows}
    for softmax in (svm.Softmax(softcap=2.0), svm.Softmax(sink=20.0)):
        other = svm.choose(seen, form, softmax, most=64)
        assert float(other.log_odds.max()) < float(plain.log_odds.max())
        assert other.decided < plain.decided
        assert all(order[number, position] == members.tolist() for number, position, members in other.rows)


@few_draws
def test_heads_with_little_to_choose_have_the_reason():
    one, two = (gather(several(n=n))[0] for n in (1, 2))
    for answer in (one, two):
        assert set(answer.windows["selection.decided"].values()) == {1}, "p_max of two tokens is at least ½"
    assert one.measures["selection.queries"].value == 0
    equal = gather([tokens_key(random(1, 1, 5).expand(1, 6, 5), random(1, 6, 5, seed=1))])[0]
    for answer in (two, equal):
        assert answer.measures["selection.queries"].value == 6
        assert 0 < answer.measures["selection.projected_efficiency"].value <= 1 + 1e-6
    same = gather([tokens_key(random(1, 6, 5), random(1, 1, 5).expand(1, 6, 5))])[0]
    zeros = gather([tokens_key(torch.zeros(1, 6, 5), random(1, 6, 5))])[0]
    for answer, name, reason in (
        (one, "least_decided", "no query sees two different tokens"),
        (one, "projected_efficiency", "no query sees two different tokens"),
        (same, "projected_svm_cosine", "no query sees two different tokens"),
        (zeros, "projected_efficiency", "the largest scores are tied in all 6 queries that see different tokens"),
    ):
        measure = answer.measures[f"selection.{name}"]
        assert (measure.value, measure.reason) == (None, reason)
    for answer in gather(keys := several(n=6, bias=random(1, 2, 6, 6))).values():
        assert len(answer.windows["selection.decided"]) == len(keys)
        scalars = {info.name for info in MEASURES if not info.curve} - {"selection.decided"}
        assert {answer.measures[name].reason for name in scalars} == {BIASED}


@few_draws
def test_heads_of_a_group_share_a_key_head_and_answer_as_alone_with_any_workers(monkeypatch):
    keys = several(count=2, heads=4, kv_heads=2, n=6)
    right, repeated, wrong = (
        gather([tokens_key(key.query[0], key.key[0, heads]) for key in keys])
        for heads in ([0, 1], [0, 0, 1, 1], [0, 1, 0, 1])
    )
    for head in range(4):
        assert right[head].windows == repeated[head].windows
        for name, measure in right[head].measures.items():
            assert measure.value == pytest.approx(repeated[head].measures[name].value), name
    margins = [answers[1].measures["selection.projected_margin"].value for answers in (right, wrong)]
    assert margins[0] != pytest.approx(margins[1]), "the control: groups by remainder"
    keys = several(count=2, heads=3, kv_heads=3, n=6)
    every, alone = gather(keys), gather([key.select([2]) for key in keys])
    assert list(alone) == [2]
    assert every[2] == alone[2]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert gather(keys) == every
    finally:
        torch.set_num_threads(threads)
    first = every[2].measures["selection.projected_svm_cosine"]
    second = gather(keys, seed=1)[2].measures["selection.projected_svm_cosine"]
    assert first.value == second.value
    assert first.null != second.null, "other seeds draw other nulls"
    monkeypatch.setattr("attnlens.analyzers.selection.MOST_TOKENS", 12)
    assert gather(keys)[2].measures == every[2].measures, "two sequences of 6 tokens are stored, and a third is not"
    assert gather([*keys, *keys])[2].measures["selection.queries"] == every[2].measures["selection.queries"]


@pytest.mark.parametrize("heads", [8, pytest.param(16, marks=pytest.mark.full)])
def test_random_heads_are_draws_of_their_null_in_both_spaces(heads):
    """Above the null's mean about as often as below."""
    answers = gather(*bilinear(count=3, heads=heads, n=9, d=12, size=8, seed=5), seed=1)
    assert len(answers) == heads
    for name in (qualify_name(what, space) for what in KINDS[:4] for space in SPACES):
        scores = [answer.measures[name].z for answer in answers.values()]
        share, least = statistics.mean(score > 0 for score in scores), 0.12 if heads == 8 else 0.15
        assert least <= share <= 1 - least, name
        assert abs(statistics.median(scores)) < 1, name


def test_forms_are_those_of_the_weights_and_random_rotations_keep_their_singular_values(demo):
    form = svm.FactoredForm(random(9, 3), random(7, 3, seed=1))
    turned = form.rotate_randomly(0)
    matrices = [one.left @ one.right.mT for one in (form, turned)]
    assert torch.allclose(*(torch.linalg.svdvals(matrix)[:3] for matrix in matrices))
    assert not torch.allclose(*matrices), "other directions"
    unit = svm.FactoredForm(torch.eye(6).double(), 0.5 * torch.eye(6).double()).rotate_randomly(3)
    product = unit.left @ unit.right.mT
    assert torch.allclose(product @ product.mT, 0.25 * torch.eye(6).double())
    first = hooks.survey(demo.model, texts.placeholder(demo, 1, 0).batches[0].inputs)[0]
    (factors,) = weights.factors(demo.model, [first], [first])
    assert torch.equal(factors.on_inputs.query[:, :-1], factors.query_key.query)
    assert torch.equal(factors.on_inputs.key[:, -1], factors.maps.key_bias[:, 0])
    problem, M = solved(scenes(8, 12, 6), dense(random(6, 6)), most=64)[1].posed.problem, random(6, 6)
    assert svm.projected_norm(problem, dense(M)) == pytest.approx(float(M.norm())), "the problem spans everything"


def test_shown_picks_are_the_posed_queries():
    keys = several(count=2)
    answer, on_inputs = gather(keys, shown=True)[1], gather(*bilinear(count=2), shown=True)[1]
    shown = answer.shown
    assert (shown.space, on_inputs.shown.space) == ("projected", "input")
    assert len(shown.picks) == answer.measures["selection.queries"].value
    assert len(shown.null_margins) == NULL_DRAWS["rotations"]
    assert sorted(pick.margin for pick in shown.picks) == pytest.approx(answer.curves["selection.projected_margins"])
    assert [pick.weight for pick in shown.picks] == sorted((pick.weight for pick in shown.picks), reverse=True)
    for pick in shown.picks:
        scores = keys[pick.sequence].attention[0, 1, pick.query]
        assert (pick.selected, pick.weight) == ([int(scores.argmax())], pytest.approx(float(scores.max())))
        assert not set(pick.support) & set(pick.selected)
    total = sum(len(pick.support) for pick in shown.picks)
    assert answer.measures["selection.projected_support"].value == pytest.approx(total / (8 * len(shown.picks)))
    of_sets = gather([tokens_key(random(1, 6, 30) / 10, random(1, 6, 30, seed=1))], shown=True, top_p=0.6)[0].shown
    assert max(len(pick.selected) for pick in of_sets.picks) > 1
    assert not any(set(pick.support) & set(pick.selected) for pick in of_sets.picks), "equalities carry no margin"
    margins, projected = (on_inputs.curves[f"selection.{name}"] for name in ("margins", "projected_margins"))
    assert sorted(pick.margin for pick in on_inputs.shown.picks) == pytest.approx(margins)
    assert margins != pytest.approx(projected)


@few_draws
def test_each_space_equals_its_dense_computation_and_they_disagree():
    keys, form = bilinear(n=6)
    for head, answer in gather(keys, form).items():
        key, query = form.key[head], form.query[head]
        inputs = [with_one(one.inputs[0]) for one in keys]
        on_inputs = dense_readings([(x, z) for x in inputs for z in x], form.scale * key @ query.mT)
        rows = [(x @ key, z) for x in inputs for z in x @ query]
        projected = dense_readings(rows, form.scale * torch.eye(4).double())
        assert answer.measures["selection.queries"].value == 18, "every query is posed"
        for space, readings in (("input", on_inputs), ("projected", projected)):
            for name, value in ((qualify_name(what, space), value) for what, value in readings.items()):
                assert answer.measures[name].value == pytest.approx(value, rel=1e-5), name
        apart = abs(on_inputs["svm_cosine"] - projected["svm_cosine"])
        assert apart > 0.05, "the control: one space does not stand for the other"
    inputs = [random(7, 8, seed=number) for number in range(4)]
    seen = [scene(with_one(x)) for x in inputs]
    chosen, near = solved(seen, dense(random(9, 9, seed=7)))
    left, values, right = torch.linalg.svd(whole_solution(near, seen, chosen)[0])
    keys, form = affine(inputs, (right.mT * values.sqrt())[None] / 0.3, (left * values.sqrt())[None])
    read = {name.removeprefix("selection."): one.value for name, one in gather(keys, form)[0].measures.items()}
    assert [read["efficiency"], read["svm_cosine"]] == pytest.approx([1, 1], abs=1e-6), "its SVM on inputs"
    assert read["projected_efficiency"] < 0.9, "and not on queries and keys"
    assert read["projected_svm_cosine"] < 0.95


@few_draws
def test_the_projected_space_of_a_bilinear_head_is_that_of_its_queries_and_keys_alone():
    """A head with a form on inputs has the projected measures, and their null, of a head without one."""
    keys, form = bilinear(count=3, heads=2, n=8, seed=2, allowed=torch.ones(1, 1, 8, 8).bool().tril())
    both, alone = gather(keys, form), gather(keys, "it turns with its position")
    for head in range(2):
        one, other = both[head].measures, alone[head].measures
        for what in KINDS:
            name, of_inputs = qualify_name(what, "projected"), qualify_name(what, "input")
            first, second = one[name], other[name]
            assert (first.value, first.null.mean) == pytest.approx((second.value, second.null.mean), rel=1e-6)
            assert first.null.sd == pytest.approx(second.null.sd, rel=1e-5)
            assert one[of_inputs].null.mean != pytest.approx(first.null.mean, rel=1e-2), "each has its own null"
            assert (other[of_inputs].value, other[of_inputs].reason) == (None, "it turns with its position")
        for name in ("selection.queries", "selection.least_decided"):
            assert one[name].value == pytest.approx(other[name].value, rel=1e-9)
        assert both[head].windows == alone[head].windows


@few_draws
def test_input_space_is_a_naive_dense_computation(demo):
    """M is formed with its biases, and all scores of a layer are recomputed from the inputs."""
    inputs = texts.batches(demo, texts.sample("demo"), texts.Cut(tokens=24, sequences=3)).batches[0].inputs
    reached = hooks.survey(demo.model, inputs)[1]
    read = attnlens.inspect(demo, analyzers="selection", length=24, windows=3, layers=[1], heads=[2]).heads[0].measures
    c_attn = demo.model.transformer.h[1].attn.c_attn
    whole = torch.cat([c_attn.weight, c_attn.bias[None]]).double().detach()
    query, key = (whole[:, start + 32 : start + 48] for start in (0, c_attn.weight.shape[0]))
    M, x = 16**-0.5 * key @ query.mT, with_one(reached.arguments[reached.input_name].double())
    mask = torch.ones(24, 24).bool().tril()
    logits = reached.call.query_key(reached.site).logits[:, 2]
    assert torch.allclose(x @ M.mT @ x.mT, logits, atol=1e-4)
    chosen, near = solved([scene(one, allowed=mask) for one in x], dense(M))
    assert read["selection.queries"].value == len(chosen.sets)
    assert values_of(near) == pytest.approx([read[f"selection.{name}"].value for name in VALUES], rel=1e-4)
    shares = (logits.masked_fill(~mask, -torch.inf).softmax(-1).amax(-1) >= 0.5).double().mean(-1)
    decided = read["selection.decided"]
    assert decided.n == 3
    assert (decided.value, decided.se) == pytest.approx((float(shares.mean()), float(shares.std() / 3**0.5)))


FAMILIES = {"bert": None, "gpt2": None, "llama": "RoPE", "qwen3": "QK-norm", "bart": None}


@few_draws
@pytest.mark.parametrize(("name", "why"), FAMILIES.items(), ids=FAMILIES)
def test_both_spaces_are_measured_where_logits_are_bilinear_in_inputs_and_reported_apart(name, why):
    model = loaded(families.build(name))
    report = attnlens.inspect(model, analyzers="selection", text=__file__, windows=2, length=12, heads=[0])
    for head in report.heads:
        reason = "cross-attention" if head.part == "cross" else why
        assert 0 < head.measures["selection.projected_efficiency"].value <= 1 + 1e-6
        assert "selection.projected_margins" in head.curves
        assert ("selection.margins" in head.curves) == (reason is None)
        for what in KINDS:
            on_inputs, projected = (head.measures[qualify_name(what, space)] for space in SPACES)
            assert projected.null is not None
            assert (on_inputs.value is None) == (on_inputs.null is None) == (reason is not None)
            assert reason is None or reason in on_inputs.reason
        assert head.measures["selection.decided"].null is None
    assert report.coverage.complete
    assert name != "bart" or {head.part for head in report.heads} == {"encoder", "decoder", "cross"}
    if name in ("gpt2", "llama"):
        shapes, both = Shapes(report), name == "gpt2"
        columns = measure_columns(shapes)
        groups = ["selection, input"] * both + ["selection, projected"]
        assert [group for group in dict.fromkeys(column.group for column in columns) if "," in group] == groups
        for column in columns:
            assert column.title.startswith("projected ") == (column.group == "selection, projected")
        for row in page_rows(shapes)[: len(groups)]:
            assert len({shapes.info(panel.stem).space for panel in row} - {""}) == 1
        assert ("two different problems; compare values only within one" in reading_help(shapes)) == both
        missing = " ".join(without_value(shapes))
        assert ("selection.svm_cosine" in missing and "RoPE" in missing) == (not both)


def test_the_demo_differs_from_its_null_and_a_head_of_nan_or_an_interruption_spoils_no_other_head(monkeypatch):
    demo = attnlens.load("demo")
    report = attnlens.inspect(demo, analyzers="selection", layers=[2], heads=[0, 1], length=40, windows=6)
    assert report.settings.select == "argmax"
    for head in report.heads:
        assert head.measures["selection.svm_cosine"].z > 2
        assert head.measures["selection.efficiency"].value > head.measures["selection.efficiency"].null.mean
    monkeypatch.setattr("attnlens.analyzers.selection.NULL_DRAWS", {"rotations": 2})
    with torch.no_grad():
        demo.model.transformer.h[3].attn.c_attn.weight[:, 16:32] = math.nan
    report = attnlens.inspect(demo, analyzers="selection", length=16, windows=2, layers=[3], heads=[0, 1])
    fine, broken = (head.measures["selection.efficiency"] for head in report.heads)
    assert fine.value is not None
    assert broken.value is None
    assert "NaN" in broken.reason
    assert not report.coverage.complete

    def stop(stage, done, _total):
        if stage == "selection" and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        attnlens.inspect("demo", analyzers="selection", length=16, windows=2, heads=[0], progress=stop)
    assert [head.layer for head in caught.value.report.heads if head.measures] == [0, 1]


def test_the_analyzer_runs_only_by_name_its_source_is_tokens_and_senseless_options_are_refused():
    assert "selection" not in {entry.name for entry in registry.select_analyzers()}
    assert [entry.name for entry in registry.select_analyzers(["selection"])] == ["selection"]
    assert registry.select_analyzers(["selection"], "weights") == []
    assert registry.measure_sources()["selection.margin"] == "tokens"
    gatherings = [isinstance(entry, registry.Gathering) for entry in registry.list_analyzers()]
    assert gatherings == sorted(gatherings), "gatherings come last"
    assert any(gatherings)
    rules = ("top-p", "top-p:", "top-p:1", "top-p:0", "top-p:nan", "max", 3)
    for options, problem in (
        *(({"analyzers": "selection", "select": rule}, f"select: cannot parse {rule!r}.") for rule in rules),
        ({"analyzers": "selection", "source": "weights"}, "selection cannot be computed from source=weights"),
        ({"select": "top-p:0.5"}, "requires the analyzer `selection`"),
        ({"show": "everything"}, "Unknown show"),
    ):
        with pytest.raises(UsageError, match=re.escape(problem)):
            attnlens.inspect("demo", **options)
