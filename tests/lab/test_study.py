"""Tests of training, units of work, and `study` through its real entry point."""

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import forkserver
import planted_tasks as planted
import pytest
import torch
from program import environment_with, python

from attnlens.lab.study.cells import build_cell, build_table, prepare_training
from attnlens.lab.study.examples import Reversal, StudyTask, score
from attnlens.lab.study.tables import SCALES, TABLES, PaperCell, PaperTable
from attnlens.lab.study.tasks import translation
from attnlens.lab.study.units import RunOutcome, TrainingUnit, build_model, hash_task, train
from attnlens.models.kernel_transformers import AttentionForm
from attnlens.report.report import read_report
from attnlens.runs.store import Store
from attnlens.runs.work import NOTHING_KEPT, WorkPlan, run_units

SMALL = replace(SCALES["tiny"], layers=1, d_model=32, d_forward=64, heads=2, batch=64, looks=2)
PLACED = AttentionForm(positions="sum", in_value=True)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def reached(task, form, steps, rate=1e-2):
    """The test scores of a small model after so many steps, and why it did not converge."""
    unit = TrainingUnit(task.name, form, SMALL, rate, steps, 0, tested=True)
    model = build_model(unit, task)
    trained = train(model.core, task, unit)
    return score(task, model.core, "test", 64), trained


def test_positions_are_needed_where_order_decides_and_nowhere_else():
    order, bag = planted.before(), planted.majority()
    assert reached(order, PLACED, 120)[0]["accuracy"] > 0.95
    assert reached(order, AttentionForm(), 120)[0]["accuracy"] < 0.62  # chance is 1/2 by Proposition 1
    assert reached(bag, AttentionForm(), 80)[0]["accuracy"] > 0.95


@pytest.mark.full
def test_the_exponential_kernel_beats_the_quadratic_one_where_its_rank_is_needed():
    task = planted.angles()
    exponential, quadratic = (
        reached(task, AttentionForm(kernel=k), 300)[0]["accuracy"] for k in ("exponential", "polynomial")
    )
    assert exponential > quadratic + 0.1


def test_labels_that_are_permuted_are_guessed_by_chance():
    """Control of every classification: with the labels in their places the same training reads them."""
    scores, _ = reached(planted.permuted(planted.majority(), 0), AttentionForm(), 80)
    assert abs(scores["accuracy"] - 0.5) < 4 * 0.5 / 256**0.5


def test_divergence_is_a_result():
    task, linear = Reversal(evaluated=32), replace(PLACED, kernel="linear")
    trained = reached(task, linear, 20, rate=20.0)[1]
    assert trained.problem
    assert trained.loss == float("inf")
    assert not reached(task, linear, 20, rate=1e-2)[1].problem


class KilledError(Exception):
    """Stands for a kill between two looks."""


def test_a_run_that_was_killed_goes_on_as_if_it_was_not(tmp_path):
    """Same seed, same outcome; after a kill the weights, moments, order and dropout are those of the unbroken run."""
    task, scale = planted.majority(), replace(SMALL, dropout=0.2, looks=3)
    unit = TrainingUnit(task.name, AttentionForm(), scale, 1e-2, 12, 3, tested=True)

    def weights(state=None, kill=None, looked=None):
        model = build_model(unit, task)

        def watch(step):
            if looked is not None:
                looked.append(step)
            if step == kill:
                raise KilledError
            return {}

        train(model.core, task, unit, state, watch)
        return model.state_dict()

    whole, again = weights(), weights()
    with pytest.raises(KilledError):
        weights(Store(tmp_path, {}), kill=8)
    looked: list[int] = []
    resumed = weights(Store(tmp_path, {}), looked=looked)
    assert looked == [8, 12], "from its last look"
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    other = build_model(replace(unit, seed=4), task)
    assert not all(torch.equal(whole[name], value) for name, value in other.state_dict().items())


