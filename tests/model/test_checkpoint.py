"""The door: paths of every kind, the hub through its local cache, and names that lead nowhere."""

import json
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects
from safetensors.numpy import save_file

from jradix.model.checkpoint import CheckpointError, open_checkpoint
from jradix.model.gguf_checkpoint import GGUFCheckpoint
from jradix.model.safetensors_checkpoint import SafetensorsCheckpoint
from tests.model.gguf_writing import llama_shapes, random_tensors, write_gguf

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_hf(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    save_file({"model.norm.weight": np.ones(3, np.float32)}, directory / "model.safetensors")
    return directory


@pytest.fixture
def offline_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, with the network forbidden."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


def test_a_hugging_face_directory_opens_from_str_and_path(tmp_path: Path) -> None:
    directory = write_hf(tmp_path / "m")
    for model_path in (directory, str(directory)):
        checkpoint = open_checkpoint(model_path)
        assert isinstance(checkpoint, SafetensorsCheckpoint)
        assert checkpoint.path == directory


def test_a_gguf_file_opens_by_its_path_and_by_its_directory(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", random_tensors(llama_shapes()))
    for model_path in (path, tmp_path):
        checkpoint = open_checkpoint(model_path)
        assert isinstance(checkpoint, GGUFCheckpoint)
        assert checkpoint.path == path


def test_a_gguf_file_is_known_by_its_content_not_its_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "sha256-abc", "llama", random_tensors(llama_shapes()))
    assert open_checkpoint(path).config["model_type"] == "llama"


def test_the_home_directory_may_be_written_as_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hf(tmp_path / "m")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_checkpoint("~/m").names() == {"model.norm.weight"}


def test_a_directory_with_several_gguf_files_is_refused_with_their_names(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name, "llama", random_tensors(llama_shapes()))
    with pytest.raises(CheckpointError, match=r"expected one GGUF file, found \['a\.gguf', 'b\.gguf'\]"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("files", "found"), [([], "nothing"), (["notes.txt"], "notes.txt")])
def test_a_directory_without_a_model_is_refused(tmp_path: Path, files: list[str], found: str) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=rf"expected config\.json and safetensors, or one GGUF file, .*{found}"):
        open_checkpoint(tmp_path)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"notes\.txt: expected a GGUF file"):
        open_checkpoint(tmp_path / "notes.txt")


def test_a_lone_safetensors_file_points_to_its_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected the directory that holds this file"):
        open_checkpoint(write_hf(tmp_path) / "model.safetensors")


@pytest.mark.parametrize("model_path", ["./no/such", "/no/such/dir", "no/such/deep/path", "org/model.gguf", "a b"])
def test_a_path_that_is_not_there_and_no_hub_id_is_refused_as_both(
    offline_hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no such file or directory, and it is no id"):
        open_checkpoint(model_path)


def test_an_empty_path_is_not_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_hf(tmp_path))
    with pytest.raises(CheckpointError, match="model_path is empty"):
        open_checkpoint("")


def test_a_path_object_is_never_taken_for_a_hub_id(offline_hub: Path) -> None:
    with pytest.raises(CheckpointError, match="it is no id of the Hugging Face hub"):
        open_checkpoint(Path("org/name"))


@pytest.mark.parametrize("revision", [None, "v2"])
def test_a_hub_id_that_cannot_be_downloaded_is_refused_as_both(offline_hub: Path, revision: str | None) -> None:
    with pytest.raises(CheckpointError, match=r"no such file or directory, and as an id .* could not be downloaded"):
        open_checkpoint("org/name", revision=revision)


def test_a_cached_model_of_the_hub_opens_offline(offline_hub: Path) -> None:
    repository = offline_hub / "models--org--name"
    write_hf(repository / "snapshots" / COMMIT)
    for branch in ("main", "v2"):
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / branch).write_text(COMMIT)
    for revision in (None, "v2", COMMIT):
        assert open_checkpoint("org/name", revision=revision).names() == {"model.norm.weight"}
    with pytest.raises(CheckpointError, match="at revision 'v3'"):
        open_checkpoint("org/name", revision="v3")


def test_a_directory_named_like_a_hub_id_is_a_directory(
    offline_hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_hf(tmp_path / "org" / "name")
    assert open_checkpoint("org/name").path == Path("org/name")


def test_only_what_is_needed_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"}
    needed |= {"model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"}
    needed |= {"merges.txt", "vocab.json", "chat_template.jinja", "special_tokens_map.json"}
    others = {"README.md", "pytorch_model.bin", "consolidated.safetensors", "original/params.json", "onnx/model.onnx"}
    others |= {"original/model.safetensors", "model.gguf", "flax_model.msgpack", ".gitattributes"}

    def snapshot(repo_id: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        chosen = filter_repo_objects(
            sorted(needed | others), allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        assert (repo_id, revision, set(chosen)) == ("org/name", "v2", needed)
        return str(write_hf(tmp_path / "snapshot"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert open_checkpoint("org/name", revision="v2").path == tmp_path / "snapshot"
