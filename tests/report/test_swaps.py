"""Tests that what a swap did is told truly in tables, pictures, pages and rows, and what is refused."""

from __future__ import annotations

import csv as standard
import io
import math
import re

import numpy as np
import pytest
import views
from matplotlib.figure import Figure
from program import DEMO, attnlens, refused, without_torch
from swap_reports import (
    DIVERGED,
    HEADLESS,
    NOISE,
    agreed,
    controls,
    healing,
    outcome,
    planned,
    several,
    swap_report,
    swapped,
    with_swaps,
)
from views import overlapping, settle

from attnlens.choices import Part
from attnlens.kernels import TIES
from attnlens.records import Coverage, Effect, HealingRate, HealingTraining, Pair, Plan, Rise, Text, TextCosine
from attnlens.report.pictures.charts import panel_figure
from attnlens.report.pictures.style import house_style, new_figure
from attnlens.report.pictures.swaps import (
    GREY,
    draw_healing,
    draw_kernels,
    draw_stages,
    draw_sweep,
    limit,
    swap_overview,
    swap_panels,
)
from attnlens.report.report import Report
from attnlens.report.sections import swaps as effects
from attnlens.report.sections.plans import healing_lines as sentences
from attnlens.report.sections.plans import plan_lines
from attnlens.report.sections.swaps import effect
from attnlens.requests.swap import Amount

HOSTILE = "=x\x1b[2J <script>alert(1)</script> \u202egnp [red]b[/red] | `c`"
STEERING = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]")
SHAPES = [(4, 8), (30, 9), (12, 12)]


def flowing(report: Report) -> str:
    """The summary without line breaks, as one sentence may take two lines."""
    return " ".join(views.summary(report, 110).split())


def row(text: str, first: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [first])


def whole() -> Report:
    return swap_report(swapped(deltas=(3.28, 1.12, 0.09), healed=True, sweep="heads"))


def beside(**changes: object) -> Report:
    """A kernel that costs 0.4 nats beside its controls, of which the sink-window costs less."""
    return swap_report(swapped(deltas=(0.4,), controls=controls(), agreement=agreed([1, 2, 3, 64]), **changes))


def hostile() -> Report:
    """Strangers' strings wherever a swap has strings."""
    names = {"kernel": HOSTILE, "formula": HOSTILE, "fitted": [HOSTILE], "notes": [HOSTILE]}
    swap = swapped(sweep="layers", **names)
    sites = [site.model_copy(update={"site": HOSTILE, "path": HOSTILE}) for site in swap.sites]
    stages = [stage.model_copy(update={"reasons": {HOSTILE: HOSTILE}}) for stage in swap.stages]
    return swap_report(swap.model_copy(update={"sites": sites, "stages": stages, "reasons": {HOSTILE: HOSTILE}}))


def test_one_kernel_is_told_with_its_numbers_stage_by_stage() -> None:
    text = views.summary(whole(), 110)
    assert row(text, "original")[1:] == ["2.430", "11.4"]
    assert row(text, "swapped")[1:6] == ["5.710", "3.280", "3.096", "to", "3.464"]
    assert row(text, "healed")[1:3] == ["2.520", "0.090"]
    said = flowing(whole())
    assert "The loss rises from 2.430 to 2.520 nats per token (Δ 0.090, 95 % interval 0.065 to 0.115)." in said
    assert f"Once healed, {1 - 0.09 / 3.28:.0%}".replace("%", " %") in said
    assert "4 of 4 sites, 32 of 32 heads · path: sdpa" in said
    assert "identity error 3.2e-07, causality error 0, mask error –" in said
    assert "mask error: the sequences have no padding" in said
    assert "15,134 → 12,043 tokens per second (× 0.80); 440 → 457 MiB peak (× 1.04)" in said


def test_perplexity_is_told_with_the_interval_of_its_rise() -> None:
    """Its ends are e^Δ − 1 at those of Δ."""
    said = flowing(beside())
    rise, ends = math.expm1(0.4), [math.expm1(0.4 + sign * (0.0202 + 0.02)) for sign in (-1, 1)]
    interval = f"{100 * ends[0]:.1f} to {100 * ends[1]:.1f} %"
    assert f"Perplexity +{100 * rise:.1f} %, 95 % interval {interval}." in said
    assert row(views.summary(beside(), 120), "swapped")[6:13] == ["16.9", f"+{100 * rise:.1f}", "%", *interval.split()]
    assert "+9.4 %" in effects.verdict(swapped(deltas=(0.09,)))


def test_controls_are_rows_apart_and_named_where_they_cost_less() -> None:
    text = views.summary(beside(), 120)
    rows = [line.split()[:3] for line in text.splitlines() if line.startswith("vs ")]
    assert rows[:3] == [["vs", "sink-window:4,64", "2.480"], ["vs", "hard", "7.930"], ["vs", "uniform", "6.330"]]
    assert "Lower loss than rbf:gamma=0.5, with disjoint intervals: sink-window:4,64." in flowing(beside())
    assert "vs" not in views.summary(swap_report(swapped()), 120).split(), "the control"
    dear = swap_report(swapped(deltas=(0.04,), controls=controls()))
    assert "Lower loss than" not in flowing(dear), "their intervals meet"


