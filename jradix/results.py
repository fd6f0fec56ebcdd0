"""Queues the requests of one call, and gives their results as its caller wants them: at the end, or as they grow."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from queue import SimpleQueue
from typing import Any

import numpy as np

from jradix.core import Core
from jradix.delivery import Delivery
from jradix.offline import BatchPlan, plan_batch
from jradix.offline_prediction import Capacity
from jradix.output import Output
from jradix.progress import BatchProgress
from jradix.replicas import Replicas
from jradix.request import Request
from jradix.tokenizer import Tokenizer


def run(
    replicas: Replicas, requests: Sequence[Request], tokenizer: Tokenizer | None, *, show_progress: bool | None
) -> list[dict[str, Any]]:
    """The results of all, in the order of the requests."""
    ended: SimpleQueue[Output] = SimpleQueue()
    outputs = [Output(request, tokenizer, ended.put) for request in requests]
    abandon = replicas.abandoning(outputs)
    delivery = Delivery(outputs, single=True)
    plan = _plan(replicas, requests)
    order = range(len(outputs)) if plan is None else plan.order.tolist()
    results: dict[str, dict[str, Any]] = {}
    with BatchProgress(len(outputs), plan, show=show_progress) as progress:
        try:
            replicas.submit([outputs[place] for place in order]).result()
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
    return [results[request.id] for request in requests]


def stream(
    replicas: Replicas, requests: Sequence[Request], tokenizer: Tokenizer | None, *, single: bool
) -> Iterator[dict[str, Any]]:
    """Yield each output's state when it has changed; abort them if the caller stops iterating.

    The first item is empty: whoever makes the generator takes it, so that it has begun.
    """
    changed: SimpleQueue[Output] = SimpleQueue()
    outputs = [Output(request, tokenizer, changed.put, tell_each_token=True) for request in requests]
    abandon = replicas.abandoning(outputs)
    delivery = Delivery(outputs, single=single)
    try:
        replicas.submit(outputs).result()
        yield {}
        while not delivery.done:
            result = delivery.take(changed.get())
            if result is not None:
                yield result
    finally:
        if not delivery.done:
            abandon()


async def async_stream(
    replicas: Replicas, requests: Sequence[Request], tokenizer: Tokenizer | None, *, single: bool, each_token: bool
) -> AsyncIterator[dict[str, Any]]:
    """As `stream`, without the first item; or with `each_token` false only each output's last state."""
    changed: asyncio.Queue[Output] = asyncio.Queue()
    put = partial(asyncio.get_running_loop().call_soon_threadsafe, changed.put_nowait)
    outputs = [Output(request, tokenizer, put, tell_each_token=each_token) for request in requests]
    abandon = replicas.abandoning(outputs)
    delivery = Delivery(outputs, single=single)
    try:
        await asyncio.wrap_future(replicas.submit(outputs))
        while not delivery.done:
            result = delivery.take(await changed.get())
            if result is not None:
                yield result
    finally:
        if not delivery.done:
            abandon()


def _plan(replicas: Replicas, requests: Sequence[Request]) -> BatchPlan | None:
    """In which order to start a batch, if they cannot all run at once and the cache may help.

    Several replicas count as one with the room of all: each runs its part of the batch in this order.
    """
    config, cache, count = replicas.config, replicas.cores[0].cache, len(replicas)
    if len(requests) <= config.max_running_requests * count or not cache.enabled:
        return None
    found, output_shares = zip(*replicas.call_each(partial(Core.forecast, requests=requests)), strict=True)
    cached_lens = [lens for lens in found if lens is not None]
    output_lens = [ceil(request.max_new_tokens * max(output_shares)) for request in requests]
    capacity = Capacity(
        num_pages=cache.num_total * count,
        page_size=cache.page_size,
        granularity=cache.granularity,
        max_running_requests=config.max_running_requests * count,
        chunked_prefill_size=config.chunked_prefill_size * count,
        eviction_policy=config.radix_eviction_policy,
    )
    prompts = [request.prompt_ids for request in requests]
    plan = plan_batch(
        prompts,
        [request.namespace for request in requests],
        output_lens,
        capacity,
        np.max(cached_lens, axis=0).tolist() if cached_lens else None,
    )
    kept_tokens = plan.prompt_tokens - plan.bound + sum(output_lens) + len(requests) * cache.page_size
    if kept_tokens <= capacity.num_pages * cache.page_size:
        # Nothing is evicted in any order, and neighbours cannot copy the page that one of them is filling.
        return replace(plan, order=np.arange(len(requests)))
    return plan
