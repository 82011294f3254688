"""Tests that a plan of ranks can be applied again from its file, to its model and to others of the same shape."""

import copy
import json
import re
from dataclasses import replace

import pytest
import torch
from loaded import BARE, grouped

import attnlens
from attnlens.cli.entry import exit_code
from attnlens.errors import UsageError
from attnlens.lab.ranks import search
from attnlens.lab.ranks.pipeline import rank_work
from attnlens.maths.statistics import Design
from attnlens.models import texts
from attnlens.models.texts.targets import feed
from attnlens.records import Plan
from attnlens.report.report import read_report
from attnlens.report.sections.plans import plan_lines
from attnlens.requests import RanksRequest

READ = {"windows": 8, "length": 32, "batch_size": 4} | BARE


@pytest.fixture(scope="module", autouse=True)
def few():
    """Fit and choose on little text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "SEQUENCES", 36)
        patch.setattr(search, "DEFAULT_WINDOWS", 1)
        yield


@pytest.fixture(scope="module")
def search_of_one_form(demo):
    """A search for three of the heads of two layers: its report, the plans given before it, and its stages.

    Each stage is a name, (done, total), and the number of plans given until then.
    """
    given, stages = [], []
    options = {"latents": "group=1", "budget": "loss:2%", "layers": [0, 2], "heads": [1, 4, 5]}
    note = lambda stage, *at: stages.append((stage, at, len(given)))  # noqa: E731
    report = rank_work(demo, RanksRequest(**options, **READ), note, given.append).finish()
    return report, given, stages


@pytest.fixture(scope="module")
def report(search_of_one_form):
    return search_of_one_form[0]


@pytest.fixture(scope="module")
def plan(report):
    return report.plan


def changed(plan, at=0, **update):
    """The same plan with another entry for one key head."""
    ranks = list(plan.ranks)
    ranks[at] = ranks[at].model_copy(update=update)
    return plan.model_copy(update={"ranks": ranks})


def apply(model, plan, **options):
    return attnlens.find_ranks(model, ranks=plan, **READ | options)


def test_a_plan_contains_its_model_and_settings(report):
    plan, whole = json.loads(report.plan.to_json()), json.loads(report.to_json())
    assert all(plan[name] == whole[name] for name in ("tool", "model", "settings"))
    assert plan["kernel"] == whole["swap"]["kernel"] == "rank"
    assert plan["tool"]["version"] == attnlens.__version__
    assert plan["model"]["files"][0]["sha256"]
    assert plan["settings"]["seed"] == 0
    assert plan["settings"]["calibration"]["sha256"]
    assert (report.plan.tokens, report.plan.text) == (32, "King James passages")


def test_a_plan_on_its_own_model_and_text_is_the_same_swap(demo, report, tmp_path, monkeypatch):
    """As a record or a file; nothing is searched, and progress ends where the work does."""
    monkeypatch.setattr(search, "sensitivities", lambda *_: pytest.fail("a search"))
    path, stages = tmp_path / "plan.json", {}
    report.plan.write_json(path)
    read = attnlens.read_plan(path)
    assert read.to_json() == report.plan.to_json()
    report.save(tmp_path / "report.json")
    assert attnlens.read_plan(tmp_path / "report.json") == read_report(tmp_path / "report.json").plan == read
    again = [apply(demo, path, progress=lambda stage, *at: stages.update({stage: at})), apply(demo, read)]
    assert all(done == total for done, total in stages.values()), stages
    assert "fit rank" in stages
    for each in again:
        assert (each.swap.loss, each.swap.sites) == (report.swap.loss, report.swap.sites)
        assert each.plan.ranks == report.plan.ranks
    assert sorted({key.layer for key in read.ranks}) == [0, 2]
    assert {head for key in read.ranks for head in key.heads} == {1, 4, 5}
    first = next(at for at, key in enumerate(read.ranks) if key.rank)
    other = apply(demo, changed(read, first, rank=0), save=tmp_path / "model")
    assert other.swap.loss.after != report.swap.loss.after, "the control: one rank less"
    saved = attnlens.load_swapped(tmp_path / "model")
    fed = feed(demo, texts.batches(demo, texts.sample("demo"), texts.Cut(sequences=8, tokens=32)), "causal", 0)
    try:
        loss = search.measure_losses(replace(demo, model=saved.model), fed, "causal", Design.plain(8)).mean
    finally:
        saved.close()
    assert loss == pytest.approx(other.swap.loss.after, rel=1e-3), "a saved plan is the same model"


def test_an_applied_plan_promises_nothing_and_measures_everything(demo, plan):
    applied = apply(demo, plan).plan
    for name in ("promised", "estimated"):
        assert getattr(applied, name) is None
        assert "given" in applied.reasons[name]
    assert applied.steps == applied.chosen_on == applied.promised_on == []
    assert applied.fitted_on == plan.fitted_on == applied.settings.calibrations
    for name in ("measured", "budget", "within_budget", "cache_bytes_per_token"):
        assert getattr(applied, name) == getattr(plan, name)
    lines = " ".join(plan_lines(applied))
    assert "Measured" in lines
    assert "Predicted" not in lines
    assert Plan.model_validate_json(applied.to_json()).to_json() == applied.to_json()


def test_a_healed_plan_has_both_rises(demo, plan):
    plan = changed(plan, rank=0)
    report = attnlens.heal(demo, ranks=plan, train=12, **READ)
    assert report.plan.healed.share < report.plan.measured.share == apply(demo, plan).plan.measured.share
    assert report.plan.healed.share == pytest.approx(report.swap.loss.after / report.swap.loss.before - 1)


def test_other_weights_of_the_same_shape_are_noted(demo, plan):
    def applied(model, name):
        report = apply(replace(demo, model=model, info=demo.info.model_copy(update=name)), plan)
        return report.plan, [note for note in report.swap.notes if "plan for" in note]

    other = copy.deepcopy(demo.model)
    with torch.no_grad():
        other.transformer.h[0].mlp.c_fc.weight.mul_(1.05)
    tuned, notes = applied(other, {"id": "tuned", "files": []})
    assert notes == ["The ranks are those of a plan for demo, with different weights."]
    assert tuned.model.id == "tuned"
    changed_file = plan.model.files[0].model_copy(update={"sha256": "0" * 64})
    assert applied(demo.model, {"files": [changed_file]})[1] == notes
    assert tuned.measured != plan.measured
    assert "the same weights" in applied(demo.model, {"id": "moved"})[1][0]
    assert not applied(demo.model, {})[1]


def test_a_plan_of_a_grouped_model_has_the_heads_of_each_group():
    model = grouped()
    plan = attnlens.find_ranks(model, latents="group=1", budget="loss:50%", **READ).plan
    again = apply(model, plan).plan
    assert again.ranks == plan.ranks
    assert again.ranks[0].heads == [0, 1, 2]
    with pytest.raises(UsageError, match=r"has heads \[0, 1, 2, 3\] in the plan, but \[0, 1, 2\] in the model"):
        apply(model, changed(plan, heads=[0, 1, 2, 3]))


MISFITS = {
    "key head 1 of model.layers.0.attn, which the model lacks": {"site": "model.layers.0.attn"},
    "key head 8 of transformer.h.0.attn, which the model lacks": {"kv_head": 8, "heads": [8]},
    "has heads [1, 2] in the plan, but [1] in the model": {"heads": [1, 2]},
    "has head_dim 64 in the plan, but 16 in the model": {"head_dim": 64},
    "has layer 1 in the plan, but 0 in the model": {"layer": 1},
}


def test_a_plan_of_another_shape_is_refused_by_its_first_misfit(demo, plan):
    wrong = {says: changed(changed(plan, **update), 3, head_dim=99) for says, update in MISFITS.items()}
    wrong["lacks a rank for key head 5 of transformer.h.2.attn"] = plan.model_copy(update={"ranks": plan.ranks[:-1]})
    every_layer = plan.settings.model_copy(update={"layers": None})
    wrong["lacks a rank for key head 1 of transformer.h.1.attn"] = plan.model_copy(update={"settings": every_layer})
    for says, other in wrong.items():
        with pytest.raises(UsageError, match=re.escape(says)) as refusal:
            apply(demo, other)
        assert "same shape" in refusal.value.remedy


CONTRADICTIONS = {
    "already sets --budget": {"budget": "loss:1%"},
    "already sets --layers": {"layers": [0]},
    "already sets --heads": {"heads": [0]},
    "already sets --part": {"part": "decoder"},
    "already sets --latents": {"latents": "group=1"},
    "can't be read": {"ranks": "none.json"},
    "neither a plan nor a path": {"ranks": 5},
}


def test_options_and_kernels_that_contradict_a_plan_are_refused(plan):
    for says, more in CONTRADICTIONS.items():
        with pytest.raises(UsageError, match=says) as refusal:
            attnlens.find_ranks("no/such/model", **({"ranks": plan} | more))
        assert refusal.value.remedy
    for kernel in ("rbf", "rank:8"):
        with pytest.raises(UsageError, match="applies only to the kernel `rank`"):
            attnlens.heal("no/such/model", kernel, ranks=plan)


def test_files_that_are_not_plans_are_refused(plan, tmp_path):
    whole, path = json.loads(plan.to_json()), tmp_path / "plan.json"
    ranks = whole["ranks"]
    wrong = {
        "rank 17 exceeds head_dim 16": whole | {"ranks": [*ranks[:1], ranks[1] | {"rank": 17}]},
        "a key head has two ranks": whole | {"ranks": [*ranks, ranks[0]]},
        "at least 1 item": whole | {"ranks": []},
        "is not a plan: tool": {"budget": 1},
        "not a plan: budget": whole | {"budget": -0.5},
        "not a plan.*budget": whole | {"budget": 0.0},
        "not a plan.*different layers": whole | {"settings": whole["settings"] | {"layers": [0]}},
    }
    for says, content in wrong.items():
        path.write_text(json.dumps(content))
        with pytest.raises(UsageError, match=says):
            attnlens.read_plan(path)
    with pytest.raises(UsageError, match="can't be read"):
        attnlens.read_plan(tmp_path / "none.json")


def test_the_rises_of_version_1_were_estimates(plan, tmp_path):
    """They were measured on the text that had chosen the ranks."""
    old = json.loads(plan.to_json())
    for name in ("estimated", "fitted_on", "chosen_on", "promised_on", "schema_version"):
        del old[name]
    renamed = {"placement": "windows", "windows": "sequences", "windows_requested": "sequences_asked"}
    renamed["length"] = "tokens"
    old["settings"] = {renamed.get(name, name): value for name, value in old["settings"].items()}
    (tmp_path / "plan.json").write_text(json.dumps(old))
    read = attnlens.read_plan(tmp_path / "plan.json")
    assert read.promised is None
    assert json.loads(read.to_json())["estimated"] == old["promised"]
    assert "to choose the ranks" in read.reasons["promised"]
    assert read.within_budget is (read.measured.share <= read.budget)
    assert read.ranks == plan.ranks
    assert Plan.model_validate_json(read.to_json()) == read
    lines = " ".join(plan_lines(read))
    assert "Estimated" in lines
    assert "Predicted" not in lines


def test_the_program_finds_applies_and_never_overwrites_a_plan(tmp_path, capsys):
    first, second = str(tmp_path / "plan.json"), str(tmp_path / "again.json")

    def shown(code, *words):
        assert exit_code(["ranks", *words]) == code
        return capsys.readouterr()

    small = ("--plan", first, "--windows", "8", "--length", "16", "--generate", "0", "--no-progress")
    out, err = shown(0, "demo", "--budget", "loss:5%", "--latents", "group=all", "--layers", "0", "--table", *small)
    assert "Mean rank" in out
    assert {"numbers", "kept"} <= set(out.split())
    assert first in err
    assert "the ranks were given" in shown(0, "demo", "--ranks", first, "--table", *small, "--plan", second).out
    content = (tmp_path / "plan.json").read_bytes()
    assert attnlens.read_plan(second).ranks == attnlens.read_plan(first).ranks
    refusals = {
        "--budget or --ranks": ("--ranks", first, "--budget", "loss:1%"),
        "ranks=''": ("--ranks", ""),
        "which --ranks reads": ("--ranks", first, "--plan", f"{tmp_path}/./plan.json"),
    }
    for says, words in refusals.items():
        out, err = shown(2, *words)
        assert out == ""
        assert says in " ".join(err.split())
        assert "Traceback" not in err
        assert err.count("\n") <= 3
    assert (tmp_path / "plan.json").read_bytes() == content


def test_the_plan_is_given_as_soon_as_the_ranks_are_chosen(demo, search_of_one_form):
    final, (early,), stages = search_of_one_form
    assert early.ranks == final.plan.ranks
    assert early.measured is None
    assert "not yet measured" in early.reasons["measured"]
    assert final.plan.measured is not None
    assert "measured" not in final.plan.reasons
    announced = [(stage, plans) for stage, _, plans in stages]
    assert ("compare", 0) in announced, "the later stage is announced before the ranks are chosen"
    counts = [at for stage, at, _ in stages if stage == "budget"]
    assert (counts[0][0], counts[-1][0]) == (0, counts[-1][1]), "progress of a search for one form reaches its end"
    assert apply(demo, early).plan.ranks == early.ranks


def test_the_cache_is_that_of_the_whole_model(report):
    plan = report.plan
    whole, alone = plan.model_cache_bytes_per_token, plan.cache_bytes_per_token
    assert whole.before == 4 * 8 * (16 + 16) * 4  # layers · heads · (keys and values) · bytes of demo
    assert whole.before - whole.after == alone.before - alone.after > 0
    assert report.swap.cache_bytes_per_token == alone
    cache = next(finding for finding in report.findings if finding.question == "Cache?")
    assert cache.answer.startswith(f"{whole.before:,.0f} → {whole.after:,.0f} bytes per token")
    assert f"The swapped heads alone: {alone.before:,.0f} →" in cache.evidence
