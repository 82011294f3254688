"""Tests of lists of models, of what a dry run tells, and that no changed input is answered with older units."""

import json

import fake_hub
import pytest
import tiny
from hostile import refused
from program import attnlens as attnlens_program
from program import python
from program import refused as ended

import attnlens
from attnlens import requests, run
from attnlens.errors import ModelError, TooLargeError, UsageError
from attnlens.run import several

WEIGHTS = {"source": "weights", "analyzers": ["symmetry"]}


@pytest.fixture
def models(tmp_path, monkeypatch):
    """Two small models of this machine, and a cache of our own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, heads in (("a", 4), ("b", 2)):
        tiny.gpt2(n_head=heads).save_pretrained(tmp_path / name)
        tiny.tokenizer("gpt2").save_pretrained(tmp_path / name)
    return [str(tmp_path / name) for name in "ab"]


@pytest.fixture
def read(monkeypatch):
    """Which models were inspected, and not taken from an earlier run."""
    honest, found = several.inspected, []

    def noted(model, *more):
        found.append(model)
        return honest(model, *more)

    monkeypatch.setattr(several, "inspected", noted)
    return found


def test_each_model_of_a_list_has_its_report_and_one_that_fails_costs_no_other_its_own(models, read, tmp_path):
    listed = [models[0], str(tmp_path / "nosuch"), models[1]]
    found = run.inspect_each(listed, tmp_path / "reports", **WEIGHTS)
    assert [outcome.report is not None for outcome in found] == [True, False, True]
    assert "no such folder" in found[1].said
    for outcome, heads in ((found[0], 8), (found[2], 4)):
        report = json.loads(outcome.report.read_text())
        assert report["coverage"]["analysed"] == heads
        assert report["heads"] == json.loads(attnlens.inspect(outcome.model, **WEIGHTS).to_json())["heads"]
    again = run.inspect_each(listed, tmp_path / "reports", **WEIGHTS)
    assert [outcome.said for outcome in again] == [outcome.said for outcome in found]
    assert read.count(models[0]) == read.count(models[1]) == 1
    run.inspect_each(listed, tmp_path / "reports", **WEIGHTS, resume=False)
    assert read.count(models[0]) == 2


def test_a_report_that_was_changed_or_is_gone_is_made_again(models, read, tmp_path):
    first = run.inspect_each(models, tmp_path / "reports", **WEIGHTS)
    kept = first[0].report.read_bytes()
    run.inspect_each(models, tmp_path / "reports", source="weights", analyzers=["spectrum"])  # writes over both
    read.clear()
    run.inspect_each(models, tmp_path / "reports", **WEIGHTS)
    assert read == models
    first[1].report.unlink()
    read.clear()
    run.inspect_each(models, tmp_path / "reports", **WEIGHTS)
    assert read == models[1:]
    assert json.loads(first[0].report.read_text())["heads"] == json.loads(kept)["heads"]


def test_another_text_under_the_same_name_is_read(models, read, tmp_path):
    text = tmp_path / "text.txt"
    asked = {"analyzers": ["symmetry"], "tokens": 8, "sequences": 2, "text": [str(text)]}
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    run.inspect_each(models[:1], tmp_path / "reports", **asked)
    text.write_text("pack my box with five dozen liquor jugs, said he. " * 20)
    (outcome,) = run.inspect_each(models[:1], tmp_path / "reports", **asked)
    assert len(read) == 2
    told = json.loads(outcome.report.read_text())["settings"]["texts"][0]["sha256"]
    assert told == attnlens.inspect(models[0], **asked).settings.texts[0].sha256


def test_what_determines_a_report_besides_the_model_is_in_the_name_of_its_work(tmp_path, monkeypatch):
    """A text in the user's home, and an adapter's files."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    (tmp_path / "adapter").mkdir()
    given = requests.checked(requests.InspectRequest, {"text": ["~/text.txt"], "adapter": str(tmp_path / "adapter")})
    before = several._files(tmp_path, {}, given).run
    assert several._files(tmp_path, {}, given).run == before, "a control"
    (tmp_path / "adapter" / "weights").write_bytes(b"one")
    between = several._files(tmp_path, {}, given).run
    (tmp_path / "text.txt").write_text("pack my box with five dozen liquor jugs, said he. " * 20)
    assert len({before, between, several._files(tmp_path, {}, given).run}) == 3


