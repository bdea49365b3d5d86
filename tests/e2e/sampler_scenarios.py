# SPDX-License-Identifier: Apache-2.0
"""Run real engines, with results as JSON: ``python -m tests.e2e.sampler_scenarios SCENARIO FOLDER OUT``."""

import json
import sys
from pathlib import Path

from megarl.sampler import prepare_environment

# With one thread a sequence's logprobs do not depend on its place in a batch, which ``qwen3`` changes.
prepare_environment(2 if "qwen3" in sys.argv else 1)

from tests.e2e.plain_layout import keep_plain_if_asked  # noqa: E402

keep_plain_if_asked()

from tests.e2e.sampler_llama import llama  # noqa: E402
from tests.e2e.sampler_qwen import qwen2, qwen3  # noqa: E402


def main(scenario: str, folder: str, out: str) -> None:
    scenarios = {"llama": llama, "qwen3": qwen3, "qwen2": qwen2}
    if scenario in ("moe", "merged", "merged_moe", "direct", "shared"):
        # Imported late: engine processes import this module too, and need no Megatron.
        from tests.e2e import sampler_merged
        from tests.e2e.sampler_direct import direct
        from tests.e2e.sampler_moe import moe
        from tests.e2e.sampler_shared import shared

        scenarios |= {"moe": moe, "merged": sampler_merged.dense, "merged_moe": sampler_merged.experts}
        scenarios |= {"direct": direct, "shared": shared}
    results = scenarios[scenario](Path(folder))
    Path(out).write_text(json.dumps(results, default=float, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
