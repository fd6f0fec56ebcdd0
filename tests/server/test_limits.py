"""What a server must bear: strangers, large bodies, full queues, clients that go, ids used twice, probes under load."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from tests.server.conftest import (
    API_KEY,
    CONTEXT_LENGTH,
    MAX_QUEUED,
    MAX_RUNNING,
    ServerProcess,
    metrics,
    rss_mib,
    wait_until_idle,
    wait_until_running,
)

LONG = {"max_new_tokens": 450, "ignore_eos": True, "temperature": 0}


def long_body(**more: Any) -> dict[str, Any]:
    return {"text": "a long one", "sampling_params": LONG, **more}


@pytest.mark.parametrize(
    "key", [None, "", "Bearer", "Bearer wrong", f"Basic {API_KEY}", f"Bearer {API_KEY}x", "Bearer é"]
)
def test_without_the_key_only_health_answers(url: str, key: str | None) -> None:
    headers = {} if key is None else {b"Authorization": key.encode()}
    with httpx2.Client(base_url=url, headers=headers) as stranger:
        assert stranger.get("/health").status_code == 200
        for path in ("/health_generate", "/v1/models", "/metrics", "/cache", "/get_server_info", "/docs", "/nothing"):
            refused = stranger.get(path)
            assert refused.status_code == 401, path
            assert refused.json()["error"]["type"] == "authentication_error"
        assert stranger.post("/generate", json={"text": "a"}).status_code == 401


def test_a_body_that_is_too_large_is_refused_with_and_without_its_length(http: httpx2.Client) -> None:
    big = b'{"text": "' + b"a" * 2**20 + b'"}'
    for content in (big, iter([big])):
        response = http.post("/generate", content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 413
        assert "max_body_mb" in response.json()["error"]["message"]


def test_every_request_of_a_crowd_is_answered(http: httpx2.Client) -> None:
    with ThreadPoolExecutor(20) as pool:
        body = long_body(sampling_params={**LONG, "max_new_tokens": 150})
        answers = list(pool.map(lambda _: http.post("/generate", json=body), range(20)))
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= MAX_QUEUED
    for answer in answers:
        if answer.status_code == 503:
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["code"] == "queue_full"
        else:
            assert len(answer.json()["output_ids"]) == 150


def test_a_batch_that_could_never_wait_is_refused_as_a_mistake(http: httpx2.Client) -> None:
    refused = http.post("/generate", json={"text": ["a"] * (MAX_QUEUED + 1), "sampling_params": {"max_new_tokens": 1}})
    assert refused.status_code == 400
    assert f"at most {MAX_QUEUED}, as so many requests may wait (max_queued_requests)" in refused.text


def test_a_stream_that_is_closed_ends_its_request(http: httpx2.Client) -> None:
    before = metrics(http)
    with http.stream("POST", "/generate", json=long_body(stream=True)) as response:
        next(response.iter_lines())
    assert_aborted(http, before, 1)


def assert_aborted(http: httpx2.Client, before: dict[str, float], count: int) -> None:
    """Of requests for `LONG` outputs so many were aborted since then, and none was generated to its end."""
    wait_until_idle(http)
    after = metrics(http)
    assert after["sglang:num_aborted_requests_total"] - before["sglang:num_aborted_requests_total"] == count
    num_tokens = after["sglang:generation_tokens_total"] - before["sglang:generation_tokens_total"]
    assert num_tokens < LONG["max_new_tokens"]


def test_a_client_that_does_not_wait_for_its_answer_ends_its_request(http: httpx2.Client) -> None:
    before = metrics(http)
    connections = [socket.create_connection((http.base_url.host, http.base_url.port)) for _ in range(MAX_RUNNING + 1)]
    for connection in connections:  # one of them has to wait for the others
        connection.sendall(request_bytes(long_body()))
    wait_until_running(http, MAX_RUNNING, 1)
    for connection in connections:
        connection.close()
    assert_aborted(http, before, MAX_RUNNING + 1)


def request_bytes(body: dict[str, Any]) -> bytes:
    """A request to /generate as it goes over the wire."""
    content = json.dumps(body)
    head = (
        f"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {API_KEY}\r\nContent-Type: application/json\r\n"
    )
    return f"{head}Content-Length: {len(content)}\r\n\r\n{content}".encode()


def test_an_id_may_be_used_again_but_not_twice_at_once(http: httpx2.Client) -> None:
    with http.stream("POST", "/generate", json=long_body(stream=True, rid="mine")) as response:
        lines = response.iter_lines()  # kept: the stream is closed with it
        next(lines)
        twice = http.post("/generate", json=long_body(rid="mine"))
        assert twice.status_code == 400
        assert "rid 'mine'" in twice.json()["error"]["message"]
        assert http.post("/generate", json={"text": ["a", "b"], "rid": ["x", "x"]}).status_code == 400
    wait_until_idle(http)
    for _ in range(2):
        again = http.post("/generate", json={"text": "a", "rid": "mine", "sampling_params": {"max_new_tokens": 2}})
        assert again.json()["meta_info"]["id"] == "mine"


def test_a_request_is_aborted_by_its_id(http: httpx2.Client) -> None:
    with http.stream(
        "POST", "/v1/completions", json={"prompt": "a", "max_tokens": 450, "stream": True, "rid": "r"}
    ) as r:
        lines = r.iter_lines()
        next(lines)
        assert http.post("/abort_request", json={"rid": "r"}).json() == {"num_aborted": 1}
        rest = [line for line in lines if line]
    assert '"finish_reason":"abort"' in rest[-2]
    assert rest[-1] == "data: [DONE]"
    assert http.post("/abort_request", json={"rid": "r"}).json() == {"num_aborted": 0}
    assert http.post("/abort_request", json={"abort_all": True}).json() == {"num_aborted": 0}
    assert http.post("/abort_request", json={}).status_code == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": ["a", "b"], "sampling_params": {**LONG, "n": 2}}),
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 450, "ignore_eos": True, "n": 2}),
    ],
    ids=["native", "openai"],
)
def test_the_id_of_a_list_of_prompts_aborts_all_their_samples(
    http: httpx2.Client, path: str, body: dict[str, Any]
) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(http.post, path, json={**body, "rid": "list"})
        wait_until_running(http, 1, 3)
        assert http.post("/abort_request", json={"rid": "lis"}).json() == {"num_aborted": 0}
        assert http.post("/abort_request", json={"rid": "list-1"}).json() == {"num_aborted": 2}
        assert http.post("/abort_request", json={"rid": "list"}).json() == {"num_aborted": 2}
        answer = asked.result().json()
    reasons = [
        one["meta_info"]["finish_reason"]["type"] if path == "/generate" else one["finish_reason"]
        for one in (answer if path == "/generate" else answer["choices"])
    ]
    assert reasons == ["abort"] * 4


def test_a_timeout_ends_a_request_with_what_it_has(http: httpx2.Client) -> None:
    result = http.post("/generate", json=long_body(timeout=0.1)).json()
    assert result["meta_info"]["finish_reason"]["type"] == "abort"
    assert "timed out" in result["meta_info"]["finish_reason"]["message"]


def test_a_flush_is_refused_while_requests_run_and_leaves_the_cache_as_it_was(http: httpx2.Client) -> None:
    with http.stream("POST", "/generate", json=long_body(stream=True)) as response:
        lines = response.iter_lines()  # kept: the stream is closed with it
        next(lines)
        refused = http.post("/flush_cache")
        assert refused.status_code == 409
        assert refused.json()["error"]["code"] == "requests_running"
    wait_until_idle(http)
    again = http.post("/generate", json={"text": "a long one", "sampling_params": {"max_new_tokens": 1}}).json()
    assert again["meta_info"]["cached_tokens"] == len("a long one") - 1
    assert http.post("/flush_cache").status_code == 200
    assert wait_until_idle(http)["available_size"] == wait_until_idle(http)["max_total_num_tokens"]


def test_probes_are_answered_while_long_prompts_are_computed_and_add_none(http: httpx2.Client) -> None:
    prompts = [[index, *range(CONTEXT_LENGTH // 2)] for index in range(MAX_QUEUED)]
    body = {"input_ids": prompts, "sampling_params": {"max_new_tokens": 1}}
    num_answered = 0
    with ThreadPoolExecutor(1) as pool:
        before = http.get("/get_server_info").json()["cache"]["num_requests"]
        computing = pool.submit(http.post, "/generate", json=body)
        while not computing.done():
            num_running = http.get("/get_metric_info").json()["num_running_requests"]
            assert http.get("/health_generate").status_code == 200
            num_answered += num_running and not computing.done()
        assert computing.result().status_code == 200
    assert num_answered > 2, "no prompt was long enough"
    assert wait_until_idle(http)["num_waiting_requests"] == 0
    assert http.get("/get_server_info").json()["cache"]["num_requests"] == before + MAX_QUEUED


def test_probes_at_rest_leave_nothing_and_are_not_counted(http: httpx2.Client) -> None:
    def seen() -> tuple[Any, ...]:
        wait_until_idle(http)
        totals = {name: value for name, value in metrics(http).items() if name.endswith(("_total", "_count"))}
        return totals, http.get("/get_server_info").json()["cache"], http.get("/cache").text.partition("<body>")[2]

    before = seen()
    with ThreadPoolExecutor(10) as pool:
        assert list(pool.map(lambda _: http.get("/health_generate").status_code, range(10))) == [200] * 10
    assert seen() == before


def test_a_reader_that_stalls_holds_up_nobody_and_takes_little_memory(
    http: httpx2.Client, server: ServerProcess
) -> None:
    """The engine computes all of its stream, and others are served meanwhile.

    Each event holds all log-probabilities so far. The last alone has 4 MB, more than the kernel keeps for a reader; all
    of them are several hundred.
    """
    wait_until_idle(http)  # with a connection of our own, which stays
    num_files = len(server.open_files())
    wishes = {
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 128,
        "token_ids_logprob": [*range(128)],
    }
    body = long_body(text="x" * 60, stream=True, rid="stalled", **wishes)
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect((http.base_url.host, http.base_url.port))
        reader.sendall(request_bytes(body))
        wait_until_running(http, 1)
        before = rss_mib(server.process.pid)
        assert len(http.post("/generate", json=long_body()).json()["output_ids"]) == LONG["max_new_tokens"]
        wait_until_idle(http)
        assert rss_mib(server.process.pid) - before < 64
        assert "rid='stalled'" not in server.log, "the stream has ended, and was to be too large for that"
    give_up = time.monotonic() + 60
    while "rid='stalled'" not in server.log or len(server.open_files()) > num_files:
        assert time.monotonic() < give_up, "the connection that was closed is not given back"
        time.sleep(0.01)


def test_neighbours_of_a_refused_request_are_not_disturbed(http: httpx2.Client) -> None:
    body = long_body(text="neighbour")
    alone = http.post("/generate", json=body).json()["output_ids"]
    with ThreadPoolExecutor(MAX_RUNNING) as pool:
        beside = pool.submit(http.post, "/generate", json=body)
        for wrong in ({"input_ids": [320]}, {"text": "a", "sampling_params": {"temperature": -1}}, {"text": ""}):
            assert http.post("/generate", json=wrong).status_code == 400
    assert beside.result().json()["output_ids"] == alone


def test_the_log_has_a_line_for_a_request_and_no_prompt(http: httpx2.Client, server: ServerProcess) -> None:
    http.post("/generate", json={"text": "a secret prompt", "rid": "log\nme", "sampling_params": {"max_new_tokens": 3}})
    [line] = [line for line in server.log.splitlines() if "log\\nme" in line]
    assert "POST /generate 200" in line
    assert "prompt_tokens=15" in line
    assert "completion_tokens=3" in line
    assert "secret prompt" not in server.log
    assert API_KEY not in server.log
