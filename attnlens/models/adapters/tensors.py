"""The tensors of an adapter's file: which module each belongs to, read one by one after its shape was checked."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from attnlens.errors import ModelError
from attnlens.files import shortened
from attnlens.models.adapters.files import AdapterFiles
from attnlens.models.adapters.settings import SAY_AGAIN, SAY_MERGE, AdapterSettings
from attnlens.models.integrity import names_in_model
from attnlens.models.stored import Stored, pickled_header, safetensors_header

PREFIX = "base_model.model."
"""How peft begins the name of every tensor."""
PART = re.compile(r"(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.weight)?")
"""The path of a module, and which of its adapter's tensors this is."""


@dataclass(frozen=True)
class AdapterTensors:
    """What an adapter's file holds, sorted by the modules of a model."""

    files: AdapterFiles
    settings: AdapterSettings
    header: Mapping[str, Stored]
    modules: Mapping[str, Mapping[str, str]]
    """For each adapted module, the names of its tensors by their part: lora_A, lora_B …"""
    whole: Mapping[str, str]
    """For each parameter that is replaced, the name of its tensor."""
    unplaced: tuple[str, ...]
    """Whole tensors for which the model has no place."""

    @classmethod
    def of(cls, files: AdapterFiles, settings: AdapterSettings, model: PreTrainedModel) -> AdapterTensors:
        """Raises ModelError where the file is broken, or holds something else than LoRA."""
        header = (safetensors_header if files.form == "safetensors" else pickled_header)(files.tensors)
        paths = {path for path, _ in model.named_modules()}
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        modules: dict[str, dict[str, str]] = defaultdict(dict)
        whole: dict[str, str] = {}
        unplaced = []
        for name in header:
            path = name.removeprefix(PREFIX)
            part = PART.fullmatch(path)
            if path == name or (part is None and "lora_" in path):
                raise ModelError(f"{files.tensors} holds {shortened(name)}, which is no part of LoRA.", SAY_MERGE)
            stem = part[1] if part else path
            own = next(
                (one for one in names_in_model(stem, model.base_model_prefix) if one in paths | parameters), None
            )
            if part:
                modules[own or stem][part[2]] = name
            elif own in parameters:
                whole[own] = name
            else:
                unplaced.append(name)
        if not modules:
            raise ModelError(f"{files.tensors} holds no pair of matrices A and B.", SAY_AGAIN)
        return cls(files, settings, header, modules, whole, tuple(unplaced))

    def read(self, name: str, *shape: int) -> Tensor:
        """A tensor of that shape. Raises ModelError where the file has another one there, or codes."""
        found = self.header[name]
        if found.shape != shape:
            raise ModelError(
                f"{self.files.tensors} holds {shortened(name)} of {_times(found.shape)}, where {_times(shape)} "
                "belongs: it is of another base, or of other settings.",
                self.settings.say_base,
            )
        if found.encoded:
            raise ModelError(f"{self.files.tensors} stores {shortened(name)} as {found.type}.", SAY_MERGE)
        if self.files.form == "pickle":
            return self._pickled[name]
        with safe_open(self.files.tensors, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    @cached_property
    def _pickled(self) -> dict[str, Tensor]:
        """The whole of a pickled file, which is read once."""
        content: dict[str, Tensor] = torch.load(self.files.tensors, map_location="cpu", weights_only=True)
        return content


def _times(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))
