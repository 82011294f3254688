"""Tests the tables, pages, rows and pictures of experiments and of series of checkpoints."""

import re
from html import unescape
from types import SimpleNamespace

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
from views import absent, check_layout, draw, flowing

from attnlens.records import Curve, Experiment
from attnlens.records.studies import StudyPair
from attnlens.report import export
from attnlens.report.findings import find, next_commands
from attnlens.report.pictures import experiments as pictures
from attnlens.report.pictures.charts import panel_figure
from attnlens.report.pictures.experiments import experiment_overview, experiment_panels
from attnlens.report.pictures.style import house_style
from attnlens.report.render import terminal
from attnlens.report.sections import comparisons, facts
from attnlens.report.sections import experiments as sections
from attnlens.report.shapes import Shapes

NOTHING = {"published": None, "tolerance": None, "bounds": {}}


def row(text, *words):
    return next(line.split() for line in text.splitlines() if line.split()[: len(words)] == list(words))


def of_curves(values, **shown):
    """Build an experiment whose curves have these values."""
    return converging(curves={name: curve([*range(1, len(v) + 1)], np.array(v), **shown) for name, v in values.items()})


def overview_of(report):
    with house_style():
        return experiment_overview(report)


def panel_axes(experiment, number=0):
    report = experiment_report(experiment)
    with house_style():
        return panel_figure(report, experiment_panels(report)[number]).axes[0]


def trajectory_axes(series, name):
    return draw(lambda axes: pictures.draw_trajectories(axes, experiment=series, name=name)).axes[0]


def test_every_figure_stands_beside_the_published_with_its_verdict():
    report = experiment_report(converging(), golden(), failing(), command="reproduce")
    text = unescape(views.markdown(report))
    for cells in (
        "local convergence | W to Frobenius | 0.991 ± 0.0021 | 0.992 | published | 0.982 to 1.002 | pass",
        "golden instances | vis1 ‖W‖_F | 8.6857350 | 8.6857350 | published | 8.6857340 to 8.6857360 | pass",
        "largest gap | 3.2e-13 | 0 | published | ≤ 1.0e-09 | pass",
        "rank | 1 | 1 | published | exact | pass",
        "failing | norm | 8.7000000 | 8.6857350 | published | 8.6857340 to 8.6857360 | FAIL",
    ):
        assert f"| {cells} |" in text
    assert "failing: rank, because the solver stopped" in text
    assert "trials 100, 1.2 s)" in text
    assert "COMPLETE" not in text, "no model was read"
    for written in (text, unescape(views.page(report)), flowing(report)):
        assert "3 experiments; 7 values agree (7 published); some differ: failing." in written
    rows = views.rows(report)
    assert len(rows) == 10
    first = {"experiment": "local convergence", "figure": "W to Frobenius", "ours": "0.991", "error": "0.0021"}
    assert rows[0] == first | {
        "published": "0.992",
        "origin": "published",
        "bound": "within",
        "tolerance": "0.01",
        "verdict": "pass",
    }
    assert [cells["verdict"] for cells in rows[7:]] == ["fail", "fail", "fail"]
    assert rows[9]["ours"] == ""


def test_references_have_an_origin_and_a_wide_tolerance_tests_nothing():
    final = {"longer": 0.99979, "share": 0.2, "norm": 2.0, "loose": 0.9, "zero": 1e-11, "wrong": 5.0}
    made = golden(
        final=final,
        published={"longer": 0.9998, "share": 0.12, "norm": 2.0, "loose": 1.0, "zero": 0.0, "wrong": 1.0},
        tolerance={"longer": 1e-4, "share": 0.15, "loose": 0.5, "zero": 1e-10, "wrong": 3.0},
        bounds={"longer": "at least", "loose": "at least"},
        origins={"longer": "reimplementation", "share": "reimplementation", "wrong": "reimplementation"},
        reasons={},
    )
    meets = {"longer": True, "share": None, "norm": True, "loose": None, "zero": True, "wrong": False}
    assert {name: made.meets(name) for name in final} == meets, "wrong is outside even a wide tolerance"
    report = experiment_report(made)
    text = views.markdown(report)
    assert "| 0.99979 | 0.99980 | reimplementation | ≥ 0.99970 | pass |" in text
    assert "| reimplementation | −0.03 to 0.27 | not tested |" in text
    text = flowing(report)
    assert "No: 1 of 4 values differs: wrong (reimplementation); 2 not tested" in text
    assert "3 values agree (2 published, 1 of a reimplementation); some differ: golden instances; 2 not tested" in text
    fine = made.model_copy(update={"published": {"share": 0.12}}).judge()
    assert fine.passed is None, "nothing tested, so nothing passed"
    strict = made.model_copy(update={"tolerance": made.tolerance | {"share": 0.01}})
    assert strict.meets("share") is False, "the control"
    above = made.model_copy(update={"bounds": {"norm": "at most"}, "final": final | {"norm": 2.1}})
    assert above.meets("norm") is False
    assert above.model_copy(update={"bounds": {"norm": "at least"}}).meets("norm") is True


