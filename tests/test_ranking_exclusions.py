"""Cells without a ranked offer, each with its reason."""

import pytest
from builders.observations import environment, observation
from builders.rankings import (
    ATTIC,
    DESK,
    JOB,
    LAP,
    SPEC,
    TEXT,
    exclusion_reason,
    job_at,
    limit_probes,
    on_desk,
    ranked,
    timed,
    two_gpus,
)
from builders.runs import ONE_CELL, spec_of, whole_trial

from fitting.families.cell_step_time import StepTimeSource
from fitting.families.fit_family import fit_families
from orchestrator.planning.cluster_resources import ClusterResources, Node
from orchestrator.planning.plan import make_plan
from orchestrator.pricing.offer_constraints import Constraints, MissedConstraints
from orchestrator.ranking.priced_cells import RankingInputs
from orchestrator.ranking.ranked_offer import (
    Excluded,
)
from orchestrator.ranking.ranking import rank
from trials.records.observation import Basis, Observation, Outcome


def test_requested_batch_that_does_not_fit_is_excluded() -> None:
    """The reason names the largest batch size, and no law is used."""
    reason = exclusion_reason(ranked(whole_trial(DESK, SPEC), job_at(41)))
    assert "41 does not fit" in reason
    assert "largest is 40" in reason
    assert reason.endswith("give --batch-size max")


def test_requested_batch_that_no_law_predicts_is_excluded() -> None:
    """Two batch sizes cannot fit and check a law of two parameters."""
    seen = [*limit_probes(8), timed(1, 0.1), timed(8, 0.2)]
    assert "no law predicts it" in exclusion_reason(ranked(seen, job_at(4)))
    assert "8 was not measured" in exclusion_reason(ranked(limit_probes(8), job_at(8)))
    (own,) = fit_families(whole_trial(DESK, SPEC))
    others: list[dict[str, object]] = [
        {"basis": Basis.SIMULATED},
        {"weights": "pretrained"},
        {"model": "other"},
        {"recipe": "lora"},
    ]
    for families in (
        fit_families(whole_trial(LAP, SPEC)),
        fit_families(whole_trial(DESK, SPEC, where=environment(device_name="x"))),
        *(
            (own.model_copy(update={"name": own.name.model_copy(update=changed)}),)
            for changed in others
        ),
    ):
        reason = exclusion_reason(ranked(seen, job_at(4), families=families))
        assert "no law predicts it" in reason
    assert on_desk(ranked(seen, job_at(4), families=(own,))).source == "law"


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        ([], "not measured: sweep --resume --out RUN"),
        (
            limit_probes(0),
            "not even one example fits: OUT_OF_MEMORY at batch size 1 (why)",
        ),
        (
            [
                observation(1, Outcome.FAILED, cell=DESK, attempt=n, detail="no luck")
                for n in (1, 2)
            ],
            "batch size 1 FAILED 2 times: no luck",
        ),
        (
            [
                observation(size, Outcome.FAILED, cell=DESK, attempt=n, detail=f"error {n}")
                for n, size in enumerate((1, 2, 1, 2, 2), start=1)
            ],
            "batch size 2 FAILED 3 times: error 5",
        ),
        ([observation(1, cell=DESK)], "not fully measured: sweep --resume --out RUN"),
    ],
)
def test_cell_without_times_is_excluded_with_the_reason(
    seen: list[Observation], reason: str
) -> None:
    """Every such cell has its own reason."""
    assert reason in exclusion_reason(ranked(seen))


def test_a_packed_row_that_does_not_fit_is_named_so() -> None:
    """It has several examples."""
    spec = spec_of(TEXT.replace("precision: fp32", "precision: fp32, packing: true"))
    desk = next(cell for cell in spec.all_cells() if cell.gpu == "desk")
    reason = exclusion_reason(ranked(limit_probes(0, desk), spec=spec), desk)
    assert reason.startswith("not even one packed row fits: OUT_OF_MEMORY at batch size 1")


