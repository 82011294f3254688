"""Tests the tables, pages, rows and pictures of swaps, plans and healing runs."""

import math

import numpy as np
import pytest
import swap_reports
import views
from swap_reports import agreed, controls, healing, planned, several, swap_report, swapped
from views import absent, check_layout, draw, flowing

from attnlens.kernels import TIES
from attnlens.records import (
    Change,
    Coverage,
    Effect,
    HealingRate,
    HealingTraining,
    KeyRank,
    Pair,
    Rise,
    Text,
    TextCosine,
)
from attnlens.report import export
from attnlens.report.findings import find
from attnlens.report.pictures import swaps as pictures
from attnlens.report.pictures.charts import panel_figure
from attnlens.report.pictures.style import house_style
from attnlens.report.pictures.swaps import swap_panels
from attnlens.report.sections import swaps as effects
from attnlens.report.sections.plans import healing_lines, plan_lines, plan_rows, share
from attnlens.report.sections.swaps import effect, format_cost
from attnlens.report.shapes import Shapes
from attnlens.requests.swap import Amount

MIXED = ["encoder", "encoder", "decoder", "cross", "decoder", "cross"]


def cost(swap):
    return next(finding for finding in find(Shapes(swap_report(swap))) if finding.question == "Cost?")


def shown(**fields):
    return flowing(swap_report(swapped(**fields)))


def row(report, first, width=110):
    return next(line.split() for line in views.summary(report, width).splitlines() if line.split()[:1] == [first])


def lost(layer, head=None):
    """Return the effect of a head or layer whose swap diverges."""
    return Effect(layer=layer, head=head, part="decoder", delta=None)


def axes_of(function, *arguments):
    return draw(function, *arguments).axes[0]


@pytest.fixture(scope="module")
def whole():
    return swap_report(swapped(deltas=(3.28, 1.12, 0.09), healed=True, sweep="heads"))


@pytest.fixture(scope="module")
def controlled():
    """A kernel that costs 0.4 nats, with controls; only the sink-window costs less."""
    return swap_report(swapped(deltas=(0.4,), controls=controls(), agreement=agreed([1, 2, 3, 64])))


def test_one_kernel_has_its_numbers_stage_by_stage(whole):
    assert row(whole, "original")[1:] == ["2.430", "11.4"]
    assert row(whole, "swapped")[1:6] == ["5.710", "3.280", "3.096", "to", "3.464"]
    assert row(whole, "healed")[1:3] == ["2.520", "0.090"]
    best = next(step.validation for step in healing().curve if step.step == 700)
    assert not absent(
        flowing(whole),
        "Loss 2.430 → 2.520 nats per token, perplexity +9.4 %. Change 0.090, 95 % interval 0.065 to 0.115.",
        f"Training recovered {100 * (1 - 0.09 / 3.28):.0f} % of the rise.",
        "4 of 4 sites, 32 of 32 heads · path: sdpa",
        "identity error 3.2e-07, causality error 0, mask error –",
        "mask error: the sequences have no padding",
        "15,134 → 12,043 tokens per second (× 0.80); 440 → 457 MiB peak (× 1.04)",
        "1,000 steps requested, 1,000 steps done, best step 700; 7,077,888 parameters trained, learning rate 1e-3",
        f"{healing().curve[0].validation:.2f} at first, {best:.3f} at the best step",
    )
    sites = [f"model.layers.{layer}.attn" for layer in range(5)]
    assert not absent(views.details(swap_report(swapped(layers=5)), 110), *sites)
    assert "– → – MiB" in format_cost(swapped(peak_memory_bytes=Pair(before=None, after=None)))


def test_controls_are_rows_apart_and_named_if_they_cost_less(controlled):
    rows = [line.split()[:3] for line in views.summary(controlled, 120).splitlines() if line.startswith("vs ")]
    assert rows[:3] == [["vs", "sink-window:4,64", "2.480"], ["vs", "hard", "7.930"], ["vs", "uniform", "6.330"]]
    assert "Costs more than sink-window:4,64; costs less than hard and uniform." in flowing(controlled)
    assert "vs" not in shown().split(), "the control"
    older = [control.model_copy(update={"difference": None}) for control in controls()]
    assert "Not distinguishable with 32 windows from sink-window:4,64; costs less than hard" in flowing(
        swap_report(swapped(deltas=(0.04,), controls=older))
    ), "intervals meet"
    swaps = [swapped(kernel=name, deltas=(delta,), controls=controls()) for name, delta in (("elu", 1.0), ("l2", 2.0))]
    text = views.summary(swap_report(*swaps), 140)
    cells = [line.split()[:2][-1] for line in text[text.index("original") :].splitlines()[1:7]]
    assert cells == ["3.430", "sink-window:4,64", "4.430", "sink-window:4,64", "hard", "uniform"]


