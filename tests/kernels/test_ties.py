"""Tests that skewless, negativeless, mercer and keyless delete only their part of log k, and when they are refused."""

import math
from dataclasses import replace

import families
import pytest
import tiny
import torch
from attention_calls import CASES, HEADS, apart, bias, call, right_padded, sliding
from heads import random
from loaded import SMALL, family, loaded

import attnlens
from attnlens.errors import UsageError
from attnlens.kernels import OWN, TIES, parsed
from attnlens.kernels.attention import attend, route, weights
from attnlens.models import hooks
from attnlens.runs.swap.pipeline import swap_kernel

PARTS = [name for name, tie in TIES.items() if tie.part is not None]
PADDED = right_padded(150)
MASKS = {
    "all": None,
    "right padding": PADDED,
    "left padding": PADDED.flip(-1),
    "padding that sees nothing": PADDED & PADDED.mT,
    "no real token": PADDED & torch.tensor([True, False])[:, None, None, None],
}


def two_sided(mask="all", **more):
    return call(allowed=MASKS[mask], **more)


def centring(n):
    return torch.eye(n, dtype=torch.float64) - 1 / n


def delete(log_k, tie):
    """The definition, with J written out."""
    J = centring(log_k.shape[-1])
    if tie == "keyless":
        return log_k - (log_k @ J).mean(-2, keepdim=True)
    mu, u = torch.linalg.eigh(J @ (log_k + log_k.mT) / 2 @ J)
    skew, negative = J @ (log_k - log_k.mT) / 2 @ J, u * mu.clamp(max=0)[..., None, :] @ u.mT
    return log_k - {"skewless": skew, "negativeless": negative, "mercer": skew + negative}[tie]


def expected(case, words, tie):
    """The output at real tokens, sequence by sequence; NaN at padding."""
    whole = torch.full((*case.query.shape[:3], case.value.shape[-1]), math.nan, dtype=torch.float64)
    for number in range(2):
        real = torch.arange(150) if case.allowed is None else case.allowed[number, 0].any(0).nonzero()[:, 0]
        q, k, v = (x[number][:, real] for x in (case.query, case.paired_key, case.paired_value))
        log_k = parsed(words).log(q[None], k[None], case.scale, softcap=case.softcap)[0]
        log_k = log_k if case.bias is None else log_k + case.bias[0][:, real][..., real]
        whole[number][:, real] = delete(log_k, tie).softmax(-1) @ v if len(real) else v
    return whole.transpose(1, 2)


@pytest.mark.parametrize("tie", PARTS)
def test_output_and_weights_are_the_definition_on_the_real_tokens_of_each_sequence(tie):
    for mask in MASKS:
        case = two_sided(mask)
        naive, matrix = expected(case, "exponential", tie), weights(case, parsed(tie))
        assert apart(attend(case, parsed(tie)), naive) <= 1e-12, mask
        assert apart((matrix @ case.value).transpose(1, 2), naive) <= 1e-12, mask
        assert torch.equal(weights(case, parsed(tie), slice(20, 33)), matrix[:, :, 20:33])
        assert not bool(attend(case, parsed(tie))[naive.isnan()].any())
        assert apart(attend(case, OWN), naive) > 0.05, "the control: the tie changes something"
        if mask == "right padding":
            assert apart(attend(replace(case, allowed=None), parsed(tie)), naive) > 0.05, "the control: a blind mask"
    for words in ("rbf", "laplacian", "polynomial", "cosine"):
        case = two_sided("right padding", kv_heads=2, value_dim=5)
        assert apart(attend(case, parsed(f"{words}+{tie}")), expected(case, words, tie)) <= 1e-12, words
    for more in ({"softcap": 2.0}, {"bias": bias(150) + torch.linspace(0, 3, 150).double()}):
        case = two_sided("right padding", **more)
        naive = expected(case, "exponential", tie)
        assert apart(attend(case, parsed(tie)), naive) <= 1e-12, more
        assert apart(attend(replace(case, softcap=None, bias=None), parsed(tie)), naive) > 0.05, "the control"
    for dtype, border in ((torch.float32, 2e-6), (torch.bfloat16, 1e-2)):
        case = two_sided("right padding", dtype=dtype)
        exact = replace(case, query=case.query.double(), key=case.key.double(), value=case.value.double())
        result = attend(case, parsed(tie))
        assert result.dtype == dtype
        assert apart(result, expected(exact, "exponential", tie)) <= border