def test_only_published_figures_are_judged():
    other = [golden(name=f"other {n}", **NOTHING) for n in range(5)]
    for experiments, sentence in (
        (
            [converging(), selecting()],
            "2 experiments; 8 values agree (8 published); 1 not tested (tolerance above a third of the reference).",
        ),
        ([golden(), *other], "6 experiments; 3 values agree (3 published)."),
    ):
        report = experiment_report(*experiments)
        assert sentence in flowing(report)
        assert sentence in unescape(views.markdown(report))
        assert any(sentence in text.get_text() for text in overview_of(report).texts)
    text = views.summary(experiment_report(of_head()))
    unpublished = "no published values to compare with"
    assert absent(text, unpublished, "verdict", "pass") == ["verdict", "pass"]


def test_a_report_names_the_model_of_each_experiment():
    others = [golden(name="one", model="demo"), golden(name="two", model="demo"), golden(name="three", model="anew")]
    report = experiment_report(converging(), *others, command="reproduce")
    line = "one, two: demo; three: anew; all others: one-layer attention (synthetic)"
    title = "one-layer attention (synthetic) + demo + anew"
    assert (facts.title(report), facts.ran_on(report)) == (title, line)
    figure = overview_of(report)
    drawn = " ".join(text.get_text() for text in figure.texts)
    with house_style():
        check_layout(figure)
    for text in (views.summary(report), views.page(report), unescape(views.markdown(report)), drawn):
        assert not absent(text, title, line)
    assert "one: Are solved instances solved again? (on demo, 1.2 s)" in views.summary(report)
    assert facts.ran_on(experiment_report(golden(model="demo"))) == "golden instances: demo", "there are no others"
    plain = experiment_report(converging())
    assert (facts.title(plain), facts.ran_on(plain)) == ("one-layer attention (synthetic)", "")  # the control
    assert "all others" not in views.page(plain)


def test_a_series_shows_the_main_measures_and_all_in_its_details():
    report = series_report()
    text = views.summary(report)
    names = [line.split()[0] for line in text.splitlines() if "." in (line.split() or [""])[0][1:]]
    shown = [name for name in names if name.startswith(("weights.", "tokens.", "selection."))]
    assert shown[:4] == ["selection.efficiency", "weights.symmetry", "weights.effective_rank", "tokens.entropy"]
    assert "tokens.share_key" not in text
    assert "tokens.share_key" in views.details(report)
    assert "tokens.share_key" in unescape(views.markdown(report))
    assert "quartiles over heads at the last checkpoint" in views.page(report)
    assert (row(text, "loss")[1], row(text, "loss")[7]) == ("7.00", "2.51")
    assert "COMPLETE: 32 of 32 heads" in text
    symmetry = report.experiments[0].curves["weights.symmetry"]
    cells = row(text, "weights.symmetry")
    assert (cells[1], cells[7]) == (f"{symmetry.median[0]:.3f}", f"{symmetry.median[-1]:.3f}")
    assert cells[8:11] == [f"{symmetry.low[-1]:.3f}", "…", f"{symmetry.high[-1]:.3f}"]
    assert max(map(len, views.summary(report, 100).splitlines())) <= 100
    assert "8 of 40 checkpoints are shown" in views.summary(series_report(checkpoints=40))
    assert "are shown" not in views.summary(series_report(checkpoints=8))  # the control
    rows = views.rows(series_report(2, 3))
    assert (len(rows), rows[1]["training step"]) == (2 * 3 * 5 * 7, "30")
    assert set(rows[0]) == {"layer", "head", "measure", "training step", "value", "se"}


