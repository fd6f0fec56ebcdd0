"""What runs in the engine process: an engine, and what the HTTP process asks of it over a pipe.

Three threads beside the engine's own: one reads the pipe and never waits for a step, one checks submissions, whose
grammars may take a while to compile, and one writes. The writer takes whatever has changed since it last wrote, so
a slow reader gets fewer messages with more in each, and no step ever waits for it.
"""

import logging
import os
import threading
from collections.abc import Callable, Collection, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

from jradix.cache.explain import Explanation, explain
from jradix.cache.namespace import UNSHARED
from jradix.cache.page import View
from jradix.core import Core
from jradix.delivery import StepFailedError
from jradix.engine import Engine
from jradix.loop import ShutDownError
from jradix.output import Output
from jradix.replicas import gather
from jradix.reports import combined_info
from jradix.sampling_params import SamplingParams
from jradix.schedule_queue import QueueFullError
from jradix.server.messages import Abandon, Answer, Call, Change, Ready, Submit

LOG = logging.getLogger(__name__)
_WITH_THE_END = ("hidden_states", "hidden_state_positions")
"""Of `meta_info`: megabytes, which are sent once."""
_SECONDS_TO_ANSWER = 8
"""How long a step may take when the engine is to end: less than the other process waits."""


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
        """Say that the engine is ready; then read until the other end wants no more, or closes the pipe."""
        tokenizer_path = None if self._engine.tokenizer is None else self._engine.model_files
        self._connection.send([Ready(self._engine.get_server_info(), tokenizer_path)])
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
            self._shut_down()

    def _shut_down(self) -> None:
        """End the engine, which may save its cache; but not one that hangs, for which nobody should wait."""
        try:
            self._engine.replicas.send_each(lambda _: None, list).result(_SECONDS_TO_ANSWER)
        except TimeoutError:
            LOG.critical("the engine's thread does not answer, and this process ends without it")
            os._exit(1)
        except ShutDownError:
            LOG.debug("the engine's thread has ended already")
        self._engine.shutdown()

    def _submit(self, submit: Submit) -> None:
        try:
            outputs = self._engine.prepare(
                submit.input_ids, submit.params, self._tell, each_token=submit.each_token, **submit.options
            )
            self._outputs[submit.key] = outputs
            self._sent.update({output: _Sent(submit.key, index) for index, output in enumerate(outputs)})
            queued = self._engine.replicas.submit(outputs)
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
            self._engine.replicas.abandoning(outputs)()

    def _forget(self, key: int) -> None:
        for output in self._outputs.pop(key, ()):
            self._sent.pop(output, None)

    def _call(self, call: Call) -> None:
        if call.name == "stalled_seconds":
            self._answer(Answer(call.key, self._engine.stalled_seconds))
            return
        if call.name == "probe":
            self._probe(call.key)
            return
        try:
            called = _CALLS[call.name](self._engine, *call.arguments)
        except Exception as error:
            self._refuse(call.key, error)
        else:
            called.add_done_callback(partial(self._called, call.key))

    def _probe(self, key: int) -> None:
        """Generate one token on each replica, of which nothing stays: no page, and no number in any statistics."""
        replicas = self._engine.replicas
        probed: list[Future[None]] = [Future() for _ in replicas.cores]
        try:
            for replica, done in enumerate(probed):
                self._probe_replica(replica, done)
        except Exception as error:
            self._refuse(key, error)
        else:
            gather(probed, lambda _: None).add_done_callback(partial(self._called, key))

    def _probe_replica(self, replica: int, done: "Future[None]") -> None:
        def tell(output: Output) -> None:
            if output.error is None:
                done.set_result(None)
            else:
                done.set_exception(_step_failed(output.error))

        def queued(future: "Future[None]") -> None:
            error = future.exception()
            if error is not None:
                done.set_exception(error)

        params = SamplingParams(max_new_tokens=1, temperature=0.0)
        [output] = self._engine.prepare([[0]], params, tell, each_token=False)
        output.request.namespace = UNSHARED
        self._engine.send(lambda core: core.submit([output]), replica).add_done_callback(queued)

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
        only_grows = sent.num_tokens and output.request.logprobs is None
        growth = output.growth(sent.num_tokens) if only_grows else None
        if growth is not None:
            text, new_ids = growth
            meta, ended = None, False
        else:
            state = output.as_dict(sent.num_tokens)
            text, new_ids, meta = state["text"], state["output_ids"], state["meta_info"]
            ended = meta["finish_reason"] is not None
        if not new_ids and not ended:
            return None
        new_text = text[sent.num_characters :] if output.request.params.has_text_stop else None
        sent.num_tokens += len(new_ids)
        sent.num_characters = len(text)
        if meta is not None and not ended:
            meta = {name: value for name, value in meta.items() if name not in _WITH_THE_END}
        if ended:
            del self._sent[output]
            if not any(other in self._sent for other in self._outputs.get(sent.key, ())):
                self._outputs.pop(sent.key, None)
        error = None if output.error is None else _step_failed(output.error)
        return Change(sent.key, sent.index, new_text, new_ids, meta, error)


