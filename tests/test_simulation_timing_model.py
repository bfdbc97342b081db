"""The clock of two lanes: the time of host and GPU together, computed by hand."""

import numpy as np
import pytest

from gpu_catalog.catalog import load_catalog
from gpu_catalog.gpu import Gpu
from gpu_catalog.kernel_rates import rates_of
from trials.recipes.parallel import Parallel
from trials.simulation.clock.copies import two_stream_seconds
from trials.simulation.clock.operators import Operators
from trials.simulation.clock.time_error import time_errors
from trials.simulation.recording import Collective, Column, Kind, OperatorClass, Rate, Wait
from trials.simulation.timing_model import (
    EfficiencyConstants,
    NoSpeedError,
    step_time,
    timeline_of,
    with_grouped_fallback,
)

A100 = load_catalog().gpu("A100-80GB-SXM")  # 312 TFLOP/s, 2039 GB/s, 108 multiprocessors
HOPPER = load_catalog().gpu("H100-SXM")
BANDWIDTH = 2039e9 * rates_of(A100)["moving_reached"]
PLAIN = EfficiencyConstants(
    dequantisation=0.5,
    kernel_floor_us=0.0,
    host_kernel_us=10.0,
    host_view_us=1.0,
    host_four_bit_us=5.0,
    host_wait_us=0.0,
)
WAIT = None


def operator(
    work: OperatorClass, *, rate: Rate = Rate.BF16, **numbers: float
) -> tuple[OperatorClass, Rate, dict[str, float]]:
    """One operator with the columns that matter to it."""
    return work, rate, numbers


def operators(*rows: tuple[OperatorClass, Rate, dict[str, float]] | None) -> Operators:
    """The operators of a step; None is a wait of the host."""
    numbers = np.zeros((len(rows), len(Column)))
    for row, one in zip(numbers, rows, strict=True):
        for name, value in (one[2] if one else {}).items():
            row[Column[name.upper()]] = value
    return Operators(
        kinds=np.array([Kind.WAITED if one is None else Kind.RUN for one in rows]),
        names=np.array([0 if one is None else 4 * one[0] + one[1] for one in rows]),
        numbers=numbers,
    )


def moving(seconds: float) -> tuple[OperatorClass, Rate, dict[str, float]]:
    """A kernel that moves bytes for some seconds on the A100, without its fixed time."""
    return operator(OperatorClass.MEMORY, bytes=seconds * BANDWIDTH)


def seconds(*rows: tuple[OperatorClass, Rate, dict[str, float]] | None) -> float:
    """Seconds of a step on the A100 with the plain constants."""
    return step_time(operators(*rows), A100, PLAIN).seconds


def test_a_busy_gpu_hides_the_host() -> None:
    """Three kernels of 1 ms start after 10 us and run one after another."""
    assert seconds(*3 * [moving(1e-3)]) == pytest.approx(3e-3 + 10e-6)


def test_a_slow_host_hides_the_gpu() -> None:
    """Three kernels of 1 us, launched 10 us apart: the last ends 1 us after its launch."""
    assert seconds(*3 * [moving(1e-6)]) == pytest.approx(30e-6 + 1e-6)


def test_a_wait_joins_both() -> None:
    """Each kernel of 100 us is launched only when the one before it has ended."""
    step = (moving(1e-4), WAIT, moving(1e-4), WAIT)
    assert seconds(*step) == pytest.approx(2 * (10e-6 + 1e-4))
    slow = step_time(operators(*step), A100, PLAIN.model_copy(update={"host_wait_us": 3.0}))
    assert slow.seconds == pytest.approx(2 * (10e-6 + 1e-4 + 3e-6))


def test_the_closed_form_equals_the_recurrence() -> None:
    """Random steps with waits at random places."""
    random = np.random.default_rng(0)
    for _ in range(50):
        step = [
            WAIT
            if random.random() < 0.1
            else operator(OperatorClass.VIEW)
            if random.random() < 0.2
            else moving(random.exponential(1e-5))
            for _ in range(200)
        ]
        host = free = 0.0
        for one in step:
            if one is WAIT:
                host = max(host, free)
            elif one[0] is OperatorClass.VIEW:
                host += 1e-6
            else:
                host += 10e-6
                free = max(free, host) + one[2]["bytes"] / BANDWIDTH
        assert seconds(*step) == pytest.approx(max(host, free))


def test_products_reach_the_rates_of_published_kernels() -> None:
    """A large product at the A100's sustained rate; a faster stack takes less time."""
    size = 16384.0
    product = operator(
        OperatorClass.MATRIX_PRODUCT,
        flops=2 * size**3,
        rows=size,
        inner=size,
        columns=size,
        products=1,
    )
    peak = 2 * size**3 / (312e12 * rates_of(A100)["product_sustained"])
    assert peak < busy(product) < 1.05 * peak
    fast = PLAIN.model_copy(update={"product_speed": 1.25})
    assert busy(product, constants=fast) == pytest.approx(busy(product) / 1.25, rel=0.01)


