"""Two replicas in one engine: the tokens and the hits of one, no request lost, and no fault that spreads."""

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jradix import Engine
from jradix.core import Core
from jradix.delivery import StepFailedError
from jradix.logit_processor import ProcessorRow
from jradix.model.checkpoint import open_checkpoint
from jradix.routing import Router
from jradix.schedule_queue import QueueFullError
from tests.cache.paged_text import known_pages
from tests.process_questions import prefer_even
from tests.tiny_engine import greedy, output_ids, paused, prompts_with_shared_prefixes, sampled, start

PROMPTS = prompts_with_shared_prefixes(24, 320, seed=5)
QUEUED = 30


@pytest.fixture(scope="module")
def started(tiny_text_path: Path) -> Iterator[Engine]:
    with start(tiny_text_path, skip_tokenizer_init=False, dp_size=2, max_queued_requests=QUEUED) as engine:
        yield engine


@pytest.fixture
def two(started: Engine) -> Iterator[Engine]:
    """The engine of two, its caches empty; afterwards nothing may run, or count as outstanding."""
    started.flush_cache()
    yield started
    started.check_idle()
    router = router_of(started)
    assert (router.loads, router._live, dict(router._ids)) == ([0, 0], {}, {})


def router_of(engine: Engine) -> Router:
    assert engine.replicas._router is not None
    return engine.replicas._router


def ranks(results: list[dict[str, Any]]) -> list[int]:
    return [result["meta_info"]["dp_rank"] for result in results]


def cached(result: dict[str, Any]) -> int:
    return result["meta_info"]["cached_tokens"]


