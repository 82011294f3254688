"""Options of `swap-kernel`, `ranks` and `heal`, and checks for contradictions between them.

Everything is checked before a model is loaded. Kernels are imported late, because they load torch, which `--help` does
not need.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from attnlens.arguments import LARGEST, format_argument, path
from attnlens.choices import BUDGETED, ETA, KERNEL, Convention, HealingGoal, HealingUnit, Part, Route, Sweep
from attnlens.errors import UsageError
from attnlens.files import check_folder
from attnlens.requests import fields
from attnlens.requests.fields import Whole, Words, checks, keyword, option, spelled, switch, words
from attnlens.requests.run_options import KeptRequest, ModelRequest, SharedRequest, new_folder, one_file, several_files

if TYPE_CHECKING:
    from attnlens.kernels import Kernel
    from attnlens.records import Plan

DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(|steps?|tok|k|ktok|M|Mtok|s|min|h)")
UNITS: dict[str, tuple[HealingUnit, float]] = {  # Unit as typed → counted quantity, number per unit
    **dict.fromkeys(("", "step", "steps"), ("steps", 1)),
    **{"tok": ("tokens", 1), **dict.fromkeys(("k", "ktok"), ("tokens", 1e3))},
    **dict.fromkeys(("M", "Mtok"), ("tokens", 1e6)),
    **{"s": ("seconds", 1), "min": ("seconds", 60), "h": ("seconds", 3600)},
}
STEPS = 200  # Default number of training steps
MOST_DIRECTIONS = 65536  # Rank above every head_dim, so that no dimension is removed
LATENTS = "([a-z]+=[a-z0-9]+(,|$))+"  # Pattern of the form of latents, such as `group=all,rotation=before`
LatentForm = Annotated[
    str,
    spelled(
        f"(?!.*rank=){LATENTS}", "--latents: cannot parse {}.", "Write, e.g., --latents group=all,rotation=before."
    ),
]


@dataclass(frozen=True)
class Amount:
    """Length of a training run."""

    number: float  # Number of units
    unit: HealingUnit

    def __str__(self) -> str:
        """Format for messages: `200 steps`, `1 second`."""
        return f"{self.number:,.10g} {self.unit.removesuffix('s') if self.number == 1 else self.unit}"

    @classmethod
    def of(cls, value: object) -> Amount:
        """Parse 200, "200", "2Mtok" or "30min"; return an Amount unchanged. Raise UsageError for other values and 0."""
        if isinstance(value, cls):
            return value
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST:
            return cls(value, "steps")
        match = DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
        unit, factor = UNITS[match[2] if match else ""]
        number = float(match[1]) * factor if match else 0
        if not 0 < number <= LARGEST or (unit != "seconds" and number != int(number)):
            remedy = "Give a number of steps (--train 200) or tokens (500ktok, 2Mtok), or a time (90s, 2h), above 0."
            raise UsageError(f"--train: cannot parse {format_argument(value)}.", remedy)
        return cls(number, unit)


CALIBRATION = "Calibration text for {}; repeatable. Default: windows of --text that are not used for evaluation."


class KernelRequest(ModelRequest):
    """Common options of `swap-kernel`, `ranks` and `heal`."""

    part: Part | None = option(
        "Change attention only in this part: `encoder`, `decoder` or `cross` (cross-attention); in models with "
        "several towers also `vision`, `audio` or `text`.",
        metavar="PART",
    )
    layers: fields.Layers | None = option(
        "Change attention only in these layers, e.g. `0-3,7`; `decoder.0-3` in models with several parts.",
        metavar="NUMBERS",
    )
    heads: fields.Numbers | None = option(
        "Change attention only in heads with these numbers in each layer, e.g. `0,5`.", metavar="NUMBERS"
    )
    controls: bool = keyword(
        "Also measure trivial alternatives to each kernel: a sink-window of the same size, `hard`, `uniform`, and the "
        "branches of filtered kernels and hybrids.",
        True,
    )
    generate: Whole = option(
        "Generate up to this many tokens greedily, and count those before the first difference from the original "
        "model's output.",
        64,
        least=0,
        most=65536,
    )
    prompts: fields.FilePlace = one_file(
        "File of prompts to continue, one per line. Default: the first halves of 16 evaluated windows.",
        python_only=True,
    )
    calibration: Words = several_files(CALIBRATION.format("fitting kernels"))
    save: fields.FolderPlace = new_folder("Save the changed model to this new or empty folder.")


fit_option = partial(
    switch, "Fit the kernel's free parameters to calibration text, separately for each head and without training."
)


class SwapRequest(SharedRequest, KernelRequest):
    """Options of `swap_kernel`, without the kernels."""

    sweep: Sweep | None = option(
        "Also swap `heads` or `layers` one at a time, and rank them by how much each swap harms the model.",
        metavar="WHAT",
    )
    predictors: bool = keyword(
        "Correlate each head's harm with the measures of `inspect` (in a sweep of at least eight heads).", True
    )
    fit: bool = fit_option()
    path: Route = keyword("Implementation of attention: `auto` (the fastest), `eager` or `fused`.", "auto")
    allow_signed: bool = keyword("Allow odd powers, which can make attention negative.", False)


class RanksRequest(KeptRequest, KernelRequest):
    """Options of `find_ranks`."""

    budget: fields.BudgetText | None = option(
        "Find the smallest rank per key head that keeps the rise in loss or perplexity within this limit "
        "(`loss:1%`, `ppl:2%`), and estimate the rise on held-out windows.",
        metavar="BUDGET",
        shown="loss:1%",
    )
    latents: LatentForm | None = option(
        "Form of the compressed keys (latents): `group=N|all` (key heads per latent), `rotation=before|after` (keys "
        "before or after RoPE), `metric=attention|output` (weight the errors in scores by the attention weights, or "
        "also by the effect of the scores on the predictions); join with commas.",
        metavar="FORM",
        shown="the best form on calibration text",
    )
    calibration: Words = several_files(CALIBRATION.format("choosing ranks"))
    ranks: object = one_file(
        "Take the rank of each key head from this plan (written by --plan or --json) instead of searching."
    )


class HealRequest(KeptRequest, KernelRequest):
    """Options of `heal`, without the kernel."""

    train: Annotated[Amount, checks(lambda _name, value: Amount.of(value))] = option(
        "Amount of training: steps (`200`), tokens (`20ktok`, `2Mtok`) or time (`90s`, "
        "`30min`, `2h`). W_Q, W_K and the kernel's parameters are trained.",
        Amount(STEPS, "steps"),
        metavar="AMOUNT",
        typed=str,
        shown=str(STEPS),
    )
    learn: HealingGoal = option(
        "Imitate the original model (`teacher`) or predict the text (`text`). With `text`, masked models learn to "
        "predict the masked tokens, and other models the next token.",
        "teacher",
        metavar="GOAL",
        noun="--learn",
    )
    calibration: Words = several_files(CALIBRATION.format("training and fitting"))
    batch: Whole | None = keyword(
        "Sequences per training step (default: batch_size; fewer if `train` is a small number of tokens).",
        least=1,
        most=65536,
    )
    rank: Whole | None = keyword("Restrict the change in each weight matrix to this rank.", least=1, most=65536)
    control: bool = switch(
        "Train the original model too (needs `--learn text`). The same weights are trained on the same batches."
    )
    checkpointing: bool = keyword("Recompute activations in the backward pass, to save memory.", False)
    eta: float | None = keyword(
        f"Weight of the KSVD regulariser of the kernel `primal` (default: {ETA}, as in the published code for language "
        "modelling; for Long Range Arena, that code uses 0.01).",
        least=0,
    )
    ksvd_convention: Convention = keyword("KSVD objective: as in the `paper`, or as in its published `code`.", "paper")
    fit: bool = fit_option()
    ranks: object = one_file(
        "For --kernel rank: take the rank of each key head from this plan, written by `ranks` with --plan or --json."
    )


def swap_kernels(spellings: str | Sequence[str], request: SwapRequest) -> list[Kernel]:
    """Parse the kernels of a swap. Raise UsageError for contradictions, OutputError for an unusable --save."""
    kernels = _parse_kernels(words("kernels", spellings), request)
    if not kernels:
        raise UsageError("No kernel given.", "Give one, e.g. --kernel rbf.")
    if request.save is not None:
        if len(kernels) > 1:
            raise UsageError(f"--save accepts a single kernel, not {len(kernels)}.", "Give one --kernel.")
        for name in ("shard", "jobs", "engine"):
            if getattr(request, name) not in (None, 1, "local"):
                problem = f"`save` requires all units to be computed in this process, which `{name}` prevents."
                raise UsageError(problem, f"Leave out either `{name}` or `save`.")
    for kernel in kernels if request.sweep == "heads" else ():
        if kernel.shares_latents:
            problem = f"With {kernel.spelling}, key heads share a latent, so heads cannot be swapped individually."
            raise UsageError(problem, "Use --sweep layers, or a kernel with group=1.")
    if request.calibration and not reads_calibration(kernels, request.fit):
        raise UsageError("--calibration has no effect without --fit.", "Add --fit, or leave out --calibration.")
    return kernels


def rank_kernels(request: RanksRequest) -> tuple[list[Kernel], Plan | None, RanksRequest]:
    """Return [kernel], the plan of --ranks, and the request with the plan's options. Raise UsageError if invalid."""
    plan, request = _read_plan(request)
    return _parse_kernels([_unlimited(request.latents if plan is None else plan.form)], request), plan, request


