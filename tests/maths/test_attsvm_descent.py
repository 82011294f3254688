"""Tests that gradient descent is accurate if attention saturates, and that it converges as the theory predicts."""

import itertools
import json
import math
from importlib.resources import files

import pytest
import torch
from watch import unwatched

from attnlens.errors import UsageError
from attnlens.lab.experiments.tokens import draw, draw_starts
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
LOSSES = {"logistic": lambda m: torch.nn.functional.softplus(-m), "exponential": lambda m: (-m).exp()}
LOSSES["log"] = lambda m: -m.log()


def textbook_loss(instances, W, loss="logistic"):
    logits = (instances.tokens @ (instances.queries @ W.mT)[..., None]).squeeze(-1)
    if instances.allowed is not None:
        logits = logits.masked_fill(~instances.allowed, -math.inf)
    weights, head = logits.softmax(-1), instances.head
    mean = (weights[..., None] * instances.tokens).sum(-2)
    if isinstance(head, Linear):
        output = (mean * head.v[:, None]).sum(-1)
    elif isinstance(head, Relu):
        output = (mean @ head.V.mT).relu().sum(-1)
    else:
        output = (weights * head.scores).sum(-1)
    return LOSSES[loss](instances.labels * output).mean(-1)


def textbook_gradient(instances, W, loss="logistic"):
    W = W.clone().requires_grad_()
    return torch.autograd.grad(textbook_loss(instances, W, loss).sum(), W)[0]


def our_direction(instances, W, loss="logistic"):
    """The direction and the logarithm of its factor."""
    seen, gaps = instances.gaps(W, instances.anchor_first())
    return gradient(instances, seen, gaps.log_softmax(-1), loss)


def matches_autograd(instances, W, loss):
    (direction, scale), expected = our_direction(instances, W, loss), textbook_gradient(instances, W, loss)
    torch.testing.assert_close(direction * scale.exp()[:, None, None], expected, rtol=1e-10, atol=1e-12)
    return bool(expected.norm() > 1e-3)


def golden_instances(name):
    if name.startswith("local"):
        drawn = draw(6, 8, 10, 1, int(name[-1]))
        return drawn.instances, drawn.best[0]
    X, Z, Y, v = (torch.tensor(GOLDEN[name][part], dtype=torch.float64)[None] for part in ("X", "Z", "Y", "v"))
    return Instances(X, Z, Y, Linear(v)), torch.tensor(GOLDEN[name]["chosen"])


def cosine(first, second):
    return (first * second).sum((-2, -1)) / (first.norm(dim=(-2, -1)) * second.norm(dim=(-2, -1)))


def normalised(gradients):
    return gradients / gradients.norm(dim=(-2, -1), keepdim=True)


