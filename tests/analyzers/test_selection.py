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

import attnlens
from attnlens.analyzers import registry
from attnlens.analyzers.registry import GatheringPlace, measure_sources
from attnlens.analyzers.selection import BIASED, MEASURES, NULL_DRAWS, SPACES, Selector, qualify_name
from attnlens.errors import UsageError
from attnlens.maths.attsvm.head import (
    FactoredForm,
    Scene,
    Softmax,
    choose,
    compare_with_svm,
    count_copies,
    projected_norm,
)
from attnlens.models import hooks, texts, weights
from attnlens.records import Site
from attnlens.report.pictures.maps import page_rows
from attnlens.report.sections.facts import without_value
from attnlens.report.sections.layers import measure_columns, reading_help
from attnlens.report.shapes import Shapes

SITE = Site("attention", 0, 0, "encoder")
SCALARS = [info.name for info in MEASURES if not info.curve]
CAUSAL = torch.ones(7, 7, dtype=torch.bool).tril()


def scene(tokens, queries=None, allowed=None):
    queries = tokens if queries is None else queries
    allowed = torch.ones(len(queries), len(tokens), dtype=torch.bool) if allowed is None else allowed
    return Scene(tokens, queries, count_copies(tokens, allowed).double().log())


def scenes(count, n, d, *, seed=0, allowed=None):
    return [scene(random(n, d, seed=1000 * seed + number), allowed=allowed) for number in range(count)]


def dense(form):
    return FactoredForm(form, torch.eye(form.shape[1], dtype=torch.float64))


def nearness(found, form, softmax, **rest):
    chosen = choose(found, form, softmax, **rest)
    return chosen, compare_with_svm(found, form, chosen)


def judged(found, form, **rest):
    chosen, near = nearness(found, form, Softmax(), **rest)
    assert not isinstance(near, str), near
    return chosen, near


def values_of(near):
    return [float(near.shares.min()), near.svm_cosine, float(near.shares.quantile(0.05))]


def gather(keys, *, place=None, heads=None):
    """What a Selector says of these one-sequence QueryKeys."""
    selector = Selector(place or GatheringPlace(SITE))
    for number, one in enumerate(keys):
        selector.update(one if heads is None else one.select(heads), number)
    return selector.solve()


def tokens_key(query, key, **rest):
    return query_key(query[None], key[None], source="tokens", **rest)


def several(count=3, heads=2, kv_heads=2, n=9, size=5, seed=0, **rest):
    return [
        tokens_key(
            random(heads, n, size, seed=100 * seed + 2 * number),
            random(kv_heads, n, size, seed=100 * seed + 2 * number + 1),
            **rest,
        )
        for number in range(count)
    ]


def bilinear(count=3, heads=2, n=9, d=6, size=4, seed=0, **rest):
    """Sequences whose queries and keys are affine in their inputs x, and the form on (x, 1) that says how."""
    factors = [random(heads, d + 1, size, seed=100 * seed + 90 + side) for side in range(2)]
    return fed([random(n, d, seed=100 * seed + number) for number in range(count)], *factors, **rest)


def fed(inputs, query, key, **rest):
    """What heads with these factors on (x, 1) make of the inputs, and their form."""
    padded = [torch.nn.functional.pad(x, (0, 1), value=1.0) for x in inputs]
    pairs = zip(padded, inputs, strict=True)
    keys = [replace(tokens_key(with_1 @ query, with_1 @ key, **rest), inputs=x[None]) for with_1, x in pairs]
    return keys, query_key(query, key)


def numbers(answer):
    found = {name: answer.measures[name].value for name in SCALARS if name in answer.measures}
    return found | {f"{name} {place}": value for name, each in answer.windows.items() for place, value in each.items()}


# the planted head


@pytest.mark.parametrize("allowed", [None, CAUSAL], ids=["encoder", "causal"])
def test_a_head_that_is_its_svm_reads_efficiency_and_cosine_1(allowed):
    found = scenes(4, 7, 12, allowed=allowed)
    chosen, near = judged(found, dense(random(12, 12, seed=7)))
    assert len(chosen.sets) == 4 * (7 if allowed is None else 4), "every query that may choose is posed"
    assert float(near.shares.min()) < 0.9, "control: a random head is not its SVM"
    _, planted = judged(found, dense(_whole(near, found, chosen)))
    assert float(planted.shares.min()) == pytest.approx(1, abs=1e-6)
    assert planted.svm_cosine == pytest.approx(1, abs=1e-6)