def test_experts_run_one_by_one_without_a_grouped_kernel() -> None:
    """Before Hopper and in fp32, the host waits for the offsets, then launches each expert."""
    grouped = operator(
        OperatorClass.GROUPED_PRODUCT,
        flops=8e9,
        rows=1024,
        inner=1024,
        columns=1024,
        products=8,
        launches=1,
    )
    together = operators(moving(1e-3), grouped)
    once = step_time(together, HOPPER, PLAIN)
    assert timeline_of(together, HOPPER, PLAIN).host.sum() == pytest.approx(20e-6)
    assert once.busy_seconds[OperatorClass.GROUPED_PRODUCT] > 0
    apart = step_time(together, A100, PLAIN)
    host_seconds = timeline_of(together, A100, PLAIN).host.sum()
    assert host_seconds == pytest.approx(10e-6 + 10e-6 + 7 * (10e-6 + 3 * 1e-6))
    assert apart.busy_seconds[OperatorClass.GROUPED_PRODUCT] == 0
    product = apart.busy_seconds[OperatorClass.MATRIX_PRODUCT]
    # The first kernel is over before the experts' are launched.
    assert apart.seconds == pytest.approx(10e-6 + 1e-3 + (host_seconds - 10e-6) + product)
    single = (OperatorClass.GROUPED_PRODUCT, Rate.FP32, grouped[2])
    fp32 = timeline_of(
        operators(operator(OperatorClass.MEMORY, rate=Rate.FP32), single), HOPPER, PLAIN
    )
    assert fp32.waits.tolist() == [1]
    assert fp32.host.sum() == pytest.approx(2 * 10e-6 + 7 * (10e-6 + 3 * 1e-6))


def test_a_grouped_product_is_replaced_in_its_place() -> None:
    """A wait without costs of its own comes before it."""
    grouped = operator(OperatorClass.GROUPED_PRODUCT, rate=Rate.FP32, products=8, launches=1)
    replaced = with_grouped_fallback(operators(moving(1.0), grouped), A100).in_full
    assert replaced.kinds.tolist() == [Kind.RUN, Kind.WAITED, Kind.RUN]
    assert replaced.names[1:].tolist() == [0, 4 * OperatorClass.MATRIX_PRODUCT + Rate.FP32]
    assert replaced.numbers[1].tolist() == [0.0] * len(Column)
    assert replaced.numbers[2, Column.LAUNCHES] == 8


def busy(
    row: tuple[OperatorClass, Rate, dict[str, float]],
    gpu: Gpu = A100,
    constants: EfficiencyConstants = PLAIN,
) -> float:
    """Seconds that the GPU works on one operator."""
    return float(timeline_of(operators(row), gpu, constants).device.sum())


def test_each_class_of_operator_reaches_its_share_of_the_peak() -> None:
    """The A100 has 312 TFLOP/s in bf16, 19.5 in fp32, and 2,039 GB/s."""
    half = EfficiencyConstants(
        attention_speed=0.5,
        attention_backward=0.25,
        scan=0.2,
        memory_speed=0.5,
        kernel_floor_us=0.0,
    )
    for work, rate, expected in (
        (OperatorClass.ATTENTION_FORWARD, Rate.FP32, 1e12 / (19.5e12 * 0.6 * 0.5)),
        (OperatorClass.ATTENTION_BACKWARD, Rate.BF16, 1e12 / (312e12 * 0.25)),
        (OperatorClass.SCAN, Rate.FP32, 1e12 / (19.5e12 * 0.2)),
        (OperatorClass.UPDATE, Rate.FP32, 1e12 / 19.5e12),
    ):
        assert busy(operator(work, rate=rate, flops=1e12), constants=half) == pytest.approx(
            expected
        )
    assert busy(moving(1e-3), constants=half) == pytest.approx(2e-3)
    assert busy(operator(OperatorClass.SCAN, rate=Rate.FP32, flops=1.0)) > 0


def test_a_kernel_has_a_shortest_duration() -> None:
    """10 us for each launch, and for an operator without a count of launches."""
    floor = PLAIN.model_copy(update={"kernel_floor_us": 10.0})
    for launches, expected in ((0, 10e-6), (1, 10e-6), (2, 20e-6)):
        row = operator(OperatorClass.MEMORY, launches=launches)
        assert busy(row, constants=floor) == pytest.approx(expected)


