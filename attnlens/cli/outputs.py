"""Resolve a command's model, inputs and outputs, run its work with progress, and deliver its report."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from hashlib import sha256
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import typer

from attnlens.arguments import MODEL_FILES, dataset_rows
from attnlens.cli import INTERRUPTED, PARTLY, READER_LEFT
from attnlens.cli.show import complain, console, interruptible_at_once, progress, say
from attnlens.errors import AttnlensError, IdentityError, OutputError, TextError, UsageError
from attnlens.files import (
    OPEN_FILES,
    check_writable,
    local_path,
    make_folder,
    refuse_other_kinds,
    with_home,
    write_atomically,
)
from attnlens.wording import clean, format_count, join_items

if TYPE_CHECKING:
    from attnlens.records import Report
    from attnlens.report.sections.section import Document
    from attnlens.requests.run_options import SeriesRequest


REMEDY = "Do not trust numbers from these sites; `attnlens doctor {} --json FILE` saves all errors for a bug report."
NO_MODEL = "No model named: using demo, the small model that ships with attnlens."


def named_model(name: str | None, *, quiet: bool) -> str:
    """Return the requested model, else demo, with a message. Raise UsageError for an invalid name."""
    if name is None and not quiet:
        say(NO_MODEL)
    return "demo" if name is None else checked_model(name)


def checked_model(name: str) -> str:
    """Return the name. Raise UsageError if it is empty, or means stdin."""
    if not name.strip() or "\0" in name:
        raise UsageError("The model's name is empty.", "Name a folder, a file, a hub id, or `demo`.")
    if name == "-":
        raise UsageError("A model can't be read from stdin.", "Name a folder, a file, a hub id, or `demo`.")
    return name


def check_reading(request: SeriesRequest) -> None:
    """Raise UsageError for options that the requested source does not support."""
    from attnlens.requests import reading  # late, because it loads the records

    show = getattr(request, "show", None)
    reading.choose_analyzers(reading.settings(request), request.analyzers, request.select, show)
    reading.refuse_unread(request, request.source)


@contextmanager
def working(outputs: Outputs) -> Iterator[Callable[[str, int, int], None]]:
    """Show progress and silence transformers during the one call of a command."""
    gc.freeze()  # imported objects stay alive: the collector needn't scan them
    gc.enable()
    with interruptible_at_once():
        from attnlens.models.loading.building import silence_logging

    with silence_logging(), progress(shown=not (outputs.quiet or outputs.no_progress)) as tell:
        yield tell


def run_and_deliver(outputs: Outputs, work: Callable[[Any, Any], tuple[Report, Callable[[], None] | None]]) -> Report:
    """Run one piece of work and deliver its report; after an interruption, the report of the finished part.

    `work` is (attnlens.cli.analyses, progress) → the report, and what is called once it is written, or None.
    """
    with interruptible_at_once():
        from attnlens.cli import analyses

    stopped, written = False, None
    with working(outputs) as tell:
        try:
            report, written = work(analyses, tell)
        except analyses.Interrupted as stop:
            report, stopped = stop.report, True
    deliver(outputs, report, interrupted=stopped)
    if written is not None:
        written()
    return report


def begin_workers(engine: str, jobs: int) -> None:
    """Start the server process that --jobs are forked from; it imports the library in parallel with this process."""
    if engine == "local":
        from attnlens.runs.work import start_server

        start_server(jobs, "attnlens.cli.analyses")


def end_strictly(report: Report) -> None:
    """Exit with PARTLY if something was not analysed, or if the files contain tensors that the model does not use."""
    from attnlens.report.sentences.reports import state_unexpected

    for sentence in state_unexpected(report):
        console(stderr=True).print(clean(sentence), soft_wrap=True, markup=False)
    partial = not report.coverage.complete
    if partial:
        say(report.coverage.sentence)
    if report.model.unexpected or partial:
        raise typer.Exit(PARTLY)


def failure(report: Report) -> IdentityError:
    """Return the error of a failed `doctor`: the sites that failed, and the largest error."""
    failed = [check for check in report.doctor if not check.passed]
    errors = [error for check in failed for error in (check.tokens_error, check.weights_error) if error is not None]
    if failed:
        worst = f"worst error {max(errors):.1e}" if errors else failed[0].reason or "without an error to show"
        sites = format_count(len(report.doctor), "site")
        problem = f"{len(failed)} of {sites} failed, {worst}: {join_items(check.site for check in failed)}."
    elif (error := report.summary.identity_error) is None:
        problem = "The model's outputs are not finite or cannot be compared, so nothing could be verified."
    else:
        problem = f"Attention recomputed by attnlens changes the model's outputs by {error:.1e}."
    return IdentityError(problem, REMEDY.format(quote(report.model.id)))


DATA, PICTURES = ("json", "csv", "windows_csv", "markdown", "plan", "junit"), ("figure", "html")
"""Options that name a file to write."""
STDIN = STDOUT = "-"
HUB = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(@[^\\]+)?")
"""Pattern of a hub model's name; a name that ends like a file, or is a local folder, is not one."""
TEXTS = ("text", "calibration")
"""Options that accept rows of a dataset instead of a file."""
SAY_TEXT = "Give a plain text file in UTF-8."


