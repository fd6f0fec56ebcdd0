"""Requests drawn at random from all that may be asked, and what each gives when it runs alone without a cache."""

import random
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jradix import Engine, SamplingParams
from jradix.logit_processor import ProcessorRow

VOCAB = 320
SHAKE = 1e-4
"""By how much logits are changed to see whether they were nearly equal."""

STOPS: list[dict[str, Any]] = [
    {"stop": "a"},
    {"stop": ["dy", "bz"], "no_stop_trim": True},
    {"stop_regex": "[aeiou]{2}"},
    {"stop_regex": ["q.", "y[a-f]"], "stop": "zz", "no_stop_trim": True},
]
PENALTIES: list[dict[str, Any]] = [
    {"frequency_penalty": 1.2},
    {"presence_penalty": 0.9, "repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "frequency_penalty": -0.3},
]
GRAMMARS = ["[a-z]{3,12}", "(ab|cd)*e", "[b-y]+z", "x"]
CHANCES = {"stop": 0.25, "stop id": 0.15, "grammar": 0.15, "penalty": 0.25, "bias": 0.15, "processor": 0.08}


def prefer_neighbours(logits: jax.Array, row: ProcessorRow) -> jax.Array:
    """By the request's first number, ids near that of the token before are likelier; the second shakes all a little."""
    ids = jnp.arange(len(logits))
    preferred = row.params[0] * jnp.abs(ids - row.last_token) / len(logits)
    return logits - preferred + SHAKE * jnp.sin(row.params[1] * ids)


@dataclass
class Job:
    """One prompt and all that is asked of it; `expected` holds the result of each of its samples, once known."""

    prompt: list[int]
    params: dict[str, Any]
    options: dict[str, Any]
    expected: list[dict[str, Any]] | None = None

    @property
    def num_samples(self) -> int:
        return self.params["n"]

    def solve(self, alone: Engine) -> list[dict[str, Any]]:
        """What the samples give as requests of their own, one after another."""
        if self.expected is None:
            self.expected = [self._run(alone, sample, self.params) for sample in range(self.num_samples)]
        return self.expected

    def may_round_to(self, alone: Engine, sample: int, output_ids: list[int]) -> bool:
        """Whether rounding explains why these are not the expected tokens: the first that differs was a close choice.

        A number drawn at random falls between two of 320 tokens, and once in some 10,000 draws so close to both that
        the last bits of the logits decide. Then they do so too where the logits are shaken.
        """
        expected = self.solve(alone)[sample]["output_ids"]
        pairs = zip(expected, output_ids, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if same == min(len(expected), len(output_ids)):
            return False
        strength = self.params.get("custom_params", [0.0])[0]
        for shake in range(1, 13):
            shaken = {"custom_logit_processor": prefer_neighbours, "custom_params": [strength, shake]}
            found = self._run(alone, sample, self.params | shaken)["output_ids"]
            if found[: same + 1] == output_ids[: same + 1]:
                return True
        return False

    def _run(self, alone: Engine, sample: int, params: dict[str, Any]) -> dict[str, Any]:
        own = SamplingParams(**params | {"n": 1, "seed": params["seed"] + sample})
        return alone.generate(input_ids=self.prompt, sampling_params=own, **self.options)


def draw_jobs(count: int, rng: random.Random) -> list[Job]:
    """Prompts of 1 to 56 tokens, of which many share a beginning, with outputs of at most 24."""
    stems = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (5, 16, 23, 40)]
    jobs: list[Job] = []
    for _ in range(count):
        stem = rng.choice([*stems, *(job.prompt for job in jobs[-6:])])
        kept = len(stem) if rng.random() < 0.5 else rng.randrange(len(stem) + 1)
        prompt = stem[:kept] + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(12))]
        prompt = prompt[:56] or [rng.randrange(3, VOCAB)]
        jobs.append(Job(prompt, _draw_params(rng), _draw_options(rng, len(prompt))))
    return jobs


