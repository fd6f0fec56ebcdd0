"""Decides which replica of an engine gets a request: the one that has its prefix, unless it has much more to do.

A replica's radix tree belongs to its own thread, so the router keeps a record of what it has sent where, as the router
of SGLang's project does. What a choice costs is counted in tokens, those to compute beside those outstanding, as the
router of NVIDIA's Dynamo does.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile

import numpy as np
import numpy.typing as npt

from jradix.offline import sort_by_tokens
from jradix.request import Request

OUTPUT_COST = 8
"""Prompt tokens that cost as much as one of output: 5 to 14 for a model of 8B parameters, by bytes and peaks."""
EXPECTED_OUTPUT = 128
"""The most tokens of output that a request counts with: limits are often far above what is used."""
TOLERANCE = 1.25
"""A replica may have so many times the mean load before others are preferred to it."""
MIN_SHARE = 0.25
"""A prefix that is a smaller part of its prompt does not bind it: else a system prompt would fill one pool and leave
the others empty. It is computed once on each replica, and then binds to none."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt to be sent to one replica, with all its samples. hashes: see `prefix_hashes`."""

    samples: tuple[Request, ...]
    hashes: list[int]

    @property
    def output_work(self) -> int:
        return OUTPUT_COST * sum(min(request.max_new_tokens, EXPECTED_OUTPUT) for request in self.samples)


@dataclass(frozen=True, slots=True)
class _Placed:
    """Where a request is, its part of the load there, and how many prefixes of its prompt were known before."""

    replica: int
    load: int
    num_known: int


