"""The paper's largest batches, simulated under several assumptions about its runs.

Writes ``fitting/paper/data/simulated_largest_batches.csv``, after half an hour on two cores.
Nothing is fitted: usable memory is the catalog's, and lengths are those of the paper's data. A
batch size survives if two of three runs of it do, which differ only in the lengths that they draw.
"""

import csv
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fitting.paper.published import BLACKMAMBA, DATA, GPUS, MIXTRAL, dataset_lengths, table
from fitting.points.batch_lengths import MULTIPLE, Lengths
from gpu_catalog.catalog import load_catalog
from gpu_catalog.gpu import Gpu
from trials.drawn_lengths import MICRO_BATCHES, DrawnBatch, DrawnLengths, next_size
from trials.recipes.named_recipes import NAMED_RECIPES
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell
from trials.records.compatibility import with_defaults
from trials.records.model import find_model
from trials.simulation.memory.streams import peaks_on_streams
from trials.simulation.run_of_steps import RunOfSteps
from trials.simulation.simulated_cell import SimulatedCell, library_bytes, like
from trials.simulation.simulated_prober import usable_bytes
from trials.simulation.trace_cache import Traces

NAME = "simulated_largest_batches.csv"
TRACED = (512, 256)  # tokens; sizes are affine in them
STEPS = 2  # the second has the optimizer's state
EXAMPLES = 1000  # of the paper's throughput runs (section IV-B3)
CUTOFF = 256  # of LLM-Adapters, from which the paper's data are

MIXED: dict[str, Any] = {"precision": "bf16-mixed", "adapter_dtype": "fp32"}
RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    MIXTRAL: {
        "without checkpointing": {"gradient_checkpointing": False},
        "as the text": {},
        "without checkpointing, sdpa": {"gradient_checkpointing": False, "attention": "sdpa"},
        "without checkpointing, adapters in fp32": {"gradient_checkpointing": False, **MIXED},
        "without checkpointing, adapters and k-bit casts in fp32": {
            "gradient_checkpointing": False,
            "kbit_preparation": True,
            **MIXED,
        },
    },
    BLACKMAMBA: {
        "as the text": {},
        "with checkpointing": {"gradient_checkpointing": True},
        "weights in fp32": {"precision": "bf16-mixed"},
    },
}
Tokens = Callable[[Lengths, int, int], Sequence[int]]
"""Padded tokens per example of each step of a run, for a batch size and a seed."""


