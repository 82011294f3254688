"""Tests that traced attention is the model's own: against the interface's capture, naive scores and planted weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import families
import model_types
import pytest
import torch
from torch import Tensor, nn

from attnlens.analyzers import registry
from attnlens.analyzers.registry import Analyzer
from attnlens.errors import UnreadableError
from attnlens.kernels.attention import attend
from attnlens.models import hooks, weights
from attnlens.models.trace import trace_attention
from attnlens.models.trace.mode import find_lead
from attnlens.records import Call, Site

BOTH = [name for name in families.REACHED if name not in (*families.TRACED, "gpt_oss", "gemma2")]
"""Families of the interface whose eager attention is a softmax of one product."""
MORE = (
    *("arcee", "biogpt", "camembert", "cohere2", "electra", "ernie", "exaone4", "gemma", "glm", "glm4"),
    *("granite", "helium", "jamba", "m2m_100", "mixtral", "nemotron", "olmo", "olmo2", "persimmon", "phi"),
    *("seed_oss", "stablelm", "starcoder2", "xlm-roberta"),
)
"""Types that the sweep builds, of families that are not among these."""
HEADS, WIDTH, TOKENS = 3, 4, 6


# --- the same as through the interface --------------------------------------------------------------------------------


def both_ways(model: nn.Module, inputs: dict[str, Tensor]) -> float:
    """The largest relative difference of log weights between what the tracer and the interface see."""
    expected = hooks.survey(model, inputs)
    found: list[Call] = []
    trace = trace_attention(model, lambda call: found.append(call) or call.value, prove=True)
    with torch.no_grad(), hooks.implementation(model, "eager"), trace as refused:
        hooks.forward(model, inputs)
    assert not refused
    assert [call.module for call in found] == [one.module for one in expected]
    errors = [0.0]
    for one, call in zip(expected, found, strict=True):
        ours, theirs = (part.query_key(one.site).attention for part in (call, one.call))
        seen = theirs.sum(-1, keepdim=True) > 0
        errors.append(float(((ours - theirs) * seen).norm() / (theirs * seen).norm()))
        assert torch.equal(call.paired_value, one.call.paired_value)
    return max(errors)


@pytest.mark.parametrize("name", BOTH)
def test_a_family_of_the_interface_is_traced_to_the_same_numbers(name: str) -> None:
    model = families.build(name)
    assert both_ways(model, families.inputs(name, model, padded=name != "vit")) < 1e-6


@pytest.mark.parametrize("name", MORE)
def test_a_type_of_the_interface_is_traced_to_the_same_numbers(name: str) -> None:
    model = model_types.build(name)
    ids = torch.randint(3, 300, (2, 9), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    assert both_ways(model.eval(), given) < 1e-6


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2"])
def test_scores_with_a_sink_or_a_cap_are_refused_with_the_reason(name: str) -> None:
    model = families.build(name)
    with torch.no_grad(), hooks.implementation(model, "eager"), trace_attention(model, unused, prove=True) as refused:
        hooks.forward(model, families.inputs(name, model))
    why = {"gpt_oss": "its softmax has the axes", "gemma2": "its scores are not a multiple of ⟨query, key⟩"}
    assert len(refused) == 2
    assert all(reason.startswith(why[name]) for reason in refused.values())


def unused(call: Call) -> Tensor:
    return call.value


# --- hand-written families --------------------------------------------------------------------------------------------


def surveyed(name: str) -> tuple[nn.Module, dict[str, Tensor], list[hooks.SiteCall]]:
    model = families.build(name).double()
    inputs = families.inputs(name, model)
    return model, inputs, hooks.survey(model, inputs)


@pytest.mark.parametrize("name", families.TRACED)
def test_every_site_of_a_hand_written_family_is_traced_and_answered(name: str) -> None:
    model, inputs, reached = surveyed(name)
    assert len(reached) == 2
    assert all(found.site.traced for found in reached)
    assert hooks.run_survey(model, inputs).missed == {}
    assert hooks.identity_error(model, inputs) < 1e-6
    doubled = hooks.answer_calls(model, lambda call: 2 * attend(call, hooks.OWN, "eager"))
    assert hooks.difference(model, inputs, doubled) > 0.1, "the control: what answers takes the sum's place"


@pytest.mark.parametrize("name", families.TRACED)
def test_position_biases_stand_outside_the_shares(name: str) -> None:
    _, _, reached = surveyed(name)
    of_tokens = [
        found for found in registry.list_analyzers() if found.source == "tokens" and isinstance(found, Analyzer)
    ]
    checked = 0
    for found in reached:
        query_key = found.call.query_key(found.site)
        assert (query_key.bias is None) == (name in ("gptj", "gpt_neo"))
        for analyzer in of_tokens:
            given, bare = analyzer.function(query_key), analyzer.function(replace(query_key, bias=None))
            for share in (share for share in given if "share_" in share and share != "tokens.share_first"):
                assert torch.equal(given[share].nan_to_num(), bare[share].nan_to_num()), share
                checked += 1
    assert checked


def test_alibi_of_bloom_is_what_its_own_function_builds() -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    _, inputs, reached = surveyed("bloom")
    alibi = build_alibi_tensor(inputs["attention_mask"], 4, torch.float64).view(2, 4, 1, -1)
    for found in reached:
        bias = found.call.bias
        seen = found.call.visible()
        expected = torch.where(seen, alibi.expand_as(bias), 0.0)
        assert (torch.where(seen, bias, 0.0) - expected).abs().max() < 1e-12


def test_debertas_content_is_told_from_its_terms_of_positions() -> None:
    model, _, reached = surveyed("deberta_v2")
    for found in reached:
        part, hidden = found.module, found.arguments["hidden_states"]
        query, key = (map_(hidden).unflatten(-1, (4, -1)).transpose(1, 2) for map_ in (part.query_proj, part.key_proj))
        content = query @ key.transpose(-1, -2) / math.sqrt(3 * query.shape[-1])
        ours = found.call.scale * found.call.query @ found.call.key.transpose(-1, -2)
        assert (ours - content).abs().max() < 1e-6
        positional = part.disentangled_attention_bias(
            query.flatten(0, 1), key.flatten(0, 1), None, model_positions(model), 3
        )
        expected = positional.view_as(content)
        bias = found.call.bias.expand_as(expected)
        assert (bias - expected).abs().max() < 1e-6, "its square root of the scale is a float32"
        assert expected.std() > 0.1, "the control: there are such terms"


def model_positions(model: nn.Module) -> Tensor:
    return model.deberta.encoder.get_rel_embedding()


# --- planted weights --------------------------------------------------------------------------------------------------

PLANTED: dict[str, Callable[[nn.Module], tuple[Tensor, Tensor]]] = {
    "mpnet": lambda part: (part.q.weight.view(4, 10, 40), part.k.weight.view(4, 10, 40)),
    "deberta_v2": lambda part: (part.query_proj.weight.view(4, 10, 40), part.key_proj.weight.view(4, 10, 40)),
    "gptj": lambda part: (part.q_proj.weight.view(4, 10, 40), part.k_proj.weight.view(4, 10, 40)),
    "gpt_neo": lambda part: (part.q_proj.weight.view(4, 10, 40), part.k_proj.weight.view(4, 10, 40)),
    "bloom": lambda part: part.query_key_value.weight.view(4, 3, 10, 40).unbind(1)[:2],
    "falcon": lambda part: (part.query_key_value.weight[:40].view(4, 10, 40), part.query_key_value.weight[40:50][None]),
}
"""Where the rows of W_Q and W_K of every head stand in a family's own layout."""
WRONG: dict[str, Callable[[nn.Module], tuple[Tensor, Tensor]]] = {
    "bloom": lambda part: part.query_key_value.weight.view(3, 4, 10, 40).unbind(0)[:2],
    "falcon": lambda part: (part.query_key_value.weight[10:50].view(4, 10, 40), part.query_key_value.weight[:10][None]),
}
"""The same, read as another layout."""


