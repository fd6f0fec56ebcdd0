"""The engine as its users see it: generate in several ways, abort, and look after the cache and the weights."""

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from importlib import metadata
from math import ceil
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self, Unpack, get_args

import numpy as np
from tqdm import tqdm

from jradix import mesh, startup
from jradix.cache.prefix_cache import PrefixCache
from jradix.cache_keeping import Restorer, save
from jradix.config import EngineConfig
from jradix.core import Core, PauseMode
from jradix.delivery import Delivery
from jradix.loop import Loop, ShutDownError
from jradix.offline import BatchPlan, plan_batch
from jradix.offline_prediction import Capacity
from jradix.output import Output
from jradix.progress import BatchProgress
from jradix.request import Request
from jradix.request_options import RequestOptions
from jradix.sampling_params import Params
from jradix.scheduler import Scheduler
from jradix.submission import Submission, TokenIds
from jradix.validation import is_sequence

LOG = logging.getLogger(__name__)


class Engine:
    """Runs a model on one device or several, sharing the KV of common prefixes between all requests it has ever seen.

    The model runs on a thread of its own. Every method may be called from any thread, from an interrupt or within a
    running event loop, and all requests alive share the same steps.
    """

    def __init__(self, config: EngineConfig | None = None, **options: Any) -> None:
        """Load a model. Give an `EngineConfig`, or its fields as keywords.

        Raises:
            ValueError: an option or the model's files are wrong; the message names which.
        """
        if config is not None and options:
            raise ValueError("give either an EngineConfig or keyword options, not both")
        self.config = config or EngineConfig.from_kwargs(**options)
        parts = startup.build(self.config)
        self.tokenizer, self.runner, self.model_config = parts.tokenizer, parts.runner, parts.model_config
        self.context_length, self.model_files = parts.context_length, parts.model_files
        self._submission = Submission(
            self.tokenizer,
            vocab_size=self.model_config.vocab_size,
            context_length=self.context_length,
            eos_ids=parts.eos_ids,
            pool_tokens=(parts.layout.num_pages - 1) * self.config.page_size,
            random_seed=self.config.random_seed,
        )
        self._core = Core(self.config, parts)
        self._saving = threading.Lock()  # one save follows the other
        self._restorer: Restorer | None = None
        if self.config.cache_dir is not None:
            self._restorer = Restorer(self._core, self.model_config, Path(self.config.cache_dir))
        if self.config.warmup:
            self.warm_up()
        self._loop = Loop(self._core)
        if self._restorer is not None:
            self._restorer.start(self._core, self._loop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def cache(self) -> PrefixCache:
        """To look at between requests; see `hold`."""
        return self._core.cache

    @property
    def scheduler(self) -> Scheduler:
        """To look at between requests; see `hold`."""
        return self._core.scheduler

    def warm_up(self) -> float:
        """Compile every bucket, with a progress bar; returns the seconds it took."""
        return self.runner.warm_up(lambda shapes: tqdm(shapes, desc="compiling", unit="program"))

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Params | Sequence[Params] | None = None,
        input_ids: TokenIds | Sequence[TokenIds] | None = None,
        *,
        stream: bool = False,
        show_progress: bool | None = None,
        **options: Unpack[RequestOptions],
    ) -> Any:
        """Generate from a prompt or from many at once.

        More prompts than run side by side are started in an order in which those with a common prefix follow each
        other; results keep the order of the prompts.

        Args:
            prompt: text, or a list of texts.
            sampling_params: one for all prompts or a list with one for each; a dict of fields will do.
            input_ids: token ids instead of `prompt`, or a list of such.
            stream: yield results as they grow instead of returning the last.
            show_progress: show a bar, and at the end what the prefix cache saved. None: if many prompts were given and
                somebody is there to see it.
            options: see `RequestOptions`.

        Returns:
            A dict for a single prompt, a list of dicts in the order of the prompts for many: `text`, `output_ids`,
            and `meta_info` with `id`, `prompt_tokens`, `completion_tokens`, `cached_tokens`, `finish_reason`,
            `e2e_latency` and `time_to_first_token` (seconds). With `stream`, an iterator over such dicts, each with
            all the text so far and, for many prompts, `index`; a dict comes whenever a request has new tokens.

        Raises:
            ValueError: an argument is wrong. Then none of the prompts was run.
            QueueFullError: too many requests wait already. Then none of the prompts was run.
            StepFailedError: the device failed.
        """
        requests, single = self._submission.requests(prompt, input_ids, sampling_params, **options)
        if not stream:
            return self._run(requests, single, show_progress)
        results = self._stream(requests, single)
        next(results)  # enter it: closing a generator that never started would leave its requests alive
        return results

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Params | Sequence[Params] | None = None,
        input_ids: TokenIds | Sequence[TokenIds] | None = None,
        *,
        stream: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Any:
        """As `generate`, for use in an event loop; with `stream`, awaiting it gives an asynchronous iterator.

        Cancelling the task, or closing the iterator, aborts the requests. Those of an iterator begin with its first
        item.
        """
        make = partial(self._submission.requests, prompt, input_ids, sampling_params, **options)
        requests, single = await asyncio.to_thread(make)  # a long text takes its time
        results = self._async_stream(requests, single, each_token=stream)
        if stream:
            return results
        finished: list[dict[str, Any]] = [{}] * len(requests)
        async for result in results:
            finished[result.pop("index", 0)] = result
        return finished[0] if single else finished

    def score(
        self,
        prompt: str | TokenIds,
        continuations: Sequence[str | TokenIds],
        *,
        cache_salt: str | int | None = None,
    ) -> list[dict[str, Any]]:
        """How likely the model finds each continuation after the prompt, which is computed once. Generates nothing.

        Texts are tokenized apart from each other; give token ids where the model would join tokens at the seam.

        Returns:
            For each: `logprob`, the sum over its tokens, `token_logprobs` and `token_ids`, `is_greedy`, whether each
            of its tokens is the likeliest, and `cached_tokens`.

        Raises:
            ValueError: there is no continuation, one of them is empty, or does not fit.
            RuntimeError: it was aborted, by a pause or the engine's shutdown.
        """
        if not is_sequence(continuations) or not len(continuations):
            raise ValueError(
                f"continuations must be a list of texts or of lists of ids, not empty, got {continuations!r}"
            )
        prompt_ids = self._submission.token_ids(prompt)
        each = [self._submission.token_ids(continuation, begins=False) for continuation in continuations]
        results = self.generate(
            input_ids=[np.concatenate([prompt_ids, ids]) for ids in each],
            sampling_params={"max_new_tokens": 0},
            return_logprob=True,
            logprob_start_len=len(prompt_ids),
            top_logprobs_num=1,
            cache_salt=cache_salt,
        )
        for result in results:
            reason = result["meta_info"]["finish_reason"]
            if reason["type"] == "abort":
                raise RuntimeError(f"the scores are not complete: {reason['message']}")
        return [_score(result["meta_info"]) for result in results]

    def abort_request(self, rid: str) -> bool:
        """End a live request, or all samples of a prompt or all prompts of a list that this id was given for.

        Their results have finish reason "abort". False if none is alive.
        """
        if not isinstance(rid, str):
            raise ValueError(f"rid must be the id of one request, a string, got {rid!r}")
        return self._loop.call(partial(self._core.abort, rid))

    def flush_cache(self) -> int:
        """Forget every cached prefix that no running request holds; returns the number of pages freed."""
        return self._loop.call(self._core.flush_cache)

    def cache_report(self) -> dict[str, Any]:
        """How the prefix cache has done since the engine started, and what it holds: counters of requests and of
        asked, hit, inserted, evicted and flushed tokens, hit rates, and the number of pages in each state.
        """
        return self._loop.call(self._core.cache_report)

    def save_cache(self, directory: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """Save what the prefix cache holds, for an engine that starts with this directory as its `cache_dir`.

        Saved is what it holds now. Steps go on meanwhile: they wait only while a piece of at most 64 MiB is read from
        the device. A snapshot that was there is replaced, whole or, if this fails, not at all. It tells who may read
        the directory every cached prompt, and every salt.

        directory: if not given, `cache_dir`. Returns `pages`, `tokens`, `bytes` and `files` written, and `seconds`.

        Raises:
            ValueError: there is no directory.
            RuntimeError: the last update of the weights has failed; or the cache was flushed, the weights were
                updated, or a step failed while it was saved.
            OSError: it cannot be written.
        """
        target = self.config.cache_dir if directory is None else directory
        if target is None:
            raise ValueError("directory must be given, as this engine has no cache_dir")
        if self._restorer is not None:
            self._restorer.wait()  # else what it has not restored yet would be lost
        with self._saving:
            return save(self._core, self._loop, self.model_config, Path(target).absolute())

    def get_server_info(self) -> dict[str, Any]:
        """The configuration, what was made of it, and what runs now."""
        return {
            **asdict(self.config),
            "version": metadata.version("jradix"),
            "device": mesh.device_description(),
            "architecture": self.model_config.architecture,
            "max_context_length": self.context_length,
            **self._loop.call(self._core.info),
        }

    def update_weights(self, weights: str | os.PathLike[str] | Mapping[str, Any]) -> int:
        """Go on with other weights of the same model, as in reinforcement learning.

        Requests that run keep the tokens they have and go on under the new weights; nothing that the old ones have
        computed is used again. The device never holds more than one parameter twice.

        weights: a checkpoint as in `model_path`, or arrays by the names of its tensors in the Hugging Face format.
        Returns the number of updates so far, which results give as `weight_version`.

        Raises:
            ValueError: they do not fit the model; then nothing has changed. Any other error, such as of a disk, may
                come in the middle: then the engine stands still until another update succeeds.
        """
        replace = startup.weights_to_replace(self.config, self.runner.sharding, weights)
        return self._loop.call(partial(self._core.update_weights, replace))

    def pause_generation(self, mode: PauseMode = "retract") -> None:
        """Launch no more steps until `continue_generation`; who waits for results goes on waiting.

        mode: what becomes of the requests that run. "retract": they give up their pages and are computed again, as far
        as these are not cached; "in_place": they keep them; "abort": all requests end, those that wait too.
        """
        if mode not in get_args(PauseMode):
            raise ValueError(f"mode must be one of {', '.join(get_args(PauseMode))}, got {mode!r}")
        self._loop.call(partial(self._core.pause, mode))

    def continue_generation(self) -> None:
        """Go on after `pause_generation`."""
        self._loop.call(self._core.resume)

    def check_idle(self) -> None:
        """Raise unless nothing runs and every page is free or evictable: what must hold between requests."""
        self._loop.call(self._core.check_idle)

    def prepare(
        self,
        input_ids: Sequence[TokenIds],
        sampling_params: Params | Sequence[Params] | None,
        tell: Callable[[Output], None],
        *,
        each_token: bool,
        **options: Unpack[RequestOptions],
    ) -> list[Output]:
        """Check requests, for a caller who waits for nothing: ``send(lambda core: core.submit(outputs))`` queues them.

        Their text is made elsewhere: it stays empty here, unless stops have to be found in it.

        Args:
            tell: called with an output that has ended or, with `each_token`, grown. It runs on the engine's thread,
                which makes no step meanwhile.

        Raises:
            ValueError: an argument is wrong.
        """
        requests, _ = self._submission.requests(None, input_ids, sampling_params, **options)
        return [
            Output(request, self.tokenizer if request.params.has_text_stop else None, tell, tell_each_token=each_token)
            for request in requests
        ]

    def send[T](self, function: Callable[[Core], T]) -> Future[T]:
        """Run `function` on the engine's thread, between two steps, and do not wait for it.

        Raises:
            ShutDownError: there is no such thread any more.
        """
        return self._loop.send(partial(function, self._core))

    @property
    def stalled_seconds(self) -> float:
        """For how long there has been something to do and nothing was done; a step may take its time."""
        return self._core.stalled_seconds

    def hold(self) -> AbstractContextManager[Core]:
        """Lend the loop's state to this thread, between two steps: to inspect it, or to step by hand.

        Inside the `with` block the engine's other methods would wait for ever.
        """
        return self._loop.hold()

    def shutdown(self) -> None:
        """Save the cache if there is a `cache_dir`, abort what is alive, end the thread and free the device's memory.

        Leaving a `with` block does it too. That the cache cannot be saved is logged and no error.
        """
        try:
            if self.config.cache_dir is not None:
                LOG.info("saved the prefix cache: %s", self.save_cache())
        except ShutDownError:
            LOG.debug("the engine was shut down before")
        except Exception:
            LOG.exception("the prefix cache could not be saved")
        finally:
            self._loop.close()

    def _run(self, requests: list[Request], single: bool, show_progress: bool | None) -> Any:
        ended: SimpleQueue[Output] = SimpleQueue()
        outputs = self._outputs(requests, ended.put, each_token=False)
        abandon = self._abandoning(outputs)
        delivery = Delivery(outputs, single=True)
        plan = self._plan_batch(requests)
        order = range(len(outputs)) if plan is None else plan.order.tolist()
        results: dict[str, dict[str, Any]] = {}
        with BatchProgress(len(outputs), plan, show=show_progress) as progress:
            try:
                self._loop.call(partial(self._core.submit, [outputs[place] for place in order]))
                while not delivery.done:
                    output = ended.get()
                    result = delivery.take(output)
                    assert result is not None, "it was told that an output ended, and it has not"
                    results[output.request.id] = result
                    meta = result["meta_info"]
                    progress.add(meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"])
            except BaseException:
                abandon()
                raise
        in_order = [results[request.id] for request in requests]
        return in_order[0] if single else in_order

    def _plan_batch(self, requests: list[Request]) -> BatchPlan | None:
        """In which order to start a batch, if they cannot all run at once and the cache may help."""
        if len(requests) <= self.config.max_running_requests or not self.cache.enabled:
            return None
        cached_lens, output_share = self._loop.call(partial(self._core.forecast, requests))
        output_lens = [ceil(request.max_new_tokens * output_share) for request in requests]
        capacity = Capacity(
            num_pages=self.cache.num_total,
            page_size=self.cache.page_size,
            granularity=self.cache.granularity,
            max_running_requests=self.config.max_running_requests,
            chunked_prefill_size=self.config.chunked_prefill_size,
            eviction_policy=self.config.radix_eviction_policy,
        )
        prompts = [request.prompt_ids for request in requests]
        plan = plan_batch(prompts, [request.namespace for request in requests], output_lens, capacity, cached_lens)
        kept_tokens = plan.prompt_tokens - plan.bound + sum(output_lens) + len(requests) * self.cache.page_size
        if kept_tokens <= self.cache.num_total * self.cache.page_size:
            # Nothing is evicted in any order, and neighbours cannot copy the page that one of them is filling.
            return replace(plan, order=np.arange(len(requests)))
        return plan

    def _stream(self, requests: list[Request], single: bool) -> Iterator[dict[str, Any]]:
        """Yield each output's state when it has changed; abort them if the caller stops iterating.

        The first item is empty: whoever makes the generator takes it, so that it has begun.
        """
        changed: SimpleQueue[Output] = SimpleQueue()
        outputs = self._outputs(requests, changed.put, each_token=True)
        abandon = self._abandoning(outputs)
        delivery = Delivery(outputs, single=single)
        try:
            self._loop.call(partial(self._core.submit, outputs))
            yield {}
            while not delivery.done:
                result = delivery.take(changed.get())
                if result is not None:
                    yield result
        finally:
            if not delivery.done:
                abandon()

    async def _async_stream(
        self, requests: list[Request], single: bool, *, each_token: bool
    ) -> AsyncIterator[dict[str, Any]]:
        changed: asyncio.Queue[Output] = asyncio.Queue()
        put = partial(asyncio.get_running_loop().call_soon_threadsafe, changed.put_nowait)
        outputs = self._outputs(requests, put, each_token=each_token)
        abandon = self._abandoning(outputs)
        delivery = Delivery(outputs, single=single)
        try:
            await asyncio.wrap_future(self._loop.send(partial(self._core.submit, outputs)))
            while not delivery.done:
                result = delivery.take(await changed.get())
                if result is not None:
                    yield result
        finally:
            if not delivery.done:
                abandon()

    def _outputs(self, requests: list[Request], tell: Callable[[Output], Any], *, each_token: bool) -> list[Output]:
        return [Output(request, self.tokenizer, tell, tell_each_token=each_token) for request in requests]

    def _abandoning(self, outputs: list[Output]) -> Callable[[], None]:
        """What a caller who stops waiting calls. Made before: at the exit of the interpreter names are gone."""
        return partial(self._loop.post, partial(self._core.abandon, outputs))


def _score(meta: dict[str, Any]) -> dict[str, Any]:
    """One item of `Engine.score`."""
    logprobs = [value for value, _, _ in meta["input_token_logprobs"]]
    token_ids = [token_id for _, token_id, _ in meta["input_token_logprobs"]]
    return {
        "logprob": sum(logprobs),
        "token_logprobs": logprobs,
        "token_ids": token_ids,
        "is_greedy": token_ids == [top[0][1] for top in meta["input_top_logprobs"]],
        "cached_tokens": meta["cached_tokens"],
    }