def test_several_kernels_have_their_own_controls_below_and_the_common_ones_last() -> None:
    swaps = [swapped(kernel=name, deltas=(delta,), controls=controls()) for name, delta in (("elu", 1.0), ("l2", 2.0))]
    text = views.summary(swap_report(*swaps), 140)
    lines = text[text.index("original") :].splitlines()[1:7]
    assert [line.split()[:2][-1] for line in lines] == [
        "3.430", "sink-window:4,64", "4.430", "sink-window:4,64", "hard", "uniform"
    ]  # fmt: skip


def test_agreement_is_censored_where_half_never_differs() -> None:
    assert "match the original for 2 of 64 tokens (median; quartiles 1 to 3); 1 of 4 never differ." in flowing(beside())
    report = swap_report(swapped(agreement=agreed([64, 64, 64, 3])))
    assert "match the original for ≥ 64 of 64 tokens" in flowing(report)


def test_a_control_has_a_row_of_its_own_in_the_csv() -> None:
    rows = list(standard.DictReader(io.StringIO(views.csv(beside()))))
    assert [(found["stage"], found["control"]) for found in rows] == [
        ("swapped", ""), ("", "sink-window:4,64"), ("", "hard"), ("", "uniform")
    ]  # fmt: skip
    assert [found["state"] for found in rows[1:]] == ["8704", "16384", "65"]
    assert {found["tokens_per_second.after"] for found in rows[1:]} == {""}
    assert {"perplexity.delta.low", "perplexity.delta.high", "greedy.median"} <= set(rows[0])


def test_controls_are_drawn_in_grey_at_their_losses() -> None:
    swap = beside().swap
    assert swap is not None
    axes = drawn(draw_kernels, [swap]).axes[0]
    grey = sorted(line.get_xdata()[0] for line in axes.lines if line.get_color() == GREY)
    assert grey == [pytest.approx(0.05), pytest.approx(3.9), pytest.approx(5.5)]
    stages = drawn(draw_stages, swap).axes[0]
    assert [label.get_text().split("\n")[0] for label in stages.get_yticklabels()] == [
        "original", "swapped", "sink-window:4,64", "hard", "uniform"
    ]  # fmt: skip
    assert "+49.2 % (43.3 to 55.3 %)" in stages.get_yticklabels()[1].get_text()


@pytest.mark.parametrize(
    ("delta", "words"),
    [
        (3.28, "The loss rises from 2.43 to 5.71"),
        (-1.0, "The loss falls from 2.430 to 1.430"),
        (0.0, "does not change"),
    ],
)
def test_the_verdict_says_in_which_direction_the_loss_goes(delta: float, words: str) -> None:
    assert words in effects.verdict(swapped(deltas=(delta,)))


def test_an_interval_around_0_is_no_change() -> None:
    assert "does not change measurably" in effects.verdict(swapped(deltas=(0.01,)))
    assert "rises" in effects.verdict(swapped(deltas=(0.03,)))  # the control: its interval begins above 0


def test_diverged_is_a_finding_and_no_number() -> None:
    said = flowing(swap_report(swapped(deltas=(None,))))
    assert "The model diverges" in said
    assert "swapped diverged" in said
    assert f"loss, perplexity, KL, top-1, hidden cosine, CKA: {DIVERGED}" in said
    assert "nan" not in said.lower().replace("finance", "")
    assert "diverge" not in flowing(swap_report())  # the control
    said = flowing(swap_report(swapped().model_copy(update={"reasons": {"mask_error": "the lines diverged"}})))
    assert "The model diverges" not in said, "a word in a reason is no finding"


def test_a_model_without_a_head_is_told_by_its_hidden_states() -> None:
    said = flowing(swap_report(swapped(headless=True)))
    assert f"the original's: {1 / 4.28:.3f}." in said
    assert row(views.summary(swap_report(swapped(headless=True))), "swapped")[1:5] == [
        "0.234", "0.192", "to", "0.275"
    ]  # fmt: skip
    assert f"loss, perplexity, KL, top-1: {HEADLESS}" in said
    assert "perplexity KL" not in said.split("No value")[0]


def test_hidden_cosines_are_told_text_by_text_where_there_is_no_loss() -> None:
    texts = [
        TextCosine(name=f"{n}.txt", sequences=n, cosine=0.8 + n / 10, ci95=(0.7, 0.95) if n else None) for n in (0, 1)
    ]
    for swap in (swapped(headless=True, hidden_cosine_by_text=texts), swapped(hidden_cosine_by_text=texts)):
        said = flowing(swap_report(swap))
        assert ("1.txt 1 0.900 0.700 to 0.950" in said) == (swap.task == "hidden")
        assert ("A single window has no interval." in said) == (swap.task == "hidden")


