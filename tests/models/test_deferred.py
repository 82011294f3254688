"""Tests that weights read from local or remote files equal those of the loaded model, and that nothing else is read."""

import json
import os
import platform
import shutil
from functools import partial
from pathlib import Path

import fake_hub
import families
import model_types
import pytest
import tiny
import torch
import transformers as tf
from hostile import refused, stored, weights
from program import invoke
from program import refused as ended
from quantised import quantised

import attnlens
from attnlens.errors import ModelError, ShardFinished, TextError, TooLargeError
from attnlens.models import loading
from attnlens.models.loading import deferred, placement
from attnlens.models.loading.stored import LENGTH, parse_header
from attnlens.models.weights import query_key_maps
from attnlens.report.report import read_report

ALIKE = 1e-6  # largest relative difference between results from the files and from the loaded model
SYMMETRY = {"source": "weights", "analyzers": ["symmetry"]}
FILES = SYMMETRY | {"from_files": True}
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def saved(place, name, dtype=torch.float32):
    model_types.build(name).to(dtype).save_pretrained(place)
    return place


def both(place, **more):
    return tuple(attnlens.inspect(place, source="weights", from_files=way, **more) for way in (False, True))


def numbers(heads):
    """Return all values, nulls and curves by place and name."""
    table = {}
    for head in heads:
        place = head.layer, head.head, head.part
        for name, measure in head.measures.items():
            null = (measure.null.mean, measure.null.sd) if measure.null else ()
            table |= {(*place, name, i): number for i, number in enumerate((measure.value, *null))}
        table |= {(*place, name, i): n for name, curve in head.curves.items() for i, n in enumerate(curve)}
    assert len(table) > 3 * len(heads) > 0
    return {name: torch.nan if number is None else number for name, number in table.items()}


def apart(heads, others):
    """Return the largest relative difference of the two sides' numbers, which must have the same names."""
    tables = numbers(heads), numbers(others)
    assert tables[0].keys() == tables[1].keys()
    first, second = (torch.tensor([*table.values()], dtype=torch.float64) for table in tables)
    assert torch.equal(first.isnan(), second.isnan())
    return float(((first - second).abs() / first.abs().clamp(min=ALIKE)).nan_to_num().max())


def check_alike(loaded, read):
    assert (read.coverage, read.model.conventions) == (loaded.coverage, loaded.model.conventions)
    assert len(read.heads) == len(loaded.heads) >= 4
    assert apart(loaded.heads, read.heads) <= ALIKE
    for one, other in zip(loaded.summary.layer_symmetry, read.summary.layer_symmetry, strict=True):
        assert one == other if one is None else other == pytest.approx(one, rel=ALIKE)
    assert (loaded.summary.identity_error is None, read.summary.identity_error) == (False, None), "it never ran"
    names = [file.name for file in loaded.model.files]
    assert (read.model.files, [file.name for file in read.model.files_in_parts]) == ([], names)


@pytest.fixture
def tensors_read(monkeypatch):
    """Names of the tensors that were read whole, in order; samples are ranges."""
    names, read = [], deferred.SafetensorsFiles._read
    monkeypatch.setattr(deferred.SafetensorsFiles, "_read", lambda files, name: names.append(name) or read(files, name))
    return names


