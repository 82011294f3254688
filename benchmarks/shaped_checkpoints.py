"""Write checkpoints of any shape that store only queries and keys; the remainder of each file is a hole."""

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
"""Largest size of a weight file in bytes."""


def write_checkpoint(
    folder: Path, model_class: Any, config: Any, dtype: torch.dtype, real: Callable[[str], bool]
) -> int:
    """Write a checkpoint of this config to `folder` and return its size in bytes.

    Tensors whose names are `real` are random; the others are holes in the files.
    """
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
        _write_shard(folder / file, {name: shapes[name] for name in names}, dtype, real)
        index |= dict.fromkeys(names, file)
    total = sum(prod(shape) for shape in shapes.values()) * dtype.itemsize
    content = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    return total


def _write_shard(
    path: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, real: Callable[[str], bool]
) -> None:
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
