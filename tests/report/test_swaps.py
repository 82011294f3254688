"""Tests what swaps, plans and healings say in tables, pages, rows and pictures."""

from __future__ import annotations

import csv
import io
import math

import numpy as np
import pytest
import swap_reports
import views
from hostile_reports import STEERING, hostile_swap
from swap_reports import agreed, controls, healing, planned, several, swap_report, swapped, with_swaps
from views import check_layout, draw

from attnlens.kernels import TIES
from attnlens.records import Coverage, Effect, HealingRate, HealingTraining, Pair, Rise, Text, TextCosine
from attnlens.report import export
from attnlens.report.pictures import swaps as pictures
from attnlens.report.pictures.charts import panel_figure
from attnlens.report.pictures.style import house_style
from attnlens.report.pictures.swaps import swap_overview, swap_panels
from attnlens.report.report import Report
from attnlens.report.sections import swaps as effects
from attnlens.report.sections.plans import healing_lines, plan_lines
from attnlens.report.sections.swaps import effect
from attnlens.requests.swap import Amount

SHAPES = [(4, 8), (30, 9), (12, 12)]
MIXED = ["encoder", "encoder", "decoder", "cross", "decoder", "cross"]


def flowing(report: Report) -> str:
    """The summary without line breaks, as one sentence may take two lines."""
    return " ".join(views.summary(report, 110).split())


def row(report: Report, first: str, width: int = 110) -> list[str]:
    return next(line.split() for line in views.summary(report, width).splitlines() if line.split()[:1] == [first])


def rows_of_csv(report: Report) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(views.csv(report))))


@pytest.fixture(scope="module")
def whole() -> Report:
    return swap_report(swapped(deltas=(3.28, 1.12, 0.09), healed=True, sweep="heads"))


@pytest.fixture(scope="module")
def controlled() -> Report:
    """A kernel that costs 0.4 nats, and its controls, of which the sink-window costs less."""
    return swap_report(swapped(deltas=(0.4,), controls=controls(), agreement=agreed([1, 2, 3, 64])))


def test_one_kernel_has_its_numbers_stage_by_stage(whole: Report):
    assert row(whole, "original")[1:] == ["2.430", "11.4"]
    assert row(whole, "swapped")[1:6] == ["5.710", "3.280", "3.096", "to", "3.464"]
    assert row(whole, "healed")[1:3] == ["2.520", "0.090"]
    best = next(step.validation for step in healing().curve if step.step == 700)
    for fact in (
        "The loss rises from 2.430 to 2.520 nats per token (Δ 0.090, 95 % interval 0.065 to 0.115).",
        f"Once healed, {100 * (1 - 0.09 / 3.28):.0f} %",
        "4 of 4 sites, 32 of 32 heads · path: sdpa",
        "identity error 3.2e-07, causality error 0, mask error –",
        "mask error: the sequences have no padding",
        "15,134 → 12,043 tokens per second (× 0.80); 440 → 457 MiB peak (× 1.04)",
        "1000 steps requested, 1000 done, best step 700; 7,077,888 parameters trained, learning rate 1e-3",
        f"{healing().curve[0].validation:.2f} at first, {best:.3f} at the best step",
        "3.550 at step 0, 3.174 at step 50",
    ):
        assert fact in flowing(whole)
    details = views.details(swap_report(swapped(layers=5)), 110)
    assert all(f"model.layers.{layer}.attn" in details for layer in range(5))
    swap = swapped(peak_memory_bytes=Pair(before=None, after=None))
    assert "– → – MiB" in effects.format_cost(swap)


def test_perplexity_has_the_interval_of_its_rise(controlled: Report):
    """Its ends are e^Δ − 1 at those of Δ."""
    rise, ends = math.expm1(0.4), [math.expm1(0.4 + sign * (0.0202 + 0.02)) for sign in (-1, 1)]
    interval = f"{100 * ends[0]:.1f} to {100 * ends[1]:.1f} %"
    assert f"Perplexity +{100 * rise:.1f} %, 95 % interval {interval}." in flowing(controlled)
    assert row(controlled, "swapped", 120)[6:13] == ["16.9", f"+{100 * rise:.1f}", "%", *interval.split()]
    assert "+9.4 %" in effects.verdict(swapped(deltas=(0.09,)))


