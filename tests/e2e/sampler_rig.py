# SPDX-License-Identifier: Apache-2.0
"""Run one real engine with a PEFT model as trainer and a manager between them, in a process of its own."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import peft
import tokenizers
import torch
import transformers

from megarl.checkpoint_engine.manager import CheckpointEngineManager
from megarl.checkpoint_engine.mixin import CheckpointEngineMixin
from megarl.config import RunConfig, parse_config
from megarl.futures import done
from megarl.sampler.drawing.gate import VersionGate
from megarl.sampler.vllm_sampler import VllmSampler

LORA = {"r": 8, "lora_alpha": 24, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
VOCABULARY = 320
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "eos_token_id": 3,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=64, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=False),
}


def make_model(family: str, folder: Path, seed: int = 0) -> None:
    """Save a tiny random model whose generation_config would change the distribution if it were used."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[family]())
    # Biases and norms start as constants, which would hide one that was not sent.
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter) * (1 if "norm" in name else 3)
    model.save_pretrained(folder)
    leaky = {"top_p": 0.1, "top_k": 2, "temperature": 0.3, "repetition_penalty": 1.9, "do_sample": True}
    transformers.GenerationConfig(**leaky, eos_token_id=[3, 7]).save_pretrained(folder)


def make_tokenizer(folder: Path, eos: int) -> None:
    """Save a tokenizer of the tokens ``t0`` to ``t319``, which knows another end of sequence than the model."""
    vocabulary = {f"t{index}": index for index in range(VOCABULARY)}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="t0"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="t0", eos_token=f"t{eos}").save_pretrained(
        folder
    )


def run_config(folder: Path, **sections: dict) -> RunConfig:
    """Return a config for a tiny engine; ``sections`` override it."""
    sampler = {"samples_per_prompt": 4, "max_prompt_tokens": 96, "max_response_tokens": 16, "kv_cache_gib": 0.05}
    tree = {
        "model": {"path": str(folder), "dtype": "float32"},
        "task": {"name": "arithmetic"},
        "sampler": {**sampler, **sections.pop("sampler", {})},
        "checkpoint_engine": {"transport": "shm", "timeout_seconds": 60.0, **sections.pop("checkpoint_engine", {})},
        **sections,
    }
    return parse_config(tree)


class PeftTrainer(CheckpointEngineMixin):
    """A single rank that exports what PEFT itself would save. Also the manager's ``Source``."""

    rank = 0

    def __init__(self, folder: Path, lora: dict[str, Any]) -> None:
        base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = peft.get_peft_model(base, peft.LoraConfig(**lora)).eval()
        self.edit = lambda named: named
        self.pool = ThreadPoolExecutor(1)

    def change(self, edit: Callable[[list], list]) -> None:
        """Pass every export through ``edit``, as if the adapter had never been another one."""
        self.edit, self._plans = edit, None

    def randomise(self, seed: int) -> None:
        """Draw new adapter weights, large enough to change logprobs."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.model.named_parameters():
            if ".lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1

    def export_weights(self, adapter_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
        if adapter_only:
            state = peft.get_peft_model_state_dict(self.model)
        else:
            base = self.model.get_base_model()
            names = {
                name.replace(".base_layer.", "."): p for name, p in base.named_parameters() if ".lora_" not in name
            }
            state = names
        yield from self.edit(list(state.items()))

    def export_adapter_config(self) -> dict[str, Any]:
        config = self.model.peft_config["default"].to_dict()
        return {key: sorted(value) if isinstance(value, set) else _plain(value) for key, value in config.items()}

    def policy_version(self) -> int:
        return self.version

    def places(self) -> Future:
        return done(lambda: [self.place()])

    def prepare(self, *arguments: Any) -> Future:
        return self.pool.submit(self.prepare_sync, *arguments)

    def send(self, version: int, kind: Any) -> Future:
        self.version = version  # the scenario decides which version the weights are
        return self.pool.submit(self.send_weights, version, kind)

    def finish(self) -> Future:
        return self.pool.submit(self.finish_sync)

    @torch.no_grad()
    def logprobs(self, prompt: np.ndarray, response: np.ndarray, temperature: float) -> np.ndarray:
        """Return the logprobs of the response's tokens by Hugging Face + PEFT."""
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        logits = self.model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature
        return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def likely_token(trainer: PeftTrainer, without: list[int]) -> int:
    """Return the token that follows random prompts most often, other than those of ``without``."""
    with torch.no_grad():
        logits = [trainer.model(input_ids=torch.from_numpy(prompt)[None]).logits[0, -1] for prompt in prompts(20)]
    mean = torch.stack(logits).softmax(-1).mean(0)
    mean[without] = 0
    return int(mean.argmax())


