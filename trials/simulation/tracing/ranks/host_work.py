"""Work on the tensors that DeepSpeed keeps in the host's memory, and copies to and from a GPU."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from trials.simulation.recording import Numbers, OperatorClass, Rate
from trials.simulation.tracing.operator_costs import (
    DeclaredKernel,
    Described,
    declare,
    describe,
    tensors_in,
    touched_bytes,
)
from trials.simulation.tracing.shape_rules import CPU

aten = torch.ops.aten
COPIES = COPY, CONVERSION = aten.copy_.default, aten._to_copy.default  # noqa: SLF001 - its name


def is_on_host(tensor: Tensor) -> bool:
    """Whether a tensor is on the host, where the GPU's are on a device of their own."""
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return device == CPU


def host_works(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: object
) -> list[Described]:
    """Costs of an operator with tensors on the host, one for each kind of work.

    A copy between GPU and host carries the dtype that the GPU has; the host converts to its own
    (``copy_kernel_cuda`` in ATen's Copy.cu).
    """
    inputs, outputs = tensors_in((args, kwargs)), tensors_in(result)
    on_gpu = [t for t in (*inputs, *outputs) if not is_on_host(t)]
    on_host = [t for t in (*inputs, *outputs) if is_on_host(t)]
    described = describe(func, args, kwargs, result)
    if not on_gpu:
        return [_of_memory(work, numbers) for work, _, numbers in described]
    if func not in COPIES:  # a kernel of the GPU, with a number of the host
        return described
    copied = float(max(map(touched_bytes, on_gpu)))
    works = [(OperatorClass.HOST_COPY, Rate.BF16, _moved(copied))]
    if on_gpu[0].dtype != on_host[0].dtype:
        converted = copied + max(map(touched_bytes, on_host))
        works.append((OperatorClass.HOST_MEMORY, Rate.BF16, _moved(converted)))
    return works


def is_waited_for(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> bool:
    """Whether an operator is a copy between GPU and host that the host waits for."""
    if func is COPY:
        to, source, is_asynchronous = (*args, False)[:3]
    elif func is CONVERSION:
        (source, *_), to, is_asynchronous = args, result, False
    else:
        return False
    is_waited = not kwargs.get("non_blocking", is_asynchronous)
    return is_waited and is_on_host(to) != is_on_host(source)


def _of_memory(work: OperatorClass, numbers: Numbers) -> Described:
    if work is OperatorClass.VIEW:
        return work, Rate.BF16, numbers
    return OperatorClass.HOST_MEMORY, Rate.BF16, _moved(numbers[0])


def _moved(size: float) -> Numbers:
    return (size, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)


class NoCompiledAdam:
    """Stands in for the builder of DeepSpeed's AdamW on the CPU, which would compile it."""

    def load(self) -> "NoCompiledAdam":
        """Return the optimizer's functions."""
        return self

    def create_adam(self, *options: object) -> None:
        """Do nothing."""

    def destroy_adam(self, number: int) -> None:
        """Do nothing."""

    def adam_update(self, *arguments: Any) -> None:
        """Update a parameter, the fourth from the end, by its gradient and both moments."""
        torch.ops.simulated.host_adam(*arguments[-4:])


def _updated(parameter: Tensor, grad: Tensor, average: Tensor, square: Tensor) -> None:
    del parameter, grad, average, square


def _update_work(args: Any, _result: Any) -> list[Described]:
    read = sum(map(touched_bytes, args))
    return [(OperatorClass.HOST_MEMORY, Rate.FP32, _moved(2.0 * read - touched_bytes(args[1])))]


declare(
    "host_adam(Tensor(a!) parameter, Tensor grad, Tensor(b!) average, Tensor(c!) square) -> ()",
    _updated,
    DeclaredKernel(_update_work),
)
