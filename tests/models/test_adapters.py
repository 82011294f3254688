"""Tests that merged adapters are what their formula says, that heads are compared with the base, and refusals."""

import hashlib
import json
import math
import shutil
import sys
from functools import partial
from threading import Event

import fake_hub
import peft
import pytest
import tiny
import torch
import transformers as tf
from hostile import each_refused, edit, edited, refused, stored, weights
from program import invoke
from safetensors.torch import save_file

import attnlens
from attnlens.errors import ModelError
from attnlens.kernels import parsed
from attnlens.models import hooks, loading
from attnlens.models.loading import adapters
from attnlens.report.report import read_report

SYMMETRY = {"source": "weights", "analyzers": ["symmetry"]}
RANK, ALPHA, FILE = 2, 6, "adapter_model.safetensors"
LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
Q0, Q1, K0, K1 = (f"model.layers.{layer}.self_attn.{name}_proj" for name in "qk" for layer in (0, 1))
C0 = "transformer.h.0.attn.c_attn"
PLAIN, ROOT = ALPHA / RANK, ALPHA / math.sqrt(RANK)
KINDS = {
    "LoRA": ("llama", {}, PLAIN),
    "rsLoRA": ("gpt2", {"use_rslora": True}, ROOT),
    "DoRA": ("llama", {"use_dora": True}, PLAIN),
    "rsDoRA": ("gpt2", {"use_dora": True, "use_rslora": True}, ROOT),
}
PARTS = ("rsLoRA", "DoRA")  # of rsDoRA


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folders of a Llama and a GPT-2 with sharp attention, for tests that only read them."""
    folder = tmp_path_factory.mktemp("bases")
    torch.manual_seed(1)
    config = tf.LlamaConfig(**LLAMA, num_key_value_heads=2, vocab_size=64, tie_word_embeddings=False)
    for name, model in (("llama", tf.LlamaForCausalLM(config)), ("gpt2", tiny.gpt2())):
        for path, part in model.named_parameters():
            part.data *= 20 if path.endswith(("q_proj.weight", "k_proj.weight", "c_attn.weight")) else 1
        model.save_pretrained(folder / name)
    tiny.tokenizer("llama").save_pretrained(folder / "llama")
    return folder


@pytest.fixture(scope="module")
def base(bases):
    return bases / "llama"


def write(place, base, paths, **settings):
    """Write an adapter of the modules at these paths as peft does, and return its tensors by path and part."""
    place.mkdir(exist_ok=True)
    generator, of_base, tensors = torch.Generator().manual_seed(0), weights(base), {}
    for path in paths:
        outputs, inputs = of_base[f"{path}.weight"].shape[:: -1 if "c_attn" in path else 1]
        rank = settings.get("rank_pattern", {}).get(path.rpartition(".")[2], RANK)
        tensors[f"{path}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / 8
        tensors[f"{path}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) / 8
        if settings.get("use_dora"):
            tensors[f"{path}.lora_magnitude_vector"] = torch.rand(outputs, generator=generator) + 0.5
    save_file({f"base_model.model.{name}": tensor for name, tensor in tensors.items()}, place / FILE)
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    config |= {"target_modules": sorted({path.rpartition(".")[2] for path in paths})} | settings
    (place / "adapter_config.json").write_text(json.dumps(config))
    return tensors


def by_hand(place, base, tensors, scales):
    """Save the base with W + s·BA (rescaled to DoRA's magnitudes, if there are some)."""
    merged = weights(base)
    for path, scale in scales.items():
        name, parts = f"{path}.weight", {part: tensor.double() for part, tensor in tensors.items() if path in part}
        rows = merged[name].double().T if "c_attn" in path else merged[name].double()
        rows = rows + scale * parts[f"{path}.lora_B.weight"] @ parts[f"{path}.lora_A.weight"]
        if f"{path}.lora_magnitude_vector" in parts:
            rows = parts[f"{path}.lora_magnitude_vector"][:, None] * rows / rows.norm(dim=1, keepdim=True)
        merged[name] = (rows.T if "c_attn" in path else rows).float().contiguous()
    place.mkdir()
    shutil.copy(base / "config.json", place)
    stored(place, merged)
    return place


def check_parameters(loaded, expected, **tolerance):
    """Check all parameters: exactly, unless tolerances are given."""
    expected = expected if isinstance(expected, dict) else dict(expected.model.named_parameters())
    for name, parameter in loaded.model.named_parameters():
        torch.testing.assert_close(parameter, expected[name], **tolerance or {"rtol": 0, "atol": 0}, msg=name)


def values(report, name, part="value"):
    return torch.tensor([getattr(head.measures[name], part) for head in report.heads], dtype=torch.float64)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.full) if kind in PARTS else kind for kind in KINDS]
)
def test_an_adapter_is_merged_as_by_hand(kind, bases, tmp_path):
    family, settings, scale = KINDS[kind]
    base, paths = bases / family, [Q0, K0, Q1] if family == "llama" else [C0]
    limits = {"layers_to_transform": [0], "fan_in_fan_out": True}
    if family == "llama":
        limits = {"target_modules": r"model\.layers\.(0\.self_attn\.[qk]_proj|1\.self_attn\.q_proj)"}
    tensors = write(tmp_path / "adapter", base, paths, **limits, **settings)
    loaded = loading.load(base, adapter=tmp_path / "adapter")
    expected = loading.load(by_hand(tmp_path / "twin", base, tensors, dict.fromkeys(paths, scale)))
    assert (loaded.info.adapter.kind, loaded.info.adapter.modules) == (kind, len(paths))
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in (tmp_path / "adapter").iterdir()}
    assert {file.name: file.sha256 for file in loaded.info.adapter.files} == digests
    check_parameters(loaded, expected)
    name = f"{paths[0]}.weight"
    control = weights(by_hand(tmp_path / "control", base, tensors, dict.fromkeys(paths, 1.0)))
    assert not torch.allclose(control[name], loaded.model.get_parameter(name))
    adapted, plain, before = (attnlens.inspect(m, **SYMMETRY) for m in (loaded, expected, base))
    assert before.model.adapter is None
    assert not any(name.startswith("adapter") for name in before.measure_names())
    assert all(measure.base is None for head in before.heads for measure in head.measures.values())
    for measure in plain.measure_names():
        if plain.heads[0].measures[measure].value is not None:
            assert torch.equal(values(adapted, measure), values(plain, measure)), measure
            torch.testing.assert_close(values(adapted, measure, "base"), values(before, measure), rtol=1e-4, atol=1e-5)