def test_a_units_outcome_is_kept_under_all_that_decides_it(tmp_path):
    task, store = planted.majority(), Store(tmp_path, {"command": "study"})
    unit = TrainingUnit(task.name, AttentionForm(), SMALL, 1e-2, 4, 0, tested=True, watched=True)
    name = unit.name(hash_task(task))
    first = run_units([name], prepare_training(lambda: [task], {name: unit}, store)[1], NOTHING_KEPT, store)
    again = run_units([name], lambda _: pytest.fail("It was trained."), NOTHING_KEPT, store)
    found, loaded = (RunOutcome(**outcome.values[name]) for outcome in (first, again))
    assert list(map(list, loaded.curve)) == list(map(list, found.curve))
    assert replace(loaded, curve=found.curve) == found
    assert found.watched[0].keys() >= {"weights.symmetry", "tokens.share_skew", "selection.decided"}
    assert not store.inside(name).folder.exists(), "the state of a finished run is not needed"
    for other in (replace(unit, form=PLACED), replace(unit, seed=1), replace(unit, scale=replace(SMALL, batch=8))):
        assert other.name(hash_task(task)) != name
    assert replace(unit, scale=replace(SMALL, rates=(1.0,))).name(hash_task(task)) == name


def test_other_processes_train_what_this_one_trains(tmp_path):
    task = planted.majority()
    units = {f"seed {seed}": TrainingUnit(task.name, PLACED, SMALL, 1e-2, 4, seed, tested=True) for seed in (0, 1)}
    found = []
    for jobs in (1, 2):
        store = Store(tmp_path / str(jobs), {"command": "study"})
        compute = prepare_training(lambda: [task], units, store)[1]
        elsewhere = prepare_training, (made, units, store)
        with forkserver.workers():
            found.append(run_units(list(units), compute, WorkPlan(jobs=jobs), store, elsewhere=elsewhere).values)
    for name in units:
        first, second = (values[name] | {"seconds": 0.0} for values in found)
        assert list(map(list, first.pop("curve"))) == list(map(list, second.pop("curve")))
        assert first == second


def made():
    """The tasks, in another process."""
    return [planted.majority()]


FAST = 1000.0, 0.5


def outcome(loss, problem=""):
    scores = {} if problem else {"loss": loss, "perplexity": 2.0**loss}
    return RunOutcome([(0, 5.0), (10, loss)], [], problem, scores, 100, 10, 640, 2.0)


SENTENCES = StudyTask(name="words", form="language", cases={}, length=8, vocabulary=10)
UNIT = TrainingUnit("words", AttentionForm(), SMALL, 1e-2, 10, 0, tested=True)


def built(cell, outcomes):
    return build_cell(cell, SENTENCES, UNIT, outcomes, [(1e-2, 1.0)], FAST, 0)


def table_of(cells, results):
    return build_table(PaperTable("t", "q?", "s", tuple(cells)), "tiny", {"language": SMALL}, [SENTENCES], results)


def test_a_tables_order_is_set_beside_the_published_one():
    """Our a < b < c with small noise, published b < a < c: one pair of three is decided the other way."""

    cells = [
        PaperCell(name, "language", (AttentionForm(),), value) for name, value in (("a", 2.0), ("b", 1.0), ("c", 3.0))
    ]
    cells.append(PaperCell("d", "language", (AttentionForm(kernel="linear"),), diverged=True))
    runs = {"a": [1.0, 1.01, 0.99], "b": [2.0, 2.02, 2.01], "c": [3.0, 2.99, 3.01]}
    found = [built(cell, [outcome(loss) for loss in runs[cell.name]]) for cell in cells[:3]]
    broken = outcome(9.0, "its loss was not finite at step 3"), outcome(1.0), outcome(1.0)
    told = table_of(cells, [*found, built(cells[3], broken)])
    (ordering,) = told.orderings
    assert (ordering.agree, ordering.disagree, ordering.undecided) == (2, 1, 0)
    assert ordering.tau == pytest.approx(1 / 3)
    assert told.cells[0].mean == pytest.approx(torch.tensor(1.0).exp().item())
    assert told.cells[3].mean is None
    assert "1 of 3 runs did not converge" in told.cells[3].problem


def test_every_table_has_cells_of_kernels_that_exist_and_names_each_once():
    from attnlens.kernels import parsed

    for table in TABLES.values():
        names = [(cell.task, cell.name) for cell in table.cells]
        assert len(set(names)) == len(names)
        for cell in table.cells:
            parsed(cell.forms[0].kernel)


