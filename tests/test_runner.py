"""The compiled step: its pool is updated in place, and after the warm-up nothing is compiled."""

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import pytest

from jradix import Engine, SamplingParams
from jradix.aot import copied_shapes
from jradix.config import StepShape
from jradix.delivery import StepFailedError
from jradix.logit_processor import ProcessorRow
from jradix.logprobs import LOGPROB_WIDTHS
from jradix.programs import UnplannedCompilationError
from jradix.sampling_batch import SamplingInputs, allow_all
from tests.step_driver import requests_for, steps
from tests.tiny_engine import (
    compile_quickly,
    counted_compilations,
    greedy,
    output_ids,
    prompts_with_shared_prefixes,
    start,
    write_dummy_model,
)

DECODE, MIXED = StepShape(4, 0, 0, 24), StepShape(4, 16, 2, 24)


@pytest.mark.parametrize("layer_loop", [pytest.param("unroll", marks=pytest.mark.thorough), "scan"])
def test_the_pool_is_updated_in_place(layer_loop: Literal["unroll", "scan"], tiny_path: Callable[[str], Path]) -> None:
    engine = start(tiny_path("llama"), optimized=True, layer_loop=layer_loop, max_total_tokens=2**16)
    pool = engine.runner.pool
    for shape in (DECODE, MIXED):
        program = engine.runner.compiled_forward(shape)
        memory = program.memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes == pool.nbytes
        assert memory.temp_size_in_bytes < pool.nbytes / 8
        assert "copy" in (program.as_text() or ""), "`copied_shapes` looks for another spelling of copies"
        assert tuple(sorted(pool.shape)) not in copied_shapes(program)
        assert all(prod(shape) < pool.size / 8 for shape in copied_shapes(program))


def test_a_launched_step_takes_the_old_pool(tiny_engine: Engine) -> None:
    before = tiny_engine.runner.pool
    output_ids(tiny_engine, [[3, 4]], greedy(1))
    assert before.is_deleted()
    assert tiny_engine.runner.pool.shape == before.shape


def twice(logits: jax.Array, row: ProcessorRow) -> jax.Array:
    return 2 * logits


@pytest.fixture(scope="module")
def warm_engine(tmp_path_factory: pytest.TempPathFactory, tiny_path: Callable[[str], Path]) -> Engine:
    """One layer of random weights, and all buckets of two rows and chunks of two tokens."""
    path = tmp_path_factory.mktemp("one_layer")
    write_dummy_model(tiny_path("llama"), path, num_hidden_layers=1)
    engine = Engine(
        model_path=str(path),
        load_format="dummy",
        dtype="float32",
        skip_tokenizer_init=True,
        page_size=4,
        max_total_tokens=128,
        context_length=96,
        max_running_requests=2,
        chunked_prefill_size=2,
        strict_compile=True,
    )
    compile_quickly(engine)
    engine.register_processor(twice)
    engine.warm_up()
    return engine


def test_nothing_is_compiled_after_the_warm_up(warm_engine: Engine) -> None:
    """200 requests of every kind: greedy and sampled, cached and not, in a pool that evicts and retracts."""
    prompts = prompts_with_shared_prefixes(200, 320, seed=3)
    kinds = [
        greedy(4),
        SamplingParams(temperature=1.0, seed=1, max_new_tokens=5),
        SamplingParams(top_k=3, top_p=0.9, min_p=0.1, max_new_tokens=7, min_new_tokens=3),
        greedy(0),
        greedy(9, stop_token_ids=[5]),
    ]
    num_compiled = warm_engine.runner.num_compiled
    with counted_compilations() as compilations:
        output_ids(warm_engine, prompts, [kinds[index % len(kinds)] for index in range(200)])
        warm_engine.flush_cache()
        stream = warm_engine.generate(input_ids=prompts[:3], sampling_params=kinds[1], stream=True)
        next(stream)
        stream.close()
    assert compilations == []
    assert warm_engine.runner.num_compiled == num_compiled
    warm_engine.check_idle()


def test_a_strict_warm_up_compiles_every_feature_and_no_more_programs_than_the_runner_says(warm_engine: Engine) -> None:
    shapes = warm_engine._core.buckets.shapes()
    rows, tokens = {shape.rows for shape in shapes}, {shape.tokens for shape in shapes if shape.extend_tokens}
    plain = len(shapes) + 2 * len(rows) + 1
    features = len(rows) * (3 + 1 + len(LOGPROB_WIDTHS)) + 5 + len(tokens) + len(LOGPROB_WIDTHS)
    assert warm_engine.runner.num_compiled == plain + features

    asks: list[dict[str, Any]] = [
        {"presence_penalty": 1.0},
        {"logit_bias": {3: 1.0}},
        {"custom_logit_processor": twice},
        {"custom_logit_processor": twice, "frequency_penalty": 1.0, "temperature": 1.0},
    ]
    prompts = [[index, 5, 9] for index in range(8)]

    def mask(inputs: SamplingInputs, rows: int) -> None:
        inputs.mask = allow_all(rows, 320)

    with counted_compilations() as compilations:
        output_ids(warm_engine, prompts, [greedy(4, **asks[index % 4]) for index in range(8)])
        for width in LOGPROB_WIDTHS:
            warm_engine.flush_cache()
            requests = requests_for(
                warm_engine,
                prompts[:3],
                return_hidden_states=True,
                return_logprob=True,
                logprob_start_len=0,
                top_logprobs_num=width,
            )
            assert all(
                collected.logprobs or collected.prompt_logprobs for *_, collected in steps(warm_engine, requests, mask)
            )
    assert compilations == []
    assert warm_engine.runner.num_compiled == plain + features
    warm_engine.check_idle()


def test_a_strict_runner_takes_no_new_processor_after_the_warm_up(warm_engine: Engine) -> None:
    warm_engine.runner.register_processor(twice)
    with pytest.raises(ValueError, match=r"came after the warm-up.*register_processor first"):
        warm_engine.runner.register_processor(lambda logits, row: logits)


def test_compilations_are_counted() -> None:
    with counted_compilations() as compilations:
        jax.jit(lambda x: x * 3 + 1)(np.ones(17))
    assert compilations


def test_a_strict_runner_refuses_to_compile_what_the_warm_up_left_out(warm_engine: Engine) -> None:
    with pytest.raises(UnplannedCompilationError, match="decode_rows=3"):
        warm_engine.runner.compiled_forward(StepShape(3, 0, 0, 24))
    expected = output_ids(warm_engine, [[3, 4, 5]], greedy(3))
    name = ("forward", StepShape(1, 0, 0, 24))
    forgotten = warm_engine.runner.programs.compiled.pop(name)
    with pytest.raises(StepFailedError, match="was not compiled by the warm-up"):
        output_ids(warm_engine, [[3, 4, 5]], greedy(3))
    warm_engine.runner.programs.compiled[name] = forgotten
    warm_engine.check_idle()
    assert output_ids(warm_engine, [[3, 4, 5]], greedy(3)) == expected


def test_replace_pool_wants_the_same_shape(tiny_engine: Engine) -> None:
    with pytest.raises(AssertionError):
        tiny_engine.runner.replace_pool(tiny_engine.runner.pool[1:])
