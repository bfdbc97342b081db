"""Collectives of a rank as the operators that begin them: their kind, buffer and group."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_iter

from gpu_catalog.links.within_nodes import CollectiveName
from trials.devices.storages import OperatorMode
from trials.records.collectives import CollectiveCount

OPERATORS: dict[str, tuple[CollectiveName, int]] = {
    # The name of an operator, its kind, and which argument is the whole buffer.
    "c10d::_allgather_base_": ("all-gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 1),
    "c10d::allreduce_": ("all-reduce", 0),
    "_c10d_functional::all_reduce": ("all-reduce", 0),
}


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One collective that an operator begins.

    Attributes:
        collective: its kind.
        buffer_bytes: bytes of the whole buffer: an all-gather's output, a reduce-scatter's input.
        group: numbers of the ranks that take part.
    """

    collective: CollectiveName
    buffer_bytes: int
    group: Sequence[int]


def collective_call(func: Any, args: Sequence[Any]) -> CollectiveCall | None:
    """Collective that an operator with these arguments begins; None for any other operator."""
    operator = OPERATORS.get(func.name().partition(".")[0])
    if operator is None:
        return None
    name, buffer = operator
    whole = (leaf for leaf in tree_iter(args[buffer]) if isinstance(leaf, torch.Tensor))
    return CollectiveCall(name, sum(t.numel() * t.element_size() for t in whole), _group_of(args))


def _group_of(args: Sequence[Any]) -> list[int]:
    """Numbers of the ranks of a collective, by its operator's arguments."""
    for one in args:
        if isinstance(one, torch.ScriptObject):
            with contextlib.suppress(RuntimeError):  # the reduction is an object, too
                return dist.get_process_group_ranks(dist.ProcessGroup.unbox(one))
    *_, name = args
    groups: Any = dist.distributed_c10d
    return dist.get_process_group_ranks(groups._resolve_process_group(name))  # noqa: SLF001 - no public name


class CollectiveSums:
    """Number and bytes of collectives by kind; those of a rank by itself move nothing."""

    def __init__(self) -> None:
        self._sums: dict[CollectiveName, tuple[int, int]] = {}

    def add(self, call: CollectiveCall | None) -> None:
        """Add a collective, if there is one."""
        if call is None or len(call.group) == 1:
            return
        count, size = self._sums.get(call.collective, (0, 0))
        self._sums[call.collective] = count + 1, size + call.buffer_bytes

    def counts(self) -> tuple[CollectiveCount, ...]:
        """The sums of each kind that there was."""
        kinds: tuple[CollectiveName, ...] = get_args(CollectiveName)
        return tuple(
            CollectiveCount(collective=kind, count=count, buffer_bytes=size)
            for kind in kinds
            for count, size in ([self._sums[kind]] if kind in self._sums else [])
        )


class CollectiveCounter(OperatorMode):
    """Counts the collectives of this rank while active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sums = CollectiveSums()

    def note_result(self, func: Any, args: tuple[Any, ...], result: object) -> None:  # noqa: ARG002 - as of every mode
        """Count the operator if it begins a collective."""
        self.sums.add(collective_call(func, args))