@dataclass
class Inputs:
    """Files that a command reads, and the folders of its models."""

    files: dict[str, str] = field(default_factory=dict)
    """Description of each input file, keyed by its resolved path."""
    folders: dict[Path, str] = field(default_factory=dict)
    """Description of each folder of a model or a dataset, keyed by its resolved path."""

    @classmethod
    def of(cls, options: Mapping[str, Any], models: Sequence[str]) -> Inputs:
        """Collect the inputs of a command's parameters, and of these models.

        Raise TextError for a missing text, ModelError for a model that is not found locally (the hub is not queried),
        UsageError for a plan that can't be read.
        """
        inputs = cls()
        lone = {name: [options[name]] for name in ("pairs", "labelled") if options.get(name) is not None}
        several = {name: options.get(name) or () for name in ("text", "calibration", "series")}
        for option, named in (lone | several).items():
            for path in map(Path, named):
                dataset = dataset_rows(str(path)) if option in TEXTS else None
                if dataset is not None:
                    folder = Path(os.path.realpath(os.path.expanduser(dataset.name)))  # noqa: PTH111  # never raises
                    inputs.folders[folder] = f"a file of the dataset that --{option} reads"
                elif str(path) != STDIN:
                    inputs._add(_readable(path), f"which --{option} reads")
        if options.get("ranks") is not None:
            from attnlens.records import read_plan

            plan = Path(options["ranks"])
            if not plan.is_fifo():  # a pipe can be read only once, by the run
                read_plan(plan)
            inputs._add(plan, "which --ranks reads")
        if models:
            from attnlens.models.loading.locate import check_endpoint

            check_endpoint()
        for name in models:
            inputs._add_model(name, options)
        if options.get("adapter") is not None:
            folder = Path(os.path.realpath(os.path.expanduser(options["adapter"])))  # noqa: PTH111  # never raises
            inputs.folders[folder] = "a file of the adapter"
        return inputs

    def description(self, output: Path) -> str:
        """Return the description of the input that `output` would replace; empty if there is none."""
        real = Path(os.path.realpath(output))
        inside = (what for folder, what in self.folders.items() if real.is_relative_to(folder))
        return self.files.get(str(real)) or (next(inside, "") if real.is_file() else "")

    def _add(self, path: Path, what: str) -> None:
        self.files[os.path.realpath(path)] = what

    def _add_model(self, name: str, options: Mapping[str, Any]) -> None:
        """Add a local model's files: all files of its folder, with links resolved, or a single file."""
        path = os.path.expanduser(name)  # noqa: PTH111  # here and below os.path, which never raises, whatever the name
        on_hub = HUB.fullmatch(name) and not name.endswith(MODEL_FILES) and name != "demo"
        if on_hub and not os.path.exists(path) and not options["offline"]:  # noqa: PTH110
            return
        from attnlens.models.loading.locate import find

        place = find(name, None, offline=options["offline"], allow_pickle=options["allow_pickle"])
        what = f"a file of the model {name}"
        if place.form == "gguf" and not os.path.isdir(path):  # noqa: PTH112
            self._add(place.folder / place.file, what)
            return
        self.folders[Path(os.path.realpath(place.folder))] = what
        for file in place.folder.iterdir():
            self._add(file, what)


def check_place() -> None:
    """Raise UsageError if the current folder was removed: paths can't be resolved, and torch's MKL ends the process."""
    try:
        os.getcwd()  # noqa: PTH109  # like pathlib
    except OSError as error:
        raise UsageError(f"The current folder can't be read: {error.strerror}.", "Go to another one: cd") from None


