"""The TPU kernels compiled ahead of time for real chips: Mosaic refuses much of what interpreting lets pass."""

from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jradix.pallas.scoring import Scoring
from jradix.pallas.tpu_blocks import Geometry, decode_blocks, extend_blocks, line_len
from jradix.pallas.tpu_decode import decode_attention
from jradix.pallas.tpu_extend import extend_attention
from jradix.pallas.tpu_write import write_tokens
from tests.test_runner import copied_shapes
from tests.tpu_topology import compile_for, on, tpu_mesh

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1"}
PAGES, MAX_PAGES, DECODE_ROWS, EXTEND_ROWS, TOKENS = 2048, 1024, 64, 16, 2048
PLAIN, ALL = Scoring(0.1), Scoring(0.1, window=1000, soft_cap=30.0)

SMOLLM, LLAMA, QWEN = (9, 3, 64), (32, 8, 128), (16, 8, 128)  # SmolLM2 135M, Llama 3.1 8B, Qwen3 0.6B
ATTENTION = [
    (decode_attention, "v5e", Geometry(jnp.bfloat16, *SMOLLM, page_size=16), PLAIN),
    (decode_attention, "v6e", Geometry(jnp.bfloat16, *LLAMA, page_size=64), PLAIN),
    (decode_attention, "v5e", Geometry(jnp.bfloat16, *QWEN, page_size=256), ALL),
    (decode_attention, "v5p", Geometry(jnp.bfloat16, 16, 1, 256, page_size=128), ALL),
    (decode_attention, "7x", Geometry(jnp.float32, 4, 4, 80, page_size=8), PLAIN),
    (extend_attention, "v6e", Geometry(jnp.bfloat16, *SMOLLM, page_size=16), PLAIN),
    (extend_attention, "v5e", Geometry(jnp.bfloat16, *LLAMA, page_size=64), ALL),
    (extend_attention, "7x", Geometry(jnp.bfloat16, 16, 1, 256, page_size=128), PLAIN),
    (extend_attention, "v5p", Geometry(jnp.float32, 4, 4, 96, page_size=16), ALL),
]


def shapes(*sizes: tuple[int, ...], dtype: Any = jnp.int32) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(size, dtype) for size in sizes]


def pool_of(geometry: Geometry) -> jax.ShapeDtypeStruct:
    page = (geometry.kv_heads, geometry.page_size, line_len(geometry.head_dim))
    return jax.ShapeDtypeStruct((PAGES, *page), geometry.dtype)


def assert_pool_stays(program: jax.stages.Compiled, pool: jax.ShapeDtypeStruct) -> None:
    text = program.as_text()
    assert text is not None
    assert tuple(sorted(pool.shape)) not in copied_shapes(text)


@pytest.mark.parametrize(
    ("kernel", "generation", "geometry", "scoring"), ATTENTION, ids=lambda x: getattr(x, "__name__", str(x))
)
def test_attention_compiles_and_copies_no_pool(
    kernel: Any, generation: str, geometry: Geometry, scoring: Scoring
) -> None:
    mesh, pool = tpu_mesh(TOPOLOGIES[generation]), pool_of(geometry)
    if kernel is decode_attention:
        blocks = decode_blocks(generation, geometry)
        tokens, rows = DECODE_ROWS, shapes((DECODE_ROWS, MAX_PAGES), (DECODE_ROWS,))
    else:
        blocks = extend_blocks(generation, geometry)
        tokens, rows = TOKENS, shapes((EXTEND_ROWS, MAX_PAGES), (EXTEND_ROWS,), (EXTEND_ROWS + 1,))
    q = shapes((tokens, geometry.q_heads, geometry.head_dim), dtype=geometry.dtype)
    sinks = shapes((geometry.q_heads,), dtype=jnp.float32) if scoring == ALL else [None]
    attend = jax.jit(partial(kernel, blocks=blocks), static_argnames="scoring")
    program = compile_for(mesh, attend, *on(mesh, [*q, pool, *rows]), scoring=scoring, sinks=on(mesh, sinks)[0])
    assert_pool_stays(program, pool)


@pytest.mark.parametrize(
    ("generation", "tokens", "geometry"),
    [
        ("v5e", DECODE_ROWS, Geometry(jnp.bfloat16, *LLAMA, page_size=64)),
        ("7x", TOKENS, Geometry(jnp.bfloat16, *SMOLLM, page_size=16)),
        ("v6e", TOKENS, Geometry(jnp.float32, 4, 4, 80, page_size=8)),
        ("v5p", DECODE_ROWS, Geometry(jnp.bfloat16, 16, 1, 256, page_size=256)),
    ],
    ids=str,
)
def test_writes_happen_in_place(generation: str, tokens: int, geometry: Geometry) -> None:
    mesh, pool = tpu_mesh(TOPOLOGIES[generation]), pool_of(geometry)
    line = (tokens, geometry.kv_heads, geometry.head_dim)
    new = [*shapes(line, line, dtype=geometry.dtype), *shapes((tokens,), (tokens,))]
    program = compile_for(mesh, jax.jit(write_tokens, donate_argnums=0), *on(mesh, [pool, *new]))
    assert_pool_stays(program, pool)
    memory, pool_bytes = program.memory_analysis(), prod(pool.shape) * pool.dtype.itemsize
    assert memory is not None
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 2
