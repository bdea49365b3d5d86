# SPDX-License-Identifier: Apache-2.0
"""Sleep and wake an engine on the trainer's GPU: `python3 -m tests.gpu.sleep_cycles [CYCLES] [SHAPE]`

Between the two the trainer overwrites the memory that the engine gave back. After each wake the engine must answer as
before, to the bit: greedy tokens, and logprobs of a sequence. Every fifth cycle brings another version, whose logprobs
must move. The worker's own comparison of every tensor runs too. Prints a table of milliseconds and GiB.

vLLM's kernels for LoRA add up in any order unless it is batch invariant, so this engine is. Each cycle asks twice
before the sleep, to show that two answers are equal without one.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from megarl.bench.adapters import change_adapter, lora_section
from megarl.bench.random_weights import base_filler, model_folder
from megarl.build import build_model
from megarl.checkpoint_engine.weight_sync import WeightSync
from megarl.config import TrainConfig
from megarl.config.sections.eval import Sampling
from megarl.model.megatron_model import MegatronModel
from megarl.parallel.groups import destroy_groups
from megarl.sampler.process import SamplerProcess

SAMPLER = {
    "samples_per_prompt": 2, "max_prompt_tokens": 64, "max_response_tokens": 64, "max_num_seqs": 16,
    "kv_cache_gib": 16.0, "share_gpus": True, "sleep": True,
}  # fmt: skip
LORA, STD = lora_section(16), 0.02
GREEDY = Sampling(samples=1, temperature=0.0, top_p=1.0, max_tokens=32)
CHANGE_EVERY = 5
# Of the free memory, and at most: something else may use the GPU.
SHARE, MOST_BYTES = 0.9, 60 * 2**30


def main(cycles: int = 20, shape: str = "qwen3-0.6b") -> None:
    """Run the cycles."""
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        folder = model_folder(shape, Path(scratch))
        section = {"path": str(folder), "dtype": "bfloat16"}
        train = TrainConfig(device="cuda", micro_batch_tokens=1024)
        model = build_model(section, lora=LORA, train=train, fill_base=base_filler(shape, 0))
        change_adapter(model, 0, STD)
        with SamplerProcess(section, lora=LORA, sampler=SAMPLER, log=Path(scratch) / "log", device="cuda") as engine:
            try:
                run(model, engine, cycles)
            except BaseException:
                print((Path(scratch) / "log").read_text()[-6000:])
                raise
        destroy_groups()


def run(model: MegatronModel, engine: SamplerProcess, cycles: int) -> None:
    """Sync, and sleep and wake so many times."""
    weights = WeightSync(model, [engine], {"transport": "ipc"})
    weights.sync("base")
    weights.sync()
    tokens = np.random.default_rng(0).integers(0, 1000, 48)
    print("cycle  freed GiB  sleep ms  wake ms  version  asked twice  asked after the wake")
    for cycle in range(cycles):
        if cycle % CHANGE_EVERY == CHANGE_EVERY - 1:
            before = engine.score(tokens, model.version)
            change_adapter(model, cycle, STD)
            model.version += 1
            weights.sync()
            assert np.abs(engine.score(tokens, model.version) - before).max() > 1e-3, "the version did not change"
        expected = answers(engine, tokens, model.version)
        repeats = same(expected, answers(engine, tokens, model.version))
        began = time.perf_counter()
        freed = engine.sleep().result(120)
        slept = time.perf_counter()
        overwrite()
        woken = time.perf_counter()
        engine.wake().result(120)
        awake = time.perf_counter()
        returned = same(expected, answers(engine, tokens, model.version))
        print(
            f"{cycle:5d}  {freed / 2**30:9.2f}  {1e3 * (slept - began):8.0f}  {1e3 * (awake - woken):7.0f}  "
            f"{model.version:7d}  {equality(repeats):11s}  {equality(returned)}",
            flush=True,
        )
        assert repeats, "the engine answers twice in different ways, without any sleep"
        assert returned, "the engine does not answer as before its sleep"
    weights.close()


def answers(engine: SamplerProcess, tokens: np.ndarray, version: int) -> list[np.ndarray]:
    """Return the logprobs of a sequence, and greedy completions of its beginning with their logprobs."""
    [[drawn]] = engine.generate([tokens[:16]], version, [1], GREEDY)
    return [engine.score(tokens, version), drawn.response_ids, drawn.logprobs]


def same(expected: list[np.ndarray], found: list[np.ndarray]) -> bool:
    """Return True if two answers are equal to the bit; print how far they are apart if not."""
    if equal := all(map(np.array_equal, expected, found)):
        return equal
    apart = [np.abs(a - b).max() if a.shape == b.shape else "length" for a, b in zip(expected, found, strict=True)]
    print(f"apart by (logprobs, tokens, logprobs of the tokens): {apart}", flush=True)
    return False


def equality(equal: bool) -> str:
    """Return a word for the table."""
    return "equal" if equal else "differs"


def overwrite() -> None:
    """Use the free memory of the GPU, and leave other bytes in it."""
    free = torch.cuda.mem_get_info()[0]
    torch.empty(min(int(free * SHARE), MOST_BYTES), dtype=torch.uint8, device="cuda").fill_(255)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*(int(word) if word.isdigit() else word for word in sys.argv[1:]))
