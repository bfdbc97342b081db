"""Rows of a table as step times, each with the family that it names."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import cast, get_args

import numpy as np

from fitting.families.records import FamilyName
from fitting.numerics.arrays import FloatArray
from fitting.points.batch_lengths import Lengths
from fitting.points.fit_points import gpu_name
from fitting.points.step_time_rows import StepTimes
from fitting.tables import ado_columns as ado
from fitting.tables.csv_table import CsvTable, folded, positive, quoted, whole
from gpu_catalog.catalog import load_catalog
from gpu_catalog.suggestions import did_you_mean, near_matches
from trials.records.cell import Weights
from trials.records.observation import Basis

# Canonical columns and their synonyms without case and punctuation. The paper calls an example a
# query, and its artifact's columns have that word.
COLUMNS: dict[str, tuple[str, ...]] = {
    "gpu": ("gpumodel", "gputype", "gpuname", "device", "devicename", "accelerator"),
    "model": ("modelname", "modelid", "llm"),
    "sparsity": ("sparsities",),
    "seq_len": (
        *("sequencelength", "seqlength", "sequencelen", "tokensperexample", "tokensperquery"),
        *("tokenspersample", "modelmaxlength", "maxseqlength", "maxseqlen", "maxsequencelength"),
    ),
    "padded_tokens": (
        *("paddedtokensperexample", "paddedtokensperquery", "paddedlength", "paddedlen"),
    ),
    "dataset": ("datasetname", "datasetid"),
    "batch_size": ("batch", "bs", "bsz", "batchsizes"),
    "examples_per_second": (
        *("exampless", "examplespers", "examplespersec", "examplepersecond"),
        *("samplespersecond", "sampless", "samplespers", "samplespersec"),
        *("queriespersecond", "queriess", "queriespers", "queriespersec", "querypersecond", "qps"),
    ),
    "recipe": (),
    "method": ("finetuningmethod", "peftmethod"),
    "weights": (),
    "software": ("softwarestack",),
    "stack": (),
    "basis": (),
    **ado.COLUMNS,
}
NEEDED = {
    "gpu": "a key of 'catalog gpus' or any other name",
    "model": "the name of the model",
    "batch_size": "examples per step",
    "examples_per_second": "training examples per second",
}
UNKNOWN_RECIPE = "unknown-recipe"
LEFT_SEVERAL_GPUS = "several GPUs (number_gpus above 1)"
LEFT_INVALID = "no valid run: out of memory or rejected (is_valid 0)"
LEFT_CAPPED = "capped: the speed is that of a larger GPU"
LEFT_UNTIMED = "no throughput"


@dataclass(frozen=True, slots=True)
class RowFamily:
    """Family that a row names; None for what the row leaves open."""

    model: str | None
    weights: str | None
    recipe: str | None
    basis: str | None
    software: str | None

    @property
    def family(self) -> FamilyName:
        """Name of the family; an open recipe is unknown, an open basis measured."""
        return FamilyName(
            model=self.model or "",
            weights=cast("Weights | None", self.weights),  # read_rows has checked it
            recipe=self.recipe or UNKNOWN_RECIPE,
            basis=Basis(self.basis or Basis.MEASURED),
            software=self.software,
        )


def read_rows(
    table: CsvTable, lengths: Mapping[str, Lengths] | None, *, timed: bool
) -> tuple[list[RowFamily], StepTimes]:
    """Read the family and the step time of every row, those left out included.

    Mistakes are recorded in the table. Rows that are not ``timed`` are questions without a
    throughput: their seconds are nan.
    """
    _check_head(table, lengths, timed=timed)
    _leave_out(table, timed=timed)
    batch_size = table.numbers("batch_size", whole)
    seq_len = table.numbers("seq_len", positive)
    padded = _padded(table, batch_size, seq_len, lengths or {})
    families, gpus = _families(table), _gpus(table)
    rows = StepTimes(
        gpu=np.array(gpus, np.str_),
        series=np.array(_series(table, gpus, seq_len), np.str_),
        batch_size=batch_size,
        tokens=batch_size * padded,
        sparsity=np.nan_to_num(table.numbers("sparsity", _share), nan=1.0),
        seconds=batch_size / _rate(table, seq_len) if timed else np.full(len(table), np.nan),
    )
    for name in ("model", "batch_size"):
        table.check_filled(name)
    return families, rows


def gpu_key(name: str) -> str:
    """Catalog key of a GPU, by its name in any case and punctuation.

    A GPU without a key keeps its name, less ``/`` and ``@``, which separate the parts of a series.
    """
    return _gpu_keys().get(folded(name), name.replace("/", "-").replace("@", "-"))


@cache
def _gpu_keys() -> dict[str, str]:
    return {folded(name): key for name, key in gpu_names().items()}


def gpu_names() -> dict[str, str]:
    """Catalog keys by all names of their GPUs."""
    return {
        name: gpu.key
        for gpu in load_catalog().gpus
        for full in (gpu.key, *gpu.device_names)
        for name in (full, full.removeprefix("NVIDIA "))
    }


def _check_head(table: CsvTable, lengths: Mapping[str, Lengths] | None, *, timed: bool) -> None:
    substitutes = {"gpu": "number_gpus", "examples_per_second": ado.RATE}
    for name, meaning in NEEDED.items():
        is_there = name in table or substitutes.get(name, name) in table
        if not is_there and (timed or name != "examples_per_second"):
            table.head_is_wrong(f"no column {name}: add it ({meaning}){_meant(table, name)}")
    if not ("seq_len" in table or "padded_tokens" in table or (lengths and "dataset" in table)):
        table.head_is_wrong(
            "no column says how long examples are: add seq_len or padded_tokens (tokens per "
            "example), or a dataset and its lengths (--lengths CSV of dataset, tokens, examples)"
            + _meant(table, "seq_len")
        )


def _meant(table: CsvTable, name: str) -> str:
    """Suggestion of an unused column for one that is missing."""
    near = near_matches(name, table.unused)
    return f" or rename {quoted(near[0])}" if near else ""


def _leave_out(table: CsvTable, *, timed: bool) -> None:
    """Leave out the rows without the time of a step on one GPU."""
    gpus = table.numbers("number_gpus", _count)
    table.leave_out(gpus > 1, LEFT_SEVERAL_GPUS)
    if not timed:
        return
    table.leave_out(ado.invalid(table), LEFT_INVALID)
    table.leave_out(ado.of_shorter_texts(table), ado.LEFT_SHORTER)
    capped = [text == Basis.CAPPED for text in table.texts("basis")]
    table.leave_out(np.array(capped, bool), LEFT_CAPPED)
    name = "examples_per_second" if "examples_per_second" in table else ado.RATE
    if name in table:
        untimed = [text is None for text in table.texts(name)]
        table.leave_out(np.array(untimed, bool), LEFT_UNTIMED)


def _rate(table: CsvTable, seq_len: FloatArray) -> FloatArray:
    """(rows,) examples per second."""
    if "examples_per_second" in table or ado.RATE not in table:
        return table.numbers("examples_per_second", positive)
    return table.numbers(ado.RATE, positive) / seq_len


def _padded(
    table: CsvTable, batch_size: FloatArray, seq_len: FloatArray, lengths: Mapping[str, Lengths]
) -> FloatArray:
    """(rows,) tokens that each example of a row's batch is padded to."""
    given = table.numbers("padded_tokens", positive)
    padded = np.where(np.isfinite(given), given, seq_len)
    datasets = table.texts("dataset")
    for place in np.flatnonzero(table.kept & ~np.isfinite(padded)):
        dataset, size = datasets[place], batch_size[place]
        if dataset is not None and dataset in lengths:
            if np.isfinite(size):
                padded[place] = lengths[dataset].padded(size)
        elif dataset is not None and lengths:
            near = did_you_mean(dataset, lengths)
            text = f"no lengths of {quoted(dataset)} are given{near or ': add them, or seq_len'}"
            table.row_is_wrong("dataset", int(place), text)
        elif "seq_len" in table or "padded_tokens" in table:
            name = "seq_len" if "seq_len" in table else "padded_tokens"
            table.row_is_wrong(name, int(place), "is empty: give the tokens per example")
    return padded


