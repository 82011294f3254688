"""Tests where outputs go: files, links, folders of pictures, stdout and terminals, saved reports drawn again."""

import logging
import math
import os
import pty
import stat
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import forkserver
import pytest
import typer
import views
from program import environment_with, in_shell, invoke, python, refused, without_torch
from reports import synthetic_report
from swap_reports import swap_report

from attnlens.cli import analyses, outputs, show
from attnlens.cli.commands.papers import CONVERGE_KINDS, HEAD_RUN, SYNTHETIC_RUN
from attnlens.cli.outputs import Outputs, deliver
from attnlens.errors import AttnlensError, OutputError
from attnlens.records import Site, SiteCheck, Summary
from attnlens.report import pictures
from attnlens.report.render.html import is_file
from attnlens.report.report import read_report
from attnlens.runs.inspect.inspection import WorkUnit
from attnlens.runs.inspect.pipeline import report_stages
from attnlens.runs.swap.saved import UnsavedError

ONE = ("inspect", "demo", "--source", "weights", "--layers", "0", "--heads", "0", "--no-progress")
LINE = " ".join(ONE)
MIXED = ("weights.symmetry", "weights.kind", "tokens.entropy", "tokens.share_key")
EMPTY = synthetic_report(2, 2, source="weights").model_copy(update={"heads": []})
FEW = synthetic_report(2, 2, source="weights", curves=False, measures=("weights.symmetry", "weights.definiteness"))


without_layout = pytest.mark.usefixtures("without_layout")


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_links_devices_and_modes_stay_as_they_are(tmp_path):
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "real.json").chmod(0o640)
    (tmp_path / "link.json").symlink_to("real.json")
    words = ("--json", "link.json", "--csv", os.devnull, "--markdown", os.devnull, "-q")
    result = invoke(*ONE, *words, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "link.json").is_symlink()
    assert len(read_report(tmp_path / "real.json").heads) == 1
    assert stat.S_IMODE((tmp_path / "real.json").stat().st_mode) == 0o640
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)


@without_layout
def test_pictures_are_counted(tmp_path, capsys):
    folder, page = tmp_path / "all", tmp_path / "one.html"
    deliver(Outputs(figure=str(folder), html=str(page), quiet=False), swap_report())
    shown = capsys.readouterr().err
    assert f"Wrote {len(names(folder)) // 2} pictures with captions to {folder}, {page}" in shown
    assert len(names(folder)) > 1
    deliver(Outputs(figure=str(tmp_path / "one.png")), swap_report())
    assert f"Wrote {tmp_path}/one.png, {tmp_path}/one.png.txt\n" in capsys.readouterr().err


@without_layout
@pytest.mark.parametrize(("option", "target"), [("figure", "pictures.svg"), ("html", "pictures")])
def test_a_picture_that_fails_or_is_interrupted_costs_itself_alone(tmp_path, monkeypatch, capsys, option, target):
    files = {"json": str(tmp_path / "a.json"), "csv": str(tmp_path / "a.csv"), option: str(tmp_path / target)}
    with pytest.raises(AttnlensError, match="no measures"):
        deliver(Outputs(**files, quiet=True), EMPTY)
    assert names(tmp_path) == {"a.json", "a.csv"}
    deliver(Outputs(**files, quiet=True), FEW)
    assert names(tmp_path) == {"a.json", "a.csv", target, *(["pictures.svg.txt"] if option == "figure" else [])}

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(pictures.maps, "overview_figure", interrupt)
    files = {"json": str(tmp_path / "b" / "a.json"), "markdown": str(tmp_path / "b" / "a.md")}
    (tmp_path / "b").mkdir()
    with pytest.raises(KeyboardInterrupt):
        deliver(Outputs(**files | {option: str(tmp_path / "b" / "x.png")}), FEW)
    assert names(tmp_path / "b") == {"a.json", "a.md"}
    shown = capsys.readouterr()
    assert "COMPLETE" in shown.out, "the tables too come before the pictures"
    assert "a.md" in shown.err


