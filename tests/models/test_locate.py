"""Tests that every way of naming a model leads to the right one, and every mistaken way to a refusal."""

import hashlib
import json
import os
import shutil
import socket
from functools import partial
from threading import Event

import fake_hub
import families
import pytest
import tiny
import torch
import transformers
from hostile import edited, refused, stored, weights
from program import invoke
from safetensors.torch import load_file

import attnlens
from attnlens.errors import ModelError, UsageError
from attnlens.models.loading import load, locate, nonfinite_tensors
from attnlens.report.report import read_report


def check_refusals(kind, *cases):
    for name, options, *words in cases:  # options of `load`, and words of the error
        refused(kind, partial(load, name, **options), *words)


def test_a_folder_as_it_was_saved_and_demo_are_loaded_without_network_or_output(folder, monkeypatch, capfd):
    from transformers.utils import logging

    for owner, name in ((socket, "getaddrinfo"), (socket.socket, "connect")):
        monkeypatch.setattr(owner, name, lambda *_: pytest.fail("the network was touched"))
    tensors, file = weights(folder), folder / "model.safetensors"
    verbosity = logging.get_verbosity(), logging.is_progress_bar_enabled()
    loaded = load(str(folder))
    info, digest = loaded.info, hashlib.sha256(file.read_bytes()).hexdigest()
    assert type(loaded.model).__name__ == info.architecture == "GPT2LMHeadModel"
    assert (info.id, info.revision, info.conventions) == (str(folder), None, None)
    assert info.parameters == sum(p.numel() for p in loaded.model.parameters())
    assert [(one.name, one.sha256) for one in info.files] == [(file.name, digest)]
    assert (loaded.kind, loaded.missing_keys, loaded.unused_keys) == ("text", (), ())
    assert (loaded.tokenizer is None, loaded.tokenizer_problem, loaded.model.training) == (False, "", False)
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    name = "transformer.h.1.attn.c_attn.weight"
    assert torch.equal(loaded.model.get_parameter(name), tensors[name])
    assert nonfinite_tensors(loaded.model) == []
    spoilt = ["transformer.h.0.attn.c_attn.weight", "transformer.h.1.mlp.c_fc.bias"]
    tensors[spoilt[0]][3, 5], tensors[spoilt[1]][0] = torch.nan, -torch.inf
    stored(folder, {other: tensor for other, tensor in tensors.items() if other != name})
    loaded = load(folder)
    assert (loaded.missing_keys, nonfinite_tensors(loaded.model)) == ((name,), spoilt)
    demo = load("demo", offline=True)
    assert (demo.info.id, demo.info.architecture, demo.kind) == ("demo", "GPT2LMHeadModel", "text")
    assert (demo.tokenizer is None, demo.model.dtype, demo.missing_keys) == (False, torch.float32, ())
    assert capfd.readouterr() == ("", "")
    assert verbosity == (logging.get_verbosity(), logging.is_progress_bar_enabled())


def test_a_weight_file_is_read_with_the_config_of_its_folder_and_a_shard_with_all_others(folder, tmp_path):
    other = tiny.gpt2()
    own = {name: t.clone() for name, t in other.state_dict().items() if name != "lm_head.weight"}
    stored(folder, own, "step.safetensors")
    loaded = load(folder / "step.safetensors")
    assert torch.equal(loaded.model.transformer.wte.weight, other.transformer.wte.weight)
    assert not torch.equal(loaded.model.transformer.wte.weight, load(folder).model.transformer.wte.weight)
    assert [file.name for file in loaded.info.files] == ["step.safetensors"]
    assert loaded.tokenizer is not None
    os.truncate(folder / "step.safetensors", 100)
    check_refusals(ModelError, (folder / "step.safetensors", {}, "step.safetensors", "not a safetensors file"))
    other.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    shards = sorted((tmp_path / "shards").glob("*.safetensors"))
    assert len(shards) > 1
    for place in (tmp_path / "shards", shards[1], tmp_path / "shards" / "model.safetensors.index.json"):
        loaded = load(place)
        assert [file.name for file in loaded.info.files] == [shard.name for shard in shards]
        assert torch.equal(loaded.model.transformer.wte.weight, other.transformer.wte.weight)
    shards[0].unlink()
    check_refusals(ModelError, (tmp_path / "shards", {}, f"{shards[0].name} is missing"))


