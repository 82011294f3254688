"""Tests that malformed headers, indexes, configs, tokenizers, texts, plans and reports end in attnlens' errors."""

import json
import os
import shutil
import struct
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from gguf_files import write_random
from hostile import DEEP, edited, refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from program import invoke
from reports import synthetic_report
from safetensors.torch import save

from attnlens.errors import AttnlensError, ModelError, TextError, UsageError
from attnlens.models import loading
from attnlens.models.loading.building import list_tensors
from attnlens.models.loading.gguf import read_header
from attnlens.models.loading.locate import find
from attnlens.models.texts import read_each, sample
from attnlens.records import read_plan
from attnlens.report.report import read_report

FEW = settings(
    max_examples=int(os.environ.get("HOSTILE_EXAMPLES", "100")),
    deadline=None,
    derandomize="HOSTILE_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
"""A hundred examples, the same in every run; HOSTILE_EXAMPLES requests more, and other ones."""


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory):
    pytest.importorskip("gguf", reason="GGUF files need the package gguf")
    pytest.importorskip("accelerate", reason="GGUF files need the package accelerate")
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    shapes = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (32, 32))
    write_random(path, "llama", 1, {"head_count_kv": 2}, {}, shapes, {"output": (8, 32)})
    return path.read_bytes()


def test_a_gguf_file_is_read_whole_and_called_truncated_wherever_it_is_cut(gguf_bytes, tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf_bytes)
    header = read_header(file)
    assert header.fields["llama.block_count"] == 1
    assert {entry.name: entry.shape for entry in header.tensors}["token_embd.weight"] == (8, 32)
    loaded = loading.load(file)
    assert (loaded.info.architecture, loaded.missing_keys, loaded.unused_keys) == ("LlamaForCausalLM", (), ())
    for size in (0, 3, *range(4, 1600, 97), *range(1600, len(gguf_bytes), 997), len(gguf_bytes) - 1):
        file.write_bytes(gguf_bytes[:size])
        words = "empty file" if size == 0 else "not a GGUF file" if size < 4 else "truncated"
        refused(ModelError, partial(read_header, file), str(file), words)
    refused(ModelError, lambda: loading.load(file), "the data of", "end at byte")


CUT = "truncated or damaged"
LATE = "the data of blk.0.attn_q.weight end at byte"
HEADERS = [  # position (a field's name stands for that of its value's type), bytes written there, words of the error
    (4, struct.pack(">I", 3), "v50331648"),
    *((8, struct.pack("<Q", count), CUT) for count in (2**60, 2**20)),
    ("llama.block_count", struct.pack("<II", 4, 10**9), "llama.block_count = 1000000000"),
    ("llama.embedding_length", struct.pack("<II", 4, 2**31), "far larger model"),
    ("llama.vocab_size", struct.pack("<II", 4, 10**9), ""),
    ("tokenizer.ggml.tokens", struct.pack("<II", 9, 77), "an array of type 77"),
    ("general.architecture", struct.pack("<IQ", 8, 2**60), CUT),
    ("blk.0.attn_q.weight", struct.pack("<IQQI", 2, 32, 32, 999), "in an unknown type"),
    *(
        ("blk.0.attn_q.weight", struct.pack(*entry), LATE)
        for entry in (("<IQ", 2, 2**60), ("<IQQIQ", 2, 32, 32, 0, 2**62))
    ),
    ("blk.0.", b"\xff\xfe", CUT),
]


def gguf_with(tensor):
    """Return a GGUF file without data, whose only tensor has this entry after its name."""
    text = lambda word: struct.pack("<Q", len(word)) + word  # noqa: E731
    fields = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
    return b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + fields + text(b"t") + tensor + bytes(64)


def test_a_gguf_file_with_an_absurd_header_is_refused(gguf_bytes, tmp_path):
    file = tmp_path / "m.gguf"
    for at, value, words in HEADERS:
        start = at if isinstance(at, int) else gguf_bytes.index(at.encode()) + len(at)
        file.write_bytes(gguf_bytes[:start] + value + gguf_bytes[start + len(value) :])
        refused(ModelError, lambda: loading.load(file), words)
    sizes = 10**6  # their product would have 63 million bits
    shape = struct.pack("<I", sizes) + struct.pack("<Q", 2**63 - 1) * sizes
    file.write_bytes(gguf_with(shape + struct.pack("<IQ", 0, 0)))
    refused(ModelError, lambda: read_header(file), f"a tensor with {sizes} dimensions")
    file.write_bytes(gguf_with(struct.pack("<IQQIQ", 2, 0, 5, 999, 0)))  # without values
    refused(ModelError, lambda: read_header(file), "stores t in an unknown type")


