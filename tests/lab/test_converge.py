"""Tests that a series reads what each checkpoint reads alone, and experiments run as they were asked for."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from checkpoints import checkpoint, other_shape
from program import DEMO
from safetensors.torch import load_file, save_file

import attnlens
from attnlens.errors import ModelError, UsageError
from attnlens.lab.reproduce import ROWS, run_rows
from attnlens.records import Experiment
from attnlens.runs.progress import Interrupted, silent
from attnlens.runs.series import demo_checkpoints, parse_step, refuse_different_heads

SMALL = {"windows": 2, "length": 32}
WEIGHTS = {"source": "weights", "analyzers": ["symmetry", "spectrum"], "layers": [0, 1]}
STEPS = [0, 30, 100, 300, 1000, 3000, 6000]


def trajectory(experiment: Experiment, measure: str, layer: int, head: int) -> list[float | None]:
    (values,) = [t.values for t in experiment.trajectories if (t.measure, t.layer, t.head) == (measure, layer, head)]
    return values


@pytest.fixture(scope="module")
def of_weights() -> attnlens.Report:
    return attnlens.converge_checkpoints(**WEIGHTS)


def test_demos_own_series_has_its_seven_steps(of_weights):
    (experiment,) = of_weights.experiments
    assert (experiment.name, experiment.axis) == ("training", "training step")
    assert all(curve.steps == STEPS for curve in experiment.curves.values())
    assert (of_weights.command, of_weights.model.id) == ("converge", "demo")
    assert of_weights.coverage.sentence == "COMPLETE: 16 of 16 heads"
    assert len([t for t in experiment.trajectories if t.measure == "weights.symmetry"]) == 16
    names = [file.name for file in of_weights.model.files]
    assert names[:2] == ["step-00000/model.safetensors", "step-00030/model.safetensors"]
    null = attnlens.inspect("demo", **WEIGHTS).summary.median_nulls["weights.symmetry"]
    curve = experiment.curves["weights.symmetry: null"]
    assert experiment.null("weights.symmetry") == curve
    assert experiment.null("tokens.entropy") is None
    assert curve.median[-1] == pytest.approx(null.mean, rel=1e-9)
    assert curve.high[-1] - curve.median[-1] == pytest.approx(null.sd, rel=1e-9)
    assert experiment.final["loss"] is None
    assert experiment.reasons["loss"] == "the loss requires a text, but only weights were read"


def test_each_checkpoint_reads_what_inspect_reads_of_it_alone(of_weights):
    (experiment,) = of_weights.experiments
    for place, step in ((2, 100), (5, 3000)):
        alone = attnlens.inspect(checkpoint(step), **WEIGHTS)
        for measure in ("weights.symmetry", "weights.effective_rank"):
            for head in alone.heads:
                assert trajectory(experiment, measure, head.layer, head.head)[place] == head.measures[measure].value
            medians = experiment.curves[measure].median
            assert medians[place] == pytest.approx(alone.summary.medians[measure], rel=1e-12)
            assert medians[place - 1] != pytest.approx(alone.summary.medians[measure], rel=1e-6), "the control"


def test_all_checkpoints_read_one_text_with_one_tokenizer():
    names = [checkpoint(100), "demo"]
    read = {**SMALL, "placement": "first"}
    report = attnlens.converge_checkpoints(names, analyzers=["symmetry"], source="tokens", **read)
    (experiment,) = report.experiments
    final = attnlens.load("demo")
    early = replace(attnlens.load(checkpoint(100)), tokenizer=final.tokenizer, tokenizer_problem="")
    for place, loaded in enumerate((early, final)):
        alone = attnlens.inspect(loaded, analyzers=["symmetry"], source="tokens", **read)
        assert report.settings.text == alone.settings.text
        for head in alone.heads:
            own = trajectory(experiment, "tokens.share_key", head.layer, head.head)[place]
            assert own == pytest.approx(head.measures["tokens.share_key"].value, rel=1e-12)
    losses = experiment.curves["loss"].median
    assert losses[0] > losses[1] + 0.5, "training lowers the loss"
    assert experiment.trajectories[0].se is not None


def test_selection_is_followed_where_nothing_is_named():
    report = attnlens.converge_checkpoints([checkpoint(3000), "demo"], head=(1, 0), windows=1, length=16)
    trajectories = report.experiments[0].trajectories
    assert "selection.efficiency" in {each.measure for each in trajectories}
    assert {(each.layer, each.head) for each in trajectories} == {(1, 0)}
    assert report.settings.select == "argmax"


def test_a_name_contains_its_step():
    steps = {"step-00030": 30, "out/checkpoint-500": 500, "step1000": 1000, "step1000-tokens2B": 1000}
    steps |= {"org/model@step7": 7, "a": None, "demo": 6000}
    assert {name: parse_step(name) for name in steps} == steps


def test_checkpoints_are_ordered_by_steps_if_they_have_them(tmp_path):
    stages = []
    series = partial(attnlens.converge_checkpoints, source="weights", analyzers=["symmetry"])
    names = [checkpoint(300), checkpoint(0)]
    report = series(names, head="3.2", progress=lambda stage, *_: stages.append(stage))
    assert report.experiments[0].settings["checkpoints"] == ["step-00000", "step-00300"]
    assert {(t.layer, t.head) for t in report.experiments[0].trajectories} == {(3, 2)}, "a head written as a word"
    assert list(dict.fromkeys(stages)) == ["checkpoints", "step-00000, weights", "step-00300, weights"]
    for name, step in (("late", 300), ("early", 0)):
        shutil.copytree(checkpoint(step), tmp_path / name)
    (experiment,) = series([str(tmp_path / "late"), str(tmp_path / "early")]).experiments
    assert experiment.settings["checkpoints"] == ["late", "early"], "in the caller's order"
    assert (experiment.axis, experiment.curves["weights.symmetry"].steps) == ("checkpoint", [0, 1])


def broken(tmp_path: Path, *tensors: str) -> str:
    """A checkpoint of the demo in which these tensors hold NaN."""
    folder = tmp_path / "step-00100"
    shutil.copytree(checkpoint(100), folder)
    weights = load_file(folder / "model.safetensors")
    for name in tensors or tuple(weights):
        weights[name] = torch.full_like(weights[name], torch.nan)
    (folder / "model.safetensors").chmod(0o644)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_a_checkpoint_of_nan_is_named_where_its_heads_are_missing(tmp_path):
    names = [checkpoint(30), broken(tmp_path, "transformer.h.1.attn.c_attn.weight")]
    for file in DEMO.glob("tokenizer*"):
        shutil.copy(file, names[1])
    report = attnlens.converge_checkpoints(names, head=(3, 2), analyzers=["symmetry"], **SMALL)
    assert report.coverage.skipped
    assert all(entry.reason.startswith("in step-00100, ") for entry in report.coverage.skipped)
    assert "in step-00100" in report.coverage.sentence
    assert "step-00030" not in report.coverage.sentence
    assert "the loss is NaN" in report.experiments[0].reasons["loss"]
    shutil.rmtree(names[1])
    with pytest.raises(ModelError, match=r"step-00100: No head could be analysed"):
        attnlens.converge_checkpoints([checkpoint(30), broken(tmp_path)], source="weights", analyzers=["symmetry"])


def test_what_every_checkpoint_lacks_names_none_of_them(tmp_path):
    folders = [tmp_path / "step-00030", tmp_path / "step-00100"]
    for folder, step in zip(folders, (30, 100), strict=True):
        shutil.copytree(checkpoint(step), folder, ignore=shutil.ignore_patterns("tokenizer*"))
    report = attnlens.converge_checkpoints(list(map(str, folders)), analyzers=["symmetry"], **SMALL)
    reasons = {entry.reason for entry in report.coverage.skipped}
    assert {reason.partition(":")[2] for reason in reasons} == {" no checkpoint has tokenizer files"}
    assert not any("step" in reason for reason in reasons)
    assert "no checkpoint has tokenizer files" in report.experiments[0].reasons["loss"]


def stop(*_words: object) -> None:
    raise KeyboardInterrupt


def test_a_series_that_is_interrupted_before_its_first_checkpoint_has_nothing_to_report():
    with pytest.raises(KeyboardInterrupt) as nothing:
        attnlens.converge_checkpoints(source="weights", analyzers=["symmetry"], progress=stop)
    assert not isinstance(nothing.value, Interrupted)


def no_work(*_words: object) -> None:
    pytest.fail("the work began")


NO_HEADS = (3, (3,), "3", (1, 2, 3), "3.x", (0, -1), (1.5, 2), True, "", ("3", "2"))
CHECKPOINTS = partial(attnlens.converge_checkpoints, progress=no_work)
SYNTHETIC = partial(attnlens.converge_synthetic, progress=no_work)
REFUSED = [  # refusal, call
    *(("does not name a head", partial(attnlens.converge_head, "demo", head=head)) for head in NO_HEADS),
    (
        "--head cannot be combined with --layers or --heads",
        partial(CHECKPOINTS, demo_checkpoints(), head=(0, 1), layers=[0]),
    ),
    ("a single hub model", partial(CHECKPOINTS, revisions=["step1", "step2"])),
    ("Unknown option 'trials'", partial(CHECKPOINTS, "demo", trials=3)),
    *(("at least two checkpoints", partial(CHECKPOINTS, few)) for few in ([checkpoint(30)], [], (), iter([]))),
    ("Duplicate checkpoint", partial(CHECKPOINTS, [checkpoint(30), checkpoint(30)])),
    ("Did you mean 'iterations'", partial(SYNTHETIC, iteration=10)),
    ("Did you mean 'rank'", partial(SYNTHETIC, experiments="ranc")),
    ("trials=0", partial(SYNTHETIC, trials=0)),
]


def test_what_makes_no_sense_is_refused_before_the_work(tmp_path):
    shapes = partial(CHECKPOINTS, [checkpoint(30), other_shape(tmp_path, n_head=4)])
    nowhere = partial(CHECKPOINTS, [checkpoint(30), str(DEMO / "checkpoints" / "step-99999")])
    models = [("n_head is 8 in step-00030, but 4 in step-77", shapes), ("There is no such folder", nowhere)]
    for error, refused in ((UsageError, REFUSED), (ModelError, models)):
        for says, call in refused:
            with pytest.raises(error, match=says):
                call()


def experiment(name: str, passed: bool | None = True) -> Experiment:
    return Experiment(name=name, question="?", final={"x": 1.0}, passed=passed)


def test_different_heads_are_refused_even_if_they_are_equally_many():
    eight_in_two = attnlens.inspect("demo", **WEIGHTS)
    two_in_eight, encoder = (
        eight_in_two.model_copy(update={"heads": [head.model_copy(update=change(head)) for head in eight_in_two.heads]})
        for change in (lambda head: {"layer": head.head, "head": head.layer}, lambda _: {"part": "encoder"})
    )
    refuse_different_heads(["a", "b"], [eight_in_two, eight_in_two])
    for other, says in (
        (two_in_eight, r"different heads: a has head 0\.2 \(decoder\), but b lacks it\."),
        (encoder, r"different heads: a has head 0\.0 \(decoder\), but b lacks it\."),
    ):
        with pytest.raises(ModelError, match=says):
            refuse_different_heads(["a", "b"], [eight_in_two, other])
    more = eight_in_two.model_copy(update={"heads": [*eight_in_two.heads, two_in_eight.heads[-1]]})
    with pytest.raises(ModelError, match=r"different heads: b has head 7\.1 \(decoder\), but a lacks it\."):
        refuse_different_heads(["a", "b"], [eight_in_two, more])


def test_experiments_are_timed_and_an_interruption_keeps_the_finished():
    report = run_rows("reproduce", [lambda: [experiment("one")], lambda: [experiment("two")]], 3, 10)
    assert [each.name for each in report.experiments] == ["one", "two"]
    assert set(report.timings) == {"one", "two"}
    assert (report.command, report.settings.seed, report.model.parameters) == ("reproduce", 3, 100)
    assert report.model.id == "one-layer attention (synthetic)"
    with pytest.raises(Interrupted) as caught:
        run_rows("reproduce", [lambda: [experiment("one")], stop], 0, 10)
    assert [each.name for each in caught.value.report.experiments] == ["one"]


def test_one_experiment_runs_with_its_settings():
    report = attnlens.converge_synthetic("feasibility", quick=True, trials=3, n=3, t=3, d=2)
    (feasibility,) = report.experiments
    assert feasibility.passed is None, "other sizes than the published ones have no verdict"
    assert feasibility.settings["trials"] == 3
    assert report.model.parameters == 4


def test_every_experiment_is_a_row_of_verify_and_the_golden_ones_pass():
    assert len(ROWS) == 7 + 1 + 3, "and one of binary kernels, and three of the kernel SVD"
    (golden,) = ROWS[0](True, 0, silent)  # the golden instances need no options
    assert golden.passed
    assert len(golden.final) >= 8
    spoiled = golden.model_copy(update={"final": {name: (value or 0) + 2e-6 for name, value in golden.final.items()}})
    assert spoiled.judge().passed is False, "the control"
