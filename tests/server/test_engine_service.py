"""What the engine process writes to the pipe: all of each output, and of `meta_info` no more than is new."""

import threading
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from jradix import Engine
from jradix.server.engine_service import EngineService
from jradix.server.messages import Answer, Change, Ready, Submit
from tests.tiny_engine import greedy, start

PROMPTS, NUM_TOKENS = [[5, 6, 7], [8, 9]], 5


@pytest.fixture(scope="module")
def served(tiny_path: Callable[[str], Path]) -> Iterator[tuple[Engine, Connection]]:
    """An engine, and the other end of its service's pipe."""
    ours, theirs = Pipe()
    engine = start(tiny_path("llama"))
    service = threading.Thread(target=EngineService(engine, theirs).run)
    service.start()
    assert isinstance(ours.recv()[0], Ready)
    yield engine, ours
    ours.send(None)
    service.join()


def changes(engine: Engine, pipe: Connection, **options: Any) -> list[list[Change]]:
    """Of each output of a stream, where the pipe is read after every step."""

    def receive() -> list[Answer | Change]:
        assert pipe.poll(60), "nothing comes"
        return pipe.recv()

    engine.pause_generation("in_place")
    pipe.send(Submit(7, PROMPTS, [greedy(NUM_TOKENS)] * len(PROMPTS), options, each_token=True))
    assert receive() == [Answer(7)]
    found: list[list[Change]] = [[] for _ in PROMPTS]
    with engine.hold() as core:
        requests = [output.request for output in core.outputs.values()]
        while core.outputs:
            core.step()
            missing = sum(len(request.output_ids) for request in requests)
            missing -= sum(len(change.output_ids) for each in found for change in each)
            while missing:
                for change in receive():
                    assert isinstance(change, Change)
                    found[change.sample_index].append(change)
                    missing -= len(change.output_ids)
    engine.continue_generation()
    assert [[token for change in each for token in change.output_ids] for each in found] == [
        request.output_ids for request in requests
    ]
    return found


def test_meta_info_comes_with_the_first_and_the_last_token_and_not_with_each(served: tuple[Engine, Connection]) -> None:
    for prompt, each in zip(PROMPTS, changes(*served), strict=True):
        assert [change.meta is not None for change in each] == [True, *[False] * (NUM_TOKENS - 2), True]
        first, last = each[0].meta, each[-1].meta
        assert first is not None
        assert last is not None
        assert (first["prompt_tokens"], first["completion_tokens"]) == (len(prompt), 1)
        assert (last["completion_tokens"], last["finish_reason"]["type"]) == (NUM_TOKENS, "length")


def test_log_probabilities_come_with_their_tokens(served: tuple[Engine, Connection]) -> None:
    for each in changes(*served, return_logprob=True):
        assert len(each) == NUM_TOKENS
        for change in each:
            assert change.meta is not None
            assert [token_id for _, token_id, _ in change.meta["output_token_logprobs"]] == change.output_ids
