"""Tests of training, units of work and tables of a study, and of the program that trains them."""

import json
from dataclasses import replace

import forkserver
import planted_tasks as planted
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

import attnlens
from attnlens.cli.entry import exit_code
from attnlens.errors import ModelError
from attnlens.kernels import parsed
from attnlens.lab.study import cells as cells_module
from attnlens.lab.study.cells import build_cell, build_table, prepare_training
from attnlens.lab.study.examples import Reversal, StudyTask, score
from attnlens.lab.study.tables import SCALES, TABLES, PaperCell, PaperTable
from attnlens.lab.study.tasks import translation
from attnlens.lab.study.units import RunOutcome, TrainingUnit, build_model, hash_task, save_step, train
from attnlens.models.kernel_transformers import AttentionForm
from attnlens.report.report import read_report
from attnlens.runs.store import Store
from attnlens.runs.work import NOTHING_KEPT, WorkPlan, run_units

SMALL = replace(SCALES["tiny"], layers=1, d_model=32, d_forward=64, heads=2, batch=64, looks=2)
SUM, PLAIN = AttentionForm(positions="sum", in_value=True), AttentionForm()


def unit_of(task, form=PLAIN, rate=1e-2, steps=4, seed=0, scale=SMALL, **more):
    return TrainingUnit(task.name, form, scale, rate, steps, seed, **more)


def reached(task, form, steps, rate=1e-2):
    """The test scores of a small model after so many steps, and its outcome."""
    unit = unit_of(task, form, rate, steps, tested=True)
    model = build_model(unit, task)
    outcome = train(model.core, task, unit)
    return score(task, model.core, "test", 64), outcome


# --- training ---------------------------------------------------------------------------------------------------------
def test_positions_are_needed_only_if_order_decides():
    order, bag = planted.before(), planted.majority()
    assert reached(order, SUM, 60)[0]["accuracy"] > 0.95
    assert reached(order, PLAIN, 60)[0]["accuracy"] < 0.62, "chance is 1/2 by Proposition 1"
    assert reached(bag, PLAIN, 30)[0]["accuracy"] > 0.95
    draws = torch.Generator().manual_seed(0)
    mixed = {
        part: cases._replace(targets=cases.targets[torch.randperm(len(cases.targets), generator=draws)])
        for part, cases in bag.cases.items()
    }
    accuracy = reached(replace(bag, cases=mixed), PLAIN, 30)[0]["accuracy"]
    assert abs(accuracy - 0.5) < 4 * 0.5 / 256**0.5, "the control: permuted labels are guessed by chance"


@pytest.mark.full
def test_the_exponential_kernel_beats_the_quadratic_one_if_its_rank_is_needed():
    exponential, quadratic = (
        reached(planted.angles(), AttentionForm(kernel=k), 300)[0]["accuracy"] for k in ("exponential", "polynomial")
    )
    assert exponential > quadratic + 0.1


def test_divergence_is_a_result():
    task, linear = Reversal(evaluated=32), replace(SUM, kernel="linear")
    diverged = reached(task, linear, 20, rate=20.0)[1]
    assert diverged.problem
    assert diverged.loss == float("inf")
    assert not reached(task, linear, 20, rate=1e-2)[1].problem
    task = planted.majority()
    model = build_model(unit_of(task, rate=0.0), task)

    def spoil(step):
        if step:
            torch.nn.init.constant_(model.core.classes.weight, torch.nan)
        return {}

    assert "not finite at step" in train(model.core, task, unit_of(task, rate=0.0), watch=spoil).problem


class KilledError(Exception):
    """Stands for a kill between two evaluations."""


