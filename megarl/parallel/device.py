# SPDX-License-Identifier: Apache-2.0
"""Run mcore without CUDA. On a CUDA host the functions here only pick the device.

Whatever the tensors' device, mcore asks ``torch.cuda`` for the current device, the random state and the streams. On a
CPU host those few functions are replaced by CPU versions. mcore's optimizers also name ``"cuda"`` literally and compare
``Tensor.type()`` with CUDA type names. ``cuda_names()`` translates both. It is entered only around optimizer calls,
because a ``TorchFunctionMode`` costs about 15% of a training step.
"""

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megarl.errors import ConfigError
from megarl.parallel import uneven
from megarl.parallel.gloo import register_gloo

CPU = torch.device("cpu")


def pick_device(requested: str, local_rank: int | None = None) -> torch.device:
    """Resolve ``train.device`` for this process, make it current and prepare mcore for it.

    Args:
        requested: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        local_rank: index of the GPU among those that this process sees; default: LOCAL_RANK, as torchrun sets it, else
            0.

    Raises:
        ConfigError: CUDA was requested and torch sees none; or CPU was requested on a CUDA host, where mcore would use
            CUDA.
    """
    available = torch.cuda.is_available()
    if requested == "cuda" and not available:
        raise ConfigError("train.device is 'cuda', but torch sees no GPU; use 'auto' or 'cpu', or check the driver")
    if requested == "cpu" and available:
        raise ConfigError(
            "train.device is 'cpu', but torch sees a GPU and mcore would use it; set CUDA_VISIBLE_DEVICES="
        )
    if available:
        index = int(os.environ.get("LOCAL_RANK", "0")) if local_rank is None else local_rank
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    _redirect_cuda_to_cpu()
    return CPU


def backend(device: torch.device) -> str:
    """Return the ``torch.distributed`` backend for a device: NCCL, or megarl's gloo, which is registered here."""
    return "nccl" if device.type == "cuda" else register_gloo()


class _Stream:
    """CPU version of ``torch.cuda.Stream``. Work on a CPU is synchronous, so waits return at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> "_Event":
        return event or _Event()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0


class _Event:
    """CPU version of ``torch.cuda.Event``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _CpuTorch:
    """Replaces ``torch`` inside one mcore module whose hot path creates tensors with ``device="cuda"``."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name not in ("zeros", "ones", "empty", "full", "tensor"):
            return value

        def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
            return value(*args, **{key: given for key, given in kwargs.items() if key != "device"})

        return on_cpu


def _redirect_cuda_to_cpu() -> None:
    """Replace the ``torch.cuda`` functions that mcore calls by CPU versions. Idempotent."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel import random as mcore_random
    from megatron.core.transformer.moe import token_dispatcher

    def get_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    cuda: Any = torch.cuda
    stream = _Stream()
    answers: dict[str, Any] = {
        "current_device": lambda: CPU,
        "synchronize": lambda device=None: None,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": lambda stream=None: contextlib.nullcontext(),
        "set_stream": lambda stream: None,
        "empty_cache": lambda: None,
        "manual_seed": torch.manual_seed,
        "get_rng_state": get_state,
        "set_rng_state": set_state,
        "Stream": _Stream,
        "Event": _Event,
    }
    for name, answer in answers.items():
        setattr(cuda, name, answer)
    schedules.torch = _CpuTorch()
    token_dispatcher.maybe_move_tensor_to_cpu = _to_host
    uneven.install(mappings)
    # On a CPU the "GPU" state that mcore forks is the CPU's, so mcore's warning that it changed says nothing.
    logging.getLogger(mcore_random.__name__).setLevel(logging.ERROR)
    mcore_random._get_cuda_rng_state = get_state
    mcore_random._set_cuda_rng_state = set_state


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Convert to numpy where asked: mcore converts only GPU tensors, but then expects arrays."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


class _CudaNames(TorchFunctionMode):
    """Maps ``device="cuda"`` to the CPU and reports CPU tensor types under their CUDA names."""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = CPU
        return func(*args, **kwargs)


def cuda_names() -> contextlib.AbstractContextManager:
    """Return a context in which mcore code that names ``"cuda"`` runs on a CPU host; on a CUDA host it does nothing."""
    return contextlib.nullcontext() if torch.cuda.is_available() else _CudaNames()
