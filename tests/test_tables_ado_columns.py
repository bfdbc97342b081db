"""Columns of IBM's ado: reading with units, writing, and reading back."""

import pandas as pd
import pytest
from builders.messages import assert_lines
from builders.observations import MIB, environment, measurement, observation, recipe, tiny_cell

from fitting.points.fit_points import ladders
from fitting.points.observation_columns import columns_of
from fitting.tables.ado_columns import ado_frame
from fitting.tables.csv_rows import LEFT_CAPPED, LEFT_INVALID, LEFT_SEVERAL_GPUS, LEFT_UNTIMED
from fitting.tables.csv_table import UnusedRows
from fitting.tables.observations_table import read_frame
from fitting.tables.table_error import TableError
from gpu_catalog.catalog import load_catalog
from trials.recipes.parallel import Parallel
from trials.records.cell import Cell
from trials.records.observation import Basis, Observation, Outcome

GPUS = {gpu.key: gpu for gpu in load_catalog().gpus}
# Columns of ibm-research/LLMFineTuningBench; the values are made up.
BENCH = {
    "experiment_id": "SFTTrainer.finetune_lora_benchmark-v1.0.0-fms_hf_tuning_version.2.8.2",
    "method": "lora",
    "model_name": "llama3-8b",
    "number_nodes": 1.0,
    "gpu_model": "NVIDIA-A100-SXM4-80GB",
    "number_gpus": 1.0,
    "tokens_per_sample": 512.0,
    "batch_size": [2.0, 4.0],
    "torch_dtype": "bfloat16",
    "fms_hf_tuning_version": "2.8.2",
    "gpu_memory_utilization_peak": 50.0,
    "gpu_power_watts_avg": 300.0,
    "is_valid": 1.0,
    "train_samples_per_second": 9999.0,
    "dataset_tokens_per_second": [1024.0, 4096.0],
    "dataset_tokens_per_second_per_gpu": [1024.0, 4096.0],
}


def bench(**changed: object) -> pd.DataFrame:
    """Two rows in the format of the public data set."""
    frame = pd.DataFrame(BENCH | changed)
    settings = "torch_dtype.bfloat16-r.8-lora_alpha.16"
    frame.insert(
        0,
        "identifier",
        [
            f"dataset_id.news-tokens-16384plus-entries-4096-model_name.{row.model_name}-"
            f"number_gpus.{row.number_gpus}-model_max_length.{row.tokens_per_sample}-"
            f"batch_size.{row.batch_size}-gpu_model.{row.gpu_model}-{settings}"
            for row in frame.itertuples()
        ],
    )
    return frame


def on(gpu: str, **changed: object) -> Cell:
    """A cell of mixtral-tiny on a GPU."""
    update = {"gpu": gpu} | changed
    return tiny_cell("mixtral-tiny", active=2, seq_len=64).model_copy(update=update)


def timed(cell: Cell, batch_size: int, seconds: float, **changed: object) -> Observation:
    """A probe whose median step took this many seconds."""
    steps = (seconds, 0.9 * seconds, 1.1 * seconds)
    values = {"cell": cell, "purpose": "ladder", "measurement": measurement(MIB, steps)}
    return observation(batch_size, **(values | changed))


def test_tokens_per_second_are_converted_to_step_times() -> None:
    """Tokens are those of the data set, all of one length; samples per second are not read."""
    read = read_frame(bench())
    assert read.rows.seconds.tolist() == [1.0, 0.5]
    assert read.rows.tokens.tolist() == [1024.0, 2048.0]
    assert set(read.rows.gpu) == {"A100-80GB-SXM"}
    assert set(read.rows.series) == {"A100-80GB-SXM/seq512"}
    assert read.left_out == ()
    assert [remark.partition(":")[0] for remark in read.remarks] == ["no column sparsity"]


def test_runs_of_one_setup_are_a_family() -> None:
    """The setup is the experiment, the version, and the identifier less model, GPU and batch."""
    (family,) = read_frame(bench()).by_family()
    assert family.model == "llama3-8b"
    assert family.recipe == "lora"
    experiment, setup = str(family.software).split(" ")
    assert experiment == BENCH["experiment_id"]
    entries = "dataset_id.news-tokens-16384plus-entries-4096"
    assert setup == f"{entries}-torch_dtype.bfloat16-r.8-lora_alpha.16"
    others = {
        "tokens_per_sample": [512, 1024],
        "gpu_model": ["L40S", "NVIDIA-H100-PCIe"],
        "batch_size": [2, 512],
    }
    assert len(read_frame(bench(**others)).by_family()) == 1
    assert len(read_frame(bench(fast_kernels=["none stated", "TrueTrueTrue"])).by_family()) == 2
    assert len(read_frame(bench(method=["full", "lora"])).by_family()) == 2