def test_controls_are_rows_apart_and_named_if_they_cost_less(controlled: Report):
    rows = [line.split()[:3] for line in views.summary(controlled, 120).splitlines() if line.startswith("vs ")]
    assert rows[:3] == [["vs", "sink-window:4,64", "2.480"], ["vs", "hard", "7.930"], ["vs", "uniform", "6.330"]]
    assert "Lower loss than rbf:gamma=0.5, with disjoint intervals: sink-window:4,64." in flowing(controlled)
    assert "vs" not in flowing(swap_report(swapped())).split(), "the control"
    dear = swap_report(swapped(deltas=(0.04,), controls=controls()))
    assert "Lower loss than" not in flowing(dear), "their intervals meet"
    swaps = [swapped(kernel=name, deltas=(delta,), controls=controls()) for name, delta in (("elu", 1.0), ("l2", 2.0))]
    text = views.summary(swap_report(*swaps), 140)
    cells = [line.split()[:2][-1] for line in text[text.index("original") :].splitlines()[1:7]]
    assert cells == ["3.430", "sink-window:4,64", "4.430", "sink-window:4,64", "hard", "uniform"]


def test_agreement_is_censored_if_half_never_differ(controlled: Report):
    shown = "match the original for 2 of 64 tokens (median; quartiles 1 to 3); 1 of 4 never differ."
    assert shown in flowing(controlled)
    assert "match the original for ≥ 64 of 64 tokens" in flowing(
        swap_report(swapped(agreement=agreed([64, 64, 64, 3])))
    )


def test_csv_has_a_row_per_stage_and_control_or_per_unit(whole: Report, controlled: Report):
    rows = rows_of_csv(controlled)
    controlling = [("swapped", ""), ("", "sink-window:4,64"), ("", "hard"), ("", "uniform")]
    assert [(cells["stage"], cells["control"]) for cells in rows] == controlling
    assert [cells["state"] for cells in rows[1:]] == ["8704", "16384", "65"]
    assert {cells["tokens_per_second.after"] for cells in rows[1:]} == {""}
    assert {"perplexity.delta.low", "perplexity.delta.high", "greedy.median"} <= set(rows[0])
    rows = rows_of_csv(swap_report(swapped(deltas=(3.28, None))))
    assert [(cells["stage"], cells["loss.delta"]) for cells in rows] == [("swapped", "3.28"), ("fitted", "")]
    units = rows_of_csv(whole)
    assert len(units) == 32
    assert {cells["significant"] for cells in units} == {"true", "false"}


@pytest.mark.parametrize(
    ("delta", "words"),
    [
        (3.28, "The loss rises from 2.43 to 5.71"),
        (-1.0, "The loss falls from 2.430 to 1.430"),
        (0.0, "does not change"),
        (0.01, "does not change measurably"),  # its interval holds 0
        (0.03, "rises"),
    ],
)
def test_the_verdict_gives_the_direction_of_the_loss(delta: float, words: str):
    assert words in effects.verdict(swapped(deltas=(delta,)))


def test_diverged_is_a_finding_and_no_number():
    shown = flowing(swap_report(swapped(deltas=(None,))))
    assert "The model diverges" in shown
    assert "swapped diverged" in shown
    assert f"loss, perplexity, KL, top-1, hidden cosine, CKA: {swap_reports.DIVERGED}" in shown
    assert "nan" not in shown.lower().replace("finance", "")
    assert "diverge" not in flowing(swap_report())  # the control
    reason = swapped().model_copy(update={"reasons": {"mask_error": "the lines diverged"}})
    assert "The model diverges" not in flowing(swap_report(reason)), "a word in a reason is no finding"
    swap = swapped(sweep="layers")
    lost = Effect(layer=9, head=None, part="decoder", delta=None)
    shown = flowing(swap_report(swap.model_copy(update={"sweep": [lost, *swap.sweep]})))
    assert "Diverged: layer 9." in shown
    assert "9 diverged –" in shown


