"""What can a run of `swap_kernel` be asked for, and which wishes contradict each other?"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from attnlens import calls, requests
from attnlens.attention import Route
from attnlens.errors import UsageError
from attnlens.kernels import Kernel, parsed
from attnlens.ksvd import ETA, Convention
from attnlens.records import CONVENTIONS, PARTS, PATHS, SWEEPS, Part, Plan, read_plan
from attnlens.registry import checked_name
from attnlens.run.swap.fit import check_fit
from attnlens.run.swap.ranks.from_plan import part_of
from attnlens.run.swap.saved import check_folder

Unit = Literal["heads", "layers"]
MOST_DIRECTIONS = 65536
"""A rank that cuts nothing in any head."""
BOTH = "A plan says which layers and heads have which rank.", "Leave out --layers, --heads and --part, or --ranks."


class Wishes(requests.Feeding, total=False):
    """The options of `swap_kernel`, beside those of every run that feeds a model."""

    part: Part | None
    """Swap in this part alone: encoder, decoder or cross."""
    path: Route
    """How the new kernel is computed: the fastest exact path ("auto"), row tiles ("eager"), a fused path ("fused")."""
    sweep: Unit | None
    """Swap each head or layer alone too, and rank the effects."""
    fit: bool
    """Choose each head's free kernel parameters from calibration text."""
    heal: int
    """Train W_Q and W_K of the swapped heads, and the kernel's own parameters, for so many steps."""
    calibration: requests.Words
    """Text files for fit, heal, budget and ranks; without them, windows of the evaluated texts not evaluated."""
    eta: float | None
    """Weight of the KSVD regulariser in healing primal attention (default 0.1, of the published language model)."""
    ksvd_convention: str
    """How its objective is counted: "paper" (sums, default) or "code" (means, Λ squared)."""
    budget: str | None
    """Choose the rank of each key head: the smallest ones whose rise of the loss stays well within it, as in "loss:1%",
    and promise that rise from calibration windows that neither fitted nor chose."""
    ranks: Plan | str | os.PathLike[str] | None
    """The rank of each key head, from a plan or its file (--plan), with the layers, heads and part that it has."""
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
    budget: float | None
    """As a share of the loss."""
    ranks: Plan | None
    """The plan whose ranks are taken, in the place of a budget."""
    eta: float | None
    """None where nothing is regularised."""
    convention: Convention

    @classmethod
    def of(cls, kernels: requests.Words, given: Mapping[str, Any]) -> Wish:
        """Raises UsageError where words make no sense or contradict each other, OutputError for an unusable folder."""
        for option in given:
            checked_name("option", option, Wishes.__annotations__)
        spellings = dict.fromkeys(requests.words("kernels", kernels))
        allow = calls.switch("allow_signed", given.get("allow_signed", False))
        save = None if given.get("save") is None else calls.path("save", given["save"])
        budget, ranks = given.get("budget"), _ranks(given)
        if budget is not None or ranks is not None:
            spellings = dict.fromkeys([_without_rank(list(spellings))])
        each = (parsed(words, allow_signed=allow) for words in spellings)
        kernels_asked = list({kernel.spelling: kernel for kernel in each}.values())
        wish = cls(
            kernels=kernels_asked,
            part=cast("Part | None", _one_of("part", given.get("part"), PARTS)) if ranks is None else part_of(ranks),
            path=cast("Route", _one_of("path", given.get("path", "auto"), PATHS)),
            sweep=cast("Unit | None", _one_of("sweep", given.get("sweep"), SWEEPS)),
            fit=calls.switch("fit", given.get("fit", False)),
            heal=requests.whole("heal", given.get("heal", 0), 0),
            calibration=requests.words("calibration", given.get("calibration", ())),
            save=None if save is None else Path(save),
            budget=None if budget is None else calls.budget_share(budget),
            ranks=ranks,
            eta=_eta(given, kernels_asked),
            convention=cast(
                "Convention", _one_of("--ksvd-convention", given.get("ksvd_convention", "paper"), CONVENTIONS)
            ),
        )
        wish._check()
        return wish

    def _check(self) -> None:
        if not self.kernels:
            raise UsageError("No kernel is named.", "Give one, as in --kernel rbf.")
        for kernel in self.kernels:
            if self.fit:
                check_fit(kernel, alone=len(self.kernels) == 1)
            if self.heal and not kernel.has_gradient:
                raise UsageError(
                    f"{kernel.spelling} can't be healed: its weights have no gradient.",
                    "Leave out --heal, or choose another kernel.",
                )
        if len(self.kernels) > 1 and (self.heal or self.save):
            what = "heal" if self.heal else "save"
            raise UsageError(f"--{what} takes one kernel, not {len(self.kernels)}.", "Give one --kernel.")
        if self.calibration and not self.calibrates:
            raise UsageError(
                "Calibration text is given and nothing reads it.",
                "Add --fit, --heal, --budget or --ranks, or leave it out.",
            )
        if self.save is not None:
            check_folder(self.save)

    @property
    def calibrates(self) -> bool:
        """Whether calibration text is needed."""
        return self.fit or self.heal > 0 or any(kernel.info.needs_fit for kernel in self.kernels)

    @property
    def limit(self) -> float | None:
        """The rise of the loss within which ranks are to be chosen, or those given were; None for any other kernel."""
        return self.budget if self.ranks is None else self.ranks.budget

    def reach(
        self, layers: Sequence[int] | None, heads: Sequence[int] | None
    ) -> tuple[Sequence[int] | None, Sequence[int] | None]:
        """Which layers and heads are swapped: those asked for, or the plan's; raises UsageError for both."""
        if self.ranks is None:
            return layers, heads
        if layers is not None or heads is not None:
            raise UsageError(*BOTH)
        return self.ranks.settings.layers, self.ranks.settings.heads


