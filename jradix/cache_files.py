"""Snapshots of the prefix cache on disk: written whole or not at all, checked before they are believed.

A directory holds one snapshot, `snapshot-N`, and while it is being replaced two, of which the higher number counts.
Inside, `tree` and `pages-K` are Orbax checkpoints, and `manifest.json`, which is written last, says what belongs to
them, with a checksum of each. Everything is written to `saving`, forced to disk, and then renamed.
"""

import fcntl
import json
import shutil
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import jax
import numpy as np
import numpy.typing as npt

from jradix.cache.namespace import Namespace
from jradix.cache.snapshot import Row, Snapshot
from jradix.durable import sync_path, sync_tree

FORMAT = 2
"""Changes when older versions of jradix could not read what this one writes, or the other way round."""
_PREFIX, _TEMPORARY, _MANIFEST, _TREE = "snapshot-", "saving", "manifest.json", "tree"

type Fingerprint = Mapping[str, str | int | bool]
"""What the KV depends on beside the tokens, by names that a user knows."""


type Read = Callable[[int, int], npt.NDArray[Any]]
"""(start, stop): the content of pages `[start, stop)` of a snapshot, `[pages, layers, kv_heads, ...]`."""


class UnusableSnapshotError(Exception):
    """A snapshot is damaged, or of something else; the message says what."""


@dataclass(frozen=True, slots=True)
class SavedCache:
    """One snapshot on disk. Its manifest has been checked, the rest is checked as it is read."""

    path: Path
    snapshot: Snapshot  # without `pages`, which mean nothing any more
    chunks: tuple[tuple[int, int], ...]  # number of pages and checksum of each

    def read_chunk(self, index: int) -> npt.NDArray[Any]:
        """`[pages, layers, kv_heads, 2, page_size, head_dim]`, see `pool.take_pages`. Raises UnusableSnapshotError."""
        num_pages, checksum = self.chunks[index]
        with _named_damage(self.path):
            content = _read_arrays(self.path / _chunk_name(index))["pages"]
            _require(len(content) == num_pages, f"{num_pages} pages in chunk {index}, found {len(content)}")
            _require(_checksum(content) == checksum, f"chunk {index} unchanged since it was written")
        return content


