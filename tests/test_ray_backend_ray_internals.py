"""What is used of Ray beyond its public API: a test fails when a newer Ray no longer needs it."""

import ast
import dataclasses
import inspect
import logging
import os
import queue
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import tune
from ray._private.state import GlobalState
from ray.autoscaler.node_launch_exception import NodeLaunchException
from ray.autoscaler.v2.instance_manager import node_provider
from ray.tune import registry
from ray.tune.execution import class_cache
from ray.tune.experiment import Trial
from ray.tune.logger import TBXLoggerCallback
from ray.util.state.common import NodeState

from orchestrator.ray_backend import ray_internals
from orchestrator.ray_backend.cluster import SILENT
from orchestrator.ray_backend.ray_internals import (
    MONITOR_LOG,
    TUNE_VARIABLES,
    KnownTrainables,
    MemoryRelease,
    failed_launches,
    worker_of,
)

BACKEND = Path(ray_internals.__file__).parent
RAY = Path(ray.__file__).parent


def foreign_attributes(text: str) -> set[str]:
    """Private attributes that a module uses and does not define."""
    used, defined = set(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
    documented = {"_exit"}  # of the module os
    return {name for name in used - defined - documented if re.match("_(?!_)", name)}


def test_no_other_module_touches_what_is_private_in_ray() -> None:
    """Neither by an import nor by an attribute with an underscore, inherited ones included."""
    touches = re.compile(r"ray\._private|_raylet|class_cache|temporary_state|noqa: SLF001")
    texts = {path.name: path.read_text(encoding="utf-8") for path in BACKEND.glob("*.py")}
    assert foreign_attributes(texts.pop("ray_internals.py")) >= {"_trial_writer", "_trial_runs"}
    assert [name for name, text in texts.items() if touches.search(text)] == []
    assert {
        name: found for name, text in texts.items() if (found := foreign_attributes(text))
    } == {}


def test_no_public_api_says_which_nodes_drain_or_what_is_free_on_each() -> None:
    """`ray.util.state` has the fields of this class."""
    fields = {field.name for field in dataclasses.fields(NodeState)}
    assert "resources_total" in fields
    assert not [name for name in fields if "drain" in name or "avail" in name or "free" in name]
    assert hasattr(GlobalState, "get_draining_nodes")
    assert hasattr(GlobalState, "available_resources_per_node")


def test_tune_still_hands_keys_of_aws_to_workers() -> None:
    """In the module's own text: this process may have replaced the set."""
    names = runpy.run_path(class_cache.__file__)["ENV_VARS_TO_PROPAGATE"]
    assert "AWS_SECRET_ACCESS_KEY" in names


def test_a_trial_of_tune_still_takes_no_idle_worker() -> None:
    """It has a variable of its own: Ray starts idle workers for nothing."""
    assert class_cache.DEFAULT_ENV_VARS


PRINTED = """
from types import SimpleNamespace
import ray
from ray._private import worker
messages = iter([{"job_id": None, "error_message": "A worker died."}])
until = iter([False, True])
subscriber = SimpleNamespace(subscribe=lambda: None, poll=lambda: (None, next(messages)))
driver = SimpleNamespace(current_job_id=ray.JobID.nil(), gcs_error_subscriber=subscriber)
worker.listen_error_messages(driver, SimpleNamespace(is_set=lambda: next(until)))
assert next(messages, None) is None
"""


@pytest.mark.parametrize(("variables", "lines"), [({}, 1), (SILENT, 0)])
def test_ray_prints_that_a_worker_died_unless_its_messages_are_skipped(
    variables: dict[str, str], lines: int
) -> None:
    """It reads the variables when it is imported; ``log_to_driver`` does not matter."""
    ended = subprocess.run(
        [sys.executable, "-c", PRINTED],
        env={k: v for k, v in os.environ.items() if k not in SILENT} | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.count("A worker died.") == lines


@pytest.mark.parametrize("name", TUNE_VARIABLES)
def test_tune_still_reads_its_settings_from_the_environment(name: str) -> None:
    """One that it does not read any more does nothing."""
    sources = (path for folder in ("tune", "air") for path in (RAY / folder).rglob("*.py"))
    assert any(name in path.read_text(encoding="utf-8") for path in sources)


def test_a_trial_of_tune_still_keeps_what_is_freed() -> None:
    """Under these names; under others, nothing would be freed, and nothing would fail."""
    trial = Trial("none", config={"trial": {"cell": "c", "task": "long"}}, stub=True)
    trial.evaluated_params = {"trial/task": "long"}
    trial.run_metadata.last_result = {"observation": "long"}
    assert worker_of(trial) is None
    kept = ("_default_result_or_future", "metric_analysis", "metric_n_steps")
    assert [name for name in kept if not hasattr(trial, name)] == []
    MemoryRelease().on_trial_complete(trial=trial)
    assert trial.config["trial"] == {"cell": "c"}
    assert trial.evaluated_params == {}
    assert trial.run_metadata.last_result == {"done": True}


@pytest.mark.parametrize(("made", "looks"), [(registry._Registry, 3), (KnownTrainables, 0)])
def test_tune_still_asks_ray_for_a_trainable_again_and_again(
    monkeypatch: pytest.MonkeyPatch, made: Callable[[], Any], looks: int
) -> None:
    """Once to make a trial, and twice for its resources, though this process registered it."""
    stored: dict[bytes, bytes] = {}
    asked: list[bytes] = []

    def look(key: bytes) -> bytes | None:
        asked.append(key)
        return stored.get(key)

    monkeypatch.setattr(registry, "_internal_kv_initialized", lambda: True)
    monkeypatch.setattr(registry, "_internal_kv_get", look)
    monkeypatch.setattr(
        registry, "_internal_kv_put", lambda key, value, **_: stored.update({key: value})
    )
    monkeypatch.setattr(registry._Registry, "prefix", "job")
    monkeypatch.setattr(registry._Registry, "_register_atexit", lambda _: None)
    monkeypatch.setattr(registry, "_global_registry", made())
    registry.register_trainable("known", tune.Trainable)
    Trial("known").create_placement_group_factory()
    assert len(asked) == looks
    assert len(stored) == 1  # for the workers


def test_tunes_loggers_still_have_no_argument_for_folder_and_run() -> None:
    """They keep the writer and the run of each trial under these names alone."""
    from ray.air.integrations.mlflow import MLflowLoggerCallback  # noqa: PLC0415 - only this needs it

    tensorboard = TBXLoggerCallback()
    assert not inspect.signature(TBXLoggerCallback).parameters
    for name in ("_trial_writer", "_trial_result", "_summary_writer_cls"):
        assert hasattr(tensorboard, name)
    assert not {"run_name", "params"} & inspect.signature(MLflowLoggerCallback).parameters.keys()
    assert "self._trial_runs[trial]" in inspect.getsource(MLflowLoggerCallback.log_trial_result)


class _Refusing(node_provider.NodeProviderAdapter):
    """Ray's adapter of a provider of clouds, whose provider has no quota."""

    def __init__(self) -> None:
        self._v1_provider = self
        config = SimpleNamespace(
            get_node_resources=lambda _: {},
            get_node_labels=lambda _: {},
            get_cloud_node_config=lambda _: {},
            get_config=lambda _name, default=None: default,
        )
        self._config_reader = SimpleNamespace(get_cached_autoscaling_config=lambda: config)
        self._errors_queue: queue.Queue[Any] = queue.Queue()

    def create_node_with_resources_and_labels(self, *_: Any) -> None:
        raise NodeLaunchException("VcpuLimitExceeded", "You have requested more", None)


def test_why_a_node_was_not_started_is_in_the_autoscalers_log_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray's own adapter writes the line; its error, which the status repeats, has no reason."""
    refusing, log = _Refusing(), logging.FileHandler(tmp_path / MONITOR_LOG)
    log.setFormatter(logging.Formatter("%(asctime)s\tINFO node_provider.py:491 -- %(message)s"))
    logger = logging.getLogger(node_provider.__name__)
    monkeypatch.setattr(logger, "handlers", [log])
    monkeypatch.setattr(logger, "level", logging.INFO)
    refusing._launch_nodes_by_type("a40-spot", 1, "request")
    log.close()
    error = refusing._errors_queue.get()
    assert "VcpuLimitExceeded" not in str(error)
    (failure,) = failed_launches(tmp_path)
    assert failure.node_type == "a40-spot"
    assert "VcpuLimitExceeded" in failure.reason
    (tmp_path / MONITOR_LOG).unlink()
    assert failed_launches(tmp_path) == ()
