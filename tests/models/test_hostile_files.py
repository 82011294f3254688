"""Tests that a model's folder is read within bounds, or refused in two lines, and that payloads never run."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fake_hub
import families
import program
import pytest
import torch
from hostile import DEEP, each_refused, edited, refused, stored, weights

import attnlens
from attnlens.errors import ModelError, UsageError
from attnlens.models import loading

INDEX = "model.safetensors.index.json"
Edit = Callable[[Path], Any]


class Payload:
    """An object that creates the file `ran` when it is unpickled."""

    def __init__(self, ran: Path) -> None:
        self.ran = ran

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.ran,))


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """The file that a payload would create."""
    return tmp_path / "ran"


def index(shard: object) -> Edit:
    """Replace model.safetensors with an index that names `shard` for every weight."""

    def edit(folder: Path) -> None:
        table = dict.fromkeys(weights(folder), shard)
        raw(INDEX, json.dumps({"metadata": {}, "weight_map": table}), gone="model.safetensors")(folder)

    return edit


def raw(name: str, content: str | bytes, gone: str | None = None) -> Edit:
    """Write `content` into a file, and remove the file `gone`."""

    def edit(folder: Path) -> None:
        for old in (name, gone or name):
            (folder / old).unlink(missing_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return edit


# --- payloads -------------------------------------------------------------------------------------------------------


def pickled(name: str, *more: Edit, gone: str = "model.safetensors", alone: bool = False) -> Callable[..., None]:
    """Store the payload (with the weights unless `alone`) as a pickle in the place of the file `gone`."""

    def edit(folder: Path, ran: Path) -> None:
        content = {} if alone else weights(folder)
        for step in more:
            step(folder)
        (folder / gone).unlink(missing_ok=True)
        torch.save({**content, "x": Payload(ran)}, folder / name)

    return edit


def code(folder: Path, ran: Path, name: str = "own.py") -> str:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(f"from pathlib import Path\nPath({str(ran)!r}).touch()\n")
    return "own.Own"


def processor(folder: Path, ran: Path) -> None:
    for name in ("processor_config.json", "preprocessor_config.json"):
        raw(name, json.dumps({"auto_map": {"AutoProcessor": code(folder, ran)}, "processor_class": "Own"}))(folder)


def bin_index(shard: str) -> Callable[..., None]:
    table = json.dumps({"metadata": {}, "weight_map": {"x": shard}})
    return pickled(shard, raw("pytorch_model.bin.index.json", table), alone=True)


def link(folder: Path, ran: Path) -> None:
    pickled("../outside.bin", alone=True)(folder, ran)
    (folder / "model.safetensors").symlink_to("../outside.bin")


def weights_of_config(folder: Path, ran: Path) -> None:
    pickled("adapter_model.bin", gone="-", alone=True)(folder, ran)
    pickled("pytorch_model.bin")(folder, ran)
    edited(folder / "config.json", transformers_weights="adapter_model.bin")


def tokenizer(folder: Path, ran: Path) -> None:
    own = code(folder, ran)
    edited(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [own, own]}, tokenizer_class="Own")


CODE = {"tokenizer": tokenizer, "processor": processor, "generate": partial(code, name="custom_generate/generate.py")}
PICKLES: dict[str, tuple[Callable[[Path, Path], None], bool]] = {
    "index": (pickled("evil.bin", index("evil.bin")), False),
    "suffix .model": (pickled("w.model", index("w.model")), False),
    "suffix .txt, pickles allowed": (pickled("w.txt", index("w.txt")), True),
    "shard called .safetensors": (pickled("w.safetensors", index("w.safetensors")), False),
    "file called .safetensors": (pickled("model.safetensors"), False),
    "file called .gguf": (pickled("model.gguf"), False),
    "link": (link, False),
    ".bin": (pickled("pytorch_model.bin"), False),
    ".bin, allowed": (pickled("pytorch_model.bin"), True),
    ".bin index, outside": (bin_index("../evil.bin"), True),
    ".bin index, suffix": (bin_index("evil.txt"), True),
    "adapter": (pickled("adapter_model.bin", raw("adapter_config.json", "{}"), gone="-", alone=True), True),
    "weights of the config": (weights_of_config, True),
}


@pytest.mark.parametrize("way", [*CODE, *PICKLES])
def test_a_payload_never_runs(way: str, folder: Path, ran: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **more: (opened.append(args[0]), load(*args, **more))[1])
    if way in CODE:
        CODE[way](folder, ran)
        tokenizer, is_allowed = loading.load(str(folder)).tokenizer, False
        assert tokenizer is None or tokenizer("a")
    else:
        prepare, is_allowed = PICKLES[way]
        prepare(folder, ran)
        words = ["could run code"] if way == ".bin, allowed" else []  # torch's own text advises loading it anyway
        refused(ModelError, lambda: loading.load(str(folder), allow_pickle=is_allowed), *words)
    assert not ran.exists()
    assert not opened or (is_allowed and Path(opened[0]).suffix == ".bin"), "no pickle is opened but an allowed one"


def test_the_payload_runs_elsewhere(ran: Path) -> None:
    pickle.loads(pickle.dumps(Payload(ran)))  # noqa: S301  # the control
    assert ran.exists()


def test_a_shard_named_by_the_user_opens_no_pickle(folder: Path, ran: Path) -> None:
    tensors = weights(folder)
    torch.save({"x": Payload(ran)}, folder / "evil.model")
    stored(folder, tensors, "part.safetensors")
    table = dict.fromkeys(tensors, "part.safetensors") | {"x": "evil.model"}
    raw(INDEX, json.dumps({"metadata": {}, "weight_map": table}))(folder)
    refused(ModelError, lambda: loading.load(str(folder / "part.safetensors")), "'evil.model'")
    assert not ran.exists()


def test_a_payload_on_the_hub_never_runs(folder: Path, ran: Path, hub: list[str]) -> None:
    pickled("w.model", index("w.model"))(folder, ran)
    for offline in (False, True):
        refused(ModelError, lambda offline=offline: loading.load(fake_hub.OPEN, offline=offline), "'w.model'")
    assert hub
    assert not ran.exists()


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


def test_no_kernel_is_fetched_whatever_a_config_says(folder: Path, tmp_path: Path, ran: Path) -> None:
    from transformers.utils.import_utils import KERNELS_MIN_VERSION

    (tmp_path / "stub" / "kernels").mkdir(parents=True)
    (tmp_path / "stub" / "kernels" / "__init__.py").write_text(KERNELS.format(version=KERNELS_MIN_VERSION))
    edited(folder / "config.json", attn_implementation="kernels-community/flash-attn2")
    shutil.copytree(folder, tmp_path / "second")
    edited(tmp_path / "second" / "config.json", attn_implementation=None, _attn_implementation="flash_attention_2")
    families.build("clip").save_pretrained(tmp_path / "nested")
    parts = json.loads((tmp_path / "nested" / "config.json").read_text())
    evil = {"attn_implementation": "someone/evil", "_attn_implementation": "someone/evil"}
    nested = {part: parts[part] | evil for part in ("text_config", "vision_config")}
    edited(tmp_path / "nested" / "config.json", **nested)
    path = os.pathsep.join([str(tmp_path / "stub"), str(Path(attnlens.__file__).parent.parent)])
    ended = subprocess.run(
        [sys.executable, "-c", USING, str(folder), str(tmp_path / "second"), str(tmp_path / "nested")],
        env=program.environment_with(TRACE=str(ran), PYTHONPATH=path),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "kernels-community/flash-attn2" in ended.stdout, "the control, transformers alone, fetches it"


# --- broken folders -------------------------------------------------------------------------------------------------


def pipe(name: str) -> Edit:
    return lambda folder: ((folder / name).unlink(missing_ok=True), os.mkfifo(folder / name))


def linked(name: str, target: str) -> Edit:
    def edit(folder: Path) -> None:
        shutil.copytree(folder, folder.parent / "other", dirs_exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return edit


def config(**changes: Any) -> Edit:
    return lambda folder: edited(folder / "config.json", **changes)


def sparse(name: str) -> Edit:
    return lambda folder: ((folder / name).touch(), os.truncate(folder / name, 2**28 + 1))


def safetensors(make: Callable[[bytes], bytes]) -> Edit:
    return lambda folder: (folder / "model.safetensors").write_bytes(make((folder / "model.safetensors").read_bytes()))


def doubled(folder: Path) -> None:
    first, *others = weights(folder).items()
    stored(folder, dict([first]), "a.safetensors")
    stored(folder, dict([first, *others]), "b.safetensors")
    table = dict.fromkeys(dict(others), "b.safetensors") | {first[0]: "a.safetensors"}
    raw(INDEX, json.dumps({"metadata": {}, "weight_map": table}), gone="model.safetensors")(folder)


OWN = "transformer.h.0.attn.c_attn.weight"
LORA = "base_model.model.h.0"
SHARD, OBJECT, LARGER = "must name .safetensors files in its folder", "is not a JSON object", "far larger model"
OUTSIDE, UNNAMED, TORN = "links to a file outside", "does not name any weight files", "not a safetensors file"
# fmt: off
FAULTS: dict[str, tuple[Any, ...]] = {
    "index above the folder": (index("../other.safetensors"), SHARD, "'../other.safetensors'"),
    "index with a backslash": (index("..\\w.safetensors"), SHARD),
    "index with NUL": (index("w\0.safetensors"), SHARD),
    "index of a number": (index(3), SHARD, "names 3"),
    "index of an endless name": (index("a" * 100_000 + ".safetensors"), SHARD),
    "index of what is missing": (index("w.safetensors"), "w.safetensors is missing"),
    "index of itself": (index(INDEX), SHARD),
    "index, no map": (raw(INDEX, "{}", gone="model.safetensors"), UNNAMED),
    "index, empty map": (raw(INDEX, '{"weight_map": {}}', gone="model.safetensors"), UNNAMED),
    "index, map is a list": (raw(INDEX, '{"weight_map": ["a"]}', gone="model.safetensors"), UNNAMED),
    "index, nested": (raw(INDEX, f'{{"weight_map": {DEEP}}}', gone="model.safetensors"), OBJECT),
    "index, a pipe": (lambda f: (index("x")(f), pipe(INDEX)(f)), "is a pipe"),
    "index is a link outside": (linked(INDEX, "../other/config.json"), OUTSIDE),
    "shard is a link outside": (lambda f: (linked("w.safetensors", "../other/model.safetensors")(f),
        index("w.safetensors")(f)), OUTSIDE),
    "weights are a link outside": (linked("model.safetensors", "../other/model.safetensors"), OUTSIDE),
    "weights are a link to nothing": (linked("model.safetensors", "nothing"), "is missing"),
    "weights are a link to themselves": (linked("model.safetensors", "model.safetensors"), "symbolic links"),
    "config is a link outside": (linked("config.json", "../other/config.json"), f"config.json {OUTSIDE}"),
    "config is a link to a device": (linked("config.json", "/dev/zero"), "config.json can't be read: it is a "),
    "tokenizer is a link outside": (linked("tokenizer.json", "/etc/hostname"), f"tokenizer.json {OUTSIDE}"),
    "template is a link outside": (linked("chat_template.jinja", "../other/config.json"), f"{OUTSIDE} its folder"),
    "templates are a link outside": (linked("additional_chat_templates", "../other"), OUTSIDE),
    "one of the templates is": (lambda f: ((f / "additional_chat_templates").mkdir(),
        linked("additional_chat_templates/a.jinja", "/etc/hosts")(f)), OUTSIDE),
    "vocabulary is a link outside": (linked("source.spm", "/etc/hostname"), OUTSIDE),
    "weights are a pipe": (pipe("model.safetensors"), "it is a pipe"),
    "config is a pipe": (pipe("config.json"), "config.json can't be read: it is a "),
    "tokenizer is a pipe": (pipe("tokenizer.json"), "it is a pipe"),
    "chat template is a pipe": (pipe("chat_template.jinja"), "it is a pipe"),
    "config is too large": (sparse("config.json"), "larger than 256 MiB"),
    "tokenizer is too large": (sparse("tokenizer.json"), "larger than 256 MiB"),
    "template is too large": (sparse("chat_template.jinja"), "larger than 256 MiB"),
    "generation config is no map": (raw("generation_config.json", "[1]"), "generation_config.json"),
    "config of bytes": (raw("config.json", b"\xff\xfe\x00"), OBJECT),
    "config with a byte order mark": (raw("config.json", b'\xef\xbb\xbf{"a": 1}'), "begins with a byte order mark",
        "without"),
    "config, empty": (raw("config.json", ""), "config.json"),
    "config of no known type": (raw("config.json", '{"model_type": "nosuch"}'), "nosuch"),
    "config nested": (raw("config.json", f'{{"a": {DEEP}}}'), OBJECT),
    "config nested 200 deep": (config(a=json.loads("[" * 200 + "]" * 200)), "more than 100 levels deep"),
    "config of 5,000 digits": (raw("config.json", f'{{"n_layer": {"9" * 5000}}}'), "not a JSON"),
    "config of one word": (raw("config.json", "null"), OBJECT),
    "model type is a list": (config(model_type=["gpt2"]), "model_type"),
    "model type of 3 MB": (config(model_type="x" * 3_000_000), "config.json (model_type", "can't be read"),
    "architecture is a number": (config(architectures=[5]), "config.json", "architectures = [5]"),
    "architectures are a word": (config(architectures="GPT2LMHeadModel"), "config.json", "architectures"),
    "map of code is a number": (config(auto_map=5), "config.json", "auto_map = 5"),
    "sub-config is a word": (config(model_type="clip", text_config="gpt2"),),
    "sub-config of another type": (config(model_type="encoder-decoder", encoder={"model_type": 3}, decoder={}),),
    "sub-config without heads": (config(text_config={"num_attention_heads": 0}), "text_config.num_attention_heads = 0"),
    "backbone of a list": (config(model_type="detr", backbone_config=[1, 2], use_timm_backbone=False),),
    "rope of a string": (config(model_type="llama", architectures=["LlamaForCausalLM"], rope_scaling="x"),),
    "activation of no name": (config(activation_function="os.system"), "config.json", "os.system"),
    "dtype of no name": (config(dtype="load"),),
    "epsilon as text": (config(layer_norm_epsilon="x"), "config.json", "layer_norm_epsilon"),
    "heads as text": (config(n_head="four"),),
    "a fraction of a layer": (config(n_layer=1.5),),
    "heads that don't divide": (config(n_head=7), "config.json", "num_heads"),
    "no heads": (config(n_head=0), "config.json", "n_head = 0"),
    "heads below 0": (config(n_head=-4), "config.json", "n_head = -4"),
    "no width": (config(n_embd=0), "config.json", "n_embd = 0"),
    "another width": (config(n_embd=16), "can't be loaded"),
    "no layers": (config(n_layer=0), "config.json", "n_layer = 0"),
    "another vocabulary": (config(vocab_size=300), "config.json", "(vocab_size = 300)"),
    "positions below 0": (config(n_positions=-5), "config.json", "-5"),
    "fewer positions": (config(n_positions=16), "transformer.wpe.weight has size 32 × 24 in the file, but 16 × 24"),
    "10⁹ layers": (config(n_layer=10**9), "n_layer = 1000000000"),
    "10⁵ layers in a sub-config": (config(text_config={"num_hidden_layers": 10**5}), "text_config.num_hidden"),
    "1e9 layers, a float": (config(n_layer=1e9), "n_layer"),
    "900 layers": (config(n_layer=900), LARGER, "n_layer = 900"),
    "2·10⁷ positions": (config(n_positions=2 * 10**7), LARGER, "n_positions = 20000000"),
    "2·10⁷ tokens": (config(vocab_size=2 * 10**7), LARGER, "vocab_size = 20000000"),
    "10⁹ labels": (config(num_labels=10**9), "num_labels = 1000000000"),
    "width of 10⁷": (config(n_embd=4 * 10**6), LARGER),
    "inner width of 10⁹": (config(n_inner=10**9), LARGER, "n_inner"),
    "adapter beside weights": (raw("adapter_config.json", ""), "in addition to the weights", "--adapter"),
    "adapter's weights": (raw("adapter_model.safetensors", ""), "in addition to the weights", "--adapter"),
    "distributed checkpoint": (raw("shard-00001-model-00001-of-00001.safetensors", ""), "distributed checkpoint"),
    "the same, and a line": (raw("shard-00001-model-00001-of-00001.safetensors\n", ""), "distributed checkpoint"),
    "variant alone": (lambda f: (f / "model.safetensors").rename(f / "model.fp16.safetensors"),
        "in this folder: model.fp16.safetensors"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no weights"),
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "weights of no bytes": (safetensors(lambda _: b""), TORN, "model.safetensors"),
    "weights of text": (safetensors(lambda _: b"hello, world, this is no tensor"), TORN),
    "header of 2^60 bytes": (safetensors(lambda b: struct.pack("<Q", 2**60) + b[8:]), TORN),
    "header cut": (safetensors(lambda b: b[:60]), TORN),
    "half the data": (safetensors(lambda b: b[: len(b) // 2]), TORN, "model.safetensors"),
    "a byte too few": (safetensors(lambda b: b[:-1]), TORN),
    "data too long": (safetensors(lambda b: b + b"more"), TORN),
    "no tensors": (lambda f: stored(f, {}), "contains no tensors"),
    "another model's tensors": (lambda f: stored(f, {"a.b": torch.ones(3)}), "None of the weights"),
    "a tensor in two files": (doubled, OWN.replace("c_attn.weight", "c_attn.bias"), "both contain"),
    "two tensors for one parameter": (lambda f: stored(f,
        weights(f) | {OWN.removeprefix("transformer."): weights(f)[OWN] + 1}), OWN, " h.0.attn.c_attn.weight"),
    "adapter in the weights": (lambda f: stored(f, weights(f) | {f"{LORA}.attn.lora_A.weight": torch.ones(2, 2)}),
        "lora_A.weight", "merge_and_unload"),
    "adapter, named": (lambda f: stored(f, {f"{LORA}.lora_B.default.weight": torch.ones(2, 2)}),
        "lora_B.default.weight"),
    "adapter of embeddings": (lambda f: stored(f, weights(f) | {f"{LORA}.lora_embedding_A": torch.ones(2, 2)}),
        "lora_embedding_A", "merge_and_unload"),
}
# fmt: on


def test_a_folder_that_can_not_be_used_is_refused(folder: Path) -> None:
    each_refused(ModelError, folder, FAULTS, lambda place: loading.load(str(place)))


def test_padding_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    families.build("bert").save_pretrained(tmp_path)
    edited(tmp_path / "config.json", pad_token_id=4000)
    refused(ModelError, lambda: loading.load(str(tmp_path)), "Padding_idx")


def test_links_within_the_folder_or_named_by_the_user_are_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "real.safetensors")
    (folder / "model.safetensors").symlink_to("real.safetensors")
    assert loading.load(str(folder)).missing_keys == ()
    (folder / "real.safetensors").rename(tmp_path / "real.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "step.safetensors").symlink_to("../real.safetensors")
    assert loading.load(str(folder / "step.safetensors")).missing_keys == ()


def test_files_of_the_hub_cache_are_links_to_its_blobs_and_are_read(folder: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "commit"
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    blobs.mkdir()
    (snapshot / "additional_chat_templates").mkdir()
    (snapshot / "model.safetensors").rename(blobs / "weights")
    (snapshot / "model.safetensors").symlink_to(blobs / "weights")
    for number, name in enumerate(("chat_template.jinja", "additional_chat_templates/a.jinja")):
        (blobs / str(number)).write_text("{{ messages }}")
        (snapshot / name).symlink_to(blobs / str(number))
    loaded = loading.load(str(snapshot))
    assert loaded.tokenizer is not None
    assert loaded.missing_keys == ()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "", ".."])
@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_files_are_named_by_the_system(name: str, folder: Path) -> None:
    path = folder / name
    mode = path.stat().st_mode
    path.chmod(0)
    try:
        refused(ModelError, lambda: loading.load(str(folder)), "Permission denied")
    finally:
        path.chmod(mode)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", ""])
def test_a_file_without_permission_is_named(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root, who has all permissions, the system's answer is replaced."""
    forbidden = str(folder / name) if name else str(folder)

    def refusing(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **more: Any) -> Any:
            if not isinstance(path, int) and os.fspath(path) == forbidden:
                raise PermissionError(13, "Permission denied", forbidden)
            return own(path, *args, **more)

        return call

    for owner, function in ((os, "open"), (os, "listdir"), (Path, "open")):
        monkeypatch.setattr(owner, function, refusing(getattr(owner, function)))
    refused(ModelError, lambda: loading.load(str(folder)), forbidden, "Permission denied")


def test_names_without_a_model_are_refused() -> None:
    for name in ("~nosuchuser/m", "x" * 300, f"some/{'x' * 300}", "x" * 100_000, "a/b/" * 2000):
        refused(ModelError, lambda name=name: loading.load(name, offline=True))
    for name in ("a\0b", "", "@", "@main"):
        refused(UsageError, lambda name=name: loading.load(name, offline=True))
