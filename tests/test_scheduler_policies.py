"""The scheduler under every policy: order of admission, nobody starves, prefixes of one step are shared."""

from itertools import count, pairwise
from typing import get_args

import pytest

from jradix.config import SchedulePolicy
from jradix.request import FinishReason, Request, RequestState
from jradix.schedule_estimate import CAUTION_STEPS, OutputEstimate
from jradix.schedule_queue import OLDEST_TURN, QueueFullError
from tests.paper_device import VOCAB, PaperDevice

POLICIES: tuple[SchedulePolicy, ...] = get_args(SchedulePolicy)


class Admissions:
    """Who was admitted, in order, again if it was retracted in between; look after every step."""

    def __init__(self, device: PaperDevice) -> None:
        self.device, self.order = device, list[Request]()
        self._running: list[Request] = []

    def look(self) -> None:
        self.order += [request for request in self.device.scheduler.running if request not in self._running]
        self._running = self.device.scheduler.running.copy()


def admissions_of(device: PaperDevice) -> list[Request]:
    """Run to the end."""
    admissions = Admissions(device)
    while device.scheduler.has_work:
        device.step()
        admissions.look()
    device.collect_all()
    device.check_outputs()
    device.check_idle()
    return admissions.order


def test_each_policy_admits_in_its_own_order() -> None:
    found = {}
    for policy in POLICIES:
        device = PaperDevice(
            num_pages=100, page_size=4, rows=1, chunk=64, schedule_policy=policy, clock=count().__next__
        )
        device.add([1] * 12, max_new_tokens=1)
        device.run()
        device.add([9], 40, routing_key="x")  # runs while the others wait
        device.step()
        device.add([2] * 20, 5)
        device.add([3] * 9, 9)
        device.add([*[1] * 10, *[4] * 20], 2)
        device.add([5] * 15, 3, priority=7)
        device.add([6] * 16, 1, routing_key="x")
        for age, request in enumerate(device.scheduler.waiting):
            request.arrival_time = float(-age)
        device.step()
        found[policy] = [int(request.id[1:]) - 1 for request in admissions_of(device)[1:]]
    assert sorted(found.pop("random")) == [1, 2, 3, 4, 5]
    assert found == {
        "fcfs": [1, 2, 3, 4, 5],
        "lpm": [3, 1, 2, 4, 5],
        "dfs-weight": [3, 1, 2, 4, 5],
        "lof": [2, 1, 4, 3, 5],
        "shortest-prefill-first": [2, 4, 5, 1, 3],
        "priority": [4, 1, 2, 3, 5],
        "hrrn": [5, 4, 2, 3, 1],
        "routing-key": [1, 2, 3, 4, 5],
    }


def test_a_routing_key_that_runs_brings_those_of_its_kind_forward() -> None:
    device = PaperDevice(num_pages=100, page_size=4, rows=2, chunk=64, schedule_policy="routing-key")
    device.add([9], 40, routing_key="x")
    device.step()
    a, b, c = (device.add([i], 2, routing_key=key) for i, key in ((1, None), (2, "y"), (3, "x")))
    assert admissions_of(device)[1:] == [c, a, b]


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_starves_while_favourites_keep_arriving(policy: SchedulePolicy) -> None:
    """Favourites are cached, short, urgent, long in output, and of the key that runs; the others are none of these."""
    device = PaperDevice(num_pages=120, page_size=4, rows=2, chunk=64, schedule_policy=policy)

    def favour() -> Request:
        return device.add([1, 2, 3, 4, 5], 3, priority=9, routing_key="hot")

    for _ in range(2):
        favour()
    device.step()
    admissions = Admissions(device)
    admissions.look()
    cold = [device.add([10 + i] * 30, 1) for i in range(3)]
    while not all(request in admissions.order for request in cold):
        assert len(admissions.order) <= 3 * OLDEST_TURN + 2, "a cold request starves"
        while len(device.scheduler.waiting) < 8:
            favour()
        device.step()
        admissions.look()
    for num_older, request in enumerate(cold):
        assert admissions.order.index(request) - 2 < OLDEST_TURN * (num_older + 1)
    if policy in {"lpm", "lof", "priority"}:
        assert admissions.order.index(cold[0]) - 2 == OLDEST_TURN - 1, "no favourites: the bound was not tried"
    device.collect_all()
    device.check_outputs()


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_that_arrive_together_compute_a_shared_prefix_once(policy: SchedulePolicy) -> None:
    device = PaperDevice(num_pages=100, page_size=4, chunk=64, schedule_policy=policy)
    requests = [device.add([*range(40), 45 + i, 60 + i]) for i in range(4)]
    plan = device.step()
    assert plan is not None
    assert sorted(row.num_tokens for row in plan.extend) == [2, 2, 2, 42]
    assert sorted(request.cached_tokens for request in requests) == [0, 40, 40, 40]
    device.run()
    device.check_outputs()


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", "shortest-prefill-first"])
def test_a_prefix_that_one_request_brings_makes_the_others_go_next(policy: SchedulePolicy) -> None:
    """In a pool that holds one of the prefixes at a time, groups stay together although they arrive shuffled."""
    device = PaperDevice(num_pages=16, page_size=4, rows=1, chunk=64, schedule_policy=policy)
    for i in range(12):
        device.add([*[i % 3] * 40, 10 + i], 1)
    order = [int(request.prompt_ids[0]) for request in admissions_of(device)]
    assert sum(a != b for a, b in pairwise(order)) == 2, order
    assert sum(request.cached_tokens for request in device.requests) == 9 * 40


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_overtakes_the_chosen_request_when_it_finds_no_room(policy: SchedulePolicy) -> None:
    device = PaperDevice(num_pages=20, page_size=4, rows=4, chunk=128, schedule_policy=policy)
    hog = device.add([7] * 40, 20, priority=5)
    device.step()
    device.add([1] * 60, 10, priority=9)
    device.step()
    for i in range(3):
        device.add([2 + i] * 4, 1)
    admitted = Admissions(device)
    while hog.state is RequestState.RUNNING:
        head = device.scheduler.waiting.head() if device.scheduler.waiting else None
        before = list(device.scheduler.waiting)
        device.step()
        gone = [request for request in before if request not in device.scheduler.waiting]
        assert not gone or gone[0] is head or head in gone
        admitted.look()
    device.run()
    device.check_outputs()
    device.check_idle()