@without_layout
def test_every_picture_that_fails_is_named_and_the_others_are_drawn(tmp_path, monkeypatch, capsys):
    honest = pictures.panel_figure

    def fail(report, panel, **how):
        if panel.stem == "weights.symmetry":
            raise ZeroDivisionError
        return honest(report, panel, **how)

    monkeypatch.setattr(pictures, "panel_figure", fail)
    with pytest.raises(AttnlensError, match=r"weights.symmetry\.png can't be drawn: ZeroDivisionError"):
        deliver(Outputs(figure=str(tmp_path / "p"), json=str(tmp_path / "a.json")), FEW)
    drawn = ("overview.png", "weights.definiteness.png")
    assert names(tmp_path / "p") == {*drawn, *(f"{name}.txt" for name in drawn)}
    assert f"Wrote {tmp_path}/a.json, 2 pictures with captions to {tmp_path}/p" in capsys.readouterr().err
    with pytest.raises(typer.Exit) as stop:
        deliver(Outputs(figure=str(tmp_path / "x.png"), quiet=True), EMPTY, interrupted=True)
    assert stop.value.exit_code == 130, "after an interruption, whatever else fails"
    assert "no measures" in capsys.readouterr().err


def test_a_caption_replaces_no_input_or_output_and_bare_needs_a_picture(tmp_path):
    picture = str(tmp_path / "heads.png")
    text = {os.path.realpath(f"{picture}.txt"): "which --text reads"}
    for written, inputs, problem in (
        (Outputs(figure=picture), text, r"replace .*heads\.png\.txt, which --text reads"),
        (
            Outputs(figure=picture, csv=f"{picture}.txt"),
            {},
            r"--csv and --figure name the same file, .*heads\.png\.txt",
        ),
        (Outputs(html=picture, bare=True), {}, "--bare has no effect without --figure"),
    ):
        with pytest.raises(AttnlensError, match=problem):
            written.check(inputs)
    Outputs(figure=picture, csv=f"{picture}.csv", bare=True).check({})


@without_layout
def test_a_full_disk_leaves_no_empty_folder_of_pictures(tmp_path, monkeypatch):
    def fail(path, _content):
        raise OutputError(f"{path} can't be written: No space left on device.", "Make room.")

    monkeypatch.setattr(outputs, "write_atomically", fail)
    (tmp_path / "mine").mkdir()
    for name in ("new", "mine"):
        with pytest.raises(OutputError, match="No space"):
            deliver(Outputs(figure=str(tmp_path / name), quiet=True), FEW)
        assert names(tmp_path) == {"mine"}, "an existing folder stays"


def test_an_ending_that_is_not_a_picture_makes_no_folder(tmp_path):
    with pytest.raises(OutputError, match=r"\.xyz is not supported") as refusal:
        Outputs(figure=str(tmp_path / "one.xyz")).check({})
    assert ".png, .svg or .pdf" in refusal.value.remedy
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run.2").mkdir()
    logging.getLogger("matplotlib").setLevel(logging.NOTSET)
    Outputs(figure=str(tmp_path / "run.2")).check({})
    assert not is_file(tmp_path / "run.2"), "an existing folder is one"
    assert logging.getLogger("matplotlib").level == logging.ERROR, "it would log the place of its cache"


def test_stdout_by_its_name_is_written_and_not_replaced(tmp_path):
    piped = in_shell(f"attnlens {LINE} -q --csv /dev/stdout | cat")
    assert piped.stdout.startswith("layer,head,"), piped.stderr
    assert in_shell(f"attnlens {LINE} --csv /dev/stdout > {tmp_path}/both").returncode == 0
    both = (tmp_path / "both").read_text()
    assert both.startswith("layer,head,")
    assert "COMPLETE: 1 of 1 head" in both
    substituted = in_shell(f"attnlens {LINE} -q --csv >(cat > {tmp_path}/sub); wait $!; cat {tmp_path}/sub")
    assert substituted.stdout == piped.stdout


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        *((f"attnlens {words} > /dev/full", ("stdout", "No space left"))
          for words in ("list", "--help", "--version", "list schema", LINE, f"{LINE} --json -")),
        *((f"attnlens {words} >&-", ("stdout is closed",)) for words in ("list schema", "--help", LINE)),
        ("attnlens inspect demo --text - <&-", ("stdin is closed",)),
        ("mkdir gone; cd gone; rmdir ../gone; attnlens swap-kernel demo --save x -q", ("folder", "Change to another")),
        ("PYTHONOPTIMIZE=2 attnlens list", ("-OO",)),
    ],
)  # fmt: skip
def test_streams_and_places_that_cannot_be_used_are_named(tmp_path, line, parts):
    refused(in_shell(line, tmp_path, afresh="gone" in line or "OPTIMIZE" in line), *parts)


def test_a_reader_that_leaves_ends_the_program_silently_and_a_closed_stdin_is_no_matter(tmp_path):
    for words in ("list", "--help", f"{LINE} --table --json r.json"):
        result = in_shell(f"attnlens {words} 2>err | true; echo ${{PIPESTATUS[0]}}", tmp_path)
        assert result.stdout == "141\n", "as a program that the closed pipe's signal ends"
        assert "Error" not in (tmp_path / "err").read_text()
    assert read_report(tmp_path / "r.json").coverage.complete, "the files are written nonetheless"
    assert in_shell(f"attnlens {LINE} -q <&-").returncode == 0, "if nothing reads it"


