"""Tests that pictures can be read: texts keep apart, and axes' numbers are written out."""

from __future__ import annotations

import numpy as np
import pytest
from reports import planted, synthetic_report
from views import draw_panel, overlapping

from attnlens.choices import Part
from attnlens.report.pictures.maps import overview_figure
from attnlens.report.pictures.style import house_style, new_figure
from attnlens.report.shapes import Shapes


@pytest.mark.parametrize(
    ("ticks", "expected", "factor"),
    [
        ([0.9995, 0.9996, 0.9997], ["0.9995", "0.9996", "0.9997"], ""),
        ([-0.05, 0.0, 0.05], ["−0.05", "0.00", "0.05"], ""),
        ([0, 20, 40], ["0", "20", "40"], ""),
        ([1e-9, 2e-9], ["1", "2"], "1e−9"),
        ([0.1 + 0.2, 0.4], ["0.3", "0.4"], ""),
    ],
)
def test_ticks_are_written_out_and_tell_each_other_apart(ticks: list[float], expected: list[str], factor: str) -> None:
    with house_style():
        axis = new_figure(4, 3).add_subplot(xlim=(min(ticks), max(ticks))).xaxis
    assert axis.get_major_formatter().format_ticks(ticks) == expected
    assert axis.get_major_formatter().get_offset() == factor


@pytest.mark.parametrize("values", [1e-3 + 1e-7 * np.arange(6.0), 0.9999 + 1e-6 * np.arange(6.0), np.full(6, 0.7)])
def test_no_axis_has_an_offset(values: np.ndarray) -> None:
    shapes = Shapes(planted(values.reshape(2, 3), curve="weights.c"))
    for name in ("weights.planted", "weights.c"):
        with house_style():
            figure = draw_panel(shapes, name)
            figure.draw_without_rendering()
        places = [place for axes in figure.axes for place in (axes, *axes.child_axes)]
        offsets = [axis.get_offset_text().get_text() for place in places for axis in (place.xaxis, place.yaxis)]
        assert set(offsets) == {""}


@pytest.mark.parametrize("parts", [None, ["encoder", "encoder", "decoder", "cross", "decoder", "cross"]])
def test_no_two_texts_of_a_page_overlap(parts: list[Part] | None) -> None:
    shapes = Shapes(synthetic_report(6, 8, parts=parts, missing=[(1, 1)]))
    with house_style():
        for figure in (
            overview_figure(shapes),
            draw_panel(shapes, "weights.kind"),
            draw_panel(shapes, "weights.symmetry"),
            draw_panel(shapes, "weights.singular_values"),
        ):
            figure.draw_without_rendering()
            assert overlapping(figure) == []
            figure.text(0.5, 0.5, "over", fontsize=30)
            figure.text(0.5, 0.5, "under", fontsize=30)
            assert ("under", "over") in overlapping(figure)  # the control
