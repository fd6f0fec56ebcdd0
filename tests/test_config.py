"""Options are validated where they are set, and every step that a limit allows has a bucket."""

import itertools
from typing import Any, get_args

import pytest

from jradix.cache.eviction import EVICTION_POLICIES
from jradix.config import Buckets, EngineConfig, EvictionPolicy, StepShape


def config(**options: Any) -> EngineConfig:
    return EngineConfig.from_kwargs(model_path="model", **options)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("page_size", [0, -1, 1.0, "16", True, None]),
        ("max_running_requests", [0, 2.5]),
        ("chunked_prefill_size", [0, -1, None, 32769]),
        ("tp_size", [0, 1.5]),
        (
            "dist_init_addr",
            ["localhost", "localhost:", ":1234", "somewhere", 1234, "", "localhost:0", "localhost:65536"],
        ),
        ("nnodes", [0, 2, "2"]),  # there is no dist_init_addr
        ("node_rank", [-1, 1, None]),
        ("random_seed", [-1, None]),
        ("context_length", [0, 1, 1.5]),
        ("max_total_tokens", [0, 15, "many"]),
        ("mem_fraction_static", [0, 1, -0.5, float("nan")]),
        ("dtype", ["float16", None]),
        ("load_format", ["gguf"]),
        ("schedule_policy", ["lifo", None]),
        ("priority_scheduling_preemption_threshold", [0, 1.5, None]),
        ("max_queued_requests", [0, -1, 1.5]),
        ("layer_loop", ["loop"]),
        ("compilation_cache_dir", ["", 5]),
        ("cache_dir", ["", 5]),
    ],
)
def test_a_wrong_option_is_named_with_its_limit(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"{name} must be .*got {value!r}"):
            config(**{name: value})


def test_several_processes_have_equally_many_devices_and_a_rank_each() -> None:
    at: dict[str, Any] = {"dist_init_addr": "[::1]:1234", "nnodes": 4, "node_rank": 3}
    assert config(tp_size=8, **at).node_rank == 3
    with pytest.raises(ValueError, match=r"tp_size must be a multiple of nnodes \(4\), got 6"):
        config(tp_size=6, **at)
    with pytest.raises(ValueError, match=r"node_rank must be less than nnodes \(2\), got 3"):
        config(tp_size=4, **at | {"nnodes": 2})
    assert config(tp_size=6, dist_init_addr="auto").nnodes == 1, "jax knows it when it has found the others"


def test_unknown_and_missing_options_are_named() -> None:
    with pytest.raises(ValueError, match=r"unknown engine option 'mem_fraction'; valid ones are .*mem_fraction_static"):
        config(mem_fraction=0.5)
    with pytest.raises(ValueError, match="model_path is missing"):
        EngineConfig.from_kwargs(page_size=16)


LIMITS = list(itertools.product([1, 2, 3, 64], [1, 2, 33, 512], [(2, 1), (96, 3), (8192, 16), (100, 128)]))


def buckets_of(rows: int, chunk: int, context: int, page_size: int) -> Buckets:
    options = config(max_running_requests=rows, chunked_prefill_size=chunk, page_size=page_size)
    return Buckets.of(options, context)


@pytest.mark.parametrize(("rows", "chunk", "geometry"), LIMITS)
def test_every_step_within_the_limits_has_a_bucket_that_holds_it(
    rows: int, chunk: int, geometry: tuple[int, int]
) -> None:
    buckets = buckets_of(rows, chunk, *geometry)
    shapes = set(buckets.shapes())
    max_pages = -(-geometry[0] // geometry[1])
    assert len(shapes) == len(buckets.shapes()), "a bucket is listed twice"
    for pages in {1, max_pages // 2 or 1, max_pages}:
        for decode_rows in range(1, rows + 1):
            shape = buckets.decode_shape(decode_rows, pages)
            assert shape in shapes
            assert (shape.rows, shape.tokens) == (shape.decode_rows, shape.decode_rows)
            assert shape.decode_rows >= decode_rows
            assert shape.max_pages >= pages
        for decode_rows, tokens in itertools.product({0, 1, rows}, {1, chunk // 2 or 1, chunk}):
            for extend_rows in {1, min(tokens, buckets.extend_rows[-1])}:
                shape = buckets.extend_shape(decode_rows, tokens, extend_rows, pages)
                assert shape in shapes, "it would be compiled after the warm-up"
                assert shape.decode_rows >= decode_rows
                assert shape.extend_tokens >= tokens
                assert shape.extend_rows >= extend_rows
                assert shape.max_pages >= pages


def test_buckets_are_few_and_none_exceeds_the_limits() -> None:
    shapes = buckets_of(64, 512, 8192, 16).shapes()
    assert len(shapes) < 100
    assert max(shape.decode_rows for shape in shapes) == 64
    assert max(shape.extend_tokens for shape in shapes) == 512
    assert max(shape.max_pages for shape in shapes) == 512


def test_a_step_above_the_largest_bucket_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="a step needs 5, above the largest bucket 4"):
        buckets_of(4, 16, 96, 4).decode_shape(5, 1)


def test_a_shape_counts_its_rows_and_tokens() -> None:
    shape = StepShape(decode_rows=4, extend_tokens=32, extend_rows=2, max_pages=8)
    assert (shape.rows, shape.tokens) == (6, 36)


def test_every_policy_of_the_cache_can_be_asked_for() -> None:
    assert get_args(EvictionPolicy) == EVICTION_POLICIES
