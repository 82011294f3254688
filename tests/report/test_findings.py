"""Tests that findings rarely claim anything by chance, name real effects, and fit on the first screen."""

from __future__ import annotations

import re
import shlex
from types import SimpleNamespace

import numpy as np
import pytest
from experiment_reports import converging, experiment_report, failing, series_report
from heads import query_key, random
from reports import synthetic_report
from rich.console import Console
from scipy import stats
from swap_reports import controls, healing, planned, several, swap_report, swapped
from typer.main import get_command

from attnlens.analyzers.registry import NULL_DRAWS, select_analyzers
from attnlens.cli.commands import app
from attnlens.maths.statistics import gaussian_null
from attnlens.records import Finding, Head, Measure, Null, PlanStep, Rise
from attnlens.report import export
from attnlens.report.findings import advise_saving, find, next_commands
from attnlens.report.findings.heads import CHANCE, HeadTests, _adjust
from attnlens.report.render import terminal
from attnlens.report.report import Report
from attnlens.report.shapes import Shapes, Written

ANALYZERS = [analyzer for analyzer in select_analyzers(source="weights") if analyzer.name in ("symmetry", "spectrum")]


def report_of(values: dict[str, list[Measure]], layers: int = 4) -> Report:
    """Build a report of heads with these measures, spread evenly over the layers."""
    report = synthetic_report(1, 1)
    (count,) = {len(measures) for measures in values.values()}
    width = count // layers
    heads = [
        Head(site=f"{place // width}", layer=place // width, head=place % width, kv_head=0, part="encoder",
             measures={name: measures[place] for name, measures in values.items()})
        for place in range(count)
    ]  # fmt: skip
    return report.model_copy(update={"heads": heads})


def random_report(seed: int, *, symmetric: int = 0) -> Report:
    """Build a report on heads of Gaussian factors; the first `symmetric` heads have W_K = W_Q."""
    query, key = random(32, 48, 8, seed=2 * seed), random(32, 48, 8, seed=2 * seed + 1)
    key[:symmetric] = query[:symmetric]
    heads = query_key(query, key)
    null = gaussian_null(ANALYZERS, heads, draws=NULL_DRAWS["factors"], seed=1000 + seed)
    readings = {name: each for analyzer in ANALYZERS for name, each in analyzer.function(heads).items()}
    return report_of(
        {
            name: [
                Measure(value=value, n=1, null=Null(mean=null[name][0], sd=null[name][1]))
                for value in readings[name].tolist()
            ]
            for name in CHANCE
            if name in readings
        }
    )


def tokens_report(means: list[float], name: str = "tokens.entropy", windows: int = 8) -> Report:
    return report_of({name: [Measure(value=mean, se=0.02, n=windows) for mean in means]})


def findings(report: Report) -> list[Finding]:
    return find(Shapes(report))


def parse(command: str) -> None:
    """Parse a command line of attnlens; raise an error of typer if it is invalid."""
    program, name, *arguments = shlex.split(command)
    assert program == "attnlens"
    get_command(app).commands[name].make_context(name, arguments)


def claims(report: Report) -> int:
    return sum(int(np.abs(signs).sum()) for signs in HeadTests(Shapes(report)).signs.values())


@pytest.mark.parametrize("runs", [100, pytest.param(1000, marks=pytest.mark.full)])
def test_random_weights_give_a_false_claim_in_at_most_5_percent_of_runs(runs: int) -> None:
    heads = query_key(random(1500, 48, 8), random(1500, 48, 8, seed=1))
    readings = {name: each.numpy() for analyzer in ANALYZERS for name, each in analyzer.function(heads).items()}
    names = [name for name in CHANCE if name in readings]
    generator, false, without_correction = np.random.default_rng(0), 0, 0
    for _ in range(runs):
        drawn = generator.choice(1500, NULL_DRAWS["factors"] + 32, replace=False)
        values = {name: readings[name][drawn] for name in names}
        nulls = {name: Null(mean=each[32:].mean(), sd=each[32:].std(ddof=1)) for name, each in values.items()}
        report = report_of(
            {name: [Measure(value=v, n=1, null=nulls[name]) for v in values[name][:32]] for name in names}
        )
        false += claims(report) > 0
        without_correction += any(abs(m.z or 0) > 2 for head in report.heads for m in head.measures.values())
    assert stats.binomtest(false, runs, 0.05, alternative="greater").pvalue > 0.01
    assert without_correction > 0.9 * runs  # the control: |z| > 2 of some head
    assert all(claims(random_report(seed, symmetric=1)) for seed in range(3))  # a real effect is found


