"""Tests that traced attention is the model's own, against the interface's capture and naive scores."""

import math
from dataclasses import replace

import families
import loaded
import pytest
import torch
from torch import nn

from attnlens.analyzers import registry
from attnlens.errors import ModelError, UnreadableError
from attnlens.kernels.attention import attend
from attnlens.models import hooks
from attnlens.models.trace import trace_attention
from attnlens.models.trace.mode import find_lead
from attnlens.records import Site

BOTH = [name for name in families.REACHED if name not in (*families.TRACED, "gpt_oss", "gemma2")]
"""Families of the interface whose eager attention is a softmax of one product."""
HEADS, WIDTH, TOKENS = 3, 4, 6


def collect(model, run):
    """The calls that are traced while `run` runs the model, and the reasons for unreadable modules."""
    calls = []
    with torch.no_grad(), trace_attention(model, lambda call: calls.append(call) or call.value, prove=True) as refused:
        run()
    return calls, list(refused.values())


@pytest.mark.parametrize("name", BOTH)
def test_a_type_of_the_interface_is_traced_to_the_same_numbers(name):
    model = families.build(name)
    inputs = families.inputs(name, model, padded=name != "vit")
    expected = hooks.survey(model, inputs)
    with hooks.implementation(model, "eager"):
        calls, reasons = collect(model, lambda: hooks.forward(model, inputs))
    assert not reasons
    assert [call.module for call in calls] == [reached.module for reached in expected]
    for reached, call in zip(expected, calls, strict=True):
        ours, theirs = (part.query_key(reached.site).attention for part in (call, reached.call))
        seen = theirs.sum(-1, keepdim=True) > 0
        assert ((ours - theirs) * seen).norm() < 1e-6 * (theirs * seen).norm()
        assert torch.equal(call.paired_value, reached.call.paired_value)


def test_scores_with_a_sink_or_a_cap_are_refused_with_the_reason():
    why = {"gpt_oss": "its softmax has the shape", "gemma2": "its scores are not a multiple of ⟨query, key⟩"}
    for name, start in why.items():
        model = families.build(name)
        inputs = families.inputs(name, model)
        with hooks.implementation(model, "eager"):
            _, reasons = collect(model, lambda model=model, inputs=inputs: hooks.forward(model, inputs))
        assert [reason.startswith(start) for reason in reasons] == [True, True], reasons


@pytest.mark.parametrize("name", families.TRACED)
def test_sites_of_a_hand_written_family_are_traced_and_answered_and_biases_do_not_enter_the_shares(name):
    model = families.build(name).double()
    inputs = families.inputs(name, model)
    sites = hooks.survey(model, inputs)
    assert [reached.site.traced for reached in sites] == [True, True]
    assert hooks.run_survey(model, inputs).missed == {}
    assert hooks.identity_error(model, inputs) < 1e-6
    doubled = hooks.answer_calls(model, lambda call: 2 * attend(call, hooks.OWN, "eager"))
    assert hooks.difference(model, inputs, doubled) > 0.1, "control: the answer replaces the sum"
    whole = hooks.survey(families.build(name), inputs)
    for dtype in (torch.bfloat16, torch.float16):
        half = hooks.survey(families.build(name).to(dtype), inputs)
        assert [reached.site for reached in half] == [reached.site for reached in whole]
        for one, other in zip(half, whole, strict=True):
            assert one.call.scale == pytest.approx(other.call.scale, rel=1e-6), dtype
    of_tokens = [part for part in registry.list_analyzers() if part.source == "tokens"]
    analyzers = [part for part in of_tokens if any("share_" in measure.name for measure in part.measures)]
    assert analyzers
    for query_key in (reached.call.query_key(reached.site) for reached in sites):
        assert (query_key.bias is None) == (name in ("gptj", "gpt_neo"))
        for analyzer in analyzers:
            biased, bare = analyzer.function(query_key), analyzer.function(replace(query_key, bias=None))
            shares = [share for share in biased if "share_" in share and share != "tokens.share_first"]
            assert shares
            for share in shares:
                assert torch.equal(biased[share].nan_to_num(), bare[share].nan_to_num()), share


class Attention(nn.Module):
    """Attention written by hand, with functions that change its scores and apply its weights."""

    def __init__(self, scores, weigh=None):
        super().__init__()
        self.query, self.key, self.value, self.other = (nn.Linear(HEADS * WIDTH, HEADS * WIDTH) for _ in range(4))
        self.mix = nn.Parameter(torch.randn(HEADS, HEADS))
        self.temperature = nn.Parameter(torch.rand(HEADS, 1, 1) + 0.5)
        self.positions = nn.Parameter(torch.randn(HEADS, TOKENS, WIDTH))
        self.scores, self.weigh = scores, weigh or (lambda self, weights, value: weights @ value)

    def heads(self, map_, x):
        return map_(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)

    def forward(self, hidden_states):
        query, key, value = (self.heads(map_, hidden_states) for map_ in (self.query, self.key, self.value))
        weights = self.scores(self, query, key, hidden_states).softmax(-1)
        return self.weigh(self, weights, value).transpose(1, 2).flatten(2)