def _draw_params(rng: random.Random) -> dict[str, Any]:
    params: dict[str, Any] = {
        "n": rng.choice([1, 1, 1, 2, 3]),
        "seed": rng.randrange(2**32 - 3),
        "max_new_tokens": rng.choice([0, 1, 2, *range(3, 25)]),
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.0, 3.0]),
        "ignore_eos": rng.random() < 0.5,
    }
    asked = {name for name, chance in CHANCES.items() if rng.random() < chance}
    if rng.random() < 0.3:
        params |= rng.choice([{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.02}, {"top_k": 40, "top_p": 0.9}])
    if "stop" in asked:
        params |= rng.choice(STOPS)
    if "stop id" in asked:
        params["stop_token_ids"] = [rng.randrange(3, VOCAB) for _ in range(12)]
        params["min_new_tokens"] = min(rng.randrange(4), params["max_new_tokens"])
    if "grammar" in asked:
        params["regex"] = rng.choice(GRAMMARS)
    if "penalty" in asked:
        params |= rng.choice(PENALTIES)
    if "bias" in asked:
        params["logit_bias"] = {rng.randrange(VOCAB): rng.uniform(-100, 5) for _ in range(20)}
    if "processor" in asked:
        params |= {"custom_logit_processor": prefer_neighbours, "custom_params": [rng.uniform(0, 9)]}
    return params


def _draw_options(rng: random.Random, prompt_len: int) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if rng.random() < 0.4:
        options["return_logprob"] = True
        options["logprob_start_len"] = rng.choice([-1, 0, rng.randrange(prompt_len + 1)])
        if rng.random() < 0.3:
            options |= {"top_logprobs_num": rng.randrange(1, 5), "token_ids_logprob": [7, rng.randrange(VOCAB)]}
    if rng.random() < 0.1:
        options["return_hidden_states"] = True
    return options


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The two results are of one request: tokens, text, end, log-probabilities; hidden states where both have them."""
    assert found["output_ids"] == expected["output_ids"]
    assert found["text"] == expected["text"]
    assert found["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"]
    assert_same_numbers(found, expected)
    assert len(_logprobs(found)) == len(_logprobs(expected))


def assert_begins(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """What a request had when it was ended from outside is the beginning of what it would have given."""
    count = len(found["output_ids"])
    assert found["meta_info"]["finish_reason"]["type"] == "abort"
    assert found["output_ids"] == expected["output_ids"][:count]
    assert len(found["meta_info"].get("output_token_logprobs", [])) in (0, count)
    assert_same_numbers(found, expected)


def assert_same_numbers(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Log-probabilities that are known of both, and hidden states of tokens that both have computed, agree."""
    ours, theirs = _logprobs(found), _logprobs(expected)
    assert ours.keys() <= theirs.keys()
    for place, (value, token_id) in ours.items():
        other, other_id = theirs[place]
        if "top" not in place[0]:
            assert token_id == other_id, place
        assert value == other or abs(value - other) < 1e-4, (place, value, other)
    meta, other_meta = found["meta_info"], expected["meta_info"]
    assert ("hidden_states" in meta) <= ("hidden_states" in other_meta)
    if "hidden_states" in meta:
        positions, other_positions = meta["hidden_state_positions"], other_meta["hidden_state_positions"]
        assert (np.diff(positions) > 0).all(), "a token's hidden state came twice"
        assert np.isin(positions, other_positions).all()
        computed = np.searchsorted(other_positions, positions)
        np.testing.assert_allclose(meta["hidden_states"], other_meta["hidden_states"][computed], atol=1e-3, rtol=0)


def _logprobs(result: dict[str, Any]) -> dict[tuple[str, int, int], tuple[float, int]]:
    """All that are known, by kind, position and place."""
    found: dict[tuple[str, int, int], tuple[float, int]] = {}
    for name, entries in result["meta_info"].items():
        if not name.endswith("logprobs"):
            continue
        for position, entry in enumerate(entries):
            several = entry if isinstance(entry, list) else [entry]
            for place, (value, token_id, _) in enumerate(item for item in several if item is not None):
                if value is not None:
                    found[name, position, place] = (value, token_id)
    return found
