"""Tests that every hostile or mistaken word is answered by its exit code, in two lines, before the work."""

from __future__ import annotations

import copy
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from hostile import edited
from program import DEMO, environment_with
from reports import synthetic_report
from swap_reports import planned

import attnlens
from attnlens.cli import leave, show
from attnlens.cli.commands.models import failure
from attnlens.cli.entry import exit_code
from attnlens.cli.outputs import NO_MODEL
from attnlens.errors import AttnlensError, ModelError, OutputError, UsageError, is_memory
from attnlens.models.loading.locate import Hub, reachable
from attnlens.report.report import Report

HUGE = 10**5000


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to run in, with a model and a text, and nothing of the caller's environment."""
    for name in [name for name in os.environ if name.startswith("ATTNLENS_")]:
        monkeypatch.delenv(name)
    for name in ("COLUMNS", "MPLBACKEND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(DEMO, "m", ignore=shutil.ignore_patterns("checkpoints"))
    Path("my.txt").write_text("The cat sat on the mat and looked at the dog. " * 40)
    Path("soft.txt").symlink_to("my.txt")
    return tmp_path


def refused(capsys, words, *parts):
    """Exit 2 and two lines; what is said of the demo model stands above them."""
    code = exit_code(words.split() if isinstance(words, str) else words)
    shown = capsys.readouterr()
    assert code == 2, shown.err
    lines = shown.err.removeprefix(f"{NO_MODEL}\n").splitlines()
    assert len(lines) == 2, shown.err
    assert lines[0].startswith("Error: ")
    for part in parts:
        assert part in shown.err, shown.err
    return shown


WORDS = {
    "inspect ./no/such/folder": "no such folder",
    "inspect none.gguf": "none.gguf",
    "doctor ./none": "no such folder",
    "converge --checkpoints ./a ./b": "no such folder",
    "converge ./none --head 0.0": "no such folder",
    "swap-kernel ./none": "no such folder",
    "inspect --text none.txt": "none.txt",
    "inspect -": "from stdin",
    "inspect --json --csv": "followed by the option --csv",
    "converge --experiment ranc": "Did you mean 'rank'",
    "inspect --text .": "does not name a file",
    "inspect --text m": "it is a folder",
    "doctor --text ~nosuchuser/x.txt": "nosuchuser",
    "swap-kernel --kernel rank:4 --fit --calibration none.txt": "none.txt",
    "swap-kernel --kernel rbff": "Did you mean 'rbf'",
    "swap-kernel --kernel rbf:gama=1": "no parameter 'gama'",
    "swap-kernel --kernel rbf:gamma=x": "gamma",
    "ranks --ranks none.json": "none.json",
    "inspect --layers 3-0": "0-3",
    "inspect --heads x": "not a list of numbers",
    "inspect --head 3": "is not a valid head",
    "converge --head 3.x": "is not a valid head",
    "inspect --head 3.7 --layers 3": "--head cannot be combined with --layers or --heads",
    "converge --checkpoints --head 3.7 --heads 7": "--head cannot be combined with --layers or --heads",
    "inspect --hedas 2": "No such option",
    "inspect --analyzer symetry": "Did you mean 'symmetry'",
    "inspect --source weight": "Did you mean 'weights'",
    "inspect --placement frist": "Did you mean 'first'",
    "list measure": "Did you mean 'measures'",
    "inspect --json none/x.json": "does not exist",
    "inspect --json x.json/": "does not name a file",
    "inspect --csv -": "can't write to stdout",
    "inspect --figure -": "can't write to stdout",
    "inspect --length 1": "'--length'",
    "reproduce --seed x": "--seed",
    "inspect --dtype float31": "no dtype 'float31'",
    "doctor --device abacus": "no device 'abacus'",
    "ranks --budget 1%": "Cannot parse the budget '1%'",
}


def test_mistakes_of_words_are_answered_without_torch(here):
    """All in one process, which is a new one: in this one torch is there."""
    program = (
        "import sys\nfrom attnlens.cli.entry import exit_code\n"
        f"for words in {[*WORDS]!r}:\n"
        "    print(words, '##', file=sys.stderr, end=' ')\n"
        "    code = exit_code(words.split())\n"
        "    heavy = [name for name in ('torch', 'transformers', 'matplotlib', 'rich') if name in sys.modules]\n"
        "    print('##', code, *heavy, file=sys.stderr)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment_with(), check=False
    )
    told = run.stderr.split("##")
    assert len(told) == 2 * len(WORDS) + 1, run.stderr
    for number, (words, part) in enumerate(WORDS.items()):
        answer, after = told[2 * number + 1], told[2 * number + 2].splitlines()[0]
        assert part in answer, (words, answer)
        assert after.strip() == "2", (words, after)
    assert "env var" not in run.stderr, "nobody set a variable"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("inspect --text my.txt --markdown my.txt", "--markdown would replace my.txt, which --text reads"),
        ("inspect --text my.txt --csv soft.txt", "soft.txt, which --text reads"),
        ("inspect --text soft.txt --html my.txt", "my.txt, which --text reads"),
        ("swap-kernel --kernel rank:4 --fit --calibration my.txt --csv my.txt", "which --calibration reads"),
        ("ranks --ranks plan.json --json plan.json", "which --ranks reads"),
        ("inspect m --csv m/model.safetensors", "a file of the model m"),
        ("inspect m/model.safetensors --json m/config.json", "a file of the model"),
        ("inspect m --json link/config.json", "a file of the model m"),
        ("doctor m --json weights", "a file of the model m"),
        ("doctor n --json m/model.safetensors", "a file of the model n"),
        ("converge m --head 0.0 --csv m/tokenizer.json", "a file of the model m"),
        ("inspect --text pictures/overview.png --figure pictures", "pictures/overview.png, which --text reads"),
        ("swap-kernel --save new --json new", "--json and --save name the same file"),
    ],
)
def test_no_output_replaces_an_input(here, capsys, words, part):
    Path("link").symlink_to("m")
    Path("weights").symlink_to("m/model.safetensors")
    Path("n").mkdir()
    for file in Path("m").iterdir():
        Path("n", file.name).symlink_to(file.resolve())
    Path("pictures").mkdir()
    shutil.copy("my.txt", "pictures/overview.png")
    Path("plan.json").write_text(planned().plan.to_json())
    before = {path: path.stat().st_mtime_ns for path in here.rglob("*")}
    refused(capsys, words, part)
    assert {path: path.stat().st_mtime_ns for path in here.rglob("*")} == before


