"""OpenAI's routes, through OpenAI's own client: answers, streams, usage, log-probabilities, tools, refusals."""

import json
from typing import Any

import httpx2
import openai
import pytest

from tests.server.conftest import MODEL
from tests.server.test_native import GREEDY, events, generate, refusal

MESSAGES: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "say something"}]
RENDERED = "s:be brief\nu:say something\na:"
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"wet": {"enum": [True, False]}},
            "required": ["wet"],
            "additionalProperties": False,
        },
    },
}
CALLS = '<tool_call>\n{"name": "weather", "arguments": {"wet": true}}\n</tool_call>'
GREEDY_CHAT: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 16}


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_chat_continues_the_rendered_template(client: openai.OpenAI, http: httpx2.Client) -> None:
    answer = client.chat.completions.create(**GREEDY_CHAT)
    expected = generate(http, text=RENDERED, sampling_params={"temperature": 0, "max_new_tokens": 16})
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected["text"])
    assert choice.finish_reason == expected["meta_info"]["finish_reason"]["type"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(RENDERED)
    assert answer.usage.completion_tokens == expected["meta_info"]["completion_tokens"]
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_usage_says_what_was_cached(client: openai.OpenAI) -> None:
    cached = []
    for _ in range(2):
        answer = client.chat.completions.create(**GREEDY_CHAT, extra_body={"cache_salt": "usage"})
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, len(RENDERED) - 1]


