"""What the processes of tests/test_processes.py run, all of them the same: engines, and questions that they answer.

`python -m tests.process_questions NUM_PROCESSES TP_SIZE RANK ADDRESS FOLDER`: process 0 writes what it found to
FOLDER/found.json and generates then until one of the processes is killed.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jradix import Engine, ProcessorRow, follow
from jradix.model.checkpoint import open_checkpoint
from tests.process_group import write_found
from tests.tiny_engine import greedy, output_ids, prompts_with_shared_prefixes, use_one_bucket

PROMPTS = prompts_with_shared_prefixes(12, 320, seed=5)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "page_size": 4,
    "context_length": 96,
    "max_running_requests": 4,
    "chunked_prefill_size": 64,
}
STRICT: dict[str, Any] = OPTIONS | {
    "skip_tokenizer_init": False,
    "max_total_tokens": 96,
    "max_running_requests": 2,
    "chunked_prefill_size": 8,
    "kv_cache_dtype": "int8",
    "strict_compile": True,
}
"""Few buckets, each of which is compiled."""

type Found = dict[str, Any]


def prefer_even(logits: jax.Array, row: ProcessorRow) -> jax.Array:
    """A logit processor that both processes find in this module."""
    return logits.at[::2].add(row.params[0])


def everything(engine: Engine) -> Found:
    """One request that asks for all that changes or reports logits, and one beside it that only reports."""
    params: dict[str, Any] = {
        "frequency_penalty": 1.0,
        "repetition_penalty": 1.3,
        "logit_bias": {7: 3.0, 30: 2.0},
        "regex": "[a-z]{4,40}",
        "custom_logit_processor": prefer_even,
        "custom_params": [2.0],
    }
    asked: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3}
    results = engine.generate(
        input_ids=PROMPTS[:2], sampling_params=[greedy(12, **params), greedy(12)], return_hidden_states=True, **asked
    )
    metas = [result["meta_info"] for result in results]
    names = ("input_token_logprobs", "output_token_logprobs")
    return {
        "ids": [result["output_ids"] for result in results],
        "logprobs": [entry[0] or 0.0 for meta in metas for name in names for entry in meta[name]],
        "hidden": [np.asarray(meta["hidden_states"][-1]).ravel()[:8].tolist() for meta in metas],
    }


def answers(engine: Engine) -> Found:
    found: Found = {"cold": output_ids(engine, PROMPTS), "cached": output_ids(engine, PROMPTS)}
    found["retractions"] = engine.get_server_info()["num_retractions"]
    found["everything"] = everything(engine)
    found["refused"] = []
    for processor in (lambda logits, row: logits, partial(prefer_even)):
        try:
            engine.generate(input_ids=[1], sampling_params=greedy(1, custom_logit_processor=processor))
        except ValueError as error:
            found["refused"].append(str(error))
    found["pages"] = engine.cache.num_total
    found["fingerprint"] = engine.runner.fingerprint()
    checkpoint = open_checkpoint(engine.config.model_path)
    engine.update_weights({name: np.array(checkpoint.read(name)) * 0 for name in checkpoint.names()})
    found["of zeros"] = output_ids(engine, PROMPTS[:1])
    engine.update_weights(engine.config.model_path)
    found["of old weights"] = output_ids(engine, PROMPTS)
    engine.check_idle()
    return found


def move_pages(engine: Engine, folder: Path) -> Found:
    """A snapshot, and pages that go to the host and back to other places."""
    saved = engine.save_cache(folder / "cache")["pages"]
    engine.flush_cache()
    with engine.hold() as core:
        pages = np.arange(1, 4, dtype=np.int32)
        content = core.runner.read_pages(pages)
        core.runner.write_pages(pages + 7, content)
        moved = core.runner.read_pages(pages + 7)
    return {"saved pages": saved, "moved pages": bool(content.any()) and np.array_equal(content, moved)}


def strict_answers(engine: Engine) -> Found:
    """Of an engine that compiles all before the first request, a logit processor's programs too."""
    engine.register_processor(prefer_even)
    engine.warm_up()
    compiled = engine.runner.num_compiled
    processed = [greedy(12, custom_logit_processor=prefer_even, custom_params=[2.0])] * 3
    found: Found = {"cold": output_ids(engine, PROMPTS), "cached": output_ids(engine, PROMPTS)}
    found["processed"] = output_ids(engine, PROMPTS[:3], processed)
    found["retractions"] = engine.scheduler.num_retractions
    found["scales"] = engine.runner.scales_fingerprint()
    found["compiled later"] = engine.runner.num_compiled - compiled
    return found


def check(found: Found, engine: Engine) -> None:
    """What the processes found, against an engine of one: cold, cached, retracted, with all that may be asked."""
    expected, wanted = output_ids(engine, PROMPTS), everything(engine)
    cached, disabled = found["cached"], found["disabled"]
    assert cached["cold"] == cached["cached"] == cached["of old weights"] == expected
    assert cached["retractions"] > 0
    assert cached["everything"]["ids"] == wanted["ids"]
    for name in ("logprobs", "hidden"):
        np.testing.assert_allclose(cached["everything"][name], np.array(wanted[name], np.float64), atol=1e-4)
    assert cached["of zeros"] == [[0] * 16]
    assert cached["saved pages"] > 0
    assert cached["moved pages"], "a page is another after it was read and written"
    [not_sent, not_known] = cached["refused"]
    assert "must be what pickle can send to the other processes" in not_sent
    assert "must equal its pickled copy" in not_known
    assert disabled["once"] == disabled["again"] == expected
    assert disabled["hit_tokens"] == 0


def main(arguments: Sequence[str]) -> None:
    """Two engines one after the other: one with so few pages that requests are retracted, and one without a cache."""
    num_processes, tp_size, rank = map(int, arguments[:3])
    address, folder = arguments[3], Path(arguments[4])
    base = OPTIONS | {"model_path": str(folder / "model"), "tp_size": tp_size}
    base |= {"nnodes": num_processes, "node_rank": rank, "dist_init_addr": address}
    found: Found = {}
    if not follow(**base, max_total_tokens=96):
        with Engine(**base, max_total_tokens=96) as engine:
            use_one_bucket(engine)
            found["cached"] = answers(engine) | move_pages(engine, folder)
    if not follow(**base, disable_radix_cache=True):
        with Engine(**base, disable_radix_cache=True) as engine:
            use_one_bucket(engine)
            found["disabled"] = {"once": output_ids(engine, PROMPTS), "again": output_ids(engine, PROMPTS)}
            found["disabled"]["hit_tokens"] = engine.cache_report()["hit_tokens"]
            engine.check_idle()
            write_found(folder, found)
            while True:
                output_ids(engine, PROMPTS)


if __name__ == "__main__":
    main(sys.argv[1:])
