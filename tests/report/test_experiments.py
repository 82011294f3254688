"""Tests experiments in tables, pictures, pages and rows, whatever a stranger wrote into them."""

from __future__ import annotations

import csv as standard
import io
import re
from html import unescape as html_unescape
from pathlib import Path

import numpy as np
import pytest
import views
from experiment_reports import (
    converging,
    curve,
    experiment_report,
    failing,
    golden,
    of_head,
    selecting,
    series_report,
    training,
)
from program import attnlens  # noqa: F401  # the environment of the tests
from views import overlapping, settle

from attnlens.errors import UsageError
from attnlens.report.pictures.charts import panel_figure
from attnlens.report.pictures.experiments import (
    deviation,
    draw_trajectories,
    experiment_overview,
    experiment_panels,
    groups,
    scale_steps,
)
from attnlens.report.pictures.style import house_style, new_figure
from attnlens.report.report import Report, read_report
from attnlens.report.sections import facts as reports
from attnlens.report.sections.experiments import changed_measures, measures_of

HOSTILE = "=x\x1b[2J <script>alert(1)</script> \u202egnp [red]b[/red] | `c`"
STEERING = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]")


def row(text: str, *words: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.split()[: len(words)] == list(words))


def hostile() -> Report:
    one = converging(
        name=HOSTILE,
        question=HOSTILE,
        settings={HOSTILE: HOSTILE},
        source=HOSTILE,
        axis=HOSTILE,
        model=HOSTILE,
        final={HOSTILE: None},
        published={HOSTILE: 1.0},
        errors={},
        reasons={HOSTILE: HOSTILE},
        labels={HOSTILE: HOSTILE},
        curves={HOSTILE: curve([1.0, 2.0], np.array([0.1, 0.2]), quantity=HOSTILE, picture=HOSTILE, label=HOSTILE)},
    )
    other = training(1, 2, 3)
    named = {"axis": HOSTILE, "question": HOSTILE, "reasons": {HOSTILE: HOSTILE}}
    return experiment_report(one, other.model_copy(update=named))


def test_every_figure_stands_beside_the_published_with_its_verdict() -> None:
    text = views.summary(experiment_report(converging(), golden(), failing(), command="reproduce"))
    assert row(text, "local", "convergence")[2:] == [
        *("W", "to", "Frobenius", "0.991", "±", "0.0021", "0.992", "0.010", "pass")
    ]
    assert row(text, "golden", "instances")[2:] == ["vis1", "‖W‖_F", "8.6857350", "8.6857350", "1.0e-06", "pass"]
    assert row(text, "largest", "gap") == ["largest", "gap", "3.2e-13", "≤", "0", "1.0e-09", "pass"]
    assert row(text, "rank") == ["rank", "1", "1", "exact", "pass"]
    assert row(text, "failing", "norm")[5] == "FAIL"
    assert row(text, "gap")[-1] == "FAIL"
    assert "3 of 3 experiments compared with published figures; missed by failing." in text
    assert "failing: rank, because the solver stopped" in text
    assert "trials 100, 1.2 s)" in " ".join(text.split()), "a line may end anywhere in it"
    assert "COMPLETE" not in text, "no model was read"


def test_all_that_pass_are_said_to_pass_and_what_was_not_published_is_not_judged() -> None:
    assert "2 of 2 experiments compared with published figures; all agree." in views.summary(
        experiment_report(converging(), selecting())
    )
    text = views.summary(experiment_report(of_head()))
    assert "nothing published to compare with" in text
    assert "verdict" not in text
    assert "pass" not in text


def test_a_report_says_which_experiment_ran_on_which_model() -> None:
    others = [golden(name="one", model="demo"), golden(name="two", model="demo"), golden(name="three", model="anew")]
    report = experiment_report(converging(), *others, command="reproduce")
    line = "one, two: demo; three: anew; all others: one-layer attention (synthetic)"
    title = "one-layer attention (synthetic) + demo + anew"
    assert reports.title(report) == title
    assert reports.ran_on(report) == line
    texts = [views.summary(report), views.page(report), html_unescape(views.markdown(report))]
    with house_style():
        figure = experiment_overview(report)
        texts.append(" ".join(text.get_text() for text in figure.texts))
        settle(figure)
        assert overlapping(figure) == []
    for text in texts:
        assert title in text
        assert line in text
    assert "one: Are solved instances solved again? (on demo, 1.2 s)" in texts[0]
    assert reports.ran_on(experiment_report(golden(model="demo"))) == "golden instances: demo", "no others to speak of"
    plain = experiment_report(converging())
    assert (reports.title(plain), reports.ran_on(plain)) == ("one-layer attention (synthetic)", "")  # the control
    assert "all others" not in views.page(plain)


