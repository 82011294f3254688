"""Tests that outputs at addresses, and units at an address that cannot be written, are refused by name."""

import pytest
from program import attnlens, python, refused, without_torch
from reports import synthetic_report

from attnlens.errors import UsageError

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
    def open(self, *_, **more):
        raise NoCredentialsError("Unable to locate credentials")

for store in (Shelf, Closed):
    fsspec.register_implementation(store.protocol, store)
sys.argv[0] = "attnlens"
from attnlens.cli import main
main()
'''
"""The program where fsspec knows some more stores."""


def with_stores(*words, cwd):
    return python("-c", WITH_STORES, *words, "--no-progress", cwd=cwd)


@pytest.mark.parametrize("option", ["json", "csv", "windows-csv", "html", "markdown", "figure"])
@pytest.mark.parametrize("address", ["s3://bucket/r", "file:///tmp/r", "nonsense://r"])
def test_an_output_at_an_address_is_refused_before_the_work(tmp_path, option, address):
    told = without_torch("inspect", "demo", f"--{option}", address, cwd=tmp_path)
    refused(told, f"--{option} must be a path on this machine, not {address}", "Give a local path.")
    assert list(tmp_path.iterdir()) == []


def test_a_check_and_a_plan_refuse_an_address(tmp_path):
    (tmp_path / "r.json").write_text(synthetic_report().to_json())
    words = ("check", "r.json", "--rule", "coverage.analysed: value > 0", "--junit", "s3://j.xml")
    refused(without_torch(*words, cwd=tmp_path), "--junit must be a path on this machine")
    words = ("ranks", "demo", "--budget", "loss:1%", "--plan", "s3://plan.json")
    refused(attnlens(*words, cwd=tmp_path), "--plan must be a path on this machine")


def test_the_library_writes_to_no_address(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for write in (synthetic_report().write_json, synthetic_report().save):
        with pytest.raises(UsageError, match="this machine, not s3:"):
            write("s3://bucket/r.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--work", "closed://work"), ("closed://", "Unable to locate credentials", "--work")),
        (("--work", "nonsense://work"), ("nonsense", "--work")),
    ],
)
def test_what_can_not_be_put_is_refused_in_two_lines(tmp_path, words, said):
    refused(with_stores(*ONE, *words, cwd=tmp_path), *said)
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("swap-kernel", "demo", "--save", "s3://a/b"), "--save"),
        (("reproduce", "kernels", "--work", "s3://a/b"), "--work"),
        (("reproduce", "kernels", "--save", "s3://a/b"), "--save"),
        (("check", "demo", "--baseline", "s3://a/b", "--update-baseline"), "--baseline"),
    ],
)
def test_what_needs_this_machine_refuses_an_address_by_name(tmp_path, words, said):
    refused(attnlens(*words, cwd=tmp_path), said, "this machine", "s3://a/b", "Give a local path.")
    assert list(tmp_path.iterdir()) == []
