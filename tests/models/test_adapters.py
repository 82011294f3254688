"""Tests that merged adapters are what their formula says, that heads are compared with the base, and refusals."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from threading import Event
from typing import Any

import fake_hub
import peft
import pytest
import tiny
import torch
import transformers as tf
from hostile import edited, refused, stored, weights
from program import attnlens as program
from safetensors.torch import save_file

import attnlens
from attnlens.errors import ModelError
from attnlens.kernels import parsed
from attnlens.models import hooks, loading
from attnlens.report.report import Report, read_report

RANK, ALPHA = 2, 6
LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
Q, K = "model.layers.{}.self_attn.q_proj", "model.layers.{}.self_attn.k_proj"


def llama(place: Path) -> Path:
    torch.manual_seed(1)
    model = tf.LlamaForCausalLM(
        tf.LlamaConfig(**LLAMA, num_key_value_heads=2, vocab_size=64, tie_word_embeddings=False)
    )
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 20
        layer.self_attn.k_proj.weight.data *= 20
    model.save_pretrained(place)
    return place


def gpt2(place: Path) -> Path:
    torch.manual_seed(2)
    model = tiny.gpt2()
    for block in model.transformer.h:
        block.attn.c_attn.weight.data *= 20
    model.save_pretrained(place)
    return place


def write(place: Path, base: Path, paths: list[str], seed: int = 0, **settings: Any) -> dict[str, torch.Tensor]:
    """An adapter of the modules at these paths, as peft stores it, and its tensors by path and part."""
    place.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    of_base, tensors = weights(base), {}
    for path in paths:
        height, width = of_base[f"{path}.weight"].shape
        outputs, inputs = (width, height) if "c_attn" in path else (height, width)
        rank = settings.get("rank_pattern", {}).get(path.rpartition(".")[2], RANK)
        tensors[f"{path}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / 8
        tensors[f"{path}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) / 8
        if settings.get("use_dora"):
            tensors[f"{path}.lora_magnitude_vector"] = torch.rand(outputs, generator=generator) + 0.5
    save_file(
        {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}, place / "adapter_model.safetensors"
    )
    said = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    said |= {"target_modules": sorted({path.rpartition(".")[2] for path in paths})} | settings
    (place / "adapter_config.json").write_text(json.dumps(said))
    return tensors


def by_hand(base: Path, place: Path, tensors: dict[str, torch.Tensor], scales: dict[str, float], across: bool) -> Path:
    """The base with W + s·BA (rescaled to DoRA's magnitudes, where there are some) written into its files."""
    merged = weights(base)
    for path, scale in scales.items():
        weight = merged[f"{path}.weight"].double()
        rows = (weight.T if across else weight) + scale * (
            tensors[f"{path}.lora_B.weight"].double() @ tensors[f"{path}.lora_A.weight"].double()
        )
        if f"{path}.lora_magnitude_vector" in tensors:
            rows = tensors[f"{path}.lora_magnitude_vector"].double()[:, None] * rows / rows.norm(dim=1, keepdim=True)
        merged[f"{path}.weight"] = (rows.T if across else rows).float().contiguous()
    place.mkdir()
    (place / "config.json").write_bytes((base / "config.json").read_bytes())
    stored(place, merged)
    return place


def values(report: Report, name: str, part: str = "value") -> torch.Tensor:
    return torch.tensor([getattr(head.measures[name], part) for head in report.heads], dtype=torch.float64)


KINDS: dict[str, tuple[dict[str, Any], float]] = {
    "LoRA": ({}, ALPHA / RANK),
    "rsLoRA": ({"use_rslora": True}, ALPHA / math.sqrt(RANK)),
    "DoRA": ({"use_dora": True}, ALPHA / RANK),
    "rsDoRA": ({"use_dora": True, "use_rslora": True}, ALPHA / math.sqrt(RANK)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", [llama, gpt2], ids=["linear", "Conv1D"])
def test_an_adapter_is_what_is_merged_by_hand(family: Any, kind: str, tmp_path: Path) -> None:
    base, (settings, scale) = family(tmp_path / "base"), KINDS[kind]
    paths = [Q.format(0), K.format(0), Q.format(1)] if family is llama else ["transformer.h.0.attn.c_attn"]
    limits = {} if family is llama else {"layers_to_transform": [0], "fan_in_fan_out": True}
    if family is llama:
        limits = {"target_modules": r"model\.layers\.(0\.self_attn\.[qk]_proj|1\.self_attn\.q_proj)"}
    tensors = write(tmp_path / "adapter", base, paths, **limits, **settings)
    twin = by_hand(base, tmp_path / "twin", tensors, dict.fromkeys(paths, scale), family is gpt2)
    loaded, expected = loading.load(base, adapter=tmp_path / "adapter"), loading.load(twin)
    assert loaded.info.adapter is not None
    assert (loaded.info.adapter.kind, loaded.info.adapter.modules) == (kind, len(paths))
    for name, parameter in expected.model.named_parameters():
        assert torch.equal(loaded.model.get_parameter(name), parameter), name
    unscaled = by_hand(base, tmp_path / "control", tensors, dict.fromkeys(paths, 1.0), family is gpt2)
    name = f"{paths[0]}.weight"
    assert not torch.allclose(loading.load(unscaled).model.get_parameter(name), loaded.model.get_parameter(name))
    adapted, plain, before = (attnlens.inspect(m, source="weights") for m in (loaded, expected, loading.load(base)))
    for measure in plain.measure_names():
        if plain.heads[0].measures[measure].value is not None:
            assert torch.equal(values(adapted, measure), values(plain, measure)), measure
            assert torch.allclose(values(adapted, measure, "base"), values(before, measure), rtol=1e-4, atol=1e-5), (
                measure
            )


def test_a_base_is_compared_with_its_adapted_model(tmp_path: Path) -> None:
    base = llama(tmp_path / "base")
    write(tmp_path / "adapter", base, [K.format(1)], target_modules=r"model\.layers\.1\.self_attn\.k_proj")
    found = attnlens.compare(base, base, adapter=tmp_path / "adapter", source="weights").comparison
    assert found is not None
    named = {(row.layer, row.head) for row in found.rows if row.named and row.measure == "compare.form_change"}
    assert named == {(head.layer, head.head) for head in found.heads if head.layer == 1}
    own = attnlens.inspect(base, adapter=tmp_path / "adapter", source="weights")
    changes = {(head.layer, head.head): head.measures["adapter.change"].value for head in own.heads if head.layer == 1}
    deltas = {(row.layer, row.head): row.delta for row in found.rows if row.measure == "compare.form_change"}
    assert all(deltas[place] == pytest.approx(value, rel=1e-4) for place, value in changes.items())


def test_patterns_give_modules_their_own_rank_and_scale(tmp_path: Path) -> None:
    base = llama(tmp_path / "base")
    own = {"rank_pattern": {"k_proj": 3}, "alpha_pattern": {r"layers\.0\..*\.q_proj": 10.0, "k_proj": 1.0}}
    paths = [Q.format(0), Q.format(1), K.format(0), K.format(1)]
    tensors = write(tmp_path / "adapter", base, paths, **own)
    scales = dict(zip(paths, (5.0, ALPHA / RANK, 1 / 3, 1 / 3), strict=True))
    twin = loading.load(by_hand(base, tmp_path / "twin", tensors, scales, across=False))
    loaded = loading.load(base, adapter=tmp_path / "adapter")
    for name, parameter in twin.model.named_parameters():
        assert torch.equal(loaded.model.get_parameter(name), parameter), name


def test_a_saved_swap_takes_an_adapter_too(tmp_path: Path) -> None:
    base = llama(tmp_path / "base")
    tiny.tokenizer("llama").save_pretrained(base)
    write(tmp_path / "adapter", base, [Q.format(0), Q.format(1)])
    attnlens.swap_kernel(base, "rbf", windows=2, length=8, allow_foreign_text=True, save=tmp_path / "saved")
    adapted = loading.load(base, adapter=tmp_path / "adapter").model
    ids = {"input_ids": torch.arange(10, 18)[None]}
    sites = tuple(found.site for found in hooks.survey(adapted, ids))
    with torch.no_grad():
        swap = hooks.Replacement(parsed("rbf"))
        with hooks.replace(adapted, sites, dict.fromkeys(sites, swap)):
            expected = adapted(**ids).logits
        found = {}
        for name, options in (("adapted", {"adapter": tmp_path / "adapter"}), ("plain", {})):
            swapped = attnlens.load_swapped(tmp_path / "saved", **options)
            found[name] = swapped.model(**ids).logits
            swapped.close()
    torch.testing.assert_close(found["adapted"], expected)
    assert not torch.allclose(found["plain"], expected, atol=1e-3)


def test_the_change_of_each_head_is_that_of_its_matrix(tmp_path: Path) -> None:
    base = llama(tmp_path / "base")
    tensors = write(tmp_path / "adapter", base, [Q.format(0), K.format(0)], layers_to_transform=0)
    report = attnlens.inspect(base, source="weights", adapter=str(tmp_path / "adapter"))
    before, after = (
        weights(base),
        weights(by_hand(base, tmp_path / "t", tensors, {Q.format(0): 3.0, K.format(0): 3.0}, False)),
    )

    def form(tensor: dict[str, torch.Tensor], head: int) -> torch.Tensor:
        query = tensor[f"{Q.format(0)}.weight"].double()[8 * head : 8 * head + 8]
        key = tensor[f"{K.format(0)}.weight"].double()[8 * (head // 2) : 8 * (head // 2) + 8]
        return query.T @ key / math.sqrt(8)

    for head in range(4):
        measures, first = report.heads[head].measures, form(before, head)
        expected = float((form(after, head) - first).norm() / first.norm())
        assert measures["adapter.change"].value == pytest.approx(expected, rel=1e-4)
        assert measures["adapter.change_rank"].value == 2 * RANK
        assert report.heads[4 + head].measures["adapter.change"].value == 0
        assert report.heads[4 + head].measures["adapter.change_rank"].value == 0
    write(tmp_path / "adapter", base, [Q.format(0)], layers_to_transform=0)
    lone = attnlens.inspect(base, source="weights", adapter=tmp_path / "adapter", analyzers=["spectrum"])
    assert {head.measures["adapter.change_rank"].value for head in lone.heads[:4]} == {RANK}


def test_a_report_without_an_adapter_says_nothing_of_one(tmp_path: Path) -> None:
    report = attnlens.inspect(llama(tmp_path / "base"), source="weights")
    assert report.model.adapter is None
    assert not any(name.startswith("adapter") for name in report.measure_names())
    assert all(measure.base is None for head in report.heads for measure in head.measures.values())
    named = attnlens.inspect(tmp_path / "base", source="weights", analyzers=["adaptation", "symmetry"])
    assert "no adapter was given" in (named.heads[0].measures["adapter.change"].reason or "")


def test_peft_merges_the_same(tmp_path: Path) -> None:
    base = llama(tmp_path / "base")
    for number, (settings, _) in enumerate(KINDS.values()):
        config = peft.LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules=["q_proj", "k_proj"], layers_to_transform=[1],
            alpha_pattern={"k_proj": 9}, init_lora_weights="gaussian", modules_to_save=["lm_head"], **settings,
        )  # fmt: skip
        model = peft.get_peft_model(tf.LlamaForCausalLM.from_pretrained(base), config)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.rand_like(parameter)
        model.save_pretrained(tmp_path / f"adapter{number}")
        merged = model.merge_and_unload().state_dict()
        loaded = loading.load(base, adapter=tmp_path / f"adapter{number}")
        for name, parameter in loaded.model.named_parameters():
            assert torch.allclose(parameter, merged[name], rtol=1e-6, atol=1e-7), name


def test_modules_that_are_stored_whole_replace_the_base_s_or_are_named(tmp_path: Path) -> None:
    base = llama(tmp_path / "base")
    write(tmp_path / "adapter", base, [Q.format(0), Q.format(1)], modules_to_save=["lm_head", "score"])
    file = "adapter_model.safetensors"
    head = torch.ones(64, 32)
    more = {"base_model.model.lm_head.weight": head, "base_model.model.score.weight": torch.ones(2, 32)}
    stored(tmp_path / "adapter", _tensors(tmp_path / "adapter") | more, file)
    loaded = loading.load(base, adapter=tmp_path / "adapter")
    assert torch.equal(loaded.model.lm_head.weight, head)
    assert loaded.info.adapter is not None
    assert loaded.info.adapter.replaced == ["lm_head.weight"]
    assert loaded.info.unexpected == ["base_model.model.score.weight"]


def test_an_adapter_beside_weights_is_merged_once_and_its_base_is_not_followed(tmp_path: Path) -> None:
    base = llama(tmp_path / "base")
    edited(base / "config.json", architectures=None)  # so that an Auto class loads it
    write(tmp_path / "adapter", base, [Q.format(0), Q.format(1)])
    expected = loading.load(base, adapter=tmp_path / "adapter").model.state_dict()
    write(base, base, [Q.format(0), Q.format(1)], base_model_name_or_path=str(tmp_path / "other"))
    refused(ModelError, lambda: loading.load(base), "in addition to the weights", f"--adapter {base}")
    loaded = loading.load(base, adapter=base)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_merge_is_rounded_once_and_draws_no_random_numbers(dtype: torch.dtype, tmp_path: Path) -> None:
    base, path = llama(tmp_path / "base"), Q.format(1)
    tensors = write(tmp_path / "adapter", base, [path], layers_to_transform=1)
    before = loading.load(base, dtype=str(dtype).removeprefix("torch.")).model.get_parameter(f"{path}.weight").double()
    state = torch.random.get_rng_state()
    loaded = loading.load(base, dtype=str(dtype).removeprefix("torch."), adapter=tmp_path / "adapter")
    assert torch.equal(torch.random.get_rng_state(), state)
    change = ALPHA / RANK * (tensors[f"{path}.lora_B.weight"].double() @ tensors[f"{path}.lora_A.weight"].double())
    weight = loaded.model.get_parameter(f"{path}.weight")
    assert torch.equal(weight, (before + change).to(dtype))
    assert loaded.adapter is not None
    merged = weight.detach().clone()
    loaded.model.get_submodule(path).register_forward_hook(Event().set)  # which can't be copied
    for _ in range(2):  # the base is found again each time
        with loaded.adapter.remove_adapter(loaded.model, path.rpartition(".")[0]):
            torch.testing.assert_close(merged.double() - weight, change, rtol=0, atol=1e-14)
        assert torch.equal(weight, merged)


def test_trained_biases_and_embeddings_are_merged_as_peft_does(tmp_path: Path) -> None:
    base = gpt2(tmp_path / "base")
    settings = {"target_modules": ["c_attn", "wpe"], "use_dora": True, "bias": "lora_only"}
    model = peft.get_peft_model(tf.GPT2LMHeadModel.from_pretrained(base), peft.LoraConfig(r=RANK, **settings))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.rand_like(parameter)
    model.save_pretrained(tmp_path / "adapter")
    merged = model.merge_and_unload().state_dict()
    loaded = loading.load(base, adapter=tmp_path / "adapter")
    for name, parameter in loaded.model.named_parameters():
        assert torch.allclose(parameter, merged[name], rtol=1e-5, atol=1e-6), name
    bias = loaded.model.get_parameter("transformer.h.0.attn.c_attn.bias")
    before = weights(base)["transformer.h.0.attn.c_attn.bias"]
    assert not torch.equal(bias, before)
    assert loaded.adapter is not None
    with loaded.adapter.remove_adapter(loaded.model, "transformer.h.0.attn"):
        assert torch.equal(bias, before.double())
    stored(tmp_path / "adapter", {n: t for n, t in _tensors(tmp_path / "adapter").items() if "bias" not in n},
           "adapter_model.safetensors")  # fmt: skip
    refused(
        ModelError, lambda: loading.load(base, adapter=tmp_path / "adapter"), "declares trained biases", "c_attn.bias"
    )


def test_magnitudes_of_0_are_refused_since_no_base_is_left(tmp_path: Path) -> None:
    base = llama(tmp_path / "base")
    write(tmp_path / "adapter", base, [Q.format(0), Q.format(1)], use_dora=True)
    zeros = {name: tensor * ("magnitude" not in name) for name, tensor in _tensors(tmp_path / "adapter").items()}
    stored(tmp_path / "adapter", zeros, "adapter_model.safetensors")
    refused(ModelError, lambda: loading.load(base, adapter=tmp_path / "adapter"), "DoRA magnitudes", Q.format(0))


def test_without_peft_an_adapter_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    refused(ModelError, lambda: loading.load("demo", adapter=tmp_path), "peft", "pip install 'attnlens[adapters]'")


def _tensors(place: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load

    return load((place / "adapter_model.safetensors").read_bytes())


def _stored(edit: Any) -> Any:
    def change(place: Path) -> None:
        stored(place, edit(_tensors(place)), "adapter_model.safetensors")

    return change


def _said(**settings: Any) -> Any:
    return lambda place: edited(place / "adapter_config.json", **settings)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4])


A = f"base_model.model.{Q.format(0)}.lora_A.weight"
FAULTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "other kind": (_said(peft_type="IA3"), ("'IA3'", "merge_and_unload")),
    "no kind": (_said(peft_type=None), ("peft_type = None",)),
    "changed base": (_said(init_lora_weights="pissa"), ("'pissa'", "merge_and_unload")),
    "unknown setting": (_said(trainable_token_indices=[3]), ("trainable_token_indices",)),
    "parameters": (_said(target_parameters=["x"]), ("target_parameters",)),
    "endless rank": (_said(r=10**12), ("instead of 1000000000000 × 32",)),
    "rank of none": (_said(r=0), ("the value passed is 0",)),
    "α of text": (_said(lora_alpha="16"), ("lora_alpha = '16'",)),
    "rank pattern": (_said(rank_pattern={"q_proj": 5}), ("trained on another base model", "other settings")),
    "other rank": (_said(r=4), ("2 × 32 instead of 4 × 32",)),
    "fewer targets": (_said(layers_to_transform=[1]), ("layers.0.self_attn.q_proj", "disagree")),
    "more targets": (_said(target_modules=["q_proj", "v_proj"]), ("v_proj", "disagree")),
    "excluded": (_said(exclude_modules=["q_proj"]), ("q_proj", "disagree")),
    "no expression": (_said(target_modules="(q_proj"), ("missing )",)),
    "endless expression": (_said(target_modules=r"(.*a)*q_proj"), ("takes more than",)),
    "magnitudes missing": (_said(use_dora=True), ("lora_magnitude_vector",)),
    "scale of no module": (_said(alpha_pattern={"k_proj": 9}), ("'k_proj' in alpha_pattern", "none of the adapted")),
    "rank of no module": (_said(rank_pattern={"k_proj": 2}), ("'k_proj' in rank_pattern", "remove that key")),
    "endless settings": (_said(target_modules=["q_proj"] * 2 * 10**5), ("larger than 1 MiB",)),
    "resized vocabulary": (
        _stored(lambda t: t | {"base_model.model.lm_head.weight": torch.ones(65, 32)}),
        ("65 × 32 instead of 64 × 32", "resized vocabulary", "merge_and_unload"),
    ),
    "a tensor twice": (_stored(lambda t: t | {A.removesuffix(".weight"): t[A] + 1}), ("twice",)),
    "no settings": (lambda place: (place / "adapter_config.json").unlink(), ("has no adapter_config.json",)),
    "no tensors": (lambda place: (place / "adapter_model.safetensors").unlink(), ("has no adapter_model.safetensors",)),
    "cut tensors": (lambda place: _cut(place / "adapter_model.safetensors"), ("truncated",)),
    "half a pair": (_stored(lambda t: {n: x for n, x in t.items() if n != A}), (f"lacks {Q.format(0)}.lora_A",)),
    "another width": (_stored(lambda t: t | {A: torch.ones(2, 48)}), ("2 × 48 instead of 2 × 32", "base model as")),
    "another base": (
        _stored(lambda t: {name.replace("q_proj", "query"): x for name, x in t.items()}),
        ("self_attn.query", "a different base"),
    ),
    "codes": (_stored(lambda t: t | {A: torch.ones(2, 32, dtype=torch.int8)}), ("I8",)),
    "other parts": (_stored(lambda t: t | {"base_model.model.x.lora_bias": torch.ones(2)}), ("not a LoRA parameter",)),
    "no prefix": (_stored(lambda t: t | {"x.weight": torch.ones(2)}), ("not a LoRA parameter",)),
    "text": (lambda place: (place / "adapter_config.json").write_text("hello"), ("not a JSON object",)),
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("adapters") / "base")


@pytest.mark.parametrize("fault", FAULTS)
def test_an_adapter_that_can_not_be_merged_is_refused(
    fault: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnlens.models.loading import adapters

    if fault == "endless expression":
        monkeypatch.setattr(adapters, "SECONDS", 0)
    write(tmp_path / "adapter", base, [Q.format(0), Q.format(1)])
    edit, words = FAULTS[fault]
    edit(tmp_path / "adapter")
    refused(ModelError, lambda: loading.load(base, adapter=tmp_path / "adapter"), *words)


def test_a_pickled_adapter_is_never_opened(base: Path, tmp_path: Path) -> None:
    place = tmp_path / "adapter"
    write(place, base, [Q.format(0), Q.format(1)])
    torch.save(_tensors(place), place / "adapter_model.bin")
    (place / "adapter_model.safetensors").unlink()
    refused(ModelError, lambda: loading.load(base, adapter=place, allow_pickle=True), "pickled adapter", "safetensors")


def test_tied_weights_and_wrong_names_are_refused(base: Path, tmp_path: Path) -> None:
    tied = tiny.gpt2()
    tied.save_pretrained(tmp_path / "tied")
    write(tmp_path / "adapter", tmp_path / "tied", ["transformer.wte"])
    refused(
        ModelError, lambda: loading.load(tmp_path / "tied", adapter=tmp_path / "adapter"), "same parameter as lm_head"
    )
    refused(ModelError, lambda: loading.load(base, adapter=tmp_path / "none"), "no such folder")
    refused(ModelError, lambda: loading.load(base, adapter=base), "is a model, not an adapter")
    refused(ModelError, lambda: loading.load(base, adapter=base / "config.json"), "not an adapter's folder")


def test_an_adapter_in_the_place_of_a_model_says_how_it_is_run(
    base: Path, tmp_path: Path, hub: list[str], folder: Path
) -> None:
    place = tmp_path / "my adapter"
    write(place, base, [Q.format(0), Q.format(1)])
    command = f"attnlens inspect {base} --adapter '{place}'"
    refused(ModelError, lambda: loading.load(place), "an adapter, not a model", command)
    for file in list(folder.iterdir()):
        file.unlink()
    for file in place.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    refused(ModelError, lambda: loading.load(fake_hub.OPEN), f"attnlens inspect {base} --adapter {fake_hub.OPEN}")
    assert not any(path.endswith("adapter_model.safetensors") for path in hub)
    loaded = loading.load(base, adapter=fake_hub.OPEN)
    assert loaded.info.adapter is not None
    assert loaded.info.adapter.revision


def test_the_program_ranks_the_heads_that_were_moved(base: Path, tmp_path: Path) -> None:
    write(tmp_path / "adapter", base, [Q.format(0)], layers_to_transform=[0], base_model_name_or_path="org/other")
    words = ("inspect", base, "--source", "weights", "--adapter", tmp_path / "adapter")
    shown = program(*words, "--json", tmp_path / "r.json", "--markdown", tmp_path / "r.md", "--csv", tmp_path / "r.csv")
    assert shown.returncode == 0, shown.stderr
    assert "The adapter changed M in 4 of 8 heads" in shown.stdout
    assert "base is org/other" in " ".join(shown.stdout.split())
    assert "base is org/other" in (tmp_path / "r.md").read_text()
    assert "weights.symmetry.base" in (tmp_path / "r.csv").read_text()
    report = read_report(tmp_path / "r.json")
    assert report.model.adapter is not None
    assert report.model.adapter.base == "org/other"
    assert report.heads[0].measures["weights.symmetry"].base is not None
    doctor = program("doctor", base, "--adapter", tmp_path / "adapter", "-q")
    assert doctor.returncode == 0, doctor.stderr
    alone = program("inspect", tmp_path / "adapter")
    assert alone.returncode == 2
    assert "--adapter" in alone.stderr