def unrelated(count: int, length: int = 20, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(3, 320, (count, length)).tolist()


def prefer_odd(logits: jax.Array, row: ProcessorRow) -> jax.Array:
    return logits.at[1::2].add(row.params[0])


@contextmanager
def holding(engine: Engine) -> Iterator[list[Core]]:
    with ExitStack() as held:
        yield [held.enter_context(engine.hold(replica)) for replica in range(2)]


def test_two_replicas_answer_like_one_cold_cached_sampled_streamed_and_in_an_event_loop(
    two: Engine, tiny_engine: Engine
) -> None:
    for params in (greedy(), sampled(), [greedy(n % 5, stop_token_ids=[9]) for n in range(len(PROMPTS))]):
        expected = output_ids(tiny_engine, PROMPTS, params)
        for _ in ("cold", "cached"):
            results = two.generate(input_ids=PROMPTS, sampling_params=params)
            assert [result["output_ids"] for result in results] == expected
            assert set(ranks(results)) == {0, 1}
        last = {
            r["index"]: r["output_ids"] for r in two.generate(input_ids=PROMPTS, sampling_params=params, stream=True)
        }
        assert [last[index] for index in range(len(PROMPTS))] == expected
        alone = asyncio.run(two.async_generate(input_ids=PROMPTS[3], sampling_params=sampled()))
        assert alone["output_ids"] == output_ids(tiny_engine, PROMPTS[3:4], sampled())[0]
    samples = two.generate(input_ids=PROMPTS[1], sampling_params=sampled(4, n=3))
    assert len(set(ranks(samples))) == 1
    assert [s["output_ids"] for s in samples] == [
        s["output_ids"] for s in tiny_engine.generate(input_ids=PROMPTS[1], sampling_params=sampled(4, n=3))
    ]
    assert "dp_rank" not in tiny_engine.generate(input_ids=[5], sampling_params=greedy(1))["meta_info"]
    assert tiny_engine.replicas._router is None


def test_conversations_find_their_history_as_on_one_replica(two: Engine, tiny_engine: Engine) -> None:
    """Four at a time, and none of them leaves its replica."""
    histories = unrelated(4, seed=1)
    homes: list[int] | None = None
    for turn in range(4):
        ours, theirs = (
            [engine.generate(input_ids=each, sampling_params=greedy(6)) for each in histories]
            for engine in (two, tiny_engine)
        )
        assert [cached(result) for result in ours] == [cached(result) for result in theirs]
        assert min(map(cached, ours)) > 0 or not turn
        homes = homes or ranks(ours)
        assert ranks(ours) == homes
        assert sorted(homes) == [0, 0, 1, 1]
        questions = unrelated(4, 6, seed=10 + turn)
        histories = [
            history + result["output_ids"] + question
            for history, result, question in zip(histories, ours, questions, strict=True)
        ]


def test_a_batch_of_more_than_run_at_once_is_planned_and_comes_back_in_order(two: Engine, tiny_engine: Engine) -> None:
    stems = unrelated(5, 40, seed=2)
    prompts = [stems[index % 5] + [3 + index] for index in range(30)]
    results = two.generate(input_ids=prompts, sampling_params=greedy(2))
    assert [result["output_ids"] for result in results] == output_ids(tiny_engine, prompts, greedy(2))
    homes = {(index % 5, rank) for index, rank in enumerate(ranks(results))}
    assert len(homes) <= 5 + 2
    computed = sum(result["meta_info"]["prompt_tokens"] - cached(result) for result in results)
    assert computed <= len(homes) * 40 + 30 * 2
    assert abs(ranks(results).count(0) - 15) <= 4


def test_requests_are_aborted_wherever_they_are(two: Engine) -> None:
    with paused(two):
        stream = two.generate(input_ids=unrelated(6), sampling_params=greedy(8), rid="batch", stream=True)
        others = [
            two.generate(input_ids=prompt, sampling_params=greedy(8), rid=f"alone-{n}", stream=True)
            for n, prompt in enumerate(unrelated(2, seed=3))
        ]
        assert [core["num_waiting_requests"] for core in two.get_server_info()["replicas"]] == [4, 4]
        for rid in ("batch", "batch-5", "alone-1"):
            with pytest.raises(ValueError, match=f"rid '{rid}' belongs to a request that is still running"):
                two.generate(input_ids=PROMPTS[0], rid=rid)
        assert two.abort_request("alone-1")
        assert two.abort_request("batch")
        assert not two.abort_request("batch")
        assert not two.abort_request("nobody")
    reasons = [result["meta_info"]["finish_reason"]["type"] for result in stream]
    assert reasons == ["abort"] * 6
    assert [list(each)[-1]["meta_info"]["finish_reason"]["type"] for each in others] == ["length", "abort"]
    given_up = two.generate(input_ids=unrelated(4), sampling_params=greedy(60), stream=True)
    next(given_up)
    given_up.close()


def test_a_list_that_one_replica_refuses_leaves_nothing_on_the_other(two: Engine) -> None:
    with paused(two):
        waiting = two.generate(input_ids=[3, 4], sampling_params=greedy(3, n=QUEUED), rid="full", stream=True)
        router = router_of(two)
        [full] = {placed.replica for placed in router._live.values()}
        loads = router.loads
        many = unrelated(QUEUED + 4)
        with pytest.raises(QueueFullError, match="more exceed max_queued_requests"):
            two.generate(input_ids=many, sampling_params=greedy(3), rid="many")
        with pytest.raises(QueueFullError):
            asyncio.run(two.async_generate(input_ids=many, sampling_params=greedy(3), rid="many"))
        outputs = two.prepare(many, greedy(3), lambda _: None, each_token=False, rid="many")
        with pytest.raises(QueueFullError):
            two.replicas.submit(outputs).result()  # who waits for nothing abandons nothing either
        with holding(two) as cores:
            assert [len(core.outputs) for core in cores] == [QUEUED * (n == full) for n in range(2)]
        assert router.loads == loads
        later = two.generate(input_ids=many[:3], sampling_params=greedy(3), rid="many", stream=True)
    assert len({result["index"] for result in waiting}) == QUEUED
    assert set(ranks(list(later))) == {1 - full}


def test_a_request_that_cannot_run_on_its_replica_takes_its_list_along(two: Engine) -> None:
    """It is found only there: the limits of the submission are met, those of a processor are not."""

    def wrong(logits: Any, row: Any) -> Any:
        return logits[:3]

    params = [greedy(3) for _ in range(6)]
    params[4] = greedy(3, custom_logit_processor=wrong)
    with pytest.raises(ValueError, match="custom_logit_processor"):
        two.generate(input_ids=unrelated(6), sampling_params=params)
    two.check_idle()


def test_a_step_that_fails_ends_the_requests_of_its_replica_alone(
    two: Engine, tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = unrelated(6, seed=4)
    first = two.generate(input_ids=prompts, sampling_params=greedy(4))

    def broken(step: Any) -> Any:
        raise RuntimeError("the chip is gone")

    streams = []
    with monkeypatch.context() as patch, paused(two):
        streams = [two.generate(input_ids=prompt, sampling_params=greedy(4), stream=True) for prompt in prompts]
        patch.setattr(two.replicas.cores[1].runner, "collect", broken)
        two.continue_generation()
        for index, stream in enumerate(streams):
            if first[index]["meta_info"]["dp_rank"] == 1:
                with pytest.raises(StepFailedError, match="the chip is gone"):
                    list(stream)
            else:
                assert list(stream)[-1]["output_ids"] == first[index]["output_ids"]
    assert [bool(known) for known in router_of(two)._known] == [True, False], "it would send requests to an empty cache"
    assert output_ids(two, prompts, greedy(4)) == output_ids(tiny_engine, prompts, greedy(4))


def test_reports_are_sums_and_a_flush_empties_all(two: Engine) -> None:
    two.generate(input_ids=PROMPTS, sampling_params=greedy(2))
    report, info = two.cache_report(), two.get_server_info()
    with holding(two) as cores:
        parts = [core.cache_report() for core in cores]
        held = [core.cache.num_evictable for core in cores]
    assert report["replicas"] == parts
    assert min(held) > 0
    for name in ("asked_tokens", "hit_tokens", "num_pages", "free_pages", "evictable_pages"):
        assert report[name] == sum(part[name] for part in parts)
    assert report["hit_rate"] == report["hit_tokens"] / report["asked_tokens"]
    rates = [part["window_hit_rate"] for part in parts]
    assert min(rates) <= report["window_hit_rate"] <= max(rates)
    assert (info["dp_size"], len(info["replicas"]), info["weight_version"]) == (2, 2, parts and 0)
    assert info["weight_bytes_per_device"] == two.runner.weight_bytes_per_device
    assert two.flush_cache() == sum(held)
    assert not any(router_of(two)._known)
    assert two.stalled_seconds == 0


def test_each_replica_has_its_own_devices_weights_and_pool(two: Engine) -> None:
    with holding(two) as cores:
        for number, core in enumerate(cores):
            for array in (*core.runner.parameters, core.runner.pool):
                assert array.devices() == {jax.devices()[number]}
        for one, other in zip(cores[0].runner.parameters, cores[1].runner.parameters, strict=True):
            np.testing.assert_array_equal(one, other)


def test_new_weights_reach_all_replicas_or_all_stand_still(
    two: Engine, tiny_engine: Engine, tiny_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update fails for the second, when the first has its new weights already."""
    prompts = unrelated(6, seed=6)
    before = output_ids(two, prompts, greedy(4))
    checkpoint = open_checkpoint(tiny_path("llama"))
    other = {name: np.asarray(checkpoint.read(name), np.float32)[..., ::-1] for name in checkpoint.names()}
    done: list[int] = []

    def replace_one(parameters: list[jax.Array], sharding: object) -> None:
        if done:
            raise OSError("the disk is gone")
        done.append(1)

    with monkeypatch.context() as patch:
        patch.setattr("jradix.startup.weights_to_replace", lambda *_: replace_one)
        with pytest.raises(OSError, match="the disk is gone"):
            two.update_weights(other)
    two.continue_generation()
    info = two.get_server_info()
    assert [(each["paused"], each["weight_version"]) for each in info["replicas"]] == [(True, 0)] * 2
    assert two.update_weights(other) == 1
    results = two.generate(input_ids=prompts, sampling_params=greedy(4))
    tiny_engine.update_weights(other)
    assert [r["output_ids"] for r in results] == output_ids(tiny_engine, prompts, greedy(4)) != before
    assert {cached(result) for result in results} == {0}
    assert {result["meta_info"]["weight_version"] for result in results} == {1}
    for engine in (two, tiny_engine):
        engine.update_weights(tiny_path("llama"))
    assert output_ids(two, prompts, greedy(4)) == before
    assert set(ranks(results)) == {0, 1}


def test_caches_are_kept_for_each_replica_and_the_first_one_fits_an_engine_of_one(
    two: Engine, tiny_text_path: Path, tmp_path: Path
) -> None:
    prompts = unrelated(8, 24, seed=7)
    homes = ranks(two.generate(input_ids=prompts, sampling_params=greedy(2)))
    with holding(two) as cores:
        saved = [known_pages(core.cache) for core in cores]
    report = two.save_cache(tmp_path)
    assert report["pages"] == sum(map(len, saved)) == two.cache_report()["evictable_pages"]
    assert all(saved)
    for count, expected in {1: saved[:1], 2: saved, 3: [*saved, {}]}.items():
        engine = start(tiny_text_path, cache_dir=str(tmp_path), dp_size=count)
        for restorer in engine.replicas._restorers:
            restorer.wait()
        assert [known_pages(core.cache) for core in engine.replicas.cores] == expected
        if count > 1:
            requests, _ = engine._submission.requests(None, prompts, None)
            for request, home in zip(requests, homes, strict=True):
                assert router_of(engine).place([request]) == [home]
                router_of(engine).end(request)
        engine.replicas.close()  # without saving


def test_an_engine_that_is_dropped_ends_the_threads_of_all_replicas(tiny_text_path: Path) -> None:
    engine = start(tiny_text_path, dp_size=2)
    endings = [loop._end.peek() for loop in engine.replicas.loops]
    threads: list[threading.Thread] = [ending[2][1] for ending in endings if ending is not None]
    engine.pause_generation()
    stream = engine.generate(input_ids=unrelated(4), sampling_params=greedy(2), stream=True)
    assert len(threads) == 2
    assert all(thread.is_alive() for thread in threads)
    del engine, stream, endings
    gc.collect()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_two_replicas_of_two_devices_each(tiny_text_path: Path, tiny_engine: Engine) -> None:
    """A request on the second, which is given one because the first is busy."""
    prompt = unrelated(1, seed=8)[0]
    with start(tiny_text_path, dp_size=2, tp_size=2) as engine:
        busy, _ = engine._submission.requests(None, [5] * 40, None)
        assert router_of(engine).place(busy) == [0]
        result = engine.generate(input_ids=prompt, sampling_params=greedy(1))
        assert result["output_ids"] == output_ids(tiny_engine, [prompt], greedy(1))[0]
        assert ranks([result]) == [1]
        for number, core in enumerate(engine.replicas.cores):
            assert core.runner.pool.devices() == set(jax.devices()[2 * number : 2 * number + 2])
        engine.check_idle()


@pytest.mark.thorough
def test_replicas_compile_nothing_after_a_strict_warm_up_which_knows_the_processors_of_all(
    tiny_text_path: Path, tiny_engine: Engine
) -> None:
    """Of one row and one prompt token a step, so that there are few programs."""
    few: dict[str, Any] = {
        "max_running_requests": 1,
        "chunked_prefill_size": 1,
        "context_length": 16,
        "max_total_tokens": 64,
    }
    prompts = unrelated(6, 5, seed=9)
    plain, processed = greedy(3), greedy(3, custom_logit_processor=prefer_even, custom_params=[9.0])
    params = [plain, plain, processed, processed, processed, processed]
    with start(tiny_text_path, dp_size=2, strict_compile=True, **few) as engine:
        engine.register_processor(prefer_even)
        engine.warm_up()
        runners = [core.runner for core in engine.replicas.cores]
        compiled = [runner.num_compiled for runner in runners]
        results = engine.generate(input_ids=prompts, sampling_params=params)
        assert [result["output_ids"] for result in results] == output_ids(tiny_engine, prompts, params)
        assert set(ranks(results[2:])) == {0, 1}
        assert {token % 2 for result in results[2:] for token in result["output_ids"]} == {0}
        with pytest.raises(ValueError, match="came after the warm-up"):
            engine.register_processor(prefer_odd)
        with pytest.raises(ValueError, match="came after the warm-up"):
            engine.generate(input_ids=prompts, sampling_params=greedy(1, custom_logit_processor=prefer_odd))
        assert [runner.num_compiled for runner in runners] == compiled
        assert output_ids(engine, prompts[:2], plain) == [result["output_ids"] for result in results[:2]]
        engine.check_idle()
    tiny_engine.runner.features.processors.clear()


def test_too_few_devices_are_named(tiny_text_path: Path) -> None:
    with pytest.raises(ValueError, match=r"dp_size \* tp_size must be at most 8, .* got 3 \* 4"):
        start(tiny_text_path, dp_size=3, tp_size=4)
