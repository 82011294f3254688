"""Tests that of a hub's model no more is fetched than its queries and keys, also where connections drop."""

import fake_hub
import pytest
from families import build
from hostile import refused

import attnlens
from attnlens import models
from attnlens.errors import ModelError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A Llama in two shards, whose small files and weights a hub hands out."""
    folder = tmp_path_factory.mktemp("llama")
    build("llama").save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


@pytest.fixture
def hub(checkpoint, monkeypatch, tmp_path):
    from huggingface_hub import constants

    from attnlens.models.deferred import remote

    monkeypatch.setattr(remote, "WAIT", 0.0)
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
    deferred = models.load(checkpoint, from_files=True).deferred
    needed = deferred.files.size(name for name in deferred.files.names if "q_proj" in name or "k_proj" in name)
    headers = sum(int.from_bytes(file.read_bytes()[:8], "little") + 8 for file in checkpoint.glob("*.safetensors"))
    ranges = [size for size in hub.sent if size]
    small = sum(file.stat().st_size for file in checkpoint.iterdir() if file.suffix != ".safetensors")
    described = sum(ranges) - small - needed - headers
    assert described <= 0.05 * (needed + headers) + 4096  # the hub's description of the repository
    whole = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    assert needed < whole / 4  # the control: all of it would be far more


def test_dropped_connections_are_taken_up_where_they_ended(hub):
    whole = inspected(fake_hub.OPEN)
    before = sum(hub.sent)
    hub.drops[:] = [7, 100, 300]
    again = inspected(fake_hub.OPEN)
    assert hub.drops == []
    assert [head.measures for head in again.heads] == [head.measures for head in whole.heads]
    assert sum(hub.sent) <= 2 * before


def test_a_hub_that_drops_every_connection_is_told_in_two_lines(hub):
    hub.drops[:] = [0] * 500
    refused(ModelError, lambda: inspected(fake_hub.OPEN), "can't be read from the hub")


def test_weights_that_are_here_already_are_not_asked_for(hub):
    models.load(fake_hub.OPEN)  # which downloads them
    hub.sent.clear()
    hub.drops[:] = [0] * 50
    inspected(fake_hub.OPEN)
    assert len(hub.drops) == 50
