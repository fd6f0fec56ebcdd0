"""Engines whose KV pool has 8 bits: same tokens cached and computed, in half the memory of bfloat16."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jradix import Engine, mesh
from tests.test_engine_weights import other_path  # noqa: F401  a fixture
from tests.tiny_engine import greedy, logits_after, output_ids, start

MODELS = [("gpt_oss", "fp8_e4m3")]
"""With experts, sinks and windows; soft caps and int8 are tested with attention alone."""


SIZES: dict[str, Any] = {"page_size": 8, "max_total_tokens": 160}


@pytest.fixture(autouse=True, scope="module")
def compiled_quickly() -> Iterator[None]:
    """The calibration too, which runs before a test has the engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh, "compiler_options", lambda: {"xla_backend_optimization_level": 0})
        yield


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def engine(request: pytest.FixtureRequest, tiny_path: Callable[[str], Path]) -> Iterator[Engine]:
    name, kv_cache_dtype = request.param
    with start(tiny_path(name), kv_cache_dtype=kv_cache_dtype, **SIZES) as engine:
        yield engine


def test_a_snapshot_is_restored(engine: Engine, prompts: list[list[int]], tmp_path: Path) -> None:
    engine.flush_cache()
    first: Any = engine.generate(input_ids=prompts[0], sampling_params=greedy())
    engine.save_cache(tmp_path)
    options = {"kv_cache_dtype": engine.config.kv_cache_dtype, "cache_dir": str(tmp_path), **SIZES}
    with start(Path(engine.config.model_path), **options) as restored:
        [restorer] = restored.replicas._restorers
        restorer.wait()
        again: Any = restored.generate(input_ids=prompts[0], sampling_params=greedy())
    assert again["meta_info"]["cached_tokens"] == len(prompts[0]) - 1
    assert again["output_ids"] == first["output_ids"]


@pytest.fixture
def prompts(engine: Engine) -> list[list[int]]:
    """Three that begin alike, to the middle of a page."""
    ids = np.random.default_rng(1).integers(0, engine.model_config.vocab_size, 60).tolist()
    return [ids[:40], ids[:29] + ids[45:58], [*ids[:36], ids[50]]]


def test_tokens_are_the_same_cold_cached_copied_and_retracted(engine: Engine, prompts: list[list[int]]) -> None:
    cold = []
    for prompt in prompts:
        engine.flush_cache()
        cold += output_ids(engine, [prompt])
    engine.flush_cache()
    results: Any = [engine.generate(input_ids=prompt, sampling_params=greedy()) for prompt in prompts]
    assert [result["output_ids"] for result in results] == cold
    assert [result["meta_info"]["cached_tokens"] for result in results] == [0, 29, 36]
    engine.flush_cache()
    before = engine.scheduler.num_retractions
    assert output_ids(engine, prompts, greedy(48))[0][:16] == cold[0]
    assert engine.scheduler.num_retractions > before, "the pool held them all"
    engine.check_idle()


def test_a_number_of_the_pool_has_one_byte_and_steps_update_it_in_place(engine: Engine) -> None:
    runner, layout = engine.runner, engine._core.layout
    assert runner.pool_bytes_per_device == runner.pool.size == layout.num_pages * layout.page_bytes(1)
    steps = [program for name, program in runner.programs.compiled.items() if name[0] == "forward"]
    assert steps, "no test before has run one"
    for memory in (program.memory_analysis() for program in steps):
        assert memory is not None
        assert memory.alias_size_in_bytes == runner.pool.nbytes


@pytest.fixture(scope="module")
def llama(tiny_path: Callable[[str], Path]) -> Iterator[Engine]:
    with start(tiny_path("llama"), kv_cache_dtype="int8") as engine:
        yield engine


PROMPT = list(range(30, 60))


def test_two_devices_give_the_logits_of_one(llama: Engine, tiny_path: Callable[[str], Path]) -> None:
    """Nearly: sums in another order may round a key to the number beside it."""
    with start(tiny_path("llama"), kv_cache_dtype="int8", tp_size=2) as spread:
        found, expected = logits_after(spread, PROMPT), logits_after(llama, PROMPT)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, atol=0.01)


def test_other_weights_get_scales_of_their_own_and_another_fingerprint(
    llama: Engine,
    other_path: Path,  # noqa: F811
    tiny_path: Callable[[str], Path],
) -> None:
    old, scales = output_ids(llama, [PROMPT]), llama.runner.kv_scales
    fingerprint = llama.runner.scales_fingerprint()
    llama.update_weights(other_path)
    assert scales is not None
    assert llama.runner.kv_scales is not None
    assert np.any(np.asarray(llama.runner.kv_scales) != np.asarray(scales))
    assert llama.runner.scales_fingerprint() != fingerprint
    llama.update_weights(tiny_path("llama"))
    np.testing.assert_array_equal(llama.runner.kv_scales, scales)
    assert llama.runner.scales_fingerprint() == fingerprint
    assert output_ids(llama, [PROMPT]) == old