def product(query, key):
    return query @ key.transpose(-1, -2)


def traced(module):
    """The calls traced in a module on random tokens, none if it is refused, and the reasons."""
    calls, reasons = collect(module, lambda: module(tokens().to(next(module.parameters()).dtype)))
    return ([] if reasons else calls), reasons


def tokens():
    return torch.randn(2, TOKENS, HEADS * WIDTH, generator=torch.Generator().manual_seed(0))


READ = {
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
    "causal by a factor": lambda self, q, k, x: product(q, k) * (b := torch.ones(6, 6).tril()) - 1e4 * (1 - b),
    "a term of positions": lambda self, q, k, x: product(q, k) + product(q, self.positions.expand(2, -1, -1, -1) * 1),
    "values written in": lambda self, q, k, x: write(torch.zeros(2, HEADS, TOKENS, TOKENS), product(q, k)),
}
SUM, MULTIPLE = "its scores are a sum of 2 products of queries", "its scores are not a multiple of ⟨query, key⟩"
OF_INPUTS = "its scores are multiplied by a factor that depends on its inputs"
PAIRS = "the factor of its scores is not the same for all"
CHANGED, TWICE = "its output differs from softmax(scores)", "its attention weights are not applied to the values"
REFUSED = {
    "two products": (SUM, lambda self, q, k, x: 0.5 * product(q, k) + 0.5 * product(self.heads(self.other, x), k)),
    "disentangled, with a learned mix": (
        SUM,
        lambda self, q, k, x: self.temperature * product(q, k) + self.mix[0, 0] * product(k, self.heads(self.other, x)),
    ),
    "heads mixed": (MULTIPLE, lambda self, q, k, x: torch.einsum("gh,bhij->bgij", self.mix, product(q, k))),
    "a cap": (MULTIPLE, lambda self, q, k, x: 2 * torch.tanh(product(q, k) / 2)),
    "a factor of the inputs": (OF_INPUTS, lambda self, q, k, x: product(q, k) * x.mean((1, 2))[:, None, None, None]),
    "added to nothing": (OF_INPUTS, lambda self, q, k, x: torch.addcmul(torch.zeros(1), product(q, k), x.mean())),
    "a factor for each pair": (PAIRS, lambda self, q, k, x: product(q, k) * torch.rand(TOKENS, TOKENS)),
    "transposed": (PAIRS, lambda self, q, k, x: product(q, k).mT.contiguous()),
    "not a number": ("NaN is added to its scores", lambda self, q, k, x: product(q, k) + 0 * torch.inf),
    "a column more": (
        "its softmax has the shape",
        lambda self, q, k, x: torch.cat([product(q, k), q[..., :1]], -1),
        lambda self, weights, value: weights[..., :-1] @ value,
    ),
    "changed weights": (CHANGED, READ["plain"], lambda self, weights, value: (weights * self.temperature) @ value),
    "two sums": (TWICE, READ["plain"], lambda self, weights, value: weights @ value + weights @ (value + 1)),
    "a sum of a sum": (TWICE, READ["plain"], lambda self, weights, value: weights @ (weights @ value)),
}
"""The reason, and functions for the scores and for what the weights are applied to."""


def write(target, scores):
    target[..., : scores.shape[-1]] = scores
    return target


def test_one_product_is_read_however_it_is_written():
    for name, scores in READ.items():
        torch.manual_seed(0)
        module, x = Attention(scores), tokens()
        (call,), reasons = traced(module)
        assert not reasons, name
        with torch.no_grad():
            query, key, value = (module.heads(map_, x) for map_ in (module.query, module.key, module.value))
            expected = module.scores(module, query, key, x).softmax(-1) @ value
            assert torch.equal(call.value, value), name
            assert (attend(call, hooks.OWN, "eager").transpose(1, 2) - expected).abs().max() < 1e-5, name
        assert (call.allowed is not None) == ("causal" in name), name
        assert (call.bias is not None) == (name in ("baddbmm", "a term of positions", "less its maximum")), name


def test_anything_else_is_refused_with_the_reason():
    cases = [(name, torch.float32) for name in REFUSED]
    for name, dtype in (*cases, ("changed weights", torch.bfloat16), ("changed weights", torch.float16)):
        why, *functions = REFUSED[name]
        torch.manual_seed(0)
        calls, reasons = traced(Attention(*functions).to(dtype))
        assert not calls, name
        assert [reason.startswith(why) for reason in reasons] == [True], (name, reasons)


