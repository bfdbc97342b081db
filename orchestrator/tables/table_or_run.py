"""Path of a run folder, or of a table of measurements in its place."""

from pathlib import Path

from orchestrator.storage.run_storage import RunPath


def run_of(path: RunPath | str) -> RunPath | str:
    """Run folder of a path: of a CSV the folder ``NAME.run`` beside it, written anew.

    Raises:
        TableError: the CSV cannot be read; a line for each mistake.
        StoreError: the folder cannot be written.
    """
    if isinstance(path, str) and "://" not in path:
        path = Path(path)
    if not isinstance(path, Path) or path.suffix.casefold() != ".csv" or path.is_dir():
        return path
    from orchestrator.tables.table_run import table_run  # noqa: PLC0415 - pandas, for tables only

    return table_run(path)