def test_entropies_around_one_half_give_a_false_claim_in_at_most_5_percent_of_runs() -> None:
    generator, false, normal, runs = np.random.default_rng(0), 0, 0, 200
    for _ in range(runs):
        windows = generator.normal(0.5, 0.1, (32, 4))
        errors = windows.std(1, ddof=1) / 2
        measures = [Measure(value=mean, se=se, n=4) for mean, se in zip(windows.mean(1), errors, strict=True)]
        false += claims(report_of({"tokens.entropy": measures})) > 0
        p = 2 * stats.norm.sf(np.abs((windows.mean(1) - 0.5) / errors))
        normal += stats.false_discovery_control(p).min() <= 0.05
    assert stats.binomtest(false, runs, 0.05, alternative="greater").pvalue > 0.01
    assert normal > 0.2 * runs  # the control: with the normal distribution instead of Student's t, the test fails


def test_symmetric_heads_are_counted_with_their_layer_and_the_value_beside_chance() -> None:
    finding, *_ = findings(random_report(0, symmetric=8))
    assert (finding.question, finding.severity) == ("Symmetric?", "notable")
    assert finding.answer == "8 of 32 heads are more symmetric than chance (layer 0: 8 of 8). 8 heads are above 0.5."
    assert re.match(
        r"Median of the 8: 1 \(1: symmetric\); chance for one head -?0\.\d+ "
        r"\(sd 0\.\d+\)\. Highest: 0\.\d \(1\), ",
        finding.evidence,
    )
    finding, *_ = findings(random_report(1))
    assert (finding.answer, finding.severity) == ("None of 32 heads is more symmetric than chance.", "none")


def test_a_small_significant_difference_is_called_slight_with_its_size() -> None:
    def answer(name: str, value: float, chance: float, sd: float) -> str:
        measures = [Measure(value=value, null=Null(mean=chance, sd=sd))] * 8
        (finding,) = findings(report_of({name: measures}))
        return f"{finding.answer} {finding.evidence}"

    weak = answer("weights.symmetry", 0.06, 0.001, 0.0036)
    assert "8 of 8 heads are slightly more symmetric than chance" in weak
    assert "above 0.5" not in weak
    strong = answer("weights.symmetry", 0.8, 0.001, 0.0036)
    assert strong.startswith("8 of 8 heads are more symmetric than chance (")
    assert "8 heads are above 0.5." in strong
    rank = answer("weights.effective_rank", 30.622, 31.301, 0.038)
    assert "slightly lower rank than chance: median 2.2 % lower." in rank
    assert "Median effective rank 30.6; chance for one head 31.30 (sd 0.04)." in rank
    assert "are of lower rank than chance: median 50 % lower." in answer("weights.effective_rank", 8, 16, 0.1)


@pytest.mark.parametrize(
    ("inputs", "projected", "verdict"),
    [
        (0.9, 0.9, "Yes: 8 of 8 heads are closer to the SVM than expected by chance on the inputs"),
        (0.9, 0.1, "Partly: 8 of 8 heads are closer to the SVM than expected by chance on the inputs; none of 8 heads"),
        (0.1, 0.1, "Not shown: none of 8 heads is closer to the SVM than expected by chance on the inputs"),
    ],
)
def test_the_selection_has_a_verdict_over_both_spaces(inputs: float, projected: float, verdict: str) -> None:
    cosines = {"selection.svm_cosine": inputs, "selection.projected_svm_cosine": projected}
    null = Null(mean=0.1, sd=0.01)
    finding, *_ = findings(
        report_of({name: [Measure(value=value, n=1, null=null)] * 8 for name, value in cosines.items()})
    )
    assert finding.answer.startswith(verdict)
    assert "On the inputs, the SVM separates the hidden states that the module reads." in finding.evidence


def test_heads_are_peaked_only_if_their_entropy_is_significantly_below_one_half() -> None:
    finding = findings(tokens_report([0.3] * 4 + [0.49] * 4 + [0.9] * 8))[0]
    assert finding.answer == "4 of 16 heads are peaked: entropy below ½ (layer 0: 4 of 4)."
    assert findings(tokens_report([0.3] * 4 + [0.9] * 12, windows=2))[0].severity == "none"  # one degree of freedom