def _whole(near, found, chosen):
    """W_mm between tokens and queries, out of the problem's coordinates."""
    queries = torch.stack([found[number].queries[position] for number, position, _ in chosen.rows])
    return near.solution.W @ torch.linalg.lstsq(near.posed.problem.queries, queries).solution


@pytest.mark.parametrize("angle", [0.3, 1.0, 1.4])
def test_turned_away_from_its_svm_the_cosine_falls_by_the_cosine_of_the_angle(angle):
    found = scenes(3, 7, 8)
    chosen, near = judged(found, dense(random(8, 8, seed=5)), most=8)
    W = _whole(near, found, chosen)
    queries = torch.stack([found[number].queries[position] for number, position, _ in chosen.rows])
    away = random(8, 8, seed=6)
    away = away @ torch.linalg.pinv(queries) @ queries  # within span(U) ⊗ span(Z); U spans everything here
    away = away - (away * W).sum() / W.square().sum() * W
    turned = math.cos(angle) * W / W.norm() + math.sin(angle) * away / away.norm()
    again = compare_with_svm(found, dense(turned), chosen)
    assert again.svm_cosine == pytest.approx(math.cos(angle), abs=1e-6)
    assert float(again.shares.min()) < math.cos(angle) + 1e-6


def test_the_head_itself_is_feasible_and_its_scale_does_not_matter():
    found, M = scenes(5, 7, 10), random(10, 10, seed=3)
    chosen, near = judged(found, dense(M), most=20)
    assert bool((near.margins > 0).all())
    assert len(near.margins) == 20
    assert 0 < values_of(near)[0] < 1
    louder = compare_with_svm(found, dense(1000 * M), chosen)
    assert values_of(louder) == pytest.approx(values_of(near), abs=1e-6)
    other = compare_with_svm(found, dense(-M), chosen)
    assert float(other.shares.min()) < 0, "control: another form does not select the same"


def test_the_order_of_the_sequences_does_not_matter():
    found, form = scenes(6, 7, 10), dense(random(10, 10, seed=4))
    _, near = judged(found, form, most=12)
    _, again = judged(found[::-1], form, most=12)
    assert values_of(again) == pytest.approx(values_of(near), abs=1e-6)
    assert float(again.posed.problem.differences.sum()) == pytest.approx(float(near.posed.problem.differences.sum()))


def test_everything_equals_a_dense_computation_by_a_convex_solver():
    """M formed, all constraints written out, the projection by pseudo-inverses, W by cvxpy."""
    found, M = scenes(3, 5, 6, allowed=torch.ones(5, 5).bool().tril()), random(6, 6, seed=2)
    chosen, near = judged(found, dense(M), most=6)
    rows, z = [], []
    for number, position, _ in chosen.rows:
        x, query = found[number].tokens[: position + 1], found[number].queries[position]
        best = int((x @ M @ query).argmax())
        for other in range(position + 1):
            if other != best:
                rows.append(x[best] - x[other])
                z.append(query)
    u, z = torch.stack(rows), torch.stack(z)
    W = cvxpy.Variable((6, 6))
    margins = cvxpy.sum(cvxpy.multiply(u.numpy() @ W, z.numpy()), axis=1)
    norm = cvxpy.Problem(cvxpy.Minimize(cvxpy.norm(W, "fro")), [margins >= 1]).solve(solver=cvxpy.CLARABEL)
    projected = torch.linalg.pinv(u) @ u @ M @ torch.linalg.pinv(z) @ z
    own = ((u @ M) * z).sum(-1)
    assert near.norm == pytest.approx(float(projected.norm()), rel=1e-9)
    assert float(near.shares.min()) == pytest.approx(float(own.min()) * norm / float(projected.norm()), rel=1e-6)
    best = torch.tensor(W.value)
    cosine = float((M * best).sum() / (projected.norm() * best.norm()))
    assert near.svm_cosine == pytest.approx(cosine, abs=1e-6)
    assert float(chosen.log_odds.min().sigmoid()) > 0.5


