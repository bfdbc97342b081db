"""Files from before examples were named so, with ``queries``, are still read."""

import pytest
from builders.runs import ONE_CELL, spec_of

from orchestrator.datasets.lengths import DataLengths
from orchestrator.spec.job import Job
from orchestrator.spec.spec_file import SpecError
from trials.records.learning import LearnData

OLD = ONE_CELL.replace("workload: {examples: ", "workload: {queries: ")


def mistakes(text: str) -> list[str]:
    """Mistakes of a specification."""
    with pytest.raises(SpecError) as error:
        spec_of(text)
    return str(error.value).splitlines()


def test_a_specification_with_queries_is_read() -> None:
    """It is the same specification."""
    assert OLD != ONE_CELL
    assert spec_of(OLD) == spec_of(ONE_CELL)


def test_both_names_are_one_mistake_at_the_line_of_the_former() -> None:
    """The message names both."""
    text = ONE_CELL.replace(
        "workload: {examples: 1000, epochs: 3}",
        "workload:\n  examples: 1000\n  epochs: 3\n  queries: 5",
    )
    [line] = mistakes(text)
    number = text.splitlines().index("  queries: 5") + 1
    assert f":{number}: workload.queries: " in line
    assert "examples" in line


def test_a_wrong_value_is_reported_under_the_name_in_the_file() -> None:
    """The line is that of the key."""
    text = OLD.replace("queries: 1000", "queries: many")
    [line] = mistakes(text)
    assert "workload.queries: " in line
    assert "'many'" in line


@pytest.mark.parametrize("key", ["querys", "exampels"])
def test_a_misspelt_key_of_either_name_suggests_examples(key: str) -> None:
    """The missing examples are not a second mistake."""
    [line] = mistakes(ONE_CELL.replace("{examples: ", f"{{{key}: "))
    assert line.endswith("did you mean 'examples'?")


def test_records_of_earlier_runs_are_read() -> None:
    """These are the job, the lengths of its examples and the data of a training curve."""
    job = Job.model_validate_json('{"queries": 7, "epochs": 2}')
    assert job == Job(examples=7, epochs=2)
    lengths = DataLengths.model_validate_json(
        '{"source": "a.csv", "made_by": "fields q", "histogram": [[3, 1]]}'
    )
    assert lengths.rendering == "fields q"
    data = LearnData.model_validate(
        {
            "source": "a.csv",
            "made_by": "fields q, a",
            "held_out_from": "the same",
            "tokenizer": "t",
            "fingerprint": "f",
            "train_queries": 5,
            "held_out_queries": 2,
            "accuracy": "exact",
        }
    )
    assert (data.rendering, data.train_examples, data.held_out_examples) == ("fields q, a", 5, 2)
