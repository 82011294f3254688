"""Tests that a model's folder is read within bounds, or refused in two lines; no payload ever runs."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_hub
import families
import program
import pytest
import torch
from hostile import DEEP, edited, refused, stored, weights

import attnlens
from attnlens.errors import ModelError, UsageError
from attnlens.models import loading

INDEX = "model.safetensors.index.json"
Edit = Callable[[Path], Any]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """What a payload would leave behind."""
    return tmp_path / "ran"


class Payload:
    """Whoever unpickles it makes the file `trace`."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.trace,))


def indexed(folder: Path, shard: object, **more: Any) -> None:
    """Let an index name `shard` for every weight, in the place of model.safetensors."""
    table = dict.fromkeys(weights(folder), shard)
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": table} | more))


# a payload is never run


def _named_by_index(folder: Path, payload: Payload, shard: str) -> None:
    torch.save({**weights(folder), "x": payload}, folder / shard)
    indexed(folder, shard)


def _plain(folder: Path, payload: Payload, name: str) -> None:
    torch.save({**weights(folder), "x": payload}, folder / name)
    if name != "model.safetensors":
        (folder / "model.safetensors").unlink()


def _link(folder: Path, payload: Payload) -> None:
    torch.save({"x": payload}, folder.parent / "outside.bin")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../outside.bin")


def _bin_index(folder: Path, payload: Payload, shard: str) -> None:
    torch.save({"x": payload}, folder.parent / "evil.bin")
    torch.save({"x": payload}, folder / "evil.txt")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {"x": shard}}))
    (folder / "model.safetensors").unlink()


def _code(folder: Path, payload: Payload) -> str:
    (folder / "own.py").write_text(f"from pathlib import Path\nPath({str(payload.trace)!r}).touch()\n")
    return "own.Own"


def _tokenizer(folder: Path, payload: Payload) -> None:
    own = _code(folder, payload)
    edited(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [own, own]}, tokenizer_class="Own")


def _processor(folder: Path, payload: Payload) -> None:
    for name in ("processor_config.json", "preprocessor_config.json"):
        text = {"auto_map": {"AutoProcessor": _code(folder, payload)}, "processor_class": "Own"}
        (folder / name).write_text(json.dumps(text))


def _generate(folder: Path, payload: Payload) -> None:
    (folder / "custom_generate").mkdir()
    _code(folder / "custom_generate", payload)
    (folder / "custom_generate" / "own.py").rename(folder / "custom_generate" / "generate.py")


def _adapter(folder: Path, payload: Payload) -> None:
    torch.save({"x": payload}, folder / "adapter_model.bin")
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(folder), "peft_type": "LORA"})
    )


def _weights_of_config(folder: Path, payload: Payload) -> None:
    _adapter(folder, payload)
    (folder / "adapter_config.json").unlink()
    _plain(folder, payload, "pytorch_model.bin")
    edited(folder / "config.json", transformers_weights="adapter_model.bin")


