"""The rows of a sheet as step times, and what each says of its family."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from fitting.families.records import FamilyName
from fitting.numerics.arrays import FloatArray
from fitting.points.batch_lengths import Lengths
from fitting.points.fit_points import gpu_name
from fitting.points.step_time_rows import StepTimes
from fitting.tables import ado_columns as ado
from fitting.tables.csv_table import CsvTable, folded, quoted
from gpu_catalog.catalog import load_catalog
from gpu_catalog.suggestions import did_you_mean, near_matches
from trials.records.cell import Weights
from trials.records.observation import Basis

# What else columns are called, without case and punctuation.
COLUMNS: dict[str, tuple[str, ...]] = {
    "gpu": ("gpumodel", "gputype", "gpuname", "device", "devicename", "accelerator"),
    "model": ("modelname", "modelid", "llm"),
    "sparsity": ("sparsities",),
    "seq_len": (
        *("sequencelength", "seqlength", "sequencelen", "tokensperquery", "tokenspersample"),
        *("modelmaxlength", "maxseqlength", "maxseqlen", "maxsequencelength"),
    ),
    "padded_tokens": ("paddedtokensperquery", "paddedlength", "paddedlen"),
    "dataset": ("datasetname", "datasetid"),
    "batch_size": ("batch", "bs", "bsz", "batchsizes"),
    "queries_per_second": (
        *("queriess", "queriespers", "queriespersec", "qps", "querypersecond"),
        *("samplespersecond", "sampless", "samplespersec", "examplespersecond"),
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
    "gpu": "which GPU, a key of 'catalog gpus' or any name",
    "model": "which model",
    "batch_size": "queries per step",
    "queries_per_second": "training examples per second",
}
UNKNOWN_RECIPE = "unknown-recipe"
_WEIGHTS: dict[str, Weights] = {"random": "random", "pretrained": "pretrained"}
LEFT_SEVERAL_GPUS = "ran on several GPUs (number_gpus above 1)"
LEFT_INVALID = "did not run: out of memory, or refused (is_valid 0)"
LEFT_CAPPED = "capped: their speed is that of the larger GPU that stood in"
LEFT_UNTIMED = "have no throughput"


@dataclass(frozen=True, slots=True)
class RowFamily:
    """What a row says of its family; None for what it does not say."""

    model: str | None
    weights: str | None
    recipe: str | None
    basis: str | None
    software: str | None

    @property
    def family(self) -> FamilyName:
        """The family, what is not said being taken as unknown, and as measured."""
        return FamilyName(
            model=self.model or "",
            weights=_WEIGHTS.get(self.weights or ""),
            recipe=self.recipe or UNKNOWN_RECIPE,
            basis=Basis(self.basis or Basis.MEASURED),
            software=self.software,
        )


def read_rows(
    sheet: CsvTable, lengths: Mapping[str, Lengths] | None, *, timed: bool
) -> tuple[list[RowFamily], StepTimes]:
    """(rows,) of a sheet, those that are left out with them; the sheet is told their mistakes.

    Args:
        sheet: by ``COLUMNS``.
        lengths: of data sets' examples, by name.
        timed: whether there must be a throughput; else seconds are nan, and rows are questions.
    """
    _check_head(sheet, lengths, timed=timed)
    _leave_out(sheet, timed=timed)
    batch_size = sheet.numbers("batch_size", _whole)
    seq_len = sheet.numbers("seq_len", positive)
    padded = _padded(sheet, batch_size, seq_len, lengths or {})
    told, gpus = _told(sheet), _gpus(sheet)
    rows = StepTimes(
        gpu=np.array(gpus, np.str_),
        series=np.array(_series(sheet, gpus, seq_len), np.str_),
        batch_size=batch_size,
        tokens=batch_size * padded,
        sparsity=np.nan_to_num(sheet.numbers("sparsity", _share), nan=1.0),
        seconds=batch_size / _rate(sheet, seq_len) if timed else np.full(len(sheet), np.nan),
    )
    for name in ("model", "batch_size"):
        sheet.check_filled(name)
    return told, rows


def gpu_key(name: str) -> str:
    """The catalog's key of a GPU, whatever case and punctuation it is written in.

    Else the name, without the signs that names of series are split by.
    """
    return _gpu_keys().get(folded(name), name.replace("/", "-").replace("@", "-"))


@cache
def _gpu_keys() -> dict[str, str]:
    return {folded(name): key for name, key in gpu_names().items()}


@cache
def gpu_names() -> dict[str, str]:
    """The catalog's keys by all names of their GPUs."""
    keys = {}
    for gpu in load_catalog().gpus:
        for name in (gpu.key, *gpu.device_names):
            keys[name] = gpu.key
            keys[name.removeprefix("NVIDIA ")] = gpu.key
    return keys


def _check_head(sheet: CsvTable, lengths: Mapping[str, Lengths] | None, *, timed: bool) -> None:
    instead = {"gpu": "number_gpus", "queries_per_second": ado.RATE}
    for name, meaning in NEEDED.items():
        is_told = name in sheet or instead.get(name, name) in sheet
        if not is_told and (timed or name != "queries_per_second"):
            sheet.head_is_wrong(f"no column {name}: add it ({meaning}){_meant(sheet, name)}")
    if not ("seq_len" in sheet or "padded_tokens" in sheet or (lengths and "dataset" in sheet)):
        sheet.head_is_wrong(
            "no column says how long queries are: add seq_len or padded_tokens (tokens per query), "
            "or a dataset whose lengths are given (--lengths CSV of dataset, tokens, examples)"
            + _meant(sheet, "seq_len")
        )


