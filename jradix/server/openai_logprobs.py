"""Log-probabilities in OpenAI's two formats: that of chats and the older one of completions."""

from typing import Any

from jradix.server.generation import Sample
from jradix.tokenizer import Tokenizer

_NO_TEXT = "\N{REPLACEMENT CHARACTER}"


def of_chat(tokenizer: Tokenizer, sample: Sample, first: int) -> dict[str, Any]:
    """A chat choice's `logprobs`: of its tokens from `first` on."""
    chosen = sample.meta["output_token_logprobs"][first:]
    tops = sample.meta.get("output_top_logprobs", [[]] * (first + len(chosen)))[first:]
    content = [
        {**_entry(tokenizer, value, token_id), "top_logprobs": [_entry(tokenizer, v, i) for v, i, _ in top]}
        for (value, token_id, _), top in zip(chosen, tops, strict=True)
    ]
    return {"content": content, "refusal": None}


def of_completion(
    tokenizer: Tokenizer, sample: Sample, first: int, offset: int, *, with_prompt: bool, with_tops: bool
) -> tuple[dict[str, Any], int]:
    """A completion choice's `logprobs`, of its tokens from `first` on, and where in its text the next token begins.

    offset: where in the choice's text the first of these tokens begins.
    with_prompt: those of the prompt come before.
    with_tops: give the likeliest tokens at each position too, and the chosen one among them.
    """
    meta = sample.meta
    chosen = meta["output_token_logprobs"][first:]
    tops = meta.get("output_top_logprobs", [])[first:]
    if with_prompt:
        chosen = meta["input_token_logprobs"] + chosen
        tops = meta.get("input_top_logprobs", []) + tops
    texts = [_text(tokenizer, token_id) for _, token_id, _ in chosen]
    offsets: list[int] = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    found: dict[str, Any] = {
        "tokens": texts,
        "token_logprobs": [value for value, _, _ in chosen],
        "top_logprobs": None,
        "text_offset": offsets,
    }
    if with_tops:
        found["top_logprobs"] = [
            None if top is None else {_text(tokenizer, i): v for v, i, _ in [*top, (value, token_id, None)]}
            for (value, token_id, _), top in zip(chosen, tops, strict=True)
        ]
    return found, offset


def _entry(tokenizer: Tokenizer, value: float | None, token_id: int) -> dict[str, Any]:
    """`bytes` is None for a token that is part of a character only."""
    text = _text(tokenizer, token_id)
    return {"token": text, "logprob": value, "bytes": None if _NO_TEXT in text else list(text.encode())}


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.decode([token_id], skip_special_tokens=False)