WAYS: dict[str, tuple[Callable[[Path, Payload], None], dict[str, Any]]] = {
    "index": (lambda folder, payload: _named_by_index(folder, payload, "evil.bin"), {}),
    "suffix .model": (lambda folder, payload: _named_by_index(folder, payload, "w.model"), {}),
    "suffix .txt, pickles allowed": (
        lambda folder, payload: _named_by_index(folder, payload, "w.txt"),
        {"allow_pickle": True},
    ),
    "shard called .safetensors": (lambda folder, payload: _named_by_index(folder, payload, "w.safetensors"), {}),
    "file called .safetensors": (lambda folder, payload: _plain(folder, payload, "model.safetensors"), {}),
    "file called .gguf": (lambda folder, payload: _plain(folder, payload, "model.gguf"), {}),
    "link": (_link, {}),
    ".bin": (lambda folder, payload: _plain(folder, payload, "pytorch_model.bin"), {}),
    ".bin, allowed": (lambda folder, payload: _plain(folder, payload, "pytorch_model.bin"), {"allow_pickle": True}),
    ".bin index, outside": (lambda folder, payload: _bin_index(folder, payload, "../evil.bin"), {"allow_pickle": True}),
    ".bin index, suffix": (lambda folder, payload: _bin_index(folder, payload, "evil.txt"), {"allow_pickle": True}),
    "tokenizer": (_tokenizer, {}),
    "processor": (_processor, {}),
    "custom generate": (_generate, {}),
    "adapter": (_adapter, {"allow_pickle": True}),
    "config's weights": (_weights_of_config, {"allow_pickle": True}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_payload_is_never_run(way: str, folder: Path, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, options = WAYS[way]
    prepare(folder, Payload(trace))
    opened, own = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **more: (opened.append(args[0]), own(*args, **more))[1])
    if way in ("tokenizer", "processor", "custom generate"):
        loaded = loading.load(str(folder), **options)
        if loaded.tokenizer is not None:
            loaded.tokenizer("a")
    else:
        words = ["could run code"] if way == ".bin, allowed" else []  # torch's own text advises loading it anyway
        refused(ModelError, lambda: loading.load(str(folder), **options), *words)
    assert not trace.exists()
    assert not opened or (options and Path(opened[0]).suffix == ".bin"), "no pickle is even opened but an allowed one"


def test_that_payload_would_run_elsewhere(trace: Path) -> None:
    pickle.loads(pickle.dumps(Payload(trace)))  # noqa: S301  # the control
    assert trace.exists()


def test_a_shard_named_by_itself_opens_no_pickle(folder: Path, trace: Path) -> None:
    tensors = weights(folder)
    torch.save({"x": Payload(trace)}, folder / "evil.model")
    table = dict.fromkeys(tensors, "part.safetensors") | {"x": "evil.model"}
    stored(folder, tensors, "part.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": table}))
    refused(ModelError, lambda: loading.load(str(folder / "part.safetensors")), "'evil.model'")
    assert not trace.exists()


@pytest.mark.parametrize("shard", ["w.model", "w.txt", "model.bin"])
def test_a_payload_on_the_hub_is_never_run(shard: str, folder: Path, trace: Path, hub: list[str]) -> None:
    _named_by_index(folder, Payload(trace), shard)
    refused(ModelError, lambda: loading.load(fake_hub.OPEN), repr(shard))
    refused(ModelError, lambda: loading.load(fake_hub.OPEN, offline=True), repr(shard))
    assert hub
    assert not trace.exists()


def test_the_hubs_cache_whose_files_are_links_is_read(folder: Path, hub: list[str]) -> None:
    loaded = loading.load(fake_hub.OPEN)
    (cached,) = [file for file in (folder.parent / "cache").rglob("model.safetensors") if "snapshots" in file.parts]
    assert cached.is_symlink()
    assert loading.load(str(cached.parent)).info.files == loaded.info.files


KERNELS = """
import os, types
__version__ = "{version}"
def get_kernel(*names, **_):
    open(os.environ["TRACE"], "a").write(f"{{names}} ")
    return types.ModuleType("fetched")
def _same(*_, **__):
    return lambda thing: thing
use_kernel_forward_from_hub = use_kernelized_func = replace_kernel_forward_from_hub = _same
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {{"__init__": lambda *_, **__: None}})
"""
USING = """
import os, sys
from pathlib import Path
from transformers import AutoModel
from transformers.utils.import_utils import is_kernels_available
import attnlens
assert is_kernels_available()
for folder in sys.argv[1:]:
    attnlens.inspect(folder, source="weights", layers=[0])
assert not Path(os.environ["TRACE"]).exists(), Path(os.environ["TRACE"]).read_text()
try:
    AutoModel.from_pretrained(sys.argv[1])
except (ImportError, UnboundLocalError):  # the stub's kernel can do nothing
    pass
print(Path(os.environ["TRACE"]).read_text())
"""