def planted(name: str, layout: Callable[[nn.Module], tuple[Tensor, Tensor]]) -> list[Tensor]:
    """weights.definiteness of all heads where head 0 has W_Q = W_K and head 2 W_Q = −W_K."""
    model = families.build(name).double()
    for part in {found.module for found in hooks.survey(model, families.inputs(name, model))}:
        query, key = layout(part)
        query[0], query[2] = key[0], -key[2 % len(key)]  # falcon has one key head
    inputs = families.inputs(name, model)
    one = {key: value[:, :1] for key, value in inputs.items()}
    read = weights.factors(model, hooks.survey(model, one), hooks.survey(model, inputs))
    symmetry = next(found for found in registry.select_analyzers(["symmetry"]) if found.source == "weights").function
    return [symmetry(factors.query_key)["weights.definiteness"] for factors in read]


@pytest.mark.parametrize("name", PLANTED)
def test_planted_weights_read_exactly_one_and_minus_one(name: str) -> None:
    for definiteness in planted(name, PLANTED[name]):
        assert definiteness[0] == pytest.approx(1, abs=1e-7)
        assert definiteness[2] == pytest.approx(-1, abs=1e-7)
        assert definiteness[1].abs() < 0.9, "the control: a random head"


@pytest.mark.parametrize("name", WRONG)
def test_planted_weights_of_another_layout_do_not(name: str) -> None:
    for definiteness in planted(name, WRONG[name]):
        assert definiteness[0].abs() < 0.9