def test_exports_of_ado_itself_are_read() -> None:
    """They name the length differently, have an index column, and no GPU model for CPU runs."""
    frame = bench(number_gpus=0).rename(columns={"tokens_per_sample": "model_max_length"})
    read = read_frame(frame.drop(columns="gpu_model").reset_index(names="Unnamed: 0"))
    assert set(read.rows.gpu) == {"cpu"}
    assert read.rows.seconds.tolist() == [1.0, 0.5]


def test_runs_without_the_speed_of_one_gpu_are_excluded() -> None:
    """These are runs on several GPUs, invalid runs, failed runs, and texts of unknown length."""
    frame = pd.concat(
        [
            bench(),
            bench(number_gpus=[2, 8], number_nodes=1),
            bench(is_valid=[0, "False"], dataset_tokens_per_second=None),
            bench(is_valid=None, dataset_tokens_per_second=[None, ""]),
        ],
        ignore_index=True,
    )
    shorter = bench()
    shorter["identifier"] = shorter["identifier"].str.replace(
        "news-tokens-16384plus-entries-4096", "news-chars-512-entries-4096"
    )
    read = read_frame(pd.concat([frame, shorter], ignore_index=True))
    assert list(read.index) == [0, 1]
    assert [out.rows for out in read.left_out] == [2, 2, 2, 2]
    assert "news-chars" in read.left_out[2].reason


def test_mistakes_name_the_columns_as_the_table_does() -> None:
    """Columns keep ado's names."""
    frame = bench(dataset_tokens_per_second=["fast", -1], batch_size=[0, 2.5])
    with pytest.raises(TableError) as error:
        read_frame(frame)
    assert_lines(
        str(error.value),
        ("row 0: batch_size: ", "0.0"),
        ("row 0: dataset_tokens_per_second: ", "'fast'"),
        ("row 1: batch_size: ", "2.5"),
        ("row 1: dataset_tokens_per_second: ", "-1"),
    )


def test_observations_are_written_in_the_columns_of_ado() -> None:
    """Its units are tokens per second, per cent and watts, and GPUs have their Kubernetes label."""
    probe = timed(on("A100-80GB-SXM"), 8, 0.5)
    assert probe.measurement is not None
    measured = probe.measurement.model_copy(update={"energy_joules": 450.0})
    probe = probe.model_copy(update={"measurement": measured})
    (row,) = ado_frame([probe], GPUS).to_dict("records")
    assert row["gpu_model"] == "NVIDIA-A100-SXM4-80GB"
    assert (row["number_gpus"], row["number_nodes"], row["is_valid"]) == (1, 1, 1)
    assert (row["model_name"], row["method"]) == ("mixtral-tiny", "full")
    assert (row["tokens_per_sample"], row["batch_size"]) == (64, 8)
    assert row["train_samples_per_second"] == 16.0
    assert row["train_steps_per_second"] == 2.0
    assert row["dataset_tokens_per_second"] == row["dataset_tokens_per_second_per_gpu"] == 1024.0
    assert row["train_runtime"] == pytest.approx(1.5)
    assert row["gpu_power_watts_avg"] == pytest.approx(300.0)
    assert row["gpu_memory_utilization_peak"] == pytest.approx(100 / 256)
    assert (row["torch_dtype"], row["basis"], row["sparsity"]) == ("float32", "measured", 0.25)
    identifier = str(row["identifier"])
    assert identifier.startswith("model_name.mixtral-tiny-number_gpus.1-model_max_length.64-")
    assert identifier.endswith("-gpu_model.NVIDIA-A100-SXM4-80GB-gradient_accumulation_steps.1")


def test_a_run_on_several_gpus_says_so() -> None:
    """Its batch is that of all GPUs, and fits of one GPU's steps leave it out when read back."""
    several = on("H100-SXM", parallel=Parallel(gpus=16, nodes=2, strategy="fsdp2"))
    of_rank = several.model_copy(update={"recipe": recipe("full", effective_batch=128)})
    probes = [timed(on("H100-SXM"), 2, 0.5), timed(several, 2, 0.5), timed(of_rank, 2, 0.5)]
    frame = ado_frame(probes, GPUS)
    one, two_nodes, accumulated = frame.to_dict("records")
    assert (one["number_gpus"], one["number_nodes"], one["batch_size"]) == (1, 1, 2)
    assert (two_nodes["number_gpus"], two_nodes["number_nodes"]) == (16, 2)
    assert two_nodes["batch_size"] == 32
    assert two_nodes["train_samples_per_second"] == 64.0
    assert two_nodes["dataset_tokens_per_second"] == 4096.0
    per_gpu = ("train_tokens_per_gpu_per_second", "dataset_tokens_per_second_per_gpu")
    assert [two_nodes[name] for name in per_gpu] == [256.0, 256.0]
    assert "-number_gpus.16-" in two_nodes["identifier"]
    assert accumulated["train_steps_per_second"] == 2.0
    assert "gradient_accumulation_steps.4" in accumulated["identifier"]
    read = read_frame(frame)
    assert read.rows.seconds.tolist() == [0.5]
    assert read.left_out == (UnusedRows(LEFT_SEVERAL_GPUS, 2),)


