"""Tests that dual, primal, truncated and Nyström kernel SVDs agree, and that their objective vanishes."""

import doctest
import math

import pytest
import torch
from heads import close, random
from hypothesis import given, settings
from hypothesis import strategies as st
from watch import unwatched

from attnlens.errors import UsageError
from attnlens.maths import ksvd

EYE = torch.eye(6, dtype=torch.float64)
each_projection = pytest.mark.parametrize("f", ["identity", "few rows", "many rows"])


def sampled_index(n, count):
    return torch.linspace(0, n - 1, min(n, count), dtype=torch.float64).long().tolist()


def problem(f="identity", n=40, m=30, head_dim=6, batch=(3,), seed=0):
    """Cosine features of both sides, F, and the formed kernel."""
    decaying = torch.logspace(0, -1, head_dim, dtype=torch.float64)
    queries, keys = (
        ksvd.cosine_features(random(*batch, rows, head_dim, seed=seed + side) * decaying)
        for side, rows in enumerate((n, m))
    )
    rows = {"identity": None, "few rows": 4, "many rows": 20}[f]
    projection = None if rows is None else ksvd.sampled_rows(random(*batch, 50, head_dim, seed=seed + 7), rows)
    mapped = torch.eye(head_dim, dtype=torch.float64) if projection is None else projection
    return queries, keys, projection, (queries @ mapped.mT) @ (keys @ mapped.mT).mT


def projector(basis):
    return basis @ basis.mT


def objective(weights, queries, keys, convention="paper"):
    e, r = weights.e_scores(queries), weights.r_scores(keys)
    return ksvd.objective(e, r, weights.query_weight, weights.key_weight, weights.multipliers, convention)


def test_the_examples_of_the_docstrings_run():
    results = doctest.testmod(ksvd)
    assert results.attempted >= 10
    assert results.failed == 0


@each_projection
def test_the_dual_is_the_truncated_svd_of_the_formed_kernel_and_the_residual_shows_it(f):
    queries, keys, projection, kernel = problem(f)
    u, sigma, vh = torch.linalg.svd(kernel)
    for s in (1, 3, 6):
        dual = ksvd.dual(queries, keys, s, projection)
        steps = min(s, 4 if f == "few rows" else 6)
        assert dual.values.shape == (3, steps)
        close(dual.values, sigma[:, :steps])
        close(projector(dual.left), projector(u[..., :steps]))
        close(projector(dual.right), projector(vh.mT[..., :steps]))
        close(kernel @ dual.right, dual.e)
        close(kernel.mT @ dual.left, dual.r)
        close(dual.e.square().sum(-2), dual.values.square())
        assert (dual.rank == steps).all()
    dual = ksvd.dual(queries, keys, 3, projection)
    assert (ksvd.residual(dual, queries, keys, projection) < 1e-13).all()
    assert (ksvd.matrix_residual(dual, kernel) < 1e-13).all()
    disturbed = ksvd.Dual(dual.left + 0.1 * random(*dual.left.shape, seed=9), dual.values, dual.right)
    errors = torch.cat([kernel @ dual.right - disturbed.e, kernel.mT @ disturbed.left - dual.r], -2)
    expected = torch.linalg.matrix_norm(errors) / (2**0.5 * dual.values.norm(dim=-1))
    close(ksvd.residual(disturbed, queries, keys, projection), expected)
    assert (expected > 0.1).all(), "the control"


def test_degenerate_singular_values_give_the_space_and_not_its_vectors():
    left, right = (torch.linalg.qr(random(20, 4, seed=seed)).Q for seed in (0, 1))
    sigma, turn = torch.tensor([3.0, 3.0, 3.0, 1.0], dtype=torch.float64), torch.linalg.qr(random(4, 4, seed=2)).Q
    plain, turned = ksvd.dual(left * sigma, right, 3), ksvd.dual(left * sigma @ turn, right @ turn, 3)
    for solution in (plain, turned):
        close(projector(solution.left), projector(left[:, :3]))
        close(projector(solution.right), projector(right[:, :3]))
        close(solution.e @ solution.right.mT, 3 * left[:, :3] @ right[:, :3].mT)
    assert (plain.left.abs() - turned.left.abs()).abs().max() > 0.01, "control: the vectors themselves do differ"


