# SPDX-License-Identifier: Apache-2.0
"""Check that every listed operation is put in vLLM's place, with a stand-in for vLLM."""

import pkgutil
import sys
from types import ModuleType

import pytest

pytest.importorskip("triton")

from megarl.errors import UnsupportedError
from megarl.sampler.worker.bitwise_hooks import OPERATIONS, install


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Put modules and classes with the attributes that are replaced in vLLM's place."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    for operation in OPERATIONS.values():
        path, _, kind = operation.owner.partition(":")
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules:
                module = ModuleType(name)
                module.__path__ = []
                monkeypatch.setitem(sys.modules, name, module)
                if end > 1:
                    setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
        owner = sys.modules[path]
        if kind:
            if not hasattr(owner, kind):
                setattr(owner, kind, type(kind, (), {}))
            owner = getattr(owner, kind)
        for name in operation.names:
            setattr(owner, name, lambda *given: "vLLM's own")
    package = sys.modules["vllm"]
    package.__version__ = "0.26.1"
    return package


def test_every_operation_is_in_vllms_place(vllm: ModuleType) -> None:
    install()
    for operation in OPERATIONS.values():
        owner = pkgutil.resolve_name(operation.owner)
        assert all(getattr(owner, name) is operation.run for name in operation.names)


def test_another_release_is_refused(vllm: ModuleType) -> None:
    vllm.__version__ = "0.27.0"
    with pytest.raises(UnsupportedError, match=r"vLLM 0\.27\.0; supported is 0\.26 on CUDA"):
        install()


def test_a_place_that_vllm_lacks_is_refused_by_name(vllm: ModuleType) -> None:
    del pkgutil.resolve_name(OPERATIONS["swiglu"].owner).forward_native
    with pytest.raises(UnsupportedError, match=r"activation:SiluAndMul of vLLM 0\.26\.1 has no forward_native"):
        install()
