"""MLflow: a database in the run directory, unless MLFLOW_TRACKING_URI names a server."""

# pyright: basic, reportMissingImports=false
from __future__ import annotations

import json
import os
from collections.abc import Sequence

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from dualtune.show.trackers.tracker import PROJECT, TrackedRow, TrackedRun

TAG = "dualtune.id"
MOST_PARAMS, LONGEST = 100, 6000  # what MLflow takes at once


class ToMlflow:
    """A run of MLflow's that is found again by a tag with the id of ours."""

    def __init__(self, run: TrackedRun) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.directory}/mlflow.db"
        self._client = MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name(PROJECT)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(PROJECT)
        runs = self._client.search_runs([experiment_id], filter_string=f"tags.`{TAG}` = '{run.id}'")
        tracked = runs[0] if runs else self._client.create_run(experiment_id, run_name=run.name, tags={TAG: run.id})
        self._id = tracked.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        recorded = tracked.data.params  # MLflow refuses another value for a parameter that it has
        config = {key: value if isinstance(value, str) else json.dumps(value) for key, value in run.config.items()}
        params = [Param(key, value[:LONGEST]) for key, value in config.items() if key not in recorded]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + MOST_PARAMS])

    def log(self, rows: Sequence[TrackedRow]) -> None:
        metrics = [
            Metric(name, number, int(row.time_s * 1000), row.step)
            for row in rows
            for name, number in row.numbers.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


open_tracker = ToMlflow
