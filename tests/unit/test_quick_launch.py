# SPDX-License-Identifier: Apache-2.0
"""Test what is remembered of a kernel's launches, with a stand-in for the kernel that Triton would compile."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.triton_support import quick_launch
from megarl.triton_support.quick_launch import QuickKernel


def fn(out, low, scale, rows, of_part, WIDTH, NORM):
    """Add rows."""


class Launches:
    """Stands for what ``triton.jit`` returns: records launches that Triton prepares, and those of compiled kernels."""

    def __init__(self, compiles: bool = True) -> None:
        self.fn, self.compiles, self.prepared, self.quick = fn, compiles, [], []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **settings: Any) -> Any:
            self.prepared.append((grid, arguments, settings))
            number = len(self.prepared)
            return _Compiled(number, self.quick) if self.compiles else None

        return launch


class _Compiled:
    """Stands for ``triton.compiler.CompiledKernel``."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, number: int, quick: list[Any]) -> None:
        self.number, self.quick = number, quick

    def run(self, x: int, y: int, z: int, stream: Any, *given: Any) -> None:
        """Launch it; the device of these tensors is -1, the CPU."""
        assert (stream, given[:5]) == ("stream of -1", ("function", "metadata", None, None, None))
        self.quick.append((self.number, (x, y, z), given[5:]))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *given: self.quick.append((self.number, grid, given, "by Triton"))


@pytest.fixture(autouse=True)
def device(monkeypatch):
    active = SimpleNamespace(get_current_stream=lambda device: f"stream of {device}")
    monkeypatch.setattr(quick_launch, "driver", SimpleNamespace(active=active))


@pytest.fixture
def tensors() -> SimpleNamespace:
    memory = torch.zeros(256)
    shift = -memory.data_ptr() // 4 % 4  # to the next multiple of 16 bytes
    return SimpleNamespace(
        out=memory[shift : shift + 32], low=memory[shift + 32 : shift + 64], odd=memory[shift + 33 :]
    )


def launch(kernel: QuickKernel, out: Any, low: Any, rows: int = 4, scale: float = 2.0, part: Any = None, **other: Any):
    """Launch it as a call of megarl's does, with a tuple among the arguments."""
    kernel[(rows, 2)](out, low, scale, rows, (low if part is None else part, 8), WIDTH=32, NORM=True, **other)


def test_the_second_launch_is_of_the_compiled_kernel_with_addresses_and_all_constants(tensors):
    kernel = QuickKernel(launches := Launches())
    launch(kernel, tensors.out, tensors.low, num_warps=4)
    launch(kernel, tensors.low, tensors.out, num_warps=4)
    assert len(launches.prepared) == 1 and launches.prepared[0][1][0] is tensors.out
    out, low = tensors.out.data_ptr(), tensors.low.data_ptr()
    assert launches.quick == [(1, (4, 2, 1), (low, out, 2.0, 4, (out, 8), 32, True))]


@pytest.mark.parametrize(
    "change", [{"rows": 5}, {"scale": 1.0}, {"num_warps": 8}, {"out": "bfloat16"}, {"part": "bfloat16"}]
)
def test_other_numbers_dtypes_or_settings_are_prepared_by_triton(tensors, change):
    kernel = QuickKernel(launches := Launches())
    given = {"out": tensors.out, "low": tensors.low, "num_warps": 4}
    launch(kernel, **given)
    changed = {name: tensors.out.bfloat16() if one == "bfloat16" else one for name, one in change.items()}
    for _ in range(2):
        launch(kernel, **given | changed)
    assert len(launches.prepared) == 2 and [number for number, *_ in launches.quick] == [2]


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_triton_calls_its_hooks_where_there_are_some(tensors, monkeypatch, hook):
    kernel = QuickKernel(launches := Launches())
    launch(kernel, tensors.out, tensors.low)
    monkeypatch.setattr(getattr(quick_launch.runtime, hook), "calls", [print])
    launch(kernel, tensors.out, tensors.low)
    monkeypatch.undo()
    [(number, grid, _, way)] = launches.quick
    assert (number, grid, way) == (1, (4, 2, 1), "by Triton")


@pytest.mark.parametrize("name", ["out", "low", "part"])
def test_tensors_that_are_not_aligned_are_always_prepared_by_triton(tensors, name):
    kernel = QuickKernel(launches := Launches())
    for _ in range(2):
        launch(kernel, **{"out": tensors.out, "low": tensors.low} | {name: tensors.odd})
    assert len(launches.prepared) == 2 and not launches.quick
    launch(kernel, tensors.out, tensors.low)
    launch(kernel, tensors.out, tensors.low)
    assert len(launches.prepared) == 3 and len(launches.quick) == 1


def test_nothing_is_remembered_of_the_interpreter_and_no_more_than_so_many_launches(tensors, monkeypatch):
    kernel = QuickKernel(launches := Launches(compiles=False))
    for _ in range(2):
        launch(kernel, tensors.out, tensors.low)
    assert len(launches.prepared) == 2
    monkeypatch.setattr(quick_launch, "MOST", 2)
    kernel = QuickKernel(launches := Launches())
    for rows in (1, 2, 3, 3, 1):
        launch(kernel, tensors.out, tensors.low, rows=rows)
    assert [number for number, *_ in launches.quick] == [3] and len(launches.prepared) == 4


def test_tensors_are_refused_among_the_constants(tensors):
    with pytest.raises(AssertionError, match="not given by name"):
        QuickKernel(Launches())[(1,)](tensors.out, tensors.low, 2.0, 4, (tensors.low, 8), WIDTH=tensors.out, NORM=True)
