"""Log-probabilities that results report: those of transformers, whoever has cached the prompt and kept what of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from jradix import Engine, SamplingParams
from tests.test_logprobs import log_softmax
from tests.tiny_engine import Golden, greedy, prompts_with_shared_prefixes

IDS = (0, 9, 319)
LENGTH = 41
"""Of the prompt that is asked about: ten pages of four tokens and one token."""

type Table = np.ndarray
"""Log-probabilities of transformers, [prompts, positions, vocab]: of the token at a position, the entry before it."""


@pytest.fixture(scope="module")
def golden(tiny_path: Callable[[str], Path]) -> Golden:
    return Golden(tiny_path("llama"))


@pytest.fixture(scope="module")
def want(golden: Golden) -> Table:
    return log_softmax(golden.logits)


def ask(engine: Engine, prompt: list[int], max_new_tokens: int = 1, **options: Any) -> dict[str, Any]:
    """The result of a greedy request, for log-probabilities unless told otherwise."""
    options = {"return_logprob": True} | options
    return engine.generate(input_ids=prompt, sampling_params=greedy(max_new_tokens), **options)


def check(meta: dict[str, Any], prompt: list[int], table: Table, start: int, num_top: int = 0) -> None:
    """Every position from `start` on has the value of its own token there, and so have the likeliest and given ones."""
    entries = meta["input_token_logprobs"]
    assert [token for _, token, _ in entries] == prompt[start:]
    rows: list[Any] = [table[at - 1] if at else None for at in range(start, len(prompt))]
    for (value, token, _), row in zip(entries, rows, strict=True):
        assert value == (None if row is None else pytest.approx(row[token], abs=1e-4))
    if not num_top:
        assert "input_top_logprobs" not in meta
        return
    columns = meta["input_top_logprobs"], meta["input_token_ids_logprobs"]
    for top, given, row in zip(*columns, rows, strict=True):
        if row is None:
            assert top is given is None
            continue
        assert [value for value, *_ in top] == pytest.approx(np.sort(row)[::-1][:num_top], abs=1e-4)
        assert [value for value, *_ in top] == pytest.approx([row[token] for _, token, _ in top], abs=1e-4)
        assert [(value, token) for value, token, _ in given] == [(pytest.approx(row[i], abs=1e-4), i) for i in IDS]


def check_output(result: dict[str, Any], table: Table, length: int) -> None:
    """The first token after a golden prompt's first `length` tokens."""
    value, token, _ = result["meta_info"]["output_token_logprobs"][0]
    assert token == result["output_ids"][0]
    assert (
        value == pytest.approx(table[length - 1, token], abs=1e-4) == pytest.approx(table[length - 1].max(), abs=1e-4)
    )


class WarmUp(NamedTuple):
    """What comes before the prompt that is asked about, and what that leaves."""

    name: str
    lengths: tuple[int, ...]  # of the prompts before it, which are beginnings of it
    starts: tuple[int | None, ...]  # from which position each reports; None: nothing
    hit: int  # tokens that are cached then
    kept: range = range(0)  # positions whose values are known


WARM_UPS = [
    WarmUp("nothing", (), (), 0),
    WarmUp("all, nobody asked", (LENGTH,), (None,), LENGTH - 1),
    WarmUp("half, nobody asked", (22,), (None,), 22),
    WarmUp("all are kept", (LENGTH,), (0,), LENGTH - 1, range(LENGTH)),
    WarmUp("half are kept", (22,), (0,), 22, range(22)),
    WarmUp("those behind a gap are kept", (LENGTH,), (30,), LENGTH - 1, range(30, LENGTH)),
    WarmUp("all, and half are kept", (22, LENGTH), (0, None), LENGTH - 1, range(22)),
    WarmUp("all, and half are kept later, of whole pages", (LENGTH, 22), (None, 0), LENGTH - 1, range(20)),
]


def cached_tokens(warm_up: WarmUp, start: int, chunk: int) -> int:
    """Before each chunk, what is cached is skipped up to the token before the first whose value is not known."""
    computed = cached = 0
    unknown = max(start, 1)
    while computed < LENGTH:
        while unknown in warm_up.kept:
            unknown += 1
        skipped = max(0, (warm_up.hit if unknown >= LENGTH else min(warm_up.hit, unknown - 1)) - computed)
        cached += skipped
        computed = min(LENGTH, computed + skipped + chunk)
        unknown = max(unknown, computed + 1)
    return cached


@pytest.mark.parametrize("chunk", [64, 7])
@pytest.mark.parametrize("warm_up", WARM_UPS, ids=lambda warm_up: warm_up.name)
def test_prompts_report_the_same_whatever_is_cached_or_kept_of_them(
    tiny_engine: Engine, golden: Golden, want: Table, warm_up: WarmUp, chunk: int
) -> None:
    """From the start, from the middle, for the last token, and for none; and what need not be computed is not."""
    prompt, table = golden.prompts[0][:LENGTH], want[0]
    tiny_engine.scheduler.chunked_prefill_size = chunk
    for start in (0, 17, 22, 23, LENGTH - 1, LENGTH):
        tiny_engine.flush_cache()
        for length, first in zip(warm_up.lengths, warm_up.starts, strict=True):
            ask(tiny_engine, prompt[:length], return_logprob=first is not None, logprob_start_len=first)
        result = ask(tiny_engine, prompt, logprob_start_len=start)
        check(result["meta_info"], prompt, table, start)
        check_output(result, table, LENGTH)
        assert result["meta_info"]["cached_tokens"] == cached_tokens(warm_up, start, chunk), f"{start=}"
    tiny_engine.scheduler.chunked_prefill_size = 64


