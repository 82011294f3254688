"""Tests the program as a whole: exit code, stdout, stderr and files of its commands, on good and on damaged models."""

import copy
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import families
import forkserver
import pytest
import torch
import views
from hostile import edited
from program import DEMO, SMALL, attnlens, environment_with, invoke, python, refused
from reports import bytes_of, synthetic_report
from safetensors.torch import load_file, save_file

import attnlens as library
from attnlens.cli import analyses, leave, show
from attnlens.cli.commands.models import failure
from attnlens.errors import ModelError, OutputError, UsageError, is_memory
from attnlens.records import json_schema
from attnlens.report.report import Report, read_report

FILES = ("--json", "r.json", "--figure", "r.png", "--html", "r.html", "--markdown", "r.md", "--csv", "r.csv")
WEIGHTS = ("--source", "weights", "--no-progress")
HUGE = 10**5000


def test_inspect_alone_reads_the_demo_and_writes_every_output(tmp_path):
    """A real process, whose pipes get no colours."""
    result = attnlens("inspect", *FILES, *SMALL, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "using demo" in result.stderr
    assert "COMPLETE: 32 of 32 heads" in result.stdout
    assert "\x1b[" not in result.stdout
    assert len(read_report(tmp_path / "r.json").heads) == 32
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "r.csv").read_text().splitlines()) == 33
    page = (tmp_path / "r.html").read_text()
    assert "data:image/svg+xml;base64," in page
    assert views.runs_its_own_script_alone(page)
    assert "COMPLETE" in (tmp_path / "r.md").read_text()


def test_json_goes_to_stdout_and_repeats_byte_by_byte():
    words = ("inspect", "demo", "--json", "-", "--layers", "1-2", "--heads", "0,5", *SMALL)
    one, other = invoke(*words), invoke(*words)
    report = json.loads(one.stdout)
    assert (one.returncode, report["schema_version"]) == (0, "2")
    assert "COMPLETE" in one.stderr
    assert [(head["layer"], head["head"]) for head in report["heads"]] == [(1, 0), (1, 5), (2, 0), (2, 5)]
    assert not [name for name in report["heads"][0]["measures"] if name.startswith("selection")], "only where named"
    assert bytes_of(Report.model_validate_json(one.stdout)) == bytes_of(Report.model_validate_json(other.stdout))


def test_quiet_shows_nothing_and_the_table_every_head():
    quiet = invoke("inspect", "demo", "-q", "--seed", 2**63 - 1, "--layers", "0", *SMALL)
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    table = invoke("inspect", "demo", "--table", *WEIGHTS)
    assert table.returncode == 0
    assert len(table.stdout.splitlines()) > 32


def test_one_analyzer_is_chosen():
    result = invoke("inspect", "demo", "--analyzer", "spectrum", *WEIGHTS, "--json", "-")
    names = set(json.loads(result.stdout)["heads"][0]["measures"])
    assert "weights.effective_rank" in names
    assert "weights.symmetry" not in names


def test_text_from_a_file_and_from_stdin_is_the_same(tmp_path):
    text = (DEMO / "text.txt").read_text()[:4000]
    (tmp_path / "text.txt").write_text(text)
    words = ("inspect", "demo", "--json", "-", *SMALL)
    results = [invoke(*words, "--text", tmp_path / "text.txt"), attnlens(*words, "--text", "-", stdin=text)]
    file, stdin = (json.loads(result.stdout) for result in results)
    assert stdin["settings"]["text"]["name"] == "stdin"
    assert file["settings"]["text"]["sha256"] == stdin["settings"]["text"]["sha256"]
    assert file["heads"] == stdin["heads"]


def test_list_names_measures_schema_and_model_types():
    shown = invoke("list", COLUMNS="200").stdout
    names = ("symmetry", "spectrum", "weights.symmetry", "tokens.share_skew", "weights.effective_rank")
    assert [name for name in names if name not in shown] == []
    assert "--analyzer selection" in invoke("list", "analyzers").stdout
    kernels = invoke("list", "kernels").stdout
    assert "rbf" in kernels
    assert "tokens.entropy" not in kernels
    assert invoke("list", "schema").stdout == json_schema()
    assert (DEMO.parents[1] / "schema.json").read_text() == json_schema(), "the shipped schema is out of date"
    page = (DEMO.parents[2] / "docs" / "architectures.md").read_text()
    assert page.endswith(invoke("list", "architectures", "--markdown").stdout)


