"""Logging of a running sweep to TensorBoard or MLflow, by Ray Tune's own callbacks.

Both are for watching only: all results come from the observations in the run folder.
"""

import importlib.util
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from gpu_catalog.safe_text import inner_path
from orchestrator.storage.run_storage import RunPath, StoreError
from trials.records.cell import Cell
from trials.records.observation import Observation
from trials.records.profile import Logged

logger = logging.getLogger(__name__)

Tool = Literal["tensorboard", "mlflow"]
MLFLOW_URI = "MLFLOW_TRACKING_URI"  # MLflow's own variable
GIB = 2**30
HOOKS = ("setup", "on_trial_start", "on_trial_result", "on_trial_complete", "on_trial_error")


def check_tools(tools: Sequence[Tool], folder: RunPath) -> None:
    """Check that a sweep can be logged to these tools.

    Raises:
        StoreError: a package or an address is missing, or the run folder is not local.
    """
    if "tensorboard" in tools and not isinstance(folder, Path):
        raise StoreError(f"{folder}: --log-to tensorboard needs a local folder: give a local --out")
    if "mlflow" not in tools:
        return
    if importlib.util.find_spec("mlflow") is None:
        raise StoreError("--log-to mlflow: MLflow is not installed: pip install '.[mlflow]'")
    if not os.environ.get(MLFLOW_URI):
        raise StoreError(f"--log-to mlflow: {MLFLOW_URI} is not set: export your server's address")


def metrics(observation: Logged) -> dict[str, float]:
    """Metrics of a probe, by name; none of a profile."""
    if not isinstance(observation, Observation):
        return {}
    values = {
        "batch_size": float(observation.batch_size),
        "fits": float(observation.outcome == "FITS"),
        "probe_seconds": observation.seconds,
    }
    measured = observation.measurement
    if observation.memory is not None:
        values["peak_gib"] = observation.memory.peak_allocated_bytes / GIB
    if measured is not None and measured.step_seconds:
        steps = sorted(measured.step_seconds)
        values["step_seconds"] = steps[len(steps) // 2]
        values["examples_per_second"] = observation.examples_per_step / values["step_seconds"]
    return values


def parameters(cell: Cell) -> dict[str, str | float]:
    """Parameters of a trial."""
    return {
        "gpu": cell.gpu,
        "model": cell.model,
        "recipe": cell.recipe.key,
        "sparsity": cell.sparsity,
        "seq_len": float(cell.seq_len),
    }


def tune_callbacks(
    tools: Sequence[Tool],
    folder: Path,
    name: str,
    cells: Sequence[Cell],
) -> list[Any]:
    """Ray Tune callbacks that log trials to tools; one that fails is disabled with a warning."""
    by_key = {cell.key: cell for cell in cells}
    made = {
        "tensorboard": lambda: _tensorboard(folder / "tensorboard", by_key),
        "mlflow": lambda: _mlflow(name, by_key),
    }
    return [_guarded(made[tool](), tool) for tool in dict.fromkeys(tools)]


def _guarded(callback: Any, tool: Tool) -> Any:
    """Disable a callback after its first error: Tune would give up all trials for it."""
    failed = False

    def guarded(hook: Callable[..., None]) -> Callable[..., None]:
        def call(*positional: Any, **named: Any) -> None:
            nonlocal failed
            if failed:
                return
            try:
                hook(*positional, **named)
            except Exception as error:  # noqa: BLE001 - whatever it is, the sweep continues
                failed = True
                reason = (str(error).splitlines() or [repr(error)])[0]
                logger.warning("--log-to %s: %s: the sweep continues without it", tool, reason)

        return call

    for name in HOOKS:
        setattr(callback, name, guarded(getattr(callback, name)))
    return callback


def _cell_of(trial: Any, cells: Mapping[str, Cell]) -> Cell:
    return cells[trial.config["trial"]["cell"]]


def _tensorboard(folder: Path, cells: Mapping[str, Cell]) -> Any:
    from ray.tune.logger import TBXLoggerCallback  # noqa: PLC0415 - seconds to import

    from orchestrator.ray_backend.ray_internals import (  # noqa: PLC0415 - as above
        write_to_tensorboard,
    )

    class Callback(TBXLoggerCallback):  # type: ignore[misc]
        def log_trial_start(self, trial: Any) -> None:
            # Tune's own folder is a temporary one.
            cell = _cell_of(trial, cells)
            write_to_tensorboard(self, trial, folder / inner_path(cell.key))
            trial.evaluated_params = parameters(cell)  # its table of hyperparameters

    return Callback()


def _mlflow(name: str, cells: Mapping[str, Cell]) -> Any:
    from ray.air.integrations.mlflow import MLflowLoggerCallback  # noqa: PLC0415 - as above

    from orchestrator.ray_backend.ray_internals import write_to_mlflow  # noqa: PLC0415 - as above

    class Callback(MLflowLoggerCallback):  # type: ignore[misc]
        def log_trial_start(self, trial: Any) -> None:
            # A trial's own configuration is a task in JSON, too long for a parameter.
            cell = _cell_of(trial, cells)
            run = self.mlflow_util.start_run(run_name=cell.key, tags={"cell": cell.key})
            write_to_mlflow(self, trial, run.info.run_id)
            self.mlflow_util.log_params(run_id=run.info.run_id, params_to_log=parameters(cell))

    return Callback(tracking_uri=os.environ[MLFLOW_URI], experiment_name=name)