def test_a_kernel_is_compared_with_a_control_in_the_same_windows():
    """The intervals of the two changes overlap, but that of their paired difference decides."""

    def compared(low, high):
        difference = Change(before=2.464, after=2.546, delta=0.082, ci95=(low, high))
        control = controls()[0].model_copy(update={"difference": difference})
        findings = find(Shapes(swap_report(swapped(deltas=(0.116,), controls=[control]))))
        return next(finding.answer for finding in findings if finding.question.startswith("Against"))

    assert compared(0.03, 0.13) == "Costs more than sink-window:4,64."
    assert compared(-0.13, -0.03) == "Costs less than sink-window:4,64."
    unclear = "sink-window:4,64 (difference 0.082, 95 % interval −0.010 to 0.180)"
    assert compared(-0.01, 0.18) == f"Not distinguishable with 32 windows from {unclear}."


def test_perplexity_has_the_interval_of_its_rise_and_agreement_is_censored_if_half_never_differ(controlled):
    """The ends of the interval are e^Δ − 1 at those of Δ."""
    rise, low, high = (f"{100 * math.expm1(0.4 + step):.1f}" for step in (0, -0.0402, 0.0402))
    assert f"perplexity +{rise} %" in flowing(controlled)
    assert row(controlled, "swapped", 120)[6:13] == ["16.9", f"+{rise}", "%", low, "to", high, "%"]
    assert "+9.4 %" in cost(swapped(deltas=(0.09,))).answer
    sentence = "3 of 4 greedy continuations differ. Median agreement: 2 of 64 tokens."
    assert sentence in flowing(controlled)
    assert "Median agreement: 64 of 64 tokens" in shown(agreement=agreed([64, 64, 64, 3]))


def test_csv_has_a_row_per_stage_and_control_or_per_unit(whole, controlled):
    rows = views.rows(controlled)
    controlling = [("swapped", ""), ("", "sink-window:4,64"), ("", "hard"), ("", "uniform")]
    assert [(cells["stage"], cells["control"]) for cells in rows] == controlling
    assert [cells["state"] for cells in rows[1:]] == ["8704", "16384", "65"]
    assert {cells["tokens_per_second.after"] for cells in rows[1:]} == {""}
    assert {"perplexity.delta.low", "perplexity.delta.high", "greedy.median"} <= set(rows[0])
    rows = views.rows(swap_report(swapped(deltas=(3.28, None))))
    assert [(cells["stage"], cells["loss.delta"]) for cells in rows] == [("swapped", "3.28"), ("fitted", "")]
    units = views.rows(whole)
    assert (len(units), {cells["significant"] for cells in units}) == (32, {"true", "false"})


def test_the_verdict_gives_the_direction_of_the_loss_and_divergence_is_no_number():
    for delta, words, severity in (
        (3.28, "Loss 2.43 → 5.71 nats per token, perplexity × 27", "notable"),
        (-1.0, "Loss 2.430 → 1.430", "notable"),
        (0.0, "None measurable", "none"),
        (0.01, "Unclear, use more --windows", "none"),  # its interval contains 0 and more than 1 % of the loss
        (0.03, "Loss 2.430 → 2.460", "notable"),
        (None, "The model diverges", "problem"),
    ):
        finding = cost(swapped(deltas=(delta,)))
        assert (words in finding.answer, finding.severity) == (True, severity), delta
    text = shown(deltas=(None,))
    reasons = f"loss, perplexity, KL, top-1, hidden cosine, CKA: {swap_reports.DIVERGED}"
    assert not absent(text, "swapped diverged", reasons)
    assert "nan" not in text.lower().replace("finance", "")
    assert "diverge" not in shown()  # the control
    reason = swapped().model_copy(update={"reasons": {"mask_error": "the lines diverged"}})
    assert "The model diverges" not in flowing(swap_report(reason)), "a word in a reason is not a finding"
    text = shown(sweep=[lost(9), *swapped(sweep="layers").sweep])
    assert not absent(text, "1 diverged.", "9 diverged –")