@pytest.mark.parametrize(
    "line",
    [
        *(f'{key} = "x"' for key in ("json", "csv", "windows-csv", "figure", "html", "markdown", "plan", "save")),
        *(f'{key} = "x"' for key in ("text", "calibration", "ranks", "model", "models", "revisions")),
    ],
)
def test_a_file_beside_the_work_names_no_output_and_no_input(here, capsys, line):
    key = line.split()[0]
    Path("attnlens.toml").write_text(f"{line}\nquiet = true\n")
    variable = () if key in ("model", "models") else (key.replace("-", "_").upper(),)  # arguments have no variable
    refused(capsys, "inspect", f"must not set {key}", f"Remove {key} from", *variable)
    Path("attnlens.toml").unlink()
    Path("pyproject.toml").write_text(f"[tool.attnlens]\n{line}\n")
    refused(capsys, "inspect", f"must not set {key}")


@pytest.mark.parametrize("content", ["a = " + "[" * 50_000, "seed = " + "9" * 5000, "a = " + "{b=" * 9000, "\udcff"])
def test_hostile_toml_is_named(here, capsys, content):
    Path("attnlens.toml").write_bytes(content.encode(errors="surrogateescape"))
    refused(capsys, "inspect", "attnlens.toml")


def test_a_slip_in_a_file_stands_not_in_the_way_of_help_and_list(here, capsys, monkeypatch):
    Path("attnlens.toml").write_text("layrs = 1\n")
    refused(capsys, "inspect", "layrs")
    assert exit_code(["list", "kernels"]) == 0
    monkeypatch.setattr(sys, "argv", ["attnlens", "inspect", "--help"])
    assert exit_code() == 0
    shown = capsys.readouterr().out
    assert "rbf" in shown
    assert "--layers" in shown


@pytest.mark.parametrize("columns", ["99999999", "0", "-5", "²", "x", "", "00"])
def test_no_width_of_the_page_stops_help(here, capsys, monkeypatch, columns):
    for name in ("COLUMNS", "LINES"):
        monkeypatch.setenv(name, columns)
    assert exit_code(["inspect", "--help"]) == 0
    assert len(capsys.readouterr().out) < 1_000_000


def test_a_variable_is_named_where_it_was_set(here, capsys, monkeypatch):
    monkeypatch.setenv("ATTNLENS_LENGTH", "1")
    refused(capsys, "inspect", "ATTNLENS_LENGTH")


