# SPDX-License-Identifier: Apache-2.0
"""Run forward and backward passes of a packed batch on mcore's pipeline schedules."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megarl import progress
from megarl.loss.logprobs import token_logprobs
from megarl.model.layers.attention.core import PackedSequences
from megarl.model.layers.gpt import PackedGPTModel, inner_model
from megarl.model.step.micro_batch import MicroBatch
from megarl.model.step.stepper import Stepper
from megarl.parallel.groups import Groups

# Maps (chunk, micro-batch) to the chunk's output.
RunChunk = Callable[[Any, MicroBatch], torch.Tensor]


def feed(tokens_T: torch.Tensor, positions_T: torch.Tensor, packed: PackedSequences) -> dict[str, Any]:
    """Return the arguments of a chunk, from a micro-batch's tensors of these names."""
    return {
        "input_ids": tokens_T[None],
        "position_ids": positions_T[None],
        "attention_mask": None,
        "packed_seq_params": packed,
    }


def run_chunk(chunk: Any, item: MicroBatch) -> torch.Tensor:
    """Return a chunk's output for a micro-batch: on the last stage, hidden states ``[T, 1, hidden]``."""
    return chunk(**feed(item.tokens_T, item.positions_T, item.packed))


def set_training(chunks: list[Any], training: bool) -> None:
    """Switch chunks between training and evaluation.

    Chunks that are already there are skipped: the switch visits every module, and the device waits for milliseconds.
    """
    for chunk in chunks:
        if chunk.training is not training:
            chunk.train(training)


class PipelineStepper(Stepper):
    """Runs batches through this rank's model chunks. A chunk's output is its hidden states ``[T, 1, hidden]``."""

    def __init__(
        self,
        chunks: list[Any],
        groups: Groups,
        *,
        vocab_size: int,
        temperature: float,
        run: RunChunk = run_chunk,
        keep_logits_gib: float = 0.0,
    ) -> None:
        """Store what every pass needs.

        Args:
            chunks: model chunks, wrapped in DDP or not.
            groups, temperature, keep_logits_gib: see ``Stepper``.
            vocab_size: vocabulary size without padding.
            run: function that runs one chunk, as ``run_chunk`` does.
        """
        super().__init__(groups, temperature=temperature, keep_logits_gib=keep_logits_gib)
        self.chunks, self.run, self.vocab_size = chunks, run, vocab_size
        for chunk in chunks:
            inner_model(chunk).config.timers = self.clock

    def _run_items(self, items: list[MicroBatch], loss_function: Callable, *, forward_only: bool) -> list[dict]:
        iterators: list[Iterator[MicroBatch]] = [iter(items) for _ in self.chunks]
        return get_forward_backward_func()(
            forward_step_func=partial(_forward_step, run=self.run, loss_function=loss_function),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(items),
            # With variable_seq_lengths the stages exchange the real shapes.
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _logprobs(
        self, model: PackedGPTModel, item: MicroBatch, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute them; the output layer runs on the response tokens only."""
        hidden = model.tokens_hidden(output).index_select(0, item.response_R)
        weight = model.output_weight()
        return token_logprobs(
            hidden,
            weight,
            item.labels_R,
            deltas=model.output_deltas(output, item.response_R),
            temperature=self.temperature,
            group=self.groups.tensor if self.groups.topology.tensor > 1 else None,
            vocab_start=self.groups.tensor_rank * weight.shape[0],
            vocab_size=self.vocab_size,
            keep_bytes=self.keep_bytes,
            bitwise=getattr(model.config, "bitwise", False),
        )


def _forward_step(
    iterator: Iterator[MicroBatch],
    model: Any,
    *,
    run: Callable[[Any, MicroBatch], torch.Tensor],
    loss_function: Callable,
) -> tuple:
    """mcore's forward step: returns the chunk's output and the function that computes its loss."""
    progress.made()
    item = next(iterator)
    return run(model, item), partial(loss_function, model=inner_model(model), item=item)
