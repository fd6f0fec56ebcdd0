"""A crowd of clients for a server: what they ask for, in which way, and what each of them is told.

Prompts are drawn so that many share a beginning, and answers are greedy: every one is known from an engine that ran the
prompt alone. Some clients go away before they are answered, some send what is wrong, some are aborted by others.
"""

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx2

from jradix import Engine

NUM_CONNECTIONS = 64
MIN_GAP = 1e-3
"""Two tokens so close in log-probability that rounding might exchange them are not asked for."""

type Fate = Literal["read", "leave", "wrong", "abort"]

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("/generate", {"input_ids": [320]}, "input_ids"),
    ("/generate", {"text": "a", "sampling_params": {"temperature": -1}}, "temperature"),
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 10**6}}, "max_new_tokens"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/v1/completions", {"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ("/v1/chat/completions", {"messages": [{"content": "x"}]}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "top_p": 0}, "top_p"),
]


@dataclass(frozen=True)
class Job:
    """A prompt, as a text and if it is a chat as messages, and what it gives alone."""

    prompt: str
    messages: list[dict[str, str]] | None
    params: dict[str, Any]
    text: str
    output_ids: list[int]
    finish: str


def draw_jobs(count: int, alone: Engine, rng: random.Random) -> list[Job]:
    """Prompts of 1 to 180 tokens; `alone` runs one request at a time and has no cache."""
    stems = ["".join(rng.choices("abcdefgh ", k=length)) for length in (5, 16, 33, 60, 90, 150)]
    jobs: list[Job] = []
    while len(jobs) < count:
        stem = rng.choice(stems)
        content = stem[: rng.choice([len(stem), rng.randrange(len(stem) + 1)])]
        content += "".join(rng.choices("xyz", k=rng.randrange(1, 20)))
        is_chat = rng.random() < 0.3
        prompt = f"u:{content}\na:" if is_chat else content
        params: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_new_tokens": rng.randint(1, 24)}
        result = alone.generate(prompt, params, return_logprob=True, top_logprobs_num=2)
        if rng.random() < 0.15 and "\ufffd" not in (stop := result["text"][3:5]) and stop:
            params["stop"] = [stop]
            result = alone.generate(prompt, params, return_logprob=True, top_logprobs_num=2)
        meta = result["meta_info"]
        if all(first[0] - second[0] > MIN_GAP for first, second in meta["output_top_logprobs"]):
            messages = [{"role": "user", "content": content}] if is_chat else None
            finish = meta["finish_reason"]["type"]
            jobs.append(Job(prompt, messages, params, result["text"], result["output_ids"], finish))
    return jobs


@dataclass
class Told:
    """What a client was told of one output."""

    text: str = ""
    output_ids: list[int] | None = None
    finish: str | None = None
    num_ends: int = 0


