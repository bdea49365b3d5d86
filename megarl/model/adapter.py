# SPDX-License-Identifier: Apache-2.0
"""Define what ``MegatronModel`` needs of an adapter. ``megarl.lora`` implements it and imports this module."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

from megarl.model.layers.gpt import PackedGPTModel
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


# A function that puts adapters on freshly built chunks. It takes (chunks, parsed config.json, groups) and returns one
# adapter, or several in order.
Attach = Callable[[list[PackedGPTModel], Mapping[str, Any], Groups], Adapter | Sequence[Adapter]]
