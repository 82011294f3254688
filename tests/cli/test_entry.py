"""Tests the program through its real entry point: exit code, stdout, stderr, files."""

import json
import shutil
import signal
import subprocess
import sys
import time

import families
import forkserver
import pytest
import views
from program import DEMO, SMALL, attnlens, refused, without_torch
from safetensors.torch import load_file, save_file

import attnlens as library
from attnlens.errors import UsageError
from attnlens.records import json_schema
from attnlens.report.report import read_report


def copied(tmp_path, *, without=()):
    """A copy of the demo model that a test may damage."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in DEMO.iterdir():
        if file.is_file() and file.name not in without:
            shutil.copy(file, folder)
    return folder


def rewritten(folder, alter):
    weights = load_file(folder / "model.safetensors")
    alter(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_inspect_alone_reads_the_demo_and_says_so(tmp_path):
    result = attnlens(
        "inspect", "--json", "report.json", "--figure", "page.png", "--csv", "heads.csv", *SMALL, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert "using demo" in result.stderr
    assert "COMPLETE: 32 of 32 heads" in result.stdout
    assert "\x1b[" not in result.stdout, "no colours into a pipe"
    report = read_report(tmp_path / "report.json")
    assert len(report.heads) == 32
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "heads.csv").read_text().splitlines()) == 33


def test_html_and_markdown_are_written(tmp_path):
    result = attnlens("inspect", "demo", "--html", "page.html", "--markdown", "page.md", *SMALL, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    page = (tmp_path / "page.html").read_text()
    assert "data:image/svg+xml;base64," in page
    assert views.runs_its_own_script_alone(page)
    assert "COMPLETE" in (tmp_path / "page.md").read_text()


def test_json_to_stdout_is_parseable():
    result = attnlens("inspect", "demo", "--json", "-", *SMALL)
    assert result.returncode == 0
    assert json.loads(result.stdout)["schema_version"] == "2"
    assert "COMPLETE" in result.stderr


def test_reports_of_the_same_inputs_are_the_same_bytes(tmp_path):
    for name in ("a.json", "b.json"):
        assert attnlens("inspect", "demo", "--json", tmp_path / name, "-q", *SMALL).returncode == 0

    def without_clock(name):
        report = json.loads((tmp_path / name).read_text())
        for field in ("timings", "environment", "peak_memory_bytes"):
            del report[field]
        return json.dumps(report)

    assert without_clock("a.json") == without_clock("b.json")


def test_quiet_shows_nothing():
    result = attnlens("inspect", "demo", "-q", *SMALL)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_the_table_shows_every_head():
    result = attnlens("inspect", "demo", "--table", "--source", "weights", "--no-progress")
    assert result.returncode == 0
    assert len(result.stdout.splitlines()) > 32


def test_layers_and_heads_are_chosen():
    result = attnlens("inspect", "demo", "--layers", "1-2", "--heads", "0,5", "--json", "-", *SMALL)
    found = [(head["layer"], head["head"]) for head in json.loads(result.stdout)["heads"]]
    assert found == [(1, 0), (1, 5), (2, 0), (2, 5)]


def test_one_analyzer_only():
    result = attnlens(
        "inspect", "demo", "--analyzer", "spectrum", "--source", "weights", "--json", "-", "--no-progress"
    )
    names = set(json.loads(result.stdout)["heads"][0]["measures"])
    assert "weights.effective_rank" in names
    assert "weights.symmetry" not in names


def test_text_from_a_file_and_from_stdin_read_the_same(tmp_path):
    text = (DEMO / "text.txt").read_text()[:4000]
    (tmp_path / "text.txt").write_text(text)
    reports = [
        attnlens("inspect", "demo", "--text", tmp_path / "text.txt", "--json", "-", *SMALL).stdout,
        attnlens("inspect", "demo", "--text", "-", "--json", "-", *SMALL, stdin=text).stdout,
    ]
    file, stdin = (json.loads(report) for report in reports)
    assert stdin["settings"]["text"]["name"] == "stdin"
    assert file["settings"]["text"]["sha256"] == stdin["settings"]["text"]["sha256"]
    assert file["heads"] == stdin["heads"]


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["list"], ["explain", "rbf"], ["inspect", "--help"]])
def test_small_commands_load_no_torch(words):
    program = (
        "import sys\n"
        f"sys.argv = ['attnlens', *{words!r}]\n"
        "from attnlens.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    print('LOADED', [m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "LOADED []" in result.stdout, result.stdout + result.stderr


def test_importing_attnlens_loads_no_torch():
    program = "import attnlens, sys; print('torch' in sys.modules, attnlens.__version__)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.startswith("False ")


def test_list_names_every_measure_and_the_schema():
    shown = attnlens("list", COLUMNS="200").stdout
    for name in ("symmetry", "spectrum", "weights.symmetry", "tokens.share_skew", "weights.effective_rank"):
        assert name in shown
    assert attnlens("list", "schema").stdout == json_schema()
    assert (DEMO.parents[1] / "schema.json").read_text() == json_schema(), "the shipped schema is out of date"


def test_the_page_of_model_types_is_what_the_program_prints():
    page = (DEMO.parents[2] / "docs" / "architectures.md").read_text()
    assert page.endswith(attnlens("list", "architectures", "--markdown").stdout)


def test_doctor_proves_the_demo():
    result = attnlens("doctor", "demo", "--no-progress")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "transformer.h.3.attn" in result.stdout


def test_doctor_takes_the_common_options():
    words = ("--layers", "1,3", "--heads", "0-2", "--windows", "3", "--length", "16", "--no-pack", "--json", "-", "-q")
    report = json.loads(attnlens("doctor", "demo", *words).stdout)
    assert [(check["site"], check["heads"]) for check in report["doctor"]] == [
        ("transformer.h.1.attn", 3),
        ("transformer.h.3.attn", 3),
    ]
    settings = report["settings"]
    assert (settings["windows"], settings["pack"], settings["dtype"]) == (3, False, "float64")


def test_doctor_says_what_failed_and_what_to_do():
    result = attnlens("doctor", "demo", "--dtype", "bfloat16", "--no-progress", "-q")  # too coarse to prove anything
    refused(result, "4 of 4 sites failed, worst error", "transformer.h.0.attn", "attnlens doctor")


# Bad input: exit 2, one line what, one line what to do, nothing written


def test_unknown_hub_id_offline_is_refused_without_waiting(tmp_path):
    start = time.monotonic()
    result = attnlens("inspect", "no-such-org/no-such-model", "--offline", HF_HOME=str(tmp_path))
    refused(result, "no-such-org/no-such-model")
    waited = time.monotonic() - start
    start = time.monotonic()
    attnlens("inspect", "demo", "--layers", "99")
    assert waited < time.monotonic() - start + 3, "no retries: at most three seconds more than an error after loading"


def test_mistyped_folder():
    refused(attnlens("inspect", "./no/such/folder"), "no such folder")


def test_folder_without_config(tmp_path):
    refused(attnlens("inspect", copied(tmp_path, without=("config.json",))), "config.json")


def test_truncated_safetensors(tmp_path):
    folder = copied(tmp_path)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    refused(attnlens("inspect", folder), "model.safetensors")


def test_missing_weight(tmp_path):
    folder = rewritten(copied(tmp_path), lambda weights: weights.pop("transformer.h.1.attn.c_attn.weight"))
    refused(attnlens("inspect", folder, "--json", tmp_path / "r.json"), "h.1.attn.c_attn.weight")
    assert not (tmp_path / "r.json").exists()


def test_pickle_only_checkpoint(tmp_path):
    import torch

    folder = copied(tmp_path, without=("model.safetensors",))
    torch.save(load_file(DEMO / "model.safetensors"), folder / "pytorch_model.bin")
    refused(attnlens("inspect", folder), "pickle", "--allow-pickle")
    allowed = attnlens("inspect", folder, "--allow-pickle", "--source", "weights", "--no-progress")
    assert allowed.returncode == 0, allowed.stderr


def test_remote_code_wanted(tmp_path):
    folder = copied(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "made-up", "auto_map": {"AutoConfig": "x.C", "AutoModel": "x.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    refused(attnlens("inspect", folder), "--trust-remote-code")


def poison(*, heads, layers=range(4)):
    """NaN in the query weights of these heads (16 columns each) of these layers."""

    def alter(weights):
        for layer in layers:
            for head in heads:
                weights[f"transformer.h.{layer}.attn.c_attn.weight"][:, 16 * head : 16 * head + 16] = float("nan")

    return alter


def test_nan_in_every_head(tmp_path):
    folder = rewritten(copied(tmp_path), poison(heads=range(8)))
    refused(attnlens("inspect", folder, "--json", tmp_path / "r.json"), "c_attn.weight")
    assert not (tmp_path / "r.json").exists()


def test_nan_in_some_heads_is_partial(tmp_path):
    folder = rewritten(copied(tmp_path), poison(heads=[2, 5], layers=[3]))
    result = attnlens("inspect", folder, "--json", tmp_path / "r.json", *SMALL)
    assert result.returncode == 0, result.stderr
    assert "PARTIAL: 30 of 32 heads" in result.stdout
    report = read_report(tmp_path / "r.json")
    (skip,) = [skip for skip in report.coverage.skipped if skip.heads]
    assert (skip.site, skip.heads) == ("transformer.h.3.attn", [2, 5])
    assert "c_attn.weight" in skip.reason
    broken = next(head for head in report.heads if (head.layer, head.head) == (3, 2))
    assert all("c_attn.weight" in measure.reason for measure in broken.measures.values())
    assert attnlens("inspect", folder, "--strict", "-q", *SMALL).returncode == 3


def test_no_tokenizer(tmp_path):
    folder = copied(tmp_path, without=("tokenizer.json", "tokenizer_config.json"))
    refused(attnlens("inspect", folder, "--source", "tokens"), "tokenizer")
    result = attnlens("inspect", folder, "--json", tmp_path / "r.json", "--no-progress")
    assert result.returncode == 0, result.stderr
    assert "PARTIAL" in result.stdout
    measures = read_report(tmp_path / "r.json").heads[0].measures
    assert "weights.symmetry" in measures
    assert not any(name.startswith("tokens.") and found.value is not None for name, found in measures.items())


@pytest.mark.parametrize(("content", "word"), [(b"a", "token"), (b"", "empty"), (b"\0\1\2\3" * 100, "binary")])
def test_text_that_is_no_text(tmp_path, content, word):
    (tmp_path / "text").write_bytes(content)
    refused(attnlens("inspect", "demo", "--text", tmp_path / "text"), word)


def test_missing_text(tmp_path):
    refused(attnlens("inspect", "demo", "--text", tmp_path / "none.txt"), "none.txt")


@pytest.mark.parametrize("option", ["--json", "--figure", "--csv", "--html", "--markdown"])
def test_unwritable_output_is_found_before_the_work(tmp_path, option):
    folder = tmp_path / "none"
    refused(without_torch("inspect", "demo", option, folder / "out.png"), f"the folder {folder} does not exist")


def test_a_folder_in_the_place_of_a_file(tmp_path):
    refused(attnlens("inspect", "demo", "--json", tmp_path), "is a folder")


def test_unknown_analyzer():
    refused(attnlens("inspect", "demo", "--analyzer", "symetry"), "symetry", "Did you mean 'symmetry'")


def test_layer_that_does_not_exist():
    refused(attnlens("inspect", "demo", "--layers", "99"), "no layer 99", "0 to 3")


@pytest.mark.parametrize("words", ["0-99999999999", "9" * 5000, "1,2-10000"])
def test_numbers_beyond_all_models_are_refused_before_they_are_counted(words):
    refused(without_torch("inspect", "demo", "--heads", words), "9999")


@pytest.mark.parametrize("seed", ["-1", str(2**63), "x", "1.5"])
def test_a_seed_that_is_none(seed):
    refused(without_torch("inspect", "demo", "--seed", seed), "--seed", "Run: attnlens inspect --help")


def test_the_largest_seed_is_one():
    words = ("--source", "both", "--layers", "0", "--heads", "0", "-q", *SMALL)
    assert attnlens("inspect", "demo", "--seed", 2**63 - 1, *words).returncode == 0


def test_without_torch_there_is_no_work():
    """The control of all that is refused before it."""
    assert without_torch("inspect", "demo", "-q").returncode == 70


ONLY_PYTHON = ("inspect --select argmax", "swap-kernel --no-controls", "heal --eta 1", "inspect --revision main")


REMOVED = ("inspect --models a", "inspect --dry-run", "inspect --tokens 3", "check r.json --sarif x", "merge w")


@pytest.mark.parametrize("words", [*REMOVED, *ONLY_PYTHON, "inspect --windows first", "inspect --device-map auto"])
def test_a_removed_name_or_an_option_of_python_is_refused_with_what_to_do_instead(words):
    result = without_torch(*words.split())
    refused(result)
    assert "--help" not in result.stderr


def test_words_that_no_command_knows():
    refused(
        without_torch("inspect", "--hedas", "2"), "No such option: --hedas", "--heads", "Run: attnlens inspect --help"
    )
    refused(without_torch("inspekt"), "No such command 'inspekt'", "Run: attnlens --help")
    refused(without_torch("inspect", "demo", "--length"), "--length", "Run: attnlens inspect --help")
    refused(without_torch("inspect", "demo", "more"), "more", "Run: attnlens inspect --help")
    refused(without_torch("inspect", ""), "empty")
    refused(without_torch("inspect", "demo", "--text", ""), "--text does not name a file")
    alone = without_torch()
    assert (alone.returncode, alone.stderr) == (2, "")
    assert "Usage: attnlens" in alone.stdout


def test_debug_shows_a_traceback_above():
    result = attnlens("inspect", "demo", "--layers", "99", "--debug")
    assert result.returncode == 2
    assert "Traceback" in result.stderr
    assert "Error: There is no layer 99" in result.stderr


def test_range_that_runs_backwards():
    refused(attnlens("inspect", "demo", "--heads", "7-3"), "7-3", "3-7")


@pytest.mark.parametrize("name", ["mamba", "yoso"])
def test_model_without_reachable_attention(tmp_path, name):
    families.build(name).save_pretrained(tmp_path / name)
    result = attnlens("inspect", tmp_path / name, "--source", "weights")
    refused(result, "attention")
    assert result.stderr.startswith("Error: "), "transformers says nothing of its own"


def test_cuda_where_there_is_none():
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    refused(attnlens("inspect", "demo", "--device", "cuda"), "cuda")


# Bad input that nobody named


def test_window_beyond_the_models_positions():
    refused(attnlens("inspect", "demo", "--length", "4096"), "256")


def test_unknown_source_dtype_and_device():
    refused(attnlens("inspect", "demo", "--source", "weight"), "Did you mean 'weights'")
    refused(attnlens("inspect", "demo", "--dtype", "float23"), "float23")
    refused(attnlens("inspect", "demo", "--device", "tpu"), "tpu")


def test_revision_of_a_folder(tmp_path):
    with pytest.raises(UsageError, match="revision"):
        library.inspect(copied(tmp_path), revision="main")


def test_a_file_that_is_no_model(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    refused(attnlens("inspect", tmp_path / "notes.txt"), "notes.txt")


def test_a_picture_of_an_unknown_kind(tmp_path):
    refused(attnlens("inspect", "demo", "--figure", tmp_path / "x.tiff", *SMALL), ".png")


@pytest.mark.parametrize("wait", [0.0, 0.5, 2.0])
def test_interruption_leaves_nothing_half_written(tmp_path, wait):
    text = tmp_path / "long.txt"
    text.write_text((DEMO / "text.txt").read_text() * 50)
    words = ["inspect", "--json", str(tmp_path / "r.json"), "--windows", "100000", "--text", str(text)]
    process = subprocess.Popen(
        [str(forkserver.commands() / "attnlens"), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a test run in the background inherits ignored interruptions, and would hand them on
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert "using demo" in process.stderr.readline(), "the command has begun"
    time.sleep(wait)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    left = [path.name for path in tmp_path.iterdir() if path.name != "long.txt"]
    assert left in ([], ["r.json"])
    if left:
        assert "interrupted" in read_report(tmp_path / "r.json").coverage.sentence
