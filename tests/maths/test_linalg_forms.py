"""Tests the measures of factored matrices against those of the formed matrices."""

import math

import pytest
import torch
from heads import at_distance, dense, query_key, random, rotary, stacked, turns
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlens.maths import linalg
from attnlens.maths.linalg import forms
from attnlens.records import Rotation

SIGMA = torch.tensor([4.0, 2.0, 1.0, 1.0], dtype=torch.float64)


def close(ours, theirs, tolerance=1e-11):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))


def with_condition(n, head_dim, condition, seed):
    left = torch.linalg.qr(random(n, head_dim, seed=seed)).Q
    right = torch.linalg.qr(random(head_dim, head_dim, seed=seed + 1)).Q
    return left * torch.logspace(0, -math.log10(condition), head_dim, dtype=torch.float64) @ right


@pytest.fixture
def set_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_the_pool_returns_what_one_call_returns_in_order(monkeypatch, set_threads):
    stack = random(2, 5, 7, 7)
    for workers in (1, 3):
        set_threads(workers)
        assert torch.equal(linalg.over_heads(torch.linalg.svdvals, stack), torch.linalg.svdvals(stack))
    set_threads(2)
    monkeypatch.setattr(linalg.spectra, "PIECE", 20)
    stack, sizes = random(9, 4, 4), []

    def trace(piece):
        sizes.append(len(piece))
        return piece.diagonal(dim1=-2, dim2=-1).sum(-1)

    assert torch.equal(linalg.over_heads(trace, stack), torch.stack([matrix.trace() for matrix in stack]))
    assert sizes == [1] * 9


def test_workers_have_one_thread_and_the_caller_keeps_threads_and_gradient_mode(set_threads):
    set_threads(2)
    seen = linalg.over_heads(lambda x: torch.full(x.shape[:1], float(torch.get_num_threads())), random(4, 2, 2))
    assert (seen.tolist(), torch.get_num_threads()) == ([1.0] * 4, 2)
    with pytest.raises(torch.linalg.LinAlgError):
        linalg.over_heads(torch.linalg.cholesky, -torch.eye(2).repeat(4, 1, 1))
    assert torch.get_num_threads() == 2
    stack = random(4, 3, 3).requires_grad_()
    for mode in (True, False):
        with torch.set_grad_enabled(mode):
            assert linalg.over_heads(torch.linalg.svdvals, stack).requires_grad == mode


SHAPES = {
    **{"plain": ((3, 20, 4), (3, 20, 4)), "grouped": ((6, 20, 4), (2, 20, 4))},
    **{"batched": ((2, 6, 20, 4), (2, 3, 20, 4)), "wider than half": ((2, 6, 4), (2, 6, 4))},
    **{"wider than long": ((2, 3, 5), (2, 3, 5)), "one row": ((2, 1, 4), (2, 1, 4))},
}


def check_invariants(form, matrix, tolerance=1e-10):
    """The invariants of the form are those of the formed matrix."""
    close(form.norm, torch.linalg.matrix_norm(matrix))
    assert form.singular_values.shape[-1] == form.query_key.query.shape[-1]
    sigma, steps = torch.linalg.svdvals(matrix), min(matrix.shape[-1], form.singular_values.shape[-1])
    close(form.singular_values[..., :steps], sigma[..., :steps])
    assert (form.singular_values[..., steps:] <= 1e-12 * sigma.max()).all()
    values = torch.linalg.eigvals(matrix)
    close(form.positivity, values.real.sum(-1) / values.abs().sum(-1), 1e-9)
    mu = symmetric_eigenvalues(matrix)
    close(form.definiteness, mu.sum(-1) / mu.abs().sum(-1), tolerance)


def symmetric_eigenvalues(matrix):
    return torch.linalg.eigvalsh((matrix + matrix.mT) / 2)


def inertia(query, key, **rest):
    return [part.tolist() for part in linalg.Form(query_key(query, key, **rest)).inertia]


