# SPDX-License-Identifier: Apache-2.0
"""Make a few updates on batches of different sizes, and record what each one computed."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from megarl.model.megatron_model import MegatronModel
from megarl.model.step.packing import PackedBatch
from megarl.verify.inputs.samples import make_samples
from megarl.verify.reference.surrogate_loss import SurrogateLoss
from tests.helpers.models import SHAPE


def updates(
    model: MegatronModel, counts: Sequence[int], lr: float, *, base: bool = True
) -> Iterator[dict[str, torch.Tensor]]:
    """Make an update per batch of so many samples; yield its results by name, copied to the host.

    They are the logprobs of each sample, those of the base unless ``base`` is False, the gradients, their norm, and the
    updated matrices.
    """
    for step, count in enumerate(counts):
        batch = batch_of(model, step, count)
        found = _numbered("base logprobs", model.forward(batch, adapter=False)) if base else {}
        found |= _numbered("logprobs", model.forward(batch))
        model.forward_backward(batch, SurrogateLoss())
        found |= {f"gradient {name}": tensor.cpu().clone() for name, tensor in model.gradients().items()}
        found["norm"] = torch.as_tensor(model.optim_step(lr)["grad_norm"])
        yield found | {f"updated {n}": tensor.cpu().clone() for n, tensor in model.export_weights(adapter_only=True)}


def batch_of(model: MegatronModel, step: int, count: int) -> PackedBatch:
    """Return the batch of an update."""
    return model.pack(make_samples(count, SHAPE["vocab_size"], seed=step), np.full(count, 0.05))


def _numbered(name: str, parts: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
    return {f"{name} {number}": torch.from_numpy(part) for number, part in enumerate(parts)}