def test_one_window_promises_no_interval() -> None:
    settings = swap_report().settings
    lone = settings.model_copy(update={"windows": 1, "texts": [Text(name="a", sha256="b", windows=[3], available=9)]})
    for swap in (swapped(), swapped(headless=True)):
        assert "no errors: only one window was read" in flowing(swap_report(swap, **dict(lone)))
        assert "paired bootstrap" not in flowing(swap_report(swap, **dict(lone))).replace("no errors", "")
        assert "paired bootstrap" in flowing(swap_report(swap))


def test_off_simplex_mass_is_told_where_there_is_some() -> None:
    assert "21.0 % of the attention weight is negative" in flowing(swap_report(swapped(off_simplex=0.21)))
    assert "negative" not in flowing(swap_report())


def test_a_model_fed_with_noise_is_told_without_a_loss() -> None:
    swap = swapped(noise=True, sweep="heads")
    said = flowing(swap_report(swap))
    assert "KL divergence of the predictions from the original's: 3.61 nats per token." in said
    assert f"loss, perplexity: {NOISE}" in said
    assert "Δ of the KL to the original in nats per token, a distance: never negative, and not tested" in said
    assert "FDR" not in said
    assert row(views.summary(swap_report(swap), 110), "swapped")[1:] == [
        "3.61",
        "3.25",
        "to",
        "4.04",
        "27.6",
        "%",
        "0.234",
        "0.303",
    ]
    assert "loss, perplexity" not in flowing(swap_report()), "the control"


def test_kernels_on_noise_are_compared_by_their_predictions() -> None:
    deltas = {"rbf": 1.0, "l2": None, "cosine": 2.0}
    report = swap_report(*(swapped(noise=True, kernel=name, deltas=(delta,)) for name, delta in deltas.items()))
    text = views.summary(report, 110)
    assert row(text, "kernel") == ["kernel", "KL", "interval", "top-1", "cosine", "CKA", "speed"]
    assert row(text, "rbf")[1:9] == ["1.10", "0.99", "to", "1.23", "55.6", "%", "0.500", "0.588"]
    assert row(text, "l2")[1:] == ["diverged", "–", "–", "–", "–", "×", "0.80"]
    assert row(text, "cosine")[1] == "2.20"


def test_several_kernels_are_rows_whatever_their_ties() -> None:
    text = views.summary(several(), 110)
    assert "Effects\n" in text
    assert row(text, "rbf:gamma=0.5")[1:6] == ["5.71", "3.28", "3.10", "to", "3.46"]
    assert row(text, "rbf:gamma=0.5+symmetric")[1:3] == ["5.33", "2.90"]
    assert row(text, "symmetric")[1:3] == ["4.33", "1.90"]
    assert row(text, "linear+symmetric")[1:3] == ["diverged", "–"]
    assert row(text, "linear")[2] == "7.70"
    assert max(map(len, views.summary(several()).splitlines())) <= 100


def test_the_cost_of_a_symmetric_kernel_is_not_called_the_cost_of_asymmetry() -> None:
    """In the picture's caption; in the notes the run has put it."""
    caution = TIES["symmetric"].caution
    assert "not that of asymmetry alone" in caution
    assert caution in swap_panels(several())[0].caption
    plain = swap_report(swapped(kernel="rbf"), swapped(kernel="l2+tied-key"))
    assert caution not in swap_panels(plain)[0].caption, "the control"


def test_the_sweep_shows_ten_of_each_end_and_counts_what_matters() -> None:
    report = whole()
    swap = report.swaps[0]
    text = views.summary(report, 110)
    assert f"{sum(effect.significant for effect in swap.sweep)} of 32 heads have significant effects" in text
    table = text[text.index("layer  head") :].splitlines()[2:23]
    assert [line.split()[:2] for line in table[:10]] == [[str(e.layer), str(e.head)] for e in swap.sweep[:10]]
    assert set(table[10].split()) == {"…"}
    assert [line.split()[:2] for line in table[11:]] == [[str(e.layer), str(e.head)] for e in swap.sweep[-10:]]
    assert [line.rstrip().endswith("*") for line in table[:10]] == [e.significant for e in swap.sweep[:10]]


def test_a_unit_that_diverged_alone_is_named() -> None:
    swap = swapped(sweep="layers")
    lost = Effect(layer=9, head=None, part="decoder", delta=None)
    said = flowing(swap_report(swap.model_copy(update={"sweep": [lost, *swap.sweep]})))
    assert "Diverged: layer 9." in said
    assert "9 diverged –" in said


def test_healing_is_told_from_first_to_best() -> None:
    said = flowing(whole())
    curve = healing().curve
    assert "1000 steps requested, 1000 done, best step 700; 7,077,888 parameters trained, learning rate 1e-3" in said
    best = next(step.validation for step in curve if step.step == 700)
    assert f"{curve[0].validation:.2f} at first, {best:.3f} at the best step" in said
    assert "3.550 at step 0, 3.174 at step 50" in said


