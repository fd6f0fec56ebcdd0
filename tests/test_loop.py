"""The thread that owns the core: who may call it, how it ends, and that nothing is lost when it does."""

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

from jradix import Engine
from jradix.delivery import StepFailedError
from jradix.loop import ShutDownError
from tests.tiny_engine import greedy, paused, start

PROMPT = [5, 6, 7, 8]


def thread_of(engine: Engine) -> threading.Thread:
    ending = engine.replicas.loops[0]._end.peek()
    assert ending is not None, "the loop has ended"
    return ending[2][1]


def test_calls_run_one_after_another_on_the_one_thread(tiny_engine: Engine) -> None:
    loop = tiny_engine.replicas.loops[0]
    seen: list[tuple[int, str]] = []
    futures = [
        loop.send(lambda number=number: seen.append((number, threading.current_thread().name))) for number in range(50)
    ]
    for future in futures:
        future.result()
    assert seen == [(number, "jradix") for number in range(50)]


def test_an_exception_goes_to_the_caller_and_the_loop_goes_on(tiny_engine: Engine) -> None:
    with pytest.raises(KeyError):
        tiny_engine.replicas.loops[0].call(lambda: {}["missing"])
    assert tiny_engine.replicas.loops[0].call(lambda: 7) == 7


def test_a_call_that_was_cancelled_before_its_turn_is_not_made(tiny_engine: Engine) -> None:
    made: list[int] = []
    with tiny_engine.hold():
        future = tiny_engine.replicas.loops[0].send(lambda: made.append(1))
        assert future.cancel()
    tiny_engine.check_idle()
    assert made == []


def test_who_holds_the_core_is_alone_with_it(tiny_engine: Engine) -> None:
    with paused(tiny_engine):
        stream = tiny_engine.generate(input_ids=PROMPT, sampling_params=greedy(3), stream=True)
        with tiny_engine.hold() as core:
            assert [output.request.prompt_len for output in core.outputs.values()] == [4]
            while core.outputs:
                core.step()
    assert len(list(stream)[-1]["output_ids"]) == 3


@pytest.fixture
def own_engine(tiny_text_path: Path) -> Engine:
    """One that the test may end."""
    return start(tiny_text_path)


def test_shutting_down_aborts_what_is_alive_and_frees_the_device(own_engine: Engine) -> None:
    pool = own_engine.runner.pool
    own_engine.pause_generation("in_place")
    stream = own_engine.generate(input_ids=PROMPT, sampling_params=greedy(30), stream=True)
    thread = thread_of(own_engine)
    with own_engine:
        assert thread.is_alive()
    assert list(stream)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert not thread.is_alive()
    pool_gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert pool_gone() is None, "somebody still holds the KV pool"
    for use in (own_engine.flush_cache, lambda: own_engine.generate(input_ids=PROMPT)):
        with pytest.raises(ShutDownError, match="shut down"):
            use()
    own_engine.shutdown()


def test_an_engine_that_nobody_holds_ends_its_thread(tiny_text_path: Path) -> None:
    engine = start(tiny_text_path)
    thread = thread_of(engine)
    assert thread.is_alive()
    del engine
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_a_program_may_end_with_a_stream_open(tiny_text_path: Path, tmp_path: Path) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from pathlib import Path
from tests.tiny_engine import greedy, start
engine = start(Path({str(tiny_text_path)!r}))
engine.pause_generation()
stream = engine.generate(input_ids=[3, 4, 5], sampling_params=greedy(30), stream=True)
"""
    script = tmp_path / "program.py"
    script.write_text(program)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupt_while_waiting_to_hold_lets_the_loop_go_on(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt
            return super().wait(timeout)

    with monkeypatch.context() as patch:
        patch.setattr("jradix.loop.threading.Event", Interrupted)
        with pytest.raises(KeyboardInterrupt), tiny_engine.hold():
            pass
    future = tiny_engine.replicas.loops[0].send(tiny_engine._core.check_idle)
    future.result(60)


def test_calls_that_were_cancelled_do_not_keep_a_loop_that_broke_down_from_answering(
    own_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a core that cannot be closed."""

    def fail() -> None:
        raise OverflowError

    with own_engine.hold() as core:
        cancelled, waiting = (own_engine.replicas.loops[0].send(core.check_idle) for _ in range(2))
        cancelled.cancel()
        own_engine.replicas.loops[0]._calls.put(None)
        late = [own_engine.replicas.loops[0].send(core.check_idle) for _ in range(2)]
        late[0].cancel()
        monkeypatch.setattr(core, "close", fail)
    waiting.result(60)
    with pytest.raises(ShutDownError):
        late[1].result(60)


def test_a_loop_that_breaks_down_leaves_nobody_waiting(
    own_engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recovery itself fails: the device has no room for another pool, say."""

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    own_engine.pause_generation("in_place")
    stream = own_engine.generate(input_ids=PROMPT, sampling_params=greedy(30), stream=True)
    monkeypatch.setattr(own_engine.runner, "collect", fail)
    monkeypatch.setattr(own_engine.runner, "reset", fail)
    own_engine.continue_generation()
    with pytest.raises(StepFailedError, match="no room"):
        list(stream)
    assert own_engine.replicas.loops[0]._over.wait(60)
    with pytest.raises(ShutDownError):
        own_engine.flush_cache()
    with pytest.raises(ShutDownError), own_engine.hold():
        pass
    assert "broken down" in caplog.text