LATENT = "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"
QUERIES_AND_KEYS = {
    "gpt2": (torch.float32, ("attn.c_attn.weight", "attn.c_attn.bias")),
    "gpt_neox": (torch.bfloat16, ("query_key_value.weight", "query_key_value.bias")),
    "phi3": (torch.bfloat16, ("qkv_proj.weight",)),
    "bart": (torch.bfloat16, tuple(f"_attn.{one}_proj.{part}" for one in "qk" for part in ("weight", "bias"))),
    "albert": (torch.bfloat16, ("attention.query.weight", ".query.bias", "attention.key.weight", ".key.bias")),
    "qwen3": (torch.bfloat16, ("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")),
    "gpt_oss": (torch.bfloat16, ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")),
    "deepseek_v3": (torch.float32, tuple(f"{name}.weight" for name in LATENT)),
}
"""Types of every layout of W_Q and W_K, their stored type, and how the names of the only tensors end that are read."""
SEPARATE = ("gpt_neox", "phi3", "bart", "gpt_oss")
"""Types that are read like another one: from one matrix as in gpt2, or from two as in qwen3, with biases."""
TYPES = [pytest.param(name, marks=pytest.mark.full) if name in SEPARATE else name for name in QUERIES_AND_KEYS]
SWEEP = (
    *("bert", "opt", "llama", "mixtral", "gemma3_text", "olmo2", "llama4_text", "t5", "clip", "modernbert", "smollm3"),
    *("dinov2", "wav2vec2", "granitemoe", "lfm2", "starcoder2", "nemotron", "exaone4", "ctrl", "minicpm3"),
    *("dinov3_vit", "pixtral", "kimi_k25", "bamba"),
)


@pytest.mark.parametrize("name", TYPES)
def test_files_give_what_the_loaded_model_gives_and_only_queries_and_keys_are_read(name, tensors_read, tmp_path):
    dtype, endings = QUERIES_AND_KEYS[name]
    tensors = weights(saved(tmp_path, name, dtype))
    model = loading.load(tmp_path, from_files=True)
    check_alike(attnlens.inspect(tmp_path, **SYMMETRY), attnlens.inspect(model, **SYMMETRY))
    wanted = {tensor for tensor in tensors if tensor.endswith(endings)}
    assert set(tensors_read) == wanted
    uses = 2 if name == "albert" else 1  # its layers share their weights
    assert len(tensors_read) == uses * len(wanted) < len(tensors), "none is read twice"
    assert model.deferred.bytes_read == uses * sum(tensors[tensor].nbytes for tensor in wanted)


@pytest.mark.parametrize("names", [["vit"], *(pytest.param(SWEEP[i::5], marks=pytest.mark.full) for i in range(5))])
def test_files_of_other_types_give_what_the_loaded_model_gives(names, tmp_path):
    for name in names:
        dtype = torch.float32 if name in ("llama", "vit") else torch.bfloat16
        check_alike(*both(saved(tmp_path / name, name, dtype)))


def test_a_weight_stored_under_both_of_its_names_is_read(tmp_path):
    """Before it ties two weights, transformers compares their values, which a model of shapes lacks."""
    model = tiny.gpt2()
    assert model.lm_head.weight is model.transformer.wte.weight, "a control: it is tied"
    model.save_pretrained(tmp_path)
    for change in (0, 1):
        stored(tmp_path, weights(tmp_path) | {"lm_head.weight": model.lm_head.weight.detach() + change})
        loaded, read = both(tmp_path, analyzers=["symmetry"])
        assert apart(loaded.heads, read.heads) <= ALIKE
        assert read.coverage.complete


def test_a_changed_layer_changes_its_own_results_only(tmp_path):
    place, work = saved(tmp_path / "model", "llama"), {"work": tmp_path / "work"}
    before = attnlens.inspect(place, **FILES)
    with pytest.raises(ShardFinished):  # leaves its units in place
        attnlens.inspect(place, **FILES, **work, shard="1/1")
    tensors = weights(place)
    stored(place, tensors | {Q_PROJ: tensors[Q_PROJ] * torch.linspace(0.5, 2, 64)})
    after = attnlens.inspect(place, **FILES, **work)
    same = {(one.layer, one.head): one == other for one, other in zip(before.heads, after.heads, strict=True)}
    assert same == {(layer, head): layer == 0 for layer in (0, 1) for head in range(4)}
    assert after.heads == attnlens.inspect(place, **SYMMETRY).heads
    rounded = attnlens.inspect(saved(tmp_path / "bfloat16", "llama", torch.bfloat16), **FILES, layers=[0])
    assert apart(before.heads[:4], rounded.heads) > ALIKE, "a control: the comparison sees how numbers are rounded"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries keep less, or can't be queried")
def test_freed_memory_is_returned_before_more_is_read(tmp_path):
    """Freed pieces lie between others in use, so that glibc would keep them."""
    resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")  # noqa: E731
    model = loading.load(saved(tmp_path, "llama"), from_files=True)
    pieces = [bytearray(60_000) for _ in range(4000)]
    for place in range(len(pieces)):
        pieces[place] = b"" if place % 50 else pieces[place]
    before = resident()
    attnlens.inspect(model, **SYMMETRY)
    assert before - resident() > 0.5 * 60_000 * 4000


def test_nan_is_harmless_in_unread_tensors_and_costs_one_head_in_its_queries(tmp_path):
    """Values, outputs, the MLP, norms outside of attention, embeddings and the head contain NaN."""
    place = saved(tmp_path / "qwen3", "qwen3")
    sound, tensors = attnlens.inspect(place, **FILES), weights(place)
    spoilt = {name: part for name, part in tensors.items() if not name.endswith(QUERIES_AND_KEYS["qwen3"][1])}
    assert {"model.embed_tokens.weight", "model.layers.1.self_attn.v_proj.weight"} < spoilt.keys()
    stored(place, tensors | {name: torch.full_like(part, torch.nan) for name, part in spoilt.items()})
    loaded, read = both(place, analyzers=["symmetry"])
    assert read.heads == sound.heads
    assert (sound.coverage.complete, read.coverage.complete, loaded.coverage.complete) == (True, True, False)
    assert "contains NaN or Inf" in loaded.coverage.sentence
    tensors = weights(saved(tmp_path / "llama", "llama"))
    tensors[Q_PROJ][16:32, 3] = torch.nan
    stored(tmp_path / "llama", tensors)
    loaded, read = both(tmp_path / "llama", analyzers=["symmetry"])
    [skipped] = read.coverage.skipped
    assert (skipped.site, skipped.heads, skipped.measure) == ("model.layers.1.self_attn", [1], "weights")
    assert skipped.reason == f"{Q_PROJ} contains NaN or Inf"
    values = {(head.layer, head.head): bool(head.measures) for head in read.heads}
    assert values == {(layer, head): (layer, head) != (1, 1) for layer in (0, 1) for head in range(4)}
    assert skipped in loaded.coverage.skipped


def test_a_header_with_false_entries_is_refused(original):
    content = (original / "model.safetensors").read_bytes()
    begin = LENGTH + int.from_bytes(content[:LENGTH], "little")
    header = json.loads(content[LENGTH:begin])
    name = next(name for name in header if name.endswith("c_attn.weight"))
    start, end = header[name]["data_offsets"]
    offsets = ([start, end - 4], [start, 10**9], [end, start], [-8, end], "ab", None)
    false = [{"data_offsets": value} for value in offsets] + [{"shape": v} for v in ([10**6, 10**6], 3, ["a"])]
    parse, size = partial(parse_header, "model.safetensors"), LENGTH + len(content) - begin
    assert name in parse(content[LENGTH:begin], len(content))
    for entry in false:
        text = json.dumps(header | {name: header[name] | entry}).encode()
        refused(ModelError, partial(parse, text, size + len(text)), "model.safetensors", "Download the model again.")
    for text in (b"[]", b"3", b"{", b'{"a": 3}', b"\xff"):
        refused(ModelError, partial(parse, text, size + len(text)), "not a safetensors file")


def test_pickles_and_handwritten_attention_can_not_be_read_from_files(tmp_path):
    families.build("bloom").save_pretrained(tmp_path)
    words = "can't be analysed from its files alone", "Load the whole model: omit --device"
    refused(ModelError, partial(attnlens.inspect, tmp_path, **FILES), *words)
    assert attnlens.inspect(tmp_path, **SYMMETRY).coverage.analysed == 8
    options = "--source", "weights", "--device", "files", "--no-progress", "--layers", "0"
    ended(invoke("inspect", tmp_path, *options), words[0])
    assert invoke("inspect", "demo", *options).returncode == 0, "a control"
    ended(invoke("inspect", "demo", "--source", "tokens", *options[2:]), "cannot run on a text", "--source weights")
    (tmp_path / "model.safetensors").unlink()
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    read = partial(attnlens.inspect, tmp_path, **FILES, allow_pickle=True)
    refused(ModelError, read, "is a pickle", "Convert it to safetensors.")


def test_a_file_that_changes_while_it_is_read_ends_the_run(tmp_path):
    place = saved(tmp_path / "model", "llama")
    file, copy, stages = place / "model.safetensors", tmp_path / "copy", []
    changes = {
        "time": lambda: os.utime(file, ns=(0, file.stat().st_mtime_ns + 1)),
        "length": lambda: os.truncate(file, len(content) - 4),
        "replaced": lambda: copy.replace(file),
        "gone": lambda: file.unlink(),
    }
    content = file.read_bytes()
    for name, change in changes.items():
        file.write_bytes(content)
        shutil.copy2(file, copy)
        stages.clear()

        def progress(stage, done, _total, change=change):
            stages.append((stage, done))
            if stages[-1] == ("weights", 1):
                change()

        words = "can't be read: No such file" if name == "gone" else "changed while it was being read"
        read = partial(attnlens.inspect, place, **FILES, work=tmp_path / f"work of {name}", progress=progress)
        refused(ModelError, read, "model.safetensors", words)
        assert stages[-1] == ("weights", 1), name


@pytest.mark.parametrize("form", ["plain", "fp8"])
def test_units_of_other_numbers_are_not_resumed_if_time_and_header_of_the_file_agree(form, tmp_path):
    place, work = tmp_path / "model", tmp_path / "work"
    saved(place, "llama") if form == "plain" else quantised(place, "fp8 in blocks")
    read = partial(attnlens.inspect, place, **FILES, layers=[0])
    with pytest.raises(ShardFinished):
        read(shard="1/1", work=work)
    file, tensors = place / "model.safetensors", weights(place)
    before = file.stat()
    changed = "model.layers.0.self_attn.q_proj." + ("weight" if form == "plain" else "weight_scale_inv")
    stored(place, tensors | {changed: tensors[changed] * torch.linspace(1, 3, len(tensors[changed]))[:, None]})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns), "a control"
    assert read(work=work).heads == read(work=tmp_path / "other").heads


