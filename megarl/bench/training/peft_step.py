# SPDX-License-Identifier: Apache-2.0
"""Run the same step in Hugging Face + PEFT, as its users write it: SDPA, full logits, torch's AdamW."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from megarl.bench.adapters import peft_config
from megarl.bench.settings import model_config
from megarl.bench.shapes import SHAPES
from megarl.bench.training.batch import make_samples
from megarl.bench.training.clock import Clock
from megarl.bench.training.settings import BenchSettings
from megarl.config import TrainConfig

IGNORED = -100


class PeftStep:
    """A model with adapters and their optimizer. Has the interface of ``MegarlStep``."""

    def __init__(self, settings: BenchSettings) -> None:
        wanted = settings.device if settings.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(wanted)
        torch.manual_seed(settings.seed)
        config = peft_config(settings.r, settings.dropout)
        # PEFT's default keeps the adapters in float32 and computes in it: slower, and not what megarl does.
        network = _build(settings, self.device)
        if settings.recompute == "full":
            network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._model = get_peft_model(network, config, autocast_adapter_dtype=False).train()
        self._dropout = settings.dropout > 0.0
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        lr = TrainConfig().learning_rate
        self._optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0, fused=self.device.type == "cuda")
        samples = make_samples(settings, model_config(settings.model, settings.layers)["vocab_size"])
        tokens = torch.from_numpy(np.stack([sample.tokens[:-1] for sample in samples])).to(self.device)
        labels = np.stack([np.where(s.response_mask[1:], s.tokens[1:], IGNORED) for s in samples])
        split = (tokens.chunk(settings.rounds), torch.from_numpy(labels).to(self.device).chunk(settings.rounds))
        self._micro_batches = list(zip(*split, strict=True))
        self.info: dict[str, Any] = {
            "backend": "sdpa",
            "trained_parameters": sum(parameter.numel() for parameter in trained),
            "optimizer": True,
        }

    def step(self, clock: Clock) -> None:
        """Run forward with logits and loss, backward and optimizer."""
        for micro_batch in self._micro_batches:
            clock.mark_next_forward()
            loss = self._mean_loss(*micro_batch) / len(self._micro_batches)
            clock.mark("forward")
            loss.backward()
        clock.mark("backward")
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        clock.mark("optimizer")

    @torch.no_grad()
    def logprobs(self) -> None:
        """Run a pass without gradient."""
        if self._dropout:
            self._model.eval()
        losses = [self._mean_loss(*micro_batch) for micro_batch in self._micro_batches]
        self.info["logprob"] = -float(torch.stack(losses).mean())
        if self._dropout:
            self._model.train()

    def _mean_loss(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # No labels in the call: Hugging Face would shift them once more.
        logits = self._model(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def _build(settings: BenchSettings, device: torch.device) -> Any:
    dtype = getattr(torch, settings.dtype)
    if settings.model not in SHAPES:
        return AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype, attn_implementation="sdpa").to(device)
    plain = model_config(settings.model, settings.layers)
    config = AutoConfig.for_model(plain.pop("model_type"), **plain)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
