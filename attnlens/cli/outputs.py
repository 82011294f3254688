"""Check the model, inputs and outputs of a command, run the command with progress, and deliver the report."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

import typer

from attnlens.arguments import MODEL_FILES, dataset_rows
from attnlens.cli.exit_codes import INTERRUPTED, PARTLY, READER_LEFT
from attnlens.cli.parameters import option_name
from attnlens.cli.show import (
    RESUME,
    ReportProgress,
    complain,
    console,
    expect_json,
    interruptible_at_once,
    progress,
    say,
)
from attnlens.errors import AttnlensError, OutputError, TextError, UsageError, empty_text
from attnlens.files import (
    caption_file,
    check_readable,
    check_writable,
    local_path,
    make_folder,
    with_home,
    write_atomically,
)
from attnlens.requests import Request
from attnlens.requests.run_options import SharedRequest
from attnlens.requests.swap import KernelRequest

if TYPE_CHECKING:
    from attnlens.records import Report
    from attnlens.report.sections.section import Document
    from attnlens.report.shapes import Written
    from attnlens.requests.run_options import SeriesRequest

Work = Callable[[ModuleType, ReportProgress], "Report | tuple[Report, Callable[[], None]]"]
"""Function that takes the module `cli.analyses` and a progress function. It returns a report, or a report and a
function to call after the report is delivered."""
NO_MODEL = "No model given: using demo, the small model that ships with attnlens."


def named_model(params: Mapping[str, str | None]) -> str:
    """Return the requested model's name; if none is given, return demo and, unless --quiet, print a message.

    Raise UsageError if the name is invalid.
    """
    name = params["model"]
    if name is None and not params["quiet"]:
        say(NO_MODEL)
    return "demo" if name is None else checked_model(name)


def checked_model(name: str) -> str:
    """Return the model's name. Raise UsageError if the name is empty, contains a NUL, or is `-` for stdin."""
    if not name.strip() or "\0" in name or name == "-":
        problem = "A model can't be read from stdin." if name == "-" else "The model's name is empty or contains a NUL."
        raise UsageError(problem, "Give a folder, a file, a hub id or `demo`.")
    return name


def check_reading(request: SeriesRequest) -> None:
    """Raise UsageError for options that the requested source does not support."""
    from attnlens.requests import reading  # late, because it loads the records

    show = getattr(request, "show", None)
    reading.choose_analyzers(reading.settings(request), request.analyzers, request.select, show)
    reading.refuse_unread(request, request.source)


@contextmanager
def working(outputs: Outputs, options: Collection[str] = ()) -> Iterator[tuple[ModuleType, ReportProgress]]:
    """Import `attnlens.cli.analyses`; inside the block, show progress and silence transformers.

    `options` are the names of the options that the command accepts.
    """
    with interruptible_at_once():
        from attnlens.cli import analyses
        from attnlens.models.loading.building import silence_logging

    gc.freeze()  # imported objects stay alive, so the collector needn't scan them
    gc.enable()
    shown = not (outputs.quiet or outputs.no_progress)
    with silence_logging(), progress(shown=shown, options=options) as report_progress:
        yield analyses, report_progress


def run_command(
    params: Mapping[str, Any],
    models: Sequence[str],
    request: Request,
    work: Work,
    options: Collection[str] | None = None,
) -> Report:
    """Check the outputs, run the work, and deliver and return the report.

    If the user interrupts the work, the report contains the finished part. `options` are the names of the options that
    this run accepts, by default the request's fields. Raise OutputError if a changed model could not be saved.
    With --strict, exit with PARTLY if parts are missing or stored tensors are unused; `doctor` handles --strict itself.
    """
    outputs = Outputs.of(params)
    outputs.check(find_inputs(params, models))
    if isinstance(request, SharedRequest):
        start_workers(request.engine, request.jobs)
    stopped, unsaved, written = False, None, None
    with working(outputs, type(request).model_fields if options is None else options) as (analyses, report_progress):
        try:
            result = work(analyses, report_progress)
            report, written = result if isinstance(result, tuple) else (result, None)
        except analyses.Interrupted as stop:
            report, stopped = stop.report, True
        except analyses.UnsavedError as error:
            report, unsaved = error.report, error
    changed = isinstance(request, KernelRequest) and request.save is not None and unsaved is None
    saved = [f"the changed model to {outputs.save}"] * changed
    deliver(outputs, report, interrupted=stopped, saved=saved, params=params)
    if unsaved is not None:
        raise unsaved
    if written is not None:
        written()
    if params.get("strict") and report.summary.verdict is None:  # `doctor` applies --strict itself
        from attnlens.report.sections.facts import state_unexpected

        for sentence in state_unexpected(report):
            say(sentence)
        if not report.coverage.complete:
            say(report.coverage.sentence)
        if report.model.unexpected or not report.coverage.complete:
            raise typer.Exit(PARTLY)
    return report


