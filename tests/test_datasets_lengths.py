"""Lengths of examples: their record, padding and packing."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from builders.dataset_files import FIELDS, as_jsonl, lengths_of

from orchestrator.datasets.lengths import DataLengths, histogram_csv, read_histogram
from orchestrator.spec.job import Job
from orchestrator.spec.job_tokens import longest_tokens, padded_tokens, rows, steps

pytest_plugins = ["builders.dataset_counting"]


def shuffled_batches(tokens: Sequence[int], batch_size: int, epochs: int) -> Iterator[list[int]]:
    """Full batches of shuffled epochs."""
    draw = np.random.default_rng(0)
    for _ in range(epochs):
        order = draw.permutation(tokens)
        whole = len(order) // batch_size * batch_size
        yield from order[:whole].reshape(-1, batch_size).tolist()


@pytest.mark.parametrize("cutoff", [None, 90])
def test_padding_agrees_with_transformers_collator(
    cutoff: int | None, tmp_path: Path, count: Callable[..., Job], tokenizer_folder: Path
) -> None:
    """Mean widths agree over shuffled epochs, and no row exceeds the longest."""
    from transformers import (  # noqa: PLC0415 - takes seconds
        DataCollatorWithPadding,
        PreTrainedTokenizerFast,
    )

    whole = PreTrainedTokenizerFast.from_pretrained(str(tokenizer_folder))
    collator = DataCollatorWithPadding(whole, pad_to_multiple_of=8)
    workload = count(as_jsonl(tmp_path), text_fields=FIELDS, cutoff=cutoff)
    tokens = np.repeat(*np.transpose(lengths_of(workload).histogram))
    cut = np.minimum(tokens, cutoff or tokens.max())
    assert lengths_of(workload).cut_off(cutoff) == (tokens > cut).sum()
    for batch_size in (2, 16):
        widths = [
            collator([{"input_ids": [1] * length} for length in batch])["input_ids"].shape[1]
            for batch in shuffled_batches(cut, batch_size, 8)
        ]
        expected = padded_tokens(workload, batch_size, 512)
        assert expected == pytest.approx(np.mean(widths), rel=0.01)
        assert max(widths) <= longest_tokens(workload, 512)
        grouped = workload.model_copy(update={"padding": "grouped"})
        assert expected > padded_tokens(grouped, batch_size, 512) > cut.mean()


def test_packed_rows_are_full_and_hold_every_token(
    tmp_path: Path, count: Callable[..., Job]
) -> None:
    """Examples are concatenated and cut into rows without losing a token."""
    workload = count(as_jsonl(tmp_path), text_fields=FIELDS, padding="packed", cutoff=100)
    stream = [1] * lengths_of(workload).tokens
    packed = [stream[at : at + 100] for at in range(0, len(stream), 100)]
    assert rows(workload) == len(packed)
    assert steps(workload, 4) == 3 * -(-len(packed) // 4)
    assert padded_tokens(workload, 4, 512) == longest_tokens(workload, 512) == 100
    # Of a sample, as many rows as all examples would fill.
    more = workload.model_copy(update={"examples": 10 * workload.examples})
    assert rows(more) == pytest.approx(10 * len(packed), abs=10)


def test_record_survives_its_json(tmp_path: Path, count: Callable[..., Job]) -> None:
    """Lengths are equal after a round trip through JSON, and a histogram after one through CSV."""
    lengths = lengths_of(count(as_jsonl(tmp_path), text_fields=FIELDS))
    again = DataLengths.model_validate_json(lengths.model_dump_json())
    assert again == lengths
    assert again.lengths.mean * again.examples == pytest.approx(lengths.tokens)
    path = tmp_path / "lengths.csv"
    path.write_text(histogram_csv("mine", lengths), encoding="utf-8")
    assert read_histogram(path).histogram == lengths.histogram
    assert read_histogram(path).source == f"{path} (mine)"
