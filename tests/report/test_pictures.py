"""Tests that pictures show the report's numbers where they belong, legibly, and the same way every time."""

import json

import matplotlib
import matplotlib.text
import numpy as np
import pytest
import views
from experiment_reports import experiment_report, golden
from matplotlib.colors import BoundaryNorm, CenteredNorm, to_hex
from matplotlib.patches import Rectangle
from reports import KINDS, planted, synthetic_report
from views import absent, check_layout, draw, draw_panel

from attnlens.analyzers import registry
from attnlens.errors import AttnlensError, OutputError, UsageError
from attnlens.records import Measure, Null, Text
from attnlens.report import export
from attnlens.report.findings.heads import HeadTests
from attnlens.report.pictures import maps
from attnlens.report.pictures.style import PART_COLOURS, house_style, new_figure, tick_positions
from attnlens.report.report import Report
from attnlens.report.shapes import Shapes, alternate_sources

SHARES = [f"tokens.share_{part}" for part in ("positive", "negative", "skew", "key")]
SCORES = [f"tokens.share_{part}" for part in ("key", "position", "content")]
MIXED = ["encoder", "encoder", "decoder", "cross", "decoder", "cross"]
without_layout = pytest.mark.usefixtures("without_layout")


def panel(report, name="weights.planted"):
    with house_style():
        return draw_panel(report if isinstance(report, Shapes) else Shapes(report), name)


def overview(report):
    with house_style():
        return maps.overview_figure(Shapes(report))


def scale(values):
    """Return colours, norm and open ends of a map of these values."""
    return maps.scale(Shapes(planted(values)).readings["weights.planted"])


def register(patch, name="weights.planted", **fields):
    """Register a measure of that name."""
    info = registry.MeasureInfo(name, "planted", "f(x)", **fields)
    entry = registry.Analyzer("planted", "weights", "?", (info,), lambda _: {})
    patch.setitem(registry._ANALYZERS, ("planted", "weights"), entry)


def with_heads(report, change):
    """Return the report with each head's fields updated."""
    return report.model_copy(update={"heads": [head.model_copy(update=change(head)) for head in report]})


def texts_of(labels):
    return [label.get_text() for label in labels]


def array(axes):
    return np.asarray(axes.images[0].get_array())


@without_layout
def test_the_map_has_each_heads_value_at_its_layer_and_head():
    values = np.arange(32.0).reshape(4, 8)
    np.testing.assert_array_equal(array(panel(planted(values)).axes[0]), values)
    report = synthetic_report(6, 4)
    heads = [head for head in report.heads if head.layer in (1, 4) and head.head in (0, 3)]
    settings = report.settings.model_copy(update={"layers": [1, 4], "heads": [0, 3]})
    axes = panel(report.model_copy(update={"heads": heads, "settings": settings}), "weights.symmetry").axes[0]
    assert (texts_of(axes.get_yticklabels()), texts_of(axes.get_xticklabels())) == (["1", "4"], ["0", "3"])
    assert axes.get_ylim()[0] > axes.get_ylim()[1], "layer 0 is at the top"
    assert array(axes)[1, 1] == heads[-1].measures["weights.symmetry"].value
    far = with_heads(planted(np.eye(2)), lambda head: {"layer": head.layer * 10**9, "head": head.head * 10**9})
    assert Shapes(far).readings["weights.planted"].values.shape == (2, 2), "huge numbers do not make a huge map"
    report = synthetic_report(6, 2, parts=MIXED)
    assert Shapes(report).layers == (0, 1, 2, 4, 3, 5)
    axes = panel(report, "weights.norm").axes[0]
    labels = [label for label in texts_of(axes.texts[1:]) if label.isalpha()]
    assert labels == ["layer", "encoder", "decoder", "cross"], "parts stand in labelled groups"
    value = next(head for head in report.heads if (head.layer, head.head) == (4, 1)).measures["weights.norm"].value
    assert array(axes)[3, 1] == value


