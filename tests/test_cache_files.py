"""Snapshots on disk: read back as they were, refused when they are something else, and never half of one."""

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jradix.cache import Namespace
from jradix.cache.snapshot import Snapshot
from jradix.cache_files import Read, SavedCache, UnusableSnapshotError, is_storable, open_newest, write

FINGERPRINT = {"weights": "12345678", "page_size": 4, "joined pages": False}


def some_cache(value: int = 1, dtype: Any = np.float32) -> tuple[Snapshot, Read, int]:
    """Two nodes of 3 pages and 1 page, what reads them, and 3, so that there are two chunks."""
    rows = np.array([[-1, 0, 12, 5, 1, 2, 0, 16], [0, 0, 3, 4, 4, 1, 0, 15]], np.int64)
    tokens, pages = np.arange(15, dtype=np.int32) + value, np.array([9, 3, 5, 7], np.int32)
    content = np.random.default_rng(value).normal(size=(4, 2, 2, 2, 4, 8)).astype(dtype)
    return Snapshot(4, 6, ("salt",), rows, tokens, pages), lambda start, stop: content[start:stop], 3


def assert_holds(saved: SavedCache | None, value: int, dtype: Any = np.float32) -> None:
    assert saved is not None
    snapshot, read, _ = some_cache(value, dtype)
    found = saved.snapshot
    assert (found.page_size, found.clock, found.namespaces) == (4, 6, ("salt",))
    assert np.array_equal(found.rows, snapshot.rows)
    assert np.array_equal(found.tokens, snapshot.tokens)
    for index, chunk in enumerate((read(0, 3), read(3, 4))):
        content = saved.read_chunk(index)
        assert content.dtype == chunk.dtype
        assert np.array_equal(content, chunk)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_what_was_written_is_read_and_the_newest_counts(tmp_path: Path, dtype: Any) -> None:
    assert open_newest(tmp_path / "none", FINGERPRINT) is None
    for value in (1, 2):
        write(tmp_path / "some/where", FINGERPRINT, *some_cache(value, dtype))
        assert_holds(open_newest(tmp_path / "some/where", FINGERPRINT), value, dtype)
    assert sorted(path.name for path in (tmp_path / "some/where").iterdir()) == ["lock", "snapshot-000002"]
    assert (tmp_path / "some/where").stat().st_mode & 0o777 == 0o700


def test_an_empty_cache_is_a_snapshot_too(tmp_path: Path) -> None:
    empty = Snapshot(4, 3, (), np.zeros((0, 8), np.int64), np.zeros(0, np.int32), np.zeros(0, np.int32))
    write(tmp_path, FINGERPRINT, empty, lambda start, stop: np.zeros(0), 3)
    saved = open_newest(tmp_path, FINGERPRINT)
    assert saved is not None
    assert (saved.chunks, len(saved.snapshot.rows), saved.snapshot.clock) == ((), 0, 3)


@pytest.mark.parametrize("name", [*FINGERPRINT, "something new"])
def test_another_fingerprint_is_refused_and_the_field_is_named(tmp_path: Path, name: str) -> None:
    write(tmp_path, FINGERPRINT, *some_cache())
    with pytest.raises(UnusableSnapshotError, match=f"saved with {name} .* this engine has 99"):
        open_newest(tmp_path, FINGERPRINT | {name: 99})


def test_of_several_differences_the_cause_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"dtype": "int8", "KV scales": 1}, *some_cache())
    with pytest.raises(UnusableSnapshotError, match="saved with dtype 'int8', this engine has 'float32'"):
        open_newest(tmp_path, {"dtype": "float32", "KV scales": 2})


def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, FINGERPRINT, *some_cache())
    monkeypatch.setattr("jradix.cache_files.FORMAT", 3)
    with pytest.raises(UnusableSnapshotError, match="has format 2, this version of jradix reads 3"):
        open_newest(tmp_path, FINGERPRINT)


