"""Generating from tasks and threads: event loops, cancellations, timeouts, pauses."""

import asyncio
import threading
import time
from typing import Any

import pytest

from jradix import Engine
from tests.tiny_engine import greedy, output_ids, paused

PROMPTS = [[5, 6, 7, 8, 9, seed] for seed in range(10, 22)]


def test_many_tasks_get_each_its_own_result(tiny_engine: Engine) -> None:
    expected = output_ids(tiny_engine, PROMPTS, greedy(9))

    async def ask(prompt: list[int]) -> list[int]:
        result = await tiny_engine.async_generate(input_ids=prompt, sampling_params=greedy(9))
        return result["output_ids"]

    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*(ask(prompt) for prompt in PROMPTS))

    assert asyncio.run(all_of_them()) == expected


def test_a_batch_comes_back_in_order_and_a_stream_grows(tiny_engine: Engine) -> None:
    expected = output_ids(tiny_engine, PROMPTS[:3], greedy(7))

    async def both() -> tuple[list[dict[str, Any]], dict[int, list[dict[str, Any]]]]:
        batch = await tiny_engine.async_generate(input_ids=PROMPTS[:3], sampling_params=greedy(7))
        streams: dict[int, list[dict[str, Any]]] = {}
        async for item in await tiny_engine.async_generate(
            input_ids=PROMPTS[:3], sampling_params=greedy(7), stream=True
        ):
            streams.setdefault(item["index"], []).append(item)
        return batch, streams

    batch, streams = asyncio.run(both())
    assert [result["output_ids"] for result in batch] == expected
    assert all("index" not in result for result in batch)
    assert [streams[index][-1]["output_ids"] for index in range(3)] == expected
    for items in streams.values():
        assert [item["meta_info"]["finish_reason"] is not None for item in items[:-1]] == [False] * (len(items) - 1)


def test_generate_works_inside_a_running_event_loop(tiny_engine: Engine) -> None:
    """As in a notebook, where a loop is running whenever a cell is."""

    async def cell() -> list[list[int]]:
        return output_ids(tiny_engine, PROMPTS[:2], greedy(4))

    assert asyncio.run(cell()) == output_ids(tiny_engine, PROMPTS[:2], greedy(4))


def test_wrong_arguments_are_told_to_who_awaits(tiny_engine: Engine) -> None:
    async def ask(**arguments: Any) -> None:
        await tiny_engine.async_generate(**arguments)

    with pytest.raises(ValueError, match="input_ids must be a list of token ids"):
        asyncio.run(ask(input_ids=[]))
    with pytest.raises(ValueError, match="unknown argument 'temprature'"):
        asyncio.run(ask(input_ids=PROMPTS[0], temprature=0))


@pytest.mark.parametrize("stream", [False, True])
def test_a_cancelled_task_leaves_nothing_behind(tiny_engine: Engine, stream: bool) -> None:
    async def ask() -> None:
        results = await tiny_engine.async_generate(input_ids=PROMPTS, sampling_params=greedy(80), stream=stream)
        async for _ in results:
            pass

    async def cancelled() -> None:
        task = asyncio.create_task(ask())
        while not tiny_engine.scheduler.has_work:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with paused(tiny_engine):
        asyncio.run(cancelled())
        tiny_engine.check_idle()


def test_a_stream_whose_reader_stops_leaves_nothing_behind(tiny_engine: Engine) -> None:
    async def read_a_little() -> None:
        stream = await tiny_engine.async_generate(input_ids=PROMPTS, sampling_params=greedy(80), stream=True)
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(read_a_little())
    tiny_engine.check_idle()


def test_a_closed_event_loop_does_not_break_the_step_of_others(tiny_engine: Engine) -> None:
    expected = output_ids(tiny_engine, PROMPTS[:2], greedy(20))

    async def walk_away() -> Any:
        stream = await tiny_engine.async_generate(input_ids=PROMPTS[5], sampling_params=greedy(60), stream=True)
        await anext(stream)
        return stream

    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(walk_away())
    loop.close()
    assert output_ids(tiny_engine, PROMPTS[:2], greedy(20)) == expected
    with pytest.raises(StopIteration):
        stream.aclose().send(None)  # as a loop that closes its iterators would


