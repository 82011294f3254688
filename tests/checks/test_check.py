"""Tests `attnlens check` from end to end: exit codes, bad input, baselines, recomputed heads, planted damage."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
import torch
from program import DEMO, in_shell, invoke, refused, without_torch
from reports import synthetic_report
from scipy import stats

import attnlens
from attnlens.checks.judging import build_baseline, check_baseline
from attnlens.checks.rule import Tolerance
from attnlens.errors import UsageError
from attnlens.records import Coverage, Skipped, read_baseline
from attnlens.report.sections.checked import describe_check

HOLDS, FAILS = "tokens.entropy: max <= 1", "tokens.entropy: min > 0.9"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A report of three layers of four heads."""
    path = tmp_path_factory.mktemp("reports") / "report.json"
    synthetic_report(3, 4, curves=False).write_json(path)
    return path


def with_measures(report, measures):
    """The report with these measures in place of its own, one dictionary per head."""
    pairs = zip(report.heads, measures, strict=True)
    return report.model_copy(update={"heads": [head.model_copy(update={"measures": each}) for head, each in pairs]})


def check(*words, **options):
    """Run `attnlens check` in this process."""
    return invoke("check", *words, **options)


def test_the_exit_code_tells_whether_every_rule_holds_and_torch_is_not_imported(saved, tmp_path):
    green = without_torch("check", saved, "--rule", HOLDS, cwd=tmp_path)
    assert (green.returncode, green.stderr) == (0, "")
    assert "PASSED: 1 of 1 rule" in " ".join(green.stdout.split())
    red = without_torch(
        *("check", saved, "--rule", HOLDS, "--rule", FAILS, "--json", "j.json", "--junit", "j.xml"),
        *("--csv", "c.csv", "--markdown", "m.md", "--annotations"),
        cwd=tmp_path,
    )
    assert red.returncode == 1
    assert "Error: 1 of 2 rules failed: tokens.entropy: min > 0.9." in red.stderr
    assert red.stdout.count("::error title=attnlens tokens.entropy::") == 10
    checks = json.loads((tmp_path / "j.json").read_text())["checks"]
    assert [check["passed"] for check in checks] == [True, False]
    assert {path.name for path in tmp_path.iterdir()} == {"j.json", "j.xml", "c.csv", "m.md"}
    line = f"attnlens check {saved} --rule '{FAILS}' -q && echo green || echo red $?"
    assert in_shell(line, cwd=tmp_path).stdout.strip() == "red 1"


def test_rules_come_from_the_default_files_a_named_file_or_the_call(saved, tmp_path):
    def rules(*words):
        run = check(saved, "--json", "-", "-q", *words, cwd=tmp_path)
        return [(check["rule"], check["file"]) for check in json.loads(run.stdout)["checks"]]

    (tmp_path / "pyproject.toml").write_text(
        '[tool.attnlens]\nseed = 1\n[tool.attnlens.check]\n"tokens.entropy" = "min > 0"\n'
    )
    assert rules() == [("tokens.entropy: min > 0", "pyproject.toml")]
    with_mark = '\ufefflength = 64\n[check]\ntokens.entropy = ["max < 1"]\n'  # as some editors of Windows save files
    (tmp_path / "attnlens.toml").write_text(with_mark, encoding="utf-8")
    assert rules() == [("tokens.entropy: max < 1", "attnlens.toml")]
    assert rules("--rules", "pyproject.toml")[0][1] == "pyproject.toml"
    assert rules("--rule", HOLDS) == [(HOLDS, None)]
    assert len(rules("--rule", HOLDS, "--rules", "attnlens.toml")) == 2


def test_json_on_stdout_stays_whole_beside_annotations(saved, tmp_path):
    (summary := tmp_path / "summary.md").write_text("before\n")
    github = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary)}
    run = check(saved, "--rule", FAILS, "--json", "-", **github)
    assert run.returncode == 1
    assert json.loads(run.stdout)["checks"]
    assert run.stderr.count("::error ") == 10
    assert summary.read_text().startswith("before\n## attnlens check")
    assert "**FAILED: 1 of 1 rule**" in summary.read_text()


