"""What runs in the engine process: an engine, and what the HTTP process asks of it over a pipe.

Three threads beside the engine's own: one reads the pipe and never waits for a step, one checks submissions, whose
grammars may take a while to compile, and one writes. The writer takes whatever has changed since it last wrote, so
a slow reader gets fewer messages with more in each, and no step ever waits for it.
"""

import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

from jradix.cache.explain import explain
from jradix.cache.render import to_html
from jradix.core import Core
from jradix.delivery import StepFailedError
from jradix.engine import Engine
from jradix.loop import ShutDownError
from jradix.output import Output
from jradix.schedule_queue import QueueFullError
from jradix.server.messages import Abandon, Answer, Call, Change, Submit

LOG = logging.getLogger(__name__)
_SHOWN_NODES, _SHOWN_TOKENS = 500, 64
"""Of the cache's page, which is made between two steps."""
_WITH_THE_END = ("hidden_states", "hidden_state_positions")
"""Of `meta_info`: megabytes, which are sent once."""


@dataclass(slots=True)
class _Sent:
    """Which output of which submission this is, and how much of it was sent."""

    key: int
    index: int
    num_tokens: int = 0
    num_characters: int = 0


class EngineService:
    """Serves one engine over one pipe."""

    def __init__(self, engine: Engine, connection: Connection) -> None:
        self._engine, self._connection = engine, connection
        self._outputs: dict[int, list[Output]] = {}  # by key, while any of them is alive
        self._sent: dict[Output, _Sent] = {}  # of live outputs
        self._news = threading.Condition()  # guards the next two
        self._answers: list[Answer] = []
        self._changed: dict[Output, None] = {}
        self._submitter = ThreadPoolExecutor(1, thread_name_prefix="jradix-submit")

    def run(self) -> None:
        """Read until the other end says that there is no more, or closes the pipe."""
        threading.Thread(target=self._write, name="jradix-write", daemon=True).start()
        try:
            while True:
                match self._connection.recv():
                    case None:
                        break
                    case Submit() as submit:
                        self._submitter.submit(self._submit, submit)
                    case Abandon(key):
                        self._submitter.submit(self._abandon, key)  # behind its own submission
                    case Call() as call:
                        self._call(call)
        except (EOFError, OSError):
            LOG.debug("the HTTP process has closed the pipe")
        finally:
            self._submitter.shutdown(cancel_futures=True)
            self._engine.shutdown()

    def _submit(self, submit: Submit) -> None:
        try:
            outputs = self._engine.prepare(
                submit.input_ids, submit.params, self._tell, each_token=submit.each_token, **submit.options
            )
            self._outputs[submit.key] = outputs
            self._sent.update({output: _Sent(submit.key, index) for index, output in enumerate(outputs)})
            queued = self._engine.send(lambda core: core.submit(outputs))
        except Exception as error:
            self._forget(submit.key)
            self._refuse(submit.key, error)
            return
        queued.add_done_callback(partial(self._submitted, submit.key))

    def _submitted(self, key: int, queued: Future[None]) -> None:
        error = queued.exception()
        if error is None:
            self._answer(Answer(key))
        else:
            self._forget(key)
            self._refuse(key, error)

    def _abandon(self, key: int) -> None:
        outputs = self._outputs.get(key)
        if outputs is not None:
            self._engine.send(lambda core: core.abandon(outputs))

    def _forget(self, key: int) -> None:
        for output in self._outputs.pop(key, ()):
            self._sent.pop(output, None)

    def _call(self, call: Call) -> None:
        if call.name == "stalled_seconds":
            self._answer(Answer(call.key, self._engine.stalled_seconds))
            return
        try:
            function = partial(_CALLS[call.name], self._engine)
            self._engine.send(lambda core: function(core, *call.arguments)).add_done_callback(
                partial(self._called, call.key)
            )
        except Exception as error:
            self._refuse(call.key, error)

    def _called(self, key: int, called: Future[Any]) -> None:
        error = called.exception()
        if error is None:
            self._answer(Answer(key, called.result()))
        else:
            self._refuse(key, error)

    def _tell(self, output: Output) -> None:
        with self._news:
            self._changed[output] = None
            self._news.notify()

    def _refuse(self, key: int, error: BaseException) -> None:
        if isinstance(error, ShutDownError):
            LOG.critical("the engine's thread has ended, and so does this process")
            os._exit(1)
        self._answer(Answer(key, error=_sendable(error)))

    def _answer(self, answer: Answer) -> None:
        with self._news:
            self._answers.append(answer)
            self._news.notify()

    def _write(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._answers or self._changed)
                answers, self._answers = self._answers, []
                changed, self._changed = self._changed, {}
            changes = [change for output in changed if (change := self._change(output)) is not None]
            try:
                self._connection.send([*answers, *changes])
            except OSError:
                return  # nobody is there: the reader sees it too

    def _change(self, output: Output) -> Change | None:
        """What was not sent of the output; None if that is nothing, as after word that came late."""
        sent = self._sent.get(output)
        if sent is None:
            return None
        state = output.as_dict(sent.num_tokens)
        new_ids, meta = state["output_ids"], state["meta_info"]
        ended = meta["finish_reason"] is not None
        if not new_ids and not ended:
            return None
        text = state["text"][sent.num_characters :] if output.request.params.has_text_stop else None
        sent.num_tokens += len(new_ids)
        sent.num_characters = len(state["text"])
        if not ended:
            meta = {name: value for name, value in meta.items() if name not in _WITH_THE_END}
        else:
            del self._sent[output]
            if not any(other in self._sent for other in self._outputs.get(sent.key, ())):
                self._outputs.pop(sent.key, None)
        error = None if output.error is None else StepFailedError(f"the step failed: {output.error!r}")
        return Change(sent.key, sent.index, text, new_ids, meta, error)


