"""A cache is saved while requests run: what is on disk is what it held when the save began, and steps go on."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jradix import Engine, cache_files
from jradix.cache.snapshot import take
from jradix.cache_files import SavedCache, is_storable, open_newest
from jradix.cache_keeping import fingerprint
from jradix.delivery import StepFailedError
from jradix.snapshot_reader import InterruptedSaveError
from tests.cache.paged_text import known_pages
from tests.tiny_engine import output_ids, prompts_with_shared_prefixes, start

PAGE_BYTES = 3 * 2 * 2 * 4 * 16 * 4
"""Layers, KV heads, keys and values, tokens, head_dim, bytes of float32."""
PROMPTS = prompts_with_shared_prefixes(12, 320, seed=11)
OTHERS = prompts_with_shared_prefixes(16, 320, seed=12)


@pytest.fixture(scope="module")
def engine(tiny_text_path: Path) -> Iterator[Engine]:
    """64 pages, of which five are read at a time: new prompts evict old ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jradix.runner.TRANSFER_BYTES", 5 * PAGE_BYTES)
        with start(tiny_text_path, max_total_tokens=256) as engine:
            yield engine


@pytest.fixture
def filled(engine: Engine) -> Iterator[Engine]:
    """With a cache that is full; whatever the test did must leave no page behind."""
    engine.flush_cache()
    output_ids(engine, PROMPTS)
    assert engine.cache.num_free < 5
    yield engine
    engine.check_idle()
    with engine.hold() as core:
        assert core.cache.unread is None


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Has something done after each chunk that a save has written."""

    def do(action: Callable[[], Any]) -> None:
        def write_arrays(path: Path, arrays: Any) -> None:
            write(path, arrays)
            action()

        write = cache_files._write_arrays
        monkeypatch.setattr("jradix.cache_files._write_arrays", write_arrays)

    return do


def everything(engine: Engine) -> tuple[dict[Any, Any], list[int], np.ndarray]:
    """What the cache holds, by prefix; its tokens and the content of its pages in the order of a snapshot."""
    with engine.hold() as core:
        snapshot = take(core.cache.tree, core.cache.clock, is_storable)
        content = [core.runner.read_pages(snapshot.pages[[place]]) for place in range(len(snapshot.pages))]
        return known_pages(core.cache), snapshot.tokens.tolist(), np.concatenate(content)


def opened(engine: Engine, directory: Path) -> SavedCache:
    with engine.hold() as core:
        saved = open_newest(directory, fingerprint(core, engine.model_config))
    assert saved is not None
    return saved


def test_what_requests_overwrite_meanwhile_is_saved_as_it_was(
    filled: Engine, between: Callable[[Callable[[], Any]], None], tmp_path: Path
) -> None:
    expected = output_ids(filled, OTHERS)
    filled.flush_cache()
    output_ids(filled, PROMPTS)
    pages, tokens, content = everything(filled)
    answers: list[list[int]] = []
    between(lambda: answers.extend(output_ids(filled, OTHERS[len(answers) :][:1])))
    filled.save_cache(tmp_path)
    assert answers == expected[: len(answers)]
    assert len(answers) > 10
    assert len(pages.keys() - known_pages(filled.cache).keys()) > 30
    saved = opened(filled, tmp_path)
    assert saved.snapshot.tokens.tolist() == tokens
    chunks = [saved.read_chunk(index) for index in range(len(saved.chunks))]
    np.testing.assert_array_equal(np.concatenate(chunks), content)


def test_steps_go_on_while_a_chunk_is_written(
    filled: Engine, between: Callable[[Callable[[], Any]], None], tmp_path: Path
) -> None:
    expected = output_ids(filled, OTHERS)
    answers: list[list[list[int]]] = []
    writing, steps = threading.Event(), list[bool]()

    def run_requests() -> None:
        while not writing.is_set():
            answers.append(output_ids(filled, OTHERS))

    def wait_for_step() -> None:
        before, deadline = filled._core.last_progress, time.monotonic() + 30
        while filled._core.last_progress == before and time.monotonic() < deadline:
            time.sleep(0.001)
        steps.append(filled._core.last_progress > before)

    between(wait_for_step)
    requests = threading.Thread(target=run_requests)
    requests.start()
    try:
        report = filled.save_cache(tmp_path)
    finally:
        writing.set()
        requests.join()
    assert all(steps)
    assert len(steps) > report["pages"] // 5 > 10
    assert all(ids == expected for ids in answers)
    assert answers


def fail(engine: Engine) -> None:
    """Have a step fail, as if the device had."""
    with engine.hold() as core:
        forward = core.runner.launch_forward
        core.runner.launch_forward = lambda *_: 1 / 0  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(StepFailedError):
        output_ids(engine, [[1, 2, 3]])
    with engine.hold() as core:
        core.runner.launch_forward = forward


ENDS: dict[str, tuple[str, Callable[[Engine], Any]]] = {
    "flush": ("it was flushed", lambda engine: engine.flush_cache()),
    "weights": ("the weights were updated", lambda engine: engine.update_weights(engine.config.model_path)),
    "failed step": ("a step failed", fail),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_save_that_is_interrupted_leaves_the_old_snapshot(
    filled: Engine, between: Callable[[Callable[[], Any]], None], tmp_path: Path, how: str
) -> None:
    filled.save_cache(tmp_path)
    before = opened(filled, tmp_path)
    output_ids(filled, OTHERS[:2])
    reason, end = ENDS[how]
    between(lambda: end(filled))
    with pytest.raises(InterruptedSaveError, match=f"not saved, because meanwhile {reason}: save it again"):
        filled.save_cache(tmp_path)
    after = opened(filled, tmp_path)
    assert (after.path, after.snapshot.tokens.tolist()) == (before.path, before.snapshot.tokens.tolist())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "snapshot-000001"]
    assert len(output_ids(filled, OTHERS[:2])) == 2


def test_saves_from_two_threads_come_one_after_the_other(filled: Engine, tmp_path: Path) -> None:
    num_pages = len(everything(filled)[2])
    reports: list[dict[str, Any]] = []
    threads = [
        threading.Thread(target=lambda name=name: reports.append(filled.save_cache(tmp_path / name))) for name in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [report["pages"] for report in reports] == [num_pages] * 2
