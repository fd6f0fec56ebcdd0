"""Logits and greedy tokens of tiny models against those of transformers, however the tokens reach the model."""

import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jradix.model.attention import AttentionInputs
from jradix.model.checkpoint import open_checkpoint
from jradix.model.config import ModelConfig
from jradix.model.layers import linear
from jradix.model.transformer import LayerLoop, Transformer
from jradix.model.weights import abstract_transformer, load_transformer, random_transformer
from tests.model.paged_driver import PagedDriver, Row, step

TOLERANCE = 2e-4
NAMES = [
    *("gemma2", "gemma3_text", "gpt_oss"),
    *("llama", "llama3_rope", "llama_bias_yarn", "llama_linear", "llama_mqa", "mistral_head", "mistral_window"),
    *("phi3", "phi3_partial", "qwen2", "qwen2_mixed_window", "qwen2_untied", "qwen3", "qwen3_wide"),
    *("qwen3_moe", "qwen3_moe_mixed", "qwen3_moe_sparse_step"),
]


@lru_cache(maxsize=4)
def load(path: Path, layer_loop: LayerLoop) -> Transformer:
    checkpoint = open_checkpoint(path)
    config = ModelConfig.from_hf(checkpoint.config)
    return load_transformer(config, checkpoint, dtype=np.float32, layer_loop=layer_loop)


class Golden:
    """Three prompts of 57 tokens, their logits, and 16 greedy tokens after each."""

    def __init__(self, path: Path) -> None:
        with np.load(path / "expect.npz") as arrays:
            self.prompts: list[list[int]] = arrays["input_ids"].tolist()
            self.logits = arrays["logits"]
            self.greedy_ids = arrays["greedy_ids"]
            self.gaps = arrays["top2_gap"]


def new_rows(driver: PagedDriver, golden: Golden) -> list[Row]:
    return [driver.new_row(80) for _ in golden.prompts]


def check_prompts(driver: PagedDriver, golden: Golden) -> tuple[list[Row], np.ndarray]:
    """Three prompts in one extend. Returns their rows and the logits after each."""
    rows = new_rows(driver, golden)
    logits = driver.step(extend=list(zip(rows, golden.prompts, strict=True))).reshape(golden.logits.shape)
    np.testing.assert_allclose(logits, golden.logits, atol=TOLERANCE, rtol=0)
    return rows, logits[:, -1]


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, tiny_path: Callable[[str], Path]) -> None:
    golden, driver = Golden(tiny_path(name)), PagedDriver(load(tiny_path(name), "unroll"), page_size=4)
    rows, last = check_prompts(driver, golden)
    for ids, gaps in zip(golden.greedy_ids.T, golden.gaps.T, strict=True):
        clear = gaps > 2 * TOLERANCE
        np.testing.assert_array_equal(last.argmax(axis=1)[clear], ids[clear])
        # Padded to the prompts' shape, which is compiled.
        last = driver.step(extend=[(row, [token]) for row, token in zip(rows, ids.tolist(), strict=True)], pad_to=171)


@pytest.mark.parametrize("name", ["llama_bias_yarn", "gemma3_text", "qwen3_moe"])
def test_a_scan_over_layers_gives_the_same_logits(name: str, tiny_path: Callable[[str], Path]) -> None:
    check_prompts(PagedDriver(load(tiny_path(name), "scan"), page_size=4), Golden(tiny_path(name)))


@pytest.mark.parametrize(
    ("name", "page_size", "chunk"),
    [("llama", 4, 1), ("gpt_oss", 1, 16), ("gpt_oss", 16, 7), ("qwen3_moe_mixed", 16, 7)],
)
def test_a_prompt_in_chunks_gives_the_logits_of_the_whole(
    name: str, page_size: int, chunk: int, tiny_path: Callable[[str], Path]
) -> None:
    golden = Golden(tiny_path(name))
    driver = PagedDriver(load(tiny_path(name), "unroll"), page_size, num_pages=400)
    row = new_rows(driver, golden)[0]
    for start in range(0, 57, chunk):
        logits = driver.step(extend=[(row, golden.prompts[0][start : start + chunk])], pad_to=chunk)
        expected = golden.logits[0, start : start + chunk]
        np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.thorough), "gpt_oss"])
def test_decodes_and_ragged_extends_in_one_step_do_not_disturb_each_other(
    name: str, tiny_path: Callable[[str], Path]
) -> None:
    """Two rows decode while a third, part of it cached, extends by chunks of several lengths, and padding follows."""
    golden, driver = Golden(tiny_path(name)), PagedDriver(load(tiny_path(name), "scan"), page_size=4)
    first, second, third = new_rows(driver, golden)
    driver.step(extend=[(first, golden.prompts[0][:20]), (second, golden.prompts[1][:3])], pad_to=24)
    chunks = [9, 1, 4, 9]
    for done, chunk in zip(np.cumsum([0, *chunks]), chunks, strict=False):
        logits = driver.step(
            decode=[(first, golden.prompts[0][first.cached_len]), (second, golden.prompts[1][second.cached_len])],
            extend=[(third, golden.prompts[2][done : done + chunk])],
            pad_to=12,
        )
        expected = [golden.logits[0, first.cached_len - 1], golden.logits[1, second.cached_len - 1]]
        expected = np.concatenate([np.stack(expected), golden.logits[2, done : done + chunk]])
        np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0)