def test_scores_are_attributed_to_the_part_with_over_half_of_the_variance() -> None:
    shares = {"tokens.share_key": 0.7, "tokens.share_position": 0.2, "tokens.share_content": 0.1}
    report = report_of({name: [Measure(value=share, se=0.01, n=16)] * 16 for name, share in shares.items()})
    (finding,) = findings(report)
    assert finding.question == "By content or position?"
    assert finding.answer == "The key alone explains most of the score variance in 16 of 16 heads."
    unsure = [Measure(value=0.7, se=0.01, n=16)] * 10 + [Measure(value=0.51, se=0.2, n=16)] * 6
    lacking = [Measure(value=0.2, se=0.01, n=16)] * 12 + [Measure(value=None, reason="cross-attention")] * 4
    mixed = report_of({"tokens.share_key": unsure, "tokens.share_position": lacking})
    answer = "The key alone explains most of the score variance in 10 of 16 heads, undecided in 6."
    assert findings(mixed)[0].answer == answer
    single = findings(report.model_copy(update={"heads": report.heads[:1]}))[0]
    assert single.answer == "The key alone explains most of the score variance."
    assert single.evidence.startswith("Shares")


def test_intervals_over_texts_use_the_degrees_of_freedom_of_texts() -> None:
    report = tokens_report([0.42] * 16, windows=64)
    over_windows = HeadTests(Shapes(report)).signs["tokens.entropy"]
    texts = [report.settings.texts[0]] * 2 if report.settings.texts else []
    settings = report.settings.model_copy(update={"intervals": "texts", "texts": texts})
    over_texts = HeadTests(Shapes(report.model_copy(update={"settings": settings}))).signs["tokens.entropy"]
    assert (over_windows == -1).all()
    assert (over_texts == 0).all()


def screen(report: Report, width: int = 80, encoding: str = "utf-8") -> list[str]:
    stream = SimpleNamespace(write=lambda _: None, encoding=encoding, isatty=lambda: False, flush=lambda: None)
    console = Console(width=width, file=stream, record=True)
    console.print(terminal.document(export.summary(report)))
    return console.export_text().splitlines()


@pytest.mark.parametrize(("layers", "heads", "most"), [(4, 8, 24), (32, 64, 46)])
def test_screen_fits_and_its_map_has_at_most_30_lines(layers: int, heads: int, most: int) -> None:
    lines = screen(synthetic_report(layers, heads, curves=False))
    rows = [line for line in lines if "│" in line]
    assert len(lines) <= most
    assert 0 < len(rows) <= 30
    assert max(map(len, rows)) <= 80
    assert any(set(line) & set("░▒▓█") for line in rows)


def test_the_screen_of_demo_is_at_most_24_lines_of_80_columns(inspected: Report) -> None:
    lines = screen(inspected)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80


def test_map_uses_ascii_shades_if_the_terminal_shows_no_others() -> None:
    lines = screen(synthetic_report(4, 8), encoding="ascii")
    assert not any(set(line) & set("░▒▓█") for line in lines)
    assert any(set("#+") & set(line) for line in lines)


def test_next_commands_follow_from_the_findings_and_quote_the_model() -> None:
    report = random_report(0, symmetric=8)
    report = report.model_copy(update={"model": report.model.model_copy(update={"id": "my model;ls"})})
    commands = next_commands(Shapes(report))
    assert len(commands) == 2
    assert any("--kernel symmetric" in command for command in commands)
    assert all("'my model;ls'" in command for command in commands)
    assert not any("symmetric" in command for command in next_commands(Shapes(random_report(1))))


def test_measures_of_ones_own_analyzer_are_findings_beside_the_answers_to_questions() -> None:
    both = random_report(0, symmetric=8)
    heads = [
        head.model_copy(update={"measures": head.measures | {"tokens.mine": Measure(value=0.01 * place, n=1)}})
        for place, head in enumerate(both.heads)
    ]
    own = {finding.question: finding for finding in findings(both.model_copy(update={"heads": heads}))}
    assert list(own) == [*(finding.question for finding in findings(both)), "Mine?"]
    assert own["Mine?"].measures == ["tokens.mine"]
    assert f"from 0 to {0.01 * (len(heads) - 1):.3g}" in own["Mine?"].answer
    last = heads[-1]
    assert own["Mine?"].evidence.startswith(f"Highest: {last.layer}.{last.head} (")


