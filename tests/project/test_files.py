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


def test_new_files_get_the_mode_of_the_umask_and_existing_ones_keep_theirs(tmp_path):
    for umask in (0o022, 0o077, 0o002):
        before = os.umask(umask)
        try:
            write_atomically(tmp_path / f"{umask}", b"content")
        finally:
            os.umask(before)
        assert mode(tmp_path / f"{umask}") == 0o666 & ~umask
    for wanted in (0o600, 0o664, 0o755):
        (tmp_path / "old").write_bytes(b"old")
        (tmp_path / "old").chmod(wanted)
        write_atomically(tmp_path / "old", b"new")
        assert (mode(tmp_path / "old"), (tmp_path / "old").read_bytes()) == (wanted, b"new")


def test_a_symlink_stays_and_its_target_is_replaced_while_a_hard_link_is_cut(tmp_path):
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    target.parent.mkdir()
    link.symlink_to(target)
    for content in (b"old", b"new"):
        before = target.stat().st_ino if target.exists() else None
        check_writable(link)
        write_atomically(link, content)
        assert (link.is_symlink(), target.read_bytes()) == (True, content)
        assert target.stat().st_ino != before, "replaced at once, not written over"
    (tmp_path / "output").hardlink_to(target)
    write_atomically(tmp_path / "output", b"output")
    assert (target.read_bytes(), (tmp_path / "output").read_bytes()) == (b"new", b"output")


def test_pipes_and_devices_are_written_into(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    contents = []
    reader = threading.Thread(target=lambda: contents.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    check_writable(tmp_path / "pipe")
    write_atomically(tmp_path / "pipe", b"content")
    reader.join(timeout=30)
    assert contents == [b"content"]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    write_atomically(Path(os.devnull), b"content")
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)
    with pytest.raises(OutputError, match="No space left"):
        write_atomically(Path("/dev/full"), b"content")


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"old")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(PermissionError(1, "not permitted")))
    with pytest.raises(OutputError, match="not permitted"):
        write_atomically(tmp_path / "a", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


def test_unwritable_paths_are_refused_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("none/file")
    places = {"loop": "symbolic links", "file/below": "does not exist", "dangling": "does not exist"}
    for name, words in (places | {"x" * 300: "too long", ".": "it is a folder"}).items():
        with pytest.raises(OutputError, match=words):
            check_writable(tmp_path / name)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    for name in ("new", "file", "."):
        with pytest.raises(OutputError, match=r"Permission denied\."):
            check_writable(tmp_path / name, may_be_folder=True)
    with pytest.raises(OutputError, match=f"no folder can be created in {tmp_path}"):
        check_folder(tmp_path / "new" / "model")
