"""Tests that codes are read as the weights that they stand for, method by method, or refused, and never as numbers."""

from functools import partial

import families
import pytest
import torch
import transformers as tf
from factors import check_heads
from hostile import each_refused, edited, refused, stored, weights
from quantised import COMPRESSED, GROUP, HIDDEN, METHODS, groups, quantised, saved

import attnlens
from attnlens.errors import ModelError
from attnlens.models import loading

inspect = partial(attnlens.inspect, source="weights", analyzers=["symmetry"])
from_files = partial(inspect, from_files=True)
SITE = "model.layers.0.self_attn"
Q, WIDE = f"{SITE}.q_proj", 192


def check_parameters(place, plain):
    loaded = loading.load(place)
    assert (loaded.missing_keys, loaded.unused_keys) == ((), ())
    for name, parameter in loaded.model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.allclose(parameter, plain[name], rtol=1e-6, atol=1e-7 * float(plain[name].abs().max())), name
    return loaded


def check_alike(report, expected, relative, absolute):
    assert report.model.quantised is not None
    check_heads(report.heads, expected.heads, relative, absolute)


LIKE_OTHERS = "fp8 per tensor", "gptq, eight bits"
CASES = [pytest.param(method, marks=pytest.mark.full) if method in LIKE_OTHERS else method for method in METHODS]


@pytest.mark.parametrize("method", CASES)
def test_codes_are_read_as_their_decoded_twin_and_no_other_codes_are_read(method, tmp_path):
    codes = tmp_path / "codes"
    loaded, tensors = check_parameters(codes, quantised(codes, method)), weights(codes)
    assert loaded.info.quantised == METHODS[method][1]["quant_method"]
    unread = {name: part for name, part in tensors.items() if name.startswith("model.layers.0.mlp")}
    described = "_shape", "_packed", "state", "nf4"
    spoilt = {name: torch.full_like(part, 3) for name, part in unread.items() if not name.endswith(described)}
    stored(codes, tensors | spoilt)
    deferred = loading.load(codes, from_files=True)
    check_alike(inspect(deferred), inspect(loaded), 1e-6, 1e-9)
    of_site = {name: part.nbytes for name, part in tensors.items() if SITE in name}
    wanted = sum(size for name, size in of_site.items() if "v_proj" not in name and "o_proj" not in name)
    assert deferred.deferred.bytes_read == pytest.approx(wanted, rel=0.05)
    assert wanted < 0.7 * sum(of_site.values()), "a control: the site has more"
    edited(codes / "config.json", quantization_config=None)
    refused(ModelError, partial(loading.load, codes), "codes", "does not describe them", "unquantised")


def test_formats_of_gptq_settings_per_module_and_the_default_block_size_are_applied(tmp_path):
    dynamic = {"bits": 8, "group_size": 32, "dynamic": {"+:.*": {"bits": 4, "group_size": GROUP}}}
    cases = (7, {"checkpoint_format": "gptq"}), (8, {"checkpoint_format": "gptq_v2"}), (7, dynamic)
    for number, (zero, settings) in enumerate(cases):
        place = tmp_path / str(number)
        check_parameters(place, quantised(place, f"zeros stored as {zero}", **settings))
    for method in LIKE_OTHERS:
        check_parameters(tmp_path / method, quantised(tmp_path / method, method))
    place = tmp_path / "blocks"
    loaded = check_parameters(place, quantised(place, "blocks of 128", WIDE))
    check_alike(from_files(place), inspect(loaded), 1e-6, 1e-9)


def changed(method, **parts):
    """Build a model of that method in which tensors of one projection are replaced; None removes one."""

    def edit(place):
        quantised(place, method)
        tensors = weights(place)
        assert {f"{Q}.{part}" for part, tensor in parts.items() if tensor is None} <= tensors.keys()
        tensors |= {f"{Q}.{part}": tensor for part, tensor in parts.items()}
        stored(place, {name: tensor for name, tensor in tensors.items() if tensor is not None})

    return edit


def described(method, **settings):
    return partial(quantised, method=method, **settings)