def heal_kernels(
    kernel: str | Sequence[str] | None, request: HealRequest
) -> tuple[list[Kernel], Plan | None, HealRequest]:
    """Return [kernel], the plan of --ranks, and the request with the plan's options. Raise UsageError if invalid."""
    plan, request = _read_plan(request)
    spellings = list(dict.fromkeys(words("kernel", (BUDGETED if plan else KERNEL) if kernel is None else kernel)))
    if len(spellings) != 1:
        raise UsageError(f"heal accepts a single kernel, not {len(spellings)}.", "Give one --kernel.")
    if plan is not None:
        if spellings != [BUDGETED]:
            raise UsageError(f"--ranks applies only to the kernel `{BUDGETED}`.", "Leave out --kernel, or --ranks.")
        spellings = [_unlimited(plan.form)]
    (new,) = kernels = _parse_kernels(spellings, request)
    if new.oracle:
        problem = f"{new.spelling} can't be healed: this kernel decomposes the evaluated text's own logits."
        raise UsageError(problem, "Omit `oracle`: only the fitted form can be trained.")
    if not new.has_gradient:
        problem = f"{new.spelling} can't be healed: its attention weights are not differentiable."
        raise UsageError(problem, "Measure its effect without training: attnlens swap-kernel.")
    if request.control and request.learn != "text":
        problem = "--control has no effect with --learn teacher: the original model would learn its own predictions."
        raise UsageError(problem, "Add --learn text, so that both models are trained on the text.")
    if new.info.form != "output" and (request.eta is not None or request.ksvd_convention != "paper"):
        name = "ksvd_convention" if request.eta is None else "eta"
        raise UsageError(
            f"`{name}` applies only to the kernel `primal`.", f"Leave out `{name}`, or use --kernel primal:8."
        )
    return kernels, plan, request


