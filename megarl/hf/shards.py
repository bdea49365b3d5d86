# SPDX-License-Identifier: Apache-2.0
"""Spread the frozen base over data-parallel ranks, layer by layer (FSDP2, arXiv:2304.11277; torch's ``fully_shard``).

A layer's weights are gathered just before it computes, forward and backward, and dropped after. The embedding, the last
norm and the output layer stay whole on every rank, since the output layer is used outside of a forward pass. Adapters
are put on afterwards and stay whole too: their gradients are summed by ``ReplicatedOptimizer``.
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megarl.errors import UnsupportedError
from megarl.hf.network import Network


def shard_layers(network: Network, device: torch.device) -> None:
    """Shard every layer of the body over all ranks, and move each to the device as it is cut.

    Args:
        network: the model, on the CPU, without adapters.
        device: this rank's device.

    Raises:
        UnsupportedError: the body has no list of layers.
    """
    layers = max(
        (module for module in network.body.modules() if isinstance(module, torch.nn.ModuleList)), key=len, default=None
    )
    if not layers:
        raise UnsupportedError(
            f"train.shard_base is true, but {type(network.body).__name__} has no list of layers; set it to false"
        )
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    kept = {parameter for parameter in network.body.parameters() if not hasattr(parameter, "_local_tensor")}
    fully_shard(network.body, mesh=mesh, ignored_params=kept)
