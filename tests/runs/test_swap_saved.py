"""Tests that a saved swap is loaded as it was, as a plain model folder, complete or not at all."""

import json
import shutil

import pytest
import torch
import transformers as tf
from hostile import edited, refused
from loaded import BARE, apart, family, outputs, sites_of
from program import invoke, python
from safetensors.torch import load_file, save_file

import attnlens
from attnlens.errors import ModelError, OutputError, UsageError
from attnlens.files import check_folder, sha256
from attnlens.kernels import parsed
from attnlens.models import hooks, loading, texts
from attnlens.runs.swap import saved as saving
from attnlens.runs.swap.fit import fit
from attnlens.runs.swap.kernel_run import KernelRun, changed_weights
from attnlens.runs.swap.pipeline import swap_kernel
from attnlens.runs.swap.saved import UnsavedError, load_swapped, save_swapped
from attnlens.runs.swap.sites import SwapSetup

READ = {"windows": 4, "length": 16, "batch_size": 4} | BARE
INVALID = "does not contain a valid swapped model"


def assert_loaded_as(folder, model, fed, sites, swaps):
    """Load a folder, and check that its outputs are those of the model under these swaps; return what was loaded."""
    with hooks.replace(model, sites, swaps):
        expected = outputs(model, fed)
    back = load_swapped(folder)
    assert apart(expected, outputs(back.model, fed)) <= 1e-6
    back.close()
    return back


@pytest.fixture(scope="module")
def inputs(demo):
    return texts.batches(demo, texts.sample("demo"), texts.Cut(tokens=16, sequences=4)).batches[0].inputs


@pytest.fixture(scope="module")
def healed(demo, tmp_path_factory):
    """Heal and fit the demo; return its folder, its report, and the run with its weights and swaps in memory."""
    folder, runs, record = tmp_path_factory.mktemp("saved") / "healed", [], KernelRun._record
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelRun, "_record", lambda self, *args: runs.append(self) or record(self, *args))
        report = attnlens.heal(demo, "rbf", heads=[1, 4], fit=True, train=2, save=folder, **READ)
    return folder, report.swap, runs[0]


def test_a_healed_model_is_loaded_with_its_kernel_weights_and_loss(demo, inputs, healed):
    folder, swap, run = healed
    own, back = outputs(demo.model, inputs), load_swapped(folder)
    with changed_weights(demo.model, run.last.weights):
        without = outputs(demo.model, inputs)
        with hooks.replace(demo.model, run.session.sites, run.last.swaps):
            expected = outputs(demo.model, inputs)
    assert apart(expected, outputs(back.model, inputs)) == 0
    assert apart(own, expected) > 1e-3, "the control: it is another model"
    assert back.kernel == "rbf:gamma=0.5"
    ids = inputs["input_ids"]
    assert float(back.model(input_ids=ids, labels=ids).loss) == pytest.approx(swap.loss.after, rel=1e-5)
    assert back.tokenizer(back.tokenizer.decode(ids[0]))["input_ids"] == ids[0].tolist()
    more = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(*(back.model.generate(ids[:1], use_cache=cached, **more) for cached in (True, False)))
    back.close()
    assert apart(without, outputs(back.model, inputs)) == 0, "closed, its own kernel is back"
    assert back.model.config._attn_implementation == demo.model.config._attn_implementation
    load_swapped(folder).close()  # unused
    failed = load_swapped(folder)
    with pytest.raises(IndexError):
        failed.model(input_ids=torch.tensor([[10**6]]))
    failed.close()


def test_the_folder_is_a_plain_model_without_pickles_that_only_load_swapped_reads(demo, inputs, healed):
    """Loaded as an ordinary model, its weights would run under a kernel that they were not trained with."""
    folder, _, run = healed
    assert {path.suffix for path in folder.iterdir()} <= {".json", ".safetensors", ".txt", ".jinja"}
    plain = tf.AutoModelForCausalLM.from_pretrained(folder).eval()
    with changed_weights(demo.model, run.last.weights):
        assert apart(outputs(demo.model, inputs), outputs(plain, inputs)) == 0
    assert tf.AutoTokenizer.from_pretrained(folder)("And God said")["input_ids"]
    facts = json.loads((folder / "attnlens.json").read_text())
    assert (facts["kernel"], facts["swapped"]) == ("rbf:gamma=0.5", [0, 1, 2, 3])
    assert [site["heads"] for site in facts["sites"]] == [[1, 4]] * 4
    for read in (attnlens.load, attnlens.inspect, attnlens.doctor, swap_kernel):
        for path in (folder, folder / "model.safetensors"):
            refused(ModelError, lambda read=read, path=path: read(str(path)), "with another kernel", "load_swapped")
    for option in ("swapped", "name"):
        with pytest.raises(UsageError, match=f"Unknown option '{option}'"):
            load_swapped(folder, **{option: False})


