"""Tests the words, axes and rows of experiments: what the figures are, of what, and what is left out."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import views
from experiment_reports import converging, curve, experiment_report, failing, golden, of_head, series_report
from matplotlib.axes import Axes
from program import attnlens  # noqa: F401  # the environment of the tests

from attnlens.records import Curve, Experiment
from attnlens.report import export
from attnlens.report.pictures.charts import panel_figure
from attnlens.report.pictures.experiments import draw_trajectories, experiment_overview, experiment_panels, groups
from attnlens.report.pictures.style import house_style, new_figure
from attnlens.report.render import terminal
from attnlens.report.render.terminal import console
from attnlens.report.report import Report
from attnlens.report.sections.experiments import format_label, setting


def of_curves(curves: dict[str, list[float]], **shown: Any) -> Experiment:
    """An experiment whose curves have these values."""
    return converging(
        curves={of: curve([1.0 + n for n in range(len(v))], np.array(v), **shown) for of, v in curves.items()}
    )


def panel_axes(report: Report, number: int = 0) -> Axes:
    figure = panel_figure(report, experiment_panels(report)[number])
    return figure.axes[0]


def test_an_experiment_with_nothing_to_meet_is_not_said_to_meet_it() -> None:
    nothing = {"published": None, "tolerance": None, "bounds": {}}
    some = experiment_report(golden(), *(golden(name=f"other {n}", **nothing) for n in range(5)))
    sentence = "1 of 6 experiments compared with published figures; all agree."
    assert sentence in views.summary(some)
    assert sentence in views.markdown(some)
    with house_style():
        texts = [text.get_text() for text in experiment_overview(some).texts]
    assert any(sentence in text for text in texts)
    missed = experiment_report(failing(), golden(), golden(name="other", **nothing))
    sentence = "2 of 3 experiments compared with published figures; missed by failing."
    assert sentence in views.summary(missed)
    assert "; all agree." in views.summary(experiment_report(golden()))  # the control


def test_each_null_is_said_to_be_what_it_is() -> None:
    def told(*names: str) -> str:
        report = series_report()
        (found,) = report.experiments
        nulls = {
            f"{name}: null": curve(found.curves[name].steps, np.full(7, 0.1), 0.02, null_of=name) for name in names
        }
        curves = {name: made for name, made in found.curves.items() if made.null_of is None} | nulls
        again = report.model_copy(update={"experiments": [found.model_copy(update={"curves": curves})]})
        return " ".join(views.summary(again).split())

    assert "null: the value expected by chance (the head randomly rotated), mean" in told("selection.efficiency")
    assert "null: the value expected by chance (random W_Q, W_K), mean" in told("weights.symmetry")
    both = told("weights.symmetry", "selection.efficiency")
    assert "(random W_Q, W_K), for selection.* the value expected by chance (the head" in both
    assert "null" not in told()  # the control


def test_one_head_has_no_quartiles_and_no_layers_to_tell_apart() -> None:
    one, several = series_report(1, 1), series_report(2, 1)
    assert "quartiles" not in views.summary(one)
    assert "Quartiles" not in views.markdown(one)
    assert "quartiles" in views.summary(several)  # the control
    with house_style():
        bars = [
            [axes for axes in experiment_overview(report).axes for inner in axes.child_axes if inner]
            for report in (one, several)
        ]
    assert [len(found) for found in bars] == [0, 2], "one per row"
    assert not any("coloured" in panel.caption for panel in experiment_panels(one))


def test_heads_that_leave_the_frame_are_counted() -> None:
    report = series_report(8, 16)
    assert not any("cut" in panel.note for panel in experiment_panels(report))  # the control
    (found,) = report.experiments
    stray = next(place for place, line in enumerate(found.trajectories) if line.measure == "tokens.entropy")
    lines = list(found.trajectories)
    lines[stray] = lines[stray].model_copy(update={"values": [*lines[stray].values[:6], 50.0]})
    far = report.model_copy(update={"experiments": [found.model_copy(update={"trajectories": lines})]})
    (panel,) = [panel for panel in experiment_panels(far) if panel.stem == "tokens.entropy"]
    with house_style():
        axes = new_figure(4, 3).add_axes((0.1, 0.1, 0.8, 0.8))
        draw_trajectories(axes, experiment=far.experiments[0], name="tokens.entropy")
    low, high = axes.get_ylim()
    beyond = sum(min(line.values) < low or max(line.values) > high for line in lines if line.measure == panel.stem)
    assert high < 50
    assert beyond > 1
    assert panel.note == f"tokens; {beyond} heads cut"
    assert f"{beyond} heads of 128 extend beyond the frame" in panel.caption


def test_curves_share_the_axes_that_they_name_and_of_unknown_quantities_none() -> None:
    values = {"a_b": [2.0, 3.0], "norm: from M": [0.5, 0.7]}
    known = of_curves(values, quantity="rank")
    assert groups(known) == {"": known.curves}
    pictured = of_curves(values, quantity="rank", picture="ranks")
    assert groups(pictured) == {"ranks": pictured.curves}
    unknown = of_curves(values)
    assert {title: list(curves) for title, curves in groups(unknown).items()} == {
        "a b": ["a_b"],
        "norm: from M": ["norm: from M"],
    }
    with house_style():
        for made, dashed in ((known, []), (of_curves(values, quantity="rank", published=True), ["--", "--"])):
            lines = panel_axes(experiment_report(made)).lines
            assert [line.get_label() for line in lines] == ["a b", "norm: from M"]
            assert [line.get_linestyle() for line in lines if line.get_linestyle() != "-"] == dashed


def test_the_quantity_stands_beside_its_axis() -> None:
    with house_style():
        report = experiment_report(of_head())
        labels = [panel_axes(report, number).get_ylabel() for number in range(4)]
        assert labels == ["correlation", "‖W‖ / ‖W_mm‖", "share of queries", "KL, nats"]
        assert panel_axes(experiment_report(of_curves({"rank": [3.0, 3.0]}))).get_ylabel() == ""  # the control


@pytest.mark.parametrize(
    ("values", "bounded", "scale"),
    [
        ([3.0, 1e-2, 1e-40, 0.0], False, "log"),
        ([0.0, 0.1, 1.0, 100.0], False, "log"),
        ([3.0, 2.0, 1.0, 0.5], False, "linear"),
        ([0.0, 0.001, 0.1, 0.5, 0.99], False, "log"),
        ([0.0, 0.001, 0.1, 0.5, 0.99], True, "linear"),
        ([-1.0, 0.001, 10.0, 100.0], False, "linear"),
    ],
)
def test_values_that_span_factors_are_drawn_by_factors(values: list[float], bounded: bool, scale: str) -> None:
    report = experiment_report(of_curves({"correlation": values}, bounded=bounded))
    with house_style():
        axes = panel_axes(report)
    assert axes.get_yscale() == scale
    if scale == "log":
        low, high = axes.get_ylim()
        assert max(values) < high < 2 * max(values)
        assert low > 1e-17
        assert np.nanmin(axes.lines[0].get_ydata()) > 0
        assert "Not shown: values of 0" in experiment_panels(report)[0].caption


def test_every_published_figure_has_its_row_or_is_said_to_be_left_out() -> None:
    def many(count: int) -> Report:
        figures = {f"figure {number}": 1.0 for number in range(count)}
        wrong = figures | {"figure 7": 1.5}
        tolerance = dict.fromkeys(figures, 1.0)
        return experiment_report(golden(final=wrong, published=figures, tolerance=tolerance, bounds={}))

    with house_style():
        assert len(panel_axes(many(47)).get_yticks()) == 47
        assert "of" not in experiment_panels(many(47))[0].note.split()
        axes = panel_axes(many(200))
    assert len(axes.get_yticks()) == 80
    assert any(text.get_text().endswith("figure 7") for text in axes.get_yticklabels())
    assert experiment_panels(many(200))[0].note.endswith("80 of 200 with the largest deviations")


def test_where_only_the_published_value_is_allowed_nothing_else_is_shaded() -> None:
    def shaded(tolerance: dict[str, float] | None) -> float:
        made = golden(final={"x": 2.0}, published={"x": 2.0}, tolerance=tolerance, bounds={})
        with house_style():
            (band,) = panel_axes(experiment_report(made)).collections
        return float(np.ptp(band.get_paths()[0].vertices[:, 0]))

    assert shaded(None) < 0.1
    assert shaded({"x": 0.5}) == pytest.approx(2)  # the control


def test_figures_and_settings_are_written_by_their_labels_and_older_ones_by_their_names() -> None:
    names = {"W_mm_d4": 1.0, "vis1 ‖W‖_F": 2.0, "weights.decay_rate": 3.0}
    older = golden(final=names, settings={"accepted_d4": 0.25}, published=None, tolerance=None, bounds={})
    assert [format_label(older, name) for name in names] == ["W mm d4", "vis1 ‖W‖_F", "weights.decay_rate"]
    assert setting(older, "accepted_d4") == "accepted d4 0.25"
    labels = {"W_mm_d4": "W_mm, d = 4", "accepted_d4": "accepted, d = 4"}
    labelled = older.model_copy(update={"labels": labels})
    text = " ".join(views.summary(experiment_report(labelled)).split())
    assert "W_mm, d = 4 1" in text
    assert "(accepted, d = 4: 0.25, 1.2 s)" in text


def test_no_line_that_is_piped_ends_in_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    console().print(terminal.document(export.summary(experiment_report(converging(), failing()))))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 10
    assert [line for line in lines if line != line.rstrip()] == []
    assert re.search(" $", views.summary(experiment_report(converging())), re.MULTILINE)  # the control


def test_curves_without_any_value_say_so_and_have_no_numbers_at_their_side() -> None:
    with house_style():
        empty, some = (
            panel_axes(experiment_report(converging(curves={"x": Curve(steps=[1, 2], median=median)})))
            for median in ([None, None], [None, 0.5])
        )
    assert [text.get_text() for text in empty.texts if text.get_text() == "no value"] == ["no value"]
    assert list(empty.get_yticks()) == []
    assert "no value" not in [text.get_text() for text in some.texts], "the control"
