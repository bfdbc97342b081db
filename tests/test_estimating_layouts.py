"""Numbers of GPUs and strategies that one estimate compares."""

import datetime as dt
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpu_catalog.catalog import load_catalog
from orchestrator.estimating.choosing.layouts import layouts, names_by_count, on_layout
from orchestrator.estimating.estimate import simulations
from orchestrator.estimating.estimate_request import EstimateRequest, question_of
from orchestrator.estimating.question import EstimateError
from orchestrator.request import request_of
from trials.simulation.trace_cache import StepTrace
from trials.simulation.trace_request import TraceRequest

CATALOG = load_catalog()
TODAY = dt.date(2026, 11, 23)


class Asked:
    """Source of traces that keeps what it is asked for, call by call, and makes none."""

    folder: Path | None = None

    def __init__(self) -> None:
        self.calls: list[set[str]] = []

    def get(self, request: TraceRequest) -> StepTrace:
        """No trace."""
        raise AssertionError(request.key)

    def prepare(self, requests: Sequence[TraceRequest]) -> None:
        """Keep the keys of the traces."""
        self.calls.append({request.key for request in requests})


def test_all_layouts_are_traced_at_once_and_ddp_has_the_trace_of_one_gpu() -> None:
    """Each number of shards has a trace of its own."""
    request = request_of(EstimateRequest, {"model": "llama-tiny", "seq_len": 512})
    question = question_of(request, CATALOG, TODAY)
    on_layouts = [layout for count in (1, 2, 4) for layout in layouts(count, "auto")]
    source = Asked()
    gpu = CATALOG.gpu("H100-SXM")
    simulations([(on_layout(question, layout, 64), gpu) for layout in on_layouts], source)
    assert len(on_layouts) == 5
    assert [len(call) for call in source.calls] == [3]


def test_a_count_in_the_name_of_a_gpu_replaces_those_of_the_option() -> None:
    """Too many GPUs are an error."""
    names = names_by_count(["8xH100-SXM", "A40"], [1, 2])
    assert names == {8: ("H100-SXM",), 1: ("A40",), 2: ("A40",)}
    with pytest.raises(EstimateError, match="128 GPUs"):
        names_by_count(["A40"], [128])
