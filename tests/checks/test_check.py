"""Tests `attnlens check` from end to end: exit codes, bad input, baselines, recomputed heads, planted damage."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from program import DEMO, SMALL, attnlens, environment_with, in_shell, refused, without_torch
from reports import synthetic_report

import attnlens as library
from attnlens.checks.judging import against, baseline_of
from attnlens.checks.rule import Tolerance
from attnlens.errors import UsageError
from attnlens.records import Coverage, Skipped, read_baseline

HOLDS, FAILS = "tokens.entropy: max <= 1", "tokens.entropy: min > 0.9"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A report of three layers of four heads."""
    path = tmp_path_factory.mktemp("reports") / "report.json"
    synthetic_report(3, 4, curves=False).write_json(path)
    return path


@pytest.fixture(scope="module")
def of_demo(tmp_path_factory):
    """A report of the demo model, made by the program."""
    path = tmp_path_factory.mktemp("reports") / "demo.json"
    assert attnlens("inspect", "demo", *SMALL, "--json", path, "-q").returncode == 0
    return path


def edited(path, to, **changes):
    to.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return to


def test_the_exit_code_says_whether_every_rule_holds_and_torch_is_not_imported(saved, tmp_path):
    green = without_torch("check", saved, "--rule", HOLDS, cwd=tmp_path)
    assert (green.returncode, green.stderr) == (0, "")
    assert "PASSED: 1 of 1 rule" in green.stdout
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


def test_rules_come_from_the_default_files_a_named_file_or_the_call(saved, tmp_path):
    def rules(*words):
        told = attnlens("check", saved, "--json", "-", "-q", *words, cwd=tmp_path)
        return [(check["rule"], check["file"]) for check in json.loads(told.stdout)["checks"]]

    (tmp_path / "pyproject.toml").write_text(
        '[tool.attnlens]\nseed = 1\n[tool.attnlens.check]\n"tokens.entropy" = "min > 0"\n'
    )
    assert rules() == [("tokens.entropy: min > 0", "pyproject.toml")]
    (tmp_path / "attnlens.toml").write_text('length = 64\n[check]\ntokens.entropy = ["max < 1"]\n')
    assert rules() == [("tokens.entropy: max < 1", "attnlens.toml")]
    assert rules("--rules", "pyproject.toml")[0][1] == "pyproject.toml"
    assert rules("--rule", HOLDS) == [(HOLDS, None)]
    assert len(rules("--rule", HOLDS, "--rules", "attnlens.toml")) == 2


