"""Weights & Biases and MLflow: installed by ``pip install 'crossrl[loggers]'``; both work without a network.

Weights & Biases: ``WANDB_MODE=offline``. MLflow writes to ``mlflow.db`` in the run's folder unless
``MLFLOW_TRACKING_URI`` names another place.
"""

from __future__ import annotations

import importlib
import math
import os
import secrets
from collections.abc import Mapping
from typing import Any

from crossrl.files import publish_text
from crossrl.report.loggers import RunName
from crossrl.report.metrics_file import ReportError, as_number


def _import(module: str, logger: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ReportError(
            f"trainer.logger has {logger!r}, but the package {module!r} cannot be imported ({error}): "
            f"pip install 'crossrl[loggers]', or leave {logger!r} out of trainer.logger"
        ) from error


class Wandb:
    """One Weights & Biases run; its id is kept in the run's folder, so that a resumed run goes on in it."""

    name = "wandb"

    def __init__(self, run: RunName) -> None:
        wandb = _import("wandb", self.name)
        id_file = run.folder / "wandb_run_id"
        run_id = id_file.read_text().strip() if id_file.exists() else secrets.token_hex(4)
        if not id_file.exists():
            publish_text(id_file, run_id + "\n")
        try:
            self._run = wandb.init(
                project=run.project, name=run.experiment, id=run_id, resume="allow",
                dir=str(run.folder), config=dict(run.config),
            )  # fmt: skip
        except Exception as error:
            raise ReportError(
                f"wandb.init failed: {error}. Log in (wandb login), or set WANDB_MODE=offline, "
                f"or leave wandb out of trainer.logger"
            ) from error
        # Its own step must only grow, so a resumed run could not log a step again: ours is a metric of its own.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **{name: as_number(name, v) for name, v in metrics.items()}})

    def truncate_after(self, step: int) -> list[str]:
        return []  # steps logged again lie over the old ones

    def close(self, ok: bool) -> None:
        self._run.finish(exit_code=0 if ok else 1)


class MLflow:
    """One MLflow run, gone on with after a resume."""

    name = "mlflow"

    def __init__(self, run: RunName) -> None:
        self._mlflow = _import("mlflow", self.name)
        id_file = run.folder / "mlflow_run_id"
        run.folder.mkdir(parents=True, exist_ok=True)
        # MLflow 3 no longer writes plain folders: without a server it wants a data base.
        server = os.environ.get("MLFLOW_TRACKING_URI")
        uri = server or f"sqlite:///{(run.folder / 'mlflow.db').absolute()}"
        try:
            self._mlflow.set_tracking_uri(uri)
            if self._mlflow.get_experiment_by_name(run.project) is None:
                files = (run.folder / "mlflow_files").absolute().as_uri()
                self._mlflow.create_experiment(run.project, artifact_location=None if server else files)
            self._mlflow.set_experiment(run.project)
            run_id = id_file.read_text().strip() if id_file.exists() else None
            started = self._mlflow.start_run(run_id=run_id, run_name=None if run_id else run.experiment)
            if run_id is None:
                publish_text(id_file, started.info.run_id + "\n")
                self._mlflow.log_dict(dict(run.config), "config.json")
        except Exception as error:
            raise ReportError(
                f"mlflow did not start at {uri}: {error}. Set MLFLOW_TRACKING_URI, "
                f"or leave mlflow out of trainer.logger"
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # MLflow refuses "@" in names ("val-core/x/acc/mean@1"), and NaN in some stores.
        values = {name.replace("@", "_at_"): as_number(name, v) for name, v in metrics.items()}
        self._mlflow.log_metrics({name: v for name, v in values.items() if math.isfinite(v)}, step=step)

    def truncate_after(self, step: int) -> list[str]:
        return []  # a metric keeps all values of a step; the last one counts

    def close(self, ok: bool) -> None:
        self._mlflow.end_run("FINISHED" if ok else "FAILED")
