"""What HTTP costs: tokens/s of a server's streams beside those of the engine alone, and time to the first token.

    python scripts/bench_server.py
    python scripts/bench_server.py --streams 16 --repeats 3 --json server.json

A server is started with the settings of an engine in this process. Both run the same prompts, none of them cached, in
turn, so that whatever else the machine does meets both; one rests while the other runs. A round in which something was
compiled is repeated. The client reads raw sockets, and what it costs is printed too, since it takes cores from the
server that another machine would pay for.

*ratio* is tokens/s of the server over the engine's, the median over rounds. *same* is how many outputs are equal:
requests come to a server one after another, and bfloat16 rounds differently in steps of other shapes. CPU milliseconds
are of one round, divided by its output tokens; those of the engine's process are mostly the model's. *tokens a write*
are output tokens over the engine process's writes to the pipe, which with the bytes are the system's count.

Then one stream at a time of a prompt that is cached whole, on an idle server: *first token* is the time from the
connection's beginning to the first event, *step* the median time between events of such streams.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from operator import eq
from pathlib import Path
from statistics import median, quantiles
from tempfile import NamedTemporaryFile
from typing import Any, Self
from urllib.parse import urlsplit

import numpy as np
from bench_engine import add_engine_options, default_model_path, describe, exactly, make_engine
from tqdm import tqdm

from jradix import Engine

TEXT = (
    "The river runs past a mill and two farms before it meets the sea . A boat with red sails waits there for "
    "people who want to cross , and their children count the birds above old stone houses under a quiet sky"
)
READY = re.compile(r"serving \S+ at (http://\S+)")
START_SECONDS = 120
FIRST_TOKEN_FACTOR, FIRST_TOKEN_MS = 1.3, 5.0
"""Our mark for the first token of a cached prompt: so many steps, and so many milliseconds."""


@dataclass(frozen=True, slots=True)
class Load:
    """Lengths in tokens; prompts may come out a little shorter."""

    prompt_len: int = 64
    output_len: int = 64
    cached_len: int = 1000
    cached_output_len: int = 17


QUICK_LOAD = Load(prompt_len=12, output_len=5, cached_len=40, cached_output_len=4)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process has used so far, by the system's count."""

    cpu_seconds: float
    num_writes: int
    written_bytes: int

    @classmethod
    def of(cls, pid: int) -> Self:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])  # in user mode and in the kernel
        io = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        return cls(ticks / os.sysconf("SC_CLK_TCK"), int(io["syscw"]), int(io["wchar"]))


class Stream(asyncio.Protocol):
    """One request over a connection of its own, with the time of each piece of the answer; nothing is parsed yet."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.started = time.perf_counter()
        self.pieces: list[tuple[float, bytes]] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)

    @property
    def event_times(self) -> list[float]:
        """When pieces with events came, seconds from the start."""
        return [at - self.started for at, data in self.pieces if b"data: {" in data]

    def text(self) -> str:
        """All text of the answer, which must be complete."""
        answer = b"".join(data for _, data in self.pieces)
        assert b"data: [DONE]" in answer, f"an answer is not complete: {answer[-300:]!r}"
        events = [json.loads(line[6:]) for line in answer.split(b"\n") if line.startswith(b"data: {")]
        return "".join(event["choices"][0]["text"] for event in events)


class Server:
    """`jradix serve` in a process of its own, with the settings of an engine."""

    def __init__(self, options: argparse.Namespace, fields: dict[str, Any]) -> None:
        settings = {
            "model-path": options.model_path or default_model_path(),
            "dtype": options.dtype,
            "page-size": options.page_size,
            "chunked-prefill-size": options.chunked_prefill_size,
            "layer-loop": options.layer_loop,
            "port": 0,
            **{name.replace("_", "-"): value for name, value in fields.items()},
        }
        words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        self._log = NamedTemporaryFile("w+", prefix="bench_server", suffix=".log")  # noqa: SIM115 - see close
        command = [sys.executable, "-m", "jradix", "serve", *words]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        self.url = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()

    def wait_until_ready(self) -> None:
        give_up = time.monotonic() + START_SECONDS
        while not self.url:
            log = Path(self._log.name).read_text()
            if self._process.poll() is not None or time.monotonic() > give_up:
                raise SystemExit(f"the server has not started:\n{log}")
            found = READY.search(log)
            self.url = found[1] if found else ""
            time.sleep(0.1)
        while True:
            try:
                self.call("/health")
                return
            except OSError:
                time.sleep(0.05)

    def call(self, path: str, method: str = "GET") -> Any:
        with urllib.request.urlopen(urllib.request.Request(self.url + path, method=method)) as answer:
            return json.loads(answer.read() or "null")

    @property
    def num_compiled(self) -> int:
        return self.call("/get_server_info")["num_compiled_programs"]

    def usage(self) -> tuple[Usage, Usage]:
        """Of the HTTP process, and of the engine process."""
        pid = self._process.pid
        commands = {
            int(child): Path(f"/proc/{child}/cmdline").read_text()
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        }
        [engine] = [child for child, command in commands.items() if "spawn_main" in command]
        return Usage.of(pid), Usage.of(engine)

    def stream(self, prompts: Sequence[str], num_tokens: int) -> list[Stream]:
        """All at once, each to its end."""
        return asyncio.run(self._stream(prompts, num_tokens))

    async def _stream(self, prompts: Sequence[str], num_tokens: int) -> list[Stream]:
        address = urlsplit(self.url)
        assert address.hostname is not None
        loop = asyncio.get_running_loop()
        requests = [self._request(prompt, num_tokens) for prompt in prompts]
        connections = await asyncio.gather(
            *(
                loop.create_connection(lambda request=request: Stream(request), address.hostname, address.port or 80)
                for request in requests
            )
        )
        streams = [stream for _, stream in connections]
        await asyncio.gather(*(stream.ended for stream in streams))
        return streams

    def _request(self, prompt: str, num_tokens: int) -> bytes:
        fields = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body = json.dumps(fields).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(self.url).netloc}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


@dataclass(frozen=True, slots=True)
class Run:
    """All prompts, once. CPU seconds are of whole processes, `pipe` is what the engine's process wrote there."""

    seconds: float
    texts: list[str]
    engine_cpu: float
    http_cpu: float = 0.0
    client_cpu: float = 0.0
    num_writes: int = 0
    written_bytes: int = 0