def test_components_are_zero_beyond_the_rank_of_each_head():
    flat = torch.cat([random(1, 20, 2), torch.zeros(1, 20, 4)], -1)
    queries, keys = torch.cat([flat, random(1, 20, 6, seed=1)]), random(2, 25, 6, seed=2)
    dual = ksvd.dual(queries, keys, 5)
    assert dual.rank.tolist() == [2, 5]
    for zeros in (dual.left[0, :, 2:], dual.right[0, :, 2:], dual.multipliers[0, 2:]):
        assert (zeros == 0).all()
    assert (ksvd.residual(dual, queries, keys) < 1e-13).all()
    weights = ksvd.primal(dual, queries, keys)
    close(weights.e_scores(queries), dual.e)
    close(weights.multipliers[..., None, :] * dual.e, dual.left)
    assert objective(weights, queries, keys).abs().max() < 1e-12


def test_zero_kernels_and_zero_rows_divide_nothing():
    turn = torch.linalg.qr(random(6, 6)).Q
    queries, keys = random(20, 3) @ turn[:3], random(20, 3, seed=1) @ turn[3:]
    dual = ksvd.dual(queries, keys, 6)
    assert dual.rank == 0, "orthogonal queries and keys: their kernel is zero and not rounding"
    assert ksvd.residual(dual, queries, keys).isnan()
    assert (torch.linalg.svdvals(queries @ keys.mT) > 0).any()
    queries, keys = random(2, 15, 4), random(2, 15, 4, seed=1)
    queries[:, 3:9] = keys[1] = 0
    q, k = ksvd.cosine_features(queries), ksvd.cosine_features(keys)
    assert (q[:, 3:9] == 0).all()
    close(q[:, :3].norm(dim=-1), torch.ones(2, 3))
    dual = ksvd.dual(q, k, 4)
    assert all(part.isfinite().all() for part in (q, dual.left, dual.values, dual.right, dual.multipliers))
    assert dual.rank.tolist() == [4, 0]
    assert (ksvd.primal(dual, q, k).e_scores(q)[:, 3:9] == 0).all()
    assert (q / q.norm(dim=-1, keepdim=True)).isnan().any(), "the control"


@given(st.floats(-300, 300))
def test_the_cosine_does_not_depend_on_the_length(power):
    x = random(5, 4)
    close(ksvd.cosine_features(x * 10.0**power), x / x.norm(dim=-1, keepdim=True), 1e-13)


def test_leading_axes_stay_and_float32_is_widened():
    queries, keys, projection, kernel = problem("many rows", batch=(2, 3))
    dual = ksvd.dual(queries.float(), keys.float(), 4, projection.float())
    assert (dual.left.shape, dual.left.dtype) == ((2, 3, 40, 4), torch.float64)
    close(dual.values, torch.linalg.svdvals(kernel)[..., :4], 1e-5)


