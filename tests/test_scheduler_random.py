"""Random loads under every policy, on a pool that is too small: no answer changes, and no page is lost."""

import random
from typing import get_args

import pytest

from jradix.config import SchedulePolicy
from jradix.request import RequestState
from tests.paper_device import VOCAB, PaperDevice

POLICIES: tuple[SchedulePolicy, ...] = get_args(SchedulePolicy)


class Load:
    """Prompts with a few common beginnings, priorities and routing keys."""

    def __init__(self, rng: random.Random, device: PaperDevice) -> None:
        self.rng, self.device = rng, device
        self.prefixes = [self.tokens(30) for _ in range(4)]

    def tokens(self, at_most: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(self.rng.randrange(1, at_most))]

    def add(self) -> None:
        self.device.add(
            self.rng.choice(self.prefixes) + self.tokens(16),
            self.rng.randrange(1, 30),
            frozenset(self.rng.sample(range(VOCAB), self.rng.randrange(3))),
            priority=self.rng.choice((-20, 0, 0, 5, 20)),
            routing_key=self.rng.choice((None, "a", "b")),
        )

    def disturb(self) -> None:
        """Now and then an abort, of one that runs or waits, or everybody back to the queue."""
        scheduler = self.device.scheduler
        requests = [*scheduler.running, *scheduler.waiting]
        if requests and self.rng.random() < 0.15:
            self.device.abort(self.rng.choice(requests))
        if self.rng.random() < 0.05:
            self.device.collect_all()
            scheduler.retract_all()
            assert not scheduler.running
        self.device.check()


@pytest.mark.parametrize("enabled", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", POLICIES)
def test_random_loads_keep_every_answer_and_every_page(policy: SchedulePolicy, seed: int, enabled: bool) -> None:
    rng = random.Random(f"{policy} {seed} {enabled}")
    page_size = rng.choice((1, 3, 4, 16))
    device = PaperDevice(
        -(-90 // page_size) + rng.randrange(4),
        page_size,
        rows=rng.choice((1, 3, 8)),
        chunk=rng.choice((1, 5, 16, 64)),
        enabled=enabled,
        schedule_policy=policy,
        preemption_threshold=rng.choice((1, 10, 25)),
        random_seed=seed,
    )
    load = Load(rng, device)
    for _ in range(30):
        for _ in range(rng.randrange(4)):
            load.add()
        for _ in range(rng.randrange(6)):
            device.step()
            device.check()
        load.disturb()
    device.run()
    assert all(request.state is RequestState.FINISHED for request in device.requests)
    assert not device.scheduler.waiting
    device.check_outputs()
    device.check_idle()