def reads_calibration(kernels: Sequence[Kernel], fit: bool) -> bool:
    """Return True if any kernel is fitted to calibration text; `fit` is the value of --fit."""
    return any(kernel.fits and kernel.fit_reads and (kernel.needs_fit or fit) for kernel in kernels)


def _parse_kernels(spellings: Sequence[str], request: KernelRequest) -> list[Kernel]:
    """Parse kernels and omit repeated ones. Raise UsageError for contradictions, OutputError for an unusable --save."""
    from attnlens.kernels import parsed

    files = {"text": request.text, "calibration": request.calibration, "prompts": [request.prompts]}
    reading = [name for name, paths in files.items() if "-" in paths]
    if len(reading) > 1:
        raise UsageError(
            f"Only one of {' and '.join(f'`{name}`' for name in reading)} can read stdin.", "Give files for the others."
        )
    if request.prompts is not None and not request.generate:
        raise UsageError("`prompts` has no effect with generate=0.", "Omit `prompts`, or set `generate` to at least 1.")
    if request.save is not None:
        check_folder(Path(request.save))
    for spelling in spellings:
        name, _, form = spelling.partition(":")
        if name == BUDGETED and (not form or re.fullmatch(LATENTS, form)) and "rank=" not in form:
            more = f",{form}" if form else ""
            remedy = f"Write --kernel rank:16{more}, or find ranks: attnlens ranks --budget loss:1%."
            raise UsageError(f"Kernel `{BUDGETED}` needs a rank, the number of dimensions kept per head.", remedy)
    allow_signed, fit = (getattr(request, name, False) for name in ("allow_signed", "fit"))
    parse = partial(parsed, allow_signed=allow_signed)
    kernels = list({kernel.spelling: kernel for kernel in map(parse, spellings)}.values())
    for kernel in kernels if fit else ():
        if len(kernels) == 1 and not kernel.fits:
            remedy = "Omit --fit, or choose a kernel with free parameters; see `attnlens list kernels`."
            raise UsageError(f"{kernel.info.name} has no free parameters to fit.", remedy)
        if kernel.oracle:
            problem = f"{kernel.spelling} can't be fitted: this kernel decomposes the evaluated text's own logits."
            raise UsageError(problem, "Leave out --fit, or `oracle`.")
        if kernel.tie is not None:
            problem = f"{kernel.spelling} can't be fitted, because the tie `{kernel.tie}` changes the head's logits."
            raise UsageError(problem, f"Leave out --fit, or the tie `{kernel.tie}`.")
    return kernels


R = TypeVar("R", RanksRequest, HealRequest)


def _read_plan(request: R) -> tuple[Plan | None, R]:
    """Return the plan of --ranks (or None), and the request with the plan's layers, heads and part added.

    Raise UsageError if the plan can't be read, or if the request sets an option that the plan determines.
    """
    from attnlens.records import Plan, read_plan

    ranks = request.ranks
    if ranks is None:
        return None, request
    if not isinstance(ranks, Plan | str | os.PathLike):
        raise UsageError(f"ranks={format_argument(ranks)} is neither a plan nor a path.", "Give the path of a plan.")
    plan = ranks if isinstance(ranks, Plan) else read_plan(path("ranks", ranks))
    selection: dict[str, object] = {"layers": plan.settings.layers, "heads": plan.settings.heads, "part": plan.part}
    for name in ("budget", "latents", *selection):
        if getattr(request, name, None) is not None:
            raise UsageError(f"The plan of --ranks already sets --{name}.", f"Leave out --{name} or --ranks.")
    return plan, request.with_options(ranks=plan, **selection)


def _unlimited(form: str | None) -> str:
    """Return the spelling of the kernel `rank` without a limit on the rank, used until ranks are chosen."""
    return f"{BUDGETED}:{MOST_DIRECTIONS}" + (f",{form}" if form else "")
