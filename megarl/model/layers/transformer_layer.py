# SPDX-License-Identifier: Apache-2.0
"""A transformer layer for packed tokens: mcore's modules, and a forward pass of megarl's own."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer import TransformerLayer
from torch._dynamo import maybe_mark_dynamic

from megarl import progress
from megarl.model.layers.attention.core import PackedSequences
from megarl.model.layers.linears import wait_for_adapters
from megarl.model.layers.regions import traced
from megarl.model.layers.traced.layer import before, behind, directly
from megarl.model.layers.updates import Outcome, Update


class PackedLayer(TransformerLayer):
    """mcore's layer, with the same modules under the same names.

    Attributes:
        compiles: True if the forward pass is the one for torch.compile; set by ``megarl.model.step.compiled``.
        in_parts: True if attention cannot be traced: it runs between two parts that are compiled each; likewise.
        adapted: the layer's linears that have adapters, without experts; likewise.
        direct: True if nothing is compiled of a layer that megarl's operations compute; likewise.
    """

    compiles = in_parts = direct = False
    adapted: Sequence[Any] = ()

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        # Attention recomputes its core itself; whatever else is recomputed is mcore's affair.
        self._own = set(config.recompute_modules or ()) <= {"core_attn"} or config.recompute_granularity != "selective"
        for module in (self.self_attention, self.mlp):
            module.leaves_updates = self._own

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call mcore's layer; or prepare what a trace may not contain, and run the compiled layer."""
        if not self.compiles:
            return super().__call__(hidden_states, *args, **kwargs)
        packed: PackedSequences = kwargs["packed_seq_params"]
        angles = kwargs["rotary_pos_emb"]
        wait_for_adapters(self.adapted)
        found = directly(self, hidden_states, angles, packed) if self.direct else None
        if found is not None:
            return found, None
        width = hidden_states.shape[-1]
        if hidden_states.stride() != (width, width, 1):  # The embedding's output: same memory, other strides.
            hidden_states = hidden_states.as_strided(hidden_states.shape, (width, width, 1))
        maybe_mark_dynamic(hidden_states, 0)
        maybe_mark_dynamic(angles, 0)
        progress.made()
        if self.in_parts:
            output = self._around_attention(hidden_states, angles, packed), None
        else:
            output = torch.nn.Module.__call__(
                self, hidden_states, None, rotary_pos_emb=angles, packed_seq_params=packed.traced
            )
        if output[0].requires_grad:
            output[0].register_hook(_made)
        return output

    def _around_attention(self, hidden: torch.Tensor, angles: torch.Tensor, packed: PackedSequences) -> torch.Tensor:
        """Return the output of ``forward``; what is before attention and what is behind it are compiled each."""
        hidden, *heads = self.before_attention(hidden, angles)
        out = self.self_attention.attend(heads, packed)
        maybe_mark_dynamic(hidden, 0)
        maybe_mark_dynamic(out, 0)
        return self.behind_attention(hidden, out)

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map ``[T, 1, H]`` (T/TP tokens under SP) to the same shape; returns (output, context), as mcore does.

        Without dropout of the hidden states (megarl's config has none), mcore's layer is these two sums.
        """
        if not (self._own or self.compiles):
            return super().forward(hidden_states, *args, **kwargs)
        angles, packed = kwargs["rotary_pos_emb"], kwargs["packed_seq_params"]
        if traced() and hasattr(self.self_attention, "attend"):
            hidden, *heads = self.before_attention(hidden_states, angles)
            return self.behind_attention(hidden, self.self_attention.attend(heads, packed)), None
        hidden, normed, more = self.attended(hidden_states, angles, packed)
        return add(hidden, self.mlp(normed, **more)), None

    def before_attention(self, hidden: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the hidden states for the residual stream, and the heads that attention takes."""
        found = before(self, hidden, angles) if traced() else None
        if found is not None:
            return hidden, *found
        normed, hidden, more = beside(self.input_layernorm, hidden, self.self_attention)
        return hidden, *self.self_attention.heads_of(normed, angles, **more)

    def behind_attention(self, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Return the layer's output of the residual stream and of what attention has returned."""
        found = behind(self, hidden, out) if traced() else None
        if found is not None:
            return found
        hidden, normed, more = self.joined(hidden, out)
        return add(hidden, self.mlp(normed, **more))

    def joined(
        self, hidden: torch.Tensor, out: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return what ``attended`` does, of the residual stream and of what attention has returned."""
        return self._before_mlp(hidden, self.self_attention.project(out))

    def attended(
        self, hidden: torch.Tensor, angles: torch.Tensor, packed: Any
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return the hidden states behind attention, the MLP's input, and what else it takes."""
        normed, hidden, more = beside(self.input_layernorm, hidden, self.self_attention)
        attention = self.self_attention(normed, None, rotary_pos_emb=angles, packed_seq_params=packed, **more)
        return self._before_mlp(hidden, attention)

    def _before_mlp(
        self, hidden: torch.Tensor, attention: Outcome
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        normed, hidden, more = beside_sum(self.pre_mlp_layernorm, hidden, attention, self.mlp)
        return hidden, normed, more


def beside(norm: Any, hidden: torch.Tensor, behind: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the norm of hidden states, hidden states for the residual stream, and what else the next module takes.

    That is the norm's product with every A of its first linear, ``low``, if ``behind.projection`` names them. Without a
    gradient of the hidden states, as in the first layer, the linear forms it.
    """
    if not hasattr(norm, "beside"):
        return norm(hidden), hidden, {}
    return _with_low(*norm.beside(hidden, _projection(behind, hidden)))


def beside_sum(
    norm: Any, residual: torch.Tensor, output: Outcome, behind: Any
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return what ``beside`` does for the residual plus a module's output and its bias or update."""
    states, rest = output
    if not (isinstance(rest, Update) and hasattr(norm, "beside_sum")):
        return beside(norm, add(residual, output), behind)
    return _with_low(*norm.beside_sum(residual, states, rest, _projection(behind, states)))


def _projection(behind: Any, hidden: torch.Tensor) -> torch.Tensor | None:
    projects = hidden.requires_grad and hasattr(behind, "projection")
    return behind.projection(hidden) if projects else None


def _with_low(
    normed: torch.Tensor, hidden: torch.Tensor, low: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    return normed, hidden, {} if low is None else {"low": low}


def add(residual: torch.Tensor, output: Outcome) -> torch.Tensor:
    """Return the residual plus a module's output and its bias or update."""
    states, rest = output
    if not isinstance(rest, Update):
        return residual + (states if rest is None else states + rest)
    from megarl.model.layers.kernels.residual import add_adapted

    return add_adapted(residual, states, rest)


def _made(gradient: torch.Tensor) -> None:
    progress.made()
