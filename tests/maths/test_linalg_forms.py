"""Tests the measures of factored matrices against those of the dense matrices that they stand for."""

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


# --- the pool -------------------------------------------------------------------------------------------------------


@pytest.fixture
def set_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("workers", [1, 3])
def test_the_pool_returns_what_one_call_returns(workers, set_threads):
    set_threads(workers)
    stack = random(2, 5, 7, 7)
    assert torch.equal(linalg.over_heads(torch.linalg.svdvals, stack), torch.linalg.svdvals(stack))


def test_the_pool_runs_more_pieces_than_workers_in_order(monkeypatch, set_threads):
    set_threads(2)
    monkeypatch.setattr(linalg.spectra, "PIECE", 20)
    stack, sizes = random(9, 4, 4), []

    def trace(piece):
        sizes.append(len(piece))
        return piece.diagonal(dim1=-2, dim2=-1).sum(-1)

    assert torch.equal(linalg.over_heads(trace, stack), stack.diagonal(dim1=-2, dim2=-1).sum(-1))
    assert sizes == [1] * 9


def test_workers_have_one_thread_and_the_caller_keeps_its_own(set_threads):
    set_threads(2)
    seen = linalg.over_heads(lambda x: torch.full(x.shape[:1], float(torch.get_num_threads())), random(4, 2, 2))
    assert seen.tolist() == [1.0] * 4
    assert torch.get_num_threads() == 2
    with pytest.raises(torch.linalg.LinAlgError):
        linalg.over_heads(torch.linalg.cholesky, -torch.eye(2).repeat(4, 1, 1))
    assert torch.get_num_threads() == 2


def test_the_pool_keeps_the_callers_gradient_mode():
    stack = random(4, 3, 3).requires_grad_()
    assert linalg.over_heads(torch.linalg.svdvals, stack).requires_grad
    with torch.no_grad():
        assert not linalg.over_heads(torch.linalg.svdvals, stack).requires_grad


# --- the bilinear form W_Q W_Kᵀ ---------------------------------------------------------------------------------------

