"""Whole models on the Pallas kernels, interpreted: the steps that a TPU or a GPU would run, against known logits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from jradix.model.checkpoint import open_checkpoint
from jradix.model.config import ModelConfig
from jradix.model.transformer import Transformer
from jradix.model.weights import load_transformer
from jradix.pallas.ops import XLA, Kernels
from tests.model.paged_driver import PagedDriver
from tests.model.test_transformer import TOLERANCE, Golden

TPU = Kernels("tpu", "v6e", joined_pages=True, interpret=pltpu.InterpretParams())
GPU = Kernels("gpu", "9.0", interpret=plgpu.InterpretGPUParams())


def load(path: Path, dtype: Any) -> Transformer:
    checkpoint = open_checkpoint(path)
    config = ModelConfig.from_hf(checkpoint.config)
    return load_transformer(config, checkpoint, dtype=jnp.dtype(dtype), layer_loop="scan")


def mixed_steps(driver: PagedDriver, golden: Golden) -> np.ndarray:
    """Logits of a step of two prompts, then of one that decodes two rows while a third prompt's first chunk is read."""
    first, second, third = (driver.new_row(80) for _ in golden.prompts)
    one = driver.step(extend=[(first, golden.prompts[0][:40]), (second, golden.prompts[1][:17])], pad_to=64)
    decode = [(first, golden.prompts[0][40]), (second, golden.prompts[1][17])]
    two = driver.step(decode=decode, extend=[(third, golden.prompts[2][:20])], pad_to=24)
    return np.concatenate([one, two])


def expected(golden: Golden) -> np.ndarray:
    logits = golden.logits
    return np.concatenate([logits[0, :40], logits[1, :17], logits[0, 40:41], logits[1, 17:18], logits[2, :20]])


@pytest.mark.parametrize("name", ["mistral_window", pytest.param("qwen3_wide", marks=pytest.mark.thorough)])
def test_the_tpu_kernels_give_the_logits_of_transformers(name: str, tiny_path: Callable[[str], Path]) -> None:
    golden = Golden(tiny_path(name))
    driver = PagedDriver(load(tiny_path(name), np.float32), page_size=16, num_pages=32, kernels=TPU)
    np.testing.assert_allclose(mixed_steps(driver, golden), expected(golden), atol=TOLERANCE, rtol=0)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # keys of NaN, masked afterwards
def test_the_gpu_kernels_stray_no_further_than_the_xla_path(tiny_path: Callable[[str], Path]) -> None:
    """They take no float32, so both round to bfloat16, each in its own way."""
    golden, model = Golden(tiny_path("mistral_window")), load(tiny_path("mistral_window"), jnp.bfloat16)

    def mean_error(kernels: Kernels) -> float:
        driver = PagedDriver(model, page_size=16, num_pages=32, kernels=kernels)
        return float(np.abs(mixed_steps(driver, golden) - expected(golden)).mean())

    assert mean_error(GPU) < 1.1 * mean_error(XLA) < 0.05
