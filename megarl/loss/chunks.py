# SPDX-License-Identifier: Apache-2.0
"""Compute sums over one chunk of logits, for logprobs and entropy, and the gradient of the logits.

Uses Triton kernels on CUDA, else torch's own functions. The formulas are in ``megarl.loss.logprobs``.
"""

import torch

from megarl.triton_support import has_triton


def has_kernels(tensor: torch.Tensor) -> bool:
    """Return True if the Triton kernels support this tensor."""
    return tensor.is_cuda and tensor.dtype != torch.float64 and has_triton()


def chunk_sums(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return ``[4, C]``: largest logit m, the label's logit (0 if elsewhere), sum of e^(l-m), sum of e^(l-m) (l-m).

    Args:
        logits: ``[C, V]``; overwritten unless ``has_kernels`` is True for them.
        labels: each token's row in this rank's shard, or -1 if it is in another one.
        temperature: divisor of the logits.
    """
    if has_kernels(logits):
        from megarl.loss.kernels.softmax import softmax_sums

        return softmax_sums(logits, labels, temperature)
    logits = _divided(logits, temperature)
    label_logit = logits.gather(1, labels.clamp(min=0)[:, None]).squeeze(1) * (labels >= 0)
    largest = logits.amax(1)
    logits.sub_(largest[:, None])
    exps = logits.exp()
    # vecdot is a batched dot product, which needs no third [C, V] array.
    return torch.stack([largest, label_logit, exps.sum(1), torch.linalg.vecdot(exps, logits)])


def bitwise_logits(inputs: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return ``[C, V]`` float32 logits divided by the temperature, with the sampler's bits."""
    from megarl.bitwise.blas import multiply
    from megarl.bitwise.kernels.logprobs import divide_

    logits = multiply(inputs, weight, dtype=torch.float32)
    return logits if temperature == 1.0 else divide_(logits, logits.new_full((len(logits),), temperature))


def bitwise_sums(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return what ``chunk_sums`` does, of ``bitwise_logits``, which stay as they are and are not divided again."""
    from megarl.bitwise.kernels.logprobs import row_sums

    largest, total, moment = row_sums(logits)
    label_logit = logits.gather(1, labels.clamp(min=0)[:, None]).squeeze(1) * (labels >= 0)
    return torch.stack([largest, label_logit, total, moment])


def logits_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    logsumexp: torch.Tensor,
    entropy: torch.Tensor,
    temperature: float,
    by_logprob: torch.Tensor | None,
    by_entropy: torch.Tensor | None,
) -> torch.Tensor:
    """Return the ``[C, V]`` gradient of the divided logits, in their dtype, written over them."""
    if has_kernels(logits):
        from megarl.loss.kernels.softmax import softmax_slope_

        return softmax_slope_(logits, labels, logsumexp, entropy, temperature, by_logprob, by_entropy)
    dtype, logits = logits.dtype, _divided(logits, temperature)
    logits.sub_(logsumexp[:, None])
    if by_entropy is None:
        assert by_logprob is not None  # backward returns early if both are None
        slope = logits.exp_().mul_(-by_logprob[:, None])
    else:
        probabilities = logits.exp()
        slope = logits.add_(entropy[:, None]).mul_(by_entropy[:, None])
        if by_logprob is not None:
            slope.add_(by_logprob[:, None])
        slope.mul_(probabilities).neg_()
    if by_logprob is not None:
        slope.scatter_add_(1, labels.clamp(min=0)[:, None], (by_logprob * (labels >= 0))[:, None])
    return slope.to(dtype)


def _divided(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Divide the logits by the temperature in float32 (or float64). The caller may overwrite the result."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits if temperature == 1.0 else logits.div_(temperature)
