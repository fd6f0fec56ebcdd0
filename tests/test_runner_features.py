"""What requests may ask of their logits, through the compiled step: penalties, biases, masks, processors, reports."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jradix import Engine
from jradix.batch import first_tokens, step_shape
from jradix.logit_processor import MAX_PROCESSORS, ProcessorRow
from jradix.runner import Runner
from jradix.sampling_batch import SamplingInputs, allow_all
from tests.step_driver import requests_for, steps
from tests.test_logits import expected as penalized
from tests.test_logprobs import log_softmax
from tests.tiny_engine import Golden, greedy, logits_after, output_ids, start

PROMPT = [5, 6, 7, 8, 9, 10, 11]


@pytest.fixture(scope="module")
def shared_engine(tiny_path: Callable[[str], Path]) -> Engine:
    return start(tiny_path("llama"))


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    shared_engine.flush_cache()
    yield shared_engine
    shared_engine.check_idle()


@pytest.mark.parametrize("first", [0, 1, 30, 56, 57])
def test_prompts_have_the_log_probabilities_of_transformers(
    engine: Engine, tiny_path: Callable[[str], Path], first: int
) -> None:
    """Three prompts in chunks of at most 64 tokens, beside one that reports nothing and one that decodes."""
    golden = Golden(tiny_path("llama"))
    want = log_softmax(golden.logits)
    requests = requests_for(
        engine,
        golden.prompts,
        return_logprob=True,
        logprob_start_len=first,
        top_logprobs_num=3,
        token_ids_logprob=[0, 9],
    )
    silent = requests_for(engine, [PROMPT, [3] * 20], max_new_tokens=4)
    found: dict[tuple[int, int], tuple[float, int, list[int], list[float]]] = {}
    for plan, _, inputs, collected in steps(engine, [silent[0], *requests, silent[1]]):
        asked, got = inputs.prompt_logprobs, collected.prompt_logprobs
        assert (asked is None) == (got is None)
        if asked is None or got is None:
            continue
        for row, position, offset, num_tokens in asked.spans:
            prompt = requests.index(plan.rows[row].request)
            for at in range(num_tokens):
                numbers = (got.chosen, got.rank, got.top_ids, got.given)
                assert (prompt, position + at) not in found
                found[prompt, position + at] = tuple(array[offset + at].tolist() for array in numbers)
    assert sorted(found) == [(prompt, at) for prompt in range(3) for at in range(max(first, 1), 57)]
    for (prompt, at), (chosen, rank, top_ids, given) in found.items():
        row = want[prompt, at - 1]
        token = golden.prompts[prompt][at]
        assert chosen == pytest.approx(row[token], abs=1e-4)
        assert abs(rank - 1 - (row > row[token]).sum()) <= 1, "two nearly equal ones may change places"
        assert row[top_ids[:3]] == pytest.approx(np.sort(row)[::-1][:3], abs=1e-4)
        assert given[:2] == pytest.approx(row[[0, 9]], abs=1e-4)


def test_sampled_tokens_report_the_model_itself_whatever_is_done_to_their_logits(
    engine: Engine, tiny_path: Callable[[str], Path]
) -> None:
    golden = Golden(tiny_path("llama"))
    want = log_softmax(golden.logits[:, -1])
    allowed = 17

    def allow_one_token(inputs: SamplingInputs, rows: int) -> None:
        inputs.mask = allow_all(rows, 320)
        inputs.mask[:] = 0
        inputs.mask[:, allowed // 32] = 1 << (allowed % 32)

    for change, tokens in ((None, [ids[0] for ids in golden.greedy_ids]), (allow_one_token, [allowed] * 3)):
        requests = requests_for(engine, golden.prompts, return_logprob=True, top_logprobs_num=5)
        found: dict[int, tuple[float, int, list[float]]] = {}
        driven = steps(engine, requests, change) if change else steps(engine, requests)
        for plan, places, _, collected in driven:
            logprobs = collected.logprobs
            if logprobs is None:
                assert not any(row.samples for row in plan.rows)
                continue
            for place, row in zip(places, plan.rows, strict=True):
                if row.samples:
                    numbers = (logprobs.chosen, logprobs.rank, logprobs.top)
                    found[requests.index(row.request)] = tuple(array[place].tolist() for array in numbers)
        assert [request.output_ids for request in requests] == [[token] for token in tokens]
        for index, token in enumerate(tokens):
            chosen, rank, top = found[index]
            assert chosen == pytest.approx(want[index, token], abs=1e-4)
            assert rank == 1 + (want[index] > want[index, token]).sum()
            assert top[:5] == pytest.approx(np.sort(want[index])[::-1][:5], abs=1e-4)


def penalized_greedily(engine: Engine, prompt: list[int], count: int, params: dict[str, Any]) -> list[int]:
    """What greedy sampling under penalties and biases must give, from the logits after each prefix."""
    output: list[int] = []
    for _ in range(count):
        logits = penalized(logits_after(engine, prompt + output), prompt, output, params)
        for token, bias in params.get("logit_bias", {}).items():
            logits[token] += bias
        output.append(int(logits.argmax()))
    return output


ASKS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3, "frequency_penalty": 0.3},
    {"presence_penalty": 0.8, "repetition_penalty": 1.5, "logit_bias": {17: 2.5, 201: -100.0}},
    {},
    {"frequency_penalty": 1.7},
    {"repetition_penalty": 0.9, "presence_penalty": -0.5},
]


@pytest.mark.parametrize("pool_tokens", [1024, 128])
def test_penalties_count_each_token_once_one_step_ahead_and_through_retractions(
    shared_engine: Engine, tiny_path: Callable[[str], Path], pool_tokens: int
) -> None:
    """The engine launches a step before it has seen the last one's tokens; the small pool retracts."""
    prompts = [PROMPT, [*PROMPT[:-1], 40], [3], PROMPT + [7] * 20, list(range(50, 70))]
    expected = [penalized_greedily(shared_engine, prompt, 24, asks) for prompt, asks in zip(prompts, ASKS, strict=True)]
    engine = start(tiny_path("llama"), max_total_tokens=pool_tokens)
    for _ in range(2):  # the second time all but the last token of each prompt is cached
        found = output_ids(engine, prompts, [greedy(24, **asks) for asks in ASKS])
        assert found == expected
    assert (engine.scheduler.num_retractions > 0) == (pool_tokens == 128)
    engine.check_idle()


