"""Tests that units of work are kept behind addresses of fsspec, and that outputs at addresses are refused by name."""

import importlib

import pytest
from attnlens.addresses import StoreAddress, is_refusal, place_of
from program import attnlens, python, refused, without_torch
from reports import synthetic_report

import attnlens as library
from attnlens.errors import OutputError, UsageError

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


@pytest.mark.parametrize("option", ["json", "csv", "windows-csv", "html", "markdown", "png"])
@pytest.mark.parametrize("address", ["s3://bucket/r", "file:///tmp/r", "nonsense://r"])
def test_an_output_at_an_address_is_refused_before_the_work(tmp_path, option, address):
    told = without_torch("inspect", "demo", f"--{option}", address, cwd=tmp_path)
    refused(told, f"--{option} names a file or folder of this machine, not {address}", "Give the path of one.")
    assert list(tmp_path.iterdir()) == []


def test_a_check_and_a_plan_refuse_an_address(tmp_path):
    (tmp_path / "r.json").write_text(synthetic_report().to_json())
    words = ("check", "r.json", "--rule", "coverage.analysed: value > 0", "--junit", "s3://j.xml")
    refused(without_torch(*words, cwd=tmp_path), "--junit names a file or folder of this machine")
    words = ("swap-kernel", "demo", "--kernel", "rank", "--budget", "loss:1%", "--plan", "s3://plan.json")
    refused(attnlens(*words, cwd=tmp_path), "--plan names a file or folder of this machine")


def test_the_library_writes_to_no_address(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for write in (synthetic_report().write_json, synthetic_report().save):
        with pytest.raises(UsageError, match="this machine, not s3:"):
            write("s3://bucket/r.json")
    with pytest.raises(UsageError, match="this machine"):
        library.inspect_each(["demo"], "memory://outputs/reports")
    assert list(tmp_path.iterdir()) == []


def test_an_address_of_this_machine_is_its_path():
    assert place_of("local:///a/b") == place_of("/a/b")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--work", "closed://work"), ("closed://work", "Unable to locate credentials.", "--work")),
        (("--work", "nonsense://work"), ("nonsense", "--work")),
    ],
)
def test_what_can_not_be_put_is_refused_in_two_lines(tmp_path, words, said):
    refused(with_stores(*ONE, *words, cwd=tmp_path), *said)
    assert not list(tmp_path.rglob("*.json"))


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
    result = with_stores(*ONE, "--work", "mistaken://work", cwd=tmp_path)
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
        (("inspect", "--models", "list.txt", "--reports", "s3://a/b"), "--reports"),
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


def test_who_may_write_and_not_remove_is_let_write(memory, monkeypatch):
    def refuse(self, path):
        raise PermissionError(13, "Access Denied")

    monkeypatch.setattr(type(memory), "rm_file", refuse)
    StoreAddress("memory://outputs/r.json").check(is_folder=False)
    monkeypatch.undo()
