"""`jradix serve` with an engine process for tests: cheap to start, breakable, and it checks its cache at each flush.

Its steps fail, as if the device were broken, while the file exists that the variable `FAULT` names. If a flush at rest
finds a mistake in the engine's books, the engine process ends, and the server with it.
"""

import os
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from jradix import EngineConfig, cli
from jradix.server import serve
from jradix.server.engine_process import begin, load
from jradix.server.messages import Call

FAULT = "JRADIX_TEST_FAULT"


def engine_main(config: EngineConfig, connection: Connection, log_level: str) -> None:
    """As `engine_process.main`."""
    from jradix.runner import Collected, LaunchedStep
    from jradix.server.engine_service import EngineService
    from tests.tiny_engine import use_one_bucket

    class CheckingService(EngineService):
        def _call(self, call: Call) -> None:
            if call.name == "flush_cache":
                self._engine.check_idle()
            super()._call(call)

    begin(log_level)
    engine = load(config, connection)
    assert engine is not None
    use_one_bucket(engine)
    fault, collect = Path(os.environ[FAULT]), engine.runner.collect

    def collect_unless_broken(step: LaunchedStep) -> Collected:
        if fault.exists():
            raise RuntimeError("the device is gone")
        return collect(step)

    engine.runner.collect = collect_unless_broken
    CheckingService(engine, connection).run()


if __name__ == "__main__":
    serve.serve = partial(serve.serve, engine_main=engine_main)
    cli.main()
