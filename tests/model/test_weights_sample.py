"""Other weights have another sample; the same ones have the same, wherever they lie."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jradix.config import EngineConfig
from jradix.convert import convert
from jradix.model.weights_sample import sample_weights


def add_noise(file: Path) -> None:
    """To all its bytes in the second half."""
    data = np.fromfile(file, np.uint8)
    data[len(data) // 2 :] ^= 1
    data.tofile(file)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_copy_has_the_same_sample_until_its_weights_are_changed(
    name: str, tiny_path: Callable[[str], Path], tmp_path: Path
) -> None:
    copy = shutil.copytree(tiny_path(name), tmp_path / "elsewhere")
    expected = sample_weights(tiny_path(name))
    assert sample_weights(copy) == expected
    add_noise(next(copy.glob("*.safetensors")))
    assert sample_weights(copy) != expected


def test_a_file_alone_is_looked_at_and_a_shorter_one_is_another(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(1000))
    expected = sample_weights(file)
    file.write_bytes(bytes(999))
    assert sample_weights(file) != expected


def test_a_converted_checkpoint_has_the_sample_of_its_checksums(
    tiny_path: Callable[[str], Path], tmp_path: Path
) -> None:
    def converted(name: str, quantization: str) -> str:
        options = {"model_path": str(tiny_path("llama")), "dtype": "float32", "skip_tokenizer_init": True}
        return sample_weights(convert(EngineConfig.from_kwargs(**options, quantization=quantization), tmp_path / name))

    assert converted("floats", "auto") != converted("int8", "int8")
