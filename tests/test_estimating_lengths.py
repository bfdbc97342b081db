"""Estimates at several lengths, and at the longest that fits."""

import csv
import datetime as dt
import io
import json
from dataclasses import replace
from typing import Any

import pytest
from fakes.in_process_traces import InProcess

import orchestrator
from gpu_catalog.catalog import load_catalog
from gpu_catalog.safe_text import from_spreadsheet_cell
from orchestrator.cli.main import main
from orchestrator.estimating.estimate_request import EstimateRequest, question_of
from orchestrator.estimating.longest_sequence import (
    at_longest,
    lengths_among,
    lengths_up_to,
    longest_that_fits,
)
from orchestrator.estimating.question import Question
from orchestrator.request import request_from
from trials.records.observation import Outcome
from trials.simulation.length_traces import LengthTraces
from trials.simulation.simulated_cell import GIB, SimulatedCell
from trials.simulation.simulated_prober import usable_bytes

CATALOG = load_catalog()
A40 = CATALOG.gpu("A40")


def question(**options: Any) -> Question:
    """Question of a request for the longest sequence of a tiny model."""
    request = request_from(EstimateRequest, {"model": "llama-tiny", "seq_len": "max"} | options)
    return question_of(request, CATALOG, dt.date(2026, 11, 23))


@pytest.mark.usefixtures("made_for_small_steps")
def test_the_longest_sequence_fits_and_the_next_does_not() -> None:
    """By replays of traces at these lengths themselves, of which the search makes three others."""
    traced, apart = InProcess(), InProcess()
    job = question(method="full", defaults="plain")
    gpu = A40.model_copy(update={"usable_memory_bytes": round(0.55 * GIB)})
    ((answer, _),) = at_longest([(job, gpu)], LengthTraces(traced, lengths_up_to(job.seq_len)))
    assert traced.lengths == {4096, 2048, 1024}
    assert 128 < answer.seq_len < 4096
    limit = usable_bytes(gpu, answer.recipe)
    held = [
        SimulatedCell(replace(answer, seq_len=tokens).cell(gpu), answer.model, apart)
        .without_limit(1, gpu)
        .peak_reserved_bytes
        for tokens in (answer.seq_len, answer.seq_len + 128)
    ]
    assert held[0] <= limit < held[1]


def test_the_longest_is_among_those_that_neighbours_outweigh() -> None:
    """Of two neighbours the longer one may fit alone; the model's own longest may be any number."""
    assert longest_that_fits(lambda n: n > 5000 or n % 256 > 0, 9000) == 4864
    assert longest_that_fits(lambda n: n > 900, 9000) == 896
    assert longest_that_fits(lambda n: n > 2000, 2000) == 2000
    assert longest_that_fits(lambda n: n > 0, 9000) == 128


def test_at_most_three_lengths_are_traced() -> None:
    """Two where no third is given."""
    assert lengths_among((512, 128, 4096, 2048, 1024)) == (128, 1024, 4096)
    assert lengths_among((64, 32)) == (32, 64)
    assert lengths_up_to(131_072) == (131_072, 65_536, 32_768)
    assert lengths_up_to(500) == (500,)


def test_each_of_several_lengths_has_rows_and_a_recommendation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The rows of a length are those of an estimate at that length alone.

    That one is also replayed on assumed lengths.
    """
    stated = ("--method", "lora", "--gradient-checkpointing", "off")
    tiny = ("estimate", "--model", "llama-tiny", *stated, "--gpu", "A40", "--seq-len")
    assert main([*tiny, "256,128", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["seq_len"] for row in rows] == [128, 256]
    assert main([*tiny, "256", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone.pop("assumed_lengths") is not None
    assert rows[1].pop("assumed_lengths") is None
    assert alone == rows[1]
    assert main([*tiny, "256,128", "--csv"]) == 0
    cells = [*csv.DictReader(io.StringIO(capsys.readouterr().out))]
    assert [int(row["seq_len"]) for row in cells] == [128, 256]
    for name in ("peak_gib", "step_seconds", "batch_size"):
        assert [float(row[name]) for row in cells] == [row[name] for row in rows]
    assert cells[0]["usd_low"] == str(rows[0]["price"]["usd_interval"]["low"])
    assert from_spreadsheet_cell(cells[0]["assumed"]) == "; ".join(rows[0]["assumed"])
    assert main([*tiny, "256,128"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("Rent **A40**") == 2
    assert "| tokens |" in shown
    assert shown.count("CUDA's context") == 1  # a note of both


@pytest.mark.parametrize("lengths", ["0", "one", "512,512", "512,max", "512,"])
def test_a_wrong_length_is_one_line(capsys: pytest.CaptureFixture[str], lengths: str) -> None:
    """It is a mistake of usage, from Python as well."""
    with pytest.raises(SystemExit) as ended:
        main(["estimate", "--model", "llama-tiny", "--seq-len", lengths])
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    with pytest.raises(orchestrator.UserError, match="seq_len"):
        orchestrator.estimate("llama-tiny", seq_len=lengths)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"packing": True}, "--packing"),
        ({"batch_size": "max"}, "--batch-size"),
        ({"dataset": "commonsense_15k"}, "tokens"),
    ],
)
def test_nothing_else_decides_on_a_length_that_is_found(
    options: dict[str, Any], message: str
) -> None:
    """Packed rows, the largest batch and examples of a data set do."""
    with pytest.raises(orchestrator.UserError, match=f"--seq-len max.*{message}"):
        question(**options)


@pytest.mark.long
def test_the_longest_context_of_an_8b_model_on_an_a40() -> None:
    """QLoRA fits more than twice that of LoRA; an H200 holds all that the model states."""
    lora, qlora = (
        {
            row.gpu.key: row.estimate
            for row in orchestrator.estimate(
                "llama-3.1-8b", gpu="A40,H200-SXM", seq_len="max", method=method, batch_size=1
            )
        }
        for method in ("lora", "qlora")
    )
    assert qlora["A40"].seq_len > 2 * lora["A40"].seq_len > 20_000
    assert qlora["H200-SXM"].seq_len == qlora["H200-SXM"].seq_len_limit == 131_072
    for row in (lora["A40"], qlora["A40"]):
        assert row.outcome is Outcome.FITS
        assert row.reserved_gib <= row.usable_gib
        (following,) = orchestrator.estimate(
            "llama-3.1-8b", gpu="A40", seq_len=row.seq_len + 128, method=row.method, batch_size=1
        )
        assert following.estimate.outcome is not Outcome.FITS
