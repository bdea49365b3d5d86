# SPDX-License-Identifier: Apache-2.0
"""Swap one operation of `numerics: bitwise` for a fast one, on one side, and count the logprobs that differ.

The sampler is ``bitwise_sampler``; the trainer is megarl's model. Run as a program (`python -m
tests.helpers.bitwise_swaps`), it uses float32 on the CPU and Triton's interpreter.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch._library.custom_ops import CustomOpDef

import megarl
from megarl.bitwise import linear
from megarl.lora.layers import bitwise as lora
from megarl.loss import chunks
from megarl.model.layers.bitwise import ops
from megarl.sampler.worker import bitwise_hooks
from megarl.verify.inputs.tiny_model import write_random
from tests.helpers.bitwise_configs import SMALL, configs
from tests.helpers.bitwise_fast import SAMPLER, TRAINER
from tests.helpers.bitwise_sampler import Sampler, Work
from tests.helpers.interpreter import sum_in_order

LARGE = {
    "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 1024, "vocab_size": 8192, "max_position_embeddings": 2048,
}  # fmt: skip
# o_proj and k_proj have no adapter, so that a plain linear and a fused one with a gap are compared too.
LORA = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]}
TEMPERATURE = 0.7


def trainer_operations() -> dict[str, Any]:
    """Return the trainer's operations, by module and name, as they are found in its modules."""
    found: dict[str, Any] = {}
    for module in (linear, lora, ops):
        for name, value in vars(module).items():
            if isinstance(value, CustomOpDef) and not name.endswith("_backward"):
                found[f"{module.__name__}.{name}"] = value
    return found | {f"{chunks.__name__}.{n}": f for n, f in vars(chunks).items() if n.startswith("bitwise_")}


def sampler_operations() -> dict[str, Any]:
    return dict(bitwise_hooks.OPERATIONS)


OPERATIONS = {"sampler": sampler_operations, "trainer": trainer_operations}
FAST = {"sampler": SAMPLER, "trainer": TRAINER}


class Pair:
    """A trainer and a sampler with the same weights, and the same tokens for both.

    Args:
        config: the model's.
        lengths: of the sequences.
        device, dtype: of both.
        folder: for the weights.
    """

    def __init__(self, config: Any, lengths: tuple[int, ...], device: str, dtype: str, folder: Path) -> None:
        write_random(config, folder / "model", dtype=dtype)
        settings = {"path": str(folder / "model"), "dtype": dtype, "numerics": "bitwise"}
        self.model = megarl.build_model(settings, lora=LORA, train={"device": device}, temperature=TEMPERATURE)
        self.model.save_adapter(folder / "adapter")
        file = folder / "adapter/adapter_model.safetensors"
        draw = torch.Generator().manual_seed(5)
        matrices = {name: 0.1 * torch.randn(m.shape, generator=draw) for name, m in load_file(file).items()}
        save_file(matrices, file, {"format": "pt"})
        self.model.load_adapter(folder / "adapter")
        self.engine = Sampler(config, folder / "model", folder / "adapter", TEMPERATURE, device)
        self.draw(lengths)

    def draw(self, lengths: tuple[int, ...]) -> None:
        """Draw other sequences."""
        numbers = np.random.default_rng(0)
        self.requests = [numbers.integers(0, self.engine.config.vocab_size, length) for length in lengths]

    def trainer(self) -> np.ndarray:
        """Return the trainer's logprobs of every token but the first, of a pack."""
        samples = [megarl.Sample(tokens, np.arange(len(tokens)) >= 1) for tokens in self.requests]
        return np.concatenate(self.model.forward(self.model.pack(samples)))

    def sampler(self) -> np.ndarray:
        """Return the sampler's, of prompts in two chunks and a decoding step."""
        return np.concatenate(self.engine.logprobs(self.requests, steps_of([len(tokens) for tokens in self.requests])))


def steps_of(lengths: list[int]) -> list[Work]:
    """Return steps: half of the prompts, the rest along with the first prompt's, then a token of each."""
    ends = [length - 2 for length in lengths]
    chunked = [(r, 0, end // 2) for r, end in enumerate(ends[:-1])], [(r, end // 2, end) for r, end in enumerate(ends)]
    chunked[1][-1] = (len(ends) - 1, 0, ends[-1])  # a whole prompt beside the second chunks of the others
    return [*chunked, [(r, end, end + 1) for r, end in enumerate(ends)]]


@contextmanager
def swapped(side: str, name: str) -> Iterator[None]:
    """Swap an operation wherever it is referred to: in the sampler's table, or in the trainer's modules."""
    if side == "sampler":
        before = bitwise_hooks.OPERATIONS[name]
        places = [(bitwise_hooks.OPERATIONS, name, before, before._replace(run=FAST[side][name]))]
    else:
        before = trainer_operations()[name]
        modules = [vars(module) for key, module in list(sys.modules.items()) if key.startswith("megarl.")]
        places = [(m, k, before, FAST[side][name]) for m in modules for k, value in m.items() if value is before]
    try:
        for table, key, _, fast in places:
            table[key] = fast
        yield
    finally:
        for table, key, before, _ in places:
            table[key] = before


def unlike(one: np.ndarray, other: np.ndarray) -> int:
    """Return how many logprobs differ in a bit; both must be finite and near each other."""
    assert one.dtype == other.dtype == np.float32
    np.testing.assert_allclose(one, other, atol=0.3)
    return int((one.view(np.int32) != other.view(np.int32)).sum())


def changes(pair: Pair, side: str, name: str) -> int:
    """Return how many logprobs differ between the sides while one of a side's operations is swapped."""
    with swapped(side, name):
        return unlike(pair.sampler(), pair.trainer())


def assert_each_swap_is_noticed(pair: Pair, side: str) -> None:
    """Swap a side's operations one by one. The other side is computed once."""
    run, other = (pair.sampler, pair.trainer()) if side == "sampler" else (pair.trainer, pair.sampler())
    for name in OPERATIONS[side]():
        with swapped(side, name):
            count = unlike(run(), other)
        print(f"{count} of {len(other)} differ with a fast {name} in the {side}", flush=True)
        assert count, f"a fast {name} in the {side} changes no logprob"


def main() -> None:
    for side, operations in OPERATIONS.items():
        assert operations().keys() == FAST[side].keys(), f"tests.helpers.bitwise_fast lacks an operation of the {side}"
    torch.set_num_threads(1)
    sum_in_order()
    for kind, config in configs(SMALL).items():
        with tempfile.TemporaryDirectory() as scratch:
            pair = Pair(config, (6, 71) if kind == "qwen3" else (6, 9), "cpu", "float32", Path(scratch))
            assert unlike(pair.sampler(), pair.trainer()) == 0, kind
            if kind == "qwen3":
                pair.draw((6, 11, 5))
                for side in OPERATIONS:
                    assert_each_swap_is_noticed(pair, side)
                assert unlike(pair.sampler(), pair.trainer()) == 0  # every swap was undone


if __name__ == "__main__":
    main()
