"""What laws are fitted to, of any number of observations: columns of numbers.

A log has a million probes of some ten thousand cells. Each cell and each place is kept once, and
of a probe no more than a row of numbers, so that nobody need hold the records themselves.
"""

import statistics
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import numpy as np

from fitting.numerics.arrays import BoolArray, FloatArray, IntArray
from trials.records.cell import Cell
from trials.records.observation import Basis, Environment, Observation, Outcome

BASES = tuple(sorted(Basis))
OUTCOMES = tuple(Outcome)
NOWHERE = -1  # the place of a child that was killed before it said where it ran


@dataclass(frozen=True, slots=True)
class Columns:
    """Observations, a row for each, in the order in which they were given.

    Attributes:
        cells: every cell once, in the order of appearance.
        environments: every place once, alike.
        cell: (rows,) which of the cells.
        environment: (rows,) which of the environments; ``NOWHERE`` where none was told.
        basis: (rows,) which of ``BASES``.
        outcome: (rows,) which of ``OUTCOMES``.
        is_ladder: (rows,) whether throughput was asked for.
        repeat: (rows,) which visit of its batch size.
        attempt: (rows,) which try of that visit.
        batch_size: (rows,) examples per step.
        memory_limit_bytes: (rows,) that the probe was held against.
        model_bytes: (rows,) of weights and buffers; nan without a measurement.
        peak_bytes: (rows,) allocated; nan alike.
        step_seconds: (rows,) the median of the timed steps; nan where none was timed.
    """

    cells: tuple[Cell, ...]
    environments: tuple[Environment, ...]
    cell: IntArray
    environment: IntArray
    basis: IntArray
    outcome: IntArray
    is_ladder: BoolArray
    repeat: IntArray
    attempt: IntArray
    batch_size: FloatArray
    memory_limit_bytes: FloatArray
    model_bytes: FloatArray
    peak_bytes: FloatArray
    step_seconds: FloatArray

    def ended(self, rows: IntArray, *outcomes: Outcome) -> BoolArray:
        """(rows,) whether each of these probes ended so."""
        return np.isin(self.outcome[rows], [OUTCOMES.index(each) for each in outcomes])

    @property
    def timed(self) -> BoolArray:
        """(rows,) which are of the ladder, fitted, were timed, and say where they ran.

        Of a visit that was timed again the last time counts, as in ``standing``.
        """
        every = np.arange(len(self.cell))
        timed = np.flatnonzero(self.is_ladder & self.ended(every, Outcome.FITS))
        visit = np.stack([self.cell[timed], self.batch_size[timed], self.repeat[timed]])
        order = np.lexsort(visit)
        visit, timed = visit[:, order], timed[order]
        begins = np.ones(len(order), np.bool_)
        begins[1:] = np.any(visit[:, 1:] != visit[:, :-1], axis=0)
        of, attempt = np.cumsum(begins) - 1, self.attempt[timed]
        last = np.zeros(begins.sum(), np.int64)
        np.maximum.at(last, of, attempt)
        stands = np.zeros(len(every), np.bool_)
        stands[timed[attempt == last[of]]] = True
        return np.asarray(stands & (self.environment != NOWHERE) & np.isfinite(self.step_seconds))


def columns_of(observations: Iterable[Observation]) -> Columns:
    """The columns of observations, which are looked at once and not kept."""
    cells: dict[Cell, int] = {}
    environments: dict[Environment | None, int] = {None: NOWHERE}
    bases = {basis: place for place, basis in enumerate(BASES)}
    outcomes = {outcome: place for place, outcome in enumerate(OUTCOMES)}
    codes, numbers = array("q"), array("d")
    for o in observations:
        codes.extend(
            (
                cells.setdefault(o.cell, len(cells)),
                environments.setdefault(o.environment, len(environments) - 1),
                bases[o.basis],
                outcomes[o.outcome],
                o.purpose == "ladder",
                o.repeat,
                o.attempt,
            )
        )
        model, peak, step = np.nan, np.nan, np.nan
        if o.measurement is not None:
            model = o.measurement.model_memory_bytes
            peak = o.measurement.memory.peak_allocated_bytes
            if o.measurement.step_seconds:
                step = statistics.median(o.measurement.step_seconds)
        numbers.extend((o.batch_size, o.memory_limit_bytes, model, peak, step))
    by_code = np.array(codes, np.int64).reshape(-1, 7).T.copy()
    by_number = np.array(numbers, np.float64).reshape(-1, 5).T.copy()
    return Columns(
        cells=tuple(cells),
        environments=tuple(each for each in environments if each is not None),
        cell=by_code[0],
        environment=by_code[1],
        basis=by_code[2],
        outcome=by_code[3],
        is_ladder=by_code[4].astype(bool),
        repeat=by_code[5],
        attempt=by_code[6],
        batch_size=by_number[0],
        memory_limit_bytes=by_number[1],
        model_bytes=by_number[2],
        peak_bytes=by_number[3],
        step_seconds=by_number[4],
    )


def joined(parts: Iterable[Columns]) -> Columns:
    """The columns of all observations, from those of one or more parts of them, in their order."""
    cells: dict[Cell, int] = {}
    environments: dict[Environment, int] = {}
    told = []
    for part in parts:
        cell = [cells.setdefault(each, len(cells)) for each in part.cells]
        environment = [
            environments.setdefault(each, len(environments)) for each in part.environments
        ]
        told.append(
            replace(
                part,
                cell=np.array(cell, np.int64)[part.cell],
                environment=np.array([*environment, NOWHERE], np.int64)[part.environment],
            )
        )
    arrays = {
        field.name: np.concatenate([getattr(part, field.name) for part in told])
        for field in fields(Columns)
        if field.name not in ("cells", "environments")
    }
    return Columns(cells=tuple(cells), environments=tuple(environments), **arrays)
