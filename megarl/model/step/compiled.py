# SPDX-License-Identifier: Apache-2.0
"""Compile a model's transformer layers with torch.compile, in place, and count what it compiles.

``module.compile()`` keeps the module: its parameters, their names and its hooks stay. All dense layers of a model share
one compilation, since nothing in a trace differs between them. The numbers of tokens and sequences are dynamic in it,
so that one compilation serves every packing. T is rounded up all the same: the compiler takes sizes of 0 and 1 for
constants, and kernels like multiples of 16. What remains is one compilation for each kind of pass (with or without
gradient, with or without adapter) and of layer.

Of a layer with experts, everything before the router is one compilation. The router and the dispatcher run uncompiled:
how many tokens an expert gets is known only while the layer runs. So do experts that are computed together
(``experts.grouped``); where they are not, an expert's MLP is one compilation that all experts share.

Transformer Engine's attention cannot be traced. What is before it and what is behind it are a compilation each then.

Where megarl's operations compute a layer whole, on one GPU (``layers.traced.layer.directly``), the compiler would get
nothing but them. They are called without it then, and only passes without adapter are compiled.
"""

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import counters

from megarl import progress
from megarl.errors import UnsupportedError
from megarl.model.layers.experts.packed import PackedExperts
from megarl.model.layers.gpt import PackedGPTModel
from megarl.model.layers.transformer_layer import PackedLayer
from megarl.triton_support import has_triton

logger = logging.getLogger(__name__)

# torch.compile's back end. Tests replace it by "aot_eager", which traces and differentiates but makes no kernels.
BACKEND: str | Callable[..., Any] = "inductor"
# Of inductor. A layer's code would check some 90 sizes and strides in each step, which takes the host 0.1 ms.
OPTIONS = {"size_asserts": False}
# Compilations of one function before torch gives up and runs it uncompiled: kinds of layers times kinds of passes.
LIMIT = 64
# Updates after which every kind of pass has run.
WARM_UP = 2


def compile_layers(chunks: Iterable[PackedGPTModel], device: torch.device, *, direct: bool = True) -> None:
    """Compile the layers of a model's chunks in place; they compile when they first run.

    Args:
        chunks: this rank's chunks, with their adapters.
        device: their device.
        direct: False to compile layers too that megarl's operations compute whole.

    Raises:
        UnsupportedError: the device's compiler is missing.
    """
    _check_compiler(device)
    if has_triton():
        # What a trace calls must be registered before.
        import megarl.model.layers.traced.before
        import megarl.model.layers.traced.behind
        import megarl.model.layers.traced.ops  # noqa: F401
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, LIMIT)
    # A compilation takes long, and must not look like a hang.
    if not callback_handler.start_callbacks:
        callback_handler.register_start_callback(_made)
        callback_handler.register_end_callback(_made)
    for layer in _layers(chunks):
        layer.compiles, layer.direct = True, direct
        layer.adapted = _adapted(layer)
        for place, linear in enumerate(layer.adapted):
            linear.place = place
        sparse = isinstance(layer.mlp, MoELayer)
        layer.in_parts = not layer.self_attention.core_attention.can_trace
        if layer.in_parts:
            _compile_parts(layer, ("before_attention", "joined" if sparse else "behind_attention"))
        elif sparse:
            _compile_parts(layer, ("attended",))
        else:
            layer.compile(**_how())
        for module in layer.mlp.modules() if sparse else ():
            if isinstance(module, PackedExperts):
                module.compiles, module.adapted = True, _adapted(module)
                experts = set(module.adapted)
                layer.adapted = [linear for linear in layer.adapted if linear not in experts]
                for expert in module.local_experts:
                    expert.compile(**_how(), dynamic=True)


def _compile_parts(layer: PackedLayer, methods: Iterable[str]) -> None:
    for name in methods:
        setattr(layer, name, torch.compile(getattr(layer, name), **_how()))


def _how() -> dict[str, Any]:
    """Return the arguments for torch.compile."""
    return {"backend": BACKEND, "options": OPTIONS} if BACKEND == "inductor" else {"backend": BACKEND}


def _adapted(module: torch.nn.Module) -> list[Any]:
    """Return the linears with adapters in a module."""
    return [each for each in module.modules() if "adapters" in each._modules]


def _check_compiler(device: torch.device) -> None:
    if BACKEND != "inductor":
        return
    if device.type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise UnsupportedError(
            "train.compile is true, which on a CPU needs a C++ compiler; install g++ or use train.compile=false"
        )
    if device.type == "cuda" and not has_triton():
        raise UnsupportedError(
            "train.compile is true, which on CUDA needs Triton; install it or use train.compile=false"
        )


def _layers(chunks: Iterable[PackedGPTModel]) -> Iterator[PackedLayer]:
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            assert isinstance(layer, PackedLayer)
            yield layer


@contextlib.contextmanager
def uncompiled(chunks: Iterable[PackedGPTModel]) -> Iterator[None]:
    """Run the layers as if they were not compiled, so that hooks see every module."""
    layers = [(layer, layer.compiles) for layer in _layers(chunks)]
    with torch.compiler.set_stance("force_eager"):
        for layer, _ in layers:
            layer.compiles = False
        try:
            yield
        finally:
            for layer, was in layers:
                layer.compiles = was


class CompilationCount:
    """Counts the graphs that torch.compile compiles in this process, update by update, and warns of late ones."""

    def __init__(self) -> None:
        self._before, self._updates = _compiled(), 0

    def read(self) -> int:
        """Return the number of compilations since the last call. Call it once per update."""
        new = _compiled() - self._before
        self._before += new
        self._updates += 1
        if new and self._updates > WARM_UP:
            logger.warning(
                "torch.compile compiled %d graphs in update %d; after the first %d there should be none. "
                "TORCH_LOGS=recompiles in the environment prints the reasons; train.compile=false avoids it",
                new, self._updates, WARM_UP,
            )  # fmt: skip
        return new


def _made(*args: Any) -> None:
    progress.made()


def _compiled() -> int:
    return counters["stats"]["unique_graphs"]