def test_likeliest_and_given_tokens_come_with_each_position_beside_others(
    tiny_engine: Engine, golden: Golden, want: Table
) -> None:
    """Prompts of different beginnings side by side, in chunks; then again, cached, for nobody keeps these."""
    tiny_engine.scheduler.chunked_prefill_size = 16
    starts = [0, 19, 56, 57]
    for _ in range(2):
        results = tiny_engine.generate(
            input_ids=[*golden.prompts, golden.prompts[0]],
            sampling_params=greedy(1),
            return_logprob=True,
            logprob_start_len=starts,
            top_logprobs_num=5,
            token_ids_logprob=list(IDS),
        )
        for index, (result, start) in enumerate(zip(results, starts, strict=True)):
            check(result["meta_info"], golden.prompts[index % 3], want[index % 3], start, num_top=5)
            check_output(result, want[index % 3], 57)
            assert result["output_ids"] == golden.greedy_ids[index % 3][:1]
    tiny_engine.scheduler.chunked_prefill_size = 64


def test_the_next_turn_finds_the_values_of_the_output_of_every_sample(tiny_engine: Engine, golden: Golden) -> None:
    prompt = golden.prompts[1][:30]
    params = SamplingParams(n=4, temperature=1.0, seed=5, max_new_tokens=11, ignore_eos=True)
    samples = tiny_engine.generate(input_ids=prompt, sampling_params=params, return_logprob=True, logprob_start_len=0)
    assert len({tuple(sample["output_ids"]) for sample in samples}) == 4
    for sample in samples:
        turn = [*prompt, *sample["output_ids"], 7]
        warm = ask(tiny_engine, turn, logprob_start_len=0)["meta_info"]
        assert warm["cached_tokens"] >= 30, "the values of the prompt are kept, and the page that the samples share"
        first = sample["meta_info"]["input_token_logprobs"] + sample["meta_info"]["output_token_logprobs"]
        close(warm["input_token_logprobs"][:-1], first)
    tiny_engine.flush_cache()
    for sample in samples:
        close(
            ask(tiny_engine, [*prompt, *sample["output_ids"]], logprob_start_len=30)["meta_info"][
                "input_token_logprobs"
            ],
            sample["meta_info"]["output_token_logprobs"],
        )


def close(found: list[Any], expected: list[Any]) -> None:
    """Entries, lists of them and None, whose numbers may differ by rounding."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, list):
            close([entry[0] for entry in one], [entry[0] for entry in other])  # nearly equal ones may change places
        elif isinstance(one, tuple):
            assert one[1:] == other[1:]
            close([one[0]], [other[0]])
        else:
            assert one == (None if other is None else pytest.approx(other, abs=1e-4))


@contextmanager
def pages_left(engine: Engine, count: int) -> Iterator[None]:
    """Inside, the pool has no more than so many pages to give."""
    held = engine.cache.allocate(engine.cache.num_allocatable - count)
    assert held is not None
    yield
    engine.cache.free(held)


def test_random_requests_report_what_they_would_alone_and_without_a_cache(tiny_engine: Engine) -> None:
    """From any position, with other tokens or without, several samples, none; hits, evictions and retractions."""
    rng = np.random.default_rng(3)
    prompts = prompts_with_shared_prefixes(100, 320, seed=8)
    params = [greedy(int(rng.choice([0, 1, 3, 25])), n=int(rng.choice([1, 1, 2]))) for _ in prompts]
    asks: Any = {
        "return_logprob": [bool(rng.random() < 0.7) for _ in prompts],
        "logprob_start_len": [int(rng.integers(-1, len(prompt) + 1)) for prompt in prompts],
    }
    asks["top_logprobs_num"] = [2 * int(wants and rng.random() < 0.3) for wants in asks["return_logprob"]]
    asks["token_ids_logprob"] = [[5] if wants and rng.random() < 0.2 else None for wants in asks["return_logprob"]]

    def run() -> list[dict[str, Any]]:
        return tiny_engine.generate(input_ids=prompts, sampling_params=params, **asks)

    tiny_engine.cache.enabled = False
    alone = run()
    tiny_engine.cache.enabled = True
    retractions, before = tiny_engine.scheduler.num_retractions, tiny_engine.cache_report()
    tiny_engine.scheduler.chunked_prefill_size = 13
    with pages_left(tiny_engine, 30):
        results = run()
    tiny_engine.scheduler.chunked_prefill_size = 64
    report = tiny_engine.cache_report()
    for result, expected in zip(results, alone, strict=True):
        assert result["output_ids"] == expected["output_ids"]
        meta, expected_meta = result["meta_info"], expected["meta_info"]
        assert meta.keys() == expected_meta.keys()
        for name in meta:
            if name.endswith("logprobs"):
                close(meta[name], expected_meta[name])
    assert report["evicted_tokens"] > before["evicted_tokens"] + 500
    assert tiny_engine.scheduler.num_retractions > retractions
    cached = sum(result["meta_info"]["cached_tokens"] for result in results)
    assert cached > 500
    assert report["hit_tokens"] - before["hit_tokens"] == cached, "the cache counts what results say"
