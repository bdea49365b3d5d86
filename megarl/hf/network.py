# SPDX-License-Identifier: Apache-2.0
"""Run a causal language model of transformers on packed sequences, and its output layer on response tokens."""

from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from megarl.errors import UnsupportedError
from megarl.hf.attention import give_packs
from megarl.loss.logprobs import token_logprobs
from megarl.model.step.micro_batch import MicroBatch

# Bytes of one chunk's float32 logits where the output layer is the model's own code.
CHUNK_BYTES = 320 * 2**20


class Network:
    """A causal language model, in two parts: the body, and the output layer on the tokens that it is needed for.

    Attributes:
        causal: the model, of a class ``...ForCausalLM``.
        body: the part that gives hidden states.
        packs: the pack that the attention modules attend within.
        plain_head: True if the logits are ``hidden @ weight.T`` and nothing else; ``probe`` finds out. Then they are
            computed in chunks that the backward pass needs no memory for.
    """

    def __init__(self, causal: PreTrainedModel) -> None:
        """Split a model.

        Raises:
            UnsupportedError: the model has no body or no output layer under transformers' names.
        """
        self.causal = causal
        body, head = getattr(causal, causal.base_model_prefix, None), causal.get_output_embeddings()
        if not isinstance(body, torch.nn.Module) or body is causal or head is None:
            raise UnsupportedError(
                f"model_type '{causal.config.model_type}': {type(causal).__name__} is not a body and an output layer; "
                "supported by model.backend=transformers are causal language models"
            )
        self.body: Any = body
        self.packs = give_packs(causal)
        self.plain_head = False

    def run(self, item: MicroBatch) -> torch.Tensor:
        """Return the hidden states of a micro-batch, ``[T, H]``."""
        self.packs.now = item.packed
        return self.body(
            input_ids=item.tokens_T[None], position_ids=item.positions_T[None], use_cache=False
        ).last_hidden_state[0]

    def logprobs(
        self, hidden_RH: torch.Tensor, labels_R: torch.Tensor, temperature: float, keep_bytes: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logprobs of labels and entropies, float32 ``[R]``; see ``token_logprobs``.

        Args:
            hidden_RH: hidden states at the tokens before the labels.
            labels_R: int64 ids.
            temperature: divisor of the logits.
            keep_bytes: see ``token_logprobs``; only a plain head keeps logits.
        """
        if self.plain_head:
            weight, deltas = self.head_factors(hidden_RH)
            return token_logprobs(
                hidden_RH, weight, labels_R, deltas=deltas, temperature=temperature, keep_bytes=keep_bytes
            )
        size = max(16, CHUNK_BYTES // (4 * self.causal.config.get_text_config().vocab_size))
        chunks = zip(hidden_RH.split(size), labels_R.split(size), strict=True)
        rows = [checkpoint(self._chunk, *chunk, temperature, use_reentrant=False) for chunk in chunks]
        logprobs, entropy = zip(*rows, strict=True)
        return torch.cat(logprobs), torch.cat(entropy)

    def head_factors(self, hidden: torch.Tensor) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return the output layer's weight, and the inputs and the factor of an adapter's product on it."""
        head = self.causal.get_output_embeddings()
        if not isinstance(head, LoraLayer):
            return head.weight, []
        deltas = []
        for name in [] if head.disable_adapters else head.active_adapters:
            if name in head.lora_A:
                low = head.lora_A[name](head.lora_dropout[name](hidden))
                deltas.append((low, head.lora_B[name].weight * head.scaling[name]))
        return head.get_base_layer().weight, deltas

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``[C, V]`` logits of hidden states ``[C, H]`` by the model's own code behind its body."""
        body = self.body
        original = body.forward
        body.forward = lambda *args, **kwargs: _BodyOutput(hidden[None])
        try:
            tokens = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
            return self.causal(input_ids=tokens, use_cache=False).logits[0]
        finally:
            body.forward = original

    def _chunk(self, hidden: torch.Tensor, labels: torch.Tensor, temperature: float) -> tuple[torch.Tensor, Any]:
        logs = torch.log_softmax(self.head(hidden).float() / temperature, -1)
        return logs.gather(-1, labels[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


class _BodyOutput:
    """Stands for the output of a body, of whatever class: holds hidden states, and None under every other name."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return self.last_hidden_state if index == 0 else None
