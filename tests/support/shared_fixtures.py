"""What all tests share: the maths packages watched for wrong shapes, a saved model, and a hub on this machine."""

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import watch
from threadpoolctl import threadpool_limits

# The tests say themselves when they are offline; huggingface_hub reads this once, when it is first imported.
os.environ.pop("HF_HUB_OFFLINE", None)

gc.disable()  # until all is imported, since nearly all that imports create stays
watch.import_rooms()  # before any other import of attnlens

import fake_hub  # noqa: E402
import hostile  # noqa: E402
from loaded import BARE  # noqa: E402

import attnlens  # noqa: E402
from attnlens.models import loading  # noqa: E402
from attnlens.models.texts import sequences  # noqa: E402
from attnlens.report.report import Report  # noqa: E402

# Two BLAS threads on a small matrix mostly wait for each other; the pools of attnlens.maths.linalg set their own.
torch.set_num_threads(1)
threadpool_limits(1, user_api="blas")  # numpy's and scipy's, which wait by counting
gc.freeze()  # what was imported stays: a full collection need not go through it again
gc.enable()
gc.set_threshold(10_000)  # after 700 new objects, Python's own number, collecting takes a tenth of all tests' time

BUILT_IN = set(sequences.SAMPLE_NAMES.values())
LARGEST = 5_000
"""Tokens of a vocabulary that is written out sooner than a text is tokenized."""


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No unit that an earlier run left in the user's cache is taken up, and none is left there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user-cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _tokenized_once() -> Iterator[None]:
    """The built-in texts, which most tests feed, are tokenized once by all small tokenizers that say the same."""
    honest, known = sequences._ids, {}

    def ids(tokenizer: Any, content: sequences.Content, text: str, *, special: bool) -> list[int]:
        rust = getattr(tokenizer, "backend_tokenizer", None)
        if content.name not in BUILT_IN or special or rust is None or len(tokenizer) > LARGEST:
            return honest(tokenizer, content, text, special=special)
        key = type(tokenizer), rust.to_str(), text
        if key not in known:
            known[key] = honest(tokenizer, content, text, special=special)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequences, "_ids", ids)
        yield


@pytest.fixture(scope="session")
def demo() -> loading.Loaded:
    """The demo model, for tests that leave it as it is."""
    return loading.load("demo")


@pytest.fixture(scope="session")
def swapped(demo: loading.Loaded) -> Report:
    """The report of demo under the RBF kernel, with controls and greedy continuations."""
    return attnlens.swap_kernel(demo, "rbf", windows=8, length=32)


@pytest.fixture(scope="session")
def swept(demo: loading.Loaded) -> Report:
    """The report of a sweep over the heads of demo under the RBF kernel, with predictors."""
    return attnlens.swap_kernel(demo, "rbf", sweep="heads", windows=8, length=24, **BARE)


@pytest.fixture(scope="session")
def inspected(demo: loading.Loaded) -> Report:
    """Weights and four windows of 32 tokens of the demo model, inspected; for tests that only read the report."""
    return attnlens.inspect(demo, windows=4, length=32)


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 with its tokenizer, as save_pretrained writes it; for tests that only read it."""
    return hostile.saved(tmp_path_factory.mktemp("models") / "gpt2")


@pytest.fixture
def without_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the arrangement of a picture's parts, which takes most of the time, where the test is not about it."""
    monkeypatch.setattr("attnlens.report.pictures.charts.ConstrainedLayoutEngine.execute", lambda engine, figure: None)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy of `original` that a test may spoil."""
    return Path(shutil.copytree(original, tmp_path / "gpt2"))


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The requests to a hub on this machine that serves `folder`; its cache is empty."""
    with fake_hub.hub(folder) as (address, answers):
        fake_hub.connect(address, tmp_path / "cache", monkeypatch)
        yield answers.requests
