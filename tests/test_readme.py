"""What README.md and docs/ promise exists: commands, options, extras, names, files and links."""

import ast
import dataclasses
import importlib
import re
import shlex
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from jradix import EngineConfig, SamplingParams
from jradix.request_options import RequestOptions
from jradix.server.config import ServerConfig

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PYTHONS = {"python", "python3", ".venv/bin/python"}
PIPS = {"pip", ".venv/bin/pip"}
FOREIGN = {
    "cd",
    "curl",
    "export",
    "genai-bench",
    "git",
    "kubectl",
    "lm_eval",
    "smg",
}  # commands of others, whose arguments are not ours to check


def blocks(language: str) -> list[tuple[str, str]]:
    """All fenced blocks of a language, as (file name, text)."""
    return [
        (document.name, text)
        for document in DOCUMENTS
        for found, text in FENCE.findall(document.read_text("utf-8"))
        if found == language
    ]


def commands() -> list[list[str]]:
    """The commands of all bash blocks, split into words, without comments and leading variables."""
    lines = [line for _, text in blocks("bash") for line in text.replace("\\\n", " ").splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    without_variables = [[w for i, w in enumerate(c) if i or not re.match(r"[A-Z_]+=", w)] for c in words]
    return [command for command in without_variables if command]


def project_files() -> list[Path]:
    """Every file that is neither hidden nor ignored by git, relative to the root."""
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text("utf-8").splitlines()]
    files = []
    for folder, folders, names in ROOT.walk():
        folders[:] = [f for f in folders if not f.startswith(".") and not any(fnmatch(f, i) for i in ignored)]
        files += [(folder / name).relative_to(ROOT) for name in names if not name.startswith(".")]
    return sorted(files)


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""


def check_make(arguments: list[str]) -> None:
    targets = re.findall(r"^([\w -]+):(?!=)", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    known = {name for names in targets for name in names.split()}
    for argument in arguments:
        assert "=" in argument or argument in known, f"make has no target {argument}"


def check_pip(arguments: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for argument in arguments:
        for extra in re.findall(r"(?:\.|jradix)\[(.*)\]", argument):
            assert set(extra.split(",")) <= extras.keys(), f"pyproject.toml has no extra {extra}"


def check_jradix(arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The subcommand answers --help, and its help names every option that the document uses."""
    subcommand = arguments[:1] if arguments and not arguments[0].startswith("-") else []
    monkeypatch.setattr(sys, "argv", ["jradix", *subcommand, "--help"])
    with pytest.raises(SystemExit) as exit_info:
        importlib.import_module("jradix.cli").main()
    assert exit_info.value.code in (0, None), f"jradix {' '.join(subcommand)} --help fails"
    known = set(re.findall(r"(?<![\w-])--?[\w-]+", capsys.readouterr().out))
    used = {argument.partition("=")[0] for argument in arguments if re.match(r"--?[a-z]", argument)}
    assert used <= known, f"jradix {' '.join(subcommand)} has no option {sorted(used - known)}"


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_in_the_documents_exists(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, *arguments = command
    if program in PYTHONS and arguments[:2] == ["-m", "jradix"]:
        program, arguments = "jradix", arguments[2:]
    elif program in PYTHONS and arguments[:2] == ["-m", "pip"]:
        program, arguments = "pip", arguments[2:]
    if program == "make":
        check_make(arguments)
    elif program in PIPS:
        check_pip(arguments)
    elif program in {"jradix", ".venv/bin/jradix"}:
        check_jradix(arguments, capsys, monkeypatch)
    elif program in PYTHONS:
        assert (ROOT / arguments[0]).is_file(), f"no file {arguments[0]}"
    elif "/" in program:
        assert (ROOT / program).is_file(), f"no file {program}"
    else:
        assert program in FOREIGN, f"unknown program {program}"


def test_the_two_first_commands_are_demo_and_test() -> None:
    assert commands()[:2] == [["make", "demo"], ["make", "test"]]


@pytest.mark.parametrize("text", [text for _, text in blocks("python")])
def test_every_python_example_parses_and_imports_public_names(text: str) -> None:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "jradix":
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                assert alias.name in getattr(module, "__all__", ()), f"{node.module} does not export {alias.name}"


def test_the_cache_examples_run_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    examples = [text for name, text in blocks("python") if name == "cache.md"]
    for text in examples:
        exec(text, names)
    [shown] = re.findall(r"^# (.*)$", examples[-1], re.MULTILINE)
    assert capsys.readouterr().out.splitlines()[0] == shown


@pytest.mark.parametrize(
    ("document", "heading", "config"),
    [
        ("configuration.md", "Engine", EngineConfig),
        ("configuration.md", "Sampling", SamplingParams),
        ("server.md", "Settings", ServerConfig),
    ],
)
def test_the_configuration_tables_name_every_field_and_its_default(document: str, heading: str, config: type) -> None:
    section = (ROOT / "docs" / document).read_text("utf-8").partition(f"\n## {heading}\n")[2]
    documented = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", section.partition("\n## ")[0], re.MULTILINE))
    assert list(documented) == [field.name for field in dataclasses.fields(config)]
    for field in dataclasses.fields(config):
        required = field.default is dataclasses.MISSING
        default = documented[field.name]
        assert required == (default == "required"), field.name
        assert required or ast.literal_eval(default.strip("`")) == field.default, field.name


def test_the_table_of_request_options_names_every_one() -> None:
    section = (ROOT / "docs" / "generation.md").read_text("utf-8").partition("\n## Requests\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(RequestOptions.__annotations__)


@pytest.mark.parametrize("document", DOCUMENTS, ids=[str(document.relative_to(ROOT)) for document in DOCUMENTS])
def test_every_local_link_resolves(document: Path) -> None:
    for target in LINK.findall(FENCE.sub("", document.read_text("utf-8"))):
        if not re.match(r"https?://|mailto:|#", target):
            assert (document.parent / target.partition("#")[0]).exists(), f"{document.name} links to {target}"


def test_the_file_map_lists_exactly_what_exists() -> None:
    """The map has a row for each entry of the top level (but dot files) and of jradix/."""
    files = project_files()
    expected = {path.parts[0] + "/" * (len(path.parts) > 1) for path in files}
    expected |= {f"jradix/{p.parts[1]}{'/' * (len(p.parts) > 2)}" for p in files if p.parts[0] == "jradix"}
    section = (ROOT / "README.md").read_text("utf-8").partition("\n## Files\n")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| \[`([^`]+)`\]", section, re.MULTILINE))
    rows = "".join(
        f"\n| [`{path}`]({path.rstrip('/')}) | {first_sentence(path)} |" for path in sorted(expected - listed)
    )
    assert listed == expected, f"gone: {sorted(listed - expected)}; rows to add:{rows}"


def first_sentence(path: str) -> str:
    source = ROOT / path / "__init__.py" if path.endswith("/") else ROOT / path
    return docstring(source).partition("\n\n")[0].partition(". ")[0].rstrip(".") if source.suffix == ".py" else "?"


@pytest.mark.parametrize("path", [p for p in project_files() if p.suffix == ".py"], ids=str)
def test_every_python_file_says_its_job(path: Path) -> None:
    source = (ROOT / path).read_text("utf-8")
    assert docstring(ROOT / path).strip() or not source.strip(), f"{path} has no docstring"