def test_a_model_without_a_head_is_described_by_its_hidden_states():
    report = swap_report(swapped(headless=True))
    assert f"the original's: {1 / 4.28:.3f}." in flowing(report)
    assert row(report, "swapped")[1:5] == ["0.234", "0.192", "to", "0.275"]
    assert f"loss, perplexity, KL, top-1: {swap_reports.HEADLESS}" in flowing(report)
    assert "perplexity KL" not in flowing(report).split("No value")[0]
    texts = [
        TextCosine(name=f"{n}.txt", sequences=n, cosine=0.8 + n / 10, ci95=(0.7, 0.95) if n else None) for n in (0, 1)
    ]
    for headless in (True, False):
        shown = flowing(swap_report(swapped(headless=headless, hidden_cosine_by_text=texts)))
        assert ("1.txt 1 0.900 0.700 to 0.950" in shown) == headless
        assert ("A single window has no interval." in shown) == headless


def test_one_window_promises_no_interval():
    settings = swap_report().settings
    lone = settings.model_copy(update={"windows": 1, "texts": [Text(name="a", sha256="b", windows=[3], available=9)]})
    for swap in (swapped(), swapped(headless=True)):
        shown = flowing(swap_report(swap, **dict(lone)))
        assert "no errors: only one window was read" in shown
        assert "paired bootstrap" not in shown
        assert "paired bootstrap" in flowing(swap_report(swap))
    assert "21.0 % of the attention weight is negative" in flowing(swap_report(swapped(off_simplex=0.21)))
    assert "negative" not in flowing(swap_report())


def test_a_model_that_reads_noise_is_described_without_a_loss():
    report = swap_report(swapped(noise=True, sweep="heads"))
    for fact in (
        "KL divergence of the predictions from the original's: 3.61 nats per token.",
        f"loss, perplexity: {swap_reports.NOISE}",
        "Δ of the KL to the original in nats per token, a distance: never negative, and not tested",
    ):
        assert fact in flowing(report)
    assert "FDR" not in flowing(report)
    assert row(report, "swapped")[1:] == ["3.61", "3.25", "to", "4.04", "27.6", "%", "0.234", "0.303"]
    assert "loss, perplexity" not in flowing(swap_report()), "the control"
    deltas = {"rbf": 1.0, "l2": None, "cosine": 2.0}
    report = swap_report(*(swapped(noise=True, kernel=name, deltas=(delta,)) for name, delta in deltas.items()))
    assert row(report, "kernel") == ["kernel", "KL", "interval", "top-1", "cosine", "CKA", "speed"]
    assert row(report, "rbf")[1:9] == ["1.10", "0.99", "to", "1.23", "55.6", "%", "0.500", "0.588"]
    assert row(report, "l2")[1:] == ["diverged", "–", "–", "–", "–", "×", "0.80"]
    assert row(report, "cosine")[1] == "2.20"


def test_several_kernels_are_rows_whatever_their_ties():
    report = several()
    assert "Effects\n" in views.summary(report, 110)
    assert row(report, "rbf:gamma=0.5")[1:6] == ["5.71", "3.28", "3.10", "to", "3.46"]
    assert row(report, "rbf:gamma=0.5+symmetric")[1:3] == ["5.33", "2.90"]
    assert row(report, "symmetric")[1:3] == ["4.33", "1.90"]
    assert row(report, "linear+symmetric")[1:3] == ["diverged", "–"]
    assert row(report, "linear")[2] == "7.70"
    assert max(map(len, views.summary(report).splitlines())) <= 100
    assert "| linear | 10.13 | 7.70 |" in views.markdown(report)
    caution = TIES["symmetric"].caution
    assert "not that of asymmetry alone" in caution
    assert caution in swap_panels(report)[0].caption
    plain = swap_report(swapped(kernel="rbf"), swapped(kernel="l2+tied-key"))
    assert caution not in swap_panels(plain)[0].caption, "the control"


