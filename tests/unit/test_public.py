# SPDX-License-Identifier: Apache-2.0
"""Check that ``import megarl`` is light, and that every public name is there."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import megarl


def test_importing_megarl_loads_no_heavy_library():
    heavy = {"torch", "transformers", "megatron", "vllm", "ray"}
    program = f"import megarl, sys; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


def test_the_controller_imports_neither_megatron_nor_vllm() -> None:
    """They cost seconds before the first actor begins to start; only ranks and engines need them."""
    program = (
        "import megarl.launch.run, sys; print(sorted({'megatron', 'transformer_engine', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize("name", megarl.__all__)
def test_a_public_name_is_documented(name):
    thing = getattr(megarl, name)
    assert name == "__version__" or thing.__doc__


def test_an_unknown_name_says_what_there_is():
    with pytest.raises(AttributeError, match="has no attribute 'Megatron'; it has MegatronModel"):
        megarl.Megatron  # noqa: B018


@pytest.mark.parametrize(
    "package", [path.parent for path in Path(megarl.__file__).parent.rglob("__init__.py")], ids=str
)
def test_no_public_name_is_hidden_by_a_module_of_the_same_name(package: Path) -> None:
    """An import of the module would make the name the module, for whoever imports the name afterwards."""
    tree = ast.parse((package / "__init__.py").read_text())
    assigned = [
        node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    names = ast.literal_eval(assigned[0].value) if assigned else []
    assert not [name for name in names if (package / f"{name}.py").exists() or (package / name).is_dir()]