BYTES, STATE = torch.zeros(4, dtype=torch.uint8), "weight.quant_state.bitsandbytes__nf4"
# fmt: off
FAULTS = {
    "a scale of another grid": (changed("fp8 in blocks", weight_scale_inv=torch.ones(5, 5)), Q, "don't match"),
    "float8 without a scale": (changed("fp8 in blocks", weight_scale_inv=None), f"{Q}.weight", "that fp8 needs"),
    "two scales": (changed("fp8 in blocks", weight_scale=torch.ones(())), Q, "several scales"),
    "a scale of codes": (changed("fp8 in blocks", weight_scale_inv=BYTES), Q, "stored as torch.uint8"),
    "codes without a scale": (changed("gptq", scales=None), Q, "scales is missing"),
    "codes alone": (changed("gptq", scales=None, qzeros=None, g_idx=None), f"{Q}.qweight"),
    "groups beyond scales": (changed("gptq", g_idx=torch.full((HIDDEN,), 9, dtype=torch.int32)), Q, "groups of inputs"),
    "another shape": (changed("packed", weight_shape=torch.tensor([HIDDEN, 2**40])), Q, "contain 1099511627776 codes"),
    "another state": (changed("nf4", **{STATE: BYTES}), Q, "a valid description of its codes is missing"),
    "another order": (changed("LLM.int8", weight_format=BYTES[0] + 2), Q, "stored row by row"),
    "zeros beside the middle": (described("zeros stored as 8", sym=None), "all its zeros are 9", "proj"),
    "another format": (described("gptq", checkpoint_format="marlin"), "checkpoint_format = 'marlin'"),
    "codes and numbers": (changed("gptq", weight=torch.zeros(HIDDEN, HIDDEN)), f"{Q}.weight", "also unquantised"),
    "two numbers of bits": (described("awq", w_bit=3), "four bits"),
    "a rotation": (described("gptq", rotation="hadamard"), "rotation = 'hadamard'"),
    "no order": (described("zeros stored as 7", desc_act=True), "g_idx) is missing", "proj"),
    "groups of words": (described("gptq", group_size="16"), "group_size is '16'", "proj"),
    "blocks beside rows": (described("fp8 by rows", weight_block_size=[20, 20]), "don't match", "proj"),
    "blocks of one side": (described("fp8 in blocks", weight_block_size=20), "weight_block_size is 20", "proj"),
    "awq of equal zeros": (described("awq", sym=True), "sym is true", "proj"),
    "one scale per row": (described("packed", **groups(4, strategy="channel")), "strategy is channel", "proj"),
    "one scale": (described("int8", **groups(8, strategy="tensor")), "strategy is tensor", "proj"),
    "rows of groups": (described("int8", **groups(8, group_size=16)), "don't match", "proj"),
    "asymmetric": (described("int8", **groups(8, symmetric=False)), "symmetric is false", "proj"),
    "another order of inputs": (described("packed", **groups(4, actorder="group")), "actorder is group", "proj"),
    "zeros stored as 8 in the first format": (described("zeros stored as 8", checkpoint_format="gptq"), "sym", "proj"),
    "other bits": (described("zeros stored as 7", bits=8), "bits", "proj"),
    "other groups": (described("zeros stored as 7", group_size=2 * GROUP), "group_size", "proj"),
    "one group": (described("zeros stored as 7", group_size=-1), "group_size", "proj"),
    "in order": (described("gptq", desc_act=False), "desc_act", "proj"),
    "blocks of 64": (described("blocks of 64", width=WIDE), "don't match", "proj"),
    "one scale, no blocks": (described("fp8 per tensor", weight_block_size=[20, 20]), "weight_block_size", "proj"),
    "awq without zeros": (described("awq", zero_point=False), "zero_point", "proj"),
    "codes of eight bits": (described("nf4", load_in_8bit=True, load_in_4bit=False), "load_in_8bit", "proj"),
    "codes of four bits": (described("LLM.int8", load_in_8bit=False, load_in_4bit=True), "load_in_4bit", "proj"),
    "another table": (described("nf4", bnb_4bit_quant_type="fp4"), "bnb_4bit_quant_type", "proj"),
    "no zeros": (described("packed", **groups(4, symmetric=True)), "symmetric", "proj"),
    "int8 of four bits": (described("int8", **groups(4)), "num_bits", "proj"),
}
# fmt: on


def read_site(place):
    """Decode the weights of one site from the files, as `inspect` does after its slower survey."""
    with loading.load(place, from_files=True).deferred.whole(SITE):
        pass