def test_the_architecture_determines_head_and_kind_of_input(tmp_path):
    kinds = {"bert": "text", "t5": "seq2seq", "vit": "pixels", "clip": "pixels+text", "whisper": "audio"}
    for name, kind in (kinds | {"mamba": "text"}).items():
        model = families.build(name)
        model.save_pretrained(tmp_path / name)
        loaded = load(tmp_path / name)
        assert type(loaded.model) is type(model)
        assert (loaded.kind, loaded.missing_keys, loaded.tokenizer) == (kind, (), None), name
        assert "no tokenizer files" in loaded.tokenizer_problem
    config = transformers.BertConfig(**families.ENCODER, num_labels=3)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "classifier")
    assert load(tmp_path / "classifier").info.architecture == "BertForSequenceClassification"
    transformers.BertModel(config).save_pretrained(tmp_path / "encoder")
    edited(tmp_path / "encoder" / "config.json", architectures=["NoSuchModel"])
    headless = load(tmp_path / "encoder")
    assert (headless.info.architecture, headless.missing_keys) == ("BertModel", ())


def test_half_precision_is_raised_on_the_cpu_unless_requested_and_double_precision_is_kept(folder):
    tiny.gpt2().half().save_pretrained(folder)
    name = "transformer.wte.weight"
    half = load_file(folder / "model.safetensors")[name]
    assert half.dtype == torch.float16
    for dtype, expected in (("auto", torch.float32), ("bfloat16", torch.bfloat16), ("float64", torch.float64)):
        model = load(folder, dtype=dtype, device="cpu").model
        assert model.dtype == expected
        assert torch.equal(model.get_parameter(name), half.to(expected))
    tiny.gpt2().double().save_pretrained(folder)
    assert load(folder, device="cpu").model.dtype == torch.float64


def test_tensors_without_a_parameter_are_named_and_fail_strict_runs(folder):
    file = folder.parent / "r.json"
    words = "inspect", folder, "--source", "weights", "--layers", "0", "-q", "--json", file
    assert (invoke(*words, "--strict").returncode, read_report(file).model.unexpected) == (0, [])
    stored(folder, weights(folder) | {"head.of.another": torch.ones(2)})
    strict = invoke(*words, "--strict")
    assert strict.returncode == 3
    assert "head.of.another" in strict.stderr
    report = read_report(file)
    assert (report.model.unexpected, report.coverage.complete) == (["head.of.another"], True)
    assert invoke(*words).returncode == 0
    edited(folder / "config.json", n_layer=1)
    unused = load(folder).unused_keys
    assert len(unused) == 12
    assert all(name.startswith("transformer.h.1.") for name in unused if name != "head.of.another")


def test_a_pickle_is_read_only_if_allowed_and_without_safetensors(folder):
    (folder / "model.safetensors").rename(folder / "other")
    torch.save(weights(folder, "other"), folder / "pytorch_model.bin")
    check_refusals(ModelError, (folder, {}, "pickle", "--allow-pickle"))
    torch.save({"state_dict": weights(folder, "other"), "epoch": 3}, folder / "pytorch_model.bin")
    check_refusals(ModelError, (folder, {"allow_pickle": True}, "state_dict instead of tensors", "training run"))
    torch.save(weights(folder, "other"), folder / "pytorch_model.bin")
    loaded = load(folder, allow_pickle=True)
    assert (loaded.missing_keys, [file.name for file in loaded.info.files]) == ((), ["pytorch_model.bin"])
    (folder / "other").rename(folder / "model.safetensors")
    assert [file.name for file in load(folder, allow_pickle=True).info.files] == ["model.safetensors"]