def gated(case, *, by_query, by_key):
    """The same call with s⟨q, k⟩ + a_i + b_j, by one more dimension for each."""

    def wider(x, *numbers):
        gates = ((torch.ones(150) * number).double().expand(2, HEADS, 150)[..., None] for number in numbers)
        return torch.cat([x, *gates], -1)

    query, key = wider(case.query, by_query / case.scale, 1.0), wider(case.key, 1.0, by_key / case.scale)
    return replace(case, query=query, key=key)


def test_query_only_terms_change_nothing_and_numbers_that_are_not_finite_give_nan_in_their_head():
    case = two_sided("right padding")
    shifted = gated(case, by_query=10 * random(150, seed=1), by_key=0.0)
    for tie in PARTS:
        assert apart(attend(shifted, parsed(tie)), expected(case, "exponential", tie)) <= 1e-11
    control = attend(shifted, parsed("symmetric"))[0]
    assert apart(control, attend(case, parsed("symmetric"))[0]) > 0.05, "the control: it mixes rows"
    case = two_sided()
    case.query[0, 1, 3] = math.nan
    for tie in PARTS:
        result = attend(case, parsed(tie))
        assert bool(result[0, :, 1].isnan().all())
        assert bool(result[1].isfinite().all())


def test_a_gated_symmetric_kernel_loses_nothing_without_its_skew_part():
    """log k(x_i, x_j) + a_i + b_j with a positive definite k: skewless and mercer leave its attention alone."""
    case, gates = two_sided("right padding"), torch.linspace(-2, 3, 150).double()
    same = gated(replace(case, key=case.query), by_query=gates.cos() + gates, by_key=gates)
    matrices = {words: weights(same, parsed(words))[:, :, :90, :90] for words in ("exponential", "symmetric", *PARTS)}
    own = matrices["exponential"]
    for tie in ("skewless", "negativeless", "mercer"):
        torch.testing.assert_close(matrices[tie], own)
    for control in ("symmetric", "keyless"):
        assert float((matrices[control] - own).abs().max()) > 0.05
    case = two_sided()  # an indefinite symmetric kernel is not Mercer's
    same = replace(case, query=case.query * torch.linspace(-1, 1, case.query.shape[-1]).double(), key=case.query)
    for tie, limits in {"skewless": (0, 1e-12), "negativeless": (0.05, 9), "mercer": (0.05, 9)}.items():
        assert limits[0] <= apart(attend(same, parsed(tie)), attend(same, OWN)) <= limits[1]


def test_gradients_are_those_of_the_definition():
    for tie in ("skewless", "keyless"):
        case, gradients = two_sided("right padding"), []
        real = ~expected(case, "exponential", tie).isnan()
        for compute in (lambda c: attend(c, parsed(tie)), lambda c: expected(c, "exponential", tie)):  # noqa: B023
            leaves = [x.clone().requires_grad_() for x in (case.query, case.key)]
            result = compute(replace(case, query=leaves[0], key=leaves[1]))
            gradients.append(torch.autograd.grad(result[real].square().sum(), leaves))
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs)
            assert float(ours.abs().max()) > 1e-3


