"""Length of a configuration's training: the steps that it states are the steps that are priced."""

import datetime as dt
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpu_catalog.catalog import load_catalog
from orchestrator.configurations.estimate_options import with_configuration
from orchestrator.configurations.layouts.several_gpus import on_several_gpus
from orchestrator.configurations.read_file import read_configuration_text
from orchestrator.estimating.choosing.layouts import names_by_count
from orchestrator.estimating.estimate_request import EstimateRequest, question_of
from orchestrator.estimating.question import Question
from orchestrator.request import OptionError, request_of
from orchestrator.spec.job_tokens import rows, steps

STEPS = 100
PACKED: dict[str, Any] = {
    "base_model": "llama-tiny",
    "sequence_len": 512,
    "sample_packing": True,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "max_steps": STEPS,
    "bf16": True,
    "flash_attention": True,
}
PADDED = PACKED | {"sample_packing": False}


def asked(folder: Path, values: dict[str, Any], *, has_data: bool, **given: Any) -> Question:
    """Question of a configuration under options of the command line, perhaps with lengths."""
    configuration = read_configuration_text(yaml.safe_dump(values), Path("f.yaml"))
    configuration.check()
    if has_data:
        histogram = folder / "lengths.csv"
        histogram.write_text("tokens,examples\n32,200\n100,300\n180,60\n400,10\n", "utf-8")
        given["length_histogram"] = histogram
    given.setdefault("gpu", "H100-SXM")
    options: Any = with_configuration(configuration, given)[0]
    first = request_of(EstimateRequest, options)
    counts = names_by_count(first.gpu, first.counts)
    options = on_several_gpus(configuration, options, given, counts)
    request = request_of(EstimateRequest, options)
    return question_of(request, load_catalog(), dt.date(2026, 11, 23))


@pytest.mark.parametrize("has_data", [True, False])
@pytest.mark.parametrize(("values", "given", "batch"), [
    (PACKED, {}, 8),
    (PACKED, {"effective_batch": 32}, 32),
    (PACKED, {"gpu": "4xH100-SXM"}, 32),
    (PADDED, {}, 8),
    (PADDED, {"effective_batch": 32}, 32),
])  # fmt: skip
def test_a_job_has_the_optimizer_steps_of_its_configuration(
    tmp_path: Path, values: dict[str, Any], given: dict[str, Any], batch: int, *, has_data: bool
) -> None:
    """So it is with packed rows, with data, and with another effective batch."""
    question = asked(tmp_path, values, has_data=has_data, **given)
    assert question.recipe.effective_batch == batch
    assert rows(question.workload) == STEPS * batch
    assert steps(question.workload, batch) == STEPS


def test_examples_of_the_command_line_replace_the_steps(tmp_path: Path) -> None:
    """So do epochs, of the data or of an assumed number of examples."""
    assert asked(tmp_path, PADDED, has_data=False, examples=40).workload.examples == 40
    workload = asked(tmp_path, PADDED, has_data=True, epochs=3).workload
    assert (workload.examples, workload.epochs) == (570, 3)


def test_a_wrong_length_is_refused_beside_a_wrong_batch() -> None:
    """One mistake does not hide the next, in the explanation either."""
    values = PADDED | {"micro_batch_size": 0, "num_epochs": -1, "max_steps": None}
    configuration = read_configuration_text(yaml.safe_dump(values), Path("f.yaml"))
    refused = {line.key for line in configuration.lines if line.key_class == "refused"}
    assert refused == {"micro_batch_size", "num_epochs"}


def test_steps_of_batches_of_unknown_size_are_refused(tmp_path: Path) -> None:
    """With accumulation, the number of GPUs decides on the examples of a step."""
    with pytest.raises(OptionError, match="--effective-batch"):
        asked(tmp_path, PADDED, has_data=False, gradient_accumulation=2)
