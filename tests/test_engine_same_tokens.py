"""Greedy tokens, and sampled ones, do not depend on the cache, on evictions, on retractions or on neighbours."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jradix import Engine, SamplingParams
from jradix.cache.pages import TREE
from jradix.logit_processor import ProcessorRow
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
    assert small_pool.scheduler.num_retractions > 2, "the pool was too large to retract anybody"


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


@pytest.mark.parametrize("tail", [0, 1, 2, 3, 4, 5, 8])
def test_logits_on_top_of_a_hit_are_those_of_a_cold_run(tiny_engine: Engine, tail: int) -> None:
    """All cached but its last token, tails of one token up to two pages; the cached pages scattered over the pool."""
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
    assert tiny_engine.cache.statistics.total.hit_tokens - hits == (20 if tail else 19)


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


EXTREMES: list[dict[str, Any]] = [
    {"temperature": 1e-5},
    {"temperature": 1e300, "top_k": 2**40},
    {"temperature": 1.0, "top_p": 1e-300, "min_p": 1.0},
    {"frequency_penalty": 2.0, "presence_penalty": -2.0, "repetition_penalty": 2.0},
    {"repetition_penalty": 1e-300, "temperature": 0.7},
    {"logit_bias": dict.fromkeys(range(300), -100.0)},
    {"logit_bias": {5: 100.0}, "min_new_tokens": 9, "stop_token_ids": [5]},
    {"regex": "[a-d]{9}"},
    {"ebnf": 'root ::= "ab" "cd" [x-z]+', "temperature": 1.0},
]


def test_plain_requests_do_not_notice_extreme_neighbours(tiny_engine: Engine, uncached: list[list[int]]) -> None:
    """Grammars, penalties, biases and limits of sampling in every other row, most of them on the same prompts."""
    count = 4 * len(EXTREMES)
    kinds = [EXTREMES[i // 4] if i % 2 else {} for i in range(count)]
    params = [greedy(9, **kind) if kind else PARAMS[i] for i, kind in enumerate(kinds)]
    prompts = [REQUESTS[i - 1 if i % 4 == 3 else i] for i in range(count)]
    results = tiny_engine.generate(input_ids=prompts, sampling_params=params)
    assert [result["output_ids"] for result in results[::2]] == uncached[:count:2]
    for result in results[1::2]:
        assert result["meta_info"]["finish_reason"]["type"] in ("length", "stop", "abort")
    again = tiny_engine.generate(input_ids=prompts[::-1], sampling_params=params[::-1])[::-1]
    assert [result["output_ids"] for result in again[::2]] == uncached[:count:2]


def ban_all(logits: jax.Array, row: ProcessorRow) -> jax.Array:
    """For a request of parameter 1 all is -inf, of 2 NaN; of 3 the likeliest token is NaN."""
    banned = jnp.where(row.params[0] == 1, -jnp.inf, jnp.nan)
    return jnp.where((row.params[0] < 3) | (logits == logits.max()), banned, logits)


def test_logits_that_are_no_numbers_harm_no_neighbour_and_leave_grammars_as_they_are(
    tiny_engine: Engine, uncached: list[list[int]]
) -> None:
    """And the row's own tokens do not depend on whether a neighbour samples."""
    found: dict[Any, list[list[int]]] = {}
    for temperature in (0.0, 1.0):
        for number, regex in itertools.product((1, 2, 3), (None, "[c-f]{8}")):
            fields = {"custom_logit_processor": ban_all, "custom_params": [number], "regex": regex}
            beside = greedy(8, temperature=temperature, seed=1)
            params = [greedy(8, **fields), beside, PARAMS[2], greedy(8, **fields)]
            results = tiny_engine.generate(input_ids=REQUESTS[:4], sampling_params=params)
            assert results[2]["output_ids"] == uncached[2]
            if regex is not None:
                assert re.fullmatch("[c-f]*", results[0]["text"])
                assert results[0]["meta_info"]["finish_reason"]["type"] in ("length", "stop")
            rows = [results[index]["output_ids"] for index in (0, 3)]
            assert found.setdefault((number, regex), rows) == rows
    tiny_engine.runner.features.processors.clear()


