# SPDX-License-Identifier: Apache-2.0
"""Compute the pointwise parts of a layer for the ``local`` back end. On CUDA, torch.compile makes each one kernel.

As separate torch operations they take most of a small model's time on a GPU, because each reads and writes a whole
activation. On a CPU, in float32, and where torch.compile does not work, they run uncompiled. Those with a Triton kernel
of megarl's own are in ``kernels``.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import apply_rotary_pos_emb

from megarl.model.layers.regions import traced
from megarl.triton_support import has_triton

_HAS_TRITON = has_triton()  # looked up here, because torch.compile cannot trace it


def compile_on_cuda(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Compile a function when it first sees 16-bit tensors on CUDA. The tensors' first dimension is the tokens'."""
    compiled: Callable[..., torch.Tensor] | None = None
    broken = False

    @functools.wraps(function)
    def call(*args: Any) -> torch.Tensor:
        """Call ``function``, compiled where that is worth it. A compiler's exception becomes one warning."""
        nonlocal compiled, broken
        if broken or not wants_compilation(args[0]):
            return function(*args)
        from torch._dynamo import maybe_mark_dynamic
        from torch._dynamo.exc import TorchDynamoException

        compiled = compiled or torch.compile(function)
        for tensor in args:
            if isinstance(tensor, torch.Tensor) and tensor.ndim > 1:
                maybe_mark_dynamic(tensor, 0)
        try:
            return compiled(*args)
        except TorchDynamoException as error:
            broken = True
            warnings.warn(f"torch.compile of {function.__name__} failed, it runs uncompiled: {error}")
            return function(*args)

    return call


def wants_compilation(tensor: torch.Tensor) -> bool:
    """Return True if compiling is worth it: 16-bit tensors on CUDA. Float32 is for comparisons, not for speed.

    Inside a trace of torch.compile the answer is no: there the compiler sees the plain operations around it too.
    """
    return tensor.is_cuda and tensor.element_size() == 2 and not traced()


def has_kernels(tensor: torch.Tensor) -> bool:
    """Return True if there are Triton kernels for this tensor: 16 bits, on CUDA. torch.compile can trace it."""
    return tensor.is_cuda and tensor.element_size() == 2 and _HAS_TRITON


def wants_kernels(tensor: torch.Tensor) -> bool:
    """Return True if a function of this tensor should use one of megarl's Triton kernels, outside traces."""
    return has_kernels(tensor) and not traced()


@compile_on_cuda
def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square norm over the last dimension (Zhang and Sennrich, arXiv:1910.07467)."""
    return F.rms_norm(hidden, weight.shape, weight, eps)


def swiglu(gate_and_up: torch.Tensor) -> torch.Tensor:
    """``[..., 2 I] -> [..., I]``: silu of the first half times the second (Shazeer, arXiv:2002.05202)."""
    gate, up = gate_and_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@compile_on_cuda
def _rotate(states: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    cos, sin = angles.cos(), angles.sin()
    turned, passed = states[..., : angles.shape[-1]].float(), states[..., angles.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned.to(states.dtype), passed), dim=-1)


def rotate(states: torch.Tensor, angles: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotary position embedding (Su et al., arXiv:2104.09864), with the signature of mcore's fused function.

    Args:
        states: ``[T, 1, heads, head_dim]``.
        angles: ``[T, 1, 1, rotated]`` float32, ``rotated`` at most ``head_dim``.
        interleaved: must be False: no supported family reaches this function with neighbouring dimensions paired.
    """
    assert not interleaved
    return _rotate(states, angles)


def apply_rope(states: torch.Tensor, angles: torch.Tensor, config: Any, context: Any) -> torch.Tensor:
    """Rotate ``[T, 1, heads, head_dim]`` by ``angles``, as mcore does; in a trace of torch.compile by plain operations.

    Args:
        states, angles: see ``rotate``.
        config: the model's ``TransformerConfig``.
        context: group of the context-parallel ranks.
    """
    if traced():
        return rotate(states, angles)
    return apply_rotary_pos_emb(states, angles, config=config, cp_group=context)


class SwiGLU(torch.nn.Module):
    """``swiglu`` as the activation module of an mcore MLP."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, gate_and_up: torch.Tensor) -> torch.Tensor:
        """``[..., 2 I] -> [..., I]``."""
        return swiglu(gate_and_up)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return an empty dict: mcore's MLP asks every submodule for one."""
        return {}
