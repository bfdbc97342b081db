"""Measurement of a running training's steps: memory, time, and the lengths of their rows."""

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from trials.devices.cpu import processor_name
from trials.devices.cuda import allocator_settings, cuda_versions
from trials.devices.device import of_steps
from trials.devices.live_tensors import LiveTensorCounter
from trials.devices.nvml import Nvml
from trials.devices.software import environment
from trials.records.observation import Environment, MemoryReading, StopReason
from trials.records.timing_rule import TimingRule

MEMORY_STEPS = 3  # as in a trial: the optimizer's state exists after the first
UNLIMITED = 2**62
RULE = TimingRule()


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step.

    Attributes:
        rows: (rows, tokens) of each micro-batch.
        memory: its memory; None where only its time was measured.
    """

    seconds: float
    rows: tuple[tuple[int, int], ...]
    memory: MemoryReading | None


def all_are_long(steps: Iterable[MeasuredStep], tokens: int) -> bool:
    """Whether all rows of some steps have at least so many tokens."""
    return all(length >= tokens for step in steps for _, length in step.rows)


class StepMeter:
    """Meter of the first steps of a training: three for memory, then some for time.

    Args:
        model: the model, with its adapters.
        optimizer: its optimizer.
        whole_step: (rows, micro-batches) of a step that is timed; others, such as the last of an
            epoch, are left out.
    """

    def __init__(self, model: Any, optimizer: Any, whole_step: tuple[int, int]) -> None:
        self._model = model
        self._optimizer = optimizer
        self._whole_step = whole_step
        self._device = next(model.parameters()).device
        self._rows: list[tuple[int, int]] = []
        self._counter: LiveTensorCounter | None = None
        self._started: float | None = None
        self._retries = 0
        self.memory_steps: list[MeasuredStep] = []
        self.timed_steps: list[MeasuredStep] = []
        embeddings = model.get_input_embeddings()
        self._hook = embeddings.register_forward_pre_hook(self._note_rows)

    @property
    def is_measuring_memory(self) -> bool:
        """Whether the next step is one of those whose memory is measured."""
        return len(self.memory_steps) < MEMORY_STEPS

    @property
    def stop_reason(self) -> StopReason | None:
        """Reason to time no further step; None to time another."""
        return RULE.stop_reason([step.seconds for step in self.timed_steps])

    def begin(self) -> None:
        """Begin a step."""
        self._rows.clear()
        if self.is_measuring_memory:
            self._begin_memory()
        self._synchronise()
        self._started = time.perf_counter()

    def end(self) -> None:
        """End a step."""
        if self._started is None:
            return
        self._synchronise()
        seconds, self._started = time.perf_counter() - self._started, None
        rows = tuple(self._rows)
        if self.is_measuring_memory:
            self.memory_steps.append(MeasuredStep(seconds, rows, self._memory()))
        elif self._is_whole(rows):
            self.timed_steps.append(MeasuredStep(seconds, rows, None))

    def close(self) -> None:
        """Remove what was added to the model."""
        self._hook.remove()
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.__exit__(None, None, None)

    def memory(self) -> MemoryReading:
        """Memory during the measured steps."""
        return of_steps([step.memory for step in self.memory_steps if step.memory is not None])

    def model_memory_bytes(self) -> int:
        """Bytes of the weights and buffers."""
        return sum(tensor.nbytes for tensor in self._held())

    def memory_limit_bytes(self, cpu_bytes: int) -> int:
        """Device memory that the training can take: on a CPU the catalog's, given."""
        if self._device.type != "cuda":
            return cpu_bytes
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device)

    def environment(self) -> Environment:
        """Software and device of this process."""
        threads = torch.get_num_threads()
        if self._device.type != "cuda":
            return environment({}, processor_name(), None, threads)
        properties = torch.cuda.get_device_properties(self._device)
        versions = cuda_versions(Nvml.of(str(properties.uuid)))
        return environment(versions, properties.name, allocator_settings(os.environ), threads)

    def _is_whole(self, rows: tuple[tuple[int, int], ...]) -> bool:
        """Whether a step has all its rows; a packed micro-batch is one row of all its tokens."""
        size, micro_batches = self._whole_step
        return len(rows) == micro_batches and all(count in (1, size) for count, _ in rows)

    def _note_rows(self, module: Any, inputs: tuple[Any, ...]) -> None:
        del module
        if self._started is not None and inputs and inputs[0].dim() == 2:
            count, tokens = inputs[0].shape
            self._rows.append((int(count), int(tokens)))

    def _begin_memory(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._retries = torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0)
            return
        self._counter = LiveTensorCounter([*self._held(), *self._state()], UNLIMITED)
        self._counter.__enter__()

    def _memory(self) -> MemoryReading:
        if self._counter is not None:
            counter, self._counter = self._counter, None
            counter.__exit__(None, None, None)
            return MemoryReading(peak_allocated_bytes=counter.peak_bytes)
        stats = torch.cuda.memory_stats(self._device)
        return MemoryReading(
            peak_allocated_bytes=torch.cuda.max_memory_allocated(self._device),
            peak_reserved_bytes=torch.cuda.max_memory_reserved(self._device),
            allocator_retries=stats.get("num_alloc_retries", 0) - self._retries,
        )

    def _held(self) -> Iterator[torch.Tensor]:
        yield from self._model.parameters()
        yield from self._model.buffers()

    def _state(self) -> Iterator[torch.Tensor]:
        """Tensors of the optimizer's state."""
        optimizer = getattr(self._optimizer, "optimizer", self._optimizer)  # accelerate wraps it
        for state in getattr(optimizer, "state", {}).values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
