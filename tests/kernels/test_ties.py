"""Tests that skewless, negativeless, mercer and keyless delete their part of log k alone, and refuse where open."""

import math
from dataclasses import replace

import families
import pytest
import tiny
import torch
from attention_calls import CASES, HEADS, apart, bias, call, right_padded, sliding
from loaded import SMALL, family, loaded, sites_of

import attnlens
from attnlens.errors import UsageError
from attnlens.kernels import TIES, parsed
from attnlens.kernels.attention import attend, route, weights
from attnlens.models import hooks
from attnlens.runs.swap.pipeline import swap_kernel

PARTS = [name for name, tie in TIES.items() if tie.part is not None]
KERNELS = ["exponential", "rbf", "laplacian", "polynomial", "cosine"]
MASKS = {
    "all": None,
    "right padding": right_padded(150),
    "left padding": right_padded(150).flip(-1),
    "padding that sees nothing": right_padded(150) & right_padded(150).mT,
    "no real token": right_padded(150) & torch.tensor([True, False])[:, None, None, None],
}


def two_sided(mask="all", **more):
    return call(allowed=MASKS[mask], **more)


def logits(found, words, sequence):
    """log k + bias of one sequence's real tokens, and which those are."""
    real = slice(None) if found.allowed is None else found.allowed[sequence, 0].any(0).nonzero()[:, 0]
    q, k = (x[sequence][:, real] for x in (found.query, found.paired_key))
    log_k = parsed(words).log(q[None], k[None], found.scale, softcap=found.softcap)[0]
    return (log_k if found.bias is None else log_k + found.bias[0][:, real][..., real]), real


def left(log_k, tie):
    """The definition, matrix by matrix: J is written out, eigenvalues are one another's."""
    n = log_k.shape[-1]
    found = []
    for matrix in log_k:
        ones = torch.ones(n, 1, dtype=torch.float64)
        centring = torch.eye(n, dtype=torch.float64) - ones @ ones.T / n
        symmetric, skew = (matrix + matrix.T) / 2, (matrix - matrix.T) / 2
        key = matrix.mean(0) - matrix.mean()
        if tie == "skewless":
            found.append(matrix - centring @ skew @ centring)
        elif tie == "keyless":
            found.append(matrix - ones * key)
        else:
            mu, u = torch.linalg.eigh(centring @ symmetric @ centring)
            negative = sum(m * torch.outer(v, v) for m, v in zip(mu, u.T, strict=True) if m < 0)
            without = matrix - negative
            found.append(without - centring @ skew @ centring if tie == "mercer" else without)
    return torch.stack(found)


def expected(found, words, tie):
    """The output at real tokens, sequence by sequence; NaN at padding."""
    whole = torch.full((*found.query.shape[:3], found.value.shape[-1]), math.nan, dtype=torch.float64)
    for sequence in range(found.query.shape[0]):
        log_k, real = logits(found, words, sequence)
        if log_k.numel():
            whole[sequence][:, real] = left(log_k, tie).softmax(-1) @ found.paired_value[sequence][:, real]
    return whole.transpose(1, 2)


@pytest.mark.parametrize("tie", PARTS)
@pytest.mark.parametrize("mask", MASKS)
def test_output_and_weights_are_the_definitions_on_each_sequences_real_tokens(mask, tie):
    found, kernel = two_sided(mask), parsed(tie)
    naive = expected(found, "exponential", tie)
    assert apart(attend(found, kernel), naive) <= 1e-12
    rows = weights(found, kernel)
    assert apart((rows @ found.value).transpose(1, 2), naive) <= 1e-12
    assert torch.equal(weights(found, kernel, slice(20, 33)), rows[:, :, 20:33])
    padding = naive.isnan()
    assert not bool(attend(found, kernel)[padding].any())
    assert apart(attend(found, parsed("exponential")), naive) > 0.05, "the control: the tie changes something"
    if mask == "right padding":
        blind = attend(replace(found, allowed=None), kernel)
        assert apart(blind, naive) > 0.05, "the control: padding taken for tokens"


@pytest.mark.parametrize("tie", PARTS)
@pytest.mark.parametrize("words", KERNELS)
def test_any_kernels_logarithm_is_taken_apart(words, tie):
    found = two_sided("right padding", kv_heads=2, value_dim=5)
    assert apart(attend(found, parsed(f"{words}+{tie}")), expected(found, words, tie)) <= 1e-12


