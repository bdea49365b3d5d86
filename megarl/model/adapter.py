# SPDX-License-Identifier: Apache-2.0
"""Define what a trained model needs of an adapter and its optimizer; each back end implements both."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

from megarl.model.layers.gpt import PackedGPTModel
from megarl.model.optimizer.gradient_record import GradientRecord
from megarl.model.weights.sharded_tensor import ShardedTensor
from megarl.parallel.groups import Groups


class Adapter(Protocol):
    """Trainable parameters on a frozen model. ``megarl.lora.LoraAdapter`` documents each method."""

    @property
    def name(self) -> str: ...

    @property
    def trainable(self) -> bool: ...

    @property
    def dropout(self) -> float: ...

    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]: ...

    def tensors(self, values: Mapping[str, torch.Tensor] | None = None) -> list[ShardedTensor]: ...

    def activate(self) -> None: ...

    def activated(self) -> AbstractContextManager: ...

    def disabled(self) -> AbstractContextManager: ...

    def export(self) -> Iterator[tuple[str, torch.Tensor]]: ...

    def in_file(self, stream: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]: ...

    def merged(self, tensors: list[ShardedTensor]) -> list[ShardedTensor]: ...

    def adapted(self) -> set[str]: ...

    @property
    def unties(self) -> bool: ...

    def adapter_config(self) -> dict[str, Any]: ...

    def save(self, path: str | Path, experts: str = ...) -> None: ...

    def snapshot(self, experts: str = ...) -> Callable[[Path], None]: ...

    def read(self, path: str | Path) -> None: ...


class Optimizer(Protocol):
    """AdamW on an adapter's fp32 main weights. ``AdapterOptimizer`` documents each member."""

    reduced: bool
    reducing: bool
    coverage: GradientRecord

    def zero_grad(self) -> None: ...

    def reduce_gradients(self) -> None: ...

    def step(self, lr: float) -> dict[str, float]: ...

    def finish_param_gather(self) -> None: ...

    def gradients(self) -> dict[str, torch.Tensor]: ...

    def main_weights(self) -> dict[str, torch.Tensor]: ...

    def moments(self) -> dict[str, dict[str, torch.Tensor]]: ...

    def steps(self) -> int: ...

    def restore(
        self, steps: int, main: dict[str, torch.Tensor], moments: dict[str, dict[str, torch.Tensor]]
    ) -> None: ...

    def start_anew(self) -> None: ...


# A function that puts adapters on freshly built chunks. It takes (chunks, parsed config.json, groups) and returns one
# adapter, or several in order.
Attach = Callable[[list[PackedGPTModel], Mapping[str, Any], Groups], Adapter | Sequence[Adapter]]
