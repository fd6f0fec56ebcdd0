"""Whether the engine generates: asked often and under load, it answers at once and adds no load of its own."""

import asyncio
import time

from jradix.server.client import EngineDeadError
from jradix.server.service import Service

_ANSWER_SECONDS, _PROBE_SECONDS = 0.3, 0.3


class Health:
    """An engine with work is healthy while it makes steps. One at rest is given a request of one token.

    That request is work like any other, but for leaving nothing in the cache or in its statistics. Whoever asks while
    it runs is told of its steps, and sends no second one.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._last_contact = time.monotonic()
        self._probe: asyncio.Task[None] | None = None

    async def trouble(self) -> str | None:
        """What is wrong; None if nothing is. Takes less than a second."""
        engine, limit = self._service.engine, self._service.config.health_seconds
        if engine.dead:
            return "the engine process has ended"
        try:
            stalled = await asyncio.wait_for(engine.call("stalled_seconds"), _ANSWER_SECONDS)
            self._last_contact = time.monotonic()
        except TimeoutError:
            stalled = time.monotonic() - self._last_contact
        except EngineDeadError:
            return "the engine process has ended"
        if stalled > limit:
            return f"there is work, and no step since {stalled:.0f} s"
        if engine.num_generations == 0 and self._probe is None:
            self._probe = asyncio.create_task(engine.call("probe"))
            self._probe.add_done_callback(self._forget_probe)
            done, _ = await asyncio.wait({self._probe}, timeout=_PROBE_SECONDS)
            error = next((task.exception() for task in done), None)
            return None if error is None else f"a request of one token has failed: {error}"
        return None

    def _forget_probe(self, probe: asyncio.Task[None]) -> None:
        self._probe = None
        if not probe.cancelled():
            probe.exception()  # it has been looked at, even if nobody waited so long
