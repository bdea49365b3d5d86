# SPDX-License-Identifier: Apache-2.0
"""Build the `te` back end's layers on CUDA, forward and backward; print releases and attention's choices."""

import logging
import os
import sys

import torch


def main() -> None:
    """Run both back ends on the same weights; print their mean logprobs and a gradient norm."""
    os.environ.setdefault("NVTE_DEBUG", "1")
    os.environ.setdefault("NVTE_DEBUG_LEVEL", "1")
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="attention %(message)s")
    import megatron.core
    import transformer_engine

    from megarl.bench.training.clock import Clock
    from megarl.bench.training.megarl_step import MegarlStep
    from megarl.bench.training.settings import parse_settings
    from megarl.parallel.groups import destroy_groups

    print(
        f"torch {torch.__version__}, {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, "
        f"te {transformer_engine.__version__}, mcore {megatron.core.__version__}"
    )
    settings = parse_settings("tiny", ["sequences=3", "length=200"])
    for backend in ("local", "te"):
        step = MegarlStep(settings, backend)
        clock = Clock(step.device)
        for _ in range(2):
            clock.time(lambda step=step, clock=clock: step.step(clock))
        step.logprobs()
        print(f"smoke {backend}: {step.info}, {clock.steps[-1]}")
        destroy_groups()


if __name__ == "__main__":
    main()