def test_a_streamed_chat_has_a_role_deltas_one_finish_a_choice_and_usage(
    client: openai.OpenAI, http: httpx2.Client
) -> None:
    body = {**GREEDY_CHAT, "n": 2, "seed": 3, "temperature": 1}
    whole = client.chat.completions.create(**body)
    response = http.post(
        "/v1/chat/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    *data, last = events(response)
    assert last == "[DONE]"
    chunks = [json.loads(item) for item in data]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    *chunks, usage = chunks
    assert usage["choices"] == []
    assert whole.usage is not None
    assert usage["usage"]["completion_tokens"] == whole.usage.completion_tokens
    assert usage["usage"]["prompt_tokens"] == len(RENDERED)
    assert all(chunk["usage"] is None for chunk in chunks)
    for index in range(2):
        pieces = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert pieces[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in piece["delta"] for piece in pieces[1:])
        assert [piece["finish_reason"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1]["finish_reason"] == whole.choices[index].finish_reason
        assert "".join(piece["delta"].get("content", "") for piece in pieces) == whole.choices[index].message.content


def test_a_stream_without_the_option_has_no_usage(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(**GREEDY_CHAT, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_chat_logprobs_cover_every_token_streamed_or_not(client: openai.OpenAI) -> None:
    body = {**GREEDY_CHAT, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**body)
    assert whole.usage is not None
    assert whole.choices[0].logprobs is not None
    content = whole.choices[0].logprobs.content or []
    assert len(content) == whole.usage.completion_tokens
    for entry in content:
        assert entry.token == entry.top_logprobs[0].token  # greedy
        assert len(entry.top_logprobs) == 3
        assert (entry.bytes is None) == ("\ufffd" in entry.token)
    streamed = [
        entry.token
        for chunk in client.chat.completions.create(**body, stream=True)
        if chunk.choices and chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == [entry.token for entry in content]


def test_a_completion_echoes_and_scores_its_prompt(client: openai.OpenAI, http: httpx2.Client) -> None:
    answer = client.completions.create(model=MODEL, prompt="score", max_tokens=2, echo=True, logprobs=1, temperature=0)
    [choice] = answer.choices
    expected = generate(http, text="score", sampling_params={**GREEDY, "max_new_tokens": 2})
    assert choice.text == "score" + expected["text"]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.tokens[:5] == list("score")
    assert choice.logprobs.text_offset is not None
    assert choice.logprobs.text_offset[:5] == [0, 1, 2, 3, 4]
    values = choice.logprobs.token_logprobs or []
    assert len(values) == 7
    assert values[0] is None
    assert all(value < 0 for value in values[1:])


def test_completions_of_several_prompts_are_numbered_through(client: openai.OpenAI, http: httpx2.Client) -> None:
    answer = client.completions.create(model=MODEL, prompt=["ab", "cde"], n=2, max_tokens=4, temperature=0)
    texts = [
        generate(http, text=text, sampling_params={**GREEDY, "max_new_tokens": 4})["text"] for text in ("ab", "cde")
    ]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [texts[0], texts[0], texts[1], texts[1]]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 5
    by_ids = client.completions.create(model=MODEL, prompt=[[68, 69], [70]], max_tokens=1, echo=True)
    assert len(by_ids.choices) == 2
    assert len(by_ids.choices[0].text) > 1


def test_a_streamed_completion_joins_to_the_whole(client: openai.OpenAI) -> None:
    body: Any = {"model": MODEL, "prompt": "join", "max_tokens": 12, "temperature": 0, "echo": True, "logprobs": 0}
    whole = client.completions.create(**body)
    chunks = list(client.completions.create(**body, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == whole.choices[0].finish_reason
    assert sum(chunk.choices[0].finish_reason is not None for chunk in chunks) == 1
    assert whole.choices[0].logprobs is not None
    offsets = [o for c in chunks if c.choices[0].logprobs for o in c.choices[0].logprobs.text_offset or []]
    assert offsets == whole.choices[0].logprobs.text_offset


def test_parameters_reach_the_sampler(client: openai.OpenAI) -> None:
    biased = client.completions.create(model=MODEL, prompt="a", max_tokens=4, logit_bias={"70": 100}, temperature=0)
    assert len(set(biased.choices[0].text)) == 1
    stop = biased.choices[0].text[:2]
    stopped = client.completions.create(model=MODEL, prompt="a", max_tokens=4, logit_bias={"70": 100}, stop=stop)
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("", "stop")
    seeded = [client.completions.create(model=MODEL, prompt="a", max_tokens=8, seed=5) for _ in range(2)]
    assert seeded[0].choices[0].text == seeded[1].choices[0].text
    penalized = client.completions.create(
        model=MODEL,
        prompt="a",
        max_tokens=8,
        temperature=0,
        extra_body={"top_k": 1, "min_tokens": 8},
        presence_penalty=2,
    )
    assert penalized.usage is not None
    assert penalized.usage.completion_tokens == 8


def test_structured_output_is_what_its_schema_says(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"color": {"enum": ["red", "green"]}}, "required": ["color"]}
    schema["additionalProperties"] = False
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        response_format={"type": "json_schema", "json_schema": {"name": "color", "schema": schema, "strict": True}},
    )
    assert json.loads(answer.choices[0].message.content or "")["color"] in ("red", "green")
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_a_call_that_must_come_comes(client: openai.OpenAI, choice: Any) -> None:
    body: Any = {
        "model": MODEL,
        "messages": MESSAGES,
        "tools": [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }
    answer = client.chat.completions.create(**body, seed=1)
    streamed = list(client.chat.completions.create(**body, seed=1, stream=True))
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["wet"] in (True, False)
    assert answer.choices[0].message.content is None
    assert answer.choices[0].finish_reason == "tool_calls"
    [delta] = [call for chunk in streamed for call in chunk.choices[0].delta.tool_calls or []]
    assert delta.function is not None
    assert (delta.index, delta.function.arguments) == (0, call.function.arguments)
    assert streamed[-1].choices[0].finish_reason == "tool_calls"


def test_a_call_between_tags_is_read_out_of_the_text(client: openai.OpenAI) -> None:
    text = f"let me see {CALLS}\n{CALLS}"
    expression = "".join(f"\\{letter}" if letter in "{}." else letter for letter in text)
    body: Any = {**GREEDY_CHAT, "max_tokens": 250, "tools": [TOOL], "extra_body": {"regex": expression}}
    answer = client.chat.completions.create(**body)
    calls = answer.choices[0].message.tool_calls or []
    assert answer.choices[0].message.content == "let me see "
    assert [call.function.arguments for call in calls if call.type == "function"] == ['{"wet": true}'] * 2
    assert answer.choices[0].finish_reason == "tool_calls"
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**body, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "let me see "
    assert [call.index for chunk in chunks for call in chunk.delta.tool_calls or []] == [0, 1]
    unread = client.chat.completions.create(**body, tool_choice="none")
    assert unread.choices[0].message.content == text


def test_a_conversation_with_calls_is_rendered(client: openai.OpenAI) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"wet": true}'}}
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "is it"}, {"type": "text", "text": "wet?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "yes"},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    parsed = [{**call, "function": {"name": "weather", "arguments": {"wet": True}}}]
    rendered = f"u:is it\nwet?\na:{json.dumps(parsed)}\nt:yes\na:"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(rendered)


CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
USER: Any = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "x"}, "messages"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        (CHAT, {"messages": USER, "temperature": "hot"}, "temperature"),
        (CHAT, {"messages": USER, "temperature": -1}, "temperature"),
        (CHAT, {"messages": USER, "max_completion_tokens": 10**6}, "max_completion_tokens"),
        (CHAT, {"messages": USER, "max_completion_tokens": 1, "max_tokens": 1}, "max_tokens"),
        (CHAT, {"messages": USER, "max_tokens": -1}, "max_tokens"),
        (CHAT, {"messages": USER, "n": True}, "n"),
        (CHAT, {"messages": USER, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
        (CHAT, {"messages": USER, "logit_bias": {"320": 1}}, "logit_bias"),
        (CHAT, {"messages": USER, "stop": ""}, "stop"),
        (CHAT, {"messages": USER, "audio": {}}, "audio"),
        *[
            (CHAT, {"messages": USER, "chat_template_kwargs": {name: "x"}}, "chat_template_kwargs")
            for name in ("messages", "chat_template", "return_dict")
        ],
        (CHAT, {"messages": USER, "functions": []}, "functions"),
        (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"messages": USER, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": USER, "tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        (CHAT, {"messages": USER, "response_format": {"type": "xml"}}, "response_format"),
        (CHAT, {"messages": USER, "response_format": {"type": "json_schema"}}, "response_format"),
        (COMPLETION, {}, "prompt"),
        (COMPLETION, {"prompt": ""}, None),
        (COMPLETION, {"prompt": []}, "prompt"),
        (COMPLETION, {"prompt": [""]}, None),
        (COMPLETION, {"prompt": ["a", 1]}, "prompt"),
        (COMPLETION, {"prompt": [320]}, "prompt"),
        (COMPLETION, {"prompt": 1}, "prompt"),
        (COMPLETION, {"prompt": "x", "suffix": "y"}, "suffix"),
        (COMPLETION, {"prompt": "x", "best_of": 2}, "best_of"),
        (COMPLETION, {"prompt": "x", "logprobs": -1}, "logprobs"),
    ],
    ids=str,
)
def test_what_is_wrong_is_refused_by_the_name_that_openai_has(
    http: httpx2.Client, path: str, body: dict[str, Any], param: str | None
) -> None:
    error = refusal(http, path, **body)
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "").partition(".")[0] == (param or "")
    assert error["message"]


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
        client.completions.create(model="gpt", prompt="x")


def test_fields_without_effect_are_taken(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY_CHAT, user="me", store=False, metadata={"a": "b"})
    assert answer.choices