@pytest.mark.parametrize("weighted", [True, False])
def test_torchs_multi_head_attention_is_traced(weighted):
    torch.manual_seed(0)
    module, x = nn.MultiheadAttention(HEADS * WIDTH, HEADS, batch_first=True).eval(), tokens()
    with torch.no_grad():
        expected, probabilities = module(x, x, x, need_weights=True, average_attn_weights=False)
        outputs = []
        (call,), reasons = collect(module, lambda: outputs.append(module(x, x, x, need_weights=weighted)[0]))
        assert not reasons
        assert torch.allclose(outputs[0], expected, atol=1e-6)
        assert (call.query_key(Site("attention", 0, 0, "encoder")).attention - probabilities).abs().max() < 1e-6
        with trace_attention(module, lambda call: 0 * attend(call, hooks.OWN)):
            changed = module(x, x, x, need_weights=weighted)[0]
    assert torch.allclose(changed, module.out_proj.bias.expand_as(changed)), "control: zeros replace the sum"


LEADS = [
    ((2, 4), 16, 16, (32,), 1, 4),
    ((8,), 16, 16, (32,), 1, 4),  # sequences and heads merged
    ((2, 8), 49, 196, (392,), 1, 8),  # LeViT pools its queries: 2 · 8 · 49 / 392 is the number of sequences
    ((2, 4, 1), 4, 16, (32,), 1, 4),  # Hiera: windows behind the heads
    ((2, 2, 3), 5, 5, (30,), 1, 2),
    ((2, 5, 3), 4, 4, (40,), 2, 3),  # windows before the heads
    ((2, 1), 3136, 49, (6272,), 1, 1),  # keys reduced
    ((2, 3), 7, 7, None, 1, 3),
    ((1, 4), 16, 16, (1, 64), 1, 4),  # SqueezeBERT's channels before its tokens, of one sequence
    ((1, 4), 16, 16, (1, 16), 1, 4),
]
"""(leading axes, queries, keys, axes of the input, axis of the heads, heads)."""


def test_heads_are_distinguished_from_sequences_and_windows_or_refused():
    for shape, queries, keys, axes, axis, heads in LEADS:
        lead = find_lead(shape, queries, keys, axes)
        assert (lead.axis, lead.heads) == (axis, heads), shape
        scores = torch.randn(*shape, queries, keys)
        output = lead.split(scores).transpose(1, 2)
        assert output.shape == (math.prod(shape) // heads, queries, heads, keys), shape
        assert torch.equal(lead.back(output), scores), shape
    for shape, axes in (((8,), None), ((7,), (32,)), ((2, 4), (128,)), ((2, 2, 4), (999,)), ((1, 3), (3, 16))):
        with pytest.raises(UnreadableError, match="its heads can't be distinguished"):
            find_lead(shape, 16, 32 if shape == (2, 4) else 16, axes)


def test_gradients_flow_through_answers_and_no_hook_stays_behind():
    torch.manual_seed(0)
    module, x = Attention(READ["a factor for each head"]), tokens().requires_grad_()
    own = torch.autograd.grad(module(x).square().sum(), x)[0]
    with trace_attention(module, lambda call: attend(call, hooks.OWN, "eager")):
        ours = torch.autograd.grad(module(x).square().sum(), x)[0]
    assert torch.allclose(own, ours, atol=1e-4)
    with pytest.raises(ZeroDivisionError), trace_attention(module, lambda _call: 1 / 0):
        module(x)
    assert not module._forward_hooks
    assert not module._forward_pre_hooks


@pytest.mark.parametrize(("name", "row"), [("falcon", 0), ("bloom", 10)])
def test_nan_hides_no_site_and_scores_that_overflow_are_refused_with_the_true_reason(name, row):
    model = loaded.family(name)
    weight = model.model.transformer.h[0].self_attention.query_key_value.weight
    inputs = {"input_ids": torch.arange(8)[None]}
    with torch.no_grad():
        weight[row, 0] = torch.nan  # a query (Falcon) or a key (BLOOM) of head 0
        assert [each.site.layer for each in hooks.run_survey(model.model, inputs).sites] == [0, 1]
        assert weight.isnan().nonzero().tolist() == [[row, 0]], "the survey restores the weights"
        weight[:] = torch.nan
        assert [each.site.layer for each in hooks.run_survey(model.model, inputs).sites] == [0, 1]
        weight[:] = 1e30
    padding = {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])}  # queries that see no key prove nothing
    for more in ({}, padding):
        with pytest.raises(ModelError, match="not finite") as refusal:
            hooks.run_survey(model.model, inputs | more)
        assert "NaN" in refusal.value.remedy
