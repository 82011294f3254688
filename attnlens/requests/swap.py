"""Check the options of swap_kernel against each other, before anything heavy is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attnlens import arguments
from attnlens.arguments import Budget
from attnlens.choices import BUDGETED, ETA, Convention, Part, Route, Sweep
from attnlens.errors import UsageError
from attnlens.files import check_folder
from attnlens.kernels import Kernel, parsed
from attnlens.records import Plan, read_plan
from attnlens.requests.fields import Words, words
from attnlens.requests.healing import HealOptions
from attnlens.requests.run_options import SwapRequest

MOST_DIRECTIONS = 65536
"""Rank above every head_dim, so that it removes nothing."""
BOTH = "A plan says which layers and heads have which rank.", "Leave out --layers, --heads and --part, or --ranks."


@dataclass(frozen=True)
class SwapOptions:
    """Checked options of one run."""

    kernels: list[Kernel]
    """New kernels."""
    part: Part | None
    path: Route
    sweep: Sweep | None
    predictors: bool
    """True if measures are correlated with the harm of the swept heads."""
    fit: bool
    heal: HealOptions | None
    calibration: list[str]
    save: Path | None
    budget: Budget | None
    """Largest allowed rise."""
    ranks: Plan | None
    """Plan whose ranks are used instead of a budget."""
    form_named: bool
    """True if the form of the latents was given, so that it is not chosen."""
    eta: float | None
    """Weight of the KSVD regulariser; None without regularisation."""
    convention: Convention
    controls: bool
    """True if simple alternatives are measured too."""
    generate: int
    """Maximum number of tokens of greedy continuations."""
    prompts: str | None
    """File of the texts to continue; None: evaluated windows."""

    @classmethod
    def of(cls, kernels: Words, request: SwapRequest) -> SwapOptions:
        """Build and check the options. Raise UsageError for contradictions, OutputError for an unusable folder."""
        texts = {"text": request.text, "calibration": request.calibration, "prompts": (request.prompts,)}
        reading = [f"--{name}" for name, files in texts.items() if "-" in files]
        if len(reading) > 1:
            raise UsageError(f"{' and '.join(reading)} both read stdin.", "Give one of them a file.")
        shared = [name for name in ("shard", "jobs", "engine") if getattr(request, name) not in (None, 1, "local")]
        if request.save is not None and shared:
            raise UsageError(
                f"--save writes the one model that this process makes, and --{shared[0]} shares several kernels out.",
                f"Leave out --{shared[0]}, or --save.",
            )
        spellings = dict.fromkeys(words("kernels", kernels))
        ranks = _ranks(request)
        if request.budget is not None or ranks is not None:
            spellings = dict.fromkeys([_without_rank(list(spellings), ranks)])
        for spelling in spellings:
            name, _, form = spelling.partition(":")
            if name == BUDGETED and _unranked(form) == form:
                more, alone = (f",{form}", f":{form}") if form else ("", "")
                raise UsageError(
                    f"{spelling} names no rank: how many dimensions r are kept of head_dim.",
                    f"Write --kernel rank:16{more}, or --kernel rank{alone} --budget loss:1%, which finds the ranks.",
                )
        each = (parsed(spelling, allow_signed=request.allow_signed) for spelling in spellings)
        kernels_asked = list({kernel.spelling: kernel for kernel in each}.values())
        plain = ("path", "sweep", "predictors", "fit", "calibration", "controls", "generate")
        options = cls(
            **{name: getattr(request, name) for name in plain},
            kernels=kernels_asked,
            part=request.part if ranks is None else ranks.part,
            heal=HealOptions.of(request),
            save=None if request.save is None else Path(request.save),
            budget=None if request.budget is None else arguments.budget(request.budget),
            ranks=ranks,
            form_named=":" in next(iter(words("kernels", kernels)), ""),
            eta=_eta(request, kernels_asked),
            convention=request.ksvd_convention,
            prompts=None if request.prompts is None else arguments.path("prompts", request.prompts),
        )
        options._check()
        return options

    def _check(self) -> None:
        if not self.kernels:
            raise UsageError("No kernel is named.", "Give one, as in --kernel rbf.")
        for kernel in self.kernels:
            if self.fit and len(self.kernels) == 1 and not kernel.fits:
                raise UsageError(
                    f"{kernel.info.name} has no free parameter that could be fitted.",
                    "Leave out --fit, or choose a kernel that has one: `attnlens list kernels` shows them.",
                )
            if self.fit and kernel.oracle:
                raise UsageError(
                    f"{kernel.spelling} can't be fitted: it takes the evaluated text's own logits apart.",
                    "Leave out --fit, or oracle.",
                )
            if self.fit and kernel.tie is not None:
                raise UsageError(
                    f"{kernel.spelling} can't be fitted: under {kernel.tie} its logits are not those of the head's "
                    "own.",
                    f"Leave out --fit, or {kernel.tie}.",
                )
            if self.heal is not None and kernel.oracle:
                raise UsageError(
                    f"{kernel.spelling} can't be healed: it takes the evaluated text's own logits apart.",
                    "Leave out --heal, or oracle: the fitted form is a model.",
                )
            if self.heal is not None and not kernel.has_gradient:
                raise UsageError(
                    f"{kernel.spelling} can't be healed: its weights have no gradient.",
                    "Leave out --heal, or choose another kernel.",
                )
        if len(self.kernels) > 1 and (self.heal is not None or self.save):
            what = "save" if self.heal is None else "heal"
            raise UsageError(f"--{what} takes one kernel, not {len(self.kernels)}.", "Give one --kernel.")
        if self.sweep == "heads":
            joined = next((kernel for kernel in self.kernels if kernel.joins), None)
            if joined is not None or (self.limit is not None and not self.form_named and self.ranks is None):
                name = "A budget" if joined is None else joined.spelling
                raise UsageError(
                    f"{name} lets key heads share a latent, so that no head can be swapped alone.",
                    "Use --sweep layers, or rank:group=1.",
                )
        if self.calibration and not self.calibrates:
            raise UsageError(
                "Calibration text is given and nothing reads it.",
                "Add --fit, --heal, --budget or --ranks, or leave it out.",
            )
        if self.prompts is not None and not self.generate:
            raise UsageError("Prompts are given and nothing continues them.", "Leave out prompts, or --generate 0.")
        if self.save is not None:
            check_folder(self.save)

    @property
    def calibrates(self) -> bool:
        """True if calibration text is needed."""
        fitted = any(kernel.fits and kernel.fit_reads and (kernel.needs_fit or self.fit) for kernel in self.kernels)
        return fitted or self.heal is not None

    @property
    def limit(self) -> Budget | None:
        """Rise that limits the choice of ranks, or limited it for given ranks; None for any other kernel."""
        return self.budget if self.ranks is None else Budget(self.ranks.unit, self.ranks.budget)

    def reach(
        self, layers: Sequence[int] | None, heads: Sequence[int] | None
    ) -> tuple[Sequence[int] | None, Sequence[int] | None]:
        """Return the layers and heads to swap, as requested or from the plan. Raise UsageError if both define them."""
        if self.ranks is None:
            return layers, heads
        if layers is not None or heads is not None:
            raise UsageError(*BOTH)
        return self.ranks.settings.layers, self.ranks.settings.heads


def _ranks(request: SwapRequest) -> Plan | None:
    """Return the plan to take ranks from. Raise UsageError if it can't be read, or if other options conflict."""
    ranks = request.ranks
    if ranks is None:
        return None
    if request.budget is not None:
        raise UsageError("A budget finds ranks, and --ranks gives them.", "Leave out --budget or --ranks.")
    if request.part is not None:
        raise UsageError(*BOTH)
    if not isinstance(ranks, Plan | str | os.PathLike):
        raise UsageError(
            f"ranks={arguments.shown(ranks)} is neither a plan nor a path.", "Give the path of a plan from --plan."
        )
    return ranks if isinstance(ranks, Plan) else read_plan(arguments.path("ranks", ranks))


