"""Ranking of a training that keeps its optimizer on the host, on instances with little memory."""

from typing import Any

import pytest
from builders.observations import measurement
from builders.rankings import exclusion_reason, ranked, timed
from builders.runs import ONE_CELL, spec_of

from orchestrator.reporting.markdown_report import cheapest_section
from orchestrator.reporting.notes.ranking_notes import ranking_notes
from orchestrator.spec.sweep_spec import SweepSpec
from trials.recipes.host_bytes import least_host_bytes
from trials.recipes.parallel import Parallel
from trials.recipes.zero_settings import Offload
from trials.records.observation import Measurement

GIB = 2**30
ROWS = """\
catalog:
  gpus:
    - {key: desk, kind: cpu, usable_memory_bytes: 100000000, source: me, recorded: 2026-01-31}
  offers:
    - {gpu: desk, provider: pit, region: here, instance: small, gpus_per_instance: 2,
       usd_per_hour: 1.0, host_memory_gib: 256, source: me, recorded: 2026-01-31}
    - {gpu: desk, provider: pit, region: here, instance: unknown, gpus_per_instance: 2,
       usd_per_hour: 2.0, source: me, recorded: 2026-01-31}
"""
LAYOUT = "\n    parallel: [{gpus: 2, strategy: deepspeed-zero2, offload: optimizer}]"
TEXT = ONE_CELL.replace("[cpu]", "[desk]").replace(
    "precision: fp32}]", f"precision: bf16}}]{LAYOUT}"
)


def spec(rows: str = ROWS) -> SweepSpec:
    """A cell on two GPUs whose host holds the optimizer."""
    return spec_of(TEXT + rows)


def of(made: SweepSpec, **changed: Any) -> list[Any]:
    """A timed probe of its cell."""
    (cell,) = made.all_cells()
    seen = measurement(step_seconds=(0.1,) * 6).model_copy(update=changed)
    assert isinstance(seen, Measurement)
    return [timed(8, 0.1, cell=cell, measurement=seen)]


def test_an_instance_with_too_little_host_memory_is_not_ranked_and_named() -> None:
    """The cheapest holds 256 of 310 GiB; of the other's memory nothing is known."""
    made = spec()
    ranking = ranked(of(made, host_bytes=310 * GIB), spec=made)
    assert [(row.instance, row.host_gib, row.host_memory_gib) for row in ranking.offers] == [
        ("unknown", 310, None)
    ]
    (left_out,) = ranking.too_little_host_memory
    assert [one.instance for one in left_out.instances] == ["small"]
    assert left_out.instances[0].text in cheapest_section(ranking)
    notes = ranking_notes(ranking.offers, ranking)
    assert "310 GiB" in notes
    assert "pit unknown" in notes


def test_a_cell_that_no_host_can_hold_is_excluded_with_both_figures() -> None:
    """Its GPUs are fast enough; the memory of the host is the reason."""
    only_small, _, _ = ROWS.partition(
        "    - {gpu: desk, provider: pit, region: here, instance: unk"
    )
    made = spec(only_small)
    (cell,) = made.all_cells()
    reason = exclusion_reason(ranked(of(made, host_bytes=310 * GIB), spec=made), cell)
    assert "310 GiB" in reason
    assert "256 GiB" in reason


def test_a_measured_training_needs_at_least_the_bytes_of_its_parameters() -> None:
    """Measured ranks do not count the tensors on their host."""
    made = spec()
    observations = of(made)
    built = observations[0].measurement.built
    needed = 18 * built.parameters.trainable / GIB
    ranking = ranked(observations, spec=made)
    assert {row.host_gib for row in ranking.offers} == {needed}
    assert len(ranking.offers) == 2


@pytest.mark.parametrize(
    ("offload", "expected"), [("optimizer", 1800), ("parameters", 400), ("all", 2200)]
)
def test_the_least_of_a_node_is_its_share_of_what_is_offloaded(
    offload: Offload, expected: int
) -> None:
    """18 bytes of each trained weight, 2 of every weight: half on each of two nodes."""
    layout = Parallel.model_validate(
        {"gpus": 4, "nodes": 2, "strategy": "deepspeed-zero3", "offload": offload}
    )
    assert least_host_bytes(layout, weights=400, trained=200) == expected
    plain = Parallel(gpus=4, strategy="deepspeed-zero3")
    assert least_host_bytes(plain, weights=400, trained=200) == 0