def test_doctor_proves_the_demo_and_takes_the_common_options():
    result = invoke("doctor", "demo", "--layers", "3", "--windows", "2", "--length", "16", "--no-progress")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "transformer.h.3.attn" in result.stdout
    words = ("--layers", "1,3", "--heads", "0-2", "--windows", "3", "--length", "16", "--no-pack", "--json", "-", "-q")
    report = json.loads(invoke("doctor", "demo", *words).stdout)
    checks = [(check["site"], check["heads"]) for check in report["doctor"]]
    assert checks == [("transformer.h.1.attn", 3), ("transformer.h.3.attn", 3)]
    settings = report["settings"]
    assert (settings["windows"], settings["pack"], settings["dtype"]) == (3, False, "float64")


def test_the_program_swaps_the_demo_and_writes_every_output(tmp_path):
    result = invoke("swap-kernel", "--kernel", "rbf", *SMALL, *FILES, "-v", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "using demo" in result.stderr
    assert [part for part in ("32 of 32 heads", "nats per token", "Sites") if part not in result.stdout] == []
    assert read_report(tmp_path / "r.json").swap is not None
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert "rbf" in (tmp_path / "r.html").read_text()


# Damaged models


@pytest.fixture
def model(tmp_path):
    """A copy of the demo model that a test may damage."""
    return Path(shutil.copytree(DEMO, tmp_path / "model", ignore=shutil.ignore_patterns("checkpoints")))


def rewrite(folder, alter):
    weights = load_file(folder / "model.safetensors")
    alter(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def poison(heads, layers=range(4)):
    """NaN in the query weights of these heads (16 columns each) of these layers."""

    def alter(weights):
        for layer, head in itertools.product(layers, heads):
            weights[f"transformer.h.{layer}.attn.c_attn.weight"][:, 16 * head : 16 * head + 16] = float("nan")

    return alter


def remove_weight(folder):
    rewrite(folder, lambda weights: weights.pop("transformer.h.1.attn.c_attn.weight"))


def want_remote_code(folder):
    edited(folder / "config.json", model_type="made-up", auto_map={"AutoConfig": "x.C", "AutoModel": "x.M"})


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (lambda folder: os.truncate(folder / "model.safetensors", 100_000), ("model.safetensors",)),
        (remove_weight, ("h.1.attn.c_attn.weight",)),
        (want_remote_code, ("--trust-remote-code",)),
        (lambda folder: rewrite(folder, poison(range(8))), ("c_attn.weight",)),
    ],
)
def test_a_damaged_model_is_refused_and_nothing_is_written(model, tmp_path, damage, parts):
    damage(model)
    refused(invoke("inspect", model, "--json", tmp_path / "r.json"), *parts)
    assert not (tmp_path / "r.json").exists()


def test_pickled_weights_need_a_permission(model):
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    refused(invoke("inspect", model), "pickle", "--allow-pickle")
    allowed = invoke("inspect", model, "--allow-pickle", *WEIGHTS)
    assert allowed.returncode == 0, allowed.stderr


def test_nan_in_some_heads_is_partial(model, tmp_path):
    rewrite(model, poison([2, 5], layers=[3]))
    result = invoke("inspect", model, "--json", tmp_path / "r.json", *SMALL)
    assert result.returncode == 0, result.stderr
    assert "PARTIAL: 30 of 32 heads" in result.stdout
    report = read_report(tmp_path / "r.json")
    (skip,) = [skip for skip in report.coverage.skipped if skip.heads]
    assert (skip.site, skip.heads) == ("transformer.h.3.attn", [2, 5])
    assert "c_attn.weight" in skip.reason
    broken = next(head for head in report.heads if (head.layer, head.head) == (3, 2))
    assert all("c_attn.weight" in measure.reason for measure in broken.measures.values())
    assert invoke("inspect", model, "--strict", "-q", *SMALL).returncode == 3