@pytest.fixture(scope="module")
def shrunk(tmp_path_factory):
    """An environment in which `tiny` is smaller still, for the program in a process of its own."""
    folder = tmp_path_factory.mktemp("shrunk")
    (folder / "run.py").write_text(
        "import sys\nfrom dataclasses import replace\nfrom attnlens.lab.study import tables\n"
        "tiny = tables.SCALES['tiny']\n"
        "tables.SCALES['tiny'] = replace(tiny, layers=1, d_model=32, d_forward=32, heads=2, steps=30, search_steps=6, "
        "rates=(1e-2, 2e-2), seeds=2, looks=3, length=24, vocabulary=270, evaluated=16)\n"
        "if __name__ == '__main__':\n    from attnlens.cli import main\n    main()\n"
    )
    (folder / "text.txt").write_text("In the beginning God created the heaven and the earth.\n" * 400)
    return folder


WORDS = (
    "reproduce",
    "kernels",
    "--text",
    "text.txt",
    "--cells",
    "language/exp*",
    "--cells",
    "language/rbf, a*",
    "--jobs",
    "1",
)


def program(shrunk, *words):
    return python("run.py", *words, cwd=shrunk)


def told(path):
    """The report without what differs from run to run."""
    report = json.loads(path.read_text())
    for cell in report["studies"][0]["cells"]:
        cell.pop("tokens_per_second")
        cell.pop("beside_sdpa")
        for run in cell["runs"]:
            run.pop("seconds")
    return report["studies"]


@pytest.mark.full
def test_a_study_that_was_killed_ends_with_the_report_of_one_that_was_not(shrunk):
    done = program(shrunk, *WORDS, "--work", "whole", "--json", "whole.json", "--figure", "pictures", "--save", "cells")
    assert done.returncode == 0, done.stderr
    assert "exponential, asymmetric" in done.stdout
    assert (shrunk / "pictures" / "overview.png").stat().st_size > 10_000
    assert len(list((shrunk / "cells" / "kernels").glob("*/*/step-*"))) == 3 * 4
    words = ["run.py", *WORDS, "--work", "killed", "--json", "killed.json", "--save", "again"]
    command = [forkserver.commands() / "python", *words]
    with subprocess.Popen(command, env=environment_with(), cwd=shrunk, stdout=subprocess.PIPE) as process:
        while process.poll() is None and len(list((shrunk / "killed").glob("study/*.safetensors"))) < 4:
            threading.Event().wait(0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()  # until nobody can write any more
    assert not (shrunk / "killed.json").exists()
    assert program(shrunk, *WORDS, *words[-6:]).returncode == 0
    assert told(shrunk / "killed.json") == told(shrunk / "whole.json")
    report = read_report(shrunk / "whole.json")
    assert {cell.name for cell in report.studies[0].cells} == {
        *("exponential, asymmetric", "exponential, symmetric", "rbf, asymmetric")
    }
    assert all(cell.heads["tokens.entropy"].median for cell in report.studies[0].cells)


BAD = {
    "no table of that name": (["kernel"], "kernels"),
    "no cell of that name": (["kernels", "--cells", "language/*", "--cells", "gauss"], "No cell matches gauss"),
    "a file that nothing is trained on": (
        ["kernels", "--labelled", "two.tsv"],
        "None of the selected cells uses --labelled",
    ),
    "a file that is not there": (["kernels", "--pairs", "nowhere.tsv"], "nowhere.tsv"),
    "a text shorter than a window": (["kernels", "--text", "short.txt"], "too short"),
    "a table without its task": (["primal", "--cells", "classification/*"], "No cell matches"),
    "work in a file": (["kernels", "--work", "text.txt"], "Finished units cannot be kept in text.txt"),
    "cells in a folder that is not empty": (["kernels", "--save", "."], "not an empty folder"),
    "a scale that is none": (["kernels", "--scale", "huge"], "huge"),
    "a report over its own data": (["kernels", "--pairs", "text.txt", "--json", "text.txt"], "which --pairs reads"),
    "one file for two tasks": (
        ["dimension", "--pairs", "two.tsv", "--labelled", "two.tsv"],
        "Two tasks have the same name, two.tsv",
    ),
    "no seed at all": (["kernels", "--seeds", "0"], "--seeds"),
}


@pytest.mark.parametrize("fault", BAD)
def test_what_makes_no_sense_is_refused_in_two_lines(fault, shrunk):
    (shrunk / "short.txt").write_text("Short.\n")
    (shrunk / "two.tsv").write_text("".join(f"number {n}\t{n % 2}\n" for n in range(60)))
    words, said = BAD[fault]
    done = program(shrunk, "reproduce", *words)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.strip().splitlines() if "KJV" not in line]) <= 3


