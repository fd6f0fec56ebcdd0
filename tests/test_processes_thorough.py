"""Every golden over several processes, more than two of them, and what they say if they cannot start."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jradix import Engine
from jradix.processes import EXIT_STATUS
from tests.every_way import TINY_NAMES, Case
from tests.process_group import ProcessGroup
from tests.process_questions import STRICT, check, strict_answers
from tests.tiny_engine import start

pytestmark = pytest.mark.thorough

ANSWER_STRICTLY = """
import sys
from pathlib import Path
from jradix import Engine, follow
from tests.process_group import write_found
from tests.process_questions import STRICT, strict_answers
rank, address, folder = sys.argv[1:]
options = STRICT | dict(model_path=folder + "/model", tp_size=4, nnodes=2, node_rank=int(rank), dist_init_addr=address)
if not follow(**options):
    with Engine(**options) as engine:
        write_found(Path(folder), strict_answers(engine))
"""

FOLLOW = """
import sys
from jradix import follow
more, rank, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
follow(model_path="", tp_size=12, nnodes=3 + more * rank, node_rank=rank, dist_init_addr=address)
"""


@pytest.fixture(scope="module")
def pair(tiny_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessGroup]:
    """Two processes that answer for one model after the other."""
    command = "-m", "tests.process_goldens", "2", "4", *(str(tiny_path(name)) for name in TINY_NAMES)
    with ProcessGroup(tmp_path_factory.mktemp("pair"), *command) as pair:
        yield pair


@pytest.mark.parametrize("name", TINY_NAMES)
def test_two_processes_of_two_devices_give_the_tokens_of_transformers(
    name: str, pair: ProcessGroup, tiny_path: Callable[[str], Path]
) -> None:
    Case.of(tiny_path(name)).check(pair.found(name))


def test_smollm2_on_two_processes_of_two_devices_gives_the_tokens_of_transformers(
    smollm2_path: Path, tmp_path: Path
) -> None:
    command = "-m", "tests.process_goldens", "2", "4", str(smollm2_path)
    with ProcessGroup(tmp_path, *command, optimized=True) as pair:
        Case.of(smollm2_path).check(pair.found(smollm2_path.stem))
        assert [pair.status(rank) for rank in range(2)] == [0, 0]


@pytest.mark.parametrize("count", [3, 4])
def test_more_processes_of_one_device_answer_like_one_until_the_last_is_killed(
    count: int, tmp_path: Path, tiny_text_path: Path, tiny_engine: Engine
) -> None:
    """The tiny llama has two KV heads: of three places one is empty, on four devices each has two."""
    (tmp_path / "model").symlink_to(tiny_text_path)
    command = "-m", "tests.process_questions", str(count), str(count)
    with ProcessGroup(tmp_path, *command, ranks=tuple(range(count)), devices=1) as group:
        check(group.found(), tiny_engine)
        group.kill(count - 1)
        for rank in range(count - 1):
            assert group.status(rank) == EXIT_STATUS
            assert f"jradix: process {rank} ends: process " in group.log(rank)
        assert f"process {count - 1} of {count} has ended: it was killed" in group.log(0)


def test_four_processes_of_one_device_give_the_tokens_of_transformers(
    tmp_path: Path, tiny_path: Callable[[str], Path]
) -> None:
    """Models whose heads, windows and experts are split in ways of their own."""
    names = ["gemma3_text", "gpt_oss", "qwen3_wide", "qwen3_moe_mixed"]
    command = "-m", "tests.process_goldens", "4", "4", *(str(tiny_path(name)) for name in names)
    with ProcessGroup(tmp_path, *command, ranks=(0, 1, 2, 3), devices=1) as group:
        for name in names:
            Case.of(tiny_path(name)).check(group.found(name))
        assert [group.status(rank) for rank in range(4)] == [0] * 4


def test_two_processes_compile_nothing_after_a_strict_warm_up_and_have_pools_of_8_bits(
    tmp_path: Path, tiny_text_path: Path
) -> None:
    (tmp_path / "model").symlink_to(tiny_text_path)
    with ProcessGroup(tmp_path, "-c", ANSWER_STRICTLY) as pair, start(tiny_text_path, **STRICT) as engine:
        expected = strict_answers(engine)
        assert pair.found() == expected
        assert [pair.status(rank) for rank in range(2)] == [0, 0]
    assert expected["retractions"] > 0
    assert expected["compiled later"] == 0


@pytest.mark.parametrize(
    ("ranks", "more", "message"),
    [
        ((0, 1, 1), 0, "node_rank 1 was given to two processes, on "),
        ((0, 1), 1, "nnodes must be the same in all processes: process 0 has 3, process 1 on "),
    ],
    ids=["the same rank", "other numbers"],
)
def test_processes_that_cannot_start_end_and_say_why(
    ranks: tuple[int, ...], more: int, message: str, tmp_path: Path
) -> None:
    with ProcessGroup(tmp_path, "-c", FOLLOW, str(more), ranks=ranks) as group:
        for place in range(len(ranks)):
            assert group.status(place) == 1
            assert "ValueError: dist_init_addr localhost:" in group.log(place)
            assert message in group.log(place)