def test_early_tokens_of_a_causal_sequence_are_not_posed():
    """With two keys p_max is ½ for want of choice; the head that decides nothing shows it."""
    found = scenes(8, 7, 10, allowed=CAUSAL)
    chosen = choose(found, dense(1e-3 * random(10, 10)), Softmax(), most=64)
    assert set(chosen.position.tolist()) == {3, 4, 5, 6}, "a query that sees fewer than half of 7 poses nothing"
    keys, form = bilinear(count=8, n=7, allowed=CAUSAL[None, None])
    for place in (GatheringPlace(SITE, form), GatheringPlace(SITE)):
        assert gather(keys, place=place)[0].measures["selection.queries"].value == 8 * 4


# sets of several tokens


def test_sets_of_one_token_are_the_argmax_and_larger_ones_pose_equalities():
    found, form = scenes(3, 6, 30), dense(random(30, 30, seed=8) / 100)
    chosen, near = judged(found, form, most=8, top_p=0.6)
    sizes = [int(kept.sum()) for kept in chosen.sets]
    assert max(sizes) > 1
    problem = near.posed.problem
    assert int(problem.equal.sum()) == sum(size - 1 for size in sizes)
    assert values_of(near)[0] <= 1 + 1e-6
    for number, position, kept in chosen.rows:
        x, z = found[number].tokens, found[number].queries[position]
        p = (x @ form.left @ z).softmax(-1)
        assert float(p[kept].sum()) >= 0.6 - 1e-12
        assert float(p[kept].sum() - p[kept].min()) < 0.6, "the fewest that hold the share"
    few = scenes(1, 2, 30)
    alone, plain = (judged(few, dense(500 * form.left), most=8, **rest)[1] for rest in ({"top_p": 0.5}, {}))
    assert values_of(alone) == pytest.approx(values_of(plain))


def test_a_form_that_is_w_fin_and_r_w_mm_reads_1_in_the_generalised_sense():
    found, form = scenes(2, 5, 24), dense(random(24, 24, seed=9) / 60)
    chosen, near = judged(found, form, most=5, top_p=0.7)
    assert bool(near.posed.problem.equal.any())
    queries = torch.stack([found[number].queries[position] for number, position, _ in chosen.rows])
    back = torch.linalg.lstsq(near.posed.problem.queries, queries).solution
    problem = near.posed.problem
    inside = (problem.differences[problem.equal][:, :, None] * problem.paired_queries[problem.equal][:, None]).flatten(
        1
    )
    finite = (torch.linalg.pinv(inside) @ random(len(inside), seed=1)).reshape(24, -1)
    planted = dense((finite + 30 * near.solution.W) @ back)
    again = compare_with_svm(found, planted, chosen)
    assert again.svm_cosine == pytest.approx(1, abs=1e-6)
    assert float(again.shares.min()) == pytest.approx(1, abs=1e-5)


def test_margins_in_sets_are_those_without_the_finite_part_and_may_be_negative():
    """M scores what it selects above the rest; M − W_fin need not, which is why the margin has no least value."""
    found, form = scenes(2, 6, 16), dense(random(16, 16, seed=3) / 160)
    chosen, near = judged(found, form, most=4, top_p=0.6)
    M, least, rows, gaps = form.left @ form.right.mT, [], [], []
    for number, position, kept in chosen.rows:
        x, z = found[number].tokens, found[number].queries[position]
        inside, outside = x[kept], x[~kept]
        least.append(float((inside @ M @ z).min() - (outside @ M @ z).max()))
        rows += [torch.outer(one - inside[0], z).flatten() for one in inside[1:]]
        gaps += [float((one - inside[0]) @ M @ z) for one in inside[1:]]
    finite = torch.linalg.pinv(torch.stack(rows)) @ torch.tensor(gaps, dtype=torch.float64)
    left = M - finite.reshape(16, 16)
    assert min(least) > 0
    margins = []
    for number, position, kept in chosen.rows:
        x, z = found[number].tokens, found[number].queries[position]
        margins.append(float((x[kept] @ left @ z).min() - (x[~kept] @ left @ z).max()))
    assert min(margins) < 0
    reached = near.margins * near.norm
    assert reached.tolist() == pytest.approx(margins, abs=1e-6)
    by_name = {info.name: info for info in MEASURES}
    for name in ("margin", "efficiency", "efficiency_q05", "margins"):
        for info in (by_name[qualify_name(name, space)] for space in SPACES):
            assert info.low is None
            assert name == "efficiency_q05" or "W_fin" in info.formula