def test_a_measure_that_never_changes_is_left_out():
    series = training()
    constant = curve(series.curves["loss"].steps, np.full(7, 16.0))
    more = series.model_copy(update={"curves": series.curves | {"weights.constant": constant, "mine: null": constant}})
    assert {"weights.constant", "mine: null"} <= set(sections.measures_of(more)), (
        "a curve is a null only if it says so, whatever its name"
    )
    assert "weights.symmetry: null" not in sections.measures_of(more)
    assert "weights.constant" not in sections.changed_measures(more)


def test_one_head_has_no_quartiles_and_no_layers_to_tell_apart():
    for report, several in ((series_report(1, 1), False), (series_report(2, 1), True)):
        assert ("quartiles" in views.summary(report)) == several
        assert ("uartiles" in views.markdown(report)) == several
        bars = [inner for axes in overview_of(report).axes for inner in axes.child_axes]
        assert len(bars) == 2 * several, "one per row"
        assert any("coloured" in panel.caption for panel in experiment_panels(report)) == several


def test_figures_and_settings_are_written_by_their_labels_and_older_ones_by_their_names():
    names = {"W_mm_d4": 1.0, "vis1 ‖W‖_F": 2.0, "weights.decay_rate": 3.0}
    older = golden(final=names, settings={"accepted_d4": 0.25}, **NOTHING)
    assert [sections.format_label(older, name) for name in names] == ["W mm d4", "vis1 ‖W‖_F", "weights.decay_rate"]
    assert sections.setting(older, "accepted_d4") == "accepted d4 0.25"
    labels = {"W_mm_d4": "W_mm, d = 4", "accepted_d4": "accepted, d = 4"}
    text = flowing(experiment_report(older.model_copy(update={"labels": labels})))
    assert not absent(text, "W_mm, d = 4: 1", "(accepted, d = 4: 0.25, 1.2 s)")


def test_no_piped_line_ends_in_blanks(capsys):
    report = experiment_report(converging(), failing())
    terminal.console().print(terminal.document(export.summary(report)))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 8
    assert [line for line in lines if line != line.rstrip()] == []
    assert re.search(" $", views.summary(report), re.MULTILINE)  # the control


@pytest.mark.parametrize(
    "report",
    [
        experiment_report(converging(), selecting(), golden(), failing()),
        series_report(),
        *(pytest.param(each, marks=pytest.mark.full) for each in (experiment_report(of_head()), series_report(12, 12))),
    ],
)
def test_no_two_texts_of_a_page_overlap(report):
    with house_style():
        for figure in (experiment_overview(report), *(panel_figure(report, p) for p in experiment_panels(report)[:3])):
            check_layout(figure)


def test_the_distance_to_the_published_is_counted_in_tolerances_or_at_the_edge():
    fields = {"published": {"x": 2.0}, "reasons": {}}
    for ours, bound, tolerance, expected in (
        (2.05, "within", 0.1, 0.5),
        (9.0, "within", 0.1, 3),
        (-9.0, "at most", 0.1, -3),
        (None, "within", 0.1, -3),
        (1.9, "within", 0.1, -1),
        (2.0, "within", None, 0),
        (3.0, "within", None, 3),
    ):
        allowed = {"tolerance": tolerance and {"x": tolerance}, "bounds": {"x": bound} if tolerance else {}}
        made = golden(final={"x": ours}, **fields, **allowed)
        assert pictures.deviation(made, "x") == pytest.approx(expected), (ours, bound, tolerance)
    widths = []
    for tolerance in (None, {"x": 0.5}):
        (band,) = panel_axes(golden(final={"x": 2.0}, tolerance=tolerance, bounds={}, **fields)).collections
        widths.append(float(np.ptp(band.get_paths()[0].vertices[:, 0])))
    assert widths[0] < 0.1, "only the exact figure is shaded"
    assert widths[1] == pytest.approx(2)  # the control


def test_every_published_figure_has_its_row_or_is_counted_as_left_out():
    for count, shown in ((47, 47), (200, 80)):
        figures = {f"figure {number}": 1.0 for number in range(count)}
        tolerance = dict.fromkeys(figures, 0.3)
        many = golden(final=figures | {"figure 7": 1.5}, published=figures, tolerance=tolerance, bounds={})
        axes, note = panel_axes(many), experiment_panels(experiment_report(many))[0].note
        assert len(axes.get_yticks()) == shown
        assert ("of" in note.split()) == (shown < count)
    assert any(text.get_text().endswith("figure 7") for text in axes.get_yticklabels())
    assert note.endswith("80 of 200 with the largest deviations")