@pytest.mark.parametrize("name", SHAPES)
def test_every_invariant_is_that_of_the_formed_matrix(name):
    query, key = SHAPES[name]
    heads = query_key(random(*query), random(*key, seed=1))
    check_invariants(linalg.Form(heads), dense(heads))
    single = query_key(heads.query.float(), heads.key.float())
    assert linalg.Form(single).norm.dtype == torch.float64, "float32 factors are read in float64"
    check_invariants(linalg.Form(single), dense(single))


def test_symmetric_eigenvalues_and_inertia():
    heads = query_key(random(4, 30, 5), random(2, 30, 5, seed=1))
    ours, theirs = linalg.Form(heads).symmetric_eigenvalues, symmetric_eigenvalues(dense(heads))
    close(ours[:, :5], theirs[:, :5])
    close(ours[:, 5:], theirs[:, -5:])
    assert inertia(heads.query, heads.key) == [[5.0] * 4, [5.0] * 4]
    factor, key = random(2, 20, 4), random(1, 20, 4, seed=1)
    assert inertia(factor, factor) == [[4.0, 4.0], [0.0, 0.0]], "though its joint factors are singular"
    key[..., 2:] = 0
    assert inertia(random(1, 20, 4), key) == [[2.0], [2.0]], "a low-rank factor leaves no phantom eigenvalues"
    factor = random(2, 9, 6)
    assert inertia(factor, factor, rotation=rotary(5, 6)) == [[6.0, 6.0], [0.0, 0.0]]
    form = linalg.Form(query_key(factor, factor, rotation=rotary(5, 6)))
    close(linalg.symmetry_by_distance(form), torch.ones(2, 5, dtype=torch.float64))


def smallest_error(heads):
    sigma = torch.linalg.svdvals(torch.linalg.qr(heads.query[0]).R @ torch.linalg.qr(heads.key[0]).R.mT) * heads.scale
    return float((linalg.Form(heads).singular_values[0, -1] / sigma[-1] - 1).abs())


def test_the_smallest_singular_value_survives_badly_conditioned_factors(monkeypatch):
    bad = query_key(with_condition(60, 8, 1e7, 3)[None], with_condition(60, 8, 1e3, 5)[None])
    fair = query_key(with_condition(60, 8, 1e4, 3)[None], with_condition(60, 8, 1e4, 5)[None])
    assert smallest_error(fair) < 1e-6
    assert smallest_error(bad) < 1e-6
    with monkeypatch.context() as patch:
        patch.setattr(forms, "LARGEST_CONDITION", 1e30)
        assert smallest_error(bad) > 1e-6, "the control: Gram matrices alone lose it"
    monkeypatch.setattr(forms, "factor_root", None)  # a column of another scale is not a bad condition
    heads = query_key(random(1, 40, 6) * torch.logspace(0, -8, 6, dtype=torch.float64), random(1, 40, 6, seed=1))
    close(linalg.Form(heads).singular_values[:, :3], torch.linalg.svdvals(dense(heads))[:, :3])


def test_zero_matrices_and_cross_attention():
    heads = query_key(torch.zeros(2, 10, 3), random(2, 10, 3).float())
    form = linalg.Form(heads)
    assert form.norm.tolist() == [0, 0]
    assert (form.singular_values == 0).all()
    assert [part.tolist() for part in form.inertia] == [[0, 0], [0, 0]]
    assert all(each.isnan().all() for each in (form.definiteness, form.positivity, linalg.symmetry(form)))
    crossed = query_key(random(3, 20, 4), random(3, 12, 4, seed=1), part="cross")
    close(linalg.Form(crossed).singular_values, torch.linalg.svdvals(dense(crossed))[:, :4])
    assert linalg.layer_symmetry(heads) is None
    assert linalg.layer_symmetry(crossed) is None


def dense_symmetry(matrix):
    even, odd = (matrix + matrix.mT) / 2, (matrix - matrix.mT) / 2
    return (even.square().sum((-2, -1)) - odd.square().sum((-2, -1))) / matrix.square().sum((-2, -1))


def direction_of(norms):
    """The directionality for the norms of rows and of columns."""
    above = [torch.where(n > n.mean(-1, True) + 2 * n.std(-1, keepdim=True), n, 0).sum(-1) for n in norms]
    whole = above[0] + above[1]
    return torch.where(whole > 0, (above[0] - above[1]) / whole, 0)


