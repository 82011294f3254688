"""Tests that headers, indexes, configs, tokenizers, texts, plans and reports made by nobody end in the family."""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import DEEP, edited, refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from program import attnlens
from safetensors.torch import save

from attnlens.errors import AttnlensError, ModelError, TextError, UsageError
from attnlens.models import loading
from attnlens.models.loading.building import tensors_in
from attnlens.models.loading.gguf import read_header
from attnlens.models.loading.locate import find
from attnlens.models.texts import read_each
from attnlens.records import read_plan
from attnlens.report.report import read_report

FEW = settings(
    max_examples=int(os.environ.get("HOSTILE_EXAMPLES", "200")),
    deadline=None,
    derandomize="HOSTILE_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
"""A few hundred examples, the same in every run; HOSTILE_EXAMPLES asks for more, and other ones."""


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A Llama of one layer as a GGUF file."""
    gguf = pytest.importorskip("gguf", reason="GGUF files need the package gguf")
    import numpy as np

    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(32)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(8)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*"abcdefgh"])
    writer.add_token_merges(["a b"])
    square = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes = {f"blk.0.{name}.weight": (32, 32) for name in square}
    shapes |= {"blk.0.attn_norm.weight": (32,), "blk.0.ffn_norm.weight": (32,), "output_norm.weight": (32,)}
    shapes |= {"token_embd.weight": (8, 32), "output.weight": (8, 32)}
    for name, shape in shapes.items():
        writer.add_tensor(name, np.ones(shape, dtype=np.float32) * 0.1)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path.read_bytes()


@pytest.fixture
def gguf_file(gguf_bytes: bytes, tmp_path: Path) -> Path:
    (tmp_path / "m.gguf").write_bytes(gguf_bytes)
    return tmp_path / "m.gguf"


def test_a_whole_gguf_file_is_read(gguf_file: Path) -> None:
    pytest.importorskip("accelerate", reason="GGUF files need the package accelerate")
    header = read_header(gguf_file)
    assert header.fields["llama.block_count"] == 1
    assert {entry.name: entry.shape for entry in header.tensors}["token_embd.weight"] == (8, 32)
    loaded = loading.load(str(gguf_file))
    assert (loaded.info.architecture, loaded.missing_keys, loaded.unused_keys) == ("LlamaForCausalLM", (), ())


def test_a_gguf_file_cut_anywhere_is_called_cut(gguf_file: Path, gguf_bytes: bytes) -> None:
    for size in (0, 3, *range(4, len(gguf_bytes), 97), len(gguf_bytes) - 1):
        gguf_file.write_bytes(gguf_bytes[:size])
        words = ["empty file" if size == 0 else "not a GGUF file" if size < 4 else "truncated"]
        refused(ModelError, lambda: read_header(gguf_file), str(gguf_file), *words)
    refused(ModelError, lambda: loading.load(str(gguf_file)), "the data of", "end at byte")


def _field(name: bytes) -> tuple[bytes, int]:
    """A field's name and what stands before its value: the name, and the number of its type."""
    return name, len(name) + 4


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (4, struct.pack("<I", 1), "GGUF v1"),
        (4, struct.pack(">I", 3), "GGUF v50331648"),
        (8, struct.pack("<Q", 2**60), "truncated or damaged"),
        (8, struct.pack("<Q", 2**64 - 1), "truncated or damaged"),
        (8, struct.pack("<Q", 2**20), "truncated or damaged"),
        (16, struct.pack("<Q", 2**60), "truncated or damaged"),
        (16, struct.pack("<Q", 2**22), ""),
        (24, struct.pack("<Q", 2**63), "truncated or damaged"),
        (_field(b"llama.block_count"), struct.pack("<I", 10**9), "llama.block_count = 1000000000"),
        (_field(b"llama.embedding_length"), struct.pack("<I", 2**31), "far larger model"),
        (_field(b"llama.vocab_size"), struct.pack("<I", 10**9), ""),
        (_field(b"tokenizer.ggml.tokens"), struct.pack("<I", 9), "an array of type 9"),
        (_field(b"tokenizer.ggml.tokens"), struct.pack("<I", 77), "an array of type 77"),
        (_field(b"tokenizer.ggml.tokens"), struct.pack("<IQ", 8, 2**60), "truncated or damaged"),
        (_field(b"tokenizer.ggml.tokens"), struct.pack("<IQ", 8, 2**20), "truncated or damaged"),
        (_field(b"general.architecture"), struct.pack("<Q", 2**60), "truncated or damaged"),
        ((b"blk.0.attn_q.weight", 19), struct.pack("<I", 2**31), "truncated or damaged"),
        ((b"blk.0.attn_q.weight", 23), struct.pack("<Q", 2**60), "the data of blk.0.attn_q.weight end at byte"),
        ((b"blk.0.attn_q.weight", 39), struct.pack("<I", 999), "in an unknown type"),
        ((b"blk.0.attn_q.weight", 43), struct.pack("<Q", 2**62), "the data of blk.0.attn_q.weight end at byte"),
        ((b"blk.0.attn_q.weight", 0), b"\xff\xfe", "truncated or damaged"),
    ],
)
def test_a_gguf_file_with_an_absurd_header_is_refused(
    at: Any, value: bytes, words: str, gguf_file: Path, gguf_bytes: bytes
) -> None:
    pytest.importorskip("accelerate", reason="GGUF files need the package accelerate")
    start = at if isinstance(at, int) else gguf_bytes.index(at[0]) + at[1]
    gguf_file.write_bytes(gguf_bytes[:start] + value + gguf_bytes[start + len(value) :])
    refused(ModelError, lambda: loading.load(str(gguf_file)), words)