def start_workers(engine: str, jobs: int) -> None:
    """If the engine is `local`, start the server that imports torch and then forks the workers of --jobs."""
    if engine == "local":
        from attnlens.runs.work import start_server

        start_server(jobs, "attnlens.cli.analyses")


DATA, PICTURES = ("json", "csv", "windows_csv", "markdown", "plan", "junit"), ("figure", "html")  # Files to write
STDOUT = "-"
HUB = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(@[^\\]+)?")  # Pattern of a hub id; local paths can match too
TEXT_OPTIONS = ("pairs", "labelled", "text", "calibration", "series")  # `text`, `calibration`: files or datasets
TEXT_REMEDY = "Give a plain text file in UTF-8."


def find_inputs(options: Mapping[str, Any], models: Sequence[str]) -> dict[str, str]:
    """Return a description of each input, keyed by real path. Raise AttnlensError if an input can't be read."""
    inputs: dict[str, str] = {}
    for option in TEXT_OPTIONS:
        named = options.get(option) or ()
        for path in map(Path, [named] if isinstance(named, str) else named):
            dataset = dataset_rows(str(path)) if option in ("text", "calibration") else None
            if dataset is not None:
                inputs[os.path.realpath(with_home(dataset.name))] = f"a file of the dataset that --{option} reads"
            elif str(path) != "-":
                check_readable(resolved := with_home(str(path)), f"The text {path}", TextError, TEXT_REMEDY)
                if resolved.is_file() and not resolved.stat().st_size:  # before torch is imported
                    raise empty_text(path.name)
                inputs[os.path.realpath(resolved)] = f"which --{option} reads"
    if options.get("ranks") is not None:
        inputs[os.path.realpath(options["ranks"])] = "which --ranks reads"
    if models:
        from attnlens.models.loading.locate import check_endpoint

        check_endpoint()
    for name in models:
        for file in _local_files(name, options):
            inputs[os.path.realpath(file)] = f"a file of the model {name}"
    if options.get("adapter") is not None:
        inputs[os.path.realpath(with_home(options["adapter"]))] = "a file of the adapter"
    return inputs


def describe_input(inputs: dict[str, str], output: Path) -> str:
    """Return the description of the input that `output` would replace; empty if it would replace none."""
    real = Path(os.path.realpath(output))
    inside = (what for folder, what in inputs.items() if real.is_file() and real.is_relative_to(folder))
    return inputs.get(str(real)) or next(inside, "")


def _local_files(name: str, options: Mapping[str, Any]) -> list[Path]:
    """Return the folder of a local model and its files, or only the GGUF file; [] for a hub model, unless offline."""
    path = with_home(name)  # tested with os.path, which never raises
    on_hub = HUB.fullmatch(name) and not name.endswith(MODEL_FILES) and name != "demo"
    if on_hub and not os.path.exists(path) and not options["offline"]:  # noqa: PTH110
        return []
    from attnlens.models.loading.locate import find

    place = find(name, None, offline=options["offline"], allow_pickle=options["allow_pickle"])
    if place.form == "gguf" and not os.path.isdir(path):  # noqa: PTH112
        return [place.folder / place.file]
    return [place.folder, *place.folder.iterdir()]