def test_without_a_tokenizer_only_the_weights_are_read(model, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    refused(invoke("inspect", model, "--source", "tokens"), "tokenizer")
    result = invoke("inspect", model, "--json", tmp_path / "r.json", "--no-progress")
    assert result.returncode == 0, result.stderr
    assert "PARTIAL" in result.stdout
    measures = read_report(tmp_path / "r.json").heads[0].measures
    assert "weights.symmetry" in measures
    assert not any(name.startswith("tokens.") and measure.value is not None for name, measure in measures.items())


@pytest.mark.parametrize("name", ["mamba", "yoso"])
def test_a_model_without_reachable_attention_is_refused(tmp_path, name):
    families.build(name).save_pretrained(tmp_path / name)
    result = attnlens("inspect", tmp_path / name, "--source", "weights")
    refused(result, "attention")
    assert result.stderr.startswith("Error: "), "transformers says nothing of its own"


CONFIGS = [  # what config.json says, and what the refusal says of it
    ({"architectures": ["GPT2ForSequenceClassification"]}, "can't run"),
    ({"sub_configs": "\x1b]0;x\x07"}, "sub_configs"),
    ({"rope_parameters": {"partial_rotary_factor": 3e7}}, "at most 16"),
    ({"n_positions": 1}, "1 × 24 according to config.json"),
    ({"vocab_size": 501}, "according to config.json (vocab_size = 501)"),
    ({"n_head": 0}, "n_head = 0, which must be at least 1"),
    ({"n_head": -2}, "n_head = -2"),
    *(({name: value}, f"{name} = {value}") for name, value in (("n_layer", 0), ("n_layer", -1), ("n_embd", 0))),
    *(({name: value}, f"{name} = {value}") for name, value in (("n_embd", -4), ("vocab_size", 0))),
    ({"model_type": ["gpt2"], "auto_map": {"a": "b"}}, "which must be a string"),
    ({"architectures": [3]}, "which must be a list of strings"),
]


def test_a_config_that_makes_no_sense_is_refused(folder):
    config = (folder / "config.json").read_text()
    for change, part in CONFIGS:
        (folder / "config.json").write_text(json.dumps(json.loads(config) | change))
        result = invoke("inspect", folder, "--windows", "2", "--length", "8", "-q")
        refused(result, part)
        assert "\x1b" not in result.stderr, change


# Exit codes and interruptions


class PanicException(BaseException):  # as pyo3 calls it
    """What a Rust library raises: no Exception."""


FAILURES = [
    (MemoryError(), 2, "Not enough memory"),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"), 2, "memory"),
    (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), 2, "memory"),
    (OSError(12, "Cannot allocate memory"), 2, "memory"),
    (ImportError("libtorch_cpu.so: failed to map segment from shared object"), 2, "memory"),
    (PanicException("called `Option::unwrap()`"), 2, "library crashed"),
    (KeyboardInterrupt(), 130, "Interrupted."),
    (ModelError("What.", "Do."), 2, "Error: What.\nDo."),
    (RuntimeError("unforeseen"), 70, "--debug"),
]
JOBS = {"inspect": "run_inspect", "swap-kernel": "swap_work", "doctor": "doctor", "converge": "converge_synthetic"}
JOBS["reproduce"] = "reproduce"


def test_whatever_ends_a_command_has_its_exit_code(monkeypatch):
    def fail(*_, **__):
        raise error

    for job in JOBS.values():
        monkeypatch.setattr(analyses, job, fail)
    verbs = itertools.cycle(JOBS)
    pairs = [(verb, *case) for case in FAILURES for verb in (next(verbs), next(verbs))]
    assert len({verb for verb, *_ in pairs}) == len(JOBS)
    for verb, error, code, part in pairs:
        result = invoke(verb, "--no-progress")
        assert result.returncode == code, (verb, error)
        assert part in result.stderr
        assert "Traceback" not in result.stderr
    assert not any(map(is_memory, (ValueError("out of memory"), RuntimeError("x"), OSError(2, "No such file"))))


def test_an_interruption_that_a_library_turned_into_its_own_error_is_still_one(monkeypatch, capsys):
    monkeypatch.setattr(show, "_struck", [])
    assert show.report_failure(ValueError("a control: a bug, and no interruption")) == 70
    with pytest.raises(KeyboardInterrupt):
        show.interrupt(signal.SIGINT, None)
    assert show.report_failure(ValueError("SchemaError: KeyboardInterrupt")) == show.INTERRUPTED
    assert capsys.readouterr().err.endswith("Interrupted.\n")