def test_a_model_without_a_head_is_described_by_its_hidden_states():
    report = swap_report(swapped(headless=True))
    assert row(report, "swapped")[1:5] == ["0.234", "0.192", "to", "0.275"]
    text = flowing(report)
    assert not absent(
        text,
        f"hidden states and the original's is {1 / 4.28:.3f}.",
        f"loss, perplexity, KL, top-1: {swap_reports.HEADLESS}",
    )
    assert "perplexity KL" not in text.split("No value")[0]
    texts = [
        TextCosine(name=f"{n}.txt", sequences=n, cosine=0.8 + n / 10, ci95=(0.7, 0.95) if n else None) for n in (0, 1)
    ]
    for headless in (True, False):
        text = shown(headless=headless, hidden_cosine_by_text=texts)
        assert ("1.txt 1 0.900 0.700 to 0.950" in text) == headless
        assert ("A single window has no interval." in text) == headless


def test_one_window_promises_no_interval_and_negative_weight_is_named():
    lone = {"windows": 1, "texts": [Text(name="a", sha256="b", windows=[3], available=9)]}
    for swap in (swapped(), swapped(headless=True)):
        text = flowing(swap_report(swap, **lone))
        assert "no errors: only one window was read" in text
        assert "paired bootstrap" not in text
        assert "paired bootstrap" in flowing(swap_report(swap))
    assert "21.0 % of the attention weight is negative" in shown(off_simplex=0.21)
    assert "negative" not in shown()


def test_intervals_of_few_windows_are_said_to_be_students():
    settings = swap_report().settings
    few = [Text(name=name, sha256=name, windows=[3, 5], available=9) for name in "ab"]
    for changes, method in (
        ({"windows": 2, "texts": few[:1]}, "Student's t, 2 windows"),
        ({"windows": 4, "texts": few}, "Student's t, 4 windows"),
        ({"windows": 4, "texts": few, "intervals": "texts"}, "Student's t, 2 texts"),
        ({}, "bootstrap"),
    ):
        changed = settings.model_copy(update=changes)
        assert changed.interval_method == method
        for swaps in ((swapped(),), (swapped(kernel="rbf"), swapped(kernel="l2"))):
            (cost, *_) = find(Shapes(swap_report(*swaps, **dict(changed))))
            assert cost.question in ("Cost?", "Cheapest?")
            assert (f"({method})" in cost.evidence) is (method != "bootstrap")


def test_a_rise_is_a_percentage_a_factor_or_the_end_of_the_model():
    def rise(delta: float, **fields: object) -> tuple[str, str]:
        swap = swapped(deltas=(delta,), **fields)
        return effects.format_rise(swap.loss, swap.perplexity, destroyed=swap.destroyed)

    assert rise(0.4) == ("+49.2 %", "43.3 to 55.3 %")
    assert rise(16.33)[0].startswith("× 1.2e+07")
    assert rise(16.33, destroyed=True) == ("destroyed", "")
    report = swap_report(swapped(deltas=(16.33,), destroyed=True))
    assert "Destroyed: loss 2.4" in flowing(report)
    assert "estroyed" not in flowing(swap_report(swapped(deltas=(3.28,)))), "the control"
    assert (share(0.0062), share(-0.5, 0), share(12362864.97)) == ("+0.62 %", "−50 %", "× 1.2e+07")


def test_a_model_that_reads_noise_is_described_without_a_loss():
    report = swap_report(swapped(noise=True, sweep="heads"))
    assert not absent(
        flowing(report),
        "KL of the predictions from the original's: 3.61 nats per token.",
        f"loss, perplexity: {swap_reports.NOISE}",
        "Δ of the KL to the original in nats per token, a distance, which is never negative and therefore not tested",
    )
    assert "FDR" not in flowing(report)
    assert row(report, "swapped")[1:] == ["3.61", "3.25", "to", "4.04", "27.6", "%", "0.234", "0.303"]
    assert "loss, perplexity" not in shown(), "the control"
    deltas = {"rbf": 1.0, "l2": None, "cosine": 2.0}
    report = swap_report(*(swapped(noise=True, kernel=name, deltas=(delta,)) for name, delta in deltas.items()))
    assert row(report, "kernel") == ["kernel", "KL", "interval", "top-1", "cosine", "CKA"]
    assert row(report, "rbf")[1:9] == ["1.10", "0.99", "to", "1.23", "55.6", "%", "0.500", "0.588"]
    assert row(report, "l2")[1:] == ["diverged", "–", "–", "–", "–"]
    assert row(report, "cosine")[1] == "2.20"


