"""What the processes of tests/test_processes_thorough.py run: the goldens of several models, one after the other.

`python -m tests.process_goldens NUM_PROCESSES TP_SIZE MODEL... RANK ADDRESS FOLDER`: process 0 writes the
answers of each model to FOLDER/NAME.json.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jradix import Engine, follow
from tests.every_way import Case
from tests.process_group import write_found
from tests.tiny_engine import use_one_bucket


def main(arguments: Sequence[str]) -> None:
    num_processes, tp_size, *paths, rank, address, folder = arguments
    for path in map(Path, paths):
        case = Case.of(path)
        options: dict[str, Any] = case.options | {
            "model_path": str(path),
            "tp_size": int(tp_size),
            "nnodes": int(num_processes),
            "node_rank": int(rank),
            "dist_init_addr": address,
        }
        if not follow(**options):
            with Engine(**options) as engine:
                use_one_bucket(engine)
                write_found(Path(folder), case.answers(engine), path.stem)


if __name__ == "__main__":
    main(sys.argv[1:])
