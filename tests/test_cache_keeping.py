"""A prefix cache outlives its engine: same tokens, same hits, same evictions, and nothing that does not fit."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jradix import Engine
from jradix.cache_files import open_newest
from jradix.cache_keeping import fingerprint
from jradix.pallas.ops import Kernels
from tests.cache.paged_text import Prefix, evict_all, known_pages
from tests.tiny_engine import greedy, prompts_with_shared_prefixes, restore, start

PROMPTS = prompts_with_shared_prefixes(24, 320, seed=3)
SALTS = [None, "a", 7] * 8
PAGE_BYTES = 3 * 2 * 2 * 4 * 16 * 4
"""Layers, KV heads, keys and values, tokens, head_dim, bytes of float32."""


def open_engine(path: Path, directory: Path, **options: Any) -> Engine:
    """An engine that has restored what it can."""
    engine = start(path, cache_dir=str(directory), **options)
    [restorer] = engine.replicas._restorers
    restorer.wait()
    return engine


def answers(engine: Engine, count: int = len(PROMPTS)) -> list[tuple[list[int], int]]:
    """Tokens and cached tokens of each of the first prompts, one after the other."""
    results = [
        engine.generate(input_ids=prompt, sampling_params=greedy(3), cache_salt=salt)
        for prompt, salt in zip(PROMPTS[:count], SALTS, strict=False)
    ]
    return [(result["output_ids"], result["meta_info"]["cached_tokens"]) for result in results]


@dataclass
class Saved:
    """A snapshot and what was in it; `first` are the answers of the engine before it, `again` of the one after."""

    directory: Path
    pages: dict[Prefix, Any]
    order: list[Prefix]
    first: list[tuple[list[int], int]]
    again: list[tuple[list[int], int]]
    report: dict[str, Any]

    def copy(self, target: Path) -> Path:
        """For an engine that will replace it."""
        return Path(shutil.copytree(self.directory, target / "cache"))


@pytest.fixture(autouse=True, scope="module")
def small_transfers() -> Any:
    """Five pages of the tiny model at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jradix.runner.TRANSFER_BYTES", 5 * PAGE_BYTES)
        yield