def test_details_list_every_site() -> None:
    text = views.details(swap_report(swapped(layers=5)), 110)
    assert all(f"model.layers.{layer}.attn" in text for layer in range(5))


@pytest.mark.parametrize("report", [swap_report(), several(), several(sweep="heads"), whole(), hostile()])
def test_reports_survive_json_and_look_the_same_after(report: Report) -> None:
    again = Report.model_validate_json(report.to_json())
    assert again.to_json() == report.to_json()
    assert views.summary(again) == views.summary(report)


def test_csv_has_a_row_a_stage_or_a_row_a_unit() -> None:
    rows = list(standard.DictReader(io.StringIO(views.csv(swap_report(swapped(deltas=(3.28, None)))))))
    assert [(found["stage"], found["loss.delta"]) for found in rows] == [("swapped", "3.28"), ("fitted", "")]
    units = list(standard.DictReader(io.StringIO(views.csv(whole()))))
    assert len(units) == 32
    assert {found["significant"] for found in units} == {"true", "false"}


def test_missing_costs_are_dashes() -> None:
    swap = swapped(peak_memory_bytes=Pair(before=None, after=None))
    assert "– → – MiB" in effects.format_cost(swap)


def plan_of(**changes: object) -> Plan:
    plan = planned(**changes).plan
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    ("after", "line"),
    [
        (13_698_304.0, "Added: 13,271,040 → 13,698,304 parameters for queries and keys (+3 %)"),
        (13_271_040.0, "Unchanged: 13,271,040 → 13,271,040 parameters for queries and keys (+0 %)"),
        (6_635_520.0, "Saving: 13,271,040 → 6,635,520 parameters for queries and keys (−50 %)"),
    ],
)
def test_only_what_falls_is_a_saving(after: float, line: str) -> None:
    assert line in plan_lines(plan_of(parameters=Pair(before=13_271_040.0, after=after)))


@pytest.mark.parametrize(
    ("share", "ci95", "verdict"),
    [
        (0.0087, (0.0058, 0.0096), "within the budget"),
        (0.0087, (0.0058, 0.0118), "within the budget, though its interval is not"),
        (0.0087, None, "within the budget, without an interval"),
        (0.0104, (0.0058, 0.0150), "beyond the budget: the promise fails on this text"),
        (0.0104, None, "beyond the budget: the promise fails on this text"),
    ],
)
def test_a_plan_is_within_its_budget_by_its_point_and_by_its_interval(
    share: float, ci95: tuple[float, float] | None, verdict: str
) -> None:
    lines = plan_lines(plan_of(measured=Rise(share=share, ci95=ci95, sequences=32)))
    assert next(line for line in lines if line.startswith("Measured")).endswith(f", {verdict}")


@pytest.mark.parametrize(
    ("share", "ci95", "verdict", "kept"),
    [
        (0.0021, (0.0002, 0.0041), "within the budget", True),
        (
            0.0080,
            (0.0050, 0.0110),
            "within the budget, though its interval is not: the budget is not guaranteed",
            False,
        ),
        (0.0120, (0.0090, 0.0150), "beyond the budget", False),
        (0.0080, None, "within the budget, without an interval", True),
    ],
)
def test_a_promise_says_whether_it_keeps_the_budget(
    share: float, ci95: tuple[float, float] | None, verdict: str, kept: bool
) -> None:
    plan = plan_of(promised=Rise(share=share, ci95=ci95, sequences=32))
    assert next(line for line in plan_lines(plan) if line.startswith("Promised")).endswith(f", {verdict}")
    assert plan.within_budget is kept


def test_a_promise_that_was_none_does_not_fail_on_the_text() -> None:
    """What is beyond the budget was promised to be within it, or was not."""
    beyond = {"measured": Rise(share=0.0104, sequences=32)}
    unsure = plan_of(promised=Rise(share=0.008, ci95=(0.004, 0.012), sequences=32), **beyond)
    assert not any("the promise fails" in line for line in plan_lines(unsure))
    assert any("the promise fails" in line for line in plan_lines(plan_of(**beyond))), "the control"


def test_each_text_has_its_own_rise_with_its_interval() -> None:
    promised = Rise(
        share=0.002, sequences=8, by_text={"b": 0.003, "a": 0.001}, ci95_by_text={"a": (-0.001, 0.0025)}, over="texts"
    )
    lines = plan_lines(plan_of(promised=promised))
    assert "Text by text: +0.10 % [−0.10 % to +0.25 %] (a), +0.30 % (b)" in lines
    assert "texts like these" in flowing(planned(promised=promised))


