"""The queue against a list: order, turns of the oldest, what a change costs, and the limit."""

import random

import numpy as np
import pytest

from jradix.request import Request
from jradix.sampling_params import SamplingParams
from jradix.schedule_queue import ARRANGED_LEN, OLDEST_TURN, QueueFullError, WaitingQueue


def make_request(priority: int = 0) -> Request:
    return Request("", np.array([1], np.int32), SamplingParams(), frozenset(), 4, priority=priority)


class HighestFirst:
    """A policy that notes how many requests it was given each time."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, waiting: list[Request]) -> list[Request]:
        assert [request.arrival for request in waiting] == sorted(request.arrival for request in waiting)
        self.lengths.append(len(waiting))
        return sorted(waiting, key=lambda request: -request.priority)


def filled(queue: WaitingQueue, priorities: list[int]) -> list[Request]:
    requests = [make_request(priority) for priority in priorities]
    for request in requests:
        queue.add(request)
    return requests


def drained(queue: WaitingQueue) -> list[Request]:
    found = []
    while queue:
        found.append(queue.admit())
    return found


def test_without_a_policy_first_come_is_first_served() -> None:
    queue = WaitingQueue()
    requests = filled(queue, [1, 5, 3])
    assert list(queue) == requests
    assert drained(queue) == requests
    assert not queue


def test_the_policy_decides_and_retracted_requests_precede_it_the_last_one_first() -> None:
    queue = WaitingQueue(HighestFirst())
    low, high, middle = filled(queue, [1, 5, 3])
    first, second = make_request(-9), make_request(-8)
    queue.put_first(first)
    queue.put_first(second)
    assert list(queue) == [second, first, low, high, middle]
    assert drained(queue) == [second, first, high, middle, low]


def test_whoever_leaves_is_gone_wherever_it_stood() -> None:
    queue = WaitingQueue(HighestFirst())
    low, high, middle = filled(queue, [1, 5, 3])
    retracted = make_request()
    queue.put_first(retracted)
    assert queue.head() is retracted
    queue.remove(retracted)
    assert queue.head() is high
    queue.remove(high)
    assert (high in queue, low in queue, len(queue)) == (False, True, 2)
    assert drained(queue) == [middle, low]


def test_a_preempted_request_is_back_at_its_place_of_arrival() -> None:
    queue = WaitingQueue(HighestFirst())
    first, second, third, fourth = filled(queue, [0, 7, 0, 0])
    assert queue.admit() is second
    second.num_retractions += 1
    queue.restore(second)
    assert list(queue) == [first, second, third, fourth]
    assert drained(queue) == [second, first, third, fourth]
    fourth.num_retractions += 1
    queue.restore(fourth)
    assert list(queue) == [fourth]


def test_the_oldest_is_admitted_once_in_so_many_turns_and_its_turn_lasts() -> None:
    queue = WaitingQueue(HighestFirst())
    oldest, next_oldest = filled(queue, [0, 0])
    for _ in range(OLDEST_TURN - 1):
        [urgent] = filled(queue, [9])
        assert queue.admit() is urgent
    for _ in range(5):
        filled(queue, [9])
        assert queue.head() is oldest, "its turn lasts as long as it finds no room"
    assert queue.admit() is oldest
    assert oldest.preemptions_left == 0
    for _ in range(OLDEST_TURN - 1):
        filled(queue, [9])
        assert queue.admit().priority == 9
    assert queue.admit() is next_oldest


def test_retracted_requests_neither_take_nor_bring_nearer_the_turn_of_the_oldest() -> None:
    queue = WaitingQueue(HighestFirst())
    [oldest] = filled(queue, [0])
    for _ in range(OLDEST_TURN - 1):
        filled(queue, [9])
    for _ in range(3 * OLDEST_TURN):
        queue.put_first(make_request())
        assert queue.admit() is not oldest
    assert [queue.admit().priority for _ in range(OLDEST_TURN)] == [9] * (OLDEST_TURN - 1) + [0]


def test_nothing_is_arranged_anew_while_nobody_comes_or_goes() -> None:
    policy = HighestFirst()
    queue = WaitingQueue(policy)
    filled(queue, [1, 5, 3])
    assert len({queue.head() for _ in range(10)}) == 1
    queue.put_first(make_request())
    queue.admit()
    queue.head()
    assert policy.lengths == [3]
    queue.admit()
    queue.head()
    filled(queue, [4])
    queue.head()
    assert policy.lengths == [3, 2, 3]


@pytest.mark.parametrize("length", [1, ARRANGED_LEN, ARRANGED_LEN + 1, 1_000, 5_000])
def test_a_change_arranges_a_bounded_number_of_requests_however_many_wait(length: int) -> None:
    rng = random.Random(0)
    policy = HighestFirst()
    queue = WaitingQueue(policy)
    filled(queue, [rng.randrange(100) for _ in range(length)])
    queue.head()
    policy.lengths.clear()
    num_changes = 500
    for _ in range(num_changes):
        if rng.random() < 0.5 and len(queue) > 1:
            queue.admit()
        else:
            filled(queue, [rng.randrange(100)])
        queue.head()
        queue.head()
    assert sum(policy.lengths) <= ARRANGED_LEN * (num_changes + 1)
    assert not policy.lengths or sum(policy.lengths) / num_changes > ARRANGED_LEN / 4 or length < 2 * ARRANGED_LEN


def test_an_arrival_is_overlooked_for_a_bounded_number_of_changes() -> None:
    queue = WaitingQueue(HighestFirst())
    filled(queue, [0] * 1_000)
    queue.head()
    [urgent] = filled(queue, [9])
    assert urgent in [queue.admit() for _ in range(1_000 // ARRANGED_LEN + 1)]


def test_more_than_may_wait_are_refused_with_the_numbers_and_those_that_ran_already_do_not_count() -> None:
    queue = WaitingQueue(HighestFirst(), max_queued=3)
    queue.require_room(3)
    with pytest.raises(QueueFullError, match=r"0 requests are waiting and 4 more exceed max_queued_requests 3"):
        queue.require_room(4)
    _, preempted = filled(queue, [0, 9])
    queue.admit()
    preempted.num_retractions += 1
    queue.restore(preempted)
    queue.put_first(make_request())
    queue.require_room(2)
    with pytest.raises(QueueFullError, match="1 requests are waiting and 3 more"):
        queue.require_room(3)
    drained(queue)
    filled(queue, [0, 0, 0])
    with pytest.raises(QueueFullError, match="3 requests are waiting and 1 more"):
        queue.require_room(1)
    WaitingQueue().require_room(10**9)


@pytest.mark.parametrize("seed", range(10))
def test_random_comings_and_goings_are_those_of_a_list(seed: int) -> None:
    rng = random.Random(seed)
    queue = WaitingQueue(HighestFirst())
    retracted: list[Request] = []
    others: list[Request] = []  # by arrival
    running: list[Request] = []
    passed_over = 0
    for _ in range(300):
        action = rng.randrange(6)
        if action < 2:
            others += filled(queue, [rng.randrange(4)])
        elif action == 2 and running:
            request = running.pop(rng.randrange(len(running)))
            request.num_retractions += 1
            queue.put_first(request)
            retracted.insert(0, request)
        elif action == 3 and running:
            request = running.pop(rng.randrange(len(running)))
            request.num_retractions += 1
            queue.restore(request)
            others = sorted([*others, request], key=lambda other: other.arrival)
        elif action == 4 and retracted + others:
            request = rng.choice(retracted + others)
            queue.remove(request)
            (retracted if request in retracted else others).remove(request)
        elif retracted:
            assert queue.admit() is retracted[0]
            running.append(retracted.pop(0))
        elif others:
            turn = passed_over == OLDEST_TURN - 1
            want = others[0] if turn else max(others, key=lambda other: (other.priority, -other.arrival))
            assert queue.admit() is want
            passed_over = 0 if want is others[0] else passed_over + 1
            others.remove(want)
            running.append(want)
        assert list(queue) == retracted + others
        assert len(queue) == len(retracted) + len(others)
        assert all(request in queue for request in retracted + others)
        assert not any(request in queue for request in running)
