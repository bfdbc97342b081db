"""A run's observations in the columns of others, for their tools."""

from collections import Counter
from pathlib import Path

from fitting.tables.ado_columns import ado_frame
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.storage.append_log import unusable
from orchestrator.storage.run_storage import RunPath
from trials.records.observation import standing

ADO = "ado.csv"


def export_ado(folder: RunFolder, path: Path | None) -> str:
    """Writes what a run observed in the columns of IBM's ado.

    Args:
        folder: the run.
        path: where to; ``ado.csv`` in the run unless told.

    Returns:
        What was written where, in a line.

    Raises:
        StoreError: it cannot be.
    """
    gpus = {gpu.key: gpu for gpu in folder.spec().merged_catalog().gpus}
    observations = standing(folder.observations())
    frame = ado_frame(observations, gpus)
    written = _write(folder, path, frame.to_csv(index=False))
    counts = Counter(frame["basis"]) if len(frame) else Counter()
    told = ", ".join(f"{count} {basis}" for basis, count in sorted(counts.items())) or "none"
    left = len(observations) - len(frame)
    others = f"; left out {left} that say nothing of what fits" if left else ""
    return f"{written}: {len(frame)} observations, {told}{others}"


def _write(folder: RunFolder, path: Path | None, text: str) -> RunPath:
    if path is None:
        return folder.write(ADO, text)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise unusable(path, "written", error) from None
    return path