def test_sets_that_no_form_can_keep_have_the_reason():
    """One dimension for queries and tokens: three tokens can't have two equal scores and one less."""
    tokens = torch.tensor([[0.0], [1.0], [1.2]], dtype=torch.float64)
    _, found = nearness(
        [scene(tokens, torch.ones(1, 1).double())], dense(torch.ones(1, 1).double()), Softmax(), top_p=0.7
    )
    assert isinstance(found, str)
    assert "no form gives the selected tokens equal scores" in found


# awkward heads


def test_duplicate_tokens_are_one_and_their_weights_add():
    tokens = random(5, 6, seed=1)
    twice = torch.cat([tokens, tokens[2:3], tokens[:1]])
    queries, form = random(4, 6, seed=2), dense(random(6, 6, seed=3))
    single, double = (choose([scene(x, queries)], form, Softmax()) for x in (tokens, twice))
    assert single.position.sort().values.tolist() == double.position.sort().values.tolist() == [0, 1, 2, 3]
    assert {int(kept.nonzero()) for kept in double.sets} <= {0, 1, 2, 3, 4}
    p = (queries @ form.left.mT @ twice.mT).softmax(-1)
    for position, kept, odds in zip(double.position.tolist(), double.sets, double.log_odds.sigmoid(), strict=True):
        same = (twice == twice[int(kept.nonzero())]).all(-1)
        assert float(odds) == pytest.approx(float(p[position][same].sum()))
    _, one = judged([scene(tokens, queries)], form, most=2)
    assert len(one.posed.problem.margins) == 2 * 4


def test_a_copy_that_a_query_may_not_see_does_not_count():
    tokens = torch.cat([random(3, 4), random(3, 4)[:1]])
    counts = count_copies(tokens, torch.ones(4, 4).bool().tril())
    assert counts.tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [2, 1, 1, 0]]
    later = count_copies(tokens, torch.tensor([[False, True, True, True]]))
    assert later.tolist() == [[0, 1, 1, 1]], "the first that is seen, where the first of all is not"


def test_ties_are_counted_and_not_posed():
    tokens = torch.eye(3, 4, dtype=torch.float64)
    queries = torch.tensor([[1.0, 1, 0, 0], [2, 1, 0, 0], [1, 1 + 1e-9, 0, 0]], dtype=torch.float64)
    chosen = choose([scene(tokens, queries)], dense(torch.eye(4, dtype=torch.float64)), Softmax())
    assert chosen.position.tolist() == [1]
    assert chosen.tied == 2
    chosen, found = nearness([scene(tokens, queries[:1])], dense(torch.eye(4, dtype=torch.float64)), Softmax())
    assert found == "the largest scores are tied in all 1 queries that see different tokens"


def test_a_saturated_head_is_ranked_beyond_a_weight_of_1():
    tokens = torch.eye(4, dtype=torch.float64)
    queries = torch.stack([500 * tokens[0], 900 * tokens[1], 700 * tokens[2]])
    chosen = choose([scene(tokens, queries)], dense(torch.eye(4, dtype=torch.float64)), Softmax(), most=2)
    assert chosen.log_odds.sigmoid().tolist() == [1, 1]
    assert chosen.position.tolist() == [1, 2]
    assert chosen.decided == 1


def test_softcap_and_sink_change_the_weight_and_not_the_choice():
    found, form = scenes(2, 6, 8), dense(random(8, 8, seed=1))
    plain = choose(found, form, Softmax(), most=64)
    capped, sunk = (choose(found, form, how, most=64) for how in (Softmax(softcap=2.0), Softmax(sink=20.0)))
    for other in (capped, sunk):
        assert float(other.log_odds.max()) < float(plain.log_odds.max())
        assert other.decided < plain.decided
        order = {(number, position): kept.tolist() for number, position, kept in plain.rows}
        assert all(order[number, position] == kept.tolist() for number, position, kept in other.rows)


@pytest.mark.parametrize("length", [1, 2])
def test_sequences_of_one_and_two_tokens(length):
    answer = gather(several(n=length))[0]
    assert set(answer.windows["selection.decided"].values()) == {1}, "p_max of two tokens is at least ½"
    if length == 1:
        assert answer.measures["selection.queries"].value == 0
        for name in ("selection.least_decided", "selection.projected_efficiency"):
            assert answer.measures[name].reason == "no query sees two different tokens"
    else:
        assert answer.measures["selection.queries"].value == 6
        assert 0 < answer.measures["selection.projected_efficiency"].value <= 1 + 1e-6


