"""Steps compiled ahead of time for TPUs, as an engine there would run them: what the chip would need, without one."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jradix.aot import TARGETS, Target, collectives, copied_shapes, copied_shapes_of_text
from jradix.batch import packed_len
from jradix.config import StepShape
from jradix.jitted import jit_copies, jit_forward, jit_prompt_logprobs
from jradix.logits import penalize
from jradix.model.config import ModelConfig
from jradix.model.kv_calibration import scales_shape
from jradix.model.quantized_kv import is_quantized
from jradix.model.sharding import Sharding
from jradix.model.weights import abstract_transformer
from jradix.pallas.geometry import Geometry
from jradix.pallas.layout import KVLayout
from jradix.pallas.ops import XLA, Kernels, choose

LAYERS = 4
WIDE = {"num_hidden_layers": LAYERS, "hidden_size": 256, "head_dim": 128, "intermediate_size": 512}
PAGES = 2048  # of a layer
SHAPES = [StepShape(8, 0, 0, 16), StepShape(8, 32, 2, 16)]


@pytest.fixture(params=["v5e", "v6e"])
def target(request: pytest.FixtureRequest) -> Target:
    pytest.importorskip("libtpu")
    return TARGETS[request.param]


def parts(
    target: Target, tiny_path: Callable[[str], Path], page_size: int, kv_dtype: str = "bfloat16"
) -> tuple[ModelConfig, KVLayout, Kernels]:
    config = ModelConfig.from_hf(json.loads((tiny_path("llama") / "config.json").read_text()) | WIDE)
    geometry = Geometry(config.q_heads, config.kv_heads, config.head_dim, page_size, "bfloat16", kv_dtype)
    kernels = choose(target.platform, target.device, geometry, max_pages=16)
    layout = KVLayout(LAYERS, PAGES, page_size, config.kv_heads, config.head_dim, joined=kernels.joined_pages)
    return config, layout, kernels


@pytest.mark.parametrize(
    ("kind", "devices", "kv_dtype"), [("tpu", 1, "bfloat16"), ("xla", 1, "bfloat16"), ("tpu", 4, "int8")]
)
def test_a_step_updates_the_pool_in_place(
    target: Target, kind: str, devices: int, kv_dtype: str, tiny_path: Callable[[str], Path]
) -> None:
    """With the kernels, and by XLA alone, as on a generation that they do not know; on several devices they send each
    other two sums in the body of the loop over layers, and one for the embedding."""
    config, layout, kernels = parts(target, tiny_path, 32, kv_dtype)
    assert kernels.name == "tpu"
    kernels = replace(kernels, name=kind)
    sharding = Sharding(config, target.mesh(devices))
    layout = replace(layout, kv_heads=sharding.heads.slots)
    model = abstract_transformer(config, dtype=jnp.bfloat16, layer_loop="scan", sharding=sharding)
    scales: Any = jax.ShapeDtypeStruct(scales_shape(layout), jnp.float32, sharding=sharding.kv_scales)
    scales = scales if is_quantized(kv_dtype) else None
    forward, parameters = jit_forward(model, PAGES, kernels, sharding, scales)
    pool = jax.ShapeDtypeStruct(layout.shape, kv_dtype, sharding=sharding.pool)
    next_tokens = jax.ShapeDtypeStruct((9,), jnp.int32)
    pool_size = prod(pool.shape) // devices
    pool_bytes = pool_size * pool.dtype.itemsize
    for shape in SHAPES:
        arrays = jax.ShapeDtypeStruct((packed_len(shape),), jnp.int32)
        program = target.compile(forward, parameters, pool, next_tokens, arrays, mesh=sharding.mesh, static=(shape,))
        memory = program.memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes == pool_bytes
        assert memory.temp_size_in_bytes < pool_bytes / 8
        assert all(prod(sizes) < pool_size / 8 for sizes in copied_shapes(program))
        assert collectives(program) == ({"all-reduce": 3} if devices > 1 else {})


def test_weights_in_int8_are_not_dequantised_or_rearranged_before_a_matmul_reads_them(
    tiny_path: Callable[[str], Path],
) -> None:
    """On a TPU: no array of the step has a weight's shape and more than 8 bits, none is copied, not even in VMEM."""
    pytest.importorskip("libtpu")
    target = TARGETS["v6e"]
    config, layout, kernels = parts(target, tiny_path, page_size=16)
    sharding = Sharding(config, target.mesh())
    model = abstract_transformer(config, dtype=jnp.bfloat16, layer_loop="scan", sharding=sharding, quantization="int8")
    forward, parameters = jit_forward(model, PAGES, kernels, sharding)
    pool = jax.ShapeDtypeStruct(layout.shape, jnp.bfloat16, sharding=sharding.pool)
    args = (parameters, pool, jax.ShapeDtypeStruct((9,), jnp.int32))
    shape = SHAPES[0]
    arrays = jax.ShapeDtypeStruct((packed_len(shape),), jnp.int32)
    program = target.compile(forward, *args, arrays, mesh=sharding.mesh, static=(shape,))
    text = program.as_text()
    assert text is not None
    mlp, hidden = config.mlp_size, config.hidden_size
    weight = rf"\[(?:\d+,)*(?:{mlp},{hidden}|{2 * mlp},{hidden}|{hidden},{mlp})\]"
    assert re.search("s8" + weight, text)
    assert not re.search(rf"(?:bf16|f32){weight}\S* fusion\(", text)
    assert not any("s8" in line for line in re.findall(r"\S+ (?:copy|reshape|transpose)\(%(?!input)", text))
    assert all(prod(sizes) < mlp * hidden / 8 for sizes in copied_shapes(program))