def test_a_killed_run_resumes_from_its_last_evaluation(tmp_path):
    """Weights, moments, order and dropout are those of the unbroken run."""
    task, looked = planted.majority(), []
    unit = unit_of(task, steps=12, seed=3, scale=replace(SMALL, dropout=0.2, looks=3), tested=True)

    def weights(state=None, kill=None):
        model = build_model(unit, task)

        def watch(step):
            looked.append(step)
            if step == kill:
                raise KilledError
            return {}

        train(model.core, task, unit, state, watch)
        return model.state_dict()

    whole, again = weights(), weights()
    with pytest.raises(KilledError):
        weights(Store(tmp_path, {}), kill=8)
    looked.clear()
    resumed = weights(Store(tmp_path, {}))
    assert looked == [8, 12]
    for other in (again, resumed):
        assert all(torch.equal(value, other[name]) for name, value in whole.items())
    of_seed_4 = build_model(replace(unit, seed=4), task).state_dict()
    assert not all(torch.equal(value, of_seed_4[name]) for name, value in whole.items())


def test_a_units_outcome_is_stored_under_all_that_decides_it(tmp_path):
    task, store = planted.majority(), Store(tmp_path, {"command": "study"})
    unit = unit_of(task, tested=True, watched=True)
    name = unit.name(hash_task(task))
    first = run_units([name], prepare_training(lambda: [task], {name: unit}, store)[1], NOTHING_KEPT, store)
    again = run_units([name], lambda _: pytest.fail("It was trained."), NOTHING_KEPT, store)
    trained, loaded = (RunOutcome(**outcome.values[name]) for outcome in (first, again))
    assert list(map(list, loaded.curve)) == list(map(list, trained.curve))
    assert replace(loaded, curve=trained.curve) == trained
    assert trained.watched[0].keys() >= {"weights.symmetry", "tokens.share_skew", "selection.decided"}
    assert not store.inside(name).folder.exists(), "the state of a finished run is not needed"
    for other in (replace(unit, form=SUM), replace(unit, seed=1), replace(unit, scale=replace(SMALL, batch=8))):
        assert other.name(hash_task(task)) != name
    assert unit.name("other data") != name
    assert replace(unit, scale=replace(SMALL, rates=(1.0,))).name(hash_task(task)) == name


def test_other_processes_train_what_this_one_trains(tmp_path):
    units = {f"seed {seed}": unit_of(planted.majority(), SUM, seed=seed, tested=True) for seed in (0, 1)}
    results = []
    for jobs in (1, 2):
        store = Store(tmp_path / str(jobs), {"command": "study"})
        compute = prepare_training(planted.only_majority, units, store)[1]
        worker_setup = prepare_training, (planted.only_majority, units, store)
        with forkserver.workers():
            values = run_units(list(units), compute, WorkPlan(jobs=jobs), store, worker_setup=worker_setup).values
        results.append([values[name] | {"seconds": 0, "curve": [*map(list, values[name]["curve"])]} for name in units])
    assert results[0] == results[1]


# --- tables -----------------------------------------------------------------------------------------------------------
SENTENCES = StudyTask(name="words", form="language", cases={}, length=8, vocabulary=10)


def outcome(loss, problem=""):
    scores = {} if problem else {"loss": loss, "perplexity": 2.0**loss}
    return RunOutcome([(0, 5.0), (10, loss)], [], problem, scores, 100, 10, 640, 2.0)


def built(cell, outcomes):
    return build_cell(cell, SENTENCES, unit_of(SENTENCES), outcomes, [(1e-2, 1.0)], (1000.0, 0.5), 0)


def table_of(cells, results):
    return build_table(PaperTable("t", "q?", "s", tuple(cells)), "tiny", {"language": SMALL}, [SENTENCES], results)


