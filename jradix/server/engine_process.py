"""The engine process's beginning and end. Importing this loads no jax: the HTTP process does it too."""

import logging
import os
import signal
import threading
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from jradix.config import EngineConfig
from jradix.server.messages import Follows, NotReady

if TYPE_CHECKING:
    from jradix.engine import Engine


def main(config: EngineConfig, connection: Connection, log_level: str) -> None:
    """Load the engine, then serve it until the pipe or the parent process ends."""
    begin(log_level)
    engine = load(config, connection)
    if engine is not None:
        from jradix.server.engine_service import EngineService

        EngineService(engine, connection).run()


def begin(log_level: str) -> None:
    """Log, leave signals to the parent process, and end when it does."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group; the parent decides when this process ends
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    threading.Thread(target=_end_with_parent, daemon=True).start()


def load(config: EngineConfig, connection: Connection) -> "Engine | None":
    """The engine. None if the configuration is wrong, or after this process has followed another: the other end is told
    of either, of the second at its beginning."""
    from jradix.engine import Engine
    from jradix.follower import follow
    from jradix.processes import join

    try:
        config = join(config)
        if config.node_rank:
            connection.send([Follows()])
            follow(config)
            return None
        return Engine(config)
    except ValueError as error:
        connection.send([NotReady(str(error))])
        return None


def _end_with_parent() -> None:
    """A parent that was killed can tell nobody, and this process may be compiling for minutes."""
    parent = parent_process()
    assert parent is not None, "the engine process is started by multiprocessing"
    parent.join()
    os._exit(1)
