"""What clients are told when the device fails under an engine, and that the server goes on."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2

from tests.server.conftest import ServerProcess, metrics
from tests.server.test_native import events, generate

BODY: dict[str, Any] = {"text": "a few words", "sampling_params": {"max_new_tokens": 200, "n": 20, "ignore_eos": True}}


def wait_for_health(http: httpx2.Client, status: int) -> str:
    """What /health_generate says once it answers with this status; it does not wait for a probe for long."""
    give_up = time.monotonic() + 60
    while (answer := http.get("/health_generate")).status_code != status:
        assert time.monotonic() < give_up
    return answer.json()["status"]


def test_a_failed_step_is_told_to_those_in_it_and_the_next_request_is_served(
    crowded: ServerProcess, crowded_http: httpx2.Client
) -> None:
    http = crowded_http
    expected = generate(http, text="the next")
    before = metrics(http)
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(http.post, "/generate", json=BODY)
        stream = pool.submit(http.post, "/generate", json={**BODY, "stream": True})
        while not http.get("/get_metric_info").json()["num_waiting_requests"] > 20:
            assert not whole.done()
        crowded.fault.touch()
        try:
            assert whole.result().status_code == 500
            assert whole.result().json()["error"]["code"] == "step_failed"
            assert "the device is gone" in whole.result().json()["error"]["message"]
            last = events(stream.result())[-1]
            assert '"code":"step_failed"' in last
            assert "the device is gone" in wait_for_health(http, 503)
        finally:
            crowded.fault.unlink()
    assert wait_for_health(http, 200) == "ok"
    again = generate(http, text="the next")
    assert again["output_ids"] == expected["output_ids"]
    assert again["meta_info"]["cached_tokens"] == 0, "the KV of the lost pool is still in the cache"
    after = metrics(http)
    assert all(after[name] >= value for name, value in before.items() if name.endswith("_total"))
