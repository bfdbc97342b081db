"""Observations of any source, read from a table into the step times that laws are fitted to.

The canonical columns are ``gpu, model, batch_size, examples_per_second`` and a length of examples;
tables of IBM's ado (``fitting.tables.ado_columns``) are read as they are.
"""

import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from fitting.families.records import FamilyName, Suspect
from fitting.numerics.arrays import IntArray
from fitting.points.batch_lengths import Lengths
from fitting.points.step_time_rows import StepTimes
from fitting.tables import ado_columns as ado
from fitting.tables.csv_rows import COLUMNS, RowFamily, gpu_key, gpu_names, read_rows
from fitting.tables.csv_table import (
    CsvFile,
    CsvTable,
    UnusedRows,
    folded,
    positive,
    quoted,
    read_csv,
)
from gpu_catalog.suggestions import did_you_mean
from trials.records.model import presets

_WITH_DIGITS = re.compile(r"\w*\d\w*")
LENGTH_COLUMNS = {"dataset": (), "tokens": ("length",), "examples": ("count", "queries")}


@dataclass(frozen=True, slots=True)
class Observed:
    """Rows that were read from a table.

    Attributes:
        index: (rows,) names of the rows in the table's frame.
        families: (rows,) family of each row.
        rows: (rows,) step times.
        left_out: numbers of rows that were not read, by reason.
        remarks: remarks for the user, a line each.
    """

    index: pd.Index
    families: tuple[RowFamily, ...]
    rows: StepTimes
    left_out: tuple[UnusedRows, ...]
    remarks: tuple[str, ...]

    def by_family(self) -> dict[FamilyName, IntArray]:
        """Places of each family's rows, in the order of the families' keys."""
        names = {row: row.family for row in set(self.families)}
        places: defaultdict[FamilyName, list[int]] = defaultdict(list)
        for place, row in enumerate(self.families):
            places[names[row]].append(place)
        ordered = sorted(places, key=lambda name: name.key)
        return {name: np.array(places[name], np.int64) for name in ordered}

    def names_of(self, point: Suspect, places: IntArray) -> list[str]:
        """Names of the rows that merged into a point of the family with these places."""
        own = self.rows.where(places)
        is_own = (own.series == point.series) & (own.sparsity == point.sparsity)
        return [str(self.index[p]) for p in places[is_own & (own.batch_size == point.batch_size)]]


def read_frame(
    frame: pd.DataFrame,
    *,
    lengths: Mapping[str, Lengths] | None = None,
    file: CsvFile | None = None,
) -> Observed:
    """Read a table, its columns by any of their names.

    A step has ``batch_size`` examples and takes ``batch_size / examples_per_second`` seconds. The
    padded tokens of an example are ``padded_tokens``, else ``seq_len``, else the expected longest
    of ``batch_size`` examples of the row's ``dataset``.

    Raises:
        TableError: the table cannot be read; a line for each mistake.
    """
    table = CsvTable(frame, COLUMNS, file)
    families, rows = read_rows(table, lengths, timed=True)
    table.check()
    kept = np.flatnonzero(table.kept)
    return Observed(
        index=table.index[kept],
        families=tuple(families[place] for place in kept),
        rows=rows.where(kept),
        left_out=tuple(table.left_out),
        remarks=tuple(_remarks(table)),
    )


def read_lengths(path: Path) -> dict[str, Lengths]:
    """Read the lengths of the examples of data sets from a CSV of dataset, tokens and examples.

    Raises:
        TableError: the file cannot be read; a line for each mistake.
    """
    frame, file = read_csv(path)
    table = CsvTable(frame, LENGTH_COLUMNS, file)
    for name in LENGTH_COLUMNS:
        if name not in table:
            table.head_is_wrong(f"no column {name}: the columns are dataset, tokens, examples")
        else:
            table.check_filled(name)
    names = np.array([name or "" for name in table.texts("dataset")])
    tokens, examples = (table.numbers(name, positive) for name in ("tokens", "examples"))
    table.check()
    lengths = {}
    for name in np.unique(names):
        own = names == name
        distinct, place = np.unique(tokens[own], return_inverse=True)
        counts = np.bincount(place, weights=examples[own]).astype(np.float64)
        lengths[str(name)] = Lengths(tokens=distinct, examples=counts)
    return lengths


def _remarks(table: CsvTable) -> list[str]:
    unused = [name for name in table.unused if folded(name) not in ado.IGNORED]
    remarks = []
    if unused:
        named = ", ".join(f"{quoted(name)}{_near(name)}" for name in unused)
        remarks.append(f"columns not used: {named}")
    if "sparsity" not in table:
        remarks.append("no column sparsity: assumed 1 (no experts, or all of them active)")
    gpus = [None if name is None else gpu_key(name) for name in table.texts("gpu")]
    models = {
        name: model.name for model in presets().values() for name in (model.name, *model.aliases)
    }
    return [
        *remarks,
        *_mistyped(table, "GPU", gpus, gpu_names()),
        *_mistyped(table, "model", table.texts("model"), models),
    ]


def _mistyped(
    table: CsvTable, label: str, names: Sequence[str | None], catalog: Mapping[str, str]
) -> Iterator[str]:
    """Remarks on the (rows,) names that resemble one of the catalog or a more frequent one."""
    kept = zip(names, table.kept, strict=True)
    counts = Counter(name for name, is_kept in kept if is_kept and name is not None)
    more_frequent: list[str] = []
    # Of two unknown names that resemble each other, the one with fewer rows is the mistake.
    for name in sorted(counts, key=lambda name: (name not in catalog, -counts[name])):
        others = (other for other in catalog if folded(other) != folded(name))
        near = None if name in catalog else _nearest(name, (*more_frequent, *others))
        if near is not None:
            rows = "1 row" if counts[name] == 1 else f"{counts[name]} rows"
            meant = quoted(catalog.get(near, near))
            yield table.remark(f"{label} {quoted(name)} has {rows}: did you mean {meant}?")
        more_frequent.append(name)


def _nearest(name: str, others: Iterable[str]) -> str | None:
    """Most similar name with the same words with digits; case and O for 0 do not count.

    Words with digits distinguish products: H100-80GB is no mistyped A100-80GB.
    """
    by_sign = {other.upper().replace("O", "0"): other for other in others}
    sign = name.upper().replace("O", "0")
    near = difflib.get_close_matches(sign, by_sign, cutoff=0.85)
    numbers = _WITH_DIGITS.findall(sign)
    return next((by_sign[match] for match in near if _WITH_DIGITS.findall(match) == numbers), None)


def _near(column: str) -> str:
    near = did_you_mean(column, COLUMNS)
    return f" ({near.removeprefix(': ')})" if near else ""