def test_the_gradient_is_that_of_autograd():
    kinds = ("cross", "linear"), ("self", "relu")
    for loss, kind in itertools.product(("logistic", "exponential"), kinds):
        drawn = draw(4, 5, 6, 20, 3, *kind)
        assert matches_autograd(drawn.instances, 2 * draw_starts(drawn, 6, "random")[0], loss), (loss, kind)
    drawn = draw(4, 5, 6, 10, 3)
    scores = torch.rand(10, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.1
    allowed = torch.ones(5, 5, dtype=torch.bool).tril()[1:].expand(10, 4, 5)
    plain = drawn.instances
    masked = Instances(plain.tokens, plain.queries, torch.ones(10, 4).double(), Scores(scores), allowed)
    assert matches_autograd(masked, 2 * draw_starts(drawn, 6, "random")[0], "log")


def high_precision(instances, W):
    """The direction of Σ_t s_t (γ_t − γ̄) x_t zᵀ, times each slope, in 200 digits."""
    from mpmath import matrix, mp, mpf

    mp.dps = 200
    form, v, total = matrix(W[0].tolist()), matrix(instances.head.v[0].tolist()), matrix(*W[0].shape)
    parts = (instances.tokens[0], instances.queries[0], instances.labels[0])
    for tokens, query, label in zip(*(part.tolist() for part in parts), strict=True):
        x, z, y = matrix(tokens), matrix(query), mpf(label)
        raised = [mp.exp(logit) for logit in x * form * z]
        weights, values = [one / sum(raised) for one in raised], x * v
        output = sum(s * g for s, g in zip(weights, values, strict=True))
        slope = -y / (1 + mp.exp(y * output))
        pull = matrix([s * (g - output) for s, g in zip(weights, values, strict=True)])
        total += slope * (x.T * pull) * z.T
    norm = mp.sqrt(sum(entry**2 for entry in total))
    return torch.tensor([[float(entry / norm) for entry in row] for row in total.tolist()], dtype=torch.float64)


def test_the_direction_survives_saturation_and_that_of_the_textbook_does_not():
    drawn = draw(3, 4, 5, 1, 11)
    instances, unit = drawn.instances, normalised(draw_starts(drawn, 5, "random")[0])
    for size in (50, 600, 4000):
        exact = high_precision(instances, size * unit)
        torch.testing.assert_close(normalised(our_direction(instances, size * unit)[0])[0], exact, rtol=0, atol=1e-10)
    assert not (cosine(textbook_gradient(instances, 4000 * unit), exact[None]) > 0.999).item()
    # weights below the smallest float
    _, gaps = instances.gaps(1e5 * unit, instances.anchor_first())
    assert (gaps.log_softmax(-1).sort(-1).values[..., :-1] < math.log(1e-300)).all()
    direction, scale = our_direction(instances, 1e5 * unit)
    assert direction.isfinite().all()
    assert direction.norm() > 0.01
    assert scale.item() < math.log(1e-300)
    assert textbook_gradient(instances, 1e5 * unit).abs().max() < 1e-15
    double = Instances(torch.cat([instances.tokens] * 2, 2), instances.queries, instances.labels, instances.head)
    directions = [normalised(our_direction(each, 3e3 * unit)[0]) for each in (double, instances)]
    torch.testing.assert_close(*directions, rtol=0, atol=1e-12, msg="duplicates of the chosen token pull nowhere")


@pytest.mark.parametrize("normaliser", ["form", "own"])
def test_factors_descend_as_by_autograd(normaliser):
    drawn = draw(4, 5, 6, 5, 0)
    _, (K, Q) = draw_starts(drawn, 3, "random")
    result = descend(drawn.instances, (K, Q), 5, normaliser=normaliser, lr=0.1)
    for _ in range(5):
        K, Q = K.clone().requires_grad_(), Q.clone().requires_grad_()
        slopes = torch.autograd.grad(textbook_loss(drawn.instances, K @ Q.mT).sum(), (K, Q))
        form = textbook_gradient(drawn.instances, (K @ Q.mT).detach())
        sizes = [(each if normaliser == "own" else form).norm(dim=(-2, -1), keepdim=True) for each in slopes]
        K, Q = ((x - 0.1 * g / size).detach() for x, g, size in zip((K, Q), slopes, sizes, strict=True))
    torch.testing.assert_close(result.W[-1], K @ Q.mT, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", TRAINED)
def test_training_from_zero_is_that_of_an_autograd_loop(name):
    instances, chosen = golden_instances(name)
    correlations, weights = TRAINED[name]
    svm = attsvm.solve(attsvm.selection(instances.tokens[0], instances.queries[0], chosen)).W
    d, d_query = svm.shape
    # The weights are those of the forward pass before the step.
    recorded = sorted({*correlations, *(step - 1 for step in weights)})
    result = descend(instances, torch.zeros(1, d, d_query).double(), max(correlations), record=recorded)
    assert torch.equal(result.chosen[-1, 0], chosen)
    for step, expected in correlations.items():
        assert result.correlation(svm[None])[result.steps.index(step), 0].item() == pytest.approx(expected, abs=1e-9)
    for step, expected in weights.items():
        assert result.largest[result.steps.index(step - 1)].mean().item() == pytest.approx(expected, abs=1e-9)


def test_a_step_has_the_length_lr_if_it_has_a_direction_and_requested_iterations_are_recorded():
    drawn = draw(6, 8, 10, 3, 0)
    result = descend(drawn.instances, torch.zeros(3, 10, 10).double(), 1, lr=0.25, record=[0])
    assert result.steps == (0, 1)
    assert result.norm[0].tolist() == [0, 0, 0]
    torch.testing.assert_close(result.norm[1], torch.full((3,), 0.25).double())
    assert not result.stationary.any()
    one = drawn.instances
    same = Instances(one.tokens[:, :, :1], one.queries, one.labels, one.head)
    start = draw_starts(drawn, 10, "random")[0]
    result = descend(same, start, 3)
    assert torch.equal(result.W[-1], start)
    assert result.stationary.all()
    drawn, calls = draw(2, 3, 4, 2, 0), []
    start, record = draw_starts(drawn, 4, "random")[0], [0, 10, 99]
    result = descend(drawn.instances, start, 30, record=record, progress=lambda *at: calls.append(at))
    assert result.steps == (0, 10, 30)
    assert result.W.shape == (3, 2, 4, 4)
    assert calls == [(step, 30) for step in range(1, 31)]


def test_training_is_deterministic_and_trials_are_independent():
    def trained(trials, seed):
        drawn = draw(6, 8, 10, trials, seed)
        return descend(drawn.instances, draw_starts(drawn, 10, "random")[0], 100).W[-1]

    first = trained(4, 5)
    assert torch.equal(first, trained(4, 5))
    assert not torch.equal(first, trained(4, 6))
    torch.testing.assert_close(first[1:], trained(3, 6), rtol=1e-9, atol=1e-9)


@unwatched()
def test_senseless_arguments_are_refused():
    drawn = draw(2, 3, 4, 2, 0)
    W, (K, Q) = draw_starts(drawn, 4, "random")
    one = drawn.instances
    broken = Instances(one.tokens * math.nan, one.queries, one.labels, one.head)
    options = {"iterations": 0}, {"lr": -0.1}, {"lr": math.nan}, {"loss": "hinge"}, {"normaliser": "both"}
    for instances, start, option in [
        *((one, W, option) for option in options),
        *((one, start, {}) for start in (W[:1], W * math.inf, (K, Q[..., :2]), (K, 0 * Q))),
        (one, (K, Q), {"iterations": 10_000, "normaliser": "form"}),
        (broken, W, {}),
    ]:
        with pytest.raises(UsageError):
            descend(instances, start, **{"iterations": 1} | option)


def test_a_floor_stops_a_saturated_trial_and_without_one_it_moves_on():
    """∇/(‖∇‖ + floor): saturated, a trial stands still; without a floor it still moves by lr."""
    drawn = draw(6, 8, 10, 3, 0)
    start, factors = draw_starts(drawn, 10, "random")
    saturated = 10 * descend(drawn.instances, start, 300).W[-1]
    for floor, lowest, highest in ((2.2e-16, 0, 0.01), (0.0, 0.1 - 1e-7, 0.1 + 1e-7)):
        result = descend(drawn.instances, saturated, 21, floor=floor, record=[20])
        steps = (result.W[-1] - result.W[0]).flatten(1).norm(dim=-1)
        assert ((lowest <= steps) & (steps <= highest)).all()
    result = descend(drawn.instances, factors, 600, normaliser="form", record=[599])
    assert result.W.isfinite().all()
    assert (result.log_weights.masked_fill(result.log_weights > -1, -torch.inf).amax((-2, -1)) < -1000).all()
