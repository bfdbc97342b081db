"""From a sweep specification to a cost ranking: plan, run on Ray, fit, rank, report.

In a notebook, ``load_run("runs/my")`` has a run as pandas frames.
"""

from os import PathLike
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.reporting.notebook import LoadedRun


def load_run(path: str | PathLike[str]) -> "LoadedRun":
    """Reads a run as pandas frames: see ``orchestrator.reporting.notebook``.

    Args:
        path: of the run folder, or s3://BUCKET/FOLDER.

    Raises:
        StoreError: there is no run, or a file of it cannot be read.
    """
    from orchestrator.reporting import (  # noqa: PLC0415 - pandas, which no command needs at once
        notebook as loaded_run,
    )

    return loaded_run.load_run(path)
