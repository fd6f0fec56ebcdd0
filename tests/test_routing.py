"""Where requests go: to their prefix, to whoever has least to do, and always as a plain model of the rule says."""

from collections.abc import Hashable, Sequence

import numpy as np
import pytest

from jradix.request import Request
from jradix.routing import EXPECTED_OUTPUT, MIN_SHARE, OUTPUT_COST, TOLERANCE, Router, prefix_hashes
from jradix.sampling_params import SamplingParams

PAGE, PARAMS = 4, SamplingParams()


def request(
    name: str, tokens: Sequence[int], namespace: Hashable = None, output: int = 1, groups: tuple[str, ...] = ()
) -> Request:
    return Request(
        id=name,
        prompt_ids=np.array(tokens, np.int32),
        params=PARAMS,
        stop_ids=frozenset(),
        max_new_tokens=output,
        namespace=namespace,
        groups=groups,
    )


def random_tokens(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()


def finish(router: Router, ended: Request) -> None:
    """End it as one whose prompt was computed."""
    ended.computed_len = ended.prompt_len
    router.end(ended)


class PlainRouter:
    """The rule over prefixes spelled out: in a list for each replica, the one used longest ago first."""

    def __init__(self, num_replicas: int, num_pages: int) -> None:
        self.known: list[list[tuple[Hashable, ...]]] = [[] for _ in range(num_replicas)]
        self.num_pages = num_pages
        self.loads = [0] * num_replicas
        self.computed = [0] * num_replicas
        self.live: dict[str, tuple[int, int, set[tuple[Hashable, ...]]]] = {}

    def prefixes(self, tokens: Sequence[int], namespace: Hashable) -> list[tuple[Hashable, ...]]:
        return [(namespace, *tokens[:end]) for end in range(PAGE, len(tokens) + 1, PAGE)]

    def matched(self, replica: int, tokens: list[int], namespace: Hashable) -> int:
        length = 0
        for prefix in self.prefixes(tokens, namespace):
            if prefix not in self.known[replica]:
                break
            length = len(prefix) - 1
        length = min(length, len(tokens) - 1)
        return length if length >= MIN_SHARE * len(tokens) else 0

    def remember(self, replica: int, tokens: list[int], namespace: Hashable) -> None:
        fresh = self.prefixes(tokens, namespace)[::-1]
        kept = [prefix for prefix in self.known[replica] if prefix not in fresh]
        self.known[replica] = (kept + fresh)[-self.num_pages :]

    def place(self, requests: list[Request]) -> list[int]:
        prompts = [(r, r.prompt_ids.tolist(), OUTPUT_COST * min(r.max_new_tokens, EXPECTED_OUTPUT)) for r in requests]
        replicas = range(len(self.loads))
        new: set[tuple[Hashable, ...]] = set()  # prefixes of any length that the list brings
        work = 0
        for r, tokens, output in sorted(prompts, key=lambda prompt: prompt[0].prompt_ids.tobytes()):
            every = [(r.namespace, *tokens[:end]) for end in range(1, len(tokens) + 1)]
            shared = max((len(prefix) - 1 for prefix in every if prefix in new), default=0)
            best = max(self.matched(replica, tokens, r.namespace) for replica in replicas)
            work += len(tokens) - max(shared, best) + output
            new.update(every)
        limit = max(sum(self.loads) + work, TOLERANCE * sum(self.loads)) / len(self.loads)
        chosen = []
        for r, tokens, output in prompts:
            matched = [self.matched(replica, tokens, r.namespace) for replica in replicas]
            then = [self.loads[n] + len(tokens) - matched[n] + output for n in replicas]
            equal = max(limit, TOLERANCE * min(then))
            keys = [(max(equal, then[n]), -matched[n], self.loads[n], self.computed[n]) for n in replicas]
            place = keys.index(min(keys))
            load = len(tokens) - matched[place] + output
            self.live[r.id] = place, load, set(self.prefixes(tokens, r.namespace)) - set(self.known[place])
            self.loads[place] += load
            self.computed[place] += len(tokens) - matched[place]
            self.remember(place, tokens, r.namespace)
            chosen.append(place)
        return chosen

    def end(self, r: Request, is_lost: bool) -> None:
        place, load, new = self.live.pop(r.id)
        self.loads[place] -= load
        tokens = [*r.prompt_ids.tolist(), *r.output_ids][: r.computed_len]
        broken = new - set(self.prefixes(tokens, r.namespace))
        self.known[place] = [] if is_lost else [prefix for prefix in self.known[place] if prefix not in broken]
        if not is_lost:
            self.remember(place, tokens, r.namespace)


@pytest.mark.parametrize("seed", range(4))
def test_the_router_does_what_a_plain_model_of_it_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_replicas, num_pages = int(rng.integers(2, 5)), int(rng.integers(6, 40))
    router, plain = Router(num_replicas, PAGE, num_pages), PlainRouter(num_replicas, num_pages)
    live: list[Request] = []
    seen = [random_tokens(100 + index, 24) for index in range(4)]
    moved = 0
    for number in range(250):
        action = rng.random()
        if action < 0.5 or not live:
            made = []
            for index in range(int(rng.integers(1, 5)) if rng.random() < 0.3 else 1):
                stem = seen[rng.integers(len(seen))]
                tokens = stem[: rng.integers(1, len(stem) + 1)] + random_tokens(
                    1000 * number + index, int(rng.integers(9))
                )
                namespace = [None, None, "a"][rng.integers(3)]
                made.append(request(f"{number}-{index}", tokens, namespace, output=int(rng.integers(300))))
            placed = router.place(made)
            assert placed == plain.place(made)
            moved += len(set(placed)) > 1
            live += made
        elif action < 0.97:
            ended = live.pop(rng.integers(len(live)))
            ended.output_ids += random_tokens(number, int(rng.integers(12)))
            ended.computed_len = int(rng.integers(2) * ended.prompt_len) + len(ended.output_ids)
            seen[rng.integers(len(seen))] = [*ended.prompt_ids.tolist(), *ended.output_ids][-40:]
            is_lost = rng.random() < 0.05
            router.end(ended, is_lost)
            router.end(ended)  # the second time it is nothing
            plain.end(ended, is_lost)
        else:
            router.forget()
            plain.known = [[] for _ in plain.known]
        assert router.loads == plain.loads
    assert moved, "no list was spread"
    for left in live:
        router.end(left)
    assert router.loads == [0] * num_replicas
    assert not router._ids


def test_unrelated_prompts_are_spread_within_the_work_of_one() -> None:
    """One by one, ended at random, and as a list."""
    rng = np.random.default_rng(0)
    router = Router(3, PAGE, 10_000)
    live: list[Request] = []
    largest = 300 + OUTPUT_COST * 20
    for number in range(300):
        live.append(
            request(str(number), random_tokens(number, int(rng.integers(10, 300))), output=int(rng.integers(1, 20)))
        )
        before = router.loads
        [replica] = router.place(live[-1:])
        assert before[replica] == min(before)
        if rng.random() < 0.6:
            finish(router, live.pop(rng.integers(len(live))))
    for left in live:
        finish(router, left)
    prompts = [request(f"l{n}", random_tokens(1000 + n, int(rng.integers(10, 300))), output=20) for n in range(60)]
    router.place(prompts)
    assert max(router.loads) - min(router.loads) <= largest


def test_one_after_another_unrelated_prompts_fill_all_pools_alike() -> None:
    router = Router(4, PAGE, 10_000)
    counts = [0] * 4
    for number in range(40):
        one = request(str(number), random_tokens(number, 50))
        counts[router.place([one])[0]] += 1
        finish(router, one)
    assert counts == [10] * 4


def test_a_hot_prefix_stays_where_it_is_until_another_replica_has_much_less_to_do() -> None:
    router, prefix = Router(2, PAGE, 10_000), random_tokens(0, 400)
    background = [request(f"b{n}", random_tokens(10 + n, 40), output=100) for n in range(16)]
    router.place(background)
    home = router.place([request("first", prefix)])[0]
    placed = [router.place([request(str(n), [*prefix, n], output=100)])[0] for n in range(40)]
    first_elsewhere = placed.index(1 - home)
    assert first_elsewhere > 2, "a small difference drives it away"
    rest = placed[first_elsewhere:]
    assert abs(rest.count(0) - rest.count(1)) <= len(rest) / 3, "both have it now, and share the load"
    assert max(router.loads) < 1.5 * min(router.loads)


def test_a_list_keeps_prompts_with_a_common_prefix_together_and_the_replicas_even() -> None:
    stems = [random_tokens(seed, 200) for seed in range(10)]
    tokens = [stems[index % 10] + random_tokens(100 + index, 20) for index in range(100)]
    prompts = [request(str(index), each, output=10) for index, each in enumerate(tokens)]
    router = Router(2, PAGE, 100_000)
    placed = router.place(prompts)
    homes = {(index % 10, replica) for index, replica in enumerate(placed)}
    assert len(homes) <= 10 + 2, "stems are computed on both"
    assert max(router.loads) < 1.15 * min(router.loads)
    again = [request(f"again {index}", each, output=10) for index, each in enumerate(tokens)]
    for each in prompts:
        finish(router, each)
    assert sum(a == b for a, b in zip(router.place(again), placed, strict=True)) > 90, (
        "the next round finds its prefixes"
    )


def test_prompts_that_were_never_computed_are_known_nowhere() -> None:
    """As after a refusal; what another request has computed stays known."""
    router, stem = Router(2, PAGE, 1000), random_tokens(0, 40)
    first = request("first", stem)
    [home] = router.place([first])
    refused = [request("refused", [*stem, *random_tokens(1, 40)]), request("new", random_tokens(2, 40))]
    placed = router.place(refused)
    assert placed[0] == home
    for each in refused:
        router.end(each)
    finish(router, first)
    assert [len(known) for known in router._known] == [10 * (replica == home) for replica in range(2)]


def test_samples_of_a_prompt_go_to_one_replica_and_load_it_with_each() -> None:
    router, shared = Router(2, PAGE, 100), np.arange(40, dtype=np.int32)
    samples = [request(f"a-{n}", [], output=10, groups=("a",)) for n in range(3)]
    for sample in samples:
        sample.prompt_ids, sample.prompt_len = shared, 40
    other = request("b", random_tokens(0, 40), output=10)
    placed = router.place([*samples, other])
    assert placed == [0, 0, 0, 1]
    assert router.loads == [40 + 30 * OUTPUT_COST, 40 + 10 * OUTPUT_COST]
    for sample, left in zip(samples, (2, 1, 0), strict=True):
        finish(router, sample)
        assert bool(router.loads[0]) == bool(left)


def test_a_salt_is_a_world_of_its_own_and_a_small_part_of_a_prompt_does_not_bind() -> None:
    router, stem = Router(2, PAGE, 1000), random_tokens(0, 40)
    for salt in ("a", "b", None):
        first = request(f"first {salt}", stem, salt)
        home = router.place([first])[0]
        finish(router, first)
        for number in range(3):
            one = request(f"{salt} {number}", [*stem, *random_tokens(number, 20)], salt)
            assert router.place([one]) == [home]
            finish(router, one)
    counts = [0, 0]
    for number in range(8):
        one = request(str(number), [*stem, *random_tokens(50 + number, 400)])
        counts[router.place([one])[0]] += 1
        finish(router, one)
    assert min(counts) >= 3, "its first tenth keeps every prompt on one replica"


def test_an_id_is_taken_on_all_replicas_until_its_request_ends() -> None:
    router = Router(2, PAGE, 100)
    first, other = request("x", [1] * 9), request("y", [2] * 9, groups=("both",))
    router.place([first, other])
    loads = router.loads
    for taken in ("x", "y", "both"):
        with pytest.raises(ValueError, match=f"rid '{taken}' belongs to a request that is still running"):
            router.place([request("z", [3] * 9), request(taken, [4] * 9)])
        assert router.loads == loads
    finish(router, first)
    finish(router, other)
    router.place([request("z", [3] * 9), request("x", [4] * 9), request("both", [5] * 9)])


def test_hashes_of_prefixes_are_equal_for_equal_prefixes_alone() -> None:
    tokens = np.array(random_tokens(0, 64), np.int32)
    hashes = prefix_hashes(tokens, None, PAGE)
    assert len(set(hashes)) == len(hashes) == 16
    for length in (4, 7, 36, 63):
        assert prefix_hashes(tokens[:length], None, PAGE) == hashes[: length // PAGE]
    assert prefix_hashes(tokens[:3], None, PAGE) == []
    changes = [tokens.copy() for _ in range(3)]
    changes[0][[1, 2]] = changes[0][[2, 1]]  # the same tokens at other positions
    changes[1][0] += 1
    changes[2][[0, 1]] += [1, -1]  # the same sum
    others = [*(prefix_hashes(changed, None, PAGE) for changed in changes), prefix_hashes(tokens, "a", PAGE)]
    assert len({hashes[0], *(other[0] for other in others)}) == 5