def test_json_on_stdout_stays_whole_beside_annotations(saved, tmp_path):
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    told = attnlens(
        *("check", saved, "--rule", FAILS, "--json", "-"), GITHUB_ACTIONS="true", GITHUB_STEP_SUMMARY=str(summary)
    )
    assert told.returncode == 1
    assert json.loads(told.stdout)["checks"]
    assert told.stderr.count("::error ") == 10
    assert summary.read_text().startswith("before\n## attnlens check")
    assert "**FAILED&#58; 1 of 1 rule**" in summary.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
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
        (("--update-baseline", "--rule", HOLDS), "--update-baseline needs --baseline"),
        (("--update-baseline", "--baseline", "report.json"), "would replace report.json"),
        (("--update-baseline", "--baseline", "no/where.json"), "does not exist"),
        (("--recompute", "2", "--rule", HOLDS), "--recompute needs MODEL"),
        (("demo", "--rule", HOLDS), "MODEL needs --recompute"),
        (("--rule", HOLDS, "--layers", "0"), "applies to models"),
        (("--rule", HOLDS, "--json", "report.json"), "would replace report.json, the report"),
        (("--rules", "rules.toml", "--junit", "rules.toml"), "would replace rules.toml, the rules"),
        (("--rule", HOLDS, "--junit", "x", "--markdown", "x"), "name the same file"),
        (("--rule", HOLDS, "--junit", "no/where.xml"), "does not exist"),
        (("--rule", HOLDS, "--junit", "."), "it is a folder"),
        (("--rule", HOLDS, "--relative", "-1"), "is not valid."),
        (("--rule", HOLDS, "--fdr", "nan"), "is not valid."),
        (("--rule", HOLDS, "--recompute", "0"), "--recompute"),
    ],
)
def test_what_can_not_be_used_is_refused_in_two_lines_and_nothing_is_written(words, said, saved, tmp_path):
    files = {
        "report.json": saved.read_text(),
        "other.json": "{}",
        "empty.toml": "[check]\n",
        "broken.toml": "[check\n",
        "list.toml": "check = [1]\n",
        "wrong.toml": '[check]\n"tokens.entropy" = [\n  "min >"]\n',
        "rules.toml": '[check]\n"tokens.entropy" = "max < 2"\n',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    refused(attnlens("check", "report.json", *words, cwd=tmp_path), said)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda text: text.replace('"schema_version": "2"', '"schema_version": "7"'), "schema_version '7'"),
        (lambda text: "{" + text, "not a report"),
        (lambda text: "[]", "not a report"),
        (lambda text: text.replace('"n": 32', '"n": NaN', 1), "not a report: heads.0.measures"),
        (lambda text: json.dumps(json.loads(text) | {"heads": []}), "no heads"),
        (lambda text: text.replace('"analysed": 12', '"analysed": 11'), "PARTIAL: 11 of 12 heads"),
    ],
)
def test_a_report_from_which_nothing_follows_is_refused(spoil, said, saved, tmp_path):
    (tmp_path / "r.json").write_text(spoil(saved.read_text()))
    refused(attnlens("check", "r.json", "--rule", HOLDS, "--json", "out.json", cwd=tmp_path), said)
    assert not (tmp_path / "out.json").exists()


def test_a_partial_report_is_checked_where_that_is_allowed():
    skipped = [Skipped(site="x", reason="it was interrupted")]
    partial = synthetic_report(2, 2).model_copy(
        update={"coverage": Coverage(sites=2, heads=5, analysed=4, skipped=skipped)}
    )
    with pytest.raises(UsageError, match="it was interrupted"):
        library.check(partial, [HOLDS])
    assert library.check(partial, [HOLDS], allow_partial=True).checks[0].passed


def test_a_baseline_is_written_on_request_alone_and_holds_what_was_read(saved, tmp_path):
    words = ("check", saved, "--baseline", "base.json")
    refused(attnlens(*words, cwd=tmp_path), "base.json can't be read")
    written = attnlens(*words, "--update-baseline", cwd=tmp_path)
    assert written.returncode == 0, written.stderr
    assert "Wrote base.json" in written.stderr
    same = attnlens(*words, "-q", cwd=tmp_path)
    assert (same.returncode, same.stdout) == (0, "")
    report = library.read_report(saved)
    found = read_baseline(tmp_path / "base.json")
    assert found.measures["tokens.entropy"].values == [head.measures["tokens.entropy"].value for head in report.heads]
    assert (tmp_path / "base.json").stat().st_size < saved.stat().st_size / 2
    moved = edited(saved, tmp_path / "moved.json", heads=_moved(report, 5, "weights.symmetry", 0.5))
    red = attnlens("check", moved, "--baseline", "base.json", "--json", "s.json", cwd=tmp_path)
    assert red.returncode == 1
    assert "layer 1 head 1 (encoder): weights.symmetry is" in red.stdout
    (failed,) = [check for check in json.loads((tmp_path / "s.json").read_text())["checks"] if not check["passed"]]
    assert (failed["file"], len(failed["breaches"])) == ("base.json", 1)


