"""Weights that change while the engine lives: nothing of the old ones is used again, and nobody loses their place."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jradix import Engine
from jradix.convert import convert
from tests.tiny_engine import greedy, output_ids, paused, start

PROMPTS = [[*range(30, 50), seed] for seed in range(6)]


@pytest.fixture(scope="module")
def other_path(tiny_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama with other numbers."""
    path = tmp_path_factory.mktemp("other")
    shutil.copy(tiny_path("llama") / "config.json", path)
    rng = np.random.default_rng(0)
    tensors = load_file(tiny_path("llama") / "model.safetensors")
    changed = {name: rng.permuted(tensor, axis=-1) for name, tensor in tensors.items()}
    save_file(changed, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def engine(tiny_path: Callable[[str], Path]) -> Engine:
    return start(tiny_path("llama"))


@pytest.fixture(scope="module")
def other_engine(other_path: Path) -> Engine:
    return start(other_path)


@pytest.mark.parametrize("in_memory", [False, True])
def test_after_an_update_answers_are_those_of_a_fresh_engine_and_nothing_old_is_cached(
    engine: Engine, other_engine: Engine, other_path: Path, tiny_path: Callable[[str], Path], in_memory: bool
) -> None:
    old, new = output_ids(engine, PROMPTS), output_ids(other_engine, PROMPTS)
    assert old != new
    engine.cache.pin("system", PROMPTS[0][:20])
    version = engine.get_server_info()["weight_version"]
    weights = load_file(other_path / "model.safetensors") if in_memory else other_path
    assert engine.update_weights(weights) == version + 1
    engine.check_idle()
    first = engine.generate(input_ids=PROMPTS[0], sampling_params=greedy())
    assert (first["meta_info"]["cached_tokens"], first["meta_info"]["weight_version"]) == (0, version + 1)
    assert output_ids(engine, PROMPTS) == new
    engine.update_weights(tiny_path("llama"))
    assert output_ids(engine, PROMPTS) == old


def test_requests_under_way_keep_their_tokens_and_go_on_under_the_new_weights(
    engine: Engine, other_engine: Engine, other_path: Path, tiny_path: Callable[[str], Path]
) -> None:
    with paused(engine):
        stream = engine.generate(input_ids=PROMPTS, sampling_params=greedy(12), stream=True)
        with engine.hold() as core:
            for _ in range(6):
                core.step()
        engine.pause_generation("in_place")  # the step in flight gives its tokens too
        with engine.hold() as core:
            sampled = {i: len(output.request.output_ids) for i, output in enumerate(core.outputs.values())}
        engine.update_weights(other_path)
    results = {result["index"]: result["output_ids"] for result in stream}
    engine.check_idle()
    engine.update_weights(tiny_path("llama"))
    old = output_ids(engine, PROMPTS, greedy(12))
    assert max(sampled.values()) > 2
    for index, ids in results.items():
        kept = ids[: sampled[index]]
        assert kept == old[index][: len(kept)]
        rest = output_ids(other_engine, [PROMPTS[index] + kept], greedy(12 - len(kept)))[0]
        assert ids[len(kept) :] == rest


def test_weights_of_another_model_are_refused_and_the_old_ones_stay(
    engine: Engine, tiny_path: Callable[[str], Path], tmp_path: Path
) -> None:
    before, cached = output_ids(engine, PROMPTS), engine.cache.num_evictable
    in_int8 = convert(replace(engine.config, quantization="int8"), tmp_path / "int8")
    with pytest.raises(ValueError, match="stored in int8, and the engine's are not quantised"):
        engine.update_weights(in_int8)
    with pytest.raises(ValueError, match="is another model"):
        engine.update_weights(tiny_path("qwen3"))
    with pytest.raises(ValueError, match="missing: "):
        engine.update_weights({"model.norm.weight": np.ones(64)})
    with pytest.raises(ValueError, match="must map names of tensors to arrays"):
        engine.update_weights({"model.norm.weight": [1.0]})
    for weights in (None, 3, b"path"):
        with pytest.raises(ValueError, match="weights must be a path"):
            engine.update_weights(weights)  # pyright: ignore[reportArgumentType]
    assert engine.cache.num_evictable == cached, "the cache was flushed for nothing"
    assert output_ids(engine, PROMPTS) == before


def test_an_update_that_breaks_off_stops_the_engine_until_one_succeeds(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tiny_path: Callable[[str], Path]
) -> None:
    before = output_ids(engine, PROMPTS)

    def replace_some(parameters: list, sharding: object) -> None:
        parameters[0] = parameters[0] * 0
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr("jradix.startup.weights_to_replace", lambda *_: replace_some)
        with pytest.raises(OSError, match="the disk is gone"):
            engine.update_weights(tiny_path("llama"))
    engine.continue_generation()
    assert engine.get_server_info()["paused"], "it would go on with weights of both kinds"
    engine.update_weights(tiny_path("llama"))
    assert not engine.get_server_info()["paused"], "it would stand still for ever"
    assert output_ids(engine, PROMPTS) == before
