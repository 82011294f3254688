"""Tests that pictures can be read: texts keep apart, and axes' numbers are written out."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from reports import planted, synthetic_report
from views import draw_panel

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


def settle(figure: Figure) -> None:
    """Lay the figure out, and forget the ticks that it does not draw."""
    figure.draw_without_rendering()
    for place in (place for axes in figure.axes for place in (axes, *axes.child_axes)):
        for axis in (place.xaxis, place.yaxis):
            del axis.majorTicks[len(axis.get_majorticklocs()) :]
            low, high = sorted(axis.get_view_interval())
            for tick in axis.majorTicks:
                tick.label1.set_visible(low - 1e-9 <= tick.get_loc() <= high + 1e-9 and tick.label1.get_visible())


def overlapping(figure: Figure) -> list[tuple[str, str]]:
    """Texts whose boxes share more than a hair, and texts that leave the page."""
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if in_view(text)]
    pairs = [
        (name, other)
        for number, (name, box) in enumerate(boxes)
        for other, next_box in boxes[:number]
        if min(box.x1, next_box.x1) - max(box.x0, next_box.x0) > 2
        and min(box.y1, next_box.y1) - max(box.y0, next_box.y0) > 4
    ]
    outside = [(name, "the page") for name, box in boxes if box.x0 < 0 or box.x1 > figure.bbox.width]
    return pairs + outside


def in_view(text: Text) -> bool:
    """Whether it is drawn: ticks beyond an axis' ends are not."""
    axes = text.axes
    if axes is None or text not in [
        label for axis in (axes.xaxis, axes.yaxis) for label in axis.get_ticklabels("both")
    ]:
        return True
    box = text.get_window_extent()
    middle = ((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2)
    place = axes.get_window_extent()
    return place.x0 - 1 <= middle[0] <= place.x1 + 1 or place.y0 - 1 <= middle[1] <= place.y1 + 1