def test_several_kernels_are_rows_whatever_their_ties():
    report = several()
    for kernel, cells in {
        "rbf:gamma=0.5": ["5.71", "3.28", "3.10", "to", "3.46"],
        "rbf:gamma=0.5+symmetric": ["5.33", "2.90"],
        "symmetric": ["4.33", "1.90"],
        "linear+symmetric": ["diverged", "–"],
    }.items():
        assert row(report, kernel)[1 : 1 + len(cells)] == cells
    assert row(report, "linear")[2] == "7.70"
    assert "Effects\n" in views.summary(report, 110)
    assert max(map(len, views.summary(report).splitlines())) <= 100
    assert "| linear | 10.13 | 7.70 |" in views.markdown(report)
    caution = TIES["symmetric"].caution
    assert "not only that of asymmetry" in caution
    assert caution in swap_panels(report)[0].caption
    plain = swap_report(swapped(kernel="rbf"), swapped(kernel="l2+tied-key"))
    assert caution not in swap_panels(plain)[0].caption, "the control"


def test_the_sweep_shows_ten_of_each_end_and_counts_what_matters(whole):
    sweep, text = whole.swaps[0].sweep, views.summary(whole, 110)
    assert f"Effects over 32 windows are significant for {sum(unit.significant for unit in sweep)} of 32 heads" in text
    table = text[text.index("layer  head") :].splitlines()[2:23]
    ends = [*sweep[:10], *sweep[-10:]]
    assert set(table[10].split()) == {"…"}
    assert [line.split()[:2] for line in table[:10] + table[11:]] == [[str(e.layer), str(e.head)] for e in ends]
    assert [line.rstrip().endswith("*") for line in table[:10]] == [e.significant for e in sweep[:10]]
    alike = [Effect(layer=0, head=n, part="decoder", delta=0.1, ci95=(-0.1, 0.3), p_value=0.3) for n in range(4)]
    text = flowing(swap_report(swapped(sweep=alike), windows=4))
    assert "Effects over 4 windows are significant for 0 of 4 heads (false discovery rate 5 %)." in text


@pytest.mark.usefixtures("without_layout")
def test_the_page_of_a_swap_has_its_numbers_and_no_table_of_heads(whole):
    assert absent(views.page(whole), "<td>5.710</td>", "Every head") == ["Every head"]


def test_a_plan_explains_its_savings_its_estimate_and_its_promise_if_there_are_any():
    for after, line in (
        (13_698_304.0, "Added: 13,271,040 → 13,698,304 parameters for queries and keys (+3 %)"),
        (13_271_040.0, "Unchanged: 13,271,040 → 13,271,040 parameters for queries and keys (+0 %)"),
        (6_635_520.0, "Saving: 13,271,040 → 6,635,520 parameters for queries and keys (−50 %)"),
    ):
        assert line in plan_lines(planned(parameters=Pair(before=13_271_040.0, after=after)).plan)
    bare = flowing(planned(estimated=None, promised=None, reasons={"promised": "the ranks were given, not chosen"}))
    assert absent(bare, "Predicted", "Estimated", "rank: one per key head") == ["Predicted", "Estimated"]
    assert not absent(
        flowing(planned()),  # the control
        "Estimated: on the calibration text used to choose the ranks",
        "Predicted: on calibration text used neither to fit nor to choose ranks",
        "all windows of these texts",
    )
    assert "their difference" not in flowing(planned(measured=None))