@pytest.fixture(scope="module")
def saved(tiny_text_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    directory = tmp_path_factory.mktemp("saved")
    with start(tiny_text_path) as engine:
        first = answers(engine)
        pages = known_pages(engine.cache)
        report = engine.save_cache(directory)
        again = answers(engine)
    with open_engine(
        tiny_text_path, Path(shutil.copytree(directory, tmp_path_factory.mktemp("copy") / "cache"))
    ) as engine:
        order = evict_all(engine.cache)
    return Saved(directory, pages, order, first, again, report)


def test_a_restored_engine_answers_as_the_one_that_was_saved(
    tiny_text_path: Path, saved: Saved, tmp_path: Path
) -> None:
    with open_engine(tiny_text_path, saved.copy(tmp_path)) as engine:
        assert known_pages(engine.cache) == saved.pages
        assert answers(engine) == saved.again != saved.first
        engine.check_idle()


def test_the_report_counts_what_is_on_disk(saved: Saved) -> None:
    [snapshot] = saved.directory.glob("snapshot-*")
    sizes = [path.stat().st_size for path in snapshot.rglob("*") if path.is_file()]
    assert (saved.report["bytes"], saved.report["files"]) == (sum(sizes), len(sizes))
    assert saved.report["pages"] == len(saved.pages)
    assert 0 < saved.report["tokens"] <= 4 * len(saved.pages)


def test_a_snapshot_is_little_larger_than_the_content_of_the_cached_tokens(
    tiny_text_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jradix.runner.TRANSFER_BYTES", 1 << 20)
    with start(tiny_text_path, max_total_tokens=4096) as engine:
        engine.generate(input_ids=prompts_with_shared_prefixes(80, 320, seed=5), sampling_params=greedy(24))
        report = engine.save_cache(tmp_path)
    assert report["tokens"] > 2000
    assert report["bytes"] <= 1.05 * report["tokens"] * PAGE_BYTES / 4


def test_an_engine_saves_when_it_is_shut_down_also_that_nothing_is_cached(
    tiny_text_path: Path, saved: Saved, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = saved.copy(tmp_path)
    with open_engine(tiny_text_path, directory) as engine:
        assert known_pages(engine.cache) == saved.pages
    with open_engine(tiny_text_path, directory) as engine:
        assert known_pages(engine.cache) == saved.pages
        engine.flush_cache()
        engine.shutdown()  # and again when the block ends
    with open_engine(tiny_text_path, directory) as engine:
        assert not known_pages(engine.cache)
    assert sorted(path.name for path in directory.iterdir()) == ["lock", "snapshot-000004"]
    assert not [record for record in caplog.records if record.name.startswith("jradix")]


@pytest.mark.parametrize("at_home", [False, True])
def test_a_directory_may_be_relative_or_in_the_home(
    tiny_text_path: Path, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_home: bool
) -> None:
    directory = saved.copy(tmp_path)
    monkeypatch.chdir("/" if at_home else directory.parent)
    monkeypatch.setenv("HOME", str(directory.parent))
    with open_engine(tiny_text_path, Path("~" if at_home else "") / directory.name) as engine:
        assert known_pages(engine.cache) == saved.pages


@pytest.mark.parametrize("num_pages", [40, 1024])
def test_other_pools_restore_what_they_have_room_for(
    tiny_text_path: Path, saved: Saved, tmp_path: Path, num_pages: int
) -> None:
    with open_engine(tiny_text_path, saved.copy(tmp_path), max_total_tokens=4 * num_pages) as engine:
        kept = known_pages(engine.cache)
        assert kept.items() <= saved.pages.items()
        assert len(kept) == min(len(saved.pages), num_pages)
        found = answers(engine)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in saved.first]
        engine.check_idle()
        if num_pages > len(saved.pages):
            assert found == saved.again


def test_a_snapshot_goes_to_engines_of_other_devices_and_back(
    tiny_path: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To two devices, where one of four places for the three KV heads is empty, with joined pages as on a TPU."""
    path, count = tiny_path("qwen3_wide"), 6
    with start(path) as engine:
        first = answers(engine, count)
        pages = known_pages(engine.cache)
        num_bytes = engine.save_cache(tmp_path)["bytes"]
        again = answers(engine, count)
        assert again != first
        with monkeypatch.context() as patch:
            patch.setattr("jradix.mesh.choose_kernels", lambda *_: Kernels("xla", joined_pages=True))
            other = open_engine(path, tmp_path, tp_size=2, layer_loop="unroll", max_total_tokens=2048)
        assert known_pages(other.cache) == pages
        assert answers(other, count) == again
        other.check_idle()
        pages = known_pages(other.cache)
        other.shutdown()
        assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) < 1.1 * num_bytes
        restore(engine, tmp_path)
        assert known_pages(engine.cache) == pages
        assert answers(engine, count) == again
        engine.check_idle()


@pytest.mark.parametrize(("field", "options"), [("page_size", {"page_size": 8}), ("weights", {"load_format": "dummy"})])
def test_an_engine_of_another_kind_starts_empty_and_says_why(
    tiny_text_path: Path, saved: Saved, caplog: pytest.LogCaptureFixture, field: str, options: dict[str, Any]
) -> None:
    engine = open_engine(tiny_text_path, saved.directory, **options)
    assert not known_pages(engine.cache)
    [record] = [record for record in caplog.records if record.name.startswith("jradix")]
    assert record.levelname == "WARNING"
    assert f"was saved with {field} " in record.getMessage()
    engine.replicas.loops[0].close()  # without saving


def test_a_damaged_chunk_ends_the_restoration_and_nothing_wrong_is_answered(
    tiny_text_path: Path, saved: Saved, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = saved.copy(tmp_path)
    [snapshot] = directory.glob("snapshot-*")
    largest = max((snapshot / "pages-00002").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    with open_engine(tiny_text_path, directory) as engine:
        assert len(known_pages(engine.cache)) == 2 * 5
        assert known_pages(engine.cache).items() <= saved.pages.items()
        [record] = [record for record in caplog.records if record.name.startswith("jradix")]
        assert "is damaged" in record.getMessage()
        assert [tokens for tokens, _ in answers(engine)] == [tokens for tokens, _ in saved.first]


def test_a_cache_can_be_saved_while_requests_run(tiny_text_path: Path, saved: Saved, tmp_path: Path) -> None:
    with start(tiny_text_path) as engine:
        stream = engine.generate(input_ids=PROMPTS[:8], sampling_params=greedy(24), stream=True)
        for _ in range(12):
            next(stream)
        assert engine.get_server_info()["num_running_requests"]
        report = engine.save_cache(tmp_path)
        assert report["pages"]
        assert len(list(stream)) > 0
        engine.check_idle()
    with open_engine(tiny_text_path, tmp_path) as engine:
        assert len(known_pages(engine.cache)) == report["pages"]
        assert [tokens for tokens, _ in answers(engine)] == [tokens for tokens, _ in saved.first]
        engine.check_idle()


def test_a_flush_and_new_weights_end_a_restoration(tiny_text_path: Path, saved: Saved) -> None:
    """What is read afterwards is of before."""
    engine = start(tiny_text_path)
    with engine.hold() as core:
        found = open_newest(saved.directory, fingerprint(core, engine.model_config))
        assert found is not None

        def update_weights() -> None:
            with core.new_weights():
                pass

        for end in (core.flush_cache, update_weights):
            core._start_afresh()
            core.begin_restoration(found.snapshot)
            assert core.restore_pages(0, found.read_chunk(0)) == 5
            assert core.cache.num_evictable == 5
            end()
            assert core.restore_pages(5, found.read_chunk(1)) is None
            assert core.cache.num_free == core.cache.num_total
    engine.shutdown()


def test_without_a_directory_nothing_is_saved(tiny_engine: Engine) -> None:
    with pytest.raises(ValueError, match="directory must be given"):
        tiny_engine.save_cache()
    with pytest.raises(ValueError, match="directory must be a path that is not empty, got 5"):
        tiny_engine.save_cache(5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="directory must be a path that is not empty, got ''"):
        tiny_engine.save_cache("")


def test_a_directory_that_cannot_be_written_is_an_error_and_the_engine_goes_on(
    tiny_engine: Engine, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        tiny_engine.save_cache(tmp_path / "file")
    tiny_engine.generate(input_ids=[1, 2, 3], sampling_params=greedy(2))
