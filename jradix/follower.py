"""A process that runs whatever process 0 runs, on its own part of the devices: see `mirror`."""

from typing import Any

from jradix import startup
from jradix.config import EngineConfig
from jradix.mirror import MirroredCall
from jradix.processes import connect, join


def follow(config: EngineConfig | None = None, **options: Any) -> bool:
    """Be one of the processes of an engine but the first, which has the `Engine`, until that is shut down.

    Give what `Engine` is given. The same script can run in all processes::

        if not jradix.follow(config):
            with jradix.Engine(config) as engine:
                ...

    Returns True when the engine was shut down, and False at once on process 0 and where there is one process only.
    If the engine, or another process, ends in any other way, this process does so too, with status 1.

    Raises:
        ValueError: as `Engine`.
    """
    config = join(EngineConfig.given(config, options))
    if config.node_rank == 0:
        return False
    processes = connect(config)
    assert processes is not None, config
    try:
        [parts] = startup.build(config, processes)
        runner = parts.runner
        while (call := processes.receive()) is not None:
            assert isinstance(call, MirroredCall), call
            getattr(runner, call.name)(*call.arguments)
        runner.close()
    except BaseException as error:
        processes.fail(error)
        raise
    return True