def avoid_the_last_token(logits: jax.Array, row: ProcessorRow) -> jax.Array:
    """Never the token before; and the first of the output is the request's number."""
    forced = jnp.where(jnp.arange(len(logits)) == row.params[0].astype(jnp.int32), 1e9, logits)
    logits = jnp.where(row.num_output == 0, forced, logits)
    return logits.at[row.last_token].set(-jnp.inf)


def test_a_processor_sees_tokens_that_the_host_has_not(engine: Engine) -> None:
    engine.runner.register_processor(avoid_the_last_token)
    plain = output_ids(engine, [PROMPT], greedy(12))
    asks = greedy(12, custom_logit_processor=avoid_the_last_token, custom_params=[77])
    found = engine.generate(input_ids=[PROMPT, PROMPT], sampling_params=[asks, greedy(12)])
    processed, beside = (result["output_ids"] for result in found)
    assert beside == plain[0], "a neighbour noticed the processor"
    assert processed[0] == 77
    for index in range(1, 12):
        logits = logits_after(engine, PROMPT + processed[:index]).copy()
        logits[processed[index - 1]] = -np.inf
        assert processed[index] == logits.argmax()


def test_hidden_states_of_each_token_come_if_a_row_asks(engine: Engine) -> None:
    requests = requests_for(engine, [PROMPT, PROMPT[:3]], max_new_tokens=3)
    requests[0].return_hidden_states = True
    shapes = []
    for plan, _, _, collected in steps(engine, requests):
        assert collected.hidden is not None
        shape = step_shape(plan, engine._core.buckets)
        assert collected.hidden.shape == (shape.tokens, engine.model_config.hidden_size)
        starts = first_tokens(plan, shape)
        hidden = [collected.hidden[at : at + row.num_tokens] for at, row in zip(starts, plan.rows, strict=True)]
        shapes.append([len(states) for states in hidden])
        assert all((states != 0).any(axis=1).all() for states in hidden)
    assert sorted(shapes[0]) == [3, 7]
    assert shapes[1:] == [[1, 1], [1, 1]]
    silent = [collected.hidden for *_, collected in steps(engine, requests_for(engine, [PROMPT]))]
    assert silent == [None]