def test_steps_that_span_factors_are_drawn_by_factors_and_named_at_both_ends():
    for steps, scale in (
        ([0.0, 30, 100, 3000], "symlog"),
        ([1.0, 10, 100], "log"),
        ([1.0, 2, 3], "linear"),
        ([0.0, 1, 2], "linear"),
        (np.linspace(1, 16, 16).tolist(), None),
        (np.linspace(0.25, 4, 16).tolist(), None),
    ):
        axes = draw(pictures.scale_steps, steps, "step").axes[0]
        assert scale in (axes.get_xscale(), None)
        ticks = list(axes.get_xticks())
        assert (ticks[0], ticks[-1]) == (steps[0], steps[-1])
        if len(steps) == 16:
            assert len(ticks) >= 4
            assert all(tick == int(tick) for tick in ticks) == (steps[0] == 1)


def test_values_that_span_factors_are_drawn_by_factors_and_none_have_a_note():
    for values, bounded, scale in (
        ([3.0, 1e-2, 1e-40, 0.0], False, "log"),
        ([0.0, 0.1, 1.0, 100.0], False, "log"),
        ([3.0, 2.0, 1.0, 0.5], False, "linear"),
        ([0.0, 0.001, 0.1, 0.5, 0.99], False, "log"),
        ([0.0, 0.001, 0.1, 0.5, 0.99], True, "linear"),
        ([-1.0, 0.001, 10.0, 100.0], False, "linear"),
    ):
        experiment = of_curves({"correlation": values}, bounded=bounded)
        axes = panel_axes(experiment)
        assert axes.get_yscale() == scale, values
        if scale == "log":
            low, high = axes.get_ylim()
            assert max(values) < high < 2 * max(values)
            assert low > 1e-17
            assert np.nanmin(axes.lines[0].get_ydata()) > 0
            assert "Not shown: values of 0" in experiment_panels(experiment_report(experiment))[0].caption
    for median, notes in (([None, None], ["no value"]), ([None, 0.5], [])):
        axes = panel_axes(converging(curves={"x": Curve(steps=[1, 2], median=median)}))
        assert [text.get_text() for text in axes.texts if text.get_text() == "no value"] == notes
        assert (list(axes.get_yticks()) == []) == bool(notes)


@pytest.mark.parametrize(
    ("cosines", "verdict"),
    [([0.4, 0.9, 0.995], "Yes"), ([0.4, 0.9, 0.965], "Not yet"), ([0.4, 0.9, 0.9005], "No"), ([0.4, 0.9, 0.8], "No")],
)
def test_descent_has_missed_its_svm_only_if_the_cosine_no_longer_rises(cosines, verdict):
    steps = [0.0, 200.0, 400.0]
    curves = {f"correlation, from {name}": Curve(steps=steps, median=cosines) for name in ("zero", "the head")}
    final = {name: curve.median[-1] for name, curve in curves.items()} | {"correlation of the head": 0.4}
    head = Experiment(name="head 3.2", question="?", settings={"iterations": 400}, final=final, curves=curves)
    report = experiment_report(head)
    (finding,) = find(Shapes(report))
    assert finding.answer.startswith(f"{verdict}: ")
    assert ("400 iterations" in finding.answer) == (verdict != "Yes")
    commands = next_commands(Shapes(report))
    assert any("--iterations 1600" in command for command in commands) == (verdict != "Yes")


def test_a_null_is_drawn_as_a_band_and_named_by_its_meaning():
    series = training()
    for name, bands in (("weights.symmetry", 1), ("tokens.entropy", 0)):
        axes = trajectory_axes(series, name)
        assert len([fill for fill in axes.collections if type(fill).__name__ == "FillBetweenPolyCollection"]) == bands
        black = [line for line in axes.lines if line.get_color() == "black"]
        np.testing.assert_allclose(black[0].get_ydata(), series.curves[name].median)
    own = {name: made for name, made in series.curves.items() if made.null_of is None}
    by_chance = "the value expected by chance"
    rotated, random = f"{by_chance} (the head", f"{by_chance} (random W_Q, W_K of the same shape)"
    for names, words in (
        (["selection.efficiency"], f"null: {rotated} randomly rotated), mean"),
        (["weights.symmetry"], f"null: {random}, mean"),
        (["weights.symmetry", "selection.efficiency"], f"{random}, for selection.* {rotated}"),
        ([], None),  # the control
    ):
        nulls = {f"{name}: null": curve(own[name].steps, np.full(7, 0.1), 0.02, null_of=name) for name in names}
        update = {"experiments": [series.model_copy(update={"curves": own | nulls})]}
        text = flowing(series_report().model_copy(update=update))
        assert words in text if words else "null" not in text
        assert ("0.100 ± 0.020" in text) == bool(names), "mean and sd of the null at the last checkpoint"
        assert ("(chance 0.10)" in text) == ("weights.symmetry" in names), "the finding names it, too"