def _families(table: CsvTable) -> list[RowFamily]:
    _check_one_of(table, "basis", (Basis.MEASURED.value, Basis.SIMULATED.value))
    _check_one_of(table, "weights", get_args(Weights))
    names = ("model", "weights", "recipe", "method", "basis", "software", "stack")
    columns = zip(*map(table.texts, names), ado.settings(table), strict=True)
    return [
        RowFamily(model, weights, recipe or method, basis, software or stack or settings or None)
        for model, weights, recipe, method, basis, software, stack, settings in columns
    ]


def _check_one_of(table: CsvTable, name: str, allowed: tuple[str, ...]) -> None:
    for place, text in enumerate(table.texts(name)):
        if table.kept[place] and text is not None and text not in allowed:
            near = did_you_mean(text, allowed)
            choices = " or ".join(allowed)
            table.row_is_wrong(name, place, f"must be {choices}, not {quoted(text)}{near}")


def _gpus(table: CsvTable) -> list[str]:
    """(rows,) keys, with the stack where a row has one beside its software.

    Rows of a run without a GPU have the key of the CPU.
    """
    counts = table.numbers("number_gpus", _count)
    is_there = "gpu" in table or "number_gpus" in table
    stacks = table.texts("stack") if "software" in table else [None] * len(table)
    gpus = []
    for place, (name, stack) in enumerate(zip(table.texts("gpu"), stacks, strict=True)):
        if name is None and is_there and table.kept[place] and counts[place] != 0:
            table.row_is_wrong("gpu", place, "is empty: name the GPU, or leave the row out")
        key = "cpu" if name is None else gpu_key(name)
        gpus.append(key if stack is None else gpu_name(key, stack))
    return gpus


def _series(table: CsvTable, gpus: list[str], seq_len: FloatArray) -> list[str]:
    """(rows,) names of series: a GPU with a data set, a length, or both."""
    datasets = table.texts("dataset")
    lengths = [f"seq{length:g}" if np.isfinite(length) else None for length in seq_len]
    parts = zip(gpus, datasets, lengths, strict=True)
    return ["/".join(filter(None, of_row)) for of_row in parts]


def _count(value: float) -> str | None:
    return None if value >= 0 and value.is_integer() else "a whole number of at least 0"


def _share(value: float) -> str | None:
    return None if 0 < value <= 1 else "above 0 and at most 1 (active experts over experts)"
