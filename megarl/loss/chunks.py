# SPDX-License-Identifier: Apache-2.0
"""One chunk of logits: what the log-probabilities and the entropy need of them, and their gradient.

By Triton kernels on CUDA, else by torch's own functions. The formulas are in ``megarl.loss.logprobs``.
"""

import torch

from megarl.triton_support import has_triton


def has_kernels(tensor: torch.Tensor) -> bool:
    """Whether the Triton kernels can take this tensor."""
    return tensor.is_cuda and tensor.dtype != torch.float64 and has_triton()


def chunk_sums(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
    """``[4, C]``: largest logit m, the label's logit (0 if elsewhere), sum of e^(l-m), of e^(l-m) (l-m).

    Args:
        logits: ``[C, V]``; written over unless ``has_kernels`` takes them.
        labels: each token's row of the shard, or -1 if it is elsewhere.
        temperature: the logits are divided by it.
    """
    if has_kernels(logits):
        from megarl.loss.kernels.softmax import softmax_sums

        return softmax_sums(logits, labels, temperature)
    logits = _divided(logits, temperature)
    label_logit = logits.gather(1, labels.clamp(min=0)[:, None]).squeeze(1) * (labels >= 0)
    largest = logits.amax(1)
    logits.sub_(largest[:, None])
    exps = logits.exp()
    # vecdot is a batched dot product: no third [C, V] array.
    return torch.stack([largest, label_logit, exps.sum(1), torch.linalg.vecdot(exps, logits)])


def logits_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    logsumexp: torch.Tensor,
    entropy: torch.Tensor,
    temperature: float,
    by_logprob: torch.Tensor | None,
    by_entropy: torch.Tensor | None,
) -> torch.Tensor:
    """``[C, V]`` gradient of the divided logits (see the module's docstring), in their dtype, written over them."""
    if has_kernels(logits):
        from megarl.loss.kernels.softmax import softmax_slope_

        return softmax_slope_(logits, labels, logsumexp, entropy, temperature, by_logprob, by_entropy)
    dtype, logits = logits.dtype, _divided(logits, temperature)
    logits.sub_(logsumexp[:, None])
    if by_entropy is None:
        assert by_logprob is not None  # backward leaves early when both are
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
    """Logits over temperature in float32 (or float64): memory that the caller may write into."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits if temperature == 1.0 else logits.div_(temperature)
