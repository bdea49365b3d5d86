# SPDX-License-Identifier: Apache-2.0
"""Prove, in a vLLM worker, that weights and adapters come back from the engine's sleep bit by bit.

vLLM's sleep copies the weights to the host, LoRA slots included, and unmaps their memory; waking maps memory at the
same addresses again and copies them back. Adapters were lost on the way in some releases, so each tensor is digested
before and after.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from megarl.checkpoint_engine.buckets.splitmix import mix64
from megarl.checkpoint_engine.wire import listed
from megarl.errors import WeightSyncError

GIB = 2**30


class SleepExtension:
    """Part of the extension of vLLM's ``Worker``; its methods are called around the engine's sleep."""

    model_runner: Any
    rank: int
    _megarl_digests: dict[str, int]
    _megarl_needs: int

    def megarl_before_sleep(self) -> None:
        """Digest what the worker holds, and look how much memory is free."""
        self._megarl_digests = digests(held_tensors(self.model_runner))
        torch.cuda.empty_cache()
        self._megarl_needs = -torch.cuda.mem_get_info()[0]

    def megarl_after_sleep(self) -> int:
        """Return the bytes that sleeping made free."""
        self._megarl_needs += torch.cuda.mem_get_info()[0]
        return self._megarl_needs

    def megarl_before_wake(self) -> None:
        """Raise ``WeightSyncError`` if the GPU has no room for what must come back; vLLM would end its process."""
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        if free < self._megarl_needs:
            raise WeightSyncError(
                f"worker {self.rank} cannot wake: it needs {self._megarl_needs / GIB:.1f} GiB and {free / GIB:.1f} GiB "
                "of its GPU are free; the trainer keeps the rest. Make train.micro_batch_tokens or "
                "sampler.kv_cache_gib smaller"
            )

    def megarl_after_wake(self) -> int:
        """Compare what the worker holds with what it held; return the number of tensors.

        Raises:
            WeightSyncError: a tensor is missing or has other bits; names them.
        """
        now = digests(held_tensors(self.model_runner))
        if changed := [name for name, digest in self._megarl_digests.items() if now.get(name) != digest]:
            raise WeightSyncError(f"worker {self.rank} holds other values after its sleep in {listed(changed)}")
        return len(now)


def held_tensors(runner: Any) -> dict[str, torch.Tensor]:
    """Return all tensors of a model's modules by name: parameters, buffers, LoRA slots, but not the KV cache.

    Args:
        runner: vLLM's model runner.
    """
    cache = {tensor.untyped_storage().data_ptr() for tensor in _tensors(getattr(runner, "kv_caches", ()))}
    held: dict[str, torch.Tensor] = {}
    for prefix, module in runner.get_model().named_modules():
        public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        for name, value in (module._parameters | module._buffers | public).items():
            for number, tensor in enumerate(_tensors((value,))):
                if tensor.numel() and tensor.untyped_storage().data_ptr() not in cache:
                    held[f"{prefix}.{name}[{number}]"] = tensor
    return held


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """Return a digest of each tensor's bytes, formed where they are; tensors on ``meta`` have none."""
    found: dict[str, int] = {}
    on_gpu = {name: tensor.detach() for name, tensor in tensors.items() if tensor.is_cuda}
    if on_gpu:
        from megarl.checkpoint_engine.kernels.ranges import tensor_digests

        found |= zip(on_gpu, tensor_digests(list(on_gpu.values())).tolist(), strict=True)
    for name, tensor in tensors.items():
        if tensor.device.type == "cpu":
            found[name] = mix64(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists and tuples."""
    for value in values if isinstance(values, Iterable) and not isinstance(values, torch.Tensor | str) else ():
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
