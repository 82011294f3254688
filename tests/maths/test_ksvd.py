"""Tests that dual, primal, truncated and Nyström kernel SVDs are one, and their objective vanishes."""

import doctest

import numpy as np
import pytest
import torch
from heads import random
from hypothesis import given, settings
from hypothesis import strategies as st
from watch import unwatched

from attnlens.errors import UsageError
from attnlens.maths import ksvd

TIGHT = 1e-10
F_IS = ["identity", "few rows", "many rows"]


def sampled_index(n: int, count: int) -> list[int]:
    return torch.linspace(0, n - 1, min(n, count), dtype=torch.float64).long().tolist()


def close(ours, theirs, tolerance=TIGHT):
    torch.testing.assert_close(ours, theirs.to(ours), rtol=tolerance, atol=tolerance)


def problem(f="identity", n=40, m=30, head_dim=6, batch=(3,), seed=0):
    """Cosine features of both sides, F, and the kernel that they mean, formed."""
    decaying = torch.logspace(0, -1, head_dim, dtype=torch.float64)
    queries, keys = (
        ksvd.cosine_features(random(*batch, rows, head_dim, seed=seed + place) * decaying)
        for place, rows in enumerate((n, m))
    )
    rows = {"identity": None, "few rows": 4, "many rows": 20}[f]
    tokens = random(*batch, 50, head_dim, seed=seed + 7)
    projection = None if rows is None else ksvd.sampled_rows(tokens, rows)
    mapped = torch.eye(head_dim, dtype=torch.float64) if projection is None else projection
    return queries, keys, projection, (queries @ mapped.mT) @ (keys @ mapped.mT).mT


def projector(basis):
    return basis @ basis.mT


def test_the_examples_of_the_room_run_and_show_what_they_say():
    found = doctest.testmod(ksvd)
    assert found.attempted >= 10
    assert found.failed == 0


# --- dual -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("f", F_IS)
@pytest.mark.parametrize("s", [1, 3, 6])
def test_the_dual_is_the_truncated_svd_of_the_formed_kernel(f, s):
    queries, keys, projection, kernel = problem(f)
    found = ksvd.dual(queries, keys, s, projection)
    u, sigma, vh = torch.linalg.svd(kernel)
    steps = min(s, 4 if f == "few rows" else 6)
    assert found.values.shape == (3, steps)
    close(found.values, sigma[:, :steps])
    close(projector(found.left), projector(u[..., :steps]))
    close(projector(found.right), projector(vh.mT[..., :steps]))
    close(kernel @ found.right, found.e)
    close(kernel.mT @ found.left, found.r)
    close(found.e.square().sum(-2), found.values.square())
    assert (found.rank == steps).all()


@pytest.mark.parametrize("f", F_IS)
def test_the_residual_is_rounding_for_the_solution_and_for_nothing_else(f):
    queries, keys, projection, kernel = problem(f)
    found = ksvd.dual(queries, keys, 3, projection)
    assert (ksvd.residual(found, queries, keys, projection) < 1e-13).all()
    assert (ksvd.matrix_residual(found, kernel) < 1e-13).all()
    shifted = torch.zeros(3, 70, 70, dtype=torch.float64)
    shifted[:, :40, 40:], shifted[:, 40:, :40] = kernel, kernel.mT
    stacked = torch.cat([found.left, found.right], -2)
    close(shifted @ stacked, stacked * found.values[..., None, :])
    disturbed = ksvd.Dual(found.left + 0.1 * random(*found.left.shape, seed=9), found.values, found.right)
    expected = torch.linalg.matrix_norm(
        shifted @ (moved := torch.cat([disturbed.left, disturbed.right], -2)) - moved * found.values[..., None, :]
    ) / (2**0.5 * found.values.norm(dim=-1))
    close(ksvd.residual(disturbed, queries, keys, projection), expected)
    assert (expected > 0.1).all()


