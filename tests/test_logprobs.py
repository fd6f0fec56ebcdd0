"""Log-probabilities against float64, bit-equal in any batch; and prompts, whose logits never exist together."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jradix.logprobs import LOGPROB_WIDTHS, Logprobs, logprob_width, logprobs, prompt_logprobs

jitted = jax.jit(logprobs)
DIFFICULT = ["usual", "flat", "peaked", "ties", "equal", "huge"]


def rows_of(kind: str, rows: int, vocab: int) -> np.ndarray:
    rng = np.random.default_rng([len(kind), rows, vocab])
    return {
        "usual": rng.normal(size=(rows, vocab)) * 3,
        "flat": rng.normal(size=(rows, vocab)) * 0.1,
        "peaked": rng.normal(size=(rows, vocab)) + 25.0 * (np.arange(vocab) == 3),
        "ties": np.round(rng.normal(size=(rows, vocab)) * 1.5),
        "equal": np.zeros((rows, vocab)),
        "huge": rng.normal(size=(rows, vocab)) * 1e4,
    }[kind].astype(np.float32)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def some_ids(rows: int, vocab: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(vocab)
    given = rng.integers(0, vocab, (rows, width)).astype(np.int32)
    given[:, width // 2 :] = -1
    return rng.integers(0, vocab, rows).astype(np.int32), given


@pytest.mark.parametrize("vocab", [20, 320, 5000])
@pytest.mark.parametrize("kind", DIFFICULT)
def test_log_probabilities_agree_with_float64(kind: str, vocab: int) -> None:
    logits, width = rows_of(kind, 6, vocab), 32
    ids, given = some_ids(6, vocab, width)
    found = jax.tree.map(np.asarray, jitted(logits, ids, given))
    want = log_softmax(logits)
    order = np.argsort(-logits, axis=-1, kind="stable")
    top = min(width, vocab)
    assert_close = partial(np.testing.assert_allclose, rtol=1e-6, atol=2e-6)
    assert_close(found.chosen, want[np.arange(6), ids])
    np.testing.assert_array_equal(found.rank, [order[row].tolist().index(ids[row]) + 1 for row in range(6)])
    np.testing.assert_array_equal(found.top_ids[:, :top], order[:, :top])
    assert_close(found.top[:, :top], np.take_along_axis(want, order[:, :top], 1))
    assert (found.top_ids[:, top:] == -1).all()
    assert np.isneginf(found.top[:, top:]).all()
    assert_close(found.given[:, :16], np.take_along_axis(want, given[:, :16], 1))
    assert np.isneginf(found.given[:, 16:]).all()


@pytest.mark.parametrize("kind", ["usual", "flat", "peaked"])
def test_the_long_tail_of_a_large_vocabulary_is_not_lost(kind: str) -> None:
    logits = rows_of(kind, 2, 151_936)
    if kind == "peaked":
        logits[:, 3] = 19.0  # the others weigh 1e-9 each: a thousandth together
    ids = np.array([3, 77_777], np.int32)
    found = jitted(logits, ids, np.zeros((2, 0), np.int32))
    np.testing.assert_allclose(found.chosen, log_softmax(logits)[[0, 1], ids], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("vocab", [320, 5000])
@pytest.mark.parametrize("width", [0, 32])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(vocab: int, width: int) -> None:
    logits = np.concatenate([rows_of(kind, 8, vocab) for kind in DIFFICULT])
    ids, given = some_ids(48, vocab, width)

    def bits(part: slice) -> np.ndarray:
        return np.asarray(jitted(logits[part], ids[part], given[part]).packed())

    together = bits(slice(None))
    for size in (1, 3, 16):
        alone = np.concatenate([bits(slice(first, first + size)) for first in range(0, 48, size)])
        assert (alone == together).all(), size


def test_poisoned_logits_are_minus_infinity_or_the_largest_and_harm_no_other_row() -> None:
    logits = rows_of("usual", 5, 300)
    ids, given = some_ids(5, 300, 8)
    clean = np.asarray(jitted(logits, ids, given).packed())
    poisoned = logits.copy()
    poisoned[0], poisoned[1, 1::2], poisoned[2, 7], poisoned[3] = np.nan, np.nan, np.inf, -np.inf
    found = jitted(poisoned, ids, given)
    assert not any(np.isnan(part).any() for part in (found.chosen, found.top, found.given))
    assert np.isneginf(found.chosen[jnp.array([0, 3])]).all()
    want = log_softmax(logits[1, ::2])
    np.testing.assert_allclose(found.top[1], np.sort(want)[::-1][:8], atol=2e-6)
    assert found.top_ids[2, 0] == 7
    assert found.top[2, 0] == 0
    assert (found.top[2, 1:] < -1e38).all()
    assert (np.asarray(found.packed())[4] == clean[4]).all()


@pytest.mark.parametrize("width", LOGPROB_WIDTHS)
def test_packed_numbers_come_back_as_they_were(width: int) -> None:
    result = jitted(rows_of("usual", 3, 200), *some_ids(3, 200, width))
    unpacked = Logprobs.unpack(np.asarray(jax.jit(Logprobs.packed)(result)))
    for got, want in zip(unpacked, result, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def test_the_width_holds_top_and_given_and_is_never_more_than_it_must_be() -> None:
    pairs = [(0, 0), (1, 0), (0, 32), (33, 2), (2, 128), (128, 128)]
    assert [logprob_width(*pair) for pair in pairs] == [0, 32, 32, 128, 128, 128]


def head_of(hidden_size: int, vocab: int) -> Callable[[jax.Array], jax.Array]:
    weight = np.random.default_rng(1).normal(size=(vocab, hidden_size)).astype(np.float32)
    return lambda hidden: jnp.dot(hidden, weight.T, precision="highest")


@pytest.mark.parametrize(("count", "width"), [(0, 0), (1, 8), (16, 8), (37, 0), (64, 8)])
def test_prompt_tokens_in_blocks_have_the_log_probabilities_of_the_whole(count: int, width: int) -> None:
    hidden = np.random.default_rng(0).normal(size=(64, 12)).astype(np.float32)
    hidden[count:] = np.nan  # padding
    head = head_of(12, 300)
    targets, given = some_ids(64, 300, width)
    targets[count:] = -1
    run = jax.jit(partial(prompt_logprobs, logits_of=head, block=16))
    found = Logprobs.unpack(np.asarray(run(hidden, targets, given)))
    whole = Logprobs.unpack(np.asarray(jitted(head(jnp.asarray(hidden)), jnp.maximum(targets, 0), given).packed()))
    for got, want in zip(found, whole, strict=True):
        np.testing.assert_allclose(got[:count], want[:count], atol=1e-5)


def test_a_prompt_needs_the_memory_of_one_block_of_logits() -> None:
    tokens, vocab, block = 1024, 8000, 64
    shapes = (
        jax.ShapeDtypeStruct((tokens, 32), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
        jax.ShapeDtypeStruct((tokens, 32), jnp.int32),
    )
    weight = jax.ShapeDtypeStruct((vocab, 32), jnp.float32)

    def run(weight: jax.Array, hidden: jax.Array, targets: jax.Array, given: jax.Array) -> jax.Array:
        return prompt_logprobs(hidden, targets, given, lambda part: part @ weight.T, block=block)

    memory = jax.jit(run).lower(weight, *shapes).compile().memory_analysis()
    assert memory is not None
    one_block = block * vocab * 4
    assert memory.temp_size_in_bytes < 6 * one_block < tokens * vocab * 4 / 2
