"""The schema that the server gives of itself: its routes answer what it says, whatever they are sent."""

from typing import Any

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from jradix import SamplingParams
from tests.server.conftest import API_KEY

CONFORMANCE = [status_code_conformance, content_type_conformance, response_schema_conformance]
HEADERS = {"Authorization": f"Bearer {API_KEY}"}
FUZZ = settings(
    max_examples=12,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
OPERATIONS = [
    ("POST", "/generate"),
    ("PUT", "/generate"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/abort_request"),
    ("POST", "/cache/explain"),
]


@pytest.fixture(scope="module")
def schema(url: str) -> dict[str, Any]:
    return httpx2.get(f"{url}/openapi.json", headers=HEADERS, timeout=60).json()


def answer_of(case: Any, url: str) -> Any:
    """The response, which conforms to the schema, and is an error of the server only if its queue is full."""
    response = case.call(base_url=url, headers=HEADERS, timeout=60)
    assert response.status_code < 500 or response.json()["error"]["code"] == "queue_full", response.text
    case.validate_response(response, checks=CONFORMANCE)
    return response


@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=str)
def test_whatever_is_sent_is_answered_as_the_schema_says(
    schema: dict[str, Any], url: str, http: httpx2.Client, method: str, path: str
) -> None:
    operation = schemathesis.openapi.from_dict(schema)[path][method]

    @FUZZ
    @given(case=operation.as_strategy() | operation.as_strategy(schemathesis.GenerationMode.NEGATIVE))
    def check(case: Any) -> None:
        answer_of(case, url)

    check()


def bounded(node: Any) -> Any:
    """A schema with small numbers and short texts alone: of those most are taken, and soon computed."""
    if isinstance(node, list):
        return [bounded(item) for item in node]
    if not isinstance(node, dict):
        return node
    narrow = {
        "integer": {"enum": [1, 2, 3]},  # 3.0 would be one too, and is refused
        "number": {"minimum": 0.5, "maximum": 1},
        "string": {"pattern": "^[a-z]{1,4}$"},
        "array": {"minItems": 1, "maxItems": 2},
    }
    kind = node.get("type")
    found = {name: bounded(value) for name, value in node.items()}
    return found | (narrow.get(kind, {}) if isinstance(kind, str) else {})


IDS = {"type": "array", "items": {"enum": list(range(1, 300))}, "minItems": 1, "maxItems": 9}
MESSAGE = {
    "type": "object",
    "properties": {"role": {"const": "user"}, "content": {"type": "string"}},
    "required": ["role", "content"],
}
PICKY = {"model", "rid", "extra_key", "text", "suffix", "best_of", "tools", "tool_choice", "top_logprobs", "max_tokens"}
PICKY |= {"regex", "ebnf", "json_schema", "response_format", "stop_regex", "logit_bias", "stop_token_ids", "seed"}
PICKY |= {"timeout", "chat_template_kwargs"}


def narrowed(body: dict[str, Any], must: dict[str, Any]) -> dict[str, Any]:
    """A body's schema, bounded, without fields that take only some values or not all at once; some it must have."""
    fields = {name: value for name, value in bounded(body)["properties"].items() if name not in PICKY}
    for value in fields.values():
        if "anyOf" in value:
            del value["anyOf"][1:]  # one value, not a list with one for each prompt
    return {**body, "properties": fields | must, "required": list(must)}


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_requests_within_the_limits_are_answered_with_results(
    schema: dict[str, Any], url: str, http: httpx2.Client, path: str
) -> None:
    bodies = schema["components"]["schemas"]
    params = bodies["GenerateRequest"]["properties"]["sampling_params"]["anyOf"][0]
    three = {"const": 3}
    narrow = {
        "GenerateRequest": {
            "input_ids": IDS,
            "sampling_params": narrowed(params, {"max_new_tokens": three}),
            "return_logprob": {"const": True},
        },
        "CompletionRequest": {"prompt": {"anyOf": [IDS, {"type": "string", "minLength": 1}]}, "max_tokens": three},
        "ChatRequest": {
            "messages": {"type": "array", "items": MESSAGE, "minItems": 1},
            "max_completion_tokens": three,
            "logprobs": {"const": True},
        },
    }
    narrow = {name: narrowed(bodies[name], must) for name, must in narrow.items()}
    narrow = {**schema, "components": {**schema["components"], "schemas": {**bodies, **narrow}}}
    operation = schemathesis.openapi.from_dict(narrow)[path]["POST"]
    answers: list[tuple[int, str]] = []

    @FUZZ
    @given(case=operation.as_strategy())
    def check(case: Any) -> None:
        response = answer_of(case, url)
        answers.append((response.status_code, response.text[:200]))

    check()
    assert [status for status, _ in answers].count(200) > len(answers) / 2, answers


def test_every_route_says_who_may_come_and_how_it_refuses(schema: dict[str, Any]) -> None:
    assert schema["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}
    assert schema["security"] == [{"key": []}]
    assert schema["paths"]["/health"]["get"]["security"] == []
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            statuses = operation["responses"].keys()
            assert "422" not in statuses
            assert ("400" in statuses) == bool(operation.keys() & {"requestBody", "parameters"}), path
            assert path == "/health" or {"401", "500", "503"} <= statuses


def test_what_streams_says_so(schema: dict[str, Any]) -> None:
    streaming = {
        path
        for path, operations in schema["paths"].items()
        if "text/event-stream"
        in operations.get("post", {"responses": {"200": {}}})["responses"]["200"].get("content", {})
    }
    assert streaming == {"/generate", "/v1/completions", "/v1/chat/completions"}


def test_the_schema_has_every_sampling_parameter_that_travels(schema: dict[str, Any]) -> None:
    described = schema["components"]["schemas"]["GenerateRequest"]["properties"]["sampling_params"]["anyOf"][0]
    known = set(SamplingParams.__dataclass_fields__) - {"custom_logit_processor", "custom_params"}
    assert set(described["properties"]) == known | {"sampling_seed"}


def test_a_method_that_is_not_there_names_those_that_are(http: httpx2.Client) -> None:
    assert http.delete("/v1/completions").headers["allow"] == "POST"


def test_the_page_of_the_routes_loads_nothing(http: httpx2.Client, schema: dict[str, Any]) -> None:
    page = http.get("/docs").text
    assert all(f" {path}<" in page for path in schema["paths"])
    assert "repetition_penalty" in page
    assert not any(word in page for word in ("<script", "http://", "https://", "<link"))