def test_symmetry_and_directionality_are_those_of_the_matrix():
    heads = query_key(random(6, 50, 4), random(2, 50, 4, seed=1))
    form, matrix = linalg.Form(heads), dense(heads)
    close(linalg.symmetry(form), dense_symmetry(matrix), 1e-10)
    directions = direction_of([matrix.norm(dim=-1), matrix.norm(dim=-2)])
    assert directions.abs().max() > 0.05
    close(linalg.directionality(form), directions, 1e-10)
    eye = torch.eye(6).double()[None]
    assert linalg.directionality(linalg.Form(query_key(eye, eye))).item() == 0, "without outstanding rows"
    whole = float(dense_symmetry(matrix.sum(0)))
    assert linalg.layer_symmetry(heads) == pytest.approx(whole, abs=1e-12)
    wrong = query_key(heads.query, heads.key, key_of=(0, 1, 0, 1, 0, 1))
    assert linalg.layer_symmetry(wrong) != pytest.approx(whole, abs=1e-3), "the control"


def test_heads_that_share_a_key_head_have_the_values_of_each_alone():
    query, key = random(6, 40, 8, seed=4), random(2, 40, 8, seed=5)
    for sides in ((query, key), [part.mT.contiguous().mT for part in (query, key)]):  # the second: rows of weights
        shared = query_key(*sides, scale=1.0, key_of=(0, 0, 0, 1, 1, 1))
        whole, some = linalg.Form(shared), linalg.Form(shared.select([0, 3, 4]))
        torch.testing.assert_close(whole.cross, shared.paired_key.mT @ query)
        torch.testing.assert_close(some.cross, whole.cross[[0, 3, 4]])
        for measure in (linalg.directionality, linalg.symmetry):
            torch.testing.assert_close(measure(some), measure(whole)[[0, 3, 4]])


INTERLEAVED = Rotation(torch.tensor([[4, 5], [0, 1]]), random(7, 2), 6)
ODD = Rotation(torch.tensor([[0, 3]]), random(7, 1), 5)
NONE = Rotation(torch.empty(0, 2, dtype=torch.long), torch.empty(7, 0).double(), 4)


@pytest.mark.parametrize("rotation", [rotary(7, 6), rotary(7, 6, rotated=4), INTERLEAVED, ODD, NONE])
def test_rotation_sums_are_those_of_the_matrices_multiplied_out(rotation):
    matrices, size = turns(rotation), rotation.size
    x, y = random(3, 2, size, size), random(3, 2, size, size, seed=1)
    close(linalg.average_rotations(rotation, x), sum(r.mT @ x @ r for r in matrices) / 7)
    close(linalg.average_rotations(rotation.transposed, x), sum(r @ x @ r.mT for r in matrices) / 7)
    multiplied = [(x @ (r.mT @ y @ r + r @ y @ r.mT) / 2).diagonal(dim1=-2, dim2=-1).sum((-2, -1)) for r in matrices]
    close(linalg.rotation_traces(rotation, x, y), torch.stack(multiplied, -1))
    tokens = random(2, 5, size)
    close(rotation.rotate(tokens), torch.stack([tokens[:, i] @ matrices[i] for i in range(5)], 1))


def distance_sums(heads, combine=lambda matrices: matrices):
    matrices = {d: combine(at_distance(heads, d)) for d in range(-4, 5)}
    crossed = {d: (matrices[d] * matrices[-d].mT).sum((-2, -1)) for d in matrices}
    squared = {d: matrices[d].square().sum((-2, -1)) for d in matrices}
    return crossed, squared


