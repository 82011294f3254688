"""What all tests share: the maths rooms watched for wrong shapes, a saved model, and a hub on this machine."""

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import watch

# The tests say themselves when they are offline; huggingface_hub reads this once, when it is first imported.
os.environ.pop("HF_HUB_OFFLINE", None)

watch.import_rooms()  # before any other import of attnlens

import fake_hub  # noqa: E402
import hostile  # noqa: E402

from attnlens import models  # noqa: E402

# Two BLAS threads on a small matrix mostly wait for each other; the pools of attnlens.linalg set their own.
torch.set_num_threads(1)
gc.freeze()  # what was imported stays: a full collection need not go through it again


LONGEST = (
    *("readme", "benchmarks", "swap", "smollm2", "heal", "cli", "cli_outputs", "sweep", "budget", "inspect", "page"),
)
"""Test files that begin, so that with several processes none is left alone with one of them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, the others in their order."""
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))


@pytest.fixture(autouse=True)
def _watched() -> None:
    """Each test checks its own calls."""
    watch.seen.clear()


@pytest.fixture(scope="session")
def demo() -> models.Loaded:
    """The demo model, for tests that leave it as it is."""
    return models.load("demo")


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 with its tokenizer, as save_pretrained writes it; for tests that only read it."""
    return hostile.saved(tmp_path_factory.mktemp("models") / "gpt2")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy of `original` that a test may spoil."""
    return Path(shutil.copytree(original, tmp_path / "gpt2"))


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub on this machine that hands out `folder`, an empty cache, and the paths that were asked for."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with fake_hub.serving(folder) as (address, asked):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        yield asked
