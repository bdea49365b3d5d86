"""mcore's optimizer over the adapter, with its state readable and writable by tensor name."""

import math
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megarl.config import TrainConfig
from megarl.errors import MegarlError
from megarl.parallel.device import cuda_names

MOMENTS = ("exp_avg", "exp_avg_sq")


class GradientError(MegarlError, FloatingPointError):
    """The gradient norm is not finite; the adapter was not updated."""


def wrap_ddp(chunks: list[Any]) -> list[DistributedDataParallel]:
    """Give each chunk mcore's gradient buffers (fp32) for its trainable parameters; DP ranks sum, not average."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=False
    )
    with cuda_names():
        return [DistributedDataParallel(chunk.config, settings, chunk) for chunk in chunks]


class AdapterOptimizer:
    """AdamW on fp32 main weights, through mcore."""

    def __init__(
        self, chunks: list[Any], parameters: list[tuple[str, torch.nn.Parameter]], config: TrainConfig
    ) -> None:
        """Build the optimizer.

        Args:
            chunks: wrapped by ``wrap_ddp``.
            parameters: ``(PEFT name, parameter)`` of this rank.
            config: the ``train`` section.
        """
        self.chunks = chunks
        self.parameters = dict(parameters)
        self.max_norm = config.max_grad_norm
        self.reduced = False
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
            use_distributed_optimizer=False,
            clip_grad=config.max_grad_norm,
        )
        with cuda_names():
            self.optimizer = get_megatron_optimizer(settings, chunks, use_gloo_process_groups=False)

    def zero_grad(self) -> None:
        """Clear the gradient buffers."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.reduced = False

    def reduce_gradients(self) -> None:
        """Sum the buffers over DP, SP and tied ranks, once; a collective."""
        if not self.reduced:
            finalize_model_grads(self.chunks, None)
            self.reduced = True

    def step(self, lr: float) -> float:
        """Reduce gradients over ranks, clip, update, clear.

        Args:
            lr: learning rate of this update.

        Returns:
            The gradient's global norm before clipping.

        Raises:
            GradientError: the norm is not finite; nothing was updated.
        """
        self.reduce_gradients()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with cuda_names(), torch.no_grad():
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())
            if not math.isfinite(norm):
                raise GradientError(f"the gradient norm is {norm}; the adapter was not updated")
            if self.max_norm > 0:
                for part in self._parts():
                    clip_grad_by_total_norm_fp32(part.get_parameters(), self.max_norm, norm)
            self.optimizer.step_with_ready_grads()
        self.zero_grad()
        return norm

    def gradients(self) -> dict[str, torch.Tensor]:
        """PEFT name -> this rank's float32 gradient buffer (summed over ranks by ``reduce_gradients``)."""
        return {name: parameter.main_grad for name, parameter in self.parameters.items()}

    def main_weights(self) -> dict[str, torch.Tensor]:
        """PEFT name -> this rank's float32 main weights."""
        return {name: self._main(parameter).data for name, parameter in self.parameters.items()}

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """``exp_avg``/``exp_avg_sq`` -> PEFT name -> this rank's moment; zeros before the first step."""
        inner = self._inner_of()
        found: dict[str, dict[str, torch.Tensor]] = {moment: {} for moment in MOMENTS}
        for name, parameter in self.parameters.items():
            main = self._main(parameter)
            state = inner[main].state[main]
            for moment in MOMENTS:
                found[moment][name] = state[moment] if moment in state else torch.zeros_like(main.data)
        return found

    def steps(self) -> int:
        """Updates made so far."""
        for inner in self._inner_optimizers():
            for group in inner.param_groups:
                if "step" in group:
                    return int(group["step"])
                for main in group["params"]:
                    if "step" in inner.state[main]:
                        return int(inner.state[main]["step"])
        return 0

    def restore(self, steps: int, moments: dict[str, dict[str, torch.Tensor]]) -> None:
        """Set the state of every parameter; main weights are set through ``main_weights`` and ``sync_model``.

        Args:
            steps: updates made so far.
            moments: as ``moments()`` returns them.
        """
        inner = self._inner_of()
        for name, parameter in self.parameters.items():
            main = self._main(parameter)
            owner = inner[main]
            state = {moment: moments[moment][name].clone() for moment in MOMENTS}
            if not any("step" in group for group in owner.param_groups) and isinstance(owner, torch.optim.AdamW):
                # One tensor per parameter: a shared one would count every parameter's step and bend Adam silently.
                state["step"] = torch.tensor(float(steps))
            owner.state[main] = state
        for optimizer in self._inner_optimizers():
            if not isinstance(optimizer, torch.optim.AdamW):
                for group in optimizer.param_groups:
                    group["step"] = steps

    def sync_model(self) -> None:
        """Round the main weights into the model's parameters."""
        for parameter in self.parameters.values():
            parameter.data.copy_(self._main(parameter).data)

    def sync_main(self) -> None:
        """Take the model's parameters as main weights (after an adapter was loaded)."""
        for parameter in self.parameters.values():
            self._main(parameter).data.copy_(parameter.data)

    @staticmethod
    def _main(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        return getattr(parameter, "main_param", parameter)

    def _parts(self) -> list[Any]:
        """mcore's optimizers: one, or with experts one for the dense parameters and one for theirs."""
        return getattr(self.optimizer, "chained_optimizers", [self.optimizer])

    def _inner_optimizers(self) -> list[torch.optim.Optimizer]:
        return [part.optimizer for part in self._parts() if part.optimizer is not None]

    def _inner_of(self) -> dict[torch.Tensor, torch.optim.Optimizer]:
        """Main parameter -> the torch optimizer that owns it."""
        return {
            main: inner
            for inner in self._inner_optimizers()
            for group in inner.param_groups
            for main in group["params"]
        }