def test_a_series_shows_what_is_asked_first_and_all_when_asked() -> None:
    report = series_report()
    text = views.summary(report)
    names = [line.split()[0] for line in text.splitlines() if "." in (line.split() or [""])[0][1:]]
    shown = [name for name in names if name.startswith(("weights.", "tokens.", "selection."))]
    assert shown[:4] == ["selection.efficiency", "weights.symmetry", "weights.effective_rank", "tokens.entropy"]
    assert "tokens.share_key" not in text
    assert (row(text, "loss")[1], row(text, "loss")[7]) == ("7.00", "2.51")
    assert "COMPLETE: 32 of 32 heads" in text
    whole = views.details(report)
    assert "tokens.share_key" in whole
    found = report.experiments[0].curves["weights.symmetry"]
    cells = row(text, "weights.symmetry")
    assert cells[1] == f"{found.median[0]:.3f}"
    assert cells[7] == f"{found.median[-1]:.3f}"
    assert cells[8:11] == [f"{found.low[-1]:.3f}", "…", f"{found.high[-1]:.3f}"]  # type: ignore[index]
    assert max(map(len, views.summary(report, 100).splitlines())) <= 100


def test_many_checkpoints_are_thinned_in_the_table_and_it_says_so() -> None:
    text = views.summary(series_report(checkpoints=40))
    assert "8 of 40 checkpoints are shown" in text
    assert "are shown" not in views.summary(series_report(checkpoints=8))  # the control


def test_a_measure_that_never_changes_is_left_out() -> None:
    found = training()
    constant = curve(found.curves["loss"].steps, np.full(7, 16.0))
    more = found.model_copy(update={"curves": found.curves | {"weights.constant": constant}})
    assert "weights.constant" in measures_of(more)
    assert "weights.symmetry: null" not in measures_of(more)
    named = found.model_copy(update={"curves": found.curves | {"mine: null": constant}})
    assert "mine: null" in measures_of(named), "a name makes no null"
    assert "weights.constant" not in changed_measures(more)


def test_rows_for_a_spreadsheet() -> None:
    rows = list(standard.DictReader(io.StringIO(views.csv(experiment_report(converging(), golden(), failing())))))
    assert len(rows) == 10
    assert rows[0] == {
        "experiment": "local convergence",
        "figure": "W to Frobenius",
        "ours": "0.991",
        "error": "0.0021",
        "published": "0.992",
        "bound": "within",
        "tolerance": "0.01",
        "verdict": "pass",
    }
    assert [found["verdict"] for found in rows[7:]] == ["fail", "fail", "fail"]
    assert rows[9]["ours"] == ""
    followed = list(standard.DictReader(io.StringIO(views.csv(series_report(2, 3)))))
    assert len(followed) == 2 * 3 * 5 * 7
    assert followed[1]["training step"] == "30"
    assert set(followed[0]) == {"layer", "head", "measure", "training step", "value", "se"}


def test_markdown_and_html_hold_the_same_tables() -> None:
    report = experiment_report(converging(), failing())
    page = views.page(report)
    assert "FAIL" in views.markdown(report)
    assert "FAIL" in page
    assert "2 of 2 experiments compared with published figures; missed by" in page
    followed = series_report()
    assert "tokens.share&#95;key" in views.markdown(followed) or "tokens.share_key" in views.markdown(followed)
    assert "quartiles over heads at the last checkpoint" in views.page(followed)


def test_what_strangers_wrote_is_text_and_nothing_else(tmp_path: Path) -> None:
    report = hostile()
    page, marked = views.page(report), views.markdown(report)
    assert views.runs_its_own_script_alone(page)
    assert "<script" not in marked
    assert not STEERING.search(page)
    assert not STEERING.search(marked.replace("\u200b", ""))
    assert not STEERING.search(views.summary(report))
    for cells in standard.reader(io.StringIO(views.csv(experiment_report(report.experiments[0])))):
        assert not any(cell.startswith(("=", "+", "@")) for cell in cells)
    drawn = views.save_pictures(report, tmp_path / "pictures")
    assert all(path.parent == tmp_path / "pictures" for path in drawn)
    assert all(re.fullmatch(r"[\w.-]+", path.name) for path in drawn)


