"""Tests outputs and units of work behind addresses of fsspec: put whole, checked before the work, refused by name."""

import importlib
import json

import pytest
from program import attnlens, python, refused
from reports import synthetic_report

import attnlens as library
from attnlens.addresses import PROBE, StoreAddress, is_refusal, place_of
from attnlens.cli.delivery import deliver
from attnlens.cli.input_files import Inputs
from attnlens.cli.outputs import Outputs
from attnlens.errors import OutputError
from attnlens.records import read_report

ONE = ("inspect", "demo", "--source", "weights", "--analyzer", "symmetry", "--layers", "0", "--heads", "0")
WITH_STORES = '''
import sys
import fsspec
from fsspec.implementations.local import LocalFileSystem

class Shelf(LocalFileSystem):
    """The current folder as a store; its words are called as s3fs calls them."""
    protocol = "shelf"

    @classmethod
    def _strip_protocol(cls, path):
        return LocalFileSystem._strip_protocol(path.split("://", 1)[-1])

    def pipe_file(self, path, data, chunksize=1):
        super().pipe_file(path, data)

class NoCredentialsError(Exception):
    """As botocore has it: no OSError."""

NoCredentialsError.__module__ = "botocore.exceptions"

class Closed(Shelf):
    protocol = "closed"
    def pipe_file(self, path, data):
        raise NoCredentialsError("Unable to locate credentials")
    def cat_file(self, path, **more):
        raise NoCredentialsError("Unable to locate credentials")

class Mistaken(Shelf):
    protocol = "mistaken"
    def pipe_file(self, path, data):
        raise TypeError("a mistake")

class Hosted(Shelf):
    protocol = "hosted"
    def __init__(self, host, **more):
        raise ValueError

for store in (Shelf, Closed, Mistaken, Hosted):
    fsspec.register_implementation(store.protocol, store)
sys.argv[0] = "attnlens"
from attnlens.cli import main
main()
'''
"""The program where fsspec knows some more stores."""


def with_stores(*words, cwd):
    return python("-c", WITH_STORES, *words, "--no-progress", cwd=cwd)


