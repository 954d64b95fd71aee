"""The file store under crashes, full disks, foreign files and other processes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import tracefp4
from tracefp4.core import Handle
from tracefp4.errors import GuidanceCorrupt, GuidanceError, GuidanceMissing
from tracefp4.guidance.file_store import FileStore
from tracefp4.guidance.frame import decode, encode
from tracefp4.guidance.record import Record


def test_files_of_a_closed_store_are_there_again(tmp_path: Path, small: Record) -> None:
    frame = encode(small)
    with FileStore(tmp_path, fsync=True) as store:
        handle = store.put("a", frame)
    with FileStore(tmp_path) as again:
        assert again.keys() == ("a",)
        assert decode(again.get(handle)).rows == small.rows
    assert (tmp_path / "a.guidance").stat().st_mode & 0o777 == 0o600


def test_reads_are_mapped(tmp_path: Path) -> None:
    with FileStore(tmp_path) as store:
        view = store.get(store.put("a", b"x" * 10_000))
        assert type(view.obj).__name__ == "mmap"


def test_one_writer_many_readers(tmp_path: Path) -> None:
    with FileStore(tmp_path) as writer:
        handle = writer.put("a", b"abcd")
        with pytest.raises(GuidanceError, match="another store writes to .* read_only=True"):
            FileStore(tmp_path)
        with FileStore(tmp_path, read_only=True) as reader, FileStore(handle.store, read_only=True) as other:
            assert reader.get(handle) == other.get(handle) == b"abcd"
            for action in (
                lambda: reader.put("b", b"x"),
                lambda: reader.delete(handle),
                reader.clear,
                reader.remove_leftovers,
            ):
                with pytest.raises(GuidanceError, match="opened to read only"):
                    action()
            writer.put("b", b"efgh")
            assert reader.keys() == ("a", "b")
    FileStore(tmp_path).close()


def test_a_reader_needs_a_directory(tmp_path: Path) -> None:
    with pytest.raises(GuidanceError, match="cannot open the store in .*No such file"):
        FileStore(tmp_path / "none", read_only=True)
    assert not (tmp_path / "none").exists()
    (tmp_path / "file").write_text("x")
    with pytest.raises(GuidanceError, match="cannot open the store"):
        FileStore(tmp_path / "file")


def test_a_full_disk_leaves_everything_as_it_was(tmp_path: Path) -> None:
    with FileStore(tmp_path) as store:
        old = store.put("old", b"o" * 1000)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            with pytest.raises(
                GuidanceError, match=r"cannot write 100000 bytes under 'new' in .*: File too large; \d+ bytes"
            ):
                store.put("new", b"n" * 100_000)
            with pytest.raises(GuidanceError, match="holds other bytes"):
                store.put("old", b"n" * 100_000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert store.keys() == ("old",)
        assert store.get(old) == b"o" * 1000
        assert store.leftovers == () == store.foreign
        with pytest.raises(GuidanceMissing):
            store.get(Handle(store.name, "new", 100_000))
        assert store.get(store.put("new", b"n" * 100_000)) == b"n" * 100_000


@pytest.mark.parametrize("step", ["write", "fsync", "rename"])
def test_an_error_at_any_step_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with FileStore(tmp_path, fsync=True) as store:
        store.put("old", b"old")
        with monkeypatch.context() as patch:
            patch.setattr(os, step, fail)
            with pytest.raises(GuidanceError, match=r"No space left on device; \d+ bytes are free"):
                store.put("new", b"new")
        assert store.keys() == ("old",)
        assert store.leftovers == ()


CRASH = """
import os, sys
from tracefp4.core import Handle
from tracefp4.errors import GuidanceError
from tracefp4.guidance.file_store import FileStore
path, busy = sys.argv[1:]
try:
    FileStore(busy)
except GuidanceError as error:
    print("refused:", error)
reader = FileStore(busy, read_only=True)
print("read:", reader.keys(), bytes(reader.get(Handle(reader.name, "mine", 1))))
store = FileStore(path)
store.put("first", b"1" * 5000)
os.rename = lambda *a, **k: os._exit(9)
store.put("second", b"2" * 5000)
"""


def test_a_writer_that_dies_between_write_and_rename(tmp_path: Path) -> None:
    path, busy = tmp_path / "crashed", tmp_path / "busy"
    with FileStore(busy) as mine:
        mine.put("mine", b"m")
        done = subprocess.run(
            [sys.executable, "-c", CRASH, str(path), str(busy)],
            env=os.environ | {"PYTHONPATH": str(Path(tracefp4.__file__).parent.parent)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 9, done.stderr
    assert "refused: another store writes to" in done.stdout
    assert "read: ('mine',) b'm'" in done.stdout
    with FileStore(path) as store:  # the lock died with its owner
        assert store.keys() == ("first",)
        assert store.get(Handle(store.name, "first", 5000)) == b"1" * 5000
        assert len(store.leftovers) == 1
        assert store.foreign == ()
        store.clear()
        assert len(store.leftovers) == 1
        assert store.remove_leftovers() == 1
        assert store.leftovers == ()


def test_foreign_files_are_reported_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "bad name.guidance").write_text("mine")
    (tmp_path / ".guidance").write_text("mine")
    (tmp_path / "folder").mkdir()
    with FileStore(tmp_path) as store:
        store.put("a", b"abcd")
        assert store.keys() == ("a",)
        assert store.foreign == (".guidance", "bad name.guidance", "folder", "notes.txt")
        assert store.nbytes == 4
        store.clear()
        assert store.foreign == (".guidance", "bad name.guidance", "folder", "notes.txt")


def test_links_and_other_things_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"four")
    directory = tmp_path / "frames"
    with FileStore(directory) as store:
        (directory / "link.guidance").symlink_to(secret)
        (directory / "folder.guidance").mkdir()
        os.mkfifo(directory / "pipe.guidance")
        with pytest.raises(GuidanceCorrupt, match="is a link; frames are regular files"):
            store.get(Handle(store.name, "link", 4))
        for key in ("folder", "pipe"):
            with pytest.raises(GuidanceCorrupt, match="is no regular file"):
                store.get(Handle(store.name, key, 4))
        with pytest.raises(GuidanceError, match="holds other bytes"):
            store.put("link", b"four")
        store.delete(Handle(store.name, "link", 4))
    assert secret.read_bytes() == b"four"
    secret.chmod(0o600)
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked" / ".lock").symlink_to(secret)
    with pytest.raises(GuidanceError, match="cannot open the store"):
        FileStore(tmp_path / "locked")


def test_a_moved_directory_is_not_swapped(tmp_path: Path) -> None:
    """The store holds the directory itself, not its name."""
    with FileStore(tmp_path / "a") as store:
        handle = store.put("x", b"right")
        (tmp_path / "a").rename(tmp_path / "b")
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "x.guidance").write_bytes(b"wrong")
        assert store.get(handle) == b"right"


def test_a_file_altered_on_disk_is_found_by_its_frame(tmp_path: Path, small: Record) -> None:
    with FileStore(tmp_path) as store:
        handle = store.put("a", encode(small))
        path = tmp_path / "a.guidance"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with pytest.raises(GuidanceCorrupt, match="checksum"):
            decode(store.get(handle))
        path.write_bytes(data[:-1])
        with pytest.raises(GuidanceCorrupt, match=f"has {handle.nbytes - 1} bytes, its handle says {handle.nbytes}"):
            store.get(handle)
