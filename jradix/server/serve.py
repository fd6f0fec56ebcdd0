"""`jradix serve`: an engine process, an HTTP server before it, and an orderly end of both."""

import asyncio
import logging
import signal
import socket
import sys
import time
from contextlib import suppress
from types import FrameType

import uvicorn

from jradix.config import EngineConfig
from jradix.server.app import make_app
from jradix.server.client import EngineClient, EngineDeadError, EngineMain
from jradix.server.config import ServerConfig
from jradix.server.engine_process import main
from jradix.server.http_protocol import LimitedHttpProtocol
from jradix.server.metrics import Metrics
from jradix.server.service import Service

LOG = logging.getLogger(__name__)
ENGINE_DIED = 1
_KEEP_ALIVE_SECONDS = 75
"""How long an idle connection stays open. Longer than clients keep theirs, of which many have 5 and proxies 60: if the
server is the first to close it, a request that is on its way is lost."""
_BACKLOG = 2048
"""Connections that may wait to be taken, as many as uvicorn has."""
_POLL_SECONDS = 0.1
_SECONDS_TO_TELL = 5
"""How long the answers of aborted requests may take to be sent to clients who read slowly, or not at all."""


def serve(engine_config: EngineConfig, config: ServerConfig, engine_main: EngineMain = main) -> None:
    """Serve until SIGINT or SIGTERM, or until the engine process dies.

    After a signal requests that run may end, for `drain_seconds` or until the next signal; then they are aborted.

    Raises:
        ValueError: the configuration or the model's files are wrong, or the address cannot be listened on.
        SystemExit: status 0 after SIGTERM, when the requests that ran have ended; 1 if the engine process has died.
        KeyboardInterrupt: after SIGINT, in the same way.
    """
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGTERM, _exit)
    with _bound(config) as listener:
        address = f"{config.host}:{listener.getsockname()[1]}"
        LOG.info("loading %s, to be served at http://%s", engine_config.model_path, address)
        engine = EngineClient.start(engine_config, config.log_level, engine_main)
        try:
            model_name = config.served_model_name or str(engine_config.model_path)
            service = Service(engine, config, Metrics(model_name), model_name)
            _listen(listener, address)
            LOG.info("serving %s at http://%s", model_name, address)
            _Server(service).run([listener])
        finally:
            engine.stop()
        if engine.dead:
            sys.exit(ENGINE_DIED)


class _Server(uvicorn.Server):
    """Uvicorn, which begins by listening to the engine and ends when the engine does.

    Requests that are not done in time are aborted in the engine, so that their clients get an answer that says so.
    """

    def __init__(self, service: Service) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(service),
                http=LimitedHttpProtocol,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=service.config.drain_seconds + 2 * _SECONDS_TO_TELL,
            )
        )
        self._service = service
        self._is_hurried = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self._is_hurried = True
        else:
            super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.engine.listen(self._end)
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        aborting = asyncio.create_task(self._abort_late())
        await super().shutdown(sockets)
        aborting.cancel()

    async def _abort_late(self) -> None:
        engine, limit = self._service.engine, time.monotonic() + self._service.config.drain_seconds
        while time.monotonic() < limit and not self._is_hurried and not engine.dead:
            await asyncio.sleep(_POLL_SECONDS)
        with suppress(TimeoutError):
            async with asyncio.timeout(_SECONDS_TO_TELL):
                while True:  # since a request may be on its way to the engine
                    with suppress(EngineDeadError):
                        if num_aborted := await engine.call("abort_all", "the server is shutting down"):
                            LOG.warning("aborted %d requests that have not ended in time", num_aborted)
                    await asyncio.sleep(_POLL_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def _end(self) -> None:
        LOG.critical("the engine process has ended, and so does the server")
        self.should_exit = True


def _listen(listener: socket.socket, address: str) -> None:
    """Take connections. Another server may have bound the address too, before either listened, and is the first."""
    try:
        listener.listen(_BACKLOG)  # uvloop would not tell of an address in use
    except OSError as error:
        raise ValueError(f"host and port must be an address that is free: {address}: {error}") from error


def _bound(config: ServerConfig) -> socket.socket:
    """A socket that is bound, and not listened on before the engine is ready: clients are refused until then."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ValueError(
            f"host and port must be an address that is free: {config.host}:{config.port}: {error}"
        ) from error
    return listener


def _exit(number: int, frame: FrameType | None) -> None:
    """Runs at once while the engine loads, and after uvicorn has ended what was running."""
    sys.exit(0)