@without_layout
def test_heads_without_a_value_are_masked_hatched_and_explained():
    missing = [(0, 1), (0, 2), (2, 0)]
    figure = panel(synthetic_report(3, 4, missing=missing), "weights.symmetry")
    masked = np.ma.getmaskarray(figure.axes[0].images[0].get_array())
    assert sorted(map(tuple, np.argwhere(masked).tolist())) == missing
    hatched = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle) and patch.get_hatch()]
    assert sorted((patch.get_y() + 0.5, patch.get_width()) for patch in hatched) == [(0, 2), (2, 1)]
    assert "No value for 3 heads (hatched): the weights are not finite" in figure.texts[-1].get_text()
    report = synthetic_report(3, 4)
    assert "No value" not in panel(report, "weights.symmetry").texts[-1].get_text()
    without = report.model_copy(update={"heads": [*report.heads[:5], *report.heads[6:]]})
    values, full = (Shapes(each).readings["weights.symmetry"].values.ravel() for each in (without, report))
    assert np.isnan(values[5]), "a head that the report lacks is a gap and moves no other"
    np.testing.assert_array_equal(np.delete(values, 5), np.delete(full, 5))
    for name, explained in (("weights.kind", False), ("weights.symmetry", True)):
        head = report.heads[0]
        gone = head.model_copy(update={"measures": head.measures | {name: Measure(value=None, reason="gone")}})
        holed = report.model_copy(update={"heads": [gone, *report.heads[1:]]})
        assert name not in {each.stem for row in maps.page_rows(Shapes(holed)) for each in row} or explained
        assert ("hatched: no value" in texts_of(overview(holed).texts)) == explained


@without_layout
def test_colours_are_centred_for_signed_measures_and_bear_outliers_rounding_and_categories(monkeypatch):
    for low, high in ((-0.8, 0.2), (-0.2, 0.8)):
        _, norm, _ = scale(np.array([[low, high], [0.0, 0.1]]))
        assert (norm(0.0), norm.vmin, norm.vmax) == pytest.approx((0.5, -0.8, 0.8)), "as far below 0 as above"
    positive = np.linspace(0.1, 0.8, 12).reshape(3, 4)
    assert isinstance(scale(positive - 0.3)[1], CenteredNorm), "signed by its data"
    assert not isinstance(scale(positive)[1], CenteredNorm)
    values = np.linspace(0, 1, 144).reshape(12, 12)
    assert scale(values)[2] == "neither"
    values[3, 3] = 1000
    _, norm, extend = scale(values)
    assert (extend, norm(1.0) > 0.9) == ("max", True)
    few = np.arange(6.0).reshape(2, 3)
    assert scale(0.7 + 1e-9 * few)[1](0.7) == pytest.approx(0.5, abs=1e-3)
    assert scale(0.7 + 1e-3 * few)[1](0.7) == 0  # the control
    axes = panel(synthetic_report(4, 4), "weights.kind").axes[0]
    assert isinstance(axes.images[0].norm, BoundaryNorm)
    labels = texts_of(axes.child_axes[0].get_yticklabels())
    assert [label.replace("\n", " ") for label in labels] == list(KINDS)
    register(monkeypatch, low=-1, high=1)
    norm = scale(positive)[1]
    assert isinstance(norm, CenteredNorm), "signed by the registry"
    assert (norm(0.0), norm(0.8)) == (0.5, 1.0)
    assert scale(np.array([[0.06]]))[1](0.06) == pytest.approx(0.53), "a single value, within the possible range"


@without_layout
def test_a_map_marks_the_heads_that_differ_from_chance_with_a_dot():
    report = synthetic_report(4, 8)
    for name in ("weights.definiteness", "weights.directionality"):
        signs = HeadTests(Shapes(report)).signs.get(name)
        marks = [each for each in panel(report, name).axes[0].collections if "Ellipse" in type(each).__name__]
        if signs is None:  # the control: a measure that is not tested
            assert not marks
            continue
        assert {-1, 0, 1} == {*signs.tolist()}
        for sign, dots in zip((1, -1), marks, strict=True):
            places = {(round(y - 0.33), round(x)) for x, y in dots.get_offsets()}
            heads = zip(report.heads, signs, strict=True)
            assert places == {(head.layer, head.head) for head, each in heads if each == sign}