@pytest.mark.parametrize(("further", "kept"), [(0.0095, "within the budget"), (0.0105, "beyond the budget")])
def test_what_is_promised_of_one_more_text_is_told_apart_from_the_interval_of_the_mean(
    further: float, kept: str
) -> None:
    promised = Rise(share=0.002, sequences=8, by_text={"a": 0.001, "b": 0.003}, further=further)
    lines = plan_lines(plan_of(promised=promised))
    assert f"New text of this kind: at most +{100 * further:.2f} % (95 % prediction bound), {kept}" in lines
    assert "New text: upper end of the prediction interval" in flowing(planned(promised=promised))
    assert "New text" not in flowing(planned()), "the control: one text alone"


def test_estimate_and_promise_are_explained_where_there_are_any() -> None:
    given = planned(estimated=None, promised=None, reasons={"promised": "the ranks were given, not chosen"})
    for word in ("Promised", "Estimated"):
        assert word not in flowing(given)
    assert "rank: one per key head" in flowing(given)
    assert "Estimated: on the calibration text used to choose the ranks" in flowing(planned())  # the control
    assert "Promised: on calibration text used neither to fit nor to choose" in flowing(planned())
    assert "all windows of these texts" in flowing(planned())
    assert "A rise is a ratio of two losses, Δ their difference in nats" in flowing(planned())
    assert "their difference" not in flowing(planned(measured=None))


def test_strangers_strings_are_nothing_but_text() -> None:
    report = hostile()
    page, text, marks = views.page(report), views.summary(report, 200), views.markdown(report)
    for written in (page, text, marks, views.csv(report)):
        assert STEERING.search(written.replace("&#8203;", "")) is None
    assert views.runs_its_own_script_alone(page)
    assert "<" not in marks.replace("<0.0001", "")
    assert "[red]b[/red]" in text
    assert "'=x" in views.csv(report)


def test_the_page_and_markdown_hold_the_table() -> None:
    page, marks = views.page(whole()), views.markdown(several())
    assert "<td>5.710</td>" in page
    assert "Every head" not in page
    assert "| linear | 10.13 | 7.70 |" in marks


@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("kind", ["heads", "layers", "several", "controls"])
def test_no_two_texts_of_a_page_overlap(size: tuple[int, int], kind: str) -> None:
    if kind == "controls":
        report = swap_report(swapped(*size, deltas=(3.28, 1.12, 0.09), healed=True, controls=controls()))
    elif kind == "several":
        report = several(*size, sweep="layers")
    else:
        report = swap_report(swapped(*size, deltas=(3.28, 1.12, 0.09), healed=True, sweep=kind))  # type: ignore[arg-type]
    with house_style():
        figures = [swap_overview(report), *(panel_figure(report, panel) for panel in swap_panels(report)[:3])]
        for figure in figures:
            settle(figure)
            assert overlapping(figure) == []


@pytest.mark.parametrize("parts", [None, ["encoder", "encoder", "decoder", "cross", "decoder", "cross"]])
def test_pages_of_any_kind_can_be_drawn(parts: list[Part] | None) -> None:
    for found in (swapped(6, deltas=(None,), parts=parts), swapped(6, headless=True, parts=parts, sweep="layers")):
        with house_style():
            swap_overview(swap_report(found)).draw_without_rendering()


@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("healed", [False, True])
def test_no_two_texts_of_a_plans_page_overlap_or_leave_it(size: tuple[int, int], healed: bool) -> None:
    report = planned(*size, healed=Rise(share=0.0042, ci95=None, sequences=32) if healed else None)
    swap = report.swaps[0].model_copy(update={"healing": healing() if healed else None})
    with house_style():
        for draw in (swap_overview, lambda report: panel_figure(report, swap_panels(report)[1])):
            figure = draw(with_swaps(report, swap))
            settle(figure)
            assert overlapping(figure) == []
            for text in (text for axes in figure.axes for text in axes.texts):
                assert text.get_window_extent().x1 <= figure.bbox.x1


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({}, "loss ≤ +1 %: promised +0.21 %, measured +0.87 %"),
        ({"promised": None}, "loss ≤ +1 %: measured +0.87 %"),
        ({"measured": None}, "loss ≤ +1 %: promised +0.21 %"),
        ({"promised": None, "measured": None}, "loss ≤ +1 %"),
        (
            {"promised": None, "healed": Rise(share=-0.004, sequences=2)},
            "loss ≤ +1 %: measured +0.87 %, healed −0.40 %",
        ),
    ],
)
def test_the_map_of_ranks_says_what_its_colours_are_and_what_they_cost(changes: dict[str, object], note: str) -> None:
    report = planned(**changes)
    panel = next(panel for panel in swap_panels(report) if panel.stem == "ranks")
    assert (panel.title, panel.note) == ("rank by head, mean 28.0 of 64", note)
    bar = drawn(panel.draw).axes[0].child_axes[0]
    assert bar.get_ylabel() == "rank r of head_dim"