def test_eigenvalues_of_the_shifted_matrix_are_plus_and_minus_sigma():
    queries, keys, _, kernel = problem(n=12, m=9, batch=())
    shifted = torch.zeros(21, 21, dtype=torch.float64)
    shifted[:12, 12:], shifted[12:, :12] = kernel, kernel.mT
    sigma = ksvd.dual(queries, keys, 6).values
    expected = torch.cat([-sigma, torch.zeros(9), sigma.flip(-1)])
    close(torch.linalg.eigvalsh(shifted), expected)


@pytest.mark.parametrize("s", [1, 3, 5])
def test_the_error_of_s_components_is_the_norm_of_the_others_and_the_best(s):
    queries, keys, _, kernel = problem(batch=())
    found = ksvd.dual(queries, keys, s)
    error = torch.linalg.matrix_norm(kernel - found.e @ found.right.mT)
    close(error, torch.linalg.svdvals(kernel)[s:].norm())
    rival = torch.linalg.qr(random(30, s, seed=5)).Q
    assert torch.linalg.matrix_norm(kernel - kernel @ projector(rival)) > error + 0.1


def test_degenerate_singular_values_give_the_space_and_not_its_vectors():
    left, right = (torch.linalg.qr(random(20, 4, seed=seed)).Q for seed in (0, 1))
    sigma = torch.tensor([3.0, 3.0, 3.0, 1.0], dtype=torch.float64)
    found = ksvd.dual(left * sigma, right, 3)
    turned = ksvd.dual(left * sigma @ (turn := torch.linalg.qr(random(4, 4, seed=2)).Q), right @ turn, 3)
    for solution in (found, turned):
        close(projector(solution.left), projector(left[:, :3]))
        close(projector(solution.right), projector(right[:, :3]))
        close(solution.e @ solution.right.mT, 3 * left[:, :3] @ right[:, :3].mT)
    # the control: the vectors themselves do differ
    assert (found.left.abs() - turned.left.abs()).abs().max() > 0.01


def test_more_components_than_the_features_allow_are_cut():
    queries, keys, _, _ = problem(head_dim=6)
    found = ksvd.dual(queries, keys, 50)
    assert found.values.shape == (3, 6)
    short = ksvd.dual(queries[:, :2], keys, 50)
    assert short.values.shape == (3, 2)
    assert (ksvd.residual(short, queries[:, :2], keys) < 1e-13).all()


@pytest.mark.parametrize("s", [0, -3])
def test_no_components_are_refused(s):
    queries, keys, _, kernel = problem()
    for refused in (
        lambda: ksvd.dual(queries, keys, s),
        lambda: ksvd.matrix_dual(kernel, s),
        lambda: ksvd.truncated(kernel, s),
        lambda: ksvd.nystrom(kernel, s),
        lambda: ksvd.sampled_rows(queries, s),
        lambda: ksvd.random_features(queries, 1.0, s),
    ):
        with pytest.raises(UsageError, match="1 or more"):
            refused()


def test_components_beyond_the_rank_are_zeros_in_each_head_by_itself():
    flat = torch.cat([random(1, 20, 2), torch.zeros(1, 20, 4)], -1)
    queries, keys = torch.cat([flat, random(1, 20, 6, seed=1)]), random(2, 25, 6, seed=2)
    found = ksvd.dual(queries, keys, 5)
    assert found.rank.tolist() == [2, 5]
    assert (found.left[0, :, 2:] == 0).all()
    assert (found.right[0, :, 2:] == 0).all()
    assert (found.multipliers[0, 2:] == 0).all()
    assert (ksvd.residual(found, queries, keys) < 1e-13).all()
    weights = ksvd.primal(found, queries, keys)
    close(weights.e_scores(queries), found.e)
    close(weights.multipliers[..., None, :] * found.e, found.left)
    assert objective(found, weights, queries, keys).abs().max() < 1e-12


