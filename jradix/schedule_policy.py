"""In which order waiting requests should be admitted, by each policy.

A policy only looks: it changes neither requests nor cache. Names and meanings follow SGLang where it has them.
"""

import random
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from jradix.cache.prefix_cache import Match, PrefixCache
from jradix.config import SchedulePolicy
from jradix.request import Request


def arrange(
    policy: SchedulePolicy,
    waiting: Sequence[Request],
    *,
    cache: PrefixCache,
    running: Sequence[Request],
    output_share: float,
    now: float,
    rng: random.Random,
) -> list[Request]:
    """The waiting requests, best first; ties stay in the order in which they come, that of arrival.

    Policies that ask for cached prefixes look up each request once.

    Args:
        output_share: the part of their `max_new_tokens` that requests are expected to use.
        now: on the clock of `Request.arrival_time`.
        rng: of policy "random", which shuffles anew each time.
    """
    match policy:
        case "fcfs":
            return list(waiting)
        case "lpm":  # longest cached prefix
            return sorted(waiting, key=lambda request: -_cached_len(request, cache))
        case "dfs-weight":
            return _depth_first(waiting, cache)
        case "lof":  # longest output
            return sorted(waiting, key=lambda request: -request.max_new_tokens)
        case "random":
            return rng.sample(waiting, len(waiting))
        case "hrrn":  # highest response ratio
            return sorted(waiting, key=lambda request: -_response_ratio(request, cache, output_share, now))
        case "shortest-prefill-first":
            return sorted(waiting, key=lambda request: request.seq_len - _cached_len(request, cache))
        case "priority":
            return sorted(waiting, key=lambda request: -request.priority)
        case "routing-key":  # the same as most of those that run; one of another namespace is not the same
            keys = ((request.namespace, request.routing_key) for request in running)
            counts = Counter(key for key in keys if key[1] is not None)
            return sorted(waiting, key=lambda request: -counts[request.namespace, request.routing_key])


def _match(request: Request, cache: PrefixCache) -> Match:
    return cache.match(request.token_ids(request.seq_len - 1), request.namespace)


def _cached_len(request: Request, cache: PrefixCache) -> int:
    match = _match(request, cache)
    return match.num_tokens + match.head_len


def _response_ratio(request: Request, cache: PrefixCache, output_share: float, now: float) -> float:
    """(waiting time + service time) / service time, less 1, where the service is tokens to compute.

    How long a token takes is left out, as it scales all these alike.
    """
    service = request.seq_len - _cached_len(request, cache) + output_share * request.max_new_tokens
    return (now - request.arrival_time) / service


@dataclass(slots=True)
class _Branch:
    """A place in the tree with the waiting requests that pass it; dicts keep the order of the first arrival."""

    weight: int = 0
    children: dict[Hashable, "_Branch"] = field(default_factory=dict)
    ending: dict[tuple[int, bytes], list[Request]] = field(default_factory=dict)

    def in_order(self) -> "list[_Branch | list[Request]]":
        """The heaviest child first; after the children the requests whose match ends here, the longest first.

        Those are grouped by the page that comes next: the first of a group will put it into the tree for the others.
        """
        children = sorted(self.children.values(), key=lambda child: child.weight, reverse=True)
        groups = sorted(self.ending.items(), key=lambda item: (-item[0][0], -len(item[1])))
        return [*children, *(group for _, group in groups)]


def _depth_first(waiting: Sequence[Request], cache: PrefixCache) -> list[Request]:
    """Depth-first through the tree, so that requests with a common prefix run next to each other."""
    top = _Branch()
    for request in waiting:
        match = _match(request, cache)
        branch = top
        for place in reversed(match.path()):
            if (child := branch.children.get(place)) is None:
                child = branch.children[place] = _Branch()
            branch = child
            branch.weight += 1
        tokens = request.token_ids(request.seq_len - 1)
        next_page = tokens[match.num_tokens : match.num_tokens + cache.page_size].tobytes()
        branch.ending.setdefault((match.num_tokens, next_page), []).append(request)
    order: list[Request] = []
    pending: list[_Branch | list[Request]] = [top]  # a loop: the tree may be thousands of nodes deep
    while pending:
        item = pending.pop()
        if isinstance(item, _Branch):
            pending.extend(reversed(item.in_order()))
        else:
            order += item
    return order