def test_lists_that_make_no_sense_are_refused(models, tmp_path):
    names = [str(tmp_path / "s/a-b"), str(tmp_path / "s/a b")]
    refused(UsageError, lambda: run.inspect_each(names, tmp_path / "reports"), "would have one name")
    refused(UsageError, lambda: run.inspect_each([names[0]] * 2, tmp_path / "reports"), "is listed twice")
    refused(UsageError, lambda: run.inspect_each(models, tmp_path / "reports", text=["-"]), "stdin")
    listed = tmp_path / "list.txt"
    for content, said in ((b"\n# none\n", "lists no model"), (b"\xff\xfe\xff", "no text in UTF-8")):
        listed.write_bytes(content)
        refused(UsageError, lambda: run.models_in(str(listed)), said)
    refused(UsageError, lambda: run.models_in(str(tmp_path / "gone.txt")), "gone.txt")
    listed.write_text(f"# two\n{models[0]}\n\n  {models[1]}  \n")
    assert run.models_in(str(listed)) == models


@pytest.mark.parametrize("change", ["config", "tokenizer", "show", "text"])
def test_no_unit_of_another_config_vocabulary_or_text_is_taken_up(models, tmp_path, change):
    """The first run is one of three shards, whose units stay; the second would find them if its name were the same."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    asked = {
        "analyzers": ["symmetry"],
        "tokens": 8,
        "sequences": 2,
        "text": [str(text)],
        "work": str(tmp_path / "work"),
    }
    attnlens.inspect(models[0], **asked, shard="1/1")
    more = {"show": "attention"} if change == "show" else {}
    folder = tmp_path / "a"
    if change == "config":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"scale_attn_by_inverse_layer_idx": True}))
    elif change == "tokenizer":
        told = json.loads((folder / "tokenizer.json").read_text())
        words = told["model"]["vocab"]
        words["e"], words["o"] = words["o"], words["e"]
        (folder / "tokenizer.json").write_text(json.dumps(told))
    elif change == "text":
        text.write_text("pack my box with five dozen liquor jugs, said he. " * 20)
    found = attnlens.inspect(models[0], **asked, **more)
    fresh = attnlens.inspect(models[0], **asked | {"work": str(tmp_path / "other")}, **more)
    assert found.heads == fresh.heads
    assert found.attention == fresh.attention
    assert bool(found.attention) == (change == "show")


def test_a_dry_run_tells_what_the_files_hold_of_queries_and_keys(models):
    cost = run.estimated(models[0], {"source": "weights"})
    per_layer = 4 * (24 * 72 + 72)  # GPT-2's matrix and bias of queries, keys and values are one each
    assert (cost.sites, cost.heads, cost.units, cost.bytes) == (2, 8, 2, 2 * per_layer)
    assert cost.stored > cost.bytes
    assert cost.seconds > 0
    assert "jobs" not in cost.lines()[-1]
    assert "s by 2 jobs" in run.estimated(models[0], {"source": "weights", "jobs": 4}).lines()[-1], (
        "there are two units"
    )
    refused(UsageError, lambda: run.estimated(models[0], {}), "--source weights")


def test_an_adapter_is_never_left_out_of_a_model_that_is_read_from_its_files(models, monkeypatch, tmp_path):
    from attnlens.models import memory

    refused(ModelError, lambda: attnlens.load(models[0], from_files=True, adapter=tmp_path), "not loaded")
    monkeypatch.setattr(memory, "free_memory", lambda: 1)
    report = attnlens.inspect(models[0], **WEIGHTS)
    assert "does not fit into memory" in report.settings.notes[0]
    assert report.model.files == []
    assert report.model.files_in_parts != []
    refused(TooLargeError, lambda: attnlens.inspect(models[0]), "takes 0.0 GiB")


LITTLE = """
import sys
from attnlens.models import memory
memory.free_memory = lambda: 1
sys.argv[0] = "attnlens"
from attnlens.cli import main
main()
"""
"""The program where no memory is free; what its workers find free is as it is."""


@pytest.mark.parametrize("more", [(), ("--jobs", "2"), ("--shard", "1/1")], ids=["here", "elsewhere", "shard"])
def test_the_program_leaves_a_model_in_its_files_that_does_not_fit(more, models, tmp_path):
    words = ("inspect", models[0], "--source", "weights", "--analyzer", "symmetry", "--no-progress", "--json")
    done = python("-c", LITTLE, *words, tmp_path / "r.json", *more)
    assert done.returncode == 0, done.stderr
    assert "does not fit into memory" in done.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["model"]["files_in_parts"]
    assert report["heads"] == json.loads(attnlens.inspect(models[0], **WEIGHTS, from_files=True).to_json())["heads"]
    refused_there = python("-c", LITTLE, "inspect", models[0])
    ended(refused_there, "takes 0.0 GiB of memory", "--source weights --from-files")


def test_a_shard_that_was_loaded_and_one_of_files_are_told_apart_in_words(models, tmp_path):
    for number, way in ((1, False), (2, True)):
        report = attnlens.inspect(models[0], **WEIGHTS, shard=f"{number}/2", from_files=way, work=tmp_path / "work")
        (tmp_path / f"{number}.json").write_text(report.to_json())
    reports = [str(tmp_path / f"{number}.json") for number in (1, 2)]
    refused(UsageError, lambda: run.merge(*reports), "loaded in one", "--from-files")


def test_a_hub_model_whose_branch_has_moved_is_read_again(hub, read, tmp_path, monkeypatch):
    for commit, count in ((fake_hub.COMMIT, 1), (fake_hub.COMMIT, 0), ("f" * 40, 1)):
        monkeypatch.setattr(fake_hub, "COMMIT", commit)
        read.clear()
        (outcome,) = run.inspect_each([fake_hub.OPEN], tmp_path / "reports", **WEIGHTS, work=tmp_path / "work")
        assert len(read) == count, commit
        assert json.loads(outcome.report.read_text())["model"]["revision"] == commit
    read.clear()
    run.inspect_each([fake_hub.OPEN], tmp_path / "reports", **WEIGHTS, work=tmp_path / "work", offline=True)
    assert read == [fake_hub.OPEN], "other options; the cache says the commit"
    (gone,) = run.inspect_each(["someone/else"], tmp_path / "reports", **WEIGHTS, work=tmp_path / "work")
    assert gone.report is None
    assert "someone/else" in gone.said


def test_a_longer_list_reads_the_new_models_alone(models, read, tmp_path):
    run.inspect_each(models[:1], tmp_path / "reports", **WEIGHTS)
    read.clear()
    run.inspect_each(models, tmp_path / "reports", **WEIGHTS)
    assert read == models[1:]


def test_a_model_of_which_a_unit_failed_is_read_again(models, read, tmp_path, monkeypatch):
    honest = several.inspected
    monkeypatch.setattr(several, "inspected", lambda *given: (honest(*given)[0], lambda: False))
    assert run.inspect_each(models[:1], tmp_path / "reports", **WEIGHTS)[0].report is not None
    monkeypatch.setattr(several, "inspected", honest)
    read.clear()
    run.inspect_each(models[:1], tmp_path / "reports", **WEIGHTS)
    assert read == models[:1]


def test_a_quiet_program_names_the_model_that_has_no_report(models, tmp_path):
    (tmp_path / "list.txt").write_text(f"{models[0]}\n{tmp_path / 'gone'}\n")
    words = "--source", "weights", "--analyzer", "symmetry", "-q"
    done = attnlens_program("inspect", "--models", tmp_path / "list.txt", "--reports", tmp_path / "reports", *words)
    assert (done.returncode, done.stdout) == (0, "")
    first, second = done.stderr.splitlines()
    assert first.startswith(f"{tmp_path / 'gone'}: ")
    assert second == "1 of 2 models have no report."