def test_copies_are_what_a_program_writes_and_not_how_a_fusion_reads_an_operand() -> None:
    text = """
%retile (input: s8[64,96]) -> s8[64,96] {
  %input = s8[64,96]{1,0:T(32,128)(4,1)} parameter(0)
  ROOT %copy.1 = s8[64,96]{1,0:T(8,128)(4,1)} copy(%input)
}

%multiplied (a: s8[64,96], b: bf16[96]) -> bf16[64] {
  %fusion.1 = s8[64,96]{1,0:T(8,128)(4,1)} fusion(%a), kind=kLoop, calls=%retile
  ROOT %dot = bf16[64]{0:T(128)} dot(%fusion.1, %b)
}

%copied (c: bf16[5,7]) -> (bf16[7,5], f32[3]) {
  %d = bf16[7,5]{1,0} transpose(%c), dimensions={1,0}
  ROOT %tuple.1 = (bf16[7,5]{1,0}, f32[3]{0}) tuple(%d, %e)
}

%body (state: (s32[], bf16[2,11])) -> (s32[], bf16[2,11]) {
  %copy.2 = bf16[11,2]{1,0:T(8,128)(2,1)} copy(%x)
  %copy.3 = bf16[13,2]{1,0:T(8,128)(2,1)S(1)} copy(%y)
  ROOT %tuple.2 = (s32[], bf16[2,11]{1,0}) tuple(%i, %z)
}

%reshaped (f: bf16[4,8,128]) -> bf16[32,128] {
  %copy.4 = bf16[4,8,128]{2,1,0} copy(%f)
  ROOT %bitcast = bf16[32,128]{1,0} bitcast(%copy.4)
}

ENTRY %main (weight: s8[64,96], b: bf16[96]) -> bf16[64] {
  %fusion.2 = bf16[64]{0:T(128)} fusion(%weight, %b), kind=kOutput, calls=%multiplied
  %fusion.3 = (bf16[7,5]{1,0}, f32[3]{0}) fusion(%weights.2), kind=kLoop, calls=%copied
  %fusion.4 = bf16[32,128]{1,0} fusion(%weights.3), kind=kLoop, calls=%reshaped
  %copy-start = (f32[17]{0:T(128)}, f32[17]{0:T(128)}, u32[]{:S(2)}) copy-start(%p)
  %copy-done = f32[17]{0:T(128)} copy-done(%copy-start)
  %reshape.1 = f32[19,2]{1,0:T(8,128)} reshape(%q)
  ROOT %while = (s32[], bf16[2,11]{1,0}) while(%r), condition=%c, body=%body
}
"""
    assert copied_shapes_of_text(text) == {(5, 7), (2, 11), (17,), (2, 19), (32, 128)}


def test_prompts_need_the_memory_of_one_block_of_logits_and_counts_stay_where_they_are(
    target: Target, tiny_path: Callable[[str], Path]
) -> None:
    tokens, block, vocab, rows = 1024, 128, 32_000, 16
    fields = json.loads((tiny_path("llama") / "config.json").read_text()) | WIDE | {"vocab_size": vocab}
    config = ModelConfig.from_hf(fields)
    sharding = Sharding(config, target.mesh())
    model = abstract_transformer(config, dtype=jnp.bfloat16, layer_loop="scan", sharding=sharding)
    _, parameters = jit_forward(model, PAGES, XLA, sharding)
    hidden = jax.ShapeDtypeStruct((tokens, WIDE["hidden_size"]), jnp.bfloat16)
    ids, given = jax.ShapeDtypeStruct((2, tokens), jnp.int32), jax.ShapeDtypeStruct((tokens, 32), jnp.int32)
    jitted = jit_prompt_logprobs(model, block, sharding)
    memory = target.compile(jitted, parameters, hidden, ids, given, mesh=sharding.mesh).memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 6 * block * vocab * 4 < tokens * vocab * 4

    counts, packed = jax.ShapeDtypeStruct((65, vocab), jnp.int32), jax.ShapeDtypeStruct((5, rows), jnp.int32)
    logits, next_tokens = jax.ShapeDtypeStruct((rows, vocab), jnp.float32), jax.ShapeDtypeStruct((65,), jnp.int32)
    program = target.compile(jax.jit(penalize, donate_argnums=1), logits, counts, next_tokens, packed)
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= prod(counts.shape) * 4
    assert memory.temp_size_in_bytes < prod(counts.shape) * 4 / 2


@pytest.mark.parametrize("joined", [True, False])
def test_pages_are_copied_within_the_pool(target: Target, joined: bool, tiny_path: Callable[[str], Path]) -> None:
    config, layout, _ = parts(target, tiny_path, page_size=16)
    sharding = Sharding(config, target.mesh())
    pool = jax.ShapeDtypeStruct(replace(layout, joined=joined).shape, jnp.bfloat16, sharding=sharding.pool)
    copies = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    program = target.compile(jit_copies(PAGES, sharding), pool, copies, mesh=sharding.mesh)
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == prod(pool.shape) * 2
    assert memory.temp_size_in_bytes < prod(pool.shape) / 8
