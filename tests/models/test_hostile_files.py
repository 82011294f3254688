"""Tests that a model's folder is read within bounds, or refused in two lines, and that payloads never run."""

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path

import fake_hub
import families
import pytest
import torch
import transformers
from hostile import DEEP, each_refused, edit, edited, refused, stored, weights
from program import environment_with

import attnlens
from attnlens.errors import ModelError
from attnlens.models.loading import load

INDEX = "model.safetensors.index.json"


class Payload:
    """An object that creates the file `ran` beside the model's folder when it is unpickled."""

    def __init__(self, folder):
        self.ran = folder.parent / "ran"

    def __reduce__(self):
        return (Path.touch, (self.ran,))


@edit
def raw(folder, name, content, gone="model.safetensors"):
    """Write `content` into a file, and remove the file `gone`."""
    for old in (name, gone):
        (folder / old).unlink(missing_ok=True)
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def beside(name, content):
    return raw(name, content, gone="-")


def index(shard, name=INDEX):
    """Replace model.safetensors with an index that names `shard`."""
    return raw(name, json.dumps({"metadata": {}, "weight_map": {"transformer.wte.weight": shard}}))


@edit
def pickled(folder, name, *more, gone="model.safetensors"):
    """Store the payload with the weights as a pickle in the place of the file `gone`."""
    content = {**weights(folder), "x": Payload(folder)}
    for step in more:
        step(folder)
    (folder / gone).unlink(missing_ok=True)
    torch.save(content, folder / name)


def code(folder, name="own.py"):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(f"from pathlib import Path\nPath({str(folder.parent / 'ran')!r}).touch()\n")
    return "own.Own"


def processor(folder):
    for name in ("processor_config.json", "preprocessor_config.json"):
        beside(name, json.dumps({"auto_map": {"AutoProcessor": code(folder)}, "processor_class": "Own"}))(folder)


def tokenizer(folder):
    own = code(folder)
    edited(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [own, own]}, tokenizer_class="Own")


@edit
def pipe(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)


@edit
def linked(folder, name, target):
    shutil.copytree(folder, folder.parent / "other", dirs_exist_ok=True)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(target)


@edit
def config(folder, **changes):
    edited(folder / "config.json", **changes)


@edit
def sparse(folder, name):
    (folder / name).touch()
    os.truncate(folder / name, 2**28 + 1)


@edit
def both(folder, *edits):
    for step in edits:
        step(folder)


@edit
def safetensors(folder, make):
    (folder / "model.safetensors").write_bytes(make((folder / "model.safetensors").read_bytes()))


@edit
def tensors(folder, make):
    stored(folder, make(weights(folder)))


BIN_INDEX = "pytorch_model.bin.index.json"
TWO = pickled("adapter_model.bin", gone="-"), pickled("pytorch_model.bin")
CODE = tokenizer, processor, partial(code, name="custom_generate/generate.py")
PICKLES = {
    "index": [pickled("evil.bin", index("evil.bin"))],
    "suffix .model": [pickled("w.model", index("w.model")), "'w.model'"],
    "shard called .safetensors": [pickled("w.safetensors", index("w.safetensors"))],
    "file called .safetensors": [pickled("model.safetensors")],
    "file called .gguf": [pickled("model.gguf")],
    "link": [both(pickled("../outside.bin"), linked("model.safetensors", "../outside.bin"))],
    ".bin": [pickled("pytorch_model.bin")],
}
ALLOWED = {
    "suffix .txt": [pickled("w.txt", index("w.txt"))],
    ".bin": [pickled("pytorch_model.bin"), "could run code"],  # torch's own text advises loading it anyway
    ".bin index, outside": [pickled("../evil.bin", index("../evil.bin", BIN_INDEX))],
    ".bin index, suffix": [pickled("evil.txt", index("evil.txt", BIN_INDEX))],
    "adapter": [pickled("adapter_model.bin", raw("adapter_config.json", "{}"), gone="-")],
    "weights of the config": [both(*TWO, config(transformers_weights="adapter_model.bin"))],
}


