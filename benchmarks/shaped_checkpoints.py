"""Writes checkpoints of any shape whose queries and keys alone are on disk: the rest of each file is a hole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

SHARD = 5 * 10**9
"""Bytes of a weight file, at most."""


def write(folder: Path, model_class: Any, config: Any, dtype: torch.dtype, real: Callable[[str], bool]) -> int:
    """A checkpoint of that config in `folder`; tensors whose names are `real` are random; returns its bytes."""
    with torch.device("meta"):
        shapes = {name: tuple(part.shape) for name, part in model_class(config).state_dict().items()}
    config.architectures, config.dtype = [model_class.__name__], dtype
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    shards: list[list[str]] = [[]]
    room = SHARD
    for name, shape in shapes.items():
        size = prod(shape) * dtype.itemsize
        if size > room and shards[-1]:
            shards.append([])
            room = SHARD
        shards[-1].append(name)
        room -= size
    index: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        _shard(folder / file, {name: shapes[name] for name in names}, dtype, real)
        index |= dict.fromkeys(names, file)
    total = sum(prod(shape) for shape in shapes.values()) * dtype.itemsize
    told = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(told))
    return total


def _shard(path: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, real: Callable[[str], bool]) -> None:
    kind = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[dtype]
    entries, at = {}, 0
    for name, shape in shapes.items():
        end = at + prod(shape) * dtype.itemsize
        entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, end]}
        at = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        begin = file.tell()
        file.truncate(begin + at)
        for name, shape in shapes.items():
            if real(name):
                generator = torch.Generator().manual_seed(crc32(name.encode()))
                values = torch.randn(shape, generator=generator, dtype=torch.float32) * shape[-1] ** -0.5
                data = values.to(dtype).view(torch.uint8).numpy().tobytes()
                os.pwrite(file.fileno(), data, begin + entries[name]["data_offsets"][0])