def _meant(sheet: CsvTable, name: str) -> str:
    """A column that may have been meant for one that is missing."""
    near = near_matches(name, sheet.unused)
    return f"; or rename {quoted(near[0])}, if that is it" if near else ""


def _leave_out(sheet: CsvTable, *, timed: bool) -> None:
    """Rows that say nothing of how long a step takes on one GPU."""
    gpus = sheet.numbers("number_gpus", _count)
    sheet.leave_out(gpus > 1, LEFT_SEVERAL_GPUS)
    if not timed:
        return
    sheet.leave_out(ado.invalid(sheet), LEFT_INVALID)
    sheet.leave_out(ado.of_shorter_texts(sheet), ado.LEFT_SHORTER)
    capped = [text == Basis.CAPPED for text in sheet.texts("basis")]
    sheet.leave_out(np.array(capped, bool), LEFT_CAPPED)
    name = "queries_per_second" if "queries_per_second" in sheet else ado.RATE
    if name in sheet:
        untimed = [text is None for text in sheet.texts(name)]
        sheet.leave_out(np.array(untimed, bool), LEFT_UNTIMED)


def _rate(sheet: CsvTable, seq_len: FloatArray) -> FloatArray:
    """(rows,) queries per second."""
    if "queries_per_second" in sheet or ado.RATE not in sheet:
        return sheet.numbers("queries_per_second", positive)
    return sheet.numbers(ado.RATE, positive) / seq_len


def _padded(
    sheet: CsvTable, batch_size: FloatArray, seq_len: FloatArray, lengths: Mapping[str, Lengths]
) -> FloatArray:
    """(rows,) tokens that each query of a row's batch is padded to."""
    told = sheet.numbers("padded_tokens", positive)
    padded = np.where(np.isfinite(told), told, seq_len)
    datasets = sheet.texts("dataset")
    for place in np.flatnonzero(sheet.kept & ~np.isfinite(padded)):
        dataset, size = datasets[place], batch_size[place]
        if dataset is not None and dataset in lengths:
            if np.isfinite(size):
                padded[place] = lengths[dataset].padded(size)
        elif dataset is not None and lengths:
            near = did_you_mean(dataset, lengths)
            text = f"no lengths of {quoted(dataset)} are given{near or ': add them, or seq_len'}"
            sheet.row_is_wrong("dataset", int(place), text)
        elif "seq_len" in sheet or "padded_tokens" in sheet:
            name = "seq_len" if "seq_len" in sheet else "padded_tokens"
            sheet.row_is_wrong(name, int(place), "is empty: say how long queries are, in tokens")
    return padded


def _told(sheet: CsvTable) -> list[RowFamily]:
    models, weights, recipes, methods = (
        sheet.texts(name) for name in ("model", "weights", "recipe", "method")
    )
    _check_one_of(sheet, "basis", (Basis.MEASURED.value, Basis.SIMULATED.value))
    _check_one_of(sheet, "weights", tuple(_WEIGHTS))
    settings = ado.settings(sheet)
    software = [
        one or stack or setting or None
        for one, stack, setting in zip(
            sheet.texts("software"), sheet.texts("stack"), settings, strict=True
        )
    ]
    return [
        RowFamily(*each)
        for each in zip(
            models,
            weights,
            [recipe or method for recipe, method in zip(recipes, methods, strict=True)],
            sheet.texts("basis"),
            software,
            strict=True,
        )
    ]


def _check_one_of(sheet: CsvTable, name: str, known: tuple[str, ...]) -> None:
    for place, text in enumerate(sheet.texts(name)):
        if sheet.kept[place] and text is not None and text not in known:
            near = did_you_mean(text, known)
            text_of_known = " or ".join(known)
            sheet.row_is_wrong(name, place, f"must be {text_of_known}, not {quoted(text)}{near}")


def _gpus(sheet: CsvTable) -> list[str]:
    """(rows,) keys, each with its stack where that is told beside the software.

    Rows of a run without a GPU are the CPU's.
    """
    counts = sheet.numbers("number_gpus", _count)
    is_there = "gpu" in sheet or "number_gpus" in sheet
    stacks = sheet.texts("stack") if "software" in sheet else [None] * len(sheet)
    found = []
    for place, (name, stack) in enumerate(zip(sheet.texts("gpu"), stacks, strict=True)):
        if name is None and is_there and sheet.kept[place] and counts[place] != 0:
            sheet.row_is_wrong("gpu", place, "is empty: name the GPU, or leave the row out")
        key = "cpu" if name is None else gpu_key(name)
        found.append(key if stack is None else gpu_name(key, stack))
    return found


def _series(sheet: CsvTable, gpus: list[str], seq_len: FloatArray) -> list[str]:
    """(rows,) a GPU at a data set, a length, or both."""
    datasets = sheet.texts("dataset")
    return [
        "/".join(
            [
                gpu,
                *([] if dataset is None else [dataset]),
                *([f"seq{length:g}"] if np.isfinite(length) else []),
            ]
        )
        for gpu, dataset, length in zip(gpus, datasets, seq_len, strict=True)
    ]


def positive(value: float) -> str | None:
    """A check of numbers for ``CsvTable.numbers``."""
    return None if value > 0 else "above 0"


def _whole(value: float) -> str | None:
    return None if value >= 1 and value.is_integer() else "a whole number of at least 1"


def _count(value: float) -> str | None:
    return None if value >= 0 and value.is_integer() else "a whole number of at least 0"


def _share(value: float) -> str | None:
    return None if 0 < value <= 1 else "above 0 and at most 1 (active experts over experts)"