def test_a_request_out_of_time_ends_with_what_it_has_waiting_or_running(tiny_engine: Engine) -> None:
    """By the clock of the loop alone, which nobody calls and which a pause does not stop."""
    with paused(tiny_engine):
        stream = tiny_engine.generate(
            input_ids=PROMPTS[:3], sampling_params=greedy(20), timeout=[0.05, None, 1e-9], stream=True
        )
        with tiny_engine.hold() as core:
            for _ in range(6):
                core.step()
        ended: dict[int, dict[str, Any]] = {}
        while not {0, 2} <= ended.keys():
            item = next(stream)
            if item["meta_info"]["finish_reason"] is not None:
                ended[item["index"]] = item
    assert ended.keys() == {0, 2}
    for item in ended.values():
        reason = item["meta_info"]["finish_reason"]
        assert (reason["type"], reason["message"][:9]) == ("abort", "timed out")
    last = list(stream)[-1]
    assert last["index"] == 1
    assert len(last["output_ids"]) == 20


def test_a_timeout_longer_than_a_thread_can_wait_is_none(tiny_engine: Engine) -> None:
    with paused(tiny_engine):
        stream = tiny_engine.generate(input_ids=PROMPTS[0], sampling_params=greedy(4), timeout=1e300, stream=True)
    assert len(list(stream)[-1]["output_ids"]) == 4


def test_requests_of_one_id_may_have_the_same_deadline(tiny_engine: Engine) -> None:
    """One after another, beside one that is due sooner: far enough away, a deadline is rounded to the same number."""
    with paused(tiny_engine):
        first = tiny_engine.generate(input_ids=PROMPTS[0], sampling_params=greedy(4), timeout=1e3, stream=True)
        for _ in range(3):
            again = tiny_engine.generate(
                input_ids=PROMPTS[1], sampling_params=greedy(4), rid="again", timeout=1e300, stream=True
            )
            tiny_engine.abort_request("again")
            assert list(again)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(list(first)[-1]["output_ids"]) == 4
    tiny_engine.check_idle()


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "5", True])
def test_a_timeout_that_is_no_positive_number_is_refused(tiny_engine: Engine, timeout: Any) -> None:
    with pytest.raises(ValueError, match=r"timeout must be a finite number in \(0, inf\)"):
        tiny_engine.generate(input_ids=PROMPTS[0], timeout=timeout)


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_a_pause_stops_all_steps_and_loses_no_request(tiny_engine: Engine, mode: Any) -> None:
    expected = output_ids(tiny_engine, PROMPTS[:6], greedy(12))
    results: list[Any] = []
    with paused(tiny_engine):
        thread = threading.Thread(
            target=lambda: results.extend(tiny_engine.generate(input_ids=PROMPTS[:6], sampling_params=greedy(12)))
        )
        thread.start()
        while not tiny_engine.scheduler.has_work:
            time.sleep(0.001)
        with tiny_engine.hold() as core:
            for _ in range(4):
                core.step()
        tiny_engine.pause_generation(mode)
        with tiny_engine.hold() as core:
            assert len(core.scheduler.running) == {"retract": 0, "in_place": 4, "abort": 0}[mode]
            assert not core.can_step
    thread.join()
    for result, whole in zip(results, expected, strict=True):
        if mode == "abort":
            assert result["meta_info"]["finish_reason"]["type"] == "abort"
            assert result["output_ids"] == whole[: len(result["output_ids"])]
        else:
            assert result["output_ids"] == whole


def test_a_mode_of_pausing_that_does_not_exist_is_refused(tiny_engine: Engine) -> None:
    with pytest.raises(ValueError, match="mode must be one of retract, in_place, abort"):
        tiny_engine.pause_generation("gently")  # pyright: ignore[reportArgumentType]


def test_deadlines_of_requests_that_have_ended_are_not_kept_for_ever(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jradix.core.MANY_DEADLINES", 10)
    for _ in range(5):
        tiny_engine.generate(input_ids=PROMPTS[:6], sampling_params=greedy(1), timeout=3600.0)
    with tiny_engine.hold() as core:
        assert len(core._deadlines) <= 10 + 2 * 6
