"""Preference data: their columns, their lengths, and their mistakes."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.data import write_csv, write_jsonl
from builders.dataset_files import SHORT, lengths_of, mistakes_of
from trainer_reference.preparation import sequence_lengths

from orchestrator.datasets.lengths import DataLengths
from orchestrator.datasets.source import DataError
from orchestrator.spec.data_kinds import wrong_kind
from orchestrator.spec.job import Job
from orchestrator.spec.job_options import JobOptions, changed_job
from orchestrator.spec.job_tokens import job_of, longest_example
from trials.recipes.recipe import Recipe

pytest_plugins = ["builders.dataset_counting"]

Example = Mapping[str, Any]
ANSWERS = ("chosen", "rejected")
PAIRS: list[Example] = [
    {"prompt": f"{row['question']} ", "chosen": row["answer"], "rejected": other["question"]}
    for row, other in zip(SHORT, SHORT[1:] + SHORT[:1], strict=True)
]
IMPLICIT: list[Example] = [{a: pair["prompt"] + pair[a] for a in ANSWERS} for pair in PAIRS]
LABELLED: list[Example] = [
    {"prompt": pair["prompt"], "completion": pair["chosen"], "label": number % 2 == 0}
    for number, pair in enumerate(PAIRS)
]


def spoken(example: Example) -> Example:
    """Example whose texts are messages: the prompt the user's, the answers the assistant's."""
    return {
        name: [{"role": "user" if name == "prompt" else "assistant", "content": text}]
        if isinstance(text, str)
        else text
        for name, text in example.items()
    }


SPOKEN = [spoken(pair) for pair in PAIRS]
SPOKEN_IMPLICIT: list[Example] = [{a: pair["prompt"] + pair[a] for a in ANSWERS} for pair in SPOKEN]
SPOKEN_LABELLED = [spoken(example) for example in LABELLED]


@pytest.mark.parametrize(
    ("task", "rows"),
    [
        pytest.param("dpo", PAIRS, id="dpo"),
        pytest.param("dpo", IMPLICIT, id="dpo-implicit-prompt"),
        pytest.param("dpo", SPOKEN, id="dpo-messages"),
        pytest.param("dpo", SPOKEN_IMPLICIT, id="dpo-messages-implicit-prompt"),
        pytest.param("reward", PAIRS, id="reward"),
        pytest.param("reward", SPOKEN_IMPLICIT, id="reward-messages-implicit-prompt"),
        pytest.param("kto", LABELLED, id="kto"),
        pytest.param("kto", SPOKEN_LABELLED, id="kto-messages"),
    ],
)
def test_lengths_of_preference_data_equal_the_trainers(
    task: str,
    rows: list[Example],
    tmp_path: Path,
    count: Callable[..., Job],
    tokenizer_folder: Path,
) -> None:
    """Without options, each sequence has as many tokens as TRL's trainer makes of it."""
    sequences = sequence_lengths(task, rows, tokenizer_folder)
    lengths = lengths_of(count(write_jsonl(tmp_path / "data.jsonl", rows)))
    longer = Counter(map(max, sequences))
    assert lengths.histogram == tuple(sorted(longer.items()))
    assert lengths.tokens == sum(map(sum, sequences))
    assert lengths.examples == len(rows)
    assert lengths.kind == ("labelled" if task == "kto" else "pairs")
    assert (lengths.sequences is None) == (task == "kto")


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(PAIRS, id="texts"),
        pytest.param(IMPLICIT, id="implicit-prompt"),
        pytest.param(SPOKEN, id="messages"),
        pytest.param(SPOKEN_IMPLICIT, id="messages-implicit-prompt"),
    ],
)
def test_kto_takes_the_answers_of_pairs_as_its_trainer_does(
    rows: list[Example], tmp_path: Path, count: Callable[..., Job], tokenizer_folder: Path
) -> None:
    """KTOTrainer makes two labelled examples of a pair; to other tasks it stays a pair."""
    (*sequences,) = sequence_lengths("kto", rows, tokenizer_folder)
    job = count(write_jsonl(tmp_path / "data.jsonl", rows))
    kto, dpo = (Recipe(method="full", task=task) for task in ("kto", "dpo"))
    assert wrong_kind(job, kto) is None
    unpaired = job_of(job, kto, 1024)
    histogram = Counter(tokens for (tokens,) in sequences)
    assert lengths_of(unpaired).histogram == tuple(sorted(histogram.items()))
    assert unpaired.examples == lengths_of(unpaired).examples == 2 * len(rows)
    assert lengths_of(unpaired).tokens == lengths_of(job).tokens
    assert job_of(unpaired, kto, 1024) == unpaired
    assert job_of(job, dpo, 1024) == job