def write(directory: Path, fingerprint: Fingerprint, snapshot: Snapshot, read: Read, chunk_len: int) -> tuple[int, int]:
    """Replace the snapshot in `directory`; returns the number of bytes written and of files.

    read: gives the content of a range of the snapshot's pages. It is called for at most `chunk_len` at a time, from the
    last pages, which were used longest ago and may be evicted next, to the first. One chunk at a time is in memory.

    However this ends, also by a power failure, the directory holds the old snapshot or the new one. Two processes that
    write do it one after the other.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(directory):
        temporary = directory / _TEMPORARY
        shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
        temporary.mkdir(mode=0o700)  # prompts and salts are in there
        try:
            manifest = _write_arrays_of(snapshot, read, chunk_len, temporary)
            manifest |= {"format": FORMAT, "fingerprint": dict(fingerprint)}
            body = json.dumps(manifest, sort_keys=True)
            (temporary / _MANIFEST).write_text(json.dumps({"checksum": crc32(body.encode()), "body": body}))
            sizes = sync_tree(temporary)
            older = _snapshots(directory)
            number = 1 + max(older, default=0)
            temporary.rename(directory / f"{_PREFIX}{number:06}")
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync_path(directory)
        for path in older.values():
            shutil.rmtree(path, ignore_errors=True)
    return sum(sizes), len(sizes)


def open_newest(directory: Path, fingerprint: Fingerprint) -> SavedCache | None:
    """The snapshot in `directory`, with its tree read; None if there is none.

    Raises:
        UnusableSnapshotError: it is damaged, or was taken with another fingerprint; the message names the field.
    """
    found = _snapshots(directory)
    if not found:
        return None
    path = found[max(found)]
    with _named_damage(path):
        sealed = json.loads((path / _MANIFEST).read_text())
        _require(crc32(sealed["body"].encode()) == sealed["checksum"], f"{_MANIFEST} unchanged since it was written")
        manifest = json.loads(sealed["body"])
    if manifest["format"] != FORMAT:
        raise UnusableSnapshotError(f"{path} has format {manifest['format']}, this version of jradix reads {FORMAT}")
    fields = {**fingerprint, **manifest["fingerprint"]}  # ours first: their order names a cause before its effects
    for name in fields:
        saved, ours = manifest["fingerprint"].get(name), fingerprint.get(name)
        if saved != ours:
            raise UnusableSnapshotError(f"{path} was saved with {name} {saved!r}, this engine has {ours!r}")
    with _named_damage(path):
        return SavedCache(path, _read_tree(path, manifest), tuple((n, checksum) for n, checksum in manifest["chunks"]))


def is_storable(namespace: Hashable) -> bool:
    """Whether the namespace can be written down and read back as an equal one."""
    if isinstance(namespace, Namespace):
        return is_storable(namespace.adapter)
    return namespace is None or type(namespace) in (str, int)


def _write_arrays_of(snapshot: Snapshot, read: Read, chunk_len: int, path: Path) -> dict[str, Any]:
    """Writes all arrays below `path`, and returns the manifest."""
    chunks: list[tuple[int, int]] = []
    starts = range(0, len(snapshot.pages), chunk_len)
    for index, start in reversed(list(enumerate(starts))):
        content = read(start, min(start + chunk_len, len(snapshot.pages)))
        _write_arrays(path / _chunk_name(index), {"pages": content})
        chunks.insert(0, (len(content), _checksum(content)))
    if len(snapshot.rows):
        _write_arrays(path / _TREE, {"rows": snapshot.rows, "tokens": snapshot.tokens})
    return {
        "page_size": snapshot.page_size,
        "clock": snapshot.clock,
        "namespaces": [_as_json(namespace) for namespace in snapshot.namespaces],
        "num_rows": len(snapshot.rows),
        "tree": [_checksum(snapshot.rows), _checksum(snapshot.tokens)],
        "chunks": chunks,
    }


def _read_tree(path: Path, manifest: Mapping[str, Any]) -> Snapshot:
    rows, tokens = np.zeros((0, len(Row._fields)), np.int64), np.zeros(0, np.int32)
    if manifest["num_rows"]:
        arrays = _read_arrays(path / _TREE)
        rows, tokens = arrays["rows"], arrays["tokens"]
    found = [_checksum(rows), _checksum(tokens)]
    _require(found == manifest["tree"], "the tree unchanged since it was written")
    namespaces = tuple(_from_json(item) for item in manifest["namespaces"])
    return Snapshot(manifest["page_size"], manifest["clock"], namespaces, rows, tokens, np.zeros(0, np.int32))


def _write_arrays(path: Path, arrays: dict[str, npt.NDArray[Any]]) -> None:
    try:
        with _checkpointer() as checkpointer:
            checkpointer.save(path, arrays)
    except ValueError as error:  # what Orbax makes of a disk that is full
        raise OSError(f"{path} cannot be written: {error}") from error


def _read_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    with _checkpointer() as checkpointer:
        return checkpointer.restore(path)


def _checkpointer() -> Any:
    """For this process alone: Orbax would wait for all processes that jax knows, and those of an engine do not come."""
    import orbax.checkpoint as ocp  # slow to load, and only of use to who keeps snapshots

    here = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(here, active_processes={here}, barrier_sync_key_prefix=f"jradix-{here}")
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _snapshots(directory: Path) -> dict[int, Path]:
    """Whole snapshots by number."""
    paths = directory.glob(f"{_PREFIX}*") if directory.is_dir() else ()
    numbered = {path.name.removeprefix(_PREFIX): path for path in paths}
    return {int(number): path for number, path in numbered.items() if number.isdecimal()}


def _chunk_name(index: int) -> str:
    return f"pages-{index:05}"


def _checksum(array: npt.NDArray[Any]) -> int:
    return crc32(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keep other writers waiting. The kernel ends the lock with the process, so that none is left behind."""
    with (directory / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _named_damage(path: Path) -> Iterator[None]:
    """Whatever goes wrong while reading is damage: libraries differ in what they raise."""
    try:
        yield
    except Exception as error:
        raise UnusableSnapshotError(f"{path} is damaged: {error}") from error


def _require(condition: bool, expected: str) -> None:
    if not condition:
        raise ValueError(f"expected {expected}")


def _as_json(namespace: Hashable) -> Any:
    if isinstance(namespace, Namespace):
        return {"salt": namespace.salt, "adapter": namespace.adapter, "weight_version": namespace.weight_version}
    return namespace


def _from_json(item: Any) -> Hashable:
    return Namespace(**item) if isinstance(item, dict) else item
