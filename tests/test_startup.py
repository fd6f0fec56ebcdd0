"""What an engine is built from: limits, the size of the pool, EOS, dtype, the compilation cache."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jradix import startup
from jradix.config import EngineConfig
from tests.tiny_engine import write_dummy_model

CACHE_OPTIONS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


def build(path: Path, **options: Any) -> startup.Parts:
    defaults = {"skip_tokenizer_init": True, "load_format": "dummy", "page_size": 4, "max_total_tokens": 64}
    [parts] = startup.build(EngineConfig.from_kwargs(model_path=str(path), **(defaults | options)))
    return parts


@pytest.fixture
def one_layer(tmp_path: Path, tiny_path: Callable[[str], Path]) -> Path:
    write_dummy_model(tiny_path("llama"), tmp_path, num_hidden_layers=1)
    return tmp_path


@pytest.mark.parametrize(("tokens", "page_size", "pages"), [(64, 4, 16), (67, 4, 16), (64, 64, 1), (5, 1, 5)])
def test_max_total_tokens_is_rounded_down_to_pages_and_the_null_page_added(
    one_layer: Path, tokens: int, page_size: int, pages: int
) -> None:
    parts = build(one_layer, max_total_tokens=tokens, page_size=page_size)
    assert parts.layout.num_pages == pages + 1
    assert parts.runner.pool.shape == parts.layout.shape


def test_a_pool_sized_from_memory_is_no_larger_than_all_requests_can_use(one_layer: Path) -> None:
    parts = build(one_layer, max_total_tokens=None, max_running_requests=2, context_length=10)
    assert parts.layout.num_pages == 2 * 3 + 1


def test_a_smaller_share_of_memory_makes_a_smaller_pool(one_layer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page_bytes = build(one_layer).layout.page_bytes(2)
    monkeypatch.setattr(startup.mesh, "pool_budget_bytes", lambda fraction, devices: int(100 * page_bytes * fraction))
    sizes = [build(one_layer, max_total_tokens=None, mem_fraction_static=share) for share in (0.1, 0.5)]
    assert [parts.layout.num_pages for parts in sizes] == [10, 50]
    with pytest.raises(ValueError, match="mem_fraction_static"):
        build(one_layer, max_total_tokens=None, mem_fraction_static=0.01)


def test_the_context_is_the_models_unless_shortened(one_layer: Path) -> None:
    assert build(one_layer).context_length == 512
    assert build(one_layer, context_length=512).context_length == 512
    assert build(one_layer, context_length=20).context_length == 20
    with pytest.raises(ValueError, match="context_length must be at most 512, the model's limit, got 513"):
        build(one_layer, context_length=513)


def test_weights_and_pool_have_the_dtype_asked_for(one_layer: Path) -> None:
    for name, dtype in (("auto", jnp.bfloat16), ("bfloat16", jnp.bfloat16), ("float32", jnp.float32)):
        runner = build(one_layer, dtype=name).runner
        assert runner.pool.dtype == dtype
        assert {parameter.dtype for parameter in runner.parameters} == {jnp.dtype(dtype)}


def test_dummy_weights_follow_from_the_seed(one_layer: Path) -> None:
    first, again, other = (build(one_layer, random_seed=seed).runner.parameters for seed in (0, 0, 1))
    assert all(bool((a == b).all()) for a, b in zip(first, again, strict=True))
    assert not all(bool((a == b).all()) for a, b in zip(first, other, strict=True))


def test_eos_ids_are_the_tokenizers_or_without_one_the_configs(one_layer: Path, tiny_text_path: Path) -> None:
    assert build(one_layer).eos_ids == {2}
    parts = build(tiny_text_path, skip_tokenizer_init=False)
    assert parts.tokenizer is not None
    assert parts.eos_ids == {2}


def test_compiled_programs_are_kept_where_each_engine_asks(one_layer: Path, tmp_path: Path) -> None:
    before = {name: getattr(jax.config, name) for name in CACHE_OPTIONS}
    try:
        for directory in (tmp_path / "programs", tmp_path / "others"):
            parts = build(one_layer, compilation_cache_dir=str(directory), context_length=32, max_running_requests=1)
            parts.runner.compiled_forward(parts.buckets.decode_shape(1, 1))
            assert any(directory.iterdir())
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        reset_cache()
