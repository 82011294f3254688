"""What can be typed after `attnlens swap-kernel`, and what is done with it?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from attnlens.calls import budget_share
from attnlens.cli import options as opt
from attnlens.cli.delivery import deliver
from attnlens.cli.inputs import Inputs
from attnlens.cli.outputs import Outputs
from attnlens.cli.show import guarded, interruptible_at_once, say
from attnlens.cli.verdict import end_strictly
from attnlens.cli.work import named_model, working
from attnlens.errors import UsageError
from attnlens.registry import checked_name

Kernels = Annotated[
    list[str] | None,
    opt.option(
        "--kernel",
        help="Which kernel, as in `rbf:gamma=1+window:64`; repeatable, to compare several. "
        "`attnlens list kernels` names them.",
        metavar="NAME",
        show_default="rbf",
    ),
]
Part = Annotated[
    str | None, opt.option("--part", help="Only this part: `encoder`, `decoder` or `cross`.", metavar="PART")
]
Sweep = Annotated[
    str | None,
    opt.option("--sweep", help="Swap each of the `heads` or `layers` alone too, and rank them.", metavar="WHAT"),
]
Fit = Annotated[
    bool, opt.option("--fit", help="Choose each head's free kernel parameters from calibration text, in closed form.")
]
Heal = Annotated[
    int,
    opt.option(
        "--heal",
        min=0,
        help="Train W_Q and W_K (primal: its own maps too) towards the original model for so many steps.",
        metavar="STEPS",
    ),
]
Budget = Annotated[
    str | None,
    opt.option(
        "--budget",
        help="With `--kernel rank`: choose each key head's rank, the smallest within this rise, as in `loss:1%`, and "
        "promise what they cost from windows that chose nothing.",
        metavar="BUDGET",
    ),
]
Plan = Annotated[
    str | None,
    opt.option("--plan", panel=opt.OUTPUT, help="Write the ranks of --budget or --ranks as JSON.", metavar="FILE"),
]
Ranks = Annotated[
    str | None,
    opt.option(
        "--ranks",
        panel=opt.INPUT,
        help="With `--kernel rank`: take each key head's rank from a plan of --plan, and search for none.",
        metavar="FILE",
    ),
]
Eta = Annotated[
    float | None,
    opt.option(
        "--eta",
        help="Weight of the KSVD regulariser when `primal` is healed.",
        metavar="NUMBER",
        show_default="0.1",
    ),
]
KsvdConvention = Annotated[
    str,
    opt.option(
        "--ksvd-convention", help="How its objective is counted: as in the `paper` or in its `code`.", metavar="NAME"
    ),
]
Calibration = Annotated[
    list[Path] | None,
    opt.option(
        "--calibration",
        panel=opt.INPUT,
        help="Text file for --fit, --heal, --budget and --ranks; repeatable: each gives its share. Default: windows of "
        "the evaluated text that are not evaluated.",
        metavar="FILE",
    ),
]
Save = Annotated[
    str | None, opt.option("--save", panel=opt.OUTPUT, help="Write the changed model to this folder.", metavar="DIR")
]
Way = Annotated[
    str,
    opt.option("--path", help="How attention is computed: `auto` (the fastest), `eager` or `fused`.", metavar="PATH"),
]
AllowSigned = Annotated[
    bool, opt.option("--allow-signed", help="Allow odd powers, under which attention can be negative.")
]


@guarded
@opt.also(opt.FED, opt.LOADED, opt.SHOWN)
def swap_kernel(
    context: typer.Context,
    model: opt.Model = None,
    kernel: Kernels = None,
    part: Part = None,
    sweep: Sweep = None,
    fit: Fit = False,
    budget: Budget = None,
    ranks: Ranks = None,
    plan: Plan = None,
    heal: Heal = 0,
    eta: Eta = None,
    ksvd_convention: KsvdConvention = "paper",
    path: Way = "auto",
    allow_signed: AllowSigned = False,
    calibration: Calibration = None,
    seed: opt.Seed = 0,
    save: Save = None,
    strict: opt.Strict = False,
    **_shared: Any,
) -> None:
    """Re-run a model with another attention kernel, and measure what that does to it."""
    _swap(model, context.params)


def _swap(model: str | None, given: Mapping[str, Any]) -> None:
    outputs = Outputs.of(given)
    settings = opt.asked(given) | opt.loading(given) | asked(given)
    name = named_model(model, quiet=outputs.quiet)
    outputs.check(Inputs.of(given, [name]))
    with interruptible_at_once():
        from attnlens import run

    stopped, unsaved = False, None
    with working(outputs) as tell:
        try:
            report = run.swap_kernel(name, progress=tell, **settings)
        except run.Interrupted as stop:
            report, stopped = stop.report, True
        except run.UnsavedError as error:
            report, unsaved = error.report, error
    if given["save"] is not None and unsaved is None and not outputs.quiet:
        say(f"Saved the changed model to {given['save']}")
    deliver(outputs, report, interrupted=stopped)
    if unsaved is not None:
        raise unsaved
    if given["strict"]:
        end_strictly(report)


def asked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those among the command's parameters that say what is swapped, checked.

    Raises UsageError for an unknown part, path or sweep (did you mean), for a folder without a name, and where stdin
    should be two texts; TextError for a stdin that is not there.
    """
    from attnlens.records import CONVENTIONS, PARTS, PATHS, SWEEPS

    known = {"part": PARTS, "path": PATHS, "sweep": SWEEPS, "ksvd_convention": CONVENTIONS}
    spelled = {"ksvd_convention": "--ksvd-convention"}
    chosen = {
        option: None if given[option] is None else checked_name(spelled.get(option, option), given[option], names)
        for option, names in known.items()
    }
    calibration = opt.texts("calibration", given["calibration"] or ())
    if "-" in calibration and Path("-") in (given["text"] or ()):
        raise UsageError("--text and --calibration both read stdin.", "Give one of them a file.")
    save = given["save"]
    if save is not None and (not save.strip() or "\0" in save):
        raise UsageError("--save names no folder.", "Give a path after --save, or leave it out.")
    if given["plan"] is not None and given["budget"] is None and given["ranks"] is None:
        raise UsageError("--plan is given and there is none to write.", "Add --budget, as in --budget loss:1%.")
    if given["ranks"] is not None and (not given["ranks"].strip() or "\0" in given["ranks"]):
        raise UsageError("--ranks names no file.", "Give the path of a plan after --ranks, or leave it out.")
    if given["budget"] is not None:
        budget_share(given["budget"])
    elif given["ranks"] is None:
        _check_kernels(given["kernel"] or (), allow_signed=given["allow_signed"])
    plain = {name: given[name] for name in ("fit", "heal", "save", "allow_signed", "eta", "budget", "ranks")}
    return {**chosen, **plain, "kernels": given["kernel"] or ["rbf"], "calibration": calibration}


def _check_kernels(spellings: Sequence[str], *, allow_signed: bool) -> None:
    """Raise UsageError for a kernel that does not exist, or not with these parameters."""
    from attnlens.kernels import parsed

    for words in spellings:
        parsed(words, allow_signed=allow_signed)