REFUSED = [
    ((), "No rules to check"),
    (("--rule", ""), "rule=''"),
    (("--rule", "tokens.entropy: min"), "Cannot parse the condition"),
    (("--rule", "tokens.nothing: min > 0"), "matches nothing"),
    (("--rules", "nowhere.toml"), "can't be read"),
    (("--rules", "empty.toml"), "contains no rules"),
    (("--rules", "broken.toml"), "is not valid TOML"),
    (("--rules", "wrong.toml"), "wrong.toml: Cannot parse the condition 'min >'"),
    (("--rules", "list.toml"), "check must be a table"),
    (("--baseline", "nowhere.json"), "can't be read"),
    (("--baseline", "report.json"), "the same file"),
    (("--baseline", "other.json"), "not a baseline"),
    (("--update-baseline", "--rule", HOLDS), "--update-baseline has no effect without --baseline"),
    (("--update-baseline", "--baseline", "report.json"), "would replace report.json"),
    (("--update-baseline", "--baseline", "no/where.json"), "does not exist"),
    (("--recompute", "2", "--rule", HOLDS), "--recompute has no effect without MODEL"),
    (("demo", "--rule", HOLDS), "MODEL has no effect without --recompute"),
    (("--rule", HOLDS, "--layers", "0"), "applies to models"),
    (("--rule", HOLDS, "--json", "report.json"), "would replace report.json, the report"),
    (("--rules", "rules.toml", "--junit", "rules.toml"), "would replace rules.toml, the rules"),
    (("--rule", HOLDS, "--junit", "x", "--markdown", "x"), "name the same file"),
    (("--rule", HOLDS, "--junit", "no/where.xml"), "does not exist"),
    (("--rule", HOLDS, "--junit", "."), "it is a folder"),
    (("--rule", HOLDS, "--relative", "-1"), "relative must be a number of at least 0, not"),
    (("--rule", HOLDS, "--fdr", "nan"), "fdr must be a number of at least 0 and below 1, not"),
    (("--rule", HOLDS, "--recompute", "0"), "--recompute"),
]
FILES = {
    "other.json": "{}",
    "empty.toml": "[check]\n",
    "broken.toml": "[check\n",
    "list.toml": "check = [1]\n",
    "wrong.toml": '[check]\n"tokens.entropy" = [\n  "min >"]\n',
    "rules.toml": '[check]\n"tokens.entropy" = "max < 2"\n',
}
SPOILED = [
    (lambda text: text.replace('"schema_version": "2"', '"schema_version": "7"'), "schema_version '7'"),
    (lambda text: "{" + text, "not a report"),
    (lambda text: "[]", "not a report"),
    (lambda text: text.replace('"n": 32', '"n": NaN', 1), "not a report: heads.0.measures"),
    (lambda text: json.dumps(json.loads(text) | {"heads": []}), "no heads"),
    (lambda text: text.replace('"analysed": 12', '"analysed": 11'), "PARTIAL: 11 of 12 heads"),
    (
        lambda text: text.replace('"tokens.entropy"', '"x"').replace('"source": "both"', '"source": "weights"'),
        "--source weights",
    ),
]


def test_unusable_words_and_reports_are_refused_in_two_lines_and_nothing_is_written(saved, tmp_path):
    files = FILES | {"report.json": saved.read_text()}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for words, message in REFUSED:
        refused(check("report.json", *words, cwd=tmp_path), message)
    for spoil, message in SPOILED:
        (tmp_path / "report.json").write_text(spoil(saved.read_text()))
        refused(check("report.json", "--rule", HOLDS, "--json", "out.json", cwd=tmp_path), message)
    (tmp_path / "report.json").write_text(saved.read_text())
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


def test_a_partial_report_is_checked_where_that_is_allowed():
    coverage = Coverage(sites=2, heads=5, analysed=4, skipped=[Skipped(site="x", reason="it was interrupted")])
    partial = synthetic_report(2, 2).model_copy(update={"coverage": coverage})
    with pytest.raises(UsageError, match="it was interrupted"):
        attnlens.check(partial, [HOLDS])
    assert attnlens.check(partial, [HOLDS], allow_partial=True).checks[0].passed