def test_a_payload_never_runs_and_no_pickle_is_opened_but_an_allowed_one(folder, tmp_path, hub, monkeypatch):
    opened, torch_load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **more: (opened.append(args[0]), torch_load(*args, **more))[1])
    for number, add_code in enumerate(CODE):
        place = Path(shutil.copytree(folder, tmp_path / f"code{number}" / "gpt2"))
        add_code(place)
        loaded = load(place)
        assert loaded.tokenizer is None or loaded.tokenizer("a")
    each_refused(ModelError, folder, PICKLES, load)
    own = weights(folder)
    torch.save({"x": Payload(folder)}, folder / "evil.model")
    stored(folder, own, "part.safetensors")
    table = dict.fromkeys(own, "part.safetensors") | {"x": "evil.model"}
    raw(INDEX, json.dumps({"metadata": {}, "weight_map": table}))(folder)
    refused(ModelError, lambda: load(folder / "part.safetensors"), "'evil.model'")
    for offline in (False, True):
        refused(ModelError, partial(load, fake_hub.OPEN, offline=offline), "'evil.model'")
    assert hub
    assert not opened
    stored(folder, own)
    (folder / INDEX).unlink()
    allowed = Path(shutil.copytree(folder, tmp_path / "allowed" / "gpt2"))
    each_refused(ModelError, allowed, ALLOWED, partial(load, allow_pickle=True))
    assert {Path(path).suffix for path in opened} == {".bin"}
    assert not list(tmp_path.rglob("ran"))
    pickle.loads(pickle.dumps(Payload(folder)))  # noqa: S301  # the control
    assert list(tmp_path.rglob("ran"))


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


@pytest.fixture
def with_kernels(folder, tmp_path):
    second, nested = Path(shutil.copytree(folder, tmp_path / "second")), tmp_path / "nested"
    edited(folder / "config.json", attn_implementation="kernels-community/flash-attn2")
    edited(second / "config.json", attn_implementation=None, _attn_implementation="flash_attention_2")
    families.build("clip").save_pretrained(nested)
    parts = json.loads((nested / "config.json").read_text())
    evil = {"attn_implementation": "someone/evil", "_attn_implementation": "someone/evil"}
    edited(nested / "config.json", **{part: parts[part] | evil for part in ("text_config", "vision_config")})
    return folder, second, nested


def test_implementations_named_in_a_config_are_ignored(with_kernels):
    for place in with_kernels:
        config = load(place).model.config
        parts = config, getattr(config, "text_config", config), getattr(config, "vision_config", config)
        assert {part._attn_implementation for part in parts} <= {"eager", "sdpa"}
    with pytest.raises((ImportError, ValueError)):  # the control: transformers alone looks for the kernel
        transformers.AutoModel.from_pretrained(with_kernels[0])


@pytest.mark.full
def test_no_kernel_is_fetched_if_the_package_kernels_is_installed(with_kernels, tmp_path):
    from transformers.utils.import_utils import KERNELS_MIN_VERSION

    (tmp_path / "stub" / "kernels").mkdir(parents=True)
    (tmp_path / "stub" / "kernels" / "__init__.py").write_text(KERNELS.format(version=KERNELS_MIN_VERSION))
    path = os.pathsep.join([str(tmp_path / "stub"), str(Path(attnlens.__file__).parent.parent)])
    env = environment_with(TRACE=str(tmp_path / "ran"), PYTHONPATH=path)
    command = [sys.executable, "-c", USING, *map(str, with_kernels)]  # transformers looks for the package once
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "kernels-community/flash-attn2" in ended.stdout, "the control, transformers alone, fetches it"


def doubled(folder):
    first, *others = weights(folder).items()
    stored(folder, dict([first]), "a.safetensors")
    stored(folder, dict([first, *others]), "b.safetensors")
    table = dict.fromkeys(dict(others), "b.safetensors") | {first[0]: "a.safetensors"}
    raw(INDEX, json.dumps({"metadata": {}, "weight_map": table}))(folder)