@pytest.mark.parametrize("kernel", ["rank", "polynomial:degree=2,offset=0.125+symmetric+sink-window:sink=4,window=128"])
@pytest.mark.parametrize("reached", [270, 200])
def test_a_page_s_head_cuts_the_formula_and_nothing_else(kernel: str, reached: int) -> None:
    found = swapped(
        kernel=kernel, formula="s⟨qA, kB⟩, A and B of r columns, from UΣVᵀ = C_q^½ C_k^½", fitted=["key_map"]
    )
    report = swap_report(found).model_copy(update={"coverage": Coverage(sites=30, heads=270, analysed=reached)})
    with house_style():
        figure = swap_overview(report)
        figure.draw_without_rendering()
    head = figure.texts[1]
    facts_told = head.get_text().split(" · ")
    assert facts_told[0] == "LlamaForCausalLM"
    assert facts_told[2] == kernel
    assert facts_told[3].startswith(f"{'COMPLETE' if reached == 270 else 'PARTIAL'}: {reached} of 270 heads")
    assert head.get_text().endswith("…"), "the control: not everything fits"
    assert head.get_window_extent().x1 <= figure.bbox.x1


def test_both_curves_of_a_healing_fill_their_axes_over_one_named_scale_of_steps() -> None:
    swap = swapped(deltas=(1.12, 0.09), healed=True)
    above, below = drawn(draw_healing, swap, swap.healing).axes
    assert (above.get_ylabel(), below.get_ylabel()) == ("perplexity", "KL, nats")
    assert below.get_xlabel() == "optimiser step, √ scale"
    assert list(below.get_xticks()) == list(above.get_xticks()) == [0, 50, 200, 500, 1000]
    for axes in (above, below):
        values, (low, high) = axes.lines[0].get_ydata(), axes.get_ylim()
        assert np.ptp(values) > 0.7 * (high - low)
    assert above.lines[1].get_ydata()[0] == np.exp(swap.loss.before)


def test_a_healing_that_counts_tokens_is_drawn_and_told_by_them() -> None:
    """The control: a report of before they were counted has steps (above)."""
    found = healing()
    curve = [
        step.model_copy(update={"tokens": 1024 * step.step, "stage": "transfer" if step.step < 500 else "whole"})
        for step in found.curve
    ]
    stage = HealingTraining(
        stage="transfer", steps=900, tokens=921_600, seconds=90.0, tokens_per_second=10240.0, learning_rate=0.01
    )
    update = {"curve": curve, "tokens": 1024 * 1000, "seconds": 100.0, "batch": 8, "amount": "1,024,000 tokens"}
    counted = found.model_copy(update=update | {"stages": [stage]})
    swap = swapped(deltas=(1.12, 0.09), healed=True).model_copy(update={"healing": counted})
    _above, below = drawn(draw_healing, swap, counted).axes
    assert below.get_xlabel() == "tokens trained on, √ scale"
    assert below.get_xlim()[1] == pytest.approx(1.03 * 1024 * 1000)
    assert below.xaxis.get_major_formatter()(1024 * 1000) == "1.02 M"
    hollow = [line for line in below.lines if line.get_markerfacecolor() == "white"]
    assert [list(line.get_xdata()) for line in hollow] == [[1024 * step for step in (0, 50, 100, 200, 300, 400)]]
    said = flowing(swap_report(swap))
    assert "1,024,000 tokens requested" in said
    assert "Attention transfer: 900 steps, 921,600 tokens, 10,240 tokens per second, learning rate 1e-2" in said
    assert f"{np.exp(3.55):.1f} at 0" in said


def test_a_healing_is_told_in_the_unit_that_was_asked_for() -> None:
    """5,120 tokens of 5,000 in 40 steps; ended by the user; a rate that was lowered is none of those tried."""
    tried = [HealingRate(rate=rate, validation=1.0) for rate in (1e-4, 3e-4)]
    one = {"tokens": 5120, "seconds": 2.4, "learning_rate": 1e-5, "rates": tried}
    stages = [
        HealingTraining(stage="transfer", steps=39, lowered_from=1e-4, **one),
        HealingTraining(stage="whole", steps=1, **one | {"tokens": 1, "learning_rate": 1e-4}),
    ]
    curve = healing().curve[:1]
    found = healing().model_copy(update={"curve": curve, "stages": stages, "best": 0, "tokens": 5120, "seconds": 2.4})

    def said(**more: object) -> str:
        return " ".join(sentences(found.model_copy(update={"batch": 1, **more}), "nats"))

    assert "Healing: 5,000 tokens requested, 5,120 done in 40 steps, best step 0" in said(amount="5,000 tokens")
    assert "Healing: 1 second requested, 2 done in 40 steps" in said(amount=str(Amount.of("1s")))
    assert "Healing: 40 steps requested, 40 done, best step 0" in said(amount="40 steps")
    assert "Healing: 1 step requested" in said(amount=str(Amount.of(1)))
    assert "400 steps requested, 40 done, interrupted, best step 0" in said(amount="400 steps", interrupted=True)
    assert "5,120 tokens, 1 sequence per step, 2 s" in said()
    assert "39 steps, 5,120 tokens, learning rate 1e-5, lowered from 1e-4 (of 1e-4, 3e-4)" in said()
    assert "Whole model: 1 step, 1 token, learning rate 1e-4 (of 1e-4, 3e-4)" in said()