def test_the_mean_rank_of_a_shared_latent_is_per_key_head():
    shared = KeyRank(
        **{"site": "s", "layer": 0, "kv_head": 0, "heads": [0, 1, 2, 3], "kv_heads": [0, 1, 2, 3]},
        **{"rank": 24, "part": "decoder", "head_dim": 256},
    )
    table = plan_rows(planned(ranks=[shared]).plan)
    cells = {column.title: column.cells[0] for column in (*table.names, *table.columns)}
    assert (cells["mean rank"], cells["of"]) == ("6.0", "64")


FAILS = "beyond the budget: the prediction fails on this text"
UNSURE = "within the budget, though its interval is not: the budget is not guaranteed"
BARE = "within the budget, without an interval"
RISES = [
    ("measured", 0.0087, (0.0058, 0.0096), "within the budget"),
    ("measured", 0.0087, (0.0058, 0.0118), UNSURE),
    ("measured", 0.0087, None, BARE),
    ("measured", 0.0104, (0.0058, 0.0150), FAILS),
    ("measured", 0.0104, None, FAILS),
    ("promised", 0.0021, (0.0002, 0.0041), "within the budget"),
    ("promised", 0.0080, (0.005, 0.011), UNSURE),
    ("promised", 0.0120, (0.0090, 0.0150), "beyond the budget"),
    ("promised", 0.0080, None, BARE),
]


def test_a_rise_is_within_the_budget_by_its_point_and_by_its_interval():
    for name, rise, ci95, words in RISES:
        plan = planned(**{name: Rise(share=rise, ci95=ci95, sequences=32)}).plan
        said = "predicted" if name == "promised" else name
        line = next(line for line in plan_lines(plan) if line.lower().startswith(said))
        assert line.endswith(f", {words}"), (name, rise, ci95)
        assert name == "measured" or plan.within_budget is (words in ("within the budget", BARE))
    beyond = {"measured": Rise(share=0.0104, sequences=32)}
    unsure = planned(promised=Rise(share=0.008, ci95=(0.004, 0.012), sequences=32), **beyond).plan
    assert not any("the prediction fails" in line for line in plan_lines(unsure)), "the prediction itself was uncertain"
    assert any("the prediction fails" in line for line in plan_lines(planned(**beyond).plan)), "the control"


def test_each_text_and_one_more_text_have_their_own_rise():
    more = {"by_text": {"b": 0.003, "a": 0.001}, "ci95_by_text": {"a": (-0.001, 0.0025)}, "over": "texts"}
    report = planned(promised=Rise(share=0.002, sequences=8, **more))
    assert "Text by text: +0.10 % [−0.10 % to +0.25 %] (a), +0.30 % (b)" in plan_lines(report.plan)
    assert "texts like these" in flowing(report)
    for further, words in ((0.0095, "within the budget"), (0.0105, "beyond the budget")):
        report = planned(promised=Rise(share=0.002, sequences=8, by_text={"a": 0.001, "b": 0.003}, further=further))
        line = f"New text of this kind: at most +{100 * further:.2f} % (95 % prediction bound), {words}"
        assert line in plan_lines(report.plan)
    assert "New text" not in flowing(planned()), "the control: one text alone"


def test_a_healing_is_described_in_the_unit_that_was_requested():
    """5,120 tokens in 40 steps, of 5,000 requested; interrupted; a lowered rate differs from all rates tried."""
    tried = [HealingRate(rate=rate, validation=1.0) for rate in (1e-4, 3e-4)]
    one = {"tokens": 5120, "seconds": 2.4, "learning_rate": 1e-5, "rates": tried}
    stages = [
        HealingTraining(stage="transfer", steps=39, lowered_from=1e-4, **one),
        HealingTraining(stage="whole", steps=1, **one | {"tokens": 1, "learning_rate": 1e-4}),
    ]
    update = {"curve": healing().curve[:1], "stages": stages, "best": 0, "tokens": 5120, "seconds": 2.4, "batch": 1}
    for more, *parts in (
        ({"amount": "5,000 tokens"}, "Healing: 5,000 tokens requested, 40 steps done, best step 0"),
        ({"amount": str(Amount.of("1s"))}, "Healing: 1 second requested, 40 steps done"),
        ({"amount": "40 steps"}, "Healing: 40 steps requested, 40 steps done, best step 0"),
        ({"amount": str(Amount.of(1))}, "Healing: 1 step requested"),
        ({"amount": "400 steps", "interrupted": True}, "400 steps requested, 40 steps done, interrupted, best step 0"),
        ({}, "5,120 tokens, 1 sequence per step, 2 s",
         "39 steps, 5,120 tokens, learning rate 1e-5, lowered from 1e-4 (of 1e-4, 3e-4)",
         "Whole model: 1 step, 1 token, learning rate 1e-4 (of 1e-4, 3e-4)"),
    ):  # fmt: skip
        assert not absent(" ".join(healing_lines(healing().model_copy(update=update | more))), *parts)


