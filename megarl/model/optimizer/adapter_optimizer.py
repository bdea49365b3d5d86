# SPDX-License-Identifier: Apache-2.0
"""Optimize an adapter by mcore's optimizer. Its state is read and written by tensor name."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from megarl.config import TrainConfig
from megarl.errors import UnsupportedError
from megarl.model.optimizer import optimizer_shards
from megarl.model.optimizer.coverage import GradientMeter
from megarl.model.optimizer.ddp import start_reductions
from megarl.model.optimizer.flat_part import flat_part
from megarl.model.optimizer.fused_adamw import use_fused_adamw
from megarl.model.optimizer.gradient_record import GradientRecord
from megarl.model.optimizer.tensor_part import TensorPart
from megarl.parallel.device import cuda_names
from megarl.parallel.mcore import finalize_gradients

MOMENTS = ("exp_avg", "exp_avg_sq")


def make_optimizers(
    chunks: list[Any], parameters: Mapping[str, list[tuple[str, torch.nn.Parameter]]], config: TrainConfig
) -> dict[str, "AdapterOptimizer"]:
    """Make one optimizer per adapter, over its parameters alone, so that an update changes no other adapter.

    Args:
        chunks: model chunks, wrapped by ``wrap_ddp`` with the same config.
        parameters: maps each adapter's name to this rank's ``(PEFT name, parameter)`` pairs.
        config: the ``train`` section.

    Raises:
        UnsupportedError: there are several adapters, and a setting under which mcore's buffers allow only one.
    """
    for setting in ("distributed_optimizer", "overlap_grad_reduce"):
        if len(parameters) > 1 and getattr(config, setting):
            raise UnsupportedError(
                f"train.{setting} is true with {len(parameters)} adapters ({', '.join(parameters)}); supported is "
                "false, or one adapter (frozen ones may be added to the model afterwards)"
            )
    every = [parameter for named in parameters.values() for _, parameter in named]
    made = {}
    for name, named in parameters.items():
        # mcore takes the parameters that require a gradient while the optimizer is made.
        for parameter in every:
            parameter.requires_grad_(False)
        for _, parameter in named:
            parameter.requires_grad_(True)
        made[name] = AdapterOptimizer(chunks, named, config)
    for parameter in every:
        parameter.requires_grad_(True)
    return made


class AdapterOptimizer:
    """AdamW on fp32 main weights, sharded by mcore.

    Attributes:
        reduced: True if the gradient buffers hold sums over ranks.
        coverage: which matrices, on all ranks, have had a gradient.
        reducing: True if the backward passes of this step are over and their reduction is under way. The caller sets
            it.

    Tensors that go in and out by name are whole: they are shaped like this rank's parameters, even where
    ``train.distributed_optimizer`` leaves each data-parallel rank only a part. Methods marked as collective then
    communicate over the data-parallel ranks.
    """

    def __init__(
        self, chunks: list[Any], parameters: list[tuple[str, torch.nn.Parameter]], config: TrainConfig
    ) -> None:
        """Build the optimizer.

        Args:
            chunks: model chunks, wrapped by ``wrap_ddp`` with the same config.
            parameters: this rank's ``(PEFT name, parameter)`` pairs.
            config: the ``train`` section.
        """
        self.chunks = chunks
        self.parameters = dict(parameters)
        self.distributed = config.distributed_optimizer
        self.max_norm = config.max_grad_norm
        self.reduced, self.reducing = False, False
        self._steps = 0
        dtype = chunks[0].config.params_dtype
        settings = OptimizerConfig(
            optimizer="adam",
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            adam_beta1=config.adam_beta1,
            adam_beta2=config.adam_beta2,
            adam_eps=config.adam_eps,
            params_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            use_distributed_optimizer=config.distributed_optimizer,
            overlap_param_gather=config.overlap_param_gather,
            clip_grad=config.max_grad_norm,
        )
        with cuda_names():
            self.optimizer = get_megatron_optimizer(settings, chunks, use_gloo_process_groups=False)
        mcores = optimizer_shards.parts_of(self.optimizer)
        use_fused_adamw(mcores)
        self._shards = optimizer_shards.shards_of(self.optimizer)
        with cuda_names():
            stacks = [stack for module in _modules(chunks, "expert_stacks") for stack in module.expert_stacks()]
            joins = [module.read_together() for module in _modules(chunks, "read_together")]
            self._parts = [flat_part(part, stacks, joins) or TensorPart(part) for part in mcores]
        for part in self._parts:
            self._shards |= optimizer_shards.moved(self._shards, part.places())
        self._meter = GradientMeter(self._parts, self.parameters, self._shards)
        self.coverage = GradientRecord(self._meter.names)

    def zero_grad(self) -> None:
        """Clear the gradient buffers."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        for part in self._parts:
            part.clear()
        self.reduced, self.reducing = False, False

    def reduce_gradients(self) -> None:
        """Sum the gradient buffers over DP, SP and tied ranks. Collective. Does nothing the second time in a step."""
        if not self.reduced:
            if not self.reducing:
                start_reductions(self.chunks)
            finalize_gradients(self.chunks)
            self.reduced = True

    def step(self, lr: float) -> dict[str, float]:
        """Reduce the gradients over ranks, clip them, update the weights, clear the buffers.

        The host waits for the device once, for the measurements, after everything is launched.

        Args:
            lr: learning rate of this update.

        Returns:
            See ``GradientRecord.take``; of the adapter's matrices on all ranks.

        Raises:
            GradientError: the norm is not finite. Nothing was updated, and the gradient is cleared.
        """
        self.reduce_gradients()
        with cuda_names(), torch.no_grad():
            for part in self._parts:
                part.prepare()
            measured = self._meter.measure(next(self.chunks[0].parameters()).device)
            for part in self._parts:
                part.update(measured[0], lr, self.max_norm)
        self.zero_grad()
        metrics = self.coverage.take(measured)
        self._steps += 1
        return metrics

    def finish_param_gather(self) -> None:
        """Wait until the model holds the last update. Collective.

        With ``train.overlap_param_gather`` the update otherwise reaches the model only in the next forward pass.
        """
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Map PEFT names to this rank's float32 gradients (summed over ranks by ``reduce_gradients``). Collective."""
        if self.distributed:
            optimizer_shards.gather_gradients(self.chunks)
        return {name: parameter.main_grad for name, parameter in self.parameters.items()}

    def main_weights(self) -> dict[str, torch.Tensor]:
        """Map PEFT names to this rank's float32 main weights. Collective."""
        return self._whole({parameter: shard.main.data for parameter, shard in self._shards.items()})

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """Map ``exp_avg``/``exp_avg_sq`` to {PEFT name: this rank's moment}; zeros at first. Collective."""
        return {
            moment: self._whole({parameter: shard.moment(moment) for parameter, shard in self._shards.items()})
            for moment in MOMENTS
        }

    def _whole(self, parts: dict[torch.nn.Parameter, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.distributed:
            parts = optimizer_shards.gather_parts(self.chunks, self._shards, parts)
        return {name: parts[parameter] for name, parameter in self.parameters.items()}

    def steps(self) -> int:
        """Return the number of updates made."""
        return self._steps

    def restore(self, steps: int, main: dict[str, torch.Tensor], moments: dict[str, dict[str, torch.Tensor]]) -> None:
        """Set the whole state, and round the main weights into the model. Every rank keeps its own part.

        Args:
            steps: number of updates made.
            main: main weights, as ``main_weights()`` returns them.
            moments: moments, as ``moments()`` returns them.
        """
        self._steps = steps
        for name, parameter in self.parameters.items():
            parameter.data.copy_(main[name])
            if shard := self._shards.get(parameter):
                shard.main.data.copy_(shard.cut(main[name]))
                shard.set_state(steps, {moment: shard.cut(moments[moment][name]) for moment in MOMENTS})

    def start_anew(self) -> None:
        """Take the model's parameters as main weights (after an adapter was loaded); reset moments and steps."""
        weights = {name: parameter.data.float() for name, parameter in self.parameters.items()}
        zeros = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self.restore(0, weights, dict.fromkeys(MOMENTS, zeros))


def _modules(chunks: list[Any], method: str) -> Iterator[Any]:
    """Yield the modules that have a method by which they name matrices that one product reads."""
    return (module for chunk in chunks for module in chunk.modules() if hasattr(module, method))
