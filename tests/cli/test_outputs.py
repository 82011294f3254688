"""Tests that every output lands where it was asked for, and what can't land there is found before the work."""

import os
import pty
import stat
import subprocess
from pathlib import Path

import forkserver
import pytest
import typer
from program import attnlens, environment_with, in_shell, refused, without_torch
from reports import synthetic_report
from swap_reports import swap_report

from attnlens.cli import outputs, show
from attnlens.cli.outputs import Outputs, deliver
from attnlens.errors import AttnlensError, OutputError
from attnlens.records import Site
from attnlens.report import pictures
from attnlens.report.render.html import is_file
from attnlens.report.report import read_report
from attnlens.runs.inspect.inspection import WorkUnit
from attnlens.runs.inspect.pipeline import report_stages

ONE = ("inspect", "demo", "--source", "weights", "--layers", "0", "--heads", "0", "--no-progress")
LINE = " ".join(ONE)
OPTIONS = ("--json", "--csv", "--figure", "--html", "--markdown")


@pytest.mark.parametrize("option", OPTIONS)
def test_an_empty_path_is_refused_before_the_work(tmp_path, option):
    refused(without_torch("inspect", "demo", option, "", cwd=tmp_path), f"{option} does not name a file")


@pytest.mark.parametrize("other", ["a.png", "./a.png", "link.png"])
def test_two_outputs_in_one_file_are_refused_before_the_work(tmp_path, other):
    (tmp_path / "link.png").symlink_to("a.png")
    for there in (False, True):
        if there:
            (tmp_path / "a.png").touch()
        result = without_torch("inspect", "demo", "--json", "a.png", "--figure", other, cwd=tmp_path)
        refused(result, "--json and --figure name the same file")


def test_a_file_in_the_place_of_pictures_is_refused_before_the_work(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    refused(without_torch("inspect", "demo", "--figure", "notes.txt", cwd=tmp_path), "notes.txt", ".png")
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("option", ["--save", "--json", "--figure"])
def test_a_name_that_no_file_can_have_is_told(tmp_path, option):
    refused(attnlens("swap-kernel", "demo", option, "n" * 300, cwd=tmp_path), "File name too long")
    assert not list(tmp_path.iterdir())


def test_a_current_folder_that_was_removed_is_told():
    words = "swap-kernel demo --save x --windows 2 -q"
    refused(
        in_shell(f"mkdir gone; cd gone; rmdir ../gone; attnlens {words}", afresh=True),
        "current folder",
        "Change to another folder",
    )


def test_matplotlib_says_nothing_of_its_cache(tmp_path):
    words = "inspect demo --source weights --layers 0 --heads 0 --analyzer symmetry -q --figure a.png"
    result = in_shell(f"attnlens {words}", tmp_path, afresh=True, MPLCONFIGDIR="/dev/null/none")
    assert (result.returncode, result.stdout) == (0, "")
    assert result.stderr == "Wrote a.png\n" * ("Wrote" in result.stderr)


def test_a_python_without_docstrings_is_told():
    refused(in_shell("attnlens list", afresh=True, PYTHONOPTIMIZE="2"), "-OO")


def test_links_devices_and_modes_are_kept(tmp_path):
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "real.json").chmod(0o640)
    (tmp_path / "link.json").symlink_to("real.json")
    words = ("--json", "link.json", "--csv", os.devnull, "--markdown", os.devnull, "-q")
    result = attnlens(*ONE, *words, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "link.json").is_symlink()
    assert len(read_report(tmp_path / "real.json").heads) == 1
    assert stat.S_IMODE((tmp_path / "real.json").stat().st_mode) == 0o640
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)


def test_stdout_by_its_name_is_written_and_not_replaced(tmp_path):
    piped = in_shell(f"attnlens {LINE} -q --csv /dev/stdout | cat")
    assert piped.stdout.startswith("site,layer,head"), piped.stderr
    assert in_shell(f"attnlens {LINE} --csv /dev/stdout > {tmp_path}/both").returncode == 0
    both = (tmp_path / "both").read_text()
    assert both.startswith("site,layer,head")
    assert "COMPLETE: 1 of 1 heads" in both
    substituted = in_shell(f"attnlens {LINE} -q --csv >(cat > {tmp_path}/sub); wait $!; cat {tmp_path}/sub")
    assert substituted.stdout == piped.stdout