# Where Orbax cannot read one file, what it has begun to read of others ends after the event loop that it was for.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_any_damage_to_any_file_is_found_or_does_no_harm(tmp_path: Path) -> None:
    write(tmp_path, FINGERPRINT, *some_cache())
    files = [path for path in (tmp_path / "snapshot-000001").rglob("*") if path.is_file()]
    assert len(files) > 15
    found = 0
    for path in files:
        whole = path.read_bytes()
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 16
        for damaged in (whole[: len(whole) // 2], bytes(flipped), None):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            try:
                assert_holds(open_newest(tmp_path, FINGERPRINT), 1)
            except UnusableSnapshotError:
                found += 1
            path.write_bytes(whole)
    assert found > len(files)  # some of what Orbax writes, nobody reads


def test_pages_are_read_from_the_last_to_the_first_a_chunk_at_a_time(tmp_path: Path) -> None:
    snapshot, read, _ = some_cache()
    asked: list[tuple[int, int]] = []

    def noted(start: int, stop: int) -> Any:
        asked.append((start, stop))
        return read(start, stop)

    write(tmp_path, FINGERPRINT, snapshot, noted, 3)
    assert asked == [(3, 4), (0, 3)]
    assert_holds(open_newest(tmp_path, FINGERPRINT), 1)


def test_a_save_that_fails_leaves_the_old_snapshot_and_no_rest(tmp_path: Path) -> None:
    write(tmp_path, FINGERPRINT, *some_cache(1))
    snapshot, read, _ = some_cache(2)

    def fails_after_one(start: int, stop: int) -> Any:
        if stop < 4:
            raise OSError("the device is gone")
        return read(start, stop)

    with pytest.raises(OSError, match="gone"):
        write(tmp_path, FINGERPRINT, snapshot, fails_after_one, 3)
    assert_holds(open_newest(tmp_path, FINGERPRINT), 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "snapshot-000001"]


def test_a_disk_that_is_full_is_an_os_error(tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    snapshot, _, _ = some_cache()
    content = np.random.default_rng(0).normal(size=(4, 2, 2, 2, 4, 1000))
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # more than all else takes
    try:
        with pytest.raises(OSError, match="cannot be written"):
            write(tmp_path, FINGERPRINT, snapshot, lambda start, stop: content[start:stop], 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
import orbax.checkpoint
from jradix.cache_files import write
from tests.test_cache_files import FINGERPRINT, some_cache

def write_killed(directory, value, limit):
    '''In a child, which dies at a file operation of this number. Returns how many there were, None if it died.'''
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    count = 0
    def watch(event, args):
        nonlocal count
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and str(directory) in str(args[:2]):
            count += 1
            if count == limit:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(watch)
    write(directory, FINGERPRINT, *some_cache(value))
    (directory.parent / "count").write_text(str(count))
    os._exit(0)

top = Path(sys.argv[1])
assert write_killed(top / "old", 1, 0) == 0
shutil.copytree(top / "old", top / "new")
assert write_killed(top / "new", 2, 0) == 0
count = int((top / "count").read_text())
limits = [*range(3, count - 8, max(1, (count - 8) // 6)), *range(count - 7, count + 1)]
for limit in limits:
    shutil.copytree(top / "old", top / f"killed-{limit}")
    status = write_killed(top / f"killed-{limit}", 2, limit)
    assert os.WIFSIGNALED(status), status
"""


def test_a_process_killed_at_any_file_operation_leaves_the_old_snapshot_or_the_new(tmp_path: Path) -> None:
    """Children of a process that has only loaded what they need: it has no threads yet that a fork would lose."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path)], check=True, timeout=300)
    held: list[int] = []
    killed = sorted(tmp_path.glob("killed-*"), key=lambda path: int(path.name.removeprefix("killed-")))
    for directory in killed:
        saved = open_newest(directory, FINGERPRINT)
        assert saved is not None
        held.append(int(saved.snapshot.tokens[0]))
        assert_holds(saved, held[-1])
    assert len(held) > 12
    assert held == sorted(held)
    assert set(held) == {1, 2}
    leftover = [path for path in killed if (path / "saving").exists()]
    assert leftover
    for directory in (leftover[len(leftover) // 2], killed[-1]):
        write(directory, FINGERPRINT, *some_cache(3))
        assert_holds(open_newest(directory, FINGERPRINT), 3)
        assert len(list(directory.iterdir())) == 2  # the lock and the new one


def test_namespaces_that_json_would_change_are_not_storable(tmp_path: Path) -> None:
    storable = [None, "a", "", 7, Namespace("salt", "adapter", 3), Namespace()]
    assert all(map(is_storable, storable))
    assert not any(map(is_storable, [True, 1.5, (1, 2), object(), Namespace(adapter=(1,))]))
    snapshot, read, chunk_len = some_cache()
    namespaces = Snapshot(4, 6, tuple(storable), snapshot.rows, snapshot.tokens, snapshot.pages)
    write(tmp_path, FINGERPRINT, namespaces, read, chunk_len)
    saved = open_newest(tmp_path, FINGERPRINT)
    assert saved is not None
    assert saved.snapshot.namespaces == tuple(storable)
    json.loads((saved.path / "manifest.json").read_text())
