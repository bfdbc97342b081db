"""Eq. 1 on observations: recovered, failed with a reason, and never mixed."""

import pytest
from builders.mixtral_probes import (
    cell,
    environment,
    eq1_observations,
    fits_of,
    ladder,
    limit,
    only,
    probe,
    value,
)

from fitting.fit import fit_observations
from fitting.laws.fit_result import Law
from fitting.numerics.least_squares import Status
from gpu_catalog.errors import UserError
from trials.records.observation import Basis, Observation, Outcome


def test_eq1_is_recovered_across_gpus_sparsities_and_lengths() -> None:
    """From rounded batch sizes c0 and c1 return within the rounding error."""
    fit = only(Law.MAX_BATCH_EQ1, eq1_observations(c0=82, c1=0.88))
    assert fit.status is Status.OK
    assert value(fit, "c0") == pytest.approx(82, rel=0.05)
    assert value(fit, "c1") == pytest.approx(0.88, abs=0.02)
    assert fit.group.key == "mixtral-8x7b/qlora-r16-bf16-checkpointed"
    assert "fitted to b + 0.5" in str(fit.note)
    assert "of 8 cells" in str(fit.note)
    assert "GPUs: a40, h100" in str(fit.note)
    assert [(r.name, r.low, r.high) for r in fit.input_range] == [
        ("memory_gb", 48, 80),
        ("model_memory_gb", 24, 24),
        ("seq_len", 64, 128),
        ("sparsity", 0.25, 1),
    ]


def test_eq1_crosses_devices_but_not_software() -> None:
    """Eq. 1 holds for all devices together; another torch version has another law."""
    observations = limit(cell(8), 3, memory_gb=48) + [
        o.model_copy(update={"environment": environment(device_name="NVIDIA H100")})
        for o in limit(cell(8, gpu="h100"), 9, memory_gb=80)
    ]
    assert [fit.points for fit in fits_of(Law.MAX_BATCH_EQ1, observations)] == [2]
    observations += [
        o.model_copy(update={"environment": environment(torch="2.10.0")})
        for o in limit(cell(8, seq_len=64), 6)
    ]
    assert sorted(fit.points for fit in fits_of(Law.MAX_BATCH_EQ1, observations)) == [1, 2]


def test_drivers_share_a_law_of_the_largest_batch() -> None:
    """Clouds have different drivers; step times are still kept apart by driver."""
    driven = environment().model_copy(
        update={"versions": (("driver", "580"), *environment().versions)}
    )
    observations = limit(cell(8), 3) + [
        o.model_copy(update={"environment": driven}) for o in limit(cell(8, seq_len=64), 6)
    ]
    assert [fit.points for fit in fits_of(Law.MAX_BATCH_EQ1, observations)] == [2]
    assert driven.stack != environment().stack


def test_a_capped_gpu_has_limits_and_no_speed() -> None:
    """Its steps ran on a larger GPU; its largest batch sizes are a group of their own."""
    alike = cell().model_copy(update={"capped_on": "H200-SXM"})
    capped = [
        o.model_copy(update={"cell": alike, "basis": Basis.CAPPED})
        for o in (*limit(cell(), 8), *ladder(cell(), (1, 2, 4, 8), 0.1, 0.1))
    ]
    fits = fit_observations(capped)
    assert {fit.law for fit in fits.fits} == {Law.MAX_BATCH_EQ1, Law.MEMORY_AFFINE}
    assert fits.families == ()
    both = fit_observations([*capped, *limit(cell(), 9)]).fits
    assert {(fit.basis, fit.points) for fit in both if fit.law is Law.MAX_BATCH_EQ1} == {
        (Basis.CAPPED, 1),
        (Basis.MEASURED, 1),
    }


def test_one_sparsity_does_not_identify_c0_and_c1() -> None:
    """However many cells there are, the remedy is a second sparsity."""
    observations = [o for n in (64, 128, 256) for o in limit(cell(seq_len=n), 1024 // n)]
    fit = only(Law.MAX_BATCH_EQ1, observations)
    assert fit.status is Status.RANK_DEFICIENT
    assert (fit.rank, fit.parameter_count, fit.parameters) == (1, 2, ())
    assert "sparsity 0.25" in str(fit.note)
    assert "second sparsity" in str(fit.remedy)


def test_a_model_without_experts_has_no_c1() -> None:
    """Its sparsity is always 1, so c0 is the whole law."""
    observations = [o for n in (64, 128, 256) for o in limit(cell(None, seq_len=n), 1024 // n)]
    fit = only(Law.MAX_BATCH_EQ1, observations)
    assert fit.status is Status.OK
    assert [p.name for p in fit.parameters] == ["c0"]


def test_too_few_cells_name_lengths_gpus_and_sparsities() -> None:
    """One cell gives one point; the remedy names what to add."""
    fit = only(Law.MAX_BATCH_EQ1, limit(cell(), 8))
    assert fit.status is Status.TOO_FEW_POINTS
    assert "at least 3 cells" in str(fit.remedy)
    assert "two sparsities" in str(fit.remedy)


@pytest.mark.parametrize(
    "unknown",
    [
        limit(cell(), 0),
        limit(cell(), 8, outcome=Outcome.TIMED_OUT),
        limit(cell(), 8, outcome=Outcome.HOST_OUT_OF_MEMORY),
        [probe(cell(), 8)],
        [probe(cell(), 8, batch_limit=8)],
    ],
    ids=["none fits", "time ran out", "host ran out", "still searching", "limit reached"],
)
def test_a_largest_batch_that_memory_did_not_set_is_not_used(unknown: list[Observation]) -> None:
    """Alone it is no data; beside others the note counts it."""
    alone = only(Law.MAX_BATCH_EQ1, unknown)
    assert alone.status is Status.NO_DATA
    assert "none of 1 cell" in str(alone.note)
    reached = [o for n in (64, 256) for active in (2, 8) for o in limit(cell(active, seq_len=n), 4)]
    beside = only(Law.MAX_BATCH_EQ1, reached + unknown)
    assert beside.points == 4
    assert "1 of 5 cells left out" in str(beside.note)


def test_a_probe_killed_with_its_child_belongs_to_the_only_stack() -> None:
    """A miss without an environment still bounds the search of its cell."""
    fits, miss = limit(cell(), 8)
    killed = miss.model_copy(update={"environment": None})
    assert only(Law.MAX_BATCH_EQ1, [fits, killed]).points == 1
    elsewhere = limit(cell(8), 2)[0].model_copy(update={"environment": environment(torch="2.10")})
    assert {f.points for f in fits_of(Law.MAX_BATCH_EQ1, [fits, killed, elsewhere])} == {0}


def test_a_group_without_any_environment_has_no_stack() -> None:
    """Its software stack is None, and nothing is fitted to it."""
    lost = limit(cell(), 0)[0].model_copy(update={"environment": None})
    fits = fit_observations([lost])
    assert {(fit.stack, fit.status) for fit in fits.fits} == {(None, Status.NO_DATA)}
    assert [family.name.software for family in fits.families] == [None]


def test_a_model_larger_than_the_memory_it_fits_in_is_named() -> None:
    """A contradictory record is an error with the cell's name, not a negative coefficient."""
    with pytest.raises(UserError, match=r"2of8/seq128: 8 examples fit"):
        fit_observations(limit(cell(), 8, memory_gb=20))