@pytest.mark.parametrize("rotated", [6, 4], ids=["all dimensions", "partial rotary"])
def test_under_rotation_measures_are_those_of_the_joint_kernel(rotated):
    heads = query_key(random(4, 9, 6), random(2, 9, 6, seed=1), rotation=rotary(5, 6, rotated=rotated))
    form, matrix = linalg.Form(heads), stacked(heads)
    check_invariants(form, matrix, 1e-9)
    still = query_key(heads.query, heads.key)
    assert not torch.allclose(form.norm, linalg.Form(still).norm, rtol=1e-3)
    pooled = [joint.square().sum(-1).unflatten(-1, (5, 9)).sum(-2).sqrt() for joint in (matrix, matrix.mT)]
    close(linalg.directionality(form), direction_of(pooled), 1e-10)
    crossed, squared = distance_sums(heads)
    close(linalg.symmetry(form), sum(crossed.values()) / sum(squared.values()), 1e-10)
    curve = torch.stack([(crossed[d] + crossed[-d]) / (squared[d] + squared[-d]) for d in range(5)], -1)
    close(linalg.symmetry_by_distance(form), curve, 1e-10)
    close(curve[:, 0], dense_symmetry(dense(heads)), 1e-10)
    assert not torch.allclose(linalg.symmetry(form), dense_symmetry(dense(heads)), atol=1e-3)
    crossed, squared = distance_sums(heads, lambda matrices: matrices.sum(0))
    expected = float(sum(crossed.values()) / sum(squared.values()))
    assert linalg.layer_symmetry(heads) == pytest.approx(expected, abs=1e-12)


def test_ranks_of_spectra_known_by_hand_and_singular_values_of_products():
    assert linalg.effective_rank(SIGMA).item() == pytest.approx(3.36359, abs=5e-6)
    assert linalg.stable_rank(SIGMA).item() == 1.375
    assert linalg.rank_at(SIGMA, 0.9).item() == 2  # 16 + 4 of 22 is 0.909
    close(linalg.cumulative(SIGMA), torch.tensor([0.5, 0.75, 0.875, 1.0], dtype=torch.float64))
    even, zero = torch.full((10,), 0.1, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    assert [linalg.rank_at(even, share).item() for share in (0.9, 0.91)] == [9, 10], "a share reached exactly"
    ranks = (linalg.effective_rank(zero), linalg.stable_rank(zero), linalg.rank_at(zero, 0.9), linalg.decay_rate(zero))
    assert all(rank.isnan() for rank in ranks)
    for n, m, size in ((20, 15, 4), (3, 15, 4), (2, 2, 5)):
        left, right = random(3, n, size), random(3, m, size, seed=1)
        expected = torch.linalg.svdvals(left @ right.mT)[:, : min(n, m, size)]
        close(linalg.product_singular_values(left, right), expected)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_ranks_lie_between_one_and_the_number_of_values(values):
    sigma = torch.tensor(sorted(values, reverse=True), dtype=torch.float64)
    for rank in (linalg.effective_rank(sigma), linalg.stable_rank(sigma), linalg.rank_at(sigma, 0.9)):
        assert 1 - 1e-9 <= rank.item() <= len(values) + 1e-9
    assert linalg.effective_rank(7 * sigma).item() == pytest.approx(linalg.effective_rank(sigma).item(), rel=1e-9)


def test_the_decay_is_the_least_squares_slope_of_the_logarithms():
    index = torch.arange(1, 41, dtype=torch.float64)
    values = (random(5, 40).abs() + 0.1).sort(-1, descending=True).values
    design = torch.stack((torch.ones(40).double(), -index), -1)
    slopes = torch.linalg.lstsq(design, values.log().mT).solution[1]
    close(linalg.decay_rate(values), slopes)
    close(linalg.decay_rate(7 * values), slopes)
    close(linalg.decay_rate(3 * torch.exp(-0.2 * index)[None]), torch.tensor([0.2], dtype=torch.float64))
    assert linalg.decay_rate(torch.full((3, 10), 0.7, dtype=torch.float64)).tolist() == [0, 0, 0]
    padded = torch.cat((3 * torch.exp(-0.2 * index[:20]), torch.full((20,), 1e-17).double()))
    assert linalg.decay_rate(padded).item() == pytest.approx(0.2), "numerical zeros take no part"
    assert linalg.decay_rate(torch.tensor([2.0, 1.0, 0.0]).double()).item() == pytest.approx(math.log(2))
    assert linalg.decay_rate(torch.tensor([2.0, 0.0, 0.0]).double()).isnan()
