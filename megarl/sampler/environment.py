# SPDX-License-Identifier: Apache-2.0
"""Set a sampler process's environment, before vLLM is imported. Imports no vLLM."""

import os
from collections.abc import Sequence

NUMERICS = "MEGARL_NUMERICS"  # tells vLLM's workers of ``model.numerics``
# The second model runner is the one whose operations are replaced. vLLM's own mode switches off what chooses by the
# batch: cascade attention, and all-reduces of several kinds.
BITWISE = {NUMERICS: "bitwise", "VLLM_BATCH_INVARIANT": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}


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
        # Else the compiler sets it, to a folder that is gone at the next start, which then compiles every Triton kernel
        # of vLLM and of megarl anew: 12 s.
        "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR") or _triton_cache(),
    }
    os.environ.update(values)
    return values


def _triton_cache() -> str:
    """Return Triton's own default."""
    return os.path.join(os.environ.get("TRITON_HOME") or os.path.expanduser("~"), ".triton", "cache")


def prepare_numerics(numerics: str) -> None:
    """Set the variables of ``model.numerics``, or remove what it set before. Call it before vLLM's engine is built."""
    if numerics == "bitwise":
        os.environ.update(BITWISE)
    elif NUMERICS in os.environ:
        for name in BITWISE:
            os.environ.pop(name, None)


def names_of_gpus(gpus: Sequence[int]) -> str:
    """Return CUDA_VISIBLE_DEVICES for a process that gets some of this one's GPUs, as this one counts them."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return ",".join(visible[gpu] if visible else str(gpu) for gpu in gpus)


def resolve_device(device: str) -> str:
    """Resolve ``train.device``: ``"auto"`` is CUDA if torch sees a GPU."""
    import torch

    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def child_variables(gpus: Sequence[int] | None) -> dict[str, str]:
    """Return this process's variables without what torchrun set for it, and with the engine's GPUs."""
    # vLLM would take its ranks and its port from them.
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ours and not name.startswith(("TORCHELASTIC_", "GROUP_", "ROLE_"))
    }
    if gpus is not None:
        variables["CUDA_VISIBLE_DEVICES"] = names_of_gpus(gpus)
    return variables