def splitting_at(pattern):
    return {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}}


BROKEN_TOKENIZERS = (
    splitting_at("("),
    *({"model": {"type": "BPE", "vocab": {"a": number}, "merges": []}} for number in (-1, 2**60)),
    {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["x", "y"]]}},
    {"model": {"type": "Nosuch"}},
    {"model": None},
    {"post_processor": json.loads("[" * 200 + "]" * 200)},
)
TEXTS = "", "[]", "null", '"x"', "{", DEEP, "\0", '{"added_tokens": 3, "model_max_length": {}}'


def test_a_broken_tokenizer_is_a_reason_not_an_error_and_one_that_panics_on_the_text_is_refused(folder, original):
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        for text in TEXTS:
            (folder / name).write_text(text)
            loaded = loading.load(folder)
            assert (loaded.tokenizer is None) == bool(loaded.tokenizer_problem), (name, text)
            assert text != "{" or name != "tokenizer.json" or "can't be loaded" in loaded.tokenizer_problem
        (folder / name).unlink()
        shutil.copytree(original, folder, dirs_exist_ok=True)
    edited(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")  # adds nothing of its own
    for fault in BROKEN_TOKENIZERS:
        shutil.copy(original / "tokenizer.json", folder)
        edited(folder / "tokenizer.json", **fault)
        loaded = loading.load(folder)
        assert loaded.tokenizer is None, fault
        assert "tokenizer" in loaded.tokenizer_problem
        assert "\n" not in loaded.tokenizer_problem
    shutil.copy(original / "tokenizer.json", folder)  # one that panics
    edited(folder / "tokenizer.json", **splitting_at("(x+x+)+y"))
    (folder / "text.txt").write_text("x" * 60 + " and more text of this kind\n")
    done = invoke("inspect", folder, "--text", folder / "text.txt")
    *_, problem, remedy = done.stderr.strip().splitlines()
    assert (done.returncode, "The tokenizer fails on the text (text.txt)" in problem) == (2, True)
    assert "--source weights" in remedy


UNREADABLE = {"pipe": "it is a pipe", "": "directory", "x" * 300: "too long", "/dev/zero": "it is a device"}
NO_TEXTS = {"~nosuchuser/x": "No such file", "none": "No such file", "loop": "symbolic links", "a\0b": "null byte"}
NO_TEXTS |= {"zeros": "is a binary file", "latin": "is not UTF-8", "blank": "is empty"}
ODD = "", "{", "[]", "null", "1", DEEP, '{"a":' * 3000, "\x00", '{"schema_version": "1"}', "9" * 5000, "NaN"


def test_texts_plans_and_reports_that_can_not_be_read_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("loop").symlink_to("loop")
    for name, content in (("zeros", b"text\0text"), ("latin", b"\xe9t\xe9"), ("blank", b" \n")):
        Path(name).write_bytes(content)
    for name, words in (UNREADABLE | NO_TEXTS).items():
        refused(TextError, partial(read_each, [name or "."]), words)
    for read in (read_plan, read_report):
        for name, words in (UNREADABLE | {"none": "No such"}).items():
            refused(UsageError, partial(read, tmp_path / name), words)
        refused(UsageError, partial(read, "a\0b"), "null byte")
        for text in ODD:
            Path("r.json").write_text(text)
            refused(UsageError, partial(read, tmp_path / "r.json"))
    report = synthetic_report(2, 2)
    Path("r.json").write_bytes(b"\xef\xbb\xbf" + report.to_json().encode())
    assert read_report("r.json").to_json() == report.to_json(), "a byte order mark is skipped"
    monkeypatch.setattr("attnlens.models.texts.sequences.LARGEST_FILE", 100)
    Path("large").write_text("word " * 100)
    refused(TextError, partial(read_each, ["large"]), "larger than 0 MiB")


def test_stdin_and_a_pipe_of_the_shell_are_read_if_possible(tmp_path, monkeypatch):
    with (tmp_path / "out").open("w") as written_only:
        for stream in (written_only, None):
            monkeypatch.setattr(sys, "stdin", stream)
            refused(TextError, partial(read_each, ["-"]), "stdin can't be read")
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as file:
        file.write("some words")
    assert read_each([f"/dev/fd/{reading}"])[0].text == "some words"
    os.close(reading)


def test_a_deleted_working_directory_is_survived(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert (len(sample("m")), len(sample("demo"))) == (3, 1)
    refused(ModelError, lambda: loading.load("./m"), "no such folder")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=20), inner, max_size=4),
    max_leaves=12,
)
SPOTS = st.lists(st.tuples(st.floats(0, 0.999), st.binary(min_size=1, max_size=8)), min_size=1, max_size=6)
SHARE = st.sampled_from([1.0, 1.0, 0.99, 0.5, 0.1])
TENSORS = {"a.weight": torch.ones(4, 3), "b.bias": torch.zeros(5, dtype=torch.float16)}