def test_the_sweep_shows_ten_of_each_end_and_counts_what_matters(whole: Report):
    sweep, text = whole.swaps[0].sweep, views.summary(whole, 110)
    assert f"{sum(unit.significant for unit in sweep)} of 32 heads have significant effects" in text
    table = text[text.index("layer  head") :].splitlines()[2:23]
    assert [line.split()[:2] for line in table[:10]] == [[str(e.layer), str(e.head)] for e in sweep[:10]]
    assert set(table[10].split()) == {"…"}
    assert [line.split()[:2] for line in table[11:]] == [[str(e.layer), str(e.head)] for e in sweep[-10:]]
    assert [line.rstrip().endswith("*") for line in table[:10]] == [e.significant for e in sweep[:10]]
    alike = [Effect(layer=0, head=n, part="decoder", delta=0.1, ci95=(-0.1, 0.3), p_value=0.3) for n in range(4)]
    shown = flowing(swap_report(swapped(sweep="heads").model_copy(update={"sweep": alike}), windows=4))
    assert "no head has a significant effect on 4 windows (false discovery rate 5 %)" in shown
    assert "0 of 4 heads" not in shown


def test_reports_survive_json_and_strangers_strings_are_text(whole: Report):
    for report in (whole, several(sweep="heads"), hostile_swap()):
        again = Report.model_validate_json(report.to_json())
        assert again.to_json() == report.to_json()
        assert views.summary(again) == views.summary(report)
    page, text, marks, rows = (write(report) for write in (views.page, flowing, views.markdown, views.csv))
    for written in (page, text, marks, rows):
        assert STEERING.search(written.replace("&#8203;", "")) is None
    assert views.runs_its_own_script_alone(page)
    assert "<" not in marks.replace("<0.0001", "")
    assert "[red]b[/red]" in text
    assert "'=x" in rows
    page = views.page(whole)
    assert "<td>5.710</td>" in page
    assert "Every head" not in page


# Plans and promises


@pytest.mark.parametrize(
    ("after", "line"),
    [
        (13_698_304.0, "Added: 13,271,040 → 13,698,304 parameters for queries and keys (+3 %)"),
        (13_271_040.0, "Unchanged: 13,271,040 → 13,271,040 parameters for queries and keys (+0 %)"),
        (6_635_520.0, "Saving: 13,271,040 → 6,635,520 parameters for queries and keys (−50 %)"),
    ],
)
def test_only_what_falls_is_a_saving(after: float, line: str):
    assert line in plan_lines(planned(parameters=Pair(before=13_271_040.0, after=after)).plan)


FAILS = "beyond the budget: the promise fails on this text"
RISES = [
    ("measured", 0.0087, (0.0058, 0.0096), "within the budget"),
    ("measured", 0.0087, (0.0058, 0.0118), "within the budget, though its interval is not"),
    ("measured", 0.0087, None, "within the budget, without an interval"),
    ("measured", 0.0104, (0.0058, 0.0150), FAILS),
    ("measured", 0.0104, None, FAILS),
    ("promised", 0.0021, (0.0002, 0.0041), "within the budget"),
    ("promised", 0.0080, (0.005, 0.011), "within the budget, though its interval is not: the budget is not guaranteed"),
    ("promised", 0.0120, (0.0090, 0.0150), "beyond the budget"),
    ("promised", 0.0080, None, "within the budget, without an interval"),
]


@pytest.mark.parametrize(("name", "share", "ci95", "verdict"), RISES)
def test_a_rise_is_within_the_budget_by_its_point_and_by_its_interval(name, share, ci95, verdict):
    plan = planned(**{name: Rise(share=share, ci95=ci95, sequences=32)}).plan
    assert next(line for line in plan_lines(plan) if line.lower().startswith(name)).endswith(f", {verdict}")
    if name == "promised":
        assert plan.within_budget is (verdict in ("within the budget", "within the budget, without an interval"))