def test_a_tables_order_is_compared_with_the_published_one():
    """Ours is a < b < c with little noise, published is b < a < c: one pair of three is decided the other way."""
    cells = [PaperCell(name, "language", (PLAIN,), value) for name, value in (("a", 2.0), ("b", 1.0), ("c", 3.0))]
    cells.append(PaperCell("d", "language", (AttentionForm(kernel="linear"),), diverged=True))
    runs = {"a": [1.0, 1.01, 0.99], "b": [2.0, 2.02, 2.01], "c": [3.0, 2.99, 3.01]}
    results = [built(cell, [outcome(loss) for loss in runs[cell.name]]) for cell in cells[:3]]
    broken = outcome(9.0, "its loss was not finite at step 3"), outcome(1.0), outcome(1.0)
    table = table_of(cells, [*results, built(cells[3], broken)])
    (ordering,) = table.orderings
    assert (ordering.agree, ordering.disagree, ordering.undecided) == (2, 1, 0)
    assert ordering.tau == pytest.approx(1 / 3)
    mean = torch.tensor(1.0).exp().item()
    assert table.cells[0].mean == pytest.approx(mean)
    assert table.cells[0].se == pytest.approx(mean * 0.01 / 3**0.5)
    assert table.cells[3].mean is None
    assert "1 of 3 runs did not converge" in table.cells[3].problem


@pytest.mark.parametrize("count", [10, pytest.param(40, marks=pytest.mark.full)])
def test_the_interval_of_tau_covers_however_near_cells_are(count):
    """Six cells whose true order is the published one, at distances from far below the noise to far beyond it."""
    cells = [PaperCell(str(n), "language", (PLAIN,), float(n)) for n in range(6)]
    draws, covered, widths = torch.Generator().manual_seed(0), [], {}
    for gap in (0.02, 0.4, 1.0, 8.0):
        for _ in range(count):
            losses = 3 + 0.01 * (gap * torch.arange(6.0)[:, None] + torch.randn(6, 3, generator=draws))
            results = [built(cell, [*map(outcome, row)]) for cell, row in zip(cells, losses.tolist(), strict=True)]
            (ordering,) = table_of(cells, results).orderings
            covered.append(ordering.low <= 1 <= ordering.high)
            widths[gap] = ordering.high - ordering.low
    assert sum(covered) / len(covered) >= 0.95
    assert widths[8.0] < 0.5 < 1.5 < widths[0.02]


def test_published_tables_name_each_cell_once_with_one_number():
    published = {}
    for table in TABLES.values():
        names = [(cell.task, cell.name) for cell in table.cells]
        assert len(set(names)) == len(names)
        for cell in table.cells:
            parsed(cell.forms[0].kernel)
            if cell.published is not None and table.name != "primal":
                place = table.source.partition(",")[0], cell.task, cell.forms
                assert published.setdefault(place, cell.published) == cell.published, (table.name, cell.name)


# --- the program ------------------------------------------------------------------------------------------------------
SHRUNK = {"layers": 1, "d_model": 32, "d_forward": 32, "heads": 2, "steps": 6, "search_steps": 6, "looks": 3}
SHRUNK |= {"rates": (1e-2, 2e-2), "seeds": 2, "length": 24, "vocabulary": 270, "evaluated": 16}
TEXT = "In the beginning God created the heaven and the earth.\n" * 400


@pytest.fixture
def small_scale(monkeypatch, tmp_path):
    """The program in this process, with a smaller scale `tiny`."""
    monkeypatch.setitem(SCALES, "tiny", replace(SCALES["tiny"], **SHRUNK))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def report_of(path):
    """The report without what differs from run to run."""
    report = json.loads(path.read_text())
    for cell in report["studies"][0]["cells"]:
        cell.pop("tokens_per_second")
        cell.pop("beside_sdpa")
        for run in cell["runs"]:
            run.pop("seconds")
    return report["studies"]