class Rig:
    """An engine, its event loop in a thread, a trainer and a manager."""

    name = "sampler 0"
    receivers = 1

    def __init__(self, config: RunConfig, trainer: PeftTrainer, loan: bytes = b"") -> None:
        self.config, self.trainer = config, trainer
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.sampler = VllmSampler(config.engine, engine_index=0)
        self.renew()
        self.call(self.sampler.start(loan))

    def renew(self, base_ready: bool | None = None) -> None:
        """Make a manager and gate without a past failure; a failed adapter leaves nothing in the engine itself."""
        self.manager = CheckpointEngineManager(self.trainer, [self], self.config.checkpoint_engine)
        if base_ready is not None:
            # Answered only after the receive that a failure left running; its refusal belongs to the old gate.
            self.call(self.sampler.resident())
            self.sampler._requests.gate = VersionGate(base_ready, self.config.checkpoint_engine.content)

    def start(self, coroutine: Any) -> Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, coroutine: Any, timeout: float = 240) -> Any:
        return self.start(coroutine).result(timeout)

    def start_requests(self, coroutine: Any, count: int) -> Future:
        """Start ``count`` requests and wait until they are in flight."""
        running = self.start(coroutine)
        while self.sampler.gate.in_flight < count and not running.done():
            time.sleep(0.002)
        return running

    def receive(self, endpoint: bytes, first: int) -> Future:
        return self.start(self.sampler.receive(endpoint, first))

    def flip(self, version: int, kind: Any, checksum: str) -> Future:
        return self.start(self.sampler.flip(version, kind, checksum))

    def refuse(self, reason: str) -> Future:
        return self.start(self.sampler.refuse(reason))

    def readmit(self) -> Future:
        return self.start(self.sampler.readmit())

    def generate(self, prompts: list[np.ndarray], version: int) -> list:
        return self.call(self.sampler.generate(prompts, version))

    def error(self, completions: list, temperature: float | None = None) -> float:
        """Return the largest difference between the sampler's logprobs and PEFT's over nested completions."""
        return largest(self.differences(completions, temperature))

    def differences(self, completions: list, temperature: float | None = None) -> list[np.ndarray]:
        """Return the difference of each token of each completion."""
        scale = self.config.sampler.temperature if temperature is None else temperature
        return [
            np.abs(self.trainer.logprobs(one.prompt_ids, one.response_ids, scale) - one.logprobs)
            for group in completions
            for one in group
        ]


def largest(differences: list[np.ndarray]) -> float:
    """Return the largest of all."""
    return max(float(found.max()) for found in differences)


def places(differences: list[np.ndarray], bound: float) -> list[str]:
    """Return where differences are beyond a bound: each completion, and its tokens."""
    return [
        f"completion {number}: tokens {np.flatnonzero(found > bound).tolist()} of {len(found)}, {found.max():.1e}"
        for number, found in enumerate(differences)
        if found.max() > bound
    ]


def overlapping(scenario: Callable[[int], dict[str, Any]], overlapped: str) -> dict[str, Any]:
    """Run a scenario with more and more prompts, until requests still ran when its sync was done.

    Args:
        scenario: function of the number of prompts.
        overlapped: key of the result that says whether they did; a fast engine ends few prompts too early.
    """
    for count in (60, 240, 960):
        results = scenario(count)
        if results[overlapped]:
            break
    return results


def prompts(count: int, seed: int = 0) -> list[np.ndarray]:
    """Draw random prompts of 5 to 90 tokens."""
    generator = np.random.default_rng(seed)
    return [generator.integers(10, VOCABULARY, generator.integers(5, 90)) for _ in range(count)]


def raised(action: Any) -> str:
    """Return ``"ErrorClass: message"`` of what an action raises, or ``"nothing"``."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _plain(value: Any) -> Any:
    """Convert enums and other objects to JSON's types."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value if isinstance(value, int | float | bool | list | type(None)) else str(getattr(value, "value", value))
