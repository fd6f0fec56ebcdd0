"""A conversation in the terminal: streams replies, and says after each how much of the prompt was cached."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from jradix import mesh
from jradix.cache import render
from jradix.engine import Engine
from jradix.sampling_params import SamplingParams

PROMPT = "> "
COMMANDS = "/reset starts over, /tree shows the cache, /quit ends (as does Ctrl-D); Ctrl-C ends a reply."


class Chat:
    """One conversation with one engine. Each turn sends all of it; what it shares with the turn before is cached."""

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None = None) -> None:
        """ValueError if the model has no chat template."""
        assert engine.tokenizer is not None
        self._engine, self._tokenizer, self._params = engine, engine.tokenizer, params
        self._beginning = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._beginning)
        self._tokenizer.render_chat([{"role": "user", "content": ""}])  # refuses now rather than at the first turn

    def run(self) -> None:
        """Take turns until the input ends or says /quit."""
        engine = self._engine
        num_tokens = engine.cache.num_total * engine.cache.page_size
        name, dtype = engine.config.model_path.rpartition("/")[2], engine.runner.pool.dtype
        print(f"{name}, {dtype} on {mesh.device_description()}, KV pool of {num_tokens:,} tokens.\n{COMMANDS}\n")
        for line in _lines():
            match line.strip():
                case "":
                    continue
                case "/quit" | "/exit":
                    return
                case "/reset":
                    self._messages = list(self._beginning)
                    print("The conversation starts over; what it left in the cache stays there.")
                case "/tree":
                    print(render.to_text(engine.cache, self._tokenizer.decode))
                case command if command.startswith("/"):
                    print(f"unknown command {command}: {COMMANDS}")
                case text:
                    self._turn(text)

    def _turn(self, text: str) -> None:
        """Send the conversation with `text` behind it, print the reply and what it cost, and remember both."""
        messages = [*self._messages, {"role": "user", "content": text}]
        num_compiled = self._engine.runner.num_compiled
        try:
            out, interrupted = self._reply(self._tokenizer.apply_chat_template(messages))
        except ValueError as error:  # too long for the context or the pool; the conversation stays as it was
            print(f"error: {error} (/reset starts over)")
            return
        self._messages = [*messages, {"role": "assistant", "content": out["text"]}]
        print("\n" + _summary(out, interrupted, self._engine.runner.num_compiled - num_compiled) + "\n")

    def _reply(self, input_ids: list[int]) -> tuple[dict[str, Any], bool]:
        """Print a reply as it comes. Returns its last state, and whether Ctrl-C ended it."""
        out: dict[str, Any] = {"text": "", "meta_info": {"prompt_tokens": len(input_ids), "finish_reason": None}}
        stream = self._engine.generate(input_ids=input_ids, sampling_params=self._params, stream=True)
        with _interrupt_noted() as interrupt, contextlib.closing(stream):
            num_printed = 0
            for out in stream:
                print(out["text"][num_printed:], end="", flush=True)
                num_printed = len(out["text"])
                if interrupt.is_set():
                    break
        return out, out["meta_info"]["finish_reason"] is None


@contextlib.contextmanager
def _interrupt_noted() -> Iterator[threading.Event]:
    """Ctrl-C sets the event instead of breaking into a step. The second one raises, should the first take too long."""
    interrupt = threading.Event()

    def note(*_: object) -> None:
        if interrupt.is_set():
            raise KeyboardInterrupt
        interrupt.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


def _lines() -> Iterator[str]:
    """What the user types; lines from a pipe are echoed, so that the transcript reads the same."""
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() a history and line editing
    while True:
        try:
            line = input(PROMPT)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n/quit or Ctrl-D ends the chat.")
            continue
        if not interactive:
            print(line)
        yield line


def _summary(out: dict[str, Any], interrupted: bool, num_compiled: int) -> str:
    """One line: prompt tokens cached and computed, time to the first token, speed after it."""
    meta = out["meta_info"]
    prompt, cached = meta["prompt_tokens"], meta.get("cached_tokens", 0)
    parts = [f"prompt {prompt} tokens: {cached} cached, {prompt - cached} computed"]
    first, count = meta.get("time_to_first_token"), meta.get("completion_tokens", 0)
    if first is not None:
        compiled = f" ({num_compiled} program{'s' * (num_compiled > 1)} compiled)" if num_compiled else ""
        parts.append(f"first token {first * 1e3:,.0f} ms{compiled}")
    reply = f"reply {count} token{'s' * (count != 1)}"
    if first is not None and count > 1 and "e2e_latency" in meta:
        reply += f", {(count - 1) / (meta['e2e_latency'] - first):.0f} a second"
    parts.append(reply)
    if interrupted:
        parts.append("interrupted")
    return f"[{'; '.join(parts)}]"