@pytest.mark.parametrize("option", ["figure", "html"])
def test_a_picture_that_cant_be_drawn_costs_itself_alone(tmp_path, option):
    report = synthetic_report(2, 2, source="weights")
    empty = report.model_copy(update={"heads": []})
    files = {"json": str(tmp_path / "a.json"), "csv": str(tmp_path / "a.csv"), option: str(tmp_path / "pictures")}
    with pytest.raises(AttnlensError, match="no measures"):
        deliver(Outputs(**files, quiet=True), empty)
    assert {"a.json", "a.csv"} == {path.name for path in tmp_path.iterdir()}
    deliver(Outputs(**files, quiet=True), report)
    assert {"a.json", "a.csv", "pictures"} == {path.name for path in tmp_path.iterdir()}


def test_every_picture_that_fails_is_named_and_the_others_are_drawn(tmp_path, monkeypatch, capsys):
    honest = pictures.panel_figure

    def breaking(report, panel):
        if panel.stem == "weights.symmetry":
            raise ZeroDivisionError
        return honest(report, panel)

    monkeypatch.setattr(pictures, "panel_figure", breaking)
    with pytest.raises(AttnlensError, match=r"weights.symmetry\.png can't be drawn: ZeroDivisionError"):
        deliver(
            Outputs(figure=str(tmp_path / "p"), json=str(tmp_path / "a.json")), synthetic_report(2, 2, source="weights")
        )
    drawn = {path.name for path in (tmp_path / "p").iterdir()}
    assert "overview.png" in drawn
    assert "weights.symmetry.png" not in drawn
    assert f"Wrote {tmp_path}/a.json, {len(drawn)} pictures to {tmp_path}/p" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["figure", "html"])
def test_an_interruption_while_a_picture_is_drawn_costs_the_pictures_alone(tmp_path, monkeypatch, capsys, option):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(pictures.maps, "overview_figure", interrupted)
    files = {"json": str(tmp_path / "a.json"), "markdown": str(tmp_path / "a.md"), option: str(tmp_path / "x.png")}
    with pytest.raises(KeyboardInterrupt):
        deliver(Outputs(**files), synthetic_report(2, 2))
    assert {"a.json", "a.md"} == {path.name for path in tmp_path.iterdir()}
    shown = capsys.readouterr()
    assert "COMPLETE" in shown.out, "the tables too come before the pictures"
    assert "a.md" in shown.err


def test_after_an_interruption_the_code_is_130_whatever_else_fails(tmp_path, capsys):
    empty = synthetic_report(2, 2).model_copy(update={"heads": []})
    with pytest.raises(typer.Exit) as stop:
        deliver(Outputs(figure=str(tmp_path / "x.png"), quiet=True), empty, interrupted=True)
    assert stop.value.exit_code == 130
    assert "no measures" in capsys.readouterr().err


def test_a_full_disk_leaves_no_empty_folder_of_pictures(tmp_path, monkeypatch):
    def full(path, _content):
        raise OutputError(f"{path} can't be written: No space left on device.", "Make room.")

    monkeypatch.setattr(outputs, "write_atomically", full)
    with pytest.raises(OutputError, match="No space"):
        deliver(Outputs(figure=str(tmp_path / "p"), quiet=True), synthetic_report(2, 2, source="weights"))
    assert list(tmp_path.iterdir()) == []


def test_pictures_are_counted(tmp_path):
    result = attnlens(*ONE, "--figure", "all", "--html", "one.html", cwd=tmp_path)
    pictures = len(list((tmp_path / "all").iterdir()))
    assert pictures > 1
    assert f"Wrote {pictures} pictures to all, one.html" in result.stderr
    assert "Wrote one.png" in attnlens(*ONE, "--figure", "one.png", cwd=tmp_path).stderr


