"""Tests that gradient descent keeps its digits, and ends where the theory says."""

import json
import math
from importlib.resources import files

import pytest
import torch
from watch import unwatched

from attnlens.errors import UsageError
from attnlens.lab.experiments.tokens import draw, starts
from attnlens.maths import attsvm
from attnlens.maths.attsvm import Instances, Linear, Relu, Scores, descend
from attnlens.maths.attsvm.descent import gradient

GOLDEN = json.loads(files("attnlens.lab.experiments").joinpath("golden.json").read_text())
# ⟨W, W_svm⟩/(‖W‖‖W_svm‖) and the mean largest weight of descent from zero, lr 0.1, logistic loss: an autograd loop's.
TRAINED = {
    "vis1": ({200: 0.9352611641710012, 1000: 0.9986686643889041}, {200: 0.7857258199734107, 1000: 0.9999782274721388}),
    "vis2": ({200: 0.9965745806888858}, {200: 0.9999970466344648}),
    "local0": ({200: 0.9600792858210738}, {200: 0.9922766857938625}),
    "local1": ({200: 0.9236026945002641}, {200: 0.9938718940260035}),
}


def losses(output, labels, loss):
    margin = labels * output
    each = {
        "logistic": lambda: torch.nn.functional.softplus(-margin),
        "exponential": lambda: (-margin).exp(),
        "log": lambda: -margin.log(),
    }
    return each[loss]().mean(-1)


def textbook_loss(instances, W, loss="logistic"):
    logits = (instances.tokens @ (instances.queries @ W.mT)[..., None]).squeeze(-1)
    if instances.allowed is not None:
        logits = logits.masked_fill(~instances.allowed, -math.inf)
    weights = logits.softmax(-1)
    mean = (weights[..., None] * instances.tokens).sum(-2)
    head = instances.head
    if isinstance(head, Linear):
        output = (mean * head.v[:, None]).sum(-1)
    elif isinstance(head, Relu):
        output = (mean @ head.V.mT).relu().sum(-1)
    else:
        output = (weights * head.scores).sum(-1)
    return losses(output, instances.labels, loss)


def textbook_gradient(instances, W, loss="logistic"):
    W = W.clone().requires_grad_()
    return torch.autograd.grad(textbook_loss(instances, W, loss).sum(), W)[0]


def ours(instances, W, loss="logistic"):
    seen, gaps = instances.gaps(W, instances.anchor_first())
    direction, scale = gradient(instances, seen, gaps.log_softmax(-1), loss)
    return direction * scale.exp()[:, None, None]


def golden_instances(name):
    if name.startswith("local"):
        drawn = draw(6, 8, 10, 1, int(name[-1]))
        return drawn.instances, drawn.best[0]
    one = GOLDEN[name]
    X, Z, Y, v = (torch.tensor(one[part], dtype=torch.float64)[None] for part in ("X", "Z", "Y", "v"))
    return Instances(X, Z, Y, Linear(v)), torch.tensor(one["chosen"])


def cosine(first, second):
    return (first * second).sum((-2, -1)) / (first.norm(dim=(-2, -1)) * second.norm(dim=(-2, -1)))


def normalised(gradients):
    return gradients / gradients.norm(dim=(-2, -1), keepdim=True)


@pytest.mark.parametrize("loss", ["logistic", "exponential"])
@pytest.mark.parametrize("head", ["linear", "relu"])
@pytest.mark.parametrize("attention", ["cross", "self"])
def test_the_gradient_is_autograds_where_that_has_its_digits(loss, head, attention):
    drawn = draw(4, 5, 6, 20, 3, attention, head)
    W = 2 * starts(drawn, 6, "random")[0]
    expected = textbook_gradient(drawn.instances, W, loss)
    assert expected.norm() > 1e-3
    torch.testing.assert_close(ours(drawn.instances, W, loss), expected, rtol=1e-10, atol=1e-12)