def test_a_kernel_of_orthogonal_queries_and_keys_is_zero_and_not_rounding():
    turn = torch.linalg.qr(random(6, 6)).Q
    queries, keys = random(20, 3) @ turn[:3], random(20, 3, seed=1) @ turn[3:]
    found = ksvd.dual(queries, keys, 6)
    assert found.rank == 0
    assert ksvd.residual(found, queries, keys).isnan()
    assert (torch.linalg.svdvals(queries @ keys.mT) > 0).any()


def test_zero_queries_and_keys_divide_nothing():
    queries, keys = random(2, 15, 4), random(2, 15, 4, seed=1)
    queries[:, 3:9] = 0
    keys[1] = 0
    q, k = ksvd.cosine_features(queries), ksvd.cosine_features(keys)
    assert (q[:, 3:9] == 0).all()
    assert q.isfinite().all()
    close(q[:, :3].norm(dim=-1), torch.ones(2, 3))
    found = ksvd.dual(q, k, 4)
    for tensor in (found.left, found.values, found.right, found.multipliers):
        assert tensor.isfinite().all()
    assert found.rank.tolist() == [4, 0]
    weights = ksvd.primal(found, q, k)
    assert (weights.e_scores(q)[:, 3:9] == 0).all()
    assert (q / q.norm(dim=-1, keepdim=True)).isnan().any()


@given(st.floats(-300, 300))
def test_the_cosine_does_not_feel_the_length(power):
    x = random(5, 4)
    close(ksvd.cosine_features(x * 10.0**power), x / x.norm(dim=-1, keepdim=True), 1e-13)


def test_leading_axes_are_kept_and_float32_is_widened():
    queries, keys, projection, kernel = problem("many rows", batch=(2, 3))
    found = ksvd.dual(queries.float(), keys.float(), 4, projection.float())
    assert found.left.shape == (2, 3, 40, 4)
    assert found.left.dtype == torch.float64
    close(found.values, torch.linalg.svdvals(kernel)[..., :4], 1e-5)
    alone = ksvd.dual(queries[1, 2], keys[1, 2], 4, projection[1, 2])
    close(ksvd.dual(queries, keys, 4, projection).values[1, 2], alone.values)


# --- primal -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("f", F_IS)
def test_primal_scores_are_dual_scores_and_the_weights_are_crossed(f):
    queries, keys, projection, _ = problem(f)
    found = ksvd.dual(queries, keys, 3, projection)
    weights = ksvd.primal(found, queries, keys, projection)
    close(weights.e_scores(queries), found.e)
    close(weights.r_scores(keys), found.r)
    wide = torch.eye(6, dtype=torch.float64) if projection is None else projection
    # W_e = Σ_j Fφ_k(x_j) h_{r,j}ᵀ, written out
    close(weights.query_weight, sum((wide @ keys[:, j, :, None]) @ found.right[:, j, None] for j in range(30)))
    close(weights.key_weight, sum((wide @ queries[:, i, :, None]) @ found.left[:, i, None] for i in range(40)))
    uncrossed = ksvd.Primal(weights.key_weight, weights.query_weight, weights.multipliers, projection)
    assert (uncrossed.e_scores(queries) - found.e).abs().max() > 0.1


@pytest.mark.parametrize("f", F_IS)
def test_the_multipliers_are_the_inverse_singular_values(f):
    queries, keys, projection, _ = problem(f)
    found = ksvd.dual(queries, keys, 3, projection)
    close(found.e * found.multipliers[..., None, :], found.left)
    close(found.r * found.multipliers[..., None, :], found.right)
    close(found.multipliers, 1 / found.values)
    assert (found.e * found.values[..., None, :] - found.left).abs().max() > 0.1


