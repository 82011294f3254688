"""Tests that invalid arguments, defaults and inputs are refused in two lines with code 2, before torch is loaded."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import checkpoint, other_shape
from program import DEMO, answers_nothing, environment_with, invoke, refused
from reports import synthetic_report
from swap_reports import planned

from attnlens.cli.outputs import NO_MODEL, Outputs
from attnlens.errors import UsageError

OUTPUTS = ("json", "csv", "windows-csv", "figure", "html", "markdown")
KERNELS = "swap-kernel demo --kernel"
USE, LOCAL, LONG = "inspect demo", "Give a local path.", "n" * 300
REFUSALS: list[tuple[str | list[str], tuple[str, ...]]] = [
    # models and texts
    ("inspect ./no/such/folder", ("no such folder",)),
    *((f"inspect {name}", (name,)) for name in ("none.gguf", "my.txt")),
    ("inspect bare", ("config.json",)),
    *((words, ("no such folder",)) for words in
      ("doctor ./none", "converge --checkpoints ./a ./b", "converge ./none --head 0.0", "swap-kernel ./none")),
    ("converge --checkpoints demo no/such/folder", ("no/such/folder",)),
    ("inspect -", ("from stdin",)),
    (["inspect", ""], ("empty",)),
    ("inspect --text none.txt", ("none.txt",)),
    ("inspect --text .", ("--text does not name a file: the path is empty or a folder.", "Give the path of a file")),
    (["inspect", "--text", ""], ("--text does not name a file",)),
    ("inspect --text m", ("it is a folder",)),
    ("inspect --text /dev/zero", ("it is a device, not a file",)),
    ("doctor --text ~nosuchuser/x.txt", ("nosuchuser",)),
    ("swap-kernel --kernel rank:4 --fit --calibration none.txt", ("none.txt",)),
    ("swap-kernel --text - --calibration -", ("can read stdin",)),
    ("ranks --ranks none.json", ("none.json",)),
    ("ranks --ranks m", ("Is a directory",)),
    ("report", ("REPORT",)),
    ("report none.json", ("none.json",)),
    ("report version3.json", ("schema_version",)),
    ("report nan.json", ("not a report",)),
    ("report report.json --json report.json", ("the report",)),
    # arguments
    ("inspekt", ("No such command 'inspekt'", "Run: attnlens -h")),
    ("inspect --hedas 2", ("No such option: --hedas", "--heads", "Run: attnlens inspect -h")),
    ("inspect --analyser x", ("No such option: --analyser. Did you mean --analyzer?\n",)),
    ("inspect --text empty.txt", ("The text is empty: empty.txt.",)),
    ("inspect --windows 0", ("--windows must be at least 1, not 0.\n",)),
    ("inspect demo --length", ("--length", "Run: attnlens inspect -h")),
    ("inspect demo more", ("more", "Run: attnlens inspect -h")),
    ("inspect --length 1", ("--length must be at least ",)),
    ("inspect --layers 3-0", ("reversed range", "0-3")),
    ("inspect --heads x", ("not a list of numbers",)),
    *((f"inspect --heads {numbers}", ("9999",)) for numbers in ("0-99999999999", "1,2-10000", "9" * 5000)),
    (["inspect", "--layers", "\x1b[31m" + "x" * 3_000_000], ("…",)),
    ("inspect --head 3", ("does not name a head", "LAYER.HEAD")),
    ("converge --head 3.x", ("does not name a head",)),
    *((words, ("--head cannot be combined with --layers or --heads",)) for words in
      ("inspect --head 3.7 --layers 3", "converge --checkpoints --head 3.7 --heads 7")),
    ("inspect --show selection", ("--head 3.7",)),
    ("inspect --head 1.2 --show everything", ("selection",)),
    ("inspect --head 1.2 --show selection --analyzer spectrum", ("--analyzer selection",)),
    *((f"inspect --source weights {words}", ("cannot be computed from source=weights",)) for words in
      ("--head 1.2 --show selection", "--analyzer selection")),
    (f"inspect --source weights --text {DEMO}/text.txt", ("`text` would be ignored",)),
    ("inspect --source weights --windows-csv w.csv", ("does not read windows",)),
    ("inspect --analyzer symetry", ("symetry", "Did you mean 'symmetry'")),
    ("inspect --source weight", ("Did you mean 'weights'",)),
    ("inspect --placement frist", ("Unknown placement 'frist'.", "Did you mean 'first'")),
    ("inspect --placement middle", ("Unknown placement 'middle'.", "Choose from: spread, first, random.")),
    ("list measure", ("Did you mean 'measures'",)),
    ("inspect --dtype float31", ("Unknown dtype 'float31'",)),
    ("doctor --device abacus", ("Unknown device 'abacus'",)),
    *((f"inspect --seed {seed}", ("--seed", "Run: attnlens inspect -h")) for seed in ("-1", 2**63, "x", "1.5")),
    ("reproduce --seed x", ("--seed",)),
    ("ranks --budget 1%", ("Cannot parse the budget '1%'",)),
    ("ranks demo --latents rank=8", ("--latents: cannot parse 'rank=8'",)),
    ("heal demo --kernel rbf --kernel linear", ("heal accepts a single kernel, not 2",)),
    ("heal demo --train 2m", ("--train: cannot parse '2m'",)),
    (f"{KERNELS} rfb", ("Unknown kernel 'rfb'", "Did you mean 'rbf'")),
    (f"{KERNELS} symmetric --fit", ("no free parameter",)),
    ("swap-kernel --part decder", ("Unknown part 'decder'", "Did you mean 'decoder'?")),
    ("swap-kernel --sweep head", ("Unknown sweep 'head'", "Did you mean 'heads'?")),
    (f"swap-kernel --calibration {DEMO}/text.txt", ("no effect without --fit",)),
    ("converge --experiment ranc", ("Did you mean 'rank'",)),
    *((f"converge --{option} 0", (f"--{option} must be at least 1, not 0.",)) for option in ("iterations", "trials")),
    ("converge --head 0.1 --layers 1", ("--layers applies to checkpoints",)),
    ("converge --checkpoints --trials 3", ("--trials applies to the synthetic experiments",)),
    ("converge --length 16", ("--length applies to a single head and checkpoints",)),
    ("converge demo", ("needs --head, --checkpoints or --revisions",)),
    ("explain share_skw", ("Unknown measure, kernel or term 'share_skw'", "Did you mean")),
    (["explain", "\x1b[31mred"], ("Unknown measure, kernel or term",)),
    ("explain rank90", ("the name of several measures", "weights.rank90, ")),
    # removed names, and keywords of Python
    ("inspect --models a", ("Run the command once per model",)),
    ("inspect --dry-run", ("--windows 2 shortens the run",)),
    ("inspect --tokens 3", ("Use --length.",)),
    ("check r.json --sarif x", ("Use --junit or --annotations.",)),
    ("merge w", ("without --shard",)),
    ("inspect --select argmax", ("Use select in Python: it is a keyword of the function.",)),
    ("swap-kernel --no-controls", ("Use controls=False in Python.",)),
    *((f"{command} --{name} 1", (f"Use {name} in Python",)) for command, name in
      (("swap-kernel", "path"), ("heal", "eta"), ("converge", "lr"))),
    ("swap-kernel --heal 200", ("Use attnlens heal --train.",)),
    ("swap-kernel --heal-on text", ("Use attnlens heal --learn.",)),
    ("swap-kernel --heal-rank 4", ("Use rank, a keyword of the function heal.",)),
    ("swap-kernel --budget loss:1%", ("Use attnlens ranks --budget.",)),
    ("swap-kernel --ranks plan.json", ("Use attnlens ranks --ranks.",)),
    ("inspect --revision main", ("org/name@revision",)),
    ("inspect --windows first", ("--placement sets the position of windows",)),
    ("inspect --device-map auto", ("Use --device spread.",)),
    *((f"{USE} --{out} no/x", ("no/x can't be written", "/no does not exist", "Run: mkdir -p ")) for out in OUTPUTS),
    *((["inspect", "demo", f"--{option}", ""], (f"--{option} does not name a file",)) for option in OUTPUTS),
    *((f"{USE} --{out} s3://b/r", (f"--{out} must be a path on this machine, not s3:", LOCAL)) for out in OUTPUTS),
    *((f"{USE} --{out} {address}", (f"--{out} must be a path on this machine, not {address}", LOCAL))
      for out, address in (("json", "file:///tmp/r"), ("csv", "nonsense://r"))),
    (["check", "report.json", "--rule", "coverage.analysed: value > 0", "--junit", "s3://j.xml"],
     ("--junit must be a path on this machine",)),
    ("ranks demo --budget loss:1% --plan s3://p", ("--plan must be a path on this machine",)),
    *((f"{command} --{option} s3://a/b", (f"--{option}", "this machine", "s3://a/b", LOCAL)) for command, option in
      (("swap-kernel", "save"), ("reproduce kernels", "work"), ("reproduce kernels", "save"),
       ("check demo --update-baseline", "baseline"))),
    (f"{USE} --json m", ("is a folder",)),
    (f"{USE} --json x.json/", ("does not name a file",)),
    (f"{USE} --json --csv", ("followed by the option --csv",)),
    (f"{USE} --csv -", ("can't write to stdout", "/dev/stdout")),
    (f"{USE} --figure -", ("can't write to stdout", "a folder")),
    (["inspect", "--json", "a b; touch PWNED #/x.json"], ("Run: mkdir -p '",)),
    *((f"swap-kernel demo --{option} {LONG}", ("File name too long",)) for option in ("save", "json", "figure")),
    (["swap-kernel", "--save", ""], ("--save does not name a folder",)),
    ("swap-kernel --save m", ("not an empty folder",)),
    *(
        (f"{USE} --json {one} --figure {other}", ("--json and --figure name the same file",))
        for one in ("a.png", "old.png") for other in (one, f"./{one}", f"link-{one}")
    ),
    (f"{USE} --windows-csv a.csv --csv a.csv", ("--csv and --windows-csv name the same file", "its own file")),
    ("swap-kernel --save new --json new", ("--json and --save name the same file",)),
    # outputs that would replace an input
    ("inspect --text my.txt --markdown my.txt", ("--markdown would replace my.txt, which --text reads",)),
    ("inspect --text my.txt --csv soft.txt", ("soft.txt, which --text reads",)),
    ("inspect --text soft.txt --html my.txt", ("my.txt, which --text reads",)),
    ("swap-kernel --kernel rank:4 --fit --calibration my.txt --csv my.txt", ("which --calibration reads",)),
    ("ranks --ranks plan.json --json plan.json", ("which --ranks reads",)),
    ("inspect m/model.safetensors --json m/config.json", ("a file of the model",)),
    ("doctor n --json m/model.safetensors", ("a file of the model n",)),
    *((words, ("a file of the model m",)) for words in
      ("inspect m --csv m/model.safetensors", "inspect m --json link/config.json", "doctor m --json weights",
       "converge m --head 0.0 --csv m/tokenizer.json")),
    ("inspect --text pictures/overview.png --figure pictures", ("pictures/overview.png, which --text reads",)),
]  # fmt: skip
DRAWN = [(f"{USE} --figure {name}", (name, ".png")) for name in ("x.tiff", "my.txt")]
"""Refused by matplotlib's kinds of files, the only reason to load it."""
REMEDIES = ("Use ", "Run the command once", "--windows 2", "without --shard", "org/name@", "--placement sets")
FORBIDDEN = [*OUTPUTS, "plan", "save", "text", "calibration", "ranks", "model", "models", "revisions"]
DEFAULTS: list[tuple[str, dict[str, str], tuple[str, ...]]] = [
    *(
        (f'{key} = "x"\nquiet = true\n', {}, (f"must not set {key}", f"Remove {key} from", *variable))
        for key in FORBIDDEN
        for variable in [() if key in ("model", "models") else (key.replace("-", "_").upper(),)]  # or it is an argument
    ),
    *((f"{name} = true", {}, (name,)) for name in ("trust_remote_code", "allow-pickle")),
    ('layrs = "2"', {}, ("layrs", "Did you mean 'layers'")),
    ("layers = [", {}, ("TOML",)),
    ("layers = [1]", {}, ("layers must be a string in quotes",)),
    ('length = "x"', {}, ("length must be a whole number",)),
    ("windows = true", {}, ("windows must be a whole number",)),
    ('no-pack = "x"', {}, ("no-pack must be true or false",)),
    ("analyzer = [5]", {}, ("analyzer must be a string in quotes, or a list of such values",)),
    ("placement = 5", {}, ("placement must be a string in quotes",)),
    ("seed = -1", {}, ("--seed",)),
    *((text, {}, ("attnlens.toml",)) for text in ("a = " + "[" * 50_000, "seed = " + "9" * 5000, "\udcff")),
    ("a = " + "{b=" * 9000, {}, ("attnlens.toml",)),
    *(("", {name: value}, (name,)) for name, value in
      (("ATTNLENS_PACK", "perhaps"), ("ATTNLENS_LENGTH", "1"))),
]  # fmt: skip
"""attnlens.toml, environment variables, and parts of the message of `inspect`."""
PROJECT = [(text, ("pyproject.toml", "must be a table")) for text in ("tool = 5", "[tool]\nattnlens = 5")]
PROJECT += [(f'[tool.attnlens]\n{key} = "x"\n', (f"must not set {key}",)) for key in FORBIDDEN]
ACCEPTED = [
    ("--help", "Usage: attnlens"),
    ("--version", "attnlens "),
    ("list", "tokens.share_skew"),
    ("list kernels", "sink-window"),
    ("explain rbf", "gamma"),
    ("inspect --help", "--layers"),
    ("swap-kernel --help", "--kernel", "--part", "--sweep", "--fit", "--calibration", "--save"),
    ("converge --help", "--trials"),
    ("reproduce --help", "--quick"),
]  # fmt: skip
RUNNER = """
import contextlib, functools, io, json, os, sys
import attnlens
LIBRARIES = ["torch", "transformers", "matplotlib", "rich"]
assert not set(LIBRARIES) & set(sys.modules)
from pathlib import Path
import typer.main
from attnlens.cli.entry import exit_code
typer.main.get_command = functools.cache(typer.main.get_command)  # it is the same for all command lines
for words, files, environment in json.loads(Path("calls.json").read_text()):
    for name, text in files.items():
        Path(name).write_bytes(text.encode(errors="surrogateescape"))
    os.environ.update(environment)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        sys.argv = ["attnlens", *words]
        code = exit_code()
    for name in files:
        Path(name).unlink()
    for name in environment:
        del os.environ[name]
    heavy = [name for name in LIBRARIES if name in sys.modules]
    LIBRARIES = [name for name in LIBRARIES if name not in heavy]
    print(json.dumps([code, out.getvalue(), err.getvalue(), heavy]))
sys.modules["torch"] = None
print(exit_code(["inspect", "demo", "-q"]))
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with a model, links, texts, reports and a plan."""
    folder = tmp_path_factory.mktemp("here")
    shutil.copytree(DEMO, folder / "m", ignore=shutil.ignore_patterns("checkpoints"))
    for name in ("n", "bare", "pictures"):
        (folder / name).mkdir()
    for file in (folder / "m").iterdir():
        (folder / "n" / file.name).symlink_to(file)
    (folder / "bare" / "model.safetensors").symlink_to(folder / "m" / "model.safetensors")
    (folder / "my.txt").write_text("The cat sat on the mat and looked at the dog. " * 40)
    (folder / "empty.txt").touch()
    shutil.copy(folder / "my.txt", folder / "pictures" / "overview.png")
    (folder / "old.png").touch()
    links = {"soft.txt": "my.txt", "link": "m", "weights": "m/model.safetensors", "link-a.png": "a.png"}
    for name, target in (links | {"link-old.png": "old.png"}).items():
        (folder / name).symlink_to(target)
    report = synthetic_report(2, 2).to_json()
    (folder / "report.json").write_text(report)
    (folder / "version3.json").write_text(json.dumps(json.loads(report) | {"schema_version": "3"}))
    (folder / "nan.json").write_text(report.replace('"value": ', '"value": NaN, "x": ', 1))
    (folder / "plan.json").write_text(planned().plan.to_json())
    return folder