def test_cells_have_numbers_only_if_they_fit():
    for shape, texts in (((4, 8), ["weights", "0.000", "0.032"]), ((80, 3), ["weights"])):
        axes = panel(planted(np.linspace(0, 1, np.prod(shape)).reshape(shape))).axes[0]
        assert texts_of(axes.texts)[:3] == texts
        assert len(axes.texts) == (33 if shape == (4, 8) else 1)


@without_layout
def test_the_caption_gives_null_error_count_model_coverage_and_range(monkeypatch):
    shapes = Shapes(synthetic_report(4, 4, sequences=7))
    assert not absent(
        panel(shapes, "weights.symmetry").texts[-1].get_text(),
        "Chance 0.0013 ± 0.0018 (sd of one head)",
        "Dots: heads above (black) or below (white) chance; false-discovery rate 2",
        "bert-base-uncased · BertForMaskedLM · 110 M parameters",
        "4 layers × 4 heads · COMPLETE: 16 of 16 heads",
    )
    assert "7 inputs; median standard error 0.0" in panel(shapes, "tokens.entropy").texts[-1].get_text()
    readings = shapes.readings
    marked = {name: "mark on the colour bar" in maps.full_caption(shapes, readings[name]) for name in readings}
    assert marked == {name: each.null is not None for name, each in readings.items()}
    assert {*marked.values()} == {True, False}
    weights = panel(shapes, "weights.symmetry").texts[-1].get_text()
    assert shapes.report.settings.input_summary not in weights, "weights do not depend on the input"
    for null, place in ((0.5, "black mark on the colour bar"), (9.0, "outside the range of the colour bar")):
        report = planted(np.array([[0.0, 1.0]]))
        for head in report.heads:
            measure = head.measures["weights.planted"]
            head.measures["weights.planted"] = measure.model_copy(update={"null": Null(mean=null, sd=0.1)})
        lone = Shapes(report)
        assert f"(sd of one head); {place}" in maps.full_caption(lone, lone.readings["weights.planted"])
    for low, high, possible in ((0, None, "0 to ∞"), (None, 5, "−∞ to 5"), (-1, 5, "−1 to 5"), (None, None, "any")):
        register(monkeypatch, low=low, high=high)
        shapes = Shapes(planted(np.array([[0.0, 0.5], [1.25, 3.0]])))
        lines = maps.full_caption(shapes, shapes.readings["weights.planted"]).splitlines()
        assert f"Here 0.00 to 3.00; possible: {possible}." in lines


def with_curves(*curves, parts=None, name="c"):
    """Build the shapes of a report with one head per layer, each with one curve."""
    rest = iter(curves)
    return Shapes(with_heads(synthetic_report(len(curves), 1, parts=parts), lambda _: {"curves": {name: next(rest)}}))


@without_layout
def test_the_fan_shows_every_head_with_median_and_quartiles():
    report = synthetic_report(5, 7)
    curves = np.array([head.curves["weights.singular_values"] for head in report.heads])
    axes = panel(report, "weights.singular_values").axes[0]
    segments = axes.collections[0].get_segments()
    assert sorted(segment[0, 1] for segment in segments) == sorted(curves[:, 0])
    black = [line.get_ydata() for line in axes.lines if line.get_color() == "black"]
    np.testing.assert_allclose(black, np.percentile(curves, [25, 50, 75], axis=0))
    by_first = {segment[0, 1]: depth for segment, depth in zip(segments, axes.collections[0].get_array(), strict=True)}
    assert [by_first[curve[0]] for curve in curves] == [head.layer for head in report.heads]


