"""The options that say how texts are sampled, through the program: exit codes, stdout, stderr and files."""

from __future__ import annotations

import csv
import json
import math
import statistics
from pathlib import Path

import pytest
from program import attnlens

from attnlens import inspect
from attnlens.errors import UsageError
from attnlens.models import texts

BOOK = texts.sample("demo")[0].text
SMALL = ("--source", "tokens", "--analyzer", "spectrum", "--layers", "0", "--length", "32", "--no-progress")


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Six texts, different stretches of one book."""
    folder = tmp_path_factory.mktemp("texts")
    paths = [folder / f"piece-{number}.txt" for number in range(6)]
    for number, path in enumerate(paths):
        path.write_text(BOOK[8_000 * number : 8_000 * (number + 1)])
    return [str(path) for path in paths]


def given(paths: list[str]) -> list[str]:
    return [word for path in paths for word in ("--text", path)]


def test_windows_are_told_in_the_report_and_written_one_by_one(pieces: list[str], tmp_path: Path) -> None:
    done = attnlens(
        "inspect", "demo", *SMALL, *given(pieces[:3]), "--windows", "9",
        "--json", str(tmp_path / "r.json"), "--windows-csv", str(tmp_path / "w.csv"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "9 × 32 tokens spread over piece-0.txt + piece-1.txt + piece-2.txt" in said
    assert "± is the standard error of that median (errors reflect which 9 of the" in said
    assert "between texts" in said
    report = json.loads((tmp_path / "r.json").read_text())
    assert [len(text["windows"]) for text in report["settings"]["texts"]] == [3, 3, 3]
    assert "windows" not in report
    rows = list(csv.DictReader((tmp_path / "w.csv").open()))
    assert len(rows) == 9 * 8
    head = report["heads"][5]["measures"]["tokens.entropy"]
    own = [float(row["tokens.entropy"]) for row in rows if row["head"] == "5"]
    assert statistics.mean(own) == pytest.approx(head["value"], rel=1e-8)
    groups = [own[start : start + 3] for start in (0, 3, 6)]
    error = math.sqrt(sum((1 / 3) ** 2 * statistics.variance(group) / 3 for group in groups))
    assert error == pytest.approx(head["se"], rel=1e-7), "anyone can redo the inference from the file"


def test_a_swap_writes_its_windows_and_the_change_on_each_text(pieces: list[str], tmp_path: Path) -> None:
    done = attnlens(
        "swap-kernel", "demo", "--no-progress", *given(pieces[:2]), "--windows", "8", "--length", "32",
        "--json", str(tmp_path / "r.json"), "--windows-csv", str(tmp_path / "w.csv"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Text by text" in done.stdout
    swap = json.loads((tmp_path / "r.json").read_text())["swap"]
    rows = list(csv.DictReader((tmp_path / "w.csv").open()))
    assert len(rows) == 8
    after, before = (statistics.mean(float(row[f"loss.{side}"]) for row in rows) for side in ("after", "before"))
    assert after - before == pytest.approx(swap["loss"]["delta"], rel=1e-6)
    for number, text in enumerate(swap["loss_by_text"]):
        own = [float(row["loss.after"]) - float(row["loss.before"]) for row in rows[4 * number : 4 * number + 4]]
        assert statistics.mean(own) == pytest.approx(text["change"]["delta"], rel=1e-6)


@pytest.mark.parametrize(
    ("words", "problem", "remedy"),
    [
        (("--placement", "middle"), "There is no placement 'middle'.", "Choose from: spread, first, random."),
        (("--placement", "sprad"), "There is no placement 'sprad'.", "Did you mean 'spread'?"),
        (("--text", "."), "--text does not name a file: the path is empty or a folder.", "Give the path of a file"),
        (("--windows-csv", ""), "--windows-csv does not name a file.", "Give a path after --windows-csv"),
        (("--windows-csv", "a.csv", "--csv", "a.csv"), "--csv and --windows-csv name the same file", "its own file"),
    ],
)
def test_words_that_make_no_sense_are_refused(words: tuple[str, ...], problem: str, remedy: str) -> None:
    done = attnlens("inspect", "demo", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert problem in done.stderr
    assert remedy in done.stderr


def test_intervals_over_texts_need_five(pieces: list[str]) -> None:
    options = {"source": "tokens", "analyzers": "spectrum", "layers": [0], "length": 32, "intervals": "texts"}
    with pytest.raises(UsageError, match=r"Intervals over texts need .* 5 texts, but the \d+ sequences come from 4\."):
        inspect("demo", text=pieces[:4], windows=8, **options)
    enough = attnlens("inspect", "demo", *SMALL, *given(pieces), "--windows", "12")
    assert enough.returncode == 0, enough.stderr
    assert "errors are computed over 6 texts and apply to similar texts" in " ".join(enough.stdout.split())
    report = inspect("demo", text=pieces, windows=12, **options | {"intervals": "windows"})
    assert report.settings.intervals == "windows"


def test_a_short_text_says_how_many_windows_there_are(pieces: list[str], tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text(BOOK[:900])
    done = attnlens("inspect", "demo", *SMALL, "--text", str(short))
    assert done.returncode == 0, done.stderr
    assert "of the 32 requested windows." in done.stdout
    short.write_text("Amen.")
    none = attnlens("inspect", "demo", *SMALL, "--text", str(short))
    assert (none.returncode, none.stdout) == (2, "")
    assert "one window needs 32" in none.stderr


def test_a_foreign_text_stops_unless_it_is_allowed(tmp_path: Path) -> None:
    import tiny

    folder, text = tmp_path / "model", tmp_path / "foreign.txt"
    tiny.gpt2(vocab_size=300).save_pretrained(folder)
    tiny.tokenizer("bert").save_pretrained(folder)
    text.write_text("ж ш щ " * 200)
    words = ("inspect", str(folder), "--source", "tokens", "--length", "16", "--text", str(text), "--no-progress")
    stopped = attnlens(*words)
    assert (stopped.returncode, stopped.stdout) == (2, "")
    assert "88% of the tokens of foreign.txt are unknown to the tokenizer" in stopped.stderr
    assert "--allow-foreign-text" in stopped.stderr
    outputs = [str(tmp_path / f"report.{kind}") for kind in ("json", "html", "md")]
    asked = zip(("--json", "--html", "--markdown"), outputs, strict=True)
    allowed = attnlens(*words, "--allow-foreign-text", *(word for pair in asked for word in pair))
    assert allowed.returncode == 0, allowed.stderr
    for said in (allowed.stdout, *(Path(path).read_text() for path in outputs)):
        assert "88% of the tokens of foreign" in " ".join(said.split())


def test_texts_without_a_window_are_told(pieces: list[str]) -> None:
    done = attnlens("inspect", "demo", *SMALL, *given(pieces[:5]), "--windows", "4")
    assert done.returncode == 0, done.stderr
    assert "Left out: piece-4.txt, because there are only 4 sequences for 5 texts." in " ".join(done.stdout.split())
    with pytest.raises(UsageError, match=r"need at least 5 texts, but the 4 sequences come from 4\.\nIncrease windows"):
        inspect("demo", text=pieces[:5], windows=4, length=32, layers=[0], intervals="texts")


def test_the_caption_follows_the_placement() -> None:
    said = " ".join(attnlens("inspect", "demo", *SMALL, "--windows", "4", "--placement", "first").stdout.split())
    assert "4 × 32 tokens from the beginning of King James passages" in said
    assert "apply to similar windows, not to all of King James passages" in said
    assert "windows of King James passages" not in said


def test_a_text_that_a_byte_level_model_guesses_worse_than_evenly_is_told(pieces: list[str], tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.txt"
    foreign.write_text("".join(chr(0x4E00 + 7919 * number % 2000) for number in range(900)))
    for words in (
        ("inspect", "demo", *SMALL),
        ("swap-kernel", "demo", "--layers", "0", "--length", "32", "--no-progress"),
    ):
        done = attnlens(*words, "--text", str(foreign), *given(pieces[:1]), "--windows", "8")
        assert done.returncode == 0, done.stderr
        said = " ".join(done.stdout.split())
        assert "The model's loss on foreign.txt is" in said
        assert "worse than random guessing (ln 1024 = 6.93)" in said
        assert "loss on piece-0.txt" not in said, "the control"