def test_pictures_of_another_run_are_told(tmp_path, capsys):
    folder = tmp_path / "all"
    deliver(Outputs(figure=str(folder)), swap_report())
    assert "older" not in capsys.readouterr().err
    (folder / "another.png").touch()
    deliver(Outputs(figure=str(folder)), swap_report())
    assert "contains 1 older picture that this run did not write." in capsys.readouterr().err


def test_an_ending_that_is_no_picture_makes_no_folder(tmp_path):
    with pytest.raises(OutputError, match=r"\.xyz is not supported") as refusal:
        Outputs(figure=str(tmp_path / "one.xyz")).check({})
    assert ".png, .svg or .pdf" in refusal.value.remedy
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run.2").mkdir()
    Outputs(figure=str(tmp_path / "run.2")).check({})
    assert not is_file(tmp_path / "run.2"), "a folder that is there is one"


@pytest.mark.parametrize("words", ["list", "list schema", "--help", "--version", LINE, f"{LINE} --json -"])
def test_a_full_stdout_is_told(words):
    refused(in_shell(f"attnlens {words} > /dev/full"), "stdout", "No space left")


@pytest.mark.parametrize("words", ["list", "list schema", "--help", LINE])
def test_a_closed_stdout_is_told(words):
    refused(in_shell(f"attnlens {words} >&-"), "stdout is closed")


def test_a_closed_stdin_is_told_where_it_is_read():
    refused(in_shell("attnlens inspect demo --text - <&-"), "stdin is closed")
    assert in_shell(f"attnlens {LINE} -q <&-").returncode == 0


@pytest.mark.parametrize("words", ["list", "--help", f"{LINE} --table --json r.json"])
def test_a_reader_that_leaves_ends_it_without_a_word(tmp_path, words):
    result = in_shell(f"cd {tmp_path}; attnlens {words} 2>err | true; echo ${{PIPESTATUS[0]}}")
    assert result.stdout == "141\n", "as a program that the closed pipe's signal ends"
    assert "Error" not in (tmp_path / "err").read_text()
    if "--json" in words:
        assert read_report(tmp_path / "r.json").coverage.complete, "the files are written nonetheless"


@pytest.mark.parametrize("words", [ONE, ("list",), ("--help",)])
def test_a_page_of_no_columns_shows_all_the_same(words):
    assert attnlens(*words, COLUMNS="0").stdout == attnlens(*words).stdout != ""


def on_a_terminal(*words, **environment):
    """What the program writes to a terminal on stderr."""
    ours, theirs = pty.openpty()
    command = [str(forkserver.commands() / "attnlens"), *words]
    env = environment_with(**{"TERM": "xterm"} | environment)
    with subprocess.Popen(command, env=env, stdin=theirs, stdout=subprocess.DEVNULL, stderr=theirs) as process:
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


def test_a_terminal_is_animated_unless_it_is_asked_not_to():
    words = ("inspect", "demo", "--source", "weights", "--layers", "0")
    hidden_cursor = "\x1b[?25l"
    assert hidden_cursor in on_a_terminal(*words), "the control: without any of them, the bar moves"
    for variable in ({"NO_COLOR": "1"}, {"CI": "true"}, {"TERM": "dumb"}):
        assert "\x1b" not in on_a_terminal(*words, **variable), variable
    assert "\x1b" not in attnlens(*words, FORCE_COLOR="1").stderr, "nor is a pipe"


def test_plain_lines_tell_of_all_units_and_of_the_time_left(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(show.time, "monotonic", lambda: clock[0])
    with show.progress(shown=True) as tell:
        sites = (Site("a", 0, 0, "decoder"),)
        parts = [WorkUnit("weights", sites), *(WorkUnit("tokens", sites, batch, 2) for batch in range(9))]
        units = {unit.name: unit for unit in parts}
        more = report_stages(tell, units)
        for unit in units:
            clock[0] += 4.0
            more(unit)
    lines = ["units: 3 of 10, 0:00:28 left", "units: 6 of 10, 0:00:16 left", "units: 9 of 10, 0:00:04 left"]
    assert capsys.readouterr().err.splitlines() == lines