@each_projection
def test_primal_scores_are_dual_scores_in_and_out_of_sample(f):
    queries, keys, projection, _ = problem(f)
    new_queries, new_keys, _, _ = problem(n=11, m=13, seed=20)
    dual = ksvd.dual(queries, keys, 3, projection)
    weights = ksvd.primal(dual, queries, keys, projection)
    wide = EYE if projection is None else projection
    close(weights.e_scores(queries), dual.e)
    close(weights.r_scores(keys), dual.r)
    # W_e = Σ_j Fφ_k(x_j) h_{r,j}ᵀ, written out
    close(weights.query_weight, sum((wide @ keys[:, j, :, None]) @ dual.right[:, j, None] for j in range(30)))
    close(weights.key_weight, sum((wide @ queries[:, i, :, None]) @ dual.left[:, i, None] for i in range(40)))
    uncrossed = ksvd.Primal(weights.key_weight, weights.query_weight, weights.multipliers, projection)
    assert (uncrossed.e_scores(queries) - dual.e).abs().max() > 0.1
    close(dual.e * dual.multipliers[..., None, :], dual.left)
    close(dual.r * dual.multipliers[..., None, :], dual.right)
    close(dual.multipliers, 1 / dual.values)
    gram = wide.mT @ wide
    close(weights.e_scores(new_queries), dual.e_scores(new_queries @ gram @ keys.mT))
    close(weights.r_scores(new_keys), dual.r_scores(queries @ gram @ new_keys.mT))
    assert (weights.e_scores(new_queries) - weights.e_scores(queries[:, :11])).abs().max() > 0.1
    assert objective(weights, queries, keys).abs().max() < 1e-12
    moved = ksvd.Dual(dual.left + 0.1 * random(*dual.left.shape, seed=9), dual.values, dual.right)
    beside = ksvd.primal(moved, queries, keys, projection)
    assert (objective(beside, queries, keys).abs() > 1e-3).all()
    squared = ksvd.Primal(weights.query_weight, weights.key_weight, dual.values, projection)
    assert (objective(squared, queries, keys).abs() > 1e-3).all()


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 7), st.integers(1, 9), st.integers(0, 10**6))
def test_primal_and_dual_agree_at_every_size(n, m, head_dim, s, seed):
    queries, keys = random(n, head_dim, seed=seed), random(m, head_dim, seed=seed + 1)
    dual = ksvd.dual(queries, keys, s)
    assert dual.values.shape == (min(n, m, head_dim, s),)
    close(dual.values, torch.linalg.svdvals(queries @ keys.mT)[: len(dual.values)], 1e-9)
    assert ksvd.residual(dual, queries, keys) < 1e-13
    weights = ksvd.primal(dual, queries, keys)
    close(weights.e_scores(queries), dual.e, 1e-9)
    close(dual.e @ dual.right.mT, (queries @ keys.mT) @ projector(dual.right), 1e-9)
    assert objective(weights, queries, keys).abs().max() < 1e-11


def test_an_objective_of_zero_is_necessary_and_not_sufficient_and_can_be_trained_through():
    # J is indefinite: a pair of components that are no singular vectors, one J above and one below, can cancel
    queries, keys, _, _ = problem(batch=())
    left, right = (torch.linalg.qr(random(rows, 2, seed=rows)).Q for rows in (40, 30))
    wrong = ksvd.Dual(left, torch.ones(2, dtype=torch.float64), right)
    weights = ksvd.primal(wrong, queries, keys)
    e, r = weights.e_scores(queries), weights.r_scores(keys)
    trace = (weights.query_weight * weights.key_weight).sum()
    multipliers = (2 * trace / (e.square().sum() + r.square().sum())).expand(2)
    assert ksvd.objective(e, r, weights.query_weight, weights.key_weight, multipliers).abs() < 1e-12
    assert ksvd.residual(wrong, queries, keys) > 0.1
    dual = ksvd.dual(queries, keys, 3)
    start, other = (weights := ksvd.primal(dual, queries, keys)).query_weight, weights.key_weight

    def gradient(weight, convention):
        weight = weight.detach().requires_grad_()
        value = ksvd.objective(queries @ weight, keys @ other, weight, other, dual.multipliers, convention)
        return torch.autograd.grad(value, weight)[0]

    for convention in ("paper", "code"):
        assert gradient(start + 0.1 * random(6, 3), convention).isfinite().all()
    close(gradient(start, "paper"), torch.zeros(6, 3))  # stationary: Φ_qᵀ E Λ − W_r = 0