def test_tokens_are_the_same_behind_requests_that_ended_on_stops(
    tiny_engine: Engine, uncached: list[list[int]]
) -> None:
    """On stop strings, expressions, stop tokens and EOS, inside a token and a page, with a token too many in flight."""
    count = 40
    whole = tiny_engine.generate(input_ids=REQUESTS[:count], sampling_params=greedy(14))
    tiny_engine.flush_cache()
    stops: list[SamplingParams] = []
    for index, result in enumerate(whole):
        text, ids = "".join(letter for letter in result["text"] if letter.isascii()), result["output_ids"]
        at = index % 7
        kinds = [
            {"stop": text[at : at + 2] or "a"},
            {"stop_regex": "[a-m]" + text[at : at + 1]},
            {"stop_token_ids": [ids[at]]},
            {"ignore_eos": False, "logit_bias": {2: 100.0}, "min_new_tokens": at},
        ]
        stops.append(greedy(14, **kinds[index % 4]))
    ended = tiny_engine.generate(input_ids=REQUESTS[:count], sampling_params=stops)
    assert sum(result["meta_info"]["finish_reason"]["type"] == "stop" for result in ended) > 30
    # They go on where the others stopped, on top of what these left behind their prompts.
    targets = [ids + result["output_ids"][:5] for ids, result in zip(REQUESTS, whole, strict=False)]
    results = tiny_engine.generate(input_ids=targets, sampling_params=greedy(9))
    assert [result["output_ids"] for result in results] == [result["output_ids"][5:] for result in whole]
    cached = [result["meta_info"]["cached_tokens"] for result in results]
    assert sum(count >= len(prompt) for count, prompt in zip(cached, REQUESTS, strict=False)) > 20
    assert output_ids(tiny_engine, REQUESTS[:count], PARAMS[:count]) == uncached[:count]


def test_text_sent_back_hits_as_far_as_its_tokens_are_the_same(tiny_engine: Engine) -> None:
    """A tokenizer may read its own output as other tokens: then less is hit, and nothing is wrong."""
    tokenizer = tiny_engine.tokenizer
    assert tokenizer is not None
    shorter = 0
    for beginning in ("abc", "hello", "zyx", "qrs"):
        tiny_engine.flush_cache()
        params = SamplingParams(temperature=1.0, seed=1, max_new_tokens=9, regex="[a-z]+")
        first = tiny_engine.generate(beginning, params)
        sequence = [*tokenizer.encode(beginning), *first["output_ids"]]
        by_text = tokenizer.encode(beginning + first["text"] + "e")
        pairs = zip(sequence, by_text, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        shorter += same < len(sequence) - 1
        hits = min(same, len(sequence) - 1, len(by_text) - 1), max(same, len(sequence) - 1)
        for prompt, cached in zip((by_text, [*sequence, 7]), hits, strict=True):
            result = tiny_engine.generate(input_ids=prompt, sampling_params=greedy(1))
            assert result["meta_info"]["cached_tokens"] == cached
            tiny_engine.cache.enabled = False
            assert output_ids(tiny_engine, [prompt], greedy(1)) == [result["output_ids"]]
            tiny_engine.cache.enabled = True
    assert 0 < shorter < 4, "of some the tokens are the same, and of some others"


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
    options: list[dict[str, Any]] = [{"page_size": size, "max_total_tokens": 384} for size in (1, 3, 128)]
    options += [{"max_running_requests": 1, "chunked_prefill_size": 1}]
    outputs = []
    for option in options:
        engine = start(one_layer, load_format="dummy", **option)
        outputs.append(output_ids(engine, REQUESTS[:12], PARAMS[:12]))
        outputs.append(output_ids(engine, REQUESTS[:12], PARAMS[:12]))
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