class Router:
    """Chooses replicas, and knows of each what is outstanding there and which prefixes it was sent last.

    A prompt adds to a replica's load the tokens of which it lacks the KV, and `OUTPUT_COST` for each token of output.
    The replica that would then have the smallest load gets it. But loads below a limit count as equal, and among equals
    the longest known prefix decides. The limit is `TOLERANCE` times the mean load now, or times the smallest load then.
    For a list of prompts it is at least a fair share of all that is then outstanding: so prompts with a common prefix
    stay together, as long as that leaves no replica idle.

    Samples of one prompt go to one replica. For any thread.
    """

    def __init__(self, num_replicas: int, page_size: int, num_pages: int) -> None:
        """num_pages: of each pool, and so the most prefixes that are remembered of each replica."""
        self._page_size, self._num_pages = page_size, num_pages
        self._lock = threading.Lock()
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]  # latest last
        self._loads = [0] * num_replicas
        self._computed = [0] * num_replicas  # prompt tokens that were not known, of all time
        self._live: dict[str, _Placed] = {}  # by the request's id
        self._ids: Counter[str] = Counter()  # by which callers know live requests

    @property
    def loads(self) -> list[int]:
        """What is outstanding on each replica, in prompt tokens."""
        return list(self._loads)

    def place(self, requests: Sequence[Request]) -> list[int]:
        """The replica of each request, where it counts as outstanding until `end`.

        Raises:
            ValueError: an id belongs to a live request, on whichever replica. Then nothing is placed.
        """
        prompts = list(self._prompts(requests))
        with self._lock:
            self._claim_ids(requests)
        limit = self._limit(prompts)
        replicas: list[int] = []
        for prompt in prompts:
            with self._lock:  # not for all of a long list: a request that ends waits for it, and a step for that
                replicas += [self._place(prompt, limit)] * len(prompt.samples)
        return replicas

    def end(self, request: Request, is_lost: bool = False) -> None:
        """The request is no longer outstanding, and what was computed is cached; or the replica's cache `is_lost`.

        Does nothing the second time.
        """
        num_cached = min(request.computed_len, request.prompt_len + len(request.output_ids))
        hashes = prefix_hashes(request.token_ids(num_cached), request.namespace, self._page_size)
        promised: list[int] = []
        if num_cached < request.prompt_len:
            promised = prefix_hashes(request.prompt_ids, request.namespace, self._page_size)
        with self._lock:
            placed = self._live.pop(request.id, None)
            if placed is None:
                return
            self._loads[placed.replica] -= placed.load
            for known_as in (request.id, *request.groups):
                self._ids[known_as] -= 1
                if not self._ids[known_as]:
                    del self._ids[known_as]
            known = self._known[placed.replica]
            if is_lost:
                known.clear()
                return
            for prefix in promised[max(placed.num_known, len(hashes)) :]:
                known.pop(prefix, None)
            self._remember(placed.replica, hashes)

    def remember(self, replica: int, token_ids: npt.NDArray[np.int32], namespace: Hashable) -> None:
        """The replica has these tokens cached, from elsewhere."""
        hashes = prefix_hashes(token_ids, namespace, self._page_size)
        with self._lock:
            self._remember(replica, hashes)

    def forget(self) -> None:
        """Nothing is cached anywhere."""
        with self._lock:
            for known in self._known:
                known.clear()

    def _claim_ids(self, requests: Sequence[Request]) -> None:
        for request in requests:
            for known_as in (request.id, *request.groups):
                if known_as in self._ids:
                    raise ValueError(f"rid {known_as!r} belongs to a request that is still running: choose another")
        for request in requests:
            self._ids.update((request.id, *request.groups))

    def _prompts(self, requests: Sequence[Request]) -> Iterator[_Prompt]:
        for _, samples in groupby(requests, key=lambda request: id(request.prompt_ids)):
            first, *others = samples
            hashes = prefix_hashes(first.prompt_ids, first.namespace, self._page_size)
            yield _Prompt((first, *others), hashes)

    def _limit(self, prompts: Sequence[_Prompt]) -> float:
        """The load below which no replica counts as having more to do than another."""
        lens = np.array([prompt.samples[0].prompt_len for prompt in prompts])
        in_order, shared = np.zeros(1, np.int64), np.zeros(1, np.int64)
        if len(prompts) > 1:
            firsts = [prompt.samples[0] for prompt in prompts]
            in_order, shared = sort_by_tokens([r.prompt_ids for r in firsts], [r.namespace for r in firsts])
        known = np.array([max(self._matched_lens(prompt, self._num_known(prompt))) for prompt in prompts])
        work = lens.sum() - np.maximum(shared, known[in_order]).sum() + sum(prompt.output_work for prompt in prompts)
        load = sum(self._loads)
        return max(load + work, TOLERANCE * load) / len(self._loads)

    def _place(self, prompt: _Prompt, limit: float) -> int:
        num_known = self._num_known(prompt)
        matched_lens = self._matched_lens(prompt, num_known)
        works = [prompt.samples[0].prompt_len - matched_len + prompt.output_work for matched_len in matched_lens]
        loads = [load + work for load, work in zip(self._loads, works, strict=True)]
        limit = max(limit, TOLERANCE * min(loads))

        def cost(replica: int) -> tuple[float, ...]:
            return max(limit, loads[replica]), -matched_lens[replica], self._loads[replica], self._computed[replica]

        replica = min(range(len(works)), key=cost)
        self._loads[replica] += works[replica]
        self._computed[replica] += works[replica] - prompt.output_work
        rest = works[replica]
        for num_left, sample in zip(range(len(prompt.samples), 0, -1), prompt.samples, strict=True):
            part = rest // num_left
            self._live[sample.id] = _Placed(replica, part, num_known[replica])
            rest -= part
        self._remember(replica, prompt.hashes)
        return replica

    def _num_known(self, prompt: _Prompt) -> list[int]:
        """How many prefixes of the prompt each replica knows without a gap."""
        return [sum(1 for _ in takewhile(known.__contains__, prompt.hashes)) for known in self._known]

    def _matched_lens(self, prompt: _Prompt, num_known: Sequence[int]) -> list[int]:
        """Tokens of the prompt that each replica need not compute; 0 where they are too few to count."""
        prompt_len = prompt.samples[0].prompt_len
        lens = [min(number * self._page_size, prompt_len - 1) for number in num_known]
        return [matched_len if matched_len >= MIN_SHARE * prompt_len else 0 for matched_len in lens]

    def _remember(self, replica: int, hashes: Sequence[int]) -> None:
        """The longest prefix first, so that none is forgotten before those that go on from it."""
        known = self._known[replica]
        for prefix in reversed(hashes):
            known[prefix] = None
            known.move_to_end(prefix)
        while len(known) > self._num_pages:
            known.popitem(last=False)


def prefix_hashes(token_ids: npt.NDArray[np.int32], namespace: Hashable, page_size: int) -> list[int]:
    """A number of 64 bits for each prefix of whole pages: the sum of one for each token and position.

    Two prefixes may have the same number, with which a request might go to the wrong replica, and no worse.
    """
    num_tokens = len(token_ids) // page_size * page_size
    mixed = token_ids[:num_tokens].astype(np.uint64)
    mixed += np.arange(num_tokens, dtype=np.uint64) << np.uint64(32)
    mixed += np.uint64(hash(("namespace", namespace)) % 2**64)
    for factor, shift in ((0x9E3779B97F4A7C15, 32), (0xD6E8FEB86659FD93, 29)):  # odd, with bits all over
        mixed *= np.uint64(factor)
        mixed ^= mixed >> np.uint64(shift)
    return np.cumsum(mixed)[page_size - 1 :: page_size].tolist()