def gguf_with(tensor: bytes) -> bytes:
    """Return a GGUF file without data, whose only tensor has this entry after its name."""
    text = lambda word: struct.pack("<Q", len(word)) + word  # noqa: E731
    fields = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
    return b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + fields + text(b"t") + tensor + bytes(64)


def test_a_tensor_of_many_dimensions_in_a_gguf_file_is_refused_at_once(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="GGUF files need the package gguf")
    sizes = 10**6  # their product would have 63 million bits
    shape = struct.pack("<I", sizes) + struct.pack("<Q", 2**63 - 1) * sizes
    (tmp_path / "m.gguf").write_bytes(gguf_with(shape + struct.pack("<IQ", 0, 0)))
    refused(ModelError, lambda: read_header(tmp_path / "m.gguf"), f"a tensor with {sizes} dimensions")


def test_an_empty_tensor_of_an_unknown_type_in_a_gguf_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="GGUF files need the package gguf")
    (tmp_path / "m.gguf").write_bytes(gguf_with(struct.pack("<IQQIQ", 2, 0, 5, 999, 0)))
    refused(ModelError, lambda: read_header(tmp_path / "m.gguf"), "stores t in an unknown type")


# tokenizers


def _splitting_at(pattern: str) -> dict[str, Any]:
    return {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}}


BROKEN_TOKENIZERS = {
    "no regex": _splitting_at("("),
    "negative ids": {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}},
    "ids of 2^60": {"model": {"type": "BPE", "vocab": {"a": 2**60}, "merges": []}},
    "merges of what is not there": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["x", "y"]]}},
    "unknown model": {"model": {"type": "Nosuch"}},
    "no model": {"model": None},
    "nested": {"post_processor": json.loads("[" * 200 + "]" * 200)},
}