def _readable(path: Path) -> Path:
    """Return the path of a text. Raise TextError if it can't be read."""
    resolved = with_home(str(path))
    try:
        kind = resolved.stat()
    except (OSError, ValueError) as error:
        raise TextError(f"The text {path} can't be read: {getattr(error, 'strerror', error)}.", SAY_TEXT) from None
    if not os.access(resolved, os.R_OK):
        raise TextError(f"The text {path} can't be read: Permission denied.", SAY_TEXT)
    if not str(path).startswith(OPEN_FILES):
        refuse_other_kinds(kind, f"The text {path}", TextError, SAY_TEXT)
    return resolved


@contextmanager
def product() -> Iterator[None]:
    """Guard writing to stdout inside the block. Raise OutputError if it fails, Exit if its reader has left."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        # flushing the rest of the buffer would fail again when Python exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(READER_LEFT) from None
        raise OutputError(
            f"stdout can't be written: {error.strerror}.", "Redirect it to a file or a program."
        ) from None


@dataclass(frozen=True)
class Outputs:
    """Files to write, and what to show."""

    json: str | None = None
    csv: str | None = None
    windows_csv: str | None = None
    figure: str | None = None
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
        """Select the outputs among a command's parameters."""
        return cls(**{field.name: options[field.name] for field in fields(cls) if field.name in options})

    def files(self, *options: str) -> dict[str, Path]:
        """Return the paths of those of these options that name a file; stdout is left out."""
        named = {option: getattr(self, option) for option in options}
        return {
            option: local_path(name, option_name(option))
            for option, name in named.items()
            if name is not None and (option, name) != ("json", STDOUT)
        }

    def check(self, inputs: Inputs) -> None:
        """Check before the work that every file can be written or drawn, and that none is an input."""
        for option in (*DATA, *PICTURES):
            _check_name(option, getattr(self, option))
        names = {os.path.realpath(os.devnull): ""}
        for option, path in self.files(*DATA, *PICTURES, "save").items():
            if option != "save":  # the run checks this one
                check_writable(path, may_be_folder=option == "figure")
            other = names.setdefault(os.path.realpath(path), option)
            if other not in ("", option):
                raise UsageError(
                    f"{option_name(other)} and {option_name(option)} name the same file, {path}.",
                    "Give each its own file.",
                )
            replaced = path.glob("*.png") if option == "figure" and path.is_dir() else [path]
            for file in replaced:
                if what := inputs.description(file):
                    raise UsageError(f"{option_name(option)} would replace {file}, {what}.", "Write it somewhere else.")
        if self.figure is not None or self.html is not None:
            import logging  # late: few commands draw

            logging.getLogger("matplotlib").setLevel(logging.ERROR)  # matplotlib logs the location of its cache
        if self.figure is not None:
            from attnlens.report.render.html import is_file

            if not is_file(target := Path(self.figure)) and target.exists() and not target.is_dir():
                raise OutputError(
                    f"{target} exists, but is neither a folder nor a picture.",
                    "End it in .png, .svg or .pdf, or name a folder.",
                )


def option_name(option: str) -> str:
    """Return the option as it is typed: `--windows-csv`."""
    return f"--{option.replace('_', '-')}"


def _check_name(option: str, name: str | None) -> None:
    """Raise UsageError for a name that can't be the path of a file (or of a folder, for plots)."""
    typed = option_name(option)
    if name is None or (option, name) == ("json", STDOUT):
        return
    if not name.strip() or "\0" in name or (option != "figure" and name.endswith(("/", os.sep))):
        raise UsageError(f"{typed} names no file.", f"Give a path after {typed}, or leave it out.")
    if name.startswith("--"):
        raise UsageError(f"{typed} is followed by {name}, an option.", f"Give a path after {typed}.")
    if name == STDOUT:
        raise UsageError(f"{typed} does not write to stdout; --json does.", "Give a path, e.g. /dev/stdout.")