def spoiled(content, spots, reach, share):
    """Overwrite some of the first `reach` bytes, and cut the bytes to a share of them."""
    content = bytearray(content)
    for position, new in spots:
        at = int(position * min(reach, len(content)))
        content[at : at + len(new)] = new
    return bytes(content[: int(share * len(content))])


def attempt(read):
    problem = ""
    try:
        read()
    except AttnlensError as error:
        problem = error.problem
    assert "\n" not in problem
    assert len(problem) < 1000


def read_tensors(folder, *, allow_pickle=False):
    place = find(str(folder), None, offline=True, allow_pickle=allow_pickle)
    return place, list_tensors(place)


@FEW
@given(spots=SPOTS, share=SHARE)
def test_any_header_is_read_or_refused(spots, share, folder, gguf_bytes):
    (folder / "m.gguf").write_bytes(spoiled(gguf_bytes, spots, 1600, share))
    attempt(lambda: read_header(folder / "m.gguf"))
    (folder / "model.safetensors").write_bytes(spoiled(save(TENSORS), spots, 200, share))
    attempt(lambda: read_tensors(folder))


SIZES = st.lists(st.integers(-2, 2**64), max_size=3) | JSON
ENTRY = {"dtype": st.sampled_from(["F32", "I8", "F8_E4M3", "Q4"]) | JSON, "shape": SIZES, "data_offsets": SIZES}


@FEW
@given(header=st.dictionaries(st.text(max_size=8), st.fixed_dictionaries({}, optional=ENTRY) | JSON, max_size=3))
def test_any_table_of_safetensors_is_read_or_refused(header, folder):
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))
    attempt(lambda: read_tensors(folder))


NAMES = st.sampled_from(["model.safetensors", "w.safetensors", "../gpt2/model.safetensors", "w.bin", ".", "", "/"])
MAPS = st.dictionaries(st.text(), NAMES | JSON, max_size=4) | JSON


@FEW
@given(index=JSON | st.fixed_dictionaries({"weight_map": MAPS}))
def test_any_index_is_read_or_refused(index, folder):
    (folder / "w.safetensors").write_bytes(save(TENSORS))
    (folder / "model.safetensors").unlink(missing_ok=True)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def read():
        place, tensors = read_tensors(folder, allow_pickle=True)
        assert set(tensors) == set(TENSORS)
        assert all(path.parent == folder and path.suffix == ".safetensors" for path in place.weights)

    attempt(read)


FIELDS = (
    *("n_layer", "n_head", "n_embd", "n_positions", "n_inner", "vocab_size", "activation_function", "dtype"),
    *("model_type", "architectures", "layer_norm_epsilon", "scale_attn_weights", "tie_word_embeddings", "num_labels"),
    *("text_config", "attn_implementation", "_attn_implementation", "experts_implementation", "quantization_config"),
    *("auto_map", "id2label", "is_encoder_decoder", "rope_scaling", "transformers_weights", "per_layer_config"),
)
TYPES = ["gpt2", "llama", "bert", "t5", "clip", "mamba", ["GPT2Model"], ["LlamaForCausalLM"], 10**9, 1e30]
VALUES = JSON | st.integers(-2, 64) | st.sampled_from(TYPES)


@settings(FEW, max_examples=FEW.max_examples // 2)
@given(changes=st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=3))
def test_any_config_is_read_or_refused(changes, folder, original):
    shutil.copy(original / "config.json", folder / "config.json")
    edited(folder / "config.json", **changes)
    attempt(lambda: loading.load(folder))
