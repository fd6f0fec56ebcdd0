"""Greedy tokens, and sampled ones, do not depend on the cache, on evictions, on retractions or on neighbours."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jradix import Engine, SamplingParams
from jradix.cache.pages import TREE
from jradix.pallas.layout import write_tokens
from tests.tiny_engine import (
    greedy,
    logits_after,
    output_ids,
    paused,
    prompts_with_shared_prefixes,
    start,
    write_dummy_model,
)

VOCAB = 320
REQUESTS = prompts_with_shared_prefixes(200, VOCAB, seed=1)


def params_of(index: int) -> SamplingParams:
    """Outputs of 0 to 14 tokens, the same for a request wherever it runs."""
    return greedy(index * 7 % 15)


PARAMS = [params_of(index) for index in range(len(REQUESTS))]


@pytest.fixture(scope="session")
def uncached(shared_tiny_engine: Engine) -> list[list[int]]:
    """What each request gives when nothing is ever reused."""
    shared_tiny_engine.flush_cache()
    shared_tiny_engine.cache.enabled = False
    try:
        return output_ids(shared_tiny_engine, REQUESTS, PARAMS)
    finally:
        shared_tiny_engine.cache.enabled = True


def test_tokens_are_the_same_with_the_cache_on_and_off(tiny_engine: Engine, uncached: list[list[int]]) -> None:
    results = tiny_engine.generate(input_ids=REQUESTS, sampling_params=PARAMS)
    assert [result["output_ids"] for result in results] == uncached
    assert sum(result["meta_info"]["cached_tokens"] for result in results) > 1000, "the cache was hardly used"
    assert output_ids(tiny_engine, REQUESTS[::-1], PARAMS[::-1])[::-1] == uncached, "a warm cache, another order"


def test_tokens_are_the_same_after_evictions_and_retractions(small_pool: Engine, uncached: list[list[int]]) -> None:
    assert output_ids(small_pool, REQUESTS, PARAMS) == uncached
    small_pool.check_idle()
    assert small_pool.cache.statistics.total.evicted_tokens > 1000, "the pool was too large to evict much"
    assert small_pool.scheduler.num_retractions > 5, "the pool was too large to retract anybody"


def poison(engine: Engine) -> None:
    """Write NaN to every place of the pool that holds no computed token: free pages, tails of pages, the null page."""
    pages, page_size, layers = engine.cache.num_total + 1, engine.config.page_size, engine.model_config.layers
    in_use = np.zeros((pages, page_size), bool)
    in_use[engine.cache._pages.states == TREE] = True
    in_use[0] = False
    for request in engine.scheduler.running:
        positions = np.arange(request.computed_len)
        table = engine.scheduler.page_tables[request.slot]
        in_use[table[positions // page_size], positions % page_size] = True
    unowned = np.where(in_use, layers * pages, np.arange(pages)[:, None])  # pages outside the pool drop the write
    flat = unowned + np.where(in_use, 0, np.arange(layers)[:, None, None] * pages)
    offsets = np.broadcast_to(np.arange(page_size), flat.shape)
    nan = jnp.full((flat.size, engine.model_config.kv_heads, engine.model_config.head_dim), jnp.nan)
    engine.runner.replace_pool(
        jax.jit(write_tokens)(engine.runner.pool, nan, nan, flat.reshape(-1), offsets.reshape(-1))
    )


def test_nan_in_places_nobody_owns_changes_nothing(small_pool: Engine, uncached: list[list[int]]) -> None:
    """Before every step, while requests share, decode, are retracted and run in chunks."""
    small_pool.flush_cache()
    small_pool.scheduler.chunked_prefill_size = 7
    count = 60
    with paused(small_pool):
        results = small_pool.generate(input_ids=REQUESTS[:count], sampling_params=PARAMS[:count], stream=True)
        with small_pool.hold() as core:
            while core.outputs:
                core.step()
                poison(small_pool)
    finished = {result["index"]: result["output_ids"] for result in results}
    small_pool.scheduler.chunked_prefill_size = 64
    assert [finished[index] for index in range(count)] == uncached[:count]
    assert bool(jnp.isnan(small_pool.runner.pool).any()), "nothing was poisoned"
    small_pool.runner.reset()
    small_pool.flush_cache()
    small_pool.check_idle()


@pytest.mark.parametrize("tail", [1, 2, 3, 4, 5, 8])
def test_logits_on_top_of_a_hit_are_those_of_a_cold_run(tiny_engine: Engine, tail: int) -> None:
    """Tails of one token up to two pages, the cached pages scattered over the pool."""
    rng = np.random.default_rng(tail)
    prefix, ending = rng.integers(0, VOCAB, 20).tolist(), rng.integers(0, VOCAB, tail).tolist()
    cold = logits_after(tiny_engine, prefix + ending)
    tiny_engine.flush_cache()
    held = [tiny_engine.cache.allocate(1) for _ in range(40)]
    for pages in held[::2]:
        assert pages is not None
        tiny_engine.cache.free(pages)  # free pages now come in descending order, with gaps
    output_ids(tiny_engine, [prefix], greedy(1))
    for pages in held[1::2]:
        assert pages is not None
        tiny_engine.cache.free(pages)
    hits = tiny_engine.cache.statistics.total.hit_tokens
    np.testing.assert_allclose(logits_after(tiny_engine, prefix + ending), cold, atol=1e-4, rtol=0)
    assert tiny_engine.cache.statistics.total.hit_tokens - hits == 20


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_an_identical_prompt_leaves_one_token_to_compute(tiny_engine: Engine, length: int) -> None:
    prompt = list(range(10, 10 + length))
    cold, again = (tiny_engine.generate(input_ids=prompt, sampling_params=greedy(1)) for _ in range(2))
    assert again["output_ids"] == cold["output_ids"]
    assert again["meta_info"]["cached_tokens"] == length - 1


SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, seed=7, max_new_tokens=12, ignore_eos=True)


def test_a_seed_gives_the_same_tokens_whatever_else_runs(tiny_engine: Engine, small_pool: Engine) -> None:
    """Alone, again on a cached prompt, among greedy and random neighbours, and retracted in a small pool."""
    prompt = REQUESTS[3]
    alone = output_ids(tiny_engine, [prompt], SAMPLED)[0]
    assert output_ids(tiny_engine, [prompt], SAMPLED)[0] == alone
    other = SamplingParams(temperature=0.7, top_k=20, min_p=0.01, max_new_tokens=30, ignore_eos=True)
    for engine in (tiny_engine, small_pool):
        retractions = engine.scheduler.num_retractions
        for place in (0, 2, 5):
            neighbours = [(REQUESTS[20 + i], other if i % 2 else greedy(30)) for i in range(5)]
            neighbours.insert(place, (prompt, SAMPLED))
            outputs = output_ids(engine, [ids for ids, _ in neighbours], [params for _, params in neighbours])
            assert outputs[place] == alone
    assert small_pool.scheduler.num_retractions > retractions
    small_pool.check_idle()


def test_seeds_and_requests_without_one_differ(tiny_engine: Engine) -> None:
    def tokens(seed: int | None) -> list[int]:
        params = SamplingParams(temperature=1.0, seed=seed, max_new_tokens=12, ignore_eos=True)
        return output_ids(tiny_engine, [REQUESTS[3]], params)[0]

    assert len({tuple(tokens(seed)) for seed in (1, 2, 3, None, None)}) == 5


def test_greedy_requests_do_not_notice_random_neighbours(tiny_engine: Engine, uncached: list[list[int]]) -> None:
    hot = SamplingParams(temperature=5.0, max_new_tokens=9, ignore_eos=True)
    outputs = output_ids(tiny_engine, REQUESTS[:40], [hot if i % 2 else PARAMS[i] for i in range(40)])
    assert outputs[::2] == uncached[:40:2]


def test_flat_logits_at_temperature_one_are_really_sampled(tiny_engine: Engine) -> None:
    params = SamplingParams(temperature=100.0, max_new_tokens=1, ignore_eos=True)
    assert len({ids[0] for ids in output_ids(tiny_engine, [REQUESTS[0]] * 40, params)}) > 20


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory, tiny_path: Callable[[str], Path]) -> Path:
    """Random weights of one layer: quick to compile for many page sizes."""
    path = tmp_path_factory.mktemp("one_layer")
    write_dummy_model(tiny_path("llama"), path, num_hidden_layers=1)
    return path


def test_tokens_are_the_same_for_every_page_size_and_batch_size(one_layer: Path) -> None:
    """Pages of one token up to more than the context; one request at a time; one prompt token a step."""
    options: list[dict[str, Any]] = [{"page_size": size, "max_total_tokens": 384} for size in (1, 3, 16, 64, 128)]
    options += [{"max_running_requests": 1, "chunked_prefill_size": 1}]
    outputs = []
    for option in options:
        engine = start(one_layer, load_format="dummy", **option)
        outputs.append(output_ids(engine, REQUESTS[:24], PARAMS[:24]))
        outputs.append(output_ids(engine, REQUESTS[:24], PARAMS[:24]))
        engine.check_idle()
    assert all(output == outputs[0] for output in outputs)


def test_large_pages_cache_as_many_tokens_as_pages_of_one(tiny_path: Callable[[str], Path]) -> None:
    """Few-shot prompts: 0 to 3 examples of one of two tasks, then a question, one after another."""
    rng = np.random.default_rng(5)
    tasks = [[rng.integers(3, 320, 17 + i).tolist() for i in range(3)] for _ in range(2)]
    shots = [tasks[rng.integers(2)][: rng.integers(4)] for _ in range(24)]
    prompts = [[*itertools.chain.from_iterable(some), *rng.integers(3, 320, 9).tolist()] for some in shots]
    outputs: list[list[list[int]]] = []
    cached: list[list[int]] = []
    for page_size in (1, 32):
        engine = start(tiny_path("llama"), page_size=page_size)
        results = [engine.generate(input_ids=prompt, sampling_params=greedy(4)) for prompt in prompts]
        outputs.append([result["output_ids"] for result in results])
        cached.append([result["meta_info"]["cached_tokens"] for result in results])
        engine.check_idle()
    assert outputs[0] == outputs[1]
    assert cached[0] == cached[1]
    assert sum(cached[0]) > 400