def _moved(report, at, name, by):
    """The heads as JSON, with one measure of one head moved."""
    heads = json.loads(report.to_json())["heads"]
    heads[at]["measures"][name]["value"] += by
    return heads


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("model.architecture", {"model": {"architecture": "Another"}}),
        ("model.parameters", {"model": {"parameters": 7}}),
        ("settings.text.sha256", {"settings": {"text": {"name": "a", "sha256": "1"}}}),
        ("settings.length", {"settings": {"length": 64}}),
        ("settings.windows", {"settings": {"windows": 16}}),
        ("settings.seed", {"settings": {"seed": 5}}),
        ("the number of heads", {"heads": -1}),
        ("a head", {"heads": "moved"}),
        ("measures", {"heads": "fewer"}),
    ],
)
def test_a_baseline_of_another_run_is_refused_naming_the_field(field, change, saved, tmp_path):
    told = json.loads(saved.read_text())
    for name, value in change.items():
        if name != "heads":
            told[name] |= value
        elif value == -1:
            told["heads"] = told["heads"][:-1]
        elif value == "moved":
            told["heads"][3]["site"] = "elsewhere"
        else:
            for head in told["heads"]:
                del head["measures"]["tokens.entropy"]
    (tmp_path / "r.json").write_text(json.dumps(told))
    (tmp_path / "b.json").write_text(baseline_of(library.read_report(saved)).to_json())
    with pytest.raises(UsageError) as found:
        library.check(str(tmp_path / "r.json"), baseline=tmp_path / "b.json")
    assert f"a different run. {field}: " in found.value.problem