STARTING = """
import os, sys; sys.argv = ['attnlens', 'inspect', '--source', 'weights', '-q']
import attnlens.cli
assert 'typer' not in sys.modules and 'rich' not in sys.modules
os.write(1, b'ready')
attnlens.cli.main()
"""


def struck(command, wait, ready, stream):
    """The exit code and stderr of a process interrupted so many seconds after it said that it is ready."""
    # a test run in the background inherits ignored interruptions, and would hand them on
    handler = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment_with()}
    with subprocess.Popen(command, **pipes, preexec_fn=handler) as process:
        shown = b""
        while ready not in shown:
            shown += os.read(getattr(process, stream).fileno(), 1000)
        time.sleep(wait)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=120)
    return process.returncode, stderr


@pytest.mark.parametrize(
    "wait", [0.0, 0.15, *(pytest.param(wait, marks=pytest.mark.full) for wait in (0.03, 0.08, 0.3, 0.6))]
)
def test_an_interruption_ends_with_130_from_the_first_line_on(wait):
    """`ready` is printed before the first import of ours; a wait of 0 strikes within them."""
    code, stderr = struck([sys.executable, "-c", STARTING], wait, b"ready", "stdout")
    assert code in ((130, -signal.SIGINT) if wait == 0 else (130,)), stderr
    assert b"Traceback" not in stderr or wait == 0


@pytest.mark.parametrize("wait", [0.0, 0.5, pytest.param(2.0, marks=pytest.mark.full)])
def test_an_interruption_leaves_nothing_half_written(tmp_path, wait):
    text = tmp_path / "long.txt"
    text.write_text((DEMO / "text.txt").read_text() * 50)
    words = ["inspect", "--json", str(tmp_path / "r.json"), "--windows", "100000", "--text", str(text)]
    code, stderr = struck([str(forkserver.commands() / "attnlens"), *words], wait, b"using demo", "stderr")
    assert code == 130, stderr
    assert b"Traceback" not in stderr
    left = [path.name for path in tmp_path.iterdir() if path.name != "long.txt"]
    assert left in ([], ["r.json"])
    if left:
        assert "interrupted" in read_report(tmp_path / "r.json").coverage.sentence