def test_the_two_conventions_are_the_written_out_sums_and_means():
    e, r, w_e, w_r = random(2, 7, 3), random(2, 5, 3, seed=1), random(2, 4, 3), random(2, 4, 3, seed=2)
    lam = random(2, 3)
    paper, code = (ksvd.objective(e, r, w_e, w_r, lam, name) for name in ("paper", "code"))
    for head in range(2):
        big, trace = torch.diag(lam[head]), torch.trace(w_e[head].mT @ w_r[head])
        close(paper[head], sum(x @ big @ x for x in [*e[head], *r[head]]) / 2 - trace)
        means = sum((big @ x).norm() ** 2 for x in e[head]) / 14 + sum((big @ x).norm() ** 2 for x in r[head]) / 10
        close(code[head], means - trace)
    assert (paper - code).abs().max() > 0.1
    values = random(4, 3)
    close(ksvd.regulariser(values, "paper"), sum(value**2 for value in values.flatten()))
    close(ksvd.regulariser(values, "code"), sum(row.mean() ** 2 for row in values) / 4)
    queries, keys, _, _ = problem(m=40)  # the code's J is zero at another scale of the multipliers
    dual = ksvd.dual(queries, keys, 3)
    weights = ksvd.primal(dual, queries, keys)
    rescaled = ksvd.Primal(weights.query_weight, weights.key_weight, (40 / dual.values).sqrt())
    assert objective(rescaled, queries, keys, "code").abs().max() < 1e-12
    assert (objective(weights, queries, keys, "code").abs() > 0.1).all()