@pytest.mark.parametrize(
    "kind",
    ["heads", "several", "controls", "healed", *(pytest.param(k, marks=pytest.mark.full) for k in ("layers", "plan"))],
)
@pytest.mark.parametrize("size", [(4, 8), *(pytest.param(s, marks=pytest.mark.full) for s in [(30, 9), (12, 12)])])
def test_no_two_texts_of_a_page_overlap(size, kind):
    if kind in ("plan", "healed"):
        done = {"healed": Rise(share=0.0042, sequences=32), "healing": healing()} if kind == "healed" else {}
        report = planned(*size, **done)
    elif kind == "several":
        report = several(*size, sweep="layers")
    else:
        more = {"controls": controls()} if kind == "controls" else {"sweep": kind}
        report = swap_report(swapped(*size, deltas=(3.28, 1.12, 0.09), healed=True, **more))
    with house_style():
        overview, panels = pictures.swap_overview(report), swap_panels(report)[:3]
        for figure in (overview, *(panel_figure(report, panel) for panel in panels)):
            check_layout(figure)


@pytest.mark.usefixtures("without_layout")
def test_pages_of_any_kind_can_be_drawn():
    for parts in (None, MIXED):
        for swap in (swapped(6, deltas=(None,), parts=parts), swapped(6, headless=True, parts=parts, sweep="layers")):
            with house_style():
                pictures.swap_overview(swap_report(swap)).draw_without_rendering()


def test_the_map_of_ranks_explains_its_colours_and_costs():
    for changes, note in (
        ({}, ": predicted +0.21 %, measured +0.87 %"),
        ({"promised": None}, ": measured +0.87 %"),
        ({"measured": None}, ": predicted +0.21 %"),
        ({"promised": None, "measured": None}, ""),
        ({"promised": None, "healed": Rise(share=-0.004, sequences=2)}, ": measured +0.87 %, healed −0.40 %"),
    ):
        panel = next(panel for panel in swap_panels(planned(**changes)) if panel.stem == "ranks")
        assert (panel.title, panel.note) == ("rank by head, mean 28.0 of 64", f"loss ≤ +1 %{note}")
    assert axes_of(panel.draw).child_axes[0].get_ylabel() == "rank r of head_dim"


@pytest.mark.parametrize("kernel", ["rank", "polynomial:degree=2,offset=0.125+symmetric+sink-window:sink=4,window=128"])
@pytest.mark.parametrize("reached", [270, 200])
def test_the_head_of_a_page_leaves_a_long_formula_to_the_caption(kernel, reached):
    formula = "s⟨qA, kB⟩, A and B of r columns, from UΣVᵀ = C_q^½ C_k^½, " + "long " * 20
    report = swap_report(swapped(kernel=kernel, formula=formula, fitted=["key_map"]))
    report = report.model_copy(update={"coverage": Coverage(sites=30, heads=270, analysed=reached)})
    with house_style():
        figure = pictures.swap_overview(report)
        figure.draw_without_rendering()
    head = figure.texts[1]
    facts = head.get_text().split(" · ")
    assert (facts[0], facts[2]) == ("LlamaForCausalLM", kernel)
    assert facts[3].startswith(f"{'COMPLETE' if reached == 270 else 'PARTIAL'}: {reached} of 270 heads")
    assert "⟨qA, kB⟩" not in head.get_text()
    assert "⟨qA, kB⟩" in figure.get_label(), "the control"
    assert head.get_window_extent().x1 <= figure.bbox.x1


