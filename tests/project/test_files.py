"""Tests that a file is written whole, where its name leads, and with the mode that it should have."""

import os
import stat
import threading
from pathlib import Path

import pytest

from attnlens.errors import OutputError
from attnlens.files import check_folder, check_writable, write_atomically


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_new_file_gets_the_mode_of_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "new", b"content")
    finally:
        os.umask(before)
    assert mode(tmp_path / "new") == 0o666 & ~umask


@pytest.mark.parametrize("wanted", [0o600, 0o664, 0o755])
def test_an_existing_file_keeps_its_mode(tmp_path, wanted):
    (tmp_path / "old").write_bytes(b"old")
    (tmp_path / "old").chmod(wanted)
    write_atomically(tmp_path / "old", b"new")
    assert (mode(tmp_path / "old"), (tmp_path / "old").read_bytes()) == (wanted, b"new")


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_its_target_is_replaced(tmp_path, there):
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    target.parent.mkdir()
    if there:
        target.write_bytes(b"old")
        before = target.stat().st_ino
    link.symlink_to(target)
    check_writable(link)
    write_atomically(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert not there or target.stat().st_ino != before, "replaced at once, not written over"


def test_a_pipe_is_written_into(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    check_writable(tmp_path / "pipe")
    write_atomically(tmp_path / "pipe", b"content")
    reader.join(timeout=30)
    assert read == [b"content"]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_device_is_written_into():
    write_atomically(Path(os.devnull), b"content")
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)
    with pytest.raises(OutputError, match="No space left"):
        write_atomically(Path("/dev/full"), b"content")


def test_another_name_of_the_file_keeps_its_content(tmp_path):
    (tmp_path / "input").write_bytes(b"input")
    (tmp_path / "output").hardlink_to(tmp_path / "input")
    write_atomically(tmp_path / "output", b"output")
    assert (tmp_path / "input").read_bytes() == b"input"
    assert (tmp_path / "output").read_bytes() == b"output"


def test_nothing_is_left_of_a_failed_write(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"old")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(PermissionError(1, "not permitted")))
    with pytest.raises(OutputError, match="not permitted"):
        write_atomically(tmp_path / "a", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


def test_a_place_without_permission_is_refused_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "old").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    for name in ("new", "old", "."):
        with pytest.raises(OutputError, match=r"Permission denied\."):
            check_writable(tmp_path / name, may_be_folder=True)
    with pytest.raises(OutputError, match=f"no folder can be created in {tmp_path}"):
        check_folder(tmp_path / "new" / "model")


def test_paths_that_lead_nowhere_are_refused(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("none/file")
    for name, word in (
        ("loop", "symbolic links"),
        ("file/below", "does not exist"),
        ("dangling", "does not exist"),
        ("x" * 300, "too long"),
        (".", "it is a folder"),
    ):
        with pytest.raises(OutputError, match=word):
            check_writable(tmp_path / name)
