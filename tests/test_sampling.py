"""Sampling against an oracle that sorts, in numpy; and what a row may never depend on: its neighbours."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jradix.sampling import HEAD_SIZE, SamplingArrays, sample

jitted_sample = jax.jit(sample, static_argnames="greedy_only")
draw = partial(jitted_sample, greedy_only=False)


def arrays(rows: int, suppress: Any = (), **given: Any) -> SamplingArrays:
    """Parameters of `rows` rows; scalars are repeated, and seeds count up unless given."""
    values = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "seed": np.arange(rows), "position": 0}
    dtypes = {"top_k": jnp.int32, "seed": jnp.uint32, "position": jnp.int32}
    columns = {
        name: jnp.broadcast_to(jnp.asarray(value, dtypes.get(name, jnp.float32)), (rows,))
        for name, value in (values | given).items()
    }
    return SamplingArrays(
        suppress_ids=jnp.broadcast_to(jnp.asarray(suppress, jnp.int32), (rows, len(suppress))), **columns
    )


def kept_probabilities(logits, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0):
    """The oracle: the probability of every id of one row, by a stable sort in float64."""
    logits = np.asarray(logits, np.float64)
    order = np.argsort(-logits, kind="stable")
    scaled = (logits[order] - logits.max()) / temperature
    probabilities = np.exp(scaled) / np.exp(scaled).sum()
    if 0 < top_k < len(logits):
        probabilities[top_k:] = 0
        probabilities /= probabilities.sum()
    # one part in 1e6 is forgiven: the sampler adds up in float32
    probabilities[np.cumsum(probabilities) - probabilities >= top_p * (1 + 1e-6)] = 0
    probabilities[probabilities < min_p * probabilities[0] * (1 - 1e-6)] = 0
    result = np.zeros_like(probabilities)
    result[order] = probabilities / probabilities.sum()
    return result


def peaked_and_flat_logits(kind, vocab):
    rng = np.random.default_rng([len(kind), vocab])
    return {
        "flat": rng.normal(size=vocab) * 0.3,
        "usual": rng.normal(size=vocab) * 2.0,
        "peaked": rng.normal(size=vocab) + 9.0 * (np.arange(vocab) % 50 == 3),
        "ties": np.round(rng.normal(size=vocab) * 1.5),
        "equal": np.zeros(vocab),
    }[kind].astype(np.float32)


FILTERS = [
    {},
    {"temperature": 0.6},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": HEAD_SIZE},
    {"top_k": HEAD_SIZE + 1},
    {"top_k": 150},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 100, "top_p": 0.705},
    {"top_k": 12, "top_p": 0.8, "min_p": 0.05, "temperature": 1.4},
    {"top_k": 160, "top_p": 0.95, "min_p": 0.2},
]


@pytest.mark.parametrize("kind", ["flat", "usual", "peaked", "ties", "equal"])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_frequencies_agree_with_the_sorting_oracle(kind, filters):
    """A chi-square test of 2000 fixed seeds, and no draw at all outside the kept prefix."""
    logits = peaked_and_flat_logits(kind, 211)
    ids = np.asarray(draw(jnp.tile(logits, (2000, 1)), arrays(2000, **filters)))
    expected = kept_probabilities(logits, **filters) * len(ids)
    counts = np.bincount(ids, minlength=len(logits))
    assert not counts[expected == 0].any(), np.flatnonzero((expected == 0) & (counts > 0))
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(wanted) > 1:
        assert stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-4


@pytest.mark.parametrize("vocab", [1, 65, 5000])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_every_draw_lies_in_the_kept_prefix_at_any_vocabulary_size(vocab, filters):
    rng = np.random.default_rng(vocab)
    scale = rng.choice([0.1, 1.0, 3.0, 10.0], size=(12, 1))
    logits = (rng.normal(size=(12, vocab)) * scale).astype(np.float32)
    logits[::2] = np.round(logits[::2])
    ids = np.asarray(draw(jnp.asarray(logits), arrays(12, **filters)))
    for row in range(12):
        assert kept_probabilities(logits[row], **filters)[ids[row]] > 0


def test_a_single_kept_token_is_the_greedy_one_also_among_ties():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(np.round(rng.normal(size=(64, 3000)) * 2), jnp.float32)
    greedy = np.argmax(np.asarray(logits), axis=-1)
    assert (jitted_sample(logits, arrays(64, temperature=0.0), greedy_only=True) == greedy).all()
    for filters in ({"temperature": 0.0}, {"temperature": 9e-7}, {"top_k": 1}, {"top_p": 1e-9}, {"top_p": 1e-30}):
        assert (np.asarray(draw(logits, arrays(64, **filters))) == greedy).all(), filters


@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 0.01])
def test_a_tiny_temperature_takes_the_largest_logit_without_overflow(temperature):
    logits = np.random.default_rng(0).normal(size=(64, 500)).astype(np.float32) * 50
    ids = np.asarray(draw(jnp.asarray(logits), arrays(64, temperature=temperature)))
    assert (ids == logits.argmax(-1)).mean() > 0.95


def test_default_parameters_sample_and_a_huge_temperature_is_uniform():
    logits = jnp.zeros((200, 1000))
    assert len(set(np.asarray(draw(logits, arrays(200))).tolist())) > 150
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1000)) * 10, jnp.float32)
    assert len(set(np.asarray(draw(jnp.tile(logits, (200, 1)), arrays(200, temperature=1e30))).tolist())) > 150


@pytest.mark.parametrize("top_k", [-1, 0, 50, 51, 2**31 - 1])
def test_top_k_without_a_limit_keeps_everything(top_k):
    logits = jnp.zeros((2000, 50))
    assert len(set(np.asarray(draw(logits, arrays(2000, top_k=top_k))).tolist())) == 50


def test_equal_logits_at_the_cut_are_kept_by_smallest_id():
    logits = np.zeros((1, 300), np.float32)
    logits[0, [7, 100, 250]] = 1.0
    for top_k, tied in ((10, 7), (100, 97)):  # inside and outside the head
        allowed = {7, 100, 250, *[i for i in range(300) if i not in (7, 100, 250)][:tied]}
        ids = set(np.asarray(draw(jnp.tile(logits, (6000, 1)), arrays(6000, top_k=top_k))).tolist())
        assert ids == allowed


# Rows that differ in everything: what a batch of strangers looks like.


def strangers(rows, vocab, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, vocab)) * rng.choice([0.2, 1.0, 4.0], size=(rows, 1))
    logits[1::3] = np.round(logits[1::3] * 2) / 2
    params = SamplingArrays(
        temperature=jnp.asarray(rng.choice([0.0, 0.5, 1.0, 1.7], size=rows), jnp.float32),
        top_k=jnp.asarray(rng.choice([-1, 1, 20, 64, 65, 500], size=rows), jnp.int32),
        top_p=jnp.asarray(rng.choice([1.0, 0.95, 0.5], size=rows), jnp.float32),
        min_p=jnp.asarray(rng.choice([0.0, 0.0, 0.1], size=rows), jnp.float32),
        seed=jnp.asarray(rng.integers(2**32, size=rows), jnp.uint32),
        position=jnp.asarray(rng.integers(8192, size=rows), jnp.int32),
        suppress_ids=jnp.asarray(rng.integers(-1, vocab + 3, size=(rows, 3)), jnp.int32),
    )
    return jnp.asarray(logits, jnp.float32), params


def take(tree, index):
    return jax.tree.map(lambda array: array[jnp.asarray(index)], tree)


def test_a_row_does_not_depend_on_its_place_its_neighbours_or_their_number():
    logits, params = strangers(48, 5000)
    together = np.asarray(draw(logits, params))
    assert len(set(together.tolist())) > 20
    order = np.random.default_rng(1).permutation(48)
    assert (np.asarray(draw(logits[order], take(params, order))) == together[order]).all()
    for size in (1, 3, 16):
        parts = [list(range(first, first + size)) for first in range(0, 48, size)]
        alone = [np.asarray(draw(logits[jnp.asarray(part)], take(params, part))) for part in parts]
        assert (np.concatenate(alone) == together).all(), size


def test_randomness_comes_from_seed_and_position_alone():
    logits = jnp.tile(jnp.asarray(np.random.default_rng(0).normal(size=(1, 400)), jnp.float32), (64, 1))
    same = np.asarray(draw(logits, arrays(64, seed=5, position=9)))
    assert len(set(same.tolist())) == 1
    by_position = np.asarray(draw(logits, arrays(64, seed=5, position=np.arange(64))))
    by_seed = np.asarray(draw(logits, arrays(64, seed=np.arange(64), position=9)))
    assert by_position[9] == same[0] == by_seed[5]
    assert len(set(by_position.tolist())) > 30
    assert len(set(by_seed.tolist())) > 30
    assert (by_position != by_seed).mean() > 0.9


def test_seeds_use_all_32_bits():
    logits = jnp.zeros((4, 5000))
    ids = np.asarray(draw(logits, arrays(4, seed=np.array([0, 1, 2**31, 2**32 - 1], np.uint32))))
    assert len(set(ids.tolist())) == 4


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_poisoned_row_changes_no_other_row_and_yields_an_id(poison):
    logits, params = strangers(12, 3000)
    clean = np.asarray(draw(logits, params))
    greedy = np.asarray(jitted_sample(logits, params, greedy_only=True))
    poisoned = logits.at[4].set(poison).at[7, 100:].set(poison)
    others = [row for row in range(12) if row not in (4, 7)]
    for ids, expected in (
        (np.asarray(draw(poisoned, params)), clean),
        (np.asarray(jitted_sample(poisoned, params, greedy_only=True)), greedy),
    ):
        assert (ids[others] == expected[others]).all()
        assert ((ids >= 0) & (ids < 3000)).all()
    for filters in ({}, {"top_k": 3}, {"top_k": 500, "top_p": 0.5}, {"min_p": 0.5}):
        ids = np.asarray(draw(jnp.full((4, 3000), poison), arrays(4, **filters)))
        assert ((ids >= 0) & (ids < 3000)).all()


def test_nan_logits_are_never_chosen():
    logits = np.random.default_rng(0).normal(size=(64, 300)).astype(np.float32)
    logits[:, ::2] = np.nan
    for filters in ({"temperature": 0.0}, {}, {"top_k": 20}, {"top_p": 0.99}):
        assert (np.asarray(draw(jnp.asarray(logits), arrays(64, **filters))) % 2 == 1).all()


def test_suppressed_ids_are_never_sampled_and_padding_ids_suppress_nothing():
    logits = jnp.zeros((500, 6)).at[:, 5].set(30.0).at[:, 0].set(20.0)
    for greedy_only in (True, False):
        ids = jitted_sample(
            logits, arrays(500, temperature=0.0, suppress=(5, -1, 6, 2**31 - 1)), greedy_only=greedy_only
        )
        assert (np.asarray(ids) == 0).all()
    ids = np.asarray(draw(logits, arrays(500, suppress=(5, 0, -1, 99))))
    assert set(ids.tolist()) == {1, 2, 3, 4}
    assert (np.asarray(draw(logits, arrays(500, temperature=0.0, suppress=(-1, -5)))) == 5).all()


def test_rows_suppress_their_own_ids_only():
    logits = jnp.tile(jnp.asarray([[3.0, 2.0, 1.0, 0.0]]), (3, 1))
    params = arrays(3, temperature=0.0)._replace(suppress_ids=jnp.asarray([[0, 1], [-1, -1], [0, -1]], jnp.int32))
    assert np.asarray(draw(logits, params)).tolist() == [2, 0, 1]


def test_negative_zero_and_zero_tie_by_id():
    logits = jnp.asarray([[-0.0, 0.0, -1.0], [0.0, -0.0, -1.0]])
    assert np.asarray(draw(logits, arrays(2, top_k=1))).tolist() == [0, 0]


def test_bfloat16_logits_are_accepted():
    logits, params = strangers(8, 700)
    rounded = logits.astype(jnp.bfloat16)
    assert (draw(rounded, params) == draw(rounded.astype(jnp.float32), params)).all()
