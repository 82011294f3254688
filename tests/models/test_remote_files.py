"""Tests that of a hub's model no more is fetched than its queries and keys, also where connections drop."""

import fake_hub
import pytest
import torch
import transformers as tf
from hostile import refused

import attnlens
from attnlens.errors import ModelError
from attnlens.models import loading

SHARDS = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A Llama in three shards, whose small files and weights a hub hands out."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, vocab_size=999)).save_pretrained(folder, max_shard_size="3MB")
    assert len(list(folder.glob("*.safetensors"))) == SHARDS
    return folder


@pytest.fixture
def hub(checkpoint, monkeypatch, tmp_path):
    from huggingface_hub import constants

    from attnlens.models.loading import stored

    monkeypatch.setattr(stored, "WAIT", 0.0)
    with fake_hub.hub(checkpoint) as (address, answers):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        yield answers


def inspected(name):
    return attnlens.inspect(name, source="weights", from_files=True)


def test_no_more_is_fetched_than_is_needed_and_the_numbers_are_those_of_the_loaded_model(hub, checkpoint):
    report = inspected(fake_hub.OPEN)
    local = attnlens.inspect(checkpoint, source="weights")
    assert [head.measures for head in report.heads] == [head.measures for head in local.heads]
    deferred = loading.load(checkpoint, from_files=True).deferred
    needed = deferred.files.size(name for name in deferred.files.stored if "q_proj" in name or "k_proj" in name)
    headers = sum(int.from_bytes(file.read_bytes()[:8], "little") + 8 for file in checkpoint.glob("*.safetensors"))
    ranges = [size for size in hub.sent if size]
    small = sum(file.stat().st_size for file in checkpoint.iterdir() if file.suffix != ".safetensors")
    assert needed + headers <= sum(ranges) - small <= 1.05 * (needed + headers)  # with what the hub says of the model
    whole = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    assert needed < whole / 4  # the control: all of it would be far more


def test_dropped_connections_are_taken_up_where_they_ended(hub):
    whole = inspected(fake_hub.OPEN)
    hub.sent.clear()
    inspected(fake_hub.OPEN)
    before = sum(hub.sent)
    hub.sent.clear()
    whole_headers = [10**9] * 2 * SHARDS
    hub.drops[:] = [*whole_headers, 100_000, 0, 7, 50_000, 10**9, 200_000][::-1]
    again = inspected(fake_hub.OPEN)
    assert hub.drops == []
    assert [head.measures for head in again.heads] == [head.measures for head in whole.heads]
    assert {100_000, 0, 7, 50_000, 200_000} <= set(hub.sent), "tensors were cut off"
    assert sum(hub.sent) == before, "and no byte was sent twice"


def test_a_hub_that_drops_every_connection_is_told_in_two_lines(hub):
    hub.drops[:] = [0] * 500
    refused(ModelError, lambda: inspected(fake_hub.OPEN), "can't be read from the hub")


def test_weights_that_are_here_already_are_not_asked_for(hub):
    loading.load(fake_hub.OPEN)  # which downloads them
    hub.sent.clear()
    hub.drops[:] = [0] * 50
    inspected(fake_hub.OPEN)
    assert len(hub.drops) == 50