def run_server(server: Server, prompts: Sequence[str], num_tokens: int) -> Run:
    """Streams of all prompts at once, with nothing cached."""
    server.call("/flush_cache", "POST")
    http, child = server.usage()
    start, cpu = time.perf_counter(), time.process_time()
    streams = server.stream(prompts, num_tokens)
    seconds, client_cpu = time.perf_counter() - start, time.process_time() - cpu
    http_now, child_now = server.usage()
    return Run(
        seconds,
        [stream.text() for stream in streams],
        engine_cpu=child_now.cpu_seconds - child.cpu_seconds,
        http_cpu=http_now.cpu_seconds - http.cpu_seconds,
        client_cpu=client_cpu,
        num_writes=child_now.num_writes - child.num_writes,
        written_bytes=child_now.written_bytes - child.written_bytes,
    )


def run_engine(engine: Engine, prompts: Sequence[str], num_tokens: int) -> Run:
    """The same in this process, in one call."""
    engine.flush_cache()
    start, cpu = time.perf_counter(), time.process_time()
    results = engine.generate(prompts, exactly(num_tokens), show_progress=False)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return Run(seconds, [result["text"] for result in results], engine_cpu=cpu)


def run_both(
    server: Server, engine: Engine, prompts: Sequence[str], num_tokens: int, *, server_first: bool
) -> tuple[Run, Run]:
    """The server's run and the engine's, both again if anything had to be compiled."""
    while True:
        num_compiled = server.num_compiled, engine.runner.num_compiled
        if server_first:
            runs = run_server(server, prompts, num_tokens), run_engine(engine, prompts, num_tokens)
        else:
            alone = run_engine(engine, prompts, num_tokens)
            runs = run_server(server, prompts, num_tokens), alone
        if (server.num_compiled, engine.runner.num_compiled) == num_compiled:
            return runs


