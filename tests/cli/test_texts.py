"""Tests how the program samples texts and shows one head's selection: stdout, stderr and files."""

import csv
import json
import math
import statistics
from hashlib import sha256
from types import SimpleNamespace

import pytest
import tiny
import views
from program import SMALL, invoke
from views import absent

from attnlens import inspect
from attnlens.errors import UsageError
from attnlens.models import texts
from attnlens.records import InspectionBody, Pick, Selection, Sentence, json_schema
from attnlens.report.export import drawings as drawings_of
from attnlens.report.report import read_report
from attnlens.report.sections.explorer import selections

BOOK = texts.sample("demo")[0].text
FEW = ("--table", "--source", "tokens", "--analyzer", "spectrum", "--layers", "0", "--length", "32", "--no-progress")


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """Six texts, different stretches of one book."""
    folder = tmp_path_factory.mktemp("texts")
    paths = [folder / f"piece-{number}.txt" for number in range(6)]
    for number, path in enumerate(paths):
        path.write_text(BOOK[8_000 * number : 8_000 * (number + 1)])
    return [str(path) for path in paths]


def flowing(*words, paths=(), **more):
    """Stdout without line breaks of a command that reads these texts."""
    result = invoke(*words, *(word for path in paths for word in ("--text", path)), **more)
    assert result.returncode == 0, result.stderr
    return " ".join(result.stdout.split())


def test_windows_are_described_and_written_one_by_one(pieces, tmp_path):
    files = ("--windows", "9", "--json", "r.json", "--windows-csv", "w.csv")
    shown = flowing("inspect", "demo", *FEW, *files, paths=pieces[:3], cwd=tmp_path)
    windows = "9 × 32 tokens spread over piece-0.txt + piece-1.txt + piece-2.txt"
    median = "± is the standard error of that median (errors reflect which 9 of the"
    assert not absent(shown, windows, median, "between texts")
    report = json.loads((tmp_path / "r.json").read_text())
    assert [len(text["windows"]) for text in report["settings"]["texts"]] == [3, 3, 3]
    assert "windows" not in report
    digest = sha256((tmp_path / "w.csv").read_bytes()).hexdigest()
    assert report["windows_file"] == {"name": "w.csv", "sha256": digest}
    rows = list(csv.DictReader((tmp_path / "w.csv").open()))
    assert len(rows) == 9 * 8
    head = report["heads"][5]["measures"]["tokens.entropy"]
    values = [float(row["tokens.entropy"]) for row in rows if row["head"] == "5"]
    assert statistics.mean(values) == pytest.approx(head["value"], rel=1e-8)
    groups = [values[start : start + 3] for start in (0, 3, 6)]
    error = math.sqrt(sum((1 / 3) ** 2 * statistics.variance(group) / 3 for group in groups))
    assert error == pytest.approx(head["se"], rel=1e-7), "anyone can redo the inference from the file"


def test_a_swap_writes_its_windows_and_the_change_on_each_text(pieces, tmp_path):
    words = ("--table", "--layers", "0", "--generate", "0", "--windows", "8", "--length", "32", "--no-progress")
    words += ("--json", "r.json", "--windows-csv", "w.csv")
    assert "Text by text" in flowing("swap-kernel", "demo", *words, paths=pieces[:2], cwd=tmp_path)
    swap = json.loads((tmp_path / "r.json").read_text())["swap"]
    rows = list(csv.DictReader((tmp_path / "w.csv").open()))
    assert len(rows) == 8
    changes = [float(row["loss.after"]) - float(row["loss.before"]) for row in rows]
    assert statistics.mean(changes) == pytest.approx(swap["loss"]["delta"], rel=1e-6)
    for number, text in enumerate(swap["loss_by_text"]):
        mean = statistics.mean(changes[4 * number : 4 * number + 4])
        assert mean == pytest.approx(text["change"]["delta"], rel=1e-6)


def test_intervals_over_texts_need_five(pieces):
    settings = {"source": "tokens", "analyzers": "spectrum", "layers": [0], "length": 32}
    for count, windows, message in (
        (4, 8, r"Intervals over texts need .* 5 texts, but the sequences come from only 4\."),
        (5, 4, r"need at least 5 texts, but the sequences come from only 4\.\nIncrease --windows"),
    ):
        with pytest.raises(UsageError, match=message):
            inspect("demo", text=pieces[:count], windows=windows, intervals="texts", **settings)
    shown = flowing("inspect", "demo", *FEW, "--windows", "12", paths=pieces)
    assert "errors are computed over 6 texts and apply to similar texts" in shown
    assert inspect("demo", text=pieces, windows=12, intervals="windows", **settings).settings.intervals == "windows"


def test_captions_follow_short_and_skipped_texts_and_the_placement(pieces, tmp_path):
    (tmp_path / "short.txt").write_text(BOOK[:900])
    assert "of the 32 requested windows." in flowing("inspect", "demo", *FEW, paths=[tmp_path / "short.txt"])
    shown = flowing("inspect", "demo", *FEW, "--windows", "4", paths=pieces[:5])
    assert "Left out: piece-4.txt, because there are only 4 windows for 5 texts." in shown
    shown = flowing("inspect", "demo", *FEW, "--windows", "4", "--placement", "first")
    source, scope = "4 × 32 tokens from the beginning of King James passages", "apply to similar windows, not to all of"
    wrong = "windows of King James passages"
    assert absent(shown, source, f"{scope} King James passages", wrong) == [wrong]


