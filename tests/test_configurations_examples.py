"""Examples that a trainer makes of its data: cut, split, dropped, packed or set aside."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.configurations.configuration import Configuration
from orchestrator.configurations.estimate_options import with_configuration
from orchestrator.configurations.read_file import read_configuration
from orchestrator.estimating.estimate_request import DEFAULT_JOB, EstimateRequest
from orchestrator.request import request_of
from orchestrator.spec.job import Job
from orchestrator.spec.job_options import changed_job
from orchestrator.spec.job_tokens import rows

AXOLOTL: dict[str, Any] = {"base_model": "a/b", "sequence_len": 1024}
LLAMA_FACTORY: dict[str, Any] = {"model_name_or_path": "a/b", "stage": "sft", "do_train": True}
TRL: dict[str, Any] = {"model_name_or_path": "a/b"}


def classes(configuration: Configuration) -> dict[str, str]:
    """Class of each key."""
    return {line.key: line.key_class for line in configuration.lines}


def read(folder: Path, values: dict[str, Any]) -> Configuration:
    """Configuration of a file with these values."""
    file = folder / "config.yml"
    file.write_text(yaml.safe_dump(values), "utf-8")
    return read_configuration(file)


def job_of(configuration: Configuration, histogram: str, folder: Path) -> Job:
    """Job of a configuration with lengths of the command line."""
    path = folder / "lengths.csv"
    path.write_text(f"tokens,examples\n{histogram}", "utf-8")
    options, _ = with_configuration(configuration, {"length_histogram": path})
    return changed_job(DEFAULT_JOB, request_of(EstimateRequest, options).job, [])


DOCUMENTS = AXOLOTL | {"datasets": [{"path": "owner/name", "type": "completion"}]}
SPLIT = ((100, 2), (200, 1), (400, 2))
PACKED = {"max_length": 400, "packing": True}


@pytest.mark.parametrize(
    ("values", "histogram"),
    [
        (DOCUMENTS | {"sequence_len": 400}, SPLIT),
        (DOCUMENTS | {"sequence_len": 500}, ((100, 2), (500, 2))),
        (AXOLOTL | {"sequence_len": 400}, ((100, 2),)),
        (AXOLOTL | {"sequence_len": 400, "rl": "dpo"}, ((100, 2),)),
        (
            AXOLOTL | {"sequence_len": 400, "excess_length_strategy": "truncate"},
            ((100, 2), (1000, 1)),
        ),
        (TRL | PACKED | {"packing_strategy": "bfd_split"}, SPLIT),
        (TRL | PACKED, ((100, 2), (1000, 1))),
    ],
)
def test_examples_longer_than_a_row_are_split_dropped_or_cut_as_the_trainer_does(
    tmp_path: Path, values: dict[str, Any], histogram: tuple[tuple[int, int], ...]
) -> None:
    """The job has as many examples as the trainer makes of them."""
    job = job_of(read(tmp_path, values), "100,2\n1000,1\n", tmp_path)
    assert job.lengths is not None
    assert job.lengths.histogram == histogram
    assert job.examples == job.lengths.examples
    assert job.cutoff == max(values.get("sequence_len", 0), values.get("max_length", 0))


@pytest.mark.parametrize(
    ("values", "padding", "expected"),
    [
        ({"stage": "pt"}, "packed", 3),
        ({"stage": "pt", "packing": False}, "longest", 10),
        ({"packing": True}, "best-fit", 4),
        ({}, "longest", 10),
    ],
)
def test_rows_of_llama_factory_hold_several_examples_where_it_packs(
    tmp_path: Path, values: dict[str, Any], padding: str, expected: int
) -> None:
    """Documents follow one another over full rows, and other examples stay whole.

    Without lengths nothing is packed, and each row has the stated length.
    """
    configuration = read(tmp_path, LLAMA_FACTORY | {"cutoff_len": 400} | values)
    job = job_of(configuration, "120,10\n", tmp_path)
    assert (job.padding, job.cutoff, rows(job)) == (padding, 400, expected)
    options, _ = with_configuration(configuration, {})
    bare = changed_job(DEFAULT_JOB, request_of(EstimateRequest, options).job, [])
    assert (bare.padding, bare.lengths, options["seq_len"]) == ("longest", None, 400)


@pytest.mark.parametrize(
    ("values", "examples"),
    [
        (AXOLOTL | {"val_set_size": 0.26}, 2),
        (AXOLOTL | {"val_set_size": 2}, 1),
        (AXOLOTL | {"val_set_size": 0.0}, 3),
        (LLAMA_FACTORY | {"val_size": 0.3}, 2),
        (LLAMA_FACTORY, 3),
    ],
)
def test_examples_that_are_set_aside_for_evaluation_are_not_trained_on(
    tmp_path: Path, values: dict[str, Any], examples: int
) -> None:
    """A share of them is rounded up; a number that is given is that of the training examples."""
    configuration = read(tmp_path, values)
    assert job_of(configuration, "100,3\n", tmp_path).examples == examples
    options, _ = with_configuration(configuration, {"length_histogram": tmp_path / "lengths.csv"})
    given = request_of(EstimateRequest, options | {"examples": 3}).job
    assert changed_job(DEFAULT_JOB, given, []).examples == 3


@pytest.mark.parametrize("value", [0, 0.0, "0.0", False, None])
def test_a_key_that_is_off_says_nothing(tmp_path: Path, value: object) -> None:
    """In whichever type a file writes it, nor is anything evaluated without data for it."""
    keys = {"val_set_size": value, "neftune_noise_alpha": value, "evals_per_epoch": 4}
    by_key = classes(read(tmp_path, AXOLOTL | keys))
    assert {by_key[key] for key in keys} == {"irrelevant"}
    by_key = classes(read(tmp_path, AXOLOTL | keys | {"val_set_size": 0.1}))
    assert by_key["evals_per_epoch"] == by_key["val_set_size"] == "assumed"


def test_evaluations_that_are_left_out_are_counted(tmp_path: Path) -> None:
    """Four of a tenth of the examples pass through the model as often as four tenths."""
    keys = {"val_set_size": 0.1, "evals_per_epoch": 4}
    _, remarks = with_configuration(read(tmp_path, AXOLOTL | keys), {})
    assert any("evals_per_epoch" in text and "40% of the examples" in text for text in remarks)