def test_patterns_set_rank_and_scale_of_single_modules(base, tmp_path):
    own = {"rank_pattern": {"k_proj": 3}, "alpha_pattern": {r"layers\.0\..*\.q_proj": 10.0, "k_proj": 1.0}}
    tensors = write(tmp_path / "adapter", base, [Q0, Q1, K0, K1], **own)
    twin = by_hand(tmp_path / "twin", base, tensors, {Q0: 5.0, Q1: PLAIN, K0: 1 / 3, K1: 1 / 3})
    check_parameters(loading.load(base, adapter=tmp_path / "adapter"), loading.load(twin))


def test_change_of_a_head_is_that_of_its_matrix_and_of_a_comparison(base, tmp_path):
    tensors = write(tmp_path / "adapter", base, [Q0, K0], layers_to_transform=0)
    report = attnlens.inspect(base, source="weights", adapter=str(tmp_path / "adapter"))
    twin = by_hand(tmp_path / "twin", base, tensors, {Q0: 3.0, K0: 3.0})
    changes = [tuple(head.measures[f"adapter.change{n}"].value for n in ("", "_rank")) for head in report.heads]
    for head in range(4):
        first, after = (
            t[f"{Q0}.weight"].double()[8 * head :][:8].T @ t[f"{K0}.weight"].double()[8 * (head // 2) :][:8]
            for t in (weights(base), weights(twin))
        )
        assert changes[head] == (pytest.approx(float((after - first).norm() / first.norm()), rel=1e-4), 2 * RANK)
    assert changes[4:] == [(0, 0)] * 4
    comparison = attnlens.compare(base, base, adapter=tmp_path / "adapter", **SYMMETRY).comparison
    rows = [row for row in comparison.rows if row.measure == "compare.form_change"]
    assert {(row.layer, row.head) for row in rows if row.named} == {(0, head) for head in range(4)}
    deltas = {row.head: row.delta for row in rows if row.layer == 0}
    assert deltas == {head: pytest.approx(changes[head][0], rel=1e-4) for head in range(4)}
    write(tmp_path / "adapter", base, [Q0], layers_to_transform=0)
    single = attnlens.inspect(base, source="weights", adapter=tmp_path / "adapter", analyzers=["spectrum"])
    assert {head.measures["adapter.change_rank"].value for head in single.heads[:4]} == {RANK}
    without = attnlens.inspect(base, source="weights", analyzers=["adaptation", "symmetry"])
    assert "the model has no adapter" in without.heads[0].measures["adapter.change"].reason


def test_a_saved_swap_accepts_an_adapter(base, tmp_path):
    write(tmp_path / "adapter", base, [Q0, Q1])
    attnlens.swap_kernel(base, "rbf", windows=2, length=8, allow_foreign_text=True, save=tmp_path / "saved")
    adapted, ids = loading.load(base, adapter=tmp_path / "adapter").model, {"input_ids": torch.arange(10, 18)[None]}
    sites = tuple(call.site for call in hooks.survey(adapted, ids))
    logits = []
    with torch.no_grad():
        with hooks.replace(adapted, sites, dict.fromkeys(sites, hooks.Replacement(parsed("rbf")))):
            expected = adapted(**ids).logits
        for options in ({"adapter": tmp_path / "adapter"}, {}):
            swapped = attnlens.load_swapped(tmp_path / "saved", **options)
            logits.append(swapped.model(**ids).logits)
            swapped.close()
    torch.testing.assert_close(logits[0], expected)
    assert not torch.allclose(logits[1], expected, atol=1e-3)


def trained(place, model, **config):
    """Save an adapter of peft with shaken weights, and return the tensors of the model into which peft merged it."""
    model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, **config))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.rand_like(parameter)
    model.save_pretrained(place)
    return model.merge_and_unload().state_dict()


