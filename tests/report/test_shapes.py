"""Tests of numbers that several presentations share: attention, paired differences, ranks, widths, and texts."""

import pytest
import views
from reports import synthetic_report
from swap_reports import controls, planned, swap_report, swapped

from attnlens.records import AttentionRows, Change, KeyRank
from attnlens.records.provenance import Conventions
from attnlens.report.findings import find
from attnlens.report.sections.explorer import explorer
from attnlens.report.sections.plans import plan_rows
from attnlens.report.sections.section import Column, Section, Table
from attnlens.report.shapes import Shapes, drop_rotary


def test_the_rest_of_attention_is_in_thousandths_like_the_weights():
    report = synthetic_report(1, 1)
    place = {name: getattr(report.heads[0], name) for name in ("site", "layer", "head", "kv_head", "part")}
    rows = AttentionRows(**place, sequence=0, keys=[[0, 1]], weights=[[0.5, 0.25]], rest=[0.25])
    body = report.inspection.model_copy(update={"attention": [rows]})
    shown = explorer(Shapes(report.model_copy(update={"inspection": body})))["attention"]["0.0"]
    assert (shown["weights"], shown["rest"]) == ([[500, 250]], [250])


def test_a_kernel_is_compared_with_a_control_in_the_same_windows():
    """The intervals of the two changes overlap, but that of their paired difference decides."""

    def compared(low, high):
        difference = Change(before=2.464, after=2.546, delta=0.082, ci95=(low, high))
        control = controls()[0].model_copy(update={"difference": difference})
        findings = find(Shapes(swap_report(swapped(deltas=(0.116,), controls=[control]))))
        return next(finding.answer for finding in findings if finding.question.startswith("Against"))

    assert compared(0.03, 0.13) == "Costs more than sink-window:4,64."
    assert compared(-0.13, -0.03) == "Costs less than sink-window:4,64."
    unclear = "sink-window:4,64 (difference 0.082, 95 % interval -0.010 to 0.180)"
    assert compared(-0.01, 0.18) == f"Not distinguishable with 32 windows from {unclear}."


def test_the_mean_rank_of_a_shared_latent_is_per_key_head():
    shared = KeyRank(
        **{"site": "s", "layer": 0, "kv_head": 0, "heads": [0, 1, 2, 3], "kv_heads": [0, 1, 2, 3]},
        **{"rank": 24, "part": "decoder", "head_dim": 256},
    )
    table = plan_rows(planned(ranks=[shared]).plan)
    cells = {column.title: column.cells[0] for column in (*table.names, *table.columns)}
    assert (cells["mean rank"], cells["of"]) == ("6.0", "64")


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
