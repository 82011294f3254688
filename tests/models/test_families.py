"""Tests that the tiny models make attention on which a test can fail: not uniform, not one-hot, masked."""

from __future__ import annotations

import families
import pytest
import torch

LEAST_KEYS = 3


def attentions(name: str, **options: object) -> list[torch.Tensor]:
    model = families.build(name)
    model.set_attn_implementation("eager")
    outputs = model(**families.inputs(name, model, **options), output_attentions=True)
    names = ["attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"]
    found = [tensor for key in names for tensor in outputs.get(key) or ()]
    for part in ("text_model_output", "vision_model_output"):
        if part in outputs:
            found += list(outputs[part].attentions)
    return found


@pytest.mark.parametrize("name", families.REACHED)
def test_attention_is_neither_uniform_nor_one_hot(name: str) -> None:
    found = attentions(name, batch=3)
    assert found
    for attention in found:
        keys = (attention > 1e-12).sum(-1)
        entropy = -(attention * attention.clamp_min(1e-30).log()).sum(-1) / keys.log()
        largest = attention.amax(-1)
        rows = keys >= LEAST_KEYS
        assert 0.2 < entropy[rows].mean() < 0.9
        assert 0.3 < largest[rows].mean() < 0.9


@pytest.mark.parametrize("name", families.REACHED)
def test_heads_and_layers_differ(name: str) -> None:
    for attention in attentions(name):
        heads = attention.transpose(0, 1).flatten(1)
        assert torch.cdist(heads, heads).fill_diagonal_(torch.inf).min() > 0.1


@pytest.mark.parametrize("name", families.FAMILIES)
def test_same_seed_gives_the_same_model_and_leaves_the_global_state_alone(name: str) -> None:
    state = torch.get_rng_state()
    first, second, other = families.build(name), families.build(name), families.build(name, seed=1)
    assert torch.equal(state, torch.get_rng_state())
    assert not first.training
    for key, parameter in first.named_parameters():
        assert not parameter.requires_grad
        assert torch.equal(parameter, second.get_parameter(key))
    assert any(not torch.equal(parameter, other.get_parameter(key)) for key, parameter in first.named_parameters())


@pytest.mark.parametrize("name", [name for name in families.REACHED if name != "vit"])
def test_padding_is_masked_and_would_show_if_it_were_not(name: str) -> None:
    model = families.build(name)
    encoder = name in ("bert", "roberta", "distilbert", "albert", "t5", "bart")
    # behind every real token of a causal model, padding changes nothing there even when its mask is dropped
    given = families.inputs(name, model, padded=True, side="right" if encoder else "left")
    prefix = "decoder_" if name == "whisper" else ""
    ids, mask = f"{prefix}input_ids", f"{prefix}attention_mask"
    assert given[mask].min() == 0
    real = given["decoder_attention_mask" if model.config.is_encoder_decoder else mask].bool()
    changed = given | {ids: given[ids].masked_fill(given[mask] == 0, 77)}
    unmasked = changed | {mask: torch.ones_like(given[mask])}
    expected = readout(model(**given))[real]
    assert torch.allclose(expected, readout(model(**changed))[real], atol=1e-5)
    assert not torch.allclose(expected, readout(model(**unmasked))[real], atol=1e-2)


def readout(outputs: object) -> torch.Tensor:
    if "logits" in outputs:
        return outputs.logits
    return outputs.text_model_output.last_hidden_state