def test_a_baseline_is_written_on_request_only_and_contains_the_values(saved, tmp_path):
    words = (saved, "--baseline", "base.json")
    refused(check(*words, cwd=tmp_path), "base.json can't be read")
    written = check(*words, "--update-baseline", cwd=tmp_path)
    assert written.returncode == 0, written.stderr
    assert "Wrote base.json" in written.stderr
    same = check(*words, "-q", cwd=tmp_path)
    assert (same.returncode, same.stdout) == (0, "")
    report = attnlens.read_report(saved)
    column = read_baseline(tmp_path / "base.json").measures["tokens.entropy"]
    assert column.values == [head.measures["tokens.entropy"].value for head in report.heads]
    assert (tmp_path / "base.json").stat().st_size < saved.stat().st_size / 2
    document = json.loads(saved.read_text())
    document["heads"][5]["measures"]["weights.symmetry"]["value"] += 0.5
    (tmp_path / "moved.json").write_text(json.dumps(document))
    red = check("moved.json", "--baseline", "base.json", "--json", "s.json", cwd=tmp_path)
    assert red.returncode == 1
    assert "layer 1 head 1: weights.symmetry is" in red.stdout
    (failed,) = [check for check in json.loads((tmp_path / "s.json").read_text())["checks"] if not check["passed"]]
    assert (failed["file"], len(failed["breaches"])) == ("base.json", 1)


OTHER_RUNS = {
    "model.architecture": lambda document: document["model"].update(architecture="Another"),
    "model.parameters": lambda document: document["model"].update(parameters=7),
    "settings.text": lambda document: document["settings"].update(text={"name": "a", "sha256": "1"}),
    "settings.length": lambda document: document["settings"].update(length=64),
    "settings.windows": lambda document: document["settings"].update(windows=16),
    "settings.seed": lambda document: document["settings"].update(seed=5),
    "the number of heads": lambda document: document["heads"].pop(),
    "a head": lambda document: document["heads"][3].update(site="elsewhere"),
    "the report lacks tokens.entropy": lambda document: [
        head["measures"].pop("tokens.entropy") for head in document["heads"]
    ],
}


def test_a_baseline_of_another_run_is_refused_naming_the_field(saved, tmp_path):
    (tmp_path / "b.json").write_text(build_baseline(attnlens.read_report(saved)).to_json())
    for field, change in OTHER_RUNS.items():
        change(document := json.loads(saved.read_text()))
        (tmp_path / "r.json").write_text(json.dumps(document))
        with pytest.raises(UsageError) as refusal:
            attnlens.check(str(tmp_path / "r.json"), baseline=tmp_path / "b.json")
        assert f"a different run: {field}" in refusal.value.problem


