"""What the documents show of the server works: each curl line, the Python examples, the manifests and their probe."""

import os
import shutil
import subprocess
import sys
import urllib.request
from typing import Any

import httpx2
import pytest
import yaml

from jradix.server.config import ServerConfig
from tests.server.conftest import API_KEY, MODEL
from tests.test_readme import blocks, commands

DOCUMENTED_URL, DOCUMENTED_MODEL = "localhost:30000", "HuggingFaceTB/SmolLM2-135M-Instruct"
CURLS = [command for command in commands() if command[0] == "curl"]


def examples(document: str, word: str) -> list[str]:
    """A document's Python examples in which a word stands."""
    return [text for name, text in blocks("python") if name == document and word in text]


def adapted(text: str, url: str) -> str:
    """An example with the address, the model and the key of the tests' server."""
    for shown, ours in (
        (DOCUMENTED_URL, url.removeprefix("http://")),
        (DOCUMENTED_MODEL, MODEL),
        ("unused", API_KEY),
        ("$JRADIX_API_KEY", API_KEY),
    ):
        text = text.replace(shown, ours)
    return text


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("command", CURLS, ids=" ".join)
def test_every_curl_line_is_answered(http: httpx2.Client, url: str, command: list[str]) -> None:
    words = ["curl", "--silent", "--show-error", "--fail-with-body", "--max-time", "90"]
    words += ["--header", f"Authorization: Bearer {API_KEY}"]
    ended = subprocess.run(
        [*words, *(adapted(word, url) for word in command[1:])], capture_output=True, check=False, timeout=100
    )
    assert ended.returncode == 0, ended
    assert ended.stdout


def test_there_are_curl_lines_for_each_of_the_main_routes() -> None:
    shown = {word.removeprefix(DOCUMENTED_URL) for command in CURLS for word in command if DOCUMENTED_URL in word}
    assert {"/generate", "/v1/chat/completions", "/v1/models", "/metrics"} <= shown


def test_the_openai_example_prints_an_answer_and_usage(
    http: httpx2.Client, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    [example] = examples("server.md", "import OpenAI")
    exec(adapted(example, url), {})
    assert "CompletionUsage(" in capsys.readouterr().out


def test_the_second_question_finds_the_system_prompt_in_the_cache(
    http: httpx2.Client, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    [example] = examples("server.md", "cached_tokens")
    opener = urllib.request.build_opener()
    opener.addheaders = [("Authorization", f"Bearer {API_KEY}")]
    monkeypatch.setattr(urllib.request, "urlopen", opener.open)
    names: dict[str, Any] = {}
    exec(adapted(example, url), names)
    first, second = [[int(word) for word in line.split()] for line in capsys.readouterr().out.splitlines()]
    shared = len(names["system"]) + len("Question: What is ")  # a token is a byte
    assert first[1] < 10 < first[0]
    assert shared <= second[1] < shared + 8 < second[0]


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    [text] = [text for name, text in blocks("yaml") if name == "scale_out.md"]
    return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(text)}


def test_the_manifests_fit_together(manifests: dict[str, Any]) -> None:
    spec = manifests["Deployment"]["spec"]
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == manifests["Service"]["spec"]["selector"] == labels
    [port] = container["ports"]
    assert container["command"][container["command"].index("--port") + 1] == str(port["containerPort"])
    assert manifests["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    assert (
        container["startupProbe"]["httpGet"]["port"] == container["readinessProbe"]["httpGet"]["port"] == port["name"]
    )
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pause + ServerConfig().drain_seconds + 10
    assert container["livenessProbe"]["timeoutSeconds"] < container["livenessProbe"]["periodSeconds"]
    [key] = container["env"]
    assert (key["name"], "secretKeyRef" in key["valueFrom"]) == ("JRADIX_API_KEY", True)
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_the_manifests_probes_pass(manifests: dict[str, Any], http: httpx2.Client, url: str) -> None:
    [container] = manifests["Deployment"]["spec"]["template"]["spec"]["containers"]
    for probe in ("startupProbe", "readinessProbe"):
        assert httpx2.get(f"{url}{container[probe]['httpGet']['path']}").status_code == 200
    _, option, program = container["livenessProbe"]["exec"]["command"]
    for key, status in ((API_KEY, 0), ("wrong", 1)):
        ended = subprocess.run(
            [sys.executable, option, adapted(program, url)],
            env={**os.environ, "JRADIX_API_KEY": key},
            capture_output=True,
            check=False,
            timeout=60,
        )
        assert ended.returncode == status, ended.stderr
        assert status == 0 or b"401" in ended.stderr
