# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (Su et al., arXiv:2104.09864), scaled by transformers' own functions."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megarl.bitwise.frequencies import inverse_frequencies, llama3_frequencies
from megarl.errors import ModelError, UnsupportedError
from megarl.model.weights.full_config import full_config

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

SUPPORTED = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")


@dataclass(frozen=True)
class Rope:
    """RoPE of one model.

    Attributes:
        base: rope_theta.
        frequencies: radians per position, ``[head_dim / 2]`` float32; None where they follow from ``base`` alone.
        attention_factor: factor of rotated queries and keys (YaRN, Peng et al., arXiv:2309.00071).
        longest: longest sequence, in tokens, that these frequencies are right for. Longer sequences need other
            frequencies: one set per length (dynamic) or one set for all (longrope). None where the length does not
            matter.
    """

    base: float
    frequencies: torch.Tensor | None = None
    attention_factor: float = 1.0
    longest: int | None = None

    def check_length(self, length: int, source: str) -> None:
        """Refuse sequences that would need other frequencies.

        Args:
            length: length of the longest sequence in tokens.
            source: names what has this length, for the message.

        Raises:
            UnsupportedError: the length exceeds ``longest``.
        """
        if self.longest is not None and length > self.longest:
            raise UnsupportedError(
                f"config.json: its dynamic or longrope RoPE changes beyond {self.longest} tokens, but {source} is "
                f"{length}; supported are sequences up to there"
            )

    def model_settings(self) -> dict[str, Any]:
        """Return the RoPE arguments of GPTModel."""
        return {"position_embedding_type": "rope", "rotary_base": self.base, "rotary_percent": 1.0}

    def attention_settings(self, head_dim: int) -> dict[str, Any]:
        """Return ``TransformerConfig`` arguments: scaling q and k by f scales the attention logits by f squared."""
        if self.attention_factor == 1.0:
            return {}
        return {"softmax_scale": self.attention_factor**2 * head_dim**-0.5}

    def install(self, chunk: "GPTModel") -> None:
        """Write the frequencies into a built model."""
        if self.frequencies is not None:
            chunk.rotary_pos_emb.inv_freq = self.frequencies.to(chunk.rotary_pos_emb.inv_freq.device)


def rope_of(hf: Mapping[str, Any]) -> Rope:
    """Read RoPE from a parsed ``config.json``, in transformers 5's form (``rope_parameters``) or an older one.

    Raises:
        UnsupportedError: the type is not supported, RoPE differs between layers, or transformers rejects the
            parameters.
    """
    given = _rope_parameters(hf)
    # null is not "default": transformers takes it for a type of its own.
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in SUPPORTED:
        raise UnsupportedError(f"config.json: rope_type is {kind!r}; supported are {', '.join(SUPPORTED)}")
    if nested := [key for key, value in given.items() if isinstance(value, Mapping)]:
        raise UnsupportedError(f"config.json: rope_parameters differ by layer ({nested[0]}); supported is one for all")
    partial = given.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        # transformers ignores the key in all families supported here; vLLM and mcore do not.
        raise UnsupportedError(f"config.json: partial_rotary_factor is {partial}; supported is 1.0")
    full = {key: value for key, value in copy.deepcopy(dict(full_config(hf))).items() if key != "model_type"}
    try:
        config = AutoConfig.for_model(hf["model_type"], **full)
        base = config.rope_parameters["rope_theta"]
        if not isinstance(base, int | float) or not 1.0 < base < math.inf:
            raise ValueError(f"rope_theta is {base!r}; it must be a number above 1")
        base = float(base)
        if kind == "default":
            return Rope(base)
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config)
        if not (frequencies.isfinite().all() and 0.0 < factor < math.inf):
            raise ValueError("its frequencies are not finite")
    except Exception as error:  # transformers' functions may raise anything on unexpected values
        raise UnsupportedError(f"config.json: transformers rejects its rope_parameters {given}: {error}") from error
    longest = {"dynamic": full["max_position_embeddings"], "longrope": given.get("original_max_position_embeddings")}
    return Rope(base, frequencies.float(), float(factor), longest.get(kind))


def bitwise_rope(hf: Mapping[str, Any]) -> Rope:
    """Return RoPE for ``model.numerics: bitwise``, with the frequencies that the sampler computes too.

    Args:
        hf: a completed ``config.json``.

    Raises:
        UnsupportedError: as ``rope_of``, or the type is neither ``default`` nor ``llama3``.
    """
    plain, given = rope_of(hf), _rope_parameters(hf)
    kind = given.get("rope_type", given.get("type", "default"))
    rotated = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    if kind == "default":
        return Rope(plain.base, inverse_frequencies(plain.base, rotated))
    if kind == "llama3":
        low, high, factor = (float(given[name]) for name in ("low_freq_factor", "high_freq_factor", "factor"))
        original = given["original_max_position_embeddings"]
        frequencies = llama3_frequencies(plain.base, rotated, factor=factor, low=low, high=high, original=original)
        return Rope(plain.base, frequencies)
    raise UnsupportedError(
        f"config.json: rope_type is {kind!r} with model.numerics 'bitwise'; supported are default and llama3"
    )


def _rope_parameters(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``rope_parameters``, or ``rope_scaling``, its name in older releases."""
    given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"config.json: rope_parameters is {given!r}; it must be an object")
    return given
