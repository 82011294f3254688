"""Tests that `attnlens inspect` poses, shows and draws a head's selection, and refuses what makes no sense."""

import json
from types import SimpleNamespace

import pytest
import views
from program import DEMO, attnlens, refused, without_torch

from attnlens import inspect
from attnlens.records import InspectionBody, Pick, Selection, Sentence, json_schema
from attnlens.report.report import read_report
from attnlens.report.sections.explorer import selections

SMALL = ("--windows", "4", "--length", "32", "--no-progress")
ONE = ("inspect", "demo", "--head", "3.7", "--show", "selection")


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shown")
    result = attnlens(*ONE, "--json", "r.json", "--figure", "margins.png", *SMALL, cwd=folder)
    assert result.returncode == 0, result.stderr
    return result, folder


def test_one_head_is_shown_word_by_word_with_plain_marks(shown):
    result, folder = shown
    assert "What layer 3 head 7 selects" in result.stdout
    assert "posed on the module's inputs" in result.stdout
    assert "\x1b[" not in result.stdout, "no colours into a pipe"
    (found,) = read_report(folder / "r.json").inspection.selections
    assert (found.layer, found.head, found.space) == (3, 7, "input")
    words = {sentence.sequence: sentence.keys for sentence in found.sentences}
    first = found.picks[0]
    query, selected = words[first.sequence][first.query], words[first.sequence][first.selected[0]]
    assert f"[{selected}]" in result.stdout
    assert f"<{query}>" in result.stdout or f"<[{query}]>" in result.stdout or f"<{{{query}}}>" in result.stdout
    assert (folder / "margins.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_carries_what_is_shown_and_only_that_head(shown):
    report = read_report(shown[1] / "r.json")
    assert [(head.layer, head.head) for head in report.heads] == [(3, 7)]
    assert report.settings.analyzers == ["selection"]
    assert report.settings.select == "argmax"
    (found,) = report.inspection.selections
    assert len(found.picks) == report.heads[0].measures["selection.queries"].value
    assert all(len(sentence.keys) == 32 for sentence in found.sentences)
    assert min(pick.margin for pick in found.picks) == pytest.approx(
        report.heads[0].measures["selection.efficiency"].value, rel=1e-8
    )
    assert "Selection" in json.loads(json_schema())["$defs"]


def test_a_folder_gets_the_margins_beside_the_maps(tmp_path):
    result = attnlens(*ONE, "--figure", "pictures", "-q", *SMALL, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    names = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert {"overview.png", "selection-3.7.png", "selection.svm_cosine.png", "selection.margins.png"} <= names
    assert {"selection.projected_svm_cosine.png", "selection.projected_margins.png"} <= names


def test_top_p_is_carried_and_says_where_there_is_no_form():
    report = json.loads(
        inspect(
            "demo", analyzers="selection", layers=[0], heads=[1], select="top-p:0.5", windows=4, length=32
        ).to_json()
    )
    assert report["settings"]["select"] == "top-p:0.5"
    measure = report["heads"][0]["measures"]["selection.efficiency"]
    assert (measure["value"] is None) == ("reason" in measure)


def test_the_list_says_that_it_runs_only_where_it_is_named():
    result = attnlens("list", "analyzers")
    assert "--analyzer selection" in result.stdout
    result = attnlens("inspect", "demo", "--layers", "0", "--heads", "0", "--json", "-", *SMALL)
    assert not [name for name in json.loads(result.stdout)["heads"][0]["measures"] if name.startswith("selection")]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--head", "9.0"), "no layer 9"),
        (("--head", "0.99"), "no head 99"),
        (("--head", "1.2", "--show", "selection", "--analyzer", "spectrum"), "--analyzer selection"),
        (("--head", "1.2", "--show", "selection", "--source", "weights"), "cannot be computed from source=weights"),
        (("--select", "top-p:0.5"), "keyword of the function"),
        (("--analyzer", "selektion"), "selection"),
    ],
)
def test_words_that_make_no_sense_are_refused(words, told):
    refused(attnlens("inspect", "demo", *words), told)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--head", "3"), "LAYER.HEAD"),
        (("--head", "x.1"), "is not a valid head"),
        (("--head", "1.2", "--layers", "1"), "--layers"),
        (("--show", "selection"), "--head 3.7"),
        (("--head", "1.2", "--show", "everything"), "selection"),
        (("--source", "weights", "--analyzer", "selection"), "cannot be computed from source=weights"),
        (("--text", "/dev/zero"), "it is a device, not a file"),
        (("--source", "weights", "--text", str(DEMO / "text.txt")), "text would be ignored"),
        (("--source", "weights", "--windows-csv", "w.csv"), "no windows are read"),
    ],
)
def test_words_that_need_no_model_are_refused_before_the_work(words, told):
    refused(without_torch("inspect", "demo", *words), told)


def test_a_strangers_tokens_are_no_markup_and_steer_no_terminal(capsys):
    pick = Pick(sequence=0, query=2, selected=[0], support=[1], weight=0.9, margin=0.5)
    words = ["[red]\x1b[31m", "{x}\n", "[/]"]
    place = {"site": "a", "layer": 0, "head": 0, "kv_head": 0, "part": "encoder"}
    found = Selection(**place, space="input", picks=[pick], best=1.0, sentences=[Sentence(sequence=0, keys=words)])

    class Shown:
        inspection = InspectionBody(selections=[found])

    print(views.printed(views.alone(*selections(SimpleNamespace(report=Shown()), "terminal"))))
    printed = capsys.readouterr().out
    assert "[[red]�[31m] {{x}} <[/]>" in printed
    assert "\x1b" not in printed