def test_capped_gpu_is_not_priced_by_the_larger_gpus_speed() -> None:
    """Timings of the larger GPU do not count; the largest batch size is reported."""
    spec = spec_of(
        TEXT.replace("100000000", "90000000", 1).replace(
            "[desk, lap, attic]", "[lap]\nas_if: [desk]"
        )
    )
    (capped,) = [cell for cell in spec.all_cells() if cell.capped_on is not None]
    probes = (*limit_probes(8, capped), timed(8, 0.1, cell=capped))
    seen = [o.model_copy(update={"basis": Basis.CAPPED}) for o in probes]
    reason = exclusion_reason(ranked(seen, spec=spec), capped)
    assert "largest batch, 8, " in reason
    assert "on lap" in reason


def test_cell_whose_gpu_has_no_offer_is_excluded() -> None:
    """A measured GPU without an offer has no price."""
    reason = exclusion_reason(ranked(whole_trial(ATTIC, SPEC)), ATTIC)
    assert "no offer for attic" in reason
    assert "--prices FILE" in reason


def test_skipped_cell_keeps_the_plans_reason_unless_it_was_measured_before() -> None:
    """Another cluster may have measured the GPU that this one lacks."""
    spec = spec_of(ONE_CELL.replace("[cpu]", "[A40]"))
    (cell,) = spec.all_cells()
    catalog = spec.merged_catalog()
    plan = make_plan(spec, catalog, ClusterResources((Node({}),)), [])
    (left_out,) = rank(RankingInputs(JOB, catalog, plan, StepTimeSource([], ()))).excluded
    assert left_out == Excluded(cell=cell, reason=plan.skipped[0].reason)
    seen = [timed(8, 0.1, cell=cell)]
    ranking = rank(RankingInputs(JOB, catalog, plan, StepTimeSource(seen, ())))
    assert len(ranking.offers) == len(catalog.offers("A40")) > 0
    assert ranking.excluded == ()


def test_offers_that_miss_a_constraint_are_excluded() -> None:
    """Provider, region, market and GPUs apply; a deadline or budget is missed by an amount."""
    seen = two_gpus(0.1, 0.2)

    def left(**asked: object) -> list[str]:
        constraints = Constraints.model_validate(asked)
        catalog = SPEC.merged_catalog()
        plan = make_plan(SPEC, catalog, ClusterResources((Node({"CPU": 1.0}),)), seen)
        step_times = StepTimeSource(seen, ())
        ranking = rank(RankingInputs(JOB, catalog, plan, step_times, constraints=constraints))
        assert {e.cell for e in ranking.excluded} >= {ATTIC}
        reasons.extend(e.reason for e in ranking.excluded if e.cell != ATTIC)
        misses[:] = [e.missed for e in ranking.excluded if e.cell != ATTIC]
        return [row.instance for row in ranking.offers]

    reasons: list[str] = []
    misses: list[MissedConstraints | None] = []
    assert left() == ["slow", "single", "whole"]
    assert left(providers=("pub",)) == ["slow"]
    assert left(regions=("there",)) == ["single"]
    assert left(market="on-demand") == ["slow", "whole"]
    assert left(market="spot", single_gpu=True) == ["single"]
    assert left(single_gpu=True) == ["slow", "single"]
    assert "no offer of its 2 meets --providers pub: leave it out" in reasons
    assert any("--spot and --single-gpu-instances: relax one of" in reason for reason in reasons)
    # 375 steps of 0.1 and 0.2 s: 38 and 75 s; $0.0375 and $0.01875.
    reasons.clear()
    assert left(deadline_hours=60 / 3600) == ["single", "whole"]
    (reason,) = reasons
    assert "0.0208 h" in reason
    assert "deadline is 0.01666" in reason
    reasons.clear()
    assert left(budget_usd=0.03) == ["slow"]
    (reason,) = reasons
    assert "$0.0375" in reason
    assert "budget is $0.03" in reason
    (missed,) = misses
    assert missed is not None
    assert (missed.quickest_hours * 3600, missed.cheapest_usd) == pytest.approx((37.5, 0.0375))
