"""Engines on tiny models, with few programs each because compiling is most of what such a test costs."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import jax
import jax.monitoring
import numpy as np
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel

from jradix import Engine, SamplingParams
from jradix.batch import build_arrays, build_copies, row_indices, step_shape
from jradix.cache_keeping import Restorer
from jradix.config import Buckets
from jradix.request import FinishReason

TINY_OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "page_size": 4,
    "max_total_tokens": 1024,
    "context_length": 96,
    "max_running_requests": 4,
    "chunked_prefill_size": 64,
}


class Golden:
    """Three prompts of 57 tokens, and the 16 tokens that transformers chooses greedily after each.

    At each of those tokens the two likeliest logits of every checkpoint are further apart than twice the 2e-4 by which
    the logits may differ, so that every one of them must come out.
    """

    def __init__(self, path: Path) -> None:
        with np.load(path / "expect.npz") as arrays:
            self.prompts: list[list[int]] = arrays["input_ids"].tolist()
            self.logits = arrays["logits"]
            self.greedy_ids: list[list[int]] = arrays["greedy_ids"].tolist()
            assert arrays["top2_gap"].min() > 4e-4, "this golden has a token that rounding may change"


def write_text_model(source: Path, target: Path) -> None:
    """Copy a tiny checkpoint of 320 ids to `target` and give it a tokenizer whose tokens are one or two letters.

    Besides there are 40 tokens of one byte above 0x7F, which alone are no UTF-8, because a model with random weights
    should write a few of those too.
    """
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, target / name)
    special = ["<pad>", "<s>", "</s>"]
    high_bytes = [chr(byte) for byte in range(0xC3, 0xEB)]  # letters that stand for themselves as bytes
    singles = [*ascii_lowercase, *high_bytes]
    pairs = list(product(ascii_lowercase, ascii_lowercase))[: 320 - len(special) - len(singles)]
    tokens = [*special, *singles, *(a + b for a, b in pairs)]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    backend.save(str(target / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (target / "tokenizer_config.json").write_text(json.dumps(config))


def write_byte_model(source: Path, target: Path, chat_template: str, special: Sequence[str] = ()) -> None:
    """Link a tiny checkpoint to `target` and give it a tokenizer of bytes, which writes anything, and a template."""
    for name in ("config.json", "model.safetensors"):
        (target / name).symlink_to(source / name)
    tokens = ["<unk>", "<s>", "</s>", *sorted(ByteLevel.alphabet()), *special]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens(["<unk>", "<s>", "</s>", *special])
    backend.save(str(target / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": chat_template,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(settings))


def write_dummy_model(source: Path, target: Path, **changes: Any) -> None:
    """A model directory with the config of `source`, changed, and no weights: load it as "dummy"."""
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))


def compile_quickly(engine: Engine) -> None:
    """Compile without LLVM's optimizations, in half the time."""
    for core in engine.replicas.cores:
        core.runner.programs.compiler_options = {"xla_backend_optimization_level": 0}


def start(path: Path, *, optimized: bool = False, **options: Any) -> Engine:
    """An engine in float32 with one bucket for decode steps and one for steps with prompt tokens.

    `optimized` programs are those that users run; the others do the same sums, more slowly.
    """
    engine = Engine(model_path=str(path), **(TINY_OPTIONS | options))
    use_one_bucket(engine)
    if not optimized:
        compile_quickly(engine)
    return engine


def restore(engine: Engine, directory: Path) -> None:
    """Have an engine at rest forget its cache and take over a snapshot, as a new one would."""
    with engine.hold() as core:
        core._start_afresh()
        restorer = Restorer(core, engine.model_config, directory)
    restorer.start(core, engine.replicas.loops[0])
    restorer.wait()


@contextmanager
def paused(engine: Engine) -> Iterator[None]:
    """Inside, the engine takes requests and does not step, unless by hand (`Engine.hold`)."""
    engine.pause_generation("in_place")
    try:
        yield
    finally:
        engine.continue_generation()


def use_one_bucket(engine: Engine) -> None:
    """Leave the largest of the bucket of each kind; nothing is compiled before it is used."""
    for core in engine.replicas.cores:
        largest = core.buckets
        core.buckets = Buckets(
            decode_rows=largest.decode_rows[-1:],
            mixed_decode_rows=largest.mixed_decode_rows[-1:],
            extend_tokens=largest.extend_tokens[-1:],
            extend_rows=largest.extend_rows[-1:],
            max_pages=largest.max_pages[-1:],
        )


def greedy(max_new_tokens: int | None = 16, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True} | fields)


def sampled(count: int = 12, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_new_tokens": count, "ignore_eos": True, "seed": 7} | fields)


def output_ids(engine: Engine, prompts: Sequence[Sequence[int]], params: Any = None) -> list[list[int]]:
    results = engine.generate(input_ids=prompts, sampling_params=params or greedy())
    return [result["output_ids"] for result in results]


def prompts_with_shared_prefixes(count: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts of 1 to 60 tokens that begin with one of a few stems, cut anywhere, or with a prompt before them."""
    rng = np.random.default_rng(seed)
    stems = [rng.integers(0, vocab_size, length).tolist() for length in (7, 16, 24, 33, 40)]
    prompts: list[list[int]] = []
    for _ in range(count):
        earlier = stems if not prompts or rng.random() < 0.7 else prompts[-12:]
        stem = earlier[rng.integers(len(earlier))]
        kept = len(stem) if rng.random() < 0.5 else int(rng.integers(len(stem) + 1))
        tail = rng.integers(0, vocab_size, int(rng.integers(0, 12))).tolist()
        prompts.append((stem[:kept] + tail)[:60] or [int(rng.integers(vocab_size))])
    return prompts


def logits_after(engine: Engine, prompt_ids: Sequence[int]) -> np.ndarray:
    """Logits `[vocab]` after a prompt, on top of what the cache holds of it, from the program that serves requests."""
    requests, _ = engine._submission.requests(None, list(prompt_ids), greedy(1))
    engine.scheduler.add(requests[0])
    runner, logits = engine.runner, None
    while (plan := engine.scheduler.plan(in_flight=False)) is not None:
        shape = step_shape(plan, engine._core.buckets)
        num_pages = engine.cache.num_total + 1  # of a layer, the null page included
        arrays = build_arrays(plan, shape, engine.scheduler.page_tables, engine.config.page_size, num_pages)
        copies = build_copies(plan, runner.max_copies)
        if copies is not None:
            runner.copy_pages(copies)
        forward = runner.compiled_forward(shape)
        logits, _, _, pool = forward(*runner._state(), arrays)
        runner.replace_pool(pool)
        logits = np.asarray(logits)[row_indices(plan, shape)[0]]
        if plan.rows[0].samples:
            break
    assert logits is not None
    requests[0].output_ids.append(int(np.argmax(logits)))
    engine.scheduler.finish(requests[0], FinishReason("length"))
    return logits


@contextmanager
def counted_compilations() -> Iterator[list[str]]:
    """A list that grows by an entry whenever XLA compiles something, anywhere in this process."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if "backend_compile" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
