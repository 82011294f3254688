"""Tests that a study's models attend as Tsai et al.'s equations say, and open as models of transformers."""

import math
from dataclasses import replace

import pytest
import torch

import attnlens
from attnlens.models.kernel_transformers import AttentionForm, KernelAttention, KernelTransformerConfig

WIDTH, HEADS, TOKENS = 8, 2, 5
POSITIONS = ("none", "sum", "table", "product", "symmetric product")


def attention(form, place="encoder"):
    torch.manual_seed(0)
    config = KernelTransformerConfig(hidden_size=WIDTH, num_attention_heads=HEADS)
    return KernelAttention(config, form, place).double()


def sinusoid(place):
    """Of one place, written out."""
    angles = [place / 10_000 ** (2 * p / WIDTH) for p in range(WIDTH // 2)]
    return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64)


KERNELS = {
    "exponential": lambda q, k, scale: (scale * q @ k).exp(),
    "rbf:gamma=1": lambda q, k, scale: (-scale * (q - k) @ (q - k)).exp(),
    "polynomial": lambda q, k, scale: (scale * q @ k) ** 2,
    "linear": lambda q, k, scale: scale * q @ k,
    "l2": lambda q, k, scale: ((q - k) @ (q - k)) ** 0.5,
    "intersection": lambda q, k, scale: (scale * torch.minimum(q, k).sum()).exp(),
}


def naive(module, features, read, head):
    """Tsai et al.'s Definition 1 for one head, pair by pair: the share of each key, and the values."""
    form, size = module.form, WIDTH // HEADS
    rows = slice(head * size, (head + 1) * size)
    of = {name: getattr(module, name).weight[rows] for name in ("query", "value")}
    of["key"] = of["query"] if module.key is None else module.key.weight[rows]
    scale, shares = size**-0.5, torch.zeros(len(features), len(read), dtype=torch.float64)
    for i, f in enumerate(features):
        for j, g in enumerate(read):
            t, u = sinusoid(i), sinusoid(j)
            added = (t, u) if form.positions == "sum" else (0 * t, 0 * u)  # Eq. 4
            own = KERNELS[form.kernel](of["query"] @ (f + added[0]), of["key"] @ (g + added[1]), scale)
            log_k = torch.zeros((), dtype=torch.float64)
            if form.positions == "table":  # Eq. 6
                vectors = module.added.vectors
                log_k = log_k + scale * (of["query"] @ f) @ vectors[min(16, max(-16, i - j)) + 16]
            if form.positions == "product":  # Eq. 5
                log_k = log_k + scale * (of["query"] @ f) @ (module.added.relative.weight[rows] @ sinusoid(i - j))
            if form.positions == "symmetric product":  # Eq. 9
                placed = module.added.place.weight[rows]
                log_k = log_k + scale * (placed @ t) @ (placed @ u)
            shares[i, j] = own * log_k.exp() * (j <= i or not module.causal)
    placed = torch.stack(
        [sinusoid(j) if form.in_value and form.positions != "none" else 0 * read[0] for j in range(len(read))]
    )
    return shares / shares.sum(1, keepdim=True), (read + placed) @ of["value"].mT


@pytest.mark.parametrize("in_value", [False, True])
@pytest.mark.parametrize("place", ["encoder", "decoder", "cross"])
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_is_that_of_the_equations(kernel, positions, place, in_value):
    module = attention(AttentionForm(kernel=kernel, positions=positions, in_value=in_value), place)
    features = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    memory = torch.randn(TOKENS + 2, WIDTH, dtype=torch.float64) if place == "cross" else None
    read = features if memory is None else memory
    with torch.no_grad():
        found = module(features[None], None if memory is None else memory[None])[0]
        heads = [shares @ values for shares, values in (naive(module, features, read, head) for head in range(HEADS))]
        expected = torch.cat(heads, 1) @ module.output.weight.mT
        other = attention(AttentionForm(kernel=kernel, positions="none" if positions != "none" else "sum"), place)
        other.load_state_dict(module.state_dict(), strict=False)
        control = other(features[None], None if memory is None else memory[None])[0]
    defined = ~expected.isnan().any(1)  # a token that sees itself alone, at distance 0 (l2), has no share to give
    assert defined[1:].all()
    torch.testing.assert_close(found[defined], expected[defined], rtol=1e-10, atol=1e-10)
    assert not torch.allclose(control[defined], expected[defined], atol=1e-4)


@pytest.mark.parametrize("positions", POSITIONS)
def test_without_positions_an_encoder_commutes_with_permutations_and_with_them_it_does_not(positions):
    """Tsai et al., Propositions 1 to 3; a causal filter knows the order without any positions."""
    features, order = torch.randn(1, TOKENS, WIDTH, dtype=torch.float64), torch.tensor([3, 0, 4, 1, 2])
    with torch.no_grad():
        for place in ("encoder", "decoder"):
            module = attention(AttentionForm(positions=positions), place)
            commutes = torch.allclose(module(features[:, order]), module(features)[:, order], atol=1e-9)
            assert commutes == (positions == "none" and place == "encoder"), place


def test_a_symmetric_product_saves_a_third_of_the_kernels_parameters():
    asymmetric, symmetric = (attention(AttentionForm(positions=name)) for name in ("product", "symmetric product"))
    assert (asymmetric.kernel_parameters, symmetric.kernel_parameters) == (3 * WIDTH**2, 2 * WIDTH**2)
    assert attention(AttentionForm(symmetric=True)).kernel_parameters == WIDTH**2


@pytest.mark.parametrize("place", ["encoder", "decoder"])
def test_padding_is_read_by_nobody(place):
    module, features = (
        attention(AttentionForm(positions="product"), place),
        torch.randn(1, TOKENS, WIDTH, dtype=torch.float64),
    )
    mask = torch.tensor([[True, True, True, False, False]])
    with torch.no_grad():
        found, alone = module(features, mask=mask)[:, :3], module(features[:, :3])
    torch.testing.assert_close(found, alone)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Untrained models of several kernels as --save writes them, and the text that their byte pairs know."""
    from attnlens.lab.study.tables import SCALES
    from attnlens.lab.study.tasks import language
    from attnlens.lab.study.units import TrainingUnit, build_model, save_step

    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("In the beginning God created the heaven and the earth.\n" * 300)
    task = language([("text", text.read_text())], replace(SCALES["tiny"], length=24, vocabulary=270))
    forms = {
        "exponential": AttentionForm(positions="product"),
        "rbf": AttentionForm(kernel="rbf:gamma=1", positions="sum", in_value=True),
        "polynomial": AttentionForm(kernel="polynomial", positions="symmetric product"),
        "linear": AttentionForm(kernel="linear"),
    }
    folder = tmp_path_factory.mktemp("cells")
    for name, form in forms.items():
        model = build_model(TrainingUnit(task.name, form, SCALES["tiny"], 1e-3, 1, 0), task)
        save_step(model, task, folder / name, 0)
    return folder, text


@pytest.mark.parametrize("name", ["exponential", "rbf", "polynomial"])
def test_a_saved_model_is_inspected_with_its_own_kernel(saved, name):
    """The exponential kernel in its place would change its outputs: the gate of `inspect` has something to hold."""
    folder, text = saved
    report = attnlens.inspect(str(folder / name / "step-000000"), text=[str(text)], windows=2, length=16)
    assert report.summary.identity_error < 1e-5
    assert all(head.measures["tokens.entropy"].value is not None for head in report.heads)
    reasons = " ".join(str(one.reason) for one in report.coverage.skipped)
    assert ("weights" in str(report.coverage.skipped)) == (name != "exponential"), reasons


def test_a_kernel_that_can_be_negative_is_refused_by_name(saved):
    folder, text = saved
    with pytest.raises(attnlens.AttnlensError, match="linear can be negative"):
        attnlens.inspect(str(folder / "linear" / "step-000000"), text=[str(text)], windows=2, length=16)
