"""What `jradix convert` writes is the model that it has read, for every family, and appears whole or not at all."""

import fcntl
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jradix.cli import main
from jradix.config import EngineConfig
from jradix.convert import convert
from jradix.mesh import tensor_mesh
from jradix.model.checkpoint import open_checkpoint
from jradix.model.config import ModelConfig
from jradix.model.orbax_checkpoint import PARAMETERS
from jradix.model.seal import SEAL
from jradix.model.sharding import Sharding
from jradix.model.weights import load_transformer
from jradix.tokenizer import copy_tokenizer, load_tokenizer
from tests.test_engine_goldens import TINY_NAMES
from tests.tiny_engine import Golden, output_ids, start


def config_of(path: Path, **fields: Any) -> EngineConfig:
    return EngineConfig(model_path=str(path), **{"dtype": "float32", "skip_tokenizer_init": True} | fields)


def parameters(path: Path, **options: Any) -> list[jax.Array]:
    """The flat list of a model's parameters."""
    checkpoint = open_checkpoint(path)
    config = ModelConfig.from_hf(checkpoint.config)
    if "devices" in options:
        options["sharding"] = Sharding(config, tensor_mesh(options.pop("devices")))
    model = load_transformer(config, checkpoint, **{"dtype": np.float32, "layer_loop": "scan"} | options)
    return jax.tree.leaves(nnx.state(model))


def assert_bit_equal(found: list[jax.Array], expected: list[jax.Array]) -> None:
    assert [a.dtype for a in found] == [a.dtype for a in expected]
    assert [a.sharding for a in found] == [a.sharding for a in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one).view(np.uint8), np.asarray(other).view(np.uint8))