@pytest.mark.usefixtures("without_layout")
def test_a_foreign_text_stops_unless_it_is_allowed(tmp_path):
    folder, text = tmp_path / "model", tmp_path / "foreign.txt"
    tiny.gpt2(vocab_size=300).save_pretrained(folder)
    tiny.tokenizer("bert").save_pretrained(folder)
    text.write_text("ж ш щ " * 200)
    words = ("inspect", folder, "--source", "tokens", "--windows", "4", "--length", "16", "--text", text)
    words += ("--analyzer", "spectrum", "--no-progress")
    stopped = invoke(*words)
    assert (stopped.returncode, stopped.stdout) == (2, "")
    unknown = "88% of the tokens of foreign.txt are unknown to the tokenizer"
    assert not absent(stopped.stderr, unknown, "--allow-foreign-text")
    files = ("--json", "r.json", "--html", "r.html", "--markdown", "r.md")
    shown = flowing(*words, "--allow-foreign-text", *files, cwd=tmp_path)
    for written in (shown, *((tmp_path / name).read_text() for name in files[1::2])):
        assert "88% of the tokens of foreign" in " ".join(written.split())


def test_a_text_that_a_byte_level_model_guesses_worse_than_evenly_is_named(pieces, tmp_path):
    foreign = tmp_path / "foreign.txt"
    foreign.write_text("".join(chr(0x4E00 + 7919 * number % 2000) for number in range(900)))
    swap = ("swap-kernel", "demo", "--layers", "0", "--generate", "0", "--length", "32", "--no-progress")
    for words in (("inspect", "demo", *FEW), swap):
        shown = flowing(*words, "--windows", "8", paths=[foreign, pieces[0]])
        loss, guess = "The model's loss on foreign.txt is", "worse than random guessing (ln 1024 = 6.93)"
        assert absent(shown, loss, guess, "loss on piece-0.txt") == ["loss on piece-0.txt"], "the control"


def test_one_head_is_shown_word_by_word_with_plain_marks(tmp_path, monkeypatch):
    monkeypatch.setattr("attnlens.analyzers.selection.NULL_DRAWS", {"rotations": 2})
    words = ("inspect", "demo", "--head", "3.7", "--show", "selection", "--json", "r.json", *SMALL)
    result = invoke(*words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert not absent(result.stdout, "What layer 3 head 7 selects", "posed on the module's inputs")
    assert "\x1b[" not in result.stdout, "no colours into a pipe"
    report = read_report(tmp_path / "r.json")
    (selection,) = report.inspection.selections
    assert (selection.layer, selection.head, selection.space) == (3, 7, "input")
    keys = {sentence.sequence: sentence.keys for sentence in selection.sentences}
    first = selection.picks[0]
    query, selected = keys[first.sequence][first.query], keys[first.sequence][first.selected[0]]
    assert f"[{selected}]" in result.stdout
    assert any(mark.format(query) in result.stdout for mark in ("<{}>", "<[{}]>", "<{{{}}}>"))
    assert [(head.layer, head.head) for head in report.heads] == [(3, 7)]
    assert (report.settings.analyzers, report.settings.select) == (["selection"], "argmax")
    measures = report.heads[0].measures
    assert len(selection.picks) == measures["selection.queries"].value
    assert all(len(sentence.keys) == 32 for sentence in selection.sentences)
    least = min(pick.margin for pick in selection.picks)
    assert least == pytest.approx(measures["selection.efficiency"].value, rel=1e-8)
    assert "Selection" in json.loads(json_schema())["$defs"]
    curves = [f"{projected}{name}" for projected in ("", "projected_") for name in ("svm_cosine", "margins")]
    drawings = {path.stem: draw for path, draw in drawings_of(report, tmp_path / "p").items()}
    assert {"overview", "selection-3.7", *(f"selection.{name}" for name in curves)} <= set(drawings)
    assert drawings["selection-3.7"]()[0].startswith(b"\x89PNG")
    small = {"layers": [0], "heads": [1], "windows": 2, "length": 16}
    report = json.loads(inspect("demo", analyzers="selection", select="top-p:0.5", **small).to_json())
    assert report["settings"]["select"] == "top-p:0.5"
    measure = report["heads"][0]["measures"]["selection.efficiency"]
    assert (measure["value"] is None) == ("reason" in measure)


def test_a_strangers_tokens_are_no_markup_and_steer_no_terminal():
    pick = Pick(sequence=0, query=2, selected=[0], support=[1], weight=0.9, margin=0.5)
    sentence = Sentence(sequence=0, keys=["[red]\x1b[31m", "{x}\n", "[/]"])
    place = {"site": "a", "layer": 0, "head": 0, "kv_head": 0, "part": "encoder"}
    selection = Selection(**place, space="input", picks=[pick], best=1.0, sentences=[sentence])
    model = SimpleNamespace(layer_name=str)
    report = SimpleNamespace(inspection=InspectionBody(selections=[selection]), model=model)
    printed = views.printed(views.alone(*selections(SimpleNamespace(report=report), "terminal")))
    assert "[[red]�[31m] {{x}} <[/]>" in printed
    assert "\x1b" not in printed