@pytest.mark.parametrize("report", [experiment_report(converging(), selecting(), golden(), of_head()), series_report()])
def test_a_report_comes_back_from_json_and_draws_the_same_pictures(report: Report, tmp_path: Path) -> None:
    report.write_json(tmp_path / "report.json")
    again = read_report(tmp_path / "report.json")
    assert again.experiments[0].meets("W to Frobenius") == report.experiments[0].meets("W to Frobenius")
    assert again.to_json() == report.to_json()
    assert views.summary(again) == views.summary(report)
    one, other = views.save_pictures(again, tmp_path / "a"), views.save_pictures(again, tmp_path / "b")
    assert [path.name for path in one] == [path.name for path in other]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(one, other, strict=True))
    assert (tmp_path / "a" / "overview.png").read_bytes().startswith(b"\x89PNG")
    assert len(one) > 4


def test_nothing_to_draw_is_said() -> None:
    with pytest.raises(UsageError, match="no curves"):
        views.save_pictures(experiment_report(golden(published=None, tolerance=None, bounds={})), Path("nowhere"))


@pytest.mark.parametrize(
    "report",
    [
        experiment_report(converging(), selecting(), golden(), failing()),
        experiment_report(of_head()),
        series_report(),
        series_report(12, 12),
    ],
)
def test_no_two_texts_of_a_page_overlap(report: Report) -> None:
    with house_style():
        for figure in (experiment_overview(report), *(panel_figure(report, p) for p in experiment_panels(report)[:3])):
            settle(figure)
            assert overlapping(figure) == []
            figure.text(0.5, 0.5, "over", fontsize=30)
            figure.text(0.5, 0.5, "under", fontsize=30)
            assert ("under", "over") in overlapping(figure)  # the control


def test_curves_of_one_quantity_share_their_axes() -> None:
    assert {name: list(curves) for name, curves in groups(of_head()).items()} == {
        "correlation": ["correlation: from zero", "correlation: from M"],
        "norm": ["norm: from zero"],
        "selection kept": ["selection kept"],
        "KL": ["KL to one-hot"],
    }
    assert list(groups(converging())) == [""]
    assert len(groups(converging())[""]) == 4


@pytest.mark.parametrize(
    ("ours", "bound", "expected"),
    [
        (1.05, "within", 0.5),
        (9.0, "within", 3.0),
        (-9.0, "at most", -3.0),
        (None, "within", -3.0),
        (0.9, "within", -1.0),
    ],
)
def test_the_distance_to_the_published_is_counted_in_tolerances(
    ours: float | None, bound: str, expected: float
) -> None:
    found = golden(final={"x": ours}, published={"x": 1.0}, tolerance={"x": 0.1}, bounds={"x": bound}, reasons={})
    assert deviation(found, "x") == pytest.approx(expected)


def test_an_exact_figure_is_at_0_or_at_the_edge() -> None:
    fields = {"published": {"x": 2.0}, "tolerance": None, "bounds": {}}
    assert deviation(golden(final={"x": 2.0}, **fields), "x") == 0
    assert deviation(golden(final={"x": 3.0}, **fields), "x") == 3


def test_many_steps_are_named_at_both_ends_and_only_steps_that_are() -> None:
    with house_style():
        for most, whole in ((16.0, True), (4.0, False)):
            axes = new_figure(2.5, 2).add_axes((0.1, 0.1, 0.8, 0.8))
            scale_steps(axes, np.linspace(most / 16, most, 16).tolist(), "k")
            named = list(axes.get_xticks())
            assert (named[0], named[-1]) == (most / 16, most)
            assert len(named) >= 4
            assert all(tick == int(tick) for tick in named) == whole


@pytest.mark.parametrize(
    ("steps", "scale"),
    [([0.0, 30, 100, 3000], "symlog"), ([1.0, 10, 100], "log"), ([1.0, 2, 3], "linear"), ([0.0, 1, 2], "linear")],
)
def test_steps_that_span_factors_are_drawn_by_factors(steps: list[float], scale: str) -> None:
    with house_style():
        axes = new_figure(4, 3).add_axes((0.1, 0.1, 0.8, 0.8))
        scale_steps(axes, steps, "step")
        assert axes.get_xscale() == scale
        named = list(axes.get_xticks())
        assert named[0] == steps[0]
        assert named[-1] == steps[-1]


def test_the_null_is_drawn_as_a_band_where_there_is_one() -> None:
    found = training()
    with house_style():
        for name, bands in (("weights.symmetry", 1), ("tokens.entropy", 0)):
            axes = new_figure(4, 3).add_axes((0.1, 0.1, 0.8, 0.8))
            draw_trajectories(axes, experiment=found, name=name)
            fills = [drawn for drawn in axes.collections if type(drawn).__name__ == "FillBetweenPolyCollection"]
            assert len(fills) == bands
            black = [line for line in axes.lines if line.get_color() == "black"]
            assert np.allclose(black[0].get_ydata(), np.array(found.curves[name].median))
