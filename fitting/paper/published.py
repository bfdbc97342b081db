"""Published constants, tables and points of the paper.

"Understanding the Performance and Estimating the Cost of LLM Fine-Tuning" (arXiv 2408.04693): its
Tables III and IV, Fig. 13 to 15, and the points of its public artifact (stsxxx/finetune).
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fitting.numerics.arrays import NameArray
from fitting.points.batch_lengths import Lengths
from fitting.points.step_time_rows import StepTimes

DATA = Path(__file__).parent / "data"
MIXTRAL, BLACKMAMBA = "mixtral-8x7b", "blackmamba-2.8b"
CS, MATH = "commonsense_15k", "math_14k"
# Catalog keys of the paper's GPUs. The paper does not say which variant its 80 GB GPUs were.
GPUS = {
    "A40": "A40",
    "A100-40GB": "A100-40GB-SXM",
    "A100-80GB": "A100-80GB-SXM",
    "H100-80GB": "H100-SXM",
}
AS_PCIE = GPUS | {"A100-80GB": "A100-80GB-PCIe", "H100-80GB": "H100-PCIe"}
# Table IV: GPU, largest batch, queries/s, $/h, $. That is what 15,000 queries x 10 epochs cost.
TABLE_IV = {
    "A40": (4, 1.01, 0.79, 32.7),
    "A100-80GB": (17, 2.74, 1.67, 25.4),
    "H100": (17, 4.90, 2.10, 17.9),
}
TABLE_IV_QUERIES, EPOCHS = 15_000, 10
OPENORCA_QUERIES = 2_900_000  # what $3460 comes from; the text says "more than 2M queries"
OPENORCA_USD = 3460.0
# Eq. 1: in the text, and as its Fig. 13 was drawn (sparse Mixtral, 23.35 GB of weights).
EQ1_TEXT, EQ1_FIGURE = (82.0, 0.95), (62.0, 0.89)
WEIGHTS_GB, FIGURE_LENGTH, SPARSE = 23.35, 512, 0.25
NOMINAL_GB = {"A40": 48.0, "A100-40GB": 40.0, "A100-80GB": 80.0, "H100-80GB": 80.0}


@dataclass(frozen=True, slots=True)
class Points:
    """The 96 measured points of Fig. 14 and 15.

    Attributes:
        model: (points,) names.
        gpu: (points,) as the paper has them.
        dataset: (points,) names.
        rows: (points,) as step times: by GPU within a model, a series for each data set.
    """

    model: NameArray
    gpu: NameArray
    dataset: NameArray
    rows: StepTimes


def dataset_lengths() -> dict[str, Lengths]:
    """Lengths of the examples of the paper's two data sets."""
    rows = table("lengths.csv")
    return {
        name: Lengths.of(
            (float(r["tokens"]), float(r["examples"])) for r in rows if r["dataset"] == name
        )
        for name in (CS, MATH)
    }


def throughput_points() -> Points:
    """Points of throughput, with batches padded to the expected longest example."""
    rows, lengths = table("throughput.csv"), dataset_lengths()
    model, gpu, dataset = (
        np.array([r[name] for r in rows]) for name in ("model", "gpu", "dataset")
    )
    batch, sparsity, rate = (
        np.array([float(r[name]) for r in rows])
        for name in ("batch_size", "sparsity", "queries_per_second")
    )
    padded = [lengths[name].padded(size) for name, size in zip(dataset, batch, strict=True)]
    times = StepTimes(
        gpu=np.array([f"{r['model']}/{r['gpu']}" for r in rows]),
        series=np.array([f"{r['model']}/{r['gpu']}/{r['dataset']}" for r in rows]),
        batch_size=batch,
        tokens=batch * np.array(padded),
        sparsity=sparsity,
        seconds=batch / rate,
    )
    return Points(model, gpu, dataset, times)


def table(name: str) -> list[dict[str, str]]:
    """Rows of one of the CSV files."""
    with (DATA / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))