@pytest.mark.parametrize("name", [info.name for info in registry.measure_infos().values() if info.curve] + ["c"])
def test_every_curve_has_a_name_along_its_side(name):
    figure = panel(with_curves([0.2, 0.5, 1.0], [0.4, 0.6, 1.0], name=name), name)
    figure.draw_without_rendering()
    label, axes = figure.axes[0].yaxis.label, figure.axes[0]
    assert label.get_text()
    assert label.get_window_extent().height <= axes.get_window_extent().height
    assert "pairs in its" not in figure.texts[-1].get_text()


@without_layout
def test_quartiles_rest_on_the_same_heads_at_every_step_and_parts_have_their_own():
    shapes = with_curves([1.0, 1.0, 1.0], [9.0], [3.0, 3.0, 3.0], [5.0, 5.0, 5.0, 5.0])
    (group,) = maps.groups_by_part(shapes, "c")
    np.testing.assert_array_equal(group.complete, [[1] * 3, [3] * 3, [5] * 3])
    np.testing.assert_array_equal(group.quartiles[1], [3, 3, 3])
    caption = panel(shapes, "c").texts[-1].get_text()
    assert "Encoder: median and quartiles over 3 of 4 heads with 3 steps or more." in caption
    assert "of 3 of 4 heads, ≥ 3 steps" in maps.short_curve_caption(shapes, "c")
    assert "steps" not in maps.short_curve_caption(with_curves(*[[1.0, 2.0]] * 3), "c")
    lone = with_curves([1.0, 2.0])
    assert maps.short_curve_caption(lone, "c") == "", "one head has no quartiles"
    assert "median" not in panel(lone, "c").texts[-1].get_text()
    parts = ["encoder", *MIXED[1:4]]
    shapes = with_curves([1.0, 1.0, 1.0], [3.0, 3.0, 3.0], [10.0, 10.0], [7.0, 7.0], parts=parts)
    groups = [(group.title, group.quartiles[1].tolist()) for group in maps.groups_by_part(shapes, "c")]
    assert groups == [("encoder", [2, 2, 2]), ("decoder", [10, 10]), ("cross", [7, 7])]
    figure = panel(shapes, "c")
    titled = [axes for axes in figure.axes if axes.get_title(loc="left").startswith("c: ")]
    assert [len(axes.collections[0].get_segments()) for axes in titled] == [2, 1, 1]
    assert "separately for each part" in figure.texts[-1].get_text()


@without_layout
def test_axes_count_an_index_from_1_a_distance_from_0_and_show_a_steep_fall_by_factors(monkeypatch):
    for steps, first, label in (("index", 1, "index k"), ("distance in tokens", 0, "distance")):
        register(monkeypatch, "weights.c", curve=True, steps=steps)
        axes = panel(with_curves(*[[1.0, 0.5, 0.2]] * 2, name="weights.c"), "weights.c").axes[0]
        assert axes.collections[0].get_segments()[0][:, 0].tolist() == [first, first + 1, first + 2]
        assert (axes.get_xlim(), axes.get_xticks()[0]) == ((first, first + 2), first)
        assert axes.get_xlabel().startswith(label)
    for curve, expected in (([1.0, 0.1, 0.001], "log"), ([0.001, 0.1, 1.0], "linear")):
        assert panel(with_curves(curve, curve), "c").axes[0].get_yscale() == expected