def _ranks(given: Mapping[str, Any]) -> Plan | None:
    """The plan to take ranks from; raises UsageError where it can't be read, or where something else chooses too."""
    ranks = given.get("ranks")
    if ranks is None:
        return None
    if given.get("budget") is not None:
        raise UsageError("A budget finds ranks, and --ranks gives them.", "Leave out --budget or --ranks.")
    if given.get("part") is not None:
        raise UsageError(*BOTH)
    if not isinstance(ranks, Plan | str | os.PathLike):
        raise UsageError(
            f"ranks={calls.shown(ranks)} is neither a plan nor a path.", "Give the path of a plan from --plan."
        )
    return ranks if isinstance(ranks, Plan) else read_plan(calls.path("ranks", ranks))


def _without_rank(kernels: list[str]) -> str:
    """The spelling that stands for `rank` until the ranks are chosen; raises UsageError for any other kernel."""
    if kernels != ["rank"]:
        raise UsageError(
            f"A budget chooses the ranks of the kernel rank and of no other ({', '.join(kernels) or 'none is named'}), "
            "and a plan names them.",
            "Write --kernel rank --budget loss:1%, or --kernel rank --ranks plan.json.",
        )
    return f"rank:{MOST_DIRECTIONS}"


def _eta(given: Mapping[str, Any], kernels: Sequence[Kernel]) -> float | None:
    """η where primal attention is healed; raises UsageError where it, or its convention, is given for nothing."""
    regularised = bool(given.get("heal")) and any(kernel.info.form == "output" for kernel in kernels)
    eta = given.get("eta")
    if not regularised:
        if eta is not None or given.get("ksvd_convention", "paper") != "paper":
            raise UsageError(
                "Only the healing of primal attention is regularised by KSVD.",
                "Use --eta and --ksvd-convention with --kernel primal:… and --heal.",
            )
        return None
    if eta is None:
        return ETA
    if isinstance(eta, bool) or not isinstance(eta, int | float) or not 0 <= eta <= calls.LARGEST:
        raise UsageError(f"eta must be 0 or more, not {calls.shown(eta)}.", f"The published code has 0.01 to {ETA:g}.")
    return float(eta)


def _one_of(what: str, word: str | None, known: tuple[str, ...]) -> str | None:
    return None if word is None else checked_name(what, word, known)
