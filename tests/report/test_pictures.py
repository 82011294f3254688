"""Tests that pictures show the report's numbers, where they belong, and the same way every time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import views
from matplotlib.colors import BoundaryNorm, CenteredNorm
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from reports import KINDS, planted, synthetic_report
from views import draw_panel

from attnlens.analyzers import registry
from attnlens.choices import Part
from attnlens.errors import OutputError, UsageError
from attnlens.records import Measure
from attnlens.report.pictures.maps import (
    full_caption,
    groups_by_part,
    overview_figure,
    page_rows,
    scale,
    short_curve_caption,
)
from attnlens.report.pictures.style import house_style, tick_positions
from attnlens.report.shapes import Shapes


def image_of(shapes: Shapes, name: str) -> AxesImage:
    with house_style():
        return draw_panel(shapes, name).axes[0].images[0]


def test_the_map_holds_each_heads_value_at_its_layer_and_head() -> None:
    values = np.arange(32.0).reshape(4, 8)
    image = image_of(Shapes(planted(values)), "weights.planted")
    np.testing.assert_array_equal(np.asarray(image.get_array()), values)
    assert not np.array_equal(values[::-1], values)  # the control: an upside-down map would be noticed


def test_layer_0_is_at_the_top_and_axes_carry_the_models_numbers() -> None:
    report = synthetic_report(6, 4)
    kept = [head for head in report.heads if head.layer in (1, 4) and head.head in (0, 3)]
    settings = report.settings.model_copy(update={"layers": [1, 4], "heads": [0, 3]})
    shapes = Shapes(report.model_copy(update={"heads": kept, "settings": settings}))
    with house_style():
        axes = draw_panel(shapes, "weights.symmetry").axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "4"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "3"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]
    assert np.asarray(axes.images[0].get_array())[1, 1] == kept[-1].measures["weights.symmetry"].value


def test_one_layer_needs_no_bar_of_layers_and_every_curve_has_a_name() -> None:
    for layers, bars in ((1, 0), (2, 1)):
        shapes = Shapes(synthetic_report(layers, 8))
        with house_style():
            figure = draw_panel(shapes, "weights.singular_values")
            page = overview_figure(shapes)
        assert len(figure.axes[0].child_axes) == bars
        titles = [axes.get_title(loc="left") for axes in page.axes]
        assert any(title.endswith("singular values of M") for title in titles)
        fans = [axes for axes in page.axes if "singular" in axes.get_title(loc="left")]
        assert all(axes.get_ylabel() and axes.get_xlabel() for axes in fans)


def test_where_few_measures_are_the_parts_of_the_shares_fill_the_page() -> None:
    report = synthetic_report(3, 4)
    names = [f"tokens.share_{part}" for part in ("positive", "negative", "skew", "key")]
    heads = [
        head.model_copy(update={"measures": {n: head.measures[n] for n in names}, "curves": {}}) for head in report
    ]
    with house_style():
        figure = overview_figure(Shapes(report.model_copy(update={"heads": heads})))
    assert [title[3:] for axes in figure.axes if (title := axes.get_title(loc="left"))] == [
        "kernel shares", "share positive", "share negative", "share skew", "share key"
    ]  # fmt: skip


def test_heads_without_a_value_are_masked_hatched_and_explained() -> None:
    missing = [(0, 1), (0, 2), (2, 0)]
    shapes = Shapes(synthetic_report(3, 4, missing=missing))
    with house_style():
        figure = draw_panel(shapes, "weights.symmetry")
    axes = figure.axes[0]
    masked = np.ma.getmaskarray(axes.images[0].get_array())
    assert sorted(map(tuple, np.argwhere(masked).tolist())) == missing
    hatched = [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_hatch()]
    assert sorted((patch.get_y() + 0.5, patch.get_width()) for patch in hatched) == [(0, 2), (2, 1)]
    assert "No value for 3 heads (hatched): the weights are not finite" in figure.texts[-1].get_text()
    with house_style():
        full = draw_panel(Shapes(synthetic_report(3, 4)), "weights.symmetry")
    assert "No value" not in full.texts[-1].get_text()


def test_a_head_that_the_report_leaves_out_is_a_hole_and_moves_no_other() -> None:
    report = synthetic_report(3, 3)
    without = [head for head in report.heads if (head.layer, head.head) != (1, 1)]
    values = Shapes(report.model_copy(update={"heads": without})).readings["weights.symmetry"].values
    full = Shapes(report).readings["weights.symmetry"].values
    assert np.isnan(values[1, 1])
    np.testing.assert_array_equal(np.delete(values.ravel(), 4), np.delete(full.ravel(), 4))


def test_signed_measures_are_centred_at_zero_by_data_or_by_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    positive = np.linspace(0.1, 0.8, 12).reshape(3, 4)
    signed = positive - 0.3
    assert isinstance(scale(Shapes(planted(signed)).readings["weights.planted"])[1], CenteredNorm)
    assert not isinstance(scale(Shapes(planted(positive)).readings["weights.planted"])[1], CenteredNorm)
    info = registry.MeasureInfo("weights.planted", "planted", "f(x)", low=-1, high=1)
    entry = registry.Analyzer("planted", "weights", "?", (info,), lambda _: {})
    monkeypatch.setitem(registry._ANALYZERS, ("planted", "weights"), entry)
    norm = scale(Shapes(planted(positive)).readings["weights.planted"])[1]
    assert isinstance(norm, CenteredNorm)
    assert norm(0.0) == 0.5
    assert norm(0.8) == 1.0


def test_one_outlier_does_not_bleach_the_others_and_an_arrow_says_so() -> None:
    values = np.linspace(0, 1, 144).reshape(12, 12)
    assert scale(Shapes(planted(values)).readings["weights.planted"])[2] == "neither"
    values[3, 3] = 1000
    _, norm, extend = scale(Shapes(planted(values)).readings["weights.planted"])
    assert extend == "max"
    assert norm(1.0) > 0.9


def test_categories_have_a_colour_each_and_their_names_at_the_bar() -> None:
    shapes = Shapes(synthetic_report(12, 12))
    with house_style():
        axes = draw_panel(shapes, "weights.kind").axes[0]
    assert isinstance(axes.images[0].norm, BoundaryNorm)
    bar = axes.child_axes[0]
    assert [label.get_text().replace("\n", " ") for label in bar.get_yticklabels()] == list(KINDS)


def test_parts_stand_in_labelled_groups_with_running_numbers() -> None:
    parts = ["encoder", "encoder", "decoder", "cross", "decoder", "cross"]
    report = synthetic_report(6, 2, parts=parts)
    shapes = Shapes(report)
    assert shapes.layers == (0, 1, 2, 4, 3, 5)
    with house_style():
        axes = draw_panel(shapes, "weights.norm").axes[0]
    _note, *labels = [text.get_text() for text in axes.texts]
    assert [label for label in labels if label.isalpha()] == ["layer", "encoder", "decoder", "cross"]
    value = next(head for head in report.heads if (head.layer, head.head) == (4, 1)).measures["weights.norm"].value
    assert np.asarray(axes.images[0].get_array())[3, 1] == value


def test_cells_carry_numbers_only_where_they_fit() -> None:
    with house_style():
        small = draw_panel(Shapes(planted(np.linspace(0, 1, 32).reshape(4, 8))), "weights.planted").axes[0]
        large = draw_panel(Shapes(planted(np.linspace(0, 1, 5120).reshape(80, 64))), "weights.planted").axes[0]
    assert [text.get_text() for text in small.texts][:3] == ["weights", "0.000", "0.032"]
    assert len(small.texts) == 1 + 32
    assert [text.get_text() for text in large.texts] == ["weights"]


def test_the_caption_gives_null_error_count_model_and_coverage() -> None:
    shapes = Shapes(synthetic_report(4, 4, sequences=7))
    with house_style():
        weights = draw_panel(shapes, "weights.symmetry").texts[-1].get_text()
        tokens = draw_panel(shapes, "tokens.entropy").texts[-1].get_text()
    assert "Null 0.0013 ± 0.0018 (mean ± sd)" in weights
    assert "bert-base-uncased · BertForMaskedLM · 110 M parameters" in weights
    assert "4 layers × 4 heads · COMPLETE: 16 of 16 heads" in weights
    assert "7 sequences; heads' median se 0.0" in tokens


def test_shares_name_their_parts() -> None:
    with house_style():
        axes = overview_figure(Shapes(synthetic_report(3, 5, source="tokens"))).axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["positive", "negative", "skew", "key"]


def test_the_fan_shows_every_head_with_median_and_quartiles() -> None:
    report = synthetic_report(5, 7)
    curves = np.array([head.curves["weights.singular_values"] for head in report.heads])
    with house_style():
        axes = draw_panel(Shapes(report), "weights.singular_values").axes[0]
    segments = axes.collections[0].get_segments()
    assert sorted(segment[0, 1] for segment in segments) == sorted(curves[:, 0])
    black = [line.get_ydata() for line in axes.lines if line.get_color() == "black"]
    np.testing.assert_allclose(black, np.percentile(curves, [25, 50, 75], axis=0))
    by_first = {segment[0, 1]: depth for segment, depth in zip(segments, axes.collections[0].get_array(), strict=True)}
    assert [by_first[curve[0]] for curve in curves] == [head.layer for head in report.heads]


@pytest.mark.parametrize("name", [info.name for info in registry.measure_infos().values() if info.curve] + ["c"])
def test_every_curve_has_a_name_along_its_side(name: str) -> None:
    with house_style():
        figure = draw_panel(with_curves([[0.2, 0.5, 1.0], [0.4, 0.6, 1.0]], name=name), name)
        figure.draw_without_rendering()
    label, axes = figure.axes[0].yaxis.label, figure.axes[0]
    assert label.get_text()
    assert label.get_window_extent().height <= axes.get_window_extent().height
    assert "pairs in its" not in figure.texts[-1].get_text()


def with_curves(curves: list[list[float]], parts: list[Part] | None = None, name: str = "c") -> Shapes:
    """A head a layer, each with one curve."""
    report = synthetic_report(len(curves), 1, parts=parts)
    heads = [head.model_copy(update={"curves": {name: curve}}) for head, curve in zip(report, curves, strict=True)]
    return Shapes(report.model_copy(update={"heads": heads}))


def test_quartiles_rest_on_the_same_heads_at_every_step_and_the_picture_says_on_which() -> None:
    curves = [[1.0, 1.0, 1.0], [9.0], [3.0, 3.0, 3.0], [5.0, 5.0, 5.0, 5.0]]
    shapes = with_curves(curves)
    (group,) = groups_by_part(shapes, "c")
    np.testing.assert_array_equal(group.complete, [[1] * 3, [3] * 3, [5] * 3])
    np.testing.assert_array_equal(group.quartiles[1], [3, 3, 3])
    with house_style():
        caption = draw_panel(shapes, "c").texts[-1].get_text()
    assert "Encoder: median and quartiles over 3 of 4 heads with 3 steps or more." in caption
    assert "of 3 of 4 heads, ≥ 3 steps" in short_curve_caption(shapes, "c")
    assert "steps" not in short_curve_caption(with_curves([[1.0, 2.0]] * 3), "c")


def test_parts_have_their_own_quartiles() -> None:
    parts: list[Part] = ["encoder", "encoder", "decoder", "cross"]
    shapes = with_curves([[1.0, 1.0, 1.0], [3.0, 3.0, 3.0], [10.0, 10.0], [7.0, 7.0]], parts)
    assert [(group.title, group.quartiles[1].tolist()) for group in groups_by_part(shapes, "c")] == [
        ("encoder", [2, 2, 2]),
        ("decoder", [10, 10]),
        ("cross", [7, 7]),
    ]
    with house_style():
        figure = draw_panel(shapes, "c")
    titled = [axes for axes in figure.axes if axes.get_title(loc="left") in [f"c: {part}" for part in parts]]
    assert [len(axes.collections[0].get_segments()) for axes in titled] == [2, 1, 1]
    assert "separately for each part" in figure.texts[-1].get_text()


@pytest.mark.parametrize(("steps", "first", "label"), [("index", 1, "index k"), ("distance in tokens", 0, "distance")])
def test_an_index_counts_from_1_and_a_distance_from_0(
    monkeypatch: pytest.MonkeyPatch, steps: str, first: int, label: str
) -> None:
    info = registry.MeasureInfo("weights.c", "planted", "f(x)", curve=True, steps=steps)
    entry = registry.Analyzer("planted", "weights", "?", (info,), lambda _: {})
    monkeypatch.setitem(registry._ANALYZERS, ("planted", "weights"), entry)
    with house_style():
        axes = draw_panel(with_curves([[1.0, 0.5, 0.2]] * 2, name="weights.c"), "weights.c").axes[0]
    assert axes.collections[0].get_segments()[0][:, 0].tolist() == [first, first + 1, first + 2]
    assert axes.get_xlim() == (first, first + 2)
    assert axes.get_xticks()[0] == first
    assert axes.get_xlabel().startswith(label)


def test_a_steep_fall_is_drawn_on_a_logarithmic_axis_and_a_rise_is_not() -> None:
    falling = planted(np.ones((2, 2)))
    heads = [head.model_copy(update={"curves": {"c": [1.0, 0.1, 0.001], "d": [0.001, 0.1, 1.0]}}) for head in falling]
    shapes = Shapes(falling.model_copy(update={"heads": heads}))
    with house_style():
        assert draw_panel(shapes, "c").axes[0].get_yscale() == "log"
        assert draw_panel(shapes, "d").axes[0].get_yscale() == "linear"


@pytest.mark.parametrize(("source", "expected"), [("both", [3, 3]), ("weights", [3, 3]), ("tokens", [3, 3])])
def test_the_overview_has_six_pictures_and_none_of_a_constant(source: str, expected: list[int]) -> None:
    rows = page_rows(Shapes(synthetic_report(6, 6, source=source)))  # type: ignore[arg-type]
    assert [len(row) for row in rows] == expected
    names = [panel.stem for row in rows for panel in row]
    assert len(set(names)) == 6
    assert not any("inertia" in name for name in names)


def test_the_overview_prefers_what_differs_from_chance() -> None:
    shapes = Shapes(synthetic_report(6, 6))
    assert shapes.readings["weights.directionality"].chance
    assert not shapes.readings["weights.definiteness"].chance
    assert [panel.stem for panel in page_rows(shapes)[0]][:2] == ["weights.symmetry", "weights.definiteness"]


def test_a_report_with_one_measure_still_has_an_overview(tmp_path: Path) -> None:
    report = planted(np.linspace(0, 1, 6).reshape(2, 3))
    written = views.save_pictures(report, tmp_path / "one.png")
    assert written == [tmp_path / "one.png"]
    assert written[0].read_bytes().startswith(b"\x89PNG")


def test_a_folder_gets_the_contracts_names(tmp_path: Path) -> None:
    report = planted(np.eye(3), "weights.symmetry", curve="weights.singular_values")
    written = views.save_pictures(report, tmp_path / "new" / "folder")
    expected = ["overview.png", "weights.symmetry.png", "weights.singular_values.png"]
    assert [path.name for path in written] == expected
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == sorted(expected)


def test_hostile_names_stay_in_the_folder_and_apart(tmp_path: Path) -> None:
    report = planted(np.eye(2), "../../evil")
    heads = [
        head.model_copy(
            update={"measures": dict.fromkeys(("../../evil", "overview", ".._.._evil"), head.measures["../../evil"])}
        )
        for head in report
    ]
    written = views.save_pictures(report.model_copy(update={"heads": heads}), tmp_path / "pictures")
    assert {path.parent for path in written} == {tmp_path / "pictures"}
    assert len({path.name.lower() for path in written}) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["pictures"]


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_the_same_report_gives_the_same_bytes_whatever_the_callers_settings(tmp_path: Path, suffix: str) -> None:
    first = views.save_pictures(synthetic_report(3, 4), tmp_path / f"a{suffix}")[0].read_bytes()
    with matplotlib.rc_context({"font.size": 20, "svg.hashsalt": None, "savefig.dpi": 30}):
        second = views.save_pictures(synthetic_report(3, 4), tmp_path / f"b{suffix}")[0].read_bytes()
    assert first == second
    assert b"CreationDate" not in first
    assert b"<dc:date>" not in first
    assert views.save_pictures(synthetic_report(3, 4, seed=1), tmp_path / f"c{suffix}")[0].read_bytes() != first


def test_drawing_leaves_matplotlibs_settings_alone_and_needs_no_pyplot(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    views.save_pictures(planted(np.eye(2)), tmp_path / "x.png")
    assert dict(matplotlib.rcParams) == before
    check = "import sys, attnlens.report.pictures; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_a_dollar_or_an_escape_in_the_models_name_is_only_text(tmp_path: Path) -> None:
    report = synthetic_report(2, 2, model="a$\\frac{b$\x1b[2J_{")
    assert views.save_pictures(report, tmp_path / "x.svg")[0].stat().st_size > 0
    with house_style():
        title = overview_figure(Shapes(report)).texts[0].get_text()
    assert title == "a$\\frac{b$�[2J_{"


def test_what_cannot_be_drawn_or_written_is_said(tmp_path: Path) -> None:
    report = synthetic_report(2, 2)
    with pytest.raises(OutputError, match=r"\.jpg is not supported"):
        views.save_pictures(report, tmp_path / "x.jpg")
    with pytest.raises(UsageError, match="no measures to draw"):
        views.save_pictures(report.model_copy(update={"heads": []}), tmp_path / "x.png")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="can't be created"):
        views.save_pictures(report, tmp_path / "file" / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_ticks_are_round_and_few() -> None:
    assert tick_positions(4, 8) == [0, 1, 2, 3]
    assert tick_positions(80, 12) == [0, 8, 16, 24, 32, 40, 48, 56, 64, 72]


def test_heads_that_differ_by_rounding_alone_have_one_colour() -> None:
    _, norm, _ = scale(Shapes(planted(0.7 + 1e-9 * np.arange(6.0).reshape(2, 3))).readings["weights.planted"])
    assert norm(0.7) == pytest.approx(0.5, abs=1e-3)
    _, norm, _ = scale(Shapes(planted(0.7 + 1e-3 * np.arange(6.0).reshape(2, 3))).readings["weights.planted"])
    assert norm(0.7) == 0  # the control
    with house_style():
        bar = draw_panel(Shapes(planted(np.full((2, 3), 0.7))), "weights.planted").axes[0].child_axes[0]
    assert [label.get_text() for label in bar.get_yticklabels()] == ["0.7"]


def test_hatching_is_explained_where_a_cell_of_this_page_is_hatched() -> None:
    report = synthetic_report(3, 4)
    for name, said in (("weights.kind", False), ("weights.symmetry", True)):
        head = report.heads[0]
        gone = head.model_copy(update={"measures": head.measures | {name: Measure(value=None, reason="gone")}})
        shapes = Shapes(report.model_copy(update={"heads": [gone, *report.heads[1:]]}))
        assert name not in {panel.stem for row in page_rows(shapes) for panel in row} or said
        with house_style():
            texts = [text.get_text() for text in overview_figure(shapes).texts]
        assert ("hatched: no value" in texts) == said


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, None, "Here 0.00 to 3.00; possible: 0 to ∞."),
        (None, 5, "Here 0.00 to 3.00; possible: −∞ to 5."),
        (-1, 5, "Here 0.00 to 3.00; possible: −1 to 5."),
        (None, None, "Here 0.00 to 3.00; possible: any."),
    ],
)
def test_the_caption_says_what_is_possible(
    monkeypatch: pytest.MonkeyPatch, low: float | None, high: float | None, expected: str
) -> None:
    info = registry.MeasureInfo("weights.planted", "planted", "f(x)", low=low, high=high)
    entry = registry.Analyzer("planted", "weights", "?", (info,), lambda _: {})
    monkeypatch.setitem(registry._ANALYZERS, ("planted", "weights"), entry)
    shapes = Shapes(planted(np.array([[0.0, 0.5], [1.25, 3.0]])))
    assert expected in full_caption(shapes, shapes.readings["weights.planted"]).splitlines()


def test_the_null_is_said_to_be_on_the_colour_bar_only_if_there_is_one() -> None:
    shapes = Shapes(synthetic_report(3, 3))
    marked = {name: "mark on the colour bar" in full_caption(shapes, shapes.readings[name]) for name in shapes.readings}
    assert marked == {name: reading.null is not None for name, reading in shapes.readings.items()}
    assert {*marked.values()} == {True, False}