@contextmanager
def guard_stdout() -> Iterator[None]:
    """Raise OutputError if writing to stdout fails inside the block, or typer.Exit if the pipe was closed."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        # flushing the rest of the buffer would fail again when Python exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(READER_LEFT) from None
        problem = f"Cannot write to stdout: {error.strerror}."
        raise OutputError(problem, "Redirect stdout to a file, or pipe it to another program.") from None


@dataclass(frozen=True)
class Outputs:
    """Options for output: files to write, and tables to show."""

    json: str | None = None
    csv: str | None = None
    windows_csv: str | None = None
    figure: str | None = None
    bare: bool = False
    html: str | None = None
    markdown: str | None = None
    plan: str | None = None
    junit: str | None = None
    save: str | None = None
    table: bool = False
    quiet: bool = False
    verbose: bool = False
    no_progress: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Outputs:
        """Build the Outputs from a command's parameters."""
        return cls(**{field.name: options[field.name] for field in fields(cls) if field.name in options})

    def files(self, *options: str) -> dict[str, Path]:
        """Return the paths of those `options` that are set, except `--json -`. Raise UsageError for an invalid path."""
        named = {option: getattr(self, option) for option in options if getattr(self, option) is not None}
        return {option: _path(option, name) for option, name in named.items() if (option, name) != ("json", STDOUT)}

    def check(self, inputs: dict[str, str]) -> None:
        """Raise UsageError or OutputError if an output can't be written or would replace an input or another output.

        Raise UsageError for --bare without --figure.
        """
        names = {os.path.realpath(os.devnull): ""}
        for option, path in self.files(*DATA, *PICTURES, "save").items():
            flag = option_name(option)
            if option != "save":  # the run checks this folder
                check_writable(path, may_be_folder=option == "figure")
            files = [path]
            if option == "figure" and path.is_dir():
                files += [*path.glob("*.png"), *path.glob("*.png.txt")]
            elif option == "figure" and path.suffix:
                files.append(caption_file(path))
            for file in files:
                other = names.setdefault(os.path.realpath(file), option)
                if other not in ("", option):
                    problem = f"{option_name(other)} and {flag} name the same file, {file}."
                    raise UsageError(problem, "Give each option its own file.")
                if what := describe_input(inputs, file):
                    raise UsageError(f"{flag} would replace {file}, {what}.", "Choose another path.")
        if self.bare and self.figure is None:
            raise UsageError("--bare has no effect without --figure.", "Add --figure FILE, or leave out --bare.")
        if self.figure is not None or self.html is not None:
            import logging  # late: few commands draw

            logging.getLogger("matplotlib").setLevel(logging.ERROR)  # matplotlib logs the location of its cache
        if self.figure is not None:
            from attnlens.report.render.html import is_file

            if not is_file(target := Path(self.figure)) and target.exists() and not target.is_dir():
                problem = f"{target} exists, but is neither a folder nor a picture."
                raise OutputError(problem, "Give a path that ends in .png, .svg or .pdf, or a folder.")


def _path(option: str, name: str) -> Path:
    """Return the path that an option names. Raise UsageError if the option can't write there."""
    typed, is_file = option_name(option), option not in ("figure", "save")
    if not name.strip() or "\0" in name or (is_file and name.endswith(("/", os.sep))):
        raise UsageError(f"{typed} does not name a file.", f"Give a path after {typed}, or leave out {typed}.")
    if name.startswith("--"):
        raise UsageError(f"{typed} needs a path, but is followed by the option {name}.", f"Give a path after {typed}.")
    if name == STDOUT:
        remedy = "Give a path, e.g. /dev/stdout."
        if not is_file:
            remedy = f"Give the path of a {'folder' if option == 'save' else 'picture or a folder'}."
        raise UsageError(f"{typed} can't write to stdout; only --json can.", remedy)
    return local_path(name, typed)


