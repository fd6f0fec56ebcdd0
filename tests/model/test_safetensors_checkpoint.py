"""Hugging Face directories: one file or shards, each stored dtype, and every way in which they can be broken."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jradix.model.checkpoint_error import CheckpointError
from jradix.model.safetensors_checkpoint import SafetensorsCheckpoint

Write = Callable[[Path], dict[str, np.ndarray]]

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8}


def some_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    dtypes = {"a.weight": np.float32, "b.weight": np.float16, "c.weight": ml_dtypes.bfloat16, "d.weight": np.float64}
    return {name: rng.standard_normal((4, 6)).astype(dtype) for name, dtype in dtypes.items()} | {
        "norm.weight": rng.standard_normal(5).astype(np.float32)
    }


def write_single(directory: Path) -> dict[str, np.ndarray]:
    tensors = some_tensors()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, directory / "model.safetensors")
    return tensors


def write_shards(directory: Path) -> dict[str, np.ndarray]:
    tensors = some_tensors()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    weight_map = {name: f"model-{1 + i % 2:05}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file_name in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file_name}, directory / file_name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


@pytest.mark.parametrize("write", [write_single, write_shards])
def test_tensors_come_back_as_they_were_stored(tmp_path: Path, write: Write) -> None:
    tensors = write(tmp_path)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert (checkpoint.config, checkpoint.path, checkpoint.names()) == (CONFIG, tmp_path, tensors.keys())
    for name, array in tensors.items():
        read = checkpoint.read(name)
        assert read.dtype == array.dtype
        assert read.shape == checkpoint.shape(name) == array.shape
        np.testing.assert_array_equal(read, array)


def test_what_is_read_cannot_change_the_file(tmp_path: Path) -> None:
    write_single(tmp_path)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    for name in checkpoint.names():
        with pytest.raises(ValueError, match="read-only"):
            checkpoint.read(name)[...] = 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads the list of mappings that Linux keeps")
@pytest.mark.parametrize("write", [write_single, write_shards])
def test_a_file_is_mapped_only_while_a_tensor_is_kept(tmp_path: Path, write: Write) -> None:
    write(tmp_path)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    arrays = [checkpoint.read(name) for name in checkpoint.names()]
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    del arrays
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_file_that_shrinks_after_opening_is_refused_when_read(tmp_path: Path) -> None:
    write_single(tmp_path)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: a\.weight cannot be read"):
        checkpoint.read("a.weight")


def test_a_single_file_is_preferred_to_an_index(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file({"only": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    assert SafetensorsCheckpoint(tmp_path).names() == {"only"}


@pytest.mark.parametrize("content", ["", "{", "[1]", '"text"', "\x00"])
def test_a_config_that_is_no_json_object_is_refused_by_name(tmp_path: Path, content: str) -> None:
    write_single(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json: expected (a )?JSON"):
        SafetensorsCheckpoint(tmp_path)


def test_a_safetensors_file_cut_anywhere_is_refused_by_name(tmp_path: Path) -> None:
    write_single(tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    for length in range(0, len(content), 7):
        file.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=rf"model\.safetensors: expected .*, found {length} bytes"):
            SafetensorsCheckpoint(tmp_path)


def test_bytes_that_are_no_safetensors_are_refused(tmp_path: Path) -> None:
    write_single(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n" * 3)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: expected a whole safetensors file"):
        SafetensorsCheckpoint(tmp_path)


def test_a_directory_without_weights_is_refused_with_what_it_has(tmp_path: Path) -> None:
    write_single(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors or .*index.*pytorch_model\.bin"):
        SafetensorsCheckpoint(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"missing \['model-00002-of-00002\.safetensors'\]"):
        SafetensorsCheckpoint(tmp_path)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["ghost.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors: .*missing \['ghost\.weight'\]"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_an_index_without_a_map_is_refused_by_name(tmp_path: Path, content: str) -> None:
    write_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json: expected"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("file_name", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", 3])
def test_an_index_cannot_reach_outside_its_directory(tmp_path: Path, file_name: object) -> None:
    write_shards(tmp_path)
    index = {"weight_map": {"a.weight": file_name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="expected the name of a file beside it"):
        SafetensorsCheckpoint(tmp_path)


def test_weights_that_are_no_floats_are_refused_when_read(tmp_path: Path) -> None:
    write_single(tmp_path)
    save_file({"quantised": np.ones((2, 2), np.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"expected quantised in one of .* found I8"):
        SafetensorsCheckpoint(tmp_path).read("quantised")