def test_half_precisions_replace_each_other() -> None:
    """A catalog often has only one of the two rates."""
    for bf16, fp16, slow in ((200.0, 100.0, 2.0), (100.0, None, 1.0), (None, 100.0, 1.0)):
        gpu = A100.model_copy(update={"bf16_dense_tflops": bf16, "fp16_dense_tflops": fp16})
        times = [
            busy(operator(OperatorClass.UPDATE, rate=rate, flops=1e12), gpu)
            for rate in (Rate.BF16, Rate.FP16)
        ]
        assert times == pytest.approx([0.01 / slow, 0.01])


def test_further_launches_of_an_operator_cost_the_host_half() -> None:
    """Products of a group are dispatched one by one, with the views of their slices."""
    constants = PLAIN.model_copy(update={"host_view_us": 2.0})

    def host(row: tuple[OperatorClass, Rate, dict[str, float]]) -> float:
        return float(timeline_of(operators(row), A100, constants).host.sum())

    assert host(operator(OperatorClass.VIEW)) == pytest.approx(2e-6)
    assert host(operator(OperatorClass.MEMORY, launches=1)) == pytest.approx(10e-6)
    assert host(operator(OperatorClass.MEMORY, launches=3)) == pytest.approx(20e-6)
    assert host(operator(OperatorClass.MATRIX_PRODUCT, launches=2)) == pytest.approx(26e-6)
    assert host(operator(OperatorClass.DEQUANTISATION, launches=1)) == pytest.approx(15e-6)


def test_dequantisation_costs_the_host_more() -> None:
    """5 us beyond a launch's 10; half a weight per clock and multiprocessor at 1.41 GHz."""
    unpacking = operator(OperatorClass.DEQUANTISATION, flops=1e9, bytes=2.5e9, launches=1)
    assert seconds(unpacking) == pytest.approx(15e-6 + 1e9 / (0.5 * 108 * 1.41e9), rel=1e-3)


def test_a_slower_host_stretches_its_lane_alone() -> None:
    """At half the speed, launches take twice as long and kernels do not."""
    step = operators(*3 * [moving(1e-6)])
    slow = step_time(step, A100, PLAIN.model_copy(update={"host_factor": 2.0}))
    assert slow.seconds == pytest.approx(60e-6 + 1e-6)
    assert timeline_of(step, A100, PLAIN).seconds(2.0) == pytest.approx(60e-6 + 1e-6)


def test_code_that_waits_for_every_operator_has_one_lane() -> None:
    """Three kernels of 1 ms and their launches run one after another."""
    step = operators(*3 * [moving(1e-3)])
    serial = step_time(step, A100, PLAIN.model_copy(update={"overlapped": False}))
    assert serial.seconds == pytest.approx(3 * (1e-3 + 10e-6))


def test_gpu_time_is_split_by_kind_of_work() -> None:
    """`--explain` prints this split."""
    clock = step_time(operators(moving(1e-3), moving(2e-3)), A100, PLAIN)
    assert clock.busy_seconds[OperatorClass.MEMORY] == pytest.approx(3e-3)
    assert clock.busy_seconds.sum() == pytest.approx(3e-3)


def test_without_a_rate_there_is_no_time() -> None:
    """Only memory can be simulated for such a GPU."""
    unknown = A100.model_copy(update={"memory_bandwidth_gb_per_second": None})
    with pytest.raises(NoSpeedError, match="A100-80GB-SXM"):
        step_time(operators(moving(1e-3)), unknown, PLAIN)
    no_rate = A100.model_copy(update={"bf16_dense_tflops": None, "fp16_dense_tflops": None})
    product = operator(
        OperatorClass.MATRIX_PRODUCT, flops=1.0, rows=1, inner=1, columns=1, products=1
    )
    with pytest.raises(NoSpeedError, match="rate"):
        step_time(operators(product), no_rate, PLAIN)
    assert step_time(operators(moving(1e-3)), no_rate, PLAIN).seconds == pytest.approx(1.01e-3)
    tiny = operator(OperatorClass.UPDATE, flops=1.0)
    with pytest.raises(NoSpeedError, match="rate"):
        step_time(operators(tiny), no_rate, PLAIN)
    unpacking = operator(OperatorClass.DEQUANTISATION, flops=1e9)
    for missing in ("fp32_tflops", "compute_capability"):
        no_clock = A100.model_copy(update={missing: None})
        with pytest.raises(NoSpeedError, match="rate"):
            step_time(operators(unpacking), no_clock, PLAIN)


