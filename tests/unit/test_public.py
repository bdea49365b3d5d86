# SPDX-License-Identifier: Apache-2.0
"""Check that ``import megarl`` is light, and that every public name is there."""

import subprocess
import sys

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
