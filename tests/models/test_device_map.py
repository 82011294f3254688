"""Tests that a model spread over memory and disk reads as the loaded one, within its memory, and what is refused."""

import sys
from dataclasses import replace
from functools import partial

import families
import pytest
import tiny
import torch
from hostile import refused
from program import invoke
from reports import timeless

import attnlens
from attnlens.errors import IdentityError, ModelError, UsageError
from attnlens.models import hooks, loading
from attnlens.models.loading import placement
from attnlens.models.trace import mode

identity = sys.modules[hooks.identity_error.__module__]  # `hooks.survey` is the function of that name
ON_DISK = {"device_map": "auto", "max_cpu_memory": "1KB"}


def saved(folder, name):
    families.build(name).bfloat16().save_pretrained(folder)
    return folder


OTHERS = "gpt_oss", "t5", "bert", "gpt2", "gemma3", "whisper", "clip"


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)])
def test_attention_is_that_of_the_loaded_model_and_weights_are_those_of_the_files(name, tmp_path, monkeypatch):
    place, start_scores, calls, starts = saved(tmp_path, name), mode.start_scores, [], []
    record = lambda one, *rest, **more: starts[-1].append(one.lead) or start_scores(one, *rest, **more)  # noqa: E731
    monkeypatch.setattr(mode, "start_scores", record)
    for options in (ON_DISK, {"dtype": "bfloat16"}):
        loaded = loading.load(place, **options)
        starts.append([])
        calls.append(attnlens.capture(loaded, hooks.as_dtype(families.inputs(name, loaded.model), torch.bfloat16)))
        in_memory = sum(part.nbytes for part in loaded.model.parameters() if not part.is_meta)
        assert (in_memory <= 1000) == (options is ON_DISK), "memory of parts on disk is given back"
    assert starts[0] == starts[1], "no product with a weight from disk is taken for scores"
    assert len(calls[0]) == len(calls[1]) > 1
    for one, other in zip(*calls, strict=True):
        assert (one.site, torch.equal(one.attention, other.attention)) == (other.site, True)
    options = {"source": "weights", "length": 12, "analyzers": ["symmetry"]}
    report = attnlens.inspect(place, **ON_DISK, **options)
    assert report.heads == attnlens.inspect(place, from_files=True, **options).heads
    assert len(report.heads) > 3
    assert (report.settings.dtype, "disk" in report.settings.device) == ("bfloat16", True)
    assert report.summary.identity_error < 2e-7


def test_a_report_of_a_spread_model_differs_only_in_the_device(tmp_path, capfd):
    options = {"windows": 1, "length": 12, "dtype": "float16"}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words += ["--layers", "2-3", "--analyzer", "symmetry", "--json", tmp_path / "r.json", "--device", "spread"]
    done = invoke("inspect", "demo", *words)
    options |= {"layers": [2, 3], "analyzers": ["symmetry"]}
    spread = attnlens.inspect("demo", **options, device_map="auto", max_cpu_memory="1MB")
    assert "meta device" not in done.stdout + done.stderr + "".join(capfd.readouterr())
    assert spread.settings.device == "cpu, disk"
    whole = attnlens.inspect("demo", **options)
    for report in (attnlens.read_report(tmp_path / "r.json"), spread):
        same = report.model_copy(update={"settings": whole.settings})
        assert timeless(same.model_dump(mode="json")) == timeless(whole.model_dump(mode="json"))


def test_a_weight_on_disk_with_nan_is_named(tmp_path):
    model = tiny.gpt2()
    model.transformer.h[1].attn.c_attn.weight.data[0, 0] = torch.nan
    for part in (model, tiny.tokenizer("gpt2")):
        part.save_pretrained(tmp_path)
    report = attnlens.inspect(tmp_path, **ON_DISK, windows=1, length=12, allow_foreign_text=True)
    assert {skip.site for skip in report.coverage.skipped} >= {"transformer.h.1.attn.c_attn.weight"}
    assert report.summary.identity_error is None


def test_misreadings_and_contradictory_options_are_refused(tmp_path, monkeypatch):
    demo = partial(loading.load, "demo")
    refused(UsageError, partial(demo, max_cpu_memory="1GB"), "device_map='auto'")
    refused(UsageError, partial(demo, device_map="all"), "device_map")
    cases = ({"device": "cpu"}, "device can't"), ({"from_files": True}, "from_files"), ({"adapter": "auto"}, "adapter")
    sizes = [({"max_cpu_memory": size}, "8GB") for size in ("1", "GB", "-1GB", "0GB", "1.5GB", "1 GB", "1TB")]
    for options, words in (*cases, ({"adapter": tmp_path}, "adapter"), *sizes):
        refused(UsageError, partial(demo, device_map="auto", **options), words)
    bloom, llama = saved(tmp_path / "bloom", "bloom"), saved(tmp_path / "llama", "llama")
    by_hand = partial(attnlens.inspect, bloom, **ON_DISK, source="weights")
    refused(ModelError, by_hand, "can't be analysed from its files alone", "Load the whole model")
    recompute = identity.recompute
    with monkeypatch.context() as patch:
        patch.setattr(identity, "recompute", lambda call: recompute(replace(call, scale=1.01 * call.scale)))
        refused(IdentityError, partial(attnlens.inspect, llama, **ON_DISK, source="weights"), "changes its outputs")
    torch.save(families.build("llama").state_dict(), llama / "pytorch_model.bin")
    (llama / "model.safetensors").unlink()
    refused(ModelError, partial(loading.load, llama, device_map="auto", allow_pickle=True), "safetensors")
    monkeypatch.setitem(sys.modules, "accelerate.utils", None)
    refused(UsageError, partial(demo, device_map="auto"), "accelerate", "attnlens[big]")


V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
V2 = "memory.max", "memory.current", "inactive_file"


def test_free_memory_is_what_a_control_group_or_a_parent_leaves_and_three_quarters_are_used(tmp_path, monkeypatch):
    cases = ("0::/", ".", V2), ("0::/slurm/job_7/step_0", "slurm/job_7", V2)
    cases += ("1:cpu:/\n4:memory:/job", "memory", V1), ("4:memory:/job", "memory/job", V1)
    for number, (line, group, (limit, usage, file_pages)) in enumerate(cases):
        place = tmp_path / str(number)
        (place / "groups" / group).mkdir(parents=True)
        (place / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 1000 kB\n")
        (place / "own").write_text(f"{line}\n")
        for name, file in (("MEMINFO", "meminfo"), ("OWN_GROUPS", "own"), ("GROUPS", "groups")):
            monkeypatch.setattr(placement, name, place / file)
        assert placement.free_memory() == 1000 * 1024
        for name, content in ((limit, "500000"), (usage, "300000"), ("memory.stat", f"file 7\n{file_pages} 50000\n")):
            (place / "groups" / group / name).write_text(content)
        assert placement.free_memory() == 250_000, line
        (place / "groups" / group / limit).write_text("max")
        assert placement.free_memory() == 1000 * 1024
    monkeypatch.setattr(placement, "free_memory", lambda: 1000)
    assert placement.spread_over_devices(None)["max_memory"]["cpu"] == 750
