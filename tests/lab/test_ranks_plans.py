"""Tests that a plan of ranks can be made again from its file, on its model and on one of the same shape."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from loaded import BARE, grouped
from program import attnlens as program
from program import refused

import attnlens
from attnlens.errors import UsageError
from attnlens.lab.ranks import search as calibration
from attnlens.lab.ranks import search as room
from attnlens.records import Plan
from attnlens.report.sections.plans import plan_lines

READ = {"windows": 8, "length": 32, "batch_size": 4} | BARE


@pytest.fixture(scope="module", autouse=True)
def few():
    """A fit and a choice on little text: what is tested holds for any length of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "SEQUENCES", 36)
        yield


@pytest.fixture(scope="module")
def report(demo):
    """A plan for three of the heads of two layers."""
    return attnlens.find_ranks(demo, latents="group=1", budget="loss:2%", layers=[0, 2], heads=[1, 4, 5], **READ)


def changed(plan, at=0, **update):
    """The same plan with another entry for one key head."""
    ranks = list(plan.ranks)
    ranks[at] = ranks[at].model_copy(update=update)
    return plan.model_copy(update={"ranks": ranks})


# --- what a plan says of itself ---------------------------------------------------------------------------------------


def test_a_plan_says_what_it_comes_from(report):
    plan = json.loads(report.plan.to_json())
    whole = json.loads(report.to_json())
    for name in ("tool", "model", "settings"):
        assert plan[name] == whole[name]
    assert plan["kernel"] == whole["swap"]["kernel"] == "rank"
    assert plan["tool"]["version"] == attnlens.__version__
    assert plan["model"]["files"][0]["sha256"]
    assert plan["settings"]["seed"] == 0
    assert plan["settings"]["calibration"]["sha256"]
    assert (report.plan.tokens, report.plan.text) == (32, "King James passages")


# --- the same ranks again ---------------------------------------------------------------------------------------------


def test_a_plan_on_its_own_model_and_text_is_the_same_swap(demo, report, tmp_path):
    report.plan.write_json(tmp_path / "plan.json")
    read = attnlens.read_plan(tmp_path / "plan.json")
    for ranks in (tmp_path / "plan.json", str(tmp_path / "plan.json"), read):
        again = attnlens.find_ranks(demo, ranks=ranks, **READ)
        assert again.swap.loss == report.swap.loss
        assert again.swap.sites == report.swap.sites
        assert again.plan.ranks == report.plan.ranks
    assert sorted({key.layer for key in again.plan.ranks}) == [0, 2]
    assert {head for key in again.plan.ranks for head in key.heads} == {1, 4, 5}
    first = next(at for at, key in enumerate(read.ranks) if key.rank)
    other = attnlens.find_ranks(demo, ranks=changed(read, first, rank=0), **READ)
    assert other.swap.loss.after != report.swap.loss.after, "the control: one rank less"


def test_what_was_given_promises_nothing_and_measures_everything(demo, report):
    plan = attnlens.find_ranks(demo, ranks=report.plan, **READ).plan
    assert plan.promised is None
    assert plan.estimated is None
    assert "given" in plan.reasons["promised"]
    assert "given" in plan.reasons["estimated"]
    assert plan.steps == []
    assert plan.fitted_on == report.plan.fitted_on == plan.settings.calibrations
    assert not plan.chosen_on
    assert not plan.promised_on
    assert plan.measured == report.plan.measured
    assert (plan.budget, plan.within_budget) == (report.plan.budget, report.plan.within_budget)
    assert plan.cache_bytes_per_token == report.plan.cache_bytes_per_token
    told = " ".join(plan_lines(plan))
    assert "Measured" in told
    assert "Promised" not in told
    assert Plan.model_validate_json(plan.to_json()).to_json() == plan.to_json()


def test_no_plan_is_searched_for(demo, report, monkeypatch):
    def searched(*_args, **_more):
        raise AssertionError("nothing is to be searched")

    monkeypatch.setattr(room, "sensitivities", searched)
    assert attnlens.find_ranks(demo, ranks=report.plan, **READ).plan.ranks == report.plan.ranks
    with pytest.raises(AssertionError):
        attnlens.find_ranks(demo, budget="loss:2%", **READ)