def test_random_features_approach_the_exponential_kernel_and_are_positive():
    queries, keys = 0.5 * random(2, 6, 8), 0.5 * random(2, 5, 8, seed=1)
    exact, errors = (0.2 * queries @ keys.mT).exp(), []
    for count in (64, 65536):
        q, k = (ksvd.random_features(x, 0.2, count, seed=3) for x in (queries, keys))
        assert (q > 0).all()
        errors.append(((q @ k.mT - exact).abs() / exact).max().item())
    assert errors[1] < 0.05 < errors[0]
    first, again, other = (ksvd.random_features(queries, 0.2, 64, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_sampled_rows_are_evenly_spaced_among_those_that_count():
    x = torch.arange(10.0)[:, None]
    assert ksvd.sampled_rows(x, 4).flatten().tolist() == [0, 3, 6, 9]
    assert torch.equal(ksvd.sampled_rows(x, 99), x.double())
    x, real = random(2, 3, 8, 4).float(), torch.tensor([[1, 1, 0, 1, 1, 1, 0, 1], [0, 0, 0, 1, 0, 1, 0, 0]]).bool()
    rows = ksvd.evenly_spaced(x, 4, real[:, None])
    assert rows.dtype == torch.float32
    for batch in range(2):
        remaining = x[batch][:, real[batch]]
        places = [i * (remaining.shape[1] - 1) // 3 for i in range(4)]
        assert torch.equal(rows[batch], remaining[:, places])
    assert torch.equal(ksvd.evenly_spaced(x, 4), ksvd.sampled_rows(x, 4).float())
    assert not torch.equal(rows, ksvd.evenly_spaced(x, 4)), "the control: hidden rows would be read"


def test_unit_rows_have_right_and_finite_gradients_and_centred_keys_a_kernel_without_row_means():
    assert ksvd.unit(random(3, 4).float()).dtype == torch.float32
    tiny, zero = torch.full((1, 4), 1e-30), torch.zeros(2, 4, requires_grad=True)
    close(ksvd.unit(tiny), torch.full((1, 4), 0.5), 1e-6)
    assert (tiny / tiny.norm() - 0.5).abs().max() > 0.1, "the control: its squares are 0 in float32"
    assert torch.autograd.gradcheck(ksvd.unit, random(3, 4).requires_grad_())
    ksvd.unit(zero).sum().backward()
    assert (zero.grad.abs() <= 1).all()
    queries, keys, _, kernel = problem()
    close(queries @ ksvd.centre_rows(keys).mT, kernel - kernel.mean(-1, keepdim=True))
    alike = random(2, 1, 6).repeat(1, 30, 1)
    alike[1, 0] += 0.2
    assert ksvd.centre_rows(alike)[0].eq(0).all()
    assert ksvd.dual(queries[:2], ksvd.centre_rows(alike), 3).rank.tolist() == [0, 1]
    assert (alike[0] - alike[0].mean(0)).abs().max() > 0, "the control: rounding is left otherwise"


def through(kernel, rows, columns, s):
    """The dual of Nyström's features, and the kernel that they give."""
    map_ = ksvd.nystrom(kernel[..., rows, :][..., columns], s)
    queries, keys = map_.query_features(kernel[..., columns]), map_.key_features(kernel[..., rows, :])
    return ksvd.dual(queries, keys, s), queries @ keys.mT


def test_nystrom_is_exact_where_the_block_has_the_rank_of_the_kernel_and_its_error_within_its_bound():
    queries, keys, _, kernel = problem(n=60, m=50)
    dual, approximation = through(kernel, sampled_index(60, 9), sampled_index(50, 8), 8)
    close(approximation, kernel, 1e-9)
    exact = ksvd.dual(queries, keys, 6)
    close(dual.values[:, :6], exact.values, 1e-9)
    close(projector(dual.left[..., :3]), projector(exact.left[..., :3]), 1e-9)
    short, _ = through(kernel, sampled_index(60, 9), sampled_index(50, 3), 8)
    assert (short.values[:, 0] - exact.values[:, 0]).abs().max() > 1e-6
    map_ = ksvd.nystrom(kernel[:, :20, :20], 6)
    unseen = map_.query_features(kernel[:, 40:, :20]) @ map_.key_features(kernel[:, :20, 40:]).mT
    close(unseen, kernel[:, 40:, 40:], 1e-9)
    queries, keys = (ksvd.cosine_features(random(n, 3, seed=n)) for n in (60, 50))
    kernel = (2 * queries @ keys.mT).exp()
    _, sigma, vh = torch.linalg.svd(kernel)
    for k in (3, 6, 9):
        rows, columns = sampled_index(60, k), sampled_index(50, k)
        error = torch.linalg.matrix_norm(kernel - through(kernel, rows, columns, k)[1], 2)
        oblique = torch.linalg.matrix_norm(kernel[:, columns] @ torch.linalg.inv(kernel[rows][:, columns]), 2)
        sampled = torch.linalg.matrix_norm(torch.linalg.inv(vh[:k, columns]), 2)
        assert sigma[k] * (1 - 1e-9) <= error <= sigma[k] * oblique * sampled
    assert error > 1.5 * sigma[k], "the control: without the two factors the bound fails"


def test_truncated_solvers_give_the_full_svd():
    attention = (3 * random(2, 80, 70)).softmax(-1)
    dual, full = ksvd.truncated(attention, 5), ksvd.matrix_dual(attention, 5)
    close(dual.values, full.values)
    close(dual.e @ dual.right.mT, full.e @ full.right.mT)
    assert (ksvd.matrix_residual(dual, attention) < 1e-10).all()
    assert torch.equal(dual.left, ksvd.truncated(attention, 5).left)
    close(ksvd.truncated(attention, 40).values, torch.linalg.svdvals(attention)[:, :40])
    close(ksvd.truncated(attention.mT, 5).values, full.values)
    assert ksvd.truncated(torch.zeros(2, 50, 50), 3).rank.tolist() == [0, 0]
    low = random(60, 2) @ random(2, 50, seed=1)
    dual = ksvd.truncated(low, 5)
    assert dual.rank == 2
    close(dual.e @ dual.right.mT, low)


@unwatched()
def test_refusals():
    queries, keys, projection, kernel = problem("few rows")
    solvers = [(ksvd.dual, queries, keys), (ksvd.sampled_rows, queries), (ksvd.random_features, queries, 1.0)]
    solvers += [(solver, kernel) for solver in (ksvd.matrix_dual, ksvd.truncated, ksvd.nystrom)]
    cases = [(*solver, s, "1 or more") for solver in solvers for s in (0, -3)]
    sides = {"query features contain": queries, "key features contain": keys, "projection contains": projection}
    for value in (math.nan, math.inf):
        for name, side in sides.items():
            (broken := side.clone())[1, 2, 3] = value
            q, k, rows = (broken if other is side else other for other in sides.values())
            cases.append((ksvd.dual, q, k, 3, rows, f"The {name} NaN or Inf"))
        (broken := kernel.clone())[1, 3, 4] = value
        for solver, s in ((ksvd.matrix_dual, 3), (ksvd.truncated, 20), (ksvd.truncated, 3), (ksvd.nystrom, 3)):
            cases.append((solver, broken, s, "kernel matrix contains NaN or Inf"))
    e, r, weight = random(7, 3), random(5, 3), random(4, 3)
    for name in ("x", "papr", "Code", None):
        words = f"^Unknown convention of the objective J: {name!r}"
        cases += [
            (ksvd.objective, e, r, weight, weight, random(3), name, words),
            (ksvd.regulariser, weight, name, words),
        ]
    for function, *arguments, words in cases:
        with pytest.raises(UsageError, match=words) as refusal:
            function(*arguments)
        assert "convention" not in words or ("paper" in refusal.value.remedy and "code" in refusal.value.remedy)


def test_angles_between_planted_spaces_are_exact_zero_for_symmetric_and_right_for_orthogonal_ones():
    basis = torch.linalg.qr(random(12, 12)).Q
    angles = torch.tensor([0.0, 1e-9, 1e-3, 0.5, 1.2, torch.pi / 2], dtype=torch.float64)
    left = basis[:, :6]
    right = left * angles.cos() + basis[:, 6:] * angles.sin()
    turned = right @ torch.linalg.qr(random(6, 6, seed=1)).Q
    close(ksvd.principal_angles(left, turned), angles, 1e-14)
    naive = torch.linalg.svdvals(left.mT @ turned).clamp(max=1).acos()
    assert (naive - angles).abs().max() > 1e-10
    some = torch.tensor([1.0, 0, 1, 1, 0, 0], dtype=torch.float64)  # zero columns on both sides are no directions
    close(ksvd.principal_angles(left * some, right * some)[:3], angles[[0, 2, 3]], 1e-14)
    x, sizes = ksvd.cosine_features(random(2, 30, 5)), torch.tensor([2, 4])
    signs = torch.tensor([1.0, -1, 1, -1, 1], dtype=torch.float64)
    for symmetric in (dual := ksvd.dual(x, x, 5), ksvd.dual(x * signs, x, 5)):
        close(ksvd.mean_angle(symmetric.left, symmetric.right, sizes), torch.zeros(2))
    away = ksvd.dual(*torch.eye(8).double().split(4, 1), 4)
    close(ksvd.mean_angle(away.left, away.right, torch.tensor(3)), torch.tensor(torch.pi / 2, dtype=torch.float64))
    other = ksvd.dual(x, random(2, 30, 5, seed=1), 5)
    between = ksvd.mean_angle(other.left, other.right, sizes)
    assert ((between > 0.1) & (between < torch.pi / 2)).all()
    assert ksvd.mean_angle(dual.left, dual.right, torch.tensor([0, 2])).isnan().tolist() == [True, False]


def test_the_share_of_values_inside_a_space_is_by_chance_that_of_the_dimensions():
    basis = torch.linalg.qr(torch.cat([torch.ones(10, 1, dtype=torch.float64), random(10, 4)], -1)).Q[:, 1:]
    inside, half = basis[:, :2] @ random(2, 3), basis[:, :1] + basis[:, 3:4]
    for values, size, share in ((inside + 5.0, 2, 1.0), (half, 2, 0.5), (half, 0, 0.0)):
        close(ksvd.share_inside(values, basis, torch.tensor(size)), torch.tensor(share))
    assert ksvd.share_inside(torch.full((10, 3), 0.1), basis, torch.tensor(2)).isnan()
    # normal values in the space of K(I − 11ᵀ/n): s/(n − 1); in that of K, whose first mode is constant: less
    spaces = torch.linalg.qr(random(4000, 20, 5)).Q
    shares = ksvd.share_inside(random(4000, 20, 3, seed=1), spaces, torch.full((4000,), 5))
    assert shares.mean().item() == pytest.approx(5 / 20, abs=0.01)
    queries, keys = random(400, 20, 4), 0.01 * random(400, 20, 4, seed=1) + 1.0
    values, sizes = random(400, 20, 50, seed=2), torch.full((400,), 2)
    for side, share in ((ksvd.centre_rows(keys), 2 / 19), (keys, 1 / 19)):
        inside = ksvd.share_inside(values, ksvd.dual(queries, side, 4).right, sizes)
        assert inside.mean().item() == pytest.approx(share, rel=0.02)