@pytest.mark.parametrize("fault", BROKEN_TOKENIZERS)
def test_a_tokenizer_that_can_not_be_loaded_is_a_reason(fault: str, folder: Path) -> None:
    edited(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")  # which adds nothing of its own
    edited(folder / "tokenizer.json", **BROKEN_TOKENIZERS[fault])
    loaded = loading.load(str(folder))
    assert loaded.tokenizer is None
    assert "tokenizer" in loaded.tokenizer_problem
    assert "\n" not in loaded.tokenizer_problem


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(
    "text", ["", "[]", "null", '"x"', "{", DEEP, "\0", '{"added_tokens": 3, "model_max_length": {}}']
)
def test_a_tokenizers_file_of_anything_is_a_reason(name: str, text: str, folder: Path) -> None:
    (folder / name).write_text(text)
    loaded = loading.load(str(folder))
    assert (loaded.tokenizer is None) == bool(loaded.tokenizer_problem)


def test_a_tokenizer_that_panics_on_the_text_ends_in_two_lines(folder: Path) -> None:
    edited(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    edited(folder / "tokenizer.json", **_splitting_at("(x+x+)+y"))
    (folder / "text.txt").write_text("x" * 60 + " and more text of this kind\n")
    done = attnlens("inspect", folder, "--text", folder / "text.txt")
    assert done.returncode == 2
    *_, problem, remedy = done.stderr.strip().splitlines()
    assert "The tokenizer fails on the text (text.txt)" in problem
    assert "--source weights" in remedy


# texts


def _with_stdin(monkeypatch: pytest.MonkeyPatch, stream: object) -> None:
    monkeypatch.setattr(sys, "stdin", stream)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("~nosuchuser/x", "No such file"),
        ("x" * 300, "too long"),
        ("a\0b", "null byte"),
        (".", "directory"),
        ("/dev/zero", "it is a device"),
        ("pipe", "it is a pipe"),
        ("nothing", "No such file"),
        ("loop", "symbolic links"),
        ("large", "larger than 1024 MiB"),
        ("zeros", "is a binary file"),
        ("latin", "is not UTF-8"),
        ("blank", "is empty"),
    ],
)
def test_texts_that_can_not_be_read(name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("loop").symlink_to("loop")
    Path("zeros").write_bytes(b"text\0text")
    Path("latin").write_bytes(b"\xe9t\xe9")
    Path("blank").write_text(" \n")
    if name == "large":
        monkeypatch.setattr("attnlens.models.texts.sequences.LARGEST_FILE", 100)
        Path("large").write_text("word " * 100)
        words = "larger than 0 MiB"
    refused(TextError, lambda: read_each([name]), words)


def test_stdin_that_can_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "out").open("w") as written_only:
        for stream in (written_only, None):
            _with_stdin(monkeypatch, stream)
            refused(TextError, lambda: read_each(["-"]), "stdin can't be read")
    _with_stdin(monkeypatch, TextIOWrapper(BytesIO(b"\xef\xbb\xbfsome words")))
    assert read_each(["-"])[0].text == "some words"


def test_a_pipe_of_the_shell_is_read() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as file:
        file.write("some words")
    assert read_each([f"/dev/fd/{reading}"])[0].text == "some words"
    os.close(reading)


def test_a_current_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnlens.models.texts import sample

    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert len(sample("m")) == 3
    assert len(sample("demo")) == 1
    refused(ModelError, lambda: loading.load("./m"), "no such folder")


# plans and reports

ODD = ["", "{", "[]", "null", "1", DEEP, '{"a":' * 3000, "\x00", '{"schema_version": "1"}', "9" * 5000, "NaN"]


@pytest.mark.parametrize("read", [read_plan, read_report])
def test_plans_and_reports_of_anything(read: Any, tmp_path: Path) -> None:
    for text in ODD:
        (tmp_path / "r.json").write_text(text)
        refused(UsageError, lambda: read(tmp_path / "r.json"))
    os.mkfifo(tmp_path / "pipe")
    for name, words in (("pipe", "it is a pipe"), ("none", "No such"), ("", "directory"), ("x" * 300, "too long")):
        refused(UsageError, lambda path=tmp_path / name: read(path), words)
    for name, words in (("/dev/zero", "it is a device"), ("a\0b", "null byte")):
        refused(UsageError, lambda path=name: read(path), words)


def test_a_report_with_a_byte_order_mark_is_read(folder: Path) -> None:
    words = ("inspect", folder, "--source", "weights", "--layers", "0", "--json", folder / "r.json", "-q")
    assert attnlens(*words).returncode == 0
    report = read_report(folder / "r.json")
    (folder / "r.json").write_bytes(b"\xef\xbb\xbf" + (folder / "r.json").read_bytes())
    assert read_report(folder / "r.json") == report


# fuzzing: whatever the bytes, either it is read or it ends in an error of the family

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=20), inner, max_size=4),
    max_leaves=12,
)
SPOTS = st.lists(st.tuples(st.floats(0, 0.999), st.binary(min_size=1, max_size=8)), min_size=1, max_size=6)


