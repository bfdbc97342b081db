"""Probes to find the largest batch: ours, compared with Accelerate's and Lightning's.

Run with ``python tests/benchmarks/search_probes.py`` in the environment of the ``bench`` extra.
"""

import gc
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Literal

from trials.search import (
    LikelyLargest,
    ProbeResult,
    Search,
    doubling_and_bisection,
    search_largest_batch,
)

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import LightningModule

SEED = 20240804
LAWS = 200
LARGEST_LIMIT = 256
OUR_LIMIT = 8192  # Lightning's default max_val; the limits end at 256, which ours does not use
GIB = 2**30
EXPECTED_ERROR = 0.06  # of the estimates, whatever their error is
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 1.00 GiB."  # both libraries recognise it

Kind = Literal["affine", "nearly affine", "convex", "concave", "adversarial"]
KINDS: dict[Kind, str] = {
    "affine": "affine",
    "nearly affine": "nearly affine: noise 0.3 % (standard deviation), batch 1 1.7 % high",
    "convex": "convex: grows with batch^1.3",
    "concave": "concave: grows with batch^0.7",
    "adversarial": "adversarial: every peak drawn at random, whatever the batch",
}


@dataclass(frozen=True, slots=True)
class Law:
    """Memory of one made-up fine-tuning: ``fixed + (limit - fixed) * (batch / edge) ** power``.

    Noise is in the peak that is read, not in what fits, so each kind has the limits it was given.

    Attributes:
        name: what the noise is drawn from.
        largest: the largest batch that fits.
        edge: where the memory limit is reached, less than one above the largest batch.
        fixed_share: share of the memory limit taken before any batch.
    """

    kind: Kind
    name: str
    largest: int
    edge: float
    fixed_share: float
    memory_limit_bytes: int

    def probe(self, batch: int) -> ProbeResult:
        if batch > self.largest:
            return ProbeResult(fits=False, peak_memory_bytes=None)
        # What was reported cannot exceed the memory there is.
        peak_bytes = min(int(self._peak_bytes(batch)), self.memory_limit_bytes)
        return ProbeResult(fits=True, peak_memory_bytes=peak_bytes)

    @property
    def power(self) -> float:
        """Power of the batch size that memory grows with."""
        return {"convex": 1.3, "concave": 0.7}.get(self.kind, 1.0)

    def estimate_of_all(self, factor: float) -> LikelyLargest:
        """Estimate whose peaks are those of the law, all wrong by one factor."""
        growing = (1 - self.fixed_share) * factor**self.power
        return LikelyLargest(
            batch=max(1, int(self.edge * factor)),
            fixed_share=1 - self.power * growing / (self.fixed_share + growing),
            error=EXPECTED_ERROR,
        )

    def estimate(self, factor: float, fixed_factor: float = 1.0) -> LikelyLargest:
        """Estimate whose largest batch is ``factor`` times the law's.

        Its peaks are those of an affine law, all wrong by one factor, and the share of the fixed
        part by another.
        """
        growing = (1 - self.fixed_share) * factor
        share = fixed_factor * self.fixed_share / (self.fixed_share + growing)
        return LikelyLargest(
            batch=max(1, int(self.edge * factor)),
            fixed_share=min(share, 1.0),
            error=EXPECTED_ERROR,
        )

    def _peak_bytes(self, batch: int) -> float:
        random = Random(f"{self.name}/{batch}")  # every probe of a batch size has the same result
        if self.kind == "adversarial":
            return self.memory_limit_bytes * 10 ** random.uniform(-6, 0)
        share = self.fixed_share + (1 - self.fixed_share) * (batch / self.edge) ** self.power
        if self.kind == "nearly affine":
            share *= (1 + random.gauss(0, 0.003)) * (1.017 if batch == 1 else 1)
        return self.memory_limit_bytes * share


Estimated = Callable[[Law, Random], LikelyLargest]


def draw_laws(
    kind: Kind, *, number: int = LAWS, seed: int = SEED, largest: int = LARGEST_LIMIT
) -> list[Law]:
    """Laws with limits drawn evenly from 1 to ``largest`` and 5 to 90 % of the memory fixed."""
    random = Random(seed)
    laws = []
    for index in range(number):
        limit = random.randint(1, largest)
        laws.append(
            Law(
                kind=kind,
                name=f"{seed}/{index}",
                largest=limit,
                edge=limit + random.uniform(0.001, 0.999),
                fixed_share=random.uniform(0.05, 0.9),
                memory_limit_bytes=random.choice([24, 40, 48, 80]) * GIB,
            )
        )
    return laws


