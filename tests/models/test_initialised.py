"""Tests that nothing is measured that rests on a weight which the checkpoint lacks, and everything else is."""

import json
import shutil
from pathlib import Path

import families
import pytest
import tiny
import torch
from loaded import swap_or_heal
from program import attnlens as program
from safetensors.torch import load_file, save_file

import attnlens
from attnlens.errors import ModelError
from attnlens.runs.swap.pipeline import swap_kernel

DEMO = Path(attnlens.__file__).parent / "models" / "demo"
SMALL = {"windows": 1, "length": 16}


def demo_without(folder, *names, **config):
    """A copy of demo's folder whose checkpoint lacks these tensors."""
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("step*", "text.txt"))
    weights = load_file(folder / "model.safetensors")
    save_file({name: value for name, value in weights.items() if name not in names}, folder / "model.safetensors")
    assert len(weights) > len(load_file(folder / "model.safetensors")) or config
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return str(folder)


LACKING = {
    "output layer": ((), {"tie_word_embeddings": False}, "lm_head.weight"),
    "last norm": (("transformer.ln_f.weight",), {}, "transformer.ln_f.weight"),
    "last MLP": (("transformer.h.3.mlp.c_fc.weight",), {}, "transformer.h.3.mlp.c_fc.weight"),
}


@pytest.mark.parametrize("what", LACKING)
def test_no_loss_rests_on_a_random_weight_and_attention_before_it_is_still_read(tmp_path, what):
    names, config, lacking = LACKING[what]
    model = attnlens.load(demo_without(tmp_path / "model", *names, **config))
    assert lacking in model.missing_keys
    for more in ({}, {"train": 1}, {"fit": True}, {"sweep": "layers"}):
        with pytest.raises(ModelError, match=f"lacks {lacking}, which would be initialised at random"):
            swap_or_heal(model, "rbf", **more, **SMALL)
    with pytest.raises(ModelError, match="initialised at random"):
        attnlens.find_ranks(model, budget="loss:5%", **SMALL)
    report = attnlens.inspect(model, **SMALL)
    assert report.coverage.analysed == 32
    assert f"the checkpoint lacks {lacking}, so the model has no loss" in report.coverage.sentence
    assert not any("foreign" in note for note in report.settings.notes)
    attnlens.doctor(model, **SMALL)
    outcome = attnlens.compare("demo", model, analyzers="symmetry", **SMALL).comparison
    assert outcome.outcome is None
    assert any(f"lacks {lacking}" in note for note in outcome.notes)


def test_a_loss_through_a_random_head_is_none_and_strict_says_so(tmp_path):
    """The control: the same weights under the head that the checkpoint has."""
    whole = demo_without(tmp_path / "step1", tie_word_embeddings=True)
    lacking = demo_without(tmp_path / "step2", tie_word_embeddings=False)
    words = ("--windows", "2", "--length", "16", "--strict", "--no-progress")
    assert program("inspect", whole, *words).returncode == 0
    done = program("inspect", lacking, *words, "--json", tmp_path / "report.json")
    assert done.returncode == 3, done.stderr
    assert "lm_head.weight" in done.stdout
    assert "lm_head.weight" in done.stderr
    assert "not trained" not in done.stdout
    assert program("inspect", lacking, *words, "--source", "weights").returncode == 0
    (series,) = attnlens.converge_checkpoints([whole, lacking], windows=2, length=16).experiments
    losses = series.curves["loss"].median
    assert losses[0] is not None
    assert losses[1] is None
    assert "lm_head.weight" in series.reasons["loss"]


@pytest.mark.parametrize("name", ["transformer.h.0.mlp.c_fc.weight", "transformer.h.3.attn.c_attn.weight"])
def test_no_attention_rests_on_a_random_weight_in_any_verb(tmp_path, name):
    model = attnlens.load(demo_without(tmp_path / "model", name))
    for verb in (attnlens.inspect, attnlens.doctor, swap_kernel):
        with pytest.raises(ModelError, match=f"lacks {name}, which would be initialised at random"):
            verb(model, **SMALL)
    with pytest.raises(ModelError, match="initialised at random"):
        attnlens.converge_head(model, head=(3, 2), **SMALL)


def test_what_nothing_measured_depends_on_is_excused(tmp_path):
    """BERT's pooler runs, and no hidden state depends on it."""
    model = families.build("bert").bert
    model.save_pretrained(tmp_path)
    tiny.tokenizer("bert").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")

    def without(part):
        save_file({n: v for n, v in weights.items() if part not in n}, tmp_path / "model.safetensors", {"format": "pt"})
        return attnlens.load(str(tmp_path))

    loaded = without("pooler")
    assert loaded.missing_keys
    assert swap_kernel(loaded, "rbf", **SMALL).swap.hidden_cosine < 1
    with pytest.raises(ModelError, match="initialised at random"):
        swap_kernel(without("layer.1.output.LayerNorm"), "rbf", **SMALL)


def test_an_expert_that_no_token_chose_is_not_excused(tmp_path):
    """It would be chosen on other text: only what ran and left nothing measured is excused."""
    model = attnlens.load(demo_without(tmp_path / "model", "transformer.h.3.mlp.c_fc.weight"))
    block = model.model.transformer.h[3]
    block.forward = lambda hidden, *_, **__: hidden  # a part that does not run on these inputs
    with pytest.raises(ModelError, match="initialised at random"):
        swap_kernel(model, "rbf", layers=[0], **SMALL)


def test_gradients_are_left_as_they_were(tmp_path):
    model = attnlens.load(demo_without(tmp_path / "model", "transformer.h.3.mlp.c_fc.weight"))
    attnlens.inspect(model, source="weights", **SMALL)
    assert not any(parameter.requires_grad for parameter in model.model.parameters())
    assert all(not module._forward_hooks for module in model.model.modules())
    assert torch.is_grad_enabled()