def test_a_long_field_is_shortened_and_steers_no_terminal(here, capsys):
    shown = refused(capsys, ["inspect", "--layers", "\x1b[31m" + "x" * 3_000_000], "…")
    assert len(shown.err) < 2000
    assert "\x1b" not in shown.err
    assert "\x1b" not in repr(synthetic_report(1, 1).model_copy(update={"command": "\x1b[2J"}))


def test_suggested_commands_quote_what_they_repeat(here, capsys):
    refused(capsys, ["inspect", "--json", "a b; touch PWNED #/x.json"], "Run: mkdir -p '")
    report = synthetic_report(1, 1)
    named = report.model.model_copy(update={"id": "$(touch PWNED)"})
    assert "'$(touch PWNED)'" in failure(report.model_copy(update={"model": named})).remedy


class PanicException(BaseException):  # as pyo3 calls it
    """What a Rust library raises: no Exception."""


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (MemoryError(), 2, "Not enough memory"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"), 2, "memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), 2, "memory"),
        (OSError(12, "Cannot allocate memory"), 2, "memory"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), 2, "memory"),
        (PanicException("called `Option::unwrap()`"), 2, "library crashed"),
        (KeyboardInterrupt(), 130, "Interrupted."),
        (ModelError("What.", "Do."), 2, "Error: What.\nDo."),
        (RuntimeError("unforeseen"), 70, "--debug"),
    ],
)
@pytest.mark.parametrize("verb", ["inspect", "swap-kernel", "doctor", "converge", "reproduce"])
def test_whatever_ends_a_verb_has_its_code(here, capsys, monkeypatch, verb, error, code, said):
    from attnlens.cli import analyses

    def failing(*_, **__):
        raise error

    jobs = {"converge": "converge_synthetic", "inspect": "run_inspect", "swap-kernel": "swap_work"}
    monkeypatch.setattr(analyses, jobs.get(verb, verb), failing)
    assert exit_code([verb, "--no-progress"]) == code
    shown = capsys.readouterr()
    assert said in shown.err
    assert "Traceback" not in shown.err


def test_other_failures_are_no_lack_of_memory():
    assert not any(map(is_memory, (ValueError("out of memory"), RuntimeError("x"), OSError(2, "No such file"))))


CALLS = {
    "a misspelt option": lambda: attnlens.inspect(evil=1),
    "an option of another verb": lambda: attnlens.doctor(evil=1),
    "a misspelt option of load": lambda: attnlens.load("demo", divice="cpu"),
    "a misspelt option of verify": lambda: attnlens.reproduce(quik=True),
    "not a name": lambda: attnlens.load(),
    "two positions": lambda: attnlens.load("demo", "main"),
    "None as a model": lambda: attnlens.inspect(None),
    "an empty model": lambda: attnlens.inspect(""),
    "an empty path": lambda: attnlens.inspect(" "),
    "a NUL in the model": lambda: attnlens.inspect("a\0b"),
    "None as a device": lambda: attnlens.inspect(device=None),
    "a number as a device": lambda: attnlens.inspect(device=HUGE),
    "a huge dtype": lambda: attnlens.inspect(dtype="x" * 10**6),
    "a number as a dtype": lambda: attnlens.inspect(dtype=HUGE),
    "a number as a revision": lambda: attnlens.inspect(revision=HUGE),
    "None as a switch": lambda: attnlens.load("demo", trust_remote_code=None),
    "a word as a switch": lambda: attnlens.load("demo", allow_pickle="no"),
    "huge tokens": lambda: attnlens.inspect(length=HUGE),
    "huge sequences": lambda: attnlens.inspect(windows=-HUGE),
    "a huge seed": lambda: attnlens.reproduce(seed=HUGE),
    "a NUL in a text": lambda: attnlens.inspect(text="a\0b"),
    "an empty text": lambda: attnlens.inspect(text=""),
    "a number as a text": lambda: attnlens.inspect(text=HUGE),
    "endless texts": lambda: attnlens.inspect(text=itertools.repeat("a")),
    "endless layers": lambda: attnlens.inspect(layers=itertools.count()),
    "endless heads": lambda: attnlens.swap_kernel(heads=itertools.count()),
    "a huge layer": lambda: attnlens.inspect(layers=[HUGE]),
    "endless analyzers": lambda: attnlens.inspect(analyzers=itertools.repeat("symmetry")),
    "endless kernels": lambda: attnlens.swap_kernel("demo", itertools.repeat("rbf")),
    "a head of 6,000 digits": lambda: attnlens.converge_head(head="9" * 6000 + ".1"),
    "an endless head": lambda: attnlens.converge_head(head=itertools.count()),
    "a huge rate": lambda: attnlens.converge_synthetic(lr=HUGE),
    "huge trials": lambda: attnlens.converge_synthetic(trials=HUGE),
    "a NUL in save": lambda: attnlens.swap_kernel(save="a\0b"),
    "a NUL in ranks": lambda: attnlens.find_ranks("demo", ranks="a\0b"),
    "a NUL in a saved swap": lambda: attnlens.load_swapped("a\0b"),
    "None as a saved swap": lambda: attnlens.load_swapped(None),
    "a progress that is none": lambda: attnlens.inspect(progress=5),
    "a text that nothing reads": lambda: attnlens.inspect(source="weights", text=str(DEMO / "text.txt")),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_wrong_words_from_python_are_usage_errors(call):
    with pytest.raises(UsageError):
        call()


def test_a_report_is_not_written_under_a_name_that_no_file_can_have():
    with pytest.raises(OutputError):
        synthetic_report(1, 1).write_json("a\0b")


def test_threads_with_one_model_or_one_each_queue():
    one = attnlens.load("demo")
    asked = {"windows": 2, "length": 16, "layers": [0], "analyzers": ["symmetry", "spectrum"]}
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(attnlens.inspect, model, **asked) for model in (one, one, "demo", "demo")]
        found = {json.dumps(json.loads(run.result().to_json())["heads"]) for run in runs}
    assert len(found) == 1