SHAPES = {
    "plain": ((3, 20, 4), (3, 20, 4)),
    "grouped": ((6, 20, 4), (2, 20, 4)),
    "batched": ((2, 6, 20, 4), (2, 3, 20, 4)),
    "wider than half": ((2, 6, 4), (2, 6, 4)),
    "wider than long": ((2, 3, 5), (2, 3, 5)),
    "one row": ((2, 1, 4), (2, 1, 4)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_invariant_is_that_of_the_formed_matrix(name):
    query, key = SHAPES[name]
    heads = query_key(random(*query), random(*key, seed=1))
    form, matrix = linalg.Form(heads), dense(heads)
    close(form.norm, torch.linalg.matrix_norm(matrix))
    sigma = torch.linalg.svdvals(matrix)
    steps = min(sigma.shape[-1], query[-1])
    close(form.singular_values[..., :steps], sigma[..., :steps])
    assert (form.singular_values[..., steps:] <= 1e-12 * sigma.max()).all()
    values = torch.linalg.eigvals(matrix)
    close(form.positivity, values.real.sum(-1) / values.abs().sum(-1), 1e-9)
    close(form.definiteness, *[(mu.sum(-1) / mu.abs().sum(-1)) for mu in [symmetric_eigenvalues(matrix)]], 1e-10)


def symmetric_eigenvalues(matrix):
    return torch.linalg.eigvalsh((matrix + matrix.mT) / 2)


def test_symmetric_eigenvalues_are_those_of_the_symmetric_part():
    heads = query_key(random(4, 30, 5), random(2, 30, 5, seed=1))
    ours, theirs = linalg.Form(heads).symmetric_eigenvalues, symmetric_eigenvalues(dense(heads))
    close(ours[:, :5], theirs[:, :5])
    close(ours[:, 5:], theirs[:, -5:])
    assert [part.tolist() for part in linalg.Form(heads).inertia] == [[5.0] * 4, [5.0] * 4]


def test_a_positive_head_has_no_negative_inertia_though_its_joint_factors_are_singular():
    factor = random(2, 20, 4)
    form = linalg.Form(query_key(factor, factor))
    assert [part.tolist() for part in form.inertia] == [[4.0, 4.0], [0.0, 0.0]]
    close(form.definiteness, torch.ones(2, dtype=torch.float64))
    form = linalg.Form(query_key(factor, -factor))
    assert [part.tolist() for part in form.inertia] == [[0.0, 0.0], [4.0, 4.0]]


def test_a_low_rank_key_factor_leaves_no_phantom_eigenvalues():
    key = random(1, 20, 4, seed=1)
    key[..., 2:] = 0
    form = linalg.Form(query_key(random(1, 20, 4), key))
    assert [part.tolist() for part in form.inertia] == [[2.0], [2.0]]


def test_float32_factors_are_read_in_float64():
    heads = query_key(random(2, 20, 4).float(), random(2, 20, 4, seed=1).float())
    assert linalg.Form(heads).norm.dtype == torch.float64
    close(linalg.Form(heads).singular_values, torch.linalg.svdvals(dense(heads))[:, :4])


def smallest_error(heads):
    sigma = torch.linalg.svdvals(torch.linalg.qr(heads.query[0]).R @ torch.linalg.qr(heads.key[0]).R.mT) * heads.scale
    return float((linalg.Form(heads).singular_values[0, -1] / sigma[-1] - 1).abs())


def test_the_smallest_singular_value_survives_badly_conditioned_factors(monkeypatch):
    bad = query_key(with_condition(60, 8, 1e7, 3)[None], with_condition(60, 8, 1e3, 5)[None])
    fair = query_key(with_condition(60, 8, 1e4, 3)[None], with_condition(60, 8, 1e4, 5)[None])
    assert smallest_error(fair) < 1e-6
    assert smallest_error(bad) < 1e-6
    monkeypatch.setattr(forms, "LARGEST_CONDITION", 1e30)
    assert smallest_error(bad) > 1e-6  # the control: Gram matrices alone lose it


def test_a_column_of_another_scale_is_no_bad_condition(monkeypatch):
    query = random(1, 40, 6) * torch.logspace(0, -8, 6, dtype=torch.float64)
    monkeypatch.setattr(forms, "factor_root", None)  # it would be called
    heads = query_key(query, random(1, 40, 6, seed=1))
    close(linalg.Form(heads).singular_values[:, :3], torch.linalg.svdvals(dense(heads))[:, :3])


def test_a_zero_matrix_is_no_crash():
    heads = query_key(torch.zeros(2, 10, 3), random(2, 10, 3).float())
    form = linalg.Form(heads)
    assert form.norm.tolist() == [0, 0]
    assert [part.tolist() for part in form.inertia] == [[0, 0], [0, 0]]
    for missing in (form.definiteness, form.positivity, linalg.symmetry(linalg.Form(heads))):
        assert missing.isnan().all()
    assert linalg.layer_symmetry(heads) is None


def test_cross_attention_has_singular_values_between_two_domains():
    heads = query_key(random(3, 20, 4), random(3, 12, 4, seed=1), part="cross")
    close(linalg.Form(heads).singular_values, torch.linalg.svdvals(dense(heads))[:, :4])
    assert linalg.layer_symmetry(heads) is None


# --- symmetry ---------------------------------------------------------------------------------------------------------


def dense_symmetry(matrix):
    even, odd = (matrix + matrix.mT) / 2, (matrix - matrix.mT) / 2
    return (even.square().sum((-2, -1)) - odd.square().sum((-2, -1))) / matrix.square().sum((-2, -1))


def dense_directionality(matrix):
    sides = []
    for norms in (matrix.norm(dim=-1), matrix.norm(dim=-2)):
        border = norms.mean(-1, keepdim=True) + 2 * norms.std(-1, keepdim=True)
        sides.append(torch.where(norms > border, norms, 0).sum(-1))
    return (sides[0] - sides[1]) / (sides[0] + sides[1])


def test_symmetry_and_directionality_are_those_of_the_matrix():
    heads = query_key(random(6, 50, 4), random(2, 50, 4, seed=1))
    form = linalg.Form(heads)
    close(linalg.symmetry(form), dense_symmetry(dense(heads)), 1e-10)
    directions = dense_directionality(dense(heads))
    assert directions.abs().max() > 0.05
    close(linalg.directionality(form), directions, 1e-10)


def test_without_outstanding_rows_there_is_no_direction():
    heads = query_key(torch.eye(6).double()[None], torch.eye(6).double()[None])
    assert linalg.directionality(linalg.Form(heads)).item() == 0


def test_layer_symmetry_is_that_of_the_heads_summed():
    heads = query_key(random(6, 20, 4), random(2, 20, 4, seed=1))
    assert linalg.layer_symmetry(heads) == pytest.approx(float(dense_symmetry(dense(heads).sum(0))), abs=1e-12)
    wrong = query_key(heads.query, heads.key, key_of=(0, 1, 0, 1, 0, 1))
    assert linalg.layer_symmetry(wrong) != pytest.approx(float(dense_symmetry(dense(heads).sum(0))), abs=1e-3)


# --- rotation ---------------------------------------------------------------------------------------------------------


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


@pytest.fixture(params=[6, 4], ids=["all dimensions", "partial rotary"])
def rotated(request):
    return query_key(random(4, 9, 6), random(2, 9, 6, seed=1), rotation=rotary(5, 6, rotated=request.param))


def test_under_rotation_the_invariants_are_those_of_the_joint_kernel(rotated):
    form, matrix = linalg.Form(rotated), stacked(rotated)
    close(form.norm, torch.linalg.matrix_norm(matrix))
    close(form.singular_values, torch.linalg.svdvals(matrix)[:, :6])
    values = torch.linalg.eigvals(matrix)
    close(form.positivity, values.real.sum(-1) / values.abs().sum(-1), 1e-9)
    mu = symmetric_eigenvalues(matrix)
    close(form.definiteness, mu.sum(-1) / mu.abs().sum(-1), 1e-9)
    still = query_key(rotated.query, rotated.key)
    assert not torch.allclose(form.norm, linalg.Form(still).norm, rtol=1e-3)


def test_under_rotation_directionality_pools_positions(rotated):
    matrix = stacked(rotated) * 5
    norms = []
    for joint in (matrix, matrix.mT):
        by_position = joint.square().sum(-1).unflatten(-1, (5, 9))
        norms.append(by_position.sum(-2).sqrt())
    sides = [torch.where(n > n.mean(-1, True) + 2 * n.std(-1, keepdim=True), n, 0).sum(-1) for n in norms]
    whole = sides[0] + sides[1]
    expected = torch.where(whole > 0, (sides[0] - sides[1]) / whole, 0)
    close(linalg.directionality(linalg.Form(rotated)), expected, 1e-10)


def distance_sums(heads, one_sum=None):
    matrices = {d: at_distance(heads, d) if one_sum is None else one_sum(at_distance(heads, d)) for d in range(-4, 5)}
    crossed = {d: (matrices[d] * matrices[-d].mT).sum((-2, -1)) for d in matrices}
    squared = {d: matrices[d].square().sum((-2, -1)) for d in matrices}
    return crossed, squared


def test_under_rotation_symmetry_runs_over_all_distances(rotated):
    crossed, squared = distance_sums(rotated)
    form = linalg.Form(rotated)
    close(linalg.symmetry(form), sum(crossed.values()) / sum(squared.values()), 1e-10)
    curve = [(crossed[d] + crossed[-d]) / (squared[d] + squared[-d]) for d in range(5)]
    close(linalg.symmetry_by_distance(form), torch.stack(curve, -1), 1e-10)
    close(linalg.symmetry_by_distance(form)[:, 0], dense_symmetry(dense(rotated)), 1e-10)
    assert not torch.allclose(linalg.symmetry(form), dense_symmetry(dense(rotated)), atol=1e-3)


def test_under_rotation_layer_symmetry_sums_the_heads_at_each_distance(rotated):
    crossed, squared = distance_sums(rotated, lambda matrices: matrices.sum(0))
    expected = float(sum(crossed.values()) / sum(squared.values()))
    assert linalg.layer_symmetry(rotated) == pytest.approx(expected, abs=1e-12)


def test_equal_factors_are_symmetric_at_every_distance_and_definite():
    factor = random(2, 9, 6)
    heads = query_key(factor, factor, rotation=rotary(5, 6))
    close(linalg.symmetry_by_distance(linalg.Form(heads)), torch.ones(2, 5, dtype=torch.float64))
    assert [part.tolist() for part in linalg.Form(heads).inertia] == [[6.0, 6.0], [0.0, 0.0]]


# --- singular values, ranks, laws -------------------------------------------------------------------------------------


def test_ranks_of_a_spectrum_known_by_hand():
    assert linalg.effective_rank(SIGMA).item() == pytest.approx(3.36359, abs=5e-6)
    assert linalg.stable_rank(SIGMA).item() == 1.375
    assert linalg.rank_at(SIGMA, 0.9).item() == 2  # 16 + 4 of 22 is 0.909
    close(linalg.cumulative(SIGMA), torch.tensor([0.5, 0.75, 0.875, 1.0], dtype=torch.float64))


def test_a_share_reached_exactly_is_reached():
    assert linalg.rank_at(torch.full((10,), 0.1, dtype=torch.float64), 0.9).item() == 9
    assert linalg.rank_at(torch.full((10,), 0.1, dtype=torch.float64), 0.91).item() == 10


def test_a_zero_spectrum_has_no_rank():
    zero = torch.zeros(3, dtype=torch.float64)
    found = [linalg.effective_rank(zero), linalg.stable_rank(zero), linalg.rank_at(zero, 0.9), linalg.decay_rate(zero)]
    assert all(value.isnan() for value in found)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_ranks_lie_between_one_and_the_number_of_values(values):
    sigma = torch.tensor(sorted(values, reverse=True), dtype=torch.float64)
    for rank in (linalg.effective_rank(sigma), linalg.stable_rank(sigma), linalg.rank_at(sigma, 0.9)):
        assert 1 - 1e-9 <= rank.item() <= len(values) + 1e-9
    scaled = linalg.effective_rank(7 * sigma).item()
    assert scaled == pytest.approx(linalg.effective_rank(sigma).item(), rel=1e-9)


def test_products_have_the_singular_values_of_the_formed_matrix():
    for n, m, size in ((20, 15, 4), (3, 15, 4), (2, 2, 5)):
        left, right = random(3, n, size), random(3, m, size, seed=1)
        steps = min(n, m, size)
        close(linalg.product_singular_values(left, right), torch.linalg.svdvals(left @ right.mT)[:, :steps])


INDEX = torch.arange(1, 41, dtype=torch.float64)


def test_the_decay_is_the_least_squares_slope_of_the_logarithms():
    values = (random(5, 40).abs() + 0.1).sort(-1, descending=True).values
    design = torch.stack((torch.ones(40).double(), -INDEX), -1)
    slopes = torch.linalg.lstsq(design, values.log().mT).solution[1]
    close(linalg.decay_rate(values), slopes)
    close(linalg.decay_rate(7 * values), slopes)
    close(linalg.decay_rate(3 * torch.exp(-0.2 * INDEX)[None]), torch.tensor([0.2], dtype=torch.float64))
    assert linalg.decay_rate(torch.full((3, 10), 0.7, dtype=torch.float64)).tolist() == [0, 0, 0]


def test_numerical_zeros_take_no_part_in_the_decay_and_one_value_has_none():
    padded = torch.cat((3 * torch.exp(-0.2 * INDEX[:20]), torch.full((20,), 1e-17).double()))
    assert linalg.decay_rate(padded).item() == pytest.approx(0.2)
    assert linalg.decay_rate(torch.tensor([2.0, 1.0, 0.0]).double()).item() == pytest.approx(0.6931471805599453)
    assert linalg.decay_rate(torch.tensor([2.0, 0.0, 0.0]).double()).isnan()
