"""The engine as its users see it: generate in several ways, abort, and look after the cache and the weights."""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from functools import partial
from importlib import metadata
from typing import Any, Self, Unpack, get_args

import numpy as np

from jradix import mesh, results, startup, validation
from jradix.cache.prefix_cache import PrefixCache
from jradix.config import EngineConfig
from jradix.core import Core, PauseMode
from jradix.logit_processor import LogitProcessor
from jradix.loop import ShutDownError
from jradix.output import Output
from jradix.processes import connect, join
from jradix.replicas import Replicas
from jradix.reports import combined_cache_report, combined_info
from jradix.request_options import RequestOptions
from jradix.runner import Runner
from jradix.sampling_params import Params
from jradix.scheduler import Scheduler
from jradix.submission import Submission, TokenIds

LOG = logging.getLogger(__name__)


class Engine:
    """Runs a model on one device or several, sharing the KV of common prefixes between all requests it has ever seen.

    The model runs on a thread of its own, with `dp_size` each of its replicas. Every method may be called from any
    thread, from an interrupt or within a running event loop, and all requests alive on a replica share the same steps.

    Attributes:
        replicas: what the requests run on.
    """

    def __init__(self, config: EngineConfig | None = None, **options: Any) -> None:
        """Load a model. Give an `EngineConfig`, or its fields as keywords.

        Raises:
            ValueError: an option or the model's files are wrong; the message names which. Or this is not process 0 of
                several, which alone has an engine.
        """
        self.config = _joined(EngineConfig.given(config, options))
        parts_of_each = startup.build(self.config, connect(self.config))
        parts = parts_of_each[0]  # the replicas differ in the runner alone
        self.tokenizer, self.model_config = parts.tokenizer, parts.model_config
        self.context_length, self.model_files = parts.context_length, parts.model_files
        self._submission = Submission(
            self.tokenizer,
            vocab_size=self.model_config.vocab_size,
            context_length=self.context_length,
            eos_ids=parts.eos_ids,
            pool_tokens=(parts.layout.num_pages - 1) * self.config.page_size,
            random_seed=self.config.random_seed,
        )
        self.replicas = Replicas(self.config, parts_of_each)
        self._core = self.replicas.cores[0]
        if self.config.cache_dir is not None:
            self.replicas.open_caches(validation.directory("cache_dir", self.config.cache_dir))
        if self.config.warmup:
            self.warm_up()
        self.replicas.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def cache(self) -> PrefixCache:
        """Of the first replica, to look at between requests; see `hold`."""
        return self._core.cache

    @property
    def scheduler(self) -> Scheduler:
        """Of the first replica, to look at between requests; see `hold`."""
        return self._core.scheduler

    @property
    def runner(self) -> Runner:
        """Of the first replica, to look at between requests; see `hold`."""
        return self._core.runner

    def warm_up(self) -> float:
        """Compile every bucket, with a progress bar; returns the seconds it took."""
        return self.replicas.warm_up()

    def register_processor(self, processor: LogitProcessor) -> None:
        """Admit a logit processor: before a strict warm-up, which compiles those it knows by then.

        Raises:
            ValueError: see `Runner.register_processor`.
        """
        self.replicas.call_each(lambda core: core.runner.register_processor(processor))

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
        if stream:
            growing = results.stream(self.replicas, requests, self.tokenizer, single=single)
            next(growing)  # enter it: closing a generator that never started would leave its requests alive
            return growing
        finished = results.run(self.replicas, requests, self.tokenizer, show_progress=show_progress)
        return finished[0] if single else finished

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
        growing = results.async_stream(self.replicas, requests, self.tokenizer, single=single, each_token=stream)
        if stream:
            return growing
        finished: list[dict[str, Any]] = [{}] * len(requests)
        async for result in growing:
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
        if not validation.is_sequence(continuations) or not len(continuations):
            raise ValueError(
                f"continuations must be a list of texts or of lists of ids, not empty, got {continuations!r}"
            )
        prompt_ids = self._submission.token_ids(prompt)
        each = [self._submission.token_ids(continuation, begins=False) for continuation in continuations]
        scored = self.generate(
            input_ids=[np.concatenate([prompt_ids, ids]) for ids in each],
            sampling_params={"max_new_tokens": 0},
            return_logprob=True,
            logprob_start_len=len(prompt_ids),
            top_logprobs_num=1,
            cache_salt=cache_salt,
        )
        for result in scored:
            reason = result["meta_info"]["finish_reason"]
            if reason["type"] == "abort":
                raise RuntimeError(f"the scores are not complete: {reason['message']}")
        return [_score(result["meta_info"]) for result in scored]

    def abort_request(self, rid: str) -> bool:
        """End a live request, or all samples of a prompt or all prompts of a list that this id was given for.

        Their results have finish reason "abort". False if none is alive.
        """
        if not isinstance(rid, str):
            raise ValueError(f"rid must be the id of one request, a string, got {rid!r}")
        return any(self.replicas.call_each(partial(Core.abort, rid=rid)))

    def flush_cache(self) -> int:
        """Forget every cached prefix that no running request holds; returns the number of pages freed."""
        return self.replicas.flush_cache()

    def cache_report(self) -> dict[str, Any]:
        """How the prefix cache has done since the engine started, and what it holds: counters of requests and of
        asked, hit, inserted, evicted and flushed tokens, hit rates, and the number of pages in each state.

        With several replicas these are sums, and `replicas` is a list of what each of them reports.
        """
        return combined_cache_report(self.replicas.call_each(Core.cache_report))

    def save_cache(self, directory: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """Save what the prefix cache holds, for an engine that starts with this directory as its `cache_dir`.

        Saved is what it holds now. Steps go on meanwhile: they wait only while a piece of at most 64 MiB is read from
        the device. A snapshot that was there is replaced, whole or, if this fails, not at all. It tells who may read
        the directory every cached prompt, and every salt. Several replicas are saved one after the other.

        directory: if not given, `cache_dir`. Returns `pages`, `tokens`, `bytes` and `files` written, and `seconds`.

        Raises:
            ValueError: there is no directory, or it is no path.
            RuntimeError: the last update of the weights has failed; or the cache was flushed, the weights were
                updated, or a step failed while it was saved.
            OSError: it cannot be written.
        """
        target = self.config.cache_dir if directory is None else directory
        if target is None:
            raise ValueError("directory must be given, as this engine has no cache_dir")
        saved = self.replicas.save_caches(validation.directory("directory", target))
        return {name: sum(report[name] for report in saved) for name in saved[0]}

    def get_server_info(self) -> dict[str, Any]:
        """The configuration, what was made of it, and what runs now.

        With several replicas numbers are sums, and `replicas` is a list of those of each.
        """
        return {
            **asdict(self.config),
            "version": metadata.version("jradix"),
            "device": mesh.device_description(),
            "architecture": self.model_config.architecture,
            "max_context_length": self.context_length,
            "vocab_size": self.model_config.vocab_size,
            **combined_info(self.replicas.call_each(Core.info)),
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
        replace = startup.weights_to_replace(self.config, self.model_config, weights, self._core.runner.parameters)
        with self.replicas.hold_all() as cores, ExitStack() as updates:
            self.replicas.forget()
            for runner in [updates.enter_context(core.new_weights()) for core in cores]:  # which fail together
                runner.replace_parameters(replace)
        return self._core.weight_version

    def pause_generation(self, mode: PauseMode = "retract") -> None:
        """Launch no more steps until `continue_generation`; who waits for results goes on waiting.

        mode: what becomes of the requests that run. "retract": they give up their pages and are computed again, as far
        as these are not cached; "in_place": they keep them; "abort": all requests end, those that wait too.
        """
        if mode not in get_args(PauseMode):
            raise ValueError(f"mode must be one of {', '.join(get_args(PauseMode))}, got {mode!r}")
        self.replicas.call_each(partial(Core.pause, mode=mode))

    def continue_generation(self) -> None:
        """Go on after `pause_generation`."""
        self.replicas.call_each(Core.resume)

    def check_idle(self) -> None:
        """Raise unless nothing runs and every page is free or evictable: what must hold between requests."""
        self.replicas.call_each(Core.check_idle)

    def prepare(
        self,
        input_ids: Sequence[TokenIds],
        sampling_params: Params | Sequence[Params] | None,
        tell: Callable[[Output], None],
        *,
        each_token: bool,
        **options: Unpack[RequestOptions],
    ) -> list[Output]:
        """Check requests, for a caller who waits for nothing: ``replicas.submit(outputs)`` queues them.

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

    def send[T](self, function: Callable[[Core], T], replica: int = 0) -> Future[T]:
        """Run `function` on a replica's thread, between two steps, and do not wait for it.

        Raises:
            ShutDownError: there is no such thread any more.
        """
        return self.replicas.loops[replica].send(partial(function, self.replicas.cores[replica]))

    @property
    def stalled_seconds(self) -> float:
        """For how long there has been something to do and nothing was done; a step may take its time."""
        return self.replicas.stalled_seconds

    def hold(self, replica: int = 0) -> AbstractContextManager[Core]:
        """Lend a replica's state to this thread, between two steps: to inspect it, or to step by hand.

        Inside the `with` block the engine's other methods would wait for ever.
        """
        return self.replicas.loops[replica].hold()

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
            self.replicas.close()


def _joined(config: EngineConfig) -> EngineConfig:
    if config.node_rank == 0:
        config = join(config)
    if config.node_rank:
        raise ValueError(
            f"node_rank must be 0 for an Engine, got {config.node_rank}: call jradix.follow with the same arguments, "
            "which runs what process 0 runs, and returns True when that is done"
        )
    return config


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