class Answers(BaseHTTPRequestHandler):
    """What stands in the place of a hub where one must log in first."""

    body = b""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_):
        """Keep the test's output clean."""


@pytest.mark.parametrize(
    "body", [b"<html>Log in</html>", b"[]", b'{"id": "a", "siblings": 5}', b'{"id": "a"}', b"\xff"]
)
def test_what_answers_in_the_place_of_a_hub_is_named(monkeypatch, body):
    from huggingface_hub import constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Server", (Answers,), {"body": body}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(ModelError, match="not a model hub"):
            Hub("org/name", None).fetch(lambda _names: [])
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("proxy", ["http://x:99999", "http://secret@x:port", "http://[::1"])
def test_a_proxy_that_is_no_address_is_named_and_not_repeated(monkeypatch, proxy):
    monkeypatch.setenv("https_proxy", proxy)
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(ModelError, match="https_proxy is not a valid address") as error:
        reachable("https://huggingface.co")
    assert "secret" not in str(error.value)


def test_a_hub_that_never_answers_is_left_alone_in_time():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        assert not reachable(f"http://127.0.0.1:{silent.getsockname()[1]}")


@pytest.mark.parametrize("number", [10**4000, 2**63])
def test_counts_that_count_nothing_are_no_report(number):
    data = json.loads(synthetic_report(1, 1).to_json()) | {"peak_memory_bytes": number}
    with pytest.raises(ValueError, match="counts must be below"):
        Report.model_validate_json(json.dumps(data))


def test_a_picture_of_the_largest_numbers_is_refused_by_name(tmp_path):
    import views

    data = json.loads(synthetic_report(2, 2).to_json())
    for number, head in enumerate(data["heads"]):
        head["curves"] = {name: [(-1) ** number * 1e308] * len(curve) for name, curve in head["curves"].items()}
        for measure in head["measures"].values():
            measure["null"] = {"mean": -1e308, "sd": 1e-300}
    report = Report.model_validate_json(json.dumps(data))
    with pytest.raises(AttnlensError, match="too large to draw"):
        views.page(report)
    assert "inf" not in views.csv(report).split("\n", 1)[1]


def test_letters_that_the_font_lacks_are_not_told(tmp_path, recwarn):
    import views

    report = synthetic_report(2, 2)
    report = report.model_copy(update={"model": report.model.model_copy(update={"id": "模型"})})
    views.save_pictures(report, tmp_path / "x.png")
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]


HOSTILE = {"MPLBACKEND": "module://no.such.backend", "PYTHONWARNINGS": "error", "COLUMNS": "99999999"}


def test_a_hostile_environment_changes_nothing(here):
    words = ["inspect", "--source", "weights", "--layers", "0", "--figure", "x.png", "-q"]
    program = [sys.executable, "-m", "attnlens", *words]
    run = subprocess.run(program, env=environment_with(**HOSTILE), capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, ""), run.stderr
    assert Path("x.png").read_bytes().startswith(b"\x89PNG")


