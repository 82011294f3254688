"""Tests that a study's models attend as Tsai et al.'s equations say, and open as models of transformers."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

import attnlens
from attnlens.lab.study import tables, tasks, units
from attnlens.models.kernel_transformers import AttentionForm, Classifier, KernelAttention, KernelTransformerConfig

WIDTH, HEADS, TOKENS = 8, 2, 5
POSITIONS = ("none", "sum", "table", "product", "symmetric product")


def attention(form, place="encoder"):
    torch.manual_seed(0)
    return KernelAttention(KernelTransformerConfig(hidden_size=WIDTH, num_attention_heads=HEADS), form, place).double()


def sinusoid(place):
    angles = [place / 10_000 ** (2 * p / WIDTH) for p in range(WIDTH // 2)]
    return torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)


KERNELS = {
    "exponential": lambda q, k, scale: (scale * q @ k).exp(),
    "rbf:gamma=1": lambda q, k, scale: (-scale * (q - k) @ (q - k)).exp(),
    "polynomial": lambda q, k, scale: (scale * q @ k) ** 2,
    "linear": lambda q, k, scale: scale * q @ k,
    "l2": lambda q, k, scale: ((q - k) @ (q - k)) ** 0.5,
    "intersection": lambda q, k, scale: (scale * torch.minimum(q, k).sum()).exp(),
}


def naive(module, features, source, head):
    """Tsai et al.'s Definition 1 for one head, pair by pair."""
    form, size = module.form, WIDTH // HEADS
    rows = slice(head * size, (head + 1) * size)
    query, value = module.query.weight[rows], module.value.weight[rows]
    key = query if module.key is None else module.key.weight[rows]
    scale, shares = size**-0.5, torch.zeros(len(features), len(source), dtype=torch.float64)
    for i, f in enumerate(features):
        for j, g in enumerate(source):
            t, u = sinusoid(i), sinusoid(j)
            summed = form.positions == "sum"  # Eq. 4
            kernel = KERNELS[form.kernel](query @ (f + summed * t), key @ (g + summed * u), scale)
            log_k = torch.zeros((), dtype=torch.float64)
            if form.positions == "table":  # Eq. 6
                log_k = scale * (query @ f) @ module.added.vectors[min(16, max(-16, i - j)) + 16]
            if form.positions == "product":  # Eq. 5
                log_k = scale * (query @ f) @ (module.added.relative.weight[rows] @ sinusoid(i - j))
            if form.positions == "symmetric product":  # Eq. 9
                placed = module.added.place.weight[rows]
                log_k = scale * (placed @ t) @ (placed @ u)
            shares[i, j] = kernel * log_k.exp() * (j <= i or not module.causal)
    added = form.in_value and form.positions != "none"  # Eq. 7
    values = torch.stack([g + added * sinusoid(j) for j, g in enumerate(source)]) @ value.mT
    return shares / shares.sum(1, keepdim=True) @ values


@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_is_that_of_the_equations(kernel):
    cases = itertools.product(POSITIONS, ("encoder", "decoder", "cross"))
    for number, (positions, place) in enumerate(cases):
        module = attention(AttentionForm(kernel=kernel, positions=positions, in_value=number % 2 == 0), place)
        features, memory = (torch.randn(count, WIDTH, dtype=torch.float64) for count in (TOKENS, TOKENS + 2))
        source = memory if place == "cross" else features
        arguments = (features[None], memory[None] if place == "cross" else None)
        with torch.no_grad():
            output = module(*arguments)[0]
            heads = [naive(module, features, source, head) for head in range(HEADS)]
            expected = torch.cat(heads, 1) @ module.output.weight.mT
            other = attention(AttentionForm(kernel=kernel, positions="sum" if positions == "none" else "none"), place)
            other.load_state_dict(module.state_dict(), strict=False)
            control = other(*arguments)[0]
        defined = ~expected.isnan().any(1)  # a token that sees itself alone, at distance 0 (l2), has no share to give
        assert defined[1:].all(), (positions, place)
        torch.testing.assert_close(output[defined], expected[defined], rtol=1e-10, atol=1e-10)
        assert not torch.allclose(control[defined], expected[defined], atol=1e-4), (positions, place)


def test_only_an_encoder_without_positions_commutes_with_permutations():
    """Tsai et al., Propositions 1 to 3; a causal filter knows the order without any positions."""
    features, order = torch.randn(1, TOKENS, WIDTH, dtype=torch.float64), torch.tensor([3, 0, 4, 1, 2])
    mask = torch.tensor([[True, True, True, False, False]])
    for positions, place in itertools.product(POSITIONS, ("encoder", "decoder")):
        module = attention(AttentionForm(positions=positions), place)
        with torch.no_grad():
            commutes = torch.allclose(module(features[:, order]), module(features)[:, order], atol=1e-9)
            padded, alone = module(features, mask=mask)[:, :3], module(features[:, :3])
        assert commutes == (positions == "none" and place == "encoder"), (positions, place)
        torch.testing.assert_close(padded, alone, msg="padding changes nothing")


def test_a_symmetric_product_saves_a_third_of_the_kernels_parameters():
    forms = [AttentionForm(positions=name) for name in ("product", "symmetric product")]
    counts = [attention(form).kernel_parameters for form in (*forms, AttentionForm(symmetric=True))]
    assert counts == [3 * WIDTH**2, 2 * WIDTH**2, WIDTH**2]


def test_a_saved_model_is_inspected_with_its_own_kernel_unless_it_can_be_negative(tmp_path):
    """The exponential kernel in place of its own would change its outputs, and fail the identity check."""
    text, scale = tmp_path / "text.txt", tables.SCALES["tiny"]
    text.write_text("In the beginning God created the heaven and the earth.\n" * 300)
    task = tasks.language([("text", text.read_text())], replace(scale, length=24, vocabulary=270))
    for name, form in {
        "exponential": AttentionForm(positions="product"),
        "rbf": AttentionForm(kernel="rbf:gamma=1", positions="sum", in_value=True),
        "polynomial": AttentionForm(kernel="polynomial", positions="symmetric product"),
        "linear": AttentionForm(kernel="linear"),
    }.items():
        model = units.build_model(units.TrainingUnit(task.name, form, scale, 1e-3, 1, 0), task)
        units.save_step(model, task, tmp_path / name, 0)
        arguments = {"model": str(tmp_path / name / "step-000000"), "text": [str(text)], "windows": 2, "length": 16}
        if name == "linear":
            with pytest.raises(attnlens.AttnlensError, match="linear can be negative"):
                attnlens.inspect(**arguments)
            continue
        report = attnlens.inspect(**arguments)
        assert report.summary.identity_error < 1e-5
        assert all(head.measures["tokens.entropy"].value is not None for head in report.heads)
        assert ("weights" in str(report.coverage.skipped)) == (name != "exponential"), name


def test_a_classifier_averages_features_without_padding():
    torch.manual_seed(0)
    config = KernelTransformerConfig(hidden_size=WIDTH, num_attention_heads=HEADS, vocab_size=10, classes=3)
    model, ids = Classifier(config, AttentionForm()).double().eval(), torch.randint(10, (2, TOKENS))
    mask = torch.arange(TOKENS).expand(2, -1) < 3
    torch.testing.assert_close(model(ids, mask), model(ids[:, :3]))
    assert not torch.allclose(model(ids), model(ids[:, :3])), "the control"