@dataclass(slots=True)
class Tally:
    """Effort of one contender on one law, counted where the probe is answered."""

    law: Law
    result: int = 0
    probes: int = 0
    misses: int = 0

    def probe(self, batch: int) -> ProbeResult:
        reading = self.law.probe(batch)
        self.probes += 1
        self.misses += not reading.fits
        return reading


@dataclass(slots=True)
class Score:
    """Effort of one contender on many laws."""

    tallies: list[Tally] = field(default_factory=list)

    def mean(self, value: Callable[[Tally], float]) -> float:
        return sum(map(value, self.tallies)) / len(self.tallies)

    @property
    def probes(self) -> float:
        return self.mean(lambda tally: tally.probes)

    @property
    def misses(self) -> float:
        return self.mean(lambda tally: tally.misses)

    @property
    def exact(self) -> float:
        return self.mean(lambda tally: tally.result == tally.law.largest)

    @property
    def result_share(self) -> float:
        return self.mean(lambda tally: tally.result / tally.law.largest)


def score(contender: Callable[[Tally], int], laws: list[Law]) -> Score:
    """Let one contender find every law's limit."""
    result = Score()
    for law in laws:
        tally = Tally(law)
        tally.result = contender(tally)
        result.tallies.append(tally)
    return result


def drive(search: Search, probe: Callable[[int], ProbeResult]) -> int:
    """Run a search to its end, answering each batch size with ``probe``."""
    reading: ProbeResult | None = None
    while True:
        try:
            batch = next(search) if reading is None else search.send(reading)
        except StopIteration as end:
            largest: int = end.value
            return largest
        reading = probe(batch)


def our_search(law: Law, estimate: LikelyLargest | None = None) -> Search:
    """Search under test, started as a trial starts it."""
    return search_largest_batch(
        limit=OUR_LIMIT, memory_limit_bytes=law.memory_limit_bytes, estimate=estimate
    )


def ours(tally: Tally, estimated: Estimated | None = None) -> int:
    """Find the limit with the guided search, with an estimate where one is given."""
    law = tally.law
    estimate = estimated and estimated(law, Random(f"{law.name}/estimate"))
    return drive(our_search(law, estimate), tally.probe)


def plain(tally: Tally) -> int:
    """Find the limit by doubling and bisection."""
    return drive(doubling_and_bisection(limit=OUR_LIMIT), tally.probe)


def accelerate(tally: Tally) -> int:
    """Find the limit with Accelerate's decorator, started at the largest limit there is."""
    import torch  # noqa: PLC0415 - only a run of the benchmark needs the contenders
    from accelerate.utils import find_executable_batch_size  # noqa: PLC0415 - as above

    @find_executable_batch_size(starting_batch_size=LARGEST_LIMIT)
    def train(batch_size: int) -> int:
        if not tally.probe(batch_size).fits:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return batch_size

    return train()


def lightning_module(tally: Tally) -> "LightningModule":
    """Make a real model of five weights that runs out of memory as the law says."""
    import torch  # noqa: PLC0415 - only a run of the benchmark needs the contenders
    from lightning.pytorch import LightningModule  # noqa: PLC0415 - as above

    # So long that the finder never reaches its end: it tries at most 2 * 256, three steps each.
    dataset = torch.utils.data.TensorDataset(torch.zeros(8 * LARGEST_LIMIT, 4))

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 1  # set by the finder
            self.linear = torch.nn.Linear(4, 1)

        def train_dataloader(self) -> object:
            return torch.utils.data.DataLoader(dataset, batch_size=self.batch_size)

        def configure_optimizers(self) -> object:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def training_step(self, batch: list["torch.Tensor"], batch_idx: int) -> "torch.Tensor":
            # A probe is one batch size tried, however many steps the finder runs with it.
            if batch_idx == 0 and not tally.probe(len(batch[0])).fits:
                raise RuntimeError(OUT_OF_MEMORY)
            return self.linear(batch[0]).mean()

    return Module()


def lightning(tally: Tally, *, mode: Literal["power", "binsearch"], margin: float = 0.05) -> int:
    """Find the limit with Lightning's BatchSizeFinder.

    Other settings keep their defaults: init_val 2, at most 25 trials of 3 steps each. The margin is
    the share by which binsearch reduces its result.
    """
    from lightning.pytorch import Trainer  # noqa: PLC0415 - only a run needs the contenders
    from lightning.pytorch.tuner import Tuner  # noqa: PLC0415 - as above

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            logger=False,
            max_epochs=1,
        )
        # The Tuner runs the BatchSizeFinder callback and stops before the training after it.
        tuner, module = Tuner(trainer), lightning_module(tally)
        largest = tuner.scale_batch_size(module, mode=mode, margin=margin)
    assert largest is not None
    return largest


