"""Tests the program as a whole: exit code, stdout, stderr and files of its commands, on good and on damaged models."""

import copy
import functools
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
from hostile import edited, stored, weights
from program import DEMO, SMALL, attnlens, environment_with, invoke, python, refused
from reports import bytes_of, synthetic_report
from views import absent

import attnlens as library
from attnlens.cli import analyses, leave, show
from attnlens.cli.commands.models import failure
from attnlens.errors import ModelError, OutputError, ShardFinished, UsageError, is_memory
from attnlens.records import json_schema
from attnlens.report.report import Report, read_report

FILES = ("--json", "r.json", "--figure", "r.png", "--html", "r.html", "--markdown", "r.md", "--csv", "r.csv")
WEIGHTS = ("--source", "weights", "--no-progress")
HUGE = 10**5000
REPORT = synthetic_report(1, 1)


def test_inspect_alone_reads_the_demo_and_writes_every_output(tmp_path):
    """A real process, whose pipes get no colours."""
    result = attnlens("inspect", "--analyzer", "symmetry", *FILES, *SMALL, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "using demo" in result.stderr
    assert "COMPLETE: 32 of 32 heads" in result.stdout
    assert "\x1b[" not in result.stdout
    assert len(read_report(tmp_path / "r.json").heads) == 32
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    page, marked, rows = ((tmp_path / f"r.{kind}").read_text() for kind in ("html", "md", "csv"))
    assert len(rows.splitlines()) == 33
    assert "data:image/svg+xml;base64," in page
    assert views.runs_its_own_script_alone(page)
    assert "COMPLETE" in marked


def test_json_goes_to_stdout_and_repeats_byte_by_byte():
    words = ("inspect", "demo", "--json", "-", "--layers", "1-2", "--heads", "0,5", *SMALL)
    one, other = invoke(*words), invoke(*words)
    report = json.loads(one.stdout)
    assert (one.returncode, report["schema_version"]) == (0, "2")
    assert "COMPLETE" in one.stderr
    assert [(head["layer"], head["head"]) for head in report["heads"]] == [(1, 0), (1, 5), (2, 0), (2, 5)]
    assert not [name for name in report["heads"][0]["measures"] if name.startswith("selection")], "only where named"
    assert bytes_of(Report.model_validate_json(one.stdout)) == bytes_of(Report.model_validate_json(other.stdout))


def test_quiet_shows_nothing_the_table_every_head_and_one_analyzer_its_measures():
    quiet = invoke("inspect", "demo", "-q", "--seed", 2**63 - 1, "--layers", "0", *SMALL)
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    table = invoke("inspect", "demo", "--table", *WEIGHTS)
    assert table.returncode == 0
    assert len(table.stdout.splitlines()) > 32
    result = invoke("inspect", "demo", "--analyzer", "spectrum", *WEIGHTS, "--json", "-")
    names = set(json.loads(result.stdout)["heads"][0]["measures"])
    assert "weights.effective_rank" in names
    assert "weights.symmetry" not in names


def test_text_from_a_file_and_from_stdin_is_the_same(tmp_path):
    text = (DEMO / "text.txt").read_text()[:4000]
    (tmp_path / "text.txt").write_text(text)
    words = ("inspect", "demo", "--layers", "0", "--json", "-", *SMALL)
    results = [invoke(*words, "--text", tmp_path / "text.txt"), attnlens(*words, "--text", "-", stdin=text)]
    file, stdin = (json.loads(result.stdout) for result in results)
    assert stdin["settings"]["text"]["name"] == "stdin"
    assert file["settings"]["text"]["sha256"] == stdin["settings"]["text"]["sha256"]
    assert file["heads"] == stdin["heads"]


def test_list_names_measures_schema_and_model_types():
    names = ("symmetry", "spectrum", "weights.symmetry", "tokens.share_skew", "weights.effective_rank")
    assert not absent(invoke("list", COLUMNS="200").stdout, *names)
    assert "--analyzer selection" in invoke("list", "analyzers").stdout
    assert absent(invoke("list", "kernels").stdout, "rbf", "tokens.entropy") == ["tokens.entropy"]
    assert invoke("list", "schema").stdout == json_schema()
    gemma = invoke("list", "architectures", "GEMMA").stdout
    assert absent(gemma, "gemma3_text", "llama") == ["llama"]
    refused = invoke("list", "kernels", "zz")
    assert (refused.returncode, "contains 'zz'" in refused.stderr) == (2, True)
    assert (DEMO.parents[1] / "schema.json").read_text() == json_schema(), "the shipped schema is out of date"
    page = (DEMO.parents[2] / "docs" / "architectures.md").read_text()
    assert page.endswith(invoke("list", "architectures", "--markdown").stdout)


def test_doctor_proves_the_demo_and_takes_the_common_options():
    result = invoke("doctor", "demo", "--layers", "3", "--windows", "2", "--length", "16", "--no-progress")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Yes: 1 of 1 site agrees with the model's own attention." in " ".join(result.stdout.split())
    assert "transformer.h.3.attn" not in result.stdout, "only sites that do not agree"
    words = ("--layers", "1,3", "--heads", "0-2", "--windows", "3", "--length", "16", "--no-pack", "--json", "-", "-q")
    report = json.loads(invoke("doctor", "demo", *words).stdout)
    checks = [(check["site"], check["heads"]) for check in report["doctor"]]
    assert checks == [("transformer.h.1.attn", 3), ("transformer.h.3.attn", 3)]
    settings = report["settings"]
    assert (settings["windows"], settings["pack"], settings["dtype"]) == (3, False, "float64")


@pytest.fixture
def model(tmp_path):
    """A copy of the demo model that a test may damage."""
    return Path(shutil.copytree(DEMO, tmp_path / "model", ignore=shutil.ignore_patterns("checkpoints")))


def poison(folder, heads, layers=range(4)):
    """Write NaN into the query weights of these heads (16 columns each) of these layers."""
    tensors = weights(folder)
    for layer, head in itertools.product(layers, heads):
        tensors[f"transformer.h.{layer}.attn.c_attn.weight"][:, 16 * head : 16 * head + 16] = float("nan")
    stored(folder, tensors)


def test_a_damaged_model_is_refused_and_nothing_is_written(model, tmp_path):
    tensors, config = weights(model), (model / "config.json").read_text()

    def check(part):
        refused(invoke("inspect", model, "--json", tmp_path / "r.json"), part)
        assert not (tmp_path / "r.json").exists()

    os.truncate(model / "model.safetensors", 100_000)
    check("model.safetensors")
    stored(model, {name: tensor for name, tensor in tensors.items() if name != "transformer.h.1.attn.c_attn.weight"})
    check("h.1.attn.c_attn.weight")
    stored(model, tensors)
    edited(model / "config.json", model_type="made-up", auto_map={"AutoConfig": "x.C", "AutoModel": "x.M"})
    check("--trust-remote-code")
    (model / "config.json").write_text(config)
    poison(model, range(8))
    check("c_attn.weight")
    torch.save(tensors, model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    refused(invoke("inspect", model), "pickle", "--allow-pickle")
    allowed = invoke("inspect", model, "--allow-pickle", *WEIGHTS)
    assert allowed.returncode == 0, allowed.stderr


def test_nan_in_some_heads_is_partial(model, tmp_path):
    poison(model, [2, 5], layers=[3])
    words = ("inspect", model, "--layers", "3", *SMALL)
    result = invoke(*words, "--json", tmp_path / "r.json")
    assert result.returncode == 0, result.stderr
    assert "PARTIAL: 6 of 8 heads" in result.stdout
    report = read_report(tmp_path / "r.json")
    (skip,) = [skip for skip in report.coverage.skipped if skip.heads]
    assert (skip.site, skip.heads) == ("transformer.h.3.attn", [2, 5])
    assert "c_attn.weight" in skip.reason
    broken = next(head for head in report.heads if (head.layer, head.head) == (3, 2))
    assert all("c_attn.weight" in measure.reason for measure in broken.measures.values())
    assert invoke(*words, "--strict", "-q").returncode == 3


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
    *(({name: number}, f"{name} = {number}") for name, number in
      (("n_layer", 0), ("n_layer", -1), ("n_embd", 0), ("n_embd", -4), ("vocab_size", 0))),
    ({"model_type": ["gpt2"], "auto_map": {"a": "b"}}, "which must be a string"),
    ({"architectures": [3]}, "which must be a list of strings"),
]  # fmt: skip


def test_a_config_that_makes_no_sense_is_refused(folder):
    config = (folder / "config.json").read_text()
    for change, part in CONFIGS:
        (folder / "config.json").write_text(json.dumps(json.loads(config) | change))
        result = invoke("inspect", folder, "--windows", "2", "--length", "8", "-q")
        refused(result, part)
        assert "\x1b" not in result.stderr, change


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
JOBS = {"inspect": "run_inspect", "swap-kernel": "swap_work", "converge": "converge_synthetic"}
JOBS |= {"doctor": "doctor", "reproduce": "reproduce"}


def test_whatever_ends_a_command_has_its_exit_code_also_an_interruption_in_disguise(monkeypatch, capsys):
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
    error = ShardFinished(1, 2, ["b"], {"b": "it failed"})
    assert [invoke("inspect", "--no-progress", *words).returncode for words in ((), ("--strict",))] == [0, 3]
    assert not any(map(is_memory, (ValueError("out of memory"), RuntimeError("x"), OSError(2, "No such file"))))
    monkeypatch.setattr(show, "_received", [])
    assert show.report_failure(ValueError("a control: a bug, and no interruption")) == 70
    with pytest.raises(KeyboardInterrupt):
        show.interrupt(signal.SIGINT, None)
    assert show.report_failure(ValueError("SchemaError: KeyboardInterrupt")) == show.INTERRUPTED
    assert capsys.readouterr().err.endswith(f"Interrupted. {show.RESUME}\n")


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


@pytest.mark.parametrize("wait", [0.0, *(pytest.param(wait, marks=pytest.mark.full) for wait in (0.5, 2.0))])
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


MAIN = "import signal, attnlens.cli.entry as e, attnlens.cli as c; "
MAIN += "e.run = lambda: print(*map(signal.getsignal, (2, 15))); "


def test_imports_are_left_at_once_unless_interruptions_are_ignored():
    """The program's own handler too: an import that is run by C++ ends it with SIGABRT where an exception is raised."""
    ignored = signal.SIG_IGN
    cases = (show.interrupt, leave), (signal.default_int_handler, leave), (ignored, ignored)
    for stop, (handler, inside) in itertools.product((signal.SIGINT, signal.SIGTERM), cases):
        before = signal.signal(stop, handler)
        try:
            with show.interruptible_at_once():
                assert signal.getsignal(stop) is inside
            assert signal.getsignal(stop) is handler
        finally:
            signal.signal(stop, before)
    for on_ctrl_c, on_end, names in ((1, 1, 0), ("signal.default_int_handler", 0, 2)):  # 0: SIG_DFL, 1: SIG_IGN
        code = f"{MAIN}signal.signal(2, {on_ctrl_c}); signal.signal(15, {on_end}); c.main()"
        assert python("-c", code).stdout.count("function leave") == names


@pytest.mark.parametrize("start", [invoke, pytest.param(attnlens, marks=pytest.mark.full)])
@pytest.mark.filterwarnings("error")
def test_a_hostile_environment_changes_nothing(tmp_path, start):
    """In a new process too, which imports every library under it."""
    hostile = {"MPLBACKEND": "module://no.such.backend", "PYTHONWARNINGS": "error", "COLUMNS": "99999999"}
    words = ["inspect", "--source", "weights", "--analyzer", "symmetry", "--layers", "0", "--figure", "x.png", "-q"]
    run = start(*words, cwd=tmp_path, **hostile)
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
    assert "\x1b" not in repr(REPORT.model_copy(update={"command": "\x1b[2J"}))
    named = REPORT.model.model_copy(update={"id": "$(touch PWNED)"})
    assert "'$(touch PWNED)'" in failure(REPORT.model_copy(update={"model": named})).remedy


class Odd:
    """A path that is none."""

    def __fspath__(self):
        return 7


CALLS = [
    *(functools.partial(library.inspect, **options) for options in (
        {"evil": 1}, {"device": None}, {"device": HUGE}, {"dtype": "x" * 10**6}, {"dtype": HUGE}, {"revision": HUGE},
        {"length": HUGE}, {"windows": -HUGE}, {"text": "a\0b"}, {"text": ""}, {"text": HUGE}, {"text": [Odd()]},
        {"text": itertools.repeat("a")}, {"layers": itertools.count()}, {"layers": [HUGE]}, {"progress": 5},
        {"analyzers": itertools.repeat("symmetry")}, {"source": "weights", "text": str(DEMO / "text.txt")},
    )),
    *(functools.partial(library.inspect, model) for model in (None, "", " ", "a\0b", Odd())),
    *(functools.partial(library.load_swapped, save) for save in ("a\0b", None, Odd())),
    *(functools.partial(library.load, *words) for words in ((), (Odd(),), ("demo", "main"))),
    *(functools.partial(library.load, "demo", **options) for options in (
        {"divice": "cpu"}, {"trust_remote_code": None}, {"allow_pickle": "no"},
    )),
    *(functools.partial(call, **options) for call, options in (
        (library.doctor, {"evil": 1}),
        (library.reproduce, {"quik": True}), (library.reproduce, {"seed": HUGE}),
        (library.swap_kernel, {"heads": itertools.count()}), (library.swap_kernel, {"save": "a\0b"}),
        (library.swap_kernel, {"kernels": itertools.repeat("rbf")}),
        (library.converge_head, {"head": "9" * 6000 + ".1"}), (library.converge_head, {"head": itertools.count()}),
        (library.converge_synthetic, {"lr": HUGE}), (library.converge_synthetic, {"trials": HUGE}),
        (library.find_ranks, {"model": "demo", "ranks": "a\0b"}),
    )),
    *(functools.partial(write, "s3://bucket/r.json") for write in (REPORT.write_json, REPORT.save)),
    *(functools.partial(REPORT.write_json, path) for path in (3, None, b"x")),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_wrong_arguments_from_python_are_usage_errors(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError):
        CALLS[number]()
    assert list(tmp_path.iterdir()) == []


def test_revisions_of_folders_names_of_no_file_and_counts_beyond_64_bits_are_refused():
    with pytest.raises(UsageError, match="revision"):
        library.inspect(str(DEMO), revision="main")
    with pytest.raises(OutputError):
        REPORT.write_json("a\0b")
    for number in (10**4000, 2**63):
        data = json.loads(REPORT.to_json()) | {"peak_memory_bytes": number}
        with pytest.raises(ValueError, match="counts must be below"):
            Report.model_validate_json(json.dumps(data))


def test_calls_from_threads_in_inference_mode_or_without_weights(demo):
    options = {"windows": 2, "length": 16, "layers": [0], "analyzers": ["symmetry", "spectrum"]}
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(library.inspect, model, **options) for model in (demo, demo, "demo", "demo")]
        heads = {json.dumps(json.loads(run.result().to_json())["heads"]) for run in runs}
    assert len(heads) == 1
    few = {"windows": 2, "length": 8, "layers": [0]}
    with torch.inference_mode():
        assert library.inspect(demo, **few).coverage.complete
    bare = replace(demo, model=copy.deepcopy(demo.model).to("meta"))
    for call in (library.inspect, library.swap_kernel, library.doctor):
        with pytest.raises(ModelError, match="meta device"):
            call(bare, **few)