def cached_prompt(server: Server, prompt: str, num_tokens: int, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds to the first token of each stream, and between events of all of them."""
    for _ in range(2):  # computes the prompt, then compiles what a cached one needs
        server.stream([prompt], num_tokens)
    first: list[float] = []
    steps: list[float] = []
    for _ in tqdm(range(repeats), "cached prompt", unit="stream", file=sys.stderr):
        time.sleep(0.05)  # the server comes to rest
        [stream] = server.stream([prompt], num_tokens)
        times = stream.event_times
        first.append(times[0])
        steps += [after - before for before, after in pairwise(times)]
    return first, steps


def make_prompt(engine: Engine, rng: np.random.Generator, num_tokens: int) -> str:
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode(" ".join(rng.choice(TEXT.split(), num_tokens)))
    return engine.tokenizer.decode(ids[:num_tokens])


def summarize(
    rounds: Sequence[tuple[Run, Run]], num_tokens: int, first: list[float], steps: list[float]
) -> dict[str, Any]:
    """Medians: tokens/s, ratio, milliseconds."""

    def of_server(name: str) -> float:
        return median(getattr(server, name) for server, _ in rounds) / num_tokens

    step = 1e3 * median(steps)
    return {
        "server": 1 / of_server("seconds"),
        "engine": num_tokens / median(engine.seconds for _, engine in rounds),
        "ratio": median(engine.seconds / server.seconds for server, engine in rounds),
        "ratios": [engine.seconds / server.seconds for server, engine in rounds],
        "same": median(sum(map(eq, server.texts, engine.texts)) for server, engine in rounds),
        "http_cpu_ms": 1e3 * of_server("http_cpu"),
        "client_cpu_ms": 1e3 * of_server("client_cpu"),
        "engine_cpu_ms": 1e3 * of_server("engine_cpu"),
        "engine_alone_cpu_ms": 1e3 * median(engine.engine_cpu for _, engine in rounds) / num_tokens,
        "tokens_a_write": 1 / of_server("num_writes"),
        "bytes_a_token": of_server("written_bytes"),
        "first_ms": 1e3 * median(first),
        "first_p90_ms": 1e3 * quantiles(first, n=10)[-1],
        "step_ms": step,
        "first_mark_ms": FIRST_TOKEN_FACTOR * step + FIRST_TOKEN_MS,
        "seconds": [(server.seconds, engine.seconds) for server, engine in rounds],
        "first_samples": first,
    }


def format_report(f: dict[str, Any], num_streams: int) -> str:
    ratios = " ".join(f"{ratio:.3f}" for ratio in f["ratios"])
    return "\n".join(
        (
            f"tokens/s         server {f['server']:.1f}, engine alone {f['engine']:.1f}",
            f"ratio            {f['ratio']:.3f} ({ratios})",
            f"same outputs     {f['same']:.0f} of {num_streams}",
            f"CPU ms a token   HTTP process {f['http_cpu_ms']:.3f}, client {f['client_cpu_ms']:.3f}, "
            f"engine process {f['engine_cpu_ms']:.3f}, engine alone {f['engine_alone_cpu_ms']:.3f}",
            f"pipe             {f['tokens_a_write']:.1f} tokens a write, {f['bytes_a_token']:.0f} bytes a token",
            f"first token, ms  {f['first_ms']:.1f}, p90 {f['first_p90_ms']:.1f}; the mark is {f['first_mark_ms']:.1f}",
            f"step, ms         {f['step_ms']:.1f}",
        )
    )


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser)
    parser.add_argument("--streams", type=int, default=64, help="requests at once")
    parser.add_argument("--output-len", type=int, default=Load().output_len, help="output tokens of each stream")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of all streams")
    parser.add_argument("--cached-repeats", type=int, default=30, help="streams of the cached prompt")
    parser.add_argument("--quick", action="store_true", help="a small load, for tests")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    load = QUICK_LOAD if options.quick else Load(output_len=options.output_len)
    context_length = 2 * (load.cached_len + load.cached_output_len)
    fields = {
        "max_running_requests": options.streams,
        "context_length": context_length,
        "max_total_tokens": options.streams * (load.prompt_len + load.output_len + options.page_size) + context_length,
    }
    with ExitStack() as stack:
        server = stack.enter_context(Server(options, fields))
        engine = stack.enter_context(make_engine(options, skip_tokenizer_init=False, **fields))
        rng = np.random.default_rng(0)
        prompts = [make_prompt(engine, rng, load.prompt_len) for _ in range(options.streams)]
        cached = make_prompt(engine, rng, load.cached_len)
        server.wait_until_ready()
        rounds = [
            run_both(server, engine, prompts, load.output_len, server_first=bool(number % 2))
            for number in tqdm(range(options.repeats), "rounds", file=sys.stderr)
        ]
        first, steps = cached_prompt(server, cached, load.cached_output_len, options.cached_repeats)
    found = summarize(rounds, options.streams * load.output_len, first, steps)
    title = f"{describe(options)}, {options.streams} streams of {load.prompt_len} + {load.output_len} tokens"
    print(f"{title}, a cached prompt of {load.cached_len}")
    print(format_report(found, options.streams))
    if options.json:
        options.json.write_text(json.dumps({"title": title, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