def _step_failed(error: BaseException) -> StepFailedError:
    return StepFailedError(f"the step failed: {error!r}")


def _sendable(error: BaseException) -> Exception:
    """The error as one that the HTTP process can read without loading jax."""
    if isinstance(error, ValueError):
        return ValueError(str(error))
    if isinstance(error, QueueFullError | StepFailedError):
        return type(error)(str(error))
    return RuntimeError(repr(error))


def _info(engine: Engine) -> Future[dict[str, Any]]:
    return engine.replicas.send_each(Core.info, combined_info)


def _flush_cache(engine: Engine) -> Future[int | None]:
    """The number of pages freed; None, and a replica's cache is not flushed, while requests are alive there."""
    engine.replicas.forget()
    return engine.replicas.send_each(
        lambda core: None if core.outputs else core.flush_cache(),
        lambda freed: None if None in freed else sum(filter(None, freed)),
    )


def _abort_request(engine: Engine, rid: str) -> Future[int]:
    """End the requests of an id; how many that were."""

    def abort(core: Core) -> int:
        num_alive = len(core.outputs)
        core.abort(rid)
        return num_alive - len(core.outputs)

    return engine.replicas.send_each(abort, sum)


def _abort_all(engine: Engine, message: str) -> Future[int]:
    """End all requests, for the reason given; how many that were."""

    def abort(core: Core) -> int:
        outputs = list(core.outputs.values())
        core.abandon(outputs, message)
        return len(outputs)

    return engine.replicas.send_each(abort, sum)


def _cache_view(engine: Engine, replica: int, namespaces: Collection[Hashable] | None, with_pool: bool) -> Future[View]:
    return engine.send(lambda core: View.of(core.cache, namespaces=namespaces, with_pool=with_pool), replica)


def _explain(engine: Engine, input_ids: list[int], namespace: str | None) -> Future[tuple[int, Explanation]]:
    """Why the prompt would hit as far as it does on the replica where it does so for longest, and which that is."""
    tokenizer = engine.tokenizer
    decode = None if tokenizer is None else partial(tokenizer.decode, skip_special_tokens=False)
    return engine.replicas.send_each(
        lambda core: explain(core.cache, input_ids, namespace, decode, discreet=True),
        lambda found: max(enumerate(found), key=lambda item: item[1].num_tokens),
    )


_CALLS: Final[Mapping[str, Callable[..., "Future[Any]"]]] = {
    "info": _info,
    "flush_cache": _flush_cache,
    "abort_request": _abort_request,
    "abort_all": _abort_all,
    "cache_view": _cache_view,
    "explain": _explain,
}
"""What the HTTP process may call. Each runs on the replicas' threads, between two steps."""
