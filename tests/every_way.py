"""Greedy answers to the same prompts, whichever way they reach the model: no token may depend on it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jradix import Engine
from tests.tiny_engine import TINY_OPTIONS, Golden, greedy, output_ids

TINY_DIR = Path(__file__).parent / "data" / "tiny"
TINY_NAMES = sorted(folder.name for folder in TINY_DIR.iterdir())
SMOLLM2 = json.loads((Path(__file__).parent / "data" / "smollm2_greedy.json").read_text())["prompts"]
SMOLLM2_OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "context_length": 128,
    "max_total_tokens": 2048,
    "max_running_requests": 8,
    "chunked_prefill_size": 64,
}


@dataclass(frozen=True)
class Case:
    """A model, and the first tokens that transformers chooses greedily after some prompts, as many after each.

    Attributes:
        path: of the model.
        prompts: token ids.
        expected: the tokens after each.
        options: of an engine with room for all of them.
    """

    path: Path
    prompts: list[list[int]] = field(repr=False)
    expected: list[list[int]] = field(repr=False)
    options: dict[str, Any]

    @classmethod
    def of(cls, path: Path) -> "Case":
        """Of a tiny model, or of SmolLM2 as GGUF."""
        if path.suffix == ".gguf":
            few = [SMOLLM2[0], SMOLLM2[1], SMOLLM2[3]]  # two of a conversation, one without; a step takes half a second
            prompts, expected = [c["prompt_ids"] for c in few], [c["greedy_ids"][:12] for c in few]
            return cls(path, prompts, expected, SMOLLM2_OPTIONS | {"page_size": 4})
        golden = Golden(path)
        return cls(path, golden.prompts, golden.greedy_ids, TINY_OPTIONS)

    def answers(self, engine: Engine) -> dict[str, Any]:
        """What an engine makes of the prompts each way, for `check`; json can say it. Its cache is empty afterwards."""
        prompts, params = self.prompts, greedy(len(self.expected[0]))
        cold: list[list[int]] = []
        for prompt in prompts:
            engine.flush_cache()
            cold += output_ids(engine, [prompt], params)
        output_ids(engine, prompts, params)
        cached = engine.generate(input_ids=prompts, sampling_params=params)
        ids = {"cold, alone": cold, "cached, beside each other": [result["output_ids"] for result in cached]}

        engine.flush_cache()
        output_ids(engine, [prompt[: 4 + 23 * place] for place, prompt in enumerate(prompts[:3])], greedy(1))
        ids["on top of a part"] = output_ids(engine, prompts, params)
        whole_chunk = engine.scheduler.chunked_prefill_size
        for chunk in (16, 7):
            engine.flush_cache()
            engine.scheduler.chunked_prefill_size = chunk  # a smaller chunk fits the same bucket: nothing to compile
            ids[f"in chunks of {chunk}"] = output_ids(engine, prompts, params)
        engine.scheduler.chunked_prefill_size = whole_chunk

        before, room = engine.scheduler.num_retractions, self._pages_for_all(engine.config.page_size) * 7 // 8
        in_the_way = engine.cache.allocate(engine.cache.num_total - room)
        assert in_the_way is not None
        ids["retracted"] = output_ids(engine, prompts, params)
        ids["on top of what evictions left"] = output_ids(engine, prompts, params)
        engine.cache.free(in_the_way)
        engine.flush_cache()

        engine.cache.enabled = False
        uncached = engine.generate(input_ids=prompts * 2, sampling_params=params)
        engine.cache.enabled = True
        ids["without a cache"] = [result["output_ids"] for result in uncached[: len(prompts)]]
        ids["without a cache, again"] = [result["output_ids"] for result in uncached[len(prompts) :]]
        engine.check_idle()
        return {
            "ids": ids,
            "retractions": engine.scheduler.num_retractions - before,
            "cached_tokens": [result["meta_info"]["cached_tokens"] for result in cached],
            "cached_tokens_without_a_cache": sum(result["meta_info"]["cached_tokens"] for result in uncached),
        }

    def check(self, answers: dict[str, Any]) -> None:
        """The tokens of transformers each way, and that these were really different ways."""
        for way, ids in answers["ids"].items():
            assert ids == self.expected, way
        assert answers["retractions"] > 0
        assert answers["cached_tokens"] == [len(prompt) - 1 for prompt in self.prompts]
        assert answers["cached_tokens_without_a_cache"] == 0

    def _pages_for_all(self, page_size: int) -> int:
        """Of which requests share those that are full and the same."""
        pages: set[tuple[int, ...]] = set()
        for prompt, answer in zip(self.prompts, self.expected, strict=True):
            ids = [*prompt, *answer]
            pages |= {tuple(ids[:end]) for end in range(page_size, len(ids) + page_size, page_size)}
        return len(pages)