def test_the_gradient_with_scores_a_mask_and_the_log_loss_is_autograds():
    drawn = draw(4, 5, 6, 10, 3)
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(10, 4, 5, generator=generator, dtype=torch.float64) + 0.1
    allowed = torch.ones(5, 5, dtype=torch.bool).tril()[1:].expand(10, 4, 5)
    one = Instances(
        drawn.instances.tokens, drawn.instances.queries, torch.ones(10, 4).double(), Scores(scores), allowed
    )
    W = 2 * starts(drawn, 6, "random")[0]
    torch.testing.assert_close(ours(one, W, "log"), textbook_gradient(one, W, "log"), rtol=1e-10, atol=1e-12)


def high_precision(instances, W):
    """The direction of Σ_{t≠α} s_t (γ_t − γ̄)(x_t − x_α)zᵀ in 200 digits."""
    from mpmath import mp, mpf

    mp.dps = 200
    total = [[mpf(0)] * instances.queries.shape[-1] for _ in range(instances.tokens.shape[-1])]
    v = [mpf(number) for number in instances.head.v[0].tolist()]
    matrix = [[mpf(number) for number in row] for row in W[0].tolist()]
    for tokens, query, label in zip(
        instances.tokens[0].tolist(), instances.queries[0].tolist(), instances.labels[0].tolist(), strict=True
    ):
        x = [[mpf(number) for number in row] for row in tokens]
        z = [mpf(number) for number in query]
        seen = [sum(a * b for a, b in zip(row, z, strict=True)) for row in matrix]
        raised = [mp.exp(sum(a * b for a, b in zip(row, seen, strict=True))) for row in x]
        weights = [one / sum(raised) for one in raised]
        read = [sum(a * b for a, b in zip(row, v, strict=True)) for row in x]
        output = sum(s * g for s, g in zip(weights, read, strict=True))
        slope = -mpf(label) / (1 + mp.exp(mpf(label) * output))
        for s, g, row in zip(weights, read, x, strict=True):
            for i, a in enumerate(row):
                for j, b in enumerate(z):
                    total[i][j] += slope * s * (g - output) * a * b
    norm = mp.sqrt(sum(entry**2 for row in total for entry in row))
    return torch.tensor([[float(entry / norm) for entry in row] for row in total], dtype=torch.float64)


@pytest.mark.parametrize("size", [5, 60, 400])
def test_the_direction_survives_saturation_and_the_textbooks_does_not(size):
    drawn = draw(3, 4, 5, 1, 11)
    W = size * 10 * normalised(starts(drawn, 5, "random")[0])
    exact = high_precision(drawn.instances, W)
    seen, gaps = drawn.instances.gaps(W, drawn.instances.anchor_first())
    direction, _ = gradient(drawn.instances, seen, gaps.log_softmax(-1), "logistic")
    torch.testing.assert_close(normalised(direction)[0], exact, rtol=0, atol=1e-10)
    textbook = textbook_gradient(drawn.instances, W)
    if size == 400:
        assert not (cosine(textbook, exact[None]) > 0.999).item()


def test_weights_below_the_smallest_float_still_give_a_direction():
    drawn = draw(3, 4, 5, 1, 11)
    W = 1e5 * normalised(starts(drawn, 5, "random")[0])
    seen, gaps = drawn.instances.gaps(W, drawn.instances.anchor_first())
    others = gaps.log_softmax(-1).sort(-1).values[..., :-1]
    assert (others < math.log(1e-300)).all()
    direction, scale = gradient(drawn.instances, seen, gaps.log_softmax(-1), "logistic")
    assert direction.isfinite().all()
    assert direction.norm() > 0.01
    assert scale.item() < math.log(1e-300)
    assert textbook_gradient(drawn.instances, W).abs().max() < 1e-15


def test_duplicates_of_the_chosen_token_pull_nowhere():
    drawn = draw(3, 4, 5, 1, 11)
    tokens = drawn.instances.tokens
    W = 3e3 * normalised(starts(drawn, 5, "random")[0])
    double = Instances(
        torch.cat([tokens, tokens], 2), drawn.instances.queries, drawn.instances.labels, drawn.instances.head
    )
    torch.testing.assert_close(
        normalised(ours_direction(double, W)), normalised(ours_direction(drawn.instances, W)), rtol=0, atol=1e-12
    )


