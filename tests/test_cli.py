"""The command line: what users type, what they see, and what they see when they are wrong."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from jradix import Engine, EngineConfig, SamplingParams, cli
from jradix.chat import Chat
from jradix.cli import main
from jradix.options import attribute_docs, given_options
from tests.tiny_engine import write_byte_model

SMALL = [
    "--dtype",
    "float32",
    "--page-size",
    "4",
    "--max-total-tokens",
    "512",
    "--max-running-requests",
    "2",
    "--layer-loop",
    "scan",
]
IDS = ["--skip-tokenizer-init", *SMALL]
GREEDY = ["--temperature", "0", "--ignore-eos", "--max-new-tokens", "8"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[[EngineConfig], Engine]]:
    """Loads each configuration once, and hands it out with an empty cache: compiling is most of what a test costs."""
    load_once = cache(cli._load)

    def load_flushed(config: EngineConfig) -> Engine:
        engine = load_once(config)
        engine.check_idle()
        engine.flush_cache()
        return engine

    yield load_flushed
    load_once.cache_clear()


@pytest.fixture(autouse=True)
def _engines_are_shared(load: Callable[[EngineConfig], Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_load", load)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory, tiny_path: Callable[[str], Path]) -> Path:
    """The tiny llama with a tokenizer of bytes and a chat template."""
    folder = tmp_path_factory.mktemp("llama")
    write_byte_model(tiny_path("llama"), folder, TEMPLATE)
    return folder


def run(*arguments: str, stdin: str = "", monkeypatch: pytest.MonkeyPatch | None = None) -> int:
    """Run the command in this process and return its exit status."""
    if monkeypatch is not None:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    try:
        return main(arguments)
    except SystemExit as end:  # argparse
        return int(end.code or 0)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["generate", "--help"], ["chat", "--help"], ["--version"]], ids=" ".join
)
def test_help_and_version_import_no_jax(arguments: list[str]) -> None:
    code = f"""
import sys
from jradix.cli import main
try:
    main({arguments!r})
except SystemExit as end:
    assert not end.code
assert not {{"jax", "transformers", "numpy"}} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "jradix" in done.stdout


def test_python_m_jradix_is_the_command() -> None:
    command = [sys.executable, "-m", "jradix", "generate", "--page-size", "x", "hello"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("jradix: error: argument --page-size")


@pytest.mark.parametrize("config", [EngineConfig, SamplingParams])
def test_every_field_is_documented_for_the_help(config: type) -> None:
    assert attribute_docs(config).keys() == config.__dataclass_fields__.keys()
    assert all(attribute_docs(config).values())


def test_a_dict_is_json_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    parse = cli._parser().parse_args
    options = ["--logit-bias", '{"5": -100}', "--json-schema", '{"type": "object"}', "--stop-regex", "a+", "--n", "2"]
    params = SamplingParams(**given_options(SamplingParams, parse(["generate", *options])))
    assert (params.logit_bias, params.json_schema) == ({5: -100.0}, '{"type": "object"}')
    assert (params.stop_regex, params.n) == (("a+",), 2)
    with pytest.raises(SystemExit):
        parse(["generate", "--logit-bias", "{5: 1}"])
    assert "argument --logit-bias: expected JSON, got '{5: 1}'" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["generate", "--custom-params", "1"], ["chat", "--n", "2"]])
def test_what_makes_no_sense_on_the_command_line_has_no_option(command: list[str]) -> None:
    with pytest.raises(SystemExit):
        cli._parser().parse_args(command)