def test_names_and_paths_of_a_model_and_its_text_decide_nothing(tmp_path):
    """The same bytes in other folders are the same model on the same text, for check and for compare."""
    words = ("--windows", "4", "--length", "16", "--source", "tokens", "--analyzer", "symmetry", "--no-progress")
    for name in ("a", "b"):
        shutil.copytree(DEMO, tmp_path / name, ignore=shutil.ignore_patterns("step*"))
        shutil.copy(DEMO / "text.txt", tmp_path / f"{name}.txt")
        files = ("--json", f"{name}.json", "--windows-csv", f"{name}.csv")
        done = invoke("inspect", name, "--text", f"{name}.txt", *words, *files, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    (tmp_path / "base.json").write_text(build_baseline(attnlens.read_report(tmp_path / "a.json")).to_json())
    done = check("b.json", "--baseline", "base.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    comparison = attnlens.compare(tmp_path / "a.json", tmp_path / "b.json").comparison
    assert (comparison.named, comparison.paired) == (0, True)
    assert {row.delta for row in comparison.rows} <= {0.0, None}


def test_hostile_numbers_and_lengths_are_refused_or_compared(saved, tmp_path):
    document = json.loads(build_baseline(attnlens.read_report(saved)).to_json())
    document["measures"]["tokens.entropy"]["values"] = document["measures"]["tokens.entropy"]["values"][1:]
    (tmp_path / "b.json").write_text(json.dumps(document))
    refused(check(saved, "--baseline", "b.json", cwd=tmp_path), "tokens.entropy must have one entry per head")
    report = json.loads(saved.read_text())
    for place, head in enumerate(report["heads"]):
        head["measures"]["tokens.entropy"] |= {"value": (-1) ** place * 1.7e308, "se": 1.7e308}
    report["settings"]["seed"] = 10**400
    (tmp_path / "r.json").write_text(json.dumps(report))
    rules = ["q30 > 0", "mean > 0", "median > 0", "min > 0", "share(> 0) > 0"]
    words = [word for rule in rules for word in ("--rule", f"tokens.entropy: {rule}")]
    assert check("r.json", *words, cwd=tmp_path).returncode == 1
    refused(check("r.json", "--rule", "settings.seed: value > 0", cwd=tmp_path), "is not a number")
    (tmp_path / "b.json").write_text(build_baseline(attnlens.read_report(tmp_path / "r.json")).to_json())
    for head in report["heads"]:
        head["measures"]["tokens.entropy"]["value"] *= -1
    (tmp_path / "r.json").write_text(json.dumps(report))
    assert check("r.json", "--baseline", "b.json", cwd=tmp_path).returncode == 1


def test_a_value_that_came_or_went_is_a_change_and_tolerances_and_chance_decide_together():
    report, gone = synthetic_report(2, 2), synthetic_report(2, 2, missing=[(1, 0)])
    baseline = build_baseline(report)
    failed = [check for check in check_baseline(gone, baseline, Tolerance()) if not check.passed]
    assert [(one.layer, one.head, one.value) for one in failed[0].breaches] == [(1, 0, None)]
    assert baseline.measures["weights.norm"].values[2] is not None
    came = [one.subject for one in check_baseline(report, build_baseline(gone), Tolerance()) if not one.passed]
    assert "weights.norm" in came
    report = synthetic_report(4, 8, sequences=32)
    column = build_baseline(report).measures["tokens.entropy"]
    even = column.model_copy(update={"values": [0.5] * 32, "errors": [0.02] * 32})
    baseline = build_baseline(report).model_copy(update={"measures": {"tokens.entropy": even}})
    entropies = [head.measures["tokens.entropy"] for head in report.heads]
    for by, tolerance, passed in (
        (0.2, {}, False),  # 7 standard errors
        (0.055, {}, True),  # beyond both tolerances, and within chance
        (0.2, {"relative": 0.5}, True),
        (0.2, {"absolute": 0.3}, True),
        (0.001, {"relative": 0, "absolute": 0}, True),
    ):
        moved = [one.model_copy(update={"value": 0.5 + by, "se": 0.02}) for one in entropies]
        now = with_measures(report, [{"tokens.entropy": one} for one in moved])
        (outcome,) = check_baseline(now, baseline, Tolerance(**tolerance))
        assert outcome.passed is passed, (by, tolerance)


def test_p_values_against_a_baseline_are_those_of_students_t():
    report = synthetic_report(2, 2, sequences=8)
    entropy = report.heads[0].measures["tokens.entropy"]
    then, now = (
        with_measures(report, [{"t": entropy.model_copy(update={"value": value, "se": 0.01, "n": 8})}] * 4)
        for value in (0.5, 0.7)
    )
    (check,) = check_baseline(now, build_baseline(then), Tolerance())
    p = 2 * stats.t.sf(0.2 / (0.01 * 2**0.5), 7)
    assert check.breaches[0].p == pytest.approx(p)
    assert p > 1e10 * math.erfc(10 * 2**0.5), "the normal distribution is overconfident for 8 windows"
    assert "(p < 1e-4)" in describe_check(check)
    assert "p 2e-06" not in describe_check(check)


@pytest.mark.parametrize("pairs", [40, pytest.param(200, marks=pytest.mark.full)])
def test_equal_models_on_other_windows_rarely_differ(pairs):
    """Of pairs that differ by chance alone, the share with any failing head stays below the level."""
    random, report = np.random.default_rng(0), synthetic_report(3, 4)
    entropy = report.heads[0].measures["tokens.entropy"]
    tolerance, failed = Tolerance(relative=0, absolute=0, fdr=0.05), 0
    for _ in range(pairs):
        then, now = (
            with_measures(report, [{"t": entropy.model_copy(update={"value": v, "se": 0.02})} for v in values.tolist()])
            for values in random.normal(0.5, 0.02, (2, len(report.heads)))
        )
        (outcome,) = check_baseline(now, build_baseline(then), tolerance)
        failed += not outcome.passed
    assert failed / pairs <= 0.05 + 2 * (0.05 * 0.95 / pairs) ** 0.5


def test_a_model_is_inspected_for_what_its_rules_need(tmp_path):
    run = check("demo", "--rule", "weights.symmetry: value in -1..1", "--json", "-", "-q", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert (report["settings"]["source"], report["settings"]["analyzers"]) == ("weights", ["symmetry"])
    refused(check("demo", "--rule", "weights.symetry: min > 0", cwd=tmp_path), "Did you mean")


def test_recomputed_heads_agree_with_an_honest_report_and_not_with_a_forged_one(inspected, saved, tmp_path):
    inspected.write_json(tmp_path / "demo.json")
    words = ("demo", "--recompute", "2", "--no-progress")
    honest = check("demo.json", *words, cwd=tmp_path)
    assert honest.returncode == 0, honest.stdout + honest.stderr
    document = json.loads((tmp_path / "demo.json").read_text())
    for head in document["heads"]:
        head["measures"]["tokens.entropy"]["value"] *= 1.01
    (tmp_path / "forged.json").write_text(json.dumps(document))
    run = check("forged.json", *words, cwd=tmp_path)
    assert run.returncode == 1
    assert "Error: 1 of 28 rules failed: tokens.entropy: recomputed value as in the report." in run.stderr
    run = check(saved, "demo", "--recompute", "1", "--no-progress", cwd=tmp_path)
    assert run.returncode == 1
    assert "FAILED: 2 of 2 rules" in " ".join(run.stdout.split()), "the report of another model"


@torch.no_grad()
def damaged(kind, demo, seed=0):
    """A report of two layers of the demo model after one of its heads, or one layer, was damaged."""
    maps = demo.model.transformer.h[2].attn.c_attn.weight
    weights, width = maps.clone(), len(maps)
    size, draw = width // demo.model.config.n_head, torch.Generator().manual_seed(seed)
    queries, keys = (slice(start + size * 5, start + size * 6) for start in (0, width))
    if kind == "shuffled":
        maps[:, keys] = weights[torch.randperm(width, generator=draw)][:, keys]
    elif kind == "zeroed":
        maps[:, keys] = 0
    elif kind == "3 bits":
        step = weights[:, : 2 * width].abs().max() / 4
        maps[:, : 2 * width] = (weights[:, : 2 * width] / step).round() * step
    elif kind == "bf16":
        maps.copy_(weights.bfloat16())
    elif kind == "gauge":
        turn = torch.linalg.qr(torch.randn(size, size, generator=draw))[0] * torch.linspace(0.5, 2, size)
        maps[:, queries] = weights[:, queries] @ turn
        maps[:, keys] = weights[:, keys] @ torch.linalg.inv(turn).T
    try:
        return attnlens.inspect(demo, source="weights", layers=[1, 2])
    finally:
        maps.copy_(weights)


def test_planted_damage_turns_red_at_its_head_and_harmless_changes_do_not(demo, tmp_path, monkeypatch):
    monkeypatch.setattr("attnlens.runs.inspect.inspection.NULL_DRAWS", {"factors": 4})  # no check reads the nulls
    (tmp_path / "b.json").write_text(build_baseline(damaged("", demo)).to_json())

    def named(kind, seed=0):
        checks = attnlens.check(damaged(kind, demo, seed), baseline=tmp_path / "b.json").checks
        return {(one.layer, one.head) for each in checks for one in each.breaches}

    shuffled = [named("shuffled", seed) for seed in range(3)]
    assert all(heads <= {(2, 5)} for heads in shuffled)
    assert sum(map(len, shuffled)) >= 2, "of 3 permutations, on the weights alone"
    assert named("zeroed") == {(2, 5)}
    rounded = named("3 bits")
    assert len(rounded) >= 4
    assert {layer for layer, _ in rounded} == {2}
    assert named("gauge") == set(), "the same M"
    assert named("bf16") == set()
    assert named("") == set()