CONTENDERS: dict[str, Callable[[Tally], int]] = {
    "ours": ours,
    "doubling and bisection": plain,
    "Accelerate `find_executable_batch_size`": accelerate,
    "Lightning `BatchSizeFinder`, power": partial(lightning, mode="power"),
    "Lightning `BatchSizeFinder`, binsearch": partial(lightning, mode="binsearch"),
    "Lightning `BatchSizeFinder`, binsearch, margin 0": partial(
        lightning, mode="binsearch", margin=0.0
    ),
}


def contender_rows() -> Iterator[str]:
    """Lines of the first table: all contenders on the same laws."""
    laws = draw_laws("affine")
    yield "| method | probes | of them out of memory | exact | result / limit |"
    yield "|---|---:|---:|---:|---:|"
    for name, contender in CONTENDERS.items():
        result = score(contender, laws)
        yield (
            f"| {name} | {result.probes:.1f} | {result.misses:.1f} "
            f"| {result.exact:.0%} | {result.result_share:.0%} |"
        )


def kind_rows() -> Iterator[str]:
    """Lines of the second table: ours and the plain search on each kind of law."""
    yield (
        "| law | limits | probes, ours | plain | out of memory, ours | plain "
        "| exact, ours | worst, ours - plain |"
    )
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for kind, description in KINDS.items():
        for largest in (LARGEST_LIMIT, 32):
            laws = draw_laws(kind, largest=largest)
            guided, bisected = score(ours, laws), score(plain, laws)
            pairs = zip(guided.tallies, bisected.tallies, strict=True)
            worst = max(ours_on.probes - plain_on.probes for ours_on, plain_on in pairs)
            yield (
                f"| {description} | 1 to {largest} | {guided.probes:.1f} | {bisected.probes:.1f} "
                f"| {guided.misses:.1f} | {bisected.misses:.1f} "
                f"| {guided.exact:.0%} | {worst:+d} |"
            )


def _within(random: Random) -> float:
    return random.uniform(0.94, 1.06)


ESTIMATES: dict[str, Estimated | None] = {
    "none": None,
    "within 6 % at every batch size": lambda law, random: law.estimate_of_all(_within(random)),
    "right": lambda law, _: law.estimate(1),
    "within 6 %": lambda law, random: law.estimate(_within(random)),
    "within 6 %, fixed share too": lambda law, random: law.estimate(
        _within(random), _within(random)
    ),
    "20 % high": lambda law, _: law.estimate(1.2),
    "20 % low": lambda law, _: law.estimate(0.8),
    "50 % high": lambda law, _: law.estimate(1.5),
    "50 % low": lambda law, _: law.estimate(0.5),
    "3 times too high": lambda law, _: law.estimate(3),
    "3 times too low": lambda law, _: law.estimate(1 / 3),
}


def estimate_rows() -> Iterator[str]:
    """Lines of the third table: ours with estimates, on each kind of law."""
    yield f"| estimate | {' | '.join(KINDS)} | worst, ours - plain |"
    yield f"|---|{'---:|' * (len(KINDS) + 1)}"
    drawn = [draw_laws(kind) for kind in KINDS]
    bisected = [tally.probes for laws in drawn for tally in score(plain, laws).tallies]
    for name, estimated in ESTIMATES.items():
        scores = [score(partial(ours, estimated=estimated), laws) for laws in drawn]
        probes = [tally.probes for result in scores for tally in result.tallies]
        worst = max(used - plainly for used, plainly in zip(probes, bisected, strict=True))
        means = " | ".join(f"{result.probes:.1f}" for result in scores)
        yield f"| {name} | {means} | {worst:+d} |"


def main() -> None:
    """Print the tables as Markdown."""
    # Both libraries log, and collect garbage before every trial, which is slow over all of torch
    # unless the imported objects are frozen. Neither changes the counts.
    import accelerate  # noqa: F401, PLC0415 - see above
    import lightning.pytorch  # noqa: F401, PLC0415 - see above

    gc.freeze()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for row in (*contender_rows(), "", *kind_rows(), "", *estimate_rows()):
        print(row)  # noqa: T201 - the tables are the output


if __name__ == "__main__":
    main()