@pytest.mark.parametrize("words", ["polynomial:degree=3", "rbf+window:5", "rank:6", "exponential", "linear+symmetric"])
def test_every_kind_of_kernel_is_restored(demo, inputs, tmp_path, words):
    layers = [1] if "+" in words or "rank" in words else None
    swap_kernel(demo, words, layers=layers, allow_signed=True, save=tmp_path / "model", **READ)
    sites = sites_of(demo.model, inputs)
    chosen = [site for site in sites if layers is None or site.layer in layers]
    swaps = dict.fromkeys(chosen, hooks.Replacement(parsed(words, allow_signed=True)))
    if words == "rank:6":
        evaluated, calibrated = (texts.Cut(sequences=count, tokens=16, batch_size=4) for count in (4, 32))
        apart_from = texts.batches(demo, texts.sample("demo"), evaluated)
        calibrated = texts.batches(demo, texts.sample("demo"), calibrated, apart_from=apart_from)
        swaps = fit(SwapSetup(demo, sites, swaps), calibrated, lambda _: None)
    assert_loaded_as(tmp_path / "model", demo.model, inputs, sites, swaps)


@pytest.mark.parametrize("name", ["bert", "albert", "t5", "llama"])
def test_other_families_are_restored(tmp_path, name):
    model = family(name)
    bare = loading.Loaded(model.model, None, "its files are missing", model.info, model.kind)
    fed = texts.batches(model, texts.sample("demo"), texts.Cut(tokens=16, sequences=2)).batches[0].inputs
    sites = sites_of(model.model, fed)
    swaps = dict.fromkeys(sites[1:], hooks.Replacement(parsed("rbf:gamma=2"), (0, 2)))
    save_swapped(tmp_path / "model", bare if name == "bert" else model, sites, swaps)
    back = assert_loaded_as(tmp_path / "model", model.model, fed, sites, swaps)
    assert (back.tokenizer is None) == (name == "bert"), "a model without one is saved without one"


def test_a_folder_that_cannot_be_used_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    for folder, problem in {"": "an empty folder", "file": "an empty folder", "file/model": "can't be written"}.items():
        with pytest.raises(OutputError, match=problem):
            swap_kernel("demo", "rbf", save=tmp_path / folder)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_other_folders_are_left_alone_and_new_ones_are_made(demo, tmp_path):
    """The user's folders have names like temporary ones; an empty folder is only checked."""
    mine = [tmp_path / name for name in (".attnlens-save-mine", ".model.part")]
    for folder in (*mine, tmp_path / "empty"):
        folder.mkdir()
    for folder in mine:
        (folder / "file").write_text("mine")
    for folder in (tmp_path / "empty", tmp_path / "new" / "model"):
        check_folder(folder)
    assert sorted(tmp_path.iterdir()) == [*mine, tmp_path / "empty"]
    mode = (tmp_path / "empty").stat().st_mode
    for folder in (tmp_path / "empty", tmp_path / "a" / "b"):
        swap_kernel(demo, "rbf", save=folder, **READ)
        load_swapped(folder).close()
        assert folder.stat().st_mode == mode
    assert [(folder / "file").read_text() for folder in mine] == ["mine", "mine"]


def test_a_failed_run_leaves_no_folder(demo, tmp_path, monkeypatch):
    def full(*_args, **_more):
        raise OSError(28, "No space left on device")

    for name, value in (("save_file", None), ("FACTS", None), ("save_file", full)):  # None: a TypeError while saving
        with monkeypatch.context() as patch:
            patch.setattr(saving, name, value)
            with pytest.raises((TypeError, UnsavedError)) as failure:
                swap_kernel(demo, "rbf", save=tmp_path / "model", **READ)
        assert not list(tmp_path.iterdir())
    assert "No space left on device" in str(failure.value)
    assert failure.value.report.swap.loss is not None, "what was measured is not lost"
    words = "--kernel", "rbf", "--windows", "2", "--length", "16", "--save", tmp_path / "model"
    done = invoke("swap-kernel", *words, "--no-progress", "--json", tmp_path / "a.json")
    assert f"Wrote the changed model to {tmp_path / 'model'}, {tmp_path / 'a.json'}" in done.stderr
    load_swapped(tmp_path / "model").close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "model"]


