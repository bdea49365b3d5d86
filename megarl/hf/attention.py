# SPDX-License-Identifier: Apache-2.0
"""Attend within each sequence of a pack, as an attention function of transformers.

transformers makes no mask for an attention function that it does not know (``masking_utils``, release 5), so that all
that a model says of its attention arrives here: causal or not, window, logit cap, sinks. What a model says otherwise,
``probe`` finds before anything is trained.
"""

import weakref
from typing import Any

import torch
from transformers import AttentionInterface

from megarl.errors import UnsupportedError
from megarl.model.layers.attention.core import PackedSequences, attend_runs

# Name of the function in transformers' register.
NAME = "megarl_packed"


class Packs:
    """The pack that a model computes now, for its attention modules.

    Attributes:
        now: the pack. It stays until the backward pass is over, in which recomputed layers attend once more.
        windows: if not None, the window that each attention module asks for is noted here, by ``id(module)``.
    """

    def __init__(self) -> None:
        self.now: PackedSequences | None = None
        self.windows: dict[int, int | None] | None = None


# By module, because not every model hands the keyword arguments of its forward on to its attention.
_PACKS: weakref.WeakKeyDictionary[torch.nn.Module, Packs] = weakref.WeakKeyDictionary()


def give_packs(model: torch.nn.Module) -> Packs:
    """Return the ``Packs`` that all modules of a model attend by from now on."""
    packs = Packs()
    for module in model.modules():
        _PACKS[module] = packs
    return packs


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within each sequence; see ``sdpa_attention_forward`` of transformers for the interface.

    Args:
        module: the attention module.
        query, key, value: ``[1, heads, T, head_dim]``; key and value may have fewer heads.
        attention_mask: must be None.
        scaling: factor of the logits; default: 1 / sqrt(head_dim).
        is_causal: default: the module's.
        sliding_window: number of last keys that each query sees, its own included; default: all.
        softcap: logits become ``softcap * tanh(logits / softcap)`` (Gemma 2, arXiv:2408.00118).
        s_aux: a logit for each head that takes part in the softmax and has no value (gpt-oss' sinks).

    Returns:
        ``([1, T, heads, head_dim], None)``.

    Raises:
        UnsupportedError: the attention is not causal, or has a mask of its own.
    """
    packs = _PACKS[module]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal or attention_mask is not None:
        raise UnsupportedError(
            f"{type(module).__name__} {'has a mask of its own' if causal else 'is not causal'}, which a pack cannot "
            "have; supported by model.backend=transformers is causal attention, with or without a sliding window"
        )
    if packs.windows is not None:
        packs.windows[id(module)] = sliding_window
    assert packs.now is not None, "attention outside of Network.run"
    states = query[0], key[0], value[0]
    if softcap is not None or s_aux is not None:
        return _attend_eagerly(states, packs.now, scaling, sliding_window, softcap, s_aux)[None], None
    q, k, v = (tensor.transpose(0, 1) for tensor in states)
    return attend_runs(q, k, v, packs.now, scaling, sliding_window)[None], None


def _attend_eagerly(
    states: tuple[torch.Tensor, ...],
    packed: PackedSequences,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend sequence by sequence with all logits, for what no fused function computes."""
    query, key, value = states
    repeats = query.shape[0] // key.shape[0]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    outs = []
    for parts in zip(*(tensor.split(packed.lengths, dim=1) for tensor in (query, key, value)), strict=True):
        q, k, v = parts[0], *(part.repeat_interleave(repeats, dim=0) for part in parts[1:])
        logits = q @ k.transpose(1, 2) * scale
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        seen = logits.new_ones(logits.shape[1:], dtype=torch.bool).tril()
        if window is not None:
            seen = seen.triu(1 - window)
        logits = logits.float().masked_fill(~seen, float("-inf"))
        if sinks is not None:
            column = sinks.float().reshape(-1, 1, 1).expand(-1, logits.shape[1], 1)
            logits = torch.cat([logits, column], dim=-1)
        weights = logits.softmax(-1)[..., : k.shape[1]].to(v.dtype)
        outs.append(weights @ v)
    return torch.cat(outs, dim=1).transpose(0, 1)


AttentionInterface.register(NAME, attend)
