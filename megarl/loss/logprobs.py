# SPDX-License-Identifier: Apache-2.0
"""Compute the log-probability of each label and the entropy from hidden states, without ever holding all logits.

Shape letters: T tokens, H hidden size, V rows of this rank's vocabulary shard, C tokens of a chunk.

With logits ``l = hidden @ weight.T / temperature``, ``p = softmax(l)`` and ``S = -sum_j p_j log p_j``:

    logprob = l[label] - logsumexp(l)        d logprob / d l_j = [j == label] - p_j
                                             d S / d l_j       = -p_j (log p_j + S)

The forward keeps two numbers per token (logsumexp and entropy). The backward recomputes the logits of each chunk. This
costs one more matmul and saves ``T x V`` floats: 37 GiB for 65,536 tokens of a vocabulary of 152k. If the caller allows
the memory for them, the forward keeps its logits instead, in the weight's dtype, and the backward overwrites them with
their gradient.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megarl.errors import LossInputError
from megarl.loss import chunks
from megarl.loss.active_tokens import ActiveTokens
from megarl.loss.input_checks import check_delta, check_inputs

# Bytes of one chunk's float32 logits. CPU: from 32 MiB on, glibc maps fresh pages for every chunk; much smaller chunks
# read the weight too often (V=49k, H=576, bf16, one thread: forward + backward of 512 tokens take 0.41 s in chunks of
# 128 tokens, 0.50 s of 32, 0.64 s of 512, and 0.66 s with full logits). CUDA: 8,192 tokens on an H200 (V=152k, H=4096,
# bf16) take 163 ms in chunks of 64 tokens, 78 ms and 1 GiB of 512, 75 ms and 4 GiB of 2,048 (with full logits 45 ms and
# 14 GiB).
CHUNK_BYTES = {"cpu": 24 * 2**20, "cuda": 320 * 2**20}
# With the Triton kernels a chunk takes only the memory of its logits in the weight's dtype. Longer chunks use the GPU
# better in the product with the weight, whose result is only [C, H].
KERNEL_CHUNK_BYTES, KERNEL_CHUNK_MULTIPLE = 1280 * 2**20, 256

_Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _Shard:
    """This rank's part of the vocabulary, and the chunking."""

    temperature: float
    group: dist.ProcessGroup | None
    start: int
    rows: int  # without padding
    chunk: int
    keep: bool  # the logits for the backward pass
    bitwise: bool = False

    @property
    def divisor(self) -> float:
        """Return what the logits of ``_logits`` are still to be divided by."""
        return 1.0 if self.bitwise else self.temperature