def test_stages_and_controls_stand_at_their_losses(controlled):
    lines = axes_of(pictures.draw_kernels, [controlled.swap]).lines
    grey = sorted(line.get_xdata()[0] for line in lines if line.get_color() == pictures.GREY)
    assert grey == pytest.approx([0.05, 3.9, 5.5])
    labels = [label.get_text() for label in axes_of(pictures.draw_stages, controlled.swap).get_yticklabels()]
    assert [label.split("\n")[0] for label in labels] == ["original", "swapped", "sink-window:4,64", "hard", "uniform"]
    assert "+49.2 % (43.3 to 55.3 %)" in labels[1]
    for lossless in (swapped(headless=True), swapped(noise=True)):
        whiskers = [line for line in axes_of(pictures.draw_stages, lossless).lines if len(line.get_xdata()) == 2]
        low, high = sorted(whiskers[-1].get_xdata())
        assert low < (effect(lossless, lossless)[0] or 0.0) < high
        (bar,) = [line for line in axes_of(pictures.draw_kernels, [lossless]).lines if line.get_linewidth() == 1.4]
        assert sorted(bar.get_xdata()) == pytest.approx([low, high])
    lines = axes_of(pictures.draw_stages, swapped(deltas=(3.28, 1.12))).lines
    dots = [(line.get_xdata()[0], line.get_ydata()[0]) for line in lines if line.get_marker() == "o"]
    assert dots == [(2.43, 0), (pytest.approx(5.71), 1), (pytest.approx(3.55), 2)]
    assert "diverged" in [text.get_text() for text in axes_of(pictures.draw_stages, swapped(deltas=(3.28, None))).texts]
    for deltas, scale in (((2.0, 3.0), "linear"), ((0.01, 30.0), "symlog")):
        swaps = [swapped(kernel=name, deltas=(delta,)) for name, delta in zip(("rbf", "cosine"), deltas, strict=True)]
        assert axes_of(pictures.draw_kernels, swaps).get_xscale() == scale, "by the factor between effects"


def test_both_curves_of_a_healing_fill_their_axes_over_one_scale_with_few_named_steps():
    swap = swapped(deltas=(1.12, 0.09), healed=True)
    above, below = draw(pictures.draw_healing, swap, swap.healing).axes
    assert (above.get_ylabel(), below.get_ylabel()) == ("perplexity", "KL, nats")
    assert below.get_xlabel() == "optimiser step, √ scale"
    assert list(below.get_xticks()) == list(above.get_xticks()) == [0, 50, 200, 500, 1000]
    for axes in (above, below):
        assert np.ptp(axes.lines[0].get_ydata()) > 0.7 * np.ptp(axes.get_ylim())
    assert above.lines[1].get_ydata()[0] == np.exp(swap.loss.before)
    curve = [step.model_copy(update={"loss": None}) for step in healing().curve]
    (axes,) = draw(pictures.draw_healing, swapped(headless=True, healed=True), healing(curve=curve)).axes
    assert axes.get_ylabel() == "1 − cosine"
    for last in (1, 2, 3, 40, 140, 200, 5000, 12345):
        curve = [step.model_copy(update={"step": min(step.step, last)}) for step in healing().curve]
        steps = axes_of(pictures.draw_healing, swapped(healed=True), healing(last, curve=curve)).get_xticks()
        assert (steps[0], steps[-1]) == (0, min(last, 1000))
        assert np.diff(np.sqrt(steps)).min() >= 0.17 * np.sqrt(steps[-1])
        assert len(steps) >= min(4, last + 1)


def test_a_healing_that_counts_tokens_is_drawn_and_described_by_them():
    """The control is the test above: reports of older versions count only steps."""
    curve = [
        step.model_copy(update={"tokens": 1024 * step.step, "stage": "transfer" if step.step < 500 else "whole"})
        for step in healing().curve
    ]
    numbers = {"steps": 900, "tokens": 921_600, "seconds": 90.0, "tokens_per_second": 10240.0, "learning_rate": 0.01}
    stages = [HealingTraining(stage="transfer", **numbers)]
    update = {"tokens": 1024 * 1000, "seconds": 100.0, "batch": 8, "amount": "1,024,000 tokens", "stages": stages}
    swap = swapped(deltas=(1.12, 0.09), healed=healing(curve=curve, **update))
    _above, below = draw(pictures.draw_healing, swap, swap.healing).axes
    assert below.get_xlabel() == "tokens trained on, √ scale"
    assert below.get_xlim()[1] == pytest.approx(1.03 * 1024 * 1000)
    assert below.xaxis.get_major_formatter()(1024 * 1000) == "1.02 M"
    hollow = [list(line.get_xdata()) for line in below.lines if line.get_markerfacecolor() == "white"]
    assert hollow == [[1024 * step for step in (0, 50, 100, 200, 300, 400)]]
    transfer = "Attention transfer: 900 steps, 921,600 tokens, 10,240 tokens per second, learning rate 1e-2"
    assert not absent(flowing(swap_report(swap)), "1,024,000 tokens requested", transfer)


