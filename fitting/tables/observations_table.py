"""Observations of anybody, read from a table into the step times that laws are fitted to.

A table of ours has ``gpu, model, batch_size, queries_per_second`` and how long queries are; tables
of IBM's ado (``fitting.tables.ado_columns``) are read by the same names.
"""

import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from fitting.families.records import FamilyName
from fitting.numerics.arrays import IntArray
from fitting.points.batch_lengths import Lengths
from fitting.points.step_time_rows import StepTimes
from fitting.tables import ado_columns as ado
from fitting.tables.csv_rows import COLUMNS, RowFamily, gpu_key, gpu_names, positive, read_rows
from fitting.tables.csv_table import CsvTable, SheetFile, UnusedRows, folded, quoted, read_sheet
from trials.records.model import presets

LENGTH_COLUMNS = {"dataset": (), "tokens": ("length",), "examples": ("count", "queries")}


@dataclass(frozen=True, slots=True)
class Observed:
    """Rows of a table, read.

    Attributes:
        index: (rows,) of the table's frame: what its rows are called there.
        told: (rows,) what each says of its family.
        rows: (rows,) as step times.
        left_out: rows that are not among them, by reason.
        remarks: what else a reader must know, a line each.
    """

    index: pd.Index
    told: tuple[RowFamily, ...]
    rows: StepTimes
    left_out: tuple[UnusedRows, ...]
    remarks: tuple[str, ...]

    def by_family(self) -> dict[FamilyName, IntArray]:
        """Which rows each family has, in the order of the families' keys."""
        places: defaultdict[RowFamily, list[int]] = defaultdict(list)
        for place, told in enumerate(self.told):
            places[told].append(place)
        families: defaultdict[FamilyName, list[int]] = defaultdict(list)
        for told, found in places.items():
            families[told.family] += found
        ordered = sorted(families, key=lambda family: family.key)
        return {family: np.array(sorted(families[family]), np.int64) for family in ordered}


def read_frame(
    frame: pd.DataFrame,
    *,
    lengths: Mapping[str, Lengths] | None = None,
    file: SheetFile | None = None,
) -> Observed:
    """Reads a table, its columns by any of their names.

    A step has ``batch_size`` queries and takes ``batch_size / queries_per_second`` seconds. Its
    padded tokens are ``batch_size`` times what its row says: ``padded_tokens``, else ``seq_len``,
    else the expected longest of so many examples of its ``dataset``.

    Args:
        frame: the table.
        lengths: of data sets' examples, by name.
        file: that it is from, for messages.

    Raises:
        TableError: it cannot be read; a line for each mistake.
    """
    sheet = CsvTable(frame, COLUMNS, file)
    told, rows = read_rows(sheet, lengths, timed=True)
    sheet.check()
    kept = np.flatnonzero(sheet.kept)
    return Observed(
        index=sheet.index[kept],
        told=tuple(told[place] for place in kept),
        rows=rows.where(kept),
        left_out=tuple(sheet.left_out),
        remarks=tuple(_remarks(sheet)),
    )


def read_lengths(path: Path) -> dict[str, Lengths]:
    """How long the examples of data sets are, from a CSV of dataset, tokens and examples.

    Raises:
        TableError: it cannot be read; a line for each mistake.
    """
    frame, file = read_sheet(path)
    sheet = CsvTable(frame, LENGTH_COLUMNS, file)
    for name in LENGTH_COLUMNS:
        if name not in sheet:
            sheet.head_is_wrong(f"no column {name}: the three are dataset, tokens and examples")
        else:
            sheet.check_filled(name)
    names = np.array([name or "" for name in sheet.texts("dataset")])
    tokens, examples = (sheet.numbers(name, positive) for name in ("tokens", "examples"))
    sheet.check()
    found = {}
    for name in np.unique(names):
        of = names == name
        at, place = np.unique(tokens[of], return_inverse=True)
        counts = np.bincount(place, weights=examples[of]).astype(np.float64)
        found[str(name)] = Lengths(tokens=at, examples=counts)
    return found


def _remarks(sheet: CsvTable) -> list[str]:
    unused = [name for name in sheet.unused if folded(name) not in ado.ALSO_THERE]
    found = []
    if unused:
        named = ", ".join(f"{quoted(name)}{_bracketed(sheet.near(name))}" for name in unused)
        found.append(f"columns not used: {named}")
    if "sparsity" not in sheet:
        found.append("no column sparsity: every row is taken to have one, 1 (no experts, or all)")
    gpus = [None if name is None else gpu_key(name) for name in sheet.texts("gpu")]
    models = {name: each.name for each in presets().values() for name in (each.name, *each.aliases)}
    return [
        *found,
        *_mistyped(sheet, "GPU", gpus, gpu_names()),
        *_mistyped(sheet, "model", sheet.texts("model"), models),
    ]


def _mistyped(
    sheet: CsvTable, label: str, names: Sequence[str | None], known: Mapping[str, str]
) -> Iterator[str]:
    """A line for each name that nobody knows and that most likely is another one, mistyped.

    Args:
        sheet: the table.
        label: what has these names.
        names: (rows,) of the table.
        known: what is right, by all its names.
    """
    kept = zip(names, sheet.kept, strict=True)
    counts = Counter(name for name, is_kept in kept if is_kept and name is not None)
    seen: list[str] = []
    # Of two that nobody knows, that with fewer rows is taken for the mistake.
    for name in sorted(counts, key=lambda name: (name not in known, -counts[name])):
        others = (other for other in known if folded(other) != folded(name))
        near = None if name in known else _nearest(name, (*seen, *others))
        if near is not None:
            rows = "1 row" if counts[name] == 1 else f"{counts[name]} rows"
            meant = quoted(known.get(near, near))
            yield sheet.remark(f"{label} {quoted(name)} has {rows}: did you mean {meant}?")
        seen.append(name)


def _nearest(name: str, others: Iterable[str]) -> str | None:
    """The name most alike: digits tell products apart, case and O for 0 do not."""
    alike = {other.upper().replace("O", "0"): other for other in others}
    sign = name.upper().replace("O", "0")
    near = difflib.get_close_matches(sign, alike, cutoff=0.85)
    digits = re.sub(r"\D", "", sign)
    return next((alike[match] for match in near if re.sub(r"\D", "", match) == digits), None)


def _bracketed(near: str) -> str:
    return f" ({near.removeprefix(': ')})" if near else ""
