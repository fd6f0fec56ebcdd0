"""Every policy against a brute-force order over small queues, and what all policies have in common."""

import random
from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Any, get_args

import numpy as np
import pytest

from jradix.cache import PrefixCache
from jradix.cache.render import rows
from jradix.config import SchedulePolicy
from jradix.request import Request
from jradix.sampling_params import SamplingParams
from jradix.schedule_policy import arrange

POLICIES: tuple[SchedulePolicy, ...] = get_args(SchedulePolicy)
SEEDS = range(25)


def make_request(prompt: Sequence[int], max_new_tokens: int = 4, *, at: float = 0.0, **fields: Any) -> Request:
    request = Request("", np.array(prompt, np.int32), SamplingParams(), frozenset(), max_new_tokens, **fields)
    request.arrival_time = at
    return request


def store(cache: PrefixCache, tokens: Sequence[int], namespace: Hashable = None) -> None:
    lock = cache.lock(cache.match((), namespace))
    pages = cache.allocate(-(-len(tokens) // cache.page_size))
    assert pages is not None
    cache.finish(list(tokens), pages, lock, namespace)


def order(policy: SchedulePolicy, waiting: Sequence[Request], cache: PrefixCache | None = None, **given: Any) -> list:
    options: dict[str, Any] = {"running": [], "output_share": 0.5, "now": 100.0, "rng": random.Random(0)}
    return arrange(policy, waiting, cache=cache or PrefixCache(10, 4), **(options | given))


class Scene:
    """A small cache, and requests that hit some of it, drawn at random from few tokens so that prefixes coincide."""

    def __init__(self, seed: int, page_size: int = 2) -> None:
        rng = random.Random(seed)
        self.cache = PrefixCache(400, page_size)
        self.stored = [(rng.choice((None, "salt")), self.draw(rng)) for _ in range(8)]
        for namespace, tokens in self.stored:
            store(self.cache, tokens, namespace)
        self.waiting = []
        for _ in range(rng.randrange(1, 14)):
            begin = rng.choice(self.stored)[1][: rng.randrange(12)]
            self.waiting.append(
                make_request(
                    [*begin, *self.draw(rng)],
                    rng.randrange(1, 5),
                    at=float(rng.randrange(90)),
                    namespace=rng.choice((None, "salt")),
                    priority=rng.randrange(-2, 3),
                    routing_key=rng.choice((None, "a", "b", "c")),
                )
            )

    @staticmethod
    def draw(rng: random.Random) -> list[int]:
        return [rng.randrange(2) for _ in range(rng.randrange(1, 12))]

    def cached_len(self, request: Request) -> int:
        """The most tokens, of all but the last, that a stored sequence of the namespace begins with."""
        asked = request.prompt_ids[:-1].tolist()
        common = [0]
        for namespace, tokens in self.stored:
            if namespace == request.namespace:
                differ = [i for i, (a, b) in enumerate(zip(asked, tokens, strict=False)) if a != b]
                common.append(differ[0] if differ else min(len(asked), len(tokens)))
        return max(common)

    def cached_pages(self, request: Request) -> list[tuple[int, ...]]:
        """The pages that agree, one by one, taken from what the cache itself says is their number."""
        size = self.cache.page_size
        count = self.cache.match(request.prompt_ids[:-1], request.namespace).num_tokens // size
        return [tuple(request.prompt_ids[i * size : (i + 1) * size].tolist()) for i in range(count)]


@pytest.mark.parametrize("seed", SEEDS)
def test_longest_cached_prefix_first(seed: int) -> None:
    scene = Scene(seed)
    found = order("lpm", scene.waiting, scene.cache)
    assert found == sorted(scene.waiting, key=scene.cached_len, reverse=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_fewest_uncached_prompt_tokens_first(seed: int) -> None:
    scene = Scene(seed)
    found = order("shortest-prefill-first", scene.waiting, scene.cache)
    assert found == sorted(scene.waiting, key=lambda request: request.prompt_len - scene.cached_len(request))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("share", [0.1, 1.0])
def test_highest_response_ratio_first_whatever_a_token_takes(seed: int, share: float) -> None:
    scene = Scene(seed)
    for seconds in (1.0, 8.0):

        def ratio(request: Request, seconds: float = seconds) -> float:
            tokens = request.prompt_len - scene.cached_len(request) + share * request.max_new_tokens
            return round((100.0 - request.arrival_time + seconds * tokens) / (seconds * tokens), 9)

        found = order("hrrn", scene.waiting, scene.cache, output_share=share)
        assert [ratio(request) for request in found] == sorted(map(ratio, scene.waiting), reverse=True)


def test_a_request_that_waits_overtakes_shorter_ones_under_hrrn() -> None:
    long, short = make_request([1] * 40, at=0.0), make_request([2] * 4, at=90.0)
    assert order("hrrn", [long, short], now=91.0) == [long, short]
    assert order("hrrn", [long, short], now=120.0) == [short, long]


def depth_first(scene: Scene, waiting: Sequence[Request]) -> list[Request]:
    """Recursive, over single pages: a child for each cached page that comes next, the heaviest first, then the rest."""

    def visit(here: list[Request], depth: int) -> list[Request]:
        children: dict[tuple[int, ...], list[Request]] = {}
        rest: dict[tuple[int, ...], list[Request]] = {}
        size = scene.cache.page_size
        for request in here:
            pages = scene.cached_pages(request)
            next_page = tuple(request.prompt_ids[:-1][depth * size : (depth + 1) * size].tolist())
            (children if len(pages) > depth else rest).setdefault(next_page, []).append(request)
        found = [visit(child, depth + 1) for child in sorted(children.values(), key=len, reverse=True)]
        return list(chain(*found, *sorted(rest.values(), key=len, reverse=True)))

    by_namespace: dict[Hashable, list[Request]] = {}
    for request in waiting:
        by_namespace.setdefault(request.namespace, []).append(request)
    return list(chain(*(visit(group, 0) for group in sorted(by_namespace.values(), key=len, reverse=True))))


@pytest.mark.parametrize("page_size", [1, 2, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_depth_first_through_the_tree_the_heaviest_child_first(seed: int, page_size: int) -> None:
    scene = Scene(seed, page_size)
    assert order("dfs-weight", scene.waiting, scene.cache) == depth_first(scene, scene.waiting)


def test_depth_first_groups_what_shares_a_page_that_is_not_cached_yet() -> None:
    a, b, c, d = (make_request([*first, 9]) for first in ([1, 1, 5], [2, 2, 5], [1, 1, 6], [2, 2, 2]))
    e = make_request([2, 2, 7, 9])
    assert order("dfs-weight", [a, b, c, d, e], PrefixCache(10, 2)) == [b, d, e, a, c]


def test_depth_first_stands_a_tree_thousands_of_nodes_deep() -> None:
    cache = PrefixCache(3_000, 1)
    prompt = list(range(2_001))
    lock, pages = cache.lock(cache.match(())), cache.allocate(2_000)
    assert pages is not None
    for end in range(1, 2_001):
        cache.insert(prompt[:end], pages, lock)
    deep, shallow = make_request(prompt), make_request([5, 6])
    assert len(cache.match(prompt).path()) == 2_001
    assert order("dfs-weight", [shallow, deep], cache) == [deep, shallow]


@pytest.mark.parametrize("seed", SEEDS)
def test_policies_that_look_at_the_request_alone(seed: int) -> None:
    scene = Scene(seed)
    assert order("fcfs", scene.waiting) == scene.waiting
    assert order("lof", scene.waiting) == sorted(scene.waiting, key=lambda r: r.max_new_tokens, reverse=True)
    assert order("priority", scene.waiting) == sorted(scene.waiting, key=lambda r: r.priority, reverse=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_routing_keys_that_most_running_requests_have_come_first_and_no_key_is_none(seed: int) -> None:
    scene = Scene(seed)
    rng = random.Random(seed)
    running = [
        make_request([1], routing_key=rng.choice((None, None, "a", "b")), namespace=rng.choice((None, "salt")))
        for _ in range(6)
    ]

    def count(request: Request) -> int:
        same = [r for r in running if (r.routing_key, r.namespace) == (request.routing_key, request.namespace)]
        return len(same) if request.routing_key is not None else 0

    found = order("routing-key", scene.waiting, running=running)
    assert found == sorted(scene.waiting, key=count, reverse=True)


def test_random_is_a_permutation_that_the_seed_decides() -> None:
    waiting = [make_request([i]) for i in range(20)]
    shuffled = [order("random", waiting, rng=random.Random(seed)) for seed in (1, 1, 2)]
    assert shuffled[0] == shuffled[1]
    assert shuffled[0] != shuffled[2]
    assert all(sorted(map(id, found)) == sorted(map(id, waiting)) for found in shuffled)
    places = [order("random", waiting, rng=random.Random(seed)).index(waiting[0]) for seed in range(300)]
    assert len(set(places)) == 20, "some place is never drawn"


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "random"])
def test_ties_stay_in_order_of_arrival(policy: SchedulePolicy) -> None:
    waiting = [make_request([7, 7, 7, 7, 7], at=3.0) for _ in range(10)]
    cache = PrefixCache(10, 2)
    store(cache, [7, 7, 7])
    assert order(policy, waiting, cache) == waiting


@pytest.mark.parametrize("policy", POLICIES)
def test_to_arrange_loses_nobody_and_leaves_no_trace(policy: SchedulePolicy) -> None:
    scene = Scene(3)
    before = rows(scene.cache), scene.cache.clock
    found = order(policy, scene.waiting, scene.cache)
    assert sorted(map(id, found)) == sorted(map(id, scene.waiting))
    assert (rows(scene.cache), scene.cache.clock) == before
    assert order(policy, [], scene.cache) == []


def test_the_output_so_far_of_a_preempted_request_counts_as_prompt() -> None:
    cache = PrefixCache(20, 2)
    store(cache, [1, 1, 1, 1, 8, 8, 8, 8])
    preempted, new = make_request([1, 1, 1, 1]), make_request([1, 1, 1, 1, 8, 8, 9])
    preempted.output_ids, preempted.num_sampled = [8, 8, 8, 8, 8], 5
    assert order("lpm", [new, preempted], cache) == [preempted, new]
    assert order("shortest-prefill-first", [new, preempted], cache) == [new, preempted], "both compute one token"