def test_shares_are_recognised_by_their_sum_and_measures_ordered_by_what_they_say():
    shapes = Shapes(synthetic_report(4, 4))
    # weights.inertia_± have a stem too, and sum to 128
    assert list(shapes.shares.items()) == [("tokens.kernel_shares", SHARES), ("tokens.score_shares", SCORES)]
    assert maps.has_all(shapes, SHARES)
    parts = (4 * ["decoder"], MIXED, 2 * ["cross"])
    decoder, mixed, cross = (Shapes(synthetic_report(len(each), 4, parts=each)).shares for each in parts)
    assert (list(decoder), list(mixed)) == (["tokens.score_shares"], ["tokens.score_shares", "tokens.kernel_shares"])
    assert cross == {"tokens.score_shares": ["tokens.share_key", "tokens.share_content"]}
    report = planted(np.array([[0.25, 0.5]]), name="other.part_a")
    assert Shapes(report).shares == {}
    rest = {0.25: Measure(value=0.75), 0.5: Measure(value=0.5)}
    both = with_heads(
        report, lambda h: {"measures": h.measures | {"other.part_b": rest[h.measures["other.part_a"].value]}}
    )
    assert Shapes(both).shares == {"other.part": ["other.part_a", "other.part_b"]}, "by their stem"
    names = list(Shapes(synthetic_report(4, 4, source="weights")).readings)
    assert names[0] == "weights.symmetry"
    assert names.index("weights.effective_rank") < names.index("weights.norm") < names.index("weights.kind")
    assert names[-2:] == ["weights.inertia_positive", "weights.inertia_negative"]
    assert alternate_sources(["w.a", "w.b", "w.c", "t.a"]) == ["w.a", "t.a", "w.b", "w.c"]


@without_layout
def test_every_head_is_a_line_of_shares_in_their_own_colours():
    report = synthetic_report(3, 4, missing=[(1, 0)])
    shapes, colours = Shapes(with_heads(report, lambda head: {"measures": {}} if head.layer == 2 else {})), {}
    for whole, names in shapes.shares.items():
        assert not maps.has_all(shapes, names)
        axes = draw(lambda axes, whole=whole: maps.draw_shares(axes, shapes, whole)).axes[0]
        right = np.array([[path.vertices[:, 0].max() for path in part.get_paths()] for part in axes.collections])
        assert right.shape[1] == 2, "a block a layer, and none for the layer without a value"
        np.testing.assert_allclose(right[-1], 1, atol=1e-6)
        np.testing.assert_allclose(right[0], [max(shapes.readings[names[0]].values[row]) for row in (0, 1)])
        assert len([patch for patch in axes.patches if patch.get_hatch()]) == 1
        for part in axes.collections:
            colours.setdefault(str(part.get_label()), set()).add(to_hex(part.get_facecolor()[0]).upper())
    assert colours == {part: {colour.upper()} for part, colour in PART_COLOURS.items()}
    legend = overview(synthetic_report(3, 5, source="tokens")).axes[0].get_legend()
    assert texts_of(legend.get_texts()) == ["positive", "negative", "skew", "key"]


@pytest.mark.filterwarnings("error")
def test_a_null_that_never_varies_is_met_or_not_without_a_division_by_zero():
    for values, sds, chance in (
        ([0.0, 0.5, 0.1], [0.0, 1.0, 1.0], True),  # 0/0 is no distance at all
        ([3.0, 0.0, 4.0], [0.0, 1.0, 1.0], False),  # 3/0 is the farthest
        ([1.0, 2.0, 0.1], [0.0, 0.0, 1.0], False),  # the median sd is 0
        ([3.0, 0.5, 0.1], [0.0, 1.0, 1.0], True),
        ([-0.5, -0.5], [1.0, 1.0], True),  # below the null as above it
        ([-3.0, -3.0], [1.0, 1.0], False),
        ([3.0, 3.0], [1.0, 1.0], False),
    ):
        report = planted(np.array([values]))
        for head, sd in zip(report.heads, sds, strict=True):
            measure = head.measures["weights.planted"]
            head.measures["weights.planted"] = measure.model_copy(update={"null": Null(mean=0.0, sd=sd)})
        (each,) = Shapes(report).readings.values()
        assert each.chance == chance, (values, sds)


