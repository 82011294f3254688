"""Files that nobody should have made, and what must become of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load, save_file

from attnlens.errors import AttnlensError

DEEP = "[" * 100_000 + "]" * 100_000


def saved(place: Path) -> Path:
    """A tiny GPT-2 with its tokenizer, as save_pretrained writes it."""
    tiny.gpt2().save_pretrained(place)
    tiny.tokenizer("gpt2").save_pretrained(place)
    return place


def edited(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load((folder / "model.safetensors").read_bytes())  # and not mapped, since the file is written anew


def stored(folder: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> None:
    save_file(tensors, folder / name, metadata={"format": "pt"})


def refused(kind: type[AttnlensError], call: Callable[[], object], *words: str) -> AttnlensError:
    """The error of the call: a line each on what is wrong and what to do, neither of them endless."""
    with pytest.raises(AttnlensError) as caught:
        call()
    error = caught.value
    assert type(error) is kind, repr(error)
    for line in (error.problem, error.remedy):
        assert line
        assert "\n" not in line
        assert len(line) < 1000
    for word in words:
        assert word in str(error), str(error)
    assert "weights_only" not in str(error)
    return error
