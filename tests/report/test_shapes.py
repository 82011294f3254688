"""Tests of the arrays that presentations share: chance, colours of signed maps, and rounded attention."""

import numpy as np
import pytest
from reports import planted, synthetic_report
from swap_reports import controls, swap_report, swapped

from attnlens.records import AttentionRows, Null
from attnlens.report import export
from attnlens.report.findings import find
from attnlens.report.pictures.maps import scale
from attnlens.report.sections.explorer import explorer
from attnlens.report.shapes import Shapes


@pytest.mark.parametrize(("value", "chance"), [(0.5, True), (-0.5, True), (3.0, False), (-3.0, False)])
def test_heads_lie_within_chance_on_both_sides_of_the_null(value, chance):
    report = planted(np.full((2, 2), value))
    null = Null(mean=0.0, sd=1.0)
    heads = [
        head.model_copy(
            update={"measures": {name: m.model_copy(update={"null": null}) for name, m in head.measures.items()}}
        )
        for head in report.heads
    ]
    reading = Shapes(report.model_copy(update={"heads": heads})).readings["weights.planted"]
    assert reading.chance is chance


@pytest.mark.parametrize(("low", "high"), [(-0.8, 0.2), (-0.2, 0.8)])
def test_signed_maps_reach_as_far_below_0_as_above(low, high):
    reading = Shapes(planted(np.array([[low, high], [0.0, 0.1]]))).readings["weights.planted"]
    _, norm, _ = scale(reading)
    assert norm(0.0) == pytest.approx(0.5)
    assert [norm.vmin, norm.vmax] == pytest.approx([-0.8, 0.8])


def test_the_rest_of_attention_is_in_thousandths_like_the_weights():
    report = synthetic_report(1, 1)
    place = {name: getattr(report.heads[0], name) for name in ("site", "layer", "head", "kv_head", "part")}
    rows = AttentionRows(**place, sequence=0, keys=[[0, 1]], weights=[[0.5, 0.25]], rest=[0.25])
    body = report.inspection.model_copy(update={"attention": [rows]})
    shown = explorer(Shapes(report.model_copy(update={"inspection": body})))["attention"]["0.0"]
    assert (shown["weights"], shown["rest"]) == ([[500, 250]], [250])


def test_a_control_costs_less_only_if_its_whole_interval_lies_below():
    near, far = (
        next(
            finding.answer
            for finding in find(Shapes(swap_report(swapped(deltas=(delta,), controls=controls()))))
            if finding.question.startswith("Against")
        )
        for delta in (0.06, 0.4)
    )
    assert near.startswith("Costs about as much as sink-window:4,64")
    assert far.startswith("Costs more than sink-window:4,64")


def test_the_format_of_a_picture_follows_its_suffix_in_upper_case_too(tmp_path):
    (draw,) = export.drawings(synthetic_report(2, 2), tmp_path / "A.PNG").values()
    content = draw()
    image = content if isinstance(content, bytes) else content[0]
    assert image.startswith(b"\x89PNG")