def test_a_healing_without_a_loss_has_all_the_room() -> None:
    swap = swapped(headless=True, healed=True)
    curve = [step.model_copy(update={"loss": None}) for step in healing().curve]
    (axes,) = drawn(draw_healing, swap, healing().model_copy(update={"curve": curve})).axes
    assert axes.get_ylabel() == "1 − cosine"


@pytest.mark.parametrize("last", [1, 2, 3, 40, 140, 200, 5000, 12345])
def test_named_steps_are_few_and_stand_apart(last: int) -> None:
    curve = [step.model_copy(update={"step": min(step.step, last)}) for step in healing().curve]
    axes = drawn(draw_healing, swapped(healed=True), healing(last).model_copy(update={"curve": curve})).axes[0]
    steps = axes.get_xticks()
    assert (steps[0], steps[-1]) == (0, min(last, 1000))
    assert np.diff(np.sqrt(steps)).min() >= 0.17 * np.sqrt(steps[-1])
    assert len(steps) >= min(4, last + 1)


def drawn(draw: object, *words: object) -> Figure:
    with house_style():
        figure = new_figure(5, 4)
        draw(figure.add_subplot(), *words)  # type: ignore[operator]
        figure.draw_without_rendering()
    return figure


def test_stages_stand_at_their_losses() -> None:
    for lossless in (swapped(headless=True), swapped(noise=True)):
        whiskers = [line for line in drawn(draw_stages, lossless).axes[0].lines if len(line.get_xdata()) == 2]
        low, high = sorted(whiskers[-1].get_xdata())
        assert low < (effect(lossless, lossless)[0] or 0.0) < high
        (bar,) = [line for line in drawn(draw_kernels, [lossless]).axes[0].lines if line.get_linewidth() == 1.4]
        assert sorted(bar.get_xdata()) == pytest.approx([low, high])
    axes = drawn(draw_stages, swapped(deltas=(3.28, 1.12))).axes[0]
    dots = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if line.get_marker() == "o"]
    assert dots == [(2.43, 0), (pytest.approx(5.71), 1), (pytest.approx(3.55), 2)]
    texts = [text.get_text() for text in drawn(draw_stages, swapped(deltas=(3.28, None))).axes[0].texts]
    assert "diverged" in texts


def test_the_map_of_heads_is_centred_and_marks_what_is_not_significant() -> None:
    swap = swapped(3, 4, sweep="heads")
    lost = Effect(layer=2, head=3, part="decoder", delta=None)
    sweep = [lost, *(e for e in swap.sweep if (e.layer, e.head) != (2, 3))]
    axes = drawn(draw_sweep, swap.model_copy(update={"sweep": sweep})).axes[0]
    image = axes.images[0]
    assert image.norm.vmin == -image.norm.vmax
    values = np.ma.getdata(image.get_array())
    assert values[sweep[1].layer, sweep[1].head] == sweep[1].delta
    assert np.ma.getmaskarray(image.get_array())[2, 3]
    dots = {(int(y), int(x)) for x, y in axes.collections[0].get_offsets()}
    assert dots == {(e.layer, e.head) for e in sweep if e.delta is not None and not e.significant}


def test_one_giant_head_does_not_bleach_the_others() -> None:
    values = np.full((4, 8), 0.1)
    assert limit(values) == (0.1, "neither")
    values[1, 1] = 50.0
    assert limit(values) == (0.1, "max")