@pytest.mark.parametrize("name", TINY_NAMES)
def test_restored_parameters_are_bit_equal_in_both_layer_loops(
    name: str, tiny_path: Callable[[str], Path], tmp_path: Path
) -> None:
    converted = convert(config_of(tiny_path(name)), tmp_path / "converted")
    for layer_loop in ("scan", "unroll"):
        found, expected = (parameters(path, layer_loop=layer_loop) for path in (converted, tiny_path(name)))
        assert_bit_equal(found, expected)


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "qwen3_moe"])
def test_weights_may_be_quantised_before_or_after(
    name: str, quantization: str, tiny_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """Once when they are converted, or at each start: from tensors, or from converted parameters."""
    expected = parameters(tiny_path(name), quantization=quantization)
    assert_bit_equal(
        parameters(convert(config_of(tiny_path(name), quantization=quantization), tmp_path / "quantised")), expected
    )
    floats = convert(config_of(tiny_path(name)), tmp_path / "floats")
    assert_bit_equal(parameters(floats, quantization=quantization), expected)


@pytest.mark.parametrize(("name", "devices"), [("llama", 4), ("qwen3_moe", 2)])
@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_any_mesh_restores_what_one_device_has_written(
    name: str, devices: int, quantization: str, tiny_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """Llama's two KV heads are copied to four devices."""
    converted = convert(config_of(tiny_path(name), quantization=quantization), tmp_path / "converted")
    options = {} if quantization == "auto" else {"quantization": quantization}
    assert_bit_equal(parameters(converted, devices=devices), parameters(tiny_path(name), devices=devices, **options))


def test_a_converted_checkpoint_is_converted_again(tiny_path: Callable[[str], Path], tmp_path: Path) -> None:
    first = convert(config_of(tiny_path("llama")), tmp_path / "first")
    second = convert(config_of(first, dtype="bfloat16"), tmp_path / "second")
    assert_bit_equal(parameters(second), [a.astype("bfloat16").astype("float32") for a in parameters(first)])
    quantised = convert(config_of(first, quantization="int8"), tmp_path / "quantised")
    with pytest.raises(ValueError, match="quantization must be 'int8', in which the checkpoint is stored, got 'fp8'"):
        convert(config_of(quantised, quantization="fp8"), tmp_path / "other")


def test_an_engine_of_a_converted_checkpoint_gives_the_same_tokens(
    tiny_path: Callable[[str], Path], tmp_path: Path
) -> None:
    golden = Golden(tiny_path("llama"))
    with start(convert(config_of(tiny_path("llama")), tmp_path / "converted")) as engine:
        assert output_ids(engine, golden.prompts) == golden.greedy_ids
        engine.update_weights(tiny_path("llama"))
        engine.update_weights(tmp_path / "converted")
        assert output_ids(engine, golden.prompts) == golden.greedy_ids


def test_the_command_writes_a_directory_with_the_tokenizer(
    tiny_text_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "new" / "converted"
    assert main(["convert", "--model-path", str(tiny_text_path), "--output", str(target), "--dtype", "float32"]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    names = {"config.json", "tokenizer.json", "tokenizer_config.json", PARAMETERS, SEAL}
    assert {entry.name for entry in target.iterdir()} == names
    assert load_tokenizer(target).encode("abc") == load_tokenizer(tiny_text_path).encode("abc")
    assert main(["convert", "--model-path", str(tiny_text_path), "--output", str(target)]) == 2
    assert "output must be a directory that does not exist yet" in capsys.readouterr().err


def test_nothing_is_left_of_a_conversion_that_fails(tiny_path: Callable[[str], Path], tmp_path: Path) -> None:
    """The second time after the parameters are written: the tokenizer's files are copied last."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match="cannot be written"):
        convert(config_of(tiny_path("llama")), tmp_path / "file" / "converted")
    source = tmp_path / "source"
    source.mkdir()
    for file in tiny_path("llama").iterdir():
        (source / file.name).symlink_to(file)
    (source / "vocab.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="cannot be written"):
        convert(config_of(source, skip_tokenizer_init=False), tmp_path / "converted")
    assert {entry.name for entry in tmp_path.iterdir()} == {"file", "source"}
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="output must be a directory that does not exist yet"):
        convert(config_of(tiny_path("llama")), tmp_path / "link")


def test_two_conversions_to_one_directory_do_not_meet(tiny_path: Callable[[str], Path], tmp_path: Path) -> None:
    """The second is refused as long as the first runs; what a first one that was killed has left is removed."""
    partial = tmp_path / ".converted.partial"
    (partial / "params" / "d").mkdir(parents=True)
    (partial / "config.json").write_text("{}")
    (partial / "left over").write_text("{}")
    descriptor = os.open(partial, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match="is being written by another conversion"):
        convert(config_of(tiny_path("llama_mqa")), tmp_path / "converted")
    assert (partial / "left over").exists()
    os.close(descriptor)
    converted = convert(config_of(tiny_path("llama_mqa")), tmp_path / "converted")
    assert {entry.name for entry in converted.iterdir()} == {"config.json", PARAMETERS, SEAL}
    assert list(tmp_path.iterdir()) == [converted]


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
import orbax.checkpoint
import jradix.convert
from jradix.config import EngineConfig

def convert_killed(source, target, limit):
    # In a child, which dies at a file operation of this number. Returns its status.
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    count = 0
    def watch(event, args):
        nonlocal count
        if event in ("open", "os.mkdir", "os.rename") and str(target.parent) in str(args[:2]):
            count += 1
            if count == limit:
                os.kill(os.getpid(), signal.SIGKILL)
    jradix.convert.host_parameters = lambda *_, **__: {f"p{i}": np.full((64, 64), i, np.float32) for i in range(4)}
    sys.addaudithook(watch)
    jradix.convert.convert(EngineConfig(model_path=source, skip_tokenizer_init=True), target)
    (target.parent / "count").write_text(str(count))
    os._exit(0)

source, top = sys.argv[1], Path(sys.argv[2])
(top / "whole").mkdir()
assert convert_killed(source, top / "whole" / "converted", 0) == 0
count = int((top / "whole" / "count").read_text())
# Orbax's threads do not always make as many: some children may end before their number comes.
for limit in [*range(2, count - 6, max(1, count // 5)), *range(count - 6, count + 4)]:
    place = top / f"at-{limit}"
    place.mkdir()
    status = convert_killed(source, place / "converted", limit)
    assert os.WIFSIGNALED(status) or status == 0, status
    if os.WIFSIGNALED(status):
        place.rename(top / f"killed-{limit}")
"""


def test_a_conversion_killed_at_any_file_operation_leaves_nothing_that_is_taken_for_whole(
    tiny_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of what opens, every number is there. Children of a process without threads, which a fork would lose."""
    script = [sys.executable, "-W", "ignore", "-c", KILLED, str(tiny_path("llama_mqa")), str(tmp_path)]
    subprocess.run(script, check=True, timeout=300)
    opened: list[str] = []
    killed = sorted(tmp_path.glob("killed-*"), key=lambda path: int(path.name.removeprefix("killed-")))
    assert len(killed) > 9
    for directory in killed:
        for found in directory.iterdir():
            try:
                checkpoint = open_checkpoint(found)
            except ValueError:
                assert found.name == ".converted.partial"
                continue
            opened.append(found.name)
            for index in range(4):
                np.testing.assert_array_equal(checkpoint.read(f"p{index}"), np.full((64, 64), index))
    assert opened[-1:] == ["converted"], "the last one was killed after the renaming"
    assert len(opened) < len(killed)


def test_the_tokenizer_of_a_gguf_file_is_kept(smollm2_path: Path, tmp_path: Path) -> None:
    copy_tokenizer(smollm2_path, tmp_path)
    copied, original = load_tokenizer(tmp_path), load_tokenizer(smollm2_path)
    text = "Ein Test: 12345 naïve 🙂 <|im_end|>\n\tdef f(x):"
    assert copied.encode(text) == original.encode(text)
    assert copied.decode(copied.encode(text)) == original.decode(original.encode(text))
    assert (copied.bos_id, copied.eos_ids, copied.special_ids) == (
        original.bos_id,
        original.eos_ids,
        original.special_ids,
    )
    messages = [{"role": "user", "content": "Hi"}]
    assert copied.render_chat(messages) == original.render_chat(messages)


def test_a_damaged_tokenizer_is_named(smollm2_path: Path, tmp_path: Path) -> None:
    copy_tokenizer(smollm2_path, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"gguf_vocabulary\.json and tokenizer\.json hold no tokenizer"):
        load_tokenizer(tmp_path)


@pytest.fixture
def converted(tiny_path: Callable[[str], Path], tmp_path: Path) -> Path:
    return convert(config_of(tiny_path("llama_mqa")), tmp_path / "converted")


def test_any_damage_to_any_file_is_refused_and_the_file_is_named(converted: Path) -> None:
    """Cut, changed in a bit, or gone. Orbax alone would give wrong numbers for a changed bit of most of the bytes."""
    files = [*(file for file in (converted / PARAMETERS).rglob("*") if file.is_file()), converted / SEAL]
    assert len(files) > 8
    for file in files:
        whole = file.read_bytes()
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 16
        for damaged in (whole[:-1], bytes(flipped), None):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            with pytest.raises(ValueError, match=re.escape(file.name)):
                open_checkpoint(converted)
            file.write_bytes(whole)
    parameters(converted)


def test_what_another_version_wrote_is_refused(converted: Path) -> None:
    metadata = converted / PARAMETERS / "_METADATA"
    content = json.loads(metadata.read_text())
    content["custom_metadata"]["version"] = 1
    metadata.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"expected a checkpoint that jradix convert wrote.*convert the model again"):
        open_checkpoint(converted)
    assert open_checkpoint(converted, weights=False).config["num_hidden_layers"] > 0


def test_parameters_of_another_config_are_refused_by_name(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    (converted / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    with pytest.raises(ValueError, match=r"wrong shape: layers\.0\.down \(expected"):
        parameters(converted)
