# SPDX-License-Identifier: Apache-2.0
"""Fill a model of a named shape with random weights, drawn on its device."""

from collections.abc import Sequence

import torch


def fill_randomly(chunks: Sequence[torch.nn.Module], seed: int) -> None:
    """Draw matrices from a normal distribution of deviation 0.02; norms become 1 and biases 0."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=0.02)
                else:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)
