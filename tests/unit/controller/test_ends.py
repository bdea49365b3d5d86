# SPDX-License-Identifier: Apache-2.0
"""Test how a run ends what it started."""

import pytest
from rich.console import Console

from megarl.controller.recording.screen import Screen
from megarl.errors import WorkerError
from megarl.launch.actors import stop_engines


class SlowEngines:
    """Engines that do not end in time."""

    def close(self, seconds: float) -> None:
        raise WorkerError(f"sampler 0 did not answer within {seconds:.0f} s")


def test_an_engine_that_stops_slowly_does_not_fail_a_complete_run(capsys: pytest.CaptureFixture) -> None:
    stop_engines(SlowEngines(), Screen(1, Console(force_terminal=False)))  # type: ignore[arg-type]
    assert "sampler 0 did not answer within 10 s" in capsys.readouterr().out
