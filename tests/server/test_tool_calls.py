"""Reading calls of tools out of text, whichever way the text is cut into pieces."""

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jradix.server.tool_calls import JsonReader, Reader, TagReader, ToolCall, ToolUse

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "<b>"}}\n</tool_call>'


def read(reader: Reader, pieces: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    parts = [part for piece in pieces for part in reader.add(piece)] + reader.finish()
    content = "".join(part for part in parts if isinstance(part, str))
    return content, [(part.name, part.arguments) for part in parts if isinstance(part, ToolCall)]


@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [
        ("", "", 0),
        ("no call", "no call", 0),
        (CALL, "", 1),
        (f"before {CALL}\n{CALL} \n", "before ", 2),
        (f"{CALL} and {CALL} after", " and  after", 2),
        ("a <tool_cal", "a <tool_cal", 0),
        ("a <tool_call> {", "a <tool_call> {", 0),
        ("<tool_call>not json</tool_call> x", "<tool_call>not json</tool_call> x", 0),
        ('<tool_call>["f"]</tool_call>', '<tool_call>["f"]</tool_call>', 0),
        ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', 0),
        (f"<<tool_call>{CALL}", f"<<tool_call>{CALL}", 0),
    ],
)
@given(cuts=st.sets(st.integers(0, 150), max_size=8))
def test_calls_and_content_do_not_depend_on_the_pieces(text: str, content: str, num_calls: int, cuts: set[int]) -> None:
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in pairwise(places)]
    assert read(TagReader(), pieces) == (content, [("f", '{"a": "<b>"}')] * num_calls)


def test_content_comes_as_soon_as_no_tag_can_begin_in_it() -> None:
    reader = TagReader()
    assert reader.add("a < b") == ["a < b"]
    assert reader.add(" <tool") == [" "]
    assert reader.add("box") == ["<toolbox"]


def test_json_that_was_cut_short_is_content() -> None:
    assert read(JsonReader(), ['[{"name": "f", ', '"arguments": {}}]']) == ("", [("f", "{}")])
    assert read(JsonReader(), ['[{"name": "f", ']) == ('[{"name": "f", ', [])
    assert read(JsonReader("f"), ["[1]"]) == ("", [("f", "[1]")])
    assert read(JsonReader(), []) == ("", [])


def test_choices_become_schemas() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    assert ToolUse.of(None, None, parallel=True) == ToolUse()
    assert ToolUse.of(tools, "none", parallel=True) == ToolUse()
    assert ToolUse.of(tools, None, parallel=True) == ToolUse(tools)
    required = ToolUse.of(tools, "required", parallel=False).json_schema
    assert required is not None
    assert required["maxItems"] == 1
    assert "maxItems" not in (ToolUse.of(tools, "required", parallel=True).json_schema or {})
    assert [call["properties"]["name"]["const"] for call in required["items"]["anyOf"]] == ["f", "g"]
    named = ToolUse.of(tools, {"type": "function", "function": {"name": "g"}}, parallel=True)
    assert (named.function, json.dumps(named.json_schema)) == ("g", '{"type": "object"}')