def _spoiled(whole: bytes, spots: list[tuple[float, bytes]], reach: int, keep: float) -> bytes:
    """The bytes with some of the first `reach` overwritten, and cut to a share of them."""
    content = bytearray(whole)
    for share, new in spots:
        at = int(share * min(reach, len(content)))
        content[at : at + len(new)] = new
    return bytes(content[: int(keep * len(content))])


def _attempt(read: Any) -> None:
    told = ""
    try:
        read()
    except AttnlensError as error:
        told = error.problem
    assert "\n" not in told
    assert len(told) < 1000


KEEP = st.sampled_from([1.0, 1.0, 0.99, 0.5, 0.1])


@FEW
@given(spots=SPOTS, keep=KEEP)
def test_any_gguf_header_ends_well(spots: Any, keep: float, gguf_file: Path, gguf_bytes: bytes) -> None:
    gguf_file.write_bytes(_spoiled(gguf_bytes, spots, 1600, keep))
    _attempt(lambda: read_header(gguf_file))


TENSORS = {"a.weight": torch.ones(4, 3), "b.bias": torch.zeros(5, dtype=torch.float16)}


@FEW
@given(spots=SPOTS, keep=KEEP)
def test_any_safetensors_header_ends_well(spots: Any, keep: float, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(_spoiled(save(TENSORS), spots, 200, keep))
    _attempt(lambda: tensors_in(find(str(folder), None, offline=True, allow_pickle=False)))


@FEW
@given(header=st.dictionaries(st.text(max_size=8), st.fixed_dictionaries({}, optional={
    "dtype": st.sampled_from(["F32", "I8", "F8_E4M3", "Q4"]) | JSON,
    "shape": st.lists(st.integers(-2, 2**64), max_size=3) | JSON,
    "data_offsets": st.lists(st.integers(-2, 2**64), max_size=3) | JSON,
}) | JSON, max_size=3))  # fmt: skip
def test_any_table_of_safetensors_ends_well(header: Any, folder: Path) -> None:
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))
    _attempt(lambda: tensors_in(find(str(folder), None, offline=True, allow_pickle=False)))


NAMES = st.sampled_from(["model.safetensors", "w.safetensors", "../gpt2/model.safetensors", "w.bin", ".", "", "/"])


@FEW
@given(index=JSON | st.fixed_dictionaries({"weight_map": st.dictionaries(st.text(), NAMES | JSON, max_size=4) | JSON}))
def test_any_index_ends_well(index: Any, folder: Path) -> None:
    (folder / "w.safetensors").write_bytes(save(TENSORS))
    (folder / "model.safetensors").unlink(missing_ok=True)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def read() -> None:
        place = find(str(folder), None, offline=True, allow_pickle=True)
        assert set(tensors_in(place)) == set(TENSORS)
        assert all(path.parent == folder and path.suffix == ".safetensors" for path in place.weights)

    _attempt(read)


FIELDS = (
    *("n_layer", "n_head", "n_embd", "n_positions", "n_inner", "vocab_size", "activation_function", "dtype"),
    *("model_type", "architectures", "layer_norm_epsilon", "scale_attn_weights", "tie_word_embeddings", "num_labels"),
    *("text_config", "attn_implementation", "_attn_implementation", "experts_implementation", "quantization_config"),
    *("auto_map", "id2label", "is_encoder_decoder", "rope_scaling", "transformers_weights", "per_layer_config"),
)
VALUES = (
    JSON
    | st.integers(-2, 64)
    | st.sampled_from(
        ["gpt2", "llama", "bert", "t5", "clip", "mamba", ["GPT2Model"], ["LlamaForCausalLM"], 10**9, 1e30]
    )
)


@settings(FEW, max_examples=FEW.max_examples // 2)
@given(changes=st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=3))
def test_any_config_ends_well(changes: dict[str, Any], folder: Path, original: Path) -> None:
    shutil.copy(original / "config.json", folder / "config.json")
    edited(folder / "config.json", **changes)
    _attempt(lambda: loading.load(str(folder)))