def deliver(
    outputs: Outputs,
    report: Report,
    writers: Mapping[str, Callable[[Report], str]] | None = None,
    summary: Callable[[Report], Document] | None = None,
    *,
    annotate: Callable[[], None] | None = None,
    interrupted: bool = False,
    saved: Sequence[str] = (),
    source: str | None = None,
    params: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write the data, show the tables, draw the pictures, and print the names of the written files.

    `writers` (by option) and `summary` default to those of `attnlens.report.export`. `annotate` runs after the summary
    is printed. `saved` lists outputs that are already written, `source` is the file from which the report was read, if
    any, and `params` are the command's options. Every output is attempted. Then the last error is raised or, if
    `interrupted`, typer.Exit.
    """
    from attnlens.report.render import terminal

    if writers is None or summary is None:
        from attnlens.report import export  # late, because it loads the records

        files = _list_files(outputs, source, params, saved=bool(saved))
        writers = export.WRITERS
        summary = partial(export.summary, all_heads=outputs.table, verbose=outputs.verbose, written=files)
    failures: list[AttnlensError | typer.Exit] = []
    written, made = [*saved], list[Path]()
    report = _add_windows_file(outputs, report)
    try:
        for option, path in outputs.files(*DATA).items():
            with _collect(failures):
                write_atomically(path, writers[option](report).encode())
                written.append(str(path))
        with _collect(failures), guard_stdout():
            if outputs.json == STDOUT:
                expect_json(False)
                sys.stdout.buffer.write(report.to_json().encode())
            if not outputs.quiet:
                console(stderr=outputs.json == STDOUT).print(terminal.document(summary(report)))
        if annotate is not None:
            with _collect(failures):
                annotate()
        made += _draw_figures(outputs, report, failures)  # one by one: an interruption keeps those drawn so far
        several = [f"{len(made)} pictures with captions to {outputs.figure}"] * (len(made) > 1)
        written += several or [name for path in made for name in (str(path), str(caption_file(path)))]
        if outputs.html is not None:
            with _collect(failures):
                _draw(Path(outputs.html), lambda: (writers["html"](report).encode(), ""))
                written.append(outputs.html)
    finally:
        if written and not outputs.quiet:
            say(f"Wrote {', '.join(written)}")
    errors = [failure for failure in failures if isinstance(failure, AttnlensError)]
    for error in errors if interrupted else errors[:-1]:
        complain(error.problem, error.remedy)
    if interrupted:
        say(f"Interrupted. {RESUME}")
        raise typer.Exit(INTERRUPTED)
    for last in (errors or failures)[-1:]:
        raise last


def _list_files(outputs: Outputs, source: str | None, params: Mapping[str, Any], *, saved: bool) -> Written:
    """Return the paths to name in the commands suggested under "Next"; `saved` is True if the model was saved."""
    from attnlens.report.shapes import Written  # late, because it loads the records

    paths = {name: str(path) for name, path in outputs.files("json", "plan").items()}
    return Written(
        report=source or paths.get("json"),
        plan=params.get("ranks") or paths.get("plan"),
        model=outputs.save if saved else None,
        shown=outputs.table or outputs.html is not None or outputs.figure is not None,
        text=tuple(map(str, params.get("text") or ())),
        calibration=tuple(map(str, params.get("calibration") or ())),
        offline=bool(params.get("offline")),
    )


@contextmanager
def _collect(failures: list[AttnlensError | typer.Exit]) -> Iterator[None]:
    """If the block raises an AttnlensError or typer.Exit, append it to `failures` instead."""
    try:
        yield
    except (AttnlensError, typer.Exit) as failure:
        failures.append(failure)


def _add_windows_file(outputs: Outputs, report: Report) -> Report:
    """Record the name and hash of the --windows-csv file in the report if both are written to the same folder."""
    files = outputs.files("json", "windows_csv")
    if len(files) < 2 or len({os.path.realpath(file.parent) for file in files.values()}) > 1:
        return report
    from attnlens.records import File
    from attnlens.report.export import WRITERS

    content = WRITERS["windows_csv"](report).encode()
    windows_file = File(name=files["windows_csv"].name, sha256=sha256(content).hexdigest())
    return report.model_copy(update={"windows_file": windows_file})


def _draw_figures(outputs: Outputs, report: Report, failures: list[AttnlensError | typer.Exit]) -> Iterator[Path]:
    """Draw the pictures that --figure requests, yield each file once it is written, and append errors to `failures`."""
    if outputs.figure is not None:
        from attnlens.report.export import drawings  # late, because it loads matplotlib

        with _collect(failures):
            for path, draw in drawings(report, Path(outputs.figure), bare=outputs.bare).items():
                with _collect(failures):
                    _draw(path, draw)
                    yield path


def _draw(path: Path, draw: Callable[[], tuple[bytes, str]]) -> None:
    """Draw a picture or page, and write its file and caption. Raise OutputError if that fails."""
    try:
        content, caption = draw()
    except AttnlensError:
        raise
    except Exception as error:
        remedy = "The other results were written; run the command again with --debug and report the output."
        raise OutputError(f"{path} can't be drawn: {type(error).__name__}: {error}.", remedy) from error
    new = not path.parent.exists()
    make_folder(path.parent)
    try:
        write_atomically(path, content)
        if caption:
            write_atomically(caption_file(path), caption.encode())
    except OutputError:
        if new:
            with suppress(OSError):
                path.parent.rmdir()
        raise
