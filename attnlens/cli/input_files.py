"""Finds the files that a command reads, before anything heavy is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnlens.arguments import MODEL_FILES, dataset_rows
from attnlens.errors import TextError, UsageError
from attnlens.files import OPEN_FILES, refuse_other_kinds

HUB = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(@[^\\]+)?")
"""What the name of a model of the hub looks like; one that ends like a file, or is a folder here, is none."""
STDIN = "-"
TEXTS = ("text", "calibration", "prompts")
"""Options that may name rows of a dataset in the place of a file."""
SAY_TEXT = "Give a plain text file in UTF-8."


@dataclass
class Inputs:
    """The files that a command reads, and the folders of its models."""

    files: dict[str, str] = field(default_factory=dict)
    """Description of each input file, keyed by its resolved path."""
    folders: dict[Path, str] = field(default_factory=dict)
    """Description of each folder of a model or a dataset, keyed by its resolved path."""

    @classmethod
    def of(cls, given: Mapping[str, Any], models: Sequence[str]) -> Inputs:
        """Those of a command's parameters, and of these models.

        Raises TextError for a text that is not there, ModelError for a model that is not where its name says (the hub
        is not asked), UsageError for a plan that can't be read.
        """
        found = cls()
        lone = {name: [given[name]] for name in ("prompts", "pairs", "labelled") if given.get(name) is not None}
        several = {name: given.get(name) or () for name in ("text", "calibration", "series")}
        for option, named in (lone | several).items():
            for path in map(Path, named):
                asked = dataset_rows(str(path)) if option in TEXTS else None
                if asked is not None:
                    folder = Path(os.path.realpath(os.path.expanduser(asked.name)))  # noqa: PTH111  # never raises
                    found.folders[folder] = f"a file of the dataset which --{option} reads"
                elif str(path) != STDIN:
                    found._add(_readable(path), f"which --{option} reads")
        if given.get("ranks") is not None:
            found._add(_plan(given["ranks"]), "which --ranks reads")
        if models:
            from attnlens.models.hub import check_endpoint

            check_endpoint()
        for name in models:
            found._add_model(name, given)
        return found

    @classmethod
    def of_report(cls, *paths: str) -> Inputs:
        """Those of a command which reads reports."""
        return cls({os.path.realpath(path): "the report" for path in paths})

    def description(self, output: Path) -> str:
        """Return the description of the input that `output` would replace; empty if there is none."""
        real = Path(os.path.realpath(output))
        inside = (what for folder, what in self.folders.items() if real.is_relative_to(folder))
        return self.files.get(str(real)) or (next(inside, "") if real.is_file() else "")

    def _add(self, path: Path, what: str) -> None:
        self.files[os.path.realpath(path)] = what

    def _add_model(self, name: str, given: Mapping[str, Any]) -> None:
        """The files of a model on this machine: of its folder all, wherever links lead; a bare file."""
        here = os.path.exists(os.path.expanduser(name))  # noqa: PTH110, PTH111  # never raise, whatever the name
        asked_of_hub = HUB.fullmatch(name) and not name.endswith(MODEL_FILES) and not here and name != "demo"
        if asked_of_hub and not given["offline"]:
            return
        from attnlens.models.locate import find

        revision = given.get("revision") if len(given.get("models") or ()) < 2 else None
        place = find(name, revision, offline=given["offline"], allow_pickle=given["allow_pickle"])
        what = f"a file of the model {name}"
        if place.form == "gguf" and not os.path.isdir(os.path.expanduser(name)):  # noqa: PTH111, PTH112  # as above
            self._add(place.folder / place.file, what)
            return
        self.folders[Path(os.path.realpath(place.folder))] = what
        for file in place.folder.iterdir():
            self._add(file, what)


def check_place() -> None:
    """Raise UsageError where the current folder was removed: no path starts there, and torch's MKL ends the process."""
    try:
        os.getcwd()  # noqa: PTH109  # as pathlib does
    except OSError as error:
        raise UsageError(f"The current folder can't be read: {error.strerror}.", "Go to another one: cd") from None


def _readable(path: Path) -> Path:
    """The path of a text. Raises TextError where there is none that can be read."""
    found = Path(os.path.expanduser(path))  # noqa: PTH111  # never raises
    try:
        problem = "Is a directory" if found.stat() and found.is_dir() else ""
        problem = problem or ("" if os.access(found, os.R_OK) else "Permission denied")
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", "") or str(error)
    if problem:
        raise TextError(f"The text {path} can't be read: {problem}.", SAY_TEXT)
    if not str(path).startswith(OPEN_FILES):
        refuse_other_kinds(found.stat(), f"The text {path}", TextError, SAY_TEXT)
    return found


def _plan(name: str) -> Path:
    """The path of a plan. Raises UsageError where it is none; what can be read only once is left to the run."""
    from attnlens.records import read_plan

    path = Path(name)
    if not path.is_fifo():
        read_plan(path)
    return path