def test_names_and_paths_of_a_model_and_its_text_decide_nothing(tmp_path):
    """The same bytes in other folders are the same model on the same text, for check and for compare."""
    words = ("--windows", "4", "--length", "16", "--source", "tokens", "--no-progress")
    for name in ("a", "b"):
        shutil.copytree(DEMO, tmp_path / name, ignore=shutil.ignore_patterns("step*"))
        shutil.copy(DEMO / "text.txt", tmp_path / f"{name}.txt")
        files = ("--json", f"{name}.json", "--windows-csv", f"{name}.csv")
        done = attnlens("inspect", name, "--text", f"{name}.txt", *words, *files, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    (tmp_path / "base.json").write_text(baseline_of(library.read_report(tmp_path / "a.json")).to_json())
    done = attnlens("check", "b.json", "--baseline", "base.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = library.compare(tmp_path / "a.json", tmp_path / "b.json").comparison
    assert (found.named, found.paired) == (0, True)
    assert {row.delta for row in found.rows} <= {0.0, None}


def test_hostile_numbers_and_lengths_are_refused_or_compared(saved, tmp_path):
    told = json.loads(baseline_of(library.read_report(saved)).to_json())
    told["measures"]["tokens.entropy"]["values"] = told["measures"]["tokens.entropy"]["values"][1:]
    (tmp_path / "b.json").write_text(json.dumps(told))
    refused(
        attnlens("check", saved, "--baseline", "b.json", cwd=tmp_path), "tokens.entropy must have one entry per head"
    )
    report = json.loads(saved.read_text())
    for place, head in enumerate(report["heads"]):
        head["measures"]["tokens.entropy"] |= {"value": (-1) ** place * 1.7e308, "se": 1.7e308}
    report["settings"]["seed"] = 10**400
    (tmp_path / "r.json").write_text(json.dumps(report))
    rules = ["q30 > 0", "mean > 0", "median > 0", "min > 0", "share(> 0) > 0"]
    words = [word for rule in rules for word in ("--rule", f"tokens.entropy: {rule}")]
    assert attnlens("check", "r.json", *words, cwd=tmp_path).returncode == 1
    refused(attnlens("check", "r.json", "--rule", "settings.seed: value > 0", cwd=tmp_path), "is not a number")
    (tmp_path / "b.json").write_text(baseline_of(library.read_report(tmp_path / "r.json")).to_json())
    for head in report["heads"]:
        head["measures"]["tokens.entropy"]["value"] *= -1
    (tmp_path / "r.json").write_text(json.dumps(report))
    assert attnlens("check", "r.json", "--baseline", "b.json", cwd=tmp_path).returncode == 1


def test_a_value_that_came_or_went_is_a_change():
    report = synthetic_report(2, 2)
    baseline = baseline_of(report)
    values = baseline.measures["weights.norm"].values
    gone = synthetic_report(2, 2, missing=[(1, 0)])
    failed = [check for check in against(gone, baseline, Tolerance()) if not check.passed]
    assert [(one.layer, one.head, one.value) for one in failed[0].breaches] == [(1, 0, None)]
    assert values[2] is not None
    came = [check for check in against(report, baseline_of(gone), Tolerance()) if not check.passed]
    assert {check.subject for check in came} >= {"weights.norm"}


def test_tolerances_and_chance_decide_together():
    report = synthetic_report(4, 8, sequences=32)
    baseline = baseline_of(report)

    def moved(by, **tolerance):
        heads = [
            head.model_copy(
                update={
                    "measures": head.measures
                    | {
                        "tokens.entropy": head.measures["tokens.entropy"].model_copy(
                            update={"value": 0.5 + by, "se": 0.02}
                        )
                    }
                }
            )
            for head in report.heads
        ]
        column = baseline.measures["tokens.entropy"]
        even = column.model_copy(update={"values": [0.5] * 32, "errors": [0.02] * 32})
        kept = baseline.model_copy(update={"measures": {"tokens.entropy": even}})
        (check,) = against(report.model_copy(update={"heads": heads}), kept, Tolerance(**tolerance))
        return check.passed

    assert moved(0.2) is False, "0.2 is 7 standard errors"
    assert moved(0.055), "beyond both tolerances, and within chance"
    assert moved(0.2, relative=0.5)
    assert moved(0.2, absolute=0.3)
    assert moved(0.001, relative=0, absolute=0)


@pytest.mark.full
def test_equal_models_on_other_windows_are_rarely_told_apart():
    """Of 200 pairs that differ by chance alone, the share with any head named stays below the level."""
    random = np.random.default_rng(0)
    report = synthetic_report(3, 4)
    size = len(report.heads)
    named = 0
    for _ in range(200):
        then, now = random.normal(0.5, 0.02, (2, size))
        heads = [
            head.model_copy(
                update={
                    "measures": {
                        "t": head.measures["tokens.entropy"].model_copy(update={"value": float(value), "se": 0.02})
                    }
                }
            )
            for head, value in zip(report.heads, now, strict=True)
        ]
        baseline = baseline_of(report.model_copy(update={"heads": heads}))
        column = baseline.measures["t"].model_copy(update={"values": then.tolist()})
        tolerance = Tolerance(relative=0, absolute=0, fdr=0.05)
        (check,) = against(
            report.model_copy(update={"heads": heads}),
            baseline.model_copy(update={"measures": {"t": column}}),
            tolerance,
        )
        named += not check.passed
    assert named / 200 <= 0.05 + 2 * (0.05 * 0.95 / 200) ** 0.5


def test_a_model_is_inspected_for_what_its_rules_need(tmp_path):
    told = attnlens("check", "demo", "--rule", "weights.symmetry: value in -1..1", "--json", "-", "-q", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    report = json.loads(told.stdout)
    assert (report["settings"]["source"], report["settings"]["analyzers"]) == ("weights", ["symmetry"])
    refused(attnlens("check", "demo", "--rule", "weights.symetry: min > 0", cwd=tmp_path), "Did you mean")


def test_recomputed_heads_agree_with_an_honest_report_and_not_with_a_forged_one(of_demo, tmp_path):
    honest = attnlens("check", of_demo, "demo", "--recompute", "2", "--no-progress", cwd=tmp_path)
    assert honest.returncode == 0, honest.stdout + honest.stderr
    heads = json.loads(of_demo.read_text())["heads"]
    for head in heads:
        head["measures"]["tokens.entropy"]["value"] *= 1.01
    forged = edited(of_demo, tmp_path / "forged.json", heads=heads)
    told = attnlens("check", forged, "demo", "--recompute", "2", "--no-progress", cwd=tmp_path)
    assert told.returncode == 1
    assert "Error: 1 of 28 rules failed: tokens.entropy: recomputed value as in the report." in told.stderr


def test_a_report_of_another_model_is_not_taken_for_this_ones(saved, tmp_path):
    told = attnlens("check", saved, "demo", "--recompute", "1", "--no-progress", cwd=tmp_path)
    assert told.returncode == 1
    assert "FAILED: 2 of 2 rules" in told.stdout


def test_a_check_of_80_times_64_heads_takes_less_than_a_second(tmp_path):
    told = json.loads(synthetic_report(1, 1).to_json())
    heads = [told["heads"][0] | {"layer": layer, "head": head} for layer in range(80) for head in range(64)]
    coverage = {"sites": 80, "heads": 5120, "analysed": 5120}
    (tmp_path / "large.json").write_text(json.dumps(told | {"heads": heads, "coverage": coverage}, indent=1))
    words = [sys.executable, "-m", "attnlens", "check", "large.json", "--rule", HOLDS, "--junit", "s.xml"]
    spent = [9.0]
    while len(spent) < 4 and spent[-1] >= 1:
        before = os.times()
        done = subprocess.run(words, cwd=tmp_path, env=environment_with(), capture_output=True, check=True)
        after = os.times()
        spent.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert done.returncode == 0
    assert spent[-1] < 1, "seconds of processor time, which what else runs here lengthens little"


def damaged(kind, demo, seed=0):
    """A report of the demo model after one of its heads, or one layer, was damaged."""
    import torch

    with torch.no_grad():
        layer = demo.model.transformer.h[2].attn
        width = demo.model.config.n_embd
        size = width // demo.model.config.n_head
        head = slice(width + size * 5, width + size * 6)
        kept = layer.c_attn.weight.clone()
        order = torch.randperm(width, generator=torch.Generator().manual_seed(seed))
        if kind == "shuffled":
            layer.c_attn.weight[:, head] = layer.c_attn.weight[order, head]
        if kind == "zeroed":
            layer.c_attn.weight[:, head] = 0
        if kind == "3 bits":
            step = kept[:, : 2 * width].abs().max() / 4
            layer.c_attn.weight[:, : 2 * width] = (kept[:, : 2 * width] / step).round() * step
        if kind == "bf16":
            layer.c_attn.weight.copy_(kept.bfloat16())
        if kind == "gauge":
            turn = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(seed)))[0]
            turn = turn * torch.linspace(0.5, 2, size)
            queries = slice(size * 5, size * 6)
            layer.c_attn.weight[:, queries] = kept[:, queries] @ turn
            layer.c_attn.weight[:, head] = kept[:, head] @ torch.linalg.inv(turn).T
        try:
            return library.inspect(demo, source="weights")
        finally:
            layer.c_attn.weight.copy_(kept)


def test_planted_damage_turns_red_at_its_head_and_harmless_changes_do_not(demo, tmp_path):
    sound = damaged("", demo)
    (tmp_path / "b.json").write_text(baseline_of(sound).to_json())

    def named(kind, seed=0):
        found = library.check(damaged(kind, demo, seed), baseline=tmp_path / "b.json").checks
        return {(one.layer, one.head) for check in found for one in check.breaches}

    shuffled = [named("shuffled", seed) for seed in range(6)]
    assert all(found <= {(2, 5)} for found in shuffled)
    assert sum(map(len, shuffled)) >= 4, "of 6 permutations, on the weights alone"
    assert named("zeroed") == {(2, 5)}
    rounded = named("3 bits")
    assert len(rounded) >= 4
    assert {layer for layer, _ in rounded} == {2}
    assert named("gauge") == set(), "the same M"
    assert named("bf16") == set()
    assert named("") == set()


def test_a_shell_pipeline_goes_red(saved, tmp_path):
    line = f"attnlens check {saved} --rule '{FAILS}' -q && echo green || echo red $?"
    assert in_shell(line, cwd=tmp_path).stdout.strip() == "red 1"