def test_no_kernel_is_fetched_whatever_a_config_says(folder: Path, tmp_path: Path, trace: Path) -> None:
    from transformers.utils.import_utils import KERNELS_MIN_VERSION

    (tmp_path / "stub" / "kernels").mkdir(parents=True)
    (tmp_path / "stub" / "kernels" / "__init__.py").write_text(KERNELS.format(version=KERNELS_MIN_VERSION))
    edited(folder / "config.json", attn_implementation="kernels-community/flash-attn2")
    shutil.copytree(folder, tmp_path / "second")
    edited(tmp_path / "second" / "config.json", attn_implementation=None, _attn_implementation="flash_attention_2")
    families.build("clip").save_pretrained(tmp_path / "nested")
    parts = json.loads((tmp_path / "nested" / "config.json").read_text())
    named = {
        part: parts[part] | {"attn_implementation": "someone/evil", "_attn_implementation": "someone/evil"}
        for part in ("text_config", "vision_config")
    }
    edited(tmp_path / "nested" / "config.json", **named)
    path = os.pathsep.join([str(tmp_path / "stub"), str(Path(attnlens.__file__).parent.parent)])
    ended = subprocess.run(
        [sys.executable, "-c", USING, str(folder), str(tmp_path / "second"), str(tmp_path / "nested")],
        env=program.environment_with(TRACE=str(trace), PYTHONPATH=path),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "kernels-community/flash-attn2" in ended.stdout, "the control, transformers alone, fetches it"


# indexes and files in the folder


def _json(folder: Path, name: str, text: str | bytes) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def _index(text: str) -> Edit:
    def edit(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        _json(folder, INDEX, text)

    return edit


def _pipe(name: str) -> Edit:
    def edit(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return edit


def _linked(name: str, target: str) -> Edit:
    def edit(folder: Path) -> None:
        shutil.copytree(folder, folder.parent / "other", dirs_exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return edit


def _config(**changes: Any) -> Edit:
    return lambda folder: edited(folder / "config.json", **changes)


def _sparse(name: str) -> Edit:
    def edit(folder: Path) -> None:
        with (folder / name).open("ab") as file:
            file.truncate(2**28 + 1)

    return edit


def _safetensors(make: Callable[[bytes], bytes]) -> Edit:
    return lambda folder: (folder / "model.safetensors").write_bytes(make((folder / "model.safetensors").read_bytes()))


def _touched(name: str) -> Edit:
    return lambda folder: (folder / name).touch()


def _renamed(name: str) -> Edit:
    return lambda folder: (folder / "model.safetensors").rename(folder / name)


SHARD = "must name .safetensors files in its folder"
FAULTS: dict[str, tuple[Edit, tuple[str, ...]]] = {
    "index above the folder": (lambda f: indexed(f, "../other.safetensors"), (SHARD, "'../other.safetensors'")),
    "index of an absolute path": (lambda f: indexed(f, "/etc/passwd"), (SHARD, "/etc/passwd")),
    "index of a folder below": (lambda f: indexed(f, "sub/w.safetensors"), (SHARD,)),
    "index with a backslash": (lambda f: indexed(f, "..\\w.safetensors"), (SHARD,)),
    "index with NUL": (lambda f: indexed(f, "w\0.safetensors"), (SHARD,)),
    "index of a number": (lambda f: indexed(f, 3), (SHARD, "names 3")),
    "index of null": (lambda f: indexed(f, None), (SHARD, "None")),
    "index of a list": (lambda f: indexed(f, ["a.safetensors"]), (SHARD,)),
    "index of an endless name": (lambda f: indexed(f, "a" * 100_000 + ".safetensors"), (SHARD,)),
    "index of what is missing": (lambda f: indexed(f, "w.safetensors"), ("w.safetensors is missing",)),
    "index of itself": (lambda f: indexed(f, INDEX), (SHARD,)),
    "index, no map": (_index("{}"), ("does not name any weight files",)),
    "index, empty map": (_index('{"weight_map": {}}'), ("does not name any weight files",)),
    "index, map is a list": (_index('{"weight_map": ["a.safetensors"]}'), ("does not name any weight files",)),
    "index, a list": (_index("[]"), ("is not a JSON object",)),
    "index, nested": (_index(f'{{"weight_map": {DEEP}}}'), ("is not a JSON object",)),
    "index, cut": (_index('{"weight_map": {"a": "b'), ("is not a JSON object",)),
    "index, a pipe": (lambda f: (_index("")(f), _pipe(INDEX)(f)), ("is a pipe",)),
    "shard is a link outside": (
        lambda f: (_linked("w.safetensors", "../other/model.safetensors")(f), indexed(f, "w.safetensors")),
        ("links to a file outside its folder",),
    ),
    "weights are a link outside": (
        _linked("model.safetensors", "../other/model.safetensors"),
        ("links to a file outside",),
    ),
    "weights are a link to nothing": (_linked("model.safetensors", "nothing"), ("is missing",)),
    "weights are a link to themselves": (_linked("model.safetensors", "model.safetensors"), ("symbolic links",)),
    "config is a link outside": (
        _linked("config.json", "../other/config.json"),
        ("config.json links to a file outside",),
    ),
    "config is a link to a device": (_linked("config.json", "/dev/zero"), ("config.json can't be read: it is a ",)),
    "tokenizer is a link outside": (
        _linked("tokenizer.json", "/etc/hostname"),
        ("tokenizer.json links to a file outside",),
    ),
    "weights are a pipe": (_pipe("model.safetensors"), ("it is a pipe",)),
    "config is a pipe": (_pipe("config.json"), ("config.json can't be read: it is a ",)),
    "tokenizer is a pipe": (_pipe("tokenizer.json"), ("it is a pipe",)),
    "chat template is a pipe": (_pipe("chat_template.jinja"), ("it is a pipe",)),
    "config is too large": (_sparse("config.json"), ("larger than 256 MiB",)),
    "tokenizer is too large": (_sparse("tokenizer.json"), ("larger than 256 MiB",)),
    "generation config is no map": (lambda f: _json(f, "generation_config.json", "[1]"), ("generation_config.json",)),
    "config of bytes": (lambda f: _json(f, "config.json", b"\xff\xfe\x00"), ("is not a JSON object",)),
    "config nested": (lambda f: _json(f, "config.json", f'{{"a": {DEEP}}}'), ("is not a JSON object",)),
    "config nested 200 deep": (
        lambda f: edited(f / "config.json", a=json.loads("[" * 200 + "]" * 200)),
        ("more than 100 levels deep",),
    ),
    "config of 5,000 digits": (lambda f: _json(f, "config.json", f'{{"n_layer": {"9" * 5000}}}'), ("not a JSON",)),
    "config of one word": (lambda f: _json(f, "config.json", "null"), ("is not a JSON object",)),
    "model type is a list": (_config(model_type=["gpt2"]), ("model_type",)),
    "model type of 3 MB": (_config(model_type="x" * 3_000_000), ("config.json (model_type", "can't be read")),
    "sub-config is a word": (_config(model_type="clip", text_config="gpt2"), ()),
    "sub-config of another type": (_config(model_type="encoder-decoder", encoder={"model_type": 3}, decoder={}), ()),
    "backbone of a list": (_config(model_type="detr", backbone_config=[1, 2], use_timm_backbone=False), ()),
    "rope of a string": (_config(model_type="llama", architectures=["LlamaForCausalLM"], rope_scaling="x"), ()),
    "activation of no name": (_config(activation_function="os.system"), ()),
    "dtype of no name": (_config(dtype="load"), ()),
    "heads as text": (_config(n_head="four"), ()),
    "a fraction of a layer": (_config(n_layer=1.5), ()),
    "heads that don't divide": (_config(n_head=7), ()),
    "10⁹ layers": (_config(n_layer=10**9), ("n_layer = 1000000000",)),
    "10⁵ layers": (_config(n_layer=10**5), ("n_layer = 100000",)),
    "10⁵ layers in a sub-config": (_config(text_config={"num_hidden_layers": 10**5}), ("text_config.num_hidden",)),
    "1e9 layers, a float": (_config(n_layer=1e9), ("n_layer",)),
    "900 layers": (_config(n_layer=900), ("far larger model", "n_layer = 900")),
    "2·10⁷ positions": (_config(n_positions=2 * 10**7), ("far larger model", "n_positions = 20000000")),
    "2·10⁷ tokens": (_config(vocab_size=2 * 10**7), ("far larger model", "vocab_size = 20000000")),
    "10⁹ labels": (_config(num_labels=10**9), ("num_labels = 1000000000",)),
    "width of 10⁷": (_config(n_embd=4 * 10**6), ("far larger model",)),
    "inner width of 10⁹": (_config(n_inner=10**9), ("far larger model", "n_inner")),
    "adapter beside weights": (_touched("adapter_config.json"), ("in addition to the weights", "--adapter")),
    "adapter's weights": (_touched("adapter_model.safetensors"), ("in addition to the weights", "--adapter")),
    "distributed checkpoint": (_touched("shard-00001-model-00001-of-00001.safetensors"), ("distributed checkpoint",)),
    "the same, and a line": (_touched("shard-00001-model-00001-of-00001.safetensors\n"), ("distributed checkpoint",)),
    "index is a link outside": (_linked(INDEX, "../other/config.json"), ("links to a file outside its folder",)),
    "variant alone": (_renamed("model.fp16.safetensors"), ("in this folder: model.fp16.safetensors",)),
    "weights of no bytes": (_safetensors(lambda _: b""), ("not a safetensors file",)),
    "weights of text": (_safetensors(lambda _: b"hello, world, this is no tensor"), ("not a safetensors file",)),
    "header of 2^60 bytes": (_safetensors(lambda b: struct.pack("<Q", 2**60) + b[8:]), ("not a safetensors",)),
    "header cut": (_safetensors(lambda b: b[:60]), ("not a safetensors",)),
    "data cut": (_safetensors(lambda b: b[:-3]), ("not a safetensors",)),
    "data too long": (_safetensors(lambda b: b + b"more"), ("not a safetensors",)),
    "no tensors": (lambda f: stored(f, {}), ("contains no tensors",)),
    "another model's tensors": (lambda f: stored(f, {"a.b": torch.ones(3)}), ("None of the weights",)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_can_not_be_used_is_refused_at_once(fault: str, folder: Path) -> None:
    edit, words = FAULTS[fault]
    edit(folder)
    start = time.monotonic()
    refused(ModelError, lambda: loading.load(str(folder)), *words)
    assert time.monotonic() - start < 10, "a promise on hangs, and no measure of speed"


def test_a_byte_order_mark_is_named(folder: Path) -> None:
    _json(folder, "config.json", b"\xef\xbb\xbf" + (folder / "config.json").read_bytes())
    refused(ModelError, lambda: loading.load(str(folder)), "begins with a byte order mark", "without a byte order mark")


def test_a_link_within_the_folder_and_one_named_by_the_caller_are_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "real.safetensors")
    (folder / "model.safetensors").symlink_to("real.safetensors")
    assert loading.load(str(folder)).missing_keys == ()
    (folder / "real.safetensors").rename(tmp_path / "real.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "step.safetensors").symlink_to("../real.safetensors")
    assert loading.load(str(folder / "step.safetensors")).missing_keys == ()


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "additional_chat_templates/a.jinja", "additional_chat_templates", "source.spm"]
)
def test_nothing_outside_the_folder_is_read_as_a_template_or_a_vocabulary(name: str, folder: Path) -> None:
    loading.load(str(folder))
    (folder.parent / "secret").write_text("secret")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(folder.parent if name == "additional_chat_templates" else folder.parent / "secret")
    refused(ModelError, lambda: loading.load(str(folder)), "links to a file outside its folder")


def test_templates_of_the_hubs_cache_are_links_to_its_blobs_and_are_read(folder: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "commit"
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    blobs.mkdir()
    (snapshot / "additional_chat_templates").mkdir()
    for number, name in enumerate(("chat_template.jinja", "additional_chat_templates/a.jinja")):
        (blobs / str(number)).write_text("{{ messages }}")
        (snapshot / name).symlink_to(blobs / str(number))
    assert loading.load(str(snapshot)).tokenizer is not None


def test_a_template_without_an_end_is_refused(folder: Path) -> None:
    with (folder / "chat_template.jinja").open("wb") as file:
        file.truncate(2**28 + 1)
    refused(ModelError, lambda: loading.load(str(folder)), "larger than 256 MiB")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "", ".."])
def test_what_may_not_be_read_is_said_to_be_unreadable(name: str, folder: Path) -> None:
    path = folder / name
    mode = path.stat().st_mode
    path.chmod(0)
    try:
        refused(ModelError, lambda: loading.load(str(folder)), "Permission denied")
    finally:
        path.chmod(mode)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", ""])
def test_a_file_whose_reading_is_forbidden_is_named(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for a root user, to whom everything is permitted: the system's answer is put in its place."""
    forbidden = str(folder / name) if name else str(folder)

    def refusing(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **more: Any) -> Any:
            if not isinstance(path, int) and os.fspath(path) == forbidden:
                raise PermissionError(13, "Permission denied", forbidden)
            return own(path, *args, **more)

        return call

    for function in ("open", "listdir"):
        monkeypatch.setattr(os, function, refusing(getattr(os, function)))
    monkeypatch.setattr(Path, "open", refusing(Path.open))
    refused(ModelError, lambda: loading.load(str(folder)), forbidden, "Permission denied")


NOWHERE = ["~nosuchuser/m", "x" * 300, f"some/{'x' * 300}", "a\0b", "x" * 100_000, "", "@", "@main", "a/b/" * 2000]


@pytest.mark.parametrize("name", NOWHERE, ids=lambda name: repr(name[:20]))
def test_names_that_lead_nowhere(name: str) -> None:
    nameless = "\0" in name or not name or name.startswith("@")
    refused(UsageError if nameless else ModelError, lambda: loading.load(name, offline=True))
