# SPDX-License-Identifier: Apache-2.0
"""Optimize an adapter by AdamW on fp32 main weights, of which every data-parallel rank holds all.

An adapter is small, so its state is not spread over ranks, and its gradient is summed over them in one collective.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from megarl.config import TrainConfig
from megarl.model.optimizer.adapter_optimizer import MOMENTS
from megarl.model.optimizer.fused_adamw import clip_and_step
from megarl.model.optimizer.gradient_record import GradientRecord


class ReplicatedOptimizer:
    """AdamW on copies of an adapter's matrices; see ``model.adapter.Optimizer`` for its members.

    Gradients add up in float32 over micro-batches, whatever the dtype of the matrices.
    """

    def __init__(
        self, parameters: Sequence[tuple[str, torch.nn.Parameter]], config: TrainConfig, group: dist.ProcessGroup
    ) -> None:
        """Make the main weights and the gradient buffer.

        Args:
            parameters: ``(PEFT name, parameter)`` pairs, all of one device. They require gradients from now on.
            config: the ``train`` section.
            group: the ranks whose gradients are summed.
        """
        self.parameters = dict(parameters)
        self.reduced = self.reducing = False
        self._group, self._limit = group, config.max_grad_norm
        self._steps = 0
        self.coverage = GradientRecord(list(self.parameters))
        sizes = [parameter.numel() for parameter in self.parameters.values()]
        device = next(iter(self.parameters.values())).device
        self._flat = torch.zeros(sum(sizes), device=device)
        views = [
            part.view(parameter.shape)
            for part, parameter in zip(self._flat.split(sizes), self.parameters.values(), strict=True)
        ]
        self._gradients = dict(zip(self.parameters, views, strict=True))
        self._main = {name: parameter.detach().float().clone() for name, parameter in self.parameters.items()}
        for (name, parameter), view in zip(self.parameters.items(), views, strict=True):
            parameter.requires_grad_(True)
            parameter.register_post_accumulate_grad_hook(_adder(view))
            self._main[name].grad = view
        self._adamw = torch.optim.AdamW(
            list(self._main.values()),
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def zero_grad(self) -> None:
        """Clear the gradient buffer."""
        self._flat.zero_()
        self.reduced = self.reducing = False

    def reduce_gradients(self) -> None:
        """Sum the gradient over the ranks. Collective. Does nothing the second time in a step."""
        if not self.reduced:
            dist.all_reduce(self._flat, group=self._group)
            self.reduced = True

    def step(self, lr: float) -> dict[str, float]:
        """Reduce, clip, update, and clear the gradient; see ``AdapterOptimizer.step``."""
        self.reduce_gradients()
        norms = torch.stack(torch._foreach_norm(list(self._gradients.values())))
        norm = norms.square().sum().sqrt()
        with torch.no_grad():
            clip_and_step(self._adamw, norm, lr, self._limit)
            self._round()
        self.zero_grad()
        metrics = self.coverage.take(torch.cat([norm[None], norms]))
        self._steps += 1
        return metrics

    def finish_param_gather(self) -> None:
        """Do nothing: the model holds every update at once."""

    def gradients(self) -> dict[str, torch.Tensor]:
        """Map PEFT names to float32 gradients."""
        return self._gradients

    def main_weights(self) -> dict[str, torch.Tensor]:
        """Map PEFT names to float32 main weights."""
        return self._main

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """Map ``exp_avg``/``exp_avg_sq`` to {PEFT name: moment}; zeros at first."""
        state = self._adamw.state
        return {
            kind: {n: state[main][kind] if main in state else torch.zeros_like(main) for n, main in self._main.items()}
            for kind in MOMENTS
        }

    def steps(self) -> int:
        """Return the number of updates made."""
        return self._steps

    @torch.no_grad()
    def restore(self, steps: int, main: Mapping[str, torch.Tensor], moments: Mapping[str, Mapping]) -> None:
        """Set the whole state, and round the main weights into the model; see ``AdapterOptimizer.restore``."""
        self._steps = steps
        self._adamw.state.clear()
        for name, weight in self._main.items():
            weight.copy_(main[name])
            if steps:
                step = torch.tensor(float(steps), device=weight.device)
                self._adamw.state[weight] = {"step": step} | {kind: moments[kind][name].clone() for kind in MOMENTS}
        self._round()

    def start_anew(self) -> None:
        """Take the model's parameters as main weights (after an adapter was loaded); reset moments and steps."""
        weights = {name: parameter.detach().float() for name, parameter in self.parameters.items()}
        self.restore(0, weights, {})

    def _round(self) -> None:
        """Round the main weights into the model."""
        torch._foreach_copy_([p.data for p in self.parameters.values()], list(self._main.values()))


def _adder(view: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Return a hook that adds a parameter's gradient to ``view`` and drops it."""

    def add(parameter: torch.Tensor) -> None:
        view.add_(parameter.grad)
        parameter.grad = None

    return add