def test_next_commands_of_a_plan_use_its_file_and_search_a_larger_budget() -> None:
    """A plan sets its layers, so `--ranks` refuses `--layers`. A report contains the plan, and serves as its file."""
    report = planned()
    report = report.model_copy(update={"settings": report.settings.model_copy(update={"layers": [0, 2]})})
    (search,) = next_commands(Shapes(report))
    budget = 100 * report.plan.budget
    assert f"--budget loss:{2 * budget:g}% --layers 0,2" in search
    for written, file in ((Written(plan="plan.json"), "plan.json"), (Written(report="a b.json"), "'a b.json'")):
        use, again = next_commands(Shapes(report, written))[:2]
        assert f"--ranks {file}" in use
        assert "--layers" not in use
        assert again == search
    texts = Written(plan="plan.json", text=("my text.txt", "-"), calibration=("c.txt",))
    assert all(
        " --text 'my text.txt' --calibration c.txt" in command for command in next_commands(Shapes(report, texts))[:2]
    ), "the same texts; stdin cannot be read again"
    assert "--plan FILE" in advise_saving(Shapes(report, Written()))
    assert not advise_saving(Shapes(report, Written(plan="plan.json")))


def test_a_cheaper_window_is_the_next_command_and_an_exhausted_plan_asks_for_no_larger_budget() -> None:
    window = "--kernel sink-window:4,60"
    cost = controls()[0].loss.model_copy(update={"delta": 0.02, "ci95": (0.01, 0.03)})
    small = {"estimated": None, "mean_rank": 2.0, "measured": Rise(share=0.002, ci95=(0.001, 0.003), sequences=32)}
    for report, exhausted in ((swap_report(swapped(4, 8)), None), (planned(), False), (planned(**small), True)):
        name = {"kernel": "sink-window:4,60–64 by layer", "loss": cost, "difference": cost}
        cheaper = controls()[0].model_copy(update=name)
        swap = report.swap.model_copy(update={"controls": [cheaper]})
        commands = next_commands(Shapes(report.model_copy(update={"swap": swap})))
        assert any(window in each for each in commands) == (exhausted is not False), commands
        assert any("--budget loss:2%" in each for each in commands) == (exhausted is False), commands


@pytest.mark.parametrize("report", [random_report(0, symmetric=8), several(), swap_report(swapped(4, 8)), planned()])
def test_next_commands_are_accepted_and_a_saved_report_is_drawn_without_computing_again(report: Report) -> None:
    """No command only repeats the run for another presentation; without a file, the screen advises to save it."""
    bare, saved = next_commands(Shapes(report)), next_commands(Shapes(report, Written(report="r.json")))
    for command in (*bare, *saved):
        parse(command)
    assert saved[-1].startswith("attnlens report r.json ")
    assert not any("--html" in each for each in bare if "--show" not in each)
    assert next_commands(Shapes(report, Written(report="r.json", shown=True))) == [
        each for each in saved if "attnlens report" not in each
    ]
    without_network = next_commands(Shapes(report, Written(offline=True)))
    assert without_network == [f"{command} --offline" if " reproduce " not in command else command for command in bare]
    for command in without_network:
        parse(command)
    if report.kind == "swap":
        assert "--json FILE" in advise_saving(Shapes(report, Written())) or report.plan is not None
        assert not advise_saving(Shapes(report))  # in Python


def test_next_commands_use_the_cheapest_kernel_and_read_as_much_as_the_report() -> None:
    report = swap_report(
        *(swapped(kernel=name, deltas=(delta,)) for name, delta in (("linear", 0.9), ("window:16", 0.2)))
    )
    sweep, heal = next_commands(Shapes(report))
    assert "--kernel window:16 --sweep" in sweep
    assert "--kernel window:16 --train" in heal
    for short in (report, planned()):
        settings = short.settings.model_copy(update={"windows": 4, "length": 32})
        for command in next_commands(Shapes(short.model_copy(update={"settings": settings}))):
            assert "--windows 4 --length 32" in command
            parse(command)


@pytest.mark.parametrize(
    ("amount", "option"),
    [
        ("200 steps", "200"),
        ("2,000,000 tokens", "2000ktok"),
        ("500 tokens", "500tok"),
        ("1,800 seconds", "1800s"),
        (None, "60"),
    ],
)
def test_a_healed_model_is_saved_after_the_same_training_and_not_as_an_untrained_swap(amount, option) -> None:
    trained = swapped(kernel="rbf", deltas=(0.9, 0.2, 0.001), healed=healing(60, amount=amount))
    first, *others = next_commands(Shapes(swap_report(trained)))
    assert first.startswith("attnlens heal ")
    assert first.endswith(f"--kernel rbf --fit --train {option} --save changed")
    assert not any("swap-kernel" in other and "rbf" in other for other in others)
    parse(first)


def test_findings_are_in_the_json_and_in_every_presentation() -> None:
    report = random_report(0, symmetric=8)
    answer = findings(report)[0].answer
    assert answer in " ".join(" ".join(screen(report)).split())
    assert answer.replace("(", "(") in export.WRITERS["markdown"](report).replace("&#58;", ":").replace("&#59;", ";")
    assert answer in export.build_page(report)


