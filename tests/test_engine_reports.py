"""What `generate` reports of a model, against oracles: log-probabilities and hidden states.

How they are computed is tested where it is; here they come with caches, chunks, retractions and neighbours.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jradix import Engine, SamplingParams
from jradix.logprobs import MAX_TOP_LOGPROBS
from tests.test_logprobs import log_softmax
from tests.tiny_engine import Golden, greedy, logits_after, output_ids, sampled

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, seed] for seed in range(20, 32)]
ATOL = 1e-4


def values(entries: list[tuple[float | None, int, str | None]]) -> list[float]:
    return [float("nan") if value is None else value for value, _, _ in entries]


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
    tensors = load_file(Path(engine.config.model_path) / "model.safetensors")
    config = json.loads((Path(engine.config.model_path) / "config.json").read_text())
    norm, embedding = tensors["model.norm.weight"], tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])

    def logits(hidden: np.ndarray) -> np.ndarray:
        scale = np.sqrt(np.mean(hidden.astype(np.float64) ** 2, axis=-1, keepdims=True) + config["rms_norm_eps"])
        return hidden / scale * norm @ embedding.T

    return logits
