"""Tests that nothing is measured that depends on a weight the checkpoint lacks, and everything else is."""

import shutil

import families
import pytest
import tiny
import torch
from hostile import edited
from loaded import swap_or_heal
from program import DEMO, invoke
from safetensors.torch import load_file, save_file

import attnlens
from attnlens.errors import ModelError
from attnlens.runs.swap.pipeline import swap_kernel

SMALL = {"windows": 1, "length": 16}
LAST_MLP = "transformer.h.3.mlp.c_fc.weight"


def demo_without(folder, *names, **config):
    """A copy of demo's folder whose checkpoint lacks these tensors."""
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("step*", "text.txt"))
    weights = load_file(folder / "model.safetensors")
    assert weights.keys() >= {*names}
    save_file({name: value for name, value in weights.items() if name not in names}, folder / "model.safetensors")
    edited(folder / "config.json", **config)
    return str(folder)


@pytest.mark.parametrize("lacking", ["lm_head.weight", "transformer.ln_f.weight", LAST_MLP])
def test_no_loss_is_computed_through_a_random_weight_but_attention_before_it_is_read(tmp_path, lacking):
    head = lacking == "lm_head.weight"  # demo ties it to its embeddings
    folder = demo_without(tmp_path / "model", *[lacking] * (not head), **{"tie_word_embeddings": not head})
    model = attnlens.load(folder)
    assert lacking in model.missing_keys
    for options in ({}, {"train": 1}, {"fit": True}, {"sweep": "layers"})[: 4 if head else 1]:
        with pytest.raises(ModelError, match=f"lacks {lacking}, which would be initialised at random"):
            swap_or_heal(model, "rbf", **options, **SMALL)
    report = attnlens.inspect(model, analyzers=["symmetry"], layers=[3], **SMALL)
    assert report.coverage.analysed == 8
    assert f"the checkpoint lacks {lacking}, so the loss is undefined" in report.coverage.sentence
    assert not any("foreign" in note for note in report.settings.notes)
    if head:
        with pytest.raises(ModelError, match="initialised at random"):
            attnlens.find_ranks(model, budget="loss:5%", **SMALL)
        attnlens.doctor(model, layers=[0], **SMALL)
        comparison = attnlens.compare("demo", model, analyzers="symmetry", layers=[0], **SMALL).comparison
        assert comparison.outcome is None
        assert any(f"lacks {lacking}" in note for note in comparison.notes)


def test_a_loss_through_a_random_head_is_missing_and_strict_fails(tmp_path):
    whole = demo_without(tmp_path / "step1", tie_word_embeddings=True)
    lacking = demo_without(tmp_path / "step2", tie_word_embeddings=False)
    words = "--windows", "1", "--length", "16", "--strict", "--no-progress", "--layers", "0"
    assert invoke("inspect", whole, *words).returncode == 0, "control"
    assert invoke("inspect", lacking, *words, "--source", "weights").returncode == 0
    strict = invoke("inspect", lacking, *words, "--json", tmp_path / "report.json")
    assert strict.returncode == 3
    assert "lm_head.weight" in strict.stdout
    assert "lm_head.weight" in strict.stderr
    assert "not trained" not in strict.stdout
    (series,) = attnlens.converge_checkpoints([whole, lacking], analyzers=["symmetry"], layers=[0], **SMALL).experiments
    losses = series.curves["loss"].median
    assert [loss is None for loss in losses] == [False, True]
    assert "lm_head.weight" in series.reasons["loss"]


@pytest.mark.parametrize("name", ["transformer.h.0.mlp.c_fc.weight", "transformer.h.3.attn.c_attn.weight"])
def test_no_attention_is_computed_through_a_random_weight(tmp_path, name):
    model = attnlens.load(demo_without(tmp_path / "model", name))
    for command in (attnlens.inspect, attnlens.doctor, swap_kernel):
        with pytest.raises(ModelError, match=f"lacks {name}, which would be initialised at random"):
            command(model, **SMALL)
    with pytest.raises(ModelError, match="initialised at random"):
        attnlens.converge_head(model, head=(3, 2), **SMALL)


def test_only_a_weight_that_ran_and_that_no_result_depends_on_is_excused(tmp_path):
    model = families.build("bert").bert
    model.save_pretrained(tmp_path / "bert")
    tiny.tokenizer("bert").save_pretrained(tmp_path / "bert")
    weights = load_file(tmp_path / "bert" / "model.safetensors")

    def without(part):
        left = {name: weight for name, weight in weights.items() if part not in name}
        save_file(left, tmp_path / "bert" / "model.safetensors", {"format": "pt"})
        return attnlens.load(str(tmp_path / "bert"))

    excused = without("pooler")  # it runs, and no hidden state depends on it
    assert excused.missing_keys
    assert swap_kernel(excused, "rbf", **SMALL).swap.hidden_cosine < 1
    lacking = attnlens.load(demo_without(tmp_path / "model", LAST_MLP))
    attnlens.inspect(lacking, source="weights", **SMALL)
    assert not any(parameter.requires_grad for parameter in lacking.model.parameters())
    assert all(not module._forward_hooks for module in lacking.model.modules())
    assert torch.is_grad_enabled()
    lacking.model.transformer.h[3].forward = lambda hidden, *_, **__: hidden  # like an unused expert
    for model in (without("layer.1.output.LayerNorm"), lacking):
        with pytest.raises(ModelError, match="initialised at random"):
            swap_kernel(model, "rbf", layers=[0], **SMALL)