# --- what is refused --------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention written by hand, with a way to change its scores and its weights."""

    def __init__(self, scores: Callable[..., Tensor], weigh: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        width = HEADS * WIDTH
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.other, self.mix = nn.Linear(width, width), nn.Parameter(torch.randn(HEADS, HEADS))
        self.temperature = nn.Parameter(torch.rand(HEADS, 1, 1) + 0.5)
        self.positions = nn.Parameter(torch.randn(HEADS, TOKENS, WIDTH))
        self.scores, self.weigh = scores, weigh or (lambda self, weights, value: weights @ value)

    def heads(self, map_: nn.Linear, x: Tensor) -> Tensor:
        return map_(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states
        query, key, value = (self.heads(map_, x) for map_ in (self.query, self.key, self.value))
        weights = self.scores(self, query, key, x).softmax(-1)
        return self.weigh(self, weights, value).transpose(1, 2).flatten(2)


def product(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.transpose(-1, -2)


def traced(module: nn.Module, *, seed: int = 0) -> tuple[list[Call], list[str]]:
    """What is traced of a module that is called on random tokens, and why it is refused."""
    found: list[Call] = []
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, TOKENS, HEADS * WIDTH, generator=generator)
    with torch.no_grad(), trace_attention(module, lambda call: found.append(call) or call.value, prove=True) as refused:
        module(x)
    return ([] if refused else found), list(refused.values())


READ: dict[str, Callable[..., Tensor]] = {
    "plain": lambda self, q, k, x: product(q, k) / 2,
    "in place": lambda self, q, k, x: product(q, k).mul_(0.25).add_(1),
    "einsum": lambda self, q, k, x: torch.einsum("bhid,bhjd->bhij", q, k),
    "einsum with an ellipsis": lambda self, q, k, x: torch.einsum("...id, ...jd -> ...ij", q, k),
    "baddbmm by name": lambda self, q, k, x: torch.baddbmm(
        input=torch.zeros(1), batch1=q.flatten(0, 1), batch2=k.flatten(0, 1).mT, alpha=0.3
    ).view(2, HEADS, TOKENS, TOKENS),
    "not below the least number": lambda self, q, k, x: torch.max(product(q, k), torch.full((), -3e38)),
    "batches": lambda self, q, k, x: torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(2, HEADS, TOKENS, TOKENS),
    "baddbmm": lambda self, q, k, x: torch.baddbmm(
        self.positions[0, :, :1].expand(6, TOKENS, TOKENS), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0.5, alpha=0.3
    ).view(2, HEADS, TOKENS, TOKENS),
    "a factor for each head": lambda self, q, k, x: product(q, k) * self.temperature,
    "less its maximum": lambda self, q, k, x: (s := product(q, k) / 3) - s.amax(-1, keepdim=True),
    "causal": lambda self, q, k, x: product(q, k).masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -1e9),
    "causal by a factor": lambda self, q, k, x: (
        product(q, k) * (b := torch.ones(TOKENS, TOKENS).tril()) - 1e4 * (1 - b)
    ),
    "a term of positions": lambda self, q, k, x: product(q, k) + product(q, self.positions.expand(2, -1, -1, -1) * 1),
    "values written in": lambda self, q, k, x: write(torch.zeros(2, HEADS, TOKENS, TOKENS), product(q, k)),
}
REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "two products": (
        lambda self, q, k, x: 0.5 * product(q, k) + 0.5 * product(self.heads(self.other, x), k),
        "its scores are a sum of 2 products of queries and keys",
    ),
    "disentangled, with a learned mix": (
        lambda self, q, k, x: self.temperature * product(q, k) + self.mix[0, 0] * product(k, self.heads(self.other, x)),
        "its scores are a sum of 2 products of queries and keys",
    ),
    "heads mixed": (
        lambda self, q, k, x: torch.einsum("gh,bhij->bgij", self.mix, product(q, k)),
        "its scores are not a multiple of ⟨query, key⟩",
    ),
    "a factor of the inputs": (
        lambda self, q, k, x: product(q, k) * x.mean((1, 2))[:, None, None, None],
        "the factor of its scores depends on its inputs",
    ),
    "a factor of the inputs, added to nothing": (
        lambda self, q, k, x: torch.addcmul(torch.zeros(1), product(q, k), x.mean()),
        "the factor of its scores depends on its inputs",
    ),
    "a factor for each pair": (
        lambda self, q, k, x: product(q, k) * torch.rand(TOKENS, TOKENS),
        "the factor of its scores is not the same for all pairs",
    ),
    "a cap": (lambda self, q, k, x: 2 * torch.tanh(product(q, k) / 2), "its scores are not a multiple of ⟨query, key⟩"),
    "transposed": (
        lambda self, q, k, x: product(q, k).mT.contiguous(),
        "the factor of its scores is not the same for all pairs",
    ),
    "not a number": (lambda self, q, k, x: product(q, k) + 0 * torch.inf, "NaN is added to its scores"),
    "a column more": (lambda self, q, k, x: torch.cat([product(q, k), q[..., :1]], -1), "its softmax has the axes"),
}