def test_a_reward_model_leaves_out_the_pairs_that_its_trainer_does(
    tmp_path: Path, count: Callable[..., Job], tokenizer_folder: Path
) -> None:
    """RewardTrainer drops pairs with a sequence above its ``max_length``, and truncates none."""
    path, reward = write_jsonl(tmp_path / "data.jsonl", PAIRS), Recipe(method="full", task="reward")
    cutoff = int(lengths_of(count(path)).lengths.median)
    kept = sequence_lengths("reward", PAIRS, tokenizer_folder, max_length=cutoff)
    job = count(path, cutoff=cutoff)
    assert wrong_kind(job, reward) is None
    left = job_of(job, reward, 1024)
    assert lengths_of(left).histogram == tuple(sorted(Counter(map(max, kept)).items()))
    assert left.examples == len(kept) < len(PAIRS)
    assert job_of(left, reward, 1024) == left
    assert longest_example(left) == max(map(max, kept)) <= cutoff
    everything = wrong_kind(count(path, cutoff=1), reward)
    assert everything is not None
    assert str(path) in everything


def test_every_format_of_the_same_pairs_counts_alike(
    tmp_path: Path, count: Callable[..., Job]
) -> None:
    """CSV and Parquet have the lengths of JSON lines; other columns and labels as text are fine."""
    expected = lengths_of(count(write_jsonl(tmp_path / "data.jsonl", PAIRS)))
    table = pa.Table.from_pylist([{"id": 1, **pair} for pair in PAIRS])
    pq.write_table(table, tmp_path / "data.parquet")
    write_csv(tmp_path / "data.csv", [dict(pair) for pair in PAIRS])
    write_csv(tmp_path / "labelled.csv", [{k: str(v) for k, v in row.items()} for row in LABELLED])
    for name in ("data.parquet", "data.csv"):
        lengths = lengths_of(count(tmp_path / name))
        assert lengths.model_copy(update={"source": expected.source}) == expected
    assert lengths_of(count(tmp_path / "labelled.csv")).kind == "labelled"


def test_all_mistakes_of_pairs_are_reported_at_once(
    tmp_path: Path, count: Callable[..., Job]
) -> None:
    """Each has one line with its place; a pair without any text is skipped."""
    rows: list[object] = [
        PAIRS[0],
        {"prompt": "Hm?", "chosen": "Yes."},
        {"prompt": "Hm?", "chosen": "Yes.", "rejected": None},
        {"prompt": "Hm?", "chosen": "Yes.", "rejected": [{"role": "user", "content": "No."}]},
        {"prompt": "", "chosen": "", "rejected": None},
        ["Hm?"],
    ]
    path = write_jsonl(tmp_path / "data.jsonl", rows)
    *lines, empty = mistakes_of(count, path)
    assert [line.split(": ")[0] for line in lines] == [f"{path}:{n}" for n in (2, 3, 4, 6)]
    assert f"{path}:5" in empty
    mixed = write_jsonl(tmp_path / "mixed.jsonl", [SPOKEN[0], {**SPOKEN[1], "chosen": "Yes."}])
    (line,) = mistakes_of(count, mixed)
    assert line.startswith(f"{mixed}:2: chosen: ")


def test_a_template_that_refuses_a_pair_is_reported_once(
    tmp_path: Path, count: Callable[..., Job]
) -> None:
    """Both of its sequences begin with the refused prompt."""
    refused = {**SPOKEN[1], "prompt": [{"role": "wizard", "content": "Hm?"}]}
    path = write_jsonl(tmp_path / "data.jsonl", [SPOKEN[0], refused])
    (line,) = mistakes_of(count, path)
    assert line.startswith(f"{path}:2: the chat template refuses it: ")


@pytest.mark.parametrize("label", [None, "perhaps", 2])
def test_a_label_is_true_or_false(label: object, tmp_path: Path, count: Callable[..., Job]) -> None:
    """KTO weighs its loss by the label."""
    path = write_jsonl(tmp_path / "data.jsonl", [LABELLED[0], {**LABELLED[1], "label": label}])
    (line,) = mistakes_of(count, path)
    assert line.startswith(f"{path}:2: label: ")


def test_texts_of_preference_data_are_counted_where_fields_are_given(
    tmp_path: Path, count: Callable[..., Job]
) -> None:
    """The chosen answers alone may be trained on; the examples are then texts."""
    lengths = lengths_of(count(write_jsonl(tmp_path / "d.jsonl", PAIRS), text_fields=("chosen",)))
    assert (lengths.kind, lengths.sequences) == ("texts", None)


def test_pairs_are_truncated_and_not_packed(tmp_path: Path, count: Callable[..., Job]) -> None:
    """A cutoff holds for each sequence; trainers pack no pairs."""
    path = write_jsonl(tmp_path / "data.jsonl", PAIRS)
    job = count(path, cutoff=20)
    assert longest_example(job) == 20
    assert lengths_of(job).mean_sequence(20) <= 20 < lengths_of(job).mean_sequence(None)
    (line,) = mistakes_of(count, path, cutoff=20, padding="packed")
    assert line.startswith("--padding ")
    with pytest.raises(DataError, match="pack"):
        changed_job(job, JobOptions(packing=True), ())


def test_stored_lengths_of_an_unknown_kind_stay_readable() -> None:
    """A run folder may hold lengths that were counted before kinds were."""
    stored = {"source": "data.jsonl", "histogram": [[10, 2]]}
    assert DataLengths.model_validate_json(json.dumps(stored)).kind is None
