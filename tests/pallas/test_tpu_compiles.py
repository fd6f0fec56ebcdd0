"""The TPU kernels compiled ahead of time for real chips: Mosaic refuses much of what interpreting lets pass."""

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jradix.aot import TARGETS, copied_shapes
from jradix.pallas.geometry import Geometry
from jradix.pallas.layout import KVLayout
from jradix.pallas.scoring import Scoring
from jradix.pallas.tpu_blocks import decode_blocks, extend_blocks
from jradix.pallas.tpu_decode import decode_attention
from jradix.pallas.tpu_extend import extend_attention
from jradix.pallas.tpu_write import write_tokens

pytest.importorskip("libtpu")
CHIPS = {"v5e": TARGETS["v5e"], "v5p": TARGETS["v5p"], "v6e": TARGETS["v6e"], "7x": TARGETS["tpu7x"]}
PAGES, MAX_PAGES, DECODE_ROWS, EXTEND_ROWS, TOKENS = 2048, 1024, 64, 16, 2048
PLAIN, ALL = Scoring(0.1), Scoring(0.1, window=1000, soft_cap=30.0)

SMOLLM, LLAMA, QWEN = (9, 3, 64), (32, 8, 128), (16, 8, 128)  # SmolLM2 135M, Llama 3.1 8B, Qwen3 0.6B
ATTENTION = [
    (decode_attention, "v5e", Geometry(*SMOLLM, 16, "bfloat16"), PLAIN),
    (decode_attention, "v6e", Geometry(*LLAMA, 64, "bfloat16"), PLAIN),
    (decode_attention, "v5e", Geometry(*QWEN, 256, "bfloat16"), ALL),
    (decode_attention, "v5p", Geometry(16, 1, 256, 128, "bfloat16"), ALL),
    (decode_attention, "7x", Geometry(4, 4, 80, 8, "float32"), PLAIN),
    (extend_attention, "v6e", Geometry(*SMOLLM, 16, "bfloat16"), PLAIN),
    (extend_attention, "v5e", Geometry(*LLAMA, 64, "bfloat16"), ALL),
    (extend_attention, "7x", Geometry(16, 1, 256, 128, "bfloat16"), PLAIN),
    (extend_attention, "v5p", Geometry(4, 4, 96, 16, "float32"), ALL),
    (decode_attention, "v5e", Geometry(*SMOLLM, 32, "bfloat16", "float8_e4m3fn"), ALL),
    (extend_attention, "v6e", Geometry(*LLAMA, 64, "bfloat16", "int8"), ALL),
]


def shapes(*sizes: tuple[int, ...], dtype: Any = jnp.int32) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(size, dtype) for size in sizes]


def pool_of(geometry: Geometry) -> jax.ShapeDtypeStruct:
    layout = KVLayout(1, PAGES, geometry.page_size, geometry.kv_heads, geometry.head_dim, joined=True)
    return jax.ShapeDtypeStruct(layout.shape, geometry.pool_dtype)


def assert_pool_stays(program: jax.stages.Compiled, pool: jax.ShapeDtypeStruct) -> None:
    assert tuple(sorted(pool.shape)) not in copied_shapes(program)


@pytest.mark.parametrize(
    ("kernel", "generation", "geometry", "scoring"), ATTENTION, ids=lambda x: getattr(x, "__name__", str(x))
)
def test_attention_compiles_and_copies_no_pool(
    kernel: Any, generation: str, geometry: Geometry, scoring: Scoring
) -> None:
    pool = pool_of(geometry)
    if kernel is decode_attention:
        blocks = decode_blocks(generation, geometry)
        tokens, rows = DECODE_ROWS, shapes((DECODE_ROWS, MAX_PAGES), (DECODE_ROWS,))
    else:
        blocks = extend_blocks(generation, geometry)
        tokens, rows = TOKENS, shapes((EXTEND_ROWS, MAX_PAGES), (EXTEND_ROWS,), (EXTEND_ROWS + 1,))
    [q] = shapes((tokens, geometry.q_heads, geometry.head_dim), dtype=geometry.dtype)
    [sinks] = shapes((geometry.q_heads,), dtype=jnp.float32) if scoring == ALL else [None]

    def attend(sinks: jax.Array | None, *arrays: jax.Array) -> jax.Array:
        return kernel(*arrays, scoring, sinks, blocks=blocks)

    program = CHIPS[generation].compile(jax.jit(attend), sinks, q, pool, *rows)
    assert_pool_stays(program, pool)


@pytest.mark.parametrize(
    ("generation", "tokens", "geometry"),
    [
        ("v5e", DECODE_ROWS, Geometry(*LLAMA, 64, "bfloat16")),
        ("7x", TOKENS, Geometry(*SMOLLM, 16, "bfloat16")),
        ("v6e", TOKENS, Geometry(4, 4, 80, 8, "float32")),
        ("v5p", DECODE_ROWS, Geometry(16, 1, 256, 256, "bfloat16")),
        ("v5e", DECODE_ROWS, Geometry(*LLAMA, 64, "bfloat16", "int8")),
        ("7x", TOKENS, Geometry(*SMOLLM, 32, "bfloat16", "float8_e4m3fn")),
    ],
    ids=str,
)
def test_writes_happen_in_place(generation: str, tokens: int, geometry: Geometry) -> None:
    pool = pool_of(geometry)
    line = (tokens, geometry.kv_heads, geometry.head_dim)
    new = [*shapes(line, line, dtype=geometry.pool_dtype), *shapes((tokens,), (tokens,))]
    program = CHIPS[generation].compile(jax.jit(write_tokens, donate_argnums=0), pool, *new)
    assert_pool_stays(program, pool)
    memory, pool_bytes = program.memory_analysis(), prod(pool.shape) * pool.dtype.itemsize
    assert memory is not None
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 2
