# SPDX-License-Identifier: Apache-2.0
"""Set a sampler process's environment, before vLLM is imported. Imports no vLLM."""

import os


def prepare_environment(threads: int | None = None) -> dict[str, str]:
    """Set the variables that vLLM reads when it is imported. Call it first in the process that holds the engine.

    Args:
        threads: OpenMP threads of the engine (vLLM's CPU back end computes with them). Default: all cores that this
            process may use.

    Returns:
        The variables that were set.
    """
    values = {
        "HF_HUB_OFFLINE": "1",  # models are local folders; never ask a hub
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it cannot return logprobs of the sampled tokens
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # starts faster; AsyncLLM has an engine process anyway
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        # vLLM's own binding would put two engines, or engine and trainer, on the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Threads that spin while waiting starve other processes on the same cores. With a busy neighbour on 2 cores, 2
        # spinning threads made 60 to 300 tokens/s of SmolLM2-135M's shape; 2 sleeping threads made 340.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "OMP_NUM_THREADS": str(threads or len(os.sched_getaffinity(0))),
    }
    os.environ.update(values)
    return values


def resolve_device(device: str) -> str:
    """Resolve ``train.device``: ``"auto"`` is CUDA if torch sees a GPU."""
    import torch

    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