@pytest.mark.parametrize(
    ("handler", "inside"),
    [(show.interrupt, leave), (signal.default_int_handler, leave), (signal.SIG_IGN, signal.SIG_IGN)],
)
def test_imports_are_left_at_once_whoever_handles_interruptions(handler, inside):
    """The program's own handler too: an import that is run by C++ ends it with SIGABRT where an exception is raised."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        with show.interruptible_at_once():
            assert signal.getsignal(signal.SIGINT) is inside
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_main_lets_an_ignored_interruption_be():
    program = (
        "import signal, attnlens.cli.entry as e, attnlens.cli as c; e.run = lambda: print([signal.getsignal(2)]); "
    )
    shown = [
        python("-c", f"{program}signal.signal(2, {kind}); c.main()").stdout
        for kind in (1, "signal.default_int_handler")
    ]
    assert "SIG_IGN" in shown[0]
    assert "leave" in shown[1]


# Environments


def test_a_hostile_environment_changes_nothing(tmp_path):
    hostile = {"MPLBACKEND": "module://no.such.backend", "PYTHONWARNINGS": "error", "COLUMNS": "99999999"}
    words = ["inspect", "--source", "weights", "--layers", "0", "--figure", "x.png", "-q"]
    run = subprocess.run(
        [sys.executable, "-m", "attnlens", *words],
        env=environment_with(**hostile), cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stdout) == (0, ""), run.stderr
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_no_width_of_the_page_stops_help():
    widths = {}
    for columns in ("99999999", "0", "-5", "²", "x", "", "00", "60"):
        result = invoke("inspect", "--help", COLUMNS=columns, LINES=columns)
        assert (result.returncode, len(result.stdout) < 1_000_000) == (0, True), columns
        widths[columns] = max(map(len, result.stdout.splitlines()))
    assert widths["0"] == widths["x"] == widths["00"] > widths["60"], "the control: a width that makes sense"


def test_messages_quote_and_clean_what_a_stranger_wrote():
    report = synthetic_report(1, 1)
    assert "\x1b" not in repr(report.model_copy(update={"command": "\x1b[2J"}))
    named = report.model.model_copy(update={"id": "$(touch PWNED)"})
    assert "'$(touch PWNED)'" in failure(report.model_copy(update={"model": named})).remedy


# Calls of the library


class Odd:
    """A path that is none."""

    def __fspath__(self):
        return 7


CALLS = [
    *(lambda options=options: library.inspect(**options) for options in (
        {"evil": 1}, {"device": None}, {"device": HUGE}, {"dtype": "x" * 10**6}, {"dtype": HUGE}, {"revision": HUGE},
        {"length": HUGE}, {"windows": -HUGE}, {"text": "a\0b"}, {"text": ""}, {"text": HUGE}, {"text": [Odd()]},
        {"text": itertools.repeat("a")}, {"layers": itertools.count()}, {"layers": [HUGE]}, {"progress": 5},
        {"analyzers": itertools.repeat("symmetry")}, {"source": "weights", "text": str(DEMO / "text.txt")},
    )),
    *(lambda model=model: library.inspect(model) for model in (None, "", " ", "a\0b", Odd())),
    *(lambda save=save: library.load_swapped(save) for save in ("a\0b", None, Odd())),
    lambda: library.load(),
    lambda: library.load(Odd()),
    lambda: library.load("demo", "main"),
    lambda: library.load("demo", divice="cpu"),
    lambda: library.load("demo", trust_remote_code=None),
    lambda: library.load("demo", allow_pickle="no"),
    lambda: library.doctor(evil=1),
    lambda: library.reproduce(quik=True),
    lambda: library.reproduce(seed=HUGE),
    lambda: library.swap_kernel(heads=itertools.count()),
    lambda: library.swap_kernel("demo", itertools.repeat("rbf")),
    lambda: library.swap_kernel(save="a\0b"),
    lambda: library.converge_head(head="9" * 6000 + ".1"),
    lambda: library.converge_head(head=itertools.count()),
    lambda: library.converge_synthetic(lr=HUGE),
    lambda: library.converge_synthetic(trials=HUGE),
    lambda: library.find_ranks("demo", ranks="a\0b"),
    lambda: synthetic_report().write_json("s3://bucket/r.json"),
    lambda: synthetic_report().save("s3://bucket/r.json"),
    *(lambda path=path: synthetic_report(1, 1).write_json(path) for path in (3, None, b"x")),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_wrong_arguments_from_python_are_usage_errors(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError):
        CALLS[number]()
    assert list(tmp_path.iterdir()) == []


def test_the_revision_of_a_folder_is_refused_by_its_name():
    with pytest.raises(UsageError, match="revision"):
        library.inspect(str(DEMO), revision="main")


def test_a_report_is_not_written_under_a_name_that_no_file_can_have():
    with pytest.raises(OutputError):
        synthetic_report(1, 1).write_json("a\0b")


@pytest.mark.parametrize("number", [10**4000, 2**63])
def test_counts_beyond_64_bits_are_not_a_report(number):
    data = json.loads(synthetic_report(1, 1).to_json()) | {"peak_memory_bytes": number}
    with pytest.raises(ValueError, match="counts must be below"):
        Report.model_validate_json(json.dumps(data))


def test_threads_with_one_model_or_one_each_queue(demo):
    options = {"windows": 2, "length": 16, "layers": [0], "analyzers": ["symmetry", "spectrum"]}
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(library.inspect, model, **options) for model in (demo, demo, "demo", "demo")]
        heads = {json.dumps(json.loads(run.result().to_json())["heads"]) for run in runs}
    assert len(heads) == 1


def test_a_call_in_inference_mode_or_on_a_model_without_weights(demo):
    few = {"windows": 2, "length": 8, "layers": [0]}
    with torch.inference_mode():
        assert library.inspect(demo, **few).coverage.complete
    bare = replace(demo, model=copy.deepcopy(demo.model).to("meta"))
    for call in (library.inspect, library.swap_kernel, library.doctor):
        with pytest.raises(ModelError, match="meta device"):
            call(bare, **few)