@pytest.mark.parametrize("f", F_IS)
def test_out_of_sample_the_primal_is_the_dual(f):
    queries, keys, projection, _ = problem(f)
    new_queries, new_keys, _, _ = problem(n=11, m=13, seed=20)
    found = ksvd.dual(queries, keys, 3, projection)
    weights = ksvd.primal(found, queries, keys, projection)
    gram = torch.eye(6, dtype=torch.float64) if projection is None else projection.mT @ projection
    close(weights.e_scores(new_queries), found.e_scores(new_queries @ gram @ keys.mT))
    close(weights.r_scores(new_keys), found.r_scores(queries @ gram @ new_keys.mT))
    assert (weights.e_scores(new_queries) - weights.e_scores(queries[:, :11])).abs().max() > 0.1


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 7), st.integers(1, 9), st.integers(0, 10**6))
def test_primal_and_dual_agree_at_every_size(n, m, head_dim, s, seed):
    queries, keys = random(n, head_dim, seed=seed), random(m, head_dim, seed=seed + 1)
    found = ksvd.dual(queries, keys, s)
    assert found.values.shape == (min(n, m, head_dim, s),)
    close(ksvd.primal(found, queries, keys).e_scores(queries), found.e, 1e-9)
    close(found.e @ found.right.mT, (queries @ keys.mT) @ projector(found.right), 1e-9)


# --- the objective ----------------------------------------------------------------------------------------------------


def objective(found, weights, queries, keys, convention="paper"):
    e, r = weights.e_scores(queries), weights.r_scores(keys)
    return ksvd.objective(e, r, weights.query_weight, weights.key_weight, weights.multipliers, convention)


@pytest.mark.parametrize("f", F_IS)
def test_the_objective_is_zero_at_the_solution_and_not_beside_it(f):
    queries, keys, projection, _ = problem(f)
    found = ksvd.dual(queries, keys, 3, projection)
    weights = ksvd.primal(found, queries, keys, projection)
    assert objective(found, weights, queries, keys).abs().max() < 1e-12
    moved = ksvd.Dual(found.left + 0.1 * random(*found.left.shape, seed=9), found.values, found.right)
    beside = ksvd.primal(moved, queries, keys, projection)
    assert (objective(moved, beside, queries, keys).abs() > 1e-3).all()
    squared = ksvd.Primal(weights.query_weight, weights.key_weight, found.values, projection)
    assert (objective(found, squared, queries, keys).abs() > 1e-3).all()


def test_zero_is_necessary_and_not_sufficient():
    # J is indefinite: a pair of components that are no singular vectors, one J above and one below, can cancel
    queries, keys, _, _ = problem(batch=())
    left, right = (torch.linalg.qr(random(rows, 2, seed=rows)).Q for rows in (40, 30))
    wrong = ksvd.Dual(left, torch.ones(2, dtype=torch.float64), right)
    weights = ksvd.primal(wrong, queries, keys)
    e, r = weights.e_scores(queries), weights.r_scores(keys)
    halves = (e.square().sum(-2) + r.square().sum(-2)) / 2
    trace = (weights.query_weight * weights.key_weight).sum(-2)
    multipliers = (trace.sum() / halves.sum()).expand(2)
    assert ksvd.objective(e, r, weights.query_weight, weights.key_weight, multipliers).abs() < 1e-12
    assert ksvd.residual(wrong, queries, keys) > 0.1


def test_the_two_conventions_are_the_written_out_sums_and_means():
    e, r, w_e, w_r, lam = (
        random(2, 7, 3),
        random(2, 5, 3, seed=1),
        random(2, 4, 3),
        random(2, 4, 3, seed=2),
        random(2, 3),
    )
    paper, code = (ksvd.objective(e, r, w_e, w_r, lam, name) for name in ("paper", "code"))
    for head in range(2):
        big = torch.diag(lam[head])
        trace = torch.trace(w_e[head].mT @ w_r[head])
        sums = sum(x @ big @ x for x in e[head]) / 2 + sum(x @ big @ x for x in r[head]) / 2 - trace
        means = sum((big @ x).norm() ** 2 for x in e[head]) / 14 + sum((big @ x).norm() ** 2 for x in r[head]) / 10
        close(paper[head], sums)
        close(code[head], means - trace)
    assert (paper - code).abs().max() > 0.1
    values = random(4, 3)
    close(ksvd.regulariser(values, "paper"), sum(value**2 for value in values.flatten()))
    close(ksvd.regulariser(values, "code"), sum(row.mean() ** 2 for row in values) / 4)