def test_a_cell_beyond_the_colours_has_its_number() -> None:
    effects = [
        Effect(layer=n // 40, head=n % 40, part="decoder", delta=0.041 if n else 0.143, p_value=0.5) for n in range(80)
    ]
    swap = swapped(2, 40, sweep="heads").model_copy(update={"sweep": effects})
    assert [text.get_text() for text in drawn(draw_sweep, swap).axes[0].texts] == ["0.14"]
    (panel,) = [found for found in swap_panels(swap_report(swap)) if found.stem == "sweep"]
    assert "Numbers: effects beyond the colour scale." in panel.caption
    level = swap.model_copy(update={"sweep": effects[1:]})
    assert not list(drawn(draw_sweep, level).axes[0].texts)


def test_no_head_could_be_shown_to_matter_is_not_that_none_matters() -> None:
    effects = [Effect(layer=0, head=n, part="decoder", delta=0.1, ci95=(-0.1, 0.3), p_value=0.3) for n in range(4)]
    said = flowing(swap_report(swapped(sweep="heads").model_copy(update={"sweep": effects}), windows=4))
    assert "no head has a significant effect on 4 windows (false discovery rate 5 %)" in said
    assert "0 of 4 heads" not in said


def test_effects_of_different_size_are_drawn_on_a_logarithmic_axis() -> None:
    near = [swapped(kernel=name, deltas=(delta,)) for name, delta in (("rbf", 2.0), ("cosine", 3.0))]
    far = [swapped(kernel=name, deltas=(delta,)) for name, delta in (("rbf", 0.01), ("cosine", 30.0))]
    scales = [drawn(draw_kernels, found).axes[0].get_xscale() for found in (near, far)]
    assert scales == ["linear", "symlog"]


def test_a_folder_gets_the_pictures_that_there_are_and_they_are_the_same_every_time(tmp_path) -> None:
    assert [path.name for path in views.save_pictures(swap_report(), tmp_path / "a")] == ["overview.png", "sites.png"]
    names = {path.name for path in views.save_pictures(whole(), tmp_path / "b")}
    assert names == {"overview.png", "sites.png", "sweep.png", "healing.png"}
    names = {path.name for path in views.save_pictures(several(2, 2, sweep="heads"), tmp_path / "c")}
    assert {"kernels.png", "sweep-linear_symmetric.png", "sweep-rbf_gamma_0.5.png"} <= names
    assert len(names) == 3 + 8
    first, second = (views.save_pictures(whole(), tmp_path / name)[0].read_bytes() for name in ("x.svg", "y.svg"))
    assert first == second


def test_outcomes_of_the_synthetic_reports_are_records() -> None:
    assert outcome(None)["reasons"]["loss"] == DIVERGED


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--part", "decder"), ("no part 'decder'", "Did you mean 'decoder'?")),
        (("--path", "fused"), ("keyword of the function",)),
        (("--sweep", "head"), ("no sweep 'head'", "Did you mean 'heads'?")),
        (("--save", ""), ("--save does not name a folder",)),
        (("--layers", "3-1"), ("reversed range",)),
        (("--text", "-", "--calibration", "-"), ("can read stdin",)),
        (("--kernel", "symmetric", "--fit"), ("no free parameter",)),
        (("--eta", "0.1"), ("keyword of the function",)),
        (("--heal", "200"), ("attnlens heal --train",)),
        (("--heal-on", "text"), ("attnlens heal --learn",)),
        (("--heal-rank", "4"), ("keyword of the function",)),
        (("--kernel", "rank", "--budget", "loss:1%"), ("attnlens ranks --budget",)),
        (("--kernel", "rank", "--ranks", "plan.json"), ("attnlens ranks --ranks",)),
        (("--calibration", str(DEMO / "text.txt")), ("no effect without --fit",)),
        (("--save", str(DEMO)), ("not an empty folder",)),
    ],
)
def test_words_that_make_no_sense_are_refused_before_torch_is_loaded(words, said) -> None:
    refused(without_torch("swap-kernel", "demo", *words), *said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("heal", "demo", "--kernel", "rbf", "--kernel", "linear"), ("heal accepts a single kernel, not 2",)),
        (("heal", "demo", "--train", "2m"), ("--train: cannot parse '2m'",)),
        (("ranks", "demo", "--ranks", str(DEMO)), ("Is a directory",)),
        (("ranks", "demo", "--latents", "rank=8"), ("--latents: cannot parse 'rank=8'",)),
    ],
)
def test_words_of_ranks_and_heal_that_make_no_sense_are_refused_before_torch_is_loaded(words, said) -> None:
    refused(without_torch(*words), *said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--kernel", "rfb"), ("no kernel 'rfb'", "Did you mean 'rbf'?")),
        (("--kernel", "polynomial:degree=3"), ("odd degree", "allow_signed=True")),
        (("--kernel", "rbf:gamma=x"), ("gamma must be a number",)),
    ],
)
def test_kernels_that_make_no_sense_are_refused(words, said) -> None:
    refused(attnlens("swap-kernel", "demo", *words), *said)


def test_help_and_the_list_of_kernels_load_no_torch() -> None:
    helped = without_torch("swap-kernel", "--help")
    assert helped.returncode == 0, helped.stderr
    for option in ("--kernel", "--part", "--sweep", "--fit", "--calibration", "--save"):
        assert option in helped.stdout
    listed = without_torch("list", "kernels")
    assert listed.returncode == 0, listed.stderr
    assert "rbf" in listed.stdout
    assert "sink-window" in listed.stdout
    assert "tokens.entropy" not in listed.stdout


def test_the_program_swaps_the_demo_and_writes_what_was_asked_for(tmp_path) -> None:
    small = ("--windows", "4", "--length", "32", "--no-progress")
    files = ("--json", "r.json", "--figure", "r.png", "--html", "r.html", "--markdown", "r.md", "--csv", "r.csv")
    result = attnlens("swap-kernel", "--kernel", "rbf", *small, *files, "-v", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "using demo" in result.stderr
    assert "COMPLETE: 32 of 32 heads" in result.stdout
    assert "nats per token" in result.stdout
    assert "Sites" in result.stdout
    report = Report.model_validate_json((tmp_path / "r.json").read_text())
    assert report.swap is not None
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert "rbf" in (tmp_path / "r.html").read_text()