def test_a_blocked_head_is_not_arranged_again_in_each_step() -> None:
    device = PaperDevice(num_pages=20, page_size=4, rows=4, chunk=64, schedule_policy="lpm")
    device.add([7] * 60, 18)
    device.step()
    for i in range(5):
        device.add([i] * 30, 10)
    matched: list[int] = []
    match = device.cache.match

    def counted(*args: object, **kwargs: object) -> object:
        matched.append(1)
        return match(*args, **kwargs)  # type: ignore[arg-type]

    device.step()
    device.cache.match = counted  # type: ignore[method-assign]
    for _ in range(10):
        device.step()
    assert len(device.scheduler.waiting) == 5
    assert len(matched) == 10, "the head is looked up once in each step, and nobody else"


def test_more_requests_than_may_wait_are_refused_and_running_ones_do_not_count() -> None:
    device = PaperDevice(num_pages=100, page_size=4, rows=2, max_queued_requests=3)
    for i in range(3):
        device.scheduler.require_room(1)
        device.add([i])
    with pytest.raises(QueueFullError, match="3 requests are waiting and 1 more exceed max_queued_requests 3"):
        device.scheduler.require_room(1)
    device.step()
    device.scheduler.require_room(2)
    device.collect_all()
    device.scheduler.retract_all()
    assert len(device.scheduler.waiting) == 3
    device.scheduler.require_room(2)
    device.run()
    device.check_outputs()


def test_retract_all_puts_everybody_back_in_order_of_admission_and_changes_no_output() -> None:
    device = PaperDevice(num_pages=100, page_size=4, rows=4, chunk=16, schedule_policy="lof")
    requests = [device.add([i] * 9, 10 + i) for i in range(7)]
    for _ in range(6):
        device.step()
    device.collect_all()
    order = device.scheduler.running.copy()
    assert len(order) == 4
    device.scheduler.retract_all()
    assert not device.scheduler.running
    assert list(device.scheduler.waiting)[:4] == order
    assert (device.cache.num_protected, device.cache.num_private) == (0, 0)
    device.check()
    device.cache.flush()  # as after new weights
    assert device.cache.num_free == device.cache.num_total
    assert admissions_of(device)[:4] == order
    assert all(request.num_retractions == (request in order) for request in requests)


def test_after_pressure_has_ended_the_batch_is_soon_back_to_its_size() -> None:
    def load(device: PaperDevice) -> None:
        while len(device.scheduler.waiting) < 8:  # outputs of 5 tokens on average
            device.add([len(device.requests) % VOCAB, 2, 3, 4, 5], 60, frozenset(range(0, VOCAB, 5)))

    fresh = PaperDevice(num_pages=64, page_size=4, rows=24, chunk=64)
    for _ in range(100):
        load(fresh)
        fresh.step()
    pressed = PaperDevice(num_pages=64, page_size=4, rows=24, chunk=64)
    for i in range(60):
        pressed.add([i % VOCAB, 2, 3], max_new_tokens=60)
    while pressed.scheduler.waiting:
        pressed.step()
    assert pressed.scheduler.num_retractions > 10
    pressed.batch_sizes.clear()
    for _ in range(CAUTION_STEPS + 60):  # as many as the last of the long ones take
        load(pressed)
        pressed.step()
    assert max(pressed.batch_sizes[-60:]) >= max(fresh.batch_sizes)


def test_a_retraction_makes_admission_careful_and_only_those_that_end_by_themselves_teach() -> None:
    device = PaperDevice(num_pages=16, page_size=4, chunk=64)
    device.scheduler.finish(device.add([1, 2], 0), FinishReason("length", length=0))
    aborted = device.add([3, 2], 40)
    device.step()
    device.collect_all()
    device.abort(aborted)
    before = device.scheduler.estimate.reserved, device.scheduler.estimate.share
    assert before == (OutputEstimate().reserved, OutputEstimate().share)
    for i in range(6):
        device.add([i * 3 + 1, 2, 3, 4, 5], max_new_tokens=30)
    while not device.scheduler.num_retractions:
        device.step()
    assert device.scheduler.estimate.reserved > before[0]
    assert device.scheduler.estimate.share == before[1]
    device.run()
    assert device.scheduler.estimate.share > before[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_at_most_one_prompt_is_under_way_while_many_run_that_hit_most_of_theirs(policy: SchedulePolicy) -> None:
    device = PaperDevice(num_pages=600, page_size=4, rows=35, chunk=20, schedule_policy=policy)
    shared = [t % VOCAB for t in range(140)]
    device.add(shared, 1)
    device.run()
    for i in range(60):
        device.add([*shared, *[i % VOCAB] * (1 + i % 30)], 12)
    most = 0
    while device.scheduler.has_work:
        device.step()
        most = max(most, len(device.scheduler.running))
        under_way = [r for r in device.scheduler.running if r.seq_len - r.computed_len > 1]
        assert len(under_way) <= 1
    assert most > 10
    device.collect_all()
    device.check_outputs()
    device.check_idle()