def test_every_kind_of_output_is_put_behind_an_address(tmp_path):
    (tmp_path / "there").mkdir()
    names = {"json": "r.json", "csv": "r.csv", "html": "r.html", "markdown": "r.md", "png": "pictures"}
    words = [word for option, name in names.items() for word in (f"--{option}", f"shelf://there/{name}")]
    done = with_stores(*ONE, "-v", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Wrote shelf://there/r.json" in done.stderr
    assert "pictures to shelf://there/pictures" in done.stderr
    assert {path.name for path in (tmp_path / "there").iterdir()} == set(names.values()), "no probe stays"
    assert (tmp_path / "there" / "pictures" / "overview.png").read_bytes().startswith(b"\x89PNG")
    assert len(read_report(tmp_path / "there" / "r.json").heads) == 1
    alone = attnlens(*ONE, "--no-progress", "-q", "--csv", "r.csv", cwd=tmp_path)
    assert alone.returncode == 0
    assert (tmp_path / "r.csv").read_bytes() == (tmp_path / "there" / "r.csv").read_bytes()


def test_one_picture_a_plan_and_a_check_are_put_behind_addresses(tmp_path):
    (tmp_path / "r.json").write_text(synthetic_report().to_json())
    drawn = with_stores("report", "r.json", "--png", "shelf://page.svg", cwd=tmp_path)
    assert drawn.returncode == 0, drawn.stderr
    assert (tmp_path / "page.svg").read_bytes().startswith(b"<?xml")
    words = ("--rule", "coverage.analysed: value > 0", "--junit", "shelf://j.xml", "--sarif", "shelf://s.sarif")
    checked = python("-c", WITH_STORES, "check", "r.json", *words, cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert (tmp_path / "j.xml").read_text().startswith("<?xml")
    assert json.loads((tmp_path / "s.sarif").read_text())["version"] == "2.1.0"


def test_an_address_of_this_machine_is_its_path(tmp_path):
    (tmp_path / "r.json").write_text("old")
    (tmp_path / "r.json").chmod(0o640)
    done = attnlens(*ONE, "--no-progress", "-q", "--json", f"file://{tmp_path}/r.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(read_report(tmp_path / "r.json").heads) == 1
    assert (tmp_path / "r.json").stat().st_mode & 0o777 == 0o640
    refused(attnlens(*ONE, "--json", f"file://{tmp_path}/none/r.json"), "there is no folder", "mkdir -p")
    assert place_of("local:///a/b") == place_of("/a/b")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--json", "nonsense://a/r.json"), ("nonsense://a/r.json can't be used", "nonsense", "Give a path")),
        (
            ("--json", "closed://r.json"),
            ("closed://r.json can't be used: Unable to locate credentials.", "Give a path"),
        ),
        (("--png", "closed://pictures"), ("closed://pictures can't be used", "credentials", "Give a path")),
        (("--csv", "shelf://none/r.csv"), ("shelf://none/r.csv can't be used", "No such file", "Give a path")),
        (("--html", "hosted://r.html"), ("hosted://r.html can't be used", "Give a path")),
        (("--markdown", "shelf://a/"), ("--markdown names no file",)),
        (("--json", "shelf://a", "--csv", "shelf://a"), ("--json and --csv name the same file",)),
        (("--png", "shelf://a.tiff"), ("shelf://a.tiff can't be drawn", ".svg")),
    ],
)
def test_what_can_not_be_put_is_refused_in_two_lines(tmp_path, words, said):
    refused(with_stores(*ONE, *words, cwd=tmp_path), *said)
    assert not list(tmp_path.rglob("*.json"))


def test_an_output_is_refused_before_the_work(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit(9)")
    program = "import sys; sys.path.insert(0, '.'); sys.modules['torch'] = None" + WITH_STORES
    result = python("-c", program, "inspect", "demo", "--json", "closed://r.json", cwd=tmp_path)
    refused(result, "closed://r.json can't be used")


def test_a_store_whose_package_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(
        importlib.import_module("fsspec.registry").known_implementations,
        "unheard",
        {"class": "package_that_is_not_there.Store", "err": "Install unheardfs to access it"},
    )
    with pytest.raises(OutputError, match=r"Install unheardfs to access it\.\nInstall the package") as caught:
        StoreAddress("unheard://a").check(is_folder=False)
    assert "unheard://a" in caught.value.problem


def test_a_mistake_in_a_program_is_no_refusal(tmp_path):
    result = with_stores(*ONE, "--json", "mistaken://r.json", cwd=tmp_path)
    assert result.returncode == 70
    assert "TypeError: a mistake" in result.stderr
    assert not is_refusal(AttributeError())
    assert is_refusal(OSError())
    assert is_refusal(pytest.UsageError()), "a class of a package"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("swap-kernel", "demo", "--save", "s3://a/b"), "--save"),
        (("study", "kernels", "--work", "s3://a/b"), "--work"),
        (("study", "kernels", "--save", "s3://a/b"), "--save"),
        (("check", "demo", "--baseline", "s3://a/b", "--update-baseline"), "--baseline"),
    ],
)
def test_what_needs_this_machine_refuses_an_address_by_name(tmp_path, words, said):
    (tmp_path / "list.txt").write_text("demo\n")
    refused(attnlens(*words, cwd=tmp_path), said, "this machine", "s3://a/b", "Give the path of one.")
    assert [path.name for path in tmp_path.iterdir()] == ["list.txt"]


@pytest.fixture
def memory():
    """A store in the memory of this process."""
    import fsspec

    system = fsspec.filesystem("memory")
    yield system
    for path in system.find("/outputs"):
        system.rm_file(path)


def test_the_library_writes_to_addresses(memory):
    report = synthetic_report()
    report.write_json("memory://outputs/r.json")
    assert memory.cat_file("/outputs/r.json") == report.to_json().encode()
    report.save("memory://outputs/r.csv")
    assert memory.cat_file("/outputs/r.csv").startswith(b"site,")
    with pytest.raises(OutputError, match="its ending says no kind of file"):
        report.save("memory://outputs/r.doc")


def test_a_check_leaves_nothing_and_keeps_what_is_there(memory):
    memory.pipe_file("/outputs/r.json", b"old")
    outputs = Outputs(json="memory://outputs/r.json", png="memory://outputs/pictures", quiet=True)
    outputs.check(Inputs())
    assert memory.find("/outputs") == ["/outputs/r.json"]
    assert memory.cat_file("/outputs/r.json") == b"old"
    deliver(outputs, synthetic_report())
    assert len(memory.find("/outputs/pictures")) > 1
    assert not [path for path in memory.find("/outputs") if path.endswith(PROBE)]


def test_who_may_write_and_not_remove_is_let_write(memory, monkeypatch):
    def refuse(self, path):
        raise PermissionError(13, "Access Denied")

    monkeypatch.setattr(type(memory), "rm_file", refuse)
    StoreAddress("memory://outputs/r.json").check(is_folder=False)
    monkeypatch.undo()


def test_a_report_names_its_windows_file_beside_it_behind_an_address(memory):
    report = library.inspect("demo", source="tokens", layers=[0], sequences=2, tokens=16)
    deliver(
        Outputs(json="memory://outputs/r.json", windows_csv="memory://outputs/w.csv", no_progress=True, quiet=True),
        report,
    )
    assert json.loads(memory.cat_file("/outputs/r.json"))["windows_file"]["name"] == "w.csv"
