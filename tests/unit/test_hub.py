# SPDX-License-Identifier: Apache-2.0
"""Test ``model.path`` as the id of a model on the hub: from the cache, from a hub, and refused by name."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megarl.hub import is_hub_id, local_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
RECIPE = Path(__file__).parents[2] / "examples/arithmetic/run.yaml"
NOWHERE = "http://127.0.0.1:9"  # nothing listens there
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 48, "intermediate_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 128,
    "max_position_embeddings": 4096,
}  # fmt: skip


def ask(*command: str, **environment: str) -> subprocess.CompletedProcess:
    """Run Python in an environment of its own: ``huggingface_hub`` reads it once, when it is imported."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(
        [sys.executable, *command], env=kept | environment, capture_output=True, text=True, check=False, timeout=120
    )


def folder_of(model: str, **environment: str) -> subprocess.CompletedProcess:
    code = (
        "import sys\nfrom megarl.hub import local_model\nfrom megarl.errors import ConfigError\n"
        "try:\n    print(local_model(sys.argv[1]))\nexcept ConfigError as error:\n    sys.exit(str(error))\n"
    )
    return ask("-c", code, model, **environment)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a hub's home whose cache holds the model ``tiny/llama``, written by hand in the documented layout."""
    repository = tmp_path / "home" / "hub" / "models--tiny--llama"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "1").write_text(json.dumps(LLAMA))
    (snapshot / "config.json").symlink_to("../../blobs/1")
    return tmp_path / "home"


@pytest.mark.parametrize("online", [{"HF_ENDPOINT": NOWHERE}, {"HF_HUB_OFFLINE": "1"}])
def test_a_cached_model_needs_no_network(home: Path, online: dict[str, str]) -> None:
    found = folder_of("tiny/llama", HF_HOME=str(home), **online)
    assert found.stdout.strip() == str(home / "hub" / "models--tiny--llama" / "snapshots" / COMMIT), found.stderr


def test_a_recipe_may_name_a_model_of_the_hub(home: Path) -> None:
    command = ["-m", "megarl.cli.main", "config", str(RECIPE), "--changed", "model.path=tiny/llama"]
    shown = ask(*command, HF_HOME=str(home), HF_ENDPOINT=NOWHERE)
    assert (shown.returncode, "path: tiny/llama" in shown.stdout) == (0, True), shown.stderr
    command[-1] = "model.path=tiny/lama"
    refused = ask(*command, HF_HOME=str(home), HF_ENDPOINT=NOWHERE)
    assert refused.returncode == 2
    assert "megarl: model.path is 'tiny/lama', which is not a folder and cannot be loaded from the" in refused.stderr
    assert "check the id, the network and your access to the model (HF_TOKEN)" in refused.stderr


def test_without_network_by_choice_the_message_says_so(home: Path) -> None:
    refused = folder_of("tiny/lama", HF_HOME=str(home), HF_HUB_OFFLINE="1")
    assert "model.path is 'tiny/lama', which is not a folder; the hub's cache does not hold" in refused.stderr
    assert "HF_HUB_OFFLINE=1 forbids to download it; give a local" in refused.stderr


FILES = {
    "config.json": json.dumps(LLAMA).encode(),
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "tokenizer.model": b"pieces",
    "chat_template.jinja": b"template",
    "merges.txt": b"a b",
    "pytorch_model.bin": b"the same weights, by pickle",
    "consolidated.safetensors": b"the same weights again",
    "README.md": b"words",
    "original/params.json": b"{}",
}


class Hub(BaseHTTPRequestHandler):
    """The three addresses of the hub's API that a download asks."""

    def do_GET(self) -> None:
        self._answer(send_body=True)

    def do_HEAD(self) -> None:
        self._answer(send_body=False)

    def _answer(self, send_body: bool) -> None:
        path = self.path.partition("?")[0]
        asked = path.partition(f"/tiny/llama/resolve/{COMMIT}/")[2]
        body = FILES.get(asked)
        if path.startswith("/api/models/tiny/llama/tree/"):
            entries = [{"type": "file", "path": name, "size": len(x), "oid": "0" * 40} for name, x in FILES.items()]
            body = json.dumps(entries).encode()
        elif path.startswith("/api/models/tiny/llama"):
            body = json.dumps({"id": "tiny/llama", "sha": COMMIT, "siblings": []}).encode()
        self.send_response(200 if body is not None else 404)
        body = body or b"{}"
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.send_header("ETag", f'"{hash(asked) & 0xFFFF:040x}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if send_body:
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_weights_configs_and_tokenizer_are_downloaded_and_nothing_else(tmp_path: Path, endpoint: str) -> None:
    home = tmp_path / "home"
    found = folder_of("tiny/llama", HF_HOME=str(home), HF_ENDPOINT=endpoint)
    assert found.returncode == 0, found.stderr
    folder = Path(found.stdout.strip())
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer.model", "chat_template.jinja"}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: FILES[name] for name in names | {"merges.txt"}
    }
    again = folder_of("tiny/llama", HF_HOME=str(home), HF_HUB_OFFLINE="1")
    assert Path(again.stdout.strip()) == folder, again.stderr


def test_python_and_the_other_commands_take_an_id_too(home: Path) -> None:
    code = (
        "from megarl.bench.training.settings import parse_settings\n"
        "from megarl.hub import local_section\n"
        "print(local_section('tiny/llama').path)\n"
        "print(local_section({'path': 'tiny/llama', 'dtype': 'float32'}).dtype)\n"
        "print(parse_settings('tiny/llama').model)\n"
    )
    said = ask("-c", code, HF_HOME=str(home), HF_HUB_OFFLINE="1")
    folder = home / "hub" / "models--tiny--llama" / "snapshots" / COMMIT
    assert said.stdout.split() == [str(folder), "float32", str(folder)], said.stderr
    refused = ask("-m", "megarl.cli.main", "verify", "tiny/lama", "--matrix", HF_HOME=str(home), HF_HUB_OFFLINE="1")
    assert refused.returncode == 2 and "HF_HUB_OFFLINE=1 forbids to download it" in refused.stderr


def test_a_folder_is_a_folder_even_if_its_name_could_be_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny" / "llama").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert local_model("tiny/llama") == str(tmp_path / "tiny" / "llama")
    assert local_model("no/such/folder") == str(tmp_path / "no/such/folder")
    assert is_hub_id("Qwen/Qwen3-0.6B")
    assert not is_hub_id("rows/train.jsonl") and not is_hub_id("/a/b") and not is_hub_id("./a") and not is_hub_id("a")
