"""One model on several devices: the tokens of one device, two sums a layer, and each device's share of the bytes."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jradix import Engine
from jradix.aot import collectives, copied_shapes
from jradix.batch import StepArrays, packed_len
from jradix.cache.pool import allocate_pool
from jradix.config import StepShape
from jradix.jitted import jit_forward
from jradix.mesh import tensor_mesh
from jradix.model.checkpoint import open_checkpoint
from jradix.model.config import ModelConfig
from jradix.model.sharding import Sharding
from jradix.model.weights import load_transformer, random_transformer
from jradix.pallas.layout import KVLayout
from jradix.pallas.ops import XLA
from tests.cache.paged_text import known_pages
from tests.tiny_engine import Golden, greedy, output_ids, prompts_with_shared_prefixes, restore, sampled, start

QUICKLY: dict[str, Any] = {"xla_backend_optimization_level": 0}
PAGE_SIZE = 4


def all_logits(path: Path, devices: int, rows: list[list[int]]) -> np.ndarray:
    """Logits `[rows, tokens, vocab]` of rows of equal length, by the forward pass of a step, on so many devices."""
    checkpoint = open_checkpoint(path)
    config = ModelConfig.from_hf(checkpoint.config)
    sharding = Sharding(config, tensor_mesh(devices))
    model = load_transformer(config, checkpoint, dtype=np.float32, layer_loop="scan", sharding=sharding)
    length, count = len(rows[0]), len(rows)
    pages = -(-length // PAGE_SIZE)
    layout = KVLayout(config.layers, 1 + count * pages, PAGE_SIZE, sharding.heads.slots, config.head_dim)
    shape = StepShape(0, length * count, count, pages)
    forward, parameters = jit_forward(model, layout.num_pages, XLA, sharding)

    arrays = np.zeros(packed_len(shape), np.int32)
    step: Any = StepArrays.unpack(arrays, shape, layout.num_pages)
    step.token_ids[:] = np.concatenate(rows)
    step.attention.positions[:] = np.tile(np.arange(length), count)
    step.attention.page_table[:] = 1 + np.arange(count * pages).reshape(count, pages)
    step.attention.write_pages[:] = np.concatenate(step.attention.page_table.repeat(PAGE_SIZE, axis=1)[:, :length])
    step.attention.seq_lens[:] = length
    step.attention.query_starts[:] = np.arange(count + 1) * length
    pool = allocate_pool(layout, jnp.dtype(jnp.float32), sharding.pool)
    next_tokens = jnp.zeros(2, jnp.int32, device=sharding.replicated)
    args = (parameters, pool, next_tokens, arrays)
    _, hidden, _, pool = forward.lower(*args, shape).compile(QUICKLY)(*args)
    assert pool.sharding == sharding.pool
    return np.asarray(jax.jit(model.logits)(hidden)).reshape(count, length, -1)


CASES = [
    pytest.param("llama", 2, marks=pytest.mark.thorough),
    ("llama_mqa", 8),  # one KV head in four places, and four that are empty
    pytest.param("qwen3_wide", 4, marks=pytest.mark.thorough),  # three KV heads in four places
    ("qwen3_wide", 8),  # each in two places, and two that are empty
    ("qwen2", 4),  # biases; two KV heads in two places each
    ("phi3", 2),  # all of q, k and v in one tensor, and gate and up in another
    ("qwen3_moe_mixed", 4),
    ("gemma2", 2),
    ("gpt_oss", 8),  # sinks, biases of experts, one tensor of all experts
]


@pytest.mark.parametrize(("name", "devices"), CASES)
def test_a_tiny_model_on_several_devices_gives_the_logits_and_tokens_of_transformers(
    name: str, devices: int, tiny_path: Callable[[str], Path]
) -> None:
    """The prompt and the greedy tokens in one step: each token must be the likeliest after those before it."""
    golden = Golden(tiny_path(name))
    rows = [[*prompt, *ids[:-1]] for prompt, ids in zip(golden.prompts, golden.greedy_ids, strict=True)]
    logits = all_logits(tiny_path(name), devices, rows)
    prompt_len = len(golden.prompts[0])
    np.testing.assert_allclose(logits[:, :prompt_len], golden.logits[:, :prompt_len], atol=2e-4, rtol=1e-4)
    assert logits[:, prompt_len - 1 :].argmax(-1).tolist() == golden.greedy_ids


@pytest.fixture(scope="module")
def on_eight(tiny_text_path: Path) -> Iterator[Engine]:
    """The tiny llama on 8 devices, with so few pages that requests beside each other are retracted."""
    with start(tiny_text_path, skip_tokenizer_init=False, max_total_tokens=96, tp_size=8) as engine:
        yield engine


def test_an_engine_on_eight_devices_answers_like_one_on_one_device(on_eight: Engine, tiny_engine: Engine) -> None:
    """Cold, cached, retracted, with copied pages, and with everything a request may ask of its logits."""
    prompts = prompts_with_shared_prefixes(12, 320, seed=5)
    expected = output_ids(tiny_engine, prompts)
    assert output_ids(on_eight, prompts) == expected
    assert output_ids(on_eight, prompts) == expected, "on top of what is cached"
    assert on_eight.get_server_info()["num_retractions"] > 0
    asked: list[dict[str, Any]] = [
        {"top_k": 5},
        {"top_p": 0.9},
        {"frequency_penalty": 1.0, "repetition_penalty": 1.3, "logit_bias": {7: 3.0, 300: 2.0}, "min_p": 0.01},
    ]
    for fields in asked:
        params = sampled(**fields)
        assert output_ids(on_eight, prompts[:3], params) == output_ids(tiny_engine, prompts[:3], params), fields
    options: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3}
    [ours, theirs] = (
        engine.generate(input_ids=prompts[0], sampling_params=greedy(4), **options)["meta_info"]
        for engine in (on_eight, tiny_engine)
    )
    for key in ("input_token_logprobs", "output_token_logprobs"):
        [mine, other] = ([entry[:2] for entry in info[key]] for info in (ours, theirs))
        assert [entry[1] for entry in mine] == [entry[1] for entry in other]
        np.testing.assert_allclose([e[0] or 0 for e in mine], [e[0] or 0 for e in other], atol=1e-4)
    on_eight.check_idle()


def test_an_engine_on_eight_devices_answers_without_a_cache(on_eight: Engine, tiny_engine: Engine) -> None:
    prompts = prompts_with_shared_prefixes(3, 320, seed=6)
    expected = output_ids(tiny_engine, prompts)
    with on_eight.hold() as core:
        config, core.config = core.config, replace(core.config, disable_radix_cache=True)
        core._start_afresh()
    for _ in range(2):
        results = on_eight.generate(input_ids=prompts, sampling_params=greedy())
        assert [result["output_ids"] for result in results] == expected
        assert [result["meta_info"]["cached_tokens"] for result in results] == [0] * len(prompts)
    on_eight.check_idle()
    with on_eight.hold() as core:
        core.config = config
        core._start_afresh()


def test_a_snapshot_of_one_device_is_restored_on_eight_and_back(
    on_eight: Engine, tiny_engine: Engine, tmp_path: Path
) -> None:
    """Where each KV head has two places, and four places are empty."""
    prompts = [prompt[:16] for prompt in prompts_with_shared_prefixes(5, 320, seed=8)]

    def answers(engine: Engine) -> list[tuple[list[int], int]]:
        results = [engine.generate(input_ids=prompt, sampling_params=greedy(3)) for prompt in prompts]
        return [(result["output_ids"], result["meta_info"]["cached_tokens"]) for result in results]

    first = answers(tiny_engine)
    pages = known_pages(tiny_engine.cache)
    assert len(pages) <= on_eight.cache.num_total
    tiny_engine.save_cache(tmp_path)
    again = answers(tiny_engine)
    assert again != first
    restore(on_eight, tmp_path)
    assert known_pages(on_eight.cache) == pages
    assert answers(on_eight) == again
    on_eight.save_cache(tmp_path)
    restore(tiny_engine, tmp_path)
    assert answers(tiny_engine) == again
    on_eight.check_idle()


def test_each_device_holds_its_share(on_eight: Engine, tiny_engine: Engine) -> None:
    """The tiny llama has 2 KV heads of 2 query heads: two slots each, and so four of the eight slots are empty."""
    runner, one = on_eight.runner, tiny_engine.runner
    config, layout = on_eight.model_config, runner._layout
    assert (layout.kv_heads, runner.sharding.heads.copies) == (8, 2)
    page = 2 * config.head_dim * layout.page_size * 4
    assert runner.pool_bytes_per_device == config.layers * layout.num_pages * page
    held = dict.fromkeys(jax.devices()[:8], 0)
    for array in runner.parameters:
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    assert set(held.values()) == {runner.weight_bytes_per_device}
    hidden, head_dim, vocab, mlp = config.hidden_size, config.head_dim, config.vocab_size, config.mlp_size
    layer = 2 * hidden + (1 + 2) * head_dim * hidden + hidden * head_dim + 3 * hidden * mlp // 8
    tables = (1 if config.tie_word_embeddings else 2) * vocab * hidden // 8
    assert runner.weight_bytes_per_device == 4 * (config.layers * layer + tables + hidden)
    info = on_eight.get_server_info()
    assert info["tp_size"] == 8
    assert info["weight_bytes_per_device"] == runner.weight_bytes_per_device < one.weight_bytes_per_device / 3
    assert info["pool_bytes_per_device"] == sum(s.data.nbytes for s in runner.pool.addressable_shards) // 8


def test_steps_send_two_sums_a_layer_and_copy_nothing(tiny_path: Callable[[str], Path]) -> None:
    """And the sum of the embedding; the layers of the tiny llama are one scan, whose body is in the text once."""
    with start(tiny_path("llama"), optimized=True, tp_size=4, max_total_tokens=2**16) as engine:
        runner = engine.runner
        for shape in (StepShape(4, 0, 0, 24), StepShape(4, 16, 2, 24)):
            program = runner.compiled_forward(shape)
            assert collectives(program) == {"all-reduce": 3}
            memory = program.memory_analysis()
            assert memory is not None
            assert memory.alias_size_in_bytes == runner.pool_bytes_per_device
            assert memory.temp_size_in_bytes < runner.pool_bytes_per_device / 8
            assert all(prod(shape) < runner.pool.size / 4 / 8 for shape in copied_shapes(program))
        copies = np.zeros((2, runner.max_copies), np.int32)
        runner.copy_pages(copies)
        program = runner.programs.compiled[("copy of pages",)]
        assert not collectives(program)
        memory = program.memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes == runner.pool_bytes_per_device


def test_samplers_send_numbers_of_rows_and_no_vocabulary(on_eight: Engine) -> None:
    runner, rows, vocab = on_eight.runner, 4, on_eight.model_config.vocab_size
    logits, slots = runner.features.logits(rows), jax.ShapeDtypeStruct((rows,), jnp.int32)
    program = runner._sample.lower(logits, runner._next_tokens, slots, None).compile()
    assert collectives(program) == {"all-reduce": 2}, "the largest logit, and the smallest id that has it"
    assert set(re.findall(r"= \w+\[([\d,]*)\]\S* all-reduce\(", program.as_text() or "")) == {str(rows)}
    bias = jax.ShapeDtypeStruct((2, rows, 8), jnp.int32)
    assert not collectives(runner.features.add_bias.lower(logits, bias).compile())
    packed = jax.ShapeDtypeStruct((5, rows), jnp.int32)
    penalties = runner.features.penalize.lower(
        logits, runner.features.counts_shape, runner._next_tokens, packed
    ).compile()
    assert not collectives(penalties)
    memory = penalties.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= prod(runner.features.counts_shape.shape) * 4 // 8
    assert vocab % 8 == 0


def test_other_weights_take_the_place_of_all_shards(on_eight: Engine, tiny_engine: Engine, tiny_path: Any) -> None:
    before = [np.asarray(array) for array in on_eight.runner.parameters]
    config = on_eight.model_config
    other = random_transformer(config, dtype=np.float32, layer_loop="scan", seed=1, sharding=on_eight.runner.sharding)
    wanted = jax.tree.leaves(nnx.state(other))
    checkpoint = open_checkpoint(tiny_path("llama"))
    on_eight.update_weights({name: np.array(checkpoint.read(name)) * 0 for name in checkpoint.names()})
    assert not any(np.asarray(array).any() for array in on_eight.runner.parameters)
    assert [array.sharding for array in on_eight.runner.parameters] == [array.sharding for array in wanted]
    on_eight.update_weights(str(tiny_path("llama")))
    for array, old in zip(on_eight.runner.parameters, before, strict=True):
        np.testing.assert_array_equal(array, old)


@pytest.mark.parametrize("name", ["llama_mqa", "qwen3_moe_mixed", "gpt_oss"])
def test_dummy_weights_are_one_model_on_any_number_of_devices(name: str, tiny_path: Callable[[str], Path]) -> None:
    """But for padding, and for keys and values, of which there may be several copies."""
    config = ModelConfig.from_hf(open_checkpoint(tiny_path(name)).config)
    make = partial(random_transformer, config, dtype=np.float32, layer_loop="unroll", seed=0)
    [one, many] = (make(sharding=Sharding(config, tensor_mesh(devices))) for devices in (1, 8))
    for block, split in zip(one.blocks, many.blocks, strict=True):
        for pick in (lambda b: b.attention.qkv[...][:, :-2], lambda b: b.attention.o[...], lambda b: b.mlp.down[...]):
            ours, theirs = (np.sort(np.asarray(pick(b)), axis=None) for b in (block, split))
            np.testing.assert_array_equal(ours[ours != 0], theirs[theirs != 0])


def test_too_few_devices_are_named(tiny_path: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match=r"tp_size must be at most 8, the number of devices here, got 16"):
        start(tiny_path("llama"), tp_size=16)