def test_codes_that_can_not_be_decoded_are_refused_and_scales_of_activations_are_named(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    each_refused(ModelError, model, FAULTS, loading.load, read_site)
    for number, word in ((0, Q), (6, Q), (10, "zeros")):
        refused(ModelError, partial(from_files, tmp_path / f"fault{number}" / "model"), word)
    stored(model, saved(model) | {f"{Q}.weight_scale": torch.tensor(2.0)})
    refused(ModelError, partial(loading.load, model), f"{Q}.weight_scale")
    changed("fp8 per tensor", input_scale=torch.tensor(2.0))(model)
    assert loading.load(model).info.unexpected == [f"{Q}.input_scale"]


def test_unsupported_methods_and_declared_but_absent_codes_are_refused_by_the_method(folder):
    unread = "torchao", "quanto", "hqq", "aqlm", "quark", "mxfp8", "nosuch", ["fp8"]
    absent, problem = ("gptq", "awq", "bitsandbytes", "fp8"), "but the files contain none"
    cases = [({"quant_method": method}, (f"quantised with {method}", "GGUF")) for method in unread]
    cases += [({"quant_method": method}, (f"with {method}", problem)) for method in absent]
    cases += [({f"load_in_{bits}bit": True}, ("quantised with bitsandbytes",)) for bits in (4, 8)]
    cases += [({"bits": 4}, ("quantised with None", "GGUF")), ("int8", ("quantised with int8", "GGUF"))]
    cases += [({"quant_method": "awq", "version": "gemv"}, ("gemv", "is supported"))]
    cases += [(COMPRESSED | {"format": "nvfp4-pack-quantized"}, ("nvfp4", "is not supported"))]
    for settings, words in cases:
        edited(folder / "config.json", quantization_config=settings, vision_config=None)
        refused(ModelError, partial(loading.load, folder), *words)
        edited(folder / "config.json", quantization_config=None, vision_config={"quantization_config": settings})
        refused(ModelError, partial(loading.load, folder), "vision_config.quantization_config")


def test_codes_without_settings_are_never_read_as_numbers_unless_they_are_masks_or_positions(folder):
    whole = weights(folder)
    coded = [name for name in whole if name.endswith(("c_attn.weight", "c_fc.weight"))]
    for kind in (torch.int8, torch.uint8, torch.bool, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2):
        codes = {name: (whole[name] / whole[name].abs().max() * 127).round().to(kind) for name in coded}
        scales = {f"{name}_scale": whole[name].abs().max() / 127 for name in coded}
        stored(folder, whole | codes | scales)
        refused(ModelError, partial(loading.load, folder), "transformer.h.0.attn.c_attn.weight and 3 more", "codes")
    coded_bias = whole | {"transformer.h.1.attn.c_attn.bias": torch.ones(72, dtype=torch.int8)}
    stored(folder, coded_bias)
    refused(ModelError, partial(loading.load, folder), "c_attn.bias as I8")
    torch.save(coded_bias, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    refused(ModelError, lambda: loading.load(folder, allow_pickle=True), "c_attn.bias as int8")
    stored(folder, whole | {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool)})
    assert loading.load(folder).unused_keys == ()
    families.build("bert").save_pretrained(folder)
    stored(folder, weights(folder) | {"bert.embeddings.position_ids": torch.arange(64)[None]})
    assert loading.load(folder).missing_keys == ()


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # of the codes in order (E2M1)


def test_mxfp4_is_decoded(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 2, "num_experts_per_tok": 1}
    config = tf.GptOssConfig(**sizes, vocab_size=64, layer_types=["full_attention"])
    tf.GptOssForCausalLM(config).save_pretrained(tmp_path)
    tensors, expected = weights(tmp_path), {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, width, height = tensors.pop(name).shape
        codes = torch.randint(0, 256, (experts, height, width // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 128, (experts, height, width // 32), dtype=torch.uint8)
        pairs = torch.stack([FP4[(codes & 15).long()], FP4[(codes >> 4).long()]], -1).flatten(-2)
        decoded = pairs * torch.exp2(scales.float() - 127)[..., None]
        expected[name] = decoded.reshape(experts, height, width).mT
        tensors |= {f"{name}_blocks": codes, f"{name}_scales": scales}
    stored(tmp_path, tensors)
    plain = ["model.layers.*.self_attn", "lm_head", "model.embed_tokens", "model.layers.*.mlp.router"]
    edited(tmp_path / "config.json", quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": plain})
    loaded = loading.load(tmp_path)
    assert (loaded.missing_keys, loaded.unused_keys, loaded.info.quantised) == ((), (), "mxfp4")
    assert len(expected) == 2
    for name, values in expected.items():
        assert torch.equal(loaded.model.get_parameter(name), values)
    read = from_files(tmp_path)
    assert read.heads == inspect(tmp_path).heads
    assert read.coverage.complete