def test_equal_queries_and_equal_tokens():
    equal = [tokens_key(random(1, 1, 5).expand(1, 6, 5), random(1, 6, 5, seed=1))]
    found = gather(equal)[0].measures
    assert found["selection.queries"].value == 6
    assert 0 < found["selection.projected_efficiency"].value <= 1 + 1e-6
    nothing = gather([tokens_key(random(1, 6, 5), random(1, 1, 5).expand(1, 6, 5))])[0].measures
    assert nothing["selection.projected_svm_cosine"].reason == "no query sees two different tokens"


def test_a_head_of_zeros_has_ties_alone():
    found = gather([tokens_key(torch.zeros(1, 6, 5), random(1, 6, 5))])[0].measures
    assert "scores are tied in all 6" in found["selection.projected_efficiency"].reason
    assert found["selection.projected_efficiency"].value is None


# the gatherer


def test_a_position_bias_leaves_decided_alone():
    keys = several(n=6, bias=random(1, 2, 6, 6))
    for answer in gather(keys).values():
        assert len(answer.windows["selection.decided"]) == len(keys)
        reasons = {answer.measures[name].reason for name in SCALARS if name != "selection.decided"}
        assert reasons == {BIASED}


def test_key_heads_are_shared_by_groups_and_not_by_remainder():
    keys = several(heads=4, kv_heads=2, n=8)
    right = gather(keys)
    repeated = gather([tokens_key(key.query[0], key.paired_key[0]) for key in keys])
    wrong = gather([tokens_key(key.query[0], key.key[0], key_of=(0, 1, 0, 1)) for key in keys])
    for head in range(4):
        assert numbers(right[head]) == pytest.approx(numbers(repeated[head]))
    assert numbers(right[1]) != pytest.approx(numbers(wrong[1]))


def test_heads_are_the_same_alone_and_among_others_and_with_any_workers():
    keys = several(heads=3, kv_heads=3)
    every, alone = gather(keys), gather(keys, heads=[2])
    assert list(alone) == [2]
    assert every[2] == alone[2]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert gather(keys) == every
    finally:
        torch.set_num_threads(threads)


def test_other_seeds_draw_other_nulls_of_the_same_head():
    first, second = (gather(several(), place=GatheringPlace(SITE, seed=seed))[0].measures for seed in (0, 1))
    cosine = "selection.projected_svm_cosine"
    assert first[cosine].value == second[cosine].value
    assert first[cosine].null != second[cosine].null


def test_null_heads_read_the_null():
    """Random factors are one more draw of their own null in both spaces: above its mean about as often as below."""
    keys, form = bilinear(count=3, heads=16, n=9, d=12, size=8, seed=5)
    answers = gather(keys, place=GatheringPlace(SITE, form, seed=1))
    kinds = ("svm_cosine", "efficiency_q05", "efficiency", "margin")
    for name in (qualify_name(what, space) for what in kinds for space in SPACES):
        scores = [answer.measures[name].z for answer in answers.values()]
        assert len(scores) == 16
        assert 0.15 <= statistics.mean(score > 0 for score in scores) <= 0.85, name
        assert abs(statistics.median(scores)) < 1, name


def test_the_turned_form_has_the_same_singular_values_and_other_directions():
    form = FactoredForm(random(9, 3), random(7, 3, seed=1))
    turned = form.rotate_randomly(0)
    values = [torch.linalg.svdvals(one.left @ one.right.mT)[:3] for one in (form, turned)]
    assert torch.allclose(*values)
    assert not torch.allclose(form.left @ form.right.mT, turned.left @ turned.right.mT)
    unit = FactoredForm(torch.eye(6).double(), 0.5 * torch.eye(6).double()).rotate_randomly(3)
    product = unit.left @ unit.right.mT
    assert torch.allclose(product @ product.mT, 0.25 * torch.eye(6).double())


def test_what_is_shown_are_the_posed_queries():
    keys = several(count=2)
    answer = gather(keys, place=GatheringPlace(SITE, shown=True))[1]
    shown = answer.shown
    assert len(shown.picks) == answer.measures["selection.queries"].value
    assert len(shown.null_margins) == NULL_DRAWS
    assert shown.space == "projected"
    assert sorted(pick.margin for pick in shown.picks) == pytest.approx(answer.curves["selection.projected_margins"])
    assert [pick.weight for pick in shown.picks] == sorted((pick.weight for pick in shown.picks), reverse=True)
    for pick in shown.picks:
        scores = keys[pick.sequence].attention[0, 1, pick.query]
        assert pick.selected == [int(scores.argmax())]
        assert pick.weight == pytest.approx(float(scores.max()))
        assert not set(pick.support) & set(pick.selected)
    total = sum(len(pick.support) for pick in shown.picks)
    assert answer.measures["selection.projected_support"].value == pytest.approx(total / (8 * len(shown.picks)))


