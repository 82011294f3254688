"""The commands that measure, compare or verify models, and those that change the attention kernel."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING

import typer

from attnlens import requests
from attnlens.choices import KERNEL, SHOWN
from attnlens.cli import parameters as opt
from attnlens.cli.exit_codes import PARTLY
from attnlens.cli.outputs import check_reading, checked_model, named_model, run_command
from attnlens.cli.show import say
from attnlens.errors import IdentityError, UsageError
from attnlens.files import local_path, write_atomically
from attnlens.requests import CompareRequest, DoctorRequest, HealRequest, RanksRequest, SwapRequest
from attnlens.requests.swap import heal_kernels, rank_kernels, swap_kernels
from attnlens.wording import format_count, join_items

if TYPE_CHECKING:
    from attnlens.records import Plan, Report

HEAD = opt.option(
    "--head", str | None, "Analyse only this head, e.g. `3.7` (layer 3, head 7) or `decoder.3.7`.", metavar="LAYER.HEAD"
)
WINDOWS_CSV = opt.output("--windows-csv", "Write the values of each window as CSV: one row per window and head.")


@opt.with_options(
    opt.MODEL | HEAD | WINDOWS_CSV | opt.STRICT,
    opt.parameters(requests.InspectRequest),
    opt.OUTPUT_OPTIONS | opt.output("--csv", "Write a CSV file with one row per head."),
)
def inspect(context: typer.Context) -> None:
    """Measure the symmetry, definiteness and spectrum of each head. With `--analyzer selection`, compare each head with
    the max-margin SVM that selects the same tokens."""
    params = context.params
    if params["head"] is None and params["show"] == SHOWN:
        raise UsageError("--show selection requires a single head.", "Add --head, e.g. --head 3.7.")
    selected = requests.one_head(params["head"], params["layers"], params["heads"])
    request = opt.build(requests.InspectRequest, params, **selected)
    check_reading(request)
    if params["windows_csv"] is not None and request.source == "weights":
        raise UsageError("--source weights does not read windows.", "Leave out --windows-csv, or --source weights.")
    name = named_model(params)
    run_command(
        params, [name], request, lambda analyses, progress: analyses.run_inspect(name, request, progress=progress)
    )


NAMES = "hub id, folder, file, `demo`, or a report (`.json`)"
FIRST = opt.argument("first", f"The reference model: {NAMES}.", str, "FIRST")
SECOND = opt.argument("second", f"The second model: {NAMES}. --adapter applies to this model.", str, "SECOND")


@opt.with_options(FIRST | SECOND | opt.STRICT, opt.parameters(CompareRequest), opt.OUTPUT_OPTIONS)
def compare(context: typer.Context) -> None:
    """Find the heads that differ between two models (at a controlled false-discovery rate), and diagnose the cause."""
    params = context.params
    request = opt.build(CompareRequest, params)
    check_reading(request)
    names = [checked_model(params[name]) for name in ("first", "second")]
    models = [name for name in names if not name.endswith(".json")]
    run_command(
        params, models, request, lambda analyses, progress: analyses.compare(*names, progress=progress, request=request)
    )


UNUSED = ("batch_size", "placement", "intervals", "allow_foreign_text")  # Options without effect on `doctor`


JUNIT = opt.output("--junit", "Write a JUnit XML file with one test case per site, backend and mask.")
STRICT = opt.option("--strict", bool, "Exit with code 3 if anything requested was not checked.")


@opt.with_options(
    opt.MODEL | JUNIT | STRICT, opt.parameters(DoctorRequest, without=UNUSED), opt.TABLE | opt.REPORT_OPTIONS
)
def doctor(context: typer.Context) -> None:
    """Verify that attnlens reads a model's attention correctly, that the model's attention backends agree, and that its
    masks are correct. Exit 2 if anything is wrong or nothing could be verified; with --strict, exit 3 if a part was not
    checked."""
    params = context.params
    request, name = opt.build(DoctorRequest, params), named_model(params)
    report = run_command(
        params, [name], request, lambda analyses, progress: analyses.doctor(name, progress=progress, request=request)
    )
    if report.summary.verdict == "differs":
        raise failure(report)
    backends = report.backends or []
    if any(each.verdict == "differs" for each in backends):
        raise backend_failure(report)
    if not params["strict"]:
        return
    from attnlens.report.sections.checked import untested_masks  # late, because it loads the records

    left_out = any(each.verdict == "not run" for each in backends) or bool(untested_masks(report))
    if report.summary.verdict != "agrees" or left_out:
        raise typer.Exit(PARTLY)


def failure(report: Report) -> IdentityError:
    """Return the error with which `doctor` ends if the model's attention differs or could not be verified."""
    failed = [check.site for check in report.doctor if not check.passed]
    where = "this model" if not failed else "this site" if len(failed) == 1 else "these sites"
    if failed:
        problem = (
            f"Attention differs at {len(failed)} of {format_count(len(report.doctor), 'site')}: {join_items(failed)}."
        )
    elif overflow := report.summary.reasons.get("identity_error"):
        problem = f"Nothing could be verified: {overflow}."
        return IdentityError(problem, "Run the model in bfloat16 or float32: --dtype bfloat16.")
    elif (error := report.summary.identity_error) is None:
        problem = "The model's outputs are not finite or cannot be compared, so nothing could be verified."
    else:
        problem = f"Attention recomputed by attnlens changes the model's outputs by {error:.1e}."
    save = f"`attnlens doctor {quote(report.model.id)} --json FILE`"
    return IdentityError(problem, f"Do not trust numbers from {where}; {save} saves all errors for a bug report.")