def write(target: Tensor, scores: Tensor) -> Tensor:
    target[..., : scores.shape[-1]] = scores
    return target


@pytest.mark.parametrize("name", READ)
def test_one_product_is_read_however_it_is_written(name: str) -> None:
    torch.manual_seed(0)
    module = Attention(READ[name])
    (call,), reasons = traced(module)
    assert not reasons
    x = torch.randn(2, TOKENS, HEADS * WIDTH, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        query, key, value = (module.heads(map_, x) for map_ in (module.query, module.key, module.value))
        weights = module.scores(module, query, key, x).softmax(-1)
        assert torch.equal(call.value, value)
        ours = attend(call, hooks.OWN, "eager").transpose(1, 2)
    assert (ours - weights @ value).abs().max() < 1e-5
    assert (call.allowed is not None) == ("causal" in name)
    assert (call.bias is not None) == (name in ("baddbmm", "a term of positions", "less its maximum"))


@pytest.mark.parametrize("name", REFUSED)
def test_anything_else_is_refused_with_what_was_found(name: str) -> None:
    torch.manual_seed(0)
    scores, why = REFUSED[name]
    if name == "a column more":
        module = Attention(scores, lambda self, weights, value: weights[..., :-1] @ value)
    else:
        module = Attention(scores)
    found, reasons = traced(module)
    assert not found
    assert len(reasons) == 1
    assert reasons[0].startswith(why), reasons[0]


@pytest.mark.parametrize(
    ("weigh", "why"),
    [
        (lambda self, weights, value: (weights * self.temperature) @ value, "its output differs from softmax(scores)"),
        (
            lambda self, weights, value: weights @ value + weights @ (value + 1),
            "its attention weights are not applied to the values",
        ),
        (
            lambda self, weights, value: weights @ (weights @ value),
            "its attention weights are not applied to the values",
        ),
    ],
)
def test_weights_that_are_changed_or_used_twice_are_refused(weigh: Callable[..., Tensor], why: str) -> None:
    torch.manual_seed(0)
    found, reasons = traced(Attention(READ["plain"], weigh))
    assert not found
    assert reasons[0].startswith(why), reasons[0]


HALF = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", families.TRACED)
def test_a_family_is_traced_in_half_precision_with_the_scale_of_float32(name: str, dtype: torch.dtype) -> None:
    model = families.build(name)
    inputs = families.inputs(name, model)
    whole, half = hooks.survey(model, inputs), hooks.survey(model.to(dtype), inputs)
    assert [found.site for found in half] == [found.site for found in whole]
    for one, other in zip(half, whole, strict=True):
        assert one.call.scale == pytest.approx(other.call.scale, rel=1e-6)


@pytest.mark.parametrize("dtype", HALF)
def test_in_half_precision_changed_weights_are_refused_too(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = Attention(READ["plain"], lambda self, weights, value: (weights * self.temperature) @ value).to(dtype)
    x = torch.randn(2, TOKENS, HEADS * WIDTH).to(dtype)
    with torch.no_grad(), trace_attention(module, unused, prove=True) as refused:
        module(x)
    (reason,) = refused.values()
    assert reason.startswith("its output differs from softmax(scores)")


def test_a_choice_among_experts_is_no_attention() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = nn.Linear(12, 4), nn.Parameter(torch.randn(4, 12))

        def forward(self, x: Tensor) -> Tensor:
            return self.router(x).softmax(-1) @ self.experts

    assert traced(Experts()) == ([], [])


@pytest.mark.parametrize("weighted", [True, False])
def test_torchs_own_multi_head_attention_is_read(weighted: bool) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(HEADS * WIDTH, HEADS, batch_first=True).eval()
    whole = SimpleNamespace(calls=[])
    x = torch.randn(2, TOKENS, HEADS * WIDTH)
    with torch.no_grad():
        expected, probabilities = module(x, x, x, need_weights=True, average_attn_weights=False)
        with trace_attention(module, lambda call: whole.calls.append(call) or call.value, prove=True) as refused:
            assert torch.allclose(module(x, x, x, need_weights=weighted)[0], expected, atol=1e-6)
        assert not refused
        (call,) = whole.calls
        assert (call.query_key(Site("attention", 0, 0, "encoder")).attention - probabilities).abs().max() < 1e-6
        with trace_attention(module, lambda call: 0 * attend(call, hooks.OWN)):
            changed = module(x, x, x, need_weights=weighted)[0]
    assert torch.allclose(changed, module.out_proj.bias.expand_as(changed)), "the control: zeros take the sum's place"


@pytest.mark.parametrize(
    ("shape", "queries", "keys", "tokens", "axis", "heads"),
    [
        ((2, 4), 16, 16, 32, 1, 4),
        ((8,), 16, 16, 32, 1, 4),  # sequences and heads merged
        ((2, 8), 49, 196, 392, 1, 8),  # LeViT pools its queries: 2 · 8 · 49 / 392 is the number of sequences
        ((2, 4, 1), 4, 16, 32, 1, 4),  # Hiera: windows behind the heads
        ((2, 2, 3), 5, 5, 30, 1, 2),
        ((2, 5, 3), 4, 4, 40, 2, 3),  # windows before the heads
        ((2, 1), 3136, 49, 6272, 1, 1),  # keys reduced
        ((2, 3), 7, 7, None, 1, 3),
        ((1, 4), 16, 16, (1, 64), 1, 4),  # SqueezeBERT's channels before its tokens, of one sequence
        ((1, 4), 16, 16, (1, 16), 1, 4),
    ],
)
def test_heads_are_told_from_sequences_and_windows(shape, queries, keys, tokens, axis, heads) -> None:
    lead = find_lead(shape, queries, keys, (tokens,) if isinstance(tokens, int) else tokens)
    assert (lead.axis, lead.heads) == (axis, heads)
    scores = torch.randn(*shape, queries, keys)
    output = lead.split(scores).transpose(1, 2)
    assert output.shape == (math.prod(shape) // heads, queries, heads, keys)
    assert torch.equal(lead.back(output), scores)


@pytest.mark.parametrize(
    ("shape", "tokens"), [((8,), None), ((7,), (32,)), ((2, 4), (128,)), ((2, 2, 4), (999,)), ((1, 3), (3, 16))]
)
def test_heads_that_cannot_be_told_are_refused(shape: tuple[int, ...], tokens: tuple[int, ...] | None) -> None:
    with pytest.raises(UnreadableError, match="its heads can't be distinguished"):
        find_lead(shape, 16, 16 if shape != (2, 4) else 32, tokens)


def test_gradients_flow_through_what_answers() -> None:
    torch.manual_seed(0)
    module = Attention(READ["a factor for each head"])
    x = torch.randn(2, TOKENS, HEADS * WIDTH, requires_grad=True)
    own = torch.autograd.grad(module(x).square().sum(), x)[0]
    with trace_attention(module, lambda call: attend(call, hooks.OWN, "eager")):
        ours = torch.autograd.grad(module(x).square().sum(), x)[0]
    assert torch.allclose(own, ours, atol=1e-4)


def test_nothing_stays_behind() -> None:
    module = Attention(READ["plain"])
    with pytest.raises(ZeroDivisionError), trace_attention(module, lambda _call: 1 / 0):
        module(torch.randn(1, TOKENS, HEADS * WIDTH))
    assert not module._forward_hooks
    assert not module._forward_pre_hooks