@pytest.mark.parametrize("tie", PARTS)
@pytest.mark.parametrize("more", [{"softcap": 2.0}, {"bias": bias(150) + torch.linspace(0, 3, 150).double()}])
def test_what_the_model_adds_to_its_scores_is_taken_apart_with_them(more, tie):
    found = two_sided("right padding", **more)
    assert apart(attend(found, parsed(tie)), expected(found, "exponential", tie)) <= 1e-12
    bare = attend(replace(found, softcap=None, bias=None), parsed(tie))
    assert apart(bare, expected(found, "exponential", tie)) > 0.05, "the control"


@pytest.mark.parametrize("tie", PARTS)
@pytest.mark.parametrize(("dtype", "border"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_in_the_models_own_type_it_is_rounded_once(dtype, border, tie):
    found = two_sided("right padding", dtype=dtype)
    exact = replace(found, query=found.query.double(), key=found.key.double(), value=found.value.double())
    result = attend(found, parsed(tie))
    assert result.dtype == dtype
    assert apart(result, expected(exact, "exponential", tie)) <= border


# --- what is left -----------------------------------------------------------------------------------------------------


def energies(log_k):
    """Σμ₊², Σμ₋², ‖JAJ‖² and n‖c‖² of each matrix; they sum to ‖LJ‖²."""
    n = log_k.shape[-1]
    centring = torch.eye(n, dtype=torch.float64) - torch.full((n, n), 1 / n, dtype=torch.float64)
    core, key = centring @ log_k @ centring, (log_k @ centring).mean(-2)
    mu = torch.linalg.eigvalsh((core + core.mT) / 2)
    found = {
        "positive": mu.clamp(min=0).square().sum(-1),
        "negative": mu.clamp(max=0).square().sum(-1),
        "skew": ((core - core.mT) / 2).square().sum((-2, -1)),
        "key": n * key.square().sum(-1),
    }
    torch.testing.assert_close(sum(found.values()), (log_k @ centring).square().sum((-2, -1)))
    return found


DELETED = {"skewless": {"skew"}, "negativeless": {"negative"}, "mercer": {"skew", "negative"}, "keyless": {"key"}}


@pytest.mark.parametrize("tie", PARTS)
def test_its_parts_are_gone_and_the_others_keep_their_energy(tie):
    """Of log k as the attention says it: log P is log k up to query-only terms."""
    found = two_sided()
    before, after = (energies(weights(found, parsed(words)).log()) for words in ("exponential", tie))
    for name, energy in before.items():
        assert bool((energy > 5).all()), "the control: each part is there before"
        if name in DELETED[tie]:
            assert bool((after[name] < 1e-18 * energy).all()), name
        else:
            torch.testing.assert_close(after[name], energy)


def test_symmetric_is_no_such_tie():
    """Its key gate is halved: three quarters of the key term's energy are gone, and there are parts of the query's."""
    found = two_sided()
    before, after = (energies(weights(found, parsed(words)).log()) for words in ("exponential", "symmetric"))
    torch.testing.assert_close(after["positive"], before["positive"])
    assert bool((after["skew"] < 1e-18 * before["skew"]).all())
    assert bool((after["key"] / before["key"] - 1).abs().max() > 0.5)


def gated(found, *, by_query, by_key):
    """The same call with s⟨q, k⟩ + a_i + b_j, by one more dimension for each."""

    def wider(x, *numbers):
        return torch.cat(
            [x, *((torch.ones(150) * number).double().expand(2, HEADS, 150)[..., None] for number in numbers)], -1
        )

    query, key = wider(found.query, by_query / found.scale, 1.0), wider(found.key, 1.0, by_key / found.scale)
    return replace(found, query=query, key=key)


@pytest.mark.parametrize("tie", PARTS)
def test_query_only_terms_change_nothing(tie):
    gauge = 10 * torch.randn(150, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = two_sided("right padding")
    shifted = gated(found, by_query=gauge, by_key=0.0)
    assert apart(attend(shifted, parsed(tie)), expected(found, "exponential", tie)) <= 1e-11
    control = attend(shifted, parsed("symmetric"))[0]
    assert apart(control, attend(found, parsed("symmetric"))[0]) > 0.05, "the control: it mixes rows"


def test_a_gated_symmetric_kernel_loses_nothing_without_its_skew_part():
    """log k(x_i, x_j) + a_i + b_j with a positive definite k: skewless and mercer are its own attention."""
    found = two_sided("right padding")
    gates = torch.linspace(-2, 3, 150).double()
    same = gated(replace(found, key=found.query), by_query=gates.cos() + gates, by_key=gates)
    own = weights(same, parsed("exponential"))[:, :, :90, :90]
    for tie in ("skewless", "negativeless", "mercer"):
        torch.testing.assert_close(weights(same, parsed(tie))[:, :, :90, :90], own)
    for control in ("symmetric", "keyless"):
        assert float((weights(same, parsed(control))[:, :, :90, :90] - own).abs().max()) > 0.05


def test_a_symmetric_kernel_that_is_indefinite_is_not_mercers():
    found = two_sided()
    same = replace(found, query=found.query * torch.linspace(-1, 1, found.query.shape[-1]).double(), key=found.query)
    own = attend(same, parsed("exponential"))
    assert apart(attend(same, parsed("skewless")), own) <= 1e-12
    for tie in ("negativeless", "mercer"):
        assert apart(attend(same, parsed(tie)), own) > 0.05


# --- where it has a meaning -------------------------------------------------------------------------------------------


def of_one_head():
    """All heads but one see everything."""
    seen = torch.ones(1, HEADS, 150, 150, dtype=torch.bool)
    seen[:, 2, :, 7] = False
    return seen


HIDDEN = {
    "causal": CASES["causal"](),
    "a causal mask": CASES["left padding, causal"](),
    "a window": call(allowed=sliding(150)),
    "two sides of a window": call(allowed=sliding(150) | sliding(150).mT),
    "one head's mask": call(allowed=of_one_head()),
}


@pytest.mark.parametrize("path", ["auto", "eager", "fused"])
@pytest.mark.parametrize("tie", PARTS)
@pytest.mark.parametrize("case", HIDDEN)
def test_a_head_that_does_not_see_every_pair_is_refused(case, tie, path):
    with pytest.raises(UsageError, match="needs every pair of tokens") as refusal:
        attend(HIDDEN[case], parsed(tie), path)
    assert "--part encoder" in refusal.value.remedy


@pytest.mark.parametrize("tie", PARTS)
def test_other_sequences_caches_and_sinks_are_refused(tie):
    with pytest.raises(UsageError, match="another sequence"):
        attend(call(150, 150, cross=True), parsed(tie))
    with pytest.raises(UsageError, match="same tokens"):
        attend(CASES["decoding"](), parsed(tie))
    with pytest.raises(UsageError, match="sinks"):
        attend(call(sinks=torch.zeros(HEADS)), parsed(tie))


@pytest.mark.parametrize("tie", PARTS)
def test_it_is_computed_in_whole_matrices_and_by_no_fused_path(tie):
    for path in ("auto", "eager"):
        assert route(two_sided(), parsed(tie), path) == "whole matrices"
    for words in (tie, f"rbf+{tie}"):
        with pytest.raises(UsageError, match="the whole sequence at once"):
            attend(two_sided(), parsed(words), "fused")


@pytest.mark.parametrize("tie", PARTS)
def test_spellings(tie):
    assert parsed(tie).spelling == parsed(f"exponential+{tie}").spelling == tie
    assert parsed(f"{tie}+rbf").spelling == f"rbf:gamma=0.5+{tie}"
    assert f"{tie}: {TIES[tie].formula}" in parsed(tie).formula
    for words, problem in {
        f"{tie}+window:4": "window hides some",
        f"elu+{tie}": "elu is a sum over features",
        f"linear+{tie}": "linear can be negative",
        f"hard+{tie}": "hard picks one key",
        f"primal:4+{tie}": "tied or filtered",
        f"symmetric+{tie}": "more than one tie",
    }.items():
        with pytest.raises(UsageError, match=problem):
            parsed(words)


# --- in a model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tie", PARTS)
@pytest.mark.parametrize("name", ["bert", "albert", "distilbert"])
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


@pytest.mark.parametrize("tie", PARTS)
def test_one_head_alone_loses_its_part_and_the_others_nothing(tie):
    model = families.build("bert")
    inputs = families.inputs("bert", model, padded=True)
    found = hooks.survey(model, inputs)[0].call
    own, new = attend(found, hooks.OWN), hooks.attend_swapped(found, hooks.Replacement(parsed(tie), (2,)))
    real = inputs["attention_mask"].bool()
    for head in (0, 1, 3):
        torch.testing.assert_close(new[:, :, head][real], own[:, :, head][real])
    every = attend(found, parsed(tie))
    torch.testing.assert_close(new[:, :, 2], every[:, :, 2])
    assert not torch.allclose(new[:, :, 2][real], own[:, :, 2][real], atol=1e-2)


@pytest.mark.parametrize("tie", PARTS)
def test_a_sweep_deletes_one_heads_part_at_a_time(tie):
    model = family("bert")
    effects = swap_kernel(model, tie, sweep="heads", **SMALL).swap.sweep
    assert len(effects) == 8
    for effect in effects[::3]:
        alone = swap_kernel(model, tie, layers=[effect.layer], heads=[effect.head], **SMALL).swap
        assert effect.delta == pytest.approx(alone.loss.delta, abs=1e-6)
        assert alone.kl > 1e-4


@pytest.mark.parametrize("tie", PARTS)
def test_of_an_encoder_decoder_the_encoder_alone(tie):
    model = family("t5")
    with pytest.raises(UsageError, match="is undefined in cross-attention"):
        swap_kernel(model, tie, **SMALL)
    with pytest.raises(UsageError, match="needs every pair of tokens"):
        swap_kernel(model, tie, part="decoder", **SMALL)
    swap = swap_kernel(model, tie, part="encoder", **SMALL).swap
    assert {site.part for site in swap.sites} == {"encoder"}
    assert swap.kl > 1e-4
    assert any("whole matrices" in note for note in swap.notes)


def test_a_decoder_is_refused_before_any_number():
    with pytest.raises(UsageError, match="this head's mask hides some"):
        swap_kernel(family("gpt2"), "skewless", **SMALL)


@pytest.mark.parametrize("tie", ["skewless", "keyless"])
def test_gradients_are_those_of_the_definition(tie):
    found, directions = two_sided("right padding"), []
    kept = ~expected(found, "exponential", tie).isnan()
    for of in (lambda c: attend(c, parsed(tie)), lambda c: expected(c, "exponential", tie)):
        leaves = [x.clone().requires_grad_() for x in (found.query, found.key)]
        result = of(replace(found, query=leaves[0], key=leaves[1]))
        directions.append(torch.autograd.grad(result[kept].square().sum(), leaves))
    for ours, theirs in zip(*directions, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert float(ours.abs().max()) > 1e-3


def test_skewless_can_be_healed_and_what_cuts_eigenvalues_is_refused():
    model = loaded(families.build("bert"), tiny.tokenizer("bert"))
    swap = attnlens.heal(model, "skewless", train=2, **SMALL).swap
    assert swap.healing.curve[-1].validation > 0
    for tie in ("mercer", "negativeless"):
        with pytest.raises(UsageError, match=f"{tie} can't be healed") as refusal:
            attnlens.heal("no/such/model", tie, train=2)
        assert "swap-kernel" in refusal.value.remedy


def test_a_matrix_that_is_not_finite_diverges_and_stops_nothing():
    found = two_sided()
    found.query[0, 1, 3] = math.nan
    for tie in PARTS:
        result = attend(found, parsed(tie))
        assert bool(result[0, :, 1].isnan().all())
        assert bool(result[1].isfinite().all())


def test_sites_are_left_as_they_were():
    model = families.build("bert")
    inputs = families.inputs("bert", model)
    with torch.no_grad():
        before = hooks.forward(model, inputs).logits
        sites = sites_of(model, inputs)
        with hooks.replace(model, sites, dict.fromkeys(sites, hooks.Replacement(parsed("mercer")))):
            inside = hooks.forward(model, inputs).logits
        after = hooks.forward(model, inputs).logits
    assert torch.equal(before, after)
    assert not torch.allclose(before, inside, atol=1e-2)