def _alike(tokens: Callable[[Lengths, int], float]) -> Tokens:
    """Runs whose steps have one length, whatever the seed."""

    def steps(lengths: Lengths, batch: int, _: int) -> Sequence[int]:
        return [int(-(-tokens(lengths, batch) // MULTIPLE) * MULTIPLE)] * STEPS

    return steps


def _drawn(lengths: Lengths, batch: int, seed: int, count: int) -> tuple[int, ...]:
    """Lengths of drawn batches, each padded to its longest example, and that of the data's."""
    pairs = zip(lengths.tokens.astype(int), lengths.examples.astype(int), strict=True)
    drawn = DrawnLengths(
        histogram=tuple((int(tokens), int(examples)) for tokens, examples in pairs if examples),
        examples=int(lengths.examples.sum()),
        grouped=False,
        multiple=MULTIPLE,
        most_tokens=int(lengths.tokens[-1]) + MULTIPLE,
    )
    return tuple(drawn_batch.tokens for drawn_batch in drawn.batches(batch, seed, count))


def _drawn_examples(lengths: Lengths, batch: int, seed: int) -> Sequence[int]:
    """Longest batch of 1,000 examples after others of them."""
    batches = _drawn(lengths, batch, seed, -(-EXAMPLES // batch))[:-1]
    return (*batches[:MICRO_BATCHES], max(batches))


def _drawn_epoch(lengths: Lengths, batch: int, seed: int) -> Sequence[int]:
    """Batch of the longest example after drawn ones."""
    return _drawn(lengths, batch, seed, MICRO_BATCHES)


SURVIVES: dict[str, Tokens] = {
    "one batch": _alike(lambda lengths, batch: lengths.padded(batch)),
    "ten batches": _alike(lambda lengths, batch: lengths.padded(10 * batch)),
    "1000 examples": _alike(lambda lengths, _: lengths.padded(EXAMPLES)),
    "an epoch": _alike(lambda lengths, _: float(lengths.tokens[-1])),
    "an epoch cut to 256": _alike(lambda lengths, _: float(lengths.cut(CUTOFF).tokens[-1])),
    "median, not padded": _alike(lambda lengths, _: lengths.median),
    "ten drawn batches": lambda lengths, batch, seed: _drawn(lengths, batch, seed, 10)[:-1],
    "1000 drawn examples": _drawn_examples,
    "a drawn epoch": _drawn_epoch,
    "a drawn epoch cut to 256": lambda lengths, batch, seed: _drawn_epoch(
        lengths.cut(CUTOFF), batch, seed
    ),
}
"""Steps that a batch size has to survive, by the name of the assumption."""


class PaperRuns:
    """Simulated steps of one of the paper's models under a recipe."""

    def __init__(self, model_name: str, changes: Mapping[str, Any], traces: Traces) -> None:
        self._gpus = load_catalog()
        name = "paper-mixtral" if model_name == MIXTRAL else "paper-blackmamba"
        fields = NAMED_RECIPES[name].model_dump() | {"adapter_dtype": None} | dict(changes)
        model, a40 = find_model(model_name), self._gpus.gpu("A40")
        self._recipe = with_defaults(Recipe.model_validate(fields), model, a40)
        self._runs = {}
        for sparsity in (1.0, 0.25):
            cell = Cell(
                gpu=a40.key,
                simulated=True,
                model=model_name,
                recipe=self._recipe,
                experts=model.experts,
                active_experts=round(sparsity * (model.experts or 1)),
                seq_len=TRACED[0],
            )
            first = SimulatedCell(cell, model, traces)
            requests = {tokens: like(first, tokens=tokens).request for tokens in TRACED}
            traces.prepare(list(requests.values()))
            self._runs[sparsity] = RunOfSteps({n: traces.get(r) for n, r in requests.items()})

    def largest(self, row: Mapping[str, str], steps: Tokens) -> int:
        """Largest batch of a published row's GPU, sparsity and data; 0 where none survives."""
        gpu, lengths = self._gpus.gpu(GPUS[row["gpu"]]), dataset_lengths()[row["dataset"]]

        def ends(batch: int, tokens: Sequence[int]) -> bool:
            return self._ends(gpu, float(row["sparsity"]), batch, tuple(tokens))

        def fits(batch: int, seed: int) -> bool:
            """Whether the run's longest batch fits alone."""
            return ends(batch, [max(steps(lengths, batch, seed))] * STEPS)

        def survives(batch: int, seed: int) -> bool:
            return fits(batch, seed) and ends(batch, steps(lengths, batch, seed))

        high = 1
        while _most(partial(fits, high)):
            high *= 2
        survived = {high: False}
        while (size := next_size(range(1, high), survived)) is not None:
            survived[size] = _most(partial(survives, size))
        return max((size for size, survives in survived.items() if survives), default=0)

    @cache  # noqa: B019 - the runs of one recipe, as long as it is looked at
    def _ends(self, gpu: Gpu, sparsity: float, batch: int, tokens: tuple[int, ...]) -> bool:
        """Whether a run ends without running out of memory."""
        run, library = self._runs[sparsity], library_bytes(gpu)
        peaks = peaks_on_streams(
            run.moves(batch, [DrawnBatch(length, is_padded=False) for length in tokens]),
            np.r_[library // 2, library // 2, run.held.sizes],
            usable_bytes(gpu, self._recipe),
            expandable_segments=False,
        )
        return peaks.failed_at is None


def _most(ends: Callable[[int], bool]) -> bool:
    """Whether two runs of three end, by seed."""
    first, second = ends(0), ends(1)
    return first if first == second else ends(2)


def main() -> None:
    """Write the table."""
    published = table("largest_batches.csv")
    with (
        TemporaryDirectory() as folder,
        (DATA / NAME).open("w", encoding="utf-8", newline="") as file,
    ):
        traces = Traces(Path(sys.argv[1] if len(sys.argv) > 1 else folder), workers=2)
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("model", "recipe", "survives", "dataset", "gpu", "sparsity", "simulated"))
        for model_name, recipes in RECIPES.items():
            rows = [row for row in published if row["model"] == model_name]
            for recipe, changes in recipes.items():
                runs = PaperRuns(model_name, changes, traces)
                for survives, steps in SURVIVES.items():
                    sizes = [runs.largest(row, steps) for row in rows]
                    for row, size in zip(rows, sizes, strict=True):
                        place = (row["dataset"], row["gpu"], row["sparsity"])
                        writer.writerow((model_name, recipe, survives, *place, size))


if __name__ == "__main__":
    main()
