"""Priorities: who is preempted for whom, what that may not do, and who is retracted when pages run out."""

from typing import Any

import pytest

from jradix.request import MAX_PREEMPTIONS, Request, RequestState
from jradix.schedule_queue import OLDEST_TURN
from jradix.scheduler import ResultsNeededError
from tests.paper_device import PaperDevice, serial_output


def device_with(num_pages: int = 60, rows: int = 3, **options: Any) -> PaperDevice:
    options = {"schedule_policy": "priority", "preemption_threshold": 10} | options
    return PaperDevice(num_pages, 4, rows=rows, chunk=64, **options)


def run_all(device: PaperDevice) -> None:
    device.run()
    device.check_outputs()
    device.check_idle()


def running_ids(device: PaperDevice) -> list[str]:
    return [request.id for request in device.scheduler.running]


def test_an_urgent_request_takes_the_slot_of_the_least_urgent_and_youngest_and_it_goes_back_to_its_place() -> None:
    device = device_with()
    old, low, young = (device.add([i] * 5, 20, priority=priority) for i, priority in enumerate((1, 0, 0)))
    device.step()
    later = device.add([8] * 5, 3, priority=0)
    urgent = device.add([9] * 5, 3, priority=10)
    device.step()
    assert running_ids(device) == [old.id, low.id, urgent.id]
    assert list(device.scheduler.waiting) == [young, later]
    assert (young.num_retractions, young.preemptions_left) == (1, MAX_PREEMPTIONS - 1)
    assert (young.slot, young.num_pages, young.lock) == (-1, 0, None)
    run_all(device)


@pytest.mark.parametrize(("policy", "difference"), [("priority", 9), ("fcfs", 10), ("lof", 10)])
def test_nobody_is_preempted_below_the_threshold_or_under_another_policy(policy: Any, difference: int) -> None:
    device = device_with(schedule_policy=policy)
    for i in range(3):
        device.add([i] * 5, 20)
    device.step()
    urgent = device.add([9] * 5, 20, priority=difference)
    device.step()
    device.step()
    assert urgent.state is RequestState.WAITING
    assert device.scheduler.num_retractions == 0
    run_all(device)


def test_no_more_are_preempted_than_make_room_and_none_if_all_together_would_not() -> None:
    device = device_with(num_pages=24, rows=8)
    for i in range(4):
        device.add([i] * 16, 8, priority=i)  # 4 pages each at first, 6 in the end
    device.add([5] * 4, 40, priority=50)
    for _ in range(3):
        device.step()
    assert len(device.scheduler.running) == 5
    device.add([9] * 54, 20, priority=40)  # 14 pages at least
    device.step()
    device.step()
    assert device.scheduler.num_retractions == 3, "of priority 0, 1 and 2"
    assert sorted(request.priority for request in device.scheduler.running) == [3, 40, 50]
    too_large = device.add([8] * 90, 4, priority=45)  # 23 pages, and that of priority 50 keeps 2
    device.step()
    assert too_large.state is RequestState.WAITING
    assert device.scheduler.num_retractions == 3
    run_all(device)


def test_pages_shared_with_others_are_no_room() -> None:
    """The victims hold 12 pages each, of which 10 are those of one that stays."""
    device = device_with(num_pages=24, rows=8)
    device.add([1] * 40, 30, priority=99)
    device.step()
    for i in range(3):
        device.add([*[1] * 40, 2 + i, 3, 4, 5], 20)
    device.step()
    device.step()
    assert len(device.scheduler.running) == 4
    device.add([9] * 50, 2, priority=50)  # 13 pages; without the three there are 24 - 11, less what the first will need
    for _ in range(3):
        device.step()
    assert device.scheduler.num_retractions == 0
    run_all(device)


def test_what_a_victim_would_still_need_is_room_too() -> None:
    device = PaperDevice(24, 4, rows=4, chunk=16, schedule_policy="priority")
    low = device.add([1] * 80, 2)
    device.step()
    assert low.num_pages == 4
    urgent = device.add([9] * 40, 2, priority=10)
    device.step()
    assert device.scheduler.running == [urgent]
    run_all(device)


def test_a_victim_is_not_chosen_while_its_tokens_are_in_flight() -> None:
    device = device_with(rows=1)
    device.add([1] * 5, 20)
    device.step()
    device.add([9] * 5, 3, priority=10)
    running = device.scheduler.running.copy()
    with pytest.raises(ResultsNeededError):
        device.scheduler.plan(in_flight=True)
    assert device.scheduler.running == running
    device.check()
    run_all(device)
    assert device.requests[0].num_retractions == 1