# two spaces


def dense_readings(scenes, M):
    """Margin, efficiency and cosine with every constraint written out, ΠM by pseudo-inverses and W_mm by cvxpy."""
    u, z, query_of = [], [], []
    for tokens, queries in scenes:
        for query in queries:
            best = int((tokens @ M @ query).argmax())
            others = [other for other in range(len(tokens)) if other != best]
            query_of += [len(set(query_of))] * len(others)
            u += [tokens[best] - tokens[other] for other in others]
            z += [query] * len(others)
    u, z = torch.stack(u), torch.stack(z)
    W = cvxpy.Variable(M.shape)
    margins = cvxpy.sum(cvxpy.multiply(u.numpy() @ W, z.numpy()), axis=1)
    norm = cvxpy.Problem(cvxpy.Minimize(cvxpy.norm(W, "fro")), [margins >= 1]).solve(solver=cvxpy.CLARABEL)
    projected = torch.linalg.pinv(u) @ u @ M @ torch.linalg.pinv(z) @ z
    own = ((u @ M) * z).sum(-1) / projected.norm()
    least = torch.stack([own[torch.tensor(query_of) == query].min() for query in range(max(query_of) + 1)])
    cosine = float((M * torch.tensor(W.value)).sum() / (projected.norm() * norm))
    read = {"margin": least.min(), "efficiency": least.min() * norm, "efficiency_q05": least.quantile(0.05) * norm}
    return {what: float(value) for what, value in read.items()} | {"svm_cosine": cosine}


def test_both_spaces_equal_dense_computations_of_their_own_and_disagree():
    keys, form = bilinear(n=6)
    answers = gather(keys, place=GatheringPlace(SITE, form))
    for head in (0, 1):
        key, query, found = form.key[head], form.query[head], answers[head].measures
        inputs = [torch.nn.functional.pad(one.inputs[0], (0, 1), value=1.0) for one in keys]
        dense_of = {
            "input": dense_readings([(x, x) for x in inputs], form.scale * key @ query.mT),
            "projected": dense_readings([(x @ key, x @ query) for x in inputs], form.scale * torch.eye(4).double()),
        }
        assert found["selection.queries"].value == 18, "every query is posed"
        for space, readings in dense_of.items():
            for what, value in readings.items():
                assert found[qualify_name(what, space)].value == pytest.approx(value, rel=1e-5), (space, what)
        cosines = [readings["svm_cosine"] for readings in dense_of.values()]
        assert abs(cosines[0] - cosines[1]) > 0.05, "control: one space does not stand for the other"


def test_the_projected_space_of_a_bilinear_head_is_that_of_its_queries_and_keys_alone():
    """A head read from its inputs answers the projected question as one that has no form on inputs, null and all."""
    keys, form = bilinear(count=4, heads=3, n=8, seed=2, allowed=torch.ones(1, 1, 8, 8).bool().tril())
    both, alone = (
        gather(keys, place=GatheringPlace(SITE, form)),
        gather(keys, place=GatheringPlace(SITE, "it turns with its position")),
    )
    for head in range(3):
        one, other = both[head].measures, alone[head].measures
        for what in ("svm_cosine", "efficiency", "efficiency_q05", "margin", "support"):
            name, of_inputs = qualify_name(what, "projected"), qualify_name(what, "input")
            assert one[name].value == pytest.approx(other[name].value, rel=1e-6)
            assert one[name].null.mean == pytest.approx(other[name].null.mean, rel=1e-6)
            assert one[name].null.sd == pytest.approx(other[name].null.sd, rel=1e-5)
            assert one[of_inputs].null.mean != pytest.approx(one[name].null.mean, rel=1e-2), "each has its own null"
            assert (other[of_inputs].value, other[of_inputs].reason) == (None, "it turns with its position")
        for name in ("selection.queries", "selection.least_decided"):
            assert one[name].value == pytest.approx(other[name].value, rel=1e-9)
        assert both[head].windows == alone[head].windows