def test_a_model_of_files_is_not_run(tmp_path):
    model = loading.load(saved(tmp_path, "llama"), from_files=True)
    assert all(deferred.is_announced(part) for part in model.model.parameters())
    with pytest.raises(TextError, match="so it cannot run"):
        attnlens.swap_kernel(model, "rbf")
    report = attnlens.inspect(model, analyzers=["symmetry", "selection"])
    assert report.coverage.without == {"tokens": 8}
    assert "so it cannot run" in report.coverage.sentence
    assert all(name.startswith("weights.") for head in report.heads for name in head.measures)
    model = loading.load(tmp_path, from_files=True)
    assert model.deferred.bytes_read == 0
    attnlens.inspect(model, **SYMMETRY, layers=[1])
    assert model.deferred.bytes_read == 4 * (64 * 64 + 64 * 64 // 2) * 2, "of layer 0, which leads, and of layer 1"


FULL = "full_attention"
DEEP = {
    "gemma3_text": {"layer_types": ["sliding_attention", FULL] * 2},
    "smollm3": {"no_rope_layers": [1, 0, 1], "layer_types": [FULL] * 3},
    "llama4_text": {"no_rope_layers": [1, 1, 0], "moe_layers": [], "layer_types": [*["chunked_attention"] * 2, FULL]},
}
"""Types with two rotations, and with layers without rotation."""


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("smollm3", True),
        *(pytest.param(name, True, marks=pytest.mark.full) for name in ("gemma3_text", "llama4_text")),
        ("smollm3", False),
    ],
)
def test_results_of_a_site_do_not_depend_on_the_other_sites(name, way, tmp_path, monkeypatch):
    """A layer without rotation is not read like its leader."""
    config, layers = model_types.config_of(name, frozenset()), len(DEEP[name]["layer_types"])
    vars(config).update({"num_hidden_layers": layers} | DEEP[name])
    torch.manual_seed(0)
    model_types.sharpened(model_types.class_of(name)(config).eval().requires_grad_(False)).save_pretrained(tmp_path)
    read = partial(attnlens.inspect, tmp_path, **SYMMETRY, from_files=way)
    whole = read()
    assert whole.coverage.complete
    for part in ([layers - 1], range(1, layers - 1)):
        alone = read(layers=[*part])
        assert alone.coverage.complete
        assert alone.heads == [head for head in whole.heads if head.layer in part]
    if (name, way) == ("smollm3", True):
        monkeypatch.setattr(query_key_maps, "_fits", lambda *_: True)
        with pytest.raises(ModelError, match="No head could be analysed"):
            read(layers=[1])