OWN = "transformer.h.0.attn.c_attn.weight"
LORA = "base_model.model.h.0"
SHARD, LARGER = "must name .safetensors files in its folder", "far larger model"
OUTSIDE, UNNAMED = "links to a file outside its folder", "does not name any weight files"
TORN, BESIDE = "not a safetensors file", ("in addition to the weights", "--adapter")
# fmt: off
LINKS = {
    **{"model.safetensors": "../other/model.safetensors", "additional_chat_templates/a.jinja": "/etc/hosts"},
    **dict.fromkeys(("config.json", "chat_template.jinja", INDEX), "../other/config.json"),
    **dict.fromkeys(("tokenizer.json", "source.spm"), "/etc/hostname"),
}
VALUES = [
    *(("n_head", 0), ("n_head", -4), ("n_embd", 0), ("n_layer", 0), ("n_layer", 10**9), ("num_labels", 10**9)),
    *(("architectures", [5]), ("auto_map", 5)),
]
UNNAMED_REASON = [
    *({"dtype": "load"}, {"n_head": "four"}, {"n_layer": 1.5}, {"model_type": "clip", "text_config": "gpt2"}),
    {"model_type": "encoder-decoder", "encoder": {"model_type": 3}, "decoder": {}},
    {"model_type": "detr", "backbone_config": [1, 2], "use_timm_backbone": False},
    {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_scaling": "x"},
]
NO_OBJECTS = "", b"\xff\xfe\x00", "null", f'{{"a": {DEEP}}}', f'{{"n_layer": {"9" * 5000}}}'
SHARDS = "..\\w.safetensors", "w\0.safetensors", "a" * 100_000 + ".safetensors", INDEX
LARGE = {"n_layer": 900, "n_positions": 2 * 10**7, "vocab_size": 2 * 10**7, "n_inner": 10**9}
TEMPLATE, PART = "chat_template.jinja", "shard-00001-model-00001-of-00001.safetensors"
FAULTS = {
    **{f"index of {shard!r:.30}": (index(shard), SHARD) for shard in SHARDS},
    **{f"index, {text}": (raw(INDEX, text), UNNAMED) for text in ("{}", '{"weight_map": {}}', '{"weight_map": ["a"]}')},
    **{f"link {name}": (linked(name, target), f"{name} {OUTSIDE}") for name, target in LINKS.items()},
    **{f"pipe {name}": (pipe(name), "it is a pipe") for name in ("model.safetensors", "tokenizer.json", TEMPLATE)},
    **{f"large {name}": (sparse(name), "larger than 256 MiB") for name in ("config.json", "tokenizer.json", TEMPLATE)},
    **{f"{name} = {n}": (config(**{name: n}), f"{name} = {n}", "config.json") for name, n in VALUES},
    **{f"large {name}": (config(**{name: n}), LARGER, f"{name} = {n}") for name, n in LARGE.items()},
    **{f"config {changes}": (config(**changes),) for changes in UNNAMED_REASON},
    **{f"config {text[:9]}": (beside("config.json", text), "is not a JSON object") for text in NO_OBJECTS},
    **{name: (beside(name, ""), *BESIDE) for name in ("adapter_config.json", "adapter_model.safetensors")},
    **{f"distributed{end}": (beside(f"{PART}{end}", ""), "distributed checkpoint") for end in ("", "\n")},
    "index above the folder": (index("../other.safetensors"), SHARD, "'../other.safetensors'"),
    "index of a number": (index(3), SHARD, "names 3"),
    "templates are a link outside": (linked("additional_chat_templates", "../other"), OUTSIDE),
    "weights are a link to nothing": (linked("model.safetensors", "nothing"), "is missing"),
    "config is a link to a device": (linked("config.json", "/dev/zero"), "config.json can't be read: it is a "),
    "generation config is no map": (beside("generation_config.json", "[1]"), "generation_config.json"),
    "config with a byte order mark": (beside("config.json", b"\xef\xbb\xbf{}"), "a byte order mark", "without"),
    "config of no known type": (beside("config.json", '{"model_type": "nosuch"}'), "nosuch"),
    "config nested 200 deep": (config(a=json.loads("[" * 200 + "]" * 200)), "more than 100 levels deep"),
    "model type is a list": (config(model_type=["gpt2"]), "model_type"),
    "model type of 3 MB": (config(model_type="x" * 3_000_000), "config.json (model_type", "can't be read"),
    "sub-config without heads": (config(text_config={"num_attention_heads": 0}), "text_config.num_attention_heads = 0"),
    "another vocabulary": (config(vocab_size=300), "config.json", "(vocab_size = 300)"),
    "fewer positions": (config(n_positions=16), "transformer.wpe.weight has shape 32 × 24 in the file, but 16 × 24"),
    "1e9 layers, a float": (config(n_layer=1e9), "n_layer"),
    "variant alone": (lambda f: (f / "model.safetensors").rename(f / "model.fp16.safetensors"),
        "in this folder: model.fp16.safetensors"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no weights"),
    "header of 2^60 bytes": (safetensors(lambda b: struct.pack("<Q", 2**60) + b[8:]), TORN),
    "half the data": (safetensors(lambda b: b[: len(b) // 2]), TORN, "model.safetensors"),
    "no tensors": (tensors(lambda _: {}), "contains no tensors"),
    "another model's tensors": (tensors(lambda _: {"a.b": torch.ones(3)}), "None of the weights"),
    "a tensor in two files": (doubled, "and another weight file both contain"),
    "two tensors for one parameter": (
        tensors(lambda t: t | {"h.0.attn.c_attn.weight": t[OWN] + 1}), OWN, " h.0.attn.c_attn.weight"),
    "adapter in the weights": (tensors(lambda t: t | {f"{LORA}.attn.lora_A.weight": torch.ones(2, 2)}),
        "lora_A.weight", "merge_and_unload"),
}
# fmt: on


def test_a_folder_that_can_not_be_used_is_refused(folder):
    each_refused(ModelError, folder, FAULTS, load, partial(load, from_files=True))
    families.build("bert").save_pretrained(folder)
    config(pad_token_id=4000)(folder)
    refused(ModelError, lambda: load(folder), "Padding_idx")


def test_links_within_the_folder_from_the_user_or_to_blobs_of_the_hub_cache_are_followed(folder, tmp_path):
    (folder / "model.safetensors").rename(folder / "real.safetensors")
    (folder / "model.safetensors").symlink_to("real.safetensors")
    assert load(folder).missing_keys == ()
    (folder / "real.safetensors").rename(tmp_path / "real.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "step.safetensors").symlink_to("../real.safetensors")
    assert load(folder / "step.safetensors").missing_keys == ()
    (folder / "step.safetensors").unlink()
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "commit"
    for place in (blobs, snapshot.parent, folder / "additional_chat_templates"):
        place.mkdir(parents=True)
    folder.rename(snapshot)
    (tmp_path / "real.safetensors").rename(blobs / "weights")
    (snapshot / "model.safetensors").symlink_to(blobs / "weights")
    for number, name in enumerate(("chat_template.jinja", "additional_chat_templates/a.jinja")):
        (blobs / str(number)).write_text("{{ messages }}")
        (snapshot / name).symlink_to(blobs / str(number))
    loaded = load(snapshot)
    assert (loaded.tokenizer is None, loaded.missing_keys) == (False, ())


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "."])
def test_a_file_without_permission_is_named(name, folder, monkeypatch):
    """As root, who has all permissions, the system's answer is replaced."""

    def refusing(function):
        def call(path, *args, **more):
            if not isinstance(path, int) and Path(path) == folder / name:
                raise PermissionError(13, "Permission denied", str(path))
            return function(path, *args, **more)

        return call

    for owner, function in ((os, "open"), (os, "listdir"), (Path, "open")):
        monkeypatch.setattr(owner, function, refusing(getattr(owner, function)))
    refused(ModelError, lambda: load(folder), str(folder / name), "Permission denied")
