"""Drives an engine's steps one by one, showing what each was asked and what it gave."""

from collections.abc import Callable, Iterator
from typing import Any

from jradix import Engine
from jradix.batch import build_arrays, build_copies, row_indices, step_shape
from jradix.request import FinishReason, Request
from jradix.runner import Collected
from jradix.sampling_batch import SamplingInputs, build_sampling_inputs
from jradix.schedule_plan import StepPlan
from tests.tiny_engine import greedy


def requests_for(engine: Engine, prompts: list[list[int]], max_new_tokens: int = 1, **options: Any) -> list[Request]:
    """Greedy requests with these `RequestOptions`."""
    requests, _ = engine._submission.requests(None, prompts, greedy(max_new_tokens), **options)
    return requests


def steps(
    engine: Engine, requests: list[Request], change: Callable[[SamplingInputs, int], None] = lambda inputs, rows: None
) -> Iterator[tuple[StepPlan, list[int], SamplingInputs, Collected]]:
    """Each step of the requests: plan, places of its rows, what was asked and what came.

    `change` may alter what is asked; it is given the number of rows too.
    """
    runner, scheduler = engine.runner, engine.scheduler
    for request in requests:
        scheduler.add(request)
    while (plan := scheduler.plan(in_flight=False)) is not None:
        shape = step_shape(plan, engine._core.buckets)
        arrays = build_arrays(
            plan, shape, scheduler.page_tables, engine.config.page_size, engine._core.layout.num_pages
        )
        runner.launch_forward(shape, arrays, build_copies(plan, runner.max_copies))
        inputs = build_sampling_inputs(plan, shape, runner.features.max_prompt_logprobs)
        change(inputs, shape.rows)
        collected = runner.collect(runner.launch_sampling(inputs))
        places = row_indices(plan, shape)
        for place, row in zip(places, plan.rows, strict=True):
            if row.samples:
                row.request.output_ids.append(int(collected.tokens[place]))
        yield plan, places, inputs, collected
        for row in plan.rows:
            if len(row.request.output_ids) == row.request.max_new_tokens:
                scheduler.finish(row.request, FinishReason("length"))