def test_several_processes_without_a_gpu_are_not_exported() -> None:
    """Ado has no number of them, so that they would be read back as one."""
    ranks = on("cpu", parallel=Parallel(gpus=2, strategy="ddp"))
    frame = ado_frame([timed(ranks, 2, 0.5), timed(on("cpu"), 2, 0.5)], GPUS)
    assert frame["batch_size"].tolist() == [2]


def test_an_exported_run_has_the_same_families_and_points_when_read_back() -> None:
    """Weights, software and stacks still distinguish the families."""
    elsewhere = environment(device_name="another", versions=(("driver", "1"), ("python", "3.11")))
    observations = [
        timed(cell, size, 0.1 + 0.2 * size, environment=where)
        for cell in (on("A40"), on("A40", seq_len=128), on("T4", weights="pretrained"))
        for where in (environment(), elsewhere)
        for size in (1, 2, 4)
    ]
    read = read_frame(ado_frame(observations, GPUS))
    families = {name: read.rows.where(rows) for name, rows in read.by_family().items()}
    expected = list(ladders(columns_of(observations)))
    assert [
        (name.model, name.weights, name.recipe, name.basis, name.software) for name in families
    ] == [
        (own.group.model, own.group.weights, own.group.recipe.key, own.basis, own.stack)
        for own, _ in sorted(expected, key=lambda pair: (pair[0].group.key, pair[0].stack))
    ]
    assert len(families) == 4
    for name, rows in families.items():
        (own,) = [
            own
            for source, own in expected
            if (source.stack, source.group.weights) == (name.software, name.weights)
        ]
        assert sorted(rows.series) == sorted(own.series)
        assert sorted(rows.gpu) == sorted(own.gpu)
        assert sorted(rows.tokens) == sorted(own.tokens)
        assert sorted(rows.seconds) == pytest.approx(sorted(own.seconds))


def test_an_exported_run_keeps_measured_and_simulated_rows_apart() -> None:
    """Probes that ran out of memory, searches and capped GPUs are excluded with a reason."""
    observations = [
        timed(on("A40"), 8, 0.5),
        timed(on("A40", simulated=True), 8, 0.25, basis=Basis.SIMULATED),
        timed(on("cpu"), 4, 2.0),
        timed(on("A40", capped_on="H100-SXM"), 8, 0.1, basis=Basis.CAPPED),
        observation(16, Outcome.OUT_OF_MEMORY, cell=on("A40")),
        observation(16, Outcome.THRASHING, cell=on("A40")),
        observation(16, Outcome.FAILED, cell=on("A40")),
        observation(2, cell=on("A40")),
    ]
    frame = ado_frame(observations, GPUS)
    assert len(frame) == 6
    assert frame["is_valid"].tolist() == [1, 1, 1, 1, 0, 1]
    assert frame["dataset_tokens_per_second"].notna().tolist() == [True] * 3 + [False] * 3
    read = read_frame(frame)
    assert read.remarks == ()
    assert [(f.basis, len(rows)) for f, rows in read.by_family().items()] == [
        (Basis.MEASURED, 2),
        (Basis.SIMULATED, 1),
    ]
    assert read.rows.seconds.tolist() == pytest.approx([0.5, 0.25, 2.0])
    assert read.rows.tokens.tolist() == [512.0, 512.0, 256.0]
    assert read.rows.sparsity.tolist() == [0.25] * 3
    stack = environment().stack
    assert read.rows.gpu.tolist() == [f"A40@{stack}", f"A40@{stack}", f"cpu@{stack}"]
    family = read.families[0]
    assert family.recipe == on("A40").recipe.key
    assert family.software == environment().software
    assert family.weights == "random"
    reasons = (LEFT_INVALID, LEFT_CAPPED, LEFT_UNTIMED)
    assert read.left_out == tuple(UnusedRows(reason, 1) for reason in reasons)