def test_trained_biases_and_embeddings_are_merged_as_by_peft(bases, tmp_path):
    base, place, name = bases / "gpt2", tmp_path / "adapter", f"{C0}.bias"
    settings = {"target_modules": ["c_attn", "wpe"], "use_dora": True, "bias": "lora_only"}
    merged = trained(place, tf.GPT2LMHeadModel.from_pretrained(base), **settings)
    loaded, before = loading.load(base, adapter=place), weights(base)[name]
    check_parameters(loaded, merged, rtol=1e-5, atol=1e-6)
    bias = loaded.model.get_parameter(name)
    assert not torch.equal(bias, before)
    with loaded.adapter.remove_adapter(loaded.model, C0.rpartition(".")[0]):
        assert torch.equal(bias, before.double())
    stored(place, {name: tensor for name, tensor in weights(place, FILE).items() if "bias" not in name}, FILE)
    refused(ModelError, partial(loading.load, base, adapter=place), "declares trained biases", "c_attn.bias")


def test_modules_stored_whole_replace_those_of_the_base_or_are_named(base, tmp_path):
    write(tmp_path, base, [Q0, Q1], modules_to_save=["lm_head", "score"])
    head, score = torch.ones(64, 32), "base_model.model.score.weight"
    stored(tmp_path, weights(tmp_path, FILE) | {HEAD: head, score: torch.ones(2, 32)}, FILE)
    loaded = loading.load(base, adapter=tmp_path)
    assert torch.equal(loaded.model.lm_head.weight, head)
    assert (loaded.info.adapter.replaced, loaded.info.unexpected) == (["lm_head.weight"], [score])