def decode_inputs(rows: int, pages_per_layer: int) -> AttentionInputs:
    def int32(values: object) -> jax.Array:
        return jnp.asarray(values, jnp.int32)

    return AttentionInputs(
        positions=int32([5] * rows),
        write_pages=int32([1 + row for row in range(rows)]),
        page_table=int32([[1 + row] for row in range(rows)]),
        seq_lens=int32([6] * rows),
        query_starts=int32([0]),
        pages_per_layer=pages_per_layer,
    )


@pytest.mark.parametrize("layer_loop", ["unroll", "scan"])
def test_the_pool_is_updated_in_place_and_no_weight_is_copied(
    layer_loop: LayerLoop, tiny_path: Callable[[str], Path]
) -> None:
    model = load(tiny_path("llama"), layer_loop)
    driver = PagedDriver(model, page_size=16, num_pages=64)
    ids = jnp.zeros(4, jnp.int32)
    compiled = step.lower(driver.graphdef, driver.params, ids, driver.pool, decode_inputs(4, 64), ids).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    assert memory.alias_size_in_bytes == driver.pool.nbytes
    assert memory.temp_size_in_bytes < driver.pool.nbytes / 2
    shapes = {tuple(leaf.shape) for leaf in jax.tree.leaves(driver.params) if leaf.ndim > 1} | {driver.pool.shape}
    copied = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\[([\d,]+)\]\S* copy\(", text)}
    assert not {tuple(sorted(shape)) for shape in shapes} & {tuple(sorted(shape)) for shape in copied}


def test_parameters_are_a_plain_tree_of_arrays_and_both_loops_have_the_same(tiny_path: Callable[[str], Path]) -> None:
    config = ModelConfig.from_hf(open_checkpoint(tiny_path("qwen3_moe_mixed")).config)
    models = {
        loop: random_transformer(config, dtype=jnp.bfloat16, layer_loop=loop, seed=3) for loop in ("unroll", "scan")
    }
    for model in models.values():
        leaves = jax.tree.leaves(nnx.split(model)[1])
        assert all(isinstance(leaf, jax.Array) and leaf.dtype == jnp.bfloat16 for leaf in leaves)
    assert [len(model.blocks) for model in models.values()] == [3, 3]
    for pair in zip(*(jax.tree.leaves(nnx.split(model)[1]) for model in models.values()), strict=True):
        np.testing.assert_array_equal(*pair)


def test_a_scan_stacks_equal_layers_in_as_few_blocks_as_their_pattern_allows(tiny_path: Callable[[str], Path]) -> None:
    def groups(name: str, **fields: object) -> tuple[tuple[range, ...], ...]:
        config = ModelConfig.from_hf(open_checkpoint(tiny_path(name)).config | fields)
        return abstract_transformer(config, dtype=np.float32, layer_loop="scan").layer_groups

    assert groups("llama") == ((range(3),),)
    assert groups("qwen2_mixed_window") == ((range(1),), (range(1, 4),))
    assert groups("qwen3_moe_mixed") == ((range(1),), (range(1, 2),), (range(2, 3),))
    assert groups("gpt_oss") == ((range(0, 4, 2), range(1, 4, 2)),)
    assert groups("gemma2", num_hidden_layers=5, layer_types=None) == ((range(1),), (range(1, 5, 2), range(2, 5, 2)))
    assert groups("gemma3_text") == ((range(5),), (range(5, 6),), (range(6, 7),))
    sixes = tuple(range(place, 30, 6) for place in range(6))
    assert groups("gemma3_text", num_hidden_layers=34, layer_types=None) == (sixes, (range(30, 34),))
    assert load(tiny_path("llama"), "unroll").layer_groups == ((range(1),), (range(1, 2),), (range(2, 3),))


def test_logits_at_chooses_tokens_and_clamps(tiny_path: Callable[[str], Path]) -> None:
    driver = PagedDriver(load(tiny_path("llama"), "unroll"), page_size=16, num_pages=64)
    ids, inputs = jnp.arange(4, dtype=jnp.int32), decode_inputs(4, 64)
    at = jnp.asarray([3, 0, 99, -5], jnp.int32)
    logits, pool = step(driver.graphdef, driver.params, ids, jnp.zeros_like(driver.pool), inputs, at)
    every, _ = step(driver.graphdef, driver.params, ids, pool, inputs, ids)
    np.testing.assert_allclose(logits, every[jnp.asarray([3, 0, 3, 0])], atol=1e-6)


def test_a_lone_bfloat16_row_is_never_multiplied_alone() -> None:
    weight = jnp.asarray(np.random.default_rng(0).standard_normal((6, 5, 8)), jnp.bfloat16)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((3, 8)), jnp.bfloat16)
    np.testing.assert_array_equal(linear(x[:1], weight), linear(x, weight)[:1])
    lowered = jax.jit(linear).lower(x[:1], weight).as_text()
    assert re.findall(r"dot_general.*: \((.*)\) ->", lowered) == ["tensor<30x8xbf16>, tensor<2x8xbf16>"]
