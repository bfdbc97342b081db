"""Recorder of one rank's step: collectives, and operators on its own shards."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from trials.devices.storages import is_distributed, local_tensor
from trials.ranks.collective_counts import collective_call
from trials.simulation.recording import COLLECTIVES, Collective, Kind, Numbers, OperatorClass, Rate
from trials.simulation.tracing.operator_costs import tensors_in, touched_bytes
from trials.simulation.tracing.ranks.host_work import host_works, is_on_host, is_waited_for
from trials.simulation.tracing.shape_rules import ShapeEffects
from trials.simulation.tracing.tracer import NO_NUMBERS, QUESTIONS, Tracer


class RankTracer(Tracer):  # type: ignore[no-untyped-call]
    """Records the events of one rank's step.

    ``has_host`` says whether the host has tensors, which are not in the memory of the GPU.
    """

    def __init__(self, *args: Any, has_host: bool, **options: Any) -> None:
        self._has_host = has_host
        self._accumulated: set[int] = set()
        super().__init__(*args, **options)

    def is_of_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in the memory of the host, apart from the GPU's."""
        return self._has_host and is_on_host(local_tensor(tensor))

    def note_tensor(self, tensor: torch.Tensor) -> int:
        """Note a tensor on the GPU."""
        return 0 if self.is_of_host(tensor) else super().note_tensor(tensor)

    def waits_for(self, tensor: torch.Tensor) -> bool:
        """Whether the host waits for the device before it reads a tensor."""
        return not self.is_of_host(tensor) and super().waits_for(tensor)

    def _evaluated(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ShapeEffects]:
        """Result of an operator, and its effects; those of the host's tensors take its memory."""
        result, effects = super()._evaluated(func, args, kwargs)
        if self._has_host and any(map(is_on_host, tensors_in((args, kwargs, result)))):
            works = host_works(func, args, kwargs, result)
            waits = is_waited_for(func, args, kwargs, result)
            effects = replace(effects, workspace=NO_NUMBERS, works=works, waits=waits)
        return result, effects

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation on shapes alone and record it; distributed tensors divide theirs."""
        if func in QUESTIONS:  # two of three calls in a step by DeepSpeed
            return super().__torch_dispatch__(func, types, args, kwargs)
        if is_distributed(types):
            return NotImplemented
        if (call := collective_call(func, args)) is not None:
            kind, whole = COLLECTIVES[call.collective], call.buffer_bytes
            if len(call.group) > 1:
                numbers = _numbers(whole, call.group)
                self.event(Kind.RUN, 4 * OperatorClass.COLLECTIVE + kind, numbers)
            elif kind is not Collective.ALL_REDUCE:  # NCCL copies, unless it works in place
                copied = (2.0 * whole, *NO_NUMBERS[1:-1], 1.0)
                self.event(Kind.RUN, 4 * OperatorClass.MEMORY + Rate.BF16, copied)
        if func.namespace == "c10d":
            return func(*args, **(kwargs or {}))
        if func.namespace == "fsdp":  # copies between parameters and the buffer of a collective
            moved = 2.0 * sum(touched_bytes(t) for t in tensors_in((args[0],)))
            numbers = (moved, *NO_NUMBERS[1:-1], 1.0)
            self.event(Kind.RUN, 4 * OperatorClass.MEMORY + Rate.BF16, numbers)
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def made(self, identity: int, size: int) -> None:
        """Record a new storage; a gathered weight that was freed is none until it comes back."""
        if size:
            super().made(identity, size)

    def accumulated(self, parameter: torch.Tensor) -> None:
        """Record a gradient; those of parameters reduced together are one storage."""
        assert parameter.grad is not None
        grad = local_tensor(parameter.grad)
        name = self.name_of(grad)
        if name is None:
            return
        self._accumulated.add(name)
        moved = 3.0 * grad.numel() * grad.element_size()
        for index in range(len(self._events) - 1, -1, -1):
            kind, other, segment, numbers = self._events[index]
            if segment != self.segment or (kind is Kind.MADE and other == name):
                break
            if kind is Kind.ACCUMULATED and other == name:
                del self._events[index]
                moved += numbers[0]
                break
        self.event(Kind.ACCUMULATED, name, (moved, *NO_NUMBERS[1:-1], 1.0))

    def copied_to_host(self, gradient: torch.Tensor) -> None:
        """Record a gradient on the host, where later micro-batches add theirs to it."""
        moved = 3.0 * gradient.numel() * gradient.element_size()
        self.event(Kind.ADDED_ON_HOST, 0, (moved, *NO_NUMBERS[1:-1], 1.0))

    def dropped(self, tensor: torch.Tensor) -> None:
        """Record that what a gradient was reduced in is let go, where it is the gradient itself."""
        name = self.name_of(tensor)
        if name in self._accumulated:
            self.event(Kind.DROPPED, name, NO_NUMBERS)


def _numbers(whole_bytes: int, group: Sequence[int]) -> Numbers:
    """Numbers of a collective (``Collective``) of ranks at equal distances."""
    distance = group[1] - group[0]
    return (float(whole_bytes), 0.0, 0.0, 0.0, float(distance), float(len(group)), 1.0)
