"""A list of files with their sizes and checksums, which is written last: what it lists is whole and unchanged."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final
from zlib import crc32

from jradix.model.checkpoint_error import CheckpointError
from jradix.model.safetensors_checkpoint import read_json

SEAL: Final = "checksums.json"
_BUFFER_BYTES: Final = 2**20
_MOST_THREADS: Final = 8


def write_seal(directory: Path, top: str) -> None:
    """Write down all files below `directory / top`."""
    files = sorted(path for path in (directory / top).rglob("*") if path.is_file())
    found = {str(path.relative_to(directory)): [path.stat().st_size, _checksum(path)] for path in files}
    (directory / SEAL).write_text(json.dumps({"files": found, "checksum": _checksum_of(found)}, indent=1), "utf-8")


def check_seal(directory: Path) -> None:
    """Read all files that are listed, some at a time, and compare.

    Raises:
        CheckpointError: there is no list, as where writing was interrupted, or a file is missing, cut or changed; the
            message names it.
    """
    if not (directory / SEAL).exists():
        raise CheckpointError(
            f"{directory}: expected {SEAL}, which is written last: writing was interrupted, or files are gone; "
            "convert the model again"
        )
    sealed = read_json(directory / SEAL)
    found = sealed.get("files")
    if not isinstance(found, dict) or sealed.get("checksum") != _checksum_of(found):
        raise CheckpointError(
            f"{directory / SEAL}: expected it unchanged since it was written; convert the model again"
        )
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as threads:
        for problem in threads.map(lambda item: _problem(directory / item[0], *item[1]), found.items()):
            if problem:
                raise CheckpointError(f"{problem}; convert the model again")


def _problem(path: Path, size: int, checksum: int) -> str:
    """What is wrong with a file; "" if nothing is."""
    try:
        if path.stat().st_size != size:
            return f"{path}: expected {size} bytes, found {path.stat().st_size}"
        if _checksum(path) != checksum:
            return f"{path}: its content has changed since it was written"
    except OSError as error:
        return f"{path}: cannot be read: {error}"
    return ""


def _checksum(path: Path) -> int:
    checksum, buffer = 0, memoryview(bytearray(_BUFFER_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            checksum = crc32(buffer[:count], checksum)
    return checksum


def _checksum_of(files: dict[str, Any]) -> int:
    return crc32(json.dumps(files, sort_keys=True).encode())
