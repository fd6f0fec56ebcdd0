"""Continuations are scored as the model itself finds them, and the prompt is computed once."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jradix import Engine
from tests.test_logprobs import log_softmax
from tests.tiny_engine import Golden, greedy, paused


def test_scores_are_the_log_probabilities_of_transformers(
    tiny_engine: Engine, tiny_path: Callable[[str], Path]
) -> None:
    golden = Golden(tiny_path("llama"))
    want = log_softmax(golden.logits)[0]
    prompt = golden.prompts[0]
    for seam in (1, 30, 56):
        scores = tiny_engine.score(prompt[:seam], [prompt[seam:], prompt[seam : seam + 1]])
        for score in scores:
            ids = score["token_ids"]
            expected = [want[seam - 1 + at, token] for at, token in enumerate(ids)]
            assert ids == prompt[seam : seam + len(ids)]
            np.testing.assert_allclose(score["token_logprobs"], expected, atol=1e-4)
            assert score["logprob"] == pytest.approx(sum(expected), abs=1e-3)


def test_many_continuations_compute_the_prompt_once(tiny_engine: Engine) -> None:
    prompt = list(range(60))
    continuations = [[100 + index, 200 + index] for index in range(12)]
    scores = tiny_engine.score(prompt, continuations)
    computed = [62 - score["cached_tokens"] for score in scores]
    page = tiny_engine.config.page_size
    assert computed[0] == 62
    assert max(computed[1:]) <= 2 + page, "whole pages of the prompt are shared"
    assert [score["token_ids"] for score in scores] == continuations


def test_the_greedy_continuation_is_known_as_such(tiny_engine: Engine) -> None:
    prompt = list(range(20))
    greedy_ids = tiny_engine.generate(input_ids=prompt, sampling_params=greedy(5))["output_ids"]
    other = [*greedy_ids[:4], (greedy_ids[4] + 1) % 320]
    assert [score["is_greedy"] for score in tiny_engine.score(prompt, [greedy_ids, other])] == [True, False]


def test_texts_are_tokenized_and_wrong_ones_refused(tiny_engine: Engine) -> None:
    tokenizer = tiny_engine.tokenizer
    assert tokenizer is not None
    [score] = tiny_engine.score("abc", ["de"])
    assert score["token_ids"] == tokenizer.encode("de", add_special_tokens=False)
    wrong: list[Any] = [[], "de", [[]], [""], [[320]], 3, None]
    for continuations in wrong:
        with pytest.raises(ValueError, match=r"continuations must be|prompt is empty|input_ids must"):
            tiny_engine.score("abc", continuations)


def test_scores_that_are_aborted_are_no_scores(tiny_engine: Engine) -> None:
    with paused(tiny_engine), ThreadPoolExecutor() as threads:
        future = threads.submit(tiny_engine.score, [40, 41, 42], [[43], [44]])
        while tiny_engine.get_server_info()["num_waiting_requests"] < 2:
            pass
        tiny_engine.pause_generation("abort")
        with pytest.raises(RuntimeError, match=r"not complete: .*abandoned"):
            future.result()
