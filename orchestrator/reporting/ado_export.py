"""Export of a run's observations as a CSV with the columns of IBM's ado."""

from collections import Counter
from pathlib import Path

from fitting.tables.ado_columns import ado_frame
from gpu_catalog.safe_text import spreadsheet_cell
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.storage.append_log import unusable
from orchestrator.storage.run_storage import RunPath
from trials.records.observation import without_superseded

ADO = "ado.csv"


def export_ado(folder: RunFolder, path: Path | None) -> str:
    """Write a run's observations with the columns of IBM's ado.

    Args:
        folder: the run.
        path: file to write; None for ``ado.csv`` in the run folder.

    Returns:
        One line: the file, the number of rows of each basis, and how many were not exported.

    Raises:
        StoreError: the file cannot be written.
    """
    gpus = {gpu.key: gpu for gpu in folder.spec().merged_catalog().gpus}
    observations = without_superseded(folder.observations())
    frame = ado_frame(observations, gpus)
    written = _write(folder, path, frame.map(spreadsheet_cell).to_csv(index=False))
    counts = Counter(frame["basis"]) if len(frame) else Counter()
    bases = ", ".join(f"{count} {basis}" for basis, count in sorted(counts.items())) or "none"
    dropped = len(observations) - len(frame)
    kinds = "failures, drawn lengths or several processes without a GPU"
    note = f"; {dropped} not exported: {kinds}" if dropped else ""
    return f"{written}: {len(frame)} observations, {bases}{note}"


def _write(folder: RunFolder, path: Path | None, text: str) -> RunPath:
    if path is None:
        return folder.write(ADO, text)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise unusable(path, "written", error) from None
    return path
