"""Tests of the arrays that presentations share: chance, colours of signed maps, and rounded attention."""

import numpy as np
import pytest
import views
from experiment_reports import curve, series_report
from reports import planted, synthetic_report
from swap_reports import controls, planned, swap_report, swapped

from attnlens.records import AttentionRows, Change, KeyRank, Null
from attnlens.records.provenance import Conventions
from attnlens.report import export
from attnlens.report.findings import find
from attnlens.report.pictures.maps import scale
from attnlens.report.sections.explorer import explorer
from attnlens.report.sections.plans import plan_rows
from attnlens.report.sections.section import Column, Section, Table
from attnlens.report.shapes import Shapes, drop_rotary


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


def against_simple_kernels(delta, controls):
    findings = find(Shapes(swap_report(swapped(deltas=(delta,), controls=controls))))
    return next(finding.answer for finding in findings if finding.question.startswith("Against"))


def test_a_control_of_an_older_report_costs_less_only_if_its_whole_interval_lies_below():
    assert against_simple_kernels(0.06, controls()).endswith(
        "; not distinguishable with 32 windows from sink-window:4,64."
    )
    assert against_simple_kernels(0.4, controls()).startswith("Costs more than sink-window:4,64")


def test_a_kernel_is_compared_with_a_control_in_the_same_windows():
    """The intervals of the two changes overlap, but that of their paired difference decides."""

    def compared(low, high):
        difference = Change(before=2.464, after=2.546, delta=0.082, ci95=(low, high))
        return against_simple_kernels(0.116, [controls()[0].model_copy(update={"difference": difference})])

    assert compared(0.03, 0.13) == "Costs more than sink-window:4,64."
    assert compared(-0.13, -0.03) == "Costs less than sink-window:4,64."
    unclear = "sink-window:4,64 (difference 0.082, 95 % interval -0.010 to 0.180)"
    assert compared(-0.01, 0.18) == f"Not distinguishable with 32 windows from {unclear}."


def test_the_format_of_a_picture_follows_its_suffix_in_upper_case_too(tmp_path):
    (draw,) = export.drawings(synthetic_report(2, 2), tmp_path / "A.PNG").values()
    content = draw()
    image = content if isinstance(content, bytes) else content[0]
    assert image.startswith(b"\x89PNG")


def test_the_mean_rank_of_a_shared_latent_is_per_key_head():
    shared = KeyRank(
        **{"site": "s", "layer": 0, "kv_head": 0, "heads": [0, 1, 2, 3], "kv_heads": [0, 1, 2, 3]},
        **{"rank": 24, "part": "decoder", "head_dim": 256},
    )
    table = plan_rows(planned(ranks=[shared]).plan)
    cells = {column.title: column.cells[0] for column in (*table.names, *table.columns)}
    assert (cells["mean rank"], cells["of"]) == ("6.0", "64")


def test_the_null_of_a_series_is_its_mean_with_its_sd():
    report = series_report()
    (series,) = report.experiments
    null = curve(series.curves["weights.symmetry"].steps, np.full(7, 0.5), 0.1, null_of="weights.symmetry")
    own = {name: each for name, each in series.curves.items() if each.null_of is None}
    series = series.model_copy(update={"curves": own | {"weights.symmetry: null": null}})
    text = views.summary(report.model_copy(update={"experiments": [series]}), 300)
    shown = [line.split()[-3:] for line in text.splitlines() if line.split()[:1] == ["weights.symmetry"]]
    assert ["0.50", "±", "0.10"] in shown


def test_a_column_that_fits_the_page_exactly_is_shown_beside_the_others():
    columns = [Column(f"m{number}", ["1234567890"]) for number in range(3)]
    table = Table([Column("head", ["0"])], columns)
    exact = len("head") + 3 * (2 + 10)
    lines = [
        views.printed(views.alone(Section(table=table)), width).count("1234567890\n") for width in (exact, exact - 1)
    ]
    assert lines == [1, 2]


@pytest.mark.parametrize(("position", "mentioned"), [("absolute", False), ("rotary", True), ("unknown", True)])
def test_texts_on_measures_mention_rope_only_for_models_that_may_have_it(position, mentioned):
    report = synthetic_report(3, 4)
    conventions = Conventions(position=position, qk_norm=False, bias="none")
    shapes = Shapes(report.model_copy(update={"model": report.model.model_copy(update={"conventions": conventions})}))
    info = shapes.readings["weights.symmetry"].info
    assert ("RoPE" in info.meaning, "RoPE" in info.formula) == (mentioned, mentioned)
    assert info.meaning.startswith("symmetry of M: 1 symmetric; 0 equal symmetric and antisymmetric parts; −1 anti")
    assert info.formula.startswith("(‖S‖² − ‖A‖²)/‖M‖² = tr(CC)/tr(G_Q G_K)")
    symbols = "S and A are its parts. Under RoPE M depends on Δ, and the rest on both. Cross-attention has only a norm."
    kept = symbols if mentioned else "S and A are its parts. Cross-attention has only a norm."
    assert drop_rotary(shapes.report, symbols) == kept