def test_a_given_plan_can_be_healed(demo, report):
    plan = attnlens.heal(demo, ranks=report.plan, train=1, **READ).plan
    assert plan.healed is not None


# --- other models -----------------------------------------------------------------------------------------------------


def origin(found):
    return [note for note in found.swap.notes if "plan for" in note]


def test_other_weights_of_the_same_shape_are_noted(demo, report):
    other = copy.deepcopy(demo.model)
    with torch.no_grad():
        other.transformer.h[0].mlp.c_fc.weight.mul_(1.05)
    tuned = replace(demo, model=other, info=demo.info.model_copy(update={"id": "tuned", "files": []}))
    found = attnlens.find_ranks(tuned, ranks=report.plan, **READ)
    assert origin(found) == ["The ranks are those of a plan for demo, with different weights."]
    assert found.plan.model.id == "tuned"
    assert found.plan.measured != report.plan.measured
    moved = replace(demo, info=demo.info.model_copy(update={"id": "moved"}))
    assert "the same weights" in origin(attnlens.find_ranks(moved, ranks=report.plan, **READ))[0]
    assert not origin(attnlens.find_ranks(demo, ranks=report.plan, **READ))


def test_a_plan_of_a_grouped_model_serves_its_groups():
    model = grouped()
    plan = attnlens.find_ranks(model, budget="loss:50%", **READ).plan
    again = attnlens.find_ranks(model, ranks=plan, **READ)
    assert again.plan.ranks == plan.ranks
    assert again.plan.ranks[0].heads == [0, 1, 2]
    with pytest.raises(UsageError, match=r"has heads \[0, 1, 2, 3\] in the plan, but \[0, 1, 2\] in the model"):
        attnlens.find_ranks(model, ranks=changed(plan, heads=[0, 1, 2, 3]), **READ)


MISFITS = {
    "another architecture": (
        {"site": "model.layers.0.attn"},
        "key head 1 of model.layers.0.attn, which the model lacks",
    ),
    "more key heads": ({"kv_head": 8, "heads": [8]}, "key head 8 of transformer.h.0.attn, which the model lacks"),
    "other groups": ({"heads": [1, 2]}, r"has heads \[1, 2\] in the plan, but \[1\] in the model"),
    "wider heads": ({"head_dim": 64}, "has head_dim 64 in the plan, but 16 in the model"),
    "another order": ({"layer": 1}, "has layer 1 in the plan, but 0 in the model"),
}


@pytest.mark.parametrize("what", MISFITS)
def test_a_plan_of_another_shape_is_refused_by_its_first_misfit(demo, report, what):
    update, says = MISFITS[what]
    plan = changed(changed(report.plan, **update), 3, head_dim=99)
    with pytest.raises(UsageError, match=says) as refusal:
        attnlens.find_ranks(demo, ranks=plan, **READ)
    assert "same shape" in refusal.value.remedy


def test_a_plan_that_leaves_a_key_head_out_is_refused(demo, report):
    short = report.plan.model_copy(update={"ranks": report.plan.ranks[:-1]})
    with pytest.raises(UsageError, match=r"no rank for key head 5 of transformer\.h\.2\.attn"):
        attnlens.find_ranks(demo, ranks=short, **READ)
    every = report.plan.model_copy(update={"settings": report.plan.settings.model_copy(update={"layers": None})})
    with pytest.raises(UsageError, match=r"no rank for key head 1 of transformer\.h\.1\.attn"):
        attnlens.find_ranks(demo, ranks=every, **READ)


# --- what is refused before a model is loaded -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"budget": "loss:1%"}, "already sets --budget"),
        ({"layers": [0]}, "already sets --layers"),
        ({"heads": [0]}, "already sets --heads"),
        ({"part": "decoder"}, "already sets --part"),
        ({"latents": "group=1"}, "already sets --latents"),
        ({"ranks": "none.json"}, "can't be read"),
        ({"ranks": 5}, "neither a plan nor a path"),
    ],
)
def test_ranks_that_contradict_something_are_refused(report, more, says):
    with pytest.raises(UsageError, match=says) as refusal:
        attnlens.find_ranks("no/such/model", **({"ranks": report.plan} | more))
    assert refusal.value.remedy