def test_copies_to_the_host_overlap_with_the_computation_until_it_waits_for_them() -> None:
    """A copy of 3 s starts after 2 s of computation; 4 s more run beside it, 1 s after it."""
    events = [
        (2.0, False, 0),
        (0.0, False, Wait.COPIES_FOR_COMPUTE),
        (3.0, True, 0),
        (0.0, False, Wait.COPIES_MARKED),
        (4.0, False, 0),
        (0.0, False, Wait.COMPUTE_FOR_MARK),
        (1.0, False, 0),
    ]
    device, copies, streams = (np.array(column) for column in zip(*events, strict=True))
    host, no_waits = np.zeros(len(events)), np.array([], np.int64)
    assert two_stream_seconds(host, device, copies, streams, no_waits) == pytest.approx(7.0)
    device[2] = 9.0  # now the computation waits for it
    assert two_stream_seconds(host, device, copies, streams, no_waits) == pytest.approx(12.0)


def test_a_copy_takes_the_time_of_the_pcie_link() -> None:
    """16 lanes of generation 4 carry 31.5 GB/s, of which copies are assumed to reach 0.8."""
    copy = operator(OperatorClass.HOST_COPY, bytes=31.5e9 * 0.8, launches=1)
    assert timeline_of(operators(copy), A100, PLAIN).device.sum() == pytest.approx(1.0)


def test_the_host_updates_at_the_rate_of_its_memory() -> None:
    """All ranks of a node share 40 GB/s of it; the GPU does nothing meanwhile."""
    update = operators(operator(OperatorClass.HOST_MEMORY, bytes=40e9, launches=1))
    alone = timeline_of(update, A100, PLAIN)
    assert (alone.host.sum(), alone.device.sum()) == (pytest.approx(1.0, rel=1e-4), 0)
    layout = Parallel(gpus=8, strategy="deepspeed-zero2", nodes=2)
    shared = timeline_of(update, A100, PLAIN, layout)
    assert shared.host.sum() == pytest.approx(4.0, rel=1e-4)


def test_the_intervals_held_nine_of_ten_steps_of_sources_left_out() -> None:
    """Both include the prediction; that of steps that the GPU limits is narrower above."""
    errors = time_errors()
    for one in (errors.of_gpu, errors.of_host):
        assert one.low <= 1 <= one.high
        assert one.sources >= 4
        assert one.covered >= 0.9
    assert errors.of_gpu.high < errors.of_host.high


def test_only_steps_like_the_measured_ones_have_the_interval_of_the_gpu() -> None:
    """Not where the host may limit, for copies to it, for a scan, nor where no products are."""
    constants = EfficiencyConstants(host_kernel_us=10.0)
    of_gpu, of_host = (
        pytest.approx((one.below, one.above))
        for one in (time_errors().of_gpu, time_errors().of_host)
    )

    def errors(*rows: tuple[OperatorClass, Rate, dict[str, float]], gpu: Gpu = A100) -> object:
        return constants.relative_errors(step_time(operators(*rows), gpu, constants))

    assert errors(moving(31e-6)) == of_gpu
    assert errors(moving(29e-6)) == of_host
    assert errors(moving(1e-3), operator(OperatorClass.SCAN, flops=1.0)) == of_host
    assert errors(moving(1e-3), gpu=load_catalog().gpu("T4")) == of_host
    copying = operators(moving(1e-3), moving(0.0))
    copying.kinds[1], copying.names[1] = Kind.STREAM, Wait.COPIES_FOR_COMPUTE
    assert not step_time(copying, A100, constants).is_of_gpu
    constants = constants.model_copy(update={"error": 0.1})  # as calibrated
    assert errors(moving(31e-6)) == (0.1, 0.1)


def test_a_step_on_a_slower_host_needs_more_work_on_the_gpu() -> None:
    """The same kernel is the limit beside the assumed host, and not beside one twice as slow."""
    slow = PLAIN.model_copy(update={"host_factor": 2.0})
    assert step_time(operators(moving(40e-6)), A100, PLAIN).is_of_gpu
    assert not step_time(operators(moving(40e-6)), A100, slow).is_of_gpu


def test_collectives_among_the_kernels_of_one_stream_are_waited_for() -> None:
    """Tensor parallelism has no other streams; its steps are not those of one GPU."""
    sums = operator(
        OperatorClass.COLLECTIVE, rate=Rate(Collective.ALL_REDUCE), bytes=1e9, products=2, columns=1
    )
    alone, divided = (
        step_time(operators(*rows), A100, PLAIN)
        for rows in ([moving(1e-3)] * 2, [moving(1e-3), sums, moving(1e-3)])
    )
    assert alone.exposed_seconds == 0
    assert divided.exposed_seconds == pytest.approx(divided.seconds - alone.seconds)
    assert divided.exposed_seconds > 1e-3
    assert (alone.is_of_gpu, divided.is_of_gpu) == (True, False)