def launches(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts, from here on, what is launched of each kind of program."""
    counts: Counter[str] = Counter()
    names = {id(program): name[0] for name, program in runner.programs.compiled.items()}
    call = jax.stages.Compiled.__call__

    def counted(program: jax.stages.Compiled, *args: Any, **kwargs: Any) -> Any:
        counts[names.get(id(program), "new")] += 1
        return call(program, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Compiled, "__call__", counted)
    return counts


def test_plain_steps_launch_two_programs_and_compile_none_of_the_features(
    tiny_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(tiny_path("llama"))
    kinds = [greedy(5), greedy(5, temperature=1.0, top_p=0.9, seed=3)]
    output_ids(engine, [PROMPT, PROMPT], kinds)
    output_ids(engine, [PROMPT], kinds[:1])
    assert {name[0] for name in engine.runner.programs.compiled} == {"forward", "sampler", "copy of pages"}
    engine.flush_cache()
    with monkeypatch.context() as patch:
        counts = launches(engine.runner, patch)
        output_ids(engine, [PROMPT, PROMPT[::-1]], kinds)
        assert counts == {"forward": 5, "sampler": 5}
    engine.flush_cache()  # cached prompts would take steps of other shapes
    output_ids(engine, [PROMPT, PROMPT[::-1]], [kinds[0], greedy(5, presence_penalty=0.5)])
    with monkeypatch.context() as patch:
        counts = launches(engine.runner, patch)
        engine.flush_cache()
        output_ids(engine, [PROMPT, PROMPT[::-1]], [kinds[0], greedy(5, presence_penalty=0.5)])
        assert counts == {"forward": 5, "sampler": 5, "penalties": 5, "set counts": 1}


def test_only_so_many_processors_are_taken_and_only_such_as_can_be_told_apart(engine: Engine) -> None:
    register = engine.runner.register_processor
    known = len(engine.runner.features.processors)
    processors = [lambda logits, row, index=index: logits + index for index in range(MAX_PROCESSORS)]
    for processor in processors[known:]:
        register(processor)
        register(processor)
    with pytest.raises(ValueError, match=r"at most 8 different functions.*custom_params"):
        register(processors[0] if known else lambda logits, row: logits)
    with pytest.raises(ValueError, match="must be hashable"):
        register([])  # pyright: ignore[reportArgumentType]
    register(processors[-1])
    engine.runner.features.processors.clear()


def test_after_a_failed_step_nothing_is_counted(engine: Engine) -> None:
    expected = output_ids(engine, [PROMPT], greedy(6, frequency_penalty=1.0))
    before = engine.runner.features.counts
    assert before is not None
    engine.runner.reset()
    assert engine.runner.features.counts is None
    engine.flush_cache()
    assert output_ids(engine, [PROMPT], greedy(6, frequency_penalty=1.0)) == expected


def test_counts_are_updated_in_place(engine: Engine) -> None:
    output_ids(engine, [PROMPT], greedy(3, frequency_penalty=1.0))
    counts = engine.runner.features.counts
    assert counts is not None
    programs = engine.runner.programs.compiled
    for name in (("set counts",), next(name for name in programs if name[0] == "penalties")):
        memory = programs[name].memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes == counts.nbytes, name
    output_ids(engine, [PROMPT[:2]], greedy(3, frequency_penalty=1.0))
    assert counts.is_deleted()