@pytest.mark.parametrize("more", [("--shard", "1/1"), pytest.param(("--jobs", "2"), marks=pytest.mark.full)])
def test_a_model_that_does_not_fit_is_read_from_its_files(more, folder, tmp_path, monkeypatch):
    refused(ModelError, lambda: loading.load(folder, from_files=True, adapter=tmp_path), "no adapter can be merged")
    monkeypatch.setattr(placement, "free_memory", lambda: 1)  # in this process; workers find the real amount
    words = "inspect", folder, "--source", "weights", "--analyzer", "symmetry", "--work", tmp_path / "work"
    done = invoke(*words, *more, "--json", tmp_path / "r.json")
    if "--shard" in more:  # the same command without it reads the shard's results
        assert (done.returncode, (tmp_path / "r.json").exists()) == (0, False), done.stderr
        done = invoke(*words, "--json", tmp_path / "r.json")
    assert done.returncode == 0, done.stderr
    assert "does not fit into memory" in done.stdout
    again = attnlens.inspect(folder, **SYMMETRY)
    assert "does not fit into memory" in again.settings.notes[0]
    reports = read_report(tmp_path / "r.json"), again, attnlens.inspect(folder, **FILES)
    for one in reports:
        assert (one.model.files, len(one.model.files_in_parts)) == ([], 1)
        assert json.loads(one.to_json())["heads"] == json.loads(again.to_json())["heads"]
    words = "needs 0.0 GiB of memory", "--source weights --device files"
    refused(TooLargeError, lambda: attnlens.inspect(folder), *words)
    ended(invoke("inspect", folder), *words)