def backend_failure(report: Report) -> IdentityError:
    """Return the error with which `doctor` ends if backends or masks are wrong; the message names them."""
    failed = []
    for each in report.backends or []:
        masks = [mask.mask for mask in each.masks if mask.verdict == "differs"]
        if each.verdict == "differs":
            failed.append(f"{each.backend} ({', '.join(masks) or 'outputs'})")
    problem = f"Attention backends or masks of {report.model.id} are wrong: {join_items(failed)}."
    return IdentityError(problem, "Use another backend, or correct the mask; --table shows all faults.")


def _kernel_option(more: str) -> opt.Parameters:
    text = f"New kernel, e.g. `rbf:gamma=1+window:64`; see `attnlens list kernels`.{more}"
    return opt.option("--kernel", list[str] | None, text, metavar="NAME", shown=KERNEL)


@opt.with_options(
    opt.MODEL | _kernel_option(" Repeat the option to compare several kernels.") | opt.WINDOWS_CSV | opt.STRICT,
    opt.parameters(SwapRequest, without=("engine", "shard")),
    opt.OUTPUT_OPTIONS,
)
def swap_kernel(context: typer.Context) -> None:
    """Run a model with a different attention kernel, and measure the effect."""
    params = context.params
    request, kernels = opt.build(SwapRequest, params), tuple(params["kernel"] or [KERNEL])
    swap_kernels(kernels, request)  # checked here too, because importing `analyses` takes seconds
    name = named_model(params)
    run_command(
        params, [name], request, lambda analyses, progress: analyses.swap_work(name, kernels, request, progress).run()
    )


PLAN = opt.output("--plan", "Write the ranks as a JSON file that --ranks reads.")


@opt.with_options(opt.MODEL | PLAN | opt.WINDOWS_CSV | opt.STRICT, opt.parameters(RanksRequest), opt.OUTPUT_OPTIONS)
def ranks(context: typer.Context) -> None:
    """Find the smallest rank of each key head within a loss budget, and measure the model with these ranks."""
    request = opt.build(RanksRequest, context.params)
    request = request.with_options(ranks=rank_kernels(request)[1])  # a plan from a pipe can only be read once
    name = named_model(context.params)

    def write(plan: Plan) -> None:
        if path := context.params["plan"]:
            write_atomically(local_path(path, "--plan"), plan.to_json().encode())
            say(f"Wrote the ranks to {path}; next, the model is evaluated with these ranks.")

    run_command(
        context.params,
        [name],
        request,
        lambda analyses, progress: analyses.rank_work(name, request, progress, write).run(),
    )


@opt.with_options(
    opt.MODEL | _kernel_option("") | opt.STRICT, opt.parameters(HealRequest, without=("generate",)), opt.OUTPUT_OPTIONS
)
def heal(context: typer.Context) -> None:
    """Replace the kernel, then train the swapped heads on the original model's predictions or on text."""
    params = context.params
    request, kernel = opt.build(HealRequest, params), params["kernel"] or None
    request = request.with_options(ranks=heal_kernels(kernel, request)[1])
    name = named_model(params)
    run_command(
        params, [name], request, lambda analyses, progress: analyses.heal_work(name, kernel, request, progress).run()
    )
