# SPDX-License-Identifier: Apache-2.0
"""Test which CUDA graphs are captured, and which one a batch takes, with stand-ins for the two functions of vLLM."""

import sys
from types import ModuleType
from typing import Any

import pytest

from megarl.sampler.worker import lora_graphs


class Manager:
    """The part of vLLM's ``CudaGraphManager`` that is replaced."""

    def __init__(self, cases: list[int]) -> None:
        self.lora_capture_cases, self._max_lora_case = cases, max(cases)

    def _resolve_effective_loras(self, active: int) -> int:
        return min((case for case in self.lora_capture_cases if case >= active), default=self._max_lora_case)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    package, utils, runner = (ModuleType(f"vllm.v1.worker.gpu{end}") for end in ("", ".cudagraph_utils", ".runner"))
    utils.CudaGraphManager = type("Manager", (Manager,), dict(vars(Manager)))  # type: ignore[attr-defined]
    runner.get_lora_capture_cases = lambda *, lora: [0, lora + 1] if lora else [0]  # type: ignore[attr-defined]
    package.cudagraph_utils, package.model_runner = utils, runner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu", package)
    return package


def test_an_engine_with_lora_captures_graphs_with_lora_and_a_batch_without_takes_them(vllm: Any) -> None:
    lora_graphs.install()
    cases = vllm.model_runner.get_lora_capture_cases
    assert cases(lora=3) == [4] and cases(lora=0) == [0]
    manager = vllm.cudagraph_utils.CudaGraphManager
    assert [manager([4])._resolve_effective_loras(active) for active in (0, 1, 3)] == [4, 4, 4]
    assert [manager([0])._resolve_effective_loras(active) for active in (0,)] == [0]
    # Whoever asks for both gets both.
    assert [manager([0, 4])._resolve_effective_loras(active) for active in (0, 1)] == [0, 4]


def test_a_release_without_these_functions_captures_as_it_always_does(vllm: Any) -> None:
    del vllm.cudagraph_utils.CudaGraphManager._resolve_effective_loras
    vllm.cudagraph_utils.CudaGraphManager = type("Other", (), {})
    lora_graphs.install()
    assert vllm.model_runner.get_lora_capture_cases(lora=3) == [0, 4]