def test_only_queries_and_keys_are_fetched_once_even_if_connections_drop_and_nothing_if_downloaded(
    tmp_path, monkeypatch
):
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    place = tmp_path / "llama"
    tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, vocab_size=999)).save_pretrained(place, max_shard_size="3MB")
    shards = list(place.glob("*.safetensors"))
    assert len(shards) == 3
    monkeypatch.setattr("attnlens.models.loading.stored.WAIT", 0.0)
    read = partial(attnlens.inspect, fake_hub.OPEN, **FILES)
    with fake_hub.hub(place) as (address, hub):
        fake_hub.connect(address, tmp_path / "cache", monkeypatch)
        whole = read().heads
        assert whole == attnlens.inspect(place, **SYMMETRY).heads
        files = loading.load(place, from_files=True).deferred.files
        needed = files.size(name for name in files.stored if "q_proj" in name or "k_proj" in name)
        needed += sum(int.from_bytes(file.read_bytes()[:8], "little") + 8 for file in shards)
        small = sum(file.stat().st_size for file in place.iterdir() if file.suffix != ".safetensors")
        assert needed <= sum(hub.sent) - small <= 1.05 * needed  # with what the hub reports of the model
        assert needed < sum(file.stat().st_size for file in shards) / 4, "a control: all of it would be far more"
        hub.sent.clear()
        read()
        before = sum(hub.sent)
        hub.sent.clear()
        whole_headers = [10**9] * 2 * len(shards)
        hub.drops[:] = [*whole_headers, 100_000, 0, 7, 50_000, 10**9, 200_000][::-1]
        assert read().heads == whole
        assert hub.drops == []
        assert {100_000, 0, 7, 50_000, 200_000} <= set(hub.sent), "tensors were cut off"
        assert sum(hub.sent) == before, "no byte was sent twice"
        hub.drops[:] = [0] * 500
        refused(ModelError, read, "can't be read from the hub")
        hub.drops.clear()
        loading.load(fake_hub.OPEN)
        hub.drops[:] = [0] * 50
        read()
        assert len(hub.drops) == 50, "downloaded weights are not requested again"
