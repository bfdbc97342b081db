"""One process of several that train a model together: its place, and what it agrees on with others.

Each process is one rank with a device of its own. They meet at a store on the first one's machine,
and exchange tensors by NCCL on GPUs and by gloo on CPUs.
"""

import contextlib
import datetime as dt
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trials.devices.storages import StorageWatch
from trials.models.weight_placement import Destination
from trials.ranks.sharding import (
    GROUP_NAMES,
    MESH_NAMES,
    Meshes,
    divide,
    unseen_propagation,
    watched_resizes,
)
from trials.ranks.weight_slices import HostCopy, WeightSlices
from trials.recipes.host_bytes import is_built_in_slices
from trials.recipes.parallel import Parallel
from trials.recipes.recipe import Recipe
from trials.records.cell import Weights

HOST = "127.0.0.1"
# The parent of the ranks ends those that hang, and says which: nothing else may end them earlier.
PATIENCE = dt.timedelta(days=1)
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


class Rank:
    """This process as one of the ranks. Made once in a process.

    Args:
        number: number of this rank, from 0.
        parallel: layout of all ranks.
        device: type of the rank's device, ``cpu`` or ``cuda``; no context is made on it.
        port: port at which the ranks meet.
        listening: descriptor of the socket that listens there; the first rank alone uses it.
        host: address of the first rank's machine.
        interface: network interface of this machine that reaches the others.

    Attributes:
        number: as given.
        parallel: as given.
        device: the device of its tensors.
    """

    def __init__(  # noqa: PLR0913 - its place among all ranks
        self,
        number: int,
        parallel: Parallel,
        *,
        device: str,
        port: int,
        listening: int | None,
        host: str = HOST,
        interface: str = LOOPBACK,
    ) -> None:
        self.number = number
        self.parallel = parallel
        self.device = torch.device(device)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        is_first = number == 0
        store = TCPStore(
            host,
            port,
            parallel.gpus,
            is_master=is_first,
            master_listen_fd=listening if is_first else None,
            timeout=PATIENCE,
        )
        # gloo beside NCCL: what ranks agree on takes no time and memory of their GPUs.
        backend = "gloo" if device == "cpu" else f"cpu:gloo,{device}:nccl"
        dist.init_process_group(
            backend, store=store, rank=number, world_size=parallel.gpus, timeout=PATIENCE
        )

    @property
    def backend(self) -> str:
        """Library that moves tensors between the ranks."""
        return "gloo" if self.device.type == "cpu" else "nccl"

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a shard of the weights, not all of them."""
        return self.parallel.is_sharded

    @property
    def shards(self) -> int:
        """Parts that the weights are divided into."""
        return self.parallel.shards

    def versions(self) -> dict[str, str]:
        """Version of that library, by its name; gloo is part of PyTorch and has none."""
        if self.backend == "gloo":
            return {}
        version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        return {"nccl": ".".join(map(str, version))}

    def meet(self) -> None:
        """Wait for all ranks, by the first collective on their devices, which opens their links."""
        dist.all_reduce(torch.zeros(1, device=self.device))

    def collectives(self) -> int:
        """Number of collectives that this rank has begun, in all groups that it is part of."""
        groups = list(dist.distributed_c10d._world.pg_map)  # noqa: SLF001 - no public name
        backends: list[Any] = [group._get_backend(self.device) for group in groups]  # noqa: SLF001 - as above
        return sum(backend._get_sequence_number_for_group() for backend in backends)  # noqa: SLF001 - as above

    def largest(self, value: float) -> float:
        """Largest value of all ranks; each calls it with its own."""
        values = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return float(values)

    def seconds_of(self, collective: Callable[[], object], repeats: int = 1) -> float:
        """Mean seconds of a collective, repeated without a pause, on the slowest rank."""
        self._synchronise()
        before = time.monotonic()
        for _ in range(repeats):
            collective()
        self._synchronise()
        return self.largest((time.monotonic() - before) / repeats)

    def _synchronise(self) -> None:
        """Wait until the device has done all work."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def shard(self, model: nn.Module, recipe: Recipe, destination: Destination) -> None:
        """Divide the weights of a model among the ranks, in place, where the strategy does."""
        if not self.is_sharded or self.parallel.zero_stage is not None:
            return  # DeepSpeed divides them in the first step
        is_pinned = self.device.type != "cpu"
        meshes, restore = self._meshes(), destination.restore
        divide(model, self.parallel, recipe, meshes, is_pinned=is_pinned, restore=restore)

    def _meshes(self) -> Meshes:
        kind, layout = self.device.type, self.parallel
        if layout.replicas is None and layout.degree in {None, layout.gpus}:
            every = DeviceMesh.from_group(dist.distributed_c10d._get_default_group(), kind)  # noqa: SLF001 - no public name
            return Meshes(every, None) if layout.degree is None else Meshes(None, every)
        inner, names = (
            (self.shards, MESH_NAMES) if layout.degree is None else (layout.degree, GROUP_NAMES)
        )
        mesh = init_device_mesh(kind, (layout.gpus // inner, inner), mesh_dim_names=names)
        if layout.degree is None:
            return Meshes(mesh, None)
        return Meshes(mesh[names[0]], mesh[names[1]])

    @contextlib.contextmanager
    def observed(self, watch: StorageWatch) -> Iterator[None]:
        """Let a watch see all memory of a step, and that of this rank alone."""
        with watched_resizes(watch), unseen_propagation():
            yield


def slowest(rank: Rank | None) -> Callable[[float], float]:
    """Function of a value that returns the largest of all ranks; without ranks, the value."""
    return (lambda value: value) if rank is None else rank.largest


def build_destination(
    rank: Rank | None, device: torch.device, recipe: Recipe, weights: Weights
) -> Destination:
    """Destination of a model's weights until ``Rank.shard`` divides it.

    Args:
        rank: this process among others; None where it is alone.
        device: its device.
        recipe: recipe of the model.
        weights: whether its weights are drawn or loaded.
    """
    if rank is None or rank.shards == 1:
        return Destination(device)
    host = torch.device("cpu")
    if not is_built_in_slices(rank.parallel, recipe):
        # What the host loads whole would pass through the device for nothing.
        return Destination(host) if weights == "pretrained" else HostCopy(device)
    return WeightSlices(device, host if rank.parallel.shards_on_host else device)