def test_a_head_that_is_its_svm_on_inputs_is_not_it_on_queries_and_keys():
    inputs = [random(7, 8, seed=number) for number in range(4)]
    found = [scene(torch.nn.functional.pad(x, (0, 1), value=1.0)) for x in inputs]
    chosen, near = judged(found, dense(random(9, 9, seed=7)))
    left, values, right = torch.linalg.svd(_whole(near, found, chosen))
    keys, form = fed(inputs, (right.mT * values.sqrt())[None] / 0.3, (left * values.sqrt())[None])
    measures = gather(keys, place=GatheringPlace(SITE, form))[0].measures
    assert measures["selection.efficiency"].value == pytest.approx(1, abs=1e-6)
    assert measures["selection.svm_cosine"].value == pytest.approx(1, abs=1e-6)
    assert measures["selection.projected_efficiency"].value < 0.9
    assert measures["selection.projected_svm_cosine"].value < 0.95


def test_what_is_shown_is_the_problem_on_inputs_where_there_is_one():
    keys, form = bilinear()
    answer = gather(keys, place=GatheringPlace(SITE, form, shown=True))[1]
    assert answer.shown.space == "input"
    assert sorted(pick.margin for pick in answer.shown.picks) == pytest.approx(answer.curves["selection.margins"])
    assert answer.curves["selection.margins"] != pytest.approx(answer.curves["selection.projected_margins"])


@pytest.mark.parametrize(("family", "spaces"), [("gpt2", ("input", "projected")), ("llama", ("projected",))])
def test_a_report_never_puts_the_two_spaces_together(family, spaces):
    report = _of_family(family, layers=[0], heads=[0, 1])
    shapes = Shapes(report)
    columns = measure_columns(shapes)
    assert [group for group in dict.fromkeys(column.group for column in columns) if "," in group] == [
        f"selection, {space}" for space in spaces
    ]
    for column in columns:
        assert column.title.startswith("projected ") == (column.group == "selection, projected")
    for row in page_rows(shapes)[: len(spaces)]:
        assert len({shapes.info(panel.stem).space for panel in row} - {""}) == 1
    both = len(spaces) == 2
    assert ("two different problems; compare only within one" in reading_help(shapes)) == both
    missing = " ".join(without_value(shapes))
    assert ("selection.svm_cosine" in missing and "RoPE" in missing) == (not both)


# models


def test_input_space_is_a_naive_dense_computation():
    """M formed with its biases, every score of the demo's layer recomputed from the inputs, and the same problem."""
    demo = attnlens.load("demo")
    fed = texts.batches(demo, texts.sample("demo"), texts.Cut(tokens=24, sequences=3)).batches[0].inputs
    reached = hooks.survey(demo.model, fed)[1]
    report = attnlens.inspect(demo, analyzers="selection", length=24, windows=3, layers=[1], heads=[2])
    block, size = demo.model.transformer.h[1].attn, 16
    weight, bias = block.c_attn.weight.double().detach(), block.c_attn.bias.double().detach()
    x = reached.arguments[reached.input_name].double()
    x = torch.cat([x, torch.ones(*x.shape[:2], 1).double()], -1)
    whole = torch.cat([weight, bias[None]])
    width = weight.shape[0]
    query, key = (whole[:, start + 2 * size : start + 3 * size] for start in (0, width))
    M = size**-0.5 * key @ query.mT
    mask = torch.ones(24, 24).bool().tril()
    logits = reached.call.query_key(reached.site).logits[:, 2]
    assert torch.allclose(x @ M.mT @ x.mT, logits, atol=1e-4)
    chosen, near = judged([scene(one, allowed=mask) for one in x], dense(M))
    found = report.heads[0].measures
    assert found["selection.queries"].value == len(chosen.sets)
    assert values_of(near) == pytest.approx(
        [found[f"selection.{name}"].value for name in ("efficiency", "svm_cosine", "efficiency_q05")], rel=1e-4
    )
    shares = (logits.masked_fill(~mask, -torch.inf).softmax(-1).amax(-1) >= 0.5).double().mean(-1)
    assert found["selection.decided"].value == pytest.approx(float(shares.mean()))
    assert found["selection.decided"].n == 3
    assert found["selection.decided"].se == pytest.approx(float(shares.std() / 3**0.5))