def test_a_promise_that_was_none_does_not_fail_on_the_text():
    beyond = {"measured": Rise(share=0.0104, sequences=32)}
    unsure = planned(promised=Rise(share=0.008, ci95=(0.004, 0.012), sequences=32), **beyond).plan
    assert not any("the promise fails" in line for line in plan_lines(unsure))
    assert any("the promise fails" in line for line in plan_lines(planned(**beyond).plan)), "the control"


def test_each_text_and_one_more_text_have_their_own_rise():
    more = {"by_text": {"b": 0.003, "a": 0.001}, "ci95_by_text": {"a": (-0.001, 0.0025)}, "over": "texts"}
    report = planned(promised=Rise(share=0.002, sequences=8, **more))
    assert "Text by text: +0.10 % [−0.10 % to +0.25 %] (a), +0.30 % (b)" in plan_lines(report.plan)
    assert "texts like these" in flowing(report)
    for further, verdict in ((0.0095, "within the budget"), (0.0105, "beyond the budget")):
        report = planned(promised=Rise(share=0.002, sequences=8, by_text={"a": 0.001, "b": 0.003}, further=further))
        line = f"New text of this kind: at most +{100 * further:.2f} % (95 % prediction bound), {verdict}"
        assert line in plan_lines(report.plan)
        assert "New text: upper end of the prediction interval" in flowing(report)
    assert "New text" not in flowing(planned()), "the control: one text alone"


def test_estimate_and_promise_are_explained_if_there_are_any():
    bare = flowing(planned(estimated=None, promised=None, reasons={"promised": "the ranks were given, not chosen"}))
    assert "Promised" not in bare
    assert "Estimated" not in bare
    assert "rank: one per key head" in bare
    for fact in (
        "Estimated: on the calibration text used to choose the ranks",
        "Promised: on calibration text used neither to fit nor to choose",
        "all windows of these texts",
        "A rise is a ratio of two losses, Δ their difference in nats",
    ):
        assert fact in flowing(planned())  # the control
    assert "their difference" not in flowing(planned(measured=None))


def test_a_healing_is_told_in_the_unit_that_was_requested():
    """5,120 tokens of 5,000 in 40 steps; ended by the user; a rate that was lowered is none of those tried."""
    tried = [HealingRate(rate=rate, validation=1.0) for rate in (1e-4, 3e-4)]
    one = {"tokens": 5120, "seconds": 2.4, "learning_rate": 1e-5, "rates": tried}
    stages = [
        HealingTraining(stage="transfer", steps=39, lowered_from=1e-4, **one),
        HealingTraining(stage="whole", steps=1, **one | {"tokens": 1, "learning_rate": 1e-4}),
    ]
    update = {"curve": healing().curve[:1], "stages": stages, "best": 0, "tokens": 5120, "seconds": 2.4, "batch": 1}
    for more, parts in (
        ({"amount": "5,000 tokens"}, ["Healing: 5,000 tokens requested, 5,120 done in 40 steps, best step 0"]),
        ({"amount": str(Amount.of("1s"))}, ["Healing: 1 second requested, 2 done in 40 steps"]),
        ({"amount": "40 steps"}, ["Healing: 40 steps requested, 40 done, best step 0"]),
        ({"amount": str(Amount.of(1))}, ["Healing: 1 step requested"]),
        ({"amount": "400 steps", "interrupted": True}, ["400 steps requested, 40 done, interrupted, best step 0"]),
        ({}, [
            "5,120 tokens, 1 sequence per step, 2 s",
            "39 steps, 5,120 tokens, learning rate 1e-5, lowered from 1e-4 (of 1e-4, 3e-4)",
            "Whole model: 1 step, 1 token, learning rate 1e-4 (of 1e-4, 3e-4)",
        ]),
    ):  # fmt: skip
        shown = " ".join(healing_lines(healing().model_copy(update=update | more), "nats"))
        assert [part for part in parts if part not in shown] == []


