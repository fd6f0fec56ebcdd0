"""Tenants: what one does looks the same to another, whether it asked the same prompt or a different one.

Time is counted in steps and in tokens that each row computes, on a device on paper that checks all KV.
"""

from collections.abc import Sequence
from typing import Any, get_args

import pytest

from jradix.cache.radix import as_page_ids
from jradix.config import EvictionPolicy, SchedulePolicy
from jradix.request import Request
from tests.paper_device import PaperDevice

SAME = [position % 47 for position in range(90)]
OTHER = [(position * 5 + 11) % 47 for position in range(90)]  # no page of it is one of the other
POLICIES: tuple[SchedulePolicy, ...] = get_args(SchedulePolicy)
EVICTION_POLICIES: tuple[EvictionPolicy, ...] = get_args(EvictionPolicy)


class Device(PaperDevice):
    """With a clock that counts steps."""

    def __init__(self, policy: SchedulePolicy = "fcfs", **options: Any) -> None:
        sizes = {"num_pages": 400, "page_size": 4, "chunk": 32, **options}
        super().__init__(**sizes, schedule_policy=policy, clock=lambda: float(self.num_steps))

    def add(self, prompt_ids: list[int], *args: Any, **options: Any) -> Request:
        request = super().add(prompt_ids, *args, **options)
        request.arrival_time = float(self.num_steps)
        return request


def work_of(device: PaperDevice, requests: Sequence[Request]) -> list[list[tuple[int, int, int]]]:
    """Run to the end; for each step (place in `requests`, first token, tokens) of the rows that are theirs."""
    steps = []
    while device.scheduler.has_work or device.in_flight:
        plan = device.step()
        if plan is not None:
            mine = [row for row in plan.rows if row.request in requests]
            steps.append([(requests.index(row.request), row.start, row.num_tokens) for row in mine])
    device.check_outputs()
    device.check_idle()
    return steps


def assert_no_page_is_shared(device: PaperDevice) -> None:
    pages = {
        namespace: {int(page) for node in device.cache.tree.subtree(root) for page in as_page_ids(node.pages)}
        for namespace, root in device.cache.tree.roots.items()
    }
    assert {"a", "b"} <= set(pages)
    assert sum(map(len, pages.values())) == len(set().union(*pages.values()))


def test_a_prompt_takes_what_it_takes_alone_after_another_tenant_has_asked_it() -> None:
    alone = Device()
    expected = work_of(alone, [alone.add(SAME, namespace="b")])
    device = Device()
    for asked in ("a", None):
        device.add(SAME, namespace=asked)
        device.run()
    mine = device.add(SAME, namespace="b")
    assert work_of(device, [mine]) == expected
    assert mine.cached_tokens == 0
    assert_no_page_is_shared(device)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rows", [1, 8])
def test_beside_the_same_prompt_of_another_tenant_is_as_beside_a_different_one(
    policy: SchedulePolicy, rows: int
) -> None:
    """Before it, in the very same steps, and behind it; with a batch and with a queue."""

    def mine_beside(prompt: list[int]) -> list[list[tuple[int, int, int]]]:
        device = Device(policy, rows=rows)
        device.add(prompt[:60], namespace="a")
        device.run()
        mine: list[Request] = []
        for turn in range(4):
            device.add([*prompt, turn], namespace="a", routing_key="key", max_new_tokens=6)
            mine.append(device.add([*SAME, turn], namespace="b", routing_key="key"))
        device.step()
        for turn in range(4, 6):
            mine.append(device.add([*SAME, turn], namespace="b"))
            device.add([*prompt, turn], namespace="a")
        steps = work_of(device, mine)
        assert_no_page_is_shared(device)
        return steps

    assert mine_beside(SAME) == mine_beside(OTHER)


def test_beside_an_equal_prompt_of_the_same_tenant_is_not_as_beside_a_different_one() -> None:
    """Otherwise the test above could not fail."""

    def mine_beside(prompt: list[int]) -> list[list[tuple[int, int, int]]]:
        device = Device()
        device.add(prompt, namespace="b")
        return work_of(device, [device.add(SAME, namespace="b")])

    assert mine_beside(SAME) != mine_beside(OTHER)


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_what_is_evicted_does_not_depend_on_what_another_tenant_asked(policy: EvictionPolicy) -> None:
    """The pool is too small for both, and each comes back to its prompts."""

    def mine_after(others: list[int]) -> list[tuple[int, int]]:
        device = Device(num_pages=30, eviction_policy=policy)
        for turn in range(24):
            for _ in range(1 + turn % 4):
                device.add([turn % 3, *others[:40]], namespace="a")
                device.run()
            device.add([turn % 3, *SAME[:40]], namespace="b")
            device.run()
        mine = [(r.cached_tokens, r.num_retractions) for r in device.requests if r.namespace == "b"]
        tree = device.cache.tree
        return [*mine, *sorted((node.end, node.uses) for node in tree.subtree(tree.roots["b"]))]

    assert mine_after(SAME) == mine_after(OTHER)
