"""Finds the two files of an adapter, its settings and its tensors, in a folder or on the hub."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from attnlens.errors import ModelError
from attnlens.files import shortened, with_home
from attnlens.models.folders import ADAPTER_CONFIG, names_in, weight_file
from attnlens.models.hub import Hub
from attnlens.models.locate import CONFIG, is_there, looks_like_path

TENSORS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"
SAY_FOLDER = f"Give the folder that holds {ADAPTER_CONFIG} and {TENSORS}, or its hub id."


@dataclass(frozen=True)
class AdapterFiles:
    """Where an adapter lies on this machine."""

    id: str
    """As given, without the revision."""
    folder: Path
    """The folder of its files."""
    form: Literal["safetensors", "pickle"]
    """How its tensors are stored."""
    revision: str | None = None
    """The commit of an adapter from the hub."""

    @property
    def settings(self) -> Path:
        """The file that says what the tensors are."""
        return weight_file(self.folder, ADAPTER_CONFIG)

    @property
    def tensors(self) -> Path:
        """The file of its tensors; raises ModelError where it is no file in the folder."""
        return weight_file(self.folder, TENSORS if self.form == "safetensors" else PICKLE)

    def lies_in(self, folder: Path) -> bool:
        """Whether that is its folder."""
        return os.path.realpath(folder) == os.path.realpath(self.folder)


def find_adapter(name: str, *, offline: bool, allow_pickle: bool) -> AdapterFiles:
    """The adapter called `name`: a folder, or a hub id (`org/name@revision`).

    Raises ModelError where there is none, or its tensors are a pickle that was not allowed.
    """
    path = with_home(name)
    if is_there(path):
        if not path.is_dir():
            raise ModelError(f"{shortened(name)} is a file and no adapter's folder.", SAY_FOLDER)
        return AdapterFiles(name, path, _form(names_in(path), name, allow_pickle))
    id_, _, revision = name.partition("@")
    if not id_ or looks_like_path(id_):
        raise ModelError(f"There is no such folder: {shortened(name)}.", SAY_FOLDER)
    hub = Hub(id_, revision or None)

    def wanted(names: Collection[str]) -> list[str]:
        return [ADAPTER_CONFIG, PICKLE if _form(names, id_, allow_pickle) == "pickle" else TENSORS]

    folder = hub.cached("--offline forbids the network") if offline else hub.fetched(wanted)
    return AdapterFiles(id_, folder, _form(names_in(folder), id_, allow_pickle), folder.name)


def _form(names: Collection[str], where: str, allow_pickle: bool) -> Literal["safetensors", "pickle"]:
    if ADAPTER_CONFIG not in names:
        problem = f"{shortened(where)} has no {ADAPTER_CONFIG}"
        if CONFIG in names:
            raise ModelError(f"{problem}: it is a model and no adapter.", "Give it as MODEL, without --adapter.")
        raise ModelError(f"{problem}.", SAY_FOLDER)
    if TENSORS in names:
        return "safetensors"
    if PICKLE not in names:
        raise ModelError(f"{shortened(where)} has no {TENSORS}.", "Get the whole adapter again.")
    if not allow_pickle:
        raise ModelError(
            f"{shortened(where)} has only a pickled adapter ({PICKLE}), which can run code when it is opened.",
            "Convert it to safetensors, or, if you trust it, add --allow-pickle.",
        )
    return "pickle"
