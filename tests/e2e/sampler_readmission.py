# SPDX-License-Identifier: Apache-2.0
"""A part of ``sampler_scenarios``: an engine that a failed sync left behind comes back."""

from typing import Any

from megarl.errors import WeightSyncError
from tests.e2e.sampler_rig import Rig, prompts, raised

# Long enough that requests still run when the engine is readmitted.
REQUESTS = 240


def readmission(rig: Rig, version: int) -> dict[str, Any]:
    """Fail a sync under requests that run, readmit the engine, and go on; ``version`` and the next two are used."""
    rig.manager.sync(version, "adapter")
    running = rig.start_requests(rig.sampler.generate(prompts(REQUESTS), version), REQUESTS)
    rig.trainer.change(lambda named: [*named[:-1], (named[-1][0], named[-1][1] * float("nan"))])
    failed = raised(lambda: rig.manager.sync(version + 1, "adapter"))
    rig.trainer.change(lambda named: named)
    rig.trainer.randomise(version + 1)
    results = {
        "failed": failed,
        "stale": list(rig.manager.stale),
        "refused": raised(lambda: rig.generate(prompts(1), version)),
        "not_yet": raised(lambda: rig.manager.sync(version + 1, "adapter")),
        "in_flight": rig.sampler.gate.in_flight,
        "canary": raised(lambda: rig.manager.readmit(version + 1, check=disagree)),
        "ended": raised(lambda: running.result(60)),
        "still_stale": raised(lambda: rig.generate(prompts(1), version + 1)),
    }
    checked: list[str] = []
    results["kinds"] = [report.kind for report in rig.manager.readmit(version + 1, check=checked.extend)]
    results["checked"] = checked
    results["error"] = rig.error(rig.generate(prompts(4), version + 1))
    rig.trainer.randomise(version + 2)
    rig.manager.sync(version + 2, "adapter")
    results["next_error"] = rig.error(rig.generate(prompts(4), version + 2))
    return results


def disagree(names: list[str]) -> None:
    """Stand in for a canary that fails."""
    raise WeightSyncError(f"{names} and the trainer do not agree")
