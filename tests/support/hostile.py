"""Broken model files, and checks of how they are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load, save_file

from attnlens.errors import AttnlensError

DEEP = "[" * 100_000 + "]" * 100_000


def saved(place: Path) -> Path:
    """Save a tiny GPT-2 with its tokenizer."""
    for part in (tiny.gpt2(), tiny.tokenizer("gpt2")):
        part.save_pretrained(place)
    return place


def edited(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def weights(folder: Path, name: str = "model.safetensors") -> dict[str, torch.Tensor]:
    return load((folder / name).read_bytes())  # not mapped, since tests rewrite the file


def stored(folder: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> None:
    save_file(tensors, folder / name, metadata={"format": "pt"})


def edit(function: Callable[..., object]) -> Callable[..., Callable[[Path], object]]:
    """Decorate function(folder, *args) so that function(*args) returns an edit of a folder, for a table of faults."""
    return lambda *args, **more: lambda folder: function(folder, *args, **more)


def refused(kind: type[AttnlensError], call: Callable[[], object], *words: str) -> AttnlensError:
    """Return the error of the call, whose problem and remedy must be one line of bounded length each."""
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


def each_refused(
    kind: type[AttnlensError], original: Path, faults: Mapping[str, tuple[Any, ...]], *calls: Callable[[Path], object]
) -> None:
    """Check that each call refuses each fault, (edit, words …), in a copy of the folder, made next to it.

    The first call's error must contain all words, those of the other calls only the first word.
    """
    for number, (fault, (edit, *words)) in enumerate(faults.items()):
        folder = Path(shutil.copytree(original, original.parent / f"fault{number}" / original.name))
        edit(folder)
        for call in calls:
            try:
                refused(kind, lambda call=call, folder=folder: call(folder), *words[: None if call is calls[0] else 1])
            except BaseException as error:
                error.add_note(f"fault: {fault}")
                raise
