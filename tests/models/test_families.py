"""Tests that the tiny models' attention can fail a test: it is neither uniform nor one-hot, and masked."""

import families
import pytest
import torch

ATTENTIONS = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
ENCODERS = ("bert", "roberta", "distilbert", "albert", "t5", "bart")


def read(outputs):
    return outputs.logits if "logits" in outputs else outputs.text_model_output.last_hidden_state


@pytest.mark.parametrize("name", families.REACHED)
def test_attention_of_a_tiny_model_is_sharp_but_not_one_hot_and_masked(name):
    model = families.build(name)
    model.set_attn_implementation("eager")
    outputs = model(**families.inputs(name, model, batch=3), output_attentions=True)
    towers = [outputs, *(outputs[part] for part in ("text_model_output", "vision_model_output") if part in outputs)]
    attentions = [tensor for tower in towers for key in ATTENTIONS for tensor in tower.get(key) or ()]
    assert attentions
    for attention in attentions:
        keys = (attention > 1e-12).sum(-1)
        entropy = -(attention * attention.clamp_min(1e-30).log()).sum(-1) / keys.log()
        assert 0.2 < entropy[keys >= 3].mean() < 0.9
        assert 0.3 < attention.amax(-1)[keys >= 3].mean() < 0.9
        heads = attention.transpose(0, 1).flatten(1)
        assert torch.cdist(heads, heads).fill_diagonal_(torch.inf).min() > 0.1, "heads differ"
    if name == "vit":
        return
    # behind every real token of a causal model, padding changes nothing there even when its mask is dropped
    inputs = families.inputs(name, model, padded=True, side="right" if name in ENCODERS else "left")
    ids, mask = (("decoder_" if name == "whisper" else "") + part for part in ("input_ids", "attention_mask"))
    assert inputs[mask].min() == 0
    real = inputs["decoder_attention_mask" if model.config.is_encoder_decoder else mask].bool()
    changed = inputs | {ids: inputs[ids].masked_fill(inputs[mask] == 0, 77)}
    expected = read(model(**inputs))[real]
    assert torch.allclose(expected, read(model(**changed))[real], atol=1e-5)
    unmasked = changed | {mask: torch.ones_like(inputs[mask])}
    assert not torch.allclose(expected, read(model(**unmasked))[real], atol=1e-2), "control"


def test_same_seed_gives_the_same_model_and_leaves_the_global_state_alone():
    for name in families.FAMILIES:
        state = torch.get_rng_state()
        first, second, other = (families.build(name, seed) for seed in (0, 0, 1))
        assert torch.equal(state, torch.get_rng_state()), name
        assert not first.training
        weights, same, different = (dict(model.named_parameters()) for model in (first, second, other))
        assert not any(weight.requires_grad for weight in weights.values())
        assert all(torch.equal(weights[key], same[key]) for key in weights), name
        assert not all(torch.equal(weights[key], different[key]) for key in weights), name
