"""Tests of a layer's tensors by role: each tensor of a layer with several attention modules is read once."""

from __future__ import annotations

import torch
import transformers as tf

from attnlens.models import hooks, weights


def bart() -> tf.BartModel:
    sizes = {"d_model": 32, "vocab_size": 50, "encoder_layers": 1, "decoder_layers": 2, "max_position_embeddings": 16}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40}
    torch.manual_seed(0)
    return tf.BartModel(tf.BartConfig(**sizes, **heads)).eval()


def test_a_layer_with_two_attention_modules_is_read_once():
    model = bart()
    token = torch.tensor([[5]])
    with torch.no_grad():
        sites = hooks.survey(model, {"input_ids": token, "decoder_input_ids": token})
    block = "decoder.layers.1"
    first, second = [site for site in sites if site.site.path.startswith(block)]
    layers = [
        weights.read_layer(model, first, weights.locate_roles(model, first), others=[second.site.path]),
        weights.read_layer(model, second, weights.locate_roles(model, second), rest=False, others=[first.site.path]),
    ]
    both = dict(model.get_submodule(block).named_parameters())
    assert sum(part.numel() for layer in layers for part in layer.parts.values()) == sum(
        part.numel() for part in both.values()
    )
    heads = {f"{role}.weight" for role in ("query", "key", "value", "output")}
    assert all(heads <= layer.parts.keys() for layer in layers)
    assert "fc1.weight" in layers[0].parts
    assert "fc1.weight" in layers[0].headless
    assert layers[1].parts.keys() - heads == {"query.bias", "key.bias", "value.bias", "encoder_attn.out_proj.bias"}
    assert layers[1].headless == {"encoder_attn.out_proj.bias"}
    whole = weights.read_layer(model, first, weights.locate_roles(model, first))  # the control
    assert "encoder_attn.q_proj.weight" in whole.parts


def test_the_output_nearest_to_a_module_is_its_own():
    """BERT's output projections are beside its attention modules, that of cross-attention after that of the first."""
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = tf.BertConfig(**sizes, vocab_size=50, is_decoder=True, add_cross_attention=True)
    torch.manual_seed(0)
    model = tf.BertModel(config).eval()
    with torch.no_grad():
        states = torch.randn(1, 1, 32)
        sites = hooks.survey(model, {"input_ids": torch.tensor([[5]]), "encoder_hidden_states": states})
    for site, name in zip(sites, ("attention", "crossattention"), strict=True):
        others = [other.site.path for other in sites if other is not site]
        layer = weights.read_layer(model, site, weights.locate_roles(model, site), others=others)
        expected = model.get_parameter(f"encoder.layer.0.{name}.output.dense.weight")
        assert torch.equal(layer.parts["output.weight"].flatten(0, 1), expected.T)