@pytest.mark.parametrize("convention", ["x", "papr", "Code", None])
@unwatched()
def test_another_convention_is_refused_with_both_names(convention):
    e, r, weight, multipliers = random(7, 3), random(5, 3), random(4, 3), random(3)
    for refused in (
        lambda: ksvd.objective(e, r, weight, weight, multipliers, convention),
        lambda: ksvd.regulariser(random(4, 3), convention),
    ):
        with pytest.raises(UsageError, match=f"^Unknown convention of the objective J: {convention!r}") as refusal:
            refused()
        assert "paper" in refusal.value.remedy
        assert "code" in refusal.value.remedy


def test_the_code_is_zero_at_another_scale_of_the_multipliers():
    queries, keys, _, _ = problem(m=40)
    found = ksvd.dual(queries, keys, 3)
    weights = ksvd.primal(found, queries, keys)
    rescaled = ksvd.Primal(weights.query_weight, weights.key_weight, (40 / found.values).sqrt())
    assert objective(found, rescaled, queries, keys, "code").abs().max() < 1e-12
    assert (objective(found, weights, queries, keys, "code").abs() > 0.1).all()


def test_the_objective_can_be_trained_through():
    queries, keys, _, _ = problem(batch=())
    found = ksvd.dual(queries, keys, 3)
    weight = (ksvd.primal(found, queries, keys).query_weight + 0.1 * random(6, 3)).requires_grad_()
    other = ksvd.primal(found, queries, keys).key_weight
    for convention in ("paper", "code"):
        value = ksvd.objective(queries @ weight, keys @ other, weight, other, found.multipliers, convention)
        (gradient,) = torch.autograd.grad(value, weight)
        assert gradient.isfinite().all()
    # stationarity: at the solution the gradient in W_e is Φ_qᵀ E Λ − W_r = 0
    start = ksvd.primal(found, queries, keys).query_weight.requires_grad_()
    value = ksvd.objective(queries @ start, keys @ other, start, other, found.multipliers)
    (at_solution,) = torch.autograd.grad(value, start)
    close(at_solution, torch.zeros(6, 3))


# --- features ---------------------------------------------------------------------------------------------------------


def test_random_features_approach_the_exponential_kernel_and_are_positive():
    queries, keys = 0.5 * random(2, 6, 8), 0.5 * random(2, 5, 8, seed=1)
    exact = (0.2 * queries @ keys.mT).exp()
    errors = []
    for count in (64, 65536):
        q, k = (ksvd.random_features(x, 0.2, count, seed=3) for x in (queries, keys))
        assert (q > 0).all()
        errors.append(((q @ k.mT - exact).abs() / exact).max().item())
    assert errors[1] < 0.05 < errors[0]
    same = ksvd.random_features(queries, 0.2, 64, seed=3)
    assert torch.equal(same, ksvd.random_features(queries, 0.2, 64, seed=3))
    assert not torch.equal(same, ksvd.random_features(queries, 0.2, 64, seed=4))


def test_random_features_have_the_same_identities():
    queries, keys = (ksvd.random_features(random(2, 30, 4, seed=seed), 0.5, 12) for seed in (0, 1))
    found = ksvd.dual(queries, keys, 5)
    close(found.values, torch.linalg.svdvals(queries @ keys.mT)[:, :5])
    weights = ksvd.primal(found, queries, keys)
    close(weights.e_scores(queries), found.e)
    assert objective(found, weights, queries, keys).abs().max() < 1e-11