def on_a_terminal(*words, **environment):
    """What a Python process writes to a terminal on stderr."""
    ours, theirs = pty.openpty()
    env = environment_with(**{"TERM": "xterm"} | environment)
    streams = {"stdin": theirs, "stdout": subprocess.DEVNULL, "stderr": theirs}
    with subprocess.Popen([str(forkserver.commands() / "python"), *words], env=env, **streams) as process:
        os.close(theirs)
        written = b""
        try:
            while piece := os.read(ours, 4096):
                written += piece
        except OSError:  # so a terminal's end is told on Linux
            pass
    os.close(ours)
    assert process.returncode == 0, written
    return written.decode()


BAR = """
from attnlens.cli import show
with show.progress(shown=True) as report_progress:
    for done in range(4):
        report_progress("weights", done, 3)
"""


def test_a_terminal_is_animated_unless_that_is_switched_off():
    words = ("inspect", "demo", "--source", "weights", "--analyzer", "symmetry", "--layers", "0")
    for command in (("-m", "attnlens", *words), ("-c", BAR)):
        assert "\x1b[?25l" in on_a_terminal(*command), "the control: the bar moves and hides the cursor"
    for variable in ({"NO_COLOR": "1"}, {"CI": "true"}, {"TERM": "dumb"}):
        assert "\x1b" not in on_a_terminal("-c", BAR, **variable), variable
    assert "\x1b" not in python("-c", BAR, FORCE_COLOR="1").stderr, "nor is a pipe"


@pytest.fixture
def clock(monkeypatch):
    """The time in seconds, as a list of one number that a test sets."""
    now = [0.0]
    monkeypatch.setattr(show.time, "monotonic", lambda: now[0])
    return now


def test_progress_lines_count_all_units_and_the_time_left_and_name_what_is_counted(clock, capsys):
    with show.progress(shown=True) as report_progress:
        sites = (Site("a", 0, 0, "decoder"),)
        parts = [WorkUnit("weights", sites), *(WorkUnit("tokens", sites, batch, 2) for batch in range(9))]
        units = {unit.name: unit for unit in parts}
        more = report_stages(report_progress, units)
        for unit in units:
            clock[0] += 4.0
            more(unit)
    lines = [f"{done} of 10 sites and batches, 0:00:{left} left" for done, left in ((3, 28), (6, 16), (9, "04"))]
    assert capsys.readouterr().err.splitlines() == [f"parts of the run: {line}" for line in lines]
    counted = {
        "budget": "1 of 4 windows in several passes",
        "linear, compare": "1 of 4 tokens",
        "rank, nuclear, d=10": "1 of 4 trials",
        "heal": "25 % of the training",
        "unknown": "1 of 4 steps",
    }
    with show.progress(shown=True) as report_progress:
        for stage in counted:
            clock[0] += 20
            report_progress(stage, 1, 4)
    assert capsys.readouterr().err.splitlines() == [f"{stage}: {line}" for stage, line in counted.items()]


FILES = ("--csv", "r.csv", "--markdown", "r.md", "--json", "again.json")


@pytest.mark.parametrize(
    ("report", "drawn"),
    [(synthetic_report(2, 2, measures=MIXED), ("--html", "r.html")), (swap_report(), ("--figure", "r.png"))],
    ids=["inspect", "swap"],
)
def test_a_saved_report_is_written_as_its_run_writes_it(tmp_path, report, drawn):
    report.write_json(tmp_path / "r.json")
    result = without_torch("report", "r.json", *FILES, *drawn, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "r.json").read_bytes()
    again = read_report(tmp_path / "r.json")
    for kind, write in (("csv", views.csv), ("md", views.markdown)):
        assert (tmp_path / f"r.{kind}").read_text() == write(again), kind
    if "--html" in drawn:
        assert (tmp_path / "r.html").read_text() == views.page(again)
    else:
        assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert report.model.title in result.stdout