@pytest.mark.full
def test_an_interrupted_study_ends_with_130_and_keeps_what_is_finished(shrunk):
    words = [sys.executable, "run.py", *WORDS[:-1], "2", "--work", "stopped"]
    with subprocess.Popen(
        words,
        env=environment_with(),
        cwd=shrunk,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        while process.poll() is None and len(list((shrunk / "stopped").glob("study/*.safetensors"))) < 2:
            threading.Event().wait(0.02)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert b"Finished runs are kept: repeat the command to resume.\nInterrupted." in said
    assert b"Traceback" not in said
    assert len(list((shrunk / "stopped").glob("study/*.safetensors"))) >= 2


def test_a_saved_translator_is_opened_again_by_inspect_and_by_transformers(tmp_path):
    """Eq. 9 in all three kinds of attention; found by its class, its start token known; no form is named as such."""
    from transformers import AutoModelForSeq2SeqLM

    import attnlens
    from attnlens.errors import ModelError
    from attnlens.lab.study.units import save_step

    lines = [f"{n}\tzahl {n} und {n % 7}\tnumber {n} and {n % 7}\n" for n in range(120)]
    (tmp_path / "pairs.tsv").write_text("".join(lines))
    task = translation(tmp_path / "pairs.tsv", replace(SMALL, length=24, vocabulary=270))
    form = AttentionForm(positions="symmetric product")
    model = build_model(TrainingUnit(task.name, form, SMALL, 1e-2, 1, 0), task)
    save_step(model, task, tmp_path, 3)
    opened = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "step-000003")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in opened.state_dict().items())
    report = attnlens.inspect(tmp_path / "step-000003", windows=2, length=16, analyzers=("spectrum",))
    assert {head.part for head in report.heads} == {"encoder", "decoder", "cross"}
    config = tmp_path / "step-000003" / "config.json"
    for field, value in {"positions": "tabel", "places": "decoder", "symmetric": "no", "strange": 1}.items():
        told = json.loads(config.read_text())
        config.write_text(json.dumps(told | {"form": told["form"] | {field: value}}))
        with pytest.raises(ModelError, match=f"form.{field}"):
            attnlens.inspect(tmp_path / "step-000003", windows=2, length=16)
        config.write_text(json.dumps(told))


def test_no_form_has_two_published_numbers_on_one_task_of_a_paper():
    known = {}
    for table in TABLES.values():
        for cell in table.cells:
            if cell.published is not None and table.name != "primal":
                place = table.source.partition(",")[0], cell.task, cell.forms
                assert known.setdefault(place, cell.published) == cell.published, (table.name, cell.name)


def test_a_validation_loss_that_is_no_number_ends_the_run():
    task = planted.majority()
    unit = TrainingUnit(task.name, AttentionForm(), SMALL, 0.0, 4, 0)
    model = build_model(unit, task)

    def spoil(step):
        if step:
            torch.nn.init.constant_(model.core.classes.weight, torch.nan)
        return {}

    trained = train(model.core, task, unit, watch=spoil)
    assert "not finite at step" in trained.problem


def test_the_interval_of_tau_holds_the_true_one_however_near_cells_are():
    """Six cells whose true order is the published one, at distances from far below the noise to far beyond it."""
    cells = [PaperCell(str(n), "language", (AttentionForm(),), float(n)) for n in range(6)]
    made = torch.Generator().manual_seed(0)
    inside, widths = [], {}
    for gap in (0.02, 0.4, 1.0, 8.0):
        for _ in range(40):
            losses = 3 + 0.01 * (gap * torch.arange(6.0)[:, None] + torch.randn(6, 3, generator=made))
            found = [built(cell, [*map(outcome, row)]) for cell, row in zip(cells, losses.tolist(), strict=True)]
            (told,) = table_of(cells, found).orderings
            inside.append(told.low <= 1 <= told.high)
            widths[gap] = told.high - told.low
    assert sum(inside) / len(inside) >= 0.95
    assert widths[8.0] < 0.5 < 1.5 < widths[0.02]