# Pictures


@pytest.mark.parametrize(
    ("size", "kind"), [*((SHAPES[0], kind) for kind in ("heads", "layers", "several", "controls", "plan", "healed"))]
    + [pytest.param(size, kind, marks=pytest.mark.full) for size in SHAPES[1:] for kind in
       ("heads", "layers", "several", "controls", "plan", "healed")],
)  # fmt: skip
def test_no_two_texts_of_a_page_overlap(size: tuple[int, int], kind: str):
    if kind in ("plan", "healed"):
        rise, done = (Rise(share=0.0042, sequences=32), healing()) if kind == "healed" else (None, None)
        report = planned(*size, healed=rise)
        report = with_swaps(report, report.swaps[0].model_copy(update={"healing": done}))
    elif kind == "several":
        report = several(*size, sweep="layers")
    else:
        more = {"controls": controls()} if kind == "controls" else {"sweep": kind}
        report = swap_report(swapped(*size, deltas=(3.28, 1.12, 0.09), healed=True, **more))
    with house_style():
        for figure in (swap_overview(report), *(panel_figure(report, panel) for panel in swap_panels(report)[:3])):
            check_layout(figure)
            if kind in ("plan", "healed"):
                texts = [text for axes in figure.axes for text in axes.texts]
                assert all(text.get_window_extent().x1 <= figure.bbox.x1 for text in texts)


@pytest.mark.parametrize("parts", [None, MIXED])
def test_pages_of_any_kind_can_be_drawn(parts):
    for swap in (swapped(6, deltas=(None,), parts=parts), swapped(6, headless=True, parts=parts, sweep="layers")):
        with house_style():
            swap_overview(swap_report(swap)).draw_without_rendering()


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({}, ": promised +0.21 %, measured +0.87 %"),
        ({"promised": None}, ": measured +0.87 %"),
        ({"measured": None}, ": promised +0.21 %"),
        ({"promised": None, "measured": None}, ""),
        ({"promised": None, "healed": Rise(share=-0.004, sequences=2)}, ": measured +0.87 %, healed −0.40 %"),
    ],
)
def test_the_map_of_ranks_explains_its_colours_and_costs(changes: dict[str, object], note: str):
    panel = next(panel for panel in swap_panels(planned(**changes)) if panel.stem == "ranks")
    assert (panel.title, panel.note) == ("rank by head, mean 28.0 of 64", f"loss ≤ +1 %{note}")
    assert draw(panel.draw).axes[0].child_axes[0].get_ylabel() == "rank r of head_dim"


@pytest.mark.parametrize("kernel", ["rank", "polynomial:degree=2,offset=0.125+symmetric+sink-window:sink=4,window=128"])
@pytest.mark.parametrize("reached", [270, 200])
def test_the_head_of_a_page_leaves_a_long_formula_to_the_caption(kernel: str, reached: int):
    formula = "s⟨qA, kB⟩, A and B of r columns, from UΣVᵀ = C_q^½ C_k^½, " + "long " * 20
    report = swap_report(swapped(kernel=kernel, formula=formula, fitted=["key_map"]))
    report = report.model_copy(update={"coverage": Coverage(sites=30, heads=270, analysed=reached)})
    with house_style():
        figure = swap_overview(report)
        figure.draw_without_rendering()
    head = figure.texts[1]
    facts = head.get_text().split(" · ")
    assert (facts[0], facts[2]) == ("LlamaForCausalLM", kernel)
    assert facts[3].startswith(f"{'COMPLETE' if reached == 270 else 'PARTIAL'}: {reached} of 270 heads")
    assert "⟨qA, kB⟩" not in head.get_text()
    assert "⟨qA, kB⟩" in figure.get_label(), "the control"
    assert head.get_window_extent().x1 <= figure.bbox.x1


