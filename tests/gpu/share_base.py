# SPDX-License-Identifier: Apache-2.0
"""Compare engines with and without a base of their own: `python3 -m tests.gpu.share_base [SHAPE] [NUMERICS]`

Both engines run one after the other on the trainer's GPU, and must score a sequence alike, to the bit, under two
versions; the trainer's score must agree. The trainer's base must be the same bytes afterwards, and the engine that
reads it must take less memory by what it borrows. It also sleeps and wakes. Prints a table.

vLLM's kernels for LoRA add up in any order unless it is batch invariant, so these engines are. With ``bitwise`` both
must have the trainer's bits.
"""

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.bench.adapters import change_adapter, lora_section
from megarl.bench.random_weights import base_filler, model_folder
from megarl.build import build_model
from megarl.checkpoint_engine.weight_sync import WeightSync
from megarl.config import TrainConfig
from megarl.model.trained_model import TrainedModel
from megarl.parallel.groups import destroy_groups
from megarl.sampler.process import SamplerProcess
from megarl.types import Sample

SAMPLER = {
    "samples_per_prompt": 2, "max_prompt_tokens": 64, "max_response_tokens": 64, "max_num_seqs": 16,
    "kv_cache_gib": 4.0, "share_gpus": True,
}  # fmt: skip
LORA, STD = lora_section(16), 0.02
TOKENS = np.random.default_rng(0).integers(0, 1000, 48)
# Bound of |sampler - trainer| in bfloat16, mean over the tokens, with random weights. Other bases differ by over 1.
MISMATCH = 0.4
# Of what is borrowed, how much less the engine must take: vLLM's allocator rounds up.
SAVED = 0.95
# Seconds until an ended engine's memory is free, and bytes of which the trainer may hold more by then.
GONE_SECONDS, SLACK = 60.0, 2**30


def main(shape: str = "qwen3-0.6b", numerics: str = "fast") -> None:
    """Run both engines, and compare them."""
    if numerics == "fast":
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        section = {"path": str(model_folder(shape, Path(scratch))), "dtype": "bfloat16", "numerics": numerics}
        train = TrainConfig(device="cuda", micro_batch_tokens=1024)
        model = build_model(section, lora=LORA, train=train, fill_base=base_filler(shape, 0))
        before = digest(model)
        print("engine   GiB taken  of it borrowed  start s  base ms  adapter ms  |sampler - trainer|", flush=True)
        free = torch.cuda.mem_get_info()[0]
        own = run(model, section, Path(scratch) / "own", b"")
        wait_for_memory(free)
        shared = run(model, section, Path(scratch) / "shared", model.lend_base())
        for mine, theirs in zip(own["scores"], shared["scores"], strict=True):
            assert np.array_equal(mine, theirs), f"the two score differently, by {np.abs(mine - theirs).max()}"
        borrowed, taken = shared["borrowed"], own["taken"] - shared["taken"]
        assert taken > SAVED * borrowed > 0, f"{taken} bytes less are taken, but {borrowed} are borrowed"
        assert digest(model) == before, "the trainer's base has changed"
        print("both score alike, to the bit; the trainer's base is unchanged", flush=True)
        destroy_groups()


def run(model: TrainedModel, section: dict[str, Any], log: Path, loan: bytes) -> dict[str, Any]:
    """Start an engine, sync the base and two versions, let it sleep if it borrows, and return what was measured."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    sampler = SAMPLER | {"share_base": bool(loan), "sleep": bool(loan)}
    with SamplerProcess(section, lora=LORA, sampler=sampler, log=log, device="cuda", loan=loan) as engine:
        try:
            engine.wait()
            found: dict[str, Any] = {"taken": free - torch.cuda.mem_get_info()[0], "scores": []}
            found["borrowed"], total, copied = engine.borrowed()[0]
            weights = WeightSync(model, [engine], {"transport": "ipc"})
            began = time.perf_counter()
            weights.sync("base")
            base = time.perf_counter() - began
            apart = 0.0
            for seed in (1, 2):
                change_adapter(model, seed, STD)
                model.version += 1
                began = time.perf_counter()
                weights.sync()
                adapter = time.perf_counter() - began
                if loan:
                    engine.sleep().result(120)
                    engine.wake().result(120)
                score = engine.score(TOKENS, model.version)
                found["scores"].append(score)
                sample = Sample(TOKENS, np.arange(len(TOKENS)) > 0)
                ours = model.forward(model.pack([sample]), temperature=1.0)[0]
                apart = max(apart, float(np.abs(score - ours).mean()))
            weights.close()
        except BaseException:
            print(log.read_text()[-6000:])
            raise
        gib = [found[name] / 2**30 for name in ("taken", "borrowed")]
        print(
            f"{'shared' if loan else 'own':7s}  {gib[0]:9.2f}  {gib[1]:14.2f}  {engine.start_seconds:7.1f}  "
            f"{1e3 * base:7.1f}  {1e3 * adapter:10.2f}  {apart:.4f}",
            flush=True,
        )
        if loan:
            print(f"{found['borrowed'] / total:.1%} of the parameters; own copies: {', '.join(copied)}", flush=True)
        assert apart < MISMATCH and (section["numerics"] == "fast" or not apart), apart
    return found


def wait_for_memory(free: int) -> None:
    """Wait until an engine that has ended has given back its memory: so many bytes were free before it started."""
    deadline = time.monotonic() + GONE_SECONDS
    while torch.cuda.mem_get_info()[0] < free - SLACK:
        assert time.monotonic() < deadline, "the engine's memory did not come back"
        torch.cuda.empty_cache()
        time.sleep(0.5)


def digest(model: TrainedModel) -> list[float]:
    """Return sums over the bits of each base parameter."""
    named = model.chunks[0].named_parameters()
    return [float(one.detach().view(torch.int16).double().sum()) for name, one in named if "lora_" not in name]


if __name__ == "__main__":
    main(*sys.argv[1:])