def test_an_adapter_beside_weights_is_merged_once_and_its_base_is_ignored(base, tmp_path):
    place = shutil.copytree(base, tmp_path / "base")
    edited(place / "config.json", architectures=None)  # so that an Auto class loads it
    write(tmp_path / "adapter", place, [Q0, Q1])
    expected = loading.load(place, adapter=tmp_path / "adapter")
    write(place, place, [Q0, Q1], base_model_name_or_path=str(tmp_path / "other"))
    refused(ModelError, partial(loading.load, place), "in addition to the weights", f"--adapter {place}")
    check_parameters(loading.load(place, adapter=place), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_merge_is_rounded_once_draws_no_random_numbers_and_can_be_undone(dtype, base, tmp_path):
    tensors = write(tmp_path, base, [Q1], layers_to_transform=1)
    before = loading.load(base, dtype=dtype).model.get_parameter(f"{Q1}.weight").double()
    state = torch.random.get_rng_state()
    loaded = loading.load(base, dtype=dtype, adapter=tmp_path)
    assert torch.equal(torch.random.get_rng_state(), state)
    change = PLAIN * (tensors[f"{Q1}.lora_B.weight"].double() @ tensors[f"{Q1}.lora_A.weight"].double())
    weight = loaded.model.get_parameter(f"{Q1}.weight")
    assert torch.equal(weight, (before + change).to(getattr(torch, dtype)))
    merged = weight.detach().clone()
    loaded.model.get_submodule(Q1).register_forward_hook(Event().set)  # can't be copied
    for _ in range(2):
        with loaded.adapter.remove_adapter(loaded.model, Q1.rpartition(".")[0]):
            torch.testing.assert_close(merged.double() - weight, change, rtol=0, atol=1e-14)
        assert torch.equal(weight, merged)


@edit
def tensors(place, change):
    stored(place, change(weights(place, FILE)), FILE)


@edit
def config(place, **settings):
    edited(place / "adapter_config.json", **settings)


A, HEAD = f"base_model.model.{Q0}.lora_A.weight", "base_model.model.lm_head.weight"
# fmt: off
FAULTS = {
    "other kind": (config(peft_type="IA3"), "'IA3'", "merge_and_unload"),
    "changed base": (config(init_lora_weights="pissa"), "'pissa'", "merge_and_unload"),
    "unknown setting": (config(trainable_token_indices=[3]), "trainable_token_indices"),
    "endless rank": (config(r=10**12), "instead of 1000000000000 × 32"),
    "α of text": (config(lora_alpha="16"), "lora_alpha = '16'"),
    "other rank": (config(r=4), "2 × 32 instead of 4 × 32", "its rank is 2", "Correct r or rank_pattern"),
    "more targets": (config(target_modules=["q_proj", "v_proj"]), "v_proj", "disagree"),
    "excluded": (config(exclude_modules=["q_proj"]), "q_proj", "disagree"),
    "no expression": (config(target_modules="(q_proj"), "missing )"),
    "endless expression": (config(target_modules=r"(.*a)*q_proj" + "x?" * 2100), "are too long"),
    "scale of no module": (config(alpha_pattern={"k_proj": 9}), "'k_proj' in alpha_pattern", "none of the adapted"),
    "rank of no module": (config(rank_pattern={"k_proj": 2}), "'k_proj' in rank_pattern", "remove that key"),
    "endless settings": (config(target_modules=["q_proj"] * 2 * 10**5), "larger than 1 MiB"),
    "resized vocabulary": (tensors(lambda t: t | {HEAD: torch.ones(65, 32)}),
                           "65 × 32 instead of 64 × 32", "resized vocabulary", "Call resize_token_embeddings(65)",
                           "merge_and_unload"),
    "a tensor twice": (tensors(lambda t: t | {A.removesuffix(".weight"): t[A] + 1}), "twice"),
    "no settings": (lambda f: (f / "adapter_config.json").unlink(), "has no adapter_config.json"),
    "no tensors": (lambda f: (f / FILE).unlink(), f"has no {FILE}"),
    "only a pickle": (lambda f: (f / FILE).rename(f / "adapter_model.bin"), "pickled adapter", "safetensors"),
    "half a pair": (tensors(lambda t: {n: x for n, x in t.items() if n != A}), f"lacks {Q0}.lora_A"),
    "another width": (tensors(lambda t: t | {A: torch.ones(2, 48)}), "2 × 48 instead of 2 × 32", "base model as"),
    "another base": (tensors(lambda t: {name.replace("q_proj", "query"): x for name, x in t.items()}),
                     "self_attn.query", "a different base"),
    "codes": (tensors(lambda t: t | {A: torch.ones(2, 32, dtype=torch.int8)}), "I8"),
    "other parts": (tensors(lambda t: t | {"base_model.model.x.lora_bias": torch.ones(2)}), "not a LoRA parameter"),
    "no prefix": (tensors(lambda t: t | {"x.weight": torch.ones(2)}), "not a LoRA parameter"),
}
# fmt: on


def test_an_adapter_that_can_not_be_merged_is_refused(base, bases, tmp_path, monkeypatch):
    write(tmp_path / "adapter", base, [Q0, Q1])
    load = partial(loading.load, base, allow_pickle=True)
    each_refused(ModelError, tmp_path / "adapter", FAULTS, lambda place: load(adapter=place))
    with monkeypatch.context() as patch:
        patch.setattr(adapters, "SECONDS", 0)
        edited(tmp_path / "adapter" / "adapter_config.json", target_modules=r"(.*a)*q_proj")
        refused(ModelError, partial(load, adapter=tmp_path / "adapter"), "takes more than")
    write(tmp_path / "zeros", base, [Q0, Q1], use_dora=True)
    tensors(lambda t: {name: x * ("magnitude" not in name) for name, x in t.items()})(tmp_path / "zeros")
    refused(ModelError, partial(load, adapter=tmp_path / "zeros"), "DoRA magnitudes", Q0)
    gpt2 = bases / "gpt2"
    write(tmp_path / "tied", gpt2, ["transformer.wte"])
    refused(ModelError, partial(loading.load, gpt2, adapter=tmp_path / "tied"), "same parameter as lm_head")
    refused(ModelError, partial(load, adapter=tmp_path / "none"), "no such folder")
    refused(ModelError, partial(load, adapter=base), "is a model, not an adapter")
    shutil.copytree(tmp_path / "adapter", tmp_path / "run" / "checkpoint-500")
    refused(ModelError, partial(load, adapter=tmp_path / "run"), "at least one folder inside it", "run/checkpoint-500.")
    refused(ModelError, partial(loading.load, tmp_path / "run"), "folders inside it contain models: checkpoint-500")
    refused(ModelError, partial(loading.load, tmp_path / "run"), f"such as {tmp_path / 'run' / 'checkpoint-500'}")
    refused(ModelError, partial(load, adapter=base / "config.json"), "not an adapter's folder")
    monkeypatch.setitem(sys.modules, "peft", None)
    refused(ModelError, partial(load, adapter=tmp_path), "peft", "pip install 'attnlens[adapters]'")


def test_an_adapter_instead_of_a_model_is_refused_with_the_right_command(base, tmp_path, hub, folder):
    place = tmp_path / "my adapter"
    write(place, base, [Q0, Q1])
    command = f"attnlens inspect {base} --adapter"
    refused(ModelError, partial(loading.load, place), "an adapter, not a model", f"{command} '{place}'")
    shutil.rmtree(folder)
    shutil.copytree(place, folder)
    refused(ModelError, partial(loading.load, fake_hub.OPEN), f"{command} {fake_hub.OPEN}")
    assert not any(path.endswith(FILE) for path in hub)
    assert loading.load(base, adapter=fake_hub.OPEN).info.adapter.revision


def test_the_program_prints_which_heads_changed(base, tmp_path):
    write(tmp_path / "adapter", base, [Q0], layers_to_transform=[0], base_model_name_or_path="org/other")
    files = {kind: tmp_path / f"r.{kind}" for kind in ("json", "markdown", "csv")}
    outputs = [word for kind, file in files.items() for word in (f"--{kind}", file)]
    shown = invoke("inspect", base, "--source", "weights", "--adapter", tmp_path / "adapter", *outputs)
    assert shown.returncode == 0, shown.stderr
    assert "M changed in 4 of 8 heads." in " ".join(shown.stdout.split())
    assert "base is org/other" in " ".join(shown.stdout.split())
    assert "base is org/other" in files["markdown"].read_text()
    assert "weights.symmetry.base" in files["csv"].read_text()
    report = read_report(files["json"])
    assert report.model.adapter.base == "org/other"
    assert report.heads[0].measures["weights.symmetry"].base is not None
    doctor = invoke("doctor", base, "--adapter", tmp_path / "adapter", "-q")
    assert doctor.returncode == 0, doctor.stderr
