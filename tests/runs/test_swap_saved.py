"""Tests that a saved swap comes back as it was, as a plain model folder, whole or not at all."""

import json
import math
import shutil

import pytest
import torch
import transformers as tf
from loaded import BARE, apart, family, outputs, sites_of
from program import attnlens as program
from program import python, refused
from safetensors.torch import load_file, save_file

import attnlens
from attnlens.errors import ModelError, OutputError, UsageError
from attnlens.files import check_folder, sha256
from attnlens.kernels import parsed
from attnlens.models import hooks, texts
from attnlens.runs.swap import saved as room
from attnlens.runs.swap.fit import fit
from attnlens.runs.swap.kernel_run import KernelRun, changed_weights
from attnlens.runs.swap.pipeline import swap_kernel
from attnlens.runs.swap.saved import UnsavedError, load_swapped, save_swapped
from attnlens.runs.swap.sites import SwapSetup

READ = {"windows": 4, "length": 16, "batch_size": 4} | BARE


@pytest.fixture(scope="module")
def inputs(demo):
    return texts.batches(demo, texts.sample("demo"), texts.Cut(tokens=16, sequences=2)).batches[0].inputs


@pytest.fixture(scope="module")
def healed(demo, tmp_path_factory):
    """A healed and fitted demo: its folder, its report, its weights and swaps as they were in memory."""
    folder, kept = tmp_path_factory.mktemp("saved") / "healed", {}
    honest = KernelRun._record

    def keeping(self, *given):
        kept.update(run=self, sites=self.session.sites)
        return honest(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelRun, "_record", keeping)
        report = attnlens.heal(demo, "rbf", heads=[1, 4], fit=True, train=4, save=folder, **READ)
    return folder, report.swap, kept["run"], kept["sites"]


