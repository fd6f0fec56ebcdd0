"""The waiting requests: who arrived when, who goes next, and how many may wait."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from itertools import takewhile

from jradix.request import Request

OLDEST_TURN = 32
"""Of so many admissions in a row one goes to the oldest. Half as many cost up to a hundredth of the hit rate."""

ARRANGED_LEN = 128
"""Up to so many waiting requests are arranged after each change; more only after each `len / ARRANGED_LEN` changes."""


class QueueFullError(RuntimeError):
    """More requests would wait than `max_queued_requests` allows: try again later, or with fewer."""


class WaitingQueue:
    """Retracted requests, the last retracted first; then all others, as the policy arranges them.

    Nobody starves: of `OLDEST_TURN` admissions in a row (those of retracted requests are not counted) at least one goes
    to the oldest waiting request, and when it is its turn nobody else is admitted before it, however long it takes to
    find room. So a request is admitted within ``OLDEST_TURN * (p + 1)`` admissions, `p` being how many requests wait
    that are older. One that is preempted goes back to its place in the order of arrival, and counts again.

    What it costs: an arrival or departure makes at most `ARRANGED_LEN` requests to be arranged anew, on average, since
    n requests are arranged once every n / `ARRANGED_LEN` changes, and only if somebody asks for the head. That also
    limits how long an arrival can be overlooked. Without a policy, and for all that is not arranging, it is O(1); only
    `restore` takes a time that grows with the number of younger requests.
    """

    def __init__(
        self, arrange: Callable[[list[Request]], list[Request]] | None = None, *, max_queued: int | None = None
    ) -> None:
        """arrange: orders requests, given in order of arrival. None: first come, first served."""
        self._arrange = arrange
        self._max_queued = max_queued
        self._retracted: OrderedDict[Request, None] = OrderedDict()
        self._others: OrderedDict[Request, None] = OrderedDict()  # in order of arrival
        self._arranged: deque[Request] = deque()  # as they were when last arranged; who has left is skipped when met
        self._num_changes = 0  # of `_others` since then
        self._num_passed_over = 0  # admissions since one of the oldest
        self._num_arrivals = 0
        self._num_returned = 0  # of `_others`: have been admitted before, and do not count against the limit

    def __len__(self) -> int:
        return len(self._retracted) + len(self._others)

    def __contains__(self, request: Request) -> bool:
        return request in self._others or request in self._retracted

    def __iter__(self) -> Iterator[Request]:
        """Retracted requests, then the others in order of arrival."""
        yield from self._retracted
        yield from self._others

    def require_room(self, count: int) -> None:
        """QueueFullError if `count` more requests would be more than may wait."""
        num_waiting = len(self._others) - self._num_returned
        if self._max_queued is not None and num_waiting + count > self._max_queued:
            raise QueueFullError(
                f"{num_waiting} requests are waiting and {count} more exceed max_queued_requests {self._max_queued}: "
                "try again when some have run, submit fewer at once, or raise the limit"
            )

    def add(self, request: Request) -> None:
        """A new request, the youngest."""
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._others[request] = None
        self._num_changes += 1

    def put_first(self, request: Request) -> None:
        """A retracted request, before all others."""
        self._retracted[request] = None
        self._retracted.move_to_end(request, last=False)

    def restore(self, request: Request) -> None:
        """A preempted request, at its place in the order of arrival: first, it would wait for those it gave way to."""
        younger = list(takewhile(lambda other: other.arrival > request.arrival, reversed(self._others)))
        self._others[request] = None
        for other in reversed(younger):
            self._others.move_to_end(other)
        self._num_returned += 1
        self._num_changes += 1

    def head(self) -> Request:
        """Who is to be admitted next: the same as long as nobody comes or goes. The queue must not be empty."""
        if self._retracted:
            return next(iter(self._retracted))
        if self._arrange is None or self._is_oldests_turn:
            return next(iter(self._others))
        # After fewer changes than that somebody of those arranged is still there.
        if self._num_changes * ARRANGED_LEN >= len(self._others):
            self._arranged = deque(self._arrange(list(self._others)))
            self._num_changes = 0
        while self._arranged[0] not in self._others:
            self._arranged.popleft()
        return self._arranged[0]

    def admit(self) -> Request:
        """Take the head out, as admitted. On the turn of the oldest it will not be preempted any more."""
        request = self.head()
        if request in self._others:
            if self._is_oldests_turn:
                request.preemptions_left = 0
            is_oldest = request is next(iter(self._others))
            self._num_passed_over = 0 if is_oldest else self._num_passed_over + 1
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        """Take out a request that waits, wherever it stands."""
        if request in self._retracted:
            del self._retracted[request]
            return
        del self._others[request]
        self._num_returned -= request.num_retractions > 0
        self._num_changes += 1

    @property
    def _is_oldests_turn(self) -> bool:
        return self._num_passed_over >= OLDEST_TURN - 1