def test_controls_are_drawn_in_grey_at_their_losses(controlled: Report):
    axes = draw(pictures.draw_kernels, [controlled.swap]).axes[0]
    grey = sorted(line.get_xdata()[0] for line in axes.lines if line.get_color() == pictures.GREY)
    assert grey == pytest.approx([0.05, 3.9, 5.5])
    labels = [label.get_text() for label in draw(pictures.draw_stages, controlled.swap).axes[0].get_yticklabels()]
    names = [label.split("\n")[0] for label in labels]
    assert names == ["original", "swapped", "sink-window:4,64", "hard", "uniform"]
    assert "+49.2 % (43.3 to 55.3 %)" in labels[1]


def test_both_curves_of_a_healing_fill_their_axes_over_one_named_scale_of_steps():
    swap = swapped(deltas=(1.12, 0.09), healed=True)
    above, below = draw(pictures.draw_healing, swap, swap.healing).axes
    assert (above.get_ylabel(), below.get_ylabel()) == ("perplexity", "KL, nats")
    assert below.get_xlabel() == "optimiser step, √ scale"
    assert list(below.get_xticks()) == list(above.get_xticks()) == [0, 50, 200, 500, 1000]
    for axes in (above, below):
        assert np.ptp(axes.lines[0].get_ydata()) > 0.7 * np.ptp(axes.get_ylim())
    assert above.lines[1].get_ydata()[0] == np.exp(swap.loss.before)
    headless = swapped(headless=True, healed=True)
    curve = [step.model_copy(update={"loss": None}) for step in healing().curve]
    (axes,) = draw(pictures.draw_healing, headless, healing().model_copy(update={"curve": curve})).axes
    assert axes.get_ylabel() == "1 − cosine"


def test_a_healing_that_counts_tokens_is_drawn_and_described_by_them():
    """The control: a report of before they were counted has steps (above)."""
    curve = [
        step.model_copy(update={"tokens": 1024 * step.step, "stage": "transfer" if step.step < 500 else "whole"})
        for step in healing().curve
    ]
    numbers = {"steps": 900, "tokens": 921_600, "seconds": 90.0, "tokens_per_second": 10240.0, "learning_rate": 0.01}
    stages = [HealingTraining(stage="transfer", **numbers)]
    update = {"tokens": 1024 * 1000, "seconds": 100.0, "batch": 8, "amount": "1,024,000 tokens", "stages": stages}
    counted = healing().model_copy(update=update | {"curve": curve})
    swap = swapped(deltas=(1.12, 0.09), healed=True).model_copy(update={"healing": counted})
    _above, below = draw(pictures.draw_healing, swap, counted).axes
    assert below.get_xlabel() == "tokens trained on, √ scale"
    assert below.get_xlim()[1] == pytest.approx(1.03 * 1024 * 1000)
    assert below.xaxis.get_major_formatter()(1024 * 1000) == "1.02 M"
    hollow = [list(line.get_xdata()) for line in below.lines if line.get_markerfacecolor() == "white"]
    assert hollow == [[1024 * step for step in (0, 50, 100, 200, 300, 400)]]
    shown = flowing(swap_report(swap))
    assert "1,024,000 tokens requested" in shown
    assert "Attention transfer: 900 steps, 921,600 tokens, 10,240 tokens per second, learning rate 1e-2" in shown
    assert f"{np.exp(3.55):.1f} at 0" in shown


@pytest.mark.parametrize("last", [1, 2, 3, 40, 140, 200, 5000, 12345])
def test_named_steps_are_few_and_stand_apart(last: int):
    curve = [step.model_copy(update={"step": min(step.step, last)}) for step in healing().curve]
    axes = draw(pictures.draw_healing, swapped(healed=True), healing(last).model_copy(update={"curve": curve})).axes[0]
    steps = axes.get_xticks()
    assert (steps[0], steps[-1]) == (0, min(last, 1000))
    assert np.diff(np.sqrt(steps)).min() >= 0.17 * np.sqrt(steps[-1])
    assert len(steps) >= min(4, last + 1)


