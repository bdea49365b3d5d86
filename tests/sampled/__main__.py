# SPDX-License-Identifier: Apache-2.0
"""Train tiny models of architectures that only transformers has, with both contents of a sync; print a table.

    python -m tests.sampled [ARCHITECTURE ...]

A row passes if no token's logprob differs between vLLM and the trainer, or vLLM and plain PEFT with the adapter of that
version, by more than ``BOUND``, in float32 over four updates. All rows take a quarter of an hour on two cores.
"""

import sys
import tempfile
from pathlib import Path

from tests.helpers.sampled import check_sampled
from tests.helpers.sampled_run import CASES, mismatch, train

BOUND = 1e-4


def measure(name: str, content: str) -> tuple[bool, str]:
    """Return whether a case does what it should, and what it did."""
    if content == "merged" and not CASES[name].merged:
        return True, "not merged"
    with tempfile.TemporaryDirectory() as folder:
        try:
            run, output = train(Path(folder), name, f"checkpoint_engine.content={content}")
            if run is None:
                refused = CASES[name].refused in output
                return refused, "refused" if refused else output.strip().splitlines()[-1]
            check_sampled(run, Path(folder) / "recipe.yaml")
            worst = mismatch(run)
            return worst <= BOUND, f"{worst:.1e}"
        except AssertionError as error:
            return False, " ".join(str(error).split())[-300:] or "see check_sampled"


def main(names: list[str]) -> int:
    """Print one row per architecture; return 1 if one failed."""
    failed = 0
    print(f"{'architecture':18} {'adapter':>10} {'merged':>10}")
    for name in names or CASES:
        good, texts = zip(*(measure(name, content) for content in ("adapter", "merged")), strict=True)
        failed += not all(good)
        print(f"{name:18} {texts[0]:>10} {texts[1]:>10}{'' if all(good) else '  FAILED'}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
