"""What `generate` offers beside plain sampling, against oracles: samples, penalties, log-probabilities, grammars.

How each feature is computed is tested where it is; here it runs with caches, chunks, retractions and neighbours.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jradix import Engine, SamplingParams
from jradix.logit_processor import ProcessorRow
from jradix.logprobs import MAX_TOP_LOGPROBS
from jradix.scheduler import Scheduler
from tests.test_logits import expected as penalized
from tests.test_logprobs import log_softmax
from tests.tiny_engine import Golden, counted_compilations, greedy, logits_after, output_ids, paused, start

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, seed] for seed in range(20, 32)]
ATOL = 1e-4


@pytest.fixture(scope="module")
def small_pool(tiny_text_path: Path) -> Iterator[Engine]:
    """24 pages for four requests that grow to 11 each: some are retracted."""
    with start(tiny_text_path, skip_tokenizer_init=False, max_total_tokens=96) as engine:
        yield engine


def sampled(count: int = 12, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_new_tokens": count, "ignore_eos": True, "seed": 7} | fields)


def values(entries: list[tuple[float | None, int, str | None]]) -> list[float]:
    return [float("nan") if value is None else value for value, _, _ in entries]


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
    params = [greedy(30, **asks) for asks in ASKS]
    expected = [chosen_by_numpy(tiny_engine, prompt, 30, asks) for prompt, asks in zip(PROMPTS, ASKS, strict=False)]
    plain = output_ids(tiny_engine, PROMPTS[:6], greedy(30))
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


# Log-probabilities.


def asked(engine: Engine, prompts: Any, params: SamplingParams, **options: Any) -> Any:
    defaults = {"return_logprob": True, "logprob_start_len": 0}
    return engine.generate(input_ids=prompts, sampling_params=params, **defaults | options)


def test_log_probabilities_of_an_output_are_those_it_has_as_a_prompt(tiny_engine: Engine) -> None:
    for params in (greedy(12), sampled(12), sampled(12, regex="[a-z]+", frequency_penalty=1.0, logit_bias={40: 3})):
        result = asked(tiny_engine, PROMPTS[0], params)
        sequence = PROMPTS[0] + result["output_ids"]
        own = result["meta_info"]["input_token_logprobs"] + result["meta_info"]["output_token_logprobs"]
        for flush in (False, True):
            if flush:
                tiny_engine.flush_cache()
            again = asked(tiny_engine, sequence, greedy(0))["meta_info"]
            assert (
                [token for _, token, _ in own] == [token for _, token, _ in again["input_token_logprobs"]] == sequence
            )
            np.testing.assert_allclose(values(again["input_token_logprobs"]), values(own), atol=ATOL)
            assert again["output_token_logprobs"] == []


@pytest.mark.parametrize("start_len", [-1, 0, 1, 30, 56, 57])
def test_prompts_have_the_log_probabilities_of_transformers_cold_cached_and_in_chunks(
    tiny_engine: Engine, small_pool: Engine, tiny_path: Callable[[str], Path], start_len: int
) -> None:
    """The second time they are kept, but for those of other tokens; the small pool holds one prompt at a time."""
    golden = Golden(tiny_path("llama"))
    want = log_softmax(golden.logits)
    first = max(start_len, 1) if start_len >= 0 else 57
    details = {"top_logprobs_num": 3, "token_ids_logprob": [9, 0]}
    chunked = [(tiny_engine, 64), (tiny_engine, 64), (tiny_engine, 10), (small_pool, 64)]
    for engine, chunk in [*chunked, (tiny_engine, 64)]:
        if chunk == 10:
            engine.flush_cache()
        engine.scheduler.chunked_prefill_size = chunk
        for asks in ({}, details):
            results = asked(engine, golden.prompts, greedy(4), logprob_start_len=start_len, **asks)
            for index, result in enumerate(results):
                meta = result["meta_info"]
                given = meta["input_token_logprobs"]
                assert [id_ for _, id_, _ in given] == golden.prompts[index][start_len if start_len >= 0 else 57 :]
                assert (given[0][0] is None) if start_len == 0 else None not in given
                found = given[1:] if start_len == 0 else given
                rows = want[index, first - 1 : 56]
                tokens = golden.prompts[index][first:]
                np.testing.assert_allclose([value for value, *_ in found], rows[range(len(rows)), tokens], atol=2e-4)
                if not asks:
                    continue
                top = [entry for entry in meta["input_top_logprobs"] if entry is not None]
                others = [entry for entry in meta["input_token_ids_logprobs"] if entry is not None]
                assert len(top) == len(others) == len(rows)
                for row, likeliest, other in zip(rows, top, others, strict=True):
                    np.testing.assert_allclose(values(likeliest), np.sort(row)[::-1][:3], atol=2e-4)
                    np.testing.assert_allclose([row[id_] for _, id_, _ in likeliest], values(likeliest), atol=2e-4)
                    assert [id_ for _, id_, _ in other] == [0, 9]
                    np.testing.assert_allclose(values(other), row[[0, 9]], atol=2e-4)
                assert [row[0][1] for row in meta["output_top_logprobs"]] == golden.greedy_ids[index][:4]
    tiny_engine.scheduler.chunked_prefill_size = 64


def test_log_probabilities_survive_retractions_and_leave_neighbours_alone(
    tiny_engine: Engine, small_pool: Engine
) -> None:
    plain = output_ids(tiny_engine, PROMPTS, sampled(30))
    wanted = [index % 3 != 2 for index in range(len(PROMPTS))]
    starts = [index % 9 for index in range(len(PROMPTS))]
    alone = [
        asked(tiny_engine, prompt, sampled(30), logprob_start_len=at)["meta_info"]
        for prompt, at in zip(PROMPTS, starts, strict=True)
    ]
    small_pool.flush_cache()
    retractions = small_pool.scheduler.num_retractions
    results = asked(small_pool, PROMPTS, sampled(30), return_logprob=wanted, logprob_start_len=starts)
    assert small_pool.scheduler.num_retractions > retractions
    assert [result["output_ids"] for result in results] == plain
    for result, expected, has_any in zip(results, alone, wanted, strict=True):
        meta = result["meta_info"]
        assert ("input_token_logprobs" in meta) == has_any
        for name in ("input_token_logprobs", "output_token_logprobs") if has_any else ():
            np.testing.assert_allclose(values(meta[name]), values(expected[name]), atol=ATOL)
    small_pool.check_idle()


def test_texts_come_with_log_probabilities_if_asked_for(tiny_engine: Engine) -> None:
    tokenizer = tiny_engine.tokenizer
    assert tokenizer is not None
    asks = {"top_logprobs_num": MAX_TOP_LOGPROBS, "token_ids_logprob": [5]}
    meta = asked(tiny_engine, PROMPTS[0], greedy(3), return_text_in_logprobs=True, **asks)["meta_info"]
    silent = asked(tiny_engine, PROMPTS[0], greedy(3), **asks)["meta_info"]
    for name in [name for name in meta if name.endswith("logprobs")]:
        for one, other in zip(meta[name], silent[name], strict=True):
            for entry, bare in zip(
                *([row] if isinstance(row, tuple) else row or [] for row in (one, other)), strict=True
            ):
                assert entry[2] == tokenizer.decode([entry[1]], skip_special_tokens=False)
                assert bare == (*bare[:2], None)
    assert [len(entry) for entry in meta["output_top_logprobs"]] == [MAX_TOP_LOGPROBS] * 3


def test_log_probabilities_that_are_kept_cost_no_hits(tiny_engine: Engine) -> None:
    """A token that nobody had at its place comes with the one before it, which then has to be computed too."""
    prompt = [*range(30, 80)]
    for tail, hits, hits_with in (([], 56, 56), ([3, 4], 57, 56)):
        tiny_engine.flush_cache()
        first = asked(tiny_engine, prompt, greedy(9))
        sequence = [*prompt, *first["output_ids"][:7], *tail]
        own = values(first["meta_info"]["input_token_logprobs"] + first["meta_info"]["output_token_logprobs"][:7])
        more = asked(tiny_engine, sequence, greedy(1), top_logprobs_num=1, cache_salt="other")["meta_info"]
        assert more["cached_tokens"] == 0
        result = asked(tiny_engine, sequence, greedy(1))["meta_info"]
        assert result["cached_tokens"] == hits_with
        np.testing.assert_allclose(values(result["input_token_logprobs"])[:57], own, atol=ATOL)
        np.testing.assert_allclose(
            values(result["input_token_logprobs"]), values(more["input_token_logprobs"]), atol=ATOL
        )
        tiny_engine.flush_cache()
        tiny_engine.generate(input_ids=prompt, sampling_params=greedy(9))
        plain = tiny_engine.generate(input_ids=sequence, sampling_params=greedy(1))
        assert plain["meta_info"]["cached_tokens"] == hits
        again = asked(tiny_engine, sequence, greedy(1), top_logprobs_num=1)["meta_info"]
        assert again["cached_tokens"] == 0, "nobody keeps those of other tokens"


# Hidden states.


def test_hidden_states_lead_to_the_tokens_and_come_for_what_was_computed(tiny_engine: Engine) -> None:
    """The head of the model, applied to the state at a position, likes the token best that greedily follows it."""
    whole = tiny_engine.generate(input_ids=PROMPTS[0], sampling_params=greedy(6), return_hidden_states=True)
    states = whole["meta_info"]["hidden_states"]
    assert whole["meta_info"]["hidden_state_positions"].tolist() == list(range(len(states))) == list(range(8 + 5))
    head = head_of(tiny_engine)
    assert head(states[7:]).argmax(axis=-1).tolist() == whole["output_ids"]
    expected = logits_after(tiny_engine, PROMPTS[0] + whole["output_ids"][:3])
    np.testing.assert_allclose(head(states[10]), expected, atol=2e-4)

    again = tiny_engine.generate(input_ids=PROMPTS[0], sampling_params=greedy(6), return_hidden_states=True)
    cached = again["meta_info"]["cached_tokens"]
    assert cached == 7
    assert again["meta_info"]["hidden_state_positions"].tolist() == list(range(cached, 13))
    np.testing.assert_allclose(again["meta_info"]["hidden_states"], states[cached:], atol=1e-3)
    without_output = tiny_engine.generate(input_ids=PROMPTS[1], sampling_params=greedy(0), return_hidden_states=True)[
        "meta_info"
    ]
    assert without_output["hidden_state_positions"].tolist() == [7]


def head_of(engine: Engine) -> Callable[[np.ndarray], np.ndarray]:
    """From hidden states to logits, in numpy: the final norm and the output embedding of the checkpoint."""
    from safetensors.numpy import load_file

    tensors = load_file(Path(engine.config.model_path) / "model.safetensors")
    config = json.loads((Path(engine.config.model_path) / "config.json").read_text())
    norm, embedding = tensors["model.norm.weight"], tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])

    def logits(hidden: np.ndarray) -> np.ndarray:
        scale = np.sqrt(np.mean(hidden.astype(np.float64) ** 2, axis=-1, keepdims=True) + config["rms_norm_eps"])
        return hidden / scale * norm @ embedding.T

    return logits


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
    known = dict(tiny_engine.runner._processors)
    many = [greedy(1, custom_logit_processor=lambda logits, row, by=by: logits + by) for by in range(9)]
    with pytest.raises(ValueError, match="at most 8 different functions"):
        tiny_engine.generate(input_ids=PROMPTS[:9], sampling_params=many)
    tiny_engine.runner._processors.clear()
    tiny_engine.runner._processors.update(known)


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