def test_sampled_rows_are_evenly_spaced():
    x = torch.arange(10.0)[:, None]
    assert ksvd.sampled_rows(x, 4).flatten().tolist() == [0, 3, 6, 9]
    assert torch.equal(ksvd.sampled_rows(x, 99), x.double())
    assert sampled_index(10, 4) == [0, 3, 6, 9]


def test_evenly_spaced_rows_are_those_that_are_kept_and_repeat_where_they_are_few():
    x, kept = random(2, 3, 8, 4).float(), torch.tensor([[1, 1, 0, 1, 1, 1, 0, 1], [0, 0, 0, 1, 0, 1, 0, 0]]).bool()
    found = ksvd.evenly_spaced(x, 4, kept[:, None])
    assert found.dtype == torch.float32
    for batch in range(2):
        real = x[batch][:, kept[batch]]
        n = real.shape[1]
        assert torch.equal(found[batch], torch.stack([real[:, i * (n - 1) // 3] for i in range(4)], 1))
    assert torch.equal(ksvd.evenly_spaced(x, 4), ksvd.sampled_rows(x, 4).float())
    assert not torch.equal(found, ksvd.evenly_spaced(x, 4)), "the control: what is not kept would be read"


def test_unit_rows_keep_their_type_and_have_right_and_finite_gradients():
    assert ksvd.unit(random(3, 4).float()).dtype == torch.float32
    tiny = torch.full((1, 4), 1e-30)
    close(ksvd.unit(tiny), torch.full((1, 4), 0.5), 1e-6)
    assert (tiny / tiny.norm() - 0.5).abs().max() > 0.1, "the control: its squares are 0 in float32"
    assert torch.autograd.gradcheck(ksvd.unit, random(3, 4).requires_grad_())
    zero = torch.zeros(2, 4, requires_grad=True)
    ksvd.unit(zero).sum().backward()
    assert (zero.grad.abs() <= 1).all()


def test_centring_key_features_takes_the_row_means_out_of_the_kernel():
    queries, keys, _, kernel = problem()
    close(queries @ ksvd.centre_rows(keys).mT, kernel - kernel.mean(-1, keepdim=True))
    alike = random(2, 1, 6).repeat(1, 30, 1)
    alike[1, 0] += 0.2
    assert ksvd.centre_rows(alike)[0].eq(0).all()
    assert ksvd.dual(queries[:2], ksvd.centre_rows(alike), 3).rank.tolist() == [0, 1]
    assert (alike[0] - alike[0].mean(0)).abs().max() > 0, "the control: rounding is left otherwise"


# --- Nyström ----------------------------------------------------------------------------------------------------------


def through(kernel, rows, columns, s):
    """The dual of Nyström's features, and the kernel that they mean."""
    map_ = ksvd.nystrom(kernel[..., rows, :][..., columns], s)
    queries, keys = map_.query_features(kernel[..., columns]), map_.key_features(kernel[..., rows, :])
    return ksvd.dual(queries, keys, s), queries @ keys.mT


def test_nystrom_is_exact_where_the_block_has_the_kernels_rank():
    queries, keys, _, kernel = problem(n=60, m=50)
    found, approximation = through(kernel, sampled_index(60, 9), sampled_index(50, 8), 8)
    close(approximation, kernel, 1e-9)
    exact = ksvd.dual(queries, keys, 6)
    close(found.values[:, :6], exact.values, 1e-9)
    close(projector(found.left[..., :3]), projector(exact.left[..., :3]), 1e-9)
    short, _ = through(kernel, sampled_index(60, 9), sampled_index(50, 3), 8)
    assert (short.values[:, 0] - exact.values[:, 0]).abs().max() > 1e-6


def test_nystroms_error_keeps_its_bound():
    queries, keys = (ksvd.cosine_features(random(n, 3, seed=n)) for n in (60, 50))
    kernel = (2 * queries @ keys.mT).exp()
    _, sigma, vh = torch.linalg.svd(kernel)
    for k in (3, 6, 9):
        rows, columns = sampled_index(60, k), sampled_index(50, k)
        _, approximation = through(kernel, rows, columns, k)
        error = torch.linalg.matrix_norm(kernel - approximation, 2)
        oblique = torch.linalg.matrix_norm(kernel[:, columns] @ torch.linalg.inv(kernel[rows][:, columns]), 2)
        sampled = torch.linalg.matrix_norm(torch.linalg.inv(vh[:k, columns]), 2)
        assert sigma[k] * (1 - 1e-9) <= error <= sigma[k] * oblique * sampled
    # the control: without the two factors the bound fails
    assert error > 1.5 * sigma[k]


def test_nystrom_extends_to_unseen_tokens():
    _, _, _, kernel = problem(n=60, m=50, batch=())
    map_ = ksvd.nystrom(kernel[:20, :20], 6)
    new = map_.query_features(kernel[40:, :20]) @ map_.key_features(kernel[:20, 40:]).mT
    close(new, kernel[40:, 40:], 1e-9)


# --- truncated solvers ------------------------------------------------------------------------------------------------


def test_truncated_solvers_give_the_full_svd():
    scores = 3 * random(2, 80, 70)
    attention = scores.softmax(-1)
    found, full = ksvd.truncated(attention, 5), ksvd.matrix_dual(attention, 5)
    close(found.values, full.values)
    close(found.e @ found.right.mT, full.e @ full.right.mT)
    assert (ksvd.matrix_residual(found, attention) < TIGHT).all()
    assert torch.equal(found.left, ksvd.truncated(attention, 5).left)
    close(ksvd.truncated(attention, 40).values, torch.linalg.svdvals(attention)[:, :40])
    wide = ksvd.truncated(attention.mT, 5)
    close(wide.values, full.values)


def test_truncated_solvers_meet_zero_and_broken_matrices():
    assert ksvd.truncated(torch.zeros(2, 50, 50), 3).rank.tolist() == [0, 0]
    broken = random(2, 50, 50)
    broken[1, 3, 4] = np.nan
    with pytest.raises(UsageError, match="NaN"):
        ksvd.truncated(broken, 3)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_solvers_refuse_broken_numbers_wherever_they_stand(value):
    queries, keys, projection, kernel = problem("few rows")
    sides = {"query features contain": queries, "key features contain": keys, "projection contains": projection}
    for says, side in sides.items():
        broken = {name: given.clone() for name, given in sides.items()}
        broken[says][1, 2, 3] = value
        assert side.isfinite().all()
        with pytest.raises(UsageError, match=f"The {says} NaN or Inf"):
            ksvd.dual(
                broken["query features contain"], broken["key features contain"], 3, broken["projection contains"]
            )
    assert ksvd.dual(queries, keys, 3, projection).values.isfinite().all(), "the control"
    kernel[1, 3, 4] = value
    for refused in (
        lambda: ksvd.matrix_dual(kernel, 3),
        lambda: ksvd.truncated(kernel, 20),
        lambda: ksvd.nystrom(kernel, 3),
    ):
        with pytest.raises(UsageError, match="kernel matrix contains NaN or Inf"):
            refused()


def test_truncated_solvers_say_where_the_rank_ends():
    low = random(60, 2) @ random(2, 50, seed=1)
    found = ksvd.truncated(low, 5)
    assert found.rank == 2
    close(found.e @ found.right.mT, low)


# --- spaces -----------------------------------------------------------------------------------------------------------


def test_angles_between_planted_spaces_are_exact_small_and_large():
    basis = torch.linalg.qr(random(12, 12)).Q
    angles = torch.tensor([0.0, 1e-9, 1e-3, 0.5, 1.2, torch.pi / 2], dtype=torch.float64)
    left = basis[:, :6]
    right = left * angles.cos() + basis[:, 6:] * angles.sin()
    turned = right @ torch.linalg.qr(random(6, 6, seed=1)).Q
    close(ksvd.principal_angles(left, turned), angles, 1e-14)
    naive = torch.linalg.svdvals(left.mT @ turned).clamp(max=1).acos()
    assert (naive - angles).abs().max() > 1e-10
    # zero columns on both sides are no directions
    some = torch.tensor([1.0, 0, 1, 1, 0, 0], dtype=torch.float64)
    close(ksvd.principal_angles(left * some, right * some)[:3], angles[[0, 2, 3]], 1e-14)


def test_asymmetry_is_zero_for_symmetric_and_right_for_orthogonal_spaces():
    x = ksvd.cosine_features(random(2, 30, 5))
    sizes = torch.tensor([2, 4])
    found = ksvd.dual(x, x, 5)
    close(ksvd.mean_angle(found.left, found.right, sizes), torch.zeros(2))
    signs = torch.tensor([1.0, -1, 1, -1, 1], dtype=torch.float64)
    indefinite = ksvd.dual(x * signs, x, 5)
    close(ksvd.mean_angle(indefinite.left, indefinite.right, sizes), torch.zeros(2))
    apart = torch.cat([torch.eye(4), torch.zeros(4, 4)]).double(), torch.cat([torch.zeros(4, 4), torch.eye(4)]).double()
    away = ksvd.dual(apart[0], apart[1], 4)
    close(ksvd.mean_angle(away.left, away.right, torch.tensor(3)), torch.tensor(torch.pi / 2, dtype=torch.float64))
    queries = ksvd.dual(x, random(2, 30, 5, seed=1), 5)
    between = ksvd.mean_angle(queries.left, queries.right, sizes)
    assert ((between > 0.1) & (between < torch.pi / 2)).all()
    assert ksvd.mean_angle(found.left, found.right, torch.tensor([0, 2])).isnan().tolist() == [True, False]


def test_the_share_of_values_inside_a_space():
    basis = torch.linalg.qr(torch.cat([torch.ones(10, 1, dtype=torch.float64), random(10, 4)], -1)).Q[:, 1:]
    inside, half = basis[:, :2] @ random(2, 3), basis[:, :1] + basis[:, 3:4]
    close(ksvd.share_inside(inside + 5.0, basis, torch.tensor(2)), torch.tensor(1.0))
    close(ksvd.share_inside(half, basis, torch.tensor(2)), torch.tensor(0.5))
    close(ksvd.share_inside(half, basis, torch.tensor(0)), torch.tensor(0.0))
    assert ksvd.share_inside(torch.full((10, 3), 0.1), basis, torch.tensor(2)).isnan()


def test_by_chance_the_share_is_that_of_the_dimensions_orthogonal_to_one():
    """Normal values in the space of K(I − 11ᵀ/n): s/(n − 1). In that of K, whose first mode is constant: less."""
    queries, keys = random(400, 20, 4), 0.01 * random(400, 20, 4, seed=1) + 1.0
    sizes, values = torch.full((400,), 2), random(400, 20, 50, seed=2)
    shares = {
        name: ksvd.share_inside(values, ksvd.dual(queries, side, 4).right, sizes).mean().item()
        for name, side in (("K", keys), ("K(I − 11ᵀ/n)", ksvd.centre_rows(keys)))
    }
    assert shares["K(I − 11ᵀ/n)"] == pytest.approx(2 / 19, rel=0.02)
    assert shares["K"] == pytest.approx(1 / 19, rel=0.02), "the control: one of its two directions holds nothing"


def test_by_chance_the_share_is_that_of_the_dimensions():
    spaces = torch.linalg.qr(random(4000, 20, 5)).Q
    shares = ksvd.share_inside(random(4000, 20, 3, seed=1), spaces, torch.full((4000,), 5))
    assert shares.mean().item() == pytest.approx(5 / 20, abs=0.01)