def deliver(outputs: Outputs, report: Report, *, interrupted: bool = False, saved: Sequence[str] = ()) -> None:
    """Write the data, show the tables, draw the plots, and print which files exist.

    Failures are reported after everything else: raised as an AttnlensError, or as Exit if the reader of stdout left.
    `interrupted`: the report contains the finished part, so that the end is Exit with the code of an interruption;
    `saved` is printed as written too.
    """
    from attnlens.report import export  # late, because it loads the records
    from attnlens.report.sections import documents

    failures = Failures()
    written = [*saved]
    older = ""
    report = _add_windows_file(outputs, report)
    try:
        write_data(outputs, report, export.WRITERS, failures, written)
        with failures.collect():
            show(outputs, report, partial(documents.summary, all_heads=outputs.table, verbose=outputs.verbose))
        if outputs.figure is not None:
            made = _draw(report, target := Path(outputs.figure), failures)
            written += [f"{len(made)} pictures to {target}"] if len(made) > 1 else map(str, made)
            if target.is_dir() and (count := len({*target.glob("*.png")} - {*made})):
                older = f"{target} contains {count} older picture{'s' * (count != 1)} that this run did not write."
        if outputs.html is not None:
            with failures.collect():
                page = _render(outputs.html, lambda: export.WRITERS["html"](report).encode())
                write_atomically(Path(outputs.html), page)
                written.append(outputs.html)
    finally:
        if written and not outputs.quiet:
            say(f"Wrote {', '.join(written)}")
            if older:
                say(older)
    failures.end(interrupted=interrupted)


def write_data(
    outputs: Outputs,
    report: Report,
    writers: Mapping[str, Callable[[Report], str]],
    failures: Failures,
    written: list[str],
) -> None:
    """Write each requested data file, and append its path to `written`."""
    for option, path in outputs.files(*DATA).items():
        with failures.collect():
            write_atomically(path, writers[option](report).encode())
            written.append(str(path))


def _add_windows_file(outputs: Outputs, report: Report) -> Report:
    """Add the windows file to the report if both are written to the same folder."""
    files = outputs.files("json", "windows_csv")
    if len(files) < 2 or len({os.path.realpath(file.parent) for file in files.values()}) > 1:
        return report
    from attnlens.records import File
    from attnlens.report.export import WRITERS

    content = WRITERS["windows_csv"](report).encode()
    windows_file = File(name=files["windows_csv"].name, sha256=sha256(content).hexdigest())
    return report.model_copy(update={"windows_file": windows_file})


class Failures:
    """Failures that don't prevent further work."""

    def __init__(self) -> None:
        self.errors: list[AttnlensError] = []
        self.exits: list[typer.Exit] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Record a failure that ends the block instead of raising it."""
        try:
            yield
        except AttnlensError as error:
            self.errors.append(error)
        except typer.Exit as stop:
            self.exits.append(stop)

    def end(self, *, interrupted: bool) -> None:
        """Print the failures and raise the last one, or Exit after an interruption."""
        for error in self.errors if interrupted else self.errors[:-1]:
            complain(error.problem, error.remedy)
        if interrupted:
            say("Interrupted.")
            raise typer.Exit(INTERRUPTED)
        for last in (self.errors or self.exits)[-1:]:
            raise last


def show(outputs: Outputs, report: Report, summary: Callable[[Report], Document]) -> None:
    """Print the summary, and JSON if it goes to stdout."""
    from attnlens.report.render import terminal

    with product():
        if outputs.json == STDOUT:
            sys.stdout.buffer.write(report.to_json().encode())
        if not outputs.quiet:
            console(stderr=outputs.json == STDOUT).print(terminal.document(summary(report)))


def _draw(report: Report, target: Path, failures: Failures) -> list[Path]:
    """Draw and write each plot; return the files written."""
    from attnlens.report import export

    made: list[Path] = []
    with failures.collect():
        for path, draw in export.drawings(report, target).items():
            with failures.collect():
                content = _render(path, draw)
                new = not path.parent.exists()
                make_folder(path.parent)
                try:
                    write_atomically(path, content)
                except OutputError:
                    if new:
                        with suppress(OSError):
                            path.parent.rmdir()
                    raise
                made.append(path)
    return made


def _render(path: Path | str, draw: Callable[[], bytes]) -> bytes:
    """Draw the content of a plot's file. Any error only affects that plot, hence the broad except."""
    try:
        return draw()
    except AttnlensError:
        raise
    except Exception as error:
        raise OutputError(
            f"{path} can't be drawn: {type(error).__name__}: {error}.",
            "The other results were written; run the command again with --debug and report the output.",
        ) from error
