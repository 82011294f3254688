"""Tests texts that are rows of datasets: how rows are read, cut off and named, and what is refused."""

import json
import sys
from hashlib import sha256

import pytest
from program import SMALL, attnlens, invoke, refused

import attnlens as library
from attnlens.errors import AttnlensError, ShardFinished, TextError, UsageError
from attnlens.models import texts
from attnlens.models.texts import sequences

BOOK = [line for line in texts.sample("demo")[0].text.splitlines() if line.strip()]
FEW = {"source": "tokens", "layers": [0], "windows": 4, "length": 32}
NAME = "datasets:books,split=test,column=text"


def write_rows(path, lines):
    path.write_text("".join(json.dumps({"text": line, "line": number}) + "\n" for number, line in enumerate(lines)))


@pytest.fixture
def folder(tmp_path):
    """A dataset of two splits in files of jsonl."""
    place = tmp_path / "books"
    place.mkdir()
    write_rows(place / "test.jsonl", BOOK[:200])
    write_rows(place / "train.jsonl", BOOK[200:400])
    return place


def test_program_reads_datasets_for_evaluation_and_calibration(folder, tmp_path):
    words = ("--text", "datasets:./books", "--calibration", "datasets:books,split=train", "--json", "r.json")
    one = ("swap-kernel", "demo", "--layers", "0", *SMALL)
    done = invoke(*one, "--kernel", "rank:8", "--fit", "--generate", "0", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    settings = json.loads((tmp_path / "r.json").read_text())["settings"]
    assert settings["text"]["name"] == NAME
    for split, lines in (("text", BOOK[:200]), ("calibration", BOOK[200:400])):
        assert settings[split]["sha256"] == sha256(("\n".join(lines) + "\n").encode()).hexdigest()
    result = invoke("inspect", "demo", *SMALL, "--text", "datasets:books", "--json", "books/test.jsonl", cwd=tmp_path)
    refused(result, "--json would replace books/test.jsonl", "dataset that --text reads")
    offline = invoke("inspect", "demo", *SMALL, "--text", "datasets:a/b", "--offline")
    refused(offline, "--offline", "Leave out --offline")


def test_configurations_columns_and_other_forms_of_files(tmp_path):
    for name, line in (("old", BOOK[0]), ("new", BOOK[1])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "test.txt").write_text(line + "\n")
    configs = [{"config_name": name, "data_dir": name} for name in ("old", "new")]
    (tmp_path / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    content = texts.read(f"datasets:{tmp_path},config=new")
    new = f"datasets:{tmp_path.name},config=new,split=test,column=text"
    assert (content.text, content.name) == (BOOK[1] + "\n", new)
    with pytest.raises(TextError, match=r"'old', 'new'|'new', 'old'"):
        texts.read(f"datasets:{tmp_path}")
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "train.csv").write_text("verse,book\nIn the beginning,Genesis\n")
    content = texts.read(f"datasets:{tmp_path / 'csv'},split=train,column=book")
    assert (content.text, content.name) == ("Genesis\n", "datasets:csv,split=train,column=book")


def test_rows_are_read_only_as_far_as_windows_are_cut(folder, monkeypatch):
    (folder / "test.jsonl").unlink()
    for number in range(3):
        write_rows(folder / f"test-{number:05}-of-00003.jsonl", BOOK[20 * number :][:20])
    (folder / "test-00002-of-00003.jsonl").write_text("{cut off")
    with pytest.raises(TextError, match="can't be read"):
        texts.read(f"datasets:{folder}")
    monkeypatch.setattr(sequences, "LONGEST", 2000)
    content = texts.read(f"datasets:{folder}")
    assert (content.text, content.name) == ("\n".join(BOOK)[:2000], f"{NAME} (the first 2,000 characters)")


REFUSALS = {
    "books,split=dev": ("no split 'dev'; its splits are train, test.", "books,split=train"),
    "books,column=verse": ("no text in the column 'verse'; its columns are text, line.", "column="),
    "books,column=line": ("Row 1", "has no text in the column 'line'", "column="),
    "books,config=large": ("'large' not found", "'default'"),
    **dict.fromkeys(("books,splt=test", "books,split=", "b,split=a,split=b", "b,c"), ("Cannot parse", "split=S")),
    **dict.fromkeys(("", ",split=a"), ("Cannot parse",)),
    "books-of-nobody": ("books-of-nobody is neither a local folder nor the name", "OWNER/NAME"),
}


def test_missing_parts_of_a_dataset_are_named(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, messages in REFUSALS.items():
        with pytest.raises(AttnlensError) as caught:
            texts.read(f"datasets:{name}")
        assert all(message in str(caught.value) for message in messages), caught.value
    write_rows(folder / "test.jsonl", ["  indented \n"])
    assert texts.read("datasets:books").text == "  indented \n", "control: only line ends are normalised"
    write_rows(folder / "test.jsonl", [" "])
    with pytest.raises(TextError, match="empty"):
        texts.read_each(["datasets:books"])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(TextError, match="script"):
        texts.read("datasets:./mine")
    assert not (tmp_path / "ran").exists(), "code of a dataset is not run"
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"attnlens\[datasets\]"):
        texts.read("datasets:books")


def test_an_unreachable_hub_is_named(monkeypatch):
    refused(attnlens("inspect", "demo", *SMALL, "--text", "datasets:a/b"), "a/b", "can't be read", "folder")
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)
    monkeypatch.setattr(sequences, "reachable", lambda endpoint: False)
    with pytest.raises(
        TextError, match=r"a/b is not a local folder, and the hub can't be reached\.\nConnect to the network"
    ):
        texts.read("datasets:a/b")


def test_rows_read_as_a_file_of_them_and_changed_rows_void_finished_units(folder, tmp_path):
    options, reports = {"text": f"datasets:{folder}", "work": tmp_path / "work", **FEW}, []
    for lines in (BOOK[:200], ["And it was so.", *BOOK[:200]]):
        write_rows(folder / "test.jsonl", lines)
        with pytest.raises(ShardFinished):
            library.inspect("demo", **options, shard="1/1")
        reports.append(library.inspect("demo", **options))
    assert reports[0].settings.text.sha256 != reports[1].settings.text.sha256
    (tmp_path / "rows.txt").write_text("\n".join(BOOK[:200]) + "\n")
    plain = library.inspect("demo", text=str(tmp_path / "rows.txt"), **FEW)
    assert plain.heads == reports[0].heads
    assert plain.heads != reports[1].heads
    assert plain.settings.text.sha256 == reports[0].settings.text.sha256