def split(words):
    return words.split() if isinstance(words, str) else words


def times(folder):
    """When each file and link was last changed."""
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}


def faults_of(words, parts, code, stdout, stderr):
    """What is wrong with an answer that should be a refusal."""
    lines = stderr.removeprefix(f"{NO_MODEL}\n").splitlines()
    missing = [part for part in parts if part not in stderr]
    two = (code, len(lines)) == (2, 2) and lines[0].startswith("Error: ") and answers_nothing(stdout, stderr)
    clean = "\x1b" not in stderr and len(stderr) < 2000
    return [] if two and clean and not missing else [(" ".join(split(words))[:80], missing, code, stdout, stderr)]


def test_refusals_come_in_two_lines_and_load_nothing_heavy(here):
    """All in one new process; the control is work, which cannot start there without torch."""
    calls = [[split(words), {}, {}] for words, _ in REFUSALS]
    calls += [[["inspect"], {"attnlens.toml": text}, variables] for text, variables, _ in DEFAULTS]
    calls += [[["inspect"], {"pyproject.toml": text}, {}] for text, _ in PROJECT]
    refusals = [*REFUSALS, *(("inspect", parts) for *_, parts in (*DEFAULTS, *PROJECT))]
    calls += [[[], {}, {}], *([split(words), {"attnlens.toml": "layrs = 1"}, {}] for words, *_ in ACCEPTED)]
    calls += [[split(words), {}, {}] for words, _ in DRAWN]
    (here / "calls.json").write_text(json.dumps(calls))
    before = times(here)
    command = [sys.executable, "-c", RUNNER]
    run = subprocess.run(command, capture_output=True, text=True, env=environment_with(), cwd=here, check=False)
    *answers, control = map(json.loads, run.stdout.splitlines())
    assert len(answers) == len(calls), run.stderr
    assert control == 70
    faults, drawn = [], answers[-len(DRAWN) :]
    for (words, parts), (*answer, heavy) in zip([*refusals, *DRAWN], [*answers[: len(refusals)], *drawn], strict=True):
        faults += faults_of(words, parts, *answer)
        faults += [(words, heavy)] if heavy and not (heavy == ["matplotlib"] and (words, parts) in DRAWN) else []
        faults += [(words, "env var")] if "env var" in answer[2] and not parts[0].startswith("ATTNLENS_") else []
    assert faults == [], "\n".join(map(repr, faults))
    removed = [answer for (_, parts), answer in zip(refusals, answers, strict=False) if parts[0].startswith(REMEDIES)]
    assert len(removed) > 15
    assert [answer for answer in removed if answer[2].endswith(" -h\n")] == [], "what to do instead is known"
    (code, stdout, stderr, _), *answers = answers[len(refusals) : -len(DRAWN)]
    assert (code, stderr, "swap-kernel" in stdout) == (2, "", True)
    for (words, *parts), (code, stdout, _, heavy) in zip(ACCEPTED, answers, strict=True):
        missing = [part for part in parts if part not in stdout]
        assert (code, missing, [name for name in heavy if name != "rich"]) == (0, [], []), words
    assert times(here) == before


