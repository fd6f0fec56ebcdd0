"""What changes the tokens that `generate` gives, against oracles: samples, penalties, grammars, logit processors.

How each is computed is tested where it is; here it runs with caches, chunks, retractions and neighbours.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jradix import Engine
from jradix.logit_processor import ProcessorRow
from jradix.scheduler import Scheduler
from tests.test_engine_reports import ATOL, PROMPTS, asked, values
from tests.test_logits import expected as penalized
from tests.tiny_engine import counted_compilations, greedy, logits_after, output_ids, paused, sampled


class StepCount:
    """Steps that were planned, and prompt tokens computed in them, while it is in place."""

    def __init__(self, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = self.prompt_tokens = 0
        plan = scheduler.plan

        def counted(**arguments: Any) -> Any:
            planned = plan(**arguments)
            if planned is not None:
                self.steps += 1
                for row in planned.rows:
                    self.prompt_tokens += max(0, min(row.start + row.num_tokens, row.request.prompt_len) - row.start)
            return planned

        monkeypatch.setattr(scheduler, "plan", counted)


# Several samples of a prompt.


def test_samples_are_the_requests_with_the_next_seeds_in_order(tiny_engine: Engine) -> None:
    results = tiny_engine.generate(
        input_ids=PROMPTS[:3],
        sampling_params=[sampled(n=3), greedy(12, n=2), sampled(seed=2**32 - 1, n=2)],
        rid=["a", "b", "c"],
    )
    assert [result["meta_info"]["id"] for result in results] == ["a-0", "a-1", "a-2", "b-0", "b-1", "c-0", "c-1"]
    alone = [(0, sampled(seed=seed)) for seed in (7, 8, 9)] + [(1, greedy(12))] * 2
    alone += [(2, sampled(seed=seed)) for seed in (2**32 - 1, 0)]
    expected = [output_ids(tiny_engine, [PROMPTS[prompt]], params)[0] for prompt, params in alone]
    assert [result["output_ids"] for result in results] == expected
    assert len({tuple(ids) for ids in expected[:3]}) == 3


def test_several_samples_of_a_single_prompt_are_a_list(tiny_engine: Engine) -> None:
    results = tiny_engine.generate("abcd", greedy(4, n=2))
    assert [result["text"] for result in results] == [tiny_engine.generate("abcd", greedy(4))["text"]] * 2


def test_samples_compute_whole_pages_of_their_prompt_once(tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages hold 4 tokens: each of 5 samples computes the 3 after the 13 whole pages anew, or copies some of them."""
    prompt = [*range(30, 85)]
    with monkeypatch.context() as patch:
        count = StepCount(tiny_engine.scheduler, patch)
        results = tiny_engine.generate(input_ids=prompt, sampling_params=sampled(2, n=5))
        assert 52 + 3 + 4 <= count.prompt_tokens <= 52 + 5 * 3
    assert all(result["meta_info"]["cached_tokens"] >= 52 for result in results[1:])


def test_an_abort_by_the_id_of_a_prompt_ends_all_its_samples_and_one_by_its_own_that_one(tiny_engine: Engine) -> None:
    params = [greedy(20, n=3), greedy(20, n=2)]
    with paused(tiny_engine):
        stream = tiny_engine.generate(input_ids=PROMPTS[:2], sampling_params=params, rid=["x", "y"], stream=True)
        assert tiny_engine.abort_request("x")
        assert tiny_engine.abort_request("y-1")
        assert not tiny_engine.abort_request("x")
    ends = {item["meta_info"]["id"]: item["meta_info"]["finish_reason"] for item in stream}
    aborted = {rid for rid, reason in ends.items() if reason is not None and reason["type"] == "abort"}
    assert ends.keys() - aborted == {"y-0"}
    assert aborted == {"x-0", "x-1", "x-2", "y-1"}


