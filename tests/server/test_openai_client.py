"""OpenAI's own client in its other ways: async, parsed answers, its exceptions, its timeouts, its cancelled streams."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx2
import openai
import pytest
from pydantic import BaseModel, ConfigDict

from tests.server.conftest import API_KEY, MAX_QUEUED, MODEL, metrics, wait_until_idle
from tests.server.test_limits import assert_aborted
from tests.server.test_native import events
from tests.server.test_openai import CALLS, GREEDY_CHAT, MESSAGES, RENDERED, TOOL

GREEDY_COMPLETION: Any = {"model": MODEL, "prompt": "complete this", "temperature": 0, "max_tokens": 12}
LONG: Any = {"model": MODEL, "prompt": "a long one", "max_tokens": 450, "extra_body": {"ignore_eos": True}}
WITH_USAGE: Any = {"stream": True, "stream_options": {"include_usage": True}}


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")

    sky: Literal["blue", "grey"]
    wet: bool


def run[T](url: str, work: Callable[[openai.AsyncOpenAI], Coroutine[Any, Any, T]]) -> T:
    """The result of `work` with an async client, in an event loop of its own."""

    async def inside() -> T:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=API_KEY, max_retries=0, timeout=90) as client:
            return await work(client)

    return asyncio.run(inside())


async def joined(stream: AsyncIterator[Any]) -> str:
    return "".join([choice.delta.content or "" async for chunk in stream for choice in chunk.choices])


def test_the_async_client_gets_what_the_sync_client_gets(client: openai.OpenAI, url: str) -> None:
    async def ask(other: openai.AsyncOpenAI) -> tuple[Any, str, Any, str]:
        chat, streamed, completion, pieces = await asyncio.gather(
            other.chat.completions.create(**GREEDY_CHAT),
            other.chat.completions.create(**GREEDY_CHAT, stream=True),
            other.completions.create(**GREEDY_COMPLETION),
            other.completions.create(**GREEDY_COMPLETION, stream=True),
        )
        text = "".join([choice.text async for chunk in pieces for choice in chunk.choices])
        return chat, await joined(streamed), completion, text

    chat, streamed, completion, pieces = run(url, ask)
    expected = client.chat.completions.create(**GREEDY_CHAT).choices[0].message.content
    assert [chat.choices[0].message.content, streamed] == [expected] * 2
    expected = client.completions.create(**GREEDY_COMPLETION).choices[0].text
    assert [completion.choices[0].text, pieces] == [expected] * 2


def test_an_answer_is_parsed_into_a_pydantic_model(client: openai.OpenAI) -> None:
    whole = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Weather, seed=1)
    assert isinstance(whole.choices[0].message.parsed, Weather)
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, response_format=Weather, seed=1) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed


def test_calls_are_accumulated_by_the_clients_own_stream(client: openai.OpenAI) -> None:
    expression = "".join(f"\\{letter}" if letter in "{}." else letter for letter in CALLS)
    free: Any = {"max_tokens": 120, "temperature": 0, "extra_body": {"regex": expression}}
    for choice, more in (("auto", free), ("required", {"seed": 1, "parallel_tool_calls": False})):
        body: Any = {"model": MODEL, "messages": MESSAGES, "tools": [TOOL], "tool_choice": choice, **more}
        with client.chat.completions.stream(**body) as stream:
            final = stream.get_final_completion()
        [call] = final.choices[0].message.tool_calls or []
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments)["wet"] in (True, False)
        assert final.choices[0].finish_reason == "tool_calls"


def test_every_choice_of_a_streamed_completion_ends_once_and_usage_comes_last(
    client: openai.OpenAI, http: httpx2.Client
) -> None:
    body = {**GREEDY_COMPLETION, "prompt": ["abc", "de"], "n": 2, "stop": ["\x00"]}
    whole = client.completions.create(**body)
    *data, last = events(http.post("/v1/completions", json={**body, **WITH_USAGE}))
    *chunks, usage = [json.loads(item) for item in data]
    assert last == "[DONE]"
    assert {(chunk["object"], chunk["id"]) for chunk in chunks} == {("text_completion", usage["id"])}
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    for choice in whole.choices:
        pieces = [piece for chunk in chunks for piece in chunk["choices"] if piece["index"] == choice.index]
        assert "".join(piece["text"] for piece in pieces) == choice.text
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + [choice.finish_reason]
    assert (usage["choices"], usage["usage"]["prompt_tokens"]) == ([], 5)
    assert whole.usage is not None
    assert usage["usage"]["completion_tokens"] == whole.usage.completion_tokens


def test_the_usage_of_a_stream_says_what_was_cached(client: openai.OpenAI) -> None:
    cached = []
    for _ in range(2):
        stream = client.chat.completions.create(**GREEDY_CHAT, **WITH_USAGE, extra_body={"cache_salt": "streams"})
        [usage] = [chunk.usage for chunk in stream if chunk.usage is not None]
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, len(RENDERED) - 1]


def test_logprobs_of_a_streamed_completion_are_those_of_the_whole(client: openai.OpenAI) -> None:
    body = {**GREEDY_COMPLETION, "echo": True, "logprobs": 2}
    whole = client.completions.create(**body).choices[0].logprobs
    pieces = [chunk.choices[0].logprobs for chunk in client.completions.create(**body, stream=True)]
    assert whole is not None
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [entry for piece in pieces if piece is not None for entry in getattr(piece, name)]
        if name == "token_logprobs":
            assert streamed[1:] == pytest.approx(whole.token_logprobs[1:], abs=1e-4)  # the first has none
        elif name == "top_logprobs":
            assert [set(entry or ()) for entry in streamed] == [set(entry or ()) for entry in whole.top_logprobs or []]
        else:
            assert streamed == getattr(whole, name)


def test_batches_of_ids_are_scored_as_evaluation_harnesses_ask(client: openai.OpenAI, http: httpx2.Client) -> None:
    """As lm-eval does: context and continuation as ids, one more token generated and thrown away."""
    contexts, continuations = [[68, 69, 70, 71], [80, 81], [68, 69, 70]], [[72, 73], [82, 83, 84], [90]]
    prompts = [context + more for context, more in zip(contexts, continuations, strict=True)]
    body: Any = {"model": MODEL, "prompt": prompts, "temperature": 0, "logprobs": 1, "seed": 1234, "echo": True}
    for max_tokens in (1, 0):
        choices = client.completions.create(**body, max_tokens=max_tokens).choices
        assert [choice.index for choice in choices] == [0, 1, 2]
        for choice, context, ids in zip(choices, contexts, prompts, strict=True):
            asked = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}}
            expected = http.post("/generate", json={"input_ids": ids, **asked}).json()["meta_info"]
            assert choice.logprobs is not None
            values, tops = choice.logprobs.token_logprobs or [], choice.logprobs.top_logprobs or []
            assert len(values) == len(tops) == len(ids) + max_tokens
            known = [value for value, _, _ in expected["input_token_logprobs"]]
            of_continuation = slice(len(context), len(ids))
            assert values[of_continuation] == pytest.approx(known[of_continuation], abs=1e-4)
            for value, top in zip(values[of_continuation], tops[of_continuation], strict=True):
                assert value is not None
                assert max(top.values()) >= value, "the likeliest token is among them"


def test_a_stop_is_the_finish_reason_and_never_part_of_the_text(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**GREEDY_CHAT).choices[0].message.content or ""
    stop = whole[4:6]
    body = {**GREEDY_CHAT, "stop": stop}
    answer = client.chat.completions.create(**body).choices[0]
    chunks = list(client.chat.completions.create(**body, stream=True))
    assert (answer.message.content, answer.finish_reason) == (whole[: whole.index(stop)], "stop")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_refusals_are_the_clients_exceptions(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**{**GREEDY_CHAT, "temperature": -1})
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**{**GREEDY_CHAT, "model": "gpt"})
    assert missing.value.code == "model_not_found"
    with openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        with pytest.raises(openai.AuthenticationError):
            stranger.completions.create(**GREEDY_COMPLETION, stream=True)


def test_a_full_queue_is_an_error_that_the_client_tries_again(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=f"at most {MAX_QUEUED}, as so many requests may wait"):
        client.completions.create(**GREEDY_COMPLETION, n=MAX_QUEUED + 1)  # which no trying again would help
    patient = client.with_options(max_retries=20)
    body = {**LONG, "max_tokens": 60}
    with ThreadPoolExecutor(MAX_QUEUED + 4) as pool:
        answers = list(pool.map(lambda _: patient.completions.create(**body), range(MAX_QUEUED + 4)))
    assert [answer.usage.completion_tokens for answer in answers if answer.usage] == [60] * (MAX_QUEUED + 4)


def test_what_the_client_gives_up_is_aborted(client: openai.OpenAI, http: httpx2.Client, url: str) -> None:
    before = metrics(http)
    with client.completions.create(**LONG, stream=True) as stream:
        next(iter(stream))

    async def cancel(other: openai.AsyncOpenAI) -> None:
        task = asyncio.create_task(other.completions.create(**LONG))
        while not (await asyncio.to_thread(http.get, "/get_metric_info")).json()["num_running_requests"]:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    wait_until_idle(http)
    run(url, cancel)
    assert_aborted(http, before, 2)


def test_what_the_client_waits_for_no_longer_is_aborted(client: openai.OpenAI, http: httpx2.Client) -> None:
    before = metrics(http)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(**LONG, n=MAX_QUEUED)
    wait_until_idle(http)
    assert metrics(http)["sglang:num_aborted_requests_total"] > before["sglang:num_aborted_requests_total"]