CODE = """
import pathlib, torch, transformers
pathlib.Path("{trace}").touch()
class OwnConfig(transformers.PreTrainedConfig):
    model_type = "own"
class OwnModel(transformers.PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.linear = torch.nn.Linear(2, 2)
        self.post_init()
    def forward(self, input_ids=None):
        return input_ids
"""


def test_the_code_of_a_model_runs_only_if_it_is_trusted_and_needed(folder, tmp_path, monkeypatch):
    """Without trust_remote_code, transformers would ask on stdin."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on stdin"))
    own, ran = tmp_path / "own", tmp_path / "ran"
    own.mkdir()
    for place in (own, folder):
        (place / "own.py").write_text(CODE.format(trace=ran))
    edited(folder / "config.json", auto_map={"AutoModelForCausalLM": "own.OwnModel"})
    assert load(folder).info.architecture == "GPT2LMHeadModel"
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    config = {"model_type": "own", "architectures": ["OwnModel"], "auto_map": auto_map}
    (own / "config.json").write_text(json.dumps(config))
    stored(own, {"linear.weight": torch.eye(2), "linear.bias": torch.ones(2)})
    check_refusals(ModelError, (own, {}, "Python code", "--trust-remote-code"))
    assert not ran.exists()
    loaded = load(own, trust_remote_code=True)
    assert (ran.exists(), loaded.info.architecture) == (True, "OwnModel")
    assert torch.equal(loaded.model.linear.weight, torch.eye(2))


def test_mistaken_names_and_options_are_refused(folder, tmp_path):
    empty, other = tmp_path / "empty", tmp_path / "model.pt"
    empty.mkdir()
    other.touch()
    folders, files = ("./nowhere", "/no/where", "some/deep/folder", "nowhere/"), ("weights.gguf", "some/w.safetensors")
    check_refusals(
        ModelError,
        *((name, {}, f"no such folder: {name}") for name in folders),
        *((name, {}, f"no such file: {name}") for name in files),
        *((name, {"offline": True}) for name in ("~nosuchuser/m", "x" * 300, f"some/{'x' * 300}", "a/b/" * 2000)),
        (empty, {}, "no config.json"),
        (other, {}, "neither a .gguf nor a .safetensors"),
        (folder, {"device": f"cuda:{torch.cuda.device_count()}"}, f"{torch.cuda.device_count()} CUDA device"),
    )
    shutil.copy(folder / "model.safetensors", empty)
    check_refusals(ModelError, (empty, {}, "no config.json"), (empty / "model.safetensors", {}, "no config.json"))
    check_refusals(
        UsageError,
        ("@main", {}, "@main does not name a model"),
        *((name, {"offline": True}) for name in ("a\0b", "", "@")),
        (folder, {"dtype": "float23"}, "float32"),
        (folder, {"device": "abacus"}, "abacus"),
        (folder, {"device": "meta"}, "meta"),
        (folder, {"revision": "main"}, "cannot have a revision ('main')"),
        ("demo@main", {}, "no revisions"),
        ("a/b@c", {"revision": "d"}, "contradict"),
    )


def test_a_gguf_file_needs_its_packages_and_to_be_the_only_one(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + b"\0" * 20)
    with monkeypatch.context() as patch:
        patch.setattr("transformers.utils.import_utils.is_gguf_available", lambda: False)
        check_refusals(ModelError, (tmp_path, {}, "gguf is not installed"))
    pytest.importorskip("gguf", reason="GGUF files need the package gguf")
    pytest.importorskip("accelerate", reason="GGUF files need the package accelerate")
    check_refusals(ModelError, (tmp_path, {}), (tmp_path / "model.gguf", {}))
    shutil.copy(tmp_path / "model.gguf", tmp_path / "other.gguf")
    check_refusals(ModelError, (tmp_path, {}, "2 GGUF files", "model.gguf"))


PLACEHOLDERS = {
    "Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\n",
    "web page": b"<!DOCTYPE html>\n<html>",
}


def test_pointers_and_web_pages_are_named_instead_of_the_files_they_stand_for(folder):
    for kind, content in PLACEHOLDERS.items():
        for name in ("model.safetensors", "config.json"):
            kept = (folder / name).read_bytes()
            (folder / name).write_bytes(content)
            check_refusals(ModelError, (folder, {}, f"{name} is a {kind}"), (folder, {"from_files": True}, kind))
            (folder / name).write_bytes(kept)
        (folder / "m.gguf").write_bytes(content)
        check_refusals(ModelError, (folder / "m.gguf", {}, f"m.gguf is a {kind}"))
        kept = (folder / "tokenizer.json").read_bytes()
        (folder / "tokenizer.json").write_bytes(content)
        assert f"tokenizer.json is a {kind}" in load(folder).tokenizer_problem
        (folder / "tokenizer.json").write_bytes(kept)


OTHER_FORMATS = {
    "global_step500": ("DeepSpeed", "zero_to_fp32.py"),
    "pytorch_model_fsdp_0": ("FSDP", "accelerate merge-weights"),
    "onnx": ("exported", "model that was exported"),
    "tf_model.h5": ("TensorFlow", "from_tf=True"),
    "flax_model.msgpack": ("Flax", "from_flax=True"),
    "optimizer.pt": ("training run", "folder in which"),
    "consolidated.00.pth": ("not in transformers' format", "save_pretrained"),
    "pytorch_model-00001-of-00002.bin": ("pytorch_model.bin.index.json", "Download all parts"),
    "model-00001-of-00002.safetensors": ("no model.safetensors.index.json", "Download all parts"),
    "m-00001-of-00002.gguf": ("split GGUF", "llama-gguf-split --merge"),
}


def test_other_formats_and_folders_inside_are_named_with_a_remedy(folder, tmp_path):
    (folder / "model.safetensors").rename(folder / "kept")
    for name, words in OTHER_FORMATS.items():
        (folder / name).touch()
        check_refusals(ModelError, (folder, {}, name, *words), (folder, {"from_files": True}, *words))
        (folder / name).unlink()
    (folder / "model-00001-of-00002.safetensors").touch()
    check_refusals(ModelError, (folder / "model-00001-of-00002.safetensors", {}, "a part of a model"))
    (folder / "model-00001-of-00002.safetensors").unlink()
    (folder / "kept").rename(folder / "model.safetensors")
    place = tmp_path / "run"
    for name in ("checkpoint-500", "checkpoint-1000"):
        shutil.copytree(folder, place / name)
    (place / "onnx").mkdir()
    (place / "onnx" / "config.json").write_text("{}")
    check_refusals(ModelError, (place, {}, "checkpoint-500, checkpoint-1000", "run/checkpoint-1000"))
    shutil.copytree(folder, tmp_path / "cache" / "snapshots" / "abc")
    check_refusals(ModelError, (tmp_path / "cache", {}, "no config.json", "snapshots/abc"))
    shutil.copytree(folder, tmp_path / "sentence" / "0_Transformer")
    (tmp_path / "sentence" / "config.json").write_text("{}")
    check_refusals(ModelError, (tmp_path / "sentence", {}, "no weights", "0_Transformer"))
    for model_type, reason in (
        ("mamba", "no softmax attention"),
        ("bert", "download them"),
        ("depth_pro", "download them"),
    ):
        folder = tmp_path / model_type
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        check_refusals(ModelError, (folder, {}, "has no weights", reason))


def test_names_that_wrappers_changed_are_refused_with_the_part_they_added(folder):
    tensors, first = weights(folder), "transformer.h.0.attn.c_attn.weight"
    for old, new in (
        *(("transformer.", f"{prefix}transformer.") for prefix in ("_orig_mod.", "module.", "base_model.model.")),
        ("transformer.", "module._orig_mod.transformer."),
        ("transformer.", "model.transformer."),
        ("h.0.", "h.0._fsdp_wrapped_module."),
    ):
        stored(folder, {name.replace(old, new, 1): part for name, part in tensors.items()})
        words = first.replace(old, new, 1), f"which the model calls {first}", f"Remove {new.replace(old, '')}"
        check_refusals(ModelError, (folder, {}, *words), (folder, {"from_files": True}, *words))
    stored(folder, {"other.weight": torch.ones(2)})
    check_refusals(ModelError, (folder, {}, "None of the weights", "other.weight"))


def test_which_of_two_copies_of_the_weights_was_read_is_noted(folder, tmp_path):
    other = tiny.gpt2()
    other.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    for file in (tmp_path / "shards").iterdir():
        shutil.copy(file, folder)
    note = f"The weights were read from {folder / 'model.safetensors'}; other weights in this folder were not read: "
    index = "model.safetensors.index.json"
    for way in (False, True):
        assert load(folder, from_files=way).notes == (f"{note}{index}.",)
    assert load(folder / "model.safetensors").notes == ()
    assert load(tmp_path / "shards").notes == ()
    stray = "model-00001-of-00009.safetensors"
    shutil.copy(folder / "model.safetensors", tmp_path / "shards" / stray)
    assert load(tmp_path / "shards").notes[0].endswith(f"were not read: {stray}.")
    (tmp_path / "shards" / stray).unlink()
    compared = attnlens.compare(folder, tmp_path / "shards", source="weights", analyzers=["symmetry"])
    assert f"{note}{index}." in compared.comparison.notes


def test_an_output_matrix_that_the_config_ties_to_another_embedding_is_noted(folder):
    tensors = weights(folder)
    output, embedding = "lm_head.weight", tensors["transformer.wte.weight"]
    stored(folder, tensors | {output: embedding.clone()})
    assert load(folder).notes == ()
    stored(folder, tensors | {output: 2 * embedding})
    loaded = load(folder)
    assert torch.equal(loaded.model.lm_head.weight, 2 * embedding)
    (note,) = loaded.notes
    assert note.startswith(f"{output} differs from the embedding, although config.json ties")


def test_old_spellings_in_config_are_understood_and_unknown_ones_named(folder, tmp_path):
    for value in ("auto", "torch.float16"):
        for name in ("dtype", "torch_dtype"):
            edited(folder / "config.json", **{"dtype": None, "torch_dtype": None} | {name: value})
            assert load(folder, device="cpu").model.dtype == torch.float32
            assert load(folder, from_files=True).deferred is not None
    edited(folder / "config.json", dtype="float23")
    check_refusals(ModelError, (folder, {}, "dtype = 'float23'"))
    edited(folder / "config.json", dtype=None, pruned_heads={"0": [1]})
    check_refusals(ModelError, (folder, {}, "pruned_heads = {'0': [1]}", "transformers 4"))
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    factors = {"long_factor": [2.0] * 4, "short_factor": [1.5] * 4}
    scaling = factors | {"original_max_position_embeddings": 8, "factor": 4.0}
    longrope = {"rope_type": "longrope", "rope_theta": 10000.0} | scaling
    config = transformers.LlamaConfig(**sizes, vocab_size=64, max_position_embeddings=32, rope_parameters=longrope)
    expected = transformers.LlamaForCausalLM(config).eval()
    expected.save_pretrained(tmp_path / "su")
    ids = {"input_ids": torch.arange(24)[None]}
    edited(
        tmp_path / "su" / "config.json", rope_parameters=None, rope_theta=10000.0, rope_scaling={"type": "su"} | scaling
    )
    assert torch.equal(load(tmp_path / "su").model(**ids).logits, expected(**ids).logits)
    edited(tmp_path / "su" / "config.json", rope_scaling={"type": "spiral", "factor": 2.0})
    check_refusals(ModelError, (tmp_path / "su", {}, "rope_scaling.type = 'spiral'"))


def test_a_sentencepiece_tokenizer_names_the_packages_it_needs(tmp_path, monkeypatch):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=64)).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    monkeypatch.setattr("transformers.utils.import_utils.is_sentencepiece_available", lambda: False)
    problem = load(tmp_path).tokenizer_problem
    assert "tokenizer.model is a SentencePiece model" in problem
    assert "pip install sentencepiece protobuf" in problem
    assert "tiktoken" not in problem


def test_missing_tokenizer_files_give_no_tokenizer_and_a_reason(tmp_path):
    families.build("bert").save_pretrained(tmp_path)
    tiny.tokenizer("bert").save_pretrained(tmp_path)
    for name, words in (("tokenizer.json", "5 tokens, but the model"), ("tokenizer_config.json", "no tokenizer files")):
        for path in (tmp_path / name, tmp_path / "vocab.txt"):
            path.unlink(missing_ok=True)
        # transformers makes a tokenizer up, which must not be used
        assert len(transformers.AutoTokenizer.from_pretrained(tmp_path)) == 5
        loaded = load(tmp_path)
        assert loaded.tokenizer is None
        assert words in loaded.tokenizer_problem


def test_a_hub_model_is_downloaded_once_and_later_loaded_from_the_cache(hub, folder, tmp_path, monkeypatch):
    (folder / "pytorch_model.bin").write_bytes(b"large and unwanted")
    check_refusals(ModelError, (fake_hub.OPEN, {"offline": True}, "--offline forbids"))
    assert hub == []
    loaded = load(fake_hub.OPEN)
    assert (loaded.info.id, loaded.info.revision) == (fake_hub.OPEN, fake_hub.COMMIT)
    assert loaded.tokenizer is not None
    assert any("model.safetensors" in path for path in hub)
    assert not any("pytorch_model.bin" in path for path in hub)
    (cached,) = [file for file in (tmp_path / "cache").rglob("model.safetensors") if "snapshots" in file.parts]
    assert cached.is_symlink()
    assert load(cached.parent).info.files == loaded.info.files
    hub.clear()
    for name in ("", "@main", f"@{fake_hub.COMMIT}"):
        assert load(f"{fake_hub.OPEN}{name}", offline=True).info == loaded.info
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert load(fake_hub.OPEN).info == loaded.info
    assert not hub


def test_hub_models_that_can_not_be_read_are_refused(hub, folder):
    check_refusals(
        ModelError,
        ("someone/unknown", {}, "neither a local folder nor a model on the hub"),
        (f"{fake_hub.OPEN}@nosuch", {}, "no revision 'nosuch'"),
        (fake_hub.GATED, {}, "is gated"),
        ("not a name", {}, "neither a local folder nor a model on the hub"),
    )
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    hub.clear()
    check_refusals(ModelError, (fake_hub.OPEN, {}, "--allow-pickle"))
    assert not any("/resolve/" in path for path in hub), "a pickle is refused before it is downloaded"


def test_an_unreachable_hub_is_given_up_while_the_connection_is_pending(tmp_path, monkeypatch):
    from huggingface_hub import constants

    given_up, timeouts, ended = Event(), [], []

    def unroutable(_address, timeout):
        timeouts.append(timeout)
        given_up.wait(60)
        ended.append(timeout)
        raise TimeoutError

    assert locate.PATIENCE == 2, "seconds, as documented"
    monkeypatch.setattr(locate, "PATIENCE", 0.1)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(socket, "create_connection", unroutable)
    check_refusals(ModelError, ("someone/model", {}, "can't be reached", "hf download someone/model"))
    assert (timeouts, ended) == ([0.1], [])
    given_up.set()


def test_a_proxy_is_tried_instead_of_the_hub(monkeypatch):
    addresses = []
    for name in ("HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    connect = lambda address, timeout: addresses.append(address) or socket.socket()  # noqa: E731
    monkeypatch.setattr(socket, "create_connection", connect)
    assert locate.reachable("https://hub.example")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    assert locate.reachable("https://hub.example")
    assert addresses == [("hub.example", 443), ("proxy.example", 3128)]