@without_layout
def test_saved_reports_are_shown_drawn_into_a_folder_and_written_as_a_page(tmp_path):
    FEW.write_json(tmp_path / "r.json")
    result = invoke("report", "r.json", "--table", "--figure", "all", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "COMPLETE: 4 of 4 heads" in result.stdout
    assert {"overview.png", "weights.symmetry.png"} <= names(tmp_path / "all")
    fields = {"site": "h.0.attn", "part": "decoder", "heads": 8, "route": "interface", "weights_error": 2e-7}
    check = SiteCheck(**fields, tokens_error=1e-7, passed=True, verdict="agrees")
    update = {"command": "doctor", "kind": "doctor", "heads": [], "doctor": [check]}
    report = synthetic_report(1, 8).model_copy(update=update | {"summary": Summary(verdict="agrees")})
    report.write_json(tmp_path / "r.json")
    result = invoke("report", "r.json", "-q", "--html", "doctor.html", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "h.0.attn" in (tmp_path / "doctor.html").read_text()


def test_a_message_does_not_steer_the_terminal(capsys):
    show.say("a\x1b[2Jb")
    assert "\x1b" not in capsys.readouterr().err


def test_a_stream_that_shows_only_ascii_still_shows_the_rest():
    words = [sys.executable, "-m", "attnlens", "explain", "rbf"]  # the test server's streams are always UTF-8
    result = subprocess.run(words, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True)
    assert (result.returncode, "?" in result.stdout) == (0, True), result.stderr


def test_a_model_that_was_not_saved_is_not_announced(tmp_path, monkeypatch):
    unsaved = UnsavedError(OutputError("The disk is full.", "Make room."), swap_report())
    monkeypatch.setattr(analyses, "swap_work", Mock(return_value=Mock(run=Mock(side_effect=unsaved))))
    result = invoke("swap-kernel", "demo", "--save", "model", "--json", "r.json", cwd=tmp_path)
    assert (result.returncode, "Error: The disk is full." in result.stderr) == (2, True)
    assert "Wrote r.json\n" in result.stderr


SLOW = "about 33 minutes left in this stage"
FEWER = " Fewer --windows or --layers make it shorter."
FORECASTS = [  # stage, seconds of its reports, total steps, options of the command, line on stderr
    ("budget", [0.3 * done for done in range(30)], 100, ("windows",),
     "about 25 seconds left in this stage. Fewer --windows make it shorter, but the chosen ranks can be larger."),
    ("converge", [0, 2, 4, 6, 8], 60, (), "about 114 seconds left in this stage."),
    ("sweep", [0, 2, 4, 6, 8], 60, (), None),  # only stages of `converge` are announced after a minute
    ("sweep", [0, 2, 4, 6, 8], 1000, ("windows", "layers", "generate"), f"{SLOW}.{FEWER}"),
    *(("sweep", seconds, 1000, ("windows", "layers"), None) for seconds in (
        [0, 20, 20.3, 20.6, 20.9],  # a first step with costs that occur once
        [0, 1, 7, 7.1, 7.2, 7.3, 7.4, 7.5],  # one slow step, then fast ones
        [0, 3, 6],  # too few steps after the first
        [0, 0.2, 0.4, 0.6, 3.6, 6.6],  # steps that become slower
    )),
    *((stage, [0, 2, 4, 6], 1000, options, f"{SLOW}.{remedy}") for stage, options, remedy in (
        ("sweep", ("windows", "layers", "heads"), " Fewer --windows, --layers or --heads make it shorter."),
        ("generate", ("windows", "generate"), " A smaller --generate makes it shorter."),
        ("linear, generate", ("windows", "generate"), " A smaller --generate makes it shorter."),
        ("heal", ("train", "windows"), " A smaller --train makes it shorter."),
        ("local convergence, W", CONVERGE_KINDS[SYNTHETIC_RUN], " Fewer --trials or --iterations make it shorter."),
        ("local convergence, W, frobenius SVM", CONVERGE_KINDS[SYNTHETIC_RUN], " Fewer --trials make it shorter."),
        ("converge", CONVERGE_KINDS[HEAD_RUN], " Fewer --iterations or --windows make it shorter."),
        ("binary kernel", ("experiments", "quick"), ""),
    )),
]  # fmt: skip


def test_a_long_stage_is_announced_if_both_halves_agree_with_the_options_that_shorten_it(clock, monkeypatch, capsys):
    monkeypatch.setattr(show, "PLAIN_SECONDS", math.inf)
    for stage, seconds, total, options, line in FORECASTS:
        with show.progress(shown=True, options=options) as report_progress:
            for done, clock[0] in enumerate(seconds):
                report_progress(stage, done, total)
        assert capsys.readouterr().err == ("" if line is None else f"{stage}: {line}\n"), (stage, seconds)
    with show.progress(shown=True) as report_progress:  # announced before its start
        for done, clock[0] in zip([0, *range(5)], [0, 600, 600.1, 600.2, 600.3, 600.4], strict=True):
            report_progress("sweep", done, 1000)
    assert capsys.readouterr().err == ""