def ours_direction(instances, W):
    seen, gaps = instances.gaps(W, instances.anchor_first())
    return gradient(instances, seen, gaps.log_softmax(-1), "logistic")[0]


@pytest.mark.parametrize("normaliser", ["form", "own"])
def test_factors_descend_as_autograd_says(normaliser):
    drawn = draw(4, 5, 6, 5, 0)
    _, (K, Q) = starts(drawn, 3, "random")
    result = descend(drawn.instances, (K, Q), 5, normaliser=normaliser, lr=0.1)
    for _ in range(5):
        K, Q = K.clone().requires_grad_(), Q.clone().requires_grad_()
        by_k, by_q = torch.autograd.grad(textbook_loss(drawn.instances, K @ Q.mT).sum(), (K, Q))
        if normaliser == "own":
            by_k, by_q = normalised(by_k), normalised(by_q)
        else:
            size = textbook_gradient(drawn.instances, (K @ Q.mT).detach()).norm(dim=(-2, -1), keepdim=True)
            by_k, by_q = by_k / size, by_q / size
        K, Q = (K - 0.1 * by_k).detach(), (Q - 0.1 * by_q).detach()
    torch.testing.assert_close(result.W[-1], K @ Q.mT, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", TRAINED)
def test_training_from_zero_reads_what_an_autograd_loop_read(name):
    instances, chosen = golden_instances(name)
    correlations, weights = TRAINED[name]
    svm = attsvm.solve(attsvm.selection(instances.tokens[0], instances.queries[0], chosen)).W
    d, d_query = svm.shape
    # Its weights are those of the forward pass before the step.
    wanted = sorted({*correlations, *(step - 1 for step in weights)})
    result = descend(instances, torch.zeros(1, d, d_query).double(), 1000, record=wanted)
    assert torch.equal(result.chosen[-1, 0], chosen)
    for step, expected in correlations.items():
        assert result.correlation(svm[None])[result.steps.index(step), 0].item() == pytest.approx(expected, abs=1e-9)
    for step, expected in weights.items():
        assert result.largest[result.steps.index(step - 1)].mean().item() == pytest.approx(expected, abs=1e-9)


def textbook_training(instances, start, iterations):
    """Σ_t s_t(γ_t − f)x_t zᵀ over its norm, or nothing where that is 0."""
    W = start
    scores = (instances.tokens @ instances.head.v[:, None, :, None]).squeeze(-1)
    for _ in range(iterations):
        weights = (instances.tokens @ (instances.queries @ W.mT)[..., None]).squeeze(-1).softmax(-1)
        output = (weights * scores).sum(-1)
        slope = -instances.labels * torch.sigmoid(-instances.labels * output)
        pull = slope[..., None] * weights * (scores - output[..., None])
        G = (pull[..., None] * instances.tokens).sum(-2).mT @ instances.queries
        size = G.norm(dim=(-2, -1), keepdim=True)
        W = W - 0.1 * torch.where(size > 0, G / size, 0.0)
    return W


@pytest.mark.full
def test_ours_converges_where_the_textbooks_gradient_decays():
    drawn = draw(6, 8, 10, 20, 0)
    start, _ = starts(drawn, 10, "random")
    result = descend(drawn.instances, start, 10_000)
    problems = [
        attsvm.selection(tokens, queries, chosen)
        for tokens, queries, chosen in zip(
            drawn.instances.tokens, drawn.instances.queries, result.chosen[-1], strict=True
        )
    ]
    svm = torch.stack([attsvm.solve(problem).W for problem in problems])
    assert result.correlation(svm)[-1].median() >= 0.9999
    assert cosine(textbook_training(drawn.instances, start, 10_000), svm).median() < 0.9


def test_a_step_has_the_length_lr_and_the_norm_grows_by_it():
    drawn = draw(6, 8, 10, 3, 0)
    result = descend(drawn.instances, torch.zeros(3, 10, 10).double(), 1, lr=0.25, record=[0])
    assert result.steps == (0, 1)
    assert result.norm[0].tolist() == [0, 0, 0]
    torch.testing.assert_close(result.norm[1], torch.full((3,), 0.25).double())
    assert not result.stationary.any()


def test_no_direction_means_no_step():
    drawn = draw(3, 4, 5, 2, 0)
    same = Instances(
        drawn.instances.tokens[:, :, :1], drawn.instances.queries, drawn.instances.labels, drawn.instances.head
    )
    start = starts(drawn, 5, "random")[0]
    result = descend(same, start, 3)
    assert torch.equal(result.W[-1], start)
    assert result.stationary.all()


def test_only_the_wanted_iterations_are_kept_and_progress_is_told():
    drawn = draw(2, 3, 4, 2, 0)
    told = []
    result = descend(
        drawn.instances, starts(drawn, 4, "random")[0], 30, record=[0, 10, 99], progress=lambda *at: told.append(at)
    )
    assert result.steps == (0, 10, 30)
    assert result.W.shape == (3, 2, 4, 4)
    assert told[0] == (1, 30)
    assert told[-1] == (30, 30)
    assert len(told) == 30


def test_the_same_seed_is_the_same_to_the_last_bit_and_trials_do_not_see_each_other():
    def trained(trials, seed):
        drawn = draw(6, 8, 10, trials, seed)
        return descend(drawn.instances, starts(drawn, 10, "random")[0], 200).W[-1]

    assert torch.equal(trained(4, 5), trained(4, 5))
    assert not torch.equal(trained(4, 5), trained(4, 6))
    torch.testing.assert_close(trained(4, 5)[1:], trained(3, 6), rtol=1e-9, atol=1e-9)


@unwatched()
def test_what_makes_no_sense_is_refused():
    drawn = draw(2, 3, 4, 2, 0)
    W, (K, Q) = starts(drawn, 4, "random")
    one = drawn.instances
    broken = Instances(one.tokens * math.nan, one.queries, one.labels, one.head)
    for instances, start, options in [
        (one, W, {"iterations": 0}),
        (one, W, {"iterations": 1, "lr": -0.1}),
        (one, W, {"iterations": 1, "lr": math.nan}),
        (one, W, {"iterations": 1, "loss": "hinge"}),
        (one, W, {"iterations": 1, "normaliser": "both"}),
        (one, W[:1], {"iterations": 1}),
        (one, (K, Q[..., :2]), {"iterations": 1}),
        (one, (K, 0 * Q), {"iterations": 1}),
        (one, (K, Q), {"iterations": 10_000, "normaliser": "form"}),
        (one, W * math.inf, {"iterations": 1}),
        (broken, W, {"iterations": 1}),
    ]:
        with pytest.raises(UsageError):
            descend(instances, start, **options)


def test_a_floor_stops_what_has_nothing_left_to_learn():
    """∇/(‖∇‖ + floor): a thousand steps on, the saturated trial stands still; without a floor it still moves by lr."""
    drawn = draw(6, 8, 10, 3, 0)
    start = starts(drawn, 10, "random")[0]

    def last_step(floor):
        result = descend(drawn.instances, start, 3001, floor=floor, record=[3000])
        return (result.W[-1] - result.W[0]).flatten(1).norm(dim=-1)

    assert (last_step(2.2e-16) < 0.01).all()
    torch.testing.assert_close(last_step(0.0), torch.full((3,), 0.1).double(), rtol=1e-6, atol=0)


def test_without_a_floor_training_goes_on_where_every_weight_underflows():
    drawn = draw(6, 8, 10, 3, 0)
    result = descend(drawn.instances, starts(drawn, 10, "random")[1], 1000, normaliser="form", record=[999])
    assert result.W.isfinite().all()
    assert (result.log_weights.masked_fill(result.log_weights > -1, -torch.inf).amax((-2, -1)) < -1000).all()
