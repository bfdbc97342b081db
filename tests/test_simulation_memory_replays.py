"""The largest batch size by few replays: exact for laws that are almost linear."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from trials.simulation.memory.blocks import AllocatorPeaks
from trials.simulation.memory.memory_replays import Replays

Law = Callable[[int], int]
MODEL = 20_000
LAWS: dict[str, Law] = {
    "line": lambda b: MODEL + 100 * b,
    "stairs": lambda b: MODEL + 700 * -(-b // 7),
    "saw": lambda b: MODEL + 100 * b + 90 * (b * 37 % 5),
    "bend": lambda b: MODEL + 40 * b + 60 * max(0, b - 300),
    "flat": lambda _: MODEL,
}


@dataclass
class Device:
    """A device that holds what a law says, and counts the replays."""

    law: Law
    replayed: list[tuple[int, int | None]] = field(default_factory=list)

    def replay(self, batch_size: int, limit: int | None) -> AllocatorPeaks:
        self.replayed.append((batch_size, limit))
        held = self.law(batch_size)
        if limit is not None and held > limit:
            return AllocatorPeaks(self.in_use(batch_size), limit, 1, None)
        return AllocatorPeaks(self.in_use(batch_size), held, 0, None)

    def in_use(self, batch_size: int) -> int:
        """Slightly less than the reserved memory, as on a real device."""
        return self.law(batch_size) * 9 // 10

    def replays(self) -> Replays:
        return Replays(self.replay, self.in_use, {})


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("limit", [20_100, 20_199, 20_200, 21_000, 31_500, 58_000, 90_000])
def test_the_largest_batch_fits_and_one_more_does_not(name: str, limit: int) -> None:
    """At the batch limit no larger size is replayed."""
    law, device = LAWS[name], Device(LAWS[name])
    largest = device.replays().largest(limit, 500)
    if largest >= 2:
        assert law(largest) <= limit
    if largest < 500:
        assert law(largest + 1) > limit
    assert max((b for b, _ in device.replayed), default=0) <= 500


def test_few_replays_suffice_and_none_is_repeated() -> None:
    """The first limit of a saw takes four; another GPU's replays reduce it to two or three."""
    device = Device(LAWS["saw"])
    replays = device.replays()
    counts = []
    for limit in (58_000, 47_000, 69_000, 58_000):
        before = len(device.replayed)
        replays.largest(limit, 65_536)
        counts.append(len(device.replayed) - before)
    assert counts[0] <= 6
    assert max(counts[1:3]) <= 4
    assert counts[3] == 0
    assert len(set(device.replayed)) == len(device.replayed)


def test_a_replay_answers_for_other_batches_and_limits() -> None:
    """A fit covers smaller batches and larger memories; a miss covers the opposite."""
    replays = Device(LAWS["line"]).replays()
    largest = replays.largest(50_000, 65_536)
    assert largest == 300
    assert [replays.fits(b, 50_000) for b in (2, 300, 301, 4000)] == [True, True, False, False]
    assert replays.fits(300, 60_000) is True
    assert replays.fits(301, 49_000) is False
    assert replays.fits(390, 60_000) is None


def test_a_replay_below_its_limit_counts_as_unlimited() -> None:
    """A replay that reaches its limit is kept with its outcome."""
    device = Device(LAWS["line"])
    replays = device.replays()
    assert replays.within(10, 50_000) == replays.without_limit(10) == replays.within(10, 40_000)
    assert replays.within(400, 50_000).retries == 1
    assert replays.within(400, 50_000).peak_reserved_bytes == 50_000
    assert device.replayed == [(10, 50_000), (400, 50_000)]
