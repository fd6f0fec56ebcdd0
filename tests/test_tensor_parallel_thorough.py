"""Every golden, every way, on several devices of one process: what tests/test_tensor_parallel.py shows by examples."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.every_way import SMOLLM2, TINY_NAMES, Case
from tests.tiny_engine import greedy, output_ids, start

pytestmark = pytest.mark.thorough
DEVICES = (2, 4, 8)


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("name", TINY_NAMES)
def test_a_tiny_model_gives_the_tokens_of_transformers_every_way(
    name: str, devices: int, tiny_path: Callable[[str], Path]
) -> None:
    case = Case.of(tiny_path(name))
    with start(case.path, tp_size=devices) as engine:
        case.check(case.answers(engine))


@pytest.mark.parametrize("devices", DEVICES)
def test_smollm2_gives_the_tokens_of_transformers_every_way(devices: int, smollm2_path: Path) -> None:
    """Three KV heads of three query heads: one more place on 2 and 4 devices, two copies and two more places on 8."""
    case = Case.of(smollm2_path)
    with start(case.path, optimized=True, tp_size=devices, **case.options) as engine:
        case.check(case.answers(engine))
        ids = output_ids(engine, [each["prompt_ids"] for each in SMOLLM2], greedy(32))
        assert ids == [each["greedy_ids"] for each in SMOLLM2]