@dataclass
class Client:
    """One request, what its sender does, and what it was told.

    Attributes:
        patience: how long it waits before it leaves: seconds, or if it reads a stream, events.
        samples: of the answer.
        prompt_tokens, cached_tokens: as the server says; of an OpenAI route those of one sample.
        num_refusals: how often the queue was full.
    """

    rid: str
    job: Job
    path: str
    stream: bool
    n: int
    fate: Fate
    patience: float
    number: int
    samples: list[Told] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    num_refusals: int = 0
    num_aborted: int = 0
    has_left: bool = False

    @property
    def body(self) -> dict[str, Any]:
        job, shared = self.job, {"rid": self.rid, "stream": self.stream}
        if self.path == "/generate":
            return {**shared, "text": job.prompt, "sampling_params": {**job.params, "n": self.n}}
        given = {"prompt": job.prompt} if job.messages is None else {"messages": job.messages}
        params = {name: value for name, value in job.params.items() if name != "max_new_tokens"}
        usage = {"stream_options": {"include_usage": True}} if self.stream else {}
        return {**shared, **given, **params, **usage, "max_tokens": job.params["max_new_tokens"], "n": self.n}

    async def run(self, http: httpx2.AsyncClient) -> None:
        """Ask, and do what this client does."""
        if self.fate == "wrong":
            path, body, name = WRONG[self.number % len(WRONG)]
            refused = await http.post(path, json=body)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, name), error
            return
        asking = asyncio.ensure_future(self._ask_until_taken(http))
        while self.fate == "abort" and not self.num_aborted and not asking.done():
            answer = await http.post("/abort_request", json={"rid": self.rid})
            self.num_aborted = answer.json()["num_aborted"]
        await asking

    async def _ask_until_taken(self, http: httpx2.AsyncClient) -> None:
        seconds = self.patience if self.fate == "leave" and not self.stream else None
        try:
            while not await asyncio.wait_for(self._ask(http), seconds):
                self.num_refusals += 1
                await asyncio.sleep(0.25)
        except TimeoutError:
            self.has_left = True

    async def _ask(self, http: httpx2.AsyncClient) -> bool:
        """Whether the answer came, or as much of it as the client wants to read; False if the queue is full."""
        async with http.stream("POST", self.path, json=self.body) as response:
            if response.status_code == 200:
                self.samples = [Told() for _ in range(self.n)]
                await self._read(response)
                return True
            error = json.loads(await response.aread())["error"]
        assert (response.status_code, error["code"]) == (503, "queue_full"), error
        return False

    async def _read(self, response: httpx2.Response) -> None:
        take = self._take_native if self.path == "/generate" else self._take_openai
        if not self.stream:
            answer = json.loads(await response.aread())
            for one in answer if isinstance(answer, list) else [answer]:
                take(one)
            return
        lines: list[str] = []
        async for line in response.aiter_lines():
            if self.fate == "leave" and len(lines) >= self.patience:
                self.has_left = True
                return
            if line:
                lines.append(line)
        assert lines.pop() == "data: [DONE]"
        for line in lines:
            take(json.loads(line.removeprefix("data: ")))

    def _take_native(self, state: dict[str, Any]) -> None:
        """One state of one output; in a stream each holds all so far."""
        meta = state["meta_info"]
        index = int(meta["id"].removeprefix(self.rid + "-")) if self.n > 1 else 0
        assert meta["id"] == (self.rid if self.n == 1 else f"{self.rid}-{index}")
        told = self.samples[index]
        assert state["text"].startswith(told.text), "a stream took text back"
        told.text, told.output_ids = state["text"], state["output_ids"]
        if meta["finish_reason"] is not None:
            told.finish, told.num_ends = meta["finish_reason"]["type"], told.num_ends + 1
            self.prompt_tokens += meta["prompt_tokens"]
            self.cached_tokens += meta["cached_tokens"]
            self.completion_tokens += meta["completion_tokens"]

    def _take_openai(self, chunk: dict[str, Any]) -> None:
        """A whole answer, or a piece of one."""
        for choice in chunk["choices"]:
            told = self.samples[choice["index"]]
            message = choice.get("message") or choice.get("delta") or {}
            told.text += choice.get("text") or message.get("content") or ""
            if choice["finish_reason"] is not None:
                told.finish, told.num_ends = choice["finish_reason"], told.num_ends + 1
        if (usage := chunk.get("usage")) is not None:
            assert self.prompt_tokens == 0, "usage came twice"
            self.prompt_tokens = self.n * usage["prompt_tokens"]
            self.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
            self.completion_tokens = usage["completion_tokens"]

    def check(self) -> None:
        """Each output has ended once, with what the prompt gives alone; one that was aborted with a part of that."""
        job = self.job
        if self.has_left or self.fate == "wrong":
            return
        assert len(self.samples) == self.n
        for told in self.samples:
            assert told.num_ends == 1
            if told.finish == "abort":
                assert self.fate == "abort"
                assert job.text.startswith(told.text.rstrip("\ufffd"))
                assert told.output_ids is None or told.output_ids == job.output_ids[: len(told.output_ids)]
            else:
                assert (told.finish, told.text) == (job.finish, job.text)
                assert told.output_ids is None or told.output_ids == job.output_ids
        assert self.num_aborted == sum(told.finish == "abort" for told in self.samples)


def draw_clients(jobs: Sequence[Job], count: int, rng: random.Random, *, wild: bool) -> Iterator[Client]:
    """`wild`: some leave, some are aborted, some send what is wrong; else all wait for their answers."""
    for number in range(count):
        job = rng.choice(jobs)
        openai = "/v1/completions" if job.messages is None else "/v1/chat/completions"
        path = rng.choice(["/generate", openai])
        fates: list[Fate] = ["read", "leave", "wrong", "abort"]
        [fate] = rng.choices(fates, [80, 10, 5, 5] if wild else [1, 0, 0, 0])
        # Of several samples OpenAI's usage does not say what each found cached.
        n = rng.choice([1, 1, 1, 2]) if wild or path == "/generate" else 1
        stream = rng.random() < 0.5
        patience = rng.choice([0, 1, 2, 9] if stream else [0.0, rng.uniform(0, 0.02), rng.uniform(0, 0.2)])
        yield Client(f"{rng.randrange(10**9)}.{number}", job, path, stream, n, fate, patience, number)


async def crowd(url: str, key: str, clients: Sequence[Client]) -> None:
    """All of them, over NUM_CONNECTIONS connections at once."""
    waiting = iter(clients)
    limits = httpx2.Limits(max_connections=NUM_CONNECTIONS + 8)
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=300, limits=limits) as http:

        async def work() -> None:
            for client in waiting:
                await client.run(http)

        await asyncio.gather(*(work() for _ in range(NUM_CONNECTIONS)))