def token_logprobs(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    labels_T: torch.Tensor,
    *,
    deltas: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    chunk_tokens: int | None = None,
    keep_bytes: int = 0,
    bitwise: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the logprobs of ``labels_T`` under ``softmax(hidden_TH @ weight_VH.T / temperature)``, and the entropy.

    A chunk's logits are computed in the weight's dtype, as in Hugging Face and vLLM, and then converted to float32.
    Gradients flow through both results, to ``hidden_TH`` and, if it requires one, to ``weight_VH``. Tokens whose
    incoming gradient is 0 (clipped, or of a group with equal rewards) cost nothing in the backward pass.

    With ``group`` every rank calls this with the same hidden states and labels and its own rows of the weight, and gets
    the same results. **The gradient of the hidden states is then this rank's partial sum.** The caller sums it over the
    group (mcore's ``copy_to_tensor_model_parallel_region`` does). The incoming gradient must be the same on all ranks
    of the group. The weight's gradient is complete.

    Args:
        hidden_TH: ``[T, H]``, in the weight's dtype.
        weight_VH: ``[V, H]``, this rank's rows of the output layer: global ids ``vocab_start .. vocab_start + V``.
        labels_T: ``[T]`` int64 global ids, each below ``vocab_size``.
        deltas: low-rank products of an adapter, to add to the logits: inputs ``[T, r]`` and this rank's rows ``[V,
            r]``, in the weight's dtype. Their gradients are like those of the hidden states and of the weight.
        temperature: divisor of the logits.
        group: the ranks that share the vocabulary. None: this rank holds all of it.
        vocab_start: global id of ``weight_VH[0]``.
        vocab_size: size of the vocabulary without padding. Ids from it on have probability 0. Default (without
            ``group``): no padding.
        chunk_tokens: tokens per chunk. Default: as many as fit ``CHUNK_BYTES``.
        keep_bytes: if a gradient is needed and all logits of the shard take at most this many bytes, they are kept for
            it.
        bitwise: compute float32 logits and logprobs with the sampler's kernels (``model.numerics: bitwise``); without
            ``group`` and ``deltas``.

    Returns:
        logprobs ``[T]`` and entropy ``[T]`` in nats, both float32 (float64 if the weight is).

    Raises:
        LossInputError: shapes, dtypes, labels or settings do not fit.
    """
    rows = weight_VH.shape[0] if weight_VH.ndim == 2 else 0
    if vocab_size is None and group is not None:
        raise LossInputError("vocab_size is None with a group; give the size of the whole vocabulary without padding")
    vocab_size = vocab_start + rows if vocab_size is None else vocab_size
    if bitwise and (group is not None or deltas):
        raise LossInputError("bitwise is true with a group or deltas; supported is a whole vocabulary without adapter")
    check_inputs(hidden_TH, weight_VH, labels_T, temperature, vocab_size)
    for inputs, factor in deltas:
        check_delta(inputs, factor, hidden_TH, weight_VH)
    if chunk_tokens is None:
        chunk_tokens = _chunk_tokens(hidden_TH, max(rows, 1), 4 if bitwise else hidden_TH.element_size())
    if chunk_tokens < 1:
        raise LossInputError(f"chunk_tokens is {chunk_tokens}; it must be at least 1")
    real = min(max(vocab_size - vocab_start, 0), rows)
    factors = [hidden_TH, weight_VH, *(tensor for pair in deltas for tensor in pair)]
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in factors)
    size = 4 if bitwise else hidden_TH.element_size()
    keep = wanted and len(hidden_TH) * real * size <= keep_bytes
    shard = _Shard(temperature, group, vocab_start, real, chunk_tokens, keep, bitwise)
    return _TokenLogprobs.apply(labels_T, shard, *factors)


def _chunk_tokens(hidden: torch.Tensor, rows: int, size: int) -> int:
    if not chunks.has_kernels(hidden):
        return max(16, CHUNK_BYTES.get(hidden.device.type, CHUNK_BYTES["cpu"]) // (4 * rows))
    tokens = KERNEL_CHUNK_BYTES // (size * rows)
    return max(16, tokens - tokens % KERNEL_CHUNK_MULTIPLE or tokens)


class _TokenLogprobs(torch.autograd.Function):
    """Autograd function. ``factors`` alternates inputs and weights; the logits are the sum of their products."""

    @staticmethod
    def forward(ctx: Any, labels: torch.Tensor, shard: _Shard, *factors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.logits = [] if shard.keep else None
        local = _local_sums(_real_rows(_pairs(factors), shard), labels, shard, ctx.logits)
        label_logit, logsumexp, entropy = _combine(local, shard.group)
        ctx.save_for_backward(labels, logsumexp, entropy, *factors)
        ctx.shard = shard
        return label_logit - logsumexp, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """Map the gradients of logprobs and entropy, ``[R]`` each or None, to one gradient per factor, in its shape."""
        labels, logsumexp, entropy, *factors = ctx.saved_tensors
        given = [gradient for gradient in gradients if gradient is not None]
        if not given:
            return (None,) * (2 + len(factors))
        shard, temperature = ctx.shard, ctx.shard.temperature
        # The logits of the forward pass; the loop below overwrites them, so a second backward pass must not use them.
        kept, ctx.logits = ctx.logits, None
        # All that needs no number of active tokens is done before the host waits for it.
        rows_of = _local_labels(labels, shard)
        scaled = [None if gradient is None else gradient / temperature for gradient in gradients]
        pairs, needed = _pairs(factors), _pairs(ctx.needs_input_grad[2:])
        real = _real_rows(pairs, shard)
        # A row for each active token is written below, unless this shard has no logits.
        empty = torch.empty if shard.rows else torch.zeros
        sums = [
            (
                empty(inputs.shape, dtype=inputs.dtype, device=inputs.device) if for_inputs else None,
                torch.zeros_like(weight, dtype=logsumexp.dtype) if for_weight else None,
            )
            for (inputs, weight), (for_inputs, for_weight) in zip(pairs, needed, strict=True)
        ]
        active = ActiveTokens(given, None if kept is None else shard.chunk)
        for part, logits in _active_logits(real, active, shard, kept):
            label, total, spread = (active.of(tensor, part) for tensor in (rows_of, logsumexp, entropy))
            by_logprob, by_entropy = (None if one is None else active.of(one, part) for one in scaled)
            slope = chunks.logits_gradient(logits, label, total, spread, shard.divisor, by_logprob, by_entropy)
            slope = slope.to(real[0][0].dtype)
            for (inputs, rows), (input_sum, weight_sum) in zip(real, sums, strict=True):
                if input_sum is not None:
                    torch.mm(slope, rows, out=input_sum[part])
                if weight_sum is not None:
                    weight_sum[: len(rows)] += slope.T @ active.of(inputs, part)
        results: list[torch.Tensor | None] = []
        for (inputs, weight), (input_sum, weight_sum) in zip(pairs, sums, strict=True):
            results.append(None if input_sum is None else active.spread(input_sum[: active.count], inputs))
            results.append(None if weight_sum is None else weight_sum.to(weight.dtype))
        return None, None, *results


def _pairs(flat: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _real_rows(pairs: Sequence[_Pair], shard: _Shard) -> list[_Pair]:
    """Return the products without the padding rows of their weights."""
    return [(inputs, weight[: shard.rows]) for inputs, weight in pairs]


def _logits(pairs: Sequence[_Pair], tokens: torch.Tensor | slice, shard: _Shard) -> torch.Tensor:
    """Return ``[C, V]`` logits in fresh memory, to be divided by ``shard.divisor``.

    They are in the weight's dtype, before the division by the temperature; bitwise ones in float32, after it.
    """
    (inputs, weight), *others = pairs
    if shard.bitwise:
        return chunks.bitwise_logits(inputs[tokens], weight, shard.temperature)
    logits = inputs[tokens] @ weight.T
    for inputs, weight in others:
        logits.addmm_(inputs[tokens], weight.T)
    return logits


def _active_logits(
    pairs: Sequence[_Pair], active: ActiveTokens, shard: _Shard, kept: list[torch.Tensor] | None
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield chunks of ``(slice of the active tokens, their logits)``. The caller may overwrite the logits.

    ``kept`` are the logits of every chunk of all tokens, which are emptied; None: the logits are recomputed.
    """
    if not shard.rows:
        return
    if kept is not None:
        yield from active.kept_parts(kept)
    else:
        for part in active.parts(shard.chunk):
            yield part, _logits(pairs, active.tokens(part), shard)


def _local_labels(labels: torch.Tensor, shard: _Shard) -> torch.Tensor:
    """Return each label's row in this rank's shard, or -1 if it is in another one."""
    row = labels - shard.start
    return torch.where((row >= 0) & (row < shard.rows), row, -1)


def _local_sums(
    pairs: Sequence[_Pair], labels: torch.Tensor, shard: _Shard, kept: list[torch.Tensor] | None
) -> torch.Tensor:
    """Return ``[4, T]`` sums over this shard, as ``chunks.chunk_sums`` defines them.

    Adds each chunk's logits to ``kept``.
    """
    dtype = torch.promote_types(pairs[0][0].dtype, torch.float32)
    sums = torch.zeros(4, len(labels), dtype=dtype, device=labels.device)
    # Stays this value if the shard holds only padding. It is finite, so that 0 * (m - M) is 0.
    sums[0] = torch.finfo(dtype).min
    if not shard.rows:
        return sums
    for start in range(0, len(labels), shard.chunk):
        part = slice(start, start + shard.chunk)
        logits = _logits(pairs, part, shard)
        if kept is not None:
            kept.append(logits)
            # Only the kernels leave the logits unchanged.
            logits = logits if shard.bitwise or chunks.has_kernels(logits) else logits.clone()
        sum_up = chunks.bitwise_sums if shard.bitwise else chunks.chunk_sums
        sums[:, part] = sum_up(logits, _local_labels(labels[part], shard), shard.divisor)
    return sums


def _combine(local: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Combine the group's shards into label logit, logsumexp and entropy, each ``[T]``, with two collectives."""
    largest, label_logit, total, moment = local.unbind()
    if group is not None:
        shard_largest, largest = largest, largest.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shift = shard_largest - largest
        scale = shift.exp()
        sums = torch.stack([label_logit, total * scale, (moment + total * shift) * scale])
        dist.all_reduce(sums, group=group)
        label_logit, total, moment = sums.unbind()
    log_total = total.log()
    return label_logit, largest + log_total, log_total - moment / total