@pytest.mark.parametrize("source", ["both", "weights", "tokens"])
def test_the_overview_has_six_pictures_and_none_of_a_constant(source):
    shapes = Shapes(synthetic_report(6, 6, source=source))
    rows = maps.page_rows(shapes)
    assert [len(row) for row in rows] == [3, 3]
    names = [each.stem for row in rows for each in row]
    assert len(set(names)) == 6
    assert not any("inertia" in name for name in names)
    if source == "both":
        chance = [shapes.readings[f"weights.{name}"].chance for name in ("directionality", "definiteness")]
        assert chance == [True, False]
        assert names[:2] == ["weights.symmetry", "weights.definiteness"], "what differs from chance comes first"


@without_layout
def test_the_overview_adapts_to_one_layer_and_to_few_measures():
    for layers, bars in ((1, 0), (2, 1)):
        report = synthetic_report(layers, 2)
        assert len(panel(report, "weights.singular_values").axes[0].child_axes) == bars
        fans = [axes for axes in overview(report).axes if "singular" in axes.get_title(loc="left")]
        assert any(axes.get_title(loc="left").endswith("singular values of M") for axes in fans)
        assert all(axes.get_ylabel() and axes.get_xlabel() for axes in fans)
    few = with_heads(
        synthetic_report(3, 4), lambda head: {"measures": {n: head.measures[n] for n in SHARES}, "curves": {}}
    )
    titles = [title[3:] for axes in overview(few).axes if (title := axes.get_title(loc="left"))]
    assert titles == ["kernel shares", "share positive", "share negative", "share skew", "share key"]


@pytest.mark.parametrize("parts", [MIXED, pytest.param(None, marks=pytest.mark.full)])
def test_no_two_texts_of_a_page_overlap(parts):
    shapes = Shapes(synthetic_report(6, 8, parts=parts, missing=[(1, 1)]))
    names = ("weights.kind", "weights.singular_values")
    with house_style():
        for figure in (maps.overview_figure(shapes), *(draw_panel(shapes, name) for name in names)):
            check_layout(figure)


def test_ticks_are_written_out_and_differ_and_no_axis_has_an_offset():
    for ticks, expected, factor in (
        ([0.9995, 0.9996, 0.9997], ["0.9995", "0.9996", "0.9997"], ""),
        ([-0.05, 0.0, 0.05], ["−0.05", "0.00", "0.05"], ""),
        ([0, 20, 40], ["0", "20", "40"], ""),
        ([1e-9, 2e-9], ["1", "2"], "1e−9"),
        ([0.1 + 0.2, 0.4], ["0.3", "0.4"], ""),
    ):
        with house_style():
            formatter = new_figure(4, 3).add_subplot(xlim=(min(ticks), max(ticks))).xaxis.get_major_formatter()
        assert (formatter.format_ticks(ticks), formatter.get_offset()) == (expected, factor)
    assert tick_positions(4, 8) == [0, 1, 2, 3]
    assert tick_positions(80, 12) == [0, 8, 16, 24, 32, 40, 48, 56, 64, 72]
    for values in (1e-3 + 1e-7 * np.arange(6.0), 0.9999 + 1e-6 * np.arange(6.0), np.full(6, 0.7)):
        for name in ("weights.planted", "weights.c")[int(np.ptp(values) == 0) :]:
            figure = panel(planted(values.reshape(2, 3), curve="weights.c"), name)
            figure.draw_without_rendering()
            places = [place for axes in figure.axes for place in (axes, *axes.child_axes)]
            offsets = {axis.get_offset_text().get_text() for place in places for axis in (place.xaxis, place.yaxis)}
            assert offsets == {""}, values


# Bare figures and captions


