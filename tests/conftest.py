"""Settings of all tests: no prices but the shipped ones, and the longest files first."""

import contextlib
import gc
import logging
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.console import PACKAGES
from trials.simulation.tracing_child import CHILDREN

if TYPE_CHECKING:
    from fakes.s3_server import S3Server
    from playwright.sync_api import BrowserContext
    from trainer_reference.cells import Compare, ReferenceCell

    from orchestrator.run_folder.run_folder import RunFolder

ON_RAY = ("test_sweep_on_", "test_sweep_gang_on_", "test_ray_backend_")
LONGEST = (
    *("test_estimating_", "test_simulation_", "test_trainer_reference_", "test_tracing_"),
    *(
        "test_storage_s3",
        "test_child_process_",
        "test_ranks_",
        "test_fitting_clock",
        "test_training_",
        "test_run_",
    ),
)
FROZEN = pytest.StashKey[int]()
"""Number of imported modules whose objects no garbage collection passes over."""
MANY_MODULES = 100


def pytest_configure(config: pytest.Config) -> None:
    """Set an empty data folder before any module is imported, and no time limit of an example."""
    os.environ["XDG_DATA_HOME"] = str(config.rootpath / ".pytest_cache" / "no-data")
    with contextlib.suppress(ModuleNotFoundError):
        from hypothesis import settings  # noqa: PLC0415 - not on machines with a GPU

        settings.register_profile("untimed", deadline=None)
        settings.load_profile("untimed")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests import: what they make lives on."""
    gc.disable()
    collected = yield
    gc.enable()
    return collected


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest files first: no process is left with one when the others are done."""
    places = (ON_RAY, LONGEST)
    items.sort(key=lambda item: [not item.path.name.startswith(names) for names in places])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Exempt what imports made from garbage collection, which counting memory asks for.

    It takes 0.3 s to pass over all objects of pytest and PyTorch, which live on.
    """
    if len(sys.modules) > item.config.stash.get(FROZEN, 0) + MANY_MODULES:
        gc.collect()
        gc.freeze()
        item.config.stash[FROZEN] = len(sys.modules)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each file to one process, and all that start Ray to the same.

    Several clusters at once take longer than one after another.
    """
    from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415 - not on machines with a GPU

    class Files(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "ray" if Path(file).name.startswith(ON_RAY) else file

    return Files(config, log)


@pytest.fixture(scope="session", autouse=True)
def _traces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep traces in a cache that starts empty and that all tests share, as their processes do."""
    from fakes.tracing_server import shared_command  # noqa: PLC0415 - pytest adds tests/ to the path later

    folder, run = tmp_path_factory.getbasetemp(), os.getpid()
    if "PYTEST_XDIST_WORKER" in os.environ:  # whose folder is in that of the run
        folder, run = folder.parent, os.getppid()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patched.setattr(CHILDREN, "_command", shared_command(folder, run))
        yield


@pytest.fixture(scope="module")
def made_for_small_steps() -> Iterator[None]:
    """Apply the settings for small steps to a file that names this fixture in ``pytestmark``."""
    from fakes.torch_process import small_steps  # noqa: PLC0415 - imports torch

    with small_steps():
        yield


@pytest.fixture(scope="module")
def compare(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Compare"]:
    """Compare steps of the project with the trainer's: same weights, same examples."""
    from fakes.bf16_products import products_by_fp32  # noqa: PLC0415 - imports torch
    from trainer_reference.comparison import compare as compare_in  # noqa: PLC0415 - seconds
    from trainer_reference.models import write_model  # noqa: PLC0415 - as above

    folder = tmp_path_factory.mktemp("models")

    def compare(cell: "ReferenceCell", peak_tolerance: float) -> None:
        if not (folder / cell.model).exists():
            write_model(cell.model, folder)
        compare_in(cell, folder, peak_tolerance=peak_tolerance)

    with products_by_fp32():
        yield compare


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator["BrowserContext"]:
    """Chromium, opened once for the tests of a file."""
    from fakes.browser import opened_browser  # noqa: PLC0415 - few tests need it

    with opened_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _quiet_libraries() -> Iterator[None]:
    """Packages log to nowhere at the start of a test, whatever command an earlier one ran."""
    yield
    for name in PACKAGES:
        logging.getLogger(name).handlers.clear()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> "Iterator[S3Server]":
    """A server with an empty bucket."""
    from builders.s3_runs import empty_bucket  # noqa: PLC0415 - boto3 and moto, for buckets only

    with empty_bucket(monkeypatch, tmp_path) as server:
        yield server


@pytest.fixture
def run(server: "S3Server") -> "RunFolder":
    """A new run in the bucket of the server."""
    from builders.runs import ONE_CELL, spec_of  # noqa: PLC0415 - as above
    from builders.s3_runs import URL, the_run  # noqa: PLC0415 - as above

    from orchestrator.run_folder.run_folder import open_run  # noqa: PLC0415 - as above

    del server
    open_run(URL, ONE_CELL, spec_of())
    return the_run()