def test_an_interruption_that_a_library_made_an_error_of_its_own_is_still_one(monkeypatch, capsys):
    monkeypatch.setattr(show, "_struck", [])
    assert show.report_failure(ValueError("a control: a bug, and no interruption")) == 70
    with pytest.raises(KeyboardInterrupt):
        show.interrupt(signal.SIGINT, None)
    assert show.report_failure(ValueError("SchemaError: KeyboardInterrupt")) == show.INTERRUPTED
    assert capsys.readouterr().err.endswith("Interrupted.\n")


@pytest.mark.parametrize("wait", [0.0, 0.03, 0.08, 0.15, 0.3, 0.6])
def test_an_interruption_ends_with_130_from_the_first_line_on(wait):
    """`ready` is told before the first import of ours; a wait of 0 strikes within them."""
    program = (
        "import os, sys; sys.argv = ['attnlens', 'inspect', '--source', 'weights', '-q']\n"
        "import attnlens.cli; imported = set(sys.modules)\n"
        "assert 'typer' not in imported and 'rich' not in imported\n"
        "os.write(1, b'ready')\nattnlens.cli.main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment_with(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stdout.read(5) == b"ready"
        threading.Event().wait(wait)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=120)
    assert process.returncode in ((130, -signal.SIGINT) if wait == 0 else (130,)), told
    assert b"Traceback" not in told or wait == 0


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


CONFIGS = {
    "a task whose model takes one sequence at a time": (
        {"architectures": ["GPT2ForSequenceClassification"]},
        "can't run",
    ),
    "control characters in a name of transformers' own": ({"sub_configs": "\x1b]0;x\x07"}, "sub_configs"),
    "a share of rotary dimensions of millions": ({"rope_parameters": {"partial_rotary_factor": 3e7}}, "at most 16"),
    "one position": ({"n_positions": 1}, "1 × 24 according to config.json"),
    "more words": ({"vocab_size": 501}, "according to config.json (vocab_size = 501)"),
    "no heads": ({"n_head": 0}, "n_head = 0, which must be at least 1"),
    "heads below zero": ({"n_head": -2}, "n_head = -2"),
    "no layers": ({"n_layer": 0}, "n_layer = 0"),
    "layers below zero": ({"n_layer": -1}, "n_layer = -1"),
    "no width": ({"n_embd": 0}, "n_embd = 0"),
    "a width below zero": ({"n_embd": -4}, "n_embd = -4"),
    "no words": ({"vocab_size": 0}, "vocab_size = 0"),
    "a type of model that is no word": ({"model_type": ["gpt2"], "auto_map": {"a": "b"}}, "which must be a string"),
    "a class that is no word": ({"architectures": [3]}, "which must be a list of strings"),
}


@pytest.mark.parametrize("fault", CONFIGS)
def test_a_config_that_makes_no_sense_is_refused_without_a_word_of_others(fault, original, here, capsys):
    change, words = CONFIGS[fault]
    shutil.copytree(original, "odd")
    edited(Path("odd/config.json"), **change)
    told = refused(capsys, "inspect odd --windows 2 --length 8 -q", words).err
    assert "\x1b" not in told


def test_a_file_of_defaults_without_an_end_is_refused(here, capsys):
    with Path("attnlens.toml").open("wb") as file:
        file.truncate(3 * 2**30)
    refused(capsys, "inspect", "larger than 1 MiB")


def test_a_call_in_inference_mode_or_on_a_model_without_weights():
    demo = attnlens.load("demo")
    few = {"windows": 2, "length": 8, "layers": [0]}
    with torch.inference_mode():
        assert attnlens.inspect(demo, **few).coverage.complete
    bare = replace(demo, model=copy.deepcopy(demo.model).to("meta"))
    for call in (attnlens.inspect, attnlens.swap_kernel, attnlens.doctor):
        with pytest.raises(ModelError, match="meta device"):
            call(bare, **few)


def test_what_is_no_path_is_refused_by_name():
    class Odd:
        def __fspath__(self):
            return 7

    report = attnlens.inspect("demo", source="weights", layers=[0])
    for call in (attnlens.load, attnlens.inspect, attnlens.load_swapped):
        with pytest.raises(UsageError, match="not a path"):
            call(Odd())
    for path in (3, None, b"x"):
        with pytest.raises(UsageError, match="not a path"):
            report.write_json(path)
    with pytest.raises(UsageError, match="not a path"):
        attnlens.inspect("demo", text=[Odd()])
