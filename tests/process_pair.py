"""What the processes of tests/test_processes.py run, all of them the same: engines, and questions that they answer.

`python -m tests.process_pair RANK ADDRESS FOLDER`: process 0 writes what it found to FOLDER/found.json and
generates then until one of the processes is killed.
"""

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jradix import Engine, ProcessorRow, follow
from jradix.model.checkpoint import open_checkpoint
from tests.tiny_engine import greedy, output_ids, prompts_with_shared_prefixes, use_one_bucket

NUM_PROCESSES, DEVICES_OF_EACH = 2, 2
PROMPTS = prompts_with_shared_prefixes(12, 320, seed=5)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "page_size": 4,
    "context_length": 96,
    "max_running_requests": 4,
    "chunked_prefill_size": 64,
    "tp_size": NUM_PROCESSES * DEVICES_OF_EACH,
    "nnodes": NUM_PROCESSES,
}

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


def main(arguments: Sequence[str]) -> None:
    """Two engines one after the other: one with so few pages that requests are retracted, and one without a cache."""
    rank, address, name = arguments
    folder = Path(name)
    base = OPTIONS | {"dist_init_addr": address, "node_rank": int(rank), "model_path": str(folder / "model")}
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
            (folder / "found.tmp").write_text(json.dumps(found))
            (folder / "found.tmp").rename(folder / "found.json")
            while True:
                output_ids(engine, PROMPTS)


if __name__ == "__main__":
    main(sys.argv[1:])
