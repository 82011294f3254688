"""The command `inspect`."""

from __future__ import annotations

import typer

from attnlens import requests
from attnlens.choices import SHOWN
from attnlens.cli import parameters as opt
from attnlens.cli.outputs import check_reading, named_model, run_command
from attnlens.cli.show import guard
from attnlens.errors import UsageError

HEAD = opt.option("--head", str | None, "Only this head, e.g. `3.7`: layer 3, head 7.", metavar="LAYER.HEAD")


@guard
@opt.with_options(
    opt.MODEL | HEAD | opt.WINDOWS_CSV | opt.TABLE | opt.STRICT,
    opt.parameters(requests.InspectRequest),
    opt.OUTPUT_OPTIONS,
)
def inspect(context: typer.Context) -> None:
    """Measure symmetry, definiteness and spectrum of each head; with `--analyzer selection`, compare it with an SVM."""
    params = context.params
    if params["head"] is None and params["show"] == SHOWN:
        raise UsageError("--show selection requires a single head.", "Add --head, e.g. --head 3.7.")
    selected = requests.one_head(params["head"], params["layers"], params["heads"])
    request = opt.build(requests.InspectRequest, params, **selected)
    check_reading(request)
    if params["windows_csv"] is not None and request.source == "weights":
        raise UsageError("With source=weights no windows are read.", "Leave out --windows-csv, or --source weights.")
    name = named_model(params)
    run_command(params, [name], request, lambda analyses, tell: analyses.run_inspect(name, request, progress=tell))
