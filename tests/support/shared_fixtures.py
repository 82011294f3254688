"""Fixtures of all tests; the import also turns on the checks of shapes in the maths packages."""

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

# Tests set this themselves if they are offline; huggingface_hub reads it once, at its first import.
os.environ.pop("HF_HUB_OFFLINE", None)

gc.disable()  # during imports, because nearly all objects that they create stay
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
gc.freeze()  # a full collection then skips the imported objects
gc.enable()
gc.set_threshold(10_000)  # with Python's default, 700 new objects, collecting takes a tenth of the tests' time

BUILT_IN = set(sequences.SAMPLE_NAMES.values())
LARGEST = 5_000
"""Largest vocabulary for which comparing tokenizers is faster than tokenizing a text."""


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use an empty cache instead of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user-cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _tokenized_once() -> Iterator[None]:
    """Tokenize the built-in texts, which most tests use, once for all equal small tokenizers."""
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
    """The demo model, for tests that do not change it."""
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
    """Folder of a tiny GPT-2 with its tokenizer, as save_pretrained writes it; for tests that only read it."""
    return hostile.saved(tmp_path_factory.mktemp("models") / "gpt2")


@pytest.fixture
def without_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the layout of pictures, which takes most of their time, for tests of other claims."""
    monkeypatch.setattr("attnlens.report.pictures.charts.ConstrainedLayoutEngine.execute", lambda engine, figure: None)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy of `original` that a test can change."""
    return Path(shutil.copytree(original, tmp_path / "gpt2"))


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The requests to a hub on this machine that serves `folder`; its cache is empty."""
    with fake_hub.hub(folder) as (address, answers):
        fake_hub.connect(address, tmp_path / "cache", monkeypatch)
        yield answers.requests
