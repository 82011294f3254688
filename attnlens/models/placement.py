"""The device and the number type on which a model runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnlens.errors import ModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

NO_SUCH = "Choose --device auto or --device cpu."


def device_of(name: str) -> torch.device:
    """The device called `name`; `auto` is the first of cuda, mps, cpu that is there.

    Raises ModelError for one that this machine does not have.
    """
    import torch

    if name == "auto":
        mps = "mps" if torch.backends.mps.is_available() else "cpu"
        return torch.device("cuda" if torch.cuda.is_available() else mps)
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"This machine has no {name}: torch sees {torch.cuda.device_count()} CUDA devices.", NO_SUCH)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ModelError("This machine has no mps device that torch can use.", NO_SUCH)
    return device


def dtype_of(name: str, config: PreTrainedConfig, device: torch.device) -> torch.dtype | str:
    """The type called `name`; `auto` is the checkpoint's own, but half precision is raised to float32 on the CPU.

    There, half precision is slow, and its rounding would be read as asymmetry.
    """
    import torch

    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cpu":
        return torch.float64 if config.dtype == torch.float64 else torch.float32
    return "auto"
