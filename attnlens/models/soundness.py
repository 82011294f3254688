"""Are the weight files whole, and is every weight in them a finite number?"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from attnlens.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_whole(files: Iterable[Path]) -> None:
    """Raise ModelError for a file that is not there, or a safetensors file that is cut off or something else."""
    from safetensors import SafetensorError, safe_open

    for file in files:
        if not file.is_file():
            raise ModelError(f"The weight file {file} is missing.", "Download the model again.")
        if file.suffix != ".safetensors":
            continue
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            raise ModelError(f"{file} is cut off or no safetensors file: {error}.", "Download it again.") from None


def nonfinite_tensors(model: PreTrainedModel) -> list[str]:
    """Names of the parameters with NaN or Inf in them, in the model's order."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and not bool(parameter.isfinite().all())
    ]