def test_stages_stand_at_their_losses():
    for lossless in (swapped(headless=True), swapped(noise=True)):
        whiskers = [line for line in draw(pictures.draw_stages, lossless).axes[0].lines if len(line.get_xdata()) == 2]
        low, high = sorted(whiskers[-1].get_xdata())
        assert low < (effect(lossless, lossless)[0] or 0.0) < high
        (bar,) = [line for line in draw(pictures.draw_kernels, [lossless]).axes[0].lines if line.get_linewidth() == 1.4]
        assert sorted(bar.get_xdata()) == pytest.approx([low, high])
    axes = draw(pictures.draw_stages, swapped(deltas=(3.28, 1.12))).axes[0]
    dots = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if line.get_marker() == "o"]
    assert dots == [(2.43, 0), (pytest.approx(5.71), 1), (pytest.approx(3.55), 2)]
    texts = [text.get_text() for text in draw(pictures.draw_stages, swapped(deltas=(3.28, None))).axes[0].texts]
    assert "diverged" in texts


def test_the_map_of_heads_is_centred_and_marks_what_is_not_significant():
    swap = swapped(3, 4, sweep="heads")
    lost = Effect(layer=2, head=3, part="decoder", delta=None)
    sweep = [lost, *(e for e in swap.sweep if (e.layer, e.head) != (2, 3))]
    axes = draw(pictures.draw_sweep, swap.model_copy(update={"sweep": sweep})).axes[0]
    image = axes.images[0]
    assert image.norm.vmin == -image.norm.vmax
    assert np.ma.getdata(image.get_array())[sweep[1].layer, sweep[1].head] == sweep[1].delta
    assert np.ma.getmaskarray(image.get_array())[2, 3]
    dots = {(int(y), int(x)) for x, y in axes.collections[0].get_offsets()}
    assert dots == {(e.layer, e.head) for e in sweep if e.delta is not None and not e.significant}


def test_one_giant_head_does_not_bleach_the_others_and_has_its_number():
    values = np.full((4, 8), 0.1)
    assert pictures.limit(values) == (0.1, "neither")
    values[1, 1] = 50.0
    assert pictures.limit(values) == (0.1, "max")
    sweep = [
        Effect(layer=n // 40, head=n % 40, part="decoder", delta=0.041 if n else 0.143, p_value=0.5) for n in range(80)
    ]
    swap = swapped(2, 40, sweep="heads").model_copy(update={"sweep": sweep})
    assert [text.get_text() for text in draw(pictures.draw_sweep, swap).axes[0].texts] == ["0.14"]
    (panel,) = [panel for panel in swap_panels(swap_report(swap)) if panel.stem == "sweep"]
    assert "Numbers: effects beyond the colour scale." in panel.caption
    level = swap.model_copy(update={"sweep": sweep[1:]})
    assert not list(draw(pictures.draw_sweep, level).axes[0].texts)


def test_effects_of_different_size_are_drawn_on_a_logarithmic_axis():
    for deltas, scale in (((2.0, 3.0), "linear"), ((0.01, 30.0), "symlog")):
        swaps = [swapped(kernel=name, deltas=(delta,)) for name, delta in zip(("rbf", "cosine"), deltas, strict=True)]
        assert draw(pictures.draw_kernels, swaps).axes[0].get_xscale() == scale


def test_a_folder_gets_the_pictures_of_its_report(whole: Report, tmp_path):
    assert [path.name for path in views.save_pictures(swap_report(), tmp_path / "a")] == ["overview.png", "sites.png"]
    names = [path.name for path in export.drawings(whole, tmp_path)]
    assert names == ["overview.png", "sites.png", "healing.png", "sweep.png"]
    names = [path.name for path in export.drawings(several(2, 2, sweep="heads"), tmp_path)]
    assert {"kernels.png", "sweep-linear_symmetric.png", "sweep-rbf_gamma_0.5.png"} <= set(names)
    assert len(names) == 3 + 8
    first, second = (views.save_pictures(whole, tmp_path / name)[0].read_bytes() for name in ("x.svg", "y.svg"))
    assert first == second