@pytest.mark.parametrize(
    ("stem", "width"),
    [("weights.symmetry", 3.4), ("any name", 7.0), pytest.param("overview", 7.0, marks=pytest.mark.full)],
)
def test_a_bare_figure_has_8_point_text_and_no_title_or_note(tmp_path, stem, width):
    report = synthetic_report(3, 4, measures=["weights.symmetry", "tokens.entropy"], curves=False)
    (drawing,) = export.drawings(report, tmp_path / f"{stem}.png", bare=True).values()
    with house_style(bare=True):
        figure = drawing.args[0].draw(bare=True)
        figure.draw_without_rendering()
    assert figure.get_figwidth() == width
    shown = [text for text in figure.findobj(matplotlib.text.Text) if text.get_text() and text.get_visible()]
    assert {text.get_fontsize() for text in shown} == {8}
    words = " ".join(text.get_text() for text in shown)
    assert report.model.title not in words
    assert "null" not in words
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    if stem == "weights.symmetry":
        assert not any(titles), "a single panel needs no title"
        assert "symmetry" in words.split(), "its colour bar is labelled instead"
        several = synthetic_report(2, 4, parts=["encoder", "decoder"], curves=False)
        (parted,) = export.drawings(several, tmp_path / "weights.symmetry.png", bare=True).values()
        with house_style(bare=True):
            axes = parted.args[0].draw(bare=True).axes[0]
        assert axes.get_ylabel() == "", "the parts are named there"
    else:
        assert {"a  symmetry", "b  entropy"} <= set(titles)
    with house_style():
        usual = drawing.args[0].draw()
    assert report.model.title in " ".join(text.get_text() for text in usual.findobj(matplotlib.text.Text)), (
        "the control"
    )
    assert usual.get_label() == figure.get_label() == drawing()[1]


@without_layout
def test_a_caption_names_panels_symbols_null_and_what_errors_cover():
    report = synthetic_report(3, 4)
    texts = [Text(name="essays", sha256="0" * 64, windows=[0, 3], available=9)]
    settings = report.settings.model_copy(update={"texts": texts})
    caption = overview(report.model_copy(update={"settings": settings})).get_label()
    parts = ("(a) symmetry (weights.symmetry): Symmetry of M", "Null: the value expected", "Symbols: M = s·W_Q W_Kᵀ")
    assert all(part in caption for part in (*parts, "Errors reflect which 2 of the 9 windows of essays were read"))
    assert "Null:" not in panel(synthetic_report(3, 4), "tokens.entropy").get_label(), "the control: it has no null"
    of_text = report.model_copy(update={"settings": settings})
    labels = [panel(of_text, name).get_label() for name in ("weights.symmetry", "tokens.entropy")]
    assert ["Errors reflect" in label for label in labels] == [False, True], "weights do not depend on the text"


def test_a_file_named_after_a_measure_shows_only_that_measure(tmp_path):
    report = planted(np.eye(3), "weights.symmetry")
    ((path, draw),) = export.drawings(report, tmp_path / "weights.symmetry.pdf").items()
    assert (path.name, draw.args[0].stem) == ("weights.symmetry.pdf", "weights.symmetry")
    ((_, draw),) = export.drawings(report, tmp_path / "symmetry.pdf").items()
    assert draw.args[0].stem == "weights.symmetry", "the source of a measure can be omitted"
    ((_, draw),) = export.drawings(report, tmp_path / "symmetric.pdf").items()
    assert draw.args[0].stem == "overview"
    ((_, draw),) = export.drawings(report, tmp_path / "symmetry.PDF").items()
    assert draw()[0].startswith(b"%PDF"), "the case of a suffix does not matter"
    report.save(path, bare=True)
    assert path.read_bytes().startswith(b"%PDF")
    assert "(weights.symmetry)" in (tmp_path / "weights.symmetry.pdf.txt").read_text()
    with pytest.raises(UsageError, match=r"tokens\.entropy cannot be drawn"):
        export.drawings(report, tmp_path / "tokens.entropy.pdf")
    same = planted(np.full((2, 3), 0.7), "weights.symmetry", curve="weights.c")
    assert [picture.stem for picture in export.pictures(same)] == ["overview", "weights.c"]
    with pytest.raises(UsageError, match="same value"):
        export.drawings(same, tmp_path / "weights.symmetry.pdf")


