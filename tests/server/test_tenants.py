"""Two tenants of one server: what one has asked, the other cannot see, count or ask for."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from tests.server.conftest import API_KEY, ServerProcess

PARAMS = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}


def generate(http: httpx2.Client, text: str, salt: str | int | None = None, **more: Any) -> dict[str, Any]:
    body = {"text": text, "cache_salt": salt, "sampling_params": PARAMS, **more}
    response = http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()["meta_info"]


def explained(http: httpx2.Client, text: str, salt: str | None) -> dict[str, Any]:
    return http.post("/cache/explain", json={"text": text, "cache_salt": salt}).json()


def test_equal_prompts_are_computed_for_each_tenant(http: httpx2.Client) -> None:
    prompt = "the bank's secret prompt"
    for salt in ("a1", "b1", None):
        assert [generate(http, prompt, salt)["cached_tokens"] for _ in range(2)] == [0, len(prompt) - 1]


def test_equal_prompts_at_the_same_time_are_computed_for_each_tenant(http: httpx2.Client) -> None:
    prompt = "a prompt that both ask at once"
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(generate, http, prompt, salt) for salt in ("a2", "b2", "c2", "d2")]
    assert [one.result()["cached_tokens"] for one in asked] == [0] * 4


def test_the_page_shows_the_tree_of_one_tenant(http: httpx2.Client) -> None:
    http.post("/flush_cache")
    asked = {"tenant A": "what A asks", "tenant B": "what B asks", "": "what all ask"}
    for salt, text in asked.items():
        generate(http, text, salt or None)
    for shown in (*asked, "nobody"):
        page = http.get("/cache", params={"cache_salt": shown}).text
        for salt, text in asked.items():
            assert (text in page) == (salt == shown)
            assert not salt or (salt in page) == (salt == shown)
    assert http.get("/cache").text == http.get("/cache?cache_salt=").text
    assert "Nothing is cached here" in http.get("/cache?cache_salt=nobody").text


def test_an_explanation_is_that_of_a_prompt_that_nobody_has_asked(http: httpx2.Client) -> None:
    generate(http, "known to A alone", "a4")
    generate(http, "something of B's", "b4")
    for salt in ("b4", "c4"):
        known, unknown = explained(http, "known to A alone", salt), explained(http, "kitten of nobody", salt)
        assert (known.pop("asked_next"), unknown.pop("asked_next")) == ("known to", "kitten o")
        assert known == unknown
        assert known["cached_tokens"] == 0


def test_salts_are_texts_and_not_empty(http: httpx2.Client) -> None:
    prompt = "a salt may be a number"
    generate(http, prompt, 5)
    assert generate(http, prompt, "5")["cached_tokens"] == len(prompt) - 1
    assert prompt in http.get("/cache?cache_salt=5").text
    for path, body in (
        ("/generate", {"text": "a"}),
        ("/v1/completions", {"prompt": "a"}),
        ("/cache/explain", {"text": "a"}),
    ):
        refused = http.post(path, json={**body, "cache_salt": ""})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "cache_salt"


@pytest.mark.parametrize("salt", [None, "\"><script>alert('salt')</script>"])
def test_no_text_of_a_tenant_becomes_markup(http: httpx2.Client, salt: str | None) -> None:
    generate(http, "</pre><script>alert('prompt')</script>", salt)
    response = http.get("/cache", params={"cache_salt": salt or ""})
    assert "alert(&#x27;prompt&#x27;)" in response.text
    assert "<script>alert" not in response.text
    assert response.text.count("<script>") == 1
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy
    assert response.headers["cache-control"] == "no-store"


def test_the_page_asks_nothing_of_other_sites(http: httpx2.Client) -> None:
    page = http.get("/cache").text
    assert "//" not in page.partition("<section")[0].replace("<!doctype html>", "")
    assert "src=" not in page
    assert "http" not in page.lower().replace("http-equiv", "")


def test_neither_salts_nor_keys_are_logged(http: httpx2.Client, server: ServerProcess) -> None:
    generate(http, "not for the log", "a salt of nobody")
    http.get("/cache?cache_salt=a+salt+of+nobody")
    assert "of nobody" not in server.log
    assert "of+nobody" not in server.log
    assert API_KEY not in server.log
