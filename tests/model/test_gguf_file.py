"""The GGUF container, against the package gguf's reader, cut short at every byte, and with every byte changed."""

import tracemalloc
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from jradix.model.checkpoint_error import CheckpointError
from jradix.model.gguf_file import GGUFFile
from tests.model.gguf_writing import random_tensors, write_gguf

METADATA = {
    "a_bool": True,
    "an_int": 7,
    "a_float": 0.1,
    "a_string": "naïve ☂",
    "strings": ["<s>", "é", ""],
    "ints": [1, -2, 3],
    "floats": [0.5, -1.25],
}


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    tensors = random_tensors({"matrix": (3, 64), "vector": (5,), "stack": (2, 3, 32)})
    return write_gguf(tmp_path / "small.gguf", "llama", tensors, METADATA, quantisation=Type.Q8_0)


def test_metadata_and_tensor_table_equal_those_of_the_package_gguf(small_file: Path) -> None:
    ours, theirs = GGUFFile(small_file), gguf.GGUFReader(small_file)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata.keys() == fields.keys()
    for key, value in ours.metadata.items():
        np.testing.assert_array_equal(
            np.float32(value) if isinstance(value, float) else value, fields[key], err_msg=key, strict=False
        )
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.type, mine.offset, mine.num_bytes) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(ours.read(tensor.name), expected)


def test_float32_metadata_is_the_decimal_the_converter_read(small_file: Path) -> None:
    metadata = GGUFFile(small_file).metadata
    assert metadata["llama.a_float"] == 0.1
    assert metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-5


def test_every_type_the_package_dequantises_is_read_as_the_package_does(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for type_, (block_size, block_bytes) in gguf.GGML_QUANT_SIZES.items():
        raw = rng.integers(0, 120, (3, 2 * block_bytes), dtype=np.uint8)  # below 120, no exponent makes Inf or NaN
        try:
            expected = gguf.quants.dequantize(raw, type_)
        except NotImplementedError:
            continue
        if type_ in (Type.F32, Type.F16):
            expected = raw.view({Type.F32: np.float32, Type.F16: np.float16}[type_])
        path = tmp_path / f"{type_.name}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tensor("t", raw, raw_dtype=type_, raw_shape=(3, 2 * block_bytes))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        file = GGUFFile(path)
        assert file.tensors["t"].shape == (3, 2 * block_size)
        np.testing.assert_array_equal(
            file.read("t").astype(np.float32), expected.astype(np.float32), err_msg=type_.name
        )
        np.testing.assert_array_equal(file.read("t", dtype=ml_dtypes.bfloat16), expected.astype(ml_dtypes.bfloat16))


def test_one_slice_of_a_stack_equals_that_part_of_the_whole(small_file: Path) -> None:
    file = GGUFFile(small_file)
    whole = file.read("stack")
    for i in range(2):
        np.testing.assert_array_equal(file.read("stack", i), whole[i])


@pytest.mark.parametrize("dtype", [None, np.float32, ml_dtypes.bfloat16])
def test_reading_needs_little_more_memory_than_the_result(tmp_path: Path, dtype: type | None) -> None:
    tensors = {"t": np.ones((4096, 2048), np.float32)}
    file = GGUFFile(write_gguf(tmp_path / "big.gguf", "llama", tensors, quantisation=Type.Q8_0))
    file.read("t", dtype=dtype)  # what is imported and cached once is not counted
    tracemalloc.start()
    result = file.read("t", dtype=dtype)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert result.nbytes <= peak < result.nbytes + (4 << 20)


def test_a_file_cut_anywhere_is_refused_by_name(small_file: Path, tmp_path: Path) -> None:
    content = small_file.read_bytes()
    end = max(tensor.offset + tensor.num_bytes for tensor in GGUFFile(small_file).tensors.values())
    cut = tmp_path / "cut.gguf"
    header_end = min(tensor.offset for tensor in GGUFFile(small_file).tensors.values())
    for length in (*range(header_end), *range(header_end, end, 31)):
        cut.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf: (truncated|expected)"):
            GGUFFile(cut)


@pytest.mark.parametrize("value", [0x00, 0x7F, 0xFF])
def test_any_changed_byte_of_the_header_is_refused_or_harmless(small_file: Path, tmp_path: Path, value: int) -> None:
    content = small_file.read_bytes()
    header_end = min(tensor.offset for tensor in GGUFFile(small_file).tensors.values())
    changed = tmp_path / "changed.gguf"
    errors = []
    for position in range(header_end):
        changed.write_bytes(content[:position] + bytes([value]) + content[position + 1 :])
        try:
            file = GGUFFile(changed)
            for name in file.tensors:
                file.read(name)
        except CheckpointError as error:
            errors.append(str(error))
    assert len(errors) > 50
    assert all("changed.gguf: " in error for error in errors)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"", "expected 4 bytes of the magic"),
        (b"PK\x03\x04", "starts with b'GGUF', found b'PK"),
        (b"GGUF\x01\0\0\0", "version 2 or 3, found 1"),
        (b"GGUF\0\0\0\x03", "big-endian"),
    ],
)
def test_what_is_no_gguf_of_today_is_refused(tmp_path: Path, head: bytes, message: str) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(head)
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(path)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.gguf: cannot be read: No such file"):
        GGUFFile(tmp_path / "none.gguf")


def test_a_type_nobody_can_dequantise_is_refused_when_opened(tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", np.zeros((1, 292), np.uint8), raw_dtype=Type.Q8_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="1 tensors are of type Q8_K"):
        GGUFFile(path)


def test_a_file_that_shrinks_after_opening_is_refused_when_read(small_file: Path) -> None:
    file = GGUFFile(small_file)
    small_file.write_bytes(small_file.read_bytes()[: file.tensors["matrix"].offset + 1])
    with pytest.raises(CheckpointError, match="ended while a tensor was read"):
        file.read("matrix")
