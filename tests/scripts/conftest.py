"""Lets tests import the scripts, which lie beside the package and import each other by name."""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="package")
def load_script() -> Iterator[Callable[[str], ModuleType]]:
    """Maps a script's name, without its ending, to the module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield importlib.import_module