def test_an_abort_by_the_id_of_a_list_of_prompts_ends_them_all(tiny_engine: Engine) -> None:
    params = [greedy(20), greedy(20, n=2), greedy(20)]
    for rid, left in (("r", set[str]()), ("r-1", {"r-0", "r-2"}), ("r-2", {"r-0", "r-1-0", "r-1-1"})):
        with paused(tiny_engine):
            stream = tiny_engine.generate(input_ids=PROMPTS[:3], sampling_params=params, rid="r", stream=True)
            with pytest.raises(ValueError, match="'r' belongs to a request that is still running"):
                tiny_engine.generate(input_ids=PROMPTS[0], rid="r")
            neighbour = tiny_engine.generate(input_ids=PROMPTS[3], sampling_params=greedy(3), rid="r-10", stream=True)
            assert not tiny_engine.abort_request("r-")
            assert tiny_engine.abort_request(rid)
        ends = {item["meta_info"]["id"]: item["meta_info"]["finish_reason"] for item in stream}
        assert ends.keys() == {"r-0", "r-1-0", "r-1-1", "r-2"}
        assert {name for name, reason in ends.items() if reason is not None and reason["type"] == "length"} == left
        assert list(neighbour)[-1]["meta_info"]["finish_reason"]["type"] == "length"


def test_samples_stream_and_stay_within_grammars_each_by_itself(tiny_engine: Engine) -> None:
    params = sampled(n=4, regex="[a-z]{4,9}")
    whole = tiny_engine.generate(
        input_ids=PROMPTS[:2], sampling_params=params, return_logprob=True, logprob_start_len=0
    )
    assert all(re.fullmatch("[a-z]{4,9}", result["text"]) for result in whole)
    assert len({result["text"] for result in whole[:4]}) > 1
    last = {
        item["index"]: item for item in tiny_engine.generate(input_ids=PROMPTS[:2], sampling_params=params, stream=True)
    }
    assert [last[index]["text"] for index in range(8)] == [result["text"] for result in whole]
    for result in whole:
        meta = result["meta_info"]
        first = whole[4 * (PROMPTS.index([id_ for _, id_, _ in meta["input_token_logprobs"]]))]["meta_info"]
        np.testing.assert_allclose(
            values(meta["input_token_logprobs"]), values(first["input_token_logprobs"]), atol=ATOL
        )
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]


# Penalties and biases.


def chosen_by_numpy(engine: Engine, prompt: list[int], count: int, asks: dict[str, Any]) -> list[int]:
    """Greedy tokens from the model's logits after each prefix, by the documented formula."""
    output: list[int] = []
    for _ in range(count):
        logits = penalized(logits_after(engine, prompt + output), prompt, output, asks)
        for token, bias in asks.get("logit_bias", {}).items():
            logits[token] += bias
        output.append(int(logits.argmax()))
    return output


ASKS: list[dict[str, Any]] = [
    {"frequency_penalty": 1.5, "logit_bias": {30: 2.0, 100: -50.0}},
    {},
    {"presence_penalty": 1.0, "repetition_penalty": 1.4},
    {},
    {"repetition_penalty": 0.7, "frequency_penalty": -0.5},
    {"logit_bias": dict.fromkeys(range(300), 1.5)},
]


def test_penalties_choose_what_the_formula_does_whether_cached_or_retracted(
    tiny_engine: Engine, small_pool: Engine
) -> None:
    """Besides neighbours without any; the second time all but one token of each prompt is cached."""
    params = [greedy(24, **asks) for asks in ASKS]
    expected = [chosen_by_numpy(tiny_engine, prompt, 24, asks) for prompt, asks in zip(PROMPTS, ASKS, strict=False)]
    plain = output_ids(tiny_engine, PROMPTS[:6], greedy(24))
    assert expected[1] == plain[1]
    assert all(expected[index] != plain[index] for index in (0, 2, 4, 5))
    for _ in range(2):
        assert output_ids(tiny_engine, PROMPTS[:6], params) == expected
    retractions = small_pool.scheduler.num_retractions
    assert output_ids(small_pool, PROMPTS[:6], params) == expected
    assert small_pool.scheduler.num_retractions > retractions
    small_pool.check_idle()


