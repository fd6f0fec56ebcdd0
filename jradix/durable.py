"""Forces what has been written to disk, so that it outlives a power failure."""

import os
from pathlib import Path


def sync_tree(top: Path) -> list[int]:
    """Force everything below `top` to disk, and its names; returns the sizes of the files."""
    sizes: list[int] = []
    for path, _, names in os.walk(top, topdown=False):
        for name in names:
            sync_path(Path(path, name))
            sizes.append(Path(path, name).stat().st_size)
        sync_path(Path(path))
    return sizes


def sync_path(path: Path) -> None:
    """Force one file to disk, or the names in one directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
