# SPDX-License-Identifier: Apache-2.0
"""Send a run to MLflow, at ``MLFLOW_TRACKING_URI``: a server, or a local data base."""

import os
import re
import time
from collections.abc import Mapping
from typing import Any

from megarl.controller.trackers.base import TrackedRun
from megarl.report.panels import numbers

# Limits of MLflow's log_batch.
MOST_PARAMS, LONGEST_PARAM = 100, 500


class MlflowTracker:
    """A run of MLflow. Its experiment is ``MLFLOW_EXPERIMENT_NAME`` or the project."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client, self._step = MlflowClient(), run.step
        if run.id:
            self.id = run.id
            self._client.update_run(self.id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", run.project)
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        tags = {"folder": str(run.folder)}
        self.id = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        params = [Param(key, str(value)[:LONGEST_PARAM]) for key, value in run.config.items()]
        for start in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self.id, params=params[start : start + MOST_PARAMS])

    def log(self, row: Mapping[str, float]) -> None:
        """Send a row."""
        self._step = int(row["step"])
        self._send(row)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Send the summary as metrics, and end the run."""
        self._send({f"summary/{name}": value for name, value in numbers(summary or {}).items()})
        self._client.set_terminated(self.id, "FINISHED" if summary is not None else "FAILED")

    def _send(self, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        # Names of a task's own metrics may hold characters that MLflow refuses.
        metrics = [Metric(re.sub(r"[^\w\-. /]", "_", name), float(v), now, self._step) for name, v in values.items()]
        if metrics:
            self._client.log_batch(self.id, metrics=metrics)
