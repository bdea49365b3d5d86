# SPDX-License-Identifier: Apache-2.0
"""Find out, on the model itself, whether its sequences may be packed and what its output layer is.

There are hundreds of architectures, so none is trusted by name. Two short sequences are computed in one pack, and each
alone with transformers' own eager attention. Where the model mixes tokens outside of its attention (state spaces,
convolutions), or says something of its attention in a way that does not reach it, the two differ.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megarl.errors import UnsupportedError
from megarl.hf.attention import NAME, PackedSequences
from megarl.hf.network import Network

LENGTHS = (7, 12)
# Largest mean difference of a token's hidden state, as a share of its norm. A token that saw another sequence is off by
# tens of percent.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.06}


@torch.no_grad()
def probe(network: Network, device: torch.device) -> None:
    """Set ``network.plain_head``, and refuse a model whose sequences cannot be packed.

    Args:
        network: the model, in evaluation mode, without adapters.
        device: its device.

    Raises:
        UnsupportedError: it computes a packed sequence differently from the sequence alone.
    """
    causal, config = network.causal, network.causal.config.get_text_config()
    tokens = torch.randint(config.vocab_size, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0)).to(device)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).to(device)
    _check_kinds(config)
    network.packs.now = PackedSequences.from_lengths(LENGTHS, device)
    network.packs.windows = {}
    ids, places = tokens[None], positions[None]
    packed = network.body(input_ids=ids, position_ids=places, use_cache=False).last_hidden_state[0]
    windows, network.packs.windows = network.packs.windows, None
    _check_windows(config, windows)
    with _eager(causal):
        alone = torch.cat([network.body(input_ids=part[None]).last_hidden_state[0] for part in tokens.split(LENGTHS)])
    difference = (packed - alone).float().norm(dim=-1) / alone.float().norm(dim=-1).clamp(min=1e-12)
    if not difference.mean() <= TOLERANCE[packed.dtype]:
        raise UnsupportedError(
            f"model_type '{config.model_type}': {type(causal).__name__} computes a sequence in a pack differently from "
            f"the sequence alone (hidden states are off by {float(difference.mean()):.1%} on average); "
            "model.backend=transformers needs models that mix tokens by attention only"
        )
    if causal.get_output_embeddings().bias is None:
        weight = causal.get_output_embeddings().weight
        own, plain = network.head(packed).float(), (packed.to(weight.dtype) @ weight.T).float()
        network.plain_head = own.shape == plain.shape and torch.allclose(own, plain, rtol=1e-4, atol=1e-5)


@contextmanager
def _eager(causal: Any) -> Iterator[None]:
    causal.set_attn_implementation("eager")
    try:
        yield
    finally:
        causal.set_attn_implementation(NAME)


def _check_kinds(config: Any) -> None:
    """Refuse layers that mix tokens in another way than the two that ``attention`` knows."""
    if unknown := sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}):
        raise UnsupportedError(
            f"model_type '{config.model_type}': layer_types has '{unknown[0]}'; supported by "
            "model.backend=transformers are full_attention and sliding_attention"
        )


def _check_windows(config: Any, asked: dict[int, int | None]) -> None:
    """Refuse a model whose attention modules do not ask for the windows that its config names."""
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return
    expected = kinds.count("sliding_attention") if kinds else len(asked)
    got = sum(value == window for value in asked.values())
    if got != expected:
        raise UnsupportedError(
            f"model_type '{config.model_type}': {expected} layers have a sliding window of {window} tokens, but only "
            f"{got} hand it to their attention; model.backend=transformers cannot compute the others"
        )