def test_the_map_of_heads_is_centred_marks_what_is_not_significant_and_bears_a_giant():
    sweep = [lost(2, 3), *(e for e in swapped(3, 4, sweep="heads").sweep if (e.layer, e.head) != (2, 3))]
    axes = axes_of(pictures.draw_sweep, swapped(3, 4, sweep=sweep))
    image = axes.images[0]
    assert image.norm.vmin == -image.norm.vmax
    assert np.ma.getdata(image.get_array())[sweep[1].layer, sweep[1].head] == sweep[1].delta
    assert np.ma.getmaskarray(image.get_array())[2, 3]
    dots = {(int(y), int(x)) for x, y in axes.collections[0].get_offsets()}
    assert dots == {(e.layer, e.head) for e in sweep if e.delta is not None and not e.significant}
    values = np.full((4, 8), 0.1)
    assert pictures.limit(values) == (0.1, "neither")
    values[1, 1] = 50.0
    assert pictures.limit(values) == (0.1, "max")
    sweep = [
        Effect(layer=n // 40, head=n % 40, part="decoder", delta=0.041 if n else 0.143, p_value=0.5) for n in range(80)
    ]
    swap = swapped(2, 40, sweep=sweep)
    assert [text.get_text() for text in axes_of(pictures.draw_sweep, swap).texts] == ["0.14"]
    (panel,) = [panel for panel in swap_panels(swap_report(swap)) if panel.stem == "sweep"]
    assert "Numbers: effects beyond the colour scale." in panel.caption
    assert not list(axes_of(pictures.draw_sweep, swapped(2, 40, sweep=sweep[1:])).texts)


def test_a_folder_gets_the_pictures_of_its_report(whole, tmp_path):
    assert [path.name for path in export.drawings(swap_report(), tmp_path)] == ["overview.png", "sites.png"]
    names = [path.name for path in export.drawings(whole, tmp_path)]
    assert names == ["overview.png", "sites.png", "healing.png", "sweep.png"]
    names = [path.name for path in export.drawings(several(2, 2, sweep="heads"), tmp_path)]
    assert {"kernels.png", "sweep-linear_symmetric.png", "sweep-rbf_gamma_0.5.png"} <= set(names)
    assert len(names) == 3 + 8


def test_one_large_kernel_layer_or_control_hides_nothing():
    for wide, scale in ((2.0, "linear"), (250.0, "symlog")):
        lines = [
            ("rbf", {(0, 2): 0.4, (0, 3): 0.7}),
            ("linear", {(0, 2): wide, (0, 3): wide / 2}),
            ("window", {(0, 3): None, (0, 2): 0.1}),
        ]
        axes = draw(pictures.draw_layer_lines, lines, "error").axes[0]
        assert axes.get_yscale() == scale
        assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "3"], "the chosen layers"
        np.testing.assert_array_equal(axes.lines[3].get_ydata(), [0.1, np.nan])
    for last, scale in ((2.0, "linear"), (250.0, "asinh")):
        swap = swapped(sweep="layers")
        deltas = [0.1, 0.2, 0.3, last]
        swept = [
            unit.model_copy(update={"delta": delta, "ci95": None})
            for unit, delta in zip(swap.sweep, deltas, strict=True)
        ]
        assert draw(pictures.draw_sweep, swap.model_copy(update={"sweep": swept})).axes[0].get_xscale() == scale
    for hard, inside in ((0.5, True), (60.5, False)):
        swap = swapped(deltas=(0.4,), controls=controls((0.05, hard, 0.3)))
        axes = draw(pictures.draw_stages, swap).axes[0]
        assert bool(axes.get_xlim()[1] > swap.controls[1].loss.after) is inside
        assert axes.get_xlim()[1] < 5
        assert any(text.get_text() == f"{2.43 + hard:.3f}" for text in axes.texts), "the true number"