@pytest.mark.full
def test_a_killed_run_leaves_no_folder(tmp_path):
    code = (
        "import os, signal\n"
        "from attnlens.runs.swap import pipeline, saved\n"
        "saved.save_file = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"pipeline.swap_kernel('demo', 'rbf', windows=2, length=16, save={str(tmp_path / 'model')!r})\n"
    )
    done = python("-c", code)
    assert done.returncode == -9, done.stderr
    assert not (tmp_path / "model").exists()


@pytest.fixture
def copy(healed, tmp_path):
    return shutil.copytree(healed[0], tmp_path / "copy")


def sites_with(layer=0, **changes):
    """Return the sites of demo as in attnlens.json, with one changed."""
    site = {"ordinal": 0, "part": "decoder", "repeated": False, "heads": [1, 4]}
    sites = [{"path": f"transformer.h.{number}.attn", "layer": number} | site for number in range(4)]
    sites[layer] |= changes
    return sites


CHANGES = {
    "swapped": [None, [9], [-1], []],  # missing, layers that the model lacks, none
    "kernel": ["rbff", "rbf:gamma=x", "", "rank:4", "cosine"],  # the last ones need a fit, and have other parameters
    "files": [{"other.safetensors": "0" * 64}],
    "fitted": [{"0.centre": [2, 2]}],
    "sites": [
        *([], sites_with()[::-1], sites_with()[:3]),
        *(sites_with(0, path="no.such"), sites_with(1, path="transformer.h.1.mlp")),
        *(sites_with(1, ordinal=1), sites_with(2, part="cross")),
        *(sites_with(0, heads=heads) for heads in ([8], [-1], [1, 1], [])),
    ],
}


def test_an_attnlens_json_that_does_not_fit_the_model_is_refused(copy):
    file = copy / "attnlens.json"
    original = file.read_text()
    facts = json.loads(original)

    def load(content):
        file.write_text(content if isinstance(content, str) else json.dumps(facts | content))
        return load_swapped(copy)

    load({"sites": sites_with()}).close()  # the control
    changes = [{name: value} for name, values in CHANGES.items() for value in values]
    for change in (*changes, '{"kernel": "rbf", '):
        refused(ModelError, lambda change=change: pytest.fail(f"loaded: {change}, {load(change)}"), INVALID)
    with pytest.raises(ModelError, match=r"other\.safetensors is missing"):
        load({"files": facts["files"] | {"other.safetensors": "0" * 64}})
    with pytest.raises(ModelError, match=r"swapped\.0: "):
        load({"swapped": [0.5]})
    file.unlink()
    with pytest.raises(ModelError, match=INVALID):
        load_swapped(copy)
    (copy.parent / "elsewhere.json").write_text(original)
    file.symlink_to(copy.parent / "elsewhere.json")
    with pytest.raises(ModelError, match="links to a file outside its folder"):
        load_swapped(copy)


def test_changed_missing_and_foreign_files_are_refused_even_with_their_own_hash(demo, copy, tmp_path):
    parts = {name: copy / f"{name}.safetensors" for name in ("model", "attnlens")}
    weights, fits = (load_file(path) for path in parts.values())
    original = (copy / "attnlens.json").read_text()
    for part, changed in (
        ("model", {name: 2 * value for name, value in weights.items()}),
        ("attnlens", {name: value for name, value in fits.items() if not name.startswith("1.")}),
        ("attnlens", {name: value * torch.nan for name, value in fits.items()}),
        ("attnlens", {name: value[:1].clone() for name, value in fits.items()}),
        ("attnlens", {name: value[..., :3].clone() for name, value in fits.items()}),
        ("attnlens", {}),
    ):
        save_file(weights, parts["model"])
        save_file(changed, parts[part])
        (copy / "attnlens.json").write_text(original)
        with pytest.raises(ModelError, match=rf"{part}\.safetensors is missing, is not listed in .*, or was changed"):
            load_swapped(copy)
        if part == "attnlens" and changed:  # a swap without fitted parameters is valid
            files = json.loads(original)["files"] | {parts[part].name: sha256(parts[part])}
            edited(copy / "attnlens.json", files=files, fitted={key: [*fit.shape] for key, fit in changed.items()})
            with pytest.raises(ModelError, match=INVALID):
                load_swapped(copy)
    (copy / "attnlens.json").write_text(original)
    parts["attnlens"].write_bytes(b"nothing")
    demo.model.save_pretrained(tmp_path / "plain")
    for folder in (copy, tmp_path / "nothing", tmp_path / "plain"):
        with pytest.raises(ModelError, match=INVALID):
            load_swapped(folder)
    parts["attnlens"].unlink()
    with pytest.raises(ModelError, match=INVALID):
        load_swapped(copy)