HEAVY = [
    ("converge --revisions step1,step2", ("one hub model",)),
    ("converge demo --revisions step1,step2", ("cannot have a revision",)),
    ("converge org/model --revisions step1,,step2", ("empty name",)),
    (f"{USE} --layers 99", ("lacks layer 99", "0 to 3")),
    *((f"{USE} {words}", (part,)) for words, part in (
        ("--head 9.0", "lacks layer 9"), ("--head 0.99", "lacks head 99"), ("--length 4096", "256"),
        ("--text one.txt", "token"), ("--text empty.txt", "empty"), ("--text binary.txt", "binary"),
        ("--text short.txt --source tokens --length 32", "one window needs 32"),
    )),
    (f"converge --checkpoints {checkpoint(0)} {checkpoint(30)} --layers 9", ("The model lacks layer 9",)),
    ("converge --checkpoints --json no/such/folder/r.json", ("can't be written",)),
    (f"converge --checkpoints {checkpoint(30)} step-77", ("n_head is 8 in step-00030, but 4 in step-77",)),
    ("report headless.json -q --html page.html", ("no measures to draw",)),
    ("inspect no-such-org/no-such-model --offline", ("no-such-org/no-such-model",)),
]  # fmt: skip


def test_refusals_that_need_the_model_or_the_text(tmp_path):
    texts = {"one.txt": b"a", "empty.txt": b"", "binary.txt": b"\0\1\2\3" * 100, "short.txt": b"Amen."}
    for name, content in texts.items():
        (tmp_path / name).write_bytes(content)
    other_shape(tmp_path, n_head=4)
    report = json.loads(synthetic_report(2, 2).to_json())
    (tmp_path / "headless.json").write_text(json.dumps(report | {"heads": []}))
    before = times(tmp_path)
    results = [invoke(*words.split(), cwd=tmp_path) for words, _ in HEAVY]
    answers = [(result.returncode, result.stdout, result.stderr) for result in results]
    assert [fault for case, answer in zip(HEAVY, answers, strict=True) for fault in faults_of(*case, *answer)] == []
    assert times(tmp_path) == before


def test_refusals_in_this_process_of_a_missing_device_and_of_defaults_without_an_end(tmp_path, monkeypatch):
    """Here, mutations.py finds the lines that run; in the process of RUNNER, it does not."""
    for words, part in (
        (["inspect", "a\0b"], "contains a NUL"),
        (["inspect", "--select", "argmax"], "Use select in Python: it is a keyword of the function."),
        (["inspect", "demo", "--json", "--csv"], "followed by the option --csv"),
    ):
        refused(invoke(*words, cwd=tmp_path), part)
    (tmp_path / "config.json").touch()
    with pytest.raises(UsageError, match="a file of the model"):
        Outputs(json=str(tmp_path / "config.json")).check({str(tmp_path): "a file of the model"})
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refused(invoke("inspect", "demo", "--device", "cuda"), "cuda")
    result = invoke("inspect", "demo", "--layers", "99", "--debug")
    assert result.returncode == 2
    assert result.stderr.index("Traceback") < result.stderr.index("Error: The model lacks layer 99")
    with Path(tmp_path, "attnlens.toml").open("wb") as file:
        file.truncate(3 * 2**30)
    refused(invoke("inspect", cwd=tmp_path), "larger than 1 MiB")
