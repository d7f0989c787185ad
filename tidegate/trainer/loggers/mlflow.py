"""Sends metrics to MLflow. Its client itself reads `MLFLOW_TRACKING_URI`, its credentials and similar."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from tidegate.config import Settings
from tidegate.trainer.loggers.values import flattened, public_settings, scalars

EXPERIMENT = "tidegate"
"""Name of the experiment, unless `MLFLOW_EXPERIMENT_NAME` is set."""
LONGEST_VALUE = 500
"""Characters of a setting that every MLflow server accepts."""
MOST_PARAMS = 100
"""Settings that MLflow accepts in one request."""


class MLflow:
    """Creates an MLflow run for each start of a run, with the run's name and its settings as parameters."""

    def __init__(self, settings: Settings, step: int) -> None:
        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        tags = {"tidegate.resumed_from": step}
        run = self._client.create_run(experiment, run_name=settings.run.name, tags=tags)
        self._run: str = run.info.run_id
        params = [Param(key, value[:LONGEST_VALUE]) for key, value in flattened(public_settings(settings))]
        for start in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._run, params=params[start : start + MOST_PARAMS])

    def step(self, metrics: Mapping[str, float]) -> None:
        # MLflow counts milliseconds.
        when, step = round(1000 * metrics["time"]), int(metrics["step"])
        values = [Metric(name, value, when, step) for name, value in scalars(metrics).items()]
        self._client.log_batch(self._run, metrics=values)

    def close(self) -> None:
        self._client.set_terminated(self._run)


make = MLflow
