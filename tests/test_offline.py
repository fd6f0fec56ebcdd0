"""The order of a batch and its bound, against brute force and against the real cache."""

from collections.abc import Hashable, Sequence
from itertools import permutations

import numpy as np
import pytest

from jradix.cache.prefix_cache import PrefixCache
from jradix.offline import plan_batch
from jradix.offline_prediction import Capacity

GRANULARITIES = [(1, 1), (4, 1), (4, 2), (4, 4), (7, 3)]  # page size, tokens by which a match can grow


def capacity(page_size: int, granularity: int, *, num_pages: int = 1_000, rows: int = 1) -> Capacity:
    return Capacity(
        num_pages=num_pages,
        page_size=page_size,
        granularity=granularity,
        max_running_requests=rows,
        chunked_prefill_size=64,
    )


def random_prompts(rng: np.random.Generator, count: int, *, longest: int) -> list[np.ndarray]:
    """Half of them begin like one before, are its beginning, or equal it; of two ids, so that others share more."""
    prompts: list[np.ndarray] = []
    for _ in range(count):
        prompt = rng.integers(0, 2, rng.integers(1, longest // 2 + 1)).astype(np.int32)
        if prompts and rng.random() < 0.5:
            old = prompts[rng.integers(len(prompts))]
            prompt = np.concatenate([old[: rng.integers(1, len(old) + 1)], prompt[: rng.choice([0, 99])]])[:longest]
        prompts.append(prompt)
    return prompts


def common_len(a: Sequence[int], b: Sequence[int]) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


def hits_in_order(
    prompts: list[list[int]],
    namespaces: Sequence[Hashable],
    order: Sequence[int],
    cached: Sequence[int],
    page_size: int,
    granularity: int,
) -> int:
    """Tokens hit in an infinite cache, by comparing each prompt with all before it."""
    total = 0
    for place, index in enumerate(order):
        earlier = [other for other in order[:place] if namespaces[other] == namespaces[index]]
        best = max([cached[index], *(common_len(prompts[index], prompts[other]) for other in earlier)])
        best = min(best, len(prompts[index]) - 1)
        rest = best % page_size
        total += best - (rest if rest < granularity else 0)
    return total


@pytest.mark.parametrize(("page_size", "granularity"), GRANULARITIES)
@pytest.mark.parametrize("seed", range(4))
def test_no_order_hits_more_than_the_bound_and_one_hits_as_much(page_size: int, granularity: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompts = random_prompts(rng, 6, longest=18)
    namespaces = rng.choice(["a", "b"], 6, p=[0.8, 0.2]).tolist()
    known = random_prompts(rng, 1, longest=18)[0].tolist() if seed % 2 else []
    as_lists = [prompt.tolist() for prompt in prompts]
    cached = [common_len(p, known) if name == "a" else 0 for p, name in zip(as_lists, namespaces, strict=True)]
    plan = plan_batch(prompts, namespaces, [1] * 6, capacity(page_size, granularity), cached)
    best = max(
        hits_in_order(as_lists, namespaces, order, cached, page_size, granularity) for order in permutations(range(6))
    )
    assert plan.bound == best
    assert hits_in_order(as_lists, namespaces, plan.order.tolist(), cached, page_size, granularity) == best


def test_the_bound_leaves_each_token_of_the_trie_and_the_last_of_each_duplicate_to_compute() -> None:
    prompts = [tuple(prompt.tolist()) for prompt in random_prompts(np.random.default_rng(7), 300, longest=40)]
    trie = {prompt[:end] for prompt in prompts for end in range(1, len(prompt) + 1)}
    duplicates = len(prompts) - len(set(prompts))
    assert duplicates > 10
    plan = plan_batch([np.array(p, np.int32) for p in prompts], [None] * 300, [1] * 300, capacity(16, 1))
    assert plan.prompt_tokens == sum(map(len, prompts))
    assert plan.bound == plan.prompt_tokens - len(trie) - duplicates


@pytest.mark.parametrize("rows", [1, 8])
def test_prompts_with_a_common_prefix_run_next_to_each_other(rows: int) -> None:
    prompts = random_prompts(np.random.default_rng(3), 120, longest=30)
    plan = plan_batch(prompts, [None] * 120, [1] * 120, capacity(4, 1, rows=rows))
    in_order = [tuple(prompts[index].tolist()) for index in plan.order]
    assert sorted(plan.order.tolist()) == list(range(120))
    for prefix in {prompt[:end] for prompt in in_order for end in range(1, len(prompt) + 1)}:
        places = [place for place, prompt in enumerate(in_order) if prompt[: len(prefix)] == prefix]
        assert places == list(range(places[0], places[-1] + 1)), prefix


@pytest.mark.parametrize(("page_size", "granularity"), [*GRANULARITIES, (16, 1)])
def test_one_by_one_a_pool_for_the_longest_request_reaches_the_bound(page_size: int, granularity: int) -> None:
    rng = np.random.default_rng(5)
    prompts = random_prompts(rng, 200, longest=60)
    namespaces: list[Hashable] = rng.choice(["a", "b"], 200).tolist()
    output_lens = rng.integers(1, 20, 200).tolist()
    longest = max(-(-(len(prompt) + more) // page_size) for prompt, more in zip(prompts, output_lens, strict=True))
    plan = plan_batch(prompts, namespaces, output_lens, capacity(page_size, granularity, num_pages=longest))
    cache = PrefixCache(longest, page_size, min_copied_tokens=granularity)
    hits = [serve(cache, prompts[index], namespaces[index], output_lens[index], index) for index in plan.order.tolist()]
    assert sum(hits) == plan.bound == plan.predicted
    assert 0.2 * plan.prompt_tokens < plan.bound < plan.prompt_tokens
    cache.flush()
    assert sum(serve(cache, *args) for args in zip(prompts, namespaces, output_lens, range(200), strict=True)) < (
        0.9 * plan.bound
    )


def serve(cache: PrefixCache, prompt: np.ndarray, namespace: Hashable, output_len: int, number: int) -> int:
    """A request from match to end, with an output that no other has; returns the tokens that it finds cached."""
    match = cache.match(prompt[:-1], namespace)
    lock = cache.lock(match)
    tokens = np.concatenate([prompt, np.full(output_len, -1 - number, np.int32)])
    new = cache.allocate(-(-len(tokens) // cache.page_size) - len(match.pages))
    assert new is not None
    cache.finish(tokens, np.concatenate([match.pages, new]), lock, namespace, prompt_len=len(prompt))
    return match.num_tokens + match.head_len


def order_of(prompts: list[list[int]], *, rows: int = 1, cached: list[int] | None = None) -> list[int]:
    count = len(prompts)
    arrays = [np.array(prompt, np.int32) for prompt in prompts]
    return plan_batch(arrays, [None] * count, [1] * count, capacity(4, 1, rows=rows), cached).order.tolist()


def test_groups_come_as_their_first_prompts_did_and_so_do_equal_prompts() -> None:
    assert order_of([[9, 1], [5, 1], [9, 2], [5, 1], [7], [5, 0], [9, 1]]) == [0, 6, 2, 1, 3, 5, 4]


def test_a_batch_that_is_grouped_already_stays_as_it_is() -> None:
    prompts = [[task, 0, task, question, 1] for task in (40, 10, 30, 20) for question in (8, 3, 9, 1, 5)]
    assert order_of(prompts) == list(range(20))
    assert order_of(prompts[::-1]) == list(range(20))


def test_one_by_one_a_prompt_precedes_its_continuations_and_side_by_side_it_follows() -> None:
    prompts = [[1, 2, 3], [1, 2, 3, 4, 5], [1, 2], [1, 2, 3, 4]]
    assert order_of(prompts, rows=1) == [2, 0, 3, 1]
    assert order_of(prompts, rows=2) == [1, 3, 0, 2]


def test_what_is_cached_goes_first_at_every_branch() -> None:
    prompts = [[9, 1], [5, 1, 1], [9, 2], [5, 1, 2], [5, 1, 3]]
    assert order_of(prompts) == [0, 2, 1, 3, 4]
    assert order_of(prompts, cached=[0, 1, 0, 1, 1]) == [1, 3, 4, 0, 2]
    assert order_of(prompts, cached=[0, 2, 0, 2, 3]) == [4, 1, 3, 0, 2]


def test_equal_prompts_of_different_namespaces_share_nothing() -> None:
    prompts = [np.arange(20, dtype=np.int32)] * 4
    apart = plan_batch(prompts, ["a", None, "a", None], [1] * 4, capacity(4, 1))
    assert apart.order.tolist() == [0, 2, 1, 3]
    assert apart.bound == apart.predicted == 2 * 19


def test_thousands_of_nested_prompts_are_no_recursion() -> None:
    tokens = np.zeros(5_000, np.int32)
    prompts = [tokens[:end] for end in range(1, 5_001)]
    plan = plan_batch(prompts, [None] * 5_000, [1] * 5_000, capacity(16, 1, rows=4))
    assert plan.order.tolist() == list(range(5_000))[::-1]