@without_layout
def test_files_have_the_documented_names_and_hostile_names_stay_in_the_folder(tmp_path, recwarn):
    one = views.save_pictures(planted(np.linspace(0, 1, 6).reshape(2, 3)), tmp_path / "one.png")
    assert one == [tmp_path / "one.png"]
    assert one[0].read_bytes().startswith(b"\x89PNG")
    before = dict(matplotlib.rcParams)
    report = planted(np.eye(3), "weights.symmetry", curve="weights.singular_values")
    written = views.save_pictures(report, tmp_path / "new" / "folder")
    names = ["overview.png", "weights.symmetry.png", "weights.singular_values.png"]
    assert [path.name for path in written] == names
    assert {*written} == {*(tmp_path / "new" / "folder").iterdir()}
    assert dict(matplotlib.rcParams) == before
    names = ("../../evil", "overview", ".._.._evil", ".._.._EVIL")
    evil = with_heads(planted(np.eye(2)), lambda head: {"measures": dict.fromkeys(names, *head.measures.values())})
    evil = evil.model_copy(update={"model": evil.model.model_copy(update={"id": "模型"})})
    written = views.save_pictures(evil, tmp_path / "pictures")
    assert {path.parent for path in written} == {tmp_path / "pictures"}
    assert len({path.name.lower() for path in written}) == 5
    assert {path.name for path in tmp_path.iterdir()} == {"pictures", "new", "one.png"}
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)], "letters that the font lacks"


@pytest.mark.parametrize(
    ("suffix", "measures"),
    [
        (".svg", ["weights.symmetry", "tokens.entropy"]),
        *(pytest.param(suffix, None, marks=pytest.mark.full) for suffix in (".svg", ".png", ".pdf")),
    ],
)
def test_the_same_report_gives_the_same_bytes_whatever_the_callers_settings(tmp_path, suffix, measures):
    def overview_of(seed):
        report = synthetic_report(3, 4, measures=measures, curves=measures is None, seed=seed)
        return views.save_pictures(report, tmp_path / f"x{suffix}")[0].read_bytes()

    first = overview_of(0)
    with matplotlib.rc_context({"font.size": 20, "svg.hashsalt": None, "savefig.dpi": 30}):
        assert overview_of(0) == first
    assert b"CreationDate" not in first
    assert b"<dc:date>" not in first
    assert overview_of(1) != first


def test_a_dollar_or_an_escape_is_only_text(tmp_path):
    report = planted(np.eye(2))
    report = report.model_copy(update={"model": report.model.model_copy(update={"id": "a$\\frac{b$\x1b[2J_{"})})
    assert views.save_pictures(report, tmp_path / "x.svg")[0].stat().st_size > 0
    assert overview(report).texts[0].get_text() == "a$\\frac{b$�[2J_{"


def test_what_cannot_be_drawn_or_written_is_refused(tmp_path):
    report = synthetic_report(2, 2)
    (tmp_path / "file").write_text("")
    for drawn, name, kind, message in (
        (report, "x.jpg", OutputError, r"\.jpg is not supported"),
        (report.model_copy(update={"heads": []}), "x.png", UsageError, "no measures to draw"),
        (report, "file/folder", OutputError, "can't be created"),
        (experiment_report(golden(published=None, tolerance=None, bounds={})), "x.png", UsageError, "no curves"),
    ):
        with pytest.raises(kind, match=message):
            views.save_pictures(drawn, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    data = json.loads(report.to_json())
    for number, head in enumerate(data["heads"]):
        head["curves"] = {name: [(-1) ** number * 1e308] * len(curve) for name, curve in head["curves"].items()}
        for measure in head["measures"].values():
            measure["null"] = {"mean": -1e308, "sd": 1e-300}
    large = Report.model_validate_json(json.dumps(data))
    with pytest.raises(AttnlensError, match="too large to draw"):
        views.page(large)
    assert "inf" not in views.csv(large).split("\n", 1)[1]
