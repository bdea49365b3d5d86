# SPDX-License-Identifier: Apache-2.0
"""Run ``examples/plugin`` as a user's own Megatron script: imported from its folder, on ranks."""

import shlex
import sys
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin"
# The tiny Llama of tests.helpers.models with 132 tokens: mcore's own loss would count the padding of 131.
MODEL_ARGUMENTS = shlex.split(
    "--num-layers 4 --hidden-size 48 --ffn-hidden-size 80 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --max-position-embeddings 256 --vocab-size 132 --make-vocab-size-divisible-by 1 "
    "--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
)
TRAINING_ARGUMENTS = shlex.split(
    "--seq-length 24 --micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 1e-3 --lr-decay-style constant "
    "--log-interval 1000 --clip-grad 0.5"
)
FLAGS = {"tensor": "--tensor-model-parallel-size", "pipeline": "--pipeline-model-parallel-size"}


def script() -> Any:
    """Import the example's ``train.py``."""
    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))
    import train

    return train


def arguments(model: str | Path, layout: dict[str, int], *flags: object) -> list[str]:
    """Return a command line for the tiny Llama at a layout (``tensor``, ``pipeline``; the rest is data-parallel)."""
    sizes = [text for axis, size in layout.items() if axis in FLAGS for text in (FLAGS[axis], str(size))]
    return [*MODEL_ARGUMENTS, *TRAINING_ARGUMENTS, "--hf-model", str(model), *sizes, *map(str, flags)]


def parsed(model: str | Path, layout: dict[str, int], *flags: object) -> Any:
    """Return the command line's parsed arguments."""
    script()
    from arguments import parse_args

    return parse_args(arguments(model, layout, *flags))