def test_a_healed_model_comes_back_with_the_same_logits(demo, inputs, healed):
    folder, _, run, sites = healed
    own = outputs(demo.model, inputs)
    with changed_weights(demo.model, run.last.weights), hooks.replace(demo.model, sites, run.last.swaps):
        expected = outputs(demo.model, inputs)
    back = load_swapped(folder)
    assert apart(expected, outputs(back.model, inputs)) == 0
    assert apart(own, expected) > 1e-3, "the control: it is another model"
    assert back.kernel == "rbf:gamma=0.5"
    back.close()
    with changed_weights(demo.model, run.last.weights):
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
    folder, _, run, _ = healed
    suffixes = {path.suffix for path in folder.iterdir()}
    assert suffixes <= {".json", ".safetensors", ".txt", ".jinja"}
    plain = tf.AutoModelForCausalLM.from_pretrained(folder).eval()
    with changed_weights(demo.model, run.last.weights):
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
    swaps = {site: hooks.Replacement(parsed(words, allow_signed=True)) for site in chosen}
    if words == "rank:6":
        sizes = {"tokens": READ["length"], "batch_size": READ["batch_size"]}
        evaluated = texts.batches(demo, texts.sample("demo"), texts.Cut(sequences=READ["windows"], **sizes))
        calibrated = texts.batches(demo, texts.sample("demo"), texts.Cut(sequences=32, **sizes), apart_from=evaluated)
        swaps = fit(SwapSetup(demo, sites, swaps), calibrated, lambda _: None)
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
    swaps = dict.fromkeys(sites[1:], hooks.Replacement(parsed("rbf:gamma=2"), (0, 2)))
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
    monkeypatch.setattr(attnlens.models.loading, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(OutputError, match="not an empty folder"):
        swap_kernel("demo", "rbf", save=tmp_path)
    with pytest.raises(OutputError, match="not an empty folder"):
        swap_kernel("demo", "rbf", save=tmp_path / "file")
    with pytest.raises(OutputError, match="can't be written"):
        swap_kernel("demo", "rbf", save=tmp_path / "file" / "model")
    with pytest.raises(UsageError, match="accepts a single kernel"):
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


@pytest.mark.full
def test_a_killed_run_leaves_no_folder_of_that_name(tmp_path):
    code = (
        "import os, signal\n"
        "from attnlens.runs.swap import pipeline, saved\n"
        "saved.save_file = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"pipeline.swap_kernel('demo', 'rbf', windows=2, length=16, save={str(tmp_path / 'model')!r})\n"
    )
    done = python("-c", code)
    assert done.returncode == -9, done.stderr
    assert not (tmp_path / "model").exists()


def test_what_is_there_is_left_alone(demo, tmp_path):
    """A folder of the user's whose name looks like a temporary one, and an empty folder while a run is refused."""
    for name in (".model.part", ".attnlens-save-mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    check_folder(tmp_path / "empty")
    check_folder(tmp_path / "new" / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".attnlens-save-mine", ".model.part", "empty"]
    swap_kernel(demo, "rbf", save=tmp_path / "model", **READ)
    assert (tmp_path / ".model.part" / "file").read_text() == "mine"
    assert (tmp_path / ".attnlens-save-mine" / "file").read_text() == "mine"
    assert (tmp_path / "model").stat().st_mode & 0o777 == (tmp_path / "empty").stat().st_mode & 0o777


def test_a_full_disk_is_an_output_error_and_leaves_nothing(demo, tmp_path, monkeypatch):
    def full(*_args, **_more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(room, "save_file", full)
    with pytest.raises(UnsavedError, match="No space left on device") as failure:
        swap_kernel(demo, "rbf", save=tmp_path / "model", **READ)
    assert failure.value.report.swap.loss is not None, "what was measured is not lost"
    assert not list(tmp_path.iterdir())


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
    with pytest.raises(ModelError, match="does not contain a valid swapped model") as refusal:
        load_swapped(copied)
    assert "\n" not in refusal.value.problem
    (copied / "attnlens.json").unlink()
    with pytest.raises(ModelError, match="does not contain a valid swapped model"):
        load_swapped(copied)


def test_what_attnlens_json_says_wrong_is_named(copied):
    altered(copied, swapped=[0.5])
    with pytest.raises(ModelError, match=r"swapped\.0: "):
        load_swapped(copied)


def test_an_attnlens_json_outside_the_folder_is_not_read(copied, tmp_path):
    (copied / "attnlens.json").rename(tmp_path / "elsewhere.json")
    (copied / "attnlens.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(ModelError, match="links to a file outside its folder"):
        load_swapped(copied)


@pytest.mark.parametrize("option", ["swapped", "name"])
def test_what_a_saved_model_is_loaded_with_is_refused_by_name(healed, option):
    with pytest.raises(UsageError, match=f"no option '{option}'"):
        load_swapped(healed[0], **{option: False})


def site(layer, **changes):
    path = f"transformer.h.{layer}.attn"
    return {"path": path, "ordinal": 0, "layer": layer, "part": "decoder", "repeated": False, "heads": None} | changes


def four(layer, **changes):
    return {"sites": [site(number, **(changes if number == layer else {})) for number in range(4)]}


CHANGES = {
    "a field is missing": {"swapped": None},
    "a site that the model lacks": four(0, path="no.such"),
    "a module that is no attention": four(1, path="transformer.h.1.mlp"),
    "a call that is not made": four(1, ordinal=1),
    "a part that it is not": four(2, part="cross"),
    "sites in another order": {"sites": four(0)["sites"][::-1]},
    "a site less": {"sites": four(0)["sites"][:3]},
    "no sites": {"sites": []},
    "a layer that the model lacks": {"swapped": [9]},
    "a layer before the first": {"swapped": [-1]},
    "no layer": {"swapped": []},
    "a head that the model lacks": four(0, heads=[8]),
    "a head before the first": four(0, heads=[-1]),
    "a head twice": four(0, heads=[1, 1]),
    "no head": four(0, heads=[]),
    "an unknown kernel": {"kernel": "rbff"},
    "a parameter that is no number": {"kernel": "rbf:gamma=x"},
    "no kernel": {"kernel": ""},
    "a kernel that needs a fit": {"kernel": "rank:4"},
    "a kernel with other parameters": {"kernel": "cosine"},
    "a file that is not there": {"files": {"other.safetensors": "0" * 64}},
    "another shape": {"fitted": {"0.centre": [2, 2]}},
}


@pytest.mark.parametrize("what", CHANGES)
def test_an_attnlens_json_that_does_not_fit_is_refused_when_it_is_loaded(copied, what):
    altered(copied, **CHANGES[what])
    with pytest.raises(ModelError, match="does not contain a valid swapped model") as refusal:
        load_swapped(copied)
    assert "\n" not in refusal.value.problem


def refitted(folder, change, *, honest):
    """The fitted parameters changed, and with `honest` hashes and shapes written as if they were saved so."""
    tensors = change(load_file(folder / "attnlens.safetensors"))
    save_file(tensors, folder / "attnlens.safetensors")
    if honest:
        facts = json.loads((folder / "attnlens.json").read_text())
        files = facts["files"] | {"attnlens.safetensors": sha256(folder / "attnlens.safetensors")}
        altered(folder, files=files, fitted={name: list(value.shape) for name, value in tensors.items()})


FITS = {
    "of one layer gone": lambda fits: {name: fit for name, fit in fits.items() if not name.startswith("1.")},
    "all gone": lambda _: {},
    "NaN": lambda fits: {name: fit * math.nan for name, fit in fits.items()},
    "of another shape": lambda fits: {name: fit[:1].clone() for name, fit in fits.items()},
    "of another size": lambda fits: {name: fit[..., :3].clone() for name, fit in fits.items()},
}


@pytest.mark.parametrize("what", FITS)
def test_fitted_parameters_that_are_not_those_that_were_saved_are_refused(copied, what):
    load_swapped(copied).close()
    refitted(copied, FITS[what], honest=False)
    with pytest.raises(ModelError, match=r"attnlens\.safetensors is missing, is not listed in .*, or was changed"):
        load_swapped(copied)


@pytest.mark.parametrize("what", [what for what in FITS if what != "all gone"])
def test_fitted_parameters_that_do_not_fit_are_refused_whatever_the_hashes_say(copied, what):
    refitted(copied, FITS[what], honest=True)
    with pytest.raises(ModelError, match="does not contain a valid swapped model"):
        load_swapped(copied)


def test_weights_that_are_not_those_that_were_saved_are_refused(copied):
    weights = load_file(copied / "model.safetensors")
    save_file({name: 2 * value for name, value in weights.items()}, copied / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors is missing, is not listed in .*, or was changed"):
        load_swapped(copied)


def test_missing_or_broken_fitted_parameters_are_refused(copied):
    (copied / "attnlens.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="does not contain a valid swapped model"):
        load_swapped(copied)
    (copied / "attnlens.safetensors").unlink()
    with pytest.raises(ModelError, match="does not contain a valid swapped model"):
        load_swapped(copied)


def test_a_folder_that_is_none_and_a_plain_model_are_refused(demo, tmp_path):
    with pytest.raises(ModelError, match="does not contain a valid swapped model"):
        load_swapped(tmp_path / "nothing")
    demo.model.save_pretrained(tmp_path / "plain")
    with pytest.raises(ModelError, match="does not contain a valid swapped model"):
        load_swapped(tmp_path / "plain")


def test_a_model_without_a_tokenizer_is_saved_without_one(demo, tmp_path):
    bare = attnlens.models.loading.Loaded(demo.model, None, "its files are missing", demo.info, demo.kind)
    fed = {"input_ids": torch.arange(3, 12)[None]}
    sites = sites_of(demo.model, fed)
    save_swapped(tmp_path / "model", bare, sites, dict.fromkeys(sites, hooks.Replacement(parsed("rbf"))))
    back = load_swapped(tmp_path / "model")
    assert back.tokenizer is None
    back.close()


@pytest.mark.full
def test_the_program_saves_and_says_where(tmp_path):
    words = ("--kernel", "rbf", "--windows", "2", "--length", "16", "--no-progress", "--save", tmp_path / "model")
    done = program("swap-kernel", *words, "--json", tmp_path / "a.json")
    assert done.returncode == 0, done.stderr
    assert f"Wrote the changed model to {tmp_path / 'model'}, {tmp_path / 'a.json'}" in done.stderr
    load_swapped(tmp_path / "model").close()
    refused(program("swap-kernel", *words), "not an empty folder")
