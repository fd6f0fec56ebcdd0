"""SGLang's routes: what /generate returns, streams and refuses, and what operators are told."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.server.conftest import CONTEXT_LENGTH, metrics, wait_until_idle
from tests.tiny_engine import Golden

GREEDY = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}


def events(response: httpx2.Response) -> list[str]:
    """The data of server-sent events, of which every one must be a line and an empty line."""
    assert response.headers["content-type"].startswith("text/event-stream")
    text = response.text
    assert text.endswith("\n\n")
    blocks = text[:-2].split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks), text
    return [block.removeprefix("data: ") for block in blocks]


def generate(http: httpx2.Client, **body: Any) -> Any:
    response = http.post("/generate", json={"sampling_params": GREEDY, **body})
    assert response.status_code == 200, response.text
    return response.json()


def refusal(http: httpx2.Client, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_a_batch_of_ids_gives_the_tokens_that_transformers_gives(
    http: httpx2.Client, tiny_path: Callable[[str], Path]
) -> None:
    golden = Golden(tiny_path("llama"))
    results = generate(http, input_ids=golden.prompts)
    assert [result["output_ids"] for result in results] == golden.greedy_ids
    for result, prompt in zip(results, golden.prompts, strict=True):
        meta = result["meta_info"]
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(prompt), 16)
        assert meta["finish_reason"] == {"type": "length", "length": 16}


def test_a_stream_ends_where_the_whole_answer_does(http: httpx2.Client) -> None:
    whole = generate(http, text="a stream")
    *data, last = events(http.post("/generate", json={"text": "a stream", "stream": True, "sampling_params": GREEDY}))
    states = [json.loads(item) for item in data]
    assert last == "[DONE]"
    assert states[-1]["text"] == whole["text"]
    assert states[-1]["output_ids"] == whole["output_ids"]
    assert [state["meta_info"]["finish_reason"] is None for state in states] == [True] * (len(states) - 1) + [False]
    for before, after in pairwise(states):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]


def test_stops_in_a_stream_are_never_seen(http: httpx2.Client) -> None:
    whole = generate(http, text="a stop")["text"]
    stop = whole[5:8]
    params = {**GREEDY, "stop": [stop]}
    data = events(http.post("/generate", json={"text": "a stop", "stream": True, "sampling_params": params}))
    texts = [json.loads(item)["text"] for item in data[:-1]]
    assert all(stop not in text for text in texts)
    assert texts[-1] == whole[: whole.index(stop)]
    assert json.loads(data[-2])["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_samples_and_batches_stream_with_their_index(http: httpx2.Client) -> None:
    params = [{**GREEDY, "n": 2, "max_new_tokens": 3}, {**GREEDY, "max_new_tokens": 2}]
    whole = generate(http, text=["one", "two"], sampling_params=params, rid=["a", "b"])
    assert [result["meta_info"]["id"] for result in whole] == ["a-0", "a-1", "b"]
    body = {"text": ["one", "two"], "sampling_params": params, "stream": True}
    last = {(state := json.loads(item))["index"]: state for item in events(http.post("/generate", json=body))[:-1]}
    assert [last[index]["text"] for index in range(3)] == [result["text"] for result in whole]


def test_logprobs_stream_to_the_same_lists_and_with_texts(http: httpx2.Client) -> None:
    wishes = {
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "token_ids_logprob": [7],
        "return_text_in_logprobs": True,
    }
    whole = generate(http, text="abc", **wishes)["meta_info"]
    body = {"text": "abc", "stream": True, "sampling_params": GREEDY, **wishes}
    streamed = json.loads(events(http.post("/generate", json=body))[-2])["meta_info"]
    for name in ("input", "output"):
        for kind, count in (("token", None), ("top", 2), ("token_ids", 1)):
            entries, same = whole[f"{name}_{kind}_logprobs"], streamed[f"{name}_{kind}_logprobs"]
            assert len(entries) == (3 if name == "input" else 16)
            ids = [[one[1] for one in row or ()] if count else row[1] for row in entries]
            assert ids == [[one[1] for one in row or ()] if count else row[1] for row in same]
            assert count is None or all(row is None or len(row) == count for row in entries)
    assert [text for _, _, text in whole["input_token_logprobs"]] == ["a", "b", "c"]
    assert whole["input_token_logprobs"][0][0] is None


def test_hidden_states_come_with_the_end_of_a_stream_as_with_the_whole(http: httpx2.Client) -> None:
    params = {**GREEDY, "max_new_tokens": 3}
    body = {"text": "hidden", "sampling_params": params, "return_hidden_states": True, "cache_salt": "hidden"}
    whole = generate(http, **body)["meta_info"]
    *others, last = events(http.post("/generate", json={**body, "stream": True, "cache_salt": "hidden too"}))[:-1]
    assert all("hidden_states" not in json.loads(event)["meta_info"] for event in others)
    streamed = json.loads(last)["meta_info"]
    assert whole["hidden_state_positions"] == streamed["hidden_state_positions"] == list(range(len("hidden") + 2))
    assert {len(row) for row in whole["hidden_states"]} == {len(whole["hidden_states"][0])}
    for row, same in zip(whole["hidden_states"], streamed["hidden_states"], strict=True):
        assert row == pytest.approx(same, abs=1e-4)
    assert "hidden_states" not in generate(http, **{**body, "return_hidden_states": False})["meta_info"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/generate",
            {
                "text": "x",
                "model": None,
                "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
                "extra_key": "e",
                **dict.fromkeys(("background", "no_logs", "return_bytes", "return_entropy"), False),
                **dict.fromkeys(("return_hidden_states", "return_text_in_logprobs", "stream"), False),
                "log_metrics": True,
            },
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "hi"}],
                "max_completion_tokens": 1,
                **dict.fromkeys(("continue_final_message", "ignore_eos", "no_stop_trim", "logprobs", "stream"), False),
                **dict.fromkeys(("separate_reasoning", "stream_reasoning", "skip_special_tokens"), True),
                "return_hidden_states": False,
            },
        ),
        (
            "/v1/completions",
            {
                "prompt": "hi",
                "max_tokens": 1,
                **dict.fromkeys(("stream", "echo", "no_stop_trim", "ignore_eos", "return_hidden_states"), False),
                "skip_special_tokens": True,
            },
        ),
    ],
)
def test_what_sglangs_router_adds_to_bodies_is_taken(http: httpx2.Client, path: str, body: dict[str, Any]) -> None:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text


def test_each_salt_has_a_cache_of_its_own(http: httpx2.Client) -> None:
    prompt = "the same system prompt for everybody"
    for name, salts in (("cache_salt", ("x", "y", 1)), ("extra_key", ("z", 2))):
        for salt in salts:
            first = generate(http, text=prompt, **{name: salt})
            again = generate(http, text=prompt, **{name: salt})
            assert first["meta_info"]["cached_tokens"] == 0
            assert again["meta_info"]["cached_tokens"] == len(prompt) - 1
            assert again["output_ids"] == first["output_ids"]
    assert "cache_salt" in refusal(http, "/generate", text="a", cache_salt="x", extra_key="y")["message"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"text": [1]}, "text"),
        ({"text": "\ud800"}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[]]}, None),
        *[({"input_ids": [given]}, "input_ids") for given in (320, -1, 2**31, 2**63, 2**64, 1.5, "a", True, None)],
        *[
            ({"text": "a", "sampling_params": {"stop_token_ids": [given]}}, "stop_token_ids")
            for given in (320, -1, 1.5)
        ],
        *[({"text": "a", "sampling_params": {"logit_bias": {given: 1}}}, "logit_bias") for given in ("320", "-1", "x")],
        *[({"text": "a", "sampling_params": {"temperature": given}}, "temperature") for given in (-1, "1", True)],
        *[({"text": "a", "sampling_params": {"top_p": given}}, "top_p") for given in (0, 1.5)],
        ({"text": "a", "sampling_params": {"top_k": -2}}, "top_k"),
        ({"text": "a", "sampling_params": {"n": 0}}, "n"),
        ({"text": "a", "sampling_params": {"custom_logit_processor": "f"}}, "custom_logit_processor"),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 10**6}, "top_logprobs_num"),
        ({"text": "a", "priority": "high"}, "priority"),
        ({"text": "a", "return_hidden_states": 1}, "return_hidden_states"),
        ({"text": "a", "cache_salt": True}, "cache_salt"),
        ({"text": "a", "sampling_params": {"stop": {}}}, "stop"),
        ({"text": "a", "return_entropy": True}, "return_entropy"),
        ({"text": "a", "image_data": "x"}, "image_data"),
    ],
    ids=str,
)
def test_what_is_wrong_is_refused_by_its_name(http: httpx2.Client, body: dict[str, Any], field: str | None) -> None:
    content = json.dumps(body).encode()
    response = http.post("/generate", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert field is None or field in error["message"]
    assert error["param"] is None or field is None or error["param"].partition(".")[0] == field


@pytest.mark.parametrize("given", ["NaN", "Infinity", "-Infinity", "1e400"])
def test_numbers_that_are_none_are_refused(http: httpx2.Client, given: str) -> None:
    content = f'{{"text": "a", "sampling_params": {{"temperature": {given}}}}}'.encode()
    response = http.post("/generate", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "temperature"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"1", b'"a"', b"[" * 100_000, b"\xff"])
def test_a_body_that_is_no_object_is_refused(http: httpx2.Client, content: bytes) -> None:
    for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
        response = http.post(path, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 400
        assert response.json()["error"]["message"]


@pytest.mark.parametrize("params", [{"temperature": 1e-6}, {"top_k": 0}, {"top_k": -1}, {"top_k": 10**6}], ids=str)
def test_the_ends_of_ranges_are_served(http: httpx2.Client, params: dict[str, Any]) -> None:
    assert len(generate(http, text="a", sampling_params={**GREEDY, **params})["output_ids"]) == 16


def test_prompt_and_output_may_fill_the_context_and_no_more(http: httpx2.Client) -> None:
    for prompt_len in (CONTEXT_LENGTH - 5, CONTEXT_LENGTH - 1):
        room = CONTEXT_LENGTH - prompt_len
        ids = [index % 250 for index in range(prompt_len)]
        assert (
            len(generate(http, input_ids=ids, sampling_params={**GREEDY, "max_new_tokens": room})["output_ids"]) == room
        )
        error = refusal(http, "/generate", input_ids=ids, sampling_params={**GREEDY, "max_new_tokens": room + 1})
        assert error["param"] == "max_new_tokens"
    assert "context_length" in refusal(http, "/generate", input_ids=[1] * CONTEXT_LENGTH)["message"]


def test_no_new_tokens_are_none(http: httpx2.Client) -> None:
    result = generate(http, text="abc", sampling_params={"max_new_tokens": 0})
    assert (result["output_ids"], result["text"]) == ([], "")
    assert result["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def test_the_cache_is_flushed_at_rest(http: httpx2.Client) -> None:
    generate(http, text="something to forget")
    response = http.post("/flush_cache")
    assert response.status_code == 200
    assert response.json()["num_flushed_pages"] > 0
    assert wait_until_idle(http)["evictable_size"] == 0


def test_a_field_of_two_types_is_named_with_both(http: httpx2.Client) -> None:
    error = refusal(http, "/generate", text="a", cache_salt=[])
    assert error["param"] == "cache_salt"
    assert error["message"] == "cache_salt: Input should be a valid string; or Input should be a valid integer, got []"
    assert refusal(http, "/generate", text=["a", 1])["param"] == "text.1"


def test_the_cache_is_shown_and_explained(http: httpx2.Client) -> None:
    prompt = "explain <b>this</b> prompt"
    generate(http, text=prompt)
    page = http.get("/cache")
    assert page.headers["content-type"].startswith("text/html")
    assert "&lt;b&gt;this" in page.text

    def explained(**body: Any) -> dict[str, Any]:
        return http.post("/cache/explain", json=body).json()

    assert explained(text=prompt)["reason"] == "complete"
    other = explained(text="explain nothing at all")
    assert (other["reason"], other["diverged_at"], other["cached_tokens"]) == ("diverged", 8, 8)
    assert (other["shared_end"], other["cached_next"], other["asked_next"]) == ("explain ", "<b>this<", "nothing ")
    for content in ("never said", [{"type": "text", "text": "never said"}], None):  # as chat completions take it
        asked = [{"role": "user", "content": content}]
        assert explained(messages=asked, cache_salt="of nobody else")["cached_tokens"] == 0
    assert "role" in refusal(http, "/cache/explain", messages=[{}])["message"]
    assert explained(input_ids=[319, 5])["cached_tokens"] == 0, "ids that no text has"
    assert "[0, 320)" in refusal(http, "/cache/explain", input_ids=[5, 320])["message"]
    assert "messages" in refusal(http, "/cache/explain", text="a", messages=[])["message"]


def test_counters_grow_by_what_requests_report(http: httpx2.Client) -> None:
    before = metrics(http)
    results = [generate(http, text=text) for text in ("count these tokens", "count these tokens", "count others")]
    after = metrics(http)
    for name, field in (
        ("sglang:prompt_tokens_total", "prompt_tokens"),
        ("sglang:cached_tokens_total", "cached_tokens"),
        ("sglang:generation_tokens_total", "completion_tokens"),
    ):
        assert after[name] - before[name] == sum(result["meta_info"][field] for result in results)
    assert after["sglang:num_requests_total"] - before["sglang:num_requests_total"] == 3
    assert after["sglang:e2e_request_latency_seconds_count"] == after["sglang:num_requests_total"]
    info = http.get("/get_metric_info").json()
    assert after["sglang:cache_hit_rate"] == pytest.approx(info["cache_hit_rate"])
    assert after["jradix:evictable_tokens"] == info["evictable_size"] > 0


def test_the_server_says_what_it_is_but_not_its_key(http: httpx2.Client) -> None:
    assert http.get("/get_model_info").json()["max_context_length"] == CONTEXT_LENGTH
    info = http.get("/get_server_info").json()
    assert (info["page_size"], info["served_model_name"], info["api_key"]) == (4, "tiny", None)


def test_unknown_paths_and_methods_are_answered_in_the_same_format(http: httpx2.Client) -> None:
    refusal(http, "/nothing", 404)
    assert http.get("/generate").status_code == 405