def answers(report: Report) -> dict[str, Finding]:
    return {finding.question: finding for finding in findings(report)}


def test_of_several_kernels_the_cheapest_is_named_and_whether_its_interval_lies_below_the_others() -> None:
    (finding,) = findings(several())
    assert (finding.question, finding.answer) == ("Cheapest?", "exponential, its interval lies below all others.")
    close = swap_report(*(swapped(kernel=name, deltas=(delta,)) for name, delta in (("rbf", 0.30), ("l2", 0.31))))
    assert answers(close)["Cheapest?"].answer == "rbf, not clearly cheaper than l2."


def test_a_plan_states_the_numbers_kept_the_cache_and_whether_the_budget_holds() -> None:
    plan = planned().plan
    by_question = answers(planned())
    assert list(by_question)[:3] == ["How small?", "Cache?", "Within budget?"]
    assert by_question["How small?"].answer.startswith(f"{plan.mean_rank:.1f} of {plan.head_dim:g} numbers per key")
    assert by_question["How small?"].answer.endswith(": these heads' keys are 56 % smaller.")
    whole = answers(planned(mean_rank=64.0))["How small?"].answer
    assert whole == "64.0 of 64 numbers per key and head.", "the control: nothing is smaller"
    few = plan.estimated.model_copy(update={"sequences": 16})
    for changed, said in (({}, False), ({"estimated": few}, True)):
        assert ("Chosen from only 16 windows" in answers(planned(**changed))["How small?"].evidence) == said
    for away, end in (
        (-1, "; of the next smaller ranks tried (27.0 on average): +1.10 %."),
        (1, "."),
    ):  # the control: 1
        step = PlanStep(mean_rank=plan.mean_rank + away, predicted=0.01, rise=Rise(share=0.011, sequences=64))
        evidence = answers(planned(steps=[step]))["How small?"].evidence
        assert f"Upper bound on the windows that chose the ranks: +0.62 %{end}" in evidence
    assert f"{plan.cache_bytes_per_token.after:,.0f} bytes per token" in by_question["Cache?"].answer
    beyond = plan.measured.model_copy(update={"share": 2 * plan.budget})
    assert answers(planned(measured=beyond))["Within budget?"].answer.startswith("No: ")
    unsure = plan.measured.model_copy(update={"ci95": (0.0, 2 * plan.budget)})
    bounds = {"promised": unsure}, {"promised": None, "estimated": None, "measured": unsure}
    for changes, other in zip(bounds, (True, False), strict=True):
        verdict = answers(planned(**changes))["Within budget?"]
        assert (verdict.answer.partition(":")[0], verdict.severity) == (
            "On these windows, but not guaranteed",
            "problem",
        )
        assert ("Other windows of these texts could cost up to +2" in verdict.evidence) == other
    sure = unsure.model_copy(update={"ci95": (0.0, plan.budget)})
    verdict = answers(planned(promised=None, estimated=None, measured=sure))["Within budget?"]
    assert (verdict.answer.partition(":")[0], verdict.severity) == ("Yes", "none"), "the control"


def test_experiments_are_judged_one_by_one() -> None:
    by_question = answers(experiment_report(converging(), failing()))
    assert [finding.severity for finding in by_question.values()] == ["none", "problem"]
    assert by_question["Failing reproduced?"].answer.startswith("No: 3 of 3 values differ: ")
    assert by_question["Local convergence reproduced?"].answer.startswith(
        "Yes: 4 of 4 values agree with the reference ("
    )
    assert "→" in findings(series_report())[0].answer


def test_the_hardening_of_a_head_is_a_sentence() -> None:
    final = {"KL, the head, c = 1": 0.26, "KL, its SVM at the same norm, c = 1": 3.9e-5}
    hardening = failing().model_copy(update={"name": "head 3.6, hardening", "final": final, "published": None})
    (finding,) = findings(experiment_report(hardening))
    assert finding.question == "Head 3.6: how hard does it select?"
    assert finding.answer == (
        "In the pretrained head, the selected token gets 77.1 % of the weight (median over the SVM's queries, its most "
        "decided ones; 100 %: hard selection)."
    )
    assert finding.evidence == "The SVM's solution, scaled to the head's norm, would give it 100 %."


def test_q_values_are_those_of_scipy() -> None:
    p = np.random.default_rng(0).random(50) ** 3
    np.testing.assert_allclose(_adjust(p), stats.false_discovery_control(p), rtol=1e-12)
    assert not np.allclose(_adjust(p), p)  # the control
