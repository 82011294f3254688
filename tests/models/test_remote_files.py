"""Tests that of a hub's model no more is fetched than its queries and keys, also if connections drop."""

import fake_hub
import pytest
import torch
import transformers as tf
from hostile import refused

import attnlens
from attnlens.errors import ModelError
from attnlens.models import loading
from attnlens.models.loading import stored

SHARDS = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A Llama in three shards, served by a hub."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, vocab_size=999)).save_pretrained(folder, max_shard_size="3MB")
    assert len([*folder.glob("*.safetensors")]) == SHARDS
    return folder


@pytest.fixture
def hub(checkpoint, monkeypatch, tmp_path):
    monkeypatch.setattr(stored, "WAIT", 0.0)
    with fake_hub.hub(checkpoint) as (address, answers):
        fake_hub.connect(address, tmp_path, monkeypatch)
        yield answers


def inspect(name, way=True):
    report = attnlens.inspect(name, source="weights", from_files=way, analyzers=["symmetry"])
    return [head.measures for head in report.heads]


def test_only_queries_and_keys_are_fetched_once_even_if_connections_drop_and_nothing_if_downloaded(hub, checkpoint):
    whole = inspect(fake_hub.OPEN)
    assert whole == inspect(checkpoint, way=False)
    files = loading.load(checkpoint, from_files=True).deferred.files
    needed = files.size(name for name in files.stored if "q_proj" in name or "k_proj" in name)
    shards = list(checkpoint.glob("*.safetensors"))
    needed += sum(int.from_bytes(file.read_bytes()[:8], "little") + 8 for file in shards)
    small = sum(file.stat().st_size for file in checkpoint.iterdir() if file.suffix != ".safetensors")
    assert needed <= sum(hub.sent) - small <= 1.05 * needed  # with what the hub reports of the model
    assert needed < sum(file.stat().st_size for file in shards) / 4, "a control: all of it would be far more"
    hub.sent.clear()
    inspect(fake_hub.OPEN)
    before = sum(hub.sent)
    hub.sent.clear()
    whole_headers = [10**9] * 2 * SHARDS
    hub.drops[:] = [*whole_headers, 100_000, 0, 7, 50_000, 10**9, 200_000][::-1]
    assert inspect(fake_hub.OPEN) == whole
    assert hub.drops == []
    assert {100_000, 0, 7, 50_000, 200_000} <= set(hub.sent), "tensors were cut off"
    assert sum(hub.sent) == before, "no byte was sent twice"
    hub.drops[:] = [0] * 500
    refused(ModelError, lambda: inspect(fake_hub.OPEN), "can't be read from the hub")
    hub.drops.clear()
    loading.load(fake_hub.OPEN)
    hub.drops[:] = [0] * 50
    inspect(fake_hub.OPEN)
    assert len(hub.drops) == 50, "downloaded weights are not requested again"
