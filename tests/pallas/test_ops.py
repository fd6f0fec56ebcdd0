"""Which implementation a device gets, and the reasons it is given."""

import pytest

from jradix.pallas.geometry import Geometry
from jradix.pallas.ops import choose

LLAMA = Geometry(q_heads=32, kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16")


@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"])
def test_every_tpu_generation_has_kernels(kind: str) -> None:
    kernels = choose("tpu", kind, LLAMA, max_pages=512)
    assert (kernels.name, kernels.reasons) == ("tpu", ())
    assert kernels.joined_pages


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_pools_of_8_bits_have_kernels_on_a_tpu_and_pages_of_whole_tiles(kv_dtype: str) -> None:
    geometry = LLAMA._replace(kv_dtype=kv_dtype)
    assert choose("tpu", "TPU v5 lite", geometry._replace(page_size=32), max_pages=512).name == "tpu"
    with pytest.raises(ValueError, match=f"page_size must be a multiple of 32 on a TPU in {kv_dtype}, got 16"):
        choose("tpu", "TPU v5 lite", geometry, max_pages=512)


def test_hopper_has_kernels_and_older_gpus_take_the_xla_path() -> None:
    assert choose("gpu", "9.0", LLAMA, max_pages=512).name == "gpu"
    older = choose("gpu", "8.0", LLAMA, max_pages=512)
    assert older.name == "xla"
    assert "8.0" in older.reasons[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_pools_of_8_bits_have_kernels_on_hopper_whatever_the_page_size(dtype: str, kv_dtype: str) -> None:
    kernels = choose("gpu", "9.0", LLAMA._replace(dtype=dtype, kv_dtype=kv_dtype, page_size=8), max_pages=512)
    assert (kernels.name, kernels.reasons) == ("gpu", ())


@pytest.mark.parametrize(
    ("platform", "device", "change", "reason"),
    [
        ("tpu", "TPU v4", {}, "TPU v4"),
        ("tpu", "TPU v6 lite", {"head_dim": 512}, "head_dim 512"),
        ("tpu", "TPU v6 lite", {"dtype": "float16"}, "float16"),
        ("gpu", "9.0", {"dtype": "float32"}, "float32"),
        ("gpu", "9.0", {"kv_dtype": "float8_e5m2"}, "keys and values of float8_e5m2"),
        ("tpu", "TPU v6 lite", {"kv_dtype": "float16"}, "keys and values of float16"),
        ("gpu", "9.0", {"head_dim": 40}, "head_dim 40"),
        ("gpu", "9.0", {"q_heads": 7, "kv_heads": 2}, "7 query heads"),
        ("tpu", "TPU v6 lite", {"q_heads": 7, "kv_heads": 2}, "7 query heads"),
        ("gpu", "9.0", {"page_size": 4}, "4"),
        ("cpu", "cpu", {}, "cpu"),
    ],
)
def test_what_kernels_do_not_cover_is_named(platform: str, device: str, change: dict[str, object], reason: str) -> None:
    kernels = choose(platform, device, LLAMA._replace(**change), max_pages=512)  # pyright: ignore[reportArgumentType]
    assert kernels.name == "xla"
    assert any(reason in given for given in kernels.reasons)


def test_a_tpu_keeps_the_joined_layout_without_kernels() -> None:
    """Its lines would be padded to twice their length in a split one."""
    without = choose("tpu", "TPU v4", LLAMA, max_pages=512)
    assert (without.name, without.joined_pages) == ("xla", True)
    assert not choose("cpu", "cpu", LLAMA, max_pages=512).joined_pages


@pytest.mark.parametrize(("dtype", "page_size"), [("bfloat16", 8), ("bfloat16", 24), ("float32", 4), ("bfloat16", 1)])
def test_pages_that_a_tpu_would_lay_out_anew_in_each_step_are_refused(dtype: str, page_size: int) -> None:
    geometry = LLAMA._replace(dtype=dtype, page_size=page_size)
    with pytest.raises(ValueError, match=f"page_size must be a multiple of .* on a TPU in {dtype}, got {page_size}"):
        choose("tpu", "TPU v6 lite", geometry, max_pages=512)
    assert choose("cpu", "cpu", geometry, max_pages=512).name == "xla"
