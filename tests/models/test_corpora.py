"""Tests texts that are rows of datasets: what is read, how far, how it is called, and what is refused."""

import json
import sys
from hashlib import sha256

import pytest
from program import SMALL, attnlens, refused

import attnlens as library
from attnlens.arguments import DatasetRows, dataset_rows
from attnlens.errors import AttnlensError, ShardFinished, TextError, UsageError
from attnlens.models import texts
from attnlens.models.texts import sequences as sources

BOOK = [line for line in texts.sample("demo")[0].text.splitlines() if line.strip()]
FEW = {"source": "tokens", "layers": [0], "windows": 4, "length": 32}


def shard(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path):
    """A dataset of two splits in files of jsonl."""
    place = tmp_path / "books"
    place.mkdir()
    for split, start in (("test", 0), ("train", 200)):
        shard(place / f"{split}.jsonl", [{"text": line, "line": n} for n, line in enumerate(BOOK[start : start + 200])])
    return place


def test_a_dataset_is_read_as_a_file_of_its_rows_is(folder, tmp_path):
    (tmp_path / "rows.txt").write_text("".join(line + "\n" for line in BOOK[:200]))
    one, other = (
        library.inspect("demo", text=name, **FEW) for name in (f"datasets:{folder}", str(tmp_path / "rows.txt"))
    )
    assert one.heads == other.heads
    assert one.settings.text.sha256 == other.settings.text.sha256
    assert one.settings.text.name == "datasets:books,split=test,column=text"


def test_the_program_takes_a_dataset_for_what_it_evaluates_and_calibrates_on(folder, tmp_path):
    words = ("--text", "datasets:./books", "--calibration", "datasets:books,split=train", "--json", "r.json")
    done = attnlens("swap-kernel", "demo", *SMALL, "--kernel", "rank:8", "--fit", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    settings = json.loads((tmp_path / "r.json").read_text())["settings"]
    assert settings["text"]["name"] == "datasets:books,split=test,column=text"
    rows = "".join(line + "\n" for line in BOOK[200:400])
    assert settings["calibration"]["sha256"] == sha256(rows.encode()).hexdigest()


def test_configurations_columns_and_other_forms_of_files(tmp_path):
    for name, line in (("old", BOOK[0]), ("new", BOOK[1])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "test.txt").write_text(line + "\n")
    configs = [{"config_name": name, "data_dir": name} for name in ("old", "new")]
    (tmp_path / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    assert texts.read(f"datasets:{tmp_path},config=new").text == BOOK[1] + "\n"
    with pytest.raises(TextError, match=r"'old', 'new'|'new', 'old'"):
        texts.read(f"datasets:{tmp_path}")
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "train.csv").write_text("verse,book\nIn the beginning,Genesis\n")
    found = texts.read(f"datasets:{tmp_path / 'csv'},split=train,column=book")
    assert (found.text, found.name) == ("Genesis\n", "datasets:csv,split=train,column=book")


def test_rows_are_read_only_as_far_as_windows_are_cut(folder, monkeypatch):
    (folder / "test.jsonl").unlink()
    for number in range(3):
        shard(folder / f"test-{number:05}-of-00003.jsonl", [{"text": line} for line in BOOK[50 * number :][:50]])
    (folder / "test-00002-of-00003.jsonl").write_text("{cut off")
    with pytest.raises(TextError, match="can't be read"):
        texts.read(f"datasets:{folder}")
    monkeypatch.setattr(sources, "LONGEST", 2000)
    found = texts.read(f"datasets:{folder}")
    assert found.text == "\n".join(BOOK)[:2000]
    assert found.name == "datasets:books,split=test,column=text (the first 2,000 characters)"


def test_a_dataset_that_is_a_script_is_not_run(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(TextError, match="script"):
        texts.read(f"datasets:{tmp_path / 'mine'}")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (",split=dev", ("no split 'dev'; it has train, test.", "books,split=train")),
        (",column=verse", ("no text in the column 'verse'; its columns are text, line.", "column=")),
        (",column=line", ("Row 1", "has no text in the column 'line'", "column=")),
        (",config=large", ("'large' not found", "'default'")),
        (",splt=test", ("Cannot parse", "split=S")),
        (",split=", ("Cannot parse", "split=S")),
        (",split=test,split=train", ("Cannot parse", "split=S")),
        ("-of-nobody", ("books-of-nobody is neither a local folder nor the name", "OWNER/NAME")),
    ],
)
def test_what_a_dataset_does_not_have_is_named(folder, tmp_path, words, said):
    refused(attnlens("inspect", "demo", *SMALL, "--text", f"datasets:books{words}", cwd=tmp_path), *said)


def test_a_dataset_of_the_hub_is_not_asked_for_where_it_can_not_be_had(monkeypatch):
    refused(attnlens("inspect", "demo", *SMALL, "--text", "datasets:a/b"), "a/b", "can't be read", "folder")
    offline = attnlens("inspect", "demo", *SMALL, "--text", "datasets:a/b", "--offline")
    refused(offline, "--offline", "Leave out --offline")
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)
    monkeypatch.setattr(sources, "reachable", lambda endpoint: False)
    with pytest.raises(TextError, match=r"a/b is not a local folder, and the hub can't be reached\.\nGo online"):
        texts.read("datasets:a/b")


def test_without_the_library_its_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"attnlens\[datasets\]"):
        texts.read(f"datasets:{folder}")


def test_an_empty_dataset_is_no_text(folder):
    shard(folder / "test.jsonl", [{"text": " "}])
    with pytest.raises(TextError, match="empty"):
        texts.read_each([f"datasets:{folder}"])


def test_an_output_replaces_no_file_of_a_dataset(folder, tmp_path):
    result = attnlens("inspect", "demo", *SMALL, "--text", "datasets:books", "--json", "books/test.jsonl", cwd=tmp_path)
    refused(result, "--json would replace books/test.jsonl", "dataset that --text reads")


def test_no_unit_is_used_again_if_the_rows_have_changed(folder, tmp_path):
    asked = {"text": f"datasets:{folder}", "work": tmp_path / "work", **FEW}
    digests = []
    for line in ("", "And it was so."):
        if line:
            shard(folder / "test.jsonl", [{"text": one} for one in (line, *BOOK[:200])])
        with pytest.raises(ShardFinished):
            library.inspect("demo", **asked, shard="1/1")
        digests.append(library.inspect("demo", **asked).settings.text.sha256)
    assert digests[0] != digests[1]


def test_the_words_of_a_dataset():
    assert dataset_rows("book.txt") is None
    assert dataset_rows("datasets:a/b,config=c,split=d,column=e") == DatasetRows("a/b", "c", "d", "e")
    for words in ("datasets:", "datasets:,split=a", "datasets:a,b", "datasets:a,name=b"):
        with pytest.raises(AttnlensError):
            dataset_rows(words)