@pytest.mark.parametrize("kernel", ["rbf", "rank:8"])
def test_a_plan_heals_no_kernel_but_its_own(report, kernel):
    with pytest.raises(UsageError, match="applies only to the kernel rank"):
        attnlens.heal("no/such/model", kernel, ranks=report.plan)


def test_a_plan_that_contradicts_itself_is_no_plan(report, tmp_path):
    whole = json.loads(report.plan.to_json())
    wrong = {
        "rank 17 exceeds head_dim 16": [*whole["ranks"][:1], whole["ranks"][1] | {"rank": 17}],
        "a key head has two ranks": [*whole["ranks"], whole["ranks"][0]],
        "at least 1 item": [],
    }
    for says, ranks in wrong.items():
        (tmp_path / "plan.json").write_text(json.dumps(whole | {"ranks": ranks}))
        with pytest.raises(UsageError, match=says):
            attnlens.read_plan(tmp_path / "plan.json")


@pytest.mark.full
def test_the_program_takes_a_plan_and_writes_one(report, tmp_path):
    plan, again, small = tmp_path / "plan.json", tmp_path / "again.json", ("--windows", "8", "--length", "32")
    report.plan.write_json(plan)
    typed = ("ranks", "demo", "--ranks", plan, "--no-progress", *small)
    done = program(*typed, "--plan", again)
    assert done.returncode == 0, done.stderr
    assert "the ranks were given" in done.stdout
    assert attnlens.read_plan(again).ranks == report.plan.ranks
    refused(program(*typed, "--budget", "loss:1%"), "--budget or --ranks")
    refused(program("ranks", "demo", "--ranks", ""), "ranks=''")


NEW = {"placement", "windows_requested", "length"}
"""Settings that an older plan calls otherwise."""


# --- older plans ------------------------------------------------------------------------------------------------------


def test_what_an_older_plan_promised_was_an_estimate(report, tmp_path):
    """It was measured on the text that had chosen the ranks."""
    plan = json.loads(report.plan.to_json())
    for name in ("estimated", "fitted_on", "chosen_on", "promised_on", "schema_version"):
        del plan[name]
    new_names = {
        "windows": "placement",
        "sequences": "windows",
        "sequences_asked": "windows_requested",
        "tokens": "length",
    }
    settings = plan["settings"]
    plan["settings"] = {old: settings[new_names.get(old, old)] for old in [*settings, *new_names] if old not in NEW}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    read = attnlens.read_plan(tmp_path / "plan.json")
    assert read.promised is None
    assert json.loads(read.to_json())["estimated"] == plan["promised"]
    assert "to choose the ranks" in read.reasons["promised"]
    assert read.within_budget is (read.measured.share <= read.budget)
    assert read.ranks == report.plan.ranks
    assert Plan.model_validate_json(read.to_json()) == read
    told = " ".join(plan_lines(read))
    assert "Estimated" in told
    assert "Promised" not in told


# --- plans that no search wrote ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [{"budget": -0.5}, {"budget": 0.0}, {"settings": {"layers": [0]}}],
    ids=["less than nothing", "nothing", "another layer"],
)
def test_a_plan_that_contradicts_itself_is_refused(report, tmp_path, change):
    plan = json.loads(report.plan.to_json())
    for name, value in change.items():
        plan[name] = plan[name] | value if isinstance(value, dict) else value
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(UsageError, match="not a plan"):
        attnlens.read_plan(tmp_path / "plan.json")


def test_a_plan_is_not_overwritten_by_what_it_gives(report, tmp_path):
    path = tmp_path / "plan.json"
    report.plan.write_json(path)
    before = path.read_bytes()
    done = program("ranks", "--ranks", path, "--plan", tmp_path / "." / "plan.json")
    refused(done, "--plan would replace", "which --ranks reads")
    assert path.read_bytes() == before


def test_progress_ends_where_the_work_does(demo, report):
    """The fit of a plan is one pass, and not the search that found it."""
    seen = {}
    attnlens.find_ranks(
        demo, ranks=report.plan, progress=lambda stage, done, total: seen.update({stage: (done, total)}), **READ
    )
    assert "fit rank" in seen
    assert all(done == total for done, total in seen.values()), seen