def _sendable(error: BaseException) -> Exception:
    """The error as one that the HTTP process can read without loading jax."""
    if isinstance(error, ValueError):
        return ValueError(str(error))
    if isinstance(error, QueueFullError):
        return QueueFullError(str(error))
    return RuntimeError(repr(error))


def _info(engine: Engine, core: Core) -> dict[str, Any]:
    return core.info()


def _flush_cache(engine: Engine, core: Core) -> int | None:
    """The number of pages freed; None, and nothing is flushed, while requests are alive."""
    return None if core.outputs else core.flush_cache()


def _abort_request(engine: Engine, core: Core, rid: str | None) -> int:
    """End the requests of an id, or all (None); how many that were."""
    num_alive = len(core.outputs)
    for one in list(core.outputs) if rid is None else [rid]:
        core.abort(one)
    return num_alive - len(core.outputs)


def _cache_page(engine: Engine, core: Core) -> str:
    return to_html(core.cache, _decode_beginning(engine), max_nodes=_SHOWN_NODES)


def _explain(engine: Engine, core: Core, input_ids: list[int], cache_salt: str | int | None) -> dict[str, Any]:
    found = explain(core.cache, input_ids[:-1], cache_salt, _decode_beginning(engine))
    return {
        "prompt_tokens": len(input_ids),
        "cached_tokens": found.num_tokens,
        "reason": found.reason,
        "explanation": str(found),
        "diverged_at": found.diverged_at,
    }


def _decode_beginning(engine: Engine) -> Callable[[list[int]], str] | None:
    tokenizer = engine.tokenizer
    return None if tokenizer is None else lambda ids: tokenizer.decode(ids[:_SHOWN_TOKENS], skip_special_tokens=False)


_CALLS: Final[Mapping[str, Callable[..., Any]]] = {
    "info": _info,
    "flush_cache": _flush_cache,
    "abort_request": _abort_request,
    "cache_page": _cache_page,
    "explain": _explain,
}
"""What the HTTP process may call. Each runs on the engine's thread, between two steps."""