def test_an_interrupted_study_resumes(small_scale, monkeypatch, capsys):
    words = ("reproduce", "kernels", "--text", "text.txt", "--cells", "language/exp*, a*", "--jobs", "1")
    outputs = ("--json", "whole.json", "--figure", "pictures", "--save", "cells")
    assert exit_code([*words, "--work", "whole", *outputs]) == 0
    assert (small_scale / "pictures" / "overview.png").stat().st_size > 10_000
    assert "exponential, asymmetric" in capsys.readouterr().out
    assert len(list((small_scale / "cells" / "kernels").glob("*/*/step-*"))) == 4
    (cell,) = read_report(small_scale / "whole.json").studies[0].cells
    assert cell.heads["tokens.entropy"].median
    honest, trained = cells_module.train_unit, []

    def train_two(unit, task, store):
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(unit)
        return honest(unit, task, store)

    with monkeypatch.context() as patch:
        patch.setattr(cells_module, "train_unit", train_two)
        assert exit_code([*words, "--work", "stopped"]) == 130
    error = capsys.readouterr().err
    assert "Interrupted. Finished work is kept; run the same command again to continue." in " ".join(error.split())
    assert "Traceback" not in error
    monkeypatch.setattr(cells_module, "train_unit", lambda *args: trained.append(args) or honest(*args))
    assert exit_code([*words, "--work", "stopped", "--json", "stopped.json"]) == 0
    assert len(trained) == 2 + 2, "two of four units were kept"
    assert report_of(small_scale / "stopped.json") == report_of(small_scale / "whole.json")


BOTH = "--pairs", "two.tsv", "--labelled", "two.tsv"
REFUSALS = {
    "kernels": ["kernel"],
    "No cell matches 'gauss'": ["kernels", "--text", "text.txt", "--cells", "language/*", "--cells", "gauss"],
    "None of the selected cells uses --labelled": ["kernels", "--labelled", "two.tsv"],
    "nowhere.tsv": ["kernels", "--pairs", "nowhere.tsv"],
    "shorter than one window": ["kernels", "--text", "short.txt"],
    "No cell matches": ["primal", "--cells", "classification/*"],
    "Finished units cannot be stored in text.txt": ["kernels", "--work", "text.txt"],
    "not an empty folder": ["kernels", "--save", "."],
    "huge": ["kernels", "--scale", "huge"],
    "which --pairs reads": ["kernels", "--pairs", "text.txt", "--json", "text.txt"],
    "Two tasks have the same name, two.tsv": ["dimension", *BOTH, "--text", "text.txt"],
    "--seeds": ["kernels", "--seeds", "0"],
}


def test_refusals(small_scale, capsys):
    (small_scale / "short.txt").write_text("Short.\n")
    (small_scale / "two.tsv").write_text("".join(f"number {n}\t{n % 2}\n" for n in range(60)))
    for says, words in REFUSALS.items():
        assert exit_code(["reproduce", *words]) == 2, words
        out, err = capsys.readouterr()
        assert out == "", words
        assert says in " ".join(err.split()), words
        assert "Traceback" not in err, words
        assert err.count("\n") <= 3, words


# --- saved models -----------------------------------------------------------------------------------------------------
def test_a_saved_translator_is_opened_by_inspect_and_by_transformers(tmp_path):
    """Eq. 9 in all three kinds of attention, with the tokenizer and the start token."""
    lines = [f"{n}\tzahl {n} und {n % 7}\tnumber {n} and {n % 7}\n" for n in range(120)]
    (tmp_path / "pairs.tsv").write_text("".join(lines))
    task = translation(tmp_path / "pairs.tsv", replace(SMALL, length=24, vocabulary=270))
    model = build_model(unit_of(task, AttentionForm(positions="symmetric product"), steps=1), task)
    save_step(model, task, tmp_path, 3)
    opened = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "step-000003")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in opened.state_dict().items())
    report = attnlens.inspect(tmp_path / "step-000003", windows=2, length=16, analyzers=("spectrum",))
    assert {head.part for head in report.heads} == {"encoder", "decoder", "cross"}
    config = tmp_path / "step-000003" / "config.json"
    right = json.loads(config.read_text())
    for field, value in {"positions": "tabel", "places": "decoder", "symmetric": "no", "strange": 1}.items():
        config.write_text(json.dumps(right | {"form": right["form"] | {field: value}}))
        with pytest.raises(ModelError, match=f"form.{field}"):
            attnlens.inspect(tmp_path / "step-000003", windows=2, length=16)
