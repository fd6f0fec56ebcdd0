"""Calls of tools: how a chat is made to give them, and how they are read from its text.

A model that calls by itself writes, as Hermes and Qwen models are taught, JSON with `name` and `arguments` between the
tags <tool_call> and </tool_call>. A model that must call is held to JSON by a grammar, without the tags.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. `arguments` is JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


type Part = str | ToolCall


class Reader(Protocol):
    """Turns an output's text, piece by piece, into content and calls."""

    def add(self, piece: str) -> list[Part]:
        """What the text up to here certainly holds, and was not given before."""
        ...

    def finish(self) -> list[Part]:
        """The rest."""
        ...


class PlainReader:
    """All of the text is content."""

    def add(self, piece: str) -> list[Part]:
        return [piece] if piece else []

    def finish(self) -> list[Part]:
        return []


class TagReader:
    """Finds calls between tags. What is no call, tags and all, is content, but for the space around calls."""

    def __init__(self) -> None:
        self._held = ""  # may be, or become, a call
        self._after_call = False

    def add(self, piece: str) -> list[Part]:
        self._held += piece
        parts: list[Part] = []
        while (start := self._held.find(OPEN)) >= 0:
            end = self._held.find(CLOSE, start)
            if end < 0:
                parts += self._content(self._held[:start])
                self._held = self._held[start:]
                return parts
            parts += self._content(self._held[:start])
            call = _call_of(self._held[start + len(OPEN) : end])
            parts += [call] if call is not None else self._content(self._held[start : end + len(CLOSE)])
            self._after_call = call is not None
            self._held = self._held[end + len(CLOSE) :]
        kept = next((size for size in range(len(OPEN) - 1, 0, -1) if self._held.endswith(OPEN[:size])), 0)
        certain = len(self._held) - kept
        if self._after_call and not self._held[:certain].strip():
            return parts
        parts += self._content(self._held[:certain])
        self._held = self._held[certain:]
        return parts

    def finish(self) -> list[Part]:
        return self._content(self._held)

    def _content(self, text: str) -> list[Part]:
        if not text or (self._after_call and not text.strip()):
            return []
        self._after_call = False
        return [text]


class JsonReader:
    """The whole text is JSON: a list of calls, or the arguments of one function. Given when it is complete."""

    def __init__(self, function: str | None = None) -> None:
        """function: the one that is called; None if the text is a list of calls."""
        self._function = function
        self._text = ""

    def add(self, piece: str) -> list[Part]:
        self._text += piece
        return []

    def finish(self) -> list[Part]:
        try:
            value = json.loads(self._text)
        except ValueError:  # it was cut short
            return [self._text] if self._text else []
        if self._function is not None:
            return [ToolCall(self._function, _compact(value))]
        return [ToolCall(call["name"], _compact(call["arguments"])) for call in value]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a chat's `tools` and `tool_choice` come to.

    Attributes:
        tools: for the chat template; None if the model is to know of none.
        json_schema: what the output is held to; None if it may be anything.
        function: the one that is to be called, if it is named.
    """

    tools: list[dict[str, Any]] | None = None
    json_schema: Mapping[str, Any] | None = None
    function: str | None = None

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]] | None, choice: Any, *, parallel: bool) -> "ToolUse":
        """Raises ValueError if they are malformed, or the choice is of no tool."""
        functions = {function["name"]: function for function in map(_function_of, tools or ())}
        if choice is None:
            choice = "auto" if functions else "none"
        if choice == "none":
            return cls()
        if not functions:
            raise ValueError(f"tool_choice {choice!r} needs tools, and there are none")
        known = [dict(tool) for tool in tools or ()]
        if choice == "auto":
            return cls(known)
        if choice == "required":
            return cls(known, _schema_of_calls(functions, parallel=parallel))
        name = _chosen(choice)
        if name not in functions:
            raise ValueError(f"tool_choice names {name!r}, which is none of the tools {', '.join(functions)}")
        return cls(known, functions[name].get("parameters") or {"type": "object"}, name)

    def reader(self) -> Reader:
        """What reads an output."""
        if self.json_schema is not None:
            return JsonReader(self.function)
        return PlainReader() if self.tools is None else TagReader()


def _function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping):
        raise ValueError('tools must be a list of {"type": "function", "function": {...}}')
    if not isinstance(function.get("name"), str) or not isinstance(function.get("parameters") or {}, Mapping):
        raise ValueError("tools must have functions with a name and, if they take any, parameters: a JSON schema")
    return function


def _chosen(choice: Any) -> str:
    if isinstance(choice, Mapping) and choice.get("type") == "function" and isinstance(choice.get("function"), Mapping):
        return str(choice["function"].get("name"))
    raise ValueError(
        'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}, '
        f"got {choice!r}"
    )


def _schema_of_calls(functions: Mapping[str, Mapping[str, Any]], *, parallel: bool) -> dict[str, Any]:
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": function.get("parameters") or {"type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, function in functions.items()
    ]
    return {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **({} if parallel else {"maxItems": 1})}


def _call_of(text: str) -> ToolCall | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    return ToolCall(value["name"], _compact(value.get("arguments", {})))


def _compact(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
