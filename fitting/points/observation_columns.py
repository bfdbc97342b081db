"""Columns of numbers that laws need of any number of observations.

A log can have a million probes of ten thousand cells. The columns hold every cell and environment
once and a row of numbers per probe, so that the records themselves need not stay in memory.
"""

import statistics
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from fitting.numerics.arrays import BoolArray, FloatArray, IntArray
from trials.records.cell import Cell
from trials.records.observation import Basis, Environment, Observation, Outcome, Purpose

BASES = tuple(sorted(Basis))
OUTCOMES = tuple(Outcome)
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
NOWHERE = -1  # environment of a child that was killed before it reported one


@dataclass(frozen=True, slots=True)
class Columns:
    """Observations, a row for each, in their order.

    Attributes:
        cells: distinct cells, in the order of appearance.
        environments: distinct environments, in the order of appearance.
        cell: (rows,) index of the cell.
        environment: (rows,) index of the environment; ``NOWHERE`` without one.
        basis: (rows,) index in ``BASES``.
        outcome: (rows,) index in ``OUTCOMES``.
        purpose: (rows,) index in ``PURPOSES``.
        repeat: (rows,) number of the visit to the batch size.
        attempt: (rows,) number of the attempt at that visit.
        batch_size: (rows,) examples per step.
        memory_limit_bytes: (rows,) memory limit of the probe.
        model_bytes: (rows,) bytes of weights and buffers; nan without a measurement.
        peak_bytes: (rows,) peak of allocated bytes; nan without a measurement.
        step_seconds: (rows,) median of the timed steps; nan without timed steps.
    """

    cells: tuple[Cell, ...]
    environments: tuple[Environment, ...]
    cell: IntArray
    environment: IntArray
    basis: IntArray
    outcome: IntArray
    purpose: IntArray
    repeat: IntArray
    attempt: IntArray
    batch_size: FloatArray
    memory_limit_bytes: FloatArray
    model_bytes: FloatArray
    peak_bytes: FloatArray
    step_seconds: FloatArray

    def ended(self, rows: IntArray, *outcomes: Outcome) -> BoolArray:
        """(rows,) mask of the probes that ended with one of the outcomes."""
        return np.isin(self.outcome[rows], [OUTCOMES.index(outcome) for outcome in outcomes])

    @property
    def timed(self) -> BoolArray:
        """(rows,) mask of the timed ladder probes that fit and have an environment.

        A visit that was timed again counts with its last attempt, as in ``without_superseded``.
        """
        every = np.arange(len(self.cell))
        is_ladder = self.purpose == PURPOSES.index("ladder")
        timed = np.flatnonzero(is_ladder & self.ended(every, Outcome.FITS))
        order, begins = _groups(self.cell[timed], self.batch_size[timed], self.repeat[timed])
        timed = timed[order]
        number, attempt = np.cumsum(begins) - 1, self.attempt[timed]
        last = np.zeros(begins.sum(), np.int64)
        np.maximum.at(last, number, attempt)
        is_last = np.zeros(len(every), np.bool_)
        is_last[timed[attempt == last[number]]] = True
        return np.asarray(is_last & (self.environment != NOWHERE) & np.isfinite(self.step_seconds))

    def without_repeats(self) -> "Columns":
        """The same of one run without later rows of the same key."""
        parts_of_key = (self.cell, self.purpose, self.batch_size, self.repeat, self.attempt)
        order, begins = _groups(*parts_of_key)
        first = np.sort(order[begins])
        arrays = (getattr(self, name)[first] for name in Columns.__slots__[2:])
        return Columns(self.cells, self.environments, *arrays)


def _groups(*columns: IntArray | FloatArray) -> tuple[IntArray, BoolArray]:
    """Order of the rows by these columns, and where groups of equal rows begin in it."""
    rows = np.stack(columns)
    order = np.lexsort(rows)  # stable: equal rows stay in their order
    begins = np.ones(len(order), np.bool_)
    begins[1:] = np.any(rows[:, order[1:]] != rows[:, order[:-1]], axis=0)
    return order, begins


def columns_of(observations: Iterable[Observation]) -> Columns:
    """Columns of observations, which are iterated once and not kept."""
    cells: dict[Cell, int] = {}
    environments: dict[Environment | None, int] = {None: NOWHERE}
    bases = {basis: place for place, basis in enumerate(BASES)}
    outcomes = {outcome: place for place, outcome in enumerate(OUTCOMES)}
    purposes = {purpose: place for place, purpose in enumerate(PURPOSES)}
    codes, numbers = array("q"), array("d")
    for o in observations:
        if o.is_drawn:
            continue  # laws are of one length
        codes.extend(
            (
                cells.setdefault(o.cell, len(cells)),
                environments.setdefault(o.environment, len(environments) - 1),
                bases[o.basis],
                outcomes[o.outcome],
                purposes[o.purpose],
                o.repeat,
                o.attempt,
            )
        )
        model, peak, step = np.nan, np.nan, np.nan
        if o.memory is not None:
            peak = o.memory.peak_allocated_bytes or np.nan
        if o.measurement is not None:
            model = o.measurement.model_memory_bytes or np.nan
            if o.measurement.step_seconds:
                step = statistics.median(o.micro_batch_seconds)
        numbers.extend((o.batch_size, o.memory_limit_bytes, model, peak, step))
    by_code = np.array(codes, np.int64).reshape(-1, 7).T.copy()
    by_number = np.array(numbers, np.float64).reshape(-1, 5).T.copy()
    return Columns(
        tuple(cells),
        tuple(place for place in environments if place is not None),
        *by_code,
        *by_number,
    )


def joined(parts: Iterable[Columns]) -> Columns:
    """Columns of all observations from the columns of consecutive parts of them."""
    cells: dict[Cell, int] = {}
    environments: dict[Environment, int] = {}
    renumbered = []
    for part in parts:
        cell = [cells.setdefault(c, len(cells)) for c in part.cells]
        environment = [environments.setdefault(e, len(environments)) for e in part.environments]
        renumbered.append(
            replace(
                part,
                cell=np.array(cell, np.int64)[part.cell],
                environment=np.array([*environment, NOWHERE], np.int64)[part.environment],
            )
        )
    arrays = (
        np.concatenate([getattr(part, name) for part in renumbered])
        for name in Columns.__slots__[2:]
    )
    return Columns(tuple(cells), tuple(environments), *arrays)
