"""Columns of IBM's ado and of LLMFineTuningBench, read and written.

ado's SFTTrainer actuator (github.com/IBM/ado, docs/user-guide/actuators/sft-trainer.md: "Entity
space", "Measured properties", "is_valid logic") measures fine-tuning. Hugging Face has its
measurements as ibm-research/LLMFineTuningBench, a row for each run. Its conventions:

- ``batch_size`` counts one forward and backward pass over all GPUs of the run. The optimizer steps
  after ``gradient_accumulation_steps`` passes, by default 4; ``identifier`` has their number.
- Every example is cut and padded to ``tokens_per_sample`` (``model_max_length`` in exports of ado
  itself). ``dataset_tokens_per_second`` counts no padding: it equals examples per second times that
  length in all data sets but ``news-chars-*``, whose texts are shorter.
- ``train_samples_per_second`` and similar columns are wrong in runs that ended early, according to
  ado: they are not read.
- ``is_valid`` is 0 for a run out of GPU memory or one that was rejected before it began.
- ``gpu_model`` is the Kubernetes label: the device's name with hyphens for spaces. A run without a
  GPU has ``number_gpus`` 0 and no label. ``gpu_memory_utilization_peak`` is in per cent.
- Other settings of a run stand only in ``experiment_id`` and ``identifier``.
"""

import re
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from fitting.numerics.arrays import BoolArray
from fitting.tables.csv_table import CsvTable, folded, quoted
from gpu_catalog.gpu import Gpu
from trials.records.observation import Basis, Observation, Outcome

RATE = "dataset_tokens_per_second"
SETTINGS = (
    *("fms_hf_tuning_version", "torch_dtype", "fast_kernels", "fast_moe", "enable_roce"),
    "optim",
)
COLUMNS: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("number_gpus", "is_valid", RATE, "identifier", "experiment_id", *SETTINGS), ()
)
"""Columns that are read in addition to the canonical ones."""

_NOT_READ = tuple(
    [
        f"{quantity}_{statistic}"
        for quantity in (
            *("gpu_compute_utilization", "gpu_memory_utilization", "gpu_power_watts"),
            "gpu_power_percent",
        )
        for statistic in ("min", "avg", "max", "peak")
    ]
    + [
        *("cpu_compute_utilization", "cpu_memory_utilization", "train_runtime"),
        *("train_samples_per_second", "train_steps_per_second", "train_tokens_per_second"),
        *("train_tokens_per_gpu_per_second", "dataset_tokens_per_second_per_gpu"),
        *("model_load_time", "lh_created_at", "number_nodes", "generatorid", "", "Unnamed: 0"),
    ]
)
IGNORED = frozenset(folded(name) for name in _NOT_READ)
"""Columns, ``folded``, that are ignored without a remark."""

LEFT_SHORTER = "texts of unknown length, shorter than tokens_per_sample (news-chars-*)"
SHORTER_TEXTS = "news-chars-"
_RATES = (
    *("train_samples_per_second", "train_steps_per_second", "train_tokens_per_second"),
    *("train_tokens_per_gpu_per_second", RATE, "dataset_tokens_per_second_per_gpu"),
)
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_COORDINATES = re.compile(
    r"(?:^|-)(?:number_gpus|number_nodes|model_max_length|batch_size)\.[\d.]+"
)


def invalid(table: CsvTable) -> BoolArray:
    """(rows,) mask of the runs with ``is_valid`` 0."""
    flags = [None if text is None else text.casefold() for text in table.texts("is_valid")]
    for place, flag in enumerate(flags):
        if table.kept[place] and flag not in {"1", "true", "0", "false", None}:
            table.row_is_wrong("is_valid", place, f"must be 1 or 0, not {quoted(flag)}")
    return np.array([flag in {"0", "false"} for flag in flags], bool)


def of_shorter_texts(table: CsvTable) -> BoolArray:
    """(rows,) mask of runs on shorter texts, whose tokens per second give no examples."""
    if RATE not in table or "examples_per_second" in table:
        return np.zeros(len(table), bool)
    pairs = zip(table.texts("identifier"), table.texts("dataset"), strict=True)
    return np.array(
        [
            f"dataset_id.{SHORTER_TEXTS}" in (identifier or "")
            or (dataset or "").startswith(SHORTER_TEXTS)
            for identifier, dataset in pairs
        ],
        bool,
    )


