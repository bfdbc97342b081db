"""A job by numbers, a histogram or a set of the paper, and what it comes to in tokens and steps."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from builders.observations import recipe

from orchestrator.datasets.lengths import PUBLISHED, DataLengths, published_lengths, read_histogram
from orchestrator.datasets.source import DataError
from orchestrator.spec.job import Job
from orchestrator.spec.job_options import JobOptions, changed_job
from orchestrator.spec.job_request import JobRequest, requested_job
from orchestrator.spec.job_tokens import (
    job_of,
    longest_tokens,
    padded_tokens,
    rows,
    shorter_lengths,
    steps,
    waited_tokens,
)
from trials.recipes.parallel import Parallel, Strategy


def lengths_of(workload: Job) -> DataLengths:
    """Of a job that has them."""
    assert workload.lengths is not None
    return workload.lengths


def written(folder: Path, content: str) -> Path:
    """A histogram."""
    path = folder / "lengths.csv"
    path.write_text(content, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "examples", "median"),
    [("commonsense_15k", 15_119, 79), ("math_14k", 13_921, 174), ("hellaswag", 10_000, 272)],
)
def test_sets_of_the_paper_are_known_by_name(name: str, examples: int, median: int) -> None:
    """Two by their histograms; of others every example has the median, which is said."""
    workload = requested_job(JobRequest(named=name, epochs=10), ())
    lengths = lengths_of(workload)
    assert (workload.examples, lengths.lengths.median) == (examples, median)
    assert PUBLISHED[name].median == median
    assert (lengths.assumed is None) == (len(lengths.histogram) > 1)


def test_openorca_has_no_lengths_and_a_number_of_examples() -> None:
    """Nothing is published of them: as without a data set, examples have the full length."""
    assert published_lengths("openorca") is None
    workload = requested_job(JobRequest(named="openorca", epochs=10), ())
    assert (workload.examples, workload.lengths) == (2_900_000, None)
    assert padded_tokens(workload, 4, 512) == longest_tokens(workload, 512) == 512
    with pytest.raises(DataError, match="--cutoff 512: the lengths of examples are unknown: give"):
        requested_job(JobRequest(named="openorca", epochs=10, cutoff=512), ())
    with pytest.raises(DataError, match="--named 'gsm9k': no such data set: did you mean 'gsm8k'"):
        requested_job(JobRequest(named="gsm9k", epochs=10), ())


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        ("tokens,examples\n10,x\n0,2\n1.5,3\n", ["2: examples", "3: tokens", "4: tokens"]),
        ("tokens\n10\n", ["1: no column examples"]),
        ("dataset,tokens,examples\na,1,1\nb,1,1\n", ["1: has 2 data sets (a, b)"]),
        ("tokens,examples\n,1\n", ["2: tokens: is empty"]),
    ],
)
def test_what_is_no_histogram_is_told(content: str, lines: Sequence[str], tmp_path: Path) -> None:
    """Line by line."""
    path = written(tmp_path, content)
    with pytest.raises(DataError) as error:
        read_histogram(path)
    found = str(error.value).split("\n")
    assert len(found) == len(lines), found
    for line, begin in zip(found, lines, strict=True):
        assert line.startswith(f"--length-histogram {path}:{begin}"), line


def test_a_histogram_of_lengths_serves_as_well_as_a_data_set(tmp_path: Path) -> None:
    """In any order, a length more than once; the number of examples is its own unless told."""
    path = written(tmp_path, "examples;tokens\n2;30\n1;10\n3;30\n")
    asked = JobRequest(length_histogram=str(path), epochs=2)
    workload = requested_job(asked, ())
    assert lengths_of(workload).histogram == ((10, 1), (30, 5))
    assert (workload.examples, steps(workload, 4)) == (6, 4)
    more = requested_job(asked.model_copy(update={"examples": 600}), ())
    assert (more.examples, steps(more, 4)) == (600, 300)


def test_a_workload_without_lengths_is_as_it_was() -> None:
    """Every example has the full sequence length; packing needs to know better."""
    workload = Job(examples=1001, epochs=2)
    assert padded_tokens(workload, 8, 128) == longest_tokens(workload, 128) == 128
    assert (rows(workload), steps(workload, 10)) == (1001, 202)
    with pytest.raises(ValueError, match="packing needs lengths, and a cutoff"):
        Job(examples=1, epochs=1, padding="packed", cutoff=8)


def test_lengths_to_simulate_hold_every_padding_of_the_job() -> None:
    """Each that small batches are padded to, none like another, none of a job that has no place."""
    data = DataLengths(source="made", histogram=((100, 900), (400, 100)))
    job = Job(examples=1000, epochs=1, lengths=data, pad_to_multiple=1)
    lengths = shorter_lengths(job, 400)
    assert lengths == (65, 130, 157, 181, 203, 271, 344)
    assert lengths[1] == round(padded_tokens(job, 1, 400))
    assert shorter_lengths(job, 352) == ()
    assert shorter_lengths(job.model_copy(update={"cutoff": 300}), 352)[-1] < 300
    packed = job.model_copy(update={"cutoff": 200, "padding": "packed"})
    assert shorter_lengths(packed, 400) == (100, 200)
    assert shorter_lengths(job.model_copy(update={"lengths": None}), 400) == ()


def test_ranks_wait_for_the_longest_of_their_batches() -> None:
    """As in drawn steps: in every micro-batch by fsdp2, once in a step by ddp, never in a group."""
    job = requested_job(JobRequest(named="math_14k", epochs=1), ())
    tokens, examples = np.transpose(lengths_of(job).histogram)
    drawn = np.random.default_rng(0).choice(tokens, (20_000, 8, 4, 2), p=examples / examples.sum())
    padded = 8 * np.ceil(drawn.max(-1) / 8)  # tokens of each micro-batch of four, of eight ranks

    def waited(strategy: Strategy, micro_batches: int = 4) -> float:
        layout = Parallel(gpus=8, strategy=strategy)
        return waited_tokens(job, 2, 2048, layout, micro_batches)

    assert waited_tokens(job, 2, 2048, None, 4) == pytest.approx(padded.mean(), rel=0.01)
    assert waited("fsdp2") == pytest.approx(padded.max(1).mean(), rel=0.01)
    assert waited("fsdp2") > 1.5 * padded.mean()
    assert waited("ddp", 1) == waited("fsdp2")
    assert waited("ddp") == pytest.approx(padded.mean(2).max(1).mean(), rel=0.03)
    assert waited("tp") == waited_tokens(job, 2, 2048, None, 4)


def test_the_papers_padding_is_what_was_found_beforehand() -> None:
    """104 tokens at one example and 280 at twenty, 191 and 350: what bends its curves."""
    for name, batch, tokens in (
        *(("commonsense_15k", 1, 104), ("commonsense_15k", 20, 280)),
        *(("math_14k", 1, 191), ("math_14k", 17, 350)),
    ):
        workload = requested_job(JobRequest(named=name, epochs=10), ())
        assert padded_tokens(workload, batch, 512) == pytest.approx(tokens, rel=0.01)


def test_options_change_a_job_or_its_data(tmp_path: Path) -> None:
    """On other terms the lengths stay; of other data there are as many examples as it has."""
    job = requested_job(JobRequest(named="math_14k", epochs=10), ())
    more = changed_job(job, JobOptions(examples=50_000, epochs=3, cutoff=512, packing=True), ())
    assert (more.examples, more.epochs, more.padding) == (50_000, 3, "packed")
    assert more.lengths == job.lengths
    other = changed_job(more, JobOptions(dataset="commonsense_15k", group_by_length=True), ())
    assert (other.examples, other.epochs, other.padding) == (15_119, 3, "grouped")
    path = written(tmp_path, "tokens,examples\n10,7\n")
    third = changed_job(job, JobOptions(length_histogram=str(path), examples=9), ())
    assert (third.examples, lengths_of(third).histogram) == (9, ((10, 7),))
    with pytest.raises(DataError, match="--template 'x': goes with --dataset: add it"):
        changed_job(job, JobOptions(template="x"), ())
    with pytest.raises(DataError, match="--packing needs --cutoff"):
        changed_job(job, JobOptions(packing=True), ())
    with pytest.raises(DataError, match="'': must not be empty"):
        changed_job(job, JobOptions(dataset=""), ())


def test_a_step_has_an_example_even_where_it_fills_several_rows() -> None:
    """A document of 100 tokens is ten rows of a step of one."""
    lengths = DataLengths(source="long.csv", histogram=((100, 5),))
    workload = Job(examples=5, epochs=1, lengths=lengths, cutoff=10, padding="packed")
    assert job_of(workload, recipe("full", effective_batch=1), 10, steps=1).examples == 1
    assert job_of(workload, recipe("full", effective_batch=4), 10, steps=10).examples == 4