def test_nobody_is_preempted_in_a_step_that_another_prompt_fills() -> None:
    device = device_with(rows=2)
    device.add([1] * 5, 40)
    device.step()
    device.add([2] * 150, 3, priority=30)
    device.step()
    urgent = device.add([9] * 5, 3, priority=20)
    device.step()
    assert device.scheduler.num_retractions == 0
    while urgent.state is RequestState.WAITING:
        device.step()
    assert device.scheduler.num_retractions == 1
    assert len(device.scheduler.running) == 2
    run_all(device)


def test_a_request_is_preempted_a_bounded_number_of_times() -> None:
    device = device_with(rows=1)
    low = device.add([1] * 5, 50)
    num_urgent = 0
    while low.state is not RequestState.FINISHED:
        if device.scheduler.running == [low] and not device.scheduler.waiting:
            device.add([9] * 5, 1, priority=10)
            num_urgent += 1
        device.step()
    assert low.num_retractions == MAX_PREEMPTIONS
    assert num_urgent > MAX_PREEMPTIONS
    run_all(device)


def test_whoever_was_admitted_on_the_turn_of_the_oldest_stays() -> None:
    device = device_with(rows=1)
    device.add([9] * 5, 1, priority=20)
    low = device.add([1] * 5, 10)
    for _ in range(4 * OLDEST_TURN):
        if len(device.scheduler.waiting) < 3:
            device.add([9] * 5, 1, priority=20)
        device.step()
    assert low.state is RequestState.FINISHED
    assert low.num_retractions == 0
    run_all(device)


def test_urgent_requests_without_end_do_not_keep_anybody_from_ending() -> None:
    """However they preempt: the bound of the queue, taken as often as a request and its elders may be preempted."""
    device = device_with(num_pages=30, rows=3)
    low = [device.add([1 + i] * 20, 10) for i in range(3)]
    num_steps = 0
    while any(request.state is not RequestState.FINISHED for request in low):
        while len(device.scheduler.waiting) < 4:
            device.add([9] * 17, 2, priority=100 + num_steps)  # each more urgent than all before
        device.step()
        device.check()
        num_steps += 1
        num_admissions = sum(r.state is not RequestState.WAITING for r in device.requests)
        assert num_admissions <= OLDEST_TURN * (MAX_PREEMPTIONS + 1) * 3
    run_all(device)


def test_without_pages_the_least_urgent_is_retracted_then_the_youngest() -> None:
    device = device_with(num_pages=16, rows=8, schedule_policy="fcfs")
    requests = [device.add([i * 3 + 1, 2, 3, 4, 5], 30, priority=priority) for i, priority in enumerate((0, 2, 0, 1))]
    retracted: list[Request] = []
    while not all(request in retracted for request in (requests[0], requests[2], requests[3])):
        device.step()
        retracted += [r for r in device.scheduler.waiting if r.num_retractions and r not in retracted]
        assert requests[1].num_retractions == 0
        if requests[1].state is RequestState.FINISHED:
            break
    assert retracted[:2] == [requests[2], requests[0]]
    run_all(device)


def test_retraction_puts_the_more_urgent_in_front() -> None:
    device = device_with(num_pages=12, rows=8)
    for i, priority in enumerate((3, 1, 2)):
        device.add([i * 3 + 1, 2, 3, 4, 5], 30, priority=priority)
    while device.scheduler.num_retractions < 2:
        device.step()
    assert [request.priority for request in device.scheduler.waiting] == [2, 1]
    run_all(device)


def test_the_cache_learns_the_priority() -> None:
    device = device_with()
    device.add([1] * 20, 2, priority=7)
    device.run()
    node = device.cache.match([1] * 20).node
    assert node is not None
    assert node.priority == 7


def test_the_cache_learns_the_priority_of_a_request_that_skips_what_another_has_computed() -> None:
    device = PaperDevice(100, 4, rows=4, chunk=4)
    first = device.add([t % 50 for t in range(20)], 40)
    while len(first.output_ids) < 36:
        device.step()
    turn = [*first.prompt_ids.tolist(), *serial_output(first.prompt_ids.tolist(), 40, frozenset())]
    second = device.add([*turn, 1, 2], 2, priority=7)
    device.run()
    assert second.cached_tokens > 30, "it did not skip what the first left when it ended"
    node = device.cache.match(turn[:56]).node
    assert node is not None
    assert node.priority == 7
