# SPDX-License-Identifier: Apache-2.0
"""Write the graph that torch.compile makes of a layer, with the forward and the backward pass in one.

The graph is AOTAutograd's joint graph, before it is cut into the two passes: the operations that a compiler gets.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from functorch.compile import default_partition, make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from megarl.model.layers.gpt import PackedGPTModel
from megarl.model.step import compiled


def write_graph(chunks: Sequence[PackedGPTModel], step: Callable[[], None], file: Path) -> None:
    """Compile the layers anew, run a training step, and write the joint graph of the last layer as Python.

    Args:
        chunks: the model's chunks. Afterwards their layers run as the graph says, without the kernels of a compiler.
        step: runs forward and backward pass of those chunks.
        file: file to write.
    """
    graphs: list[str] = []

    def partition(joint: torch.fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
        graphs.append(joint.print_readable(print_output=False))
        return default_partition(joint, inputs, **settings)

    kept, compiled.BACKEND = compiled.BACKEND, aot_autograd(fw_compiler=_run, bw_compiler=_run, partition_fn=partition)
    torch._dynamo.reset()
    try:
        compiled.compile_layers(chunks, next(chunks[0].parameters()).device, direct=False)
        step()
    finally:
        compiled.BACKEND = kept
    file.write_text(graphs[-1] + "\n")


def _run(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    return make_boxed_func(graph.forward)