def _without_rank(kernels: list[str], plan: Plan | None) -> str:
    """Return the spelling until ranks are chosen, its form as typed or the plan's. Raise UsageError for others."""
    name, _, form = kernels[0].partition(":") if len(kernels) == 1 else ("", "", "")
    unranked = _unranked(form)
    if name != BUDGETED or unranked is None:
        raise UsageError(
            f"A budget chooses the ranks of the kernel {BUDGETED} and of no other "
            f"({', '.join(kernels) or 'none is named'}), and a plan names them.",
            "Write --kernel rank --budget loss:1%, or --kernel rank --ranks plan.json.",
        )
    if unranked != form:
        spelling = BUDGETED + (f":{unranked}" if unranked and plan is None else "")
        raise UsageError(
            f"A budget chooses the ranks, and a plan names them: {kernels[0]} names one too.",
            f"Leave out the rank: --kernel {spelling}.",
        )
    if plan is not None and form:
        raise UsageError("The plan says which form its latents have.", "Write --kernel rank --ranks plan.json.")
    form = form if plan is None else plan.form
    return f"{BUDGETED}:{MOST_DIRECTIONS}" + (f",{form}" if form else "")


def _unranked(form: str) -> str | None:
    """Return the text after `rank:` without a rank; None if it can't be parsed."""
    parts = [part for part in form.split(",") if re.fullmatch(r"(rank=)?[0-9]+", part) is None]
    unranked = ",".join(parts)
    return unranked if re.fullmatch(r"([a-z]+=[a-z0-9]+(,|$))*", unranked) else None


def _eta(request: SwapRequest, kernels: Sequence[Kernel]) -> float | None:
    """Return η if primal attention is healed. Raise UsageError if it, or its convention, would be ignored."""
    regularised = request.heal.number > 0 and any(kernel.info.form == "output" for kernel in kernels)
    eta = request.eta
    if not regularised:
        if eta is not None or request.ksvd_convention != "paper":
            raise UsageError(
                "Only the healing of primal attention is regularised by KSVD.",
                "Use --eta and --ksvd-convention with --kernel primal:… and --heal.",
            )
        return None
    if eta is None:
        return ETA
    if isinstance(eta, bool) or not isinstance(eta, int | float) or not 0 <= eta <= arguments.LARGEST:
        raise UsageError(
            f"eta must be 0 or more, not {arguments.shown(eta)}.", f"The published code has 0.01 to {ETA:g}."
        )
    return float(eta)
