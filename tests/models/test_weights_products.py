"""Tests that latent attention's W_Q and W_K, read as products of its matrices, are the Jacobian's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import model_types
import pytest
import torch
import transformers as tf
from loaded import loaded
from torch import Tensor, nn

import attnlens
from attnlens.errors import NotBilinearError
from attnlens.models import hooks, texts, weights
from attnlens.models.weights import probe as probing
from attnlens.models.weights import query_key_maps
from attnlens.models.weights.probe import Maps, Probe, float64_weights, linear, norms_inside, smallest

ALIKE = 1e-9
"""Largest relative difference between what is read as products and by the Jacobian."""
TYPES = ("deepseek_v3", "kimi_k25", "kimi_linear", "minicpm3", "longcat_flash", "youtu")
"""A latent of queries and keys, of keys alone, with scales behind them."""
LATENT = {
    "vocab_size": 99, "hidden_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 56, "moe_intermediate_size": 24, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12, "v_head_dim": 10, "first_k_dense_replace": 1,
}  # fmt: skip


def enlarged(model: Any) -> Any:
    """The model with queries and keys 60 times as large, gains and biases neither 1 nor 0."""
    draw = torch.Generator().manual_seed(1)
    for name, part in model.eval().requires_grad_(False).named_parameters():
        if model_types.SHARP.search(name) and part.ndim == 2:
            part.mul_(60)
        elif part.ndim == 1:
            part.add_(0.3 * torch.randn(part.shape, generator=draw))
    return model


def deepseek(**changes: Any) -> Any:
    torch.manual_seed(0)
    return enlarged(tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**LATENT | changes)).double())


def probes(model: Any) -> list[Probe]:
    """The probe of every site."""
    inputs = texts.placeholder(loaded(model), 1, 0).batches[0].inputs
    found = hooks.survey(model, hooks.as_dtype(inputs, model.dtype))
    return [smallest(Probe(model, one, float64_weights(one.module), one.layout)) for one in found]


def read(probe: Probe, read_by: Callable[..., Maps | None]) -> Maps | None:
    with linear(norms_inside(probe.target.module)):
        return read_by(probe)


def jacobian(probe: Probe) -> Maps:
    found = read(probe, lambda one: query_key_maps._differentiate(one, None))
    assert found is not None
    return found


def apart(one: Maps, other: Maps) -> float:
    """The largest relative difference of W_Q, W_K and biases."""
    parts = ("query", "key", "query_bias", "key_bias")
    pairs = [(getattr(one, part), getattr(other, part)) for part in parts]
    assert all(ours.shape == theirs.shape for ours, theirs in pairs)
    return max(float((ours - theirs).norm() / theirs.norm().clamp(min=1e-300)) for ours, theirs in pairs)


@pytest.mark.parametrize("name", TYPES)
def test_products_are_the_jacobian(name: str) -> None:
    checked = 0
    for probe in probes(enlarged(model_types.build(name))):
        found, expected = read(probe, probing.match_weights), jacobian(probe)
        assert found is not None
        assert apart(found, expected) <= 1e-12
        with torch.no_grad():
            spoilt = {key: part + 1e-6 * part.roll(1, 0) for key, part in probe.weights.items()}
        other = read(replace(probe, weights=spoilt), probing.match_weights)
        assert other is not None
        assert apart(other, expected) > ALIKE, "a control"
        checked += 1
    assert checked >= 1


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}, {"q_lora_rank": None}], ids=str)
def test_biases_below_the_norm_and_queries_without_a_latent(changes: dict[str, Any]) -> None:
    model = deepseek(**changes)
    model.model.layers[0].self_attn.kv_a_layernorm.weight[2:5] = 0
    (probe,) = probes(model)
    found = read(probe, probing.match_weights)
    assert found is not None
    assert apart(found, jacobian(probe)) <= 1e-12


def measured(model: Any, monkeypatch: pytest.MonkeyPatch, *, differentiated: bool) -> Tensor:
    """All numbers of the report."""

    def refused(*_given: object) -> Maps | None:
        if differentiated:
            return None
        raise AssertionError("differentiated")

    with monkeypatch.context() as patch:
        patch.setattr(query_key_maps, "match_weights" if differentiated else "_differentiate", refused)
        report = attnlens.inspect(loaded(model), source="weights", length=7)
    assert report.coverage.complete
    numbers = [number for head in report.heads for measure in head.measures.values() for number in [measure.value]]
    numbers += [number for head in report.heads for curve in head.curves.values() for number in curve]
    return torch.tensor([*numbers, *report.summary.layer_symmetry], dtype=torch.float64)


def test_a_report_has_the_numbers_of_the_jacobian(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = measured(deepseek(), monkeypatch, differentiated=False)
    theirs = measured(deepseek(), monkeypatch, differentiated=True)
    assert len(ours) > 90
    torch.testing.assert_close(ours, theirs, rtol=ALIKE, atol=1e-12)
    model = deepseek()
    model.model.layers[0].self_attn.q_a_layernorm.weight[0] *= 1.001
    changed = measured(model, monkeypatch, differentiated=False)
    assert not torch.allclose(changed, theirs, rtol=ALIKE, atol=1e-12), "a control"


class Between(nn.Module):
    """Something behind a norm."""

    def __init__(self, norm: nn.Module, behind: nn.Module) -> None:
        super().__init__()
        self.norm, self.behind = norm, behind

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.norm(x))


@pytest.mark.parametrize("latent", ["q_a_layernorm", "kv_a_layernorm"])
@pytest.mark.parametrize("kind", ["norm with a bias", "SiLU"])
def test_what_is_not_linear_between_the_matrices_is_not_read(kind: str, latent: str) -> None:
    model = deepseek()
    module = model.model.layers[0].self_attn
    norm = getattr(module, latent)
    biased = enlarged(nn.LayerNorm(len(norm.weight)).double())
    setattr(module, latent, biased if kind == "norm with a bias" else Between(norm, nn.SiLU()))
    (probe,) = probes(model)
    assert read(probe, probing.match_weights) is None
    inputs = [texts.placeholder(loaded(model), tokens, 0).batches[0].inputs for tokens in (1, 7)]
    (found,) = weights.factors(model, *(hooks.survey(model, one) for one in inputs))
    assert isinstance(found, NotBilinearError)


@pytest.mark.parametrize("latent", ["q_a_layernorm", "kv_a_layernorm"])
def test_a_gain_that_is_left_out_is_refused(latent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (probe,) = probes(deepseek())
    assert read(probe, probing.match_weights) is not None
    gain, noted_by = getattr(probe.target.module, latent).weight, probing._record_inner_inputs

    @contextmanager
    def without(module: nn.Module) -> Iterator[list[Tensor]]:
        with noted_by(module) as noted:
            yield noted
            noted[:] = [part / gain if part.shape[-1] == len(gain) else part for part in noted]

    monkeypatch.setattr(probing, "_record_inner_inputs", without)
    assert read(probe, probing.match_weights) is None


def test_hooks_are_taken_away() -> None:
    (probe,) = probes(deepseek())
    read(probe, probing.match_weights)
    assert not any(part._forward_pre_hooks for part in probe.target.module.modules())
    with pytest.raises(ZeroDivisionError), probing._record_inner_inputs(probe.target.module):
        raise ZeroDivisionError
    assert not any(part._forward_pre_hooks for part in probe.target.module.modules())