def test_calls_without_every_pair_of_one_sequence_are_refused():
    one_head = torch.ones(1, HEADS, 150, 150, dtype=torch.bool)
    one_head[:, 2, :, 7] = False
    window = sliding(150)
    masked = [call(allowed=mask) for mask in (window, window | window.mT, one_head)]
    for number, case in enumerate([CASES["causal"](), CASES["left padding, causal"](), *masked]):
        for path in ("auto", "eager", "fused"):
            with pytest.raises(UsageError, match="needs every pair of tokens") as refusal:
                attend(case, parsed(PARTS[number % 4]), path)
            assert "--part encoder" in refusal.value.remedy, number
    refused = [
        (call(150, 150, cross=True), "auto", "another sequence"),
        (CASES["decoding"](), "auto", "same tokens"),
        (call(sinks=torch.zeros(HEADS)), "auto", "sinks"),
        (two_sided(), "fused", "the whole sequence at once"),
    ]
    for tie in PARTS:
        for case, path, problem in refused:
            with pytest.raises(UsageError, match=problem):
                attend(case, parsed(tie), path)
        assert route(two_sided(), parsed(tie)) == route(two_sided(), parsed(tie), "eager") == "whole matrices"
    with pytest.raises(UsageError, match="the whole sequence at once"):
        attend(two_sided(), parsed("rbf+mercer"), "fused")


@pytest.mark.parametrize(("tie", "name"), [*zip(PARTS, ["bert", "albert", "distilbert", "bert"], strict=True)])
def test_a_swap_of_padded_lines_is_that_of_each_line_alone(name, tie, tmp_path):
    text = tmp_path / "lines.txt"
    text.write_text("in the beginning god created\nthe heaven\nand the earth was without form and void\nand darkness\n")
    read = {"text": str(text), "pack": False, "windows": 4, "length": 24}
    model = loaded(families.build(name).base_model)
    together, alone = (swap_kernel(model, tie, batch_size=size, **read).swap for size in (4, 1))
    assert together.hidden_cosine == pytest.approx(alone.hidden_cosine, abs=1e-6)
    assert together.hidden_cosine < 0.999
    assert together.mask_error <= 1e-5
    assert {site.path for site in together.sites} == {"whole matrices"}


def test_one_head_alone_loses_its_part_and_the_others_nothing():
    model = families.build("bert")
    inputs = families.inputs("bert", model, padded=True)
    case, real, others = hooks.survey(model, inputs)[0].call, inputs["attention_mask"].bool(), [0, 1, 3]
    own = attend(case, OWN)
    for tie in PARTS:
        new = hooks.attend_swapped(case, hooks.Replacement(parsed(tie), (2,)))
        torch.testing.assert_close(new[real][:, others], own[real][:, others])
        torch.testing.assert_close(new[:, :, 2], attend(case, parsed(tie))[:, :, 2])
        assert not torch.allclose(new[real][:, 2], own[real][:, 2], atol=1e-2), tie


def test_only_the_encoder_of_an_encoder_decoder_can_be_swapped():
    model = family("t5")
    for refusing, options, problem in (
        (model, {}, "is undefined in cross-attention"),
        (model, {"part": "decoder"}, "needs every pair of tokens"),
        (family("gpt2"), {}, "this head's mask hides some"),
    ):
        with pytest.raises(UsageError, match=problem):
            swap_kernel(refusing, "skewless", **options, **SMALL)
    swap = swap_kernel(model, "keyless", part="encoder", **SMALL).swap
    assert {site.part for site in swap.sites} == {"encoder"}
    assert swap.kl > 1e-4
    assert any("whole matrices" in note for note in swap.notes)


def test_skewless_can_be_healed_and_ties_that_cut_eigenvalues_cannot():
    swap = attnlens.heal(loaded(families.build("bert"), tiny.tokenizer("bert")), "skewless", train=2, **SMALL).swap
    assert swap.healing.curve[-1].validation > 0
    for tie in ("mercer", "negativeless"):
        with pytest.raises(UsageError, match=f"{tie} can't be healed") as refusal:
            attnlens.heal("no/such/model", tie, train=2)
        assert "swap-kernel" in refusal.value.remedy