def test_the_strongest_biases_ban_and_force(tiny_engine: Engine) -> None:
    plain = output_ids(tiny_engine, PROMPTS[:1])[0]
    for params in (greedy, sampled):
        banned = output_ids(tiny_engine, PROMPTS[:1], params(logit_bias=dict.fromkeys(plain, -100)))[0]
        assert not set(banned) & set(plain)
        assert output_ids(tiny_engine, PROMPTS[:1], params(3, logit_bias={"45": 100})) == [[45] * 3]


# Structured output.

GRAMMARS: list[dict[str, Any]] = [
    {"regex": "[a-c]{2,6}"},
    {"regex": "(ab|cd){3}x?"},
    {"ebnf": 'root ::= ("ab" | "dy")+ "z"'},
    {"regex": "[a-z]{5}", "min_new_tokens": 3},
]
PATTERNS = ["[a-c]{2,6}", "(ab|cd){3}x?", "((ab)|(dy))+z", "[a-z]{5}"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constrained_rows_follow_their_grammars_and_others_notice_nothing(
    tiny_engine: Engine, small_pool: Engine, temperature: float
) -> None:
    """In chunks, streamed, and retracted, where each gives the same."""
    params = [sampled(30, temperature=temperature, **fields) for fields in [*GRAMMARS, *GRAMMARS, {}, {}, {}, {}]]
    prompts = [prompt * 4 for prompt in PROMPTS]
    plain = output_ids(tiny_engine, prompts[8:], params[8:])
    retractions = small_pool.scheduler.num_retractions
    results = tiny_engine.generate(input_ids=prompts, sampling_params=params)
    assert [result["output_ids"] for result in results[8:]] == plain
    for index, result in enumerate(results[:8]):
        if result["meta_info"]["finish_reason"]["type"] == "stop":
            assert re.fullmatch(PATTERNS[index % 4], result["text"])
        else:
            assert index % 4 == 2, "only this one may go on for ever"
            assert re.match(r"(ab|dy)*[ad]?$", result["text"])
    tiny_engine.flush_cache()
    for engine, chunk in ((tiny_engine, 5), (small_pool, 64)):
        engine.scheduler.chunked_prefill_size = chunk
        last = {item["index"]: item for item in engine.generate(input_ids=prompts, sampling_params=params, stream=True)}
        assert [last[index]["output_ids"] for index in range(12)] == [result["output_ids"] for result in results]
        engine.scheduler.chunked_prefill_size = 64
    assert small_pool.scheduler.num_retractions > retractions
    small_pool.check_idle()


def test_json_follows_its_schema_as_far_as_this_vocabulary_can_say_it(tiny_engine: Engine) -> None:
    """A vocabulary without quotes and digits has three JSON texts, and no text for a string."""
    results = tiny_engine.generate(
        input_ids=PROMPTS, sampling_params=sampled(8, json_schema={"type": ["boolean", "null"]}), stream=False
    )
    assert {result["text"] for result in results} == {"true", "false", "null"}
    assert {result["meta_info"]["finish_reason"]["type"] for result in results} == {"stop"}
    with pytest.raises(ValueError, match="json_schema allows no token of this model at the start"):
        tiny_engine.generate(input_ids=PROMPTS[0], sampling_params={"json_schema": {"type": "string"}})


def test_a_constrained_row_advances_one_token_a_step(tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [sampled(20, regex="[a-z]{400}"), sampled(20)]
    output_ids(tiny_engine, PROMPTS[:2], params)
    tiny_engine.flush_cache()
    with monkeypatch.context() as patch:
        count = StepCount(tiny_engine.scheduler, patch)
        output_ids(tiny_engine, PROMPTS[:2], params)
        assert count.steps == 20


# Logit processors.


def only_multiples(logits: jax.Array, row: ProcessorRow) -> jax.Array:
    """Only ids that the request's number divides."""
    return jnp.where(jnp.arange(len(logits)) % row.params[0] == 0, logits, -jnp.inf)


def nothing_at_all(logits: jax.Array, row: ProcessorRow) -> jax.Array:
    return jnp.full_like(logits, jnp.nan)


def test_processors_get_their_numbers_and_wrong_ones_run_nothing(tiny_engine: Engine) -> None:
    plain = output_ids(tiny_engine, PROMPTS[:4], sampled())
    params = [sampled(custom_logit_processor=only_multiples, custom_params=[number]) for number in (7, 11)]
    found = output_ids(tiny_engine, PROMPTS[:4], [*params, sampled(), sampled()])
    assert [{id_ % number for id_ in ids} for number, ids in zip((7, 11), found, strict=False)] == [{0}, {0}]
    assert found[2:] == plain[2:]
    asked_before = tiny_engine.cache_report()["asked_tokens"]
    for wrong, message in (
        (lambda logits, row: logits[:5], r"must return logits float32\[320\], it returned float32\[5\]"),
        (lambda logits, row: logits if logits[0] > 0 else -logits, "must be a function that jax can trace"),
        (lambda logits: logits, "must be a function that jax can trace"),
        (only_multiples.__name__, "custom_logit_processor must be a function"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny_engine.generate(input_ids=PROMPTS[:2], sampling_params=[greedy(), {"custom_logit_processor": wrong}])
    assert tiny_engine.cache_report()["asked_tokens"] == asked_before


def test_a_processor_that_leaves_a_grammar_nothing_spoils_nobodys_output(tiny_engine: Engine) -> None:
    plain = output_ids(tiny_engine, PROMPTS[:2], greedy())
    for params in (greedy, sampled):
        spoilt = params(custom_logit_processor=nothing_at_all, regex="[d-f]{3,5}")
        results = tiny_engine.generate(input_ids=PROMPTS[:2], sampling_params=[spoilt, greedy()])
        assert re.fullmatch("[d-f]{3,5}", results[0]["text"])
        assert results[1]["output_ids"] == plain[1]


def test_an_engine_takes_only_so_many_processors(tiny_engine: Engine) -> None:
    known = dict(tiny_engine.runner.features.processors)
    many = [greedy(1, custom_logit_processor=lambda logits, row, by=by: logits + by) for by in range(9)]
    with pytest.raises(ValueError, match="at most 8 different functions"):
        tiny_engine.generate(input_ids=PROMPTS[:9], sampling_params=many)
    tiny_engine.runner.features.processors.clear()
    tiny_engine.runner.features.processors.update(known)


def test_after_all_that_plain_requests_launch_two_programs_a_step_and_compile_nothing(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = sampled(4, n=2, frequency_penalty=1.0, logit_bias={5: 1.0}, regex="[a-z]+")
    asked(tiny_engine, PROMPTS[:2], everything, top_logprobs_num=2, return_hidden_states=True)
    plain = [greedy(6), sampled(6)]
    output_ids(tiny_engine, PROMPTS[:2], plain)
    output_ids(tiny_engine, PROMPTS[:1], plain[:1])
    tiny_engine.flush_cache()
    with monkeypatch.context() as patch, counted_compilations() as compilations:
        count = StepCount(tiny_engine.scheduler, patch)
        launched: list[str] = []
        names = {id(program): name[0] for name, program in tiny_engine.runner.programs.compiled.items()}
        call = jax.stages.Compiled.__call__

        def counted(program: jax.stages.Compiled, *args: Any, **kwargs: Any) -> Any:
            launched.append(names.get(id(program), "new"))
            return call(program, *args, **kwargs)

        patch.setattr(jax.stages.Compiled, "__call__", counted)
        output_ids(tiny_engine, [PROMPTS[0], PROMPTS[1][::-1]], plain)
        assert count.steps == 6
        assert sorted(launched) == ["forward"] * 6 + ["sampler"] * 6
        assert not compilations