def settings(table: CsvTable) -> list[str]:
    """(rows,) settings of a run that have no canonical column; empty in other tables.

    They come from ``experiment_id``, from ``identifier`` less model, GPU, length and batch size,
    and from the columns ``SETTINGS``.
    """
    others = {name: table.texts(name) for name in SETTINGS if name in table}
    columns = ("experiment_id", "identifier", "model", "gpu")
    texts = []
    for place, row in enumerate(zip(*map(table.texts, columns), strict=True)):
        experiment, identifier, model, gpu = row
        rest = (identifier or "").replace(f"model_name.{model}", "")
        rest = _COORDINATES.sub("", rest.replace(f"gpu_model.{gpu}", ""))
        text = " ".join(filter(None, (experiment, re.sub("-+", "-", rest).strip("-"))))
        further = (
            f"{name}.{values[place]}"
            for name, values in others.items()
            if values[place] is not None and f"{name}." not in text
        )
        texts.append(" ".join(filter(None, (text, *further))))
    return texts


def ado_frame(observations: Sequence[Observation], gpus: Mapping[str, Gpu]) -> pd.DataFrame:
    """Frame of observations in ado's columns, with recipe, basis and other canonical columns.

    It has a row for each probe that shows whether a batch fits. Throughput is that of the median
    step; rows of capped GPUs have none. Several processes without a GPU have no row: ado has no
    column for their number.
    """
    verdicts = (Outcome.FITS, Outcome.OUT_OF_MEMORY)
    of_length = (o for o in observations if not o.is_drawn)
    counted = (o for o in of_length if o.cell.ranks == 1 or _has_gpu(gpus[o.cell.gpu]))
    return pd.DataFrame([_row(o, gpus) for o in counted if o.outcome in verdicts])


def _has_gpu(gpu: Gpu) -> bool:
    return gpu.kind == "cuda"


def _row(observation: Observation, gpus: Mapping[str, Gpu]) -> dict[str, object]:
    o, cell = observation, observation.cell
    gpu = gpus[cell.gpu]
    has_gpu = _has_gpu(gpu)
    label = gpu.device_names[0].replace(" ", "-") if has_gpu else None
    number_gpus = cell.ranks if has_gpu else 0
    batch_size = o.batch_size * cell.data_parallel_ranks
    entity = {
        "model_name": cell.model,
        "number_gpus": number_gpus,
        "model_max_length": cell.seq_len,
        "batch_size": batch_size,
        **({"gpu_model": label} if has_gpu else {}),
        "gradient_accumulation_steps": o.micro_batches,
    }
    return {
        "identifier": "-".join(f"{key}.{value}" for key, value in entity.items()),
        "experiment_id": f"finetune-cost.{cell.recipe.key}",
        "method": cell.recipe.method,
        "model_name": cell.model,
        "number_nodes": cell.nodes,
        "gpu_model": label,
        "number_gpus": number_gpus,
        "tokens_per_sample": cell.seq_len,
        "batch_size": batch_size,
        "torch_dtype": DTYPES[cell.recipe.base_dtype],
        "is_valid": int(o.outcome is Outcome.FITS),
        **_measured(o),
        "sparsity": cell.sparsity,
        "recipe": cell.recipe.key,
        "weights": cell.weights,
        "software": None if o.environment is None else o.environment.software,
        "stack": None if o.environment is None else o.environment.stack,
        "basis": o.basis.value,
    }


def _measured(observation: Observation) -> dict[str, float | None]:
    """Measured properties in ado's columns; None where not measured."""
    o, measurement = observation, observation.measurement
    peak = watts = runtime = None
    rates = dict.fromkeys(_RATES)
    if (memory := o.memory) is not None:
        held = memory.peak_reserved_bytes or memory.peak_allocated_bytes
        peak = 100 * held / o.memory_limit_bytes
    if measurement is not None:
        steps = measurement.step_seconds if o.basis is not Basis.CAPPED else ()
        if steps:
            runtime, rate = sum(steps), o.examples_per_step / statistics.median(steps)
            if measurement.energy_joules is not None:
                watts = measurement.energy_joules / runtime
            tokens = rate * o.cell.seq_len
            speeds = (rate, rate / o.examples_per_step, *[tokens, tokens / o.cell.ranks] * 2)
            rates = dict(zip(_RATES, speeds, strict=True))
    own = {"gpu_memory_utilization_peak": peak, "gpu_power_watts_avg": watts}
    return {**own, "train_runtime": runtime, **rates}
