"""When a batch shows its progress, and what it says."""

import io
import itertools
import sys
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest

from jradix.offline import BatchPlan
from jradix.progress import SHOWN_FROM, BatchProgress

PLAN = BatchPlan(np.arange(4), prompt_tokens=1_000, bound=730, predicted=712)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(file: io.StringIO, count: int, *, ended: int | None = None, show: bool | None = None) -> str:
    with BatchProgress(count, show=show, file=file) as progress:
        for _ in range(count if ended is None else ended):
            progress.add(10, 2, 5)
    return file.getvalue()


@pytest.mark.parametrize(
    ("file", "count", "show", "shown"),
    [
        (Terminal, SHOWN_FROM, None, True),
        (Terminal, SHOWN_FROM - 1, None, False),
        (Terminal, SHOWN_FROM, False, False),
        (Terminal, 1, True, True),
        (io.StringIO, SHOWN_FROM, None, False),
        (io.StringIO, 1, True, True),
    ],
)
def test_large_batches_on_a_terminal_show_a_bar_and_others_if_asked(
    file: type[io.StringIO], count: int, show: bool | None, shown: bool
) -> None:
    assert bool(run(file(), count, show=show)) == shown


def test_a_notebook_shows_a_bar_though_its_stderr_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    assert f"{SHOWN_FROM}/{SHOWN_FROM}" in run(io.StringIO(), SHOWN_FROM)


def test_nothing_but_the_file_is_written_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert "prompts: 100%" in run(Terminal(), 3, show=True)
    assert capsys.readouterr() == ("", "")
    with BatchProgress(SHOWN_FROM) as progress:  # stderr is no terminal here
        progress.add(1, 1, 0)
    assert capsys.readouterr() == ("", "")


def test_rates_are_of_the_requests_that_have_ended_over_the_time_since_the_start() -> None:
    clock: Iterator[float] = itertools.count(100.0, 2.0)
    progress = BatchProgress(4, show=False, clock=lambda: next(clock))
    progress.add(1_500, 10, 300)
    assert progress.rates() == "in 750 tok/s, out 5 tok/s, cached 20.0%"
    progress.add(2_500, 30, 1_700)
    assert progress.rates() == "in 1,000 tok/s, out 10 tok/s, cached 50.0%"


def test_the_last_line_compares_what_was_achieved_with_the_prediction_and_the_bound() -> None:
    file = Terminal()
    with BatchProgress(4, PLAN, show=True, file=file) as progress:
        for cached in (0, 250, 250, 209):
            progress.add(250, 8, cached)
    last = file.getvalue().splitlines()[-1]
    assert last == "prefix cache: predicted 71.2%, achieved 70.9%, bound 73.0% of prompt tokens"


def test_without_a_plan_the_last_line_says_what_was_achieved() -> None:
    assert run(Terminal(), 40).splitlines()[-1] == "prefix cache: achieved 50.0% of prompt tokens"


def test_a_batch_that_was_interrupted_ends_without_a_last_line() -> None:
    shown = run(Terminal(), 40, ended=39)
    assert "prompts" in shown
    assert "prefix cache" not in shown
