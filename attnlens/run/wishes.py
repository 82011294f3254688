"""What can a run of `swap_kernel` be asked for, and which wishes contradict each other?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from attnlens import models
from attnlens.attention import Path as Route
from attnlens.errors import UsageError
from attnlens.kernels import Kernel, parsed
from attnlens.records import PARTS, PATHS, SWEEPS, Part
from attnlens.registry import checked_name
from attnlens.run import arguments
from attnlens.run.fit import check_fit
from attnlens.run.saved import check_folder

Unit = Literal["heads", "layers"]


class Wishes(models.Loading, total=False):
    """The further options of `swap_kernel`, beside those of `load`."""

    part: Part | None
    """Swap in this part alone: encoder, decoder or cross."""
    path: Route
    """How the new kernel is computed: the fastest exact path ("auto"), row tiles ("eager"), a fused path ("fused")."""
    sweep: Unit | None
    """Swap each head or layer alone too, and rank the effects."""
    fit: bool
    """Choose each head's free kernel parameters from calibration text."""
    heal: int
    """Train W_Q and W_K of the swapped heads for so many steps."""
    calibration: arguments.Words
    """Text files for fit and heal; without them, what follows the evaluated text."""
    save: str | os.PathLike[str] | None
    """Write the swapped model into this new folder."""
    allow_signed: bool
    """Allow odd powers, whose kernels can be negative."""


@dataclass(frozen=True)
class Wish:
    """What one run was asked for, checked."""

    kernels: list[Kernel]
    """The new kernels."""
    part: Part | None
    path: Route
    sweep: Unit | None
    fit: bool
    heal: int
    calibration: list[str]
    save: Path | None

    @classmethod
    def of(cls, kernels: arguments.Words, given: Mapping[str, Any]) -> Wish:
        """Raises UsageError where words make no sense or contradict each other, OutputError for an unusable folder."""
        for option in given:
            checked_name("option", option, Wishes.__annotations__)
        spellings = dict.fromkeys(arguments.words("kernels", kernels))
        allow = bool(given.get("allow_signed", False))
        save = given.get("save")
        wish = cls(
            kernels=[parsed(words, allow_signed=allow) for words in spellings],
            part=cast("Part | None", _one_of("part", given.get("part"), PARTS)),
            path=cast("Route", _one_of("path", given.get("path", "auto"), PATHS)),
            sweep=cast("Unit | None", _one_of("sweep", given.get("sweep"), SWEEPS)),
            fit=bool(given.get("fit", False)),
            heal=arguments.whole("heal", given.get("heal", 0), 0),
            calibration=arguments.words("calibration", given.get("calibration", ())),
            save=None if save is None else Path(save),
        )
        wish._check()
        return wish

    def _check(self) -> None:
        if not self.kernels:
            raise UsageError("No kernel is named.", "Give one, as in --kernel rbf.")
        for kernel in self.kernels:
            if self.fit:
                check_fit(kernel, alone=len(self.kernels) == 1)
            if self.heal and kernel.info.hard:
                raise UsageError(
                    f"{kernel.info.name} can't be healed: its weights have no gradient.",
                    "Leave out --heal, or choose another kernel.",
                )
        if len(self.kernels) > 1 and (self.heal or self.save):
            what = "heal" if self.heal else "save"
            raise UsageError(f"--{what} takes one kernel, not {len(self.kernels)}.", "Give one --kernel.")
        if self.calibration and not self.calibrates:
            raise UsageError("Calibration text is given and nothing reads it.", "Add --fit or --heal, or leave it out.")
        if self.save is not None:
            check_folder(self.save)

    @property
    def calibrates(self) -> bool:
        """Whether calibration text is needed."""
        return self.fit or self.heal > 0 or any(kernel.info.needs_fit for kernel in self.kernels)


def _one_of(what: str, word: str | None, known: tuple[str, ...]) -> str | None:
    return None if word is None else checked_name(what, word, known)