@pytest.mark.parametrize(
    ("family", "why"), [("bert", None), ("gpt2", None), ("llama", "RoPE"), ("qwen3", "QK-norm"), ("bart", None)]
)
def test_both_spaces_are_measured_where_the_logits_are_bilinear_in_the_inputs(family, why):
    report = _of_family(family, heads=[0])
    for head in report.heads:
        reason = "cross-attention" if head.part == "cross" else why
        assert 0 < head.measures["selection.projected_efficiency"].value <= 1 + 1e-6
        assert "selection.projected_margins" in head.curves
        assert ("selection.margins" in head.curves) == (reason is None)
        for what in ("svm_cosine", "efficiency", "efficiency_q05", "margin", "support"):
            found, projected = (head.measures[qualify_name(what, space)] for space in SPACES)
            assert projected.null is not None
            assert (found.value is None) == (found.null is None) == (reason is not None)
            assert reason is None or reason in found.reason
        assert "selection.space" not in head.measures
        assert head.measures["selection.decided"].null is None
    assert report.coverage.complete
    assert family != "bart" or {head.part for head in report.heads} == {"encoder", "decoder", "cross"}


def _of_family(family, **which):
    from loaded import loaded

    return attnlens.inspect(
        loaded(families.build(family)), analyzers="selection", text=__file__, windows=3, length=12, **which
    )


def test_the_analyzer_is_no_default_and_its_source_is_tokens():
    assert "selection" not in {found.name for found in registry.select_analyzers()}
    assert [found.name for found in registry.select_analyzers(["selection"])] == ["selection"]
    assert registry.select_analyzers(["selection"], "weights") == []
    assert measure_sources()["selection.margin"] == "tokens"


def test_a_head_of_nan_is_skipped_with_its_reason_and_the_others_stand():
    demo = attnlens.load("demo")
    with torch.no_grad():
        demo.model.transformer.h[3].attn.c_attn.weight[:, 16:32] = math.nan
    report = attnlens.inspect(demo, analyzers="selection", length=16, windows=2, layers=[3], heads=[0, 1])
    fine, broken = report.heads
    assert fine.measures["selection.efficiency"].value is not None
    assert broken.measures["selection.efficiency"].value is None
    assert "NaN" in broken.measures["selection.efficiency"].reason
    assert not report.coverage.complete


def test_an_interruption_keeps_the_sites_that_have_answered():
    from attnlens.runs.progress import Interrupted

    def stop(stage, done, _total):
        if stage == "selection" and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        attnlens.inspect("demo", analyzers="selection", length=16, windows=2, heads=[0], progress=stop)
    measured = [head.layer for head in caught.value.report.heads if head.measures]
    assert measured == [0, 1]


@pytest.mark.parametrize("select", ["top-p", "top-p:", "top-p:1", "top-p:0", "top-p:nan", "max", 3])
def test_a_rule_that_makes_no_sense_is_refused(select):
    with pytest.raises(UsageError, match=re.escape(f"select: cannot parse {select!r}.")):
        attnlens.inspect("demo", analyzers="selection", select=select)


def test_what_would_be_ignored_is_refused():
    with pytest.raises(UsageError, match="selection cannot be computed from source=weights"):
        attnlens.inspect("demo", analyzers="selection", source="weights")
    with pytest.raises(UsageError, match="requires the analyzer `selection`"):
        attnlens.inspect("demo", select="top-p:0.5")
    with pytest.raises(UsageError, match="There is no show"):
        attnlens.inspect("demo", show="everything")


def test_the_demo_differs_from_its_null():
    report = attnlens.inspect("demo", analyzers="selection", layers=[2], heads=[0, 1, 2], length=64, windows=16)
    for head in report.heads:
        assert head.measures["selection.svm_cosine"].z > 2
        assert head.measures["selection.efficiency"].value > head.measures["selection.efficiency"].null.mean


def test_forms_on_inputs_are_those_of_the_weights():
    demo = attnlens.load("demo")
    first = hooks.survey(demo.model, texts.placeholder(demo, 1, 0).batches[0].inputs)[0]
    (factors,) = weights.factors(demo.model, [first], [first])
    form = factors.on_inputs
    assert torch.equal(form.query[:, :-1], factors.query_key.query)
    assert torch.equal(form.key[:, -1], factors.maps.key_bias[:, 0])
    assert projected_norm(  # a form on everything is projected to itself
        judged(scenes(8, 12, 6), dense(random(6, 6)), most=64)[1].posed.problem, dense(random(6, 6))
    ) == pytest.approx(float(random(6, 6).norm()))