def test_heads_that_leave_the_frame_are_counted():
    report = series_report(8, 16)
    assert not any("cut" in panel.note for panel in experiment_panels(report))  # the control
    (series,) = report.experiments
    lines = list(series.trajectories)
    stray = next(place for place, line in enumerate(lines) if line.measure == "tokens.entropy")
    lines[stray] = lines[stray].model_copy(update={"values": [*lines[stray].values[:6], 50.0]})
    series = series.model_copy(update={"trajectories": lines})
    panels = experiment_panels(report.model_copy(update={"experiments": [series]}))
    (panel,) = [panel for panel in panels if panel.stem == "tokens.entropy"]
    low, high = trajectory_axes(series, "tokens.entropy").get_ylim()
    beyond = sum(min(line.values) < low or max(line.values) > high for line in lines if line.measure == panel.stem)
    assert high < 50
    assert beyond > 1
    assert panel.note == f"tokens; {beyond} heads cut"
    assert f"{beyond} heads of 128 extend beyond the frame" in panel.caption


@pytest.mark.parametrize(
    "report", [experiment_report(converging(), golden()), series_report(1, 2)], ids=["curves", "series"]
)
def test_a_bare_panel_keeps_its_legend_and_names_its_axes(report):
    with house_style(bare=True):
        for panel in experiment_panels(report)[:5]:
            figure = panel_figure(report, panel, bare=True)
            check_layout(figure)
            axes = figure.axes[0]
            legend = axes.get_legend()
            assert legend is None or legend.get_window_extent().y1 <= figure.bbox.y1
            assert axes.get_ylabel() or panel.stem == pictures.COMPARED
            assert axes.get_xlabel()


def test_curves_of_one_quantity_or_picture_share_their_axes():
    def titled(experiment):
        return {title: list(curves) for title, curves in pictures.groups(experiment).items()}

    assert titled(of_head()) == {
        "correlation": ["correlation: from zero", "correlation: from M"],
        "norm": ["norm: from zero"],
        "selection kept": ["selection kept"],
        "KL": ["KL to one-hot"],
    }
    assert [len(curves) for curves in titled(converging()).values()] == [4]
    labels = [panel_axes(of_head(), number).get_ylabel() for number in range(4)]
    assert labels == ["correlation (cosine) to SVM", "‖W‖ / ‖W of the SVM‖", "share of queries", "KL, nats"]
    assert panel_axes(of_curves({"rank": [3.0, 3.0]})).get_ylabel() == ""  # the control
    values = {"a_b": [2.0, 3.0], "norm: from M": [0.5, 0.7]}
    one, pictured = of_curves(values, quantity="rank"), of_curves(values, quantity="rank", picture="ranks")
    assert pictures.groups(one) == {"": one.curves}
    assert pictures.groups(pictured) == {"ranks": pictured.curves}
    assert titled(of_curves(values)) == {"a b": ["a_b"], "norm: from M": ["norm: from M"]}, "of unknown quantities"
    for made, dashed in ((one, []), (of_curves(values, quantity="rank", published=True), ["--", "--"])):
        lines = panel_axes(made).lines
        assert [line.get_label() for line in lines] == ["a b", "norm: from M"]
        assert [line.get_linestyle() for line in lines if line.get_linestyle() != "-"] == dashed


@pytest.mark.parametrize(("measure", "better", "worse"), [("loss", "b", "a"), ("BLEU", "a", "b")])
def test_a_pair_in_the_wrong_order_names_the_better_cell(measure, better, worse):
    names = {"task": "t", "measure": measure}
    order = SimpleNamespace(**names, agree=0, disagree=1, undecided=0, tau=-1.0, low=-1.0, high=0.5)
    pair = StudyPair(**names, first="a", second="b", difference=0.5, p=0.01, p_holm=0.01, agrees=False)
    study = SimpleNamespace(orderings=[order], pairs=[pair], source="a paper")
    sentences = list(comparisons._agreement(study, SimpleNamespace(name="t", published="Table 1")))
    assert sentences[-1].startswith(f"Not as published: {better} better than {worse} (p ")