def test_ids_in_ids_out_are_the_golden_ones(
    tiny_path: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_path("llama")
    with np.load(path / "expect.npz") as arrays:
        prompts = [" ".join(map(str, ids)) for ids in arrays["input_ids"]]
        expected = [" ".join(map(str, ids)) + "\n" for ids in arrays["greedy_ids"]]
    options = ["--temperature", "0", "--ignore-eos", "--max-new-tokens", "16"]
    assert run("generate", "--model-path", str(path), *IDS, *options, *prompts) == 0
    assert capsys.readouterr().out == "".join(expected)


def test_json_stream_and_text_agree(
    text_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same three prompts as plain text, streamed, as JSON, and streamed JSON; from arguments, a file and stdin."""
    prompts = ["once upon a time", "once upon a midnight", "in the beginning"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n\n")
    command = ["generate", "--model-path", str(text_model), *SMALL, *GREEDY]
    outputs: list[str] = []
    for arguments, stdin in (
        (prompts, ""),
        (["--stream", "--file", str(tmp_path / "prompts.txt")], ""),
        (["--json", "--file", "-"], "\n".join(prompts)),
        (["--json", "--stream", *prompts], ""),
    ):
        assert run(*command, *arguments, stdin=stdin, monkeypatch=monkeypatch) == 0
        outputs.append(capsys.readouterr().out)
    plain, streamed, *lines = outputs
    whole, updates = ([json.loads(line) for line in text.split("\n")[:-1]] for text in lines)
    assert streamed == plain == "".join(out["text"] + "\n" for out in whole)
    assert [out["meta_info"]["completion_tokens"] for out in whole] == [8, 8, 8]
    assert whole[1]["meta_info"]["cached_tokens"] == 12  # "once upon a m" in pages of 4
    last = {update.pop("index"): update for update in updates}
    assert [last[i]["output_ids"] for i in range(3)] == [out["output_ids"] for out in whole]
    assert len(updates) > 3


def test_standard_input_is_one_prompt_and_chat_wraps_it(
    text_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["generate", "--model-path", str(text_model), *SMALL, *GREEDY, "--json"]
    prompt = "two\nlines"
    assert run(*command, stdin=prompt, monkeypatch=monkeypatch) == 0
    plain = json.loads(capsys.readouterr().out)["meta_info"]["prompt_tokens"]
    assert run(*command, "--chat", stdin=prompt, monkeypatch=monkeypatch) == 0
    wrapped = json.loads(capsys.readouterr().out)["meta_info"]["prompt_tokens"]
    assert (plain, wrapped) == (len(prompt), len(f"u:{prompt}\na:"))


MISTAKES = [
    ([], "required: COMMAND"),
    (["sing"], "invalid choice: 'sing'"),
    (["generate", "--max-new-tokens", "many", "x"], "expected int or none, got 'many'"),
    (["generate", "--temp", "1", "x"], "unrecognized arguments: --temp"),  # abbreviations would break later
    (["generate", "--temperature", "nan", "x"], "temperature must be a finite number"),
    (["generate", "--model-path", "/nowhere/at/all", "x"], "/nowhere/at/all"),
    (["generate", "--page-size", "0", "x"], "page_size must be an integer of at least 1, got 0"),
    (["generate", "--file", "/nowhere.txt"], "--file /nowhere.txt cannot be read"),
    (["generate", "--file", os.devnull], "holds no prompt"),
    (["generate", "--file", "a", "b"], "not both"),
    (["generate", "--skip-tokenizer-init", "1 two"], "token ids separated by spaces, got '1 two'"),
    (["generate", "--skip-tokenizer-init", "--chat", "1"], "drop one of them"),
    (["chat", "--skip-tokenizer-init"], "a chat needs a tokenizer"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(case) or "nothing" for case, _ in MISTAKES])
def test_a_mistake_is_one_line_and_status_2(
    arguments: list[str], message: str, tiny_path: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments[:1] in (["generate"], ["chat"]) and "--model-path" not in arguments:
        arguments = [*arguments, "--model-path", str(tiny_path("llama"))]
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("jradix: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def chat_costs(transcript: str) -> list[tuple[int, int, int]]:
    """Prompt, cached and computed tokens of each turn."""
    found = re.findall(r"^\[prompt (\d+) tokens: (\d+) cached, (\d+) computed", transcript, re.MULTILINE)
    return [(int(prompt), int(cached), int(computed)) for prompt, cached, computed in found]


def test_each_turn_of_a_chat_reuses_the_turns_before(
    text_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [
        "hello there",
        "",
        "and again",
        "/tree",
        "/nonsense",
        "once more",
        "/reset",
        "hello there",
        "/quit",
        "late",
    ]
    command = ["chat", "--model-path", str(text_model), "--system", "Be brief.", *SMALL, *GREEDY]
    assert run(*command, stdin="\n".join(turns), monkeypatch=monkeypatch) == 0
    transcript = capsys.readouterr().out
    costs = chat_costs(transcript)
    assert len(costs) == 4
    for before, now in pairwise(costs[:3]):
        assert now[0] - 4 >= now[1] >= before[0] - 4  # all whole pages of the turn before, at least of its prompt
    assert costs[0][1] == 0
    assert costs[3][0] == costs[0][0]  # /reset forgets the conversation
    assert costs[3][2] <= 4  # and the cache does not
    assert all(prompt == cached + computed for prompt, cached, computed in costs)
    assert "> hello there\n" in transcript
    assert "namespace default" in transcript
    assert "unknown command /nonsense" in transcript
    assert "late" not in transcript


def test_a_turn_that_does_not_fit_leaves_the_conversation_as_it_was(
    text_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = ["hello", "x" * 600, "hello again"]
    command = ["chat", "--model-path", str(text_model), *SMALL, *GREEDY]
    assert run(*command, stdin="\n".join(turns), monkeypatch=monkeypatch) == 0
    transcript = capsys.readouterr().out
    assert "error: the prompt has" in transcript
    assert len(chat_costs(transcript)) == 2


class InterruptingOutput(io.StringIO):
    """Standard output that presses Ctrl-C when it has received a few pieces of a reply."""

    num_pieces = 0

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.getvalue().count("> ") == 1 and text not in ("> ", "\n"):
            self.num_pieces += 1
            if self.num_pieces == 4:
                signal.raise_signal(signal.SIGINT)
        return written


def test_ctrl_c_ends_a_reply_and_not_the_chat(
    text_model: Path, load: Callable[[EngineConfig], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = given_options(EngineConfig, cli._parser().parse_args(["generate", *SMALL]))
    engine = load(EngineConfig(model_path=str(text_model), **options))
    output = InterruptingOutput()
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nand now?\n"))
    Chat(engine, SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=64)).run()
    first, second = re.findall(r"^\[.*\]$", output.getvalue(), re.MULTILINE)
    assert first.endswith("interrupted]")
    assert "reply 64 tokens" in second
    engine.check_idle()


def test_demo_reuses_the_system_prompt(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The real model: every number of the table that does not depend on the machine."""
    assert smollm2_path.is_file()
    assert run("demo") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    rows = re.findall(r"^(question \d).*?(\d+) +(\d+) +(\d+) +\d+ ms$", captured.out, re.MULTILINE)
    (_, *cold), (_, *warm), (_, *without) = [[row[0], *map(int, row[1:])] for row in rows]
    assert cold[1] == without[1] == 0
    assert warm[0] == without[0] > 500
    assert warm[1] > 0.9 * warm[0]  # the system prompt is all but the question
    assert all(prompt == cached + computed for prompt, cached, computed in (cold, warm, without))
    assert "Paris" in captured.out
