"""The engine process's beginning and end. Importing this loads no jax: the HTTP process does it too."""

import logging
import os
import signal
import threading
from multiprocessing import parent_process
from multiprocessing.connection import Connection

from jradix.config import EngineConfig
from jradix.server.messages import NotReady, Ready


def main(config: EngineConfig, connection: Connection, log_level: str) -> None:
    """Load the engine, then serve it until the pipe or the parent process ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group; the parent decides when this process ends
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    threading.Thread(target=_end_with_parent, daemon=True).start()

    from jradix.engine import Engine
    from jradix.server.engine_service import EngineService

    try:
        engine = Engine(config)
    except ValueError as error:
        connection.send([NotReady(str(error))])
        return
    tokenizer_path = None if engine.tokenizer is None else engine.model_files
    connection.send([Ready(engine.get_server_info(), tokenizer_path)])
    EngineService(engine, connection).run()


def _end_with_parent() -> None:
    """A parent that was killed can tell nobody, and this process may be compiling for minutes."""
    parent = parent_process()
    assert parent is not None, "the engine process is started by multiprocessing"
    parent.join()
    os._exit(1)
