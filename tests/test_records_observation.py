import pytest
from builders.observations import environment, measurement, observation
from pydantic import ValidationError

from trials.records.observation import Environment, Measurement, Observation, Outcome, largest_batch

MISSES = [o for o in Outcome if o.is_verdict and o is not Outcome.FITS]


def test_three_outcomes_are_verdicts() -> None:
    """A crash, a hang and a lack of host memory say nothing about device memory."""
    verdicts = {Outcome.FITS, Outcome.OUT_OF_MEMORY, Outcome.THRASHING}
    assert {o for o in Outcome if o.is_verdict} == verdicts


@pytest.mark.parametrize("outcome", MISSES)
def test_a_fit_and_a_miss_one_above_close_the_search(outcome: Outcome) -> None:
    """The probes give the largest batch size and its evidence, in any order."""
    probes = [observation(4), observation(8, outcome), observation(5), observation(6, outcome)]
    assert largest_batch(probes) == (5, probes[3])
    assert largest_batch(probes[::-1]) == (5, probes[3])


def test_a_fit_at_the_batch_limit_closes_the_search_without_a_miss() -> None:
    """Batch sizes above the limit are never probed, so no miss can exist."""
    assert largest_batch([observation(1), observation(64)]) == (64, None)


def test_not_even_one_example_fits() -> None:
    """A largest batch size of zero is a result with its evidence, not a missing result."""
    miss = observation(1, Outcome.OUT_OF_MEMORY)
    assert largest_batch([miss]) == (0, miss)


@pytest.mark.parametrize(
    "probes",
    [
        [],
        [observation(63)],
        [observation(2, Outcome.OUT_OF_MEMORY)],
        [observation(3), observation(5, Outcome.OUT_OF_MEMORY)],
        [observation(4), observation(5, Outcome.FAILED)],
        [observation(64, Outcome.FAILED)],
        [observation(1, Outcome.FAILED)],
    ],
)
def test_a_search_that_has_not_closed_has_no_result(probes: list[Observation]) -> None:
    """A gap between fit and miss, or FAILED probes, leave the search open."""
    assert largest_batch(probes) is None


def test_a_failed_probe_changes_no_result() -> None:
    """Failures below, at and above the largest batch size leave the result as it is."""
    probes = [observation(4), observation(5, Outcome.OUT_OF_MEMORY)]
    failed = [observation(size, Outcome.FAILED) for size in (2, 4, 5)]
    assert largest_batch([*failed, *probes]) == (4, probes[1])


def test_a_ladder_miss_outweighs_an_earlier_fit() -> None:
    """A batch size that fits for three steps but not for thirty cannot be trained with."""
    closed = [observation(7), observation(8), observation(9, Outcome.OUT_OF_MEMORY)]
    miss = observation(8, Outcome.OUT_OF_MEMORY, purpose="ladder")
    assert largest_batch(closed) == (8, closed[2])
    assert largest_batch([*closed, miss]) == (7, miss)


def test_a_ladder_miss_reopens_the_search() -> None:
    """Fits above a miss do not count, and sizes between fit and miss are unknown again."""
    closed = [observation(1), observation(8), observation(9, Outcome.OUT_OF_MEMORY)]
    miss = observation(3, Outcome.OUT_OF_MEMORY, purpose="ladder")
    assert largest_batch([*closed, miss]) is None


@pytest.mark.parametrize(
    "record",
    [
        observation(4, measurement=measurement(12345, (0.1, 1 / 3, 2e-9))),
        observation(5, Outcome.OUT_OF_MEMORY),
        observation(5, Outcome.FAILED, environment=None, attempt=2, purpose="ladder", repeat=1),
        observation(6, environment=environment(node_id="n1")),
    ],
)
def test_a_record_is_the_same_after_json(record: Observation) -> None:
    """Numbers keep all digits, and absent values stay absent."""
    assert Observation.model_validate_json(record.model_dump_json()) == record


def test_a_key_names_the_probe_within_its_run() -> None:
    """Purpose, batch size, visit and attempt identify a probe of a cell."""
    record = observation(5, purpose="ladder", repeat=1, attempt=2)
    assert record.key == "cpu/llama-tiny/full-fp32/dense/seq16/ladder/b5/r1/t2"


@pytest.mark.parametrize("elsewhere", [{"host": "there"}, {"node_id": "n1"}])
def test_the_stack_ignores_where_it_ran(elsewhere: dict[str, object]) -> None:
    """Two nodes with the same software and device are one stack and are fitted together."""
    assert environment(**elsewhere).stack == environment().stack


@pytest.mark.parametrize(
    "other",
    [
        environment(versions=(("python", "3.11.1"), ("torch", "2.9.1"))),
        environment(versions=(("python", "3.11.1"),)),
        environment(device_name="another processor"),
        environment(threads=2),
    ],
)
def test_another_version_device_or_thread_count_is_another_stack(other: Environment) -> None:
    """A change that affects measurements changes the fingerprint, so fits never mix stacks."""
    assert other.stack != environment().stack


def test_the_threads_of_a_gpus_host_are_no_part_of_its_stack() -> None:
    """Nodes with one GPU differ in cores, and those of a future node are unknown."""
    one, many = (environment(allocator="", threads=threads) for threads in (1, 32))
    assert one.stack == many.stack != environment().stack


def test_the_stack_is_the_same_in_every_process_and_version() -> None:
    """Last year's records belong to the same stack as this year's."""
    assert environment().stack == "5718b2dc9d11"


def test_the_software_is_the_same_on_any_device_and_driver() -> None:
    """Another version of any other part is other software."""
    versions = environment().versions
    elsewhere = environment(
        versions=(("driver", "570"), *versions), device_name="another", threads=8
    )
    assert elsewhere.software == environment().software
    assert environment(versions=versions[:1]).software != environment().software


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_step_that_took_no_possible_time_is_refused(seconds: float) -> None:
    """Throughput divides by the step time, so a broken record is refused when it is read."""
    fields = measurement().model_dump() | {"step_seconds": (0.5, seconds)}
    with pytest.raises(ValidationError, match=r"step_seconds\.1"):
        Measurement.model_validate(fields)
